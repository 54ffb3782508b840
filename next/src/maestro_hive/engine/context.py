"""``current()``: what the body of a step knows and saves. Saved is durable when a call returns.

All of it works from the body's thread, from its tasks, and from threads that have its context.
What changes the run happens on its loop, which never waits for a thread: so there is no lock.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, MutableMapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar, cast

from msgspec import Raw

from maestro_hive.engine.errors import AttemptOverError
from maestro_hive.engine.settings import Amount, Seconds, Text, checked
from maestro_hive.journal import values
from maestro_hive.journal.effects import Usage
from maestro_hive.journal.entries import Entry, PersonaSaved, ProgressSaved, Spent
from maestro_hive.journal.store import Append
from maestro_hive.kernel.errors import ConfigurationError, MaestroError
from maestro_hive.kernel.redaction import redact_text

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from maestro_hive.engine.attempt import Attempt
    from maestro_hive.journal.effects import Effect
    from maestro_hive.journal.state import PersonaState, StepState

T = TypeVar("T")

#: The longest chunk of a stream, and how much waits in memory before a step waits.
_MOST_BYTES, _MOST_WAITING = 64 * 1024, 4 * 1024 * 1024
#: After so many seconds a chunk is visible.
_FLUSH_SECONDS = 0.01
#: How often a thread that waits for its loop looks whether that was closed.
_LOOK_SECONDS = 0.5
#: The memory of steps without a persona.
_NO_PERSONA = "default"


class StepContext:
    """One attempt at a step, as its body sees it."""

    __slots__ = ("_attempt", "_chunks", "_flush", "_history", "_memory", "_waiting")

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._memory = Memory(self)
        self._history = History(self)
        #: What was written and is not stored, encoded, and its length.
        self._chunks: deque[bytes] = deque()
        self._waiting = 0
        self._flush: asyncio.TimerHandle | None = None

    @property
    def attempt(self) -> int:
        """Return which attempt this is, from 1, over all restarts."""
        return self._attempt.number

    @property
    def effect_key(self) -> str:
        """Return a name that is the same in all attempts, for idempotent requests."""
        return self._attempt.plan.effect_key

    @property
    def step(self) -> str:
        """Return the name of the step."""
        return self._attempt.plan.definition.name

    @property
    def persona(self) -> str:
        """Return the persona of the step."""
        return self._attempt.plan.definition.persona or _NO_PERSONA

    @property
    def feedback(self) -> list[str]:
        """Return a sentence on each failed attempt, and what a person said: for a prompt."""
        step = self._state()
        if step is None:
            return []
        said = [step.feedback] if step.feedback else []
        return said + [each.feedback for each in step.failed if each.feedback]

    def _state(self) -> StepState | None:
        return self._attempt.journal.state.steps.get(self._attempt.step)

    # --- progress, memory, history ---

    @property
    def progress(self) -> dict[str, Any]:
        """Return what this step saved of its work, in this attempt or an earlier one; a copy."""
        step = self._state()
        if step is None or step.progress is None:
            return {}
        return cast("dict[str, Any]", self.decode(step.progress.progress))

    def save_progress(self, **fields: Any) -> None:
        """Save progress for the next attempt; fields that are not given stay as they are."""
        self.on_loop(lambda: self.save(self._progress(fields)))

    def _progress(self, fields: dict[str, Any]) -> ProgressSaved:
        attempt = self._attempt
        saved = self.encode({**self.progress, **fields}, "progress")
        return ProgressSaved(step=attempt.step, attempt=attempt.number, progress=saved)

    @property
    def memory(self) -> Memory:
        """Return the persona's memory in this run: a dictionary, saved at every change."""
        return self._memory

    @property
    def history(self) -> History:
        """Return what the persona did in this run: a list that only grows."""
        return self._history

    # --- what it uses ---

    def spend(
        self,
        tokens: int = 0,
        usd: float = 0.0,
        *,
        model: str = "",
        cached: int = 0,
        progress: dict[str, Any] | None = None,
    ) -> None:
        """Count tokens and money as spent, also when the attempt is over.

        ``cached`` tokens were read from a provider's cache, and are counted apart. ``progress``
        is saved in the same transaction: a kill leaves both, or neither.
        """
        attempt = self._attempt
        checked(Amount, tokens, "spend(tokens=…)")
        checked(Amount, cached, "spend(cached=…)")
        micros = round(checked(Seconds, usd, "spend(usd=…)") * 1e6)
        if model:
            checked(Text, model, "spend(model=…)")
        spent = Spent(
            step=attempt.step,
            attempt=attempt.number,
            persona=self.persona,
            model=model,
            tokens=tokens,
            cached=cached,
            micros=micros,
        )

        def save() -> None:
            entries: list[Entry] = []
            effects: list[Effect] = []
            if tokens or cached or micros:
                entries.append(spent)
                effects.append(Usage(self.persona, model, tokens, cached, micros))
                attempt.tokens += tokens
                attempt.micros += micros
            if progress is not None and not attempt.is_over:
                entries.append(self._progress(progress))
            if entries:
                self._write(entries, effects)

        self.on_loop(save)

    def heartbeat(self) -> None:
        """Extend the attempt's time limit: it counts from now. Raise once the attempt is over."""
        self._check_not_over()
        attempt = self._attempt
        attempt.loop.call_soon_threadsafe(_extend, attempt)

    def write(self, chunk: str | bytes) -> None:
        """Add a chunk of at most 64 KiB to the step's stream, without waiting for a disk.

        It is visible some 10 ms later, and before the outcome of the attempt is recorded.
        """
        data: object = chunk
        if not isinstance(data, str | bytes):
            raise ConfigurationError(
                f"a stream takes a text or bytes, not {type(data).__name__}; make a text of it, by"
                " json.dumps for instance"
            )
        encoded = values.encode(redact_text(data) if isinstance(data, str) else data, "chunk").data
        size = len(data.encode() if isinstance(data, str) else data)
        if size > _MOST_BYTES:
            raise ConfigurationError(
                f"a chunk of a stream has at most {_MOST_BYTES:,} bytes, and this one has {size:,};"
                " write it in parts"
            )
        self._check_not_over("write to its stream")
        if not self._attempt.plan.definition.store_streams:
            return
        self._chunks.append(encoded)
        self._waiting += len(encoded)
        if self._waiting > _MOST_WAITING:
            self.on_loop(self.flush)
        elif self._flush is None:
            self._attempt.loop.call_soon_threadsafe(self._flush_later)

    def _flush_later(self) -> None:
        if self._flush is None and self._chunks:
            self._flush = self._attempt.loop.call_later(_FLUSH_SECONDS, self._flush_soon)

    def _flush_soon(self) -> None:
        self._flush = None
        with contextlib.suppress(MaestroError):  # the end of the attempt meets it, too
            self.flush()

    def flush(self) -> None:
        """Store the chunks that were written."""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        chunks, attempt = list(self._chunks), self._attempt
        if chunks:
            store = attempt.journal.recorder.store
            store.append_chunks(attempt.journal.lease, attempt.step, attempt.number, chunks)
            for _ in chunks:  # others may have come meanwhile
                self._chunks.popleft()
            self._waiting = sum(map(len, list(self._chunks)))

    # --- for the path, and for memory and history ---

    def _check_not_over(self, wish: str = "") -> None:
        if self._attempt.is_over:
            raise AttemptOverError(self.step, self.attempt, wish)

    def persona_state(self) -> PersonaState:
        """Return what is recorded of the persona."""
        return self._attempt.journal.state.persona(self.persona)

    def encode(self, value: Any, path: str) -> Raw:
        """Return a value as it is recorded; ``path`` names it in errors."""
        return Raw(values.encode(value, path).data)

    def decode(self, data: Any) -> Any:
        """Return a new value of what is recorded."""
        return values.decode(self._attempt.journal.text(data))

    def save(self, *entries: Entry) -> None:
        """Record entries, durable on return, while the attempt is not over; on the loop."""
        self._check_not_over()
        self._write(entries)

    def _write(self, entries: Sequence[Entry], effects: Sequence[Effect] = ()) -> None:
        journal = self._attempt.journal
        append = Append(journal.lease, entries, effects, sync=True)
        (found,) = journal.recorder.store.write((append,))
        if isinstance(found, Exception):
            raise found
        journal.written(cast("list[Entry]", found))

    def on_loop(self, call: Callable[[], T]) -> T:
        """Call a function on the loop of the run, from any thread, and return its result."""
        attempt = self._attempt
        if threading.get_ident() == attempt.thread_id:
            return call()
        done: Future[T] = Future()

        def answer() -> None:
            try:
                done.set_result(call())
            except Exception as error:  # noqa: BLE001 - raised in the thread
                done.set_exception(error)

        with contextlib.suppress(RuntimeError):  # the loop was closed
            attempt.loop.call_soon_threadsafe(answer)
        while True:
            with contextlib.suppress(TimeoutError):
                return done.result(_LOOK_SECONDS)
            if attempt.loop.is_closed() and not done.done():
                raise AttemptOverError(self.step, self.attempt)


def _extend(attempt: Attempt) -> None:
    if attempt.deadline is not None and not attempt.is_over:
        until = attempt.loop.time() + attempt.plan.definition.timeout
        with contextlib.suppress(RuntimeError):  # it has just passed
            attempt.deadline.reschedule(until)


class Memory(MutableMapping[str, Any]):
    """A persona's memory: a dictionary that is saved whenever a key changes.

    What changes inside of a value is saved when the attempt ends, or a key changes. Steps of one
    persona that run at the same time share it: of each key, the latest change counts.
    """

    def __init__(self, context: StepContext) -> None:
        self._context = context
        #: Values that the body has and may change inside, each with its text when it got it.
        self._handed_out: dict[str, tuple[Any, bytes]] = {}

    def _recorded(self) -> dict[str, Any]:
        found = self._context.persona_state().memory
        return {} if found is None else cast("dict[str, Any]", self._context.decode(found))

    def _text(self, value: Any) -> bytes:
        return bytes(self._context.encode(value, "memory"))

    def _changed(self) -> dict[str, Any]:
        """Return the values that were changed inside."""
        handed_out = self._handed_out.items()
        return {key: value for key, (value, text) in handed_out if self._text(value) != text}

    def _entry(self, changed: dict[str, Any], gone: str | None = None) -> PersonaSaved:
        merged = {**self._recorded(), **changed}
        if gone is not None:
            del merged[gone]
        context = self._context
        value = context.encode(merged, "memory")
        return PersonaSaved(persona=context.persona, what="memory", value=value)

    def _save(self, changed: dict[str, Any], gone: str | None = None) -> None:
        self._context.save(self._entry(changed, gone))
        for key, value in changed.items():
            self._handed_out[key] = (value, self._text(value))

    def changes(self) -> tuple[Entry, ...]:
        """Return the entry of what changed inside of values, if anything did."""
        changed = self._changed() if self._handed_out else {}
        return (self._entry(changed),) if changed else ()

    def __getitem__(self, key: str) -> Any:
        return self._context.on_loop(lambda: self._hand_out(key))

    def _hand_out(self, key: str) -> Any:
        value = self._recorded()[key]
        text = self._text(value)
        known = self._handed_out.get(key)
        if known is not None and text == known[1]:
            return known[0]  # with what was changed inside
        self._handed_out[key] = (value, text)
        return value

    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(key, str):
            raise TypeError(f"a persona's memory has names as keys, not {key!r}")
        self._context.on_loop(lambda: self._save({**self._changed(), key: value}))

    def __delitem__(self, key: str) -> None:
        def delete() -> None:
            if key not in self._recorded():
                raise KeyError(key)
            self._handed_out.pop(key, None)
            self._save(self._changed(), key)

        self._context.on_loop(delete)

    def __iter__(self) -> Iterator[str]:
        return iter(self._recorded())

    def __len__(self) -> int:
        return len(self._recorded())

    def __repr__(self) -> str:
        return repr(dict(self))


class History(Sequence[Any]):
    """What a persona did in a run: ``append`` returns when the item is durable."""

    def __init__(self, context: StepContext) -> None:
        self._context = context

    def append(self, item: Any) -> None:
        """Add an item at the end."""
        context = self._context
        entry = PersonaSaved(
            persona=context.persona, what="history", value=context.encode(item, "history")
        )
        context.on_loop(lambda: context.save(entry))

    def __getitem__(self, index: Any) -> Any:
        found = self._context.persona_state().history[index]
        if isinstance(found, list):
            return [self._context.decode(each) for each in found]
        return self._context.decode(found)

    def __len__(self) -> int:
        return len(self._context.persona_state().history)

    def __repr__(self) -> str:
        return repr(list(self))
