"""Sample runs: made by the real executor, from entries, or active in another process."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from maestro_hive.engine.context import current
from maestro_hive.kernel.clock import SystemClock, Wait
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.records import EntryKind, NewEntry
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.store import Append, NewRun
from maestro_hive.unified_execution import ExecutionConfig, PersonaExecutor, UnrecoverableError
from tests.cli.processes import copy_of, environment
from tests.python_processes import PythonProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from maestro_hive.maestro.state.records import NewDispatch

RUN = "run-1"


@dataclass
class Page:
    """A class that ``maestro`` cannot import."""

    title: str


async def works_at_last(part: str) -> dict[str, str]:
    step = current()
    step.spend(tokens=1200, usd=0.25)
    step.memory["tried"] = step.attempt
    step.history.append({"attempt": step.attempt})
    step.save_progress(current_step=step.attempt)
    if step.attempt == 1:
        raise TimeoutError("too slow")
    return {"made": part}


async def never_works() -> None:
    raise ValueError("no\nway")


def quick(folder: Path) -> ExecutionConfig:
    """Return settings without delays."""
    config = ExecutionConfig.in_folder(folder)
    config.level1.jitter = 0
    config.level1.base_delay_seconds = 0.001
    return config


def executed(folder: Path) -> Path:
    """Return a folder with a run: a step completed at its second attempt, and one failed."""
    return copy_of(execute, folder)


def execute(folder: Path, run: str = RUN) -> Path:
    """Execute such a run."""
    with PersonaExecutor(quick(folder), "developer", workflow_id=run) as executor:
        asyncio.run(executor.execute(works_at_last, "implement", "page"))
        with contextlib.suppress(UnrecoverableError):
            asyncio.run(executor.execute(never_works, "review"))
    return folder


# --- workflows -----------------------------------------------------------------------------------


def entry(kind: EntryKind, value: Any = None, **facts: Any) -> NewEntry:
    """Return an entry of a workflow; ``step`` and ``attempt`` are numbers, all else is facts."""
    step, attempt = facts.pop("step", 0), facts.pop("attempt", 0)
    encoded_facts = codec.dump_canonical(facts) if facts else None
    identity = hashlib.sha256(b"%d" % kind + (encoded_facts or b"")).digest()
    encoded = None if value is None else codec.encode(value)
    return NewEntry(kind, step, attempt, encoded_facts, encoded, "", identity)


def workflow(
    folder: Path,
    run: str,
    status: str,
    *entries: NewEntry,
    name: str = "build",
    parent: str | None = None,
    dispatch: NewDispatch | None = None,
) -> None:
    """Record a run of a workflow; no process holds it afterwards."""
    store = SqliteStore(folder)
    try:
        facts = {"workflow": name} if parent is None else {"workflow": name, "parent": parent}
        started = entry(EntryKind.RUN_STARTED, {"args": ["page"], "kwargs": {}}, **facts)
        if dispatch is not None:
            first = NewRun(run, name, [started, *entries], status, dispatch, parent)
            assert store.create_runs([first]) == [True]
            return
        # At once: who watches the folder never sees a run of which nothing is recorded yet.
        hold = store.acquire_run(run, name, [started, *entries], status, parent=parent)
        store.release_run(hold)
    finally:
        store.close()


def add(folder: Path, run: str, *entries: NewEntry, status: str | None = None) -> None:
    """Record more of a run."""
    store = SqliteStore(folder)
    try:
        hold = store.acquire_run(run)
        store.append([Append(hold, entries, status)])
        store.release_run(hold)
    finally:
        store.close()


def starts(run: str, name: str = "part") -> NewEntry:
    """Return the entry of the start of a child."""
    return entry(EntryKind.CHILD_STARTED, run_id=run, workflow=name)


def child_ends(run: str, status: str, name: str = "part") -> NewEntry:
    """Return the entry of the end of a child."""
    ended = entry(EntryKind.CHILD_ENDED, run_id=run, workflow=name, status=status)
    return ended._replace(identity=starts(run, name).identity)


def sleeps(seconds: float) -> NewEntry:
    """Return the entry of a sleep."""
    wait = Wait.start(SystemClock(), seconds).to_json()
    return entry(EntryKind.WAIT_STARTED, name="sleep", what="sleep", wait=wait)


def asks(name: str = "approve") -> NewEntry:
    """Return the entry of a question."""
    wait = Wait.start(SystemClock(), 3600.0).to_json()
    return entry(EntryKind.WAIT_STARTED, name=name, what="answer", wait=wait)


def ends(status: str, value: Any = None, **facts: Any) -> NewEntry:
    """Return the last entry of a run."""
    return entry(EntryKind.RUN_ENDED, value, status=status, **facts)


def crowded(folder: Path) -> Path:
    """Return a folder with 50,000 runs, nine of ten children, and leases of dead processes."""
    return copy_of(_crowd, folder)


def _crowd(folder: Path) -> None:
    rows = [(f"run-{n}", n, n, f"run-{n // 10 * 10}" if n % 10 else None) for n in range(50_000)]
    columns = "(name, workflow, status, created_at, updated_at, parent)"
    leases = "(name, holder, host, pid, since, boot, expires) VALUES (?, 'dead', 'h', 1, 1, 'b', 1)"

    def fill(db: Any) -> None:
        db.executemany(f"INSERT INTO runs {columns} VALUES (?, 'w', 'running', ?, ?, ?)", rows)
        names = [(f"run/{row[0]}",) for row in rows[:10_000]]
        db.executemany(f"INSERT INTO leases {leases}", names)

    store = SqliteStore(folder)
    store._file.write(fill)
    store.close()


# --- active runs -----------------------------------------------------------------------------------

_PROGRAM = """
import asyncio, sys
from tests.cli.sample_runs import quick
from maestro_hive.unified_execution import PersonaExecutor

async def wait():
    print("ready", flush=True)
    return (await asyncio.to_thread(sys.stdin.readline)).strip()

async def main():
    with PersonaExecutor(quick(sys.argv[1]), "developer", workflow_id=sys.argv[2]) as executor:
        await executor.execute(wait, "wait")

asyncio.run(main())
"""

_WORKFLOW = """
import sys
from pathlib import Path
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.store import Append
from maestro_hive.maestro.state.records import EntryKind
from tests.cli.sample_runs import ends, entry
store = SqliteStore(Path(sys.argv[1]))
hold = store.acquire_run(sys.argv[2], "build")
store.append([Append(hold, [entry(EntryKind.RUN_STARTED, workflow="build")], "running")])
print("ready", flush=True)
status = sys.stdin.readline().strip()
store.append([Append(hold, [ends(status)], status)])
store.close()
"""


class ActiveRun:
    """A process that executes a run until it may finish, or is killed."""

    def __init__(self, program: str, folder: Path, run: str) -> None:
        self._process = PythonProcess(program, folder, run, env=environment())
        self.pid = self._process.pid
        assert self._process.stdout.readline() == "ready\n"

    def finish(self, word: str = "done") -> None:
        """Let it finish."""
        self._process.stdin.write(f"{word}\n")
        self._process.communicate(timeout=60)

    def kill(self) -> None:
        """End it as ``kill -9`` does; nothing, if it has ended."""
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def active_run(folder: Path, run: str = RUN, *, of_workflow: bool = False) -> Iterator[ActiveRun]:
    """Have another process execute a run: a step that waits, or a workflow."""
    process = ActiveRun(_WORKFLOW if of_workflow else _PROGRAM, folder, run)
    try:
        yield process
    finally:
        process.kill()
