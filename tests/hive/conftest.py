"""A hive on a real folder, that does not wait between attempts."""

from __future__ import annotations

import contextlib
import shutil
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from maestro_hive import ExecutionConfig, Hive
from maestro_hive.kernel.clock import SystemClock
from maestro_hive.unified_execution import Level1Config, Level2Config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime
    from pathlib import Path


def quick_config() -> ExecutionConfig:
    """Return settings that do not wait between attempts, nor between rounds."""
    return ExecutionConfig(
        level1=Level1Config(base_delay_seconds=0),
        level2=Level2Config(base_delay_seconds=0, circuit_breaker_threshold=1000),
    )


def copy_live(folder: Path, target: Path) -> Path:
    """Copy a state folder as it is now: that is what a kill leaves behind.

    Without the temporary files of a JSON copy that is being written: they are gone in a moment, as is
    the oldest checkpoint when another one is written.
    """
    temporary = shutil.ignore_patterns("*.tmp")
    shutil.copytree(folder, target, ignore=temporary, copy_function=_copy_if_there)
    return target


def _copy_if_there(source: str, target: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(source, target)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def hive(folder: Path) -> Iterator[Hive]:
    with Hive(folder, quick_config()) as made:
        yield made


class PassedTime:
    """How much later it is on the clock of this process than on that of the machine."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def advance(self, seconds: float) -> None:
        """Let time pass: durable waits end, and leases do not."""
        self.seconds += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> PassedTime:
    """Let durable sleeps, timeouts and questions last as long as the test says, on a busy machine too."""
    passed = PassedTime()
    now, nanos, boot_seconds = SystemClock.now, SystemClock.nanos, SystemClock.boot_seconds

    def now_later() -> datetime:
        return now() + timedelta(seconds=passed.seconds)

    def nanos_later() -> int:
        return nanos() + int(passed.seconds * 1e9)

    def boot_seconds_later() -> float:
        return boot_seconds() + passed.seconds

    monkeypatch.setattr(SystemClock, "now", staticmethod(now_later))
    monkeypatch.setattr(SystemClock, "nanos", staticmethod(nanos_later))
    monkeypatch.setattr(SystemClock, "boot_seconds", staticmethod(boot_seconds_later))
    monkeypatch.setattr(SystemClock, "longest_sleep", 0.005, raising=False)  # so often it is read
    return passed
