"""What ``maestro watch`` shows: the runs of a state folder, or one of them, as they are now.

Nothing is opened for writing, and of each run only what is new is read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from maestro_hive.admin.children import ChildReader, LatestStates
from maestro_hive.admin.runs import LiveRun, run_summary, view_of
from maestro_hive.maestro.state.views import OVER, STATUSES, STOPPED, shown_status

if TYPE_CHECKING:
    from collections.abc import Mapping

    from maestro_hive.admin.runs import RunSummary
    from maestro_hive.maestro.state.records import Lease, RunRecord
    from maestro_hive.maestro.state.run_view import RunView
    from maestro_hive.maestro.state.store import Reader

#: The order in which runs are shown, by their status; all others follow, newest first.
_FIRST = ("running", "waiting", "pending", STOPPED)
#: The statuses that are recorded of runs that are not over.
_UNFINISHED = ("running", "waiting", "pending")


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """Runs that are no children of others: how many have each status, and some, unfinished first."""

    counts: dict[str, int]
    runs: tuple[RunSummary, ...]

    @property
    def total(self) -> int:
        """How many there are."""
        return sum(self.counts.values())


class RunsWatch:
    """The runs of a state folder that are no children of others."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._latest = LatestStates(reader)
        #: Whether each run that a process holds is the child of another.
        self._is_child: dict[str, bool] = {}
        #: What ``changes`` returned last of each run that it still looks at.
        self._told: dict[str, tuple[str, ...]] = {}
        self._newest: int | None = None

    def overview(self, most: int) -> Overview:
        """Return the runs as of now: at most so many of them."""
        held = self._reader.run_leases()
        counts, records = self._found(held, most)
        return Overview(counts=counts, runs=self._summaries(records, held))

    def changes(self, most: int) -> list[RunSummary]:
        """Return the runs whose status, or what they wait for, is another one than the last time.

        The first time these are the runs that are not finished. Of the runs that are over, the
        newest ``most`` are looked at.
        """
        held = self._reader.run_leases()
        _, records = self._found(held, most)
        found = {record.name for record in records}
        left = map(self._reader.run, (name for name in self._told if name not in found))
        records += [record for record in left if record is not None]
        told, newest = self._told, self._newest
        self._newest = max((record.id for record in records), default=0)
        self._told, changed = {}, []
        summaries = self._summaries(records, held)
        for record, run in zip(records, summaries, strict=True):
            facts = (run.status, *(wait.name for wait in run.waits_for))
            is_over = run.status in OVER
            is_new = newest is not None and record.id > newest
            if told.get(run.run_id) != facts and (run.run_id in told or not is_over or is_new):
                changed.append(run)
            if not is_over:
                self._told[run.run_id] = facts
        return changed

    def _found(
        self, held: Mapping[str, Lease], most: int
    ) -> tuple[dict[str, int], list[RunRecord]]:
        """Return how many runs have each status, and those to show, in their order."""
        executed = self._held_roots(held)
        recorded = self._reader.status_counts(roots=True)
        records = {each.id: each for each in executed}
        newest = self._reader.runs(limit=most, roots=True)
        records |= {each.id: each for each in newest}
        there = Counter(each.status for each in newest)
        for status in _UNFINISHED:
            if recorded.get(status, 0) > there[status]:  # some are older
                more = self._reader.runs(status=status, limit=most, roots=True)
                records |= {each.id: each for each in more}
        ordered = sorted(records.values(), key=lambda each: (_rank(each, held), -each.id))
        return _shown_counts(recorded, executed, held), ordered[:most]

    def _held_roots(self, held: Mapping[str, Lease]) -> list[RunRecord]:
        """Return the runs that processes execute, without children of others; those are read once."""
        roots: list[RunRecord] = []
        is_child: dict[str, bool] = {}
        for name in held:
            known = self._is_child.get(name)
            record = None if known else self._reader.run(name)
            is_child[name] = bool(known) or (record is not None and record.parent is not None)
            if record is not None and not is_child[name]:
                roots.append(record)
        self._is_child = is_child
        return roots

    def _summaries(
        self, records: list[RunRecord], held: Mapping[str, Lease]
    ) -> tuple[RunSummary, ...]:
        self._latest.forget_others(records)
        return tuple(run_summary(self._reader, each, held, self._latest) for each in records)


def _rank(record: RunRecord, held: Mapping[str, Lease]) -> int:
    status = shown_status(record, held)
    return _FIRST.index(status) if status in _FIRST else len(_FIRST)


def _shown_counts(
    recorded: Mapping[str, int], executed: list[RunRecord], held: Mapping[str, Lease]
) -> dict[str, int]:
    """Return how many runs are shown with each status, given how many are recorded with it."""
    left, shown = Counter(recorded), Counter[str]()
    for record in executed:
        left[record.status] -= 1
        shown[shown_status(record, held)] += 1
    for status, count in left.items():
        shown[STOPPED if status == "running" else status] += max(0, count)
    order = [*(status for status in STATUSES if status in shown), *sorted(shown)]
    return {status: shown[status] for status in dict.fromkeys(order) if shown[status]}


class RunWatch:
    """One run, with its children."""

    def __init__(self, reader: Reader, run_id: str) -> None:
        self._reader = reader
        self._run = LiveRun(reader, run_id)
        self._children = ChildReader(reader)

    def view(self, *, most_steps: int, most_children: int) -> RunView:
        """Return the run as of now."""
        run = self._run.refresh()
        return view_of(self._reader, run, self._children, most_steps, most_children)


def is_over(run: RunView) -> bool:
    """Return whether nothing more happens in a run by itself; without a workflow, as far as is known."""
    if run.workflow is not None:
        return run.ended_at is not None
    return not run.executed and run.status in OVER
