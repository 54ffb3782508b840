"""``maestro`` itself: the command that the verbs belong to."""

from __future__ import annotations

import io
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, TextIO, cast

import click

import maestro_hive
from maestro_hive.cli import screen
from maestro_hive.cli.call import Call
from maestro_hive.cli.endings import ended_by
from maestro_hive.cli.frame import CONTEXT, HelpfulGroup, common_options
from maestro_hive.cli.verbs import SECTIONS, VERBS

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_COMPLETE = "_MAESTRO_COMPLETE"


class Root(HelpfulGroup):
    """Verbs in sections, each loaded when it is used; ``commands`` only stand for them."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a verb."""
        found = VERBS.get(cmd_name)
        if found is None:
            return None
        module = import_module(f"maestro_hive.cli.{found.module}")
        return cast("click.Command", module.command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs, by section."""
        width = max(map(len, VERBS))
        for section, verbs in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(f"{verb.name:{width}}", verb.summary) for verb in verbs])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete a verb without loading any."""
        from click.shell_completion import CompletionItem  # noqa: PLC0415 - only when completing

        options = click.Command.shell_complete(self, ctx, incomplete)
        verbs = (verb for verb in VERBS.values() if verb.name.startswith(incomplete))
        return [*(CompletionItem(verb.name, help=verb.summary) for verb in verbs), *options]


@click.group(
    cls=Root,
    context_settings=CONTEXT,
    subcommand_metavar="VERB ...",
    commands={
        verb.name: click.Command(verb.name, short_help=verb.summary) for verb in VERBS.values()
    },
)
@click.version_option(maestro_hive.__version__, prog_name="maestro")
def cli() -> None:
    """See what durable runs are doing, and look after the folder they are kept in.

    Exit codes: 0 done, 1 failed, 2 wrong use, 75 a person is needed, 130 interrupted.
    """


cli.params += common_options(reads=False)
cli.examples = """\
maestro doctor                     is everything all right?
maestro --store state breakers     what is open, in the folder ./state
maestro VERB --help                more about a verb, with examples"""


def run(arguments: list[str]) -> int:
    """Do what was typed and return the exit code."""
    _open_closed_streams()
    sys.stdout, sys.stderr = _that_takes_all(sys.stdout), _that_takes_all(sys.stderr)
    call = Call()
    return ended_by(lambda: _called(arguments, call), debug=lambda: call.debug)


def _open_closed_streams() -> None:
    """Let a stream that was closed be an empty one; else a file of ours would get its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The lowest free number, which is the one of this stream.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def _that_takes_all(stream: TextIO) -> TextIO:
    """Return a stream that has a form for every character, and writes all of a text or raises.

    With PYTHONUNBUFFERED Python drops, silently, what a full disk or a closed pipe did not take.
    """
    assert isinstance(stream, io.TextIOWrapper)
    if not isinstance(stream.buffer, io.RawIOBase):
        stream.reconfigure(errors="backslashreplace")
        return stream
    return os.fdopen(
        stream.fileno(),
        "w",
        buffering=1,
        encoding=stream.encoding,
        errors="backslashreplace",
        closefd=False,
    )


def _called(arguments: list[str], call: Call) -> int | None:
    if _COMPLETE in os.environ:
        from click.shell_completion import shell_complete  # noqa: PLC0415 - only when completing

        asked = os.environ[_COMPLETE]
        return shell_complete(cli, {"obj": call}, "maestro", _COMPLETE, asked)
    for each in arguments:
        _require_text(each)
    colour = None if screen.colours_are_welcome() else False
    with cli.make_context("maestro", arguments, obj=call, color=colour) as ctx:
        return cast("int | None", cli.invoke(ctx))


def _require_text(argument: str) -> None:
    try:
        argument.encode()
    except UnicodeEncodeError:
        raise click.UsageError(f"{argument!r} is not UTF-8, and what is typed must be.") from None
