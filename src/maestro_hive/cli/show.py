"""``maestro show``: one run with its steps, or one step."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from textwrap import indent
from typing import TYPE_CHECKING, Any

import click

from maestro_hive.cli import screen, words
from maestro_hive.cli.completion import run_ids
from maestro_hive.cli.frame import verb
from maestro_hive.cli.screen import Styled
from maestro_hive.cli.standing import STYLES, command_for, expected, find_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maestro_hive.cli.call import Call
#: How many steps are shown of a long run, from its end.
_MOST_STEPS = 50
#: How much of a value is shown.
_MOST_CHARACTERS = 2000
_MOST_HISTORY = 10
#: A value that is not longer is shown in one line.
_ONE_LINE = 90
_STEP_COLUMNS = ["step", "name", "persona", "status", "tries", "tokens", "took", "last error"]
_PIPED_STEP_COLUMNS = [
    *("step", "name", "persona", "status", "attempts", "failures", "interruptions"),
    *("tokens", "took", "last error"),
]
_BAD_ENDS = {"failures": "failed", "interruptions": "killed"}


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
def command(call: Call, run_id: str, step: str | None, *, every: bool) -> None:
    """Show a run and its steps, or one step with all that is known of it.

    A step is named by its number, its name, or name#2 for the second of that name. Of a long run
    the last steps are shown, and those that are not done. What a run waits for stands above, with
    the command that answers. Looking changes nothing, and disturbs nobody who executes the run.
    """
    from maestro_hive.cli import run_sheet, step_sheet  # noqa: PLC0415 - not for --help

    with call.reading() as store:
        run = run_sheet.read(store, find_run(store, run_id))
        if step is not None:
            facts = step_sheet.sheet_of(run, *step_sheet.find_step(run, step))
        else:
            facts = run_sheet.run_facts(run, None if every else _MOST_STEPS)
    if call.wants_json:
        call.answer(**{"run" if step is None else "step": facts})
    elif step is None:
        _print_run(call, facts)
    else:
        _print_step(facts)


# --- a run -----------------------------------------------------------------------------------------


def _print_run(call: Call, run: dict[str, Any]) -> None:
    screen.heading(f"run {run['run_id']}")
    _print_head(run)
    _print_error(run["error"])
    for line in _what_to_do(call, run):
        screen.line(line)
    _print_value("input", run["input"])
    _print_value("result", run["result"])
    _print_steps(run)
    children = [_child(child) for child in run["children"]]
    _print_table("children", ["run", "workflow", "status"], children)
    rows = [_persona(persona) for persona in run["personas"]]
    _print_table("personas", ["persona", "tokens", "usd", "history"], rows)


def _print_head(run: dict[str, Any]) -> None:
    holder, step = run["holder"], run["from_step"]
    origin = run["forked_from"] and f"{run['forked_from']}{f' at step {step}' if step else ''}"
    who = holder and f"process {holder['pid']} on {holder['host']}, {_moment(holder['since'])}"
    _print_pairs(
        ("workflow", run["workflow"]),
        ("status", run["status"]),
        ("executed by", who),
        ("parent", run["parent"]),
        ("forked from", origin),
        ("begun", _moment(run["started_at"])),
        ("updated", _moment(run["updated_at"])),
        ("took", _took(run["took_seconds"])),
        ("error", _error_line(run["error"])),
        ("reason", run["reason"]),
    )


def _what_to_do(call: Call, run: dict[str, Any]) -> list[str]:
    """Return what goes on only if somebody does something, with the command for it."""
    lines = []
    for wait in run["waits_for"]:
        until = f", until {_moment(wait['until'])}" if wait["until"] else ""
        if wait["answered"]:
            lines.append(f"{wait['name']} is answered: the run goes on when its program runs")
        else:
            answer = command_for(call, "answer", run["run_id"], wait["name"], "VALUE")
            what = f"{wait['name']} ({expected(wait['shape'])})"
            lines.append(f"waits for {what} since {_moment(wait['since'])}{until}: {answer}")
    if run["status"] in ("failed", "cancelled") and run["workflow"]:
        lines.append(f"to try again: {command_for(call, 'retry', run['run_id'])}")
    if run["status"] == "stopped":
        lines.append("nobody executes it: start its program again, and it goes on")
    return lines


def _print_steps(run: dict[str, Any]) -> None:
    rows = [_step_row(step) for step in run["steps"]]
    _print_table("steps", _STEP_COLUMNS if screen.is_terminal() else _PIPED_STEP_COLUMNS, rows)
    hidden = run["total_steps"] - len(run["steps"])
    if hidden:
        screen.note(f"… and {words.many(hidden, 'step')} more, done and not shown: --all")


def _step_row(step: dict[str, Any]) -> list[screen.Cell]:
    """Return a line of the table; a terminal is not wide, and a program wants single numbers."""
    counts: list[screen.Cell] = [step["attempts"], step["failures"], step["interruptions"]]
    return [
        step["step"],
        step["name"],
        step["persona"],
        _status(step["status"]),
        *([_tries(step)] if screen.is_terminal() else counts),
        step["tokens"],
        _took(step["took_seconds"]),
        _shortened(step["last_error"]),
    ]


def _tries(step: dict[str, Any]) -> str:
    bad = [f"{step[name]} {word}" for name, word in _BAD_ENDS.items() if step[name]]
    return f"{step['attempts']} ({', '.join(bad)})" if bad else str(step["attempts"])


def _child(child: dict[str, Any]) -> list[screen.Cell]:
    return [child["run_id"], child["workflow"], _status(child["status"] or "not there")]


def _persona(facts: dict[str, Any]) -> list[screen.Cell]:
    return [facts["persona"], facts["tokens"], f"{facts['usd']:.4f}", facts["history_items"]]


# --- a step ----------------------------------------------------------------------------------------


def _print_step(step: dict[str, Any]) -> None:
    screen.heading(f"step {step['step']} {step['name']} of run {step['run_id']}")
    _print_pairs(
        ("persona", step["persona"]),
        ("status", step["status"]),
        ("failures", step["failures"]),
        ("interruptions", step["interruptions"]),
        ("tokens", f"{step['tokens']:,}"),
        ("took", _took(step["took_seconds"])),
    )
    for attempt in step["attempts"]:
        _print_attempt(attempt)
    if step["feedback"]:
        screen.heading("feedback for the next attempt")
        for sentence in step["feedback"]:
            screen.line(indent(sentence, "  "))
    for name in ("progress", "input", "output"):
        _print_value(name, step[name])
    _print_value(f"memory of {step['persona']}", step["memory"])
    _print_history(step["persona"], step["history"])


def _print_attempt(attempt: dict[str, Any]) -> None:
    begun, ended, again = attempt["started_at"], attempt["ended_at"], attempt["retry_in"]
    failed = attempt["status"] == "retrying"  # which is said of the step, not of this attempt
    facts = [
        "failed" if failed else attempt["status"],
        f"begun {_moment(begun)}",
        f"took {_took((ended - begun).total_seconds())}" if ended else None,
        f"{attempt['tokens']:,} tokens" if attempt["tokens"] else None,
        "mended" if attempt["healed"] else None,
        f"again after {_took(again)}" if again is not None else None,
    ]
    screen.heading(f"attempt {attempt['attempt']}: {', '.join(filter(None, facts))}")
    if attempt["error"]:
        screen.line(f"  {_error_line(attempt['error'])}")
        _print_error(attempt["error"])


def _print_history(persona: str, history: list[Any]) -> None:
    if history:
        last = history[-_MOST_HISTORY:]
        count = words.many(len(history), "item")
        which = count if len(last) == len(history) else f"{count}, the last {len(last)}"
        _print_value(f"history of {persona} ({which})", last)


# --- parts -----------------------------------------------------------------------------------------


def _print_pairs(*pairs: tuple[str, object]) -> None:
    for name, value in pairs:
        if value not in (None, ""):
            screen.line(f"{f'{name}:':<15}{words.in_one_line(str(value))}")


def _print_table(title: str, columns: Sequence[str], rows: Sequence[list[screen.Cell]]) -> None:
    if rows:
        screen.line()
        screen.heading(title)
        screen.table(columns, rows)


def _print_value(name: str, value: Any) -> None:
    if value is None:
        return
    text = json.dumps(value, ensure_ascii=False)
    if len(text) > _ONE_LINE:
        text = json.dumps(value, indent=2, ensure_ascii=False)
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[:_MOST_CHARACTERS]}… ({len(text):,} characters; --json shows all)"
    screen.heading(name)
    screen.line(indent(text, "  "))


def _print_error(error: dict[str, Any] | None) -> None:
    if error and error.get("traceback"):
        screen.line(indent(error["traceback"].rstrip(), "    "))


def _error_line(error: dict[str, Any] | None) -> str | None:
    return words.in_one_line(f"{error.get('type')}: {error.get('message')}") if error else None


def _shortened(text: str | None) -> str | None:
    return text if text is None or len(text) <= 100 else f"{text[:99]}…"


def _status(status: str) -> Styled:
    return Styled(status, STYLES.get(status, ""))


def _moment(moment: datetime) -> str:
    return words.ago(moment, datetime.now(UTC)) if screen.is_terminal() else moment.isoformat()


def _took(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 10 else words.duration(seconds)
