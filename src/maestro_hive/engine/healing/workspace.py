"""The files that healers look at and repair: below one folder, and restored if a repair fails."""

from __future__ import annotations

import hashlib
import inspect
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from maestro_hive.kernel import files
from maestro_hive.kernel.errors import (
    ConfigurationError,
    DocumentCorruptError,
    MaestroError,
    StorageError,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

#: A source file that is longer is not looked at, and not repaired.
_MAX_BYTES = 4 * 1024 * 1024
_MODE = 0o7777


class FileBefore(NamedTuple):
    """What a file was before a repair (None: it did not exist), and the digest of what it became."""

    data: bytes | None
    mode: int
    after: str
    #: How many of the folders above it did not exist either.
    folders: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return it as it is recorded."""
        known = {"data": self.data, "mode": self.mode, "after": self.after}
        return known | {"folders": self.folders} if self.folders else known

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> FileBefore:
        """Return what ``to_json`` wrote."""
        data = fields["data"]
        known = data if isinstance(data, bytes) else None
        return cls(known, int(fields["mode"]), fields["after"], int(fields.get("folders", 0)))


class Turn:
    """What a thread may write in: it may outlive the wait for it, and others write then."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_over = False

    def __enter__(self) -> None:
        """Let nobody end it meanwhile; raise if it is over."""
        self._lock.acquire()
        if self._is_over:
            self._lock.release()
            raise ConfigurationError("files are not changed any more: nobody waits for it")

    def __exit__(self, *error: object) -> None:
        """Let it be ended."""
        self._lock.release()

    def end(self) -> None:
        """Wait for the file that is being written, and let no other be."""
        with self._lock:
            self._is_over = True


class Workspace:
    """A folder with source files."""

    def __init__(self, root: str | os.PathLike[str] | None = None) -> None:
        self.root = Path(root or Path.cwd()).resolve()

    def path_of(self, name: str) -> Path:
        """Return the path of a file in it; raise if that is outside."""
        path = (self.root / name).resolve()
        if not path.is_relative_to(self.root):
            raise ConfigurationError(
                f"a fix changes {name}, which is not below the workspace {self.root}"
            )
        return path

    def text_of(self, name: str | None) -> str | None:
        """Return the text of a file in it; None if there is none."""
        if name is None:
            return None
        try:
            return files.read_whole(self.path_of(name), _MAX_BYTES).decode("utf-8", "replace")
        except (OSError, ValueError, MaestroError):
            return None

    def change(self, changed: Mapping[str, str], check: Callable[[], bool] | None) -> None:
        """Write files, and restore all of them if one cannot be written or the check fails."""
        before = self.before(changed)
        try:
            self.write(changed, before, check)
        except BaseException as error:
            _, left = self.restore(before, whatever_they_are=True)
            if left:
                raise StorageError(
                    f"{', '.join(left)} of {self.root} could not be restored: no file any more"
                ) from error
            raise

    def before(self, changed: Mapping[str, str]) -> dict[str, FileBefore]:
        """Return what the files are that a repair will change, by name: to restore them by."""
        found = {}
        for name, text in changed.items():
            path, after = self.path_of(name), _digest(text.encode())
            try:
                data, mode = files.read_whole(path, _MAX_BYTES), path.stat().st_mode & _MODE
            except FileNotFoundError:
                found[name] = FileBefore(None, 0o644, after, _missing_folders(path))
            else:
                found[name] = FileBefore(data, mode, after)
        return found

    def write(
        self,
        changed: Mapping[str, str],
        before: Mapping[str, FileBefore],
        check: Callable[[], bool] | None,
        turn: Turn | None = None,
    ) -> None:
        """Write files; raise if one cannot be written, or the check fails: then restore them.

        When its ``turn`` is over, nothing more is written.
        """
        turn = turn or Turn()
        for name, text in changed.items():
            with turn:
                path = self.path_of(name)
                path.parent.mkdir(parents=True, exist_ok=True)
                _write(path, text.encode(), before[name].mode)
        if not (self._parse(changed) if check is None else _passes(check)):
            raise ConfigurationError(
                "the changed files did not pass their check, and were restored"
            )

    def restore(
        self, before: Mapping[str, FileBefore], *, whatever_they_are: bool = False
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Restore as many files as possible; return those, and those that are left as they are.

        These were changed since, by others than the repair, unless all are restored
        ``whatever_they_are``; what is no file of the workspace any more is always left. Folders that
        were made for them are removed if nothing else is in them. Raises the first error of writing.
        Twice is no error.
        """
        restored, left = [], []
        failed: list[Exception] = []
        for name, known in before.items():
            try:
                path, now = self._now(name)
                if path is None:
                    left.append(name)
                elif whatever_they_are or now == known.after:
                    _put_back(path, known)
                    restored.append(name)
                elif now != (None if known.data is None else _digest(known.data)):
                    left.append(name)
                if path is not None:
                    _remove_folders(path, known.folders)
            except (MaestroError, OSError) as error:
                failed.append(error)
        if failed:
            raise failed[0]
        return tuple(restored), tuple(left)

    def _now(self, name: str) -> tuple[Path | None, str | None]:
        """Return where a file is, and the digest of what it is; no path if it is no file of ours."""
        try:
            path = self.path_of(name)
            return path, _digest_of(path)
        except (ConfigurationError, DocumentCorruptError, NotADirectoryError, PermissionError):
            return None, None  # outside, a folder, too long, below what is a file now, or closed
        except RuntimeError:  # a link that leads to itself
            return None, None

    def _parse(self, changed: Mapping[str, str]) -> bool:
        for name, text in changed.items():
            if name.endswith(".py"):
                try:
                    compile(text, name, "exec", dont_inherit=True)
                except (SyntaxError, ValueError):
                    return False
        return True


def _passes(check: Callable[[], bool]) -> bool:
    answer: object = check()
    if inspect.isawaitable(answer):
        if inspect.iscoroutine(answer):
            answer.close()
        raise TypeError("the check of a fix must not be async")
    return bool(answer)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _digest_of(path: Path) -> str | None:
    try:
        return _digest(files.read_whole(path))
    except FileNotFoundError:
        return None


def _missing_folders(path: Path) -> int:
    """Return how many folders have to be made for a file."""
    return sum(1 for each in path.parents if not each.exists())


def _remove_folders(path: Path, count: int) -> None:
    """Remove as many of the folders above a file as were made for it, unless they are in use."""
    for folder in path.parents[:count]:
        try:
            folder.rmdir()
        except FileNotFoundError:  # of another file that was restored
            continue
        except OSError:  # something else is in it by now
            return


def _put_back(path: Path, known: FileBefore) -> None:
    if known.data is None:
        files.remove(path)
    else:
        _write(path, known.data, known.mode)


def _write(path: Path, data: bytes, mode: int) -> None:
    files.write_atomically(path, data)
    path.chmod(mode)
