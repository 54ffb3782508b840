"""``maestro completion``, and what is completed: names that lie in the state folder."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

from maestro_hive.cli.call import Call, checkpoint_folders, choose_folder
from maestro_hive.cli.frame import verb
from maestro_hive.kernel.errors import MaestroError

if TYPE_CHECKING:
    from pathlib import Path

#: More would not fit on a screen.
_MOST = 100

_RUNS = "SELECT name FROM runs WHERE substr(name, 1, length(?1)) = ?1 ORDER BY id DESC LIMIT ?2"
_BREAKERS = (
    "SELECT key FROM documents WHERE namespace = 'circuit_breakers'"
    " AND substr(key, 1, length(?1)) = ?1 ORDER BY key LIMIT ?2"
)

#: Bash takes a colon for the end of a word, and run ids may have some: what it took apart is put
#: together again for click, and what stands before the last colon is taken off what click offers.
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
def command(_: Call, shell: str) -> None:
    """Print the completion script for a shell.

    Put it where your shell looks for such scripts, and start a new shell. Verbs, options, run ids
    and names of breakers are then completed by the tab key.
    """
    from click.shell_completion import get_completion_class  # noqa: PLC0415 - needed here only

    from maestro_hive.cli.root import cli  # noqa: PLC0415 - the root loads this module

    made = get_completion_class(shell)
    assert made is not None
    script = made(cli, {}, "maestro", "_MAESTRO_COMPLETE").source()
    click.echo(f"{script}{_WITH_COLONS}" if shell == "bash" else script)


def run_ids(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Complete a run id; the newest runs, as many as one can look through."""
    return _found(ctx, _RUNS, incomplete)


def breaker_names(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name of a circuit breaker."""
    return _found(ctx, _BREAKERS, incomplete)


def checkpoint_ids(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Complete the id of a checkpoint."""
    from maestro_hive.cli.checkpoint_files import all_checkpoints  # noqa: PLC0415 - as above

    call = ctx.find_object(Call) or Call()
    folders = checkpoint_folders(choose_folder(call.chosen)[0])
    with contextlib.suppress(MaestroError, OSError):
        ids = (each.id for each in all_checkpoints(folders))
        return sorted({each for each in ids if each.startswith(incomplete)})[:_MOST]
    return []


def _found(ctx: click.Context, sql: str, incomplete: str) -> list[str]:
    call = ctx.find_object(Call)
    folder, _ = choose_folder(call.chosen if call else None)
    return _read(folder / "journal.db", sql, incomplete)


def _read(journal: Path, sql: str, incomplete: str) -> list[str]:
    """Read names as quickly as can be, and say nothing if that fails: somebody is typing."""
    import apsw  # noqa: PLC0415 - only where something is completed

    with contextlib.suppress(apsw.Error):
        db = apsw.Connection(str(journal), flags=apsw.SQLITE_OPEN_READONLY)
        try:
            return [str(row[0]) for row in db.execute(sql, (incomplete, _MOST))]
        finally:
            db.close()
    return []
