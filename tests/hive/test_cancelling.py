"""Ending a run: durable, wherever it is executed, and with all that it started."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import Hive, PersonaExecutor, RunCancelledError
from maestro_hive.engine.open_run import append_entries
from maestro_hive.hive import UnknownRunError, runs
from maestro_hive.hive.inbox import Inbox, watcher_for
from maestro_hive.hive.waits import deliver
from maestro_hive.kernel.errors import ConfigurationError, RunLeasedError
from maestro_hive.maestro.state.events import RunEnded
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from tests.hive.conftest import quick_config
from tests.hive.test_waits import status, until
from tests.python_processes import run_python

if TYPE_CHECKING:
    from pathlib import Path

    from tests.hive.conftest import PassedTime


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


def test_the_end_of_a_cancelled_run_is_one_write_with_its_lease(
    hive: Hive, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(hive)
    store = hive._open()

    def fail(*_: object) -> None:
        raise AssertionError("a write of its own, whose failure would be reported to no caller")

    async def main() -> None:
        running = asyncio.create_task(hive.run(work.child, "x", run_id="r"))
        await work.started(1)
        monkeypatch.setattr(store, "release_run", fail)
        assert hive.cancel("r")
        with pytest.raises(RunCancelledError):
            await running

    asyncio.run(main())
    assert store.run_leases() == {}


def test_a_cancelled_run_stays_so_in_another_process_of_the_folder(folder: Path) -> None:
    async def main() -> None:
        with Hive(folder, quick_config()) as hive:
            work = Work(hive)
            handle = await hive.start(work.parent, run_id="r")
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


def test_a_workflow_cannot_refuse_to_be_cancelled(folder: Path, clock: PassedTime) -> None:
    hive = Hive(folder, quick_config(), cancel_grace=60)
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
        if workflow is stubborn:
            await work.started(3)
            clock.advance(60)
        with pytest.raises(RunCancelledError):
            await running

    with hive:
        asyncio.run(main(stubborn, "a"))
        assert work.outcomes == ["one started", "one cancelled", "two started", "two cancelled"]
        asyncio.run(main(deaf, "b"))
    assert work.outcomes[4:] == ["three started", "three cancelled"]


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
        events = hive.events("r", follow=False)
        return [event async for event in events if isinstance(event, RunEnded)]

    assert len(asyncio.run(main())) == 1


def test_a_request_to_cancel_that_comes_after_the_workflow_leaves_nothing_behind(
    hive: Hive,
) -> None:
    is_seen = asyncio.Event()

    @hive.workflow
    async def ends() -> list[str]:
        await is_seen.wait()
        return ["large"] * 200_000  # which is encoded in a thread

    async def main() -> set[Any]:
        running = asyncio.create_task(hive.run(ends, run_id="r"))
        watcher = watcher_for(hive._open(), deliver)
        await until(lambda: "r" in watcher.runs)
        active = watcher.runs["r"]
        ended = active.root.task
        assert ended is not None
        is_seen.set()
        await asyncio.wait({ended})
        assert not running.done()
        active.cancel("too late")
        assert len(await running) == 200_000
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(main()) == set()
    assert status(hive) == "success"


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
    async def end_when_started(work: Work, limit: asyncio.Timeout) -> None:
        await work.started(1)
        limit.reschedule(asyncio.get_running_loop().time())

    async def run_until_started(hive: Hive, work: Work) -> None:
        async with asyncio.timeout(None) as limit:
            late = asyncio.create_task(end_when_started(work, limit))
            await hive.run(work.child, "x", run_id="r")
            await late

    async def main() -> None:
        with Hive(folder, quick_config()) as hive:
            work = Work(hive)
            with pytest.raises(TimeoutError):
                await run_until_started(hive, work)
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
    has_started = asyncio.Event()

    @hive.step
    async def slow() -> None:
        has_started.set()
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
        await has_started.wait()
        hive.cancel("r")
        with pytest.raises(RunCancelledError):
            await running

    asyncio.run(main())
    assert cleaned == ["step", "workflow"]


def test_a_run_can_be_cancelled_and_watched_in_the_moment_it_is_started(hive: Hive) -> None:
    work = Work(hive)

    async def main() -> None:
        handle = await hive.start(work.child, "x", run_id="r")
        assert handle.cancel("at once")
        with pytest.raises(RunCancelledError, match="at once"):
            await handle.result()
        watched = await hive.start(work.child, "y", run_id="s")
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
    hive: Hive, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that no turn of the loop goes by while a thread writes.
    monkeypatch.setattr(SqliteStore, "syncs_fast", lambda _: True)
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


# --- children of a run that no process executes ------------------------------------------------------

_FAMILY = """
import asyncio, os, sys
from maestro_hive import Hive

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


@pytest.mark.parametrize(
    "killed_at, before",
    [
        ("grandchild", ["running", "running", "running"]),
        ("clean up", ["running", "running"]),  # the parent itself cancelled the child
    ],
)
def test_children_of_a_killed_run_end_with_it_to_any_depth(
    folder: Path, killed_at: str, before: list[str]
) -> None:
    assert run_python(_FAMILY, folder, killed_at).returncode == -9
    with Hive(folder, quick_config()) as hive:
        assert sorted(each.status for each in hive._open().runs()) == before
        assert hive.cancel("r", "by hand")
        left = {each.name: each.status for each in hive._open().runs()}
        assert set(left.values()) == {"cancelled"}, left
        assert not hive.cancel("r")


def test_children_that_were_left_by_an_ended_run_are_cancelled_by_the_same_request(
    folder: Path,
) -> None:
    run_python(_FAMILY, folder, "grandchild")
    with Hive(folder, quick_config()) as hive:
        store = hive._open()
        lease = store.acquire_run("r")
        append_entries(store, lease, [runs.ended("failed", error={})], "failed")
        store.release_run(lease)
        assert hive.cancel("r")
        assert sorted(each.status for each in store.runs()) == ["cancelled", "cancelled", "failed"]
        assert not hive.cancel("r")


@pytest.mark.parametrize("reason", [object(), 3, "\udcff"])
def test_a_reason_that_cannot_be_stored_is_refused_and_nothing_is_cancelled(
    hive: Hive, reason: Any
) -> None:
    @hive.workflow
    async def asks() -> str:
        return await hive.wait_for("name", type=str)

    async def main() -> None:
        handle = await hive.start(asks, run_id="asks")
        await until(lambda: status(hive, "asks") == "waiting")
        for refused in (hive.cancel, lambda run_id, why: hive.handle(run_id).cancel(why)):
            with pytest.raises(ConfigurationError, match="reason"):
                refused("asks", reason)
        with pytest.raises(ConfigurationError, match="by"):
            hive.answer("asks", "name", "x", by=reason)
        hive.answer("asks", "name", "x")
        assert await handle.result() == "x"

    asyncio.run(main())
