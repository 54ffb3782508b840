"""Exit codes, and one sentence for every error."""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING

import click

from maestro_hive.cli.output import printable
from maestro_hive.kernel.errors import ConfigurationError, InvalidIdentifierError, MaestroError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

SUCCESS = 0
FAILED = 1
WRONG_USE = 2
#: Nothing is broken, and nothing continues until a person decides (sysexits.h: EX_TEMPFAIL).
PERSON_NEEDED = 75
INTERRUPTED = 130


def complain(sentence: str) -> None:
    """Print an error on stderr, in one line."""
    click.echo(f"maestro: {printable(sentence)}", err=True)


def exit_code_of(call: Callable[[], int | None], *, debug: Callable[[], bool]) -> int:
    """Make a call and return the exit code; what it raises is printed as a sentence on stderr."""
    sys.excepthook = _hook(debug)
    try:
        code = call() or SUCCESS
    except click.exceptions.Exit as ended:
        code = ended.exit_code
    except (KeyboardInterrupt, click.Abort):
        if sys.stderr.isatty():
            click.echo(err=True)  # the line on which the terminal wrote ^C
        complain("interrupted")
        code = INTERRUPTED
    except BrokenPipeError:
        code = FAILED  # without a message: the reader of the output has left
    except (click.ClickException, MaestroError, OSError) as error:
        code = _explained(error, debug=debug())
    return _after_flush(code)


def _after_flush(code: int) -> int:
    """Return the exit code; another one, if the output could not be written to its end."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # The rest must not be written again when the interpreter exits: that would print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if code == SUCCESS and not isinstance(error, BrokenPipeError):
            complain(_sentence(error))
        return code or FAILED
    return code


def _explained(error: click.ClickException | MaestroError | OSError, *, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
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


def _hook(
    debug: Callable[[], bool],
) -> Callable[[type[BaseException], BaseException, TracebackType | None], None]:
    """Return the hook for unexpected errors: one sentence for them, too."""

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if debug():
            sys.__excepthook__(kind, error, trace)
            return
        complain(
            f"internal error: {kind.__name__}: {error}; --debug shows where."
            " What was recorded before it is safe"
        )

    return report
