"""``maestro zerg``: the verbs that zerg's users know, with its flags, as calls of our own verbs."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from maestro_hive.admin import teams as admin_teams
from maestro_hive.admin.runs import find_run
from maestro_hive.cli import control, logs, maintenance, output, running, team_status, teams
from maestro_hive.cli.command import verb, verb_group
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.team.graph_files import load_file
from maestro_hive.team.runner import WORKFLOW
from maestro_hive.team.state import ExecutionState
from maestro_hive.team.state_file import PATH as STATE_FILE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType
    from typing import NoReturn

    from maestro_hive.admin.teams import TeamView
    from maestro_hive.cli.command import Call
    from maestro_hive.team.state import WorkerState

#: Where zerg has its graphs, and the name of the feature that is worked on.
_SPECS, _CURRENT = Path(".gsd", "specs"), Path(".gsd", ".current-feature")
#: How many workers zerg starts.
_WORKERS = 5

_feature_option = click.option(
    "--feature", metavar="NAME", help="Which feature.  [default: the current one]"
)


@verb_group("zerg")
def zerg_command(_: Call) -> None:
    """Use the verbs of zerg, with its flags.

    Each calls a verb of our own, which has more options: rush is 'maestro run', cleanup 'maestro purge',
    and the others are called alike. A graph is looked for where zerg writes it,
    .gsd/specs/FEATURE/task-graph.json; FEATURE is --feature, the name in .gsd/.current-feature, or the
    only one there is. What a flag cannot mean here is an error that says what to do instead.

    Examples:
        maestro zerg rush --workers 5      execute the graph of the current feature
        maestro zerg status --watch        its tasks, until it ends
        maestro zerg stop                  stop it; rush goes on
    """


# --- rush -----------------------------------------------------------------------------------------


@verb("rush", reads=True, group=zerg_command)
@click.option(
    "-w",
    "--workers",
    type=click.IntRange(1, 1000),
    default=_WORKERS,
    show_default=True,
    metavar="N",
    help="How many tasks may run at the same time.",
)
@click.option(
    "-g",
    "--task-graph",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The graph.  [default: as zerg finds it]",
)
@_feature_option
@click.option(
    "--level", type=int, metavar="N", help="Go on at level N: all below it must be complete."
)
@click.option("--resume", is_flag=True, help="Only go on with a run that exists.")
@click.option(
    "--timeout", type=click.IntRange(1), metavar="SECONDS", help="Stop the run after so long."
)
@click.option("--dry-run", is_flag=True, help="Show what would run, and execute nothing.")
@click.option(
    "--persona",
    metavar="AGENT|COMMAND",
    help="What executes tasks without a persona: an agent, such as claude, or a command, in which"
    " {prompt} becomes one argument.",
)
def rush_command(
    call: Call,
    workers: int,
    task_graph: Path | None,
    feature: str | None,
    level: int | None,
    timeout: int | None,
    persona: str | None,
    *,
    resume: bool,
    dry_run: bool,
) -> int | None:
    """Execute a task graph, as 'maestro run' does.

    What is complete is never executed again, with and without --resume: with it, it is an error if
    there is no run yet. Levels are no barriers here: a task starts when its dependencies are complete and
    the gates below it have passed, so --level only checks that all below it is complete. When --timeout
    is over the run is stopped as by Ctrl+C, with exit code 143, and can be resumed.

    zerg's tasks are executed by Claude Code. Here the graph says by whom, as "persona": {"agent":
    "claude"}, or --persona does.

    Examples:
        maestro zerg rush                                      the graph of the current feature
        maestro zerg rush -w 8 -g task-graph.json --dry-run    what 8 workers would do
        maestro zerg rush --persona claude                     executed by an agent
        maestro zerg rush --persona "./work.sh {prompt}"       executed by a command
        maestro zerg rush --resume --timeout 3600              go on, for an hour
    """
    path = task_graph or _graph_of(feature)
    words = [str(path), "--workers", str(workers)]
    if persona is not None:
        words += ["--persona", persona]
    if dry_run:
        return _called(call, running.run_command, *words, "--dry-run")
    if resume or level is not None:
        _check_earlier_run(call, path, level)
    with _ended_after(timeout):
        return _called(call, running.run_command, *words)


def _check_earlier_run(call: Call, path: Path, level: int | None) -> None:
    """Raise if there is no run of the graph here, or a task below the level is not complete."""
    graph = load_file(path).graph
    assert graph is not None, "load_file raises if there is none"
    found = _runs(call, graph.feature, most=1)
    if not found:
        what = "--resume" if level is None else f"--level {level}"
        raise ConfigurationError(
            f"{what}: there is no run of {graph.feature!r} in this folder yet; leave it out to start one"
        )
    done = (admin_teams.COMPLETE, admin_teams.NOT_PASSED)
    missing = [
        task.id
        for task in found[0].tasks
        if level is not None and task.level < level and task.status not in done
    ]
    if missing:
        raise ConfigurationError(
            f"--level {level}: tasks below it are not complete: {output.listed(missing, 8)}; leave"
            " --level out: what is complete is not executed again"
        )


@contextlib.contextmanager
def _ended_after(seconds: int | None) -> Iterator[None]:
    """Stop this process politely when the time is over, if there is a limit."""
    if seconds is None:
        yield
        return

    def end() -> None:
        output.note(f"--timeout: {output.duration(seconds)} are over, and the run is stopped")
        os.kill(os.getpid(), signal.SIGTERM)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    before = signal.signal(signal.SIGTERM, _exit)  # while no run is executed yet that it would stop
    try:
        yield
    finally:
        timer.cancel()
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


# --- the others -----------------------------------------------------------------------------------


@verb("status", reads=True, group=zerg_command)
@_feature_option
@click.option("--watch", is_flag=True, help="Show it again and again, until it ends.")
@click.option("--tasks", is_flag=True, help="The tasks, which are shown anyway.")
@click.option("--workers", is_flag=True, help="Show also what each worker does.")
@click.option("-l", "--level", type=int, metavar="N", help="Only the tasks of one level.")
def zerg_status_command(
    call: Call,
    feature: str | None,
    level: int | None,
    *,
    watch: bool,
    tasks: bool,
    workers: bool,
) -> None:
    """Show the tasks of a run, as 'maestro status' does.

    --workers and --level are for a look: they cannot be watched, and are not in the JSON, which has the
    level of each task.

    Examples:
        maestro zerg status             the last run of this folder
        maestro zerg status --watch     until it ends
        maestro zerg status -l 2        the tasks of level 2
    """
    del tasks
    if (workers or level is not None) and (watch or call.wants_json):
        raise click.UsageError(
            "--workers and --level cannot be combined with --watch or --json: the table that is"
            " watched has all levels, and the JSON has the level of each task."
        )
    view = _run(call, feature)
    if level is None:
        _called(call, team_status.status_command, view.run_id, *(["--watch"] if watch else []))
    else:
        _show_level(view, level)
    if workers:
        _show_workers(view)


def _show_level(view: TeamView, level: int) -> None:
    levels = sorted({task.level for task in view.tasks})
    if level not in levels:
        named = ", ".join(map(str, levels))
        raise ConfigurationError(f"--level {level}: run {view.run_id} has the levels {named}")
    rows: list[list[output.Cell]] = [
        [each.level, each.id, output.status(each.status), each.attempts or None, each.title]
        for each in view.tasks
        if each.level == level
    ]
    output.table(["level", "task", "status", "attempts", "title"], rows)


def _show_workers(view: TeamView) -> None:
    """Show the workers, as the state file has them: the journal knows tasks, not who did them."""
    rows: list[list[output.Cell]] = [
        [each.id, output.status(each.status), each.current_task, each.tasks_completed]
        for each in _workers_of(view) or ()
    ]
    output.table(
        ["worker", "status", "task", "completed"], rows, empty="no worker has been recorded"
    )


@verb("stop", group=zerg_command)
@_feature_option
@click.option("-w", "--worker", metavar="N", help="Not possible here: a run is stopped as a whole.")
@click.option("--force", is_flag=True, help="Kill the process at once. The run can be resumed.")
def zerg_stop_command(
    call: Call, feature: str | None, worker: str | None, *, force: bool
) -> int | None:
    """Stop the process that executes a run, as 'maestro stop' does.

    It starts nothing more, ends the commands of its tasks, and ends. With --force it is killed by
    SIGKILL, and so are the commands; what was interrupted is executed again by the next rush.

    Examples:
        maestro zerg stop             stop the run of this folder
        maestro zerg stop --force     now
    """
    if worker is not None:
        raise click.UsageError(
            f"--worker {worker}: a worker is no process that could be stopped alone. Stop the run, and"
            " go on with fewer: maestro zerg stop && maestro zerg rush --workers N"
        )
    run_id = _run(call, feature).run_id
    if not force:
        return _called(call, teams.stop_command, run_id)
    with call.reading() as reader:
        what = "was killed" if admin_teams.kill_run(reader, run_id) else None
        output.line(teams.stopped_line(call, find_run(reader, run_id), what))
    return None


@verb("retry", group=zerg_command)
@click.argument("task", metavar="[ID]", required=False)
@_feature_option
@click.option("--all-failed", is_flag=True, help="All tasks that failed.")
@click.option("--reset", is_flag=True, help="With new attempts, as every retry has here.")
def zerg_retry_command(
    call: Call, task: str | None, feature: str | None, *, all_failed: bool, reset: bool
) -> int | None:
    """Retry a task that failed, or all of them, as 'maestro retry' does.

    They are executed by the next rush.

    Examples:
        maestro zerg retry SHOP-L2-001     one task
        maestro zerg retry --all-failed    all that failed
    """
    del reset
    if (task is None) is not all_failed:
        raise click.UsageError("Name a task, or give --all-failed.")
    words = [] if task is None else [task]
    return _called(call, control.retry_command, _run(call, feature).run_id, *words)


@verb("logs", reads=True, group=zerg_command)
@click.argument("worker", metavar="[WORKER]", required=False)
@_feature_option
@click.option("--task", metavar="ID", help="Only what this task wrote.  [default: all]")
@click.option("-n", "--tail", type=click.IntRange(1), metavar="N", help="Only the last N lines.")
@click.option("-f", "--follow", is_flag=True, help="Continue until the task or the run ends.")
def zerg_logs_command(
    call: Call,
    worker: str | None,
    feature: str | None,
    task: str | None,
    tail: int | None,
    *,
    follow: bool,
) -> int | None:
    """Print what the tasks of a run wrote, as 'maestro logs' does.

    Logs belong to tasks, not to workers.

    Examples:
        maestro zerg logs --task SHOP-L2-001     what a task wrote
        maestro zerg logs --follow               all of them, as they write
        maestro zerg logs -n 20                  the last 20 lines
    """
    if worker is not None:
        raise click.UsageError(
            f"Logs belong to tasks, and not to worker {worker!r}: use --task ID;"
            " 'maestro zerg status --workers' shows who executes what."
        )
    if tail is not None and follow:
        raise click.UsageError("-n is not possible with --follow, which starts at the beginning.")
    words = [_run(call, feature).run_id, *([] if task is None else [task])]
    if tail is None:
        return _called(call, logs.logs_command, *words, *(["--follow"] if follow else []))
    with contextlib.redirect_stdout(io.StringIO()) as written:
        code = _called(call, logs.logs_command, *words)
    for line in written.getvalue().splitlines()[-tail:]:
        click.echo(line)
    return code


@verb("cleanup", group=zerg_command)
@_feature_option
@click.option("--dry-run", is_flag=True, help="Show what would be deleted, and delete nothing.")
@click.option("--keep-logs", is_flag=True, help="Not possible here: logs are a part of the run.")
@click.option("--keep-branches", is_flag=True, help="Branches, which are never deleted here.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def cleanup_command(
    call: Call,
    feature: str | None,
    *,
    dry_run: bool,
    keep_logs: bool,
    keep_branches: bool,
    yes: bool,
) -> int | None:
    """Delete the runs of a feature in this folder, as 'maestro purge' does.

    Deleted are its runs with all that is recorded of them, and .mahabharatha/state.json. The graph and
    the files that the tasks have made stay.

    Examples:
        maestro zerg cleanup --dry-run     what would be deleted
        maestro zerg cleanup --yes         delete it, and do not ask
    """
    del keep_branches
    last = _run(call, feature)
    runs = [each.run_id for each in _runs(call, last.feature)]
    if keep_logs:
        raise click.UsageError(
            "--keep-logs: logs are a part of the run, and are deleted with it. Write them to a file"
            f" first: {call.command_line('logs', last.run_id)} > FILE"
        )
    has_file = _workers_of(last) is not None
    if dry_run:
        for each in runs:
            output.line(f"would delete run {each}")
        if has_file:
            output.line(f"would delete {STATE_FILE}")
        return None
    code = maintenance.purge(call, runs, yes=yes, names_left=not has_file)
    if has_file and not code:
        (Path(last.folder) / STATE_FILE).unlink(missing_ok=True)
        output.line(f"{STATE_FILE} is deleted")
    return code


# --- which one is meant ---------------------------------------------------------------------------


class _Spec(NamedTuple):
    feature: str
    graph: Path


def _graph_of(feature: str | None) -> Path:
    """Return the graph of a feature: of the one named, the current one, or the only one."""
    specs = [_Spec(each.parent.name, each) for each in sorted(_SPECS.glob("*/task-graph.json"))]
    named = feature or _current_feature()
    if named is not None:
        specs = [each for each in specs if each.feature == named] or specs
    if len(specs) == 1 and named in (None, specs[0].feature):
        return specs[0].graph
    if not specs:
        raise ConfigurationError(
            f"there is no graph in {_SPECS}/*/task-graph.json; name one with --task-graph FILE"
        )
    known = output.listed([each.feature for each in specs], 8)
    if named is not None:
        raise ConfigurationError(f"feature {named!r} has no graph in {_SPECS}; there is: {known}")
    raise ConfigurationError(f"{_SPECS} has several features; choose one with --feature: {known}")


def _current_feature() -> str | None:
    try:
        return _CURRENT.read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


def _run(call: Call, feature: str | None) -> TeamView:
    """Return the last run of a feature in this folder; without one, the last run."""
    found = _runs(call, feature or _current_feature(), most=1)
    if not found and feature is None:
        found = _runs(call, None, most=1)
    if not found:
        of = f" of {feature!r}" if feature else ""
        raise ConfigurationError(
            f"there is no run{of} in {Path.cwd()}; 'maestro zerg rush' starts one"
        )
    return found[0]


def _runs(call: Call, feature: str | None, *, most: int | None = None) -> list[TeamView]:
    """Return the team runs of this folder, and of the feature if one is named; the newest first."""
    here, found = str(Path.cwd().absolute()), []
    with call.reading() as reader:
        for record in reader.runs(workflow=WORKFLOW):
            view = admin_teams.team_view(reader, record.name)
            if view.folder == here and feature in (None, view.feature):
                found.append(view)
            if len(found) == most:
                break
    return found


def _workers_of(view: TeamView) -> list[WorkerState] | None:
    """Return the workers that the state file of a run has; None if the file is not of the run."""
    from jsonschema import ValidationError

    try:
        state = ExecutionState.load(Path(view.folder) / STATE_FILE)
    except ValidationError as error:
        raise ConfigurationError(f"{STATE_FILE} is not one of ours: {error.message}") from error
    if state is None or state.feature != view.feature:
        return None
    return list(state.workers.values())


def _called(call: Call, command: click.Command, *words: str) -> int | None:
    """Call a verb of our own with these words; its options around the verb are those of this call."""
    with command.make_context(f"maestro {command.name}", list(words), obj=call) as ctx:
        code: int | None = command.invoke(ctx)
    return code
