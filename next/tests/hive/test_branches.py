"""Branches and the recorded order hold on every loop, and for every way of making tasks."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import json
import random
import shutil
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import uvloop

from maestro_hive.hive.workflow_loop import TURNS, WorkflowTask
from maestro_hive.journal.entries import ReplayDiffered
from tests.hive.conftest import copy_live, entries_of, quick_hive
from tests.python_processes import PythonProcess

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
    from pathlib import Path

    from maestro_hive.hive.hive import Hive

    Work = Callable[[str], Coroutine[Any, Any, str]]
    Body = Callable[[Work, list[Any]], Awaitable[Any]]


# --- two lives of one program ---------------------------------------------------------------------


class Life:
    """One life of a run; what its steps return differs in each, and so does how long they take."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder
        self.number = number
        self.calls: list[str] = []
        self.copies: list[Path] = []
        self._random = random.Random(number)

    def copy(self) -> Path:
        """Copy the state folder as it is now: that is what a kill leaves behind."""
        folder = self.folder.parent / f"{self.folder.name}-{len(self.copies)}"
        copy_live(self.folder, folder)
        self.copies.append(folder)
        return folder

    def worker(self, hive: Hive, killed_in: Iterable[str] = ()) -> Work:
        """Return the step that programs call."""

        @hive.step
        async def work(name: str) -> str:
            self.calls.append(name)
            number = len(self.calls)
            if name in killed_in:
                self.copy()
            await asyncio.sleep(self._random.random() / 100)
            return f"{name} {self.number}.{number}"

        return work

    async def run(self, body: Body, *, killed_in: Iterable[str] = ()) -> Any:
        """Run a workflow of this body; its step ``end`` is called last."""
        with quick_hive(self.folder) as hive:
            work = self.worker(hive, killed_in)

            @hive.step
            async def end() -> None:
                self.copy()

            @hive.workflow
            async def program() -> Any:
                log: list[Any] = []
                result = await body(work, log)
                await end()
                return [result, log]

            return await hive.run(program, run_id="r")


def no_stack(*_: object, **__: object) -> traceback.StackSummary:
    return traceback.StackSummary()


def run_on(kind: str, main: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on a loop of this kind."""

    async def eagerly() -> Any:
        asyncio.get_running_loop().set_task_factory(getattr(asyncio, "eager_task_factory"))  # noqa: B009 - 3.12
        return await main

    match kind:
        case "uvloop":
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(main)
        case "eager tasks":
            return asyncio.run(eagerly())
        case "debug":
            # Where each task was made, which takes more time than all that is tested here.
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(traceback.StackSummary, "extract", no_stack)
                return asyncio.run(main, debug=True)
        case _:
            return asyncio.run(main)


def check_replay(tmp_path: Path, body: Body, kind: str = "asyncio", lives: int = 2) -> Any:
    """Run a program, and replay it from what a kill at its end left behind: all is as it was."""
    first = Life(tmp_path / "first", 1)
    expected = run_on(kind, first.run(body))
    folder = first.copies[0]
    for number in range(2, lives + 1):
        again = Life(folder, number)
        assert run_on(kind, again.run(body)) == expected
        assert again.calls == []
        folder = again.copies[0]
    return expected


LOOPS = [
    "asyncio",
    "debug",
    "uvloop",
    pytest.param(
        "eager tasks",
        marks=pytest.mark.skipif(sys.version_info < (3, 12), reason="needs Python 3.12"),
    ),
]
NAMES = list("abcdefgh")


# --- programs that depend on the order of outcomes ------------------------------------------------


async def two_equal_calls(work: Work, log: list[Any], name: str) -> tuple[str, str, str]:
    first = await work("equal")
    log.append(name)
    return name, first, await work("equal")


async def gathered(work: Work, log: list[Any]) -> Any:
    return await asyncio.gather(*(two_equal_calls(work, log, name) for name in NAMES))


async def in_task_group(work: Work, log: list[Any]) -> Any:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(two_equal_calls(work, log, name)) for name in NAMES]
    return [task.result() for task in tasks]


async def in_anyio_group(work: Work, log: list[Any]) -> Any:
    async def branch(name: str) -> None:
        log.append(await two_equal_calls(work, log, name))

    async with anyio.create_task_group() as group:
        for name in NAMES:
            group.start_soon(branch, name)


async def in_a_cancelled_anyio_scope(work: Work, log: list[Any]) -> Any:
    async def branch(name: str) -> None:
        log.append(await two_equal_calls(work, log, name))
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for name in NAMES:
            group.start_soon(branch, name)


async def nested(work: Work, log: list[Any]) -> Any:
    async def level(depth: int, name: str) -> Any:
        if not depth:
            return await two_equal_calls(work, log, name)
        found = await asyncio.gather(level(depth - 1, f"{name}0"), level(depth - 1, f"{name}1"))
        log.append(name)
        return found

    return await level(5, "")


async def nested_futures(work: Work, log: list[Any]) -> Any:
    """End a branch many callbacks after its last outcome."""

    async def deep(name: str) -> None:
        future: asyncio.Future[Any] = asyncio.ensure_future(work(name))
        for _ in range(20):
            future = asyncio.gather(future)
        await future
        log.append(name)

    async def busy() -> None:
        for _ in range(20):
            await asyncio.gather(*(work("shallow") for _ in range(3)))
            log.append("shallow")

    await asyncio.gather(*map(deep, NAMES), busy())


async def completed(work: Work, log: list[Any]) -> Any:
    for each in asyncio.as_completed([two_equal_calls(work, log, name) for name in NAMES]):
        log.append(await each)
        log.append(await work("after"))


async def completed_of_iterator(work: Work, log: list[Any]) -> Any:
    given = iter([two_equal_calls(work, log, name) for name in NAMES])
    for each in asyncio.as_completed(given):
        log.append(await each)  # noqa: PERF401 - while others go on


async def completed_steps(work: Work, log: list[Any]) -> Any:
    for each in asyncio.as_completed([work(name) for name in NAMES]):
        log.append(await each)  # noqa: PERF401 - while others go on


async def completed_tasks(work: Work, log: list[Any]) -> Any:
    tasks = {asyncio.create_task(two_equal_calls(work, log, name)) for name in NAMES}
    for each in asyncio.as_completed(tasks, timeout=60):
        log.append(await each)  # noqa: PERF401 - while others go on


async def waited_for_first(work: Work, log: list[Any]) -> Any:
    left = {asyncio.create_task(two_equal_calls(work, log, name)) for name in NAMES}
    while left:
        done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        log.append([each.result() for each in done])
        await work("next")


async def waited_for_all(work: Work, log: list[Any]) -> Any:
    tasks = [asyncio.create_task(two_equal_calls(work, log, name)) for name in NAMES]
    done, _ = await asyncio.wait(tasks)
    for each in done:
        log.append(each.result())
        log.append(await work("after"))


async def shielded(work: Work, log: list[Any]) -> Any:
    async def branch(name: str) -> None:
        log.append(await asyncio.shield(two_equal_calls(work, log, name)))

    await asyncio.gather(*map(branch, NAMES))


async def within_a_time(work: Work, log: list[Any]) -> Any:
    async def branch(name: str) -> None:
        log.append(await asyncio.wait_for(two_equal_calls(work, log, name), 60))
        async with asyncio.timeout(60):
            log.append(await work("in time"))

    await asyncio.gather(*map(branch, NAMES))


async def in_a_pipeline(work: Work, log: list[Any]) -> Any:
    queues: list[asyncio.Queue[str | None]] = [asyncio.Queue(2) for _ in range(4)]

    async def stage(number: int) -> None:
        while (item := await queues[number].get()) is not None:
            log.append((number, item))
            await queues[number + 1].put(item if number % 2 else await work(item))
        await queues[number + 1].put(None)

    async def fill() -> None:
        for name in NAMES:
            await queues[0].put(await work(name))
        await queues[0].put(None)

    async def empty() -> None:
        while (item := await queues[-1].get()) is not None:
            log.append(item)

    await asyncio.gather(fill(), *map(stage, range(3)), empty())


async def with_a_semaphore(work: Work, log: list[Any]) -> Any:
    semaphore = asyncio.Semaphore(3)

    async def branch(name: str) -> None:
        async with semaphore:
            log.append(await two_equal_calls(work, log, name))

    await asyncio.gather(*map(branch, NAMES))


async def with_conditions(work: Work, log: list[Any]) -> Any:
    changed, done = asyncio.Condition(), asyncio.Event()
    count = 0

    async def branch(name: str) -> None:
        nonlocal count
        await two_equal_calls(work, log, name)
        async with changed:
            count += 1
            changed.notify_all()
        await done.wait()
        log.append(await work("at the end"))

    async def watch() -> None:
        async with changed:
            for number in range(1, len(NAMES) + 1):
                await changed.wait_for(lambda least=number: count >= least)  # type: ignore[misc]
                log.append((number, count, await work("watched")))
        done.set()

    await asyncio.gather(watch(), *map(branch, NAMES))


async def polling(work: Work, log: list[Any]) -> Any:
    async def poll() -> None:
        seen = 0
        while seen < len(NAMES):
            await asyncio.sleep(0)
            while seen < len([each for each in log if isinstance(each, str)]):
                seen += 1
                log.append((seen, await work("polled")))

    await asyncio.gather(poll(), *(two_equal_calls(work, log, name) for name in NAMES))


async def many_turns(work: Work, log: list[Any]) -> Any:
    """React to an outcome with many turns of the loop."""

    async def branch(name: str, turns: int) -> None:
        for _ in range(3):
            await work("equal")
            for _ in range(turns):
                await asyncio.sleep(0)
            log.append(name)

    await asyncio.gather(*(branch(name, 40 * number) for number, name in enumerate(NAMES)))


async def made_directly(work: Work, log: list[Any]) -> Any:
    loop = asyncio.get_running_loop()
    tasks = [asyncio.Task(two_equal_calls(work, log, name), loop=loop) for name in NAMES]
    log.append(await work("equal"))
    return await asyncio.gather(*tasks)


async def with_contexts(work: Work, log: list[Any]) -> Any:
    shared = contextvars.copy_context()
    tasks = []
    for number, name in enumerate(NAMES):
        context = shared if number % 2 else contextvars.copy_context()
        tasks.append(asyncio.create_task(two_equal_calls(work, log, name), context=context))
    return await asyncio.gather(*tasks)


async def with_sleeps(work: Work, log: list[Any]) -> Any:
    """Await what is not durable between steps."""

    async def branch(name: str, seconds: float) -> None:
        for _ in range(3):
            await asyncio.sleep(seconds)
            await work("equal")
            log.append(name)

    await asyncio.gather(*(branch(name, number / 200) for number, name in enumerate(NAMES)))


PROGRAMS = [
    gathered,
    in_task_group,
    in_anyio_group,
    in_a_cancelled_anyio_scope,
    nested,
    completed,
    completed_of_iterator,
    completed_steps,
    completed_tasks,
    waited_for_first,
    waited_for_all,
    shielded,
    within_a_time,
    in_a_pipeline,
    with_a_semaphore,
    with_conditions,
    polling,
    many_turns,
    made_directly,
    with_contexts,
    with_sleeps,
    nested_futures,
]


async def run_each(life: Life, bodies: Sequence[Body]) -> dict[str, Any]:
    """Run programs one after the other; in the first life none has ended before the copy."""
    with quick_hive(life.folder) as hive:
        work = life.worker(hive)
        ending: asyncio.Queue[None] = asyncio.Queue()
        may_end = asyncio.Event()

        @hive.step
        async def end() -> None:
            ending.put_nowait(None)
            await may_end.wait()

        def workflow(body: Body) -> Any:
            async def program() -> Any:
                log: list[Any] = []
                result = await body(work, log)
                await end()
                return [result, log]

            return hive.workflow(name=body.__name__)(program)

        runs = {}
        for body in bodies:
            name = body.__name__
            runs[name] = asyncio.create_task(hive.run(workflow(body), run_id=name))
            at_end = asyncio.create_task(ending.get())
            await asyncio.wait([at_end, runs[name]], return_when=asyncio.FIRST_COMPLETED)
            at_end.cancel()
        life.copy()
        may_end.set()
        return {name: await run for name, run in runs.items()}


@pytest.mark.parametrize("kind", LOOPS)
def test_each_program_goes_the_same_way_again(tmp_path: Path, kind: str) -> None:
    first = Life(tmp_path / "first", 1)
    expected = run_on(kind, run_each(first, PROGRAMS))
    again = Life(first.copies[0], 2)
    found = run_on(kind, run_each(again, PROGRAMS))
    assert [name for name in found if found[name] != expected[name]] == []
    assert again.calls == []


@pytest.mark.parametrize("kind", LOOPS)
def test_a_program_that_sleeps_on_its_own_calls_nothing_again(tmp_path: Path, kind: str) -> None:
    # Its order is that of the clock, which is not recorded.
    first = Life(tmp_path / "first", 1)
    _, log = run_on(kind, first.run(with_sleeps))
    again = Life(first.copies[0], 2)
    _, log_again = run_on(kind, again.run(with_sleeps))
    assert sorted(log_again) == sorted(log)
    assert again.calls == []


@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize("body", [gathered, in_task_group, made_directly, with_contexts])
def test_what_was_recorded_before_a_kill_is_not_called_again(
    tmp_path: Path, body: Body, kind: str
) -> None:
    first = Life(tmp_path / "first", 1)
    run_on(kind, first.run(body, killed_in=["equal"]))
    for folder in first.copies[:-1:5]:
        again = Life(folder, 2)
        found, log = run_on(kind, again.run(body))
        seen = [value for _, *values in found for value in values]
        seen += [value for value in log if value.startswith("equal")]
        assert len(set(seen)) == len(first.calls)
        assert len([value for value in seen if value.startswith("equal 2")]) == len(again.calls)


# --- more than one loop, more than one run --------------------------------------------------------


async def many_runs(folder: Path, life: Life, count: int) -> Any:
    """Run many workflows at once; a copy of the folder is made before they end."""
    with quick_hive(folder) as hive:

        @hive.step
        async def work(name: str) -> str:
            life.calls.append(name)
            number = len(life.calls)
            await asyncio.sleep(random.random() / 200)
            return f"{name} {life.number}.{number}"

        @hive.step
        async def end() -> None:
            if life.number == 1:
                ended.append(None)
                if len(ended) == count:
                    life.copy()
                    everyone.set()
                await everyone.wait()

        @hive.workflow
        async def program() -> Any:
            log: list[Any] = []
            result = await gathered(work, log)
            await end()
            return [result, log]

        ended: list[None] = []
        everyone = asyncio.Event()
        return await asyncio.gather(
            *(hive.run(program, run_id=f"r{number}") for number in range(count))
        )


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_many_runs_at_once_each_have_their_order(tmp_path: Path, kind: str) -> None:
    first = Life(tmp_path / "first", 1)
    expected = run_on(kind, many_runs(first.folder, first, 24))
    again = Life(first.copies[0], 2)
    assert run_on(kind, many_runs(again.folder, again, 24)) == expected
    assert again.calls == []


def test_runs_on_loops_in_several_threads_each_have_their_order(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        kinds = ["asyncio", "uvloop"] * 2
        folders = [tmp_path / f"{number}" for number in range(4)]
        for folder in folders:
            folder.mkdir()
        for found in threads.map(check_replay, folders, [gathered] * 4, kinds):
            assert found


# --- coroutines in as_completed -------------------------------------------------------------------

AS_COMPLETED = """
import asyncio, json, os, random, sys
from maestro_hive.hive.hive import Hive

folder, life = sys.argv[1:]
numbers = []

async def main():
    with Hive(folder) as hive:
        @hive.step
        async def draw() -> str:
            print("call", flush=True)
            numbers.append(len(numbers) + 1)
            number = numbers[-1]
            await asyncio.sleep(number / 500)
            if number == 20 and life != "9":
                os._exit(9)
            return f"{life}.{number}"

        async def branch(number: int) -> tuple[int, str, str]:
            return number, await draw(), await draw()

        @hive.workflow
        async def program() -> list[object]:
            # Other addresses each time.
            spare = [branch(0) for _ in range(400)]
            random.shuffle(spare)
            while spare:
                spare.pop().close()
            return [await each for each in asyncio.as_completed([branch(n) for n in range(40)])]

        return await hive.run(program, run_id="r")

print(json.dumps(asyncio.run(main())))
"""


def as_completed(folder: Path, life: int) -> list[str]:
    forked = PythonProcess(AS_COMPLETED, folder, life, stderr=True)
    printed, errors = forked.communicate()
    assert forked.wait() == (0 if life == 9 else 9), errors
    return printed.splitlines()


def test_coroutines_that_as_completed_was_given_get_their_own_results_again(
    tmp_path: Path,
) -> None:
    calls = 0
    for life in (1, 2):
        calls += as_completed(tmp_path / "state", life).count("call")
    copy_live(tmp_path / "state", tmp_path / "copy")
    *last, result = as_completed(tmp_path / "state", 9)
    # In each of the first two, the calls that were in flight are made again.
    assert 80 <= calls + last.count("call") <= 80 + 2 * 41
    found = json.loads(result)
    values = [value for _, *each in found for value in each]
    assert len(set(values)) == 80
    recorded = {number: each for number, *each in found}
    for number, *each in json.loads(as_completed(tmp_path / "copy", 9)[-1]):
        # Each record in the copy is at its place.
        for old, new in zip(recorded[number], each, strict=True):
            assert old == new or old.startswith("9.")


# --- order ----------------------------------------------------------------------------------------


def test_an_answer_has_its_place_in_the_order_when_it_is_recorded(  # noqa: C901 - one program
    tmp_path: Path,
) -> None:
    async def life(folder: Path, *, is_first: bool) -> Any:
        with quick_hive(folder) as hive:

            @hive.step
            async def work(number: int) -> int:
                return number

            @hive.step
            async def answer() -> None:
                hive.answer("r", "approve", True)

            @hive.step
            async def end() -> None:
                if is_first:
                    copy_live(folder, tmp_path / "copy")

            @hive.workflow
            async def program() -> Any:
                log: list[Any] = []

                async def ask() -> None:
                    await hive.wait_for("approve")
                    log.append("answer")

                async def count(numbers: range) -> None:
                    for number in numbers:
                        await work(number)
                        log.append(number)

                async def steps() -> None:
                    await count(range(30))
                    await answer()
                    await count(range(30, 200))

                await asyncio.gather(ask(), steps())
                await end()
                return log

            return await hive.run(program, run_id="r")

    for number in range(3):
        expected = asyncio.run(life(tmp_path / f"{number}", is_first=True))
        assert asyncio.run(life(tmp_path / "copy", is_first=False)) == expected
        shutil.rmtree(tmp_path / "copy")


def calls_for_branches(folder: Path, count: int, kind: str) -> int:
    """Return how many functions a workflow of so many branches calls."""
    calls = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += 1

    async def main() -> None:
        with quick_hive(folder) as hive:
            work = hive.step(_same)

            async def branch(number: int) -> Any:
                return await asyncio.gather(work(number))

            @hive.workflow
            async def program() -> None:
                await asyncio.gather(*map(branch, range(count)))

            sys.setprofile(note)
            try:
                await hive.run(program)
            finally:
                sys.setprofile(None)

    run_on(kind, main())
    return calls


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_many_branches_take_time_in_proportion(tmp_path: Path, kind: str) -> None:
    few = calls_for_branches(tmp_path / "few", 100, kind)
    many = calls_for_branches(tmp_path / "many", 400, kind)
    assert many < 4 * few * 1.5


async def _same(number: int) -> int:
    return number


def test_tasks_that_ended_are_freed(hive: Hive) -> None:
    def branches() -> int:
        gc.collect()
        return sum(isinstance(each, WorkflowTask) for each in gc.get_objects())

    @hive.workflow
    async def program() -> int:
        async def short() -> None:
            await asyncio.sleep(0)

        before = branches()
        background = asyncio.create_task(asyncio.sleep(60))
        for _ in range(300):
            await asyncio.gather(*(short() for _ in range(10)))
        background.cancel()
        return branches() - before

    assert hive.run_sync(program) < 50


def test_a_workflow_that_polls_does_not_wait_long_for_each_outcome(
    hive: Hive,
) -> None:
    turns = 0

    @hive.step
    async def work(number: int) -> int:
        return number

    @hive.workflow
    async def program() -> int:
        is_done = False

        async def poll() -> None:
            nonlocal turns
            while not is_done:
                turns += 1
                await asyncio.sleep(0)

        polling = asyncio.create_task(poll())
        found = await asyncio.gather(*map(work, range(100)))
        is_done = True
        await polling
        return sum(found)

    assert hive.run_sync(program) == 4950
    assert turns <= 102 * TURNS  # one drain for each outcome


# --- workflows that are not deterministic ---------------------------------------------------------


def test_a_workflow_that_went_another_way_is_reported(tmp_path: Path) -> None:
    async def life(folder: Path, *, is_first: bool) -> Any:
        with quick_hive(folder) as hive:

            @hive.step
            async def work(name: str) -> str:
                return name

            @hive.step
            async def left() -> str:
                return "left"

            @hive.step
            async def right() -> str:
                return "right"

            @hive.step
            async def end() -> None:
                if is_first:
                    copy_live(folder, tmp_path / "copy")

            @hive.workflow
            async def program() -> Any:
                log = [await work("a"), await (left() if is_first else right())]
                log += await asyncio.gather(*map(work, "bcde" if is_first else "bxyd"))
                await end()
                log.append(await work("z"))
                return log

            return await hive.run(program, run_id="r")

    assert asyncio.run(life(tmp_path / "first", is_first=True)) == [
        *("a", "left"),
        *"bcdez",
    ]
    assert asyncio.run(life(tmp_path / "copy", is_first=False)) == [
        *("a", "right"),
        *"bxydz",
    ]
    with quick_hive(tmp_path / "copy") as hive:
        entries = asyncio.run(entries_of(hive))
    shown = [each.text() for each in entries if isinstance(each, ReplayDiffered)]
    assert shown == [
        "the resumed workflow went another way; recorded and not called again: left,"  # noqa: ISC004
        " work (2 times); new among recorded calls: right, work (2 times)"
    ]


def test_random_branches_are_no_error(tmp_path: Path) -> None:
    async def body(work: Work, log: list[Any]) -> Any:
        for number in range(5):
            if random.random() < 0.5:
                await asyncio.gather(*(work(f"{random.randrange(3)}") for _ in range(4)))
            else:
                await work(f"{number}")
        return "done"

    first = Life(tmp_path / "first", 1)
    assert run_on("asyncio", first.run(body)) == ["done", []]
    for number in range(2, 6):
        folder = tmp_path / f"life-{number}"
        shutil.copytree(first.copies[0], folder)
        assert run_on("asyncio", Life(folder, number).run(body)) == ["done", []]
