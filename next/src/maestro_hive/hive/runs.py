"""The runs of this process on one event loop: opened once, resumed by their ids."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from typing import TYPE_CHECKING, Any

from msgspec import Raw

from maestro_hive.hive.commands import last_end
from maestro_hive.hive.copied_runs import restore_lost
from maestro_hive.hive.driver import Driver
from maestro_hive.hive.functions import check_same
from maestro_hive.hive.inbox import Inbox
from maestro_hive.hive.workflow_loop import TURNS
from maestro_hive.journal.effects import ENDED, Accept, Release
from maestro_hive.journal.entries import RunEnded, RunStarted
from maestro_hive.journal.recorder import Recorder
from maestro_hive.journal.state import RunState
from maestro_hive.journal.store import LEASE_SECONDS, Append, RunLease, Store
from maestro_hive.kernel.errors import MaestroError, RunMismatchError, UnknownRunError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from concurrent.futures import Future

    from maestro_hive.engine.attempt import StepStages
    from maestro_hive.hive.commands import ChildCommand, Workflow
    from maestro_hive.hive.held_runs import HeldRuns
    from maestro_hive.journal.copies import Copies
    from maestro_hive.journal.entries import Entry

#: After an error of ours, workers try a run again after this; it doubles up to the second number.
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 300.0


class Runs:
    """The runs that this process executes on one loop."""

    def __init__(
        self,
        store: Store,
        loop: asyncio.AbstractEventLoop,
        stages: StepStages,
        cancel_grace: float,
        held: HeldRuns,
        log_level: str = "INFO",
        copies: Copies | None = None,
    ) -> None:
        self.log_level = log_level
        self.store, self.stages, self._copies = store, stages, copies
        #: For how many seconds a cancelled workflow may clean up.
        self.cancel_grace = cancel_grace
        self.recorder = Recorder(store, loop, None if copies is None else copies.changed)
        self.active: dict[str, Driver] = {}
        self._held = held
        #: Why runs were suspended here, and for how long workers leave them.
        self.suspensions: dict[str, tuple[Exception, float]] = {}
        self._loop = loop
        self._opening: dict[str, asyncio.Future[None]] = {}
        self._inbox = Inbox(store, self.active, loop)
        self.check_inbox_soon, self.check_inbox = self._inbox.check_soon, self._inbox.check
        self._renewal: asyncio.TimerHandle | None = None
        # The end of ``asyncio.run`` closes the generators of its loop, and so stops the runs.
        self._loop_end = self._until_loop_ends()
        with contextlib.suppress(StopIteration):
            self._loop_end.__anext__().send(None)  # type: ignore[attr-defined] # it awaits nothing

    async def open(
        self,
        workflow: Workflow,
        data: bytes | None,
        run_id: str,
        *,
        parent: str | None = None,
        queue: str | None = None,
        context: contextvars.Context | None = None,
    ) -> Driver | RunEnded:
        """Start a run, resume it, or join it; return its end if it has ended.

        Without ``data`` it is resumed with its own arguments.
        """
        while (opening := self._opening.get(run_id)) is not None:
            await asyncio.shield(opening)
        opening = self._opening[run_id] = self._loop.create_future()
        try:
            while (held := self._held.find(run_id)) is not None:
                await asyncio.shield(asyncio.wrap_future(held))
            while (driver := self.active.get(run_id)) is not None and driver.is_stopping:
                await asyncio.wait((driver.end,))
            if driver is not None:
                self._check_input(run_id, driver.journal.state.started, data, workflow)
                if queue is not None and not driver.is_accepted:
                    self._accept(driver, queue)
            else:
                given = Raw(b"null" if data is None else data)
                first = RunStarted(workflow=workflow.name, input=given, parent=parent, turns=TURNS)
                restore_lost(self.store, self._copies, run_id)
                lease = await self._acquire(run_id, first, queue)
                if lease.status in ENDED:
                    entries = self.store.entries(lease.number)
                    self._check_input(run_id, entries[0], data, workflow)
                    return last_end(entries)
                driver = self.drive(lease, workflow, context)
                try:
                    self._check_input(run_id, driver.journal.state.started, data, workflow)
                except RunMismatchError as error:
                    self.forget(driver)
                    driver.suspend(error)
                    raise
            return driver
        finally:
            del self._opening[run_id]
            opening.set_result(None)

    def _accept(self, driver: Driver, queue: str) -> None:
        """Give a run to the workers of a queue if this process does not end it; durable."""
        (result,) = self.store.write(
            (Append(driver.journal.lease, (), (Accept(queue),), sync=True),)
        )
        if isinstance(result, MaestroError):
            raise result
        driver.is_accepted = True

    def drive(
        self, lease: RunLease, workflow: Workflow, context: contextvars.Context | None = None
    ) -> Driver:
        """Execute a run that this process holds."""
        around = contextvars.copy_context() if context is None else context
        driver = Driver(self, self.recorder, lease, workflow, around)
        self.active[lease.name] = driver
        if self._copies is not None:
            self._copies.changed(lease.number)
        self._inbox.start()
        if self._renewal is None:
            self._renewal = self._loop.call_later(LEASE_SECONDS / 3, self._renew)
        return driver

    async def open_child(self, command: ChildCommand) -> Driver | RunEnded:
        """Start a child of a run, or resume it; return its end if it has ended."""
        parent, context = command.host.run_id, command.context.copy()
        workflow, data = command.workflow, command.data
        return await self.open(workflow, data, command.run_id, parent=parent, context=context)

    def hold(self, lease: RunLease, release: Release, threads: list[Future[Any]]) -> None:
        """Release a run when threads of it have ended."""
        self._held.hold(self.store, lease, release, threads)

    def has_progressed(self, state: RunState, since: int | None = None) -> bool:
        """Return whether a child of a run has had an outcome since the run was resumed."""
        since = state.resumed_at if since is None else since
        for started in state.children.values():
            if started.is_enqueued:
                continue
            child = RunState()
            with contextlib.suppress(UnknownRunError):  # it was not made yet
                child.add(self.store.entries(self.store.find(started.run_id).number))
            is_later = child.latest is not None and child.latest.at > since
            if is_later or self.has_progressed(child, since):
                return True
        return False

    def note_suspension(self, run_id: str, error: Exception) -> float:
        """Remember why a run is suspended; return for how long, longer each time."""
        _, pause = self.suspensions.get(run_id, (error, _FIRST_PAUSE / 2))
        pause = min(2 * pause, _LONGEST_PAUSE)
        self.suspensions[run_id] = error.with_traceback(None), pause
        return pause

    def forget(self, driver: Driver) -> None:
        """Drop a run that has ended here."""
        if self.active.get(driver.run_id) is driver:
            del self.active[driver.run_id]
            if self._copies is not None:
                self._copies.released(driver.journal.lease.number)

    # --- the end of the loop ---

    async def _until_loop_ends(self) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await self.stop()

    async def stop(self) -> None:
        """Stop all runs politely."""
        drivers = list(self.active.values())
        await asyncio.gather(*(each.stop(each.release()) for each in drivers))
        ends = [each.end for each in drivers if not each.end.done()]
        if ends:  # others were stopping already
            await asyncio.wait(ends)
        self._stop_timers()

    def abandon(self) -> None:
        """Release the runs of a loop that was closed over them."""
        self._stop_timers()
        for driver in self.active.values():
            release = Release("pending", self.store.now()) if driver.is_accepted else None
            with contextlib.suppress(MaestroError):  # taken over, or the store has failed
                self.store.release(driver.journal.lease, release or Release("stopped"))
        self.active.clear()

    def _stop_timers(self) -> None:
        self._inbox.stop()
        if self._renewal is not None:
            self._renewal.cancel()
            self._renewal = None

    # --- inside ---

    def _check_input(
        self, run_id: str, started: Entry | None, data: bytes | None, workflow: Workflow
    ) -> None:
        """Raise if a run was started with another workflow, or other arguments."""
        assert isinstance(started, RunStarted)
        check_workflow(run_id, started.workflow, workflow.name)
        if data is not None:
            check_same(run_id, self.store.text(run_id, started.input), data, workflow)

    def _renew(self) -> None:
        self._renewal = None
        if self.active:
            try:
                self.store.renew()
            except MaestroError as error:
                for driver in list(self.active.values()):
                    driver.suspend(error)
                return
            self._renewal = self._loop.call_later(LEASE_SECONDS / 3, self._renew)

    async def _acquire(self, run_id: str, first: RunStarted, queue: str | None) -> RunLease:
        """Take a run; if that is cancelled meanwhile, give it back."""
        taken = self.recorder.acquire(run_id, first, queue)
        try:
            lease: RunLease = await taken
        except asyncio.CancelledError:
            if taken.exception() is None and taken.result().status not in ENDED:
                self.store.release(taken.result(), Release("stopped"))
            raise
        return lease


def check_workflow(run_id: str, recorded: str, given: str) -> None:
    """Raise if a run is one of another workflow."""
    if recorded != given:
        raise RunMismatchError(
            f"run {run_id!r} belongs to the workflow {recorded!r}, not to {given!r}; give this call"
            " another run_id"
        )
