"""A manual clock that knows the true time, and in whose sleep a process can die."""

from __future__ import annotations

from typing import Any

from maestro_hive.kernel.clock import ManualClock


class DeadError(Exception):
    """What a body raises after its process has died: nobody is there to hear it."""


class InboxWatcher(ManualClock):
    """A manual clock that knows the true time, and in whose sleep a process can die."""

    def __init__(self) -> None:
        super().__init__()
        self.true = 0.0
        self.die_in_sleep: list[Any] = []

    def sleep_machine(self, seconds: float) -> None:
        """Let time pass."""
        super().sleep_machine(seconds)
        self.true += seconds

    def reboot(self, seconds: float = 60.0) -> None:
        """Start the machine again."""
        super().reboot(seconds)
        self.true += seconds

    async def sleep(self, seconds: float) -> None:
        """Let time pass, or half of it and die."""
        if self.die_in_sleep:
            self.advance(seconds / 2)
            self.die_in_sleep.pop()()
            raise DeadError
        await super().sleep(seconds)
