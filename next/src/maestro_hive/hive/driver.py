"""Drives one run: delivers recorded outcomes to its workflow in order, and starts what is new.

Every event from outside (a result, an answer, a fired timer, a cancel request) is appended to the
log, and the commit delivers it: one outcome at a time, each when the workflow is quiet. A replay is
the same deliveries. So what a workflow does depends on its arguments and its log alone.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from maestro_hive.engine.attempt import leave_attempt
from maestro_hive.engine.errors import CircuitBreakerOpen
from maestro_hive.hive.commands import (
    ChildCommand,
    ChildExecution,
    Command,
    OutsideCommand,
    QuestionCommand,
)
from maestro_hive.hive.positions import (
    KEYED,
    NESTED,
    Unclaimed,
    is_keyed,
    keyed_identity,
    name_of,
)
from maestro_hive.hive.run_ends import (
    differences,
    error_of,
    failed_end,
    successful_end,
    suspension_reason,
    unused_answers,
)
from maestro_hive.hive.run_log import RunLog
from maestro_hive.hive.workflow_loop import Call, TimerCall, WorkflowLoop
from maestro_hive.journal import values
from maestro_hive.journal.effects import Effect, Release, Take, Waits
from maestro_hive.journal.entries import (
    AnswerDropped,
    CallMoved,
    CancelRequested,
    RunEnded,
    RunResumed,
    RunSuspended,
    StepClosed,
    Ticked,
    TimerFired,
    WaitEnded,
    WaitWithdrawn,
)
from maestro_hive.journal.recorder import Recorder, RunJournal
from maestro_hive.kernel.errors import MaestroError, RunInterruptedError
from maestro_hive.kernel.logs import get_log

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.hive.answers import Answer
    from maestro_hive.hive.commands import Execution, RunsHere, Workflow
    from maestro_hive.journal.entries import Entry
    from maestro_hive.journal.state import Outcome
    from maestro_hive.journal.store import RunLease

logger = get_log(__name__)

#: A workflow that spins gets that many times ``turns`` at most before time passes: about 10 ms.
_MOST_TICKS = 64
_TICK_SECONDS = 0.02
#: After more deaths in a workflow's own code, without an outcome between, it waits for a retry.
MOST_DEATHS = 5
#: A run that waits for a person, or for a budget, is woken by a message.
_UNTIL_A_MESSAGE = 1e9
#: A timer that is due sooner is not shown as a wait.
_SHOWN_SECONDS = 1.0
#: How often tasks that catch their cancellation are cancelled when a run stops.
_MOST_CANCELLATIONS = 100


class Driver:
    """One run of this process."""

    def __init__(
        self,
        runs: RunsHere,
        recorder: Recorder,
        lease: RunLease,
        workflow: Workflow,
        context: contextvars.Context,
    ) -> None:
        self.runs, self.run_id = runs, lease.name
        self.outer = asyncio.get_running_loop()
        self.journal = RunJournal(recorder, lease, self._recorded, self.suspend)
        #: The entry of the end; cancelled if the run is stopped, an error if it cannot continue.
        self.end: asyncio.Future[RunEnded] = self.outer.create_future()
        self.is_live = self.is_stopping = False
        self.is_accepted = lease.queue is not None
        self.open: dict[str, Command] = {}
        self.executions: dict[Execution, asyncio.Task[None]] = {}
        self._workflow = workflow
        #: Outcomes to deliver, and their identities.
        self._heap: list[Outcome] = []
        self._queued: set[str] = set()
        self._to_launch, self._to_interrupt = list[Command](), list[Command]()
        #: Identities of outcomes that the driver itself is writing.
        self._unwritten: set[str] = set()
        self._is_scheduled = self._is_pumping = self._must_arm = self._has_caught_up = False
        #: Whether a run of an earlier life has still to look for messages that came meanwhile.
        self._must_look = lease.first is None
        self._is_looking = self._has_asked = False
        #: Whether it has taken the messages that came before it was resumed.
        self.has_looked = lease.first is not None
        #: The cancellation that the workflow has seen.
        self._cancelled: CancelRequested | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._turns = 1
        self._cancelled_keys: Counter[str] = Counter()
        #: The tasks that stop the run, and that wait for the children of an ended workflow.
        self._stopping: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        # Contexts that this run alone enters: another thread may have entered a shared one.
        self._own, self._context = contextvars.Context(), context

        #: What lists of runs show that it waits for, while it stays in memory.
        self._shown_wait: str | None = None
        self.waits_changed: Callable[[], None] = lambda: None
        #: Threads of its steps that still run after its stop: they hold the run.
        self.left = self.journal.left

        state = self.journal.load()
        assert state.started is not None
        self._log = RunLog(self.run_id, runs.log_level)
        self._log.started(workflow.name, is_resumed=lease.first is None)
        self._heap += state.signals  # in the order of the log
        self._arguments: tuple[list[Any], dict[str, Any]] = ([], {})
        try:
            self._arguments = values.decode(self.journal.text(state.started.input))
            workflow.check(self.run_id, *self._arguments)
        except MaestroError as error:  # other code than that of its caller
            self.suspend(error)
        else:
            self._resume()
        self.is_cancel_requested = state.cancel_requested is not None
        #: What changed code has not claimed, once the run has caught up with its log.
        self._unclaimed: Unclaimed | None = None
        at, turns = state.started.at / 1e6, state.started.turns
        # All other methods of a loop are made where its class is: they refuse.
        self.loop = WorkflowLoop(self.outer, self, at, turns)  # type: ignore[abstract]
        self._root: asyncio.Task[Any] | None = None
        context.run(leave_attempt)
        self.loop.ready.append(Call(self._start, (), self._own.copy()))
        self.wake()

    def _resume(self) -> None:
        """Record another life of a run; give up one whose own code has ended too many processes."""
        lease, state = self.journal.lease, self.journal.state
        if lease.first is not None or not (state.suspended or lease.deaths > state.deaths):
            return
        is_outside = not any(step.open_attempt for step in state.steps.values())
        deaths = state.deaths_outside + (lease.deaths - state.deaths if is_outside else 0)
        if deaths and self.runs.has_progressed(state):
            deaths = 0
        resumed = RunResumed(
            process=self.journal.recorder.store.db.holder(),
            deaths=lease.deaths,
            deaths_outside=deaths,
            saved_tokens=state.tokens,
            saved_micros=state.micros,
        )
        self.journal.record_now(resumed)  # before its code can end this process, too
        if deaths > MOST_DEATHS:
            self.suspend(RunInterruptedError(self.run_id, "the workflow's own code", deaths))

    # --- the pump ---

    def pump(self) -> None:
        """Deliver recorded outcomes, one at a time; then start what is new.

        Only a plain callback of the outer loop calls this.
        """
        self._is_scheduled = False
        if self.is_stopping or self._stopping is not None or self._ending is not None:
            return
        self._is_pumping = True
        try:
            self.loop.is_driven = True
            if not self._deliver_all():
                return
            # What has woken it until here was run.
            self.loop.is_driven = self._is_scheduled = False
            if self._root is not None and self._root.done():
                self._finish()
            elif self._unwritten:
                return  # an outcome of our own comes first, before anything is started
            elif self.is_live or self._go_live():
                self._start_what_is_new()
        except Exception as error:  # noqa: BLE001 - of this process, such as a value of a lost class
            self.suspend(error)
        finally:
            self._is_pumping = self.loop.is_driven = False
            if self._is_scheduled:
                self.outer.call_soon(self.pump, context=self._own)

    def _deliver_all(self) -> bool:
        """Deliver each outcome when the workflow is quiet; return whether all were delivered."""
        if not self.loop.is_frozen:  # or only an outcome gives it more turns: it is the same again
            self.loop.drain()
        while self._heap and (self._root is None or not self._root.done()):
            outcome = self._heap[0]
            command = self.open.get(outcome.identity)
            if isinstance(command, OutsideCommand) and command.ended is None:
                return False  # its work is being done again
            heapq.heappop(self._heap)
            self._queued.discard(outcome.identity)
            if self._tick is not None:
                self._drop_tick()
            self.loop.now = max(self.loop.now, outcome.at / 1e6)
            self._deliver(outcome, command)
            self.loop.drain()
            for _ in range(self._turns - 1):  # of a recorded tick
                if not self.loop.is_frozen:
                    break
                self.loop.drain()
            if not self.loop.is_frozen:
                self._turns = 1
        return True

    def _start(self) -> None:
        """Make the root task, in a plain callback of its loop: an eager one enters its context."""
        name = f"workflow {self.run_id}"
        self._root = self.loop.create_task(self._main(), context=self._context, name=name)

    async def _main(self) -> Any:
        args, kwargs = self._arguments
        try:
            return await self._workflow.body(*args, **kwargs)
        finally:
            await self.loop.shutdown_asyncgens()

    def _deliver(self, outcome: Outcome, command: Command | None) -> None:
        match outcome.entry:
            case TimerFired():
                timer = self.loop.timers.pop(outcome.identity, None)
                if timer is not None and timer.callback is not None:
                    self.loop.ready.append(timer)
                    self._must_arm = True
            case CancelRequested() as request:
                assert self._root is not None
                self._cancelled, self._must_arm = request, True
                self._root.cancel()
            case Ticked(turns=turns):
                self._turns = turns
            case entry if command is not None:
                del self.open[outcome.identity]
                is_cancelled = isinstance(entry, StepClosed) and entry.how == "cancelled"
                if is_cancelled and is_keyed(outcome.identity):
                    self._cancelled_keys[outcome.identity.partition(KEYED)[2]] += 1
                for each in command.sharers or (command,):
                    each.deliver(outcome)
            case _:
                pass  # the workflow has withdrawn the call

    def _go_live(self) -> bool:
        """Everything recorded was delivered: record what moved and what is due.

        Both come before anything is started; return whether there was neither.
        """
        if not self._has_caught_up:
            self._has_caught_up = True
            self._unclaimed = Unclaimed(self.journal.state.outcomes) or None
        if self._must_look:
            self._must_look, self._is_looking = False, True
            self.runs.check_inbox_soon()
            self.wake()  # after that
            return False
        self._is_looking = False
        if self._is_clean_up_over():
            self._finish()
            return False
        if self._take_moved() or self._fire_due():
            return False
        self.is_live = self._must_arm = True
        if not self.has_looked:
            self.runs.check_inbox_soon()
        return True

    def _take_moved(self) -> bool:
        """Record the new places of equal calls whose outcome no call has claimed."""
        if self._unclaimed is None:
            return False
        outcomes, take = self.journal.state.outcomes, self._unclaimed.take
        found = {
            each.identity: take(each.identity, each.earlier_contents()) for each in self._to_launch
        }
        timers = [each for each in self.loop.timers if not self.is_recorded(each)]
        found |= {each: take(each) for each in timers}
        moved = {identity: origin for identity, origin in found.items() if origin is not None}
        for identity, origin in sorted(moved.items(), key=lambda each: outcomes[each[1]].seq):
            self._unclaimed.met(identity, is_recorded=True)
            self.record(CallMoved(identity=identity, origin=origin))
        self._to_launch = [each for each in self._to_launch if each.identity not in moved]
        return bool(moved)

    def _start_what_is_new(self) -> None:
        while self._to_launch or self._to_interrupt:
            if self._take_moved():
                return
            launch, self._to_launch = self._to_launch, []
            interrupt, self._to_interrupt = self._to_interrupt, []
            for command in launch:
                self._launch(command)
            launched = {id(each) for each in launch} if interrupt else set()
            for command in interrupt:  # those just launched have seen it
                if id(command) not in launched:
                    command.interrupt()
        if self._must_arm:
            self._must_arm = False
            self._arm()
        if self.loop.is_frozen:
            if self._tick is None:
                self._tick = self.outer.call_later(_TICK_SECONDS, self._ticked)
        elif not (self.open or self.loop.timers or self._heap or self._unwritten):
            self.loop.warn_of_waiting()
        self.show_wait()

    def _launch(self, command: Command) -> None:
        if self._unclaimed is not None:  # the code was changed
            state, identity = self.journal.state, command.identity
            known = (state.by_identity, state.children, state.questions)
            self._unclaimed.met(identity, is_recorded=any(identity in each for each in known))
        if not command.done() or command.is_wanted:
            command.launch()
        elif command.identity in self.journal.state.questions:  # of an earlier life
            self.journal.record_soon(WaitWithdrawn(identity=command.identity))

    # --- recording ---

    def record(self, *entries: Entry, effects: tuple[Effect, ...] = ()) -> None:
        """Record outcomes that no execution records: they are delivered before anything starts."""
        if not self.is_stopping:
            self._unwritten.update(getattr(each, "identity", "") for each in entries)
            self.journal.record_soon(*entries, effects=effects)

    def _recorded(self, outcome: Outcome) -> None:
        """Queue an outcome for delivery; the commit calls this, in the order of the log."""
        identity = outcome.identity
        self._unwritten.discard(identity)
        if identity[:1] == NESTED or self.is_stopping:
            return
        if isinstance(outcome.entry, WaitEnded) and identity not in self.open:
            self.wake()  # changed code has not asked this again yet
            return
        if not is_keyed(identity):
            self.journal.state.outcomes.pop(identity, None)
        heapq.heappush(self._heap, outcome)
        self._queued.add(identity)
        self.wake()

    # --- what commands ask for ---

    def issue(self, command: Command) -> None:
        """Take up a durable call: its outcome takes its place in the order, or the call is new.

        While the run is stopping it stays pending: a workflow that catches everything still ends.
        """
        if self.is_stopping:
            return
        self._has_asked = self._has_asked or isinstance(command, QuestionCommand)
        other = self.open.setdefault(command.identity, command)
        if other is not command:
            other.share(command)
        elif not self._claim(command.identity):
            self._to_launch.append(command)

    def _claim(self, identity: str) -> bool:
        """Queue the recorded outcome of a call; return whether there is one."""
        outcomes = self.journal.state.outcomes
        outcome = outcomes.get(identity)
        if outcome is None:
            return False
        if not is_keyed(identity):
            del outcomes[identity]
        if self._unclaimed is not None:
            self._unclaimed.met(identity, is_recorded=True)
        heapq.heappush(self._heap, outcome)
        self._queued.add(identity)
        return True

    def execute(self, execution: Execution, context: contextvars.Context) -> None:
        """Start an execution on the outer loop."""
        self.journal.recorder.busy += 1
        task = self.outer.create_task(self._execute(execution), context=context)
        if not task.done():  # as an eager one may be
            self.executions[execution] = task

    async def _execute(self, execution: Execution) -> None:
        try:
            await execution.run()
        except asyncio.CancelledError:
            if not (execution.is_cancelled or execution.is_stopped):  # its loop ends
                self._stop_soon(self.release())
        except Exception as error:  # noqa: BLE001 - fenced, no budget, a store that failed
            self.suspend(error)
        finally:
            self.journal.recorder.busy -= 1
            self.executions.pop(execution, None)

    def interrupt_soon(self, command: Command) -> None:
        """End the execution of a cancelled command, once the workflow is quiet."""
        if not self.is_recorded(command.identity):
            self._to_interrupt.append(self.open.get(command.identity, command))
            self.wake()

    def withdraw(self, command: Command) -> None:
        """Forget a command that its workflow does not await any more."""
        self.open.pop(command.identity, None)
        if isinstance(command, QuestionCommand) and command.is_asked and not self.is_stopping:
            self.journal.record_soon(WaitWithdrawn(identity=command.identity))

    def is_recorded(self, identity: str) -> bool:
        """Return whether the outcome of a call waits for its delivery, or is being written."""
        return identity in self._unwritten or identity in self._queued

    def keyed(self, key: str) -> str:
        """Return the identity of a step with a key: a new one after each cancelled call."""
        return keyed_identity(key, self._cancelled_keys[key])

    # --- the host of the workflow's loop ---

    def wake(self) -> None:
        """Pump soon."""
        if not self._is_scheduled and not self.is_stopping:
            self._is_scheduled = True
            if not self._is_pumping:
                self.outer.call_soon(self.pump, context=self._own)

    def woken(self) -> None:
        """Pump soon; warn if no outcome explains the callback."""
        if not self._is_pumping and not self.is_stopping:
            self.loop.warn(
                "was woken by an event that is not recorded, such as a queue, future or thread of"
                " another loop: a resumed run may differ; return the value from a step instead"
            )
        self.wake()

    def timer_set(self, timer: TimerCall) -> None:
        """Take up a timer: fired at its place in the log, or to be armed."""
        if not self.is_stopping and not self._claim(timer.identity):
            timer.postpone(self.journal.state.retried.get(timer.identity, 0) / 1e6)
            self._must_arm = True

    def executed(
        self, executor: Any, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> asyncio.Future[Any]:
        """Execute a function in an executor of the outer loop, in each life."""
        begin = partial(self.outer.run_in_executor, executor, function, *args)
        return OutsideCommand(self, "thread", begin)

    # --- time ---

    @property
    def next_due(self) -> float | None:
        """Return the time of the earliest timer."""
        return min((each.when() for each in self.loop.timers.values()), default=None)

    def next_due_of_all(self) -> float | None:
        """Return the earliest time that the run or one of its children waits for."""
        dues = [self.next_due, *(each.next_due_of_all() for each in self._children())]
        return min((each for each in dues if each is not None), default=None)

    def _arm(self) -> None:
        """Set one timer of the outer loop, for the earliest of the workflow's."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        dues = [self.next_due, self._cancelled.until / 1e6 if self._cancelled is not None else None]
        if found := [each for each in dues if each]:
            self._timer = self.outer.call_later(
                max(0.0, min(found) - self.journal.now()), self._fire
            )

    def _fire(self) -> None:
        self._timer = None
        if any(isinstance(each, QuestionCommand) for each in self.open.values()):
            self.runs.check_inbox()  # an answer that came in time
        if self._is_clean_up_over():
            self._finish()
        elif not self._fire_due():
            self._arm()

    def _is_clean_up_over(self) -> bool:
        """Return whether a cancelled workflow has had its time to clean up."""
        until = self._cancelled.until / 1e6 if self._cancelled is not None else 0.0
        return 0 < until <= self.journal.now()

    def _fire_due(self) -> bool:
        """Record the timers that are due, in the order of their times; return whether any is."""
        now = self.journal.now()
        due = [
            TimerFired(identity=each.identity, is_timeout=not each.is_sleep)
            for each in sorted(self.loop.timers.values(), key=TimerCall.when)
            if each.when() <= now and not self.is_recorded(each.identity)
        ]
        if due:
            self.record(*due)
        return bool(due)

    def _ticked(self) -> None:
        """Give a workflow that spins more turns, as an outcome."""
        self._tick = None
        if self.loop.is_frozen and not self._heap:
            self.record(Ticked(turns=min(self._turns * 2, _MOST_TICKS)))

    def _drop_tick(self) -> None:
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None

    # --- messages ---

    def request_cancel(self, reason: str, effects: tuple[Effect, ...] = ()) -> None:
        """Cancel the run: recorded, and delivered as any outcome; a second request does nothing."""
        if not self.is_cancel_requested:
            self.is_cancel_requested = True
            until = int((self.journal.now() + self.runs.cancel_grace) * 1e6)
            self.record(CancelRequested(reason=reason, until=until), effects=effects)
        elif effects:  # or its message would wake the run whenever a worker releases it
            self.journal.record_soon(effects=effects)

    def answer(self, identity: str, answer: Answer, take: Take) -> None:
        """Record the answer to a question; show one to a question that is closed as not taken."""
        if not (self.is_live or self._is_looking) or self.is_recorded(identity):
            return
        if identity in self.journal.state.questions:
            ended = WaitEnded(identity=identity, answer=answer.value, by=answer.by)
            self.record(ended, effects=(take,))
        elif identity not in self.open and self.is_quiet:
            self.drop_answer(identity, name_of(identity), answer.by, "its question is over", take)

    def drop_answer(
        self, identity: str, name: str, by: str, reason: str, take: Take | None = None
    ) -> None:
        """Show that an answer is not taken."""
        dropped = AnswerDropped(identity=identity, name=name, by=by, reason=reason)
        logger.warning("run %s: %s", self.run_id, dropped.text())
        self.journal.record_soon(dropped, effects=() if take is None else (take,))

    @property
    def is_quiet(self) -> bool:
        """Return whether nothing happens in the workflow until an outcome comes from outside."""
        busy = self._heap or self._unwritten or self._is_scheduled or self.loop.is_frozen
        return self.is_live and not (self.is_stopping or self._ending is not None or busy)

    def show_wait(self) -> None:
        """Show in lists of runs whether the run only waits: then it holds no turn of its queue."""
        latest = next(reversed(self.executions), None)
        is_busy = latest is not None and not isinstance(latest, ChildExecution)
        shown = None if is_busy else self.waits_for
        if shown != self._shown_wait and not self.is_stopping:
            self._shown_wait = shown
            self.journal.record_soon(effects=(Waits(shown),))
            self.waits_changed()

    @property
    def waits_for(self) -> str | None:
        """Return what the run waits for; None if it does something, or waits for a moment."""
        if not self.only_waits:
            return None
        for command in self.open.values():
            return command.waits_for
        due = self.next_due
        is_long = due is not None and due - self.journal.now() > _SHOWN_SECONDS
        return "timer" if is_long else None

    @property
    def only_waits(self) -> bool:
        """Return whether the run waits for time, people, or runs that only wait or are no part."""
        children = self._children()
        return (
            self.is_quiet
            and self.has_looked
            and all(each.waits_for for each in self.open.values())
            and len(self.executions) == len(children)
            and all(child.only_waits for child in children)
        )

    # --- ends ---

    def _finish(self) -> None:
        """End the run, when the children that it has left are cancelled and have ended."""
        ended = self._ended()
        if ended is None:
            return
        calls = self.open.values()
        children = [each for each in calls if isinstance(each, ChildCommand) and each.has_started]
        if not children:
            self._record_end(ended)
            return
        self._interrupt_executions()
        for child in children:
            child.end()
        self._ending = self.outer.create_task(self._end_after_children(ended))

    async def _end_after_children(self, ended: RunEnded) -> None:
        while children := [each for each in self.executions if isinstance(each, ChildExecution)]:
            await asyncio.wait([self.executions[each] for each in children])
        if not self.is_stopping and self._stopping is None:
            self._record_end(ended)

    def _record_end(self, ended: RunEnded) -> None:
        self._close()
        done: asyncio.Future[list[Entry]] = self.outer.create_future()
        done.add_done_callback(self._finished)
        news = (
            *differences(self._unclaimed or Unclaimed(self.journal.state.outcomes)),
            *unused_answers(self.journal, has_asked=self._has_asked),
        )
        self.journal.record_soon(*news, ended, effects=(Release(ended.status),), done=done)

    def _ended(self) -> RunEnded | None:
        """Return the entry of the end; None if this process ends, and not the run."""
        root = self._root
        assert root is not None
        if self._cancelled is not None:  # a workflow cannot refuse
            return RunEnded(status="cancelled", reason=self._cancelled.reason)
        error = error_of(root)
        if error is not None and not isinstance(error, Exception):  # SystemExit, KeyboardInterrupt
            self.suspend(MaestroError(f"run {self.run_id!r} was suspended by {error!r}"))
            return None
        return failed_end(error) if error is not None else successful_end(root.result())

    def _finished(self, done: asyncio.Future[list[Entry]]) -> None:
        self.runs.forget(self)
        if (error := done.exception()) is not None:
            self._fail(error)
            return
        ended = done.result()[-1]
        assert isinstance(ended, RunEnded)
        assert self._root is not None
        self._log.ended(ended, self.journal, self._root)
        self.end.set_result(ended)

    def suspend(self, error: Exception) -> None:
        """End the run for this process because of an error; its id or a worker resumes it."""
        if not self.is_stopping and self._stopping is None:
            self._stop_soon(self._release_after(error), error)

    def release(self) -> Release:
        """Return how to release the run in a polite stop: to its caller, or to workers."""
        now = self.journal.now()
        if not self.is_accepted:
            return Release("stopped")
        if not self.only_waits:
            return Release("pending", now)
        due = self.next_due_of_all()
        return Release("waiting", now + _UNTIL_A_MESSAGE if due is None else due, self.waits_for)

    async def stop(self, release: Release, error: Exception | None = None) -> None:
        """End the run for this process: its bodies, its children, its workflow; then release it.

        To cancel this call does not interrupt the stop; another call waits for the same one.
        """
        self._stop_soon(release, error)
        if self._stopping is not None:
            await asyncio.shield(self._stopping)

    def _stop_soon(self, release: Release, error: Exception | None = None) -> None:
        if not self.is_stopping and self._stopping is None:
            stop = self._stop(release, error)
            self._stopping = self.outer.create_task(stop, context=self._own.copy())

    async def _stop(self, release: Release, error: Exception | None) -> None:
        self.is_stopping = True
        self._interrupt_executions()
        for child in self._children():
            await child.stop(Release("stopped"), error)
            self.left += child.left
        while self.executions:
            await asyncio.wait(self.executions.values())
        self._close()
        done: asyncio.Future[list[Entry]] = self.outer.create_future()
        before, news = self.journal.state.suspended, []
        if error is not None and (before is None or before.message != str(error)):
            news.append(RunSuspended(reason=suspension_reason(error), message=str(error)))
        threads = [each for each in self.left if not each.done()]
        effects = (release,) if not threads else ()
        self.journal.record_soon(*news, effects=effects, done=done)
        await asyncio.wait((done,))
        if threads and done.exception() is None:
            self.runs.hold(self.journal.lease, release, threads)
        done.exception()  # refused if the run is another's by now, or if the store has failed
        self.runs.forget(self)
        if release.status == "waiting" and error is None:
            self._log.released(release.waits_for)
        else:
            self._log.suspended(error)
        if error is None:
            self.end.cancel()
        else:
            self._fail(error)

    def _release_after(self, error: Exception) -> Release:
        """Return how to release a run after an error: to a person, to workers, or to its caller."""
        if isinstance(error, RunInterruptedError):
            return Release("interrupted")
        pause = self.runs.note_suspension(self.run_id, error)
        if not self.is_accepted:
            return Release("stopped")
        reason = suspension_reason(error)
        wait = pause if reason == "error" else _UNTIL_A_MESSAGE
        if isinstance(error, CircuitBreakerOpen):
            wait = error.cooldown_seconds
        return Release("waiting", self.journal.now() + wait, reason)

    def _fail(self, error: BaseException) -> None:
        self.end.set_exception(error)
        self.end.exception()  # retrieved, whether a caller waits for it or not

    def _children(self) -> list[Driver]:
        found = [each.child for each in self.executions if isinstance(each, ChildExecution)]
        return [child for child in found if child is not None]

    def _interrupt_executions(self) -> None:
        for execution in list(self.executions):
            execution.stop()

    def _close(self) -> None:
        """End what is left of the workflow: its tasks, timers, and calls that it does not await."""
        self.is_stopping = True
        self._interrupt_executions()
        for command in self.open.values():
            if isinstance(command, OutsideCommand):
                command.abandon()
        if self._timer is not None:
            self._timer.cancel()
        self._drop_tick()
        for _ in range(_MOST_CANCELLATIONS):
            left = [each for each in self.loop.tasks if not each.done()]
            if not left:
                break
            for task in left:
                task.cancel()
            self.loop.drain()
        self.loop.closed = True
        self.loop.timers.clear()
        self.open.clear()
        self._to_launch.clear()
        self._to_interrupt.clear()
