"""A step with ``escalate=True`` that failed for good: its run waits until a person says what to do."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import Hive, current
from maestro_hive.hive.errors import AlreadyAnsweredError, RunCancelledError
from maestro_hive.hive.runs import read_run
from maestro_hive.kernel.errors import ConfigurationError
from tests.hive.conftest import quick_config
from tests.timing import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from maestro_hive.hive.escalations import EscalationView


def deployment(hive: Hive, **options: Any) -> Any:
    """Return a workflow whose step fails until a person says how to deploy."""

    @hive.step(escalate=True, max_attempts=2, **options)
    async def deploy(size: int) -> int:
        if not any("mirror" in each for each in current().feedback):
            raise OSError("no route")
        return size

    @hive.workflow
    async def release(size: int) -> str:
        try:
            return f"deployed {await deploy(size)}"
        except OSError as error:
            return f"failed: {error}"

    return release


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - it is the program's own
            await asyncio.sleep(0.01)


async def escalated(hive: Hive, run_id: str = "r") -> EscalationView:
    await until(lambda: any(each.status == "waiting" for each in hive.escalations(run_id)))
    return next(each for each in hive.escalations(run_id) if each.status == "waiting")


async def answered(hive: Hive, work: Any, **answer: Any) -> Any:
    """Start a run, answer its escalation, and return what the run returns."""
    running = asyncio.create_task(hive.run(work, 3, run_id="r"))
    waiting = await escalated(hive)
    assert hive.runs()[0].status == "waiting"
    hive.answer_escalation(waiting.id, **answer)
    return await running


@pytest.mark.parametrize(
    "answer, result",
    [
        ({"feedback": "use the mirror"}, "deployed 3"),
        ({"result": 7}, "deployed 7"),
        ({"give_up": True}, "failed: no route"),
    ],
)
def test_a_person_answers_in_one_of_three_ways(
    hive: Hive, answer: dict[str, Any], result: str
) -> None:
    assert asyncio.run(answered(hive, deployment(hive), by="jo", **answer)) == result
    assert hive.escalations() == []


def test_a_result_that_a_person_gives_ends_no_attempt(hive: Hive) -> None:
    asyncio.run(answered(hive, deployment(hive), result=7))
    (step,) = read_run(hive._open(), "r").steps.values()
    assert (step.starts, step.failures, step.interruptions) == (2, 2, 0)


def test_feedback_that_does_not_help_is_escalated_again(hive: Hive) -> None:
    async def main() -> Any:
        running = asyncio.create_task(hive.run(deployment(hive), 3, run_id="r"))
        first = await escalated(hive)
        hive.answer_escalation(first.id, "try harder")
        await until(lambda: [each.id for each in hive.escalations()] not in ([], [first.id]))
        second = await escalated(hive)
        assert "Attempt 4" in second.description
        hive.answer_escalation(second.id, "use the mirror")
        return await running

    assert asyncio.run(main()) == "deployed 3"


def test_all_other_steps_just_raise(hive: Hive) -> None:
    @hive.step(max_attempts=1)
    async def deploy() -> None:
        raise OSError("no route")

    @hive.workflow
    async def release() -> str:
        try:
            await deploy()
        except OSError as error:
            return str(error)
        return "deployed"

    assert hive.run_sync(release, run_id="r") == "no route"
    assert hive.escalations() == []


def test_an_escalation_takes_one_answer(hive: Hive) -> None:
    async def main() -> Any:
        running = asyncio.create_task(hive.run(deployment(hive), 3, run_id="r"))
        waiting = await escalated(hive)
        hive.answer_escalation(waiting.id, result=7, by="jo")
        with pytest.raises((AlreadyAnsweredError, ConfigurationError)):
            hive.answer_escalation(waiting.id, result=8)
        return await running

    assert asyncio.run(main()) == "deployed 7"


def test_a_result_of_another_type_is_refused(hive: Hive) -> None:
    async def main() -> Any:
        running = asyncio.create_task(hive.run(deployment(hive), 3, run_id="r"))
        waiting = await escalated(hive)
        for wrong in ({"result": "seven"}, {"feedback": " "}, {"result": 1, "give_up": True}):
            with pytest.raises(ConfigurationError):
                hive.answer_escalation(waiting.id, **wrong)
        with pytest.raises(ConfigurationError, match="maestro escalations"):
            hive.answer_escalation("esc-none", "use the mirror")
        with pytest.raises(ConfigurationError, match="does not wait for 'deploy'"):
            hive.answer("r", "deploy", 3)  # it is no question of the workflow
        assert hive.questions("r") == []
        hive.answer_escalation(waiting.id, result=7)
        return await running

    assert asyncio.run(main()) == "deployed 7"


def test_a_stopped_run_takes_its_answer_when_it_is_resumed(folder: Path) -> None:
    async def stopped() -> str:
        with Hive(folder, quick_config()) as hive:
            running = asyncio.create_task(hive.run(deployment(hive), 3, run_id="r"))
            waiting = await escalated(hive)
            running.cancel()
            await asyncio.wait({running})
            assert hive.runs()[0].status == "waiting"
            return waiting.id

    name = asyncio.run(stopped())
    with Hive(folder, quick_config()) as hive:
        work = deployment(hive)
        hive.answer_escalation(name, "use the mirror")
        (listed,) = hive.escalations()
        assert (listed.id, listed.status) == (name, "answered")
        assert hive.run_sync(work, 3, run_id="r") == "deployed 3"
        assert hive.escalations() == []


def test_a_worker_goes_on_with_a_released_run_when_it_is_answered(hive: Hive) -> None:
    work = deployment(hive)

    async def main() -> Any:
        async with hive.worker(release_after=0.05) as worker:
            handle = await hive.start(work, 3, run_id="r")
            waiting = await escalated(hive)
            await until(lambda: not worker.active)  # it is out of memory
            hive.answer_escalation(waiting.id, "use the mirror")
            return await handle.result()

    assert asyncio.run(main()) == "deployed 3"


def test_a_retry_withdraws_the_escalation(hive: Hive) -> None:
    work = deployment(hive)

    async def stopped() -> str:
        running = asyncio.create_task(hive.run(work, 3, run_id="r"))
        waiting = await escalated(hive)
        running.cancel()
        await asyncio.wait({running})
        return waiting.id

    name = asyncio.run(stopped())
    hive.retry("r")
    assert hive.escalations() == []
    with pytest.raises(ConfigurationError, match="does not wait for escalation"):
        hive.answer_escalation(name, "use the mirror")


def test_a_workflow_that_goes_on_without_the_step_withdraws_it(hive: Hive) -> None:
    deploy = deployment(hive)

    @hive.workflow
    async def impatient() -> str:
        try:
            async with hive.timeout(0.2):
                return str(await deploy(3))
        except TimeoutError:
            return "without"

    assert hive.run_sync(impatient, run_id="r") == "without"
    assert hive.escalations() == []
    assert {each.status for each in hive.runs()} <= {"success", "cancelled"}


def test_a_step_that_is_cancelled_withdraws_its_escalation(hive: Hive) -> None:
    @hive.step(escalate=True, max_attempts=1)
    async def deploy() -> None:
        raise OSError("no route")

    @hive.workflow
    async def impatient() -> str:
        try:
            async with hive.timeout(0.2):
                await deploy()
        except TimeoutError:
            pass
        return "without"

    assert hive.run_sync(impatient, run_id="r") == "without"
    assert hive.escalations() == []
    assert hive.runs()[0].status == "success"


def test_a_cancelled_run_withdraws_its_escalation(hive: Hive) -> None:
    async def main() -> None:
        running = asyncio.create_task(hive.run(deployment(hive), 3, run_id="r"))
        await escalated(hive)
        hive.cancel("r", "enough")
        with pytest.raises(RunCancelledError):
            await running

    asyncio.run(main())
    assert hive.escalations() == []
