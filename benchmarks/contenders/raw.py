"""The limits: what the disk and SQLite give to whoever asks for nothing else."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import apsw

from benchmarks.contender import Contender, Figures, measured

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 1_000
_ROW = os.urandom(200)  # about what a step's outcome takes
#: More pages than the log of a journal has when it is copied into the database.
_WARM_COMMITS = 1_500


def _fdatasync(folder: Path) -> Figures:
    fd = os.open(folder / "file", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with measured() as span:
        for _ in range(STEPS):
            os.write(fd, _ROW)
            os.fdatasync(fd)
    os.close(fd)
    return {"steps": STEPS, "rate": STEPS / span.seconds}


def _sqlite(folder: Path) -> Figures:
    db = apsw.Connection(str(folder / "raw.db"))
    db.pragma("journal_mode", "wal")
    db.execute("CREATE TABLE steps (id INTEGER PRIMARY KEY, data BLOB)")
    sql = "INSERT INTO steps (data) VALUES (?)"
    _warm(db, sql)
    db.pragma("synchronous", "full")
    with measured() as span:
        for _ in range(STEPS):
            db.execute(sql, (_ROW,))
    db.close()
    return {"steps": STEPS, "rate": STEPS / span.seconds}


def _warm(db: apsw.Connection, sql: str) -> None:
    """Let the log grow and begin again: overwriting it costs half of what growing it does."""
    db.pragma("synchronous", "normal")
    db.pragma("wal_autocheckpoint", 0)
    for _ in range(_WARM_COMMITS):
        db.execute(sql, (_ROW,))
    db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
    db.pragma("wal_autocheckpoint", 1_000)


CONTENDERS = (
    Contender(name="fdatasync", group="raw", measure=_fdatasync, durable="power cut"),
    Contender(name="sqlite", group="raw", measure=_sqlite, durable="power cut"),
)
