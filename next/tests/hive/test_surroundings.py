"""A hive in the world: breakers that are open, memory alone, signals."""

from __future__ import annotations

import asyncio
import gc
import signal
import weakref
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.breaker import NAMESPACE
from maestro_hive.engine.config import ExecutionConfig, Level1Config, Level2Config, StateConfig
from maestro_hive.engine.errors import CircuitBreakerOpen
from maestro_hive.hive.hive import Hive
from maestro_hive.journal.entries import AttemptFailed
from maestro_hive.kernel.errors import RunFailedError
from tests.hive.conftest import entries_of, quick_config, quick_hive, status, store_of, until
from tests.hive.test_kills import printed, program  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from pathlib import Path


def test_an_open_breaker_is_no_failure_of_the_run(folder: Path) -> None:
    calls: list[int] = []
    is_down = [True]
    level2 = Level2Config(base_delay_seconds=0, circuit_breaker_threshold=1)
    config = ExecutionConfig(level1=Level1Config(base_delay_seconds=0), level2=level2)
    with Hive(folder, config) as hive:

        @hive.step(breaker="anthropic", max_attempts=1)
        async def ask() -> int:
            if is_down:
                raise ConnectionError("down")
            calls.append(1)
            return 7

        @hive.workflow
        async def work() -> int:
            return await ask()

        with pytest.raises(RunFailedError):
            hive.run_sync(work)
        is_down.clear()
        with pytest.raises(CircuitBreakerOpen, match="anthropic"):
            hive.run_sync(work, run_id="r")
        assert not calls
        assert status(hive) == "stopped"
        store = store_of(hive)
        version, _ = store.document(NAMESPACE, "anthropic")
        assert store.drop_document(NAMESPACE, "anthropic", version)
        assert hive.run_sync(work, run_id="r") == 7


def test_steps_of_one_breaker_trip_it_for_all(folder: Path) -> None:
    config = ExecutionConfig(
        level1=Level1Config(base_delay_seconds=0),
        level2=Level2Config(base_delay_seconds=0, circuit_breaker_threshold=2),
    )
    with Hive(folder, config) as hive:

        @hive.step(breaker="anthropic", max_attempts=2, rounds=2)
        async def bad() -> None:
            raise ConnectionError("no")

        @hive.step(breaker="anthropic")
        async def good() -> None: ...

        @hive.workflow
        async def first() -> None:
            await bad()

        @hive.workflow
        async def second() -> None:
            await good()

        with pytest.raises(RunFailedError):
            hive.run_sync(first)
        with pytest.raises(CircuitBreakerOpen):
            hive.run_sync(second)


def test_without_persistence_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = quick_config()
    config.state = StateConfig(enable_persistence=False)
    with Hive("state", config) as hive:

        @hive.step(rate="1000/s", max_concurrency=2)
        async def double(number: int) -> int:
            return number * 2

        @hive.workflow
        async def work() -> list[int]:
            await hive.sleep(0.01)
            return list(await asyncio.gather(*(double(each) for each in range(5))))

        assert hive.run_sync(work, run_id="r") == [0, 2, 4, 6, 8]
        assert hive.run_sync(work, run_id="r") == [0, 2, 4, 6, 8]
        assert [info.status for info in hive.runs()] == ["success"]
    assert list(tmp_path.iterdir()) == []


def test_limits_of_a_step_hold_in_its_runs(hive: Hive) -> None:
    busy = most = 0

    @hive.step(max_concurrency=2)
    async def work(number: int) -> int:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await until(lambda: most == 2)
        await asyncio.sleep(0.05)
        busy -= 1
        return number

    @hive.workflow
    async def many(first: int) -> int:
        return sum(await asyncio.gather(*(work(first + each) for each in range(5))))

    async def main() -> None:
        await asyncio.gather(*(hive.run(many, first * 100) for first in range(3)))

    asyncio.run(main())
    assert most == 2


def test_a_run_that_is_stopped_as_its_child_ends_leaves_no_error_behind(hive: Hive) -> None:
    overlooked: list[dict[str, Any]] = []
    cleaned: list[asyncio.Event] = []

    @hive.step
    async def clean() -> None:
        cleaned[-1].set()

    @hive.workflow
    async def child() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await clean()

    @hive.workflow
    async def parent() -> None:
        async with hive.timeout(0.2):  # time enough for the child to start
            await child()

    async def stopped_after(ticks: int) -> bool:
        """Stop a run some ticks of the loop after its child was cancelled."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, about: overlooked.append(about))
        cleaned.append(asyncio.Event())
        caller = asyncio.ensure_future(hive.run(parent, run_id=f"r{ticks}"))
        async with asyncio.timeout(30):
            await cleaned[-1].wait()  # without a poll, in which the run would end
        for _ in range(ticks):
            await asyncio.sleep(0)
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        return caller.cancelled()

    stopped = [asyncio.run(stopped_after(ticks)) for ticks in range(12)]
    gc.collect()
    assert any(stopped)
    assert not overlooked


_MANY = """
    import signal

    @hive.step
    async def slow(number):
        say("started", number)
        await asyncio.sleep(float(sys.argv[2]))
        return number

    @hive.workflow
    async def one(number):
        return await slow(number)

    async def main():
        task = asyncio.current_task()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await asyncio.gather(*(hive.run(one, n, run_id=f"r{n}") for n in range(5)))

    try:
        print(sum(asyncio.run(main())))
    except asyncio.CancelledError:
        sys.exit(143)
"""


@pytest.mark.parametrize("number, code", [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)])
def test_a_program_that_cancels_its_task_stops_all_runs_gracefully(
    tmp_path: Path,
    program: Any,  # noqa: F811 - the fixture
    number: signal.Signals,
    code: int,
) -> None:
    child = program(_MANY, "60")
    child.wait_for(lambda: len(printed(tmp_path)) == 5)
    child.process.send_signal(number)
    ended, out, err = child.end()
    assert (ended, out) == (code, ""), err
    assert "never retrieved" not in err
    with quick_hive(tmp_path / "state") as hive:
        assert {info.status for info in hive.runs()} == {"stopped"}
        for run in range(5):
            last = asyncio.run(entries_of(hive, f"r{run}"))[-1]
            assert isinstance(last, AttemptFailed)
            assert last.status == "stopped"
    ended, out, err = program(_MANY, "0").end()
    assert (ended, out) == (0, "10\n"), err


def test_a_step_does_not_hold_the_tasks_that_it_is_done_with(hive: Hive) -> None:
    class Result:
        """Something that can be referred to weakly."""

    made: list[weakref.ref[Result]] = []

    async def make() -> Result:
        result = Result()
        made.append(weakref.ref(result))
        return result

    @hive.step
    async def many() -> int:
        for _ in range(20):
            await asyncio.create_task(make())
            await asyncio.get_running_loop().create_task(make(), context=copy_context())
        gc.collect()
        return sum(each() is not None for each in made)

    @hive.workflow
    async def work() -> tuple[int, int]:
        for _ in range(20):
            await asyncio.get_running_loop().create_task(make(), context=copy_context())
        gc.collect()
        return sum(each() is not None for each in made), await many()

    in_workflow, in_step = hive.run_sync(work)
    assert in_workflow <= 1
    assert in_step <= 2
