"""All that ``maestro show`` says of one step, as plain data: what ``--json`` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from maestro_hive.cli.run_sheet import ReadRun, step_facts
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.maestro.state.projections import facts_of, feedback_of, labels
from maestro_hive.maestro.state.projections import find_step as find_step_in
from maestro_hive.maestro.state.records import EntryKind
from maestro_hive.maestro.state.run_document import effective_entries

if TYPE_CHECKING:
    from maestro_hive.maestro.state.projections import StepState
    from maestro_hive.maestro.state.records import Entry


def find_step(run: ReadRun, wanted: str) -> tuple[StepState, str]:
    """Return a step by its number, its name or ``name#2``, and what it is called."""
    names = labels(run.state)
    found = find_step_in(run.state, wanted)
    if found is not None:
        return found, names[found.number]
    from difflib import get_close_matches  # noqa: PLC0415 - needed only after a mistake

    near = (
        get_close_matches(wanted, names.values(), n=3) or list(dict.fromkeys(names.values()))[:10]
    )
    known = f"it has: {', '.join(near)}" if near else "it has none"
    raise ConfigurationError(f"run {run.record.name!r} has no step {wanted!r}; {known}")


def sheet_of(run: ReadRun, step: StepState, label: str) -> dict[str, Any]:
    """Return a step as data: each attempt, what it was given and gave back, and its persona."""
    state, facts = run.state, step_facts(run, step, label)
    histories = state.histories.get(step.persona, [])
    return {
        "run_id": run.record.name,
        **facts,
        "attempts": _attempts(run, step),
        "feedback": [] if step.completed is not None else feedback_of(step),
        "progress": run.value(step.progress),
        "input": run.value(step.started),
        "output": run.value(step.completed),
        "memory": run.value(state.memories.get(step.persona)),
        "history": [run.value(entry) for entry in histories],
    }


def _attempts(run: ReadRun, step: StepState) -> list[dict[str, Any]]:
    """Return every attempt since the run last started again, those before a retry included."""
    attempts: list[dict[str, Any]] = []
    for entry in effective_entries(run.entries):
        if entry.step != step.number:
            continue
        if entry.kind == EntryKind.ATTEMPT_STARTED:
            attempts.append(_begun(entry, step))
        elif entry.kind == EntryKind.ATTEMPT_FAILED and attempts:
            attempts[-1].update(_failed(entry))
        elif entry.kind == EntryKind.STEP_COMPLETED and attempts:
            attempts[-1].update(status="success", ended_at=entry.when)
    if attempts and step.open_attempt and run.lease is not None:
        attempts[-1]["status"] = "running"
    return attempts


def _begun(entry: Entry, step: StepState) -> dict[str, Any]:
    return {
        "attempt": entry.attempt,
        "status": "interrupted",  # until its end is found
        "started_at": entry.when,
        "ended_at": None,
        "tokens": (step.tokens or {}).get(entry.attempt, 0),
        "round": None,
        "error": None,
        "healed": False,
        "retry_in": None,
    }


def _failed(entry: Entry) -> dict[str, Any]:
    facts = facts_of(entry)
    return {
        "status": facts.get("status", "failed"),
        "ended_at": entry.when,
        "round": facts.get("round", 1),
        "error": facts.get("error"),
        "healed": bool(facts.get("healed")),
        "retry_in": (facts.get("wait") or {}).get("seconds"),
    }
