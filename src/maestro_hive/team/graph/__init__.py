"""Task graphs: reading and checking them, and deciding what may start; nothing is executed here.

``check_graph(data)`` reads JSON or TOML and reports all errors at once; ``make_plan(graph)`` derives
order, conflicts and critical path; ``Frontier(plan)`` says what may start as tasks start and end;
``simulate(plan, workers)`` estimates. All of it decides: no clock, loop, disk or environment.
"""

from maestro_hive.team.graph.checks import Checked, GraphError, check_document, check_graph
from maestro_hive.team.graph.planning import (
    Frontier,
    Plan,
    Schedule,
    Slot,
    make_plan,
    owned_folder,
    select,
    simulate,
)
from maestro_hive.team.graph.records import (
    AGENTS,
    Budget,
    Conflict,
    Files,
    Gate,
    Graph,
    Level,
    Move,
    Persona,
    Problem,
    Retry,
    Step,
    Task,
    TaskState,
    Verification,
)

__all__ = [
    "AGENTS",
    "Budget",
    "Checked",
    "Conflict",
    "Files",
    "Frontier",
    "Gate",
    "Graph",
    "GraphError",
    "Level",
    "Move",
    "Persona",
    "Plan",
    "Problem",
    "Retry",
    "Schedule",
    "Slot",
    "Step",
    "Task",
    "TaskState",
    "Verification",
    "check_document",
    "check_graph",
    "make_plan",
    "owned_folder",
    "select",
    "simulate",
]
