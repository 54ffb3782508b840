"""Durable waits of a workflow: a sleep, a question to a person, a timeout; and recorded values."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from maestro_hive.engine import settings
from maestro_hive.hive import answer_types, runs
from maestro_hive.hive.answer_types import ShapeError
from maestro_hive.hive.answers import fitted
from maestro_hive.hive.branches import (
    Operation,
    active_run,
    current_branch,
    detached_task,
)
from maestro_hive.hive.inbox import changed_messages
from maestro_hive.kernel.clock import Wait
from maestro_hive.kernel.errors import MaestroError
from maestro_hive.kernel.logs import get_log
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.projections import facts_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    from maestro_hive.hive.active_run import ActiveRun
    from maestro_hive.hive.history import History, Slot
    from maestro_hive.hive.inbox import Answer, Inbox, Messages
    from maestro_hive.maestro.state.codec import Encoded, Json
    from maestro_hive.maestro.state.records import Entry, NewEntry
    from maestro_hive.maestro.state.store import DocumentChange

ResultT = TypeVar("ResultT")

logger = get_log(__name__)

#: How often it is checked whether an answer that is being recorded has been.
_CHECK_SECONDS = 0.01


async def sleep(seconds: float) -> None:
    """Return after so many seconds, counted since the first start of the wait."""
    run = active_run("hive.sleep()")
    given: object = seconds
    is_over = isinstance(given, int | float) and given < 0  # as in sleep(deadline - now)
    length = float(settings.number(0)("the seconds to sleep", 0 if is_over else given))
    operation = Operation(run)
    try:
        await operation.find(runs.identity_of("sleep", repr(length)))
        if await _ended(operation) is None:
            await operation.may_execute("sleep")
            wait = await _started(operation, runs.SLEEP, length)
            with run.waiting(operation, wait):
                await _unless_cancelled(operation, "sleep", wait.finished(run.run.store.clock))
            await _record(run, runs.wait_ended(operation.identity, "sleep", "over"), sync=False)
        await _turn(operation)
    finally:
        operation.close()


async def _ended(operation: Operation) -> Entry | None:
    """Return the recorded end of a wait; None if it has none, or is no longer cancelled."""
    state = operation.run.run.state
    ended = state.answers.get(operation.identity)
    if ended is not None and facts_of(ended).get("how") == "cancelled":
        await operation.cancelled_again(ended, state.waits.get(operation.identity))
        return None
    return ended


async def _started(operation: Operation, what: str, seconds: float) -> Wait:
    """Return a wait as it was recorded, or record it; again, if it had ended."""
    run = operation.run.run
    started = run.state.waits.get(operation.identity)
    if started is None:
        wait = Wait.start(run.store.clock, seconds)
    else:
        wait = Wait.from_json(facts_of(started)["wait"])
        if operation.identity not in run.state.answers:
            return wait
    entry = runs.wait_started(operation.identity, what, what, wait=wait.to_json())
    await _record(operation.run, entry, sync=what == runs.SLEEP)
    return wait


async def _turn(operation: Operation) -> None:
    """Return when it is the turn of the end of a wait."""
    ended = operation.run.run.state.answers[operation.identity]
    await operation.turn(ended, ended.sha256 or ended.facts)


async def _unless_cancelled(operation: Operation, name: str, wait: Awaitable[None]) -> None:
    """Await a wait; if the workflow cancels it, that is its recorded end."""
    run, identity = operation.run, operation.identity
    try:
        await wait
    except asyncio.CancelledError:
        answers = run.run.state.answers
        if identity not in answers:
            cancelled = runs.wait_ended(identity, name, "cancelled")
            await operation.record_cancelled(cancelled, partial(answers.get, identity))
        else:
            await operation.end_cancelled(answers[identity])
        raise


async def _record(
    run: ActiveRun, entry: NewEntry, *, sync: bool = True, change: DocumentChange | None = None
) -> None:
    """Record an entry of a wait; if that fails, the run is suspended."""
    with run.suspended_by_failure:
        await run.record(entry, sync=sync, change=change)


# --- questions ----------------------------------------------------------------------------------


class Asking(Protocol):
    """What asks a question: an operation of the workflow, or a step that needs approval."""

    @property
    def run(self) -> ActiveRun:
        """The run that asks."""
        ...

    @property
    def identity(self) -> bytes:
        """The identity of the question."""
        ...

    def reserve(self, outcome: Entry) -> None:
        """Take the place of the answer in the order of outcomes."""
        ...


async def wait_for(
    name: str, within: float | None, expected: Any, about: Any = None, *, key: str | None = None
) -> Any:
    """Return the answer to a question; raise TimeoutError if it does not come in time.

    A question belongs to its branch and to what that recorded before: if either changed, or what it
    is about, it is another one. One with a ``key`` belongs to that alone.
    """
    run = active_run("hive.wait_for()")
    question: object = name
    if not isinstance(question, str) or not question:
        raise settings.refused("the name of the question", name, "a text that is not empty")
    shape = answer_types.shape_of(expected)
    limit = None if within is None else settings.number(0)("the timeout", within)
    subject = None if about is None else codec.encode(about, "about")
    operation = Operation(run)
    try:
        if key is None:
            seen = operation.branch.recorded() + (subject.sha256 if subject is not None else b"")
            identity = operation.place(runs.identity_of("wait", name), seen)
        else:
            by_key = runs.identity_of("wait", name, key)
            identity = operation.place_by_key(runs.identity_of("wait", name), by_key)
        run.replay.claim(identity)
        ended = await _ended(operation)
        if ended is None or not _still_fits(run, ended, shape):
            await operation.wait_for_replay()
            wait = await ask(run, identity, name, limit, shape, subject)
            await _unless_cancelled(operation, name, answered(operation, name, wait))
        await _turn(operation)
        ended = run.run.state.answers[identity]
        if facts_of(ended).get("how") == "timeout":
            raise TimeoutError(f"there was no answer to {name!r} of run {run.run_id!r} in time")
        return answer_types.build(expected, value_of_answer(run, ended))
    finally:
        operation.close()


def value_of_answer(run: ActiveRun, ended: Entry) -> Any:
    """Return the recorded answer."""
    data = run.run.store.load(ended)
    return None if data is None else codec.decode(data, "the answer")


def _still_fits(run: ActiveRun, ended: Entry, shape: Json) -> bool:
    """Return whether a recorded answer has the shape that the workflow, as it is now, requires."""
    timed_out = facts_of(ended).get("how") == "timeout"
    return timed_out or answer_types.fits(shape, value_of_answer(run, ended))


async def ask(
    run: ActiveRun,
    identity: bytes,
    name: str,
    limit: float | None,
    shape: Any,
    about: Encoded | None,
    **facts: Json,
) -> Wait | None:
    """Record the question, unless it is recorded; return the time limit."""
    started = run.run.state.waits.get(identity)
    wait = None if limit is None else Wait.start(run.run.store.clock, float(limit))
    if started is not None and identity in run.run.state.questions:
        recorded = facts_of(started).get("wait")
        wait = None if recorded is None else Wait.from_json(recorded)
        if facts_of(started).get("shape") == shape:
            return wait
    for other, entry in list(run.run.state.questions.items()):
        # One of this name that changed code no longer asks: its answer would not reach this one.
        is_old = other != identity and entry.seq <= run.resumed_at
        if is_old and facts_of(entry).get("name") == name and not run.replay.is_claimed(other):
            await _record(run, runs.wait_ended(other, name, "withdrawn"), sync=False)
    limit_facts = None if wait is None else wait.to_json()
    asked = runs.wait_started(
        identity, name, runs.ANSWER, about, wait=limit_facts, shape=shape, **facts
    )
    early = EarlyAnswer(identity, name, shape)
    await _record(run, asked, change=changed_messages(run.run_id, early.bind))
    if early.refused is not None:
        logger.warning("run %s still waits: %s", run.run_id, early.refused)
    return wait


class EarlyAnswer:
    """The answer that came before a question: asking makes it the answer to this one."""

    def __init__(self, identity: bytes, name: str, shape: Json) -> None:
        self._identity = identity
        self._name = name
        self._shape = shape
        #: Why it is dropped; None if it is not, or there is none.
        self.refused: ShapeError | None = None

    def bind(self, messages: Messages) -> None:
        """Name the question in the message, or drop it if it does not fit."""
        self.refused = None
        given = messages.early(self._name)
        if given is None or messages.to(self._identity) is not None:
            return
        messages.remove(given)
        try:
            made = fitted(given, self._shape)
        except ShapeError as error:
            self.refused = error
        else:
            messages.answers.append(replace(made, question=self._identity.hex()))


async def answered(operation: Asking, name: str, wait: Wait | None) -> None:
    """Return when the wait has ended; an answer is recorded when it is delivered."""
    run, identity = operation.run, operation.identity
    arrived = run.listen(identity, operation.reserve)
    timer = asyncio.create_task(wait.finished(run.run.store.clock)) if wait is not None else None
    run.check_inbox()
    try:
        waited = {arrived, timer} if timer else {arrived}
        with run.waiting(operation, wait):
            await asyncio.wait(waited, return_when="FIRST_COMPLETED")
        while not arrived.done():
            if await _timed_out(run, identity, name):
                operation.reserve(run.run.state.answers[identity])
                break
            await asyncio.wait({arrived}, timeout=_CHECK_SECONDS)  # an answer is being recorded
        else:
            prevented = arrived.exception()  # why it could not be recorded
            if isinstance(prevented, Exception):
                raise run.suspended(prevented) from prevented
    finally:
        run.stop_listening(identity)
        if timer is not None:
            timer.cancel()


class _AnswerWaitsError(MaestroError):
    """The answer to a question came in time, and is in the inbox: its time is not over."""


async def _timed_out(run: ActiveRun, identity: bytes, name: str) -> bool:
    """Record that a question's time is over; False if it has an answer, or gets one just now."""
    if not run.claim(identity):
        return False

    def check(messages: Messages) -> None:
        if messages.to(identity) is not None:
            raise _AnswerWaitsError(f"the answer to {name!r} came in time")

    with run.suspended_by_failure:
        try:
            ended = runs.wait_ended(identity, name, "timeout")
            await run.record(ended, change=changed_messages(run.run_id, check))
        except _AnswerWaitsError:
            run.give_up_claim(identity)
            run.check_inbox()
            return False
    return True


# --- timeouts -----------------------------------------------------------------------------------


class DurableTimeout:
    """What ``async with hive.timeout(seconds)`` gives; the time before a restart counts."""

    def __init__(self, seconds: float) -> None:
        self._seconds = float(settings.number(0)("the timeout", seconds))
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.Task[None] | None = None
        self._slot: Slot | None = None
        self._history: History | None = None
        self._run: ActiveRun | None = None

    async def __aenter__(self) -> None:
        run = active_run("hive.timeout()")
        operation = Operation(run)
        try:
            await operation.find(runs.identity_of("timeout", repr(self._seconds)))
            self._history = operation.history
            ended = run.run.state.answers.get(operation.identity)
            if ended is None:
                wait = await _started(operation, runs.TIMEOUT, self._seconds)
                if run.resumed_at and not wait.remaining(run.run.store.clock):
                    # Before anything is called in its time that was over already.
                    await self._record_expired(operation)
                    ended = run.run.state.answers[operation.identity]
                else:
                    loop = asyncio.get_running_loop()
                    self._run = run
                    run.timers[self] = wait
                    self._timer = detached_task(loop, self._expire_in_time(operation, wait))
        finally:
            operation.close()
        await self._timeout.__aenter__()
        if ended is not None:
            self._reach(ended)  # which may be at once, where there is no order

    async def _expire_in_time(self, operation: Operation, wait: Wait) -> None:
        """Record that the time is over, and have the workflow get that in its turn."""
        run, identity = operation.run, operation.identity
        await operation.wait_for_replay()
        await wait.finished(run.run.store.clock)
        try:
            await self._record_expired(operation)
        except MaestroError as error:
            run.stop(error)
        else:
            self._reach(run.run.state.answers[identity])

    async def _record_expired(self, operation: Operation) -> None:
        ended = runs.wait_ended(operation.identity, runs.TIMEOUT, "timeout")
        await operation.run.record(ended)

    def _reach(self, ended: Entry) -> None:
        if self._history is None:
            self._expire()
        else:
            self._slot = self._history.reserve(ended)
            self._history.set_ready(self._slot, self._expire)

    def _expire(self) -> None:
        self._slot = None
        self._timeout.reschedule(asyncio.get_running_loop().time())

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._run is not None:
            self._run.timers.pop(self, None)
        if self._slot is not None and self._history is not None:
            self._history.drop(self._slot)
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as late:
            if self._run is not None and self._run.is_stopping:  # what it waited for has not ended
                raise asyncio.CancelledError(f"run {self._run.run_id!r} is being stopped") from None
            text = f"the block was not done within {self._seconds:g} seconds (hive.timeout)"
            raise TimeoutError(text) from late.__cause__


# --- the clock and the dice ---------------------------------------------------------------------


def recorded_value(name: str, make: Callable[[ActiveRun], ResultT]) -> ResultT:
    """Return a value that a resumed workflow gets again, though it would be another one now."""
    run = active_run(f"hive.{name}()")
    run.check_active()
    # No operation: there may be no task here, as in a callback and in the thread of a step.
    branch = current_branch() or run.detached
    identity = branch.place(runs.identity_of("value", name))
    recorded = run.run.state.values.get(identity)
    if recorded is None:
        others = run.context.substitutes
        made = make(run) if others is None else others.value(name, run.run_id, identity)
        encoded = codec.encode(made, name)
        with run.suspended_by_failure:
            run.run.append([runs.value_recorded(identity, name, encoded)], sync=False)
        recorded = run.run.state.values[identity]
    branch.note(identity, recorded.sha256)
    value: ResultT = codec.decode(run.run.store.load(recorded) or b"null", name)
    return value


# --- delivering answers -------------------------------------------------------------------------


async def deliver(run: ActiveRun, inbox: Inbox, answers: list[Answer]) -> None:
    """Record the answers that a run waits for, each with the removal of its message."""
    for answer in answers:
        identity = _question_of(run, answer)
        if identity is not None and run.claim(identity):
            await _record_answer(run, inbox, identity, answer)
        elif _is_too_late(run, answer):
            inbox.remove(run.run_id, answer)
        # Otherwise its question may come later, or is just being answered.


async def _record_answer(run: ActiveRun, inbox: Inbox, identity: bytes, answer: Answer) -> None:
    """Record an answer, and only then return it to the workflow."""
    try:
        given = fitted(answer, facts_of(run.run.state.waits[identity]).get("shape"))
        value = codec.encoded(codec.dump(given.value))
        facts = {"answer": answer.id, "by": answer.by}
        ended = runs.wait_ended(identity, answer.name, "answered", value, **facts)
        taken = changed_messages(run.run_id, lambda messages: messages.remove(answer))
        await run.record(ended, change=taken)
    except ShapeError as error:  # its question is asked in another way by now
        logger.warning("run %s still waits: %s", run.run_id, error)
        run.give_up_claim(identity)
        inbox.remove(run.run_id, answer)
    except BaseException:
        run.give_up_claim(identity)
        raise
    else:
        run.reserve(identity)
        run.notify(identity)


def _question_of(run: ActiveRun, answer: Answer) -> bytes | None:
    """Return the identity of the open question that a message answers."""
    # A copy: a thread that records something of the run takes questions of other threads into account.
    for identity, question in list(run.run.state.questions.items()):
        matches = answer.question in (None, identity.hex())
        if matches and facts_of(question).get("name") == answer.name and run.listens(identity):
            return identity
    return None


def _is_too_late(run: ActiveRun, answer: Answer) -> bool:
    """Return whether a message's question has ended without it: it was cancelled, or withdrawn."""
    if answer.question is None:
        return False
    ended = run.run.state.answers.get(bytes.fromhex(answer.question))
    if ended is not None and facts_of(ended).get("answer") != answer.id:
        how = facts_of(ended).get("how")
        text = "run %s: the answer to %r was not taken: its question is over (%s)"
        logger.warning(text, run.run_id, answer.name, how)
    return ended is not None
