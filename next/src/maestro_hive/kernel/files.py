"""Files: the one module that names, writes, renames and locks them.

Everything written by it is private (files 0600, folders 0700, whatever the umask), complete or
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
    from collections.abc import Callable, Iterator

#: The largest document that is read into memory.
MAX_FILE_BYTES = 256 * 1024 * 1024

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
    """Raise, for an error of the system, the error that the function makes of its reason."""
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
            raise FolderError(at, "is a symbolic link or a file, and must be a folder")
    return at


def _make_one_folder(folder: Path) -> bool:
    """Create a folder unless its name is taken; return whether it is a folder, and no link."""
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


def write_atomically(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path``, completely and durably, or change nothing."""
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


def _write_new(folder: int, name: str, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with opened(name, flags, folder) as fd:
        os.fchmod(fd, 0o600)
        rest = memoryview(data)
        while rest:
            written = os.write(fd, rest)
            if not written:
                raise OSError(errno.EIO, "the disk takes no more bytes")
            rest = rest[written:]
        os.fsync(fd)


def create_private(path: Path) -> None:
    """Create ``path``, empty, or keep the file that is there; only its owner may read it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with explained(lambda reason: FolderError(path, f"cannot be created: {reason}")):
        try:
            with opened(path, flags) as fd:
                os.fchmod(fd, 0o600)
                sync_folder(path.parent)
        except FileExistsError:
            _make_private(path)


def _make_private(path: Path) -> None:
    """Take the rights to a file from others, by name: closing a descriptor ends SQLite's locks."""
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


def read_whole(path: Path, limit: int = MAX_FILE_BYTES) -> bytes:
    """Return the bytes of a regular file; no links, no devices, nothing over ``limit``."""
    try:
        with opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode):
                raise DocumentCorruptError(str(path), "it is not a regular file")
            size = facts.st_size
            if size > limit:
                reason = f"it has {size:,} bytes, and the limit is {limit:,}"
                raise DocumentCorruptError(str(path), reason)
            with open(fd, "rb", closefd=False) as file:
                data = file.read(size + 1)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DocumentCorruptError(str(path), "it is a symbolic link") from error
        if error.errno in {errno.ENXIO, errno.EOPNOTSUPP}:  # a socket
            raise DocumentCorruptError(str(path), "it is not a regular file") from error
        if error.errno in {errno.EIO, errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.ENOMEM}:
            raise StorageError(f"{path} could not be read: {reason_of(error)}") from error
        raise
    if len(data) != size:
        raise DocumentCorruptError(str(path), "it changed while it was read")
    return data


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


def reason_of(error: OSError | ValueError) -> str:
    """Return the system's text for an error, without its number."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


# --- locks -----------------------------------------------------------------------------------


class FileLock:
    """An exclusive or shared ``flock`` on a file that exists for it; it ends with the process.

    Closing another descriptor of the file does not release it, and a forked child has no part in
    it. With ``create=False`` the path is an existing file or folder, and is not changed.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        self.path = path
        self._fd = -1
        flags = (os.O_RDWR | os.O_CREAT) if create else os.O_RDONLY
        try:
            self._fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
            mode = os.fstat(self._fd).st_mode
            is_regular = stat.S_ISREG(mode)
            if is_regular and create:
                os.fchmod(self._fd, 0o600)
        except OSError as error:
            self.close()
            raise FolderError(path, f"cannot be used as a lock: {reason_of(error)}") from error
        if not (is_regular or stat.S_ISDIR(mode)):
            self.close()
            raise FolderError(path, "is not a regular file, and must be one")
        _open_locks().add(self)

    def __del__(self) -> None:
        self.close()  # otherwise it would be held until the process and its children end

    def close(self) -> None:
        """Release the lock and close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def acquire(self, timeout: float = 0.0) -> bool:
        """Take the lock, waiting for up to ``timeout`` seconds; return whether it is held.

        Without a timeout, a check of ``is_locked`` at the same moment counts as a holder.
        """
        return self._take(fcntl.LOCK_EX, timeout)

    def share(self, timeout: float = 0.0) -> bool:
        """Share the lock with others that share it, waiting as ``acquire`` does."""
        return self._take(fcntl.LOCK_SH, timeout)

    def _take(self, kind: int, timeout: float) -> bool:
        """Poll: in the kernel, a stopped holder would block it for ever."""
        deadline = time.monotonic() + timeout
        pause = 0.00005
        while not self._flock(kind | fcntl.LOCK_NB):
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(pause * 1.2, 0.001)  # short, so that no process starves
        return True

    def release(self) -> None:
        """Release the lock."""
        self._flock(fcntl.LOCK_UN)

    def write(self, data: bytes) -> None:
        """Replace the text of the lock file: its holder, for people and for error messages."""
        with explained(lambda reason: FolderError(self.path, f"cannot be written: {reason}")):
            os.ftruncate(self._open_fd(), 0)
            os.pwrite(self._open_fd(), data, 0)

    def _flock(self, operation: int) -> bool:
        try:
            fcntl.flock(self._open_fd(), operation)
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


def is_locked(path: Path) -> bool:
    """Return whether a living process holds the lock file ``path``; raise if that is unknown.

    Too many open files, for example, must not make a living process count as dead.
    """
    try:
        with opened(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in _NOT_A_LOCK:
            reason = f"whether its process lives is unknown: {reason_of(error)}"
            raise StorageError(f"{path}: {reason}; try again") from error
    return False


#: The file is missing, or its place is taken by something that is no lock file.
_NOT_A_LOCK = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR)


def _close_inherited(locks: weakref.WeakSet[FileLock]) -> None:
    for lock in list(locks):
        lock.close()


#: The open locks. A forked child closes them, and would otherwise share them with its parent.
_open_locks: PerProcess[weakref.WeakSet[FileLock]] = PerProcess(
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
#: Files with which synchronising programs mark their folders.
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
    resolved = folder.resolve()
    for parent in (resolved, *resolved.parents):
        program = _SYNC_PARENTS.get(parent.name) if "Library" in parent.parts else None
        for marker, name in _SYNC_MARKERS.items():
            # A folder named .dropbox has the settings of Dropbox, in the user's home.
            exists = os.path.isfile if marker == ".dropbox" else os.path.exists
            if exists(f"{parent}/{marker}"):  # Path's versions raise the error of the disk
                program = name
        if program:
            reason = f"is synchronised by {program} (at {parent}), which would copy half a journal"
            raise FolderError(folder, f"{reason}; choose a folder outside it")


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
