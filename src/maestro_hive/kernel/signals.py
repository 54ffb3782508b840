"""Ctrl+C and SIGTERM as a polite request: the task is cancelled, and can still write things down.

The handlers are ordinary ones, not those of the loop (``loop.add_signal_handler``): they run even
while a coroutine blocks the loop, so the second signal always finds the handlers of before; and
taking them back loses no handler that the program itself has given to the loop.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType

_Handler: TypeAlias = "Callable[[int, FrameType | None], Any] | int | signal.Handlers | None"

_POLITE = (signal.SIGINT, signal.SIGTERM)


def stop_politely() -> PoliteStop:
    """While its body runs, let the first SIGINT or SIGTERM cancel the current task.

    The second one does what it would have done before, so that a program that is stuck can still
    be stopped. A signal that is ignored stays ignored. In another thread than the main one, this
    does nothing.

        try:
            async with stop_politely() as stop:
                await work()
        except asyncio.CancelledError:
            if stop.signal is None:
                raise
            sys.exit(128 + stop.signal)
    """
    return PoliteStop()


class PoliteStop:
    """What ``async with stop_politely()`` gives: ``signal`` is the one that came, if any."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._is_told = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            _bodies.append(self)  # first of all: whatever handler is in place, somebody hears it
            _take_signals()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if _bodies == [self]:
            _give_signals_back()
        if self in _bodies:
            _bodies.remove(self)
        is_late = self.signal is not None and not self._is_told
        self._is_told = True
        if is_late and error is None:  # it came after the body's last await
            self._task.cancel()
            await asyncio.sleep(0)

    def _stop(self, number: int) -> None:
        if self.signal is None:
            self.signal = signal.Signals(number)
            with suppress(RuntimeError):  # a loop that was closed over its tasks stops nothing
                self._loop.call_soon_threadsafe(self._cancel)  # which wakes it, too

    def _cancel(self) -> None:
        if not self._is_told:
            self._is_told = True
            self._task.cancel()


# --- the handlers, shared by all bodies under way ----------------------------------------------
# Bodies end in any order, so none of them can keep the handlers that were there before it.

_bodies: list[PoliteStop] = []
_before: dict[signal.Signals, _Handler] = {}
_installed: dict[signal.Signals, _Handler] = {}


def _take_signals() -> None:
    """Install our handlers, unless a body has them already, or has already been told to stop."""
    if _before:
        return
    for number in _POLITE:
        handler = signal.getsignal(number)
        if handler is None or handler == signal.SIG_IGN:  # None: set by C, could not be put back
            continue
        _before[number] = handler
        _install(number, _on_signal)


def _on_signal(number: int, _frame: FrameType | None) -> None:
    for each, handler in list(_before.items()):
        _install(each, signal.default_int_handler if _is_asyncios(handler) else handler)
    for body in _bodies:
        body._stop(number)  # noqa: SLF001 - the same module


def _is_asyncios(handler: _Handler) -> bool:
    """Return whether it is the one of ``asyncio.run``, which is polite itself at its first signal."""
    function = handler.func if isinstance(handler, functools.partial) else handler
    return isinstance(getattr(function, "__self__", None), asyncio.Runner)


def _install(number: signal.Signals, handler: _Handler) -> None:
    _installed[number] = handler
    with suppress(ValueError):  # another interpreter than the main one may not, and need not
        signal.signal(number, handler)


def _give_signals_back() -> None:
    """Put back what was there before, except where the body has put something of its own."""
    while _before:
        number, handler = _before.popitem()
        if signal.getsignal(number) == _installed[number]:
            _install(number, handler)


def _forget_bodies_in_child() -> None:
    """Let a forked child end at SIGTERM, as it would have done before; it has no loop to stop."""
    _give_signals_back()
    _bodies.clear()


os.register_at_fork(after_in_child=_forget_bodies_in_child)
