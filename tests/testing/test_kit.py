"""A kit: a Hive in memory, time that skips, stand-ins, early answers, failures and kills."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
import uvloop

from maestro_hive import ExecutionConfig, Hive, RunFailedError, current
from maestro_hive.hive import runs
from maestro_hive.kernel.errors import ConfigurationError, MaestroError
from maestro_hive.maestro.state.records import NewDispatch
from maestro_hive.maestro.state.store import NewRun
from maestro_hive.testing import UnansweredError, use
from maestro_hive.unified_execution import Level1Config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from maestro_hive.testing import Kit

shop = Hive("never-made")
effects: list[str] = []


@shop.step
async def charge(order: str, cents: int) -> str:
    effects.append(f"charge {order} {cents}")
    return f"receipt of {order}"


@shop.step
def pack(order: str, *, fragile: bool = False) -> str:
    effects.append(f"pack {order}")
    return f"parcel {order}"


@shop.workflow
async def buy(order: str) -> list[str]:
    receipt = await charge(order, 900)
    return [receipt, await pack(order)]


@shop.workflow
async def approved(order: str) -> str:
    try:
        ok = await shop.wait_for("approve", timeout=7 * 86_400, type=bool, about=order)
    except TimeoutError:
        return "too late"
    return await charge(order, 1) if ok else "refused"


@shop.workflow
async def overnight(order: str) -> str:
    start = shop.now()
    await shop.sleep(8 * 3600)
    return f"{order} after {shop.now() - start}"


@pytest.fixture(autouse=True)
def no_effects() -> None:
    effects.clear()


@pytest.fixture
def kit() -> Iterator[Kit]:
    with use(shop) as made:
        yield made


# --- a hive in memory ---


def test_a_hive_that_exists_works_in_memory_and_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hive = Hive(tmp_path / "state")

    @hive.workflow
    async def nothing() -> int:
        return 1

    config = hive.config
    with use(hive) as kit:
        assert hive.run_sync(nothing, run_id="one") == 1
        assert [run.run_id for run in hive.runs()] == ["one"]
        assert kit.hive is hive
    assert list(tmp_path.iterdir()) == []
    assert hive.config is config
    with hive:
        assert hive.runs() == []


def test_a_kit_without_a_hive_runs_the_workflows_of_any() -> None:
    with use() as kit:
        assert kit.run(buy, "a") == ["receipt of a", "parcel a"]
        assert kit.hive is not shop


def test_two_hives_share_one_store() -> None:
    other = Hive("another")
    with use(shop, other):
        shop.run_sync(buy, "a", run_id="one")
        assert [run.run_id for run in other.runs()] == ["one"]


def test_a_hive_is_used_by_one_kit_at_a_time(kit: Kit) -> None:
    with pytest.raises(ConfigurationError, match="another kit"), use(shop):
        pass


def test_kits_do_not_see_each_others_runs() -> None:
    for _ in range(2):
        with use(shop) as kit:
            assert kit.run(buy, "a", run_id="same")
            assert len(kit.calls) == 2


async def _run_beside(kit: Kit) -> list[str]:
    return await kit.hive.run(buy, "a")


def test_an_async_test_awaits_the_hive_itself(kit: Kit) -> None:
    assert asyncio.run(_run_beside(kit)) == ["receipt of a", "parcel a"]


def test_kit_run_refuses_a_running_loop_and_says_what_to_do(kit: Kit) -> None:
    async def refused() -> None:
        kit.run(buy, "a")

    async def in_a_thread() -> list[str]:
        return await asyncio.to_thread(kit.run, buy, "a")

    with pytest.raises(ConfigurationError, match="to_thread"):
        asyncio.run(refused())
    assert asyncio.run(in_a_thread()) == ["receipt of a", "parcel a"]


# --- time ---


def test_eight_hours_take_no_time(kit: Kit) -> None:
    started = time.monotonic()
    assert kit.run(overnight, "a") == "a after 8:00:00"
    assert time.monotonic() - started < 60


def test_what_sleeps_at_the_same_time_wakes_in_its_order(kit: Kit) -> None:
    @shop.workflow(name="sleepers")
    async def sleepers() -> list[int]:
        woken: list[int] = []

        async def sleep(hours: int) -> None:
            await shop.sleep(hours * 3600)
            woken.append(hours)

        await asyncio.gather(*map(sleep, (3, 1, 24 * 365, 2)))
        return woken

    before = kit.clock.instant
    assert kit.run(sleepers) == [1, 2, 3, 24 * 365]
    assert kit.clock.instant - before == timedelta(days=365)


def test_no_time_passes_while_a_step_runs(kit: Kit) -> None:
    @shop.step(name="working")
    async def working() -> str:
        await asyncio.sleep(0.02)
        return "in time"

    @shop.workflow(name="limited")
    async def limited() -> str:
        async with shop.timeout(3600):
            return await working()

    assert kit.run(limited) == "in time"


def test_a_stand_in_takes_its_time_on_the_kits_clock(kit: Kit) -> None:
    @shop.workflow(name="slow_charge")
    async def slow_charge() -> str:
        try:
            async with shop.timeout(60):
                return await charge("a", 1)
        except TimeoutError:
            return f"too late at {shop.now():%H:%M:%S}"

    with kit.replace(charge, returns="in time", takes=59):
        assert kit.run(slow_charge) == "in time"
    with use() as other, other.replace(charge, returns="never", takes=61):
        assert other.run(slow_charge) == "too late at 00:01:00"


def test_a_stand_in_that_takes_longer_than_the_step_may_times_out(kit: Kit) -> None:
    @shop.step(name="quick", timeout=10, max_attempts=1)
    async def quick() -> None: ...

    @shop.workflow(name="too_slow")
    async def too_slow() -> None:
        await quick()

    kit.replace(quick, takes=11)
    with pytest.raises(RunFailedError, match="TimeoutError: 'quick' was not done within 10"):
        kit.run(too_slow)


def test_the_waits_between_attempts_are_skipped() -> None:
    delays = Level1Config(base_delay_seconds=3600, max_delay_seconds=7200)
    with use(Hive("never-made", ExecutionConfig(level1=delays))) as kit:
        kit.fail(charge, ConnectionError("down"), call=1)
        kit.fail(charge, ConnectionError("down"), call=2)
        started, before = time.monotonic(), kit.clock.instant
        assert kit.run(buy, "a")[0] == "receipt of a"
        assert time.monotonic() - started < 60
        assert kit.clock.instant - before == timedelta(hours=1 + 1.5)


def test_what_a_workflow_waits_for_by_itself_is_not_overtaken(kit: Kit) -> None:
    @shop.workflow(name="own_sleep")
    async def own_sleep() -> list[str]:
        order: list[str] = []

        async def own() -> None:
            await asyncio.sleep(0.01)
            order.append("own")

        async def durable() -> None:
            await shop.sleep(3600)
            order.append("durable")

        await asyncio.gather(durable(), own())
        return order

    assert kit.run(own_sleep) == ["own", "durable"]


def test_time_is_skipped_on_a_loop_that_does_not_show_what_it_has_to_do(kit: Kit) -> None:
    assert uvloop.run(shop.run(overnight, "a")) == "a after 8:00:00"


def test_a_step_that_calls_a_step_lets_time_pass_while_that_one_waits(kit: Kit) -> None:
    @shop.step(name="outer")
    async def outer() -> str:
        return await charge(f"attempt {current().attempt}", 1)

    @shop.workflow(name="nested")
    async def nested() -> str:
        return await outer()

    kit.fail(charge, ConnectionError("down"))
    assert kit.run(nested) == "receipt of attempt 1"


def test_what_is_due_later_for_a_worker_is_due_at_once(kit: Kit) -> None:
    entry = runs.started(runs.make_input("buy", ("a",), {}, ("order",), {}))
    new = NewRun("later", "buy", (entry,), "pending", NewDispatch(due=3600.0))

    async def look() -> None:
        kit.store.create_runs([new])
        for _ in range(5000):
            if kit.store.seconds_to_next() == 0:
                return
            await asyncio.sleep(0.002)
        raise AssertionError

    before = kit.clock.instant
    asyncio.run(look())
    assert kit.clock.instant - before == timedelta(hours=1)


async def _asked(run_id: str) -> None:
    for _ in range(3000):
        if shop.questions(run_id):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(run_id)


def test_the_program_answers_while_time_is_held(kit: Kit) -> None:
    async def main() -> str:
        with kit.hold_time():
            handle = await shop.start(approved, "a", run_id="r")
            await _asked("r")
            await asyncio.sleep(0.02)
            shop.answer("r", "approve", False)
            return await handle.result()

    start = kit.clock.instant
    assert asyncio.run(main()) == "refused"
    assert kit.clock.instant == start


def test_time_that_is_held_passes_as_the_test_says(kit: Kit) -> None:
    async def main() -> tuple[str, str]:
        with kit.hold_time():
            handle = await shop.start(approved, "a", run_id="r")
            await _asked("r")
            kit.clock.advance(6 * 86_400)
            await asyncio.sleep(0.02)
            before = handle.status
            kit.clock.advance(86_400)
            return before, await handle.result()

    assert asyncio.run(main()) == ("waiting", "too late")


def test_time_is_skipped_again_after_it_was_held(kit: Kit) -> None:
    async def main() -> str:
        with kit.hold_time():
            handle = await shop.start(approved, "a", run_id="r")
            await _asked("r")
        return await handle.result()

    assert asyncio.run(main()) == "too late"


def test_a_run_that_waits_in_vain_while_time_is_held_says_for_what(kit: Kit) -> None:
    with kit.hold_time(), pytest.raises(UnansweredError, match="approve"):
        kit.run(approved, "a")


def test_a_clock_starts_where_it_is_told_to() -> None:
    start = datetime(2031, 5, 17, tzinfo=UTC)
    with use(shop, start=start) as kit:
        assert kit.run(overnight, "a") == "a after 8:00:00"
        assert kit.clock.instant == start + timedelta(hours=8)


# --- stand-ins ---


def test_a_stand_in_returns_and_has_its_calls(kit: Kit) -> None:
    with kit.replace(charge, returns="paid") as stand_in:
        assert kit.run(buy, "a") == ["paid", "parcel a"]
    assert stand_in.arguments == [{"order": "a", "cents": 900}]
    assert str(stand_in.calls[0]) == "charge(order='a', cents=900)"
    assert kit.calls_of(pack)[0].arguments == {"order": "a", "fragile": False}
    assert effects == ["pack a"]
    assert kit.run(buy, "b")[0] == "receipt of b"


def test_a_stand_in_raises_the_same_each_time(kit: Kit) -> None:
    with (
        kit.replace(charge, raises=ValueError("no card")) as stand_in,
        pytest.raises(RunFailedError, match="ValueError: no card"),
    ):
        kit.run(buy, "a")
    assert len(stand_in.calls) > 1


def test_a_stand_in_calls_a_function_async_or_not(kit: Kit) -> None:
    async def later(order: str, cents: int) -> str:
        await asyncio.sleep(0)
        return f"{cents} for {order}"

    kit.replace(pack, calls=lambda order, fragile=False: order.upper())
    kit.replace(charge, calls=later)
    assert kit.run(buy, "a") == ["900 for a", "A"]


def test_the_latest_stand_in_is_called(kit: Kit) -> None:
    kit.replace(charge, returns="first")
    with kit.replace(charge, returns="second"):
        assert kit.run(buy, "a")[0] == "second"
    assert kit.run(buy, "b")[0] == "first"


def test_the_stand_in_of_a_method_stands_for_every_instance(kit: Kit) -> None:
    class Agent:
        step_identity = "agent"

        @shop.step(name="Agent.ask")
        async def ask(self, text: str) -> str:
            raise AssertionError(text)

    @shop.workflow(name="asks")
    async def asks() -> str:
        return await Agent().ask("why")

    with kit.replace(Agent().ask, returns="because") as stand_in:
        assert kit.run(asks) == "because"
    assert stand_in.arguments[0]["text"] == "why"


def test_the_stand_in_of_a_method_gets_what_the_method_gets(kit: Kit) -> None:
    class Writer:
        step_identity = "writer"
        style = "short"

        @shop.step(name="Writer.write", ignore=("client",))
        async def write(self, text: str, client: object = None, times: int = 1) -> str:
            raise AssertionError(text)

    writer, client = Writer(), object()

    @shop.workflow(name="writes")
    async def writes() -> str:
        return await writer.write("why", client, times=2)

    def instead(self: Writer, text: str, client: object, times: int) -> str:
        return f"{text * times}, {self.style}"

    with kit.replace(Writer.write, calls=instead) as stand_in:
        assert kit.run(writes) == "whywhy, short"
    (given,) = stand_in.arguments
    assert given == {"self": writer, "text": "why", "client": client, "times": 2}
    assert list(given) == ["self", "text", "client", "times"]


def test_a_stand_in_is_for_a_step_and_of_one_kind(kit: Kit) -> None:
    with pytest.raises(ConfigurationError, match="is not a step"):
        kit.replace(print, returns=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="one of returns="):
        kit.replace(charge, returns=1, raises=ValueError)


# --- answers ---


def test_an_answer_is_given_before_its_question(kit: Kit) -> None:
    kit.answer("approve", True)
    kit.answer("approve", False)
    assert [kit.run(approved, name) for name in "abc"] == ["receipt of a", "refused", "too late"]


def test_a_question_of_a_child_is_answered_too(kit: Kit) -> None:
    @shop.workflow(name="parent")
    async def parent() -> str:
        return await approved("child")

    kit.answer("approve", True)
    assert kit.run(parent) == "receipt of child"


def test_a_run_that_waits_in_vain_says_for_what(kit: Kit) -> None:
    @shop.workflow(name="asks_for_ever")
    async def asks_for_ever() -> None:
        await shop.wait_for("approve")

    with pytest.raises(UnansweredError, match="no answer to 'approve' of run 'asks_for_ever-1'"):
        kit.run(asks_for_ever)


def test_an_answer_of_the_wrong_type_is_refused(kit: Kit) -> None:
    kit.answer("approve", "maybe")
    with pytest.raises(MaestroError, match="approve"):
        kit.run(approved, "a")


# --- failures and kills ---


def test_the_call_that_is_chosen_fails(kit: Kit) -> None:
    @shop.workflow(name="buy_all")
    async def buy_all() -> list[str]:
        return [await charge(order, 1) for order in "abc"]

    kit.fail(charge, ConnectionError("down"), call=2)
    assert kit.run(buy_all) == ["receipt of a", "receipt of b", "receipt of c"]
    assert [call.arguments["order"] for call in kit.calls] == ["a", "b", "b", "c"]
    assert effects == ["charge a 1", "charge b 1", "charge c 1"]


@pytest.mark.parametrize("when, times", [("before", 1), ("after", 2)])
def test_a_kill_at_a_step_is_resumed(kit: Kit, when: str, times: int) -> None:
    kit.kill(pack, when=when)  # type: ignore[arg-type]
    assert kit.run(buy, "a") == ["receipt of a", "parcel a"]
    assert effects == ["charge a 900", *["pack a"] * times]


def test_nothing_of_a_killed_workflow_goes_on(kit: Kit) -> None:
    @shop.workflow(name="cleans_up")
    async def cleans_up() -> str:
        async def beside() -> None:
            await shop.sleep(3600)
            effects.append("beside")

        async with asyncio.TaskGroup() as group:
            group.create_task(beside())
            try:
                return await charge("a", 1)
            finally:
                effects.append("finally")
        raise AssertionError

    kit.kill(charge, when="after")
    assert kit.run(cleans_up) == "receipt of a"
    assert effects == ["charge a 1", "charge a 1", "finally", "beside"]


def test_a_run_is_killed_at_several_calls(kit: Kit) -> None:
    for call in (1, 2, 4):
        kit.kill(charge, call=call)
    kit.kill(pack, when="after")
    assert kit.run(buy, "a") == ["receipt of a", "parcel a"]
    assert effects == ["charge a 900", "pack a", "pack a"]


def test_a_kill_needs_kit_run(kit: Kit) -> None:
    kit.kill(charge)
    with pytest.raises(RunFailedError, match=r"kit\.run"):
        shop.run_sync(buy, "a")


def test_calls_are_counted_from_one(kit: Kit) -> None:
    with pytest.raises(ConfigurationError, match="from 1"):
        kit.fail(charge, ValueError(), call=0)
    with pytest.raises(ConfigurationError, match="'before' or 'after'"):
        kit.kill(charge, when="while")  # type: ignore[arg-type]


def test_the_dice_are_the_same_for_the_same_run() -> None:
    @shop.workflow(name="dice")
    async def dice() -> tuple[float, str]:
        return shop.random(), str(shop.uuid())

    rolled = []
    for _ in range(2):
        with use(shop) as kit:
            rolled.append((kit.run(dice), kit.run(dice)))
    assert rolled[0] == rolled[1]
    assert rolled[0][0] != rolled[0][1]
