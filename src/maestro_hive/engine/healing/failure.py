"""What failed, and what became of it: the words that healing engines and their callers share."""

from __future__ import annotations

import hashlib
import json
import linecache
import re
import traceback
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maestro_hive.engine.errors import ExecutionException, RecoverableError, plain, text_of
from maestro_hive.engine.recorded_errors import is_hidden
from maestro_hive.kernel.redaction import cut, cut_start

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

#: How much of an error is told.
_MAX_MESSAGE = 2_000
_MAX_TRACE = 8_000
#: Deeper than calls can be: an error that is raised again and again has a frame for each time.
_MAX_FRAMES = 2_000
_MAX_LINE = 500
#: How many digits of a digest are a fingerprint.
_HASH_DIGITS = 16
#: Where the modules of Python are, with its separator.
_PYTHON = str(Path(linecache.__file__).parent / "_")[:-1]


class FailureType(StrEnum):
    """What kind of failure it is; healers are found by it."""

    #: A test failed, by none of the errors below.
    TEST_FAILURE = "test_failure"
    #: A module or a name in it was not found.
    IMPORT_ERROR = "import_error"
    ATTRIBUTE_ERROR = "attribute_error"
    TYPE_ERROR = "type_error"
    #: Source does not parse.
    SYNTAX_ERROR = "syntax_error"
    ASSERTION_ERROR = "assertion_error"
    NAME_ERROR = "name_error"
    KEY_ERROR = "key_error"
    INDEX_ERROR = "index_error"
    #: Another exception.
    RUNTIME_ERROR = "runtime_error"
    #: It is not known which exception it was.
    UNKNOWN = "unknown"


class Severity(StrEnum):
    """How much does not work because of it."""

    #: Nothing of the file works: it cannot be imported.
    CRITICAL = "critical"
    #: The code is wrong, whatever its input is.
    HIGH = "high"
    #: It fails for some input, or in a test.
    MEDIUM = "medium"
    #: Too little is known of it.
    LOW = "low"


_BY_NAME = {
    "SyntaxError": FailureType.SYNTAX_ERROR,
    "IndentationError": FailureType.SYNTAX_ERROR,
    "TabError": FailureType.SYNTAX_ERROR,
    "ImportError": FailureType.IMPORT_ERROR,
    "ModuleNotFoundError": FailureType.IMPORT_ERROR,
    "AttributeError": FailureType.ATTRIBUTE_ERROR,
    "TypeError": FailureType.TYPE_ERROR,
    "AssertionError": FailureType.ASSERTION_ERROR,
    "NameError": FailureType.NAME_ERROR,
    "UnboundLocalError": FailureType.NAME_ERROR,
    "KeyError": FailureType.KEY_ERROR,
    "IndexError": FailureType.INDEX_ERROR,
    "RuntimeError": FailureType.RUNTIME_ERROR,
    "RecursionError": FailureType.RUNTIME_ERROR,
    "NotImplementedError": FailureType.RUNTIME_ERROR,
    "Failed": FailureType.TEST_FAILURE,  # of pytest
}
_BY_CATEGORY = {
    "SYNTAX": FailureType.SYNTAX_ERROR,
    "TEST_FAILURE": FailureType.TEST_FAILURE,
    "ACC_VIOLATION": FailureType.TEST_FAILURE,
    "BDV_VIOLATION": FailureType.TEST_FAILURE,
}
_SEVERITIES = {
    FailureType.SYNTAX_ERROR: Severity.CRITICAL,
    FailureType.IMPORT_ERROR: Severity.CRITICAL,
    FailureType.ATTRIBUTE_ERROR: Severity.HIGH,
    FailureType.TYPE_ERROR: Severity.HIGH,
    FailureType.NAME_ERROR: Severity.HIGH,
    FailureType.RUNTIME_ERROR: Severity.HIGH,
    FailureType.TEST_FAILURE: Severity.MEDIUM,
    FailureType.ASSERTION_ERROR: Severity.MEDIUM,
    FailureType.KEY_ERROR: Severity.MEDIUM,
    FailureType.INDEX_ERROR: Severity.MEDIUM,
    FailureType.UNKNOWN: Severity.LOW,
}


def type_named(name: str | None, otherwise: FailureType) -> FailureType:
    """Return the type of an exception with that name, with or without its module."""
    return _BY_NAME.get((name or "").rpartition(".")[2], otherwise)


def severity_of(kind: FailureType) -> Severity:
    """Return how severe failures of a type are."""
    return _SEVERITIES[kind]


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass
class Failure:
    """One failure: what it is, where it was raised, and where it was found (``source``)."""

    failure_id: str
    failure_type: FailureType
    error_message: str
    stack_trace: str | None = None
    file_path: str | None = None
    line_number: int | None = None
    function_name: str | None = None
    severity: Severity = Severity.MEDIUM
    source: str = "unknown"
    context: dict[str, Any] = field(default_factory=dict)
    detected_at: datetime = field(default_factory=_now)

    def get_hash(self) -> str:
        """Return its fingerprint: the same for the same failure, wherever and whenever it is found.

        Of the message its first line counts, and of that no numbers or addresses; nor do line numbers:
        they change without it.
        """
        first = (str(self.error_message).strip().splitlines() or [""])[0]
        message = re.sub(r"0x[0-9a-fA-F]+|\d+", "#", first)
        parts = [str(self.failure_type), str(self.file_path), str(self.function_name), message]
        digest = hashlib.sha256("\0".join(parts).encode("utf-8", "backslashreplace"))
        return digest.hexdigest()[:_HASH_DIGITS]

    @property
    def error(self) -> BaseException | None:
        """The exception itself; None where only a text is known of it."""
        found: BaseException | None = self.__dict__.get("_error")
        return found

    @error.setter
    def error(self, error: BaseException | None) -> None:
        self.__dict__["_error"] = error

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON, with its fingerprint."""
        return {**_as_plain(self), "hash": self.get_hash()}


class HealingStatus(StrEnum):
    """How far a failure is healed."""

    #: Nothing was tried yet.
    PENDING = "pending"
    #: A fix is being looked for.
    IN_PROGRESS = "in_progress"
    #: The cause is repaired: the next attempt starts at once.
    FIXED = "fixed"
    #: There is a fix, or feedback, for a person to look at.
    AWAITING_REVIEW = "awaiting_review"
    #: A person accepted the fix.
    APPROVED = "approved"
    #: A person refused the fix.
    REJECTED = "rejected"
    #: There is no fix, and a ticket was made.
    JIRA_CREATED = "jira_created"
    #: There is no fix.
    FAILED = "failed"


@dataclass
class Fix:
    """What a healer proposes; ``confidence`` is how sure it is, from 0 to 1."""

    #: What it does, in a few words.
    description: str = ""
    confidence: float = 1.0
    #: What the next attempt should know.
    feedback: str | None = None
    #: Arguments that the next attempt is called with, by name, in place of its own.
    arguments: dict[str, Any] = field(default_factory=dict)
    #: The new text of files, by their path in the workspace.
    files: dict[str, str] = field(default_factory=dict)
    #: Returns whether the changed files work; otherwise they are restored.
    check: Callable[[], bool] | None = None
    #: The healer that proposed it.
    healer: str = ""
    #: After how many seconds the next attempt starts; without it, at once or as the backoff says.
    wait: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON; of changed files, their paths."""
        return {**_as_plain(self, ("check", "files")), "files": sorted(self.files)}


@dataclass
class HealingResult:
    """What became of one failure."""

    failure: Failure
    fix: Any
    status: HealingStatus
    jira_ticket: str | None = None
    feedback: str | None = None
    duration_ms: float = 0
    attempts: int = 1
    error_message: str | None = None
    timestamp: datetime = field(default_factory=_now)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        parts = {name: getattr(self, name) for name in ("failure", "fix")}
        made = {
            name: part.to_dict() if isinstance(part, Failure | Fix) else plain(part)
            for name, part in parts.items()
        }
        return {**_as_plain(self, tuple(parts)), **made}


def _as_plain(record: Any, without: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        each.name: plain(getattr(record, each.name))
        for each in fields(record)
        if each.name not in without
    }


# --- of an exception -------------------------------------------------------------------------------


def failure_of_error(
    error: BaseException,
    *,
    failure_id: str | None = None,
    source: str = "exception",
    context: dict[str, Any] | None = None,
    root: Path | None = None,
    trace: str | None = None,
) -> Failure:
    """Return an exception as a failure: where the user's own code raised it, and with what.

    ``trace`` is its traceback where that is at hand: to format one takes longer than all the rest.
    """
    kind = _type_of(error)
    path, line, function = _place(error)
    known = dict(context or {})
    if isinstance(error, ExecutionException) and error.context:
        known.setdefault("details", error.context)
    for name, value in _source_facts(error, path, line).items():
        known.setdefault(name, value)
    known.setdefault("error_types", [class_name(each) for each in type(error).__mro__])
    made = Failure(
        failure_id="",
        failure_type=kind,
        error_message=cut(text_of(error) or type(error).__name__, _MAX_MESSAGE),
        stack_trace=_trace(error) if trace is None else trace,
        file_path=relative(path, root),
        line_number=line,
        function_name=function,
        severity=severity_of(kind),
        source=source,
        context=known,
    )
    made.failure_id = failure_id or made.get_hash()
    made.error = error
    return made


def class_name(kind: type) -> str:
    """Return what a class is called in ``context["error_types"]`` of a failure."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _source_facts(error: BaseException, path: str | None, line: int | None) -> dict[str, Any]:
    """Return the line of source that an error is about, and the column, as far as it names them."""
    parsed = error if isinstance(error, SyntaxError) else error.__cause__
    found: dict[str, Any] = {}
    if isinstance(parsed, SyntaxError) and isinstance(parsed.text, str):
        found["source_line"] = parsed.text.rstrip()[:_MAX_LINE]
        if isinstance(parsed.offset, int) and parsed.offset > 0:
            found["column"] = parsed.offset
    elif isinstance(error, json.JSONDecodeError):
        lines = error.doc.splitlines()
        text = lines[error.lineno - 1] if 0 < error.lineno <= len(lines) else ""
        first = max(0, error.colno - _MAX_LINE // 2)  # a document may be one long line
        found["source_line"] = text[first : first + _MAX_LINE]
        found["column"] = error.colno - first
    elif isinstance(error, AssertionError) and path and line:
        text = linecache.getline(path, line).rstrip()
        if text:
            found["source_line"] = text[:_MAX_LINE]
    return found


# --- what is recorded of a failure -----------------------------------------------------------------

#: What of a failure's context is recorded with it, where it is there.
_RECORDED = ("source_line", "column", "error_types", "error_category")


def diagnosis_of(failure: Failure) -> dict[str, Any]:
    """Return what is recorded of a failure, besides its error."""
    context = {name: plain(failure.context[name]) for name in _RECORDED if name in failure.context}
    facts = {
        "type": str(failure.failure_type),
        "fingerprint": failure.get_hash(),
        "file": failure.file_path,
        "line": failure.line_number,
        "function": failure.function_name,
        "context": context or None,
    }
    return {name: value for name, value in facts.items() if value is not None}


def recorded_failure(
    error: Mapping[str, Any], diagnosis: Mapping[str, Any], made: BaseException | None
) -> Failure:
    """Return a failure as it was before its process died: of what is recorded of it."""
    kind = type_of_value(str(diagnosis.get("type")))
    failure = Failure(
        failure_id="",
        failure_type=kind,
        error_message=str(error.get("message", "")),
        stack_trace=error.get("traceback"),
        file_path=diagnosis.get("file"),
        line_number=diagnosis.get("line"),
        function_name=diagnosis.get("function"),
        severity=severity_of(kind),
        context=dict(diagnosis.get("context") or {}),
    )
    failure.error = made
    return failure


def type_of_value(value: str) -> FailureType:
    """Return the type with that value; UNKNOWN if there is none, as of a later version."""
    try:
        return FailureType(value)
    except ValueError:
        return FailureType.UNKNOWN


def _type_of(error: BaseException) -> FailureType:
    if isinstance(error, RecoverableError):
        given = _BY_CATEGORY.get(text_of(error.error_category).upper())
        if given is not None:
            return given
    names = [kind.__name__ for kind in type(error).__mro__]
    found = (_BY_NAME[name] for name in names if name in _BY_NAME)
    return next(found, FailureType.RUNTIME_ERROR)


def _place(error: BaseException) -> tuple[str | None, int | None, str | None]:
    """Return the file, the line and the function that an error names, or was raised in."""
    if isinstance(error, SyntaxError) and isinstance(error.filename, str) and error.filename:
        return error.filename, error.lineno if isinstance(error.lineno, int) else None, None
    path = line = function = None
    trace = error.__traceback__
    own = False
    while trace is not None:
        code = trace.tb_frame.f_code
        # Lines of ours, of Python and of packages move with their versions.
        is_own = not is_library(code.co_filename)
        if not is_hidden(trace.tb_frame) and (is_own or not own):
            path, line, function = code.co_filename, trace.tb_lineno, code.co_name
            own = own or is_own
        trace = trace.tb_next
    if isinstance(error, RecoverableError) and error.file_path is not None:
        return str(error.file_path), error.line_number, None
    if isinstance(error, RecoverableError) and error.line_number is not None:
        return None, error.line_number, None
    return path, line, function


@lru_cache(maxsize=1_000)  # asked for every frame of every error
def is_library(path: str) -> bool:
    """Return whether a file is one of Python or of an installed package."""
    parts = Path(path).parts
    return (
        path.startswith((_PYTHON, "<frozen "))
        or "site-packages" in parts
        or "dist-packages" in parts
    )


def _trace(error: BaseException) -> str:
    try:
        lines = traceback.format_exception(error, limit=-_MAX_FRAMES)
        return cut_start("".join(lines), _MAX_TRACE)
    except Exception:  # noqa: BLE001 - an error of the user's making
        return text_of(error)


def relative(path: str | None, root: Path | None) -> str | None:
    """Return a path as it is called inside the workspace; others as they are."""
    if path is None or root is None:
        return path
    try:
        return Path(path).relative_to(root).as_posix()
    except ValueError:
        return path


def unique(failures: Iterable[Failure]) -> list[Failure]:
    """Return the failures, the first one of each fingerprint."""
    found: dict[str, Failure] = {}
    for each in failures:
        found.setdefault(each.get_hash(), each)
    return list(found.values())
