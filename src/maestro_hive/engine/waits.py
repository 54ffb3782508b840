"""The former home of ``kernel.clock.Wait``, with its former method names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from maestro_hive.kernel import clock as clocks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from maestro_hive.kernel.clock import Clock


class Wait(clocks.Wait):
    """A wait under its former method names."""

    __slots__ = ()

    @classmethod
    def begin(cls, clock: Clock, seconds: float) -> Self:
        """Return a wait that starts now."""
        return cls.start(clock, seconds)

    def to_facts(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return self.to_json()

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self:
        """Return the wait that was written."""
        return cls.from_json(facts)

    async def over(self, clock: Clock) -> None:
        """Return when it has ended."""
        await self.finished(clock)
