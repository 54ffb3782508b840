"""The agents that people use, as personas: which command calls one, and what its output says.

``adapter("claude")`` knows one agent. ``command(call)`` gives arguments, standard input, environment
and files; ``reader(…)`` reads the output line by line into events, and ``end(…)`` says how it ended.
Nothing is started, read or written here: all of it translates, and touches no clock, loop, disk or
environment.
"""

from maestro_hive.team.agents.adapter import Adapter
from maestro_hive.team.agents.calls import Call, Command, Permissions, Session, Totals
from maestro_hive.team.agents.events import (
    Acted,
    Denied,
    Event,
    Outcome,
    Said,
    SessionKnown,
    Used,
    Waiting,
)
from maestro_hive.team.agents.failures import (
    AgentFailedError,
    AgentRefusedError,
    Failure,
    FailureKind,
)
from maestro_hive.team.agents.known import ADAPTERS, adapter, call_for
from maestro_hive.team.agents.reading import Reader

__all__ = [
    "ADAPTERS",
    "Acted",
    "Adapter",
    "AgentFailedError",
    "AgentRefusedError",
    "Call",
    "Command",
    "Denied",
    "Event",
    "Failure",
    "FailureKind",
    "Outcome",
    "Permissions",
    "Reader",
    "Said",
    "Session",
    "SessionKnown",
    "Totals",
    "Used",
    "Waiting",
    "adapter",
    "call_for",
]
