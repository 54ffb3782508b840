"""Values as people write them, from their stored form: ``Page(title='home')``, ``(1, 2)``, ``b'x'``.

The classes of a value need not be known here. What has a literal in Python is written as that; dates,
numbers of other kinds, paths and the like are written as their text. No more is read of a value than
is shown of it.
"""

from __future__ import annotations

import base64
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from maestro_hive.maestro.state.codec_classes import TAG, Node

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from maestro_hive.maestro.state.codec import Json

#: How many characters of a value are written.
MOST_CHARACTERS = 2000
#: A value that is not longer is written in one line.
ONE_LINE = 90
#: What is nested deeper is left out.
_DEEPEST = 30
_LEFT_OUT = "…"
#: How many parts of a stored value a character stands for at most: an item takes the room of two, and
#: the largest that is written without more, a date with its zone, has ten.
_PARTS_OF_A_CHARACTER = 6
#: What a stored form raises that this program does not write.
_WRONG_FORM = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class ValueText(NamedTuple):
    """The text of a value; ``is_cut`` if it is not all of it."""

    text: str
    is_cut: bool


class _Group(NamedTuple):
    """What stands in brackets: each item with what is before it, such as its key."""

    opening: str
    items: list[tuple[str, _Group | str]]
    closing: str


def value_text(tree: Json, *, most: int = MOST_CHARACTERS, width: int = ONE_LINE) -> ValueText:
    """Return the text of a stored value; a text of several lines is itself."""
    if isinstance(tree, str) and "\n" in tree:
        is_cut = len(tree) > most
        return ValueText(f"{tree[:most]}{_LEFT_OUT}" if is_cut else tree, is_cut)
    writer = _Writer(most)
    part = writer.part(tree)
    return ValueText(_laid_out(part, 0, width), writer.is_cut)


def call_text(
    name: str, tree: Json, *, most: int = MOST_CHARACTERS, width: int = ONE_LINE
) -> ValueText:
    """Return the text of a call with its stored arguments: ``build('page', retries=2)``."""
    match tree:
        case {"args": list(args), "kwargs": dict(kwargs)} if TAG not in kwargs:
            writer = _Writer(most)
            given = [("", each) for each in args] + [(f"{key}=", kwargs[key]) for key in kwargs]
            return ValueText(
                _laid_out(writer.group(f"{name}(", given, ")"), 0, width), writer.is_cut
            )
        case _:
            return value_text(tree, most=most, width=width)


def beginning(tree: Json, *, most: int = MOST_CHARACTERS) -> Json:
    """Return the first parts of a stored value, which are all that a text of this length can show.

    So what is done to a value before it is shown, such as replacing secrets, takes no longer for a
    large one.
    """
    return _beginning(tree, iter(range(_PARTS_OF_A_CHARACTER * most)))


def _beginning(tree: Json, left: Iterator[int]) -> Json:
    """Return a value as far as there are numbers left, and one item more: that says there are others."""
    if isinstance(tree, dict):
        first: dict[str, Json] = {}
        for key, each in tree.items():
            is_last = next(left, None) is None
            first[key] = _beginning(each, left)
            if is_last:
                break
        return first
    if isinstance(tree, list):
        items: list[Json] = []
        for each in tree:
            is_last = next(left, None) is None
            items.append(_beginning(each, left))
            if is_last:
                break
        return items
    return tree


# --- layout ---------------------------------------------------------------------------------------


def _laid_out(part: _Group | str, indent: int, width: int) -> str:
    """Return a part in one line; if that is too long, with a line for each item."""
    line = _in_one_line(part)
    if isinstance(part, str) or not part.items or len(line) <= width - indent:
        return line
    inner = indent + 2
    items = [f"{' ' * inner}{before}{_laid_out(item, inner, width)}" for before, item in part.items]
    inside = ",\n".join(items)
    return f"{part.opening}\n{inside}\n{' ' * indent}{part.closing.lstrip(',')}"


def _in_one_line(part: _Group | str) -> str:
    if isinstance(part, str):
        return part
    items = ", ".join(f"{before}{_in_one_line(item)}" for before, item in part.items)
    return f"{part.opening}{items}{part.closing}"


# --- parts ----------------------------------------------------------------------------------------


class _Writer:
    """Writes one value, until there is no room left."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._depth = 0
        self.is_cut = False

    def part(self, tree: Json) -> _Group | str:
        """Return the text of a value, or of its parts."""
        if self._room <= 0 or self._depth > _DEEPEST:
            return self._left_out()
        self._depth += 1
        try:
            return self._part(tree)
        finally:
            self._depth -= 1

    def _part(self, tree: Json) -> _Group | str:
        if isinstance(tree, list):
            return self.items("[", tree, "]")
        if isinstance(tree, str):
            return self._quoted(tree)
        if not isinstance(tree, dict):
            return self._word(repr(tree))
        write = _TAGS.get(tree[TAG]) if isinstance(tree.get(TAG), str) else None
        if write is not None:
            try:
                return write(self, tree)
            except _WRONG_FORM:
                pass  # shown as it is stored
        return self.group("{", ((f"{self._key(key)}: ", each) for key, each in tree.items()), "}")

    def items(self, opening: str, trees: Json, closing: str) -> _Group:
        """Return the items of a sequence, in brackets."""
        return self.group(opening, (("", each) for each in trees), closing)

    def fields(self, opening: str, fields: Json) -> _Group:
        """Return what a call is given by name."""
        return self.group(opening, ((f"{name}=", each) for name, each in fields.items()), ")")

    def pairs(self, opening: str, pairs: Json, closing: str) -> _Group:
        """Return a dictionary whose keys are values, too."""
        keyed = ((f"{_in_one_line(self.part(key))}: ", each) for key, each in pairs)
        return self.group(opening, keyed, closing)

    def group(self, opening: str, items: Iterable[tuple[str, Json]], closing: str) -> _Group:
        """Return items in brackets; those that there is no room for are left out."""
        self._room -= len(opening) + len(closing)
        written: list[tuple[str, _Group | str]] = []
        for before, each in items:
            if self._room <= 0:
                written.append(("", self._left_out()))
                break
            self._room -= len(before) + 2
            written.append((before, self.part(each)))
        return _Group(opening, written, closing)

    def data(self, text: str) -> str:
        """Return bytes, stored as Base64."""
        needed = 4 * (max(self._room, 3) // 3)
        cut = len(text) > needed
        written = repr(base64.b64decode(text[:needed], validate=True))
        self.is_cut |= cut
        return self._word(f"{written}{_LEFT_OUT}" if cut else written)

    def _quoted(self, text: str) -> str:
        if len(text) <= self._room:
            return self._word(repr(text))
        cut = f"{repr(text[: self._room])[:-1]}{_LEFT_OUT}"
        self.is_cut = True
        return self._word(cut)

    def _key(self, key: str) -> str:
        return repr(key) if len(key) <= self._room else f"{key[: max(self._room, 0)]!r}{_LEFT_OUT}"

    def _word(self, text: str) -> str:
        self._room -= len(text)
        return text

    def _left_out(self) -> str:
        self.is_cut = True
        return _LEFT_OUT


# --- the forms of each kind -----------------------------------------------------------------------


def _class(node: Node) -> str:
    """Return the name of a class, without that of its module."""
    return str(node["t"]).rpartition(":")[2]


def _plain(_: _Writer, node: Node) -> str:
    return str(node["v"])


def _moment(_: _Writer, node: Node) -> str:
    text = str(node["v"]).replace("T", " ")
    return f"{text} {_zone(node['zone'])}" if "zone" in node else text


def _zone(node: Node) -> str:
    """Return the name of a time zone: its own, or how far it is from UTC."""
    if node[TAG] == "zoneinfo":
        return str(node["v"])
    days, seconds, microseconds, *name = node["v"]
    if name:
        return str(name[0])
    offset = timedelta(days, seconds, microseconds)
    sign, size = ("-", -offset) if offset < timedelta() else ("+", offset)
    return f"UTC{sign}{str(size).zfill(8)[:5]}" if offset else "UTC"


def _tuple(writer: _Writer, node: Node) -> _Group:
    return writer.items("(", node["v"], ",)" if len(node["v"]) == 1 else ")")


def _set(writer: _Writer, node: Node) -> _Group | str:
    return writer.items("{", node["v"], "}") if node["v"] else "set()"


def _range(_: _Writer, node: Node) -> str:
    start, stop, step = node["v"]
    return f"range({start}, {stop})" if step == 1 else f"range({start}, {stop}, {step})"


def _complex(writer: _Writer, node: Node) -> str:
    real, imaginary = (_in_one_line(writer.part(each)) for each in node["v"])
    return f"({real}{'' if imaginary.startswith('-') else '+'}{imaginary}j)"


def _defaultdict(writer: _Writer, node: Node) -> _Group:
    return writer.pairs(f"defaultdict({node['t']}, {{", node["v"], "})")


def _model(writer: _Writer, node: Node) -> _Group:
    return writer.fields(f"{_class(node)}(", node["v"])


def _number_of_numpy(writer: _Writer, node: Node) -> _Group | str:
    is_text = isinstance(node["v"], str)  # Base64: of a time, a text, or a long number
    return f"numpy {node['t']}" if is_text else writer.part(node["v"])


def _array(_: _Writer, node: Node) -> str:
    return f"array of {node['t']}, {' by '.join(map(str, node['shape']))}"


_TAGS: dict[str, Callable[[_Writer, Node], _Group | str]] = {
    **dict.fromkeys(("date", "decimal", "uuid", "path", "float"), _plain),
    "datetime": _moment,
    "time": _moment,
    "timedelta": lambda _, node: str(timedelta(*node["v"])),
    "timezone": lambda _, node: _zone(node),
    "zoneinfo": lambda _, node: _zone(node),
    "fraction": lambda _, node: "/".join(map(str, node["v"])),
    "complex": _complex,
    "range": _range,
    "bytes": lambda writer, node: writer.data(node["v"]),
    "bytearray": lambda writer, node: f"bytearray({writer.data(node['v'])})",
    "tuple": _tuple,
    "set": _set,
    "frozenset": lambda writer, node: writer.items("frozenset({", node["v"], "})"),
    "deque": lambda writer, node: writer.items("deque([", node["v"], "])"),
    "dict": lambda writer, node: writer.pairs("{", node["v"], "}"),
    "ordereddict": lambda writer, node: writer.pairs("OrderedDict({", node["v"], "})"),
    "counter": lambda writer, node: writer.pairs("Counter({", node["v"], "})"),
    "defaultdict": _defaultdict,
    "enum": lambda _, node: f"{_class(node)}.{node['v']}",
    "flag": lambda _, node: f"{_class(node)}({node['v']})",
    "dataclass": _model,
    "namedtuple": _model,
    "model": _model,
    "object": lambda writer, node: writer.items(f"{_class(node)}(", [node["v"]], ")"),
    "numpy": _number_of_numpy,
    "ndarray": _array,
}
