"""Documents of one type: each type in a namespace of its own, with one copy of each record.

What ``StateManager`` shows in the namespace ``circuit_breakers`` is the document that the breaker
itself reads and writes.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from maestro_hive.kernel.errors import DocumentCorruptError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.records import Breaker

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.maestro.state.codec import Json
    from maestro_hive.maestro.state.store import Reader, Store

RecordT = TypeVar("RecordT")


class _UnchangedError(Exception):
    """Raised inside a transaction that has nothing to write."""


@dataclass(frozen=True, slots=True)
class SharedRecords(Generic[RecordT]):
    """The records of one type, by name, in any store."""

    namespace: str
    to_json: Callable[[RecordT], Json]
    #: Raises KeyError, TypeError or ValueError for what is no record of the type.
    from_json: Callable[[Json], RecordT]

    def all(self, reader: Reader) -> dict[str, RecordT]:
        """Return every record of a store, by name."""
        found = reader.documents(self.namespace)
        return {document.key: self.decode(document.value, document.key) for document in found}

    def decode(self, value: bytes, name: str) -> RecordT:
        """Return the record in a document, or raise an error that names it."""
        where = f"{self.namespace}/{name}"
        try:
            return self.from_json(codec.decode(value, where))
        except (KeyError, TypeError, ValueError) as error:
            raise DocumentCorruptError(where, f"it is no such record ({error})") from error

    def encoded(self, record: RecordT, name: str) -> codec.Encoded:
        """Return the document of a record."""
        return codec.encode(self.to_json(record), f"{self.namespace}/{name}")

    def update(
        self, store: Store, name: str, change: Callable[[RecordT | None], RecordT]
    ) -> RecordT:
        """Replace a record by the result of ``change``, atomically over all processes; return it.

        Nothing is written where that is the very record that ``change`` was given.
        """
        made: list[RecordT] = []

        def changed(value: bytes | None) -> codec.Encoded:
            before = None if value is None else self.decode(value, name)
            made[:] = [change(before)]
            if made[0] is before:
                raise _UnchangedError
            return self.encoded(made[0], name)

        with suppress(_UnchangedError):
            store.update_document(self.namespace, name, changed)
        return made[0]


def _breaker(fields: Json) -> Breaker:
    record = Breaker(**fields)
    if record.state not in {"closed", "open", "half_open"}:
        raise ValueError(f"{record.state!r} is no state of a breaker")
    return record


BREAKERS = SharedRecords("circuit_breakers", asdict, _breaker)
