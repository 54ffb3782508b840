"""What a call used, each token once: agents report by message, by call or by session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maestro_hive.engine.usage import MOST_TOKENS, Usage
from maestro_hive.team.agents.calls import Totals

if TYPE_CHECKING:
    from maestro_hive.engine.prices import Prices

_NOTHING = Totals()


class Meter:
    """Counts what a session uses; each method returns what was not counted before.

    The same tokens may be reported for a message, then for the call, then for the whole session:
    each report is compared with what was counted of the same thing.
    """

    def __init__(self, counted: Totals, prices: Prices | None = None) -> None:
        self._prices = prices
        #: What was counted of the session, by this call and those before it.
        self.session = counted
        self._call = _NOTHING
        self._messages: dict[str, Totals] = {}

    def message(self, key: str, so_far: Totals, model: str = "") -> Totals:
        """Count a message whose usage may still grow; its money is what the price list says."""
        before = self._messages.get(key, _NOTHING)
        more = so_far.beyond(before)
        self._messages[key] = before.plus(more)
        if not more.usd:
            more = more._replace(usd=self._price(more, model))
        return self._count(more)

    def call(self, total: Totals) -> Totals:
        """Count what is reported of this call as a whole."""
        return self._count(total.beyond(self._call))

    def whole_session(self, total: Totals) -> Totals:
        """Count what is reported of the session as a whole, also of calls that were killed."""
        return self._count(total.beyond(self.session))

    def _count(self, more: Totals) -> Totals:
        self._call = self._call.plus(more)
        self.session = self.session.plus(more)
        return more

    def _price(self, more: Totals, model: str) -> int:
        price = self._prices.of(model) if self._prices is not None else None
        if price is None:
            return 0
        tokens = more.input + more.output + more.written
        return price.cost(Usage(tokens, more.cached, more.input, more.output, more.written))


def tokens(value: object) -> int:
    """Return a number of tokens that an output reports; 0 if it is none."""
    return value if type(value) is int and 0 < value <= MOST_TOKENS else 0


def micros(value: object) -> int:
    """Return an amount of US dollars that an output reports in millionths; 0 if it is none."""
    if type(value) not in (int, float) or not 0 < value < 1e9:  # type: ignore[operator]
        return 0
    return round(value * 1e6)  # type: ignore[operator]


def with_cached_inside(
    given: object, made: object, cached: object, written: object = 0, usd: object = None
) -> Totals:
    """Return totals of a report whose input has the cached tokens, and those written, inside."""
    total, read = tokens(given), tokens(cached)
    apart = min(tokens(written), max(0, total - read))
    fresh = max(0, total - read - apart)
    return Totals(fresh, tokens(made), min(read, total), apart, micros(usd))
