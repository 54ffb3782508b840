"""File systems for tests: loop devices whose power can be cut, and disks that are too small."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

from faults.tools import find

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: What ``xfs_io -x -c shutdown`` asks for; ext4 understands it too.
_SHUTDOWN = 0x8004587D
_WITHOUT_FLUSHING = struct.pack("I", 2)
_SIZES = {"ext4": 96 << 20, "xfs": 320 << 20}  # mkfs.xfs refuses less than 300 MB
_MAKE = {"ext4": ["mkfs.ext4", "-q", "-F"], "xfs": ["mkfs.xfs", "-q", "-f"]}
_SECONDS = 120


class MountError(Exception):
    """A file system could not be made or mounted."""


def _do(*words: str) -> None:
    program = find(words[0]) or words[0]
    done = subprocess.run(
        [program, *words[1:]], capture_output=True, text=True, check=False, timeout=_SECONDS
    )
    if done.returncode:
        raise MountError(f"{' '.join(words)}: {done.stderr.strip()[-300:]}")


class LoopDisk:
    """An image with a file system, mounted at ``point`` while it is in use."""

    def __init__(self, kind: str, image: Path, point: Path, size: int | None = None) -> None:
        self.kind, self.image, self.point = kind, image, point
        point.mkdir(exist_ok=True)
        with image.open("wb") as file:
            file.truncate(size or _SIZES[kind])
        _do(*_MAKE[kind], str(image))

    def mount(self) -> None:
        """Mount it; the file system's own recovery happens here."""
        _do("mount", "-t", self.kind, "-o", "loop", str(self.image), str(self.point))

    def unmount(self) -> None:
        """Unmount it."""
        unmount(self.point)

    def cut(self) -> None:
        """Cut the power: what is not on the disk yet is lost."""
        fd = os.open(self.point, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, _WITHOUT_FLUSHING)
        finally:
            os.close(fd)


def unmount(point: Path) -> None:
    """Unmount, lazily if it is still in use."""
    try:
        _do("umount", str(point))
    except MountError:
        _do("umount", "-l", str(point))


@contextmanager
def loop_disk(kind: str, scratch: Path, size: int | None = None) -> Iterator[LoopDisk]:
    """Create, mount and finally unmount a disk."""
    disk = LoopDisk(kind, scratch / f"{kind}.img", scratch / f"{kind}-mount", size)
    disk.mount()
    try:
        yield disk
    finally:
        disk.unmount()
        disk.image.unlink()


@contextmanager
def memory_disk(point: Path, options: str) -> Iterator[Path]:
    """Mount a file system in memory with these limits."""
    point.mkdir(exist_ok=True)
    _do("mount", "-t", "tmpfs", "-o", options, "faults", str(point))
    try:
        yield point
    finally:
        unmount(point)


def remount(point: Path, options: str) -> None:
    """Change the limits or the mode of a mounted file system."""
    _do("mount", "-o", f"remount,{options}", str(point))
