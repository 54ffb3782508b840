"""Values, threads and exit functions of one process.

A child of ``fork`` inherits every object of its parent, with locks that a thread of the parent may
hold and with the right to files that are the parent's. So whatever is shared by the whole process
is declared with the classes of this module: it is made when it is first used, and made again in a
forked child.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import weakref
from collections import deque
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    _Job: TypeAlias = tuple[Future[Any], Callable[[], Any]]
    #: A worker is known by where its jobs are put.
    _Inbox: TypeAlias = SimpleQueue[_Job]

ValueT = TypeVar("ValueT")


class PerProcess(Generic[ValueT]):
    """One value for the whole process; a forked child makes its own.

    ``inherited`` is called in the child with the parent's value, if it had one, to close or
    remember the things that must not be used there.
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
        """Forget the value; the next caller makes another one."""
        self._lock = threading.Lock()
        value, self._value = self._value, None
        if value is not None and self._inherited is not None:
            self._inherited(value)


_all: weakref.WeakSet[PerProcess[Any]] = weakref.WeakSet()


def _reset_in_child() -> None:
    for each in list(_all):
        each.reset()


os.register_at_fork(after_in_child=_reset_in_child)


# --- the end of the process -------------------------------------------------------------------

_exit_functions: list[tuple[int, Callable[[], None]]] = []


def run_at_exit(order: int, function: Callable[[], None]) -> None:
    """Call ``function`` when the process exits; functions of a lower order come first.

    Executions close their runs (0), then copies are written (1), then stores are closed (2),
    whichever module was imported first.
    """
    _exit_functions.append((order, function))


@atexit.register
def _run_exit_functions() -> None:
    for _, function in sorted(_exit_functions, key=lambda each: each[0]):
        function()


# --- threads for functions that block ---------------------------------------------------------


class DaemonThreads:
    """Runs functions in daemon threads, each at once, however many there are.

    A function that hangs delays neither the others nor the end of the process: unlike those of a
    ``ThreadPoolExecutor``, these threads are not joined. A thread that was idle for
    ``idle_seconds`` ends. A forked child starts without any.
    """

    def __init__(self, idle_seconds: float = 10.0) -> None:
        self._idle_seconds = idle_seconds
        # Its operations are atomic, so there is no lock.
        self._idle: PerProcess[deque[_Inbox]] = PerProcess(deque)
        self._numbers = itertools.count(1)

    def run(self, function: Callable[[], ValueT]) -> Future[ValueT]:
        """Start ``function`` and return a future of its result, or of whatever it raises.

        In a coroutine, ``await asyncio.wrap_future(…)``. Cancelling the future prevents the start,
        if there is still time, and does not stop a function that has started. Its callbacks run in
        the function's thread. Raises RuntimeError if the system allows no more threads.
        """
        future: Future[ValueT] = Future()
        try:
            inbox = self._idle().pop()  # the latest, so that unused ones can end
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
        """Run jobs until none comes; between them, keep no reference to the last one."""
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
        except ValueError:  # another thread has just taken it, and will put a job into it
            return inbox.get()
        return None


def _do(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except StopIteration as error:  # an asyncio future refuses it, and would wait for ever
        future.set_exception(_as_runtime_error(error))
    except BaseException as error:  # noqa: BLE001 - the caller gets every error
        future.set_exception(error)
    else:
        future.set_result(result)
    finally:
        del future, function  # or the error's traceback, with this frame, would keep all three


def _as_runtime_error(error: StopIteration) -> RuntimeError:
    """Return the error that a generator would raise in its place."""
    substitute = RuntimeError("the function raised StopIteration")
    substitute.__cause__ = error
    return substitute


#: The threads that the whole process shares.
threads = DaemonThreads()


def run_async(work: Coroutine[Any, Any, ValueT]) -> ValueT:
    """Run a coroutine as ``asyncio.run`` does, but wait for no hanging ``asyncio.to_thread``.

    Such calls run in daemon threads, each at once: in the pool of a loop, a few that hang delay
    all others, and neither the loop nor the process could end before them.
    """
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    class Executor(ThreadPoolExecutor):  # an event loop takes no other kind
        def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            return threads.run(partial(function, *args, **kwargs))

    async def main() -> ValueT:
        asyncio.get_running_loop().set_default_executor(Executor(1))
        return await work

    return asyncio.run(main())
