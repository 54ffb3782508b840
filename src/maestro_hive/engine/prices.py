"""What models cost: a small table with the date it was made, and users' own in its place."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from maestro_hive.kernel.errors import ConfigurationError

if TYPE_CHECKING:
    from maestro_hive.engine.usage import Usage

#: When the table below was made: prices change, and yours may be others.
MADE = "2025-12-01"
#: US dollars for a million tokens: input, output, input that was cached, input written to a cache.
_TABLE: dict[str, tuple[float, ...]] = {
    "gpt-5": (1.25, 10, 0.125),
    "gpt-5-mini": (0.25, 2, 0.025),
    "gpt-5-nano": (0.05, 0.4, 0.005),
    "gpt-4.1": (2, 8, 0.5),
    "gpt-4.1-mini": (0.4, 1.6, 0.1),
    "gpt-4.1-nano": (0.1, 0.4, 0.025),
    "gpt-4o": (2.5, 10, 1.25),
    "gpt-4o-mini": (0.15, 0.6, 0.075),
    "o3": (2, 8, 0.5),
    "o4-mini": (1.1, 4.4, 0.275),
    "claude-opus-4-5": (5, 25, 0.5, 6.25),
    "claude-opus-4-1": (15, 75, 1.5, 18.75),
    "claude-sonnet-4-5": (3, 15, 0.3, 3.75),
    "claude-sonnet-4": (3, 15, 0.3, 3.75),
    "claude-3-7-sonnet": (3, 15, 0.3, 3.75),
    "claude-haiku-4-5": (1, 5, 0.1, 1.25),
    "claude-3-5-haiku": (0.8, 4, 0.08, 1),
}
#: The end of a model's name that says which of its versions it is.
_VERSION = re.compile(r"(-latest|-\d{8}|-\d{4}-\d{2}-\d{2})$")
_PARTS = ("input", "output", "cached", "cache_write")


class Price(NamedTuple):
    """What a model costs: millionths of a US dollar for a million tokens."""

    input: int
    output: int
    cached: int
    cache_write: int

    def cost(self, usage: Usage) -> int:
        """Return what a usage costs, in millionths of a dollar, rounded up."""
        # Tokens of which it is not known what they were are counted at the higher price.
        unknown = max(0, usage.tokens - usage.input - usage.output - usage.cache_write)
        total = (
            usage.input * self.input
            + usage.output * self.output
            + usage.cached * self.cached
            + usage.cache_write * self.cache_write
            + unknown * self.highest
        )
        return -(-total // 1_000_000)

    @property
    def highest(self) -> int:
        """What its most expensive token costs."""
        return max(self.input, self.output)


@dataclass(frozen=True)
class Prices:
    """What models cost, and when that was written down.

    ``models`` has US dollars for a million tokens, by the model's name: ``{"input": 3, "output": 15}``,
    with ``cached`` and ``cache_write`` where they differ from ``input``.
    """

    models: Mapping[str, Mapping[str, float]]
    made: str = ""

    def __post_init__(self) -> None:
        read = {name: _price(name, parts) for name, parts in self.models.items()}
        object.__setattr__(self, "_read", read)

    def of(self, model: str) -> Price | None:
        """Return the price of a model, also of a version of it (``gpt-5-2025-08-07``); or None."""
        read: dict[str, Price] = self._read  # type: ignore[attr-defined]
        return (read.get(model) or read.get(_VERSION.sub("", model))) if model else None


def _price(name: object, parts: object) -> Price:
    good = (
        isinstance(name, str)
        and isinstance(parts, Mapping)
        and {"input", "output"} <= parts.keys() <= set(_PARTS)
        and all(type(each) in (int, float) and 0 <= each < 1e9 for each in parts.values())
    )
    if not good:
        raise ConfigurationError(
            f"the price of {name!r} is {parts!r}, and must be US dollars for a million tokens, as in"
            " {'input': 3, 'output': 15}, where 'cached' and 'cache_write' may be added"
        )
    known: Mapping[str, Any] = parts  # type: ignore[assignment]
    return Price(*(round(known.get(part, known["input"]) * 1e6) for part in _PARTS))


def default_prices() -> Prices:
    """Return the prices that this version knows."""
    models = {name: dict(zip(_PARTS, parts, strict=False)) for name, parts in _TABLE.items()}
    return Prices(models, MADE)


def read_prices(given: object) -> Prices:
    """Return the prices that a user gives: a table, a dictionary of models, or a JSON file of one."""
    if given is None:
        return default_prices()
    if isinstance(given, Prices):
        return given
    if isinstance(given, str | PathLike):
        path = Path(given)
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"the prices in {path} cannot be read: {error}") from error
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"prices are a table, or the name of a JSON file, not {given!r}")
    if isinstance(given.get("models"), Mapping):
        return Prices(given["models"], str(given.get("made", "")))
    return Prices(given)
