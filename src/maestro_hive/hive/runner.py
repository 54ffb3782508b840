"""Executes runs: opens them, lets their workflows go on, and records how they end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NoReturn

from maestro_hive.engine.errors import CircuitBreakerOpen, parts_of
from maestro_hive.engine.tracebacks import with_own_lines
from maestro_hive.hive import active_runs as under_way
from maestro_hive.hive import runs as entries
from maestro_hive.hive.active_run import ActiveRun, active_run_or_none
from maestro_hive.hive.errors import (
    RunCancelledError,
    RunFailedError,
    RunInactiveError,
    RunMismatchError,
)
from maestro_hive.hive.inbox import Inbox
from maestro_hive.hive.runs import ended_state, outcome
from maestro_hive.hive.watch import InboxWatcher
from maestro_hive.kernel.errors import (
    ConfigurationError,
    CorruptionError,
    FencedError,
    FolderError,
    NewerFormatError,
    RunLeasedError,
    StorageError,
)
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.projections import facts_of
from maestro_hive.unified_execution.state_persistence import StatePersistence
from maestro_hive.unified_execution.steps import error_facts

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from concurrent.futures import Future

    from maestro_hive.hive.active_run import Staff, Workflow
    from maestro_hive.hive.runs import Input
    from maestro_hive.maestro.state.projections import RunState
    from maestro_hive.maestro.state.records import Entry
    from maestro_hive.maestro.state.store import Store

#: How often a run that somebody else here gave up in the middle is gone on with.
_TAKE_OVERS = 100
#: How many more times a task may be cancelled while its run is let go.
_CANCELLATIONS = 100

#: What says nothing about the workflow: the run is left as it is, and goes on at its next start.
_NO_END = (
    CircuitBreakerOpen,
    CorruptionError,
    FencedError,
    FolderError,
    NewerFormatError,
    RunLeasedError,
    StorageError,
)


class Runner:
    """Executes the runs of one hive."""

    def __init__(self, staff: Staff, store: Store) -> None:
        self._staff = staff
        self._store = store
        self._watchers: dict[asyncio.AbstractEventLoop, InboxWatcher] = {}

    async def run(
        self,
        workflow: Workflow,
        given: Input,
        run_id: str,
        parent: ActiveRun | None = None,
    ) -> Any:
        """Return the result of a run, from wherever it stands; what is kept of it without holding.

        Whoever asks for a run that this process executes already waits for that one, and goes on
        with it if the other gives up.
        """
        for _ in range(_TAKE_OVERS):
            over = ended_state(self._store, run_id)
            if over is not None and over.ended is not None:
                return self._kept(run_id, over, given)
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
        workflow: Workflow,
        given: Input,
        run_id: str,
        parent: ActiveRun | None = None,
    ) -> asyncio.Task[Any] | Future[Any]:
        """Begin to execute a run; if this process does so already, return what it will give."""
        _refuse_itself(run_id)
        found, is_mine = under_way.enter(self._store, run_id, given)
        if not is_mine:
            _check_equal(run_id, found.given, given)
            return found.done
        # A task of its own: cancelling the run must not cancel its caller.
        work = self._execute(workflow, given, run_id, parent)
        task = asyncio.create_task(work, name=f"run {run_id}")
        task.add_done_callback(lambda done: under_way.leave(self._store, run_id, found, done))
        return task

    def _kept(self, run_id: str, over: RunState, given: Input) -> Any:
        assert over.ended is not None
        if over.started is not None:
            _check_same(run_id, over.started, given, self._store)
        # If whoever ended it could not do so.
        Inbox(self._store).settle(run_id, str(facts_of(over.ended).get("status")))
        return outcome(run_id, over.ended, self._store.load)

    async def _execute(
        self,
        workflow: Workflow,
        given: Input,
        run_id: str,
        parent: ActiveRun | None,
    ) -> Any:
        state = await self._opened(run_id, workflow.name)
        try:
            live = ActiveRun(self._staff, state, parent)
            try:
                return await self._go_on(live, workflow, given)
            finally:
                live.close()
        finally:
            await _in_any_case(asyncio.to_thread(state.shutdown))

    async def _opened(self, run_id: str, workflow: str) -> StatePersistence:
        """Open a run in a thread; if nobody waits for it any more, it is let go again."""
        make = lambda: StatePersistence(self._staff.config, run_id, workflow=workflow)  # noqa: E731
        opening = asyncio.ensure_future(asyncio.to_thread(make))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_let_go)
            raise

    async def _go_on(self, live: ActiveRun, workflow: Workflow, given: Input) -> Any:
        state, store = live.held.state, self._store
        if state.started is not None:
            _check_same(live.run_id, state.started, given, store)
        if state.ended is not None:  # also before it began
            return outcome(live.run_id, state.ended, store.load)
        if state.started is None:
            parent = live.parent.run_id if live.parent is not None else None
            await live.record(entries.started(given, parent=parent))
        watch = self._watch()
        live.cancelled_because = watch.mail.messages(live.run_id).cancel
        family = live.parent.children if live.parent is not None else set()
        family.add(live)
        watch.add(live)
        try:
            return await self._drive(live, workflow, given)
        finally:
            watch.remove(live)
            family.discard(live)

    async def _drive(self, live: ActiveRun, workflow: Workflow, given: Input) -> Any:
        """Let the workflow go on to its end, and record it."""
        try:
            result = await live.drive(lambda: workflow.function(*given.args, **given.kwargs))
            live.check_going()
            value = codec.encode(result, f"the result of run {live.run_id}")
        except asyncio.CancelledError as error:
            self._end_if_cancelled(live)
            if _was_asked_to_stop():
                raise
            await self._fail(live, error)
        except Exception as error:  # noqa: BLE001 - whatever the workflow raised
            self._end_if_cancelled(live)
            if any(isinstance(part, _NO_END) for part in parts_of(error)):
                raise with_own_lines(error)  # noqa: B904 - the same error
            await self._fail(live, error)
        await self._end(live, entries.ended(entries.SUCCESS, value=value), entries.SUCCESS)
        return result

    async def _fail(self, live: ActiveRun, error: BaseException) -> NoReturn:
        facts = error_facts(with_own_lines(error))
        if isinstance(error, asyncio.CancelledError):
            facts["message"] = "the workflow waited for something that was cancelled"
        await self._end(live, entries.ended(entries.FAILED, error=facts), entries.FAILED)
        raise RunFailedError(live.run_id, facts) from error

    async def _end(self, live: ActiveRun, ended: Any, status: str) -> None:
        await live.held.record(ended, sync=True, status=status)
        self._watch().mail.settle(live.run_id, status)

    def _end_if_cancelled(self, live: ActiveRun) -> None:
        """Record that the run was cancelled, and say so; at once: it may be cancelled once more."""
        reason = live.cancelled_because
        if reason is None:
            return
        live.held.append([entries.ended(entries.CANCELLED, reason=reason)], entries.CANCELLED)
        self._watch().mail.settle(live.run_id, entries.CANCELLED)
        raise RunCancelledError(live.run_id, reason) from None

    def _watch(self) -> InboxWatcher:
        loop = asyncio.get_running_loop()
        found = self._watchers.get(loop)
        if found is None:
            self._watchers = {loop: each for loop, each in self._watchers.items() if each.runs}
            found = self._watchers[loop] = InboxWatcher(self._store)
        return found


def _check_same(run_id: str, begun: Entry, given: Input, store: Store) -> None:
    """Raise if a run was begun by another workflow, or with other arguments."""
    if begun.identity != given.identity:
        _check_equal(run_id, entries.read_input(begun, store.load), given)


def _check_equal(run_id: str, kept: Input, given: Input) -> None:
    if kept.workflow != given.workflow:
        raise RunMismatchError(
            f"run {run_id!r} belongs to the workflow {kept.workflow!r}, not to {given.workflow!r};"
            " give this one another run_id"
        )
    if kept.identity != given.identity:
        before, now = (_short(each.encoded.data.decode()) for each in (kept, given))
        raise RunMismatchError(
            f"run {run_id!r} was begun with other arguments: {before}, and now it is given {now};"
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


async def _in_any_case(work: Coroutine[Any, Any, None]) -> None:
    """Await something short to its end, however often this task is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    for _ in range(_CANCELLATIONS):
        try:
            await asyncio.shield(task)
            break
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def _let_go(opening: asyncio.Future[StatePersistence]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().shutdown()
