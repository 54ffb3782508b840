"""Answers to the questions of runs: which question one is for, and whether it is taken.

A question takes one answer. Posting it checks, in the same write transaction, that its question is
asked and has none: neither recorded in the run, nor on its way in the inbox. An answer that comes
before its question is for the next of that name, of which there may be one as well.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import TYPE_CHECKING, Any
from uuid import UUID

from maestro_hive.hive import answer_types
from maestro_hive.hive.errors import AlreadyAnsweredError
from maestro_hive.hive.inbox import Answer, Inbox, check_text
from maestro_hive.hive.runs import ANSWER, LatestRun
from maestro_hive.kernel.errors import ConfigurationError, DecodeError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.codec import Model
from maestro_hive.maestro.state.projections import facts_of, readable
from maestro_hive.maestro.state.views import (
    deadline,
    open_waits,
    question_id,
    run_status,
    value_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.hive.inbox import Messages
    from maestro_hive.maestro.state.codec import Json
    from maestro_hive.maestro.state.projections import RunState
    from maestro_hive.maestro.state.records import Entry
    from maestro_hive.maestro.state.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question that a run waits for an answer to; ``about`` is what the workflow gave with it."""

    #: For ``hive.answer(…, question=id)``, where several have the same name.
    id: str
    name: str
    about: Any
    asked_at: datetime


def questions(store: Store, run_id: str) -> list[Question]:
    """Return the questions of a run that have no answer, in the order they were asked."""
    state = LatestRun(store, run_id).state
    if state.ended is not None:
        return []
    answered = answers_on_their_way(state, Inbox(store).messages(run_id))
    return [
        Question(
            id=question_id(each),
            name=_name(each),
            about=value_of(each, store.load),
            asked_at=each.when,
        )
        for each in open_waits(state)
        if each.identity not in answered and _is_question(each)
    ]


def answers_on_their_way(state: RunState, messages: Messages) -> dict[bytes, Answer]:
    """Return the answers in the inbox to the open questions of a run, by their identity."""
    found: dict[bytes, Answer] = {}
    early = [each for each in messages.answers if each.question is None]
    for identity, question in state.questions.items():
        answer = messages.to(identity)
        if answer is None:  # an early one of a version that did not name its question
            answer = next((each for each in early if each.name == _name(question)), None)
            if answer is not None:
                early.remove(answer)
        if answer is not None:
            found[identity] = answer
    return found


# --- posting --------------------------------------------------------------------------------------


def answer(
    store: Store,
    run_id: str,
    name: str,
    value: Any,
    *,
    by: str | None = None,
    early: bool = False,
    question: str | None = None,
) -> None:
    """Answer a question of a run; with ``early``, also one that it has not asked yet.

    A question takes one answer. An answer without the required shape is refused here, where it can
    be corrected.
    """

    def made(found: Entry | None) -> Answer:
        return Answer(name=name, value=fitting(_shape(found), name, value), by=by)

    _post(store, Choice(run_id, name, question, early=early), made)


def answer_in_words(
    store: Store,
    run_id: str,
    name: str,
    text: str,
    *,
    by: str | None = None,
    early: bool = False,
    question: str | None = None,
) -> None:
    """Answer a question by a typed text: the question's type decides what ``yes`` means."""

    def made(found: Entry | None) -> Answer:
        given = Answer(name=name, value=text, by=by, as_text=True)
        return given if found is None else fitted(given, _shape(found))

    _post(store, Choice(run_id, name, question, early=early), made)


@dataclass(frozen=True, slots=True)
class Choice:
    """Which question is answered: one of a name, by its id or the only one; or one to come."""

    run_id: str
    name: str
    question: str | None = None
    early: bool = False


def _post(store: Store, choice: Choice, make: Callable[[Entry | None], Answer]) -> None:
    run, inbox = LatestRun(store, choice.run_id), Inbox(store)
    with readable(choice.run_id):
        found = choose(store, run.state, inbox.messages(choice.run_id), choice)
    given = _for(found, make(found))  # no other process waits while it is made
    check_text("name", given.name)
    if given.by is not None:
        check_text("by", given.by)
    if found is not None:  # whatever is asked meanwhile, it is for this one
        choice = replace(choice, question=question_id(found))

    def add(messages: Messages) -> None:
        now = choose(store, run.refresh(), messages, choice)
        same = now is None or (found is not None and now.identity == found.identity)
        messages.answers.append(given if same else _for(now, make(now)))

    inbox.post(choice.run_id, add)


def _for(question: Entry | None, given: Answer) -> Answer:
    if question is None or question.identity is None:
        return given
    return replace(given, question=question.identity.hex())


# --- choosing the question ------------------------------------------------------------------------


def find_question(
    store: Store, run_id: str, name: str, *, early: bool = False, question: str | None = None
) -> Entry | None:
    """Return the question that such an answer is for; None for one to come. Raise as posting it."""
    state, messages = LatestRun(store, run_id).state, Inbox(store).messages(run_id)
    return choose(store, state, messages, Choice(run_id, name, question, early=early))


def choose(store: Store, state: RunState, messages: Messages, choice: Choice) -> Entry | None:
    """Return the open question that is chosen; None if there is none yet, and it may come.

    Raises if there is none, if it has its answer, or if several are open and none of them is named.
    """
    run_id, name = choice.run_id, choice.name
    _check_answered(store, state, choice)
    if state.ended is not None:
        raise ConfigurationError(
            f"run {run_id!r} has ended ({run_status(state)}), and takes no answer"
        )
    asked = [each for each in open_waits(state) if _is_question(each) and _name(each) == name]
    if choice.question is not None:
        asked = [_named(store, state, choice, asked)]
    answered = answers_on_their_way(state, messages)
    left = [each for each in asked if each.identity not in answered]
    if len(left) > 1:
        raise ConfigurationError(
            f"run {run_id!r} asks {name!r} {len(left)} times; name the question that is answered by"
            f" question= (--question): {_listed(store, left)}"
        )
    if left:
        _check_time(store, run_id, left[0])
        return left[0]
    if asked:
        _refuse(choice, asked[-1], answered[asked[-1].identity or b""])
    waiting = messages.early(name)
    if choice.early and waiting is not None:
        raise AlreadyAnsweredError(run_id, name, None, waiting.value, waiting.by)
    if choice.early:
        return None
    raise ConfigurationError(
        f"run {run_id!r} does not wait for {name!r}{_open_questions(state)}"
        f"{_last_answer(store, state, name)};"
        " to answer before the question is asked, use early=True (--early)"
    )


def _refuse(choice: Choice, question: Entry, taken: Answer) -> None:
    raise AlreadyAnsweredError(
        choice.run_id, choice.name, question_id(question), taken.value, taken.by
    )


def _named(store: Store, state: RunState, choice: Choice, asked: list[Entry]) -> Entry:
    """Return the open question with the chosen id; raise what became of it, if it is not open."""
    run_id, name, wanted = choice.run_id, choice.name, choice.question
    for each in asked:
        if question_id(each) == wanted:
            return each
    ended = _end_of(state, choice)
    why = "it was never asked" if ended is None else f"it is over ({facts_of(ended).get('how')})"
    raise ConfigurationError(
        f"run {run_id!r} asks no question {wanted!r} named {name!r}: {why}; open are:"
        f" {_listed(store, asked)}"
    )


def _check_answered(store: Store, state: RunState, choice: Choice) -> None:
    """Raise if the question with the chosen id has its answer recorded, also of a run that ended."""
    ended = _end_of(state, choice)
    if ended is not None and facts_of(ended).get("how") == "answered":
        value, by = value_of(ended, store.load), facts_of(ended).get("by")
        raise AlreadyAnsweredError(choice.run_id, choice.name, choice.question, value, by)


def _end_of(state: RunState, choice: Choice) -> Entry | None:
    """Return how the question with the chosen id ended."""
    for identity, ended in state.answers.items() if choice.question is not None else ():
        asked = state.waits.get(identity)
        if asked is None or not _is_question(asked) or _name(asked) != choice.name:
            continue
        if question_id(asked) == choice.question:
            return ended
    return None


def _check_time(store: Store, run_id: str, question: Entry) -> None:
    """Raise if a question's time is over: it ends so when its run is resumed."""
    until = deadline(question, facts_of(question))
    if until is not None and until <= store.clock.now():
        raise ConfigurationError(
            f"the time to answer {_name(question)!r} of run {run_id!r} is over; it takes no answer any"
            " more"
        )


def _name(question: Entry) -> str:
    return str(facts_of(question).get("name"))


def _is_question(wait: Entry) -> bool:
    return facts_of(wait).get("what") == ANSWER


def _listed(store: Store, asked: list[Entry]) -> str:
    """Return questions with their ids, and what they are about."""
    shown = [(question_id(each), repr(value_of(each, store.load))) for each in asked]
    cut = (f"{one} ({text if len(text) <= 60 else f'{text[:60]}…'})" for one, text in shown)
    return ", ".join(cut) or "none"


def _open_questions(state: RunState) -> str:
    names = [_name(each) for each in open_waits(state) if _is_question(each)]
    return f"; it waits for {', '.join(map(repr, names))}" if names else ", nor for anything else"


def _last_answer(store: Store, state: RunState, name: str) -> str:
    """Return what the last question of a name was answered with, where there was one."""
    for identity, ended in reversed(state.answers.items()):
        question, facts = state.waits.get(identity), facts_of(ended)
        if question is not None and _is_question(question) and _name(question) == name:
            if facts.get("how") != "answered":
                return f" (the last one ended: {facts.get('how')})"
            by, text = facts.get("by"), repr(value_of(ended, store.load))
            return f" (the last one was answered{f' by {by}' if by else ''} with {text[:60]})"
    return ""


# --- its value ------------------------------------------------------------------------------------


def _shape(question: Entry | None) -> Json:
    return None if question is None else facts_of(question).get("shape")


def fitted(given: Answer, shape: Json) -> Answer:
    """Return a message with the value that it has for a question; raise if that does not fit."""
    value = given.value
    if given.as_text:
        value = answer_types.parse_words(shape or {}, value, f"the answer to {given.name!r}")
    elif shape and given.question is None:
        value = fitting(shape, given.name, _decoded(value))
    elif shape:  # it was made for this question, which may be asked in another way by now
        answer_types.check(shape, value, f"the answer to {given.name!r}")
    return replace(given, value=value, as_text=False)


def _decoded(tree: Json) -> Any:
    """Return the value of a message; as it is, where its class is not known here."""
    try:
        return codec.decode(codec.dump(tree), "the answer")
    except DecodeError:
        return tree


def fitting(shape: Json, name: str, value: Any) -> Json:
    """Return an answer as it is posted; raise if it has not the required shape.

    Without a shape it is stored as it is, and checked when its question is asked.
    """
    path = f"the answer to {name!r}"
    if not shape:
        return codec.parse(codec.encode(value, path).data, path)
    tree = codec.parse(codec.encode(plain(value), path).data, path)
    answer_types.check(shape, tree, path)
    return tree


def plain(value: Any) -> Any:
    """Return a value as plain data, as it is given without its class."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [each.name for each in dataclasses.fields(value) if each.init]
        return {name: plain(getattr(value, name)) for name in fields}
    if isinstance(value, Model):
        return value.model_dump(mode="json", by_alias=True, round_trip=True)
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return _plain_scalar(value)


def _plain_scalar(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    return str(value) if isinstance(value, Decimal | UUID | PurePath) else value
