"""Classes of the user's: registered codecs, numpy, and the names that classes are stored by."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maestro_hive.journal import user_classes
from maestro_hive.journal.user_classes import register_codec
from maestro_hive.journal.values import decode, encode, encode_call
from maestro_hive.kernel.errors import (
    ConfigurationError,
    DecodeError,
    EncodeError,
    UnknownClassError,
)
from tests.tables import for_each


class Money:
    def __init__(self, amount: int, currency: str) -> None:
        self.amount = amount
        self.currency = currency

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Money) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


class Other:
    pass


@dataclass
class Point:
    x: int


class Columns(np.ndarray[Any, Any]):
    pass


class Celsius(float):
    pass


@pytest.fixture(autouse=True)
def _own_codecs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a registry of its own."""
    monkeypatch.setattr(user_classes, "codecs", user_classes.Codecs())


def register_money(**options: Any) -> None:
    register_codec(
        Money, lambda money: (money.amount, money.currency), lambda pair: Money(*pair), **options
    )


# --- registered codecs ----------------------------------------------------------------------------


def test_a_registered_class_comes_back() -> None:
    with pytest.raises(EncodeError, match=r"^bill\.total: .*register_codec\(Money, encode, decode"):
        encode({"total": Money(5, "EUR")}, "bill")
    register_money()
    value = {"total": Money(5, "EUR"), "all": [Money(1, "USD")]}
    data = encode(value).data
    assert decode(data) == value
    assert json.loads(data)["total"] == {
        "$": "object",
        "t": f"{__name__}:Money",
        "v": {"$": "tuple", "v": [5, "EUR"]},
    }


def test_a_codec_is_found_by_its_name() -> None:
    register_money(name="money/1")
    data = encode(Money(5, "EUR")).data
    assert json.loads(data)["t"] == "money/1"
    register_codec(Other, lambda _: None, lambda _: Other())
    assert decode(data) == Money(5, "EUR")
    register_money(name="money/2")
    with pytest.raises(UnknownClassError, match=r"money/1.*register_codec"):
        decode(data)


def test_a_codec_goes_before_what_the_class_would_be_otherwise() -> None:
    register_codec(Point, lambda point: point.x, Point, name="point")
    register_codec(Celsius, float, Celsius)
    assert json.loads(encode(Point(3)).data) == {"$": "object", "t": "point", "v": 3}
    back = decode(encode([Point(3), Celsius(1.5)]).data)
    assert back == [Point(3), 1.5]
    assert type(back[1]) is Celsius


def test_an_error_in_a_codec_is_named_with_its_place() -> None:
    def broken(_value: object) -> Any:
        raise KeyError("gone")

    register_codec(Money, broken, broken, name="money")
    with pytest.raises(EncodeError, match=r"result\[0\]: the codec 'money' raised KeyError") as e:
        encode([Money(1, "EUR")], "result")
    assert isinstance(e.value.__cause__, KeyError)
    with pytest.raises(DecodeError, match=r"result\[0\]: not a valid object: 'gone'"):
        decode(b'[{"$":"object","t":"money","v":1}]', "result")


def test_a_value_that_changes_while_it_is_encoded_is_an_error_of_ours() -> None:
    value: dict[str, Any] = {"a": Money(1, "EUR"), "b": 1, "c": 2}
    register_codec(Money, lambda _: value.pop("c"), lambda _: Money(1, "EUR"))
    with pytest.raises(EncodeError, match="changed while it was encoded"):
        encode(value)


def test_what_a_codec_returns_is_limited_too() -> None:
    register_codec(Money, lambda money: money, lambda money: money)
    with pytest.raises(EncodeError, match="contains itself"):
        encode(Money(1, "EUR"))


def test_a_name_belongs_to_one_class() -> None:
    register_money(name="money")
    register_money(name="money")  # the same again, as when a module is reloaded
    with pytest.raises(ConfigurationError, match=r"'money' is registered already.*:Money"):
        register_codec(Other, lambda _: None, lambda _: Other(), name="money")


@for_each("kind", [dict, list, str, int, float, bool, type(None), tuple, Path])
def test_a_type_with_a_form_of_its_own_keeps_it(kind: Any) -> None:
    with pytest.raises(ConfigurationError, match="cannot be replaced"):
        register_codec(type(Path()) if kind is Path else kind, str, str)


class FakeEntryPoint:
    value = "somewhere:register"

    def __init__(self, register: Any) -> None:
        self._register = register

    def load(self) -> Any:
        return self._register


def test_codecs_of_installed_packages_are_loaded_on_first_miss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def entry_points(group: str) -> list[FakeEntryPoint]:
        asked.append(group)
        return [FakeEntryPoint(register_money)]

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    encode([1, {"a": Point(1)}])
    assert asked == []
    assert decode(encode(Money(1, "EUR")).data) == Money(1, "EUR")
    with pytest.raises(EncodeError):
        encode(Other())
    with pytest.raises(UnknownClassError):
        decode(b'{"$":"object","t":"unknown","v":1}')
    assert asked == ["maestro_hive.codecs"]


def test_a_package_whose_codecs_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ImportError("no such module")

    monkeypatch.setattr(metadata, "entry_points", lambda group: [FakeEntryPoint(broken)])
    with pytest.raises(ConfigurationError, match="somewhere:register cannot be loaded: no such"):
        encode(Other())
    with pytest.raises(DecodeError, match="somewhere:register cannot be loaded"):
        decode(b'{"$":"object","t":"unknown","v":1}')


# --- the program that was started -----------------------------------------------------------------

PROGRAM = """
import enum, sys
from dataclasses import dataclass
from typing import NamedTuple
from maestro_hive.journal.values import decode, encode, encode_call

class Color(enum.Enum):
    RED = 1

@dataclass
class Point:
    x: int

class Pair(NamedTuple):
    a: int

VALUE = [Color.RED, Point(1), Pair(2)]

if __name__ == "__main__":
    data = encode(VALUE).data
    back = decode(data)
    assert back == VALUE and type(back[1]) is Point
    print(data.decode())
    print(encode_call(VALUE, {}).digest.hex())
"""


def output_of(*arguments: str, cwd: Path) -> list[str]:
    return subprocess.check_output([sys.executable, *arguments], text=True, cwd=cwd).splitlines()


def test_a_program_has_the_same_names_started_and_imported(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "program.py").write_text(PROGRAM)
    (tmp_path / "program.py").write_text(PROGRAM)
    started = output_of("program.py", cwd=tmp_path)
    as_module = output_of("-m", "package.program", cwd=tmp_path)
    assert "__main__" not in started[0] + as_module[0]
    assert '"t":"program:Point"' in started[0]
    assert '"t":"package.program:Point"' in as_module[0]
    for module, (data, stored) in {"program": started, "package.program": as_module}.items():
        reader = (
            f"import {module} as it; from maestro_hive.journal.values import decode, encode_call;"
            f"back = decode({data.encode()!r}); assert back == it.VALUE, back;"
            f"assert encode_call(it.VALUE, {{}}).digest.hex() == {stored!r}; print('read')"
        )
        assert output_of("-c", reader, cwd=tmp_path) == ["read"]
        # and the other way: what was stored by who imported it is read by the program
        (tmp_path / "stored.json").write_text(data)
    again = PROGRAM + "\n    assert decode(open('stored.json', 'rb').read()) == VALUE\n"
    (tmp_path / "package" / "program.py").write_text(again)
    assert output_of("-m", "package.program", cwd=tmp_path) == as_module


def test_a_program_that_also_imports_itself_stores_both_classes(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        PROGRAM + "    import program\n    print(encode(program.VALUE).data.decode())\n"
    )
    data, _, imported = output_of("program.py", cwd=tmp_path)
    assert data == imported


# --- numpy ----------------------------------------------------------------------------------------

NUMPY: dict[str, Any] = {
    "float64": np.float64(0.1),
    "float64 nan": np.float64("nan"),
    "float32": np.float32(0.1),
    "float16": np.float16(-0.0),
    "longdouble": np.longdouble("0.1"),
    "int8": np.int8(-5),
    "uint64": np.uint64(2**64 - 1),
    "bool": np.bool_(True),
    "complex128": np.complex128(1 - 2j),
    "complex64": np.complex64(1 - 2j),
    "datetime64": np.datetime64("2030-01-01T01:02:03.123456789"),
    "timedelta64": np.timedelta64(5, "D"),
    "not a time": np.datetime64("NaT", "s"),
    "str": np.str_("grün"),
    "bytes": np.bytes_(b"abc"),
    "an array": np.arange(12, dtype="int16").reshape(3, 4),
    "an empty array": np.zeros((0, 3)),
    "an array of no dimension": np.array(1.5),
    "an array of texts": np.array(["a", "grün"]),
    "an array of times": np.array(["2030-01-01", "NaT"], dtype="datetime64[ns]"),
    "an array of nan": np.array([np.nan, np.inf, -0.0]),
    "an array of bools": np.array([True, False]),
    "a big-endian array": np.array([1, 2, 3], dtype=">i4"),
    "a transposed array": np.arange(6.0).reshape(2, 3).T,
    "every second item": np.arange(10)[::2],
}


@for_each("value", NUMPY.values(), ids=NUMPY)
def test_a_value_of_numpy_comes_back(value: Any) -> None:
    encoded = encode({"in": [value]})
    back = decode(encoded.data)["in"][0]
    assert type(back) is type(value)
    assert back.dtype == value.dtype
    assert back.shape == value.shape
    np.testing.assert_array_equal(back, value)
    assert back.tobytes() == value.tobytes()
    assert encode(back).identity() == encode(value).identity()
    if isinstance(back, np.ndarray):
        assert back.flags.writeable


def test_what_numpy_cannot_give_faithfully_is_refused() -> None:
    for value in (
        np.array([object()]),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.ma.array([1, 2], mask=[True, False]),
        np.arange(3).view(Columns),
    ):
        with pytest.raises(EncodeError, match=r"^value\.a: "):
            encode({"a": value})


@for_each(
    "tree",
    [
        {"$": "ndarray", "t": "<f8", "shape": [2], "v": "AAAA"},
        {"$": "ndarray", "t": "<f8", "shape": [-1], "v": ""},
        {"$": "ndarray", "t": "<f8", "shape": [True], "v": "AAAAAAAAAAA="},
        {"$": "ndarray", "t": "<f8", "shape": "1", "v": "AAAAAAAAAAA="},
        {"$": "ndarray", "t": "|O8", "shape": [1], "v": "AAAAAAAAAAA="},
        {"$": "ndarray", "t": "<f8,<f8", "shape": [1], "v": "AAAAAAAAAAA="},
        {"$": "ndarray", "t": "<f999", "shape": [1], "v": "AAAAAAAAAAA="},
        {"$": "ndarray", "t": 5, "shape": [1], "v": "AAAAAAAAAAA="},
        {"$": "ndarray", "t": "<U0", "shape": [10**12], "v": ""},
        {"$": "numpy", "t": "<f8", "v": "1"},
        {"$": "numpy", "t": "<i8", "v": 1.5},
        {"$": "numpy", "t": "|i1", "v": 1000},
        {"$": "numpy", "t": "<c16", "v": "AAAA"},
        {"$": "numpy", "t": "<c16", "v": ""},
    ],
    ids=str,
)
def test_a_value_of_numpy_with_wrong_contents_is_refused(tree: Any) -> None:
    with pytest.raises(DecodeError):
        decode(json.dumps(tree).encode())


def test_numpy_is_imported_for_its_values_alone(tmp_path: Path) -> None:
    (tmp_path / "plain.json").write_bytes(encode(1.5).data)
    (tmp_path / "data.json").write_bytes(encode(np.float64(1.5)).data)
    reader = (
        "import sys; from maestro_hive.journal import values\n"
        "for name in ('plain.json', 'data.json'):\n"
        "    values.decode(open(name, 'rb').read())\n"
        "    print('numpy' in sys.modules)"
    )
    assert output_of("-c", reader, cwd=tmp_path) == ["False", "True"]


def test_a_number_of_numpy_is_not_taken_for_one_of_python() -> None:
    assert type(decode(encode([np.float64(1.5), 1.5]).data)[0]) is np.float64
    assert encode_call((np.float64(1.5),), {}).digest != encode_call((1.5,), {}).digest
