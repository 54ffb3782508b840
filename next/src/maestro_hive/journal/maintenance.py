"""Maintenance of a journal: back it up, purge ended runs, collect what is left over, check it."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

from maestro_hive.journal.effects import ENDED
from maestro_hive.journal.payloads import Payloads, Reference
from maestro_hive.journal.store import BITS, MASK, RunFilter
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import (
    ConfigurationError,
    CorruptionError,
    FolderError,
    StorageError,
    UnknownRunError,
    ValueCorruptError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from maestro_hive.journal.copies import CopyFolder
    from maestro_hive.journal.database import Transaction
    from maestro_hive.journal.store import RunRow, Store

#: How many runs are purged in one transaction, and under one lock of the copies.
_PURGED_AT_ONCE = 100
#: A temporary file that is older belongs to no process that still writes it.
_OLD_SECONDS = 3600.0


# --- backup ---------------------------------------------------------------------------------------


def back_up(store: Store, target: Path) -> Path:
    """Copy a journal to a new folder, which can be opened as it is; return the new file."""
    journal = files.make_private_folder(target.absolute()) / "journal.db"
    if journal.exists():
        raise FolderError(target, "has a journal already; choose a new folder")
    half = journal.with_name(".journal.db.half")
    files.remove(half)  # left by a process that was killed here
    try:
        files.create_private(half)
        store.db.backup(half)
        with files.explained(lambda reason: StorageError(f"{journal} was not written: {reason}")):
            files.sync_file(half)
            half.rename(journal)
            files.sync_folder(target)
    except BaseException:  # also Ctrl+C must not leave half a file
        with contextlib.suppress(OSError):
            half.unlink(missing_ok=True)
        raise
    return journal


# --- purge ----------------------------------------------------------------------------------------


def purgeable(
    store: Store, older_than: float = 0.0, statuses: Sequence[str] = ENDED
) -> Iterator[str]:
    """Yield the runs that ended more than so many seconds ago, without those that others called."""
    for status in statuses:
        if status not in ENDED:
            raise ConfigurationError(f"runs that are {status!r} are not purged: {', '.join(ENDED)}")
        before, last = store.now() - older_than, 0
        while rows := store.db.read(store.sql["PURGEABLE"], status, before, last):
            last = rows[-1][0]
            yield from (name for _, name in rows)


def purge(store: Store, names: Sequence[str], folder: CopyFolder | None = None) -> list[str]:
    """Delete runs that have ended, with all that they called, and their copies; return them.

    A run that has not ended, or has called one that has not, stays. Copies go first, under a lock:
    a purge that is killed leaves no copy that a run could be resumed from.
    """
    purged: list[str] = []
    for start in range(0, len(names), _PURGED_AT_ONCE):
        with contextlib.nullcontext() if folder is None else folder.locked(purging=True):
            rows = [
                row for name in names[start : start + _PURGED_AT_ONCE] for row in _tree(store, name)
            ]
            if folder is not None:
                for row in rows:
                    folder.remove(row.run_id)
            purged += store.db.write(partial(_drop_runs, store, rows), sync=True)
    return purged


def _tree(store: Store, name: str) -> list[RunRow]:
    """Return a run and the runs below it; none if one of them has not ended."""
    try:
        found = [store.find(name)]
    except UnknownRunError:
        return []
    for row in found:  # the list grows
        found += store.children(row.run_id)
    return found if all(row.status in ENDED for row in found) else []


def _drop_runs(store: Store, rows: list[RunRow], tx: Transaction) -> list[str]:
    """Delete runs with all that they have, except one that was resumed just now."""
    dropped = [row for row in rows if tx(store.sql["DROP_RUN"], row.number)]
    for row in dropped:
        _drop_rows(store, tx, row.number)
    return [row.run_id for row in dropped]


def _drop_rows(store: Store, tx: Transaction, number: int) -> None:
    for statement in ("DROP_ENTRIES", "DROP_PAYLOADS", "DROP_CHUNKS"):
        tx(store.sql[statement], number << BITS, number << BITS | MASK)
    tx(store.sql["DROP_MESSAGES"], number)
    tx(store.sql["DROP_USAGE"], number)
    store.drop_holds(tx, number)


def collect(store: Store, folder: CopyFolder | None = None) -> int:
    """Delete what belongs to no run, and files that a killed process left; return how many."""

    def body(tx: Transaction) -> int:
        numbers = [number for (number,) in tx(store.sql["ORPHANS"])]
        for number in numbers:
            _drop_rows(store, tx, number)
        return len(numbers)

    collected = store.db.write(body, sync=True)
    for path in folder.leftovers() if folder is not None else ():
        if path.lstat().st_mtime < time.time() - _OLD_SECONDS:
            files.remove(path)
            collected += 1
    return collected


# --- check ----------------------------------------------------------------------------------------


FindingKind = Literal["pages", "run", "value", "account", "copy"]


class Finding(NamedTuple):
    """Something that is wrong with a journal or its copies."""

    kind: FindingKind
    #: A run, an account or a file; empty for the whole journal.
    name: str
    problem: str


def check(store: Store, folder: CopyFolder | None = None) -> Iterator[Finding]:
    """Yield what is wrong: pages, entries, large values, accounts, copies; change nothing."""
    for problem in store.db.check_pages():
        yield Finding("pages", "", problem)
    yield from _until_damaged("run", "", _check_runs(store))
    yield from _until_damaged("run", "", _check_orphans(store))
    yield from _until_damaged("account", "", _check_accounts(store))
    for path, problem in folder.damaged() if folder is not None else ():
        yield Finding("copy", str(path), problem)


def _until_damaged(kind: FindingKind, name: str, found: Iterator[Finding]) -> Iterator[Finding]:
    """Yield findings; where the journal cannot be read any further, that is the last one."""
    try:
        yield from found
    except CorruptionError as error:
        yield Finding(kind, name, str(error))


def _check_runs(store: Store) -> Iterator[Finding]:
    which = RunFilter()
    while rows := store.runs(which):
        for row in rows:
            yield from _until_damaged("run", row.run_id, _check_entries(store, row))
            yield from _until_damaged("value", row.run_id, _check_values(store, row))
            yield from _until_damaged("run", row.run_id, _check_chunks(store, row))
        which = RunFilter(before=rows[-1].number)


def _check_entries(store: Store, row: RunRow) -> Iterator[Finding]:
    if not sum(1 for _ in store.texts(row.number)):
        yield Finding("run", row.run_id, "it has no entries")


def _check_values(store: Store, row: RunRow) -> Iterator[Finding]:
    values = Payloads()  # what is in memory of one is the base of the next
    for each in store.payloads(row.number):
        try:
            values.read(Reference(each.number, 0, each.sha256), partial(store.chain, row.number))
        except ValueCorruptError as error:
            yield Finding("value", row.run_id, str(error))


def _check_chunks(store: Store, row: RunRow) -> Iterator[Finding]:
    after, last = row.number << BITS, row.number << BITS | MASK
    while found := store.db.read(store.sql["CHUNKS"], after + 1, last, 0, 2000):
        after = found[-1][0]
    yield from ()  # reading them is the check


def _check_orphans(store: Store) -> Iterator[Finding]:
    for (number,) in store.db.read(store.sql["ORPHANS"]):
        yield Finding("run", "", f"run number {number} is gone, and rows of it are left")


def _check_accounts(store: Store) -> Iterator[Finding]:
    for account, held, claimed in store.db.read(store.sql["WRONG_ACCOUNTS"]):
        problem = f"it holds {held:,}, and what is under way holds {claimed:,}"
        yield Finding("account", account, problem)
