"""A run that kills its process must not use up the interruptions of those beside it."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from maestro_hive import Hive
from maestro_hive.hive import suspects
from maestro_hive.hive.runs import read_run
from maestro_hive.hive.suspects import Suspect
from tests.hive.conftest import quick_config
from tests.hive.worker_programs import Programs, kill, programs_in, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_in(tmp_path) as made:
        yield made


def test_a_run_that_kills_its_process_is_retried_alone(programs: Programs) -> None:
    for name in "abc":
        programs.hive.enqueue("hangs", name, run_id=name)
    first = programs.worker()
    until(lambda: len(programs.notes("hanging")) == 3)
    programs.hive.enqueue("poisoned", "p", run_id="p")
    assert first.wait(20) == -9
    # The next ones take the suspects one by one: those that hang are given some seconds each.
    programs.touch("free")
    for _ in range(8):
        process = programs.start("asyncio.run(serve())")
        until(lambda: process.poll() is not None or _is_settled(programs))  # noqa: B023 - at once
        if _is_settled(programs):
            break
    assert programs.status("p") == "stopped"
    found = programs.hive._open().dispatch("p")
    assert found is not None
    assert found.state.name == "HELD"  # until a person retries it
    for name in "abc":
        assert asyncio.run(programs.hive.handle(name).result()) == name
        (step,) = read_run(programs.hive._open(), name).steps.values()
        assert step.interruptions <= 1
    assert len(programs.notes("poison")) == 6  # the first, and as many as may be interrupted


def _is_settled(programs: Programs) -> bool:
    found = programs.hive._open().dispatch("p")
    held = found is not None and found.state.name == "HELD"
    return held and all(programs.status(name) == "success" for name in "abc")


def test_a_suspect_is_alone_for_longer_the_more_have_died(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def alone_for(deaths: int) -> int:
        suspect = Suspect("r", deaths, since=100.0)
        seconds = 0
        while suspect.is_alone():
            seconds += 1
            now[0] = 100.0 + seconds
        now[0] = 100.0
        return seconds

    assert [alone_for(deaths) for deaths in (1, 2, 3)] == [5, 20, 80]


def test_a_suspect_that_waits_for_a_person_keeps_no_other_waiting(programs: Programs) -> None:
    for name in "abc":
        programs.hive.enqueue("asks", name, run_id=name)
    first = programs.worker(release_after=600)
    until(lambda: all(programs.status(name) == "waiting" for name in "abc"))
    kill(first)
    programs.start(
        """
        from maestro_hive.hive import suspects
        suspects._ALONE_SECONDS = 10_000.0
        asyncio.run(serve(release_after=600))
        """
    )
    programs.hive.answer("c", "go", "yes")
    until(lambda: programs.status("c") == "success", seconds=30)
    assert [programs.status(name) for name in "ab"] == ["waiting", "waiting"]


def test_suspects_do_not_keep_others_waiting_for_long(programs: Programs) -> None:
    for number in range(5):
        programs.hive.enqueue("job", f"j{number}", 3, 0.05, run_id=f"j{number}")
    first = programs.worker()
    until(lambda: len(programs.notes("part")) >= 5)
    first.kill()
    programs.hive.enqueue("job", "new", 3, run_id="new")
    programs.worker()
    for name in [*(f"j{number}" for number in range(5)), "new"]:
        assert asyncio.run(programs.hive.handle(name).result()) == [0, 1, 2]
    assert programs.hive._open().dispatches() == []


async def _takes_a_run(hive: Hive) -> str:
    @hive.workflow
    async def job() -> str:
        return "done"

    async with hive.worker() as worker:
        worker._waiting_suspects._seen["gone"] = time.monotonic() - 3_600
        async with asyncio.timeout(60):
            return await hive.enqueue(job).result()


def test_an_empty_worker_does_not_wait_for_suspects_that_others_took(tmp_path: Path) -> None:
    with Hive(tmp_path / "state", quick_config()) as hive:
        assert asyncio.run(_takes_a_run(hive)) == "done"


def test_a_suspect_that_a_worker_does_not_take_leaves_it_at_work(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspects, "_PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(suspects, "_LOOK_SECONDS", 0.01)
    programs.hive.enqueue("hangs", "a", run_id="a")
    first = programs.worker()
    until(lambda: programs.notes("hanging"))
    kill(first)
    _executes_others(programs)  # its workflow is not known here


def test_a_suspect_that_another_worker_took_leaves_a_worker_at_work(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspects, "_PATIENCE_SECONDS", 0.0)
    seen = suspects.WaitingSuspects()
    seen._seen = {"a": time.monotonic() - 1}  # which another worker has by now
    monkeypatch.setattr("maestro_hive.hive.worker.WaitingSuspects", lambda: seen)
    _executes_others(programs)


def _executes_others(programs: Programs) -> None:
    hive = programs.hive

    @hive.step
    async def brief(number: int) -> int:
        await asyncio.sleep(0.03 + 0.03 * (number % 3))  # so that one is always executed
        return number

    @hive.workflow
    async def other(number: int) -> int:
        return await brief(number)

    async def main() -> list[int]:
        async with hive.worker(concurrency=2), asyncio.timeout(60):
            handles = [hive.enqueue(other, number) for number in range(12)]
            return [await handle.result() for handle in handles]

    assert asyncio.run(main()) == list(range(12))
