"""A failure to escalate, and ticket systems that are configured for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from maestro_hive.engine.config import ExecutionConfig
from maestro_hive.engine.errors import FailureReport
from maestro_hive.engine.escalation import EscalationCase
from maestro_hive.engine.tickets import ticket_system_from

if TYPE_CHECKING:
    from maestro_hive.engine.tickets import TicketSystem

LABEL = "maestro-0123abcd"
DESCRIPTION = """All retry levels are exhausted for draft.

Run: checkout-42
Error: TIMEOUT: not done

What to do next:
- increase timeout_seconds
- then retry it"""


def a_case(**changed: Any) -> EscalationCase:
    given: dict[str, Any] = {
        "run_id": "checkout-42",
        "task_name": "draft",
        "effect_key": "effect-1",
        "summary": "draft: TIMEOUT: not done",
        "description": DESCRIPTION,
        "failure_report": FailureReport("writer", "TIMEOUT", "not done"),
        "labels": ("maestro-hive", "timeout"),
        "fingerprint": "0123abcd",
    }
    return EscalationCase(**{**given, **changed})


def system(**settings: Any) -> TicketSystem:
    """Return the ticket system of these settings."""
    made = ticket_system_from(ExecutionConfig(**settings))
    assert made is not None
    return made
