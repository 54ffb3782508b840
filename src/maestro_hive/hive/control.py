"""What may be asked of a run from outside: an answer, a retry, an end, a fork.

All of it is durable when it returns, and needs the store alone: so the command line can do what a
program can, without its code.
"""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from maestro_hive.hive import active_runs as under_way
from maestro_hive.hive import answer_types as shapes
from maestro_hive.hive import runs as entries
from maestro_hive.hive import watch
from maestro_hive.hive.inbox import Answer, Inbox
from maestro_hive.hive.runs import find_run, read_run
from maestro_hive.hive.waits import fitting
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import (
    ConfigurationError,
    CorruptionError,
    FencedError,
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
    where it can be mended.
    """
    question = find_question(store, run_id, name, early=early)
    _post(store, run_id, question, Answer(name=name, value=fitting(question, name, value), by=by))


def answer_in_words(
    store: Store, run_id: str, name: str, text: str, *, by: str | None = None, early: bool = False
) -> None:
    """Answer as somebody types it: ``yes`` is a text to one question, and true to another."""
    question = find_question(store, run_id, name, early=early)
    if question is None:
        _post(store, run_id, None, Answer(name=name, value=text, by=by, words=True))
        return
    shape = facts_of(question).get("shape") or {}
    value = shapes.parse_words(shape, text, f"the answer to {name!r}")
    _post(store, run_id, question, Answer(name=name, value=value, by=by))


def _post(store: Store, run_id: str, question: Entry | None, given: Answer) -> None:
    asked = question.identity if question is not None else None
    message = replace(given, question=asked.hex() if asked is not None else None)
    Inbox(store).answer(run_id, message)
    watch.check_soon(store)


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
        return asked[0]  # has its answer, and whoever posts another is told so
    raise ConfigurationError(
        f"run {run_id!r} does not wait for {name!r}{_what_instead(state)};"
        " an answer for later is given with early (--early)"
    )


def _what_instead(state: RunState) -> str:
    names = [str(facts_of(each).get("name")) for each in open_waits(state)]
    return f"; it waits for {', '.join(map(repr, names))}" if names else ", nor for anything else"


# --- trying again ---------------------------------------------------------------------------------


def retry(store: Store, run_id: str, step: str | int | None = None) -> None:
    """Let what failed be tried again, in the run and its children, or one step alone.

    What is kept stays kept. The run goes on when somebody resumes it.
    """
    find_run(store, run_id)
    with _alone_with(store, run_id) as run:
        state = run.state
        if run_status(state) == entries.SUCCESS:
            raise ConfigurationError(f"run {run_id!r} has succeeded: there is nothing to retry")
        identity = None if step is None else step_of(state, run_id, step).identity
        if identity is not None and state.ended is not None:
            raise ConfigurationError(
                f"run {run_id!r} is over ({run_status(state)}): retry the whole of it"
            )
        for child in state.children.values() if identity is None else ():
            _retry_child(store, str(facts_of(child).get("run_id")))
        Inbox(store).settle(run_id, entries.FAILED)  # and with it a request to cancel
        retried = NewEntry(EntryKind.RETRIED, identity=identity)
        run.append(retried, _PENDING if state.started is not None else None)


def _retry_child(store: Store, run_id: str) -> None:
    record = store.run(run_id)
    if record is not None and record.status != entries.SUCCESS:
        retry(store, run_id)


def step_of(state: RunState, run_id: str, wanted: str | int) -> StepState:
    """Return a step by its number, its name, or ``name#2``; raise if there is none."""
    found = find_step(state, wanted)
    if found is None:
        names = ", ".join(dict.fromkeys(step.name for step in state.steps.values())) or "none"
        raise ConfigurationError(f"run {run_id!r} has no step {wanted!r}; it has: {names}")
    return found


# --- an end ---------------------------------------------------------------------------------------


def cancel(store: Store, run_id: str, reason: str = "") -> bool:
    """End a run and what it started; False if it is over already.

    A process that executes it is asked to, and will record it; otherwise it is recorded here.
    """
    if under_way.here(store, run_id) is not None:
        Inbox(store).cancel(run_id, reason)
        watch.check_soon(store)
        return True
    record = find_run(store, run_id)
    if record.status in OVER:
        return False
    if not record.workflow and read_run(store, run_id).started is None:
        raise ConfigurationError(
            f"run {run_id!r} is no workflow's: stop the program that executes it, and it ends"
        )
    try:
        with _alone_with(store, run_id) as run:
            if run.state.ended is not None:  # it came to its end just now
                return False
            for child in run.state.children.values():  # first: who is killed here can ask again
                _cancel_child(store, str(facts_of(child).get("run_id")), reason)
            ended = entries.ended(entries.CANCELLED, reason=reason or None)
            run.append(ended, entries.CANCELLED)
            Inbox(store).settle(run_id, entries.CANCELLED)
    except RunLeasedError:
        Inbox(store).cancel(run_id, reason)
        watch.check_soon(store)
    return True


def _cancel_child(store: Store, run_id: str, reason: str) -> None:
    if store.run(run_id) is not None:
        cancel(store, run_id, reason)


# --- writing to a run that nobody executes ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Taken:
    """A run that was taken to write to it, and what it had come to by then."""

    store: Store
    hold: RunLease
    state: RunState

    def append(self, entry: NewEntry, status: str | None) -> None:
        """Record an entry, durably."""
        (written,) = self.store.append([Append(self.hold, [entry], status)])
        if isinstance(written, FencedError):
            raise written


@contextmanager
def _alone_with(store: Store, run_id: str) -> Iterator[_Taken]:
    """Take a run that nobody executes; ``RunLeasedError`` says who does."""
    hold = store.acquire_run(run_id)
    try:
        if hold.users > 1:
            holder = hold.lease.holder
            raise RunLeasedError(run_id, host=holder.host, pid=holder.pid, since=holder.since)
        yield _Taken(store, hold, fold(store.entries(hold.run), store.load))
    finally:
        store.release_run(hold)


# --- forks ---


#: What belongs to a persona, and is taken as it was before the step that shall be new.
_NOTES = (EntryKind.MEMORY_SAVED, EntryKind.HISTORY_APPENDED)


def fork(
    store: Store,
    run_id: str,
    *,
    from_step: str | int | None = None,
    changed: dict[str, Any] | None = None,
    new_id: str | None = None,
) -> str:
    """Begin a new run with what another has kept, and return its name; nothing is executed yet.

    The step ``from_step`` is executed anew. Steps before it are kept, and those after it as ever:
    they run again exactly when their input changes. ``changed`` replaces arguments of the workflow
    by name. Questions after the step are asked again, and children that have not succeeded begin
    anew. Tokens that the other run spent are not counted again.
    """
    record = find_run(store, run_id)
    source = store.entries(record.id)
    state = fold(source, store.load)
    if state.started is None:
        raise ConfigurationError(
            f"run {run_id!r} was not begun by a workflow, so there is nothing to fork it with"
        )
    anew = None if from_step is None else step_of(state, run_id, from_step)
    given = _changed_input(run_id, state.started, store, changed or {})
    name = new_id or f"{run_id[:110]}-fork-{secrets.token_hex(4)}"
    files.check_identifier(name, "run id")
    first = entries.started(
        given, forked_from=run_id, from_step=None if anew is None else anew.name or anew.number
    )
    copied = [first, *_copied(store, state, source, anew)]
    if _is_there(store, name):
        raise ConfigurationError(f"there is a run {name!r} already; fork to another name")
    hold = store.acquire_run(name, record.workflow)
    try:
        if hold.seq or hold.users > 1:
            raise ConfigurationError(f"there is a run {name!r} already; fork to another name")
        (written,) = store.append([Append(hold, copied, "pending")])
        if isinstance(written, FencedError):
            raise written
    finally:
        store.release_run(hold)
    return name


def _is_there(store: Store, run_id: str) -> bool:
    """Return whether a run has begun; a kill may have left a name with nothing behind it."""
    record = store.run(run_id)
    return record is not None and bool(store.entries(record.id))


def _changed_input(run_id: str, begun: Entry, store: Store, changed: dict[str, Any]) -> Input:
    """Return a run's input with some arguments replaced, by the names its workflow has for them.

    As plain JSON: whoever forks need not have the classes of the others.
    """
    workflow, names = str(facts_of(begun).get("workflow", "")), entries.parameters_of(begun)
    data = store.load(begun)
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
    return entries.input_of(workflow, codec.encoded(codec.dump_canonical(tree)), names)


def _copied(
    store: Store, state: RunState, source: list[Entry], anew: StepState | None
) -> Iterator[NewEntry]:
    """Yield what is kept of the source: what is finished whole, the rest up to the new step."""
    end = anew.started.seq if anew is not None else state.seq + 1
    kept = {
        step.number
        for step in state.steps.values()
        if step.completed is not None and step is not anew
    }
    over = {
        identity
        for identity, entry in state.answers.items()
        if entry.seq < end and facts_of(entry).get("how") != "timeout"
    }
    for entry in effective_entries(source):
        match entry.kind:
            case EntryKind.ATTEMPT_STARTED | EntryKind.ATTEMPT_FAILED | EntryKind.STEP_COMPLETED:
                wanted = entry.step in kept
            case EntryKind.CHILD_STARTED:
                wanted = _has_succeeded(store, str(facts_of(entry).get("run_id")))
            case EntryKind.WAIT_STARTED | EntryKind.WAIT_ENDED:
                wanted = entry.identity in over  # what is still asked is asked anew
            case _:
                wanted = entry.kind in _NOTES and entry.seq < end
        if wanted:
            yield _again(store, entry)


def _has_succeeded(store: Store, run_id: str) -> bool:
    record = store.run(run_id)
    return record is not None and record.status == entries.SUCCESS


def _again(store: Store, entry: Entry) -> NewEntry:
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
