"""Appends from an event loop: one transaction for all that come in one tick."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.kernel.errors import FencedError, StoreFailedError
from maestro_hive.maestro.state.codec import Encoded, encode
from maestro_hive.maestro.state.recorder import Recorder
from maestro_hive.maestro.state.records import Entry, EntryKind, NewEntry
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.store import Append
from maestro_hive.testing import ManualClock
from tests.contract.stores import Made

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from maestro_hive.maestro.state.store import RunLease

LEASE = 3000.0


class Counted(SqliteStore):
    """A store that counts its transactions of entries, and whose disk can be said to be slow."""

    slow = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, clock=ManualClock(), lease_seconds=LEASE)
        self.batches: list[int] = []
        self.threads: set[int] = set()

    def append(self, appends: Any, *, sync: bool = True, busy_timeout: float | None = None) -> Any:
        self.batches.append(len(appends))
        self.threads.add(threading.get_ident())
        return super().append(appends, sync=sync, busy_timeout=busy_timeout)

    def syncs_fast(self) -> bool:
        return not self.slow


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Counted]:
    opened = Counted(tmp_path / "state")
    yield opened
    opened.close()


@pytest.fixture(params=[False, True], ids=["quick disk", "slow disk"])
def either(request: pytest.FixtureRequest, store: Counted) -> Counted:
    store.slow = request.param
    return store


def saved(value: Any) -> list[NewEntry]:
    return [NewEntry(EntryKind.PROGRESS_SAVED, value=encode(value))]


def values(store: SqliteStore, hold: RunLease) -> list[bytes | None]:
    return [store.load(entry) for entry in store.entries(hold.run)]


@asynccontextmanager
async def no_hidden_errors() -> AsyncIterator[None]:
    """Fail if the loop was left with an error that nobody got."""
    hidden: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: hidden.append(context))
    yield
    assert hidden == []


def test_many_tasks_in_one_tick_are_one_transaction(either: Counted) -> None:
    hold = either.acquire_run("run-1")

    async def work() -> None:
        recorder = Recorder(either)
        await asyncio.gather(*(recorder.append(hold, saved(number)) for number in range(100)))

    asyncio.run(work())
    assert either.batches == [100]
    assert values(either, hold) == [encode(number).data for number in range(100)]


def test_each_append_is_told_its_entries(either: Counted) -> None:
    one, other = either.acquire_run("run-1"), either.acquire_run("run-2")

    async def work() -> list[list[Entry]]:
        recorder = Recorder(either)
        alone = [await recorder.append(one, saved(n) * 2) for n in range(3)]
        crowd = [(one, 1), (other, 3), (one, 2), (other, 1), (one, 0)]
        waiting = [recorder.append(hold, saved(0) * count) for hold, count in crowd]
        return [*alone, *await asyncio.gather(*waiting)]

    found = asyncio.run(work())
    numbers = [[entry.seq for entry in entries] for entries in found]
    assert numbers == [[1, 2], [3, 4], [5, 6], [7], [1, 2, 3], [8, 9], [4], []]
    assert [*found[4], *found[6]] == either.entries(other.run)


def test_what_was_awaited_can_be_read_by_others(either: Counted, tmp_path: Path) -> None:
    other = SqliteStore(tmp_path / "state")
    hold = either.acquire_run("run-1")

    async def work() -> None:
        recorder = Recorder(either)
        for number in range(1, 6):
            await recorder.append(hold, saved(number), status=f"after {number}")
            assert len(other.entries(hold.run)) == number
            assert [run.status for run in other.runs()] == [f"after {number}"]

    asyncio.run(work())
    other.close()


def test_order_is_kept_also_between_what_is_synced_and_what_is_not(either: Counted) -> None:
    hold = either.acquire_run("run-1")

    async def work() -> None:
        recorder = Recorder(either)
        done = []
        for number in range(60):
            done.append(recorder.append(hold, saved(number), sync=number % 3 == 0))
            if number % 7 == 0:
                await asyncio.sleep(0)
            if number % 11 == 0:
                await done[-1]
        await asyncio.gather(*done)

    asyncio.run(work())
    assert values(either, hold) == [encode(number).data for number in range(60)]


def test_a_fenced_append_fails_alone(either: Counted, tmp_path: Path) -> None:
    lost, kept = either.acquire_run("lost"), either.acquire_run("kept")
    clock = either.clock
    assert isinstance(clock, ManualClock)
    clock.advance(LEASE + 1)
    other = SqliteStore(tmp_path / "state", clock=clock)
    other.acquire_run("lost")

    async def work() -> list[BaseException | list[Entry]]:
        recorder = Recorder(either)
        async with no_hidden_errors():
            waiting = [recorder.append(hold, saved(hold.name)) for hold in (kept, lost, kept)]
            return await asyncio.gather(*waiting, return_exceptions=True)

    first, second, third = asyncio.run(work())
    assert isinstance(second, FencedError)
    assert [first, third] == [[entry] for entry in either.entries(kept.run)]
    assert values(either, kept) == [b'"kept"', b'"kept"']
    assert values(either, lost) == []
    other.close()


def test_a_failure_of_the_store_reaches_everybody(
    either: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = either.acquire_run("run-1")

    def fail(_fd: int) -> None:
        raise OSError(errno.EIO, "broken")

    async def work() -> list[BaseException | list[Entry]]:
        recorder = Recorder(either)
        async with no_hidden_errors():
            first = await asyncio.gather(
                *(recorder.append(hold, saved(number)) for number in range(3)),
                return_exceptions=True,
            )
            later = [recorder.append(hold, saved(4))]
            return first + await asyncio.gather(*later, return_exceptions=True)

    monkeypatch.setattr(os, "fdatasync", fail)
    outcomes = asyncio.run(work())
    monkeypatch.undo()
    assert [type(outcome) for outcome in outcomes] == [StoreFailedError] * 4


def test_entries_that_cannot_be_read_fail_their_caller_and_nobody_hangs(either: Counted) -> None:
    hold = either.acquire_run("run-1")

    def trouble(number: int) -> NewEntry:
        return saved("half" * (1 // number))[0]

    async def work() -> None:
        recorder = Recorder(either)
        good = recorder.append(hold, saved("good"))
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(recorder.append(hold, Made([1, 0], trouble)), 5)
        await asyncio.wait_for(good, 5)
        await asyncio.wait_for(recorder.append(hold, saved("after")), 5)

    asyncio.run(work())
    assert values(either, hold) == [b'"good"', b'"after"']


def test_an_error_that_nobody_foresaw_reaches_everybody(
    either: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = either.acquire_run("run-1")

    def broken(*_args: Any, **_more: Any) -> Any:
        raise ZeroDivisionError

    async def work() -> list[BaseException | list[Entry]]:
        recorder = Recorder(either)
        with monkeypatch.context() as patched:
            patched.setattr(either, "append", broken)
            waiting = [recorder.append(hold, saved(number)) for number in range(3)]
            outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)
        await recorder.append(hold, saved("after"))
        return outcomes

    outcomes = asyncio.run(work())
    assert [type(outcome) for outcome in outcomes] == [ZeroDivisionError] * 3
    assert values(either, hold) == [b'"after"']


def test_who_stops_waiting_disturbs_nobody(either: Counted) -> None:
    hold = either.acquire_run("run-1")

    async def work() -> None:
        recorder = Recorder(either)
        async with no_hidden_errors():

            async def record(number: int) -> None:
                await recorder.append(hold, saved(number))

            tasks = [asyncio.create_task(record(number)) for number in range(5)]
            await asyncio.sleep(0)
            tasks[1].cancel()
            tasks[3].cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        cancelled = [isinstance(outcome, asyncio.CancelledError) for outcome in outcomes]
        assert cancelled == [False, True, False, True, False]
        await recorder.append(hold, saved(5))

    asyncio.run(work())
    # What was handed over stands, waited for or not.
    assert values(either, hold) == [encode(number).data for number in range(6)]


def test_a_slow_disk_is_left_to_a_thread_and_the_loop_goes_on(
    store: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = store.acquire_run("run-1")
    store.slow = True
    go_on, syncing = threading.Event(), threading.Event()
    real = os.fdatasync

    def slowly(fd: int) -> None:
        syncing.set()
        assert go_on.wait(10)
        real(fd)

    async def work() -> int:
        recorder = Recorder(store)
        first = recorder.append(hold, saved(0))
        ticks = 0
        await asyncio.to_thread(syncing.wait, 10)
        later = []
        for number in range(1, 11):  # while the first one is being written
            later.append(recorder.append(hold, saved(number)))
            await asyncio.sleep(0)
            ticks += 1
        assert isinstance(first, asyncio.Future)
        assert not first.done()
        go_on.set()
        await asyncio.gather(first, *later)
        return ticks

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", slowly)
        assert asyncio.run(work()) == 10
    assert store.batches == [1, 10]
    assert threading.get_ident() not in store.threads
    assert values(store, hold) == [encode(number).data for number in range(11)]


def test_a_quick_disk_needs_no_thread(store: Counted) -> None:
    hold = store.acquire_run("run-1")

    async def work() -> None:
        recorder = Recorder(store)
        for number in range(5):
            await recorder.append(hold, saved(number))

    before = set(threading.enumerate())
    asyncio.run(work())
    assert store.threads == {threading.get_ident()}
    assert set(threading.enumerate()) <= before  # idle ones of earlier tests may end meanwhile


def test_the_loop_goes_on_while_another_process_keeps_the_journal(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "state")
    hold = store.acquire_run("run-1")
    other = SqliteStore(tmp_path / "state")
    inside, leave = threading.Event(), threading.Event()

    def stay(_before: bytes | None) -> Encoded:
        inside.set()
        assert leave.wait(30)
        return encode(1)

    async def work() -> float:
        recorder = Recorder(store)
        await recorder.append(hold, saved(0), sync=False)  # alone from here on
        await asyncio.sleep(0)
        keeper = threading.Thread(target=other.update_document, args=("s", "k", stay))
        keeper.start()
        assert inside.wait(30)
        longest = 0.0
        waiting = asyncio.ensure_future(both(recorder))
        for _ in range(30):
            before = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - before)
        assert not waiting.done()
        leave.set()
        await waiting
        keeper.join()
        return longest

    async def both(recorder: Recorder) -> None:
        await recorder.append(hold, saved(1), sync=False)
        await recorder.append(hold, saved(2))

    longest = asyncio.run(work())
    assert longest < 10  # a loop that waited would have waited for the other: half a minute
    assert values(store, hold) == [encode(number).data for number in range(3)]
    other.close()
    store.close()


def test_a_task_that_records_alone_is_not_collected_whoever_recorded_before(
    store: Counted,
) -> None:
    hold = store.acquire_run("run-1")

    async def work() -> int:
        recorder = Recorder(store)
        at_once = 0

        async def alone() -> int:
            found = 0
            for number in range(10):
                written = recorder.write(Append(hold, tuple(saved(number))), sync=False)
                found += isinstance(written, list)
                if not isinstance(written, list):
                    await written
            return found

        await recorder.append(hold, saved(0))
        at_once += await asyncio.ensure_future(alone())  # while this task waits
        return at_once

    assert asyncio.run(work()) >= 6
