"""The one module that names, writes and renames files.

Everything written here is private (files 0600, folders 0700, whatever the umask), complete or
absent (temporary file, write, fsync, rename, fsync of the folder), and inside the folder it was
meant for (checked names, no symbolic links followed below that folder).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from maestro_hive.kernel.errors import (
    AtomicWriteError,
    DocumentCorruptError,
    FolderError,
    InvalidIdentifierError,
    MaestroError,
    StorageError,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

#: The largest document that is read into memory.
MAX_FILE_BYTES = 256 * 1024 * 1024
#: How many bytes are collected for one write.
_WRITE_BYTES = 64 * 1024

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
        try:
            _make_one_folder(folder)
        except (OSError, ValueError) as error:
            raise FolderError(folder, f"cannot be created: {reason_of(error)}") from error
    return path


def make_folder_inside(root: Path, *names: str) -> Path:
    """Create ``root``/``names``… and refuse to pass through a symbolic link below ``root``."""
    at = make_private_folder(root)
    for name in names:
        if name in {"", ".", ".."} or "/" in name or "\0" in name:
            raise InvalidIdentifierError("folder", name, "is not the name of one folder")
        at = at / name
        try:
            _make_one_folder(at)
            is_folder = stat.S_ISDIR(at.lstat().st_mode)
        except (OSError, ValueError) as error:
            raise FolderError(at, f"cannot be created: {reason_of(error)}") from error
        if not is_folder:
            raise FolderError(at, "is a symbolic link or a file where a folder of ours should be")
    return at


def _make_one_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return
    folder.chmod(0o700)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    _sync(folder, os.O_DIRECTORY)


def _sync(path: Path, kind: int) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | kind)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# --- whole files -----------------------------------------------------------------------------


def write_atomically(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Put ``data``, whole or in chunks, at ``path``, completely and durably, or change nothing."""
    temporary = f".{path.name[:50]}.{secrets.token_hex(8)}.tmp"  # 50 may be 200 bytes
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise AtomicWriteError(path, reason_of(error)) from error
    try:
        try:
            _write_new(folder, temporary, data)
            os.rename(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException as error:  # also Ctrl+C must not leave half a file behind
            with contextlib.suppress(OSError, ValueError):
                os.unlink(temporary, dir_fd=folder)
            if isinstance(error, OSError | ValueError) and not isinstance(error, MaestroError):
                raise AtomicWriteError(path, reason_of(error)) from error
            raise
        try:
            os.fsync(folder)
        except OSError as error:
            reason = f"its folder could not be synced ({reason_of(error)})"
            raise AtomicWriteError(path, reason, replaced=True) from error
    finally:
        os.close(folder)


def _write_new(folder: int, name: str, data: bytes | Iterable[bytes]) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, 0o600, dir_fd=folder)
    try:
        os.fchmod(fd, 0o600)
        for chunk in _of_good_size([data] if isinstance(data, bytes) else data):
            _write_chunk(fd, chunk)
        os.fsync(fd)
    finally:
        os.close(fd)


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
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
        try:
            os.fchmod(fd, 0o600)
            sync_folder(path.parent)
        finally:
            os.close(fd)
    except FileExistsError:
        _make_private(path)
    except OSError as error:
        raise FolderError(path, f"cannot be created: {reason_of(error)}") from error


def _make_private(path: Path) -> None:
    """Take a file's rights from others, by name: opening and closing it ends SQLite's locks."""
    facts = path.lstat()
    if not stat.S_ISREG(facts.st_mode):
        raise FolderError(path, "is not a regular file, and must be one")
    if facts.st_mode & 0o077:
        try:
            path.chmod(0o600)
        except OSError as error:
            reason = f"is open to others, and cannot be made private: {reason_of(error)}"
            raise FolderError(path, reason) from error


def sync_file(path: Path) -> None:
    """Make a file that another library wrote durable, and its name too."""
    _sync(path, os.O_NOFOLLOW)
    sync_folder(path.parent)


def read_whole(path: Path, limit: int = MAX_FILE_BYTES) -> bytes:
    """Return the bytes of a regular file; no links, no devices, nothing over ``limit``."""
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
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise DocumentCorruptError(str(path), "it is not a regular file")
        if facts.st_size > limit:
            reason = f"it has {facts.st_size:,} bytes, and the limit is {limit:,}"
            raise DocumentCorruptError(str(path), reason)
        with os.fdopen(fd, "rb", closefd=False) as file:
            data = file.read(facts.st_size + 1)
    except OSError as error:
        raise StorageError(f"{path} could not be read: {reason_of(error)}") from error
    finally:
        os.close(fd)
    if len(data) != facts.st_size:
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
    try:
        path.unlink(missing_ok=True)
        sync_folder(path.parent)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError(f"{path} could not be removed: {reason_of(error)}") from error


def is_link(path: Path) -> bool:
    """Return whether ``path`` is a symbolic link; raise if that is unknown."""
    try:
        return path.is_symlink()
    except OSError as error:
        raise FolderError(path, f"cannot be examined: {reason_of(error)}") from error


def reason_of(error: OSError | ValueError) -> str:
    """Return the system's text for an error, without its number."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


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
            if _is_marked(parent / marker):
                program = name
        if program:
            reason = f"is synchronised by {program} (at {parent}), which would copy half a journal"
            raise FolderError(folder, f"{reason}; choose a folder outside it")


def _is_marked(marker: Path) -> bool:
    if marker.name == ".dropbox":  # a folder of this name holds the settings, in the user's home
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
