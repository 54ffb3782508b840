"""The JSON copies of a run: its checkpoints, and ``execution_state.json`` as of the last of them.

They are what a folder resumes from when its journal is gone. The newest good one counts: by
fencing number first, so that a process which was taken over cannot pass off its late file as new.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from maestro_hive.kernel import files
from maestro_hive.kernel.errors import DocumentCorruptError, FolderError, MaestroError
from maestro_hive.kernel.process import PerProcess, run_at_exit
from maestro_hive.maestro.state import run_document as documents
from maestro_hive.maestro.state.checkpoint import CheckpointManager
from maestro_hive.maestro.state.run_document import RunCopy, RunText, read_run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from maestro_hive.engine.config import StateConfig, StateFolders
    from maestro_hive.kernel.clock import Clock
    from maestro_hive.maestro.state.store import Store

logger = logging.getLogger(__name__)

KIND = "execution_state"
FILE = "execution_state.json"

#: Copies are made for one part in so many of the time, so that steps keep the disk.
_REST_FACTOR = 33
#: How long the end of a process waits for copies that are still to be written.
_EXIT_SECONDS = 2.0


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
            body = documents.unseal(files.read_whole(path), KIND, str(path))
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


def has_copies(folders: StateFolders, run_id: str) -> bool:
    """Return whether there may be a copy of a run: a cheap question, asked for every new run."""
    if not folders.persistent:
        return False
    files.check_identifier(run_id, "workflow id")
    return (folders.state / "runs" / run_id).exists() or (folders.checkpoints / run_id).exists()


# --- in the background -----------------------------------------------------------------------------


class _Job(NamedTuple):
    store: Store
    write: Callable[[], None]


class Copier:
    """Writes copies in a thread of its own, so that no step waits for one."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._jobs: dict[tuple[int, str], _Job] = {}
        self._thread: threading.Thread | None = None
        self._writing: Store | None = None

    def request(self, store: Store, run_id: str, write: Callable[[], None]) -> None:
        """Have ``write`` called soon; a later request for the same run takes its place."""
        with self._condition:
            self._jobs[id(store), run_id] = _Job(store, write)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="maestro-copies", daemon=True
                )
                self._thread.start()
            self._condition.notify_all()

    def flush(self, store: Store, seconds: float = _EXIT_SECONDS) -> None:
        """Write what was requested for this store now; what takes longer than that is left out."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with self._condition:
                # First what is being written: an older copy of a run must not replace a newer one.
                left = until - time.monotonic()
                self._condition.wait_for(lambda: self._writing is None, left)
                place = next((key for key, job in self._jobs.items() if job.store is store), None)
                if place is None or self._writing is not None:
                    return
                job = self._jobs.pop(place)
                self._writing = store
            self._finish(job)
        with self._condition:
            late = [key for key, job in self._jobs.items() if job.store is store]
            for key in late:
                del self._jobs[key]
        if late:
            logger.warning(
                "%s: %d runs have no new JSON copy, for want of time; the journal has them",
                store.location,
                len(late),
            )

    def flush_all(self) -> None:
        """Write what was requested, at the end of the process."""
        with self._condition:
            stores = {id(job.store): job.store for job in self._jobs.values()}
            if self._writing is not None:
                stores[id(self._writing)] = self._writing
        for store in stores.values():
            self.flush(store)

    def _finish(self, job: _Job) -> None:
        """Write a copy, the only one at this time."""
        try:
            job.write()
        except (MaestroError, OSError) as error:
            logger.error("a copy could not be written: %s", error)  # noqa: TRY400 - one sentence
        except Exception:
            logger.exception("a copy could not be written")  # and the next ones are
        finally:
            with self._condition:
                self._writing = None
                self._condition.notify_all()

    def _serve(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._jobs and self._writing is None)
                place = next(iter(self._jobs))
                job = self._jobs.pop(place)
                self._writing = job.store
            started = time.monotonic()
            self._finish(job)
            del job
            time.sleep((time.monotonic() - started) * _REST_FACTOR)


copier = PerProcess(Copier)


run_at_exit(1, lambda: copier().flush_all())
