"""Answers and chunks, over every database: each answer is taken once, chunks have no gaps."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.attempt import current
from maestro_hive.hive.hive import Hive
from maestro_hive.journal.effects import Release
from maestro_hive.journal.entries import RunStarted
from maestro_hive.journal.store import Acquire, RunLease, Store, open_store
from maestro_hive.kernel.errors import AlreadyAnsweredError, FencedError
from tests.hive.conftest import asks, status, until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def hive(place: str) -> Iterator[Hive]:
    with Hive(place) as made:
        yield made


def acquire(store: Store, name: str = "r") -> RunLease:
    (lease,) = store.write((Acquire(name, RunStarted(workflow="w")),))
    assert isinstance(lease, RunLease)
    return lease


def data_of(store: Store, run: RunLease, after: int = 0, limit: int = 1000) -> list[str]:
    return [each.data for each in store.chunks(run.number, after, limit=limit)]


def test_early_and_typed_answers_reach_their_questions(hive: Hive) -> None:
    gate = threading.Event()

    @hive.step
    def wait() -> None:
        gate.wait(30)

    @hive.workflow
    async def ask() -> list[Any]:
        await wait()
        return [await hive.wait_for("n", type=int), await hive.wait_for("m", type=bool)]

    async def main() -> list[Any]:
        running = asyncio.create_task(hive.run(ask, run_id="r"))
        await until(lambda: status(hive) == "running")
        hive.answer("r", "n", 1, early=True)
        with pytest.raises(AlreadyAnsweredError):
            hive.answer("r", "n", 2, early=True)
        gate.set()
        await until(lambda: asks(hive) == ["m"])
        hive.answer("r", "m", True)
        return await running

    assert asyncio.run(main()) == [1, True]


def test_of_senders_at_once_one_is_accepted(shared_place: str) -> None:
    with Hive(shared_place) as hive:

        @hive.workflow
        async def ask() -> Any:
            return await hive.wait_for("n")

        accepted: list[str] = []

        def send(name: str, question: str) -> None:
            with Hive(shared_place) as other:
                try:
                    other.answer("r", "n", name, question=question)
                except AlreadyAnsweredError:
                    return
                accepted.append(name)

        async def main() -> Any:
            running = asyncio.create_task(hive.run(ask, run_id="r"))
            await until(lambda: asks(hive))
            (asked,) = hive.questions("r")
            senders = [threading.Thread(target=send, args=(name, asked.id)) for name in "abcd"]
            for sender in senders:
                sender.start()
            found = await running
            for sender in senders:
                await asyncio.to_thread(sender.join)
            return found

        assert asyncio.run(main()) in accepted
        assert len(accepted) == 1


def test_a_step_that_writes_is_followed(hive: Hive) -> None:
    @hive.step
    async def draft() -> None:
        current().write("é\0€")
        current().write(b"\xff\0")

    @hive.workflow
    async def work() -> None:
        await draft()

    async def main() -> list[str | bytes]:
        await hive.run(work, run_id="r")
        return [each.data async for each in hive.stream("r")]

    assert asyncio.run(main()) == ["é\0€", b"\xff\0"]


def test_chunks_are_numbered_and_read_on_from_any_number(store: Store) -> None:
    run, beside = acquire(store), acquire(store, "beside")
    assert store.chunks(run.number) == []
    store.append_chunks(run, 1, 1, [b'"a"', b'"b"'])
    store.append_chunks(beside, 1, 1, [b'"x"'])
    store.append_chunks(run, 2, 1, [b'"c"'])
    assert [each.number for each in store.chunks(run.number)] == [1, 2, 3]
    assert data_of(store, run, 1) == ['"b"', '"c"']
    assert data_of(store, run, 1, 1) == ['"b"']
    assert data_of(store, beside) == ['"x"']
    assert [each.data for each in store.chunks(run.number, step=2)] == ['"c"']
    assert data_of(store, run, 10**30) == []


def test_a_process_that_lost_its_lease_writes_no_chunk(store: Store) -> None:
    run = acquire(store)
    store.append_chunks(run, 1, 1, [b'"a"'])
    store.release(run, Release("stopped"))
    taken = acquire(store)
    with pytest.raises(FencedError):
        store.append_chunks(run, 1, 1, [b'"late"'])
    store.append_chunks(taken, 1, 2, [b'"b"'])
    assert data_of(store, run) == ['"a"', '"b"']


def test_chunks_survive_the_process_that_wrote_them(shared_place: str) -> None:
    first = open_store(shared_place)
    run = acquire(first)
    first.append_chunks(run, 1, 1, [b'"a"'])
    first.db.close()
    second = open_store(shared_place)
    assert data_of(second, run) == ['"a"']
    second.db.close()
