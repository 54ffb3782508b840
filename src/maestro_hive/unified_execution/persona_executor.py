"""Level 1: a persona's task, tried a few times, and never again once its result is kept.

With a ``workflow_id`` everything is in the run's journal: a finished step is found there and not
called; failures, interruptions, waits, spending, memory, history and progress go on after a
restart. Without one nothing is written, and everything ends with the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self

from maestro_hive.engine import retry_policy
from maestro_hive.engine.attempt import round_number
from maestro_hive.engine.budget import Budget
from maestro_hive.engine.config import (
    ErrorCategory,
    ExecutionConfig,
    get_execution_config,
)
from maestro_hive.engine.policy import AgentContext, Enforcer, enforce, infer_action
from maestro_hive.engine.results import (
    ExecutionAttempt,
    ExecutionResult,
    ExecutionStatus,
)
from maestro_hive.engine.settings import refused
from maestro_hive.kernel.clock import SystemClock
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.projections import was_healed
from maestro_hive.maestro.state.state_manager import StateManager
from maestro_hive.maestro.state.views import show_run
from maestro_hive.unified_execution.call import Call, Latest, Terms, make_result
from maestro_hive.unified_execution.call_options import CallOptions
from maestro_hive.unified_execution.durable_step import DurableStep
from maestro_hive.unified_execution.resuming import go_on, is_over
from maestro_hive.unified_execution.state_persistence import StatePersistence
from maestro_hive.unified_execution.steps import UNNAMED, Plan, Planner
from maestro_hive.unified_execution.transient_step import Persona, TransientStep

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.engine.healing import Healer
    from maestro_hive.engine.open_run import OpenRun
    from maestro_hive.kernel.clock import Clock

__all__ = [
    "ExecutionAttempt",
    "ExecutionResult",
    "ExecutionStatus",
    "PersonaExecutor",
    "execute_with_level1_retry",
]


#: The steps that this task is inside of.
_inside: ContextVar[frozenset[tuple[str, bytes]]] = ContextVar("steps_inside", default=frozenset())


class PersonaExecutor:
    """Executes a persona's tasks, a few attempts each; what is finished is never executed again.

    Give it a ``workflow_id`` (or ``execution_id``, the same thing) to make it durable, or the
    ``StatePersistence`` of a run to share. The run is held until ``close``, the end of a ``with``
    block, or the end of the process.
    """

    def __init__(
        self,
        config: ExecutionConfig | None = None,
        persona_id: str = "default",
        healing_engine: Healer | None = None,
        workflow_id: str | None = None,
        state_persistence: StatePersistence | None = None,
        enforcer: Enforcer | None = None,
        audit_log_path: str | None = None,
        persona_role: str = "developer_agent",
        *,
        execution_id: str | None = None,
    ) -> None:
        _check(config, persona_id, healing_engine, state_persistence, enforcer)
        self.config = (get_execution_config() if config is None else config).frozen()
        self.persona_id = persona_id
        self.persona_role = persona_role
        self.healing_engine = healing_engine
        self.enforcer = enforcer
        self.audit_log_path = audit_log_path
        self.workflow_id = _one_id(workflow_id, execution_id, state_persistence)
        self._owns_state = state_persistence is None and self.workflow_id is not None
        if self._owns_state:
            state_persistence = StatePersistence(self.config, self.workflow_id)
        self.state_persistence = state_persistence
        self._run: OpenRun | None = state_persistence.run if state_persistence else None
        self._clock: Clock = self._run.store.clock if self._run else SystemClock()
        self._persona = Persona()
        self._budget = Budget(self.config.tokens, persona_id, self._run, self._persona)
        self._planner = Planner(persona_id)
        self._options = CallOptions()
        self._manager: StateManager | None = None
        self._terms = Terms(
            config=self.config,
            persona_id=persona_id,
            clock=self._clock,
            rng=random.Random(self.config.level1.jitter_seed),  # noqa: S311 - for jitter alone
            healer=healing_engine,
            latest=Latest(),
            spend=self._budget.spend,
            check_budget=self._budget.check,
        )

    # --- what it did, and where it is kept ---

    @property
    def attempts(self) -> list[ExecutionAttempt]:
        """The attempts of the latest execution."""
        return self._terms.latest.attempts

    @property
    def final_status(self) -> ExecutionStatus:
        """How the latest execution ended, or that it is under way."""
        return self._terms.latest.status

    @property
    def state_manager(self) -> StateManager:
        """The state manager of the state folder: executions are in its namespace ``workflows``."""
        if self._manager is None:
            durable = self._run is not None and self.config.state.enable_persistence
            folder = self.config.state.resolve().state if durable else self.config.state.state_dir
            self._manager = StateManager(folder, auto_persist=durable)
        return self._manager

    def options(self, **given: Any) -> Self:
        """Return this executor with other options for its calls.

        ``force``, ``retry``, ``key``, ``timeout``, ``max_attempts``, ``max_elapsed_seconds``,
        ``retry_on``, ``on_ambiguous``, ``store_input``, ``occurrence`` and ``gate``: see
        ``CallOptions``.
        """
        other = copy.copy(self)
        other._options = self._options.changed(given)  # noqa: SLF001 - it is one of us
        return other

    @property
    def starts_over(self) -> bool:
        """Return whether its calls were asked to begin anew: ``force``, or ``retry``."""
        return self._options.force or self._options.retry

    def close(self) -> None:
        """Let the run go, if this executor opened it; twice is no error."""
        if self._owns_state and self.state_persistence is not None:
            self.state_persistence.shutdown()

    def __enter__(self) -> Self:
        """Use it in a ``with`` statement."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let the run go at the end of it."""
        self.close()

    # --- execution ---

    async def execute(
        self,
        task: Callable[..., Any],
        task_name: str = UNNAMED,
        *args: Any,
        **kwargs: Any,
    ) -> ExecutionResult:
        """Return the task's result: from the journal if it is there, else by calling it.

        Raises ``UnrecoverableError`` when its attempts are used up.
        """
        if not callable(task):
            raise ConfigurationError(f"the task {task_name!r} is {task!r}, and cannot be called")
        run, options = self._run, self._options
        if run is None:
            named: object = task_name
            if not isinstance(named, str):
                raise refused("the task_name", task_name, "a text")
            transient = TransientStep(self._persona, self._clock)
            call = Call(self._terms, options, transient, task, task_name, args, kwargs)
            self._govern(call)
            return await call.run()
        plan = self._plan(task_name, args, kwargs)
        step = DurableStep(run, plan, self.persona_id, round_number.get())
        found = self._find(step, task_name)
        if found is not None:
            return found
        call = Call(self._terms, options, step, task, task_name, args, kwargs)
        return await self._execute_once(run, plan, call)

    def completed_result(
        self,
        task: Callable[..., Any],
        task_name: str = UNNAMED,
        *args: Any,
        **kwargs: Any,
    ) -> ExecutionResult | None:
        """Return what ``execute`` would return without calling the task; None if it would call."""
        del task
        if self._run is None:
            return None
        plan = self._plan(task_name, args, kwargs)
        return self._find(DurableStep(self._run, plan, self.persona_id, 1), task_name)

    def step_identity(
        self,
        task: Callable[..., Any],
        task_name: str = UNNAMED,
        *args: Any,
        **kwargs: Any,
    ) -> bytes | None:
        """Return what tells the step that ``execute`` would execute from others; None in memory."""
        del task
        return (
            None if self._run is None else self._plan(task_name, args, kwargs, quiet=True).identity
        )

    def _plan(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, quiet: bool = False
    ) -> Plan:
        options = self._options
        return self._planner.plan(
            name,
            args,
            kwargs,
            key=options.key,
            store_input=options.store_input,
            occurrence=options.occurrence,
            quiet=quiet,
        )

    def _find(self, step: DurableStep, name: str) -> ExecutionResult | None:
        """Return what is kept of a step, if it is finished and may be used."""
        if self._options.force:
            return None
        state = step.state
        status = ExecutionStatus.SUCCESS
        if state is not None and state.completed is not None:
            if was_healed(state):
                status = ExecutionStatus.RECOVERED
            result = step.completed_result(name, status, step.output(state.completed))
        elif self._run is not None and name in self._run.state.completed_tasks:
            output = self._artifacts(self._run, name)
            result = make_result(step, name, self.persona_id, status, output)
        else:
            return None
        self._terms.latest.show(status, result)
        return result

    @staticmethod
    def _artifacts(run: OpenRun, name: str) -> Any:
        entry = run.state.completed_tasks[name]
        data = run.store.load(entry) if entry is not None else None
        return None if data is None else codec.decode(data, "artifacts")

    async def _execute_once(self, run: OpenRun, plan: Plan, call: Call) -> ExecutionResult:
        """Execute a step, unless this process does so already: then wait, and take its result."""
        while not run.enter(plan.identity):
            if (run.run_id, plan.identity) in _inside.get():
                raise ConfigurationError(
                    f"{call.name!r} executes itself, with the same input, and would wait for ever"
                )
            waiter = run.wait_for(plan.identity)
            if waiter is not None:
                await asyncio.shield(asyncio.wrap_future(waiter))
            assert isinstance(call.step, DurableStep)
            found = self._find(call.step, call.name)
            if found is not None:
                return found
        token = _inside.set(_inside.get() | {(run.run_id, plan.identity)})
        try:
            return await self._start(call)
        finally:
            with contextlib.suppress(ValueError):  # it is thrown away, in another context
                _inside.reset(token)
            run.leave(plan.identity)
            if self.state_persistence is not None:
                self.state_persistence.copy_if_due()

    async def _start(self, call: Call) -> ExecutionResult:
        """Go on with a step where it was, if it may go on."""
        step = call.step
        assert isinstance(step, DurableStep)
        if self._options.force:
            step.start_over(forget=True)
        elif self._options.retry and is_over(call, step):
            step.start_over(forget=False)
        skipped = await go_on(call, step)
        if skipped is not None:
            return skipped
        self._govern(call)
        return await call.run()

    def _govern(self, call: Call) -> None:
        if self.enforcer is None:
            return
        tool = getattr(call.task, "__name__", call.name)
        agent = AgentContext(agent_id=self.persona_id, role=self.persona_role)
        self._terms.latest.show(ExecutionStatus.FAILED, [])  # unless it is allowed
        enforce(self.enforcer, agent, tool, call.arguments(), self.audit_log_path, self._clock)

    # --- tokens ---

    @property
    def _tokens_used(self) -> int:
        return self._budget.used

    def get_token_usage(self) -> int:
        """Return the tokens this persona spent, in this run or since the last reset."""
        return self._budget.used

    def reset_token_usage(self) -> None:
        """Count from 0 again, in this executor and those made from it by ``options``."""
        self._budget.reset()

    # --- used by older callers ---

    def _check_token_budget(self, tokens: int) -> None:
        """Count tokens, unless they would exceed the budget: then raise."""
        self._budget.take(tokens)

    def _calculate_delay(self, attempt_number: int) -> float:
        """Return the wait after the n-th failure, without jitter."""
        return retry_policy.delay_before(self.config.level1, attempt_number)

    def _classify_error(self, error: Exception) -> ErrorCategory:
        """Return what kind of failure an error is."""
        return retry_policy.classify(error)

    def _infer_action_from_tool(self, tool_name: str) -> str:
        """Tell from a tool's name what it does."""
        return infer_action(tool_name)

    def _persist_state(self, result: ExecutionResult, attempt: ExecutionAttempt) -> None:
        """Set what the persona shows of itself, and write the copies for resuming."""
        if self.state_persistence is None:
            return
        shown = {
            "last_updated": self._clock.now().isoformat(),
            "status": attempt.status.value,
            "current_attempt": attempt.attempt_number,
            "tokens_used": self._tokens_used,
            "last_error": attempt.error_message,
            "recovery_applied": result.recovery_applied,
        }
        self.state_persistence.update_persona_state(self.persona_id, shown)
        self.state_persistence.checkpoint()

    def _load_state(self) -> dict[str, Any] | None:
        """Return the run as the journal has it; None without a run, or before its first entry."""
        if self._run is None:
            return None
        self._run.catch_up()
        if not self._run.state.seq:
            return None
        return copy.deepcopy(show_run(self._run.state, self._run.run_id, self._run.store.load))

    def _save_state(self) -> None:
        """Write the copies for resuming; the journal itself is never behind."""
        if self.state_persistence is not None:
            self.state_persistence.checkpoint()


def _check(
    config: object, persona_id: object, healer: object, state: object, enforcer: object
) -> None:
    """Raise if an executor is to be made of something else than it takes."""
    if config is not None and not isinstance(config, ExecutionConfig):
        raise refused("the config", config, "an ExecutionConfig, or None for that of the process")
    if not isinstance(persona_id, str) or not persona_id:
        raise ConfigurationError(f"a persona_id is a text that is not empty, not {persona_id!r}")
    if healer is not None and not callable(getattr(healer, "heal_single", None)):
        raise refused("the healing_engine", healer, "an object with a method heal_single")
    if state is not None and not isinstance(state, StatePersistence):
        raise refused("the state_persistence", state, "a StatePersistence")
    if enforcer is not None and not callable(getattr(enforcer, "check", None)):
        raise refused("the enforcer", enforcer, "an object with a method check")


def _one_id(
    workflow_id: str | None, execution_id: str | None, state: StatePersistence | None
) -> str | None:
    given = {
        "workflow_id": workflow_id,
        "execution_id": execution_id,
        "state_persistence": state.workflow_id if state is not None else None,
    }
    known = {name: value for name, value in given.items() if value is not None}
    for name, value in known.items():
        given_id: object = value
        if not isinstance(given_id, str):
            raise refused(f"the {name}", value, "a text")
    if len(set(known.values())) > 1:
        told = ", ".join(f"{name} {value!r}" for name, value in known.items())
        raise ConfigurationError(f"an executor is of one run, and was given {told}")
    return next(iter(known.values()), None)


async def execute_with_level1_retry(
    task: Callable[..., Any],
    task_name: str = "task",
    persona_id: str = "default",
    max_attempts: int = 3,
    *args: Any,
    **kwargs: Any,
) -> ExecutionResult:
    """Execute a task in memory, with that many attempts."""
    executor = PersonaExecutor(persona_id=persona_id).options(max_attempts=max_attempts)
    return await executor.execute(task, task_name, *args, **kwargs)
