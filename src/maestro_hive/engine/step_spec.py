"""How a step is executed: what all its calls have in common, and what its stages promise."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from maestro_hive.engine.accounts import UNSIZED
from maestro_hive.engine.config import ExecutionConfig, RecoveryStrategy
from maestro_hive.engine.healing.stage import HealingEngine, check_disabled
from maestro_hive.engine.result_types import result_check
from maestro_hive.engine.results import ExecutionAttempt, ExecutionResult, ExecutionStatus
from maestro_hive.engine.source import check_if_source, check_source

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from random import Random

    from maestro_hive.engine.accounts import Sizing
    from maestro_hive.engine.attempt import Admission
    from maestro_hive.engine.budget import Budget
    from maestro_hive.engine.execution_log import ExecutionLog
    from maestro_hive.engine.healing.healers import Healer
    from maestro_hive.engine.options import AttemptLimit, Options
    from maestro_hive.engine.step import StepExecution
    from maestro_hive.kernel.clock import Clock


class StepCheck(Protocol):
    """What a step is checked by before its first attempt."""

    async def check(self, step: StepExecution) -> None:
        """Raise if the step must not be executed."""
        ...


class Stage(Protocol):
    """What every attempt of a step has to pass before it starts."""

    async def enter(self, step: StepExecution) -> Admission | None:
        """Return when the attempt may start, with what it is let in with, if anything; or raise.

        The attempt's time limit does not run meanwhile.
        """
        ...


class Latest:
    """What an executor, and those made from it by ``options``, did last."""

    def __init__(self) -> None:
        self.status = ExecutionStatus.PENDING
        self._attempts: list[ExecutionAttempt] | ExecutionResult = []

    @property
    def attempts(self) -> list[ExecutionAttempt]:
        """Every attempt of it, up to now."""
        known = self._attempts
        return known if isinstance(known, list) else known.attempts

    def set(
        self, status: ExecutionStatus, attempts: list[ExecutionAttempt] | ExecutionResult
    ) -> None:
        """Note its status; of a result only the attempts count."""
        self.status, self._attempts = status, attempts


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpec:
    """How a step is executed: what all its calls have in common."""

    config: ExecutionConfig
    persona: str
    options: Options
    clock: Clock
    rng: Random
    budget: Budget
    #: What a step is checked by, once, before its first attempt.
    checks: tuple[StepCheck, ...] = ()
    #: What each attempt enters, in order.
    stages: tuple[Stage, ...] = ()
    #: What heals between attempts; without it, the healers that ship. ``healers`` are asked first.
    healer: HealingEngine | None = None
    healers: Sequence[Healer] = ()
    #: The folder that healers may repair; without it, the current one.
    workspace: Path | None = None
    #: The function whose annotation says what the result is, where that is not the task itself.
    declared: Callable[..., Any] | None = None
    latest: Latest | None = None
    #: Whether the caller gets the recorded result, decoded, and not the object itself.
    reads_back: bool = False
    #: How often the task is called in all rounds; without it, each round has as many attempts.
    limit: AttemptLimit | None = None
    #: Whether a result that looks like Python source is checked, where the options do not say.
    recognises_source: bool = False
    #: Whether the usage that a result reports is counted.
    counts_usage: bool = False
    log: ExecutionLog | None = None
    #: What is known of its calls before they are made.
    sizing: Sizing = UNSIZED

    #: How many seconds an attempt may take.
    timeout: float = field(init=False)
    #: How many attempts may fail in one round, where there is no limit for all of them.
    max_attempts: int = field(init=False)
    #: How many attempts may be cut off by the death of their process.
    max_interruptions: int = field(init=False)
    #: Whether what the task writes to its stream is stored.
    stores_streams: bool = field(init=False)
    #: Refuses a text that the task returned, if it must be Python source that parses.
    check_output: Callable[[str], None] | None = field(init=False)
    #: Refuses a result that is not of the declared type, where all tasks declare the same.
    check_result: Callable[[Any], None] | None = field(init=False)
    #: Whether healers are asked about failures, and which of them are not.
    heals: bool = field(init=False)
    disabled_healers: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        level1, options = self.config.level1, self.options
        stored = options.store_streams
        chosen = {
            "timeout": options.timeout or self.config.timeout_seconds,
            "stores_streams": self.config.state.store_streams if stored is None else stored,
            "max_attempts": options.max_attempts or level1.max_attempts,
            "max_interruptions": level1.max_interruptions,
            "check_output": _output_check(options.check_source, recognise=self.recognises_source),
            "check_result": None if options.returns is None else self._result_check(),
            "heals": (level1.enable_self_healing if options.healing is None else options.healing)
            and level1.recovery_strategy is RecoveryStrategy.REFLECT_AND_RETRY,
            "disabled_healers": frozenset((*level1.disabled_healers, *options.disabled_healers)),
        }
        for name, value in chosen.items():
            object.__setattr__(self, name, value)
        if self.disabled_healers:
            check_disabled(self.disabled_healers, self.healer, self.healers)

    def _result_check(self) -> Callable[[Any], None] | None:
        returns, declared = self.options.returns, self.declared
        if returns is True and declared is None:
            return None
        return result_check(returns, declared)

    def attempts_in(self, number: int) -> int:
        """Return how many attempts may fail in that round."""
        return self.max_attempts if self.limit is None else self.limit.in_round(number)


def _output_check(wanted: bool | None, *, recognise: bool) -> Callable[[str], None] | None:
    if wanted is None:
        return check_if_source if recognise else None
    return check_source if wanted else None
