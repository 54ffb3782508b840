"""What a task can know and store while it is executed.

Inside a task ``current()`` gives the ``StepContext``: also in the tasks it starts, and in threads
that were given its context (``asyncio.to_thread`` does that by itself).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Iterator, MutableMapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, overload

from maestro_hive.engine import settings
from maestro_hive.engine.errors import ExecutionException, text_of
from maestro_hive.kernel.errors import ConfigurationError, EncodeError
from maestro_hive.maestro.state import codec

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from maestro_hive.engine.step_record import MemoryStep, RunStep

#: More tokens or dollars at once are a mistake, and sums of them would have no form in JSON.
_MOST_SPENT = 10**15

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


class StepContext:
    """What a task can know and keep while it is executed; what it saves is durable at once."""

    __slots__ = (
        "_deadline",
        "_history",
        "_loop",
        "_memory",
        "_over",
        "_record",
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
        record: RunStep | MemoryStep,
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
        self._record = record
        self._spend = spend
        self._memory: Memory | None = None
        self._history: History | None = None
        self._over = False
        self._deadline: asyncio.Timeout | None = None
        self._timeout: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def effect_key(self) -> str:
        """The same for every attempt at this step: for the other side to notice a repetition."""
        return self._record.effect_key

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
                    self._memory = Memory(record.memory(), self._change_memory, record.lock)
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
                note = f"its memory could not be saved: {text_of(broken)}"
                BaseException.add_note(error, note)
        finally:
            with self._record.lock:  # or a thread that is late could still be writing
                self._over = True
            self._deadline = None


# --- memory and history ---------------------------------------------------------------------------

#: Nothing can be changed inside of these.
_WHOLE = (str, int, float, bool, bytes, type(None))


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
        lock: AbstractContextManager[object],
    ) -> None:
        #: As it is saved. Others have the same objects, so they are never changed.
        self._saved = values
        self._change = change
        self._lock = lock
        #: What the task has in hand and may change inside: the value, and how it was when saved.
        self._given_out: dict[str, tuple[Any, object]] = {}

    def __getitem__(self, key: str) -> Any:
        value = self._saved[key]
        if type(value) in _WHOLE:
            return value
        with self._lock:
            if key not in self._given_out:
                own = copy.deepcopy(self._saved[key])
                self._given_out[key] = (own, _fingerprint(own))
            return self._given_out[key][0]

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
        return repr({**self._saved, **{key: own for key, (own, _) in self._given_out.items()}})

    def save_if_changed(self) -> None:
        """Save what was changed inside the values."""
        if self._changed_inside():
            self._apply({}, set())

    def _changed_inside(self) -> dict[str, Any]:
        with self._lock:
            given_out = list(self._given_out.items())
        return {key: value for key, (value, before) in given_out if _fingerprint(value) != before}

    def _apply(self, changed: dict[str, Any], gone: set[str]) -> None:
        """Save changes, and what was changed inside other values; an error changes nothing."""
        with self._lock:
            inside = {key: each for key, each in self._changed_inside().items() if key not in gone}
            changed = {**inside, **changed}
            before, self._saved = self._saved, self._change(changed, gone)
            for key in [key for key in self._given_out if key not in changed]:
                if key not in self._saved or self._saved[key] is not before.get(key):
                    del self._given_out[key]  # another step changed it, or it is gone
            for key, value in changed.items():
                if type(value) in _WHOLE:
                    self._given_out.pop(key, None)
                else:  # an object that the task has in hand stays the one that is compared
                    self._given_out[key] = (value, _fingerprint(value))


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
