"""Values as people write them."""

from __future__ import annotations

import enum
import json
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from pydantic import BaseModel

from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.value_text import beginning, call_text, value_text
from tests.tables import for_each
from tests.timing import cpu_seconds

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class Page:
    title: str
    tags: tuple[str, ...] = ()


class Point(NamedTuple):
    x: int
    y: int


class Order(BaseModel):
    total: Decimal


class Colour(enum.Enum):
    RED = 1


class Right(enum.Flag):
    READ = 1
    WRITE = 2


def stored(value: object) -> Any:
    """Return the stored form of a value."""
    return codec.parse(codec.encode(value).data)


@for_each(
    "value, text",
    [
        (None, "None"),
        (True, "True"),
        (1.5, "1.5"),
        (float("nan"), "nan"),
        ("it's", '"it\'s"'),
        ([1, "a", None], "[1, 'a', None]"),
        ({"a": [1, 2], "b": {}}, "{'a': [1, 2], 'b': {}}"),
        ({1: "a", (2, 3): "b"}, "{1: 'a', (2, 3): 'b'}"),
        ({"$": "date"}, "{'$': 'date'}"),
        ((1, 2), "(1, 2)"),
        ((1,), "(1,)"),
        ((), "()"),
        ({3}, "{3}"),
        (set(), "set()"),
        (frozenset({3}), "frozenset({3})"),
        (deque([1, 2]), "deque([1, 2])"),
        (Counter({"a": 2}), "Counter({'a': 2})"),
        (OrderedDict(a=1), "OrderedDict({'a': 1})"),
        (defaultdict(list, a=[1]), "defaultdict(list, {'a': [1]})"),
        (b"raw\x00", "b'raw\\x00'"),
        (bytearray(b"raw"), "bytearray(b'raw')"),
        (range(3), "range(0, 3)"),
        (range(0, 9, 2), "range(0, 9, 2)"),
        (2 - 3j, "(2.0-3.0j)"),
        (Decimal("1.50"), "1.50"),
        (Fraction(1, 3), "1/3"),
        (UUID(int=5), "00000000-0000-0000-0000-000000000005"),
        (PurePosixPath("/tmp/a"), "/tmp/a"),
        (date(2030, 1, 2), "2030-01-02"),
        (datetime(2030, 1, 2, 9, 30, tzinfo=UTC), "2030-01-02 09:30:00+00:00"),
        (
            datetime(2030, 1, 2, 9, 30, tzinfo=ZoneInfo("Europe/Berlin")),
            "2030-01-02 09:30:00 Europe/Berlin",
        ),
        (timedelta(days=1, hours=2), "1 day, 2:00:00"),
        (timezone(timedelta(hours=-5)), "UTC-05:00"),
        (UTC, "UTC"),
        (Page("home", ("a", "b")), "Page(title='home', tags=('a', 'b'))"),
        (Point(1, 2), "Point(x=1, y=2)"),
        (Order(total=Decimal("9.99")), "Order(total=9.99)"),
        (Colour.RED, "Colour.RED"),
        (Right.READ | Right.WRITE, "Right(3)"),
        (np.float64(2.5), "2.5"),
        (np.zeros((2, 3)), "array of <f8, 2 by 3"),
    ],
)
def test_a_value_is_written_as_a_person_would(value: object, text: str) -> None:
    assert value_text(stored(value)) == (text, False)


def test_a_text_of_several_lines_is_itself() -> None:
    assert value_text("first\nsecond").text == "first\nsecond"


def test_what_is_too_long_for_a_line_has_a_line_for_each_item() -> None:
    pages = [Page("home " * 5), Page("about " * 5), (Page("x" * 70),)]
    assert value_text(stored(pages), width=60).text.splitlines() == [
        "[",
        "  Page(title='home home home home home ', tags=()),",
        "  Page(title='about about about about about ', tags=()),",
        "  (",
        "    Page(",
        f"      title='{'x' * 70}',",
        "      tags=()",
        "    )",
        "  )",
        "]",
    ]


def test_a_call_is_written_as_it_was_made() -> None:
    call = codec.parse(codec.encode_call(("page", (1, 2)), {"retries": 3}).value.data)
    assert call_text("build", call).text == "build('page', (1, 2), retries=3)"
    assert call_text("build", {"args": [], "kwargs": {}}).text == "build()"
    assert call_text("build", [1]).text == "[1]"


@pytest.mark.parametrize(
    "make",
    [
        lambda: "x" * 1_000_000,
        lambda: b"x" * 1_000_000,
        lambda: list(range(200_000)),
        lambda: {str(n): n for n in range(100_000)},
    ],
    ids=["text", "bytes", "list", "dict"],
)
def test_no_more_is_written_of_a_long_value_than_is_shown(make: Callable[[], object]) -> None:
    tree = stored(make())
    assert cpu_seconds(lambda: value_text(tree), 0.1) < 0.1
    text, is_cut = value_text(tree)
    assert is_cut
    assert "…" in text
    assert 1000 < len(text.replace(" ", "").replace("\n", "")) < 4000


def test_a_deep_value_is_cut() -> None:
    tree: Any = 1
    for _ in range(90):
        tree = [tree]
    text, is_cut = value_text(tree)
    assert is_cut
    assert "…" in text


@for_each(
    "tree",
    [
        {"$": "new kind", "v": 1},
        {"$": "dataclass"},
        {"$": "dataclass", "t": "a:B", "v": [1]},
        {"$": "bytes", "v": "no base64!"},
        {"$": "dict", "v": [[1]]},
        {"$": "timedelta", "v": ["a"]},
        {"$": "datetime", "v": 1, "zone": 3},
        {"$": 5},
    ],
)
def test_a_form_that_is_not_known_is_written_as_it_is_stored(tree: dict[str, Any]) -> None:
    assert value_text(tree).text == repr(tree)


LARGE: dict[str, Any] = {
    "numbers": list(range(50_000)),
    "short texts": [""] * 50_000,
    "moments": [datetime(2030, 1, 1, tzinfo=timezone(timedelta(hours=1), "x"))] * 15_000,
    "zones": [datetime(2030, 1, 1, tzinfo=ZoneInfo("Europe/Berlin"))] * 15_000,
    "enums": [Colour.RED] * 15_000,
    "pairs": dict.fromkeys(range(20000), ()),
    "records": [Page("", ("",)) for _ in range(10_000)],
    "what comes after": {"first": {str(each): each for each in range(50_000)}, "second": 2},
    "a deep beginning": [[[[[0, 1]] * 10_000, 2], 3], 4],
    "a short value": {"a": [1, 2, (3, 4)], "b": "text"},
}


@for_each("value", LARGE.values(), ids=LARGE)
def test_a_text_shows_no_more_of_a_value_than_its_beginning(value: Any) -> None:
    tree = codec.parse(codec.encode(value).data)
    first = beginning(tree)
    assert value_text(first) == value_text(tree)
    call = {"args": [tree], "kwargs": {"more": tree}}
    assert call_text("build", beginning(call)) == call_text("build", call)
    assert len(json.dumps(first)) < 400_000
