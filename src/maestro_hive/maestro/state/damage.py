"""What a journal lost: the damaged log is kept in the folder ``damaged``, with a note beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maestro_hive.kernel import files
from maestro_hive.kernel.errors import DocumentCorruptError
from maestro_hive.maestro.state import documents
from maestro_hive.maestro.state.records import Damage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime
    from pathlib import Path

_KIND = "damage"
_FOLDER = "damaged"


class DamagedJournalWarning(UserWarning):
    """Part of a journal could not be read when it was opened; see ``Store.damage``."""


def keep_damaged_log(folder: Path, journal: Path, reason: str, now: datetime) -> Damage:
    """Copy the log of ``journal`` aside and note what is wrong with it."""
    log = journal.with_name(f"{journal.name}-wal")
    kept = files.make_folder_inside(folder, _FOLDER) / f"{log.name}.{now:%Y%m%dT%H%M%S%f}"
    files.write_atomically(kept, log.read_bytes())
    note = {"file": str(journal), "reason": reason, "found_at": now.isoformat()}
    files.write_atomically(kept.with_name(f"{kept.name}.json"), documents.seal(_KIND, note))
    return Damage(file=str(journal), found_at=now, reason=reason, kept_as=str(kept))


def recorded_damage(folder: Path) -> Iterator[str]:
    """Tell, in words, what was found damaged on earlier openings and is still kept aside."""
    for path in sorted((folder / _FOLDER).glob("*.json")):
        try:
            note = documents.unseal(files.read_whole(path), _KIND, str(path))
            yield f"{note['file']}: {note['reason']} (found {note['found_at']}, kept as {path.stem})"
        except DocumentCorruptError as error:
            yield str(error)
