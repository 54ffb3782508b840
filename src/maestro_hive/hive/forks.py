"""A run begun from another: what that one has kept is kept here too, except what shall be new."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from maestro_hive.hive import run_entries as entries
from maestro_hive.hive.orders import step_of
from maestro_hive.hive.run_reading import find_run
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import ConfigurationError, FencedError
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

#: What belongs to the whole run, and is taken as it was before the step that shall be new.
_UP_TO_THERE = (
    EntryKind.MEMORY_SAVED,
    EntryKind.HISTORY_ADDED,
    EntryKind.WAIT_BEGUN,
    EntryKind.WAIT_ENDED,
)


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
    by name. Tokens that the other run spent are not counted again.
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
    """Return a run's input with some arguments replaced, by the names its workflow has for them."""
    given = entries.read_input(begun, store.load)
    names = entries.parameters_of(begun)
    unknown = sorted(changed.keys() - set(names)) if "**" not in names else []
    if unknown:
        raise ConfigurationError(
            f"the workflow {given.workflow!r} of run {run_id!r} has no parameter"
            f" {', '.join(unknown)}; it has: {', '.join(names) or 'none'}"
        )
    left = dict(changed)
    args = [left.pop(name, value) for name, value in zip(names, given.args, strict=False)]
    args += given.args[len(names) :]
    kwargs = {**given.kwargs, **left}
    return entries.make_input(given.workflow, tuple(args), kwargs, names)


def _copied(
    store: Store, state: RunState, source: list[Entry], anew: StepState | None
) -> Iterator[NewEntry]:
    """Yield what is kept of the source: what is finished whole, the rest up to the new step."""
    end = anew.begun.seq if anew is not None else state.seq + 1
    kept = {
        step.number for step in state.steps.values() if step.kept is not None and step is not anew
    }
    for entry in that_count(source):
        match entry.kind:
            case EntryKind.ATTEMPT_BEGUN | EntryKind.ATTEMPT_FAILED | EntryKind.STEP_KEPT:
                wanted = entry.step in kept
            case EntryKind.CHILD_BEGUN:
                wanted = _has_succeeded(store, str(facts_of(entry).get("run_id")))
            case _:
                wanted = entry.kind in _UP_TO_THERE and entry.seq < end
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
