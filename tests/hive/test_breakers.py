"""What the breaker of a hive's step counts, whose breaker it is, and that the workflow sees nothing."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import ExecutionConfig, Hive, RunFailedError
from maestro_hive.admin.breakers import list_breakers, reset_breaker
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.unified_execution import (
    CircuitBreaker,
    CircuitBreakerOpen,
    Level1Config,
    Level2Config,
    RecoverableError,
    RecoveryStrategy,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

THRESHOLD = 5


def config(threshold: int = THRESHOLD, **level1: Any) -> ExecutionConfig:
    return ExecutionConfig(
        level1=Level1Config(base_delay_seconds=0, max_attempts=1, **level1),
        level2=Level2Config(
            base_delay_seconds=0, max_attempts=1, circuit_breaker_threshold=threshold
        ),
    )


def breakers(hive: Hive) -> dict[str, tuple[str, int]]:
    found = list_breakers(hive._open())
    return {each.name: (each.state, each.consecutive_failures) for each in found}


class Calls:
    """A hive whose steps raise what they are told."""

    def __init__(self, hive: Hive, **options: Any) -> None:
        self.hive = hive
        self.calls = 0

        @hive.step(**options)
        async def ask(error: str) -> str:
            self.calls += 1
            if error in ERRORS:
                raise ERRORS[error]
            return error

        @hive.workflow(name=f"asking-{len(hive._workflows)}")
        async def asking(errors: list[str]) -> list[str]:
            answers = await asyncio.gather(*map(ask, errors), return_exceptions=True)
            return [each if isinstance(each, str) else type(each).__name__ for each in answers]

        self.workflow = asking

    def ask(self, *errors: str) -> list[str]:
        """Run a workflow that calls the step once for each error, in turn."""
        return [self.hive.run_sync(self.workflow, [each])[0] for each in errors]


class BusyError(Exception):
    status_code = 503


ERRORS: dict[str, Exception] = {
    "key": KeyError("colour"),
    "type": TypeError("not a number"),
    "value": ValueError("not a date"),
    "assertion": AssertionError("3 != 4"),
    "connection": ConnectionRefusedError("refused"),
    "timeout": TimeoutError("late"),
    "busy": BusyError("try later"),
    "limited": RecoverableError("slow down", error_category="RATE_LIMIT"),
}
BUGS = ["key", "type", "value", "assertion", "key"]
TROUBLE = ["connection", "timeout", "busy", "limited", "connection"]


def test_a_users_own_bug_does_not_close_the_folder_for_other_steps(folder: Path) -> None:
    with Hive(folder, config()) as hive:

        @hive.step
        async def colour_of(row: dict[str, str]) -> str:
            return row["colour"]

        @hive.step
        async def greet() -> str:
            return "hello"

        @hive.workflow
        async def broken() -> str:
            return await colour_of({})

        @hive.workflow
        async def sound() -> str:
            return await greet()

        for _ in range(2 * THRESHOLD):
            with pytest.raises(RunFailedError):
                hive.run_sync(broken)
        assert hive.run_sync(sound) == "hello"
        assert breakers(hive) == {}


def test_what_the_other_side_did_opens_the_breaker_of_the_step(folder: Path) -> None:
    with Hive(folder, config()) as hive:
        one = Calls(hive)
        one.ask(*TROUBLE)
        assert breakers(hive) == {"step/ask": ("open", THRESHOLD)}
        with pytest.raises(CircuitBreakerOpen, match="'step/ask'"):
            one.ask("fine")
        assert one.calls == THRESHOLD


def test_a_bug_neither_opens_nor_resets_what_is_counted(folder: Path) -> None:
    with Hive(folder, config(threshold=3)) as hive:
        one = Calls(hive)
        one.ask("connection", "key", "timeout", "value")
        assert breakers(hive) == {"step/ask": ("closed", 2)}
        one.ask("fine")
        assert breakers(hive) == {"step/ask": ("closed", 0)}


def test_a_persona_has_one_breaker_and_a_step_without_one_its_own(folder: Path) -> None:
    with Hive(folder, config(threshold=1)) as hive:
        Calls(hive).ask("timeout")
        Calls(hive, name="draw", persona="painter").ask("timeout")
        Calls(hive, name="look", breaker="museum").ask("timeout")
        assert sorted(breakers(hive)) == ["museum", "painter", "step/ask"]
        other = Calls(hive, name="paint", persona="painter")
        with pytest.raises(CircuitBreakerOpen, match="'painter'"):
            other.ask("fine")
        assert Calls(hive, name="carve").ask("fine") == ["fine"]


@pytest.mark.parametrize("name", ["a" * 400, "line\nbreak", "tab\there", "half \x00"])
def test_a_step_that_a_breaker_cannot_be_called_by_has_one_all_the_same(
    folder: Path, name: str
) -> None:
    with Hive(folder, config(threshold=1)) as hive:
        Calls(hive, name=name).ask("timeout")
        Calls(hive, name=f"{name}2").ask("timeout")
        assert len(breakers(hive)) == 2
        assert all(each.isprintable() and len(each) <= 200 for each in breakers(hive))


# --- breaker_on ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "breaker_on, counted, not_counted",
    [
        (KeyError, "key", "timeout"),
        ((KeyError, ValueError), "value", "timeout"),
        ([KeyError], "key", "timeout"),
        (KeyError | ValueError, "key", "connection"),
        ((), None, "timeout"),
        (lambda error: "late" in str(error), "timeout", "connection"),
        (lambda error: isinstance(error, LookupError), "key", "busy"),
    ],
)
def test_breaker_on_decides_what_counts(
    folder: Path, breaker_on: Any, counted: str | None, not_counted: str
) -> None:
    with Hive(folder, config()) as hive:
        one = Calls(hive, breaker_on=breaker_on)
        one.ask(not_counted)
        assert breakers(hive) == {}
        if counted is not None:
            one.ask(counted)
            assert breakers(hive) == {"step/ask": ("closed", 1)}


def test_breaker_on_is_asked_about_the_error_of_the_last_attempt(folder: Path) -> None:
    asked: list[str] = []

    def decide(error: BaseException) -> bool:
        asked.append(str(error))
        return True

    with Hive(folder, config()) as hive:

        @hive.step(max_attempts=6, rounds=2, breaker_on=decide)
        async def fail(seen: list[int]) -> None:
            calls.append(1)
            raise TimeoutError(len(calls))

        @hive.workflow
        async def work() -> None:
            await fail([])

        calls: list[int] = []
        with pytest.raises(RunFailedError):
            hive.run_sync(work)
        assert asked == ["3", "6"]
        assert breakers(hive) == {"step/fail": ("closed", 2)}


@pytest.mark.parametrize("value", [5, "KeyError", int, [int], (KeyError, 5)])
def test_what_cannot_decide_is_refused_where_the_step_is_made(hive: Hive, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"breaker_on is .* must be a type of errors"):
        hive.step(breaker_on=value)(breakers)


def test_an_async_function_cannot_decide(hive: Hive) -> None:
    async def later(error: BaseException) -> bool:
        return True

    with pytest.raises(ConfigurationError, match="not async"):
        hive.step(breaker_on=later)(breakers)  # type: ignore[arg-type]


def attribute_missing(error: Any) -> bool:
    return bool(error.status >= 500)


@pytest.mark.parametrize(
    "breaker_on, said",
    [
        (attribute_missing, "breaker_on failed: AttributeError: .*'status'"),
        (lambda error: "yes", "breaker_on failed: TypeError: .* returned 'yes' for a TimeoutError"),
    ],
)
def test_a_function_that_fails_is_named_in_the_error_and_changes_nothing(
    folder: Path, breaker_on: Callable[[BaseException], bool], said: str
) -> None:
    with Hive(folder, config()) as hive:
        one = Calls(hive, breaker_on=breaker_on)
        one.ask("timeout")
        assert breakers(hive) == {"step/ask": ("closed", 1)}  # as it would be without it

        @hive.step(breaker_on=breaker_on)
        async def fail() -> None:
            raise TimeoutError("late")

        @hive.workflow
        async def work() -> None:
            await fail()

        for _ in range(2):  # the first life, and what is recorded
            with pytest.raises(RunFailedError) as caught:
                hive.run_sync(work, run_id="r")
            cause = caught.value.__cause__
            assert isinstance(cause, TimeoutError)
            assert re.search(said, "\n".join(cause.__notes__), re.DOTALL)


def test_a_step_that_is_skipped_counts_by_its_error_too(folder: Path) -> None:
    with Hive(folder, config(recovery_strategy=RecoveryStrategy.SKIP)) as hive:
        one = Calls(hive)
        one.ask("key")
        assert breakers(hive) == {}
        one.ask("timeout")
        assert breakers(hive) == {"step/ask": ("closed", 1)}


# --- half open ----------------------------------------------------------------------------------


def half_open(hive: Hive) -> None:
    CircuitBreaker(1, 0, name="step/ask", store=hive._open()).record_failure()


def test_a_probe_that_fails_by_a_bug_lets_the_next_call_be_the_probe(folder: Path) -> None:
    with Hive(folder, config(threshold=1)) as hive:
        half_open(hive)
        one = Calls(hive)
        one.ask("key", "value")
        assert breakers(hive) == {"step/ask": ("half_open", 1)}
        assert one.ask("fine") == ["fine"]
        assert breakers(hive) == {"step/ask": ("closed", 0)}


def test_a_probe_that_fails_by_the_other_side_opens_it_again(folder: Path) -> None:
    with Hive(folder, config(threshold=1)) as hive:
        half_open(hive)
        one = Calls(hive)
        one.ask("key", "connection")
        assert breakers(hive) == {"step/ask": ("open", 2)}
        with pytest.raises(CircuitBreakerOpen):
            one.ask("fine")


def test_an_open_breaker_changes_nothing_that_the_workflow_sees(folder: Path) -> None:
    """The breaker opens in the middle of a run: when it is closed, the run goes on as if never."""
    with Hive(folder, config(threshold=2)) as hive:
        one = Calls(hive)
        undisturbed = ["TimeoutError", "KeyError", "TimeoutError", "fine"]

        @hive.workflow
        async def work() -> list[str]:
            found = []
            for each in ("timeout", "key", "connection", "fine"):
                found += await one.workflow([each])
            return found

        with pytest.raises(CircuitBreakerOpen):
            hive.run_sync(work, run_id="r")
        reset_breaker(hive._open(), "step/ask")
        undisturbed[2] = "ConnectionRefusedError"
        assert hive.run_sync(work, run_id="r") == undisturbed
        assert one.calls == 4
