"""A run that was killed and resumed sees the same as one that was not."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.journal.entries import StepCompleted, WaitStarted
from maestro_hive.kernel.errors import RunCancelledError, RunFailedError
from tests.hive.conftest import (
    asks,
    copy_live,
    entries_of,
    leave,
    quick_hive,
    until,
    until_recorded,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from maestro_hive.hive.hive import Hive


class OutOfStock(Exception):  # noqa: N818 - as users name them
    """An error of a user's own."""

    def __init__(self, item: str, *, left: int) -> None:
        super().__init__(f"only {left} of {item}")
        self.item = item
        self.left = left


class Killed:
    """Runs a program in a folder until it says that it is to be killed there, then in a copy.

    The copy is the folder as it was at that moment: what a kill leaves behind.
    """

    def __init__(self, tmp_path: Path) -> None:
        self.first = tmp_path / "first"
        self.copies = 0
        self.calls: list[Any] = []
        self.lives = 0

    def resume(self, program: Callable[[Hive, Killed], Any], folder: Path) -> Any:
        self.lives += 1
        with quick_hive(folder) as hive:
            return hive.run_sync(program(hive, self), run_id="r")

    def copy(self) -> Path:
        self.copies += 1
        folder = self.first.parent / f"copy-{self.copies}"
        return copy_live(self.first, folder)


@pytest.fixture
def killed(tmp_path: Path) -> Killed:
    return Killed(tmp_path)


def both_lives(killed: Killed, program: Callable[[Hive, Killed], Any]) -> tuple[Any, Any]:
    """Return the results of a run that is not killed, and of one resumed from its last copy."""
    first = killed.resume(program, killed.first)
    assert killed.copies, "the program copies its folder where it is killed"
    return first, killed.resume(program, killed.first.parent / f"copy-{killed.copies}")


def test_equal_calls_in_concurrent_branches_get_their_own_results(killed: Killed) -> None:
    def program(hive: Hive, killed: Killed) -> Any:
        numbers = iter(range(100 * killed.lives, 1000))
        delays = {1: [0.05, 0.0], 2: [0.0, 0.05]}[killed.lives]

        @hive.step
        async def draft() -> int:
            killed.calls.append(next(numbers))
            return int(killed.calls[-1])

        @hive.step
        async def end() -> None:
            if killed.lives == 1:
                killed.copy()

        async def branch(name: str, delay: float) -> tuple[str, int]:
            await asyncio.sleep(delay)
            return name, await draft()

        @hive.workflow
        async def both() -> Any:
            drafts = await asyncio.gather(branch("a", delays[0]), branch("b", delays[1]))
            await end()
            return drafts

        return both

    first, second = both_lives(killed, program)
    assert first == second
    assert len(killed.calls) == 2


def test_equal_questions_get_the_answers_that_were_meant_for_them(  # noqa: C901 - two lives
    killed: Killed,
) -> None:
    published: list[str] = []

    def program(hive: Hive, killed: Killed) -> Any:
        delays = {1: [0.05, 0.0], 2: [0.0, 0.05]}[killed.lives]

        @hive.step
        async def publish(name: str) -> None:
            published.append(name)

        async def review(name: str, delay: float) -> str:
            await asyncio.sleep(delay)
            if await hive.wait_for("approve", about=name):
                await publish(name)
                return f"{name} published"
            return f"{name} refused"

        @hive.workflow
        async def both() -> Any:
            found = await asyncio.gather(review("A", delays[0]), review("B", delays[1]))
            if killed.lives == 1:
                killed.copy()
            return found

        return both

    async def answer_all(hive: Hive) -> None:
        await until(lambda: len(asks(hive)) == 2)
        for each in hive.questions("r"):
            hive.answer("r", each.name, each.about == "B", question=each.id)

    async def life(folder: Path) -> Any:
        killed.lives += 1
        with quick_hive(folder) as hive:
            running = asyncio.create_task(hive.run(program(hive, killed), run_id="r"))
            if killed.lives == 1:
                await answer_all(hive)
            return await running

    assert asyncio.run(life(killed.first)) == ["A refused", "B published"]
    assert asyncio.run(life(killed.first.parent / "copy-1")) == ["A refused", "B published"]
    assert published == ["B"]


@pytest.mark.parametrize("what", ["question", "sleep", "step", "changed step", "child"])
@pytest.mark.parametrize("in_task", [False, True])
def test_a_question_after_what_was_cancelled_is_the_same_after_a_restart(  # noqa: C901 - two lives
    folder: Path, what: str, in_task: bool
) -> None:
    def program(hive: Hive, *, is_first: bool) -> Any:
        async def step() -> None:
            await asyncio.sleep(60)

        async def changed_step(mode: str = "new") -> None:
            await asyncio.sleep(60)

        @hive.workflow
        async def child() -> None:
            await hive.sleep(60)

        is_changed = what == "changed step" and not is_first
        own: Any = hive.step(name="step")(changed_step if is_changed else step)

        def call() -> Any:
            match what:
                case "question":
                    return hive.wait_for("x")
                case "sleep":
                    return hive.sleep(60)
                case "child":
                    return child()
                case _:
                    return own()

        @hive.workflow
        async def cancels_then_asks() -> Any:
            awaited = asyncio.create_task(call()) if in_task else call()
            with pytest.raises(TimeoutError):
                async with hive.timeout(0.05):
                    await awaited
            return await hive.wait_for("sure")

        return cancels_then_asks

    async def first_life() -> None:
        with quick_hive(folder) as hive:
            running = asyncio.create_task(hive.run(program(hive, is_first=True), run_id="r"))
            await until(lambda: asks(hive) == ["sure"])
            await leave(running)
            hive.answer("r", "sure", True)

    asyncio.run(first_life())
    with quick_hive(folder) as hive:
        running = hive.run(program(hive, is_first=False), run_id="r")
        assert asyncio.run(asyncio.wait_for(running, 10)) is True


def test_a_race_ends_as_it_ended(killed: Killed) -> None:
    def program(hive: Hive, killed: Killed) -> Any:
        slow = "a" if killed.lives == 1 else "b"
        is_won = asyncio.Event()

        @hive.step
        async def ask(name: str) -> str:
            killed.calls.append(name)
            if name == slow:
                await is_won.wait()
            return name

        @hive.step
        async def end() -> None:
            if killed.lives == 1:
                killed.copy()

        @hive.workflow
        async def race() -> Any:
            tasks = [asyncio.create_task(ask(name)) for name in "ab"]
            order: list[str] = []
            for each in asyncio.as_completed(tasks):
                order.append(await each)
                is_won.set()
            await end()
            return order

        return race

    assert both_lives(killed, program) == (["b", "a"], ["b", "a"])
    assert killed.calls == ["a", "b"]


def test_the_loser_of_a_race_is_not_called_again(killed: Killed) -> None:
    def program(hive: Hive, killed: Killed) -> Any:
        is_slow = asyncio.Event()

        @hive.step
        async def ask(name: str) -> str:
            killed.calls.append(name)
            if name == "slow":
                is_slow.set()
                await asyncio.sleep(30)
            await is_slow.wait()
            return name

        @hive.step
        async def end() -> None:
            if killed.lives == 1:
                killed.copy()

        @hive.workflow
        async def race() -> Any:
            tasks = [asyncio.create_task(ask(name)) for name in ("slow", "quick")]
            done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for each in pending:
                each.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            await end()
            return [each.result() for each in done]

        return race

    assert both_lives(killed, program) == (["quick"], ["quick"])
    assert sorted(killed.calls) == ["quick", "slow"]


def test_a_failed_step_raises_the_users_own_error_in_both_lives(killed: Killed) -> None:
    def program(hive: Hive, killed: Killed) -> Any:
        @hive.step(max_attempts=1)
        async def order(item: str) -> str:
            killed.calls.append(item)
            try:
                raise KeyError(item)  # noqa: TRY301 - the cause
            except KeyError as error:
                raise OutOfStock(item, left=2) from error

        @hive.step
        async def end() -> None:
            if killed.lives == 1:
                killed.copy()

        @hive.workflow
        async def shop() -> Any:
            seen: list[Any] = []
            try:
                await order("tea")
            except OutOfStock as error:
                seen = [type(error).__name__, error.item, error.left, repr(error.__cause__)]
            await end()
            return seen

        return shop

    expected = ["OutOfStock", "tea", 2, "KeyError('tea')"]
    assert both_lives(killed, program) == (expected, expected)


def test_what_an_error_was_raised_in_is_the_same_in_both_lives(killed: Killed) -> None:
    def program(hive: Hive, killed: Killed) -> Any:
        @hive.step(max_attempts=1)
        async def order(item: str) -> None:
            try:
                raise KeyError(item)  # noqa: TRY301 - the context
            except KeyError:
                raise OutOfStock(item, left=2)  # noqa: B904 - that is its context

        @hive.step(max_attempts=1)
        async def fail() -> None:
            raise ValueError("alone")

        @hive.step
        async def end() -> None:
            if killed.lives == 1:
                killed.copy()

        @hive.workflow
        async def shop() -> Any:
            seen: list[Any] = []
            for call in (order("tea"), fail()):
                try:
                    await call
                except (OutOfStock, ValueError) as error:
                    seen += [repr(error.__context__), repr(error.__cause__)]
            await end()
            return seen

        return shop

    expected = ["KeyError('tea')", "None", "None", "None"]
    assert both_lives(killed, program) == (expected, expected)


def test_a_step_inside_a_step_is_recorded_once(hive: Hive) -> None:
    calls: list[str] = []

    @hive.step
    async def fetch(page: str) -> str:
        calls.append(page)
        return page.upper()

    @hive.step
    async def summarise(pages: list[str]) -> str:
        found = await asyncio.gather(*map(fetch, pages))
        if calls.count("tried") == 0:
            calls.append("tried")
            raise OSError("try again")
        return ",".join(found)

    @hive.workflow
    async def read() -> str:
        return await summarise(["a", "b", "a"])

    assert hive.run_sync(read) == "A,B,A"
    assert Counter(calls) == {"a": 2, "b": 1, "tried": 1}


def test_a_polite_stop_starts_nothing(folder: Path) -> None:
    calls: list[str] = []

    async def life(*, stopped: bool) -> Any:
        with quick_hive(folder) as hive:

            @hive.step
            async def work(name: str) -> str:
                calls.append(name)
                if stopped and name == "long":
                    await asyncio.sleep(30)
                return name

            @hive.workflow
            async def build() -> list[str]:
                done = [await work("first")]
                try:
                    done.append(await work("long"))
                finally:
                    done.append(await work("clean up"))
                return done

            running = asyncio.create_task(hive.run(build, run_id="r"))
            if stopped:
                await until(lambda: "long" in calls)
                running.cancel()
            return await running

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(life(stopped=True))
    assert calls == ["first", "long"]
    assert asyncio.run(life(stopped=False)) == ["first", "long", "clean up"]
    assert calls == ["first", "long", "long", "clean up"]


def test_a_cancelled_run_cleans_up_also_after_a_kill(killed: Killed) -> None:
    def program(hive: Hive, killed: Killed) -> Any:
        @hive.step
        async def work(name: str) -> str:
            killed.calls.append(name)
            await asyncio.sleep(30 if name == "long" else 0)
            if name == "release" and killed.lives == 1:
                killed.copy()
            return name

        @hive.workflow
        async def build() -> None:
            await work("reserve")
            try:
                await work("long")
            finally:
                await work("release")
                await work("report")

        return build

    async def first_life() -> None:
        killed.lives += 1
        with quick_hive(killed.first) as hive:
            running = asyncio.create_task(hive.run(program(hive, killed), run_id="r"))
            await until(lambda: "long" in killed.calls)
            hive.cancel("r", "enough")
            with pytest.raises(RunCancelledError, match="enough"):
                await running

    asyncio.run(first_life())
    assert killed.calls == ["reserve", "long", "release", "report"]
    killed.calls.clear()
    with pytest.raises(RunCancelledError, match="enough"):
        killed.resume(program, killed.first.parent / "copy-1")
    # It was killed in the middle of its clean-up, and goes on there.
    assert killed.calls == ["release", "report"]


def test_a_durable_timeout_cancels_again_what_it_cancelled(
    killed: Killed,
) -> None:
    def program(hive: Hive, killed: Killed) -> Any:
        @hive.step
        async def work(name: str) -> str:
            killed.calls.append(name)
            if name == "long":
                await asyncio.sleep(30)
            if name == "end" and killed.lives == 1:
                killed.copy()
            return name

        @hive.workflow
        async def build() -> list[str]:
            seen = []
            try:
                async with hive.timeout(1):
                    seen.append(await work("short"))
                    seen.append(await work("long"))
            except TimeoutError:
                seen.append("late")
            async with hive.timeout(60):
                seen.append(await work("in time"))
            await work("end")
            return seen

        return build

    expected = ["short", "late", "in time"]
    assert both_lives(killed, program) == (expected, expected)
    assert killed.calls == ["short", "long", "in time", "end", "end"]


def test_the_clock_and_the_dice_are_recorded(killed: Killed) -> None:
    def program(hive: Hive, killed: Killed) -> Any:
        @hive.step
        async def end() -> None:
            if killed.lives == 1:
                killed.copy()

        @hive.workflow
        async def build() -> Any:
            async def one() -> Any:
                return hive.now(), hive.random(), hive.uuid()

            seen = [await one(), *(await asyncio.gather(one(), one()))]
            await end()
            return seen

        return build

    first, second = both_lives(killed, program)
    assert first == second
    assert len({str(each) for each in first}) == 3


def test_a_value_is_what_was_read_back_in_both_lives(killed: Killed) -> None:
    def program(hive: Hive, killed: Killed) -> Any:
        kept: list[dict[str, int]] = []

        @hive.step
        async def make() -> dict[str, int]:
            made = {"z": 1, "a": 2}
            kept.append(made)
            return made

        @hive.step
        async def twice() -> list[list[int]]:
            part = [1]
            return [part, part]

        @hive.workflow
        async def child(items: list[str]) -> int:
            items.append("changed by the child")
            return len(items)

        @hive.step
        async def end() -> None:
            if killed.lives == 1:
                killed.copy()

        @hive.workflow
        async def build() -> Any:
            made = await make()
            for each in kept:
                each["later"] = 3
            pair = await twice()
            pair[0].append(2)
            items = ["a"]
            count = await child(items)
            await end()
            return [list(made), pair, items, count]

        return build

    expected = [["z", "a"], [[1, 2], [1]], ["a"], 2]
    assert both_lives(killed, program) == (expected, expected)


def test_a_question_after_a_cancelled_call_is_found_again(
    killed: Killed,
) -> None:
    def program(hive: Hive, killed: Killed) -> Any:
        @hive.step
        async def stuck() -> None:
            killed.calls.append("stuck")
            await asyncio.sleep(30)

        @hive.workflow
        async def build() -> str:
            with contextlib.suppress(TimeoutError):
                async with hive.timeout(1):
                    await stuck()
            try:
                await hive.wait_for("never", timeout=0.05)
            except TimeoutError:
                if killed.lives == 1:
                    killed.copy()
                return "late"
            return "answered"

        return build

    assert both_lives(killed, program) == ("late", "late")
    with quick_hive(killed.first.parent / "copy-1") as hive:
        entries = asyncio.run(entries_of(hive))
    assert sum(isinstance(each, WaitStarted) for each in entries) == 1
    assert killed.calls == ["stuck"]


def test_a_cancelled_workflow_gets_answers_while_it_cleans_up(hive: Hive) -> None:
    @hive.step
    async def ready() -> None:
        pass

    @hive.workflow
    async def build() -> None:
        await ready()
        try:
            await hive.sleep(60)
        finally:
            seen.append(await hive.wait_for("colour"))

    seen: list[Any] = []

    async def main() -> None:
        running = asyncio.create_task(hive.run(build, run_id="r"))
        await until_recorded(hive, StepCompleted)
        hive.cancel("r")
        await until(lambda: asks(hive))
        hive.answer("r", "colour", "green")
        with pytest.raises(RunCancelledError):
            await running

    asyncio.run(main())
    assert seen == ["green"]


def test_one_of_two_callers_of_a_key_is_cancelled_and_the_other_is_not(killed: Killed) -> None:
    def program(hive: Hive, killed: Killed) -> Any:
        may_end = asyncio.Event()

        @hive.step(key=lambda x: f"k-{x}")
        async def slow(x: int) -> int:
            await may_end.wait()
            return x

        @hive.step
        async def end() -> None:
            if killed.lives == 1:
                killed.copy()

        @hive.step
        async def quick() -> None:
            pass

        @hive.workflow
        async def build() -> list[str]:
            tasks = [asyncio.create_task(slow(1)) for _ in range(2)]
            await quick()
            tasks[0].cancel()
            may_end.set()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            await end()
            return [type(each).__name__ for each in found]

        return build

    expected = ["CancelledError", "int"]
    assert both_lives(killed, program) == (expected, expected)


def test_a_workflow_that_catches_every_cancellation_is_stopped_all_the_same(hive: Hive) -> None:
    has_started = asyncio.Event()

    @hive.step
    async def slow() -> None:
        has_started.set()
        await asyncio.sleep(30)

    @hive.workflow
    async def deaf() -> None:
        while True:
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await slow()

    said: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
        running = asyncio.create_task(hive.run(deaf, run_id="r"))
        await has_started.wait()
        running.cancel()
        async with asyncio.timeout(30):
            with pytest.raises(asyncio.CancelledError):
                await running

    asyncio.run(main())
    gc.collect()
    assert said == [], "what ends the workflow is no error that nobody looked at"


def test_tasks_that_wait_for_something_else_end_with_their_run(hive: Hive) -> None:
    ended: list[int] = []

    @hive.workflow
    async def build() -> str:
        queue: asyncio.Queue[int] = asyncio.Queue()

        async def work(number: int) -> None:
            try:
                await queue.get()
            finally:
                ended.append(number)

        tasks = [asyncio.create_task(work(number)) for number in range(3)]
        await asyncio.sleep(0.01)
        return f"{len(tasks)} tasks"

    async def main() -> None:
        assert await hive.run(build) == "3 tasks"
        assert sorted(ended) == [0, 1, 2]

    asyncio.run(main())


def test_a_retry_does_not_repeat_failures_that_the_workflow_caught(folder: Path) -> None:
    calls: list[str] = []
    broken = {"lamp", "ship"}

    def life() -> Any:
        with quick_hive(folder) as hive:

            @hive.step(max_attempts=1)
            async def work(name: str) -> str:
                calls.append(name)
                if name in broken:
                    raise OutOfStock(name, left=0)
                return name

            @hive.workflow
            async def shop() -> list[str]:
                try:
                    found = await work("lamp")
                except OutOfStock:
                    found = await work("candle")
                return [found, await work("pay"), await work("ship")]

            with contextlib.suppress(RunFailedError):
                return hive.run_sync(shop, run_id="r")
            broken.clear()
            hive.retry("r")
            return hive.run_sync(shop, run_id="r")

    assert life() == ["candle", "pay", "ship"]
    assert calls == ["lamp", "candle", "pay", "ship", "ship"]


def test_a_timeout_that_was_over_before_the_restart_calls_nothing(
    killed: Killed,
) -> None:
    def program(hive: Hive, killed: Killed) -> Any:
        @hive.step
        async def slow() -> None:
            killed.calls.append("slow")
            if killed.lives == 1:
                killed.copy()
            await asyncio.sleep(30)

        @hive.workflow
        async def build() -> str:
            try:
                async with hive.timeout(1):
                    await slow()
            except TimeoutError:
                return "late"
            return "in time"

        return build

    assert both_lives(killed, program) == ("late", "late")
    assert killed.calls == ["slow"]


def test_a_second_cancel_leaves_a_clean_up_to_the_next_start(killed: Killed) -> None:
    def program(hive: Hive, killed: Killed) -> Any:
        @hive.step
        async def work(name: str) -> None:
            killed.calls.append(name)
            if killed.lives == 1:
                killed.copy()

        @hive.step
        async def ready() -> None:
            pass

        @hive.workflow
        async def build() -> None:
            await ready()
            try:
                await hive.sleep(60)
            finally:
                await work("clean")

        return build

    async def first() -> None:
        killed.lives += 1
        with quick_hive(killed.first) as hive:
            running = asyncio.create_task(hive.run(program(hive, killed), run_id="r"))
            await until_recorded(hive, StepCompleted)
            hive.cancel("r")
            with pytest.raises(RunCancelledError):
                await running

    asyncio.run(first())
    copy = killed.first.parent / "copy-1"
    with quick_hive(copy) as hive:
        assert hive.cancel("r")
    with pytest.raises(RunCancelledError):
        killed.resume(program, copy)
    assert killed.calls == ["clean", "clean"]
