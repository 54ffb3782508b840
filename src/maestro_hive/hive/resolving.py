"""Settle an ambiguous step: one that may have had its effect, and asks a person (``on_ambiguous``).

A person says that it was completed, and with which result; or that it shall run again. That is
recorded for exactly this call, in one transaction: here, if no process has the run; otherwise it is a
message, which the process takes that resumes the run next.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from maestro_hive.engine.open_run import append_entries
from maestro_hive.hive import answer_types
from maestro_hive.hive.answers import plain
from maestro_hive.hive.cancelling import leased
from maestro_hive.hive.control import step_of
from maestro_hive.hive.inbox import Inbox, Messages, Resolution, changed_messages, check_text
from maestro_hive.hive.runs import LatestRun
from maestro_hive.kernel.errors import ConfigurationError, RunLeasedError
from maestro_hive.kernel.logs import get_log
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.projections import (
    facts_of,
    labels,
    outcome_status,
    readable,
    status_of,
)
from maestro_hive.maestro.state.records import EntryKind, NewEntry
from maestro_hive.maestro.state.views import ambiguous_steps, options_of, run_status, value_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.hive.active_run import ActiveRun
    from maestro_hive.maestro.state.projections import RunState, StepState
    from maestro_hive.maestro.state.records import Entry
    from maestro_hive.maestro.state.store import Store
    from maestro_hive.maestro.state.strict_json import Json

    Tree = Callable[[Json, str], Json]

logger = get_log(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A step that was settled; ``taken`` is false while that is a message to its process."""

    run_id: str
    step: int
    label: str
    rerun: bool
    taken: bool


# --- by who resolves it ---------------------------------------------------------------------------


def complete(
    store: Store, run_id: str, step: str | int, value: Any, *, by: str | None = None
) -> Resolved:
    """Record that an ambiguous step was completed with this result, of its declared type."""

    def made(shape: Json, path: str) -> Json:
        return result_tree(shape, value, path)

    return _settle(store, run_id, step, made, by)


def result_tree(shape: Json, value: Any, path: str) -> Json:
    """Return a result that a person gives as it is stored; raise if it has not the declared shape."""
    tree = codec.parse(codec.encode(value, path).data, path)
    if not shape or "unknown" in shape:
        return tree
    given = codec.parse(codec.encode(plain(value), path).data, path)
    made = answer_types.to_tree(shape, given, path)
    # An object is stored as it is: it may have more than the fields it is made of.
    return tree if isinstance(tree, dict) and codec.TAG in tree else made


def complete_in_words(
    store: Store, run_id: str, step: str | int, text: str, *, by: str | None = None
) -> Resolved:
    """Record that a step was completed; its declared type decides what the typed text means."""

    def made(shape: Json, path: str) -> Json:
        return result_tree_in_words(
            shape, text, path, "hive.resolve(run_id, step, completed=value)"
        )

    return _settle(store, run_id, step, made, by)


def result_tree_in_words(shape: Json, text: str, path: str, way_out: str) -> Json:
    """Return a typed result as it is stored; ``way_out`` gives one that cannot be typed."""
    if "unknown" in shape:
        raise ConfigurationError(
            f"{path} is a {shape['unknown']}, which cannot be typed as a text; give it in a program:"
            f" {way_out}"
        )
    return answer_types.to_tree(shape, answer_types.parse_words(shape, text, path), path)


def rerun(store: Store, run_id: str, step: str | int, *, by: str | None = None) -> Resolved:
    """Let an ambiguous step be executed again, when its run is resumed."""
    return _settle(store, run_id, step, None, by)


def _settle(
    store: Store, run_id: str, wanted: str | int, tree: Tree | None, by: str | None
) -> Resolved:
    if by is not None:
        check_text("by", by)
    run = LatestRun(store, run_id)
    step = find_ambiguous(store, run.state, run_id, wanted)
    label = labels(run.state)[step.number]
    with readable(run_id):
        value = None if tree is None else tree(_shape(step), f"the result of {label}")
    assert step.identity is not None  # or it could not be told from others
    given = Resolution(
        step=step.identity.hex(), attempt=step.last_attempt, rerun=tree is None, value=value, by=by
    )
    taken = _recorded(store, run_id, step.number, given)
    if not taken:
        _post(store, run, step.number, given)
    return Resolved(run_id=run_id, step=step.number, label=label, rerun=tree is None, taken=taken)


def _shape(step: StepState) -> Json:
    """Return the shape of a step's result; empty if it declares none."""
    starts = [entry for entry in step.log if entry.kind == EntryKind.ATTEMPT_STARTED]
    return facts_of((starts or [step.started])[-1]).get("returns") or {}


def _recorded(store: Store, run_id: str, number: int, given: Resolution) -> bool:
    """Record it by the run's lease; False if a process has that."""
    try:
        with leased(store, run_id) as (lease, state):
            step = find_ambiguous(store, state, run_id, number, held=False)
            append_entries(store, lease, [_entry(step, given)])
    except RunLeasedError:
        return False
    return True


def _post(store: Store, run: LatestRun, number: int, given: Resolution) -> None:
    """Post it to the process that has the run; it takes it when it resumes the run."""
    if run.state.started is None:
        holder = store.run_leases().get(run.run_id)
        raise ConfigurationError(
            f"run {run.run_id!r} is open in an executor"
            f"{f' of process {holder.holder.pid}' if holder else ''}: close that, or use its"
            " options(retry=True) to execute the step again"
        )

    def add(messages: Messages) -> None:
        step = find_ambiguous(store, run.refresh(), run.run_id, number, held=True)
        if any(each.step == given.step for each in messages.resolutions):
            raise ConfigurationError(
                f"step {_label(run.state, step)!r} of run {run.run_id!r} was resolved already; that is"
                " taken when the run is resumed"
            )
        messages.resolutions.append(given)

    Inbox(store).post(run.run_id, add)


# --- which step -----------------------------------------------------------------------------------


def find_ambiguous(
    store: Store, state: RunState, run_id: str, wanted: str | int, *, held: bool | None = None
) -> StepState:
    """Return an ambiguous step by its number, its name or ``name#2``; raise why it is none."""
    held = run_id in store.run_leases() if held is None else held
    step = step_of(state, run_id, wanted)
    found = ambiguous_steps(state, held=held)
    if step in found:
        return step
    which = f"step {_label(state, step)!r} of run {run_id!r}"
    others = ", ".join(_label(state, each) for each in found)
    hint = f"; ambiguous are: {others}" if others else "; no step of the run is ambiguous"
    raise ConfigurationError(f"{which} {_why_not(store, state, step, held=held)}{hint}")


def _why_not(store: Store, state: RunState, step: StepState, *, held: bool) -> str:
    """Return why a step cannot be resolved, as the end of a sentence."""
    if step.completed is not None:
        return _completed(store, step.completed)
    outcome = state.outcomes.get(step.identity or b"")
    if state.ended is not None or outcome is not None:
        ended = run_status(state) if outcome is None else outcome_status(outcome)
        return f"cannot be resolved: {'the run' if outcome is None else 'it'} has ended ({ended})"
    if step.open_attempt and held:
        return "is being executed"
    if not step.log:
        return "was resolved or retried already: it is executed again when the run is resumed"
    if options_of(step).get("on_ambiguous") != "ask":
        return f"is not ambiguous ({status_of(step)}): it has no on_ambiguous='ask'"
    return f"is not ambiguous ({status_of(step)})"


def _completed(store: Store, completed: Entry) -> str:
    facts = facts_of(completed)
    if not facts.get("resolved"):
        return "is completed"
    by, value = facts.get("by"), value_of(completed, store.load)
    return f"was resolved already{f' by {by}' if by else ''}: completed with {value!r:.100}"


def _label(state: RunState, step: StepState) -> str:
    return labels(state)[step.number]


# --- recording it ---------------------------------------------------------------------------------


def _entry(step: StepState, given: Resolution) -> NewEntry:
    facts = {"resolved": True, **({"by": given.by} if given.by else {})}
    encoded = codec.dump_canonical(facts)
    if given.rerun:
        return NewEntry(EntryKind.RETRIED, facts=encoded, identity=step.identity)
    value = codec.encoded(codec.dump(given.value))
    return NewEntry(EntryKind.STEP_COMPLETED, step.number, step.last_attempt, encoded, value)


async def take(run: ActiveRun, resolutions: list[Resolution]) -> None:
    """Record the resolutions that came while another process had the run, and remove them."""
    for given in resolutions:
        found = ambiguous_steps(run.run.state, held=False)
        step = next((each for each in found if _is_for(given, each)), None)
        removed = changed_messages(run.run_id, partial(Messages.drop, resolution=given))
        if step is not None:
            await run.run.record(_entry(step, given), sync=True, change=removed)
        else:
            logger.warning("run %s: step %s is not ambiguous any more", run.run_id, given.step)
            run.run.store.update_document(*removed)


def _is_for(given: Resolution, step: StepState) -> bool:
    return step.identity == bytes.fromhex(given.step) and step.last_attempt == given.attempt
