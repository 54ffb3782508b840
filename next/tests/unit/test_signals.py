"""Ctrl+C and SIGTERM: the first cancels the task, the second does what it always did."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.kernel import signals
from maestro_hive.kernel.signals import PoliteStop, until_signal
from tests.python_processes import PythonProcess
from tests.tables import for_each

if TYPE_CHECKING:
    from collections.abc import Iterator

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]

BEGIN = """
import asyncio, os, signal, sys, threading, time
from maestro_hive.kernel.signals import PoliteStop

def say(*words):
    print(*words, flush=True)
"""

WAIT_IN_SELECT = """
async def main():
    try:
        async with PoliteStop() as stop:
            say("ready")
            await asyncio.sleep(60)
    except asyncio.CancelledError:
        say("cancelled by", stop.signal.name)
        sys.exit(128 + stop.signal)
"""

CLEAN_UP_SLOWLY = """
async def main():
    async with PoliteStop():
        try:
            say("ready")
            await asyncio.sleep(60)
        finally:
            say("cleaning up")
            await asyncio.sleep(60)
            say("not reached")
"""

BLOCK_THE_LOOP = """
async def main():
    async with PoliteStop() as stop:
        say("ready")
        while stop.signal is None:
            time.sleep(0.01)
        say("cleaning up")
        time.sleep(60)
        say("not reached")
"""

CATCH_AND_GO_ON = """
async def main():
    try:
        async with PoliteStop() as stop:
            say("ready")
            await asyncio.sleep(60)
    except asyncio.CancelledError:
        asyncio.current_task().uncancel()
    say("after", stop.signal.name)
    await asyncio.sleep(60)
    say("not reached")
"""

FORK_A_CHILD = """
async def main():
    async with PoliteStop() as stop:
        is_ready, ready = os.pipe()
        child = os.fork()
        if child == 0:
            say("ready")
            os.write(ready, b"r")
            time.sleep(60)
            os._exit(1)
        say(await asyncio.to_thread(ended_by, child, is_ready), stop.signal)

def ended_by(child, is_ready):
    os.read(is_ready, 1)
    os.kill(child, signal.SIGTERM)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""

FORK_AND_WAIT = """
async def main():
    try:
        async with PoliteStop() as stop:
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
            say("ready")
            await asyncio.sleep(60)
    except asyncio.CancelledError:
        say("cancelled by", stop.signal.name)
        sys.exit(128 + stop.signal)
"""

RUN = """
asyncio.run(main())
"""

RUN_IN_A_LOOP_OF_ITS_OWN = """
loop = asyncio.new_event_loop()
try:
    loop.run_until_complete(main())
finally:
    loop.close()
"""


@contextmanager
def program(body: str, run: str = RUN) -> Iterator[PythonProcess]:
    """Start a program, wait until it is ready, and leave none behind."""
    with PythonProcess(BEGIN + body + run, stderr=True) as process:
        try:
            assert process.line() == "ready"
            time.sleep(0.1)  # until it waits
            yield process
        finally:
            process.kill()


def end_of(process: PythonProcess) -> tuple[int, str]:
    """Return how it ended, which it must do soon, and what else it printed."""
    output, _ = process.communicate(timeout=60)
    return process.wait(), output


# --- real programs, real signals -------------------------------------------------------------


@for_each("run", [RUN, RUN_IN_A_LOOP_OF_ITS_OWN], ids=["asyncio.run", "own loop"])
@for_each("number", SIGNALS)
def test_a_signal_wakes_the_loop_and_cancels_the_task(number: signal.Signals, run: str) -> None:
    with program(WAIT_IN_SELECT, run) as process:
        process.send_signal(number)
        assert end_of(process) == (128 + number, f"cancelled by {number.name}\n")


def test_other_threads_do_not_keep_the_signal_from_the_loop() -> None:
    spin = """
def spin():
    while True:
        sum(range(1000))

for _ in range(3):
    threading.Thread(target=spin, daemon=True).start()
"""
    with program(WAIT_IN_SELECT + spin) as process:
        process.send_signal(signal.SIGTERM)
        assert end_of(process) == (143, "cancelled by SIGTERM\n")


@for_each("body", [WAIT_IN_SELECT, FORK_AND_WAIT], ids=["waits", "forks"])
@for_each("number", SIGNALS)
def test_a_signal_that_another_thread_receives_wakes_the_loop(
    number: signal.Signals, body: str
) -> None:
    # As a signal just before the loop waits: no system call of the main thread is interrupted.
    receive_elsewhere = """
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
"""
    with program(body + receive_elsewhere) as process:
        process.send_signal(number)
        assert end_of(process) == (128 + number, f"cancelled by {number.name}\n")


@pytest.mark.parametrize("run", [RUN, RUN_IN_A_LOOP_OF_ITS_OWN], ids=["asyncio.run", "own loop"])
@pytest.mark.parametrize("body", [CLEAN_UP_SLOWLY, BLOCK_THE_LOOP], ids=["slow", "stuck"])
@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", SIGNALS[:2])
def test_a_second_signal_stops_a_program_that_does_not_end(
    first: signal.Signals, second: signal.Signals, body: str, run: str
) -> None:
    with program(body, run) as process:
        process.send_signal(first)
        assert process.line() == "cleaning up"
        time.sleep(0.1)
        process.send_signal(second)
        assert end_of(process) == (-second, "")


@pytest.mark.parametrize("number", SIGNALS)
def test_after_the_body_a_signal_does_what_it_did_before(number: signal.Signals) -> None:
    with program(CATCH_AND_GO_ON) as process:
        process.send_signal(signal.SIGTERM)
        assert process.line() == "after SIGTERM"
        time.sleep(0.1)
        process.send_signal(number)
        assert end_of(process) == (-number, "")


def test_two_signals_at_once_end_the_program() -> None:
    with program(WAIT_IN_SELECT) as process:
        process.send_signal(signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
        code, output = end_of(process)
        assert code in {-15, 130, 143}
        assert output in {"", "cancelled by SIGINT\n", "cancelled by SIGTERM\n"}


def test_a_forked_child_ends_at_its_first_sigterm() -> None:
    with program(FORK_A_CHILD) as process:
        assert end_of(process) == (0, "-15 None\n")


# --- in this process -------------------------------------------------------------------------


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in SIGNALS]


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """A test that leaves a handler behind fails."""
    before = handlers()
    yield
    assert handlers() == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Handlers that were there before: they record their signals."""
    heard: list[int] = []
    before = [signal.signal(number, lambda number, _: heard.append(number)) for number in SIGNALS]
    yield heard
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


async def cancelled_while_sleeping(seconds: float = 30) -> bool:
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        return True
    return False


def test_without_a_signal_nothing_happens_and_the_handlers_are_back(heard: list[int]) -> None:
    async def main() -> None:
        before = handlers()
        async with PoliteStop() as stop:
            assert handlers() != before
            await asyncio.sleep(0)
        assert stop.signal is None
        assert handlers() == before

    asyncio.run(main())
    assert heard == []


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_ours_and_the_second_theirs(
    number: signal.Signals, heard: list[int]
) -> None:
    async def main() -> None:
        async with PoliteStop() as stop:
            send(number)
            assert await cancelled_while_sleeping()
            assert stop.signal is number
            assert heard == []
            send(number)
            await asyncio.sleep(0.01)
            assert heard == [number]

    asyncio.run(main())


def test_with_grace_the_task_is_cancelled_when_that_is_over(heard: list[int]) -> None:
    async def main() -> None:
        over = asyncio.Event()
        async with PoliteStop(over.wait) as stop:
            send(signal.SIGTERM)
            await asyncio.sleep(0.01)
            assert stop.signal is signal.SIGTERM
            send(signal.SIGTERM)  # the second one does what it did before
            await asyncio.sleep(0.01)
            assert heard == [signal.SIGTERM]
            over.set()
            assert await cancelled_while_sleeping()

    asyncio.run(main())


@pytest.mark.parametrize("number", SIGNALS)
def test_steps_end_without_an_outcome_between_a_signal_and_the_cancellation(
    number: signal.Signals, heard: list[int]
) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with PoliteStop():
            send(number)
            assert loop in signals.interrupted
            assert await cancelled_while_sleeping()
        assert loop not in signals.interrupted
        over = asyncio.Event()
        async with PoliteStop(over.wait):
            send(number)
            assert loop not in signals.interrupted
            over.set()
            assert await cancelled_while_sleeping()

    asyncio.run(main())
    assert heard == []


def test_what_is_done_at_a_stop_comes_before_the_cancellation(heard: list[int]) -> None:
    done: list[str] = []

    async def work() -> None:
        send(signal.SIGTERM)
        if await cancelled_while_sleeping():
            done.append("cancelled")
            raise asyncio.CancelledError

    async def grace() -> None:
        done.append("noted")

    with pytest.raises(SystemExit):
        asyncio.run(until_signal(work(), "stopped", grace))
    assert done == ["noted", "cancelled"]


def test_work_that_ends_within_the_grace_has_its_result() -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    async def work() -> str:
        send(signal.SIGTERM)
        await asyncio.sleep(0.01)
        return "done"

    assert asyncio.run(until_signal(work(), "stopped", forever)) == "done"


def test_an_error_of_the_body_is_raised_and_the_handlers_are_back() -> None:
    async def main() -> None:
        async with PoliteStop():
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        asyncio.run(main())


def test_a_signal_after_the_last_await_is_a_cancellation_too(heard: list[int]) -> None:
    async def main() -> str:
        stop = PoliteStop()
        try:
            async with stop:
                send(signal.SIGTERM)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            assert task.uncancel() == 0
            await asyncio.sleep(0.01)  # and it is not cancelled once more
            return f"cancelled by {stop.signal!r}"
        return "not cancelled"

    assert asyncio.run(main()) == f"cancelled by {signal.SIGTERM!r}"


def test_an_error_of_the_body_is_not_hidden_by_a_late_signal(heard: list[int]) -> None:
    async def fail(stop: PoliteStop) -> None:
        async with stop:
            send(signal.SIGTERM)
            raise ValueError("mine")

    async def main() -> signal.Signals | None:
        stop = PoliteStop()
        with pytest.raises(ValueError, match="mine"):
            await fail(stop)
        await asyncio.sleep(0.01)  # and it is not cancelled now
        return stop.signal

    assert asyncio.run(main()) is signal.SIGTERM


def test_a_cancellation_by_somebody_else_shows_no_signal() -> None:
    async def body() -> signal.Signals | None:
        stop = PoliteStop()
        try:
            async with stop:
                await asyncio.sleep(30)
        except asyncio.CancelledError:
            return stop.signal
        raise AssertionError

    async def main() -> None:
        task = asyncio.create_task(body())
        await asyncio.sleep(0)
        task.cancel()
        assert await task is None

    asyncio.run(main())


def test_only_the_current_task_is_cancelled(heard: list[int]) -> None:
    async def body() -> bool:
        async with PoliteStop():
            return await cancelled_while_sleeping()

    async def main() -> None:
        polite = asyncio.create_task(body())
        other = asyncio.create_task(cancelled_while_sleeping(0.1))
        await asyncio.sleep(0)
        send(signal.SIGTERM)
        assert await polite
        assert not await other

    asyncio.run(main())


def test_bodies_at_the_same_time_are_all_stopped_and_end_in_any_order(heard: list[int]) -> None:
    async def body() -> signal.Signals | None:
        async with PoliteStop() as stop:
            await cancelled_while_sleeping()
        return stop.signal

    async def short(over: asyncio.Event) -> None:
        async with PoliteStop():
            await over.wait()

    async def main() -> None:
        ends = [asyncio.Event(), asyncio.Event()]
        first, second = (asyncio.create_task(short(over)) for over in ends)
        bodies = [asyncio.create_task(body())]
        await asyncio.sleep(0)  # all of them have started
        ends[0].set()
        await first
        bodies.append(asyncio.create_task(body()))
        await asyncio.sleep(0)
        ends[1].set()
        await second
        send(signal.SIGINT)
        assert await asyncio.gather(*bodies) == [signal.SIGINT] * 2

    asyncio.run(main())
    assert heard == []


def test_one_inside_the_other_is_one_stop(heard: list[int]) -> None:
    async def main() -> None:
        async with PoliteStop() as outer:
            async with PoliteStop() as inner:
                send(signal.SIGTERM)
                assert await cancelled_while_sleeping()
            assert inner.signal is outer.signal is signal.SIGTERM
            send(signal.SIGTERM)
            assert heard == [signal.SIGTERM]

    async def uncancelled() -> None:
        task = asyncio.create_task(main())
        await asyncio.wait([task])
        assert task.cancelled() or task.exception() is None

    asyncio.run(uncancelled())


def test_a_body_that_begins_while_others_are_stopping_does_not_make_a_third_signal_necessary(
    heard: list[int],
) -> None:
    async def main() -> None:
        async with PoliteStop():
            send(signal.SIGTERM)
            assert await cancelled_while_sleeping()
            async with PoliteStop() as late:
                send(signal.SIGTERM)
                assert not await cancelled_while_sleeping(0.01)
            assert late.signal is None
            assert heard == [signal.SIGTERM]

    asyncio.run(main())


def test_a_handler_that_the_body_installed_is_left_alone(heard: list[int]) -> None:
    theirs: list[int] = []

    async def main() -> None:
        async with PoliteStop():
            signal.signal(signal.SIGTERM, lambda number, _: theirs.append(number))
        send(signal.SIGTERM)

    asyncio.run(main())
    assert theirs == [signal.SIGTERM]
    assert heard == []


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)

    async def main() -> signal.Signals | None:
        async with PoliteStop() as stop:
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
            send(signal.SIGTERM)
            assert not await cancelled_while_sleeping(0.01)
            return stop.signal

    try:
        assert asyncio.run(main()) is None
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_of_the_loop_is_still_there_afterwards() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        came = asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, came.set)
        try:
            async with PoliteStop():
                await asyncio.sleep(0)
            send(signal.SIGTERM)
            await asyncio.wait_for(came.wait(), 10)
        finally:
            loop.remove_signal_handler(signal.SIGTERM)

    asyncio.run(main())


def test_in_another_thread_nothing_happens(heard: list[int]) -> None:
    before = handlers()
    seen: list[object] = []

    async def body() -> None:
        async with PoliteStop() as stop:
            seen.append(handlers() == before)
            send(signal.SIGTERM)
            seen.append(await cancelled_while_sleeping(0.05))
        seen.append(stop.signal)

    thread = threading.Thread(target=lambda: asyncio.run(body()))
    thread.start()
    thread.join(10)
    assert seen == [True, False, None]
    assert heard == [signal.SIGTERM]
