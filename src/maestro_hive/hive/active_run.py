"""A run whose workflow this process executes: its tasks, its questions, and how it is ended."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from maestro_hive.engine.context import current_step
from maestro_hive.engine.shared import find_shared
from maestro_hive.hive import runs
from maestro_hive.hive.branches import (
    Branch,
    detached_task,
    enter_run,
    number_tasks,
    stop_numbering,
)
from maestro_hive.hive.history import History, Replay
from maestro_hive.hive.steps import StepCalls
from maestro_hive.kernel.clock import Wait
from maestro_hive.kernel.errors import MaestroError
from maestro_hive.maestro.state.projections import facts_of
from maestro_hive.maestro.state.records import EntryKind
from maestro_hive.maestro.state.views import open_waits

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator

    from maestro_hive.engine.accounts import StepAround
    from maestro_hive.engine.limits import Entered
    from maestro_hive.engine.open_run import OpenRun
    from maestro_hive.hive.branches import Operation
    from maestro_hive.hive.run_context import RunContext
    from maestro_hive.hive.runs import Input
    from maestro_hive.maestro.state.budgets import StepKey
    from maestro_hive.maestro.state.records import Entry, NewEntry
    from maestro_hive.maestro.state.store import DocumentChange, Store

ResultT = TypeVar("ResultT")


class Waiting(Protocol):
    """A durable call that does nothing but wait; ``identity`` is that of its wait."""

    @property
    def identity(self) -> bytes:
        """What identifies the wait."""
        ...


#: How many durable calls a workflow may make after it was stopped: each is refused.
_MOST_REFUSALS = 100
#: How long tasks that wait for something that is not durable may take to end with their run.
_LEFTOVER_SECONDS = 1.0
#: How often a task may be cancelled while the workflow it waits for is being ended.
_CANCELLATIONS = 100
#: How often it is looked whether calls in flight have ended: the first pause and the last.
_FIRST_PAUSE = 0.005
_LAST_PAUSE = 0.1


class WorkflowStopped(BaseException):
    """Ends a workflow that catches every cancellation, and would be stopped for ever."""


class ActiveRun:
    """A run that is being executed: its workflow's tasks, and what it is executed with."""

    def __init__(self, context: RunContext, run: OpenRun, parent: ActiveRun | None) -> None:
        self.run_id = run.run_id
        self.run = run
        self.parent = parent
        self.children: set[ActiveRun] = set()
        #: Why it was cancelled, once the workflow was; then it may clean up, for a while.
        self.cancel_reason: str | None = None
        #: Whether it is suspended, or its time to clean up is over; and the task that drives it.
        self.has_stopped = False
        self.driver: asyncio.Task[Any] | None = None
        self._refusals = 0
        #: Whether it is suspended, and by what; None where that was requested.
        self.is_suspended = False
        self.stop_error: Exception | None = None
        #: The questions that the workflow asks just now, and those that are being settled.
        self._listeners: dict[bytes, asyncio.Future[None]] = {}
        self._reserve: dict[bytes, Callable[[Entry], None]] = {}
        self._claimed: set[bytes] = set()
        #: Has the inbox read at once; set by what watches it.
        self.check_inbox: Callable[[], None] = lambda: None
        self.loop = asyncio.get_running_loop()
        #: Steps that cannot end, since a call inside of them was refused by a budget.
        self._blocked: set[StepKey] = set()
        run.refusal = None if parent is None else parent.run.refusal
        if parent is not None:
            run.lease.root = parent.run.lease.root or parent.run.lease
        run.record_here()
        #: The last entry of what was recorded before this process executes it.
        self.resumed_at = run.state.seq if run.state.seq > 1 else 0
        self.replay = Replay(run.state, self.resumed_at)
        #: What is yet to be recorded of its being resumed, with the first that it does after that.
        self.resumed_note = runs.resumed(run.state) if self.resumed_at and run.state.spent else None
        self.history = run.order = History(self.loop, self.replay)
        #: Where calls stand that are not in a task of the workflow.
        self.detached = Branch(None, "detached")
        self.root = Branch(self.history, "")
        self.context = context
        #: The step that it was started in, if any: the workflow is not a part of it.
        self.around = current_step.get()
        #: Its place in a queue that is limited.
        self.entered: Entered | None = None
        #: Runs a workflow as a child; set by what executes this run.
        self.run_child: Callable[..., Awaitable[Any]] = _no_children
        self.steps = StepCalls(self, context)
        #: Suspends it if something of it cannot be recorded or read: that is no outcome.
        self.suspended_by_failure = _SuspendedByFailure(self)
        #: The durable calls that its workflow, and what it executes, are in.
        self.operations: set[Operation] = set()
        #: Those of its durable calls that do nothing but wait, each with its timer if it has one; and
        #: the timers of blocks that are limited in time.
        self.waits: dict[Waiting, Wait | None] = {}
        self.timers: dict[object, Wait] = {}
        self._awaits_escalations = False
        self._cancellation: asyncio.Task[None] | None = None
        #: Whether the cancellation has reached the workflow.
        self._was_reached = asyncio.Event()

    # --- being executed ---

    async def drive(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Return what a workflow's coroutine returns; what it left behind is cancelled.

        Who cancels this suspends the run: the workflow is ended, and nothing of that is recorded.
        """
        number_tasks(self.loop)
        self.driver = asyncio.current_task()
        try:
            task = self._start(work)
            recorded = self.run.state.cancel_requested
            if recorded is not None:
                self._replay_cancellation(recorded)
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:
                self.stop()
                if task.done():  # its own outcome, which the resumed run has again
                    retrieve(task)
                else:
                    await self._wait_for(task)
                    self._look_at_end(task)
                raise
            finally:
                await self._stop_leftovers()
        finally:
            self.has_stopped = True  # a request to cancel comes too late now
            stop_numbering(self.loop)
        if self.is_suspended:
            self._look_at_end(task)
            raise self.stop_error or asyncio.CancelledError(f"run {self.run_id!r} was stopped")
        return task.result()

    @property
    def is_stopping(self) -> bool:
        """Whether nothing more may start: it is suspended, or its time to clean up is over.

        Also while it is being stopped: the end of a loop cancels all tasks at once, and those of the
        workflow may come first. That is no cancellation by the workflow.
        """
        driver = self.driver
        return self.has_stopped or (driver is not None and driver.cancelling() > 0)

    def note_resumed(self) -> None:
        """Record, once, what was saved: it goes on, and its completed steps were not paid again."""
        entry, self.resumed_note = self.resumed_note, None
        if entry is not None:
            self.run.append([entry], sync=False)

    async def may_start(self) -> None:
        """Return when its workflow may be called: its start may have been counted too long ago."""
        if self.entered is not None and not self.entered.is_current():
            await self.entered.renew()

    def _start(self, work: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        context = enter_run(self, self.root)
        self.history.branches.add(self.root)  # before it is made: an eager task starts at once
        task = self.loop.create_task(work, context=context, name=f"workflow of run {self.run_id}")
        self.root.watch(task, self.loop)
        return task

    def _look_at_end(self, task: asyncio.Task[Any]) -> None:
        """Report what a workflow raised while it was stopped, unless that was what ended it."""
        if not task.done() or task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, WorkflowStopped):
            message = f"the workflow of run {self.run_id!r} failed while it was stopped"
            context = {"message": message, "exception": error, "task": task}
            self.loop.call_exception_handler(context)

    async def _wait_for(self, task: asyncio.Task[Any]) -> None:
        for _ in range(_CANCELLATIONS):
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:
                continue
            return

    async def _stop_leftovers(self) -> None:
        left = [task for task in self._calling_tasks() if not task.done()]
        if self._cancellation is not None:
            left.append(self._cancellation)
        for task in left:
            task.get_loop().call_soon_threadsafe(task.cancel)
        here = [task for task in left if task.get_loop() is self.loop]
        if here:
            await asyncio.wait(here)
        # Those that wait for something else, as in ``queue.get()``.
        others = {task for task in self._branch_tasks() if not task.done()}
        for other in others:
            other.cancel()
        if others:
            await asyncio.wait(others, timeout=_LEFTOVER_SECONDS)

    def _calling_tasks(self) -> set[asyncio.Task[Any]]:
        """Return the tasks that are in a durable call; other threads may start some."""
        return {operation.task for operation in list(self.operations)}

    def _branch_tasks(self) -> list[asyncio.Future[Any]]:
        found = [branch.task for branch in self.history.branches]
        return [task for task in found if task is not None]

    def check_active(self) -> None:
        """Raise if nothing more may start."""
        if self.is_stopping:
            self._refusals += 1
            if self._refusals > _MOST_REFUSALS:
                raise WorkflowStopped(f"run {self.run_id!r} was stopped, and its workflow went on")
            raise asyncio.CancelledError(f"run {self.run_id!r} is being stopped")

    # --- its end before its end ---

    def stop(self, error: Exception | None = None) -> None:
        """Suspend it and its children: they are resumed as if nothing had been."""
        if self.is_suspended:
            return
        self.is_suspended = True
        self.stop_error = error
        self._end_tasks()
        for child in list(self.children):
            child.stop(error)

    async def let_calls_end(self, error: Exception, around: Iterable[StepAround]) -> None:
        """Return when the calls in flight of all runs of its family have ended, and none starts any more.

        Each of them was paid for, or is: cancelled, it would be paid for again. ``around`` are the steps
        that the call which was refused is inside of: these cannot end.
        """
        top = self
        while top.parent is not None:
            top = top.parent
        top._blocked |= {(each.number, each.step) for each in around}  # noqa: SLF001 - of its own class
        pause = _FIRST_PAUSE
        while True:
            family = list(top._family())  # noqa: SLF001
            for each in family:  # also those that were started meanwhile
                each.run.refusal = each.run.refusal or error
            blocked = top._blocked | self.run.ledger.queue.blocked_steps()  # noqa: SLF001
            if not any(each.run.open_steps(each.resumed_at) - blocked for each in family):
                return
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LAST_PAUSE)

    def _family(self) -> Iterator[ActiveRun]:
        yield self
        for child in list(self.children):
            yield from child._family()  # noqa: SLF001 - of its own class

    def suspended(self, error: Exception) -> asyncio.CancelledError:
        """Suspend it by an error, and return what the workflow is ended with."""
        self.stop(error)
        return asyncio.CancelledError(f"run {self.run_id!r} is suspended")

    def _end_tasks(self) -> None:
        self.has_stopped = True
        for task in {*self._calling_tasks(), *self._branch_tasks()}:
            loop = task.get_loop()
            if loop is self.loop:
                task.cancel()
            else:
                loop.call_soon_threadsafe(task.cancel)

    def cancel(self, reason: str) -> None:
        """Have the workflow cancelled, once; from any thread."""
        self.loop.call_soon_threadsafe(self._cancel, reason)

    def _cancel(self, reason: str) -> None:
        if self._cancellation is None and not self.is_stopping:
            self._cancellation = detached_task(self.loop, self._record_cancellation(reason))

    async def _record_cancellation(self, reason: str) -> None:
        clock = self.run.store.clock
        wait = Wait.start(clock, self.context.cancel_grace)
        try:
            await self.run.record(runs.cancel_requested(reason, wait.to_json()), sync=True)
        except MaestroError as error:
            self.stop(error)
            return
        recorded = self.run.state.cancel_requested
        assert recorded is not None
        slot = self.history.reserve(recorded)
        self.history.set_ready(slot, lambda: self._reach_workflow(recorded))
        await wait.finished(clock)
        await self._was_reached.wait()
        self._end_tasks()

    def _replay_cancellation(self, recorded: Entry) -> None:
        """Cancel the workflow where it was cancelled before."""
        slot = self.history.reserve(recorded)
        self.history.set_ready(slot, lambda: self._reach_workflow(recorded))
        wait = Wait.from_json(facts_of(recorded)["wait"])

        async def end_in_time() -> None:
            await wait.finished(self.run.store.clock)
            await self._was_reached.wait()
            self._end_tasks()

        self._cancellation = detached_task(self.loop, end_in_time())

    def _reach_workflow(self, recorded: Entry) -> None:
        self.cancel_reason = str(facts_of(recorded).get("reason") or "")
        self._was_reached.set()
        if self.root.task is not None:
            self.root.task.cancel()

    @property
    def is_cancelled(self) -> bool:
        """Whether it is being cancelled."""
        return self._cancellation is not None

    @contextmanager
    def waiting(self, call: Waiting, wait: Wait | None) -> Iterator[None]:
        """Note that a durable call does nothing but wait in this block: for a time, or for a person."""
        self.waits[call] = wait
        try:
            yield
        finally:
            del self.waits[call]

    # --- escalations ---

    def await_escalation(self, name: str | None = None) -> None:
        """Have escalations delivered, this one at once, and their answers looked for, while it runs."""
        if not self._awaits_escalations:
            self._awaits_escalations = True
            self.context.escalations.enter()
        self.context.escalations.look_soon(name)

    async def leave_escalations(self) -> None:
        """Wait for no escalation any more."""
        if self._awaits_escalations:
            self._awaits_escalations = False
            await self.context.escalations.leave()

    # --- questions ---
    # A workflow's code may run in more than one loop, each in its thread: the run's lock decides.

    def listen(
        self, identity: bytes, reserve: Callable[[Entry], None] = lambda _: None
    ) -> asyncio.Future[None]:
        """Return what is done when a question is answered; in the loop that asks it.

        ``reserve`` is called with the entry of the answer, as soon as it is recorded.
        """
        with self.run.mutex:
            self._claimed.discard(identity)
            listener = asyncio.get_running_loop().create_future()
            self._listeners[identity] = listener
            self._reserve[identity] = reserve
            return listener

    def stop_listening(self, identity: bytes) -> None:
        """Note that no task waits for the answer any more."""
        with self.run.mutex:
            self._listeners.pop(identity, None)
            self._reserve.pop(identity, None)

    def listens(self, identity: bytes) -> bool:
        """Return whether the workflow asks this just now, and it is not being settled."""
        with self.run.mutex:
            return identity in self._listeners and identity not in self._claimed

    def is_settled(self, identity: bytes) -> bool:
        """Return whether a wait has its end, or is just getting it."""
        with self.run.mutex:
            return identity in self._claimed or identity in self.run.state.answers

    def claim(self, identity: bytes) -> bool:
        """Become the one who settles a question, by an answer or by its timeout."""
        with self.run.mutex:
            mine = self.listens(identity)
            if mine:
                self._claimed.add(identity)
            return mine

    def give_up_claim(self, identity: bytes) -> None:
        """Let another one settle it."""
        with self.run.mutex:
            self._claimed.discard(identity)

    def reserve(self, identity: bytes) -> None:
        """Take the place of an answer in the order; in the loop of the run, when it is recorded."""
        reserve = self._reserve.get(identity)
        if reserve is not None:
            reserve(self.run.state.answers[identity])

    def notify(self, identity: bytes, error: Exception | None = None) -> None:
        """Wake who waits for the answer, with the reason if it cannot be had."""
        with self.run.mutex:
            listener = self._listeners.get(identity)
        if listener is not None:
            listener.get_loop().call_soon_threadsafe(_settle, listener, error)

    def notify_all(self, error: Exception) -> None:
        """Wake all who wait, with the reason why no answer can be had."""
        for identity in list(self._listeners):
            self.notify(identity, error)

    # --- what is recorded of the run itself ---

    async def record(
        self, entry: NewEntry, *, sync: bool = True, change: DocumentChange | None = None
    ) -> None:
        """Record an entry, and let listings show the run's status after it."""
        await self.run.record(entry, sync=sync, status=self._status_with(entry), change=change)

    def append(self, entry: NewEntry) -> None:
        """Record an entry at once, without an fsync, and let listings show the run's status."""
        self.run.append([entry], self._status_with(entry), sync=False)

    def _status_with(self, entry: NewEntry) -> str:
        """Return the run's status once the entry is recorded."""
        asked = {each.identity for each in open_waits(self.run.state)}
        match entry.kind:
            case EntryKind.WAIT_STARTED if runs.asks_a_person(entry):
                asked.add(entry.identity)
            case EntryKind.WAIT_ENDED:
                asked.discard(entry.identity)
            case _:
                pass
        return runs.WAITING if asked else runs.RUNNING


class _SuspendedByFailure:
    """Suspends a run by what its block raises of ours; made once, for each step enters it."""

    __slots__ = ("_run",)

    def __init__(self, run: ActiveRun) -> None:
        self._run = run

    def __enter__(self) -> None:
        """Watch a block; one may stand in another."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, MaestroError):
            raise self._run.suspended(error) from error


class ActiveTask:
    """A run that this process executes, with its input, and what its result will be put into."""

    def __init__(self, given: Input) -> None:
        self.given = given
        self.done: Future[Any] = Future()
        self.loop = asyncio.get_running_loop()
        #: The run itself, once it is open.
        self.active: ActiveRun | None = None

    @property
    def is_abandoned(self) -> bool:
        """Return whether its loop was closed over it: then it never ends."""
        return self.loop.is_closed()


def active_here(store: Store, run_id: str) -> ActiveTask | None:
    """Return a run that this process executes; None if it does not."""
    found = find_shared(store, ActiveTask, run_id)
    return None if found is None or found.is_abandoned or found.done.done() else found


async def _no_children(*_: object) -> None:
    raise AssertionError("the runner of the run sets this")


def _settle(listener: asyncio.Future[None], error: Exception | None) -> None:
    if listener.done():
        return
    if error is None:
        listener.set_result(None)
    else:
        listener.set_exception(error)


def retrieve(task: asyncio.Future[Any]) -> None:
    """Look at how something ended, so that asyncio does not report it as overlooked."""
    if not task.cancelled():
        task.exception()
