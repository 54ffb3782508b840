"""Schedules under a manual clock, with outages, and runs that take their time.

python -m tests.hive.schedule_simulation    prints the tables of ticks and runs
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any, get_args
from zoneinfo import ZoneInfo

import msgspec

from maestro_hive.hive.cron_ticks import newest_ticks
from maestro_hive.hive.hive import Hive
from maestro_hive.hive.schedules import (
    NAMESPACE,
    CatchUp,
    Defined,
    Overlap,
    Schedule,
    ScheduleKeeper,
)
from maestro_hive.journal.sqlite import Sqlite
from maestro_hive.journal.store import Store
from maestro_hive.kernel.clock import ManualClock
from tests.hive.conftest import quick_config, store_of

STAMP = "%Y%m%dT%H%M%SZ"


def find_schedule(store: Store, name: str) -> Schedule:
    """Return a recorded schedule."""
    _, text = store.document(NAMESPACE, name)
    assert text is not None
    return msgspec.json.decode(text, type=Schedule)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def hive_on(store: Store) -> Hive:
    """Return a hive on an open journal."""
    made = Hive(":memory:", quick_config())
    made._opened = store  # noqa: SLF001
    return made


def store_at(clock: ManualClock) -> Store:
    """Return a journal in memory that has this clock."""
    return Store(Sqlite(clock=clock), ":memory:")


def schedules_of(hive: Hive) -> dict[str, Defined]:
    """Return the schedules of a hive's code."""
    return hive._schedules  # noqa: SLF001


def workflow_of(hive: Hive, name: str) -> Any:
    """Return a workflow of a hive."""
    return hive._workflows[name]  # noqa: SLF001


def look(hive: Hive) -> None:
    """Keep the schedules of a hive, as a worker does that starts now."""
    ScheduleKeeper(store_of(hive), schedules_of(hive)).poll(0.0)


@dataclass
class Simulation:
    """A worker with one schedule, over a time with outages."""

    start: datetime
    expression: str
    tz: str = "UTC"
    catch_up: str = "latest"
    overlap: str = "skip"
    #: How long a run takes.
    length: timedelta = timedelta(0)
    #: How often the worker looks.
    step: timedelta = timedelta(minutes=30)
    #: When each run was created, and when it ended.
    created: dict[str, datetime] = field(default_factory=dict)
    ended: dict[str, datetime] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = ManualClock(self.start)
        self._started: dict[str, datetime] = {}
        self._start_program(store_at(self.clock))

    def _start_program(self, store: Store) -> None:
        self.store, self.hive = store, hive_on(store)
        options: Any = {"catch_up": self.catch_up, "overlap": self.overlap}

        @self.hive.schedule(self.expression, tz=self.tz, **options)
        @self.hive.workflow(name="job")
        async def job() -> None:
            pass

        self._look()

    def _look(self) -> None:
        look(self.hive)
        for run in self.hive.runs():
            self.created.setdefault(run.run_id, self.clock.now())

    def work(self, until: datetime) -> None:
        """Let a worker keep the schedule, and execute its runs."""
        while self.clock.now() < until:
            self.clock.advance(self.step.total_seconds())
            for run in [run for run in self.created if run not in self.ended]:
                self._execute(run)
            self._look()

    def _execute(self, run: str) -> None:
        worked = self._started.setdefault(run, self.created[run])
        if self.clock.now() >= worked + self.length:
            self.hive.run_sync(workflow_of(self.hive, "job"), run_id=run)
            self.ended[run] = self.clock.now()

    def outage(self, until: datetime) -> None:
        """Kill the program, and start it again later: what it executed goes on then."""
        passed = until - self.clock.now()
        self.clock.advance(passed.total_seconds())
        for run in self._started:
            self._started[run] += passed
        self._start_program(self.store)

    @property
    def schedule(self) -> Schedule:
        return find_schedule(self.store, "job")

    @property
    def ran(self) -> list[datetime]:
        """The ticks that have a run."""
        stamps = (run.removeprefix("job-") for run in self.created)
        return sorted(datetime.strptime(stamp, STAMP).replace(tzinfo=UTC) for stamp in stamps)

    @property
    def outcome(self) -> tuple[str, int, int]:
        """The runs as text, how many ticks were skipped, and how many wait."""
        runs = [(tick, self.created[f"job-{tick.strftime(STAMP)}"]) for tick in self.ran]
        text = [f"{tick:%dT%H}" + _if_late(tick, created) for tick, created in runs]
        return ", ".join(text), self.schedule.skipped, len(self.schedule.due)


def _if_late(tick: datetime, created: datetime) -> str:
    return "" if created == tick else f" at {created:%dT%H:%M}"


# --- the nights in which clocks are changed -------------------------------------------------------

NIGHTS = [
    ("Europe/Berlin", "2026-03-29"),
    ("Europe/Berlin", "2026-10-25"),
    ("America/New_York", "2026-03-08"),
    ("America/New_York", "2026-11-01"),
]
EXPRESSIONS = ["30 1 * * *", "30 2 * * *", "0 * * * *", "*/30 2 * * *"]


def night(tz: str, day: str, expression: str) -> tuple[list[datetime], Simulation]:
    """Return the ticks from midnight to six on the clock, and what a worker made of them."""
    midnight = datetime.fromisoformat(day).replace(tzinfo=ZoneInfo(tz))
    start = midnight.astimezone(UTC) - timedelta(minutes=10)
    until = midnight.replace(hour=6).astimezone(UTC)
    simulation = Simulation(start, expression, tz, step=timedelta(minutes=10))
    simulation.work(until)
    return newest_ticks(expression, tz, start, until, 1000), simulation


# --- a two-day outage -----------------------------------------------------------------------------

#: Every six hours; nothing is executed for two days.
OUTAGE_START, OUTAGE_UNTIL = utc("2026-11-17T13:00"), utc("2026-11-19T13:00")
FROM, TO = utc("2026-11-17T00:30"), utc("2026-11-20T07:00")


def outage(catch_up: str, overlap: str, hours: float) -> Simulation:
    """Return what a schedule made of the ticks around an outage, with runs of so many hours."""
    length = timedelta(hours=hours)
    simulation = Simulation(FROM, "0 */6 * * *", "UTC", catch_up, overlap, length)
    simulation.work(OUTAGE_START)
    simulation.outage(OUTAGE_UNTIL)
    simulation.work(TO)
    return simulation


# --- as tables ------------------------------------------------------------------------------------


def print_tables() -> None:
    """Print what the schedules of this module do."""
    _print("zone", "day", "expression", "ticks, local time", "runs (ids end like this)")
    _print(*5 * ["---"])
    for (tz, day), expression in product(NIGHTS, EXPRESSIONS):
        ticks, simulation = night(tz, day, expression)
        local = [f"{tick.astimezone(ZoneInfo(tz)):%H:%M%z}"[:-2] for tick in ticks]
        runs = [f"{tick:%dT%H%M%SZ}" for tick in simulation.ran]
        _print(tz, day, f"`{expression}`", ", ".join(local) or "none", ", ".join(runs) or "none")
    sys.stdout.write("\n")
    _print("hours of a run", "catch_up", "overlap", "ticks with a run", "skipped", "waiting")
    _print(*6 * ["---"])
    for hours, catch_up, overlap in product((0.5, 8), get_args(CatchUp), get_args(Overlap)):
        simulation = outage(catch_up, overlap, hours)
        _print(f"{hours:g}", catch_up, overlap, *simulation.outcome)


def _print(*cells: object) -> None:
    sys.stdout.write(f"| {' | '.join(map(str, cells))} |\n")


if __name__ == "__main__":
    print_tables()
