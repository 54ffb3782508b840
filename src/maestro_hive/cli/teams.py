"""``maestro run GRAPH``, ``resume``, ``stop`` and ``status``: task graphs executed by a team."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from maestro_hive.admin import teams
from maestro_hive.cli import graphs, output
from maestro_hive.cli.command import FAILED, INTERRUPTED, PERSON_NEEDED, run_ids, verb
from maestro_hive.engine.config import ExecutionConfig
from maestro_hive.engine.errors import HelpNeeded, TokenBudgetExceeded
from maestro_hive.hive.errors import RunCancelledError, RunFailedError
from maestro_hive.hive.hive import Hive
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.kernel.process import run_async
from maestro_hive.kernel.signals import until_signal
from maestro_hive.maestro.state import events
from maestro_hive.maestro.state.run_view import to_dict
from maestro_hive.team.graph import Persona
from maestro_hive.team.personas import check_personas
from maestro_hive.team.runner import WORKFLOW, TeamRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from maestro_hive.admin.teams import TaskView, TeamView
    from maestro_hive.cli.command import Call
    from maestro_hive.maestro.state.events import RunEvent
    from maestro_hive.team.graph import Graph

_RUN_ARGUMENT = click.argument("run_id", metavar="[RUN]", required=False, shell_complete=run_ids)
#: How much of an error is shown in a line, and at the end.
_LINE, _OUTPUT = 160, 1_500
#: How often ``status --watch`` looks, in seconds.
_WATCH_SECONDS = 1.0
#: How long what was recorded last may take to be printed after the end.
_PRINT_SECONDS = 2.0


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


# --- executing ------------------------------------------------------------------------------------


def run_graph(call: Call, path: Path, options: GraphOptions) -> int | None:
    """Execute a task graph, or resume its run; return the exit code."""
    graph = graphs.graph_to_run(call, path, options.only, strict=options.strict)
    if graph is None:
        return FAILED
    graph = _with_persona(graph, options.persona)
    check_personas(graph, Path.cwd())
    with _hive(call) as hive:
        runner = TeamRunner(hive, workers=options.workers or graphs.DEFAULT_WORKERS)
        run_id = options.run_id or _chosen(runner, graph, force=options.force)
        budget = _amount(options.budget)
        return _execute(call, hive, run_id, lambda: runner.run(graph, run_id=run_id, budget=budget))


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


def _chosen(runner: TeamRunner, graph: Graph, *, force: bool) -> str:
    chosen = runner.choose(graph, Path.cwd().absolute(), force=force)
    if chosen.forked_from is not None:
        runner.fork(chosen, graph)
        output.note(
            f"the graph has changed since run {chosen.forked_from}: run {chosen.run_id} goes on with"
            " what is unchanged"
        )
    return chosen.run_id


def _amount(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.isdecimal() else text


def _hive(call: Call) -> Hive:
    folder = call.folder  # which says which one it is
    config = ExecutionConfig()  # of the environment as it is now
    return Hive(config=config) if call.chosen is None else Hive(folder, config)


def _execute(
    call: Call, hive: Hive, run_id: str, start: Callable[[], Coroutine[Any, Any, Any]]
) -> int | None:
    """Execute a run, print what happens, and report at its end; return the exit code."""
    before = run_async(_last_event(hive, run_id))
    output.note(f"run: {run_id}")
    again = call.command_line("resume", run_id)
    code: int | None = None
    with _hangup_stops():
        try:
            work = _printed(hive, run_id, start(), before, quiet=call.wants_json)
            run_async(until_signal(work, f"run {run_id!r} was stopped; to resume it"))
        except (RunFailedError, RunCancelledError) as error:
            code = FAILED
            if isinstance(error, RunCancelledError):
                output.complain(str(error))
        except KeyboardInterrupt as stopped:
            if sys.stderr.isatty():
                click.echo(err=True)  # the line on which the terminal wrote ^C
            output.complain(f"{str(stopped) or 'interrupted'}: {again}")
            return INTERRUPTED
        except SystemExit as stopped:
            output.complain(f"a signal stopped run {run_id!r}; to resume it: {again}")
            return int(stopped.code or 0)
        except (HelpNeeded, TokenBudgetExceeded) as error:
            output.complain(f"{error}. A person has to decide; then: {again}")
            code = PERSON_NEEDED
    _report(call, run_id, run_async(_executed(hive, run_id, before)))
    return code


@contextlib.contextmanager
def _hangup_stops() -> Iterator[None]:
    """Let a terminal that is closed stop the run as SIGTERM does; not if it is to be ignored."""
    before = signal.getsignal(signal.SIGHUP)
    if before is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGHUP, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


# --- what happens, in lines -----------------------------------------------------------------------


async def _printed(
    hive: Hive, run_id: str, work: Coroutine[Any, Any, Any], before: int, *, quiet: bool
) -> Any:
    """Return what the run returns; meanwhile, print a line for each thing that happens in it."""
    executing = asyncio.ensure_future(work)
    if quiet:
        return await executing
    printing = asyncio.ensure_future(_print_events(hive, run_id, before, executing))
    try:
        return await executing
    finally:
        if not executing.done():
            executing.cancel()
            await asyncio.wait({executing})
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(printing, _PRINT_SECONDS)


async def _last_event(hive: Hive, run_id: str) -> int:
    if all(each.run_id != run_id for each in hive.runs(workflow=WORKFLOW)):
        return 0
    return max([each.seq async for each in hive.events(run_id, follow=False)], default=0)


async def _executed(hive: Hive, run_id: str, before: int) -> set[str]:
    """Return what was completed after an event."""
    found = hive.events(run_id, after=before, follow=False)
    return {each.name async for each in found if isinstance(each, events.StepCompleted)}


async def _print_events(
    hive: Hive, run_id: str, after: int, executing: asyncio.Future[Any]
) -> None:
    """Print the events of a run; a screen that is gone stops the printing, and not the run."""
    while all(each.run_id != run_id for each in hive.runs(workflow=WORKFLOW)):
        if executing.done():
            return
        await asyncio.sleep(0.01)
    started: dict[int, float] = {}
    with contextlib.suppress(OSError):
        while True:
            is_last = executing.done()
            async for event in hive.events(run_id, after=after, follow=not is_last):
                after = event.seq
                for text in _lines(event, started):
                    output.line(f"{event.at.astimezone():%H:%M:%S}  {text}")
                    sys.stdout.flush()
            if is_last:
                return
            await asyncio.sleep(0.01)  # it is about to start, or has just ended


def _lines(event: RunEvent, started: dict[int, float]) -> Iterator[str]:
    match event:
        case events.StepStarted():
            started[event.step] = event.at.timestamp()
            again = f" (attempt {event.attempt})" if event.attempt > 1 else ""
            yield f"{event.label}: started{again}"
        case events.StepFailed():
            reason = output.shortened(_one_line(event.message), _LINE)
            yield f"{event.label}: attempt {event.attempt} failed: {reason}"
        case events.StepCompleted():
            seconds = event.at.timestamp() - started.get(event.step, event.at.timestamp())
            yield f"{event.label}: complete in {output.took(seconds)}"
        case events.StepGaveUp():
            yield f"{event.label}: failed for good"
        case events.StepStopped():
            yield f"{event.label}: stopped"
        case events.WaitStarted() if event.what == "answer":
            yield (
                f"{event.name}: waits for an answer:"
                f" maestro answer {event.run_id} {event.name} TEXT"
            )


# --- the end --------------------------------------------------------------------------------------


def _report(call: Call, run_id: str, executed: set[str]) -> None:
    """Print what was done, reused and retried; failures last, with the command to retry."""
    with call.reading() as reader:
        view = teams.team_view(reader, run_id)
    if call.wants_json:
        call.print_json(run=to_dict(view), executed=sorted(executed))
        return
    tasks = [each for each in view.tasks if not each.is_gate]
    complete = [each for each in tasks if each.status == teams.COMPLETE]
    reused = sum(each.id not in executed for each in complete)
    retried = [each.id for each in complete if each.failures and each.id in executed]
    output.heading(
        f"{view.feature}: {len(complete)} of {output.many(len(tasks), 'task')} complete"
        f" ({len(complete) - reused} executed, {reused} reused)"
    )
    if retried:
        output.line(f"retried: {output.listed(retried, 8)}")
    if view.tokens or view.usd:
        output.line(f"spent: {view.tokens:,} tokens, ${view.usd:.2f}")
    if view.saved_tokens or view.saved_usd:
        output.line(f"saved by resuming: {view.saved_tokens:,} tokens, ${view.saved_usd:.2f}")
    _report_failures(call, view)


def _report_failures(call: Call, view: TeamView) -> None:
    if blocked := view.with_status(teams.BLOCKED):
        reasons = [f"{each.id} (needs {each.blocked_by})" for each in blocked]
        output.line(f"not started: {output.listed(reasons, 8)}")
    failed = view.with_status(teams.FAILED, teams.BANKRUPT)
    for each in failed:
        output.line()
        output.line(f"{each.status}: {each.id}, after {output.many(each.attempts, 'attempt')}")
        output.line(_indented(output.shortened(each.error, _OUTPUT) or "no message"))
        output.line(f"  its output: {call.command_line('logs', view.run_id, each.id)}")
    if failed:
        retry = call.command_line("retry", view.run_id)
        output.line()
        output.line(f"to retry: {retry} && {call.command_line('resume', view.run_id)}")


def _one_line(text: str) -> str:
    return output.in_one_line(" ".join(text.split()))


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


# --- verbs ----------------------------------------------------------------------------------------


@verb("resume", reads=True)
@_RUN_ARGUMENT
@graphs.workers_option
def resume_command(call: Call, run_id: str | None, workers: int | None) -> int | None:
    """Resume a run of a task graph.

    Completed tasks are not executed again, also if the process was killed. Without RUN it is the last
    run of the current folder that is not complete. The number of workers may be another one than
    before. A run that failed is resumed after 'maestro retry'. Runs of other workflows are resumed by
    'maestro run MODULE:WORKFLOW --run-id RUN'.

    Examples:
        maestro resume                      the last one of this folder
        maestro resume shop --workers 8     with 8 tasks at the same time
    """
    with _hive(call) as hive:
        runner = TeamRunner(hive, workers=workers or graphs.DEFAULT_WORKERS)
        found = run_id or _latest(runner, hive, statuses=None)
        with call.reading() as reader:
            teams.team_view(reader, found)  # or say that there is none
        return _execute(call, hive, found, lambda: runner.resume(found))


def _latest(runner: TeamRunner, hive: Hive, *, statuses: tuple[str, ...] | None) -> str:
    """Return the last team run of this folder; without statuses, that is not complete."""
    here = Path.cwd().absolute()
    for each in hive.runs(workflow=WORKFLOW):
        is_meant = each.status != "success" if statuses is None else each.status in statuses
        if is_meant and runner.arguments(each.run_id)[1] == here:
            return each.run_id
    what = "that is not complete" if statuses is None else "that is executed"
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


@verb("status", reads=True)
@_RUN_ARGUMENT
@click.option(
    "--watch", is_flag=True, help="Show it again and again, until no process executes it."
)
def status_command(call: Call, run_id: str | None, *, watch: bool) -> None:
    """Show the tasks of a run of a task graph.

    Without RUN it is the last one of the current folder. 'maestro logs RUN TASK' prints what a task
    wrote, 'maestro show RUN TASK' its attempts.

    Examples:
        maestro status                  the last run of this folder
        maestro status shop --watch     until it ends
        maestro status shop --json      for another program
    """
    if run_id is None:
        every = ("running", "waiting", "stopped", "pending", "failed", "success", "bankrupt")
        with _hive(call) as hive:
            run_id = _latest(TeamRunner(hive), hive, statuses=(*every, "cancelled"))
    while True:
        with call.reading() as reader:
            view = teams.team_view(reader, run_id)
        if watch and output.is_terminal():
            click.clear()
        if call.wants_json:
            call.print_json(run=to_dict(view))
        else:
            _show_status(view)
        if not (watch and view.executed):
            return
        time.sleep(_WATCH_SECONDS)


def _show_status(view: TeamView) -> None:
    complete = sum(each.status == teams.COMPLETE and not each.is_gate for each in view.tasks)
    total = sum(not each.is_gate for each in view.tasks)
    output.heading(
        f"run {view.run_id}: {view.status}, {complete} of {output.many(total, 'task')} complete"
    )
    columns = ["level", "task", "status", "attempts", "took", "title", "because"]
    output.table(columns, [_status_row(each) for each in view.tasks])
    if view.suspended and not view.executed and view.status != "success":
        output.line(f"suspended: {output.in_one_line(view.suspended)}")


def _status_row(task: TaskView) -> list[output.Cell]:
    because = task.error and _one_line(task.error)
    if task.blocked_by is not None:
        because = f"needs {task.blocked_by}"
    return [
        task.level,
        task.id,
        output.status(task.status),
        task.attempts or None,
        None if task.took_seconds is None else output.took(task.took_seconds),
        output.shortened(output.in_one_line(task.title), 60),
        output.shortened(because, _LINE),
    ]
