"""The folders that hold state: the chosen ones, or a stand-in for a default that cannot be used.

A folder is *untouched* when nobody chose it: not by an argument, an attribute or the environment.
Where it came from decides, not how it is spelled: who passes the default's own text has chosen it.
Only an untouched folder has a stand-in. In place of a chosen one nothing would be found, and
everything would be paid for twice.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path

from maestro_hive.kernel.errors import FolderError
from maestro_hive.kernel.files import make_private_folder
from maestro_hive.unified_execution.settings import refused

logger = logging.getLogger(__name__)


class Untouched(str):
    """A default folder that nobody chose; it stays so when a configuration is copied."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """A default folder that could not be used, why, and what is used instead."""

    wanted: Path
    used: Path
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFolders:
    """The two folders that are really used; if not ``persistent``, neither was made."""

    state: Path
    checkpoints: Path
    persistent: bool = True
    fallbacks: tuple[Fallback, ...] = ()


def folder(name: str, value: object) -> str:
    """Accept the path of a folder, with ``~`` for a home; a check of ``settings``."""
    if isinstance(value, Untouched):
        return value
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise refused(name, value, "the path of a folder")
    if not text.startswith("~"):
        return text
    try:
        return str(Path(text).expanduser())
    except RuntimeError:
        raise refused(name, value, "the path of a folder; that home is not known") from None


_lock = threading.RLock()
#: What was decided about untouched folders, by folder and stand-in; None if no stand-in is needed.
#: It holds for the whole process, so that its parts never work in two places.
_decided: dict[tuple[Path, str], Fallback | None] = {}
_said: set[Fallback] = set()


def make_ready(path: str, stand_in: str, variable: str) -> tuple[Path, Fallback | None]:
    """Make ``path`` usable, or its stand-in if nobody chose it; return the one that is."""
    wanted = Path(path).absolute()
    if isinstance(path, Untouched):
        with _lock:
            return _make_default_ready(wanted, stand_in, variable)
    try:
        return _make_usable(wanted), None
    except FolderError as error:
        raise FolderError(
            wanted,
            f"cannot hold state ({error}). It was chosen, so no other folder is used instead;"
            f" make it writable, or choose another in the configuration or by {variable}",
        ) from error


def _make_default_ready(wanted: Path, stand_in: str, variable: str) -> tuple[Path, Fallback | None]:
    home = os.path.expanduser(stand_in)  # noqa: PTH111 - Path's version raises without a home
    earlier = _decided.get((wanted, home))
    if earlier:
        return _make_usable(earlier.used), earlier
    try:
        _make_usable(wanted)
        fallback = None
    except FolderError as error:
        if (wanted, home) in _decided:  # state is in there already
            raise
        fallback = _fall_back(wanted, Path(home), error, variable)
    _decided[wanted, home] = fallback
    return fallback.used if fallback else wanted, fallback


def _fall_back(wanted: Path, home: Path, why: FolderError, variable: str) -> Fallback:
    way_out = f"set {variable} to a folder that can be written"
    if not home.is_absolute():
        raise FolderError(wanted, f"cannot be used ({why}), and no home is known; {way_out}")
    try:
        _make_usable(home)
    except FolderError as error:
        both = f"cannot be used ({why}), nor can its stand-in {home} ({error})"
        raise FolderError(wanted, f"{both}; {way_out}") from error
    return Fallback(wanted=wanted, used=home, reason=str(why))


def _make_usable(path: Path) -> Path:
    make_private_folder(path)
    effective = os.access in os.supports_effective_ids
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK, effective_ids=effective):
        raise FolderError(path, "cannot be written")
    return path


def say_once(fallbacks: tuple[Fallback, ...]) -> None:
    """Warn about stand-ins that were not mentioned before."""
    with _lock:
        news = [each for each in fallbacks if each not in _said]
        _said.update(news)
    if news:
        logger.warning(
            "state is kept in %s, because %s; set MAESTRO_STATE_DIR and MAESTRO_CHECKPOINT_DIR to"
            " choose other folders",
            " and ".join(str(each.used) for each in news),
            " and ".join(dict.fromkeys(each.reason for each in news)),
        )


def forget_decisions() -> None:
    """Look at the default folders anew when they are next needed."""
    with _lock:
        _decided.clear()
        _said.clear()
