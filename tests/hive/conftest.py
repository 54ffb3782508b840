"""A hive on a real folder, that does not wait between attempts."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from maestro_hive import ExecutionConfig, Hive
from maestro_hive.unified_execution import Level1Config, Level2Config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def quick_config() -> ExecutionConfig:
    """Return settings that do not wait between attempts, nor between rounds."""
    return ExecutionConfig(
        level1=Level1Config(base_delay_seconds=0),
        level2=Level2Config(base_delay_seconds=0, circuit_breaker_threshold=1000),
    )


def copy_live(folder: Path, target: Path) -> Path:
    """Copy a state folder as it is now: that is what a kill leaves behind.

    Without the temporary files of a JSON copy that is being written: they are gone in a moment.
    """
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.tmp"))
    return target


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def hive(folder: Path) -> Iterator[Hive]:
    with Hive(folder, quick_config()) as made:
        yield made
