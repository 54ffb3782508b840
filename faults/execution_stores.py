"""The machine over both stores: how a process finds its store there, and how the store dies."""

from __future__ import annotations

import shutil

from faults.execution_machine import ExecutionMachine
from maestro_hive.engine.config import ExecutionConfig, StateConfig
from maestro_hive.maestro.state import stores as opened
from maestro_hive.maestro.state.memory import MemoryStore
from maestro_hive.maestro.state.sqlite.store import SqliteStore


class MemoryExecutionMachine(ExecutionMachine):
    """The machine over stores in memory that share their data."""

    def __init__(self) -> None:
        super().__init__()
        self._root = MemoryStore(clock=self.clock)

    def open_store(self) -> ExecutionConfig:
        """Share the data once more."""
        if (self.top, False) not in opened._stores().opened:  # noqa: SLF001 - where a process finds its store
            store = MemoryStore(clock=self.clock, shared_with=self._root)
            opened._stores().opened[self.top, False] = opened._Opened(store)  # noqa: SLF001
        state = StateConfig(state_dir=str(self.top), enable_persistence=False)
        return ExecutionConfig(state=state)

    def kill_store(self) -> None:
        """Vanish."""
        store = opened._stores().opened.pop((self.top, False)).store  # noqa: SLF001
        assert isinstance(store, MemoryStore)
        store.abandon()

    def forget_store(self) -> None:
        """Let go of what is left."""
        opened._stores().opened.pop((self.top, False), None)  # noqa: SLF001


class FolderExecutionMachine(ExecutionMachine):
    """The machine over a journal in a folder."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = (self.top / "0").resolve()

    def open_store(self) -> ExecutionConfig:
        """Open the folder, with the clock that is moved by hand."""
        if (self._folder, True) not in opened._stores().opened:  # noqa: SLF001 - where a process finds its store
            store = SqliteStore(self._folder, clock=self.clock)
            opened._stores().opened[self._folder, True] = opened._Opened(store)  # noqa: SLF001
        return ExecutionConfig(state=StateConfig(state_dir=str(self._folder)))

    def kill_store(self) -> None:
        """Copy the folder as it is, and let the old one go."""
        old = self._folder
        store = opened._stores().opened.pop((old, True)).store  # noqa: SLF001
        self._folder = old.with_name(str(int(old.name) + 1))
        shutil.copytree(old, self._folder, ignore=shutil.ignore_patterns("*-shm"))
        store.close()
        shutil.rmtree(old, ignore_errors=True)
