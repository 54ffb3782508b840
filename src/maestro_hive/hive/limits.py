"""What the attempts of a step have to pass: so many at once, so many in a stretch of time.

Limits of one name are one limit, for all processes on a store, and survive them: slots are leases
(``slots``), and the moments of the latest beginnings are a document. Only what begins is written
there, never what will: a process that dies while it waits takes nothing with it.
"""

from __future__ import annotations

import os
import random
import threading
import weakref
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from maestro_hive.hive.rates import Beginnings, Moment, Rate, RateLog
from maestro_hive.hive.slots import Line, Slots, in_store
from maestro_hive.kernel.errors import (
    CodecError,
    ConfigurationError,
    DocumentCorruptError,
    StorageError,
)
from maestro_hive.maestro.state import codec
from maestro_hive.unified_execution.waits import Wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.maestro.state.store import Store

PartT = TypeVar("PartT")

NAMESPACE = "$limits"

#: What is counted begins a moment later, and a little more or less later each time. So stretches
#: are kept longer than asked for by this part of them, and by no more than these seconds.
_GRACE_PART = 0.02
_GRACE_MOST = 0.1
#: How often a beginning is counted anew because writing it down took too long: a slow disk stays so.
_COUNTED_ANEW = 3
#: Who waits for the same moment asks a little apart.
_JITTER_PART = 0.01
_JITTER_MOST = 0.02


class Limit:
    """So many attempts at once and so many in a stretch of time, for everybody on a store."""

    def __init__(
        self, store: Store, name: str, *, rate: Rate | None, max_concurrency: int | None
    ) -> None:
        if max_concurrency is not None and not _is_count(max_concurrency):
            raise ConfigurationError(
                f"max_concurrency of {name!r} is {max_concurrency!r}, and must be a whole number"
                " from 1 on, or None for as many as come"
            )
        self.name = name
        self.rate = rate
        self.max_concurrency = max_concurrency
        self._slots = _shared(_slots, Slots, store, name)
        self._gate = _shared(_gates, RateGate, store, name)

    async def enter(self) -> Callable[[], None]:
        """Return, when one more may begin, what is to be called when it has ended.

        It holds no thread while it waits, and may be cancelled at any moment. Begin right after
        it: the moment counts as the beginning. If the process dies, it has ended.
        """
        give_back = _nothing
        if self.max_concurrency is not None:
            give_back = await self._slots.take(self.max_concurrency)
        if self.rate is not None:
            try:
                await self._gate.begin(self.rate)
            except BaseException:
                give_back()
                raise
        return give_back


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _nothing() -> None:
    pass


class _Asked(NamedTuple):
    """When it was counted as begun; or, if it was not, how long to wait."""

    moment: float | None
    wait: float


class RateGate:
    """The beginnings of one name; in a process only the first in line asks the journal."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name
        self._line = Line()

    async def begin(self, rate: Rate) -> None:
        """Return when one more may begin, having counted it."""
        await self._line.be_first()
        try:
            await self._begin(rate)
        finally:
            self._line.leave()

    async def _begin(self, rate: Rate) -> None:
        grace = min(rate.seconds * _GRACE_PART, _GRACE_MOST)
        padded = rate.padded(grace)
        late: float | None = None
        left = _COUNTED_ANEW
        while True:
            asked = await self._ask(padded, late)
            if asked.moment is None:
                late = None
                await self._rest(rate, asked.wait)
            elif left == 0 or self._store.clock.boot_seconds() - asked.moment <= grace / 2:
                return
            else:
                late = asked.moment
                left -= 1

    async def _rest(self, rate: Rate, seconds: float) -> None:
        jitter = random.uniform(0.1, 1) * min(rate.seconds * _JITTER_PART, _JITTER_MOST)  # noqa: S311
        clock = self._store.clock
        await Wait.begin(clock, seconds + jitter).over(clock)

    async def _ask(self, rate: Rate, late: float | None) -> _Asked:
        """Count one more as begun now, if it may begin; ``late`` is when it was counted before."""

        def undo(asked: _Asked | None) -> None:
            counted = asked.moment if asked is not None else late
            if counted is not None:
                self._forget(rate, counted)

        return await in_store(self._store, lambda: self._count(rate, late), undo)

    def _count(self, rate: Rate, late: float | None) -> _Asked:
        asked = _Asked(None, 0.0)

        def change(before: bytes | None) -> codec.Encoded:
            nonlocal asked
            now = self._now()
            log = self._read(before)
            began = Beginnings() if log is None else log.on_clock_of(now)
            if late is not None:
                began = began.without_one(rate, late)
            wait = began.wait(rate, now.boot_seconds)
            if not wait:
                asked = _Asked(now.boot_seconds, 0.0)
                began = began.with_one(rate, now.boot_seconds)
            elif log is not None and log.is_of(now) and late is None:
                raise _FullError(wait)
            else:
                asked = _Asked(None, wait)
            return self._written(now, began)

        try:
            self._store.update_document(NAMESPACE, self._name, change)
        except _FullError as full:
            return _Asked(None, full.wait)
        return asked

    def _forget(self, rate: Rate, counted: float) -> None:
        """Let a beginning that was counted, and then cancelled, not count."""

        def change(before: bytes | None) -> codec.Encoded | None:
            now = self._now()
            log = self._read(before)
            if log is None:
                return None
            return self._written(now, log.on_clock_of(now).without_one(rate, counted))

        try:
            self._store.update_document(NAMESPACE, self._name, change)
        except StorageError:
            return  # it counts then: one less begins, and never one too many

    def _now(self) -> Moment:
        clock = self._store.clock
        return Moment(
            boot=clock.boot_id(),
            boot_seconds=clock.boot_seconds(),
            wall_seconds=clock.now().timestamp(),
        )

    def _read(self, value: bytes | None) -> RateLog | None:
        if value is None:
            return None
        where = f"{NAMESPACE}/{self._name}"
        try:
            return RateLog.from_json(codec.decode(value, where))
        except (CodecError, KeyError, TypeError, ValueError) as error:
            raise DocumentCorruptError(where, f"it is no log of beginnings ({error})") from error

    def _written(self, now: Moment, began: Beginnings) -> codec.Encoded:
        log = RateLog(written=now, beginnings=began)
        return codec.encode(log.to_json(), f"{NAMESPACE}/{self._name}")


class _FullError(Exception):
    """Raised inside a transaction that has nothing to write."""

    def __init__(self, wait: float) -> None:
        super().__init__()
        self.wait = wait


# --- one for all in this process -----------------------------------------------------------------

_mutex = threading.RLock()
_slots: weakref.WeakKeyDictionary[Store, weakref.WeakValueDictionary[str, Slots]] = (
    weakref.WeakKeyDictionary()
)
_gates: weakref.WeakKeyDictionary[Store, weakref.WeakValueDictionary[str, RateGate]] = (
    weakref.WeakKeyDictionary()
)


def _shared(
    known: weakref.WeakKeyDictionary[Store, weakref.WeakValueDictionary[str, PartT]],
    make: Callable[[Store, str], PartT],
    store: Store,
    name: str,
) -> PartT:
    """Return the part that everybody in this process uses for that store and name."""
    with _mutex:
        by_name = known.setdefault(store, weakref.WeakValueDictionary())
        part = by_name.get(name)
        if part is None:
            part = by_name[name] = make(store, name)
        return part


def _forget_in_child() -> None:
    global _mutex  # noqa: PLW0603 - a thread that is not in the child may have held it
    _mutex = threading.RLock()
    _slots.clear()
    _gates.clear()


os.register_at_fork(after_in_child=_forget_in_child)
