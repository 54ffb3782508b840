"""Healers: each proposes a fix for the types of failures that it handles.

To add one: a class with ``name``, ``handles`` and ``propose``, and its place in ``DEFAULT_HEALERS``.
One that handles only some failures of a type has ``suits`` as well.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Protocol

from maestro_hive.engine.healing.failure import Failure, FailureType, Fix
from maestro_hive.engine.retry_policy import MAX_RETRY_AFTER_SECONDS
from maestro_hive.kernel.redaction import cut

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from pathlib import Path

    from maestro_hive.engine.healing.workspace import Workspace

#: How many lines around a failure are shown.
_AROUND = 3
#: How much of a message is repeated.
_MAX_MESSAGE = 1_000


class Healer(Protocol):
    """Proposes fixes for failures of some types.

    It may have a ``name`` (otherwise its class is its name), and ``suits(failure)``, which returns
    whether it has anything to say about a failure of its types.
    """

    @property
    def handles(self) -> frozenset[FailureType]:
        """The types of failures that it is asked about."""
        ...

    def propose(self, failure: Failure, workspace: Workspace) -> Fix | Awaitable[Any] | None:
        """Return a fix, or None if it has none; it changes nothing itself."""
        ...


def name_of(healer: Healer) -> str:
    """Return what a healer is called in records, and in ``disabled_healers``."""
    name = getattr(healer, "name", None)
    return name if isinstance(name, str) and name else type(healer).__name__


def suits(healer: Healer, failure: Failure) -> bool:
    """Return whether a healer is asked about a failure."""
    if failure.failure_type not in healer.handles:
        return False
    check = getattr(healer, "suits", None)
    try:
        return check is None or bool(check(failure))
    except Exception:  # noqa: BLE001 - a healer may be the user's own
        return True  # what it raises is told when it is asked


# --- what the persona wrote ------------------------------------------------------------------------


class SyntaxHealer:
    """Says where source does not parse, and shows the line with a caret."""

    name = "syntax"
    handles = frozenset({FailureType.SYNTAX_ERROR})

    def propose(self, failure: Failure, workspace: Workspace) -> Fix | None:
        """Return what to tell who wrote the source."""
        where = _where(failure)
        text = f"Python cannot parse the source{where}: {_message(failure)}"
        shown = _shown_lines(failure, workspace)
        if shown:
            text = f"{text}\n{shown}"
        text += "\nReturn the whole source again, with this corrected and nothing else around it."
        return Fix("say where the source does not parse", feedback=text)


class TestFailureHealer:
    """Says which test failed, where, and by which assertion."""

    #: It is no test itself, for those who import it into one.
    __test__ = False
    name = "test_failure"
    handles = frozenset({FailureType.TEST_FAILURE, FailureType.ASSERTION_ERROR})

    def propose(self, failure: Failure, workspace: Workspace) -> Fix | None:
        """Return what to tell who wrote the code."""
        text = _told_by_pytest(failure, workspace.root) or self._told(failure, workspace)
        text += "\nChange the code that is tested, and not the test, so that it passes."
        return Fix("say which test failed, and how", feedback=text)

    def _told(self, failure: Failure, workspace: Workspace) -> str:
        test = failure.context.get("nodeid") or failure.context.get("test") or failure.function_name
        what = f"The test {test} failed" if test else "A check failed"
        text = f"{what}{_where(failure)}: {_message(failure)}"
        shown = _shown_lines(failure, workspace)
        return f"{text}\n{shown}" if shown else text


def _told_by_pytest(failure: Failure, root: Path) -> str:
    """Return the failures in the output of pytest, if that is what the message is."""
    if "\n" not in failure.error_message:
        return ""
    from maestro_hive.engine.healing.pytest_text import failures_in

    found, lines = failures_in(failure.error_message, root), []
    for each in found[:5]:
        name = each.context.get("nodeid") or each.context.get("test") or each.function or "a test"
        place = f" in line {each.line} of {each.path}" if each.line and each.path else ""
        error = f"{each.error}: {each.message}" if each.error else each.message
        lines.append(f"The test {name} failed{place}: {cut(error.strip(), _MAX_MESSAGE)}")
    return "\n".join(lines)


class MissingModuleHealer:
    """Says which module is not there; it installs nothing."""

    name = "missing_module"
    handles = frozenset({FailureType.IMPORT_ERROR})

    def propose(self, failure: Failure, workspace: Workspace) -> Fix | None:
        """Return what to tell who wrote the import."""
        del workspace
        module = _missing_module(failure)
        what = f"The module {module!r} is not installed here" if module else "An import failed"
        text = (
            f"{what}{_where(failure)}: {_message(failure)}\nNothing is installed for you: do without"
            " it, with the standard library or with a module that is imported elsewhere already."
        )
        return Fix("say which module is not installed", feedback=text)


def _missing_module(failure: Failure) -> str | None:
    name = getattr(failure.error, "name", None)
    if isinstance(name, str) and name and "ModuleNotFoundError" in _error_types(failure):
        return name
    found = re.search(r"No module named '?([\w.]+)", failure.error_message)
    return found[1] if found else None


class JsonHealer:
    """Says where JSON does not parse, and shows the place with a caret."""

    name = "json"
    handles = frozenset({FailureType.RUNTIME_ERROR})

    def suits(self, failure: Failure) -> bool:
        """Return whether it is about JSON that does not parse."""
        known = ("JSONDecodeError", "DecodeError")
        message = failure.error_message
        return any(name in _error_types(failure) for name in known) or "Invalid JSON" in message

    def propose(self, failure: Failure, workspace: Workspace) -> Fix | None:
        """Return what to tell who wrote the JSON."""
        del workspace
        text = f"The JSON does not parse: {_message(failure)}"
        line, column = failure.context.get("source_line"), failure.context.get("column")
        if isinstance(line, str) and isinstance(column, int):
            text += f"\n  {line}\n  {_caret(line, column)}"
        text += "\nReturn the whole JSON again, corrected, and nothing before or after it."
        return Fix("say where the JSON does not parse", feedback=text)


class ResultTypeHealer:
    """Says in what a result is not of the type that the step declares."""

    name = "result_type"
    handles = frozenset({FailureType.TYPE_ERROR, FailureType.RUNTIME_ERROR})

    def suits(self, failure: Failure) -> bool:
        """Return whether a result, or what it is made of, was refused by its declared type."""
        found = {"ResultTypeError", "ValidationError"} & set(_error_types(failure))
        return bool(found) and "Invalid JSON" not in failure.error_message

    def propose(self, failure: Failure, workspace: Workspace) -> Fix | None:
        """Return what to tell who made the result."""
        del workspace
        text = f"The result is not of the declared type: {_message(failure)}"
        problems = getattr(failure.error, "problems", None)
        if isinstance(problems, list) and len(problems) > 1:
            text += "".join(f"\n- {each}" for each in problems)
        schema = getattr(failure.error, "schema", None)
        if isinstance(schema, str):
            text += f"\nThe JSON Schema is {schema}"
        text += "\nReturn the whole result again, with these places corrected."
        return Fix("say in what the result is not of its declared type", feedback=text)


# --- what the other side says ----------------------------------------------------------------------

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION = (
    r"\d+(?:\.\d+)?\s*"
    r"(?:ms|milliseconds?|s|secs?|seconds?|m|mins?|minutes?|h|hrs?|hours?|d|days?)\b"
)
_DURATIONS = rf"{_DURATION}(?:[\s,]*(?:and\s+)?{_DURATION})*|(?:\d+(?:\.\d+)?(?:h|ms?|s))+\b"
_TOLD_TO_WAIT = re.compile(
    r"(?:try(?:ing)?\s+again|retry(?:ing)?|wait(?:ing)?|reset\w*|available)\W+(?:again\W+)?"
    rf"(?:(?:in|after|for|at\s+least|about)\W+)*({_DURATIONS})",
    re.IGNORECASE,
)
_RATE_LIMITED = re.compile(r"rate.?limit|too many requests|\b429\b|overloaded", re.IGNORECASE)


class RateLimitHealer:
    """Waits for as long as the message of a rate limit says."""

    name = "rate_limit"
    handles = frozenset(FailureType)

    def suits(self, failure: Failure) -> bool:
        """Return whether it is a rate limit that says in its message for how long."""
        limited = failure.context.get("error_category") == "RATE_LIMIT"
        if not limited and not _RATE_LIMITED.search(failure.error_message):
            return False
        return told_wait(failure.error_message) is not None

    def propose(self, failure: Failure, workspace: Workspace) -> Fix | None:
        """Return the wait."""
        del workspace
        seconds = told_wait(failure.error_message)
        return None if seconds is None else Fix(f"wait for {seconds:g} s, as told", wait=seconds)


def told_wait(message: str) -> float | None:
    """Return the seconds that a message says to wait, as in "try again in 1m20s"; None if it does not."""
    found = _TOLD_TO_WAIT.search(message)
    if found is None:
        return None
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([a-z]+)", found[1], re.IGNORECASE)
    seconds = sum(float(number) * _UNITS[_unit(unit)] for number, unit in parts)
    return seconds if 0 < seconds <= MAX_RETRY_AFTER_SECONDS else None


def _unit(word: str) -> str:
    small = word.lower()
    return "ms" if small.startswith(("ms", "milli")) else small[0]


_TOO_LONG = re.compile(
    r"context.?(?:length|window)|maximum.{0,20}(?:tokens|length)|prompt is too long"
    r"|input is too long|too many (?:input |output )?tokens|string too long|max_(?:output_)?tokens"
    r"|finish_reason\W+length|stop_reason\W+max_tokens|(?:answer|output|response) was cut",
    re.IGNORECASE,
)
_ANSWER = re.compile(
    r"max_(?:output_|completion_)?tokens|finish_reason|stop_reason|was cut|output tokens",
    re.IGNORECASE,
)


class TooLongHealer:
    """Asks for less where an answer or a context was too long."""

    name = "too_long"
    handles = frozenset({FailureType.RUNTIME_ERROR, FailureType.UNKNOWN})

    def suits(self, failure: Failure) -> bool:
        """Return whether it is about a length in tokens."""
        return bool(_TOO_LONG.search(failure.error_message))

    def propose(self, failure: Failure, workspace: Workspace) -> Fix | None:
        """Return what to leave out, in numbers where the message has them."""
        del workspace
        message = _message(failure)
        is_context = re.search(r"context|prompt|input", message, re.IGNORECASE)
        if _ANSWER.search(message) and not is_context:
            what = "The answer was too long, and was cut off"
            do = "Answer in less: shorter, or only the first part of it, said so."
        else:
            what = "The context was too long"
            do = "Give it less: leave out or summarise the oldest and longest parts of the input."
        share = _excess(message)
        if share is not None:
            do += f" At least {share} % has to go."
        return Fix("ask for less", feedback=f"{what}: {message}\n{do}")


def _excess(message: str) -> int | None:
    """Return how many percent of the tokens are too many, if a message has both numbers."""
    texts = re.findall(r"\d[\d,_]*", message)
    numbers = sorted({number for each in texts if (number := int(re.sub(r"\D", "", each))) >= 100})
    if len(numbers) != 2:
        return None
    most, had = numbers
    return max(1, -(-(had - most) * 100 // had))


#: What an engine has by default, in the order in which they are asked.
DEFAULT_HEALERS: tuple[Healer, ...] = (
    SyntaxHealer(),
    TestFailureHealer(),
    MissingModuleHealer(),
    RateLimitHealer(),
    TooLongHealer(),
    JsonHealer(),
    ResultTypeHealer(),
)


# --- texts -----------------------------------------------------------------------------------------


def _error_types(failure: Failure) -> list[str]:
    """Return the names of the error's classes, without their modules."""
    known = failure.context.get("error_types")
    names = known if isinstance(known, list) else []
    return [str(name).rpartition(".")[2] for name in names]


def _message(failure: Failure) -> str:
    return cut(failure.error_message.strip(), _MAX_MESSAGE)


def _where(failure: Failure) -> str:
    line = f" in line {failure.line_number}" if failure.line_number else ""
    return f"{line} of {failure.file_path}" if failure.file_path else line


def _shown_lines(failure: Failure, workspace: Workspace) -> str:
    """Return the lines around a failure, with a mark at its own; empty if they are not known."""
    number = failure.line_number
    if not number:
        return ""
    source = workspace.text_of(failure.file_path)
    first = max(1, number - _AROUND)
    lines = source.splitlines()[first - 1 : number + _AROUND] if source is not None else []
    known = failure.context.get("source_line")
    if not lines and isinstance(known, str):
        first, lines = number, [known]
    shown: list[str] = []
    column = failure.context.get("column")
    for at, line in enumerate(lines, first):
        shown.append(f"{'>' if at == number else ' '} {at:4} {line}")
        if at == number and isinstance(column, int):
            shown.append(f"       {_caret(line, column)}")
    return "\n".join(shown)


def _caret(line: str, column: int) -> str:
    """Return a caret for below a line; tabs stay, so that it stands in its column."""
    before = line[: max(0, column - 1)].ljust(max(0, column - 1))
    return f"{''.join(each if each == chr(9) else ' ' for each in before)}^"
