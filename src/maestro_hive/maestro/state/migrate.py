"""The schema's versions: ``sql/NNNN_name.sql``, each applied in one transaction.

The number of the last one applied is SQLite's ``user_version`` and changes in the same
transaction, so a kill at any moment leaves a file that is wholly before or wholly after a step.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from maestro_hive.kernel.errors import CorruptionError, NewerFormatError

if TYPE_CHECKING:
    import apsw

#: Marks a SQLite file as ours ("MHIV").
APPLICATION_ID = 0x4D484956

_FOLDER = Path(__file__).parent / "sql"


def migrations() -> list[Path]:
    """Return the migration files in order."""
    return sorted(_FOLDER.glob("[0-9][0-9][0-9][0-9]_*.sql"))


def newest_format() -> int:
    """The format this version writes."""
    return len(migrations())


def migrate(db: apsw.Connection, name: str) -> None:
    """Bring an opened journal to the newest format."""
    found = check_format(db, name)
    for number, step in enumerate(migrations()[found:], start=found + 1):
        script = step.read_text(encoding="utf-8")
        with db:
            db.execute(script)
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            db.execute(f"PRAGMA user_version = {number}")


def check_format(db: apsw.Connection, name: str) -> int:
    """Return a journal's format, 0 for a new file; refuse one that is newer or not ours."""
    found = int(db.pragma("user_version"))
    ours = int(db.pragma("application_id")) == APPLICATION_ID
    empty = db.execute("SELECT count(*) FROM sqlite_schema").get == 0
    if not ours and not (empty and found == 0):
        raise CorruptionError(
            f"{name} is a SQLite database, but not a journal of maestro-hive;"
            " choose another state folder"
        )
    if found > newest_format():
        raise NewerFormatError(name, found, newest_format())
    return found
