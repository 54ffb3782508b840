"""``maestro runs``, ``show`` and ``events``: all runs, one of them, and what happens in it."""

from __future__ import annotations

import json
import time
from textwrap import indent
from typing import TYPE_CHECKING, Any

import click

from maestro_hive.admin.runs import Ending, EventFeed, list_runs, run_details, step_details
from maestro_hive.cli import errors, output
from maestro_hive.cli.command import run_ids, verb
from maestro_hive.hive.answer_types import describe as describe_shape
from maestro_hive.maestro.state import events
from maestro_hive.maestro.state.run_view import to_dict

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from maestro_hive.admin.runs import RunSummary
    from maestro_hive.cli.command import Call
    from maestro_hive.maestro.state.events import RunEvent
    from maestro_hive.maestro.state.run_view import (
        AttemptView,
        RunView,
        StepDetails,
        StepView,
        WaitView,
    )

#: How many runs are listed.
_LIMIT = 50
#: How many steps are shown of a long run, from its end.
_MOST_STEPS = 50
#: How many characters of a value are shown.
_MOST_CHARACTERS = 2000
_MOST_HISTORY = 10
#: A value that is not longer is shown in one line.
_ONE_LINE = 90
_STEP_COLUMNS = ["step", "name", "persona", "status", "attempts", "tokens", "took", "last error"]
_PIPED_STEP_COLUMNS = [
    *("step", "name", "persona", "status", "attempts", "failures", "interruptions"),
    *("tokens", "took", "last error"),
]
#: How often a run that is followed is read.
_POLL_SECONDS = 0.2


# --- runs -----------------------------------------------------------------------------------------


@verb(
    "runs",
    examples="""
    maestro runs                                    the newest 50
    maestro runs --status failed --status stopped   those that need attention
    maestro runs --workflow build --limit 0         all runs of one workflow
    maestro runs --json                             for another program
    """,
    reads=True,
)
@click.option(
    "--status",
    "statuses",
    metavar="STATUS",
    multiple=True,
    help="Only runs with this status; may be repeated.",
)
@click.option("--workflow", metavar="NAME", help="Only runs of this workflow.")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=_LIMIT,
    show_default=True,
    help="How many at most; 0 for all.",
)
def runs_command(call: Call, statuses: tuple[str, ...], workflow: str | None, limit: int) -> None:
    """List runs, newest first, with their status.

    A run is pending, running, waiting (for an answer, see 'maestro answer'), success, failed or
    cancelled; and stopped if it is not finished and no living process executes it: start its
    program again, and it is resumed. A run without a workflow has the status that its program set,
    and is running while a process has it open.
    """
    with call.reading() as reader:
        found = list_runs(reader, statuses=statuses, workflow=workflow, limit=limit or None)
    if call.wants_json:
        call.print_json(**to_dict(found))
        return
    columns = ["run", "workflow", "status", "started", "updated", "waits for"]
    filtered = bool(statuses or workflow)
    empty = "there are no such runs" if filtered else "there are no runs"
    output.table(columns, map(_run_row, found.runs), empty=empty)
    if found.total > len(found.runs):
        output.note(f"… and {found.total - len(found.runs):,} more: --limit 0")


def _run_row(run: RunSummary) -> list[output.Cell]:
    return [
        run.run_id,
        run.workflow,
        output.status(run.status),
        run.started_at,
        run.updated_at,
        ", ".join(wait.name for wait in run.waits_for),
    ]


# --- show -----------------------------------------------------------------------------------------


@verb(
    "show",
    examples="""
    maestro show checkout-42                its steps, and what it waits for
    maestro show checkout-42 --all          every step of a long run
    maestro show checkout-42 implement      one step: attempts, errors, feedback, memory, output
    maestro show checkout-42 implement#2    the second step of that name
    maestro show checkout-42 --json         for another program
    """,
    reads=True,
)
@click.argument("run_id", metavar="RUN", shell_complete=run_ids)
@click.argument("step", metavar="[STEP]", required=False)
@click.option("--all", "every", is_flag=True, help="Show every step, however many there are.")
def show_command(call: Call, run_id: str, step: str | None, *, every: bool) -> None:
    """Show a run and its steps, or one step in detail.

    STEP is a step's number, its name, or name#2 for the second step of that name. Of a long run
    the last steps are shown, and those that are not completed. A question that the run waits for is
    shown with the command that answers it. The run is only read, whether it is executed or not.
    """
    with call.reading() as reader:
        if step is not None:
            details = step_details(reader, run_id, step)
            if call.wants_json:
                call.print_json(step=to_dict(details))
            else:
                _print_step(details)
            return
        run = run_details(reader, run_id, most_steps=None if every else _MOST_STEPS)
    if call.wants_json:
        call.print_json(run=to_dict(run))
    else:
        _print_run(call, run)


def _print_run(call: Call, run: RunView) -> None:
    output.heading(f"run {run.run_id}")
    _print_head(run)
    _print_traceback(run.error)
    for line in _next_actions(call, run):
        output.line(line)
    _print_value("input", run.input)
    _print_value("result", run.result)
    _print_steps(run)
    children: list[list[output.Cell]] = [
        [each.run_id, each.workflow, output.status(each.status or "purged")]
        for each in run.children
    ]
    _print_table("children", ["run", "workflow", "status"], children)
    personas: list[list[output.Cell]] = [
        [each.persona, each.tokens, f"{each.usd:.4f}", each.history_items] for each in run.personas
    ]
    _print_table("personas", ["persona", "tokens", "usd", "history"], personas)
    _print_events(run.latest_events)


def _print_head(run: RunView) -> None:
    at_step = f" at step {run.from_step}" if run.from_step else ""
    holder = run.holder and (
        f"process {run.holder.pid} on {run.holder.host}, since {output.moment(run.holder.since)}"
    )
    fields = run.fields
    tasks = [
        f"{len(fields[name])} {word}"
        for name, word in (("completed_tasks", "completed"), ("pending_tasks", "pending"))
        if fields[name]
    ]
    _print_pairs(
        ("workflow", run.workflow),
        ("status", run.status),
        ("executed by", holder),
        ("parent", run.parent),
        ("forked from", run.forked_from and f"{run.forked_from}{at_step}"),
        ("started", output.moment(run.started_at)),
        ("updated", output.moment(run.updated_at)),
        ("took", output.took(run.took_seconds)),
        ("phase", None if fields["phase"] == "initializing" else fields["phase"]),
        ("tasks", ", ".join(tasks)),
        ("error", _error_line(run.error)),
        ("reason", run.reason),
    )


def _next_actions(call: Call, run: RunView) -> list[str]:
    """Return what the run needs to continue, with the command for it."""
    lines = [_waiting(call, run.run_id, wait) for wait in run.waits_for]
    if run.status in ("failed", "cancelled") and run.workflow:
        lines.append(f"to retry: {call.command_line('retry', run.run_id)}")
    if run.status == "stopped":
        lines.append("not finished, and no process executes it: start its program to resume it")
    return lines


def _waiting(call: Call, run_id: str, wait: WaitView) -> str:
    if wait.answered:
        return f"{wait.name} is answered: the run continues when its program is started"
    until = f", until {output.moment(wait.until)}" if wait.until else ""
    answer = call.command_line("answer", run_id, wait.name, "VALUE")
    what = f"{wait.name} ({expected(wait.shape)})"
    return f"waiting for {what} since {output.moment(wait.since)}{until}: {answer}"


def expected(shape: Any) -> str:
    """Return which kind of answer a question takes."""
    try:
        return describe_shape(shape)
    except (AttributeError, KeyError, TypeError):
        return "of a kind that this version does not know"


def _print_steps(run: RunView) -> None:
    columns = _STEP_COLUMNS if output.is_terminal() else _PIPED_STEP_COLUMNS
    _print_table("steps", columns, [_step_row(step) for step in run.steps])
    hidden = run.total_steps - len(run.steps)
    if hidden:
        output.note(f"… and {output.many(hidden, 'completed step')} more: --all")


def _step_row(step: StepView) -> list[output.Cell]:
    """Return a line of the table: short in a terminal, single numbers for a program."""
    counts: list[output.Cell] = [step.attempts, step.failures, step.interruptions]
    return [
        step.step,
        step.label,
        step.persona,
        output.status(step.status),
        *([_attempts(step)] if output.is_terminal() else counts),
        step.tokens,
        output.took(step.took_seconds),
        output.shortened(step.last_error, 100),
    ]


def _attempts(step: StepView) -> str:
    counts = ((step.failures, "failed"), (step.interruptions, "interrupted"))
    bad = [f"{count} {word}" for count, word in counts if count]
    return f"{step.attempts} ({', '.join(bad)})" if bad else str(step.attempts)


# --- show, of a step ------------------------------------------------------------------------------


def _print_step(details: StepDetails) -> None:
    step = details.step
    output.heading(f"step {step.step} {step.label} of run {details.run_id}")
    _print_pairs(
        ("persona", step.persona),
        ("status", step.status),
        ("failures", step.failures),
        ("interruptions", step.interruptions),
        ("tokens", f"{step.tokens:,}"),
        ("took", output.took(step.took_seconds)),
        ("options", _options(details)),
    )
    for attempt in details.attempts:
        _print_attempt(attempt)
    if details.feedback:
        output.heading("feedback for the next attempt")
        for sentence in details.feedback:
            output.line(indent(sentence, "  "))
    _print_value("progress", details.progress)
    _print_value("input", details.input)
    _print_value("output", details.output)
    _print_value(f"memory of {step.persona}", details.memory)
    _print_history(step.persona, details.history)


def _options(details: StepDetails) -> str:
    """Return the options of the latest attempt."""
    given = details.attempts[-1].options if details.attempts else {}
    return ", ".join(f"{name}={value}" for name, value in given.items())


def _print_attempt(attempt: AttemptView) -> None:
    started, ended = attempt.started_at, attempt.ended_at
    retrying = attempt.status == "retrying"  # the status of the step, not of this attempt
    facts = [
        "failed" if retrying else attempt.status,
        f"started {output.moment(started)}",
        f"took {output.took((ended - started).total_seconds())}" if ended else None,
        f"{attempt.tokens:,} tokens" if attempt.tokens else None,
        "repaired" if attempt.healed else None,
        f"retried after {output.took(attempt.retry_in)}" if attempt.retry_in is not None else None,
    ]
    output.heading(f"attempt {attempt.attempt}: {', '.join(filter(None, facts))}")
    if attempt.error:
        output.line(f"  {_error_line(attempt.error)}")
        _print_traceback(attempt.error)


def _print_history(persona: str, history: Sequence[Any]) -> None:
    if history:
        last = history[-_MOST_HISTORY:]
        count = output.many(len(history), "item")
        which = count if len(last) == len(history) else f"{count}, the last {len(last)}"
        _print_value(f"history of {persona} ({which})", last)


# --- show, parts ----------------------------------------------------------------------------------


def _print_pairs(*pairs: tuple[str, object]) -> None:
    for name, value in pairs:
        if value not in (None, ""):
            output.line(f"{f'{name}:':<15}{output.in_one_line(str(value))}")


def _print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[output.Cell]]) -> None:
    if rows:
        output.line()
        output.heading(title)
        output.table(columns, rows)


def _print_events(latest: Sequence[RunEvent]) -> None:
    if latest:
        output.line()
        output.heading("latest events")
        for event in latest:
            output.line(_event_line(event))


def _print_value(name: str, value: Any) -> None:
    if value is None:
        return
    text = json.dumps(value, ensure_ascii=False)
    if len(text) > _ONE_LINE:
        text = json.dumps(value, indent=2, ensure_ascii=False)
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[:_MOST_CHARACTERS]}… ({len(text):,} characters; --json shows all)"
    output.heading(name)
    output.line(indent(text, "  "))


def _print_traceback(error: dict[str, Any] | None) -> None:
    if error and error.get("traceback"):
        output.line(indent(error["traceback"].rstrip(), "    "))


def _error_line(error: dict[str, Any] | None) -> str | None:
    return output.in_one_line(f"{error.get('type')}: {error.get('message')}") if error else None


# --- events ---------------------------------------------------------------------------------------


@verb(
    "events",
    examples="""
    maestro events checkout-42                     all events so far
    maestro events checkout-42 --follow            and those from now on
    maestro events checkout-42 --after 120         those after entry 120
    maestro events checkout-42 --follow --json     one JSON object per line
    """,
    reads=True,
)
@click.argument("run_id", metavar="RUN", shell_complete=run_ids)
@click.option(
    "--follow", "-f", is_flag=True, help="Continue until the run ends, or no process executes it."
)
@click.option(
    "--after", metavar="SEQ", type=click.IntRange(min=0), default=0, help="Start after this entry."
)
def events_command(call: Call, run_id: str, *, follow: bool, after: int) -> int | None:
    """Print the events of a run, and follow it.

    Each line is an entry of its journal: its number, when it was recorded, and what it says. With
    --follow it continues until the run ends or no living process executes it; the exit code is
    then 0 if it succeeded, 1 if it failed, was cancelled or is not finished, and 75 if it waits for
    a person, has no answer, and no process executes it. With --json each line is an object with
    the keys event, seq, at and run_id, and those of its kind.
    """
    with call.reading() as reader:
        feed = EventFeed(reader, run_id)
        while True:
            batch = feed.next_batch()
            wanted = (event for event in batch.events if event.seq > after)
            _print_feed(wanted, as_json=call.wants_json)
            if not follow:
                return None
            if batch.ending is not None:
                return _exit_code(run_id, batch.ending)
            time.sleep(_POLL_SECONDS)


def _print_feed(found: Iterable[RunEvent], *, as_json: bool) -> None:
    if as_json:
        lines = [output.to_json(events.to_dict(event)) for event in found]
    else:
        lines = [_event_line(event) for event in found]
    if lines:
        click.echo("\n".join(lines))


def _event_line(event: RunEvent) -> str:
    text = output.in_one_line(events.describe(event))
    if output.is_terminal():
        return f"{event.seq:>5}  {event.at:%Y-%m-%d %H:%M:%S}  {text}"
    return f"{event.seq}\t{event.at.isoformat()}\t{text}"


_ENDINGS = {
    Ending.COMPLETED: (errors.SUCCESS, None),
    Ending.FAILED: (errors.FAILED, None),
    Ending.NEEDS_PERSON: (errors.PERSON_NEEDED, "needs a person, and no process executes it"),
    Ending.ANSWERED: (errors.FAILED, "has its answer, and continues when its program is started"),
    Ending.NOT_FINISHED: (errors.FAILED, "is not finished, and no process executes it"),
}


def _exit_code(run_id: str, ending: Ending) -> int:
    code, note = _ENDINGS[ending]
    if note is not None:
        output.note(f"run {run_id!r} {note}")
    return code
