"""Who may write which file: tasks share a folder, and each owns the files that it declares.

The folder is looked at whenever a task starts or ends. Who wrote between two looks is known, so a file
that has changed was changed by one of these; it is right if one of them owns it. A change that can be
of one task alone fails its attempt. If it can be of several, they are named, and ``--strict`` stops the
run. Gates, verifications and tasks that declare no files may write everything: what changes while one
of them is executed can be theirs, and is held against nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import subprocess
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from maestro_hive.engine.context import current
from maestro_hive.engine.values import in_thread
from maestro_hive.kernel.logs import get_logger
from maestro_hive.team.errors import FilesNotOwnedError, OwnerUnknownError
from maestro_hive.team.graph import owned_folder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Container, Iterable
    from pathlib import Path

    from maestro_hive.team.graph import Graph, Task

    #: When a file was changed last, its size and its number.
    Stamp = tuple[int, int, int]
    Snapshot = dict[str, Stamp]
    #: How a file was: the SHA-256 of its contents, or its size if they were not read; None: there was none.
    Mark = str | int | None

_LOG = get_logger(__name__)

#: A folder with more files is not looked at.
MAX_FILES = 50_000
#: Folders and files that belong to programs, and to nobody's task.
_NOT_LOOKED_AT = frozenset(
    {
        *(".git", ".hg", ".svn", ".jj", ".mahabharatha", ".DS_Store", ".coverage"),
        *("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".cache"),
        *("node_modules", ".venv", ".tox", ".nox"),
    }
)
_STARTS_NOT_LOOKED_AT = (".aider", ".nfs", ".fuse_hidden")
#: Contents are read of files up to this size, and of so many bytes at once; of others the size counts.
MAX_READ_BYTES, MAX_READ_AT_ONCE = 1024 * 1024, 32 * 1024 * 1024
#: Under which name the progress of a step has what its failed attempts changed, with the marks before.
NOT_OWNED = "not_owned"
#: How many files a message names.
_NAMED = 20
_GIT_SECONDS = 10.0


class Change(NamedTuple):
    """A file that was changed, and how it was before; None if there was none."""

    path: str
    before: Stamp | None
    mark: Mark


class _Contents:
    """The digests of files as they were seen, as far as they could be read at little cost."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, tuple[Stamp, bytes]] = {}

    def mark(self, path: str, before: Stamp | None) -> Mark:
        """Return how a file was that had this stamp."""
        if before is None:
            return None
        stamp, digest = self._known.get(path, (None, b""))
        return digest.hex() if stamp == before else before[1]

    def read(self, changed: Iterable[tuple[str, Stamp]]) -> None:
        """Read files that have changed, in a thread."""
        left = MAX_READ_AT_ONCE
        for path, stamp in changed:
            self._known.pop(path, None)
            if stamp[1] > min(MAX_READ_BYTES, left):
                continue
            digest = _digest(self._folder / path)
            if digest is not None:
                left -= stamp[1]
                self._known[path] = (stamp, digest)


class _Owned:
    """The paths that a task may write: files, and folders with all that is in them."""

    def __init__(self, task: Task, folder: Path) -> None:
        self._paths = set()
        for each in task.files.owned:
            path, _ = owned_folder(each)
            if path.startswith("/"):
                path = os.path.relpath(path, folder)
            self._paths.add(path)

    def __contains__(self, path: str) -> bool:
        if path in self._paths or "" in self._paths:
            return True
        while (path := path.rpartition("/")[0]) and path not in self._paths:
            pass
        return bool(path)


class Ownership:
    """Watches the folder of one run, on one event loop."""

    def __init__(
        self,
        graph: Graph,
        folder: Path,
        *,
        apart: Iterable[Path] = (),
        stop: Callable[[Exception], BaseException] | None = None,
    ) -> None:
        """Watch a folder, but for those ``apart``; ``stop`` stops the run, and returns what to raise."""
        self._folder = folder
        self._owned = {
            task.id: _Owned(task, folder)
            for task in graph.tasks
            if task.files.owned or task.files.read
        }
        self._apart = frozenset(str(each) for each in apart)
        self._stop = stop
        self._seen: Snapshot | None = None
        self._contents = _Contents(folder)
        self._lock = asyncio.Lock()
        self._events: list[_Event] = []
        #: Who may have written since the last look, and who of these has ended since.
        self._writers: set[str] = set()
        self._ended: set[str] = set()
        self._unchecked = 0
        self._changed: dict[str, dict[str, Change]] = {}
        self._shared: dict[str, tuple[Change, frozenset[str]]] = {}

    @property
    def is_needed(self) -> bool:
        """Return whether a task declares files: else there is nothing to check."""
        return bool(self._owned)

    @contextlib.asynccontextmanager
    async def working(self, task: str) -> AsyncIterator[None]:
        """Let a task write its files; raise at the end if it has changed others."""
        if task not in self._owned:
            async with self.unchecked():
                yield
            return
        try:
            await self._settle(partial(self._writers.add, task))
            yield
        except BaseException:
            self._ended.add(task)  # what it has changed is its own until the next look
            raise
        await self._settle(partial(self._writers.discard, task))
        await self._judge(task)

    @contextlib.asynccontextmanager
    async def unchecked(self) -> AsyncIterator[None]:
        """Let something write all files."""
        if self._writers:
            await self._settle(lambda: None)
        self._unchecked += 1
        try:
            yield
            if self._writers:
                await self._settle(lambda: None)
        finally:
            self._unchecked -= 1

    # --- looking ---

    async def _settle(self, then: Callable[[], object]) -> None:
        """Look at the folder, and then change who writes; all that wait are served by one look."""
        event = _Event(then)
        self._events.append(event)
        try:
            async with self._lock:
                if not event.is_done:
                    await self._look()
        finally:
            if not event.is_done:
                self._events.remove(event)

    async def _look(self) -> None:
        served = list(self._events)
        found = await in_thread(self._differences)
        if found is None:
            _LOG.warning(
                "%s has more than %s files: that tasks write only their own is not checked",
                self._folder,
                f"{MAX_FILES:,}",
            )
            self._owned.clear()
            self._changed.clear()
            self._shared.clear()
        else:
            self._seen, changes = found
            self._attribute(changes)
        self._writers -= self._ended
        self._ended.clear()
        for event in served:
            if event in self._events:  # or its task was cancelled meanwhile
                self._events.remove(event)
                event.then()
                event.is_done = True

    def _differences(self) -> tuple[Snapshot, list[Change]] | None:
        """Return how the folder is now, and what has changed; None if it has too many files."""
        now, before = snapshot(self._folder, self._apart), self._seen or {}
        if now is None or now == self._seen:
            return None if now is None else (now, [])
        paths = [path for path, stamp in now.items() if before.get(path) != stamp]
        gone = [path for path in before if path not in now]
        stamps = ((path, before.get(path)) for path in (*paths, *gone))
        changes = [Change(path, stamp, self._contents.mark(path, stamp)) for path, stamp in stamps]
        self._contents.read((path, now[path]) for path in paths)
        return now, [] if self._seen is None else changes

    def _attribute(self, changes: Iterable[Change]) -> None:
        """Note changes that no writer owns, each for those that can have made it."""
        if self._unchecked or not self._writers:
            return
        writers = frozenset(self._writers)
        for change in changes:
            path = change.path
            if any(path in self._owned[each] for each in writers):
                continue
            if len(writers) == 1:
                (only,) = writers
                self._changed.setdefault(only, {}).setdefault(path, change)
            else:
                first, others = self._shared.get(path, (change, writers))
                self._shared[path] = (first, others | writers)

    # --- judging ---

    async def _judge(self, task: str) -> None:
        """Raise if a task has changed files that are not its own; name those that it may have."""
        if self._seen is None or task not in self._owned:
            return
        changed = self._changed.pop(task, {})
        mine = {path: each.mark for path, each in changed.items() if self._stays(each)}
        shared = {
            path: self._shared.pop(path)  # or another task would report it as well
            for path, (change, tasks) in list(self._shared.items())
            if task in tasks and self._stays(change)
        }
        earlier: dict[str, Mark] = current().progress.get(NOT_OWNED) or {}
        marks = {path: change.mark for path, (change, _) in shared.items()} | mine | earlier
        undone = await in_thread(partial(self._put_back, marks, by_size=earlier))
        left = {path: mark for path, mark in (mine | earlier).items() if path not in undone}
        shared = {path: each for path, each in shared.items() if path not in undone}
        if candidates := [*left, *shared]:
            ignored = await in_thread(partial(ignored_by_git, self._folder, candidates))
            left = {path: mark for path, mark in left.items() if path not in ignored}
            shared = {path: each for path, each in shared.items() if path not in ignored}
        if left != earlier:
            current().save_progress(**{NOT_OWNED: left})
        if left:
            raise FilesNotOwnedError(self._described(left))
        if shared:
            self._report(shared)

    def _stays(self, change: Change) -> bool:
        """Return whether a file is still another one: a temporary file may have been renamed."""
        assert self._seen is not None
        return self._seen.get(change.path) != change.before

    def _put_back(self, marks: dict[str, Mark], by_size: Container[str]) -> set[str]:
        """Return the files that are as they were, in a thread; some by their size, if no more is known."""
        found = set()
        for path, mark in marks.items():
            if isinstance(mark, str):
                is_small = (self._size(path) or 0) <= MAX_READ_BYTES  # as what was read before
                digest = _digest(self._folder / path) if is_small else None
                is_back = digest is not None and digest.hex() == mark
            else:
                is_back = path in by_size and self._size(path) == mark
            if is_back:
                found.add(path)
        return found

    def _size(self, path: str) -> int | None:
        assert self._seen is not None
        found = self._seen.get(path)
        return None if found is None else found[1]

    def _described(self, left: dict[str, Mark]) -> str:
        words = []
        for path, mark in list(left.items())[:_NAMED]:
            did = "created" if mark is None else "changed"
            words.append(f"{'deleted' if self._size(path) is None else did} {path}")
        more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
        return (
            f"the task does not own files that it has changed: {', '.join(words)}{more}. Put them back as"
            " they were, and change only files that the task may create, modify or delete"
        )

    def _report(self, shared: dict[str, tuple[Change, frozenset[str]]]) -> None:
        """Name the tasks that can have changed files which none of them owns."""
        lines = []
        for path, (_, tasks) in list(shared.items())[:_NAMED]:
            lines.append(f"{path} (by {' or '.join(sorted(tasks))})")
        more = f" and {len(shared) - _NAMED} more" if len(shared) > _NAMED else ""
        message = (
            f"files were changed that no task owns which was executed: {', '.join(lines)}{more}"
        )
        current().write(f"{message}\n")
        if self._stop is not None:
            raise self._stop(OwnerUnknownError(f"{message}. --strict stops the run for that"))
        _LOG.warning("%s", message)


class _Event:
    """A change of who writes, which waits for a look at the folder."""

    __slots__ = ("is_done", "then")

    def __init__(self, then: Callable[[], object]) -> None:
        self.then = then
        self.is_done = False


# --- the folder, in a thread ----------------------------------------------------------------------


def _digest(path: Path) -> bytes | None:
    """Return the SHA-256 of a file; None if it is none, or is gone. A link is what it refers to."""
    try:
        if path.is_symlink() or not path.is_file():
            return hashlib.sha256(os.fsencode(path.readlink())).digest()
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError:
        return None


def snapshot(folder: Path, apart: Collection[str] = ()) -> Snapshot | None:
    """Return the files of a folder, by their relative path; None if there are too many."""
    found: Snapshot = {}
    left = [("", str(folder))]
    while left:
        inside, path = left.pop()
        try:
            entries = os.scandir(path)
        except OSError:  # it was deleted just now, or nobody may read it
            continue
        with entries:
            for entry in entries:
                name = entry.name
                if name in _NOT_LOOKED_AT or name.startswith(_STARTS_NOT_LOOKED_AT):
                    continue
                try:
                    if entry.is_dir(follow_symlinks=False):
                        if entry.path not in apart:
                            left.append((f"{inside}{name}/", entry.path))
                        continue
                    stat = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                found[inside + name] = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
        if len(found) > MAX_FILES:
            return None
    return found


def ignored_by_git(folder: Path, paths: Iterable[str]) -> set[str]:
    """Return which of these files git ignores; none where there is no git, or no repository."""
    text = "".join(f"{each}\0" for each in paths)
    try:
        ended = subprocess.run(
            ["git", "check-ignore", "-z", "--stdin"],  # noqa: S607
            cwd=folder,
            input=text.encode("utf-8", "surrogateescape"),
            capture_output=True,
            timeout=_GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return set()
    if ended.returncode:
        return set()
    return set(ended.stdout.decode("utf-8", "surrogateescape").split("\0")) - {""}
