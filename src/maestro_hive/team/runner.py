"""Team runs: a task graph as a run of a hive, each task a durable step of it."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from maestro_hive.engine.options import Options, StepOptions
from maestro_hive.engine.values import in_thread
from maestro_hive.hive.branches import active_run
from maestro_hive.hive.functions import StepFunction
from maestro_hive.hive.typed_arguments import recorded_arguments
from maestro_hive.hive.waits import wait_for
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.team.graph import GraphError, check_graph
from maestro_hive.team.personas import (
    CHECK_SECONDS,
    MAX_HANDOVERS,
    TASK_SECONDS,
    Limits,
    Workplace,
    check_personas,
    gate_input,
    task_input,
    with_answer,
)
from maestro_hive.team.processes import Survivors
from maestro_hive.team.scheduler import Execution, WorkerSlots, gate_name, urgency_of
from maestro_hive.team.state_file import StateFile

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.engine.options import Amount
    from maestro_hive.hive.functions import WorkflowFunction
    from maestro_hive.hive.hive import Hive
    from maestro_hive.maestro.state.strict_json import Json
    from maestro_hive.team.graph import Budget, Gate, Graph, Level, Persona, Plan, Task

#: The name of the workflow that all team runs are runs of.
WORKFLOW = "task-graph"
#: The persona that gates are executed by.
_GATES = "gates"
#: How many seconds an attempt has beyond the limits of its parts, to end their processes.
_MARGIN_SECONDS = 60.0
_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9_-]+")
_LONGEST_NAME = 80


class ChosenRun(NamedTuple):
    """Which run executes a graph."""

    run_id: str
    #: Whether it is there already, and the run that it goes on from with a changed graph.
    exists: bool
    forked_from: str | None = None


class TeamRunner:
    """Executes task graphs on a hive, with so many tasks at once; one for each hive.

    All that is recorded is the run's, under its id: a run that was killed or stopped is resumed by
    ``resume``, also with another number of workers.
    """

    def __init__(self, hive: Hive, *, workers: int = 4) -> None:
        self._hive = hive
        self._workers = workers
        folders = hive.config.state.resolve()
        if not folders.persistent:
            raise ConfigurationError(
                "a team run needs a state folder, and this Hive has none: its tasks are processes that"
                " the next start has to find"
            )
        self._state_folder = Path(folders.state)
        self.workflow: WorkflowFunction[..., dict[str, Json]] = hive.workflow(name=WORKFLOW)(
            self._defined()
        )

    async def run(
        self,
        graph: Graph,
        *,
        run_id: str,
        folder: Path | None = None,
        budget: Amount | None = None,
    ) -> dict[str, Json]:
        """Execute a graph in a folder, the current one by default; the same ``run_id`` resumes it.

        Returns the results of the tasks, and whether gates have passed. ``budget`` is what the run may
        spend, instead of what the graph says.
        """
        place = (folder or Path.cwd()).absolute()
        check_personas(graph, place)
        result: dict[str, Json] = await self._hive.run(
            self.workflow,
            graph=graph.to_document(),
            folder=str(place),
            run_id=run_id,
            budget=budget if budget is not None else _amount(graph.budget),
        )
        return result

    async def resume(self, run_id: str) -> dict[str, Json]:
        """Resume a team run as it was started."""
        document, folder = self.arguments(run_id)
        check_personas(plan_of(document).graph, folder)
        result: dict[str, Json] = await self._hive.resume(run_id)
        return result

    def arguments(self, run_id: str) -> tuple[dict[str, Json], Path]:
        """Return the graph and the folder that a run was started with."""
        found = recorded_arguments(self._hive, self.workflow, run_id)
        if found is None:
            raise ConfigurationError(f"there is no run {run_id!r} that was started")
        return found[1]["graph"], Path(found[1]["folder"])

    def choose(self, graph: Graph, folder: Path, *, force: bool = False) -> ChosenRun:
        """Return the run that executes a graph in a folder.

        That is the last run of its feature there. If the graph has changed since, it is a new run that
        has what that one completed, as far as its input is the same. With ``force`` it is a new one.
        """
        slug = _NOT_IN_IDS.sub("-", graph.feature).strip("-")[:_LONGEST_NAME] or "graph"
        numbered = re.compile(rf"{re.escape(slug)}(?:-(\d{{1,6}}))?")
        taken = {}
        for info in self._hive.runs():
            if found := numbered.fullmatch(info.run_id):
                taken[int(found[1] or 1)] = info
        number = max(taken, default=0) + 1
        fresh = slug if number == 1 else f"{slug}-{number}"
        if force:
            return ChosenRun(fresh, exists=False)
        for each in sorted(taken, reverse=True):
            run_id = taken[each].run_id
            if taken[each].workflow != WORKFLOW:
                continue
            document, place = self.arguments(run_id)
            if place == folder and document.get("feature") == graph.feature:
                if document == graph.to_document():
                    return ChosenRun(run_id, exists=True)
                return ChosenRun(fresh, exists=False, forked_from=run_id)
        return ChosenRun(fresh, exists=False)

    def fork(self, chosen: ChosenRun, graph: Graph) -> None:
        """Make the run that goes on from another one with a changed graph."""
        assert chosen.forked_from is not None
        self._hive.fork(chosen.forked_from, new_run_id=chosen.run_id, graph=graph.to_document())

    def _defined(self) -> Callable[..., Any]:
        async def task_graph(graph: dict[str, Any], folder: str) -> dict[str, Any]:
            """Execute a task graph in a folder."""
            return await self._execute(graph, Path(folder))

        return task_graph

    async def _execute(self, document: dict[str, Json], folder: Path) -> dict[str, Json]:
        active = active_run("the workflow", WORKFLOW)
        run_id = active.run_id
        plan = await in_thread(partial(plan_of, document))
        own = self._state_folder / "runs" / run_id
        survivors = Survivors(own / "processes", run_id)
        await in_thread(survivors.end)
        slots = WorkerSlots(self._workers, urgency_of(plan))
        place = Workplace(
            run_id=run_id,
            folder=folder,
            survivors=survivors,
            progress_folder=own / "progress",
            calls_folder=(own / "calls").absolute(),
            worker_of=slots.worker_of,
            functions=check_personas(plan.graph, folder),
            prices=self._hive.prices,
        )
        steps = _Steps(plan.graph, place, slots)
        execution = Execution(plan, steps.run_task, steps.run_gate, slots)
        steps.asking = execution.asking
        file = StateFile(folder, plan, active.run.state, execution, slots)
        slots.on_change = file.changed
        file.write()
        try:
            await execution.run()
        finally:
            file.write()
        return {
            "feature": plan.graph.feature,
            "tasks": {each: execution.results[each] for each in plan.ids},
            "gates": dict(sorted(execution.gates.items())),
        }


class _Steps:
    """The tasks and gates of a run as steps of it: by name, with the options that the graph says."""

    def __init__(self, graph: Graph, place: Workplace, slots: WorkerSlots) -> None:
        self._graph = graph
        self._tasks = {task.id: task for task in graph.tasks}
        self._place = place
        self._slots = slots
        #: The tasks that wait for an answer.
        self.asking: set[str] = set()

    async def run_task(self, task_id: str, results: dict[str, Json]) -> Json:
        """Execute a task, unless it is completed; raise its error if it failed for good."""
        task = self._tasks[task_id]
        persona = self._graph.persona_of(task)
        assert persona is not None
        seconds = _first(task.timeout_seconds, persona.timeout_seconds, self._graph.timeout_seconds)
        seconds = seconds or TASK_SECONDS
        check = task.verification
        checking = (check.timeout_seconds or CHECK_SECONDS) if check is not None else 0.0

        handovers = _retry(task, persona, self._graph, "max_handovers")
        budget = task.budget or persona.budget
        limits = Limits(
            seconds,
            MAX_HANDOVERS if handovers is None else handovers,
            None if budget is None else budget.usd,
        )

        async def work(given: dict[str, Any], results: dict[str, Any]) -> Any:
            return await self._place.work(given, results, limits)

        options = {
            "persona": persona.name,
            "breaker": persona.name,
            "timeout": seconds + checking + _MARGIN_SECONDS,
            "max_attempts": _retry(task, persona, self._graph, "max_attempts"),
            "rounds": _retry(task, persona, self._graph, "rounds"),
            "budget": _amount(budget),
        }
        step = self._step(work, task.id, options)
        given = task_input(self._graph, task)
        while True:
            result = await step(given, results)
            if "asks" not in result:
                return result
            self.asking.add(task.id)
            self._slots.on_change()
            answer = await wait_for(task.id, None, str, result["asks"])
            self.asking.discard(task.id)
            given = with_answer(given, result["asks"], answer)

    async def run_gate(self, level: Level, gate: Gate, results: dict[str, Json]) -> bool:
        """Execute a gate of a level, unless it is completed."""
        seconds = gate.timeout_seconds or CHECK_SECONDS

        async def check(given: dict[str, Any]) -> bool:
            return await self._place.check_gate(given, seconds)

        options = {"persona": _GATES, "timeout": seconds + _MARGIN_SECONDS, "max_attempts": 1}
        step = self._step(check, gate_name(level, gate), options)
        passed: bool = await step(gate_input(gate, results))
        return passed

    def _step(
        self, body: Callable[..., Any], name: str, options: dict[str, Any]
    ) -> StepFunction[..., Any]:
        """Return a step. Its identity is its input, wherever in the graph it stands."""
        given = {each: value for each, value in options.items() if value is not None}
        checked = Options().changed({**given, "key": _key}, StepOptions, f"of {name!r}")
        return StepFunction(
            body, name, replace(checked, stages=(self._slots,), waits_for_breaker=True)
        )


def _key(*given: Json) -> str:
    text = json.dumps(given, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _retry(task: Task, persona: Persona, graph: Graph, name: str) -> int | None:
    """Return what a task, its persona or its graph says about retries, in this order."""
    found = (each.retry for each in (task, persona, graph))
    number: int | None = _first(*(getattr(each, name) for each in found if each is not None))
    return number


def _first(*values: Any) -> Any:
    return next((each for each in values if each is not None), None)


def _amount(budget: Budget | None) -> dict[str, float] | None:
    if budget is None:
        return None
    limits = {"tokens": budget.tokens, "usd": budget.usd}
    return {name: limit for name, limit in limits.items() if limit is not None}


def plan_of(document: dict[str, Json]) -> Plan:
    """Return the plan of a recorded graph."""
    checked = check_graph(json.dumps(document).encode(), "json")
    if checked.plan is None:
        raise GraphError("the graph of the run", checked.errors, checked.more_errors)
    return checked.plan
