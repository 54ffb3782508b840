"""What every verb shares: its options, asking first, help with examples, and completion."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import re
import shlex
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from maestro_hive.cli import output
from maestro_hive.cli.errors import FAILED, WRONG_USE, complain
from maestro_hive.kernel.errors import MaestroError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from maestro_hive.maestro.state.store import Reader, Store

    Body = Callable[..., int | None]

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

_STORE_HELP = (
    "The state folder.  [default: MAESTRO_STATE_DIR; else /var/maestro/state, or ~/.maestro/state"
    " where that cannot be used]"
)


class Call:
    """One call of ``maestro``: the options around the verb, and the folder it is about."""

    def __init__(self) -> None:
        self.chosen: Path | None = None
        self.wants_json = False
        self.debug = False

    @functools.cached_property
    def folder(self) -> Path:
        """The state folder; the first use prints which one it is, and why."""
        from maestro_hive.admin.folder import choose_folder  # noqa: PLC0415 - not for --help

        folder, why = choose_folder(self.chosen)
        output.note(f"store: {folder} ({why})")
        _print_warnings()
        return folder

    @contextlib.contextmanager
    def reading(self) -> Iterator[Reader]:
        """Open the state folder for reading: it need not be writable, and is not created."""
        from maestro_hive.admin import folder  # noqa: PLC0415 - not for --help

        with folder.reading(self.folder) as reader:
            if reader.partial:
                output.note(reader.partial)
            yield reader

    @contextlib.contextmanager
    def writing(self) -> Iterator[Store]:
        """Open the state folder for writing; it must exist."""
        from maestro_hive.admin import folder  # noqa: PLC0415 - not for --help

        with folder.writing(self.folder) as store:
            yield store

    def print_json(self, **members: Any) -> None:
        """Print the result for ``--json``: an object with these members, and the store."""
        output.as_json({"store": str(self.folder), **members})

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


def _print_warnings() -> None:
    """Print warnings and log lines of this package on stderr, as sentences."""
    warnings.showwarning = lambda message, *_, **__: complain(str(message))
    logger = logging.getLogger("maestro_hive")
    if not any(isinstance(each, _Sentences) for each in logger.handlers):
        logger.addHandler(_Sentences(logging.WARNING))
        logger.propagate = False


class _Sentences(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        complain(record.getMessage())


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
            raise click.UsageError(f"There is no '{name}'.{self._nearest(name)}", ctx)
        return super().resolve_command(ctx, args)

    def _nearest(self, name: str) -> str:
        from difflib import get_close_matches  # noqa: PLC0415 - needed only after a mistake

        near = get_close_matches(name, self.commands, n=2)
        if near:
            return f" Did you mean {' or '.join(repr(each) for each in near)}?"
        return f" There is: {', '.join(sorted(self.commands))}."


def verb(
    name: str, *, examples: str, reads: bool = False, cls: type[Helpful] = Helpful
) -> Callable[[Body], Helpful]:
    """Make a function that takes a ``Call`` first into a verb; one that reads has ``--json``.

    The docstring is its help. It returns the exit code, None for 0.
    """

    def decorated(body: Body) -> Helpful:
        command = click.command(name, cls=cls, context_settings=CONTEXT)(click.pass_obj(body))
        return _with_options(command, examples, reads=reads)

    return decorated


def verb_group(name: str, *, examples: str, alone: bool = False) -> Callable[[Body], HelpfulGroup]:
    """Make a function into a verb that has verbs of its own, which ``sub_verb`` adds.

    With ``alone`` it does something itself when none of them is given: it reads.
    """

    def decorated(body: Body) -> HelpfulGroup:
        group = click.group(
            name,
            cls=HelpfulGroup,
            context_settings=CONTEXT,
            invoke_without_command=alone,
            subcommand_metavar=f"{'[VERB]' if alone else 'VERB'} ...",
        )(_when_alone(body))
        return _with_options(group, examples, reads=alone)

    return decorated


def sub_verb(
    group: HelpfulGroup, name: str, *, examples: str, reads: bool = False
) -> Callable[[Body], Helpful]:
    """Make a function into a verb of ``group``, as ``verb`` does."""

    def decorated(body: Body) -> Helpful:
        command = verb(name, examples=examples, reads=reads)(body)
        group.add_command(command)
        return command

    return decorated


def _when_alone(body: Body) -> Body:
    """Call a group's own function only if none of its verbs is called."""

    @click.pass_context
    @functools.wraps(body)
    def called(ctx: click.Context, /, *args: Any, **options: Any) -> int | None:
        return body(ctx.obj, *args, **options) if ctx.invoked_subcommand is None else None

    return called


CommandT = TypeVar("CommandT", bound=Helpful)


def _with_options(command: CommandT, examples: str, *, reads: bool) -> CommandT:
    command.examples = inspect.cleandoc(examples)
    command.params += common_options(reads=reads)
    return command


def common_options(*, reads: bool) -> list[click.Parameter]:
    """Return the options that may be given before and after a verb; the last one counts."""
    store = click.Option(
        ["--store"],
        metavar="FOLDER",
        type=click.Path(),
        callback=_set_store,
        expose_value=False,
        help=_STORE_HELP,
    )
    flags = {"--debug": "Show the traceback of an error."}
    if reads:
        flags["--json"] = "Print JSON."
    return [
        store,
        *(
            click.Option([name], is_flag=True, callback=_set_flag, expose_value=False, help=text)
            for name, text in flags.items()
        ),
    ]


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


@verb(
    "completion",
    examples="""
    maestro completion bash > ~/.local/share/bash-completion/completions/maestro
    maestro completion zsh > ~/.zfunc/_maestro        with ~/.zfunc in fpath, before compinit
    maestro completion fish > ~/.config/fish/completions/maestro.fish
    eval "$(maestro completion bash)"                 for this shell only
    """,
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(_: Call, shell: str) -> None:
    """Print the completion script for a shell.

    Put it where your shell finds such scripts, and start a new shell. The tab key then completes
    verbs, options, and the names of runs, breakers and checkpoints.
    """
    from click.shell_completion import get_completion_class  # noqa: PLC0415 - needed here only

    made = get_completion_class(shell)
    assert made is not None
    root = click.get_current_context().find_root().command
    script = made(root, {}, "maestro", "_MAESTRO_COMPLETE").source()
    click.echo(f"{script}{_WITH_COLONS}" if shell == "bash" else script)


def run_ids(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Complete a run id, from the newest runs."""
    from maestro_hive.admin import runs  # noqa: PLC0415 - only when completing

    return _read(ctx, lambda reader: runs.run_ids(reader, incomplete, _MOST))


def breaker_names(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a circuit breaker."""
    from maestro_hive.admin import breakers  # noqa: PLC0415 - only when completing

    return _read(ctx, lambda reader: breakers.breaker_names(reader, incomplete, _MOST))


def checkpoint_ids(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Complete the id of a checkpoint."""
    from maestro_hive.admin.checkpoints import list_checkpoints  # noqa: PLC0415 - as above

    with contextlib.suppress(MaestroError, OSError):
        ids = {each.id for each in list_checkpoints(_folder(ctx))}
        return sorted(each for each in ids if each.startswith(incomplete))[:_MOST]
    return []


def _read(ctx: click.Context, find: Callable[[Reader], list[str]]) -> list[str]:
    """Read names, and none if that fails: a message would disturb the typing."""
    from maestro_hive.admin.folder import reading  # noqa: PLC0415 - only when completing

    with contextlib.suppress(MaestroError, OSError), reading(_folder(ctx)) as reader:
        return find(reader)
    return []


def _folder(ctx: click.Context) -> Path:
    from maestro_hive.admin.folder import choose_folder  # noqa: PLC0415 - only when completing

    call = ctx.find_object(Call)
    return choose_folder(call.chosen if call else None)[0]
