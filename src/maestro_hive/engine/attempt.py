"""One attempt at a task: when its body may be called, its time limit, its thread, who ended it."""

from __future__ import annotations

import asyncio
import inspect
import signal
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from traceback import walk_tb
from types import CoroutineType, FunctionType, coroutine
from typing import TYPE_CHECKING, Any, Protocol

from maestro_hive.engine.context import current_step
from maestro_hive.engine.errors import RecoverableError
from maestro_hive.kernel.process import threads
from maestro_hive.kernel.signals import interrupted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Sequence
    from concurrent.futures import Future

    from maestro_hive.engine.context import StepContext
    from maestro_hive.maestro.state.codec import Json

#: What a process is asked to stop with.
_STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
#: For how many seconds a cancellation is waited for that follows within some turns of the loop.
_STOP_SECONDS = 5.0


class Admission(Protocol):
    """What a stage let an attempt in with, until the attempt's body has ended."""

    def is_current(self) -> bool:
        """Return whether the body may be called this very moment; asked in its thread."""
        ...

    async def renew(self) -> None:
        """Return when it may be called after all."""
        ...

    def leave(self) -> None:
        """Note that the body has ended; from any thread, at any time."""
        ...

    async def withdraw(self) -> None:
        """Note that the body is not called after all, as if the attempt had never entered."""
        ...

    def outlive(self) -> Json:
        """Note that the attempt is over and its body is not; return what is recorded of that.

        None if nothing of it is held.
        """
        ...


class _NotAdmittedError(Exception):
    """The body was not called: its admission was no longer current."""


class Attempt:
    """One call of a task; a task that takes too long is left alone, and its result is refused.

    An async task is cancelled then; a thread cannot be, so its late result is dropped, and it does
    not keep the process from ending.
    """

    __slots__ = (
        *("_admissions", "_before", "_caller", "_closed", "_context", "_own", "_seconds"),
        "was_called",
    )

    def __init__(
        self, context: StepContext, seconds: float, admissions: Sequence[Admission] = ()
    ) -> None:
        self._context = context
        self._seconds = seconds
        self._admissions = admissions
        #: Whether its body was called, or is about to be; not while it waits to be admitted again.
        self.was_called = True
        self._caller = asyncio.current_task()
        self._before = self._cancellations()
        #: How often the task cancelled itself. While it is not waiting, nothing else has a turn of
        #: the loop; only a Ctrl+C in just that moment looks the same.
        self._own = 0
        #: Whether its coroutine was closed while it was waiting.
        self._closed = False

    @property
    def thread(self) -> Future[Any] | None:
        """What is done when the task's thread has ended; None if it needs none."""
        return self._context.thread

    async def run(
        self,
        task: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_async: bool,
    ) -> Any:
        """Return what the task returns."""
        context = self._context
        token = current_step.set(context)
        try:
            try:
                if self._admissions:
                    result = await self._call_when_admitted(task, args, kwargs, is_async=is_async)
                else:
                    result = await self._call(task, args, kwargs, is_async=is_async)
            except Exception:
                if interrupted and not self.was_cancelled():
                    await _let_stop_reach()
                raise
            if interrupted and not self.was_cancelled():
                await _let_stop_reach()
        except asyncio.CancelledError as error:
            context.end(error)
            if self._cancellations() > 0:
                raise
            raise RecoverableError(
                f"{context.task_name!r} waited for something that was cancelled"
            ) from error
        except BaseException as error:
            context.end(error)
            raise
        finally:
            try:  # noqa: SIM105 - on the path of every step
                current_step.reset(token)
            except ValueError:  # closed by another context
                pass
        context.end()
        return result

    def _call(
        self,
        task: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_async: bool,
    ) -> Awaitable[Any]:
        """Call the task, and return what is awaited for its result."""
        work = (
            task(*args, **kwargs) if is_async else call_in_thread(task, args, kwargs, self._context)
        )
        return self._drive(work) if type(work) is CoroutineType else self._in_time(work)

    async def _call_when_admitted(
        self,
        task: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_async: bool,
    ) -> Any:
        """Return what the task returns; too late to call it, it has to be admitted again first."""
        admitted = partial(self._call_if_admitted, task)
        while True:
            try:
                return await self._call(admitted, args, kwargs, is_async=is_async)
            except _NotAdmittedError:
                self.was_called = False
            for admission in self._admissions:
                await admission.renew()
            self.was_called = True

    def _call_if_admitted(self, task: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the task, unless too much time has passed since it was admitted."""
        for admission in self._admissions:
            if not admission.is_current():
                raise _NotAdmittedError
        return task(*args, **kwargs)

    async def _drive(self, work: CoroutineType[Any, Any, Any]) -> Any:
        """Await a coroutine; one that never waits cannot be late, and needs no timer."""
        before = self._cancellations()
        try:
            awaited = work.send(None)
        except StopIteration as done:
            return done.value
        finally:
            self._note_own(before)
        return await self._in_time(self._resume(work, awaited))

    @coroutine
    def _resume(self, work: CoroutineType[Any, Any, Any], awaited: Any) -> Generator[Any, Any, Any]:
        """Go on with a coroutine that was started by hand, passing on what it awaits."""
        try:
            while True:
                try:
                    answer = yield awaited
                except BaseException as error:  # noqa: BLE001 - whatever it is, the coroutine gets it
                    self._closed = isinstance(error, GeneratorExit)
                    before = self._cancellations()
                    try:
                        awaited = work.throw(error)
                    finally:
                        self._note_own(before)
                else:
                    before = self._cancellations()
                    try:
                        awaited = work.send(answer)
                    finally:
                        self._note_own(before)
        except StopIteration as done:
            return done.value

    async def _in_time(self, work: Awaitable[Any]) -> Any:
        deadline = asyncio.timeout(self._seconds)
        try:
            async with deadline:
                self._context.limit(deadline, self._seconds)
                result = await work
        except TimeoutError as error:
            if not deadline.expired():
                raise  # the task's own
            raise self._late() from error
        if deadline.expired():
            raise self._late()  # it refused to be cancelled
        return result

    def _late(self) -> TimeoutError:
        name = self._context.task_name
        return TimeoutError(f"{name!r} was not done within {self._seconds:g} seconds")

    # --- who ended it ---

    def was_cancelled(self) -> bool:
        """Return whether its caller was cancelled meanwhile, whatever came of it."""
        return self._cancellations() > self._before

    def was_asked_to_stop(self, error: BaseException) -> bool:
        """Return whether the attempt ended because its caller, or a signal, wanted it to."""
        if isinstance(error, GeneratorExit):
            return self._closed
        return self._cancellations() > self._own or is_from_a_signal(error)

    def _cancellations(self) -> int:
        """Return how often the task around it was cancelled, and not just what it waited for."""
        return 1 if self._caller is None else self._caller.cancelling()

    def _note_own(self, before: int) -> None:
        change = self._cancellations() - before
        if change:
            self._own = max(0, self._own + change)


async def _let_stop_reach() -> None:
    """Wait for the cancellation that follows a signal, if there was one.

    A program that the task has started may have got it, too, from a terminal or as one of a group: what
    the task made of its end is no outcome.
    """
    loop = asyncio.get_running_loop()
    if loop in interrupted:
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                await loop.create_future()


def is_from_a_signal(error: BaseException) -> bool:
    """Return whether an error was raised by the handler of a signal that asks a process to stop."""
    known = [getattr(signal, name) for name in _STOP_SIGNALS if hasattr(signal, name)]
    codes = [getattr(signal.getsignal(each), "__code__", None) for each in known]
    return any(frame.f_code in codes for frame, _ in walk_tb(error.__traceback__))


async def call_in_thread(
    task: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: StepContext | None = None,
) -> Any:
    """Call a function that may block, with this context; await what it returns, if that can be.

    The step whose ``context`` is given knows of the thread.
    """
    thread = threads.run(partial(copy_context().run, task, *args, **kwargs))
    if context is not None:
        context.thread = thread
    result = await asyncio.wrap_future(thread)
    return await result if inspect.isawaitable(result) else result


def is_async(task: Callable[..., Any]) -> bool:
    """Return whether calling a task gives a coroutine; others are called in a thread."""
    if type(task) is FunctionType:
        return bool(task.__code__.co_flags & inspect.CO_COROUTINE) or inspect.iscoroutinefunction(
            task
        )
    if isinstance(task, type):
        return False  # its __call__ is for what it makes
    called = getattr(task, "__call__", None)  # noqa: B004 - the method itself is inspected
    return inspect.iscoroutinefunction(task) or inspect.iscoroutinefunction(called)
