"""``journal.marks``: what was acknowledged to be in the log, for who opens it after a kill.

A log that is deleted or cut while nobody uses it looks to SQLite like one in which nothing was
written. So each process writes down, after every sync and without a sync of its own, how long the
log was. That survives a kill; after a power cut it is too old at worst, which only makes it say
less. Whoever opens the journal first compares. A complete copy of the log in the database voids all
marks, by raising the generation they belong to.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from maestro_hive.kernel import files
from maestro_hive.kernel.errors import FolderError, MaestroError
from maestro_hive.maestro.state.sqlite import wal
from maestro_hive.maestro.state.sqlite.locks import index_of, log_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_MAGIC = b"MHMARKS1"
#: Generation; inodes of database, log and index while the journal is open; slots given out.
_HEADER = struct.Struct("<8sQQQQQ")
#: Generation, salts of the log, frames in it.
_MARK = struct.Struct("<Q8sQ")
_CHECK = struct.Struct("<I")
_SLOT_BYTES = 32
#: One for each process that has it open. Should two share one, both write what is true.
_SLOTS = 64
_FILE_BYTES = 64 + _SLOTS * _SLOT_BYTES

#: What is said of a folder whose database is not the file that the marks belong to.
COPIED = (
    "is a copy that was made while the journal was open, or after a kill: if something was recorded"
    " meanwhile, the copy may lack parts of it; use `maestro backup` to copy a folder that is in use"
)


class Mark(NamedTuple):
    """How long the log was at a sync, in frames of the generation that has these salts."""

    generation: int
    salts: bytes
    frames: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """The content of the file; there are no ``inodes`` after the journal was closed cleanly."""

    generation: int = 0
    inodes: tuple[int, int, int] | None = None
    slots: int = 0
    marks: tuple[Mark, ...] = ()

    def lost(self, salts: bytes | None, frames: int) -> str | None:
        """Return what a log with so many sound frames lost; None if nothing that is known of."""
        current = [mark for mark in self.marks if mark.generation == self.generation]
        if not current:
            return None
        if salts is None:
            most = max(mark.frames for mark in current)
            return f"its log is missing: {most} page(s) that had been acknowledged are gone"
        # A log with other salts was started again, and what it had before is in the database.
        most = max((mark.frames for mark in current if mark.salts == salts), default=0)
        if frames >= most:
            return None
        return f"its log was cut: {most - frames} of {most} page(s) that had been acknowledged are gone"

    def is_copy(self, database: Path) -> bool:
        """Return whether the database is a copy, made while it was open or after a kill."""
        return self.inodes is not None and self.inodes[0] != _inode(database)

    def replaced(self, database: Path) -> Path | None:
        """Return the file that is not the one that other processes use."""
        if self.inodes is not None:
            for path, used in zip(_files(database), self.inodes, strict=True):
                if _inode(path) != used:
                    return path
        return None


class Marks:
    """The file, open for writing. All but ``note`` are called inside the queue."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "journal.marks"
        files.create_private(self.path)
        self._fd = -1
        self._slot = 64
        with files.explained(lambda reason: FolderError(self.path, f"cannot be opened: {reason}")):
            self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)

    def read(self) -> Marked:
        """Return what it says."""
        return _parse(os.pread(self._fd, _FILE_BYTES, 0))

    def start(self, database: Path, *, first: bool) -> None:
        """Take a slot; the ``first`` user voids what was said before, and names the files."""
        found = self.read()
        if first or found.inodes is None:
            inode, log, index = (_inode(path) for path in _files(database))
            found = Marked(generation=found.generation + 1, inodes=(inode, log, index))
            self._write(bytes(_FILE_BYTES), 0)  # so that the disk has room for every mark
        self._slot = 64 + found.slots % _SLOTS * _SLOT_BYTES
        self._write_header(found.generation, found.inodes, found.slots + 1)

    def generation(self) -> int:
        """Return the number that new marks belong to."""
        return self._header().generation

    def _header(self) -> Marked:
        return _parse(os.pread(self._fd, 64, 0))

    def note(self, mark: tuple[int, bytes, int]) -> None:
        """Say that a sync covered the log as it was then: the fields of a ``Mark``."""
        data = _MARK.pack(*mark)
        os.pwrite(self._fd, data + _CHECK.pack(crc32(data)), self._slot)

    def void(self) -> None:
        """Say that all that was acknowledged is in the database, and durable there."""
        found = self._header()
        self._write_header(found.generation + 1, found.inodes, found.slots)

    def finish(self) -> None:
        """Say, durably, that the log is not needed, and that nobody uses the journal."""
        self._write_header(self.generation() + 1, None, 0)
        self.sync()

    def sync(self) -> None:
        """Make it durable: before the log is truncated or deleted."""
        os.fdatasync(self._fd)

    def _write_header(
        self, generation: int, inodes: tuple[int, int, int] | None, slots: int
    ) -> None:
        data = _HEADER.pack(_MAGIC, generation, *(inodes or (0, 0, 0)), slots)
        self._write(data + _CHECK.pack(crc32(data)), 0)

    def _write(self, data: bytes, at: int) -> None:
        if os.pwrite(self._fd, data, at) != len(data):
            raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def lost_log(database: Path) -> str | None:
    """Return what is known to be missing of a journal's log, without opening the journal."""
    path = database.with_name("journal.marks")
    for _ in range(10):
        found = _read(path)
        lost = found.lost(*wal.measure(log_of(database)))
        if lost is None or _read(path) == found:  # or it was started again meanwhile
            return lost
    return None


def copied_in_use(database: Path) -> bool:
    """Return whether a database is a copy, made while it was open or after a kill."""
    return _read(database.with_name("journal.marks")).is_copy(database)


def _read(path: Path) -> Marked:
    try:
        return _parse(files.read_whole(path, _FILE_BYTES))
    except (OSError, MaestroError):  # there is none, or it is being made
        return Marked()


def _parse(data: bytes) -> Marked:
    """Read the file; what does not check out says nothing."""
    header = data[: _HEADER.size]
    if len(data) < 64 or _CHECK.pack(crc32(header)) != data[_HEADER.size : _HEADER.size + 4]:
        return Marked()
    magic, generation, database, log, index, slots = _HEADER.unpack(header)
    if magic != _MAGIC:
        return Marked()
    inodes = (database, log, index) if database else None
    return Marked(
        generation=generation, inodes=inodes, slots=slots, marks=tuple(_parse_marks(data[64:]))
    )


def _parse_marks(data: bytes) -> Iterator[Mark]:
    for at in range(0, len(data) - _SLOT_BYTES + 1, _SLOT_BYTES):
        mark = data[at : at + _MARK.size]
        if _CHECK.pack(crc32(mark)) == data[at + _MARK.size : at + _MARK.size + 4] and any(mark):
            yield Mark(*_MARK.unpack(mark))


def _files(database: Path) -> tuple[Path, Path, Path]:
    return database, log_of(database), index_of(database)


def _inode(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_ino
    return 0
