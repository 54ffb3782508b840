"""``maestro schedules``: when workflows run by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from maestro_hive.admin import schedules
from maestro_hive.cli import output
from maestro_hive.cli.command import schedule_names, verb, verb_group
from maestro_hive.maestro.state.plain import to_dict

if TYPE_CHECKING:
    from maestro_hive.admin.schedules import ScheduleView
    from maestro_hive.cli.command import Call

_NAME_ARGUMENT = click.argument("name", metavar="NAME", shell_complete=schedule_names)


@verb_group("schedules", alone=True)
def schedules_command(call: Call) -> None:
    """List schedules; pause, resume or run one.

    A schedule runs a workflow at the times of a cron expression: @hive.schedule in the code. Workers
    record the schedules that their code has, and make a run of each tick. The list shows the next
    tick, and the last run with its status. A schedule is overdue when its next tick has passed: no
    worker that is active has it in its code.

    Examples:
        maestro schedules                    what runs when, and how the last run went
        maestro schedules --json             the same, for another program
        maestro schedules pause nightly      no runs until it is resumed
        maestro schedules resume nightly     from its next tick on
        maestro schedules run nightly        one run now
    """
    with call.reading() as reader:
        found = schedules.list_schedules(reader)
    if call.wants_json:
        call.print_json(schedules=[to_dict(each) for each in found])
        return
    output.table(
        ["name", "times", "next", "last run", "status", "notes"],
        [_row(each) for each in found],
        empty="there are no schedules: a worker records those of its code",
    )


def _row(schedule: ScheduleView) -> list[output.Cell]:
    notes = [
        "paused" if schedule.paused else "",
        "overdue: no worker has it" if schedule.overdue else "",
        f"{schedule.waiting} waiting" if schedule.waiting else "",
        f"{schedule.skipped} skipped" if schedule.skipped else "",
    ]
    return [
        schedule.name,
        f"{schedule.expression} {schedule.tz}",
        schedule.next_tick,
        schedule.last_run,
        None if schedule.last_status is None else output.status(schedule.last_status),
        ", ".join(filter(None, notes)),
    ]


@verb("pause", group=schedules_command)
@_NAME_ARGUMENT
def pause_schedule(call: Call, name: str) -> None:
    """Pause a schedule: its ticks make no runs.

    Runs that exist go on. Ticks that pass meanwhile are not caught up when it is resumed.

    Examples:
        maestro schedules pause nightly
    """
    with call.writing() as store:
        schedules.pause_schedule(store, name)
    output.line(f"schedule {name!r} is paused; 'maestro schedules resume {name}' resumes it")


@verb("resume", group=schedules_command)
@_NAME_ARGUMENT
def resume_schedule(call: Call, name: str) -> None:
    """Resume a paused schedule, from its next tick on.

    Examples:
        maestro schedules resume nightly
    """
    with call.writing() as store:
        schedules.resume_schedule(store, name)
    output.line(f"schedule {name!r} is active")


@verb("run", group=schedules_command)
@_NAME_ARGUMENT
def run_schedule(call: Call, name: str) -> None:
    """Run the workflow of a schedule once, now.

    A worker executes it, with the arguments of the schedule; it may be paused. Ticks that come
    before this run has ended see it as a run of the schedule: they are skipped, queued or allowed.

    Examples:
        maestro schedules run nightly
    """
    with call.writing() as store:
        run_id = schedules.run_schedule(store, name)
    output.line(f"run {run_id} is enqueued; '{call.command_line('show', run_id)}' shows it")


@verb("remove", group=schedules_command)
@_NAME_ARGUMENT
def remove_schedule(call: Call, name: str) -> None:
    """Remove a schedule that the code does not have any more.

    Its runs stay. If the code still has it, the next worker that starts records it again.

    Examples:
        maestro schedules remove nightly
    """
    with call.writing() as store:
        schedules.remove_schedule(store, name)
    output.line(f"schedule {name!r} was removed")
