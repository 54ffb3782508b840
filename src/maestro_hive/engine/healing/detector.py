"""Finds failures: in the output of pytest, in its JSON report, in logs and in recorded executions."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maestro_hive.engine.healing import log_text, pytest_text
from maestro_hive.engine.healing.failure import (
    Failure,
    FailureType,
    Severity,
    failure_of_error,
    relative,
    severity_of,
    type_named,
    unique,
)
from maestro_hive.engine.settings import refused
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import ConfigurationError, DecodeError
from maestro_hive.maestro.state import strict_json

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

    from maestro_hive.engine.healing.pytest_text import Found

#: How deep a report may be nested.
_DEPTH = 200


class FailureDetector:
    """Turns what tests, logs and executions left behind into failures, each once.

    Paths below ``workspace_root``, by default the current folder, are shown relative to it. A scan
    returns what it found, and adds to ``failures`` what was not there yet.
    """

    def __init__(self, workspace_root: str | os.PathLike[str] | None = None) -> None:
        self.workspace_root = Path(workspace_root or Path.cwd()).resolve()
        self.failures: list[Failure] = []

    # --- scans ---

    def scan_pytest(self, path: str | os.PathLike[str]) -> list[Failure]:
        """Return the failures in a file with the output of pytest."""
        found = pytest_text.failures_in(_text(path), self.workspace_root)
        return self._add(self._failure(each, "pytest") for each in found)

    def scan_pytest_json(self, path: str | os.PathLike[str]) -> list[Failure]:
        """Return the failures in a JSON report of pytest, as ``pytest-json-report`` writes it."""
        report = _json(path)
        if not isinstance(report, dict) or not isinstance(report.get("tests", []), list):
            raise ConfigurationError(
                f"{path} is no JSON report of pytest: it has no list of tests; write one with"
                " `pytest --json-report --json-report-file=FILE`"
            )
        found = pytest_text.failures_in_report(report, self.workspace_root)
        return self._add(self._failure(each, "pytest") for each in found)

    def scan_logs(
        self, path: str | os.PathLike[str], since: datetime | str | None = None
    ) -> list[Failure]:
        """Return the tracebacks and the errors in a log; ``since`` leaves out older ones.

        A time without zone is one of this machine.
        """
        found = log_text.failures_in(_text(path), _moment(since))
        return self._add(self._failure(each, "log") for each in found)

    def scan_execution_history(self, path: str | os.PathLike[str]) -> list[Failure]:
        """Return the failed attempts in a JSON file: results, an ``execution_state.json``, or a list.

        Every object with an ``error_message`` counts, however deep it is.
        """
        return self._add(map(self._failed_attempt, _failed_attempts(_json(path))))

    def scan_exception(self, error: BaseException, source: str = "exception") -> list[Failure]:
        """Return an exception as a failure."""
        return self._add([failure_of_error(error, source=source, root=self.workspace_root)])

    def _add(self, found: Iterator[Failure] | list[Failure]) -> list[Failure]:
        failures = unique(found)
        self.failures = unique([*self.failures, *failures])
        return failures

    def _failure(self, found: Found, source: str) -> Failure:
        in_test = source == "pytest"
        otherwise = FailureType.TEST_FAILURE if in_test else FailureType.RUNTIME_ERROR
        if not in_test and found.error is None:
            otherwise = FailureType.UNKNOWN
        kind = type_named(found.error, otherwise)
        made = Failure(
            failure_id="",
            failure_type=kind,
            error_message=found.message,
            stack_trace=found.trace,
            file_path=relative(found.path, self.workspace_root),
            line_number=found.line,
            function_name=found.function,
            severity=severity_of(kind),
            source=source,
            context=found.context,
        )
        made.failure_id = made.get_hash()
        return made

    def _failed_attempt(self, attempt: Mapping[str, Any]) -> Failure:
        error, trace = attempt.get("error_type"), attempt.get("error_traceback")
        name = error if isinstance(error, str) else None
        text = trace if isinstance(trace, str) else None
        path, line, function = log_text.last_place(text or "")
        known = ("attempt_id", "attempt_number", "status", "persona_id", "task_name")
        found = pytest_text.Found(
            error=name,
            message=str(attempt["error_message"]),
            trace=text,
            path=path,
            line=line,
            function=function,
            context={each: attempt[each] for each in known if each in attempt},
        )
        return self._failure(found, "execution")

    # --- what was found ---

    def get_failures_by_severity(self) -> dict[Severity, list[Failure]]:
        """Return the failures by severity, the most severe first."""
        return {
            severity: found
            for severity in Severity
            if (found := [each for each in self.failures if each.severity == severity])
        }

    def get_failures_by_type(self) -> dict[FailureType, list[Failure]]:
        """Return the failures by type."""
        return {
            kind: found
            for kind in FailureType
            if (found := [each for each in self.failures if each.failure_type == kind])
        }

    def generate_report(self, format: str = "text") -> str:  # noqa: A002 - as callers know it
        """Return a report of all failures, as ``text`` or ``json``."""
        check_format(format)
        by_severity = self.get_failures_by_severity()
        if format == "json":
            report = {
                "total": len(self.failures),
                "by_severity": {str(each): len(found) for each, found in by_severity.items()},
                "by_type": {
                    str(each): len(found) for each, found in self.get_failures_by_type().items()
                },
                "failures": [each.to_dict() for each in self.failures],
            }
            return json.dumps(report, indent=2)
        count = len(self.failures)
        lines = [f"{count} failure" if count == 1 else f"{count} failures"]
        for severity, found in by_severity.items():
            lines += ["", f"{severity.name}: {len(found)}"]
            lines += [f"  {describe(each)}" for each in found]
        return "\n".join(lines)

    def clear(self) -> None:
        """Forget what was found."""
        self.failures = []


def describe(failure: Failure) -> str:
    """Return a failure in one line."""
    where = failure.file_path or failure.source
    if failure.line_number:
        where = f"{where}:{failure.line_number}"
    function = f" in {failure.function_name}" if failure.function_name else ""
    message = (failure.error_message.splitlines() or [""])[0]
    return f"{str(failure.failure_type).upper()} {where}{function}: {message}"


def check_format(value: object) -> None:
    """Raise if there is no report of that format."""
    if value not in ("text", "json"):
        raise refused("the format of a report", value, "'text' or 'json'")


# --- files -----------------------------------------------------------------------------------------


def _text(path: str | os.PathLike[str]) -> str:
    return _read(path).decode("utf-8", "replace")


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        return files.read_whole(Path(path).resolve())
    except (OSError, TypeError, ValueError) as error:
        reason = files.reason_of(error) if not isinstance(error, TypeError) else str(error)
        raise ConfigurationError(
            f"{path} cannot be scanned for failures: {reason}; give the path of a file"
        ) from error


def _json(path: str | os.PathLike[str]) -> Any:
    data = _read(path)
    try:
        return strict_json.parse(data, str(path), depth=_DEPTH)
    except DecodeError as error:
        raise ConfigurationError(
            f"{path} cannot be scanned for failures: it is not JSON ({error.reason})"
        ) from error


def _failed_attempts(tree: Any) -> Iterator[Mapping[str, Any]]:
    waiting = [tree]
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict):
            if found.get("error_message") and not isinstance(found["error_message"], dict | list):
                yield found
            waiting.extend(reversed(list(found.values())))
        elif isinstance(found, list):
            waiting.extend(reversed(found))


def _moment(since: datetime | str | None) -> datetime | None:
    if since is None:
        return None
    try:
        given = datetime.fromisoformat(since) if isinstance(since, str) else since
        return given.astimezone()
    except (AttributeError, TypeError, ValueError) as error:
        raise refused("since", since, "a datetime, or its text as in ISO 8601") from error
