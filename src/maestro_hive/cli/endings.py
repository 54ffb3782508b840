"""How ``maestro`` ends: its exit codes, and one sentence for whatever went wrong."""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING

import click

from maestro_hive.cli.words import printable
from maestro_hive.kernel.errors import ConfigurationError, InvalidIdentifierError, MaestroError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

DONE = 0
FAILED = 1
WRONG_USE = 2
#: Nothing is broken, and nothing goes on until somebody decides (sysexits.h: EX_TEMPFAIL).
PERSON_NEEDED = 75
INTERRUPTED = 130


def complain(sentence: str) -> None:
    """Say on stderr, in one line, what went wrong."""
    click.echo(f"maestro: {printable(sentence)}", err=True)


def ended_by(call: Callable[[], int | None], *, debug: Callable[[], bool]) -> int:
    """Make a call and return the exit code; what it raises becomes a sentence on stderr."""
    sys.excepthook = _hook(debug)
    try:
        code = call() or DONE
    except click.exceptions.Exit as ended:
        code = ended.exit_code
    except (KeyboardInterrupt, click.Abort):
        if sys.stderr.isatty():
            click.echo(err=True)  # the line on which the terminal wrote ^C
        complain("interrupted")
        code = INTERRUPTED
    except BrokenPipeError:
        code = FAILED  # said to nobody: whoever read the output has seen enough
    except (click.ClickException, MaestroError, OSError) as error:
        code = _explained(error, debug=debug())
    return _all_written(code)


def _all_written(code: int) -> int:
    """Return the exit code; another one, if the output could not be written to its end."""
    try:
        sys.stdout.flush()
    except OSError as error:
        # What is left must not be tried again when the interpreter ends, or that would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if code == DONE and not isinstance(error, BrokenPipeError):
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
        return f"{error.format_message()} See '{error.ctx.command_path} --help'."
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, OSError) and not isinstance(error, MaestroError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    return str(error)


def _hook(
    debug: Callable[[], bool],
) -> Callable[[type[BaseException], BaseException, TracebackType | None], None]:
    """Return what Python calls for an error that nobody expected: one sentence for it, too."""

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if debug():
            sys.__excepthook__(kind, error, trace)
            return
        complain(
            f"a mistake in maestro itself: {kind.__name__}: {error}; --debug shows where."
            " What was recorded before it is safe"
        )

    return tell
