"""Verdicts about repairs: each repair that was used gets one, whatever came after it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import Fix, Hive
from maestro_hive.hive.errors import RunFailedError
from maestro_hive.maestro.state.events import RepairJudged
from maestro_hive.unified_execution import GovernanceViolation
from tests.healing.test_user_healers import Reading, events, printed, shown
from tests.hive.conftest import quick_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def hive(tmp_path: Path) -> Iterator[Hive]:
    with Hive(tmp_path / "state", quick_config(), workspace=tmp_path) as made:
        yield made


class Failing:
    """A step that fails by the errors it is given, one after the other, and then is done."""

    def __init__(self, hive: Hive, *errors: Exception, **options: Any) -> None:
        self.calls = 0
        self.tried: list[list[tuple[str, str | None]]] = []

        @hive.step(**{"max_attempts": 3, **options})
        async def work() -> str:
            self.calls += 1
            if self.calls <= len(errors):
                raise errors[self.calls - 1]
            return "done"

        @hive.workflow
        async def flow() -> str:
            return await work()

        def told(_failure: Any, _arguments: Any, tried: list[Any]) -> str:
            self.tried.append([(each.healer, each.verdict) for each in tried])
            return "told"

        self.flow = flow
        hive.healer(KeyError, name="of_keys")(told)
        hive.healer(ValueError, name="of_values")(told)


def judged(hive: Hive) -> list[tuple[int, str, str, str | None]]:
    found = [each for each in events(hive) if isinstance(each, RepairJudged)]
    return [(each.attempt, each.healer, each.verdict, each.reason) for each in found]


def test_a_repair_that_another_failure_follows_is_undecided(hive: Hive) -> None:
    failing = Failing(hive, KeyError("a"), ValueError("b"), TypeError("c"))
    with pytest.raises(RunFailedError):
        hive.run_sync(failing.flow, run_id="r")
    assert judged(hive) == [
        (1, "of_keys", "undecided", "another failure came"),
        (2, "of_values", "undecided", "another failure came"),
    ]
    text = printed(hive, "show", "r", "work")
    assert text.count("verdict: undecided (another failure came)") == 2
    assert "repair by of_keys is undecided: another failure came" in printed(hive, "events", "r")
    assert shown(hive, "repairs", "--all")["repairs"] == []


def test_an_undecided_repair_has_worked_when_the_step_is_completed(hive: Hive) -> None:
    failing = Failing(hive, KeyError("a"), ValueError("b"))
    assert hive.run_sync(failing.flow, run_id="r") == "done"
    assert judged(hive) == [
        (1, "of_keys", "undecided", "another failure came"),
        (1, "of_keys", "worked", "the step was completed"),
        (2, "of_values", "worked", "the step was completed"),
    ]
    assert failing.tried == [[], [("of_keys", "undecided")]]
    assert "undecided" not in printed(hive, "show", "r", "work")
    assert {each["worked"] for each in shown(hive, "repairs")["repairs"]} == {1}


def test_an_undecided_repair_has_failed_when_its_failure_comes_again(hive: Hive) -> None:
    failing = Failing(hive, KeyError("a"), ValueError("b"), KeyError("a"))
    with pytest.raises(RunFailedError):
        hive.run_sync(failing.flow, run_id="r")
    assert judged(hive) == [
        (1, "of_keys", "undecided", "another failure came"),
        (1, "of_keys", "failed", "the same failure came again"),
        (2, "of_values", "undecided", "another failure came"),
    ]


def test_it_is_undecided_once_however_many_rounds_follow(hive: Hive) -> None:
    errors = [KeyError("a"), TypeError("b"), OSError("c"), TypeError("d")]
    failing = Failing(hive, *errors, max_attempts=5, rounds=5)
    assert hive.run_sync(failing.flow, run_id="r") == "done"
    assert [each[2] for each in judged(hive)] == ["undecided", "worked"]


def test_what_an_engine_of_a_callers_did_is_judged_by_its_name(tmp_path: Path) -> None:
    """One that was written for the first implementation names no healer."""

    class TheirEngine:
        def heal_single(self, failure: Any) -> Any:
            known = failure.context["arguments"]
            answers = {
                1: SimpleNamespace(status="FAILED", fix=None),
                2: SimpleNamespace(status="FIXED", fix={"arguments": {"depth": 5}}),
            }
            return answers[failure.context["attempt"]] if known["depth"] == 1 else None

    with Hive(tmp_path / "state", quick_config(), healing_engine=TheirEngine()) as hive:
        reading = Reading(hive)
        assert hive.run_sync(reading.flow, run_id="r") == "a 5"
        assert judged(hive) == [(2, "TheirEngine", "worked", "the step was completed")]
        text = printed(hive, "show", "r", "read")
        assert [line.strip() for line in text.splitlines() if "repair:" in line] == [
            "repair: none",
            "repair: TheirEngine: FIXED",
        ]
        (proven,) = shown(hive, "repairs")["repairs"]
        assert (proven["healer"], proven["worked"]) == ("TheirEngine", 1)


def test_files_are_restored_when_the_next_attempt_ends_by_a_refusal(
    hive: Hive, tmp_path: Path
) -> None:
    """An error that no attempt follows is a failure of the repair as well."""

    @hive.step
    async def work() -> None:
        if not (tmp_path / "flag").exists():
            raise ValueError("no flag")
        raise GovernanceViolation("not allowed", "forbidden")

    @hive.workflow
    async def flow() -> None:
        await work()

    hive.healer(ValueError, name="write")(lambda: Fix(files={"flag": "yes"}))
    with pytest.raises(RunFailedError):
        hive.run_sync(flow, run_id="r")
    assert judged(hive) == [(1, "write", "failed", "the next attempt failed")]
    assert not (tmp_path / "flag").exists()
