"""``maestro backup``: a state folder, copied while it is in use."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from maestro_hive.cli import screen, words
from maestro_hive.cli.frame import verb
from maestro_hive.kernel.errors import FolderError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maestro_hive.cli.call import Call


@verb(
    "backup",
    examples="""
    maestro backup /backups/monday
    maestro backup /backups/monday && maestro doctor --store /backups/monday
    """,
)
@click.argument("target", type=click.Path(path_type=Path))
def command(call: Call, target: Path) -> None:
    """Copy a state folder, in use or not, to a new folder.

    The journal is copied as of one moment, whoever writes to it, and the checkpoints beside it. The
    copy is a state folder of its own: choose it with --store, and its runs go on from there. It is
    there when it is whole: until then it grows in a folder ".NAME.half" beside it, or ".half" in
    an empty folder that was there. What a killed backup left so is deleted by the next one.
    """
    with call.opened() as store, _half(target) as half:
        store.backup(half)
        copied = 1 + sum(_copy(source, half, place) for source, place in _documents(call))
        _put_in_place(half, target)
    screen.line(f"{call.folder} was copied to {target} ({words.many(copied, 'file')})")


@contextlib.contextmanager
def _half(target: Path) -> Iterator[Path]:
    """Make the folder in which a copy grows, on the target's disk; it is gone afterwards.

    It is locked meanwhile, so what is found in one that is not locked was left by the dead.
    """
    from maestro_hive.kernel import files  # noqa: PLC0415 - not for --help

    target = target.resolve()
    half = target / ".half" if target.is_dir() else target.with_name(f".{target.name}.half")
    if os.path.lexists(target) and not target.is_dir():
        raise FolderError(target, "is not a folder")
    if target.is_dir() and any(path != half for path in target.iterdir()):
        raise StorageError(f"{target} exists and is not empty; choose a new folder")
    files.make_folder_inside(half.parent, half.name)
    lock = os.open(half, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not _is_locked_by(lock, half):
            raise StorageError(f"another process is making the backup {target} now")
        try:
            _empty(half)
            yield half
        except BaseException:  # also Ctrl+C must not leave half a copy behind
            shutil.rmtree(half, ignore_errors=True)
            raise
    finally:
        os.close(lock)


def _is_locked_by(lock: int, half: Path) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(half.stat(), os.fstat(lock))  # or it has its own name already
    except (BlockingIOError, FileNotFoundError):
        return False


def _empty(half: Path) -> None:
    try:
        for path in half.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    except OSError as error:
        raise StorageError(f"{half} could not be emptied: {error.strerror}") from error


def _put_in_place(half: Path, target: Path) -> None:
    """Give a whole copy its name, durably; the journal comes last, without which it is none."""
    from maestro_hive.kernel import files  # noqa: PLC0415 - as above

    target = target.resolve()
    try:
        if half.parent == target:
            for path in sorted(half.iterdir(), key=lambda path: path.name == "journal.db"):
                files.sync_folder(target)
                path.rename(target / path.name)
            half.rmdir()
        else:
            half.rename(target)
        files.sync_folder(half.parent)
    except OSError as error:
        raise StorageError(f"{target} could not be put in place: {error.strerror}") from error


def _documents(call: Call) -> Iterator[tuple[Path, Path]]:
    """Yield what lies beside the journal, and where it belongs in a copy."""
    from maestro_hive.cli.beside import copies  # noqa: PLC0415 - not for --help

    for path, _ in copies(call.folder):
        yield path, path.relative_to(call.folder)
    for folder in call.checkpoint_folders:
        if folder != call.folder / "checkpoints":  # chosen by itself; the copy has it inside
            for path in sorted(folder.glob("*/*.json")):
                yield path, Path("checkpoints") / path.relative_to(folder)


def _copy(source: Path, target: Path, place: Path) -> int:
    from maestro_hive.kernel import files  # noqa: PLC0415 - as above

    try:
        text = files.read_whole(source)
    except FileNotFoundError:
        return 0  # retention took it in this moment
    inside = files.make_folder_inside(target, *place.parent.parts)
    files.write_atomically(inside / place.name, text)
    return 1
