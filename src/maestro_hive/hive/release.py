"""Which runs only wait: these need no memory, and come back when they are due."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from maestro_hive.hive.answers import answers_on_their_way
from maestro_hive.hive.dispatching import RunReleased
from maestro_hive.hive.inbox import Inbox
from maestro_hive.kernel.errors import MaestroError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from maestro_hive.hive.active_run import ActiveRun

#: The records of a family of runs: as long as they are the same, nothing happened in it.
_Marks = tuple[tuple[str, int], ...]


def only_waits(run: ActiveRun) -> bool:
    """Return whether every open durable call of a run and of its children is a wait."""
    if run.is_stopping or run.is_cancelled or run.history.is_delivering:
        return False
    calls = len(run.operations)
    if not calls or calls != len(run.waits) + len(run.children):
        return False  # a step is executed, or a child is being opened or ended
    if any(run.is_settled(call.identity) for call in run.waits):
        return False  # its answer is recorded, or is being recorded
    return not run.history.has_own_timer and all(map(only_waits, run.children))


def waits_for_people(run: ActiveRun) -> bool:
    """Return whether all that a run and its children wait for are answers of people."""
    asked = all(
        call.identity in each.run.state.questions for each in family_of(run) for call in each.waits
    )
    return asked and only_waits(run)


def family_of(run: ActiveRun) -> Iterator[ActiveRun]:
    """Yield a run and its children, to any depth."""
    yield run
    for child in list(run.children):
        yield from family_of(child)


def seconds_to_due(run: ActiveRun) -> float | None:
    """Return when the next timer of a run that only waits is over; None if there is none."""
    clock = run.run.store.clock
    waits = [*run.waits.values(), *run.timers.values()]
    left = [wait.remaining(clock) for wait in waits if wait is not None]
    left += [due for due in map(seconds_to_due, run.children) if due is not None]
    return min(left, default=None)


def has_message(run: ActiveRun) -> bool:
    """Return whether a message waits for a run or a child: it came before the run was taken.

    One that comes later wakes the run when it is released.
    """
    try:
        messages = Inbox(run.run.store).messages(run.run_id)
    except MaestroError:  # who reads them for the run says so
        return True
    if messages.cancel is not None or answers_on_their_way(run.run.state, messages):
        return True
    return any(map(has_message, run.children))


def release(run: ActiveRun) -> None:
    """Suspend a run that only waits; its lease is released with when it is due."""
    run.stop(RunReleased(run.run_id, seconds_to_due(run)))


class IdleRuns:
    """Since when which of a worker's runs do nothing but wait."""

    def __init__(self, seconds: float, is_idle: Callable[[ActiveRun], bool] = only_waits) -> None:
        self._seconds = seconds
        self._is_idle = is_idle
        # Weakly: one that is released is gone.
        self._since: WeakKeyDictionary[ActiveRun, tuple[_Marks, float]] = WeakKeyDictionary()

    def release(self, runs: Iterable[ActiveRun]) -> None:
        """Release those that have waited for long enough, and will for as long again."""
        now, before = time.monotonic(), self._since
        self._since = WeakKeyDictionary()
        for run in runs:
            if not self._is_idle(run):
                continue
            marks = _marks(run)
            known, since = before.get(run, (marks, now))
            since = since if known == marks else now
            self._since[run] = (marks, since)
            due = seconds_to_due(run)
            if now - since < self._seconds or (due is not None and due <= self._seconds):
                continue
            if not has_message(run):
                release(run)


def _marks(run: ActiveRun) -> _Marks:
    own = ((run.run_id, run.run.lease.seq),)
    return own + tuple(mark for child in run.children for mark in _marks(child))
