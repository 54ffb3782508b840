"""Durable sleeps, and questions that somebody answers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

import pytest

from maestro_hive.hive.answer_types import ShapeError
from maestro_hive.journal.entries import WaitEnded, WaitStarted
from maestro_hive.kernel.errors import (
    ConfigurationError,
    CorruptionError,
    OutsideRunError,
    RunFailedError,
    UnknownRunError,
)
from tests.hive.conftest import (
    asks,
    hive_at,
    leave,
    quick_hive,
    recorded,
    status,
    store_of,
    until,
    until_recorded,
)
from tests.timing import least

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from maestro_hive.hive.hive import Hive
    from tests.hive.conftest import PassedTime


def waits_started(hive: Hive) -> int:
    return sum(isinstance(each, WaitStarted) for each in recorded(hive))


class Verdict(Enum):
    YES = "yes"
    NO = "no"


@dataclass(frozen=True)
class Approval:
    amount: float
    note: str = ""


def test_a_run_sleeps_once_and_only_for_what_is_left(folder: Path, clock: PassedTime) -> None:
    starts: list[str] = []

    def sleeper(hive: Hive) -> Callable[..., Awaitable[str]]:
        @hive.workflow
        async def nap() -> str:
            starts.append("nap")
            await hive.sleep(3600)
            return "awake"

        return nap

    async def first() -> None:
        with hive_at(folder, clock) as hive:
            running = asyncio.create_task(hive.run(sleeper(hive), run_id="r"))
            await until(lambda: starts)
            clock.advance(3000)
            await leave(running)
            assert status(hive) == "stopped"

    async def second() -> None:
        with hive_at(folder, clock) as hive:
            nap = sleeper(hive)
            running = asyncio.create_task(hive.run(nap, run_id="r"))
            await until(lambda: len(starts) == 2)
            clock.advance(500)
            await asyncio.sleep(0.1)
            assert not running.done()
            clock.advance(100)
            assert await running == "awake"
            assert await hive.run(nap, run_id="r") == "awake"

    clock.run(first())
    clock.run(second())


def test_sleeps_of_equal_length_are_different_sleeps(hive: Hive) -> None:
    @hive.workflow
    async def naps() -> None:
        await asyncio.gather(hive.sleep(0.1), hive.sleep(0.1))
        await hive.sleep(0.1)

    started = time.monotonic()
    hive.run_sync(naps)
    assert time.monotonic() - started >= 0.2


def test_a_sleep_whose_end_is_past_is_over_at_once(hive: Hive) -> None:
    @hive.workflow
    async def nap() -> str:
        await hive.sleep(-0.001)
        return "awake"

    assert hive.run_sync(nap) == "awake"


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), "long"])
def test_a_sleep_that_is_no_number_is_refused(hive: Hive, seconds: Any) -> None:
    @hive.workflow
    async def nap() -> None:
        await hive.sleep(seconds)

    with pytest.raises(RunFailedError, match="the seconds to sleep"):
        hive.run_sync(nap)


def ask(hive: Hive, name: str = "approve", **options: Any) -> Callable[..., Awaitable[Any]]:
    @hive.workflow(name="ask")
    async def asking() -> Any:
        return await hive.wait_for(name, **options)

    return asking


@pytest.mark.timing
def test_an_answer_in_the_same_process_arrives_at_once(hive: Hive) -> None:
    asking, names = ask(hive), iter("abcde")

    async def seconds(run_id: str) -> float:
        running = asyncio.create_task(hive.run(asking, run_id=run_id))
        await until(lambda: asks(hive, run_id))
        hive.answer(run_id, "approve", {"by": "me"})
        answered = time.monotonic()
        assert await running == {"by": "me"}
        return time.monotonic() - answered

    assert least(lambda: asyncio.run(seconds(next(names))), 0.15) < 0.15
    assert status(hive, "a") == "success"


def test_a_waiting_run_can_be_left_and_answered_while_no_process_runs_it(folder: Path) -> None:
    async def first() -> None:
        with quick_hive(folder) as hive:
            running = asyncio.create_task(hive.run(ask(hive), run_id="r"))
            await until(lambda: asks(hive))
            await leave(running)

    asyncio.run(first())
    with quick_hive(folder) as hive:
        assert asks(hive) == ["approve"]
        hive.answer("r", "approve", 7)
    with quick_hive(folder) as hive:
        asking = ask(hive)
        assert hive.run_sync(asking, run_id="r") == 7
        assert hive.run_sync(asking, run_id="r") == 7


def test_an_answer_may_come_before_the_question(hive: Hive) -> None:
    gate = asyncio.Event()

    @hive.step
    async def work() -> None:
        await gate.wait()

    @hive.workflow
    async def later() -> Any:
        await work()
        return [await hive.wait_for("n"), await hive.wait_for("n"), await hive.wait_for("m")]

    async def main() -> Any:
        running = asyncio.create_task(hive.run(later, run_id="r"))
        await until(lambda: status(hive) == "running")
        for name, value in [("n", 1), ("m", 3)]:
            hive.answer("r", name, value, early=True)
        gate.set()
        await until(lambda: waits_started(hive) == 2)
        hive.answer("r", "n", 2, early=True)
        return await running

    assert asyncio.run(main()) == [1, 2, 3]


def test_nobody_answering_in_time_is_a_timeout_that_is_stored(folder: Path) -> None:
    outcomes = []

    def impatient(hive: Hive, seconds: float) -> Callable[..., Awaitable[str]]:
        @hive.workflow
        async def asking() -> str:
            try:
                return str(await hive.wait_for("approve", timeout=seconds))
            except TimeoutError as error:
                outcomes.append(str(error))
            await hive.wait_for("more")
            return "never"

        return asking

    async def once(seconds: float) -> None:
        with quick_hive(folder) as hive:
            before = len(outcomes)
            running = asyncio.create_task(hive.run(impatient(hive, seconds), run_id="r"))
            await until(lambda: len(outcomes) > before)
            await leave(running)

    asyncio.run(once(0.2))
    asyncio.run(once(3600))  # it does not wait again
    assert outcomes == ["there was no answer to 'approve' of run 'r' in time"] * 2


TYPED: list[tuple[Any, Any, Any]] = [
    (bool, True, "maybe"),
    (int, 3, True),
    (str, "x", 3),
    (Verdict, "YES", "PERHAPS"),
    (Literal["a", "b"], "a", "c"),
    (Approval, {"amount": 3.5}, {"amount": "much"}),
    (list[int], [1, 2], [1, "x"]),
]


@pytest.mark.parametrize("kind, good, bad", TYPED, ids=[str(each[0]) for each in TYPED])
def test_an_answer_of_another_kind_is_refused_where_it_is_given(
    hive: Hive, kind: Any, good: Any, bad: Any
) -> None:
    async def main() -> Any:
        running = asyncio.create_task(hive.run(ask(hive, type=kind), run_id="r"))
        await until(lambda: asks(hive))
        with pytest.raises(ShapeError, match="the answer to 'approve'"):
            hive.answer("r", "approve", bad)
        assert asks(hive) == ["approve"]
        hive.answer("r", "approve", good)
        return await running

    result = asyncio.run(main())
    if kind is Verdict:
        assert result is Verdict.YES
    elif kind is Approval:
        assert result == Approval(3.5)
    else:
        assert result == good


@pytest.mark.parametrize("value", [Verdict.NO, "NO", "no"])
def test_a_member_of_an_enum_is_answered_as_itself_or_by_name_or_value(
    hive: Hive, value: Any
) -> None:
    async def main() -> Any:
        running = asyncio.create_task(hive.run(ask(hive, type=Verdict), run_id="r"))
        await until(lambda: asks(hive))
        hive.answer("r", "approve", value)
        return await running

    assert asyncio.run(main()) is Verdict.NO


def test_an_early_answer_of_the_wrong_kind_is_dropped_out_loud(
    hive: Hive, caplog: pytest.LogCaptureFixture
) -> None:
    gate = asyncio.Event()

    @hive.step
    async def work() -> None:
        await gate.wait()

    @hive.workflow
    async def later() -> Any:
        await work()
        return await hive.wait_for("n", type=int)

    async def main() -> Any:
        running = asyncio.create_task(hive.run(later, run_id="r"))
        await until(lambda: status(hive) == "running")
        hive.answer("r", "n", "many", early=True)
        gate.set()
        await until(lambda: bool(caplog.records))
        hive.answer("r", "n", 5)
        return await running

    assert asyncio.run(main()) == 5
    assert "still waits: the answer to 'n' is 'many'" in caplog.text


def test_an_answer_to_no_run_or_to_one_that_is_over_is_refused(hive: Hive) -> None:
    @hive.workflow
    async def quick() -> None: ...

    hive.run_sync(quick, run_id="r")
    with pytest.raises(UnknownRunError, match="'nobody'"):
        hive.answer("nobody", "approve")
    with pytest.raises(ConfigurationError, match="has ended"):
        hive.answer("r", "approve")


def test_sleep_and_wait_outside_a_workflow_say_so(hive: Hive) -> None:
    with pytest.raises(OutsideRunError, match=r"hive\.sleep\(\) is called outside of a workflow"):
        asyncio.run(hive.sleep(1))
    with pytest.raises(OutsideRunError, match=r"hive\.wait_for\(\)"):
        asyncio.run(hive.wait_for("x"))


def test_many_waits_hold_no_thread(hive: Hive) -> None:
    before = threading.active_count()

    @hive.workflow
    async def many() -> list[Any]:
        return await asyncio.gather(*(hive.wait_for(f"q{number}") for number in range(60)))

    async def main() -> list[Any]:
        running = asyncio.create_task(hive.run(many, run_id="r"))
        await until(lambda: asks(hive))
        await until(lambda: len(asks(hive)) == 60)
        await asyncio.sleep(0.3)
        assert threading.active_count() < before + 20
        for number in range(60):
            hive.answer("r", f"q{number}", number)
        return await running

    assert asyncio.run(main()) == list(range(60))


# --- one question, one answer ---------------------------------------------------------------------


def test_a_second_answer_to_one_question_does_not_answer_the_next(hive: Hive) -> None:
    @hive.workflow
    async def spend() -> list[str]:
        return [what for what in ("rent", "yacht") if await hive.wait_for("approve", type=bool)]

    async def main() -> Any:
        running = asyncio.create_task(hive.run(spend, run_id="r"))
        await until(lambda: asks(hive))
        hive.answer("r", "approve", True)
        with pytest.raises(ConfigurationError, match="has its answer to 'approve' already"):
            hive.answer("r", "approve", True)
        await until(lambda: waits_started(hive) == 2)
        await asyncio.sleep(0.3)
        assert asks(hive) == ["approve"]  # the second one
        hive.answer("r", "approve", False)
        return await running

    assert asyncio.run(main()) == ["rent"]


def test_an_answer_that_is_not_waited_for_needs_to_be_called_early(hive: Hive) -> None:
    async def main() -> None:
        running = asyncio.create_task(hive.run(ask(hive), run_id="r"))
        await until(lambda: asks(hive))
        with pytest.raises(ConfigurationError, match="does not wait for 'colour'; it waits for"):
            hive.answer("r", "colour", 1)
        await leave(running)

    asyncio.run(main())


def test_a_question_that_timed_out_is_asked_again_after_a_retry(
    folder: Path, clock: PassedTime
) -> None:
    async def unanswered(hive: Hive) -> None:
        running = asyncio.create_task(hive.run(ask(hive, timeout=60), run_id="r"))
        await until(lambda: asks(hive))
        clock.advance(60)
        await running

    async def answered(hive: Hive) -> Any:
        running = asyncio.create_task(hive.run(ask(hive, timeout=60), run_id="r"))
        await until(lambda: asks(hive))
        clock.advance(59)
        hive.answer("r", "approve", "yes")
        return await running

    with hive_at(folder, clock) as hive:
        with pytest.raises(RunFailedError, match="in time"):
            clock.run(unanswered(hive))
        hive.retry("r")
        assert clock.run(answered(hive)) == "yes"


def test_the_workflow_is_told_what_the_journal_says_when_an_answer_comes_in_the_last_moment(
    hive: Hive,
) -> None:
    @hive.workflow
    async def close_call() -> str:
        try:
            return str(await hive.wait_for("approve", timeout=0.05))
        except TimeoutError:
            return "timeout"

    async def one(number: int) -> None:
        run_id = f"r{number}"
        running = asyncio.create_task(hive.run(close_call, run_id=run_id))
        await until(lambda: asks(hive, run_id) or status(hive, run_id) == "success")
        await asyncio.sleep(0.02 + number % 10 * 0.005)
        with contextlib.suppress(ConfigurationError):  # it is over already
            hive.answer(run_id, "approve", "yes")
        result = await running
        answered = [each for each in recorded(hive, run_id) if isinstance(each, WaitEnded)]
        assert result == ("yes" if answered else "timeout")

    async def main() -> None:
        for first in range(0, 40, 10):
            await asyncio.gather(*(one(first + each) for each in range(10)))

    asyncio.run(main())


def test_an_answer_given_before_a_failure_is_taken_after_the_retry(hive: Hive) -> None:
    broken = [True]
    go = asyncio.Event()

    @hive.step(max_attempts=1)
    async def first() -> None:
        await go.wait()
        if broken:
            raise ValueError("no")

    @hive.workflow
    async def work() -> Any:
        await first()
        return await hive.wait_for("approve", type=str)

    async def main() -> None:
        running = asyncio.create_task(hive.run(work, run_id="r"))
        await until(lambda: status(hive) == "running")
        hive.answer("r", "approve", "yes", early=True)
        go.set()
        with pytest.raises(RunFailedError):
            await running

    asyncio.run(main())
    broken.clear()
    hive.retry("r")
    assert hive.run_sync(work, run_id="r") == "yes"


@pytest.mark.parametrize("answered", [False, True])
def test_a_question_whose_type_has_changed_is_asked_again(folder: Path, answered: bool) -> None:
    async def first() -> None:
        with quick_hive(folder) as hive:

            @hive.workflow(name="ask")
            async def asking() -> None:
                await hive.wait_for("approve", type=bool)
                await hive.sleep(60)

            running = asyncio.create_task(hive.run(asking, run_id="r"))
            await until(lambda: asks(hive))
            if answered:
                hive.answer("r", "approve", True)
                await until_recorded(hive, WaitEnded)
            await leave(running)

    async def second() -> Any:
        with quick_hive(folder) as hive:
            before = waits_started(hive)
            running = asyncio.create_task(hive.run(ask(hive, type=str), run_id="r"))
            await until(lambda: waits_started(hive) > before)
            hive.answer("r", "approve", "in words")
            return await running

    asyncio.run(first())
    assert asyncio.run(second()) == "in words"


def test_messages_that_cannot_be_read_are_an_error_of_their_run_alone(hive: Hive) -> None:
    async def main() -> Any:
        asking = ask(hive)
        running = asyncio.create_task(hive.run(asking, run_id="r"))
        other = asyncio.create_task(hive.run(asking, run_id="other"))
        await until(lambda: asks(hive, "other"))
        (asked,) = hive.questions("other")
        store_of(hive).send("other", "answer", asked.id, b"{}")
        with pytest.raises(CorruptionError, match="a message to a run is no answer"):
            await other
        await until(lambda: asks(hive))
        hive.answer("r", "approve", 5)
        return await running

    assert asyncio.run(main()) == 5


def test_a_timeout_in_the_body_of_a_step_holds_for_all_attempts(hive: Hive) -> None:
    ended: list[str] = []

    @hive.step(max_attempts=2)
    async def body() -> None:
        try:
            async with hive.timeout(0.02):
                await asyncio.sleep(30)
        except BaseException as error:
            ended.append(type(error).__name__)
            raise

    @hive.workflow
    async def work() -> str:
        try:
            await body()
        except TimeoutError:
            return "in time"
        return "late"

    assert hive.run_sync(work) == "in time"
    assert ended == ["TimeoutError", "TimeoutError"]
