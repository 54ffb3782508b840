"""``maestro answer``: what a run waits for."""

from __future__ import annotations

import getpass
import re
from typing import TYPE_CHECKING, Any

import click

from maestro_hive.cli import completion, screen
from maestro_hive.cli.frame import Helpful, verb
from maestro_hive.cli.standing import expected, find_run

if TYPE_CHECKING:
    from maestro_hive.cli.call import Call
    from maestro_hive.maestro.state.records import Entry

_NEGATIVE_NUMBER = re.compile(r"-[0-9.][0-9.eE+-]*", re.ASCII)


class TakesNegativeNumbers(Helpful):
    """A verb whose last argument may be a negative number, which looks like an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put negative numbers behind the options, where they are none."""
        numbers = [each for each in args if _NEGATIVE_NUMBER.fullmatch(each)]
        if numbers and "--" not in args:
            args = [*(each for each in args if each not in numbers), "--", *numbers]
        return super().parse_args(ctx, args)


@verb(
    "answer",
    examples="""
    maestro answer checkout-42 approve yes          a yes or no
    maestro answer checkout-42 approve              asks for the answer
    maestro answer checkout-42 plan '{"size": 3}'   JSON, where more is asked for
    maestro answer checkout-42 note "ship it" --early   before the run asks
    """,
    cls=TakesNegativeNumbers,
)
@click.argument("run", metavar="RUN", shell_complete=completion.run_ids)
@click.argument("name", metavar="NAME")
@click.argument("value", metavar="[VALUE]", required=False)
@click.option("--by", metavar="WHO", help="Who answers.  [default: you]")
@click.option("--early", is_flag=True, help="Keep the answer for a question not asked yet.")
def command(
    call: Call, run: str, name: str, value: str | None, by: str | None, *, early: bool
) -> None:
    """Answer what a run waits for.

    A run that calls hive.wait_for(NAME) goes on with the answer: at once if a process executes it,
    else when its program is started again. 'maestro show RUN' says what is asked, and which kind of
    answer is expected; another kind is refused, and nothing has happened.
    """
    from maestro_hive.hive import control as orders  # noqa: PLC0415 - not for --help

    with call.opened() as store:
        record = find_run(store, run)
        question = orders.find_question(store, record.name, name, early=early)
        if value is None:
            value = _asked(name, _shape_of(question))
        orders.answer_in_words(store, record.name, name, value, by=by or _me(), early=early)
    screen.line(f"run {record.name} has its answer to {name}: {value}")


def _shape_of(question: Entry | None) -> Any:
    from maestro_hive.maestro.state.projections import facts_of  # noqa: PLC0415 - not for --help

    return {} if question is None else facts_of(question).get("shape") or {}


def _asked(name: str, shape: Any) -> str:
    """Ask the person at the terminal, and say what is expected."""
    import sys  # noqa: PLC0415 - only here

    if not sys.stdin.isatty():
        raise click.UsageError(
            f"There is no VALUE, and nobody to ask; expected is {expected(shape)}.",
            click.get_current_context(silent=True),
        )
    return str(click.prompt(f"{name} ({expected(shape)})", err=True))


def _me() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        return None
