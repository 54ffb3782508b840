"""Answers to the questions of runs: the question of each, and whether it is taken.

A question takes one answer. The transaction that sends it checks that its question is asked and has
none: neither recorded in the run, nor on its way as a message. An answer that comes before its
question is for the next of that name, of which there may be one as well.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw, Struct

from maestro_hive.engine.settings import refused
from maestro_hive.hive import answer_types
from maestro_hive.journal import values
from maestro_hive.journal.effects import ENDED
from maestro_hive.journal.entries import WaitEnded, WaitStarted
from maestro_hive.journal.state import RunState
from maestro_hive.journal.store import Message
from maestro_hive.kernel.errors import (
    AlreadyAnsweredError,
    ConfigurationError,
    CorruptionError,
    DecodeError,
    EncodeError,
)

if TYPE_CHECKING:
    from maestro_hive.journal.database import Transaction
    from maestro_hive.journal.effects import Held, Scope
    from maestro_hive.journal.store import RunRow, Store


class Answer(Struct, frozen=True):
    """An answer on its way, as its message has it."""

    value: Raw
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question that a run waits for an answer to; ``about`` comes from the workflow."""

    #: For ``hive.answer(…, question=id)``, where several have the same name.
    id: str
    name: str
    about: Any
    asked_at: datetime


def read_answer(data: bytes) -> Answer:
    """Return the answer of a message."""
    try:
        return msgspec.json.decode(data, type=Answer)
    except msgspec.MsgspecError as error:
        raise CorruptionError(f"a message to a run is no answer: {error}") from error


class Asked:
    """The questions of a run, by their identities: as recorded, and with answers on their way."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store, self._state = store, RunState()
        #: All questions, those that have ended too.
        self.all: dict[str, WaitStarted] = {}
        self.refresh(store.find(run_id))

    def refresh(self, row: RunRow, tx: Transaction | None = None) -> None:
        """Read what is new."""
        self.row = row
        entries = self._store.entries(row.number, self._state.seq, tx)
        self._state.add(entries)
        for entry in entries:
            if isinstance(entry, WaitStarted) and entry.what == "question":
                self.all[entry.identity] = entry
        self.open = [each for each in self.all.values() if each.identity in self._state.questions]
        #: The answers on their way, and those that came before their question, by its name.
        self.answers: dict[str, Answer] = {}
        self.early: dict[str, Answer] = {}
        for each in self._store.messages_of(row, tx):
            if each.kind in ("answer", "early"):
                where = self.answers if each.kind == "answer" else self.early
                where[each.target] = read_answer(each.data)

    def value(self, data: Any) -> Any:
        """Return a recorded value."""
        return values.decode(self._store.text(self.row.run_id, data))

    def end_of(self, identity: str | None) -> WaitEnded | None:
        """Return the recorded answer of a question, if it has one."""
        outcome = self._state.outcomes.get(identity) if identity in self.all else None
        return None if outcome is None else outcome.entry


def questions(store: Store, run_id: str) -> list[Question]:
    """Return the questions of a run that have no answer, in the order they were asked."""
    asked = Asked(store, run_id)
    if asked.row.status in ENDED:
        return []
    return [
        Question(
            id=each.identity,
            name=each.name,
            about=asked.value(each.about),
            asked_at=datetime.fromtimestamp(each.at / 1e6, UTC),
        )
        for each in asked.open
        if each.identity not in asked.answers
    ]


# --- sending --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """An answer to send: to one of a name, by its id or the only one; or to one to come."""

    name: str
    value: Any
    by: str = ""
    question: str | None = None
    early: bool = False


def answer(store: Store, run_id: str, sending: Sending) -> None:
    """Answer a question of a run; with ``early``, also one that it has not asked yet.

    An answer without the required shape is refused here, where it can be corrected.
    """
    for part, text in (("name", sending.name), ("by", sending.by)):
        if not isinstance(text, str):
            raise refused(part, text, "a text")
        values.encode(text, part)  # raises if it has no form in UTF-8
    asked = Asked(store, run_id)
    found = choose(asked, sending, store.now())
    made = _encoded(found, sending)  # no other process waits meanwhile

    def message(tx: Transaction, row: RunRow) -> Message:
        asked.refresh(row, tx)
        wanted = sending
        if found is not None:  # whatever is asked meanwhile, it is for this one
            wanted = replace(sending, question=found.identity)
        now = choose(asked, wanted, store.now())
        data = made if (now is None) is (found is None) else _encoded(now, sending)
        kind, target = ("early", sending.name) if now is None else ("answer", now.identity)
        return Message(0, run_id, kind, target, data)

    store.post(run_id, message)


def choose(asked: Asked, sending: Sending, now: float) -> WaitStarted | None:
    """Return the open question that is chosen; None if there is none yet, and it may come.

    Raises if there is none, if it has its answer, or if several are open and none of them is named.
    """
    run_id, name, wanted = asked.row.run_id, sending.name, sending.question
    if (end := asked.end_of(wanted)) is not None:
        raise AlreadyAnsweredError(run_id, name, wanted, asked.value(end.answer), end.by)
    run = f"run {run_id!r}"
    if asked.row.status in ENDED:
        raise ConfigurationError(f"{run} has ended ({asked.row.status}), and takes no answer")
    named = [each for each in asked.open if each.name == name]
    known = [each for each in named if wanted in (None, each.identity)]
    if wanted is not None and not known:
        raise ConfigurationError(
            f"{run} asks no question {wanted!r} named {name!r}; open are: {_listed(asked, named)}"
        )
    left = [each for each in known if each.identity not in asked.answers]
    if len(left) > 1:
        raise ConfigurationError(
            f"{run} asks {name!r} {len(left)} times; name the question that is answered by"
            f" question= (--question): {_listed(asked, left)}"
        )
    if left and 0 < left[0].until <= now * 1e6:
        raise ConfigurationError(
            f"the time to answer {name!r} of {run} is over; it takes no answer any more"
        )
    if left:
        return left[0]
    identity = known[-1].identity if known else None
    taken = asked.answers[identity] if identity else asked.early.get(name)
    if taken is not None and (identity or sending.early):
        raise AlreadyAnsweredError(run_id, name, identity, _value(taken.value), taken.by)
    if not sending.early:
        raise ConfigurationError(
            f"{run} does not wait for {name!r}{_last_answer(asked, name)}; it waits for"
            f" {_listed(asked, asked.open)}; to answer before the question is asked, add"
            " early=True (--early)"
        )
    return None


def _listed(asked: Asked, listed: list[WaitStarted]) -> str:
    """Return questions with their names and ids, and what they are about."""
    shown = [f"{each.name!r}: {each.identity} ({asked.value(each.about)!r:.60})" for each in listed]
    return ", ".join(shown) or "nothing"


def _last_answer(asked: Asked, name: str) -> str:
    """Return the answer to the last question of a name, if there was one."""
    ends = [asked.end_of(each.identity) for each in asked.all.values() if each.name == name]
    if not ends or (end := ends[-1]) is None:
        return ""
    whose = f" by {end.by}" if end.by else ""
    return f" (the last one was answered{whose} with {asked.value(end.answer)!r:.60})"


# --- its value ------------------------------------------------------------------------------------


def _encoded(question: WaitStarted | None, sending: Sending) -> bytes:
    """Return the message of an answer; raise if the value does not fit its question.

    Without a question it is stored as it is, and checked when its question is asked.
    """
    kind = "" if question is None else question.type
    value = _fitting(kind, sending.value, f"the answer to {sending.name!r}")
    return msgspec.json.encode(Answer(value, sending.by))


def _fitting(kind: str, value: Any, path: str) -> Raw:
    """Return a value as it is recorded: as plain data, if the question has a type."""
    if not kind:
        return Raw(values.encode(value, path).data)
    encoded = values.encode(answer_types.plain(value), path)
    answer_types.check(json.loads(kind), encoded.take(), path)
    return Raw(encoded.data)


def _value(data: Raw) -> Any:
    """Return the value of a message; as it is stored, where its class is not known here."""
    try:
        return values.decode(bytes(data))
    except DecodeError:
        return msgspec.json.decode(data)


class TakeEarly:
    """An effect of asking: an answer that came early becomes that of this question."""

    def __init__(self, identity: str, name: str, kind: str) -> None:
        self._identity, self._name, self._kind = identity, name, kind
        #: Why an early answer is not taken.
        self.refused: Exception | None = None
        self.by = ""

    def apply(self, scope: Scope, run: Held) -> None:
        """Address the message to the question, or drop it if it does not fit."""
        self.refused = None
        tx, sql = scope.tx, scope.sql
        for number, kind, target, data in tx(sql["MESSAGES_OF_RUN"], run.number):
            if kind != "early" or target != self._name:
                continue
            given = read_answer(data.encode())
            self.by = given.by
            try:
                value, path = _value(given.value), f"the answer to {target!r}"
                fitting = _fitting(self._kind, value, path)
            except (answer_types.ShapeError, EncodeError) as error:
                self.refused = error
                tx(sql["TAKE_MESSAGE"], number)
            else:
                text = msgspec.json.encode(Answer(fitting, given.by)).decode()
                tx(sql["ADDRESS_MESSAGE"], self._identity, text, number)
            return
