"""The limits of queues: so many runs at once, over all workers and in each, and so many starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, cast

from maestro_hive.engine import settings
from maestro_hive.engine.limits import Limit
from maestro_hive.engine.rates import Rate
from maestro_hive.kernel import files

if TYPE_CHECKING:
    from maestro_hive.engine.limits import Entered
    from maestro_hive.maestro.state.store import Store

_at_least_one = settings.optional(settings.whole(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSettings:
    """The limits of one queue; None where there is none."""

    name: str
    concurrency: int | None = None
    per_worker: int | None = None
    rate: Rate | None = None

    @classmethod
    def checked(cls, name: object, concurrency: object, per_worker: object, rate: object) -> Self:
        """Return the limits; raise if one is given wrongly."""
        known = files.check_identifier(cast("str", name), "queue")
        return cls(
            name=known,
            concurrency=_at_least_one(f"concurrency of the queue {known!r}", concurrency),
            per_worker=_at_least_one(f"per_worker of the queue {known!r}", per_worker),
            rate=None if rate is None else Rate.parse(rate),
        )

    @property
    def is_shared(self) -> bool:
        """Whether it limits all workers together, so that the store has to be asked."""
        return self.concurrency is not None or self.rate is not None

    def room(self, active: int, free: int) -> int:
        """Return how many more a worker may take that has so many of this queue, and so many free."""
        return free if self.per_worker is None else min(free, self.per_worker - active)


async def enter(store: Store, queue: QueueSettings) -> Entered | None:
    """Return when one more run of a queue may start, with what holds its place."""
    limit = Limit(store, f"queue/{queue.name}", rate=queue.rate, max_concurrency=queue.concurrency)
    return await limit.enter(None)
