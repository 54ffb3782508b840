"""What systems share that are told of failures and cannot be asked: webhooks, commands, callers' own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from maestro_hive.engine.tickets import Comment, Ticket, TicketRefusedError, label_of

if TYPE_CHECKING:
    from datetime import datetime

    from maestro_hive.engine.escalation import EscalationCase


class OneWay:
    """Takes tickets, and has no way to find them or to add to them: delivery is at least once."""

    name: str
    finds = False
    index_lag = 0.0

    async def find(self, label: str, since: datetime | None = None) -> Ticket | None:
        """Raise: there is nothing to search."""
        raise self._not_possible("searched")

    async def comment(self, key: str, text: str) -> str:
        """Raise: nothing can be added to what was sent."""
        raise self._not_possible("added to")

    async def comments(self, key: str) -> list[Comment]:
        """Raise: comments cannot be read."""
        raise self._not_possible("read")

    async def ticket(self, key: str) -> Ticket:
        """Raise: tickets cannot be read."""
        raise self._not_possible("read")

    def is_own(self, comment: Comment) -> bool:
        """Return False: no comments come from here."""
        return False

    def may_answer(self, comment: Comment) -> bool:
        """Return False: no comments come from here."""
        return False

    def _not_possible(self, what: str) -> TicketRefusedError:
        return TicketRefusedError(
            f"tickets that went to a {self.name} cannot be {what}; answer with `maestro answer`",
            permanent=True,
        )


def escalation_message(case: EscalationCase) -> dict[str, Any]:
    """Return a failure as JSON for a webhook or a command."""
    return {
        "event": "escalation",
        "effect_key": case.effect_key,
        "label": label_of(case),
        "run_id": case.run_id,
        "task_name": case.task_name,
        "summary": case.summary,
        "description": case.description,
        "labels": list(case.labels),
        "failure_report": case.failure_report.to_dict(),
    }
