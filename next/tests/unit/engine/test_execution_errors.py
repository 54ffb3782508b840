"""How an execution ends badly: facts as attributes, texts that help, copies that lose nothing."""

from __future__ import annotations

import copy
import json
import math
import multiprocessing
import pickle
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from maestro_hive.engine import errors as exceptions
from maestro_hive.engine.config import ErrorCategory, RecoveryStrategy
from maestro_hive.engine.errors import (
    CircuitBreakerOpen,
    ExecutionException,
    FailureReport,
    GovernanceViolation,
    HelpNeeded,
    RecoverableError,
    TokenBudgetExceeded,
    UnrecoverableError,
)
from maestro_hive.kernel.errors import MaestroError
from tests.tables import for_each

if TYPE_CHECKING:
    from collections.abc import Callable

REPORT = FailureReport("developer", "TIMEOUT", "no answer in 300 s", ["line 1"], 3, False, "wait")
CONTEXT = {"execution_id": "e1"}

#: Each with every argument, in the documented order, and the added ones by name.
FULL: list[tuple[type[ExecutionException], dict[str, Any], dict[str, Any]]] = [
    (ExecutionException, {"message": "m", "context": CONTEXT}, {}),
    (
        RecoverableError,
        {
            "message": "m",
            "error_category": "SYNTAX",
            "file_path": "a.py",
            "line_number": 12,
            "context": CONTEXT,
        },
        {"retry_after": 2.5},
    ),
    (
        UnrecoverableError,
        {
            "message": "m",
            "failure_report": REPORT,
            "original_error": ValueError("bad"),
            "context": CONTEXT,
        },
        {},
    ),
    (
        HelpNeeded,
        {
            "message": "m",
            "failure_report": REPORT,
            "total_attempts": 6,
            "suggested_actions": ["look at the log"],
            "context": CONTEXT,
        },
        {"jira_ticket": "MD-1"},
    ),
    (
        CircuitBreakerOpen,
        {"message": "m", "consecutive_failures": 5, "cooldown_seconds": 300, "context": CONTEXT},
        {},
    ),
    (
        TokenBudgetExceeded,
        {
            "message": "m",
            "persona_id": "developer",
            "tokens_used": 100_001,
            "budget_limit": 100_000,
            "context": CONTEXT,
        },
        {},
    ),
    (
        GovernanceViolation,
        {
            "message": "m",
            "violation_type": "forbidden_tool",
            "path": "/etc/passwd",
            "tool_name": "sudo",
            "agent_id": "a1",
            "context": CONTEXT,
        },
        {},
    ),
]
#: Each with as little as it needs, and what the rest is then.
SPARSE: list[tuple[ExecutionException, dict[str, Any]]] = [
    (ExecutionException("m"), {"context": {}}),
    (
        RecoverableError("m"),
        {
            "error_category": "UNKNOWN",
            "file_path": None,
            "line_number": None,
            "context": {},
            "retry_after": None,
        },
    ),
    (UnrecoverableError("m"), {"failure_report": None, "original_error": None, "context": {}}),
    (
        HelpNeeded("m", REPORT),
        {"total_attempts": 0, "suggested_actions": [], "context": {}, "jira_ticket": None},
    ),
    (CircuitBreakerOpen("m", 5, 300), {"context": {}}),
    (TokenBudgetExceeded("m", "p", 2, 1), {"context": {}}),
    (
        GovernanceViolation("m", "t"),
        {"path": None, "tool_name": None, "agent_id": None, "context": {}},
    ),
]


def full_examples() -> list[ExecutionException]:
    return [kind(*arguments.values(), **added) for kind, arguments, added in FULL]


EXAMPLES = [*full_examples(), *(error for error, _ in SPARSE)]


def kind_name(value: object) -> str:
    return value.__name__ if isinstance(value, type) else type(value).__name__


# --- the tree --------------------------------------------------------------------------------


def tree_of(kind: type[ExecutionException]) -> set[str]:
    below = [each for each in kind.__subclasses__() if each.__module__ == exceptions.__name__]
    return {kind.__name__}.union(*map(tree_of, below))


def test_every_error_stands_in_the_tree_that_the_module_draws() -> None:
    assert exceptions.__doc__ is not None
    drawn = [
        line.strip("│├└─ ").split()[0] for line in exceptions.__doc__.splitlines() if "──" in line
    ]
    assert set(drawn) == tree_of(ExecutionException)
    assert len(drawn) == len(set(drawn))
    assert ExecutionException.__mro__[1] is MaestroError


# --- arguments and attributes ----------------------------------------------------------------


@for_each("kind, arguments, added", FULL, ids=kind_name)
def test_every_argument_is_an_attribute(
    kind: type[ExecutionException], arguments: dict[str, Any], added: dict[str, Any]
) -> None:
    by_position = kind(*arguments.values(), **added)
    by_name = kind(**arguments, **added)
    for error in (by_position, by_name):
        assert vars(error) == arguments | added
        assert error.args == ("m",)


@for_each("error, facts", SPARSE, ids=kind_name)
def test_arguments_that_are_not_given_have_their_defaults(
    error: ExecutionException, facts: dict[str, Any]
) -> None:
    assert {name: getattr(error, name) for name in facts} == facts


def test_no_two_errors_share_a_default() -> None:
    one, other = HelpNeeded("m", REPORT), HelpNeeded("m", REPORT)
    one.context["a"] = 1
    one.suggested_actions.append("a")
    assert (other.context, other.suggested_actions) == ({}, [])


def test_a_context_that_is_given_is_stored_even_if_it_is_empty() -> None:
    context: dict[str, Any] = {}
    assert ExecutionException("m", context).context is context


def test_an_error_category_may_be_a_member_or_its_text() -> None:
    assert RecoverableError("m", ErrorCategory.SYNTAX).error_category == "SYNTAX"
    assert RecoverableError("m", "SYNTAX").error_category == ErrorCategory.SYNTAX


# --- texts -----------------------------------------------------------------------------------

TEXTS = [
    (ExecutionException("It broke"), "It broke"),
    (RecoverableError("It broke"), "It broke"),
    (
        RecoverableError("It broke", "SYNTAX", "a.py", 12),
        "It broke (SYNTAX; a.py:12)",
    ),
    (RecoverableError("It broke", ErrorCategory.API_ERROR), "It broke (API_ERROR)"),
    (RecoverableError("It broke", file_path="a.py"), "It broke (a.py)"),
    (RecoverableError("It broke", line_number=3), "It broke (line 3)"),
    (
        RecoverableError("Slow down", "RATE_LIMIT", retry_after=30.0),
        "Slow down (RATE_LIMIT; retry after 30 s)",
    ),
    (UnrecoverableError("Gave up"), "Gave up"),
    (UnrecoverableError("Gave up", REPORT), "Gave up (TIMEOUT: no answer in 300 s)"),
    (
        UnrecoverableError("Gave up: no answer in 300 s", REPORT),
        "Gave up: no answer in 300 s (TIMEOUT)",
    ),
    (
        UnrecoverableError("Gave up: it died", FailureReport("developer", "UNKNOWN", "it died")),
        "Gave up: it died",
    ),
    (
        UnrecoverableError("Gave up", REPORT, ValueError("bad")),
        "Gave up (ValueError: bad)",
    ),
    (HelpNeeded("Help", REPORT), "Help (TIMEOUT: no answer in 300 s)"),
    (
        HelpNeeded("Help", REPORT, 6, ["rest", "retry"], jira_ticket="MD-1"),
        "Help (6 attempts; TIMEOUT: no answer in 300 s; ticket MD-1; try: rest, retry)",
    ),
    (HelpNeeded("Help", REPORT, 1), "Help (1 attempt; TIMEOUT: no answer in 300 s)"),
    (
        CircuitBreakerOpen("Circuit breaker is OPEN", 5, 300),
        "Circuit breaker is OPEN (failures in a row: 5; cooldown: 300 s)",
    ),
    (
        TokenBudgetExceeded("Spent", "developer", 100_001, 100_000),
        "Spent (persona developer; 100,001 of 100,000 tokens used)",
    ),
    (
        GovernanceViolation("Forbidden", "immutable_file", "/etc/passwd", "write", "a1"),
        "Forbidden (immutable_file; path /etc/passwd; tool write; agent a1)",
    ),
    (GovernanceViolation("Forbidden", "budget"), "Forbidden (budget)"),
]


@for_each("error, text", TEXTS)
def test_an_error_says_what_happened_and_what_is_known(
    error: ExecutionException, text: str
) -> None:
    assert str(error) == text
    assert error.message == text.partition(" (")[0]


def test_an_error_that_cannot_show_itself_is_described_all_the_same() -> None:
    class Mute(Exception):  # noqa: N818 - it is none of ours
        def __str__(self) -> NoReturn:
            raise RuntimeError

    error = UnrecoverableError("Gave up", original_error=Mute())
    assert "Mute" in str(error)
    assert "Mute" in error.to_dict()["original_error"]


# --- copies ----------------------------------------------------------------------------------


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def facts_of(error: ExecutionException) -> dict[str, Any]:
    """Its attributes, with errors among them as texts, since no two errors are equal."""
    return {
        name: repr(value) if isinstance(value, BaseException) else value
        for name, value in vars(error).items()
    }


@for_each("how", [copy.copy, copy.deepcopy, pickled])
@for_each("error", EXAMPLES, ids=kind_name)
def test_a_copy_has_the_same_type_text_and_facts(
    error: ExecutionException, how: Callable[[Any], Any]
) -> None:
    copied = how(error)
    assert copied is not error
    assert type(copied) is type(error)
    assert str(copied) == str(error)
    assert copied.args == error.args
    assert facts_of(copied) == facts_of(error)


def test_a_deep_copy_shares_nothing_and_a_shallow_one_shares_its_facts() -> None:
    error = ExecutionException("m", {"a": [1]})
    deep, shallow = copy.deepcopy(error), copy.copy(error)
    error.context["a"].append(2)
    assert (deep.context, shallow.context) == ({"a": [1]}, {"a": [1, 2]})


@for_each("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_pickle_protocol_works(protocol: int) -> None:
    error = HelpNeeded("m", REPORT, 6, jira_ticket="MD-1")
    copied = pickle.loads(pickle.dumps(error, protocol))
    assert (copied.failure_report, copied.jira_ticket) == (REPORT, "MD-1")


def test_an_error_of_a_user_that_derives_from_ours_survives_too() -> None:
    copied = pickled(TooLargeError(7))
    assert (type(copied), copied.size, str(copied)) == (TooLargeError, 7, "7 is too large")


class TooLargeError(RecoverableError):
    """An error with arguments of its own, as a user would write it."""

    def __init__(self, size: int) -> None:
        super().__init__(f"{size} is too large")
        self.size = size


def fail_with(number: int) -> NoReturn:
    raise full_examples()[number]


def test_a_worker_process_hands_its_errors_back() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        for number, expected in enumerate(full_examples()):
            with pytest.raises(ExecutionException) as caught:
                pool.apply(fail_with, (number,))
            assert type(caught.value) is type(expected)
            assert facts_of(caught.value) == facts_of(expected)


# --- as plain JSON ---------------------------------------------------------------------------


def test_a_report_has_its_documented_defaults() -> None:
    report = FailureReport("developer", "SYNTAX", "line 3")
    assert report.to_dict() == {
        "failed_persona": "developer",
        "error_category": "SYNTAX",
        "details": "line 3",
        "context": [],
        "attempt_number": 0,
        "recoverable": True,
        "suggested_fix": None,
    }
    report.context.append("x")
    assert FailureReport("developer", "SYNTAX", "line 3").context == []


def test_a_report_takes_its_fields_by_position_and_shows_all_of_them() -> None:
    assert list(REPORT.to_dict().values()) == [
        "developer", "TIMEOUT", "no answer in 300 s", ["line 1"], 3, False, "wait",
    ]  # fmt: skip


class Odd:
    def __repr__(self) -> NoReturn:
        raise RuntimeError


PLAIN: list[tuple[Any, Any]] = [
    (None, None),
    (True, True),
    (7, 7),
    (1.5, 1.5),
    (math.nan, "nan"),
    (-math.inf, "-inf"),
    ("text", "text"),
    ("\ud800", "\\ud800"),
    (ErrorCategory.TIMEOUT, "TIMEOUT"),
    (RecoveryStrategy.SKIP, "skip"),
    (Path("/a/b"), "/a/b"),
    (datetime(2030, 1, 2, 3, 4, tzinfo=UTC), "2030-01-02T03:04:00+00:00"),
    (date(2030, 1, 2), "2030-01-02"),
    (ValueError("bad"), "ValueError: bad"),
    ((1, 2), [1, 2]),
    ({1}, [1]),
    (frozenset(), []),
    ({"a": {"b": (1, Path("c"))}}, {"a": {"b": [1, "c"]}}),
    ({1: 2, None: 3, ErrorCategory.SYNTAX: 5}, {"1": 2, "None": 3, "SYNTAX": 5}),
    (b"bytes", "<builtins.bytes>"),
    (object, "<builtins.type>"),
    (Odd(), f"<{Odd.__module__}.Odd>"),
    (REPORT, REPORT.to_dict()),
    (ExecutionException("m", {"a": {1}}), {"message": "m", "context": {"a": [1]}}),
]


@for_each("value, plain", PLAIN, ids=lambda value: type(value).__name__)
def test_whatever_is_in_a_report_becomes_plain_json(value: object, plain: object) -> None:
    report = FailureReport("developer", "SYNTAX", "line 3", [value])
    shown = report.to_dict()
    assert shown["context"] == [plain]
    assert json.loads(json.dumps(shown, allow_nan=False).encode()) == shown


def test_the_category_of_a_report_is_shown_as_plain_text() -> None:
    shown = FailureReport("developer", ErrorCategory.SYNTAX, "line 3").to_dict()
    assert type(shown["error_category"]) is str


@for_each("error", EXAMPLES, ids=kind_name)
def test_every_error_can_be_shown_as_plain_json(error: ExecutionException) -> None:
    shown = error.to_dict()
    assert json.loads(json.dumps(shown)) == shown
    assert list(shown) == list(vars(error))
    assert shown["message"] == "m"


def test_a_report_that_holds_itself_is_still_shown() -> None:
    loop: list[Any] = []
    loop.extend([loop, loop])
    report = FailureReport("developer", "SYNTAX", "line 3", loop)
    loop.append(report)
    error = ExecutionException("m")
    error.context["error"] = error
    assert report.to_dict()["context"] == ["…", "…", "…"]
    assert error.to_dict() == {"message": "m", "context": {"error": "…"}}


def test_a_very_deep_report_is_cut_off_and_not_an_error() -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    assert "…" in json.dumps(FailureReport("d", "SYNTAX", "x", deep).to_dict(), ensure_ascii=False)
