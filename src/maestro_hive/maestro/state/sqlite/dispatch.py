"""The ``dispatch`` table: unfinished runs that belong to workers, and what they wait for.

Every query here finds its rows by an index, so that it costs the same with 100,000 rows. Only a
scheduled row has a ``boot`` and a ``due``.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from maestro_hive.kernel.clock import from_micros
from maestro_hive.maestro.state.budgets import concerns, refused_by
from maestro_hive.maestro.state.records import (
    OVER,
    Dispatch,
    DispatchState,
    EntryKind,
    rank_of,
    state_of,
    wait_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

    import apsw

    from maestro_hive.kernel.clock import Clock
    from maestro_hive.maestro.state.records import NewDispatch
    from maestro_hive.maestro.state.sqlite.connection import Row
    from maestro_hive.maestro.state.sqlite.entries import Queries

    Rows = Callable[[str, Row], list[Row]]

#: How many scheduled runs that are due become ready at a time.
_DUE_AT_A_TIME = 200

_IS_OVER = f"status IN {OVER}"
_SELECT = (
    "SELECT runs.name, dispatch.workflow, queue, priority, state, due_at, version, enqueued_at, deaths"
    " FROM dispatch JOIN runs ON runs.id = dispatch.run"
)
_FIND = f"{_SELECT} WHERE runs.name = ?"
_LIST = (
    f"{_SELECT} WHERE (?1 IS NULL OR queue = ?1) AND (?2 IS NULL OR state = ?2)"
    " ORDER BY rank, run LIMIT ?3"
)
_COUNT = "SELECT queue, state, count(*) FROM dispatch GROUP BY state, queue"
# SQLite knows nothing of how many rows are in which state: the indexes are named.
_BY_RANK = "dispatch INDEXED BY dispatch_by_rank"
_BY_DUE = "dispatch INDEXED BY dispatch_by_due"
_NEXT = (
    f"SELECT EXISTS (SELECT 1 FROM {_BY_RANK} WHERE state = 0),"
    f" (SELECT due FROM {_BY_DUE} WHERE state = 1 AND boot = ?1 ORDER BY due LIMIT 1),"
    f" (SELECT min(due_at) FROM {_BY_DUE} WHERE state = 1 AND boot < ?1),"
    f" (SELECT min(due_at) FROM {_BY_DUE} WHERE state = 1 AND boot > ?1)"
)
_WITHOUT_RUN = "SELECT run FROM dispatch WHERE run NOT IN (SELECT id FROM runs) LIMIT 20"

_NEXT_QUEUE = "SELECT queue FROM dispatch WHERE state = 0 AND queue > ? ORDER BY queue LIMIT 1"

_INSERT = (
    "INSERT INTO dispatch (run, workflow, queue, priority, rank, state, boot, due, due_at, wait,"
    " version, enqueued_at, deaths, woken)"
    " SELECT id, workflow, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, 0 FROM runs WHERE id = ?1"
    " ON CONFLICT (run) DO NOTHING"
)
_UNSCHEDULED = "boot = '', due = 0, due_at = 0, wait = 0"
_ACTIVATE = f"UPDATE dispatch SET state = 2, woken = 0, {_UNSCHEDULED} WHERE run = ?"
_RELEASE_WOKEN = (
    f"UPDATE dispatch SET state = 0, woken = 0, {_UNSCHEDULED}"
    " WHERE run = ? AND state = 2 AND woken"
)
_RELEASE = (
    "UPDATE dispatch SET state = ?2, boot = ?3, due = ?4, due_at = ?5, wait = ?6"
    " WHERE run = ?1 AND state = 2"
)
_WAKE = (
    f"UPDATE dispatch SET state = iif(state = 2, 2, 0), woken = (state = 2), {_UNSCHEDULED}"
    " WHERE run = (SELECT id FROM runs WHERE name = ?) AND state <> 0 AND NOT woken"
)
#: An active one may be about to be released because of a budget.
_WAKE_ACTIVE = "UPDATE dispatch SET woken = 1 WHERE state = 2 AND NOT woken"
_BANKRUPT = (
    "SELECT run, (SELECT facts FROM entries WHERE id BETWEEN run << 32 AND (run + 1 << 32) - 1"
    f" AND kind = {EntryKind.RUN_SUSPENDED:d} ORDER BY id DESC LIMIT 1)"
    " FROM dispatch WHERE state IN (1, 3) AND run IN (SELECT id FROM runs WHERE status = 'bankrupt')"
)
_WAKE_BANKRUPT = f"UPDATE dispatch SET state = 0, {_UNSCHEDULED} WHERE run = ?"
_CLEAR_DEATHS = "UPDATE dispatch SET deaths = 0 WHERE run = ?"
_DELETE = "DELETE FROM dispatch WHERE run = ?"
_DELETE_OVER = (
    f"DELETE FROM dispatch WHERE run = ?1 AND (SELECT {_IS_OVER} FROM runs WHERE id = ?1)"
)

_FIND_DUE = (
    f"SELECT run FROM {_BY_DUE} WHERE state = 1 AND boot = ? AND due <= ? ORDER BY due LIMIT ?"
)
_MAKE_DUE = f"UPDATE dispatch SET state = 0, {_UNSCHEDULED} WHERE run IN ({_FIND_DUE})"
_OTHER_BOOTS = (
    f"SELECT 1 FROM {_BY_DUE} WHERE state = 1 AND boot < ?1"
    f" UNION ALL SELECT 1 FROM {_BY_DUE} WHERE state = 1 AND boot > ?1 LIMIT 1"
)
# The wait by wall time, and never more than all of it again: a wall clock may have been set back.
_REBASE = (
    "UPDATE dispatch SET boot = ?1, due = ?2 + max(0, min(wait, (due_at - ?3) / 1e6)),"
    " due_at = ?3 + CAST(1e6 * max(0, min(wait, (due_at - ?3) / 1e6)) AS INTEGER)"
    " WHERE state = 1 AND boot <> ?1"
)

_NEXT_WORKFLOW = (
    f"SELECT workflow FROM {_BY_RANK} WHERE state = 0 AND queue = ? AND workflow >= ?"
    " ORDER BY workflow LIMIT 1"
)
_READY = (
    f"SELECT rank, run, (SELECT name FROM runs WHERE id = run), deaths FROM {_BY_RANK}"
    " WHERE state = 0 AND queue = ? AND workflow = ? AND version IS ? ORDER BY rank, run LIMIT ?"
)

_HOLDERS = "SELECT DISTINCT holder, boot FROM leases WHERE name >= 'run/' AND name < 'run0'"
_HELD_BY = (
    f"SELECT leases.id, runs.id, runs.name, runs.{_IS_OVER}, dispatch.run IS NOT NULL"
    " FROM leases JOIN runs ON runs.name = substr(leases.name, 5)"
    " LEFT JOIN dispatch ON dispatch.run = runs.id"
    " WHERE leases.name >= 'run/' AND leases.name < 'run0' AND leases.holder = ? AND leases.boot = ?"
    " ORDER BY leases.id"
)
# Of those that workers have: a process that hangs holds them, and has not renewed its leases.
_LATE = (
    f"SELECT leases.id, run, runs.name, runs.{_IS_OVER}, 1 FROM {_BY_RANK}"
    " CROSS JOIN runs ON runs.id = run CROSS JOIN leases ON leases.name = 'run/' || runs.name"
    " WHERE state = 2 AND leases.boot = ? AND leases.expires < ?"
)
_UNLEASED = (
    f"SELECT run, runs.name FROM {_BY_RANK} CROSS JOIN runs ON runs.id = run WHERE state = 2"
    " AND NOT EXISTS (SELECT 1 FROM leases WHERE leases.name = 'run/' || runs.name)"
)
_MAKE_READY = (
    f"UPDATE dispatch SET state = 0, woken = 0, deaths = deaths + ?2, {_UNSCHEDULED}"
    " WHERE run = ?1 AND state = 2"
)


#: For how long an answer is used again at most, and how old a change of the log must be for that.
_KNOWN_SECONDS = 1.0
_SETTLED_NS = 100_000_000


class DispatchReader:
    """The dispatch rows of one journal file."""

    clock: Clock
    _queries: Queries
    #: What ``seconds_to_next`` found last, while that may still be so.
    _next_known: _Known | None = None

    def dispatch(self, name: str) -> Dispatch | None:
        """Return what a run waits for."""
        rows = self._queries.rows(_FIND, (name,))
        return _read(rows[0]) if rows else None

    def dispatches(
        self,
        *,
        queue: str | None = None,
        state: DispatchState | None = None,
        limit: int | None = None,
    ) -> list[Dispatch]:
        """List unfinished runs that belong to workers, in the order in which they are taken."""
        number = None if state is None else int(state)
        rows = self._queries.rows(_LIST, (queue, number, -1 if limit is None else limit))
        return [_read(row) for row in rows]

    def dispatch_counts(self) -> dict[tuple[str, DispatchState], int]:
        """Return how many unfinished runs each queue has in each state."""
        rows = self._queries.rows(_COUNT)
        return {(queue, DispatchState(state)): count for queue, state, count in rows}

    def ready_queues(self) -> list[str]:
        """Return the queues that have ready runs, in one seek for each."""
        found: list[str] = []
        while rows := self._queries.rows(_NEXT_QUEUE, (found[-1] if found else "",)):
            found.append(rows[0][0])
        return found

    def has_ready(
        self, *, queue: str, workflows: Collection[str], version: str | None = None
    ) -> bool:
        """Return whether a queue has a ready run of these workflows, and of this version."""
        wanted = Wanted(queue, workflows, version, 1)
        return next(_by_rank(self._queries.rows, wanted), None) is not None

    def seconds_to_next(self) -> float | None:
        """Return in how many seconds something is due; 0 if it is now, None if nothing is."""
        rows = self._next_rows()
        if not rows:
            return None
        ready, due, *others = rows[0]
        if ready:
            return 0.0
        waits = [] if due is None else [due - self.clock.boot_seconds()]
        waits += [(at - self.clock.nanos() // 1000) / 1e6 for at in others if at is not None]
        return max(0.0, min(waits)) if waits else None

    def _next_rows(self) -> list[Row]:
        """Return what is due next; without a query while the log has not changed.

        An idle worker asks ten times a second, and a look at a file costs it a tenth of a query.
        """
        log, now = _log_of(self._queries.path), time.monotonic()
        known = self._next_known
        if known is not None and known.log == log and now < known.until:
            return known.rows
        rows = self._queries.rows(_NEXT, (self.clock.boot_id(),))
        self._next_known = None if log is None else _Known(log, now + _KNOWN_SECONDS, rows)
        return rows

    def check_dispatch(self) -> list[str]:
        """Return what is wrong with these rows."""
        rows = self._queries.rows(_WITHOUT_RUN)
        return [f"run number {run} is in a queue, and does not exist" for (run,) in rows]


class _Log(NamedTuple):
    """What tells one state of a log from another."""

    file: int
    size: int
    changed_ns: int


class _Known(NamedTuple):
    """What a query returned, of which state of the log, and until when that is used."""

    log: _Log
    until: float
    rows: list[Row]


def _log_of(journal: Path) -> _Log | None:
    """Return the state of a journal's log; None if it may change and look the same.

    The time of a file has steps of some milliseconds: two changes in one step look like one.
    """
    try:
        found = os.stat(f"{journal}-wal")  # noqa: PTH116 - asked often, and a Path costs as much
    except OSError:
        return None
    if abs(time.time_ns() - found.st_mtime_ns) < _SETTLED_NS:
        return None
    return _Log(found.st_ino, found.st_size, found.st_mtime_ns)


def _read(row: Row) -> Dispatch:
    name, workflow, queue, priority, number, due_at, version, enqueued_at, deaths = row
    state = DispatchState(number)
    return Dispatch(
        run_id=name,
        workflow=workflow,
        queue=queue,
        priority=priority,
        state=state,
        due_at=from_micros(due_at) if state is DispatchState.SCHEDULED else None,
        version=version,
        enqueued_at=from_micros(enqueued_at),
        deaths=deaths,
    )


class Wanted(NamedTuple):
    """Which runs of a queue a worker takes."""

    queue: str
    workflows: Collection[str]
    version: str | None
    limit: int


class Abandoned(NamedTuple):
    """A run whose process died, with the key of its lease."""

    lease: int
    run: int
    name: str
    is_over: bool
    dispatched: bool


class DispatchTable:
    """Changes the table, inside the caller's transaction."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    # --- one run ---

    def add(
        self,
        db: apsw.Connection,
        run: int,
        new: NewDispatch,
        *,
        active: bool = False,
        deaths: int = 0,
    ) -> None:
        """Give a run to workers, unless it is theirs already."""
        now = self._clock.nanos() // 1000
        waits = (int(DispatchState.ACTIVE), "", 0.0, 0, 0.0) if active else self._waits(new.due)
        ranked = (new.queue, new.priority, rank_of(new, now))
        db.execute(_INSERT, (run, *ranked, *waits, new.version, now, deaths))

    def _waits(self, due: float | None) -> tuple[int, str, float, int, float]:
        """Return the columns that say what a run waits for."""
        wait = wait_of(due)
        if not wait:
            return int(state_of(due)), "", 0.0, 0, 0.0
        clock = self._clock
        due_at = clock.nanos() // 1000 + int(wait * 1e6)
        return int(state_of(due)), clock.boot_id(), clock.boot_seconds() + wait, due_at, wait

    def activate(self, db: apsw.Connection, run: int) -> None:
        """Say that who holds the run's lease executes it."""
        db.execute(_ACTIVATE, (run,))

    def release(self, db: apsw.Connection, run: int, due: float | None) -> None:
        """Say when an active run is due again; one that has ended is deleted."""
        db.execute(_RELEASE_WOKEN, (run,))
        db.execute(_RELEASE, (run, *self._waits(due)))
        db.execute(_DELETE_OVER, (run,))

    def wake(self, db: apsw.Connection, name: str) -> bool:
        """Make a run due now, or as soon as it is released; return whether that changed a row."""
        db.execute(_WAKE, (name,))
        return db.changes() > 0

    def wake_bankrupt(self, db: apsw.Connection, changed: Collection[str]) -> None:
        """Make runs due that one of these accounts has stopped, or that a budget stops just now."""
        db.execute(_WAKE_ACTIVE)
        found: Any = db.execute(_BANKRUPT).fetchall()
        due = [(run,) for run, facts in found if concerns(changed, refused_by(facts))]
        db.executemany(_WAKE_BANKRUPT, due)

    def clear_deaths(self, db: apsw.Connection, run: int) -> None:
        """Count the deaths of a run's processes from 0 again."""
        db.execute(_CLEAR_DEATHS, (run,))

    def delete(self, db: apsw.Connection, run: int) -> None:
        """Delete a run's row."""
        db.execute(_DELETE, (run,))

    # --- claiming ---

    def has_work(self, rows: Rows, wanted: Wanted) -> bool:
        """Return whether claiming may find a run: asked outside of a transaction, to spare one."""
        clock = self._clock
        due = (clock.boot_id(), clock.boot_seconds(), 1)
        if rows(_FIND_DUE, due) or self.has_other_boots(rows):
            return True
        return bool(self.ready(rows, wanted._replace(limit=1)))

    def make_due(self, db: apsw.Connection) -> None:
        """Make scheduled runs ready whose time has come."""
        due = (self._clock.boot_id(), self._clock.boot_seconds(), _DUE_AT_A_TIME)
        db.execute(_MAKE_DUE, due)

    def has_other_boots(self, rows: Rows) -> bool:
        """Return whether runs were scheduled before the machine was started again."""
        return bool(rows(_OTHER_BOOTS, (self._clock.boot_id(),)))

    def rebase(self, db: apsw.Connection) -> None:
        """Measure by the present boot's time what was scheduled before."""
        clock = self._clock
        db.execute(_REBASE, (clock.boot_id(), clock.boot_seconds(), clock.nanos() // 1000))

    def ready(self, rows: Rows, wanted: Wanted) -> list[tuple[int, str, int]]:
        """Return number, name and deaths of the runs that are next, up to the limit."""
        if wanted.limit < 1 or not wanted.workflows:
            return []
        found = islice(_by_rank(rows, wanted), wanted.limit)
        return [(run, name, deaths) for _, run, name, deaths in found]

    # --- recovering ---

    def abandoned(self, rows: Rows, lives: Callable[[str, str], bool]) -> list[Abandoned]:
        """Return the runs whose lease a dead process holds."""
        dead = [row for row in rows(_HOLDERS, ()) if not lives(*row)]
        return [Abandoned(*row) for holder in dead for row in rows(_HELD_BY, holder)]

    def late(self, rows: Rows) -> list[Abandoned]:
        """Return the active runs whose lease has expired, whether or not its holder lives."""
        moment = (self._clock.boot_id(), self._clock.awake_seconds())
        return [Abandoned(*row) for row in rows(_LATE, moment)]

    def unleased(self, rows: Rows) -> list[tuple[int, str]]:
        """Return number and name of active runs that nobody executes."""
        return [(run, name) for run, name in rows(_UNLEASED, ())]

    def make_ready(self, db: apsw.Connection, run: int, *, deaths: int) -> bool:
        """Let workers take an active run, with so many deaths more; False if it is none any more."""
        db.execute(_DELETE_OVER, (run,))
        db.execute(_MAKE_READY, (run, deaths))
        return db.changes() > 0


def _by_rank(rows: Rows, wanted: Wanted) -> Iterator[Row]:
    """Yield the ready runs by rank: the first of each workflow and version, merged."""
    versions = {None, wanted.version}
    lists: list[list[Any]] = [
        rows(_READY, (wanted.queue, workflow, version, wanted.limit))
        for workflow in _workflows_ready(rows, wanted)
        for version in versions
    ]
    return merge(*lists)


def _workflows_ready(rows: Rows, wanted: Wanted) -> Iterator[str]:
    """Yield the wanted workflows that have a ready run, in as few seeks as there are of either."""
    known = sorted(wanted.workflows)
    at = 0
    while at < len(known):
        found = rows(_NEXT_WORKFLOW, (wanted.queue, known[at]))
        if not found:
            return
        ((workflow,),) = found
        if workflow in wanted.workflows:
            yield workflow
        at = bisect_right(known, workflow)
