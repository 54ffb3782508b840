"""What an error says about itself: what kind of failure it was, and when to come back."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import http.client
import json
import math
import re
import socket
import ssl
import subprocess
import unittest
import urllib.error
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta, timezone
from email.message import Message
from email.utils import format_datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maestro_hive.engine.config import ErrorCategory
from maestro_hive.engine.error_signs import (
    MAX_RETRY_AFTER_SECONDS,
    classify,
    is_remote_fault,
    retry_after,
)
from maestro_hive.engine.errors import (
    RecoverableError,
    TokenBudgetExceeded,
    UnrecoverableError,
)
from tests.tables import for_each

if TYPE_CHECKING:
    from collections.abc import Callable

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)


def shown(value: object) -> str:
    """Return a name for a test's case, the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))[:40]


class AnyError(Exception):
    """An error with whatever attributes a test gives it."""

    def __init__(self, **facts: object) -> None:
        super().__init__("odd")
        vars(self).update(facts)


def error_named(name: str, base: type[Exception] = Exception, **facts: object) -> Exception:
    error: Exception = type(name, (base,), {})("from elsewhere")
    vars(error).update(facts)
    return error


def raised_from(error: BaseException, *causes: BaseException) -> BaseException:
    for outer, inner in zip((error, *causes), causes, strict=False):
        outer.__cause__ = inner
    return error


# --- what the other side asks for ------------------------------------------------------------

SOON = NOW + timedelta(seconds=30)
HTTP_DATE = format_datetime(SOON, usegmt=True)


class OnlyGet:
    """Headers that can be asked by name, in any case, and nothing else."""

    def get(self, name: str, default: object = None) -> object:
        return "30" if name.lower() == "retry-after" else default


def message_headers() -> Message:
    headers = Message()
    headers["retry-AFTER"] = "30"
    return headers


HEADERS: list[Any] = [
    {"Retry-After": "30"},
    {"retry-after": "30"},
    {"RETRY-AFTER": "30"},
    {"rEtRy-aFtEr": " 30 "},
    {"Retry-After": 30},
    {"Retry-After": b"30"},
    {b"retry-after": b"30"},
    {"Retry-After": HTTP_DATE},
    {"Retry-After": HTTP_DATE.replace("GMT", "-0000")},
    {"retry-after-ms": "30000", "retry-after": "31"},
    {"retry-after-ms": "soon", "retry-after": "30"},
    {1: "x", None: "y", "retry-AFTER": "30"},
    OnlyGet(),
    message_headers(),
]


@for_each("headers", HEADERS, ids=shown)
def test_a_retry_after_header_is_honoured_wherever_it_is(headers: object) -> None:
    response = SimpleNamespace(headers=headers)
    assert retry_after(AnyError(response=response), NOW) == pytest.approx(30)
    assert retry_after(AnyError(headers=headers), NOW) == pytest.approx(30)
    assert retry_after(AnyError(headers=headers, response=None), NOW) == pytest.approx(30)


@for_each(
    "value, seconds",
    [
        (30, 30.0),
        (1.5, 1.5),
        (0, 0.0),
        ("30", 30.0),
        ("0.5", 0.5),
        (b"7", 7.0),
        (timedelta(minutes=1), 60.0),
        (SOON, 30.0),
        (SOON.replace(tzinfo=None), 30.0),
        (SOON.astimezone(timezone(timedelta(hours=5))), 30.0),
        (HTTP_DATE, 30.0),
        ("Tue, 01 Jan 2030 14:00:30 +0200", 30.0),
        ("Tuesday, 01-Jan-30 12:00:30 GMT", 30.0),
        ("Tue Jan  1 12:00:30 2030", 30.0),
        (MAX_RETRY_AFTER_SECONDS, MAX_RETRY_AFTER_SECONDS),
        # what has already passed
        (-1, 0.0),
        ("-5", 0.0),
        (-(10**400), 0.0),
        (timedelta(days=-1), 0.0),
        ("Mon, 01 Jan 2001 00:00:00 GMT", 0.0),
        # what nobody can mean
        (math.nan, None),
        (math.inf, None),
        (-math.inf, None),
        ("nan", None),
        ("inf", None),
        (10**400, None),
        ("9" * 10_000, None),
        (1_893_456_000, None),
        (MAX_RETRY_AFTER_SECONDS + 1, None),
        (timedelta.max, None),
        (datetime.max.replace(tzinfo=UTC), None),
        ("Fri, 31 Dec 9999 23:59:59 GMT", None),
        ("Fri, 31 Dec 9999 23:59:59 -2359", None),
        # what is no wait at all
        (None, None),
        (True, None),
        (False, None),
        ("", None),
        ("soon", None),
        ("12 parsecs", None),
        ("Tue, 99 Foo 2030 99:99:99 GMT", None),
        (b"\xff\x00", None),
        ([30], None),
        ({"seconds": 30}, None),
        (object(), None),
        (lambda: 30, None),
    ],
    ids=shown,
)
def test_a_wait_on_the_error_is_read_in_every_form(value: object, seconds: float | None) -> None:
    expected = None if seconds is None else pytest.approx(seconds)
    assert retry_after(AnyError(retry_after=value), NOW) == expected


def test_our_own_error_says_when_to_come_back() -> None:
    assert retry_after(RecoverableError("busy", retry_after=2.5), NOW) == 2.5
    assert retry_after(RecoverableError("busy"), NOW) is None
    assert retry_after(ValueError("busy"), NOW) is None


def test_what_the_error_says_itself_wins_over_headers_unless_it_is_nonsense() -> None:
    response = SimpleNamespace(headers={"Retry-After": "30"})
    assert retry_after(AnyError(retry_after=2, response=response), NOW) == 2
    assert retry_after(AnyError(retry_after="?", response=response), NOW) == 30


def test_an_error_of_urllib_is_understood() -> None:
    error = urllib.error.HTTPError("http://x", 429, "slow down", message_headers(), None)
    with error:
        assert retry_after(error, NOW) == 30
        assert classify(error) is ErrorCategory.RATE_LIMIT


def test_an_error_raised_from_the_one_that_knows_passes_it_on() -> None:
    knows = AnyError(retry_after=30)
    assert retry_after(raised_from(ValueError("outer"), knows), NOW) == 30
    assert retry_after(raised_from(RecoverableError("o", retry_after=1), knows), NOW) == 1
    assert retry_after(raised_from(ValueError(), KeyError(), OSError(), knows), NOW) == 30


def test_what_merely_happened_before_is_not_asked() -> None:
    error = ValueError("while handling another")
    error.__context__ = AnyError(retry_after=30)
    assert retry_after(error, NOW) is None


def test_errors_raised_from_each_other_in_a_ring_are_no_trap() -> None:
    one, other = ValueError(), KeyError()
    one.__cause__, other.__cause__ = other, one
    group = ExceptionGroup("both", [one, other])
    one.__cause__ = group
    assert retry_after(group, NOW) is None
    assert classify(group) is ErrorCategory.UNKNOWN


def test_a_group_waits_for_the_longest_of_its_members() -> None:
    members = [AnyError(retry_after=3), AnyError(retry_after=30), ValueError()]
    assert retry_after(ExceptionGroup("some", members), NOW) == 30
    nested = ExceptionGroup("outer", [ExceptionGroup("some", members)])
    assert retry_after(nested, NOW) == 30


class HostileError(Exception):
    """Every look at it fails, in a different way."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":  # without it, not even pytest can hold it
            return HostileError
        raise {"response": MemoryError, "headers": RecursionError}.get(name, ValueError)(name)

    def __str__(self) -> NoReturn:
        raise ValueError


class HostileHeaders(Mapping[str, str]):
    def __getitem__(self, name: str) -> NoReturn:
        raise RuntimeError(name)

    def __iter__(self) -> Iterator[str]:
        yield "Retry-After"
        raise OSError

    def __len__(self) -> NoReturn:
        raise RuntimeError

    def __bool__(self) -> NoReturn:
        raise RuntimeError


class HostileNumber(int):
    def __le__(self, other: object) -> NoReturn:
        raise ValueError

    __lt__ = __ge__ = __gt__ = __le__
    __float__ = __int__ = __index__ = __le__  # type: ignore[assignment]


HOSTILE = [
    HostileError(),
    AnyError(retry_after=HostileNumber(3), status_code=HostileNumber(3), errno=HostileNumber(3)),
    AnyError(headers=HostileHeaders(), response=HostileError()),
    AnyError(headers=3, response="x", status_code=[], errno=[]),
    AnyError(headers=[("Retry-After", "3")], status=math.nan),
    AnyError(headers=SimpleNamespace(get=3, items=3)),
    RecoverableError("m", error_category=[]),  # type: ignore[arg-type]
    RecoverableError("m", error_category="NOT_OURS"),
    RecoverableError("m", error_category=None),  # type: ignore[arg-type]
]


@for_each("error", HOSTILE, ids=map(str, range(len(HOSTILE))))
def test_no_error_is_odd_enough_to_raise(error: Exception) -> None:
    assert retry_after(error, NOW) is None
    assert classify(error) is ErrorCategory.UNKNOWN


anything = st.one_of(
    st.text(),
    st.binary(),
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.timedeltas(),
    st.datetimes(),
    st.datetimes(timezones=st.timezones()),
    st.lists(st.integers()),
    st.dictionaries(st.text(), st.text()),
)


@given(anything)
def test_whatever_is_said_gives_a_wait_that_can_be_waited_or_none(value: object) -> None:
    for error in (
        AnyError(retry_after=value),
        AnyError(headers={"Retry-After": value}),
        AnyError(headers={"Retry-After-Ms": value}),
        AnyError(headers=value, response=value),
    ):
        wait = retry_after(error, NOW)
        assert wait is None or 0 <= wait <= MAX_RETRY_AFTER_SECONDS


dates = st.from_regex(r"[A-Z][a-z]{2}, \d{1,3} [A-Z][a-z]{2} \d{1,6} [\d:]{0,10}( [+-]\d{1,9})?")


@given(st.one_of(dates, st.text(alphabet="0123456789:,+- GMTJanFebMonTue")))
def test_no_date_is_odd_enough_to_raise(text: str) -> None:
    wait = retry_after(AnyError(retry_after=text), NOW)
    assert wait is None or 0 <= wait <= MAX_RETRY_AFTER_SECONDS


@given(anything, anything)
def test_whatever_an_error_carries_it_has_a_category(one: object, other: object) -> None:
    error = AnyError(status_code=one, status=other, response=one, code=other, errno=one)
    assert classify(error) in ErrorCategory
    assert classify(RecoverableError("m", error_category=one)) in ErrorCategory  # type: ignore[arg-type]


# --- what kind of failure it was -------------------------------------------------------------


def with_status(number: object) -> list[Exception]:
    return [
        AnyError(status_code=number),
        AnyError(status=number),
        AnyError(code=number),
        AnyError(response=SimpleNamespace(status_code=number)),
        AnyError(response=SimpleNamespace(status=number)),
    ]


def raised_by(action: Callable[[], object]) -> BaseException:
    try:
        action()
    except BaseException as error:  # noqa: BLE001 - pytest.fail raises no Exception
        return error
    raise AssertionError


UNITTEST_FAILURE = raised_by(lambda: unittest.TestCase().assertEqual(1, 2))  # noqa: PT009
CATEGORIES: dict[ErrorCategory, list[BaseException]] = {
    ErrorCategory.SYNTAX: [
        raised_by(lambda: compile("def f(:", "x", "exec")),
        IndentationError(),
        RecoverableError("m", "SYNTAX"),
    ],
    ErrorCategory.TEST_FAILURE: [
        AssertionError("1 == 2"),
        UNITTEST_FAILURE,
        raised_by(lambda: pytest.fail("no")),
        RecoverableError("m", "TEST_FAILURE"),
    ],
    ErrorCategory.ACC_VIOLATION: [
        RecoverableError("m", "ACC_VIOLATION"),
        raised_from(RecoverableError("m", "ACC_VIOLATION"), TimeoutError()),
    ],
    ErrorCategory.BDV_VIOLATION: [RecoverableError("m", ErrorCategory.BDV_VIOLATION)],
    ErrorCategory.TIMEOUT: [
        TimeoutError(),
        asyncio.TimeoutError(),  # noqa: UP041 - as older code has it
        concurrent.futures.TimeoutError(),
        socket.timeout(),  # noqa: UP041
        OSError(errno.ETIMEDOUT, "timed out"),
        subprocess.TimeoutExpired("sleep", 1),
        error_named("ReadTimeout"),
        error_named("APITimeoutError", type(error_named("APIConnectionError"))),
        error_named("TimeoutException"),
        error_named("ServerTimeoutError"),
        error_named("ConnectTimeout", ConnectionError),
        error_named("SlowProvider", type(error_named("ReadTimeout"))),
        RecoverableError("m", "timeout"),
        raised_from(RecoverableError("m"), TimeoutError()),
        raised_from(ValueError("m"), KeyError("m"), error_named("PoolTimeout")),
        ExceptionGroup("some", [ValueError(), TimeoutError()]),
    ],
    ErrorCategory.TOKEN_BUDGET: [TokenBudgetExceeded("spent", "p", 2, 1)],
    ErrorCategory.RATE_LIMIT: [
        *with_status(429),
        *with_status(http.HTTPStatus.TOO_MANY_REQUESTS),
        error_named("RateLimitError"),
        error_named("RatelimitException"),
        error_named("ThrottlingException"),
        error_named("TooManyRequests"),
        error_named("HTTPStatusError", response=SimpleNamespace(status_code=429)),
        RecoverableError("m", "RATE_LIMIT"),
    ],
    ErrorCategory.API_ERROR: [
        *with_status(500),
        *with_status(404),
        *with_status(529),
        ConnectionError(),
        ConnectionResetError(),
        BrokenPipeError(),
        socket.gaierror(socket.EAI_NONAME, "unknown"),
        socket.gaierror(errno.ENOMEM, "a number of its own"),
        ssl.SSLError(1, "bad"),
        urllib.error.URLError("no"),
        OSError(errno.ENETUNREACH, "no network"),
        OSError(errno.EHOSTUNREACH, "no host"),
        error_named("APIError"),
        error_named("APIConnectionError"),
        error_named("APIStatusError"),
        error_named("InternalServerError", type(error_named("APIStatusError"))),
        error_named("HTTPError"),
        error_named("HTTPStatusError"),
        error_named("ClientError"),
        RecoverableError("m", "API_ERROR"),
    ],
    ErrorCategory.RESOURCE_ERROR: [
        MemoryError(),
        RecursionError(),
        ResourceWarning(),
        *(
            OSError(getattr(errno, name), "full")
            for name in "ENOSPC EMFILE ENFILE ENOMEM EDQUOT EAGAIN".split()
        ),
        type("ClientError", (OSError,), {})(errno.EMFILE, "too many open files"),
        RuntimeError("can't start new thread"),
        RecoverableError("m", "RESOURCE_ERROR"),
    ],
    ErrorCategory.UNKNOWN: [
        ValueError("m"),
        RuntimeError("m"),
        FileNotFoundError(errno.ENOENT, "missing"),
        PermissionError(errno.EACCES, "forbidden"),
        RecoverableError("m"),
        RecoverableError("m", "SOMETHING_ELSE"),
        AnyError(errno=errno.ENOSPC),
        *with_status(1),
        *with_status(True),
        *with_status("429"),
        *with_status(4_290),
        ExceptionGroup("some", [ValueError(), KeyError()]),
        raised_by(lambda: pytest.skip("not a failure")),
    ],
}


def spelt(error: object) -> str:
    return type(error).__name__


@for_each("category", CATEGORIES)
def test_every_failure_has_its_category(category: ErrorCategory) -> None:
    found = [(spelt(error), classify(error)) for error in CATEGORIES[category]]
    assert found == [(spelt(error), category) for error in CATEGORIES[category]]


def test_every_category_has_an_example() -> None:
    assert set(CATEGORIES) == set(ErrorCategory)


def test_what_merely_happened_before_does_not_decide_the_category() -> None:
    error = ValueError("while handling another")
    error.__context__ = TimeoutError()
    assert classify(error) is ErrorCategory.UNKNOWN


# --- what says something about the other side ------------------------------------------------


def derived(name: str, *bases: str, also: type[Exception] = Exception) -> Exception:
    """Return an error of a class with these ancestors, nearest first."""
    kind = also
    for each in reversed((name, *bases)):
        kind = type(each, (kind,), {})
    return kind("from elsewhere")


def response(status: int) -> SimpleNamespace:
    return SimpleNamespace(status_code=status, headers={})


ABOUT_OTHER_SIDE: list[BaseException] = [
    # timeouts
    TimeoutError("late"),
    asyncio.TimeoutError(),  # noqa: UP041 - the name that callers know
    concurrent.futures.TimeoutError(),
    subprocess.TimeoutExpired("claude", 5),
    RecoverableError("late", "TIMEOUT"),
    OSError(errno.ETIMEDOUT, "late"),
    derived("ReadTimeout", "TimeoutException", "TransportError", "RequestError", "HTTPError"),
    derived("ReadTimeout", "Timeout", "RequestException", also=OSError),
    derived("ReadTimeoutError", "TimeoutError", "HTTPError"),
    derived("APITimeoutError", "APIConnectionError", "APIError", "OpenAIError"),
    derived("ServerSelectionTimeoutError", "AutoReconnect", "ConnectionFailure"),
    *with_status(408),
    *with_status(504),
    # connections
    ConnectionError("m"),
    ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
    ConnectionResetError(),
    BrokenPipeError(),
    http.client.RemoteDisconnected("gone"),
    http.client.IncompleteRead(b"half"),
    OSError(errno.ENETUNREACH, "no network"),
    OSError(errno.EHOSTUNREACH, "no host"),
    OSError(errno.ENETDOWN, "down"),
    socket.gaierror(socket.EAI_NONAME, "no such host"),
    ssl.SSLError(1, "handshake"),
    ssl.SSLCertVerificationError(1, "expired"),
    urllib.error.URLError(ConnectionRefusedError()),
    derived("ConnectError", "NetworkError", "TransportError", "RequestError", "HTTPError"),
    derived("ConnectError", "NetworkError"),
    derived("RemoteProtocolError", "ProtocolError", "TransportError", "RequestError", "HTTPError"),
    derived("ConnectionError", "RequestException", also=OSError),
    derived("ConnectionError", "RedisError"),
    derived("NewConnectionError", "HTTPError"),
    derived("MaxRetryError", "RequestError", "PoolError", "HTTPError"),
    derived("APIConnectionError", "APIError"),
    derived("ServerDisconnectedError", "ServerConnectionError", "ClientError"),
    derived("ConnectionClosedError", "ConnectionClosed", "WebSocketException"),
    # rate limits
    *with_status(429),
    RecoverableError("slow down", "RATE_LIMIT"),
    derived("RateLimitError", "APIStatusError", "APIError"),
    derived("ThrottlingException"),
    AnyError(response={"ResponseMetadata": {"HTTPStatusCode": 429}}),
    # responses that say it themselves
    *with_status(500),
    *with_status(502),
    *with_status(503),
    *with_status(529),
    AnyError(response={"ResponseMetadata": {"HTTPStatusCode": 503}}),
    urllib.error.HTTPError("http://x", 503, "busy", message_headers(), None),
    derived("OverloadedError", "InternalServerError", "APIStatusError", "APIError"),
    derived("ServiceUnavailable"),
    # those that were raised from one, or carry one
    raised_from(ValueError("no answer"), TimeoutError()),
    raised_from(RuntimeError("gave up"), KeyError(), ConnectionResetError()),
    ExceptionGroup("some", [KeyError("mine"), ConnectionResetError()]),
    UnrecoverableError("gave up", original_error=ConnectionResetError()),
]
NOT_ABOUT_OTHER_SIDE: list[BaseException] = [
    # a user's own bug
    *(kind("mine") for kind in (KeyError, IndexError, TypeError, ValueError, AttributeError)),
    *(kind("mine") for kind in (NameError, AssertionError, ZeroDivisionError, RuntimeError)),
    ImportError("no module"),
    SyntaxError("bad"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    NotImplementedError(),
    RecursionError(),
    ArithmeticError(),
    StopAsyncIteration(),
    json.JSONDecodeError("not JSON", "x", 0),
    RecoverableError("m"),
    RecoverableError("m", "SYNTAX"),
    RecoverableError("m", "TEST_FAILURE"),
    RecoverableError("m", "ACC_VIOLATION"),
    UnrecoverableError("m"),
    UnrecoverableError("m", original_error=KeyError("mine")),
    ExceptionGroup("some", [KeyError(), ValueError()]),
    raised_from(ValueError("outer"), KeyError("inner")),
    # this machine
    FileNotFoundError(errno.ENOENT, "missing"),
    PermissionError(errno.EACCES, "forbidden"),
    OSError(errno.ENOSPC, "full"),
    OSError(errno.EMFILE, "too many open files"),
    MemoryError(),
    subprocess.CalledProcessError(1, "make"),
    # an answer that says what was wrong with the question
    *with_status(400),
    *with_status(401),
    *with_status(403),
    *with_status(404),
    *with_status(422),
    AnyError(response={"ResponseMetadata": {"HTTPStatusCode": 400}}),
    urllib.error.HTTPError("http://x", 404, "no such page", message_headers(), None),
    error_named("BadRequestError", type(error_named("APIStatusError")), status_code=400),
    error_named("HTTPStatusError", response=response(404)),
    error_named("HTTPError", OSError, response=response(401)),
    # a question that was never sent
    derived("InvalidURL", "RequestException", also=ValueError),
    derived("MissingSchema", "RequestException", also=ValueError),
    derived("UnsupportedProtocol", "TransportError", "RequestError", "HTTPError"),
    derived("LocalProtocolError", "ProtocolError", "TransportError", "RequestError", "HTTPError"),
    derived("JSONDecodeError", "InvalidJSONError", "RequestException", also=ValueError),
    derived("LocationParseError", "LocationValueError", "HTTPError", also=ValueError),
]


def test_a_breaker_counts_what_is_about_the_other_side() -> None:
    found = [(spelt(error), is_remote_fault(error)) for error in ABOUT_OTHER_SIDE]
    assert found == [(spelt(error), True) for error in ABOUT_OTHER_SIDE]


def test_a_breaker_does_not_count_what_is_about_the_code_or_this_machine() -> None:
    found = [(spelt(error), is_remote_fault(error)) for error in NOT_ABOUT_OTHER_SIDE]
    assert found == [(spelt(error), False) for error in NOT_ABOUT_OTHER_SIDE]


def test_what_merely_happened_before_says_nothing_about_the_other_side() -> None:
    error = KeyError("while handling another")
    error.__context__ = TimeoutError()
    assert is_remote_fault(error) is False


def test_an_error_that_cannot_be_read_says_nothing() -> None:
    assert is_remote_fault(HostileError()) is False
