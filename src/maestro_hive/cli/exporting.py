"""``maestro export``: a run as one file."""

from __future__ import annotations

import contextlib
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from maestro_hive.cli import screen, words
from maestro_hive.cli.completion import run_ids
from maestro_hive.cli.frame import verb
from maestro_hive.cli.standing import find_run
from maestro_hive.kernel.errors import AtomicWriteError

if TYPE_CHECKING:
    from maestro_hive.cli.call import Call


@verb(
    "export",
    examples="""
    maestro export checkout-42 checkout-42.json
    maestro export checkout-42 checkout-42.json --force    over a file that is there
    maestro export checkout-42 - | ssh other maestro import -
    """,
)
@click.argument("run_id", metavar="RUN", shell_complete=run_ids)
@click.argument("target", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Write over FILE if it is there.")
def command(call: Call, run_id: str, target: Path, *, force: bool) -> None:
    """Write a run to one file, to be imported elsewhere.

    All that its journal knows is in it, with a SHA-256 over the whole: kept steps, attempts,
    memory, history, waits. The run may be executed meanwhile: the file has it as of one moment.
    Inputs and results stand in it in plain text; only you may read it. FILE may be - for stdout.
    Runs that it started as children are runs of their own, and exported by themselves.
    """
    from maestro_hive.cli import run_file  # noqa: PLC0415 - not for --help

    to_stdout = str(target) == "-"
    if not to_stdout:
        _refuse(target, force=force)
    with call.reading() as store:
        written = run_file.write(store, find_run(store, run_id))
    what = f"{words.many(written.steps, 'step')}, {words.size(len(written.text))}"
    if to_stdout:
        sys.stdout.buffer.write(written.text)
        sys.stdout.buffer.flush()
        screen.note(f"run {run_id!r}: {what}")
    else:
        _put(target, written.text, force=force)
        screen.line(f"run {run_id!r} is in {target}: {what}")
    if written.children:
        screen.note(f"it has {words.many(written.children, 'child run')}: export them, too")


def _refuse(target: Path, *, force: bool) -> None:
    """Raise if something is there that must not be replaced; only files ever are."""
    try:
        mode = target.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        what = "is a symbolic link" if stat.S_ISLNK(mode) else "is not a regular file"
        raise _wrong(f"{target} {what}, and is left alone. Choose another file, or - for stdout.")
    if not force:
        raise _taken(target)


def _put(target: Path, text: bytes, *, force: bool) -> None:
    """Write the file; without ``force`` only if nobody has made one there meanwhile."""
    from maestro_hive.kernel import files  # noqa: PLC0415 - not for --help

    _refuse(target, force=force)
    if force:
        files.write_atomically(target.absolute(), text)
        return
    try:
        target.touch(mode=0o600, exist_ok=False)  # now it is ours, and nobody else's
    except FileExistsError:
        raise _taken(target) from None
    except OSError as error:
        raise AtomicWriteError(target, files.reason_of(error)) from error
    try:
        files.write_atomically(target.absolute(), text)
    except BaseException:
        with contextlib.suppress(OSError):
            if not target.lstat().st_size:
                target.unlink()
        raise


def _taken(target: Path) -> click.UsageError:
    return _wrong(f"{target} is there already. Choose another file, or say --force.")


def _wrong(sentence: str) -> click.UsageError:
    return click.UsageError(sentence, click.get_current_context())
