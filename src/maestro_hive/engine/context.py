"""What a task can know and store while it is executed.

Inside a task ``current()`` gives the ``StepContext``: also in the tasks it starts, and in threads
that were given its context (``asyncio.to_thread`` does that by itself).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Iterable,
    Iterator,
    MutableMapping,
    Sequence,
)
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from maestro_hive.engine import settings
from maestro_hive.engine.errors import ExecutionException, text_of
from maestro_hive.engine.streams import DiscardedStream
from maestro_hive.engine.usage import MOST_TOKENS, StreamUsage, Usage, usage_in, usage_of
from maestro_hive.kernel.errors import ConfigurationError, EncodeError, MaestroError
from maestro_hive.kernel.redaction import redact_text
from maestro_hive.maestro.state import codec

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from contextlib import AbstractContextManager

    from maestro_hive.engine.budget import Budget
    from maestro_hive.engine.memory_step import MemoryStep
    from maestro_hive.engine.step_record import RunStep
    from maestro_hive.engine.streams import Stream

StreamT = TypeVar("StreamT")

#: The round of level 2 that is being made; level 1 gives each round its own set of attempts.
round_number: ContextVar[int] = ContextVar("round_number", default=1)

current_step: ContextVar[StepContext | None] = ContextVar("current_step", default=None)


def current() -> StepContext:
    """Return the context of the step that is being executed here."""
    found = current_step.get()
    if found is None:
        raise ConfigurationError(
            "current() is for use inside a step; in a thread of your own, run the function with"
            " contextvars.copy_context().run"
        )
    return found


def records_around() -> Iterator[RunStep | MemoryStep]:
    """Yield what is recorded of the steps that this is executed inside of, the innermost first."""
    context = current_step.get()
    while context is not None:
        yield context._record  # noqa: SLF001 - of this module
        context = context._outer  # noqa: SLF001


class StepContext:
    """What a task can know and keep while it is executed; what it saves is durable at once."""

    __slots__ = (
        "_budget",
        "_deadline",
        "_history",
        "_loop",
        "_memory",
        "_outer",
        "_over",
        "_record",
        "_stores_stream",
        "_stream",
        "_timeout",
        "attempt",
        "depth",
        "feedback",
        "persona_id",
        "run_id",
        "task_name",
        "thread",
    )

    def __init__(
        self,
        record: RunStep | MemoryStep,
        budget: Budget,
        *,
        attempt: int,
        feedback: list[str],
        persona_id: str,
        task_name: str,
        run_id: str | None,
        stores_stream: bool = True,
    ) -> None:
        self._outer = outer = current_step.get()
        #: How many steps it is inside of.
        self.depth: int = 0 if outer is None else outer.depth + 1
        #: Which attempt this is, from 1; it goes on after a restart.
        self.attempt = attempt
        #: What failed before, a sentence for each attempt; made for a prompt.
        self.feedback = feedback
        self.persona_id = persona_id
        self.task_name = task_name
        self.run_id = run_id
        self._record = record
        self._budget = budget
        self._memory: Memory | None = None
        self._history: History | None = None
        self._stores_stream = stores_stream
        self._stream: Stream | None = None
        self._over = False
        self._deadline: asyncio.Timeout | None = None
        self._timeout: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # What is done when the thread has ended that it is executed in; None if it needs none.
        self.thread: Future[Any] | None = None

    @property
    def effect_key(self) -> str:
        """The same for every attempt at this step: for the other side to notice a repetition."""
        return self._record.effect_key

    @property
    def label(self) -> str:
        """What tells the step from others of its name in the run: ``name``, or ``name#2``."""
        return self._record.label() or self.task_name

    # --- what it saved ---

    @property
    def progress(self) -> dict[str, Any]:
        """What this step saved of its half-done work, in this attempt or an earlier one; a copy."""
        return self._record.progress()

    def save_progress(self, **fields: Any) -> None:
        """Keep half-done work for the next attempt; fields that are not given stay as they are."""
        with self._record.lock:
            self._check_not_over("save progress")
            self._record.change_progress(fields)

    @property
    def memory(self) -> Memory:
        """The persona's memory in this run: a dictionary, saved at every change."""
        if self._memory is None:
            with self._record.lock:
                if self._memory is None:
                    record = self._record
                    self._memory = Memory(record.memory, self._change_memory, record.lock)
        return self._memory

    def _change_memory(self, changed: dict[str, Any], gone: set[str]) -> dict[str, Any]:
        with self._record.lock:
            self._check_not_over("change the persona's memory")
            return self._record.change_memory(changed, gone)

    @property
    def history(self) -> History:
        """What the persona did in this run: a list that only grows."""
        if self._history is None:
            with self._record.lock:
                if self._history is None:
                    record = self._record
                    self._history = History(record.history, self._add_history, record.lock)
        return self._history

    def _add_history(self, item: Any) -> None:
        with self._record.lock:
            self._check_not_over("add to the persona's history")
            self._record.add_history(item)

    def write(self, chunk: str | bytes) -> None:
        """Add a chunk, a text or bytes of at most 64 KiB, to the step's stream; without waiting.

        ``hive.stream`` and ``maestro logs`` follow it. It is visible, and safe against a kill, about
        10 ms later, and in any case before the attempt's outcome is recorded; against a power cut,
        with that outcome. A new attempt starts the stream over.
        """
        stream = self._stream
        if stream is None:
            with self._record.lock:
                self._check_not_over("write to its stream")
                if self._stream is None:
                    stored = self._stores_stream
                    self._stream = self._record.open_stream() if stored else DiscardedStream()
                stream = self._stream
        stream.write(chunk)

    # --- what it uses ---

    def spend(
        self,
        tokens: int = 0,
        usd: float | None = None,
        *,
        model: str = "",
        cached: int = 0,
        usage: object = None,
    ) -> None:
        """Count tokens and money that were spent, durably; also when the attempt is over already.

        ``usage`` is a response of OpenAI or Anthropic, or the usage in one. ``cached`` are tokens that
        were read from a provider's cache: they are counted apart. Without ``usd``, the price of
        ``model`` says it. The result of an attempt that calls this is not read for usage as well.
        Raises ``TokenBudgetExceeded`` if more is spent than a budget has.
        """
        given: dict[str, object] = {"tokens": tokens, "usd": usd, "cached": cached}
        for name, value in given.items():
            if isinstance(value, int | float) and abs(value) > MOST_TOKENS:
                raise ConfigurationError(f"spend({name}=…) is too large: {MOST_TOKENS} at most")
        settings.whole(0)("spend(tokens=…)", tokens)
        settings.whole(0)("spend(cached=…)", cached)
        if usd is not None:
            settings.number(0)("spend(usd=…)", usd)
        if not isinstance(model, str):
            raise settings.refused("spend(model=…)", model, "a text")
        spent = Usage(tokens=tokens, cached=cached)
        if usage is not None:
            found = usage_in(usage) or usage_of(usage)
            if found is None:
                raise settings.refused("spend(usage=…)", usage, "a response that has its usage")
            spent = found._replace(tokens=found.tokens + tokens, cached=found.cached + cached)
        micros = spent.usd if usd is None else round(usd * 1e6)
        spent = spent._replace(usd=micros, model=model or spent.model)
        if spent.tokens or spent.usd or spent.cached:
            self._budget.spend(self._record, self.attempt, spent)

    def spend_and_save(self, progress: dict[str, Any], **spent: Any) -> None:
        """Count what was spent, and keep half-done work, in one record: a kill leaves both, or neither.

        ``spent`` are arguments of ``spend``. For those who count by what was reported up to now.
        """
        with self._record.lock:
            try:
                self._check_not_over("save progress")
            except MaestroError:
                self.spend(**spent)  # late spending counts
                raise
            self._record.stage_progress(progress)
        try:
            self.spend(**spent)
        finally:
            if (left := self._record.stage_progress(None)) is not None:  # nothing was recorded
                self.save_progress(**left)

    def metered(self, stream: StreamT) -> StreamT:
        """Return a stream of OpenAI or Anthropic, to be iterated over, whose usage is counted.

        It is counted once, when the stream ends, or is left: by what its events say up to then.
        """
        if hasattr(stream, "__aiter__"):
            return cast("StreamT", self._metered_async(cast("AsyncIterable[Any]", stream)))
        return cast("StreamT", self._metered(cast("Iterable[Any]", stream)))

    def _metered(self, stream: Iterable[Any]) -> Iterator[Any]:
        used = StreamUsage()
        try:
            for event in stream:
                used.add(event)
                yield event
        finally:
            self._spend_used(used)

    async def _metered_async(self, stream: AsyncIterable[Any]) -> AsyncIterator[Any]:
        used = StreamUsage()
        try:
            async for event in stream:
                used.add(event)
                yield event
        finally:
            self._spend_used(used)

    def _spend_used(self, used: StreamUsage) -> None:
        found = used.usage()
        if found is not None:
            self._budget.spend(self._record, self.attempt, found)

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

    def limit(self, deadline: asyncio.Timeout, timeout: float) -> None:
        """Set the time limit that ``heartbeat`` extends."""
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
                note = f"its memory could not be saved: {redact_text(text_of(broken))}"
                BaseException.add_note(error, note)
        finally:
            with self._record.lock:  # or a thread that is late could still be writing
                self._over = True
            if self._stream is not None:
                self._stream.close()
            self._deadline = None


# --- memory and history ---------------------------------------------------------------------------

#: Nothing can be changed inside of these.
_WHOLE = (str, int, float, bool, bytes, type(None))


#: What is merged member by member.
_PARTS = (dict, list, set)


class Memory(MutableMapping[str, Any]):
    """A dictionary that is saved whenever a key changes, and once more when the attempt ends.

    What changes inside a value is noticed at the end, or at the next change of a key. Steps of one
    persona that are executed at the same time share its memory: what one changes inside a value
    is merged with what another changed in it (``merge``), and a key that is set has the value it
    was set to last. A step sees what others did when it next reads a key after a change of its own.
    """

    def __init__(
        self,
        load: Callable[[], dict[str, Any]],
        change: Callable[[dict[str, Any], set[str]], dict[str, Any]],
        lock: AbstractContextManager[object],
    ) -> None:
        self._load = load
        #: As it is saved. Others have the same objects, so they are never changed.
        self._saved = load()
        self._change = change
        self._lock = lock
        #: What the task has in hand and may change inside; of each key the newest one last.
        self._held: dict[str, list[_Held]] = {}

    def __getitem__(self, key: str) -> Any:
        value = self._saved[key]
        if type(value) in _WHOLE:
            return value
        with self._lock:
            value = self._saved[key]
            held = self._held.setdefault(key, [])
            if not held or held[-1].saved is not value:
                held.append(_Held(copy.deepcopy(value), value))
            return held[-1].value

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, which is set first if no step has set it."""
        with self._lock:
            self._saved = self._load()
            if key not in self._saved:
                self[key] = default
            return self[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(key, str):
            raise TypeError(f"a persona's memory has names as keys, not {key!r}")
        self._apply({key: value}, set())

    def __delitem__(self, key: str) -> None:
        if key not in self._saved:
            raise KeyError(key)
        self._apply({}, {key})

    def __iter__(self) -> Iterator[str]:
        return iter(self._saved)

    def __len__(self) -> int:
        return len(self._saved)

    def __repr__(self) -> str:
        return repr({**self._saved, **{key: held[-1].value for key, held in self._held.items()}})

    def save_if_changed(self) -> None:
        """Save what was changed inside the values."""
        with self._lock:
            if any(each.changed() for held in self._held.values() for each in held):
                self._apply({}, set())

    def _apply(self, changed: dict[str, Any], gone: set[str]) -> None:
        """Save changes, and what was changed inside other values; an error changes nothing."""
        with self._lock:
            current = self._load()
            merged: dict[str, Any] = {}
            changes: list[tuple[_Held, object]] = []
            for key, held in self._held.items():
                if key in changed or key in gone:
                    continue
                for each in [each for each in held if each.changed()]:
                    theirs = merged.get(key, current.get(key, each.before))
                    merged[key] = merge(each.before, each.value, theirs)
                    changes.append((each, copy.deepcopy(each.value)))
            self._saved = self._change({**merged, **changed}, gone)
            for each, before in changes:
                each.now_is(before)
            self._hold_again(merged, changed, gone)

    def _hold_again(self, merged: dict[str, Any], changed: dict[str, Any], gone: set[str]) -> None:
        """Note what the task has in hand after a save."""
        for key in (*changed, *gone):
            self._held.pop(key, None)  # what it had of them is no part of the memory any more
        for key, value in changed.items():
            if type(value) not in _WHOLE:
                self._held[key] = [_Held(value, self._saved[key])]
        for key in merged:
            newest = self._held[key][-1]
            if newest.is_like(self._saved[key]):  # nobody else changed it: it stays the one to read
                newest.saved = self._saved[key]


class _Held:
    """A value that a task has in hand: how it was when it was last saved or read, and from what."""

    __slots__ = ("_mark", "before", "saved", "value")

    def __init__(self, value: Any, saved: object) -> None:
        self.value = value
        #: What it was saved as, or read from; not to be changed.
        self.saved = self.before = saved
        self._mark = _fingerprint(value)

    def changed(self) -> bool:
        """Return whether it was changed inside."""
        return _fingerprint(self.value) != self._mark

    def now_is(self, before: object) -> None:
        """Note that it was saved as it is; later changes count from here."""
        self.before, self._mark = before, _fingerprint(before)

    def is_like(self, saved: object) -> bool:
        """Return whether a value is the same as this one."""
        return _fingerprint(saved) == self._mark


def merge(before: Any, mine: Any, theirs: Any) -> Any:
    """Return ``theirs`` with the changes that were made from ``before`` to ``mine``.

    What was added at the end of a list is added at the end of theirs; members of a dictionary and
    of a set are added, changed and removed one by one, and merged themselves. Where that is not
    possible, because both replaced a value or changed a list in its middle, mine counts.
    """
    if theirs is before or _same(theirs, before):
        return mine
    if _same(mine, before):
        return theirs
    kinds = {type(before), type(mine), type(theirs)}
    if kinds == {dict}:
        return _merge_dicts(before, mine, theirs)
    if kinds == {set}:
        return (theirs - (before - mine)) | (mine - before)
    if kinds == {list}:
        return _merge_lists(before, mine, theirs)
    return mine


def _merge_dicts(
    before: dict[Any, Any], mine: dict[Any, Any], theirs: dict[Any, Any]
) -> dict[Any, Any]:
    removed = before.keys() - mine.keys()
    merged = {key: value for key, value in theirs.items() if key not in removed}
    for key, value in mine.items():
        if key in before and key in theirs:
            merged[key] = merge(before[key], value, theirs[key])
        elif key in theirs:  # both added it: as if it had been there, and empty
            merged[key] = merge(
                type(value)() if type(value) in _PARTS else None, value, theirs[key]
            )
        elif key not in before or not _same(value, before[key]):
            merged[key] = value
    return merged


def _merge_lists(before: list[Any], mine: list[Any], theirs: list[Any]) -> list[Any]:
    count = len(before)
    if _same(mine[:count], before):
        return [*theirs, *mine[count:]]
    if _same(theirs[:count], before):
        return [*mine, *theirs[count:]]
    if len(mine) < count or len(theirs) < count:
        return mine
    starts = [merge(*each) for each in zip(before, mine, theirs, strict=False)]
    return [*starts, *theirs[count:], *mine[count:]]


def _same(one: object, other: object) -> bool:
    return _fingerprint(one) == _fingerprint(other)


def _fingerprint(value: object) -> object:
    """Return what differs when a value does: its bytes in the journal, where 1 is not True."""
    try:
        return codec.encode(value).sha256
    except EncodeError:  # in memory, anything can be remembered
        try:
            return copy.deepcopy(value)
        except Exception:  # noqa: BLE001 - an object of the user's making
            return object()


class History(Sequence[Any]):
    """A list that only grows; what ``append`` returned from is saved.

    It is read when it is asked for, and not before: adding to a long one costs no more.
    """

    def __init__(
        self,
        load: Callable[[], list[Any]],
        add: Callable[[Any], None],
        lock: AbstractContextManager[object],
    ) -> None:
        self._load = load
        self._add = add
        self._lock = lock
        self._loaded: list[Any] | None = None

    def append(self, item: Any) -> None:
        """Add an item at the end."""
        with self._lock:
            self._add(item)
            if self._loaded is not None:
                self._loaded.append(copy.deepcopy(item))

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return copy.deepcopy(self._items()[index])

    def __len__(self) -> int:
        return len(self._items())

    def __repr__(self) -> str:
        return repr(self._items())

    def _items(self) -> list[Any]:
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded
