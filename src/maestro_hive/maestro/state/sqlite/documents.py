"""The ``documents`` table: values under a namespace and a key, each with a SHA-256."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from maestro_hive.kernel.clock import from_micros, to_micros
from maestro_hive.kernel.errors import CorruptionError
from maestro_hive.maestro.state.records import Document

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import apsw

    from maestro_hive.kernel.clock import Clock
    from maestro_hive.maestro.state.sqlite.connection import Row
    from maestro_hive.maestro.state.sqlite.entries import Queries
    from maestro_hive.maestro.state.sqlite.journal_file import JournalFile
    from maestro_hive.maestro.state.store import Change

    #: A namespace and a key.
    Where = tuple[str, str]
    Changed = tuple[Document | None, Document | None]

_COLUMNS = "namespace, key, version, value, sha256, updated_at"
_FIND = f"SELECT {_COLUMNS} FROM documents WHERE namespace = ? AND key = ?"
_LIST = (
    f"SELECT {_COLUMNS} FROM documents WHERE ?1 IS NULL OR namespace = ?1 ORDER BY namespace, key"
)
_PUT = (
    "INSERT INTO documents (namespace, key, version, value, sha256, updated_at)"
    " VALUES (?1, ?2, ?3, ?4, ?5, ?6) ON CONFLICT (namespace, key) DO UPDATE SET"
    " version = ?3, value = ?4, sha256 = ?5, updated_at = ?6"
)


class DocumentReader:
    """The documents of one journal file, checked against their digests."""

    def __init__(self, file: Queries) -> None:
        self._queries = file

    def document(self, namespace: str, key: str) -> Document | None:
        """Return a document."""
        rows = self._queries.rows(_FIND, (namespace, key))
        return self._read(rows[0]) if rows else None

    def documents(self, namespace: str | None = None) -> list[Document]:
        """Return documents by namespace and key."""
        return [self._read(row) for row in self._queries.rows(_LIST, (namespace,))]

    def _read(self, row: Row) -> Document:
        namespace, key, version, value, sha256, updated_at = row
        if hashlib.sha256(value).digest() != sha256:
            where = f"{self._queries.path}: document {namespace}/{key}"
            raise CorruptionError(f"{where} does not match its SHA-256; restore a backup")
        return Document(
            namespace=namespace,
            key=key,
            version=version,
            value=value,
            sha256=sha256,
            updated_at=from_micros(updated_at),
        )


class DocumentWriter(DocumentReader):
    """Changes the documents of one journal file, each time in one synced transaction."""

    def __init__(self, file: JournalFile, clock: Clock) -> None:
        super().__init__(file)
        self._file = file
        self._clock = clock

    def change(
        self,
        changes: Mapping[Where, Change],
        then: Callable[[apsw.Connection], object] | None = None,
    ) -> dict[Where, Changed]:
        """Change documents in one transaction; return each before and after.

        ``then`` is called in that transaction, too.
        """

        def body(db: apsw.Connection) -> dict[Where, Changed]:
            changed = {
                where: self.change_in(db, where, change) for where, change in changes.items()
            }
            if then is not None:
                then(db)
            return changed

        return self._file.write_and_sync(body)

    def delete(self, namespace: str | None) -> dict[Where, Changed]:
        """Delete documents; return those that existed."""

        def body(db: apsw.Connection) -> dict[Where, Changed]:
            found = [self._read(row) for row in db.execute(_LIST, (namespace,))]
            gone: dict[Where, Changed]
            gone = {(document.namespace, document.key): (document, None) for document in found}
            db.execute("DELETE FROM documents WHERE ?1 IS NULL OR namespace = ?1", (namespace,))
            return gone

        return self._file.write_and_sync(body)

    def change_in(self, db: apsw.Connection, where: Where, change: Change) -> Changed:
        """Change a document inside the caller's transaction; return it before and after."""
        row = db.execute(_FIND, where).fetchone()
        before = self._read(row) if row else None
        value = change(before.value if before else None)
        if value is None:
            if before is not None:
                db.execute("DELETE FROM documents WHERE namespace = ? AND key = ?", where)
            return before, None
        namespace, key = where
        after = Document(
            namespace=namespace,
            key=key,
            version=before.version + 1 if before else 1,
            value=value.data,
            sha256=value.sha256,
            updated_at=self._clock.now(),
        )
        db.execute(_PUT, (*where, after.version, *value, to_micros(after.updated_at)))
        return before, after
