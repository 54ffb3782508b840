"""The schedules that are recorded in a state folder; the code that defines them is not needed."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

from maestro_hive.hive import schedule_rules, schedules
from maestro_hive.hive.schedule_rules import ON_TIME, SCHEDULES
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.maestro.state.views import shown_status

if TYPE_CHECKING:
    from collections.abc import Callable, Container
    from datetime import datetime

    from maestro_hive.hive.schedule_rules import Schedule
    from maestro_hive.maestro.state.store import Reader, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleView:
    """A schedule as it is now.

    ``overdue``: its next tick has passed, so no worker that is active has this schedule.
    ``waiting`` ticks become runs when the run before them ends; ``skipped`` ones never did.
    """

    name: str
    workflow: str
    expression: str
    tz: str
    catch_up: str
    overlap: str
    queue: str
    paused: bool
    next_tick: datetime | None
    overdue: bool
    last_run: str | None
    last_status: str | None
    waiting: int
    skipped: int


def list_schedules(reader: Reader) -> list[ScheduleView]:
    """Return all schedules, by name."""
    now, held = reader.clock.now(), reader.run_leases()
    return [_view(reader, each, now, held) for each in SCHEDULES.all(reader).values()]


def _view(reader: Reader, schedule: Schedule, now: datetime, held: Container[str]) -> ScheduleView:
    wants = schedule.definition
    last = None if schedule.last_run is None else reader.run(schedule.last_run)
    upcoming = schedule_rules.upcoming(schedule)
    return ScheduleView(
        name=schedule.name,
        workflow=wants.workflow,
        expression=wants.expression,
        tz=wants.tz,
        catch_up=wants.catch_up,
        overlap=wants.overlap,
        queue=wants.queue,
        paused=schedule.paused,
        next_tick=upcoming,
        overdue=upcoming is not None and now - upcoming > ON_TIME,
        last_run=schedule.last_run,
        last_status=None if last is None else shown_status(last, held),
        waiting=len(schedule.due),
        skipped=schedule.skipped,
    )


def pause_schedule(store: Store, name: str) -> None:
    """Let a schedule make no runs until it is resumed."""
    now = store.clock.now()
    _update(store, name, lambda it: schedule_rules.with_pause(it, paused=True, now=now))


def resume_schedule(store: Store, name: str) -> None:
    """Let a schedule make runs again, from its next tick on."""
    now = store.clock.now()
    _update(store, name, lambda it: schedule_rules.with_pause(it, paused=False, now=now))


def run_schedule(store: Store, name: str) -> str:
    """Enqueue a run of a schedule now, paused or not; return its id."""
    schedule = _update(store, name, lambda it: it)
    tick = store.clock.now().replace(microsecond=0)
    run_id = schedules.enqueue(store, schedule, tick, manual=True)
    _update(store, name, lambda it: schedule_rules.with_manual_run(it, run_id))
    return run_id


def remove_schedule(store: Store, name: str) -> None:
    """Remove a schedule; the next worker whose code has it records it again, as a new one."""
    _update(store, name, lambda it: it)
    store.update_document(SCHEDULES.namespace, name, lambda _: None)


def _update(store: Store, name: str, change: Callable[[Schedule], Schedule]) -> Schedule:
    made = schedules.update(store, name, change)
    if made is not None:
        return made
    known = [document.key for document in store.documents(SCHEDULES.namespace)]
    near = get_close_matches(name, known, n=3) or known[:10]
    listed = f"There is: {', '.join(near)}." if near else "There is none: workers record them."
    raise ConfigurationError(f"No schedule is called {name!r}. {listed}")
