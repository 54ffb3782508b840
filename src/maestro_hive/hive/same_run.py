"""Whether a run is the one that is asked for: of the same workflow, with the same arguments."""

from __future__ import annotations

import re
from inspect import Signature
from typing import TYPE_CHECKING, Any

from maestro_hive.hive import runs
from maestro_hive.hive.errors import RunMismatchError
from maestro_hive.maestro.state.records import EntryKind

if TYPE_CHECKING:
    from maestro_hive.hive.functions import WorkflowFunction
    from maestro_hive.hive.runs import Input
    from maestro_hive.maestro.state.records import Entry
    from maestro_hive.maestro.state.store import Store


def check_same(run_id: str, started: Entry, given: Input, store: Store) -> None:
    """Raise if a run was started by another workflow, or with other arguments."""
    if started.identity != given.identity:
        check_equal(run_id, runs.recorded_input(started, store.load), given)


def check_equal(run_id: str, recorded: Input, given: Input) -> None:
    """Raise if a run is recorded with another workflow, or with other arguments."""
    if recorded.workflow != given.workflow:
        raise RunMismatchError(
            f"run {run_id!r} belongs to the workflow {recorded.workflow!r}, not to"
            f" {given.workflow!r}; give this one another run_id"
        )
    if not runs.is_same_call(recorded, given):
        before, now = (_short(each.encoded.data.decode()) for each in (recorded, given))
        raise RunMismatchError(
            f"run {run_id!r} was started with other arguments: {before}, and now it is given {now};"
            " give this call another run_id, or fork the run"
        )


# --- a workflow that does not take a run's arguments ---------------------------------------------


def check_fits(
    store: Store, run_id: str, workflow: WorkflowFunction[..., Any], given: Input
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a run's arguments as its workflow takes them; raise if it takes others as it is now."""
    try:
        return workflow.bind(given.args, given.kwargs)
    except TypeError as error:
        wrong = str(error)
    if _never_ran(store, run_id):
        raise RunMismatchError(
            f"run {run_id!r} cannot start: its arguments do not fit the workflow"
            f" {_shown(workflow)}: {_misfit(wrong)}; cancel it with `maestro cancel {run_id}` and"
            " enqueue it again"
        )
    raise RunMismatchError(
        f"run {run_id!r} cannot go on: its workflow takes other arguments by now ({wrong}); let it"
        " take the old ones too, or fork the run with others"
    )


def _never_ran(store: Store, run_id: str) -> bool:
    """Return whether nothing is recorded of a run but that it is there, and why it does not start."""
    kinds = {each.kind for each in store.entries(runs.find_run(store, run_id).id)}
    return kinds <= {EntryKind.RUN_STARTED, EntryKind.RUN_SUSPENDED}


def _shown(workflow: WorkflowFunction[..., Any]) -> str:
    """Return a workflow's name and parameters, as they are written."""
    signature = workflow.signature.replace(return_annotation=Signature.empty)
    return re.sub(r": '([^']*)'", r": \1", f"{workflow.name}{signature}")


def _misfit(error: str) -> str:
    """Return in short what ``inspect`` says of arguments that do not fit."""
    reason = error.rpartition(" was called wrongly: ")[2]
    return re.sub(r"^missing a required .*argument: '(\w+)'$", r"missing \1", reason)


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}…"
