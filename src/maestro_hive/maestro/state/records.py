"""What the journal holds, as frozen records. Nothing here touches a disk or a clock."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from maestro_hive.kernel.clock import from_micros as from_micros  # noqa: PLC0414 - for callers
from maestro_hive.kernel.clock import to_micros as to_micros  # noqa: PLC0414 - as above

if TYPE_CHECKING:
    from datetime import datetime

    from maestro_hive.maestro.state.codec import Encoded


class EntryKind(IntEnum):
    """What an entry of a run records. The numbers are stored: never reuse one."""

    #: An attempt at a step started; identity: the step's; facts: name, persona,
    #: and options, if any were given; value: the input.
    ATTEMPT_STARTED = 1
    #: An attempt failed or was stopped; facts: status, error (type, message, category, traceback,
    #: recoverable), reason, round, clock (when, and seconds since the first one started), and where they
    #: apply: counts (false: no failure of the task), final, wait, healed, healing_error,
    #: feedback (of a healer).
    ATTEMPT_FAILED = 2
    #: An attempt succeeded, and its step is finished; value: the result.
    STEP_COMPLETED = 3
    #: A step saved its progress; value: what it saved.
    PROGRESS_SAVED = 4
    #: A persona's memory as a whole; facts: persona; value: the dictionary.
    MEMORY_SAVED = 5
    #: One more item of a persona's history; facts: persona; value: the item.
    HISTORY_APPENDED = 6
    #: Tokens or money were spent; facts: persona, tokens, usd.
    SPENT = 7
    #: A round of level 2 failed; identity: of what it tried; facts: error, wait, attempts.
    ROUND_FAILED = 8
    #: Level 2 gave up and asked for help; identity: of what it tried; facts: ticket, report.
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
    #: The entries before no longer count: the run starts again, or from the copy that follows.
    RESTORED = 15
    #: What failed may be retried; identity: of one step, or none for all; facts: forget (the
    #: result too).
    RETRIED = 16
    #: A workflow's run started; identity: of workflow and input; facts: workflow, parameters, and where
    #: they apply: parent (a run's name), forked_from, from_step; value: the input.
    RUN_STARTED = 17
    #: A workflow's run ended; facts: status (success, failed, cancelled), and error as in
    #: ATTEMPT_FAILED, or reason; value: the result.
    RUN_ENDED = 18
    #: The workflow waits; identity: of the wait; facts: name, what (sleep, answer), and where they
    #: apply: wait (how long at most), shape (of the answer).
    WAIT_STARTED = 19
    #: A wait ended; identity: of the wait; facts: name, how (over, answered, timeout), and where
    #: they apply: answer (its id), by; value: the answer.
    WAIT_ENDED = 20
    #: The workflow started another as its child; identity: of the call; facts: run_id, workflow.
    CHILD_STARTED = 21


#: The kinds that are events alone: nothing of them is in the folded state of a run.
EVENTS_ONLY: frozenset[EntryKind] = frozenset()


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run, as listings show it."""

    id: int
    name: str
    workflow: str
    status: str
    created_at: datetime
    updated_at: datetime


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
class Budget:
    """What may be spent under one name, and what was."""

    name: str
    max_tokens: int | None = None
    max_usd: float | None = None
    tokens: int = 0
    usd: float = 0.0


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
    """Part of a journal that could not be read when it was opened, and where its copy is."""

    file: str
    found_at: datetime
    reason: str
    moved_to: str


Notification = EntriesAppended | DocumentChanged
