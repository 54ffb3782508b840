"""A step whose end was never recorded: it runs again, waits for a person, or fails."""

from __future__ import annotations

import asyncio
import signal
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import Raw

from maestro_hive.engine.config import ExecutionConfig, Level1Config
from maestro_hive.engine.errors import AmbiguousStepError, HelpNeeded
from maestro_hive.hive.hive import Hive
from maestro_hive.journal import values
from maestro_hive.journal.effects import Release
from maestro_hive.journal.entries import AttemptStarted, Retried, RunStarted, StepCompleted
from maestro_hive.journal.store import Acquire, Append, RunLease
from maestro_hive.kernel.errors import RunFailedError, RunInterruptedError
from tests.hive.conftest import quick_config, recorded, store_of
from tests.python_processes import run_python

if TYPE_CHECKING:
    from pathlib import Path

    from maestro_hive.journal.entries import Entry

_PROGRAM = textwrap.dedent("""
    import os, sys
    from maestro_hive.hive.hive import Hive

    hive = Hive(sys.argv[1])
    on_ambiguous, *dies = sys.argv[2:]

    @hive.step(on_ambiguous=on_ambiguous)
    async def charge(customer):
        print("charging", customer, flush=True)
        if customer in dies:
            os.kill(os.getpid(), 9)
        return f"{customer}-receipt"

    @hive.workflow
    async def sell(customers):
        return [await charge(each) for each in customers]

    print(hive.run_sync(sell, ["a", "b"], run_id="r"))
""")


def program(folder: Path, on_ambiguous: str, *dies: str) -> Any:
    return run_python(_PROGRAM, folder, on_ambiguous, *dies)


def entries_of(hive: Hive) -> list[Entry]:
    return recorded(hive, "r")


def settle(hive: Hive, entry: Entry) -> None:
    """Record what a person decided, as the surface does."""
    store = store_of(hive)
    first = RunStarted(workflow=store.find("r").workflow)
    (lease,) = store.write((Acquire("r", first),))
    assert isinstance(lease, RunLease)
    store.write((Append(lease, (entry,), (Release("stopped"),), sync=True),))


def test_a_step_that_was_killed_runs_again_unless_it_says_otherwise(folder: Path) -> None:
    assert program(folder, "rerun", "b").returncode == -signal.SIGKILL
    last = program(folder, "rerun")
    assert last.stdout.splitlines() == ["charging b", "['a-receipt', 'b-receipt']"]


def test_a_step_that_asks_waits_for_a_person_and_says_how_to_settle_it(folder: Path) -> None:
    assert program(folder, "ask", "b").returncode == -signal.SIGKILL
    for _ in range(2):
        asked = program(folder, "ask")
        assert asked.returncode == 1
        assert asked.stdout == ""
        assert "step 'charge' of run 'r' is ambiguous: attempt 1 started" in asked.stderr
        assert "`maestro answer r charge --result VALUE`" in asked.stderr
        assert "`maestro answer r charge --rerun`" in asked.stderr
    with Hive(folder) as hive:
        (question,) = hive.state("r").questions.values()
        assert (question.what, question.name) == ("ambiguous", "charge")


def test_a_step_that_had_no_effect_is_executed_again_and_the_others_are_not(folder: Path) -> None:
    program(folder, "ask", "b")
    program(folder, "ask")
    with Hive(folder) as hive:
        (identity,) = hive.state("r").questions
        settle(hive, Retried(identities=(identity,), by="ann"))
    last = program(folder, "ask")
    assert last.stdout.splitlines() == ["charging b", "['a-receipt', 'b-receipt']"]


def test_a_step_that_is_killed_again_asks_again(folder: Path) -> None:
    for _ in range(2):
        assert program(folder, "ask", "a").returncode == -signal.SIGKILL
        assert "is ambiguous" in program(folder, "ask").stderr
        with Hive(folder) as hive:
            (identity,) = hive.state("r").questions
            settle(hive, Retried(identities=(identity,)))


def test_a_step_that_is_settled_with_a_result_is_not_called(folder: Path) -> None:
    program(folder, "ask", "b")
    program(folder, "ask")
    with Hive(folder) as hive:
        (question,) = hive.state("r").questions.values()
        completed = values.encode("by hand").data
        settle(hive, StepCompleted(step=question.step, result=Raw(completed), by="ann"))
        assert not hive.state("r").questions
    assert program(folder, "ask").stdout == "['a-receipt', 'by hand']\n"


def test_a_step_that_fails_when_it_is_ambiguous_gives_the_workflow_an_error(folder: Path) -> None:
    program(folder, "fail", "b")
    failed = program(folder, "fail")
    assert "charging" not in failed.stdout
    assert "AmbiguousStepError: step 'charge' of run 'r' is ambiguous" in failed.stderr


# --- in one program -------------------------------------------------------------------------------


def shop(hive: Hive, started: asyncio.Event | None, calls: list[str], **options: Any) -> Any:
    @hive.step(**options)
    async def charge(customer: str) -> str:
        calls.append(customer)
        if started is not None:
            started.set()
            await asyncio.sleep(60)
        return "paid"

    @hive.workflow
    async def sell() -> str:
        return await charge("a")

    return sell


async def stopped(folder: Path, **options: Any) -> None:
    """Stop a run politely in the middle of a step."""
    with Hive(folder, quick_config()) as hive:
        started = asyncio.Event()
        running = asyncio.create_task(hive.run(shop(hive, started, [], **options), run_id="r"))
        await started.wait()
        running.cancel()
        await asyncio.wait({running})


def test_a_polite_stop_in_the_middle_is_ambiguous_too(folder: Path) -> None:
    asyncio.run(stopped(folder, on_ambiguous="ask"))
    calls: list[str] = []
    with Hive(folder, quick_config()) as hive:
        sell = shop(hive, None, calls, on_ambiguous="ask")
        with pytest.raises(HelpNeeded, match="charge") as caught:
            hive.run_sync(sell, run_id="r")
        assert isinstance(caught.value, AmbiguousStepError)
        assert (caught.value.run_id, caught.value.step) == ("r", "charge")
        assert calls == []


def test_a_polite_stop_is_neither_a_failure_nor_an_interruption(folder: Path) -> None:
    for _ in range(3):
        asyncio.run(stopped(folder, max_attempts=1, max_interruptions=0))
    calls: list[str] = []
    with Hive(folder, quick_config()) as hive:
        sell = shop(hive, None, calls, max_attempts=1, max_interruptions=0)
        assert hive.run_sync(sell, run_id="r") == "paid"
        starts = [each for each in entries_of(hive) if isinstance(each, AttemptStarted)]
        assert [each.attempt for each in starts] == [1, 2, 3, 4]


# --- interruptions --------------------------------------------------------------------------------


def test_a_step_whose_processes_die_too_often_waits_for_a_retry(folder: Path) -> None:
    config = ExecutionConfig(level1=Level1Config(max_interruptions=1))
    for _ in range(2):
        assert program(folder, "rerun", "a").returncode == -signal.SIGKILL
    with Hive(folder, config) as hive:
        calls: list[str] = []
        sell = hive.workflow(name="sell")(_sell(hive, calls))
        for _ in range(2):
            with pytest.raises(RunInterruptedError, match="2 processes died in step 'charge'"):
                hive.run_sync(sell, ["a", "b"], run_id="r")
        assert calls == []
        state = hive.state("r")
        (step,) = state.steps.values()
        settle(hive, Retried(identities=(step.identity,)))
        assert hive.run_sync(sell, ["a", "b"], run_id="r") == ["a!", "b!"]
        assert calls == ["a", "b"]


def _sell(hive: Hive, calls: list[str]) -> Any:
    @hive.step
    async def charge(customer: str) -> str:
        calls.append(customer)
        return f"{customer}!"

    async def sell(customers: list[str]) -> list[str]:
        return [await charge(each) for each in customers]

    return sell


def test_a_step_may_have_a_limit_of_its_own(folder: Path) -> None:
    program(folder, "rerun", "a")
    with Hive(folder, quick_config()) as hive:
        calls: list[str] = []

        @hive.step(max_interruptions=0)
        async def charge(customer: str) -> str:
            calls.append(customer)
            return customer

        @hive.workflow
        async def sell(customers: list[str]) -> list[str]:
            return [await charge(each) for each in customers]

        with pytest.raises(RunInterruptedError):
            hive.run_sync(sell, ["a", "b"], run_id="r")
        assert calls == []


def test_failures_before_a_kill_count_after_it(folder: Path) -> None:
    done = run_python(_FAILS, folder, "3")
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "1\n2\n3\n")
    done = run_python(_FAILS, folder, "0")
    assert done.stdout == "4\n5\n", "two failures, one interruption, and two more failures"
    assert "run 'r' failed: ValueError: no" in done.stderr


_FAILS = """
import os, sys
from maestro_hive.engine.attempt import current
from maestro_hive.engine.config import ExecutionConfig, Level1Config
from maestro_hive.hive.hive import Hive

hive = Hive(sys.argv[1], ExecutionConfig(level1=Level1Config(base_delay_seconds=0)))

@hive.step(max_attempts=4)
async def fail():
    print(current().attempt, flush=True)
    if current().attempt == int(sys.argv[2]):
        os.kill(os.getpid(), 9)
    raise ValueError("no")

@hive.workflow
async def work():
    await fail()

hive.run_sync(work, run_id="r")
"""


def test_a_step_that_is_not_retried_fails_at_once(hive: Hive) -> None:
    calls: list[int] = []

    @hive.step
    async def wrong() -> None:
        calls.append(1)
        raise NotImplementedError

    @hive.workflow
    async def work() -> None:
        await wrong()

    with pytest.raises(RunFailedError, match="NotImplementedError"):
        hive.run_sync(work)
    assert calls == [1]
