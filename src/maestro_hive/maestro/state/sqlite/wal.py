"""Finding what a damaged write-ahead log lost.

SQLite reads a log up to the first frame that does not check out and silently drops the rest: right
after a crash, where the rest is half a transaction, and wrong after bit rot, where good frames
follow. The two cases differ: frames are written in order, so the end of a commit of the same
generation *behind* a bad frame means that the bad one had once been written in full.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

from maestro_hive.kernel import files
from maestro_hive.kernel.errors import DocumentCorruptError
from maestro_hive.maestro.state import run_document
from maestro_hive.maestro.state.records import Damage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime
    from pathlib import Path

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
