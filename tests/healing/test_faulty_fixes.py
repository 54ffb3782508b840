"""Fixes that cannot be used: a trouble of their healer alone, after which the next one is asked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import Fix, Hive
from maestro_hive.maestro.state.events import RepairTried
from tests.healing.test_user_healers import Building, Reading, events
from tests.hive.conftest import quick_config

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    made = tmp_path / "work"
    made.mkdir()
    return made


@pytest.fixture
def hive(tmp_path: Path, workspace: Path) -> Iterator[Hive]:
    with Hive(tmp_path / "state", quick_config(), workspace=workspace) as made:
        yield made


def tried(hive: Hive) -> list[RepairTried]:
    return [each for each in events(hive) if isinstance(each, RepairTried)]


async def _async_check() -> bool:
    return True


# --- their fields ----------------------------------------------------------------------------------

_MALFORMED: dict[str, dict[str, Any]] = {
    "confidence of text": {"confidence": "high", "arguments": {"depth": 5}},
    "confidence of None": {"confidence": None, "arguments": {"depth": 5}},
    "confidence of NaN": {"confidence": float("nan"), "arguments": {"depth": 5}},
    "files of a number": {"files": 5},
    "files of a list": {"files": ["a.txt"]},
    "files by mixed keys": {"files": {"a": "1", 2: "3"}},
    "files of bytes": {"files": {"a": b"1"}},
    "files by a path that is no text": {"files": {"\udc80": "1"}},
    "a file twice": {"files": {"a": "1", Path("a"): "2"}},
    "arguments of a list": {"arguments": ["depth"]},
    "arguments by number": {"arguments": {1: 5}},
    "feedback of a number": {"feedback": 5},
    "description of a number": {"description": 5, "feedback": "f"},
    "healer of a number": {"healer": 5, "feedback": "f"},
    "check of a number": {"files": {"a": "1"}, "check": 5},
    "async check": {"files": {"a": "1"}, "check": _async_check},
}


@pytest.mark.parametrize("fields", _MALFORMED.values(), ids=_MALFORMED)
def test_a_malformed_fix_is_passed_over(
    hive: Hive, workspace: Path, fields: dict[str, Any]
) -> None:
    reading = Reading(hive, max_attempts=2)

    @hive.healer(ValueError)
    def odd() -> Fix:
        return Fix(**fields)

    @hive.healer(ValueError)
    def deeper() -> dict[str, Any]:
        return {"depth": 5}

    assert hive.run_sync(reading.flow, run_id="r") == "a 5"
    assert reading.calls == [1, 5]
    (repair,) = tried(hive)
    assert (repair.status, repair.healer) == ("FIXED", "deeper")
    assert str(repair.error).startswith("odd: ")
    assert list(workspace.iterdir()) == []


def test_a_check_that_returns_an_awaitable_has_not_passed(hive: Hive, workspace: Path) -> None:
    building = Building(hive, workspace, max_attempts=2)
    wrong: Any = lambda: _async_check()  # noqa: E731, PLW0108 - not to be seen before it is called
    hive.healer(ValueError, name="odd")(lambda: Fix(files={"conf/flag.txt": "no"}, check=wrong))
    hive.healer(ValueError, name="right")(lambda: Fix(files={"conf/flag.txt": "yes"}))
    assert hive.run_sync(building.flow, run_id="r") == "built"
    assert building.seen == [None, "yes"]


def test_files_may_be_given_by_paths(hive: Hive, workspace: Path) -> None:
    building = Building(hive, workspace, max_attempts=2)
    files: Any = {Path("conf") / "flag.txt": "yes"}
    hive.healer(ValueError, name="write")(lambda: Fix(files=files))
    assert hive.run_sync(building.flow, run_id="r") == "built"
    assert [each.files for each in tried(hive)][-1] == ("conf/flag.txt",)


def test_a_fix_that_two_healers_give_is_credited_to_each(hive: Hive) -> None:
    shared = Fix("shared", feedback="hm")
    failed: list[int] = []

    @hive.step(max_attempts=3)
    async def work() -> str:
        failed.append(1)
        if len(failed) < 3:
            raise (KeyError("a"), ValueError("b"))[len(failed) - 1]
        return "done"

    @hive.workflow
    async def flow() -> str:
        return await work()

    hive.healer(KeyError, name="of_keys")(lambda: shared)
    hive.healer(ValueError, name="of_values")(lambda: shared)
    assert hive.run_sync(flow, run_id="r") == "done"
    assert [each.healer for each in tried(hive)] == ["of_keys", "of_values"]
    assert shared == Fix("shared", feedback="hm")


# --- their arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [{"colour": 1}, {"depth": object()}], ids=["unknown", "no value"])
def test_after_unusable_arguments_the_next_healer_is_asked(
    hive: Hive, workspace: Path, wrong: dict[str, Any]
) -> None:
    (workspace / "a").write_text("before")
    reading = Reading(hive, max_attempts=2)

    @hive.healer(ValueError)
    def broken() -> Fix:
        raise RuntimeError("the healer is ill")

    @hive.healer(ValueError)
    def odd() -> Fix:
        return Fix(arguments=wrong, files={"a": "new"}, feedback="told")

    hive.healer(ValueError, name="silent")(lambda: None)

    @hive.healer(ValueError)
    def deeper() -> dict[str, Any]:
        assert (workspace / "a").read_text() == "before"
        return {"depth": 5}

    assert hive.run_sync(reading.flow, run_id="r") == "a 5"
    assert (workspace / "a").read_text() == "before"
    (repair,) = tried(hive)
    assert (repair.status, repair.healer) == ("FIXED", "deeper")
    first, second = str(repair.error).split("; ", 1)
    assert first == "broken: RuntimeError: the healer is ill"
    assert second.startswith("odd: ")


def test_the_feedback_of_unusable_arguments_is_left(hive: Hive, workspace: Path) -> None:
    reading = Reading(hive, told="go deeper", max_attempts=2)
    odd = Fix(arguments={"colour": 1}, files={"a": "new"}, feedback="go deeper")
    hive.healer(ValueError, name="odd")(lambda: odd)
    hive.healer(ValueError, name="silent")(lambda: None)
    assert hive.run_sync(reading.flow, run_id="r") == "a 1"
    (repair,) = tried(hive)
    assert (repair.status, repair.healer, repair.files) == ("AWAITING_REVIEW", "odd", ())
    assert "'colour'" in str(repair.error)
    assert list(workspace.iterdir()) == []


def test_arguments_that_may_not_be_stored_are_passed_over(hive: Hive) -> None:
    reading = Reading(hive, told="go deeper", max_attempts=2, store_input=False)
    hive.healer(ValueError, name="odd")(lambda: {"depth": 5})
    hive.healer(ValueError, name="advise")(lambda: "go deeper")
    assert hive.run_sync(reading.flow, run_id="r") == "a 1"
    (repair,) = tried(hive)
    assert (repair.healer, str(repair.error)[:5]) == ("advise", "odd: ")
    assert "store_input=False" in str(repair.error)
