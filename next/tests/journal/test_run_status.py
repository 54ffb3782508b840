"""What a run waits for, as lists and pages show it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.hive.hive import Hive
from maestro_hive.journal.entries import ChildStarted, RunSuspended, WaitStarted
from maestro_hive.journal.run_status import Waiting, waiting_for
from maestro_hive.journal.state import RunState
from maestro_hive.journal.store import RunRow
from tests.hive.conftest import store_of, until

if TYPE_CHECKING:
    from pathlib import Path


def row(status: str, waits_for: str | None = None, **other: Any) -> RunRow:
    fields = {"queue": None, "due": None, **other}
    empty: dict[str, Any] = dict.fromkeys(RunRow._fields)
    return RunRow(**{**empty, "status": status, "waits_for": waits_for, **fields})


def state(*entries: Any) -> RunState:
    made = RunState()
    made.add(entries)
    return made


def test_a_run_that_is_executed_or_has_ended_waits_for_nothing() -> None:
    for status in ("running", "success", "failed", "cancelled"):
        assert waiting_for(state(), row(status)) is None


def test_of_several_questions_the_one_that_ends_first_is_named() -> None:
    asked = [
        WaitStarted(identity="a", name="first"),
        WaitStarted(identity="b", name="soon", until=5_000_000),
        WaitStarted(identity="c", name="later", until=9_000_000),
    ]
    found = waiting_for(state(*asked), row("waiting", "answer", due=5.0))
    assert found == Waiting("answer", "soon", 5.0)
    assert waiting_for(state(asked[0]), row("running", "answer")) == Waiting("answer", "first")


def test_a_child_is_named() -> None:
    child = ChildStarted(identity="a", run_id="r/build.1", workflow="build")
    assert waiting_for(state(child), row("running", "child")) == Waiting("child", "r/build.1")


def test_a_suspended_run_says_why_and_until_when() -> None:
    suspended = state(RunSuspended(reason="breaker", message="the breaker is open"))
    found = waiting_for(suspended, row("waiting", "breaker", queue="q", due=7.5))
    assert found == Waiting("breaker", "the breaker is open", 7.5)


def test_a_timer_has_its_time() -> None:
    assert waiting_for(state(), row("waiting", "timer", due=3.0)) == Waiting("timer", "", 3.0)


def test_runs_that_nobody_executes_wait_for_a_worker_a_retry_or_a_resume() -> None:
    assert waiting_for(state(), row("pending", queue="q", due=1.0)) == Waiting("worker", "", 1.0)
    assert waiting_for(state(), row("interrupted")) == Waiting("retry")
    assert waiting_for(state(), row("stopped")) == Waiting("resume")


@pytest.mark.parametrize("is_released", [False, True])
def test_a_run_shows_what_it_waits_for_in_memory_and_released(
    tmp_path: Path, *, is_released: bool
) -> None:
    with Hive(tmp_path) as hive:

        @hive.workflow
        async def parent() -> None:
            await child()

        @hive.workflow
        async def child() -> None:
            await hive.wait_for("ready", timeout=1000)

        def waiting(run_id: str) -> Waiting | None:
            return waiting_for(hive.state(run_id), store_of(hive).find(run_id))

        async def work() -> None:
            hive.enqueue(parent, run_id="r")
            async with hive.worker(grace=0, release_after=0.01 if is_released else 60):
                await until(lambda: (found := waiting("r")) and found.kind == "child")
                await until(lambda: (store_of(hive).find("r").holder is None) == is_released)
                found = waiting("r")
                assert found is not None
                assert (found.kind, found.subject[:8]) == ("child", "r/child.")

        asyncio.run(work())
