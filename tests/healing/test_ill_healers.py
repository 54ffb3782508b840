"""Healers that hang, raise, cancel, exit or answer nonsense: the step goes on, with its own error."""

from __future__ import annotations

import asyncio
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import Fix, Hive, PersonaExecutor
from maestro_hive.engine.healing.engine import SelfHealingEngine
from maestro_hive.engine.healing.failure import FailureType
from maestro_hive.hive.errors import RunFailedError
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.maestro.state.events import RepairTried
from maestro_hive.unified_execution import StateConfig, UnrecoverableError
from tests.healing.test_user_healers import Reading, events
from tests.hive.conftest import quick_config
from tests.tables import for_each
from tests.unified_execution.restarts import execute

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def hive(tmp_path: Path) -> Iterator[Hive]:
    with Hive(tmp_path / "state", quick_config(), workspace=tmp_path) as made:
        yield made


def _cancel() -> Any:
    raise asyncio.CancelledError("of something it waited for")


async def _cancel_async() -> Any:
    inner = asyncio.get_running_loop().create_future()
    inner.cancel()
    return await inner


def _exit() -> Any:
    sys.exit("usage: healer")


async def _exit_async() -> Any:
    sys.exit("usage: healer")


def _end() -> Any:
    raise BaseExceptionGroup("ended", [SystemExit(3)])


def _raise() -> Any:
    raise RuntimeError("the healer is ill")


ILL: dict[str, tuple[Callable[[], Any], str]] = {
    "cancels": (_cancel, "waited for something that was cancelled"),
    "cancels, async": (_cancel_async, "waited for something that was cancelled"),
    "exits": (_exit, "raised SystemExit: usage: healer"),
    "exits, async": (_exit_async, "raised SystemExit: usage: healer"),
    "raises a group": (_end, "raised BaseExceptionGroup: ended (1 sub-exception)"),
    "raises": (_raise, "RuntimeError: the healer is ill"),
}
every_way = pytest.mark.parametrize("call, said", ILL.values(), ids=ILL)


@every_way
def test_the_next_healer_of_a_step_is_asked(hive: Hive, call: Callable[[], Any], said: str) -> None:
    reading = Reading(hive, max_attempts=2)
    hive.healer(ValueError, name="ill")(call)
    hive.healer(ValueError, name="deeper")(lambda: {"depth": 5})
    assert hive.run_sync(reading.flow, run_id="r") == "a 5"
    (tried,) = (each for each in events(hive) if isinstance(each, RepairTried))
    assert tried.healer == "deeper"
    assert f"ill{'' if said.startswith(('waited', 'raised')) else ':'} {said}" == tried.error


@every_way
@pytest.mark.parametrize("durable", [True, False], ids=["durable", "in memory"])
def test_an_executor_whose_engine_ends_so_raises_the_tasks_own_error(
    tmp_path: Path, call: Callable[[], Any], said: str, durable: bool
) -> None:
    class Engine:
        def heal_single(self, failure: Any) -> Any:
            del failure
            return call()

    def fail() -> None:
        raise ValueError("its own")

    config = replace(quick_config(), state=StateConfig(state_dir=str(tmp_path / "state")))
    workflow_id = "w" if durable else None
    with (
        PersonaExecutor(config, healing_engine=Engine(), workflow_id=workflow_id) as executor,
        pytest.raises(UnrecoverableError) as caught,
    ):
        execute(executor, fail, "work")
    assert isinstance(caught.value.__cause__, ValueError)
    assert caught.value.result is not None
    assert said in caught.value.result.attempts[0].metrics["healing_error"]


@pytest.mark.parametrize("call", [_cancel, _cancel_async, _raise])
def test_an_engine_that_is_asked_by_hand_tells_it(call: Callable[[], Any]) -> None:
    class Ill:
        handles = frozenset(FailureType)

        def propose(self, failure: Any, workspace: Any) -> Any:
            del failure, workspace
            return call()

    result = SelfHealingEngine(healers=[Ill()]).heal_single(ValueError("v"))
    assert result.status.name == "FAILED"
    assert str(result.error_message).startswith("Ill: ")


@pytest.mark.parametrize("call", [_cancel, _exit, _end, _raise])
def test_a_check_that_ends_so_has_not_passed(
    hive: Hive, tmp_path: Path, call: Callable[[], Any]
) -> None:
    reading = Reading(hive, max_attempts=2)
    hive.healer(ValueError, name="ill")(lambda: Fix(files={"new": "1"}, check=call))
    hive.healer(ValueError, name="deeper")(lambda: {"depth": 5})
    assert hive.run_sync(reading.flow, run_id="r") == "a 5"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_one_that_hangs_is_left_alone_after_the_time_of_an_attempt(
    hive: Hive, is_async: bool
) -> None:
    release = threading.Event()
    reading = Reading(hive, max_attempts=2, timeout=0.6)

    async def hang_async() -> None:
        await asyncio.Event().wait()

    def hang() -> None:
        release.wait(30)

    hive.healer(ValueError, name="hangs")(hang_async if is_async else hang)
    try:
        with pytest.raises(RunFailedError, match="a is too deep"):
            hive.run_sync(reading.flow, run_id="r")
    finally:
        release.set()
    assert reading.calls == [1, 1]
    (tried,) = (each for each in events(hive) if isinstance(each, RepairTried))
    assert (tried.status, tried.error) == (
        "FAILED",
        "hangs was not finished within 0.6 seconds",
    )


def test_a_ticket_that_hangs_holds_up_neither_its_step_nor_others(tmp_path: Path) -> None:
    release, started = threading.Event(), threading.Event()

    def create(_: Any) -> str:
        started.set()
        release.wait(30)
        return "T-1"

    engine = SelfHealingEngine(create_ticket=create, healers=[])
    engine.add_healer(_Silent())
    with Hive(tmp_path / "state", quick_config(), healing_engine=engine) as hive:
        reading = Reading(hive, max_attempts=2, timeout=0.6)
        try:
            with pytest.raises(RunFailedError, match="a is too deep"):
                hive.run_sync(reading.flow, run_id="r")
        finally:
            release.set()
    assert started.wait(30)
    assert reading.calls == [1, 1]


class _Silent:
    handles = frozenset(FailureType)

    def propose(self, failure: Any, workspace: Any) -> None:
        """Have nothing to say."""


@for_each("handles", [None, 5, "value_error", [ValueError], {"nonsense"}])
def test_what_a_healer_handles_are_types_of_failures(handles: Any) -> None:
    healer = _Silent()
    healer.handles = handles
    with pytest.raises(ConfigurationError, match="handles"):
        SelfHealingEngine(healers=[healer])


def test_a_run_that_is_cancelled_while_a_healer_is_asked_is_stopped(hive: Hive) -> None:
    reading = Reading(hive)
    asked = asyncio.Event()

    @hive.healer(ValueError)
    async def wait() -> None:
        asked.set()
        await asyncio.Event().wait()

    async def main() -> None:
        run = asyncio.create_task(hive.run(reading.flow, run_id="r"))
        await asyncio.wait_for(asked.wait(), 30)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    asyncio.run(main())
    assert reading.calls == [1]
