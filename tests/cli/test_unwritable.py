"""Folders that cannot be written: read-only and full disks are read, and errors name them."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from maestro_hive.maestro.state.sqlite import reader as sqlite_reader
from tests.cli.processes import answer, complaint, maestro
from tests.cli.sample_runs import asks, ends, workflow

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser may mount")

READS = [["runs"], ["show", "done"], ["show", "done", "--json"], ["events", "done"]]
READS += [["events", "asking", "--follow"], ["export", "done", "-"]]
WRITES = [["answer", "asking", "approve", "yes"], ["retry", "done"], ["cancel", "asking", "--yes"]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "state"
    workflow(folder, "done", "success", ends("success", {"made": "x" * 5000}))
    workflow(folder, "asking", "waiting", asks())
    return folder


def mount(*words: str | Path) -> None:
    subprocess.run(["mount", *words], check=True)


@pytest.fixture
def read_only(made: Path) -> Iterator[Path]:
    mount("--bind", made, made)
    try:
        mount("-o", "remount,ro,bind", made)
        yield made
    finally:
        subprocess.run(["umount", made], check=True)


@pytest.fixture
def full(made: Path, tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount("-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", disk)
    try:
        shutil.copytree(made, disk / "state")
        rest = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        (disk / "ballast").write_bytes(b"x" * rest)
        yield disk / "state"
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def _assert_readable(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    for words in READS:
        done = maestro(*words, "--store", folder)
        assert done.returncode == (75 if "--follow" in words else 0), done
        assert done.stdout
        assert "cannot be written" not in done.stderr
    assert sorted(folder.rglob("*")) == before
    assert [run["run_id"] for run in answer(maestro("runs", "--json", "--store", folder))["runs"]]


def test_a_read_only_folder_is_read(read_only: Path, tmp_path: Path) -> None:
    _assert_readable(read_only)
    copy = tmp_path / "done.json"
    assert maestro("export", "done", copy, "--with-values", "--store", read_only).returncode == 0
    assert maestro("import", copy, "--store", tmp_path / "other").returncode == 0


def test_a_full_disk_is_read(full: Path) -> None:
    _assert_readable(full)


@pytest.mark.parametrize("words", WRITES, ids=lambda words: words[0])
def test_writing_to_a_read_only_file_system_is_an_error_that_says_so(
    read_only: Path, words: list[str]
) -> None:
    message = complaint(maestro(*words, "--store", read_only))
    assert message.endswith(f"{read_only}: cannot be written: the file system is read-only (EROFS)")


@pytest.mark.parametrize("words", WRITES, ids=lambda words: words[0])
def test_writing_to_a_full_disk_is_an_error_that_says_so(full: Path, words: list[str]) -> None:
    message = complaint(maestro(*words, "--store", full))
    assert message.endswith(f"{full}: cannot be written: the disk is full (ENOSPC)")


def test_importing_into_a_full_disk_is_an_error_that_says_so(
    full: Path, made: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "done.json"
    assert maestro("export", "done", copy, "--with-values", "--store", made).returncode == 0
    message = complaint(maestro("import", copy, "--as", "new", "--store", full))
    assert "the disk is full (ENOSPC)" in message


def test_a_log_that_cannot_be_read_is_reported(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is of a killed process, no index can be made for it, and it cannot be copied either."""
    monkeypatch.setattr(sqlite_reader._ReadOnlyFile, "_connect_copy", lambda _: None)
    folder = shutil.copytree(made, tmp_path / "state")
    (folder / "journal.db-wal").write_bytes(b"x" * 100)
    mount("--bind", folder, folder)
    try:
        mount("-o", "remount,ro,bind", folder)
        done = maestro("runs", "--store", folder)
    finally:
        subprocess.run(["umount", folder], check=True)
    assert done.returncode == 0
    assert "what was recorded last is not visible" in done.stderr
