"""All that ``maestro show`` says of a run, as plain data: what ``--json`` prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from maestro_hive.cli.plain_values import plainly
from maestro_hive.cli.standing import are_answered, holder_of, waits_of, where
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.projections import facts_of, fold, labels, status_of
from maestro_hive.maestro.state.records import EntryKind, from_micros
from maestro_hive.maestro.state.views import STOPPED, open_waits

if TYPE_CHECKING:
    from datetime import datetime

    from maestro_hive.maestro.state.projections import RunState, StepState
    from maestro_hive.maestro.state.records import Entry, Lease, RunRecord
    from maestro_hive.maestro.state.store import Store

_DONE = ("success", "recovered")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRun:
    """A run as its journal has it, read without holding it."""

    store: Store
    record: RunRecord
    entries: list[Entry]
    state: RunState
    lease: Lease | None

    @property
    def status(self) -> str:
        """Where it stands, as listings say it."""
        return where(self.record, () if self.lease is None else (self.record.name,))

    @property
    def workflow(self) -> str:
        """The name of its workflow, if it has one."""
        begun = self.state.started
        return self.record.workflow if begun is None else str(facts_of(begun).get("workflow", ""))

    def step_status(self, step: StepState) -> str:
        """Return where a step stands; under way it is only while somebody executes the run."""
        status = status_of(step)
        return STOPPED if status == "running" and self.lease is None else status

    def value(self, entry: Entry | None) -> Any:
        """Return an entry's value as plain JSON; its classes may not be known here."""
        data = self.store.load(entry) if entry is not None else None
        return None if data is None else codec.parse(data, depth=codec.DOCUMENT_DEPTH)


def read(store: Store, record: RunRecord) -> ReadRun:
    """Read a run."""
    lease = store.run_leases().get(record.name)
    record = store.run(record.name) or record  # as of now, since it may just have been given back
    entries = store.entries(record.id)
    state = fold(entries, plainly(store.load))
    return ReadRun(store=store, record=record, entries=entries, state=state, lease=lease)


def run_facts(run: ReadRun, most: int | None) -> dict[str, Any]:
    """Return a run as data: of its steps the last ``most``, and those that are not done."""
    state, begun, ended = run.state, run.state.started, run.state.ended
    told = facts_of(begun) if begun is not None else {}
    steps = _chosen(run, most)
    return {
        "run_id": run.record.name,
        "workflow": run.workflow or None,
        "status": run.status,
        "holder": holder_of(run.lease),
        "parent": told.get("parent"),
        "forked_from": told.get("forked_from"),
        "from_step": told.get("from_step"),
        **_times(run),
        "error": facts_of(ended).get("error") if ended is not None else None,
        "reason": facts_of(ended).get("reason") if ended is not None else None,
        "waits_for": _awaited(run),
        "input": run.value(begun),
        "result": run.value(ended),
        "total_steps": len(state.steps),
        "steps": steps,
        "children": _children(run),
        "personas": _personas(state),
    }


def _times(run: ReadRun) -> dict[str, Any]:
    state, record = run.state, run.record
    started_at = from_micros(state.created_at) if state.seq else record.created_at
    if state.started is not None:  # a fork has entries that are older than itself
        started_at = state.started.when
    updated_at = max(started_at, from_micros(state.updated_at) if state.seq else record.updated_at)
    ended_at = state.ended.when if state.ended is not None else None
    return {
        "started_at": started_at,
        "updated_at": updated_at,
        "ended_at": ended_at,
        "took_seconds": _seconds(started_at, ended_at or _now(run) or updated_at),
    }


def _now(run: ReadRun) -> datetime | None:
    """Return the time up to which it has been executed, if it still is."""
    return run.store.clock.now() if run.lease is not None else None


def _seconds(begun: datetime, ended: datetime) -> float:
    return max(0.0, (ended - begun).total_seconds())  # a clock may have been set back


def _awaited(run: ReadRun) -> list[dict[str, Any]]:
    asked = open_waits(run.state)
    if run.state.ended is not None or not asked:
        return []
    answered = are_answered(run.store, run.record.name, asked)
    waits = zip(waits_of(asked), answered, strict=True)
    return [{**wait, "answered": is_answered} for wait, is_answered in waits]


def _children(run: ReadRun) -> list[dict[str, Any]]:
    if not run.state.children:
        return []
    held = run.store.run_leases()
    known = {record.name: record for record in run.store.runs()}
    children = []
    for entry in run.state.children.values():
        name, workflow = str(facts_of(entry).get("run_id")), facts_of(entry).get("workflow")
        record = known.get(name)
        status = record and where(record, held)
        children.append({"run_id": name, "workflow": workflow, "status": status})
    return children


def _personas(state: RunState) -> list[dict[str, Any]]:
    names = dict.fromkeys([*state.latest, *state.spent, *state.memories, *state.histories])
    return [
        {
            "persona": name,
            "tokens": state.spent.get(name, (0, 0.0))[0],
            "usd": state.spent.get(name, (0, 0.0))[1],
            "history_items": len(state.histories.get(name, ())),
        }
        for name in names
        if name
    ]


# --- steps -----------------------------------------------------------------------------------------


def _chosen(run: ReadRun, most: int | None) -> list[dict[str, Any]]:
    steps, names = list(run.state.steps.values()), labels(run.state)
    if most is not None:
        open_ones = [step for step in steps if status_of(step) not in _DONE][-most:]
        wanted = {step.number for step in (*steps[-most:], *open_ones)}
        steps = [step for step in steps if step.number in wanted]
    return [step_facts(run, step, names[step.number]) for step in steps]


def step_facts(run: ReadRun, step: StepState, label: str) -> dict[str, Any]:
    """Return a step as a line of a table needs it."""
    begun = step.log[0] if step.log else step.started
    last = step.completed or (step.log[-1] if step.log else step.started)
    ended = (_now(run) or last.when) if step.open_attempt else last.when
    return {
        "step": step.number,
        "name": label,
        "persona": step.persona,
        "status": run.step_status(step),
        "attempts": step.last_attempt,
        "failures": step.failures,
        "interruptions": step.interruptions + bool(step.open_attempt and run.lease is None),
        "tokens": sum((step.tokens or {}).values()),
        "started_at": begun.when,
        "took_seconds": _seconds(begun.when, ended),
        "last_error": error_line(_last_failure(step)),
    }


def _last_failure(step: StepState) -> Entry | None:
    """Return how it last went wrong; a death too many is written down as no failure of its own."""
    last = step.log[-1] if step.log else None
    if last is not None and last.kind == EntryKind.ATTEMPT_FAILED:
        return last
    return step.last_failure


def error_line(entry: Entry | None) -> str | None:
    """Return an entry's error as ``Type: message``."""
    error = facts_of(entry).get("error") if entry is not None else None
    if not error:
        return None
    kind, message = error.get("type"), error.get("message")
    return ": ".join(str(part) for part in (kind, message if message != kind else None) if part)
