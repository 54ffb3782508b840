"""The event loop of a workflow: runs until it is quiet, driven by an outer loop; no clock, no I/O.

It is driven from plain callbacks of the outer loop alone (a current task is stored per loop, on
some Pythons per thread). ``time()`` is the time of the last outcome that was delivered. Calls of
the loop that would do I/O raise an error with the way out. Blocking I/O (``open``,
``requests.get``) does not go through a loop, so it cannot be caught: it is executed again in each
life, and blocks all runs.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import re
import sys
import traceback
import warnings
import weakref
import zlib
from asyncio.events import _get_running_loop, _set_running_loop
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, TypeVarTuple

import msgspec

from maestro_hive.kernel.errors import OutsideRunError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine, Iterable
    from types import FrameType

Callback = Callable[..., object]
Ts = TypeVarTuple("Ts")
T = TypeVar("T")

#: Turns without a pause after which a workflow is frozen until its next outcome; recorded with
#: the run. anyio cancels again in each turn, so a loop with a cancelled scope is never quiet.
TURNS = 100


class ImpureWorkflowWarning(UserWarning):
    """A workflow depends on an event that is not recorded, so another life may differ."""


class LoopHost(Protocol):
    """Drives a workflow loop, and makes its timers and its calls of executors durable."""

    run_id: str
    is_stopping: bool

    def woken(self) -> None:
        """Drive the loop soon: a callback was added outside of a drain."""

    def timer_set(self, timer: TimerCall) -> None:
        """Take up a durable timer."""

    def executed(
        self, executor: Any, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> asyncio.Future[Any]:
        """Execute a function in an executor of the outer loop."""


class WorkflowTask(asyncio.Task[Any]):
    """A task with a place (the path of its branch), and a hash that is the same in every life."""

    def __init__(
        self, coro: Coroutine[Any, Any, Any], *, loop: WorkflowLoop, path: str, **options: Any
    ) -> None:
        self.path = path
        #: How many calls of each content it has made, and how many tasks.
        self.counts: dict[str, int] = {}
        self.tasks_made = 0
        self._hash = zlib.crc32(path.encode())
        super().__init__(coro, loop=loop, **options)

    def __hash__(self) -> int:
        return self._hash


class WorkflowFuture(asyncio.Future[Any]):
    """A future whose hash is the same in every life: sets of them iterate alike."""

    def __init__(self, *, loop: WorkflowLoop) -> None:
        loop.futures_made += 1
        self._hash = loop.futures_made
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._hash


class Call(msgspec.Struct, eq=False, weakref=True):
    """The handle that ``call_soon`` returns; ``asyncio.Handle`` would need its private methods."""

    callback: Callback | None
    args: tuple[Any, ...]
    context: contextvars.Context

    def cancel(self) -> None:
        """Drop the callback."""
        self.callback = None
        self.args = ()

    def cancelled(self) -> bool:
        """Return whether the callback was dropped."""
        return self.callback is None


class TimerCall(Call, eq=False):
    """A durable timer: its place is branch, delay and number."""

    due: float
    identity: str
    loop: WorkflowLoop

    @property
    def is_sleep(self) -> bool:
        """Return whether the timer ends a sleep, and not a block as ``asyncio.timeout`` does."""
        return getattr(self.callback, "__name__", "") == "_set_result_unless_cancelled"

    def when(self) -> float:
        """Return the time at which the timer is due."""
        return self.due

    def postpone(self, base: float) -> None:
        """Count the delay from another time than the loop's own."""
        self.due += max(0.0, base - self.loop.now)

    def cancel(self) -> None:
        """Drop the timer."""
        if self.callback is not None:
            super().cancel()
            self.loop.timers.pop(self.identity, None)


class WorkflowLoop(asyncio.AbstractEventLoop):
    """Runs the callbacks that are ready, whenever it is driven; knows nothing durable."""

    #: Returns whether the outer loop is in debug mode; each new future calls it.
    get_debug: Callable[[], bool]

    def __init__(
        self, outer: asyncio.AbstractEventLoop, host: LoopHost, now: float, turns: int = TURNS
    ) -> None:
        self.outer, self.host, self.now, self.turns = outer, host, now, turns
        self.ready: deque[Call] = deque()
        #: In the order of their creation, as are the tasks: these are strong references.
        self.timers: dict[str, TimerCall] = {}
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.futures_made = 0
        self.is_frozen = self.closed = self._is_draining = False
        #: Whether its host runs at once what is added now.
        self.is_driven = False
        self.get_debug = outer.get_debug
        #: Calls and tasks that no task makes.
        self._outside_counts: dict[str, int] = {}
        self._outside_tasks = 0
        factory = outer.get_task_factory()
        self._factory = factory if _is_eager(factory) else None
        #: Async generators that are not finalized.
        self._generators: dict[int, Callable[[], AsyncGenerator[Any, Any] | None]] = {}
        self._empty = contextvars.Context()
        #: The warnings that were given, as the module ``warnings`` stores them.
        self._warned: dict[str | tuple[str, type[Warning], int], int] = {}

    # --- running ---

    def drain(self) -> None:
        """Run until nothing is ready, or for ``turns`` turns: then the loop is frozen.

        The collector is off meanwhile, so that dropped generators are finalized by reference
        counts: at the same moment in each life.
        """
        ready = self.ready
        if not ready:
            return
        before, hooks, collects = _get_running_loop(), sys.get_asyncgen_hooks(), gc.isenabled()
        self.is_frozen, self._is_draining = False, True
        gc.disable()
        sys.set_asyncgen_hooks(self._generator_first, self._generator_last)
        _set_running_loop(self)
        try:
            for _ in range(self.turns):
                for _ in range(len(ready)):
                    call = ready.popleft()
                    if call.callback is None:
                        continue
                    try:
                        call.context.run(call.callback, *call.args)
                    except (SystemExit, KeyboardInterrupt):
                        raise
                    except BaseException as error:  # noqa: BLE001 - as asyncio does
                        message = f"Exception in callback {call.callback!r}"
                        self.call_exception_handler({"message": message, "exception": error})
                if not ready:
                    return
            self.is_frozen = True
        finally:  # a KeyboardInterrupt leaves through here, too
            self._is_draining = False
            _set_running_loop(before)
            sys.set_asyncgen_hooks(*hooks)
            if collects:
                gc.enable()

    def place(self, content: str) -> str:
        """Return the identity of a call: its branch, and its number among equal calls there."""
        task = asyncio.current_task(self)
        if isinstance(task, WorkflowTask):
            path, counts = task.path, task.counts
        else:
            path, counts = "~", self._outside_counts
        number = counts[content] = counts.get(content, 0) + 1
        return f"{path}|{content}|{number}"

    # --- the interface that asyncio's own classes use ---

    def call_soon(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> Any:
        """Run a callback in the next turn."""
        call = Call(callback, args, contextvars.copy_context() if context is None else context)
        self.ready.append(call)
        if not (self.is_driven or self._is_draining):
            self.host.woken()
        return call

    def call_soon_threadsafe(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> Any:
        """Run a callback from a thread, as ``anyio.to_thread`` does: not recorded, not ordered."""
        context = contextvars.copy_context() if context is None else context

        def call() -> None:
            if not self.closed:
                self.call_soon(callback, *args, context=context)

        return self.outer.call_soon_threadsafe(call)

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> Any:
        """Set a durable timer."""
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> Any:
        """Set a durable timer; one that is due is no timer, and not recorded."""
        delay = when - self.now
        if not delay > 0:
            return self.call_soon(callback, *args, context=context)
        place = self.place(f"timer:{delay:.4f}")
        context = contextvars.copy_context() if context is None else context
        return self.set_timer(TimerCall(callback, args, context, when, place, self))

    def set_timer(self, timer: TimerCall) -> TimerCall:
        """Set a durable timer at its place."""
        self.timers[timer.identity] = timer
        self.host.timer_set(timer)
        return timer

    def time(self) -> float:
        """Return the time of the last outcome."""
        return self.now

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future of this loop."""
        return WorkflowFuture(loop=self)

    def create_task(
        self,
        coro: Any,
        *,
        name: str | None = None,
        context: contextvars.Context | None = None,
        **options: Any,
    ) -> asyncio.Task[Any]:
        """Start a branch; its path is that of the task that creates it, and its number there."""
        if self.closed:
            coro.close()
            raise OutsideRunError("the run has ended, and creates no more tasks")
        parent = asyncio.current_task(self)
        if isinstance(parent, WorkflowTask):
            path = f"{parent.path}/{parent.tasks_made}"
            parent.tasks_made += 1
        else:
            path = f"~/{self._outside_tasks}" if self._outside_tasks else "r"
            self._outside_tasks += 1
        if self._factory is not None:
            options.setdefault("eager_start", True)
        if context is not None:
            options["context"] = context
        task = WorkflowTask(coro, loop=self, path=path, name=name or f"task {path}", **options)
        if not task.done():
            self.tasks[task] = None
            task.add_done_callback(self._forget, context=self._empty)
        return task

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self.tasks.pop(task, None)

    def set_task_factory(self, factory: Any) -> None:
        """Choose between eager tasks and others."""
        if factory is not None and not _is_eager(factory):
            raise OutsideRunError("a workflow takes asyncio.eager_task_factory, and no other")
        self._factory = factory

    def get_task_factory(self) -> Any:
        """Return the factory of eager tasks, if it was chosen."""
        return self._factory

    def run_in_executor(
        self, executor: Any, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Execute a function in a thread, in each life; its end has its place in the log."""
        return self.host.executed(executor, func, args)

    def is_running(self) -> bool:
        """Return whether the run has not ended."""
        return not self.closed

    def is_closed(self) -> bool:
        """Return whether the run has ended."""
        return self.closed

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Report an exception that no task awaits to the outer loop, unless the run is stopped."""
        if not self.host.is_stopping:
            self.outer.call_exception_handler(context)

    # --- warnings ---

    def warn(self, text: str) -> None:
        """Warn of an impure workflow, at the line of the user's code that is on the stack."""
        frames = (frame for frame, _ in traceback.walk_stack(None))
        user = next((each for each in frames if not _is_ours(each)), None)
        place = (user.f_code.co_filename, user.f_lineno) if user is not None else (__file__, 1)
        message = f"run {self.host.run_id!r} {text}"
        warnings.warn_explicit(message, ImpureWorkflowWarning, *place, registry=self._warned)

    def warn_of_waiting(self) -> None:
        """Warn of a workflow that no outcome will wake."""
        self.warn(
            "waits for nothing that is recorded, so nothing durable will wake it (cancel it, and"
            " await a step, a question, a sleep or another workflow): "
            + "; ".join(_where(each) for each in self.tasks)
        )

    # --- async generators ---

    def _generator_first(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._generators[id(generator)] = weakref.ref(generator)

    def _generator_last(self, generator: AsyncGenerator[Any, Any]) -> None:
        """Close a dropped generator now, in a drain; one that the collector found, at the end."""
        self._generators.pop(id(generator), None)
        if self.closed:
            return
        if self._is_draining:
            _ = self.create_task(generator.aclose())
        else:
            self._generators[id(generator)] = lambda: generator

    async def shutdown_asyncgens(self) -> None:
        """Close the generators that are left."""
        left = [each() for each in self._generators.values()]
        self._generators.clear()
        for generator in left:
            if generator is not None:
                await generator.aclose()


#: Calls that change how a loop runs.
_OF_ITS_RUN = re.compile("close|run_|.*default_executor|.*exception_handler|set_debug|stop")


def _refused(name: str) -> Any:
    """Return a method that refuses to do I/O, or to change how the loop runs."""
    advice = "its run drives the loop of a workflow; remove the call"
    if not _OF_ITS_RUN.match(name):
        advice = (
            "the body of a workflow is executed again in each life, so it does no I/O; call it in a"
            " step (@hive.step), or by hive.outside(coroutine), which is executed again in each"
            " life"
        )

    def refused(*_: Any, **__: Any) -> Any:
        raise OutsideRunError(f"loop.{name}: {advice}")

    return refused


for _name in vars(asyncio.AbstractEventLoop).keys() - vars(WorkflowLoop).keys():
    if not _name.startswith("_"):
        setattr(WorkflowLoop, _name, _refused(_name))


def _is_ours(frame: FrameType) -> bool:
    """Return whether a frame is one of asyncio or of this package."""
    module = str(frame.f_globals.get("__name__")).partition(".")[0]
    return module in ("asyncio", "maestro_hive", "traceback")


def _where(task: asyncio.Task[Any]) -> str:
    """Return the name of a task and the line of the user's code at which it waits."""
    inner: object = task.get_coro()
    line = ""
    while (frame := getattr(inner, "cr_frame", None)) is not None:
        if not _is_ours(frame):
            line = f" at {frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_qualname})"
        inner = getattr(inner, "cr_await", None)
    return f"{task.get_name()}{line}"


def _is_eager(factory: Any) -> bool:
    """Return whether a task factory is the eager one of asyncio, which Python 3.12 brought."""
    eager = getattr(asyncio, "eager_task_factory", None)
    code = getattr(factory, "__code__", None)
    return eager is not None and code is not None and code is eager.__code__


_as_completed = asyncio.as_completed


def as_completed(fs: Iterable[Any], *, timeout: float | None = None) -> Any:
    """Make tasks in the order of the list; asyncio would make a set of coroutines first."""
    in_workflow = isinstance(_get_running_loop(), WorkflowLoop)
    if in_workflow and not asyncio.isfuture(fs) and not asyncio.iscoroutine(fs):
        fs = [asyncio.ensure_future(each) for each in dict.fromkeys(fs)]
    return _as_completed(fs, timeout=timeout)


def install() -> None:
    """Order ``asyncio.as_completed`` in workflows."""
    asyncio.as_completed = asyncio.tasks.as_completed = as_completed


def workflow_loop_here() -> WorkflowLoop | None:
    """Return the loop of the workflow that calls this; None outside of workflows."""
    loop = asyncio._get_running_loop()  # noqa: SLF001 - of asyncio.events.__all__
    return loop if isinstance(loop, WorkflowLoop) else None
