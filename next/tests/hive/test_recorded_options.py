"""The options that a step was executed with are recorded, and are not part of its identity."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.attempt import current
from maestro_hive.engine.config import ExecutionConfig, Level1Config, RecoveryStrategy
from maestro_hive.hive.hive import Hive
from maestro_hive.journal.entries import AttemptStarted, StepClosed
from maestro_hive.kernel.errors import ConfigurationError, RunFailedError
from tests.hive.conftest import quick_config, recorded

if TYPE_CHECKING:
    from pathlib import Path


def build(folder: Path, calls: list[str], **options: Any) -> Any:
    with Hive(folder, quick_config()) as hive:

        @hive.step(**options)
        async def implement(part: str) -> str:
            calls.append(part)
            return part.upper()

        @hive.workflow
        async def work() -> list[str]:
            return [await implement("a"), await implement("a")]

        return hive.run_sync(work, run_id="run-1")


def started(folder: Path) -> list[AttemptStarted]:
    with Hive(folder) as hive:
        entries = recorded(hive, "run-1")
    return [each for each in entries if isinstance(each, AttemptStarted)]


def test_options_that_were_given_are_recorded_with_each_attempt(folder: Path) -> None:
    build(folder, [], max_attempts=5, timeout=120.5, on_ambiguous="rerun", rate="1000/s")
    assert [each.options for each in started(folder)] == [{"max_attempts": 5, "timeout": 120.5}] * 2


def test_a_step_without_options_records_none(folder: Path) -> None:
    build(folder, [])
    assert [each.options for each in started(folder)] == [{}, {}]


def test_a_completed_step_does_not_run_again_when_its_options_change(folder: Path) -> None:
    calls: list[str] = []
    assert build(folder, calls) == build(folder, calls, max_attempts=7, timeout=3) == ["A", "A"]
    assert calls == ["a", "a"]


# --- what is stored -------------------------------------------------------------------------------


def contents(folder: Path) -> bytes:
    return b"".join(each.read_bytes() for each in folder.rglob("*") if each.is_file())


def test_an_input_that_is_not_stored_is_still_the_steps_identity(folder: Path) -> None:
    calls: list[str] = []
    for _ in range(2):
        with Hive(folder, quick_config()) as hive:

            @hive.step(store_input=False)
            async def read(text: str) -> int:
                calls.append(text)
                return len(text)

            @hive.workflow
            async def work() -> list[int]:
                return [await read("a long document"), await read("another")]

            assert hive.run_sync(work, run_id="r") == [15, 7]
    assert calls == ["a long document", "another"]
    assert b"a long document" not in contents(folder)


def test_arguments_that_are_redacted_are_stored_nowhere_and_count_as_identity(
    folder: Path,
) -> None:
    with Hive(folder, quick_config()) as hive:

        @hive.step(redact=("token",), max_attempts=1)
        async def login(user: str, token: str) -> str:
            if user == "eve":
                raise ValueError(f"{token} is no token of {user}")
            return f"{user}:{len(token)}"

        @hive.workflow
        async def work() -> list[str]:
            return [await login("ann", "tok-one-4711"), await login("ann", "tok-two-471100")]

        @hive.workflow
        async def wrong() -> str:
            return await login("eve", f"tok-bad-{815:04}")

        assert hive.run_sync(work) == ["ann:12", "ann:14"]
        with pytest.raises(RunFailedError, match=r"\[redacted\] is no token of eve"):
            hive.run_sync(wrong)
    stored = contents(folder)
    assert b"ann" in stored
    for secret in (b"tok-one-4711", b"tok-two-471100", b"tok-bad-0815"):
        assert secret not in stored


# --- results --------------------------------------------------------------------------------------


def results(hive: Hive, *answers: Any, **options: Any) -> tuple[Any, list[list[str]]]:
    """Return what a step returned that answers like this, and the feedback of each of its calls."""
    feedback: list[list[str]] = []

    @hive.step(**options)
    async def ask() -> Any:
        feedback.append(current().feedback)
        return answers[min(len(feedback), len(answers)) - 1]

    @hive.workflow
    async def work() -> Any:
        return await ask()

    return hive.run_sync(work), feedback


def test_a_result_of_another_type_fails_the_attempt_and_is_fed_back(hive: Hive) -> None:
    answer, feedback = results(hive, ["a", 1], [1, 2], returns=list[int])
    assert answer == [1, 2]
    wanted = "the result is not list[int]: result[0]: must be a int, and is a str"
    assert wanted in feedback[1][0]


def test_a_result_is_checked_by_a_json_schema(hive: Hive) -> None:
    schema = {"type": "object", "required": ["score"]}
    answer, feedback = results(hive, {}, {"score": 1}, returns=schema)
    assert answer == {"score": 1}
    assert "'score' is a required property" in feedback[1][0]


def test_a_step_that_asks_must_return_source(hive: Hive) -> None:
    answer, feedback = results(hive, "def f(:", "import duties rose", "x = 1\n", check_source=True)
    assert answer == "x = 1\n"
    assert all("SYNTAX: the result must be Python source" in each for each in feedback[2])


def test_a_step_that_never_returns_source_fails(hive: Hive) -> None:
    with pytest.raises(RunFailedError, match="RecoverableError: the result must be Python source"):
        results(hive, "def f(:", check_source=True, max_attempts=2)


def test_a_step_of_a_hive_is_not_checked_unless_it_asks(hive: Hive) -> None:
    assert results(hive, "def f(:") == ("def f(:", [[]])


def test_a_step_that_is_skipped_gives_none_and_its_error_is_recorded(folder: Path) -> None:
    level1 = Level1Config(base_delay_seconds=0, recovery_strategy=RecoveryStrategy.SKIP)
    with Hive(folder, ExecutionConfig(level1=level1)) as hive:

        @hive.step(max_attempts=2)
        async def fail() -> str:
            raise ValueError("no")

        @hive.workflow
        async def work() -> Any:
            return [await fail()]

        for _ in range(2):
            assert hive.run_sync(work, run_id="r") == [None]
        entries = recorded(hive, "r")
        (closed,) = (each for each in entries if isinstance(each, StepClosed))
        assert closed.how == "skipped"
        assert b"no" in bytes(closed.error)  # type: ignore[arg-type]


# --- what cannot be used --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option, value",
    [
        ("persona", 5),
        ("name", 3),
        ("key", ""),
        ("ignore", "client"),
        ("max_attempts", 0),
        ("max_interruptions", -1),
        ("rounds", 1.5),
        ("timeout", 0),
        ("retry_on", "ValueError"),
        ("breaker", ""),
        ("breaker_on", 5),
        ("max_concurrency", True),
        ("on_ambiguous", "maybe"),
        ("store_input", "no"),
        ("store_streams", 1),
        ("check_source", "yes"),
        ("redact", "token"),
        ("returns", False),
    ],
)
def test_a_wrong_value_is_refused_where_the_step_is_made(
    hive: Hive, option: str, value: object
) -> None:
    step: Any = hive.step
    with pytest.raises(ConfigurationError, match=rf"{option} is {value!r}, and must be"):
        step(**{option: value})(contents)


@pytest.mark.parametrize(
    "option, way_out",
    [
        ("max_atempts", "did you mean 'max_attempts'?"),
        ("colour", "options: persona, name, key, ignore, max_attempts"),
        *((each, "") for each in ("escalate", "healing", "budget", "max_tokens", "max_usd")),
        ("model", ""),
    ],
)
def test_what_is_no_option_is_a_type_error_with_the_way_out(
    hive: Hive, option: str, way_out: str
) -> None:
    step: Any = hive.step
    with pytest.raises(
        TypeError, match=f"step 'contents': there is no option '{option}'"
    ) as caught:
        step(**{option: 1})(contents)
    assert way_out in str(caught.value)
