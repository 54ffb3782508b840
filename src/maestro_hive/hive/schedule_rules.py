"""Schedules as they are recorded, and what is decided about their ticks; no clock is read here."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from maestro_hive.hive.cron_ticks import newest_ticks, next_tick
from maestro_hive.maestro.state.shared_records import SharedRecords

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.maestro.state.strict_json import Json

CATCH_UP = ("latest", "all", "none")
OVERLAP = ("skip", "queue", "allow")

#: Of more missed ticks, or ticks that wait, only the newest get a run.
MOST_TICKS = 1000
#: A tick is missed when nothing could act on it for longer than this.
ON_TIME = timedelta(seconds=60)
#: When the clock is set back by more than this, a schedule counts from the new time.
_CORRECTED_CLOCK = timedelta(hours=3)
#: How many unfinished runs of a schedule are looked at for ``overlap``.
_MOST_ACTIVE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """What the code says of a schedule, with the call of its workflow as it is recorded."""

    expression: str
    tz: str
    workflow: str
    #: The encoded arguments; the one that ``tick`` names is filled in for each run.
    call: str
    parameters: tuple[str, ...]
    types: Json
    tick: str | None
    catch_up: str
    overlap: str
    queue: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule: its definition, and how far its ticks were considered."""

    name: str
    definition: Definition
    #: Nothing is decided again about ticks up to here.
    considered: datetime
    paused: bool = False
    #: The ticks that shall become runs and are none yet, in order.
    due: tuple[datetime, ...] = ()
    #: The runs that were not seen to have ended.
    active: tuple[str, ...] = ()
    last_run: str | None = None
    #: How many ticks had no run because another run of the schedule was unfinished.
    skipped: int = 0


def _from_json(fields: Json) -> Schedule:
    definition = {**fields["definition"], "parameters": tuple(fields["definition"]["parameters"])}
    lists = {name: tuple(fields[name]) for name in ("due", "active")}
    return Schedule(**{**fields, **lists, "definition": Definition(**definition)})


SCHEDULES = SharedRecords("$schedules", asdict, _from_json)


def run_id(name: str, tick: datetime, *, manual: bool = False) -> str:
    """Return the id of the run of a tick."""
    stamp = tick.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")
    return f"{name}-{stamp}{'-manual' if manual else ''}"


# --- what the code says ---------------------------------------------------------------------------


def defined(known: Schedule | None, name: str, definition: Definition, now: datetime) -> Schedule:
    """Return a schedule as the code defines it now.

    One that is new, or whose times changed, counts from now on; otherwise its ticks go on.
    """
    if known is None:
        return Schedule(name=name, definition=definition, considered=now)
    if known.definition == definition:
        return known
    made = replace(known, definition=definition)
    return replace(made, considered=now) if times_differ(known.definition, definition) else made


def times_differ(one: Definition, other: Definition) -> bool:
    """Return whether two definitions may have other ticks."""
    return (one.expression, one.tz) != (other.expression, other.tz)


# --- what is decided ------------------------------------------------------------------------------


def decided(schedule: Schedule, now: datetime, is_over: Callable[[str], bool]) -> Schedule:
    """Return a schedule with the ticks that are due by now; the very same if there is nothing new."""
    if schedule.paused:
        return schedule
    wants, after = schedule.definition, schedule.considered
    if after > now + _CORRECTED_CLOCK:
        schedule, after = replace(schedule, considered=now), now
    ticks = newest_ticks(wants.expression, wants.tz, after, now, MOST_TICKS)
    if not ticks:
        return schedule
    chosen = _caught_up(wants.catch_up, ticks, now)
    active = _unfinished(schedule, is_over)
    overlaps = wants.overlap == "skip" and bool(active or schedule.due)
    return replace(
        schedule,
        considered=ticks[-1],
        active=active,
        due=schedule.due if overlaps else (*schedule.due, *chosen)[-MOST_TICKS:],
        skipped=schedule.skipped + (len(chosen) if overlaps else 0),
    )


def _caught_up(catch_up: str, ticks: list[datetime], now: datetime) -> list[datetime]:
    """Return which of the ticks that came since the last look get a run."""
    match catch_up:
        case "all":
            return ticks
        case "none":
            return [tick for tick in ticks if now - tick <= ON_TIME]
        case _:
            return ticks[-1:]


def ready(schedule: Schedule, is_over: Callable[[str], bool]) -> tuple[datetime, ...]:
    """Return the due ticks that may become runs now: all of them, or one after another."""
    if schedule.paused or not schedule.due:
        return ()
    if schedule.definition.overlap == "allow":
        return schedule.due
    return () if _unfinished(schedule, is_over) else schedule.due[:1]


def _unfinished(schedule: Schedule, is_over: Callable[[str], bool]) -> tuple[str, ...]:
    """Return the runs that have not ended; the last one may have been retried."""
    known = dict.fromkeys((*schedule.active, *filter(None, [schedule.last_run])))
    return tuple(run for run in known if not is_over(run))


def with_runs(schedule: Schedule, ticks: tuple[datetime, ...], runs: tuple[str, ...]) -> Schedule:
    """Return a schedule whose ticks became these runs; the very same if that was recorded before."""
    if not set(ticks) & set(schedule.due):
        return schedule
    return replace(
        _with_active(schedule, runs),
        due=tuple(tick for tick in schedule.due if tick not in ticks),
    )


def with_manual_run(schedule: Schedule, run: str) -> Schedule:
    """Return a schedule of which a person started a run."""
    return _with_active(schedule, (run,))


def _with_active(schedule: Schedule, runs: tuple[str, ...]) -> Schedule:
    active = (*(run for run in schedule.active if run not in runs), *runs)
    return replace(schedule, active=active[-_MOST_ACTIVE:], last_run=runs[-1])


def with_pause(schedule: Schedule, paused: bool, now: datetime) -> Schedule:
    """Return a schedule paused, or resumed: then the ticks of the pause are over."""
    if schedule.paused is paused:
        return schedule
    return replace(schedule, paused=paused, considered=max(schedule.considered, now))


def upcoming(schedule: Schedule) -> datetime | None:
    """Return the next tick that nothing was decided about; None if it is paused."""
    wants = schedule.definition
    return None if schedule.paused else next_tick(wants.expression, wants.tz, schedule.considered)
