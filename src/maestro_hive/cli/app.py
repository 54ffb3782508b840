"""``maestro`` itself: the table of its verbs, running one, and one sentence for every error."""

from __future__ import annotations

import io
import os
import sys
import traceback
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, TextIO, cast

import click

import maestro_hive
from maestro_hive.cli import output
from maestro_hive.cli.command import (
    CONTEXT,
    FAILED,
    INTERRUPTED,
    SUCCESS,
    WRONG_USE,
    Call,
    HelpfulGroup,
    complete,
)
from maestro_hive.cli.output import complain
from maestro_hive.kernel.errors import ConfigurationError, InvalidIdentifierError, MaestroError

if TYPE_CHECKING:
    from types import TracebackType

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
        Verb("run", "running", "Run a task graph, or a workflow of a module; or resume it."),
        Verb("runs", "show", "List runs, newest first, with their status."),
        Verb("show", "show", "Show a run and its steps, or one step in detail."),
        Verb("watch", "watch", "Watch the runs, or one run, as they go on."),
        Verb("events", "events", "Print the events of a run, and follow it."),
        Verb("logs", "logs", "Print what the steps of a run wrote, and follow it."),
        Verb("answer", "control", "Answer a question that a run waits for, or an escalation."),
        Verb("escalations", "escalations", "List the failures that wait for a person."),
        Verb("retry", "control", "Retry what failed in a run, or one step of it."),
        Verb("resolve", "control", "Say whether an ambiguous step had its effect."),
        Verb("cancel", "control", "Cancel a run and its children."),
        Verb("fork", "control", "Start a new run from the completed steps of another."),
        Verb("export", "maintenance", "Write a run to one file, to be read or imported elsewhere."),
        Verb("import", "maintenance", "Import a run that export --with-values wrote, or a state."),
    ),
    "Task graphs": (
        Verb("demo", "demo", "See a team work, its engine killed, and nothing done twice."),
        Verb("graph", "graphs", "Check a task graph; show its levels and its critical path."),
        Verb("init", "graphs", "Write an example task graph to start from."),
        Verb("status", "team_status", "Show the tasks of a run of a task graph."),
        Verb("resume", "teams", "Resume a run of a task graph."),
        Verb("stop", "teams", "Stop the process that executes a run of a task graph."),
        Verb("zerg", "zerg", "Use the verbs of zerg, with its flags."),
    ),
    "Workers": (
        Verb("worker", "workers", "Execute enqueued runs with the workflows of a module."),
        Verb("enqueue", "workers", "Record a run of a workflow, for any worker."),
        Verb("queues", "workers", "Show what waits in the queues, and the workers."),
    ),
    "Shared by runs": (
        Verb("breakers", "control", "Show the circuit breakers; open or reset one."),
        Verb("repairs", "repairs", "List the repairs that have proven themselves, with counts."),
        Verb("budget", "budgets", "Show what was spent and the limits; set, raise or release one."),
        Verb("costs", "budgets", "Show what was spent, by persona, workflow, day or model."),
        Verb("schedules", "schedules", "List schedules; pause, resume or run one."),
        Verb("policy", "policies", "Check a policy file, and what it decides."),
        Verb(
            "audit",
            "policies",
            "Show what policies decided; verify that it was not changed.",
        ),
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
        from click.shell_completion import CompletionItem

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

    Exit codes: 0 success, 1 failure, 2 wrong use, 75 a person is needed; 128 and the number of the
    signal that stopped it: 129 the terminal was closed, 130 Ctrl+C, 143 SIGTERM.

    Examples:
        maestro runs                       the newest runs
        maestro --store state breakers     the breakers of the folder ./state
        maestro VERB --help                more about a verb, with examples
    """


complete(cli, reads=False)


def run(arguments: list[str]) -> int:
    """Execute a command line and return the exit code; errors are sentences on stderr."""
    _open_closed_streams()
    sys.stdout, sys.stderr = _complete_stream(sys.stdout), _complete_stream(sys.stderr)
    call = Call()
    sys.excepthook = partial(_report_unexpected, call)
    try:
        code = _called(arguments, call) or SUCCESS
    except click.exceptions.Exit as ended:
        code = ended.exit_code
    except (KeyboardInterrupt, click.Abort):
        output.end_typed_line()
        complain("interrupted")
        code = INTERRUPTED
    except BrokenPipeError:
        code = FAILED  # without a message: the reader of the output has left
    except (click.ClickException, MaestroError, OSError) as error:
        code = _explained(error, debug=call.debug)
    return _after_flush(code)


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
        from click.shell_completion import shell_complete

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


# --- errors ---------------------------------------------------------------------------------------


def _after_flush(code: int) -> int:
    """Return the exit code; another one, if the output could not be written to its end."""
    failure = _flush(sys.stdout)
    if failure is not None and code == SUCCESS:
        code = FAILED
        if not isinstance(failure, BrokenPipeError):
            complain(_sentence(failure))
    _flush(sys.stderr)
    return code


def _flush(stream: TextIO) -> OSError | None:
    """Write what a stream has buffered; return why it cannot be, as to a terminal that was closed.

    Then the rest is not written again when the interpreter exits: that would be its exit code.
    """
    try:
        stream.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return error
    return None


def _explained(error: click.ClickException | MaestroError | OSError, *, debug: bool) -> int:
    if debug:
        click.echo(output.redacted("".join(traceback.format_exception(error))), err=True, nl=False)
    complain(_sentence(error))
    if isinstance(error, click.ClickException):
        return error.exit_code
    wrong_use = isinstance(error, InvalidIdentifierError | ConfigurationError)
    return WRONG_USE if wrong_use else FAILED


def _sentence(error: click.ClickException | MaestroError | OSError) -> str:
    if isinstance(error, click.UsageError) and error.ctx is not None:
        message = " ".join(error.format_message().split())  # of choices, one to a line
        stop = "" if message.endswith((".", "?")) else "."
        return f"{message}{stop} See '{error.ctx.command_path} --help'."
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, OSError) and not isinstance(error, MaestroError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    return str(error)


def _report_unexpected(
    call: Call, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if call.debug:
        text = "".join(traceback.format_exception(kind, error, trace))
        click.echo(output.redacted(text), err=True, nl=False)
        return
    complain(
        f"internal error: {kind.__name__}: {error}; --debug shows where."
        " What was recorded before it is safe"
    )
