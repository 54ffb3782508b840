"""Each healer that ships: its persona fails again unless it is told the repair."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import ExecutionConfig, Hive, PersonaExecutor
from maestro_hive.engine.healing.healers import DEFAULT_HEALERS, name_of, told_wait
from maestro_hive.hive.errors import RunFailedError
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.testing import use
from maestro_hive.unified_execution import Level1Config, Level2Config, UnrecoverableError
from tests.healing.scripted import SCENARIOS, Persona, Scenario
from tests.tables import for_each
from tests.unified_execution.restarts import (
    Restarts,
    any_restarts,  # noqa: F401 - a fixture
    execute,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from maestro_hive.testing import Kit

every_scenario = pytest.mark.parametrize("scenario", SCENARIOS, ids=str)


def test_every_healer_that_ships_has_a_scenario() -> None:
    assert {each.healer for each in SCENARIOS} == {name_of(each) for each in DEFAULT_HEALERS}


def config(**level1: Any) -> ExecutionConfig:
    return ExecutionConfig(
        level1=Level1Config(jitter=0, **level1),
        level2=Level2Config(max_attempts=1, circuit_breaker_threshold=1000),
    )


class Program:
    """A hive in memory with one step, made of a scripted persona, and a workflow that calls it."""

    def __init__(self, scenario: Scenario, config: ExecutionConfig, **options: Any) -> None:
        self.hive = Hive("never-made", config)
        self.scenario = scenario
        self.persona = Persona(lambda: 0.0)
        body = getattr(Persona, scenario.body)

        def work() -> Any:
            return body(self.persona)

        work.__annotations__ = {"return": body.__annotations__["return"]}
        work.__globals__["Any"] = Any
        self.step = self.hive.step(name="work", **{**scenario.options, **options})(work)

        @self.hive.workflow
        async def flow() -> Any:
            return await self.step()

        self.flow = flow

    def run(self, kit: Kit, run_id: str) -> int:
        """Run the workflow, and return how often the persona was called."""
        self.persona.calls, self.persona.started = 0, None
        self.persona.now = lambda: kit.clock.now().timestamp()
        kit.run(self.flow, run_id=run_id)
        return self.persona.calls


@pytest.fixture
def used() -> Iterator[Callable[[Program], Kit]]:
    made = []

    def start(program: Program) -> Kit:
        made.append(use(program.hive))
        return made[-1].__enter__()

    yield start
    for each in made:
        each.__exit__(None, None, None)


@every_scenario
def test_a_step_of_a_hive_is_healed(scenario: Scenario, used: Callable[[Program], Kit]) -> None:
    program = Program(scenario, config())
    assert program.run(used(program), "r") == 2


@every_scenario
@pytest.mark.parametrize(
    "switch", ["option", "all by option", "setting", "all by setting", "strategy"]
)
def test_without_its_healer_the_same_step_fails(
    scenario: Scenario, switch: str, used: Callable[[Program], Kit]
) -> None:
    level1: dict[str, Any] = {}
    options: dict[str, Any] = {}
    match switch:
        case "option":
            options["disabled_healers"] = (scenario.healer,)
        case "all by option":
            options["healing"] = False
        case "setting":
            level1["disabled_healers"] = (scenario.healer,)
        case "all by setting":
            level1["enable_self_healing"] = False
        case _:
            level1["recovery_strategy"] = "retry_with_backoff"
    program = Program(scenario, config(**level1), **options)
    with pytest.raises(RunFailedError):
        program.run(used(program), "r")
    assert program.persona.calls == 3


@every_scenario
def test_a_second_run_uses_the_proven_repair_first(
    scenario: Scenario, used: Callable[[Program], Kit]
) -> None:
    """In one attempt less: what did not help in the first run is not tried again."""
    program = Program(scenario, config())

    @program.hive.healer(Exception)
    def useless() -> str:
        return "try harder"

    kit = used(program)
    assert program.run(kit, "first") == 3
    assert program.run(kit, "second") == 2


@every_scenario
@pytest.mark.parametrize("durable", [True, False], ids=["durable", "in memory"])
def test_a_task_of_an_executor_is_healed_unless_that_is_switched_off(
    scenario: Scenario, durable: bool, restarts: Restarts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "maestro_hive.unified_execution.persona_executor.SystemClock", lambda: restarts.clock
    )

    def executed(**options: Any) -> int:
        persona = Persona(restarts.clock.boot_seconds)
        name = "with" if not options else "without"
        executor = (
            restarts.executor(workflow_id=name)
            if durable
            else PersonaExecutor(restarts.config, "developer")
        )
        task = getattr(persona, scenario.body)
        execute(executor.options(**scenario.options, **options), task, "work")
        return persona.calls

    assert executed() == 2
    with pytest.raises(UnrecoverableError):
        executed(disabled_healers=(scenario.healer,))


def test_a_healer_that_does_not_exist_cannot_be_disabled(
    used: Callable[[Program], Kit],
) -> None:
    program = Program(SCENARIOS[0], config(), disabled_healers=("sintax",))
    with pytest.raises(Exception, match=r"disabled_healers.*'sintax'.*syntax, test_failure"):
        program.run(used(program), "r")


def test_one_that_does_not_exist_is_refused_before_a_run_is_recorded(tmp_path: Path) -> None:
    everywhere = Hive(tmp_path / "a", config(disabled_healers=("mine", "sintax")))
    in_a_step = Hive(tmp_path / "b", config(disabled_healers=("mine",)))
    for hive in (everywhere, in_a_step):
        hive.healer(ValueError, name="mine")(lambda: None)

        @hive.workflow
        async def flow() -> None: ...

        if hive is in_a_step:
            hive.step(name="never_called", disabled_healers=("sintax",))(lambda: None)
        said = "the option " if hive is in_a_step else r"Level1Config\."
        with hive:
            for use_it in (hive.run_sync, hive.worker):
                given = (flow,) if use_it == hive.run_sync else ()
                with pytest.raises(ConfigurationError, match=f"{said}disabled_healers.*'sintax'"):
                    use_it(*given)
            assert hive.runs() == []


# --- details ---------------------------------------------------------------------------------------


@for_each(
    "message, seconds",
    [
        ("Please try again in 20s.", 20),
        ("try again in 1m20s", 80),
        ("Please try again in 350ms", 0.35),
        ("retry after 30 seconds", 30),
        ("Retry-After: 7 s", 7),
        ("please wait 2 minutes and 5 seconds", 125),
        ("quota resets in 1 hour", 3600),
        ("Rate limit reached", None),
        ("try again in 0s", None),
        ("try again in 900 days", None),
        ("retry 3 of 5 failed after 20 s", None),
    ],
)
def test_the_wait_is_read_from_a_message(message: str, seconds: float | None) -> None:
    assert told_wait(message) == (None if seconds is None else pytest.approx(seconds))


def test_a_wait_as_told_that_is_longer_than_the_step_may_take_is_not_waited(
    restarts: Restarts,
) -> None:
    persona = Persona(restarts.clock.boot_seconds)
    executor = restarts.executor().options(max_elapsed_seconds=60)
    with pytest.raises(UnrecoverableError) as caught:
        execute(executor, persona.rate_limit, "work")
    assert caught.value.result is not None
    first = caught.value.result.attempts[0]
    assert "exceeds the limit of 60 s" in first.metrics["healing_error"]


def test_output_of_pytest_as_an_error_tells_the_failing_assertion(restarts: Restarts) -> None:
    output = (
        "=================== FAILURES ===================\n"
        "___________________ test_sum ___________________\n"
        "\n"
        "    def test_sum():\n"
        ">       assert add(1, 2) == 4\n"
        "E       assert 3 == 4\n"
        "\n"
        "tests/test_sum.py:7: AssertionError\n"
        "=========== short test summary info ============\n"
        "FAILED tests/test_sum.py::test_sum - assert 3 == 4\n"
    )
    told: list[list[str]] = []

    def work() -> str:
        from maestro_hive import current
        from maestro_hive.unified_execution import RecoverableError

        told.append(list(current().feedback))
        if len(told) == 1:
            raise RecoverableError(output, "TEST_FAILURE")
        return "done"

    execute(restarts.executor(), work, "work")
    said = "The test tests/test_sum.py::test_sum failed in line 7 of tests/test_sum.py"
    assert said in told[1][0]
    assert "assert 3 == 4" in told[1][0]


def test_nothing_is_recorded_of_failures_that_no_healer_is_for() -> None:
    hive = Hive("never-made", config())

    @hive.step(max_attempts=2)
    async def fail() -> None:
        raise ValueError("no")

    @hive.workflow
    async def flow() -> None:
        await fail()

    with use(hive) as kit:
        with pytest.raises(RunFailedError):
            kit.run(flow, run_id="r")

        async def events() -> list[str]:
            return [type(each).__name__ async for each in hive.events("r", follow=False)]

        assert "RepairTried" not in asyncio.run(events())
