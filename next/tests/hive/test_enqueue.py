"""Runs without a caller: durable once accepted, from any process and from workflows."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.errors import CircuitBreakerOpen
from maestro_hive.kernel.errors import (
    ConfigurationError,
    InvalidIdentifierError,
    RunFailedError,
    RunInactiveError,
    RunLeasedError,
    RunMismatchError,
)
from tests.hive.conftest import leave, quick_hive, status, store_of, until
from tests.hive.worker_programs import Programs, kill, programs_in, until_true

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from maestro_hive.hive.hive import Hive


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as made:
        yield made


def work_of(hive: Hive) -> Any:
    @hive.step
    async def double(number: int) -> int:
        if number < 0:
            raise ValueError("negative")
        return 2 * number

    @hive.workflow
    async def work(number: int, times: int = 1) -> int:
        for _ in range(times):
            number = await double(number)
        return number

    return work


# --- accepted is durable --------------------------------------------------------------------------


def test_what_was_started_is_there_after_a_kill_in_the_next_moment(programs: Programs) -> None:
    process = programs.start("""
        async def main():
            await hive.start(hangs, "x", run_id="r")
            kill()
        asyncio.run(main())
    """)
    assert process.wait(20) == -9
    assert programs.notes() == []  # it had not started yet
    programs.touch("free")
    programs.worker()
    assert asyncio.run(programs.hive.handle("r").result()) == "x"
    assert programs.notes() == ["hanging x"]


@pytest.mark.parametrize(
    "call", ["hive.enqueue(job, 'x', run_id='r')", "hive.enqueue('job', 'x', run_id='r')"]
)
def test_what_was_enqueued_is_there_after_a_kill_in_the_next_moment(
    programs: Programs, call: str
) -> None:
    process = programs.start(f"{call}\nkill()")
    assert process.wait(20) == -9
    assert programs.status("r") == "pending"
    programs.worker()
    assert asyncio.run(programs.hive.handle("r").result()) == [0, 1, 2]


def test_a_started_run_whose_process_dies_is_taken_by_a_worker(programs: Programs) -> None:
    process = programs.start("""
        async def main():
            handle = await hive.start(hangs, "x", run_id="r")
            print(await handle.result())
        asyncio.run(main())
    """)
    until_true(lambda: programs.notes("hanging"))
    programs.touch("free")
    programs.worker()
    kill(process)
    assert asyncio.run(programs.hive.handle("r").result()) == "x"
    assert len(programs.notes("hanging")) == 2


def test_a_run_that_is_stopped_politely_after_start_is_ready_for_workers(hive: Hive) -> None:
    @hive.workflow
    async def waits() -> None:
        await hive.sleep(600)

    async def main() -> None:
        await hive.start(waits, run_id="r")
        await asyncio.sleep(0.05)

    asyncio.run(main())
    assert status(hive) == "waiting"  # no process has it
    assert store_of(hive).find("r").holder is None


# --- the same run ---------------------------------------------------------------------------------


def test_an_id_that_is_empty_is_refused(hive: Hive) -> None:
    with pytest.raises(InvalidIdentifierError, match="run id"):
        hive.enqueue("work", run_id="")


def test_the_same_id_is_the_same_run(hive: Hive) -> None:
    work = work_of(hive)

    async def main() -> None:
        async with hive.worker():
            one, two = hive.enqueue(work, 4, run_id="r"), hive.enqueue(work, number=4, run_id="r")
            assert [await one.result(), await two.result()] == [8, 8]
            assert await hive.enqueue(work, 4, run_id="r").result() == 8  # also when it has ended
            assert await (await hive.start(work, 4, run_id="r")).result() == 8
            assert await hive.run(work, 4, run_id="r") == 8

    asyncio.run(main())
    assert [run.run_id for run in hive.runs()] == ["r"]
    for wrong in (5, "4"):
        with pytest.raises(RunMismatchError, match="other arguments"):
            hive.enqueue(work, wrong, run_id="r")
    with pytest.raises(RunMismatchError, match="belongs to the workflow 'work'"):
        hive.enqueue("other", 4, run_id="r")


@pytest.mark.parametrize("first", ["by name", "by the function"])
def test_a_call_by_name_without_the_code_is_the_same_run(folder: Path, first: str) -> None:
    with quick_hive(folder) as without, quick_hive(folder) as hive:
        work = work_of(hive)
        given: list[tuple[list[Any], dict[str, Any]]] = [
            ([4], {"times": 2}),
            ([], {"times": 2, "number": 4}),
        ]
        args, kwargs = given[-1]
        if first == "by name":
            without.enqueue("work", *args, run_id="r", **kwargs)
        else:
            hive.enqueue(work, 4, 2, run_id="r")
        for args, kwargs in given:
            hive.enqueue(work, *args, run_id="r", **kwargs)
            if not args:  # which parameter it is for is not known without the code
                without.enqueue("work", *args, run_id="r", **kwargs)
        with pytest.raises(RunMismatchError):
            without.enqueue("work", 4, times=3, run_id="r")
        with pytest.raises(RunMismatchError):
            hive.enqueue(work, 4, run_id="r")

        async def main() -> int:
            async with hive.worker():
                return int(await without.handle("r").result())

        assert asyncio.run(main()) == 16


def test_enqueuing_a_run_that_its_caller_left_gives_it_to_workers(hive: Hive) -> None:
    work = work_of(hive)

    @hive.workflow
    async def waits() -> None:
        await hive.sleep(600)

    async def main() -> None:
        running = asyncio.create_task(hive.run(waits, run_id="r"))
        await until(lambda: status(hive) == "waiting")
        await leave(running)

    asyncio.run(main())
    assert status(hive) == "stopped"
    hive.enqueue(waits, run_id="r")
    assert status(hive) == "pending"
    with pytest.raises(RunMismatchError):
        hive.enqueue(work, 1, run_id="r")


# --- handles ------------------------------------------------------------------------------------


def test_a_run_that_its_caller_executes_elsewhere_is_not_accepted(programs: Programs) -> None:
    programs.start("hive.run_sync(hangs, 'x', run_id='r')")
    until_true(lambda: programs.notes("hanging"))
    with pytest.raises(RunLeasedError):  # stopped by its caller, no worker would have it
        programs.hive.enqueue("hangs", name="x", run_id="r")


def test_a_handle_gives_the_failure(hive: Hive) -> None:
    work = work_of(hive)

    async def main() -> None:
        async with hive.worker():
            with pytest.raises(RunFailedError, match="negative"):
                await hive.enqueue(work, -1).result()

    asyncio.run(main())


def test_the_handle_of_a_run_that_no_process_executes_says_so(hive: Hive) -> None:
    @hive.workflow
    async def waits() -> None:
        await hive.sleep(600)

    async def main() -> None:
        running = asyncio.create_task(hive.run(waits, run_id="r"))
        await until(lambda: status(hive) == "waiting")
        await leave(running)
        with pytest.raises(RunInactiveError):
            await hive.handle("r").result()

    asyncio.run(main())


def test_the_handle_of_a_run_that_another_process_executes_follows_it(programs: Programs) -> None:
    programs.hive.enqueue("hangs", "x", run_id="r")
    process = programs.worker()
    until_true(lambda: programs.notes("hanging"))

    @programs.hive.workflow
    async def hangs(name: str) -> str:
        return f"not {name}"

    async def main() -> str:
        handle = await programs.hive.start(hangs, "x", run_id="r")
        assert handle.status == "running"
        programs.touch("free")
        await asyncio.to_thread(kill, process)
        await asyncio.to_thread(programs.worker)
        return await handle.result()

    assert asyncio.run(main()) == "x"


def test_what_suspends_a_started_run_is_raised_where_no_worker_takes_it(hive: Hive) -> None:
    is_down = [True]

    @hive.step(breaker="down", max_attempts=1, rounds=1)
    async def call() -> str:
        if is_down:
            raise ConnectionError("down")
        return "called"

    @hive.workflow
    async def calls() -> str:
        return await call()

    async def main() -> None:
        for _ in range(1000):  # as many as trip the breaker
            with pytest.raises(RunFailedError):
                await hive.run(calls)
        handle = await hive.start(calls, run_id="r")
        with pytest.raises(CircuitBreakerOpen):
            await handle.result()
        async with hive.worker(["mail"]), asyncio.timeout(10):  # of another queue
            with pytest.raises(CircuitBreakerOpen):
                await handle.result()
        assert handle.status == "waiting"

    asyncio.run(main())


# --- options --------------------------------------------------------------------------------------


def test_a_delayed_run_waits(hive: Hive) -> None:
    work = work_of(hive)
    hive.enqueue(work, 1, run_id="later", delay=600)
    hive.enqueue(work, 1, run_id="soon", delay=0.2)

    async def main() -> None:
        async with hive.worker():
            assert await hive.handle("soon").result() == 2
            assert hive.handle("later").status == "waiting"

    asyncio.run(main())


@pytest.mark.parametrize(
    "options",
    [
        {"queue": "a/b"},
        {"priority": 0.5},
        {"priority": True},
        {"delay": -1},
        {"delay": float("inf")},
        {"version": ""},
        {"version": "\ud800"},
        {"run_id": "../x"},
    ],
    ids=ascii,
)
def test_wrong_options_are_refused(hive: Hive, options: Any) -> None:
    with pytest.raises((ConfigurationError, InvalidIdentifierError)):
        hive.enqueue(work_of(hive), 1, **options)
    assert hive.runs() == []


def test_arguments_are_checked_where_the_code_is_known(hive: Hive) -> None:
    work_of(hive)
    with pytest.raises(TypeError, match="too many positional arguments"):
        hive.enqueue("work", 1, 2, 3)
    assert hive.runs() == []


# --- inside a workflow ----------------------------------------------------------------------------


def test_a_workflow_enqueues_once_however_often_it_is_killed(programs: Programs) -> None:
    programs.hive.enqueue("spawns", "x", run_id="r")
    for lives in (1, 2):
        process = programs.worker(concurrency=1)
        until_true(lambda lives=lives: len(programs.notes("hanging")) == lives)  # type: ignore[misc]
        kill(process)
    programs.touch("free")
    programs.worker()
    names = asyncio.run(programs.hive.handle("r").result())
    assert len(set(names)) == 2
    for name in names:
        assert asyncio.run(programs.hive.handle(name).result()) == [0]
    assert len(programs.hive.runs()) == 3
    assert programs.notes("part") == ["part x-child 0"] * 2


def test_a_mismatch_in_a_workflow_is_its_own_error(hive: Hive) -> None:
    work = work_of(hive)
    hive.enqueue(work, 1, run_id="taken")

    @hive.workflow
    async def parent() -> str:
        try:
            hive.enqueue(work, 2, run_id="taken")
        except RunMismatchError:
            return "refused"
        return "taken"

    assert hive.run_sync(parent) == "refused"


def test_a_step_may_enqueue_and_its_attempts_do_so_once(hive: Hive) -> None:
    work, attempts = work_of(hive), []

    @hive.step(max_attempts=3)
    def spawn() -> str:
        name = hive.enqueue(work, 1).run_id
        attempts.append(name)
        if len(attempts) < 3:
            raise ValueError("again")
        return name

    @hive.workflow
    async def parent() -> str:
        return await spawn()

    assert hive.run_sync(parent) == attempts[0] == attempts[2]
    assert len(hive.runs()) == 2
