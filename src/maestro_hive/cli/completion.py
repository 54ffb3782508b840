"""``maestro completion``, and completing the names of runs, breakers and checkpoints."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

from maestro_hive.cli.command import Call, verb
from maestro_hive.kernel.errors import MaestroError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from maestro_hive.maestro.state.store import Reader

#: More would not fit on a screen.
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
