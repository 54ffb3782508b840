"""A folder that has lost its journal: runs continue from their JSON copies."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.config import ExecutionConfig, StateConfig
from maestro_hive.hive.hive import Hive
from maestro_hive.journal import transfer
from maestro_hive.journal.checkpoints import CheckpointFolder
from maestro_hive.journal.copies import CopyFolder
from maestro_hive.journal.store import open_store
from maestro_hive.kernel.errors import AtomicWriteError, RunFailedError, UnknownRunError
from tests.hive.conftest import asks, leave, quick_hive, recorded, until
from tests.python_processes import run_python
from tests.stores import postgres_place

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("own_default_folders")


@pytest.fixture
def own_default_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAESTRO_STATE_DIR", raising=False)
    monkeypatch.delenv("MAESTRO_CHECKPOINT_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def lose_journal(folder: Path) -> None:
    for path in [*folder.glob("journal*"), folder / "holders"]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def copies(folder: Path, run_id: str = "r") -> tuple[bool, int]:
    """Return whether there is an ``execution_state.json``, and how many checkpoints there are."""
    state = folder / "runs" / run_id / "execution_state.json"
    return state.exists(), len(list((folder / "checkpoints" / run_id).glob("*~auto_*.json")))


def program(
    place: Path | str, calls: list[str], *, broken: bool = False, state: StateConfig | None = None
) -> tuple[Hive, Any]:
    hive = quick_hive(place)
    if state is not None:
        hive = Hive(place, replace(hive.config, state=state))

    @hive.step(max_attempts=1)
    async def work(name: str) -> str:
        calls.append(name)
        if broken and name == "b":
            raise ValueError("broken")
        return name.upper() * 20_000

    @hive.workflow
    async def build() -> list[str]:
        return [await work("a"), await work("b")]

    return hive, build


def test_a_completed_run_returns_its_result(folder: Path) -> None:
    calls: list[str] = []
    hive, build = program(folder, calls)
    with hive:
        result = hive.run_sync(build, run_id="r")
    lose_journal(folder)
    hive, build = program(folder, calls)
    with hive:
        assert hive.run_sync(build, run_id="r") == result
    assert calls == ["a", "b"]


def test_a_failed_run_continues_with_what_was_completed(folder: Path) -> None:
    calls: list[str] = []
    hive, build = program(folder, calls, broken=True)
    with hive, pytest.raises(RunFailedError):
        hive.run_sync(build, run_id="r")
    lose_journal(folder)
    calls.clear()
    hive, build = program(folder, calls)
    with hive:
        with pytest.raises(RunFailedError, match="broken"):
            hive.run_sync(build, run_id="r")
        hive.retry("r")
        assert [text[0] for text in hive.run_sync(build, run_id="r")] == ["A", "B"]
    assert calls == ["b"]


def test_a_run_that_is_restored_runs_again_what_came_after_its_checkpoint(folder: Path) -> None:
    calls: list[str] = []
    hive, build = program(folder, calls, broken=True)
    with hive, pytest.raises(RunFailedError):
        hive.run_sync(build, run_id="r")
    failed = (folder / "runs" / "r" / "execution_state.json").read_bytes()
    hive, build = program(folder, calls)
    with hive:
        hive.retry("r")
        result = hive.run_sync(build, run_id="r")
    (folder / "runs" / "r" / "execution_state.json").write_bytes(failed)
    store, found = open_store(folder), CopyFolder(folder).newest("r")
    assert found is not None
    transfer.restore_run(store, found.copy, found.source)
    store.db.close()
    hive, build = program(folder, calls)
    with hive:
        with pytest.raises(RunFailedError, match="broken"):
            hive.run_sync(build, run_id="r")
        hive.retry("r")
        assert hive.run_sync(build, run_id="r") == result
    assert calls == ["a", "b", "b", "b"]


def test_a_run_of_which_only_a_copy_is_left_is_resumed_by_its_id(folder: Path) -> None:
    calls: list[str] = []
    hive, build = program(folder, calls)
    with hive:
        result = hive.run_sync(build, run_id="r")
    lose_journal(folder)
    hive, _ = program(folder, calls)
    with hive:
        assert asyncio.run(hive.resume("r")) == result
        with pytest.raises(UnknownRunError, match="has no run 'other'"):
            asyncio.run(hive.resume("other"))
    assert calls == ["a", "b"]


def test_a_run_that_is_enqueued_again_continues_from_its_copy(folder: Path) -> None:
    calls: list[str] = []

    def enqueued() -> tuple[Hive, Any]:
        hive, build = program(folder, calls)

        @hive.workflow
        async def outer() -> list[str]:
            done: list[str] = await build()
            await hive.wait_for("ready")
            return [text[0] for text in done]

        return hive, hive.enqueue(outer, run_id="r", queue="q")

    async def work(*, ends: bool) -> None:
        async with hive.worker(grace=0):
            await until(lambda: asks(hive) == ["ready"])
            if ends:
                hive.answer("r", "ready")
                assert await handle.result() == ["A", "B"]

    hive, handle = enqueued()
    with hive:
        asyncio.run(work(ends=False))
    lose_journal(folder)
    hive, handle = enqueued()
    with hive:
        assert handle.status == "pending"
        asyncio.run(work(ends=True))
    assert calls == ["a", "b"]


def test_children_continue_from_their_copies_too(folder: Path) -> None:
    calls: list[str] = []
    hive, build = program(folder, calls, broken=True)

    @hive.workflow
    async def parent() -> list[str]:
        return [text[0] for text in await build()]

    with hive, pytest.raises(RunFailedError):
        hive.run_sync(parent, run_id="r")
    lose_journal(folder)
    hive, build = program(folder, calls)
    hive.workflow(parent.function)
    with hive, pytest.raises(RunFailedError, match="broken"):
        hive.run_sync(parent, run_id="r")
    assert calls == ["a", "b"]


def test_a_damaged_copy_is_set_aside_and_an_older_one_continues(folder: Path) -> None:
    calls: list[str] = []
    hive, build = program(folder, calls)

    @hive.workflow
    async def slow() -> list[str]:
        done: list[str] = await build()
        while copies(folder)[1] < 1:
            await hive.outside(asyncio.sleep(0.02))
        return [text[0] for text in done]

    with hive:
        assert hive.run_sync(slow, run_id="r") == ["A", "B"]
    newest = folder / "runs" / "r" / "execution_state.json"
    newest.write_bytes(newest.read_bytes()[:-100])
    lose_journal(folder)
    hive, build = program(folder, calls)
    hive.workflow(slow.function)
    with hive:
        assert hive.run_sync(slow, run_id="r") == ["A", "B"]
    assert calls == ["a", "b"]
    assert list(newest.parent.glob("*.damaged-*"))


# --- when they are written ------------------------------------------------------------------------


def test_a_workflow_is_copied_too(folder: Path) -> None:
    """While its step is executed: after a second."""
    hive = quick_hive(folder)

    @hive.step
    def work() -> bool:
        until_then = time.monotonic() + 30
        while copies(folder) != (True, 1) and time.monotonic() < until_then:
            time.sleep(0.01)
        return copies(folder) == (True, 1)

    @hive.workflow
    async def build() -> bool:
        return await work()

    with hive:
        assert hive.run_sync(build, run_id="r") is True


_DIES = """
import os, sys, time
from pathlib import Path
from maestro_hive.engine.config import ExecutionConfig
from maestro_hive.hive.hive import Hive
folder, end = Path(sys.argv[1]), sys.argv[2]
config = ExecutionConfig()
config.state.auto_checkpoint_interval_seconds = 0.05
hive = Hive(folder, config)

@hive.step
async def first() -> str:
    print("paid for")
    return "paid for"

@hive.step
def second() -> str:
    if end == "dies":
        for _ in range(3000):
            if list((folder / "checkpoints" / "r").glob("*.json")):
                sys.stdout.flush()
                os._exit(9)
            time.sleep(0.01)
    return "done"

@hive.workflow
async def build() -> list[str]:
    return [await first(), await second()]

print(hive.run_sync(build, run_id="r"))
"""


def test_a_death_in_the_first_minute_leaves_a_copy_to_resume_from(folder: Path) -> None:
    assert run_python(_DIES, folder, "dies").returncode == signal.SIGKILL
    lose_journal(folder)
    again = run_python(_DIES, folder, "ends")
    assert again.stdout.splitlines() == ["['paid for', 'done']"]


def test_a_program_that_does_not_close_its_hive_writes_the_copies_at_its_end(folder: Path) -> None:
    assert run_python(_DIES, folder, "ends").returncode == 0
    assert copies(folder)[0]
    lose_journal(folder)
    assert run_python(_DIES, folder, "ends").stdout.splitlines() == ["['paid for', 'done']"]


def test_the_last_copy_of_a_suspended_run_has_all_of_it(folder: Path) -> None:
    calls: list[str] = []
    hive, build = program(folder, calls)

    @hive.workflow
    async def stopped() -> None:
        await build()
        await hive.sleep(1000)

    async def stop() -> None:
        running = asyncio.create_task(hive.run(stopped, run_id="r"))
        await until(lambda: len(calls) == 2)
        await leave(running)

    with hive:
        asyncio.run(stop())
        entries = len(recorded(hive))
    copy = json.loads((folder / "runs" / "r" / "execution_state.json").read_bytes())
    assert len(copy["document"]["entries"]) == entries
    assert copy["document"]["status"] == "stopped"


def test_a_copy_that_could_not_be_written_is_an_error_of_close(folder: Path) -> None:
    hive = quick_hive(folder)
    in_the_way = folder / "runs" / "r" / "execution_state.json" / "file"

    @hive.workflow
    async def build() -> str:
        in_the_way.parent.unlink(missing_ok=True)  # the first copy, if this machine is slow
        in_the_way.parent.mkdir(parents=True)
        in_the_way.touch()
        return "built"

    assert hive.run_sync(build, run_id="r") == "built"
    with pytest.raises(AtomicWriteError, match=r"execution_state\.json was not written"):
        hive.close()
    hive.close()
    with Hive(folder) as again:
        assert [info.run_id for info in again.runs("success")] == ["r"]


# --- settings -------------------------------------------------------------------------------------


def test_without_an_interval_there_are_no_checkpoints(folder: Path) -> None:
    state = StateConfig(auto_checkpoint_interval_seconds=0)
    hive, build = program(folder, [], state=state)
    with hive:
        hive.run_sync(build, run_id="r")
    assert copies(folder) == (True, 0)


def test_without_a_disk_there_is_nothing(folder: Path) -> None:
    hive, build = program(folder, [], state=StateConfig(enable_persistence=False))
    with hive:
        hive.run_sync(build, run_id="r")
    assert not folder.exists()


def test_no_more_checkpoints_are_stored_than_were_set(folder: Path) -> None:
    state = StateConfig(auto_checkpoint_interval_seconds=0.01, max_checkpoints_per_workflow=2)
    hive, _ = program(folder, [], state=state)
    seen: set[str] = set()

    @hive.step
    async def tick(number: int) -> int:
        await asyncio.sleep(0.02)
        seen.update(
            each.checkpoint_id for each in CheckpointFolder(folder / "checkpoints").names("r")
        )
        return number

    @hive.workflow
    async def slow() -> None:
        number = 0
        while len(seen) < 5:
            number = await tick(number) + 1

    with hive:
        hive.run_sync(slow, run_id="r")
    assert copies(folder)[1] == 2


def test_the_folders_of_the_configuration_are_used(tmp_path: Path) -> None:
    state = StateConfig(state_dir=str(tmp_path / "s"), checkpoint_dir=str(tmp_path / "c"))
    hive = Hive(config=ExecutionConfig(state=state))

    @hive.workflow
    async def build() -> None:
        while not (tmp_path / "c" / "r").exists():
            await hive.outside(asyncio.sleep(0.02))

    with hive:
        hive.run_sync(build, run_id="r")
    assert (tmp_path / "s" / "runs" / "r" / "execution_state.json").exists()
    assert not (tmp_path / "s" / "checkpoints").exists()


def test_a_database_has_copies_only_if_a_folder_for_them_is_given(tmp_path: Path) -> None:
    with postgres_place() as url:
        hive, build = program(url, [])
        with hive:
            hive.run_sync(build, run_id="without")
        hive, build = program(url, [], state=StateConfig(state_dir=str(tmp_path / "given")))
        with hive:
            hive.run_sync(build, run_id="with")
    assert sorted(path.name for path in (tmp_path / "given" / "runs").iterdir()) == ["with"]
    assert not (tmp_path / "home").exists()
    calls: list[str] = []
    with postgres_place() as url:  # another database: the first one is lost
        hive, build = program(url, calls, state=StateConfig(state_dir=str(tmp_path / "given")))
        with hive:
            assert len(hive.run_sync(build, run_id="with")) == 2
    assert calls == []
