"""One attempt at a task: its time limit, its thread if it needs one, and what it can ask for.

Inside a task ``current()`` gives the ``StepContext``: also in the tasks it starts, and in threads
that were given its context (``asyncio.to_thread`` does that by itself).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import signal
from contextvars import ContextVar, copy_context
from functools import partial
from traceback import walk_tb
from types import CoroutineType, FunctionType, coroutine
from typing import TYPE_CHECKING, Any, Protocol

from maestro_hive.engine import settings
from maestro_hive.engine.errors import (
    ExecutionException,
    RecoverableError,
    text_of,
)
from maestro_hive.engine.persona_memory import History, Memory
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.kernel.threads import threads

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator
    from contextlib import AbstractContextManager

#: More tokens or dollars at once are a mistake, and sums of them would have no form in JSON.
_MOST_SPENT = 10**15
#: What a process is asked to stop with.
_STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")

#: Which round of level 2 this is; level 1 gives each round its own set of attempts.
round_number: ContextVar[int] = ContextVar("round_number", default=1)

_current: ContextVar[StepContext | None] = ContextVar("current_step", default=None)


def current() -> StepContext:
    """Return the step that is being executed here."""
    found = _current.get()
    if found is None:
        raise ConfigurationError(
            "current() is for use inside a step; in a thread of your own, run the function with"
            " contextvars.copy_context().run"
        )
    return found


class StepStore(Protocol):
    """Where a step's context writes what must not be lost; durable when a method returns."""

    @property
    def effect_key(self) -> str:
        """What the step's effect is called."""
        ...

    @property
    def lock(self) -> AbstractContextManager[object]:
        """What is held while something is changed; whoever holds it may take it again."""
        ...

    def change_progress(self, changed: dict[str, Any]) -> None:
        """Change fields of a step's half-done work."""
        ...

    def change_memory(self, changed: dict[str, Any], gone: set[str]) -> dict[str, Any]:
        """Change keys of a persona's memory, and remove some; return it as ``memory`` does."""
        ...

    def add_history(self, item: Any) -> None:
        """Add to a persona's history."""
        ...

    def progress(self) -> dict[str, Any]:
        """Return what the step last saved; a copy."""
        ...

    def memory(self) -> dict[str, Any]:
        """Return the persona's memory; its values are nobody's to change."""
        ...

    def history(self) -> list[Any]:
        """Return the persona's history."""
        ...


class StepContext:
    """What a task can know and keep while it is executed; what it saves is durable at once."""

    __slots__ = (
        "_deadline",
        "_history",
        "_loop",
        "_memory",
        "_step_store",
        "_over",
        "_spend",
        "_timeout",
        "_watch",
        "attempt",
        "feedback",
        "persona_id",
        "run_id",
        "task_name",
    )

    def __init__(
        self,
        step_store: StepStore,
        spend: Callable[[int, int, float], None],
        *,
        attempt: int,
        feedback: list[str],
        persona_id: str,
        task_name: str,
        run_id: str | None,
    ) -> None:
        #: Which attempt this is, from 1; it goes on after a restart.
        self.attempt = attempt
        #: What failed before, a sentence for each attempt; made for a prompt.
        self.feedback = feedback
        self.persona_id = persona_id
        self.task_name = task_name
        self.run_id = run_id
        self._step_store = step_store
        self._spend = spend
        self._memory: Memory | None = None
        self._history: History | None = None
        self._over = False
        self._deadline: asyncio.Timeout | None = None
        self._timeout: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watch = _Watch()

    @property
    def effect_key(self) -> str:
        """The same for every attempt at this step: for the other side to notice a repetition."""
        return self._step_store.effect_key

    # --- what it saved ---

    @property
    def progress(self) -> dict[str, Any]:
        """What this step saved of its half-done work, in this attempt or an earlier one; a copy."""
        return self._step_store.progress()

    def save_progress(self, **fields: Any) -> None:
        """Keep half-done work for the next attempt; fields that are not given stay as they are."""
        with self._step_store.lock:
            self._check_not_over("save progress")
            self._step_store.change_progress(fields)

    @property
    def memory(self) -> Memory:
        """The persona's memory in this run: a dictionary, saved at every change."""
        if self._memory is None:
            with self._step_store.lock:
                if self._memory is None:
                    step_store = self._step_store
                    self._memory = Memory(step_store.memory(), self._change_memory, step_store.lock)
        return self._memory

    def _change_memory(self, changed: dict[str, Any], gone: set[str]) -> dict[str, Any]:
        with self._step_store.lock:
            self._check_not_over("change the persona's memory")
            return self._step_store.change_memory(changed, gone)

    @property
    def history(self) -> History:
        """What the persona went through in this run: a list that only grows."""
        if self._history is None:
            with self._step_store.lock:
                if self._history is None:
                    step_store = self._step_store
                    self._history = History(step_store.history, self._add_history, step_store.lock)
        return self._history

    def _add_history(self, item: Any) -> None:
        with self._step_store.lock:
            self._check_not_over("add to the persona's history")
            self._step_store.add_history(item)

    # --- what it uses ---

    def spend(self, tokens: int = 0, usd: float = 0.0) -> None:
        """Count tokens and money that were spent; also when the attempt is over already."""
        given: dict[str, object] = {"tokens": tokens, "usd": usd}
        for name, value in given.items():
            if isinstance(value, int | float) and abs(value) > _MOST_SPENT:
                raise ConfigurationError(f"spend({name}=…) is too large: {_MOST_SPENT} at most")
        settings.whole(0)("spend(tokens=…)", tokens)
        settings.number(0)("spend(usd=…)", usd)
        if tokens or usd:
            self._spend(self.attempt, tokens, float(usd))

    def heartbeat(self) -> None:
        """Say that work goes on: the time limit counts from now. Raises once it has passed."""
        self._check_not_over("go on")
        if self._deadline is None or self._timeout is None or self._loop is None:
            return
        loop, until = self._loop, self._loop.time() + self._timeout
        loop.call_soon_threadsafe(self._extend, until)

    def _extend(self, until: float) -> None:
        if self._deadline is not None and not self._over:
            with contextlib.suppress(RuntimeError):  # it has just passed
                self._deadline.reschedule(until)

    def _check_not_over(self, wish: str) -> None:
        if self._over:
            raise ExecutionException(
                f"attempt {self.attempt} of {self.task_name!r} is over, and cannot {wish} any more:"
                " it took too long, or was stopped"
            )

    # --- for whoever runs it ---

    def begin(self, deadline: asyncio.Timeout, timeout: float) -> None:
        """Be told of the time limit."""
        self._deadline, self._timeout = deadline, timeout
        self._loop = asyncio.get_running_loop()

    def end(self, error: BaseException | None = None) -> None:
        """Save what changed unnoticed inside the memory, and accept nothing more.

        An attempt that ends with an error ends with that one, whatever becomes of the memory.
        """
        try:
            if self._memory is not None and not self._over:
                self._memory.save_if_changed()
        except Exception as broken:
            if error is None:
                raise
            with contextlib.suppress(Exception):  # an error of the user's making
                note = f"its memory could not be saved: {text_of(broken)}"
                BaseException.add_note(error, note)
        finally:
            with self._step_store.lock:  # or a thread that is late could still be writing
                self._over = True
            self._deadline = None

    def was_asked_to_stop(self, error: BaseException) -> bool:
        """Return whether an attempt ended because somebody outside wanted it to."""
        if isinstance(error, GeneratorExit):
            return self._watch.closed
        return self._watch.is_cancelled() or _is_from_a_signal(error)


# --- running it ----------------------------------------------------------------------------------


async def run_attempt(
    context: StepContext,
    seconds: float,
    task: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Return what the task returns; a task that takes too long is left alone, and refused.

    An async one is cancelled; a thread cannot be, so its late result is dropped, and it does not
    keep the process from ending.
    """
    token = _current.set(context)
    try:
        result = await _result_of(context, seconds, task, args, kwargs)
    except BaseException as error:
        context.end(error)
        raise
    finally:
        with contextlib.suppress(ValueError):  # it is thrown away, by somebody in another context
            _current.reset(token)
    context.end()
    return result


async def _result_of(
    context: StepContext,
    seconds: float,
    task: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    watch = context._watch  # noqa: SLF001 - it is ours
    try:
        work = task(*args, **kwargs) if _is_async(task) else _in_thread(task, args, kwargs)
        if type(work) is not CoroutineType:
            return await _in_time(context, seconds, work)
        try:
            first = watch.send(work, None)
        except StopIteration as done:
            return done.value  # it never waited, so it cannot be late: most of a timer's cost saved
        return await _in_time(context, seconds, _go_on(watch, work, first))
    except asyncio.CancelledError as error:
        if _cancellations() > 0:
            raise
        raise RecoverableError(
            f"{context.task_name!r} waited for something that was cancelled"
        ) from error


class _Watch:
    """Tells who ended a task: itself, or somebody outside of it."""

    __slots__ = ("closed", "own")

    def __init__(self) -> None:
        #: How often it cancelled itself. While it is not waiting, nobody else has a turn of the
        #: loop; only a Ctrl+C in just that moment looks the same.
        self.own = 0
        #: Whether it was thrown away while it was waiting.
        self.closed = False

    def send(self, work: CoroutineType[Any, Any, Any], answer: Any) -> Any:
        """Let a coroutine go on to where it waits next."""
        before = _cancellations()
        try:
            return work.send(answer)
        finally:
            self._count(before)

    def throw(self, work: CoroutineType[Any, Any, Any], error: BaseException) -> Any:
        """Let a coroutine go on with an error."""
        self.closed = isinstance(error, GeneratorExit)
        before = _cancellations()
        try:
            return work.throw(error)
        finally:
            self._count(before)

    def _count(self, before: int) -> None:
        change = _cancellations() - before
        if change:
            self.own = max(0, self.own + change)

    def is_cancelled(self) -> bool:
        """Return whether somebody else cancelled it."""
        return _cancellations() > self.own


def _is_from_a_signal(error: BaseException) -> bool:
    """Return whether an error was raised by the handler of a signal that asks a process to stop."""
    known = [getattr(signal, name) for name in _STOP_SIGNALS if hasattr(signal, name)]
    codes = [getattr(signal.getsignal(each), "__code__", None) for each in known]
    return any(frame.f_code in codes for frame, _ in walk_tb(error.__traceback__))


async def _in_time(context: StepContext, seconds: float, work: Awaitable[Any]) -> Any:
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            context.begin(deadline, seconds)
            result = await work
    except TimeoutError as error:
        if not deadline.expired():
            raise  # the task's own
        raise _late(context, seconds) from error
    if deadline.expired():
        raise _late(context, seconds)  # it would not be cancelled
    return result


@coroutine
def _go_on(
    watch: _Watch, work: CoroutineType[Any, Any, Any], waits_for: Any
) -> Generator[Any, Any, Any]:
    """Go on with a coroutine that was begun by hand, handing on what it waits for."""
    try:
        while True:
            try:
                answer = yield waits_for
            except BaseException as error:  # noqa: BLE001 - whatever it is, the coroutine gets it
                waits_for = watch.throw(work, error)
            else:
                waits_for = watch.send(work, answer)
    except StopIteration as done:
        return done.value


def _late(context: StepContext, seconds: float) -> TimeoutError:
    return TimeoutError(f"{context.task_name!r} was not done within {seconds:g} seconds")


def _cancellations() -> int:
    """Return how often this task was cancelled, and not just what it waited for."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # it is thrown away after the end of its loop
        task = None
    return 1 if task is None else task.cancelling()


async def _in_thread(
    task: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    call = partial(copy_context().run, task, *args, **kwargs)
    result = await asyncio.wrap_future(threads.run(call))
    return await result if inspect.isawaitable(result) else result


def _is_async(task: Callable[..., Any]) -> bool:
    if type(task) is FunctionType:
        return bool(task.__code__.co_flags & inspect.CO_COROUTINE) or inspect.iscoroutinefunction(
            task
        )
    if isinstance(task, type):
        return False  # its __call__ is for what it makes
    called = getattr(task, "__call__", None)  # noqa: B004 - the method itself is looked at
    return inspect.iscoroutinefunction(task) or inspect.iscoroutinefunction(called)
