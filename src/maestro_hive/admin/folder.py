"""A state folder: which one, opening it, the files in it, and who may read them."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import time
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from maestro_hive.kernel import files
from maestro_hive.kernel.errors import FolderError, StorageError, StoreFailedError
from maestro_hive.kernel.files import is_locked
from maestro_hive.maestro.state.stores import (
    DEFAULT_CHECKPOINT_DIR,
    DEFAULT_STATE_DIR,
    FALLBACK_CHECKPOINT_DIR,
    FALLBACK_STATE_DIR,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from maestro_hive.maestro.state.store import Reader, Store

# --- which folder ---------------------------------------------------------------------------------


def choose_folder(given: Path | None) -> tuple[Path, str]:
    """Return the state folder that is meant, and the reason."""
    if given is not None:
        return given.expanduser(), "from --store"
    if named := os.environ.get("MAESTRO_STATE_DIR"):
        return Path(named).expanduser(), "from MAESTRO_STATE_DIR"
    default, fallback = Path(DEFAULT_STATE_DIR), Path(FALLBACK_STATE_DIR).expanduser()
    if (default / "journal.db").exists():
        return default, "the default"
    in_use = (fallback / "journal.db").exists() or not _can_be_used(default)
    return fallback if in_use else default, "the default"


def _can_be_used(folder: Path) -> bool:
    """Return whether something can be written in a folder, which may have to be made."""
    nearest = _nearest(folder)
    return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)


def _nearest(folder: Path) -> Path:
    """Return the folder, or the nearest above it that exists."""
    return next(each for each in (folder, *folder.parents) if os.path.lexists(each))


def default_replaced(folder: Path) -> str | None:
    """Return a sentence if programs use this folder because the default one could not be used."""
    fallback = Path(FALLBACK_STATE_DIR).expanduser().resolve()
    if os.environ.get("MAESTRO_STATE_DIR") or folder.resolve() != fallback:
        return None
    default = Path(DEFAULT_STATE_DIR)
    if _can_be_used(default):
        return (
            f"it was used in place of the default folder {default}, which can be used by now:"
            f" programs will not find their state here unless MAESTRO_STATE_DIR is set to {folder}"
        )
    return (
        f"it is used in place of the default folder {default}, because {_nearest(default)} cannot be"
        " written; set MAESTRO_STATE_DIR to use another"
    )


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return every folder with checkpoints of runs in this state folder, as far as is known."""
    found = [folder / "checkpoints"]
    if named := os.environ.get("MAESTRO_CHECKPOINT_DIR"):
        found.append(Path(named).expanduser().absolute())
    elif folder == Path(DEFAULT_STATE_DIR):
        found.append(Path(DEFAULT_CHECKPOINT_DIR))
    elif folder == Path(FALLBACK_STATE_DIR).expanduser():
        found.append(Path(FALLBACK_CHECKPOINT_DIR).expanduser())
    return [each for each in dict.fromkeys(found) if each.is_dir()]


def separate_checkpoint_folders(folder: Path) -> list[Path]:
    """Return the checkpoint folders that are not inside the state folder."""
    return [each for each in checkpoint_folders(folder) if each.parent != folder]


#: How many of the runs that a message is about are named in it.
_NAMED = 5


def require_journal(folder: Path) -> None:
    """Raise unless this is a state folder."""
    require_folder(folder)
    if os.path.lexists(folder / "journal.db"):
        return
    copied = sorted(path.parent.name for path in folder.glob("runs/*/execution_state.json"))
    if not copied:
        raise FolderError(folder, "is not a state folder: it has no journal.db; see --store")
    names = ", ".join(copied[:_NAMED]) + (", …" if len(copied) > _NAMED else "")
    raise FolderError(
        folder,
        f"has no journal.db, but JSON copies of {len(copied)} run(s): {names}; start their programs"
        " with the same run ids, or call hive.resume(run_id), and each continues from its copy",
    )


def require_folder(folder: Path) -> None:
    """Raise unless this can be a state folder whose journal is gone."""
    if not folder.is_dir():
        what = "it is not a folder" if os.path.lexists(folder) else "it does not exist"
        raise FolderError(folder, f"is not a state folder: {what}; see --store")


# --- opening --------------------------------------------------------------------------------------


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[Reader]:
    """Open a state folder for reading; nothing in it is created or changed."""
    from maestro_hive.maestro.state.stores import open_reader

    require_journal(folder)
    reader = open_reader(folder)
    try:
        yield reader
    finally:
        reader.close()


def is_vacant(folder: Path) -> bool:
    """Return whether a state folder may be made here: there is nothing, or an empty folder."""
    return not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir()))


@contextlib.contextmanager
def writing(folder: Path, *, create: bool = False) -> Iterator[Store]:
    """Open a state folder for writing; it must exist, unless it may be created."""
    from maestro_hive.maestro.state.stores import (
        close_store,
        open_store,
    )

    if not create:
        require_journal(folder)
    try:
        store = open_store(folder)
        try:
            yield store
        finally:
            close_store(store)
    except (FolderError, StoreFailedError) as error:
        reason = write_error(folder)
        if reason is None:
            raise
        raise FolderError(folder, f"cannot be written: {reason}") from error


#: What opening a journal takes: the index of its log, and some pages of it.
_ROOM_TO_OPEN = 64 * 1024
_WRITE_ERRORS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
}


def write_error(folder: Path) -> str | None:
    """Return why nothing can be written in a folder; None if something can."""
    number = _write_errno(folder)
    if not number:
        return None
    reason = _WRITE_ERRORS.get(number) or os.strerror(number)
    return f"{reason} ({errno.errorcode.get(number, str(number))})"


def _write_errno(folder: Path) -> int:
    import tempfile

    try:
        with tempfile.TemporaryFile(dir=folder) as probe:  # it has no name that could stay behind
            probe.write(bytes(_ROOM_TO_OPEN))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return error.errno or errno.EIO
    journal = folder.glob("journal.*")
    return 0 if all(os.access(path, os.W_OK) for path in journal) else errno.EACCES


def size_of(path: Path) -> int:
    """Return the size of a file; 0 if it was deleted just now."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


# --- documents ------------------------------------------------------------------------------------

#: The documents in a state folder, and their kinds.
_DOCUMENTS = {
    "runs/*/execution_state.json": "execution_state",
    "checkpoints/*.json": "state_manager_checkpoint",
    "checkpoints/*/*.json": "checkpoint",
}


def documents(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the JSON documents of a state folder, with their kinds."""
    for pattern, kind in _DOCUMENTS.items():
        for path in sorted(folder.glob(pattern)):
            yield path, kind


def damaged_documents(folder: Path) -> Iterator[Path]:
    """Yield the documents that were found damaged and renamed."""
    for pattern in _DOCUMENTS:
        yield from sorted(folder.glob(f"{pattern}.damaged-*"))


def remove_copies(run: str, state_folder: Path, checkpoints: Iterable[Path]) -> int:
    """Delete every JSON copy of a run, valid or damaged; return how many files."""
    files.check_identifier(run, "run id")
    places = [state_folder / "runs" / run, *(each / run for each in checkpoints)]
    return sum(_remove_folder(place) for place in places)


def _remove_folder(folder: Path) -> int:
    if files.is_link(folder):
        raise FolderError(folder, "is a symbolic link; its target is not deleted")
    if not folder.is_dir():
        return 0
    with files.explained(lambda reason: StorageError(f"{folder} could not be removed: {reason}")):
        count = sum(1 for path in folder.rglob("*") if not path.is_dir())
        shutil.rmtree(folder)
        files.sync_folder(folder.parent)
    return count


# --- leftovers ------------------------------------------------------------------------------------

#: As ``files.write_atomically`` names a file that is not complete.
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
#: Writing one file does not take as long; younger ones may still be in use.
_IN_USE_SECONDS = 600.0


def leftovers(state_folder: Path) -> list[Path]:
    """Return the files that killed processes left: half-written ones, and their holder files."""
    found = [path for path in state_folder.glob("holders/*.json") if not is_locked(path)]
    for folder in (state_folder, *separate_checkpoint_folders(state_folder)):
        for pattern in (".*.tmp", "*/.*.tmp", "*/*/.*.tmp"):
            found += [path for path in folder.glob(pattern) if _TEMPORARY.fullmatch(path.name)]
    return sorted({path for path in found if _is_old(path)})


def _is_old(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return time.time() - path.lstat().st_mtime > _IN_USE_SECONDS
    return False


# --- permissions ----------------------------------------------------------------------------------

#: The files in a separate checkpoint folder.
_CHECKPOINT_FILES = ("*/*~*.json", "*/*~*.json.damaged-*", "*/.*.tmp")
#: The files in a state folder that this program made; no other program would name them so.
_STATE_FILES = (
    *("journal.db", "journal.db-*", "journal.lock", "journal.users", "journal.turnstile"),
    *("journal.readers", "journal.marks", "audit.jsonl", ".*.tmp"),
    *("holders", "holders/*.json", "damaged", "damaged/journal.db-wal.*", "damaged/.*.tmp"),
    *("runs/*/execution_state.json", "runs/*/execution_state.json.damaged-*", "runs/*/.*.tmp"),
    *("runs/*/processes", "runs/*/processes/*", "runs/*/progress"),
    *("checkpoints/*.json", "checkpoints/*.json.damaged-*", "checkpoints/.*.tmp"),
    *(f"checkpoints/{pattern}" for pattern in _CHECKPOINT_FILES),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposed:
    """A file or folder that other users may use, or that the folder's owner cannot.

    Without a ``mode`` or an ``owner`` to set, a person has to decide.
    """

    path: Path
    problem: str
    mode: int | None = None
    owner: int | None = None

    @property
    def can_be_repaired(self) -> bool:
        """Whether it is known how."""
        return self.mode is not None or self.owner is not None

    def repair(self) -> None:
        """Give it the permissions that it should have."""
        if self.owner is not None:
            os.chown(self.path, self.owner, -1, follow_symlinks=False)
        if self.mode is not None:
            self.path.chmod(self.mode)


def exposed_files(state_folder: Path) -> list[Exposed]:
    """Return all files of this program that are not private, each folder before its content.

    A state folder may be a project's own folder, with files in it that other users shall read and
    execute: those are not examined.
    """
    root = state_folder.resolve()
    found = list(_exposed_in(root, _matching(root, _STATE_FILES)))
    for each in separate_checkpoint_folders(state_folder):
        root = each.resolve()
        found += _exposed_in(root, _matching(root, _CHECKPOINT_FILES))
    return found


def _exposed_in(root: Path, own_files: Iterable[Path]) -> Iterator[Exposed]:
    owner = root.stat().st_uid
    for path in (root, *own_files):
        with contextlib.suppress(FileNotFoundError):  # deleted just now
            found = path.lstat()
            if stat.S_ISLNK(found.st_mode):
                problem = "is a symbolic link, and no file is read through one"
                yield Exposed(path=path, problem=problem)
                continue
            if found.st_uid != owner:
                problem = f"belongs to user {found.st_uid}, and its folder to user {owner}"
                yield Exposed(path=path, problem=problem, owner=owner)
            if found.st_mode & 0o077:
                yield _open_to_others(path, stat.S_IMODE(found.st_mode))


def _open_to_others(path: Path, mode: int) -> Exposed:
    if mode & stat.S_ISVTX:  # as /tmp: made private, it would be of no use to the others
        problem = f"is shared with other users (mode {mode:04o}); choose another folder"
        return Exposed(path=path, problem=problem)
    problem = f"is open to other users (mode {mode:04o})"
    return Exposed(path=path, problem=problem, mode=mode & ~0o077)


def _matching(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """Return the files of these names and the folders above them; links are not followed."""
    found = {path for pattern in patterns for path in _matching_one(folder, pattern)}
    return sorted(
        path for path in found if path.suffix != ".tmp" or _TEMPORARY.fullmatch(path.name)
    )


def _matching_one(folder: Path, pattern: str) -> Iterator[Path]:
    name, _, rest = pattern.partition("/")
    inside: list[Path] = []
    with contextlib.suppress(OSError):  # deleted just now, or not readable
        inside = list(folder.iterdir())
    for path in inside:
        if not fnmatchcase(path.name, name):
            continue
        if not rest or path.is_symlink():
            yield path
        elif path.is_dir():
            found = list(_matching_one(path, rest))
            if found or not os.access(path, os.R_OK | os.X_OK):
                yield path
            yield from found
