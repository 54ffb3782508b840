"""Token budgets: what a persona has used, counted in its run or, without one, in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maestro_hive.engine.errors import TokenBudgetExceeded
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.records import EntryKind, NewEntry

if TYPE_CHECKING:
    from maestro_hive.engine.config import TokenConfig
    from maestro_hive.engine.open_run import OpenRun
    from maestro_hive.engine.step_record import MemoryPersona, MemoryStep, RunStep


class Budget:
    """The token budget of one persona, shared by an executor and all made from it by ``options``."""

    def __init__(
        self, limits: TokenConfig, persona_id: str, run: OpenRun | None, persona: MemoryPersona
    ) -> None:
        self._limits = limits
        self._persona_id = persona_id
        self._run = run
        self._persona = persona
        self._before = 0

    @property
    def used(self) -> int:
        """The tokens used, in this run or since the last reset."""
        return self._spent_so_far() - self._before

    def reset(self) -> None:
        """Count from 0 again."""
        self._before = self._spent_so_far()

    def _spent_so_far(self) -> int:
        if self._run is None:
            return self._persona.tokens
        return self._run.state.spent.get(self._persona_id, (0, 0.0))[0]

    def spend(self, step: RunStep | MemoryStep, attempt: int, tokens: int, usd: float) -> None:
        """Count what an attempt used; raise ``TokenBudgetExceeded`` over the limit."""
        if self._limits.track_usage:
            step.spend(attempt, tokens, usd)
            self.check()

    def check(self) -> None:
        """Raise ``TokenBudgetExceeded`` if more was used than the limits allow."""
        limits = self._limits
        if not limits.enforce_budget or not (self._run.state.spent if self._run else True):
            return
        used = self.used
        if used > limits.max_tokens_per_persona:
            raise self._exceeded(used, limits.max_tokens_per_persona, "persona")
        if self._run is not None:
            used = sum(tokens for tokens, _ in list(self._run.state.spent.values()))
        if used > limits.max_tokens_per_execution:
            raise self._exceeded(used, limits.max_tokens_per_execution, "execution")

    def take(self, tokens: int) -> None:
        """Count tokens; raise ``TokenBudgetExceeded``, and count nothing, if they exceed the budget."""
        used = self.used + tokens
        if self._limits.enforce_budget and used > self._limits.max_tokens_per_persona:
            raise self._exceeded(used, self._limits.max_tokens_per_persona, "persona")
        if self._run is None:
            with self._persona.lock:
                self._persona.tokens += tokens
        else:
            facts = {"persona": self._persona_id, "tokens": tokens, "usd": 0.0}
            self._run.append([NewEntry(EntryKind.SPENT, facts=codec.dump_canonical(facts))])

    def _exceeded(self, used: int, limit: int, scope: str) -> TokenBudgetExceeded:
        message = f"Token budget of the {scope} exceeded for persona {self._persona_id}"
        return TokenBudgetExceeded(message, self._persona_id, used, limit)
