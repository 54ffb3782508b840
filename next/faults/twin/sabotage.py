"""What can be broken on purpose in a life: the twin test must notice."""

from __future__ import annotations

from typing import Any

from maestro_hive.hive import commands
from maestro_hive.hive.driver import Driver
from maestro_hive.journal import recorded_errors, values


def break_on_purpose(name: str) -> None:
    """Break something in this process; nothing without a name."""
    if name:
        SABOTAGES[name]()


def _sort_dicts() -> None:
    """Sort the dictionaries of each value that is read back."""
    decode = values.decode

    def decode_sorted(data: bytes, path: str = "value") -> Any:
        return _sorted(decode(data, path))

    values.decode = decode_sorted


def _sorted(value: Any) -> Any:
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if type(value) is list:
        return [_sorted(each) for each in value]
    return value


def _lose_causes() -> None:
    """Make errors again without their causes."""
    decode = recorded_errors.decode_error

    def decode_without_cause(data: bytes) -> Exception:
        made = decode(data)
        made.__cause__ = None
        return made

    commands.decode_error = decode_without_cause  # type: ignore[attr-defined]


def _order_by_call() -> None:
    """Deliver recorded outcomes in the order of the calls, and not in that of the log."""
    claim = Driver._claim  # noqa: SLF001 - no public method has the order
    claims: dict[int, int] = {}

    def claim_in_order(self: Driver, identity: str) -> bool:
        outcomes = self.journal.state.outcomes
        if (found := outcomes.get(identity)) is not None:
            claims[id(self)] = claims.get(id(self), 0) + 1
            outcomes[identity] = found._replace(seq=claims[id(self)] - 10**9)
        return claim(self, identity)

    Driver._claim = claim_in_order  # type: ignore[method-assign]  # noqa: SLF001


SABOTAGES = {
    "sorted-dicts": _sort_dicts,
    "lost-cause": _lose_causes,
    "order-of-calls": _order_by_call,
}
