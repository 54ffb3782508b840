"""The folders of state and of checkpoints: those that were set, or the default ones.

Only a default folder has a fallback, at home. In place of a folder that was set, nothing would be
found, and every step would be executed and paid for again.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from maestro_hive.engine.config import DefaultFolder, shared
from maestro_hive.kernel.errors import FolderError
from maestro_hive.kernel.files import make_private_folder
from maestro_hive.kernel.logs import get_log

if TYPE_CHECKING:
    from maestro_hive.engine.config import StateConfig

log = get_log(__name__)


class Fallback(NamedTuple):
    """A default folder that cannot be used, the reason, and the folder in its place."""

    wanted: Path
    used: Path
    reason: str


class StateFolders(NamedTuple):
    """The two folders; not ``persistent``: neither was created."""

    state: Path
    checkpoints: Path
    fallbacks: tuple[Fallback, ...] = ()
    persistent: bool = True


def resolve_folders(config: StateConfig) -> StateFolders:
    """Create both folders and return them; FolderError if one that was set cannot be used.

    Where only ``state_dir`` was set, checkpoints are in its subfolder: two state folders must not
    share them, or a run that is new in one would be resumed from those of the other.
    """
    if not config.enable_persistence:
        paths = Path(config.state_dir).absolute(), Path(config.checkpoint_dir).absolute()
        return StateFolders(*paths, (), False)
    state, first = _resolve(config.state_dir, "state", "MAESTRO_STATE_DIR")
    path = config.checkpoint_dir
    if isinstance(path, DefaultFolder) and not isinstance(config.state_dir, DefaultFolder):
        path = str(state / "checkpoints")
    checkpoints, second = _resolve(path, "checkpoints", "MAESTRO_CHECKPOINT_DIR")
    return StateFolders(state, checkpoints, tuple(each for each in (first, second) if each))


def _resolve(path: str, name: str, variable: str) -> tuple[Path, Fallback | None]:
    wanted = Path(path).absolute()
    home = Path(os.path.expanduser("~")) / ".maestro" / name  # noqa: PTH111 - without a home, too
    known: Fallback | None = shared.setdefault((wanted, home), None)
    try:
        return _writable(known.used if known else wanted), known
    except FolderError as error:
        if known or not isinstance(path, DefaultFolder) or not home.is_absolute():
            raise FolderError(
                wanted,
                f"state cannot be stored there ({error}); make it writable, or set another one, in"
                f" the configuration or by {variable}",
            ) from error
        found = Fallback(wanted, _writable(home), str(error))
    shared[wanted, home] = found  # for the whole process: its parts never use two folders
    log.warning(
        "%s: it is used in place of %s; set %s to use another one", home, found.reason, variable
    )
    return home, found


def _writable(path: Path) -> Path:
    make_private_folder(path)
    effective = os.access in os.supports_effective_ids
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK, effective_ids=effective):
        raise FolderError(path, "cannot be written")
    return path
