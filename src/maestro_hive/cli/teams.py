"""``maestro run GRAPH``, ``resume`` and ``stop``: task graphs executed by a team."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from maestro_hive.admin import teams
from maestro_hive.cli import graphs, output
from maestro_hive.cli.command import FAILED, run_ids, verb
from maestro_hive.cli.team_run import Manner, Shown, TeamCall, manner_options, shows_table
from maestro_hive.engine.config import ExecutionConfig
from maestro_hive.hive.hive import Hive
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.team.graph import Persona
from maestro_hive.team.personas import check_personas
from maestro_hive.team.restoring import recorded_graph
from maestro_hive.team.runner import WORKFLOW, ChosenRun, TeamRunner

if TYPE_CHECKING:
    from maestro_hive.cli.command import Call
    from maestro_hive.team.graph import Graph
    from maestro_hive.team.restoring import Restored

#: How many tasks a line names.
_NAMED = 8
_RUN_ARGUMENT = click.argument("run_id", metavar="[RUN]", required=False, shell_complete=run_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOptions:
    """What ``maestro run GRAPH`` was given."""

    run_id: str | None = None
    workers: int | None = None
    only: tuple[str, ...] = ()
    force: bool = False
    strict: bool = False
    budget: str | None = None
    persona: str | None = None
    manner: Manner = field(default_factory=Manner)


# --- executing ------------------------------------------------------------------------------------


def run_graph(call: Call, path: Path, options: GraphOptions) -> int | None:
    """Execute a task graph, or resume its run; return the exit code."""
    graph = graphs.graph_to_run(call, path, options.only, strict=options.strict)
    if graph is None:
        return FAILED
    graph = _with_persona(graph, options.persona)
    check_personas(graph, Path.cwd())
    with _hive(call) as hive:
        shown = Shown(call, on_screen=shows_table(call, options.manner))
        workers = options.workers or graphs.DEFAULT_WORKERS
        runner = TeamRunner(hive, workers=workers, strict=options.strict, observer=shown)
        run_id = _chosen(runner, graph, options)
        budget = _amount(options.budget)
        team = TeamCall(call, hive, run_id, shown, options.manner)
        return team.execute(lambda: runner.run(graph, run_id=run_id, budget=budget))


def _with_persona(graph: Graph, command: str | None) -> Graph:
    """Return a graph whose tasks without a persona are executed by a command."""
    if command is None or graph.persona is not None:
        return graph
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise click.UsageError(f"--persona: the command cannot be split: {error}.") from None
    if not words:
        raise click.UsageError("--persona needs a command.")
    return replace(graph, persona=Persona(name="default", command=words))


def _chosen(runner: TeamRunner, graph: Graph, options: GraphOptions) -> str:
    folder, run_id, force = Path.cwd().absolute(), options.run_id, options.force
    chosen = (
        runner.choose(graph, folder, force=force, is_part=bool(options.only))
        if run_id is None
        else ChosenRun(run_id, exists=runner.exists(run_id))
    )
    if not (chosen.exists or chosen.forked_from or force):
        found = runner.restorable(graph, folder)
        if found is not None:
            _restore(runner, chosen.run_id, graph, found)
        elif other := runner.found_elsewhere(graph, folder):
            output.note(
                f"run {other.run_id} in the state folder {other.store} has"
                f" {output.many(len(other.tasks), 'complete task')} of this graph; run {chosen.run_id} in"
                f" this one executes all of them. To go on there: --store {shlex.quote(other.store or '')}"
            )
    if chosen.forked_from is not None:
        runner.fork(chosen, graph)
        output.note(
            f"run {chosen.run_id} executes {output.listed([task.id for task in graph.tasks], _NAMED)}"
            f" again; what else run {chosen.forked_from} has completed stays complete"
            if chosen.again
            else f"the graph has changed since run {chosen.forked_from}: run {chosen.run_id} goes on with"
            " what is unchanged"
        )
    return chosen.run_id


def _restore(runner: TeamRunner, run_id: str, graph: Graph, found: Restored) -> None:
    complete = runner.restore(run_id, graph, Path.cwd().absolute(), found)
    output.note(
        f"the journal of run {found.run_id} is gone: run {run_id} goes on from {found.source}, with"
        f" {output.many(len(complete), 'complete task')} of {len(graph.tasks)}; --force starts a new one"
    )


def _amount(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.isdecimal() else text


def _hive(call: Call) -> Hive:
    folder = call.folder  # which says which one it is
    config = ExecutionConfig()  # of the environment as it is now
    return Hive(config=config) if call.chosen is None else Hive(folder, config)


# --- verbs ----------------------------------------------------------------------------------------


@verb("resume", reads=True)
@_RUN_ARGUMENT
@graphs.workers_option
@click.option("--strict", is_flag=True, help=f"{graphs.STRICT_RUN.capitalize()}.")
@manner_options
def resume_command(
    call: Call, run_id: str | None, workers: int | None, strict: bool, **manner: Any
) -> int | None:
    """Resume a run of a task graph.

    Completed tasks are not executed again, also if the process was killed. Without RUN it is the last
    run of the current folder that is not complete. The number of workers may be another one than
    before. A run that failed is resumed after 'maestro retry'. Runs of other workflows are resumed by
    'maestro run MODULE:WORKFLOW --run-id RUN'.

    Examples:
        maestro resume                      the last one of this folder
        maestro resume shop --workers 8     with 8 tasks at the same time
    """
    chosen = Manner(**manner)
    with _hive(call) as hive:
        shown = Shown(call, on_screen=shows_table(call, chosen))
        workers = workers or graphs.DEFAULT_WORKERS
        runner = TeamRunner(hive, workers=workers, strict=strict, observer=shown)
        found = _resumable(runner, hive, run_id)
        with call.reading() as reader:
            teams.check_team_run(reader, found)
        team = TeamCall(call, hive, found, shown, chosen)
        return team.execute(lambda: runner.resume(found))


def _resumable(runner: TeamRunner, hive: Hive, run_id: str | None) -> str:
    """Return the run to resume; if nothing is left of it but the state file in this folder, from that."""
    if run_id is not None and (runner.exists(run_id) or not _restored_here(runner, run_id)):
        return run_id  # or say that there is none
    try:
        return _latest(runner, hive, statuses=None)
    except ConfigurationError:
        if restored := _restored_here(runner, None):
            return restored
        raise


def _restored_here(runner: TeamRunner, run_id: str | None) -> str | None:
    """Return a run that is made of the state file in this folder; None if it is of no such run."""
    here = Path.cwd().absolute()
    graph = recorded_graph(here)
    found = None if graph is None else runner.restorable(graph, here)
    if graph is None or found is None or run_id not in (None, found.run_id):
        return None
    made = found.run_id or ""
    _restore(runner, made, graph, found)
    return made


def latest_run(call: Call) -> str:
    """Return the last team run of this folder, whatever has become of it."""
    every = ("running", "waiting", "stopped", "pending", "failed", "success", "bankrupt")
    with _hive(call) as hive:
        return _latest(TeamRunner(hive), hive, statuses=(*every, "cancelled"))


def _latest(runner: TeamRunner, hive: Hive, *, statuses: tuple[str, ...] | None) -> str:
    """Return the last team run of this folder; without statuses, that is not complete."""
    here = Path.cwd().absolute()
    for each in hive.runs(workflow=WORKFLOW):
        is_meant = each.status != "success" if statuses is None else each.status in statuses
        if is_meant and runner.arguments(each.run_id)[1] == here:
            return each.run_id
    what = "that is not complete" if statuses is None else "that is executed"
    if statuses is not None and "success" in statuses:
        what = "yet"
    raise ConfigurationError(
        f"there is no run of a task graph in {here} {what}; 'maestro runs' lists all runs"
    )


@verb("stop")
@_RUN_ARGUMENT
def stop_command(call: Call, run_id: str | None) -> None:
    """Stop the process that executes a run of a task graph.

    It is asked to stop as by Ctrl+C: it starts nothing more, ends the commands of its tasks, and ends.
    That counts as no failure, and 'maestro resume' goes on. Without RUN it is the one that is executed
    in the current folder.

    Examples:
        maestro stop            the run of this folder
        maestro stop shop       a run by its id
    """
    with _hive(call) as hive:
        running = ("running", "waiting")
        found = run_id or _latest(TeamRunner(hive), hive, statuses=running)
    with call.reading() as reader:
        was_executed = teams.stop_run(reader, found)
    again = call.command_line("resume", found)
    what = "was stopped" if was_executed else "is executed by no process"
    output.line(f"run {found} {what}; to resume it: {again}")
