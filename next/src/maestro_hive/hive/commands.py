"""The durable calls of a workflow: made on its own loop, executed on the outer one.

A command is a future of the workflow's loop. The driver launches it when everything recorded was
delivered; its outcome goes through the log, and the driver delivers it back to the command.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import zlib
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from msgspec import UNSET, Raw

from maestro_hive.engine.step import StepExecution
from maestro_hive.hive.answer_types import ShapeError, build, shape_of
from maestro_hive.hive.answers import TakeEarly
from maestro_hive.hive.positions import question_content
from maestro_hive.hive.run_ends import CALL
from maestro_hive.hive.workflow_loop import TimerCall
from maestro_hive.journal import values
from maestro_hive.journal.effects import ENDED, Release, Watch
from maestro_hive.journal.entries import (
    ChildEnded,
    ChildStarted,
    RunEnded,
    StepClosed,
    StepCompleted,
    ThreadEnded,
    Value,
    WaitEnded,
    WaitStarted,
    WaitWithdrawn,
    replace,
)
from maestro_hive.journal.recorded_errors import decode_error, encode_error
from maestro_hive.kernel.errors import (
    RecordedError,
    RunCancelledError,
    RunFailedError,
    UnknownRunError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping
    from concurrent.futures import Future

    from maestro_hive.engine.attempt import StepStages
    from maestro_hive.engine.plan import Plan
    from maestro_hive.hive.driver import Driver
    from maestro_hive.journal.entries import Entry
    from maestro_hive.journal.state import Outcome, RunState
    from maestro_hive.journal.store import RunLease, Store


# --- what commands use ----------------------------------------------------------------------------


class Workflow(Protocol):
    """A workflow, as its runs and its parents use it."""

    name: str
    body: Callable[..., Coroutine[Any, Any, Any]]

    def check(self, run_id: str, args: list[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise if the recorded arguments of a run do not fit the function."""

    def normal(self, data: bytes) -> bytes:
        """Return recorded arguments as its own calls have them."""


class RunsHere(Protocol):
    """The runs of this process on one loop."""

    stages: StepStages
    #: For how many seconds a cancelled workflow may clean up.
    cancel_grace: float
    #: From which level on it is logged how runs proceed.
    log_level: str

    async def open_child(self, command: ChildCommand) -> Driver | RunEnded:
        """Start a child of a run, or resume it; return its end if it has ended."""

    def hold(self, lease: RunLease, release: Release, threads: list[Future[Any]]) -> None:
        """Release a run when threads of it have ended."""

    def has_progressed(self, state: RunState) -> bool:
        """Return whether a child of a run has had an outcome since the run was resumed."""

    def note_suspension(self, run_id: str, error: Exception) -> float:
        """Remember why a run is suspended; return for how long, longer each time."""

    def check_inbox_soon(self) -> None:
        """Look for messages soon."""

    def check_inbox(self) -> None:
        """Look for messages at once."""

    def forget(self, driver: Driver) -> None:
        """Drop a run that has ended here."""


class Execution(Protocol):
    """The work of a command on the outer loop."""

    is_cancelled: bool
    is_stopped: bool

    def cancel(self) -> None:
        """End the work for its workflow."""

    def stop(self) -> None:
        """End the work for this process."""

    async def run(self) -> object:
        """Work to the outcome."""


# --- commands -------------------------------------------------------------------------------------


class Command(asyncio.Future[Any]):
    """One durable call.

    ``waits``: if the workflow cancels it, it ends when its execution has, as in plain asyncio.
    """

    waits = True
    #: The event outside of this process that it waits for; empty for work of its own.
    waits_for = ""

    def __init__(self, host: Driver, identity: str) -> None:
        super().__init__(loop=host.loop)
        self.host, self.identity = host, identity
        self.context = contextvars.copy_context()
        self.is_cancelled = False
        #: All calls under way with the same key, this one too.
        self.sharers: list[Command] | None = None
        self._message: object = None  # anyio recognizes its own cancellations by it
        host.issue(self)

    def __hash__(self) -> int:
        return zlib.crc32(self.identity.encode())  # the same in each life

    @property
    def is_wanted(self) -> bool:
        """Return whether the workflow awaits the result of this call, or of one with its key."""
        if self.sharers is None:
            return not (self.is_cancelled or self.done())
        return any(not (each.done() or each.is_cancelled) for each in self.sharers)

    def earlier_contents(self) -> Iterable[str]:
        """Return the contents by which earlier code may have recorded the call."""
        return ()

    def share(self, other: Command) -> None:
        """Give the outcome to another call with the same key, too."""
        self.sharers = self.sharers or [self]
        self.sharers.append(other)
        other.sharers = self.sharers

    def launch(self) -> None:
        """Start the execution: everything recorded was delivered, and this call has no outcome."""
        raise NotImplementedError

    def interrupt(self) -> None:
        """End the execution: the workflow has cancelled the call."""

    def cancel(self, msg: object = None) -> bool:
        """Cancel the call for the workflow: at once, or when its execution has ended."""
        if self.done():
            return False
        self._message = msg
        if self.host.is_stopping or not self.waits:
            self.host.withdraw(self)
            return super().cancel(msg)
        if not self.is_cancelled:  # anyio cancels again in each turn
            self.is_cancelled = True
            if self.is_wanted:  # by another call with this key
                return super().cancel(msg)
            self.host.interrupt_soon(self)
        return True

    def deliver(self, outcome: Outcome) -> None:
        """End with the outcome; a result that was there before the cancellation comes too late."""
        if self.done():
            return
        entry = outcome.entry
        if self.is_cancelled and not entry.despite:
            super().cancel(self._message)
            return
        match entry:
            case StepCompleted() | ChildEnded(status="success"):
                self.set_result(self._value(entry.result))
            case StepClosed(how="skipped"):
                self.set_result(None)
            case StepClosed(how="failed") | ChildEnded(status="failed"):
                error = decode_error(self.host.journal.text(entry.error))
                with contextlib.suppress(AttributeError):  # an error without attributes
                    setattr(error, CALL, self.identity)
                self.set_exception(error)
            case _:
                super().cancel(self._message)

    def _value(self, recorded: Value) -> Any:
        """Return the value of a recorded result."""
        return values.decode(self.host.journal.text(recorded))


class ExecutedCommand(Command):
    """A call whose execution can be interrupted; the execution records the outcome."""

    _execution: Execution | None = None

    def make_execution(self) -> Execution:
        """Return the execution of the call."""
        raise NotImplementedError

    def cancelled_entry(self) -> Entry:
        """Return the outcome of a call that was cancelled before it was executed."""
        raise NotImplementedError

    def launch(self) -> None:
        """Start the execution, if the result is wanted."""
        if self.is_wanted:
            self._execution = self.make_execution()
            self.host.execute(self._execution, self.context)
        else:
            self.host.record(self.cancelled_entry())

    def interrupt(self) -> None:
        """End the execution."""
        if self._execution is None:
            self.host.record(self.cancelled_entry())
        else:
            self._execution.cancel()


class StepCommand(ExecutedCommand):
    """A call of a step."""

    def __init__(self, host: Driver, plan: Plan) -> None:
        self._plan = plan
        super().__init__(host, plan.identity)

    def earlier_contents(self) -> Iterable[str]:
        """Return the contents by which earlier code, with other defaults, recorded the call."""
        return self._plan.definition.earlier_contents(self._plan.call)

    def make_execution(self) -> StepExecution:
        """Return the execution of the step."""
        return StepExecution(self._plan, self.host.journal, self.host.runs.stages)

    def _value(self, recorded: Value) -> Any:
        """Return the value as it is read back; it need not be decoded in the life of its body."""
        execution = self._execution
        if isinstance(execution, StepExecution) and execution.result is not None:
            return execution.result.take()
        return values.decode(self.host.journal.text(recorded))

    def cancelled_entry(self) -> StepClosed:
        """Return the outcome of a step that was cancelled before it started."""
        return StepClosed(identity=self.identity, how="cancelled")


class ChildCommand(ExecutedCommand):
    """A call of a workflow by a workflow: a run of its own."""

    waits_for = "child"

    def __init__(self, host: Driver, workflow: Workflow, data: bytes) -> None:
        self.workflow, self.data = workflow, data
        super().__init__(host, host.loop.place(f"{workflow.name}:{values.short_digest(data)}"))
        digest = values.short_digest(self.identity.encode())[:10]
        self.run_id = f"{host.run_id}/{workflow.name}.{digest}"

    @property
    def has_started(self) -> bool:
        """Return whether the child has started, in this life or an earlier one."""
        started = self.host.journal.state.children
        return self._execution is not None or self.identity in started

    def launch(self) -> None:
        """Run the child; one that is cancelled and has started before is resumed, to clean up."""
        if self.is_wanted or not self.has_started:
            super().launch()
        else:
            self.end()

    def end(self) -> None:
        """Cancel the child, in this process."""
        if self._execution is None:
            self._execution = self.make_execution()
            self.host.execute(self._execution, self.context)
        self._execution.cancel()

    def make_execution(self) -> ChildExecution:
        """Return the execution of the child."""
        return ChildExecution(self)

    def cancelled_entry(self) -> ChildEnded:
        """Return the outcome of a child that was cancelled before it started."""
        return ChildEnded(identity=self.identity, status="cancelled")


class ChildExecution:
    """The execution of a child run, on the outer loop."""

    def __init__(self, command: ChildCommand) -> None:
        self._command = command
        #: The child, if this process executes it.
        self.child: Driver | None = None
        self.is_cancelled = self.is_stopped = False

    def cancel(self) -> None:
        """Cancel the child."""
        self.is_cancelled = True
        if self.child is not None:
            self.child.request_cancel("its parent")

    def stop(self) -> None:
        """Stop a child that is being opened; the driver stops those that are open."""
        self.is_stopped = True

    async def run(self) -> None:
        """Run the child to its end, and record the outcome."""
        command, host = self._command, self._command.host
        identity, run_id, journal = command.identity, command.run_id, host.journal
        if identity not in journal.state.children:
            name = command.workflow.name
            started = ChildStarted(identity=identity, run_id=run_id, workflow=name)
            _ = await journal.record(started)
        ended = await host.runs.open_child(command)
        if not isinstance(ended, RunEnded):
            self.child = ended
            self.child.waits_changed = host.show_wait
            if self.is_stopped:
                await self.child.stop(Release("stopped"))
                return
            if self.is_cancelled:
                self.child.request_cancel("its parent")
            try:
                ended = await asyncio.shield(self.child.end)
            except asyncio.CancelledError:
                return  # stopped: it is resumed with its parent
        if not host.is_stopping:
            store, despite = journal.recorder.store, self.is_cancelled
            _ = await journal.record(child_ended(store, identity, run_id, ended, despite=despite))


def end_of(store: Store, run_id: str) -> RunEnded | None:
    """Return the end of a run; None if it has not ended."""
    row = store.find(run_id)
    return last_end(store.entries(row.number)) if row.status in ENDED else None


def last_end(entries: list[Entry]) -> RunEnded:
    """Return the end of a run that has ended."""
    return next(each for each in reversed(entries) if isinstance(each, RunEnded))


def failed_error(run_id: str, cause: Exception) -> RunFailedError:
    """Return the error about a run that failed; the lines of the cause are its last note."""
    notes = getattr(cause, "__notes__", [])
    lines = notes[-1] if notes else ""
    kind = cause.type_name if isinstance(cause, RecordedError) else type(cause).__name__
    return RunFailedError(run_id, error_type=kind, error_message=str(cause), error_traceback=lines)


def child_ended(
    store: Store, identity: str, run_id: str, ended: RunEnded, *, despite: bool = False
) -> ChildEnded:
    """Return the end of another run as an outcome of this one."""
    result: Value = UNSET
    error: Value = UNSET
    if ended.status == "success":
        result = Raw(store.text(run_id, ended.result))
    elif ended.status == "failed":
        cause = decode_error(store.text(run_id, ended.error))
        failed = failed_error(run_id, cause)
        failed.__cause__ = cause
        error = Raw(encode_error(failed))
    return ChildEnded(
        identity=identity, status=ended.status, result=result, error=error, despite=despite
    )


class AwaitedRunCommand(Command):
    """The wait for the end of a run that workers execute: ``await handle.result()``."""

    waits, waits_for = False, "run"

    def __init__(self, host: Driver, run_id: str) -> None:
        self.target = run_id
        super().__init__(host, host.loop.place(f"result/{run_id}"))

    def launch(self) -> None:
        """Watch the run: its end sends a message to this one."""
        self.host.journal.record_soon(effects=(Watch(self.target),))
        self.host.runs.check_inbox_soon()

    def ended_entry(self) -> ChildEnded | None:
        """Return the end of the run, or that there is no such run; None if it has not ended."""
        store = self.host.journal.recorder.store
        try:
            ended = end_of(store, self.target)
        except UnknownRunError as unknown:
            error = Raw(encode_error(unknown))
            return ChildEnded(identity=self.identity, status="failed", error=error)
        if ended is None:
            return None
        made = child_ended(store, self.identity, self.target, ended)
        if ended.status == "cancelled":
            error = Raw(encode_error(RunCancelledError(self.target, ended.reason)))
            return replace(made, status="failed", error=error)
        return made


class QuestionCommand(Command):
    """A question to people or other processes.

    It is its branch, name, type and subject: calls before it do not matter, and it never moves.
    """

    waits, waits_for = False, "answer"

    def __init__(
        self,
        host: Driver,
        name: str,
        expected: object,
        about: object,
        timeout: float | None,
    ) -> None:
        shape = shape_of(expected)
        self._type = json.dumps(shape, separators=(",", ":")) if shape else ""
        data = b"" if about is None else values.encode(about, "about").data
        self.name, self._expected = name, expected
        self._about = Raw(data) if data else UNSET
        self.is_asked = False
        kind = values.short_digest(self._type.encode()) if shape else ""
        content = question_content(name, kind, values.short_digest(data))
        super().__init__(host, host.loop.place(content))
        self._timer = None if timeout is None else self._set_timer(timeout)

    def _set_timer(self, timeout: float) -> TimerCall:
        """Set the deadline: that of an earlier life stays, also when the code has another one."""
        known = self.host.journal.state.questions.get(self.identity)
        when = known.until / 1e6 if known and known.until else self.host.loop.now + timeout
        loop, place = self.host.loop, f"timer for {self.identity}"
        return loop.set_timer(TimerCall(self._expire, (), self.context, when, place, loop))

    def _expire(self) -> None:
        if not self.done():
            self.host.withdraw(self)
            error = TimeoutError(
                f"there was no answer to {self.name!r} of run {self.host.run_id!r} in time"
            )
            if self._timer is not None:
                setattr(error, CALL, self._timer.identity)
            self.set_exception(error)

    def cancel(self, msg: object = None) -> bool:
        """Cancel the question at once."""
        self._drop_timer()
        return super().cancel(msg)

    def _drop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def launch(self) -> None:
        """Ask, unless an earlier life has; an answer that came early is taken with it."""
        self.is_asked = True
        host, known = self.host, self.host.journal.state.questions
        if self.identity not in known:
            self._withdraw_unasked(known)
            asked = WaitStarted(
                identity=self.identity,
                name=self.name,
                about=self._about,
                type=self._type,
                until=0 if self._timer is None else int(self._timer.when() * 1e6),
            )
            early = TakeEarly(self.identity, self.name, self._type)
            done: asyncio.Future[Any] = host.outer.create_future()
            done.add_done_callback(partial(self._was_asked, early))
            host.journal.record_soon(asked, effects=(early,), done=done)
        host.runs.check_inbox_soon()

    def _withdraw_unasked(self, known: Mapping[str, WaitStarted]) -> None:
        """Withdraw the questions of this name that changed code does not ask."""
        for identity, asked in known.items():
            is_left = asked.name == self.name and asked.what == "question"
            if is_left and identity not in self.host.open:
                self.host.journal.record_soon(WaitWithdrawn(identity=identity))

    def _was_asked(self, early: TakeEarly, done: asyncio.Future[Any]) -> None:
        if (error := done.exception()) is not None:
            self.host.journal.failed(cast("Exception", error))
        elif early.refused is not None:
            reason = f"still waits: {early.refused}"
            self.host.drop_answer(self.identity, self.name, early.by, reason)
        else:
            self.host.runs.check_inbox_soon()

    def deliver(self, outcome: Outcome) -> None:
        """End with the answer, of the type that the question has."""
        entry = outcome.entry
        if self.done() or not isinstance(entry, WaitEnded):
            return
        self._drop_timer()
        value = values.decode(self.host.journal.text(entry.answer))
        try:
            self.set_result(build(self._expected, value, "the answer") if self._type else value)
        except ShapeError as error:  # the class refuses more than its shape does
            self.set_exception(error)


class OutsideCommand(Command):
    """Work of the outer loop that is done again in each life; its end has its place in the log.

    ``run_in_executor`` and ``hive.outside`` in a workflow: only the order is recorded.
    """

    waits = False

    def __init__(
        self, host: Driver, content: str, begin: Callable[[], asyncio.Future[Any]]
    ) -> None:
        #: The work, when it has ended in this life.
        self.ended: asyncio.Future[Any] | None = None
        self._work: asyncio.Future[Any] | None = None
        super().__init__(host, host.loop.place(content))
        # In a callback of its own: tasks of the outer loop may start eagerly.
        host.outer.call_soon(self._begin, begin, context=self.context)

    def _begin(self, begin: Callable[[], asyncio.Future[Any]]) -> None:
        self._work = begin()
        self._work.add_done_callback(self._came)
        if self.done() or self.host.is_stopping:
            self._work.cancel()

    def cancel(self, msg: object = None) -> bool:
        """Cancel the call at once, and the work."""
        self.abandon()
        return super().cancel(msg)

    def abandon(self) -> None:
        """Cancel the work."""
        if self._work is not None:
            self._work.cancel()

    def launch(self) -> None:
        """Record that the work has ended, if it has."""
        if self.ended is not None and not self.host.is_recorded(self.identity):
            self.host.record(ThreadEnded(identity=self.identity))

    def _came(self, work: asyncio.Future[Any]) -> None:
        if not work.cancelled():
            work.exception()  # retrieved, whether it is delivered or not
        if not self.done():
            self.ended = work
            if self.host.is_live:
                self.launch()
            self.host.wake()

    def deliver(self, outcome: Outcome) -> None:
        """End as the work has ended in this life."""
        if self.done() or self.ended is None:
            return
        if self.ended.cancelled():
            super().cancel()
        elif (error := self.ended.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(self.ended.result())
