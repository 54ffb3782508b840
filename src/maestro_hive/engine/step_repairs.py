"""What is recorded of the repairs of a step: what was tried, what files were, and the verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from maestro_hive.engine import values
from maestro_hive.engine.healing.function_healers import TriedRepair
from maestro_hive.engine.healing.repairs import FAILED, WORKED, Repair, counted, worked_before
from maestro_hive.engine.healing.workspace import FileBefore
from maestro_hive.kernel.clock import Wait
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.projections import (
    changed_files,
    ended_repairs,
    facts_of,
    interrupted_repairs,
    judged_repairs,
    key_of,
    pending_repairs,
)
from maestro_hive.maestro.state.records import Entry, EntryKind, NewEntry

if TYPE_CHECKING:
    from collections.abc import Mapping

    from maestro_hive.engine.healing.repairs import Verdict
    from maestro_hive.engine.open_run import OpenRun
    from maestro_hive.engine.plan import Plan
    from maestro_hive.kernel.clock import Clock
    from maestro_hive.maestro.state.codec import Encoded
    from maestro_hive.maestro.state.projections import StepState

_TRIED = EntryKind.REPAIR_TRIED


class StepRepairs:
    """The repairs of a step of an open run: the part of ``RunStep`` that healing uses."""

    __slots__ = ()

    if TYPE_CHECKING:  # what the step has
        run: OpenRun
        plan: Plan
        _clock: Clock

        @property
        def state(self) -> StepState | None:
            """What the journal has of it."""
            ...

        def _value(self, entry: Entry | None) -> Any: ...

    def worked_before(self, fingerprint: str) -> str | None:
        """Return the healer whose repairs worked best for a failure of that fingerprint."""
        return worked_before(self.run.store, fingerprint)

    def tried_repairs(self, fingerprint: str) -> list[TriedRepair]:
        """Return what was tried since it was started or retried, and how it went."""
        state = self.state
        if state is None:
            return []
        judged = judged_repairs(state)
        over = {key_of(each) for each in ended_repairs(state).values()} | judged.keys()
        named = (each for each in state.repairs or () if _names_healer(each))
        tried = [(each, facts_of(each)) for each in named if key_of(each) in over]
        return [
            TriedRepair(
                healer=str(facts["healer"]),
                fix=facts.get("fix"),
                feedback=facts.get("feedback"),
                is_same_failure=facts["fingerprint"] == fingerprint,
                verdict=facts_of(judged[key]).get("verdict") if key in judged else None,
            )
            for key, facts in {key_of(each): facts for each, facts in tried}.items()
        ]

    def pending_repairs(self) -> list[Repair]:
        """Return the repairs that are not decided yet."""
        state = self.state
        if state is None or not state.repairs:
            return []
        judged = judged_repairs(state)
        found = pending_repairs(state)
        read = ((Repair.read(e.attempt, facts_of(e)), key_of(e) in judged) for e in found)
        return [made._replace(is_undecided=known) for made, known in read if made is not None]

    def interrupted_repairs(self) -> list[Repair]:
        """Return the repairs that were about to change files when their process died."""
        state = self.state
        if state is None or not state.repairs:
            return []
        read = (Repair.read(e.attempt, facts_of(e)) for e in interrupted_repairs(state))
        return [each for each in read if each is not None]

    def files_before(self, repair: Repair) -> tuple[dict[str, FileBefore], str | None]:
        """Return what files were before a repair, and the folder they are in."""
        state = self.state
        assert state is not None
        entry = changed_files(state).get((repair.attempt, repair.healer))
        files = self._value(entry) if entry is not None else None
        if entry is None or not isinstance(files, dict):
            return {}, None
        root = facts_of(entry).get("workspace")
        return {name: FileBefore.from_json(each) for name, each in files.items()}, root

    def fingerprints_after(self, attempt: int) -> list[str | None]:
        """Return the fingerprints of the failures after an attempt; None where one is unknown."""
        state = self.state
        log = state.log if state is not None else []
        failed = (each for each in log if each.kind == EntryKind.ATTEMPT_FAILED)
        facts = (facts_of(each) for each in failed if each.attempt > attempt)
        return [
            (each.get("diagnosis") or {}).get("fingerprint")
            for each in facts
            if each.get("counts", True)
        ]

    def unhealed_failure(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Return the error and diagnosis of the last failure, if no healer was asked about it yet."""
        state = self.state
        last = None if state is None else state.last_failure
        if state is None or last is None or not state.log or state.log[-1] is not last:
            return None
        facts = facts_of(last)
        diagnosis = facts.get("diagnosis")
        if diagnosis is None or last.attempt in ended_repairs(state):
            return None
        return dict(facts["error"]), dict(diagnosis)

    async def record_files(self, facts: dict[str, Any], before: Mapping[str, FileBefore]) -> None:
        """Record what files are before a repair changes them."""
        tree = {name: each.to_json() for name, each in before.items()}
        value = await values.encode(tree, "files")
        await self.run.record(self._repair_entry(_TRIED, facts, value), sync=True)

    async def record_repair(
        self, facts: dict[str, Any], arguments: Encoded | None
    ) -> Repair | None:
        """Record what came of healing the last failure; return the repair, if there is one."""
        known = dict(facts)
        seconds = known.pop("seconds", None)
        if seconds is not None:
            known["wait"] = Wait.start(self._clock, seconds).to_json()
        entry = self._repair_entry(_TRIED, known, arguments)
        await self.run.record(entry, sync=True)
        return Repair.read(entry.attempt, known)

    async def record_verdict(self, repair: Repair, verdict: Verdict) -> None:
        """Record whether a repair worked, and count it for all runs in the same transaction."""
        entry = self._repair_entry(EntryKind.REPAIR_JUDGED, verdict.facts(repair))
        now = self._clock.now().isoformat()
        counts = verdict.verdict in (WORKED, FAILED)
        change = counted(repair, verdict.verdict, self.plan.name, now) if counts else None
        entry = entry._replace(attempt=repair.attempt)
        await self.run.record(entry, sync=False, change=change)

    def _repair_entry(
        self, kind: EntryKind, facts: dict[str, Any], value: Encoded | None = None
    ) -> NewEntry:
        state = self.state
        assert state is not None
        attempt = state.last_failure.attempt if state.last_failure is not None else 0
        data = codec.dump_canonical(facts)
        return NewEntry(kind, state.number, attempt, data, value, self.plan.family)


def _names_healer(entry: Entry) -> bool:
    return entry.kind == _TRIED and "healer" in facts_of(entry)
