"""``recovery_strategy``: each value does what it says, for steps of a hive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import ExecutionConfig, Hive, current
from maestro_hive.hive.errors import RunFailedError
from maestro_hive.testing import use
from maestro_hive.unified_execution import Level1Config, Level2Config, RecoveryStrategy

if TYPE_CHECKING:
    from maestro_hive.testing import Kit


class Strategy:
    """A step that fails as often as it is told, executed with a strategy, and what it did."""

    def __init__(
        self, strategy: RecoveryStrategy, failures: int, level2: RecoveryStrategy | None = None
    ) -> None:
        more: dict[str, Any] = {} if level2 is None else {"recovery_strategy": level2}
        config = ExecutionConfig(
            level1=Level1Config(recovery_strategy=strategy, jitter=0),
            level2=Level2Config(max_attempts=2, jitter=0, **more),
        )
        self.hive = Hive("never-made", config)
        self.times: list[float] = []
        self.feedback: list[int] = []
        self.asked = 0
        self.kit: Kit | None = None

        @self.hive.healer(ValueError)
        def advise() -> str:
            self.asked += 1
            return "advice"

        @self.hive.step
        async def work() -> str:
            assert self.kit is not None
            self.times.append(self.kit.clock.now().timestamp())
            self.feedback.append(sum("advice" in each for each in current().feedback))
            if len(self.times) <= failures:
                raise ValueError("no")
            return "done"

        @self.hive.workflow
        async def flow() -> Any:
            return await work()

        self.flow = flow

    def run(self) -> Any:
        with use(self.hive) as self.kit:
            return self.kit.run(self.flow, run_id="r")

    @property
    def waits(self) -> list[float]:
        return [round(b - a, 3) for a, b in zip(self.times, self.times[1:], strict=False)]


def test_retry_same_tries_again_at_once_with_the_same() -> None:
    made = Strategy(RecoveryStrategy.RETRY_SAME, 2)
    assert made.run() == "done"
    assert (made.waits, made.feedback, made.asked) == ([0, 0], [0, 0, 0], 0)


def test_retry_with_backoff_waits_longer_each_time_and_asks_nobody() -> None:
    made = Strategy(RecoveryStrategy.RETRY_WITH_BACKOFF, 2)
    assert made.run() == "done"
    assert (made.waits, made.feedback, made.asked) == ([1, 1.5], [0, 0, 0], 0)


def test_reflect_and_retry_feeds_the_diagnosis_back() -> None:
    made = Strategy(RecoveryStrategy.REFLECT_AND_RETRY, 2)
    assert made.run() == "done"
    assert (made.feedback, made.asked) == ([0, 1, 2], 2)


def test_reflect_and_retry_also_heals_between_rounds() -> None:
    made = Strategy(RecoveryStrategy.REFLECT_AND_RETRY, 3)
    assert made.run() == "done"
    assert (made.feedback, made.asked) == ([0, 1, 2, 3], 3)


def test_escalate_passes_the_first_failure_to_the_next_level() -> None:
    """One attempt in each round, with the long waits of level 2, and then a person."""
    made = Strategy(RecoveryStrategy.ESCALATE, 9)
    with pytest.raises(RunFailedError, match="no"):
        made.run()
    assert (made.waits, made.asked) == ([5], 0)


@pytest.mark.parametrize("level2", [None, RecoveryStrategy.SKIP])
def test_skip_goes_on_without_a_result(level2: RecoveryStrategy | None) -> None:
    made = Strategy(RecoveryStrategy.SKIP, 99, level2)
    assert made.run() is None
    assert (made.asked, set(made.feedback)) == (0, {0})
