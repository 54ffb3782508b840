"""``maestro runs`` and ``show``: all runs, one of them, and one of its steps."""

from __future__ import annotations

from collections import Counter
from textwrap import indent
from typing import TYPE_CHECKING

import click

from maestro_hive.admin.runs import list_runs, run_details, step_details
from maestro_hive.cli import output
from maestro_hive.cli.command import run_ids, verb
from maestro_hive.kernel.errors import CodecError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.plain import to_dict
from maestro_hive.maestro.state.value_text import beginning, call_text, value_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from maestro_hive.admin.runs import RunSummary
    from maestro_hive.cli.command import Call
    from maestro_hive.maestro.state.events import RunEvent
    from maestro_hive.maestro.state.run_view import (
        AttemptView,
        ChildView,
        RunView,
        StepDetails,
        StepView,
        TimerView,
        TriedRepairView,
        WaitView,
    )
    from maestro_hive.maestro.state.strict_json import Json
    from maestro_hive.maestro.state.value_text import ValueText

#: How many runs are listed.
_LIMIT = 50
#: How many steps are shown of a long run, from its end.
_MOST_STEPS = 50
#: How many children are shown, with theirs.
_MOST_CHILDREN = 50
_MOST_HISTORY = 10
STEP_COLUMNS = ("step", "name", "persona", "status", "attempts", "tokens", "took", "last error")
CHILD_COLUMNS = ("run", "workflow", "status", "took", "waits for / error")


@verb("runs", reads=True)
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
@click.option("--all", "every", is_flag=True, help="Also runs that others started as children.")
def runs_command(
    call: Call, statuses: tuple[str, ...], workflow: str | None, limit: int, *, every: bool
) -> None:
    """List runs, newest first, with their status.

    Runs that another run started as its children are listed with --all; 'maestro show' has them
    under their parent.

    A run is pending, running, waiting (for an answer, see 'maestro answer'), success, failed or
    cancelled; and stopped if it is not finished and no living process executes it: start its
    program again, and it is resumed. One that belongs to workers is pending while it waits for one,
    and stopped if a person has to decide. 'maestro show' says what suspended it, and what to do. A
    run without a workflow has the status that its program set, and is running while a process has
    it open.

    Examples:
        maestro runs                                    the newest 50
        maestro runs --status failed --status stopped   those that need attention
        maestro runs --workflow build --limit 0         all runs of one workflow
        maestro runs --all                              with children, and whose they are
        maestro runs --json                             for another program
    """
    with call.reading() as reader:
        found = list_runs(
            reader, statuses=statuses, workflow=workflow, limit=limit or None, roots=not every
        )
    if call.wants_json:
        call.print_json(**to_dict(found))
        return
    columns = ["run", "workflow", "status", "started", "updated", "waits for"]
    columns += ["parent"] if every else []
    filtered = bool(statuses or workflow)
    empty = "there are no such runs" if filtered else "there are no runs"
    rows = [[*run_row(run), *([run.parent] if every else [])] for run in found.runs]
    output.table(columns, rows, empty=empty)
    if found.total > len(found.runs):
        output.note(f"… and {found.total - len(found.runs):,} more: --limit 0")


def run_row(run: RunSummary) -> list[output.Cell]:
    """Return a run in a line of a table."""
    return [
        run.run_id,
        run.workflow,
        output.status(run.status),
        run.started_at,
        run.updated_at,
        run.damage or ", ".join(wait.name for wait in run.waits_for),
    ]


@verb("show", reads=True)
@click.argument("run_id", metavar="RUN", shell_complete=run_ids)
@click.argument("step", metavar="[STEP]", required=False)
@click.option(
    "--all", "every", is_flag=True, help="Show every step and every child, however many there are."
)
def show_command(call: Call, run_id: str, step: str | None, *, every: bool) -> None:
    """Show a run and its steps, or one step in detail.

    STEP is a step's number, its name, or name#2 for the second step of that name; a task's id in a
    team run means its newest step, which is another one after each of its answers. Of a long run
    the last steps are shown, and those that are not completed; the same goes for the runs that it
    started, which are shown under it with their own. A question that the run waits for is shown with
    the command that answers it. Values are shown as they are written in Python, and with --json as
    they are stored. The run is only read, whether it is executed or not.

    Examples:
        maestro show checkout-42                its steps, and what it waits for
        maestro show checkout-42 --all          every step and child of a long run
        maestro show checkout-42 implement      one step: attempts, errors, feedback, memory, output
        maestro show checkout-42 implement#2    the second step of that name
        maestro show checkout-42 --json         for another program
    """
    with call.reading() as reader:
        if step is not None:
            details = step_details(reader, run_id, step)
            if call.wants_json:
                call.print_json(step=to_dict(details))
            else:
                _print_step(details)
            return
        run = run_details(
            reader,
            run_id,
            most_steps=None if every else _MOST_STEPS,
            most_children=None if every else _MOST_CHILDREN,
        )
    if call.wants_json:
        call.print_json(run=to_dict(run))
    else:
        _print_run(call, run)


def _print_run(call: Call, run: RunView) -> None:
    output.heading(f"run {run.run_id}")
    _print_head(run)
    _print_steps(run)
    _print_children(run)
    if run.steps or run.children:
        output.line()
    for line in next_actions(call, run):
        output.line(line)
    _print_traceback(run.error)
    _print_call("input", run.workflow or "", run.input)
    _print_value("result", run.result)
    personas: list[list[output.Cell]] = [
        [each.persona, each.tokens, f"{each.usd:.4f}", each.history_items] for each in run.personas
    ]
    _print_table("personas", ["persona", "tokens", "usd", "history"], personas)
    _print_events(run.latest_events)


def _print_events(latest: Sequence[RunEvent]) -> None:
    from maestro_hive.cli.events import event_line

    if latest:
        output.line()
        output.heading("latest events")
    for event in latest:
        output.line(event_line(event))


def _print_children(run: RunView) -> None:
    if not output.is_terminal():
        rows = [[*child_row(child), parent] for _, parent, child in generations(run)]
        _print_table("children", [*CHILD_COLUMNS, "parent"], rows)
    else:
        rows = [child_row(child, indent=depth) for depth, _, child in generations(run)]
        _print_table("children", CHILD_COLUMNS, rows)
    if hidden := hidden_children(run):
        output.note(f"… and {output.many(hidden, 'child', 'children')} more: --all")


def hidden_children(run: RunView) -> int:
    """Return how many children are left out, as far as is known: theirs are not read."""
    return run.hidden_children + sum(each.hidden_children for _, _, each in generations(run))


def generations(run: RunView | ChildView, depth: int = 0) -> Iterator[tuple[int, str, ChildView]]:
    """Yield each child after its parent, with how deep it is below the run, and its parent's id."""
    for child in run.children:
        yield depth, run.run_id, child
        yield from generations(child, depth + 1)


def child_row(child: ChildView, indent: int = 0) -> list[output.Cell]:
    """Return a child in a line of a table."""
    return [
        f"{'  ' * indent}{child.run_id}",
        child.workflow,
        output.status(child.status or "purged"),
        None if child.took_seconds is None else output.took(child.took_seconds),
        output.shortened(child.error, 100) or ", ".join(child.waits_for),
    ]


def _print_head(run: RunView) -> None:
    at_step = f" at step {run.from_step}" if run.from_step else ""
    fields = run.fields
    tasks = [
        f"{len(fields[name])} {word}"
        for name, word in (("completed_tasks", "completed"), ("pending_tasks", "pending"))
        if fields[name]
    ]
    saved = _amount(run.saved_tokens, run.saved_usd)
    _print_pairs(
        ("workflow", run.workflow),
        ("status", run.status),
        ("executed by", holder_text(run)),
        ("queue", queue_text(run)),
        ("parent", run.parent),
        ("forked from", run.forked_from and f"{run.forked_from}{at_step}"),
        ("started", output.moment(run.started_at)),
        ("updated", output.moment(run.updated_at)),
        ("took", output.took(run.took_seconds)),
        ("phase", None if fields["phase"] == "initializing" else fields["phase"]),
        ("tasks", ", ".join(tasks)),
        ("spent", _amount(run.tokens, run.usd)),
        ("saved", saved and f"{saved}, by not executing completed steps again"),
        ("error", _error_line(run.error)),
        ("reason", run.reason),
        ("suspended", run.suspended and f"{run.suspended.error_type}: {run.suspended.message}"),
    )


def _amount(tokens: int, usd: float) -> str | None:
    parts = [f"{tokens:,} tokens" if tokens else None, f"{usd:.4f} USD" if usd else None]
    return ", ".join(part for part in parts if part) or None


def holder_text(run: RunView) -> str | None:
    """Return which process executes a run."""
    holder = run.holder
    if holder is None:
        return None
    return f"process {holder.pid} on {holder.host}, since {output.moment(holder.since)}"


def queue_text(run: RunView) -> str | None:
    """Return in which queue a run is, and what it waits for there."""
    found = run.dispatch
    if found is None:
        return None
    state = {
        "ready": f"ready since {output.moment(found.enqueued_at)}",
        "scheduled": f"due {output.moment(found.due_at)}" if found.due_at else "due later",
        "active": "taken by a worker",
        "held": f"held until {_woken_by(run)}",
    }.get(found.state, found.state)
    facts = [
        found.queue,
        state,
        f"priority {found.priority}" if found.priority else None,
        f"for version {found.version}" if found.version else None,
        f"{output.many(found.deaths, 'process', 'processes')} died with it"
        if found.deaths
        else None,
    ]
    return ", ".join(filter(None, facts))


def _woken_by(run: RunView) -> str:
    """Return what a run that is held waits for."""
    if run.waits_for:
        return "it is answered"
    return "a person decides" if run.ambiguous or run.status == "stopped" else "it is woken"


def next_actions(call: Call, run: RunView) -> list[str]:
    """Return what the run needs to continue, with the command for it."""
    open_ones = Counter(wait.name for wait in run.waits_for if not wait.answered)
    lines = [
        _answered(call, run, wait)
        if wait.answered
        else waiting_line(call, run.run_id, wait, named=open_ones[wait.name] > 1)
        for wait in run.waits_for
    ]
    for step in run.ambiguous:
        words = "resolve", run.run_id, step.label
        completed = call.command_line(*words, "--completed", "VALUE")
        lines.append(
            f"{step.label} may have had its effect. If it had, with its result"
            f" ({expected(step.shape)}): {completed}. If it had not:"
            f" {call.command_line(*words, '--rerun')}"
        )
    lines += [_timer_line(timer) for timer in run.timers]
    if run.status in ("failed", "cancelled") and run.workflow:
        lines.append(f"to retry: {call.command_line('retry', run.run_id)}")
    if run.status == "stopped" and not (run.ambiguous and run.dispatch is not None):
        lines.append(f"not finished, and no process executes it: {_resumed_by(call, run)}")
    return lines


#: What to do before a suspended run is resumed, by the error that suspended it.
_WAYS_OUT = {
    "CircuitBreakerOpen": "wait, or close the breaker by 'maestro breakers reset NAME', and ",
    "TokenBudgetExceeded": "raise the budget, and ",
}


def _resumed_by(call: Call, run: RunView) -> str:
    """Return what resumes a run that is stopped, in words."""
    first = _WAYS_OUT.get(run.suspended.error_type, "") if run.suspended else ""
    if run.dispatch is None and run.parent is not None:  # which a worker may have
        return f"it is resumed with its parent, see {call.command_line('show', run.parent)}"
    if run.dispatch is None and is_team_run(run.workflow):
        return f"{first}{call.command_line('resume', run.run_id)}"
    if run.dispatch is None:
        return f"{first}start its program to resume it"
    if run.dispatch.state != "held":
        return "a worker takes it when it is due"
    return f"{first}have a worker try it again by {call.command_line('retry', run.run_id)}"


def _timer_line(timer: TimerView) -> str:
    until = f"until {output.moment(timer.until)}" if timer.until else "without a limit"
    named = "" if timer.name == timer.what else f" {timer.name}"
    return f"{'sleeping' if timer.what == 'sleep' else 'a timeout runs'}{named}, {until}"


def _answered(call: Call, run: RunView, wait: WaitView) -> str:
    what = wait.name if wait.escalation is None else f"escalation {wait.escalation} of {wait.name}"
    return f"{what} is answered: the run continues {_continues(call, run)}"


def waiting_line(call: Call, run_id: str, wait: WaitView, *, named: bool) -> str:
    """Return what a run waits for, and how a person answers; ``named``: which one of that name."""
    if wait.escalation is not None:
        return _escalated(call, wait)
    until = f", until {output.moment(wait.until)}" if wait.until else ""
    words = ["answer", run_id, wait.name, "VALUE"]
    what = f"{wait.name} ({expected(wait.shape)})"
    if wait.about is not None:
        what = f"{what} about {output.shortened(_short_text(wait.about), 100)}"
    if named or wait.about is not None:
        words += ["--question", wait.id]
    answer = call.command_line(*words)
    return f"waiting for {what} since {output.moment(wait.since)}{until}: {answer}"


def _escalated(call: Call, wait: WaitView) -> str:
    """Return what a step waits for that failed for good."""
    name = str(wait.escalation)
    ticket = f", ticket {wait.ticket}" if wait.ticket else ""
    since = output.moment(wait.since)
    answers = [
        call.command_line("answer", name, *words)
        for words in (["FEEDBACK"], ["--result", "VALUE"], ["--give-up"])
    ]
    return f"{wait.name} failed, and waits for a person since {since}{ticket}: {'; '.join(answers)}"


def is_team_run(workflow: str | None) -> bool:
    """Return whether runs of a workflow are team runs, which ``maestro resume`` resumes."""
    from maestro_hive.team.plans import WORKFLOW

    return workflow == WORKFLOW


def _continues(call: Call, run: RunView) -> str:
    """Return when a run continues that has its answer, in words."""
    if run.dispatch is not None:
        return "when a worker takes it"
    if run.parent is not None:
        return f"with its parent, run {run.parent}"
    if is_team_run(run.workflow):
        return f"when it is resumed: {call.command_line('resume', run.run_id)}"
    return "when its program is started"


def expected(shape: Json) -> str:
    """Return which kind of answer a question takes."""
    if shape and "unknown" in shape:
        return f"a {shape['unknown']}"
    from maestro_hive.hive.answer_types import describe

    try:
        return describe(shape)
    except (AttributeError, KeyError, TypeError):
        return "of a kind that this version does not know"


def _print_steps(run: RunView) -> None:
    _print_table("steps", STEP_COLUMNS, [step_row(step) for step in run.steps])
    hidden = run.total_steps - len(run.steps)
    if hidden:
        output.note(f"… and {output.many(hidden, 'completed step')} more: --all")
    for step in run.steps:
        for line in _limit_lines(step):
            output.line(line)


def _limit_lines(step: StepView) -> list[str]:
    """Return what a step has to do with its limit: what it holds too long, and what it waits for."""
    lines = [
        f"attempt {thread.attempt} of {step.label} is over, but its thread still runs in process"
        f" {thread.holder.pid} on {thread.holder.host}: it holds a permit of {step.name!r} until it"
        " ends"
        for thread in step.running_threads
    ]
    if step.permits_held_by:
        count = len(step.permits_held_by)
        by = ", ".join(
            f"process {holder.pid} on {holder.host} since {output.moment(holder.since)}"
            for holder in step.permits_held_by
        )
        which = f"one of {count} permits" if count > 1 else "the only permit"
        lines.append(f"{step.label} waits for {which} of {step.name!r}, held by {by}")
    return lines


def step_row(step: StepView) -> list[output.Cell]:
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
    options = details.attempts[-1].options if details.attempts else {}
    output.heading(f"step {step.step} {step.label} of run {details.run_id}")
    _print_pairs(
        ("persona", step.persona),
        ("status", step.status),
        ("failures", step.failures),
        ("interruptions", step.interruptions),
        ("tokens", f"{step.tokens:,}"),
        ("took", output.took(step.took_seconds)),
        ("options", ", ".join(f"{name}={value}" for name, value in options.items())),
    )
    for line in _limit_lines(step):
        output.line(line)
    for attempt in details.attempts:
        _print_attempt(attempt)
    if details.feedback:
        output.heading("feedback for the next attempt")
        for sentence in details.feedback:
            output.line(indent(sentence, "  "))
    _print_value("progress", details.progress)
    _print_call("input", step.name, details.input)
    _print_value("output", details.output)
    _print_value(f"memory of {step.persona}", details.memory)
    _print_history(step.persona, details.history)


def _print_attempt(attempt: AttemptView) -> None:
    started, ended = attempt.started_at, attempt.ended_at
    retrying = attempt.status == "retrying"  # the status of the step, not of this attempt
    facts = [
        "failed" if retrying else attempt.status,
        f"started {output.moment(started)}",
        f"took {output.took((ended - started).total_seconds())}" if ended else None,
        f"{attempt.tokens:,} tokens" if attempt.tokens else None,
        _reserved(attempt.reserved),
        "repaired" if attempt.healed else None,
        f"retried after {output.took(attempt.retry_in)}" if attempt.retry_in is not None else None,
    ]
    output.heading(f"attempt {attempt.attempt}: {', '.join(filter(None, facts))}")
    if attempt.error:
        output.line(f"  {_error_line(attempt.error)}")
        _print_traceback(attempt.error)
    for repair in attempt.repairs:
        _print_repair(repair)


def _print_repair(repair: TriedRepairView) -> None:
    verdict = None
    if repair.verdict is not None:
        verdict = f"{repair.verdict} ({repair.reason})" if repair.reason else repair.verdict
    facts = (
        ("diagnosis", f"{repair.failure_type or 'unknown'}, fingerprint {repair.fingerprint}"),
        ("repair", f"{repair.healer}: {repair.fix or repair.status}" if repair.healer else "none"),
        ("changed files", ", ".join(repair.files)),
        ("feedback", repair.feedback),
        ("trouble", repair.error),
        ("verdict", verdict if repair.healer else None),
        ("restored", ", ".join(repair.restored)),
    )
    for name, value in facts:
        if value:
            lines = indent(str(value), "    ").strip()
            output.line(f"  {name}: {lines}")
    if repair.arguments:
        output.line(f"  changed arguments: {_short_text_of_tree(repair.arguments)}")


def _reserved(reserved: dict[str, Json]) -> str | None:
    """Return what an attempt reserved of budgets, in words."""
    amount = _amount(reserved.get("tokens") or 0, reserved.get("usd") or 0.0)
    if amount is None:
        return None
    return f"reserved {amount}{' (estimated)' if reserved.get('estimated') else ''}"


def _print_history(persona: str, history: Sequence[Json]) -> None:
    if history:
        last = history[-_MOST_HISTORY:]
        count = output.many(len(history), "item")
        which = count if len(last) == len(history) else f"{count}, the last {len(last)}"
        _print_value(f"history of {persona} ({which})", list(last))


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


def _print_value(name: str, value: Json) -> None:
    if value is not None:
        _print_text(name, value_text(_shown(value)))


def _print_call(title: str, name: str, arguments: Json) -> None:
    if arguments is not None:
        _print_text(title, call_text(name, _shown(arguments)))


def _print_text(name: str, shown: ValueText) -> None:
    output.heading(name)
    output.line(indent(f"{shown.text}{' (--json shows all)' if shown.is_cut else ''}", "  "))


def _short_text(value: object) -> str:
    """Return a value, as it is in a program, in one line."""
    try:
        tree = codec.parse(codec.encode(value).data, depth=codec.DOCUMENT_DEPTH)
    except CodecError:
        return str(value)
    return _short_text_of_tree(tree)


def _short_text_of_tree(tree: Json) -> str:
    return " ".join(value_text(_shown(tree)).text.split())


def _shown(tree: Json) -> Json:
    """Return what is shown of a stored value, without secrets."""
    return output.without_secrets(beginning(tree))


def _print_traceback(error: Json) -> None:
    if error and error.get("traceback"):
        output.line(indent(error["traceback"].rstrip(), "    "))


def _error_line(error: Json) -> str | None:
    return output.in_one_line(f"{error.get('type')}: {error.get('message')}") if error else None
