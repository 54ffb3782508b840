"""Waits of a workflow that outlive its process: a sleep, and a question that somebody answers."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from enum import Enum
from typing import TYPE_CHECKING, Any

from maestro_hive.engine import settings
from maestro_hive.engine.waits import Wait
from maestro_hive.hive import answer_types as shapes
from maestro_hive.hive import runs as entries
from maestro_hive.hive.active_run import active_run
from maestro_hive.hive.answer_types import ShapeError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.codec import Model
from maestro_hive.maestro.state.projections import facts_of

if TYPE_CHECKING:
    from maestro_hive.hive.active_run import ActiveRun
    from maestro_hive.hive.inbox import Answer, Inbox
    from maestro_hive.maestro.state.codec import Json
    from maestro_hive.maestro.state.records import Entry


logger = logging.getLogger(__name__)

_A_MOMENT = 0.01


async def sleep(seconds: float) -> None:
    """Return when so many seconds are over, those before a restart included."""
    run = active_run("hive.sleep()")
    given: object = seconds
    is_over = isinstance(given, int | float) and given < 0  # as in sleep(deadline - now)
    length = float(settings.number(0)("the seconds to sleep", 0 if is_over else given))
    identity = run.told_apart("sleep", repr(length))
    state, clock = run.held.state, run.held.store.clock
    if identity in state.answers:
        return
    begun = state.waits.get(identity)
    if begun is None:
        wait = Wait.begin(clock, length)
        new = entries.wait_started(identity, "sleep", entries.SLEEP, wait=wait.to_facts())
        await run.record(new)
    else:
        wait = Wait.from_facts(facts_of(begun)["wait"])
    await run.owning(lambda: wait.over(clock))
    await run.record(entries.wait_ended(identity, "sleep", "over"), sync=False)


async def wait_for(name: str, within: float | None, expected: Any) -> Any:
    """Return the answer to a question; raise TimeoutError if it does not come in time."""
    run = active_run("hive.wait_for()")
    question: object = name
    if not isinstance(question, str) or not question:
        raise settings.refused("the name of what is waited for", name, "a text that is not empty")
    shape = shapes.shape_of(expected)
    limit = None if within is None else settings.number(0)("the timeout", within)
    identity = run.told_apart("wait", name)
    ended = run.held.state.answers.get(identity)
    if ended is None or not _still_fits(run, ended, shape):
        wait = await _ask(run, identity, name, limit, shape)
        ended = await run.owning(lambda: _answered(run, identity, name, wait))
    if facts_of(ended).get("how") == "timeout":
        raise TimeoutError(f"nobody answered {name!r} of run {run.run_id!r} in time")
    return shapes.build(expected, _value(run, ended))


def _value(run: ActiveRun, ended: Entry) -> Any:
    data = run.held.store.load(ended)
    return None if data is None else codec.decode(data, "the answer")


def _still_fits(run: ActiveRun, ended: Entry, shape: Json) -> bool:
    """Return whether a kept answer is what the workflow asks for by now: its code may have changed."""
    if facts_of(ended).get("how") == "timeout":
        return True
    try:
        shapes.check(shape, _value(run, ended))
    except ShapeError:
        return False
    return True


async def _ask(
    run: ActiveRun, identity: bytes, name: str, limit: float | None, shape: Any
) -> Wait | None:
    """Record the question, unless it was asked like that; return how long to wait at most."""
    begun = run.held.state.waits.get(identity)
    wait = None if limit is None else Wait.begin(run.held.store.clock, float(limit))
    if begun is not None and identity in run.held.state.questions:
        kept = facts_of(begun).get("wait")
        wait = None if kept is None else Wait.from_facts(kept)
        if facts_of(begun).get("shape") == shape:
            return wait
    told = None if wait is None else wait.to_facts()
    await run.record(entries.wait_started(identity, name, entries.ANSWER, wait=told, shape=shape))
    return wait


async def _answered(run: ActiveRun, identity: bytes, name: str, wait: Wait | None) -> Entry:
    """Return the entry that says how the wait ended; whoever brings an answer has written it."""
    arrived = run.listen(identity)
    timer = asyncio.create_task(wait.over(run.held.store.clock)) if wait is not None else None
    run.check_inbox()
    try:
        waited = {arrived, timer} if timer else {arrived}
        await asyncio.wait(waited, return_when="FIRST_COMPLETED")
        while not arrived.done():
            if run.claim(identity):
                await run.record(entries.wait_ended(identity, name, "timeout"))
                break
            await asyncio.sleep(_A_MOMENT)  # an answer is being written down, in the last moment
        else:
            arrived.result()  # or the error that kept it away
    finally:
        run.listen_no_more(identity)
        if timer is not None:
            timer.cancel()
    return run.held.state.answers[identity]


# --- from the other side -------------------------------------------------------------------------


async def deliver(run: ActiveRun, mail: Inbox, answers: list[Answer]) -> None:
    """Record the answers that a run waits for, and throw those letters away."""
    for answer in answers:
        identity = _question_of(run, answer)
        if identity is not None and run.claim(identity):
            await _hand_over(run, identity, answer)
            mail.taken(run.run_id, answer.id)
        elif _is_too_late(run, answer):
            mail.taken(run.run_id, answer.id)
        # Otherwise it may be asked later, or somebody else is settling it just now.


async def _hand_over(run: ActiveRun, identity: bytes, answer: Answer) -> None:
    """Record an answer, and only then let the workflow have it."""
    try:
        tree = _fitted(run, identity, answer)
        value = codec.encoded(codec.dump(tree))
        told = {"answer": answer.id, "by": answer.by}
        await run.record(entries.wait_ended(identity, answer.name, "answered", value, **told))
    except ShapeError as error:  # it came before its question
        logger.warning("run %s still waits: %s", run.run_id, error)
        run.give_up_claim(identity)
    except BaseException:
        run.give_up_claim(identity)
        raise
    else:
        run.tell(identity)


def _question_of(run: ActiveRun, answer: Answer) -> bytes | None:
    """Return which of the questions under way a letter answers."""
    for identity, asked in run.held.state.questions.items():
        is_it = answer.question in (None, identity.hex())
        if is_it and facts_of(asked).get("name") == answer.name and run.listens(identity):
            return identity
    return None


def _is_too_late(run: ActiveRun, answer: Answer) -> bool:
    """Return whether a letter's question is over: answered, perhaps by it, or too late."""
    if answer.question is None:
        taken = (facts_of(entry).get("answer") for entry in run.held.state.answers.values())
        return answer.id in taken
    return bytes.fromhex(answer.question) in run.held.state.answers


def _fitted(run: ActiveRun, identity: bytes, answer: Answer) -> Json:
    """Return what an answer says to this question; raise if it is not of the right kind."""
    question = run.held.state.waits[identity]
    if answer.words:
        shape = facts_of(question).get("shape") or {}
        return shapes.parse_words(shape, answer.value, f"the answer to {answer.name!r}")
    return fitting(question, answer.name, answer.value)


def fitting(question: Entry | None, name: str, value: Any) -> Json:
    """Return an answer as it is posted; raise if it is not what was asked for.

    What was not asked yet is looked at when it is.
    """
    shape = facts_of(question).get("shape") if question is not None else None
    path = f"the answer to {name!r}"
    if not shape:
        return codec.parse(codec.encode(value, path).data, path)
    plain = _plain(value)
    tree = codec.parse(codec.encode(plain, path).data, path)
    shapes.check(shape, tree, path)
    return tree


def _plain(value: Any) -> Any:
    """Return a value as somebody would answer who does not have its class."""
    if isinstance(value, Enum):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Model):
        return value.model_dump(mode="json", by_alias=True, round_trip=True)
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return value
