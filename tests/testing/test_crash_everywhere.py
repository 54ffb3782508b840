"""A workflow that is killed after each of its records, next to the same one left alone."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import Hive
from maestro_hive.testing import CrashDifferenceError, UnansweredError, crash_everywhere, use

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maestro_hive.testing import Kit

hive = Hive("never-made")


class OutOfStockError(Exception):
    """An error of the user's own."""


@hive.step
async def double(value: Any) -> Any:
    return value * 2


@hive.step
def weigh(number: int) -> int:
    time.sleep(0.001 * (3 - number))  # the first of three is the last to end
    return number


@hive.step(max_attempts=2)
async def reserve(sku: str) -> str:
    raise OutOfStockError(sku)


@hive.step(on_ambiguous="ask")
async def pay(cents: int) -> str:
    return f"paid {cents}"


@hive.workflow
async def child(number: int) -> int:
    await hive.sleep(3600 * number)
    return int(await double(number))


@pytest.fixture
def kit() -> Iterator[Kit]:
    with use(hive) as made:
        yield made


# --- workflows that are right ---


@hive.workflow
async def everything(count: int) -> dict[str, Any]:
    started = hive.now()
    found: dict[str, Any] = {}
    found["gather"] = await asyncio.gather(*map(weigh, range(count)), double("a"), child(1))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(child(number)) for number in (2, 3)]
    found["group"] = [task.result() for task in tasks]
    try:
        await reserve("lamp")
    except OutOfStockError as error:
        found["caught"] = repr(error)
    found["approved"] = await hive.wait_for("approve", timeout=86_400, type=bool)
    try:
        await hive.wait_for("nobody", timeout=86_400)
    except TimeoutError:
        found["late"] = True
    try:
        async with hive.timeout(60):
            await hive.sleep(61)
    except TimeoutError:
        found["limited"] = True
    found["dice"] = [hive.random(), hive.uuid()]
    found["paid"] = await pay(5)
    found["took"] = hive.now() - started
    return found


def test_a_workflow_that_is_right_passes(kit: Kit) -> None:
    kit.answer("approve", True)
    report = kit.crash_everywhere(everything, 3)
    assert report.records > 40
    assert report.calls == 3 + 1 + 1 + 2 + 1 + 1
    assert report.result["group"] == [4, 6]
    assert report.result["approved"] is True
    assert report.error is None


def test_a_workflow_that_fails_fails_with_the_same_error(kit: Kit) -> None:
    @hive.workflow(name="fails")
    async def fails() -> None:
        await double(1)
        await reserve("lamp")

    report = kit.crash_everywhere(fails)
    assert report.error == "OutOfStockError: lamp"
    assert report.calls == 2


def test_it_has_a_kit_of_its_own_where_there_is_none() -> None:
    assert crash_everywhere(child, 2).result == 4


def test_it_leaves_a_kit_as_an_undisturbed_run_does(kit: Kit) -> None:
    kit.run(child, 1, run_id="before")
    with kit.replace(double, returns=7) as stand_in:
        kit.crash_everywhere(child, 2)
        assert [call.arguments["value"] for call in stand_in.calls] == [2]
    assert [run.run_id for run in hive.runs()] == ["before"]
    assert len(kit.calls) == 2


def test_failures_that_were_asked_for_happen_in_each_life(kit: Kit) -> None:
    kit.fail(double, ConnectionError("down"), call=1)
    assert kit.crash_everywhere(child, 1).result == 2


def test_an_answer_is_given_in_each_life(kit: Kit) -> None:
    @hive.workflow(name="asks")
    async def asks() -> list[str]:
        return [await hive.wait_for("name", type=str) for _ in range(2)]

    kit.answer("name", "Ada")
    kit.answer("name", "Grace")
    assert kit.crash_everywhere(asks).result == ["Ada", "Grace"]
    with pytest.raises(UnansweredError, match="'name'"):
        kit.crash_everywhere(asks)


def test_a_step_may_call_a_step(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    @hive.step(name="quadruple")
    async def quadruple(value: int) -> int:
        return int(await double(await double(value)))

    @hive.workflow(name="nested")
    async def nested() -> list[int]:
        return list(await asyncio.gather(quadruple(1), quadruple(2)))

    # None of them waits for the other: it would do so for ever.
    monkeypatch.setattr("maestro_hive.testing.clock._HOLD_CHECKS", 1_000_000)
    assert kit.crash_everywhere(nested).result == [4, 8]


def test_the_order_is_the_same_where_the_process_stalls(kit: Kit) -> None:
    stalled = threading.Event()

    @hive.step(name="in_thread")
    def in_thread() -> str:
        assert stalled.wait(30)
        time.sleep(0.02)  # it was as late as all of the process
        return "first"

    @hive.step(name="at_once")
    async def at_once() -> str:
        return "second"

    @hive.workflow(name="stalls")
    async def stalls() -> list[str]:
        order: list[str] = []

        async def note(step: Any) -> None:
            order.append(await step())

        async def stall() -> None:
            for _ in range(20):
                await asyncio.sleep(0)
            if not stalled.is_set():
                time.sleep(0.4)  # noqa: ASYNC251 - so that all of the loop stalls
            stalled.set()

        await asyncio.gather(note(in_thread), note(at_once), stall())
        return order

    report = kit.crash_everywhere(stalls, vary_order=False)
    assert report.result == ["first", "second"]


def test_a_race_may_depend_on_the_order_if_it_says_so(kit: Kit) -> None:
    @hive.workflow(name="race")
    async def race() -> int:
        tasks = [asyncio.create_task(weigh(number)) for number in range(3)]
        done, rest = await asyncio.wait(tasks, return_when="FIRST_COMPLETED")
        for task in rest:
            task.cancel()
        return done.pop().result()

    assert kit.crash_everywhere(race, vary_order=False).result == 0


# --- workflows that are not ---


def difference(kit: Kit, workflow: Any, *args: Any) -> CrashDifferenceError:
    with pytest.raises(CrashDifferenceError) as caught:
        kit.crash_everywhere(workflow, *args)
    return caught.value


def test_the_time_of_the_machine_is_found(kit: Kit) -> None:
    @hive.workflow(name="reads_the_clock")
    async def reads_the_clock() -> Any:
        await double(1)
        return await double(time.time())

    found = difference(kit, reads_the_clock)
    assert any("it called double(value=" in each for each in found.differences)
    assert "killed after record 1 of 6 (workflow reads_the_clock started)" in str(found)
    assert "undisturbed" in str(found)


def test_dice_that_are_not_recorded_are_found_with_the_record_and_the_call(kit: Kit) -> None:
    rolled = iter(range(1000))

    @hive.workflow(name="rolls")
    async def rolls() -> Any:
        first = await double(2)
        return await double([first, next(rolled) if first else 0])

    found = difference(kit, rolls)
    assert found.record == 1
    assert found.differences[0] == "it called double(value=[4, 1]), which is not called undisturbed"
    assert found.differences[1].startswith("it did not call double(value=[4, 0])")


def test_a_sleep_of_random_length_is_found(kit: Kit) -> None:
    @hive.workflow(name="sleeps_at_random")
    async def sleeps_at_random() -> int:
        await double(1)
        await hive.sleep(random.random() * 100)
        return 1

    found = difference(kit, sleeps_at_random)
    assert any("did not ask again for sleep" in each for each in found.differences)


def test_an_order_of_arrival_is_found(kit: Kit) -> None:
    @hive.workflow(name="by_arrival")
    async def by_arrival() -> Any:
        found: dict[int, int] = {}

        async def one(number: int) -> None:
            found[number] = await weigh(number)

        await asyncio.gather(*map(one, range(3)))
        return await double([*found])

    assert any("[2, 1, 0]" in each for each in difference(kit, by_arrival).differences)


def test_state_outside_of_the_journal_is_found(kit: Kit) -> None:
    seen: list[int] = []

    @hive.workflow(name="remembers")
    async def remembers() -> int:
        seen.append(await double(1))
        return len(seen)

    found = difference(kit, remembers)
    assert found.differences == ["it returned 2; undisturbed, it returned 1"]


def test_a_workflow_that_cannot_be_resumed_is_found(kit: Kit) -> None:
    started: list[int] = []

    @hive.workflow(name="once")
    async def once() -> int:
        started.append(1)
        if len(started) > 1:
            raise OutOfStockError("the second start")
        return int(await double(1))

    found = difference(kit, once)
    assert "it raised OutOfStockError: the second start" in found.differences[-1]
