"""Values as JSON: what goes in comes out, or an error names the place."""

from __future__ import annotations

import base64
import collections
import contextlib
import copy
import dataclasses
import enum
import gc
import hashlib
import inspect
import json
import math
import subprocess
import sys
from collections import OrderedDict, defaultdict, deque
from dataclasses import InitVar, dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from time import thread_time as time_of_thread
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import MagicMock
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pydantic
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from maestro_hive.journal import values
from maestro_hive.journal.plain_data import MAX_DEPTH
from maestro_hive.journal.values import decode, encode, encode_call
from maestro_hive.kernel.errors import DecodeError, EncodeError
from tests.tables import for_each

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from collections.abc import Set as AbstractSet

QUICK = settings(max_examples=75)


def digest(value: object) -> bytes:
    """The SHA-256 of the text that identifies a value."""
    return hashlib.sha256(encode(value).identity()).digest()


# --- values of every kind -----------------------------------------------------------------------


class Color(enum.Enum):
    RED = 1
    GREEN = "green"
    ALSO_RED = 1  # noqa: PIE796 - an alias


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Word(enum.StrEnum):
    YES = "yes"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


@dataclass
class Plain:
    name: str
    parts: list[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    when: datetime
    inner: Plain | None = None


@dataclass
class Derived:
    """Computes a field, and changes one that it is given."""

    a: int
    total: int = field(init=False)

    def __post_init__(self) -> None:
        self.total = self.a * 2
        self.a += 1


@dataclass
class Grown:
    """As of today; older records lack what has a default."""

    name: str
    added: list[int] = field(default_factory=lambda: [7])
    also: int = 5


@dataclass
class Stubborn:
    """Refuses some values."""

    age: int

    def __post_init__(self) -> None:
        if self.age < 0:
            raise ValueError("an age is not negative")


@dataclass
class NeedsMore:
    name: str
    extra: InitVar[int]

    def __post_init__(self, extra: int) -> None:
        self.name += str(extra)


@dataclass
class Chain:
    inner: Any = None


class Outer:
    @dataclass
    class Inner:
        x: int

    class Kind(enum.Enum):
        A = 1


class Point(NamedTuple):
    x: float
    label: Any = None


class Model(pydantic.BaseModel):
    name: str
    when: datetime | None = None
    parts: list[int] = []
    inner: Model | None = None


class Aliased(pydantic.BaseModel):
    user_name: str = pydantic.Field(alias="userName")


class Loose(pydantic.BaseModel):
    anything: Any


class Open(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")

    a: int


class Numbers(pydantic.RootModel[list[int]]):
    pass


class Private(pydantic.BaseModel):
    _hidden: str = "default"

    @classmethod
    def made(cls, hidden: str) -> Private:
        made = cls()
        made._hidden = hidden
        return made


class Hashed(pydantic.BaseModel):
    password: str

    @pydantic.field_validator("password")
    @classmethod
    def _hash(cls, text: str) -> str:
        return "#" + text


class Client(pydantic.BaseModel):
    connection: Any


class Mode(enum.IntFlag):
    A = 1
    B = 2


@dataclass(slots=True)
class Slotted:
    a: int
    b: Any


@dataclass
class FieldsAndItems(dict[str, int]):
    a: int


class Tally(collections.Counter[str]):
    pass


class Ordered(OrderedDict[str, int]):
    pass


class Share(float):
    pass


class Stamp(datetime):
    pass


SHARED = ["shared"]


class Text(str):
    __slots__ = ()


class Number(int):
    pass


class Many(list[int]):
    pass


class Lookup(dict[str, int]):
    pass


class Pair(tuple[int, int]):
    __slots__ = ()


class Place(type(Path())):  # type: ignore[misc]
    pass


class Elsewhere(tzinfo):
    def utcoffset(self, _when: datetime | None) -> timedelta:
        return timedelta(hours=1)

    dst = utcoffset

    def tzname(self, _when: datetime | None) -> str:
        return "elsewhere"


class NotAnything:
    def __init__(self, **_facts: Any) -> None:
        raise AssertionError("must never be made")


Misnamed = collections.namedtuple("AnotherName", "x y")  # type: ignore[name-match]  # noqa: PYI024
BERLIN = ZoneInfo("Europe/Berlin")

VALUES: dict[str, Any] = {
    "none": None,
    "true": True,
    "false": False,
    "zero": 0,
    "a large int": 2**200,
    "a negative int": -(10**30),
    "a whole float": 1.0,
    "minus zero": -0.0,
    "the smallest float": 5e-324,
    "the largest float": sys.float_info.max,
    "text": 'grün 🐝 \x00\x1f\u2028 "\\/',
    "no text": "",
    "list": [1, [2, [3, []]], {}],
    "dict": {"": 0, "a b": 1, "ü": 2, "a": {"b": {}}},
    "dict with the tag": {"$": "datetime", "v": "2030-01-01"},
    "dict with only the tag": {"$": None},
    "dict with int keys": {1: "a", 2: "b", -3: "c"},
    "dict with mixed keys": {1: "a", "1": "b", None: "c", 1.5: "d", (1, "x"): "e"},
    "dict with enum keys": {Level.LOW: 1, Word.YES: 2, Color.RED: 3},
    "dict with date keys": {date(2030, 1, 1): {date(2030, 1, 2): []}},
    "tuple": (1, (2, ()), [3]),
    "set": {1, "a", None, (1, 2), frozenset({3})},
    "empty set": set(),
    "frozenset": frozenset({1.5, "x"}),
    "bytes": bytes(range(256)),
    "no bytes": b"",
    "bytearray": bytearray(b"\x00\xff"),
    "naive datetime": datetime(2030, 1, 2, 3, 4, 5, 678901),  # noqa: DTZ001
    "utc datetime": datetime(2030, 1, 2, tzinfo=UTC),
    "datetime with an offset": datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=5, minutes=45))),
    "datetime with an odd offset": datetime(
        9999, 12, 31, 23, 59, 59, 999999, timezone(-timedelta(hours=3, seconds=7, microseconds=9))
    ),
    "zoned datetime": datetime(2030, 7, 1, 12, tzinfo=BERLIN),
    "zoned datetime in the gap": datetime(2030, 3, 31, 2, 30, tzinfo=BERLIN),
    "date": date(2030, 2, 28),
    "time": time(23, 59, 59, 999999),
    "time with an offset": time(1, 2, tzinfo=timezone(timedelta(hours=-3))),
    "timedelta": timedelta(days=3, seconds=7, microseconds=11),
    "negative timedelta": -timedelta(microseconds=1),
    "largest timedelta": timedelta.max,
    "decimal": Decimal("1.10"),
    "decimal exponent": Decimal("-1E+999"),
    "decimal infinity": Decimal("-Infinity"),
    "uuid": UUID("12345678-1234-5678-1234-567812345678"),
    "path": Path("/a/../b c/ü"),
    "relative path": Path("x"),
    "empty path": Path(),
    "enum": Color.GREEN,
    "enum alias": Color.ALSO_RED,
    "int enum": Level.HIGH,
    "str enum": Word.YES,
    "one flag": Access.READ,
    "nested enum": Outer.Kind.A,
    "dataclass": Plain("a", [1, (2,), Plain("b", [])]),
    "frozen dataclass": Frozen(when=datetime(2030, 1, 1, tzinfo=UTC), inner=Plain("c", [])),
    "dataclass with a computed field": Derived(3),
    "nested dataclass": Outer.Inner(4),
    "namedtuple": Point(1.5, {"deep": Point(2)}),
    "model": Model(name="a", when=datetime(2030, 1, 1, tzinfo=UTC), parts=[1, 2]),
    "model in a model": Model(name="a", inner=Model(name="$", parts=[])),
    "model with an alias": Aliased(userName="a"),
    "model with a datetime in an untyped field": Loose(anything=datetime(2030, 1, 1, tzinfo=UTC)),
    "model with NaN": Loose(anything=[math.nan]),
    "model with a default that is not set": Model(name="a"),
    "model with extra fields": Open.model_validate({"a": 1, "b": (2,)}),
    "model of one value": Numbers([1, 2]),
    "model with a private attribute": Private.made("x"),
    "nan": math.nan,
    "infinity": math.inf,
    "minus infinity": -math.inf,
    "nan deep inside": {"a": [1.5, {"b": (math.nan, -math.inf)}], math.inf: 1},
    "a complex": complex(-0.0, math.inf),
    "a fraction": Fraction(-1, 3),
    "a range": range(10, -2, -3),
    "a deque": deque([1, (2,)]),
    "a deque with a limit": deque([1, 2], maxlen=2),
    "an OrderedDict": OrderedDict(b=1, a=(2,)),
    "a Counter": collections.Counter("baab"),
    "a Counter with other keys": collections.Counter({(1, 2): 3, None: -1}),
    "a defaultdict": defaultdict(list, b=[1], a=[2]),
    "a defaultdict without a factory": defaultdict(None, {1: 2}),
    "a pure path": PurePosixPath("a/b"),
    "a Windows path": PureWindowsPath("c:/a/b"),
    "a combination of flags": Access.READ | Access.WRITE,
    "no flag": Access(0),
    "a flag of numbers": Mode.A | Mode.B,
    "a flag of numbers with an unknown bit": Mode(64) | Mode.A,
    "a time zone": BERLIN,
    "a time zone by its offset": timezone(timedelta(hours=-3, minutes=-30)),
    "UTC": UTC,
    "a time zone with a name of its own": timezone(timedelta(hours=1), "CET"),
    "datetime in a zone with a name of its own": datetime(
        2030, 1, 1, tzinfo=timezone(timedelta(hours=1), "CET")
    ),
    "a time with a named zone": time(1, tzinfo=BERLIN),
    "dict in no order": {"z": 1, "a": {"y": 1, "b": 2}, "m": [{"k": 1, "c": 2}]},
    "dict with other keys in no order": {3: "z", 1: "a", "x": 2, (9,): None, 2: 1},
    "the same object twice": (SHARED, [SHARED]),
    "dataclass with slots": Slotted(1, [Slotted(2, None)]),
    "all together": {"a": [(Point(1, {Color.RED}),)], "$": {"$": {1: {"$": Path("p")}}}},
}


def same(one: Any, two: Any) -> bool:  # noqa: C901, PLR0911 - one per kind
    """Equal, and of the same type and in the same order all the way down."""
    if type(one) is not type(two):
        return False
    if isinstance(one, float):
        if math.isnan(one) or math.isnan(two):
            return math.isnan(one) and math.isnan(two)
        return one == two and math.copysign(1, one) == math.copysign(1, two)
    if isinstance(one, complex):
        return same(one.real, two.real) and same(one.imag, two.imag)
    if isinstance(one, dict):
        factories = [getattr(each, "default_factory", None) for each in (one, two)]
        return factories[0] is factories[1] and same(list(one.items()), list(two.items()))
    if isinstance(one, deque) and one.maxlen != two.maxlen:
        return False
    if isinstance(one, list | tuple | deque):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, pydantic.BaseModel):
        hidden = one.__pydantic_private__, two.__pydantic_private__
        return one.model_fields_set == two.model_fields_set and same(
            [one.__dict__, one.model_extra, hidden[0]], [two.__dict__, two.model_extra, hidden[1]]
        )
    if dataclasses.is_dataclass(one):
        return all(
            same(getattr(one, each.name), getattr(two, each.name))
            for each in dataclasses.fields(one)
        )
    if isinstance(one, datetime | time):
        zones = str(one.tzinfo) == str(two.tzinfo)
        return zones and one == two and (one.fold, one.tzinfo) == (two.fold, two.tzinfo)
    if isinstance(one, set | frozenset):
        return same_members(one, two)
    return bool(one == two)


def same_members(one: AbstractSet[Any], two: AbstractSet[Any]) -> bool:
    """Of two sets: neither their order nor the `repr` of a set within says anything."""
    left = list(two)
    for each in one:
        partner = next((at for at, other in enumerate(left) if same(each, other)), None)
        if partner is None:
            return False
        del left[partner]
    return not left


@for_each("value", VALUES.values(), ids=VALUES)
def test_a_value_is_json_without_spaces_and_comes_back_equal_and_of_the_same_type(
    value: Any,
) -> None:
    encoded = encode(value)
    data = encoded.data
    assert same(decode(data), value)
    assert same(encoded.take(), value)
    assert encode(decode(data)).data == data
    assert data == msgspec.json.encode(json.loads(data))
    # The canonical digest is that of the value that comes back, too.
    assert digest(decode(data)) == digest(value)
    call = encode_call((value,), {"b": value, "a": 1})
    assert encode_call((value,), {"a": 1, "b": value}).digest == call.digest
    assert encode_call((decode(data),), {"b": decode(data), "a": 1}).digest == call.digest


@for_each("value", VALUES.values(), ids=VALUES)
def test_a_value_among_much_plain_data_comes_back(value: Any) -> None:
    among = {"rows": [{"a": [number]} for number in range(20)], "value": value}
    encoded = encode(among)
    assert same(decode(encoded.data), among)
    assert same(encoded.take(), among)


@pytest.mark.parametrize("fold", [0, 1])
def test_the_hour_that_comes_twice_comes_back_as_the_one_it_was(fold: int) -> None:
    for value in (
        datetime(2030, 10, 27, 2, 30, tzinfo=BERLIN, fold=fold),
        datetime(2030, 10, 27, 2, 30, fold=fold),  # noqa: DTZ001
        time(2, 30, fold=fold),
    ):
        assert decode(encode(value).data).fold == fold
    zoned = datetime(2030, 10, 27, 2, 30, tzinfo=BERLIN, fold=fold)
    back = decode(encode(zoned).data)
    assert back.utcoffset() == zoned.utcoffset() == timedelta(hours=2 - fold)
    assert back.tzinfo is BERLIN


@pytest.mark.parametrize("text", ["NaN", "-NaN", "sNaN123"])
def test_a_decimal_that_is_no_number_comes_back(text: str) -> None:
    assert str(decode(encode(Decimal(text)).data)) == text


def test_the_digest_is_the_sha256_of_the_canonical_text() -> None:
    value = {"b": [1.0, "é"], "a": {2: (None,), 1: True}}
    assert encode(value).data.startswith(b'{"b":[1.0,"\xc3\xa9"],"a":')
    text = '{"a":{"$":"dict","v":[[1,true],[2,{"$":"tuple","v":[null]}]]},"b":[1.0,"é"]}'
    assert digest(value) == hashlib.sha256(text.encode()).digest()
    plain = "015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862"
    assert digest({"a": 1}).hex() == plain


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4)
    ),
    max_leaves=20,
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
    | st.datetimes(timezones=st.none() | st.just(UTC) | st.timezones())
    | st.dates()
    | st.times()
    | st.timedeltas()
    | st.decimals(allow_nan=False)
    | st.fractions()
    | st.floats()
    | st.complex_numbers()
    | st.uuids()
    | st.sampled_from([*Color, *Level, Access.WRITE, Access.READ | Access.WRITE, Mode(0)])
    | st.builds(range, st.integers(-9, 9), st.integers(), st.integers(1, 9))
    | st.builds(Path, st.text("ab/.", max_size=6))
)
HASHABLE = st.recursive(
    SCALARS,
    lambda inner: (
        st.tuples(inner, inner) | st.frozensets(inner, max_size=3) | st.builds(Point, inner, inner)
    ),
    max_leaves=4,
)
TYPED = st.recursive(
    HASHABLE,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.sets(HASHABLE, max_size=3)
        | st.dictionaries(HASHABLE | st.just("$"), inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=4)
        | st.dictionaries(HASHABLE, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(HASHABLE, inner, max_size=3).map(lambda items: defaultdict(list, items))
        | st.dictionaries(HASHABLE, st.integers(), max_size=3).map(collections.Counter)
        | st.lists(inner, max_size=3).map(deque)
        | st.lists(inner, max_size=3).map(lambda items: deque(items, maxlen=5))
        | st.builds(Plain, st.text("ab"), st.lists(inner, max_size=2))
        | st.builds(Point, inner, inner)
    ),
    max_leaves=8,
)


@QUICK
@given(PLAIN)
def test_plain_data_comes_back(value: Any) -> None:
    encoded = encode(value)
    assert same(decode(encoded.data), value)
    assert same(encoded.take(), value)
    assert json.loads(encoded.data) == value or "$" in encoded.data.decode()


@QUICK
@given(TYPED)
@example({frozenset({None, timedelta(1)}), frozenset({None})})
def test_typed_data_comes_back(value: Any) -> None:
    encoded = encode(value)
    assert same(decode(encoded.data), value)
    assert same(encoded.take(), value)
    assert encode(decode(encoded.data)).data == encoded.data


def shuffled(value: Any, order: random.Random) -> Any:
    """The same value, built in another order."""
    if isinstance(value, dict):
        items = [(key, shuffled(item, order)) for key, item in value.items()]
        if type(value) is OrderedDict:  # two of them in different orders are not equal
            return OrderedDict(items)
        order.shuffle(items)
        made = copy.copy(value)
        made.clear()
        dict.update(made, items)
        return made
    if isinstance(value, list):
        return [shuffled(item, order) for item in value]
    if isinstance(value, set):
        items = list(value)
        order.shuffle(items)
        return set(items)
    return value


@QUICK
@given(TYPED, st.randoms(use_true_random=False))
def test_a_value_has_one_digest_in_whatever_order_it_was_built(
    value: Any, order: random.Random
) -> None:
    other = shuffled(value, order)
    assert digest(other) == digest(value)
    given = encode_call((value,), {"a": 1, "b": value})
    assert given.digest == encode_call((other,), {"b": other, "a": 1}).digest
    assert given.args[0].data == given.kwargs["b"].data == encode(value).data


LOOKALIKES: list[Any] = [
    *(1, True, 1.0, "1", -0.0, 0.0, 0, False, None, "", "null", math.nan, "nan", math.inf, b"1"),
    *([], (), {}, set(), frozenset(), deque(), [1], (1,), {1}, {1: 1}, {"1": 1}, {True: 1}),
    *({1.0: 1}, OrderedDict(), collections.Counter(), defaultdict(list), defaultdict(dict)),
    *(bytearray(b"1"), Decimal(1), Decimal("1.0"), Fraction(1), complex(1), range(1), Level.LOW),
    *({"$": "tuple", "v": []}, deque(maxlen=1), Path("1"), PurePosixPath("1"), [[]], [None]),
    [1, 1],
    *(OrderedDict(a=1, b=2), OrderedDict(b=2, a=1), {"a": 1, "b": 2}, {"a": 2, "b": 1}),
]


def test_different_values_have_different_digests() -> None:
    digests = {digest(value): value for value in LOOKALIKES}
    assert len(digests) == len(LOOKALIKES)
    calls = {encode_call((value,), {}).digest for value in LOOKALIKES}
    assert len(calls) == len(LOOKALIKES)
    assert digest(math.nan) == digest(float("nan"))


def test_sets_give_the_same_bytes_in_every_process() -> None:
    code = (
        "from maestro_hive.journal.values import encode;"
        "print(encode([set('abcdefgh'), {(str(n), n): n for n in range(9)}]).data)"
    )
    texts = {
        subprocess.check_output(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, text=True
        )
        for seed in ("1", "2")
    }
    assert len(texts) == 1


# --- classes that change ------------------------------------------------------------------------


def as_stored(kind: type, facts: dict[str, Any], tag: str = "dataclass") -> bytes:
    name = f"{kind.__module__}:{kind.__qualname__}"
    return json.dumps({"$": tag, "t": name, "v": facts}).encode()


def test_a_field_with_a_default_may_be_added_later() -> None:
    assert decode(as_stored(Grown, {"name": "a"})) == Grown("a", [7], 5)
    assert decode(as_stored(Point, {"x": 1}, "namedtuple")) == Point(1, None)
    assert decode(as_stored(Model, {"name": "a"}, "model")) == Model(name="a")


@for_each(
    "data",
    [
        as_stored(Plain, {"name": "a"}),
        as_stored(Plain, {"name": "a", "parts": [], "gone": 1}),
        as_stored(Point, {}, "namedtuple"),
        as_stored(Point, {"x": 1, "gone": 2}, "namedtuple"),
        as_stored(Model, {}, "model"),
        as_stored(Stubborn, {"age": -1}),
    ],
)
def test_a_class_that_changed_otherwise_is_an_error(data: bytes) -> None:
    with pytest.raises(DecodeError):
        decode(data)


# --- what has no form ---------------------------------------------------------------------------


def cycle() -> list[Any]:
    made: list[Any] = []
    made.append({"again": made})
    return made


def local_class() -> Any:
    @dataclass
    class Local:
        x: int

    return Local(1)


def local_enum() -> Any:
    class Here(enum.Enum):
        A = 1

    return Here.A


NO_FORM: dict[str, Any] = {
    "half a surrogate pair": "\ud800",
    "a path of undecodable bytes": Path("a\udcff"),
    "an int of 5,000 digits": 10**5000,
    "an object": object(),
    "a module": json,
    "a function": encode,
    "a class": int,
    "a class that is a dataclass": Plain,
    "a class that is a dataclass with defaults": Chain,
    "a class that is a model": Model,
    "a generator": (n for n in range(3)),
    "a memoryview": memoryview(b"a"),
    "an exception": ValueError("x"),
    "a mock": MagicMock(),
    "a namespace": SimpleNamespace(a=1),
    "a subclass of str": Text("a"),
    "a subclass of int": Number(1),
    "a subclass of list": Many([1]),
    "a subclass of dict": Lookup(a=1),
    "a subclass of tuple": Pair((1, 2)),
    "a subclass of Path": Place("a"),
    "a defaultdict of a function": defaultdict(cycle, a=[1]),
    "a subclass of Counter": Tally("aab"),
    "a subclass of OrderedDict": Ordered(a=1),
    "a subclass of float": Share(0.5),
    "a subclass of datetime": Stamp(2030, 1, 1, tzinfo=UTC),
    "a dataclass that is a dict": FieldsAndItems(a=1),
    "a model that changes what it is given": Hashed(password="x"),
    "a local class": local_class(),
    "a local enum": local_enum(),
    "a namedtuple that is found under another name": Misnamed(1, 2),
    "a dataclass that cannot be made again": NeedsMore("a", 1),
    "a zone without a name": datetime(2030, 1, 1, tzinfo=Elsewhere()),
}


@for_each("value", NO_FORM.values(), ids=NO_FORM)
def test_a_value_without_a_faithful_form_is_refused_and_its_place_named(value: Any) -> None:
    for wrapped, place in (
        (value, "result"),
        ({"users": [0, 1, 2, {"photo": value}]}, "result.users[3].photo"),
        ({"a b": (0, value)}, "result['a b'][1]"),
        (Plain("a", [value]), "result.parts[0]"),
        (Point(1, value), "result.label"),
        ({7: value}, "result[7]"),
    ):
        with pytest.raises(EncodeError) as caught:
            encode(wrapped, "result")
        assert caught.value.path == place
        assert str(caught.value).startswith(f"{place}: ")
        assert caught.value.reason


@for_each("value", NO_FORM.values(), ids=NO_FORM)
def test_a_value_without_a_form_among_much_plain_data_is_refused(value: Any) -> None:
    rows: list[Any] = [{"a": [number]} for number in range(20)]
    with pytest.raises(EncodeError) as caught:
        encode({"rows": [*rows, value], "title": "t"}, "result")
    assert caught.value.path == "result.rows[20]"


def test_what_is_wrong_inside_a_model_is_named() -> None:
    with pytest.raises(EncodeError, match=r"result\[0\]\.connection: .*register_codec"):
        encode([Client(connection=object())], "result")


@for_each("value", [{"\ud800": 1}, {"a": {"\udfff": [1]}}, {("\ud800",): 1}, {"\ud800"}], ids=ascii)
def test_half_a_surrogate_pair_in_a_key_or_a_set_is_refused(value: Any) -> None:
    with pytest.raises(EncodeError, match="surrogate"):
        encode(value)


@for_each(
    "value",
    [{object(): 1}, {object()}, {10**5000: 1}, {(10**5000,): object()}, {10**5000}],
    ids=map(str, range(5)),
)
def test_a_key_without_a_form_is_refused(value: Any) -> None:
    with pytest.raises(EncodeError):
        encode(value)


def test_what_contains_itself_is_refused() -> None:
    with pytest.raises(EncodeError, match="contains itself"):
        encode(cycle())
    looped: dict[str, Any] = {}
    looped["a"] = looped["b"] = looped
    with pytest.raises(EncodeError, match="contains itself"):
        encode(looped)


WRAPPERS: dict[str, Any] = {
    "list": lambda inner: [inner],
    "dict": lambda inner: {"a": inner},
    "pairs": lambda inner: {1: inner},
    "tuple": lambda inner: (inner,),
    "dataclass": Chain,
    "namedtuple": Point,
    "frozenset": lambda inner: frozenset({inner}),
}


def nested(wrap: Any, depth: int) -> Any:
    value: Any = "core"
    for _ in range(depth):
        value = wrap(value)
    return value


@for_each("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_whatever_is_shallow_enough_to_write_can_be_read(wrap: Any) -> None:
    deepest = nested(wrap, MAX_DEPTH)
    assert decode(encode(deepest).data) == deepest
    with pytest.raises(EncodeError, match="nested deeper"):
        encode(nested(wrap, MAX_DEPTH + 1))


def test_no_room_left_on_the_stack_is_an_error_of_ours() -> None:
    value = nested(WRAPPERS["pairs"], MAX_DEPTH)
    data = encode(value).data
    limit = sys.getrecursionlimit()
    used = len(inspect.stack(0))
    try:
        sys.setrecursionlimit(used + 120)
        with pytest.raises(EncodeError, match="stack"):
            encode(value)
        with pytest.raises(DecodeError, match="stack"):
            decode(data)
    finally:
        sys.setrecursionlimit(limit)


# --- strict reading -----------------------------------------------------------------------------


BAD_JSON: dict[str, bytes] = {
    "nothing": b"",
    "half": b'{"a":',
    "more than one": b"1 2",
    "rubbish behind": b"{}x",
    "NaN": b"NaN",
    "Infinity": b"[Infinity]",
    "-Infinity": b'{"a":-Infinity}',
    "too large a float": b"1e999",
    "too large a negative float": b"[-1e400]",
    "too long an int": b"1" * 5000,
    "deep lists": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "deep and unclosed": b"[" * 1_000_000,
    "not utf-8": b'"\xff"',
    "an overlong form": b'"\xc0\x80"',
    "half a surrogate pair in utf-8": b'"\xed\xa0\x80"',
    "half a surrogate pair escaped": b'"\\ud800"',
    "half a surrogate pair escaped in a key": b'{"a":[{"\\uDFFF":1}]}',
    "utf-16": '{"a":1}'.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf{}",
    "single quotes": b"{'a':1}",
    "a comment": b"/* */ 1",
    "a comma too many": b"[1,]",
    "a control character": b'"\x01"',
    "a leading zero": b"01",
    "a plus": b"+1",
}


@for_each("data", BAD_JSON.values(), ids=BAD_JSON)
def test_what_is_not_strict_json_is_refused(data: bytes) -> None:
    with pytest.raises(DecodeError) as caught:
        decode(data, "facts")
    assert caught.value.path == "facts"


def test_a_whole_surrogate_pair_may_be_escaped() -> None:
    assert decode(b'"\\ud83d\\udc1d"') == "🐝"


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 500, 900])
def test_nesting_that_json_allows_and_we_do_not_is_refused(depth: int) -> None:
    for opening, closing in ((b'{"$":"tuple","v":[', b"]}"), (b'["$",', b"]")):
        data = opening * depth + b"1" + closing * depth
        with pytest.raises(DecodeError):
            decode(data)


def zone(name: object) -> dict[str, object]:
    return {"$": "zoneinfo", "v": name}


def in_zone(tree: object) -> dict[str, object]:
    return {"$": "datetime", "v": "2030-01-01", "zone": tree}


HERE = __name__
CHAIN = f"{HERE}:Chain"
BAD_TAGS: dict[str, Any] = {
    "unknown": {"$": "pickle", "v": "x"},
    "no name": {"$": None},
    "a number": {"$": 1},
    "a list": {"$": ["dict"]},
    "an object": {"$": {"$": "date", "v": "2030-01-01"}},
    "no contents": {"$": "date"},
    "tuple of a text": {"$": "tuple", "v": "abc"},
    "tuple of an object": {"$": "tuple", "v": {"a": 1}},
    "tuple of nothing": {"$": "tuple", "v": None},
    "set of a text": {"$": "set", "v": "abc"},
    "set of lists": {"$": "set", "v": [[1]]},
    "frozenset of objects": {"$": "frozenset", "v": [{}]},
    "dict of texts": {"$": "dict", "v": ["ab"]},
    "dict of an object": {"$": "dict", "v": {"ab": 1}},
    "dict of triples": {"$": "dict", "v": [[1, 2, 3]]},
    "dict with a key twice": {"$": "dict", "v": [[1, 2], [1, 3]]},
    "dict with a list as key": {"$": "dict", "v": [[[1], 2]]},
    "bytes that are not base64": {"$": "bytes", "v": "a*b="},
    "bytes that are a number": {"$": "bytes", "v": 5},
    "bytes that are not ascii": {"$": "bytes", "v": "ü"},
    "bytearray of numbers": {"$": "bytearray", "v": [1, 2]},
    "datetime that is not one": {"$": "datetime", "v": "yesterday"},
    "datetime as a number": {"$": "datetime", "v": 12},
    "datetime with a bad fold": {"$": "datetime", "v": "2030-01-01T00:00:00", "fold": 2},
    "datetime with a text as fold": {"$": "datetime", "v": "2030-01-01T00:00:00", "fold": "1"},
    "datetime in no zone": in_zone(zone("No/Where")),
    "datetime in a file": in_zone(zone("../../../etc/passwd")),
    "datetime in a folder": in_zone(zone("Europe")),
    "datetime in an endless zone": in_zone(zone("a" * 5000)),
    "datetime in a zone with NUL": in_zone(zone("a\0b")),
    "datetime in a numbered zone": in_zone(zone(5)),
    "datetime in a zone that is a text": in_zone("Europe/Rome"),
    "datetime in a zone that is a date": in_zone({"$": "date", "v": "2030-01-01"}),
    "timezone of texts": {"$": "timezone", "v": ["1", 0, 0]},
    "timezone of too much": {"$": "timezone", "v": [2, 0, 0]},
    "timezone named by a number": {"$": "timezone", "v": [0, 0, 0, 5]},
    "timezone of one number": {"$": "timezone", "v": [1]},
    "float that is a number": {"$": "float", "v": "1.5"},
    "float that is a float": {"$": "float", "v": 1.5},
    "float of a list": {"$": "float", "v": ["nan"]},
    "complex of texts": {"$": "complex", "v": ["1", "2"]},
    "complex of one": {"$": "complex", "v": [1.0]},
    "fraction by zero": {"$": "fraction", "v": [1, 0]},
    "fraction of floats": {"$": "fraction", "v": [0.5, 1.0]},
    "range without steps": {"$": "range", "v": [0, 1, 0]},
    "range of texts": {"$": "range", "v": ["a", "b", "c"]},
    "set with an item twice": {"$": "set", "v": [1, 1]},
    "deque of too much": {"$": "deque", "v": [1, 2], "maxlen": 1},
    "deque with a text as limit": {"$": "deque", "v": [1], "maxlen": "5"},
    "deque with true as limit": {"$": "deque", "v": [1], "maxlen": True},
    "counter of texts": {"$": "counter", "v": ["ab"]},
    "counter with lists as keys": {"$": "counter", "v": [[[], 1]]},
    "defaultdict of a function": {"$": "defaultdict", "t": "eval", "v": []},
    "defaultdict of a list": {"$": "defaultdict", "t": [], "v": []},
    "ordereddict of an object": {"$": "ordereddict", "v": {"a": 1}},
    "path of another kind": {"$": "path", "t": "mars", "v": "a"},
    "path of a list kind": {"$": "path", "t": [], "v": "a"},
    "flag of a text": {"$": "flag", "t": f"{HERE}:Access", "v": "READ"},
    "flag that is an enum": {"$": "flag", "t": f"{HERE}:Color", "v": 1},
    "flag with an unknown bit": {"$": "flag", "t": f"{HERE}:Access", "v": 64},
    "an object of no codec": {"$": "object", "t": "nobody:Knows", "v": 1},
    "an object of a numbered codec": {"$": "object", "t": 5, "v": 1},
    "an array of objects": {"$": "ndarray", "t": "|O8", "shape": [1], "v": "AAAAAAAAAAA="},
    "a number of numpy's that is a text": {"$": "numpy", "t": "<f8", "v": "1"},
    "date that is not one": {"$": "date", "v": "2030-02-30"},
    "time that is not one": {"$": "time", "v": "25:00"},
    "timedelta of too much": {"$": "timedelta", "v": [10**12, 0, 0]},
    "timedelta of texts": {"$": "timedelta", "v": "abc"},
    "timedelta of many": {"$": "timedelta", "v": [1, 2, 3, 4, 5, 6, 7, 8]},
    "timedelta of weeks": {"$": "timedelta", "v": [0, 0, 0, 0, 0, 0, 7]},
    "timedelta of fractions": {"$": "timedelta", "v": [0.5, 0, 0]},
    "decimal that is not one": {"$": "decimal", "v": "x"},
    "decimal as a float": {"$": "decimal", "v": 1.5},
    "decimal as a list": {"$": "decimal", "v": [0, [1], 2]},
    "uuid that is not one": {"$": "uuid", "v": "123"},
    "uuid as a number": {"$": "uuid", "v": 123},
    "path as a number": {"$": "path", "v": 1},
    "path as a list": {"$": "path", "v": ["a"]},
    "enum without a type": {"$": "enum", "v": "RED"},
    "enum with a number as type": {"$": "enum", "t": 5, "v": "RED"},
    "enum without that member": {"$": "enum", "t": f"{HERE}:Color", "v": "BLUE"},
    "enum with an object as member": {"$": "enum", "t": f"{HERE}:Color", "v": {}},
    "enum that is a class": {"$": "enum", "t": f"{HERE}:Plain", "v": "RED"},
    "enum of a type that is gone": {"$": "enum", "t": f"{HERE}:Gone", "v": "RED"},
    "enum that is a function": {"$": "enum", "t": f"{HERE}:cycle", "v": "RED"},
    "a dataclass that is none": {"$": "dataclass", "t": f"{HERE}:NotAnything", "v": {}},
    "a dataclass that is a builtin": {"$": "dataclass", "t": "builtins:list", "v": {}},
    "a dataclass of a function": {"$": "dataclass", "t": "os:system", "v": {"command": "true"}},
    "a dataclass without a module": {"$": "dataclass", "t": "Plain", "v": {}},
    "a dataclass without a name": {"$": "dataclass", "t": f"{HERE}:", "v": {}},
    "a dataclass with a list": {"$": "dataclass", "t": CHAIN, "v": [1]},
    "a dataclass with a tag": {"$": "dataclass", "t": CHAIN, "v": {"$": "set", "v": []}},
    "a dataclass with a bad field": {"$": "dataclass", "t": CHAIN, "v": {"inner": {"$": 1}}},
    "a named tuple that is none": {"$": "namedtuple", "t": f"{HERE}:Pair", "v": {}},
    "a named tuple that is a dataclass": {"$": "namedtuple", "t": f"{HERE}:Plain", "v": {}},
    "a named tuple with a list": {"$": "namedtuple", "t": f"{HERE}:Point", "v": [1, 2]},
    "a model that is none": {"$": "model", "t": f"{HERE}:NotAnything", "v": {}},
    "a model that is not valid": {"$": "model", "t": f"{HERE}:Model", "v": {"name": []}},
    "a model with a list": {"$": "model", "t": f"{HERE}:Model", "v": [1]},
}


def places_of_bad_tags(
    decode: Callable[..., Any], separators: tuple[str, str] | None = None
) -> dict[str, str]:
    """Return, for each tag with wrong contents, the start of the place that its refusal names."""
    found = {}
    for name, tree in BAD_TAGS.items():
        data = json.dumps({"users": [0, {"photo": tree}]}, separators=separators).encode()
        try:
            decode(data, "result")
        except DecodeError as error:
            found[name] = error.path[: len(BAD_TAG_PLACE)]
        else:
            found[name] = "it was not refused"
    return found


#: Where ``places_of_bad_tags`` puts them.
BAD_TAG_PLACE = "result.users[1].photo"


def test_a_tag_with_wrong_contents_is_refused_and_its_place_named() -> None:
    assert places_of_bad_tags(decode) == dict.fromkeys(BAD_TAGS, BAD_TAG_PLACE)


def test_a_module_is_never_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trap = tmp_path / "a_trap_for_the_codec.py"
    trap.write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\nclass A: pass\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for tag in ("dataclass", "enum", "namedtuple", "model"):
        tree: dict[str, Any] = {"$": tag, "t": "a_trap_for_the_codec:A", "v": {}}
        with pytest.raises(DecodeError, match="a_trap_for_the_codec"):
            decode(json.dumps(tree).encode())
    assert not (tmp_path / "sprung").exists()
    assert "a_trap_for_the_codec" not in sys.modules


def test_a_module_that_loads_its_names_late_is_not_asked_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    lazy = ModuleType("a_lazy_module")
    lazy.__getattr__ = asked.append  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "a_lazy_module", lazy)
    with pytest.raises(DecodeError):
        decode(b'{"$":"dataclass","t":"a_lazy_module:Late","v":{}}')
    assert asked == []


@pytest.mark.parametrize("limit", ["encode", "decode"])
def test_too_large_a_text_is_refused(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in list(sys.modules.values()):
        if module.__name__.startswith("maestro_hive.") and hasattr(module, "MAX_BYTES"):
            monkeypatch.setattr(module, "MAX_BYTES", 1000)
    if limit == "encode":
        with pytest.raises(EncodeError, match="1,001 bytes is over the limit of 1,000"):
            encode("x" * 999)
        assert len(encode("x" * 998).data) == 1000
    else:
        with pytest.raises(DecodeError, match="1,001 bytes is over the limit of 1,000"):
            decode(b'"' + b"x" * 999 + b'"')


SAMPLES = [encode(value).data for value in VALUES.values()]


@settings(max_examples=200)
@given(
    st.sampled_from(SAMPLES),
    st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 3), st.binary(max_size=4)),
        min_size=1,
        max_size=4,
    ),
)
@example(b'{"$":"datetime","v":"2030-01-01","zone":"Europe"}', [(0.0, 0, b"")])
def test_no_damaged_text_brings_anything_but_a_value_or_our_error(
    data: bytes, edits: list[tuple[float, int, bytes]]
) -> None:
    for where, cut, put in edits:
        at = int(where * len(data))
        data = data[:at] + put + data[at + cut :]
    try:
        value = decode(data)
    except DecodeError:
        return
    encode(value)


@QUICK
@given(st.binary(max_size=40))
def test_no_random_bytes_bring_anything_but_a_value_or_our_error(data: bytes) -> None:
    with contextlib.suppress(DecodeError):
        decode(data)


TAGGED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.fixed_dictionaries(
            {
                "$": st.sampled_from(
                    [*"dict tuple set bytes datetime date time".split(), "timedelta"]
                )
                | st.sampled_from("decimal uuid path enum dataclass namedtuple model".split())
                | st.sampled_from("float complex fraction range deque counter defaultdict".split())
                | st.sampled_from("ordereddict flag timezone zoneinfo object ndarray".split())
            },
            optional={
                "v": inner | st.dictionaries(st.text(max_size=3), inner, max_size=2),
                "t": st.sampled_from(
                    [f"{HERE}:{name}" for name in ("Color", "Plain", "Point", "Model")]
                )
                | st.sampled_from(["builtins:int", "sys:modules", "", ":", "json:decoder.x"]),
                "zone": inner,
                "fold": inner,
            },
        )
    ),
    max_leaves=6,
)


@settings(max_examples=200)
@given(TAGGED)
def test_no_tree_of_tags_brings_anything_but_a_value_or_our_error(tree: Any) -> None:
    with contextlib.suppress(DecodeError):
        values.decode_tree(tree)


def test_bytes_are_written_as_base64() -> None:
    written = json.loads(encode(b"\x00\xff").data)
    assert base64.b64decode(written["v"]) == b"\x00\xff"


@for_each(
    "args",
    [(), (1,), ("ä\n", None, True), (1, 2.5), ([1],), ({"a": 1},), (float(3),), ("x" * 20_000,)],
    ids=repr,
)
@for_each("kwargs", [{}, {"b": 1, "a": [2]}], ids=repr)
def test_a_call_is_encoded_as_its_arguments_are(args: Any, kwargs: Any) -> None:
    call = encode_call(args, kwargs)
    assert [each.data for each in call.args] == [encode(each).data for each in args]
    assert {name: each.data for name, each in call.kwargs.items()} == {
        name: encode(each).data for name, each in kwargs.items()
    }
    assert call.take() == (list(args), kwargs)
    assert values.digest_of_call(call.args, call.kwargs) == call.digest


@pytest.mark.parametrize("bad", ["\ud800", 10**5000, object()], ids=["text", "number", "object"])
def test_an_argument_that_cannot_be_written_is_named(bad: object) -> None:
    with pytest.raises(EncodeError, match=r"input\.args\[1\]"):
        encode_call((1, bad), {})
    with pytest.raises(EncodeError, match=r"input\.client\[0\]"):
        encode_call((1,), {"client": [bad]})


def test_a_large_argument_counts_by_its_digest() -> None:
    rows = [{"b": number, "a": "x" * 100} for number in range(200)]
    text = json.dumps(rows, sort_keys=True, separators=(",", ":")).encode()
    assert len(text) > values.LARGE_BYTES
    short = b'{"$":"sha256","v":"%s"}' % hashlib.sha256(text).hexdigest().encode()
    call = b'{"args":[1,%s],"kwargs":{"a":%s,"z":[]}}' % (short, short)
    found = encode_call((1, rows), {"z": [], "a": rows})
    assert found.digest == hashlib.sha256(call).digest()


def test_a_dictionary_that_looks_like_a_digest_is_another_argument() -> None:
    large = encode_call(("x" * 20_000,), {})
    lookalike = json.loads(large.args[0].identity())
    assert lookalike["$"] == "sha256"
    assert encode_call((lookalike,), {}).digest != large.digest


# --- the value that is read back ------------------------------------------------------------------


def test_each_taker_gets_a_value_of_its_own() -> None:
    given = {"rows": [[1], (2,)], "name": "x"}
    encoded, call = encode(given), encode_call((given,), {"a": [1]})
    identity = encoded.identity()
    for take in (encoded.take, lambda: call.take()[0][0], lambda: call.take()[1]):
        first = take()
        first.clear()
        second = take()
        second.clear()
        assert take()
    assert given == {"rows": [[1], (2,)], "name": "x"}
    assert encoded.identity() == identity


@for_each("count", [1, 50], ids=str)
def test_a_change_to_what_was_given_is_not_in_what_is_read_back(count: int) -> None:
    given: list[Any] = [{"a": [1, {"b": []}]} for _ in range(count)]
    encoded = encode(given)
    given[0]["a"][1]["b"].append(2)
    given.append(3)
    assert encoded.take() == decode(encoded.data) == [{"a": [1, {"b": []}]}] * count


@dataclass(eq=False)
class Careless:
    x: int

    def __eq__(self, other: object) -> bool:
        return bool(self.x == other.x)  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]


@dataclass(eq=False)
class Agreeable:
    x: int

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


@for_each("value", [Careless(1), Agreeable(1)], ids=repr)
def test_how_a_class_compares_itself_changes_nothing(value: Any) -> None:
    for among in ([value], [value, *([number] for number in range(20))]):
        back = encode(among).take()
        assert type(back[0]) is type(value)
        assert back[0].x == 1


@dataclass
class Unfinished:
    a: int
    b: int = field(init=False)


def test_an_object_that_lacks_a_field_is_named() -> None:
    with pytest.raises(EncodeError, match=r"^result\[0\]: writing it raised AttributeError.*'b'"):
        encode([Unfinished(1)], "result")


def test_a_value_that_cannot_be_read_back_is_refused_when_it_is_encoded() -> None:
    stubborn = Stubborn(1)
    stubborn.age = -1
    with pytest.raises(EncodeError, match=r"^result\.a: it cannot be read back: .*not negative"):
        encode({"a": stubborn}, "result")


def test_sets_in_sets_take_no_time() -> None:
    value: Any = frozenset({1})
    for _ in range(60):
        value = frozenset({value})
    rows = [[number] for number in range(20)]
    assert encode([*rows, value]).take() == [*rows, value]


@for_each("inner", [[[[number]] for number in range(20)], [*range(20), [[1]]]], ids=repr)
@for_each("depth", range(94, 100), ids=str)
def test_plain_data_in_typed_data_is_as_deep_as_can_be_read(depth: int, inner: Any) -> None:
    value = inner
    for _ in range(depth):
        value = (value,)
    if depth + 3 <= MAX_DEPTH:
        assert encode(value).take() == value
    else:
        with pytest.raises(EncodeError, match=r"\]: nested deeper"):
            encode(value)


def rows_of(count: int) -> list[dict[str, Any]]:
    return [{"id": number, "tags": ["a"], "text": f"row {number}"} for number in range(count)]


@for_each("enabled", [True, False], ids=str)
def test_a_large_text_is_read_without_the_collector(enabled: bool) -> None:
    data = json.dumps(rows_of(40_000)).encode()
    collections_seen: list[str] = []
    was_enabled = gc.isenabled()
    gc.callbacks.append(lambda phase, _facts: collections_seen.append(phase))
    try:
        (gc.enable if enabled else gc.disable)()
        gc.collect()
        collections_seen.clear()
        assert len(decode(data)) == 40_000
        assert collections_seen.count("start") <= 1  # when it is on again, and dozens otherwise
        assert gc.isenabled() == enabled
        with pytest.raises(DecodeError):
            decode(data[:-1])
        assert gc.isenabled() == enabled
    finally:
        gc.callbacks.pop()
        (gc.enable if was_enabled else gc.disable)()


@pytest.mark.timing
def test_a_long_text_is_searched_for_tags_at_the_speed_of_one_byte() -> None:
    """Searching for a tag takes several times as long as searching for a byte."""
    texts = ["x" * 1_000_000] * 10
    data = encode(texts).data

    def seconds(call: Callable[[], object]) -> float:
        started = time_of_thread()
        call()
        return time_of_thread() - started

    ratio = min(
        seconds(lambda: decode(data)) / seconds(lambda: msgspec.json.decode(data))
        for _ in range(20)
    )
    assert ratio < 1.3
