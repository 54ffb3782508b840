"""Streams: the chunks of a run, numbered without gaps, under its lease, and gone with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from maestro_hive.kernel.errors import FencedError
from maestro_hive.maestro.state.records import Chunk, ChunkKind, NewChunk
from maestro_hive.maestro.state.store import ChunkAppend
from tests.contract.stores import LEASE

if TYPE_CHECKING:
    from maestro_hive.maestro.state.store import RunLease, Store
    from maestro_hive.testing import ManualClock


def text(word: str, step: int = 1, attempt: int = 1) -> NewChunk:
    return NewChunk(step, attempt, 7, ChunkKind.TEXT, word.encode())


def write(store: Store, run: RunLease, *words: str) -> FencedError | None:
    (refused,) = store.append_chunks([ChunkAppend(run, [text(word) for word in words])])
    return refused


def test_chunks_are_numbered_and_read_on_from_any_number(store: Store, other: Store) -> None:
    run = store.acquire_run("r")
    assert store.last_chunk(run.run) == 0
    assert store.chunks(run.run) == []
    assert write(store, run, "a", "b") is None
    assert write(store, run, "c") is None
    assert other.last_chunk(run.run) == 3
    assert other.chunks(run.run) == [
        Chunk(1, 1, 1, 7, ChunkKind.TEXT, b"a"),
        Chunk(2, 1, 1, 7, ChunkKind.TEXT, b"b"),
        Chunk(3, 1, 1, 7, ChunkKind.TEXT, b"c"),
    ]
    assert [chunk.seq for chunk in other.chunks(run.run, 1)] == [2, 3]
    assert [chunk.seq for chunk in other.chunks(run.run, 1, 1)] == [2]
    assert other.chunks(run.run, 3) == []


@pytest.mark.parametrize("after", [2**40, 2**63 - 1, 2**63, 10**30])
def test_after_an_absurd_number_there_is_nothing(store: Store, after: int) -> None:
    run, beside = store.acquire_run("r"), store.acquire_run("s")
    write(store, run, "a")
    write(store, beside, "b")
    assert store.chunks(run.run, after) == []
    assert store.entries(run.run, after) == []


@pytest.mark.parametrize("data", [b"", b"\0", "é\0€".encode(), bytes(range(256)), b"x" * 65536])
def test_data_comes_back_as_it_was(store: Store, data: bytes) -> None:
    run = store.acquire_run("r")
    store.append_chunks([ChunkAppend(run, [NewChunk(3, 2, 1, ChunkKind.BYTES, data)])])
    assert store.chunks(run.run) == [Chunk(1, 3, 2, 1, ChunkKind.BYTES, data)]


def test_runs_have_streams_of_their_own(store: Store) -> None:
    first, second = store.acquire_run("a"), store.acquire_run("b")
    refused = store.append_chunks(
        [ChunkAppend(first, [text("1"), text("2")]), ChunkAppend(second, [text("3")])]
    )
    assert refused == [None, None]
    assert [chunk.data for chunk in store.chunks(first.run)] == [b"1", b"2"]
    assert [chunk.data for chunk in store.chunks(second.run)] == [b"3"]


def test_chunks_are_no_entries(store: Store) -> None:
    run = store.acquire_run("r")
    write(store, run, "a")
    assert store.entries(run.run) == []
    assert run.seq == 0


def test_a_process_that_lost_its_lease_writes_nothing(
    store: Store, other: Store, clock: ManualClock
) -> None:
    run, own = store.acquire_run("r"), store.acquire_run("own")
    write(store, run, "a")
    clock.advance(LEASE + 1)
    taken = other.acquire_run("r")
    late, good = store.append_chunks(
        [ChunkAppend(run, [text("late")]), ChunkAppend(own, [text("good")])]
    )
    assert isinstance(late, FencedError)
    assert good is None
    assert write(other, taken, "b") is None
    assert [chunk.data for chunk in store.chunks(run.run)] == [b"a", b"b"]
    assert [chunk.data for chunk in store.chunks(own.run)] == [b"good"]


def test_chunks_survive_the_process_that_wrote_them(store: Store, other: Store) -> None:
    run = store.acquire_run("r")
    write(store, run, "a")
    store.release_run(run)
    store.close()
    assert [chunk.data for chunk in other.chunks(run.run)] == [b"a"]
    assert write(other, other.acquire_run("r"), "b") is None
    assert [chunk.seq for chunk in other.chunks(run.run)] == [1, 2]


def test_a_purged_run_takes_its_stream_along(store: Store) -> None:
    gone, stays = store.acquire_run("gone"), store.acquire_run("stays")
    write(store, gone, "a")
    write(store, stays, "b")
    store.release_run(gone)
    assert store.purge_runs(["gone"]) == 1
    assert store.chunks(gone.run) == []
    again = store.acquire_run("gone")
    assert store.chunks(again.run) == []
    assert [chunk.data for chunk in store.chunks(stays.run)] == [b"b"]


def test_no_chunks_are_no_error(store: Store) -> None:
    run = store.acquire_run("r")
    assert store.append_chunks([]) == []
    assert write(store, run) is None
    assert store.last_chunk(run.run) == 0
