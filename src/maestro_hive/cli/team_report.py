"""What is printed at the end of a team run: what was done, and failures last, with what to do next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maestro_hive.admin import teams
from maestro_hive.cli import output
from maestro_hive.cli.team_progress import HELP_NEEDED, INTERRUPTED, OVER_BUDGET
from maestro_hive.maestro.state.plain import to_dict

if TYPE_CHECKING:
    from collections.abc import Iterable

    from maestro_hive.admin.teams import TaskView, TeamView
    from maestro_hive.cli.command import Call
    from maestro_hive.cli.team_progress import Happened

#: How much of an error is shown, and how many names.
_OUTPUT, _NAMED = 1_500, 8
#: How long the names are of tasks that failed alike: the line has more.
_NAMES_LENGTH = 80
#: What helps a task over its own budget: a retry would find it as it was. That of a run says so itself.
ONLY_MORE = "to go on: raise the task's budget in the graph, then 'maestro run GRAPH'"
#: What has not succeeded, and is not executed again by itself.
UNSUCCESSFUL = (teams.FAILED, teams.BANKRUPT, INTERRUPTED, HELP_NEEDED)


def print_report(call: Call, view: TeamView, happened: Happened) -> None:
    """Print what was done, reused, retried, healed and waited for; failures last."""
    tasks = [each for each in view.tasks if not each.is_gate]
    complete = [each.id for each in tasks if each.status == teams.COMPLETE]
    reused = sum(each not in happened.executed for each in complete)
    if call.wants_json:
        members = {
            "executed": sorted(happened.executed),
            "retried": sorted(happened.retried),
            "healed": sorted(happened.healed),
            "waited_seconds": happened.waited,
        }
        call.print_json(run=to_dict(view), **members)
        return
    output.heading(
        f"{output.in_one_line(view.feature)}: {len(complete):,} of {output.many(len(tasks), 'task')} complete"
        f" ({len(complete) - reused:,} executed, {reused:,} reused)"
    )
    _print_names("retried", happened.retried)
    _print_names("healed", happened.healed)
    waited = (f"{name} ({output.took(seconds)})" for name, seconds in happened.waited.items())
    _print_names("waited for an answer", waited)
    if view.tokens or view.usd:
        output.line(f"spent: {view.tokens:,} tokens, ${view.usd:.2f}")
    if view.saved_tokens or view.saved_usd:
        output.line(f"saved by resuming: {view.saved_tokens:,} tokens, ${view.saved_usd:.2f}")
    _print_open(call, view)
    _print_failures(call, view)


def _print_names(what: str, names: Iterable[str]) -> None:
    if found := list(names):
        output.line(f"{what}: {output.listed(found, _NAMED)}")


def _print_open(call: Call, view: TeamView) -> None:
    """Print what was not executed, and why, and what failed without consequences."""
    blocked = [each for each in view.with_status(teams.BLOCKED) if not each.is_gate]
    _print_names("not started", (f"{each.id} (needs {each.blocked_by})" for each in blocked))
    for name in view.waits_for:
        answer = call.command_line("answer", view.run_id, name, "TEXT")
        output.line(f"waits for an answer: {name}: {answer}")
    for each in view.with_status(teams.NOT_PASSED):
        logs = call.command_line("logs", view.run_id, each.id)
        output.line(f"not passed, and not required: {each.id}; its output: {logs}")


def _print_failures(call: Call, view: TeamView) -> None:
    failed = view.with_status(*UNSUCCESSFUL)
    alike: dict[tuple[str, str], list[TaskView]] = {}
    for each in failed:
        error = output.shortened(each.error, _OUTPUT) or "no message"
        alike.setdefault((each.status, error), []).append(each)
    for (status, error), tasks in alike.items():
        first = tasks[0].id
        logs = call.command_line("logs", view.run_id, first)
        output.line()
        output.line(f"{_said(status)}: {_fitting([each.id for each in tasks])}, {_attempts(tasks)}")
        output.line(_indented(error))
        output.line(f"  {'its output' if len(tasks) == 1 else f'the output of {first}'}: {logs}")
        if status == teams.BANKRUPT and view.status != teams.BANKRUPT:
            output.line(f"  {ONLY_MORE}")
    retry = retry_command(call, view)
    if failed and retry is not None:
        output.line()
        output.line(f"to retry: {retry}")


def retry_command(call: Call, view: TeamView) -> str | None:
    """Return the command that retries a run; None if it would fail as before: tasks are over budgets."""
    failed = view.with_status(*UNSUCCESSFUL)
    if failed and all(each.status == teams.BANKRUPT for each in failed):
        return None
    retry = call.command_line("retry", view.run_id)
    return f"{retry} && {call.command_line('resume', view.run_id)}"


def _fitting(names: list[str]) -> str:
    """Return as many names as there is room for, and how many more there are."""
    most = 1
    while most < len(names) and len(", ".join(names[: most + 1])) <= _NAMES_LENGTH:
        most += 1
    return output.listed(names, most)


def _attempts(tasks: list[TaskView]) -> str:
    """Return after how many attempts tasks have failed."""
    fewest, most = (function(each.attempts for each in tasks) for function in (min, max))
    attempts = output.many(most, "attempt")
    after = f"after {attempts}" if fewest == most else f"after {fewest:,} to {attempts}"
    return after if len(tasks) == 1 else f"each {after}"


def _said(status: str) -> str:
    return OVER_BUDGET if status == teams.BANKRUPT else status.replace("_", " ")


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
