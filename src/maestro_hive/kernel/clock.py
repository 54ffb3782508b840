"""Time, as something that is passed in: the system's, or one that tests move by hand."""

from __future__ import annotations

import socket
import time
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Protocol


class Clock(Protocol):
    """What time is needed for: showing it, waiting through sleep, and noticing who hangs."""

    def now(self) -> datetime:
        """Wall time, aware, in UTC: for people and across reboots."""
        ...

    def boot_seconds(self) -> float:
        """Seconds since the machine started, sleep included; the same in every process."""
        ...

    def awake_seconds(self) -> float:
        """Seconds the machine was awake since it started; the same in every process."""
        ...

    def boot_id(self) -> str:
        """Which start of the machine the two counts began at."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Let this much time pass for the calling task, and others run."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> datetime:
        """Wall time, aware, in UTC."""
        return datetime.now(UTC)

    def boot_seconds(self) -> float:
        """Seconds since boot; where the system has no such clock, its monotonic one."""
        return time.clock_gettime(_BOOT_CLOCK) - _BOOT_OFFSET

    def awake_seconds(self) -> float:
        """Seconds awake since boot: a laptop that slept did not hang."""
        return time.monotonic() - _AWAKE_OFFSET

    def boot_id(self) -> str:
        """The kernel's random id of this boot, or the host's name where there is none."""
        return _system_boot_id()

    async def sleep(self, seconds: float) -> None:
        """Sleep on the event loop."""
        import asyncio  # noqa: PLC0415 - slow to import, and who sleeps has it already

        await asyncio.sleep(seconds)


class ManualClock:
    """A clock that moves only when told to; for tests."""

    def __init__(self, start: datetime = datetime(2030, 1, 1, tzinfo=UTC)) -> None:
        self._now = start
        self._boot_seconds = 1000.0
        self._awake_seconds = 900.0
        self._boot_id = "boot-1"
        #: How long each ``sleep`` was.
        self.slept: list[float] = []

    def now(self) -> datetime:
        """The wall time it was set to."""
        return self._now

    def boot_seconds(self) -> float:
        """Seconds since its pretended boot."""
        return self._boot_seconds

    def awake_seconds(self) -> float:
        """Seconds awake since its pretended boot."""
        return self._awake_seconds

    def boot_id(self) -> str:
        """The id of its pretended boot."""
        return self._boot_id

    async def sleep(self, seconds: float) -> None:
        """Move on by itself: nobody waits in a test."""
        import asyncio  # noqa: PLC0415 - slow to import, and who sleeps has it already

        self.advance(seconds)
        self.slept.append(seconds)
        await asyncio.sleep(0)

    def advance(self, seconds: float) -> None:
        """Let time pass, as it does."""
        self.sleep_machine(seconds)
        self._awake_seconds += seconds

    def sleep_machine(self, seconds: float) -> None:
        """Close the laptop's lid for a while."""
        self._now += timedelta(seconds=seconds)
        self._boot_seconds += seconds

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward or back, as a correction does; no time passes."""
        self._now += timedelta(seconds=seconds)

    def reboot(self, seconds: float = 60.0) -> None:
        """Start the machine again: wall time goes on, boot time starts over."""
        self._now += timedelta(seconds=seconds)
        self._boot_seconds = self._awake_seconds = seconds / 2
        self._boot_id = f"boot-{int(self._boot_id.partition('-')[2]) + 1}"


_BOOT_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def _namespace_offset(clock: str) -> float:
    """Return how far a time namespace (a container's) has put a clock ahead of the machine's."""
    try:
        lines = Path("/proc/self/timens_offsets").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0  # a system without such namespaces
    offsets = {
        name: float(seconds) + float(nanos) / 1e9 for name, seconds, nanos in map(str.split, lines)
    }
    return offsets.get(clock, 0.0)


# Read once: a process does not move between namespaces.
_AWAKE_OFFSET = _namespace_offset("monotonic")
_BOOT_OFFSET = (
    _namespace_offset("boottime") if _BOOT_CLOCK != time.CLOCK_MONOTONIC else _AWAKE_OFFSET
)


@cache
def _system_boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return _mac_boot_id() or socket.gethostname()


def _mac_boot_id() -> str | None:
    """Ask a Mac which start it is in; its host's name would stay the same over a reboot."""
    import subprocess  # noqa: PLC0415 - slow to import, and other systems do not need it

    command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
    try:
        answer = subprocess.check_output(command, stderr=subprocess.DEVNULL)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.decode().strip() or None
