"""SQLite's own checksums on every page of a database: the last 8 bytes, verified on each read."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import TYPE_CHECKING

import apsw

from maestro_hive.kernel.errors import StorageError

if TYPE_CHECKING:
    from pathlib import Path

_VFS = "cksmvfs"
_BYTES = 8

_registering = threading.Lock()


def connect(path: Path, flags: int) -> apsw.Connection:
    """Open a database so that its checksums are kept and verified."""
    _register()
    return apsw.Connection(str(path), flags=flags, vfs=_VFS)


def switch_on(db: apsw.Connection) -> None:
    """Make room for checksums in a database that has no pages yet."""
    _reserve(db, _BYTES)


def are_on(db: apsw.Connection) -> bool:
    """Tell whether the pages of a database have room for checksums."""
    return _reserve(db, -1) == _BYTES


def _reserve(db: apsw.Connection, value: int) -> int:
    number = ctypes.c_int(value)
    db.file_control("main", apsw.SQLITE_FCNTL_RESERVE_BYTES, ctypes.addressof(number))
    return number.value


def _register() -> None:
    """Make the checksums available, once, and leave apsw's default as other users had it."""
    with _registering:
        if _VFS in apsw.vfs_names():
            return
        from apsw import sqlite_extra  # noqa: PLC0415 - slow to import, needed once

        if sqlite_extra.has("cksumvfs") is None:
            raise StorageError(
                "this build of apsw lacks SQLite's cksumvfs extension, which guards the journal's"
                " pages; install apsw from its published wheel"
            )
        default = apsw.vfs_names()[0]
        loader = apsw.Connection(":memory:")
        sqlite_extra.load(loader, "cksumvfs")
        loader.close()
        apsw.set_default_vfs(default)


def _new_lock_in_child() -> None:
    global _registering  # noqa: PLW0603 - a thread that is not in the child may have held it
    _registering = threading.Lock()


os.register_at_fork(after_in_child=_new_lock_in_child)
