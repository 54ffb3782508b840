"""Messages to runs: each is taken once, or refused in the transaction that sends it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import textwrap
import time
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.hive.driver import Driver
from maestro_hive.hive.hive import Hive
from maestro_hive.journal.entries import AnswerDropped, WaitEnded, WaitStarted
from maestro_hive.kernel.errors import AlreadyAnsweredError, ConfigurationError
from tests.hive.conftest import (
    asks,
    entries_of,
    hive_at,
    leave,
    quick_hive,
    recorded,
    status,
    store_of,
    until,
    until_recorded,
)
from tests.python_processes import PythonProcess

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tests.hive.conftest import PassedTime

QUESTIONS = 100


def waits_started(hive: Hive) -> int:
    return sum(isinstance(each, WaitStarted) for each in recorded(hive))


def messages_of(hive: Hive) -> list[str]:
    store = store_of(hive)
    return [each.kind for each in store.messages_of(store.find("r"))]


@dataclasses.dataclass
class Size:
    wide: int


def asking(hive: Hive, count: int = 1, name: str = "approve", **options: Any) -> Any:
    @hive.workflow(name="ask")
    async def ask() -> Any:
        return [await hive.wait_for(name, **options) for _ in range(count)]

    return ask


async def started(hive: Hive, workflow: Callable[..., Awaitable[Any]]) -> asyncio.Task[Any]:
    running = asyncio.create_task(hive.run(workflow, run_id="r"))
    await until(lambda: len(hive.runs()) == 1 and bool(hive.questions("r")))
    return running


# --- many at once, from several processes ---------------------------------------------------------

_PROGRAM = textwrap.dedent("""
    import asyncio, sys
    from maestro_hive.hive.hive import Hive

    hive = Hive(sys.argv[1])

    @hive.workflow
    async def ask(count):
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(hive.wait_for("approve", about=n)) for n in range(count)]
        return [each.result() for each in asked]

    print(hive.run_sync(ask, int(sys.argv[2]), run_id="r"))
""")

_SENDER = textwrap.dedent("""
    import json, random, sys, time
    from maestro_hive.hive.hive import Hive
    from maestro_hive.kernel.errors import ConfigurationError

    hive, me, start = Hive(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    questions = json.loads(open(sys.argv[4]).read())
    random.Random(7).shuffle(questions)
    time.sleep(max(0, start - time.time()))
    told = {}
    for each in questions:
        try:
            hive.answer("r", "approve", me, by=me, question=each)
        except ConfigurationError as error:
            told[each] = str(error)
        else:
            told[each] = "accepted"
    print(json.dumps(told))
""")


def test_of_answers_at_once_each_question_takes_one_and_all_others_are_refused(
    folder: Path,
) -> None:
    with Hive(folder) as hive, PythonProcess(_PROGRAM, folder, QUESTIONS, stderr=True) as program:

        def is_asked() -> bool:
            return len(hive.runs()) == 1 and len(hive.questions("r")) == QUESTIONS

        asyncio.run(until(is_asked))
        asked = folder.with_name("questions.json")  # a sender that starts late sees them all, too
        asked.write_text(json.dumps([each.id for each in hive.questions("r")]))
        start = time.time() + 1.0
        names = ("ann", "ann's script", "bob", "bob's script")
        senders = {name: PythonProcess(_SENDER, folder, name, start, asked) for name in names}
        told = {
            name: json.loads(each.communicate(timeout=120)[0]) for name, each in senders.items()
        }
        out, err = program.communicate(timeout=60)
        assert program.wait() == 0, (out, err)
        accepted = {
            question: [name for name in names if told[name][question] == "accepted"]
            for question in told["ann"]
        }
        assert len(accepted) == QUESTIONS
        assert {len(each) for each in accepted.values()} == {1}
        refusals = [text for each in told.values() for text in each.values() if text != "accepted"]
        assert len(refusals) == QUESTIONS * (len(names) - 1)
        assert all("has its answer to 'approve' already" in text for text in refusals)
        entries = [each for each in recorded(hive) if isinstance(each, WaitEnded)]
        assert {each.identity: [each.by] for each in entries} == accepted
        assert messages_of(hive) == []


# --- one answer, in the transaction that posts it -------------------------------------------------


def test_an_answer_that_was_taken_while_another_was_made_leaves_no_room_for_it(
    hive: Hive, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, store = asking(hive, 2), store_of(hive)
    posted = store.post

    async def until_the_second(value: str) -> None:
        running = await started(hive, asked)
        hive.answer("r", "approve", value, by="ann")
        await until(lambda: waits_started(hive) == 2)
        await leave(running)

    async def until_the_first() -> None:
        await leave(await started(hive, asked))

    def overtaken(*args: Any) -> bool:
        monkeypatch.undo()
        asyncio.run(until_the_second("first"))
        return posted(*args)

    asyncio.run(until_the_first())
    monkeypatch.setattr(store, "post", overtaken)
    with pytest.raises(AlreadyAnsweredError, match="answered by ann, with 'first'") as caught:
        hive.answer("r", "approve", "second")
    assert (caught.value.by, caught.value.value) == ("ann", "first")
    (left,) = hive.questions("r")  # the next one, which the answer was not made for
    with pytest.raises(AlreadyAnsweredError):
        hive.answer("r", "approve", "late", question=caught.value.question)
    hive.answer("r", "approve", "mine", question=left.id)
    assert hive.run_sync(asked, run_id="r") == ["first", "mine"]


def test_an_early_answer_that_is_sent_twice_answers_one_question(hive: Hive) -> None:
    gate = asyncio.Event()

    @hive.step
    async def work() -> None:
        await gate.wait()

    @hive.workflow
    async def later() -> list[Any]:
        await work()
        return [await hive.wait_for("n"), await hive.wait_for("n")]

    async def main() -> list[Any]:
        running = asyncio.create_task(hive.run(later, run_id="r"))
        await until(lambda: status(hive) == "running")
        hive.answer("r", "n", 1, early=True, by="ann")
        with pytest.raises(AlreadyAnsweredError, match="an early one waits for it by ann, with 1"):
            hive.answer("r", "n", 1, early=True)
        gate.set()
        await until(lambda: waits_started(hive) == 2)
        hive.answer("r", "n", 2, early=True)
        return await running

    assert asyncio.run(main()) == [1, 2]


def test_an_early_answer_is_that_of_the_question_from_the_moment_it_is_asked(folder: Path) -> None:
    """Also where the process that asks it is killed before it takes the answer."""
    with quick_hive(folder) as hive:
        gate = asyncio.Event()

        @hive.step
        async def work() -> None:
            await gate.wait()

        @hive.workflow
        async def later() -> Any:
            await work()
            return [await hive.wait_for("approve", type=Size) for _ in range(2)]

        async def first(monkeypatch: pytest.MonkeyPatch) -> None:
            monkeypatch.setattr(Driver, "answer", lambda *_: None)  # it takes no message
            running = asyncio.create_task(hive.run(later, run_id="r"))
            await until(lambda: status(hive) == "running")
            hive.answer("r", "approve", Size(3), early=True)
            gate.set()
            await until_recorded(hive, WaitStarted)
            await leave(running)

        with pytest.MonkeyPatch.context() as patch:
            asyncio.run(first(patch))
        assert hive.questions("r") == []
        with pytest.raises(AlreadyAnsweredError):
            hive.answer("r", "approve", Size(4))

        async def second() -> Any:
            running = asyncio.create_task(hive.run(later, run_id="r"))
            await until(lambda: waits_started(hive) == 2)
            hive.answer("r", "approve", {"wide": 5})
            return await running

        assert asyncio.run(second()) == [Size(3), Size(5)]


def test_a_message_is_recorded_and_removed_in_one_transaction(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with quick_hive(folder) as hive:
        asked, store = asking(hive), store_of(hive)

        async def main() -> None:
            running = await started(hive, asked)
            seen: list[tuple[bool, bool]] = []
            write = store.write

            def watched(*args: Any) -> Any:
                found = write(*args)
                is_recorded = any(isinstance(each, WaitEnded) for each in recorded(hive))
                seen.append((is_recorded, bool(messages_of(hive))))
                return found

            monkeypatch.setattr(store, "write", watched)
            hive.answer("r", "approve", 1)
            assert await running == [1]
            assert (True, False) in seen
            assert (True, True) not in seen

        asyncio.run(main())


def test_an_answer_that_came_in_time_is_taken_though_the_run_was_resumed_later(
    folder: Path, clock: PassedTime
) -> None:
    with hive_at(folder, clock) as hive:
        asked = asking(hive, timeout=60)

        async def first() -> None:
            await leave(await started(hive, asked))

        asyncio.run(first())
        hive.answer("r", "approve", "in time")
        clock.advance(61)
        assert hive.run_sync(asked, run_id="r") == ["in time"]


def test_an_answer_after_the_time_of_its_question_is_refused(
    folder: Path, clock: PassedTime
) -> None:
    with hive_at(folder, clock) as hive:
        asked = asking(hive, timeout=60)

        async def first() -> None:
            await leave(await started(hive, asked))

        asyncio.run(first())
        clock.advance(61)
        with pytest.raises(ConfigurationError, match=r"the time to answer 'approve'.*is over"):
            hive.answer("r", "approve", "late")


def test_of_several_open_questions_of_a_name_one_must_be_named(hive: Hive) -> None:
    @hive.workflow
    async def ask() -> Any:
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(hive.wait_for("approve")) for _ in range(2)]
        return [each.result() for each in asked]

    async def main() -> Any:
        running = asyncio.create_task(hive.run(ask, run_id="r"))
        await until(lambda: len(hive.runs()) == 1 and len(hive.questions("r")) == 2)
        one, two = hive.questions("r")
        with pytest.raises(
            ConfigurationError, match=f"asks 'approve' 2 times.*{re.escape(one.id)}"
        ):
            hive.answer("r", "approve", "x")
        with pytest.raises(ConfigurationError, match=f"no question 'beef'.*{re.escape(one.id)}"):
            hive.answer("r", "approve", "x", question="beef")
        hive.answer("r", "approve", "two", question=two.id)
        hive.answer("r", "approve", "one")  # the only one that is left
        return await running

    assert asyncio.run(main()) == ["one", "two"]


def test_an_answer_after_the_question_says_what_the_answer_was(hive: Hive) -> None:
    @hive.workflow
    async def ask() -> None:
        await hive.wait_for("approve")
        await hive.wait_for("other")

    async def main() -> None:
        running = asyncio.create_task(hive.run(ask, run_id="r"))
        await until(lambda: len(hive.runs()) == 1 and bool(hive.questions("r")))
        (asked,) = hive.questions("r")
        hive.answer("r", "approve", "yes", by="ann")
        await until_recorded(hive, WaitEnded)
        with pytest.raises(ConfigurationError, match="last one was answered by ann with 'yes'"):
            hive.answer("r", "approve", "no")
        with pytest.raises(
            AlreadyAnsweredError, match=f"question {re.escape(asked.id)} was answered by ann"
        ):
            hive.answer("r", "approve", "no", question=asked.id)
        await leave(running)

    asyncio.run(main())


def test_a_request_to_cancel_is_refused_once_the_run_has_ended(hive: Hive) -> None:
    asked = asking(hive)

    async def main() -> None:
        running = await started(hive, asked)
        hive.answer("r", "approve", 1)
        assert await running == [1]

    asyncio.run(main())
    assert not store_of(hive).send("r", "cancel", "late")
    assert not hive.cancel("r")
    assert messages_of(hive) == []


def test_an_answer_to_a_question_that_no_longer_exists_is_shown_as_not_taken(folder: Path) -> None:
    async def first(hive: Hive) -> None:
        await leave(await started(hive, asking(hive)))

    async def changed(hive: Hive) -> None:
        @hive.workflow(name="ask")
        async def ask() -> Any:
            return await hive.wait_for("agree")

        running = asyncio.create_task(hive.run(ask, run_id="r"))
        await until(lambda: asks(hive) == ["agree"])
        hive.answer("r", "agree", "no")
        assert await running == "no"
        (dropped,) = [e for e in await entries_of(hive) if isinstance(e, AnswerDropped)]
        assert dropped.text() == (
            "the answer to approve by ann was not taken: the run has ended without its question"
        )

    with quick_hive(folder) as hive:
        asyncio.run(first(hive))
        hive.answer("r", "approve", "yes", by="ann")
    with quick_hive(folder) as hive:
        asyncio.run(changed(hive))
        assert messages_of(hive) == []
