"""Healers of the user's own: what they are given, what they may answer, and what is recorded of it."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import Fix, Hive, current
from maestro_hive.hive.errors import RunFailedError
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.maestro.state.events import RepairJudged, RepairTried
from tests.cli.processes import maestro
from tests.hive.conftest import quick_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from maestro_hive import Failure


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    made = tmp_path / "work"
    made.mkdir()
    return made


@pytest.fixture
def hive(tmp_path: Path, workspace: Path) -> Iterator[Hive]:
    with Hive(tmp_path / "state", quick_config(), workspace=workspace) as made:
        yield made


class Reading:
    """A step that fails unless its argument is right, or it was told something."""

    def __init__(
        self, hive: Hive, right: int = 5, told: str = "never told", **options: Any
    ) -> None:
        self.calls: list[int] = []

        @hive.step(**options)
        async def read(path: str, depth: int = 1) -> str:
            self.calls.append(depth)
            if depth != right and not any(told in each for each in current().feedback):
                raise ValueError(f"{path} is too deep")
            return f"{path} {depth}"

        @hive.workflow
        async def flow(path: str = "a") -> str:
            return await read(path)

        self.flow = flow


def events(hive: Hive, run_id: str = "r") -> list[Any]:
    async def read() -> list[Any]:
        return [each async for each in hive.events(run_id, follow=False)]

    return asyncio.run(read())


# --- what they are given, and may answer -----------------------------------------------------------


def test_a_healer_gets_the_failure_the_input_and_what_was_tried(hive: Hive) -> None:
    reading = Reading(hive)
    given: list[tuple[Any, ...]] = []

    @hive.healer(ValueError)
    def deeper(failure: Failure, arguments: dict[str, Any], tried: list[Any]) -> dict[str, Any]:
        given.append((failure, dict(arguments), list(tried)))
        return {"depth": 3 if len(given) == 1 else 5}

    assert hive.run_sync(reading.flow, run_id="r") == "a 5"
    assert reading.calls == [1, 3, 5]
    (first, arguments, tried), (_, changed, tried_then) = given
    assert isinstance(first.error, ValueError)
    assert (first.error_message, first.file_path) == ("a is too deep", __file__)
    assert (arguments, changed) == ({"path": "a", "depth": 1}, {"path": "a", "depth": 3})
    assert tried == []
    assert [(each.healer, each.fix, each.verdict) for each in tried_then] == [
        ("deeper", "change depth", "failed")
    ]


def test_an_async_healer_answers_with_feedback(hive: Hive) -> None:
    reading = Reading(hive, told="go deeper")

    @hive.healer(KeyError, ValueError)
    async def advise(failure: Failure) -> str:
        await asyncio.sleep(0)
        return f"go deeper: {failure.error_message}"

    assert hive.run_sync(reading.flow, run_id="r") == "a 1"
    assert len(reading.calls) == 2


def test_a_healer_is_asked_about_its_own_types_alone(hive: Hive) -> None:
    reading = Reading(hive, max_attempts=2)
    asked: list[Any] = []
    hive.healer(KeyError)(asked.append)
    with pytest.raises(RunFailedError):
        hive.run_sync(reading.flow, run_id="r")
    assert asked == []


@pytest.mark.parametrize("answer", [None, "", {}, 7, [1], {3: 4}, {"colour": 1}, Fix()])
def test_an_answer_without_a_repair_leaves_the_failure_as_it_is(hive: Hive, answer: Any) -> None:
    reading = Reading(hive, max_attempts=2)

    @hive.healer(ValueError)
    def odd() -> Any:
        return answer

    with pytest.raises(RunFailedError, match="a is too deep") as caught:
        hive.run_sync(reading.flow, run_id="r")
    assert isinstance(caught.value.__cause__, ValueError)
    assert reading.calls == [1, 1]


def test_a_healer_that_raises_does_not_hide_the_error_of_the_step(hive: Hive) -> None:
    reading = Reading(hive, max_attempts=2)

    @hive.healer(ValueError)
    def broken() -> str:
        raise RuntimeError("the healer is ill")

    with pytest.raises(RunFailedError, match="a is too deep"):
        hive.run_sync(reading.flow, run_id="r")
    (tried,) = (each for each in events(hive) if isinstance(each, RepairTried))
    assert (tried.status, tried.healer) == ("FAILED", None)
    assert tried.error == "broken: RuntimeError: the healer is ill"


def test_after_one_that_raises_the_next_is_asked(hive: Hive) -> None:
    reading = Reading(hive)

    @hive.healer(ValueError)
    def broken() -> str:
        raise RuntimeError("the healer is ill")

    @hive.healer(Exception)
    def deeper() -> dict[str, Any]:
        return {"depth": 5}

    assert hive.run_sync(reading.flow, run_id="r") == "a 5"


def test_changed_arguments_do_not_change_which_step_it_is(hive: Hive) -> None:
    reading = Reading(hive)
    hive.healer(ValueError, name="deeper")(lambda: {"depth": 5})
    assert hive.run_sync(reading.flow, run_id="r") == "a 5"
    view = shown(hive, "show", "r", "read")["step"]
    assert view["input"] == {"args": ["a"], "kwargs": {"depth": 1}}
    assert hive.run_sync(reading.flow, run_id="r") == "a 5"
    assert reading.calls == [1, 5]


@pytest.mark.parametrize("errors", [(), (3,), ("ValueError",), (ValueError, int)])
def test_a_healer_is_for_types_of_errors(hive: Hive, errors: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigurationError, match=r"@hive\.healer"):
        hive.healer(*errors)


def test_a_healer_takes_what_it_is_given(hive: Hive) -> None:
    def too_many(a: int, b: int, c: int, d: int) -> None: ...
    def by_name(*, failure: int) -> None: ...

    for function in (too_many, by_name):
        with pytest.raises(ConfigurationError, match=r"\(failure, arguments, tried\)"):
            hive.healer(ValueError)(function)


def test_two_healers_of_one_name_are_refused(hive: Hive) -> None:
    hive.healer(ValueError, name="one")(lambda: None)
    with pytest.raises(ConfigurationError, match="two healers 'one'"):
        hive.healer(ValueError, name="one")(events)
    with pytest.raises(ConfigurationError, match="'syntax' has the name of one that ships"):
        hive.healer(ValueError, name="syntax")(events)


def test_an_engine_of_ones_own_is_asked_after_the_functions(tmp_path: Path) -> None:
    class Engine:
        asked = 0

        def heal_single(self, failure: Failure) -> Any:
            del failure
            self.asked += 1
            return None

    engine = Engine()
    with Hive(tmp_path / "state", quick_config(), healing_engine=engine) as hive:
        reading = Reading(hive)
        hive.healer(ValueError, name="once")(
            lambda _, given: {"depth": 5} if given["depth"] == 2 else {"depth": 2}
        )
        assert hive.run_sync(reading.flow, run_id="r") == "a 5"
        assert engine.asked == 0


# --- the workspace ---------------------------------------------------------------------------------


class Building:
    """A step that fails unless a file of the workspace says yes."""

    def __init__(self, hive: Hive, workspace: Path, **options: Any) -> None:
        self.seen: list[str | None] = []
        file = workspace / "conf" / "flag.txt"

        @hive.step(**options)
        def build() -> str:
            found = file.read_text() if file.exists() else None
            self.seen.append(found)
            if found != "yes":
                raise ValueError(f"it says {found}")
            return "built"

        @hive.workflow
        async def flow() -> str:
            return await build()

        self.flow = flow
        self.file = file


def test_a_repair_of_the_workspace_stays_if_it_helps(hive: Hive, workspace: Path) -> None:
    building = Building(hive, workspace)

    @hive.healer(ValueError)
    def write() -> Fix:
        return Fix("write the flag", files={"conf/flag.txt": "yes"})

    assert hive.run_sync(building.flow, run_id="r") == "built"
    assert building.file.read_text() == "yes"


@pytest.mark.parametrize("existed", [True, False])
def test_a_repair_that_does_not_help_is_rolled_back(
    hive: Hive, workspace: Path, existed: bool
) -> None:
    building = Building(hive, workspace, max_attempts=3)
    if existed:
        building.file.parent.mkdir()
        building.file.write_text("before")
        building.file.chmod(0o640)

    @hive.healer(ValueError)
    def guess(failure: Failure) -> Fix:
        return Fix(files={"conf/flag.txt": f"guess {failure.context['attempt']}"})

    with pytest.raises(RunFailedError):
        hive.run_sync(building.flow, run_id="r")
    before = "before" if existed else None
    assert building.seen == [before, "guess 1", "guess 2"]
    assert building.file.exists() == existed
    if existed:
        assert building.file.read_text() == "before"
        assert building.file.stat().st_mode & 0o777 == 0o640
    judged = [each for each in events(hive) if isinstance(each, RepairJudged)]
    assert [each.restored for each in judged] == [("conf/flag.txt",)] * 2


def test_a_repair_whose_check_fails_is_rolled_back_before_the_next_attempt(
    hive: Hive, workspace: Path
) -> None:
    building = Building(hive, workspace, max_attempts=2)
    checked: list[str] = []

    def check() -> bool:
        checked.append(building.file.read_text())
        return False

    @hive.healer(ValueError)
    def wrong() -> Fix:
        return Fix(files={"conf/flag.txt": "no"}, check=check)

    @hive.healer(Exception)
    def right() -> Fix:
        return Fix(files={"conf/flag.txt": "yes"}, check=lambda: True)

    assert hive.run_sync(building.flow, run_id="r") == "built"
    assert checked == ["no"]
    judged = [each for each in events(hive) if isinstance(each, RepairJudged)]
    assert [(each.healer, each.verdict) for each in judged] == [
        ("wrong", "failed"),
        ("right", "worked"),
    ]
    assert "did not pass their check" in str(judged[0].reason)


def test_a_file_that_the_step_itself_changed_is_left_as_it_is(hive: Hive, workspace: Path) -> None:
    file = workspace / "notes.txt"

    @hive.step(max_attempts=2)
    async def work() -> None:
        if file.exists():
            file.write_text(f"{file.read_text()} and the persona's own")
        raise ValueError("no")

    @hive.workflow
    async def flow() -> None:
        await work()

    hive.healer(ValueError, name="note")(lambda: Fix(files={"notes.txt": "a repair"}))
    with pytest.raises(RunFailedError):
        hive.run_sync(flow, run_id="r")
    assert file.read_text() == "a repair and the persona's own"
    (judged,) = (each for each in events(hive) if isinstance(each, RepairJudged))
    assert (judged.verdict, judged.restored, judged.left) == ("failed", (), ("notes.txt",))


def test_nothing_outside_of_the_workspace_is_repaired(hive: Hive, workspace: Path) -> None:
    building = Building(hive, workspace, max_attempts=2)
    hive.healer(ValueError, name="escape")(lambda: Fix(files={"../flag.txt": "yes"}))
    with pytest.raises(RunFailedError):
        hive.run_sync(building.flow, run_id="r")
    assert not (workspace.parent / "flag.txt").exists()
    tried = [each for each in events(hive) if isinstance(each, RepairTried)]
    assert "not below the workspace" in str(tried[0].error)


# --- what is recorded, and shown -------------------------------------------------------------------


def shown(hive: Hive, *words: str) -> Any:
    folder = hive.config.state.state_dir
    done = maestro("--store", folder, *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def printed(hive: Hive, *words: str) -> str:
    done = maestro("--store", hive.config.state.state_dir, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def healed_runs(hive: Hive) -> Reading:
    reading = Reading(hive)

    @hive.healer(ValueError)
    def wrong() -> str:
        return "try harder"

    @hive.healer(Exception)
    def deeper() -> Fix:
        return Fix("go deeper", arguments={"depth": 5}, feedback="it is deeper now")

    for run_id in ("r", "again", "third"):
        hive.run_sync(reading.flow, run_id=run_id)
    return reading


def test_the_journal_has_diagnosis_repair_and_verdict(hive: Hive) -> None:
    reading = healed_runs(hive)
    assert reading.calls == [1, 1, 5, 1, 5, 1, 5]
    kinds = (RepairTried, RepairJudged)
    found: list[Any] = [each for each in events(hive) if isinstance(each, kinds)]
    first, failed, second, worked = found
    assert (first.healer, first.status, first.feedback) == (
        "wrong",
        "AWAITING_REVIEW",
        "try harder",
    )
    assert (failed.verdict, failed.reason) == ("failed", "the same failure came again")
    assert (second.healer, second.status, second.fix) == ("deeper", "FIXED", "go deeper")
    assert (worked.verdict, worked.reason) == ("worked", "the step was completed")
    assert len({each.fingerprint for each in found}) == 1
    assert str(second) == "step read (default) attempt 2 repaired by deeper: go deeper"


def test_show_has_all_of_it(hive: Hive) -> None:
    healed_runs(hive)
    text = printed(hive, "show", "r", "read")
    for part in (
        "diagnosis: runtime_error, fingerprint ",
        "repair: wrong: feedback",
        "feedback: try harder",
        "verdict: failed (the same failure came again)",
        "repair: deeper: go deeper",
        "changed arguments: {'depth': 5}",
        "verdict: worked (the step was completed)",
    ):
        assert part in text
    assert "repair by deeper worked" in printed(hive, "events", "r")
    second = shown(hive, "show", "r", "read")["step"]["attempts"][1]
    (repair,) = second["repairs"]
    assert (repair["healer"], repair["verdict"], repair["arguments"]) == (
        "deeper", "worked", {"depth": 5},
    )  # fmt: skip


def test_repairs_lists_what_has_proven_itself(hive: Hive) -> None:
    healed_runs(hive)
    (proven,) = shown(hive, "repairs")["repairs"]
    assert (proven["healer"], proven["worked"], proven["failed"], proven["first"]) == (
        "deeper", 3, 0, True,
    )  # fmt: skip
    assert (proven["step"], proven["fix"]) == ("read", "go deeper")
    assert proven["last_used"]
    _, never = shown(hive, "repairs", "--all")["repairs"]
    assert (never["healer"], never["worked"], never["failed"]) == ("wrong", 0, 1)
    assert "deeper\t3\t0" in printed(hive, "repairs")


def test_without_repairs_there_is_a_note(hive: Hive) -> None:
    reading = Reading(hive, right=1)
    hive.run_sync(reading.flow, run_id="r")
    assert shown(hive, "repairs")["repairs"] == []
