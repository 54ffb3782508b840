"""``maestro run GRAPH``, ``resume`` and ``stop``: task graphs executed by a team."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from maestro_hive.admin import teams
from maestro_hive.admin.folder import is_vacant
from maestro_hive.admin.runs import find_run
from maestro_hive.cli import graphs, output
from maestro_hive.cli.command import FAILED, run_ids, verb
from maestro_hive.cli.team_run import (
    Manner,
    Shown,
    TeamCall,
    manner_options,
    notifier_of,
    shows_table,
)
from maestro_hive.engine.budget import checked_amount
from maestro_hive.engine.config import ExecutionConfig
from maestro_hive.hive.errors import RunMismatchError
from maestro_hive.hive.hive import Hive
from maestro_hive.kernel.errors import ConfigurationError, RunLeasedError
from maestro_hive.team.persona_checks import check_personas
from maestro_hive.team.plans import plan_of
from maestro_hive.team.restoring import recorded_graph
from maestro_hive.team.runner import WORKFLOW, TeamRunner

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maestro_hive.cli.command import Call
    from maestro_hive.hive.runs import RunInfo
    from maestro_hive.maestro.state.records import RunRecord
    from maestro_hive.team.choosing import ChosenRun
    from maestro_hive.team.graph import Graph
    from maestro_hive.team.restoring import Restored

#: How many tasks a line names.
_NAMED = 8
#: How often a run is chosen again whose id was taken meanwhile.
_TRIES = 20
#: What has become of a run that is only resumed after a retry.
_ENDED = {"failed": "it has failed", "cancelled": "it was cancelled"}
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
    graph = graphs.with_persona(graph, options.persona)
    budget = _amount(options.budget)
    check_personas(graph, Path.cwd())
    with _hive(call) as hive:
        notifier = notifier_of(options.manner, hive)  # or it is an error before a run is made
        shown = Shown(call, on_screen=shows_table(call, options.manner))
        workers = options.workers or graphs.DEFAULT_WORKERS
        runner = TeamRunner(hive, workers=workers, strict=options.strict, observer=shown)
        for left in reversed(range(_TRIES)):
            run_id = _chosen(runner, graph, options)
            team = TeamCall(call, hive, run_id, shown, options.manner, notifier)
            start = partial(runner.run, graph, run_id=run_id, budget=budget)
            try:
                return team.execute(start)
            except (RunLeasedError, RunMismatchError):
                # The same feature, started in another folder at the same moment, has got this id.
                if not left or options.run_id or not runner.is_of_another_folder(run_id):
                    raise
        raise AssertionError("the last try returns, or raises")


def _chosen(runner: TeamRunner, graph: Graph, options: GraphOptions) -> str:
    folder, run_id, force = Path.cwd().absolute(), options.run_id, options.force
    is_part = bool(options.only)
    chosen = runner.choose(graph, folder, run_id=run_id, force=force, is_part=is_part)
    if run_id is not None and chosen.exists:
        _check_same(runner, run_id, graph, folder)
    if not (chosen.exists or chosen.forked_from or force):
        found = runner.restorable(graph, folder)
        if found is not None:
            _restore(runner, chosen.run_id, graph, found)
    if chosen.forked_from is not None:
        why = _why_forked(runner, chosen, graph, is_part=is_part)
        runner.fork(chosen, graph)
        output.note(why)
    return chosen.run_id


def _why_forked(runner: TeamRunner, chosen: ChosenRun, graph: Graph, *, is_part: bool) -> str:
    """Return why a new run goes on from an earlier one, and what it executes."""
    earlier = chosen.forked_from
    assert earlier is not None
    if chosen.replaced_by is not None:
        names = output.listed(sorted(chosen.again), _NAMED)
        return (
            f"run {chosen.replaced_by} has executed {names} with another input after run {earlier}: run"
            f" {chosen.run_id} executes that again, and goes on with what is unchanged"
        )
    if chosen.again:
        names = output.listed([task.id for task in graph.tasks], _NAMED)
        return (
            f"run {chosen.run_id} executes {names} again; what else run {earlier} has completed stays"
            " complete"
        )
    if chosen.folder is not None:
        why = f"the folder was moved since run {earlier}"
    elif is_part:
        return (
            f"run {chosen.run_id} is for a part of the graph: what is unchanged since run {earlier}"
            " stays complete"
        )
    elif _is_part(plan_of(runner.arguments(earlier)[0]).graph, graph):
        why = f"run {earlier} is for a part of the graph"
    else:
        why = f"the graph has changed since run {earlier}"
    return f"{why}: run {chosen.run_id} goes on with what is unchanged"


def _is_part(part: Graph, whole: Graph) -> bool:
    """Return whether a graph has some of the tasks of another one, as by ``--only``."""
    tasks = {task.id: task for task in whole.tasks}
    is_smaller = len(part.tasks) < len(tasks)
    return is_smaller and all(tasks.get(each.id) == each for each in part.tasks)


def _check_same(runner: TeamRunner, run_id: str, graph: Graph, folder: Path) -> None:
    """Raise if the run of this id was started with something else."""
    document, place = runner.arguments(run_id)
    if place != folder:
        raise ConfigurationError(
            f"run {run_id} was started in another folder, {place}\n"
            "Start it there, or give another --run-id."
        )
    if document != graph.to_document():
        other = runner.choose(graph, folder)
        then = "goes on with what is unchanged" if other.forked_from == run_id else "is its run"
        raise ConfigurationError(
            f"run {run_id} is of another graph than this one.\n"
            f"Leave --run-id out: run {other.run_id} {then}; or give another id."
        )


def _restore(runner: TeamRunner, run_id: str, graph: Graph, found: Restored) -> None:
    complete = runner.restore(run_id, graph, Path.cwd().absolute(), found)
    output.note(
        f"the journal of run {found.run_id} is gone: run {run_id} goes on from {found.source}, with"
        f" {output.many(len(complete), 'complete task')} of {len(graph.tasks)}; --force starts a new one"
    )


def _amount(text: str | None) -> int | str | None:
    """Return what a run may spend, as it was typed; raise if it is no amount."""
    if text is None:
        return None
    amount = int(text) if text.isdecimal() else text
    checked_amount("--budget", amount)
    return amount


def _hive(call: Call) -> Hive:
    folder = call.folder  # which says which one it is
    config = ExecutionConfig()  # of the environment as it is now
    return Hive(config=config) if call.chosen is None else Hive(folder, config)


def _check_store(call: Call, what: str) -> None:
    """Raise unless there is a state folder: a Hive would make one."""
    if call.chosen is None and is_vacant(call.folder):
        raise _no_run(what)
    with call.reading():
        pass


def _no_run(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"there is no run of a task graph in {Path.cwd()} {what}; 'maestro runs' lists all runs"
    )


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
    run of the current folder that is not complete; of each feature only its last run counts, as
    those before it are of graphs that have changed since. The number of workers may be another one than
    before. A run that failed is resumed after 'maestro retry'. Runs of other workflows are resumed by
    'maestro run MODULE:WORKFLOW --run-id RUN'.

    Examples:
        maestro resume                      the last one of this folder
        maestro resume shop --workers 8     with 8 tasks at the same time
    """
    chosen = Manner(**manner)
    with _hive(call) as hive:
        notifier = notifier_of(chosen, hive)
        shown = Shown(call, on_screen=shows_table(call, chosen))
        workers = workers or graphs.DEFAULT_WORKERS
        runner = TeamRunner(hive, workers=workers, strict=strict, observer=shown)
        found = _resumable(runner, hive, run_id)
        with call.reading() as reader:
            teams.check_team_run(reader, found)
        team = TeamCall(call, hive, found, shown, chosen, notifier)
        return team.execute(lambda: runner.resume(found))


def _resumable(runner: TeamRunner, hive: Hive, run_id: str | None) -> str:
    """Return the run to resume; if nothing is left of it but the state file in this folder, from that."""
    if run_id is not None and (runner.exists(run_id) or not _restored_here(runner, run_id)):
        return run_id  # or say that there is none
    try:
        return _latest_incomplete(runner, hive)
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
    _check_store(call, "yet")
    with _hive(call) as hive:
        for each in _runs_here(TeamRunner(hive), hive):
            return each.run_id
    raise _no_run("yet")


def _executed_run(call: Call) -> str:
    """Return the last team run of this folder that a process executes."""
    with _hive(call) as hive:
        for each in _runs_here(TeamRunner(hive), hive):
            if each.status in ("running", "waiting"):
                return each.run_id
    raise _no_run("that is executed")


def _latest_incomplete(runner: TeamRunner, hive: Hive) -> str:
    """Return the last run of this folder, unless it is complete; of each feature only its last one.

    The runs before it are of graphs that were changed since: what they lack was done by later ones.
    """
    complete: dict[str, str] = {}
    earlier = None
    for each in _runs_here(runner, hive):
        feature = str(runner.arguments(each.run_id)[0].get("feature"))
        if each.status == "success":
            complete.setdefault(feature, each.run_id)
        elif feature not in complete:
            return each.run_id
        else:
            earlier = earlier or each.run_id
    if not complete:
        raise _no_run("that is not complete")
    last = next(iter(complete.values()))
    hint = f"; to resume an earlier one all the same: maestro resume {earlier}" if earlier else ""
    raise ConfigurationError(f"the last run of {Path.cwd()}, {last}, is complete{hint}")


def _runs_here(runner: TeamRunner, hive: Hive) -> Iterator[RunInfo]:
    """Yield the team runs of the current folder, the newest first."""
    here = Path.cwd().absolute()
    for each in hive.runs(workflow=WORKFLOW):
        if runner.arguments(each.run_id)[1] == here:
            yield each


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
    _check_store(call, "that is executed")
    found = run_id or _executed_run(call)
    with call.reading() as reader:
        what = "was stopped" if teams.stop_run(reader, found) else None
        output.line(stopped_line(call, find_run(reader, found), what))


def stopped_line(call: Call, record: RunRecord, what: str | None) -> str:
    """Return what was done to a run that is not executed now, None for nothing, and how it goes on."""
    line = f"run {record.name} {what or 'is executed by no process'}"
    resume = call.command_line("resume", record.name)
    if record.status == "success":
        return f"{line}; it is complete"
    if record.status in _ENDED:
        retry = call.command_line("retry", record.name)
        return f"{line}; {_ENDED[record.status]}, and to retry it: {retry} && {resume}"
    return f"{line}; to resume it: {resume}"
