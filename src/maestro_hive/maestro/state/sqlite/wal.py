"""The write-ahead log: what a damaged one lost, and how a missing one is noticed.

**A damaged log.** SQLite reads a log up to the first frame that does not check out and silently drops
the rest: right after a crash, where the rest is half a transaction, and wrong after bit rot, where
good frames follow. The two cases differ: frames are written in order, so the end of a commit of the
same generation *behind* a bad frame means that the bad one had once been written in full.

**A missing log.** One that is deleted or cut while nobody uses it looks to SQLite like one in which
nothing was written. So each process writes down, after every sync and without a sync of its own, how
long the log was: in ``journal.marks``. That survives a kill; after a power cut it is too old at worst,
which only makes it say less. Whoever opens the journal first compares. A complete copy of the log in
the database voids all marks, by raising the generation they belong to.
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
from maestro_hive.kernel.errors import DocumentCorruptError, FolderError, MaestroError
from maestro_hive.maestro.state import run_document
from maestro_hive.maestro.state.records import Damage
from maestro_hive.maestro.state.sqlite.locks import index_of, log_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime
    from pathlib import Path

# --- a damaged log --------------------------------------------------------------------------------

_NO_COMMIT = bytes(4)
_HEADER = 32
_FRAME_HEADER = 24
_MAGIC_LITTLE, _MAGIC_BIG = b"\x37\x7f\x06\x82", b"\x37\x7f\x06\x83"


def lost_commits(path: Path, recovered: int, page_size: int) -> int:
    """Return how many commits end behind the damage, given how many frames SQLite recovered.

    Zero is the answer for a sound log and for one that merely ends in half a transaction.
    """
    try:
        log = path.read_bytes()
    except FileNotFoundError:
        return 0
    sound_header = _header_is_sound(log)
    sound = _sound_frames(log, recovered, page_size) if sound_header else 0
    # The first bad frame may be the torn end of a killed process; what follows it is not.
    first = recovered + sound + (1 if sound_header else 0)
    salts = log[16:24] if sound_header else log[_HEADER + 8 : _HEADER + 16]
    return _frames_of(log, salts, first, page_size)


def salts_of(path: Path) -> bytes | None:
    """Return what distinguishes this generation of a log; None without a sound header."""
    return measure(path)[0]


def measure(path: Path) -> tuple[bytes | None, int]:
    """Return the salts of a log and how many frames of theirs it starts with, as far as is known.

    There are no salts without a sound header. What the frames contain is not checked.
    """
    try:
        with path.open("rb") as log:
            header = log.read(_HEADER)
            if not _header_is_sound(header):
                return None, 0
            salts, page_size = header[16:24], int.from_bytes(header[8:12])
            whole = (os.fstat(log.fileno()).st_size - _HEADER) // (_FRAME_HEADER + page_size)
            count = 0
            while count < whole and log.read(_FRAME_HEADER)[8:16] == salts:
                count += 1
                log.seek(page_size, os.SEEK_CUR)
            return salts, count
    except FileNotFoundError:
        return None, 0


def frame_salts_at(frame: int, page_size: int) -> int:
    """Return where in a log the salts of a frame are, counted from 1."""
    return _HEADER + (frame - 1) * (_FRAME_HEADER + page_size) + 8


def _frames_of(log: bytes, salts: bytes, first: int, page_size: int) -> int:
    """Count commits from frame ``first`` on that belong to the generation with these salts.

    Frames that end no commit do not count: a killed transaction leaves such, and the next one
    may have written over the first of them only.
    """
    if not any(salts):
        return 0
    size = _FRAME_HEADER + page_size
    offsets = range(_HEADER + first * size, len(log) - size + 1, size)
    return sum(
        1 for at in offsets if log[at + 8 : at + 16] == salts and log[at + 4 : at + 8] != _NO_COMMIT
    )


def _sound_frames(log: bytes, recovered: int, page_size: int) -> int:
    """Count the frames behind the recovered ones whose checksums still chain: half a commit."""
    size = _FRAME_HEADER + page_size
    order = ">" if log[:4] == _MAGIC_BIG else "<"
    last = _HEADER + (recovered - 1) * size
    s0, s1 = struct.unpack(">II", log[last + 16 : last + 24] if recovered else log[24:32])
    sound = 0
    for offset in range(_HEADER + recovered * size, len(log) - size + 1, size):
        frame = log[offset : offset + size]
        s0, s1 = _checksum(frame[:8] + frame[_FRAME_HEADER:], s0, s1, order)
        if frame[8:16] != log[16:24] or struct.pack(">II", s0, s1) != frame[16:24]:
            break
        sound += 1
    return sound


def _header_is_sound(log: bytes) -> bool:
    if log[:4] not in (_MAGIC_LITTLE, _MAGIC_BIG) or len(log) < _HEADER:
        return False
    order = ">" if log[:4] == _MAGIC_BIG else "<"
    return struct.pack(">II", *_checksum(log[:24], 0, 0, order)) == log[24:32]


def _checksum(data: bytes, s0: int, s1: int, order: str) -> tuple[int, int]:
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for i in range(0, len(words), 2):
        s0 = (s0 + words[i] + s1) & 0xFFFFFFFF
        s1 = (s1 + words[i + 1] + s0) & 0xFFFFFFFF
    return s0, s1


_KIND = "damage"
_FOLDER = "damaged"


class DamagedJournalWarning(UserWarning):
    """Part of a journal could not be read when it was opened; see ``Store.damage``."""


def keep_damaged_log(folder: Path, journal: Path, reason: str, now: datetime) -> Damage:
    """Copy the log of ``journal`` aside, if there is one, with a note of what is wrong with it."""
    log = journal.with_name(f"{journal.name}-wal")
    copy = files.make_folder_inside(folder, _FOLDER) / f"{log.name}.{now:%Y%m%dT%H%M%S%f}"
    found = log.exists() and log.stat().st_size > 0
    if found:
        files.write_atomically(copy, log.read_bytes())
    note = {"file": str(journal), "reason": reason, "found_at": now.isoformat()}
    files.write_atomically(copy.with_name(f"{copy.name}.json"), run_document.seal(_KIND, note))
    moved_to = str(copy) if found else ""
    return Damage(file=str(journal), found_at=now, reason=reason, moved_to=moved_to)


def recorded_damage(folder: Path) -> Iterator[str]:
    """Yield a description of each damage found earlier whose log is still set aside."""
    for path in sorted((folder / _FOLDER).glob("*.json")):
        try:
            note = run_document.unseal(files.read_whole(path), _KIND, str(path))
            copied = f", copied to {path.stem}" if path.with_suffix("").exists() else ""
            yield f"{note['file']}: {note['reason']} (found {note['found_at']}{copied})"
        except DocumentCorruptError as error:
            yield str(error)


# --- a missing log: journal.marks -----------------------------------------------------------------

_MARKS_MAGIC = b"MHMARKS1"
#: Generation; inodes of database, log and index while the journal is open; slots given out.
_MARKS_HEADER = struct.Struct("<8sQQQQQ")
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
        data = _MARKS_HEADER.pack(_MARKS_MAGIC, generation, *(inodes or (0, 0, 0)), slots)
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
        found = _read_marks(path)
        lost = found.lost(*measure(log_of(database)))
        if lost is None or _read_marks(path) == found:  # or it was started again meanwhile
            return lost
    return None


def copied_in_use(database: Path) -> bool:
    """Return whether a database is a copy, made while it was open or after a kill."""
    return _read_marks(database.with_name("journal.marks")).is_copy(database)


def _read_marks(path: Path) -> Marked:
    try:
        return _parse(files.read_whole(path, _FILE_BYTES))
    except (OSError, MaestroError):  # there is none, or it is being made
        return Marked()


def _parse(data: bytes) -> Marked:
    """Read the file; what does not check out says nothing."""
    header = data[: _MARKS_HEADER.size]
    if (
        len(data) < 64
        or _CHECK.pack(crc32(header)) != data[_MARKS_HEADER.size : _MARKS_HEADER.size + 4]
    ):
        return Marked()
    magic, generation, database, log, index, slots = _MARKS_HEADER.unpack(header)
    if magic != _MARKS_MAGIC:
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
