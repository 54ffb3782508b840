"""What a hive does for runs without a caller: starting and enqueuing them, queues and workers.

It imports what does the work when it is needed, as ``Hive`` does.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from maestro_hive.hive.definitions import DEFAULT_QUEUE, Definitions
from maestro_hive.kernel.errors import ConfigurationError, RunLeasedError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from maestro_hive.engine.options import Amount
    from maestro_hive.engine.rates import Rate
    from maestro_hive.hive.accepting import Order
    from maestro_hive.hive.active_run import ActiveRun
    from maestro_hive.hive.functions import WorkflowFunction
    from maestro_hive.hive.handle import RunHandle
    from maestro_hive.hive.hive import Hive
    from maestro_hive.hive.queues import QueueSettings
    from maestro_hive.hive.runner import Runner
    from maestro_hive.hive.runs import Input
    from maestro_hive.hive.worker import Worker
    from maestro_hive.maestro.state.records import NewDispatch
    from maestro_hive.maestro.state.store import RunLease, Store

R = TypeVar("R")


def own_budget(
    parameters: tuple[str, ...], budget: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return the budget of a run, and the arguments of its workflow: one may be called ``budget``."""
    if budget is not None and "budget" in parameters:
        return None, {**kwargs, "budget": budget}
    return budget, kwargs


class Enqueuing(Definitions):
    """What a hive does for runs that no caller waits for."""

    def __init__(self) -> None:
        super().__init__()
        self._queues: dict[str, QueueSettings] = {}

    if TYPE_CHECKING:  # what the hive has

        def _open(self) -> Store: ...
        @property
        def _runs(self) -> Runner: ...
        def _check_disabled(self) -> None: ...
        def _name(self, workflow: WorkflowFunction[..., Any], run_id: str | None) -> str: ...
        def _input(
            self,
            workflow: WorkflowFunction[..., Any],
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
        ) -> Input: ...
        def _as_started(self, run_id: str) -> tuple[WorkflowFunction[..., Any], Input]: ...
        def _bound(self, run_id: str, given: Input) -> tuple[WorkflowFunction[..., Any], Input]: ...

    async def start(
        self,
        workflow: Callable[..., Awaitable[R]],
        /,
        *args: Any,
        run_id: str | None = None,
        queue: str = DEFAULT_QUEUE,
        budget: Amount | None = None,
        **kwargs: Any,
    ) -> RunHandle[R]:
        """Start a run on this event loop, and return its handle when it is recorded, durably.

        From then on it goes on whatever happens to this process: a worker takes it, from ``queue``,
        if it does not end here. The same ``run_id`` is the same run. It starts at once: the
        concurrency and the rate of the queue are for what workers take from it. What has to keep
        them, or may have to wait for its turn, is for ``enqueue``. ``budget`` is what it may spend.
        """
        import asyncio

        from maestro_hive.engine import values
        from maestro_hive.engine.open_run import Opening
        from maestro_hive.hive import accepting, runs
        from maestro_hive.hive.dispatching import give_to_workers
        from maestro_hive.hive.handle import RunHandle
        from maestro_hive.hive.runner import HowStarted

        made = self._known(workflow)
        budget, kwargs = own_budget(made.parameters, budget, kwargs)
        given = self._input(made, args, kwargs)
        name = self._name(made, run_id)
        self._set_budget(name, budget)
        dispatch = accepting.new_dispatch(queue)
        handle: RunHandle[R] = RunHandle(self._open, name)
        runner = self._runs
        if runs.ended_state(self._open(), name) is not None:
            # The result or the failure is given when it is asked for.
            handle.keep(asyncio.ensure_future(runner.run(made, given, name)))
            return handle
        recorded = asyncio.get_running_loop().create_future()
        how = HowStarted(Opening(dispatch=dispatch), recorded)
        started = runner.start(made, given, name, how=how)
        if not isinstance(started, asyncio.Task):  # it is executed here already
            handle.keep(asyncio.wrap_future(started))
            await values.in_thread(partial(give_to_workers, self._open(), name, dispatch))
            return handle
        handle.keep(started)
        try:
            await asyncio.wait({started, recorded}, return_when="FIRST_COMPLETED")
        except asyncio.CancelledError:
            started.cancel()  # it may not be recorded, and nobody has its handle
            raise
        if not recorded.done() and (started.cancelled() or started.exception() is not None):
            return self._started_elsewhere(started, name)
        return handle

    def _started_elsewhere(self, started: asyncio.Task[Any], name: str) -> RunHandle[Any]:
        """Return the handle of a run that another process executes, for workers; or raise why not."""
        from maestro_hive.hive.dispatching import belongs_to_workers
        from maestro_hive.hive.handle import RunHandle

        try:
            started.result()
        except RunLeasedError:
            if belongs_to_workers(self._open(), name):
                return RunHandle(self._open, name)
            raise
        return RunHandle(self._open, name)

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
        budget: Amount | None = None,
        **kwargs: Any,
    ) -> RunHandle[R]:
        """Record a run for any worker, and return its handle when that is durable: one commit.

        ``workflow`` may be a name: its code is needed where a worker executes it, and not here; its
        arguments are best given by name then. The same ``run_id`` is the same run. It waits for
        ``delay`` seconds at least; a ``priority`` higher by 1 is worth a minute of waiting.
        ``version`` has it executed by workers of that version alone. In a workflow it is enqueued
        once per run, however often that is resumed. ``budget`` is what it may spend with its children.
        """
        from maestro_hive.engine.budget import checked_amount
        from maestro_hive.hive import accepting, runs
        from maestro_hive.hive.branches import active_run_or_none
        from maestro_hive.hive.handle import RunHandle
        from maestro_hive.kernel import files

        dispatch = accepting.new_dispatch(queue, priority, delay, version)
        if budget is not None:
            checked_amount("the budget of the run", budget)
            budget, kwargs = own_budget(self._parameters_of(workflow), budget, kwargs)
        given = self._enqueued_input(workflow, args, kwargs)
        run = active_run_or_none()
        if run is not None:
            name = self._enqueue_once(run, given, dispatch, run_id, budget)
        else:
            name = runs.new_id(given.workflow) if run_id is None else run_id
            files.check_identifier(name, "run id")
            order = accepting.Order(name, given, dispatch, budget=budget)
            accepting.enqueue(self._open(), order)
        return RunHandle(self._open, name)

    async def aenqueue(
        self,
        workflow: Callable[..., Awaitable[R]] | str,
        /,
        *args: Any,
        run_id: str | None = None,
        queue: str = DEFAULT_QUEUE,
        priority: int = 0,
        delay: float = 0.0,
        version: str | None = None,
        budget: Amount | None = None,
        **kwargs: Any,
    ) -> RunHandle[R]:
        """Do as ``enqueue``, without blocking the event loop."""
        from contextvars import copy_context

        from maestro_hive.engine import values
        from maestro_hive.hive.branches import active_run_or_none

        call: Callable[[], RunHandle[R]] = partial(
            self.enqueue,
            workflow,
            *args,
            run_id=run_id,
            queue=queue,
            priority=priority,
            delay=delay,
            version=version,
            budget=budget,
            **kwargs,
        )
        # In a workflow at once: what is not durable must not be waited for.
        if active_run_or_none() is not None:
            return call()
        return await values.in_thread(partial(copy_context().run, call))

    def _set_budget(self, run_id: str, budget: Amount | None) -> None:
        """Set what a run may spend with its children, before it is started."""
        if budget is not None:
            from maestro_hive.hive.budgets import declare, run_budget

            declare(self._open(), run_budget(run_id, budget))

    def _parameters_of(self, workflow: Callable[..., Awaitable[Any]] | str) -> tuple[str, ...]:
        known = (
            self._workflows.get(workflow) if isinstance(workflow, str) else self._known(workflow)
        )
        return () if known is None else known.parameters

    def _enqueued_input(
        self, workflow: Callable[..., Awaitable[Any]] | str, args: tuple[Any, ...], kwargs: Any
    ) -> Input:
        """Return a workflow's input; as it is given, where the code of the workflow is not known."""
        from maestro_hive.hive import runs
        from maestro_hive.kernel import files

        if not isinstance(workflow, str):
            return self._input(self._known(workflow), args, kwargs)
        known = self._workflows.get(files.check_identifier(workflow, "workflow"))
        if known is not None:
            return self._input(known, args, kwargs)
        return runs.make_input(workflow, args, kwargs)

    def _enqueue_once(
        self,
        run: ActiveRun,
        given: Input,
        dispatch: NewDispatch,
        run_id: str | None,
        budget: Amount | None = None,
    ) -> str:
        """Enqueue a run from a workflow, once: its id follows from where that is called."""
        from maestro_hive.hive import runs
        from maestro_hive.hive.accepting import Order
        from maestro_hive.hive.branches import current_branch
        from maestro_hive.kernel import files
        from maestro_hive.maestro.state import codec

        run.check_active()
        branch = current_branch() or run.detached
        identity = branch.place(runs.identity_of("enqueue", given.identity, run_id or ""))
        known = run.run.state.values.get(identity)
        if known is None:
            made_id = runs.child_id(run.run_id, given.workflow, identity)
            name = made_id if run_id is None else run_id
            files.check_identifier(name, "run id")
            # First the run: after a kill in between, it is found by its id.
            self._enqueue_by(run, Order(name, given, dispatch, run.run_id, budget))
            with run.suspended_by_failure:
                made = codec.encode(name, "the run id")
                run.run.append([runs.value_recorded(identity, "enqueue", made)], sync=False)
            known = run.run.state.values[identity]
        branch.note(identity, known.sha256)
        return str(codec.decode(run.run.store.load(known) or b"null", "the run id"))

    def _enqueue_by(self, run: ActiveRun, order: Order) -> None:
        """Enqueue a run; what is wrong with that is the workflow's, and a failed store is not."""
        from maestro_hive.hive.accepting import enqueue

        wrong: ConfigurationError | None = None
        with run.suspended_by_failure:
            try:
                enqueue(self._open(), order)
            except ConfigurationError as error:
                wrong = error
        if wrong is not None:
            raise wrong

    # --- workers ---

    def queue(
        self,
        name: str,
        *,
        concurrency: int | None = None,
        per_worker: int | None = None,
        rate: Rate | str | None = None,
    ) -> None:
        """Limit a queue: so many runs at once over all workers and in each, and so many starts.

        ``rate`` is a text such as ``30/s``. The limits are those of the workers of this hive: give
        them the same everywhere. What nobody limits is limited by the worker's own concurrency.
        A run that ``start`` begins does not pass them, nor count: only what workers take does.
        """
        from maestro_hive.hive.queues import QueueSettings

        made = QueueSettings.checked(name, concurrency, per_worker, rate)
        known = self._queues.setdefault(made.name, made)
        if known != made:
            raise ConfigurationError(f"the queue {name!r} was given other limits before: {known}")

    def worker(
        self,
        queues: list[str] | tuple[str, ...] | None = None,
        concurrency: int = 50,
        *,
        version: str | None = None,
        adopt: bool = False,
        grace: float = 10.0,
        release_after: float = 5.0,
    ) -> Worker:
        """Return a worker, for ``async with``: while the block runs, it executes enqueued runs.

        It takes runs of these queues, or of all, at most ``concurrency`` at once: those that are due,
        and those whose process died. ``adopt`` has it take those, too, that a person stopped. At the
        end of the block it takes nothing more, waits for ``grace`` seconds, and leaves the rest to
        the next worker. A thread cannot be stopped: a run whose step, a plain function, still runs in
        one after that is left when the thread has ended, or with this process. A run that only waits
        is released from memory after ``release_after`` seconds, and taken again when it is due.
        """
        from maestro_hive.hive.worker import Worker, WorkerHost, WorkerSettings

        chosen = WorkerSettings.checked(
            queues=queues,
            concurrency=concurrency,
            version=version,
            adopt=adopt,
            grace=grace,
            release_after=release_after,
        )
        self._check_disabled()
        host = WorkerHost(
            hive=cast("Hive", self),  # of which this is a part
            store=self._open,
            runner=lambda: self._runs,
            claimed=self._claimed,
            workflows=self._workflows,
            queues=self._queues,
        )
        return Worker(host, chosen)

    def _claimed(self, store: Store, lease: RunLease) -> tuple[WorkflowFunction[..., Any], Input]:
        """Return the workflow and the input of a run that a worker has taken."""
        from maestro_hive.hive import runs
        from maestro_hive.maestro.state.records import EntryKind

        (first,) = store.entries(lease.run, up_to=1) or (None,)
        if lease.seq != 1 or first is None or first.kind != EntryKind.RUN_STARTED:
            return self._as_started(lease.name)
        return self._bound(lease.name, runs.read_input(first, store.load))

    @contextlib.asynccontextmanager
    async def _lifespan(self) -> Any:
        async with self.worker():
            yield

    def lifespan(self, _app: object = None) -> AbstractAsyncContextManager[None]:
        """Return a worker for the life of an ASGI application: ``FastAPI(lifespan=hive.lifespan)``.

        It takes runs of all queues, as ``hive.worker()`` does. For other queues, another concurrency
        or another grace, use ``async with hive.worker(…)`` in a lifespan of your own.
        """
        return self._lifespan()
