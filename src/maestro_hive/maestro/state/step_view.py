"""Steps as people see them: what each is called, where it stands, and what its attempts were told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maestro_hive.maestro.state.records import Entry, EntryKind
from maestro_hive.maestro.state.run_state import facts_of

if TYPE_CHECKING:
    from maestro_hive.maestro.state.run_state import RunState, StepState


def status_of(step: StepState) -> str:
    """Return where a step stands, in the words of ``ExecutionStatus``."""
    if step.kept is not None:
        return "recovered" if was_healed(step) else "success"
    if step.open_attempt:
        return "running"
    last = step.log[-1] if step.log else step.last_failure
    if last is None:
        return "pending"
    return str(facts_of(last).get("status", "failed"))


def was_healed(step: StepState) -> bool:
    """Tell whether something was mended between its attempts."""
    return step.failures > 0 and any(facts_of(entry).get("healed") for entry in step.log)


def labels(state: RunState) -> dict[int, str]:
    """Return what each step is called: its name, and ``name#2`` for the second of that name."""
    seen: dict[str, int] = {}
    found = {}
    for number, step in state.steps.items():
        count = seen[step.name] = seen.get(step.name, 0) + 1
        found[number] = step.name if count == 1 else f"{step.name}#{count}"
    return found


def find_step(state: RunState, wanted: str | int) -> StepState | None:
    """Return a step by its number, its name, or ``name#2``."""
    for number, label in labels(state).items():
        if str(wanted) in (str(number), label):
            return state.steps[number]
    return None


def feedback_of(step: StepState) -> list[str]:
    """Return what went wrong before, a sentence for each attempt: what the next one is told."""
    if not step.failures:  # what somebody asked to be tried again failed in some way
        return [_sentence(step.last_failure)] if step.last_failure else []
    return [
        _sentence(entry)
        for entry in step.log
        if entry.kind == EntryKind.ATTEMPT_FAILED and facts_of(entry).get("counts", True)
    ]


def _sentence(entry: Entry) -> str:
    error = facts_of(entry).get("error", {})
    what = f"{error.get('category', 'UNKNOWN')}: {error.get('message', 'no message')}"
    return f"Attempt {entry.attempt} failed: {what}"
