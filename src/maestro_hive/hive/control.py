"""Run control: answer, retry, cancel and fork a run from outside.

Each function is durable when it returns, and needs the store alone, so the command line can do the
same as a program, without the program's code.
"""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from maestro_hive.engine.open_run import append_entries
from maestro_hive.hive import answer_types, runs
from maestro_hive.hive.inbox import Answer, Inbox
from maestro_hive.hive.runner import active_here
from maestro_hive.hive.runs import find_run, read_run
from maestro_hive.hive.waits import fitting
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import ConfigurationError, CorruptionError, RunLeasedError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.projections import effective_entries, facts_of, find_step, fold
from maestro_hive.maestro.state.records import EntryKind, NewEntry
from maestro_hive.maestro.state.views import OVER, open_waits, run_status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maestro_hive.hive.runs import Input
    from maestro_hive.maestro.state.projections import RunState, StepState
    from maestro_hive.maestro.state.records import Entry, RunRecord
    from maestro_hive.maestro.state.store import RunLease, Store

_PENDING = "pending"


# --- answers --------------------------------------------------------------------------------------


def answer(
    store: Store, run_id: str, name: str, value: Any, *, by: str | None = None, early: bool = False
) -> None:
    """Answer a question of a run; with ``early``, also one that it has not asked yet.

    A question takes one answer. An answer without the required shape is refused here, where it can
    be corrected.
    """
    question = find_question(store, run_id, name, early=early)
    _post(store, run_id, question, Answer(name=name, value=fitting(question, name, value), by=by))


def answer_in_words(
    store: Store, run_id: str, name: str, text: str, *, by: str | None = None, early: bool = False
) -> None:
    """Answer a question by a typed text: the question's type decides what ``yes`` means."""
    question = find_question(store, run_id, name, early=early)
    if question is None:
        _post(store, run_id, None, Answer(name=name, value=text, by=by, as_text=True))
        return
    shape = facts_of(question).get("shape") or {}
    value = answer_types.parse_words(shape, text, f"the answer to {name!r}")
    _post(store, run_id, question, Answer(name=name, value=value, by=by))


def _post(store: Store, run_id: str, question: Entry | None, given: Answer) -> None:
    identity = question.identity if question is not None else None
    message = replace(given, question=identity.hex() if identity is not None else None)
    Inbox(store).answer(run_id, message)


def find_question(store: Store, run_id: str, name: str, *, early: bool) -> Entry | None:
    """Return the open question of this name; None if there is none yet and ``early`` allows it."""
    state = read_run(store, run_id)
    if state.ended is not None:
        raise ConfigurationError(
            f"run {run_id!r} has ended ({run_status(state)}), and takes no answer"
        )
    answered = {each.question for each in Inbox(store).messages(run_id).answers}
    questions = [each for each in open_waits(state) if facts_of(each).get("name") == name]
    left = [each for each in questions if each.identity and each.identity.hex() not in answered]
    if left or (early and not questions):
        return left[0] if left else None
    if questions:
        return questions[0]  # it has an answer: posting another one is an error
    raise ConfigurationError(
        f"run {run_id!r} does not wait for {name!r}{_open_questions(state)};"
        " to answer before the question is asked, use early=True (--early)"
    )


def _open_questions(state: RunState) -> str:
    names = [str(facts_of(each).get("name")) for each in open_waits(state)]
    return f"; it waits for {', '.join(map(repr, names))}" if names else ", nor for anything else"


# --- retry ---------------------------------------------------------------------------------------


def retry(store: Store, run_id: str, step: str | int | None = None) -> None:
    """Clear the recorded failures of a run and its children, or of one step alone.

    Completed steps stay completed. With ``step`` (a name, ``name#2`` or a number), the failures of
    all other steps stay recorded. The run continues when it is resumed.
    """
    find_run(store, run_id)
    with _leased(store, run_id) as (lease, state):
        if run_status(state) == runs.SUCCESS:
            raise ConfigurationError(f"run {run_id!r} has succeeded, so there is nothing to retry")
        facts: dict[str, Any] = {}
        identity = None
        if step is not None:
            identity = _failed_step(state, run_id, step)
            facts["run"] = True  # the end of the run is cleared too
        for child in _children(store, state) if identity is None else ():
            if child.status != runs.SUCCESS:
                retry(store, child.name)
        Inbox(store).clear(run_id, runs.FAILED)  # a request to cancel is cleared too
        retried = NewEntry(
            EntryKind.RETRIED,
            facts=codec.dump_canonical(facts) if facts else None,
            identity=identity,
        )
        status = _PENDING if state.started is not None else None
        append_entries(store, lease, [retried], status)


def _failed_step(state: RunState, run_id: str, wanted: str | int) -> bytes | None:
    found = step_of(state, run_id, wanted)
    if found.completed is not None:
        raise ConfigurationError(
            f"step {wanted!r} of run {run_id!r} is completed, so there is nothing to retry"
        )
    return found.identity


def step_of(state: RunState, run_id: str, wanted: str | int) -> StepState:
    """Return a step by its number, its name, or ``name#2``; raise if there is none."""
    found = find_step(state, wanted)
    if found is None:
        names = ", ".join(dict.fromkeys(step.name for step in state.steps.values())) or "none"
        raise ConfigurationError(f"run {run_id!r} has no step {wanted!r}; it has: {names}")
    return found


# --- cancel ---------------------------------------------------------------------------------------


def cancel(store: Store, run_id: str, reason: str = "") -> bool:
    """Cancel a run and its children; return False if it has ended already.

    If a process executes the run, it gets a message and records the end; otherwise it is recorded
    here.
    """
    if active_here(store, run_id) is not None:
        Inbox(store).cancel(run_id, reason)
        return True
    record = find_run(store, run_id)
    if record.status in OVER:
        return False
    if not record.workflow and read_run(store, run_id).started is None:
        raise ConfigurationError(
            f"run {run_id!r} was not started by a workflow; stop the program that executes it"
        )
    try:
        with _leased(store, run_id) as (lease, state):
            if state.ended is not None:  # it ended meanwhile
                return False
            # The children first: after a kill in between, the same request cancels the rest.
            for child in _children(store, state):
                cancel(store, child.name, reason)
            ended = runs.ended(runs.CANCELLED, reason=reason or None)
            append_entries(store, lease, [ended], runs.CANCELLED)
            Inbox(store).clear(run_id, runs.CANCELLED)
    except RunLeasedError:
        Inbox(store).cancel(run_id, reason)
    return True


def _children(store: Store, state: RunState) -> list[RunRecord]:
    """Return the children of a run that were started, and not purged."""
    found = (store.run(str(facts_of(each).get("run_id"))) for each in state.children.values())
    return [record for record in found if record is not None]


# --- writing to a run that is not executed ---------------------------------------------------------


@contextmanager
def _leased(store: Store, run_id: str) -> Iterator[tuple[RunLease, RunState]]:
    """Lease a run that no process executes; ``RunLeasedError`` names the one that does."""
    lease = store.acquire_run(run_id)
    try:
        if lease.users > 1:
            holder = lease.lease.holder
            raise RunLeasedError(run_id, host=holder.host, pid=holder.pid, since=holder.since)
        yield lease, fold(store.entries(lease.run), store.load)
    finally:
        store.release_run(lease)


# --- fork ---------------------------------------------------------------------------------------


#: The entries of a persona's memory, copied as they were before the step that is executed again.
_MEMORY = (EntryKind.MEMORY_SAVED, EntryKind.HISTORY_APPENDED)


def fork(
    store: Store,
    run_id: str,
    *,
    from_step: str | int | None = None,
    changed: dict[str, Any] | None = None,
    new_id: str | None = None,
) -> str:
    """Create a run with the completed steps of another one, and return its id; it is not executed yet.

    The step ``from_step`` is executed again. Steps before it stay completed, and those after it too:
    they run again exactly when their input changes. ``changed`` replaces arguments of the workflow
    by name. Questions after the step are asked again, and children that have not succeeded start
    again. The tokens of the other run are not counted.
    """
    record = find_run(store, run_id)
    source = store.entries(record.id)
    state = fold(source, store.load)
    if state.started is None:
        raise ConfigurationError(
            f"run {run_id!r} was not started by a workflow, so it cannot be forked"
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
    known = store.run(name)  # after a kill, a run may be listed without entries
    taken = ConfigurationError(f"there is a run {name!r} already; give the fork another id")
    if known is not None and store.entries(known.id):
        raise taken
    lease = store.acquire_run(name, record.workflow)
    try:
        if lease.seq or lease.users > 1:
            raise taken
        append_entries(store, lease, copied, _PENDING)
    finally:
        store.release_run(lease)
    return name


def _changed_input(run_id: str, started: Entry, store: Store, changed: dict[str, Any]) -> Input:
    """Return a run's input with some arguments replaced, by the workflow's parameter names.

    On plain JSON: a fork does not need the classes of the other arguments.
    """
    workflow, names = str(facts_of(started).get("workflow", "")), runs.parameters_of(started)
    data = store.load(started)
    tree = codec.parse(data or b"{}", "input", depth=codec.DOCUMENT_DEPTH)
    if not isinstance(tree, dict) or not {"args", "kwargs"} <= tree.keys():
        raise CorruptionError(f"run {run_id!r} has no recorded input")
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
    """Yield the entries to copy: those of completed steps, and others up to the step to execute again."""
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
                child = store.run(str(facts_of(entry).get("run_id")))
                wanted = child is not None and child.status == runs.SUCCESS
            case EntryKind.WAIT_STARTED | EntryKind.WAIT_ENDED:
                wanted = entry.identity in over  # an open question is asked again
            case _:
                wanted = entry.kind in _MEMORY and entry.seq < end
        if wanted:
            yield _copy_of(store, entry)


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
