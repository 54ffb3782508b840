"""``.mahabharatha/state.json`` of a team run: follows the journal, for programs that read it.

The journal is the truth. The file is written when a run starts, soon after each change, and when the
process stops executing the run; after a kill it is behind until the next start.
"""

from __future__ import annotations

import asyncio
import time
from contextvars import Context
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from maestro_hive.kernel.process import threads
from maestro_hive.kernel.redaction import cut, redact_text
from maestro_hive.team.state import ExecutionState, TaskState, TaskStatus, WorkerState

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    from maestro_hive.maestro.state.projections import RunState, StepState
    from maestro_hive.team.graph import Plan
    from maestro_hive.team.scheduler import Execution, WorkerSlots

PATH = Path(".mahabharatha") / "state.json"
#: How long after a change it is written, and which part of the time may be spent on it.
_SOON_SECONDS = 0.2
_PART = 0.05
_ERROR_LENGTH = 2_000


class StateFile:
    """Writes the state of one execution of a graph, on one event loop."""

    def __init__(
        self, folder: Path, plan: Plan, state: RunState, execution: Execution, slots: WorkerSlots
    ) -> None:
        self._path = folder / PATH
        self._plan = plan
        self._state = state
        self._execution = execution
        self._slots = slots
        self._timer: asyncio.TimerHandle | None = None
        self._writing: Future[float] | None = None
        self._pause = _SOON_SECONDS

    def changed(self) -> None:
        """Have the file written soon."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            # In a context of its own: it is no timer of the workflow's.
            self._timer = loop.call_later(self._pause, self._start_writing, context=Context())

    def write(self) -> None:
        """Write the file now, in this thread; raise if it cannot be."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writing is not None:  # or an older state would replace this one
            self._writing.exception()
            self._writing = None
        _save(self._snapshot(), self._path)

    def _start_writing(self) -> None:
        self._timer = None
        if self._writing is not None:
            if not self._writing.done():
                self.changed()
                return
            if self._writing.exception() is not None:
                return  # the end of the run raises it, for it is written then once more
            self._pause = max(_SOON_SECONDS, self._writing.result() / _PART)
        self._writing = threads.run(partial(_save, self._snapshot(), self._path))

    def _snapshot(self) -> ExecutionState:
        started = self._state.started
        assert started is not None
        steps = {step.name: step for step in self._state.steps.values()}
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
        )

    def _tasks(self, steps: dict[str, StepState]) -> Iterator[TaskState]:
        failures, blocked = self._execution.failures, self._execution.blocked()
        for name in self._plan.ids:
            step, worker = steps.get(name), self._slots.last_worker_of(name)
            made = TaskState(id=name, worker_id=str(worker) if worker else None)
            if step is not None:
                made.started_at = step.started.when
            if name in self._execution.asking or name in blocked:
                made.status = TaskStatus.BLOCKED
            elif step is not None and step.completed is not None:
                made.status = TaskStatus.COMPLETE
                made.completed_at = step.completed.when
            elif name in failures:
                made.status = TaskStatus.FAILED
                made.error = cut(redact_text(str(failures[name])), _ERROR_LENGTH)
            elif self._slots.worker_of(name):
                made.status = TaskStatus.RUNNING
            yield made

    def _workers(self) -> Iterator[WorkerState]:
        busy = self._slots.busy()
        done = self._slots.completed_by(self._execution.results)
        for number in self._slots.numbers:
            task = busy.get(number)
            status = "idle" if task is None else "running"
            yield WorkerState(str(number), status, task, done.get(number, 0))


def _save(state: ExecutionState, path: Path) -> float:
    """Write a state, and return how many seconds that took."""
    started = time.perf_counter()
    state.save(path)
    return time.perf_counter() - started
