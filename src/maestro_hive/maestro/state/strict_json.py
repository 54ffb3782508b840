"""JSON text, read strictly and written in one form only.

No NaN, no duplicate keys, limits on size and depth; keys sorted, no spaces, UTF-8.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from maestro_hive.kernel.errors import DecodeError

if TYPE_CHECKING:
    from collections.abc import Callable

#: Deeper nesting than this is refused, on writing and on reading.
MAX_DEPTH = 100
#: What holds values is deeper than they are: a tag takes up to three levels of text, and a whole
#: state, a run or a document a few more. So what was accepted can also be copied.
WHOLE_DEPTH = MAX_DEPTH + 10
DOCUMENT_DEPTH = 3 * WHOLE_DEPTH
#: A larger text than this is refused, on writing and on reading.
MAX_BYTES = 256 * 1024 * 1024

Json = Any  # None | bool | int | float | str | list[Json] | dict[str, Json]

_encoder = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, sort_keys=True, separators=(",", ":")
)


def _reused(encoder: json.JSONEncoder) -> Callable[[Json], str]:
    """Return its ``encode``, without the half of it that sets up the same thing for each call."""
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:  # an interpreter without that part in C
        return encoder.encode
    write_text = json.encoder.encode_basestring
    pieces = make(None, encoder.default, write_text, None, ":", ",", True, False, False)
    return lambda tree: "".join(pieces(tree, 0))


to_text = _reused(_encoder)


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
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"


def dump_canonical(tree: Json) -> bytes:
    """Write plain JSON, already free of anything that needs a tag."""
    return to_text(tree).encode()


def parse(data: bytes, path: str = "value", *, depth: int = MAX_DEPTH) -> Json:
    """Read strict JSON; ``path`` names it in errors."""
    tree = parse_any_depth(data, path)
    level, found = [tree], 0
    while level := [item for node in level for item in _children(node)]:
        found += 1
        if found > depth:
            raise DecodeError(path, f"nested deeper than {depth} levels")
    return tree


def _children(node: Json) -> list[Json]:
    """Return what is directly inside, containers only."""
    items = node.values() if type(node) is dict else node if type(node) is list else ()
    return [item for item in items if type(item) is dict or type(item) is list]


def parse_any_depth(data: bytes, path: str) -> Json:
    """Read strict JSON for a caller who checks the depth while walking through it anyway."""
    if len(data) > MAX_BYTES:
        raise DecodeError(path, f"{len(data):,} bytes is over the limit of {MAX_BYTES:,}")
    try:
        text = data.decode("utf-8")
        tree = _decoder.decode(text)
        if "\\ud" in text or "\\uD" in text:
            dump_canonical(tree)  # half a surrogate pair, which only an escape can bring in
    except AtPathError as error:
        raise DecodeError(path, error.reason) from None
    except RecursionError:
        raise DecodeError(path, f"nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:  # not UTF-8, not JSON, or a number of thousands of digits
        raise DecodeError(path, f"not JSON of ours: {error}") from None
    return tree


def _unique_keys(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise AtPathError(f"the key {twice!r} stands twice in one object")
    return members


def _no_constant(name: str) -> Json:
    raise AtPathError(f"{name} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise AtPathError(f"the number {text[:40]} is too large")
    return number


# Made once: ``json.loads`` makes one for every call that wants anything of its own.
_decoder = json.JSONDecoder(
    object_pairs_hook=_unique_keys, parse_constant=_no_constant, parse_float=_finite
)
