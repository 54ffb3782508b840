"""Values and errors that the steps of generated programs return, raise and change.

``show`` writes a value as a text that two values share exactly when a workflow cannot tell them
apart: type, order, sign of zero and NaN included. Whether two places of a value are one object is
written apart, by ``shared_places``.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import importlib.util
import math
import struct
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

if TYPE_CHECKING:
    from collections.abc import Callable

HAS_NUMPY = importlib.util.find_spec("numpy") is not None
_MUTABLE = (list, dict, set, bytearray, deque)


class Colour(enum.Enum):
    """An enum of the user's."""

    RED = "red"
    BLUE = "blue"


class Rights(enum.Flag):
    """A flag of the user's."""

    READ = enum.auto()
    WRITE = enum.auto()


@dataclass
class Draft:
    """A dataclass of the user's, which can be changed."""

    title: str
    tags: list[str] = field(default_factory=list)


class Point(NamedTuple):
    """A named tuple of the user's."""

    x: int
    y: float


class Money:
    """A class of the user's that is stored with a codec of its own."""

    def __init__(self, cents: int) -> None:
        self.cents = cents


# --- errors ---------------------------------------------------------------------------------------


class OutOfStockError(Exception):
    """An error with attributes, made of other arguments than it stores."""

    def __init__(self, item: str, *, left: int) -> None:
        super().__init__(f"only {left} of {item} left")
        self.item = item
        self.left = left


class RefusedError(ValueError):
    """A plain error with arguments."""


class ProviderError(RuntimeError):
    """An error whose constructor must not be called again, as those of HTTP clients."""

    def __init__(self, response: dict[str, Any]) -> None:
        super().__init__("the provider refused")
        self.status = response["status"]
        self.headers = response["headers"]


#: The errors that a step can raise and a program can catch, by name.
ERRORS: dict[str, type[BaseException]] = {
    "OutOfStockError": OutOfStockError,
    "RefusedError": RefusedError,
    "ProviderError": ProviderError,
    "TimeoutError": TimeoutError,
    "ExceptionGroup": ExceptionGroup,
    "Exception": Exception,
}
RAISED = ("OutOfStockError", "RefusedError", "ProviderError", "cause", "context")


def make_error(kind: str, text: str) -> Exception:
    """Return an error of this kind; raise it ``from`` nothing, or the cause is lost."""
    match kind:
        case "OutOfStockError":
            return OutOfStockError(text[-12:], left=crc32(text.encode()) % 5)
        case "ProviderError":
            return ProviderError({"status": 429, "headers": {"retry-after": "0", "id": text[-8:]}})
        case "cause":
            error: Exception = RefusedError("refused", text[-12:])
            cause = OutOfStockError("bolts", left=1)
            cause.__cause__ = KeyError("warehouse")
            error.__cause__ = cause
            return error
        case "context":
            return RefusedError("from the handler of another error", -0.0, ("a", 1))
        case _:
            return RefusedError("refused", text[-12:])


def show_error(error: BaseException, depth: int = 6) -> str:
    """Return an error's class, arguments, attributes, parts and causes as a text.

    Of the package's own errors the class and the causes: what they say may have times in it, and
    attempts that were interrupted.
    """
    text = type(error).__name__
    if not type(error).__module__.startswith("maestro_hive"):
        own = {name: each for name, each in vars(error).items() if not name.startswith("__")}
        text += show(error.args) + (show(dict(sorted(own.items()))) if own else "")
    if isinstance(error, BaseExceptionGroup):
        text = f"{type(error).__name__}({error.message!r}, "
        text += f"[{', '.join(show_error(each) for each in error.exceptions)}])"
    if error.__cause__ is not None and depth:
        text += f" from {show_error(error.__cause__, depth - 1)}"
    return text


# --- values ---------------------------------------------------------------------------------------


def _shared(number: int) -> Any:
    one = [number]
    return {"a": one, "b": one, "c": (one,)}


def _default_dict(number: int) -> defaultdict[str, list[int]]:
    found: defaultdict[str, list[int]] = defaultdict(list)
    found["z"].append(number)
    found["a"].append(0)
    return found


def _array(number: int) -> Any:
    import numpy as np

    return np.array([[number, 2.5], [math.nan, -0.0]])


def _numpy_scalar(number: int) -> Any:
    import numpy as np

    return [np.float32(number + 0.1), np.int64(number)]


_DAY = dt.date(2031, 5, 17)
_NOON = dt.datetime(2031, 5, 17, 12, tzinfo=dt.UTC)

KINDS: dict[str, Callable[[int], Any]] = {
    "text": lambda number: f"text {number}",
    "number": lambda number: number,
    "dict": lambda number: {"zebra": number, "apple": [1], "mango": {"y": 1, "b": 2}},
    "list": lambda number: [number, [number + 1], "three"],
    "nan": lambda number: [math.nan, math.inf, -math.inf, float(number)],
    "zero": lambda number: (-0.0, 0.0, number),
    "tuple": lambda number: ("a", (number,), ()),
    "bytes": lambda number: [b"\x00\xff" + bytes([number % 256]), bytearray(b"change me")],
    "set": lambda number: {number, "b", ("c", 1)},
    "frozenset": lambda number: frozenset({number, 2.5}),
    "enum": lambda number: [Colour.RED, Colour.BLUE, Rights.READ | Rights.WRITE, Rights(0), number],
    "dataclass": lambda number: Draft(f"draft {number}", ["first"]),
    "named": lambda number: Point(number, -0.0),
    "registered": lambda number: [Money(number)],
    "counter": lambda number: Counter({"z": 2, "a": number, "m": 1}),
    "deque": lambda number: deque([number, 2, 3], maxlen=5),
    "default": _default_dict,
    "ordered": lambda number: OrderedDict([("z", number), ("a", 1)]),
    "decimal": lambda number: [Decimal("1.10"), Decimal(number), Fraction(number, 7)],
    "dates": lambda number: [
        _DAY + dt.timedelta(days=number),
        _NOON,
        dt.time(3, number % 60),
        dt.timedelta(seconds=number, microseconds=7),
    ],
    "keys": lambda number: {number: "int", (1, "a"): "tuple", _DAY: "date", None: "none"},
    "ids": lambda number: [uuid.UUID(int=number), PurePosixPath("a/b") / str(number)],
    "shared": _shared,
    "none": lambda _: None,
    "bool": lambda number: [bool(number % 2), True],
}
if HAS_NUMPY:
    KINDS |= {"array": _array, "numpy": _numpy_scalar}


def change(value: Any) -> bool:
    """Change a value in place, as code that holds it could; return whether that is possible."""
    inside = list(value.values()) if isinstance(value, dict) else value
    if isinstance(value, list | tuple | deque | dict):
        changed = [change(each) for each in inside]
        if isinstance(value, tuple):
            return any(changed)
    match value:
        case list() | deque():
            value.append("changed")
        case Counter():
            value["changed"] += 1
        case dict():
            value["changed"] = [1]
        case set():
            value.add("changed")
        case bytearray():
            value += b"changed"
        case Draft():
            value.title = "changed"
            value.tags.append("changed")
        case Money():
            value.cents += 1
        case _:
            return _change_array(value)
    return True


def _change_array(value: Any) -> bool:
    can_change = type(value).__name__ == "ndarray"
    if can_change:
        value[0] = 99
    return can_change


def number_of(value: Any, below: int) -> int:
    """Return a number that depends on the whole value: which way a program goes."""
    return crc32(show(value).encode()) % below


def show(value: Any) -> str:  # noqa: C901, PLR0911 - one case for each kind
    """Return a value as a text that tells its type and its order."""
    kind = type(value)
    name = kind.__name__
    match value:
        case BaseException():
            return show_error(value)
        case float():
            return f"{name}({'nan' if math.isnan(value) else repr(float(value))})"
        case enum.Enum():
            return f"{name}({value.name or value.value})"
        case str() | bytes() | int() | bytearray() | None:
            return repr(value)
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            own = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
            return f"{name}{show(own)}"
        case dict():
            inside = ", ".join(f"{show(key)}: {show(each)}" for key, each in value.items())
            factory = getattr(value, "default_factory", None)
            of = "" if kind is dict else f"{name}[{getattr(factory, '__name__', '')}]"
            return f"{of}{{{inside}}}"
        case set() | frozenset():
            return f"{name}({', '.join(sorted(map(show, value)))})"
        case list() | tuple() | deque():
            limit = f" of {value.maxlen}" if isinstance(value, deque) else ""
            shown = f"[{', '.join(map(show, value))}]"
            return f"({shown[1:-1]})" if kind is tuple else f"{name}{limit}{shown}"
        case Money():
            return f"Money({value.cents})"
        case _ if kind.__module__ == "numpy":
            return _show_numpy(value)
        case _:
            return f"{name}({value!r})"


def _show_numpy(value: Any) -> str:
    if getattr(value, "shape", ()):
        items = [struct.pack("d", each).hex() for each in value.ravel().tolist()]
        return f"array({value.dtype}, {value.shape}, {items})"
    return f"{type(value).__name__}({value.item()!r})"


def shared_places(value: Any) -> int:
    """Return how many places of a value are objects that were met before and can be changed."""
    met: set[int] = set()
    repeated = 0

    def visit(each: Any) -> None:
        nonlocal repeated
        if isinstance(each, _MUTABLE):
            if id(each) in met:
                repeated += 1
                return
            met.add(id(each))
        inside = each.values() if isinstance(each, dict) else each
        if isinstance(each, list | tuple | dict | deque):
            for one in inside:
                visit(one)

    visit(value)
    return repeated
