"""The limits: what the disk and SQLite give to whoever asks for nothing else."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import apsw

from benchmarks.contender import Contender, Figures, measured

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 1_000
_ROW = os.urandom(200)  # about what a step's outcome takes
_INSERT = "INSERT INTO steps (data) VALUES (?)"
#: More pages than the log of a journal has when it is copied into the database.
_WARM_COMMITS = 1_500


def _fdatasync(folder: Path) -> Figures:
    """Write into a file that has its size already: a growing one is synced at half the rate."""
    fd = os.open(folder / "file", os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(fd, bytes(STEPS * len(_ROW)))
    os.fsync(fd)
    os.lseek(fd, 0, os.SEEK_SET)
    with measured() as span:
        for _ in range(STEPS):
            os.write(fd, _ROW)
            os.fdatasync(fd)
    os.close(fd)
    return {"steps": STEPS, "rate": STEPS / span.seconds}


def _sqlite(folder: Path) -> Figures:
    db = _open(folder)
    db.pragma("synchronous", "full")
    with measured() as span:
        for _ in range(STEPS):
            db.execute(_INSERT, (_ROW,))
    db.close()
    return {"steps": STEPS, "rate": STEPS / span.seconds, "seconds": span.seconds / STEPS}


def _pairs(folder: Path, *, steps: int, size: int) -> Figures:
    """Commit what a durable step must: that it started, unsynced, and its outcome, synced."""
    db = _open(folder)
    outcomes = [os.urandom(size) for _ in range(steps)]
    with measured() as span:
        for outcome in outcomes:
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute(_INSERT, (_ROW,))
            db.execute("PRAGMA synchronous = FULL")
            db.execute(_INSERT, (outcome,))
    db.close()
    return {"steps": steps, "seconds": span.seconds / steps}


def _open(folder: Path) -> apsw.Connection:
    """Return a database whose log has grown and begun again: overwriting costs half of growing."""
    db = apsw.Connection(str(folder / "raw.db"))
    db.pragma("journal_mode", "wal")
    db.execute("CREATE TABLE steps (id INTEGER PRIMARY KEY, data BLOB)")
    db.pragma("synchronous", "normal")
    db.pragma("wal_autocheckpoint", 0)
    for _ in range(_WARM_COMMITS):
        db.execute(_INSERT, (_ROW,))
    db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
    db.pragma("wal_autocheckpoint", 1_000)
    return db


CONTENDERS = (
    Contender(name="fdatasync", group="raw", measure=_fdatasync, durable="power cut"),
    Contender(name="sqlite", group="raw", measure=_sqlite, durable="power cut"),
    Contender(
        name="pairs/steps",
        group="hive-steps",
        measure=partial(_pairs, steps=STEPS, size=len(_ROW)),
        durable="power cut (the first of each pair: kill -9)",
    ),
    Contender(
        name="pairs/report",
        group="hive-payload",
        measure=partial(_pairs, steps=100, size=102_400),
    ),
)
