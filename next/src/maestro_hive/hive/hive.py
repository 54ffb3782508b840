"""``Hive``: a store, the functions that are durable on it, and the runs of this process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import threading
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, cast, overload

from msgspec import Raw

from maestro_hive.engine.attempt import find_current
from maestro_hive.engine.config import ExecutionConfig, get_execution_config
from maestro_hive.engine.options import StepOptions
from maestro_hive.engine.plan import StepDefinition
from maestro_hive.engine.settings import Amount, checked
from maestro_hive.engine.step_stages import StoreStages
from maestro_hive.hive import answers, run_control, schedules, waits
from maestro_hive.hive.answers import Question, Sending
from maestro_hive.hive.commands import failed_error
from maestro_hive.hive.copied_runs import MEMORY, open_place, restore_lost
from maestro_hive.hive.functions import (
    StepFunction,
    WorkflowFunction,
    check_function,
    check_redefined,
    check_same,
    nested_place,
    with_options_of,
)
from maestro_hive.hive.handle import RunHandle, RunInfo, follow_events
from maestro_hive.hive.held_runs import HeldRuns
from maestro_hive.hive.queue import QueueLimits, check_enqueued
from maestro_hive.hive.runs import Runs, check_workflow
from maestro_hive.hive.streams import follow_stream
from maestro_hive.hive.worker import Worker, WorkerOptions
from maestro_hive.hive.workflow_loop import TURNS, WorkflowLoop, install, workflow_loop_here
from maestro_hive.journal import values
from maestro_hive.journal.database import Holder
from maestro_hive.journal.effects import ENDED, Release
from maestro_hive.journal.entries import ChildStarted, RunEnded, RunStarted, value_text
from maestro_hive.journal.recorded_errors import decode_error
from maestro_hive.journal.state import RunState
from maestro_hive.journal.store import DEFAULT_QUEUE, Enqueued, RunFilter, Store, is_address
from maestro_hive.kernel.errors import (
    ConfigurationError,
    MaestroError,
    OutsideRunError,
    RunCancelledError,
    RunFailedError,
    RunLeasedError,
    StoreClosedError,
)
from maestro_hive.kernel.files import check_identifier
from maestro_hive.kernel.signals import until_signal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from maestro_hive.engine.rates import Rate
    from maestro_hive.hive.commands import Workflow
    from maestro_hive.hive.driver import Driver
    from maestro_hive.hive.handle import Event
    from maestro_hive.hive.schedules import CatchUp, Defined, Overlap
    from maestro_hive.hive.streams import StreamChunk
    from maestro_hive.journal.copies import Copies
    from maestro_hive.journal.store import RunRow

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", StepFunction[..., Any], WorkflowFunction[..., Any])

STATUSES = (
    *("pending", "running", "waiting", "stopped", "interrupted"),
    *("success", "failed", "cancelled"),
)
_ALL = 1 << 31

install()


class Hive:
    """Durable steps and workflows over one store; a context manager, sync or async.

    ``store`` is a folder, ``:memory:``, or the URL of a PostgreSQL database; without it, the folder
    of the configuration. ``cancel_grace``: for how many seconds a workflow that is cancelled may
    clean up. Nothing is opened before it is needed. The store is closed by ``close``, or at the end
    of a ``with`` block; one that has failed is opened again when it is used next.
    """

    def __init__(
        self,
        store: str | Path | None = None,
        config: ExecutionConfig | None = None,
        *,
        cancel_grace: float = 60.0,
    ) -> None:
        own = config or get_execution_config()
        place: object = store
        if not own.state.enable_persistence:
            place = MEMORY
        elif isinstance(store, str | Path) and not is_address(store):  # all of it is there
            folder, below = str(store), str(Path(store) / "checkpoints")
            state = dataclasses.replace(own.state, state_dir=folder, checkpoint_dir=below)
            own = dataclasses.replace(own, state=state)
        if not isinstance(place, str | Path | None) or place == "":
            raise ConfigurationError(f"a store is named by a text or a Path, not by {place!r}")
        self.config = own.frozen()
        #: None: the folder of the configuration.
        self._place, self._cancel_grace = place, cancel_grace
        self._opened: Store | None = None
        self._copies: Copies | None = None
        self._is_closed = False
        self._steps: dict[str, StepFunction[..., Any]] = {}
        self._workflows: dict[str, WorkflowFunction[..., Any]] = {}
        self._limits: dict[str, QueueLimits] = {}
        self._schedules: dict[str, Defined] = {}
        self._known_stages: StoreStages | None = None
        self._joined: dict[str, int] = {}
        self._runs_of: dict[asyncio.AbstractEventLoop, Runs] = {}
        self._mutex, self._held = threading.RLock(), HeldRuns()

    # --- definitions ---

    @with_options_of(StepOptions)
    def step(self, function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        """Make a durable step of a function, async or not.

        The options are those of ``StepOptions``; the configuration decides what is not given.
        """

        def make(function: Callable[..., Any]) -> StepFunction[..., Any]:
            check_function("step", function)
            made = StepFunction[..., Any](StepDefinition(function, options, self.config))
            return _added(self._steps, "steps", made.definition.label, made)

        return make if function is None else make(function)

    @overload
    def workflow(self, function: Callable[P, Awaitable[R]], /) -> WorkflowFunction[P, R]: ...
    @overload
    def workflow(
        self, /, *, name: str | None = ...
    ) -> Callable[[Callable[P, Awaitable[R]]], WorkflowFunction[P, R]]: ...
    def workflow(
        self, function: Callable[..., Any] | None = None, /, *, name: str | None = None
    ) -> Any:
        """Make a workflow of an async function; its runs are resumed by its name."""

        def make(function: Callable[..., Any]) -> WorkflowFunction[..., Any]:
            made = WorkflowFunction[..., Any](function, name)
            return _added(self._workflows, "workflows", made.name, made)

        return make if function is None else make(function)

    def queue(
        self,
        name: str,
        *,
        concurrency: int | None = None,
        per_worker: int | None = None,
        rate: Rate | str | None = None,
    ) -> None:
        """Limit a queue: how many of its runs execute at once, over all workers and in each.

        ``rate`` is how many start in a time, such as ``30/s``. Give all processes the same limits:
        they are for what workers take, and neither for ``run`` nor for ``start``.
        """
        made = QueueLimits(name=name, concurrency=concurrency, per_worker=per_worker, rate=rate)
        if self._limits.setdefault(name, made) != made:
            raise ConfigurationError(f"the queue {name!r} has other limits already")

    def schedule(
        self,
        expression: str,
        *,
        tz: str = "UTC",
        catch_up: CatchUp = "latest",
        overlap: Overlap = "skip",
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        tick: str | None = None,
        name: str | None = None,
        queue: str = DEFAULT_QUEUE,
    ) -> Callable[[R], R]:
        """Run a workflow at the times of a cron expression: above ``@hive.workflow``.

        Workers do it; each tick is one run with an id of its own, however many workers there are.
        ``tick`` names the parameter that gets the time of the tick, in UTC. ``catch_up``: of the
        ticks that no worker has seen, the last one gets a run (``latest``), each (``all``), or
        ``none``. ``overlap``: while a run of it is unfinished, a tick has no run (``skip``), a run
        when the one before it has ended (``queue``), or a run at once (``allow``).
        """

        def add(workflow: R) -> R:
            given = self._schedules, workflow, expression, name, args, kwargs or {}
            schedules.define(
                *given, tz=tz, catch_up=catch_up, overlap=overlap, tick=tick, queue=queue
            )
            return workflow

        return add

    # --- execution ---

    async def run(
        self,
        workflow: Callable[..., Awaitable[R]],
        /,
        *args: Any,
        run_id: str | None = None,
        **kwargs: Any,
    ) -> R:
        """Run a workflow and return its result; the same ``run_id`` resumes it.

        Finished, it returns the recorded result; failed, it raises the recorded failure until
        ``retry``. Signals are left to the program. To cancel this call stops the run politely, and
        the same ``run_id`` resumes it.
        """
        runs = self._runs()
        result: R = await self._join(runs, *self._call(workflow, args, kwargs, run_id))
        return result

    async def resume(self, run_id: str) -> Any:
        """Resume a run as it was started: its workflow and arguments are in the journal."""
        store = self._open()
        restore_lost(store, self._copies, run_id)
        workflow = self._known_workflow(store.find(run_id))
        return await self._join(self._runs(), workflow, None, run_id)

    def run_sync(
        self,
        workflow: Callable[..., Awaitable[R]],
        /,
        *args: Any,
        run_id: str | None = None,
        **kwargs: Any,
    ) -> R:
        """Run a workflow from a program without an event loop.

        The first Ctrl+C, SIGTERM or SIGHUP stops it politely, and the process ends as it would
        have. A second one ends it at once.
        """
        known, data, name = self._call(workflow, args, kwargs, run_id)
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            raise ConfigurationError(
                "run_sync cannot be called inside an event loop: write"
                f" `await hive.run({known.name}, …)`"
            )
        message = f"run {name!r} was stopped; it resumes when it is started again"

        async def main() -> R:
            result: R = await until_signal(self._join(self._runs(), known, data, name), message)
            return result

        try:
            return asyncio.run(main())
        except (RunFailedError, RunCancelledError, KeyboardInterrupt) as error:
            raise error.with_traceback(None) from error.__cause__  # without lines of ours

    async def start(
        self,
        workflow: Callable[..., Awaitable[R]],
        /,
        *args: Any,
        run_id: str | None = None,
        queue: str = DEFAULT_QUEUE,
        **kwargs: Any,
    ) -> RunHandle[R]:
        """Start a run on this event loop, and return its handle when it is recorded, durably.

        It survives this process: a worker continues it, from ``queue``, if it does not end here.
        The same ``run_id`` is the same run. The limits of the queue are for what workers take.
        """
        runs = self._runs()
        known, data, name = self._call(workflow, args, kwargs, run_id)
        check_identifier(queue, "queue")
        try:
            await runs.open(known, data, name, queue=queue)
        except RunLeasedError:  # another process executes it
            self._check_started(name, known.name, data, known)
            if self._open().find(name).queue is None:
                raise
        return self._handle(name)

    def enqueue(
        self,
        workflow: Callable[..., Awaitable[R]] | str,
        /,
        *args: Any,
        run_id: str | None = None,
        queue: str = DEFAULT_QUEUE,
        priority: int = 0,
        delay: float = 0.0,
        version: str | None = None,
        **kwargs: Any,
    ) -> RunHandle[R]:
        """Record a run for workers, and return its handle when that is durable.

        ``workflow`` may be a name: its code is needed where a worker executes it, and its arguments
        are best given by name then. The same ``run_id`` is the same run. It waits for ``delay``
        seconds at least; a ``priority`` higher by 1 is worth a minute of waiting. ``version``:
        workers of that version alone execute it. In a workflow it is enqueued once per run.
        """
        check_enqueued(queue, priority, delay, version)
        name = workflow if isinstance(workflow, str) else self._checked(workflow).name
        known = self._workflows.get(check_identifier(name, "workflow"))
        if known is None:
            data = values.encode_call(args, kwargs).text()
        else:
            data = known.encode(args, kwargs)
        loop = workflow_loop_here()
        driver, identity = cast("Driver", loop.host) if loop else None, ""
        if driver is None:
            own = self._new_id(run_id, name, data)
        else:
            identity = driver.loop.place(f"enqueue/{name}:{values.short_digest(data)}")
            if (recorded := driver.journal.state.children.get(identity)) is not None:
                return self._handle(recorded.run_id)
            made = _id_at(name, driver.run_id, identity) if run_id is None else run_id
            own = check_identifier(made, "run id")
            if driver.is_stopping:  # or this is the clean-up of a process that ends
                return self._handle(own)
        first = RunStarted(workflow=name, input=Raw(data), turns=TURNS)
        run = Enqueued(own, first, queue, priority=priority, version=version)
        self._enqueue(run, delay, known)
        if driver is not None:
            started = ChildStarted(identity=identity, run_id=own, workflow=name, is_enqueued=True)
            driver.journal.record_soon(started)
        return self._handle(own)

    async def aenqueue(
        self, workflow: Callable[..., Awaitable[R]] | str, /, *args: Any, **options: Any
    ) -> RunHandle[R]:
        """Do as ``enqueue``, without blocking the event loop."""
        if workflow_loop_here() is not None:
            return self.enqueue(workflow, *args, **options)
        return await asyncio.to_thread(self.enqueue, workflow, *args, **options)

    def _enqueue(self, run: Enqueued, delay: float, known: Workflow | None) -> None:
        """Record a run for workers; one that its caller has left becomes one."""
        store = self._open()
        run = run._replace(due=store.now() + delay if delay > 0 else 0.0)
        restore_lost(store, self._copies, run.name)
        (is_new,) = store.enqueue(run)
        if is_new:
            return
        self._check_started(run.name, run.first.workflow, value_text(run.first.input), known)
        row = store.find(run.name)
        if row.queue is None and row.status not in ENDED and not store.accept(run):
            holder = Holder.of(row.holder).description if row.holder else "another process"
            raise RunLeasedError(run.name, f"{holder} for its caller")

    def _check_started(self, run_id: str, name: str, data: bytes, known: Workflow | None) -> None:
        """Raise if a run was started with another workflow, or other arguments."""
        check_workflow(run_id, self._open().find(run_id).workflow, name)
        check_same(run_id, self._input(run_id), data, known)

    def worker(
        self, queues: Sequence[str] | None = None, concurrency: int = 50, **options: Any
    ) -> Worker:
        """Return a worker, for ``async with``: while the block runs, it executes runs of queues.

        It takes runs of these queues, or of all, at most ``concurrency`` at once. ``adopt``: also
        those that were stopped politely. At the end it waits for ``grace`` seconds, and leaves the
        rest to other workers. A run that only waits is released from memory after
        ``release_after`` seconds, and taken again when it is due.
        """
        made = WorkerOptions(queues=queues, concurrency=concurrency, **options)
        return Worker(self._runs, self._workflows, self._limits, self._schedules, made)

    @asynccontextmanager
    async def lifespan(self, _app: object = None) -> AsyncIterator[None]:
        """Work for the life of an ASGI application: ``FastAPI(lifespan=hive.lifespan)``."""
        async with self.worker():
            yield

    # --- in a workflow; asyncio's own sleep and timeout are durable there ---

    sleep = staticmethod(waits.sleep)
    timeout = staticmethod(asyncio.timeout)
    wait_for = staticmethod(waits.wait_for)
    now = staticmethod(waits.now)
    random = staticmethod(waits.draw)
    uuid = staticmethod(waits.make_uuid)
    outside = staticmethod(waits.outside)

    # --- from any process ---

    def handle(self, run_id: str) -> RunHandle[Any]:
        """Return a handle of a run, wherever it is executed."""
        if workflow_loop_here() is None:
            self._open().find(run_id)
        return self._handle(run_id)

    def _handle(self, run_id: str) -> RunHandle[Any]:
        return RunHandle(self._open, self._runs, self._result, run_id)

    def runs(
        self,
        status: str | None = None,
        workflow: str | None = None,
        limit: int | None = None,
        *,
        roots: bool = False,
    ) -> list[RunInfo]:
        """List runs, newest first: all, or with ``roots`` only those that no run called."""
        if status is not None and status not in STATUSES:
            raise ConfigurationError(f"status={status!r} must be one of {', '.join(STATUSES)}")
        most = checked(Amount, _ALL if limit is None else limit, "limit")
        found = self._open().runs(RunFilter(status, workflow, roots), most)
        return [RunInfo.of(row) for row in found]

    def events(self, run_id: str, *, after: int = 0, follow: bool = True) -> AsyncIterator[Event]:
        """Yield what happens in a run, from its beginning or after an entry's number.

        Without ``follow`` it ends with what there is; else when the run has ended, or no process
        executes it.
        """
        return follow_events(self._open(), run_id, after=after, follow=follow)

    def stream(
        self, run_id: str, step: str | int | None = None, *, after: int = 0, follow: bool = True
    ) -> AsyncIterator[StreamChunk]:
        """Yield what the steps of a run, or one of them, write by ``current().write``; live.

        From the beginning or after a chunk's ``seq``, in order, wherever the run is executed. At
        ``restarted`` a new attempt starts: drop what you have of that step. It ends when the step,
        or the run, has its outcome. If no process executes the run, ``RunInactiveError``: continue
        after the last ``seq`` when one does. Without ``follow`` it ends with what there is.
        """
        return follow_stream(self._open(), run_id, step, after=after, follow=follow)

    def state(self, run_id: str) -> RunState:
        """Return the state of a run, folded from its entries."""
        state = RunState()
        state.add(self._entries(run_id))
        return state

    def questions(self, run_id: str) -> list[Question]:
        """Return the questions that a run waits for, with what they are about."""
        return answers.questions(self._open(), run_id)

    def answer(
        self,
        run_id: str,
        name: str,
        value: Any = None,
        *,
        by: str = "",
        early: bool = False,
        question: str | None = None,
    ) -> None:
        """Answer a question of a run, from any process; durable on return.

        Each question takes one answer: of several senders all but one get
        ``AlreadyAnsweredError``. With ``early`` it may also be the next question of this name,
        which is yet to be asked. ``question`` is the id of one of several with this name.
        """
        sending = Sending(name=name, value=value, by=by, early=early, question=question)
        answers.answer(self._open(), run_id, sending)

    def cancel(self, run_id: str, reason: str = "") -> bool:
        """Cancel a run and its children, wherever they are executed; False if it has ended."""
        return run_control.cancel(self._open(), run_id, reason)

    def retry(self, run_id: str, step: str | int | None = None) -> None:
        """Request a retry of what failed; workers, ``run`` or ``resume`` then execute it."""
        run_control.retry(self._open(), run_id, step)

    def fork(
        self,
        run_id: str,
        *,
        from_step: str | int | None = None,
        new_run_id: str | None = None,
        **changed_inputs: Any,
    ) -> str:
        """Record a new run with what another has completed; return its id, for ``resume``.

        ``from_step`` (a name, ``name#2``, or a number) is executed again. Steps before it stay
        completed, and those after it run again exactly when their input changes.
        ``changed_inputs`` replace arguments of the workflow.
        """
        given: Raw | None = None
        if changed_inputs:
            workflow = self._known_workflow(self._open().find(run_id))
            given = Raw(workflow.encode_changed(self._input(run_id), changed_inputs))
        return run_control.fork(self._open(), run_id, given, from_step=from_step, new_id=new_run_id)

    def close(self) -> None:
        """Close the store; twice is no error. Raises the error of a JSON copy not written.

        A thread of a step that still runs has the store open until it ends.
        """
        with self._mutex:
            self._is_closed = True
            self._close_store()

    def _close_store(self) -> None:
        opened, self._opened = self._opened, None
        copies, self._copies = self._copies, None
        try:
            if copies is not None:
                copies.close()
        finally:
            if opened is not None:
                self._held.close_after(opened.db.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if (runs := self._runs_of.pop(asyncio.get_running_loop(), None)) is not None:
            await runs.stop()
        self.close()

    # --- inside ---

    def _open(self) -> Store:
        with self._mutex:
            if self._is_closed:
                raise StoreClosedError("this Hive was closed; make a new one")
            is_file = self._place != MEMORY  # or all of it would be lost
            if self._opened is not None and self._opened.db.is_refusing and is_file:
                with contextlib.suppress(MaestroError, OSError):
                    self._close_store()
                self._known_stages = None
            if self._opened is None:
                self._opened, self._copies = open_place(self._place, self.config.state)
            return self._opened

    def _entries(self, run_id: str) -> list[Any]:
        store = self._open()
        return store.entries(store.find(run_id).number)

    def _input(self, run_id: str) -> bytes:
        """Return the recorded arguments of a run."""
        started = self._entries(run_id)[0]
        assert isinstance(started, RunStarted)
        return self._open().text(run_id, started.input)

    def _call(
        self, workflow: object, args: tuple[Any, ...], kwargs: dict[str, Any], run_id: str | None
    ) -> tuple[WorkflowFunction[..., Any], bytes, str]:
        """Return a workflow, the encoded arguments of a call, and the id of its run."""
        known = self._checked(workflow)
        data = known.encode(args, kwargs)
        return known, data, self._new_id(run_id, known.name, data)

    def _new_id(self, run_id: str | None, workflow: str, data: bytes) -> str:
        """Return the id of a run: in a step, each attempt makes the same."""
        if run_id is not None:
            return check_identifier(run_id, "run id")
        attempt = find_current()
        if attempt is None:
            return secrets.token_hex(8)
        place = nested_place(attempt, f"{workflow}:{values.short_digest(data)}")
        return _id_at(workflow, attempt.plan.run_id, place)

    def _checked(self, workflow: object) -> WorkflowFunction[..., Any]:
        """Return a workflow, which may be one of another hive; raise if it is none."""
        if not isinstance(workflow, WorkflowFunction):
            shown = getattr(workflow, "__name__", repr(workflow))
            raise ConfigurationError(f"{shown} is not a workflow: define it with @hive.workflow")
        known = self._workflows.setdefault(workflow.name, workflow)
        check_redefined("workflows", workflow.name, known.function, workflow.function)
        return workflow

    def _known_workflow(self, row: RunRow) -> WorkflowFunction[..., Any]:
        found = self._workflows.get(row.workflow)
        if found is None:
            known = ", ".join(self._workflows) or "none"
            raise ConfigurationError(
                f"run {row.run_id!r} needs the workflow {row.workflow!r}, which this Hive does not"
                f" have; it has: {known}"
            )
        return found

    def _runs(self) -> Runs:
        """Return the runs on the loop that is running."""
        loop = asyncio.get_running_loop()
        if isinstance(loop, WorkflowLoop):
            raise OutsideRunError(
                "a workflow runs another one by calling it, `await other(…)`, which is a child, or"
                " by hive.enqueue"
            )
        store, found = self._open(), self._runs_of.get(loop)
        if found is not None and found.store is store:
            return found
        for other in [each for each in list(self._runs_of) if each.is_closed()]:
            self._runs_of.pop(other).abandon()
        if self._known_stages is None:
            self._known_stages = StoreStages(store)
        stages, level = self._known_stages, self.config.log_level
        made = Runs(store, loop, stages, self._cancel_grace, self._held, level, self._copies)
        self._runs_of[loop] = made
        return made

    async def _join(
        self, runs: Runs, workflow: WorkflowFunction[..., Any], data: bytes | None, run_id: str
    ) -> Any:
        """Run a workflow, or join it; the last caller that is cancelled stops it."""
        self._joined[run_id] = self._joined.get(run_id, 0) + 1
        try:
            while True:
                opened = await runs.open(workflow, data, run_id)
                if isinstance(opened, RunEnded):
                    return self._result(run_id, opened)
                await asyncio.wait((opened.end,))
                if not opened.end.cancelled():  # or a worker has released it
                    return self._result(run_id, opened.end.result())
        except asyncio.CancelledError:
            driver = runs.active.get(run_id)
            if self._joined[run_id] == 1 and driver is not None and not driver.is_accepted:
                await driver.stop(Release("stopped"))
            raise
        finally:
            self._joined[run_id] -= 1
            if not self._joined[run_id]:
                del self._joined[run_id]

    def _result(self, run_id: str, ended: RunEnded) -> Any:
        match ended.status:
            case "success":
                return values.decode(self._open().text(run_id, ended.result))
            case "cancelled":
                raise RunCancelledError(run_id, ended.reason)
            case _:
                cause = decode_error(self._open().text(run_id, ended.error))
                raise failed_error(run_id, cause) from cause


def _id_at(workflow: str, run_id: str, place: str) -> str:
    """Return the id of a run that another one starts at a place: the same in each life."""
    digest = values.short_digest(f"{run_id} {place}".encode())
    return f"{workflow[:100]}-{digest}"


def _added(known: dict[str, F], what: str, name: str, made: F) -> F:
    """Add a step or a workflow; one that is defined again replaces the first."""
    check_redefined(what, name, known.get(name, made).function, made.function)
    known[name] = made
    return made
