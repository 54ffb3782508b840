"""The JSON copies of a run: its checkpoints, and ``execution_state.json`` as of the last of them.

They are what a folder resumes from when its journal is gone. The newest good one counts: by
fencing number first, so that a process which was taken over cannot pass off its late file as new.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from maestro_hive.kernel import files
from maestro_hive.kernel.errors import (
    DocumentCorruptError,
    FolderError,
    MaestroError,
    StorageError,
    StoreClosedError,
)
from maestro_hive.kernel.logs import get_logger
from maestro_hive.kernel.process import PerProcess, run_at_exit, without_garbage_collection
from maestro_hive.maestro.state import run_document as documents
from maestro_hive.maestro.state.budgets import RunBudget
from maestro_hive.maestro.state.checkpoint import CheckpointManager
from maestro_hive.maestro.state.projections import RunState, fold
from maestro_hive.maestro.state.records import from_micros
from maestro_hive.maestro.state.run_document import RunCopy, RunText, read_run
from maestro_hive.maestro.state.views import show_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from maestro_hive.engine.config import StateConfig, StateFolders
    from maestro_hive.kernel.clock import Clock
    from maestro_hive.maestro.state.store import Reader, Store

logger = get_logger(__name__)

KIND = "execution_state"
FILE = "execution_state.json"

#: Copies are made for one part in so many of the time, so that steps keep the disk.
_REST_FACTOR = 33
#: How long the end of a process waits for copies that are still to be written.
_EXIT_SECONDS = 2.0
#: How long a copy waits for a purge, and a purge for copies: the largest takes seconds.
_LOCK_SECONDS = 60.0


class RunCopies:
    """The copies of one run; without persistence there is no ``execution_state.json``."""

    def __init__(self, config: StateConfig, run_id: str, clock: Clock) -> None:
        folders = config.resolve()
        self._run_id = files.check_identifier(run_id, "workflow id")
        self._state_dir = folders.state if folders.persistent else None
        self.checkpoints = CheckpointManager(
            folders.checkpoints if folders.persistent else None,
            max_checkpoints=config.max_checkpoints_per_workflow,
            verify_on_read=config.verify_checksum_on_load,
            clock=clock,
        )

    @property
    def path(self) -> Path | None:
        """Where ``execution_state.json`` is, or will be."""
        if self._state_dir is None:
            return None
        return self._state_dir / "runs" / self._run_id / FILE

    def writing(self) -> contextlib.AbstractContextManager[None]:
        """Return the block to write copies in: no purge comes between the question and the file."""
        return locked_copies(self._state_dir)

    def write_state(self, run: RunText) -> None:
        """Write ``execution_state.json``: the run as of now."""
        if self._state_dir is None:
            return
        folder = files.make_folder_inside(self._state_dir, "runs", self._run_id)
        files.write_atomically(folder / FILE, documents.seal_in_chunks(KIND, {}, raw={"run": run}))

    def newest(self) -> RunCopy | None:
        """Return the newest good copy; damaged ones are set aside, and that is logged."""
        found = [copy for copy in (self._state_copy(), self._checkpoint_copy()) if copy]
        return max(found, key=lambda copy: (copy.fence, copy.seq), default=None)

    def checkpoint(self, checkpoint_id: str) -> RunCopy:
        """Return one checkpoint as a copy of the run."""
        source, body = self.checkpoints.body(checkpoint_id, self._run_id)
        return self._checked(source, body.get("state"))

    def _state_copy(self) -> RunCopy | None:
        path = self.path
        if path is None:
            return None
        if files.is_link(path.parent):
            raise FolderError(path.parent, "is a symbolic link; a run is not read through it")
        try:
            file = files.open_file(path, documents.MAX_DOCUMENT_BYTES)
            body = documents.unseal(file, KIND, str(path), lazy=True)
            return self._checked(str(path), body.get("run"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except DocumentCorruptError as error:
            logger.warning("%s; set aside as %s", error, files.set_aside(path))
            return None

    def _checkpoint_copy(self) -> RunCopy | None:
        for source, body in self.checkpoints.good_bodies(self._run_id):
            try:
                return self._checked(source, body.get("state"))
            except DocumentCorruptError as error:
                logger.warning("%s; it is not used", error)
        return None

    def _checked(self, source: str, run: object) -> RunCopy:
        if not isinstance(run, dict) or run.get("workflow_id") != self._run_id:
            raise DocumentCorruptError(source, f"it is not a copy of run {self._run_id!r}")
        return read_run(source, run)


@contextlib.contextmanager
def locked_copies(state_dir: Path | None, *, purging: bool = False) -> Iterator[None]:
    """Write copies, together with others; or, ``purging``, keep everybody from writing any.

    A thread may write the copy of a run that its process has closed, and no lease protects that:
    whether there still is a run must be read in this block. Without a folder there is no lock.
    """
    if state_dir is None:
        yield
        return
    lock = files.FolderLock(files.make_folder_inside(state_dir, "runs"))
    with contextlib.closing(lock):
        take = lock.acquire if purging else lock.share
        if not take(_LOCK_SECONDS):
            users = "copies of runs are written" if purging else "runs are purged"
            raise StorageError(
                f"{lock.path}: for {_LOCK_SECONDS:g} seconds {users} by other processes; try again"
            )
        yield


def has_copies(folders: StateFolders, run_id: str) -> bool:
    """Return whether there may be a copy of a run: a cheap question, asked for every new run."""
    if not folders.persistent:
        return False
    files.check_identifier(run_id, "workflow id")
    places = f"{folders.state}/runs/{run_id}", f"{folders.checkpoints}/{run_id}"
    return any(map(os.path.exists, places))


# --- in the background -----------------------------------------------------------------------------


class Copier:
    """Writes copies in a thread of its own, so that no step waits for one."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        #: What is to be called for each run, and from when on.
        self._jobs: dict[tuple[Store, str], tuple[float, Callable[[], None]]] = {}
        self._thread: threading.Thread | None = None
        #: Until when the thread waits for a job; before that, only a flush ends its wait.
        self._waits_until = float("-inf")
        #: The run whose copy is being written, and those of which nothing is to be written now.
        self._writing: tuple[Store, str] | None = None
        self._paused: list[tuple[Store, str]] = []
        #: The stores whose copies are waited for: they come first, and without a rest.
        self._flushed: list[Store] = []
        #: The errors of copies that were not written since, until ``flush`` raises them.
        self._failed: dict[tuple[Store, str], Exception] = {}

    def request(
        self, store: Store, run_id: str, write: Callable[[], None], at: float = 0.0
    ) -> None:
        """Have ``write`` called soon, or at a time; a later request for the run takes its place."""
        with self._condition:
            self._jobs[store, run_id] = at, write
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="maestro-copies", daemon=True
                )
                self._thread.start()
            if at < self._waits_until:
                self._condition.notify_all()

    def withdraw(self, store: Store, run_id: str, write: Callable[[], None]) -> None:
        """Do not call ``write`` any more, unless it is being called."""
        with self._condition:
            if self._jobs.get((store, run_id), (0.0, None))[1] == write:
                del self._jobs[store, run_id]
                self._condition.notify_all()

    @contextlib.contextmanager
    def paused(self, store: Store, run_id: str) -> Iterator[None]:
        """Wait for what is being written of a run, and write nothing of it in this block."""
        job = store, run_id
        with self._condition:
            self._paused.append(job)
            self._condition.wait_for(lambda: self._writing != job)
        try:
            yield
        finally:
            with self._condition:
                self._paused.remove(job)
                self._condition.notify_all()

    def flush(self, store: Store, seconds: float = _EXIT_SECONDS) -> None:
        """Return when what was requested for this store is written; what takes longer is left out.

        Raises the error of a copy that was not written, then or before.
        """

        def waiting() -> list[tuple[Store, str]]:
            return [job for job in self._jobs if job[0] is store]

        def writing() -> bool:
            return self._writing is not None and self._writing[0] is store

        with self._condition:
            self._flushed.append(store)
            self._condition.notify_all()
            self._condition.wait_for(lambda: not (writing() or waiting()), seconds)
            self._flushed.remove(store)
            late = len(waiting()) + writing()
            for job in waiting():
                del self._jobs[job]
            failed = [self._failed.pop(job) for job in list(self._failed) if job[0] is store]
        if late:
            logger.warning(
                "%s: %d runs have no new JSON copy, for lack of time; the journal has them",
                store.location,
                late,
            )
        if failed:
            raise failed[0]

    def flush_all(self) -> None:
        """Write what was requested, at the end of the process."""
        with self._condition:
            stores = {store for store, _ in self._jobs}
            if self._writing is not None:
                stores.add(self._writing[0])
        for store in stores:
            with contextlib.suppress(MaestroError, OSError):  # it was logged
                self.flush(store)

    def _serve(self) -> None:
        while True:
            with self._condition:
                job = self._next_job()
                _, write = self._jobs.pop(job)
                self._writing = job
            started = time.monotonic()
            error = _write(write)
            with self._condition:
                if error is None:
                    self._failed.pop(job, None)
                else:
                    self._failed[job] = error
                del job, write, error
                self._writing = None
                self._condition.notify_all()
                rest = (time.monotonic() - started) * _REST_FACTOR
                self._condition.wait_for(lambda: self._flushed, rest)

    def _next_job(self) -> tuple[Store, str]:
        """Wait for the next job, and return it: what is flushed comes first, and at once."""
        while True:
            first = min(
                (job for job in self._jobs if job not in self._paused),
                key=lambda job: (job[0] not in self._flushed, self._jobs[job][0]),
                default=None,
            )
            at = float("inf") if first is None else self._jobs[first][0]
            left = at - time.monotonic()
            if first is not None and (left <= 0 or first[0] in self._flushed):
                return first
            self._waits_until = at
            self._condition.wait(min(left, threading.TIMEOUT_MAX))
            self._waits_until = float("-inf")


def _write(write: Callable[[], None]) -> Exception | None:
    """Write a copy; return the error if it was not written, and the next ones are."""
    try:
        write()
    except StoreClosedError:
        return None  # it was being written when ``flush`` gave up, and was counted there
    except (MaestroError, OSError) as error:
        logger.error("a copy could not be written: %s", error)  # noqa: TRY400 - one sentence
        return error
    except Exception as error:
        logger.exception("a copy could not be written")
        return error
    return None


copier = PerProcess(Copier)
run_at_exit(1, lambda: copier().flush_all())


# --- documents of runs ----------------------------------------------------------------------------


def copy_finished(
    config: StateConfig, store: Store, run_id: str, fence: int, state: RunState
) -> None:
    """Write ``execution_state.json`` of a run that this process has closed, unless it goes on.

    ``state`` is the run's as it was closed, without its steps.
    """
    copies = RunCopies(config, run_id, store.clock)
    with copies.writing():
        record = store.run(run_id) if store.usable else None
        if record is None or run_id in store.run_leases():
            return
        if store.entries(record.id, after=state.seq):  # something was recorded since: a retry, say
            with without_garbage_collection():
                state = fold(store.entries(record.id), store.load)
        copies.write_state(document_of(store, record.id, state, run_id, fence))


def document_of(
    reader: Reader,
    run: int,
    state: RunState,
    run_id: str,
    fence: int,
    shown: dict[str, Any] | None = None,
) -> RunText:
    """Return a whole run as JSON; ``shown`` are its fields, where their classes may be unknown.

    Its steps may be missing from ``state``.
    """
    fields = {
        "workflow_id": run_id,
        **(show_fields(state, reader.load) if shown is None else shown),
        "created_at": from_micros(state.created_at).isoformat(),
        "updated_at": from_micros(state.updated_at).isoformat(),
    }
    saved_at = reader.clock.now().isoformat()
    budget = budget_of(reader, run_id)
    return RunText(
        reader, run, run_id, state.restored_seq, state.seq, fields, saved_at, fence, budget
    )


def budget_of(reader: Reader, run_id: str) -> RunBudget | None:
    """Return a run's own limit and what it spent, with its children; None if there is neither."""
    account = reader.account(f"run:{run_id}")
    limit = reader.limits([account.account]).by_account.get(account.account)
    return RunBudget.of(limit, account) if limit is not None or account.calls else None
