"""One call of ``maestro``: which folder it is about, how to answer, and asking before it acts."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from maestro_hive.cli import screen
from maestro_hive.cli.endings import FAILED, complain
from maestro_hive.cli.unwritable import UnwritableError, naming_what_is_unwritable
from maestro_hive.kernel.errors import FolderError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maestro_hive.maestro.state.sqlite.store import SqliteStore
    from maestro_hive.maestro.state.store import Store


class Call:
    """What was typed around the verb, and what follows from it."""

    def __init__(self) -> None:
        self.chosen: Path | None = None
        self.wants_json = False
        self.debug = False

    # --- where ---

    @functools.cached_property
    def folder(self) -> Path:
        """The state folder; which one it is, and why, is said when it is first asked for."""
        folder, why = choose_folder(self.chosen)
        screen.note(f"store: {folder} ({why})")
        return folder

    @property
    def checkpoint_folders(self) -> list[Path]:
        """Every folder from which a run of this state folder would be resumed."""
        return checkpoint_folders(self.folder)

    @contextlib.contextmanager
    def opened(self) -> Iterator[SqliteStore]:
        """Open the state folder, which must be one already: looking must not create one."""
        from maestro_hive.maestro.state.stores import (  # noqa: PLC0415 - loads the database
            borrow_store,
            return_store,
        )

        require_journal(self.folder)
        speak_up()
        with naming_what_is_unwritable(self.folder):
            store = borrow_store(self.folder)
            try:
                yield store
            finally:
                return_store(store)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Store]:
        """Open the state folder to read only: also where nothing can be written, and say so."""
        with contextlib.ExitStack() as open_until_read:
            try:
                store: Store = open_until_read.enter_context(self.opened())
            except UnwritableError as error:
                store = open_until_read.enter_context(self._looked_at(error))
            yield store

    @contextlib.contextmanager
    def _looked_at(self, why: UnwritableError) -> Iterator[Store]:
        from maestro_hive.cli.look import Look  # noqa: PLC0415 - loads the database

        with Look(self.folder) as look:
            screen.note(f"{why}; it is only looked at")
            if look.partial:
                screen.note(look.partial)
            yield cast("Store", look)  # the half of one that reads

    # --- answering ---

    def answer(self, **members: Any) -> None:
        """Print the answer of ``--json``: an object with these members, and the store's place."""
        screen.as_json({"store": str(self.folder), **members})

    def agreed(self, question: str, *, yes: bool) -> None:
        """Go on if ``--yes`` was typed or a person says so; else end, and nothing has happened."""
        if yes:
            return
        if not sys.stdin.isatty():
            raise click.UsageError(
                f"{question} There is nobody to ask: stdin is no terminal. Say it with --yes.",
                ctx=click.get_current_context(silent=True),
            )
        try:
            agreed = click.confirm(question, err=True)
        except click.Abort as stopped:
            if isinstance(stopped.__context__, KeyboardInterrupt):
                raise
            agreed = False  # the end of the input is no consent
            click.echo(err=True)
        if not agreed:
            complain("nothing was changed")
            raise click.exceptions.Exit(FAILED)


def choose_folder(given: Path | None) -> tuple[Path, str]:
    """Return the state folder that is meant, and why this one."""
    if given is not None:
        return given.expanduser(), "from --store"
    named = os.environ.get("MAESTRO_STATE_DIR")
    if named:
        return Path(named).expanduser(), "from MAESTRO_STATE_DIR"
    return default_folder(), "the default"


def default_folder() -> Path:
    """Return the folder that is used when none is chosen: the default, or its stand-in."""
    from maestro_hive.engine.config import (  # noqa: PLC0415 - loads every setting
        DEFAULT_STATE_DIR,
        FALLBACK_STATE_DIR,
    )

    default, stand_in = Path(DEFAULT_STATE_DIR), Path(FALLBACK_STATE_DIR).expanduser()
    in_use = not (default / "journal.db").exists() and (stand_in / "journal.db").exists()
    return stand_in if in_use else default


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return every folder with checkpoints of runs in this state folder, as far as we can know."""
    from maestro_hive.engine.config import (  # noqa: PLC0415 - loads every setting
        DEFAULT_CHECKPOINT_DIR,
        DEFAULT_STATE_DIR,
        FALLBACK_CHECKPOINT_DIR,
        FALLBACK_STATE_DIR,
    )

    found = [folder / "checkpoints"]
    if named := os.environ.get("MAESTRO_CHECKPOINT_DIR"):
        found.append(Path(named).expanduser().absolute())
    elif folder == Path(DEFAULT_STATE_DIR):
        found.append(Path(DEFAULT_CHECKPOINT_DIR))
    elif folder == Path(FALLBACK_STATE_DIR).expanduser():
        found.append(Path(FALLBACK_CHECKPOINT_DIR).expanduser())
    return [each for each in dict.fromkeys(found) if each.is_dir()]


def require_journal(folder: Path) -> None:
    """Raise unless this is a state folder."""
    if not os.path.lexists(folder / "journal.db"):
        raise FolderError(folder, "is not a state folder: it has no journal.db; see --store")


def require_folder(folder: Path) -> None:
    """Raise unless this can be a state folder whose journal is gone."""
    if not folder.is_dir():
        raise FolderError(
            folder, "is not a state folder: it is not there, or no folder; see --store"
        )


def speak_up() -> None:
    """Let warnings and log lines of ours reach stderr as sentences."""
    warnings.showwarning = lambda message, *_, **__: complain(str(message))
    ours = logging.getLogger("maestro_hive")
    if not ours.handlers:
        ours.addHandler(_Complaints(logging.WARNING))
        ours.propagate = False


class _Complaints(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        complain(record.getMessage())
