"""What steps write while they are executed, and how it is followed."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.attempt import current
from maestro_hive.engine.config import StateConfig
from maestro_hive.engine.errors import ExecutionException
from maestro_hive.hive.hive import Hive
from maestro_hive.journal.effects import Release
from maestro_hive.journal.maintenance import purge
from maestro_hive.journal.store import RunLease, open_store
from maestro_hive.kernel.errors import (
    ConfigurationError,
    EncodeError,
    FencedError,
    RunFailedError,
    RunInactiveError,
    StorageError,
    UnknownRunError,
)
from tests.hive.conftest import (
    asks,
    hive_at,
    leave,
    quick_config,
    quick_hive,
    recorded,
    store_of,
    until,
)
from tests.planted_secrets import SHAPED
from tests.timing import least

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from maestro_hive.hive.streams import StreamChunk
    from tests.hive.conftest import PassedTime

MOST_BYTES = 64 * 1024


async def chunks_of(hive: Hive, run_id: str = "r", **options: Any) -> list[StreamChunk]:
    return [chunk async for chunk in hive.stream(run_id, **options)]


def read(hive: Hive, run_id: str = "r", **options: Any) -> list[StreamChunk]:
    return asyncio.run(chunks_of(hive, run_id, **options))


def data(chunks: list[StreamChunk]) -> list[str | bytes]:
    return [chunk.data for chunk in chunks if not chunk.restarted]


def last_attempt(chunks: list[StreamChunk]) -> list[str | bytes]:
    """Return what a reader has that drops what it has when a step starts over."""
    held: list[str | bytes] = []
    for chunk in chunks:
        if chunk.restarted:
            held.clear()
        else:
            held.append(chunk.data)
    return held


async def started(hive: Hive, job: Any, run_id: str = "r") -> asyncio.Task[Any]:
    """Start a run, and return when it is recorded."""
    running = asyncio.create_task(hive.run(job, run_id=run_id))
    await until(lambda: run_id in [run.run_id for run in hive.runs()])
    return running


def workflow_of(hive: Hive, step: Callable[[], Any]) -> Any:
    @hive.workflow
    async def job() -> Any:
        return await step()

    return job


# --- writing --------------------------------------------------------------------------------------


def test_texts_and_bytes_come_back_as_they_were_in_their_order(hive: Hive) -> None:
    written: list[str | bytes] = ["a", b"\xff\0", "", "é€\0", b"", "x" * MOST_BYTES]

    @hive.step
    async def draft() -> int:
        for chunk in written:
            current().write(chunk)
        return len(written)

    hive.run_sync(workflow_of(hive, draft), run_id="r")
    found = read(hive)
    assert data(found) == written
    assert [chunk.seq for chunk in found] == [1, 2, 3, 4, 5, 6]
    assert {(chunk.run_id, chunk.step, chunk.attempt) for chunk in found} == {("r", "draft", 1)}
    assert not any(chunk.restarted for chunk in found)
    assert [chunk.at for chunk in found] == sorted(chunk.at for chunk in found)


@pytest.mark.parametrize(
    "chunk, error, words",
    [
        ("x" * (MOST_BYTES + 1), ConfigurationError, "at most 65,536 bytes.*has 65,537"),
        ("€" * 30_000, ConfigurationError, "this one has 90,000"),
        ({"a": 1}, ConfigurationError, "takes a text or bytes, not dict.*json.dumps"),
        (bytearray(b"a"), ConfigurationError, "not bytearray"),
        ("\ud800", EncodeError, "chunk: a text with half a surrogate pair has no form"),
    ],
    ids=["too long", "too many bytes", "a value", "bytearray", "half a character"],
)
@pytest.mark.parametrize("stored", [True, False])
def test_what_cannot_be_written_is_refused_and_the_step_may_go_on(
    hive: Hive, chunk: Any, error: type[Exception], words: str, *, stored: bool
) -> None:
    @hive.step(store_streams=stored)
    async def draft() -> None:
        with pytest.raises(error, match=words):
            current().write(chunk)
        current().write("good")

    hive.run_sync(workflow_of(hive, draft), run_id="r")
    assert data(read(hive)) == (["good"] if stored else [])


def test_threads_and_nested_steps_write_to_their_own_step(hive: Hive) -> None:
    @hive.step
    def inner(word: str) -> str:
        current().write(f"inner {word}")
        return word

    @hive.step
    async def outer() -> None:
        current().write("before")
        await asyncio.gather(inner("a"), inner("b"))
        await asyncio.to_thread(current().write, "after")

    hive.run_sync(workflow_of(hive, outer), run_id="r")
    found = read(hive)
    assert data(read(hive, step="outer")) == ["before", "after"]
    names = {chunk.step: chunk.data for chunk in found if chunk.step != "outer"}
    assert set(names) == {"inner", "inner#2"}
    assert set(names.values()) == {"inner a", "inner b"}
    assert data(read(hive, step="inner#2")) == [names["inner#2"]]
    assert data(read(hive, step=1)) == ["before", "after"]


def test_many_threads_of_a_step_lose_nothing(hive: Hive) -> None:
    @hive.step
    def draft() -> None:
        context = current()

        def write(number: int) -> None:
            for each in range(500):
                context.write(f"{number} {each}")

        started = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()

    hive.run_sync(workflow_of(hive, draft), run_id="r")
    found = [str(chunk) for chunk in data(read(hive))]
    for number in range(4):
        own = [chunk for chunk in found if chunk.startswith(f"{number} ")]
        assert own == [f"{number} {each}" for each in range(500)]


def test_a_cancelled_step_keeps_what_it_wrote(hive: Hive) -> None:
    @hive.step
    async def draft() -> None:
        current().write("a")
        current().write("b")
        await asyncio.sleep(60)

    @hive.step
    async def see() -> None:
        async for chunk in hive.stream("r", "draft"):
            if chunk.data == "b":
                break

    @hive.workflow
    async def job() -> None:
        task = asyncio.create_task(draft())
        await see()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    hive.run_sync(job, run_id="r")
    assert data(read(hive, step="draft")) == ["a", "b"]


# --- when it cannot be written --------------------------------------------------------------------


def test_a_step_whose_stream_is_lost_is_not_completed(
    hive: Hive, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise StorageError("the disk is gone")

    @hive.step
    async def draft() -> None:
        current().write("a")

    job = workflow_of(hive, draft)
    with monkeypatch.context() as patch:
        patch.setattr(store_of(hive), "append_chunks", fail)
        with pytest.raises(StorageError, match="the disk is gone"):
            hive.run_sync(job, run_id="r")
    hive.run_sync(job, run_id="r")
    assert last_attempt(read(hive)) == ["a"]


# --- what is not stored ---------------------------------------------------------------------------


# --- attempts -------------------------------------------------------------------------------------


def test_a_new_attempt_says_that_it_starts_over(hive: Hive) -> None:
    @hive.step
    async def draft() -> None:
        for word in ("a", "b"):
            current().write(f"{word}{current().attempt}")
        if current().attempt < 3:
            raise ValueError("again")

    hive.run_sync(workflow_of(hive, draft), run_id="r")
    found = read(hive)
    assert [(chunk.attempt, chunk.restarted, chunk.data) for chunk in found] == [
        (1, False, "a1"), (1, False, "b1"),
        (2, True, ""), (2, False, "a2"), (2, False, "b2"),
        (3, True, ""), (3, False, "a3"), (3, False, "b3"),
    ]  # fmt: skip
    assert last_attempt(found) == ["a3", "b3"]


def test_an_attempt_that_writes_nothing_leaves_nothing(hive: Hive) -> None:
    @hive.step
    async def draft() -> str:
        if current().attempt == 1:
            current().write("half a sen")
            raise ValueError("again")
        return "from a cache"

    hive.run_sync(workflow_of(hive, draft), run_id="r")
    found = read(hive)
    assert [chunk.restarted for chunk in found] == [False, True]
    assert last_attempt(found) == []


def test_steps_without_streams_leave_no_marks(hive: Hive) -> None:
    @hive.step
    async def flaky() -> None:
        if current().attempt == 1:
            raise ValueError("again")

    hive.run_sync(workflow_of(hive, flaky), run_id="r")
    assert read(hive) == []


def test_a_retried_step_starts_over(hive: Hive) -> None:
    good = False

    @hive.step(max_attempts=1)
    async def draft() -> None:
        current().write("good" if good else "bad")
        if not good:
            raise ValueError("no")

    job = workflow_of(hive, draft)
    with pytest.raises(RunFailedError):
        hive.run_sync(job, run_id="r")
    assert last_attempt(read(hive)) == ["bad"]
    good = True
    hive.retry("r")
    hive.run_sync(job, run_id="r")
    assert last_attempt(read(hive)) == ["good"]


# --- following ------------------------------------------------------------------------------------


def test_a_stream_is_followed_live_and_ends_with_its_step(hive: Hive) -> None:
    seen: list[str] = []
    heard: list[asyncio.Event] = [asyncio.Event() for _ in range(3)]

    @hive.step
    async def draft() -> None:
        for number in range(3):
            current().write(str(number))
            await asyncio.wait_for(heard[number].wait(), 10)

    @hive.workflow
    async def job() -> None:
        await draft()
        await hive.wait_for("more")

    async def main() -> None:
        running = await started(hive, job)
        async for chunk in hive.stream("r", "draft"):
            seen.append(str(chunk.data))
            heard[int(chunk.data)].set()
        assert not running.done()
        await until(lambda: asks(hive))
        hive.answer("r", "more")
        await running

    asyncio.run(asyncio.wait_for(main(), 20))
    assert seen == ["0", "1", "2"]


@pytest.mark.timing
def test_a_chunk_is_seen_within_a_tenth_of_a_second(hive: Hive) -> None:
    """Polling takes at most 50 ms; the rest is for a busy machine."""
    job = workflow_of(hive, draft_of_times(hive))

    def median(run_id: str) -> float:
        async def main() -> list[float]:
            running = await started(hive, job, run_id)
            waits = [time.monotonic() - float(each.data) async for each in hive.stream(run_id)]
            await running
            return waits

        return sorted(asyncio.run(asyncio.wait_for(main(), 60)))[2]

    names = iter("abcde")
    assert least(lambda: median(next(names)), 0.1) < 0.1


def draft_of_times(hive: Hive) -> Any:

    @hive.step
    async def draft() -> None:
        for _ in range(5):
            await asyncio.sleep(0.1)
            current().write(str(time.monotonic()))

    return draft


def test_reading_goes_on_after_a_number(hive: Hive) -> None:
    @hive.step
    async def draft() -> None:
        for number in range(2500):  # more than are read at a time
            current().write(str(number))

    hive.run_sync(workflow_of(hive, draft), run_id="r")
    found = read(hive)
    assert data(found) == [str(number) for number in range(2500)]
    assert read(hive, after=found[1999].seq) == found[2000:]
    assert read(hive, after=found[-1].seq) == []
    assert read(hive, step="draft", after=2400) == found[2400:]
    with pytest.raises(ConfigurationError, match="after"):
        read(hive, after=-1)


def test_the_stream_of_a_run_that_nobody_executes_says_so(hive: Hive, folder: Path) -> None:
    @hive.step
    async def draft() -> None:
        current().write("a")

    @hive.workflow
    async def job() -> None:
        await draft()
        await hive.wait_for("more")

    async def first() -> None:
        running = await started(hive, job)
        async for _ in hive.stream("r", "draft"):
            pass
        await leave(running)

    asyncio.run(asyncio.wait_for(first(), 20))
    assert data(read(hive, follow=False)) == ["a"]
    assert data(read(hive, step="draft")) == ["a"]  # which has its outcome
    seen: list[StreamChunk] = []

    async def follow() -> None:
        async for chunk in hive.stream("r"):
            seen.append(chunk)  # noqa: PERF401 - it ends with an error

    with pytest.raises(RunInactiveError):
        asyncio.run(asyncio.wait_for(follow(), 20))
    assert data(seen) == ["a"]


def test_what_does_not_exist_is_an_error(hive: Hive) -> None:
    @hive.step
    async def draft() -> None:
        current().write("a")

    hive.run_sync(workflow_of(hive, draft), run_id="r")
    with pytest.raises(UnknownRunError, match="'nobody'"):
        read(hive, "nobody")
    with pytest.raises(ConfigurationError, match="has no step 'darft'; it has: draft"):
        read(hive, step="darft")


def test_a_fork_has_no_streams_of_the_run_it_comes_from(hive: Hive) -> None:
    @hive.step
    async def draft() -> None:
        current().write("a")

    hive.run_sync(workflow_of(hive, draft), run_id="r")
    forked = hive.fork("r")
    assert read(hive, forked, follow=False) == []


# --- kinds of stores, and time --------------------------------------------------------------------


def test_a_stream_in_memory_is_followed_too() -> None:
    with quick_hive(":memory:") as hive:

        @hive.step
        async def draft() -> None:
            if current().attempt == 1:
                current().write("bad")
                raise ValueError("again")
            current().write("good")

        hive.run_sync(workflow_of(hive, draft), run_id="r")
        assert last_attempt(read(hive)) == ["good"]


def test_a_reader_that_only_reads_follows_too(hive: Hive, folder: Path) -> None:
    @hive.step
    async def draft() -> None:
        current().write("a")
        reader = open_store(folder)
        try:
            number = reader.find("r").number
            await until(lambda: [chunk.data for chunk in reader.chunks(number)] == ['"a"'])
        finally:
            reader.db.close()

    hive.run_sync(workflow_of(hive, draft), run_id="r")


def test_a_run_that_was_taken_over_writes_nothing_more(hive: Hive) -> None:
    @hive.step
    async def draft() -> None:
        current().write("mine")
        await until(lambda: data(read_chunks(hive)))
        store = store_of(hive)
        lease = RunLease(store.find("r").number, "r", store.find("r").fence, 0)
        store.release(lease, Release("stopped"))  # as if another process had taken it
        current().write("late")

    with pytest.raises(FencedError):
        hive.run_sync(workflow_of(hive, draft), run_id="r")
    assert data(read(hive, follow=False)) == ["mine"]


def read_chunks(hive: Hive) -> list[StreamChunk]:
    """Return the chunks of the run, also on an event loop."""
    reader = threading.Thread(target=lambda: found.extend(read(hive, follow=False)))
    found: list[StreamChunk] = []
    reader.start()
    reader.join()
    return found


def test_an_outcome_is_recorded_after_all_chunks(
    hive: Hive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that sees that a step is completed can read all that it wrote."""
    store = store_of(hive)
    write, seen = store.write, []

    def watched(*args: Any) -> Any:
        found = write(*args)
        kinds = [each.kind for each in recorded(hive)]
        outcomes = kinds.count("step_completed") + kinds.count("attempt_failed")
        seen.append((outcomes, len(store.chunks(store.find("r").number))))
        return found

    @hive.step
    async def draft(number: int) -> None:
        for each in range(50):
            current().write(f"{number} {each}")
        if number == 2 and current().attempt == 1:
            raise ValueError("once")

    @hive.workflow
    async def job() -> None:
        for number in range(3):
            await draft(number)

    monkeypatch.setattr(store, "write", watched)
    hive.run_sync(job, run_id="r")
    # How many chunks there were when the number of outcomes was first seen; the third one is a
    # failure, and "starts over" follows it.
    assert [dict(reversed(seen))[count] for count in (1, 2, 3, 4)] == [50, 100, 150, 201]


def test_a_step_that_writes_more_than_fits_into_memory_waits(hive: Hive) -> None:
    stored: list[int] = []

    @hive.step
    async def draft() -> None:
        store = store_of(hive)
        for number in range(100):
            current().write(str(number).rjust(MOST_BYTES))
            stored.append(len(store.chunks(store.find("r").number)))

    hive.run_sync(workflow_of(hive, draft), run_id="r")
    assert data(read(hive)) == [str(number).rjust(MOST_BYTES) for number in range(100)]
    assert stored[-1] > 0


def test_nothing_is_written_after_an_attempt_is_over(folder: Path, clock: PassedTime) -> None:
    late: list[Exception] = []
    started, written, over = threading.Event(), threading.Event(), threading.Event()
    with hive_at(folder, clock) as hive:

        @hive.step(timeout=60, max_attempts=1)
        def slow() -> None:
            context = current()
            context.write("in time")
            started.set()
            over.wait(30)
            try:
                context.write("late")
            except ExecutionException as error:
                late.append(error)
            written.set()

        async def main() -> None:
            running = asyncio.create_task(hive.run(workflow_of(hive, slow), run_id="r"))
            await until(started.is_set)
            clock.advance(60)
            await running

        with pytest.raises(RunFailedError):
            clock.run(main())
        over.set()
        assert written.wait(30)
        assert "is over, and cannot write to its stream any more" in str(late[0])
        assert data(read(hive)) == ["in time"]


def test_a_hive_and_a_step_may_store_no_streams(folder: Path) -> None:
    config = quick_config()
    config.state = StateConfig(store_streams=False)
    with Hive(folder, config) as hive:

        @hive.step
        async def silent() -> None:
            current().write("not stored")

        @hive.step(store_streams=True)
        async def loud() -> None:
            current().write("stored")

        @hive.workflow
        async def job() -> None:
            await silent()
            await loud()

        hive.run_sync(job, run_id="r")
        assert data(read(hive)) == ["stored"]


def test_following_ends_when_the_run_is_purged(hive: Hive) -> None:
    @hive.workflow
    async def ask() -> None:
        await hive.wait_for("more")

    async def main() -> None:
        running = await started(hive, ask)
        following = asyncio.create_task(chunks_of(hive))
        await until(lambda: asks(hive))
        await leave(running)
        purge(store_of(hive), ["r"])
        with pytest.raises((UnknownRunError, RunInactiveError)):
            await asyncio.wait_for(following, 20)

    asyncio.run(main())


def test_a_secret_in_a_chunk_is_not_stored(hive: Hive) -> None:
    secret = SHAPED["github"]

    @hive.step
    async def draft() -> None:
        current().write(f"the token is {secret}")

    hive.run_sync(workflow_of(hive, draft), run_id="r")
    assert data(read(hive)) == ["the token is [redacted]"]
