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
import os
import subprocess
from collections import Counter
from contextvars import Context
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from maestro_hive.engine.context import current
from maestro_hive.engine.values import in_thread
from maestro_hive.kernel.logs import get_logger
from maestro_hive.team.errors import FilesNotOwnedError, OwnerUnknownError
from maestro_hive.team.folder_files import MAX_FILES, digest_of_file, snapshot
from maestro_hive.team.graph import owned_folder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Container, Iterable, Sequence
    from concurrent.futures import Future

    from maestro_hive.team.folder_files import Snapshot, Stamp
    from maestro_hive.team.graph import Graph, Task

    #: How a file was: the SHA-256 of its contents, or its size if they were not read; None: there was none.
    Mark = str | int | None

_LOG = get_logger(__name__)

#: Contents are read of files up to this size, and of so many bytes at once; of others the size counts.
MAX_READ_BYTES, MAX_READ_AT_ONCE = 1024 * 1024, 32 * 1024 * 1024
#: Under which name the progress of a step has what its failed attempts changed, with the marks before.
NOT_OWNED = "not_owned"
_PROC = Path("/proc")
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
            digest = digest_of_file(self._folder / path)
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
        apart: Collection[str] = (),
        stop: Callable[[Exception], BaseException] | None = None,
    ) -> None:
        """Watch a folder, but for those ``apart``, by their real paths.

        ``stop`` stops the run, and returns what to raise.
        """
        self._folder = folder
        self._owned = {
            task.id: _Owned(task, folder)
            for task in graph.tasks
            if task.files.owned or task.files.read
        }
        self._apart = apart
        self._stop = stop
        self._seen: Snapshot | None = None
        self._contents = _Contents(folder)
        self._lock = asyncio.Lock()
        self._events: list[_Event] = []
        #: Who may have written since the last look, and who of these has ended since. An attempt whose
        #: function goes on in its thread counts beside those that are made meanwhile.
        self._writers: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()
        #: How many that may write all files may have written since then, and how many of these have ended.
        self._unchecked = 0
        self._unchecked_ended = 0
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
            await self._settle(partial(self._writers.update, [task]))
            yield
            await self._settle(partial(self._leave, task))
        except BaseException:
            # What it has changed is its own until the next look.
            _when_ended(current().thread, partial(self._ended.update, [task]))
            raise
        await self._judge(task)

    @contextlib.asynccontextmanager
    async def unchecked(self) -> AsyncIterator[None]:
        """Let something write all files."""
        if self._writers:
            await self._settle(lambda: None)
        self._unchecked += 1
        try:
            yield
        finally:
            # Also if it failed or was cancelled, what it has changed is its own until the next look.
            _when_ended(current().thread, self._end_unchecked)
            if self._writers:
                await self._settle(lambda: None)

    def _leave(self, task: str) -> None:
        self._writers -= Counter([task])

    def _end_unchecked(self) -> None:
        self._unchecked_ended += 1

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
        # Who ends during the look may have changed what that has passed, and counts until the next one.
        ended, unchecked_ended = Counter(self._ended), self._unchecked_ended
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
        self._writers -= ended
        self._ended -= ended
        self._unchecked -= unchecked_ended
        self._unchecked_ended -= unchecked_ended
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
        if self._unchecked or not self._writers or not self._owned:
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
        earlier = self._paths_of(current().progress.get(NOT_OWNED) or {}, changed)
        marks = {path: change.mark for path, (change, _) in shared.items()} | mine | earlier
        undone = await in_thread(partial(self._put_back, marks, by_size=earlier))
        left = {path: mark for path, mark in (mine | earlier).items() if path not in undone}
        shared = {path: each for path, each in shared.items() if path not in undone}
        if candidates := [*left, *shared]:
            ignored = await in_thread(partial(_not_of_tasks, self._folder, candidates))
            left = {path: mark for path, mark in left.items() if path not in ignored}
            shared = {path: each for path, each in shared.items() if path not in ignored}
        if left != earlier:
            current().save_progress(**{NOT_OWNED: {_shown(path): left[path] for path in left}})
        if left:
            raise FilesNotOwnedError(self._described(left))
        if shared:
            self._report(shared)

    def _paths_of(self, recorded: dict[str, Mark], changed: Iterable[str]) -> dict[str, Mark]:
        """Return the marks of files by their paths, which were recorded as they are shown."""
        if not recorded:
            return {}
        paths = {_shown(path): path for path in (*(self._seen or ()), *changed)}
        return {paths.get(name, name): mark for name, mark in recorded.items()}

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
                digest = digest_of_file(self._folder / path) if is_small else None
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
            words.append(f"{'deleted' if self._size(path) is None else did} {_shown(path)}")
        more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
        return (
            f"the task does not own files that it has changed: {', '.join(words)}{more}. Put them back as"
            " they were, and change only files that the task may create, modify or delete. If a person or"
            " another program has changed them, move them away, or declare them in the files of the task"
        )

    def _report(self, shared: dict[str, tuple[Change, frozenset[str]]]) -> None:
        """Name the tasks that can have changed files which none of them owns."""
        lines = []
        for path, (_, tasks) in list(shared.items())[:_NAMED]:
            lines.append(f"{_shown(path)} (by {' or '.join(sorted(tasks))})")
        more = f" and {len(shared) - _NAMED} more" if len(shared) > _NAMED else ""
        message = (
            f"files were changed that no task owns which was executed: {', '.join(lines)}{more}"
        )
        current().write(f"{message}\n")
        if self._stop is not None:
            raise self._stop(OwnerUnknownError(f"{message}. --strict stops the run for that"))
        _LOG.warning("%s", message)


def _shown(path: str) -> str:
    r"""Return a path as a text that can be stored: bytes that are no UTF-8 are escaped, as ``\xff``."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _when_ended(thread: Future[Any] | None, note: Callable[[], object]) -> None:
    """Call ``note`` in this loop: at once, or if a function goes on in its thread, when that has ended."""
    loop = asyncio.get_running_loop()

    def note_here(_: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(note, context=Context())

    if thread is None or thread.done():
        note()
    else:
        thread.add_done_callback(note_here)


class _Event:
    """A change of who writes, which waits for a look at the folder."""

    __slots__ = ("is_done", "then")

    def __init__(self, then: Callable[[], object]) -> None:
        self.then = then
        self.is_done = False


# --- what is no task's, in a thread ---------------------------------------------------------------


def _not_of_tasks(folder: Path, paths: Sequence[str]) -> set[str]:
    """Return which of these files are nobody's: git ignores them, or another program writes them."""
    return ignored_by_git(folder, paths) | written_by_others(folder, paths)


def written_by_others(folder: Path, paths: Iterable[str]) -> set[str]:
    """Return which of these files a process of no task has open to write, where the system says that.

    Such as the log that the output of this process goes to, by the shell or by ``tee``.
    """
    wanted = {os.path.realpath(folder / each): each for each in paths}
    found = set()
    for process in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            files = {str(each.readlink()): each for each in (process / "fd").iterdir()}
            written = [each for each in wanted.keys() & files if _is_written(files[each])]
            if written and not _is_of_a_task(process):
                found |= {wanted[each] for each in written}
    return found


def _is_written(descriptor: Path) -> bool:
    about = (descriptor.parent.parent / "fdinfo" / descriptor.name).read_text()
    flags = next(line for line in about.splitlines() if line.startswith("flags:"))
    return int(flags.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY


def _is_of_a_task(process: Path) -> bool:
    if process.name == str(os.getpid()):
        return False  # this one may be started by a task of another run
    names = (each.partition(b"=")[0] for each in (process / "environ").read_bytes().split(b"\0"))
    return b"MAESTRO_TASK_ID" in names


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
