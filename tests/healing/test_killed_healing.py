"""Killed between diagnosis, repair and verdict: the run is the same as the one never killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import Hive, current
from maestro_hive.admin.repairs import list_repairs
from maestro_hive.maestro.state.stores import open_reader
from maestro_hive.testing import use
from tests.python_processes import PythonProcess

if TYPE_CHECKING:
    from pathlib import Path

    from maestro_hive import Failure


# --- in memory, after every record -----------------------------------------------------------------


def test_a_healed_workflow_killed_after_any_record_is_its_twin() -> None:  # noqa: C901 - its steps
    """Feedback, changed arguments that help and that do not, what ships, and a wait as told."""
    hive = Hive("never-made")

    @hive.healer(ValueError)
    def deeper(failure: Failure, arguments: dict[str, Any]) -> dict[str, Any]:
        del failure
        return {"depth": arguments["depth"] + 1}

    @hive.healer(LookupError)
    async def advise() -> str:
        return "look twice"

    @hive.step
    async def read(path: str, depth: int = 1) -> str:
        if depth < 3:
            raise ValueError(path)
        return f"{path} {depth}"

    @hive.step
    async def find() -> str:
        if not any("look twice" in each for each in current().feedback):
            raise IndexError("nothing there")
        return "found"

    @hive.step(check_source=True)
    async def generate() -> str:
        return "x = 1" if any("^" in each for each in current().feedback) else "x = = 1"

    @hive.step
    async def call() -> str:
        if not current().feedback:
            raise RuntimeError("rate limit reached, try again in 40s")
        return "called"

    @hive.workflow
    async def flow() -> list[Any]:
        found = [await read("a"), await asyncio.gather(find(), generate(), read("b"))]
        started = hive.now()
        await call()
        waited = (hive.now() - started).total_seconds()
        return [*found, round(waited)]

    with use(hive) as kit:
        report = kit.crash_everywhere(flow, vary_order=False)
    assert report.result == ["a 3", ["found", "x = 1", "b 3"], 40]
    assert report.records > 30


# --- real processes --------------------------------------------------------------------------------

_PROGRAM = """
    import os, signal, sys, json
    from pathlib import Path
    from maestro_hive import ExecutionConfig, Fix, Hive, current
    from maestro_hive.engine.open_run import OpenRun
    from maestro_hive.maestro.state.records import EntryKind
    from maestro_hive.unified_execution import Level1Config, Level2Config

    folder, moment = Path(sys.argv[1]), int(sys.argv[2])
    calls, work = folder / "calls.txt", folder / "work"
    work.mkdir(exist_ok=True)
    flag = work / "flag.txt"

    def note(*words):
        with calls.open("a") as file:
            print(*words, file=file, flush=True)

    # Killed before or after the so-many-th record about a failed attempt.
    kinds = {EntryKind.ATTEMPT_FAILED, EntryKind.REPAIR_TRIED, EntryKind.REPAIR_JUDGED}
    kinds |= {EntryKind.STEP_COMPLETED}
    seen = 0
    record = OpenRun.record

    async def killed(self, entry, **more):
        global seen
        if entry.kind not in kinds:
            return await record(self, entry, **more)
        seen += 1
        if seen * 2 - 1 == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        await record(self, entry, **more)
        if seen * 2 == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    OpenRun.record = killed
    config = ExecutionConfig(
        level1=Level1Config(base_delay_seconds=0), level2=Level2Config(base_delay_seconds=0)
    )
    with Hive(folder / "state", config, workspace=work) as hive:

        @hive.healer(ValueError)
        def useless():
            return "try harder"

        @hive.healer(Exception)
        def right(failure, given):
            if "depth" in given:
                return {"depth": 5}
            return Fix("write the flag", files={"flag.txt": "yes"})

        @hive.step(max_attempts=3, rounds=1)
        async def read(path, depth=1):
            note("read", path, depth, len(current().feedback))
            if depth != 5:
                raise ValueError(path)
            return depth

        @hive.step(max_attempts=3, rounds=1)
        def build():
            found = flag.read_text() if flag.exists() else None
            note("build", found, len(current().feedback))
            if found != "yes":
                raise ValueError("not yet")
            return "built"

        @hive.workflow
        async def flow():
            return [await read("a"), await build()]

        print(json.dumps(hive.run_sync(flow, run_id="r")), flush=True)
"""
_CODE = textwrap.dedent(_PROGRAM)


def executed(folder: Path, moment: int) -> tuple[int | None, str]:
    process = PythonProcess(_CODE, folder, moment)
    output, _ = process.communicate()
    return process.returncode, output


def calls(folder: Path) -> list[str]:
    return (folder / "calls.txt").read_text().splitlines()


def counts(folder: Path) -> set[tuple[str, str, int, int]]:
    with contextlib.closing(open_reader(folder / "state")) as reader:
        found = list_repairs(reader, failed=True)
    return {(each.step, each.healer, each.worked, each.failed) for each in found}


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Any]:
    """The run that is never killed: its calls, and what is known of its repairs."""
    folder = tmp_path_factory.mktemp("twin")
    code, output = executed(folder, 0)
    assert (code, json.loads(output)) == (0, [5, "built"])
    assert calls(folder) == [
        "read a 1 0",
        "read a 1 1",
        "read a 5 2",
        "build None 0",
        "build None 1",
        "build yes 2",
    ]
    return calls(folder), counts(folder)


#: Failed, tried and judged, twice each for two steps, the files of one, and their completions.
_RECORDS = 2 * (3 + 3) + 1 + 2


@pytest.mark.parametrize("moment", range(1, 2 * _RECORDS + 1))
def test_killed_at_any_record_of_healing_the_run_is_its_twin(
    tmp_path: Path, twin: tuple[list[str], Any], moment: int
) -> None:
    code, _ = executed(tmp_path, moment)
    killed = code == -signal.SIGKILL
    assert killed or code == 0
    if not killed:
        pytest.skip("there are fewer records")
    code, output = executed(tmp_path, 0)
    assert (code, json.loads(output)) == (0, [5, "built"])
    known, counted = twin
    made = calls(tmp_path)
    again = [each for number, each in enumerate(made) if number and made[number - 1] == each]
    # Only an attempt whose end was not recorded is made again, with the same input and feedback.
    assert len(again) <= (moment % 2)
    assert list(dict.fromkeys(made)) == known
    assert (tmp_path / "work" / "flag.txt").read_text() == "yes"
    assert counts(tmp_path) == counted
