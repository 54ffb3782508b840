"""Run control: what is asked of a run from outside. Answer, retry, cancel, fork.

All of it is durable when it returns, and needs the store alone: so the command line can do what a
program can, without its code.
"""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from maestro_hive.hive import answer_types, runs
from maestro_hive.hive.inbox import Answer, Inbox
from maestro_hive.hive.runner import active_here
from maestro_hive.hive.runs import find_run, read_run
from maestro_hive.hive.waits import fitting
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import (
    ConfigurationError,
    CorruptionError,
    RunLeasedError,
)
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.projections import effective_entries, facts_of, find_step, fold
from maestro_hive.maestro.state.records import Entry, EntryKind, NewEntry
from maestro_hive.maestro.state.store import Append
from maestro_hive.maestro.state.views import OVER, open_waits, run_status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maestro_hive.hive.runs import Input
    from maestro_hive.maestro.state.projections import RunState, StepState
    from maestro_hive.maestro.state.records import Entry
    from maestro_hive.maestro.state.store import RunLease, Store

_PENDING = "pending"


# --- answers --------------------------------------------------------------------------------------


def answer(
    store: Store, run_id: str, name: str, value: Any, *, by: str | None = None, early: bool = False
) -> None:
    """Answer a question of a run; with ``early``, also one that it has not asked yet.

    A question takes one answer. One that is not of the kind that was asked for is refused here,
    where it can be corrected.
    """
    question = find_question(store, run_id, name, early=early)
    _post(store, run_id, question, Answer(name=name, value=fitting(question, name, value), by=by))


def answer_in_words(
    store: Store, run_id: str, name: str, text: str, *, by: str | None = None, early: bool = False
) -> None:
    """Answer as it is typed: ``yes`` is a text to one question, and true to another."""
    question = find_question(store, run_id, name, early=early)
    if question is None:
        _post(store, run_id, None, Answer(name=name, value=text, by=by, as_text=True))
        return
    shape = facts_of(question).get("shape") or {}
    value = answer_types.parse_words(shape, text, f"the answer to {name!r}")
    _post(store, run_id, question, Answer(name=name, value=value, by=by))


def _post(store: Store, run_id: str, question: Entry | None, given: Answer) -> None:
    asked = question.identity if question is not None else None
    message = replace(given, question=asked.hex() if asked is not None else None)
    Inbox(store).answer(run_id, message)


def find_question(store: Store, run_id: str, name: str, *, early: bool) -> Entry | None:
    """Return what a run asks under this name; None if nothing yet, and that is ``early`` enough."""
    state = read_run(store, run_id)
    if state.ended is not None:
        raise ConfigurationError(
            f"run {run_id!r} is over ({run_status(state)}), and waits for no answer"
        )
    answered = {each.question for each in Inbox(store).messages(run_id).answers}
    asked = [each for each in open_waits(state) if facts_of(each).get("name") == name]
    left = [each for each in asked if each.identity and each.identity.hex() not in answered]
    if left or (early and not asked):
        return left[0] if left else None
    if asked:
        return asked[0]  # has its answer, and posting another is an error
    raise ConfigurationError(
        f"run {run_id!r} does not wait for {name!r}{_what_instead(state)};"
        " an answer for later is given with early (--early)"
    )


def _what_instead(state: RunState) -> str:
    names = [str(facts_of(each).get("name")) for each in open_waits(state)]
    return f"; it waits for {', '.join(map(repr, names))}" if names else ", nor for anything else"


# --- retry ---------------------------------------------------------------------------------------


def retry(store: Store, run_id: str, step: str | int | None = None) -> None:
    """Let what failed be tried again, in the run and its children, or one step alone.

    What is completed stays completed, and with ``step`` (a name, ``name#2`` or a number) so does
    the recorded failure of every other step. The run goes on when it is resumed.
    """
    find_run(store, run_id)
    with _leased(store, run_id) as run:
        state = run.state
        if run_status(state) == runs.SUCCESS:
            raise ConfigurationError(f"run {run_id!r} has succeeded: there is nothing to retry")
        facts: dict[str, Any] = {}
        identity = None
        if step is not None:
            identity = _failed_step(state, run_id, step)
            facts["run"] = True  # a run that ended over this step is open again
        for child in state.children.values() if identity is None else ():
            _retry_child(store, str(facts_of(child).get("run_id")))
        Inbox(store).clear(run_id, runs.FAILED)  # and with it a request to cancel
        retried = NewEntry(
            EntryKind.RETRIED,
            facts=codec.dump_canonical(facts) if facts else None,
            identity=identity,
        )
        run.append(retried, _PENDING if state.started is not None else None)


def _failed_step(state: RunState, run_id: str, wanted: str | int) -> bytes | None:
    found = step_of(state, run_id, wanted)
    if found.completed is not None:
        raise ConfigurationError(
            f"step {wanted!r} of run {run_id!r} is completed: there is nothing to retry"
        )
    return found.identity


def _retry_child(store: Store, run_id: str) -> None:
    record = store.run(run_id)
    if record is not None and record.status != runs.SUCCESS:
        retry(store, run_id)


def step_of(state: RunState, run_id: str, wanted: str | int) -> StepState:
    """Return a step by its number, its name, or ``name#2``; raise if there is none."""
    found = find_step(state, wanted)
    if found is None:
        names = ", ".join(dict.fromkeys(step.name for step in state.steps.values())) or "none"
        raise ConfigurationError(f"run {run_id!r} has no step {wanted!r}; it has: {names}")
    return found


# --- cancel ---------------------------------------------------------------------------------------


def cancel(store: Store, run_id: str, reason: str = "") -> bool:
    """End a run and what it started; False if it is over already.

    A process that executes it gets a message, and records it; otherwise it is recorded here.
    """
    if active_here(store, run_id) is not None:
        Inbox(store).cancel(run_id, reason)
        return True
    record = find_run(store, run_id)
    if record.status in OVER:
        return False
    if not record.workflow and read_run(store, run_id).started is None:
        raise ConfigurationError(
            f"run {run_id!r} was not started by a workflow: stop the program that executes it"
        )
    try:
        with _leased(store, run_id) as run:
            if run.state.ended is not None:  # it ended just now
                return False
            for child in (
                run.state.children.values()
            ):  # first: after a kill in here it can be requested again
                _cancel_child(store, str(facts_of(child).get("run_id")), reason)
            ended = runs.ended(runs.CANCELLED, reason=reason or None)
            run.append(ended, runs.CANCELLED)
            Inbox(store).clear(run_id, runs.CANCELLED)
    except RunLeasedError:
        Inbox(store).cancel(run_id, reason)
    return True


def _cancel_child(store: Store, run_id: str, reason: str) -> None:
    if store.run(run_id) is not None:
        cancel(store, run_id, reason)


# --- writing to a run that is not executed ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _LeasedRun:
    """A run whose lease was taken to write to it, and its state."""

    store: Store
    hold: RunLease
    state: RunState

    def append(self, entry: NewEntry, status: str | None) -> None:
        """Record an entry, durably."""
        (written,) = self.store.append([Append(self.hold, [entry], status)])
        if isinstance(written, Exception):
            raise written


@contextmanager
def _leased(store: Store, run_id: str) -> Iterator[_LeasedRun]:
    """Lease a run that no process executes; ``RunLeasedError`` names the one that does."""
    hold = store.acquire_run(run_id)
    try:
        if hold.users > 1:
            holder = hold.lease.holder
            raise RunLeasedError(run_id, host=holder.host, pid=holder.pid, since=holder.since)
        yield _LeasedRun(store, hold, fold(store.entries(hold.run), store.load))
    finally:
        store.release_run(hold)


# --- fork ---------------------------------------------------------------------------------------


#: What belongs to a persona, and is taken as it was before the step that is executed again.
_NOTES = (EntryKind.MEMORY_SAVED, EntryKind.HISTORY_APPENDED)


def fork(
    store: Store,
    run_id: str,
    *,
    from_step: str | int | None = None,
    changed: dict[str, Any] | None = None,
    new_id: str | None = None,
) -> str:
    """Start a new run with what another has completed, and return its name; nothing is executed yet.

    The step ``from_step`` is executed again. Steps before it stay completed, and those after it too:
    they run again exactly when their input changes. ``changed`` replaces arguments of the workflow
    by name. Questions after the step are asked again, and children that have not succeeded start
    again. Tokens that the other run spent are not counted again.
    """
    record = find_run(store, run_id)
    source = store.entries(record.id)
    state = fold(source, store.load)
    if state.started is None:
        raise ConfigurationError(
            f"run {run_id!r} was not started by a workflow, so there is nothing to fork it with"
        )
    first_new = None if from_step is None else step_of(state, run_id, from_step)
    given = _changed_input(run_id, state.started, store, changed or {})
    name = new_id or f"{run_id[:110]}-fork-{secrets.token_hex(4)}"
    files.check_identifier(name, "run id")
    first = runs.started(
        given,
        forked_from=run_id,
        from_step=None if first_new is None else first_new.name or first_new.number,
    )
    copied = [first, *_copied(store, state, source, first_new)]
    if _is_there(store, name):
        raise ConfigurationError(f"there is a run {name!r} already; fork to another name")
    hold = store.acquire_run(name, record.workflow)
    try:
        if hold.seq or hold.users > 1:
            raise ConfigurationError(f"there is a run {name!r} already; fork to another name")
        (written,) = store.append([Append(hold, copied, "pending")])
        if isinstance(written, Exception):
            raise written
    finally:
        store.release_run(hold)
    return name


def _is_there(store: Store, run_id: str) -> bool:
    """Return whether a run has entries; a kill may have left a name without any."""
    record = store.run(run_id)
    return record is not None and bool(store.entries(record.id))


def _changed_input(run_id: str, started: Entry, store: Store, changed: dict[str, Any]) -> Input:
    """Return a run's input with some arguments replaced, by the names its workflow has for them.

    As plain JSON: a fork needs no classes of the others.
    """
    workflow, names = str(facts_of(started).get("workflow", "")), runs.parameters_of(started)
    data = store.load(started)
    tree = codec.parse(data or b"{}", "input", depth=codec.DOCUMENT_DEPTH)
    if not isinstance(tree, dict) or not {"args", "kwargs"} <= tree.keys():
        raise CorruptionError(f"run {run_id!r} does not say what it was called with")
    settable = [name for name in names if not name.startswith("*")]
    unknown = sorted(changed.keys() - set(settable))
    if unknown and not any(name.startswith("**") for name in names):
        raise ConfigurationError(
            f"the workflow {workflow!r} of run {run_id!r} has no parameter {', '.join(unknown)};"
            f" it has: {', '.join(settable) or 'none'}"
        )
    by_place = list(takewhile(lambda name: not name.startswith("*"), names))[: len(tree["args"])]
    for name, value in changed.items():
        plain = codec.parse(codec.encode(value, name).data, name)
        if name in by_place:
            tree["args"][by_place.index(name)] = plain
        else:
            tree["kwargs"][name] = plain
    return runs.input_of(workflow, codec.call_of_tree(tree), names)


def _copied(
    store: Store, state: RunState, source: list[Entry], first_new: StepState | None
) -> Iterator[NewEntry]:
    """Yield what the fork takes over: what is completed whole, the rest up to the new step."""
    end = first_new.started.seq if first_new is not None else state.seq + 1
    completed = {
        step.number
        for step in state.steps.values()
        if step.completed is not None and step is not first_new
    }
    over = {
        identity
        for identity, entry in state.answers.items()
        if entry.seq < end and facts_of(entry).get("how") != "timeout"
    }
    for entry in effective_entries(source):
        match entry.kind:
            case EntryKind.ATTEMPT_STARTED | EntryKind.ATTEMPT_FAILED | EntryKind.STEP_COMPLETED:
                wanted = entry.step in completed
            case EntryKind.CHILD_STARTED:
                wanted = _has_succeeded(store, str(facts_of(entry).get("run_id")))
            case EntryKind.WAIT_STARTED | EntryKind.WAIT_ENDED:
                wanted = entry.identity in over  # what is still asked is asked again
            case _:
                wanted = entry.kind in _NOTES and entry.seq < end
        if wanted:
            yield _copy_of(store, entry)


def _has_succeeded(store: Store, run_id: str) -> bool:
    record = store.run(run_id)
    return record is not None and record.status == runs.SUCCESS


def _copy_of(store: Store, entry: Entry) -> NewEntry:
    data = store.load(entry)
    value = None if data is None or entry.sha256 is None else codec.Encoded(data, entry.sha256)
    facts = facts_of(entry)
    return NewEntry(
        EntryKind(entry.kind),
        entry.step,
        entry.attempt,
        entry.facts,
        value,
        f"{facts.get('persona', '')}/{facts.get('name', '')}",
        entry.identity,
        entry.at,
    )
