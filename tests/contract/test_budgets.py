"""Accounts, limits and reservations, in every store."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.hive.budgets import list_budgets
from maestro_hive.kernel.errors import BudgetRefusedError, ConfigurationError, StaleLimitsError
from maestro_hive.maestro.state.budgets import (
    Account,
    Estimate,
    Limits,
    Reserve,
    Settle,
    StoredLimit,
)
from maestro_hive.maestro.state.projections import facts_of
from maestro_hive.maestro.state.records import DispatchState, EntryKind, NewDispatch, NewEntry
from maestro_hive.maestro.state.store import Append, NewRun
from tests.timing import cpu_seconds, least

if TYPE_CHECKING:
    from maestro_hive.maestro.state.store import Outcome, RunLease, Store
    from maestro_hive.testing import ManualClock
    from tests.contract.stores import Stores

PERSONA, RUN = "persona:p", "run:r"
BOTH = (PERSONA, RUN)


def limit(
    store: Store, account: str = PERSONA, *, tokens: int | None = None, usd: int | None = None
) -> Limits:
    store.set_limits(lambda _: [StoredLimit(account=account, tokens=tokens, usd=usd)])
    return store.limits()


def start(
    store: Store,
    run: RunLease,
    step: int,
    tokens: int | None = 40,
    usd: int | None = 0,
    *,
    limits: Limits | None = None,
) -> Outcome:
    known = store.limits() if limits is None else limits
    reserve = Reserve(known.epoch, known.limited(BOTH), tokens, usd)
    entry = NewEntry(EntryKind.ATTEMPT_STARTED, step, 1, b'{"name":"s","persona":"p"}')
    (outcome,) = store.append([Append(run, [entry], budget=reserve)])
    return outcome


def end(store: Store, run: RunLease, step: int, tokens: int = 0, **more: Any) -> list[Any]:
    settle = Settle(
        step,
        1,
        reserved=True,
        accounts=BOTH,
        tokens=tokens,
        limits=store.limits().limited(BOTH),
    )._replace(**more)
    entry = NewEntry(EntryKind.STEP_COMPLETED, step, 1)
    (outcome,) = store.append([Append(run, [entry], budget=settle)])
    assert isinstance(outcome, list)
    return outcome


def sums(store: Store, account: str = PERSONA) -> tuple[int, int, int, int]:
    found = store.account(account)
    return found.tokens, found.reserved_tokens, found.in_flight, found.unsized


def test_without_limits_nothing_is_reserved_and_spending_is_counted(store: Store) -> None:
    run = store.acquire_run("r")
    assert store.limits() == Limits()
    assert isinstance(start(store, run, 1), list)
    assert store.reservations() == []
    end(store, run, 1, 55, usd=7, cached=3)
    end(store, run, 2, 5)
    assert store.accounts() == [
        Account(account=each, tokens=60, usd=7, cached=3, calls=2) for each in sorted(BOTH)
    ]
    assert [each.account for each in store.accounts("run")] == [RUN]
    assert store.account("persona:nobody") == Account(account="persona:nobody")


def test_a_start_reserves_and_is_refused_where_there_is_no_room(store: Store, other: Store) -> None:
    run = store.acquire_run("r")
    limit(store, tokens=100)
    assert isinstance(start(store, run, 1), list)
    assert isinstance(start(store, run, 2), list)
    refused = start(store, run, 3)
    assert isinstance(refused, BudgetRefusedError)
    assert (refused.account, refused.unit, refused.alone) == (PERSONA, "tokens", False)
    assert (refused.used, refused.reserved, refused.amount, refused.limit) == (0, 80, 40, 100)
    assert len(store.entries(run.run)) == 2, "that it starts is not recorded"
    assert sums(other) == (0, 80, 2, 0)
    end(store, run, 1, 10)
    assert sums(other) == (10, 40, 1, 0)
    assert isinstance(start(store, run, 3), list)
    assert [(each.step, each.tokens) for each in other.reservations()] == [(2, 40), (3, 40)]
    assert store.check() == []


def test_what_is_spent_beyond_a_reservation_exhausts_the_budget(store: Store) -> None:
    run = store.acquire_run("r")
    limit(store, tokens=100)
    start(store, run, 1)
    end(store, run, 1, 130)
    assert sums(store) == (130, 0, 0, 0)
    for amount in (40, 1, 0, None):
        assert isinstance(start(store, run, 2, amount), BudgetRefusedError)


def test_a_batch_admits_only_as_much_as_there_is(store: Store) -> None:
    run = store.acquire_run("r")
    known = limit(store, tokens=100)
    reserve = Reserve(known.epoch, known.limited(BOTH), 30, 0)
    appends = [
        Append(run, [NewEntry(EntryKind.ATTEMPT_STARTED, step, 1)], budget=reserve)
        for step in range(1, 6)
    ]
    outcome = store.append(appends)
    assert [isinstance(each, list) for each in outcome] == [True, True, True, False, False]
    assert len(store.entries(run.run)) == 3


def test_a_limit_that_was_changed_meanwhile_is_read_again(store: Store, other: Store) -> None:
    run = store.acquire_run("r")
    before = store.limits()
    after = limit(other, tokens=100)
    for limits in (before, Limits(after.epoch - 1, after.by_account)):
        assert isinstance(start(store, run, 1, limits=limits), StaleLimitsError)
    assert store.entries(run.run) == []
    assert isinstance(start(store, run, 1), list)
    assert limit(other, tokens=50).epoch > after.epoch
    assert limit(other, RUN).epoch > after.epoch + 1


def test_the_limit_of_each_holds_for_those_without_their_own(store: Store) -> None:
    limit(store, "persona:*", tokens=100)
    known = limit(store, "persona:free")
    assert known.limited((PERSONA, "persona:free", RUN)) == ((PERSONA, 100, None),)
    assert known.limited(("persona:free", RUN)) == ()


def test_every_account_concerned_has_to_have_room(store: Store) -> None:
    run = store.acquire_run("r")
    limit(store, PERSONA, tokens=1_000)
    limit(store, RUN, tokens=50)
    assert isinstance(start(store, run, 1, 40), list)
    refused = start(store, run, 2, 40)
    assert isinstance(refused, BudgetRefusedError)
    assert refused.account == RUN
    assert sums(store, PERSONA) == (0, 40, 1, 0), "nothing is reserved of the others"


def test_money_is_limited_as_tokens_are(store: Store) -> None:
    run = store.acquire_run("r")
    limit(store, usd=1_000_000)
    assert isinstance(start(store, run, 1, 10**6, 600_000), list)
    refused = start(store, run, 2, 0, 600_000)
    assert isinstance(refused, BudgetRefusedError)
    assert (refused.unit, refused.reserved, refused.limit) == ("usd", 600_000, 1_000_000)
    end(store, run, 1, 5, usd=399_999)
    assert isinstance(start(store, run, 2, 0, 600_000), list)


def test_a_call_of_unknown_size_is_made_alone(store: Store) -> None:
    run = store.acquire_run("r")
    limit(store, tokens=100)
    assert isinstance(start(store, run, 1, None), list)
    for amount in (None, 1):
        refused = start(store, run, 2, amount)
        assert isinstance(refused, BudgetRefusedError)
        assert refused.alone
    end(store, run, 1, 10)
    assert isinstance(start(store, run, 2, 1), list)
    refused = start(store, run, 3, None)
    assert isinstance(refused, BudgetRefusedError)
    assert refused.alone
    assert isinstance(start(store, run, 3, 89), list)
    assert isinstance(start(store, run, 4, 1), BudgetRefusedError)


def test_an_unknown_amount_of_what_is_not_limited_does_not_matter(store: Store) -> None:
    run = store.acquire_run("r")
    limit(store, tokens=100)
    assert isinstance(start(store, run, 1, 40, None), list)
    assert isinstance(start(store, run, 2, 40, None), list)


def test_spending_in_the_middle_of_a_call_is_taken_from_its_reservation(store: Store) -> None:
    run = store.acquire_run("r")
    limit(store, tokens=100)
    start(store, run, 1)
    end(store, run, 1, 30, ended=False)
    assert sums(store) == (30, 10, 1, 0)
    end(store, run, 1, 30, ended=False)
    assert sums(store) == (60, 0, 1, 0)
    end(store, run, 1, 0, accounts=())
    assert sums(store) == (60, 0, 0, 0)
    assert store.reservations() == []
    assert store.check() == []


def test_warnings_are_recorded_once_per_account_and_limit(store: Store) -> None:
    run = store.acquire_run("r")
    limit(store, tokens=100)
    limit(store, RUN, tokens=1_000)
    warned: list[tuple[int, Any, Any]] = []
    for step, tokens in enumerate((49, 1, 20, 10, 20, 50), start=1):
        start(store, run, step, 0)
        settled = end(store, run, step, tokens)
        facts = [facts_of(each) for each in settled if each.kind == EntryKind.BUDGET_WARNED]
        warned += [(step, each["account"], each["percent"]) for each in facts]
    assert warned == [(2, PERSONA, 50), (4, PERSONA, 80), (5, PERSONA, 95)]
    limit(store, tokens=200)
    start(store, run, 9, 0)
    again = [facts_of(each) for each in end(store, run, 9, 1)][1:]
    assert [(each["percent"], each["used"], each["limit"]) for each in again] == [(50, 151, 200)]


def test_what_a_dead_process_had_reserved_counts_for_a_day(
    stores: Stores, store: Store, other: Store, clock: ManualClock
) -> None:
    run = other.acquire_run("r")
    limit(store, tokens=100)
    start(other, run, 1)
    end(other, run, 1, 15, ended=False)
    assert store.recover_reservations() == 0, "its process lives"
    _kill(other)
    assert store.recover_reservations() == 1
    assert sums(store) == (15, 25, 0, 0)
    mine = store.acquire_run("r")
    assert isinstance(start(store, mine, 2, 61), BudgetRefusedError)
    clock.advance(timedelta(hours=23).total_seconds())
    assert store.recover_reservations() == 0
    clock.advance(timedelta(hours=2).total_seconds())
    assert store.recover_reservations() == 1
    assert sums(store) == (15, 0, 0, 0)
    assert store.check() == []


def test_what_a_dead_process_had_reserved_is_shown_until_it_lapses(
    store: Store, other: Store, clock: ManualClock
) -> None:
    """What is shown is what the store recovers, before and after it has done so."""

    def shown() -> tuple[int, int, int]:
        (view,) = list_budgets(store)
        return view.reserved_tokens, view.lost_tokens, view.in_flight

    limit(store, tokens=100)
    start(other, other.acquire_run("r"), 1)
    start(store, store.acquire_run("mine"), 1, 7)
    assert shown() == (47, 0, 2)
    _kill(other)
    for wait, expected in ((0, (47, 40, 1)), (25, (7, 0, 1))):
        clock.advance(timedelta(hours=wait).total_seconds())
        assert shown() == expected
        assert store.recover_reservations() == 1
        assert shown() == expected
    assert store.release_reservations() == []


def test_a_lapsed_reservation_is_neither_shown_nor_released(
    store: Store, other: Store, clock: ManualClock
) -> None:
    limit(store, tokens=100)
    start(other, other.acquire_run("r"), 1)
    _kill(other)
    clock.advance(timedelta(hours=25).total_seconds())
    (view,) = list_budgets(store)
    assert (view.reserved_tokens, view.lost_tokens, view.in_flight, view.used) == (0, 0, 0, 0)
    assert store.release_reservations() == []


def test_a_call_of_unknown_size_whose_process_died_blocks_nobody(
    store: Store, other: Store
) -> None:
    limit(store, tokens=100)
    start(other, other.acquire_run("r"), 1, None)
    run = store.acquire_run("mine")
    assert isinstance(start(store, run, 1, 1), BudgetRefusedError)
    _kill(other)
    store.recover_reservations()
    assert isinstance(start(store, run, 1, 1), list)


def test_what_a_dead_process_had_reserved_is_released_by_hand(store: Store, other: Store) -> None:
    limit(store, tokens=100)
    start(other, other.acquire_run("r"), 1)
    mine = store.acquire_run("mine")
    start(store, mine, 1)
    _kill(other)
    assert store.release_reservations("queue:other") == []
    (released,) = store.release_reservations(PERSONA)
    assert (released.step, released.tokens, released.lost) == (1, 40, True)
    assert sums(store) == (0, 40, 1, 0), "what lives stays"
    assert store.release_reservations() == []


def _kill(store: Any) -> None:
    """End a store as the death of its process does."""
    if hasattr(store, "abandon"):
        store.abandon()
    else:
        store._presence.close()
        store._maintenance.stop()


def reserve_within(store: Store, run: RunLease, step: int, wanted: Reserve) -> Outcome:
    known = store.limits()
    full = wanted._replace(epoch=known.epoch, limits=known.limited(BOTH))
    entry = NewEntry(EntryKind.ATTEMPT_STARTED, step, 1, b'{"name":"s","persona":"p"}')
    (outcome,) = store.append([Append(run, [entry], budget=full)])
    return outcome


def test_what_the_steps_around_a_call_have_reserved_does_not_count_against_it(store: Store) -> None:
    run, other = store.acquire_run("r"), store.acquire_run("other")
    limit(store, tokens=100)
    assert isinstance(start(store, run, 1, 60), list)
    assert isinstance(start(store, other, 1, 30), list)
    inner = Reserve(0, tokens=60, within=((run.run, 1),))
    assert isinstance(reserve_within(store, run, 2, inner._replace(within=())), BudgetRefusedError)
    assert isinstance(reserve_within(store, run, 2, inner._replace(tokens=80)), BudgetRefusedError)
    assert isinstance(reserve_within(store, run, 2, inner), list)
    assert sums(store) == (0, 150, 3, 0)
    for lease, step in ((run, 2), (run, 1), (other, 1)):
        end(store, lease, step, 10)
    assert sums(store) == (30, 0, 0, 0)


def test_a_call_of_unknown_size_is_alone_apart_from_the_steps_around_it(store: Store) -> None:
    run = store.acquire_run("r")
    limit(store, tokens=100)
    assert isinstance(start(store, run, 1, None), list)
    around = Reserve(0, tokens=None, within=((run.run, 1),))
    assert isinstance(reserve_within(store, run, 2, around), list)
    for tokens in (None, 10):
        outcome = reserve_within(store, run, 3, around._replace(tokens=tokens))
        assert isinstance(outcome, BudgetRefusedError)
        assert outcome.alone
    deeper = Reserve(0, tokens=10, within=((run.run, 1), (run.run, 2)))
    assert isinstance(reserve_within(store, run, 3, deeper), list)


def test_a_call_is_not_made_alone_once_something_was_learned_of_its_step(store: Store) -> None:
    run = store.acquire_run("r")
    limit(store, tokens=100)
    unknown = Reserve(0, tokens=None, unknown=("p", "s"))
    assert isinstance(reserve_within(store, run, 1, unknown), list)
    end(store, run, 1, 7, estimate=Estimate("p", "s", 7, 0))
    assert isinstance(reserve_within(store, run, 2, unknown), StaleLimitsError)
    assert isinstance(reserve_within(store, run, 2, unknown._replace(unknown=("p", "t"))), list)


def test_a_bankrupt_run_is_woken_by_the_account_that_refused_it_alone(store: Store) -> None:
    first = NewEntry(EntryKind.RUN_STARTED, facts=b'{"workflow":"w"}')
    refused = {"own": b"run:own", "any": b"persona:p"}
    for name, account in refused.items():
        store.create_runs([NewRun(name, "w", [first], "pending", NewDispatch(due=None))])
        facts = b'{"account":"' + account + b'","error":{"message":"m","type":"T"}}'
        suspended = NewEntry(EntryKind.RUN_SUSPENDED, facts=facts)
        run = store.acquire_run(name)
        store.append([Append(run, [suspended], "bankrupt", release=True, due=None)])

    def ready() -> set[str]:
        found = {name: store.dispatch(name) for name in refused}
        return {name for name, row in found.items() if row and row.state is DispatchState.READY}

    limit(store, "persona:q", tokens=1)
    limit(store, "day:*", tokens=1)
    store.release_reservations()
    assert ready() == set()
    limit(store, "run:*", tokens=1)
    assert ready() == {"own"}
    limit(store, "persona:p", tokens=1)
    assert ready() == {"own", "any"}


def test_setting_a_limit_wakes_bankrupt_runs_and_those_that_are_about_to_be(store: Store) -> None:
    entry = NewEntry(EntryKind.RUN_STARTED, facts=b'{"workflow":"w"}')
    for name in ("bankrupt", "active", "held"):
        store.create_runs([NewRun(name, "w", [entry], "pending", NewDispatch(due=None))])
    run = store.acquire_run("bankrupt")
    store.append([Append(run, (), "bankrupt", release=True, due=None)])
    active = store.acquire_run("active")
    limit(store, "run:to-be-started", tokens=1)  # nobody is under this one yet
    found = store.dispatch("bankrupt")
    assert found is not None
    assert found.state != DispatchState.READY
    limit(store, tokens=1)

    def state(name: str) -> DispatchState:
        found = store.dispatch(name)
        assert found is not None
        return found.state

    assert state("bankrupt") == DispatchState.READY
    assert state("held") == DispatchState.HELD
    store.release_run(active, None)
    assert state("active") == DispatchState.READY


def test_a_change_of_limits_that_raises_changes_nothing(store: Store) -> None:
    before = limit(store, tokens=100)

    def refuse(_: Limits) -> list[StoredLimit]:
        raise ConfigurationError("no")

    with pytest.raises(ConfigurationError):
        store.set_limits(refuse)
    assert store.limits() == before
    assert store.set_limits(lambda _: []) == []
    assert store.limits() == before


def test_estimates_are_stored_with_what_was_spent(store: Store, other: Store) -> None:
    run = store.acquire_run("r")
    made = Estimate("p", "s", 12, 34, "m")
    start(store, run, 1)
    end(store, run, 1, 12, estimate=made)
    assert other.estimate("p", "s") == made
    assert other.estimate("p", "other") is None


def test_purging_a_run_deletes_its_account_and_leaves_the_others(store: Store) -> None:
    run = store.acquire_run("r")
    limit(store, RUN, tokens=100)
    start(store, run, 1)
    end(store, run, 1, 12)
    store.release_run(run)
    epoch = store.limits().epoch
    store.purge_runs(["r"])
    assert [each.account for each in store.accounts()] == [PERSONA]
    assert store.account(PERSONA).tokens == 12
    assert store.limits().by_account == {}
    assert store.limits().epoch > epoch, "who knows its limit reads again"
    assert limit(store, "run:s", tokens=1).epoch > epoch + 1


@pytest.mark.parametrize("again", [False, True])
def test_what_a_purged_run_had_reserved_is_released_of_the_others_only(
    store: Store, other: Store, *, again: bool
) -> None:
    for account in BOTH:
        limit(store, account, tokens=100)
    start(other, other.acquire_run("r"), 1)
    _kill(other)
    store.recover_reservations()
    store.purge_runs(["r"])
    assert sums(store) == (0, 40, 0, 0), "nobody knows what its call did spend"
    if again:
        limit(store, RUN, tokens=100)
        run = store.acquire_run("r")
        start(store, run, 1, 7)
    assert len(store.release_reservations()) == 1
    assert sums(store) == ((0, 7, 1, 0) if again else (0, 0, 0, 0))
    assert sums(store, RUN) == sums(store)
    assert store.check() == []


def test_a_reservation_of_a_purged_run_alone_goes_with_it(store: Store, other: Store) -> None:
    limit(store, RUN, tokens=100)
    start(other, other.acquire_run("r"), 1)
    _kill(other)
    store.purge_runs(["r"])
    assert store.reservations() == []
    assert store.release_reservations() == []
    assert store.accounts() == []


def test_limits_are_read_by_the_accounts_they_concern(store: Store) -> None:
    assert not store.limits(()).some
    limit(store, "run:other", tokens=1)
    limit(store, "run:*", tokens=2)
    every = limit(store, RUN, tokens=3)
    assert every.by_account.keys() == {"run:other", "run:*", RUN}
    found = store.limits([RUN, PERSONA])
    assert found.by_account.keys() == {"run:*", RUN}
    assert found.limited(BOTH) == every.limited(BOTH) == ((RUN, 3, None),)
    assert store.limits(()).by_account.keys() == {"run:*"}
    assert found.epoch == store.limits(()).epoch == every.epoch
    assert found.some
    assert store.limits(()).some
    given: list[Limits] = []

    def nothing(limits: Limits) -> list[StoredLimit]:
        given.append(limits)
        return []

    store.set_limits(nothing, [RUN])
    assert given[-1].by_account.keys() == {"run:*", RUN}


def test_a_limit_that_is_set_costs_the_same_among_many(store: Store) -> None:
    few, many = "run:few", "run:many"
    run = store.acquire_run("few")

    def settle_five_times(account: str) -> None:
        for _ in range(5):
            settle(account)

    def settle(account: str) -> None:
        known = store.limits([account])
        store.set_limits(lambda _: [StoredLimit(account=account, tokens=10**9)], [account])
        spent = Settle(1, 1, accounts=(account,), tokens=1, limits=known.limited((account,)))
        store.append([Append(run, [NewEntry(EntryKind.PROGRESS_SAVED, 1, 1)], budget=spent)])

    def best(account: str) -> float:
        return cpu_seconds(lambda: settle_five_times(account), tries=8)

    before = best(few)
    for start in range(0, 20_000, 5_000):
        names = [f"run:{number:06}" for number in range(start, start + 5_000)]
        store.set_limits(lambda _, n=names: [StoredLimit(account=a, tokens=1) for a in n], ())  # type: ignore[misc]
    # Reading all of them would take 50 times as long and more.
    assert least(lambda: best(many), 5 * before, tries=4) < 5 * before


def test_the_sum_that_is_admitted_is_never_over_the_limit(store: Store, other: Store) -> None:
    """A thousand random starts and ends of two processes; the sums are those of the rows."""
    dice = random.Random(7)
    runs = {each: each.acquire_run(name) for each, name in ((store, "r"), (other, "q"))}
    limit(store, tokens=1_000)
    active: list[tuple[Store, int, int]] = []
    step = spent = 0
    for _ in range(1_000):
        if active and dice.random() < 0.5:
            which, number, size = active.pop(dice.randrange(len(active)))
            used = dice.randint(0, size)
            end(which, runs[which], number, used)
            spent += used
        else:
            step += 1
            which, size = dice.choice([store, other]), dice.randint(0, 90)
            if isinstance(start(which, runs[which], step, size), list):
                active.append((which, step, size))
        tokens, reserved, in_flight, _ = sums(store)
        assert (tokens, reserved) == (spent, sum(size for *_, size in active))
        assert in_flight == len(active)
        assert tokens + reserved <= 1_000
    assert store.check() == []
