"""A SQLite database with page checksums: connecting to it, its formats, and its errors.

SQLite's own ``cksumvfs`` puts a checksum into the last 8 bytes of every page and verifies it on
each read.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import apsw

from maestro_hive.kernel import files
from maestro_hive.kernel.errors import (
    CorruptionError,
    FolderError,
    NewerFormatError,
    StorageError,
)
from maestro_hive.kernel.process import PerProcess

Row = tuple[Any, ...]

#: Marks a SQLite file as a journal of maestro-hive ("MHIV").
APPLICATION_ID = 0x4D484956
#: The format of journals, ``PRAGMA user_version``; those before it were never released.
FORMAT = 4
#: A log that had large values is truncated to this when it starts again.
_LOG_BYTES_MOST = 16 * 1024 * 1024

_SCHEMA = Path(__file__).with_name("journal.sql")

# --- page checksums ---

_VFS = "cksmvfs"
_CHECKSUM_BYTES = 8


def connect(path: Path, flags: int) -> apsw.Connection:
    """Open a database so that its page checksums are written and verified.

    Closing it leaves its log as it is. SQLite would delete the log of a database that nobody else
    has locked, and the locks of those that use it may have been dropped (see ``locks``).
    """
    db = apsw.Connection(str(path), flags=flags, vfs=checksum_vfs())
    db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    return db


def _register_vfs() -> str:
    """Load SQLite's checksum extension, and leave apsw's default as other users had it."""
    if _VFS in apsw.vfs_names():
        return _VFS
    from apsw import sqlite_extra

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
    return _VFS


#: Returns the name of the VFS, registering it when first called.
checksum_vfs = PerProcess(_register_vfs)


def prepare(db: apsw.Connection, path: Path) -> None:
    """Have a connection to a journal, or to a new file, read and write as a journal's does."""
    if db.pragma("page_count") == 0:
        if path.stat().st_size:
            raise CorruptionError(f"{path} is not a SQLite database")
        enable_checksums(db)
    check_format(db, str(path))  # before the file is changed in any way
    if db.pragma("journal_mode", "wal") != "wal":
        raise FolderError(path, "is on a file system that cannot share a write-ahead log")
    if not has_checksums(db):
        raise CorruptionError(f"{path}: its page checksums have been switched off")
    db.pragma("synchronous", "normal")
    db.pragma("wal_autocheckpoint", 0)
    db.pragma("journal_size_limit", _LOG_BYTES_MOST)
    db.pragma("cache_size", -16_000)
    db.pragma("secure_delete", 1)  # what is purged must not be found in free pages


def copy_database(path: Path, target: Path) -> None:
    """Write a consistent copy of a database to ``target``, a new file, or nothing."""
    files.create_private(target)
    source = connect(path, apsw.SQLITE_OPEN_READWRITE)
    copy = connect(target, apsw.SQLITE_OPEN_READWRITE)
    try:
        # With a first page that asks for checksums, or pages written before it get none.
        enable_checksums(copy)
        copy.pragma("user_version", 1)
        copy.close()
        copy = connect(target, apsw.SQLITE_OPEN_READWRITE)
        # In one go and under one read transaction, or every commit would start it again.
        source.execute("BEGIN; SELECT count(*) FROM runs")
        with copy.backup("main", source, "main") as backup:
            backup.step(-1)
        copy.pragma("journal_mode", "delete")
    except apsw.Error as error:
        for leftover in target.parent.glob(f"{target.name}*"):
            leftover.unlink()
        raise damage_error(path, error) or StorageError(
            f"{path} could not be copied to {target}: {error}"
        ) from error
    finally:
        copy.close()
        source.close()


def enable_checksums(db: apsw.Connection) -> None:
    """Reserve room for checksums in a database that has no pages yet."""
    _reserve(db, _CHECKSUM_BYTES)


def has_checksums(db: apsw.Connection) -> bool:
    """Return whether the pages of a database have room for checksums."""
    return _reserve(db, -1) == _CHECKSUM_BYTES


def _reserve(db: apsw.Connection, value: int) -> int:
    number = ctypes.c_int(value)
    db.file_control("main", apsw.SQLITE_FCNTL_RESERVE_BYTES, ctypes.addressof(number))
    return number.value


# --- formats ---


@cache
def _schema(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def create_tables(db: apsw.Connection, name: str) -> None:
    """Make an opened file a journal, in one transaction, unless it is one."""
    if check_format(db, name) == 0:
        with db:
            db.execute(_schema(_SCHEMA))
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {FORMAT}")


def check_format(db: apsw.Connection, name: str) -> int:
    """Return a journal's format, 0 for a new file; refuse other formats and other databases."""
    found = int(db.pragma("user_version"))
    ours = int(db.pragma("application_id")) == APPLICATION_ID
    empty = db.execute("SELECT count(*) FROM sqlite_schema").get == 0
    if not ours and not (empty and found == 0):
        raise CorruptionError(
            f"{name} is a SQLite database, but not a journal of maestro-hive;"
            " choose another state folder"
        )
    if found > FORMAT:
        raise NewerFormatError(name, found, FORMAT)
    if 0 < found < FORMAT:
        raise StorageError(
            f"{name} has format {found}, of before the first release, and this version reads"
            f" format {FORMAT} only; finish its runs with the version that wrote it, or choose"
            " another state folder"
        )
    return found


# --- errors ---


def damage_error(path: Path, error: apsw.Error) -> CorruptionError | None:
    """Return our error if SQLite's means that the file is not what was written."""
    if getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_DATA:
        reason = "a page does not match its checksum"
    elif isinstance(error, apsw.CorruptError | apsw.NotADBError):
        reason = str(error)
    else:
        return None
    return CorruptionError(f"{path} is damaged: {reason}; restore a backup")
