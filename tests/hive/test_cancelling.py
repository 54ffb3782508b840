"""Ending a run: durable, wherever it is executed, and with all that it started."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import Hive, PersonaExecutor, RunCancelledError
from maestro_hive.hive import UnknownRunError
from maestro_hive.hive.inbox import Inbox
from maestro_hive.kernel.errors import ConfigurationError, RunLeasedError
from tests.hive.conftest import quick_config
from tests.hive.test_waits import status, until

if TYPE_CHECKING:
    from pathlib import Path


class Work:
    """Steps that take long, and tell how they ended."""

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
        async def child(name: str) -> str:
            return await slow(name)

        @hive.workflow
        async def parent() -> tuple[str, str, str]:
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
    assert {info.status for info in hive.runs()} == {"cancelled"}
    assert len(hive.runs()) == 3


def test_a_cancelled_run_stays_so_in_another_process_of_the_folder(folder: Path) -> None:
    async def main() -> None:
        with Hive(folder, quick_config()) as hive:
            work = Work(hive)
            handle = hive.start(work.parent, run_id="r")
            await work.started(4)
            handle.cancel()
            with pytest.raises(RunCancelledError):
                await handle.result()

    asyncio.run(main())
    with Hive(folder, quick_config()) as hive:
        work = Work(hive)
        with pytest.raises(RunCancelledError):
            hive.run_sync(work.parent, run_id="r")
        assert not work.outcomes


def test_a_workflow_cannot_refuse_to_be_cancelled(hive: Hive) -> None:
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
    asyncio.run(main(deaf, "b"))
    assert work.outcomes == ["one started", "one cancelled", "three started", "three cancelled"]


def test_a_run_that_no_process_executes_is_cancelled_at_once_with_its_children(
    folder: Path,
) -> None:
    async def main() -> None:
        with Hive(folder, quick_config()) as hive:
            work = Work(hive)
            running = asyncio.create_task(hive.run(work.parent, run_id="r"))
            await work.started(4)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert {info.status for info in hive.runs()} == {"stopped"}

    asyncio.run(main())
    with Hive(folder, quick_config()) as hive:
        assert hive.cancel("r", "by hand")
        assert {info.status for info in hive.runs()} == {"cancelled"}


def test_cancelling_no_run_says_so(hive: Hive) -> None:
    with pytest.raises(UnknownRunError, match="'nobody'"):
        hive.cancel("nobody")


def test_a_run_that_waits_can_be_cancelled(hive: Hive) -> None:
    @hive.workflow
    async def asking() -> Any:
        return await hive.wait_for("x")

    async def main() -> None:
        running = asyncio.create_task(hive.run(asking, run_id="r"))
        await until(lambda: status(hive) == "waiting")
        hive.cancel("r")
        with pytest.raises(RunCancelledError):
            await running

    asyncio.run(main())


def test_leaving_a_run_is_not_cancelling_it(folder: Path) -> None:
    async def main() -> None:
        with Hive(folder, quick_config()) as hive:
            work = Work(hive)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await hive.run(work.child, "x", run_id="r")
            assert status(hive) == "stopped"
            assert work.outcomes == ["x started", "x cancelled"]

    asyncio.run(main())


def test_a_run_that_was_killed_before_it_started_can_be_cancelled(hive: Hive) -> None:
    work = Work(hive)
    store = hive._open()
    store.release_run(
        store.acquire_run("r", "child")
    )  # as far as a start comes before its first entry
    assert hive.cancel("r", "never mind")
    with pytest.raises(RunCancelledError, match="never mind"):
        hive.run_sync(work.child, "x", run_id="r")
    assert not work.outcomes


def test_a_run_of_no_workflow_cannot_be_cancelled(hive: Hive) -> None:
    with (
        PersonaExecutor(hive.config, "worker", workflow_id="r"),
        pytest.raises(ConfigurationError, match="was not started by a workflow; stop the program"),
    ):
        hive.cancel("r")
    with pytest.raises(ConfigurationError, match="was not started by a workflow"):
        hive.cancel("r")


def test_cancelling_a_run_that_ends_in_this_moment_leaves_its_result(
    hive: Hive, monkeypatch: pytest.MonkeyPatch
) -> None:
    @hive.workflow
    async def quick() -> int:
        return 7

    store = hive._open()
    find = store.run
    hive.run_sync(quick, run_id="r")
    old = find("r")
    assert old is not None
    # As listings had it a moment before.
    monkeypatch.setattr(store, "run", lambda _: dataclasses.replace(old, status="running"))
    assert not hive.cancel("r")
    monkeypatch.undo()
    assert hive.run_sync(quick, run_id="r") == 7


def test_what_cleans_up_is_cancelled_once(hive: Hive) -> None:
    cleaned: list[str] = []

    @hive.step
    async def slow() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.6)
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
        await asyncio.sleep(0.3)
        hive.cancel("r")
        with pytest.raises(RunCancelledError):
            await running

    asyncio.run(main())
    assert cleaned == ["step", "workflow"]


def test_a_run_can_be_cancelled_and_watched_in_the_moment_it_is_started(hive: Hive) -> None:
    work = Work(hive)

    async def main() -> None:
        handle = hive.start(work.child, "x", run_id="r")
        assert handle.cancel("at once")
        with pytest.raises(RunCancelledError, match="at once"):
            await handle.result()
        watched = hive.start(work.child, "y", run_id="s")
        seen = [type(event).__name__ async for event in _until_started(hive)]
        assert seen[0] == "RunStarted"
        watched.cancel()
        with pytest.raises(RunCancelledError):
            await watched.result()

    asyncio.run(main())


async def _until_started(hive: Hive) -> Any:
    async for event in hive.events("s"):
        yield event
        return


def test_children_left_uncancelled_by_a_kill_can_be_cancelled_again(folder: Path) -> None:
    async def main() -> None:
        with Hive(folder, quick_config()) as hive:
            work = Work(hive)
            running = asyncio.create_task(hive.run(work.parent, run_id="r"))
            await work.started(4)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

    asyncio.run(main())
    with Hive(folder, quick_config()) as hive:
        child = next(info.run_id for info in hive.runs() if info.run_id != "r")
        hive.cancel(child)  # as far as a kill lets it come
        assert status(hive) == "stopped"
        assert hive.cancel("r")
        assert {info.status for info in hive.runs()} == {"cancelled"}


def test_retrying_a_run_that_is_executed_changes_nothing(hive: Hive) -> None:
    work = Work(hive)

    async def main() -> None:
        running = asyncio.create_task(hive.run(work.child, "x", run_id="r"))
        await work.started(1)
        Inbox(hive._open()).cancel("r", "from elsewhere")
        with pytest.raises(RunLeasedError):
            hive.retry("r")
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
    async def child(name: str) -> str:
        return await work(name)

    @hive.workflow
    async def parent() -> list[str]:
        return list(await asyncio.gather(work("a"), work("b"), child("c")))

    async def stop_after(turns: int) -> bool:
        """Return whether the run had ended by itself after so many turns of the loop."""
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
