"""The outbox: escalations on their way to a person, and the tickets that were made for them.

An escalation is a document, written in the transaction that records the failure it is about. It
stays until a person has answered and the ticket, if there is one, was told; ``delivery`` brings it
on its way. A second kind of document, by label, says which ticket a failure has, so that all
escalations of the same failure use one.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

from maestro_hive.engine.escalation import EscalationCase
from maestro_hive.engine.tickets import label_of
from maestro_hive.kernel.clock import Wait, from_micros
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.records import EntryKind, NewEntry
from maestro_hive.maestro.state.shared_records import SharedRecords
from maestro_hive.maestro.state.store import DocumentChange

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from maestro_hive.kernel.clock import Clock
    from maestro_hive.maestro.state.codec import Encoded, Json
    from maestro_hive.maestro.state.store import Reader, Store

ReadT = TypeVar("ReadT")

_ID_DIGITS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """An effect on a ticket system that was about to be made: whether it was is not known.

    Without ``wait`` a process is making it, or died while it was; with it, nobody is, and an effect
    that was made is found before the wait is over. ``since`` is before the first call that may have
    made it, in microseconds.
    """

    wait: dict[str, Json] | None = None
    since: int | None = None

    @property
    def in_doubt_since(self) -> datetime | None:
        """When it can have been made at the earliest; None if that was not recorded."""
        return None if self.since is None else from_micros(self.since)

    def remaining(self, clock: Clock) -> float | None:
        """Return for how many seconds it has to be looked for; None if that is not known."""
        return None if self.wait is None else Wait.from_json(self.wait).remaining(clock)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTicket:
    """The ticket of a failure, by its label; or that one was about to be created.

    ``maker`` is the escalation that it was created for; empty if it was there before.
    """

    system: str
    key: str | None = None
    address: str | None = None
    maker: str = ""
    effect: Effect | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEscalation:
    """An escalation: what it is about, how far its delivery is, and how it ended."""

    id: str
    #: The run, its workflow, and the step or task that failed.
    run_id: str | None
    workflow: str = ""
    step: str
    persona: str = ""
    #: What identifies the failed call in its run, as hexadecimal.
    identity: str = ""
    #: Which question its run waits for, as hexadecimal; None where no run waits.
    question: str | None = None
    #: When it was escalated, in microseconds.
    at: int
    #: The case, as it is told, and the shape of the step's result.
    case: dict[str, Json]
    shape: Json = None
    #: Which ticket system it is for; None if there was none: the next process that has one takes it.
    system: str | None = None
    #: Whether that system can be searched, and so is told how it ended.
    finds: bool = False
    #: The ticket, and our comment on it where it was not created for this escalation.
    ticket: str | None = None
    address: str | None = None
    comment: str | None = None
    #: Whether it has been told: there is a ticket, or a message was sent.
    delivered: bool = False
    #: The comment that is about to be made, or the message of a system that cannot be searched.
    effect: Effect | None = None
    #: How often delivery failed, why, and when it is tried again.
    tries: int = 0
    problem: str | None = None
    wait: dict[str, Json] | None = None
    #: How it ended, for those who read the ticket; None while it is open.
    outcome: str | None = None

    @property
    def label(self) -> str:
        """The label of its ticket, the same for all escalations of the same failure."""
        return label_of(self.told_case)

    @property
    def told_case(self) -> EscalationCase:
        """What a person is told."""
        return EscalationCase.from_json(self.case)

    @property
    def asked_at(self) -> datetime:
        """When it was escalated."""
        return from_micros(self.at)

    def due_in(self, clock: Clock) -> float:
        """Return in how many seconds delivery may be tried."""
        return 0.0 if self.wait is None else Wait.from_json(self.wait).remaining(clock)

    def to_json(self) -> dict[str, Json]:
        """Return it as plain JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, written: Mapping[str, Json]) -> Self:
        """Return what ``to_json`` wrote."""
        return _read(cls, written)


def _read(kind: type[ReadT], written: Mapping[str, Json]) -> ReadT:
    names = (each.name for each in fields(kind))  # type: ignore[arg-type]
    known = {name: written[name] for name in names if name in written}
    effect = known.get("effect")
    if effect is not None:
        known["effect"] = Effect(wait=effect.get("wait"), since=effect.get("since"))
    return kind(**known)


#: The escalations, by id; ``StateManager`` shows them.
ESCALATIONS: SharedRecords[StoredEscalation] = SharedRecords(
    "escalations", StoredEscalation.to_json, StoredEscalation.from_json
)
#: The tickets, by label; the journal's own.
TICKETS: SharedRecords[KnownTicket] = SharedRecords(
    "$tickets", asdict, lambda written: _read(KnownTicket, written)
)


def escalation_id(run_id: str, identity: bytes) -> str:
    """Return the id of an escalation: of a run, and of what identifies it there."""
    digest = hashlib.sha256(run_id.encode() + b"\0" + identity).hexdigest()
    return f"esc-{digest[:_ID_DIGITS]}"


def found_escalation(reader: Reader, wanted: str) -> StoredEscalation | None:
    """Return an escalation by its id; None if there is none, or it is over and its ticket was told."""
    found = reader.document(ESCALATIONS.namespace, wanted)
    return None if found is None else ESCALATIONS.decode(found.value, wanted)


def added(record: StoredEscalation) -> DocumentChange:
    """Return the change that puts an escalation into the outbox; one that is open there stays."""

    def change(before: bytes | None) -> Encoded:
        known = None if before is None else ESCALATIONS.decode(before, record.id)
        return _encoded(record if known is None or known.outcome is not None else known)

    return DocumentChange(ESCALATIONS.namespace, record.id, change)


def ended(name: str, outcome: str) -> DocumentChange:
    """Return the change that ends an escalation: it stays only until its ticket was told."""

    def change(before: bytes | None) -> Encoded | None:
        known = None if before is None else ESCALATIONS.decode(before, name)
        if known is None or not known.finds:
            return None
        return _encoded(replace(known, outcome=outcome, wait=None, tries=0, problem=None))

    return DocumentChange(ESCALATIONS.namespace, name, change)


def apply(store: Store, change: DocumentChange) -> None:
    """Make a change by itself; durable on return."""
    store.update_document(change.namespace, change.key, change.change)


def _encoded(record: StoredEscalation) -> Encoded:
    return ESCALATIONS.encoded(record, record.id)


def update(
    store: Store, name: str, change: Callable[[StoredEscalation], StoredEscalation | None]
) -> StoredEscalation | None:
    """Change an escalation, atomically over all processes; None if there is none any more."""
    made: list[StoredEscalation | None] = [None]

    def changed(before: bytes | None) -> Encoded | None:
        made[0] = None if before is None else change(ESCALATIONS.decode(before, name))
        return None if made[0] is None else _encoded(made[0])

    store.update_document(ESCALATIONS.namespace, name, changed)
    return made[0]


def delivered_entry(identity: bytes, name: str, record: StoredEscalation) -> NewEntry:
    """Return the entry that says by what a person was told of an escalation."""
    facts: dict[str, Any] = {
        "name": name,
        "escalation": record.id,
        "system": record.system or "",
        "ticket": record.ticket,
        "address": record.address,
        "comment": record.comment,
    }
    known = {name: fact for name, fact in facts.items() if fact is not None}
    return NewEntry(
        EntryKind.ESCALATION_DELIVERED, facts=codec.dump_canonical(known), identity=identity
    )
