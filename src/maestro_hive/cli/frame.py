"""What every verb shares: ``--store``, ``--debug``, ``--json``, help with examples, suggestions."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from maestro_hive.cli.call import Call
from maestro_hive.cli.endings import WRONG_USE

if TYPE_CHECKING:
    from collections.abc import Callable

    Body = Callable[..., int | None]

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

_STORE_HELP = (
    "The state folder.  [default: MAESTRO_STATE_DIR; else /var/maestro/state, or ~/.maestro/state"
    " where that cannot be used]"
)


class Helpful(click.Command):
    """A command that ends its help with examples."""

    examples: str = ""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples as they stand: what is typed, and what it is for."""
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples.splitlines():
                    formatter.write(f"{'':{formatter.current_indent}}{example}\n")
        super().format_epilog(ctx, formatter)


class HelpfulGroup(Helpful, click.Group):
    """A command with verbs of its own, that says which one a mistyped one may have meant."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Show the help if nothing was typed, and nothing is done then."""
        if not args and not self.invoke_without_command and not ctx.resilient_parsing:
            click.echo(ctx.get_help(), err=True)
            ctx.exit(WRONG_USE)
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb, or raise with those that are spelled much like it."""
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

    def made(body: Body) -> Helpful:
        command = click.command(name, cls=cls, context_settings=CONTEXT)(click.pass_obj(body))
        return _completed(command, examples, reads=reads)

    return made


def verb_group(name: str, *, examples: str, alone: bool = False) -> Callable[[Body], HelpfulGroup]:
    """Make a function into a verb that has verbs of its own, which ``sub_verb`` adds.

    ``alone`` says that it does something when none of them is given: it reads.
    """

    def made(body: Body) -> HelpfulGroup:
        group = click.group(
            name,
            cls=HelpfulGroup,
            context_settings=CONTEXT,
            invoke_without_command=alone,
            subcommand_metavar=f"{'[VERB]' if alone else 'VERB'} ...",
        )(_when_alone(body))
        return _completed(group, examples, reads=alone)

    return made


def sub_verb(
    group: HelpfulGroup, name: str, *, examples: str, reads: bool = False
) -> Callable[[Body], Helpful]:
    """Make a function into a verb of ``group``, as ``verb`` does."""

    def made(body: Body) -> Helpful:
        command = verb(name, examples=examples, reads=reads)(body)
        group.add_command(command)
        return command

    return made


def _when_alone(body: Body) -> Body:
    """Call a group's own function only if none of its verbs is called."""

    @click.pass_context
    @functools.wraps(body)
    def called(ctx: click.Context, /, *args: Any, **options: Any) -> int | None:
        return body(ctx.obj, *args, **options) if ctx.invoked_subcommand is None else None

    return called


CommandT = TypeVar("CommandT", bound=Helpful)


def _completed(command: CommandT, examples: str, *, reads: bool) -> CommandT:
    command.examples = inspect.cleandoc(examples)
    command.params += common_options(reads=reads)
    return command


def common_options(*, reads: bool) -> list[click.Parameter]:
    """Return the options that may stand before and after a verb; the last one said counts."""
    options = [
        click.Option(
            ["--store"],
            metavar="FOLDER",
            type=click.Path(),
            callback=_remember_store,
            expose_value=False,
            help=_STORE_HELP,
        ),
        click.Option(
            ["--debug"],
            is_flag=True,
            callback=_remember_debug,
            expose_value=False,
            help="Show the traceback of an error.",
        ),
    ]
    if reads:
        options.append(
            click.Option(
                ["--json"],
                is_flag=True,
                callback=_remember_json,
                expose_value=False,
                help="Print JSON.",
            )
        )
    return list(options)


def _remember_store(ctx: click.Context, option: click.Parameter, value: str | None) -> None:
    if value is None:
        return
    if not value.strip() or "://" in value:
        raise click.BadParameter(f"{value!r} is not a folder.", ctx, option)
    ctx.ensure_object(Call).chosen = Path(value)


def _remember_debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.ensure_object(Call).debug |= value


def _remember_json(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    ctx.ensure_object(Call).wants_json |= value
