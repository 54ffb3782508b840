"""The ``documents`` table: values under a namespace and a key, each with a SHA-256."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from maestro_hive.kernel.errors import CorruptionError
from maestro_hive.maestro.state.records import Document, from_micros, to_micros

if TYPE_CHECKING:
    from collections.abc import Mapping

    import apsw

    from maestro_hive.kernel.clock import Clock
    from maestro_hive.maestro.state.codec import Encoded
    from maestro_hive.maestro.state.sqlite.connection import JournalFile
    from maestro_hive.maestro.state.store import Change

_COLUMNS = "namespace, key, version, value, sha256, updated_at"
_FIND = f"SELECT {_COLUMNS} FROM documents WHERE namespace = ? AND key = ?"  # noqa: S608
_LIST = (
    f"SELECT {_COLUMNS} FROM documents WHERE ?1 IS NULL OR namespace = ?1"  # noqa: S608
    " ORDER BY namespace, key"
)


class Documents:
    """The documents of one journal file."""

    def __init__(self, file: JournalFile, clock: Clock) -> None:
        self._file = file
        self._clock = clock

    def get(self, namespace: str, key: str) -> Document | None:
        """Return a document, checked."""
        rows = self._file.rows(_FIND, (namespace, key))
        return self._read(rows[0]) if rows else None

    def all(self, namespace: str | None) -> list[Document]:
        """Return documents by namespace and key, checked."""
        return [self._read(row) for row in self._file.rows(_LIST, (namespace,))]

    def update(
        self, namespace: str, key: str, change: Change
    ) -> tuple[Document | None, Document | None]:
        """Replace a document by what ``change`` makes of it; return it before and after."""

        def body(db: apsw.Connection) -> tuple[Document | None, Document | None]:
            before = self._find(db, namespace, key)
            value = change(before.value if before else None)
            return before, self._put(db, namespace, key, before, value)

        changed, ticket = self._file.write(body)
        self._file.sync(ticket)
        return changed

    def set_many(
        self, values: Mapping[tuple[str, str], Encoded | None]
    ) -> dict[tuple[str, str], tuple[Document | None, Document | None]]:
        """Set documents in one transaction; return each before and after."""

        def body(
            db: apsw.Connection,
        ) -> dict[tuple[str, str], tuple[Document | None, Document | None]]:
            changed = {}
            for (namespace, key), value in values.items():
                before = self._find(db, namespace, key)
                after = self._put(db, namespace, key, before, value)
                changed[namespace, key] = (before, after)
            return changed

        changed, ticket = self._file.write(body)
        self._file.sync(ticket)
        return changed

    def _find(self, db: apsw.Connection, namespace: str, key: str) -> Document | None:
        row = db.execute(_FIND, (namespace, key)).fetchone()
        return self._read(row) if row else None

    def _put(
        self,
        db: apsw.Connection,
        namespace: str,
        key: str,
        before: Document | None,
        value: Encoded | None,
    ) -> Document | None:
        if value is None:
            db.execute("DELETE FROM documents WHERE namespace = ? AND key = ?", (namespace, key))
            return None
        after = Document(
            namespace=namespace,
            key=key,
            version=before.version + 1 if before else 1,
            value=value.data,
            sha256=value.sha256,
            updated_at=self._clock.now(),
        )
        db.execute(
            "INSERT INTO documents (namespace, key, version, value, sha256, updated_at)"
            " VALUES (?1, ?2, ?3, ?4, ?5, ?6) ON CONFLICT (namespace, key) DO UPDATE SET"
            " version = ?3, value = ?4, sha256 = ?5, updated_at = ?6",
            (namespace, key, after.version, *value, to_micros(after.updated_at)),
        )
        return after

    def delete(self, namespace: str | None) -> list[Document]:
        """Delete documents; return those that were there."""

        def body(db: apsw.Connection) -> list[Document]:
            gone = [self._read(row) for row in db.execute(_LIST, (namespace,))]
            db.execute("DELETE FROM documents WHERE ?1 IS NULL OR namespace = ?1", (namespace,))
            return gone

        gone, ticket = self._file.write(body)
        self._file.sync(ticket)
        return gone

    def _read(self, row: tuple[Any, ...]) -> Document:
        namespace, key, version, value, sha256, updated_at = row
        if hashlib.sha256(value).digest() != sha256:
            where = f"{self._file.path}: document {namespace}/{key}"
            raise CorruptionError(f"{where} does not match its SHA-256; restore a backup")
        return Document(
            namespace=namespace,
            key=key,
            version=version,
            value=value,
            sha256=sha256,
            updated_at=from_micros(updated_at),
        )
