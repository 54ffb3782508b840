"""What a kill leaves of a store in memory."""

from __future__ import annotations

import pytest

from maestro_hive.kernel.errors import RunLeasedError
from maestro_hive.maestro.state.records import EntryKind, NewDispatch, NewEntry
from maestro_hive.maestro.state.store import Append, NewRun
from maestro_hive.testing import ManualClock, MemoryStore

FIRST = NewEntry(EntryKind.RUN_STARTED)


def test_a_copy_has_what_was_recorded_and_nothing_that_is_recorded_later() -> None:
    store = MemoryStore(clock=ManualClock())
    run = store.acquire_run("one", "w", [FIRST], "running")
    store.create_runs([NewRun("two", "w", (FIRST,), "pending", NewDispatch(due=60.0))])
    left = MemoryStore(clock=ManualClock(), left_by=store)
    store.append([Append(run, [FIRST], "success")])
    store.wake_run("two")
    (record,) = [each for each in left.runs() if each.name == "one"]
    assert record.status == "running"
    assert len(left.entries(record.id)) == 1
    assert left.seconds_to_next() == 60.0
    assert store.seconds_to_next() == 0


def test_the_holders_of_its_leases_are_dead() -> None:
    store = MemoryStore(clock=ManualClock())
    store.acquire_run("one", "w", [FIRST], "running")
    left = MemoryStore(clock=ManualClock(), left_by=store)
    assert left.run_leases() == {}
    assert left.acquire_run("one").seq == 1
    with pytest.raises(RunLeasedError):
        MemoryStore(shared_with=store).acquire_run("one")
