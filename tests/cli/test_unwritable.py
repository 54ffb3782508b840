"""Folders that cannot be written: read-only and full disks are read, and named to who must write."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.cli.plays import asks, ends, workflow
from tests.cli.processes import answer, complaint, maestro

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


def _seen(folder: Path, said: str) -> None:
    for words in READS:
        done = maestro(*words, "--store", folder)
        assert done.returncode == (75 if "--follow" in words else 0), done
        assert done.stdout
        assert done.stderr.count(said) == 1
    assert [run["run_id"] for run in answer(maestro("runs", "--json", "--store", folder))["runs"]]


def test_a_read_only_folder_is_read(read_only: Path, tmp_path: Path) -> None:
    _seen(read_only, "the file system is read-only (EROFS)")
    copy = tmp_path / "done.json"
    assert maestro("export", "done", copy, "--store", read_only).returncode == 0
    assert maestro("import", copy, "--store", tmp_path / "other").returncode == 0


def test_a_full_disk_is_read(full: Path) -> None:
    _seen(full, "the disk is full (ENOSPC)")


@pytest.mark.parametrize("words", WRITES, ids=lambda words: words[0])
def test_who_must_write_is_told_that_the_file_system_is_read_only(
    read_only: Path, words: list[str]
) -> None:
    said = complaint(maestro(*words, "--store", read_only))
    assert said.endswith(f"{read_only}: cannot be written: the file system is read-only (EROFS)")


@pytest.mark.parametrize("words", WRITES, ids=lambda words: words[0])
def test_who_must_write_is_told_that_the_disk_is_full(full: Path, words: list[str]) -> None:
    said = complaint(maestro(*words, "--store", full))
    assert said.endswith(f"{full}: cannot be written: the disk is full (ENOSPC)")


def test_importing_into_a_full_disk_is_told_so(full: Path, made: Path, tmp_path: Path) -> None:
    copy = tmp_path / "done.json"
    assert maestro("export", "done", copy, "--store", made).returncode == 0
    said = complaint(maestro("import", copy, "--as", "new", "--store", full))
    assert "the disk is full (ENOSPC)" in said


def test_the_log_of_a_killed_process_is_read_from_a_copy(made: Path, tmp_path: Path) -> None:
    """Its log is there, and cannot be read in place without room for an index."""
    folder = shutil.copytree(made, tmp_path / "state")
    (folder / "journal.db-wal").write_bytes(b"x" * 100)
    mount("--bind", folder, folder)
    try:
        mount("-o", "remount,ro,bind", folder)
        done = maestro("runs", "--store", folder)
    finally:
        subprocess.run(["umount", folder], check=True)
    assert done.returncode == 0
    assert "asking" in done.stdout
