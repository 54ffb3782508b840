"""Time: clocks that are passed in, stored times, and waits that survive their process."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

#: A loop's timers stand still while a laptop sleeps: the clock that does not is read this often.
_POLL_SECONDS = 5.0
#: Rounding leaves less than this over, and a clock may never reach it.
_NEGLIGIBLE_SECONDS = 1e-6


class Clock(Protocol):
    """Wall time for people, boot time for waits, awake time for leases."""

    def now(self) -> datetime:
        """Wall time, aware, in UTC: for people and across reboots."""

    def micros(self) -> int:
        """Wall time as microseconds since 1970, UTC, as entries store it."""

    def boot_seconds(self) -> float:
        """Seconds since the machine started, sleep included; the same in every process."""

    def awake_seconds(self) -> float:
        """Seconds the machine was awake since it started; the same in every process."""

    def boot_id(self) -> str:
        """The id of the boot that the two counts of seconds are relative to."""

    async def sleep(self, seconds: float) -> None:
        """Suspend the calling task for this long."""


def to_micros(when: datetime) -> int:
    """Return an aware time as microseconds since 1970, UTC."""
    since = when - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def from_micros(micros: int) -> datetime:
    """Return microseconds since 1970 as an aware time, UTC."""
    return _EPOCH + timedelta(microseconds=micros)


class Wait(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A number of seconds from a moment, which survives its process; stored as it is.

    Within a boot it is measured on the clock that continues through sleep and cannot be set; after
    a reboot by wall time, and then it is never longer than the whole wait again.
    """

    seconds: float
    boot: str
    boot_seconds: float
    at: datetime

    @classmethod
    def start(cls, clock: Clock, seconds: float) -> Self:
        """Return a wait that starts now."""
        return cls(
            seconds=seconds, boot=clock.boot_id(), boot_seconds=clock.boot_seconds(), at=clock.now()
        )

    @property
    def ends_at(self) -> datetime:
        """The time of its end, by the wall clock that it was started with."""
        return self.at + timedelta(seconds=self.seconds)

    def elapsed(self, clock: Clock) -> float:
        """Return how many seconds ago it started; never negative."""
        if clock.boot_id() == self.boot:
            return max(0.0, clock.boot_seconds() - self.boot_seconds)
        return max(0.0, (clock.now() - self.at).total_seconds())

    def remaining(self, clock: Clock) -> float:
        """Return how many seconds are left, between 0 and all of them."""
        return max(0.0, self.seconds - self.elapsed(clock))

    async def finished(self, clock: Clock) -> None:
        """Return when it has ended."""
        if clock.boot_id() != self.boot:
            # Measured in this boot's time from here on: a wall clock may have been set back.
            await Wait.start(clock, self.remaining(clock)).finished(clock)
            return
        while (left := self.remaining(clock)) > _NEGLIGIBLE_SECONDS:
            await clock.sleep(min(left, _POLL_SECONDS))


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


def _seconds_of(clock: int, namespace: str) -> Callable[[], float]:
    """Return a reader of a clock of the machine, in whichever time namespace this process is."""
    offset = _namespace_offset(namespace)  # once: a process does not move between namespaces
    read = partial(time.clock_gettime, clock)
    return (lambda: read() - offset) if offset else read


class SystemClock:
    """The machine's own clocks. Every step reads them, so they are the functions of the system."""

    #: Wall time, aware, in UTC.
    now: Callable[[], datetime] = staticmethod(partial(datetime.now, UTC))
    #: Seconds since boot; where the system has no such clock, its monotonic one.
    boot_seconds: Callable[[], float] = staticmethod(
        _seconds_of(_BOOT_CLOCK, "monotonic" if _BOOT_CLOCK == time.CLOCK_MONOTONIC else "boottime")
    )
    #: Seconds awake since boot: time asleep does not expire a lease.
    awake_seconds: Callable[[], float] = staticmethod(
        _seconds_of(time.CLOCK_MONOTONIC, "monotonic")
    )

    def micros(self) -> int:
        """Wall time as microseconds since 1970."""
        return time.time_ns() // 1000

    def boot_id(self) -> str:
        """The kernel's random id of this boot, or the host name where it has none."""
        return _system_boot_id()

    async def sleep(self, seconds: float) -> None:
        """Sleep on the event loop."""
        import asyncio

        await asyncio.sleep(seconds)


class ManualClock:
    """A clock that moves only when it is advanced; for tests."""

    def __init__(self, start: datetime = datetime(2030, 1, 1, tzinfo=UTC)) -> None:
        self._now = start
        self._boot_seconds = 1000.0
        self._awake_seconds = 900.0
        self._boot_id = "boot-1"
        #: The length of each ``sleep``.
        self.slept: list[float] = []

    def now(self) -> datetime:
        """The wall time it was set to."""
        return self._now

    def micros(self) -> int:
        """The wall time it was set to, as microseconds since 1970."""
        return to_micros(self._now)

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
        """Advance without waiting."""
        import asyncio

        self.advance(seconds)
        self.slept.append(seconds)
        await asyncio.sleep(0)

    def advance(self, seconds: float) -> None:
        """Pass time, with the machine awake."""
        self.sleep_machine(seconds)
        self._awake_seconds += seconds

    def sleep_machine(self, seconds: float) -> None:
        """Pass time, with the machine asleep."""
        self._now += timedelta(seconds=seconds)
        self._boot_seconds += seconds

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward or back, as a correction does; no time passes."""
        self._now += timedelta(seconds=seconds)

    def reboot(self, seconds: float = 60.0) -> None:
        """Restart the machine: wall time continues, boot time starts over."""
        self._now += timedelta(seconds=seconds)
        self._boot_seconds = self._awake_seconds = seconds / 2
        self._boot_id = f"boot-{int(self._boot_id.partition('-')[2]) + 1}"


@cache
def _system_boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return _mac_boot_id() or os.uname().nodename


def _mac_boot_id() -> str | None:
    """Return a Mac's boot id; its host name would stay the same over a reboot."""
    import subprocess

    command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
    try:
        answer = subprocess.check_output(command, stderr=subprocess.DEVNULL)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.decode().strip() or None
