"""Code may change between two lives of a run: what is unchanged is not called again.

Each case is a workflow as it was when it was stopped, as it is when it is resumed, and the steps
that are called then. ``docs/howto/change-code.md`` has the same cases for users.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from maestro_hive.hive.workflow_loop import WorkflowLoop
from maestro_hive.journal.entries import ReplayDiffered
from tests.hive.conftest import asks, leave, quick_hive, until

if TYPE_CHECKING:
    from pathlib import Path

    from maestro_hive.hive.hive import Hive

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

        @hive.workflow
        async def child(text: str) -> str:
            return called(f"child({text})", await b(text))

        self.a, self.b, self.equal, self.gate, self.grow = a, b, equal, gate, grow
        self.renamed, self.child = renamed, child


@dataclass(frozen=True)
class Case:
    """A change, the steps that are called after it, and the report about it."""

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
    grow: Any = s.grow
    found = await grow("x", loud=True)
    await s.gate()
    return found


async def _renamed(s: Steps) -> Any:
    found = await s.renamed()
    await s.gate()
    return found


async def _calls_a_child(s: Steps) -> Any:
    found = [await s.child("x"), await s.a()]
    await s.gate()
    return found


async def _calls_a_child_in_a_branch(s: Steps) -> Any:
    found = list(await asyncio.gather(s.child("x"), s.a()))
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
    Case("a child put into a branch", _calls_a_child, _calls_a_child_in_a_branch, [], ["xb", "a1"]),
]


async def live(folder: Path, workflow: Any, *, is_first: bool) -> tuple[Steps, Any, list[Any]]:
    with quick_hive(folder) as hive:
        steps = Steps(hive, is_first=is_first)

        @hive.workflow
        async def changing() -> Any:
            return await workflow(steps)

        running = asyncio.create_task(hive.run(changing, run_id="r"))
        if not is_first:
            result = await running
            entries = [each.entry async for each in hive.events("r", follow=False)]
            return steps, result, [each for each in entries if isinstance(each, ReplayDiffered)]
        await until(lambda: steps.is_waiting)
        await leave(running)
        return steps, None, []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_unchanged_is_not_called_again(folder: Path, case: Case) -> None:
    asyncio.run(live(folder, case.before, is_first=True))
    steps, result, differences = asyncio.run(live(folder, case.after, is_first=False))
    assert (steps.calls, result) == (case.calls, case.result)
    reported = [(each.missing, each.new) for each in differences]
    assert reported == ([(case.missing, case.new)] if case.missing or case.new else [])


def test_a_third_life_of_changed_code_calls_nothing(folder: Path) -> None:
    async def stopped_again() -> None:
        with quick_hive(folder) as hive:
            steps = Steps(hive, is_first=True)

            @hive.workflow
            async def changing() -> Any:
                return await _branch_in_front(steps)

            running = asyncio.create_task(hive.run(changing, run_id="r"))
            await until(lambda: steps.is_waiting)
            await leave(running)
            assert steps.calls == ["a5"]

    asyncio.run(live(folder, _gathered, is_first=True))
    asyncio.run(stopped_again())
    steps, result, _ = asyncio.run(live(folder, _branch_in_front, is_first=False))
    assert (steps.calls, result) == ([], ["a5", "a1", "xb"])


def test_without_numbers_of_branches_equal_calls_lose_their_results(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is why identities have branches: what is broken here on purpose must show."""

    async def one(s: Steps, first: str) -> Any:
        return [await s.b(first), await s.equal()]

    async def before(s: Steps) -> Any:
        found = await asyncio.gather(one(s, "x"), one(s, "y"))
        await s.gate()
        return found

    async def first_branch_asks_more(s: Steps) -> Any:
        found = await asyncio.gather(_after_a_sleep(s, one(s, "x")), one(s, "y"))
        await s.gate()
        return found

    async def _after_a_sleep(s: Steps, branch: Any) -> Any:
        await s.a()
        return await branch

    def result_of(path: Path) -> Any:
        asyncio.run(live(path, before, is_first=True))
        return asyncio.run(live(path, first_branch_asks_more, is_first=False))[1]

    whole = result_of(folder)
    place = WorkflowLoop.place

    def place_without_branch(loop: WorkflowLoop, content: str) -> str:
        counts = loop.__dict__.setdefault("all_counts", {})
        counts[content] = counts.get(content, 0) + 1
        return f"r|{content}|{counts[content]}"

    monkeypatch.setattr(WorkflowLoop, "place", place_without_branch)
    assert result_of(folder.parent / "broken") != whole
    monkeypatch.setattr(WorkflowLoop, "place", place)


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


async def _asks_under_another_name(s: Steps) -> Any:
    await s.a()
    return await s.hive.wait_for("agree", about="page")


CHANGED_QUESTIONS = pytest.mark.parametrize(
    "after, is_asked_again",
    [
        (_asks, False),
        (_asks_after_another_step, False),
        (_asks_about_another, True),
        (_asks_in_a_branch, True),
        (_asks_under_another_name, True),
    ],
)


@CHANGED_QUESTIONS
def test_a_question_is_asked_again_if_its_branch_name_or_subject_changed(
    folder: Path, after: Any, is_asked_again: bool
) -> None:
    async def first_life() -> None:
        with quick_hive(folder) as hive:
            steps = Steps(hive, is_first=True)

            @hive.workflow
            async def changing() -> Any:
                answer = await _asks(steps)
                await steps.gate()
                return answer

            running = asyncio.create_task(hive.run(changing, run_id="r"))
            await until(lambda: asks(hive))
            hive.answer("r", "approve", "first")
            await until(lambda: steps.is_waiting)
            await leave(running)

    async def second_life() -> Any:
        with quick_hive(folder) as hive:
            steps = Steps(hive, is_first=False)

            @hive.workflow
            async def changing() -> Any:
                answer = await after(steps)
                await steps.gate()
                return answer

            running = asyncio.create_task(hive.run(changing, run_id="r"))
            if is_asked_again:
                await until(lambda: asks(hive))
                hive.answer("r", asks(hive)[0], "second")
            return await running

    asyncio.run(first_life())
    assert asyncio.run(second_life()) == ("second" if is_asked_again else "first")


def test_an_answer_that_came_before_the_restart_waits_for_its_question(folder: Path) -> None:
    async def first_life() -> None:
        with quick_hive(folder) as hive:
            steps = Steps(hive, is_first=True)

            @hive.workflow
            async def changing() -> Any:
                return await _asks(steps)

            running = asyncio.create_task(hive.run(changing, run_id="r"))
            await until(lambda: asks(hive))
            await leave(running)
            hive.answer("r", "approve", "early")

    async def second_life() -> Any:
        with quick_hive(folder) as hive:
            steps = Steps(hive, is_first=False)

            @hive.workflow
            async def changing() -> Any:
                await hive.sleep(0.2)  # meanwhile the run looks for messages
                return await _asks_after_another_step(steps)

            return await hive.run(changing, run_id="r")

    asyncio.run(first_life())
    assert asyncio.run(second_life()) == "early"


def test_a_sleep_that_is_no_longer_cancelled_lasts_as_long_as_it_says(folder: Path) -> None:
    async def first_life() -> None:
        with quick_hive(folder) as hive:
            steps = Steps(hive, is_first=True)

            @hive.workflow
            async def sleeps() -> None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.01):
                        await hive.sleep(0.5)
                await steps.gate()

            running = asyncio.create_task(hive.run(sleeps, run_id="r"))
            await until(lambda: steps.is_waiting)
            await leave(running)

    async def second_life() -> None:
        with quick_hive(folder) as hive:

            @hive.workflow
            async def sleeps() -> None:
                await hive.sleep(0.5)

            await hive.run(sleeps, run_id="r")

    started = time.monotonic()
    asyncio.run(first_life())
    asyncio.run(second_life())
    assert time.monotonic() - started >= 0.5


def test_a_sleep_that_moved_into_a_branch_is_not_waited_for_again(folder: Path) -> None:
    async def sleeps(s: Steps) -> Any:
        await asyncio.sleep(1)
        await s.gate()

    async def sleeps_in_a_branch(s: Steps) -> Any:
        await asyncio.gather(asyncio.sleep(1), s.b("x"))
        await s.gate()

    asyncio.run(live(folder, sleeps, is_first=True))
    started = time.monotonic()
    steps, _, differences = asyncio.run(live(folder, sleeps_in_a_branch, is_first=False))
    assert time.monotonic() - started < 1
    assert (steps.calls, differences) == (["b(x)"], [])


def test_a_timeout_around_other_code_still_ends_at_its_first_time(folder: Path) -> None:
    async def before(s: Steps) -> Any:
        async with asyncio.timeout(0.3):
            await s.a()
            await s.gate()

    async def after(s: Steps) -> Any:
        try:
            async with asyncio.timeout(0.3):
                await s.a()
                await s.b("x")
                await s.hive.sleep(60)
        except TimeoutError:
            return "late"

    asyncio.run(live(folder, before, is_first=True))
    time.sleep(0.3)  # until the time of the block is over
    steps, result, _ = asyncio.run(live(folder, after, is_first=False))
    assert (steps.calls, result) == ([], "late")
