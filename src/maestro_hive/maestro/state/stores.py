"""Opening stores: one per folder and process, shared and counted; and readers.

The only module that knows which stores there are.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from maestro_hive.kernel.process import PerProcess

if TYPE_CHECKING:
    from maestro_hive.maestro.state.store import Reader, Store

#: The folders of programs that choose none.
DEFAULT_STATE_DIR = "/var/maestro/state"
DEFAULT_CHECKPOINT_DIR = "/var/maestro/checkpoints"
#: Used where a default folder cannot be.
FALLBACK_STATE_DIR = "~/.maestro/state"
FALLBACK_CHECKPOINT_DIR = "~/.maestro/checkpoints"


@dataclass(slots=True)
class _Opened:
    store: Store
    users: int = 0


@dataclass(slots=True)
class _Stores:
    """The stores of this process, by folder and by whether they are persistent."""

    mutex: threading.Lock = field(default_factory=threading.Lock)
    opened: dict[tuple[Path, bool], _Opened] = field(default_factory=dict)


_stores = PerProcess(_Stores)


def open_store(folder: str | Path, *, persistent: bool = True) -> Store:
    """Return the store of this folder, opening it if this process does not have it open.

    One that failed is replaced for the next caller: those who still have it continue to get its
    error, and its leases are free. Without ``persistent`` it is a store in memory, which stands
    for the folder until the process ends, and nothing is written.
    """
    key = (Path(folder).expanduser().resolve(), persistent)
    stores = _stores()
    with stores.mutex:
        opened = stores.opened.get(key)
        if opened is None or not opened.store.usable:
            if opened is not None:
                opened.store.close()
            opened = stores.opened[key] = _Opened(_open(*key))
        opened.users += 1
        return opened.store


def share_store(store: Store) -> bool:
    """Become one more caller of ``open_store`` who has this store; False if it is open no more."""
    stores = _stores()
    with stores.mutex:
        for opened in stores.opened.values():
            if opened.store is store and store.usable:
                opened.users += 1
                return True
    return False


def _open(folder: Path, persistent: bool) -> Store:
    if persistent:
        from maestro_hive.maestro.state.sqlite.store import (
            SqliteStore,
        )

        return SqliteStore(folder)
    from maestro_hive.maestro.state.memory import MemoryStore

    return MemoryStore()


def close_store(store: Store) -> None:
    """Say that one caller of ``open_store`` is done with a store; the last one closes it."""
    stores = _stores()
    with stores.mutex:
        found = [key for key, opened in stores.opened.items() if opened.store is store]
        if not found:
            return  # it failed and was replaced, or belongs to a parent process
        key, opened = found[0], stores.opened[found[0]]
        opened.users -= 1
        _, persistent = key
        if opened.users > 0 or not persistent:
            return
        del stores.opened[key]
    store.close()


def open_reader(folder: str | Path) -> Reader:
    """Open the journal of this folder for reading only; nothing in the folder is changed.

    Works on read-only and full disks, beside processes that write, and after a crash. Close it
    with its ``close``.
    """
    from maestro_hive.maestro.state.sqlite.reader import SqliteReader

    return SqliteReader(Path(folder).expanduser())


def put_memory_store(folder: str | Path, store: Store | None) -> None:
    """Let this store be what ``open_store(folder, persistent=False)`` returns; None: a new one."""
    key = (Path(folder).expanduser().resolve(), False)
    stores = _stores()
    with stores.mutex:
        if store is None:
            stores.opened.pop(key, None)
        else:
            stores.opened[key] = _Opened(store)


def forget_memory_stores() -> None:
    """Let the next ``open_store(…, persistent=False)`` start empty; for tests."""
    stores = _stores()
    with stores.mutex:
        for key in [key for key in stores.opened if not key[1]]:
            del stores.opened[key]
