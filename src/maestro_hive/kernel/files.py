"""The one module that names, writes, renames and locks files.

Everything written here is private (files 0600, folders 0700, whatever the umask), complete or
absent (temporary file, write, fsync, rename, fsync of the folder), and inside the folder it was
meant for (checked names, no symbolic links followed below that folder).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import struct
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from maestro_hive.kernel.errors import (
    AtomicWriteError,
    DocumentCorruptError,
    FolderError,
    InvalidIdentifierError,
    MaestroError,
    StorageError,
    StoreClosedError,
)
from maestro_hive.kernel.process import PerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

#: The largest document that is read into memory.
MAX_FILE_BYTES = 256 * 1024 * 1024
#: How many bytes are collected for one write, and how many are read at a time.
_WRITE_BYTES = 64 * 1024
_READ_BYTES = 1 << 30
_CHUNK_BYTES = 1 << 20

_IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:\-]{0,127}", re.ASCII)


def check_identifier(value: str, what: str) -> str:
    """Return ``value`` if it is safe as the name of a file or folder; raise otherwise."""
    if not isinstance(value, str):
        raise InvalidIdentifierError(what, value, f"is a {type(value).__name__}, not a string")
    if not value:
        raise InvalidIdentifierError(what, value, "is empty")
    if not _IDENTIFIER.fullmatch(value):
        raise InvalidIdentifierError(what, value, "cannot be used as a name")
    return value


@contextlib.contextmanager
def explained(error: Callable[[str], MaestroError]) -> Iterator[None]:
    """Raise, for an error of the system, the one that this function makes from its reason."""
    try:
        yield
    except (OSError, ValueError) as cause:
        if isinstance(cause, MaestroError):
            raise
        raise error(reason_of(cause)) from cause


@contextlib.contextmanager
def opened(path: Path | str, flags: int, folder: int | None = None) -> Iterator[int]:
    """Open a file, which is private if it is created, and close it at the end."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        yield fd
    finally:
        os.close(fd)


# --- folders ---------------------------------------------------------------------------------


def make_private_folder(path: Path) -> Path:
    """Create ``path`` and what is missing above it, each folder 0700 and durably linked."""
    missing: list[Path] = []
    at = path
    # Unlike Path's, these return False also for what may not be read or cannot be named.
    while not os.path.exists(at):  # noqa: PTH110
        if os.path.islink(at):  # noqa: PTH114
            raise FolderError(at, "is a symbolic link that leads nowhere")
        missing.append(at)
        at = at.parent
    if not os.path.isdir(at):  # noqa: PTH112
        raise FolderError(at, "is not a folder")
    for folder in reversed(missing):
        _make_one_folder(folder)
    return path


def make_folder_inside(root: Path, *names: str) -> Path:
    """Create ``root``/``names``… and refuse to pass through a symbolic link below ``root``."""
    at = make_private_folder(root)
    for name in names:
        if name in {"", ".", ".."} or "/" in name or "\0" in name:
            raise InvalidIdentifierError("folder", name, "is not the name of one folder")
        at = at / name
        if not _make_one_folder(at):
            raise FolderError(at, "is a symbolic link or a file where a folder of ours should be")
    return at


def _make_one_folder(folder: Path) -> bool:
    """Create a folder unless something is there; return whether it is a folder, and no link."""
    with explained(lambda reason: FolderError(folder, f"cannot be created: {reason}")):
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            is_folder = stat.S_ISDIR(folder.lstat().st_mode)
        else:
            folder.chmod(0o700)
            sync_folder(folder.parent)
            is_folder = True
    return is_folder


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    _sync(folder, os.O_DIRECTORY)


def _sync(path: Path, kind: int) -> None:
    with opened(path, os.O_RDONLY | kind) as fd:
        os.fsync(fd)


# --- whole files -----------------------------------------------------------------------------


def write_atomically(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Put ``data``, whole or in chunks, at ``path``, completely and durably, or change nothing."""
    temporary = f".{path.name[:50]}.{secrets.token_hex(8)}.tmp"  # 50 may be 200 bytes
    with (
        explained(lambda reason: AtomicWriteError(path, reason)),
        opened(path.parent, os.O_RDONLY | os.O_DIRECTORY) as folder,
    ):
        try:
            _write_new(folder, temporary, data)
            os.rename(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:  # also Ctrl+C must not leave half a file behind
            with contextlib.suppress(OSError, ValueError):
                os.unlink(temporary, dir_fd=folder)
            raise
        try:
            os.fsync(folder)
        except OSError as error:
            reason = f"its folder could not be synced ({reason_of(error)})"
            raise AtomicWriteError(path, reason, replaced=True) from error


def _write_new(folder: int, name: str, data: bytes | Iterable[bytes]) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with opened(name, flags, folder) as fd:
        os.fchmod(fd, 0o600)
        for chunk in _of_good_size([data] if isinstance(data, bytes) else data):
            _write_chunk(fd, chunk)
        os.fsync(fd)


def _of_good_size(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same bytes in chunks that are worth a system call."""
    waiting: list[bytes] = []
    size = 0
    for chunk in chunks:
        waiting.append(chunk)
        size += len(chunk)
        if size >= _WRITE_BYTES:
            yield b"".join(waiting)
            waiting, size = [], 0
    yield b"".join(waiting)


def _write_chunk(fd: int, chunk: bytes) -> None:
    rest = memoryview(chunk)
    while rest:
        written = os.write(fd, rest)
        if not written:
            raise OSError(errno.EIO, "the disk takes no more bytes")
        rest = rest[written:]


def create_private(path: Path) -> None:
    """Make sure ``path`` exists as a file that only its owner may read; keep it if it is there."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with explained(lambda reason: FolderError(path, f"cannot be created: {reason}")):
        try:
            with opened(path, flags) as fd:
                os.fchmod(fd, 0o600)
                sync_folder(path.parent)
        except FileExistsError:
            _make_private(path)


def _make_private(path: Path) -> None:
    """Take a file's rights from others, by name: opening and closing it ends SQLite's locks."""
    facts = path.lstat()
    if not stat.S_ISREG(facts.st_mode):
        raise FolderError(path, "is not a regular file, and must be one")
    problem = "is open to others, and cannot be made private"
    if facts.st_mode & 0o077:
        with explained(lambda reason: FolderError(path, f"{problem}: {reason}")):
            path.chmod(0o600)


def sync_file(path: Path) -> None:
    """Make a file that another library wrote durable, and its name too."""
    _sync(path, os.O_NOFOLLOW)
    sync_folder(path.parent)


class ReadFile:
    """A file that is read in parts, by their place; closed when nobody refers to it.

    ``fd`` is an open descriptor, which is its own from now on. It stays the same file when another
    one is renamed to its path.
    """

    def __init__(self, fd: int, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self._fd = fd

    def __del__(self) -> None:
        os.close(self._fd)

    def read_at(self, start: int, length: int) -> bytes:
        """Return so many bytes from a place on."""
        parts: list[bytes] = []
        try:
            while length > 0:
                parts.append(os.pread(self._fd, min(length, _READ_BYTES), start))
                if not parts[-1]:
                    raise DocumentCorruptError(self.name, "it changed while it was read")
                start, length = start + len(parts[-1]), length - len(parts[-1])
        except OSError as error:
            raise StorageError(f"{self.name} could not be read: {reason_of(error)}") from error
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def chunks(self) -> Iterator[bytes]:
        """Yield all of it, in parts."""
        for at in range(0, self.size, _CHUNK_BYTES):
            yield self.read_at(at, min(_CHUNK_BYTES, self.size - at))
        self.check_size()

    def check_size(self) -> None:
        """Raise if it has another size than when it was opened."""
        if os.fstat(self._fd).st_size != self.size:
            raise DocumentCorruptError(self.name, "it changed while it was read")


def open_file(path: Path, limit: int) -> ReadFile:
    """Open a regular file to read parts of it; no links, no devices, nothing over ``limit``."""
    fd = _open_regular(path)
    try:
        size = _size_within(fd, str(path), limit)
    except BaseException:
        os.close(fd)
        raise
    return ReadFile(fd, str(path), size)


def read_whole(path: Path, limit: int = MAX_FILE_BYTES) -> bytes:
    """Return the bytes of a regular file; no links, no devices, nothing over ``limit``."""
    file = open_file(path, limit)
    data = file.read_at(0, file.size)
    file.check_size()
    return data


def _open_regular(path: Path) -> int:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DocumentCorruptError(str(path), "it is a symbolic link") from error
        if error.errno in {errno.ENXIO, errno.EOPNOTSUPP}:  # a socket
            raise DocumentCorruptError(str(path), "it is not a regular file") from error
        if error.errno in {errno.EIO, errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.ENOMEM}:
            raise StorageError(f"{path} could not be read: {reason_of(error)}") from error
        raise
    return fd


def _size_within(fd: int, name: str, limit: int) -> int:
    try:
        facts = os.fstat(fd)
    except OSError as error:
        raise StorageError(f"{name} could not be read: {reason_of(error)}") from error
    if not stat.S_ISREG(facts.st_mode):
        raise DocumentCorruptError(name, "it is not a regular file")
    if facts.st_size > limit:
        reason = f"it has {facts.st_size:,} bytes, and the limit is {limit:,}"
        raise DocumentCorruptError(name, reason)
    return facts.st_size


def set_aside(path: Path) -> Path:
    """Rename a damaged file so that it is no longer found; return its new name."""
    for number in range(1, 10_000):
        aside = path.with_name(f"{path.name}.damaged-{number}")
        if not os.path.lexists(aside):
            try:
                path.rename(aside)
                sync_folder(path.parent)
            except FileNotFoundError:
                raise
            except OSError as error:
                raise StorageError(f"{path} could not be set aside: {reason_of(error)}") from error
            return aside
    raise FolderError(path, "has 9,999 damaged copies beside it already; move them away")


def remove(path: Path) -> None:
    """Delete a file durably; it is no error if it is gone already."""
    with (
        explained(lambda reason: StorageError(f"{path} could not be removed: {reason}")),
        contextlib.suppress(FileNotFoundError),
    ):
        path.unlink(missing_ok=True)
        sync_folder(path.parent)


def is_link(path: Path) -> bool:
    """Return whether ``path`` is a symbolic link; raise if that is unknown."""
    try:
        return path.is_symlink()
    except OSError as error:
        raise FolderError(path, f"cannot be examined: {reason_of(error)}") from error


def reason_of(error: OSError | ValueError) -> str:
    """Return the system's text for an error, without its number."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


# --- locks -----------------------------------------------------------------------------------

_EXCLUSIVE_NOW = fcntl.LOCK_EX | fcntl.LOCK_NB
_SHARED_NOW = fcntl.LOCK_SH | fcntl.LOCK_NB


class _Descriptor:
    """A descriptor that a lock is held by. A forked child does not share it: it closes its copy."""

    def __init__(self, path: Path, flags: int) -> None:
        self.path = path
        self._fd = -1
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o600)
        _open_locks().add(self)

    def __del__(self) -> None:
        self.close()  # or it would be held as long as the process lives, and by its children

    def close(self) -> None:
        """Release the lock and close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class FileLock(_Descriptor):
    """An exclusive or shared ``flock`` on a file that exists for it; it ends with the process.

    Closing another descriptor of the file does not release it. With ``create=False`` the file must
    exist, need not be writable, and is not changed.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        try:
            super().__init__(path, os.O_RDWR | os.O_CREAT if create else os.O_RDONLY)
            is_regular = stat.S_ISREG(os.fstat(self._fd).st_mode)
            if is_regular and create:
                os.fchmod(self._fd, 0o600)
        except OSError as error:
            self.close()
            raise FolderError(path, f"cannot be used as a lock: {reason_of(error)}") from error
        if not is_regular:
            self.close()
            raise FolderError(path, "is not a regular file, and must be one")

    def try_acquire(self) -> bool:
        """Take the lock if no process has it, shares it, or checks it just now (``is_locked``).

        Where such checks must not matter, use ``acquire``: they are over in a moment.
        """
        return self._flock(_EXCLUSIVE_NOW)

    def _flock(self, kind: int) -> bool:
        try:
            fcntl.flock(self._open_fd(), kind)
        except BlockingIOError:
            return False
        except OSError as error:
            raise FolderError(self.path, f"cannot be locked: {reason_of(error)}") from error
        return True

    def _open_fd(self) -> int:
        if self._fd < 0:
            raise StoreClosedError(
                f"the lock {self.path} has been closed, or belongs to the process that this one"
                " was forked from; open it again"
            )
        return self._fd

    def acquire(self, timeout: float) -> bool:
        """Take the lock, waiting for up to ``timeout`` seconds.

        It polls instead of waiting in the kernel, where a stopped holder would block us for ever.
        The pauses stay short, so that no process starves.
        """
        return self._acquire(_EXCLUSIVE_NOW, timeout)

    def share(self, timeout: float) -> bool:
        """Take the lock together with others that share it, waiting as ``acquire`` does."""
        return self._acquire(_SHARED_NOW, timeout)

    def _acquire(self, kind: int, timeout: float) -> bool:
        try:  # at almost every write the lock is free
            fcntl.flock(self._fd, kind)
        except BlockingIOError:
            return self._wait(kind, timeout)
        except (OSError, ValueError):
            return self._flock(kind)  # which explains the error
        return True

    def _wait(self, kind: int, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        pause = 0.00005
        while time.monotonic() < deadline:
            time.sleep(pause)
            if self._flock(kind):
                return True
            pause = min(pause * 1.2, 0.001)
        return False

    def join(self) -> bool:
        """Share the lock; True if no other process does. Only one at a time may call this."""
        is_first = self.try_acquire()
        self._flock(fcntl.LOCK_SH)
        return is_first

    def release(self) -> None:
        """Release the lock."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        except (OSError, ValueError):
            self._flock(fcntl.LOCK_UN)  # which explains the error

    def write(self, data: bytes) -> None:
        """Write who holds it into the lock file, for people and for error messages."""
        fd = self._open_fd()
        with explained(lambda reason: FolderError(self.path, f"cannot be written: {reason}")):
            os.ftruncate(fd, 0)
            os.pwrite(fd, data, 0)


class FolderLock(FileLock):
    """Such a lock on a folder itself, which must exist."""

    def __init__(self, path: Path) -> None:
        try:
            _Descriptor.__init__(self, path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise FolderError(path, f"cannot be locked: {reason_of(error)}") from error


class RangeLock(_Descriptor):
    """A shared lock on bytes of a file that another library locks by the process (POSIX).

    That library, in this process or another, finds the bytes locked, also after its own locks were
    dropped because some code of the process closed the file. A system without such locks (of open
    file descriptions) is no error: ``hold`` returns False.
    """

    _FLOCK = struct.Struct("hhqqi4x")

    def __init__(self, path: Path, start: int, length: int) -> None:
        super().__init__(path, os.O_RDONLY)
        self._range = (os.SEEK_SET, start, length, 0)

    def is_held_elsewhere(self) -> bool:
        """Return whether another lock on these bytes exists, of whatever process and kind."""
        wanted = self._FLOCK.pack(fcntl.F_WRLCK, *self._range)
        # Asked as the other library asks: its own locks in this process do not count.
        found = fcntl.fcntl(self._fd, fcntl.F_GETLK, wanted)
        return bool(self._FLOCK.unpack(found)[0] != fcntl.F_UNLCK)

    def fileno(self) -> int:
        """Return the descriptor, to read from."""
        return self._fd

    def hold(self) -> bool:
        """Share the lock until ``release`` or ``close``; return whether the system can."""
        return self._set(fcntl.F_RDLCK)

    def release(self) -> None:
        """Release the bytes; the file stays open, since closing it would drop other locks."""
        self._set(fcntl.F_UNLCK)

    def _set(self, kind: int) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, self._FLOCK.pack(kind, *self._range))
        except OSError:
            return False
        return True


def is_locked(path: Path) -> bool:
    """Return whether a living process holds the lock file ``path``; raise if that is unknown.

    A living process must not be taken for dead because of too many open files, say.
    """
    try:
        with opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in _NOT_A_LOCK:
            problem = f"{path}: whether its process lives is unknown: {reason_of(error)}"
            raise StorageError(f"{problem}; try again") from error
    return False


#: There is no file, or something in its place that is no lock file.
_NOT_A_LOCK = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR)


def _close_inherited(locks: weakref.WeakSet[_Descriptor]) -> None:
    for lock in list(locks):
        lock.close()


#: Closed in a forked child, which would otherwise share them with its parent.
_open_locks: PerProcess[weakref.WeakSet[_Descriptor]] = PerProcess(
    weakref.WeakSet, inherited=_close_inherited
)


# --- places -----------------------------------------------------------------------------------

_NETWORK_TYPES = frozenset(
    "nfs nfs3 nfs4 cifs smb3 smbfs 9p afs ceph lustre gfs2 ocfs2 ncpfs coda vboxsf davfs beegfs"
    " glusterfs fuse.sshfs fuse.glusterfs fuse.ceph fuse.s3fs fuse.rclone fuse.davfs2 fuse.gcsfuse"
    " fuse.goofys fuse.grpcfuse fuse.juicefs fuse.mergerfs osxfs".split()
)
#: How the kernel writes spaces, tabs, line ends and backslashes in the name of a mount point.
_ESCAPED = re.compile(r"\\([0-7]{3})")
#: Files by which the programs that synchronise folders mark them.
_SYNC_MARKERS = {
    ".dropbox": "Dropbox",
    ".dropbox.cache": "Dropbox",
    ".stfolder": "Syncthing",
    ".nextcloudsync.log": "Nextcloud",
    ".owncloudsync.log": "ownCloud",
    ".849C9593-D756-4E56-8D6E-42412F2A707B": "OneDrive",
}
_SYNC_PARENTS = {"Mobile Documents": "iCloud Drive", "CloudStorage": "a cloud drive"}


def refuse_shared_folder(folder: Path, mountinfo: str | None = None) -> None:
    """Raise if ``folder`` is on a network file system or in a folder that is synchronised.

    SQLite's locks and shared memory do not work there, and a half-copied journal is lost.
    """
    kind = _file_system_type(folder, mountinfo)
    if kind in _NETWORK_TYPES:
        reason = f"is on a network file system ({kind}), where locks do not work"
        raise FolderError(folder, f"{reason}; choose a folder on a local disk")
    for parent in _upwards(folder):
        program = _SYNC_PARENTS.get(parent.name) if "Library" in parent.parts else None
        for marker, name in _SYNC_MARKERS.items():
            if _is_marked(f"{parent}/{marker}"):
                program = name
        if program:
            reason = f"is synchronised by {program} (at {parent}), which would copy half a journal"
            raise FolderError(folder, f"{reason}; choose a folder outside it")


def _is_marked(marker: str) -> bool:
    if marker.endswith("/.dropbox"):  # a folder of this name holds the settings, in the user's home
        return os.path.isfile(marker)  # noqa: PTH113 - Path's versions raise the error of the disk
    return os.path.exists(marker)  # noqa: PTH110


def _upwards(folder: Path) -> Iterator[Path]:
    resolved = folder.resolve()
    yield resolved
    yield from resolved.parents


def _file_system_type(folder: Path, mountinfo: str | None) -> str | None:
    if mountinfo is None:
        try:
            mountinfo = os.fsdecode(Path("/proc/self/mountinfo").read_bytes())
        except OSError:
            return None
    best, kind = "", None
    where = str(folder.resolve()) + "/"
    for line in mountinfo.split("\n"):
        left, _, right = line.partition(" - ")
        fields = left.split(" ")
        if len(fields) < 5 or not right:
            continue
        point = _ESCAPED.sub(lambda code: chr(int(code[1], 8)), fields[4]).rstrip("/") + "/"
        # The last of equal mount points is the one on top.
        if where.startswith(point) and len(point) >= len(best):
            best, kind = point, right.split()[0]
    return kind
