"""A folder that has lost its journal: runs go on from their JSON copies."""

from __future__ import annotations

import logging
import shutil
import threading
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import Hive
from maestro_hive.engine.copies import Copier
from maestro_hive.hive import RunFailedError
from maestro_hive.testing import MemoryStore
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
        go_on.wait(5)
        written.append("old")

    copier.request(store, "r", write_old)
    assert started.wait(5)
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
        assert written.wait(5)
    assert "a copy could not be written" in caplog.text
