"""A worker: takes the runs that are due, executes them, and leaves what it cannot finish to others."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from maestro_hive.engine import settings, values
from maestro_hive.engine.errors import UnrecoverableError
from maestro_hive.engine.open_run import Opening, append_entries
from maestro_hive.hive import live_workers, queues, runs
from maestro_hive.hive.active_run import active_here
from maestro_hive.hive.adopting import adopt_stopped, dispatch_of_dead_caller
from maestro_hive.hive.branches import leave_branches
from maestro_hive.hive.cancelling import end_cancelled, unfinished
from maestro_hive.hive.definitions import DEFAULT_QUEUE
from maestro_hive.hive.dispatching import (
    WorkerSignal,
    check_version,
    due_after,
    register_signal,
)
from maestro_hive.hive.inbox import Inbox
from maestro_hive.hive.release import IdleRuns, has_message, only_waits, release
from maestro_hive.hive.runner import HowStarted
from maestro_hive.hive.runs import read_run
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import (
    ConfigurationError,
    MaestroError,
    StorageError,
    StoreBusyError,
    StoreClosedError,
)
from maestro_hive.kernel.logs import get_log
from maestro_hive.maestro.state.projections import fold
from maestro_hive.maestro.state.records import DispatchState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from maestro_hive.engine.limits import Entered
    from maestro_hive.hive.active_run import ActiveRun
    from maestro_hive.hive.functions import WorkflowFunction
    from maestro_hive.hive.hive import Hive
    from maestro_hive.hive.keeping_escalations import EscalationKeeper
    from maestro_hive.hive.queues import QueueSettings
    from maestro_hive.hive.runner import Runner
    from maestro_hive.hive.runs import Input
    from maestro_hive.maestro.state.records import Lease
    from maestro_hive.maestro.state.store import RunLease, Store

logger = get_log(__name__)

ResultT = TypeVar("ResultT")

#: How often it is looked for what other processes enqueue.
_POLL_SECONDS = 0.05
#: How often, after so many seconds in which there was nothing: so it costs half as much.
_QUIET_POLL_SECONDS = 0.09
_QUIET_SECONDS = 10.0
#: How often at least, where what is ready is not for this worker.
_FOREIGN_SECONDS = 0.25
#: How often it is looked for runs that are left to others.
_UNKNOWN_SECONDS = 10.0
#: How often it is looked for processes that died.
_RECOVER_SECONDS = 1.0
#: How long runs that are let go may take to end, after the grace.
_LEAVE_SECONDS = 30.0
#: How often waiting runs are looked at, in parts of the time after which they are released.
_IDLE_CHECKS = 5

_concurrency = settings.rule(
    int, "a whole number from 1 to a million", lambda value: 1 <= value <= 1_000_000
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What a worker takes, and how it lets go."""

    #: None: all queues.
    queues: tuple[str, ...] | None
    concurrency: int
    version: str | None
    adopt: bool
    grace: float
    release_after: float

    @classmethod
    def checked(cls, **given: Any) -> Self:
        """Return the settings; raise if one is given wrongly."""
        names = given["queues"]
        if names is not None and (not isinstance(names, list | tuple | set) or not names):
            raise settings.refused("queues", names, "a list of names, or None for all queues")
        return cls(
            queues=None
            if names is None
            else tuple(files.check_identifier(each, "queue") for each in names),
            concurrency=_concurrency("concurrency", given["concurrency"]),
            version=check_version(given["version"]),
            adopt=settings.flag("adopt", given["adopt"]),
            grace=float(settings.number(0)("grace", given["grace"])),
            release_after=float(settings.positive("release_after", given["release_after"])),
        )


class WorkerHost(NamedTuple):
    """What a worker needs of its hive."""

    hive: Hive
    store: Callable[[], Store]
    runner: Callable[[], Runner]
    claimed: Callable[[Store, RunLease], tuple[WorkflowFunction[..., Any], Input]]
    workflows: Mapping[str, WorkflowFunction[..., Any]]
    queues: Mapping[str, QueueSettings]


class _Taken(NamedTuple):
    """A run that a worker executes."""

    run_id: str
    queue: str
    task: asyncio.Task[Any]
    entered: Entered | None


class Worker:
    """Executes enqueued runs while its block runs: ``async with hive.worker():``."""

    def __init__(self, host: WorkerHost, chosen: WorkerSettings) -> None:
        self._host = host
        self.settings = chosen
        #: Its id, as ``maestro queues`` lists it.
        self.id = secrets.token_hex(6)
        self._active: dict[str, _Taken] = {}
        self._idle = IdleRuns(chosen.release_after)
        self._admissions: dict[str, asyncio.Task[None]] = {}
        self._background: list[asyncio.Task[None]] = []
        self._store: Store | None = None
        self._shown: tuple[live_workers.LiveWorker, Lease] | None = None
        self._escalations: EscalationKeeper | None = None
        self._recover_at = 0.0
        self._turns = 0
        self._executed_at = time.monotonic()
        self._misses = 0
        self._unknown: set[str] = set()
        self._unknown_at = 0.0
        #: Why a run of a limited queue could not be taken.
        self._admission_error: BaseException | None = None

    @property
    def active(self) -> list[str]:
        """The ids of the runs that it executes."""
        return list(self._active)

    # --- its life ---

    async def __aenter__(self) -> Self:
        if self._background:
            raise ConfigurationError("this worker was started before; make another one")
        self._signal = WorkerSignal(asyncio.get_running_loop())
        await self._open()
        for work in (self._work(), self._release_idle(), self._keep_schedules()):
            task = asyncio.create_task(work, name=f"worker {self.id}")
            task.add_done_callback(self._background_ended)
            self._background.append(task)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ending = [*self._background, *self._admissions.values()]
        for task in ending:
            task.cancel()
        try:
            await asyncio.wait(ending)
            with contextlib.suppress(MaestroError):  # a store that failed: its runs end by that
                for run in self._runs():
                    if only_waits(run) and not has_message(run):
                        release(run)
            if self._active:
                count = len(self._active)
                plural = "" if count == 1 else "s"
                logger.info("worker %s waits for %d run%s", self.id, count, plural)
                tasks = {each.task for each in self._active.values()}
                await asyncio.wait(tasks, timeout=self.settings.grace)
        finally:
            await self._leave()

    def _background_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("worker %s goes on without a part of it", self.id, exc_info=error)

    async def _leave(self) -> None:
        """Let go of what is still executed: the next worker has it at once."""
        tasks = {each.task for each in self._active.values()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_LEAVE_SECONDS)
        if self._escalations is not None:
            await self._escalations.leave()
        if self._shown is not None and self._store is not None:
            live_workers.unregister(self._store, *self._shown)
        logger.info("worker %s has stopped", self.id)

    async def _open(self) -> Store:
        """Return the store; one that was opened again is told of this worker."""
        store = self._host.store()
        if store is not self._store:
            await self._keep_escalations()
            register_signal(store, self.id, self._signal)
            shown = live_workers.LiveWorker(
                id=self.id,
                queues=self.settings.queues,
                concurrency=self.settings.concurrency,
                version=self.settings.version,
                workflows=tuple(sorted(self._host.workflows)),
                started_at=store.clock.nanos() // 1000,
            )
            lease = await values.in_thread(partial(live_workers.register, store, shown))
            self._store, self._shown = store, (shown, lease)
            logger.info("worker %s takes runs of %s", self.id, ", ".join(shown.workflows))
            if self.settings.adopt:
                workflows = set(shown.workflows)
                await values.in_thread(partial(adopt_stopped, store, workflows))
        return store

    async def _keep_escalations(self) -> None:
        """Deliver escalations, and look for their answers, while this worker lives."""
        if self._escalations is not None:
            await self._escalations.leave()
        self._escalations = self._host.runner().escalations
        self._escalations.enter()

    async def _keep_schedules(self) -> None:
        """Start the runs of schedules, while this worker lives."""
        from maestro_hive.hive import schedules

        await schedules.keep(self._host.hive)

    # --- looking for runs ---

    async def _work(self) -> None:
        failures = 0
        leave_branches()
        while True:
            try:
                delay = await self._turn()
                failures = 0
            except StoreClosedError:
                logger.warning("worker %s ends: its hive was closed", self.id)
                return
            except StoreBusyError:
                delay = _POLL_SECONDS
            except Exception as error:  # whatever it is, the runs must not wait for ever
                delay = due_after(error, failures) or _POLL_SECONDS
                failures += 1
                logger.exception("worker %s looks again in %g s", self.id, delay)
            await self._signal.wait(delay)

    async def _turn(self) -> float:
        """Take what is due; return after how many seconds to look again."""
        failed, self._admission_error = self._admission_error, None
        if failed is not None:
            raise failed
        store = await self._open()
        if time.monotonic() >= self._recover_at:
            await self._recover(store)
        if self._free < 1:
            return _RECOVER_SECONDS
        seconds = store.seconds_to_next()
        if seconds is None or seconds > 0:
            self._misses = 0
            return self._poll_seconds if seconds is None else min(seconds, self._poll_seconds)
        if await self._take(store):
            self._misses = 0
            return 0.0
        self._misses += 1
        if time.monotonic() >= self._unknown_at:
            self._note_unknown(store)
        return min(_POLL_SECONDS * self._misses, _FOREIGN_SECONDS)

    @property
    def _poll_seconds(self) -> float:
        is_quiet = time.monotonic() - self._executed_at > _QUIET_SECONDS
        return _QUIET_POLL_SECONDS if is_quiet else _POLL_SECONDS

    @property
    def _free(self) -> int:
        return self.settings.concurrency - len(self._active)

    async def _recover(self, store: Store) -> None:
        """Let workers have the runs of processes that died."""
        adopt = partial(dispatch_of_dead_caller, store, set(self._host.workflows))
        recovered = await values.in_thread(partial(store.recover_runs, adopt))
        self._recover_at = time.monotonic() + _RECOVER_SECONDS
        for name in recovered:
            logger.info("run %s is taken up: its process died", name, extra={"run_id": name})

    def _queues(self, store: Store) -> list[str]:
        """Return the queues to look at, each time another one first."""
        chosen = self.settings.queues
        found = [name for name in store.ready_queues() if chosen is None or name in chosen]
        self._turns += 1
        first = self._turns % len(found) if found else 0
        return [*found[first:], *found[:first]]

    async def _take(self, store: Store) -> bool:
        """Take what is ready, fairly; return whether there was something for this worker."""
        await self._claim(store, DEFAULT_QUEUE, 0)  # which makes ready what has become due
        names = self._queues(store)
        found = False
        share = max(1, self._free // max(1, len(names)))
        for name in names:
            queue = self._host.queues.get(name)
            active = sum(each.queue == name for each in self._active.values())
            room = min(self._free, share)
            room = room if queue is None else queue.room(active, room)
            if queue is not None and queue.is_shared:
                if room > 0:
                    self._admit_soon(store, queue)
                continue
            for lease in await self._claim(store, name, room) if room > 0 else ():
                found = True
                self._execute(store, lease, name)
        return found

    async def _claim(self, store: Store, queue: str, limit: int) -> list[RunLease]:
        claim = partial(
            store.claim_runs,
            queue=queue,
            workflows=tuple(self._host.workflows),
            version=self.settings.version,
            limit=limit,
        )
        return await _in_store(store, claim, partial(_give_back, store))

    # --- queues with limits over all workers ---

    def _admit_soon(self, store: Store, queue: QueueSettings) -> None:
        """Have a run of a limited queue taken when that allows it; one at a time."""
        if queue.name in self._admissions:
            return
        # A start that is counted and not made is lost: not before there is a run for it.
        if store.has_ready(
            queue=queue.name,
            workflows=tuple(self._host.workflows),
            version=self.settings.version,
        ):
            task = self._admissions[queue.name] = asyncio.create_task(self._admit(store, queue))
            task.add_done_callback(partial(self._admitted, queue.name))

    async def _admit(self, store: Store, queue: QueueSettings) -> None:
        entered = await queues.enter(store, queue)
        leases: list[RunLease] = []
        try:
            if self._free > 0:
                leases = await self._claim(store, queue.name, 1)
        finally:
            if not leases and entered is not None:
                entered.leave()
        for lease in leases:
            self._execute(store, lease, queue.name, entered)

    def _admitted(self, name: str, task: asyncio.Task[None]) -> None:
        del self._admissions[name]
        if not task.cancelled():
            self._admission_error = task.exception() or self._admission_error
        self._signal.set()

    def _note_unknown(self, store: Store) -> None:
        """Say which runs are left to others, once for each workflow."""
        self._unknown_at = time.monotonic() + _UNKNOWN_SECONDS
        for queue in self._queues(store):
            for each in store.dispatches(queue=queue, state=DispatchState.READY, limit=100):
                name = each.workflow
                if name not in self._host.workflows and name not in self._unknown:
                    self._unknown.add(name)
                    text = "worker %s leaves run %s to others: it has no workflow %r"
                    logger.warning(text, self.id, each.run_id, name, extra={"run_id": each.run_id})

    # --- executing ---

    def _execute(
        self,
        store: Store,
        lease: RunLease,
        queue: str,
        entered: Entered | None = None,
    ) -> None:
        """Execute a run that was taken; what it needs is left if that cannot be."""
        self._executed_at = time.monotonic()
        run_id, runner = lease.name, self._host.runner()
        try:
            _check_deaths(store, lease, runner.max_interruptions)
            workflow, given = self._host.claimed(store, lease)
            how = HowStarted(Opening(lease=lease), entered=entered)
            task = runner.start(workflow, given, run_id, how=how)
        except MaestroError as error:
            failures = runner.failures[run_id] = runner.failures.get(run_id, 0) + 1
            due = due_after(error, failures - 1)
            until = "a person retries it" if due is None else f"{due:g} s have passed"
            logger.warning("run %s is left until %s: %s", run_id, until, error)
            with contextlib.suppress(MaestroError):  # it is left all the same
                _record_left(store, lease, error, runs.RUNNING if due is None else None)
            store.release_run(lease, due)
        else:
            if isinstance(task, asyncio.Task):
                self._active[run_id] = _Taken(run_id, queue, task, entered)
                task.add_done_callback(partial(self._ended, run_id))
                return
            store.release_run(lease)  # another task here executes it
        if entered is not None:
            entered.leave()

    def _ended(self, run_id: str, task: asyncio.Task[Any]) -> None:
        taken = self._active.pop(run_id)
        if taken.entered is not None:
            taken.entered.leave()
        if not task.cancelled():
            task.exception()  # it is recorded, or says when the run is due again
        self._signal.set()

    # --- releasing what waits ---

    def _runs(self) -> list[ActiveRun]:
        """Return those of the runs it executes that are open."""
        store = self._store
        found = [active_here(store, run_id) for run_id in self._active] if store else []
        return [each.active for each in found if each is not None and each.active is not None]

    async def _release_idle(self) -> None:
        pause = min(1.0, self.settings.release_after / _IDLE_CHECKS)
        while True:
            # What is taken meanwhile is not released before that time has passed.
            await asyncio.sleep(pause if self._active else min(1.0, self.settings.release_after))
            with contextlib.suppress(MaestroError):  # a store that failed: its runs end by that
                self._idle.release(self._runs())


def _check_deaths(store: Store, lease: RunLease, most: int) -> None:
    """Raise if too many processes in a row died in a run's own code, outside of any step."""
    if lease.deaths <= most:
        return
    family = [read_run(store, name) for name in unfinished(store, lease.name)]
    # The start of an attempt that is open reset the count: the first death after it is the step's.
    in_step = any(step.open_attempt for run in family for step in run.steps.values())
    if lease.deaths - in_step > most:
        raise UnrecoverableError(
            f"run {lease.name!r} is interrupted: {lease.deaths - in_step} processes in a row died"
            " while they executed its own code, outside of any step. To try again: `maestro retry"
            f" {lease.name}`"
        )


def _record_left(store: Store, lease: RunLease, error: MaestroError, status: str | None) -> None:
    """Record why a run cannot be executed as the code is now; one that is cancelled ends by that."""
    if isinstance(error, StorageError):
        return
    cancelled = Inbox(store).messages(lease.name).cancel
    if cancelled is not None:
        end_cancelled(store, lease, fold(store.entries(lease.run), store.load), cancelled)
        return
    entry, last = runs.suspended(error), store.entries(lease.run, after=lease.seq - 1)
    if not last or not runs.is_same_suspension(last[-1], entry):
        append_entries(store, lease, [entry], status, sync=False)


def _give_back(store: Store, leases: list[RunLease] | None) -> None:
    for lease in leases or ():
        with contextlib.suppress(MaestroError):
            store.release_run(lease)


async def _in_store(
    store: Store, call: Callable[[], ResultT], undo: Callable[[ResultT | None], object]
) -> ResultT:
    """Return what a blocking call of the store returns; made on the loop where the store is quick."""
    if store.syncs_fast():
        return call()
    return await values.in_thread(call, undo)
