"""Which calls a workflow failed by: a retry clears the failures of these alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maestro_hive.engine.recorded_errors import failure_of
from maestro_hive.hive.errors import RunCancelledError, RunFailedError
from maestro_hive.maestro.state.projections import facts_of

if TYPE_CHECKING:
    from maestro_hive.hive.active_run import ActiveRun

#: How many errors of a chain or a group are searched for those of steps.
_MOST_ERRORS = 1_000


def failed_calls(error: BaseException, active: ActiveRun) -> list[str]:
    """Return the identities of the steps and children whose errors a workflow failed by.

    Not those of errors that it caught before: a retry must not let it take another branch.
    """
    children = {
        str(facts_of(entry)["run_id"]): identity.hex()
        for identity, entry in active.run.state.children.items()
    }
    found: dict[str, None] = {}
    left: list[BaseException | None] = [error]
    for _ in range(_MOST_ERRORS):
        if not left:
            break
        each = left.pop()
        if each is None:
            continue
        failure = failure_of(each)
        if failure is not None and failure.identity:
            found[failure.identity] = None
        elif isinstance(each, RunFailedError | RunCancelledError) and each.run_id in children:
            found[children[each.run_id]] = None
        elif isinstance(each, BaseExceptionGroup):
            left += each.exceptions
        else:
            left += [each.__cause__, each.__context__]
    return list(found)
