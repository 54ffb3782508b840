"""The budget of a persona in one run, and of one step: counted in the run or, without one, in memory.

What all processes on a store share is in ``accounts``. A run is executed by one process, so what is
limited here needs no more than that one's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from maestro_hive.engine import settings
from maestro_hive.engine.errors import TokenBudgetExceeded
from maestro_hive.engine.usage import usage_in
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.budgets import MICROS
from maestro_hive.maestro.state.records import EntryKind, NewEntry

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.engine.config import TokenConfig
    from maestro_hive.engine.memory_step import MemoryPersona, MemoryStep
    from maestro_hive.engine.open_run import OpenRun
    from maestro_hive.engine.step import StepExecution
    from maestro_hive.engine.step_record import RunStep
    from maestro_hive.engine.usage import Usage
    from maestro_hive.maestro.state.codec import Json

#: The limits that nobody has set: those of the seeds' classes.
_DEFAULTS = (500_000, 100_000)
_MOST = 10**15


# --- amounts -------------------------------------------------------------------------------------


def checked_amount(name: str, value: object) -> Any:
    """Return how much may be spent: tokens, or ``{"tokens": …, "usd": …}``; raise if it is neither.

    A text such as ``$2.50`` is money.
    """
    if isinstance(value, str):
        value = {"usd": _dollars(name, value)}
    given = isinstance(value, dict) and value.keys() <= {"tokens", "usd"} and any(value.values())
    if isinstance(value, dict) and given:
        tokens, usd = value.get("tokens"), value.get("usd")
        if tokens is not None:
            _whole(f"{name} (tokens)", tokens)
        if usd is not None:
            _money(f"{name} (usd)", usd)
        if usd is None:
            return tokens
        return {"usd": usd} if tokens is None else {"tokens": tokens, "usd": usd}
    return _whole(name, value)


def amounts(value: Any) -> tuple[int | None, int | None]:
    """Return an amount that was checked: tokens, and millionths of a US dollar."""
    if isinstance(value, dict):
        usd = value.get("usd")
        return value.get("tokens"), None if usd is None else round(usd * MICROS)
    return value, None


def _dollars(name: str, text: str) -> float:
    given = text.strip()
    if given.startswith("$") or given.endswith("USD"):  # else it could as well be tokens
        with contextlib.suppress(ValueError):
            return float(given.removeprefix("$").removesuffix("USD"))
    raise ConfigurationError(f"{name} is {text!r}, and must be tokens, or money as in '$2.50'")


_whole = settings.rule(
    int,
    "a whole number of tokens over 0, money as in '$2.50', or both: {'tokens': …, 'usd': …}",
    lambda value: 0 < value <= _MOST,
)


def _money(name: str, value: object) -> float:
    if type(value) not in (int, float) or not 1 / MICROS <= value <= _MOST:  # type: ignore[operator]
        raise settings.refused(name, value, "an amount of US dollars, at least 0.000001")
    return float(value)  # type: ignore[arg-type]


checked_money = _money


# --- the budget of a persona in a run ------------------------------------------------------------


class Gate:
    """What calls of this process that are being made may spend in one run, by persona."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.reserved: dict[str, int] = {}
        self.calls = 0
        self.unsized = 0
        #: What calls of each step have spent.
        self.known: dict[str, int] = {}
        self.waiting: set[Callable[[], object]] = set()

    def settled(self) -> None:
        """Let those look again who wait."""
        for wake in list(self.waiting):
            with contextlib.suppress(RuntimeError):  # its loop was closed
                wake()


class Budget:
    """The token budget of one persona in its run, shared by an executor and all made from it.

    ``defaults``: whether the limits that nobody has set hold, too, as they do for executors. ``own``
    is the budget of each call of a step, for all its attempts together.
    """

    def __init__(
        self,
        limits: TokenConfig,
        persona_id: str,
        run: OpenRun | None,
        persona: MemoryPersona,
        *,
        defaults: bool = True,
        own: Any = None,
    ) -> None:
        self._limits = limits
        self._persona_id = persona_id
        self._run = run
        self._persona = persona
        self._before = 0
        most = (limits.max_tokens_per_execution, limits.max_tokens_per_persona)
        execution, own_persona = (
            number if defaults or number != default else None
            for number, default in zip(most, _DEFAULTS, strict=True)
        )
        self._max_execution: int | None = execution
        self._max_persona: int | None = own_persona
        self._own = amounts(own) if own is not None else None
        self._enforced = limits.enforce_budget
        #: Whether a limit was set, so that calls have to reserve what they may spend.
        self.is_set = self._enforced and limits.track_usage and most != _DEFAULTS
        self.is_limited = self._enforced and (
            self._own is not None or execution is not None or own_persona is not None
        )
        #: Whether a call of the step has a limit in money, for which its model needs a price.
        self.is_in_money = self._enforced and self._own is not None and self._own[1] is not None

    def count_in(self, run: OpenRun) -> None:
        """Have what is used counted in a run, and not in memory."""
        self._run = run

    @property
    def used(self) -> int:
        """The tokens used, in this run or since they were last set."""
        return self._spent_so_far() - self._before

    @used.setter
    def used(self, tokens: int) -> None:
        settings.whole(0)("the number of tokens used", tokens)
        self._before = self._spent_so_far() - tokens

    @property
    def remaining(self) -> float:
        """The tokens that may still be used: by the persona, and in its execution."""
        left = [float("inf")]
        if self._max_persona is not None:
            left.append(self._max_persona - self.used)
        if self._max_execution is not None:
            left.append(self._max_execution - self._used_in_execution())
        return max(0.0, min(left))

    def _used_in_execution(self) -> int:
        if self._run is None:
            return self.used
        return sum(tokens for tokens, _ in list(self._run.state.spent.values()))

    def _spent_so_far(self) -> int:
        if self._run is None:
            return self._persona.tokens
        return self._run.state.spent.get(self._persona_id, (0, 0.0))[0]

    def spend(self, step: RunStep | MemoryStep, attempt: int, usage: Usage) -> None:
        """Count what an attempt used; raise ``TokenBudgetExceeded`` over a limit."""
        if self._limits.track_usage:
            step.spend(attempt, usage)
            self.check(step)
            if self._enforced:
                step.check_accounts()

    def note_reported(self, step: RunStep | MemoryStep, attempt: int, result: object) -> None:
        """Count the usage that a result or an error reports, unless its attempt counted itself.

        It is durable with the outcome of the attempt, which is recorded next.
        """
        if not self._limits.track_usage or step.has_spent(attempt):
            return
        usage = usage_in(result)
        if usage is not None:
            step.note_usage(attempt, usage)
            self.check(step)

    def check(self, step: RunStep | MemoryStep | None = None) -> None:
        """Raise ``TokenBudgetExceeded`` if more was used than the limits allow."""
        if not self.is_limited:
            return
        pending = 0 if step is None else step.pending_tokens()
        used = self.used + pending
        if self._max_persona is not None and used > self._max_persona:
            raise self._exceeded(used, self._max_persona, "persona")
        used = self._used_in_execution() + pending
        if self._max_execution is not None and used > self._max_execution:
            raise self._exceeded(used, self._max_execution, "execution")
        if self._own is not None and step is not None:
            self._check_own(step, *self._own)

    def _check_own(
        self, step: RunStep | MemoryStep, most_tokens: int | None, most_usd: int | None
    ) -> None:
        tokens, usd = step.spent_in_all()
        context = {"scope": "step", "usd_used": usd / MICROS}
        message = f"Token budget of the step exceeded for persona {self._persona_id}"
        if most_tokens is not None and tokens > most_tokens:
            raise TokenBudgetExceeded(message, self._persona_id, tokens, most_tokens, context)
        if most_usd is not None and usd > most_usd:
            shown = f"{usd / MICROS:.6f} of {most_usd / MICROS:.6f} USD spent"
            message = f"Budget of the step exceeded for persona {self._persona_id}: {shown}"
            raise TokenBudgetExceeded(message, self._persona_id, tokens, most_tokens or 0, context)

    def take(self, tokens: int) -> None:
        """Count tokens; raise ``TokenBudgetExceeded``, and count nothing, if they exceed the budget."""
        used, most = self.used + tokens, self._limits.max_tokens_per_persona
        if self._enforced and used > most:
            raise self._exceeded(used, most, "persona")
        if self._run is None:
            with self._persona.lock:
                self._persona.tokens += tokens
        else:
            facts = {"persona": self._persona_id, "tokens": tokens, "usd": 0.0}
            self._run.append([NewEntry(EntryKind.SPENT, facts=codec.dump_canonical(facts))])

    def _exceeded(self, used: int, limit: int, scope: str) -> TokenBudgetExceeded:
        message = f"Token budget of the {scope} exceeded for persona {self._persona_id}"
        return TokenBudgetExceeded(message, self._persona_id, used, limit)

    # --- calls at the same time ---

    async def enter(self, step: StepExecution) -> Admitted | None:
        """Return when a call may start beside those that are being made: a stage of a step."""
        if step.is_nested():
            return None  # what is inside of another call must not wait for it
        gate = self._gate()
        options = step.spec.options
        while True:
            settled = asyncio.Event()
            wake = partial(asyncio.get_running_loop().call_soon_threadsafe, settled.set)
            with gate.lock:
                size = (
                    options.max_tokens
                    if options.max_tokens is not None
                    else gate.known.get(step.name)
                )
                if self._has_room(gate, size):
                    self.check(step.record)
                    return Admitted(gate, step, size)
                gate.waiting.add(wake)
            try:
                await settled.wait()
            finally:
                gate.waiting.discard(wake)

    def _gate(self) -> Gate:
        holder: OpenRun | MemoryPersona = self._persona if self._run is None else self._run
        if holder.gate is None:
            holder.gate = Gate()
        return holder.gate

    def _has_room(self, gate: Gate, size: int | None) -> bool:
        """Return whether a call may start beside those that are made; alone, it always may."""
        if not gate.calls:
            return True
        if gate.unsized or size is None:
            return False
        held, all_held = gate.reserved.get(self._persona_id, 0), sum(gate.reserved.values())
        of_persona = self._max_persona is None or self.used + held + size <= self._max_persona
        return of_persona and (
            self._max_execution is None
            or self._used_in_execution() + all_held + size <= self._max_execution
        )


class Admitted:
    """A call that may spend so much until it has ended."""

    def __init__(self, gate: Gate, step: StepExecution, size: int | None) -> None:
        self._gate, self._step, self._size = gate, step, size
        self._persona = step.spec.persona
        self._before = step.record.tokens()
        self._is_over = False
        gate.calls += 1
        gate.unsized += size is None
        gate.reserved[self._persona] = gate.reserved.get(self._persona, 0) + (size or 0)

    def is_current(self) -> bool:
        """Return True: it holds until the call has ended."""
        return True

    async def renew(self) -> None:
        """Do nothing: as above."""

    async def withdraw(self) -> None:
        """Note that the call is not made; nothing is known from it."""
        with self._gate.lock:
            self._release()
        self._gate.settled()

    def _release(self) -> bool:
        gate, size = self._gate, self._size
        if self._is_over:
            return False
        self._is_over = True
        gate.calls -= 1
        gate.unsized -= size is None
        gate.reserved[self._persona] -= size or 0
        return True

    def leave(self) -> None:
        """Note that the call has ended, and what it spent."""
        gate = self._gate
        with gate.lock:
            if not self._release():
                return
            spent = self._step.record.tokens() - self._before
            gate.known[self._step.name] = max(spent, gate.known.get(self._step.name, 0))
        gate.settled()

    def outlive(self) -> Json:
        """Return nothing: a thread that goes on holds no part of a budget."""
        return None
