"""A file of lines that many processes append to, one at a time, each line durable or absent."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple, Self

from maestro_hive.kernel.errors import StorageError
from maestro_hive.kernel.files import FileLock, reason_of, sync_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

#: How many bytes are read at a time.
_READ_BYTES = 1 << 16


class Tail(NamedTuple):
    """The last complete line of a file, without its end; and where the next one belongs."""

    line: bytes | None
    end: int


class AppendedFile(FileLock):
    """The lines of a file under its own lock, a ``flock``: no other code's close releases it.

    Deleting the file does not deceive it: ``is_in_place`` says whether it is still the one at its
    path. With ``create=False`` it need not be writable.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def is_in_place(self) -> bool:
        """Return whether the path still names the file that is locked."""
        try:
            found = os.stat(self.path, follow_symlinks=False)  # noqa: PTH116 - as the next one
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(self._open_fd()))

    def size(self) -> int:
        """Return how many bytes it has."""
        return os.fstat(self._open_fd()).st_size

    def tail(self) -> Tail:
        """Return its last complete line; what follows it was cut off while it was written."""
        fd, at = self._open_fd(), self.size()
        found, end = b"", -1
        while at > 0:
            start = max(0, at - _READ_BYTES)
            found = self._read(fd, start, at - start) + found
            at = start
            if end < 0:
                last = found.rfind(b"\n")
                if last < 0:
                    continue
                end, found = at + last + 1, found[:last]
            before = found.rfind(b"\n")
            if before >= 0:
                return Tail(found[before + 1 :], end)
        return Tail(None, 0) if end < 0 else Tail(found, end)

    def lines(self) -> Iterator[tuple[bytes, bool]]:
        """Yield each line without its end, and whether it has one."""
        fd, at, rest = self._open_fd(), 0, b""
        size = self.size()
        while at < size:
            data = self._read(fd, at, min(_READ_BYTES, size - at))
            at += len(data)
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                yield line, True
        if rest:
            yield rest, False

    def _read(self, fd: int, start: int, length: int) -> bytes:
        parts: list[bytes] = []
        while length > 0:
            try:
                parts.append(os.pread(fd, length, start))
            except OSError as error:
                raise StorageError(f"{self.path} cannot be read: {reason_of(error)}") from error
            if not parts[-1]:
                raise StorageError(f"{self.path} became shorter while it was read")
            start, length = start + len(parts[-1]), length - len(parts[-1])
        return b"".join(parts)

    def append(self, line: bytes, end: int) -> None:
        """Write a line at ``end``, which is that of the tail; durable on return, or not there."""
        fd, data = self._open_fd(), line + b"\n"
        is_new = not end
        try:
            os.ftruncate(fd, end)  # what a killed process did not finish
            try:
                self._write(fd, data, end)
                os.fsync(fd)
            except BaseException:
                os.ftruncate(fd, end)
                raise
            if is_new:
                sync_folder(self.path.parent)
        except OSError as error:
            raise StorageError(f"{self.path} cannot be written: {reason_of(error)}") from error

    def _write(self, fd: int, data: bytes, at: int) -> None:
        while data:
            written = os.pwrite(fd, data, at)
            if not written:
                raise StorageError(f"{self.path} was written only in part; free space on its disk")
            data, at = data[written:], at + written
