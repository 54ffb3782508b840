"""Burr with its SQLite persister: an application whose one action is done again and again."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks import work
from benchmarks.contender import Contender, Figures, measured

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.work import Work

_WARM_STEPS = 50
_DURABLE = "power cut (rollback journal, synchronous=FULL: SQLite's defaults)"


def _application(persister: Any, job: Work, name: str) -> Any:
    from burr import core  # type: ignore[import-not-found]

    def draft(state: Any) -> Any:
        number = state["number"] + 1
        return state.update(number=number, result=job.task(job.given(number, state["result"])))

    names = ["number", "result"]
    action = core.action(reads=names, writes=names)(draft)
    return (
        core.ApplicationBuilder()
        .with_actions(draft=action)
        .with_transitions(("draft", "draft"))
        .with_state(number=0, result=None)
        .with_entrypoint("draft")
        .with_identifiers(app_id=name)
        .with_state_persister(persister)
        .build()
    )


def _sequence(folder: Path, *, job: Work) -> Figures:
    from burr.core.persistence import (  # type: ignore[import-not-found]
        SQLitePersister,
    )

    with SQLitePersister(str(folder / "burr.db")) as persister:
        persister.initialize()
        warm = _application(persister, work.SMALL, "warm-up")
        for _ in range(_WARM_STEPS):
            warm.step()
        application = _application(persister, job, "bench")
        with measured():
            laps = work.Laps()
            for _ in range(job.count):
                application.step()
                laps.lap()
    return laps.figures(job)


CONTENDERS = tuple(
    Contender(
        name=f"burr/{name}",
        group=group,
        peer="Burr",
        measure=partial(_sequence, job=job),
        durable=durable,
    )
    for name, group, job, durable in (
        ("steps", "hive-steps", work.SMALL, _DURABLE),
        ("answer", "hive-payload", work.ANSWER, ""),
        ("report", "hive-payload", work.REPORT, ""),
        ("growing", "hive-growth", work.GROWING, ""),
    )
)
