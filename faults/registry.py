"""The rows of the matrix: what is promised, how it is tried, what was measured."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from typing import TypeVar

    T = TypeVar("T")

#: More failures than this say nothing new.
_SHOWN_FAILURES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How thoroughly to run, from which seed, and where there is room to work."""

    quick: bool
    seed: int
    scratch: Path

    def amount(self, *, quick: int, full: int) -> int:
        """Choose a number by layer."""
        return quick if self.quick else full

    def watch(self, what: str, items: Iterable[T], total: int) -> Iterator[T]:
        """Yield the items and show from time to time how far it is."""
        shown, started = time.monotonic(), time.monotonic()
        for number, item in enumerate(items, start=1):
            yield item
            now = time.monotonic()
            if now - shown > 10 or number == total:
                shown = now
                self.say(f"{what}: {number} of {total}, {now - started:.0f} s")

    def say(self, text: str) -> None:
        """Show a line of progress."""
        print(f"    {text}", file=sys.stderr, flush=True)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a row did and found."""

    ran: list[str] = field(default_factory=list)
    measured: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    failed: int = 0

    def fail(self, what: str) -> None:
        """Note that a promise was broken."""
        self.failed += 1
        if len(self.failures) < _SHOWN_FAILURES:
            self.failures.append(what)

    def require(self, truth: object, what: str) -> None:
        """Note ``what`` unless it is so."""
        if not truth:
            self.fail(what)

    @property
    def verdict(self) -> str:
        """One word for the table."""
        if self.failed:
            return "MISSED"
        return "kept" if self.ran else "not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the matrix."""

    number: int
    promise: str
    target: str
    run: Callable[[Plan, Outcome], None]


ROWS: dict[int, Row] = {}


def row(
    number: int, promise: str, target: str
) -> Callable[[Callable[[Plan, Outcome], None]], Callable[[Plan, Outcome], None]]:
    """Register a function as a row."""

    def register(run: Callable[[Plan, Outcome], None]) -> Callable[[Plan, Outcome], None]:
        ROWS[number] = Row(number=number, promise=promise, target=target, run=run)
        return run

    return register
