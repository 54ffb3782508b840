"""Programs that write to a journal and acknowledge, and the check of what they leave.

``python -m faults.scenarios NAME FOLDER ACKS`` executes one. An acknowledgement is a line
``run number``: the entries of that run up to that number are durable.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from maestro_hive.journal import sqlite
from maestro_hive.journal.entries import AttemptStarted, RunStarted
from maestro_hive.journal.store import Acquire, Append, RunLease, Store, open_store
from maestro_hive.kernel.errors import MaestroError, UnknownRunError

if TYPE_CHECKING:
    from collections.abc import Callable

#: A scenario prints it when all that it has to say is acknowledged.
CLOSING = "closing"
#: Set in the environment: syncs do nothing, so that a power cut must lose something.
NO_SYNCS = "FAULTS_NO_SYNCS"
#: The exit code for an error of this package, which a fault may well cause.
OURS = 3


def acquire(store: Store, name: str) -> RunLease:
    """Take a run, which may be new."""
    (lease,) = store.write([Acquire(name, RunStarted(workflow="work"))])
    if isinstance(lease, Exception):
        raise lease
    assert isinstance(lease, RunLease)
    return lease


def append(store: Store, run: RunLease, size: int = 500, *, sync: bool = True) -> int:
    """Append an entry, and return its number."""
    entry = AttemptStarted(step=1, attempt=1, name="x" * size)
    (written,) = store.write([Append(run, [entry], sync=sync)])
    if isinstance(written, Exception):
        raise written
    return run.seq


class Acks:
    """The file or stream of acknowledgements."""

    def __init__(self, path: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._fd = 1 if path == "-" else os.open(path, flags, 0o600)

    def __call__(self, line: str) -> None:
        """Write a line at once."""
        os.write(self._fd, f"{line}\n".encode())


# --- the programs ---------------------------------------------------------------------------------


def first(folder: Path, acks: Acks) -> None:
    """Create a journal and write one entry."""
    _write(folder, acks, "first", 1)


def steps(folder: Path, acks: Acks) -> None:
    """Write entries, every other one without a sync, with several copies of the log."""
    _write(folder, acks, "steps", 40)


def second(folder: Path, acks: Acks) -> None:
    """Write as ``steps`` does, to another run."""
    _write(folder, acks, "second", 40)


def again(folder: Path, acks: Acks) -> None:
    """Open, write and close several times."""
    for _ in range(4):
        _write(folder, acks, "again", 4)


def large(folder: Path, acks: Acks) -> None:
    """Write large entries, so that the log grows over its length."""
    _write(folder, acks, "large", 12, size=400_000)


def _write(folder: Path, acks: Acks, name: str, count: int, size: int = 500) -> None:
    store = open_store(folder)
    run = acquire(store, name)
    for number in range(count):
        if number % 2:
            append(store, run, size, sync=False)
        acks(f"{name} {append(store, run, size)}")
    acks(CLOSING)
    store.db.close()


SCENARIOS: dict[str, Callable[[Path, Acks], None]] = {
    each.__name__: each for each in (first, steps, second, again, large)
}


# --- what they leave ------------------------------------------------------------------------------


def verify(folder: Path, acks: list[str]) -> list[str]:
    """Open a folder, count what was acknowledged and write on; return what is wrong."""
    wanted: dict[str, int] = defaultdict(int)
    for line in acks:
        name, _, number = line.partition(" ")
        if number:
            wanted[name] = max(wanted[name], int(number))
    wrong: list[str] = []
    try:
        store = open_store(folder)
    except (MaestroError, OSError) as error:
        return [f"cannot be opened: {error}"]
    try:
        for name, least in wanted.items():
            found = entries_in(store, name)
            if found < least:
                wrong.append(f"run {name}: {found} entries of {least} acknowledged")
        append(store, acquire(store, "after"))
        if store.db.read("PRAGMA integrity_check") != [("ok",)]:
            wrong.append("the database is malformed")
    except MaestroError as error:
        wrong.append(f"cannot be used: {type(error).__name__}: {error}")
    finally:
        store.db.close()
    return wrong


def entries_in(store: Store, name: str) -> int:
    """Return how many entries of a run can be read, none missing and none altered."""
    try:
        row = store.find(name)
    except UnknownRunError:
        return 0
    return len(store.entries(row.number))


def main(name: str, folder: str, acks: str) -> int:
    """Execute a scenario."""
    sqlite.CHECKPOINT_PAGES = 20
    if os.environ.get(NO_SYNCS):
        setattr(sqlite, "sync_fd", lambda _: None)  # noqa: B010 - in a process of its own
    try:
        SCENARIOS[name](Path(folder), Acks(acks))
    except MaestroError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return OURS
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
