"""Level 1: a persona's task, tried a few times, and never again once its result is recorded.

With a ``workflow_id`` everything is in the run's journal: a completed step is found there and not
called; failures, interruptions, waits, spending, memory, history and progress go on after a
restart. Without one nothing is written, and everything ends with the process.
"""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Self, Unpack

from maestro_hive.engine import retry_policy
from maestro_hive.engine.attempt import is_async
from maestro_hive.engine.audit import AuditLog
from maestro_hive.engine.budget import Budget
from maestro_hive.engine.config import ErrorCategory, ExecutionConfig, frozen_config
from maestro_hive.engine.context import round_number
from maestro_hive.engine.continued_step import check_may_continue, needs_retry
from maestro_hive.engine.definitions import Tasks
from maestro_hive.engine.errors import (
    GovernanceViolation,
    TokenBudgetExceeded,
    UnrecoverableError,
    parts_of,
)
from maestro_hive.engine.execution_log import STEPS, ExecutionLog, names
from maestro_hive.engine.healing.stage import judge_completed
from maestro_hive.engine.memory_step import MemoryPersona, MemoryStep
from maestro_hive.engine.open_run import Turn
from maestro_hive.engine.options import CallOptions, Options, sizing_of
from maestro_hive.engine.parameters import Hidden, places_of
from maestro_hive.engine.plan import UNNAMED, Planner
from maestro_hive.engine.policy import Enforcer, PolicyCheck, infer_action, policy_stages
from maestro_hive.engine.policy_rules import DEFAULT_ROLE
from maestro_hive.engine.prices import default_prices
from maestro_hive.engine.results import (
    ExecutionAttempt,
    ExecutionResult,
    ExecutionStatus,
    drop_metrics,
)
from maestro_hive.engine.settings import refused
from maestro_hive.engine.step import SkippedError, StepExecution
from maestro_hive.engine.step_record import RunStep
from maestro_hive.engine.step_spec import Latest, StepSpec
from maestro_hive.kernel.clock import SystemClock
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.state_manager import StateManager
from maestro_hive.maestro.state.views import show_run
from maestro_hive.unified_execution.state_persistence import StatePersistence

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.engine.config import Level1Config
    from maestro_hive.engine.healing.stage import HealingEngine
    from maestro_hive.engine.open_run import OpenRun
    from maestro_hive.engine.plan import Plan
    from maestro_hive.engine.step_spec import Stage
    from maestro_hive.kernel.clock import Clock
    from maestro_hive.maestro.state.codec import Json
    from maestro_hive.maestro.state.store import DocumentGuard

__all__ = [
    "ExecutionAttempt",
    "ExecutionResult",
    "ExecutionStatus",
    "PersonaExecutor",
    "execute_with_level1_retry",
]


class Call(NamedTuple):
    """A task with its arguments, and the step that it is; no plan in memory."""

    task: Callable[..., object]
    name: str
    args: tuple[object, ...]
    kwargs: dict[str, object]
    plan: Plan | None


class PersonaExecutor:
    """Executes a persona's tasks, a few attempts each; what is completed is not executed again.

    Give it a ``workflow_id`` (or ``execution_id``, the same thing) to make it durable, or the
    ``StatePersistence`` of a run to share. The run stays open until ``close``, the end of a
    ``with`` block, or the end of the process.
    """

    def __init__(
        self,
        config: ExecutionConfig | None = None,
        persona_id: str = "default",
        healing_engine: HealingEngine | None = None,
        workflow_id: str | None = None,
        state_persistence: StatePersistence | None = None,
        enforcer: Enforcer | None = None,
        audit_log_path: str | None = None,
        persona_role: str = "developer_agent",
        *,
        execution_id: str | None = None,
    ) -> None:
        _check(persona_id, healing_engine, state_persistence, enforcer)
        self.config = frozen_config(config)
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
        self._persona = MemoryPersona()
        self._budget = Budget(self.config.tokens, persona_id, self._run, self._persona)
        self._log = ExecutionLog(STEPS, self.config.log_level)
        self._planners: dict[object, Planner] = {}
        self._manager: StateManager | None = None
        self._spec = self._make_spec()

    def _make_spec(self) -> StepSpec:
        clock: Clock = self._run.store.clock if self._run else SystemClock()
        options = Options(persona=self.persona_id)
        budget: tuple[Stage, ...] = (self._budget,) if self._budget.is_set else ()
        return StepSpec(
            config=self.config,
            persona=self.persona_id,
            options=options,
            clock=clock,
            rng=random.Random(self.config.level1.jitter_seed),  # noqa: S311 - for jitter alone
            budget=self._budget,
            checks=self._checks(),
            stages=(*budget, *self._policy_stages()),
            healer=self.healing_engine,
            latest=Latest(),
            recognises_source=self.config.level1.enable_syntax_validation,
            counts_usage=True,
            log=self._log,
            sizing=sizing_of(
                options, default_prices(), is_enforced=self.config.tokens.enforce_budget
            ),
        )

    def _checks(self) -> tuple[PolicyCheck, ...]:
        if self.enforcer is None:
            return ()
        store = self._run.store if self._run is not None else None
        log = None if self.audit_log_path is None else AuditLog(self.audit_log_path, store)
        return (PolicyCheck(self.enforcer, self._role, log),)

    def _policy_stages(self) -> tuple[Stage, ...]:
        store = self._run.store if self._run is not None else None
        return policy_stages(self.enforcer, store, self.persona_id, self._role)

    @property
    def _role(self) -> str | None:
        """The role that it was given; the policy decides about the default one."""
        return None if self.persona_role == DEFAULT_ROLE else self.persona_role

    # --- what it did, and where it is recorded ---

    @property
    def attempts(self) -> list[ExecutionAttempt]:
        """The attempts of the latest execution."""
        known = self._latest.attempts
        return known if self.config.capture_metrics else [replace(a, metrics={}) for a in known]

    @property
    def final_status(self) -> ExecutionStatus:
        """How the latest execution ended, or that it is running."""
        return self._latest.status

    @property
    def _latest(self) -> Latest:
        assert self._spec.latest is not None
        return self._spec.latest

    @property
    def l1_config(self) -> Level1Config:
        """The settings of level 1."""
        return self.config.level1

    @property
    def state_manager(self) -> StateManager:
        """The state manager of the state folder: executions are in its namespace ``workflows``."""
        if self._manager is None:
            durable = self._run is not None and self.config.state.enable_persistence
            folder = self.config.state.resolve().state if durable else self.config.state.state_dir
            self._manager = StateManager(folder, auto_persist=durable)
        return self._manager

    def options(self, **given: Unpack[CallOptions]) -> Self:
        """Return this executor with other options for its calls; see ``CallOptions``."""
        other = copy.copy(self)
        changed = self._spec.options.changed(dict(given), CallOptions)
        sizing = sizing_of(changed, self._spec.sizing.prices)
        other._spec = replace(self._spec, options=changed, sizing=sizing)  # noqa: SLF001 - it is one of us
        if changed.recorded() != self._spec.options.recorded():
            other._planners = {}  # noqa: SLF001 - as above
        return other

    @property
    def starts_over(self) -> bool:
        """Return whether its calls were asked to start again: ``force``, or ``retry``."""
        return self._spec.options.force or self._spec.options.retry

    def close(self) -> None:
        """Close the run, if this executor opened it; twice is no error."""
        if self._owns_state and self.state_persistence is not None:
            self.state_persistence.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- execution ---

    async def execute(
        self, task: Callable[..., object], task_name: str = UNNAMED, *args: object, **kwargs: object
    ) -> ExecutionResult:
        """Return the task's result: from the journal if it is there, else by calling it.

        Raises ``UnrecoverableError`` when its attempts are used up. When the token budget is, the
        result has the status ``BANKRUPT`` and a failure report, and nothing more is called.
        """
        return await self.make(self.plan(task, task_name, args, kwargs), round_number.get())

    def plan(
        self, task: object, name: object, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Call:
        """Return a call, planned: its input is encoded here, and only here."""
        if not callable(task):
            raise ConfigurationError(f"the task {name!r} is {task!r}, and cannot be called")
        if self._run is None:
            if not isinstance(name, str):
                raise refused("the task_name", name, "a text")
            return Call(task, name, args, kwargs, None)
        planner = self._planners.get(name) if isinstance(name, str) else None
        if planner is None:
            recorded = self._spec.options.recorded()
            planner = self._planners[name] = Planner(self.persona_id, name, recorded)
        options = self._spec.options
        key = options.key if isinstance(options.key, str) else None
        hidden = Hidden.of(options.redact, places_of(task)) if options.redact else None
        plan = planner.plan(args, kwargs, key=key, store_input=options.store_input, hidden=hidden)
        if key is None:
            plan = self._numbered(self._run, planner, plan, task)
        return Call(task, plan.name, args, kwargs, plan)

    def _numbered(self, run: OpenRun, planner: Planner, plan: Plan, task: object) -> Plan:
        """Return the plan of a call that must not get the result of another one."""
        number = 1
        if plan.encoded is None:  # no other call is known to be the same
            with run.mutex:  # threads may make the same call at once
                number = run.calls[plan.identity] = run.calls.get(plan.identity, 0) + 1
        elif Tasks.differ(task):
            with run.mutex:
                number = run.tasks.setdefault(plan.identity, Tasks()).number_of(task)
            if number > 1:
                planner.warn_of_tasks()
        return plan if number == 1 else plan.occurrence(number)

    def found(self, call: Call) -> ExecutionResult | None:
        """Return the recorded result of a call, if it is completed and may be used."""
        if self._run is None or call.plan is None or self._spec.options.force:
            return None
        data = self._run.recorded(call.plan.identity, call.name)
        if data is None:
            return None
        output = codec.decode(data, "result") if data else None
        step = self._execution(call, 1)
        state = step.record.state
        if state is not None and state.completed is not None:
            return self._without_metrics(step.completed_result(output))
        result = step.result(ExecutionStatus.SUCCESS)  # marked as completed by hand
        result.final_output = output
        return result

    @property
    def run(self) -> OpenRun | None:
        """The run that its steps are recorded in; None in memory."""
        return self._run

    async def make(
        self,
        call: Call,
        number: int = 1,
        guard: DocumentGuard | None = None,
        *,
        has_turn: bool = False,
    ) -> ExecutionResult:
        """Make one round of attempts at a call; what is completed is not called.

        ``has_turn``: the caller sees to it that the step is executed by one task at a time.
        """
        step = self._execution(call, number)
        if self._run is None or call.plan is None:
            return await self._attempts(step, guard)
        if has_turn:
            return await self._in_turn(step, guard)
        turn = Turn(self._run, call.plan.identity, call.name)
        while True:
            found = self.found(call)
            if found is not None:
                if self._run.state.unjudged:
                    await judge_completed(step)
                return found
            if turn.take():
                break
            await turn.wait()
        try:
            return await self._in_turn(step, guard)
        finally:
            turn.give_back()

    async def _in_turn(self, step: StepExecution, guard: DocumentGuard | None) -> ExecutionResult:
        assert isinstance(step.record, RunStep)
        if self._spec.options.force:
            step.record.start_over(forget=True)
        elif self._spec.options.retry and needs_retry(step):
            step.record.start_over(forget=False)
        return await self._attempts(step, guard)

    async def _attempts(self, step: StepExecution, guard: DocumentGuard | None) -> ExecutionResult:
        persona, name, extra = self.persona_id, step.name, names(step.record.run_id, step.name)
        self._log.debug("%s: %s starts", persona, name, extra=extra)
        try:
            result = await self._outcome(step, guard)
        except UnrecoverableError as error:
            self._log.info("%s: %s failed for good: %s", persona, name, error, extra=extra)
            if isinstance(error.result, ExecutionResult):
                self._without_metrics(error.result)
            raise
        status = result.final_status.value
        self._log.info("%s: %s ended: %s", persona, name, status, extra=extra)
        return self._without_metrics(result)

    async def _outcome(self, step: StepExecution, guard: DocumentGuard | None) -> ExecutionResult:
        try:
            if isinstance(step.record, RunStep):
                await check_may_continue(step)
            await step.check()
            return step.completed_result(await step.run_round(guard))
        except SkippedError as skipped:
            return skipped.result
        except GovernanceViolation as error:  # of the policy; one of the task's is a failed attempt
            if isinstance(step.record, RunStep):
                await step.record.refuse(error)
            raise
        except (TokenBudgetExceeded, ExceptionGroup) as error:
            if not all(isinstance(part, TokenBudgetExceeded) for part in parts_of(error)):
                raise
            return step.bankrupt_result(error)

    def _without_metrics(self, result: ExecutionResult) -> ExecutionResult:
        """Return the result; without metrics, unless they are captured."""
        if not self.config.capture_metrics:
            drop_metrics(result)
        return result

    def _execution(self, call: Call, number: int) -> StepExecution:
        record: RunStep | MemoryStep
        if self._run is not None and call.plan is not None:
            record = RunStep(self._run, call.plan, number)
        else:
            record = MemoryStep(self._persona, self._spec.clock)
        task = call.task
        return StepExecution(
            self._spec, record, call.name, task, call.args, call.kwargs, is_async(task)
        )

    # --- tokens ---

    @property
    def _tokens_used(self) -> int:
        return self._budget.used

    @_tokens_used.setter
    def _tokens_used(self, tokens: int) -> None:
        self._budget.used = tokens

    def get_token_usage(self) -> int:
        """Return the tokens this persona spent, in this run or since the last reset."""
        return self._budget.used

    def reset_token_usage(self) -> None:
        """Count from 0 again, in this executor and those made from it by ``options``."""
        self._budget.used = 0

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
        """Return what a tool does, by its name."""
        return infer_action(tool_name)

    def _persist_state(self, result: ExecutionResult, attempt: ExecutionAttempt) -> None:
        """Set what is known of the persona, and write the copies for resuming."""
        if self.state_persistence is None:
            return
        state = {
            "last_updated": self._spec.clock.now().isoformat(),
            "status": attempt.status.value,
            "current_attempt": attempt.attempt_number,
            "tokens_used": self._tokens_used,
            "last_error": attempt.error_message,
            "recovery_applied": result.recovery_applied,
        }
        self.state_persistence.update_persona_state(self.persona_id, state)
        self.state_persistence.checkpoint()

    def _load_state(self) -> dict[str, Json] | None:
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


def _check(persona_id: object, healer: object, state: object, enforcer: object) -> None:
    """Raise if an executor is to be made of something else than it takes."""
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
        listed = ", ".join(f"{name} {value!r}" for name, value in known.items())
        raise ConfigurationError(f"an executor is of one run, and was given {listed}")
    return next(iter(known.values()), None)


async def execute_with_level1_retry(
    task: Callable[..., object],
    task_name: str = "task",
    persona_id: str = "default",
    max_attempts: int = 3,
    *args: object,
    **kwargs: object,
) -> ExecutionResult:
    """Execute a task in memory, with that many attempts."""
    executor = PersonaExecutor(persona_id=persona_id).options(max_attempts=max_attempts)
    return await executor.execute(task, task_name, *args, **kwargs)
