"""The repairs that have proven themselves, as all processes on a state folder know them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from maestro_hive.engine.healing.repairs import REPAIRS

if TYPE_CHECKING:
    from maestro_hive.maestro.state.store import Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairView:
    """How often the repairs of one healer worked for one failure, in all runs.

    ``first`` is whether this healer is asked first about the next failure of this fingerprint.
    """

    fingerprint: str
    failure_type: str
    #: The step that failed so last.
    step: str
    healer: str
    fix: str | None
    worked: int
    failed: int
    first: bool
    last_used: datetime | None


def list_repairs(reader: Reader, *, failed: bool = False) -> list[RepairView]:
    """Return the repairs that have worked, the most proven first; with ``failed`` also the others."""
    found = [
        RepairView(
            fingerprint=fingerprint,
            failure_type=known.type,
            step=known.step,
            healer=healer,
            fix=count.fix,
            worked=count.worked,
            failed=count.failed,
            first=known.best() == healer,
            last_used=datetime.fromisoformat(count.last_used) if count.last_used else None,
        )
        for fingerprint, known in REPAIRS.all(reader).items()
        for healer, count in known.healers.items()
        if count.worked or failed
    ]
    return sorted(found, key=lambda each: (-each.worked, each.failed, each.step, each.healer))
