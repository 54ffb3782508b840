"""``maestro graph`` and ``maestro init``, and the dry run of a task graph: nothing is executed."""

from __future__ import annotations

import shlex
import sys
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from maestro_hive.cli import output
from maestro_hive.cli.command import FAILED, verb
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.team import graph_files
from maestro_hive.team.graph import AGENTS, Persona, make_plan, select, simulate
from maestro_hive.team.graph.commands import PROMPT_ADVICE, is_prompt_in_script
from maestro_hive.team.graph.drawing import MAX_DRAWN, draw
from maestro_hive.team.graph.problems import closest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from maestro_hive.admin.teams import Reused
    from maestro_hive.cli.command import Call
    from maestro_hive.team.graph import Checked, Graph, Level, Plan, Problem, Schedule
    from maestro_hive.team.graph_files import MissingProgram
    from maestro_hive.team.persona_checks import Refused

DEFAULT_WORKERS = 4
_MOST_WORKERS = 1000
#: How many ids a line names.
_NAMED = 8

graph_argument = click.argument("graph", metavar="GRAPH", type=click.Path(path_type=Path))
workers_option = click.option(
    "--workers",
    type=click.IntRange(1, _MOST_WORKERS),
    metavar="N",
    help=f"How many tasks may run at the same time.  [default: {DEFAULT_WORKERS}]",
)
strict_option = click.option(
    "--strict",
    is_flag=True,
    help="Hold a graph to the published schema; tasks that own the same file are errors.",
)
#: What ``--strict`` means while a graph is executed.
STRICT_RUN = (
    "a changed file that no running task owns stops the run, if it is not known which task did it"
)


@verb("graph", reads=True)
@graph_argument
@workers_option
@strict_option
@click.option(
    "--svg", metavar="FILE", type=click.Path(path_type=Path), help="Draw it; FILE is replaced."
)
def graph_command(
    call: Call, graph: Path, workers: int | None, strict: bool, svg: Path | None
) -> int | None:
    """Check a task graph; show its levels and its critical path.

    GRAPH is a file in JSON, as MAHABHARATHA and zerg write it, or in TOML. All errors are listed at
    once, each with its place and what to do; with any the exit code is 1. Warnings do not stop a run.
    The time with N workers follows from the estimates of the tasks. Nothing is executed.

    Examples:
        maestro graph task-graph.json                     is it right, and what would run when?
        maestro graph task-graph.toml --workers 8         the time that 8 workers would take
        maestro graph task-graph.json --strict            hold it to the published schema
        maestro graph task-graph.json --svg graph.svg     draw it
        maestro graph task-graph.json --json              for another program
    """
    checked = graph_files.check_file(graph, strict=strict)
    schedule = None
    if checked.plan is not None:
        schedule = simulate(checked.plan, workers or DEFAULT_WORKERS)
        if svg is not None:
            _draw(checked.plan, svg)
    if call.wants_json:
        shown = _members(graph, checked, checked.plan, schedule)
        click.echo(output.to_json(shown, indent=2))
    else:
        _show_problems(graph, checked)
        if checked.plan is not None and schedule is not None:
            _show_plan(checked.plan, schedule, workers or DEFAULT_WORKERS)
        if svg is not None and checked.plan is not None:
            output.note(f"drawn: {svg}")
    return FAILED if checked.errors else None


def _draw(plan: Plan, file: Path) -> None:
    count = len(plan.graph.tasks)
    if count > MAX_DRAWN:
        raise ConfigurationError(
            f"--svg: a picture of {count:,} tasks cannot be read; the limit is {MAX_DRAWN:,}"
        )
    graph_files.write_picture(file, draw(plan))


@verb("init")
@click.argument("folder", metavar="[DIR]", default=".", type=click.Path(path_type=Path))
@click.option("--toml", is_flag=True, help="In TOML, with comments.  [default]")
@click.option("--json", "as_json", is_flag=True, help="In JSON.")
@click.option("--agent", type=click.Choice(AGENTS), help="Have its tasks executed by an agent.")
def init_command(_: Call, folder: Path, *, toml: bool, as_json: bool, agent: str | None) -> None:
    """Write an example task graph to start from.

    It is written to DIR, the current folder by default, as task-graph.toml with comments that explain
    every part, or as task-graph.json. A file that exists is never replaced. The graph can be executed
    as it is: its tasks are done by a small script, which you replace by an agent or a command.

    Examples:
        maestro init                    task-graph.toml, here
        maestro init --json specs       specs/task-graph.json
        maestro init --agent claude     a graph that claude executes
    """
    if toml and as_json:
        raise click.UsageError("Give either --toml or --json.")
    path = graph_files.write_example(folder, "json" if as_json else "toml", agent)
    typed = shlex.quote(str(path))
    output.line(
        f"{path} was written; 'maestro graph {typed}' checks it, and 'maestro run {typed}' executes it"
    )


# --- the dry run ----------------------------------------------------------------------------------


def show_dry_run(
    call: Call,
    path: Path,
    workers: int | None,
    only: Sequence[str],
    *,
    strict: bool,
    force: bool = False,
    persona: str | None = None,
    run_id: str | None = None,
) -> int | None:
    """Show what a run of a graph would do, and what it would refuse; nothing is written.

    No task is executed; but whether a function is there is only known when its module is imported.
    """
    from maestro_hive.team.persona_checks import functions_of

    checked = graph_files.check_file(path, strict=strict)
    plan = _selected(checked, path, only)
    if plan is not None:
        plan = replace(plan, graph=with_persona(plan.graph, persona))
    missing: Sequence[MissingProgram] = ()
    refused: Sequence[Refused] = ()
    schedule, reused = None, None
    count = workers or DEFAULT_WORKERS
    if plan is not None:
        with _no_bytecode():
            refused = functions_of(plan.graph, Path.cwd())[1]
        missing = graph_files.missing_programs(plan.graph)
        schedule = simulate(plan, count)
        reused = _reused(call, plan, run_id, force=force)
    if call.wants_json:
        shown = _members(path, checked, plan, schedule)
        shown["refused"] = [each._asdict() for each in refused]
        shown["missing_programs"] = [asdict(each) for each in missing]
        shown["reused"] = None if reused is None else asdict(reused)
        click.echo(output.to_json(shown, indent=2))
    else:
        _show_problems(path, checked)
        if plan is not None and schedule is not None:
            _show_plan(plan, schedule, count)
            _show_lanes(schedule)
            for each in refused:
                output.line(f"cannot be executed: {each}")
            _show_missing(missing)
            _show_reused(reused, plan)
            output.note("dry run: nothing was executed or written")
    return FAILED if checked.errors or refused else None


@contextmanager
def _no_bytecode() -> Iterator[None]:
    """Import modules meanwhile without writing ``__pycache__``."""
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def _reused(call: Call, plan: Plan, run_id: str | None, *, force: bool) -> Reused | None:
    from maestro_hive.admin import folder, teams

    store, here = folder.choose_folder(call.chosen)[0], Path.cwd().absolute()
    if folder.is_vacant(store):
        return teams.reused_by(None, plan, here, store=store, run_id=run_id, force=force)
    with call.reading() as reader:
        return teams.reused_by(reader, plan, here, store=store, run_id=run_id, force=force)


def _show_reused(reused: Reused | None, plan: Plan) -> None:
    if reused is None:
        return
    done, total = len(reused.tasks), len(plan.ids)
    named = f": {output.listed(reused.tasks, _NAMED)}" if done else ""
    output.line(f"already done, by {reused.source}: {done} of {output.many(total, 'task')}{named}")


def graph_to_run(call: Call, path: Path, only: Sequence[str], *, strict: bool) -> Graph | None:
    """Return the graph of a file that shall be executed; None if it has errors, which were shown."""
    checked = graph_files.check_file(path, strict=strict)
    plan = _selected(checked, path, only)
    if plan is not None:
        for each in checked.warnings:
            task = "" if each.task is None else f" (task {each.task})"
            output.note(f"warning: {_place(path, each)}{task}: {each.message}; {each.advice}")
        return plan.graph
    if call.wants_json:
        click.echo(output.to_json(_members(path, checked, None, None), indent=2))
    else:
        _show_problems(path, checked)
    return None


def with_persona(graph: Graph, command: str | None) -> Graph:
    """Return a graph whose tasks without a persona are executed by an agent, or by a command."""
    if command is None or graph.persona is not None:
        return graph
    if command in AGENTS:
        return replace(graph, persona=command)
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise click.UsageError(f"--persona: the command cannot be split: {error}.") from None
    if not words:
        raise click.UsageError("--persona needs a command.")
    if is_prompt_in_script(words):
        raise click.UsageError(
            f"--persona: {{prompt}} stands in the script of a shell; {PROMPT_ADVICE}."
        )
    return replace(graph, persona=Persona(name="default", command=words))


def _selected(checked: Checked, path: Path, only: Sequence[str]) -> Plan | None:
    if checked.graph is None or not only:
        return checked.plan
    known = {task.id: None for task in checked.graph.tasks}
    for each in only:
        if each not in known:
            near = closest(each, known)
            hint = (
                f"did you mean {near}?" if near else f"it has {output.listed(list(known), _NAMED)}"
            )
            raise ConfigurationError(f"--only {each}: {path} has no such task; {hint}")
    return make_plan(select(checked.graph, only))


# --- what is shown --------------------------------------------------------------------------------


def _show_problems(path: Path, checked: Checked) -> None:
    rows = [
        *(_problem_row(path, "error", "red", each) for each in checked.errors),
        *(_problem_row(path, "warning", "yellow", each) for each in checked.warnings),
    ]
    output.table(["", "place", "task", "problem", "what to do"], rows)
    if checked.more_errors:
        output.line(f"and {output.many(checked.more_errors, 'more error', 'more errors')}")
    if checked.more_warnings:
        output.line(f"and {output.many(checked.more_warnings, 'more warning', 'more warnings')}")
    if rows and checked.plan is not None and output.is_terminal():
        output.line()


def _problem_row(path: Path, kind: str, style: str, problem: Problem) -> list[output.Cell]:
    return [
        output.Styled(kind, style),
        _place(path, problem),
        problem.task,
        problem.message,
        problem.advice,
    ]


def _place(path: Path, problem: Problem) -> str:
    line = "" if problem.line is None else f":{problem.line}"
    return f"{path}{line} {problem.path}"


def _show_plan(plan: Plan, schedule: Schedule, workers: int) -> None:
    graph = plan.graph
    count, work = len(graph.tasks), sum(plan.minutes)
    output.heading(
        f"{output.in_one_line(graph.feature)}: {output.many(count, 'task')} in"
        f" {output.many(len(graph.levels), 'level')},"
        f" {_minutes(work)} of work"
    )
    tasks = {task.id: at for at, task in enumerate(graph.tasks)}
    critical = set(plan.critical_path)
    rows = [
        _task_row(plan, tasks[each], level, critical)
        for level in graph.levels
        for each in level.tasks
    ]
    output.table(["level", "task", "title", "estimate", "after", "owns"], rows)
    if output.is_terminal():
        output.line()
    for text in _facts(plan, schedule, workers):
        output.line(text)


def _task_row(plan: Plan, at: int, level: Level, critical: set[str]) -> list[output.Cell]:
    task = plan.graph.tasks[at]
    return [
        level.number,
        output.Styled(task.id, "bold" if task.id in critical else ""),
        output.shortened(task.title, 60),
        _minutes(plan.minutes[at]),
        output.listed([plan.ids[each] for each in plan.before[at]], _NAMED),
        output.listed(task.files.owned, 3),
    ]


def _facts(plan: Plan, schedule: Schedule, workers: int) -> Iterator[str]:
    for level in plan.graph.levels:
        for gate in level.gates:
            kind = "" if gate.required else " (not required)"
            yield f"gate after level {level.number}: {gate.name}{kind}: {gate.command}"
    path = " → ".join(_some(plan.critical_path))
    yield f"critical path: {path} ({_minutes(plan.critical_minutes)})"
    for conflict in plan.conflicts:
        ids = " → ".join(_some(conflict.tasks))
        yield f"never at once: {ids}{f' ({conflict.reason})' if conflict.reason else ''}"
    unknown = sum(task.estimate_minutes is None for task in plan.graph.tasks)
    if unknown:
        yield f"no estimate: {output.many(unknown, 'task')}, taken as the median of the others"
    yield (
        f"with {output.many(workers, 'worker')}: {_minutes(schedule.minutes)},"
        f" at most {output.many(schedule.most_at_once, 'task')} at the same time"
    )


def _some(ids: Sequence[str]) -> list[str]:
    return list(ids) if len(ids) <= 2 * _NAMED else [*ids[:_NAMED], "…", *ids[-_NAMED:]]


def _minutes(minutes: float) -> str:
    return output.duration(minutes * 60) if minutes else "0 min"


def _show_lanes(schedule: Schedule) -> None:
    if output.is_terminal():
        output.line()
    rows: list[list[output.Cell]] = [
        [number, slot.task, _minutes(slot.start), _minutes(slot.end)]
        for number, lane in enumerate(schedule.lanes, 1)
        for slot in lane
    ]
    output.table(["worker", "task", "start", "end"], rows)


def _show_missing(missing: Sequence[MissingProgram]) -> None:
    for each in missing:
        output.line(
            f"not on PATH: {each.program}, needed by {output.listed(each.needed_by, _NAMED)}"
        )


def _members(
    path: Path, checked: Checked, plan: Plan | None, schedule: Schedule | None
) -> dict[str, Any]:
    """Return what ``--json`` prints."""
    shown: dict[str, Any] = {
        "graph": str(path),
        "errors": [asdict(each) for each in checked.errors],
        "warnings": [asdict(each) for each in checked.warnings],
        "more_errors": checked.more_errors,
        "more_warnings": checked.more_warnings,
    }
    if plan is not None and schedule is not None:
        shown |= _plan_members(plan) | {"schedule": asdict(schedule)}
    return shown


def _plan_members(plan: Plan) -> dict[str, Any]:
    return {
        "feature": plan.graph.feature,
        "levels": [
            {
                "number": level.number,
                "name": level.name,
                "tasks": level.tasks,
                "gates": [
                    {"name": gate.name, "command": gate.command, "required": gate.required}
                    for gate in level.gates
                ],
            }
            for level in plan.graph.levels
        ],
        "tasks": [
            {
                "id": task.id,
                "title": task.title,
                "level": task.level,
                "minutes": plan.minutes[at],
                "dependencies": task.dependencies,
                "after": [plan.ids[each] for each in plan.before[at]],
                "owns": task.files.owned,
            }
            for at, task in enumerate(plan.graph.tasks)
        ],
        "critical_path": plan.critical_path,
        "critical_minutes": plan.critical_minutes,
        "conflicts": [
            {"tasks": each.tasks, "reason": each.reason, "path": each.path}
            for each in plan.conflicts
        ],
    }
