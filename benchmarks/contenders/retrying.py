"""What retrying and breaking add in memory to a call that succeeds at once."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import TYPE_CHECKING, Any

from benchmarks.contender import Contender, Figures
from maestro_hive.engine.breaker import CircuitBreaker
from maestro_hive.unified_execution.persona_executor import PersonaExecutor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

_CALLS = 2_000
_BREAKER_CALLS = 20_000
_TIMES = 7
_ATTEMPTS = 3


async def _task(number: int) -> int:
    return number


async def _seconds(call: Callable[[int], Awaitable[object]]) -> float:
    started = time.perf_counter()
    for number in range(_CALLS):
        await call(number)
    return (time.perf_counter() - started) / _CALLS


def _added(guarded: Callable[[int], Awaitable[object]]) -> Figures:
    """Measure a guarded call and a bare one in turns; what the first takes longer is added."""

    async def main() -> Figures:
        await _seconds(guarded)
        pairs = [(await _seconds(guarded), await _seconds(_task)) for _ in range(_TIMES)]
        return {
            "added": statistics.median(one - two for one, two in pairs),
            "bare": statistics.median(bare for _, bare in pairs),
        }

    return asyncio.run(main())


def _ours(_folder: Path) -> Figures:
    executor = PersonaExecutor(persona_id="writer")  # no workflow id: nothing is kept
    return _added(lambda number: executor.execute(_task, "draft", number))


def _tenacity(_folder: Path) -> Figures:
    import tenacity  # type: ignore[import-not-found]

    guard: Any = tenacity.retry(
        stop=tenacity.stop_after_attempt(_ATTEMPTS), wait=tenacity.wait_exponential_jitter(max=5)
    )
    return _added(guard(_task))


def _stamina(_folder: Path) -> Figures:
    import stamina  # type: ignore[import-not-found]

    guard: Any = stamina.retry(on=Exception, attempts=_ATTEMPTS)
    return _added(guard(_task))


def _breaker(_folder: Path) -> Figures:
    """Measure both ways of using it: asking and telling, and a permit for the call."""
    breaker = CircuitBreaker()

    def ask_and_tell() -> None:
        if not breaker.is_open():
            breaker.record_success()

    def with_permit() -> None:
        breaker.acquire().succeeded(0.0)

    return {
        "asked": _median_seconds(ask_and_tell) - _median_seconds(_nothing),
        "permit": _median_seconds(with_permit) - _median_seconds(_nothing),
    }


def _nothing() -> None:
    pass


def _median_seconds(call: Callable[[], None]) -> float:
    return statistics.median(_loop_seconds(call) for _ in range(_TIMES))


def _loop_seconds(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    for _ in range(_BREAKER_CALLS):
        call()
    return (time.perf_counter() - started) / _BREAKER_CALLS


CONTENDERS = (
    Contender(name="retry", group="retry", measure=_ours),
    Contender(name="tenacity", group="retry", peer="tenacity", measure=_tenacity),
    Contender(name="stamina", group="retry", peer="stamina", measure=_stamina),
    Contender(name="breaker", group="retry", measure=_breaker),
)
