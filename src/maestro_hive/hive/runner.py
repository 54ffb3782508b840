"""Executes runs: opens them, lets their workflows go on, and records how they end."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from maestro_hive.engine import values
from maestro_hive.engine.copies import copier
from maestro_hive.engine.errors import CircuitBreakerOpen, parts_of
from maestro_hive.engine.failures import error_facts, with_own_lines
from maestro_hive.engine.open_run import OpenRun, copy_finished, open_run
from maestro_hive.engine.shared import find_shared, forget_shared, shared
from maestro_hive.hive import runs
from maestro_hive.hive.active_run import ActiveRun, active_run_or_none
from maestro_hive.hive.errors import (
    RunCancelledError,
    RunFailedError,
    RunInactiveError,
    RunMismatchError,
)
from maestro_hive.hive.inbox import Inbox, watcher_for
from maestro_hive.hive.waits import deliver
from maestro_hive.kernel.errors import (
    ConfigurationError,
    CorruptionError,
    FencedError,
    FolderError,
    NewerFormatError,
    RunLeasedError,
    StorageError,
    StoreBusyError,
)
from maestro_hive.maestro.state.projections import facts_of

if TYPE_CHECKING:
    from maestro_hive.hive.active_run import RunContext
    from maestro_hive.hive.functions import WorkflowFunction
    from maestro_hive.hive.inbox import InboxWatcher
    from maestro_hive.hive.runs import Input
    from maestro_hive.maestro.state.projections import RunState
    from maestro_hive.maestro.state.records import Entry, NewEntry
    from maestro_hive.maestro.state.store import Store

ResultT = TypeVar("ResultT")

#: How long the loop waits for another process that is writing; then a thread waits instead.
_BUSY_TIMEOUT = 0.005
#: A run with more entries than these is folded in a thread.
_FEW_ENTRIES = 500
#: How often a run that another task here gave up in the middle is resumed.
_TAKE_OVERS = 100

#: What says nothing about the workflow: the run is left as it is, and resumed at its next start.
_NO_END = (
    CircuitBreakerOpen,
    CorruptionError,
    FencedError,
    FolderError,
    NewerFormatError,
    RunLeasedError,
    StorageError,
    StoreBusyError,
)


class ActiveTask:
    """A run that this process executes, with its input, and what its result will be put into."""

    def __init__(self, given: Input) -> None:
        self.given = given
        self.done: Future[Any] = Future()
        self.loop = asyncio.get_running_loop()

    @property
    def is_abandoned(self) -> bool:
        """Return whether its loop was closed over it: then it never ends."""
        return self.loop.is_closed()


def active_here(store: Store, run_id: str) -> ActiveTask | None:
    """Return a run that this process executes; None if it does not."""
    found = find_shared(store, ActiveTask, run_id)
    return None if found is None or found.is_abandoned or found.done.done() else found


class Runner:
    """Executes the runs of one hive."""

    def __init__(self, context: RunContext, store: Store) -> None:
        self._context = context
        self._store = store
        self._watchers: dict[asyncio.AbstractEventLoop, InboxWatcher] = {}

    async def run(
        self,
        workflow: WorkflowFunction[..., Any],
        given: Input,
        run_id: str,
        parent: ActiveRun | None = None,
    ) -> Any:
        """Return the result of a run, wherever it stopped; of one that ended, the recorded one.

        Who asks for a run that this process executes already waits for that one, and resumes it if
        the other gives up.
        """
        for _ in range(_TAKE_OVERS):
            ended = runs.ended_state(self._store, run_id)
            if ended is not None:
                return self._recorded(run_id, ended, given)
            task = self.start(workflow, given, run_id, parent)
            if isinstance(task, asyncio.Task):
                return await task
            try:
                return await asyncio.shield(asyncio.wrap_future(task))
            except RunInactiveError as left:
                if left.run_id != run_id:
                    raise
        raise RunInactiveError(run_id)

    def start(
        self,
        workflow: WorkflowFunction[..., Any],
        given: Input,
        run_id: str,
        parent: ActiveRun | None = None,
    ) -> asyncio.Task[Any] | Future[Any]:
        """Start to execute a run; if this process does so already, return what it will give."""
        _refuse_itself(run_id)
        found = active_here(self._store, run_id)
        if found is not None:
            _check_equal(run_id, found.given, given)
            return found.done
        mine = ActiveTask(given)
        old = find_shared(self._store, ActiveTask, run_id)
        if old is not None:
            forget_shared(self._store, ActiveTask, run_id, old)
        entered = shared(self._store, ActiveTask, run_id, lambda *_: mine)
        if entered is not mine:
            _check_equal(run_id, entered.given, given)
            return entered.done
        # A task of its own: cancelling the run must not cancel its caller.
        work = self._execute(workflow, given, run_id, parent)
        task = asyncio.create_task(work, name=f"run {run_id}")
        task.add_done_callback(partial(self._finish, run_id, mine))
        return task

    def _finish(self, run_id: str, mine: ActiveTask, task: asyncio.Task[Any]) -> None:
        """Give the run's end to those who wait for it here."""
        forget_shared(self._store, ActiveTask, run_id, mine)
        if task.cancelled():
            mine.done.set_exception(RunInactiveError(run_id))
        elif (error := task.exception()) is not None:
            mine.done.set_exception(error)
        else:
            mine.done.set_result(task.result())

    def _recorded(self, run_id: str, ended: RunState, given: Input) -> Any:
        assert ended.ended is not None
        if ended.started is not None:
            _check_same(run_id, ended.started, given, self._store)
        # If who ended it could not do so.
        Inbox(self._store).clear(run_id, str(facts_of(ended.ended).get("status")))
        return runs.outcome(run_id, ended.ended, self._store.load)

    # --- one run ---

    async def _execute(
        self,
        workflow: WorkflowFunction[..., Any],
        given: Input,
        run_id: str,
        parent: ActiveRun | None,
    ) -> Any:
        parent_id = parent.run_id if parent is not None else None
        first = runs.started(given, parent=parent_id)
        run = await self._opened(run_id, workflow.name, first)
        closing = _Closing(self._context, run)
        try:
            active = ActiveRun(self._context, run, parent)
            return await self._resume(active, workflow, given, first, closing)
        finally:
            closing.close()

    async def _opened(self, run_id: str, workflow: str, first: NewEntry) -> OpenRun:
        """Open a run: here if that is quick, else in a thread."""
        config = self._context.config.state
        opened = partial(open_run, config, run_id, workflow, (first,), runs.RUNNING)
        if self._store.syncs_fast():
            try:
                run = opened(_BUSY_TIMEOUT)
            except StoreBusyError:
                run = await values.in_thread(opened, _close_unused)
        else:
            run = await values.in_thread(opened, _close_unused)
        try:
            if run.lease.seq <= _FEW_ENTRIES:
                run.load()
            else:
                await values.in_thread(run.load)
        except BaseException:
            run.close()
            raise
        return run

    async def _resume(
        self,
        active: ActiveRun,
        workflow: WorkflowFunction[..., Any],
        given: Input,
        first: NewEntry,
        closing: _Closing,
    ) -> Any:
        state, store = active.run.state, self._store
        if state.started is not None:
            _check_same(active.run_id, state.started, given, store)
        if state.ended is not None:  # also before it started
            return runs.outcome(active.run_id, state.ended, store.load)
        if state.started is None:  # restored from a copy, or opened by an executor before
            await active.record(first)
        watcher = self._watcher()
        if state.seq > 1:
            active.cancel_reason = watcher.inbox.messages(active.run_id).cancel
        family = active.parent.children if active.parent is not None else set()
        family.add(active)
        watcher.add(active)
        try:
            return await self._drive(active, workflow, given, closing)
        finally:
            watcher.remove(active)
            family.discard(active)

    async def _drive(
        self,
        active: ActiveRun,
        workflow: WorkflowFunction[..., Any],
        given: Input,
        closing: _Closing,
    ) -> Any:
        """Let the workflow go on to its end, and record that."""
        try:
            result = await active.drive(lambda: workflow.function(*given.args, **given.kwargs))
            active.check_active()
            value = await values.encode(result, f"the result of run {active.run_id}")
        except asyncio.CancelledError as error:
            self._end_if_cancelled(active)
            if _was_asked_to_stop():
                raise
            await self._fail(active, error, closing)
        except Exception as error:
            self._end_if_cancelled(active)
            if any(isinstance(part, _NO_END) for part in parts_of(error)):
                with_own_lines(error)
                raise
            await self._fail(active, error, closing)
        await self._end(active, runs.ended(runs.SUCCESS, value=value), runs.SUCCESS, closing)
        return result

    async def _fail(self, active: ActiveRun, error: BaseException, closing: _Closing) -> NoReturn:
        facts = error_facts(with_own_lines(error))
        if isinstance(error, asyncio.CancelledError):
            facts["message"] = "the workflow waited for something that was cancelled"
        await self._end(active, runs.ended(runs.FAILED, error=facts), runs.FAILED, closing)
        raise RunFailedError(active.run_id, facts) from error

    async def _end(
        self, active: ActiveRun, ended: NewEntry, status: str, closing: _Closing
    ) -> None:
        """Record the end; the last user gives the lease back with it."""
        release = active.run.users == 1
        await active.run.record(ended, sync=True, status=status, release=release)
        closing.released = release
        self._watcher().inbox.clear(active.run_id, status)

    def _end_if_cancelled(self, active: ActiveRun) -> None:
        """Record that the run was cancelled, and raise it; at once: it may be cancelled again."""
        reason = active.cancel_reason
        if reason is None:
            return
        active.run.append([runs.ended(runs.CANCELLED, reason=reason)], runs.CANCELLED)
        self._watcher().inbox.clear(active.run_id, runs.CANCELLED)
        raise RunCancelledError(active.run_id, reason) from None

    def _watcher(self) -> InboxWatcher:
        loop = asyncio.get_running_loop()
        found = self._watchers.get(loop)
        if found is None:
            self._watchers = {loop: each for loop, each in self._watchers.items() if each.runs}
            found = self._watchers[loop] = watcher_for(self._store, deliver)
        return found


class _Closing:
    """Closes an open run when its workflow is no longer executed, and has its copy written."""

    def __init__(self, context: RunContext, run: OpenRun) -> None:
        self._context = context
        self._run = run
        #: Whether the lease was given back with the last record.
        self.released = False

    def close(self) -> None:
        """Close it; its copy is written in a thread, or at the end of the process."""
        run = self._run
        config = self._context.config.state
        if run.users == 1 and config.auto_checkpoint_interval_seconds:
            write = partial(copy_finished, config, run.store, run.run_id, run.fence)
            copier().request(run.store, run.run_id, write)
        run.close(released=self.released)


def _check_same(run_id: str, started: Entry, given: Input, store: Store) -> None:
    """Raise if a run was started by another workflow, or with other arguments."""
    if started.identity != given.identity:
        _check_equal(run_id, runs.read_input(started, store.load), given)


def _check_equal(run_id: str, recorded: Input, given: Input) -> None:
    if recorded.workflow != given.workflow:
        raise RunMismatchError(
            f"run {run_id!r} belongs to the workflow {recorded.workflow!r}, not to"
            f" {given.workflow!r}; give this one another run_id"
        )
    if recorded.identity != given.identity:
        before, now = (_short(each.encoded.data.decode()) for each in (recorded, given))
        raise RunMismatchError(
            f"run {run_id!r} was started with other arguments: {before}, and now it is given {now};"
            " give this call another run_id, or fork the run"
        )


def _was_asked_to_stop() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _refuse_itself(run_id: str) -> None:
    around = active_run_or_none()
    while around is not None:
        if around.run_id == run_id:
            raise ConfigurationError(f"run {run_id!r} runs itself, and would wait for ever")
        around = around.parent


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}…"


def _close_unused(run: OpenRun | None) -> None:
    if run is not None:
        run.close()
