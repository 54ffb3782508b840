"""JSON text: written without spaces in UTF-8, read strictly.

No NaN, no duplicate keys, no half of a surrogate pair, limits on size and depth.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Iterable
from itertools import chain, islice
from typing import Any, NamedTuple

from maestro_hive.kernel.errors import DecodeError

#: Deeper nesting than this is refused, on writing and on reading.
MAX_DEPTH = 100
#: What holds values is deeper than they are: a tag takes up to three levels of text, and a whole
#: state, a run or a document a few more. So what was accepted can also be copied.
WHOLE_DEPTH = MAX_DEPTH + 10
DOCUMENT_DEPTH = 3 * WHOLE_DEPTH
#: A larger text than this is refused, on writing and on reading.
MAX_BYTES = 256 * 1024 * 1024

#: What writing a value takes, in units of about 3 ns; a character of a text takes 1.
COST_OF_VALUE = 100

Json = Any  # None | bool | int | float | str | list[Json] | dict[str, Json]
Value = Any  # whatever a program stores
#: Gives the pieces of a tree's text, to be joined; its second argument is always 0.
Writer = Callable[[Json, int], Iterable[str]]

#: The types that the C encoder writes as they are and reads back as they were.
SCALARS: frozenset[type] = frozenset({str, int, float, bool, type(None)})
_JSON_TYPES = SCALARS | {list, dict}
#: Those whose values can all be written.
FINITE = SCALARS - {float}
TEXT = frozenset({str})


class AtPathError(Exception):
    """A problem that learns its path on the way out, so that good values pay nothing for it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.steps: list[str] = []

    def where(self) -> str:
        """Return the path from the outermost value to the problem."""
        return "".join(reversed(self.steps))


def member(key: object) -> str:
    """Return how a path names the member ``key``."""
    return f".{key}" if type(key) is str and key.isidentifier() else item_step(key)


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 100


def item_step(key: object) -> str:
    """Return how a path names the item at ``key``."""
    try:
        return f"[{_short.repr(key)}]"
    except ValueError:  # an integer of thousands of digits
        return f"[a {type(key).__name__}]"


# --- writing --------------------------------------------------------------------------------------


#: Texts from this length on are faster searched for each character that needs an escape.
LONG_TEXT = 2048
_write_text: Callable[[str], str] = json.encoder.encode_basestring
#: The backslash first: the others bring it in.
_ESCAPES = {char: _write_text(char)[1:-1] for char in ("\\", '"', *map(chr, range(32)))}


def _write_long_text(text: str) -> str:
    """Return what the C encoder does, of a long text in a fifth of the time."""
    if len(text) < LONG_TEXT:
        return _write_text(text)
    for char, escape in _ESCAPES.items():
        if char in text:
            text = text.replace(char, escape)
    return f'"{text}"'


def _writer(write_text: Callable[[str], str] = _write_text, *, sort_keys: bool = False) -> Writer:
    """Return the C encoder itself: ``JSONEncoder.encode`` makes a new one for every call."""
    encoder = json.JSONEncoder(
        ensure_ascii=False,
        check_circular=False,
        allow_nan=False,
        sort_keys=sort_keys,
        separators=(",", ":"),
    )
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:  # an interpreter without that part in C
        return lambda tree, _level: [encoder.encode(tree)]
    made: Writer = make(None, encoder.default, write_text, None, ":", ",", sort_keys, False, False)
    return made


#: Keys in the order they have, and keys sorted; the same for long texts.
write = _writer()
write_sorted = _writer(sort_keys=True)
write_long = _writer(_write_long_text)
_write_long_sorted = _writer(_write_long_text, sort_keys=True)
#: How many values of a tree are looked at, and of one container, for a long text.
_SAMPLED = 24
_SAMPLES = 4


def writer_for(tree: Json, *, canonical: bool = False) -> Writer:
    """Return what writes a tree faster, as far as a few of its values show; to the same text."""
    if _has_long_text(tree):
        return _write_long_sorted if canonical else write_long
    return write_sorted if canonical else write


def _has_long_text(tree: Json) -> bool:
    found: list[Json] = [tree]
    for each in found:  # it grows on the way
        kind = type(each)
        if kind is str:
            if len(each) >= LONG_TEXT:
                return True
        elif len(found) > _SAMPLED:
            continue
        elif kind is list:
            found += each[-_SAMPLES:]  # the first message of a list may be a short one
        elif kind is dict:
            found += islice(each.values(), _SAMPLES)
    return False


def dump(tree: Json) -> bytes:
    """Write plain JSON, keys in the order they have."""
    return "".join(write(tree, 0)).encode()


def dump_canonical(tree: Json) -> bytes:
    """Write plain JSON, keys sorted: equal trees give equal bytes."""
    return "".join(write_sorted(tree, 0)).encode()


# --- trees ----------------------------------------------------------------------------------------


def is_plain(
    value: list[Value] | dict[Value, Value], depth: int = MAX_DEPTH, most: int | None = None
) -> bool | None:
    """Return whether the C encoder writes a value as it is, to be read back the same.

    It would write tuples as lists, numbers as keys, and an enum as its number. What it refuses by
    itself (NaN, too long an integer, half a surrogate pair) is not looked for here. Return None as
    soon as writing takes more than ``most``, in the units of ``COST_OF_VALUE``.
    """
    containers: list[Value] = [value]
    cost = 0
    for _ in range(depth):
        inside: list[Value] = []
        for each in containers:
            if most is not None:
                cost += len(each) * COST_OF_VALUE
                if cost > most or (cost := cost + _text_length(each)) > most:
                    return None
            items = each
            if type(each) is dict:
                if not TEXT.issuperset(map(type, each)):
                    return False
                items = each.values()
            if not SCALARS.issuperset(map(type, items)):
                if not _JSON_TYPES.issuperset(map(type, items)):
                    return False
                inside += [item for item in items if type(item) is dict or type(item) is list]
        if not inside:
            return True
        containers = _distinct(inside)
    return False


def copied(tree: Json) -> Json:
    """Return a copy of plain JSON, in a fraction of the time that ``copy.deepcopy`` takes."""
    if type(tree) is dict:
        return {key: each if type(each) in SCALARS else copied(each) for key, each in tree.items()}
    if type(tree) is list:
        return [each if type(each) in SCALARS else copied(each) for each in tree]
    return tree


class PlainCopy(NamedTuple):
    """A copy of plain data, and what a look at all of it has shown."""

    value: Value
    #: How many characters its texts have, keys too.
    characters: int
    #: What writing it takes, in the units of ``COST_OF_VALUE``.
    cost: int


def plain_copy(value: Value, most: int) -> PlainCopy | None:
    """Return plain data as it would be read back; None of all else, and of more than so many values."""
    copies = _Copies(most)
    try:
        copied = copies.of(value, MAX_DEPTH)
    except _NoCopyError:
        return None
    values = most - copies.left
    return PlainCopy(copied, copies.characters, values * COST_OF_VALUE + copies.characters)


class _NoCopyError(Exception):
    """It is not plain, or has too many values."""


class _Copies:
    """Copies lists and dictionaries; what they hold is shared, since it cannot be changed."""

    __slots__ = ("characters", "left")

    def __init__(self, most: int) -> None:
        self.left = most
        self.characters = 0

    def of(self, value: Value, depth: int) -> Value:
        kind = type(value)
        if kind is not dict and kind is not list:
            raise _NoCopyError
        self.left -= len(value)
        if self.left < 0 or not depth:
            raise _NoCopyError
        items: Iterable[Value] = value
        if kind is dict:
            if not TEXT.issuperset(map(type, value)):
                raise _NoCopyError
            self.characters += sum(map(len, value))
            items = value.values()
        kinds = set(map(type, items))
        if str in kinds:
            self.characters += sum([len(each) for each in items if type(each) is str])
        if SCALARS.issuperset(kinds):
            return value.copy()
        below = depth - 1
        if kind is list:
            return [each if type(each) in SCALARS else self.of(each, below) for each in value]
        return {
            key: each if type(each) in SCALARS else self.of(each, below)
            for key, each in value.items()
        }


def _text_length(container: Value) -> int:
    """Return how long the texts are that a list or dictionary holds."""
    if type(container) is dict:
        return _text_length([*container, *container.values()])
    if TEXT.issuperset(map(type, container)):
        return sum(map(len, container))
    return sum([len(item) for item in container if type(item) is str])


def _distinct(containers: list[Value]) -> list[Value]:
    """Return each once, so that what contains itself does not grow on the way down."""
    if len(set(map(id, containers))) == len(containers):
        return containers
    return list({id(each): each for each in containers}.values())


def is_sorted(tree: Json) -> bool:
    """Return whether the keys of all dictionaries in a tree are in order."""
    inside: list[Value] = [tree]
    for each in inside:  # it grows on the way
        items = each
        if type(each) is dict:
            keys = list(each)
            if len(keys) > 1 and keys != sorted(keys):
                return False
            items = each.values()
        if not SCALARS.issuperset(map(type, items)):
            inside += [item for item in items if type(item) is dict or type(item) is list]
    return True


def check(tree: Json, depth: int) -> None:
    """Raise an error if a tree read from text is too deep or has an infinite number.

    It goes level by level, at the speed of C.
    """
    values: list[Value] = [tree]
    kinds: set[type] = {type(tree)}
    for _ in range(depth + 1):
        if float in kinds and any(map(math.isinf, [v for v in values if type(v) is float])):
            raise AtPathError("a number is too large")
        lists = [value for value in values if type(value) is list] if list in kinds else []
        dicts = [value for value in values if type(value) is dict] if dict in kinds else []
        if not lists and not dicts:
            return
        values = list(chain.from_iterable(chain(lists, map(dict.values, dicts))))
        kinds = set(map(type, values))
    raise AtPathError(f"nested deeper than {depth} levels")


# --- reading --------------------------------------------------------------------------------------


def parse(data: bytes, path: str = "value", *, depth: int = MAX_DEPTH) -> Json:
    """Read strict JSON; ``path`` names it in errors."""
    check_size(data, path)
    try:
        return parse_text(str(data, "utf-8"), depth)
    except (AtPathError, RecursionError, ValueError) as error:
        raise decode_error(error, path, depth) from None


def check_size(data: bytes, path: str) -> None:
    """Raise an error if a text is too large to be read."""
    if len(data) > MAX_BYTES:
        raise DecodeError(path, f"{len(data):,} bytes is over the limit of {MAX_BYTES:,}")


def parse_text(text: str, depth: int) -> Json:
    """Return the tree of a text; raise AtPathError or ValueError if it is not strict JSON."""
    try:
        tree, end = scan_once(text, 0)
    except StopIteration:
        tree, end = None, -1
    if end != len(text):  # white space, or no JSON: not as we write it
        tree = _decoder.decode(text)
    if "\\" in text and ("\\ud" in text or "\\uD" in text):
        dump(tree)  # half a surrogate pair, which only an escape can bring in
    is_flat = type(tree) is dict and FINITE.issuperset(map(type, tree.values()))
    if not is_flat and type(tree) not in FINITE:
        check(tree, depth)
    return tree


def decode_error(error: Exception, path: str, depth: int) -> DecodeError:
    """Return what to raise for an error that ``parse_text`` raised."""
    if isinstance(error, AtPathError):
        return DecodeError(path, error.reason)
    if isinstance(error, RecursionError):
        return DecodeError(path, f"nested deeper than {depth} levels")
    # Not UTF-8, not JSON, or a number of thousands of digits.
    return DecodeError(path, f"not JSON of ours: {error}")


def _unique_keys(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise AtPathError(f"the key {twice!r} stands twice in one object")
    return members


def _no_constant(name: str) -> Json:
    raise AtPathError(f"{name} is not JSON")


# Made once: ``json.loads`` makes one for every call that wants anything of its own.
_decoder = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_no_constant)
#: Return the value that begins at an index of a text, and the index behind it.
scan_once: Callable[[str, int], tuple[Json, int]] = _decoder.scan_once  # type: ignore[attr-defined]
