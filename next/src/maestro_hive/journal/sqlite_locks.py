"""Locks that keep a SQLite file whole while the user's own code opens and closes it.

SQLite's locks belong to the process, and any ``close`` of the file drops them. The locks here are
``flock``s, which stay:

- ``journal.lock``: exclusive to write, open, copy the log and close; shared to read. The file also
  stores the last mark of the log and the clock that all processes share.
- ``holders/<token>``: one file per process, locked while the process lives. It stores the files
  that the process uses and its mark: how much of which log was synced, and how much copied.

Two locks of open file descriptions (``Guards``) keep SQLite itself, this copy or another one in any
process, from treating the database as unused: it would rebuild the log's index or delete the log.

Other programs may read the journal. A program that writes to it through a SQLite of its own, in a
process that also uses this package, destroys it: nothing here can prevent that.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import struct
import sys
import time
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from maestro_hive.journal.database import Holder
from maestro_hive.kernel.errors import FolderError
from maestro_hive.kernel.files import make_folder_inside

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from maestro_hive.kernel.clock import Clock

if sys.platform == "darwin":
    #: F_OFD_SETLK and F_OFD_GETLK, which Python does not name on every platform.
    _SETLK, _GETLK = 90, 92
    #: ``struct flock``: start, length, pid, type, whence.
    _FLOCK, _KIND = struct.Struct("qqihh"), 3
else:
    _SETLK, _GETLK = 37, 36
    #: ``struct flock``: type, whence, start, length, pid.
    _FLOCK, _KIND = struct.Struct("hhqqi4x"), 0

#: Where SQLite locks: a database in use, and a log's index in use.
DATABASE_BYTES, INDEX_BYTES = (0x4000_0002, 510), (128, 1)
#: A mark, with its checksum.
_MARK = struct.Struct("<8sQQ")
_CHECK = struct.Struct("<I")
_MARK_BYTES = _MARK.size + _CHECK.size
#: Inodes of the database, its log, the log's index and the lock file, in a process' file.
_FILES = struct.Struct("<QQQQ")
_FILES_AT = 32
_FACTS_AT = _FILES_AT + _FILES.size
#: The boot and its clock, in the lock file: checksum of the boot's name, seconds from boot to 1970.
_CLOCK = struct.Struct("<Id")
_CLOCK_AT = 64
_TOKEN = re.compile(r"[0-9a-f]{16}")
_PAUSES = (0.0, *[0.0002] * 50, *[0.002] * 15_000)

if sys.platform == "darwin":

    def sync_fd(fd: int) -> None:
        """Make a file's content durable; ``fsync`` alone leaves it in the cache of the drive."""
        try:
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
        except OSError:  # not every file system has it
            os.fsync(fd)

else:
    sync_fd = os.fdatasync


def open_private(path: Path, flags: int = 0) -> int:
    """Open a file of the journal for reading and writing; a symbolic link is refused."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    except OSError as error:
        reason = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise FolderError(path, f"cannot be opened: {reason}") from error
    if flags & os.O_CREAT:
        os.fchmod(fd, 0o600)
    return fd


def inodes(files: tuple[Path, ...]) -> tuple[int, ...]:
    """Return the inodes of files; 0 for one that does not exist."""
    found = []
    for each in files:
        try:
            found.append(os.stat(each).st_ino)  # noqa: PTH116 - half the time of Path's
        except FileNotFoundError:
            found.append(0)
    return tuple(found)


# --- marks ----------------------------------------------------------------------------------------


class Mark(NamedTuple):
    """A log by its salts, and how many of its frames were synced, and copied into the database."""

    salts: bytes
    synced: int
    copied: int


def _packed(mark: Mark) -> bytes:
    data = _MARK.pack(*mark)
    return data + _CHECK.pack(crc32(data))


def _marks(text: bytes) -> list[Mark]:
    data = text[:_MARK_BYTES]
    if not any(data) or _CHECK.pack(crc32(data[: _MARK.size])) != data[_MARK.size :]:
        return []
    return [Mark._make(_MARK.unpack(data[: _MARK.size]))]


# --- the lock of the folder -----------------------------------------------------------------------


class FolderLock:
    """The lock file; each object is for one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._fd = open_private(path, os.O_CREAT)

    @contextlib.contextmanager
    def held(self, how: int = fcntl.LOCK_EX) -> Iterator[None]:
        """Hold the lock during a block."""
        self.take(how)
        try:
            yield
        finally:
            self.release()

    def take(self, how: int = fcntl.LOCK_EX) -> None:
        """Wait for the lock; raise ``TimeoutError`` after 30 seconds."""
        for pause in _PAUSES:
            if pause:
                time.sleep(pause)
            try:
                return fcntl.flock(self._fd, how | fcntl.LOCK_NB)
            except BlockingIOError:
                pass
        raise TimeoutError(
            "another process has been inside a write for 30 seconds; it may be stopped"
        )

    def release(self) -> None:
        """Give the lock back."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def marks(self) -> list[Mark]:
        """Return the mark that the last process left here, if it did."""
        return _marks(os.pread(self._fd, _MARK_BYTES, 0))

    def leave(self, mark: Mark) -> None:
        """Store a mark; from the first one on, a database that is missing is a loss."""
        os.pwrite(self._fd, _packed(mark), 0)

    def clock_offset(self, clock: Clock) -> float:
        """Return the time at which this boot started, as its first process measured it.

        Setting the wall clock does not change it, so no lease or wait ends early.
        """
        boot = clock.boot_id().encode()
        stored = os.pread(self._fd, _CLOCK.size, _CLOCK_AT)
        if len(stored) == _CLOCK.size:
            check, offset = _CLOCK.unpack(stored)
            if check == crc32(boot + stored[_CHECK.size :]):
                return float(offset)
        offset = clock.now().timestamp() - clock.boot_seconds()
        number = _CLOCK.pack(0, offset)[_CHECK.size :]
        os.pwrite(self._fd, _CLOCK.pack(crc32(boot + number), offset), _CLOCK_AT)
        return offset

    def close(self) -> None:
        """Close it, which gives the lock back unless a forked process shares it."""
        os.close(self._fd)


# --- guards ---------------------------------------------------------------------------------------


class Guards:
    """Two locks that keep every SQLite from treating the database and its log as unused."""

    def __init__(self, database: Path, index: Path) -> None:
        self.database = open_private(database)
        try:
            self.index = open_private(index, os.O_CREAT)
        except BaseException:
            os.close(self.database)
            raise

    def index_is_used(self) -> bool:
        """Return whether any SQLite, or any guard of another process, has the log's index open."""
        return _is_locked(self.index, *INDEX_BYTES) or False

    def sqlite_holds(self) -> bool:
        """Return whether SQLite holds locks where these guards expect them; True if unknown."""
        return (
            _is_locked(self.database, *DATABASE_BYTES) is not False
            and _is_locked(self.index, *INDEX_BYTES) is not False
        )

    def commits(self) -> bytes:
        """Return SQLite's count of commits, which stands in the log's index."""
        return os.pread(self.index, 4, 8)

    def lock(self) -> None:
        """Take the locks. Some sandboxes have none: this package's own processes need none."""
        for fd, (start, length) in ((self.database, DATABASE_BYTES), (self.index, INDEX_BYTES)):
            with contextlib.suppress(OSError):
                fcntl.fcntl(fd, _SETLK, _range(fcntl.F_RDLCK, start, length))

    def close(self) -> None:
        """Give the locks back."""
        for fd in (self.database, self.index):
            os.close(fd)


def _range(kind: int, start: int, length: int) -> bytes:
    if sys.platform == "darwin":
        return _FLOCK.pack(start, length, 0, kind, os.SEEK_SET)
    else:  # noqa: RET505 - type checkers see one of the two
        return _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)


def _is_locked(fd: int, start: int, length: int) -> bool | None:
    """Return whether others have locked bytes of a file; None if the system does not report it."""
    try:
        found = fcntl.fcntl(fd, _GETLK, _range(fcntl.F_WRLCK, start, length))
    except OSError:
        return None
    return int(_FLOCK.unpack(found)[_KIND]) != fcntl.F_UNLCK


# --- processes ------------------------------------------------------------------------------------


class Presence:
    """This process as others see it: a file that is locked while it lives."""

    def __init__(self, folder: Path, lock: FolderLock) -> None:
        self._folder, self._lock = make_folder_inside(folder, "holders"), lock
        self.holder = Holder.of_this_process()
        self._path = self._folder / self.holder.token
        self._mark = Mark(bytes(8), 0, 0)
        self._fd = open_private(self._path, os.O_CREAT | os.O_EXCL)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        os.pwrite(self._fd, bytes(_FACTS_AT) + str(self.holder).encode(), 0)

    def note(self, mark: Mark) -> None:
        """Store how far the log is synced. A power cut makes a mark old, not wrong: no sync."""
        self._mark = mark
        os.pwrite(self._fd, _packed(mark), 0)

    def use(self, files: tuple[int, ...]) -> None:
        """Store the inodes of the files this process uses."""
        os.pwrite(self._fd, _FILES.pack(*files), _FILES_AT)

    def leave_mark(self, *, void: bool = False) -> None:
        """Copy the latest mark into the lock file, because this process' own file is deleted."""
        salts, synced, copied = Mark(bytes(8), 0, 0) if void else self._mark
        for mark in [] if void else self._lock.marks():
            if mark.salts == salts:
                synced, copied = max(synced, mark.synced), max(copied, mark.copied)
            elif mark.salts > salts:  # SQLite numbers the generations of a log upwards
                return
        self._lock.leave(Mark(salts, synced, copied))

    def others(self) -> list[str]:
        """Return the tokens of the other processes that have a file, living or dead."""
        names = (each.name for each in self._folder.iterdir())
        return [each for each in names if _TOKEN.fullmatch(each) and each != self.holder.token]

    def is_alone(self) -> bool:
        """Return whether no other process uses the journal."""
        return not any(map(self.lives, self.others()))

    def lives(self, token: str) -> bool:
        """Return whether the process with a token is alive."""
        if token == self.holder.token:
            return True
        if not _TOKEN.fullmatch(token):
            return False
        try:
            fd = os.open(self._folder / token, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def files_of_others(self) -> set[tuple[int, ...]]:
        """Return the inodes of the files that other living processes use."""
        texts = [self._text(each) for each in self.others() if self.lives(each)]
        found = {_FILES.unpack_from(text, _FILES_AT) for text in texts if len(text) >= _FACTS_AT}
        return found - {(0, 0, 0, 0)}

    def lost(self, salts: bytes | None, frames: int) -> Mark | None:
        """Return the mark of which a log with this many sound frames lacks a part, if any."""
        texts = [self._text(each) for each in self.others()]
        marks = [*self._lock.marks(), *(mark for text in texts for mark in _marks(text))]
        if salts is None and marks:  # that log is gone: it was of the last generation
            salts = max(marks).salts
        own = [mark for mark in marks if mark.salts == salts]
        synced = max((mark.synced for mark in own), default=0)
        copied = max((mark.copied for mark in own), default=0)
        # All of a copied log may be missing; a first part of it shows old pages again.
        if synced > frames and (frames or synced > copied):
            return Mark(salts or bytes(8), synced, copied)
        return None

    def _text(self, token: str) -> bytes:
        try:
            fd = os.open(self._folder / token, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:  # closed just now
            return b""
        try:
            return os.pread(fd, 256, 0)
        finally:
            os.close(fd)

    def remove_dead(self) -> None:
        """Delete the files of processes that ended without closing."""
        for token in self.others():
            if not self.lives(token):
                (self._folder / token).unlink(missing_ok=True)

    def close(self, *, inherited: bool = False) -> None:
        """Delete the file of this process; one that was inherited by a fork is only closed."""
        if not inherited:
            self._path.unlink(missing_ok=True)
        os.close(self._fd)
