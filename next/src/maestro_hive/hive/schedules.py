"""Schedules: workflows that run at the times of a cron expression.

A tick is a run with an id of its own. One transaction changes the schedule's document and records
the runs of its ticks, so any number of workers may keep the schedules of a store.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from maestro_hive.hive.cron_ticks import check_expression, check_zone, newest_ticks, next_tick
from maestro_hive.hive.functions import WorkflowFunction, check_redefined
from maestro_hive.journal import values
from maestro_hive.journal.effects import ENDED, Change
from maestro_hive.journal.entries import RunStarted
from maestro_hive.journal.store import Enqueued
from maestro_hive.kernel.errors import (
    ConfigurationError,
    CorruptionError,
    MaestroError,
    StaleDocumentError,
    StorageError,
    UnknownRunError,
)
from maestro_hive.kernel.files import check_identifier
from maestro_hive.kernel.logs import get_log

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from maestro_hive.journal.store import Store

logger = get_log(__name__)

CatchUp = Literal["latest", "all", "none"]
Overlap = Literal["skip", "queue", "allow"]

NAMESPACE = "schedule"
#: Of more missed ticks, or ticks that wait, only the newest get a run.
MOST_TICKS = 1000
#: A tick is missed when no worker could act on it for longer than this.
_ON_TIME = timedelta(seconds=60)
#: When the clock is set back by more than this, a schedule counts from the new time.
_CORRECTED_CLOCK = timedelta(hours=3)
#: How many unfinished runs of a schedule count for ``overlap``.
_MOST_ACTIVE = 100
#: How often a change is tried while other processes change the same schedule.
_MOST_TRIES = 100
#: A run id has 128 characters, and the time of the tick takes some.
_LONGEST_NAME = 100
#: How often a worker looks: a person may have paused a schedule, or a run ended that others await.
_POLL_SECONDS = 0.5
#: After an error, how long until the next look, which doubles up to the second number.
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 300.0


class Definition(Struct, frozen=True, kw_only=True):
    """A schedule as the code defines it, with the recorded call of its workflow."""

    name: str
    expression: str
    tz: str = "UTC"
    workflow: str
    #: The encoded arguments, with null for the time of the tick.
    input: Raw
    #: The parameter that gets the time of the tick.
    tick: str | None = None
    catch_up: CatchUp = "latest"
    overlap: Overlap = "skip"
    queue: str = "default"


class Schedule(Struct, frozen=True, kw_only=True):
    """A schedule: its definition, and the ticks that have been decided."""

    definition: Definition
    #: All ticks up to here are decided.
    considered: datetime
    is_paused: bool = False
    #: The ticks that wait for the end of a run before them, in order.
    due: tuple[datetime, ...] = ()
    #: The runs that may not have ended.
    active: tuple[str, ...] = ()
    #: How many ticks had no run because another run of the schedule was unfinished.
    skipped: int = 0

    @property
    def upcoming(self) -> datetime | None:
        """Return the next tick that is not decided; None while the schedule is paused."""
        wants = self.definition
        return None if self.is_paused else next_tick(wants.expression, wants.tz, self.considered)

    def with_runs(self, runs: list[Enqueued]) -> Decision:
        """Return the schedule with new runs."""
        active = (*self.active, *(run.name for run in runs))[-_MOST_ACTIVE:]
        return replace(self, active=active), runs


#: A schedule, and the runs that are recorded with it; None: it is not changed.
Decision: TypeAlias = tuple[Schedule, list[Enqueued]] | None


# --- as the code defines them ---------------------------------------------------------------------


class Defined(NamedTuple):
    """A schedule that was checked, and its workflow."""

    definition: Definition
    workflow: WorkflowFunction[..., Any]


def define(
    known: dict[str, Defined],
    workflow: object,
    expression: str,
    name: str | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    **options: Any,
) -> None:
    """Add a workflow's schedule; raise an error that names it if there can be none."""
    if not isinstance(workflow, WorkflowFunction):
        shown = getattr(workflow, "__qualname__", repr(workflow))
        raise ConfigurationError(
            f"{shown} has a schedule and is no workflow: put @hive.schedule above @hive.workflow"
        )
    named = check_identifier(workflow.name if name is None else name, "schedule")
    if len(named) > _LONGEST_NAME:
        raise ConfigurationError(
            f"the schedule {named!r} needs a shorter name, of at most {_LONGEST_NAME} characters,"
            " as it is part of the ids of its runs; give name="
        )
    tick = options["tick"]
    try:
        for option, choices in (("catch_up", CatchUp), ("overlap", Overlap)):
            if options[option] not in get_args(choices):
                known_ones = ", ".join(map(repr, get_args(choices)))
                raise ConfigurationError(f"{option}={options[option]!r} is none of {known_ones}")
        check_expression(expression)
        check_zone(options["tz"])
        check_identifier(options["queue"], "queue")
        # As they are recorded: with null for the time of the tick.
        data = workflow.encode(tuple(args), {**kwargs, **({} if tick is None else {tick: None})})
    except (TypeError, MaestroError) as error:
        way_out = "; give them by args=(…) or kwargs={…}, or the time of the tick by tick="
        raise ConfigurationError(
            f"the schedule {named!r} of {workflow.name} cannot be used: {error}"
            f"{'' if isinstance(error, MaestroError) else way_out}"
        ) from error
    if (before := known.get(named)) is not None:
        if before.workflow is workflow:
            raise ConfigurationError(
                f"{workflow.name} has two schedules {named!r}; give one of them another name="
            )
        check_redefined("schedules", named, before.workflow.function, workflow.function)
    definition = Definition(
        name=named, expression=expression, workflow=workflow.name, input=Raw(data), **options
    )
    known[named] = Defined(definition, workflow)


# --- decisions: pure ------------------------------------------------------------------------------


def as_defined(known: Schedule | None, wants: Definition, now: datetime) -> Schedule:
    """Return a schedule as the code defines it now.

    One that is new, or has other ticks than before, counts from now.
    """
    if known is None:
        return Schedule(definition=wants, considered=now)
    before = known.definition
    is_same = (before.expression, before.tz) == (wants.expression, wants.tz)
    return replace(known, definition=wants, considered=known.considered if is_same else now)


def decide(schedule: Schedule, now: datetime, is_over: Callable[[str], bool]) -> Decision:
    """Return which ticks become runs now; an equal schedule if nothing is new."""
    wants, after = schedule.definition, schedule.considered
    if after > now + _CORRECTED_CLOCK:
        schedule, after = replace(schedule, considered=now), now
    ticks = newest_ticks(wants.expression, wants.tz, after, now, MOST_TICKS)
    if schedule.is_paused or not (ticks or schedule.due):
        return schedule, []
    unfinished = [run for run in schedule.active if not is_over(run)]
    chosen = {
        "latest": ticks[-1:],
        "all": ticks,
        "none": [tick for tick in ticks if now - tick <= _ON_TIME],
    }[wants.catch_up]
    overlaps = wants.overlap == "skip" and bool(unfinished or schedule.due)
    due = schedule.due if overlaps else (*schedule.due, *chosen)[-MOST_TICKS:]
    if len(due) == MOST_TICKS:
        logger.warning(
            "schedule %s has %d ticks to run; older ones get none", wants.name, MOST_TICKS
        )
    one = () if unfinished else due[:1]
    starts = due if wants.overlap == "allow" else one
    # The latest run stays in the list: it may be retried.
    active = [run for run in schedule.active if run in unfinished or run == schedule.active[-1]]
    made = replace(
        schedule,
        considered=ticks[-1] if ticks else schedule.considered,
        due=due[len(starts) :],
        active=tuple(active),
        skipped=schedule.skipped + (len(chosen) if overlaps else 0),
    )
    return made.with_runs([_run_of(wants, tick) for tick in starts])


def _run_of(wants: Definition, tick: datetime, suffix: str = "") -> Enqueued:
    """Return the run of a tick, whose time is one of its arguments and part of its id."""
    given = wants.input
    if wants.tick is not None:
        args, kwargs = msgspec.json.decode(given, type=tuple[list[Raw], dict[str, Raw]])
        kwargs[wants.tick] = Raw(values.encode(tick.astimezone(UTC), "tick").data)
        given = Raw(msgspec.json.encode((args, kwargs)))
    first = RunStarted(workflow=wants.workflow, input=given, schedule=wants.name)
    run_id = f"{wants.name}-{tick.astimezone(UTC):%Y%m%dT%H%M%SZ}{suffix}"
    return Enqueued(run_id, first, wants.queue)


# --- in the store ---------------------------------------------------------------------------------


def list_schedules(store: Store) -> list[Schedule]:
    """Return the schedules of a store, by name."""
    return [_decoded(text) for text in store.documents(NAMESPACE).values()]


def keep(store: Store, wants: Definition, *, is_new: bool) -> datetime | None:
    """Record the runs of the ticks that are due; return the next tick, None if there is none.

    One that is new here is recorded: of several versions of the code the last start counts.
    """

    def decided(known: Schedule | None) -> Decision:
        now = store.db.wall_time()
        if is_new:
            known = as_defined(known, wants, now)
        return None if known is None else decide(known, now, partial(_is_over, store))

    schedule = _change(store, wants.name, decided)
    return None if schedule is None else schedule.upcoming


def _change(
    store: Store, name: str, change: Callable[[Schedule | None], Decision]
) -> Schedule | None:
    """Change a schedule and record the runs of the decision, in one transaction."""
    for _ in range(_MOST_TRIES):
        version, text = store.document(NAMESPACE, name)
        known = None if text is None else _decoded(text)
        made, runs = change(known) or (known, [])
        if made != known:
            effect = Change(NAMESPACE, name, version, msgspec.json.encode(made))
            try:
                store.enqueue(*runs, effects=(effect,))
            except StaleDocumentError:
                continue
        return made
    raise StaleDocumentError(NAMESPACE, name)


def _decoded(text: bytes) -> Schedule:
    try:
        return msgspec.json.decode(text, type=Schedule)
    except msgspec.MsgspecError as error:
        raise CorruptionError(f"a recorded schedule cannot be read: {error}") from error


def _is_over(store: Store, run_id: str) -> bool:
    """Return whether a run has ended; one that was purged has."""
    try:
        return store.find(run_id).status in ENDED
    except UnknownRunError:
        return True


# --- as a worker does it --------------------------------------------------------------------------


class ScheduleKeeper:
    """Records the runs of the schedules that the code of this process has.

    Each is kept as it is recorded, by every process whose code has one of its name.
    """

    def __init__(self, store: Store, schedules: Mapping[str, Defined]) -> None:
        self._store, self._schedules = store, schedules
        self._recorded: dict[str, Definition] = {}
        #: Those that cannot be kept: when each is tried again, after which pause.
        self._failing: dict[str, tuple[float, float]] = {}
        self._next = 0.0

    def poll(self, now: float) -> None:
        """Record the runs of what is due, if it is time to look; ``now`` is the time of a loop."""
        if now >= self._next and self._schedules:
            found = [self._keep(each.definition, now) for each in list(self._schedules.values())]
            self._next = now + min(found)

    def _keep(self, wants: Definition, now: float) -> float:
        """Keep one schedule; an error is logged, and stops none of the others."""
        until, pause = self._failing.get(wants.name, (now, _FIRST_PAUSE))
        if until > now:
            return _POLL_SECONDS
        upcoming, is_new = None, self._recorded.get(wants.name) is not wants
        try:
            upcoming = keep(self._store, wants, is_new=is_new)
            self._recorded[wants.name] = wants
            self._failing.pop(wants.name, None)
        except StorageError:  # of the whole store
            raise
        except MaestroError as error:
            logger.warning(
                "schedule %s cannot be kept, next try in %g s: %s", wants.name, pause, error
            )
            self._failing[wants.name] = now + pause, min(2 * pause, _LONGEST_PAUSE)
        if upcoming is None:
            return _POLL_SECONDS
        left = (upcoming - self._store.db.wall_time()).total_seconds()
        return min(_POLL_SECONDS, max(0.0, left))
