"""A step that returns 12 MB of rows: how long storing them takes, and blocks the event loop.

Beside it, in the same process: ``json.dumps`` and SHA-256 of the same rows. A task that sleeps for a
millisecond, again and again, sees how long the loop does nothing else.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import enum
import hashlib
import json
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks import work
from benchmarks.contender import Contender, Figures
from maestro_hive import Hive

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_BYTES = 3_000_000 if work.QUICK else 12_000_000
_TICK_SECONDS = 0.001
_FIRST_DAY = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)

Row = dict[str, Any]


class Status(enum.Enum):
    """What became of an order."""

    OPEN = "open"
    PAID = "paid"
    SENT = "sent"


def _plain(number: int) -> Row:
    return {
        "id": number,
        "customer": f"customer-{number % 997:04d}",
        "city": "Rotterdam",
        "amount": number * 0.37,
        "weight": number % 31 + 0.5,
        "items": number % 17,
        "note": f"order {number} is to be left at the door",
        "express": number % 5 == 0,
    }


def _dated(number: int) -> Row:
    ordered = _FIRST_DAY + dt.timedelta(minutes=number)
    status = list(Status)[number % 3]
    return {**_plain(number), "ordered": ordered, "due": ordered.date(), "status": status}


def _rows(make: Callable[[int], Row]) -> list[Row]:
    """Return so many rows that their plain parts are as large as asked for."""
    size = len(json.dumps([_plain(number) for number in range(1_000)])) / 1_000
    return [make(number) for number in range(int(_BYTES / size))]


def _baseline(rows: list[Row]) -> tuple[float, int]:
    """Return the time of ``json.dumps`` and SHA-256, and the size of the text."""
    started = time.perf_counter()
    data = json.dumps(rows, default=str).encode()
    hashlib.sha256(data).digest()
    return time.perf_counter() - started, len(data)


class _Watch:
    """How long something took, and the longest time for which it blocked the event loop."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.blocked = 0.0
        self._begun = 0.0

    async def tick(self) -> None:
        """Come round every millisecond, and note when that took longer."""
        before = time.perf_counter()
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now = time.perf_counter()
            self.blocked = max(self.blocked, now - before - _TICK_SECONDS)
            before = now

    async def settle(self) -> None:
        """Let it tick: what came before is noted."""
        await asyncio.sleep(10 * _TICK_SECONDS)

    async def begin(self) -> None:
        """Begin anew."""
        await self.settle()
        self.blocked = 0.0
        self._begun = time.perf_counter()

    def end(self) -> None:
        """Note the time; what blocks the loop from here until the run has returned counts, too."""
        self.seconds = time.perf_counter() - self._begun


def _return(folder: Path, *, make: Callable[[int], Row]) -> Figures:
    """Let a step return rows: the time from its return to the workflow's next line."""
    hive = Hive(folder)
    rows = _rows(make)
    watch = _Watch()

    @hive.step(persona="clerk")
    async def export(count: int) -> list[Row]:
        chosen = rows[:count]
        await watch.begin()
        return chosen

    @hive.workflow
    async def run(count: int) -> int:
        kept = len(await export(count))
        watch.end()
        return kept

    return _measure(hive, run, rows, watch)


def _hand_over(folder: Path, *, make: Callable[[int], Row]) -> Figures:
    """Hand rows to a step: the time from its call to its return."""
    hive = Hive(folder)
    rows = _rows(make)
    watch = _Watch()

    @hive.step(persona="clerk")
    async def count_rows(given: list[Row]) -> int:
        return len(given)

    @hive.workflow
    async def run(count: int) -> int:
        chosen = rows[:count]
        await watch.begin()
        found = await count_rows(chosen)
        watch.end()
        return found

    return _measure(hive, run, rows, watch)


def _measure(hive: Hive, run: Any, rows: list[Row], watch: _Watch) -> Figures:
    async def main() -> None:
        async with hive:
            ticking = asyncio.create_task(watch.tick())
            await hive.run(run, 10)
            assert await hive.run(run, len(rows)) == len(rows)
            await watch.settle()
            ticking.cancel()

    json_seconds, size = _baseline(rows)
    asyncio.run(main())
    return {
        "seconds": watch.seconds,
        "blocked": watch.blocked,
        "json": json_seconds,
        "bytes": size,
    }


CONTENDERS = (
    Contender(name="hive/rows", group="hive-rows", measure=partial(_return, make=_plain)),
    Contender(name="hive/dated-rows", group="hive-rows", measure=partial(_return, make=_dated)),
    Contender(name="hive/rows-in", group="hive-rows", measure=partial(_hand_over, make=_plain)),
)
