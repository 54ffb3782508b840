"""Threads for functions that block: reused when they return, left behind when they hang."""

# ruff: noqa: SLF001 - an idle thread shows nowhere else

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import CancelledError, Future
from contextvars import ContextVar, copy_context
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import pytest

from maestro_hive.kernel.process import DaemonThreads, threads
from tests.timing import least

if TYPE_CHECKING:
    from collections.abc import Callable

LEAVE_ONE_HANGING = """
import asyncio, threading, time
from maestro_hive.kernel.process import threads

started = threading.Event()

def hang():
    started.set()
    time.sleep(600)

async def main():
    hanging = threads.run(hang)
    started.wait(30)
    try:
        await asyncio.wait_for(asyncio.wrap_future(hanging), 0.1)
    except TimeoutError:
        print("late", started.is_set())

asyncio.run(main())
"""

START_ONE_AT_THE_END = """
import time
from maestro_hive.kernel.process import threads
threads.run(lambda: time.sleep(600))
print("done")
"""

FORK_WITH_IDLE_ONES = """
import os, threading
from maestro_hive.kernel.process import threads

for future in [threads.run(threading.get_ident) for _ in range(5)]:
    future.result(10)
child = os.fork()
if child == 0:
    os._exit(threads.run(lambda: 42).result(10))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), threads.run(lambda: "both").result(10))
"""

FORK_INSIDE_ONE = """
import os
from maestro_hive.kernel.process import threads

def fork():
    child = os.fork()
    if child == 0:
        os._exit(threads.run(lambda: 7).result(10))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

print(threads.run(fork).result(20))
"""


@pytest.fixture
def pool() -> DaemonThreads:
    return DaemonThreads(idle_seconds=0.2)


def eventually(condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.005)
    return False


def output_of(script: str) -> str:
    """Return what it printed; waiting for its end, which comes soon, is part of the test."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


# --- what comes back -------------------------------------------------------------------------


def test_what_the_function_returns_is_the_result(pool: DaemonThreads) -> None:
    assert pool.run(lambda: 42).result(10) == 42


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_whatever_the_function_raises_is_raised_to_the_caller(
    pool: DaemonThreads, kind: type[BaseException]
) -> None:
    error = kind("mine")

    def fail() -> NoReturn:
        raise error

    future = pool.run(fail)
    assert future.exception(10) is error
    assert pool.run(lambda: "still here").result(10) == "still here"


def test_a_coroutine_can_wait_for_it(pool: DaemonThreads) -> None:
    async def main() -> int:
        return await asyncio.wrap_future(pool.run(lambda: 42))

    assert asyncio.run(main()) == 42


def test_a_function_that_raises_stop_iteration_does_not_leave_a_coroutine_waiting(
    pool: DaemonThreads,
) -> None:
    async def main() -> object:
        return await asyncio.wait_for(asyncio.wrap_future(pool.run(lambda: next(iter(())))), 10)

    with pytest.raises(RuntimeError, match="raised StopIteration") as caught:
        asyncio.run(main())
    assert isinstance(caught.value.__cause__, StopIteration)


def test_a_function_sees_the_context_that_it_is_given(pool: DaemonThreads) -> None:
    number: ContextVar[int] = ContextVar("number", default=0)
    number.set(3)
    context = copy_context()
    assert pool.run(lambda: context.run(number.get)).result(10) == 3
    assert pool.run(number.get).result(10) == 0


def test_the_threads_are_daemons_with_a_name(pool: DaemonThreads) -> None:
    thread = pool.run(threading.current_thread).result(10)
    assert thread.daemon
    assert thread.name.startswith("maestro-task-")


def test_what_was_cancelled_before_its_start_is_not_started(
    pool: DaemonThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CancelledAtOnce(Future[object]):
        def __init__(self) -> None:
            super().__init__()
            self.cancel()

    ran: list[int] = []
    monkeypatch.setattr("maestro_hive.kernel.process.Future", CancelledAtOnce)
    future = pool.run(lambda: ran.append(1))
    with pytest.raises(CancelledError):
        future.result(10)
    monkeypatch.undo()
    assert pool.run(lambda: "still here").result(10) == "still here"
    assert ran == []


# --- reuse -----------------------------------------------------------------------------------


def test_an_idle_thread_is_used_again() -> None:
    pool = DaemonThreads()
    used = set()
    for _ in range(50):
        used.add(pool.run(threading.get_ident).result(10))
        assert eventually(pool._idle)
    assert len(used) == 1


def test_calls_one_after_the_other_need_very_few_threads() -> None:
    pool = DaemonThreads()
    used: set[threading.Thread] = set()
    for _ in range(500):
        used.add(pool.run(threading.current_thread).result(10))
    assert len(used) <= 5


def test_a_thread_that_hangs_is_not_used_until_it_returns(pool: DaemonThreads) -> None:
    release = threading.Event()
    hanging = pool.run(lambda: (release.wait(30), threading.current_thread())[1])
    others = {pool.run(threading.current_thread).result(10) for _ in range(20)}
    assert not hanging.done()
    assert eventually(lambda: not any(thread.is_alive() for thread in others))
    pool._idle_seconds = 60
    release.set()
    late = hanging.result(10)
    assert late not in others
    assert eventually(pool._idle)
    assert pool.run(threading.current_thread).result(10) is late


def test_two_hundred_run_at_the_same_time(pool: DaemonThreads) -> None:
    barrier = threading.Barrier(201)
    futures = [pool.run(lambda: barrier.wait(30)) for _ in range(200)]
    barrier.wait(30)
    assert len({future.result(10) for future in futures}) == 200
    assert eventually(lambda: not pool._idle())


def test_a_thread_with_nothing_to_do_ends(pool: DaemonThreads) -> None:
    thread = pool.run(threading.current_thread).result(10)
    assert eventually(lambda: not thread.is_alive())
    assert not pool._idle()
    assert pool.run(lambda: "another").result(10) == "another"


def test_no_call_is_lost_when_threads_end_just_then() -> None:
    pool = DaemonThreads(idle_seconds=0.001)

    def call_often(pauses: float) -> None:
        for number in range(300):
            assert pool.run(partial(int, number)).result(10) == number
            time.sleep(pauses)

    callers = [
        threading.Thread(target=call_often, args=(pauses,)) for pauses in (0.0009, 0.001, 0.0011)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert not any(caller.is_alive() for caller in callers)


class Thing:
    """Something that can be watched going away."""


def test_an_idle_thread_keeps_neither_function_nor_result_alive() -> None:
    pool = DaemonThreads()
    argument = Thing()
    gone: list[str] = []

    def give_back(thing: Thing = argument) -> Thing:
        return thing

    weakref.finalize(argument, gone.append, "gone")
    assert pool.run(give_back).result(10) is argument
    assert eventually(pool._idle)
    del give_back, argument
    assert gone == ["gone"]


def test_an_error_does_not_keep_its_future_alive() -> None:
    pool = DaemonThreads()

    def fail() -> NoReturn:
        raise ValueError

    future = pool.run(fail)
    watched = weakref.ref(future)
    assert isinstance(future.exception(10), ValueError)
    assert eventually(pool._idle)
    gc.disable()
    try:
        del future
        assert watched() is None
    finally:
        gc.enable()


def test_a_callback_that_hangs_holds_nobody_up(pool: DaemonThreads) -> None:
    begin, release = threading.Event(), threading.Event()
    future = pool.run(lambda: begin.wait(30))
    future.add_done_callback(lambda _: release.wait(30))
    begin.set()
    assert future.result(10)
    assert pool.run(lambda: "at once").result(10) == "at once"
    release.set()


@pytest.mark.timing
def test_starting_a_short_function_costs_little() -> None:
    pool = DaemonThreads()
    pool.run(int).result(10)

    def measure() -> float:
        start = time.perf_counter()
        for _ in range(20):
            pool.run(int).result(10)
        return (time.perf_counter() - start) / 20

    assert least(measure, 0.002, tries=50) < 0.002


def test_when_no_thread_can_be_started_the_caller_is_told(
    pool: DaemonThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> NoReturn:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            pool.run(int)
    assert pool.run(int).result(10) == 0


# --- the end of the process, and forks -------------------------------------------------------


@pytest.mark.parametrize(
    "script, printed", [(LEAVE_ONE_HANGING, "late True\n"), (START_ONE_AT_THE_END, "done\n")]
)
def test_a_function_that_hangs_does_not_keep_the_process_alive(script: str, printed: str) -> None:
    assert output_of(script) == printed


def seconds_from_last_line_to_end() -> float:
    with subprocess.Popen(
        [sys.executable, "-c", LEAVE_ONE_HANGING], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "late True\n"
        start = time.monotonic()
        assert process.wait(60) == 0
        return time.monotonic() - start


@pytest.mark.timing
def test_the_process_ends_within_a_second_of_its_last_line() -> None:
    assert least(seconds_from_last_line_to_end, 1) < 1


def test_a_forked_child_starts_with_threads_of_its_own() -> None:
    assert output_of(FORK_WITH_IDLE_ONES) == "42 both\n"


def test_a_function_may_fork() -> None:
    assert output_of(FORK_INSIDE_ONE) == "7\n"


def run_one(answers: multiprocessing.SimpleQueue[int]) -> None:
    answers.put(threads.run(os.getpid).result(10))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_process_of_multiprocessing_can_use_them(method: str) -> None:
    threads.run(int).result(10)
    context = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    process = context.Process(target=run_one, args=(answers,))  # type: ignore[attr-defined]
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert answers.get() == process.pid
