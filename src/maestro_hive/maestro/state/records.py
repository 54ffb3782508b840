"""What the journal holds, as frozen records. Nothing here touches a disk or a clock."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from maestro_hive.kernel.clock import from_micros as from_micros  # noqa: PLC0414 - for callers
from maestro_hive.kernel.clock import to_micros as to_micros  # noqa: PLC0414 - as above

if TYPE_CHECKING:
    from datetime import datetime

    from maestro_hive.maestro.state.codec import Encoded


class EntryKind(IntEnum):
    """What an entry of a run records. The numbers are stored: never reuse one."""

    #: An attempt at a step started; identity: the step's; facts: name, persona, and where they
    #: apply: options (those given), defaults (digits of their digests), occurrence (of calls that an
    #: executor tells apart by their order), returns (the shape of the result, of a step that asks when
    #: it is ambiguous); value: the input.
    ATTEMPT_STARTED = 1
    #: An attempt failed or was stopped; facts: status, error (type, message, category, traceback,
    #: recoverable), reason, round, clock (when, and seconds since the first one started), and where they
    #: apply: counts (false: no failure of the task), final, wait, ambiguous (it was stopped after its
    #: task was called), asked (a person has to say whether it had its effect), diagnosis (type,
    #: fingerprint, file, line, function, error_types, details), still_held (the leases of permits
    #: that its thread holds until it ends: lease, fence, holder).
    ATTEMPT_FAILED = 2
    #: An attempt succeeded, and its step is finished; facts, where it was cancelled and completed
    #: all the same: cancelled; where a person said so: resolved, by; value: the result.
    STEP_COMPLETED = 3
    #: A step saved its progress; value: what it saved.
    PROGRESS_SAVED = 4
    #: A persona's memory as a whole; facts: persona; value: the dictionary.
    MEMORY_SAVED = 5
    #: One more item of a persona's history; facts: persona; value: the item.
    HISTORY_APPENDED = 6
    #: Tokens or money were spent; facts: persona, tokens, usd, and where they are known: model, input,
    #: output, cached (tokens read from a provider's cache, apart from ``tokens``), cache_write.
    SPENT = 7
    #: A round of level 2 failed; identity: of what it tried; facts: round, execution_id, name,
    #: persona, status, seconds, tokens, report, wait.
    ROUND_FAILED = 8
    #: Level 2 gave up and asked for help; identity: of what it tried; facts: report, actions, outer (the
    #: round of a level 2 around it), and where they apply: escalation (its id in the outbox), ticket.
    ESCALATED = 9
    #: Fields of the run changed; value: the fields.
    FIELDS_SET = 10
    #: A task is pending; facts: task.
    TASK_PENDING = 11
    #: A task is completed; facts: task; value: its artifacts.
    TASK_COMPLETED = 12
    #: A persona was retried; facts: persona.
    RETRY_COUNTED = 13
    #: The state that a persona last reported; facts: persona; value: its state.
    PERSONA_SET = 14
    #: The entries before no longer count: the run starts again, or from the copy that follows; facts
    #: of a copy: from, saved_at, and fence where there was no journal.
    RESTORED = 15
    #: What failed may be retried; identity: of one step, or none for all; facts: forget (the
    #: result too), run (the end of the run too), resolved (a person said so: of an ambiguous step, or
    #: of one that was escalated), by, feedback (for the next attempts), escalation (its id).
    RETRIED = 16
    #: A workflow's run started; identity: of workflow and input; facts: workflow, parameters, and where
    #: they apply: types (the shapes of parameters), parent (a run's name), forked_from, from_step; value: the input.
    RUN_STARTED = 17
    #: A workflow's run ended; facts: status (success, failed, cancelled), and error as in
    #: ATTEMPT_FAILED, or reason; value: the result.
    RUN_ENDED = 18
    #: The workflow waits; identity: of the wait; facts: name, what (sleep, answer, timeout, escalation),
    #: and where they apply: wait (how long at most), shape (of the answer), escalation (its id), step
    #: (the identity of the one that failed), returns (the shape of its result); value: what it is about.
    WAIT_STARTED = 19
    #: A wait ended; identity: of the wait; facts: name, how (over, answered, timeout, cancelled,
    #: withdrawn), and where they apply: answer (its id), by; value: the answer; to an escalation:
    #: feedback, result, or give_up.
    WAIT_ENDED = 20
    #: The workflow started another as its child; identity: of the call; facts: run_id, workflow, and
    #: copied (in a fork: it is a child of the run that was forked).
    CHILD_STARTED = 21
    #: A child ended, or was cancelled by its parent; identity: of the call; facts: run_id, workflow,
    #: status, and cancelled (by the parent), or copied as above; value: of a copied one, its result.
    CHILD_ENDED = 22
    #: A step failed for good, and the workflow gets its error; identity: the step's; facts: name,
    #: error as in ATTEMPT_FAILED, rounds, or skipped (the workflow gets None).
    STEP_FAILED = 23
    #: The workflow cancelled a step; identity: the step's; facts: name.
    STEP_CANCELLED = 24
    #: The workflow asked for the time or for something random; identity: of the call; facts: name;
    #: value: what it got.
    VALUE_RECORDED = 25
    #: The run is cancelled: its workflow gets that here, and may clean up; facts: reason, wait (how
    #: long).
    CANCEL_REQUESTED = 26
    #: A resumed workflow went another way than before; facts: missing (names of calls that are
    #: recorded and were not made again), new (of calls that were made among recorded ones).
    REPLAY_DIFFERED = 27
    #: A step has arguments that earlier code did not record; facts: name, persona, defaults (digits
    #: of the digests of theirs, by name). What lacks them is of the same call while these hold.
    ARGUMENTS_ADDED = 28
    #: The run was suspended, and no process executes it; facts: error (type, message), and account,
    #: if a budget refused a call.
    RUN_SUSPENDED = 29
    #: A healer was asked about the failure of an attempt; facts: status (IN_PROGRESS: files of the
    #: workspace are about to be changed), type, fingerprint, and where they apply: healer, fix,
    #: feedback, wait (as told), files (their paths), workspace, error (why there is no repair);
    #: value: all arguments that healers changed, by name; while IN_PROGRESS, what the files were, by
    #: path: data, mode, after (the digest of what they become).
    REPAIR_TRIED = 30
    #: Whether the repair of a failed attempt worked; facts: verdict (worked, failed, undecided: another
    #: failure came, and another verdict may follow, or interrupted: its process died while it changed
    #: files, and it is made again), fingerprint, healer, reason, and where they apply: restored, left
    #: (the paths of files).
    REPAIR_JUDGED = 31
    #: What an attempt spent used up a part of a budget, for the first time; facts: account, percent,
    #: unit (tokens, or usd: in millionths), used, limit.
    BUDGET_WARNED = 32
    #: A run that had spent something was resumed; facts: saved_tokens, saved_usd: what its completed
    #: steps had spent, and did not spend again.
    RUN_RESUMED = 33
    #: A person was told of an escalation; identity: of what failed; facts: name, escalation (its id),
    #: system, ticket (its key), and where they apply: address, comment (its id, if the ticket was there).
    ESCALATION_DELIVERED = 34


#: The statuses of a run whose workflow ended.
OVER = ("success", "failed", "cancelled")

#: The status of a run that a budget has stopped.
BANKRUPT = "bankrupt"

#: The kinds that a workflow gets something by: it sees them in the order of their record.
OUTCOMES: frozenset[EntryKind] = frozenset(
    {
        EntryKind.STEP_COMPLETED,
        EntryKind.STEP_FAILED,
        EntryKind.STEP_CANCELLED,
        EntryKind.WAIT_ENDED,
        EntryKind.CHILD_ENDED,
        EntryKind.CANCEL_REQUESTED,
    }
)
#: The kinds that reset the count of a run's process deaths: outcomes, a retry, and the start of an
#: attempt, since deaths in a step are counted by the step.
RESETS_DEATHS: frozenset[EntryKind] = OUTCOMES | {EntryKind.ATTEMPT_STARTED, EntryKind.RETRIED}
#: The kinds that are events alone: nothing of them is in the folded state of a run.
EVENTS_ONLY: frozenset[EntryKind] = frozenset(
    {EntryKind.REPLAY_DIFFERED, EntryKind.RUN_SUSPENDED, EntryKind.BUDGET_WARNED}
)


class Entry(NamedTuple):
    """One entry of a run; a tuple, because opening a run makes tens of thousands.

    A small value is here, a large one is behind ``payload``: ``Store.load`` gives either.
    """

    seq: int
    kind: int
    step: int
    attempt: int
    at: int
    facts: bytes | None
    value: bytes | None
    payload: int | None
    sha256: bytes | None
    identity: bytes | None

    @property
    def when(self) -> datetime:
        """The time it was recorded."""
        return from_micros(self.at)


class NewEntry(NamedTuple):
    """An entry to append.

    ``family`` names the values that this one may have grown from; ``at`` is now, unless the entry
    is copied from somewhere else.
    """

    kind: EntryKind
    step: int = 0
    attempt: int = 0
    facts: bytes | None = None
    value: Encoded | None = None
    family: str = ""
    identity: bytes | None = None
    at: int | None = None


class StoredValue(NamedTuple):
    """A large value as it is stored: whole, or as the difference to another one."""

    sha256: bytes
    base: bytes | None
    data: bytes


class ChunkKind(IntEnum):
    """What a chunk of a stream is. The numbers are stored: never reuse one."""

    #: The step started over: what it wrote before no longer counts; without data.
    RESTARTED = 0
    #: A text, in UTF-8.
    TEXT = 1
    #: Bytes.
    BYTES = 2


class Chunk(NamedTuple):
    """One chunk of what the steps of a run wrote, by its number in the run."""

    seq: int
    step: int
    attempt: int
    at: int
    kind: int
    data: bytes


class NewChunk(NamedTuple):
    """A chunk to append; ``at`` is when the step wrote it."""

    step: int
    attempt: int
    at: int
    kind: ChunkKind
    data: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run, as listings show it."""

    id: int
    name: str
    workflow: str
    status: str
    created_at: datetime
    updated_at: datetime
    #: The name of the run that started it as its child.
    parent: str | None = None


class DispatchState(IntEnum):
    """What a run that belongs to workers waits for. The numbers are stored: never reuse one."""

    #: A worker may take it now.
    READY = 0
    #: It is due later.
    SCHEDULED = 1
    #: Who holds its lease executes it.
    ACTIVE = 2
    #: Until it is woken.
    HELD = 3


class NewDispatch(NamedTuple):
    """How workers get a run: from which queue, when, and who of them.

    ``due`` is in so many seconds; 0 means now, and None not before it is woken. A ``priority`` higher
    by 1 is worth a minute of waiting. A ``version`` has it taken only by workers with that version.
    """

    queue: str = "default"
    priority: int = 0
    due: float | None = 0.0
    version: str | None = None


#: What a priority higher by 1 is worth, in microseconds of waiting; and the most that counts.
_PRIORITY_MICROS = 60_000_000
_PRIORITY_MOST = 1_000_000
#: The longest wait of a run, in seconds: three hundred years.
_WAIT_MOST = 1e10


def wait_of(due: float | None) -> float:
    """Return for how many seconds a run is scheduled that is due so late; 0 if it is not."""
    return min(due, _WAIT_MOST) if due is not None and due > 0 else 0.0


def state_of(due: float | None) -> DispatchState:
    """Return what a run waits for that is due in so many seconds."""
    if due is None:
        return DispatchState.HELD
    return DispatchState.SCHEDULED if wait_of(due) else DispatchState.READY


def rank_of(new: NewDispatch, now: int) -> int:
    """Return a run's place in its queue, the lowest first, if it comes to workers now."""
    priority = max(-_PRIORITY_MOST, min(_PRIORITY_MOST, new.priority))
    return now + int(wait_of(new.due) * 1e6) - priority * _PRIORITY_MICROS


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """An unfinished run that belongs to workers; ``due_at`` is None unless it is scheduled.

    ``deaths`` counts the processes that died while they executed it, since it last recorded one of
    ``RESETS_DEATHS``.
    """

    run_id: str
    workflow: str
    queue: str
    priority: int
    state: DispatchState
    due_at: datetime | None
    version: str | None
    enqueued_at: datetime
    deaths: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that holds leases; ``since`` is when it took the lease it is named in."""

    id: str
    host: str
    pid: int
    since: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """An exclusive right under a name, until it is released, or expires and is taken over.

    ``fence``, the fencing number, grows with each acquisition; a write with an older one is
    refused. ``expires`` counts seconds awake since ``boot``: time asleep does not count.
    """

    name: str
    fence: int
    holder: Holder
    boot: str
    expires: float


#: How the leases of semaphores are called.
PERMITS = "semaphore/"


def permit_lease(name: str, what: object) -> str:
    """Return the name of a lease of the semaphore ``name``: of a permit, by its number."""
    return f"{PERMITS}{quote(name, safe='')}/{what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A value under a namespace and a key; ``version`` grows with each change."""

    namespace: str
    key: str
    version: int
    value: bytes
    sha256: bytes
    updated_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    """A circuit breaker that every process shares.

    It opened at ``boot_seconds`` after the start of the machine that ``boot`` names, for
    ``cooldown_seconds``. ``recent`` has a character for each of the latest calls, where rates are
    used (see ``breaker_rules``). ``probe`` is the fencing number of the latest probe.
    """

    name: str
    state: str = "closed"
    consecutive_failures: int = 0
    opened_at: datetime | None = None
    last_failure_time: datetime | None = None
    last_success_time: datetime | None = None
    opened_because: str = ""
    cooldown_seconds: float | None = None
    boot: str = ""
    boot_seconds: float = 0.0
    recent: str = ""
    probe: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EntriesAppended:
    """The run has more entries, from the number ``first`` up to ``seq``."""

    run_id: str
    first: int
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentChanged:
    """A document has another value; None where there is none."""

    namespace: str
    key: str
    before: bytes | None
    after: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Part of a journal that could not be read when it was opened, and where its copy is, if any."""

    file: str
    found_at: datetime
    reason: str
    moved_to: str


Notification = EntriesAppended | DocumentChanged
