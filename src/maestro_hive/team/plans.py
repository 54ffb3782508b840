"""The graph of a recorded team run, planned; light to import, for those who only look at runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from maestro_hive.team.graph import GraphError, check_document, check_graph
from maestro_hive.team.graph.documents import Document

if TYPE_CHECKING:
    from maestro_hive.maestro.state.strict_json import Json
    from maestro_hive.team.graph import Gate, Level, Plan

#: The name of the workflow that all team runs are runs of.
WORKFLOW = "task-graph"
#: How the names of the steps of gates start.
GATE_PREFIX = "gate:"


def plan_of(document: dict[str, Json]) -> Plan:
    """Return the plan of a recorded graph; it keeps the document, which must not be changed."""
    checked = check_document(Document(document, "{}", "json"))
    if checked.plan is None:
        checked = check_graph(json.dumps(document).encode(), "json")  # with the lines of errors
    if checked.plan is None:
        raise GraphError("the graph of the run", checked.errors, checked.more_errors)
    return checked.plan


def gate_name(level: Level, gate: Gate) -> str:
    """Return the name of a gate's step; no task has one like it."""
    return f"{GATE_PREFIX}{level.number}:{gate.name}"


def why_not_passed(result: Json) -> str | None:
    """Return why a gate has not passed, by the result of its step; None if it has passed.

    Only of a gate that is not required: the step of another one fails.
    """
    if result is True:
        return None
    return result if isinstance(result, str) else "it has not passed"


def asks(result: Json) -> bool:
    """Return whether the result of a task's step is a question: after the answer another step follows."""
    return isinstance(result, dict) and "asks" in result
