"""The proof that no completed task was started again: the ledger beside the journal.

Every start of a persona is a line in the ledger, ``TASK ATTEMPT``, which the persona itself writes. The
journal says which attempt completed a task. A start with a later attempt, or the same one twice, is work
that was done again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from maestro_hive.maestro.state.events import StepCompleted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from maestro_hive.maestro.state.events import RunEvent


@dataclass(frozen=True, slots=True)
class Start:
    """A line of the ledger: a task was started, in this attempt."""

    task: str
    attempt: int


def read_ledger(text: str) -> list[Start]:
    """Return the starts that a ledger has, in their order."""
    lines = (line.split() for line in text.splitlines())
    return [Start(task, int(attempt)) for task, attempt in lines]


def completions(events: Iterable[RunEvent]) -> dict[str, int]:
    """Return which attempt first completed each task, by the events of the journal."""
    found: dict[str, int] = {}
    for event in events:
        if isinstance(event, StepCompleted):
            found.setdefault(event.name, event.attempt)
    return found


def contradictions(
    tasks: Sequence[str], ledger: Sequence[Start], completed: Mapping[str, int]
) -> list[str]:
    """Return what contradicts that each task is complete, and none was started after that."""
    found = []
    for task in tasks:
        attempts = Counter(each.attempt for each in ledger if each.task == task)
        last = completed.get(task)
        if last is None:
            found.append(f"{task} is not complete in the journal")
            continue
        if last not in attempts:
            found.append(f"{task} is complete by attempt {last}, which the ledger does not have")
        for attempt, count in sorted(attempts.items()):
            if count > 1:
                found.append(f"{task} was started {count} times in attempt {attempt}")
            if attempt > last:
                found.append(
                    f"{task} was started again in attempt {attempt}, and attempt {last} had completed it"
                )
    unknown = {each.task for each in ledger} - set(tasks)
    return [*found, *(f"{task} is in the ledger, and not in the graph" for task in sorted(unknown))]
