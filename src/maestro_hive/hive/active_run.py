"""A run whose workflow this process executes: its steps, its questions, and its cancellation."""

from __future__ import annotations

import asyncio
import hashlib
import random
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from maestro_hive.engine import values
from maestro_hive.engine.breaker import CircuitBreaker
from maestro_hive.engine.budget import Budget
from maestro_hive.engine.failures import with_own_lines
from maestro_hive.engine.limits import Limit
from maestro_hive.engine.policy import PolicyCheck
from maestro_hive.engine.rounds import RoundPolicy, Rounds, RoundsSkippedError
from maestro_hive.engine.step import StepExecution, StepSpec, Turn, check_may_continue
from maestro_hive.engine.step_record import MemoryPersona, RunStep
from maestro_hive.engine.values import OwnArguments
from maestro_hive.hive import runs
from maestro_hive.hive.errors import OutsideRunError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.records import EntryKind
from maestro_hive.maestro.state.views import open_waits

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from maestro_hive.engine.breaker import Permit
    from maestro_hive.engine.config import ExecutionConfig
    from maestro_hive.engine.escalation import Escalation
    from maestro_hive.engine.healing import Healer
    from maestro_hive.engine.open_run import OpenRun
    from maestro_hive.engine.options import Options
    from maestro_hive.engine.plan import Plan
    from maestro_hive.engine.policy import Enforcer
    from maestro_hive.engine.rates import Rate
    from maestro_hive.engine.step import Stage
    from maestro_hive.hive.functions import StepFunction, WorkflowFunction
    from maestro_hive.maestro.state.records import NewEntry
    from maestro_hive.maestro.state.store import Store

_active: ContextVar[ActiveRun | None] = ContextVar("active_run", default=None)


@dataclass(slots=True, kw_only=True)
class RunContext:
    """What the steps of every run of a hive are executed with."""

    config: ExecutionConfig
    store: Store
    #: Runs a workflow as the child of a run.
    run_child: Callable[
        [ActiveRun, WorkflowFunction[..., Any], tuple[Any, ...], dict[str, Any]], Awaitable[Any]
    ]
    healer: Healer | None = None
    enforcer: Enforcer | None = None
    escalation: Escalation | None = None
    _breakers: dict[str, CircuitBreaker] = field(default_factory=dict)
    _limits: dict[tuple[str, Rate | None, int | None], Limit] = field(default_factory=dict)

    def breaker(self, name: str) -> CircuitBreaker:
        """Return the breaker of that name."""
        found = self._breakers.get(name)
        if found is None:
            level2 = self.config.level2
            found = self._breakers[name] = CircuitBreaker(
                level2.circuit_breaker_threshold,
                level2.circuit_breaker_cooldown_seconds,
                name=name,
                store=self.store,
            )
        return found

    def stages(self, name: str, options: Options) -> tuple[Stage, ...]:
        """Return the stages that each attempt of a step passes."""
        rate, most = options.rate, options.max_concurrency
        if rate is None and most is None:
            return ()
        found = self._limits.get((name, rate, most))
        if found is None:
            found = Limit(self.store, name, rate=rate, max_concurrency=most)
            self._limits[name, rate, most] = found
        return (found,)


class PreparedStep(NamedTuple):
    """What all calls of a step in one run have in common."""

    spec: StepSpec
    policy: RoundPolicy


class StepCall:
    """One call of a step: a round is one set of attempts at it."""

    __slots__ = ("name", "persona", "step", "uses_guard")

    def __init__(self, step: StepExecution) -> None:
        self.step = step
        self.name = step.name
        self.persona: str | None = step.spec.persona
        self.uses_guard = True

    def make(self, number: int, permit: Permit) -> Awaitable[Any]:
        """Make the attempts of one round."""
        step = self.step
        record = step.record
        assert isinstance(record, RunStep)
        record.round = number
        if record.state is not None or step.spec.checks:
            return self._make_checked(permit)
        return step.run_round(permit.guard, permit.renewed_guard)

    async def _make_checked(self, permit: Permit) -> Any:
        step = self.step
        await check_may_continue(step)
        await step.check()
        return await step.run_round(permit.guard, permit.renewed_guard)


class ActiveRun:
    """A run that is being executed; ``cancel_reason`` is set once its end was requested."""

    def __init__(self, context: RunContext, run: OpenRun, parent: ActiveRun | None) -> None:
        self.run_id = run.run_id
        self.run = run
        self.parent = parent
        self.children: set[ActiveRun] = set()
        self.cancel_reason: str | None = None
        #: The questions that the workflow asks just now, and those that are being settled.
        self._listeners: dict[bytes, asyncio.Future[None]] = {}
        self._claimed: set[bytes] = set()
        #: Has the inbox read at once; set by what watches it.
        self.check_inbox: Callable[[], None] = lambda: None
        self.loop = asyncio.get_running_loop()
        self._context = context
        self._tasks: dict[asyncio.Task[Any], int] = {}
        self._calls: dict[bytes, int] = {}
        self._prepared: dict[StepFunction[..., Any], PreparedStep] = {}

    # --- being executed ---

    async def drive(self, body: Callable[[], Any]) -> Any:
        """Return what a workflow's function returns; what it started and left behind is stopped."""
        token = _active.set(self)
        try:
            return await self.owning(body)
        finally:
            _active.reset(token)
            await self._stop_leftovers()

    async def owning(self, call: Callable[[], Any]) -> Any:
        """Await a call as part of this run: cancelling the run cancels it."""
        task = asyncio.current_task()
        assert task is not None
        self._own(task)
        try:
            return await call()
        finally:
            self._disown(task)

    def _own(self, task: asyncio.Task[Any]) -> None:
        """Cancel a task with this run; raise if the run was cancelled."""
        self._tasks[task] = self._tasks.get(task, 0) + 1
        if self.cancel_reason is not None:
            self.check_active()

    def _disown(self, task: asyncio.Task[Any]) -> None:
        left = self._tasks[task] = self._tasks[task] - 1
        if not left:
            del self._tasks[task]

    async def _stop_leftovers(self) -> None:
        left = [task for task in self._tasks if not task.done()]
        for task in left:
            task.get_loop().call_soon_threadsafe(task.cancel)
        here = [task for task in left if task.get_loop() is self.loop]
        if here:
            await asyncio.wait(here)

    def check_active(self) -> None:
        """Raise if the run was cancelled: nothing more shall start."""
        if self.cancel_reason is not None:
            raise asyncio.CancelledError(f"run {self.run_id!r} was cancelled")

    def cancel(self, reason: str) -> None:
        """Cancel it, its children, and all that they are waiting for; from any thread."""
        self.loop.call_soon_threadsafe(self._cancel, reason)

    def _cancel(self, reason: str) -> None:
        if self.cancel_reason is not None:
            return  # once: what cleans up after itself shall not be cancelled again
        family = self._family()
        tasks = {task for run in family for task in run._tasks}  # noqa: SLF001 - of ours
        for run in family:
            run.cancel_reason = run.cancel_reason or reason
        for task in tasks:
            task.get_loop().call_soon_threadsafe(task.cancel)

    def _family(self) -> list[ActiveRun]:
        found = [self]
        for run in found:
            found.extend(run.children)
        return found

    # --- questions ---
    # A workflow's code may run in more than one loop, each in its thread: the run's lock decides.

    def listen(self, identity: bytes) -> asyncio.Future[None]:
        """Return what is done when a question is answered; in the loop that asks it."""
        with self.run.mutex:
            self._claimed.discard(identity)
            listener = asyncio.get_running_loop().create_future()
            self._listeners[identity] = listener
            return listener

    def stop_listening(self, identity: bytes) -> None:
        """Note that no task waits for the answer any more."""
        with self.run.mutex:
            self._listeners.pop(identity, None)

    def listens(self, identity: bytes) -> bool:
        """Return whether the workflow asks this just now, and it is not being settled."""
        with self.run.mutex:
            return identity in self._listeners and identity not in self._claimed

    def claim(self, identity: bytes) -> bool:
        """Become the one who settles a question, by an answer or by its timeout."""
        with self.run.mutex:
            mine = self.listens(identity)
            if mine:
                self._claimed.add(identity)
            return mine

    def give_up_claim(self, identity: bytes) -> None:
        """Let another one settle it."""
        with self.run.mutex:
            self._claimed.discard(identity)

    def notify(self, identity: bytes, error: Exception | None = None) -> None:
        """Wake who waits for the answer, with the reason if it cannot be had."""
        with self.run.mutex:
            listener = self._listeners.get(identity)
        if listener is not None:
            listener.get_loop().call_soon_threadsafe(_settle, listener, error)

    def notify_all(self, error: Exception) -> None:
        """Wake all who wait, with the reason why no answer can be had."""
        for identity in list(self._listeners):
            self.notify(identity, error)

    # --- which of several equal calls ---

    def occurrence(self, identity: bytes) -> int:
        """Count the calls that are equal, since the run was opened."""
        number = self._calls[identity] = self._calls.get(identity, 0) + 1
        return number

    def numbered(self, *parts: str | bytes) -> bytes:
        """Return an identity for one more call that these parts describe."""
        identity = runs.identity_of(*parts)
        number = self.occurrence(identity)
        return identity if number == 1 else hashlib.sha256(identity + b"#%d" % number).digest()

    # --- steps ---

    async def call(
        self, step: StepFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return a step's result: from the journal if it is there, else by executing it."""
        prepared = self._prepared.get(step)
        if prepared is None:
            prepared = self._prepared[step] = self._prepare(step)
        options = step.options
        key = None if options.key is None else step.key_for(options.key, args, kwargs)
        is_plain = codec.is_small(args) and (not kwargs or codec.is_small(kwargs.values()))
        if is_plain:
            plan = step.planner.plan(args, kwargs, key=key, store_input=options.store_input)
        else:
            plan = await values.plan(
                step.planner, args, kwargs, key=key, store_input=options.store_input
            )
        if key is None:
            number = self.occurrence(plan.identity)
            if number > 1:
                plan = plan.occurrence(number)
        data = self.run.recorded(plan.identity, plan.name)
        if data is not None:
            return None if not data else await values.decode(data, "result")
        own = None if is_plain else OwnArguments(plan.encoded)
        try:
            return await self._execute(step, prepared, plan, args, kwargs, own)
        except Exception as error:
            with_own_lines(error)
            raise

    async def _execute(
        self,
        step: StepFunction[..., Any],
        prepared: PreparedStep,
        plan: Plan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        own: OwnArguments | None,
    ) -> Any:
        run = self.run
        turn = Turn(run, plan.identity, plan.name)
        while not turn.take():
            await turn.wait()
            data = self.run.recorded(plan.identity, plan.name)
            if data is not None:
                return None if not data else await values.decode(data, "result")
        task = asyncio.current_task()
        assert task is not None
        try:
            self._own(task)
            record = RunStep(run, plan, 1)
            execution = StepExecution(
                prepared.spec, record, step.name, step.function, args, kwargs, step.is_async, own
            )
            rounds = Rounds(prepared.policy, StepCall(execution), run, plan.identity)
            return await rounds.run()
        except RoundsSkippedError:
            return None
        finally:
            self._disown(task)
            turn.give_back()
            run.copy_if_due()

    def _prepare(self, step: StepFunction[..., Any]) -> PreparedStep:
        context, options, clock = self._context, step.options, self.run.store.clock
        config = context.config
        if options.budget is not None:
            tokens = replace(config.tokens, max_tokens_per_persona=options.budget)
            config = replace(config, tokens=tokens)
        checks: tuple[PolicyCheck, ...] = ()
        if context.enforcer is not None:
            role = "developer_agent"
            checks = (PolicyCheck(context.enforcer, step.persona, role, None, clock),)
        rng = random.Random(config.level1.jitter_seed)  # noqa: S311 - for jitter alone
        spec = StepSpec(
            config=config,
            persona=step.persona,
            options=options,
            clock=clock,
            rng=rng,
            budget=Budget(config.tokens, step.persona, self.run, MemoryPersona()),
            checks=checks,
            stages=context.stages(step.name, options),
            healer=context.healer,
            reads_back=True,
        )
        policy = RoundPolicy(
            config=config.level2,
            breaker=context.breaker(options.breaker or step.persona),
            escalation=context.escalation,
            rng=rng,
        )
        return PreparedStep(spec, policy)

    async def run_child(
        self, workflow: WorkflowFunction[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of another workflow, in a run of its own."""
        return await self._context.run_child(self, workflow, args, kwargs)

    # --- what is recorded of the run itself ---

    async def record(self, entry: NewEntry, *, sync: bool = True) -> None:
        """Record an entry, and let listings show the run's status after it."""
        await self.run.record(entry, sync=sync, status=self._status_with(entry))

    def _status_with(self, entry: NewEntry) -> str:
        """Return the run's status once the entry is recorded."""
        asked = {each.identity for each in open_waits(self.run.state)}
        match entry.kind:
            case EntryKind.WAIT_STARTED if runs.asks_a_person(entry):
                asked.add(entry.identity)
            case EntryKind.WAIT_ENDED:
                asked.discard(entry.identity)
            case _:
                pass
        return runs.WAITING if asked else runs.RUNNING


def _settle(listener: asyncio.Future[None], error: Exception | None) -> None:
    if listener.done():
        return
    if error is None:
        listener.set_result(None)
    else:
        listener.set_exception(error)


def active_run(what: str, name: str = "") -> ActiveRun:
    """Return the run that is executed here; ``what`` needs one."""
    found = _active.get()
    if found is None:
        named = f"{what} {name!r}" if name else what
        raise OutsideRunError(
            f"{named} was called outside a run: call it from a workflow that hive.run executes"
        )
    return found


def active_run_or_none() -> ActiveRun | None:
    """Return the run that is executed here, if there is one."""
    return _active.get()
