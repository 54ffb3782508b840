"""Executes a graph: what starts when, by the frontier of its plan and the outcomes in their order.

A task is called as soon as its dependencies are complete, the tasks before it that it is in conflict
with have ended, and the required gates of lower levels have passed. That depends on the graph and on
recorded outcomes in their order alone, so a resumed run makes the same calls. How many of the called
tasks are executed at once is decided below, by ``WorkerSlots``: a stage of each attempt, which no
decision of the workflow depends on. So a run may be resumed with another number of workers.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from contextlib import suppress
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any

from maestro_hive.engine.recorded_errors import failure_of
from maestro_hive.team.errors import GraphFailedError, TaskCancelledError
from maestro_hive.team.graph import Frontier, TaskState
from maestro_hive.team.inputs import results_up_to
from maestro_hive.team.plans import gate_name

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping

    from maestro_hive.engine.step import StepExecution
    from maestro_hive.maestro.state.strict_json import Json
    from maestro_hive.team.graph import Gate, Level, Plan

    RunTask = Callable[[str, dict[str, Json]], Awaitable[Any]]
    #: Returns why a gate that is not required has not passed; None if it has.
    RunGate = Callable[[Level, Gate, dict[str, Json]], Awaitable[str | None]]

#: For how many seconds a task may clean up when its run is stopped.
_CLEAN_UP_SECONDS = 2.0
#: How many names an error has.
_NAMED = 10
#: For how many seconds a worker waits for what the end of its task allows to start. An attempt that
#: failed allows nothing, and others wait for something else first: a budget, or a breaker.
_REST_SECONDS = 0.05
#: Gates come first: all tasks of later levels may wait for them.
_GATE_URGENCY = (float("-inf"), 0)


class Slot:
    """One worker that executes an attempt: what an attempt was let in with."""

    __slots__ = ("_loop", "_slots", "number")

    def __init__(self, slots: WorkerSlots, number: int) -> None:
        self._slots = slots
        self._loop = asyncio.get_running_loop()
        self.number = number

    def is_current(self) -> bool:
        """Return whether the attempt may be made: always, as nobody takes a worker away."""
        return True

    async def renew(self) -> None:
        """Return at once."""

    def leave(self) -> None:
        """Let the worker execute another task; in the thread of a function that took too long, too."""
        if asyncio._get_running_loop() is self._loop:  # noqa: SLF001 - the public one raises
            self._slots.leave(self.number)
        else:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._slots.leave, self.number, context=Context())

    async def withdraw(self) -> None:
        """Let the worker execute another task."""
        self.leave()

    def outlive(self) -> None:
        """Have nothing recorded: workers are those of this process."""


class WorkerSlots:
    """At most so many attempts at once, the most urgent first: a stage of each task and gate.

    It belongs to one run in one process, on one event loop. A worker whose task has ended is given
    away when what its end allows to start is there as well: that may be more urgent than what waits.
    """

    def __init__(self, workers: int, urgency: Mapping[str, tuple[float, int]]) -> None:
        self._urgency = urgency
        self.numbers = range(1, workers + 1)
        #: What is called when an attempt starts or ends.
        self.on_change: Callable[[], None] = lambda: None
        self._free = list(self.numbers)
        self._waiting: list[tuple[tuple[float, int], int, asyncio.Future[int]]] = []
        self._count = 0
        self._busy: dict[int, str] = {}
        self._last: dict[str, int] = {}
        #: By their numbers: a task may leave one after the other.
        self._resting: dict[int, _Resting] = {}
        self._is_closed = False
        #: Set when the last attempt ends of those that are executed.
        self._is_idle = asyncio.Event()

    async def drain(self) -> None:
        """Let no attempt start any more, and return when those that were started have ended."""
        self._is_closed = True
        if self._busy:
            await self._is_idle.wait()

    async def enter(self, step: StepExecution) -> Slot:
        """Return when a worker is free for this attempt."""
        number = await self._acquire(step.name)
        self._busy[number] = step.name
        self._last[step.name] = number
        self._is_idle.clear()
        self.on_change()
        return Slot(self, number)

    def worker_of(self, task: str) -> int:
        """Return the number of the worker that executes a task, from 1; 0 if none does."""
        number = self._last.get(task, 0)
        return number if self._busy.get(number) == task else 0

    def last_worker_of(self, task: str) -> int:
        """Return the number of the worker that executed a task last; 0 if none did, here."""
        return self._last.get(task, 0)

    def busy(self) -> dict[int, str]:
        """Return what workers execute, by their numbers."""
        return dict(self._busy)

    def completed_by(self, tasks: Iterable[str]) -> Counter[int]:
        """Return how many of these tasks each worker has executed here."""
        return Counter(self._last[each] for each in tasks if each in self._last)

    def leave(self, number: int) -> None:
        """Note that a worker has ended an attempt. Another task gets it after a moment."""
        task = self._busy.pop(number)
        if not self._busy:
            self._is_idle.set()
        self.on_change()
        loop = asyncio.get_running_loop()
        # In a context of its own: it is no timer of the workflow's, which outcomes would wait for.
        timer = loop.call_later(_REST_SECONDS, self._rested, number, context=Context())
        self._resting[number] = _Resting(task, timer)

    def settled(self, task: str, started: Collection[str]) -> None:
        """Note that the workflow has reacted to the end of a task, and what it has called then."""
        for number, resting in list(self._resting.items()):
            if resting.task == task:
                resting.awaited = set(started)
                if not resting.awaited:
                    self._rested(number)

    def _rested(self, number: int) -> None:
        self._resting.pop(number).timer.cancel()
        self._give(number)

    def _give(self, number: int) -> None:
        """Give a worker to the most urgent one that waits."""
        while self._waiting and not self._is_closed:
            _, _, waiting = heapq.heappop(self._waiting)
            if not waiting.done():
                waiting.set_result(number)
                return
        heapq.heappush(self._free, number)

    async def _acquire(self, name: str) -> int:
        if self._free and not self._is_closed:
            return heapq.heappop(self._free)
        waiting: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._count += 1
        urgency = self._urgency.get(name, _GATE_URGENCY)
        heapq.heappush(self._waiting, (urgency, self._count, waiting))
        for number, resting in list(self._resting.items()):
            if resting.awaited is not None:
                resting.awaited.discard(name)
                if not resting.awaited:
                    self._rested(number)
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                self._give(waiting.result())  # it was given one, too late
            raise


class _Resting:
    """A worker whose task has ended; ``awaited`` are the tasks that are about to wait for one."""

    __slots__ = ("awaited", "task", "timer")

    def __init__(self, task: str, timer: asyncio.TimerHandle) -> None:
        self.task = task
        self.timer = timer
        self.awaited: set[str] | None = None


def urgency_of(plan: Plan) -> dict[str, tuple[float, int]]:
    """Return how urgent tasks are: the longest remaining path first, then as in the document."""
    return {each: (-plan.remaining[at], at) for at, each in enumerate(plan.ids)}


class Execution:
    """One execution of a graph in a workflow; ``run`` returns when nothing more can be executed."""

    def __init__(
        self,
        plan: Plan,
        run_task: RunTask,
        run_gate: RunGate,
        slots: WorkerSlots,
        completed: Mapping[str, Json] | None = None,
    ) -> None:
        """Execute a plan; ``completed`` are the results of tasks that need not be executed."""
        self._plan = plan
        self._tasks = {task.id: task for task in plan.graph.tasks}
        self._run_task = run_task
        self._run_gate = run_gate
        self._slots = slots
        #: The results of tasks, by id, and whether gates have passed, by name.
        self.results: dict[str, Json] = dict(completed or {})
        #: The digests of what tasks were called with, by id.
        self.inputs: dict[str, str] = {}
        self._frontier = Frontier(plan, dict.fromkeys(self.results, TaskState.COMPLETE))
        self.gates: dict[str, bool] = {}
        self.failures: dict[str, Exception] = {}
        #: What is called with each task and gate that is complete, also if it was recorded before.
        self.on_complete: Callable[[str], None] = lambda _: None
        #: And with each gate that is not required and has not passed, and why.
        self.on_not_passed: Callable[[str, str], None] = lambda _name, _reason: None
        #: The tasks that wait for an answer, and for a breaker.
        self.asking: set[str] = set()
        self.parked: set[str] = set()
        self._active = 0
        self._calls: dict[int, asyncio.Task[None]] = {}
        #: The task that executes this; its group ignores calls that were cancelled.
        self._workflow: asyncio.Task[Any] | None = None
        self._gating: set[int] = set()
        #: What has ended, and how that is noted.
        self._ended: list[tuple[str, Callable[[], None]]] = []
        self._wake = asyncio.Event()

    def blocked(self) -> dict[str, str]:
        """Return the tasks that cannot start, each with the failed task that is the reason."""
        return self._frontier.blocked()

    async def run(self) -> None:
        """Execute all that can be; raise ``GraphFailedError`` if something failed."""
        self._workflow = asyncio.current_task()
        async with asyncio.TaskGroup() as group:
            try:
                await self._execute_all(group)
            except asyncio.CancelledError:
                self._cancel_again()
                raise
        if self.failures:
            raise self._failed() from ExceptionGroup(
                "tasks and gates that failed", list(self.failures.values())
            )

    async def _execute_all(self, group: asyncio.TaskGroup) -> None:
        self._start(group)
        while self._active:
            await self._wake.wait()
            self._wake.clear()
            ended, self._ended = self._ended, []
            for _, note in ended:
                note()
            started = self._start(group)
            for name, _ in ended:
                self._slots.settled(name, started)
            self._slots.on_change()

    def _cancel_again(self) -> None:
        """Have what does not end by its cancellation cancelled again, as commands are killed then."""

        def cancel() -> None:
            for each in self._calls.values():
                each.cancel()

        loop = asyncio.get_running_loop()
        # In a context of its own: it is no timer of the workflow's.
        loop.call_later(_CLEAN_UP_SECONDS, cancel, context=Context())

    def _call(self, group: asyncio.TaskGroup, name: str, work: Coroutine[Any, Any, None]) -> None:
        self._active += 1
        call = group.create_task(work)
        self._calls[id(call)] = call
        call.add_done_callback(partial(self._drop, name))

    def _drop(self, name: str, call: asyncio.Task[None]) -> None:
        del self._calls[id(call)]
        assert self._workflow is not None
        if call.cancelled() and not self._workflow.cancelling():
            self._end(name, partial(self._note_cancelled, name))

    def _note_cancelled(self, name: str) -> None:
        """Have the run fail at its end. No outcome was recorded, so nothing starts or is blocked by it."""
        self.failures[name] = TaskCancelledError(
            f"the call of {name} was cancelled, and the run was not: its persona, or what it uses,"
            " cancels the task that executes it"
        )

    def _start(self, group: asyncio.TaskGroup) -> list[str]:
        """Call what may start, and return it; gates first, since others may wait for them."""
        started: list[str] = []
        for level in self._frontier.gates_due():
            if level.number not in self._gating:
                self._gating.add(level.number)
                self._call(group, gate_name(level, level.gates[0]), self._check(level))
                started.append(gate_name(level, level.gates[0]))
        while (task := self._frontier.take()) is not None:
            self._call(group, task, self._execute(task))
            started.append(task)
        return started

    async def _execute(self, task: str) -> None:
        results = {each: self.results[each] for each in self._tasks[task].dependencies}
        try:
            result = await self._run_task(task, results)
        except Exception as error:  # noqa: BLE001 - of the user's making, or raised again
            self._end(task, self._note_failure(task, error))
        else:
            self._end(task, lambda: self._complete(task, result))

    async def _check(self, level: Level) -> None:
        """Execute the gates of a level, one after the other, up to the first that must not fail."""
        results = results_up_to(level, self._plan.graph, self.results)
        name = ""
        for gate in level.gates:
            name = gate_name(level, gate)
            try:
                reason = await self._run_gate(level, gate, results)
            except Exception as error:  # noqa: BLE001 - as above
                self.gates[name] = False
                self._end(name, self._note_failure(name, error))
                return
            self.gates[name] = reason is None
            if reason is None:
                self.on_complete(name)
            else:
                self.on_not_passed(name, reason)
        self._end(name, lambda: self._frontier.pass_gates(level.number))

    def _note_failure(self, name: str, error: Exception) -> Callable[[], None]:
        """Return what to do about a failure of a step; raise what is none."""
        if failure_of(error) is None:
            raise error

        def fail() -> None:
            self.failures[name] = error
            if name in self._tasks:
                self._frontier.fail(name)

        return fail

    def _complete(self, task: str, result: Json) -> None:
        self.results[task] = result
        self._frontier.complete(task)
        self.on_complete(task)

    def _end(self, name: str, note: Callable[[], None]) -> None:
        """Have the end of a task or of gates noted by the workflow's own task."""
        self._active -= 1
        self._ended.append((name, note))
        self._wake.set()

    def _failed(self) -> GraphFailedError:
        total, left = len(self._tasks), len(self._tasks) - len(self.results)
        names = ", ".join(list(self.failures)[:_NAMED])
        more = len(self.failures) - _NAMED
        rest = left - sum(each in self._tasks for each in self.failures)
        waiting = (
            f"; {rest} of {total} tasks were not started, as they wait for these" if rest else ""
        )
        return GraphFailedError(
            f"failed: {names}{f' and {more} more' if more > 0 else ''}{waiting}"
        )
