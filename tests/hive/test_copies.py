"""A folder that has lost its journal: runs go on from their JSON copies."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import Hive
from maestro_hive.admin.folder import require_journal
from maestro_hive.engine import copies
from maestro_hive.engine.copies import Copier
from maestro_hive.engine.open_run import OpenRun
from maestro_hive.hive import RunFailedError
from maestro_hive.hive.errors import UnknownRunError
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import AtomicWriteError, FolderError
from maestro_hive.testing import MemoryStore
from tests.cli.processes import maestro
from tests.hive.conftest import quick_config

if TYPE_CHECKING:
    from pathlib import Path


def lose_journal(folder: Path) -> None:
    for path in [*folder.glob("journal*"), folder / "holders"]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def program(folder: Path, calls: list[str], *, broken: bool = False) -> tuple[Hive, Any]:
    hive = Hive(folder, quick_config())

    @hive.step(max_attempts=1)
    async def work(name: str) -> str:
        calls.append(name)
        if broken and name == "b":
            raise ValueError("broken")
        return name.upper()

    @hive.workflow
    async def build() -> list[str]:
        return [await work("a"), await work("b")]

    return hive, build


def test_a_completed_run_returns_its_result(folder: Path) -> None:
    calls: list[str] = []
    hive, build = program(folder, calls)
    with hive:
        hive.run_sync(build, run_id="r")
    lose_journal(folder)
    hive, build = program(folder, calls)
    with hive:
        assert hive.run_sync(build, run_id="r") == ["A", "B"]
    assert calls == ["a", "b"]


def test_a_failed_run_goes_on_with_what_was_completed(folder: Path) -> None:
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
        assert hive.run_sync(build, run_id="r") == ["A", "B"]
    assert calls == ["b"]


# --- in the background -----------------------------------------------------------------------------


def test_an_older_copy_that_is_being_written_does_not_replace_a_newer_one() -> None:
    copier, store = Copier(), MemoryStore()
    started, go_on, written = threading.Event(), threading.Event(), []

    def write_old() -> None:
        started.set()
        go_on.wait(30)
        written.append("old")

    copier.request(store, "r", write_old)
    assert started.wait(30)
    copier.request(store, "r", lambda: written.append("new"))
    threading.Timer(0.1, go_on.set).start()
    copier.flush(store)
    assert written == ["old", "new"]


def test_after_a_copy_that_failed_the_next_ones_are_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    copier, store, written = Copier(), MemoryStore(), threading.Event()

    def fail() -> None:
        raise RuntimeError("a bug")

    with caplog.at_level(logging.ERROR):
        copier.request(store, "r", fail)
        copier.request(store, "q", written.set)
        assert written.wait(30)
    assert "a copy could not be written" in caplog.text


def test_a_copy_that_the_end_does_not_wait_for_is_counted_and_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    copier, store = Copier(), MemoryStore()
    started, closed, ended = threading.Event(), threading.Event(), threading.Event()

    def write() -> None:
        started.set()
        assert closed.wait(30)
        try:
            store.entries(1)
        finally:
            ended.set()

    copier.request(store, "r", write)
    assert started.wait(30)
    copier.flush(store, 0.01)
    store.close()
    closed.set()
    assert ended.wait(30)
    copier.flush(store)
    assert [each.getMessage() for each in caplog.records] == [
        f"{store.location}: 1 runs have no new JSON copy, for lack of time; the journal has them"
    ]


def test_a_copy_that_could_not_be_written_is_an_error_of_close(folder: Path) -> None:
    hive = Hive(folder, quick_config())
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


@pytest.mark.parametrize("place", ["runs", "checkpoints"])
def test_a_copy_that_is_being_written_does_not_outlive_a_purge(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The run is closed, and no lease keeps another process from purging it meanwhile."""
    writing, purged = threading.Event(), threading.Event()
    make_folder = files.make_folder_inside

    def make_slowly(root: Path, *names: str) -> Path:
        if names[-1] == "r" and place in (root.name, *names):
            writing.set()
            purged.wait(1)
        return make_folder(root, *names)

    monkeypatch.setattr(files, "make_folder_inside", make_slowly)
    monkeypatch.setattr(copies, "_REST_FACTOR", 0)
    with Hive(folder, quick_config()) as hive:

        @hive.workflow
        async def build() -> None:
            await hive.sleep(0)
            if place == "checkpoints":  # only of a run that is open
                await asyncio.to_thread(writing.wait, 10)

        hive.run_sync(build, run_id="r")
        assert writing.wait(10)
        assert maestro("purge", "r", "--yes", "--store", folder).returncode == 0
        purged.set()
    assert not (folder / "runs" / "r").exists()
    assert not (folder / "checkpoints" / "r").exists()


def test_a_run_of_which_only_a_copy_is_left_is_resumed_by_its_id(folder: Path) -> None:
    calls: list[str] = []
    hive, build = program(folder, calls)
    with hive:
        hive.run_sync(build, run_id="r")
    lose_journal(folder)
    hive, _ = program(folder, calls)
    with hive:
        assert asyncio.run(hive.resume("r")) == ["A", "B"]
        with pytest.raises(UnknownRunError, match="there is no run 'other'"):
            asyncio.run(hive.resume("other"))
    assert calls == ["a", "b"]


def test_a_folder_that_has_only_copies_is_not_called_an_empty_one(folder: Path) -> None:
    hive, build = program(folder, [])
    with hive:
        hive.run_sync(build, run_id="r")
    lose_journal(folder)
    with pytest.raises(FolderError, match=r"JSON copies of 1 run\(s\): r; start their programs"):
        require_journal(folder)


def test_the_last_copy_of_a_suspended_run_has_all_of_it_however_slowly_it_is_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = OpenRun.close

    def slow(run: OpenRun, *, released: bool = False) -> None:
        time.sleep(0.3)  # the thread that writes copies is quicker
        close(run, released=released)

    monkeypatch.setattr(OpenRun, "close", slow)
    calls: list[str] = []
    hive, build = program(folder, calls)

    @hive.workflow
    async def stopped() -> None:
        await build()
        await hive.sleep(1000)

    async def stop() -> None:
        running = asyncio.create_task(hive.run(stopped, run_id="r"))
        for _ in range(1000):
            if len(calls) >= 2:
                break
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        running.cancel()
        await asyncio.wait({running})

    with hive:
        asyncio.run(stop())
        store = hive._open()
        record = store.run("r")
        assert record is not None
        recorded = len(store.entries(record.id))
    copy = json.loads((folder / "runs" / "r" / "execution_state.json").read_bytes())
    assert len(copy["document"]["run"]["entries"]) == recorded
