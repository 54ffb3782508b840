"""Callers' own ways to reach a person, as ticket systems: these cannot be searched.

So delivery is at least once: after a kill around the call it is made again, with the same
``effect_key``, for the other side to recognize. That is logged, once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from maestro_hive.engine.escalation import JiraEscalation, address_of, checked
from maestro_hive.engine.tickets import Ticket, ticket_system_from
from maestro_hive.engine.tickets.one_way import OneWay
from maestro_hive.kernel.logs import get_log

if TYPE_CHECKING:
    from maestro_hive.engine.config import ExecutionConfig
    from maestro_hive.engine.escalation import Escalation, EscalationCase, JiraClient
    from maestro_hive.engine.tickets import TicketSystem

logger = get_log(__name__)

#: What a ticket system has, and an ``Escalation`` has not.
_METHODS = ("find", "create", "comment", "comments", "ticket", "is_own", "may_answer")


class CallersTickets(OneWay):
    """An ``Escalation`` of a caller's, as a ticket system."""

    def __init__(self, escalation: Escalation) -> None:
        self._escalation = escalation
        self.name = f"caller:{type(escalation).__name__}"

    async def create(self, case: EscalationCase) -> Ticket:
        """Report the failure; the ticket's key is empty if the caller has no reference to it."""
        key = await self._escalation.escalate(case)
        return Ticket(key=key or "", address=address_of(self._escalation, key))


class _Warned:
    """Whether it was said in this process that a caller's way to tickets is at least once."""

    def __init__(self) -> None:
        self.names: set[str] = set()


_warned = _Warned()


def system_of(given: TicketSystem | Escalation) -> TicketSystem:
    """Return what a caller gave as a ticket system; say, once, if it cannot be searched."""
    if all(callable(getattr(given, name, None)) for name in _METHODS):
        return given  # type: ignore[return-value]
    checked(given, "escalate", "escalation")
    made = CallersTickets(given)  # type: ignore[arg-type]
    what = "jira_client" if isinstance(given, JiraEscalation) else made.name
    if what not in _warned.names:
        _warned.names.add(what)
        logger.info(
            "%s cannot be searched for tickets: after a kill around the call, a ticket may be made"
            " twice (at least once); a TicketSystem, as of JIRA_BASE_URL, makes one",
            what,
        )
    return made


def chosen_system(
    config: ExecutionConfig,
    jira_client: JiraClient | None = None,
    escalation: TicketSystem | Escalation | None = None,
) -> TicketSystem | None:
    """Return where escalations are delivered: what was given, or else what the configuration names."""
    client = None
    if jira_client is not None:
        client = JiraEscalation(jira_client, config.jira_project_key, config.jira_base_url)
    if escalation is not None:
        return system_of(escalation)
    if not config.level2.enable_jira_escalation:
        return None
    if client is not None:
        return system_of(client)
    return ticket_system_from(config)
