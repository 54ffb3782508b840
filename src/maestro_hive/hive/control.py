"""Run control: retry and fork a run from outside.

Each function is durable when it returns, and needs the store alone, so the command line can do the
same as a program, without the program's code.
"""

from __future__ import annotations

import secrets
from itertools import takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from maestro_hive.engine.copies import budget_of
from maestro_hive.engine.open_run import append_entries
from maestro_hive.hive import runs
from maestro_hive.hive.cancelling import children_of, leased
from maestro_hive.hive.dispatching import recorded_dispatch
from maestro_hive.hive.inbox import Inbox
from maestro_hive.hive.runs import find_run, read_run
from maestro_hive.hive.typed_arguments import stored_argument
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import ConfigurationError, CorruptionError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.budgets import RunBudget
from maestro_hive.maestro.state.projections import (
    asked_after_retry,
    effective_entries,
    facts_of,
    find_step,
    fold,
    readable,
)
from maestro_hive.maestro.state.records import EntryKind, NewEntry
from maestro_hive.maestro.state.views import run_status

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from maestro_hive.hive.functions import WorkflowFunction
    from maestro_hive.hive.hive import Hive
    from maestro_hive.hive.runs import Input
    from maestro_hive.maestro.state.projections import Load, RunState, StepState
    from maestro_hive.maestro.state.records import Entry, RunRecord
    from maestro_hive.maestro.state.store import Store
    from maestro_hive.maestro.state.strict_json import Json

#: Returns the numbers of steps that a fork is made without.
StepsLeftOut: TypeAlias = "Callable[[RunState, Load], Collection[int]]"
_PENDING = "pending"


# --- retry ---------------------------------------------------------------------------------------


def retry(store: Store, run_id: str, step: str | int | None = None) -> None:
    """Clear the failures that a run and its children failed by, or those of one step alone.

    Completed steps stay completed, and so do failures that the workflow caught: it takes the same
    branches again. Where it is not known what it failed by, all failures are cleared. With ``step``
    (a name, ``name#2`` or a number), the failures of all other steps stay recorded. The run
    continues when it is resumed.
    """
    find_run(store, run_id)
    with leased(store, run_id) as (lease, state):
        if run_status(state) == runs.SUCCESS:
            raise ConfigurationError(f"run {run_id!r} has succeeded, so there is nothing to retry")
        facts: dict[str, Any] = {}
        identity = None
        if step is not None:
            identity = _failed_step(state, run_id, step)
            facts["run"] = True  # the end of the run is cleared too
        elif state.ended is not None:
            facts["only"] = facts_of(state.ended).get("failed")
        for child in _failed_children(store, state, facts.get("only")) if identity is None else ():
            retry(store, child.name)
        facts = {name: value for name, value in facts.items() if value}
        Inbox(store).clear(run_id, runs.FAILED)  # a request to cancel is cleared too
        retried = NewEntry(
            EntryKind.RETRIED,
            facts=codec.dump_canonical(facts) if facts else None,
            identity=identity,
        )
        status = None
        if state.started is not None:
            status = runs.WAITING if asked_after_retry(state) else _PENDING
        append_entries(store, lease, [retried], status, dispatch=recorded_dispatch(state))


def _failed_children(store: Store, state: RunState, only: list[str] | None) -> list[RunRecord]:
    """Return the children that did not succeed; of these only those that a run failed by."""
    by_name = {str(facts_of(each)["run_id"]): key.hex() for key, each in state.children.items()}
    return [
        child
        for child in children_of(store, state)
        if child.status != runs.SUCCESS and (not only or by_name.get(child.name) in only)
    ]


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


# --- fork ---------------------------------------------------------------------------------------


#: The entries that are copied as they were before the step that is executed again.
_BEFORE = (EntryKind.MEMORY_SAVED, EntryKind.HISTORY_APPENDED, EntryKind.VALUE_RECORDED)


def fork(
    store: Store,
    run_id: str,
    *,
    from_step: str | int | None = None,
    changed: dict[str, Any] | None = None,
    in_words: dict[str, str] | None = None,
    new_id: str | None = None,
    known: Mapping[str, WorkflowFunction[..., Any]] = MappingProxyType({}),
    again: Collection[str] = (),
    without: StepsLeftOut = lambda _state, _load: (),
) -> str:
    """Create a run with the completed steps of another one, and return its id; it is not executed yet.

    The step ``from_step`` is executed again, and so are all steps with a name in ``again``, and those
    whose numbers ``without`` returns. Steps before it stay completed, and those after it too: they
    run again exactly when their input changes. ``changed`` replaces arguments of the workflow
    by name, and ``in_words`` by typed texts: the parameter's type decides what they mean. ``known``
    has the parameters of a workflow where they are not recorded: that was enqueued by its name.

    Questions after the step are asked again, and children that have not succeeded start again; of
    those that have, it takes the results, and needs neither them nor the other run any more. The
    tokens of the other run are not counted, and a limit of its own is the fork's, too. A fork is
    recorded as a whole or not at all.
    """
    record = find_run(store, run_id)
    source = store.entries(record.id)
    state = fold(source, store.load)
    if state.started is None:
        raise ConfigurationError(
            f"run {run_id!r} was not started by a workflow, so it cannot be forked"
        )
    first_new = None if from_step is None else step_of(state, run_id, from_step)
    trees = {
        name: codec.parse(codec.encode(value, name).data, name)
        for name, value in (changed or {}).items()
    }
    with readable(run_id):
        declared = _declared(store, state.started, known)
        given = _changed_input(run_id, state.started, store, declared, trees, in_words or {})
    name = new_id or f"{run_id[:110]}-fork-{secrets.token_hex(4)}"
    files.check_identifier(name, "run id")
    first = runs.started(
        given,
        forked_from=run_id,
        from_step=None if first_new is None else first_new.name or first_new.number,
    )
    left_out = frozenset(without(state, store.load))
    copied = [first, *_copied(store, state, source, first_new, again, left_out)]
    budget = budget_of(store, run_id)
    limit = None if budget is None or budget.limit is None else RunBudget(budget.limit)
    _create(store, name, record.workflow, copied, limit)
    return name


def fork_without(
    hive: Hive,
    run_id: str,
    names: Collection[str],
    without: StepsLeftOut,
    *,
    new_id: str,
    **changed: Any,
) -> None:
    """Fork a run without the steps of these names, and those that ``without`` returns."""
    fork(
        hive._open(),  # noqa: SLF001 - of this package
        run_id,
        changed=changed,
        new_id=new_id,
        known=hive._workflows,  # noqa: SLF001
        again=names,
        without=without,
    )


def executed_steps(hive: Hive, run_id: str) -> set[str]:
    """Return the names of the steps that a run has started."""
    return {step.name for step in read_run(hive._open(), run_id).steps.values()}  # noqa: SLF001


def record_start(
    hive: Hive, workflow: WorkflowFunction[..., Any], run_id: str, **arguments: Any
) -> None:
    """Create a run with its arguments, durably; it is not executed yet."""
    files.check_identifier(run_id, "run id")
    given = hive._input(workflow, (), arguments)  # noqa: SLF001 - of this package
    _create(hive._open(), run_id, given.workflow, [runs.started(given)], None)  # noqa: SLF001


def _create(
    store: Store, name: str, workflow: str, entries: list[NewEntry], budget: RunBudget | None
) -> None:
    """Create a run with these entries, in one transaction; raise if there is one of that name."""
    known = store.run(name)  # an executor may have listed it without entries
    taken = ConfigurationError(f"there is a run {name!r} already; give this one another id")
    if known is not None and (store.entries(known.id) or name in store.run_leases()):
        raise taken
    lease = store.acquire_run(name, workflow, entries, _PENDING, budget=budget)
    try:
        if not lease.created:
            raise taken
        append_entries(store, lease, ())  # with an fsync
    finally:
        store.release_run(lease)


#: How many runs of a workflow are looked at for its parameters.
_LOOKED_AT = 20


class _Declared(NamedTuple):
    """The parameters of a workflow, and their types."""

    names: tuple[str, ...]
    types: Mapping[str, Json]


def _declared(
    store: Store, started: Entry, known: Mapping[str, WorkflowFunction[..., Any]]
) -> _Declared | None:
    """Return a workflow's parameters, as recorded; None if they are not, and no other run has them.

    A run that is enqueued by the name of its workflow has no more than the arguments it was given.
    """
    facts = facts_of(started)
    recorded = _Declared(runs.parameters_of(started), runs.types_of(started))
    if recorded.names or not {"queue", "forked_from"} & facts.keys():
        return recorded
    workflow = str(facts.get("workflow", ""))
    if workflow in known:
        return _Declared(known[workflow].parameters, known[workflow].types)
    for record in store.runs(workflow=workflow, limit=_LOOKED_AT):
        for first in store.entries(record.id, up_to=1):
            if runs.parameters_of(first):
                return _Declared(runs.parameters_of(first), runs.types_of(first))
    return None


def _changed_input(
    run_id: str,
    started: Entry,
    store: Store,
    declared: _Declared | None,
    changed: dict[str, Json],
    in_words: dict[str, str],
) -> Input:
    """Return a run's input with some arguments replaced, by the workflow's parameter names.

    On plain JSON: a fork does not need the classes of the other arguments.
    """
    workflow = str(facts_of(started).get("workflow", ""))
    data = store.load(started)
    tree = codec.parse(data or b"{}", "input", depth=codec.DOCUMENT_DEPTH)
    if not isinstance(tree, dict) or not {"args", "kwargs"} <= tree.keys():
        raise CorruptionError(f"run {run_id!r} has no recorded input")
    names, types = declared or _Declared((), {})
    settable = [name for name in names if not name.startswith("*")]
    unknown = sorted({*changed, *in_words} - set(settable))
    if declared is None:  # a worker says whether they fit
        if tree["args"] and set(unknown) - tree["kwargs"].keys():
            raise ConfigurationError(
                f"run {run_id!r} was enqueued by the name of its workflow, with arguments by place;"
                " for which parameters is not known here. Enqueue another one with all of them by"
                f" name (`maestro enqueue {workflow} NAME=VALUE`), or fork it in its program:"
                " hive.fork(run_id, name=value)"
            )
    elif unknown and not any(name.startswith("**") for name in names):
        raise ConfigurationError(
            f"the workflow {workflow!r} of run {run_id!r} has no parameter {', '.join(unknown)};"
            f" it has: {', '.join(settable) or 'none'}"
        )
    by_place = list(takewhile(lambda name: not name.startswith("*"), names))[: len(tree["args"])]
    before = {**dict(zip(by_place, tree["args"], strict=False)), **tree["kwargs"]}
    for name, text in in_words.items():
        changed[name] = _typed_argument(
            f"the parameter {name!r} of {workflow}", text, types.get(name), before.get(name)
        )
    for name, plain in changed.items():
        if name in by_place:
            tree["args"][by_place.index(name)] = plain
        else:
            tree["kwargs"][name] = plain
    return runs.input_of(workflow, codec.call_of_tree(tree), names, types)


def _typed_argument(path: str, text: str, shape: Json, before: Json) -> Json:
    """Return an argument as it is stored, by the type of its parameter; raise if it is none of it."""
    if not shape and isinstance(before, dict) and codec.TAG in before:  # of a type not recorded
        shape = {"unknown": f"{before[codec.TAG]} {before.get('t', '')}".strip()}
    way_out = "fork the run in its program: hive.fork(run_id, name=value)"
    return stored_argument(path, text, shape, way_out)


def _copied(
    store: Store,
    state: RunState,
    source: list[Entry],
    first_new: StepState | None,
    again: Collection[str],
    left_out: Collection[int],
) -> Iterator[NewEntry]:
    """Yield the entries to copy: those of completed steps, and others up to the step to execute again."""
    end = first_new.started.seq if first_new is not None else state.seq + 1
    completed = {
        step.number
        for step in state.steps.values()
        if step.completed is not None
        and step is not first_new
        and step.name not in again
        and step.number not in left_out
    }
    over = {
        identity
        for identity, entry in state.answers.items()
        if entry.seq < end
        and facts_of(entry).get("how") in ("over", "answered")
        and facts_of(entry).get("name") not in again
    }
    children = _child_results(store, state)
    for entry in effective_entries(source):
        match entry.kind:
            case (
                EntryKind.ATTEMPT_STARTED
                | EntryKind.ATTEMPT_FAILED
                | EntryKind.STEP_COMPLETED
                | EntryKind.REPAIR_TRIED
                | EntryKind.REPAIR_JUDGED
            ):
                wanted = entry.step in completed
            case EntryKind.ARGUMENTS_ADDED:
                wanted = True
            case EntryKind.CHILD_STARTED | EntryKind.CHILD_ENDED:
                wanted = False
                if entry.identity in children:
                    yield _child_copy(entry, children)
            case EntryKind.WAIT_STARTED | EntryKind.WAIT_ENDED:
                wanted = entry.identity in over  # an open question is asked again
            case _:
                wanted = entry.kind in _BEFORE and entry.seq < end
        if wanted:
            yield _copy_of(store, entry)
    for identity in children.keys() - state.outcomes.keys():  # its parent was killed before that
        facts = facts_of(state.children[identity])
        yield runs.child_copied(
            identity, str(facts["run_id"]), facts["workflow"], children[identity]
        )


def _child_results(store: Store, state: RunState) -> dict[bytes, codec.Encoded]:
    """Return the results of the children that succeeded, by the identity of their calls."""
    found: dict[bytes, codec.Encoded] = {}
    for identity, child in state.children.items():
        ended = state.outcomes.get(identity)
        if ended is None or ended.sha256 is None:  # of a child that was not copied itself
            run = runs.ended_state(store, str(facts_of(child).get("run_id")))
            ended = None if run is None or run_status(run) != runs.SUCCESS else run.ended
        data = None if ended is None else store.load(ended)
        if ended is not None and ended.sha256 is not None and data is not None:
            found[identity] = codec.Encoded(data, ended.sha256)
    return found


def _child_copy(entry: Entry, results: dict[bytes, codec.Encoded]) -> NewEntry:
    """Return the start of a child as one of another run, or its end with its result."""
    assert entry.identity is not None
    facts = codec.dump_canonical({**facts_of(entry), "copied": True})
    value = results[entry.identity] if entry.kind == EntryKind.CHILD_ENDED else None
    return NewEntry(
        EntryKind(entry.kind), facts=facts, value=value, identity=entry.identity, at=entry.at
    )


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
