"""What belongs to one process: its values, its threads, and what is done at its end.

A child of ``fork`` inherits every object of its parent, with locks that a thread of the parent may
hold and with the right to files that are the parent's. So whatever is shared by the whole process
is declared here: it is made when it is first used, and made again in a forked child.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import os
import threading
import weakref
from collections import deque
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Callable, Coroutine, Iterator

    _Job: TypeAlias = tuple[Future[Any], Callable[[], Any]]
    #: A worker is known by where its jobs are put.
    _Inbox: TypeAlias = SimpleQueue[_Job]

ValueT = TypeVar("ValueT")


class PerProcess(Generic[ValueT]):
    """One value for the whole process; a forked child makes its own.

    ``inherited`` is called in the child with the parent's value, if it had one: to remember what
    must not be touched there.
    """

    __slots__ = ("__weakref__", "_inherited", "_lock", "_make", "_value")

    def __init__(
        self, make: Callable[[], ValueT], inherited: Callable[[ValueT], None] | None = None
    ) -> None:
        self._make = make
        self._inherited = inherited
        self._value: ValueT | None = None
        self._lock = threading.Lock()
        _all.add(self)

    def __call__(self) -> ValueT:
        """Return the value of this process."""
        value = self._value
        if value is None:
            with self._lock:
                value = self._value
                if value is None:
                    value = self._value = self._make()
        return value

    def reset(self) -> None:
        """Forget the value: the next caller makes another one."""
        self._lock = threading.Lock()
        value, self._value = self._value, None
        if value is not None and self._inherited is not None:
            self._inherited(value)


_all: weakref.WeakSet[PerProcess[Any]] = weakref.WeakSet()


def _reset_in_child() -> None:
    for each in list(_all):
        each.reset()


os.register_at_fork(after_in_child=_reset_in_child)


# --- the end of the process ------------------------------------------------------------------------

_exit_functions: list[tuple[int, Callable[[], None]]] = []


def run_at_exit(order: int, function: Callable[[], None]) -> None:
    """Have ``function`` called when the process exits; those of a lower order come first.

    Calls for collected objects return (-1), executions close their runs (0), then copies are
    written (1), then stores are closed (2), whichever module was imported first.
    """
    _exit_functions.append((order, function))


@atexit.register
def _run_exit_functions() -> None:
    for _, function in sorted(_exit_functions, key=lambda each: each[0]):
        function()


# --- threads for functions that block --------------------------------------------------------------


class DaemonThreads:
    """Runs functions in daemon threads, each at once, however many there are.

    A function that hangs delays no other, and not the end of the process: unlike those of a
    ``ThreadPoolExecutor``, these threads are not joined. A thread that has had nothing to do for
    ``idle_seconds`` ends. A forked child starts without any.
    """

    def __init__(self, idle_seconds: float = 10.0) -> None:
        self._idle_seconds = idle_seconds
        # Its operations are atomic, so there is no lock.
        self._idle: PerProcess[deque[_Inbox]] = PerProcess(deque)
        self._numbers = itertools.count(1)

    def run(self, function: Callable[[], ValueT]) -> Future[ValueT]:
        """Start ``function`` and return what its result, or whatever it raises, will be put into.

        In a coroutine, ``await asyncio.wrap_future(…)``. Cancelling what is returned prevents the
        start, if there is still time, and does not stop a function that has started. Callbacks of it
        run in the function's thread. Raises RuntimeError if the system allows no more threads.
        """
        future: Future[ValueT] = Future()
        try:
            inbox = self._idle().pop()  # the latest: so that the others, unused, can end
        except IndexError:
            self._start((future, function))
        else:
            inbox.put((future, function))
        return future

    def _start(self, job: _Job) -> None:
        inbox: _Inbox = SimpleQueue()
        inbox.put(job)
        name = f"maestro-task-{next(self._numbers)}"
        threading.Thread(target=self._serve, args=(inbox,), name=name, daemon=True).start()

    def _serve(self, inbox: _Inbox) -> None:
        """Run jobs until there are none; between them, keep nothing of the last one alive."""
        job: _Job | None = inbox.get()
        while job is not None:
            _do(*job)
            del job
            self._idle().append(inbox)
            job = self._next_job(inbox)

    def _next_job(self, inbox: _Inbox) -> _Job | None:
        try:
            return inbox.get(timeout=self._idle_seconds)
        except Empty:
            pass
        try:
            self._idle().remove(inbox)
        except ValueError:  # another thread has just taken it, and is about to put a job into it
            return inbox.get()
        return None


def _do(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except StopIteration as error:  # an asyncio future refuses it, and would wait for ever
        future.set_exception(_as_runtime_error(error))
    except BaseException as error:  # noqa: BLE001 - whatever it is, the caller must get it
        future.set_exception(error)
    else:
        future.set_result(result)
    finally:
        del future, function  # or the error's traceback, with this frame, would keep all three


def _as_runtime_error(error: StopIteration) -> RuntimeError:
    """Return what a generator would raise in its place."""
    substitute = RuntimeError("the function raised StopIteration")
    substitute.__cause__ = error
    return substitute


#: The ones that the whole process shares.
threads = DaemonThreads()


#: How long tasks that refuse to be cancelled hold a process that a second Ctrl+C ends.
_END_SECONDS = 1.0


def run_async(work: Coroutine[Any, Any, ValueT]) -> ValueT:
    """Do what ``asyncio.run`` does, but do not wait for calls of ``asyncio.to_thread`` that hang.

    They run in daemon threads, each at once: in the pool of a loop, a few that hang delay all
    others, and neither the loop nor the process could end before them.
    """
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    class Executor(ThreadPoolExecutor):  # an event loop takes no other kind
        def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            return threads.run(partial(function, *args, **kwargs))

    async def main() -> ValueT:
        asyncio.get_running_loop().set_default_executor(Executor(1))
        return await work

    with asyncio.Runner() as runner:
        try:
            return runner.run(main())
        except KeyboardInterrupt:
            _interrupted.add(runner.get_loop())  # before what is left is cancelled
            _end_tasks(runner.get_loop())
            raise


def _end_tasks(loop: AbstractEventLoop) -> None:
    """Cancel what is left on a loop, and wait no longer than a moment for what refuses that."""
    import asyncio
    from asyncio.tasks import _unregister_task

    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=_END_SECONDS))
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001
        _unregister_task(task)  # or closing the loop would wait for it


_interrupted: weakref.WeakSet[AbstractEventLoop] = weakref.WeakSet()


def is_interrupted(loop: AbstractEventLoop) -> bool:
    """Return whether Ctrl+C has ended what ``run_async`` runs: the rest is to end at once."""
    return loop in _interrupted


# --- the garbage collector ------------------------------------------------------------------------

#: The blocks that have turned it off: a child that is forked meanwhile turns it on again.
_without_collector: PerProcess[set[object]] = PerProcess(
    set, lambda blocks: gc.enable() if blocks else None
)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Make many objects that all stay, without looking for garbage among them again and again.

    That would take a tenth of a second each time, in which no thread goes on.
    """
    if not gc.isenabled():
        yield
        return
    block = object()
    _without_collector().add(block)
    gc.disable()
    try:
        yield
    finally:
        _without_collector().discard(block)
        gc.enable()
