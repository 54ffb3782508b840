"""Executes runs: opens them, lets their workflows go on, and records how they end."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from maestro_hive.engine import values
from maestro_hive.engine.copies import copier, copy_finished, has_copies
from maestro_hive.engine.errors import ExecutionException
from maestro_hive.engine.failures import error_facts, with_own_lines
from maestro_hive.engine.open_run import Opening, OpenRun, open_run
from maestro_hive.engine.shared import find_shared, forget_shared, shared
from maestro_hive.hive import resolving, runs
from maestro_hive.hive.active_run import ActiveRun, ActiveTask, active_here, retrieve
from maestro_hive.hive.branches import Operation, active_run_or_none, leave_branches
from maestro_hive.hive.cancelling import cancel_children
from maestro_hive.hive.dispatching import (
    RunReleased,
    dispatch_facts,
    due_after,
    is_bankrupt,
    says_nothing,
)
from maestro_hive.hive.errors import (
    RunCancelledError,
    RunFailedError,
    RunInactiveError,
)
from maestro_hive.hive.failed_calls import failed_calls
from maestro_hive.hive.inbox import Inbox, watcher_for
from maestro_hive.hive.outliving import close_after_threads, let_threads_end
from maestro_hive.hive.same_run import check_equal, check_same
from maestro_hive.hive.steps import is_suspending
from maestro_hive.hive.waits import deliver
from maestro_hive.kernel.errors import ConfigurationError, MaestroError, StoreBusyError
from maestro_hive.maestro.state.projections import facts_of
from maestro_hive.maestro.state.views import open_waits

if TYPE_CHECKING:
    from concurrent.futures import Future

    from maestro_hive.engine.limits import Entered
    from maestro_hive.hive.functions import WorkflowFunction
    from maestro_hive.hive.inbox import InboxWatcher
    from maestro_hive.hive.keeping_escalations import EscalationKeeper
    from maestro_hive.hive.run_context import RunContext
    from maestro_hive.hive.runs import Input
    from maestro_hive.maestro.state.projections import RunState
    from maestro_hive.maestro.state.records import Entry, NewEntry
    from maestro_hive.maestro.state.store import Store

#: How long the loop waits for another process that is writing; then a thread waits instead.
_BUSY_TIMEOUT = 0.005
#: A run with more entries than these is folded in a thread.
_FEW_ENTRIES = 500
#: How often a run that another task here gave up in the middle is resumed.
_TAKE_OVERS = 100
#: How often a task may be cancelled while the child it waits for is being ended.
_CANCELLATIONS = 100


class HowStarted(NamedTuple):
    """How a run is started: ``recorded`` is done when it is open, and recorded as ``opening`` says.

    ``entered`` is its place in a queue that is limited.
    """

    opening: Opening | None = None
    recorded: asyncio.Future[None] | None = None
    entered: Entered | None = None


class Runner:
    """Executes the runs of one hive."""

    def __init__(self, context: RunContext, store: Store) -> None:
        self._context = context
        self._store = store
        self._folders = context.config.state.resolve()
        self._watchers: dict[asyncio.AbstractEventLoop, InboxWatcher] = {}
        #: How often runs of workers were suspended in a row by what says nothing about them.
        self.failures: dict[str, int] = {}
        #: How many processes may die in a row that execute a run's own code.
        self.max_interruptions = context.config.level1.max_interruptions

    @property
    def escalations(self) -> EscalationKeeper:
        """What delivers escalations, and looks for their answers."""
        return self._context.escalations

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
            except (RunInactiveError, RunReleased) as left:
                if left.run_id != run_id:
                    raise
        raise RunInactiveError(run_id)

    def start(
        self,
        workflow: WorkflowFunction[..., Any],
        given: Input,
        run_id: str,
        parent: ActiveRun | None = None,
        how: HowStarted | None = None,
    ) -> asyncio.Task[Any] | Future[Any]:
        """Start to execute a run; if this process does so already, return what it will give."""
        _refuse_itself(run_id)
        found = active_here(self._store, run_id)
        if found is not None:
            check_equal(run_id, found.given, given)
            return found.done
        mine = ActiveTask(given)
        old = find_shared(self._store, ActiveTask, run_id)
        if old is not None:
            forget_shared(self._store, ActiveTask, run_id, old)
        entered = shared(self._store, ActiveTask, run_id, lambda *_: mine)
        if entered is not mine:
            check_equal(run_id, entered.given, given)
            return entered.done
        # A task of its own: cancelling the run must not cancel its caller.
        work = self._execute(workflow, given, mine, run_id, parent, how or HowStarted())
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
            check_same(run_id, ended.started, given, self._store)
        # If who ended it could not do so.
        Inbox(self._store).clear(run_id, str(facts_of(ended.ended).get("status")))
        return runs.outcome(run_id, ended.ended, self._store.load)

    # --- one run ---

    async def _execute(
        self,
        workflow: WorkflowFunction[..., Any],
        given: Input,
        mine: ActiveTask,
        run_id: str,
        parent: ActiveRun | None,
        how: HowStarted,
    ) -> Any:
        leave_branches()  # it may have been started by a workflow, and is not one of its tasks
        opening = how.opening or _plain_opening(parent)
        queued = {} if opening.dispatch is None else dispatch_facts(opening.dispatch)
        first = runs.started(given, parent=opening.parent, **queued)
        run = await self._opened(run_id, workflow.name, first, opening)
        if how.recorded is not None and not how.recorded.done():
            how.recorded.set_result(None)
        closing = _Closing(self._context, run)
        try:
            await let_threads_end(run)
            active = mine.active = ActiveRun(self._context, run, parent)
            active.run_child = self.run_child
            active.entered = how.entered
            result = await self._resume(active, workflow, given, first, closing)
            self.failures.pop(run_id, None)
        except BaseException as error:
            if run.lease.dispatched:
                self._set_due(run, error)
            raise
        else:
            return result
        finally:
            close_after_threads(run, None if parent is None else parent.run, closing.close)

    def _set_due(self, run: OpenRun, error: BaseException) -> None:
        """Say when workers take a run again that was suspended; if it has ended, they do not."""
        if run.state.ended is not None:
            self.failures.pop(run.run_id, None)
            return
        failures = self.failures.pop(run.run_id, 0)
        run.due = due_after(error, failures)
        waits = isinstance(error, RunReleased) or bool(open_waits(run.state))
        left = runs.PENDING if run.due is not None else runs.RUNNING  # which is shown as stopped
        if is_bankrupt(error):
            left = runs.BANKRUPT
        run.left_status = runs.WAITING if waits else left
        if says_nothing(error):
            self.failures[run.run_id] = failures + 1

    def restore(self, run_id: str) -> None:
        """Put a run that the journal does not have into it from its newest copy, if there is one."""
        if has_copies(self._folders, run_id):
            known = self._folders, self._store
            run = open_run(self._context.config.state, run_id, known=known)
            try:
                run.load()
            finally:
                run.close()

    async def _opened(
        self, run_id: str, workflow: str, first: NewEntry, opening: Opening
    ) -> OpenRun:
        """Open a run: here if that is quick, else in a thread."""
        config = self._context.config.state
        opened = partial(
            open_run,
            config,
            run_id,
            workflow,
            (first,),
            runs.RUNNING,
            known=(self._folders, self._store),
            opening=opening,
        )
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
            check_same(active.run_id, state.started, given, store)
        if state.ended is not None:  # also before it started
            return runs.outcome(active.run_id, state.ended, store.load)
        if state.started is None:  # restored from a copy, or opened by an executor before
            await active.record(first)
        watcher = self._watcher()
        if state.seq > 1:
            self._show_running(active)
            messages = watcher.inbox.messages(active.run_id)
            await resolving.take(active, messages.resolutions)
            if messages.cancel is not None and state.cancel_requested is None:
                active.cancel(messages.cancel)
        family = active.parent.children if active.parent is not None else set()
        family.add(active)
        watcher.add(active)
        if self.escalations.has_work():  # which an earlier process left
            active.await_escalation()
        try:
            return await self._drive(active, workflow, given, closing)
        finally:
            watcher.remove(active)
            family.discard(active)
            await active.leave_escalations()

    def _show_running(self, active: ActiveRun) -> None:
        """Have a run that a budget had stopped listed as running."""
        record = self._store.run(active.run_id)
        if record is not None and record.status == runs.BANKRUPT:
            active.run.append((), runs.RUNNING, sync=False)

    async def _drive(
        self,
        active: ActiveRun,
        workflow: WorkflowFunction[..., Any],
        given: Input,
        closing: _Closing,
    ) -> Any:
        """Let the workflow go on to its end, and record that."""
        log = self._context.run_log
        log.started(active, workflow)
        try:
            args, kwargs = await _as_recorded(given)
            await active.may_start()
            result = await active.drive(workflow.function(*args, **kwargs))
            value = await values.encode(result, f"the result of run {active.run_id}")
        except asyncio.CancelledError as error:
            if active.is_suspended or _was_asked_to_stop():
                log.suspended(active.run_id, None)
                raise
            self._end_if_cancelled(active, closing)
            await self._fail(active, error, closing)
        except Exception as error:
            if active.is_suspended or is_suspending(error):
                with_own_lines(error)
                await _record_suspension(active, error)
                if isinstance(error, RunReleased):
                    log.released(active.run_id, error.until)
                else:
                    log.suspended(active.run_id, error)
                raise
            self._end_if_cancelled(active, closing)
            await self._fail(active, error, closing)
        except BaseException as error:  # such as SystemExit: it is the process's, and no outcome
            log.suspended(active.run_id, error)
            raise
        self._end_if_cancelled(active, closing)  # also one that returned all the same
        await self._end(active, runs.ended(runs.SUCCESS, value=value), runs.SUCCESS, closing)
        log.completed(active.run_id, active.run.state)
        # What is recorded is returned: the caller of a run that has ended gets the same.
        return await values.decode(value.data, f"the result of run {active.run_id}")

    async def _fail(self, active: ActiveRun, error: BaseException, closing: _Closing) -> NoReturn:
        facts = error_facts(with_own_lines(error))
        if isinstance(error, asyncio.CancelledError):
            facts["message"] = "the workflow waited for something that was cancelled"
        failed = failed_calls(error, active)
        ended = runs.ended(runs.FAILED, error=facts, failed=failed)
        await self._end(active, ended, runs.FAILED, closing)
        self._context.run_log.failed(active.run_id, facts, error)
        raise runs.failure(active.run_id, facts)

    async def _end(
        self, active: ActiveRun, ended: NewEntry, status: str, closing: _Closing
    ) -> None:
        """Record the end; the last user gives the lease back with it."""
        differences = active.replay.differences()
        if differences is not None:
            await active.run.record(differences, sync=False)
        active.note_resumed()
        release = active.run.users == 1
        await active.run.record(ended, sync=True, status=status, release=release)
        closing.released = release
        self._watcher().inbox.clear(active.run_id, status)

    def _end_if_cancelled(self, active: ActiveRun, closing: _Closing) -> None:
        """Record that the run was cancelled, and raise it; at once: it may be cancelled again."""
        reason = active.cancel_reason
        if reason is None:
            return
        cancel_children(self._store, active.run.state, reason)
        ended = runs.ended(runs.CANCELLED, reason=reason)
        release = active.run.users == 1
        active.run.append([ended], runs.CANCELLED, release=release)
        closing.released = release
        self._watcher().inbox.clear(active.run_id, runs.CANCELLED)
        self._context.run_log.cancelled(active.run_id, reason)
        raise RunCancelledError(active.run_id, reason) from None

    # --- children ---

    async def run_child(
        self,
        parent: ActiveRun,
        workflow: WorkflowFunction[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return the result of a workflow that another one calls, in a run of its own."""
        operation = Operation(parent)
        try:
            names, types = workflow.parameters, workflow.types
            given = runs.make_input(workflow.name, args, kwargs, names, types)
            await operation.find(runs.identity_of("child", given.identity))
            state = parent.run.state
            ended = state.outcomes.get(operation.identity)
            if ended is not None:
                if not facts_of(ended).get("cancelled"):
                    if self._is_gone(parent, ended):
                        operation.reserve(ended)  # its outcome keeps its place in the order
                        await self._run_child(operation, workflow, given, _child_of(ended))
                    return await self._child_outcome(operation, ended)
                await operation.cancelled_again(ended, state.children.get(operation.identity))
            try:
                await operation.may_execute(workflow.name)
            except asyncio.CancelledError:
                await self._cancel_known_child(operation, workflow, given)
                raise
            return await self._execute_child(operation, workflow, given)
        except Exception as error:
            with_own_lines(error)
            raise
        finally:
            operation.close()

    async def _execute_child(
        self, operation: Operation, workflow: WorkflowFunction[..., Any], given: Input
    ) -> Any:
        parent, identity = operation.run, operation.identity
        known = parent.run.state.children.get(identity)
        if known is not None:
            run_id = _child_of(known)
        else:
            run_id = runs.child_id(parent.run_id, workflow.name, identity)
            self._refuse_left_over(parent, run_id)
            first = runs.child_started(identity, run_id, workflow.name)
            with parent.suspended_by_failure:
                await parent.run.record(first, sync=False)
        status = await self._run_child(operation, workflow, given, run_id)
        ended = runs.child_ended(identity, run_id, workflow.name, status)
        outcomes = parent.run.state.outcomes
        with parent.suspended_by_failure:
            try:
                await parent.run.record(ended, sync=False)
            except asyncio.CancelledError:
                await operation.end_cancelled(outcomes[identity])
                raise
        return await self._child_outcome(operation, outcomes[identity])

    async def _run_child(
        self,
        operation: Operation,
        workflow: WorkflowFunction[..., Any],
        given: Input,
        run_id: str,
    ) -> str:
        """Execute a child, and return how it ended; it is cancelled with the call of it."""
        parent = operation.run
        child = self._start_child(parent, workflow, given, run_id)
        try:
            await asyncio.wait({child})
        except asyncio.CancelledError:
            await self._cancel_child(operation, workflow.name, run_id, child)
            raise
        return self._status_of(parent, child)

    def _start_child(
        self, parent: ActiveRun, workflow: WorkflowFunction[..., Any], given: Input, run_id: str
    ) -> asyncio.Task[Any]:
        child = asyncio.ensure_future(self.run(workflow, given, run_id, parent))
        child.add_done_callback(retrieve)  # a parent that is stopping does not ask how it ended
        return child

    def _is_gone(self, parent: ActiveRun, ended: Entry) -> bool:
        """Return whether the run of a child that ended was purged, or is in a copy alone.

        Then it is executed again, or resumed from the copy. Not if its parent is a copy itself, as
        an imported run: what its children did was done elsewhere, and must not be done twice.
        """
        run_id = _child_of(ended)
        if ended.sha256 is not None or self._store.run(run_id) is not None:
            return False
        if not parent.run.state.restored_seq or (self._folders.state / "runs" / run_id).exists():
            return True
        raise parent.suspended(
            ConfigurationError(
                f"run {parent.run_id!r} was imported or restored from a copy, and the run of its"
                f" child {run_id!r}, which had ended, is not in this folder: import that run too"
                f" (`maestro import`); or have it executed again, by `maestro fork {parent.run_id}`"
            )
        )

    def _refuse_left_over(self, parent: ActiveRun, run_id: str) -> None:
        """Suspend a parent whose new child has a run already: of a parent of its id that is gone."""
        found = self._store.run(run_id)
        if found is not None and found.id < parent.run.lease.run:
            raise parent.suspended(
                ConfigurationError(
                    f"run {run_id!r} is older than run {parent.run_id!r}, which starts it as its"
                    " child: it was left by another run of that id, and its results are not of this"
                    f" one. Delete it by `maestro purge {run_id}`, and start this one again"
                )
            )

    def _status_of(self, parent: ActiveRun, child: asyncio.Future[Any]) -> str:
        """Return how a child ended; one that did not end suspends its parent."""
        error = asyncio.CancelledError() if child.cancelled() else child.exception()
        match error:
            case None:
                return runs.SUCCESS
            case RunFailedError():
                return runs.FAILED
            case RunCancelledError():
                return runs.CANCELLED
            case Exception():
                raise parent.suspended(error) from error
            case _:
                parent.stop()
                raise error

    async def _child_outcome(self, operation: Operation, ended: Entry) -> Any:
        """Return or raise how a child ended, as it is recorded, when it is the turn of that."""
        operation.reserve(ended)
        run_id = _child_of(ended)
        with operation.run.suspended_by_failure:  # as by a class that is not imported here
            last = ended if ended.sha256 is not None else self._end_of(run_id)
            outcome = runs.outcome_of(run_id, last, self._store.load)
        await operation.turn(ended, last.sha256 or last.facts)
        return outcome()

    def _end_of(self, run_id: str) -> Entry:
        """Return the last entry of a child that has ended."""
        state = runs.ended_state(self._store, run_id)
        if state is None or state.ended is None:
            raise RunInactiveError(run_id)
        return state.ended

    async def _cancel_child(
        self, operation: Operation, workflow: str, run_id: str, child: asyncio.Future[Any]
    ) -> None:
        """Cancel a child with the call of it, and record that when it has ended."""
        parent, outcomes = operation.run, operation.run.run.state.outcomes
        for _ in range(_CANCELLATIONS):
            if parent.is_stopping:
                child.cancel()
            else:
                self._cancel_run(parent, run_id)
            try:
                await asyncio.wait({child})
            except asyncio.CancelledError:
                continue
            break
        if parent.is_stopping:
            return
        identity, status = operation.identity, self._status_of(parent, child)
        ended = runs.child_ended(identity, run_id, workflow, status, cancelled=True)
        await operation.record_cancelled(ended, partial(outcomes.get, identity))

    async def _cancel_known_child(
        self, operation: Operation, workflow: WorkflowFunction[..., Any], given: Input
    ) -> None:
        """Let a child clean up that an earlier life started, and whose call is cancelled in this one."""
        parent = operation.run
        known = parent.run.state.children.get(operation.identity)
        if known is None or parent.is_stopping:
            return
        run_id = _child_of(known)
        child = self._start_child(parent, workflow, given, run_id)
        await self._cancel_child(operation, workflow.name, run_id, child)

    def _cancel_run(self, parent: ActiveRun, run_id: str) -> None:
        reason = f"run {parent.run_id!r} cancelled it"
        here = [each for each in parent.children if each.run_id == run_id]
        for each in here:
            each.cancel(reason)
        if not here:  # it is being opened, or executed elsewhere
            Inbox(self._store).cancel(run_id, reason)

    def _watcher(self) -> InboxWatcher:
        loop = asyncio.get_running_loop()
        found = self._watchers.get(loop)
        if found is None:
            self._watchers = {loop: each for loop, each in self._watchers.items() if each.runs}
            found = self._watchers[loop] = watcher_for(self._store, deliver)
        return found


def _plain_opening(parent: ActiveRun | None) -> Opening:
    return Opening(parent=None if parent is None else parent.run_id)


def _child_of(entry: Entry) -> str:
    """Return the run id of the child whose start or end this is."""
    return str(facts_of(entry)["run_id"])


async def _record_suspension(active: ActiveRun, error: Exception) -> None:
    """Record why a run is suspended, for people; not if its journal is the reason."""
    if not isinstance(error, ExecutionException):
        return
    entry, run = runs.suspended(error), active.run
    with contextlib.suppress(MaestroError):  # the caller gets the error itself
        last = run.store.entries(run.lease.run, after=run.state.seq - 1)
        # It may be tried again and again.
        bankrupt = runs.BANKRUPT if is_bankrupt(error) else None
        if not last or not runs.is_same_suspension(last[-1], entry):
            await run.record(entry, sync=False, status=bankrupt)
        elif bankrupt is not None:
            run.append((), bankrupt, sync=False)


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
        write = None
        if run.users == 1 and config.auto_checkpoint_interval_seconds:
            state = run.state.without_steps()
            write = partial(copy_finished, config, run.store, run.run_id, run.fence, state)
        run.close(released=self.released)
        if write is not None:  # not before: of a run that is leased nothing would be written
            copier().request(run.store, run.run_id, write)


async def _as_recorded(given: Input) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a workflow as they are read back: its own, to change as it likes."""
    call = await values.decode(given.encoded.data, "input")
    return tuple(call["args"]), call["kwargs"]


def _was_asked_to_stop() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _refuse_itself(run_id: str) -> None:
    around = active_run_or_none()
    while around is not None:
        if around.run_id == run_id:
            raise ConfigurationError(f"run {run_id!r} runs itself, and would wait for ever")
        around = around.parent


def _close_unused(run: OpenRun | None) -> None:
    if run is not None:
        run.close()
