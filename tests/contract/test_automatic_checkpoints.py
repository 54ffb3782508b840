"""Checkpoints and ``execution_state.json`` that are written at an interval, beside the steps."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from maestro_hive import ExecutionConfig, Hive, PersonaExecutor, StatePersistence
from maestro_hive.engine.copies import Copier
from maestro_hive.maestro.state.checkpoint import (
    CheckpointManager,
    WorkflowState,
    automatic_checkpoint_id,
)
from maestro_hive.testing import ManualClock, MemoryStore
from tests.python_processes import run_python

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("prompt_copies")

SECONDS = 30.0


def eventually(holds: Callable[[], bool]) -> bool:
    """Return whether something holds within some seconds: a thread has to be waited for."""
    until = time.monotonic() + SECONDS
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def config(tmp_path: Path) -> ExecutionConfig:
    return ExecutionConfig().in_folder(tmp_path / "state")


def copies(config: ExecutionConfig, run: str) -> tuple[bool, int]:
    """Return whether there is an ``execution_state.json``, and how many checkpoints there are."""
    folder = Path(config.state.state_dir)
    state = folder / "runs" / run / "execution_state.json"
    return state.exists(), len(list((folder / "checkpoints" / run).glob("*~auto_*.json")))


def test_the_first_record_of_a_run_is_copied_before_the_step_is_done(
    config: ExecutionConfig,
) -> None:
    def work() -> bool:
        return eventually(lambda: copies(config, "w") == (True, 1))

    with PersonaExecutor(config, workflow_id="w") as executor:
        assert asyncio.run(executor.execute(work, "first")).final_output is True


def test_a_workflow_is_copied_too(config: ExecutionConfig) -> None:
    hive = Hive(config.state.state_dir)

    @hive.step
    def work() -> bool:
        return eventually(lambda: copies(config, "w") == (True, 1))

    @hive.workflow
    async def build() -> bool:
        return await work()

    with hive:
        assert hive.run_sync(build, run_id="w") is True


def test_a_death_in_the_first_minute_leaves_a_copy_to_resume_from(config: ExecutionConfig) -> None:
    program = """
import asyncio, os, sys, time
from pathlib import Path
from maestro_hive import ExecutionConfig, PersonaExecutor
async def first(): return "paid for"
def second():
    folder = Path(sys.argv[1])
    for _ in range(3000):
        if list((folder / "checkpoints" / "w").glob("*.json")): os._exit(9)
        time.sleep(0.01)
config = ExecutionConfig.in_folder(sys.argv[1])
config.state.auto_checkpoint_interval_seconds = 0.05
executor = PersonaExecutor(config, workflow_id="w")
asyncio.run(executor.execute(first, "first"))
asyncio.run(executor.execute(second, "second"))
"""
    folder = Path(config.state.state_dir)
    assert run_python(program, folder).returncode == 9
    for path in folder.glob("journal*"):
        path.unlink()
    with StatePersistence(config, "w") as state:
        assert state.restored is not None


def test_copies_are_written_at_the_interval_while_something_changes(
    config: ExecutionConfig,
) -> None:
    config.state.auto_checkpoint_interval_seconds = 0.05
    with StatePersistence(config, "w") as state:
        for number in range(6000):
            state.update_state(step=number)
            time.sleep(0.005)
            if copies(config, "w")[1] >= 4:
                break
        assert copies(config, "w")[1] >= 4


def test_the_last_change_is_copied_although_nothing_follows_it(config: ExecutionConfig) -> None:
    config.state.auto_checkpoint_interval_seconds = 1
    with StatePersistence(config, "w") as state:
        before = time.monotonic()
        state.update_state(phase="one")
        assert eventually(lambda: copies(config, "w") == (True, 1))
        state.update_state(phase="two")
        assert eventually(lambda: copies(config, "w")[1] == 2)
        assert time.monotonic() - before >= 1, "at the interval, and not at once"
        manager = CheckpointManager(Path(config.state.state_dir) / "checkpoints")
        newest = manager.get_latest_checkpoint("w")
        assert newest is not None
        assert newest.state.phase == "two"
        time.sleep(1.3)
        assert copies(config, "w")[1] == 2, "nothing changed"


@pytest.mark.parametrize("setting", ["interval", "persistence"])
def test_without_an_interval_or_a_disk_there_are_none(
    config: ExecutionConfig, setting: str
) -> None:
    if setting == "interval":
        config.state.auto_checkpoint_interval_seconds = 0
    else:
        config.state.enable_persistence = False
    with StatePersistence(config, "w") as state:
        for number in range(5):
            state.update_state(step=number)
        time.sleep(0.2)
        assert state.list_checkpoints() == []


def test_automatic_checkpoints_do_not_push_out_those_asked_for(tmp_path: Path) -> None:
    clock = ManualClock()
    manager = CheckpointManager(tmp_path, max_checkpoints=3, clock=clock)
    asked_for = [
        manager.create_checkpoint("w", WorkflowState("w", step=n)).checkpoint_id for n in range(2)
    ]
    automatic = [automatic_checkpoint_id(clock) for _ in range(5)]
    for latest in automatic:
        manager.write("w", latest, {})
    latest = automatic[-1]
    assert manager.checkpoint_ids("w") == [latest, *asked_for[::-1]]
    newest = manager.create_checkpoint("w", WorkflowState("w", step=2)).checkpoint_id
    assert manager.checkpoint_ids("w") == [newest, *asked_for[::-1]]
    again = automatic_checkpoint_id(clock)
    manager.write("w", again, {})
    assert manager.checkpoint_ids("w") == [again, newest, asked_for[1]]


# --- the thread ------------------------------------------------------------------------------------


def test_a_copy_that_is_due_later_does_not_delay_one_that_is_due_now() -> None:
    copier, store, written = Copier(), MemoryStore(), threading.Event()
    copier.request(store, "later", lambda: None, time.monotonic() + 60)
    copier.request(store, "now", written.set)
    assert written.wait(SECONDS)


def test_what_is_due_later_is_written_when_it_is_flushed() -> None:
    copier, store, written = Copier(), MemoryStore(), threading.Event()
    copier.request(store, "later", written.set, time.monotonic() + 60)
    copier.flush(store)
    assert written.is_set()


def test_what_is_withdrawn_is_not_written() -> None:
    copier, store, written = Copier(), MemoryStore(), []
    write = lambda: written.append("w")  # noqa: E731 - the very function is named again
    copier.request(store, "r", write, time.monotonic() + 60)
    copier.withdraw(store, "other", write)
    copier.withdraw(store, "r", write)
    copier.flush(store)
    assert written == []


def test_a_pause_waits_for_what_is_written_and_keeps_the_next_one_back() -> None:
    copier, store, written = Copier(), MemoryStore(), []
    started, go_on = threading.Event(), threading.Event()

    def write_slowly() -> None:
        started.set()
        go_on.wait(SECONDS)
        written.append("first")

    copier.request(store, "r", write_slowly)
    assert started.wait(SECONDS)
    threading.Timer(0.05, go_on.set).start()
    with copier.paused(store, "r"):
        assert written == ["first"]
        copier.request(store, "r", lambda: written.append("second"))
        time.sleep(0.3)
        assert written == ["first"]
    copier.flush(store)
    assert written == ["first", "second"]
