"""Schedules: each tick is one run, over daylight saving, outages, restarts and several workers."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from msgspec.structs import replace

from maestro_hive.hive import schedules
from maestro_hive.hive.schedules import MOST_TICKS, NAMESPACE, ScheduleKeeper
from maestro_hive.journal.effects import Change
from maestro_hive.journal.sqlite import SqliteFile
from maestro_hive.journal.store import Store
from maestro_hive.kernel.clock import ManualClock
from maestro_hive.kernel.errors import ConfigurationError, RunFailedError
from tests.hive.conftest import store_of, until
from tests.hive.schedule_simulation import (
    EXPRESSIONS,
    NIGHTS,
    Simulation,
    find_schedule,
    hive_on,
    look,
    night,
    outage,
    schedules_of,
    store_at,
    utc,
    workflow_of,
)
from tests.tables import for_each

if TYPE_CHECKING:
    from pathlib import Path

    from maestro_hive.hive.hive import Hive
    from maestro_hive.hive.schedules import Schedule

START = utc("2026-11-17T09:30")
ON_TIME = "17T06, 17T12"
SECOND = "17T06, 17T12 at 19T14:00"
AFTERWARDS = "19T18, 20T00, 20T06"
EACH = ["17T18", "18T00", "18T06", "18T12", "18T18", "19T00", "19T06", "19T12"]
AT_ONCE = ", ".join(f"{tick} at 19T13:00" for tick in EACH)
IN_A_ROW = ", ".join(
    f"{tick} at {utc('2026-11-19T13:00') + number * timedelta(minutes=30):%dT%H:%M}"
    for number, tick in enumerate(EACH)
)


# --- which ticks have runs ------------------------------------------------------------------------


@for_each("tz, day", NIGHTS)
@for_each("expression", EXPRESSIONS)
def test_each_tick_of_a_night_in_which_clocks_change_is_one_run(
    tz: str, day: str, expression: str
) -> None:
    ticks, simulation = night(tz, day, expression)
    assert simulation.ran == ticks
    assert simulation.schedule.skipped == 0


def test_the_times_of_a_repeated_hour_have_ids_of_their_own() -> None:
    _, simulation = night("Europe/Berlin", "2026-10-25", "*/30 2 * * *")
    stamps = ["20261025T000000Z", "20261025T003000Z", "20261025T010000Z", "20261025T013000Z"]
    assert list(simulation.created) == [f"job-{stamp}" for stamp in stamps]


@pytest.mark.parametrize(
    "hours, catch_up, overlap, runs, skipped, waiting",
    [
        # Short runs: only the ticks of the outage differ.
        (0.5, "latest", "skip", f"{ON_TIME}, 19T12 at 19T13:00, {AFTERWARDS}", 0, 0),
        (0.5, "latest", "queue", f"{ON_TIME}, 19T12 at 19T13:00, {AFTERWARDS}", 0, 0),
        (0.5, "latest", "allow", f"{ON_TIME}, 19T12 at 19T13:00, {AFTERWARDS}", 0, 0),
        (0.5, "all", "skip", f"{ON_TIME}, {IN_A_ROW}, {AFTERWARDS}", 0, 0),
        (0.5, "all", "queue", f"{ON_TIME}, {IN_A_ROW}, {AFTERWARDS}", 0, 0),
        (0.5, "all", "allow", f"{ON_TIME}, {AT_ONCE}, {AFTERWARDS}", 0, 0),
        (0.5, "none", "skip", f"{ON_TIME}, {AFTERWARDS}", 0, 0),
        (0.5, "none", "queue", f"{ON_TIME}, {AFTERWARDS}", 0, 0),
        (0.5, "none", "allow", f"{ON_TIME}, {AFTERWARDS}", 0, 0),
        # A run of eight hours is unfinished at the next tick, and one was when the outage started.
        (8, "latest", "skip", "17T06, 19T18, 20T06", 3, 0),
        (8, "latest", "queue", f"{SECOND}, 19T12 at 19T22:00, 19T18 at 20T06:00", 0, 2),
        (8, "latest", "allow", f"{ON_TIME}, 19T12 at 19T13:00, {AFTERWARDS}", 0, 0),
        (8, "all", "skip", "17T06, 19T18, 20T06", 10, 0),
        (8, "all", "queue", f"{SECOND}, 17T18 at 19T22:00, 18T00 at 20T06:00", 0, 9),
        (8, "all", "allow", f"{ON_TIME}, {AT_ONCE}, {AFTERWARDS}", 0, 0),
        (8, "none", "skip", "17T06, 19T18, 20T06", 2, 0),
        (8, "none", "queue", f"{SECOND}, 19T18 at 19T22:00, 20T00 at 20T06:00", 0, 1),
        (8, "none", "allow", f"{ON_TIME}, {AFTERWARDS}", 0, 0),
    ],
)  # fmt: skip
def test_an_outage_of_two_days(
    hours: float, catch_up: str, overlap: str, runs: str, skipped: int, waiting: int
) -> None:
    assert outage(catch_up, overlap, hours).outcome == (runs, skipped, waiting)


def test_of_very_many_missed_ticks_the_newest_are_run(caplog: pytest.LogCaptureFixture) -> None:
    simulation = Simulation(START, "* * * * *", catch_up="all")
    simulation.outage(START + timedelta(days=2))
    due = simulation.schedule.due
    assert len(due) == MOST_TICKS - 1  # one is a run
    assert due[-1] == START + timedelta(days=2)
    assert "older ones get none" in caplog.text


def test_a_schedule_that_is_new_does_not_run_for_the_past() -> None:
    simulation = Simulation(START, "* * * * *", catch_up="all")
    assert simulation.created == {}
    assert simulation.schedule.considered == START


def test_a_clock_that_is_set_back_far_is_followed_and_no_tick_runs_twice() -> None:
    simulation = Simulation(START, "0 * * * *")
    simulation.work(START + timedelta(hours=5))
    before = dict(simulation.created)
    simulation.clock.jump(-3600)
    simulation.work(START + timedelta(hours=5))
    assert simulation.created == before
    simulation.clock.jump(-86_400)
    simulation.work(simulation.clock.now() + timedelta(hours=3))
    new = simulation.created.keys() - before.keys()
    assert new == {"job-20261116T160000Z", "job-20261116T170000Z"}


# --- restarts, other code, other workers ----------------------------------------------------------


class Program:
    """A program with the schedule ``job``; several share one store, as processes do."""

    def __init__(
        self,
        store: Store | None = None,
        clock: ManualClock | None = None,
        expression: str = "0 * * * *",
        **options: Any,
    ) -> None:
        self.clock = clock or ManualClock(START)
        self.store = store or store_at(self.clock)
        self.hive = hive_on(self.store)

        @self.hive.schedule(expression, name="job", **options)
        @self.hive.workflow
        async def work(size: int = 1, at: datetime | None = None) -> tuple[int, datetime | None]:
            return size, at

        self.keeper = ScheduleKeeper(self.store, schedules_of(self.hive))
        self._time = 0.0
        self.poll()

    def other(self, **options: Any) -> Program:
        return Program(self.store, self.clock, **options)

    def advance(self, **time: float) -> None:
        self.clock.advance(timedelta(**time).total_seconds())

    def poll(self) -> None:
        self._time += 1000.0
        self.keeper.poll(self._time)

    @property
    def runs(self) -> list[str]:
        return sorted(run.run_id.removeprefix("job-2026") for run in self.hive.runs())

    @property
    def schedule(self) -> Schedule:
        return find_schedule(self.store, "job")


def test_a_schedule_goes_on_after_a_restart() -> None:
    first = Program()
    first.advance(hours=1)
    second = first.other()
    assert second.runs == ["1117T100000Z"]


def test_another_expression_counts_from_when_it_is_seen() -> None:
    first = Program(catch_up="all")
    first.advance(hours=3)
    second = first.other(expression="*/10 * * * *", catch_up="all")
    assert second.runs == []
    second.advance(minutes=10)
    second.poll()
    assert second.runs == ["1117T124000Z"]


def test_another_time_zone_counts_from_when_it_is_seen() -> None:
    first = Program(expression="0 11 * * *", tz="UTC")
    first.advance(hours=3)
    second = first.other(expression="0 11 * * *", tz="Europe/Berlin")
    assert second.runs == []
    assert second.schedule.upcoming == utc("2026-11-18T10:00")


def test_other_options_keep_the_ticks() -> None:
    first = Program(kwargs={"size": 1})
    first.advance(hours=3)
    second = first.other(kwargs={"size": 2}, catch_up="all", overlap="allow")
    assert second.runs == ["1117T100000Z", "1117T110000Z", "1117T120000Z"]


def test_an_older_program_keeps_the_schedule_as_it_was_recorded_last() -> None:
    old = Program(kwargs={"size": 1})
    new = old.other(expression="*/10 * * * *", kwargs={"size": 2})
    new.advance(minutes=10)
    old.poll()
    assert old.runs == ["1117T094000Z"]
    assert run_all(new.hive) == [(2, None)]


def test_a_program_without_a_schedule_leaves_it_alone() -> None:
    first = Program()
    second = first.other()
    schedules_of(second.hive).clear()
    second.advance(hours=1)
    second.poll()
    assert second.runs == []


def test_a_decision_and_its_runs_are_one_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program()
    program.advance(hours=1)
    before = program.schedule

    def fail(*_: Any) -> Any:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(program.store, "_enqueue", fail)
        with pytest.raises(RuntimeError):
            program.poll()
    assert program.runs == []
    assert program.schedule == before
    assert program.other().runs == ["1117T100000Z"]


@pytest.mark.parametrize("overlap", ["skip", "queue", "allow"])
def test_several_workers_make_one_run_of_each_tick(tmp_path: Path, overlap: str) -> None:
    clock = ManualClock(START)
    stores = [Store(SqliteFile(tmp_path / "journal.db", clock=clock), "x") for _ in range(3)]
    programs = [
        Program(store, clock, expression="*/10 * * * *", overlap=overlap) for store in stores
    ]
    for _ in range(4):
        clock.advance(600)
        threads = [threading.Thread(target=program.poll) for program in programs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    state = programs[0].schedule
    for store in stores:
        store.db.close()
    ticks = ["1117T094000Z", "1117T095000Z", "1117T100000Z", "1117T101000Z"]
    found = sorted(run.removeprefix("job-2026") for run in state.active)
    assert found == (ticks if overlap == "allow" else ticks[:1])
    assert state.skipped == (3 if overlap == "skip" else 0)
    assert len(state.due) == (3 if overlap == "queue" else 0)


def test_a_run_that_failed_and_is_retried_is_unfinished_again(hive: Hive) -> None:
    failing = True

    @hive.schedule("0 * * * *")
    @hive.workflow
    async def work() -> None:
        if failing:
            raise ValueError("no data")

    store = store_of(hive)
    look(hive)
    due_now(store, "work")
    look(hive)
    (run,) = hive.runs()
    with pytest.raises(RunFailedError):
        hive.run_sync(work, run_id=run.run_id)
    due_now(store, "work")
    hive.retry(run.run_id)
    look(hive)
    assert find_schedule(store, "work").skipped == 1


def test_a_recorded_time_zone_that_is_unknown_here_stops_none_of_the_others(hive: Hive) -> None:
    @hive.schedule("0 * * * *", name="one")
    @hive.schedule("0 * * * *", name="two")
    @hive.workflow
    async def work() -> None: ...

    store = store_of(hive)
    look(hive)

    keeper = ScheduleKeeper(store, schedules_of(hive))
    keeper.poll(0.0)
    definition = find_schedule(store, "one").definition
    change(store, "one", definition=replace(definition, tz="Moon/Tycho"))
    due_now(store, "two")
    keeper.poll(1000.0)
    assert [run.run_id[:4] for run in hive.runs()] == ["two-"]


# --- the runs -------------------------------------------------------------------------------------


def run_all(hive: Hive) -> list[Any]:
    """Execute the unfinished runs of a hive; return the results of all."""
    found = sorted(run.run_id for run in hive.runs())
    return [asyncio.run(hive.resume(run)) for run in found]


def test_a_run_gets_the_arguments_and_the_time_of_its_tick() -> None:
    program = Program(args=(7,), tick="at")
    program.advance(hours=1, minutes=5)
    program.poll()
    assert run_all(program.hive) == [(7, utc("2026-11-17T10:00"))]


def test_the_run_of_a_tick_is_the_one_that_the_code_would_enqueue() -> None:
    program = Program(kwargs={"size": 3})
    program.advance(hours=1)
    program.poll()
    work = workflow_of(program.hive, "work")
    assert program.hive.run_sync(work, 3, run_id="job-20261117T100000Z") == (3, None)


@dataclass(frozen=True)
class Place:
    name: str


def test_arguments_of_classes_come_back_as_they_are() -> None:
    clock = ManualClock(START)
    hive = hive_on(store_at(clock))

    @hive.schedule("0 * * * *", args=[Place("Rome")], tick="at")
    @hive.workflow
    async def visit(place: Place, *, at: datetime) -> tuple[Place, datetime]:
        return place, at

    look(hive)
    clock.advance(3600)
    look(hive)
    assert run_all(hive) == [(Place("Rome"), utc("2026-11-17T10:00"))]


def change(store: Store, name: str, **fields: Any) -> None:
    """Change what is recorded of a schedule."""
    version, _ = store.document(NAMESPACE, name)
    made = replace(find_schedule(store, name), **fields)
    store.enqueue(effects=(Change(NAMESPACE, name, version, msgspec.json.encode(made)),))


def due_now(store: Store, name: str) -> None:
    """Let a schedule have missed a tick."""
    change(store, name, considered=datetime.now(UTC) - timedelta(days=1))


def test_a_worker_keeps_the_schedules_and_executes_their_runs(hive: Hive) -> None:
    done: list[str] = []

    @hive.schedule("0 * * * *", kwargs={"name": "report"})
    @hive.workflow
    async def send(name: str) -> None:
        done.append(name)

    async def main() -> None:
        async with hive.worker():
            await until(lambda: schedules.list_schedules(store_of(hive)))
            due_now(store_of(hive), "send")
            await until(lambda: done)

    asyncio.run(main())
    (run,) = hive.runs()
    assert run.run_id.startswith("send-20")
    assert done == ["report"]


def test_a_schedule_that_cannot_be_read_stops_no_other(
    hive: Hive, caplog: pytest.LogCaptureFixture
) -> None:
    @hive.schedule("0 * * * *", name="bad")
    @hive.schedule("0 * * * *", name="good")
    @hive.workflow
    async def work() -> None:
        pass

    store = store_of(hive)
    store.update_document(NAMESPACE, "bad", lambda _: b'{"expression": "?"}')

    async def main() -> None:
        async with hive.worker():
            await until(lambda: store.document(NAMESPACE, "good")[1])
            due_now(store, "good")
            await until(hive.runs)

    with caplog.at_level(logging.WARNING, "maestro_hive"):
        asyncio.run(main())
    told = [record.getMessage() for record in caplog.records if "bad" in record.getMessage()]
    assert len(told) == 1
    assert "next try in 5 s" in told[0]


# --- definitions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        ({"expression": "61 * * * *"}, ["'61 * * * *'", "minute is wrong", "'0 9 * * 1-5'"]),
        ({"tz": "Europe/Berln"}, ["'Europe/Berln'", "'Europe/Berlin'"]),
        ({"catch_up": "some"}, ["catch_up='some'", "'latest', 'all', 'none'"]),
        ({"overlap": "kill"}, ["overlap='kill'", "'skip', 'queue', 'allow'"]),
        ({"queue": "a/b"}, ["queue", "'a/b'"]),
        ({"args": (1, 2, 3)}, ["too many positional arguments", "args="]),
        ({"kwargs": {"colour": 1}}, ["'colour'", "kwargs="]),
        ({"kwargs": {"size": object()}}, ["size"]),
        ({"tick": "when"}, ["'when'", "tick="]),
    ],
)
def test_what_is_wrong_with_a_schedule_is_said_where_it_is_defined(
    hive: Hive, options: Any, words: list[str]
) -> None:
    @hive.workflow
    async def work(size: int = 1, at: datetime | None = None) -> None:
        pass

    expression = options.pop("expression", "0 9 * * *")
    with pytest.raises(ConfigurationError) as caught:
        hive.schedule(expression, name="nightly", **options)(work)
    for word in ["the schedule 'nightly' of work", *words]:
        assert word in str(caught.value)
    assert schedules_of(hive) == {}


def test_a_workflow_that_needs_arguments_gets_none_of_the_schedule(hive: Hive) -> None:
    @hive.workflow
    async def report(day: str) -> None:
        pass

    with pytest.raises(ConfigurationError, match=r"missing a required argument: 'day'.*args="):
        hive.schedule("0 9 * * *")(report)


def test_the_time_of_the_tick_needs_a_parameter_with_a_name(hive: Hive) -> None:
    @hive.workflow
    async def report(at: Any = None, /) -> None:
        pass

    with pytest.raises(ConfigurationError, match="tick="):
        hive.schedule("0 9 * * *", tick="at")(report)


def test_two_schedules_of_one_name_are_refused(hive: Hive) -> None:
    @hive.schedule("0 9 * * *")
    @hive.workflow
    async def work() -> None:
        pass

    @hive.workflow
    async def other() -> None:
        pass

    for workflow in (work, other):
        with pytest.raises(ConfigurationError, match=r"two schedules 'work'.*name="):
            hive.schedule("0 18 * * *", name="work")(workflow)
    hive.schedule("0 18 * * *", name="evening")(work)
    assert list(schedules_of(hive)) == ["work", "evening"]


def test_a_program_that_is_executed_again_replaces_its_schedule(hive: Hive) -> None:
    for hour in (9, 18):

        @hive.schedule(f"0 {hour} * * *")
        @hive.workflow
        async def work() -> None:
            pass

    assert schedules_of(hive)["work"].definition.expression == "0 18 * * *"


def test_only_a_workflow_has_a_schedule(hive: Hive) -> None:
    async def work() -> None:
        pass

    with pytest.raises(ConfigurationError, match=r"work.*above @hive\.workflow"):
        hive.schedule("0 9 * * *")(work)


def test_a_name_leaves_room_for_the_time_in_the_id_of_a_run(hive: Hive) -> None:
    @hive.workflow
    async def work() -> None:
        pass

    with pytest.raises(ConfigurationError, match=r"shorter name.*name="):
        hive.schedule("0 9 * * *", name=101 * "x")(work)
