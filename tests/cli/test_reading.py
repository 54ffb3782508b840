"""Verbs that read open no store for writing, and change nothing in the folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import pytest

from maestro_hive.maestro.state import stores
from tests.cli.processes import answer, copy_of, execute_steps, filled, maestro
from tests.cli.sample_runs import RUN, asks, ends, execute, workflow
from tests.tables import for_each

if TYPE_CHECKING:
    from pathlib import Path

READS = [
    "runs",
    "runs --all",
    f"show {RUN}",
    f"show {RUN} implement",
    f"events {RUN}",
    f"events {RUN} --children",
    "events asking --follow",
    "checkpoints list",
    "checkpoints show after-design",
    "checkpoints verify",
    "checkpoints diff after-design after-review",
    "breakers",
    "doctor",
    "gc --dry-run",
]


def _make(folder: Path) -> None:
    execute(filled(folder))
    execute_steps(folder, "build", "design", "review")
    workflow(folder, "asking", "waiting", asks())
    workflow(folder, "done", "success", ends("success", "x" * 5000))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = copy_of(_make, tmp_path / "state")

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a store was opened for writing")

    monkeypatch.setattr(stores, "open_store", refuse)
    return folder


def _files(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mode,
            path.stat().st_mtime_ns,
            path.read_bytes(),
        )
        for path in folder.rglob("*")
        if path.is_file()
    }


@for_each("words", READS)
def test_reading_changes_nothing(folder: Path, words: str) -> None:
    before = _files(folder)
    for options in ([], ["--json"]):
        done = maestro(*words.split(), *options, "--store", folder)
        assert done.returncode == (75 if "--follow" in words else 0), done
        assert done.stdout or words == "breakers"
    assert _files(folder) == before


def test_watching_changes_nothing(folder: Path) -> None:
    before = _files(folder)
    assert maestro("watch", "done", "--store", folder).returncode == 0
    assert _files(folder) == before


def test_exporting_changes_nothing(folder: Path) -> None:
    before = _files(folder)
    assert maestro("export", "done", "-", "--store", folder).returncode == 0
    assert _files(folder) == before


@for_each("words", READS)
def test_every_read_has_json(folder: Path, words: str) -> None:
    done = maestro(*words.split(), "--json", "--store", folder)
    if words.startswith("events"):
        assert all(line.startswith('{"event": ') for line in done.stdout.splitlines())
    else:
        assert answer(done, done.returncode)["store"] == str(folder)
