"""A run whose entries are not what this program writes: said so, and the others are not affected."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.copies import KIND
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state import run_document as documents
from maestro_hive.maestro.state.records import EntryKind, NewEntry
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.store import Append
from tests.cli.processes import answer, complaint, maestro
from tests.cli.sample_runs import asks, entry, workflow

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: As an earlier version may have accepted them: a year that no clock has, a name that is none.
_TOO_LATE = NewEntry(
    EntryKind.WAIT_STARTED,
    facts=codec.dump_canonical({"name": "go", "what": "answer"}),
    identity=b"w" * 32,
    at=1 << 60,
)
_NO_IDENTITY = NewEntry(EntryKind.WAIT_ENDED, facts=b'{"how":"answered","name":"go"}')


def append(folder: Path, run: str, *entries: NewEntry) -> None:
    store = SqliteStore(folder)
    store.append([Append(store.acquire_run(run), entries)])
    store.close()


@pytest.mark.parametrize("bad", [_TOO_LATE, _NO_IDENTITY], ids=["too late", "no identity"])
def test_one_damaged_run_is_listed_as_such_beside_the_others(tmp_path: Path, bad: NewEntry) -> None:
    workflow(tmp_path, "good", "waiting", asks())
    workflow(tmp_path, "bad", "waiting", asks())
    append(tmp_path, "bad", bad)
    found = answer(maestro("runs", "--json", "--store", tmp_path))["runs"]
    listed = {run["run_id"]: run for run in found}
    assert listed["good"]["status"] == "waiting"
    assert listed["good"]["damage"] is None
    assert listed["bad"]["status"] == "damaged"
    assert "entry" in listed["bad"]["damage"] or "maestro purge bad" in listed["bad"]["damage"]
    assert "damaged" in maestro("runs", "--store", tmp_path).stdout
    for verb in ("show", "events"):
        assert "run" in complaint(maestro(verb, "bad", "--store", tmp_path))
        assert maestro(verb, "good", "--store", tmp_path).returncode in (0, 75)


def test_a_run_whose_last_entry_cannot_be_read_is_listed_as_damaged(tmp_path: Path) -> None:
    workflow(tmp_path, "good", "running")
    workflow(tmp_path, "bad", "running")
    append(tmp_path, "bad", _TOO_LATE)
    found = answer(maestro("runs", "--json", "--store", tmp_path))["runs"]
    assert {run["run_id"]: run["status"] for run in found} == {"bad": "damaged", "good": "stopped"}


# --- files ------------------------------------------------------------------------------------------


def redigested(entry: dict[str, Any], value: Any) -> None:
    entry["value"] = value
    entry["sha256"] = hashlib.sha256(codec.dump(value)).hexdigest()


#: What is wrong with a run, and the place that the error names.
HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a kind of another version": (
        lambda run: run["entries"][2].update(kind="quantum_leap"),
        "run.entries[2].kind is 'quantum_leap'",
    ),
    "a mark that a copy never has": (
        lambda run: run["entries"][1].update(kind="restored"),
        "run.entries[1].kind",
    ),
    "a time after the last": (
        lambda run: run["entries"][3].update(at=1 << 60),
        "run.entries[3].at",
    ),
    "entries in another order": (
        lambda run: run["entries"].reverse(),
        "run.entries[1] has the number 3, and follows 4",
    ),
    "the same entry twice": (
        lambda run: run["entries"].append(run["entries"][-1]),
        "run.entries[4] has the number 4",
    ),
    "a step that never started": (
        lambda run: run["entries"][2].update(step=7),
        "run.entries[2]: CorruptionError entry 4 of the run refers to 7",
    ),
    "an input that is no call": (
        lambda run: redigested(run["entries"][0], [1]),
        "run.entries[0].value is 'list', and must be an object",
    ),
    "a wait without its clock": (
        lambda run: run["entries"][3]["facts"]["wait"].pop("boot"),
        "run.entries[3].facts.wait has no 'boot'",
    ),
    "a cause that is no error": (
        lambda run: run["entries"][2]["facts"]["error"].update(exception={"class": 3}),
        "run.entries[2].facts.error.exception",
    ),
    "facts too deep to be read": (
        lambda run: run["entries"][1]["facts"].update(more=json.loads("[" * 150 + "]" * 150)),
        "run.entries[1].facts nested deeper than 100 levels",
    ),
    "an identity that is none": (
        lambda run: run["entries"][0].update(identity="zz"),
        "run.entries[0].identity",
    ),
    "a number that is too large": (lambda run: run.update(fence=1 << 70), "run.fence"),
    "a status that is no text": (lambda run: run["state"].update(status=[1]), "run.state.status"),
}


@pytest.fixture
def run(tmp_path: Path) -> dict[str, Any]:
    steps = [
        entry(EntryKind.ATTEMPT_STARTED, step=1, attempt=1, name="s", persona="p"),
        entry(EntryKind.ATTEMPT_FAILED, step=1, attempt=1, error={"type": "E", "message": "m"}),
    ]
    workflow(tmp_path / "old", "asking", "waiting", *steps, asks())
    file = tmp_path / "run.json"
    assert (
        maestro("export", "asking", file, "--with-values", "--store", tmp_path / "old").returncode
        == 0
    )
    found: dict[str, Any] = json.loads(file.read_text())["document"]["run"]
    return found


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_file_with_the_right_checksum_is_refused_by_the_place(
    tmp_path: Path, run: dict[str, Any], what: str
) -> None:
    change, place = HOSTILE[what]
    change(run)
    file, new = tmp_path / "hostile.json", tmp_path / "new"
    file.write_bytes(documents.seal(KIND, {"run": run}))
    assert place in complaint(maestro("import", file, "--store", new))
    assert not new.exists()
