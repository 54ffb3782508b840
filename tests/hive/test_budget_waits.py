"""Calls that wait for a budget: in what order, for how long, and what may go on meanwhile."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import BudgetExceeded, ExecutionConfig, Hive, current
from maestro_hive.admin.runs import step_details
from maestro_hive.engine.accounts import Days, Ledger, Sizing, ledger_of
from maestro_hive.engine.config import TokenConfig
from maestro_hive.hive.active_run import active_here
from maestro_hive.kernel.clock import SystemClock
from maestro_hive.maestro.state.budgets import Estimate, Settle
from maestro_hive.maestro.state.records import DispatchState, EntryKind, NewEntry
from maestro_hive.maestro.state.store import Append
from tests.hive.conftest import quick_config
from tests.hive.test_budgets import Program, spent, status

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime
    from pathlib import Path

#: How long a test waits for what has to happen.
PATIENCE = 30


def run(hive: Hive, workflow: Any, *args: Any, **how: Any) -> Any:
    """Run a workflow; a call that waits for ever fails the test instead."""

    async def main() -> Any:
        async with asyncio.timeout(PATIENCE):
            return await hive.run(workflow, *args, **how)

    return asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - it is looked at, not told
            await asyncio.sleep(0.005)


# --- calls inside of calls ------------------------------------------------------------------------


class Nested:
    """Steps that await steps, to a depth; each says what it used itself."""

    def __init__(self, hive: Hive, outer: Any = None, inner: Any = None, tokens: int = 10) -> None:
        self.calls: list[str] = []

        @hive.step(persona="a", **(inner or {}))
        async def ask(name: str) -> dict[str, int]:
            self.calls.append(name)
            await asyncio.sleep(0.005)
            return {"tokens_used": tokens}

        @hive.workflow
        async def child(name: str) -> None:
            await ask(name)

        @hive.step(persona="a", **(outer or {}))
        async def think(depth: int, name: str) -> dict[str, int]:
            self.calls.append(f"{name}{depth}")
            if depth > 1:
                await think(depth - 1, name)
            else:
                await asyncio.gather(ask(f"{name}-ask"), child(f"{name}-child"))
            return {"tokens_used": tokens}

        @hive.workflow
        async def work(depth: int, names: list[str]) -> int:
            await asyncio.gather(*(think(depth, name) for name in names))
            return len(self.calls)

        self.work = work


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("scope", ["run", "persona", "day"])
def test_a_call_of_unknown_size_may_await_others_under_its_own_limit(
    hive: Hive, depth: int, scope: str
) -> None:
    """It was bankrupt with nothing spent, and raising the limit did not help."""
    nested = Nested(hive)
    name: dict[str, Any] = {"run": "r", "persona": "a", "day": True}
    hive.budget.set_limit(1_000, **{scope: name[scope]})
    assert run(hive, nested.work, depth, ["x", "y"], run_id="r") == 2 * (depth + 2)
    assert spent(hive, "run", "r") == 20 * (depth + 2)


def test_what_an_outer_call_has_reserved_does_not_count_against_an_inner_one(hive: Hive) -> None:
    nested = Nested(hive, outer={"max_tokens": 60}, inner={"max_tokens": 60})
    assert run(hive, nested.work, 1, ["x"], run_id="r", budget=100) == 3
    assert spent(hive, "run", "r") == 30


def test_an_inner_call_without_room_is_bankrupt_and_goes_on_after_a_raise(hive: Hive) -> None:
    nested = Nested(hive, outer={"max_tokens": 10}, inner={"max_tokens": 60}, tokens=60)
    with pytest.raises(BudgetExceeded, match="run 'r' is used up: 60 tokens of 100 tokens"):
        run(hive, nested.work, 1, ["x"], run_id="r", budget=100)
    asked = [each for each in nested.calls if each != "x1"]
    assert len(asked) == 1, "the second inner call has no room after the first"
    hive.budget.raise_limit(1_000, run="r")
    run(hive, nested.work, 1, ["x"], run_id="r", budget=100)
    asked = [each for each in nested.calls if each != "x1"]
    assert sorted(asked) == ["x-ask", "x-child"], "what was completed was not paid again"


def test_inner_calls_of_unknown_size_do_not_wait_for_each_others_outer_calls(hive: Hive) -> None:
    nested = Nested(hive, outer={"max_tokens": 10})
    names = ["x", "y", "z"]
    assert run(hive, nested.work, 2, names, run_id="r", budget=1_000) == 4 * len(names)


def test_inner_calls_that_only_each_others_outer_calls_keep_out_are_bankrupt(hive: Hive) -> None:
    """Each would wait for ever: the outer calls end when the inner ones have."""
    started: list[str] = []

    @hive.step(max_tokens=80)
    async def ask(name: str) -> dict[str, int]:
        return {"tokens_used": 1}

    @hive.step(max_tokens=50)
    async def think(name: str) -> dict[str, int]:
        started.append(name)
        await until(lambda: len(started) > 1)
        await ask(name)
        return {"tokens_used": 1}

    @hive.workflow
    async def work() -> None:
        await asyncio.gather(think("x"), think("y"))

    with pytest.raises(BudgetExceeded, match=r"50 tokens reserved by calls that wait themselves"):
        run(hive, work, run_id="r", budget=100)
    hive.budget.raise_limit(100, run="r")
    started.clear()
    run(hive, work, run_id="r", budget=100)
    assert spent(hive, "run", "r") == 4


def test_a_step_may_await_a_run_that_it_enqueued_under_one_limit(hive: Hive) -> None:
    """The run's step waited for the step that waited for the run."""

    @hive.step(persona="a")
    async def ask() -> dict[str, int]:
        return {"tokens_used": 10}

    @hive.workflow
    async def enqueued() -> None:
        await ask()

    @hive.step(persona="a")
    async def delegate() -> dict[str, int]:
        await hive.enqueue(enqueued, run_id="enqueued").result()
        return {"tokens_used": 10}

    @hive.step(persona="a")
    async def think() -> dict[str, int]:
        return await delegate() | {"tokens_used": 10}

    @hive.workflow
    async def work() -> None:
        await think()

    async def main() -> None:
        async with asyncio.timeout(PATIENCE), hive.worker():
            await hive.run(work, run_id="r")

    hive.budget.set_limit(1_000, persona="a")
    asyncio.run(main())
    assert spent(hive, "persona", "a") == 30


# --- bankrupt -------------------------------------------------------------------------------------


class Siblings:
    """A branch that a budget stops, next to one of another persona whose call is in flight."""

    def __init__(self, hive: Hive) -> None:
        self.calls: list[str] = []
        self.hive = hive

        @hive.step(persona="limited", max_tokens=60)
        async def ask(number: int) -> dict[str, int]:
            self.calls.append(f"ask {number}")
            if number == 0:
                await until(lambda: "long" in self.calls)
            return {"tokens_used": 60}

        @hive.step(persona="free", max_attempts=3)
        async def long(how: str = "") -> dict[str, int]:
            self.calls.append("long")
            await until(self.is_bankrupt)
            if how == "fails":
                raise OSError("try again")
            return {"tokens_used": 60}

        @hive.step(persona="free")
        async def after() -> None:
            self.calls.append("after")

        @hive.workflow
        async def in_child() -> None:
            await long()
            await after()

        @hive.workflow
        async def limited() -> None:
            await ask(0)
            await ask(1)

        @hive.workflow
        async def work() -> str:
            await asyncio.gather(limited(), in_child())
            return "done"

        @hive.workflow
        async def with_retry() -> None:
            await asyncio.gather(limited(), long("fails"))

        self.work, self.with_retry = work, with_retry

    def is_bankrupt(self) -> bool:
        """Return whether a budget has refused a call of the run."""
        found = active_here(self.hive._open(), "r")
        return (
            found is not None
            and found.active is not None
            and isinstance(found.active.run.refusal, BudgetExceeded)
        )


def test_calls_in_flight_end_before_a_bankrupt_run_is_suspended(hive: Hive) -> None:
    """They were cancelled, and each resume paid for them again."""
    siblings = Siblings(hive)
    hive.budget.set_limit(100, persona="limited")
    with pytest.raises(BudgetExceeded):
        run(hive, siblings.work, run_id="r")
    assert sorted(siblings.calls) == ["ask 0", "long"], "nothing more is called"
    assert status(hive, "r") == "bankrupt"
    assert spent(hive, "persona", "free") == 60
    for _ in range(2):
        with pytest.raises(BudgetExceeded):
            run(hive, siblings.work, run_id="r")
    hive.budget.raise_limit(100, persona="limited")
    assert run(hive, siblings.work, run_id="r") == "done"
    assert siblings.calls.count("long") == siblings.calls.count("after") == 1
    assert spent(hive, "persona", "free") == 60


def test_a_call_in_flight_that_fails_is_not_retried_in_a_bankrupt_run(hive: Hive) -> None:
    siblings = Siblings(hive)
    hive.budget.set_limit(100, persona="limited")
    with pytest.raises(BudgetExceeded):
        run(hive, siblings.with_retry, run_id="r")
    assert sorted(siblings.calls) == ["ask 0", "long"]


def test_only_the_account_that_refused_makes_a_bankrupt_run_due(hive: Hive) -> None:
    program = Program(hive, max_tokens=60)
    hive.budget.set_limit(100, persona="architect")
    hive.budget.set_limit(1_000, queue="default")
    starts: list[int] = []

    @hive.workflow
    async def work() -> int:
        starts.append(1)
        return len(await program.in_order(3))

    async def main() -> int:
        run = hive.enqueue(work, run_id="r")
        async with asyncio.timeout(PATIENCE):
            async with hive.worker():
                await until(lambda: status(hive, "r") == "bankrupt")
            store = hive._open()
            hive.budget.raise_limit(10, queue="default")
            hive.budget.set_limit(5, persona="nobody")
            hive.budget.set_limit(10**6, run="*")
            hive.budget.release(queue="default")
            found = store.dispatch("r")
            assert found is not None
            assert found.state is DispatchState.HELD
            hive.budget.raise_limit(1_000, persona="architect")
            async with hive.worker():
                return await run.result()

    assert asyncio.run(main()) == 3
    assert starts == [1, 1]


# --- many, and in order ---------------------------------------------------------------------------


class CountedReads:
    """How often the budgets of a store are read."""

    def __init__(self, hive: Hive, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        store = hive._open()
        for name in ("account", "accounts", "reservations", "limits"):
            monkeypatch.setattr(store, name, self._counted(getattr(store, name)))

    def _counted(self, read: Any) -> Any:
        def counted(*args: Any) -> Any:
            self.count += 1
            return read(*args)

        return counted


def test_what_waiting_costs_grows_with_the_calls_and_not_with_their_square(
    hive: Hive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 calls that waited took 17 s, and 0.3 s without a limit."""
    program = Program(hive, tokens=1, max_tokens=50)
    reads = CountedReads(hive, monkeypatch)
    count = 150
    run(hive, program.at_once, count, run_id="r", budget=400)
    assert len(program.calls) == count
    assert reads.count < 20 * count


def test_calls_that_wait_are_made_in_the_order_in_which_they_came(hive: Hive) -> None:
    """A large one is not overtaken by small ones for ever."""
    order: list[str] = []

    def step(tokens: int) -> Any:
        @hive.step(name=f"ask-{tokens}", max_tokens=tokens)
        async def ask(name: str) -> dict[str, int]:
            order.append(name)
            if name in ("a0", "b0", "c0"):
                await until(
                    lambda: "large" in order or ledger.queue.first_waited_for(limits) is not None
                )
            return {"tokens_used": 1}

        return ask

    ledger, limits = ledger_of(hive._open()), (("run:r", 340, None),)
    small, large = step(60), step(300)

    @hive.workflow
    async def work() -> None:
        async def chain(name: str) -> None:
            for number in range(10):
                await small(f"{name}{number}")

        await asyncio.gather(chain("a"), chain("b"), large("large"), chain("c"))

    run(hive, work, run_id="r", budget=340)  # next to the large one there is no room for another
    assert order.index("large") <= 3


def test_a_call_that_waits_is_not_refused_by_a_limit_that_was_raised_meanwhile(hive: Hive) -> None:
    """The limits were read twice a second: in between, a run was bankrupt by those of before."""
    ledger, limits = ledger_of(hive._open()), (("run:r", 100, None),)

    @hive.step(max_tokens=60)
    async def ask(number: int) -> dict[str, int]:
        if number == 0:
            await until(lambda: ledger.queue.first_waited_for(limits) is not None)
            await asyncio.to_thread(hive.budget.raise_limit, 100, run="r")
        return {"tokens_used": 60}

    @hive.workflow
    async def work() -> int:
        return len(await asyncio.gather(ask(0), ask(1)))

    assert run(hive, work, run_id="r", budget=100) == 2


def test_calls_that_wait_together_are_made_at_once_when_the_first_has_told(hive: Hive) -> None:
    """Each of them was made alone, although the first one had shown what they use."""
    started: list[int] = []

    @hive.step
    async def ask(number: int) -> dict[str, int]:
        started.append(number)
        if started[0] != number:
            await until(lambda: len(started) == 8)
        return {"tokens_used": 10}

    @hive.workflow
    async def work() -> int:
        return len(await asyncio.gather(*map(ask, range(8))))

    assert run(hive, work, run_id="r", budget=1000) == 8


# --- days, estimates, rates -----------------------------------------------------------------------


class ShiftedClock(SystemClock):
    """The system's clock, some seconds ahead."""

    shift = 0.0

    def nanos(self) -> int:
        return SystemClock.nanos() + int(self.shift * 1e9)

    def now(self) -> datetime:
        return SystemClock.now() + timedelta(seconds=self.shift)


def test_a_call_that_waits_over_midnight_is_of_the_next_day(hive: Hive) -> None:
    """It was bankrupt by what was spent on the day before."""
    clock = ShiftedClock()
    store: Any = hive._open()
    store.clock = clock
    hive.budget.set_limit(100, day=True)
    ledger = ledger_of(store)
    calls: list[int] = []

    @hive.step(max_tokens=60)
    async def ask(number: int) -> dict[str, int]:
        calls.append(number)
        if number == 0:
            today = Days(None).name(clock.nanos() // 1000)
            limit = (f"day:{today}", 100, None)
            await until(lambda: ledger.queue.first_waited_for((limit,)) is not None)
            clock.shift += 24 * 3600
        return {"tokens_used": 60}

    @hive.workflow
    async def work() -> None:
        await asyncio.gather(ask(0), ask(1))

    run(hive, work, run_id="r")
    assert calls == [0, 1]
    assert [each.tokens for each in hive.budget.spent("day")] == [60, 60]


def learn(hive: Hive, estimate: Estimate) -> None:
    """Have an estimate stored, as another process would."""
    store = hive._open()
    lease = store.acquire_run("another")
    entry = NewEntry(EntryKind.STEP_COMPLETED, 1, 1)
    (outcome,) = store.append([Append(lease, [entry], budget=Settle(1, 1, estimate=estimate))])
    assert isinstance(outcome, list)
    store.release_run(lease)


@pytest.mark.parametrize("budget", [1_000, "$0.10"])
def test_an_estimate_above_the_limit_lets_the_call_be_made_alone(hive: Hive, budget: Any) -> None:
    """One call that used very much locked its step out under every smaller limit."""
    learn(hive, Estimate("architect", "ask", 50_000, 900_000, "claude-sonnet-4-5"))
    program = Program(hive, tokens=60)
    run(hive, program.at_once, 3, run_id="r", budget=budget)
    assert sorted(program.calls) == [0, 1, 2]
    assert program.most == 1, "alone, as one of unknown size"
    assert step_details(hive._open(), "r", "1").attempts[0].reserved.keys() <= {
        "estimated",
        "tokens",
    }


def test_waiting_for_a_budget_uses_up_no_turn_of_a_rate(hive: Hive) -> None:
    """Each look took one of the turns, until none was left for the hour."""
    count = 6
    program = Program(hive, tokens=10, max_tokens=60, rate=f"{count}/h")
    run(hive, program.at_once, count, run_id="r", budget=130)
    assert sorted(program.calls) == list(range(count))


def test_a_call_that_waits_for_a_budget_holds_no_permit(hive: Hive) -> None:
    """Calls of other personas, which have room, waited for those that had none."""
    calls: list[str] = []

    def step(persona: str) -> Any:
        @hive.step(name="ask", persona=persona, max_tokens=60, max_concurrency=2)
        async def ask() -> dict[str, int]:
            calls.append(persona)
            if calls == ["limited"]:
                await until(lambda: "free" in calls)
            return {"tokens_used": 10}

        return ask

    limited, free = step("limited"), step("free")

    @hive.workflow
    async def work() -> None:
        await asyncio.gather(limited(), limited(), limited(), free())

    hive.budget.set_limit(100, persona="limited")
    run(hive, work, run_id="r")
    assert calls == ["limited", "free", "limited", "limited"]


# --- threads, settings ----------------------------------------------------------------------------


def test_what_a_call_reserves_is_of_one_set_of_limits(
    hive: Hive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may read new limits in the very middle of it."""
    hive.budget.set_limit(100, persona="a")
    store = hive._open()
    ledger = Ledger(store)
    accounts = ("persona:a",)
    read = store.limits

    def changing(concerning: Any = None) -> Any:
        found = read(concerning)
        if concerning:
            monkeypatch.undo()
            hive.budget.set_limit(5, persona="a")
            ledger.refresh()
        return found

    monkeypatch.setattr(store, "limits", changing)
    wanted, _ = ledger.reserve(ledger.known, accounts, "a", "ask", Sizing(max_tokens=50))
    assert wanted.limits == (("persona:a", 100, None),)
    assert wanted.epoch < store.limits().epoch, "the store refuses it"
    wanted, _ = ledger.reserve(ledger.known, accounts, "a", "ask", Sizing(max_tokens=50))
    assert wanted.limits == (("persona:a", 5, None),)
    assert wanted.epoch == store.limits().epoch


def test_a_budget_that_is_not_enforced_is_only_counted(tmp_path: Path) -> None:
    config: ExecutionConfig = quick_config()
    config.tokens = TokenConfig(enforce_budget=False)
    with Hive(tmp_path, config, budget={"run": 100, "day": "$0.01"}) as hive:

        @hive.step(model="nobody-knows-its-price", max_tokens=60)
        async def ask(number: int) -> dict[str, int]:
            current().spend(tokens=60)
            return {"answer": number}

        @hive.workflow
        async def work() -> int:
            return len([await ask(number) for number in range(4)])

        assert hive.run_sync(work, run_id="r") == 4
        assert spent(hive, "run", "r") == 240
