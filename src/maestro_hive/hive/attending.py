"""Tells who executes a run what it needs of people, while it runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from maestro_hive.hive.active_run import active_here
from maestro_hive.hive.answers import answers_on_their_way
from maestro_hive.hive.inbox import Inbox
from maestro_hive.hive.release import IdleRuns, family_of, waits_for_people
from maestro_hive.kernel.errors import MaestroError
from maestro_hive.maestro.state.projections import sum_of_usd
from maestro_hive.maestro.state.run_view import wait_views
from maestro_hive.maestro.state.views import question_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.hive.active_run import ActiveRun
    from maestro_hive.maestro.state.run_view import WaitView
    from maestro_hive.maestro.state.store import Store

#: How often it is looked.
_POLL_SECONDS = 0.05
#: How long nothing may have happened in a run before it is left to people.
_IDLE_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a run, or a child of it, asks a person: a question, an approval, or an escalation.

    ``several`` says that the run has another open question of this name. ``tokens`` and ``usd`` are
    what the run has spent so far.
    """

    run_id: str
    wait: WaitView
    several: bool = False
    tokens: int = 0
    usd: float = 0.0


async def attend(
    store: Store, run_id: str, tell: Callable[[Asked], object], *, leave: bool
) -> None:
    """Tell of each thing that a run of this process asks people, once; until this is cancelled.

    ``leave``: release the run when it does nothing but wait for people.
    """
    idle, told = IdleRuns(_IDLE_SECONDS, waits_for_people), set[tuple[str, str]]()
    with contextlib.suppress(MaestroError):  # of a store that failed: the run ends by that
        while True:
            found = active_here(store, run_id)
            if found is not None and found.active is not None:
                for each in family_of(found.active):
                    for asked in _asked(store, each, told):
                        tell(asked)
                if leave:
                    idle.release([found.active])
            await asyncio.sleep(_POLL_SECONDS)


def _asked(store: Store, run: ActiveRun, told: set[tuple[str, str]]) -> list[Asked]:
    """Return what was not told yet, and has no answer."""
    with run.run.mutex:  # code of the workflow may be executed in another thread
        state = run.run.state
        if all((run.run_id, question_id(entry)) in told for entry in state.questions.values()):
            return []
        answered = answers_on_their_way(state, Inbox(store).messages(run.run_id))
        waits = [wait for wait in wait_views(state, store.load, answered) if not wait.answered]
        spent = list(state.spent.values())
    names = Counter(wait.name for wait in waits)
    new = [wait for wait in waits if (run.run_id, wait.id) not in told]
    told.update((run.run_id, wait.id) for wait in new)
    return [
        Asked(
            run_id=run.run_id,
            wait=wait,
            several=names[wait.name] > 1,
            tokens=sum(tokens for tokens, _ in spent),
            usd=sum_of_usd(usd for _, usd in spent),
        )
        for wait in new
    ]
