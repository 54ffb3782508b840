"""A run that only waits is released from memory, and comes back when it is due."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.hive.inbox import Inbox
from maestro_hive.kernel.errors import RunCancelledError, RunFailedError
from tests.hive.conftest import status, store_of, until
from tests.hive.worker_programs import Programs, kill, programs_in, until_true

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from maestro_hive.hive.answers import Question
from maestro_hive.hive.hive import Hive


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as made:
        yield made


async def released(hive: Hive, run_id: str) -> str | None:
    """Return what a run waits for, once it is not in memory any more."""
    await until(lambda: (row := store_of(hive).find(run_id)).status == "waiting" and not row.holder)
    return store_of(hive).find(run_id).waits_for


async def _freed(condition: Callable[[], bool]) -> None:
    """Wait until unused objects are gone: the last task of a run ends after its record."""
    async with asyncio.timeout(60):
        gc.collect()
        while not condition():
            await asyncio.sleep(0.005)
            gc.collect()


# --- an answer ------------------------------------------------------------------------------------


def test_an_answer_wakes_a_released_run(hive: Hive) -> None:
    calls: list[str] = []

    @hive.step
    async def note(what: str) -> str:
        calls.append(what)
        return what

    @hive.workflow
    async def asks() -> str:
        await note("before")
        answer = await hive.wait_for("go")
        return await note(answer)

    async def main() -> str:
        async with hive.worker(release_after=0.05) as worker:
            handle = hive.enqueue(asks, run_id="r")
            assert await released(hive, "r") == "answer"
            assert handle.status == "waiting"
            assert not worker.active
            hive.answer("r", "go", "after")
            return str(await handle.result())

    assert asyncio.run(main()) == "after"
    assert calls == ["before", "after"]


@pytest.mark.parametrize("stops", [False, True], ids=["released", "stopped"])
def test_a_run_is_not_released_with_an_answer_that_it_has_not_read(
    hive: Hive, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    @hive.workflow
    async def asks() -> str:
        return str(await hive.wait_for("go"))

    async def main() -> str:
        handle = hive.enqueue(asks, run_id="r")
        async with hive.worker(release_after=0.02):
            assert await released(hive, "r") == "answer"
        hive.answer("r", "go", "after")
        with monkeypatch.context() as patched:
            patched.setattr(Inbox, "_check", Inbox.stop)
            async with hive.worker(release_after=0.02, grace=0.0 if stops else 0.2):
                await until(lambda: handle.status == "running")
                await asyncio.sleep(0.2)
        async with hive.worker(release_after=0.02), asyncio.timeout(60):
            return str(await handle.result())

    assert asyncio.run(main()) == "after"


def test_an_answer_from_another_process_wakes_it_over_a_kill(programs: Programs) -> None:
    programs.hive.enqueue("asks", "x", run_id="r")
    first = programs.worker()
    until_true(lambda: programs.status("r") == "waiting")
    kill(first)
    programs.hive.answer("r", "go", "yes")
    programs.worker()
    assert asyncio.run(programs.hive.handle("r").result()) == ["yes", 1]
    assert programs.notes("part") == ["part x 0", "part x 1"]


def asked(hive: Hive) -> list[Question]:
    return hive.questions("r")


def test_an_answer_in_the_moment_of_the_release_is_not_lost(hive: Hive) -> None:
    @hive.workflow
    async def asks() -> list[str]:
        return [await hive.wait_for(f"go-{number}") for number in range(30)]

    async def main() -> list[str]:
        async with hive.worker(release_after=0.001):
            handle = hive.enqueue(asks, run_id="r")
            for number in range(30):
                await until(lambda: [each.name for each in asked(hive)] == [f"go-{number}"])  # noqa: B023
                await asyncio.sleep(0.002 * (number % 7))
                hive.answer("r", f"go-{number}", str(number))
            return list(await handle.result())

    assert asyncio.run(main()) == [str(number) for number in range(30)]


def _asks_another(hive: Hive, number: int) -> bool:
    asked = [each.name for each in hive.questions("r")]
    return asked != [f"go-{number}"] and (bool(asked) or number == 14)


def test_a_run_that_was_woken_is_not_released_before_it_has_its_answer(hive: Hive) -> None:
    @hive.workflow
    async def asks() -> list[str]:
        return [await hive.wait_for(f"go-{number}") for number in range(15)]

    async def main() -> list[str]:
        async with hive.worker(release_after=0.03):
            handle = hive.enqueue(asks, run_id="r")
            for number in range(15):
                await released(hive, "r")
                assert [each.name for each in hive.questions("r")] == [f"go-{number}"]
                hive.answer("r", f"go-{number}", str(number))
                await until(lambda: _asks_another(hive, number))  # noqa: B023 - called at once
            return list(await handle.result())

    assert asyncio.run(main()) == [str(number) for number in range(15)]


def test_who_follows_a_run_over_its_release_has_no_error_logged(
    hive: Hive, caplog: pytest.LogCaptureFixture
) -> None:
    @hive.workflow
    async def asks() -> str:
        return str(await hive.wait_for("go"))

    async def main() -> None:
        async with hive.worker(release_after=0.05):
            hive.enqueue(asks, run_id="r")
            await until(lambda: status(hive) == "waiting")
            followers = [asyncio.create_task(hive.handle("r").result()) for _ in range(2)]
            await asyncio.sleep(0)
            followers.pop().cancel()
            await released(hive, "r")
            hive.answer("r", "go", "yes")
            assert await followers[0] == "yes"
        gc.collect()

    asyncio.run(main())
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def test_who_runs_a_released_run_goes_on_with_it(hive: Hive) -> None:
    @hive.workflow
    async def asks() -> str:
        return str(await hive.wait_for("go"))

    async def main() -> None:
        async with hive.worker(release_after=0.3):
            hive.enqueue(asks, run_id="r")
            await until(lambda: status(hive) == "waiting")
            caller = asyncio.create_task(hive.run(asks, run_id="r"))
            handle = hive.handle("r")
            await asyncio.sleep(0.6)  # the worker releases it, and the caller takes it
            hive.answer("r", "go", "yes")
            assert [await caller, await handle.result()] == ["yes", "yes"]

    asyncio.run(main())


# --- a timer --------------------------------------------------------------------------------------


def test_a_sleeping_run_comes_back_in_time(programs: Programs) -> None:
    programs.hive.enqueue("naps", "x", 3, run_id="r")
    programs.worker()
    until_true(lambda: programs.status("r") == "waiting")
    assert programs.status("r") == "waiting"
    assert asyncio.run(programs.hive.handle("r").result()) == 0
    assert programs.notes("starts") == ["starts x"] * 2


def test_the_end_of_a_question_s_time_wakes_its_run(hive: Hive) -> None:
    @hive.workflow
    async def asks() -> str:
        try:
            return str(await hive.wait_for("go", timeout=0.5))
        except TimeoutError:
            return "late"

    async def main() -> str:
        async with hive.worker(release_after=0.1):
            handle = hive.enqueue(asks, run_id="r")
            assert await released(hive, "r") == "answer"
            return str(await handle.result())

    assert asyncio.run(main()) == "late"


def test_the_end_of_a_timeout_wakes_its_run(hive: Hive) -> None:
    @hive.workflow
    async def limited() -> str:
        try:
            async with hive.timeout(0.5):
                return str(await hive.wait_for("go"))
        except TimeoutError:
            return "late"

    async def main() -> str:
        async with hive.worker(release_after=0.1):
            handle = hive.enqueue(limited, run_id="r")
            assert await released(hive, "r") == "answer"
            return str(await handle.result())

    assert asyncio.run(main()) == "late"


# --- what is not released -------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["a step", "a short sleep"])
def test_a_run_that_does_something_is_not_released(hive: Hive, what: str) -> None:
    starts: list[str] = []

    @hive.step
    async def slow() -> None:
        await asyncio.sleep(0.4)

    @hive.workflow
    async def busy() -> str:
        starts.append(what)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(hive.wait_for("go"))
            if what == "a step":
                await slow()
            else:
                for _ in range(8):
                    await hive.sleep(0.05)
            hive.answer("r", "go", "yes")
            return str(await waiting)

    async def main() -> str:
        async with hive.worker(release_after=0.1):
            return str(await hive.enqueue(busy, run_id="r").result())

    assert asyncio.run(main()) == "yes"
    assert len(starts) == 1


# --- families -------------------------------------------------------------------------------------


def family_of(hive: Hive) -> Any:
    @hive.step
    async def last(answer: str) -> str:
        return f"{answer}!"

    @hive.workflow
    async def child(name: str) -> str:
        return await last(await hive.wait_for(name))

    @hive.workflow
    async def parent() -> list[str]:
        return list(await asyncio.gather(child("a"), child("b")))

    return parent


def test_an_answer_to_a_child_wakes_its_parent(hive: Hive) -> None:
    parent = family_of(hive)

    async def main() -> list[str]:
        async with hive.worker(release_after=0.05):
            handle = hive.enqueue(parent, run_id="r")
            assert await released(hive, "r") == "child"
            children = [run.run_id for run in hive.runs(workflow="child")]
            for name in "ba":
                for run_id in children:
                    if hive.questions(run_id)[0].name == name:
                        hive.answer(run_id, name, name)
                        children.remove(run_id)
                        break
                if name == "b":
                    await asyncio.sleep(0.05)
                    assert await released(hive, "r") == "child"
            return list(await handle.result())

    assert asyncio.run(main()) == ["a!", "b!"]


def test_a_released_run_that_is_cancelled_cleans_up(hive: Hive) -> None:
    cleaned: list[str] = []

    @hive.step
    async def clean() -> None:
        cleaned.append("up")

    @hive.step
    async def begin() -> None: ...

    @hive.workflow
    async def asks() -> str:
        await begin()
        try:
            return str(await hive.wait_for("go"))
        finally:
            await clean()

    async def main() -> None:
        async with hive.worker(release_after=0.05):
            handle = hive.enqueue(asks, run_id="r")
            await released(hive, "r")
            assert handle.cancel("enough")
            with pytest.raises(RunCancelledError, match="enough"):
                await handle.result()
        assert cleaned == ["up"]

    asyncio.run(main())


@pytest.mark.parametrize("by", ["a person", "the workflow's timeout"])
def test_the_children_of_a_released_run_clean_up_when_they_are_cancelled(
    hive: Hive, by: str
) -> None:
    cleaned: list[str] = []

    @hive.step
    async def clean(what: str) -> None:
        cleaned.append(what)

    @hive.workflow
    async def grandchild() -> None:
        try:
            await hive.wait_for("go")
        finally:
            await clean("grandchild")

    @hive.workflow
    async def child() -> None:
        try:
            await asyncio.gather(grandchild(), hive.wait_for("stop"))
        finally:
            await clean("child")

    @hive.workflow
    async def parent() -> None:
        async with hive.timeout(0.6 if by == "the workflow's timeout" else 600):
            await asyncio.gather(child(), hive.wait_for("stop"))

    async def main() -> None:
        async with hive.worker(release_after=0.05):
            handle = hive.enqueue(parent, run_id="r")
            await released(hive, "r")
            if by == "a person":
                assert handle.cancel("enough")
            with pytest.raises((RunCancelledError, RunFailedError)):
                await handle.result()

    asyncio.run(main())
    assert sorted(cleaned) == ["child", "grandchild"]
    assert {run.status for run in hive.runs() if run.run_id != "r"} == {"cancelled"}


@pytest.mark.parametrize("options", [{"version": "2"}, {"queue": "mail"}], ids=str)
def test_a_worker_that_does_not_take_a_run_is_not_left_to_cancel_it(
    hive: Hive, options: Any
) -> None:
    @hive.workflow
    async def asks() -> None:
        await hive.wait_for("go")

    async def main() -> None:
        async with hive.worker(release_after=0.05, version=options.get("version")):
            hive.enqueue(asks, run_id="r", **options)
            await released(hive, "r")
        async with hive.worker(queues=["default"], version="1"):
            assert hive.cancel("r")
            assert hive.handle("r").status == "cancelled"

    asyncio.run(main())


def test_without_a_worker_a_waiting_run_is_cancelled_at_once(hive: Hive) -> None:
    parent = family_of(hive)

    async def main() -> None:
        async with hive.worker(release_after=0.05):
            hive.enqueue(parent, run_id="r")
            await released(hive, "r")

    asyncio.run(main())
    assert hive.cancel("r")
    assert {run.status for run in hive.runs()} == {"cancelled"}


def test_with_a_worker_of_another_queue_a_waiting_run_is_cancelled_at_once(hive: Hive) -> None:
    parent = family_of(hive)

    async def main() -> None:
        async with hive.worker(release_after=0.05):
            hive.enqueue(parent, run_id="r")
            await released(hive, "r")
        async with hive.worker(["mail"]):  # which would never take it
            assert hive.cancel("r")
            assert hive.handle("r").status == "cancelled"

    asyncio.run(main())


def test_many_waiting_runs_leave_nothing_in_memory(hive: Hive) -> None:
    found: weakref.WeakSet[Any] = weakref.WeakSet()

    @hive.workflow
    async def waits(number: int) -> None:
        found.add(asyncio.current_task())
        await hive.wait_for(f"go-{number}")  # no timer: a loop has those for a while when cancelled

    async def main() -> None:
        async with hive.worker(release_after=0.1, concurrency=20) as worker:
            for number in range(100):
                hive.enqueue(waits, number, run_id=f"r-{number}")
            async with asyncio.timeout(20):
                for number in range(100):
                    await released(hive, f"r-{number}")
            await _freed(lambda: not worker.active and len(found) <= 1)

    asyncio.run(main())


def test_who_waits_for_a_run_that_is_released_leaves_no_error_behind(hive: Hive) -> None:
    @hive.workflow
    async def asks() -> str:
        return str(await hive.wait_for("go"))

    said: list[dict[str, Any]] = []

    async def main() -> str:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
        async with hive.worker(release_after=0.02):
            handle = hive.enqueue(asks, run_id="r")
            await until(lambda: handle.status == "waiting")
            result = asyncio.create_task(handle.result())
            assert await released(hive, "r") == "answer"
            hive.answer("r", "go", "after")
            return str(await result)

    assert asyncio.run(main()) == "after"
    gc.collect()
    assert said == []
