"""What every verb shares: its options, exit codes, asking first, help with examples, and completion."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import re
import shlex
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from maestro_hive.cli import output
from maestro_hive.cli.output import complain
from maestro_hive.kernel.errors import MaestroError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from maestro_hive.maestro.state.store import Reader, Store

    Body = Callable[..., int | None]

#: Exit codes; that of a person needed is EX_TEMPFAIL of sysexits.h: nothing is broken, and nothing
#: continues until a person decides.
SUCCESS, FAILED, WRONG_USE, PERSON_NEEDED, INTERRUPTED = 0, 1, 2, 75, 130

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class Call:
    """One call of ``maestro``: the options around the verb, and the folder it is about."""

    def __init__(self) -> None:
        self.chosen: Path | None = None
        self.wants_json = False
        self.debug = False
        #: How often ``-v`` was given.
        self.verbosity = 0

    @functools.cached_property
    def folder(self) -> Path:
        """The state folder; the first use prints which one it is, and why."""
        from maestro_hive.admin.folder import choose_folder

        folder, why = choose_folder(self.chosen)
        output.note(f"store: {folder} ({why})")
        print_logs(self.verbosity)
        return folder

    @contextlib.contextmanager
    def reading(self) -> Iterator[Reader]:
        """Open the state folder for reading: it need not be writable, and is not created."""
        from maestro_hive.admin import folder

        with folder.reading(self.folder) as reader:
            if reader.partial:
                output.note(reader.partial)
            yield reader

    def writing(self, *, create: bool = False) -> AbstractContextManager[Store]:
        """Open the state folder for writing; it must exist, unless it may be created."""
        from maestro_hive.admin import folder

        is_new = create and folder.is_vacant(self.folder)
        if is_new:
            output.note("the state folder is new")
        return folder.writing(self.folder, create=is_new)

    def print_json(self, **members: object) -> None:
        """Print the result for ``--json``: an object with these members, and the store."""
        click.echo(output.to_json({"store": str(self.folder), **members}, indent=2))

    def confirm(self, question: str, *, yes: bool) -> None:
        """Return if ``--yes`` was given or the user agrees; otherwise exit, with nothing changed."""
        if yes:
            return
        if not sys.stdin.isatty():
            raise click.UsageError(
                f"{question} Cannot ask: stdin is not a terminal. Confirm with --yes.",
                ctx=click.get_current_context(silent=True),
            )
        try:
            agreed = click.confirm(question, err=True)
        except click.Abort as stopped:
            if isinstance(stopped.__context__, KeyboardInterrupt):
                raise
            agreed = False  # the end of the input
            click.echo(err=True)
        if not agreed:
            complain("nothing was changed")
            raise click.exceptions.Exit(FAILED)

    def command_line(self, *words: str) -> str:
        """Return a command to type next, for the same store."""
        store = ["--store", str(self.chosen)] if self.chosen is not None else []
        return shlex.join(["maestro", *words, *store])


#: The levels that are printed without ``-v``, with one and with two of them.
_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


def print_logs(verbosity: int) -> None:
    """Print warnings and log lines of this package on stderr; those of runs and steps with ``-v``."""
    warnings.showwarning = lambda message, *_, **__: complain(str(message))
    logger = logging.getLogger("maestro_hive")
    if any(isinstance(each, _Sentences) for each in logger.handlers):
        return
    level = _LEVELS[min(verbosity, len(_LEVELS) - 1)]
    handler: logging.Handler = _Lines(level) if verbosity else _Sentences(level)
    logger.addHandler(handler)
    logger.propagate = False
    if verbosity:
        from maestro_hive.engine.execution_log import ExecutionLog

        logger.setLevel(level)
        ExecutionLog.least_of_all = level


class _Sentences(logging.Handler):
    """Prints warnings as sentences; not of runs and steps: how they end is what the verb says."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        if not record.name.startswith(("maestro_hive.runs", "maestro_hive.steps")):
            complain(record.getMessage())


class _Lines(_Sentences):
    """Prints log lines with their time; with all that is logged, also tracebacks."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        when = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = f"{when} {record.levelname.lower()}: {output.printable(record.getMessage())}"
        if self.level <= logging.DEBUG:
            if record.exc_text:  # its exception has secrets, and was removed
                text += f"\n{record.exc_text}"
            elif record.exc_info:
                text += f"\n{''.join(traceback.format_exception(record.exc_info[1]))}".rstrip()
        click.echo(text, err=True)


_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*(s|m|min|h|d|w|)")
_LONGEST = 1000 * 366 * 86_400


def duration(text: str) -> float:
    """Read a duration as seconds: ``90``, ``10m``, ``2h``, ``30d``, ``4w``."""
    found = _DURATION.fullmatch(text.strip())
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not 0 < seconds <= _LONGEST:
        raise click.BadParameter(f"{text!r} is no duration such as 90, 10m, 2h or 30d.")
    return seconds


def duration_or_none(text: str) -> float:
    """Read a duration that may be 0."""
    return 0.0 if text.strip() in ("0", "0s") else duration(text)


# --- verbs ----------------------------------------------------------------------------------------


class Helpful(click.Command):
    """A command that ends its help with examples."""

    examples: str = ""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples unwrapped: what is typed, and what it is for."""
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples.splitlines():
                    formatter.write(f"{'':{formatter.current_indent}}{example}\n")
        super().format_epilog(ctx, formatter)


class HelpfulGroup(Helpful, click.Group):
    """A command with verbs of its own, that suggests one for a mistyped one."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Show the help if there are no arguments and nothing is done without."""
        if not args and not self.invoke_without_command and not ctx.resilient_parsing:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(WRONG_USE)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb, or raise an error that suggests similar ones."""
        name = args[0]
        if not name.startswith("-") and not ctx.resilient_parsing and name not in self.commands:
            from difflib import get_close_matches

            near = " or ".join(map(repr, get_close_matches(name, self.commands, n=2)))
            known = f"There is: {', '.join(sorted(self.commands))}."
            hint = f"Did you mean {near}?" if near else known
            raise click.UsageError(f"There is no '{name}'. {hint}", ctx)
        return super().resolve_command(ctx, args)


def verb(
    name: str,
    *,
    reads: bool = False,
    group: HelpfulGroup | None = None,
    cls: type[Helpful] = Helpful,
    imports: bool = False,
) -> Callable[[Body], Helpful]:
    """Make a function that takes a ``Call`` first into a verb; one that reads has ``--json``.

    One that imports a module has the state folder of the module's Hive. The docstring is its help,
    with the examples at its end. It returns the exit code, None for 0.
    """

    def decorated(body: Body) -> Helpful:
        command = click.command(name, cls=cls, context_settings=CONTEXT)(click.pass_obj(body))
        if group is not None:
            group.add_command(command)
        return complete(command, reads=reads, imports=imports)

    return decorated


def verb_group(name: str, *, alone: bool = False) -> Callable[[Body], HelpfulGroup]:
    """Make a function into a verb that has verbs of its own.

    With ``alone`` it does something itself when none of them is given: it reads.
    """

    def decorated(body: Body) -> HelpfulGroup:
        @click.pass_context  # type: ignore[arg-type]
        @functools.wraps(body)
        def called(ctx: click.Context, **given: Any) -> int | None:
            return body(ctx.obj, **given) if ctx.invoked_subcommand is None else None

        group = click.group(
            name,
            cls=HelpfulGroup,
            context_settings=CONTEXT,
            invoke_without_command=alone,
            subcommand_metavar=f"{'[VERB]' if alone else 'VERB'} ...",
        )(called)
        return complete(group, reads=alone)

    return decorated


CommandT = TypeVar("CommandT", bound=Helpful)


def complete(command: CommandT, *, reads: bool, imports: bool = False) -> CommandT:
    """Add the common options to a command, and take the examples out of its help."""
    text, _, examples = inspect.cleandoc(command.help or "").partition("\n\nExamples:\n")
    command.help, command.examples = text, inspect.cleandoc(examples)
    common = [_STORE_OF_HIVE if imports else _STORE, _VERBOSE, _DEBUG]
    command.params += [*common, _JSON, WITH_VALUES] if reads else common
    return command


def _set_store(ctx: click.Context, option: click.Parameter, value: str | None) -> None:
    if value is None:
        return
    if not value.strip() or "://" in value:
        raise click.BadParameter(f"{value!r} is not a folder.", ctx, option)
    ctx.ensure_object(Call).chosen = Path(value)


def _set_flag(ctx: click.Context, option: click.Parameter, value: bool) -> None:
    if value:
        name = "wants_json" if option.name == "json" else "debug"
        setattr(ctx.ensure_object(Call), name, True)


def _keep_values(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value:
        output.keep_values(ctx)


def _add_verbosity(ctx: click.Context, _: click.Parameter, value: int) -> None:
    ctx.ensure_object(Call).verbosity += value


_DEFAULT_STORE = (
    "MAESTRO_STATE_DIR; else /var/maestro/state, or ~/.maestro/state where that cannot be used"
)

# They may be given before and after a verb; the last one counts.
_STORE, _STORE_OF_HIVE = (
    click.Option(
        ["--store"],
        metavar="FOLDER",
        type=click.Path(),
        callback=_set_store,
        expose_value=False,
        help=text,
    )
    for text in (
        f"The state folder.  [default: {_DEFAULT_STORE}]",
        "The state folder. That of a module's Hive is its own: go on only if it is this one.",
    )
)
_VERBOSE = click.Option(
    ["-v", "--verbose"],
    count=True,
    callback=_add_verbosity,
    expose_value=False,
    help="Show what is logged of runs; -vv shows more.",
)
_DEBUG, _JSON = (
    click.Option([name], is_flag=True, callback=_set_flag, expose_value=False, help=text)
    for name, text in {
        "--debug": "Show the traceback of an error.",
        "--json": "Print JSON.",
    }.items()
)


#: For verbs that show what is stored; everything else that is printed has no secrets.
WITH_VALUES = click.Option(
    ["--with-values"],
    is_flag=True,
    callback=_keep_values,
    expose_value=False,
    help="Print values as they are stored, with secrets.",
)


# --- completion ------------------------------------------------------------------------------------


#: How many names are completed: more would not fit on a screen.
_MOST = 100

#: Bash splits words at colons, and run ids may have some: the parts are joined again for click, and
#: what is before the last colon is removed from the completions.
_WITH_COLONS = r"""
_maestro_completion_with_colons() {
    local line=$COMP_LINE words=() cword=0 i word before
    for ((i = 0; i < ${#COMP_WORDS[@]}; i++)); do
        word=${COMP_WORDS[i]}
        if ((i)) && [[ $line != [[:blank:]]* && ($word == :* || ${words[-1]} == *:) ]]; then
            words[-1]+=$word
        else
            words+=("$word")
        fi
        line=${line#*"$word"}
        ((i == COMP_CWORD)) && cword=$((${#words[@]} - 1))
    done
    local COMP_WORDS=("${words[@]}") COMP_CWORD=$cword
    _maestro_completion "$@"
    word=${words[cword]}
    if [[ $COMP_WORDBREAKS == *:* && $word == *:* ]]; then
        before=${word%"${word##*:}"}
        COMPREPLY=("${COMPREPLY[@]#"$before"}")
    fi
}

complete -o nosort -F _maestro_completion_with_colons maestro
"""


@verb("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(_: Call, shell: str) -> None:
    """Print the completion script for a shell.

    Put it where your shell finds such scripts, and start a new shell. The tab key then completes
    verbs, options, and the names of runs, breakers, schedules and checkpoints.

    Examples:
        maestro completion bash > ~/.local/share/bash-completion/completions/maestro
        maestro completion zsh > ~/.zfunc/_maestro        with ~/.zfunc in fpath, before compinit
        maestro completion fish > ~/.config/fish/completions/maestro.fish
        eval "$(maestro completion bash)"                 for this shell only
    """
    from click.shell_completion import get_completion_class

    made = get_completion_class(shell)
    assert made is not None
    root = click.get_current_context().find_root().command
    script = made(root, {}, "maestro", "_MAESTRO_COMPLETE").source()
    click.echo(f"{script}{_WITH_COLONS}" if shell == "bash" else script)


def _completion(
    names: Callable[[Path], Iterable[str]],
) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Complete names of a state folder; none after an error: a message would disturb the typing."""

    def completed(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
        from maestro_hive.admin.folder import choose_folder

        call = ctx.find_object(Call)
        with contextlib.suppress(MaestroError, OSError):
            folder = choose_folder(call.chosen if call else None)[0]
            return [name for name in names(folder) if name.startswith(incomplete)][:_MOST]
        return []

    return completed


@_completion
def run_ids(folder: Path) -> Iterator[str]:
    """Complete a run id, from the newest runs."""
    from maestro_hive.admin.folder import reading

    with reading(folder) as reader:
        yield from (record.name for record in reader.runs())


@_completion
def breaker_names(folder: Path) -> Iterator[str]:
    """Complete the name of a circuit breaker."""
    from maestro_hive.admin.breakers import list_breakers
    from maestro_hive.admin.folder import reading

    with reading(folder) as reader:
        yield from (breaker.name for breaker in list_breakers(reader))


@_completion
def schedule_names(folder: Path) -> Iterator[str]:
    """Complete the name of a schedule."""
    from maestro_hive.admin.folder import reading
    from maestro_hive.admin.schedules import list_schedules

    with reading(folder) as reader:
        yield from (schedule.name for schedule in list_schedules(reader))


@_completion
def checkpoint_ids(folder: Path) -> Iterable[str]:
    """Complete the id of a checkpoint."""
    from maestro_hive.admin.checkpoints import list_checkpoints

    return sorted({checkpoint.id for checkpoint in list_checkpoints(folder)})
