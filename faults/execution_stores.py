"""The machine over both stores: how a process finds its store there, and how the store dies."""

from __future__ import annotations

import os
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
        if self.top not in opened._in_memory:  # noqa: SLF001 - where a process finds its store
            store = MemoryStore(clock=self.clock, shared_with=self._root)
            opened._in_memory[self.top] = store  # noqa: SLF001
        state = StateConfig(state_dir=str(self.top), enable_persistence=False)
        return ExecutionConfig(state=state)

    def kill_store(self) -> None:
        """Vanish."""
        opened._in_memory.pop(self.top).abandon()  # noqa: SLF001

    def forget_store(self) -> None:
        """Let go of what is left."""
        opened._in_memory.pop(self.top, None)  # noqa: SLF001


class FolderExecutionMachine(ExecutionMachine):
    """The machine over a journal in a folder."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = (self.top / "0").resolve()

    def open_store(self) -> ExecutionConfig:
        """Open the folder, with the clock that is moved by hand."""
        if self._folder not in opened._loans:  # noqa: SLF001 - where a process finds its store
            store = SqliteStore(self._folder, clock=self.clock)
            opened._loans[self._folder] = opened._Loan(store, os.getpid(), users=0)  # noqa: SLF001
        return ExecutionConfig(state=StateConfig(state_dir=str(self._folder)))

    def kill_store(self) -> None:
        """Copy the folder as it is, and let the old one go."""
        store, old = opened._loans.pop(self._folder).store, self._folder  # noqa: SLF001
        self._folder = old.with_name(str(int(old.name) + 1))
        shutil.copytree(old, self._folder, ignore=shutil.ignore_patterns("*-shm"))
        store.close()
        shutil.rmtree(old, ignore_errors=True)
