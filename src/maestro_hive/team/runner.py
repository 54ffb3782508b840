"""Team runs: a task graph as a run of a hive, each task a durable step of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from maestro_hive.engine.accounts import Sizing
from maestro_hive.engine.options import Options, StepOptions
from maestro_hive.engine.values import in_thread
from maestro_hive.hive.branches import active_run
from maestro_hive.hive.control import executed_steps, fork_without, record_start
from maestro_hive.hive.dispatching import is_bankrupt
from maestro_hive.hive.functions import StepFunction
from maestro_hive.hive.typed_arguments import recorded_arguments
from maestro_hive.hive.waits import wait_for
from maestro_hive.kernel.errors import ConfigurationError, MaestroError
from maestro_hive.kernel.logs import get_logger
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.views import question_id
from maestro_hive.team.choosing import (
    ChosenRun,
    RecordedRuns,
    choose_run,
    restorable,
)
from maestro_hive.team.errors import GraphFailedError
from maestro_hive.team.folder_lock import held_for
from maestro_hive.team.graph import Retry, make_plan
from maestro_hive.team.inputs import (
    digest_of,
    files_not_made,
    gate_input,
    missing_files,
    task_input,
    with_answer,
)
from maestro_hive.team.ownership import Ownership
from maestro_hive.team.persona_checks import check_personas, import_functions
from maestro_hive.team.personas import (
    CHECK_SECONDS,
    MAX_HANDOVERS,
    TASK_SECONDS,
    Limits,
    Workplace,
)
from maestro_hive.team.plans import (
    WORKFLOW,
    asks,
    gate_name,
    plan_of,
    replaced_steps,
    why_not_passed,
)
from maestro_hive.team.restoring import (
    CheckpointFiles,
    Restored,
    taken,
    write_graph,
)
from maestro_hive.team.scheduler import Execution, WorkerSlots, urgency_of
from maestro_hive.team.state_file import StateFile, StatePlace
from maestro_hive.team.survivors import PROCESSES, Survivors, runs_with_processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from maestro_hive.engine.options import Amount
    from maestro_hive.hive.functions import WorkflowFunction
    from maestro_hive.hive.hive import Hive
    from maestro_hive.maestro.state.strict_json import Json
    from maestro_hive.team.graph import Budget, Gate, Graph, Level, Persona, Plan, Task
    from maestro_hive.team.personas import Assignment

__all__ = ["WORKFLOW", "ChosenRun", "TeamRunner", "plan_of"]

#: The persona that gates are executed by.
_GATES = "gates"
#: How many seconds an attempt has beyond the limits of its parts, to end their processes.
_MARGIN_SECONDS = 60.0
_NO_RETRY = Retry()
#: How many files a warning names.
_NAMED = 8
_LOG = get_logger(__name__)
#: What is known of what a task spends before it is executed. Commands and gates report no usage; of
#: other tasks the first of each persona tells, and those after it need not be executed alone.
_SPENDS_NOTHING = Sizing(max_tokens=0, max_usd=0)
_SPENDS_ALIKE = Sizing(alike="a task")


class Executing(NamedTuple):
    """A team run that this process has started to execute."""

    run_id: str
    plan: Plan
    slots: WorkerSlots
    #: The number of the last event of the run before, and the questions that were open then.
    last_event: int
    questions: frozenset[str]


class TeamObserver(Protocol):
    """Who is told how the execution of a run goes on, on its event loop; what happens is in its events."""

    def executing(self, run: Executing) -> None:
        """Note that this process has started to execute a run."""

    def complete(self, name: str) -> None:
        """Note that a task or a gate is complete, also if it was before."""

    def not_passed(self, name: str, reason: str) -> None:
        """Note that a gate that is not required has not passed, also if that was before."""

    def parked(self, name: str, *, is_parked: bool) -> None:
        """Note that a task waits for the breaker of its persona, or does not any more."""

    def asks(self, name: str, question: str) -> None:
        """Note what a task asks, before its wait is recorded; also if it has its answer."""


class TeamRunner:
    """Executes task graphs on a hive, with so many tasks at once; one for each hive.

    All that is recorded is the run's, under its id: a run that was killed or stopped is resumed by
    ``resume``, also with another number of workers.
    """

    def __init__(
        self,
        hive: Hive,
        *,
        workers: int = 4,
        strict: bool = False,
        observer: TeamObserver | None = None,
    ) -> None:
        """Execute on a hive; ``strict``: a changed file that can be of several tasks stops the run."""
        self._hive = hive
        self._observer = observer
        self._workers = workers
        self._strict = strict
        #: The graphs of runs that are about to start here, as they were checked.
        self._checked: dict[str, Graph] = {}
        folders = hive.config.state.resolve()
        if not folders.persistent:
            raise ConfigurationError(
                "a team run needs a state folder, and this Hive has none: its tasks are processes that"
                " the next start has to find"
            )
        self._state_folder = Path(folders.state)
        own = (self._state_folder, Path(folders.checkpoints))
        self._own_folders = frozenset(str(each.resolve()) for each in own)
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
        await _checked_functions(graph, place)
        if graph.is_as_read:
            self._checked[run_id] = graph
        try:
            with held_for(place, run_id, self._state_folder.absolute()):
                result: dict[str, Json] = await self._hive.run(
                    self.workflow,
                    graph=graph.source if graph.is_as_read else graph.to_document(),
                    folder=str(place),
                    restored=self._restored_with(run_id),
                    run_id=run_id,
                    budget=budget if budget is not None else _amount(graph.budget),
                )
        finally:
            self._checked.pop(run_id, None)
        await _warn_of_files(graph, place, result["tasks"])
        return result

    async def resume(self, run_id: str) -> dict[str, Json]:
        """Resume a team run as it was started."""
        document, folder = self.arguments(run_id)
        graph = plan_of(document).graph
        await _checked_functions(graph, folder)
        with held_for(folder, run_id, self._state_folder.absolute()):
            result: dict[str, Json] = await self._hive.resume(run_id)
        await _warn_of_files(graph, folder, result["tasks"])
        return result

    def arguments(self, run_id: str) -> tuple[dict[str, Json], Path]:
        """Return the graph and the folder that a run was started with."""
        found = recorded_arguments(self._hive, self.workflow, run_id)
        if found is None:
            raise ConfigurationError(f"there is no run {run_id!r} that was started")
        return found[1]["graph"], Path(found[1]["folder"])

    def is_of_another_folder(self, run_id: str) -> bool:
        """Return whether a run is executed in another folder than the current one."""
        return self.exists(run_id) and self.arguments(run_id)[1] != Path.cwd().absolute()

    def _restored_with(self, run_id: str) -> Json:
        """Return what a run was restored with, from a state file; None if it was not."""
        found = recorded_arguments(self._hive, self.workflow, run_id)
        return None if found is None else found[1].get("restored")

    def exists(self, run_id: str) -> bool:
        """Return whether there is a team run with this id."""
        return any(each.run_id == run_id for each in self._hive.runs(workflow=WORKFLOW))

    def choose(
        self,
        graph: Graph,
        folder: Path,
        *,
        run_id: str | None = None,
        force: bool = False,
        is_part: bool = False,
    ) -> ChosenRun:
        """Return the run that executes a graph in a folder, as ``choose_run`` says."""
        runs = self._recorded()
        return choose_run(runs, graph, folder, run_id=run_id, force=force, is_part=is_part)

    def _recorded(self) -> RecordedRuns:
        workflows = {each.run_id: each.workflow for each in self._hive.runs()}
        return RecordedRuns(store=self._state_folder, workflows=workflows, arguments=self.arguments)

    def fork(self, chosen: ChosenRun, graph: Graph) -> None:
        """Make the run that goes on from another one with a changed graph.

        Not while that one is executed: it would lack what is completed from then on.
        """
        assert chosen.forked_from is not None
        _, folder = self.arguments(chosen.forked_from)
        changed: dict[str, Json] = {"graph": graph.to_document()}
        if chosen.folder is not None:
            folder = chosen.folder
            changed["folder"] = str(folder)
        restored = self._restored_with(chosen.forked_from)
        if restored is not None:
            executed = executed_steps(self._hive, chosen.forked_from) | chosen.again
            tasks = {name: each for name, each in restored["tasks"].items() if name not in executed}
            changed["restored"] = {**restored, "tasks": tasks}
        with held_for(folder, chosen.run_id, self._state_folder.absolute()):
            fork_without(
                self._hive,
                chosen.forked_from,
                chosen.again,
                replaced_steps,
                new_id=chosen.run_id,
                **changed,
            )

    def restorable(self, graph: Graph, folder: Path) -> Restored | None:
        """Return what the state file of a folder has of a run of this graph whose journal is gone.

        Raises ``ConfigurationError`` if that file is all that is left of something else.
        """
        return restorable(self._recorded(), graph, folder)

    def restore(self, run_id: str, graph: Graph, folder: Path, found: Restored) -> list[str]:
        """Make a run of what a state file has; return the tasks that it takes as complete."""
        document, restored = graph.to_document(), found.arguments(graph, folder, self._own_folders)
        complete = taken(plan_of(document), restored)
        record_start(
            self._hive,
            self.workflow,
            run_id,
            graph=document,
            folder=str(folder),
            restored=restored,
        )
        return list(complete)

    def _defined(self) -> Callable[..., Any]:
        async def task_graph(
            graph: dict[str, Any], folder: str, restored: dict[str, Any] | None = None
        ) -> dict[str, Any]:
            """Execute a task graph in a folder."""
            return await self._execute(graph, Path(folder), restored)

        return task_graph

    async def _execute(
        self, document: dict[str, Json], folder: Path, restored: Json
    ) -> dict[str, Json]:
        active = active_run("the workflow", WORKFLOW)
        run_id = active.run_id
        checked = self._checked.pop(run_id, None)
        if checked is not None and checked.source == document:
            plan = make_plan(checked)
        else:
            plan = await in_thread(partial(plan_of, document))
        complete = taken(plan, restored)
        offered: dict[str, Json] = {} if restored is None else restored["checkpoints"]
        await in_thread(partial(write_graph, folder, document))
        own = self._state_folder / "runs" / run_id
        survivors = Survivors(own / PROCESSES, run_id)
        await in_thread(partial(self._end_survivors, run_id, folder))
        slots = WorkerSlots(self._workers, urgency_of(plan))
        ownership = Ownership(
            plan.graph,
            folder,
            apart=self._own_folders,
            stop=active.suspended if self._strict else None,
        )
        half_done = {each.name for each in active.run.state.steps.values() if each.progress}
        checkpoints = CheckpointFiles(folder, plan.ids, {*half_done, *offered})
        place = Workplace(
            run_id=run_id,
            folder=folder,
            survivors=survivors,
            progress_folder=own / "progress",
            calls_folder=(own / "calls").absolute(),
            worker_of=slots.worker_of,
            functions=await _checked_functions(plan.graph, folder),
            prices=self._hive.prices,
            checkpoints=checkpoints,
            restored=offered,
            apart=self._own_folders,
            ownership=ownership if ownership.is_needed else None,
        )
        steps = _Steps(plan.graph, place, slots)
        execution = Execution(plan, steps.run_task, steps.run_gate, slots, complete)
        steps.asking, steps.parked = execution.asking, execution.parked
        steps.inputs = execution.inputs
        known = active.run.state
        questions = frozenset(map(question_id, known.questions.values()))
        self._tell(Executing(run_id, plan, slots, known.seq, questions), steps, execution, complete)
        state = StatePlace(
            run_id=run_id,
            folder=folder,
            store=self._state_folder.absolute(),
            checkpoints=checkpoints,
            restored={} if restored is None else restored["tasks"],
            is_bankrupt=lambda: active.stop_error is not None and is_bankrupt(active.stop_error),
        )
        file = StateFile(plan, active.run, execution, slots, state)
        slots.on_change = checkpoints.on_change = file.changed
        file.write()
        try:
            await execution.run()
        except GraphFailedError:
            await _warn_of_files(plan.graph, folder, execution.results)
            raise
        finally:
            slots.on_change = _nothing  # a thread that goes on leaves its worker later
            file.write()
        return {
            "feature": plan.graph.feature,
            "tasks": {each: execution.results[each] for each in plan.ids},
            "gates": dict(sorted(execution.gates.items())),
        }

    def _end_survivors(self, run_id: str, folder: Path) -> None:
        """End what outlived earlier starts of a run, and of all others whose tasks work in its folder.

        These are not executed: this run holds the folder.
        """
        place = folder.resolve()
        for each in runs_with_processes(self._state_folder / "runs"):
            if each.name == run_id or self._folder_of(each.name) == place:
                Survivors(each / PROCESSES, each.name).end()

    def _folder_of(self, run_id: str) -> Path | None:
        """Return the folder of the tasks of a run; None if it is not known."""
        try:
            return self.arguments(run_id)[1].resolve()
        except MaestroError:  # it was purged, or cannot be read
            return None

    def _tell(
        self, run: Executing, steps: _Steps, execution: Execution, complete: Iterable[str]
    ) -> None:
        """Have the observer told of a run that starts, and of what is complete from the beginning."""
        if self._observer is None:
            return
        steps.observer = self._observer
        self._observer.executing(run)
        execution.on_complete = self._observer.complete
        execution.on_not_passed = self._observer.not_passed
        for each in complete:
            self._observer.complete(each)


class _Steps:
    """The tasks and gates of a run as steps of it: by name, with the options that the graph says."""

    def __init__(self, graph: Graph, place: Workplace, slots: WorkerSlots) -> None:
        self._graph = graph
        self._tasks = {task.id: task for task in graph.tasks}
        self._place = place
        self._slots = slots
        #: The steps that tasks are, by what they have in common.
        self._definitions: dict[tuple[Any, ...], StepFunction[..., Any]] = {}
        #: The tasks that wait for an answer, and for a breaker.
        self.asking: set[str] = set()
        self.parked: set[str] = set()
        #: The digests of the inputs of tasks that were called, by id; and of these and others.
        self.inputs: dict[str, str] = {}
        self._digests: dict[str, str] = {}
        self.observer: TeamObserver | None = None

    async def run_task(self, task_id: str, results: dict[str, Json]) -> Json:
        """Execute a task, unless it is completed; raise its error if it failed for good."""
        task = self._tasks[task_id]
        step = self._definition_of(task).named(task.id)
        given = task_input(self._graph, task)
        self.inputs[task.id] = self._digests[task.id] = digest_of(given)
        while True:
            result = await step(given, results)
            if not asks(result):
                return result
            self.asking.add(task.id)
            if self.observer is not None:
                self.observer.asks(task.id, result["asks"])
            self._slots.on_change()
            # By its input: where in the graph it stands, and what else is there, changes no question.
            asked = [given, results, result["asks"]]
            question = codec.canonical_digest(asked, "the question of a task").hex()
            answer = await wait_for(task.id, None, str, result["asks"], key=question)
            self.asking.discard(task.id)
            given = with_answer(given, result["asks"], answer)

    def _definition_of(self, task: Task) -> StepFunction[..., Any]:
        """Return the step that tasks with the same persona and limits are, each by its own name."""
        persona = self._graph.persona_of(task)
        assert persona is not None
        seconds = _first(task.timeout_seconds, persona.timeout_seconds, self._graph.timeout_seconds)
        retry = _retry(task, persona, self._graph)
        budget = task.budget or persona.budget
        limits = Limits(
            seconds or TASK_SECONDS,
            MAX_HANDOVERS if retry.max_handovers is None else retry.max_handovers,
            None if budget is None else budget.usd,
        )
        check = task.verification
        checking = (check.timeout_seconds or CHECK_SECONDS) if check is not None else 0.0
        alike = (persona.name, limits, checking, retry.max_attempts, retry.rounds, budget)
        found = self._definitions.get(alike)
        if found is None:

            async def work(given: dict[str, Any], results: dict[str, Any]) -> Any:
                return await self._place.work(given, results, limits)

            options = {
                "persona": persona.name,
                "breaker": persona.name,
                # A fresh worker has as much time as the one that it goes on from.
                "timeout": limits.seconds * (limits.max_handovers + 1) + checking + _MARGIN_SECONDS,
                "max_attempts": retry.max_attempts,
                "rounds": retry.rounds,
                "budget": _amount(budget),
            }
            sizing = _SPENDS_NOTHING if persona.command is not None else _SPENDS_ALIKE
            found = self._definitions[alike] = self._step(work, task.id, options, sizing)
        return found

    async def run_gate(self, level: Level, gate: Gate, results: dict[str, Json]) -> str | None:
        """Execute a gate of a level, unless it is completed; return why it has not passed."""
        seconds = gate.timeout_seconds or CHECK_SECONDS

        async def check(given: dict[str, Any]) -> Literal[True] | str:
            return await self._place.check_gate(given, seconds)

        options = {"persona": _GATES, "timeout": seconds + _MARGIN_SECONDS, "max_attempts": 1}
        step = self._step(check, gate_name(level, gate), options, _SPENDS_NOTHING)
        inputs = {each: self._digest_of(each) for each in results}
        return why_not_passed(await step(gate_input(gate, results, inputs)))

    def _digest_of(self, task_id: str) -> str:
        """Return the digest of the input of a task, also of one that was restored, and not called."""
        if task_id not in self._digests:
            self._digests[task_id] = digest_of(task_input(self._graph, self._tasks[task_id]))
        return self._digests[task_id]

    def _step(
        self, body: Callable[..., Any], name: str, options: dict[str, Any], sizing: Sizing
    ) -> StepFunction[..., Any]:
        """Return a step. Its identity is its input, wherever in the graph it stands."""
        given = {each: value for each, value in options.items() if value is not None}
        checked = Options().changed(given, StepOptions, f"of {name!r}")
        checked = replace(checked, stages=(self._slots,), sizing=sizing, input_is_key=True)
        return StepFunction(body, name, replace(checked, waits_for_breaker=self._note_parked))

    def _note_parked(self, name: str, is_parked: bool) -> None:
        (self.parked.add if is_parked else self.parked.discard)(name)
        if self.observer is not None:
            self.observer.parked(name, is_parked=is_parked)
        self._slots.on_change()


def _nothing() -> None:
    """Do nothing."""


async def _checked_functions(graph: Graph, folder: Path) -> dict[str, Callable[[Assignment], Any]]:
    """Return the functions of Python personas; raise if a task could not be executed."""
    import_functions(graph, folder)
    return await in_thread(partial(check_personas, graph, folder))


async def _warn_of_files(graph: Graph, folder: Path, results: Mapping[str, Json]) -> None:
    """Say which files of complete tasks are not there: the tasks are not executed again for that."""
    not_made = await in_thread(partial(files_not_made, graph, folder, results))
    if not_made:
        _LOG.warning("declared, and not made: %s", _named_files(not_made))
    missing = await in_thread(partial(missing_files, graph, folder, results))
    if missing:
        _LOG.warning(
            "files that complete tasks have made are not there: %s; to make them again:"
            " maestro run GRAPH --force --only %s",
            _named_files(missing),
            " --only ".join(list(missing)[:_NAMED]),
        )


def _named_files(found: dict[str, list[str]]) -> str:
    """Return files, each with its task; of many, how many more there are."""
    files = [f"{path} ({name})" for name, paths in found.items() for path in paths]
    more = f" and {len(files) - _NAMED:,} more" if len(files) > _NAMED else ""
    return f"{', '.join(files[:_NAMED])}{more}"


def _retry(task: Task, persona: Persona, graph: Graph) -> Retry:
    """Return what a task, its persona or its graph says about retries, in this order."""
    said = [each.retry for each in (task, persona, graph) if each.retry is not None]
    if len(said) < 2:
        return said[0] if said else _NO_RETRY
    return Retry(
        max_attempts=_first(*[each.max_attempts for each in said]),
        rounds=_first(*[each.rounds for each in said]),
        max_handovers=_first(*[each.max_handovers for each in said]),
    )


def _first(*values: Any) -> Any:
    for each in values:
        if each is not None:
            return each
    return None


def _amount(budget: Budget | None) -> dict[str, float] | None:
    if budget is None:
        return None
    limits = {"tokens": budget.tokens, "usd": budget.usd}
    return {name: limit for name, limit in limits.items() if limit is not None}
