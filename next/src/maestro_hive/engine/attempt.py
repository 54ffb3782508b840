"""One attempt at a step: what the path and its stages know of it, and the call of the body."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from maestro_hive.engine.context import StepContext
from maestro_hive.engine.errors import RecoverableError
from maestro_hive.journal import values
from maestro_hive.kernel.errors import OutsideRunError
from maestro_hive.kernel.process import threads

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from maestro_hive.engine.errors import HelpNeeded
    from maestro_hive.engine.plan import Plan, StepDefinition
    from maestro_hive.engine.retry_policy import Decision
    from maestro_hive.journal.effects import Effect
    from maestro_hive.journal.entries import Entry
    from maestro_hive.journal.recorder import RunJournal
    from maestro_hive.journal.state import StepState
    from maestro_hive.journal.values import Encoded
    from maestro_hive.kernel.errors import RefusedError

_current: contextvars.ContextVar[Attempt | None] = contextvars.ContextVar("attempt", default=None)


class Stage:
    """A condition of admission; its claims are part of the transaction of an attempt's entry."""

    def enter(self, attempt: Attempt) -> Sequence[Effect]:
        """Return what the start of an attempt claims; raise if it is not admitted."""
        return ()

    def leave(self, attempt: Attempt) -> Sequence[Effect]:
        """Return what the outcome of an attempt changes: ``error``, ``decision``, ``tokens``."""
        return ()

    def stopped(self, attempt: Attempt) -> Sequence[Effect]:
        """Return what the end of an attempt without an outcome changes."""
        return self.leave(attempt)

    async def refused(self, attempt: Attempt, refusal: RefusedError) -> None:
        """Wait until it is worth claiming again, after a refusal; raise if it never is."""

    async def on_failure(self, attempt: Attempt) -> Sequence[Entry]:
        """Return entries for the commit of a failure.

        A stage may replace ``attempt.decision``, add to ``attempt.feedback``, and, so that the step
        waits for a person instead of ending, set ``attempt.held``.
        """
        return ()


class StepStages(Protocol):
    """Finds the stages of steps."""

    def of(self, definition: StepDefinition) -> Sequence[Stage]:
        """Return the stages of a step, in the order of their admission."""
        ...


class Attempt:
    """One attempt at a step."""

    def __init__(
        self, plan: Plan, journal: RunJournal, stages: StepStages, step: StepState
    ) -> None:
        self.plan, self.journal, self.stages = plan, journal, stages
        #: The number of its step, and its own, after all that failed, stopped or were interrupted.
        self.step, self.number, self.round = step.number, step.starts + 1, step.round
        #: What its body spent; money in millionths of a US dollar.
        self.tokens = self.micros = 0
        self.error: Exception | None = None
        #: What follows its failure.
        self.decision: Decision | None = None
        #: Whether its breaker counts its failure.
        self.is_remote_fault = False
        #: What the next attempt is told about its failure.
        self.feedback = ""
        #: Raised instead of ending the step, which then waits for a person.
        self.held: HelpNeeded | None = None
        #: Whether it ended after its workflow had cancelled it.
        self.despite = False
        #: Whether its body has ended, or is not waited for any more.
        self.is_over = False
        #: How many steps of each content its body called.
        self.counts: dict[str, int] = {}
        self.context: StepContext | None = None
        self.deadline: asyncio.Timeout | None = None
        #: The body's thread; it goes on after a timeout.
        self.thread: Future[Any] | None = None
        self.loop, self.thread_id = asyncio.get_running_loop(), threading.get_ident()

    @property
    def label(self) -> str:
        """Return the name of its step, with ``#2`` for the second one of that name."""
        step = self.journal.state.steps.get(self.step)
        return (step.label if step is not None else "") or self.plan.definition.name

    @property
    def hold(self) -> int:
        """Return what its claims on accounts are stored under."""
        return self.step << 20 | self.number

    @property
    def ends_round(self) -> bool:
        """Return whether its failure is the last one of its round."""
        return self.decision is not None and self.decision.round != self.round


def current() -> StepContext:
    """Return the context of the step whose body calls this."""
    attempt = _current.get()
    if attempt is None:
        raise OutsideRunError(
            "current() is for the body of a step; in a thread of your own, run the function with"
            " contextvars.copy_context().run"
        )
    if attempt.context is None:
        attempt.context = StepContext(attempt)
    return attempt.context


def find_current() -> Attempt | None:
    """Return the attempt whose body calls this, if any."""
    return _current.get()


def leave_attempt() -> None:
    """Forget the attempt in this context: a workflow that a body starts is no part of it."""
    _current.set(None)


def restart_stream(attempt: Attempt) -> None:
    """Say in the step's stream that it starts over, if an earlier attempt has written."""
    plan, journal = attempt.plan, attempt.journal
    is_retried = plan.identity in journal.state.retried  # its number is another one
    if (attempt.number > 1 or is_retried) and plan.definition.store_streams:
        step = 0 if is_retried else attempt.step
        journal.recorder.store.restart_stream(journal.lease, step, attempt.step, attempt.number)


async def call_body(attempt: Attempt) -> Encoded:
    """Call the body with arguments of its own, and return its checked and encoded result."""
    plan = attempt.plan
    definition = plan.definition
    token = _current.set(attempt)
    try:
        args, kwargs = plan.arguments()
        async with asyncio.timeout(definition.timeout) as attempt.deadline:
            if definition.is_async:
                result = await definition.body(*args, **kwargs)
            else:
                call = partial(contextvars.copy_context().run, definition.body, *args, **kwargs)
                attempt.thread = threads.run(call)
                result = await asyncio.wrap_future(attempt.thread)
                if inspect.isawaitable(result):
                    result = await result
        if attempt.deadline.expired():  # the body refused to be cancelled
            raise TimeoutError  # noqa: TRY301 - as if it had been
        definition.check(result)
        return values.encode(result, f"{definition.name}: result")
    except TimeoutError as error:
        if attempt.deadline is None or not attempt.deadline.expired():
            raise
        raise TimeoutError(
            f"{definition.name!r} was not done within {definition.timeout:g} seconds"
        ) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RecoverableError(
            f"{definition.name!r} waited for something that was cancelled"
        ) from error
    finally:
        _current.reset(token)
