"""Durable waits of a workflow: a sleep, and a question to a person."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from enum import Enum
from typing import TYPE_CHECKING, Any

from maestro_hive.engine import settings
from maestro_hive.hive import answer_types, runs
from maestro_hive.hive.active_run import active_run
from maestro_hive.hive.answer_types import ShapeError
from maestro_hive.kernel.clock import Wait
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.codec import Model
from maestro_hive.maestro.state.projections import facts_of

if TYPE_CHECKING:
    from maestro_hive.hive.active_run import ActiveRun
    from maestro_hive.hive.inbox import Answer, Inbox
    from maestro_hive.maestro.state.codec import Json
    from maestro_hive.maestro.state.records import Entry


logger = logging.getLogger(__name__)

#: How often it is checked whether an answer that is being recorded has been.
_CHECK_SECONDS = 0.01


async def sleep(seconds: float) -> None:
    """Return after so many seconds, counted since the first start of the wait."""
    run = active_run("hive.sleep()")
    given: object = seconds
    is_over = isinstance(given, int | float) and given < 0  # as in sleep(deadline - now)
    length = float(settings.number(0)("the seconds to sleep", 0 if is_over else given))
    identity = run.numbered("sleep", repr(length))
    state, clock = run.run.state, run.run.store.clock
    if identity in state.answers:
        return
    started = state.waits.get(identity)
    if started is None:
        wait = Wait.start(clock, length)
        new = runs.wait_started(identity, "sleep", runs.SLEEP, wait=wait.to_json())
        await run.record(new)
    else:
        wait = Wait.from_json(facts_of(started)["wait"])
    await run.owning(lambda: wait.finished(clock))
    await run.record(runs.wait_ended(identity, "sleep", "over"), sync=False)


async def wait_for(name: str, within: float | None, expected: Any) -> Any:
    """Return the answer to a question; raise TimeoutError if it does not come in time."""
    run = active_run("hive.wait_for()")
    question: object = name
    if not isinstance(question, str) or not question:
        raise settings.refused("the name of the question", name, "a text that is not empty")
    shape = answer_types.shape_of(expected)
    limit = None if within is None else settings.number(0)("the timeout", within)
    identity = run.numbered("wait", name)
    ended = run.run.state.answers.get(identity)
    if ended is None or not _still_fits(run, ended, shape):
        wait = await _ask(run, identity, name, limit, shape)
        ended = await run.owning(lambda: _answered(run, identity, name, wait))
    if facts_of(ended).get("how") == "timeout":
        raise TimeoutError(f"there was no answer to {name!r} of run {run.run_id!r} in time")
    return answer_types.build(expected, _value(run, ended))


def _value(run: ActiveRun, ended: Entry) -> Any:
    data = run.run.store.load(ended)
    return None if data is None else codec.decode(data, "the answer")


def _still_fits(run: ActiveRun, ended: Entry, shape: Json) -> bool:
    """Return whether a recorded answer has the shape that the workflow, as it is now, requires."""
    timed_out = facts_of(ended).get("how") == "timeout"
    return timed_out or answer_types.fits(shape, _value(run, ended))


async def _ask(
    run: ActiveRun, identity: bytes, name: str, limit: float | None, shape: Any
) -> Wait | None:
    """Record the question, unless it is recorded; return the time limit."""
    started = run.run.state.waits.get(identity)
    wait = None if limit is None else Wait.start(run.run.store.clock, float(limit))
    if started is not None and identity in run.run.state.questions:
        recorded = facts_of(started).get("wait")
        wait = None if recorded is None else Wait.from_json(recorded)
        if facts_of(started).get("shape") == shape:
            return wait
    limit_facts = None if wait is None else wait.to_json()
    await run.record(runs.wait_started(identity, name, runs.ANSWER, wait=limit_facts, shape=shape))
    return wait


async def _answered(run: ActiveRun, identity: bytes, name: str, wait: Wait | None) -> Entry:
    """Return the entry of the wait's end; an answer is recorded when it is delivered."""
    arrived = run.listen(identity)
    timer = asyncio.create_task(wait.finished(run.run.store.clock)) if wait is not None else None
    run.check_inbox()
    try:
        waited = {arrived, timer} if timer else {arrived}
        await asyncio.wait(waited, return_when="FIRST_COMPLETED")
        while not arrived.done():
            if run.claim(identity):
                await run.record(runs.wait_ended(identity, name, "timeout"))
                break
            await asyncio.sleep(_CHECK_SECONDS)  # an answer is being recorded
        else:
            arrived.result()  # raises the error that prevented its record
    finally:
        run.stop_listening(identity)
        if timer is not None:
            timer.cancel()
    return run.run.state.answers[identity]


# --- delivering answers -------------------------------------------------------------------------


async def deliver(run: ActiveRun, inbox: Inbox, answers: list[Answer]) -> None:
    """Record the answers that a run waits for, and remove their messages."""
    for answer in answers:
        identity = _question_of(run, answer)
        if identity is not None and run.claim(identity):
            await _record_answer(run, identity, answer)
            inbox.remove(run.run_id, answer.id)
        elif _is_too_late(run, answer):
            inbox.remove(run.run_id, answer.id)
        # Otherwise its question may come later, or is just being answered.


async def _record_answer(run: ActiveRun, identity: bytes, answer: Answer) -> None:
    """Record an answer, and only then return it to the workflow."""
    try:
        tree = _fitted(run, identity, answer)
        value = codec.encoded(codec.dump(tree))
        facts = {"answer": answer.id, "by": answer.by}
        await run.record(runs.wait_ended(identity, answer.name, "answered", value, **facts))
    except ShapeError as error:  # it was posted before its question was known
        logger.warning("run %s still waits: %s", run.run_id, error)
        run.give_up_claim(identity)
    except BaseException:
        run.give_up_claim(identity)
        raise
    else:
        run.notify(identity)


def _question_of(run: ActiveRun, answer: Answer) -> bytes | None:
    """Return the identity of the open question that a message answers."""
    for identity, question in run.run.state.questions.items():
        matches = answer.question in (None, identity.hex())
        if matches and facts_of(question).get("name") == answer.name and run.listens(identity):
            return identity
    return None


def _is_too_late(run: ActiveRun, answer: Answer) -> bool:
    """Return whether a message's question has ended: answered, perhaps by it, or timed out."""
    if answer.question is None:
        taken = (facts_of(entry).get("answer") for entry in run.run.state.answers.values())
        return answer.id in taken
    return bytes.fromhex(answer.question) in run.run.state.answers


def _fitted(run: ActiveRun, identity: bytes, answer: Answer) -> Json:
    """Return the value of an answer to this question; raise if it has not the required shape."""
    question = run.run.state.waits[identity]
    if answer.as_text:
        shape = facts_of(question).get("shape") or {}
        return answer_types.parse_words(shape, answer.value, f"the answer to {answer.name!r}")
    return fitting(question, answer.name, answer.value)


def fitting(question: Entry | None, name: str, value: Any) -> Json:
    """Return an answer as it is posted; raise if it has not the required shape.

    Without a question, it is checked when the question is asked.
    """
    shape = facts_of(question).get("shape") if question is not None else None
    path = f"the answer to {name!r}"
    if not shape:
        return codec.parse(codec.encode(value, path).data, path)
    plain = _plain(value)
    tree = codec.parse(codec.encode(plain, path).data, path)
    answer_types.check(shape, tree, path)
    return tree


def _plain(value: Any) -> Any:
    """Return a value as plain data, as it is given without its class."""
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
