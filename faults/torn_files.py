"""Row 4: a torn or altered file is detected; a read gives what was written, or our error."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import warnings
from functools import partial
from typing import TYPE_CHECKING

from faults.registry import Outcome, Plan, row
from faults.scenarios import RUN, STEPS, checkpoint, config_in, manager, result_of, save, steps
from faults.strace import ROOT
from maestro_hive.kernel.errors import MaestroError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state import run_document as documents
from maestro_hive.maestro.state.checkpoint import CheckpointManager
from maestro_hive.maestro.state.records import EntryKind
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.sqlite.wal import DamagedJournalWarning
from maestro_hive.maestro.state.state_manager import StateManager
from maestro_hive.team.state import ExecutionState
from maestro_hive.unified_execution.state_persistence import StatePersistence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_FRAME = 24 + 4096
_HEADER = 32


@row(
    4,
    "a torn or altered file is detected",
    "documents 100 %; journal: what was written or our error; lost WAL frames reported",
)
def torn_files(plan: Plan, outcome: Outcome) -> None:
    """Cut and flip every document, and a sample of the journal and its WAL."""
    _documents(plan, outcome)
    _team_state(plan, outcome)
    _database(plan, outcome)
    _wal(plan, outcome)


# --- documents ---------------------------------------------------------------------------------


def _documents(plan: Plan, outcome: Outcome) -> None:
    folder = plan.scratch / "documents"
    _exhaust(checkpoint(folder / "run", count=2))
    _exhaust(manager(folder / "values", count=2))
    (written,) = (folder / "run" / "checkpoints" / RUN).glob("*cp-2.json")
    kinds = {
        "checkpoint": written,
        "execution_state": folder / "run" / "state" / "runs" / RUN / "execution_state.json",
        "state_manager_checkpoint": folder / "values" / "checkpoints" / "all-of-it.json",
    }
    found = tried = 0
    for kind, path in plan.track("kinds of document", kinds.items(), len(kinds)):
        whole = path.read_bytes()
        for broken in _all_breaks(whole):
            tried += 1
            if _refused(partial(documents.unseal, broken, kind, "it")):
                found += 1
            else:
                outcome.fail(f"{kind}: an altered document was accepted")
    outcome.ran.append(f"{tried:,} cuts and flips of documents")
    outcome.measured.append(f"{found:,} of {tried:,} found")
    _through_the_readers(plan, outcome, kinds)


def _all_breaks(whole: bytes) -> Iterator[bytes]:
    """Yield the text cut at every byte, and with every byte altered."""
    for at in range(len(whole)):
        yield whole[:at]
        yield whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :]


def _refused(read: Callable[[], object]) -> bool:
    try:
        read()
    except MaestroError:
        return True
    return False


def _through_the_readers(plan: Plan, outcome: Outcome, kinds: dict[str, Path]) -> None:
    """A torn newest copy is set aside, and the run resumes from the one before it."""
    folder = plan.scratch / "documents" / "run"
    whole = kinds["checkpoint"].read_bytes()
    for number in range(plan.amount(quick=10, full=60)):
        place = plan.scratch / f"torn-{number}"
        shutil.copytree(folder, place, ignore=shutil.ignore_patterns("journal*", "holders"))
        shutil.rmtree(place / "state" / "runs")
        torn = place / "checkpoints" / RUN / kinds["checkpoint"].name
        torn.write_bytes(whole[: number * len(whole) // 60])
        with StatePersistence(config_in(place), RUN) as state:
            done = state.state.completed_tasks
        outcome.require(done == ["task-1"], f"a torn checkpoint: resumed with {done}")
        aside = list(torn.parent.glob("*.damaged-*"))
        outcome.require(aside, "a torn checkpoint was not set aside")
        healthy = CheckpointManager(place / "checkpoints").health_check()["healthy"]
        outcome.require(healthy, "after setting aside, the checkpoints are not healthy")
        shutil.rmtree(place)
    values = plan.scratch / "documents" / "values"
    path = kinds["state_manager_checkpoint"]
    path.write_bytes(path.read_bytes()[:-9])
    open_manager = StateManager(persistence_dir=values, auto_persist=True)
    refused = _refused(lambda: open_manager.restore("all-of-it"))
    outcome.require(refused, "StateManager.restore accepted a torn checkpoint")
    outcome.require(open_manager.get_state("count") == 2, "a refused restore changed the values")
    open_manager.shutdown()


def _team_state(plan: Plan, outcome: Outcome) -> None:
    """A saved feature has a digest too; a torn or altered file is refused."""
    from jsonschema import ValidationError

    folder = plan.scratch / "team"
    _exhaust(save(folder, count=1))
    path = folder / ".mahabharatha" / "state.json"
    whole = path.read_bytes()
    original = ExecutionState.load(path)
    step = plan.amount(quick=7, full=1)
    accepted = tried = 0
    for number, broken in enumerate(_all_breaks(whole)):
        if number % step:
            continue
        path.write_bytes(broken)
        tried += 1
        try:
            accepted += ExecutionState.load(path) != original
        except (MaestroError, ValidationError):
            continue
    outcome.require(not accepted, f"{accepted} altered state.json were accepted")
    outcome.ran.append(f"{tried:,} cuts and flips of state.json")
    outcome.measured.append(f"{accepted} accepted")


# --- the journal -------------------------------------------------------------------------------


def _exhaust(scenario: Iterator[str]) -> None:
    for _ in scenario:
        pass


def _prepared(plan: Plan, name: str, *, copied_in: bool) -> Path:
    """Return a folder after the steps: all in the database, or all in the WAL of an open one."""
    folder = plan.scratch / name
    if copied_in:
        _exhaust(steps(folder))
        (folder / "journal.db-wal").write_bytes(b"")
    else:
        live = plan.scratch / f"{name}-live"
        for _ in steps(live):  # closing checkpoints the WAL, so copy before
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(live, folder)
    (folder / "journal.db-shm").unlink(missing_ok=True)
    return folder


def _read_all(folder: Path) -> tuple[str, SqliteStore | None]:
    """Read a journal through the store; return "same", "short", "error" (ours) or "WRONG"."""
    try:
        store = SqliteStore(folder)
    except MaestroError:
        return "error", None
    try:
        record = store.run(RUN)
        entries = store.entries(record.id) if record else []
        completed = [entry for entry in entries if entry.kind == EntryKind.STEP_COMPLETED]
        for number, entry in enumerate(completed, start=1):
            right = store.load(entry) == codec.encode(result_of(number)).data
            if not right or entry.step != number:
                return "WRONG", store
    except MaestroError:
        return "error", store
    return ("same" if len(completed) == STEPS else "short"), store


def _try(original: Path, place: Path, name: str, data: bytes) -> tuple[str, bool, bool]:
    """Read a copy with one file replaced; return what was read, and whether opening and check reported damage."""
    shutil.copytree(original, place)
    (place / name).write_bytes(data)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found, store = _read_all(place)
        warned = any(issubclass(each.category, DamagedJournalWarning) for each in caught)
        checked = found == "error"
        if store is not None:
            warned = warned and bool(store.damage)
            checked = checked or _check_reports(store)
            store.close()
    except Exception as error:  # noqa: BLE001 - any error that is not ours
        return f"a raw {type(error).__name__}: {error}", False, False
    return found, warned, checked


def _check_reports(store: SqliteStore) -> bool:
    try:
        return bool(store.check())
    except MaestroError:
        return True


def _database(plan: Plan, outcome: Outcome) -> None:
    original = _prepared(plan, "database", copied_in=True)
    whole = (original / "journal.db").read_bytes()
    rng = random.Random(plan.seed)
    tries = plan.amount(quick=150, full=1500)
    seen: dict[str, int] = {}
    for number in plan.track("breaks of journal.db", range(tries), tries):
        at = rng.randrange(len(whole))
        data = whole[:at] if number % 5 == 0 else _flip(whole, at, rng)
        place = plan.scratch / f"db-{number}"
        found, _, checked = _try(original, place, "journal.db", data)
        seen[found] = seen.get(found, 0) + 1
        if found == "short" and number % 5 == 0 and at == 0:
            found = "error"  # an empty file is a new journal, and the WAL was emptied above
        outcome.require(found in {"same", "error"}, f"journal.db broken at {at}: {found}")
        outcome.require(checked or at in range(18, 100), f"journal.db broken at {at}: not reported")
        shutil.rmtree(place)
    outcome.ran.append(f"{tries:,} breaks of journal.db")
    outcome.measured.append(f"journal.db: {_words(seen)}")


def _flip(whole: bytes, at: int, rng: random.Random) -> bytes:
    return whole[:at] + bytes([whole[at] ^ rng.randrange(1, 256)]) + whole[at + 1 :]


def _words(seen: dict[str, int]) -> str:
    return ", ".join(f"{number} {what}" for what, number in sorted(seen.items()))


def _wal(plan: Plan, outcome: Outcome) -> None:
    original = _prepared(plan, "log", copied_in=False)
    whole = (original / "journal.db-wal").read_bytes()
    frames = (len(whole) - _HEADER) // _FRAME
    rng = random.Random(plan.seed + 1)
    tries = plan.amount(quick=150, full=1500)
    seen: dict[str, int] = {}
    reported = 0
    for number in plan.track("breaks of the WAL", range(tries), tries):
        at = rng.randrange(len(whole))
        cut = number % 5 == 0
        data = whole[:at] if cut else _flip(whole, at, rng)
        place = plan.scratch / f"log-{number}"
        found, warned, checked = _try(original, place, "journal.db-wal", data)
        seen[found] = seen.get(found, 0) + 1
        reported += warned
        where = f"WAL {'cut' if cut else 'flipped'} at {at} of {len(whole)}"
        outcome.require(found in {"same", "short", "error"}, f"{where}: {found}")
        following = (at - _HEADER) // _FRAME + 1  # the first frame after the broken one
        if found == "short" and not cut and following < frames - 4:
            outcome.require(warned, f"{where}: lost without a report")
            if number % 40 == 1:
                _doctor_reports(place, outcome, where)
        del checked
        shutil.rmtree(place)
    outcome.ran.append(f"{tries:,} breaks of the WAL")
    outcome.measured.append(f"WAL: {_words(seen)}; {reported} reported as damage")


def _doctor_reports(folder: Path, outcome: Outcome, where: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "maestro_hive", "doctor", "--store", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    reported = done.returncode == 1 and "damaged" in done.stdout
    outcome.require(
        reported, f"{where}: doctor did not report it: {done.stdout[-200:]}{done.stderr[-200:]}"
    )
