"""Suspects: runs whose process died while it executed them, and which of them may have killed it.

One that kills its process takes the runs beside it along, and each time they lose an interruption. So
a suspect is executed alone, until it has proven itself: by a further outcome, or by living on for
some time. The more often its process died, the longer that is.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from maestro_hive.maestro.state.records import EntryKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.hive.active_run import ActiveRun
    from maestro_hive.maestro.state.records import Dispatch
    from maestro_hive.maestro.state.store import Store

#: How long a suspect is alone that records nothing; with each further death so many times longer.
_ALONE_SECONDS = 5.0
_GROWTH = 4.0
#: After so many seconds a busy worker takes nothing else, to become empty for a suspect.
_PATIENCE_SECONDS = 30.0
#: For how long it does so: then it takes the suspect beside others; later, the more have died of it.
_DRAIN_SECONDS = 60.0
#: How often a busy worker looks for suspects that have waited for long.
_LOOK_SECONDS = 5.0

#: What shows that the process outlived something of the run.
_OUTCOMES = frozenset(
    {
        EntryKind.ATTEMPT_FAILED,
        EntryKind.CHILD_ENDED,
        EntryKind.STEP_COMPLETED,
        EntryKind.STEP_FAILED,
        EntryKind.WAIT_ENDED,
    }
)


@dataclass(slots=True)
class Suspect:
    """A suspect that a worker executes."""

    run_id: str
    deaths: int
    since: float = field(default_factory=time.monotonic)

    def is_alone(self) -> bool:
        """Return whether nothing may be executed beside it, as long as it records nothing."""
        seconds = _ALONE_SECONDS * _GROWTH ** (min(max(self.deaths, 1), 10) - 1)
        return time.monotonic() - self.since < seconds


def has_outcome(run: ActiveRun) -> bool:
    """Return whether a run, or a child of it, recorded an outcome since this process has it."""
    lease = run.run.lease
    if lease.seq > run.resumed_at:
        new = run.run.store.entries(lease.run, after=run.resumed_at)
        if any(entry.kind in _OUTCOMES for entry in new):
            return True
    return any(map(has_outcome, run.children))


class WaitingSuspects:
    """Since when a busy worker has seen suspects wait."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}
        self._look_at = 0.0
        self._deaths = 0

    def look(self, store: Store, queues: list[str], takes: Callable[[Dispatch], bool]) -> None:
        """See which suspects wait for this worker, now and then."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_SECONDS
        waiting = [each for queue in queues for each in store.suspects(queue) if takes(each)]
        self._seen = {each.run_id: self._seen.get(each.run_id, now) for each in waiting}
        self._deaths = min((each.deaths for each in waiting), default=0)

    def clear(self) -> None:
        """Let it be known that none waits for this worker any more."""
        self._seen.clear()

    @property
    def is_overdue(self) -> bool:
        """Whether one has waited so long that the worker shall become empty for it."""
        return self._waited() > _PATIENCE_SECONDS

    @property
    def is_taken_anyway(self) -> bool:
        """Whether one has waited so long that it is executed beside others."""
        return self._waited() > _PATIENCE_SECONDS + _DRAIN_SECONDS * 10.0 ** min(
            self._deaths - 1, 3
        )

    def _waited(self) -> float:
        return time.monotonic() - min(self._seen.values()) if self._seen else 0.0
