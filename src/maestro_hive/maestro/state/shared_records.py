"""Documents with a type: breakers and budgets, each in a namespace of its own.

There is one copy of each: what ``StateManager`` shows in the namespace ``circuit_breakers`` is the
document that the breaker itself reads and writes.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Generic, TypeVar

from maestro_hive.kernel.errors import DocumentCorruptError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.records import Breaker, Budget

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.maestro.state.store import Reader, Store

RecordT = TypeVar("RecordT", bound=Breaker | Budget)

BREAKERS = "circuit_breakers"
BUDGETS = "budgets"


class SharedReader(Generic[RecordT]):
    """All records of one type in a store, by name, to be read."""

    def __init__(self, reader: Reader, namespace: str, kind: type[RecordT]) -> None:
        self._reader = reader
        self._namespace = namespace
        self._kind = kind

    def get(self, name: str) -> RecordT | None:
        """Return the record of that name."""
        document = self._reader.document(self._namespace, name)
        return self._read(document.value, name) if document else None

    def all(self) -> dict[str, RecordT]:
        """Return every record, by name."""
        found = self._reader.documents(self._namespace)
        return {document.key: self._read(document.value, document.key) for document in found}

    def _read(self, value: bytes, name: str) -> RecordT:
        where = f"{self._namespace}/{name}"
        fields = codec.decode(value, where)
        try:
            return self._kind(**fields)
        except TypeError as error:
            raise DocumentCorruptError(where, str(error)) from error


class SharedRecords(SharedReader[RecordT]):
    """All records of one type in a store, by name."""

    def __init__(self, store: Store, namespace: str, kind: type[RecordT]) -> None:
        super().__init__(store, namespace, kind)
        self._store = store

    def update(self, name: str, change: Callable[[RecordT | None], RecordT]) -> RecordT:
        """Replace a record by the result of ``change``, atomically over all processes."""
        made: list[RecordT] = []

        def encoded(before: bytes | None) -> codec.Encoded:
            after = change(self._read(before, name) if before is not None else None)
            made[:] = [after]
            return codec.encode(dataclasses.asdict(after), f"{self._namespace}/{name}")

        self._store.update_document(self._namespace, name, encoded)
        return made[0]


def read_breakers(reader: Reader) -> SharedReader[Breaker]:
    """Return the circuit breakers, to be read."""
    return SharedReader(reader, BREAKERS, Breaker)


def breakers(store: Store) -> SharedRecords[Breaker]:
    """Return the circuit breakers that all users of this store share."""
    return SharedRecords(store, BREAKERS, Breaker)


def budgets(store: Store) -> SharedRecords[Budget]:
    """Return the budgets."""
    return SharedRecords(store, BUDGETS, Budget)
