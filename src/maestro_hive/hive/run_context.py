"""What the steps of every run of a hive are executed with, and how each of them is prepared for that."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from maestro_hive.engine.breaker import CircuitBreaker
from maestro_hive.engine.budget import Budget
from maestro_hive.engine.execution_log import STEPS, ExecutionLog
from maestro_hive.engine.limits import Limit
from maestro_hive.engine.memory_step import MemoryPersona
from maestro_hive.engine.options import sizing_of
from maestro_hive.engine.policy import PolicyCheck, policy_stages
from maestro_hive.engine.prices import default_prices
from maestro_hive.engine.rounds import RoundPolicy
from maestro_hive.engine.step_spec import StepSpec
from maestro_hive.hive.approvals import Approvals
from maestro_hive.hive.run_log import RunLog

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from maestro_hive.engine.audit import AuditLog
    from maestro_hive.engine.config import ExecutionConfig
    from maestro_hive.engine.healing.healers import Healer
    from maestro_hive.engine.healing.stage import HealingEngine
    from maestro_hive.engine.options import Options
    from maestro_hive.engine.policy import Enforcer
    from maestro_hive.engine.prices import Prices
    from maestro_hive.engine.rates import Rate
    from maestro_hive.engine.step_spec import Stage
    from maestro_hive.hive.active_run import ActiveRun
    from maestro_hive.hive.functions import StepFunction
    from maestro_hive.hive.keeping_escalations import EscalationKeeper
    from maestro_hive.maestro.state.store import Store


class Substitutes(Protocol):
    """What tests put in the place of the bodies of steps, and of the clock and the dice."""

    def body(
        self, step: StepFunction[..., Any], run_id: str, identity: bytes, task: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return the async function that is called instead of ``task``."""
        ...

    def value(self, name: str, run_id: str, identity: bytes) -> Any:
        """Return the time, a random number or a UUID for this call of the workflow."""
        ...


@dataclass(slots=True, kw_only=True)
class RunContext:
    """What the steps of every run of a hive are executed with."""

    config: ExecutionConfig
    store: Store
    #: Has a person told of failures, and their answers looked for.
    escalations: EscalationKeeper
    healer: HealingEngine | None = None
    #: What ``@hive.healer`` made, and the folder that healers may repair.
    healers: Sequence[Healer] = ()
    workspace: Path | None = None
    enforcer: Enforcer | None = None
    audit_log: AuditLog | None = None
    substitutes: Substitutes | None = None
    prices: Prices = field(default_factory=default_prices)
    #: For how many seconds a workflow that is cancelled may clean up.
    cancel_grace: float = 60.0
    #: What is logged of runs, and of their steps.
    run_log: RunLog = field(init=False)
    step_log: ExecutionLog = field(init=False)
    _breakers: dict[str, CircuitBreaker] = field(default_factory=dict)
    _limits: dict[tuple[str, Rate | None, int | None], Limit] = field(default_factory=dict)

    def __post_init__(self) -> None:
        level = self.config.log_level
        self.run_log, self.step_log = RunLog(level), ExecutionLog(STEPS, level)

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
        by_policy = policy_stages(self.enforcer, self.store, options.persona, options.role)
        rate, most = options.rate, options.max_concurrency
        if rate is None and most is None:
            return (*by_policy, *options.stages)
        found = self._limits.get((name, rate, most))
        if found is None:
            found = Limit(self.store, name, rate=rate, max_concurrency=most)
            self._limits[name, rate, most] = found
        return (*by_policy, found, *options.stages)

    def checks(self, options: Options, active: ActiveRun) -> tuple[PolicyCheck, ...]:
        """Return what a step of a run is checked by before its first attempt."""
        if self.enforcer is None:
            return ()
        return (PolicyCheck(self.enforcer, options.role, self.audit_log, Approvals(active)),)


class PreparedStep(NamedTuple):
    """What all calls of a step have in common: in one run, or in all runs of a hive."""

    context: RunContext
    spec: StepSpec
    policy: RoundPolicy
    #: Whether a limit or a check in it belongs to the run that it was made for.
    is_of_one_run: bool


def prepare(context: RunContext, step: StepFunction[..., Any], active: ActiveRun) -> PreparedStep:
    """Return what all calls of a step in a run have in common."""
    config, options = context.config, step.options
    checks = context.checks(options, active)
    rng = random.Random(config.level1.jitter_seed)  # noqa: S311 - for jitter alone
    limit, level2 = None, config.level2
    if options.max_attempts is not None or options.rounds is not None:
        limit = options.attempt_limit(config)
        level2 = replace(level2, max_attempts=limit.rounds)
    budget = Budget(
        config.tokens, step.persona, None, MemoryPersona(), defaults=False, own=options.budget
    )
    is_of_one_run = bool(checks) or budget.is_limited
    if is_of_one_run:
        budget.count_in(active.run)
    stages = context.stages(step.name, options)
    spec = StepSpec(
        config=config,
        persona=step.persona,
        options=options,
        clock=context.store.clock,
        rng=rng,
        budget=budget,
        checks=checks,
        stages=(budget, *stages) if budget.is_set else stages,
        sizing=sizing_of(options, context.prices, is_enforced=config.tokens.enforce_budget),
        counts_usage=True,
        healer=context.healer,
        healers=context.healers,
        workspace=context.workspace,
        declared=step.function,
        reads_back=True,
        limit=limit,
        log=context.step_log,
    )
    policy = RoundPolicy(
        config=level2,
        breaker=context.breaker(options.breaker_name(step.name)),
        escalation=None,
        rng=rng,
        log=context.step_log,
        waits_for_breaker=options.waits_for_breaker,
    )
    return PreparedStep(context, spec, policy, is_of_one_run)
