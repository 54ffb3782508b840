"""Schedules: workflows that run at the times of a cron expression.

Each tick is a run with an id of its own. What shall run is decided in the transaction that records
the decision, in a document of the schedule; the runs are created after it, and their ids make it
harmless to do that twice. So any number of workers may keep the schedules of a folder.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from maestro_hive.engine import values
from maestro_hive.hive import accepting, cron_ticks, schedule_rules
from maestro_hive.hive.errors import RunMismatchError
from maestro_hive.hive.functions import WorkflowFunction, function_name
from maestro_hive.hive.runs import input_of
from maestro_hive.hive.schedule_rules import CATCH_UP, OVERLAP, SCHEDULES, Definition
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import (
    ConfigurationError,
    MaestroError,
    StorageError,
)
from maestro_hive.kernel.logs import get_log
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.views import OVER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from maestro_hive.hive.hive import Hive
    from maestro_hive.hive.runs import Input
    from maestro_hive.hive.schedule_rules import Schedule
    from maestro_hive.maestro.state.store import Reader, Store

logger = get_log(__name__)

#: How often schedules are looked at: a person may have paused one, or a run that others wait for ended.
_POLL_SECONDS = 0.5
#: After an error, how long until the next look, which doubles up to the second number.
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 300.0
#: Clocks differ by less: nearer ticks are waited for so long.
_SHORTEST_SECONDS = 0.001
#: A run id has 128 characters, and the time of the tick takes some.
_LONGEST_NAME = 100
#: Stands for the time of the tick where arguments are checked.
_SOME_TICK = datetime(2000, 1, 1, tzinfo=UTC)


# --- as the code defines them ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledWorkflow:
    """A workflow with one of its schedules, as ``@hive.schedule`` was given it."""

    name: str
    workflow: WorkflowFunction[..., Any]
    expression: str
    tz: str
    catch_up: str
    overlap: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tick: str | None
    queue: str

    def check(self) -> None:
        """Raise if this is no schedule, with what is wrong."""
        files.check_identifier(self.queue, "queue")
        for option, given, known in (
            ("catch_up", self.catch_up, CATCH_UP),
            ("overlap", self.overlap, OVERLAP),
        ):
            if given not in known:
                choices = ", ".join(map(repr, known))
                raise ConfigurationError(f"{option}={given!r} is none of {choices}")
        cron_ticks.check_expression(self.expression)
        cron_ticks.check_zone(self.tz)
        codec.encode_call(*self._bound(), f"the arguments of {self.workflow.name}")

    def definition(self) -> Definition:
        """Return it as it is recorded."""
        call = codec.encode_call(*self._bound(), f"the arguments of {self.workflow.name}")
        return Definition(
            expression=self.expression,
            tz=self.tz,
            workflow=self.workflow.name,
            call=call.value.data.decode(),
            parameters=self.workflow.parameters,
            types=self.workflow.types,
            tick=self.tick,
            catch_up=self.catch_up,
            overlap=self.overlap,
            queue=self.queue,
        )

    def _bound(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a run as the workflow takes them."""
        tick = {} if self.tick is None else {self.tick: _SOME_TICK}
        try:
            args, kwargs = self.workflow.bind(self.args, {**self.kwargs, **tick})
        except TypeError as error:
            raise ConfigurationError(
                f"{error}; give them by args=(…) or kwargs={{…}}, or the time of the tick by tick="
            ) from None
        if self.tick is not None and self.tick not in kwargs:
            raise ConfigurationError(
                f"tick={self.tick!r} is a parameter that cannot be given by its name"
            )
        return args, kwargs


def define(workflow: object, name: str | None, **options: Any) -> ScheduledWorkflow:
    """Return a workflow's schedule; raise an error that names it if there can be none."""
    if not isinstance(workflow, WorkflowFunction):
        shown = function_name(workflow) if callable(workflow) else repr(workflow)
        raise ConfigurationError(
            f"{shown} has a schedule and is no workflow: put @hive.schedule above @hive.workflow"
        )
    named = files.check_identifier(workflow.name if name is None else name, "schedule")
    if len(named) > _LONGEST_NAME:
        raise ConfigurationError(
            f"the schedule {named!r} needs a shorter name, of at most {_LONGEST_NAME} characters, as"
            " it is part of the ids of its runs; give name="
        )
    made = ScheduledWorkflow(name=named, workflow=workflow, **options)
    try:
        made.check()
    except MaestroError as error:
        raise ConfigurationError(
            f"the schedule {named!r} of {workflow.name} cannot be used: {error}"
        ) from error
    return made


# --- as they are recorded -------------------------------------------------------------------------


class _RemovedError(MaestroError):
    """Raised inside a transaction: the schedule is not there any more."""


def record_definition(store: Store, defined: ScheduledWorkflow) -> None:
    """Record what the code says; of several versions of the code the one that started last counts."""
    wants, now = defined.definition(), store.clock.now()
    known = store.document(SCHEDULES.namespace, defined.name)
    SCHEDULES.update(
        store,
        defined.name,
        lambda found: schedule_rules.defined(found, defined.name, wants, now),
    )
    before = None if known is None else SCHEDULES.decode(known.value, defined.name).definition
    if before is not None and schedule_rules.times_differ(before, wants):
        logger.info(
            "schedule %s changed from %r in %s to %r in %s, and counts from now",
            *(defined.name, before.expression, before.tz, wants.expression, wants.tz),
        )


def decide(store: Store, schedule: Schedule) -> Schedule | None:
    """Decide what is due by now, atomically over all processes; None if it was removed."""
    now, is_over = store.clock.now(), partial(_is_over, store)
    if schedule_rules.decided(schedule, now, is_over) is schedule:
        return schedule
    made = update(store, schedule.name, lambda it: schedule_rules.decided(it, now, is_over))
    if made is not None and made.skipped > schedule.skipped:
        logger.info("schedule %s skips a tick: a run of it is unfinished", schedule.name)
    if made is not None and len(made.due) >= schedule_rules.MOST_TICKS:
        logger.warning(
            "schedule %s has %d ticks to run; older ones get none", made.name, len(made.due)
        )
    return made


def update(store: Store, name: str, change: Callable[[Schedule], Schedule]) -> Schedule | None:
    """Change a schedule atomically over all processes; return it, or None if there is none."""

    def changed(found: Schedule | None) -> Schedule:
        if found is None:
            raise _RemovedError
        return change(found)

    try:
        return SCHEDULES.update(store, name, changed)
    except _RemovedError:
        return None


def _is_over(reader: Reader, run_id: str) -> bool:
    """Return whether a run has ended; one that was purged has."""
    record = reader.run(run_id)
    return record is None or record.status in OVER


def input_at(definition: Definition, tick: datetime) -> Input:
    """Return the input of the run of a tick; the classes of its arguments need not be known."""
    tree = codec.parse(definition.call.encode())
    if definition.tick is not None:
        tree["kwargs"][definition.tick] = codec.parse(codec.encode(tick.astimezone(UTC)).data)
    call = codec.call_of_tree(tree)
    return input_of(definition.workflow, call, definition.parameters, definition.types)


def enqueue(store: Store, schedule: Schedule, tick: datetime, *, manual: bool = False) -> str:
    """Create the run of a tick, unless it exists; return its id when that is durable."""
    wants = schedule.definition
    run_id = schedule_rules.run_id(schedule.name, tick, manual=manual)
    order = accepting.Order(run_id, input_at(wants, tick), accepting.new_dispatch(wants.queue))
    try:
        accepting.enqueue(store, order)
    except RunMismatchError as error:
        # Its arguments changed after it was created by a process that died then.
        logger.warning("schedule %s: the run of a tick exists already: %s", schedule.name, error)
    return run_id


def record_runs(store: Store, schedule: Schedule, made: Mapping[datetime, str]) -> None:
    """Record that ticks of a schedule became runs."""
    ticks, runs = tuple(made), tuple(made.values())
    update(store, schedule.name, lambda it: schedule_rules.with_runs(it, ticks, runs))
    for run_id in runs:
        logger.info("schedule %s enqueued run %s", schedule.name, run_id, extra={"run_id": run_id})


# --- as a worker does it --------------------------------------------------------------------------


async def keep(hive: Hive) -> None:
    """Make runs of the ticks of a hive's schedules, until it is cancelled or the hive is closed.

    Several processes may do this at once, of several versions of the code: a schedule is kept as it
    is recorded, by every process whose code has one of its name.
    """
    keeper, pause = _Keeper(hive), _FIRST_PAUSE
    while True:
        if not hive._schedules:  # noqa: SLF001 - this is a part of it
            await asyncio.sleep(_POLL_SECONDS)
            continue
        try:
            seconds, pause = await values.in_thread(keeper.poll), _FIRST_PAUSE
        except asyncio.CancelledError:
            keeper.is_stopped = True
            raise
        except MaestroError as error:
            if hive._is_closed:  # noqa: SLF001 - as above
                return
            logger.warning("schedules cannot be kept, next try in %g s: %s", pause, error)
            seconds, pause = pause, min(2 * pause, _LONGEST_PAUSE)
        await asyncio.sleep(seconds)


class _Failing(NamedTuple):
    """A schedule that cannot be kept: when to try again, on the boot clock, after which pause."""

    until: float
    pause: float


class _Keeper:
    """Keeps the schedules of one hive; called in a thread."""

    def __init__(self, hive: Hive) -> None:
        self._hive = hive
        self._recorded: dict[str, ScheduledWorkflow] = {}
        self._read: dict[str, tuple[int, Schedule]] = {}
        self._failing: dict[str, _Failing] = {}
        self.is_stopped = False

    def poll(self) -> float:
        """Make runs of what is due; return in how many seconds to look again."""
        found = list(self._hive._schedules.values())  # noqa: SLF001 - as above
        store = self._hive._open()  # noqa: SLF001 - as above
        return min((self._guarded(store, each) for each in found), default=_POLL_SECONDS)

    def _guarded(self, store: Store, scheduled: ScheduledWorkflow) -> float:
        """Keep one schedule; an error is logged, and stops none of the others."""
        name, now = scheduled.name, store.clock.boot_seconds()
        failing = self._failing.get(name, _Failing(now, _FIRST_PAUSE))
        if failing.until > now:
            return _POLL_SECONDS
        try:
            seconds = self._keep(store, scheduled)
        except StorageError:  # of the whole store
            raise
        except MaestroError as error:
            pause = failing.pause
            logger.warning("schedule %s cannot be kept, next try in %g s: %s", name, pause, error)
            self._failing[name] = _Failing(now + pause, min(2 * pause, _LONGEST_PAUSE))
            return _POLL_SECONDS
        self._failing.pop(name, None)
        return seconds

    def _keep(self, store: Store, scheduled: ScheduledWorkflow) -> float:
        name = scheduled.name
        if self._recorded.get(name) is not scheduled:
            record_definition(store, scheduled)
            self._recorded[name] = scheduled
        schedule = self._latest(store, name)
        if schedule is not None:
            schedule = decide(store, schedule)
        if schedule is None:  # a person removed it
            return _POLL_SECONDS
        self._make_runs(store, schedule)
        upcoming = schedule_rules.upcoming(schedule)
        if upcoming is None:
            return _POLL_SECONDS
        left = (upcoming - store.clock.now()).total_seconds()
        return min(_POLL_SECONDS, max(_SHORTEST_SECONDS, left))

    def _latest(self, store: Store, name: str) -> Schedule | None:
        document = store.document(SCHEDULES.namespace, name)
        if document is None:
            return None
        version, schedule = self._read.get(name, (None, None))
        if schedule is None or version != document.version:
            schedule = SCHEDULES.decode(document.value, name)
            self._read[name] = document.version, schedule
        return schedule

    def _make_runs(self, store: Store, schedule: Schedule) -> None:
        made: dict[datetime, str] = {}
        for tick in schedule_rules.ready(schedule, partial(_is_over, store)):
            if self.is_stopped:
                break
            made[tick] = enqueue(store, schedule, tick)
        if made:
            record_runs(store, schedule, made)
