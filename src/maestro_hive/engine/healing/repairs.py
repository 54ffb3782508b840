"""Repairs of a step, and which of them worked: known to all processes on a store, by fingerprint."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.shared_records import SharedRecords
from maestro_hive.maestro.state.store import DocumentChange

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from maestro_hive.maestro.state.store import Reader

#: More healers than that are not counted for one failure; those used last stay.
_MOST_HEALERS = 50

WORKED = "worked"
FAILED = "failed"
#: Another failure came: it may have worked, as the end of the step will show, or not.
UNDECIDED = "undecided"
#: Its process died while it changed files: they are restored, and it is made again.
INTERRUPTED = "interrupted"


class Repair(NamedTuple):
    """What a healer did about a failed attempt of a step, as it is recorded."""

    #: The attempt that had failed.
    attempt: int
    fingerprint: str
    healer: str
    #: All that is recorded of it.
    facts: Mapping[str, Any]
    #: Whether it is recorded that another failure came after it.
    is_undecided: bool = False

    @classmethod
    def read(cls, attempt: int, facts: Mapping[str, Any]) -> Repair | None:
        """Return the repair in what is recorded, or None if there is none to be judged."""
        if "healer" not in facts or "fingerprint" not in facts:
            return None
        return cls(attempt, str(facts["fingerprint"]), str(facts["healer"]), facts)


class Verdict(NamedTuple):
    """Whether a repair worked."""

    verdict: str
    reason: str
    restored: tuple[str, ...] = ()
    left: tuple[str, ...] = ()

    def facts(self, repair: Repair) -> dict[str, Any]:
        """Return what is recorded of it."""
        known = {
            "verdict": self.verdict,
            "fingerprint": repair.fingerprint,
            "healer": repair.healer,
            "reason": self.reason,
            "restored": list(self.restored) or None,
            "left": list(self.left) or None,
        }
        return {name: value for name, value in known.items() if value is not None}


def verdict_of(repair: Repair, later: list[str | None], *, completed: bool) -> Verdict | None:
    """Return the verdict about a repair; None while there is none.

    ``later`` has the fingerprints of the attempts that failed after it, None where one is unknown.
    After another failure than the repaired one it is undecided, unless files were changed: these are
    restored.
    """
    if completed:
        return Verdict(WORKED, "the step was completed")
    if repair.fingerprint in later:
        return Verdict(FAILED, "the same failure came again")
    if later and repair.facts.get("files"):
        return Verdict(FAILED, "the next attempt failed")
    return Verdict(UNDECIDED, "another failure came") if later else None


# --- what all processes know -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HealerCount:
    """How often the repairs of a healer worked for one failure, and when one was judged last."""

    worked: int = 0
    failed: int = 0
    last_used: str = ""
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class KnownRepairs:
    """The repairs that were tried for the failures of one fingerprint, by healer."""

    healers: Mapping[str, HealerCount] = field(default_factory=dict)
    type: str = "unknown"
    #: The step that failed so last.
    step: str = ""

    def best(self) -> str | None:
        """Return the healer that is asked first: whose repairs worked, and failed the least."""
        worked = [(name, each) for name, each in self.healers.items() if each.worked]
        if not worked:
            return None
        return max(worked, key=lambda item: (_share(item[1]), item[1].worked))[0]


def _share(count: HealerCount) -> float:
    return count.worked / (count.worked + count.failed)


def _from_json(fields: Any) -> KnownRepairs:
    healers = {name: HealerCount(**count) for name, count in fields["healers"].items()}
    return KnownRepairs(healers, str(fields["type"]), str(fields["step"]))


REPAIRS = SharedRecords("$repairs", asdict, _from_json)


def worked_before(store: Reader, fingerprint: str) -> str | None:
    """Return the healer whose repairs worked best for such a failure, in any run."""
    found = store.document(REPAIRS.namespace, fingerprint)
    return REPAIRS.decode(found.value, fingerprint).best() if found is not None else None


def counted(repair: Repair, verdict: str, step: str, now: str) -> DocumentChange:
    """Return the change that counts a verdict, to be made with its record."""

    def change(data: bytes | None) -> codec.Encoded:
        where = f"{REPAIRS.namespace}/{repair.fingerprint}"
        known = KnownRepairs() if data is None else REPAIRS.decode(data, repair.fingerprint)
        before = known.healers.get(repair.healer, HealerCount())
        after = replace(
            before,
            worked=before.worked + (verdict == WORKED),
            failed=before.failed + (verdict == FAILED),
            last_used=now,
            fix=repair.facts.get("fix") or before.fix,
        )
        rest = {name: each for name, each in known.healers.items() if name != repair.healer}
        if len(rest) >= _MOST_HEALERS:
            del rest[min(rest, key=lambda name: rest[name].last_used)]
        kind = str(repair.facts.get("type") or known.type)
        made = KnownRepairs({**rest, repair.healer: after}, kind, step)
        return codec.encode(REPAIRS.to_json(made), where)

    changed: Callable[[bytes | None], codec.Encoded | None] = change
    return DocumentChange(REPAIRS.namespace, repair.fingerprint, changed)
