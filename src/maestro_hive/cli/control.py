"""``maestro answer``, ``retry``, ``cancel`` and ``fork``: run control."""

from __future__ import annotations

import getpass
import re
import sys
from typing import TYPE_CHECKING, Any

import click

from maestro_hive.admin.runs import find_run
from maestro_hive.cli import output
from maestro_hive.cli.command import Helpful, run_ids, verb
from maestro_hive.cli.show import expected
from maestro_hive.hive import control
from maestro_hive.kernel.errors import DecodeError
from maestro_hive.maestro.state.projections import facts_of
from maestro_hive.maestro.state.strict_json import parse
from maestro_hive.maestro.state.views import OVER

if TYPE_CHECKING:
    from maestro_hive.cli.command import Call
    from maestro_hive.maestro.state.records import Entry

_RUN_ARGUMENT = click.argument("run", metavar="RUN", shell_complete=run_ids)
_NEGATIVE_NUMBER = re.compile(r"-[0-9.][0-9.eE+-]*", re.ASCII)


# --- answer ---------------------------------------------------------------------------------------


class TakesNegativeNumbers(Helpful):
    """A verb whose last argument may be a negative number, which looks like an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Move negative numbers behind the options, where they are arguments."""
        numbers = [each for each in args if _NEGATIVE_NUMBER.fullmatch(each)]
        if numbers and "--" not in args:
            args = [*(each for each in args if each not in numbers), "--", *numbers]
        return super().parse_args(ctx, args)


@verb(
    "answer",
    examples="""
    maestro answer checkout-42 approve yes          a yes or no
    maestro answer checkout-42 approve              asks for the answer
    maestro answer checkout-42 plan '{"size": 3}'   JSON, where an object is expected
    maestro answer checkout-42 note "ship it" --early   before the run asks
    """,
    cls=TakesNegativeNumbers,
)
@_RUN_ARGUMENT
@click.argument("name", metavar="NAME")
@click.argument("value", metavar="[VALUE]", required=False)
@click.option("--by", metavar="WHO", help="Who answers.  [default: you]")
@click.option("--early", is_flag=True, help="Store the answer for a question not asked yet.")
def answer_command(
    call: Call, run: str, name: str, value: str | None, by: str | None, *, early: bool
) -> None:
    """Answer a question that a run waits for.

    A run that calls hive.wait_for(NAME) continues with the answer: at once if a process executes
    it, otherwise when its program is started again. 'maestro show RUN' shows what is asked, and
    which kind of answer is expected; another kind is refused, and nothing is changed.
    """
    with call.writing() as store:
        record = find_run(store, run)
        question = control.find_question(store, record.name, name, early=early)
        if value is None:
            value = _ask(name, question)
        control.answer_in_words(store, record.name, name, value, by=by or _user(), early=early)
    output.line(f"run {record.name} has its answer to {name}: {value}")


def _ask(name: str, question: Entry | None) -> str:
    """Ask the person at the terminal, and show what is expected."""
    shape = {} if question is None else facts_of(question).get("shape") or {}
    if not sys.stdin.isatty():
        raise click.UsageError(
            f"There is no VALUE, and stdin is not a terminal; expected is {expected(shape)}.",
            click.get_current_context(silent=True),
        )
    return str(click.prompt(f"{name} ({expected(shape)})", err=True))


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        return None


# --- retry ----------------------------------------------------------------------------------------


@verb(
    "retry",
    examples="""
    maestro retry checkout-42                what failed in it, and in its children
    maestro retry checkout-42 implement      one step that failed or was interrupted
    maestro retry checkout-42 implement#2    the second step of that name
    maestro retry checkout-42 7              step number 7, as 'maestro show' lists it
    """,
)
@_RUN_ARGUMENT
@click.argument("step", metavar="[STEP]", required=False)
def retry_command(call: Call, run: str, step: str | None) -> None:
    """Retry what failed in a run, or one step of it.

    Failed, interrupted and cancelled runs stay as they are until a retry is requested. Completed
    steps stay completed; the others get new attempts. The run is resumed when its program is
    started again. STEP is a step's number, its name, or name#2 for the second step of that name:
    then only this step gets new attempts, and what depends on it runs as usual.
    """
    with call.writing() as store:
        record = find_run(store, run)
        control.retry(store, record.name, step)
    what = f"step {step} of run {record.name}" if step else f"run {record.name}"
    output.line(f"{what} is retried when its program is started")


# --- cancel ---------------------------------------------------------------------------------------


@verb(
    "cancel",
    examples="""
    maestro cancel checkout-42
    maestro cancel checkout-42 --reason "wrong page" --yes
    """,
)
@_RUN_ARGUMENT
@click.option("--reason", metavar="TEXT", default="", help="The reason; callers receive it.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def cancel_command(call: Call, run: str, reason: str, *, yes: bool) -> None:
    """Cancel a run and its children.

    A process that executes it stops the run's steps, those of its children too, and records the
    end; if no process does, the end is recorded at once. Completed steps stay completed: 'maestro
    retry' resumes the run.
    """
    with call.writing() as store:
        record = find_run(store, run)
        if record.status in OVER:
            output.line(f"run {record.name} is over already: {record.status}")
            return
        call.confirm(f"Cancel run {record.name!r} and its children?", yes=yes)
        control.cancel(store, record.name, reason)
        now = store.run(record.name)
    cancelled = now is not None and now.status == "cancelled"
    what = "is cancelled" if cancelled else "will be cancelled by the process that executes it"
    output.line(f"run {record.name} {what}")


# --- fork -----------------------------------------------------------------------------------------


@verb(
    "fork",
    examples="""
    maestro fork checkout-42 --from-step implement        that step again, and what depends on it
    maestro fork checkout-42 --set feature='"cart page"'  another argument, as JSON
    maestro fork checkout-42 --as checkout-43             with a name of your own
    """,
)
@_RUN_ARGUMENT
@click.option(
    "--from-step", metavar="STEP", help="Execute this step again: its number, name, or name#2."
)
@click.option(
    "--set",
    "settings",
    metavar="NAME=VALUE",
    multiple=True,
    help="Replace an argument of the workflow; VALUE is JSON, or else text.",
)
@click.option("--as", "name", metavar="NEW_RUN", help="The new run's name.  [default: generated]")
def fork_command(
    call: Call, run: str, from_step: str | None, settings: tuple[str, ...], name: str | None
) -> None:
    """Start a new run from the completed steps of another.

    Steps before STEP stay completed, STEP is executed again, and those after it run again exactly
    when their input changes. The original is not changed. Nothing is executed yet: the program that
    has the workflow continues with hive.resume(NEW_RUN).
    """
    changed = dict(_setting(each) for each in settings)
    with call.writing() as store:
        record = find_run(store, run)
        made = control.fork(store, record.name, from_step=from_step, changed=changed, new_id=name)
    output.line(f"run {made} was forked from {record.name}; hive.resume({made!r}) executes it")


def _setting(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise click.UsageError(
            f"--set takes NAME=VALUE, and {text!r} is not that.",
            click.get_current_context(silent=True),
        )
    try:
        return name, parse(value.encode(), name)
    except DecodeError:
        return name, value
