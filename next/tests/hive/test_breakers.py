"""Breakers of steps: their failures, their names, and that a workflow sees nothing of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from maestro_hive.engine.breaker import NAMESPACE, BreakerState, CircuitState, read_breaker
from maestro_hive.engine.config import (
    ExecutionConfig,
    Level1Config,
    Level2Config,
    RecoveryStrategy,
)
from maestro_hive.engine.errors import CircuitBreakerOpen, RecoverableError
from maestro_hive.hive.hive import Hive
from maestro_hive.journal.entries import AttemptStarted, RunSuspended
from maestro_hive.kernel.errors import ConfigurationError, RunFailedError
from tests.hive.conftest import recorded, store_of
from tests.python_processes import PythonProcess
from tests.stores import SHARED_KINDS, place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(params=SHARED_KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A store that several processes share, of each kind."""
    with place(request.param, tmp_path) as made:
        yield made


THRESHOLD = 5
NUMBERS = itertools.count()


def config(threshold: int = THRESHOLD, **level1: Any) -> ExecutionConfig:
    return ExecutionConfig(
        level1=Level1Config(base_delay_seconds=0, max_attempts=1, **level1),
        level2=Level2Config(
            base_delay_seconds=0, max_attempts=1, circuit_breaker_threshold=threshold
        ),
    )


def breakers(hive: Hive) -> dict[str, tuple[str, int]]:
    found = store_of(hive).documents(NAMESPACE)
    states = {name: read_breaker(data) for name, data in found.items()}
    return {name: (each.state, each.consecutive_failures) for name, each in states.items()}


def set_breaker(hive: Hive, state: BreakerState) -> None:
    store_of(hive).update_document(NAMESPACE, "step/ask", lambda _: msgspec.json.encode(state))


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

        @hive.workflow(name=f"asking-{next(NUMBERS)}")
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


def test_a_users_own_bug_does_not_close_the_folder_for_other_steps(folder: str) -> None:
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


def test_what_the_other_side_did_opens_the_breaker_of_the_step(folder: str) -> None:
    with Hive(folder, config()) as hive:
        one = Calls(hive)
        one.ask(*TROUBLE)
        assert breakers(hive) == {"step/ask": ("open", THRESHOLD)}
        with pytest.raises(CircuitBreakerOpen, match="'step/ask'"):
            one.ask("fine")
        assert one.calls == THRESHOLD


def test_a_bug_neither_opens_nor_resets_what_is_counted(folder: str) -> None:
    with Hive(folder, config(threshold=3)) as hive:
        one = Calls(hive)
        one.ask("connection", "key", "timeout", "value")
        assert breakers(hive) == {"step/ask": ("closed", 2)}
        one.ask("fine")
        assert breakers(hive) == {"step/ask": ("closed", 0)}


def test_a_persona_has_one_breaker_and_a_step_without_one_its_own(folder: str) -> None:
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
    folder: str, name: str
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
    folder: str, breaker_on: Any, counted: str | None, not_counted: str
) -> None:
    with Hive(folder, config()) as hive:
        one = Calls(hive, breaker_on=breaker_on)
        one.ask(not_counted)
        assert breakers(hive) == {}
        if counted is not None:
            one.ask(counted)
            assert breakers(hive) == {"step/ask": ("closed", 1)}


def test_breaker_on_is_asked_about_the_error_of_the_last_attempt(folder: str) -> None:
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

    step: Any = hive.step
    with pytest.raises(ConfigurationError, match="not async"):
        step(breaker_on=later)(breakers)


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
    folder: str, breaker_on: Callable[[BaseException], bool], said: str
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


def test_a_step_that_is_skipped_counts_by_its_error_too(folder: str) -> None:
    with Hive(folder, config(recovery_strategy=RecoveryStrategy.SKIP)) as hive:
        one = Calls(hive)
        one.ask("key")
        assert breakers(hive) == {}
        one.ask("timeout")
        assert breakers(hive) == {"step/ask": ("closed", 1)}


# --- half open ----------------------------------------------------------------------------------


def half_open(hive: Hive) -> None:
    open_for_no_time = BreakerState(state=CircuitState.OPEN, consecutive_failures=1, opened_at=1.0)
    set_breaker(hive, open_for_no_time)


def test_a_probe_that_fails_by_a_bug_lets_the_next_call_be_the_probe(folder: str) -> None:
    with Hive(folder, config(threshold=1)) as hive:
        half_open(hive)
        one = Calls(hive)
        one.ask("key", "value")
        assert breakers(hive) == {"step/ask": ("half_open", 1)}
        assert one.ask("fine") == ["fine"]
        assert breakers(hive) == {"step/ask": ("closed", 0)}


def test_a_probe_that_fails_by_the_other_side_opens_it_again(folder: str) -> None:
    with Hive(folder, config(threshold=1)) as hive:
        half_open(hive)
        one = Calls(hive)
        one.ask("key", "connection")
        assert breakers(hive) == {"step/ask": ("open", 2)}
        with pytest.raises(CircuitBreakerOpen):
            one.ask("fine")


def test_an_open_breaker_changes_nothing_that_the_workflow_sees(folder: str) -> None:
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
        set_breaker(hive, BreakerState())
        undisturbed[2] = "ConnectionRefusedError"
        assert hive.run_sync(work, run_id="r") == undisturbed
        assert one.calls == 4


# --- waiting --------------------------------------------------------------------------------------


def starts(hive: Hive, run_id: str) -> int:
    entries = recorded(hive, run_id)
    return sum(isinstance(each, AttemptStarted) for each in entries)


def test_an_open_breaker_spends_no_attempt_and_says_when_to_come_back(folder: str) -> None:
    with Hive(folder, config(threshold=1)) as hive:
        one = Calls(hive)
        one.ask("timeout")
        for _ in range(3):
            with pytest.raises(CircuitBreakerOpen, match="after 1 failures in a row") as caught:
                hive.run_sync(one.workflow, ["fine"], run_id="r")
            assert 290 < caught.value.cooldown_seconds <= 300
        assert starts(hive, "r") == 0
        set_breaker(hive, BreakerState())
        assert hive.run_sync(one.workflow, ["fine"], run_id="r") == ["fine"]
        assert starts(hive, "r") == 1


def test_a_half_open_breaker_admits_one_probe_and_the_others_wait_for_it(folder: str) -> None:
    with Hive(folder, config(threshold=1)) as hive, Hive(folder, config(threshold=1)) as other:
        half_open(hive)
        active, together = 0, asyncio.Event()

        def make(hive: Hive) -> Any:
            @hive.step
            async def ask(number: int) -> int:
                nonlocal active
                active += 1
                if active > 1:
                    together.set()
                first = True
                for _ in range(20):
                    await asyncio.sleep(0)
                    first = breakers(hive)["step/ask"][0] == "half_open"
                    assert not first or active == 1
                if not first:  # closed, the calls are at once
                    async with asyncio.timeout(30):
                        await together.wait()
                active -= 1
                return number

            @hive.workflow
            async def work() -> list[int]:
                return list(await asyncio.gather(*map(ask, range(5))))

            return work

        async def main() -> list[list[int]]:
            runs = (each.run(make(each)) for each in (hive, other))
            return list(await asyncio.gather(*runs))

        assert asyncio.run(main()) == [[0, 1, 2, 3, 4]] * 2
        assert breakers(hive) == {"step/ask": ("closed", 0)}


def test_a_run_of_workers_is_woken_when_the_cooldown_is_over(folder: str) -> None:
    waits = config(threshold=1)
    waits.level2.circuit_breaker_cooldown_seconds = 0.3
    with Hive(folder, waits) as hive:
        one = Calls(hive)

        async def main() -> Any:
            with contextlib.suppress(Exception):
                await hive.run(one.workflow, ["timeout"])
            run = hive.enqueue(one.workflow, ["fine"], run_id="r")
            async with hive.worker():
                return await run.result()

        assert asyncio.run(main()) == ["fine"]
        (suspended,) = (each for each in recorded(hive) if isinstance(each, RunSuspended))
        assert suspended.reason == "breaker"
        assert starts(hive, "r") == 1


_PROBE = """
import asyncio, sys
from maestro_hive.engine.config import ExecutionConfig, Level2Config
from maestro_hive.hive.hive import Hive

hive = Hive(sys.argv[1], ExecutionConfig(level2=Level2Config(circuit_breaker_threshold=1)))

@hive.step
async def ask(name):
    print("probing", flush=True)
    await asyncio.sleep(60)

@hive.workflow
async def work():
    await ask("x")

hive.run_sync(work)
"""


def test_a_probe_whose_process_died_is_followed_by_another_one(folder: str) -> None:
    with Hive(folder, config(threshold=1)) as hive:
        one = Calls(hive)
        half_open(hive)
        process = PythonProcess(_PROBE, folder)
        try:
            assert process.line() == "probing"
            assert breakers(hive) == {"step/ask": ("half_open", 1)}
        finally:
            process.kill()
            process.communicate()
        assert one.ask("fine") == ["fine"]
        assert breakers(hive) == {"step/ask": ("closed", 0)}
