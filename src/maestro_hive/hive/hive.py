"""Hive: steps, workflows and runs over one state folder."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, overload

from maestro_hive.engine.config import ExecutionConfig, get_execution_config
from maestro_hive.engine.copies import copier
from maestro_hive.engine.failures import with_own_lines
from maestro_hive.hive import control, waits
from maestro_hive.hive.active_run import RunContext, active_run_or_none
from maestro_hive.hive.errors import RunMismatchError, UnknownRunError
from maestro_hive.hive.functions import Definitions
from maestro_hive.hive.handle import RunHandle
from maestro_hive.hive.handle import follow as follow_events
from maestro_hive.hive.runner import Runner
from maestro_hive.hive.runs import (
    child_id,
    child_started,
    ended_state,
    list_runs,
    make_input,
    read_input,
    read_run,
    run_info,
)
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import ConfigurationError, MaestroError, StoreClosedError
from maestro_hive.kernel.signals import stop_politely
from maestro_hive.maestro.state.projections import facts_of
from maestro_hive.maestro.state.stores import close_store, open_store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from maestro_hive.engine.escalation import Escalation
    from maestro_hive.engine.healing import Healer
    from maestro_hive.engine.policy import Enforcer
    from maestro_hive.hive.active_run import ActiveRun
    from maestro_hive.hive.functions import WorkflowFunction
    from maestro_hive.hive.runs import Input, RunInfo
    from maestro_hive.maestro.state.events import RunEvent
    from maestro_hive.maestro.state.store import Store

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Hive(Definitions):
    """Durable steps and workflows over one state folder; a context manager, sync or async.

    ``folder`` has all state, checkpoints included; without it, that of the configuration.
    Nothing is opened before it is needed. The folder is closed by ``close``, at the end of a
    ``with`` block, or with the process.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        config: ExecutionConfig | None = None,
        *,
        healing_engine: Healer | None = None,
        enforcer: Enforcer | None = None,
        escalation: Escalation | None = None,
    ) -> None:
        super().__init__()
        self.config = _config_for(folder, config)
        self._helpers = {"healer": healing_engine, "enforcer": enforcer, "escalation": escalation}
        self._store: Store | None = None
        self._runner: Runner | None = None
        self._is_closed = False
        self._mutex = threading.RLock()

    # --- running ---

    async def run(
        self,
        workflow: Callable[..., Awaitable[R]],
        /,
        *args: Any,
        run_id: str | None = None,
        **kwargs: Any,
    ) -> R:
        """Run a workflow and return its result; the same ``run_id`` resumes it.

        Finished, it returns the recorded result; failed, it raises the recorded failure until ``retry``.
        While it runs, the first Ctrl+C or SIGTERM stops it: the stop is recorded and counts as no
        failure, and the process ends as it would have.
        """
        made = self._known(workflow)
        given = self._input(made, args, kwargs)
        return await self._run(made, given, self._name(made, run_id))

    def run_sync(
        self,
        workflow: Callable[..., Awaitable[R]],
        /,
        *args: Any,
        run_id: str | None = None,
        **kwargs: Any,
    ) -> R:
        """Run a workflow from a program without an event loop."""
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            raise ConfigurationError(
                "run_sync() was called where an event loop is running; use `await hive.run(…)`"
            )
        try:
            return asyncio.run(self.run(workflow, *args, run_id=run_id, **kwargs))
        except (MaestroError, KeyboardInterrupt) as error:
            # Raised here, so that the traceback names run_sync, and nothing of the loop.
            raise with_own_lines(error)  # noqa: B904 - the same error

    def start(
        self,
        workflow: Callable[..., Awaitable[R]],
        /,
        *args: Any,
        run_id: str | None = None,
        **kwargs: Any,
    ) -> RunHandle[R]:
        """Start a run on this event loop, and return its handle."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise ConfigurationError(
                "start() was called where no event loop is running; use run_sync()"
            ) from None
        made = self._known(workflow)
        given = self._input(made, args, kwargs)
        name = self._name(made, run_id)
        handle: RunHandle[R] = RunHandle(self._open, name)
        if ended_state(self._open(), name) is None:
            started = self._runs.start(made, given, name)
            handle.keep(
                started if isinstance(started, asyncio.Task) else asyncio.wrap_future(started)
            )
        else:  # the result or the failure is given when it is asked for
            handle.keep(asyncio.ensure_future(self._runs.run(made, given, name)))
        return handle

    def _name(self, workflow: WorkflowFunction[..., Any], run_id: str | None) -> str:
        if run_id is not None:
            return files.check_identifier(run_id, "run id")
        if active_run_or_none() is not None:
            raise ConfigurationError(
                f"hive.run({workflow.name}, …) inside a workflow needs a run_id, or each start would"
                f" run it again; or await {workflow.name}(…) itself: then it is a child"
            )
        return f"{workflow.name[:100]}-{secrets.token_hex(6)}"

    async def resume(self, run_id: str) -> Any:
        """Resume a run as it was started: its workflow and arguments are in the journal."""
        made, given = self._as_started(run_id)
        return await self._run(made, given, run_id)

    async def _run(self, workflow: WorkflowFunction[..., R], given: Input, run_id: str) -> R:
        stop = stop_politely()
        try:
            async with stop:
                result: R = await self._runs.run(workflow, given, run_id)
                return result
        except asyncio.CancelledError:
            if stop.signal is None:
                raise
        except MaestroError as error:
            with_own_lines(error)
            raise
        if stop.signal.name == "SIGINT":
            raise KeyboardInterrupt(
                f"run {run_id!r} was stopped; it resumes when it is started again"
            )
        raise SystemExit(128 + stop.signal)

    async def _run_child(
        self,
        parent: ActiveRun,
        workflow: WorkflowFunction[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a workflow as a child of another run; equal children are numbered by order."""
        given = make_input(workflow.name, args, kwargs, workflow.parameters)
        identity = parent.numbered("child", given.identity)
        known = parent.run.state.children.get(identity)
        if known is not None:
            run_id = str(facts_of(known)["run_id"])
        else:
            run_id = child_id(parent.run_id, workflow.name, identity)
            await parent.run.record(child_started(identity, run_id, workflow.name), sync=False)
        return await parent.owning(lambda: self._runs.run(workflow, given, run_id, parent))

    # --- inside a workflow ---

    async def sleep(self, seconds: float) -> None:
        """Sleep in a workflow; a restart sleeps only for what is left. Holds no thread."""
        await waits.sleep(seconds)

    @overload
    async def wait_for(
        self,
        name: str,
        *,
        timeout: float | None = ...,  # noqa: ASYNC109 - it outlives the process
        type: type[T],
    ) -> T: ...
    @overload
    async def wait_for(
        self,
        name: str,
        *,
        timeout: float | None = ...,  # noqa: ASYNC109 - it outlives the process
        type: Any = ...,
    ) -> Any: ...
    async def wait_for(
        self,
        name: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - it outlives the process
        type: Any = None,  # noqa: A002 - that is what it is
    ) -> Any:
        """Wait in a workflow until it is answered: ``hive.answer``, or ``maestro answer``.

        The answer is recorded. ``type`` says what it must be: an answer of another kind is refused
        where it is given. After ``timeout`` seconds, those before a restart included, TimeoutError.
        """
        return await waits.wait_for(name, timeout, type)

    # --- from outside ---

    def answer(
        self,
        run_id: str,
        name: str,
        value: Any = None,
        *,
        by: str | None = None,
        early: bool = False,
    ) -> None:
        """Answer what a run waits for; from any process, whether the run is executed or not.

        Each question takes one answer. With ``early`` it may also be one that is yet to be asked.
        """
        control.answer(self._open(), run_id, name, value, by=by, early=early)

    def retry(self, run_id: str, step: str | int | None = None) -> None:
        """Request a retry of what failed; ``run`` or ``resume`` then executes it."""
        control.retry(self._open(), run_id, step)

    def cancel(self, run_id: str, reason: str = "") -> bool:
        """Cancel a run and its children, wherever it is executed; False if it has ended already."""
        return control.cancel(self._open(), run_id, reason)

    def fork(
        self,
        run_id: str,
        *,
        from_step: str | int | None = None,
        new_run_id: str | None = None,
        **changed_inputs: Any,
    ) -> str:
        """Start a new run with what another has completed; return its id, for ``resume``.

        ``from_step`` (a name, ``name#2``, or a number) is executed again. Steps before it stay
        completed, and those after it run again exactly when their input changes. ``changed_inputs`` replace
        arguments of the workflow.
        """
        return control.fork(
            self._open(), run_id, from_step=from_step, changed=changed_inputs, new_id=new_run_id
        )

    def runs(
        self, status: str | None = None, workflow: str | None = None, limit: int | None = None
    ) -> list[RunInfo]:
        """List runs, newest first."""
        return list_runs(self._open(), status, workflow, limit)

    def handle(self, run_id: str) -> RunHandle[Any]:
        """Return a handle of a run, wherever it is executed."""
        run_info(self._open(), run_id)  # or say that there is none
        return RunHandle(self._open, run_id)

    def events(
        self, run_id: str, *, after: int = 0, follow: bool = True
    ) -> AsyncIterator[RunEvent]:
        """Yield what happens in a run, from its beginning or after an event's ``seq``.

        It goes on while a process executes the run, here or elsewhere; without ``follow``, it ends
        with what there is.
        """
        return follow_events(self._open(), run_id, after=after, wait=follow)

    # --- what is open ---

    def close(self) -> None:
        """Close the folder; twice is no error."""
        with self._mutex:
            store, self._store, self._runner = self._store, None, None
            self._is_closed = True
        if store is not None:
            copier().flush(store)
            close_store(store)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def _open(self) -> Store:
        """Return the store, opened when first needed, and again after it failed."""
        store = self._store
        if store is not None and store.usable:
            return store
        with self._mutex:
            if self._is_closed:
                raise StoreClosedError("this Hive was closed; make another one to go on")
            if self._store is not None and not self._store.usable:
                close_store(self._store)
                self._store = self._runner = None
            if self._store is None:
                folders = self.config.state.resolve()
                self._store = open_store(folders.state, persistent=folders.persistent)
            return self._store

    @property
    def _runs(self) -> Runner:
        with self._mutex:
            store = self._open()
            if self._runner is None:
                context = RunContext(
                    config=self.config,
                    store=store,
                    run_child=self._run_child,
                    **self._helpers,  # type: ignore[arg-type]
                )
                self._runner = Runner(context, store)
            return self._runner

    # --- finding workflows ---

    def _input(
        self, workflow: WorkflowFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Input:
        bound_args, bound_kwargs = workflow.bind(args, kwargs)
        return make_input(workflow.name, bound_args, bound_kwargs, workflow.parameters)

    def _as_started(self, run_id: str) -> tuple[WorkflowFunction[..., Any], Input]:
        store = self._open()
        started = read_run(store, run_id).started
        if started is None:
            raise UnknownRunError(run_id, f"{store.location} that a workflow started")
        given = read_input(started, store.load)
        found = self._workflows.get(given.workflow)
        if found is None:
            known = ", ".join(sorted(self._workflows)) or "none"
            raise ConfigurationError(
                f"run {run_id!r} belongs to the workflow {given.workflow!r}, which this Hive does"
                f" not have (it has: {known}); import the module that defines it"
            )
        try:
            found.bind(given.args, given.kwargs)
        except TypeError as error:
            raise RunMismatchError(
                f"run {run_id!r} cannot go on: its workflow takes other arguments by now ({error});"
                " let it take the old ones too, or fork the run with others"
            ) from None
        return found, given


def _config_for(folder: str | Path | None, config: ExecutionConfig | None) -> ExecutionConfig:
    if isinstance(folder, str) and "://" in folder:
        raise ConfigurationError(
            f"Hive({folder!r}): this version stores state in a folder, and takes no address"
        )
    if folder is None:
        return (config or get_execution_config()).frozen()
    given: object = folder
    if not isinstance(given, str | PathLike) or not str(given):
        raise ConfigurationError(f"Hive({folder!r}): a state folder is named by a text or a Path")
    base = ExecutionConfig() if config is None else config
    place = Path(folder).expanduser().absolute()  # now: the program may go elsewhere
    state = replace(base.state, state_dir=str(place), checkpoint_dir=str(place / "checkpoints"))
    return replace(base, state=state).frozen()
