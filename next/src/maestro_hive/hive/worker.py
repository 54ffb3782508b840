"""A worker: takes the runs that are due and executes them; the next one takes the rest."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Self, get_type_hints

from msgspec import Meta

from maestro_hive.engine.settings import Duration, Flag, Seconds, checked
from maestro_hive.hive.live_workers import (
    LiveWorker,
    record_worker,
    remove_dead_workers,
    remove_worker,
)
from maestro_hive.hive.queue import QueueLimits
from maestro_hive.hive.schedules import ScheduleKeeper
from maestro_hive.journal.effects import Release
from maestro_hive.kernel.errors import MaestroError
from maestro_hive.kernel.files import check_identifier
from maestro_hive.kernel.logs import get_log

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from maestro_hive.hive.driver import Driver
    from maestro_hive.hive.functions import WorkflowFunction
    from maestro_hive.hive.runs import Runs
    from maestro_hive.hive.schedules import Defined
    from maestro_hive.journal.store import RunLease

logger = get_log(__name__)

#: How long an idle worker waits for a notice before it asks the store.
_WAIT_SECONDS = 0.25
#: How often a worker with runs asks the store for more.
_POLL_SECONDS = 0.02
#: How often the runs of dead processes, and of stopped ones for ``adopt``, are looked for.
_RECOVER_SECONDS = 0.1
#: How often pending runs of unknown workflows are reported.
_UNKNOWN_SECONDS = 2.0
#: After an error of the store, how long until the next try; it doubles up to the second number.
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
_Names = Annotated[Sequence[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Which runs a worker takes, and how it ends."""

    queues: Annotated[
        _Names | None, Meta(description="a list of names, or None for all queues")
    ] = None
    concurrency: Annotated[
        int, Meta(ge=1, le=1_000_000, description="a whole number from 1 to a million")
    ] = 50
    version: Annotated[str | None, Meta(description="a name, or None")] = None
    adopt: Flag = False
    grace: Seconds = 10.0
    release_after: Duration = 5.0

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(type(self), include_extras=True).items():
            checked(kind, getattr(self, name), f"{name} of a worker")
        for name in self.queues or ():
            check_identifier(name, "queue")
        if self.version is not None:
            check_identifier(self.version, "version")


class Worker:
    """Executes runs until it is stopped; an async context manager."""

    def __init__(
        self,
        runs: Callable[[], Runs],
        workflows: Mapping[str, WorkflowFunction[..., Any]],
        limits: Mapping[str, QueueLimits],
        schedules: Mapping[str, Defined],
        options: WorkerOptions,
    ) -> None:
        self._schedules = schedules
        #: The id under which it is listed.
        self.id = secrets.token_hex(8)
        self._workflows, self._limits, self._options = workflows, limits, options
        self._find_runs = runs
        self._own: dict[Driver, str] = {}  # with their queues
        #: Runs that only wait: since when, and after which entry.
        self._waiting: dict[Driver, tuple[float, int]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hive-worker")
        self._has_room = asyncio.Event()
        self._next_recovery = self._next_report = 0.0
        self._reported: set[str] = set()
        self._listed: tuple[str, ...] = ()

    @property
    def active(self) -> list[str]:
        """Return the ids of the runs that it executes."""
        return [driver.run_id for driver in self._own]

    async def __aenter__(self) -> Self:
        self._runs: Runs = self._find_runs()
        self._keeper = ScheduleKeeper(self._runs.store, self._schedules)
        remove_dead_workers(self._runs.store)
        self._list()
        self._task: asyncio.Task[None] = asyncio.create_task(self._work())
        self._task.add_done_callback(self._note_end)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _note_end(self, task: asyncio.Task[None]) -> None:
        """Report an error that has ended its work; the end of the block raises it."""
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("the worker takes no more runs: %r", error)

    def _list(self) -> None:
        """Record that this worker lives, and which workflows it has."""
        options, store = self._options, self._runs.store
        self._listed = tuple(self._workflows)
        listed = LiveWorker(
            id=self.id,
            holder=store.db.holder(),
            queues=None if options.queues is None else tuple(options.queues),
            workflows=self._listed,
            concurrency=options.concurrency,
            version=options.version,
            started_at=store.now(),
        )
        record_worker(store, listed)

    async def stop(self) -> None:
        """Take nothing more, wait for ``grace`` seconds, and leave the rest to other workers."""
        try:
            self._task.cancel()
            await asyncio.wait((self._task,))
            if self._own and self._options.grace > 0:
                count = len(self._own)
                logger.info("the worker waits for %d run%s", count, "" if count == 1 else "s")
                ends = [driver.end for driver in self._own]
                await asyncio.wait(ends, timeout=self._options.grace)
        finally:
            await _finished(self._leave())

    async def _leave(self) -> None:
        await asyncio.wait((self._task,))
        await asyncio.gather(*(each.stop(each.release()) for each in list(self._own)))
        self._thread.shutdown(wait=False)
        with contextlib.suppress(MaestroError):  # of a store that has failed or was closed
            remove_worker(self._runs.store, self.id)
        if not self._task.cancelled():
            self._task.result()

    # --- the loop of its work ---

    async def _work(self) -> None:
        loop, pause = asyncio.get_running_loop(), _FIRST_PAUSE
        while True:
            try:
                self._recover(loop.time())
                self._keeper.poll(loop.time())
                self._has_room.clear()
                found = self._claim()
                await self._release_waiting(loop.time())
            except MaestroError as error:
                logger.warning("the worker cannot take runs, next try in %g s: %s", pause, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                continue
            pause = _FIRST_PAUSE
            if not found:
                await self._wait(loop)

    async def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for something to do: a notice of the store, or room for another run."""
        if not self._own:
            store = self._runs.store
            left = _WAIT_SECONDS if (due := store.next_due()) is None else due - store.now()
            seconds = max(0.0, min(_WAIT_SECONDS, left))
            await loop.run_in_executor(self._thread, store.db.wait, seconds)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_POLL_SECONDS):
                await self._has_room.wait()

    def _recover(self, now: float) -> None:
        store = self._runs.store
        if now >= self._next_recovery:
            self._next_recovery = now + _RECOVER_SECONDS
            store.recover()
            if self._options.adopt:
                store.adopt(tuple(self._workflows))
        if self._listed != tuple(self._workflows):
            self._list()
        if now >= self._next_report:
            self._next_report = now + _UNKNOWN_SECONDS
            unknown = set(store.pending_workflows()) - set(self._workflows) - self._reported
            self._reported |= unknown
            for name in sorted(unknown):
                logger.warning("runs are pending, and this worker has no workflow %r", name)

    # --- taking runs ---

    @property
    def _room(self) -> int:
        """Return how many more runs may execute; those that only wait hold no turn."""
        return self._options.concurrency - len(self._own) + len(self._waiting)

    def _claim(self) -> int:
        """Take runs, as many as there is room for, a fair share of each queue; return how many."""
        options, taken = self._options, 0
        if self._room <= 0 or not self._workflows:
            return 0
        queues = self._runs.store.pending_queues()
        if options.queues is not None:
            queues = [each for each in queues if each in options.queues]
        for left, queue in zip(range(len(queues), 0, -1), queues, strict=True):
            limits = self._limits.get(queue) or QueueLimits(name=queue)
            room = -(-self._room // left)
            if limits.per_worker is not None:
                active = sum(each == queue for each in self._own.values())
                room = min(room, limits.per_worker - active)
            if room > 0:
                window = limits if limits.rate is not None else None
                given = queue, room, options.version, limits.concurrency, window
                claimed = self._runs.store.claim(tuple(self._workflows), *given)
                taken += len(claimed)
                for lease, workflow in claimed:
                    self._drive(lease, queue, workflow)
        return taken

    def _drive(self, lease: RunLease, queue: str, workflow: str) -> None:
        try:
            driver = self._runs.drive(lease, self._workflows[workflow])
        except MaestroError as error:  # of this run alone, such as a damaged entry
            pause = self._runs.note_suspension(lease.name, error)
            logger.warning(
                "run %r cannot be executed, next try in %g s: %s", *(lease.name, pause, error)
            )
            store = self._runs.store
            store.release(lease, Release("waiting", store.now() + pause, "error"))
            return
        self._own[driver] = queue
        driver.waits_changed = self._has_room.set
        driver.end.add_done_callback(partial(self._ended, driver))

    def _ended(self, driver: Driver, _: object) -> None:
        self._own.pop(driver, None)
        self._waiting.pop(driver, None)
        if self._room > self._options.concurrency // 2:  # take many at once
            self._has_room.set()

    async def _release_waiting(self, now: float) -> None:
        """Release runs from memory that only wait: after a while, or when there are many."""
        options = self._options
        for driver in self._own:
            seq = driver.journal.state.seq
            if not driver.only_waits:
                self._waiting.pop(driver, None)
            elif self._waiting.get(driver, (now, -1))[1] != seq:
                self._waiting[driver] = now, seq
        is_crowded = len(self._waiting) > options.concurrency
        left = [
            driver
            for driver, (since, _) in self._waiting.items()
            if is_crowded or now - since >= options.release_after
        ]
        await asyncio.gather(*(each.stop(each.release()) for each in left))


async def _finished(work: Coroutine[Any, Any, None]) -> None:
    """Wait for the end of work, also if this is cancelled meanwhile."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()
