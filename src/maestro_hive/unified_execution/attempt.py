"""One attempt at a task: its time limit, its thread if it needs one, and what it can ask for.

Inside a task ``current()`` gives the ``StepContext``: also in the tasks it starts, and in threads
that were given its context (``asyncio.to_thread`` does that by itself).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
from collections.abc import Iterator, MutableMapping, Sequence
from contextvars import ContextVar, copy_context
from functools import partial
from types import CoroutineType, FunctionType, coroutine
from typing import TYPE_CHECKING, Any, Protocol, overload

from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.kernel.threads import threads
from maestro_hive.unified_execution import settings
from maestro_hive.unified_execution.exceptions import ExecutionException, RecoverableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

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


class Notebook(Protocol):
    """Where a step's context writes what must not be lost; durable when a method returns."""

    @property
    def effect_key(self) -> str:
        """What the step's effect is called."""
        ...

    def save_progress(self, progress: dict[str, Any]) -> None:
        """Keep a step's half-done work."""
        ...

    def change_memory(self, changed: dict[str, Any], gone: set[str]) -> dict[str, Any]:
        """Change keys of a persona's memory, and remove some; return all of it as it is now."""
        ...

    def add_history(self, item: Any) -> None:
        """Add to a persona's history."""
        ...

    def progress(self) -> dict[str, Any]:
        """Return what the step last saved."""
        ...

    def memory(self) -> dict[str, Any]:
        """Return the persona's memory."""
        ...

    def history(self) -> list[Any]:
        """Return the persona's history."""
        ...


class StepContext:
    """What a task can know and keep while it is executed."""

    __slots__ = (
        "_deadline",
        "_history",
        "_loop",
        "_memory",
        "_notebook",
        "_over",
        "_progress",
        "_spend",
        "_timeout",
        "attempt",
        "feedback",
        "persona_id",
        "run_id",
        "task_name",
    )

    def __init__(
        self,
        notebook: Notebook,
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
        self._notebook = notebook
        self._spend = spend
        self._progress: dict[str, Any] | None = None
        self._memory: Memory | None = None
        self._history: History | None = None
        self._over = False
        self._deadline: asyncio.Timeout | None = None
        self._timeout: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def effect_key(self) -> str:
        """The same for every attempt at this step: for the other side to notice a repetition."""
        return self._notebook.effect_key

    # --- what it saved ---

    @property
    def progress(self) -> dict[str, Any]:
        """What this step saved of its half-done work, in this attempt or an earlier one; a copy."""
        if self._progress is None:
            self._progress = self._notebook.progress()
        return copy.deepcopy(self._progress)

    def save_progress(self, **fields: Any) -> None:
        """Keep half-done work for the next attempt; fields that are not given stay as they are."""
        self._check_not_over("save progress")
        progress = {**self.progress, **fields}
        self._notebook.save_progress(progress)
        self._progress = progress

    @property
    def memory(self) -> Memory:
        """The persona's memory in this run: a dictionary, saved at every change."""
        if self._memory is None:
            self._memory = Memory(self._notebook.memory(), self._change_memory)
        return self._memory

    def _change_memory(self, changed: dict[str, Any], gone: set[str]) -> dict[str, Any]:
        self._check_not_over("change the persona's memory")
        return self._notebook.change_memory(changed, gone)

    @property
    def history(self) -> History:
        """What the persona went through in this run: a list that only grows."""
        if self._history is None:
            self._history = History(self._notebook.history(), self._add_history)
        return self._history

    def _add_history(self, item: Any) -> None:
        self._check_not_over("add to the persona's history")
        self._notebook.add_history(item)

    # --- what it uses ---

    def spend(self, tokens: int = 0, usd: float = 0.0) -> None:
        """Count tokens and money that were spent; also when the attempt is over already."""
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

    def end(self) -> None:
        """Save what changed unnoticed inside the memory, and accept nothing more."""
        try:
            if self._memory is not None and not self._over:
                self._memory.save_if_changed()
        finally:
            self._over = True
            self._deadline = None


class Memory(MutableMapping[str, Any]):
    """A dictionary that is saved whenever a key changes, and once more when the attempt ends.

    What changes inside a value is noticed at the end, or at the next change of a key. Steps of one
    persona that are executed at the same time change its memory key by key: neither undoes what
    the other did, and sees it at its own next change.
    """

    def __init__(
        self,
        values: dict[str, Any],
        change: Callable[[dict[str, Any], set[str]], dict[str, Any]],
    ) -> None:
        self._values = values
        self._saved = copy.deepcopy(values)
        self._change = change

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(key, str):
            raise TypeError(f"a persona's memory has names as keys, not {key!r}")
        self._apply({key: value}, set())

    def __delitem__(self, key: str) -> None:
        if key not in self._values:
            raise KeyError(key)
        self._apply({}, {key})

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(self._values)

    def save_if_changed(self) -> None:
        """Save what was changed inside the values."""
        if self._values != self._saved:
            self._apply({}, set())

    def _apply(self, changed: dict[str, Any], gone: set[str]) -> None:
        """Save changes, and what was changed inside other values; an error changes nothing."""
        inside = {key: value for key, value in self._values.items() if value != self._saved[key]}
        saved = self._change({**inside, **changed}, gone)
        own = {**self._values, **changed}
        # An object that the task has in hand stays the one that is looked at.
        self._values = {
            key: own[key] if key in own and own[key] == value else value
            for key, value in saved.items()
        }
        self._saved = copy.deepcopy(self._values)


class History(Sequence[Any]):
    """A list that only grows; what ``append`` returned from is saved."""

    def __init__(self, items: list[Any], add: Callable[[Any], None]) -> None:
        self._items = items
        self._add = add

    def append(self, item: Any) -> None:
        """Add an item at the end."""
        self._add(item)
        self._items.append(copy.deepcopy(item))

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return copy.deepcopy(self._items[index])

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return repr(self._items)


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
        work = task(*args, **kwargs) if _is_async(task) else _in_thread(task, args, kwargs)
        if type(work) is not CoroutineType:
            return await _in_time(context, seconds, work)
        try:
            first = work.send(None)
        except StopIteration as done:
            return done.value  # it never waited, so it cannot be late: most of a timer's cost saved
        return await _in_time(context, seconds, _go_on(work, first))
    except asyncio.CancelledError as error:
        if _is_cancelled():
            raise
        raise RecoverableError(
            f"{context.task_name!r} waited for something that was cancelled"
        ) from error
    finally:
        _current.reset(token)
        context.end()


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
def _go_on(work: CoroutineType[Any, Any, Any], waits_for: Any) -> Generator[Any, Any, Any]:
    """Go on with a coroutine that was begun by hand, handing on what it waits for."""
    try:
        while True:
            try:
                answer = yield waits_for
            except BaseException as error:  # noqa: BLE001 - whatever it is, the coroutine gets it
                waits_for = work.throw(error)
            else:
                waits_for = work.send(answer)
    except StopIteration as done:
        return done.value


def _late(context: StepContext, seconds: float) -> TimeoutError:
    return TimeoutError(f"{context.task_name!r} was not done within {seconds:g} seconds")


def _is_cancelled() -> bool:
    """Tell whether somebody cancelled this task, and not just what it waited for."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


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
