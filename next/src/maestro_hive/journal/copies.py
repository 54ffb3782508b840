"""JSON copies of runs beside the journal: ``execution_state.json`` and checkpoints.

A folder that has lost its journal resumes runs from the newest of them. They are written by one
thread, from the journal: no step waits for it, and what waits to be copied is a number.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import threading
import time
from array import array
from typing import TYPE_CHECKING, NamedTuple

from maestro_hive.journal import documents
from maestro_hive.journal.checkpoints import (
    AUTOMATIC,
    CheckpointFolder,
    CheckpointName,
    inside,
    new_checkpoint_id,
)
from maestro_hive.journal.run_document import (
    KIND,
    CopyTooLargeError,
    RunCopy,
    RunText,
    run_in,
    take_copy,
)
from maestro_hive.journal.store import RunRow
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import (
    ConfigurationError,
    DocumentCorruptError,
    FormatError,
    MaestroError,
    StorageError,
    StoreClosedError,
    UnknownRunError,
)
from maestro_hive.kernel.logs import get_log

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from maestro_hive.journal.store import Store

logger = get_log(__name__)

FILE = "execution_state.json"
#: Copies take one part in so many of the time: the disk belongs to the steps.
_REST_FACTOR = 33
#: How long ``close`` waits for copies that are due.
_CLOSE_SECONDS = 2.0
#: How long a copy waits for a purge, and a purge for copies: the largest takes seconds.
_LOCK_SECONDS = 60.0


class FoundCopy(NamedTuple):
    """A copy, the file that it was read from, and newer ones that are damaged and set aside."""

    copy: RunCopy
    source: str
    damaged: tuple[DocumentCorruptError, ...] = ()


class CopyFolder:
    """Where the copies of runs are; ``checkpoints`` may be another folder."""

    def __init__(self, state: Path, checkpoints: Path | None = None, most: int = 10) -> None:
        self._runs = state / "runs"
        self.checkpoints = CheckpointFolder(checkpoints or state / "checkpoints", most)

    @contextlib.contextmanager
    def locked(self, *, purging: bool = False) -> Iterator[None]:
        """Write copies, together with others; or, ``purging``, keep all others from writing any.

        No lease protects a run that has ended: whether it exists is read in this block.
        """
        path = files.make_private_folder(self._runs)
        with contextlib.closing(files.FileLock(path, create=False)) as lock:
            if not (lock.acquire if purging else lock.share)(_LOCK_SECONDS):
                users = "copies of runs are written" if purging else "runs are purged"
                raise StorageError(
                    f"{path}: for {_LOCK_SECONDS:g} s {users} by other processes; try again"
                )
            yield

    def state_path(self, run_id: str) -> Path:
        """Return where a run's ``execution_state.json`` is."""
        return inside(self._runs, run_id) / FILE

    def write_state(self, text: RunText) -> None:
        """Replace a run's ``execution_state.json``."""
        files.write_atomically(inside(self._runs, text.run_id, make=True) / FILE, text.data)

    def write_checkpoint(self, text: RunText, checkpoint_id: str, now: float) -> None:
        """Add a checkpoint; one of the same id is replaced, and those that are too old go."""
        name = CheckpointName(text.fence, text.seq, checkpoint_id)
        self.checkpoints.write(text.run_id, name, text.data, now)

    def run_ids(self) -> list[str]:
        """Return the runs that have an ``execution_state.json``."""
        found = sorted(self._runs.rglob(FILE))
        return [str(each.parent.relative_to(self._runs)) for each in found]

    def has_copies(self, run_id: str) -> bool:
        """Return whether there may be a copy of a run: a cheap question."""
        for name in run_id.split("/"):
            files.check_identifier(name, "run id")
        return any(os.path.lexists(f"{at}/{run_id}") for at in (self._runs, self.checkpoints.root))

    def newest(self, run_id: str) -> FoundCopy | None:
        """Return the newest copy that is sound; damaged ones are set aside, logged and returned."""
        damaged: list[DocumentCorruptError] = []
        found = self._sound(run_id, self.state_path(run_id), damaged)
        for name in reversed(self.checkpoints.names(run_id)):
            if found is not None and (name.fence, name.seq) <= (found.copy.fence, found.copy.seq):
                break
            path = self.checkpoints.path(run_id, name)
            if (newer := self._sound(run_id, path, damaged)) is not None:
                found = newer
                break
        if found is None:  # starting over would not be a resume
            for path in self._files("*.damaged-*", run_id):
                raise DocumentCorruptError(
                    str(path), f"no sound copy of run {run_id!r} is left; delete it to start over"
                )
        return found and found._replace(damaged=tuple(damaged))

    def _sound(
        self, run_id: str, path: Path, damaged: list[DocumentCorruptError]
    ) -> FoundCopy | None:
        try:
            return _read(run_id, path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except DocumentCorruptError as error:
            damaged.append(documents.set_aside(path, error))
            return None

    def checkpoint(self, run_id: str, checkpoint_id: str) -> FoundCopy:
        """Return a checkpoint by its id; raise if there is none, or if it is damaged."""
        names = {each.checkpoint_id: each for each in self.checkpoints.names(run_id)}
        if checkpoint_id not in names:
            raise ConfigurationError(
                f"run {run_id!r} has no checkpoint {checkpoint_id!r};"
                f" there are {', '.join(names) or 'none'}"
            )
        path = self.checkpoints.path(run_id, names[checkpoint_id])
        found = _read(run_id, path)
        if found is None:
            raise DocumentCorruptError(str(path), "it is not a checkpoint of a run")
        return found

    def damaged(self) -> Iterator[tuple[Path, str]]:
        """Yield the copies that cannot be trusted, with the reasons; none is changed."""
        for path in self._files("*.json*"):
            try:
                if path.suffix != ".json":
                    yield path, "it was damaged, and was set aside"
                elif (document := documents.read(path)).kind == KIND:
                    run_in(document)
            except (DocumentCorruptError, FormatError, FileNotFoundError) as error:
                if path.exists():  # or retention has deleted it just now
                    yield path, str(error)

    def leftovers(self) -> list[Path]:
        """Return temporary files: of writes under way, and of processes that were killed."""
        return self._files(".*.tmp")

    def _files(self, pattern: str, run_id: str | None = None) -> list[Path]:
        roots = [self._runs, self.checkpoints.root]
        if run_id is not None:
            return sorted(path for root in roots for path in inside(root, run_id).glob(pattern))
        return sorted(path for root in roots for path in root.rglob(pattern))

    def remove(self, run_id: str) -> None:
        """Delete the copies of a run, and of its children, while ``locked`` for purging."""
        for root in (self._runs, self.checkpoints.root):
            _remove_folder(inside(root, run_id))


def _remove_folder(folder: Path) -> None:
    with files.explained(lambda reason: StorageError(f"{folder} was not removed: {reason}")):
        if folder.exists():
            shutil.rmtree(folder)


def _read(run_id: str, path: Path) -> FoundCopy | None:
    """Return a copy; None if the document is sound, and not one of a run."""
    document = documents.read(path)
    if document.kind != KIND:
        return None
    copy = run_in(document)
    if copy.run_id != run_id:
        raise DocumentCorruptError(document.name, f"it is a copy of run {copy.run_id!r}")
    return FoundCopy(copy, document.name)


class Copies:
    """Writes the copies of the runs that this process executes, in a thread of its own.

    A run is copied when it has lived for ``first_after`` seconds and changed, then at most every
    ``interval`` seconds while it changes (0: not at all), and when this process releases it.
    """

    def __init__(
        self,
        store: Store,
        folder: CopyFolder,
        *,
        interval: float = 60.0,
        first_after: float = 1.0,
        limit: int = files.MAX_FILE_BYTES,
    ) -> None:
        self._store, self.folder, self._limit = store, folder, limit
        self._interval, self._first_after = interval, first_after
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        #: Runs that have changed, and when they are copied.
        self._due: dict[int, float] = {}
        #: Runs that were copied while they are executed, and when they may be copied again.
        self._again: dict[int, float] = {}
        #: Runs that were released since, oldest first: a number each, however many they are.
        self._released = array("q")
        self._next_released = 0
        self._is_writing = self._is_closing = False
        #: When the thread looks again of itself: it is woken for what is due before.
        self._looks_at = float("inf")
        #: Errors of copies that were not written since.
        self._failed: dict[int, Exception] = {}
        self._too_large: set[int] = set()

    # --- called by the processes' event loops, and cheap ---

    def changed(self, number: int) -> None:
        """Copy a run at its time; called after every commit of its entries."""
        if number in self._due or not self._interval:
            return
        with self._condition:
            now = time.monotonic()
            self._due[number] = due = max(now, self._again.get(number, now + self._first_after))
            self._wake(due)

    def released(self, number: int) -> None:
        """Copy a run soon, for the last time: it has ended, or this process gave it back."""
        with self._condition:
            self._due.pop(number, None)
            self._again.pop(number, None)
            self._released.append(number)
            self._wake(0.0)

    def _wake(self, due: float) -> None:
        if self._thread is None and not self._is_closing:
            self._thread = threading.Thread(target=self._serve, name="maestro-copies", daemon=True)
            self._thread.start()
            atexit.register(self._close_at_exit)
        elif due < self._looks_at:  # a thread that is woken takes its time from the steps
            self._looks_at = 0.0
            self._condition.notify_all()

    def checkpoint(self, run_id: str, checkpoint_id: str | None = None) -> str:
        """Write a checkpoint now, durable on return; return its id. One of this id is replaced."""
        now = self._store.now()
        checkpoint_id = new_checkpoint_id(now) if checkpoint_id is None else checkpoint_id
        with self.folder.locked():
            text = take_copy(self._store, self._store.find(run_id), self._limit)
            self.folder.write_checkpoint(text, checkpoint_id, now)
        return checkpoint_id

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Write what is due, without rest; what takes longer is counted and left out.

        Raises the error of a copy that was not written, then or before.
        """
        atexit.unregister(self._close_at_exit)
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self.waiting(), seconds)
            late = self.waiting()
            self._due.clear()
            self._next_released = len(self._released)
            failed, self._failed = list(self._failed.values()), {}
        if late:
            logger.warning(
                "%s: %d runs have no new JSON copy, for lack of time; the journal has them",
                self._store.place,
                late,
            )
        if failed:
            raise failed[0]

    def _close_at_exit(self) -> None:
        with contextlib.suppress(MaestroError, OSError):  # it is in the log
            self.close()

    def waiting(self) -> int:
        """Return how many runs are to be copied, now or at their time."""
        return len(self._due) + len(self._released) - self._next_released + self._is_writing

    # --- the thread ---

    def _serve(self) -> None:
        while (found := self._next()) is not None:
            number, is_live = found
            started = time.monotonic()
            error = self._copy(number, is_live=is_live)
            ended = time.monotonic()
            with self._condition:
                self._is_writing = False
                self._failed.pop(number, None)
                if error is not None:
                    self._failed[number] = error
                self._condition.notify_all()
                rest = (ended - started) * _REST_FACTOR
                self._condition.wait_for(lambda: self._is_closing, rest)

    def _next(self) -> tuple[int, bool] | None:
        """Wait for the next run that is due; return its number, and whether it is executed."""
        with self._condition:
            while True:
                number, at = min(
                    self._due.items(), key=lambda each: each[1], default=(0, float("inf"))
                )
                left = at - time.monotonic()
                has_released = self._next_released < len(self._released)
                if left <= 0 or (self._due and self._is_closing and not has_released):
                    del self._due[number]
                    self._again[number] = time.monotonic() + self._interval
                    self._is_writing = True
                    return number, True
                if has_released:
                    self._is_writing = True
                    return self._pop_released(), False
                if self._is_closing:
                    return None
                self._looks_at = at
                self._condition.wait(min(left, threading.TIMEOUT_MAX))
                self._looks_at = 0.0

    def _pop_released(self) -> int:
        number = self._released[self._next_released]
        self._next_released += 1
        if self._next_released == len(self._released):
            self._released, self._next_released = array("q"), 0
        return number

    def _copy(self, number: int, *, is_live: bool) -> Exception | None:
        """Copy a run; return the error if it was not written."""
        if number in self._too_large:  # entries are only ever added
            return None
        try:
            with self.folder.locked():
                for found in self._store.db.read(self._store.sql["RUN_OF_NUMBER"], number):
                    text = take_copy(self._store, RunRow(*found), self._limit)
                    self.folder.write_state(text)
                    if is_live:
                        now = self._store.now()
                        checkpoint_id = new_checkpoint_id(now, AUTOMATIC)
                        self.folder.write_checkpoint(text, checkpoint_id, now)
        except (StoreClosedError, UnknownRunError):
            return None  # it was counted as late, or is purged
        except CopyTooLargeError as error:
            self._too_large.add(number)
            logger.warning("%s", error)
            return None
        except (MaestroError, OSError) as error:
            logger.error("a copy could not be written: %s", error)  # noqa: TRY400 - one sentence
            return error
        return None
