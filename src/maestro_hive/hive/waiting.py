"""Waits of a workflow that outlive its process: a sleep, and a question that somebody answers."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from enum import Enum
from typing import TYPE_CHECKING, Any

from maestro_hive.hive import run_entries as entries
from maestro_hive.hive import shapes
from maestro_hive.hive.live_run import live_run
from maestro_hive.hive.shapes import ShapeError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.lowering import Model
from maestro_hive.maestro.state.run_state import facts_of
from maestro_hive.unified_execution import settings
from maestro_hive.unified_execution.waits import Wait

if TYPE_CHECKING:
    from maestro_hive.hive.live_run import LiveRun
    from maestro_hive.hive.mail import Answer, Mail
    from maestro_hive.maestro.state.codec import Json
    from maestro_hive.maestro.state.records import Entry


logger = logging.getLogger(__name__)


async def sleep(seconds: float) -> None:
    """Return when so many seconds are over, those before a restart included."""
    run = live_run("hive.sleep()")
    length = settings.number(0)("the seconds to sleep", seconds)
    identity = run.told_apart("sleep", repr(float(length)))
    state, clock = run.held.state, run.held.store.clock
    if identity in state.answers:
        return
    begun = state.waits.get(identity)
    if begun is None:
        wait = Wait.begin(clock, float(length))
        new = entries.wait_begun(identity, "sleep", entries.SLEEP, wait=wait.to_facts())
        await run.record(new)
    else:
        wait = Wait.from_facts(facts_of(begun)["wait"])
    await run.owning(lambda: wait.over(clock))
    await run.record(entries.wait_ended(identity, "sleep", "over"), sync=False)


async def wait_for(name: str, within: float | None, expected: Any) -> Any:
    """Return the answer to a question; raise TimeoutError if it does not come in time."""
    run = live_run("hive.wait_for()")
    question: object = name
    if not isinstance(question, str) or not question:
        raise settings.refused("the name of what is waited for", name, "a text that is not empty")
    shape = shapes.shape_of(expected)
    limit = None if within is None else settings.number(0)("the timeout", within)
    identity = run.told_apart("wait", name)
    ended = run.held.state.answers.get(identity)
    if ended is None:
        wait = await _ask(run, identity, name, limit, shape)
        ended = await run.owning(lambda: _answered(run, identity, name, wait))
    if facts_of(ended).get("how") == "timeout":
        raise TimeoutError(f"nobody answered {name!r} of run {run.run_id!r} in time")
    data = run.held.store.load(ended)
    value = None if data is None else codec.decode(data, f"the answer to {name}")
    return shapes.build(expected, value)


async def _ask(
    run: LiveRun, identity: bytes, name: str, limit: float | None, shape: Any
) -> Wait | None:
    """Record the question, unless it was asked before; return how long to wait at most."""
    begun = run.held.state.waits.get(identity)
    if begun is not None:
        kept = facts_of(begun).get("wait")
        return None if kept is None else Wait.from_facts(kept)
    wait = None if limit is None else Wait.begin(run.held.store.clock, float(limit))
    told = None if wait is None else wait.to_facts()
    await run.record(entries.wait_begun(identity, name, entries.ANSWER, wait=told, shape=shape))
    return wait


async def _answered(run: LiveRun, identity: bytes, name: str, wait: Wait | None) -> Entry:
    """Return the entry that says how the wait ended; whoever brings an answer has written it."""
    arrived = run.questions[identity] = run.loop.create_future()
    timer = asyncio.create_task(wait.over(run.held.store.clock)) if wait is not None else None
    run.look_for_letters()
    try:
        await asyncio.wait({arrived, timer} if timer else {arrived}, return_when="FIRST_COMPLETED")
        if arrived.done():
            arrived.result()  # or the error that kept it away
        if identity not in run.held.state.answers:
            await run.record(entries.wait_ended(identity, name, "timeout"))
    finally:
        del run.questions[identity]
        if timer is not None:
            timer.cancel()
    return run.held.state.answers[identity]


# --- from the other side -------------------------------------------------------------------------


async def deliver(run: LiveRun, mail: Mail, answers: list[Answer]) -> None:
    """Record the answers that a run waits for, and throw those letters away."""
    taken = {facts_of(entry).get("answer") for entry in run.held.state.answers.values()}
    for answer in answers:
        if answer.id in taken:  # recorded by a process that died before it threw the letter away
            mail.taken(run.run_id, answer.id)
            continue
        identity = _oldest_question(run, answer.name)
        if identity is None:
            continue  # it may be asked later
        try:
            tree = _fitted(run, identity, answer)
        except ShapeError as error:  # it came before its question
            logger.warning("run %s still waits: %s", run.run_id, error)
            mail.taken(run.run_id, answer.id)
            continue
        value = codec.encoded(codec.dump_canonical(tree))
        ended = entries.wait_ended(
            identity, answer.name, "answered", value, answer=answer.id, by=answer.by
        )
        await run.record(ended)
        mail.taken(run.run_id, answer.id)
        waiter = run.questions.get(identity)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def _fitted(run: LiveRun, identity: bytes, answer: Answer) -> Json:
    """Return what an answer says to this question; raise if it is not of the right kind."""
    question = run.held.state.waits[identity]
    if answer.words:
        shape = facts_of(question).get("shape") or {}
        return shapes.parse_words(shape, answer.value, f"the answer to {answer.name!r}")
    return fitting(question, answer.name, answer.value)


def _oldest_question(run: LiveRun, name: str) -> bytes | None:
    state = run.held.state
    for identity in state.waits:
        asked = facts_of(state.waits[identity])
        is_open = identity not in state.answers and identity in run.questions
        if is_open and asked.get("what") == entries.ANSWER and asked.get("name") == name:
            return identity
    return None


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
