from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from maestro_hive.unified_execution import (
    ExecutionConfig,
    StateConfig,
    reset_execution_config,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give ``any_executor`` a journal on either store, or none; then no store is used."""
    if "any_executor" in metafunc.fixturenames:
        journals = {
            "in a folder": (True, True),
            "in memory": (False, True),
            "without a journal": (False, False),
        }
        metafunc.definition.add_marker(
            pytest.mark.parametrize(
                "restarts, any_executor", journals.values(), ids=journals, indirect=True
            )
        )


@pytest.fixture(autouse=True)
def home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Keep every default folder inside the test's own; return the home that stands in."""
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("MAESTRO_STATE_DIR", str(tmp_path / "environment" / "state"))
    monkeypatch.setenv("MAESTRO_CHECKPOINT_DIR", str(tmp_path / "environment" / "checkpoints"))
    reset_execution_config()
    yield home
    reset_execution_config()


@pytest.fixture
def config(tmp_path: Path) -> ExecutionConfig:
    state = StateConfig(
        state_dir=str(tmp_path / "state"),
        checkpoint_dir=str(tmp_path / "checkpoints"),
        auto_checkpoint_interval_seconds=0,  # the checkpoints there are were asked for
    )
    return ExecutionConfig(state=state)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KB: room for a journal, and not for much in it."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a small disk")
    point = tmp_path / "disk"
    point.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(point)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield point
    subprocess.run(["umount", "-l", str(point)], check=True)
