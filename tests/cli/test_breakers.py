"""``maestro breakers``: what is changed there holds for every process, from its next call on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import ExecutionConfig, Hive, RunFailedError
from maestro_hive.engine.breaker import CircuitBreaker
from maestro_hive.engine.errors import CircuitBreakerOpen
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.unified_execution import Level1Config, Level2Config
from tests.cli.processes import answer, complaint, filled, in_terminal, maestro
from tests.python_processes import PythonProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return filled(tmp_path / "state")


@pytest.fixture
def breaker(folder: Path) -> Iterator[CircuitBreaker]:
    """A breaker that a running process uses."""
    store = SqliteStore(folder)
    yield CircuitBreaker(3, 100, name="anthropic", store=store)
    store.close()


def fail(breaker: CircuitBreaker, times: int = 3) -> None:
    for _ in range(times):
        breaker.record_failure()


def listed(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = answer(maestro("breakers", "--json", "--store", folder))[
        "breakers"
    ]
    return found


def test_where_nothing_has_failed_there_is_nothing_to_list(folder: Path) -> None:
    done = maestro("breakers", "--store", folder)
    assert (done.returncode, done.stdout) == (0, "")
    assert "nothing has failed" in done.stderr
    assert listed(folder) == []


def test_an_open_breaker_is_listed_with_why_and_for_how_long(
    folder: Path, breaker: CircuitBreaker
) -> None:
    fail(breaker)
    (found,) = listed(folder)
    assert found["name"] == "anthropic"
    assert found["state"] == "open"
    assert found["consecutive_failures"] == 3
    assert found["opened_because"] == "3 failures in a row"
    assert found["cooldown_seconds"] == 100
    assert 90 < found["remaining_seconds"] <= 100
    assert found["opened_at"] == found["last_failure_time"]
    line = maestro("breakers", "--store", folder).stdout
    assert line.startswith("anthropic\topen\t3\t")
    assert "1 min " in line
    seen = in_terminal("breakers", "--store", folder, NO_COLOR="1")
    assert "probe in" in seen.text


def test_a_reset_lets_the_calls_of_a_running_process_through(
    folder: Path, breaker: CircuitBreaker
) -> None:
    fail(breaker)
    with pytest.raises(CircuitBreakerOpen):
        breaker.acquire()
    done = maestro("breakers", "reset", "anthropic", "--store", folder)
    assert (done.returncode, "closed" in done.stdout) == (0, True)
    breaker.acquire().release()
    assert listed(folder)[0]["state"] == "closed"
    fail(breaker, 2)
    assert breaker.state == "closed"  # the failures before the reset are forgotten
    fail(breaker, 1)
    assert breaker.state == "open"


def test_the_result_of_a_probe_that_had_started_before_the_reset_is_ignored(folder: Path) -> None:
    store = SqliteStore(folder)
    breaker = CircuitBreaker(1, 0, name="anthropic", store=store)
    fail(breaker, 1)
    probe = breaker.acquire()
    assert probe.probe
    assert maestro("breakers", "reset", "anthropic", "--store", folder).returncode == 0
    probe.failed()
    assert breaker.state == "closed"
    store.close()


def test_an_opened_one_stops_the_calls_of_a_running_process(
    folder: Path, breaker: CircuitBreaker
) -> None:
    fail(breaker, 1)
    breaker.acquire().release()
    done = maestro("breakers", "open", "anthropic", "--for", "2h", "--store", folder)
    assert "open for 2 h" in done.stdout
    with pytest.raises(CircuitBreakerOpen, match="opened by hand"):
        breaker.acquire()
    assert 7100 < listed(folder)[0]["remaining_seconds"] <= 7200


CALLER = """
import sys
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.engine.breaker import CircuitBreaker
from pathlib import Path
breaker = CircuitBreaker(name="api", store=SqliteStore(Path(sys.argv[1])))
print("ready", flush=True)
for _ in sys.stdin:
    print(breaker.is_open(), flush=True)
"""


def test_another_process_sees_it_at_its_next_call(folder: Path) -> None:
    with PythonProcess(CALLER, folder) as caller:
        assert caller.stdout.readline() == "ready\n"
        seen = []
        for verb in (["open", "api", "--new"], ["reset", "api"], ["open", "api"]):
            assert maestro("breakers", *verb, "--store", folder).returncode == 0
            caller.stdin.write("?\n")
            caller.stdin.flush()
            seen.append(caller.stdout.readline().strip())
        caller.stdin.close()
    assert seen == ["True", "False", "True"]


@pytest.mark.parametrize("verb", ["reset", "open"])
def test_an_unknown_name_is_an_error_with_the_known_ones(
    folder: Path, breaker: CircuitBreaker, verb: str
) -> None:
    fail(breaker, 1)
    message = complaint(maestro("breakers", verb, "antropic", "--store", folder), 2)
    assert "'antropic'" in message
    assert "anthropic." in message
    assert [each["name"] for each in listed(folder)] == ["anthropic"]


def test_one_is_opened_before_anything_failed_if_that_is_meant(folder: Path) -> None:
    assert "--new" in complaint(maestro("breakers", "open", "api", "--store", folder), 2)
    assert maestro("breakers", "open", "api", "--new", "--store", folder).returncode == 0
    assert listed(folder)[0]["name"] == "api"


@pytest.mark.parametrize(
    "arguments", [["reset"], ["open", "a", "--for", "soon"], ["reset", "a", "b"]]
)
def test_wrong_use_is_refused(folder: Path, arguments: list[str]) -> None:
    complaint(maestro("breakers", *arguments, "--store", folder), 2)


def test_a_name_that_no_breaker_can_have_is_refused(folder: Path) -> None:
    message = complaint(maestro("breakers", "open", "a\x1b[31m", "--new", "--store", folder), 2)
    assert "\x1b" not in message
    assert listed(folder) == []


def test_the_breaker_of_a_step_without_persona_is_listed_and_reset_by_its_name(
    tmp_path: Path,
) -> None:
    config = ExecutionConfig(
        level1=Level1Config(base_delay_seconds=0),
        level2=Level2Config(base_delay_seconds=0, circuit_breaker_threshold=2),
    )
    with Hive(tmp_path, config) as hive:

        @hive.step
        async def fetch() -> None:
            raise ConnectionError("refused")

        @hive.workflow
        async def work() -> None:
            await fetch()

        with pytest.raises(RunFailedError):
            hive.run_sync(work)
        (found,) = listed(tmp_path)
        assert (found["name"], found["state"]) == ("step/fetch", "open")
        with pytest.raises(CircuitBreakerOpen, match="step/fetch"):
            hive.run_sync(work)
        assert maestro("breakers", "reset", "step/fetch", "--store", tmp_path).returncode == 0
        with pytest.raises(RunFailedError):
            hive.run_sync(work)
