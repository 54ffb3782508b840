"""``maestro`` itself: the table of its verbs, and running one."""

from __future__ import annotations

import io
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, TextIO, cast

import click

import maestro_hive
from maestro_hive.cli import output
from maestro_hive.cli.command import CONTEXT, Call, HelpfulGroup, common_options
from maestro_hive.cli.errors import exit_code_of

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_COMPLETE = "_MAESTRO_COMPLETE"


class Verb(NamedTuple):
    """A verb, the module of this package that defines it, and what it does in one line.

    The module has the command as ``NAME_command``. The summary is repeated as the first line of
    its docstring, and a test compares the two.
    """

    name: str
    module: str
    summary: str

    def load(self) -> click.Command:
        """Return the command."""
        module = import_module(f"maestro_hive.cli.{self.module}")
        return cast("click.Command", getattr(module, f"{self.name}_command"))


SECTIONS: dict[str, tuple[Verb, ...]] = {
    "Runs": (
        Verb("runs", "show", "List runs, newest first, with their status."),
        Verb("show", "show", "Show a run and its steps, or one step in detail."),
        Verb("events", "show", "Print the events of a run, and follow it."),
        Verb("answer", "control", "Answer a question that a run waits for."),
        Verb("retry", "control", "Retry what failed in a run, or one step of it."),
        Verb("cancel", "control", "Cancel a run and its children."),
        Verb("fork", "control", "Start a new run from the completed steps of another."),
        Verb("export", "maintenance", "Write a run to one file, to be imported elsewhere."),
        Verb("import", "maintenance", "Import a run from a file that export wrote."),
    ),
    "Shared by runs": (
        Verb("breakers", "breakers", "Show the circuit breakers; open or reset one."),
    ),
    "Checkpoints and copies": (
        Verb("checkpoints", "checkpoints", "List, verify, compare and restore checkpoints."),
        Verb("backup", "maintenance", "Copy a state folder, in use or not, to a new folder."),
    ),
    "The state folder": (
        Verb("doctor", "maintenance", "Examine a state folder, and repair it."),
        Verb("gc", "maintenance", "Delete what nothing refers to."),
        Verb("purge", "maintenance", "Delete runs completely: journal, copies and checkpoints."),
    ),
    "The shell": (Verb("completion", "command", "Print the completion script for a shell."),),
}

VERBS: dict[str, Verb] = {verb.name: verb for section in SECTIONS.values() for verb in section}


class Root(HelpfulGroup):
    """Verbs in sections, each loaded when it is used; ``commands`` are placeholders for them."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a verb."""
        found = VERBS.get(cmd_name)
        return None if found is None else found.load()

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
    """Inspect and control durable runs, and maintain their state folder.

    Exit codes: 0 success, 1 failure, 2 wrong use, 75 a person is needed, 130 interrupted.
    """


cli.params += common_options(reads=False)
cli.examples = """\
maestro runs                       the newest runs
maestro --store state breakers     the breakers of the folder ./state
maestro VERB --help                more about a verb, with examples"""


def run(arguments: list[str]) -> int:
    """Execute a command line and return the exit code."""
    _open_closed_streams()
    sys.stdout, sys.stderr = _complete_stream(sys.stdout), _complete_stream(sys.stderr)
    call = Call()
    return exit_code_of(lambda: _called(arguments, call), debug=lambda: call.debug)


def _open_closed_streams() -> None:
    """Replace a closed stream by an empty one; else another file would get its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The lowest free number, which is the one of this stream.
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def _complete_stream(stream: TextIO) -> TextIO:
    """Return a stream that can write every character, and writes all of a text or raises.

    With PYTHONUNBUFFERED Python drops, silently, what a full disk or a closed pipe did not take.
    """
    if not isinstance(stream, io.TextIOWrapper):
        return stream  # a test reads it
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

        instruction = os.environ[_COMPLETE]
        return shell_complete(cli, {"obj": call}, "maestro", _COMPLETE, instruction)
    for each in arguments:
        _require_text(each)
    colour = None if output.may_use_colours() else False
    with cli.make_context("maestro", arguments, obj=call, color=colour) as ctx:
        return cast("int | None", cli.invoke(ctx))


def _require_text(argument: str) -> None:
    try:
        argument.encode()
    except UnicodeEncodeError:
        raise click.UsageError(f"{argument!r} is not UTF-8, and arguments must be.") from None
