"""The rows of the matrix: what is promised, how it is tested, what was measured."""

from __future__ import annotations

import sys
import textwrap
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from typing import TypeVar

    T = TypeVar("T")

#: Row number → module that registers it.
MODULES = {
    1: "kills",
    2: "power_cuts",
    3: "io_errors",
    4: "torn_files",
    5: "shared_folder",
    6: "shared_folder",
    16: "readers",
}

#: Further failures of a row are counted, and not shown.
_SHOWN_FAILURES = 40


class BrokenPromiseError(AssertionError):
    """A check found that a promise was broken."""


def require(truth: object, what: str) -> None:
    """Raise ``BrokenPromiseError(what)`` unless ``truth`` is true."""
    if not truth:
        raise BrokenPromiseError(what)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The layer to run, the seed, and a folder to work in."""

    quick: bool
    seed: int
    scratch: Path

    def amount(self, *, quick: int, full: int) -> int:
        """Return the number for this layer."""
        return quick if self.quick else full

    def track(self, what: str, items: Iterable[T], total: int) -> Iterator[T]:
        """Yield the items, and show progress every ten seconds."""
        shown, started = time.monotonic(), time.monotonic()
        for number, item in enumerate(items, start=1):
            yield item
            now = time.monotonic()
            if now - shown > 10 or number == total:
                shown = now
                self.show(f"{what}: {number} of {total}, {now - started:.0f} s")

    def show(self, text: str) -> None:
        """Print a line of progress."""
        print(f"    {text}", file=sys.stderr, flush=True)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a row ran and measured."""

    ran: list[str] = field(default_factory=list)
    measured: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    failed: int = 0

    def fail(self, what: str) -> None:
        """Record a broken promise."""
        self.failed += 1
        if len(self.failures) < _SHOWN_FAILURES:
            self.failures.append(what)

    def require(self, truth: object, what: str) -> None:
        """Record ``what`` as a failure unless ``truth`` is true."""
        if not truth:
            self.fail(what)

    @property
    def verdict(self) -> str:
        """The last column of the table."""
        if self.failed:
            return "FAILED"
        return "passed" if self.ran else "not run"


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


# --- the matrix as text --------------------------------------------------------------------------

_HEADS = ("row", "promise", "test", "target", "measured", "result")
_WIDTHS = (3, 26, 32, 22, 44, 8)


def table(done: list[tuple[Row, Outcome, float]], title: str) -> str:
    """Return the table of what was run, what was measured, and what could not be run."""
    lines = [title, "", _line(_HEADS)[0], _rule()]
    for each, outcome, seconds in done:
        cells = (
            str(each.number),
            each.promise,
            "; ".join([*outcome.ran, f"{seconds:.0f} s"]),
            each.target,
            "; ".join(outcome.measured) or "-",
            outcome.verdict,
        )
        lines += [*_line(cells), _rule()]
    for each, outcome, _ in done:
        lines += [f"row {each.number}: not run: {reason}" for reason in outcome.not_run]
        lines += [f"row {each.number}: FAILED: {failure}" for failure in outcome.failures]
        if outcome.failed > len(outcome.failures):
            lines.append(f"row {each.number}: and {outcome.failed - len(outcome.failures)} more")
    return "\n".join(lines)


def _line(cells: tuple[str, ...]) -> list[str]:
    wrapped = [
        textwrap.wrap(cell, width) or [""] for cell, width in zip(cells, _WIDTHS, strict=True)
    ]
    height = max(len(cell) for cell in wrapped)
    return [
        " | ".join(
            (cell[at] if at < len(cell) else "").ljust(width)
            for cell, width in zip(wrapped, _WIDTHS, strict=True)
        ).rstrip()
        for at in range(height)
    ]


def _rule() -> str:
    return "-+-".join("-" * width for width in _WIDTHS)
