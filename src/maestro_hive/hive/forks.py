"""A run begun from another: what that one has kept is kept here too, except what shall be new."""

from __future__ import annotations

import secrets
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from maestro_hive.hive import run_entries as entries
from maestro_hive.hive.orders import step_of
from maestro_hive.hive.run_reading import find_run
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import ConfigurationError, CorruptionError, FencedError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.records import Entry, EntryKind, NewEntry
from maestro_hive.maestro.state.run_document import that_count
from maestro_hive.maestro.state.run_state import facts_of, fold
from maestro_hive.maestro.state.store import Append

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maestro_hive.hive.run_entries import Input
    from maestro_hive.maestro.state.run_state import RunState, StepState
    from maestro_hive.maestro.state.store import Store

#: What belongs to a persona, and is taken as it was before the step that shall be new.
_NOTES = (EntryKind.MEMORY_SAVED, EntryKind.HISTORY_ADDED)


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
    if state.begun is None:
        raise ConfigurationError(
            f"run {run_id!r} was not begun by a workflow, so there is nothing to fork it with"
        )
    anew = None if from_step is None else step_of(state, run_id, from_step)
    given = _changed_input(run_id, state.begun, store, changed or {})
    name = new_id or f"{run_id[:110]}-fork-{secrets.token_hex(4)}"
    files.check_identifier(name, "run id")
    first = entries.begun(
        given, forked_from=run_id, from_step=None if anew is None else anew.name or anew.number
    )
    copied = [first, *_copied(store, state, source, anew)]
    if _is_there(store, name):
        raise ConfigurationError(f"there is a run {name!r} already; fork to another name")
    hold = store.hold_run(name, record.workflow)
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
    """Tell whether a run has begun; a kill may have left a name with nothing behind it."""
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
    end = anew.begun.seq if anew is not None else state.seq + 1
    kept = {
        step.number for step in state.steps.values() if step.kept is not None and step is not anew
    }
    over = {
        identity
        for identity, entry in state.answers.items()
        if entry.seq < end and facts_of(entry).get("how") != "timeout"
    }
    for entry in that_count(source):
        match entry.kind:
            case EntryKind.ATTEMPT_BEGUN | EntryKind.ATTEMPT_FAILED | EntryKind.STEP_KEPT:
                wanted = entry.step in kept
            case EntryKind.CHILD_BEGUN:
                wanted = _has_succeeded(store, str(facts_of(entry).get("run_id")))
            case EntryKind.WAIT_BEGUN | EntryKind.WAIT_ENDED:
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
