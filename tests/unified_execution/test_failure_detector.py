"""Failures that are found in the output of a real pytest, in its JSON report, in logs and in history."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import textwrap
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.core.self_reflection.failure_detector import (
    Failure,
    FailureDetector,
    FailureType,
    Severity,
)
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.unified_execution import PersonaExecutor, UnrecoverableError
from tests.unified_execution.restarts import Body, execute

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TESTS = {
    "test_sample.py": """
        import pytest

        def helper(row):
            return row["colour"]

        def test_sound():
            pass

        def test_assert():
            left, right = 3, 4
            assert left == right, "not equal"

        def test_plain_assert():
            assert [1, 2] == [1, 3]

        def test_key():
            helper({})

        def test_type():
            len(5)

        def test_attribute():
            (5).colour

        def test_name():
            undefined_thing

        def test_index():
            [][3]

        def test_import():
            import does_not_exist

        def test_runtime():
            raise RuntimeError("first line\\nsecond line")

        def test_value():
            raise ValueError("bad value")

        class TestInClass:
            def test_method(self):
                raise TypeError("in a class")

        @pytest.fixture
        def broken():
            raise OSError("the fixture is broken")

        def test_with_fixture(broken):
            pass

        @pytest.mark.parametrize("value", ["a b", "[c]"])
        def test_parameters(value):
            assert value == "z"

        def test_caused():
            try:
                {}["x"]
            except KeyError as error:
                raise AttributeError("outer") from error

        def test_group():
            raise ExceptionGroup("some", [ValueError(1)])

        def test_by_hand():
            pytest.fail("by hand")

        def test_skipped():
            pytest.skip("not a failure")
    """,
    "test_broken.py": "def f(:\n    pass\n",
    "test_importing.py": "import no_such_module\n",
}

#: What each test fails with: the type, the severity, and the first line of its message.
EXPECTED = {
    "test_broken.py": (FailureType.SYNTAX_ERROR, Severity.CRITICAL, "invalid syntax"),
    "test_importing.py": (
        FailureType.IMPORT_ERROR, Severity.CRITICAL, "No module named 'no_such_module'",
    ),
    "test_assert": (FailureType.ASSERTION_ERROR, Severity.MEDIUM, "not equal"),
    "test_plain_assert": (FailureType.ASSERTION_ERROR, Severity.MEDIUM, "assert [1, 2] == [1, 3]"),
    "test_key": (FailureType.KEY_ERROR, Severity.MEDIUM, "'colour'"),
    "test_type": (FailureType.TYPE_ERROR, Severity.HIGH, "object of type 'int' has no len()"),
    "test_attribute": (
        FailureType.ATTRIBUTE_ERROR, Severity.HIGH, "'int' object has no attribute 'colour'",
    ),
    "test_name": (FailureType.NAME_ERROR, Severity.HIGH, "name 'undefined_thing' is not defined"),
    "test_index": (FailureType.INDEX_ERROR, Severity.MEDIUM, "list index out of range"),
    "test_import": (
        FailureType.IMPORT_ERROR, Severity.CRITICAL, "No module named 'does_not_exist'",
    ),
    "test_runtime": (FailureType.RUNTIME_ERROR, Severity.HIGH, "first line"),
    "test_value": (FailureType.TEST_FAILURE, Severity.MEDIUM, "bad value"),
    "TestInClass.test_method": (FailureType.TYPE_ERROR, Severity.HIGH, "in a class"),
    "test_with_fixture": (FailureType.TEST_FAILURE, Severity.MEDIUM, "the fixture is broken"),
    "test_parameters[a b]": (FailureType.ASSERTION_ERROR, Severity.MEDIUM, "assert 'a b' == 'z'"),
    "test_parameters[[c]]": (FailureType.ASSERTION_ERROR, Severity.MEDIUM, "assert '[c]' == 'z'"),
    "test_caused": (FailureType.ATTRIBUTE_ERROR, Severity.HIGH, "outer"),
    "test_group": (FailureType.TEST_FAILURE, Severity.MEDIUM, "some (1 sub-exception)"),
    "test_by_hand": (FailureType.TEST_FAILURE, Severity.MEDIUM, "by hand"),
}  # fmt: skip

#: Writes what pytest knows of each test, in the form of pytest-json-report.
PLUGIN = """
import json

report = {"tests": [], "collectors": []}
tests = {}

def pytest_collectreport(report):
    outcome = {"nodeid": report.nodeid, "outcome": report.outcome, "result": []}
    if report.failed:
        outcome["longrepr"] = str(report.longrepr)
    globals()["report"]["collectors"].append(outcome)

def pytest_runtest_logreport(report):
    test = tests.setdefault(report.nodeid, {"nodeid": report.nodeid, "outcome": "passed"})
    stage = test[report.when] = {"outcome": report.outcome, "duration": report.duration}
    if report.failed:
        test["outcome"] = "failed"
        stage["longrepr"] = str(report.longrepr)
        crash = getattr(report.longrepr, "reprcrash", None)
        if crash is not None:
            stage["crash"] = {"path": crash.path, "lineno": crash.lineno, "message": crash.message}

def pytest_sessionfinish(session):
    report["tests"] = list(tests.values())
    with open("report.json", "w") as file:
        json.dump(report, file)
"""


#: Runs pytest in a process that it forks, once for each line of options in JSON.
RUNNER = """
import json, os, sys
import pytest

for line in sys.stdin:
    command = json.loads(line)
    if (pid := os.fork()) == 0:
        os.dup2(os.open(command["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        os._exit(pytest.main(command["options"]))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
#: What else is installed here changes nothing in the output, and takes half of the time.
OPTIONS = ["-p", "no:cacheprovider", "-p", "reporting", "--continue-on-collection-errors"]


class RealPytest:
    """A folder of tests that fail in every way, and a process that has imported pytest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        changes = {
            "PYTHONPATH": str(folder),
            "COLUMNS": "100",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        environment = {**os.environ, **changes}
        environment.pop("PYTEST_ADDOPTS", None)
        self._outputs: dict[tuple[str, ...], Path] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-c", RUNNER],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *options: str) -> Path:
        """Run the tests, once with these options; return the file with what was printed."""
        if options not in self._outputs:
            output = self.folder / f"output{'-'.join(options)}.txt"
            command = {"output": str(output), "options": [*OPTIONS, *options]}
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(f"{json.dumps(command)}\n")
            self._process.stdin.flush()
            assert self._process.stdout.readline() == "1\n", output.read_text()
            (self.folder / "report.json").rename(output.with_suffix(".json"))
            self._outputs[options] = output
        return self._outputs[options]

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def real_pytest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealPytest]:
    """A folder of tests that fail in every way, and a plugin that writes a report."""
    folder = tmp_path_factory.mktemp("project").resolve()
    for name, text in TESTS.items():
        (folder / name).write_text(textwrap.dedent(text))
    (folder / "reporting.py").write_text(PLUGIN)
    (folder / "pytest.ini").write_text("[pytest]\n")
    started = RealPytest(folder)
    yield started
    started.close()


@pytest.fixture
def project(real_pytest: RealPytest) -> Path:
    return real_pytest.folder


def by_test(failures: list[Failure]) -> dict[str, Failure]:
    return {each.context["test"]: each for each in failures}


def summed_up(failures: list[Failure]) -> dict[str, tuple[FailureType, Severity, str]]:
    return {
        name: (each.failure_type, each.severity, each.error_message.splitlines()[0])
        for name, each in by_test(failures).items()
    }


# --- pytest ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["auto", "long", "short", "native"])
def test_the_output_of_pytest_is_read_in_each_of_its_styles(
    real_pytest: RealPytest, project: Path, style: str
) -> None:
    output = real_pytest.run(f"--tb={style}")
    detector = FailureDetector(project)
    failures = detector.scan_pytest(output)
    assert summed_up(failures) == EXPECTED
    assert detector.failures == failures
    assert {each.source for each in failures} == {"pytest"}


@pytest.mark.parametrize("style", ["line", "no"])
def test_without_tracebacks_the_summary_is_read(
    real_pytest: RealPytest, project: Path, style: str
) -> None:
    failures = by_test(FailureDetector(project).scan_pytest(real_pytest.run(f"--tb={style}")))
    assert failures.keys() == EXPECTED.keys()
    known = {"test_assert", "test_key", "test_index", "test_runtime", "TestInClass.test_method"}
    for name in known:
        assert failures[name].failure_type is EXPECTED[name][0]


@pytest.mark.parametrize(
    "options", [("--color=yes",), ("-v",), ("-q",), ("-rA",), ("-p", "xdist", "-n1")]
)
def test_colours_and_other_options_change_nothing(
    real_pytest: RealPytest, project: Path, options: tuple[str, ...]
) -> None:
    found = summed_up(FailureDetector(project).scan_pytest(real_pytest.run(*options)))
    assert found == EXPECTED


def test_a_failure_names_its_place_and_its_test(real_pytest: RealPytest, project: Path) -> None:
    failures = by_test(FailureDetector(project).scan_pytest(real_pytest.run()))
    lines = (project / "test_sample.py").read_text().splitlines()
    key = failures["test_key"]
    assert key.file_path == "test_sample.py"
    assert lines[(key.line_number or 0) - 1] == '    return row["colour"]'
    assert key.function_name == "test_key"
    assert key.context["nodeid"] == "test_sample.py::test_key"
    assert key.stack_trace is not None
    assert "KeyError: 'colour'" in key.stack_trace
    broken = failures["test_broken.py"]
    assert (broken.file_path, broken.line_number) == ("test_broken.py", 1)
    assert broken.function_name is None
    assert broken.context["when"] == "collect"
    importing = failures["test_importing.py"]
    assert (importing.file_path, importing.line_number) == ("test_importing.py", 1)
    method = failures["TestInClass.test_method"]
    assert method.context["nodeid"] == "test_sample.py::TestInClass::test_method"
    assert failures["test_with_fixture"].context["when"] == "setup"


def test_a_json_report_has_the_same_failures(real_pytest: RealPytest, project: Path) -> None:
    output = real_pytest.run()
    detector = FailureDetector(project)
    from_text = detector.scan_pytest(output)
    from_report = detector.scan_pytest_json(output.with_suffix(".json"))
    in_report = "ValueError(1) [single exception in ExceptionGroup]"
    group = (FailureType.TEST_FAILURE, Severity.MEDIUM, in_report)
    assert summed_up(from_report) == {**EXPECTED, "test_group": group}
    texts = {each.context["test"]: each for each in from_text}
    same = [
        each for each in from_report if each.get_hash() == texts[each.context["test"]].get_hash()
    ]
    assert len(same) >= len(EXPECTED) - 1
    assert len(detector.failures) <= len(EXPECTED) + 1  # found twice, there once


@pytest.mark.parametrize("text", ["", "5 passed in 0.1s\n", "no tests at all", "\x00\xff = x ="])
def test_output_without_failures_has_none(tmp_path: Path, text: str) -> None:
    output = tmp_path / "output.txt"
    output.write_text(text)
    assert FailureDetector(tmp_path).scan_pytest(output) == []


# --- logs ------------------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log that Python's own logging wrote."""
    path = tmp_path / "app.log"
    logger = logging.getLogger("app")
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.info("started, with 0 errors")
    row: dict[str, str] = {}
    fails: list[Callable[[], object]] = [lambda: row["colour"], lambda: 1 / 0]
    for fail in fails:
        try:
            fail()
        except Exception:
            logger.exception("a request failed")
    try:
        try:
            row["inner"]
        except KeyError as error:
            raise RuntimeError("outer\nof two lines") from error
    except RuntimeError:
        logger.exception("another one failed")
    logger.error("disk is full")
    logger.critical("giving up")
    logger.removeHandler(handler)
    handler.close()
    return path


def test_a_log_has_tracebacks_and_errors_without_one(log: Path) -> None:
    failures = FailureDetector(log.parent).scan_logs(log)
    assert [(each.failure_type, each.error_message) for each in failures] == [
        (FailureType.KEY_ERROR, "'colour'"),
        (FailureType.RUNTIME_ERROR, "division by zero"),
        (FailureType.RUNTIME_ERROR, "outer\nof two lines"),
        (FailureType.UNKNOWN, "app: disk is full"),
        (FailureType.UNKNOWN, "app: giving up"),
    ]
    first = failures[0]
    assert Path(first.file_path or "").name == Path(__file__).name
    assert first.line_number is not None
    assert first.function_name == "<lambda>"
    assert first.source == "log"


def test_since_leaves_out_what_is_older(tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    lines = [
        "2026-01-01 10:00:00,123 ERROR old",
        "2026-01-02T10:00:00.5Z ERROR middle",
        "2026-01-03 10:00:00+00:00 [ERROR] new",
        "Traceback (most recent call last):",
        '  File "a.py", line 3, in f',
        "KeyError: 1",
        "no time here, ERROR last",
    ]
    log.write_text("\n".join(lines))

    def messages(since: Any) -> list[str]:
        return [each.error_message for each in FailureDetector(tmp_path).scan_logs(log, since)]

    assert messages(None) == ["old", "middle", "1", "last"]
    assert messages(datetime(2026, 1, 2, 9, tzinfo=UTC)) == ["middle", "1", "last"]
    assert messages("2026-01-03T09:00:00+00:00") == ["1", "last"]
    assert messages(datetime.now(UTC) + timedelta(days=1)) == []


@pytest.mark.parametrize("since", ["soon", 5])
def test_a_time_that_is_none_is_refused(log: Path, since: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"since is .* must be a datetime"):
        FailureDetector(log.parent).scan_logs(log, since)


# --- executions ------------------------------------------------------------------------------------


def test_the_history_of_an_execution_has_its_failed_attempts(tmp_path: Path) -> None:
    def work() -> None:
        raise KeyError("colour")

    executor = PersonaExecutor(persona_id="writer").options(max_attempts=2, retry_on=lambda _: 0)
    with pytest.raises(UnrecoverableError) as caught:
        execute(executor, work)
    result = execute(executor.options(max_attempts=3), Body(TypeError("wrong"), "done"))
    history = tmp_path / "history.json"
    history.write_text(json.dumps([caught.value.result.to_dict(), result.to_dict()]))
    failures = FailureDetector(tmp_path).scan_execution_history(history)
    assert [(each.failure_type, each.error_message) for each in failures] == [
        (FailureType.KEY_ERROR, "'colour'"),  # twice, and told once
        (FailureType.TYPE_ERROR, "wrong"),
    ]
    first = failures[0]
    assert (Path(first.file_path or "").name, first.function_name) == (Path(__file__).name, "work")
    assert (first.source, first.context["attempt_number"]) == ("execution", 1)


@pytest.mark.parametrize("text", ["{", "[1,", "", '{"a": NaN}', '{"a": 1, "a": 2}'])
@pytest.mark.parametrize("scan", ["scan_execution_history", "scan_pytest_json"])
def test_what_is_not_json_is_refused_by_name(tmp_path: Path, scan: str, text: str) -> None:
    path = tmp_path / "odd.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"odd\.json cannot be scanned .*JSON"):
        getattr(FailureDetector(tmp_path), scan)(path)


@pytest.mark.parametrize("tree", [[], 5, {"tests": 5}, {"tests": [5, {"call": 7}]}, {}])
def test_odd_json_is_no_crash(tmp_path: Path, tree: Any) -> None:
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(tree))
    detector = FailureDetector(tmp_path)
    assert detector.scan_execution_history(path) == []
    if isinstance(tree, dict) and tree.get("tests") != 5:
        assert detector.scan_pytest_json(path) == []
    else:
        with pytest.raises(ConfigurationError, match="no JSON report of pytest"):
            detector.scan_pytest_json(path)


@pytest.mark.parametrize(
    "scan", ["scan_pytest", "scan_pytest_json", "scan_logs", "scan_execution_history"]
)
def test_a_file_that_is_missing_is_named(tmp_path: Path, scan: str) -> None:
    with pytest.raises(ConfigurationError, match=r"gone\.txt cannot be scanned for failures"):
        getattr(FailureDetector(tmp_path), scan)(tmp_path / "gone.txt")


# --- what was found --------------------------------------------------------------------------------


@pytest.fixture
def detector(tmp_path: Path) -> FailureDetector:
    made = FailureDetector(str(tmp_path))
    for error in (KeyError("a"), SyntaxError("b"), KeyError("c"), KeyError("a")):
        made.scan_exception(error)
    return made


def test_failures_by_severity_and_by_type(detector: FailureDetector) -> None:
    assert {key: len(found) for key, found in detector.get_failures_by_severity().items()} == {
        Severity.CRITICAL: 1,
        Severity.MEDIUM: 2,
    }
    assert list(detector.get_failures_by_severity()) == [Severity.CRITICAL, Severity.MEDIUM]
    assert {key: len(found) for key, found in detector.get_failures_by_type().items()} == {
        FailureType.SYNTAX_ERROR: 1,
        FailureType.KEY_ERROR: 2,
    }


def test_reports_as_text_and_as_json(detector: FailureDetector) -> None:
    assert detector.generate_report().splitlines() == [
        "3 failures",
        "",
        "CRITICAL: 1",
        "  SYNTAX_ERROR exception: b",
        "",
        "MEDIUM: 2",
        "  KEY_ERROR exception: 'a'",
        "  KEY_ERROR exception: 'c'",
    ]
    assert detector.generate_report("text") == detector.generate_report()
    report = json.loads(detector.generate_report("json"))
    assert report["total"] == 3
    assert report["by_severity"] == {"critical": 1, "medium": 2}
    assert report["by_type"] == {"syntax_error": 1, "key_error": 2}
    assert [each["error_message"] for each in report["failures"]] == ["'a'", "b", "'c'"]
    with pytest.raises(ConfigurationError, match="'text' or 'json'"):
        detector.generate_report("xml")


def test_clear_forgets(detector: FailureDetector) -> None:
    detector.clear()
    assert detector.failures == []
    assert detector.get_failures_by_severity() == {}
    assert detector.get_failures_by_type() == {}


def test_without_a_workspace_it_is_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert FailureDetector().workspace_root == tmp_path.resolve()
