"""``.mahabharatha/state.json`` of a team run: follows the journal, for programs that read it.

The journal is the truth. The file is written when a run starts, soon after each change, and when the
process stops executing the run; after a kill it is behind until the next start. It has the results of
complete tasks, so that a run whose journal is lost resumes from it (``restoring.py``).

A write that fails is said and made again; the last one raises if the disk refuses it. A state that the
file cannot hold fails no run.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from maestro_hive.hive.dispatching import is_bankrupt
from maestro_hive.kernel.errors import EncodeError, FencedError, MaestroError, StorageError
from maestro_hive.kernel.logs import get_logger
from maestro_hive.kernel.process import threads
from maestro_hive.kernel.redaction import cut, redact_text
from maestro_hive.kernel.secret_shapes import is_secret_name
from maestro_hive.maestro.state.strict_json import plain_copy
from maestro_hive.team.restoring import INPUT, RESULT, RUN, STORE
from maestro_hive.team.state import (
    MAX_STATE_BYTES,
    ExecutionState,
    StateWriter,
    TaskState,
    TaskStatus,
    WorkerState,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from concurrent.futures import Future

    from maestro_hive.engine.open_run import OpenRun
    from maestro_hive.maestro.state.projections import StepState
    from maestro_hive.maestro.state.strict_json import Json
    from maestro_hive.team.graph import Plan
    from maestro_hive.team.restoring import CheckpointFiles
    from maestro_hive.team.scheduler import Execution, WorkerSlots

_LOG = get_logger(__name__)

PATH = Path(".mahabharatha") / "state.json"
#: How long after a change it is written, and which part of the time may be spent on it.
_SOON_SECONDS = 0.2
#: How long it may be behind because writing it is slow: it may be all that is left of a run.
_LATE_SECONDS = 5.0
_PART = 0.05
_ERROR_LENGTH = 2_000
#: A longer result of a task, as JSON, is left out, and so are those with which all would be longer.
_RESULT_LENGTH = 8_000
MAX_RESULTS_LENGTH = MAX_STATE_BYTES // 2
#: Made once: ``json.dumps`` makes one for every call with options.
_encoder = json.JSONEncoder(allow_nan=False)
#: Between texts that are searched for secrets together: no secret goes across it.
_APART = "\n \n"


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlace:
    """Where the state of a run is written, and what it was restored with."""

    run_id: str
    folder: Path
    #: The state folder, which has the journal.
    store: Path
    checkpoints: CheckpointFiles
    #: The tasks that were taken from a state file, as that has them.
    restored: Mapping[str, Json]
    #: Whether a budget has stopped the run.
    is_bankrupt: Callable[[], bool]


class StateFile:
    """Writes the state of one execution of a graph, on one event loop."""

    def __init__(
        self,
        plan: Plan,
        run: OpenRun,
        execution: Execution,
        slots: WorkerSlots,
        place: StatePlace,
    ) -> None:
        path = place.folder / PATH
        self._writer = StateWriter(path)
        self._plan = plan
        self._run = run
        self._execution = execution
        self._slots = slots
        self._place = place
        #: The states of complete tasks, which do not change any more, and of those not started.
        self._complete: dict[str, TaskState] = {}
        self._pending = {each: TaskState(id=each) for each in plan.ids}
        #: What the file says of tasks whose outcome the workflow has not got yet.
        self._before = _complete_before(path, place.run_id)
        self._timer: asyncio.TimerHandle | None = None
        self._writing: Future[float] | None = None
        self._pause = _SOON_SECONDS
        #: How much of the file the results have, and whether it was said that it is behind.
        self._results_length = 0
        self._is_behind = False

    def changed(self) -> None:
        """Have the file written soon."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            # In a context of its own: it is no timer of the workflow's.
            self._timer = loop.call_later(self._pause, self._start_writing, context=Context())

    def write(self) -> None:
        """Write the file now, in this thread; raise if the disk refuses it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writing is not None:  # or an older state would replace this one
            self._writing.exception()
            self._writing = None
        try:
            _save(self._snapshot(), self._writer, self._run)
        except EncodeError as error:
            self._say_behind(error)

    def _start_writing(self) -> None:
        self._timer = None
        if self._writing is not None:
            if not self._writing.done():
                self.changed()
                return
            self._note_written(self._writing)
        self._writing = threads.run(partial(_save, self._snapshot(), self._writer, self._run))

    def _note_written(self, writing: Future[float]) -> None:
        """Note how a write has ended; after one that failed, the next change is written all the same."""
        error = writing.exception()
        if error is None:
            self._is_behind = False
            self._pause = min(max(_SOON_SECONDS, writing.result() / _PART), _LATE_SECONDS)
        elif isinstance(error, MaestroError):
            self._say_behind(error)
        else:
            raise error

    def _say_behind(self, error: MaestroError) -> None:
        if not self._is_behind:
            self._is_behind = True
            _LOG.warning("the state file is behind the run: %s", error)

    def _snapshot(self) -> ExecutionState:
        started = self._run.state.started
        assert started is not None
        with self._run.mutex:  # other threads add what is recorded
            steps = {step.name: step for step in self._run.state.steps.values()}
        tasks = {each.id: each for each in self._tasks(steps)}
        left = [
            task.level
            for task in self._plan.graph.tasks
            if tasks[task.id].status is not TaskStatus.COMPLETE
        ]
        last = max((task.level for task in self._plan.graph.tasks), default=0)
        return ExecutionState(
            feature=self._plan.graph.feature,
            started_at=started.when,
            current_level=min(left, default=last),
            tasks=tasks,
            workers={each.id: each for each in self._workers()},
            checkpoints=self._place.checkpoints.names(),
            extra={RUN: self._place.run_id, STORE: str(self._place.store)},
        )

    def _tasks(self, steps: dict[str, StepState]) -> Iterator[TaskState]:
        failures = self._execution.failures
        execution = self._execution
        waiting = {*execution.asking, *execution.parked, *execution.blocked()}
        for name in self._plan.ids:
            if name in self._execution.results:
                yield self._completed(name, steps.get(name))
                continue
            step, worker = steps.get(name), self._slots.last_worker_of(name)
            is_waiting = name in waiting
            if not (step or worker or is_waiting or name in failures):
                yield self._pending[name]
                continue
            made = TaskState(id=name, worker_id=str(worker) if worker else None)
            if step is not None:
                made.started_at = step.started.when
            if is_waiting:
                made.status = TaskStatus.BLOCKED
            elif name in failures:
                spent = is_bankrupt(failures[name])
                made.status = TaskStatus.BLOCKED if spent else TaskStatus.FAILED
                made.error = cut(redact_text(str(failures[name])), _ERROR_LENGTH)
            elif self._slots.worker_of(name):
                made.status = TaskStatus.RUNNING
            elif step is not None and step.completed is not None and name in self._before:
                made = self._before[name]  # the workflow is about to get its result
            elif step is not None and self._place.is_bankrupt():
                made.status = TaskStatus.BLOCKED
            yield made

    def _completed(self, name: str, step: StepState | None) -> TaskState:
        """Return the state of a complete task; it does not change any more."""
        if name not in self._complete:
            worker = self._slots.last_worker_of(name)
            restored = self._place.restored.get(name)
            made = TaskState(name, TaskStatus.COMPLETE, str(worker) if worker else None)
            called_with = self._execution.inputs.get(name)
            if called_with and step is not None and step.completed is not None:
                made.started_at, made.completed_at = step.started.when, step.completed.when
                made.extra[INPUT] = called_with
                made.extra[RESULT] = self._execution.results[name]
            elif restored is not None:
                made = TaskState.from_dict(restored)
            if RESULT in made.extra:
                length = _written_length(made.extra[RESULT])
                if length is None or self._results_length + length > MAX_RESULTS_LENGTH:
                    del made.extra[RESULT]  # the digests of its files stand for it
                else:
                    self._results_length += length
            self._complete[name] = made
        return self._complete[name]

    def _workers(self) -> Iterator[WorkerState]:
        busy = self._slots.busy()
        done = self._slots.completed_by(self._execution.results)
        for number in self._slots.numbers:
            task = busy.get(number)
            status = "idle" if task is None else "running"
            yield WorkerState(str(number), status, task, done.get(number, 0))


def _complete_before(path: Path, run_id: str) -> dict[str, TaskState]:
    """Return the complete tasks of the file that an earlier process has left of the same run."""
    if not path.exists():
        return {}
    from jsonschema import ValidationError

    try:
        found = ExecutionState.load(path)
    except (MaestroError, ValidationError):
        return {}
    if found is None or found.extra.get(RUN) != run_id:
        return {}
    tasks = found.tasks.items()
    return {name: task for name, task in tasks if task.status is TaskStatus.COMPLETE}


def _written_length(result: Json) -> int | None:
    """Return how long a result is as JSON; None if it is too long, or has something like a secret in it."""
    try:
        text = _encoder.encode(result)
    except (TypeError, ValueError):
        return None  # a value that JSON does not have
    if len(text) > _RESULT_LENGTH:
        return None
    if plain_copy(result, _RESULT_LENGTH) is None and json.loads(text) != result:
        return None
    return None if _has_secrets(result) else len(text)


def _has_secrets(value: Json) -> bool:
    """Return whether a text in a value looks like a secret, or stands under a name that says so."""
    texts: list[str] = []
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            texts.append(each)
        elif isinstance(each, list):
            left += each
        elif isinstance(each, dict):
            texts += each
            left += each.values()
            for name, item in each.items():
                if item and is_secret_name(name):
                    return True
    joined = _APART.join(texts)  # a search for each would cost more than all else about a task
    return redact_text(joined) != joined


def _save(state: ExecutionState, writer: StateWriter, run: OpenRun) -> float:
    """Write a state, and return how many seconds that took; not if the run is another process's by now."""
    started = time.perf_counter()
    try:
        run.check_lease()
    except FencedError:
        return 0.0
    except StorageError:
        pass  # the journal has failed, and the file has what is known
    writer.save(state)
    return time.perf_counter() - started
