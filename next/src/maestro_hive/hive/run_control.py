"""Cancel, retry and fork: what people do to a run from outside, durable on return.

Both need the store alone, not the program's code.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from msgspec import UNSET, Raw

from maestro_hive.hive.live_workers import is_taken
from maestro_hive.journal.effects import ENDED, Release
from maestro_hive.journal.entries import (
    AttemptStarted,
    ChildEnded,
    ChildStarted,
    OfCall,
    OfStep,
    PersonaSaved,
    Retried,
    RunEnded,
    RunResumed,
    RunStarted,
    RunSuspended,
    StepClosed,
    StepCompleted,
    TimerFired,
    replace,
)
from maestro_hive.journal.state import RunState
from maestro_hive.journal.store import Acquire, RunLease
from maestro_hive.kernel.errors import ConfigurationError, MaestroError, RunLeasedError
from maestro_hive.kernel.files import check_identifier

if TYPE_CHECKING:
    from collections.abc import Iterable

    from maestro_hive.journal.entries import Entry
    from maestro_hive.journal.store import Store

StepName = str | int


class StepLabels:
    """The labels of a run's steps, by their entries in order: the name, or ``name#2``."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        #: The labels by the numbers of the steps: a step that is retried has another number.
        self.known: dict[int, str] = {}
        #: The numbers by the identities of the steps.
        self.numbers: dict[str, int] = {}
        self._names: dict[str, int] = {}
        for entry in entries:
            self.of(entry)

    def of(self, entry: Entry) -> str:
        """Return the label of the step that an entry belongs to; empty if it belongs to none."""
        match entry:
            case AttemptStarted() if entry.step not in self.known:
                label = self.known.get(self.numbers.get(entry.identity, 0))
                if label is None:
                    number = self._names[entry.name] = self._names.get(entry.name, 0) + 1
                    label = entry.name if number == 1 else f"{entry.name}#{number}"
                self.known[entry.step], self.numbers[entry.identity] = label, entry.step
                return label
            case OfStep():
                return self.known.get(entry.step, "")
            case OfCall():
                return self.known.get(self.numbers.get(entry.identity, 0), "")
            case _:
                return ""

    def find(self, step: StepName) -> list[int]:
        """Return the numbers of a step, found by one of them or by its label."""
        is_number = isinstance(step, int) or step.isdecimal()
        wanted = self.known.get(int(step)) if is_number else step
        return [number for number, label in self.known.items() if label == wanted]

    def unknown(self, run_id: str, step: StepName) -> ConfigurationError:
        """Return the error for a step that the run does not have."""
        known = ", ".join(dict.fromkeys(self.known.values())) or "none"
        return ConfigurationError(f"run {run_id!r} has no step {step!r}; it has: {known}")


def _found(run_id: str, entries: list[Entry], step: StepName) -> tuple[int, str, str]:
    """Return the latest number of a step, its identity, and its label."""
    labels = StepLabels(entries)
    numbers = labels.find(step)
    if not numbers:
        raise labels.unknown(run_id, step)
    identities = {number: identity for identity, number in labels.numbers.items()}
    return numbers[-1], identities[numbers[-1]], labels.known[numbers[-1]].partition("#")[0]


# --- cancel ---------------------------------------------------------------------------------------


def cancel(store: Store, run_id: str, reason: str = "") -> bool:
    """Cancel a run and its children, wherever they are executed; False if all have ended.

    A run that has begun may clean up: the process that executes it, or a worker, sees the request.
    Others end at once, but for a clean-up that a process has left: the next start completes it.
    """
    row = store.find(run_id)
    if row.status in ENDED:
        return _cancel_children(store, run_id, reason)
    if row.status == "running" and row.holder is not None and store.db.alive(row.holder):
        return store.send(run_id, "cancel", reason)
    state = RunState()
    entries = store.entries(row.number)
    state.add(entries)
    if row.parent is None and state.cancel_requested is not None:
        return True
    is_due = row.status in ("pending", "waiting")
    unbegun = RunStarted | RunSuspended | RunResumed | Retried
    has_begun = not all(isinstance(each, unbegun) for each in entries)
    if is_due and has_begun and is_taken(store, row):
        return store.send(run_id, "cancel", reason)
    ended = RunEnded(status="cancelled", reason=reason)
    try:
        _append(store, run_id, ended, Release("cancelled"))
    except RunLeasedError:  # a process has just taken it
        return store.send(run_id, "cancel", reason)
    _cancel_children(store, run_id, reason)
    return True


def _cancel_children(store: Store, run_id: str, reason: str) -> bool:
    found = [cancel(store, child.run_id, reason) for child in store.children(run_id)]
    return any(found)


# --- retry ----------------------------------------------------------------------------------------


def retry(
    store: Store, run_id: str, step: StepName | None = None, *, by: str = "", feedback: str = ""
) -> None:
    """Forget the failures that a run and its children failed by, or those of one step.

    Completed steps stay completed, and so do failures that the workflow caught. The run continues
    when it is resumed.
    """
    row = store.find(run_id)
    if row.status == "success":
        raise ConfigurationError(f"run {run_id!r} has succeeded, so there is nothing to retry")
    entries = store.entries(row.number)
    if step is None:
        identities, name = failed_by(entries), ""
        started = [each for each in entries if isinstance(each, ChildStarted)]
        for child in {each.run_id for each in started if each.identity in identities}:
            retry(store, child, by=by, feedback=feedback)
    else:
        number, identity, name = _found(run_id, entries, step)
        if any(isinstance(each, StepCompleted) and each.step == number for each in entries):
            raise ConfigurationError(
                f"step {step!r} of run {run_id!r} is completed, so there is nothing to retry"
            )
        identities = (identity,)
    retried = Retried(identities=identities, name=name, by=by, feedback=feedback)
    _append(store, run_id, retried)


def failed_by(entries: Iterable[Entry]) -> tuple[str, ...]:
    """Return the calls by which a run failed: the failures, cancellations and timeouts at its end.

    Failures before them were caught by the workflow, and stay.
    """
    outcomes: dict[str, Entry] = {}
    failed: tuple[str, ...] = ()
    for entry in entries:
        match entry:
            case StepClosed() | ChildEnded(status="failed" | "cancelled"):
                outcomes[entry.identity] = entry
            case TimerFired(is_timeout=True):
                outcomes[entry.identity] = entry
            case RunEnded():
                failed = entry.failed
            case Retried():
                failed = ()
                for identity in entry.identities:
                    outcomes.pop(identity, None)
            case _:
                pass
    known = [outcomes[each].seq for each in failed if each in outcomes]
    timeouts = [each.seq for each in outcomes.values() if isinstance(each, TimerFired)]
    pivot = min(known) if known else max(timeouts, default=0)
    return tuple(identity for identity, each in outcomes.items() if each.seq >= pivot)


def _append(store: Store, run_id: str, entry: Entry, release: Release | None = None) -> None:
    """Append to a run that no process executes; without ``release``, its workers continue it."""
    row = store.find(run_id)
    started = store.entries(row.number)[0]
    assert isinstance(started, RunStarted)
    (lease,) = store.write((Acquire(run_id, started, is_reopened=True),))
    if isinstance(lease, MaestroError):
        raise lease
    assert isinstance(lease, RunLease)
    if release is None:
        stopped = Release("stopped")
        release = stopped if row.queue is None else Release("pending", store.now())
    store.release(lease, release, entry)
    store.db.notify()


# --- fork -----------------------------------------------------------------------------------------


def fork(
    store: Store,
    run_id: str,
    given: Raw | None = None,
    *,
    from_step: StepName | None = None,
    new_id: str | None = None,
) -> str:
    """Record a run with what another one has completed; return its id.

    The step ``from_step`` is executed again. Steps before it stay completed, and those after it
    run again exactly when their input changes. ``given`` replaces the workflow's arguments.
    """
    row = store.find(run_id)
    entries = store.entries(row.number)
    started = entries[0]
    assert isinstance(started, RunStarted)
    again, _, name = (None, "", None) if from_step is None else _found(run_id, entries, from_step)
    first = replace(
        started,
        input=Raw(store.text(run_id, started.input)) if given is None else given,
        parent=None,
        schedule=None,
        forked_from=run_id,
        from_step=name or (None if again is None else str(again)),
    )
    own_id = f"{run_id[:110]}-fork-{secrets.token_hex(4)}" if new_id is None else new_id
    check_identifier(own_id, "run id")
    copied = [_whole(store, run_id, each) for each in _copied(entries, again)]
    if not store.add_stopped(own_id, first, copied):
        raise ConfigurationError(f"there is a run {own_id!r} already; give the fork another id")
    return own_id


def _whole(store: Store, run_id: str, entry: Entry) -> Entry:
    """Return an entry with its values, those that are stored apart, too."""
    texts = {
        name: Raw(store.text(run_id, value))
        for name in entry.values
        if (value := getattr(entry, name)) is not UNSET
    }
    return replace(entry, **texts)


def _copied(entries: list[Entry], again: int | None) -> Iterable[Entry]:
    """Return the entries that a fork has: what is completed, with what personas remembered then."""
    closed = {
        each.step for each in entries if isinstance(each, StepCompleted) and each.step != again
    }
    children = {
        each.identity
        for each in entries
        if isinstance(each, ChildEnded) and each.status == "success"
    }
    is_before = True
    for entry in entries[1:]:
        match entry:
            case AttemptStarted():
                is_before = is_before and entry.step != again
                if entry.step in closed and entry.identity:
                    yield entry
            case StepCompleted() if entry.step in closed:
                yield entry
            case ChildStarted() | ChildEnded() if entry.identity in children:
                yield entry
            case PersonaSaved() if is_before:
                yield entry
            case TimerFired() if again is None or is_before:
                yield entry
            case _:
                pass
