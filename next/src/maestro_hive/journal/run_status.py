"""What a run waits for, from its row and its state. Pure: no clock, no store."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from maestro_hive.journal.state import RunState
    from maestro_hive.journal.store import RunRow

#: Statuses of runs that somebody has to continue, by what they wait for.
_LEFT = {"stopped": "resume", "interrupted": "retry", "pending": "worker"}


class Waiting(NamedTuple):
    """What a run waits for: ``answer``, ``child``, ``timer``, ``breaker``, …, and until when."""

    kind: str
    #: The name of the question, the id of the child, or the message of the suspension.
    subject: str = ""
    #: A time in seconds since 1970; None if nothing is known.
    until: float | None = None


def waiting_for(state: RunState, row: RunRow) -> Waiting | None:
    """Return what a run waits for; None if it is executed, or has ended."""
    kind = row.waits_for or _LEFT.get(row.status)
    if kind is None:
        return None
    if kind == "answer":
        for asked in sorted(state.questions.values(), key=lambda each: each.until or 1 << 62):
            return Waiting(kind, asked.name, asked.until / 1e6 or None)
    if kind in ("child", "run"):
        return Waiting(kind, next((each.run_id for each in state.children.values()), ""))
    return Waiting(kind, state.suspended.message if state.suspended else "", row.due or None)
