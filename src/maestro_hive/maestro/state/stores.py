"""The stores that this process has open: one per folder, shared and counted."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maestro_hive.maestro.state.memory import MemoryStore
    from maestro_hive.maestro.state.sqlite.store import SqliteStore


@dataclass(slots=True)
class _Loan:
    store: SqliteStore
    pid: int
    users: int = 1


_mutex = threading.Lock()
_loans: dict[Path, _Loan] = {}
_in_memory: dict[Path, MemoryStore] = {}


def borrow_store(folder: str | Path) -> SqliteStore:
    """Return the store on this folder, opening it if nobody in this process has it open.

    One that failed is opened again for the next borrower; those who still have it go on being told
    that it failed, and what it held is free.
    """
    from maestro_hive.maestro.state.sqlite.store import SqliteStore  # noqa: PLC0415 - loads apsw

    place = Path(folder).expanduser().resolve()
    with _mutex:
        loan = _loans.get(place)
        if loan is not None and loan.pid == os.getpid() and loan.store.usable:
            loan.users += 1
            return loan.store
        if loan is not None and loan.pid == os.getpid():
            loan.store.close()
        store = SqliteStore(place)
        _loans[place] = _Loan(store, os.getpid())
        return store


def return_store(store: SqliteStore) -> None:
    """Say that you are done with a borrowed store; the last one closes it."""
    with _mutex:
        loan = _loans.get(store.folder)
        if loan is None or loan.store is not store or loan.pid != os.getpid():
            return  # it failed and was replaced, or belongs to a parent process
        loan.users -= 1
        if loan.users > 0:
            return
        del _loans[store.folder]
    store.close()


def borrow_memory_store(folder: str | Path) -> MemoryStore:
    """Return the store that stands for this folder in a process that shall write nothing."""
    from maestro_hive.maestro.state.memory import MemoryStore  # noqa: PLC0415 - rarely used

    place = Path(folder).expanduser().resolve()
    with _mutex:
        store = _in_memory.get(place)
        if store is None:
            store = _in_memory[place] = MemoryStore()
        return store


def forget_memory_stores() -> None:
    """Let the next borrower begin with an empty memory."""
    with _mutex:
        _in_memory.clear()


def _forget_in_child() -> None:
    """Start anew in a forked child, where a lock may have been held by a thread that is not here."""
    global _mutex  # noqa: PLW0603 - the lock itself has to be another one
    _mutex = threading.Lock()
    _loans.clear()
    _in_memory.clear()


os.register_at_fork(after_in_child=_forget_in_child)
