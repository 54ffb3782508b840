"""Threads for functions that block: reused when they return, left behind when they hang."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from maestro_hive.kernel.process import PerProcess

if TYPE_CHECKING:
    from collections.abc import Callable

    _Job: TypeAlias = tuple[Future[Any], Callable[[], Any]]
    #: A worker is known by where its jobs are put.
    _Inbox: TypeAlias = SimpleQueue[_Job]

T = TypeVar("T")


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

    def run(self, function: Callable[[], T]) -> Future[T]:
        """Start ``function`` and return what its result, or whatever it raises, will be put into.

        In a coroutine, ``await asyncio.wrap_future(…)``. Cancelling what is returned prevents the
        start, if there is still time, and does not stop a function that has started. Callbacks of it
        run in the function's thread. Raises RuntimeError if the system allows no more threads.
        """
        future: Future[T] = Future()
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
