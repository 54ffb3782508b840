"""Which ticket system a configuration names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maestro_hive.engine.config import ExecutionConfig
    from maestro_hive.engine.tickets import TicketSystem


def ticket_system(config: ExecutionConfig) -> TicketSystem | None:
    """Return the ticket system that a configuration names; None if it names none."""
    return None
