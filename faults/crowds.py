"""Row 5: many processes on one folder, all at the same key, breaker and budget."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from faults.processes import Worker
from faults.registry import Outcome, Plan, row
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state import shared_records as shelves
from maestro_hive.maestro.state.sqlite.store import SqliteStore

if TYPE_CHECKING:
    from pathlib import Path

_SECONDS = 900


@row(5, "many processes share one folder", "16 x 1,000 updates: exact totals, 0 locked")
def crowds(plan: Plan, outcome: Outcome) -> None:
    """Let them all in at once and count."""
    members, updates = plan.amount(quick=8, full=16), plan.amount(quick=100, full=1000)
    folder = plan.scratch / "shared"
    started = time.monotonic()
    with ExitStack() as stack:
        crowd = [stack.enter_context(Worker("crowd", folder, updates)) for _ in range(members)]
        for worker in crowd:
            worker.hear(120)
        began = time.monotonic()
        for worker in crowd:
            worker.tell()
        said = [worker.hear(_SECONDS) for worker in plan.watch("processes done", crowd, members)]
        took = time.monotonic() - began
    errors = [error for each in said for error in each["errors"]]
    for error in errors:
        outcome.fail(error)
    wanted = members * updates
    totals = _totals(folder)
    for name, total in totals.items():
        outcome.require(total == wanted, f"{name}: {total} of {wanted} updates counted")
    outcome.ran.append(f"{members} processes x {updates:,} updates of a key, a breaker, a budget")
    outcome.measured.append(f"totals {sorted(set(totals.values()))} of {wanted:,}")
    outcome.measured.append(f"{sum(each['count'] for each in said)} errors")
    outcome.measured.append(f"longest wait for three updates {_longest(said) * 1000:.0f} ms")
    outcome.measured.append(f"{3 * wanted / took:,.0f} updates/s")
    plan.say(f"start-up took {began - started:.1f} s")


def _longest(said: list[dict[str, Any]]) -> float:
    return max(float(each["longest"]) for each in said)


def _totals(folder: Path) -> dict[str, int]:
    store = SqliteStore(folder)
    try:
        document = store.document("default", "total")
        breaker, budget = (
            shelves.breakers(store).get("anthropic"),
            shelves.budgets(store).get("shared"),
        )
        assert document is not None
        assert breaker is not None
        assert budget is not None
        return {
            "key": codec.decode(document.value),
            "breaker": breaker.consecutive_failures,
            "budget": budget.tokens // 3,
            "check": -1 if store.check() else codec.decode(document.value),
        }
    finally:
        store.close()
