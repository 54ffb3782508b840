"""The event loop of a workflow: what it refuses, what it warns of, and what it makes durable."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import threading
import warnings
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from maestro_hive.hive.workflow_loop import ImpureWorkflowWarning
from maestro_hive.kernel.errors import OutsideRunError, RunFailedError
from tests.hive.conftest import asks, copy_live, leave, quick_hive, status, until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from maestro_hive.hive.hive import Hive


# --- input and output -----------------------------------------------------------------------------


async def _connects() -> Any:
    await asyncio.open_connection("127.0.0.1", 9)


async def _serves() -> Any:
    await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)


async def _starts_a_process() -> Any:
    await asyncio.create_subprocess_exec("true")


async def _starts_a_shell() -> Any:
    await asyncio.create_subprocess_shell("true", stdout=subprocess.PIPE)


async def _resolves_a_name() -> Any:
    await asyncio.get_running_loop().getaddrinfo("localhost", 80)


async def _reads_a_socket() -> Any:
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        await asyncio.get_running_loop().sock_recv(left, 1)


async def _starts_a_process_with_anyio() -> Any:
    await anyio.run_process(["true"])


async def _reads_a_pipe() -> Any:
    with open("/dev/null") as file:  # noqa: ASYNC230, PTH123 - it need not be read
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(asyncio.Protocol, file)


@pytest.mark.parametrize(
    "body, name",
    [
        (_connects, "create_connection"),
        (_serves, "create_server"),
        (_starts_a_process, "subprocess_exec"),
        (_starts_a_shell, "subprocess_shell"),
        (_resolves_a_name, "getaddrinfo"),
        (_reads_a_socket, "sock_recv"),
        (_starts_a_process_with_anyio, "subprocess_exec"),
        (_reads_a_pipe, "connect_read_pipe"),
    ],
)
def test_io_in_a_workflow_is_an_error_that_names_the_call_and_the_way_out(
    hive: Hive, body: Callable[[], Any], name: str
) -> None:
    @hive.workflow
    async def program() -> str:
        with pytest.raises(OutsideRunError, match=rf"loop\.{name}: .* step .*outside") as raised:
            await body()
        return str(raised.value)

    assert "call it in a step" in hive.run_sync(program)


def test_the_loop_of_a_workflow_is_driven_by_its_run_alone(hive: Hive) -> None:
    @hive.workflow
    async def program() -> list[str]:
        refused = []
        loop = asyncio.get_running_loop()
        for call in (loop.stop, loop.close, loop.run_forever):
            with contextlib.suppress(OutsideRunError):
                call()
                refused.append("not refused")
        return refused

    assert hive.run_sync(program) == []


def test_a_run_inside_of_a_workflow_is_refused(hive: Hive) -> None:
    @hive.workflow
    async def child() -> None:
        pass

    @hive.workflow
    async def program() -> None:
        await hive.run(child)

    with pytest.raises(RunFailedError, match="by calling it"):
        hive.run_sync(program)


# --- work that is done again ----------------------------------------------------------------------


def test_outside_work_is_done_again_in_each_life_and_ends_at_its_place(tmp_path: Path) -> None:
    done: list[str] = []

    def life(folder: Path, *, is_first: bool) -> Any:
        async def fetch(name: str, seconds: float) -> str:
            await asyncio.sleep(seconds if is_first else 0.2 - seconds)
            done.append(name)
            return f"{name} of life {1 if is_first else 2}"

        with quick_hive(folder) as hive:

            @hive.step
            async def end() -> None:
                if is_first:
                    copy_live(folder, tmp_path / "copy")

            @hive.workflow
            async def program() -> Any:
                order: list[str] = []

                async def one(name: str, seconds: float) -> None:
                    order.append(await hive.outside(fetch(name, seconds)))

                await asyncio.gather(one("slow", 0.2), one("quick", 0.0))
                await end()
                return order

            return hive.run_sync(program, run_id="r")

    first = life(tmp_path / "first", is_first=True)
    assert first == ["quick of life 1", "slow of life 1"]
    again = life(tmp_path / "copy", is_first=False)
    assert again == ["quick of life 2", "slow of life 2"]
    assert done == ["quick", "slow", "slow", "quick"]


def test_a_thread_of_a_workflow_ends_at_its_place(tmp_path: Path) -> None:
    def life(folder: Path, *, is_first: bool) -> Any:
        first_may_end, last_may_end = threading.Event(), threading.Event()
        (first_may_end if is_first else last_may_end).set()

        def wait(mine: threading.Event, other: threading.Event) -> None:
            assert mine.wait(30)
            if not is_first:
                other.set()

        with quick_hive(folder) as hive:

            @hive.step
            async def end() -> None:
                if is_first:
                    copy_live(folder, tmp_path / "copy")

            @hive.workflow
            async def program() -> Any:
                order: list[str] = []

                async def one(name: str, *events: threading.Event) -> None:
                    await asyncio.to_thread(wait, *events)
                    order.append(name)
                    if is_first:
                        last_may_end.set()

                last = one("last", last_may_end, first_may_end)
                await asyncio.gather(last, one("first", first_may_end, last_may_end))
                await end()
                return order

            return hive.run_sync(program, run_id="r")

    assert life(tmp_path / "first", is_first=True) == ["first", "last"]
    assert life(tmp_path / "copy", is_first=False) == ["first", "last"]


def test_cancelled_outside_work_is_cancelled_on_its_own_loop(hive: Hive) -> None:
    ended: list[str] = []

    async def fetch() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    @hive.workflow
    async def program() -> str:
        try:
            async with asyncio.timeout(0.01):
                await hive.outside(fetch())
        except TimeoutError:
            return "late"
        return "in time"

    async def main() -> None:
        assert await hive.run(program) == "late"
        await until(lambda: ended == ["cancelled"])

    asyncio.run(main())


def test_the_error_of_outside_work_is_raised(hive: Hive) -> None:
    async def fetch() -> None:
        raise ConnectionError("refused")

    @hive.workflow
    async def program() -> str:
        try:
            await hive.outside(fetch())
        except ConnectionError as error:
            return str(error)
        return "no error"

    assert hive.run_sync(program) == "refused"


# --- warnings -------------------------------------------------------------------------------------


def test_a_run_that_waits_for_nothing_durable_says_where(hive: Hive) -> None:
    @hive.step
    async def work() -> None:
        pass

    @hive.workflow
    async def program() -> None:
        await work()
        await asyncio.get_running_loop().create_future()

    async def main() -> str:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", ImpureWorkflowWarning)
            running = asyncio.create_task(hive.run(program, run_id="r"))
            await until(lambda: warned)
            await leave(running)
        return str(warned[0].message)

    text = asyncio.run(main())
    assert "run 'r' waits for nothing that is recorded" in text
    assert f"{__file__}:" in text
    assert "program)" in text


def test_a_wake_up_that_is_not_recorded_is_a_warning_at_its_line(hive: Hive) -> None:
    queues: list[asyncio.Queue[str]] = []

    @hive.step
    async def put() -> None:
        queues[0].put_nowait("not recorded")

    @hive.workflow
    async def program() -> str:
        queues.append(asyncio.Queue())
        task = asyncio.create_task(put())
        found = await queues[0].get()
        await task
        return found

    with pytest.warns(ImpureWorkflowWarning, match="woken by an event that is not") as warned:
        assert hive.run_sync(program) == "not recorded"
    assert [each.filename for each in warned] == [__file__]


def test_recorded_events_are_no_reason_for_a_warning(hive: Hive) -> None:
    @hive.step
    async def work(number: int) -> int:
        await asyncio.sleep(0)
        return number

    @hive.workflow
    async def child() -> Any:
        return await hive.wait_for("colour")

    @hive.workflow
    async def program() -> Any:
        queue: asyncio.Queue[int] = asyncio.Queue()

        async def put(number: int) -> None:
            await queue.put(await work(number))

        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(put(number))
            found = [await queue.get() for _ in range(3)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        await asyncio.to_thread(str)
        return sorted(found), await child()

    async def main() -> Any:
        running = asyncio.create_task(hive.run(program, run_id="r"))
        await until(lambda: len(hive.runs()) == 2)
        child_id = next(each.run_id for each in hive.runs() if each.run_id != "r")
        await until(lambda: asks(hive, child_id))
        hive.answer(child_id, "colour", "green")
        return await running

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asyncio.run(main()) == ([0, 1, 2], "green")


# --- keys -----------------------------------------------------------------------------------------


def test_a_key_whose_calls_were_all_cancelled_is_executed_again(tmp_path: Path) -> None:
    calls: list[int] = []

    def life(folder: Path, *, is_first: bool) -> Any:
        with quick_hive(folder) as hive:

            @hive.step(key="payment")
            async def pay(attempt: int) -> int:
                calls.append(attempt)
                await asyncio.sleep(60 if attempt < 2 else 0)
                return attempt

            @hive.step
            async def end() -> None:
                if is_first:
                    copy_live(folder, tmp_path / "copy")

            @hive.workflow
            async def program() -> Any:
                seen: list[Any] = []
                for attempt in range(3):
                    try:
                        async with asyncio.timeout(0.05 if attempt < 2 else None):
                            seen.append(await pay(attempt))
                    except TimeoutError:
                        seen.append("late")
                seen.append(await pay(7))
                await end()
                return seen

            return hive.run_sync(program, run_id="r")

    assert life(tmp_path / "first", is_first=True) == ["late", "late", 2, 2]
    assert life(tmp_path / "copy", is_first=False) == ["late", "late", 2, 2]
    assert calls == [0, 1, 2]


def test_the_last_caller_of_a_key_that_is_cancelled_ends_its_execution(hive: Hive) -> None:
    ended: list[str] = []

    @hive.step(key="shared")
    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("body")

    @hive.step
    async def quick() -> None:
        pass

    @hive.workflow
    async def program() -> list[bool]:
        tasks = [asyncio.create_task(slow()) for _ in range(3)]
        await quick()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return [task.cancelled() for task in tasks]

    assert hive.run_sync(program) == [True, True, True]
    assert ended == ["body"]


# --- questions ------------------------------------------------------------------------------------


def test_a_question_that_is_not_awaited_any_more_is_withdrawn(folder: Path) -> None:
    async def life(*, is_first: bool) -> Any:
        with quick_hive(folder) as hive:

            @hive.workflow
            async def program() -> Any:
                with contextlib.suppress(TimeoutError):
                    await hive.wait_for("late", timeout=0.01)
                return await hive.wait_for("sure")

            running = asyncio.create_task(hive.run(program, run_id="r"))
            await until(lambda: asks(hive) == ["sure"])
            if is_first:
                return await leave(running)
            hive.answer("r", "sure", True)
            return await running

    asyncio.run(life(is_first=True))
    assert asyncio.run(life(is_first=False)) is True


# --- other libraries ------------------------------------------------------------------------------


def test_anyio_in_a_workflow_is_durable(tmp_path: Path) -> None:
    calls: list[str] = []

    def life(folder: Path, *, is_first: bool) -> Any:
        with quick_hive(folder) as hive:

            @hive.step
            async def work(name: str) -> str:
                calls.append(name)
                await anyio.sleep(60 if name == "stuck" else 0)
                if name == "end" and is_first:
                    copy_live(folder, tmp_path / "copy")
                return name

            @hive.workflow
            async def program() -> Any:
                seen: list[str] = []
                with anyio.move_on_after(0.5):
                    await work("stuck")
                async with anyio.create_task_group() as group:
                    send, receive = anyio.create_memory_object_stream[str](3)

                    async def one(name: str) -> None:
                        await send.send(await work(name))

                    for name in "abc":
                        group.start_soon(one, name)
                    seen = [await receive.receive() for _ in range(3)]
                send.close()
                receive.close()
                return [*seen, await work("end")]

            return hive.run_sync(program, run_id="r")

    first = life(tmp_path / "first", is_first=True)
    assert life(tmp_path / "copy", is_first=False) == first
    assert sorted(calls) == ["a", "b", "c", "end", "end", "stuck"]


def test_a_workflow_that_spins_is_given_time_and_continues(hive: Hive) -> None:
    @hive.step
    async def work() -> str:
        await asyncio.sleep(0.05)
        return "done"

    @hive.workflow
    async def program() -> str:
        task = asyncio.create_task(work())
        while not task.done():  # noqa: ASYNC110 - as some code does
            await asyncio.sleep(0)
        return str(task.result())

    assert hive.run_sync(program, run_id="r") == "done"
    assert status(hive) == "success"


def test_dropped_generators_are_closed_at_the_same_moment(tmp_path: Path) -> None:
    def life(folder: Path, *, is_first: bool) -> Any:
        with quick_hive(folder) as hive:

            @hive.step
            async def work(name: str) -> str:
                if name == "end" and is_first:
                    copy_live(folder, tmp_path / "copy")
                return name

            @hive.workflow
            async def program() -> Any:
                seen: list[str] = []

                async def numbers() -> Any:
                    try:
                        while True:
                            yield 1
                    finally:
                        seen.append(await work("closed"))

                async for _ in numbers():
                    break
                await asyncio.sleep(0)
                seen.append(await work("after"))
                seen.append(await work("end"))
                return seen

            return hive.run_sync(program, run_id="r")

    first = life(tmp_path / "first", is_first=True)
    assert sorted(first) == ["after", "closed", "end"]
    assert life(tmp_path / "copy", is_first=False) == first
