"""Copying a long run: the event loop goes on, and memory does not grow with the run."""

from __future__ import annotations

import hashlib
import json
import sys
import time
import tracemalloc
from typing import TYPE_CHECKING

import pytest

from maestro_hive.engine.config import StateConfig
from maestro_hive.engine.open_run import OpenRun, open_run
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.records import EntryKind, NewEntry
from tests.timing import least

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

STEPS = 30_000
_FACTS = codec.dump_canonical({"name": "work", "persona": "dev"})
#: Its part of the whole promise: 50 ms for 100,000 steps.
_MOST_SECONDS = 0.015


def entries(first: int, last: int) -> list[NewEntry]:
    made = []
    for step in range(first, last):
        identity = hashlib.sha256(b"%d" % step).digest()
        made.append(NewEntry(EntryKind.ATTEMPT_STARTED, step, 1, _FACTS, None, "", identity))
        made.append(NewEntry(EntryKind.STEP_COMPLETED, step, 1, value=codec.encode({"n": step})))
    return made


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenRun]:
    """A long run; each test writes its copy again."""
    state = tmp_path_factory.mktemp("long") / "state"
    config = StateConfig(
        state_dir=str(state),
        checkpoint_dir=str(state / "c"),
        auto_checkpoint_interval_seconds=0,  # no thread copies it while that is measured
    )
    run = open_run(config, "long")
    run.load()
    for first in range(1, STEPS + 1, 2000):
        run.append(entries(first, first + 2000), sync=False)
    yield run
    run.close()


def longest_turn(call: Callable[[], object]) -> float:
    """Return how long a call kept other threads from their turn, at most.

    Python gives them one every 5 ms, but not while a function that is written in C or a collection
    of garbage goes on. Such a stretch lies between a call or a return and the next one, and is
    measured in CPU time: who only waits for a processor blocks nobody.
    """
    longest = 0.0
    last = time.thread_time()

    def watch(_frame: FrameType, _event: str, _argument: object) -> None:
        nonlocal longest, last
        now = time.thread_time()
        longest = max(longest, now - last)
        last = time.thread_time()

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(before)
    return longest


def test_the_loop_is_not_blocked_while_a_long_run_is_copied(run: OpenRun) -> None:
    assert least(lambda: longest_turn(run.write_copy), _MOST_SECONDS) < _MOST_SECONDS
    path = run.copies.path
    assert path is not None
    assert len(json.loads(path.read_bytes())["document"]["run"]["entries"]) == 2 * STEPS


def test_a_call_that_keeps_other_threads_waiting_is_noticed() -> None:
    values = [*range(500_000)]
    assert longest_turn(lambda: json.dumps(values)) > _MOST_SECONDS
    in_parts = lambda: longest_turn(lambda: [json.dumps(each) for each in range(5_000)])  # noqa: E731
    assert least(in_parts, _MOST_SECONDS) < _MOST_SECONDS


def test_copying_a_long_run_takes_little_memory(run: OpenRun) -> None:
    tracemalloc.start()
    try:
        run.write_copy()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    path = run.copies.path
    assert path is not None
    assert path.stat().st_size > 8_000_000
    assert peak < 2_000_000
