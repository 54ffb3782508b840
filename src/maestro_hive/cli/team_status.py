"""``maestro status``: the tasks of a team run; without what executes them, which takes long to import."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from maestro_hive.admin import teams
from maestro_hive.cli import output
from maestro_hive.cli.command import run_ids, verb
from maestro_hive.maestro.state.plain import to_dict

if TYPE_CHECKING:
    from maestro_hive.admin.teams import TaskView, TeamView
    from maestro_hive.cli.command import Call

#: How much of a title and of an error is shown in a line.
_TITLE, _LINE = 60, 160
#: How often ``status --watch`` looks, in seconds.
_WATCH_SECONDS = 1.0


@verb("status", reads=True)
@click.argument("run_id", metavar="[RUN]", required=False, shell_complete=run_ids)
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
        from maestro_hive.cli.teams import latest_run

        run_id = latest_run(call)
    while True:
        with call.reading() as reader:
            view = teams.team_view(reader, run_id)
        if watch and output.is_terminal():
            click.clear()
        if call.wants_json:
            call.print_json(run=to_dict(view))
        else:
            _show_status(call, view)
        if not (watch and view.executed):
            return
        time.sleep(_WATCH_SECONDS)


def _show_status(call: Call, view: TeamView) -> None:
    complete = sum(each.status == teams.COMPLETE and not each.is_gate for each in view.tasks)
    total = sum(not each.is_gate for each in view.tasks)
    output.heading(
        f"run {view.run_id}: {view.status}, {complete:,} of {output.many(total, 'task')} complete"
    )
    tokens = ["tokens"] if any(each.tokens for each in view.tasks) else []
    columns = ["level", "task", "status", "attempts", "took", *tokens, "title", "because"]
    output.table(columns, [_status_row(each, bool(tokens)) for each in view.tasks])
    for each in view.waits_for:
        output.line(f"to answer: {call.command_line('answer', view.run_id, each, 'TEXT')}")
    if view.suspended and not view.executed and view.status != "success":
        output.line(f"suspended: {output.in_one_line(view.suspended)}")


def _status_row(task: TaskView, has_tokens: bool) -> list[output.Cell]:
    because = task.error and " ".join(task.error.split())
    if task.blocked_by is not None:
        because = f"needs {task.blocked_by}"
    elif task.question is not None:
        because = f"asks {output.redacted(output.in_one_line(task.question))!r}"
    return [
        task.level,
        task.id,
        output.status(task.status),
        task.attempts or None,
        None if task.took_seconds is None else output.took(task.took_seconds),
        *([f"{task.tokens:,}" if task.tokens else None] if has_tokens else []),
        _cut(task.title, _TITLE),
        _cut(because, _LINE),
    ]


def _cut(text: str | None, most: int) -> str | None:
    """Return a text of at most so many characters; one that is shorter is left to the table."""
    if text is None or len(text) <= most:
        return text
    return output.shortened(output.in_one_line(text), most)
