"""A state folder as it was written once is opened, shown and resumed by this version."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import apsw
import pytest

from maestro_hive import (
    BudgetExceeded,
    CheckpointManager,
    PersonaExecutor,
    RunCancelledError,
    RunFailedError,
    StateManager,
    StatePersistence,
)
from maestro_hive.admin.folder import reading
from maestro_hive.engine.config import StateConfig
from maestro_hive.engine.errors import CircuitBreakerOpen, HelpNeeded, UnrecoverableError
from maestro_hive.engine.plan import UnencodableInputWarning
from maestro_hive.kernel.clock import to_micros
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.records import ChunkKind, EntryKind
from maestro_hive.maestro.state.run_document import DOCUMENT_FORMAT
from maestro_hive.maestro.state.sqlite import connection
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from tests.cli.processes import answer, maestro
from tests.golden import make, program

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
ADVICE = "make a new golden folder: tests/golden/README.md"


def expected() -> dict[str, Any]:
    shown: dict[str, Any] = json.loads((HERE / "folder.json").read_text(encoding="utf-8"))
    return shown


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The golden folder, to be opened and written to."""
    return make.unpack(HERE / "folder.tar.xz", tmp_path / "state")


@pytest.fixture(autouse=True)
def _nothing_called() -> Iterator[None]:
    program.calls.clear()
    yield
    program.calls.clear()


# --- it is of this format, and has all of it --------------------------------------------------------


def schema(folder: Path) -> list[tuple[str, str]]:
    """Return the tables and indexes, without comments and spaces."""
    db = apsw.Connection(str(folder / "journal.db"), vfs="cksmvfs")
    try:
        rows = db.execute(
            "SELECT name, coalesce(sql, '') FROM sqlite_schema ORDER BY name"
        ).fetchall()
    finally:
        db.close()
    return [(str(name), re.sub(r"--.*|\s", "", str(sql))) for name, sql in rows]


def test_the_folder_is_of_the_present_format(folder: Path) -> None:
    found = answer(maestro("doctor", "--json", "--store", folder))
    assert found["format"] == expected()["format"] == connection.FORMAT, ADVICE
    formats = {
        json.loads(path.read_bytes())["document"]["format"]
        for place in ("runs", "checkpoints")
        for path in (folder / place).rglob("*.json")
    }
    assert formats == {DOCUMENT_FORMAT}, ADVICE


def test_it_has_the_tables_of_a_new_one(folder: Path, tmp_path: Path) -> None:
    """A column that is changed in the same format is found here."""
    SqliteStore(tmp_path / "new").close()
    SqliteStore(folder).close()
    assert schema(folder) == schema(tmp_path / "new"), ADVICE


def test_the_folder_has_an_entry_of_every_kind(folder: Path) -> None:
    kinds = make.stored_kinds(folder)
    assert [kind.name for kind in EntryKind if kind not in kinds] == [], ADVICE


def test_the_folder_has_a_value_of_every_tag(folder: Path) -> None:
    assert make.value_tags() - make.stored_tags(folder) == set(), ADVICE


def test_the_page_about_the_format_names_every_kind_and_every_tag() -> None:
    page = (make.ROOT / "docs" / "storage-format.md").read_text(encoding="utf-8")
    kinds = re.findall(r"^\| (\d+) \| `(\w+)` \|", page, flags=re.MULTILINE)
    assert {name.upper(): int(number) for number, name in kinds} == EntryKind.__members__
    assert {tag for tag in make.value_tags() if f"`{tag}`" not in page} == set()


def test_the_folder_has_the_rest_too(folder: Path) -> None:
    """Runs in every state, leases of a dead process, messages, limits, and values of all sizes."""
    runs = expected()["runs"].values()
    statuses = {"success", "failed", "cancelled", "waiting", "stopped", "pending", "bankrupt"}
    assert {run["status"] for run in runs} == statuses
    with reading(folder) as reader:
        leases = {lease.name.partition("/")[0] for lease in reader.leases()}
        large = reader.run("sizes-killed")
        assert large is not None
        values = list(reader.values_of(large.id))
        documents = {each.namespace for each in reader.documents()}
    assert leases == {"run", "semaphore"}
    shared = {"$inbox", "$limits", "$repairs", "circuit_breakers"}
    assert documents == {*shared, "escalations", "default", "golden"}
    assert any(value.base is None and len(value.data) > 256 * 1024 for value in values)
    assert any(value.base is not None for value in values)
    assert any(4096 < len(value.data) < 100 * 1024 for value in values)
    assert {path.name for path in folder.iterdir()} >= {"journal.db-wal", "holders", "checkpoints"}


# --- it is read ---------------------------------------------------------------------------------


def test_the_doctor_finds_a_copy_and_nothing_wrong(folder: Path) -> None:
    found = answer(maestro("doctor", "--json", "--store", folder))
    assert found["problems"] == []
    assert all("is a copy that was made" in warning for warning in found["warnings"])
    fixed = answer(maestro("doctor", "--fix", "--json", "--store", folder))
    assert (fixed["problems"], fixed["warnings"], fixed["repairs"]) == ([], [], [])


def test_it_is_shown_as_it_was(folder: Path) -> None:
    assert make.summary(folder) == expected()


def test_it_is_shown_to_people(folder: Path) -> None:
    runs = expected()["runs"]
    verbs: list[tuple[str, ...]] = [
        ("runs", "--limit", "0"),
        ("breakers",),
        ("checkpoints", "list"),
    ]
    for run_id, run in runs.items():
        verbs.append(("show", run_id))
        verbs.append(("events", run_id))
        verbs += [("show", run_id, step.split()[0]) for step in run["steps"][:1]]
    for verb in verbs:
        done = maestro(*verb, "--store", folder)
        assert (done.returncode, bool(done.stdout)) == (0, True), done


def test_every_run_is_exported_and_imported(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    runs = expected()["runs"]
    for run_id in runs:
        exported = maestro("export", run_id, "-", "--with-values", "--store", folder)
        imported = maestro("import", "-", "--store", other, stdin=exported.stdout)
        assert (exported.returncode, imported.returncode) == (0, 0), (exported, imported)
    for run_id, found in make.summary(other)["runs"].items():
        before = runs[run_id]
        kept = before["events"].rpartition("restored ")[2]  # what came before it no longer counts
        assert found.pop("events") == f"restored {kept}"
        if before["status"] in ("pending", "bankrupt"):  # it has entries, and nobody executes it
            before["status"] = "stopped"
        assert found == {name: before[name] for name in before if name != "events"}
    assert answer(maestro("doctor", "--json", "--store", other))["problems"] == []


# --- it is resumed ------------------------------------------------------------------------------


def same(value: object, other: object) -> bool:
    """Return whether two values are stored by the same bytes: NaN is equal, another order is not."""
    return codec.encode(value).data == codec.encode(other).data


def resumed(folder: Path, run_id: str, **helpers: Any) -> Any:
    with program.opened(folder, **helpers) as hive:
        return asyncio.run(hive.resume(run_id))


def undisturbed(folder: Path, *call: Any, **arguments: Any) -> Any:
    """Return what the program returns where nothing stops it."""
    with program.opened(folder) as hive:
        return hive.run_sync(*call, run_id="r", **arguments)


class Unfinished(NamedTuple):
    """A run that was stopped or killed, and what is called when it goes on."""

    run_id: str
    call: tuple[Any, ...]
    arguments: dict[str, Any]
    calls: list[str]


UNFINISHED = [
    Unfinished("work-stopped", (program.work, "ants"), {"until": 4}, ["count_slowly", "note end"]),
    Unfinished("errors", (program.errors,), {}, ["interrupted errors"]),
    Unfinished(
        "sizes-killed",
        (program.sizes, [2760, 2780], 2800),
        {},
        ["interrupted sizes", "grow 2800"],
    ),
    Unfinished(
        "work-pending",
        (program.work,),
        {},
        ["wait_long loser", "number winner", "wait_long limited", "note work"],
    ),
    Unfinished("work-imported", (program.work, "ants"), {"until": 4}, ["count_slowly", "note end"]),
]


@pytest.mark.parametrize("case", UNFINISHED, ids=lambda case: case.run_id)
def test_a_run_goes_on_as_if_nothing_had_been(
    case: Unfinished, folder: Path, tmp_path: Path
) -> None:
    result = resumed(folder, case.run_id)
    assert program.calls == case.calls
    expected_result = undisturbed(tmp_path / "other", *case.call, **case.arguments)
    assert same(result, expected_result)
    program.calls.clear()
    assert same(resumed(folder, case.run_id), result)
    assert program.calls == []


@pytest.mark.parametrize("run_id", ["work-stopped", "errors"])
def test_a_run_goes_on_from_its_copy_where_the_journal_is_lost(run_id: str, folder: Path) -> None:
    case = next(each for each in UNFINISHED if each.run_id == run_id)
    expected_result = resumed(shutil.copytree(folder, folder.with_name("copy")), run_id)
    program.calls.clear()
    for path in folder.glob("journal.*"):
        path.unlink()
    with program.opened(folder) as hive:
        result = hive.run_sync(*case.call, run_id=run_id, **case.arguments)
    assert same(result, expected_result)
    assert program.calls == case.calls


def test_an_open_question_is_answered(folder: Path) -> None:
    with program.opened(folder) as hive:
        (question,) = hive.questions("ask-waiting")
        assert (question.name, question.about) == ("approve", program.Point(1))
        hive.answer("ask-waiting", "approve", False, question=question.id)
    for run_id, sure in {"ask-waiting": False, "ask-answered": True}.items():
        assert resumed(folder, run_id) == {
            "colour": program.Colour.RED,
            "late": "there was no answer to 'nob",
            "noted": "ask: 2",
            "sure": sure,
        }
    assert program.calls == []
    with reading(folder) as reader:
        assert not {"ask-waiting", "ask-answered"} & {d.key for d in reader.documents("$inbox")}


def test_a_run_that_was_stopped_in_its_clean_up_goes_on_with_it(folder: Path) -> None:
    with pytest.raises(RunCancelledError, match="enough"):
        resumed(folder, "cancelling")
    assert program.calls == ["interrupted tidied cancelling"]


def test_a_failed_run_raises_its_error_until_it_is_retried(folder: Path) -> None:
    with pytest.raises(RunFailedError) as failed:
        resumed(folder, "released-failed")
    cause = failed.value.__cause__
    assert isinstance(cause, program.OutOfStock)
    assert (cause.item, cause.left, str(cause)) == (
        "released-failed",
        0,
        "only 0 of released-failed",
    )
    with program.opened(folder) as hive:
        hive.retry("released-failed")
    assert resumed(folder, "released-failed") == "released-failed released"
    assert program.calls == ["release released-failed"]


def test_a_run_goes_on_with_the_answer_of_a_person(folder: Path) -> None:
    assert resumed(folder, "shipped-answered") == program.Part("shipped-answered")
    found = answer(maestro("--store", folder, "escalations", "--json"))["escalations"]
    waiting, failed = sorted(found, key=lambda each: str(each["ticket"]))
    assert (waiting["run_id"], waiting["status"]) == ("shipped-escalated", "waiting")
    assert (failed["run_id"], failed["status"], failed["ticket"]) == ("executor", "failed", "MD-2")
    maestro("--store", folder, "answer", waiting["id"], "--give-up")
    with pytest.raises(RunFailedError, match="only 0 of shipped-escalated"):
        resumed(folder, "shipped-escalated")


def test_an_ambiguous_step_is_resolved(folder: Path) -> None:
    with pytest.raises(HelpNeeded, match="maestro resolve bought-asked pay --rerun"):
        resumed(folder, "bought-asked")
    words = ["resolve", "bought-asked", "pay", "--completed", '{"name": "found", "count": 3}']
    assert maestro(*words, "--store", folder).returncode == 0
    assert resumed(folder, "bought-asked") == [program.Part("found", 3)]
    assert resumed(folder, "bought-resolved") == [program.Part("by hand", 2)]
    assert program.calls == []


def test_an_open_breaker_refuses_until_it_is_reset(folder: Path) -> None:
    with pytest.raises(CircuitBreakerOpen):
        resumed(folder, "released-refused")
    assert program.calls == []
    assert maestro("breakers", "reset", "provider", "--store", folder).returncode == 0
    assert resumed(folder, "released-refused") == "refused was let through"
    assert program.calls == ["refuse refused"]


def test_finished_runs_return_what_is_recorded(folder: Path) -> None:
    runs = expected()["runs"]
    finished = [name for name, run in runs.items() if run["status"] == "success"]
    with program.opened(folder) as hive:
        for run_id in finished:
            if runs[run_id].get("workflow"):
                result = asyncio.run(hive.resume(run_id))
                plain = json.loads(codec.encode(result).data)
                assert runs[run_id].get("result", plain) == plain
    assert program.calls == []
    assert len(finished) >= 9


def test_streams_are_read_and_go_on(folder: Path) -> None:
    done = maestro("logs", "streamed", "narrate", "--store", folder)
    assert done.stdout == "one onetwo two"
    with reading(folder) as reader:
        record = reader.run("streamed-stopped")
        assert record is not None
        chunks = reader.chunks(record.id)
    assert {chunk.kind for chunk in chunks} == set(ChunkKind), ADVICE
    written = [(1, "née ".encode()), (2, "née".encode()), (1, "€ ".encode()), (2, "€".encode())]
    found = [(chunk.kind, chunk.data) for chunk in chunks]
    assert found == [*written, (0, b""), *written]
    assert resumed(folder, "streamed-stopped") == 2
    assert program.calls == ["interrupted streamed"]


def test_queued_runs_are_taken(folder: Path) -> None:
    store = SqliteStore(folder)
    assert make.QUEUED_ACTIVE in store.recover_runs(lambda _: None)
    kinds: Any = {"workflows": {"released"}, "version": "v1", "limit": 9}
    ready = store.claim_runs(queue="golden", **kinds)
    recovered = store.claim_runs(queue="default", **kinds)
    assert [lease.name for lease in ready + recovered] == ["queued-ready", make.QUEUED_ACTIVE]
    due = store.seconds_to_next()
    assert due is not None
    assert due > 10 * 365 * 86_400
    assert store.wake_run("queued-held")
    store.close()
    assert resumed(folder, "queued-ready") == "queued-ready released"
    assert program.calls == ["note released", "release queued-ready"]


def test_values_come_back_and_are_written_by_the_same_bytes(folder: Path) -> None:
    each = program.one_of_each()
    with reading(folder) as reader:
        run = reader.run("values")
        assert run is not None
        recorded = {EntryKind(entry.kind): reader.load(entry) for entry in reader.entries(run.id)}
    assert (
        recorded[EntryKind.RUN_STARTED]
        == codec.encode({"args": [], "kwargs": {"given": each}}).data
    )
    assert recorded[EntryKind.STEP_COMPLETED] == codec.encode(each).data
    result = resumed(folder, "values")
    assert same(result, {"names": list(each), "made": each})
    assert result["made"]["model"]._token == "t"
    assert program.calls == []


def test_a_bankrupt_run_goes_on_when_its_budget_is_raised(folder: Path) -> None:
    with pytest.raises(BudgetExceeded, match="80 tokens of 100 tokens"):
        resumed(folder, "paid-bankrupt")
    assert program.calls == []
    words = ["budget", "raise", "run", "paid-bankrupt", "--tokens", "20"]
    assert maestro(*words, "--store", folder).returncode == 0
    assert resumed(folder, "paid-bankrupt") == 3
    assert resumed(folder, "paid-raised") == 3
    assert program.calls == ["charge 2"]


def spender(folder: Path) -> dict[str, Any]:
    found = answer(maestro("budget", "--json", "--store", folder))["budgets"]
    (shown,) = (each for each in found if each["name"] == "spender")
    return dict(shown)


def reserved(folder: Path, ago: timedelta) -> None:
    """Set when the killed process made its reservation, whatever the age of the folder is."""
    at = to_micros(datetime.now(UTC) - ago)
    store = SqliteStore(folder)
    store._file.write(lambda db: db.execute("UPDATE reservations SET at = ?", (at,)))
    store.close()


def test_what_a_killed_process_had_reserved_is_released(folder: Path) -> None:
    reserved(folder, timedelta(hours=1))
    shown = spender(folder)
    names = ("tokens", "reserved_tokens", "lost_tokens", "in_flight")
    assert [shown[name] for name in names] == [2217, 25, 25, 0]
    assert maestro("budget", "release", "--store", folder).stdout == "released 1 reservation\n"
    assert resumed(folder, "paid-killed") == 1
    shown = spender(folder)
    assert [shown[name] for name in names] == [2297, 0, 0, 0]
    assert shown["cached_tokens"] == 35


def test_what_a_process_had_reserved_that_was_killed_a_day_ago_has_lapsed(folder: Path) -> None:
    reserved(folder, timedelta(hours=25))
    shown = spender(folder)
    names = ("tokens", "reserved_tokens", "lost_tokens", "in_flight")
    assert [shown[name] for name in names] == [2217, 0, 0, 0]
    assert maestro("budget", "release", "--store", folder).stdout == "released 0 reservations\n"


# --- the rest -----------------------------------------------------------------------------------


def test_an_execution_goes_on(folder: Path) -> None:
    config = program.config()
    config.state = StateConfig(state_dir=str(folder))
    with StatePersistence(config, "executor") as state:
        found = state.state
        assert (found.phase, found.step, found.status) == ("building", 2, "failed")
        assert (found.metrics["lines"], found.retry_counts) == (130, {"builder": 10})
        assert set(found.pending_tasks) == {"test", "break", "help"}
        assert {"compile", "build", "take"} <= set(found.completed_tasks)
        assert found.artifacts["binary"] == "a.out"
        assert found.persona_states["builder"]["part"] == program.Part("a")
        assert set(state.list_checkpoints()) >= {"golden-1", "golden-2"}
        with PersonaExecutor(config, "builder", state_persistence=state) as executor:
            asyncio.run(_execute_again(executor))
        assert state.restore("golden-1")
        assert state.state.metrics["lines"] == 120
    assert program.calls == []
    with StatePersistence(config, "restarted") as state:
        assert state.state.phase == "second"


async def _execute_again(executor: PersonaExecutor) -> None:
    part = program.Part("wall")
    built = await executor.execute(program.builds, "build", part)
    assert built.final_output == {"built": part}
    with pytest.warns(UnencodableInputWarning):
        taken = await executor.execute(program.takes_anything, "take", object(), 1)
    assert taken.final_output == 2
    with pytest.raises(UnrecoverableError):
        await executor.execute(program.never_works, "break", 1)


def test_shared_values_are_read(folder: Path) -> None:
    manager = StateManager(folder, auto_persist=True)
    try:
        assert same(manager.get_state("each", "golden"), program.one_of_each())
        assert manager.get_state("rows") == program.rows(60)
        assert manager.get_state("count") == 2
        assert manager.get_state("deleted") is None
        manager.set_state("count", 3)
        assert manager.restore("golden")
        assert manager.get_state("count") == 2
    finally:
        manager.shutdown()
    checkpoints = CheckpointManager(folder / "checkpoints")
    latest = checkpoints.get_latest_checkpoint("notes")
    assert latest is not None
    assert latest.expires_at is not None
    assert latest.state.data == {"part": program.Part("a")}
    verified = answer(maestro("checkpoints", "verify", "--json", "--store", folder))
    assert {each["damage"] for each in verified["checkpoints"]} == {None}
    assert len(verified["checkpoints"]) >= 3
