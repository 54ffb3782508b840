"""Limits in one process: tasks, loops, cancellation, clocks; a second store is a second process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import time
from typing import TYPE_CHECKING

import pytest

from maestro_hive import Hive
from maestro_hive.engine.breaker import CircuitBreaker
from maestro_hive.engine.errors import CircuitBreakerOpen
from maestro_hive.engine.limits import RATE_LOGS, Entered, Limit, RateLimit, Semaphore
from maestro_hive.engine.rates import Rate
from maestro_hive.engine.shared import all_shared
from maestro_hive.kernel.errors import ConfigurationError, DocumentCorruptError, StoreClosedError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.stores import close_store, open_store
from maestro_hive.testing import ManualClock, MemoryStore
from tests.hive.conftest import quick_config
from tests.tables import for_each
from tests.timing import least

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from maestro_hive.engine.step import StepExecution
    from maestro_hive.maestro.state.records import Lease
    from maestro_hive.maestro.state.store import Store

PERMITS = 3


@pytest.fixture(params=["quick", "slow", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A store in a folder, one whose disk is slow so that threads wait for it, one in memory."""
    if request.param == "memory":
        yield MemoryStore()
        return
    opened = SqliteStore(tmp_path / "state")
    if request.param == "slow":
        opened.syncs_fast = lambda: False  # type: ignore[method-assign]
    yield opened
    opened.close()


@pytest.fixture
def folder_store(tmp_path: Path) -> Iterator[SqliteStore]:
    """A store that is written on the loop, also when the disk was slow once."""
    opened = SqliteStore(tmp_path / "state")
    opened.syncs_fast = lambda: True  # type: ignore[method-assign]
    yield opened
    opened.close()


def at_once(store: Store, most: int, name: str = "step") -> Limit:
    return Limit(store, name, rate=None, max_concurrency=most)


def at_rate(store: Store, times: int, seconds: float, name: str = "step") -> Limit:
    return Limit(store, name, rate=Rate(times, seconds), max_concurrency=None)


def held(store: Store, name: str = "step") -> list[str]:
    """Return the leases of a semaphore that are held."""
    names = [f"semaphore/{name}/{what}" for what in (*range(10), "next")]
    return [each for each in names if store.lease(each) is not None]


async def enter(limit: Limit) -> Callable[[], None]:
    """Enter a limit as an attempt does; return what is called at the end, also where nothing is."""
    entered = await limit.enter(None)
    if entered is None:
        return lambda: None
    while not entered.is_current():
        await entered.renew()
    return entered.leave


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        await asyncio.sleep(0.005)


class Attempts:
    """Counts those that are active at once; the first ones wait until so many are."""

    def __init__(self, meeting: int = 1) -> None:
        self._mutex = threading.Lock()
        self._meeting = meeting
        self.active = self.most = self.started = 0

    async def make(self, limit: Limit, seconds: float = 0.002) -> None:
        release = await enter(limit)
        with self._mutex:
            self.active += 1
            self.started += 1
            self.most = max(self.most, self.active)
        try:
            await until(lambda: self.most >= self._meeting)
            await asyncio.sleep(seconds)
        finally:
            with self._mutex:
                self.active -= 1
            release()


# --- at once ------------------------------------------------------------------------------------


def test_never_more_than_so_many_are_active_at_once(store: Store) -> None:
    attempts = Attempts(PERMITS)

    async def scene() -> None:
        limit = at_once(store, PERMITS)
        await asyncio.gather(*(attempts.make(limit, 0.02) for _ in range(40)))
        await until(lambda: not held(store))

    asyncio.run(scene())
    assert (attempts.started, attempts.most) == (40, PERMITS)


def test_limits_of_one_name_are_one_limit_and_other_names_are_others(store: Store) -> None:
    attempts, other = Attempts(), Attempts()

    async def scene() -> None:
        first, second = at_once(store, 1), at_once(store, 1)
        elsewhere = at_once(store, 1, "other")
        release = await enter(elsewhere)
        await asyncio.gather(*(attempts.make(limit) for limit in (first, second) * 5))
        release()
        await other.make(elsewhere)
        await until(lambda: not held(store) and not held(store, "other"))

    asyncio.run(scene())
    assert (attempts.started, attempts.most, other.started) == (10, 1, 1)


def test_tasks_of_one_process_are_served_in_the_order_they_came(store: Store) -> None:
    order: list[int] = []

    async def attempt(limit: Limit, number: int) -> None:
        release = await enter(limit)
        order.append(number)
        await asyncio.sleep(0)
        release()

    async def scene() -> None:
        limit = at_once(store, 1)
        await asyncio.gather(*(attempt(limit, number) for number in range(20)))

    asyncio.run(scene())
    assert order == list(range(20))


@pytest.mark.timing
def test_a_released_permit_wakes_the_next_task_here_at_once(store: Store) -> None:
    async def scene() -> float:
        limit = at_once(store, 1)
        release = await enter(limit)
        waiting = asyncio.create_task(enter(limit))
        await asyncio.sleep(0.3)  # long enough for pauses to have grown, were there any
        released = time.monotonic()
        release()
        (await waiting)()
        return time.monotonic() - released

    assert least(lambda: asyncio.run(scene()), 0.1) < 0.1


def test_tasks_of_one_process_pass_a_permit_on_without_writing(
    folder_store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    take_lease = folder_store.take_lease

    def watched(name: str) -> object:
        taken.append(name)
        return take_lease(name)

    monkeypatch.setattr(folder_store, "take_lease", watched)
    attempts = Attempts(2)

    async def scene() -> None:
        limit = at_once(folder_store, 2)
        await asyncio.gather(*(attempts.make(limit, 0.001) for _ in range(50)))

    asyncio.run(scene())
    assert attempts.started == 50
    assert taken == ["semaphore/step/0", "semaphore/step/1"]
    assert not held(folder_store)


def test_a_second_release_does_not_release_the_permit_of_the_next_task(store: Store) -> None:
    async def scene() -> None:
        limit = at_once(store, 1)
        first = await enter(limit)
        waiting = asyncio.create_task(enter(limit))
        await asyncio.sleep(0.01)
        first()
        second = await waiting
        first()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(enter(limit), 0.1)
        assert held(store) == ["semaphore/step/0"]
        second()
        (await asyncio.wait_for(enter(limit), 30))()

    asyncio.run(scene())


def test_a_second_release_while_the_first_is_written_releases_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(tmp_path / "state")
    monkeypatch.setattr(store, "syncs_fast", lambda: False)
    release_lease, may_continue = store.release_lease, threading.Event()

    def slow(lease: Lease) -> None:
        may_continue.wait(30)
        release_lease(lease)

    async def scene() -> None:
        limit = at_once(store, 1)
        release = await enter(limit)
        monkeypatch.setattr(store, "release_lease", slow)
        release()
        waiting = asyncio.create_task(enter(limit))
        await asyncio.sleep(0.05)
        release()
        await asyncio.sleep(0.05)
        may_continue.set()
        second = await asyncio.wait_for(waiting, 30)
        await asyncio.sleep(0.05)
        assert held(store) == ["semaphore/step/0"]
        second()
        await until(lambda: not held(store))

    asyncio.run(scene())
    store.close()


def test_event_loops_in_several_threads_share_a_limit(store: Store) -> None:
    attempts = Attempts()

    async def several() -> None:
        limit = at_once(store, 2)
        await asyncio.gather(*(attempts.make(limit, 0.001) for _ in range(15)))

    threads = [threading.Thread(target=asyncio.run, args=(several(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (attempts.started, attempts.active) == (60, 0)
    assert attempts.most <= 2
    asyncio.run(until(lambda: not held(store)))


def test_what_is_shared_is_dropped_when_it_is_not_used(folder_store: SqliteStore) -> None:
    async def scene() -> None:
        release = await enter(at_once(folder_store, 1))
        again = at_once(folder_store, 1)
        with pytest.raises(TimeoutError):  # a permit in use keeps what is shared alive
            await asyncio.wait_for(enter(again), 0.05)
        release()

    asyncio.run(scene())
    gc.collect()
    assert not all_shared(folder_store, Semaphore)
    assert not all_shared(folder_store, RateLimit)


@for_each("most", [0, -1, True, 1.5, "3"])
def test_a_number_that_cannot_be_used_is_refused(most: int) -> None:
    with pytest.raises(ConfigurationError, match="max_concurrency of 'step'"):
        at_once(MemoryStore(), most)


def test_without_a_limit_nothing_is_waited_for_or_written(folder_store: SqliteStore) -> None:
    async def scene() -> None:
        free = Limit(folder_store, "step", rate=None, max_concurrency=None)
        for release in [await enter(free) for _ in range(100)]:
            release()

    asyncio.run(scene())
    assert not held(folder_store)
    assert not folder_store.documents(RATE_LOGS.namespace)


# --- cancelled -----------------------------------------------------------------------------------


def test_cancelled_waiters_hold_nothing(store: Store) -> None:
    async def scene() -> None:
        limit = at_once(store, 1)
        release = await enter(limit)
        waiting = [asyncio.create_task(enter(limit)) for _ in range(20)]
        for turn, task in enumerate(waiting):
            for _ in range(turn % 4):
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        release()
        (await asyncio.wait_for(enter(limit), 30))()
        await until(lambda: not held(store))

    asyncio.run(scene())


def test_a_task_cancelled_at_any_moment_leaks_no_permit(store: Store) -> None:
    """Cancel after more and more turns of the loop, while permits are released all the time."""

    async def one_time(limit: Limit, turns: int) -> None:
        release = await enter(limit)
        waiting = [asyncio.create_task(enter(limit)) for _ in range(3)]
        await asyncio.sleep(0)
        release()
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            if not isinstance(outcome, BaseException):
                outcome()

    async def scene() -> None:
        limit = at_once(store, 1)
        for turns in range(30):
            await one_time(limit, turns)
            await asyncio.wait_for(one_time(limit, turns), 30)
        await until(lambda: not held(store))

    asyncio.run(scene())


def test_a_task_cancelled_while_a_thread_takes_its_permit_releases_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(tmp_path / "state")
    monkeypatch.setattr(store, "syncs_fast", lambda: False)
    take_lease, entered, may_go_on = store.take_lease, threading.Event(), threading.Event()

    def slow(name: str) -> object:
        entered.set()
        may_go_on.wait(30)
        return take_lease(name)

    monkeypatch.setattr(store, "take_lease", slow)

    async def scene() -> None:
        limit = at_once(store, 1)
        task = asyncio.create_task(enter(limit))
        await until(entered.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_go_on.set()
        (await asyncio.wait_for(enter(limit), 30))()
        await until(lambda: not held(store))

    asyncio.run(scene())
    store.close()


def test_a_task_cancelled_while_waiting_for_the_rate_releases_its_permit(store: Store) -> None:
    async def scene() -> None:
        both = Limit(store, "step", rate=Rate(1, 60), max_concurrency=2)
        (await enter(both))()
        task = asyncio.create_task(enter(both))
        await until(lambda: len(held(store)) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not held(store))

    asyncio.run(scene())


def test_a_start_that_is_cancelled_while_a_thread_counts_it_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(tmp_path / "state")
    monkeypatch.setattr(store, "syncs_fast", lambda: False)
    update, entered, may_go_on = store.update_document, threading.Event(), threading.Event()

    def slow(*arguments: object) -> object:
        entered.set()
        may_go_on.wait(30)
        return update(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "update_document", slow)

    async def scene() -> None:
        limit = at_rate(store, 1, 3600)
        task = asyncio.create_task(enter(limit))
        await until(entered.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_go_on.set()
        await until(lambda: (store.document(RATE_LOGS.namespace, "step") or _NONE).version == 2)
        await asyncio.wait_for(enter(limit), 30)

    asyncio.run(scene())
    store.close()


class _NONE:
    version = 0


# --- another process -----------------------------------------------------------------------------


def test_another_process_has_its_share_of_the_same_permits() -> None:
    mine = MemoryStore()
    other = MemoryStore(shared_with=mine)
    attempts = Attempts(2)

    async def scene() -> None:
        several = [
            attempts.make(at_once(store, 2), 0.05) for store in (mine, other) for _ in range(10)
        ]
        await asyncio.gather(*several)
        await until(lambda: not held(mine))

    asyncio.run(scene())
    assert (attempts.started, attempts.most) == (20, 2)


def test_a_process_with_many_tasks_leaves_permits_to_one_with_a_single_task() -> None:
    crowd = MemoryStore()
    single = MemoryStore(shared_with=crowd)
    attempts = Attempts()

    async def scene() -> int:
        many = [asyncio.create_task(attempts.make(at_once(crowd, 1), 0.01)) for _ in range(200)]
        await asyncio.sleep(0.03)
        release = await asyncio.wait_for(enter(at_once(single, 1)), 30)
        entered = attempts.started
        release()
        for task in many:
            task.cancel()
        await asyncio.gather(*many, return_exceptions=True)
        return entered

    assert asyncio.run(scene()) < 100
    assert not held(crowd)


def test_the_permit_of_a_dead_process_is_free() -> None:
    store = MemoryStore()
    dead = MemoryStore(shared_with=store)

    async def scene() -> None:
        await enter(at_once(dead, 1))
        dead.take_lease("semaphore/step/next")  # it was also the next one to get a permit
        dead.abandon()
        (await asyncio.wait_for(enter(at_once(store, 1)), 30))()

    asyncio.run(scene())


def test_a_process_that_lost_its_permit_while_stopped_does_not_release_it() -> None:
    clock = ManualClock()
    stopped, other = (store := MemoryStore(clock=clock)), MemoryStore(shared_with=store)

    async def scene() -> None:
        release = await enter(at_once(stopped, 1))
        clock.advance(20)  # and the lease expires
        release_other = await asyncio.wait_for(enter(at_once(other, 1)), 30)
        release()
        assert stopped.lease("semaphore/step/0") is not None
        release_other()
        assert stopped.lease("semaphore/step/0") is None

    asyncio.run(scene())


def test_a_permit_that_was_lost_is_not_passed_on_to_a_task_here() -> None:
    clock = ManualClock()
    stopped, other = (store := MemoryStore(clock=clock)), MemoryStore(shared_with=store)

    async def scene() -> None:
        limit = at_once(stopped, 1)
        release = await enter(limit)
        waiting = asyncio.create_task(enter(limit))
        await asyncio.sleep(0.01)
        clock.advance(20)
        release_other = await asyncio.wait_for(enter(at_once(other, 1)), 30)
        release()
        await asyncio.sleep(0.1)
        assert not waiting.done()
        release_other()
        (await asyncio.wait_for(waiting, 30))()

    asyncio.run(scene())


def test_a_permit_that_was_lost_before_the_body_was_called_is_waited_for_again() -> None:
    clock = ManualClock()
    stopped = MemoryStore(clock=clock)
    other = MemoryStore(shared_with=stopped)

    async def scene() -> None:
        entered = await at_once(stopped, 1).enter(None)
        assert entered is not None
        assert entered.is_current()
        clock.advance(100)  # as if its process had been stopped
        release = await enter(at_once(other, 1))
        assert not entered.is_current()
        again = asyncio.create_task(entered.renew())
        await asyncio.sleep(0.3)
        assert not again.done()
        release()
        await again
        assert entered.is_current()
        assert held(other) == ["semaphore/step/0"]
        entered.leave()
        assert held(other) == []

    asyncio.run(scene())


def test_a_permit_that_was_late_and_is_still_ours_is_renewed() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)

    async def scene() -> None:
        entered = await at_once(store, 1).enter(None)
        assert entered is not None
        clock.advance(100)
        assert not entered.is_current()
        await entered.renew()
        assert entered.is_current()

    asyncio.run(scene())


def test_a_long_task_holds_its_permit_in_a_store_that_renews_nothing() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    other = MemoryStore(shared_with=store)

    async def scene() -> None:
        limit = at_once(store, 2)
        release = await enter(limit)
        clock.advance(3600)
        await enter(at_once(other, 2))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(enter(limit), 0.2)
        release()
        (await asyncio.wait_for(enter(limit), 30))()

    asyncio.run(scene())


@pytest.mark.parametrize("before, after", [(4, 2), (2, 4)])
def test_another_number_of_permits_after_a_restart_just_works(
    tmp_path: Path, before: int, after: int
) -> None:
    for most in (before, after):
        store = SqliteStore(tmp_path / "state")
        attempts = Attempts(most)

        async def scene(
            store: Store = store, most: int = most, attempts: Attempts = attempts
        ) -> None:
            limit = at_once(store, most)
            await asyncio.gather(*(attempts.make(limit, 0.01) for _ in range(12)))
            for _ in range(most):
                await enter(limit)  # and ends without a release

        asyncio.run(scene())
        assert (attempts.started, attempts.most) == (12, most)
        store.close()


def test_a_closed_store_is_an_error_and_giving_back_to_it_is_none(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "state")

    async def scene() -> None:
        limit = Limit(store, "step", rate=Rate(5, 1), max_concurrency=2)
        release = await enter(limit)
        store.close()
        release()
        with pytest.raises(StoreClosedError):
            await enter(limit)

    asyncio.run(scene())


# --- in a window --------------------------------------------------------------------------------


def start_times(clock: ManualClock, limit: Limit, times: int) -> list[float]:
    """Enter so often, on a clock that sleepers advance; return the moments."""
    moments: list[float] = []

    async def scene() -> None:
        for _ in range(times):
            (await enter(limit))()
            moments.append(clock.boot_seconds())

    asyncio.run(scene())
    return moments


def test_no_window_has_more_starts_than_the_rate_and_little_is_lost() -> None:
    clock = ManualClock()
    moments = start_times(clock, at_rate(MemoryStore(clock=clock), 60, 60), 600)
    assert all(last - first >= 60 for first, last in zip(moments, moments[60:], strict=False))
    assert moments[-1] - moments[0] < 9 * 60 * 1.03


def test_the_log_of_starts_does_not_grow_over_the_rate() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    start_times(clock, at_rate(store, 5, 10), 200)
    document = store.document(RATE_LOGS.namespace, "step")
    assert document is not None
    assert len(codec.decode(document.value)["starts"]) <= 5


def test_the_starts_of_a_process_that_ended_still_count() -> None:
    clock = ManualClock()
    first = MemoryStore(clock=clock)
    start_times(clock, at_rate(first, 3, 60), 3)
    first.abandon()
    (moment,) = start_times(clock, at_rate(MemoryStore(shared_with=first), 3, 60), 1)
    assert 1060 <= moment < 1061


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_setting_the_wall_clock_changes_nothing_within_a_boot(jump: float) -> None:
    clock = ManualClock()
    limit = at_rate(MemoryStore(clock=clock), 3, 60)
    start_times(clock, limit, 3)
    clock.jump(jump)
    (moment,) = start_times(clock, limit, 1)
    assert 1060 <= moment < 1061


def test_after_a_reboot_starts_are_as_long_ago_as_the_wall_clock_says() -> None:
    clock = ManualClock()
    limit = at_rate(MemoryStore(clock=clock), 3, 600)
    start_times(clock, limit, 3)
    clock.reboot(100)  # which leaves 50 on its boot clock
    (moment,) = start_times(clock, limit, 1)
    assert 550 <= moment < 551


def test_a_wall_clock_set_back_over_a_reboot_costs_one_whole_window_at_most() -> None:
    clock = ManualClock()
    limit = at_rate(MemoryStore(clock=clock), 3, 600)
    start_times(clock, limit, 3)
    clock.reboot(100)
    clock.jump(-1e6)
    moments = start_times(clock, limit, 4)
    assert 650 <= moments[0] <= 651  # 50 on its boot clock, and the window
    assert moments[2] <= 651
    assert 1250 <= moments[3] < 1252


def test_a_laptop_that_slept_does_not_wait_for_what_passed_meanwhile() -> None:
    clock = ManualClock()
    limit = at_rate(MemoryStore(clock=clock), 3, 600)
    start_times(clock, limit, 3)
    clock.sleep_machine(700)
    assert start_times(clock, limit, 1) == [1700]


def test_another_rate_after_a_restart_just_works() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    start_times(clock, at_rate(store, 60, 60), 60)
    (lower,) = start_times(clock, at_rate(store, 10, 60), 1)
    assert 1060 <= lower < 1061
    assert start_times(clock, at_rate(store, 100, 60), 50)[-1] < 1062


def test_a_start_that_took_too_long_to_write_is_counted_again() -> None:
    """Or the next window would be measured from a moment at which nothing started."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    update = store.update_document
    delays = [1.0]

    def slow(*arguments: object) -> object:
        done = update(*arguments)  # type: ignore[arg-type]
        clock.advance(delays.pop() if delays else 0.0)
        return done

    store.update_document = slow  # type: ignore[method-assign, assignment]
    moments = start_times(clock, at_rate(store, 1, 10), 2)
    assert moments[0] == 1001.0
    assert moments[1] - moments[0] >= 10


def test_a_machine_on_which_every_start_is_late_starts_all_of_them() -> None:
    """And each is counted as late as it is, so no window has too many."""
    clock = ManualClock()
    limit = at_rate(MemoryStore(clock=clock), 2, 1)
    starts: list[float] = []

    async def scene() -> None:
        for _ in range(10):
            entered = await limit.enter(None)
            assert entered is not None
            clock.advance(0.7)
            for _ in range(10):
                if entered.is_current():
                    break
                await entered.renew()
                clock.advance(0.7)
            assert entered.is_current()
            starts.append(clock.boot_seconds())

    asyncio.run(scene())
    assert all(last - first >= 1 for first, last in zip(starts, starts[2:], strict=False))


def test_tasks_wait_for_the_rate_in_the_order_they_came(store: Store) -> None:
    order: list[int] = []

    async def attempt(limit: Limit, number: int) -> None:
        await limit.enter(None)
        order.append(number)

    async def scene() -> None:
        limit = at_rate(store, 5, 0.1)
        await asyncio.gather(*(attempt(limit, number) for number in range(20)))

    asyncio.run(scene())
    assert order == list(range(20))


def test_a_cancelled_wait_for_the_rate_uses_nothing_up(store: Store) -> None:
    async def scene() -> float:
        limit = at_rate(store, 2, 1.5)
        await enter(limit)
        await enter(limit)
        waiting = [asyncio.create_task(enter(limit)) for _ in range(10)]
        await asyncio.sleep(0.05)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.wait_for(enter(limit), 30)
        started = time.monotonic()
        await enter(limit)
        return time.monotonic() - started

    # And not after another window; the best of some tries.
    assert least(lambda: asyncio.run(scene()), 1.2) < 1.2


def test_a_document_that_is_no_log_is_named(store: Store) -> None:
    store.update_document(RATE_LOGS.namespace, "step", lambda _: codec.encode({"starts": 5}))

    async def scene() -> None:
        with pytest.raises(DocumentCorruptError, match="limits/step"):
            await enter(at_rate(store, 1, 1))

    asyncio.run(scene())


def test_a_forked_child_starts_with_nothing_shared(folder_store: SqliteStore) -> None:
    limit = at_once(folder_store, 1)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            empty = not all_shared(folder_store, Semaphore)
            try:
                asyncio.run(enter(limit))
            except StoreClosedError:
                os._exit(42 if empty else 1)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 42


# --- with a breaker -----------------------------------------------------------------------------


def test_an_attempt_enters_once_however_often_its_breaker_changes_meanwhile(
    hive: Hive, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[str] = []
    enter_limit = Limit.enter

    async def counted(limit: Limit, step: StepExecution | None) -> Entered | None:
        entered.append(limit.name)
        return await enter_limit(limit, step)

    monkeypatch.setattr(Limit, "enter", counted)

    @hive.step(max_attempts=2, rounds=2, max_concurrency=2)
    async def work(number: int) -> int:
        await asyncio.sleep(0)
        if number % 2:
            # Changes the record of the breaker, as does the next success.
            raise ConnectionError(number)
        return number

    @hive.workflow
    async def build() -> int:
        done = await asyncio.gather(*map(work, range(20)), return_exceptions=True)
        return sum(isinstance(each, int) for each in done)

    assert hive.run_sync(build) == 10
    rounds = 2
    assert len(entered) == 10 + 10 * rounds


def test_a_breaker_that_opens_while_an_attempt_waits_for_its_turn_refuses_it(
    folder: Path,
) -> None:
    calls: list[str] = []
    turn = asyncio.Event()
    config = quick_config()
    with Hive(folder, config) as hive:

        @hive.step(persona="model", max_concurrency=1)
        async def work(name: str) -> str:
            calls.append(name)
            await turn.wait()
            return name

        @hive.workflow
        async def build() -> list[str]:
            return list(await asyncio.gather(work("a"), work("b")))

        async def main() -> None:
            running = asyncio.create_task(hive.run(build, run_id="r"))
            await until(lambda: calls == ["a"])
            store = open_store(folder)
            breaker = CircuitBreaker(1, 60, name="model", store=store)
            breaker.record_failure()
            close_store(store)
            turn.set()
            with pytest.raises(CircuitBreakerOpen):
                await running

        asyncio.run(main())
    assert calls == ["a"]
