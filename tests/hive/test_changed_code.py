"""Code may change between two lives of a run: what is unchanged is not called again.

Each case is a workflow as it was when it was stopped, as it is when it is resumed, and which steps are
called then. ``docs/howto/change-code.md`` has the same cases for users.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from maestro_hive import Hive
from maestro_hive.hive import branches
from maestro_hive.maestro.state.events import ReplayDiffered
from tests.hive.conftest import quick_config
from tests.hive.test_waits import until

if TYPE_CHECKING:
    from pathlib import Path


ResultT = TypeVar("ResultT")


class Steps:
    """The steps of one life; ``gate`` holds the first one until it is stopped."""

    def __init__(self, hive: Hive, *, is_first: bool) -> None:  # noqa: C901 - one of each
        self.calls: list[str] = []
        self.hive = hive
        self.is_waiting = False

        def called(name: str, result: ResultT) -> ResultT:
            self.calls.append(name)
            return result

        @hive.step
        async def a(x: int = 1) -> str:
            return called(f"a{x}", f"a{x}")

        @hive.step
        async def b(text: str) -> str:
            return called(f"b({text})", f"{text}b")

        @hive.step
        async def equal() -> int:
            return called("equal", len(self.calls))

        @hive.step
        async def gate() -> None:
            if is_first:
                self.is_waiting = True
                await asyncio.sleep(60)

        if is_first:

            @hive.step(name="grow")
            async def grow(text: str) -> str:
                return called("grow", text.upper())

        else:

            @hive.step(name="grow")
            async def grow(text: str, *, loud: bool = False) -> str:
                return called("grow", text.upper() + ("!" if loud else ""))

        @hive.step(name="old name")
        async def renamed() -> str:
            return called("renamed", "r")

        self.a, self.b, self.equal, self.gate, self.grow = a, b, equal, gate, grow
        self.renamed = renamed


@dataclass(frozen=True)
class Case:
    """A change, the steps that are called after it, and what is reported of it."""

    name: str
    before: Any
    after: Any
    calls: list[str]
    result: Any
    missing: tuple[str, ...] = ()
    new: tuple[str, ...] = ()


async def _plain(s: Steps) -> Any:
    found = [await s.a(), await s.b("x")]
    await s.gate()
    return found


async def _added(s: Steps) -> Any:
    found = [await s.a(2), await s.a(), await s.b("x")]
    await s.gate()
    return found


async def _removed(s: Steps) -> Any:
    found = [await s.b("x")]
    await s.gate()
    return found


async def _reordered(s: Steps) -> Any:
    found = [await s.b("x"), await s.a()]
    await s.gate()
    return found


async def _input_changed(s: Steps) -> Any:
    found = [await s.a(), await s.b("y")]
    await s.gate()
    return found


async def _gathered(s: Steps) -> Any:
    found = list(await asyncio.gather(s.a(), s.b("x")))
    await s.gate()
    return found


async def _branch_in_front(s: Steps) -> Any:
    found = list(await asyncio.gather(s.a(5), s.a(), s.b("x")))
    await s.gate()
    return found


async def _equal_calls(s: Steps) -> Any:
    found = [await s.equal(), await s.equal()]
    await s.gate()
    return found


async def _one_more_equal_call(s: Steps) -> Any:
    found = [await s.equal(), await s.equal(), await s.equal()]
    await s.gate()
    return found


async def _grows(s: Steps) -> Any:
    found = await s.grow("x")
    await s.gate()
    return found


async def _grows_loud(s: Steps) -> Any:
    found = await s.grow("x", loud=True)  # type: ignore[call-arg]  # it takes it by then
    await s.gate()
    return found


async def _renamed(s: Steps) -> Any:
    found = await s.renamed()
    await s.gate()
    return found


CASES = [
    Case("nothing", _plain, _plain, [], ["a1", "xb"]),
    Case("a step added", _plain, _added, ["a2"], ["a2", "a1", "xb"], new=("a",)),
    Case("a step removed", _plain, _removed, [], ["xb"], missing=("a",)),
    Case("steps reordered", _plain, _reordered, [], ["xb", "a1"]),
    Case(
        "an input changed",
        _plain,
        _input_changed,
        ["b(y)"],
        ["a1", "yb"],
        missing=("b",),
        new=("b",),
    ),
    Case("put into branches", _plain, _gathered, [], ["a1", "xb"]),
    Case("taken out of branches", _gathered, _plain, [], ["a1", "xb"]),
    Case("a branch in front", _gathered, _branch_in_front, ["a5"], ["a5", "a1", "xb"]),
    Case("one more equal call", _equal_calls, _one_more_equal_call, ["equal"], [0, 1, 0]),
    Case("an argument added with a default", _grows, _grows, [], "X"),
    Case(
        "another value for the added argument",
        _grows,
        _grows_loud,
        ["grow"],
        "X!",
        missing=("grow",),
        new=("grow",),
    ),
    Case("a function renamed, with name=", _renamed, _renamed, [], "r"),
]


async def live(folder: Path, workflow: Any, *, is_first: bool) -> tuple[Steps, Any, list[Any]]:
    async with Hive(folder, quick_config()) as hive:
        steps = Steps(hive, is_first=is_first)

        @hive.workflow
        async def changing() -> Any:
            return await workflow(steps)

        running = asyncio.create_task(hive.run(changing, run_id="r"))
        if not is_first:
            result = await running
            events = [each async for each in hive.events("r", follow=False)]
            return steps, result, [each for each in events if isinstance(each, ReplayDiffered)]
        await until(lambda: steps.is_waiting)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return steps, None, []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_unchanged_is_not_called_again(folder: Path, case: Case) -> None:
    asyncio.run(live(folder, case.before, is_first=True))
    steps, result, differences = asyncio.run(live(folder, case.after, is_first=False))
    assert (steps.calls, result) == (case.calls, case.result)
    reported = [(each.missing, each.new) for each in differences]
    assert reported == ([(case.missing, case.new)] if case.missing or case.new else [])


async def _in_a_task(s: Steps) -> Any:
    found = await asyncio.create_task(_later(s, 0))
    await s.gate()
    return found


async def _later(s: Steps, seconds: float) -> Any:
    if seconds:
        await s.hive.sleep(seconds)
    return await s.a()


async def _called_before(s: Steps) -> Any:
    task = asyncio.create_task(_later(s, 0.05))
    found = [await s.a(), await task]
    await s.gate()
    return found


def test_a_record_that_moved_is_not_claimed_again_where_it_was(folder: Path) -> None:
    asyncio.run(live(folder, _in_a_task, is_first=True))
    steps, result, _ = asyncio.run(live(folder, _called_before, is_first=False))
    assert (steps.calls, result) == (["a1"], ["a1", "a1"])


async def _asks(s: Steps) -> Any:
    await s.a()
    return await s.hive.wait_for("approve", about="page")


async def _asks_after_another_step(s: Steps) -> Any:
    await s.a()
    await s.b("x")
    return await s.hive.wait_for("approve", about="page")


async def _asks_about_another(s: Steps) -> Any:
    await s.a()
    return await s.hive.wait_for("approve", about="another page")


async def _asks_in_a_branch(s: Steps) -> Any:
    await s.a()
    return (await asyncio.gather(s.hive.wait_for("approve", about="page")))[0]


@pytest.mark.parametrize(
    "after, is_asked_again",
    [
        (_asks, False),
        (_asks_after_another_step, True),
        (_asks_about_another, True),
        (_asks_in_a_branch, True),
    ],
)
def test_a_question_is_asked_again_if_what_came_before_it_changed(
    folder: Path, after: Any, is_asked_again: bool
) -> None:
    async def first_life() -> None:
        async with Hive(folder, quick_config()) as hive:
            steps = Steps(hive, is_first=True)

            @hive.workflow
            async def changing() -> Any:
                answer = await _asks(steps)
                await steps.gate()
                return answer

            running = asyncio.create_task(hive.run(changing, run_id="r"))
            await until(lambda: bool(hive.runs()) and bool(hive.questions("r")))
            hive.answer("r", "approve", "first")
            await until(lambda: steps.is_waiting)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def second_life() -> Any:
        async with Hive(folder, quick_config()) as hive:
            steps = Steps(hive, is_first=False)

            @hive.workflow
            async def changing() -> Any:
                answer = await after(steps)
                await steps.gate()
                return answer

            running = asyncio.create_task(hive.run(changing, run_id="r"))
            if is_asked_again:
                await until(lambda: bool(hive.questions("r")))
                hive.answer("r", "approve", "second")
            return await running

    asyncio.run(first_life())
    assert asyncio.run(second_life()) == ("second" if is_asked_again else "first")


def test_a_sleep_that_is_no_longer_cancelled_lasts_as_long_as_it_says(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(branches, "PATIENCE_SECONDS", 0.1)

    async def first_life() -> None:
        async with Hive(folder, quick_config()) as hive:
            steps = Steps(hive, is_first=True)

            @hive.workflow
            async def sleeps() -> None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.01):
                        await hive.sleep(1.5)
                await steps.gate()

            running = asyncio.create_task(hive.run(sleeps, run_id="r"))
            await until(lambda: steps.is_waiting)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def second_life() -> None:
        async with Hive(folder, quick_config()) as hive:

            @hive.workflow
            async def sleeps() -> None:
                await hive.sleep(1.5)

            await hive.run(sleeps, run_id="r")

    started = time.monotonic()
    asyncio.run(first_life())
    asyncio.run(second_life())
    assert time.monotonic() - started >= 1.5
