"""Budgets of personas, runs, queues and days: admission, bankruptcy, and what comes after it."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from maestro_hive import BudgetExceeded, Hive, PersonaExecutor, RunFailedError, current
from maestro_hive.admin.runs import run_details, step_details
from maestro_hive.engine.accounts import Days
from maestro_hive.engine.config import ExecutionConfig, StateConfig, TokenConfig
from maestro_hive.engine.errors import TokenBudgetExceeded, UnpricedModel
from maestro_hive.engine.results import ExecutionStatus
from maestro_hive.kernel.clock import to_micros
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.maestro.state.events import BudgetWarned, RunResumed, RunSuspended, Spent
from tests.tables import for_each

if TYPE_CHECKING:
    from pathlib import Path


def spent(hive: Hive, scope: str, name: str) -> int:
    found = {each.name: each.tokens for each in hive.budget.spent(scope)}
    return found.get(name, 0)


def status(hive: Hive, run_id: str) -> str:
    return next(each.status for each in hive.runs() if each.run_id == run_id)


def events(hive: Hive, run_id: str, kind: type[Any]) -> list[Any]:
    async def read() -> list[Any]:
        found = [each async for each in hive.events(run_id, follow=False)]
        return [each for each in found if isinstance(each, kind)]

    return asyncio.run(read())


class Program:
    """A workflow whose steps spend so much each, and what they were called with."""

    def __init__(self, hive: Hive, tokens: int = 60, **options: Any) -> None:
        self.calls: list[int] = []
        self.most = self.active = 0

        @hive.step(persona="architect", **options)
        async def ask(number: int) -> dict[str, int]:
            self.calls.append(number)
            self.active += 1
            self.most = max(self.most, self.active)
            await self.meeting(number)
            self.active -= 1
            return {"answer": number, "tokens_used": tokens}

        @hive.workflow
        async def in_order(count: int) -> list[int]:
            return [(await ask(number))["answer"] for number in range(count)]

        @hive.workflow
        async def at_once(count: int) -> list[int]:
            found = await asyncio.gather(*(ask(number) for number in range(count)))
            return [each["answer"] for each in found]

        @hive.workflow
        async def parent(count: int) -> int:
            return sum([len(await in_order(each)) for each in range(1, count + 1)])

        self.ask, self.in_order, self.at_once, self.parent = ask, in_order, at_once, parent
        #: The first of the calls that wait until another one is made at the same time.
        self.meets_from: int | None = None

    async def meeting(self, number: int) -> None:
        """Give others their turn; wait for a second call, if one has to come."""
        await asyncio.sleep(0.005)
        if self.meets_from is not None and number >= self.meets_from:
            async with asyncio.timeout(30):
                while self.most < 2:  # noqa: ASYNC110 - it is looked at, not told
                    await asyncio.sleep(0.001)


# --- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("amount", ["$0.0000001", {"tokens": None}, {"usd": None}, {}])
def test_an_amount_that_limits_nothing_or_everything_is_refused(hive: Hive, amount: Any) -> None:
    program = Program(hive)
    with pytest.raises(ConfigurationError, match="budget"):
        hive.run_sync(program.in_order, 1, run_id="r", budget=amount)
    assert program.calls == []


def test_a_call_without_a_price_costs_the_most_that_its_step_says(hive: Hive) -> None:
    program = Program(hive, max_usd=0.02, model="brand-new-model")
    with pytest.raises(BudgetExceeded):
        hive.run_sync(program.in_order, 10, run_id="r", budget="$0.05")
    assert program.calls == [0, 1]


def test_a_model_without_a_price_is_refused_after_one_with_a_price(hive: Hive) -> None:
    calls: list[int] = []

    @hive.step
    async def ask(number: int) -> dict[str, Any]:
        calls.append(number)
        model = "brand-new-model" if number else "claude-sonnet-4-5"
        return {"model": model, "usage": {"input_tokens": 1000, "output_tokens": 1000}}

    @hive.workflow
    async def work() -> None:
        for number in range(10):
            await ask(number)

    with pytest.raises(UnpricedModel, match="brand-new-model"):
        hive.run_sync(work, run_id="r", budget="$1")
    assert calls == [0, 1]


def test_a_hive_has_no_limit_until_one_is_set_and_says_what_was_spent(hive: Hive) -> None:
    program = Program(hive, tokens=90_000)
    assert hive.run_sync(program.in_order, 8, run_id="r") == list(range(8))
    assert spent(hive, "persona", "architect") == spent(hive, "run", "r") == 720_000
    assert [each.token_limit for each in hive.budget.spent()] == [None] * 3


def test_eight_at_once_of_60_tokens_spend_no_more_than_100(hive: Hive) -> None:
    """They used to spend 480."""
    program = Program(hive, max_tokens=60)
    with pytest.raises(BudgetExceeded) as caught:
        hive.run_sync(program.at_once, 8, run_id="r", budget=100)
    assert len(program.calls) == 1
    assert spent(hive, "run", "r") == 60
    error = caught.value
    assert (error.account, error.unit, error.used, error.limit) == ("run:r", "tokens", 60, 100)
    assert "maestro budget raise run r --tokens" in str(error)


def test_a_parent_is_charged_for_its_children_to_any_depth(hive: Hive) -> None:
    """A parent limited to 1,000 tokens used to spend 8,000 through its children."""
    program = Program(hive, tokens=100, max_tokens=100)

    @hive.workflow
    async def grandparent() -> int:
        return await program.parent(4)

    with pytest.raises(BudgetExceeded):
        hive.run_sync(grandparent, run_id="r", budget=550)
    assert len(program.calls) == 5
    assert spent(hive, "run", "r") == 500
    children = {each.name: each.tokens for each in hive.budget.spent("run")}
    assert sorted(children.values()) == [100, 200, 200, 500, 500]
    assert {each.status for each in hive.runs(roots=True)} == {"bankrupt"}


@pytest.mark.parametrize("scope", ["persona", "run", "day"])
def test_a_bankrupt_run_goes_on_when_its_limit_is_raised(hive: Hive, scope: str) -> None:
    program = Program(hive, max_tokens=60)
    which: dict[str, Any] = {"persona": "architect", "run": "r", "day": "today"}
    hive.budget.set_limit(100, **{scope: which[scope]})
    for _ in range(2):  # without a raise it stays bankrupt
        with pytest.raises(BudgetExceeded, match="is used up: 60 tokens of 100 tokens"):
            hive.run_sync(program.in_order, 3, run_id="r")
        assert program.calls == [0]
        assert status(hive, "r") == "bankrupt"
    hive.budget.raise_limit(100, **{scope: which[scope]})
    assert hive.run_sync(program.in_order, 3, run_id="r") == [0, 1, 2]
    assert program.calls == [0, 1, 2]
    assert status(hive, "r") == "success"
    assert len(events(hive, "r", RunSuspended)) == 1


def test_the_workflow_sees_nothing_of_it(hive: Hive) -> None:
    program = Program(hive, max_tokens=60)
    caught: list[Exception] = []

    @hive.workflow
    async def careful() -> str:
        try:
            await program.ask(1)
            await program.ask(2)
        except Exception as error:  # noqa: BLE001 - whatever it would see
            caught.append(error)
        return "done"

    with pytest.raises(BudgetExceeded):
        hive.run_sync(careful, run_id="r", budget=100)
    assert caught == []
    hive.budget.raise_limit(20, run="r")
    assert hive.run_sync(careful, run_id="r", budget=100) == "done"


def test_a_steps_own_budget_raises_and_is_recorded(hive: Hive) -> None:
    calls: list[int] = []

    @hive.step(budget="$0.50", max_attempts=5)
    async def ask() -> None:
        calls.append(1)
        current().spend(usd=0.3)
        raise OSError("try again")

    @hive.workflow
    async def build() -> str:
        try:
            await ask()
        except TokenBudgetExceeded as error:
            return error.message
        return "enough"

    hive.budget.set_limit("$9", persona="*")
    for _ in range(2):
        text = hive.run_sync(build, run_id="r")
        assert "Budget of the step exceeded" in text
        assert "0.600000 of 0.500000 USD" in text
    assert len(calls) == 2


def test_the_usage_of_a_result_counts_for_a_steps_own_budget(hive: Hive) -> None:
    program = Program(hive, tokens=1_000, budget=100)
    with pytest.raises(RunFailedError, match="Token budget of the step exceeded"):
        hive.run_sync(program.in_order, 1, run_id="r")
    assert program.calls == [0]
    assert spent(hive, "run", "r") == 1_000


def test_what_is_spent_beyond_the_reservation_is_recorded_and_exhausts_the_budget(
    hive: Hive,
) -> None:
    program = Program(hive, tokens=500, max_tokens=10)
    with pytest.raises(BudgetExceeded, match="500 tokens of 100 tokens"):
        hive.run_sync(program.in_order, 2, run_id="r", budget=100)
    assert program.calls == [0]
    hive.budget.raise_limit(1_000, run="r")
    assert hive.run_sync(program.in_order, 2, run_id="r", budget=100) == [0, 1]
    assert program.calls == [0, 1], "what was paid for was recorded as completed"


def test_spend_stops_a_step_that_goes_over_a_limit(hive: Hive) -> None:
    calls: list[int] = []

    @hive.step
    async def loop() -> str:
        calls.append(0)
        for number in range(1, 100):
            current().spend(tokens=40)
            calls.append(number)
        return "done"

    @hive.workflow
    async def build() -> str:
        return await loop()

    with pytest.raises(BudgetExceeded):
        hive.run_sync(build, run_id="r", budget=100)
    assert calls == [0, 1, 2]
    assert spent(hive, "run", "r") == 120
    hive.budget.raise_limit(10_000, run="r")
    assert hive.run_sync(build, run_id="r", budget=100) == "done"


def test_spend_goes_by_a_limit_that_was_raised_while_the_step_is_executed(hive: Hive) -> None:
    @hive.step
    async def loop() -> str:
        for number in range(4):
            if number == 1:
                await asyncio.to_thread(hive.budget.raise_limit, 60, run="r")
            current().spend(tokens=40)
        return "done"

    @hive.workflow
    async def build() -> str:
        return await loop()

    assert hive.run_sync(build, run_id="r", budget=100) == "done"
    assert spent(hive, "run", "r") == 160


def test_the_spending_of_failed_attempts_counts(hive: Hive) -> None:
    class WithUsageError(OSError):
        usage: ClassVar = {"total_tokens": 30}

    @hive.step(max_attempts=3, retry_on=lambda _: 0.0)
    async def ask() -> str:
        if current().attempt < 3:
            raise WithUsageError
        return "done"

    @hive.workflow
    async def build() -> str:
        return await ask()

    hive.run_sync(build, run_id="r")
    assert spent(hive, "run", "r") == 60
    assert [each.tokens for each in events(hive, "r", Spent)] == [30, 30]


# --- how much a call will spend -------------------------------------------------------------------


def test_calls_of_unknown_size_are_made_one_at_a_time_until_one_is_known(hive: Hive) -> None:
    program = Program(hive, tokens=60)
    hive.budget.set_limit(10_000, persona="architect")
    hive.run_sync(program.at_once, 6, run_id="r")
    first, rest = program.calls[:1], program.calls[1:]
    assert first == [0]
    assert len(rest) == 5
    estimate = hive._open().estimate("architect", "ask")
    assert estimate is not None
    assert estimate.tokens == 60
    program.most, program.meets_from = 0, 0
    hive.run_sync(program.at_once, 6, run_id="known")
    assert 2 <= program.most <= 6
    program.calls.clear()
    program.meets_from = None
    with pytest.raises(BudgetExceeded):
        hive.run_sync(program.at_once, 9, run_id="s", budget=150)
    assert len(program.calls) == 2, "the estimate is reserved"


def test_an_estimate_is_said_to_be_one(hive: Hive) -> None:
    program = Program(hive, tokens=60)
    hive.run_sync(program.in_order, 3, run_id="r", budget=1_000)
    shown = [step_details(hive._open(), "r", str(number)).attempts[0] for number in (1, 2)]
    assert [each.reserved for each in shown] == [
        {},
        {"estimated": True, "tokens": 60},
    ]


def test_a_call_waits_for_what_others_have_reserved(hive: Hive) -> None:
    program = Program(hive, tokens=10, max_tokens=60)
    hive.run_sync(program.at_once, 8, run_id="r", budget=140)
    assert sorted(program.calls) == list(range(8))
    assert program.most <= 2
    assert spent(hive, "run", "r") == 80


def test_a_call_inside_of_another_does_not_wait_for_it(tmp_path: Path) -> None:
    config = ExecutionConfig(state=StateConfig(state_dir=str(tmp_path)))

    async def inner() -> dict[str, int]:
        return {"tokens_used": 1}

    async def outer() -> str:
        with PersonaExecutor(config, "architect", workflow_id="inner") as executor:
            return (await executor.execute(inner, "inner")).final_status.value

    with Hive(tmp_path) as hive:
        hive.budget.set_limit(100, persona="architect")
        with PersonaExecutor(config, "architect", workflow_id="outer") as executor:
            result = asyncio.run(asyncio.wait_for(executor.execute(outer, "outer"), 20))
    assert result.final_output == "success"


def test_executors_answer_bankrupt_by_a_shared_budget(tmp_path: Path) -> None:
    config = ExecutionConfig(state=StateConfig(state_dir=str(tmp_path)))
    calls: list[int] = []

    async def ask(number: int) -> dict[str, int]:
        calls.append(number)
        return {"tokens_used": 60}

    with (
        Hive(tmp_path) as hive,
        PersonaExecutor(config, "architect", workflow_id="w") as executor,
    ):
        hive.budget.set_limit(100, persona="architect")
        first, second, third = (
            asyncio.run(executor.execute(ask, "ask", number)) for number in range(3)
        )
        assert first.success
        assert second.final_status is third.final_status is ExecutionStatus.BANKRUPT
        assert second.failure_report is not None
        assert "maestro budget raise persona architect" in second.failure_report.details
    assert calls == [0]


@pytest.mark.parametrize("run", [None, "w"])
def test_executors_at_once_do_not_exceed_a_limit_of_theirs(tmp_path: Path, run: str | None) -> None:
    config = ExecutionConfig(
        state=StateConfig(state_dir=str(tmp_path)), tokens=TokenConfig(max_tokens_per_persona=100)
    )
    calls: list[int] = []

    async def ask(number: int) -> dict[str, int]:
        calls.append(number)
        await asyncio.sleep(0.01)
        return {"tokens_used": 60}

    async def main(executor: PersonaExecutor) -> list[str]:
        found = await asyncio.gather(*(executor.execute(ask, "ask", each) for each in range(8)))
        return [each.final_status.value for each in found]

    with PersonaExecutor(config, "a", workflow_id=run) as executor:
        statuses = asyncio.run(main(executor))
    assert len(calls) == 2, "one more than the budget has: nobody knew what the first would use"
    assert sorted(statuses) == ["bankrupt"] * 7 + ["success"]


# --- money ---------------------------------------------------------------------------------------


def priced(hive: Hive, used: str, **options: Any) -> Any:
    @hive.step(persona="writer", **options)
    async def ask(number: int) -> dict[str, Any]:
        return {"model": used, "usage": {"input_tokens": 1_000, "output_tokens": 1_000}}

    @hive.workflow
    async def build(count: int) -> int:
        return len([await ask(number) for number in range(count)])

    return build


def test_a_limit_in_money_holds_by_the_prices_of_models(tmp_path: Path) -> None:
    prices = {"mine": {"input": 1, "output": 9}}
    with Hive(tmp_path, budget={"day": "$0.025"}, prices=prices) as hive:
        build = priced(hive, "mine")
        with pytest.raises(BudgetExceeded, match=r"0.020000 USD of 0.025000 USD") as caught:
            hive.run_sync(build, 5, run_id="r")
        assert caught.value.unit == "usd"
        (view,) = hive.budget.spent("day")
        assert (view.usd, view.usd_limit, view.tokens) == (0.02, 0.025, 4_000)


def test_a_model_without_a_price_is_refused_under_a_limit_in_money(tmp_path: Path) -> None:
    with Hive(tmp_path) as hive:
        build = priced(hive, "unknown-1")
        hive.run_sync(build, 2, run_id="free")
        hive.budget.set_limit("$1", persona="writer")
        with pytest.raises(UnpricedModel, match="'unknown-1', which has no price"):
            hive.run_sync(build, 2, run_id="r")
        assert status(hive, "r") == "bankrupt"
    with Hive(tmp_path) as hive:
        build = priced(hive, "unknown-1", model="other")
        with pytest.raises(UnpricedModel, match="'other'"):
            hive.run_sync(build, 2, run_id="s")
    with Hive(tmp_path, prices={"unknown-1": {"input": 1, "output": 1}}) as hive:
        assert hive.run_sync(priced(hive, "unknown-1"), 2, run_id="r") == 2
        (view,) = hive.budget.spent("persona")
        assert view.usd == 0.004


@pytest.mark.parametrize("by", ["option", "result"])
def test_a_model_without_a_price_is_refused_under_a_steps_own_budget_in_money(
    tmp_path: Path, by: str
) -> None:
    options = {"model": "unknown-1"} if by == "option" else {}
    with Hive(tmp_path) as hive:
        build = priced(hive, "unknown-1", budget="$1", **options)
        with pytest.raises(UnpricedModel, match="'unknown-1', which has no price"):
            hive.run_sync(build, 2, run_id="r")
        assert status(hive, "r") == "bankrupt"
        # A result tells the model, and then it is paid for: the next call is refused.
        assert spent(hive, "run", "r") == (0 if by == "option" else 2_000)
    with Hive(tmp_path, prices={"unknown-1": {"input": 1, "output": 1}}) as hive:
        build = priced(hive, "unknown-1", budget="$1", **options)
        assert hive.run_sync(build, 2, run_id="r") == 2


# --- warnings, and what is shown ------------------------------------------------------------------


def test_warnings_are_events_and_log_lines_once_each(
    hive: Hive, caplog: pytest.LogCaptureFixture
) -> None:
    program = Program(hive, tokens=10, max_tokens=10)
    with caplog.at_level(logging.WARNING, "maestro_hive.budgets"):
        hive.run_sync(program.in_order, 10, run_id="r", budget=100)
    warned = events(hive, "r", BudgetWarned)
    assert [(each.percent, each.used) for each in warned] == [(50, 50), (80, 80), (95, 100)]
    assert str(warned[0]) == "50 % of the budget of run r is used up: 50 of 100 tokens"
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "50% of the budget of run r is used up: 50 of 100 tokens"
    assert len(lines) == 3


def test_what_resuming_saved_is_counted(hive: Hive, caplog: pytest.LogCaptureFixture) -> None:
    program = Program(hive, max_tokens=60)
    with pytest.raises(BudgetExceeded):
        hive.run_sync(program.in_order, 3, run_id="r", budget=100)
    hive.budget.raise_limit(60, run="r")
    with pytest.raises(BudgetExceeded):
        hive.run_sync(program.in_order, 3, run_id="r", budget=100)
    hive.budget.raise_limit(60, run="r")
    with caplog.at_level(logging.INFO, "maestro_hive.runs"):
        hive.run_sync(program.in_order, 3, run_id="r", budget=100)
    assert [each.saved_tokens for each in events(hive, "r", RunResumed)] == [60, 120]
    shown = run_details(hive._open(), "r")
    assert (shown.tokens, shown.saved_tokens) == (180, 180)
    assert "resuming saved 180 tokens" in caplog.text
    assert program.calls == [0, 1, 2]


# --- days, queues, workers ------------------------------------------------------------------------


def test_a_day_is_utc_unless_a_zone_is_set(hive: Hive) -> None:
    late = to_micros(datetime(2026, 3, 28, 23, 30, tzinfo=UTC))
    assert Days(None).name(late) == "2026-03-28"
    berlin = Days("Europe/Berlin")
    assert berlin.name(late) == "2026-03-29"
    # The day on which clocks are put forward has 23 hours.
    assert berlin.seconds_left(late) == 22.5 * 3600
    assert Days(None).seconds_left(late) == 1800
    hive.budget.set_limit(tokens=10**9, day=True, zone="Pacific/Kiritimati")
    program = Program(hive)
    hive.run_sync(program.in_order, 1, run_id="r")
    (view,) = hive.budget.spent("day")
    expected = Days("Pacific/Kiritimati").name(hive._open().clock.nanos() // 1000)
    assert (view.name, view.token_limit) == (expected, 10**9)


def test_workers_go_on_by_themselves_when_the_budget_of_a_queue_is_raised(hive: Hive) -> None:
    program = Program(hive, max_tokens=60)
    hive.budget.set_limit(100, queue="mail")

    async def main() -> Any:
        async with hive.worker(["mail"]):
            run = hive.enqueue(program.parent, 2, queue="mail", run_id="r")
            for _ in range(2_000):
                if status(hive, "r") == "bankrupt":
                    break
                await asyncio.sleep(0.01)
            assert program.calls == [0]
            await asyncio.sleep(0.2)
            assert program.calls == [0], "nothing more is called"
            hive.budget.raise_limit(1_000, queue="mail")
            return await asyncio.wait_for(run.result(), 30)

    assert asyncio.run(main()) == 3
    assert program.calls == [0, 0, 1]
    assert spent(hive, "queue", "mail") == 180


def test_a_run_that_is_enqueued_has_its_own_budget(hive: Hive) -> None:
    program = Program(hive, max_tokens=60)

    async def main() -> None:
        hive.enqueue(program.in_order, 3, run_id="r", budget=70)
        async with hive.worker():
            for _ in range(2_000):
                if status(hive, "r") == "bankrupt":
                    return
                await asyncio.sleep(0.01)

    asyncio.run(main())
    assert status(hive, "r") == "bankrupt"
    assert program.calls == [0]


# --- what is given by programs --------------------------------------------------------------------


def test_what_a_program_declares_does_not_undo_a_raise(tmp_path: Path) -> None:
    def life(budget: Any) -> Any:
        with Hive(tmp_path, budget=budget) as hive:
            program = Program(hive, max_tokens=60)
            return hive.run_sync(program.in_order, 3, run_id="r")

    with pytest.raises(BudgetExceeded):
        life({"persona": {"architect": 100}})
    with Hive(tmp_path) as hive:
        hive.budget.raise_limit(1_000, persona="architect")
    assert life({"persona": {"architect": 100}}) == [0, 1, 2]
    with Hive(tmp_path, budget={"persona": {"architect": 200}, "run": "$3"}) as hive:
        hive.runs()
        limits = hive._open().limits().by_account
    assert limits["persona:architect"].tokens == 200, "another wish is a new one"
    assert limits["run:*"].usd == 3_000_000


def test_a_workflow_may_have_an_argument_called_budget(hive: Hive) -> None:
    @hive.workflow
    async def build(budget: int) -> int:
        return budget

    assert hive.run_sync(build, run_id="r", budget=5) == 5
    assert hive._open().limits().by_account == {}


@for_each(
    "call, text",
    [
        (lambda hive: hive.budget.set_limit(5), "give one of persona="),
        (lambda hive: hive.budget.set_limit(5, persona="a", run="b"), "give one of persona="),
        (lambda hive: hive.budget.set_limit(0, persona="a"), "over 0"),
        (lambda hive: hive.budget.set_limit("5 apples", persona="a"), r"\$2.50"),
        (lambda hive: hive.budget.set_limit("1000", persona="a"), r"\$2.50"),
        (lambda hive: hive.budget.set_limit(5, day="tomorrow"), "date"),
        (lambda hive: hive.budget.set_limit(5, persona="a", zone="UTC"), "zone"),
        (lambda hive: hive.budget.set_limit(5, day=True, zone="Mars/Base"), "time zone"),
        (lambda hive: hive.budget.raise_limit(5, persona="a"), "no limit in tokens"),
        (lambda hive: hive.budget.raise_limit(persona="a"), "how much more"),
        (lambda hive: hive.budget.raise_limit(5, persona="*"), "each persona .* set persona --tok"),
        (lambda _: Hive("x", budget={"team": 5}), "must be an amount for each run, or amounts by"),
        (lambda _: Hive("x", budget={"day": {"today": 5}}), "a date as in"),
        (lambda _: Hive("x", budget={"day": {"2026-99-01": 5}}), "a date as in"),
        (lambda _: Hive("x", budget={"persona": {"": 5}}), "must be a name"),
        (lambda _: Hive("x", budget=-1), "over 0"),
    ],
)
def test_wrong_budgets_are_refused_with_the_way_out(hive: Hive, call: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        call(hive)
