"""The words of healing, and the engine that holds healers by the type of failure they handle."""

from __future__ import annotations

import inspect
import json
import shutil
from dataclasses import MISSING, fields, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.core.self_reflection import failure_detector, self_healing_engine
from maestro_hive.core.self_reflection.failure_detector import FailureDetector
from maestro_hive.core.self_reflection.self_healing_engine import (
    Failure,
    FailureType,
    Fix,
    HealingResult,
    HealingStatus,
    SelfHealingEngine,
    Severity,
    SyntaxHealer,
    TestFailureHealer,
    Workspace,
)
from maestro_hive.engine.healing import detector, engine, failure
from maestro_hive.kernel.errors import ConfigurationError, StorageError
from tests.tables import for_each

if TYPE_CHECKING:
    from pathlib import Path


# --- the words -------------------------------------------------------------------------------------


def test_the_paths_that_callers_import_from_have_the_same_classes() -> None:
    assert failure_detector.FailureDetector is detector.FailureDetector
    assert self_healing_engine.SelfHealingEngine is engine.SelfHealingEngine
    for module in (failure_detector, self_healing_engine):
        assert module.Failure is failure.Failure
        assert module.FailureType is failure.FailureType
        assert module.Severity is failure.Severity
    assert self_healing_engine.HealingStatus is failure.HealingStatus
    assert self_healing_engine.HealingResult is failure.HealingResult


@pytest.mark.parametrize(
    "kind, names",
    [
        (
            FailureType,
            (
                "TEST_FAILURE IMPORT_ERROR ATTRIBUTE_ERROR TYPE_ERROR SYNTAX_ERROR ASSERTION_ERROR"
                " NAME_ERROR KEY_ERROR INDEX_ERROR RUNTIME_ERROR UNKNOWN"
            ),
        ),
        (Severity, "CRITICAL HIGH MEDIUM LOW"),
        (
            HealingStatus,
            "PENDING IN_PROGRESS FIXED AWAITING_REVIEW APPROVED REJECTED JIRA_CREATED FAILED",
        ),
    ],
)
def test_the_enums_have_the_names_that_callers_know(kind: Any, names: str) -> None:
    assert [each.name for each in kind] == names.split()
    assert [each.value for each in kind] == names.lower().split()


def defaults(kind: type) -> dict[str, object]:
    """Return the fields of a record in order, with their defaults; ``...`` for one that is needed."""
    return {
        each.name: (
            each.default
            if each.default is not MISSING
            else "made"
            if each.default_factory is not MISSING
            else ...
        )
        for each in fields(kind)
    }


def test_a_failure_has_the_fields_that_callers_know() -> None:
    assert list(defaults(Failure)) == [
        "failure_id", "failure_type", "error_message", "stack_trace", "file_path", "line_number",
        "function_name", "severity", "source", "context", "detected_at",
    ]  # fmt: skip
    made = Failure(
        "f-1", FailureType.KEY_ERROR, "'a'", "Traceback", "a.py", 3, "f", Severity.HIGH, "pytest"
    )
    assert made.context == {}
    assert datetime.now(UTC) >= made.detected_at
    assert made.detected_at.tzinfo is not None


def test_a_result_has_the_fields_and_defaults_that_callers_know() -> None:
    assert defaults(HealingResult) == {
        "failure": ..., "fix": ..., "status": ..., "jira_ticket": None, "feedback": None,
        "duration_ms": 0, "attempts": 1, "error_message": None, "timestamp": "made",
    }  # fmt: skip
    known = made_failure()
    result = HealingResult(known, None, HealingStatus.FAILED)
    assert json.loads(json.dumps(result.to_dict())) == {
        "failure": known.to_dict(), "fix": None, "status": "failed", "jira_ticket": None,
        "feedback": None, "duration_ms": 0, "attempts": 1, "error_message": None,
        "timestamp": result.timestamp.isoformat(),
    }  # fmt: skip


@for_each("fix", [object(), {"patch": b"x"}, Fix("d", files={"a.py": "x = 1"}), "x"])
def test_a_result_with_any_fix_is_plain_json(fix: object) -> None:
    result = HealingResult(made_failure(), fix, HealingStatus.FIXED)
    assert json.loads(json.dumps(result.to_dict()))["status"] == "fixed"


def test_the_engine_has_the_parameters_and_defaults_that_callers_know() -> None:
    parameters = inspect.signature(SelfHealingEngine).parameters
    known = {
        name: each.default for name, each in parameters.items() if each.kind != each.KEYWORD_ONLY
    }
    assert known == {
        "workspace_root": None, "auto_apply": False, "auto_approve_threshold": 0.95,
        "max_retries": 3, "jira_fallback": True,
    }  # fmt: skip
    healed = inspect.signature(SelfHealingEngine.heal).parameters
    assert {name: each.default for name, each in healed.items() if name != "self"} == {
        "pytest_output": None, "log_path": None, "execution_history": None,
    }  # fmt: skip
    assert list(inspect.signature(SelfHealingEngine.heal_single).parameters) == ["self", "failure"]
    assert str(inspect.signature(FailureDetector).parameters["workspace_root"].default) == "None"
    scans = inspect.signature(FailureDetector.scan_logs).parameters
    assert scans["since"].default is None


# --- fingerprints ----------------------------------------------------------------------------------


def made_failure(**given: Any) -> Failure:
    facts = {
        "failure_id": "f-1",
        "failure_type": FailureType.ASSERTION_ERROR,
        "error_message": "assert 3 == 4",
        "file_path": "test_a.py",
        "line_number": 7,
        "function_name": "test_sum",
    }
    return Failure(**{**facts, **given})


@for_each(
    "changed",
    [
        {"failure_id": "f-2"},
        {"line_number": 9},
        {"error_message": "assert 5 == 6"},
        {"error_message": "assert 3 == 4\nand more"},
        {"stack_trace": "other"},
        {"detected_at": datetime(2020, 1, 1, tzinfo=UTC)},
        {"source": "log"},
        {"context": {"run": 5}},
    ],
)
def test_the_same_failure_has_the_same_fingerprint(changed: dict[str, Any]) -> None:
    assert made_failure(**changed).get_hash() == made_failure().get_hash()


@for_each(
    "changed",
    [
        {"failure_type": FailureType.KEY_ERROR},
        {"error_message": "assert a == b"},
        {"file_path": "test_b.py"},
        {"function_name": "test_product"},
    ],
)
def test_another_failure_has_another_fingerprint(changed: dict[str, Any]) -> None:
    assert made_failure(**changed).get_hash() != made_failure().get_hash()


def test_objects_at_other_addresses_are_the_same_failure() -> None:
    one, other = (made_failure(error_message=f"{thing!r} is odd") for thing in (object(), object()))
    assert one.get_hash() == other.get_hash()
    assert made_failure(error_message="half \ud800").get_hash()


# --- healers by type -------------------------------------------------------------------------------


class Answering:
    """A healer that proposes what it is told, and notes what it was asked."""

    def __init__(self, fix: Fix | Exception | None, *kinds: FailureType) -> None:
        self.handles = frozenset(kinds or FailureType)
        self.fix = fix
        self.asked: list[str] = []

    def propose(self, failure: Failure, workspace: Workspace) -> Fix | None:
        self.asked.append(failure.error_message)
        if isinstance(self.fix, Exception):
            raise self.fix
        return self.fix


def test_healers_are_asked_by_the_type_of_the_failure() -> None:
    keys = Answering(Fix("keys", arguments={"a": 1}), FailureType.KEY_ERROR)
    names = Answering(Fix("names", arguments={"a": 2}), FailureType.NAME_ERROR)
    made = SelfHealingEngine(healers=[keys, names])
    result = made.heal_single(made_failure(failure_type=FailureType.NAME_ERROR))
    assert result.status is HealingStatus.FIXED
    assert result.fix.description == "names"
    assert (keys.asked, len(names.asked)) == ([], 1)
    made.add_healer(Answering(Fix("indices", arguments={"a": 3}), FailureType.INDEX_ERROR))
    result = made.heal_single(made_failure(failure_type=FailureType.INDEX_ERROR))
    assert result.fix.description == "indices"


def test_what_worked_before_for_the_same_fingerprint_is_tried_first() -> None:
    first = Answering(None)
    second = Answering(Fix("it", arguments={"a": 1}))
    made = SelfHealingEngine(healers=[first, second])
    assert made.heal_single(made_failure()).attempts == 2
    assert made.heal_single(made_failure(line_number=99)).attempts == 1
    assert (len(first.asked), len(second.asked)) == (1, 2)
    other = made_failure(file_path="other.py")
    assert made.heal_single(other).attempts == 2


def test_no_more_healers_are_asked_than_max_retries() -> None:
    healers = [Answering(None) for _ in range(5)]
    result = SelfHealingEngine(healers=healers, max_retries=2).heal_single(made_failure())
    assert (result.status, result.attempts) == (HealingStatus.FAILED, 2)
    assert [len(each.asked) for each in healers] == [1, 1, 0, 0, 0]


def test_a_healer_that_fails_is_told_and_the_next_is_asked() -> None:
    broken, good = Answering(KeyError("broken")), Answering(Fix("it", arguments={"a": 1}))
    assert SelfHealingEngine(healers=[broken, good]).heal_single(made_failure()).attempts == 2
    result = SelfHealingEngine(healers=[broken]).heal_single(made_failure())
    assert result.status is HealingStatus.FAILED
    assert result.error_message == "Answering: KeyError: 'broken'"


def test_what_nobody_handles_has_failed() -> None:
    result = SelfHealingEngine().heal_single(made_failure(failure_type=FailureType.KEY_ERROR))
    assert (result.status, result.attempts, result.fix) == (HealingStatus.FAILED, 0, None)
    assert result.error_message == "no healer has a fix for KEY_ERROR"


@for_each(
    "fix, threshold, status",
    [
        (Fix("a", arguments={"a": 1}), 0.95, HealingStatus.FIXED),
        (Fix("a", arguments={"a": 1}, confidence=0.95), 0.95, HealingStatus.FIXED),
        (Fix("a", arguments={"a": 1}, confidence=0.9), 0.95, HealingStatus.AWAITING_REVIEW),
        (Fix("a", arguments={"a": 1}, confidence=0.9), 0.9, HealingStatus.FIXED),
        (Fix("a", feedback="look"), 0.0, HealingStatus.AWAITING_REVIEW),
    ],
)
def test_what_is_sure_enough_is_used(fix: Fix, threshold: float, status: HealingStatus) -> None:
    made = SelfHealingEngine(auto_approve_threshold=threshold, healers=[Answering(fix)])
    result = made.heal_single(made_failure())
    assert (result.status, result.fix) == (status, replace(fix, healer=result.fix.healer))
    assert result.feedback == fix.feedback
    assert result.duration_ms > 0


def test_a_bare_exception_is_taken_as_a_failure() -> None:
    result = SelfHealingEngine(healers=[Answering(None)]).heal_single(KeyError("colour"))
    assert result.failure.failure_type is FailureType.KEY_ERROR


@for_each(
    "given, said",
    [
        ({"auto_approve_threshold": 2}, "auto_approve_threshold is 2"),
        ({"max_retries": 0}, "max_retries is 0"),
        ({"auto_apply": "yes"}, "auto_apply is 'yes'"),
        ({"jira_fallback": 1}, "jira_fallback is 1"),
        ({"healers": [5]}, "a healer is 5, and must be an object with `handles`"),
        ({"create_ticket": 5}, "create_ticket is 5"),
    ],
)
def test_settings_that_cannot_be_used_are_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        SelfHealingEngine(**given)


# --- the healers that are there --------------------------------------------------------------------


def test_the_syntax_healer_shows_the_line(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\ny = = 2\nz = 3\n")
    with pytest.raises(SyntaxError) as caught:
        compile((tmp_path / "a.py").read_text(), str(tmp_path / "a.py"), "exec")
    result = SelfHealingEngine(tmp_path).heal_single(caught.value)
    assert result.status is HealingStatus.AWAITING_REVIEW
    assert result.fix.healer == "syntax"
    assert result.feedback is not None
    assert result.feedback.splitlines() == [
        "Python cannot parse the source in line 2 of a.py: invalid syntax (a.py, line 2)",
        "     1 x = 1",
        ">    2 y = = 2",
        "           ^",
        "     3 z = 3",
        "Return the whole source again, with this corrected and nothing else around it.",
    ]


def test_the_test_failure_healer_says_which_test_failed(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_sum():\n    assert 1 + 1 == 3\n")
    known = made_failure(line_number=2, context={"nodeid": "test_a.py::test_sum"})
    fix = TestFailureHealer().propose(known, Workspace(tmp_path))
    assert fix is not None
    assert fix.feedback is not None
    assert fix.feedback.splitlines() == [
        "The test test_a.py::test_sum failed in line 2 of test_a.py: assert 3 == 4",
        "     1 def test_sum():",
        ">    2     assert 1 + 1 == 3",
        "Change the code that is tested, and not the test, so that it passes.",
    ]


@pytest.mark.parametrize("path", ["../outside.py", "/etc/hostname", "gone.py", "a\0b", None])
def test_a_file_outside_of_the_workspace_is_not_shown(tmp_path: Path, path: str | None) -> None:
    for healer in (SyntaxHealer(), TestFailureHealer()):
        known = made_failure(file_path=path, line_number=1)
        fix = healer.propose(known, Workspace(tmp_path))
        assert fix is not None
        assert fix.feedback is not None
        assert len(fix.feedback.splitlines()) == 2


# --- repairs of the workspace ----------------------------------------------------------------------


def repairing(tmp_path: Path, *, auto_apply: bool = True, **fix: Any) -> HealingResult:
    (tmp_path / "a.py").write_text("x = = 1\n")
    (tmp_path / "a.py").chmod(0o640)
    healer = Answering(Fix("repair", files={"a.py": "x = 1\n"}, **fix))
    made = SelfHealingEngine(tmp_path, auto_apply=auto_apply, healers=[healer])
    return made.heal_single(made_failure())


def test_files_are_repaired_if_that_is_allowed(tmp_path: Path) -> None:
    assert repairing(tmp_path).status is HealingStatus.FIXED
    assert (tmp_path / "a.py").read_text() == "x = 1\n"
    assert (tmp_path / "a.py").stat().st_mode & 0o777 == 0o640


def test_without_auto_apply_a_repair_awaits_review(tmp_path: Path) -> None:
    assert repairing(tmp_path, auto_apply=False).status is HealingStatus.AWAITING_REVIEW
    assert (tmp_path / "a.py").read_text() == "x = = 1\n"


def test_a_repair_that_does_not_work_is_taken_back(tmp_path: Path) -> None:
    checked: list[str] = []

    def check() -> bool:
        checked.append((tmp_path / "a.py").read_text())
        return False

    result = repairing(tmp_path, check=check)
    assert result.status is HealingStatus.FAILED
    assert "did not pass their check, and were restored" in str(result.error_message)
    assert checked == ["x = 1\n"]
    assert (tmp_path / "a.py").read_text() == "x = = 1\n"
    assert (tmp_path / "a.py").stat().st_mode & 0o777 == 0o640


def test_a_check_that_raises_takes_the_repair_back(tmp_path: Path) -> None:
    def check() -> bool:
        raise OSError("no tests here")

    assert "no tests here" in str(repairing(tmp_path, check=check).error_message)
    assert (tmp_path / "a.py").read_text() == "x = = 1\n"


def test_a_repair_must_parse_and_a_new_file_is_removed_again(tmp_path: Path) -> None:
    healer = Answering(Fix("repair", files={"new/b.py": "def f(:", "c.txt": "text"}))
    made = SelfHealingEngine(tmp_path, auto_apply=True, healers=[healer])
    assert made.heal_single(made_failure()).status is HealingStatus.FAILED
    assert not (tmp_path / "new" / "b.py").exists()
    assert not (tmp_path / "c.txt").exists()


@pytest.mark.parametrize("name", ["../b.py", "/tmp/b.py", "link/b.py"])
def test_nothing_outside_of_the_workspace_is_changed(tmp_path: Path, name: str) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link").symlink_to(tmp_path)
    healer = Answering(Fix("repair", files={name: "x = 1\n"}))
    result = SelfHealingEngine(inside, auto_apply=True, healers=[healer]).heal_single(
        made_failure()
    )
    assert "not below the workspace" in str(result.error_message)
    assert not (tmp_path / "b.py").exists()


# --- tickets ---------------------------------------------------------------------------------------


def test_what_cannot_be_fixed_gets_one_ticket() -> None:
    asked: list[Failure] = []

    def create(failure: Failure) -> str:
        asked.append(failure)
        return f"MD-{len(asked)}"

    made = SelfHealingEngine(healers=[], create_ticket=create)
    results = [made.heal_single(made_failure(line_number=each)) for each in range(3)]
    assert {each.status for each in results} == {HealingStatus.JIRA_CREATED}
    assert {each.jira_ticket for each in results} == {"MD-1"}
    assert len(asked) == 1


def test_without_the_fallback_there_is_no_ticket() -> None:
    made = SelfHealingEngine(jira_fallback=False, healers=[], create_ticket=lambda _: "MD-1")
    assert made.heal_single(made_failure()).status is HealingStatus.FAILED


def test_a_ticket_that_cannot_be_made_is_told() -> None:
    def create(failure: Failure) -> str:
        raise OSError("Jira is down")

    result = SelfHealingEngine(healers=[], create_ticket=create).heal_single(made_failure())
    assert result.status is HealingStatus.FAILED
    assert "no ticket was made: OSError: Jira is down" in str(result.error_message)


# --- files in, a report out ------------------------------------------------------------------------


@pytest.fixture
def healed(tmp_path: Path) -> SelfHealingEngine:
    """An engine that healed what was found in three files."""
    (tmp_path / "output.txt").write_text(
        "=== FAILURES ===\n___ test_sum ___\n\n>       assert 3 == 4\nE       assert 3 == 4\n\n"
        "test_a.py:2: AssertionError\n=== short test summary info ===\n"
    )
    (tmp_path / "app.log").write_text("2026-01-01 10:00:00 ERROR disk is full\n")
    attempts = [{"error_type": "SyntaxError", "error_message": "invalid syntax"}] * 2
    (tmp_path / "history.json").write_text(json.dumps({"attempts": attempts}))
    made = SelfHealingEngine(str(tmp_path))
    results = made.heal(
        pytest_output=tmp_path / "output.txt",
        log_path=str(tmp_path / "app.log"),
        execution_history=tmp_path / "history.json",
    )
    assert [each.failure.failure_type for each in results] == [
        FailureType.ASSERTION_ERROR, FailureType.UNKNOWN, FailureType.SYNTAX_ERROR,
    ]  # fmt: skip
    return made


def test_stats_count_what_became_of_the_failures(healed: SelfHealingEngine) -> None:
    stats = healed.get_stats()
    assert stats["total"] == 3
    assert {name: stats[name] for name in ("fixed", "awaiting_review", "failed")} == {
        "fixed": 0, "awaiting_review": 2, "failed": 1,
    }  # fmt: skip
    assert stats["by_type"] == {"assertion_error": 1, "unknown": 1, "syntax_error": 1}
    assert stats["success_rate"] == 0
    assert stats["average_duration_ms"] > 0
    assert SelfHealingEngine().get_stats()["total"] == 0


def test_reports_as_text_and_as_json(healed: SelfHealingEngine) -> None:
    assert healed.generate_report("text").splitlines() == [
        "3 failures, 0 fixed",
        "",
        "AWAITING_REVIEW: ASSERTION_ERROR test_a.py:2 in test_sum: assert 3 == 4",
        "  fix: say which test failed, and how",
        "",
        "FAILED: UNKNOWN log: disk is full",
        "  error: no healer has a fix for UNKNOWN",
        "",
        "AWAITING_REVIEW: SYNTAX_ERROR execution: invalid syntax",
        "  fix: say where the source does not parse",
    ]
    assert healed.generate_report() == healed.generate_report("text")
    report = json.loads(healed.generate_report("json"))
    assert report["stats"]["total"] == 3
    assert [each["status"] for each in report["results"]] == [
        "awaiting_review", "failed", "awaiting_review",
    ]  # fmt: skip
    with pytest.raises(ConfigurationError, match="'text' or 'json'"):
        healed.generate_report("html")


def test_heal_of_nothing_heals_nothing() -> None:
    assert SelfHealingEngine().heal() == []


def test_a_json_report_of_pytest_is_healed_too(tmp_path: Path) -> None:
    test = {
        "nodeid": "a.py::test_x",
        "call": {"outcome": "failed", "longrepr": "E   KeyError: 'x'"},
    }
    (tmp_path / "report.json").write_text(json.dumps({"tests": [test]}))
    (result,) = SelfHealingEngine(tmp_path).heal(tmp_path / "report.json")
    assert result.failure.failure_type is FailureType.KEY_ERROR


def test_a_file_that_cannot_be_restored_does_not_keep_the_others_from_being(
    tmp_path: Path,
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "code.py").write_text("before = 1\n")

    def check() -> bool:
        shutil.rmtree(tmp_path / "a")
        (tmp_path / "a").write_text("no folder any more")
        return False

    changed = {"a/code.py": "after = 1\n", "b/code.py": "after = 1\n"}
    with pytest.raises(StorageError, match=r"a/code\.py"):
        Workspace(tmp_path).change(changed, check)
    assert (tmp_path / "b" / "code.py").read_text() == "before = 1\n"
