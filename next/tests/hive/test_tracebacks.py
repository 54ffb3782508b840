"""Errors show the user's lines, not ours."""

from __future__ import annotations

import asyncio
import re
import signal
import traceback
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.kernel.errors import RunFailedError
from tests.hive.test_kills import has_printed, program  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from maestro_hive.hive.hive import Hive


def lines_of(error: BaseException | None) -> Iterator[tuple[str, str]]:
    """Yield the file and function of every line of a traceback and of its causes'."""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            yield frame.f_globals["__name__"], frame.f_code.co_name
        error = error.__cause__


def broken(part: str) -> None:
    raise ValueError(f"{part} does not fit")


def ours(error: BaseException) -> list[tuple[str, str]]:
    return [line for line in lines_of(error) if line[0].startswith(("maestro_hive", "asyncio"))]


@pytest.fixture
def workflow(hive: Hive) -> Any:
    @hive.step(max_attempts=1)
    async def implement(part: str) -> None:
        broken(part)

    @hive.workflow
    async def build(part: str) -> None:
        await implement(part)

    return build


def test_the_cause_of_a_failed_run_shows_the_users_lines_alone(hive: Hive, workflow: Any) -> None:
    with pytest.raises(RunFailedError) as caught:
        hive.run_sync(workflow, "p", run_id="r")
    cause = caught.value.__cause__
    assert cause is not None
    assert type(cause) is ValueError
    assert list(lines_of(cause)) == []  # it was made again of what is recorded, its lines included
    shown = "".join(traceback.format_exception(cause))
    assert 'raise ValueError(f"{part} does not fit")' in shown
    assert "await implement(part)" in shown


def test_what_a_workflow_catches_points_at_the_step(hive: Hive, workflow: Any) -> None:
    seen: list[list[str]] = []

    @hive.step(max_attempts=1)
    async def fail() -> None:
        broken("q")

    @hive.workflow
    async def careful() -> None:
        try:
            await fail()
        except Exception as error:  # noqa: BLE001 - looked at
            seen.append([name for _, name in lines_of(error)])
            seen.extend(re.findall(r"in (\w+)\n", note) for note in error.__notes__)

    hive.run_sync(careful)
    assert seen == [["careful", "__call__"], ["fail", "broken"]]


def test_the_recorded_failure_tells_the_lines_in_a_note(hive: Hive, workflow: Any) -> None:
    with pytest.raises(RunFailedError):
        hive.run_sync(workflow, "p", run_id="r")
    with pytest.raises(RunFailedError) as caught:
        hive.run_sync(workflow, "p", run_id="r")
    assert caught.value.__cause__ is not None
    text = "".join(caught.value.__cause__.__notes__)
    assert "in broken" in text
    assert "maestro_hive/" not in text


def test_errors_of_a_group_are_shown_the_same_way(hive: Hive) -> None:
    @hive.step(max_attempts=1)
    async def implement(part: str) -> None:
        broken(part)

    @hive.workflow
    async def build() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(implement("a"))
            group.create_task(implement("b"))

    with pytest.raises(RunFailedError) as caught:
        hive.run_sync(build)
    group = caught.value.__cause__
    assert isinstance(group, ExceptionGroup)
    for part in group.exceptions:
        assert ours(part) == []


_PROGRAM = """
    @hive.step(max_attempts=1)
    async def implement(part):
        raise ValueError(f"{part} does not fit")

    @hive.workflow
    async def build(part):
        if part == "slow":
            say("started")
            await asyncio.sleep(60)
        await implement(part)

    hive.run_sync(build, sys.argv[2], run_id="r")
"""


def shown_lines(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("  File ")]


def test_what_a_program_prints_shows_where_it_failed_and_little_else(
    tmp_path: Path,
    program: Any,  # noqa: F811 - the fixture
) -> None:
    code, _, err = program(_PROGRAM, "page").end()
    assert code == 1
    assert [line for line in shown_lines(err) if "asyncio" in line] == []
    assert sum("maestro_hive" in line for line in shown_lines(err)) == 1  # run_sync itself
    assert "ValueError: page does not fit" in err
    assert "maestro retry r" in err.splitlines()[-1]


def test_ctrl_c_prints_one_short_traceback(
    tmp_path: Path,
    program: Any,  # noqa: F811 - the fixture
) -> None:
    child = program(_PROGRAM, "slow")
    child.wait_for(has_printed(tmp_path, "started"))
    child.process.send_signal(signal.SIGINT)
    _, _, err = child.end()
    assert len(shown_lines(err)) == 2
    assert (
        err.splitlines()[-1]
        == "KeyboardInterrupt: run 'r' was stopped; it resumes when it is started again"
    )
