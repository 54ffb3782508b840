"""JSON text, read strictly and written in one form only.

No NaN, no duplicate keys, limits on size and depth; keys sorted, no spaces, UTF-8.
"""

from __future__ import annotations

import json
import math
from typing import Any

from maestro_hive.kernel.errors import DecodeError

#: Deeper nesting than this is refused, on writing and on reading.
MAX_DEPTH = 100
#: A larger text than this is refused, on writing and on reading.
MAX_BYTES = 256 * 1024 * 1024

Json = Any  # None | bool | int | float | str | list[Json] | dict[str, Json]

to_text = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, allow_nan=False, sort_keys=True, separators=(",", ":")
).encode


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


def parse(data: bytes, path: str = "value") -> Json:
    """Read strict JSON; ``path`` names it in errors."""
    tree = parse_any_depth(data, path)
    level, depth = [tree], 0
    while level := [item for node in level for item in _children(node)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise DecodeError(path, f"nested deeper than {MAX_DEPTH} levels")
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
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except AtPathError as error:
        raise DecodeError(path, error.reason) from None
    except RecursionError:
        raise DecodeError(path, f"nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:  # not UTF-8, not JSON, or a number of thousands of digits
        raise DecodeError(path, f"not JSON of ours: {error}") from None


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
