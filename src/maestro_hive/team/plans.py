"""The graph of a recorded team run, planned; light to import, for those who only look at runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from maestro_hive.hive.runs import read_input
from maestro_hive.maestro.state import codec
from maestro_hive.team.graph import GraphError, check_document, check_graph
from maestro_hive.team.graph.documents import Document

if TYPE_CHECKING:
    from maestro_hive.maestro.state.projections import Load, RunState, StepState
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


def planned_names(state: RunState, load: Load) -> list[str]:
    """Return the names of the tasks and gates of a recorded team run."""
    assert state.started is not None
    document: Any = read_input(state.started, load).kwargs["graph"]
    graph = plan_of(document).graph
    gates = [gate_name(level, gate) for level in graph.levels for gate in level.gates]
    return [*(task.id for task in graph.tasks), *gates]


def asks(result: Json) -> bool:
    """Return whether the result of a task's step is a question: after the answer another step follows."""
    return isinstance(result, dict) and "asks" in result


def replaced_steps(state: RunState, load: Load) -> set[int]:
    """Return the steps of tasks and gates that were executed with another input since.

    What they made is no longer there, also if the later attempt failed or was stopped. A question
    stays: it has made nothing, and its answer counts for the same input.
    """
    newest: dict[str, StepState] = {}
    replaced = set()
    for step in state.steps.values():  # in the order of their first starts
        earlier = newest.get(step.name)
        if earlier is not None and not _has_asked(earlier, load):
            replaced.add(earlier.number)
        newest[step.name] = step
    return replaced


def _has_asked(step: StepState, load: Load) -> bool:
    data = None if step.completed is None else load(step.completed)
    return data is not None and asks(codec.parse(data))
