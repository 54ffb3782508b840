"""The JSON copies of a hive's runs: where they are, and runs that the journal has lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maestro_hive.engine.config import DefaultFolder
from maestro_hive.engine.state_folders import resolve_folders
from maestro_hive.journal import transfer
from maestro_hive.journal.copies import Copies, CopyFolder
from maestro_hive.journal.store import Store, is_address, open_store
from maestro_hive.kernel.errors import UnknownRunError

if TYPE_CHECKING:
    from pathlib import Path

    from maestro_hive.engine.config import StateConfig

MEMORY = ":memory:"


def open_place(place: str | Path | None, config: StateConfig) -> tuple[Store, Copies | None]:
    """Open a store, by default the folder of the settings, and the writer of copies of its runs.

    There is none in memory, nor for the address of a database if no state folder was set.
    """
    address = place if place is not None and is_address(place) else None
    if address == MEMORY or (address and isinstance(config.state_dir, DefaultFolder)):
        return open_store(address), None
    folders = resolve_folders(config)
    store = open_store(address or folders.state)
    most = config.max_checkpoints_per_workflow
    folder = CopyFolder(folders.state, folders.checkpoints, most)
    return store, Copies(store, folder, interval=config.auto_checkpoint_interval_seconds)


def restore_lost(store: Store, copies: Copies | None, run_id: str) -> None:
    """Add a run to a journal that has lost it, from its newest sound copy."""
    if copies is None or not copies.folder.has_copies(run_id):
        return
    try:
        store.find(run_id)
    except UnknownRunError:
        if (found := copies.folder.newest(run_id)) is not None:
            transfer.add_run(store, found.copy, found.source)
