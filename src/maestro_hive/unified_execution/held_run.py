"""A run that this process holds: its entries, what they add up to, and the right to add more."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from maestro_hive.kernel.errors import StorageError
from maestro_hive.maestro.state.memory_store import MemoryStore
from maestro_hive.maestro.state.opened import borrow_store, return_store
from maestro_hive.maestro.state.records import EntryKind, NewEntry
from maestro_hive.maestro.state.run_state import RunState, fold
from maestro_hive.maestro.state.sqlite_store import SqliteStore
from maestro_hive.maestro.state.store import Append

if TYPE_CHECKING:
    from collections.abc import Iterable

    from maestro_hive.maestro.state.store import Hold, Store
    from maestro_hive.unified_execution.state_folders import StateFolders


class HeldRun:
    """One run, taken for this process; the caller's mutex guards it.

    ``fresh`` says that what is in the journal shall not count: the next append says so first.
    """

    def __init__(self, folders: StateFolders, run_id: str) -> None:
        self.run_id = run_id
        self.state = RunState()
        self.fresh = False
        self._closed = False
        self.store: Store = borrow_store(folders.state) if folders.persistent else MemoryStore()
        try:
            self.hold: Hold = self.store.hold_run(run_id)
        except BaseException:
            self._return_store()
            raise

    def append(self, entries: Iterable[NewEntry], status: str | None = None) -> None:
        """Record entries, durably, and take them into account."""
        self.check_open()
        if self.fresh:
            entries, self.fresh = [NewEntry(EntryKind.RESTORED), *entries], False
        (refused,) = self.store.append([Append(self.hold, entries, status)])
        if refused is not None:
            raise refused
        self.catch_up()

    def catch_up(self) -> None:
        """Take into account what was appended, here or by another user of the run."""
        if self.state.seq == self.hold.seq or self.fresh or self._closed:
            return
        for entry in self.store.entries(self.hold.run, after=self.state.seq):
            self.state.add(entry, self.store.load)

    def read_again(self) -> None:
        """Forget what is known and read the journal from its beginning."""
        self.check_open()
        self.fresh = False
        self.state = fold(self.store.entries(self.hold.run), self.store.load)

    def check_not_taken_over(self) -> None:
        """Raise if another process has the run by now: it must not write files either."""
        (refused,) = self.store.append([Append(self.hold, ())], sync=False)
        if refused is not None:
            raise refused

    def check_open(self) -> None:
        """Raise if the run was let go."""
        if self._closed:
            raise StorageError(f"run {self.run_id!r} was shut down; open it again to go on")

    def close(self) -> None:
        """Let the run go."""
        self._closed = True
        with contextlib.suppress(StorageError):  # a failed store holds nothing any more
            self.store.release_run(self.hold)
        self._return_store()

    @property
    def closed(self) -> bool:
        """Tell whether the run was let go."""
        return self._closed

    def _return_store(self) -> None:
        if isinstance(self.store, SqliteStore):
            return_store(self.store)
