"""Limits in one process: tasks, loops, cancellation, clocks; another store plays another process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import time
from typing import TYPE_CHECKING

import pytest

from maestro_hive.engine import limits
from maestro_hive.engine.limits import NAMESPACE, Limit
from maestro_hive.engine.rates import Rate
from maestro_hive.kernel.errors import ConfigurationError, DocumentCorruptError, StoreClosedError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.testing import ManualClock, MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from maestro_hive.maestro.state.store import Store

SLOTS = 3


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
    opened = SqliteStore(tmp_path / "state")
    yield opened
    opened.close()


def at_once(store: Store, most: int, name: str = "step") -> Limit:
    return Limit(store, name, rate=None, max_concurrency=most)


def at_rate(store: Store, times: int, seconds: float, name: str = "step") -> Limit:
    return Limit(store, name, rate=Rate(times, seconds), max_concurrency=None)


def held(store: Store, name: str = "step") -> list[str]:
    """Return the leases of a limit that somebody has."""
    names = [f"slot/{name}/{number}" for number in range(10)]
    names += [f"slot/{name}/line/{number}" for number in range(8)]
    return [each for each in names if store.lease(each) is not None]


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        await asyncio.sleep(0.005)


class Room:
    """Counts who is inside."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self.inside = self.most = self.entered = 0

    async def visit(self, limit: Limit, seconds: float = 0.002) -> None:
        give_back = await limit.enter()
        with self._mutex:
            self.inside += 1
            self.entered += 1
            self.most = max(self.most, self.inside)
        try:
            await asyncio.sleep(seconds)
        finally:
            with self._mutex:
                self.inside -= 1
            give_back()


# --- at once ------------------------------------------------------------------------------------


def test_never_more_than_so_many_are_inside_at_once(store: Store) -> None:
    room = Room()

    async def scene() -> None:
        limit = at_once(store, SLOTS)
        await asyncio.gather(*(room.visit(limit) for _ in range(40)))
        await until(lambda: not held(store))

    asyncio.run(scene())
    assert (room.entered, room.most) == (40, SLOTS)


def test_limits_of_one_name_are_one_limit_and_other_names_are_others(store: Store) -> None:
    room, other = Room(), Room()

    async def scene() -> None:
        first, second = at_once(store, 1), at_once(store, 1)
        elsewhere = at_once(store, 1, "other")
        give_back = await elsewhere.enter()
        await asyncio.gather(*(room.visit(limit) for limit in (first, second) * 5))
        give_back()
        await other.visit(elsewhere)
        await until(lambda: not held(store) and not held(store, "other"))

    asyncio.run(scene())
    assert (room.entered, room.most, other.entered) == (10, 1, 1)


def test_tasks_of_one_process_are_served_in_the_order_they_came(store: Store) -> None:
    order: list[int] = []

    async def visit(limit: Limit, number: int) -> None:
        give_back = await limit.enter()
        order.append(number)
        await asyncio.sleep(0)
        give_back()

    async def scene() -> None:
        limit = at_once(store, 1)
        await asyncio.gather(*(visit(limit, number) for number in range(20)))

    asyncio.run(scene())
    assert order == list(range(20))


def test_a_slot_given_back_wakes_the_next_one_here_at_once(store: Store) -> None:
    async def scene() -> float:
        limit = at_once(store, 1)
        give_back = await limit.enter()
        waiting = asyncio.create_task(limit.enter())
        await asyncio.sleep(0.3)  # long enough for pauses to have grown, were there any
        began = time.monotonic()
        give_back()
        (await waiting)()
        return time.monotonic() - began

    assert asyncio.run(scene()) < 0.1


def test_tasks_of_one_process_pass_a_slot_on_without_writing(
    folder_store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    take_lease = folder_store.take_lease

    def watched(name: str) -> object:
        taken.append(name)
        return take_lease(name)

    monkeypatch.setattr(folder_store, "take_lease", watched)
    room = Room()

    async def scene() -> None:
        limit = at_once(folder_store, 2)
        await asyncio.gather(*(room.visit(limit, 0.001) for _ in range(50)))

    asyncio.run(scene())
    assert room.entered == 50
    assert taken == ["slot/step/0", "slot/step/1"]
    assert not held(folder_store)


def test_giving_back_twice_does_not_give_away_the_slot_of_the_next_one(store: Store) -> None:
    async def scene() -> None:
        limit = at_once(store, 1)
        first = await limit.enter()
        waiting = asyncio.create_task(limit.enter())
        await asyncio.sleep(0.01)
        first()
        second = await waiting
        first()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(limit.enter(), 0.1)
        assert held(store) == ["slot/step/0"]
        second()
        (await asyncio.wait_for(limit.enter(), 5))()

    asyncio.run(scene())


def test_event_loops_in_several_threads_share_a_limit(store: Store) -> None:
    room = Room()

    async def visits() -> None:
        limit = at_once(store, 2)
        await asyncio.gather(*(room.visit(limit, 0.001) for _ in range(15)))

    threads = [threading.Thread(target=asyncio.run, args=(visits(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (room.entered, room.inside) == (60, 0)
    assert room.most <= 2
    asyncio.run(until(lambda: not held(store)))


def test_what_is_shared_is_dropped_when_nobody_uses_it(folder_store: SqliteStore) -> None:
    async def scene() -> None:
        give_back = await at_once(folder_store, 1).enter()
        again = at_once(folder_store, 1)
        with pytest.raises(TimeoutError):  # whoever has a slot keeps what is shared alive
            await asyncio.wait_for(again.enter(), 0.05)
        give_back()

    asyncio.run(scene())
    gc.collect()
    assert not limits._slots.get(folder_store)
    assert not limits._gates.get(folder_store)


@pytest.mark.parametrize("most", [0, -1, True, 1.5, "3"])
def test_a_number_that_cannot_be_used_is_refused(most: int) -> None:
    with pytest.raises(ConfigurationError, match="max_concurrency of 'step'"):
        at_once(MemoryStore(), most)


def test_without_a_limit_nothing_is_waited_for_or_written(folder_store: SqliteStore) -> None:
    async def scene() -> None:
        free = Limit(folder_store, "step", rate=None, max_concurrency=None)
        for give_back in [await free.enter() for _ in range(100)]:
            give_back()

    asyncio.run(scene())
    assert not held(folder_store)
    assert not folder_store.documents(NAMESPACE)


# --- cancelled -----------------------------------------------------------------------------------


def test_cancelled_waiters_leave_nothing_behind(store: Store) -> None:
    async def scene() -> None:
        limit = at_once(store, 1)
        give_back = await limit.enter()
        waiting = [asyncio.create_task(limit.enter()) for _ in range(20)]
        for turn, task in enumerate(waiting):
            for _ in range(turn % 4):
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        give_back()
        (await asyncio.wait_for(limit.enter(), 5))()
        await until(lambda: not held(store))

    asyncio.run(scene())


def test_who_is_cancelled_at_any_moment_leaks_no_slot(store: Store) -> None:
    """Cancel after more and more turns of the loop, while slots are given back all the time."""

    async def one_time(limit: Limit, turns: int) -> None:
        give_back = await limit.enter()
        waiting = [asyncio.create_task(limit.enter()) for _ in range(3)]
        await asyncio.sleep(0)
        give_back()
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
            await asyncio.wait_for(one_time(limit, turns), 5)
        await until(lambda: not held(store))

    asyncio.run(scene())


def test_who_is_cancelled_while_a_thread_takes_the_slot_gives_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(tmp_path / "state")
    monkeypatch.setattr(store, "syncs_fast", lambda: False)
    take_lease, entered, may_go_on = store.take_lease, threading.Event(), threading.Event()

    def slow(name: str) -> object:
        entered.set()
        may_go_on.wait(10)
        return take_lease(name)

    monkeypatch.setattr(store, "take_lease", slow)

    async def scene() -> None:
        limit = at_once(store, 1)
        task = asyncio.create_task(limit.enter())
        await until(entered.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_go_on.set()
        (await asyncio.wait_for(limit.enter(), 5))()
        await until(lambda: not held(store))

    asyncio.run(scene())
    store.close()


def test_who_is_cancelled_while_waiting_for_the_rate_gives_its_slot_back(store: Store) -> None:
    async def scene() -> None:
        both = Limit(store, "step", rate=Rate(1, 60), max_concurrency=2)
        (await both.enter())()
        task = asyncio.create_task(both.enter())
        await until(lambda: len(held(store)) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not held(store))

    asyncio.run(scene())


def test_a_beginning_that_is_cancelled_while_a_thread_counts_it_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(tmp_path / "state")
    monkeypatch.setattr(store, "syncs_fast", lambda: False)
    update, entered, may_go_on = store.update_document, threading.Event(), threading.Event()

    def slow(*arguments: object) -> object:
        entered.set()
        may_go_on.wait(10)
        return update(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "update_document", slow)

    async def scene() -> None:
        limit = at_rate(store, 1, 3600)
        task = asyncio.create_task(limit.enter())
        await until(entered.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_go_on.set()
        await until(lambda: (store.document(NAMESPACE, "step") or _NONE).version == 2)
        await asyncio.wait_for(limit.enter(), 5)

    asyncio.run(scene())
    store.close()


class _NONE:
    version = 0


# --- another process -----------------------------------------------------------------------------


def test_another_process_has_its_share_of_the_same_slots() -> None:
    mine = MemoryStore()
    other = MemoryStore(shared_with=mine)
    room = Room()

    async def scene() -> None:
        visits = [room.visit(at_once(store, 2), 0.01) for store in (mine, other) for _ in range(10)]
        await asyncio.gather(*visits)
        await until(lambda: not held(mine))

    asyncio.run(scene())
    assert (room.entered, room.most) == (20, 2)


def test_a_process_with_many_tasks_leaves_slots_to_one_with_a_single_task() -> None:
    crowd = MemoryStore()
    single = MemoryStore(shared_with=crowd)
    room = Room()

    async def scene() -> int:
        many = [asyncio.create_task(room.visit(at_once(crowd, 1), 0.01)) for _ in range(200)]
        await asyncio.sleep(0.03)
        give_back = await asyncio.wait_for(at_once(single, 1).enter(), 5)
        entered = room.entered
        give_back()
        for task in many:
            task.cancel()
        await asyncio.gather(*many, return_exceptions=True)
        return entered

    assert asyncio.run(scene()) < 100
    assert not held(crowd)


def test_the_slot_of_a_dead_process_is_free() -> None:
    store = MemoryStore()
    dead = MemoryStore(shared_with=store)

    async def scene() -> None:
        await at_once(dead, 1).enter()
        for number in range(8):  # it stood in line, too
            dead.take_lease(f"slot/step/line/{number}")
        dead.abandon()
        (await asyncio.wait_for(at_once(store, 1).enter(), 5))()

    asyncio.run(scene())


def test_who_lost_its_slot_while_it_hung_does_not_give_it_away() -> None:
    clock = ManualClock()
    hung, other = (store := MemoryStore(clock=clock)), MemoryStore(shared_with=store)

    async def scene() -> None:
        give_back = await at_once(hung, 1).enter()
        clock.advance(20)  # and the lease expires
        theirs = await asyncio.wait_for(at_once(other, 1).enter(), 5)
        give_back()
        assert hung.lease("slot/step/0") is not None
        theirs()
        assert hung.lease("slot/step/0") is None

    asyncio.run(scene())


def test_a_slot_that_was_lost_is_not_passed_on_to_a_task_here() -> None:
    clock = ManualClock()
    hung, other = (store := MemoryStore(clock=clock)), MemoryStore(shared_with=store)

    async def scene() -> None:
        limit = at_once(hung, 1)
        give_back = await limit.enter()
        waiting = asyncio.create_task(limit.enter())
        await asyncio.sleep(0.01)
        clock.advance(20)
        theirs = await asyncio.wait_for(at_once(other, 1).enter(), 5)
        give_back()
        await asyncio.sleep(0.1)
        assert not waiting.done()
        theirs()
        (await asyncio.wait_for(waiting, 5))()

    asyncio.run(scene())


def test_a_long_task_keeps_its_slot_in_a_store_that_renews_nothing() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    other = MemoryStore(shared_with=store)

    async def scene() -> None:
        limit = at_once(store, 2)
        give_back = await limit.enter()
        clock.advance(3600)
        await at_once(other, 2).enter()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(limit.enter(), 0.2)
        give_back()
        (await asyncio.wait_for(limit.enter(), 5))()

    asyncio.run(scene())


@pytest.mark.parametrize("before, after", [(4, 2), (2, 4)])
def test_another_number_of_slots_after_a_restart_just_works(
    tmp_path: Path, before: int, after: int
) -> None:
    for most in (before, after):
        store = SqliteStore(tmp_path / "state")
        room = Room()

        async def scene(store: Store = store, most: int = most, room: Room = room) -> None:
            limit = at_once(store, most)
            await asyncio.gather(*(room.visit(limit, 0.01) for _ in range(12)))
            for _ in range(most):
                await limit.enter()  # and ends without giving back

        asyncio.run(scene())
        assert (room.entered, room.most) == (12, most)
        store.close()


def test_a_closed_store_is_an_error_and_giving_back_to_it_is_none(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "state")

    async def scene() -> None:
        limit = Limit(store, "step", rate=Rate(5, 1), max_concurrency=2)
        give_back = await limit.enter()
        store.close()
        give_back()
        with pytest.raises(StoreClosedError):
            await limit.enter()

    asyncio.run(scene())


# --- in a stretch of time ------------------------------------------------------------------------


def began(clock: ManualClock, limit: Limit, times: int) -> list[float]:
    """Enter so often, on a clock that moves by itself when somebody sleeps."""
    moments: list[float] = []

    async def scene() -> None:
        for _ in range(times):
            (await limit.enter())()
            moments.append(clock.boot_seconds())

    asyncio.run(scene())
    return moments


def test_no_stretch_has_more_beginnings_than_the_rate_and_little_is_lost() -> None:
    clock = ManualClock()
    moments = began(clock, at_rate(MemoryStore(clock=clock), 60, 60), 600)
    assert all(last - first >= 60 for first, last in zip(moments, moments[60:], strict=False))
    assert moments[-1] - moments[0] < 9 * 60 * 1.03


def test_the_log_of_beginnings_does_not_grow_over_the_rate() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    began(clock, at_rate(store, 5, 10), 200)
    document = store.document(NAMESPACE, "step")
    assert document is not None
    assert len(codec.decode(document.value)["began"]) <= 5


def test_the_beginnings_of_a_process_that_ended_still_count() -> None:
    clock = ManualClock()
    first = MemoryStore(clock=clock)
    began(clock, at_rate(first, 3, 60), 3)
    first.abandon()
    (moment,) = began(clock, at_rate(MemoryStore(shared_with=first), 3, 60), 1)
    assert 1060 <= moment < 1061


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_setting_the_wall_clock_changes_nothing_within_a_boot(jump: float) -> None:
    clock = ManualClock()
    limit = at_rate(MemoryStore(clock=clock), 3, 60)
    began(clock, limit, 3)
    clock.jump(jump)
    (moment,) = began(clock, limit, 1)
    assert 1060 <= moment < 1061


def test_after_a_reboot_what_began_is_as_long_ago_as_the_wall_clock_says() -> None:
    clock = ManualClock()
    limit = at_rate(MemoryStore(clock=clock), 3, 600)
    began(clock, limit, 3)
    clock.reboot(100)  # which leaves 50 on its boot clock
    (moment,) = began(clock, limit, 1)
    assert 550 <= moment < 551


def test_a_wall_clock_set_back_over_a_reboot_costs_one_whole_stretch_at_most() -> None:
    clock = ManualClock()
    limit = at_rate(MemoryStore(clock=clock), 3, 600)
    began(clock, limit, 3)
    clock.reboot(100)
    clock.jump(-1e6)
    moments = began(clock, limit, 4)
    assert 650 <= moments[0] <= 651  # 50 on its boot clock, and the stretch
    assert moments[2] <= 651
    assert 1250 <= moments[3] < 1252


def test_a_laptop_that_slept_does_not_wait_for_what_passed_meanwhile() -> None:
    clock = ManualClock()
    limit = at_rate(MemoryStore(clock=clock), 3, 600)
    began(clock, limit, 3)
    clock.sleep_machine(700)
    assert began(clock, limit, 1) == [1700]


def test_another_rate_after_a_restart_just_works() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    began(clock, at_rate(store, 60, 60), 60)
    (lower,) = began(clock, at_rate(store, 10, 60), 1)
    assert 1060 <= lower < 1061
    assert began(clock, at_rate(store, 100, 60), 50)[-1] < 1062


def test_a_beginning_that_took_too_long_to_write_is_counted_when_it_begins() -> None:
    """Or the next stretch would be measured from a moment at which nothing began."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    update = store.update_document
    delays = [1.0]

    def slow(*arguments: object) -> object:
        done = update(*arguments)  # type: ignore[arg-type]
        clock.advance(delays.pop() if delays else 0.0)
        return done

    store.update_document = slow  # type: ignore[method-assign, assignment]
    moments = began(clock, at_rate(store, 1, 10), 2)
    assert moments[0] == 1001.0
    assert moments[1] - moments[0] >= 10


def test_tasks_wait_for_the_rate_in_the_order_they_came(store: Store) -> None:
    order: list[int] = []

    async def visit(limit: Limit, number: int) -> None:
        await limit.enter()
        order.append(number)

    async def scene() -> None:
        limit = at_rate(store, 5, 0.1)
        await asyncio.gather(*(visit(limit, number) for number in range(20)))

    asyncio.run(scene())
    assert order == list(range(20))


def test_a_cancelled_wait_for_the_rate_uses_nothing_up(store: Store) -> None:
    async def scene() -> None:
        limit = at_rate(store, 2, 0.3)
        await limit.enter()
        await limit.enter()
        waiting = [asyncio.create_task(limit.enter()) for _ in range(10)]
        await asyncio.sleep(0.05)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.wait_for(limit.enter(), 2)
        async with asyncio.timeout(0.15):
            await limit.enter()

    asyncio.run(scene())


def test_a_log_that_is_none_is_named(store: Store) -> None:
    store.update_document(NAMESPACE, "step", lambda _: codec.encode({"began": 5}))

    async def scene() -> None:
        with pytest.raises(DocumentCorruptError, match="limits/step"):
            await at_rate(store, 1, 1).enter()

    asyncio.run(scene())


def test_a_forked_child_starts_with_nothing_shared(folder_store: SqliteStore) -> None:
    limit = at_once(folder_store, 1)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            with limits._mutex:
                empty = not limits._slots and not limits._gates
            try:
                asyncio.run(limit.enter())
            except StoreClosedError:
                os._exit(42 if empty else 1)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 42
