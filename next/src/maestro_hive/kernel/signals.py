"""SIGINT, SIGTERM and SIGHUP as a graceful stop: the task is cancelled, and can record its state.

The handlers are ordinary ones, not those of the loop (``loop.add_signal_handler``): they run even
while a coroutine blocks the loop, so the second signal always reaches the previous handlers; and
restoring them loses no handler that the program itself has given to the loop. Python runs them
between two instructions of the main thread, which may be about to wait, or wait while another
thread received the signal: so each signal also writes a byte, which wakes the loop
(``signal.set_wakeup_fd``).
"""

from __future__ import annotations

import asyncio
import functools
import signal
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

from maestro_hive.kernel.process import PerProcess

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from types import FrameType, TracebackType

_Handler: TypeAlias = "Callable[[int, FrameType | None], Any] | int | signal.Handlers | None"

ResultT = TypeVar("ResultT")

#: The loops whose tasks will be cancelled by a signal. A terminal sends it to all processes that it
#: shows, so the processes that a task has started may have ended by it, too.
interrupted: set[asyncio.AbstractEventLoop] = set()

_POLITE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

#: Awaited between the first signal and the cancellation: returns when the running work has ended.
Grace: TypeAlias = "Callable[[], Coroutine[Any, Any, object]]"


async def until_signal(
    work: Awaitable[ResultT], message: str, grace: Grace | None = None
) -> ResultT:
    """Return the result of ``work``; the first signal cancels it, and then ends the program.

    It ends as it would without this: by a KeyboardInterrupt, which has the message, or with the
    code of the signal. With ``grace``, which is awaited first, work that ends meanwhile is not
    cancelled.
    """
    stop = PoliteStop(grace)
    try:
        async with stop:
            return await work
    except asyncio.CancelledError:
        if stop.signal is None:
            raise
    if stop.signal is signal.SIGINT:
        raise KeyboardInterrupt(message)
    raise SystemExit(128 + stop.signal)


class PoliteStop:
    """Cancels the current task at the first SIGINT, SIGTERM or SIGHUP while the body runs.

    With ``grace``, when that has been awaited. Without, a step that ends between the signal and
    the cancellation has no outcome: the processes that it started may have received the signal,
    too. The second signal does what it did before, so that a program that is stuck can still be
    stopped. A signal that is ignored stays ignored. In another thread than the main one, this does
    nothing.

        try:
            async with PoliteStop() as stop:
                await work()
        except asyncio.CancelledError:
            if stop.signal is None:
                raise
            sys.exit(128 + stop.signal)

    ``signal`` is the one that came, if any.
    """

    def __init__(self, grace: Grace | None = None) -> None:
        self.signal: signal.Signals | None = None
        self._is_cancelled = False
        self._grace = grace
        self._waiting: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self.loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            _handlers().add(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _handlers().remove(self)
        interrupted.discard(self.loop)
        is_late = self.signal is not None and not self._is_cancelled and self._grace is None
        self._is_cancelled = True
        if self._waiting is not None:
            self._waiting.cancel()
        if is_late and error is None:  # it came after the body's last await
            self._task.cancel()
            await asyncio.sleep(0)

    def stop(self, number: int) -> None:
        """Cancel the task, at the first signal."""
        if self.signal is None:
            self.signal = signal.Signals(number)
            if self._grace is None:
                interrupted.add(self.loop)
            with suppress(RuntimeError):  # a closed loop runs no task
                self.loop.call_soon_threadsafe(self._begin)  # it wakes the loop, too

    def _begin(self) -> None:
        if self._grace is None:
            self._cancel()
        elif not self._is_cancelled:
            self._waiting = self.loop.create_task(self._cancel_after(self._grace))

    async def _cancel_after(self, grace: Grace) -> None:
        try:
            await grace()
        finally:
            self._cancel()

    def _cancel(self) -> None:
        if not self._is_cancelled:
            self._is_cancelled = True
            self._task.cancel()


class _Handlers:
    """The signal handlers of this process, shared by all bodies that run.

    Bodies end in any order, so none of them can hold the handlers that were there before it.
    """

    def __init__(self) -> None:
        self._bodies: list[PoliteStop] = []
        self._before: dict[signal.Signals, _Handler] = {}
        self._installed: dict[signal.Signals, _Handler] = {}
        self._wakeup: _Wakeup | None = None

    def add(self, body: PoliteStop) -> None:
        """Send signals to a body."""
        self._bodies.append(body)  # first: whatever handler is in place, a signal reaches it
        if not self._before:  # no body has our handlers, nor received a signal already
            self._install_ours()
        if self._wakeup is None:
            self._wakeup = _wakeup_of(body.loop)

    def remove(self, body: PoliteStop) -> None:
        """Send signals to a body no more; the last one restores the handlers of before."""
        if self._bodies == [body]:
            self.restore()
        if body in self._bodies:
            self._bodies.remove(body)

    def _install_ours(self) -> None:
        for number in _POLITE:
            handler = signal.getsignal(number)
            if handler is None or handler == signal.SIG_IGN:  # None: set by C, not restorable
                continue
            self._before[number] = handler
            self._install(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        for each, handler in list(self._before.items()):
            self._install(each, signal.default_int_handler if _is_asyncios(handler) else handler)
        for body in self._bodies:
            body.stop(number)

    def _install(self, number: signal.Signals, handler: _Handler) -> None:
        self._installed[number] = handler
        with suppress(ValueError):  # another interpreter than the main one may not, and need not
            signal.signal(number, handler)

    def restore(self) -> None:
        """Restore the handlers of before, except where a body has set one of its own."""
        if self._wakeup is not None:
            self._wakeup.close()
            self._wakeup = None
        self._restore_handlers()

    def restore_in_child(self) -> None:
        """Restore the handlers of before in a forked child."""
        if self._wakeup is not None:
            self._wakeup.close_inherited()
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            if signal.getsignal(number) == self._installed[number]:
                self._install(number, handler)


class _Wakeup:
    """A pair of sockets: each signal writes a byte into one, the loop reads it from the other."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        loop.add_reader(self._reader, self._read)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def _read(self) -> None:
        with suppress(BlockingIOError):
            self._reader.recv(4096)

    def close(self) -> None:
        """Stop signals from writing."""
        if not self._loop.is_closed():
            self._loop.remove_reader(self._reader)
        self.close_inherited()

    def close_inherited(self) -> None:
        """Close it in a forked child, which leaves the loop alone: its files are the parent's."""
        with suppress(ValueError):  # in another interpreter than the main one
            current = signal.set_wakeup_fd(-1)
            if current != self._writer.fileno():  # the body has set one of its own
                signal.set_wakeup_fd(current)
        self._reader.close()
        self._writer.close()


def _wakeup_of(loop: asyncio.AbstractEventLoop) -> _Wakeup | None:
    """Make signals wake the loop; None if they do already, or cannot."""
    try:
        current = signal.set_wakeup_fd(-1)
    except ValueError:  # another interpreter than the main one
        return None
    if current == -1:
        return _Wakeup(loop)
    # By a handler that the program has given to the loop, or by uvloop.
    signal.set_wakeup_fd(current)
    return None


def _is_asyncios(handler: _Handler) -> bool:
    """Return whether a handler is that of ``asyncio.run``, whose first signal cancels the task."""
    function = handler.func if isinstance(handler, functools.partial) else handler
    return isinstance(getattr(function, "__self__", None), asyncio.Runner)


#: A forked child has no loop to stop: it ends at SIGTERM, as it would without us.
_handlers = PerProcess(_Handlers, inherited=_Handlers.restore_in_child)
