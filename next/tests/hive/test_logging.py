"""What is logged of runs and steps, and the filter that names them in a user's own log lines."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import logging.config
import threading
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.config import ExecutionConfig, Level1Config, Level2Config
from maestro_hive.hive.hive import Hive
from maestro_hive.hive.run_log import RunContextFilter
from maestro_hive.journal.entries import AttemptStarted
from maestro_hive.kernel.errors import MaestroError, RunFailedError
from tests.hive.conftest import quick_config
from tests.python_processes import run_python

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOGGER = logging.getLogger("tests.hive.own")


class Records(logging.Handler):
    """Collects what the package and this file log, and not what asyncio says of an earlier test."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith(("maestro_hive.", LOGGER.name)):
            self.records.append(record)

    def lines(self, least: int = logging.INFO) -> list[str]:
        return [
            f"{each.levelname} {each.getMessage()}"
            for each in self.records
            if each.levelno >= least and each.name.startswith("maestro_hive.")
        ]

    def places(self) -> list[tuple[str, Any, Any, Any]]:
        return [(each.getMessage(), *place_of(each)) for each in self.records]

    def own(self) -> list[tuple[str, Any, Any, Any]]:
        return [each for each in self.places() if each[0].startswith("in ")]


def place_of(record: Any) -> tuple[Any, Any, Any]:
    return record.run_id, record.step, record.attempt


@pytest.fixture
def logged() -> Iterator[Records]:
    """Collect what is logged from the level INFO on."""
    handler, root = Records(), logging.getLogger()
    level = root.level
    root.handlers.insert(0, handler)  # before those that other tests, or pytest, may have left
    root.setLevel(logging.INFO)
    yield handler
    root.setLevel(level)
    root.removeHandler(handler)


def config(**level1: Any) -> ExecutionConfig:
    return ExecutionConfig(
        level1=Level1Config(**level1),
        level2=Level2Config(max_attempts=1),
    )


# --- runs ---


def test_a_run_is_logged_when_it_starts_completes_and_is_resumed(
    hive: Hive, logged: Records
) -> None:
    has_to_stop, started = [True], asyncio.Event()

    @hive.step
    async def once() -> str:
        if has_to_stop:
            started.set()
            await asyncio.sleep(60)
        return "done"

    @hive.workflow
    async def work() -> str:
        return await once()

    async def main() -> None:
        running = asyncio.create_task(hive.run(work, run_id="r"))
        await started.wait()
        running.cancel()
        await asyncio.wait({running})
        has_to_stop.clear()
        await hive.run(work, run_id="r")
        await hive.run(work, run_id="r")  # it has ended: nothing is executed

    asyncio.run(main())
    assert logged.lines() == [
        "INFO run r (work) started",
        "INFO run r is suspended: it was stopped politely",
        "INFO run r (work) is resumed",
        "INFO run r completed",
    ]
    assert {place_of(each) for each in logged.records} == {("r", None, None)}
    assert {each.name for each in logged.records} == {"maestro_hive.runs"}


def test_a_failed_run_is_an_error_with_its_type_and_traceback(hive: Hive, logged: Records) -> None:
    @hive.step(max_attempts=1, rounds=1)
    async def look_up(name: str) -> str:
        return {"a": "x"}[name]

    @hive.workflow
    async def work() -> str:
        return await look_up("b")

    with pytest.raises(RunFailedError):
        hive.run_sync(work, run_id="r")
    *_, failed = logged.records
    assert failed.levelno == logging.ERROR
    assert failed.getMessage() == "run r failed: KeyError: 'b'"
    assert isinstance(failed.exc_info, tuple)
    assert isinstance(failed.exc_info[1], KeyError)


def test_a_cancelled_run_is_logged_with_the_reason(hive: Hive, logged: Records) -> None:
    started = asyncio.Event()

    @hive.workflow
    async def work() -> None:
        started.set()
        await hive.sleep(60)

    async def main() -> None:
        running = asyncio.create_task(hive.run(work, run_id="r"))
        await started.wait()
        hive.cancel("r", "enough")
        await asyncio.wait({running})
        assert running.exception() is not None

    asyncio.run(main())
    assert logged.lines()[-1] == "INFO run r was cancelled: enough"


# --- attempts ---


def test_a_failed_attempt_is_a_warning_with_the_wait_and_the_type_of_its_error(
    folder: Path, logged: Records
) -> None:
    with Hive(folder, config(max_attempts=2)) as hive:

        @hive.step(retry_on=lambda _: 0.01)
        async def look_up(name: str) -> str:
            return {"a": "x"}[name]

        @hive.workflow
        async def work() -> str:
            return await look_up("b")

        with pytest.raises(RunFailedError):
            hive.run_sync(work, run_id="r")
    first = "WARNING step look_up of run r: attempt 1 failed: KeyError: 'b'"
    over = "this round is over: 2 of 2 attempts have failed"
    assert logged.lines(logging.WARNING) == [
        f"{first}; the next one starts in 0.01 s",
        f"WARNING step look_up of run r: attempt 2 failed: KeyError: 'b'; {over}",
        "ERROR run r failed: KeyError: 'b'",
    ]
    attempts = [each for each in logged.records if each.levelno == logging.WARNING]
    assert [place_of(each) for each in attempts] == [("r", "look_up", 1), ("r", "look_up", 2)]
    assert {each.name for each in attempts} == {"maestro_hive.steps"}


def test_a_failed_round_is_a_warning_with_the_wait(folder: Path, logged: Records) -> None:
    rounds = ExecutionConfig(
        level1=Level1Config(max_attempts=1),
        level2=Level2Config(max_attempts=2),
    )
    with Hive(folder, rounds) as hive:

        @hive.step(retry_on=lambda _: 0.01)
        async def call() -> None:
            raise ValueError("two\nlines " + "x" * 1000)

        @hive.workflow
        async def work() -> None:
            await call()

        with pytest.raises(RunFailedError):
            hive.run_sync(work, run_id="r")
    lines = [line for line in logged.lines() if "round" in line and "attempt" not in line]
    assert lines == [
        "WARNING step call of run r: round 1 of 2 failed; the next one starts in 0.01 s",
        "WARNING step call of run r: round 2 of 2 failed; it has failed for good",
    ]
    assert all("\n" not in line and len(line) < 700 for line in logged.lines())


@pytest.mark.parametrize("level, least", [("DEBUG", 10), ("INFO", 20), ("ERROR", 40)])
def test_the_log_level_of_the_configuration_holds_for_runs_too(
    folder: Path, logged: Records, level: str, least: int
) -> None:
    made = config(max_attempts=2)
    made.log_level = level
    logging.getLogger().setLevel(logging.DEBUG)
    with Hive(folder, made) as hive:

        @hive.step(retry_on=lambda _: 0.01)
        async def fail() -> None:
            raise ValueError("no")

        @hive.workflow
        async def work() -> None:
            await fail()

        with pytest.raises(RunFailedError):
            hive.run_sync(work, run_id="r")
    found = {each.levelno for each in logged.records if each.name.startswith("maestro_hive.")}
    assert found == {each for each in (10, 20, 30, 40) if each >= least}


def test_debugging_shows_each_attempt(folder: Path, logged: Records) -> None:
    made = quick_config()
    made.log_level = "DEBUG"
    logging.getLogger().setLevel(logging.DEBUG)
    with Hive(folder, made) as hive:

        @hive.step
        async def one() -> int:
            return 1

        @hive.workflow
        async def work() -> int:
            return await one()

        hive.run_sync(work, run_id="r")
    assert [line for line in logged.lines(logging.DEBUG) if line.startswith("DEBUG step")] == [
        "DEBUG step one of run r: attempt 1 starts",
        "DEBUG step one of run r: attempt 1 completed the step",
    ]


# --- nothing is configured ---


_FAILING = """
import logging, sys
from maestro_hive.engine.config import ExecutionConfig, Level1Config, Level2Config
from maestro_hive.hive.hive import Hive

level1 = Level1Config(base_delay_seconds=0, max_attempts=2)
hive = Hive(sys.argv[1], ExecutionConfig(level1=level1, level2=Level2Config(max_attempts=1)))
calls = []

@hive.step
async def flaky():
    calls.append(1)
    if len(calls) < 2:
        raise ValueError("no")
    return "done"

@hive.workflow
async def work():
    return await flaky()

print(hive.run_sync(work, run_id="r"))
own = logging.getLogger(), logging.getLogger("maestro_hive")
print([(each.handlers, each.level, each.propagate) for each in own])
"""


def test_a_program_without_logging_prints_nothing_and_gets_no_handler(tmp_path: Path) -> None:
    done = run_python(_FAILING, tmp_path / "state", check=True)
    assert done.stdout == "done\n[([], 30, True), ([], 0, True)]\n"
    assert done.stderr == ""


# --- the filter ---


def test_log_lines_tell_equal_steps_apart_as_events_do(hive: Hive, logged: Records) -> None:
    logged.addFilter(RunContextFilter())

    @hive.step(max_attempts=2, rounds=2)
    def look_up(item: str) -> str:
        LOGGER.info("in %s", item)
        if item == "c":
            raise ValueError("no c")
        return item

    @hive.workflow
    async def work() -> None:
        await asyncio.gather(*map(look_up, "abc"), return_exceptions=True)

    hive.run_sync(work, run_id="r")

    async def events() -> list[str]:
        return [e.label async for e in hive.events("r") if isinstance(e.entry, AttemptStarted)]

    assert asyncio.run(events()) == ["look_up", "look_up#2", "look_up#3", "look_up#3"]
    assert sorted(logged.own()) == [
        ("in a", "r", "look_up", 1),
        ("in b", "r", "look_up#2", 1),
        ("in c", "r", "look_up#3", 1),
        ("in c", "r", "look_up#3", 2),
    ]
    said = [text for text, *_ in logged.places() if text.startswith("step ")]
    assert len(said) == 4
    assert all(text.startswith("step look_up#3 of run r: ") for text in said)


def test_own_log_lines_say_in_which_run_step_and_attempt_they_are(
    hive: Hive, logged: Records
) -> None:
    logged.addFilter(RunContextFilter())

    @hive.step
    async def awaited() -> None:
        LOGGER.info("in awaited")
        await asyncio.create_task(in_a_task())

    async def in_a_task() -> None:
        LOGGER.info("in a task")

    @hive.step
    def plain() -> None:
        LOGGER.info("in plain")
        assert threading.current_thread() is not threading.main_thread()
        if sum(each[0] == "in plain" for each in logged.places()) == 1:
            raise ValueError("once")

    @hive.workflow
    async def child() -> None:
        LOGGER.info("in child")

    @hive.workflow
    async def work() -> None:
        LOGGER.info("in work")
        await awaited()
        await asyncio.create_task(in_a_task())
        await plain()
        await child()
        LOGGER.info("in work")

    LOGGER.info("in no run")
    hive.run_sync(work, run_id="r")
    assert [each for each in logged.own() if each[0] != "in child"] == [
        ("in no run", "-", "-", "-"),
        ("in work", "r", "-", "-"),
        ("in awaited", "r", "awaited", 1),
        ("in a task", "r", "awaited", 1),
        ("in a task", "r", "-", "-"),
        ("in plain", "r", "plain", 1),
        ("in plain", "r", "plain", 2),
        ("in work", "r", "-", "-"),
    ]
    ((_, run_id, *rest),) = [each for each in logged.own() if each[0] == "in child"]
    assert run_id.startswith("r/child.")
    assert rest == ["-", "-"]


def test_a_run_inside_a_step_has_its_own_names(hive: Hive, logged: Records) -> None:
    logged.addFilter(RunContextFilter(missing=None))

    @hive.step
    async def inside() -> None:
        LOGGER.info("in inside")

    @hive.workflow
    async def inner() -> None:
        LOGGER.info("in inner")
        await inside()
        LOGGER.info("in inner")

    @hive.step
    async def around() -> None:
        await hive.run(inner, run_id="inner")
        LOGGER.info("in around")

    @hive.workflow
    async def outer() -> None:
        await around()

    hive.run_sync(outer, run_id="outer")
    assert logged.own() == [
        ("in inner", "inner", None, None),
        ("in inside", "inner", "inside", 1),
        ("in inner", "inner", None, None),
        ("in around", "outer", "around", 1),
    ]


def test_the_filter_changes_no_names_that_a_record_has(logged: Records) -> None:
    logged.addFilter(RunContextFilter())
    LOGGER.info("in mine", extra={"run_id": "mine", "attempt": 7})
    assert logged.own() == [("in mine", "mine", "-", 7)]


def test_the_filter_can_be_named_in_a_configuration(hive: Hive) -> None:
    written = io.StringIO()
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "filters": {
                "run": {"()": "maestro_hive.hive.run_log.RunContextFilter", "missing": "none"}
            },
            "formatters": {"line": {"format": "%(run_id)s %(step)s %(message)s"}},
            "handlers": {
                "text": {
                    "class": "logging.StreamHandler",
                    "stream": written,
                    "filters": ["run"],
                    "formatter": "line",
                }
            },
            "loggers": {LOGGER.name: {"handlers": ["text"], "level": "INFO"}},
        }
    )

    @hive.step
    async def one() -> None:
        LOGGER.info("working")

    @hive.workflow
    async def work() -> None:
        await one()

    try:
        hive.run_sync(work, run_id="r")
    finally:
        LOGGER.handlers.clear()
        LOGGER.setLevel(logging.NOTSET)
    assert written.getvalue() == "r one working\n"


def test_what_is_logged_can_be_written_as_json(hive: Hive, logged: Records) -> None:
    logged.addFilter(RunContextFilter(missing=None))

    @hive.workflow
    async def work() -> None:
        LOGGER.info("in work")

    hive.run_sync(work, run_id="r")
    json.dumps(logged.places())


def test_a_run_that_is_suspended_by_what_is_no_outcome_says_so(hive: Hive, logged: Records) -> None:
    class Odd(BaseException):
        pass

    @hive.workflow
    async def price() -> None:
        raise Odd("x")

    with pytest.raises(MaestroError, match="Odd"):
        asyncio.run(hive.run(price, run_id="r"))
    assert logged.lines()[-1].startswith("INFO run r is suspended: MaestroError: ")
    assert "Odd('x')" in logged.lines()[-1]


# --- handlers that fail ---------------------------------------------------------------------------


class Broken(logging.Handler):
    """A handler that raises an error, which those of logging itself do not."""

    def emit(self, record: logging.LogRecord) -> None:
        raise RuntimeError(record.getMessage())


@pytest.fixture
def _broken_handler() -> Iterator[None]:
    handler, logger = Broken(), logging.getLogger("maestro_hive")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


@pytest.mark.usefixtures("_broken_handler")
def test_a_handler_that_fails_changes_nothing_of_a_run(
    hive: Hive, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []

    @hive.step(max_attempts=2)
    async def look_up() -> int:
        calls.append(1)
        if len(calls) % 2:
            raise KeyError("b")
        return len(calls)

    @hive.workflow
    async def price(wanted: int) -> int:
        found = await look_up()
        if found != wanted:
            raise ValueError(found)
        return found

    async def by_a_worker() -> int:
        async with hive.worker():
            return await hive.enqueue(price, 4).result()

    assert hive.run_sync(price, 2) == 2
    assert asyncio.run(by_a_worker()) == 4
    with pytest.raises(RunFailedError, match="ValueError: 6"):
        hive.run_sync(price, 0)
    assert "RuntimeError: run " in capsys.readouterr().err
