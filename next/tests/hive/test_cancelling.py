"""Ending a run: durable, wherever it is executed, and with all that it started."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.journal.entries import CancelRequested, RunEnded, StepCompleted
from maestro_hive.kernel.errors import RunCancelledError, RunLeasedError, UnknownRunError
from tests.hive.conftest import (
    asks,
    copy_live,
    entries_of,
    leave,
    quick_hive,
    status,
    until,
    until_recorded,
)
from tests.python_processes import run_python

if TYPE_CHECKING:
    from pathlib import Path

    from maestro_hive.hive.hive import Hive


class Work:
    """Steps that take long, and report how they ended."""

    def __init__(self, hive: Hive) -> None:
        self.outcomes: list[str] = []
        self.hive = hive

        @hive.step
        async def slow(name: str) -> str:
            self.outcomes.append(f"{name} started")
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                self.outcomes.append(f"{name} cancelled")
                raise
            return name

        @hive.workflow
        async def child(name: str) -> Any:
            return await slow(name)

        @hive.workflow
        async def parent() -> Any:
            self.detached = asyncio.create_task(slow("detached"))
            return await asyncio.gather(slow("step"), child("child"), child("other"))

        self.slow, self.child, self.parent = slow, child, parent

    async def started(self, count: int) -> None:
        await until(lambda: len(self.outcomes) == count)


def test_cancelling_a_run_cancels_its_steps_its_children_and_what_it_detached(hive: Hive) -> None:
    work = Work(hive)

    async def main() -> None:
        running = asyncio.create_task(hive.run(work.parent, run_id="r"))
        await work.started(4)
        assert hive.cancel("r", "enough")
        with pytest.raises(RunCancelledError, match="enough"):
            await running
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]

    asyncio.run(main())
    assert sorted(work.outcomes[4:]) == [
        f"{name} cancelled" for name in ("child", "detached", "other", "step")
    ]
    assert {each.status for each in hive.runs()} == {"cancelled"}
    assert len(hive.runs()) == 3


def test_a_cancelled_run_stays_so_in_another_process_of_the_folder(folder: Path) -> None:
    async def main() -> None:
        with quick_hive(folder) as hive:
            work = Work(hive)
            handle = await hive.start(work.parent, run_id="r")
            await work.started(4)
            handle.cancel()
            with pytest.raises(RunCancelledError):
                await handle.result()

    asyncio.run(main())
    with quick_hive(folder) as hive:
        work = Work(hive)
        with pytest.raises(RunCancelledError):
            hive.run_sync(work.parent, run_id="r")
        assert not work.outcomes


def test_a_workflow_cannot_refuse_to_be_cancelled(folder: Path) -> None:
    hive = quick_hive(folder, cancel_grace=0.5)
    work = Work(hive)

    @hive.workflow
    async def stubborn() -> str:
        try:
            await work.slow("one")
        except asyncio.CancelledError:
            await work.slow("two")
        return "done"

    @hive.workflow
    async def deaf() -> str:
        try:
            await work.slow("three")
        except asyncio.CancelledError:
            return "done all the same"
        return "done"

    async def main(workflow: Any, run_id: str) -> None:
        running = asyncio.create_task(hive.run(workflow, run_id=run_id))
        await until(lambda: status(hive, run_id) == "running" and len(work.outcomes) % 2 == 1)
        hive.cancel(run_id)
        with pytest.raises(RunCancelledError):
            await running

    asyncio.run(main(stubborn, "a"))
    assert work.outcomes == ["one started", "one cancelled", "two started", "two cancelled"]
    asyncio.run(main(deaf, "b"))
    assert work.outcomes[4:] == ["three started", "three cancelled"]


def test_a_clean_up_whose_time_is_over_is_not_started(tmp_path: Path) -> None:
    calls: list[str] = []

    async def life(folder: Path, *, is_first: bool) -> None:
        with quick_hive(folder, cancel_grace=0.5) as hive:

            @hive.step
            async def ready() -> None:
                pass

            @hive.step
            async def work(name: str) -> None:
                calls.append(name)
                if name == "clean" and is_first:
                    copy_live(folder, tmp_path / "copy")
                    await asyncio.sleep(30)

            @hive.workflow
            async def build() -> None:
                await ready()
                try:
                    await hive.sleep(60)
                finally:
                    await work("clean")
                    await work("more")

            running = asyncio.create_task(hive.run(build, run_id="r"))
            if is_first:
                await until_recorded(hive, StepCompleted)
                hive.cancel("r")
            with pytest.raises(RunCancelledError):
                await running

    asyncio.run(life(tmp_path / "first", is_first=True))
    asyncio.run(life(tmp_path / "copy", is_first=False))
    assert calls == ["clean"]


def test_the_end_of_a_cancelled_run_is_recorded_once(hive: Hive) -> None:
    work = Work(hive)

    @hive.workflow
    async def returns() -> str:
        try:
            await work.slow("one")
        except asyncio.CancelledError:
            return "done all the same"
        return "done"

    async def main() -> list[Any]:
        running = asyncio.create_task(hive.run(returns, run_id="r"))
        await work.started(1)
        hive.cancel("r")
        with pytest.raises(RunCancelledError):
            await running
        return [each for each in await entries_of(hive) if isinstance(each, RunEnded)]

    assert len(asyncio.run(main())) == 1


def test_a_request_to_cancel_that_comes_after_the_workflow_leaves_nothing_behind(
    hive: Hive,
) -> None:
    @hive.step
    async def last() -> str:
        hive.cancel("r", "too late")  # taken when this step has its result
        return "done"

    @hive.workflow
    async def ends() -> Any:
        return await last()

    async def main() -> set[Any]:
        assert await hive.run(ends, run_id="r") == "done"
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(main()) == set()
    assert status(hive) == "success"


def test_a_run_that_no_process_executes_is_cancelled_at_once_with_its_children(
    folder: Path,
) -> None:
    async def main() -> None:
        with quick_hive(folder) as hive:
            work = Work(hive)
            running = asyncio.create_task(hive.run(work.parent, run_id="r"))
            await work.started(4)
            await leave(running)
            assert {each.status for each in hive.runs()} == {"stopped"}

    asyncio.run(main())
    with quick_hive(folder) as hive:
        assert hive.cancel("r", "by hand")
        assert {each.status for each in hive.runs()} == {"cancelled"}


def test_cancelling_no_run_says_so(hive: Hive) -> None:
    with pytest.raises(UnknownRunError, match="'nobody'"):
        hive.cancel("nobody")


def test_a_run_that_waits_can_be_cancelled(hive: Hive) -> None:
    @hive.workflow
    async def asking() -> Any:
        return await hive.wait_for("x")

    async def main() -> None:
        running = asyncio.create_task(hive.run(asking, run_id="r"))
        await until(lambda: asks(hive))
        hive.cancel("r")
        with pytest.raises(RunCancelledError):
            await running

    asyncio.run(main())


def test_leaving_a_run_is_not_cancelling_it(folder: Path) -> None:
    async def end_when_started(work: Work, limit: asyncio.Timeout) -> None:
        await work.started(1)
        limit.reschedule(asyncio.get_running_loop().time())

    async def run_until_started(hive: Hive, work: Work) -> None:
        async with asyncio.timeout(None) as limit:
            late = asyncio.create_task(end_when_started(work, limit))
            await hive.run(work.child, "x", run_id="r")
            await late

    async def main() -> None:
        with quick_hive(folder) as hive:
            work = Work(hive)
            with pytest.raises(TimeoutError):
                await run_until_started(hive, work)
            assert status(hive) == "stopped"
            assert work.outcomes == ["x started", "x cancelled"]

    asyncio.run(main())


def test_cancelling_a_run_that_has_ended_leaves_its_result(hive: Hive) -> None:
    @hive.workflow
    async def quick() -> int:
        return 7

    hive.run_sync(quick, run_id="r")
    assert not hive.cancel("r")
    assert hive.run_sync(quick, run_id="r") == 7


def test_what_cleans_up_is_cancelled_once(hive: Hive) -> None:
    cleaned: list[str] = []
    has_started = asyncio.Event()

    @hive.step
    async def slow() -> None:
        has_started.set()
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.3)
            cleaned.append("step")

    @hive.workflow
    async def work() -> None:
        try:
            await slow()
        finally:
            await asyncio.sleep(0.3)
            cleaned.append("workflow")

    async def main() -> None:
        running = asyncio.create_task(hive.run(work, run_id="r"))
        await has_started.wait()
        hive.cancel("r")
        with pytest.raises(RunCancelledError):
            await running

    asyncio.run(main())
    assert cleaned == ["step", "workflow"]


def test_a_second_request_changes_nothing(hive: Hive) -> None:
    work = Work(hive)
    cleaned: list[str] = []

    @hive.step
    async def clean() -> None:
        hive.cancel("r", "again")
        await asyncio.sleep(0.1)  # while the request is taken
        cleaned.append("clean")

    @hive.workflow
    async def build() -> None:
        try:
            await work.slow("one")
        finally:
            await clean()

    async def main() -> list[str]:
        running = asyncio.create_task(hive.run(build, run_id="r"))
        await work.started(1)
        hive.cancel("r", "first")
        with pytest.raises(RunCancelledError, match="first"):
            await running
        entries = await entries_of(hive)
        return [each.reason for each in entries if isinstance(each, CancelRequested)]

    assert asyncio.run(main()) == ["first"]
    assert cleaned == ["clean"]


def test_a_run_can_be_cancelled_and_watched_in_the_moment_it_is_started(hive: Hive) -> None:
    work = Work(hive)

    async def main() -> None:
        handle = await hive.start(work.child, "x", run_id="r")
        assert handle.cancel("at once")
        with pytest.raises(RunCancelledError, match="at once"):
            await handle.result()
        watched = await hive.start(work.child, "y", run_id="s")
        seen = [type(each.entry).__name__ async for each in _until_started(hive)]
        assert seen[0] == "RunStarted"
        watched.cancel()
        with pytest.raises(RunCancelledError):
            await watched.result()

    asyncio.run(main())


async def _until_started(hive: Hive) -> Any:
    async for event in hive.events("s"):
        yield event
        return


def test_retrying_a_run_that_is_executed_changes_nothing(hive: Hive) -> None:
    work = Work(hive)

    async def main() -> None:
        running = asyncio.create_task(hive.run(work.child, "x", run_id="r"))
        await work.started(1)
        with pytest.raises(RunLeasedError):
            hive.retry("r")
        hive.cancel("r", "from elsewhere")
        with pytest.raises(RunCancelledError, match="from elsewhere"):
            await running

    asyncio.run(main())


def test_a_task_cancelled_at_any_moment_ends_as_cancelled_and_its_run_is_resumed(
    hive: Hive,
) -> None:
    calls: list[str] = []

    @hive.step
    async def work(name: str) -> str:
        await asyncio.sleep(0)
        calls.append(name)
        return name

    @hive.workflow
    async def child(name: str) -> Any:
        return await work(name)

    @hive.workflow
    async def parent() -> Any:
        return list(await asyncio.gather(work("a"), work("b"), child("c")))

    async def stop_after(turns: int) -> bool:
        """Return whether the run had ended by itself after that many turns of the loop."""
        running = asyncio.create_task(hive.run(parent, run_id=f"r{turns}"))
        for _ in range(turns):
            await asyncio.sleep(0)
        ended = running.done()
        if not running.cancel():
            return ended
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await hive.run(parent, run_id=f"r{turns}") == ["a", "b", "c"]
        return ended

    async def main() -> None:
        for turns in range(200):
            if await stop_after(turns):
                return
        pytest.fail("the run never ended by itself")

    asyncio.run(main())


_FAMILY = """
import asyncio, os, sys
from maestro_hive.hive.hive import Hive

hive = Hive(sys.argv[1])

is_cleaning = asyncio.Event()

@hive.step
async def slow(name):
    print(name, flush=True)
    if name == "cleaning":
        is_cleaning.set()
    if name == sys.argv[2]:
        os.kill(os.getpid(), 9)
    await asyncio.sleep(60)

@hive.workflow
async def grandchild():
    await slow("grandchild")

@hive.workflow
async def cleaning():
    try:
        await slow("cleaning")
    finally:
        await slow("clean up")

@hive.workflow
async def child():
    await grandchild()

@hive.workflow
async def parent():
    if sys.argv[2] == "clean up":
        left = asyncio.create_task(cleaning())
        await is_cleaning.wait()
        left.cancel()
        await asyncio.wait([left])
    await child()

hive.run_sync(parent, run_id="r")
"""


@pytest.mark.parametrize("killed_at, count", [("grandchild", 3), ("clean up", 2)])
def test_children_of_a_killed_run_end_with_it_to_any_depth(
    folder: Path, killed_at: str, count: int
) -> None:
    """In the clean-up of a child, the parent itself has cancelled it."""
    assert run_python(_FAMILY, folder, killed_at).returncode == -9
    with quick_hive(folder) as hive:
        assert [each.status for each in hive.runs()] == ["running"] * count
        assert hive.cancel("r", "by hand")
        assert {each.status for each in hive.runs()} == {"cancelled"}
        assert not hive.cancel("r")


def test_a_cancelled_run_that_asks_is_released_although_it_was_cancelled_twice(
    folder: Path,
) -> None:
    async def main() -> None:
        with quick_hive(folder) as hive:

            @hive.step
            async def ready() -> None:
                pass

            @hive.workflow
            async def build() -> None:
                await ready()
                try:
                    await hive.sleep(60)
                finally:
                    await hive.wait_for("sure")

            handle = hive.enqueue(build, run_id="r")
            async with hive.worker(release_after=0.01, grace=0):
                await until_recorded(hive, StepCompleted)
                hive.cancel("r", "first")
                await until(lambda: asks(hive))
                hive.cancel("r", "second")
                await until(lambda: status(hive) == "waiting")
                hive.answer("r", "sure", True)
                with pytest.raises(RunCancelledError, match="first"):
                    await handle.result()

    asyncio.run(main())
