"""Purging runs completely, and deleting what nothing refers to."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

from maestro_hive.admin.checkpoints import expired_checkpoints
from maestro_hive.admin.folder import checkpoint_folders, leftovers, reading, remove_copies, writing
from maestro_hive.admin.runs import check_statuses
from maestro_hive.admin.teams import left_state
from maestro_hive.engine.copies import locked_copies
from maestro_hive.engine.outbox import ESCALATIONS
from maestro_hive.hive.inbox import NAMESPACE
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import ConfigurationError, MaestroError, RunLeasedError
from maestro_hive.maestro.state.projections import facts_of
from maestro_hive.maestro.state.records import EntryKind
from maestro_hive.maestro.state.views import OVER, shown_status

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from maestro_hive.admin.teams import LeftState
    from maestro_hive.maestro.state.records import RunRecord
    from maestro_hive.maestro.state.store import Reader, Store

#: Children of children of children: no run has more, and a circle must not be followed for ever.
_MOST_GENERATIONS = 100


# --- purge ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SeenRun:
    """A run when it was chosen; one that has changed since is not purged."""

    id: int
    status: str
    changed_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgePlan:
    """The runs to purge as they were chosen; None for one of which only copies are left.

    ``families`` are the runs that were chosen, each with its children to any depth: they are purged
    together. ``needed`` are children, and the unfinished run that would execute each of them again:
    they are left out of ``runs`` unless they were chosen by name.
    """

    runs: Mapping[str, SeenRun | None]
    families: tuple[tuple[str, ...], ...]
    needed: Mapping[str, str]
    by_name: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgedRun:
    """A run that was purged with this many copies; or ``refused``, and why.

    ``tickets`` are about steps of it, and nobody tells them how it ended. ``left`` is the state file of
    a team run, which is in the folder of its tasks and stays there.
    """

    run_id: str
    copies: int = 0
    tickets: tuple[str, ...] = ()
    refused: str | None = None
    left: LeftState | None = None


class _ChangedError(MaestroError):
    """A run must not be purged, and the message says why."""


def plan_purge(
    reader: Reader,
    folder: Path,
    run_ids: Sequence[str] = (),
    *,
    older_than: float | None = None,
    statuses: Sequence[str] = (),
) -> PurgePlan:
    """Choose runs by name, or by age in seconds and by the status that listings show."""
    if not run_ids and older_than is None and not statuses:
        raise ConfigurationError("Choose runs: by id, or with --older-than and --status.")
    # The oldest first: a parent is purged before its children.
    known = {record.name: record for record in reversed(reader.runs())}
    _refuse_unknown(folder, [name for name in run_ids if name not in known])
    held = reader.run_leases()
    check_statuses(reader, statuses, held)
    limit = None if older_than is None else datetime.now(UTC) - timedelta(seconds=older_than)
    chosen: dict[str, SeenRun | None] = {}
    for name in run_ids or known:
        record = known.get(name)
        seen = _seen(reader, record, held) if record else None
        if _is_meant(seen, limit, statuses):
            chosen[name] = seen
    needed = _needed(reader, chosen)
    if not run_ids:
        chosen = {name: seen for name, seen in chosen.items() if name not in needed}
    families = _families(reader, chosen)
    for name in (name for family in families for name in family if name not in chosen):
        record = reader.run(name)  # it may have been started after the runs were listed
        chosen[name] = _seen(reader, record, held) if record else None
    return PurgePlan(runs=chosen, families=families, needed=needed, by_name=bool(run_ids))


def _families(reader: Reader, chosen: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Return runs with their children: a run under the id of one that is gone must find none."""
    found: list[tuple[str, ...]] = []
    taken: set[str] = set()
    for name in chosen:
        family, left = [], [name]
        while left:
            each = left.pop()
            record = reader.run(each)
            if each not in taken:
                taken.add(each)
                family.append(each)
                left += [] if record is None else _children(reader, record)
        if family:
            found.append(tuple(family))
    return tuple(found)


def _children(reader: Reader, record: RunRecord) -> list[str]:
    started = [
        facts_of(entry)
        for entry in reader.entries(record.id)
        if entry.kind == EntryKind.CHILD_STARTED
    ]
    names = [str(facts.get("run_id")) for facts in started if not facts.get("copied")]
    return [name for name in names if reader.run(name) is not None]


def _refuse_unknown(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        files.check_identifier(name, "run id")
        places = [folder / "runs" / name, *(each / name for each in checkpoint_folders(folder))]
        if not any(place.is_dir() for place in places):
            raise ConfigurationError(
                f"There is no run {name!r} in {folder}. 'maestro runs' lists them."
            )


def _seen(reader: Reader, record: RunRecord, held: Container[str] = ()) -> SeenRun:
    return SeenRun(record.id, shown_status(record, held), reader.last_change(record))


def _is_meant(seen: SeenRun | None, limit: datetime | None, statuses: Sequence[str]) -> bool:
    if seen is None:
        return limit is None and not statuses
    return (limit is None or seen.changed_at < limit) and (not statuses or seen.status in statuses)


def _needed(reader: Reader, names: Iterable[str]) -> dict[str, str]:
    """Return the children of unfinished runs that are not chosen themselves, and those runs."""
    found = {name: _unfinished_ancestor(reader, name) for name in names}
    return {name: run for name, run in found.items() if run is not None and run not in found}


def _unfinished_ancestor(reader: Reader, name: str) -> str | None:
    """Return the unfinished run that has this one as its child, or as a child of a child."""
    record = reader.run(name)
    for _ in range(_MOST_GENERATIONS):
        parent = None if record is None else _parent(reader, record)
        record = None if parent is None else reader.run(parent)
        if record is None or record.status not in OVER:
            break
    return None if record is None or record.name == name else record.name


def _parent(reader: Reader, record: RunRecord) -> str | None:
    for entry in reader.entries(record.id):
        if entry.kind == EntryKind.RUN_STARTED:
            parent = facts_of(entry).get("parent")
            return None if parent is None else str(parent)
    return None


def purge_runs(store: Store, folder: Path, plan: PurgePlan) -> Iterator[PurgedRun]:
    """Purge the families of a plan one by one; those that changed since are refused."""
    for family in plan.families:
        try:
            tickets = _tickets(store, family)
            left = {name: left_state(store, name) for name in family}
            copies = purge_family(
                store, folder, family, partial(_check_family, store, family, plan)
            )
        except (RunLeasedError, _ChangedError) as refused:
            parts = f" ({', '.join(family[1:])})" if family[1:] else ""
            others = f"; nothing is purged of {family[0]!r} and its children{parts}"
            yield PurgedRun(run_id=family[0], refused=f"{refused}{others if parts else ''}")
        else:
            for name in family:
                told = tuple(tickets.get(name, ()))
                yield PurgedRun(run_id=name, copies=copies[name], tickets=told, left=left[name])


def _tickets(store: Store, family: Sequence[str]) -> dict[str, list[str]]:
    """Return the tickets of escalations that are not over, or whose end they were not told, by run."""
    found: dict[str, list[str]] = {}
    for each in ESCALATIONS.all(store).values():
        if each.run_id not in family:
            continue
        # A message, as to a chat, has no key but ours: there is nothing to close.
        if each.ticket not in (None, each.told_case.effect_key):
            where = each.address or each.system
            found.setdefault(str(each.run_id), []).append(f"{each.ticket} ({where})")
    return found


def _check_family(store: Store, family: Sequence[str], plan: PurgePlan) -> None:
    """Raise unless runs, which are leased now, are as they were chosen, and have no more children."""
    for name in family:
        _require_unchanged(store, name, plan)
    parent = None if plan.by_name else _unfinished_ancestor(store, family[0])
    if parent is not None:
        raise _ChangedError(
            f"run {family[0]!r} is a child of run {parent!r}, which is not finished and would"
            " execute it again: it is not purged"
        )


def _require_unchanged(store: Store, name: str, plan: PurgePlan) -> None:
    record = store.run(name)
    now = None if record is None else _seen(store, record)
    if now != plan.runs[name]:
        status = "gone" if now is None else f"{now.status} now"
        raise _ChangedError(
            f"run {name!r} has changed since it was chosen and is {status}: it is not purged"
        )


def purge_family(
    store: Store, folder: Path, names: Sequence[str], check: Callable[[], None] | None = None
) -> dict[str, int]:
    """Purge runs together; return how many copies of each were deleted. ``check`` may refuse.

    The copies are deleted first, under the runs' leases, and the journal last, in one transaction.
    After a kill in between, the runs are still in the journal, complete, and can be purged again.
    The other way round copies would be left, and the next execution of an id would resume from them.
    """
    removed: dict[str, int] = {}

    def first() -> None:
        if check is not None:
            check()
        for name in names:
            removed[name] = remove_copies(name, folder, checkpoint_folders(folder))

    escalated = [
        (ESCALATIONS.namespace, each.id)
        for each in ESCALATIONS.all(store).values()
        if each.run_id in names
    ]
    with locked_copies(folder, purging=True):
        store.purge_runs(names, first, [*((NAMESPACE, name) for name in names), *escalated])
    return removed


# --- gc -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """What was deleted, or would be."""

    values: int
    bytes: int
    checkpoints: int
    leftovers: int


def find_garbage(folder: Path, *, keep: int | None = None) -> Garbage:
    """Return what ``collect_garbage`` would delete; nothing is changed."""
    with reading(folder) as reader:
        values, size = reader.unused_values()
    expired, left = _unneeded_files(folder, keep)
    return Garbage(values=values, bytes=size, checkpoints=len(expired), leftovers=len(left))


def collect_garbage(folder: Path, *, keep: int | None = None) -> Garbage:
    """Delete values that no entry refers to, expired checkpoints, and files of killed processes.

    With ``keep``, also all but so many checkpoints of each run.
    """
    with writing(folder) as store:
        _, size = store.unused_values()
        expired, left = _unneeded_files(folder, keep)
        values = store.collect()
        store.empty_log()
        for path in (*expired, *left):
            files.remove(path)
    size = size if values else 0
    return Garbage(values=values, bytes=size, checkpoints=len(expired), leftovers=len(left))


def _unneeded_files(folder: Path, keep: int | None) -> tuple[list[Path], list[Path]]:
    expired = [each.path for each in expired_checkpoints(folder, keep)]
    return expired, leftovers(folder)
