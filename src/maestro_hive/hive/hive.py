"""Hive: steps, workflows and runs over one state folder.

Each method imports what does its work: a program may import ``Hive`` and define, list or control runs
without what executes them.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar, overload

from maestro_hive.hive.enqueuing import Enqueuing, own_budget
from maestro_hive.kernel.errors import ConfigurationError, MaestroError, StoreClosedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
    from datetime import datetime
    from uuid import UUID

    from maestro_hive.engine.audit import AuditLog
    from maestro_hive.engine.config import ExecutionConfig
    from maestro_hive.engine.escalation import Escalation
    from maestro_hive.engine.healing.stage import HealingEngine
    from maestro_hive.engine.options import Amount
    from maestro_hive.engine.policy import Enforcer
    from maestro_hive.engine.policy_rules import PolicyEnforcer
    from maestro_hive.engine.prices import Prices
    from maestro_hive.engine.tickets import TicketSystem
    from maestro_hive.hive.answers import Question
    from maestro_hive.hive.attending import Asked
    from maestro_hive.hive.budgets import Budgets
    from maestro_hive.hive.escalations import EscalationView
    from maestro_hive.hive.functions import WorkflowFunction
    from maestro_hive.hive.handle import RunHandle
    from maestro_hive.hive.runner import Runner
    from maestro_hive.hive.runs import Input, RunInfo
    from maestro_hive.hive.waits import DurableTimeout
    from maestro_hive.maestro.state.events import RunEvent
    from maestro_hive.maestro.state.store import Store
    from maestro_hive.maestro.state.streams import StreamChunk

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


#: What ``resolve`` is given where a step has no result.
UNRESOLVED: Any = object()


class Hive(Enqueuing):
    """Durable steps and workflows over one state folder; a context manager, sync or async.

    ``folder`` has all state, checkpoints included; without it, that of the configuration.
    ``budget``: how much each run may spend, or amounts by ``persona``, ``run``, ``queue`` and ``day``,
    for each of them or by name; what was raised since stays. ``prices`` are those of models, in place
    of the ones that come with this version: a table, or a JSON file.
    ``cancel_grace``: for how many seconds a workflow that is cancelled may run steps to clean up.
    ``escalation``: where steps with ``escalate=True`` ask for help; without it, the ticket system that
    the configuration names, and without that they wait locally.
    ``workspace``: the folder whose files healers may repair, and that paths of a policy are relative
    to; without it, the current one.
    ``policy`` is a policy file, or ``enforcer`` an object that decides; ``audit_log`` is where their
    decisions are written: a path, ``True`` for ``audit.jsonl`` in the state folder (which is so if it
    is not given), or ``False``.
    Nothing is opened before it is needed. The folder is closed by ``close``, at the end of a
    ``with`` block, or with the process.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        config: ExecutionConfig | None = None,
        *,
        healing_engine: HealingEngine | None = None,
        enforcer: Enforcer | None = None,
        escalation: TicketSystem | Escalation | None = None,
        cancel_grace: float = 60.0,
        workspace: str | Path | None = None,
        budget: Amount | Mapping[str, Any] | None = None,
        prices: Prices | Mapping[str, Any] | str | Path | None = None,
        policy: str | Path | PolicyEnforcer | None = None,
        audit_log: bool | str | Path | None = None,
    ) -> None:
        from maestro_hive.engine.callers_tickets import chosen_system
        from maestro_hive.engine.prices import read_prices
        from maestro_hive.hive import hive_arguments as arguments

        super().__init__()
        self.config = arguments.config_for(folder, config)
        self._healing_engine = healing_engine
        self._tickets = chosen_system(self.config, escalation=escalation)
        self._workspace = None if workspace is None else Path(workspace).expanduser().absolute()
        decides = arguments.enforcer_of(policy, enforcer, self._workspace)
        self._helpers = {"enforcer": decides}
        self._audit = arguments.audit_of(audit_log, decides)
        self._cancel_grace = arguments.grace_of(cancel_grace)
        self._declared = arguments.limits_of(budget)
        #: What models cost.
        self.prices = read_prices(prices)
        self._store: Store | None = None
        self._runner: Runner | None = None
        self._is_closed = False
        self._mutex = threading.RLock()

    @property
    def budget(self) -> Budgets:
        """The budgets of personas, runs, queues and days: limits, and what was spent."""
        from maestro_hive.hive.budgets import Budgets

        return Budgets(self._open)

    # --- running ---

    async def run(
        self,
        workflow: Callable[..., Awaitable[R]],
        /,
        *args: Any,
        run_id: str | None = None,
        budget: Amount | None = None,
        **kwargs: Any,
    ) -> R:
        """Run a workflow and return its result; the same ``run_id`` resumes it.

        ``budget`` is what it may spend with its children: tokens, or money as in ``"$2.50"``. (It is an
        argument of the workflow, where that has one of this name.)
        Finished, it returns the recorded result; failed, it raises the recorded failure until ``retry``.
        Signals are left to the program. To cancel this call stops the run: that is recorded, counts
        as no failure, and the run resumes when it is started again.
        """
        made = self._known(workflow)
        budget, kwargs = own_budget(made.parameters, budget, kwargs)
        given = self._input(made, args, kwargs)
        name = self._name(made, run_id)
        self._set_budget(name, budget)
        return await self._run(made, given, name)

    def run_sync(
        self,
        workflow: Callable[..., Awaitable[R]],
        /,
        *args: Any,
        run_id: str | None = None,
        budget: Amount | None = None,
        **kwargs: Any,
    ) -> R:
        """Run a workflow from a program without an event loop; ``budget`` as of ``run``.

        While it runs, the first Ctrl+C, SIGTERM or SIGHUP stops it: the stop is recorded and counts as
        no failure, and the process ends as it would have. A second one ends it at once.
        """
        import asyncio

        from maestro_hive.engine.failures import with_own_lines
        from maestro_hive.kernel.process import run_async
        from maestro_hive.kernel.signals import until_signal

        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            raise ConfigurationError(
                "run_sync() was called where an event loop is running; use `await hive.run(…)`"
            )
        try:
            made = self._known(workflow)
            budget, kwargs = own_budget(made.parameters, budget, kwargs)
            given = self._input(made, args, kwargs)
            name = self._name(made, run_id)
            self._set_budget(name, budget)
            work = self._run(made, given, name)
            return run_async(until_signal(work, stopped_message(name)))
        except (MaestroError, KeyboardInterrupt) as error:
            # Raised here, so that the traceback names run_sync, and nothing of the loop.
            raise with_own_lines(error)  # noqa: B904 - the same error

    def _name(self, workflow: WorkflowFunction[..., Any], run_id: str | None) -> str:
        from maestro_hive.hive.branches import active_run_or_none
        from maestro_hive.hive.runs import new_id
        from maestro_hive.kernel import files

        if run_id is not None:
            return files.check_identifier(run_id, "run id")
        if active_run_or_none() is not None:
            raise ConfigurationError(
                f"hive.run({workflow.name}, …) inside a workflow needs a run_id, or each start would"
                f" run it again; or await {workflow.name}(…) itself: then it is a child"
            )
        return new_id(workflow.name)

    async def resume(self, run_id: str) -> Any:
        """Resume a run as it was started: its workflow and arguments are in the journal."""
        made, given = self._as_started(run_id)
        return await self._run(made, given, run_id)

    async def _run(self, workflow: WorkflowFunction[..., R], given: Input, run_id: str) -> R:
        from maestro_hive.engine.failures import with_own_lines

        try:
            result: R = await self._runs.run(workflow, given, run_id)
        except MaestroError as error:
            with_own_lines(error)
            raise
        return result

    # --- inside a workflow ---

    async def sleep(self, seconds: float) -> None:
        """Sleep in a workflow; a restart sleeps only for what is left. Holds no thread."""
        from maestro_hive.hive import waits

        await waits.sleep(seconds)

    @overload
    async def wait_for(
        self,
        name: str,
        *,
        timeout: float | None = ...,  # noqa: ASYNC109 - it outlives the process
        type: type[T],
        about: Any = ...,
    ) -> T: ...
    @overload
    async def wait_for(
        self,
        name: str,
        *,
        timeout: float | None = ...,  # noqa: ASYNC109 - it outlives the process
        type: Any = ...,
        about: Any = ...,
    ) -> Any: ...
    async def wait_for(
        self,
        name: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - it outlives the process
        type: Any = None,  # noqa: A002 - that is what it is
        about: Any = None,
    ) -> Any:
        """Wait in a workflow until it is answered: ``hive.answer``, or ``maestro answer``.

        The answer is recorded. ``type`` says what it must be: an answer of another kind is refused
        where it is given. After ``timeout`` seconds, those before a restart included, TimeoutError.
        ``about`` is shown to the person who is asked; about something else, it is another question.
        """
        from maestro_hive.hive import waits

        return await waits.wait_for(name, timeout, type, about)

    def timeout(self, seconds: float) -> DurableTimeout:
        """Limit a block of a workflow: ``async with hive.timeout(60):``, as ``asyncio.timeout``.

        The time before a restart counts. When it is over, what the block waits for is cancelled, and
        TimeoutError is raised.
        """
        from maestro_hive.hive.waits import DurableTimeout

        return DurableTimeout(seconds)

    def now(self) -> datetime:
        """Return the time (UTC) in a workflow; a resumed one gets the same."""
        from maestro_hive.hive import waits

        return waits.recorded_value("now", lambda run: run.run.store.clock.now())

    def random(self) -> float:
        """Return a random number from 0 to 1 in a workflow; a resumed one gets the same."""
        import secrets

        from maestro_hive.hive import waits

        return waits.recorded_value("random", lambda _: secrets.SystemRandom().random())

    def uuid(self) -> UUID:
        """Return a random UUID in a workflow; a resumed one gets the same."""
        from uuid import uuid4

        from maestro_hive.hive import waits

        return waits.recorded_value("uuid", lambda _: uuid4())

    # --- from outside ---

    def answer(
        self,
        run_id: str,
        name: str,
        value: Any = None,
        *,
        by: str | None = None,
        early: bool = False,
        question: str | None = None,
    ) -> None:
        """Answer what a run waits for; from any process, whether the run is executed or not.

        Each question takes one answer: of several senders all but one get ``AlreadyAnsweredError``.
        With ``early`` it may also be the next question of this name, which is yet to be asked.
        ``question`` is the id of one of several with this name, as ``questions`` has it.
        """
        from maestro_hive.hive import answers

        store = self._open()
        answers.answer(store, run_id, name, value, by=by, early=early, question=question)

    def questions(self, run_id: str) -> list[Question]:
        """Return the questions that a run waits for, with what they are about."""
        from maestro_hive.hive import answers

        return answers.questions(self._open(), run_id)

    async def attend(
        self, run_id: str, tell: Callable[[Asked], object], *, leave: bool = False
    ) -> None:
        """Tell what a run of this process, and its children, ask people; until this is cancelled.

        Each question, approval and escalation is told once. With ``leave`` the run is suspended when
        it does nothing but wait for people, and who awaits it gets ``RunReleased``.
        """
        from maestro_hive.hive.attending import attend

        await attend(self._open(), run_id, tell, leave=leave)

    def escalations(self, run_id: str | None = None) -> list[EscalationView]:
        """Return the failures that wait for a person: of steps with ``escalate=True``, and of executors."""
        from maestro_hive.hive import escalations

        return escalations.list_escalations(self._open(), run_id)

    def answer_escalation(
        self,
        escalation_id: str,
        feedback: str | None = None,
        *,
        result: Any = UNRESOLVED,
        give_up: bool = False,
        by: str | None = None,
    ) -> None:
        """Say what to do about a step that failed for good, and whose run waits for that.

        ``feedback`` is given to another set of attempts. ``result`` is the step's result, checked by
        the type that it declares. ``give_up`` has the workflow get the error; then ``feedback`` is the
        reason. An escalation takes one answer: later ones get ``AlreadyAnsweredError``.
        """
        from maestro_hive.hive import escalations

        given = (result is not UNRESOLVED) + give_up
        if given > 1 or (result is not UNRESOLVED and feedback is not None):
            raise ConfigurationError(
                "answer_escalation() takes one of feedback, result=… and give_up=True"
            )
        store = self._open()
        if give_up:
            escalations.give_up(store, escalation_id, feedback or "", by=by)
        elif result is not UNRESOLVED:
            escalations.give_result(store, escalation_id, result, by=by)
        else:
            escalations.give_feedback(store, escalation_id, feedback or "", by=by)

    async def sync_escalations(self) -> list[str]:
        """Make the tickets that are yet to be made, and take the answers of those that are resolved.

        Workers, and runs that wait, do so every some seconds. Returns which escalations were answered.
        """
        from maestro_hive.hive.keeping_escalations import sync_all

        return [] if self._tickets is None else await sync_all(self._open(), self._tickets)

    def retry(self, run_id: str, step: str | int | None = None) -> None:
        """Request a retry of what failed; ``run`` or ``resume`` then executes it."""
        from maestro_hive.hive import control

        control.retry(self._open(), run_id, step)

    def resolve(
        self,
        run_id: str,
        step: str | int,
        *,
        completed: Any = UNRESOLVED,
        rerun: bool = False,
        by: str | None = None,
    ) -> None:
        """Settle an ambiguous step of a run, one that may have had its effect and asks a person.

        ``completed`` is the result it had: it is checked by the type that the step declares.
        ``rerun`` lets it be executed again. It is recorded for exactly this call of the step (a name,
        ``name#2`` or a number), and ``run`` or ``resume`` then goes on.
        """
        from maestro_hive.hive import resolving

        if (completed is UNRESOLVED) is not rerun:
            raise ConfigurationError("resolve() takes either completed=… or rerun=True")
        if rerun:
            resolving.rerun(self._open(), run_id, step, by=by)
        else:
            resolving.complete(self._open(), run_id, step, completed, by=by)

    def cancel(self, run_id: str, reason: str = "") -> bool:
        """Cancel a run and its children, wherever they are executed; False if all have ended."""
        from maestro_hive.hive import cancelling

        return cancelling.cancel(self._open(), run_id, reason)

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
        from maestro_hive.hive import control

        return control.fork(
            self._open(),
            run_id,
            from_step=from_step,
            changed=changed_inputs,
            new_id=new_run_id,
            known=self._workflows,
        )

    def runs(
        self,
        status: str | None = None,
        workflow: str | None = None,
        limit: int | None = None,
        *,
        roots: bool = False,
    ) -> list[RunInfo]:
        """List runs, newest first: all, or with ``roots`` only those that are no children."""
        from maestro_hive.hive.runs import list_runs

        return list_runs(self._open(), status, workflow, limit, roots=roots)

    def handle(self, run_id: str) -> RunHandle[Any]:
        """Return a handle of a run, wherever it is executed."""
        from maestro_hive.hive.handle import RunHandle
        from maestro_hive.hive.runs import find_run

        find_run(self._open(), run_id)  # or say that there is none
        return RunHandle(self._open, run_id)

    def events(
        self, run_id: str, *, after: int = 0, follow: bool = True
    ) -> AsyncIterator[RunEvent]:
        """Yield what happens in a run, from its beginning or after an event's ``seq``.

        It goes on while a process executes the run, here or elsewhere; without ``follow``, it ends
        with what there is.
        """
        from maestro_hive.hive.handle import follow as follow_events

        return follow_events(self._open(), run_id, after=after, wait=follow)

    def stream(
        self, run_id: str, step: str | int | None = None, *, after: int = 0, follow: bool = True
    ) -> AsyncIterator[StreamChunk]:
        """Yield what the steps of a run, or one of them, write by ``current().write``; live.

        From the beginning or after a chunk's ``seq``, in order, wherever the run is executed. At
        ``restarted`` a new attempt starts: drop what you have of that step. It ends when the step,
        or the run, has its outcome and all of it was yielded. A run that belongs to workers is waited
        for; of another one that no process executes, ``RunInactiveError``: go on after the last
        ``seq`` when one does. Without ``follow`` it ends with what there is.
        """
        from maestro_hive.engine import settings
        from maestro_hive.hive.streams import follow as follow_stream

        number = settings.whole(0)("after", after)
        return follow_stream(self._open(), run_id, step, after=number, wait=follow)

    # --- what is open ---

    def close(self) -> None:
        """Close the folder; twice is no error. Raises the error of a JSON copy not written.

        A thread of a step that still runs has the folder open until it ends: for the permit of a
        limited step, and for the lease of a run that belongs to workers.
        """
        with self._mutex:
            store, self._store, self._runner = self._store, None, None
            self._is_closed = True
        if store is not None:
            from maestro_hive.engine.copies import copier
            from maestro_hive.maestro.state.stores import close_store

            try:
                copier().flush(store)
            finally:
                close_store(store)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        from maestro_hive.engine import values

        await values.in_thread(self.close)

    def _open(self) -> Store:
        """Return the store, opened when first needed, and again after it failed."""
        store = self._store
        if store is not None and store.usable:
            return store
        from maestro_hive.maestro.state.stores import close_store, open_store

        with self._mutex:
            if self._is_closed:
                raise StoreClosedError("this Hive was closed; make another one to go on")
            if self._store is not None and not self._store.usable:
                close_store(self._store)
                self._store = self._runner = None
            if self._store is None:
                folders = self.config.state.resolve()
                self._store = open_store(folders.state, persistent=folders.persistent)
                if self._declared:
                    from maestro_hive.hive.budgets import declare

                    declare(self._store, self._declared)
            return self._store

    @property
    def _runs(self) -> Runner:
        from maestro_hive.hive.keeping_escalations import EscalationKeeper
        from maestro_hive.hive.run_context import RunContext
        from maestro_hive.hive.runner import Runner

        with self._mutex:
            store = self._open()
            if self._runner is None:
                self._check_disabled()
                context = RunContext(
                    config=self.config,
                    store=store,
                    escalations=EscalationKeeper(store, self._tickets),
                    cancel_grace=self._cancel_grace,
                    healer=self._healing_engine,
                    healers=self._healers,
                    workspace=self._workspace,
                    prices=self.prices,
                    audit_log=self._audit_log(store),
                    **self._helpers,  # type: ignore[arg-type]
                )
                self._runner = Runner(context, store)
            return self._runner

    def _check_disabled(self) -> None:
        """Raise if a step, or all of them, shall not ask a healer that nobody has defined."""
        from maestro_hive.engine.healing.stage import check_disabled

        own = self._healing_engine
        everywhere = self.config.level1.disabled_healers
        check_disabled(everywhere, own, self._healers, "Level1Config.")
        for step in self._steps.values():
            where = f"of step {step.name!r} the option "
            check_disabled(step.options.disabled_healers, own, self._healers, where)

    def _audit_log(self, store: Store) -> AuditLog | None:
        """Return where decisions are written; a hive in memory has no folder for it."""
        if not self._audit or (self._audit is True and not store.format):
            return None
        from maestro_hive.engine.audit import DEFAULT_NAME, AuditLog

        path = Path(store.location) / DEFAULT_NAME if self._audit is True else self._audit
        return AuditLog(path, store)

    # --- finding workflows ---

    def _input(
        self, workflow: WorkflowFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Input:
        from maestro_hive.hive.runs import make_input

        bound_args, bound_kwargs = workflow.bind(args, kwargs)
        names, types = workflow.parameters, workflow.types
        return make_input(workflow.name, bound_args, bound_kwargs, names, types)

    def _as_started(self, run_id: str) -> tuple[WorkflowFunction[..., Any], Input]:
        from maestro_hive.hive.errors import UnknownRunError
        from maestro_hive.hive.runs import read_input, read_run

        store = self._open()
        if store.run(run_id) is None:
            self._runs.restore(run_id)
        started = read_run(store, run_id).started
        if started is None:
            raise UnknownRunError(run_id, f"{store.location} that a workflow started")
        return self._bound(run_id, read_input(started, store.load))

    def _bound(self, run_id: str, given: Input) -> tuple[WorkflowFunction[..., Any], Input]:
        """Return the workflow of a run, which takes its arguments as it is now."""
        from maestro_hive.hive.same_run import check_fits

        found = self._workflows.get(given.workflow)
        if found is None:
            known = ", ".join(sorted(self._workflows)) or "none"
            raise ConfigurationError(
                f"run {run_id!r} belongs to the workflow {given.workflow!r}, which this Hive does"
                f" not have (it has: {known}); import the module that defines it"
            )
        check_fits(self._open(), run_id, found, given)
        return found, given


def stopped_message(run_id: str) -> str:
    """Return what the caller of a run that a signal stopped is told."""
    return f"run {run_id!r} was stopped; it resumes when it is started again"
