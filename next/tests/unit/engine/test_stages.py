"""Stages from outside: rooms such as budgets, healing and escalation use the path of a step so."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.attempt import Attempt, Stage, current
from maestro_hive.engine.config import ExecutionConfig, Level1Config, Level2Config
from maestro_hive.engine.errors import FailureReport, GovernanceViolation, HelpNeeded
from maestro_hive.engine.plan import Plan, StepDefinition
from maestro_hive.engine.retry_policy import Decision
from maestro_hive.engine.step import StepExecution
from maestro_hive.engine.step_stages import StoreStages
from maestro_hive.journal import values
from maestro_hive.journal.effects import Hold, Settle
from maestro_hive.journal.entries import (
    AttemptFailed,
    AttemptStarted,
    Repair,
    RunStarted,
    StepClosed,
    StepCompleted,
    value_text,
)
from maestro_hive.journal.recorded_errors import decode_error
from maestro_hive.journal.recorder import Recorder, RunJournal
from maestro_hive.journal.store import Store, open_store
from maestro_hive.kernel.errors import NoRoomError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from maestro_hive.journal.effects import Effect
    from maestro_hive.journal.entries import Entry
    from maestro_hive.kernel.errors import RefusedError

QUICK = ExecutionConfig(
    level1=Level1Config(base_delay_seconds=0), level2=Level2Config(base_delay_seconds=0)
).frozen()


@pytest.fixture
def store() -> Iterator[Store]:
    made = open_store(":memory:")
    yield made
    made.db.close()


async def execute(store: Store, body: Callable[..., Any], stage: Stage, **options: Any) -> Any:
    """Execute one step without a hive; return its result, or raise its error."""
    recorder = Recorder(store, asyncio.get_running_loop())
    lease = await recorder.acquire("r", RunStarted(workflow="executor"))
    journal = RunJournal(recorder, lease, lambda _: None, lambda _: None)
    journal.load()
    definition = StepDefinition(body, {"name": "work", **options}, QUICK)
    plan = Plan(definition, "r", "work", definition.call((), {}))
    outcome = await StepExecution(plan, journal, StoreStages(store, [lambda _: stage])).run()
    match outcome.entry:
        case StepCompleted():
            return values.decode(value_text(outcome.entry.result))
        case _:
            raise decode_error(value_text(outcome.entry.error))


def kinds(store: Store) -> list[str]:
    return [each.kind for each in store.entries(store.find("r").number)][1:]


async def fail() -> None:
    raise ValueError("no")


async def succeed() -> str:
    return "yes"


class Budget(Stage):
    """Holds an amount with the start, and settles what the attempt spent with its outcome."""

    def __init__(self, store: Store, most: int) -> None:
        self.refusals = 0
        store.define_account("budget/run", most)

    def enter(self, attempt: Attempt) -> Sequence[Effect]:
        return (Hold(attempt.hold, "budget/run", 10),)

    def leave(self, attempt: Attempt) -> Sequence[Effect]:
        return (Settle(attempt.hold, "budget/run", attempt.tokens),)

    async def refused(self, attempt: Attempt, refusal: RefusedError) -> None:
        self.refusals += 1
        if isinstance(refusal, NoRoomError) and refusal.used + 10 > refusal.most:
            raise HelpNeeded("no budget", FailureReport("p", "TOKEN_BUDGET", "used up"))


def test_what_a_stage_claims_is_settled_with_the_outcome_by_what_was_spent(store: Store) -> None:
    async def work() -> str:
        current().spend(7)
        assert store.account("budget/run") == (0, 10, 100)
        return "yes"

    assert asyncio.run(execute(store, work, Budget(store, 100))) == "yes"
    assert store.account("budget/run") == (7, 0, 100)


def test_a_stage_that_never_admits_ends_the_execution_and_no_attempt_is_spent(store: Store) -> None:
    budget = Budget(store, 5)
    with pytest.raises(HelpNeeded, match="no budget"):
        asyncio.run(execute(store, succeed, budget))
    assert budget.refusals == 1
    assert kinds(store) == []


class Policy(Stage):
    def enter(self, attempt: Attempt) -> Sequence[Effect]:
        raise GovernanceViolation("forbidden", "tool")


def test_an_error_of_a_stage_is_not_recorded_as_one_of_the_step(store: Store) -> None:
    with pytest.raises(GovernanceViolation):
        asyncio.run(execute(store, succeed, Policy()))
    assert kinds(store) == []


class Healer(Stage):
    """Adds its finding to the commit of the failure, and a hint for the next attempt."""

    async def on_failure(self, attempt: Attempt) -> Sequence[Entry]:
        await asyncio.sleep(0)
        attempt.feedback += "; try 'yes'"
        repair = Repair(step=attempt.step, attempt=attempt.number, fingerprint="f", healer="h")
        return (repair,)


def test_what_a_stage_finds_about_a_failure_is_part_of_its_commit(store: Store) -> None:
    async def work() -> list[str]:
        if current().attempt == 1:
            raise ValueError("no")
        return current().feedback

    found = asyncio.run(execute(store, work, Healer()))
    assert found == ["Attempt 1 failed: no; try 'yes'"]
    assert kinds(store) == [
        "attempt_started",
        "repair",
        "attempt_failed",
        "attempt_started",
        "step_completed",
    ]
    entries = store.entries(store.find("r").number)
    assert entries[2].at == entries[3].at


class Courage(Stage):
    """Wants one more attempt than the policy allows."""

    async def on_failure(self, attempt: Attempt) -> Sequence[Entry]:
        if attempt.number == 1:
            attempt.decision = Decision(1, 0.0, "it was repaired")
        return ()


def test_a_stage_may_decide_otherwise(store: Store) -> None:
    with pytest.raises(ValueError, match="no"):
        asyncio.run(execute(store, fail, Courage(), max_attempts=1))
    assert kinds(store).count("attempt_started") == 2


class Escalation(Stage):
    """Lets a person decide about a step that has failed for good."""

    async def on_failure(self, attempt: Attempt) -> Sequence[Entry]:
        if attempt.decision is not None and not attempt.decision.round:
            report = FailureReport("p", "UNKNOWN", "no")
            attempt.held = HelpNeeded("a person decides", report)
        return ()


def test_a_step_that_a_stage_holds_has_no_outcome_and_its_failures_stay(store: Store) -> None:
    with pytest.raises(HelpNeeded, match="a person decides"):
        asyncio.run(execute(store, fail, Escalation(), max_attempts=2))
    entries = store.entries(store.find("r").number)
    assert [type(each) for each in entries[1:]] == [AttemptStarted, AttemptFailed] * 2
    assert not any(isinstance(each, StepClosed) for each in entries)
