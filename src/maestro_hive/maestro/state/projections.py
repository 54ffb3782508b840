"""The state of a run, folded from its entries. Pure: it is given entries and values.

Opening a run folds all of its entries, and recording adds one: both are on the path of every step,
so the fold is one loop and values are loaded only where they matter. What people see of a run is
made in ``views`` when it is asked for.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile
from operator import attrgetter
from typing import TYPE_CHECKING

from maestro_hive.kernel.errors import CorruptionError, MaestroError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.codec import Json
from maestro_hive.maestro.state.records import Entry, EntryKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    Load = Callable[[Entry], bytes | None]

#: What an entry records besides its value: JSON, to be read only.
Facts = Mapping[str, Json]
RepairKey = tuple[int, str]

#: The fields of a run that may be set by name, and their initial values.
FIELDS: dict[str, Callable[[], Json]] = {
    "phase": lambda: "initializing",
    "step": int,
    "status": lambda: "pending",
    "persona_states": dict,
    "retry_counts": dict,
    "completed_tasks": list,
    "pending_tasks": list,
    "artifacts": dict,
    "metrics": dict,
}


@lru_cache(maxsize=4096)
def _parsed(facts: bytes) -> Facts:
    parsed = codec.parse(facts, "facts")
    if not isinstance(parsed, dict):
        raise TypeError("its facts are not an object")
    return parsed


def facts_of(entry: Entry) -> Facts:
    """Return an entry's facts, to be read only: equal ones are parsed once."""
    return _parsed(entry.facts) if entry.facts else {}


@lru_cache(maxsize=16_384)  # each task of a team has its own name
def _name_and_persona(facts: bytes) -> tuple[str, str]:
    """Return a step's name and persona, parsed once for all steps that are alike."""
    parsed = _parsed(facts)
    return str(parsed.get("name", "")), str(parsed.get("persona", ""))


@dataclass(slots=True)
class StepState:
    """One step: its identity, its attempts, and its result once it is completed.

    A retry resets the counts; ``last_attempt`` continues.
    """

    number: int
    identity: bytes | None
    #: Its first entry, which has its name, persona and input.
    started: Entry
    name: str = ""
    persona: str = ""
    starts: int = 0
    failures: int = 0
    stops: int = 0
    last_attempt: int = 0
    #: The attempt whose end is not recorded; 0 if there is none.
    open_attempt: int = 0
    #: The number of its latest entry.
    seq: int = 0
    completed: Entry | None = None
    last_failure: Entry | None = None
    progress: Entry | None = None
    #: Tokens by attempt, where any were spent.
    tokens: dict[int, int] | None = None
    usd: float = 0.0
    #: The log, unless it is the first start alone: most steps need no list for it.
    _log: list[Entry] | None = None
    #: What was tried to repair its failures, and the verdicts; None if nothing was.
    repairs: list[Entry] | None = None
    #: What persons said about its failures; None if nobody did.
    advice: list[Entry] | None = None
    #: How often it was retried: which of its final failures the last one is.
    retries: int = 0

    @property
    def log(self) -> list[Entry]:
        """The starts and failures of its attempts since the last retry, in order; to be read."""
        return [self.started] if self._log is None else self._log

    def append_log(self, entry: Entry) -> None:
        """Add a start or a failure of an attempt."""
        if self._log is None:
            self._log = [self.started]
        self._log.append(entry)

    def copied(self) -> StepState:
        """Return a copy, to which nothing is added."""
        copied = copy.copy(self)
        copied._log = None if self._log is None else self._log.copy()  # noqa: SLF001 - its own
        copied.repairs = None if self.repairs is None else self.repairs.copy()
        return copied

    @property
    def interruptions(self) -> int:
        """The attempts whose end was never recorded, without the one that is open."""
        # A result that a person gave for a failed step is the end of no attempt.
        completed = self.completed is not None and "escalation" not in facts_of(self.completed)
        return self.starts - self.failures - self.stops - completed - (self.open_attempt > 0)

    def failures_in(self, round_number: int) -> int:
        """Return how many attempts failed in one round of level 2."""
        return sum(
            entry.kind == EntryKind.ATTEMPT_FAILED
            and facts_of(entry).get("counts", True)
            and facts_of(entry).get("round", 1) == round_number
            for entry in self.log
        )

    def start_over(self, *, forget: bool) -> None:
        """Reset the counts, so that it is attempted again; ``forget`` drops its result too.

        A completed step is not attempted again unless its result is forgotten.
        """
        if self.completed is not None and not forget:
            return
        self.retries += 1
        self.starts = self.failures = self.stops = self.open_attempt = 0
        self._log = []
        if forget:
            self.completed = self.last_failure = self.progress = self.repairs = self.advice = None


@dataclass(slots=True)
class RunState:
    """A run, folded from its entries; ``seq`` is the number of the last one."""

    seq: int = 0
    created_at: int = 0
    updated_at: int = 0
    phase: str = "initializing"
    step: int = 0
    status: str = "pending"
    #: The entry that last set each field by hand.
    field_seqs: dict[str, int] = field(default_factory=dict)
    persona_states: dict[str, dict[str, Json]] = field(default_factory=dict)
    #: The entry that last set the state of each persona.
    persona_seqs: dict[str, int] = field(default_factory=dict)
    retry_counts: dict[str, int] = field(default_factory=dict)
    artifacts: dict[str, Json] = field(default_factory=dict)
    metrics: dict[str, Json] = field(default_factory=dict)
    # Dictionaries, so that the ten-thousandth task costs what the first did.
    completed_tasks: dict[str, Entry | None] = field(default_factory=dict)
    pending_tasks: dict[str, None] = field(default_factory=dict)
    steps: dict[int, StepState] = field(default_factory=dict)
    last_step: int = 0
    by_identity: dict[bytes, StepState] = field(default_factory=dict)
    #: How many steps of each name are not completed.
    unfinished: dict[str, int] = field(default_factory=dict)
    #: How often steps of each persona were started again.
    restarts: dict[str, int] = field(default_factory=dict)
    #: The latest step of each persona.
    latest: dict[str, StepState] = field(default_factory=dict)
    memories: dict[str, Entry] = field(default_factory=dict)
    histories: dict[str, list[Entry]] = field(default_factory=dict)
    #: Tokens and US dollars by persona.
    spent: dict[str, tuple[int, float]] = field(default_factory=dict)
    #: What its completed steps had spent when it was resumed, summed over all times it was.
    saved: tuple[int, float] = (0, 0.0)
    #: The failed rounds of each step, and its escalation; by identity.
    rounds: dict[bytes, list[Entry]] = field(default_factory=dict)
    escalated: dict[bytes, Entry] = field(default_factory=dict)
    #: Of which escalations a person was told, by their ids.
    delivered: dict[str, Entry] = field(default_factory=dict)
    #: The start and the end of a workflow's run; None for a run without a workflow.
    started: Entry | None = None
    ended: Entry | None = None
    #: The waits of the workflow, and how they ended; by identity.
    waits: dict[bytes, Entry] = field(default_factory=dict)
    answers: dict[bytes, Entry] = field(default_factory=dict)
    #: The waits for a person who has not answered: questions, and escalations of steps.
    questions: dict[bytes, Entry] = field(default_factory=dict)
    children: dict[bytes, Entry] = field(default_factory=dict)
    #: How steps and children ended for the workflow, other than completed steps; by identity.
    outcomes: dict[bytes, Entry] = field(default_factory=dict)
    #: The times and random values that the workflow got; by identity.
    values: dict[bytes, Entry] = field(default_factory=dict)
    #: The arguments that changed code added to steps, with their defaults.
    arguments_added: list[Entry] = field(default_factory=list)
    #: The request to cancel the run.
    cancel_requested: Entry | None = None
    #: The steps with repairs that have no final verdict.
    unjudged: set[int] = field(default_factory=set)
    #: The fencing number that the run's files had reached when this journal was started.
    fence_floor: int = 0
    #: The number of the entry since which entries count; 0 if all do.
    restored_seq: int = 0

    def fields(self) -> dict[str, Json]:
        """Return the fields that were set, by name, as new containers."""
        # The tasks are dictionaries here, and lists as fields; all else is of its own type.
        fields = {name: type(make())(getattr(self, name)) for name, make in FIELDS.items()}
        personas = self.persona_states.items()
        return {**fields, "persona_states": {name: dict(state) for name, state in personas}}

    def without_steps(self) -> RunState:
        """Return what the fields of a run follow from, as of now: a copy that is made in no time."""
        copied = copy.copy(self)
        copied.steps, copied.by_identity = {}, {}
        for name in _COPIED:
            setattr(copied, name, getattr(self, name).copy())
        copied.histories = {persona: items.copy() for persona, items in self.histories.items()}
        copied.latest = {persona: step.copied() for persona, step in self.latest.items()}
        return copied

    def set_fields(self, fields: dict[str, Json]) -> None:
        """Replace fields by name; names that this version does not know are ignored."""
        for name, value in fields.items():
            if name not in FIELDS:
                continue
            wanted = type(FIELDS[name]())
            if not isinstance(value, wanted):
                given = type(value).__name__
                raise TypeError(f"state.{name} is a {given}, and must be a {wanted.__name__}")
            if name == "completed_tasks":
                self.completed_tasks = {task: self.completed_tasks.get(task) for task in value}
            elif name == "pending_tasks":
                self.pending_tasks = dict.fromkeys(value)
            elif name == "persona_states":
                self.persona_states = {persona: dict(state) for persona, state in value.items()}
            else:
                setattr(self, name, value)

    def add_all(self, entries: Sequence[Entry], load: Load) -> None:
        """Fold entries in order, in one loop: opening folds many, recording one after the other."""
        if not entries:
            return
        find, steps, latest, unfinished = _HANDLERS.get, self.steps, self.latest, self.unfinished
        entry = entries[0]
        try:
            for entry in entries:
                kind = entry[1]
                if kind == _STEP_COMPLETED:  # every second entry: no call for it
                    step = steps[entry[2]]
                    if step.completed is None:
                        unfinished[step.name] -= 1
                    step.open_attempt = 0
                    step.completed = entry
                    step.seq = entry[0]
                    latest[step.persona] = step
                elif (handler := find(kind)) is not None:
                    handler(self, entry)
                    if kind == _RESTORED:  # which makes new containers
                        steps, latest, unfinished = self.steps, self.latest, self.unfinished
                else:
                    _add_value(self, entry, load)
        except MaestroError:
            raise  # some are a ValueError too
        except _WRONG_ENTRY as error:
            raise _corrupt(entry, error) from error
        self.seq, self.updated_at = entry.seq, entry.at
        # A run restored from a copy started when the copied entries did.
        first = min(map(_AT, entries))
        if first < self.created_at or not self.created_at:
            self.created_at = first


#: The containers that ``without_steps`` copies.
_COPIED = (
    *("persona_states", "persona_seqs", "retry_counts", "artifacts", "metrics", "completed_tasks"),
    *("pending_tasks", "unfinished", "restarts", "memories", "spent", "questions"),
)
_AT = attrgetter("at")
_STEP_COMPLETED = EntryKind.STEP_COMPLETED.value
_RESTORED = EntryKind.RESTORED.value
#: What reading an entry raises that no version of this program wrote.
_WRONG_ENTRY = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@contextmanager
def readable(run_id: str) -> Iterator[None]:
    """Read a run; if its entries are not what this program writes, the error names the run."""
    try:
        yield
    except MaestroError:
        raise  # some are a ValueError too
    except _WRONG_ENTRY as error:
        raise CorruptionError(
            f"run {run_id!r} cannot be read: {type(error).__name__}: {error}; 'maestro purge"
            f" {run_id}' deletes it, and other runs are not affected"
        ) from error


def _corrupt(entry: Entry, error: Exception) -> CorruptionError:
    if isinstance(error, KeyError):
        return CorruptionError(f"entry {entry.seq} of the run refers to {error}, which is missing")
    return CorruptionError(f"entry {entry.seq} of the run is invalid: {error}")


def fold(entries: Sequence[Entry], load: Load) -> RunState:
    """Return the state that these entries add up to."""
    state = RunState()
    state.add_all(entries, load)
    return state


def effective_entries(entries: Sequence[Entry]) -> Sequence[Entry]:
    """Return the entries since the run was last restored or started over."""
    for number in range(len(entries), 0, -1):
        if entries[number - 1].kind == EntryKind.RESTORED:
            return entries[number:]
    return entries


# --- steps ----------------------------------------------------------------------------------------


def _attempt_started(state: RunState, entry: Entry) -> None:
    # By position: a long run has hundreds of thousands, and names would cost half as much again.
    seq, _, number, attempt, _, facts, _, _, _, identity = entry
    step = state.steps.get(number)
    if step is None:
        name, persona = _name_and_persona(facts) if facts else ("", "")
        step = state.steps[number] = StepState(
            number, identity, entry, name, persona, 1, 0, 0, attempt, attempt, seq
        )
        state.last_step = max(state.last_step, number)
        unfinished = state.unfinished
        unfinished[name] = unfinished.get(name, 0) + 1
        if identity is not None:
            state.by_identity[identity] = step
    else:
        persona = step.persona
        state.restarts[persona] = state.restarts.get(persona, 0) + 1
        step.starts += 1
        step.open_attempt = step.last_attempt = attempt
        step.seq = seq
        step.append_log(entry)
    state.latest[persona] = step


def _attempt_failed(state: RunState, entry: Entry) -> None:
    step = state.steps[entry.step]
    facts = facts_of(entry)
    if facts.get("counts", True):
        step.failures += 1
        step.last_failure = entry
    elif facts.get("status") != "interrupted":
        step.stops += 1
    step.open_attempt = 0
    step.seq = entry.seq
    step.append_log(entry)
    state.latest[step.persona] = step


def _progress_saved(state: RunState, entry: Entry) -> None:
    step = state.steps[entry.step]
    step.progress = entry
    step.seq = entry.seq
    state.latest[step.persona] = step


def _repair(state: RunState, entry: Entry) -> None:
    step = state.steps[entry.step]
    step.repairs = [*(step.repairs or ()), entry]
    step.seq = entry.seq
    if pending_repairs(step):
        state.unjudged.add(step.number)
    else:
        state.unjudged.discard(step.number)


def _identity(entry: Entry) -> bytes:
    if entry.identity is None:
        raise TypeError("it has no identity")
    return entry.identity


def _retried(state: RunState, entry: Entry) -> None:
    facts = facts_of(entry)
    identity = entry.identity
    if identity is None:
        _retry_run(state, entry, {bytes.fromhex(each) for each in facts.get("only", ())})
    else:
        if identity in state.by_identity:
            step = state.by_identity[identity]
            _start_over(state, step, entry, forget=bool(facts.get("forget")))
            if facts.get("feedback"):
                step.advice = [*(step.advice or ()), entry]
        state.rounds.pop(identity, None)
        state.escalated.pop(identity, None)
        failed = state.outcomes.pop(identity, None)
        if failed is not None:
            _forget_refusal(state, identity, failed)
        if not facts.get("resolved"):  # of a run that goes on, nothing else changes
            _forget_cancelled(state, after=0 if failed is None else failed.seq)
    if identity is None or facts.get("run"):
        state.cancel_requested = None
        _reopen(state)


def _retry_run(state: RunState, entry: Entry, only: set[bytes]) -> None:
    """Clear the failures that a run failed by, and those beside them; all, if they are not known.

    The workflow caught others, and went on: it shall take the same branches again.
    """
    after = _last_success_before(state, only)
    failed = [
        identity
        for identity, outcome in state.outcomes.items()
        if outcome.seq > after and outcome_status(outcome) != "success"
    ]
    for identity in failed:
        _forget_refusal(state, identity, state.outcomes.pop(identity))
    _forget_cancelled(state, after=after)
    for step in state.steps.values():
        if step.identity not in state.outcomes:
            _start_over(state, step, entry, forget=bool(facts_of(entry).get("forget")))
    for recorded in (state.rounds, state.escalated):
        for identity in [each for each in recorded if each not in state.outcomes]:
            del recorded[identity]
    _ask_again(state, late=not only)


def _last_success_before(state: RunState, failed: set[bytes]) -> int:
    """Return the number of the last entry that a workflow went on with before these failures."""
    first = min((state.outcomes[each].seq for each in failed if each in state.outcomes), default=0)
    completed = (step.completed.seq for step in state.steps.values() if step.completed)
    children = (each.seq for each in state.outcomes.values() if outcome_status(each) == "success")
    return max((seq for seq in (*completed, *children) if seq < first), default=0)


def _forget_cancelled(state: RunState, *, after: int) -> None:
    """Forget what was cancelled because of a failure: it is executed again."""
    steps = [
        each
        for each, outcome in state.outcomes.items()
        if outcome.seq > after and outcome_status(outcome) == "cancelled"
    ]
    for identity in steps:
        del state.outcomes[identity]
    waits = [
        each
        for each, ended in state.answers.items()
        if ended.seq > after and facts_of(ended)["how"] == "cancelled"
    ]
    for identity in waits:
        del state.answers[identity]


def _forget_refusal(state: RunState, identity: bytes, outcome: Entry) -> None:
    """Forget that approval was refused to a step that is retried: it is asked for again."""
    error = facts_of(outcome).get("error") or {}
    if error.get("type") != "GovernanceViolation":
        return
    step = identity.hex()
    asked = [each for each, wait in state.waits.items() if facts_of(wait).get("step") == step]
    for question in asked:
        del state.waits[question]
        state.answers.pop(question, None)
        state.questions.pop(question, None)


def outcome_status(entry: Entry) -> str:
    """Return how a step or child ended for its workflow: success, failed or cancelled."""
    if entry.kind == EntryKind.CHILD_ENDED:
        return str(facts_of(entry).get("status", "failed"))
    return "failed" if entry.kind == EntryKind.STEP_FAILED else "cancelled"


def _start_over(state: RunState, step: StepState, entry: Entry, *, forget: bool) -> None:
    was_completed = step.completed is not None
    step.start_over(forget=forget)
    step.seq = entry.seq
    if was_completed and step.completed is None:
        state.unfinished[step.name] += 1


def _reopen(state: RunState) -> None:
    """Open a run again that failed or was cancelled; one that succeeded stays so."""
    if state.ended is not None and facts_of(state.ended).get("status") != "success":
        state.ended = None


# --- personas -------------------------------------------------------------------------------------


def sum_of_usd(amounts: Iterable[float]) -> float:
    """Return a sum in whole micro-dollars, as each amount is: binary fractions add up to others."""
    return round(sum(amounts), 6)


def _spent(state: RunState, entry: Entry) -> None:
    facts = facts_of(entry)
    persona, tokens, usd = (
        str(facts.get("persona", "")),
        facts.get("tokens", 0),
        facts.get("usd", 0.0),
    )
    before = state.spent.get(persona, (0, 0.0))
    state.spent[persona] = (before[0] + tokens, sum_of_usd((before[1], usd)))
    step = state.steps.get(entry.step)
    if step is not None:
        step.tokens = step.tokens or {}
        step.tokens[entry.attempt] = step.tokens.get(entry.attempt, 0) + tokens
        step.usd = sum_of_usd((step.usd, usd))
        step.seq = entry.seq


def _resumed(state: RunState, entry: Entry) -> None:
    facts, (tokens, usd) = facts_of(entry), state.saved
    saved = sum_of_usd((usd, facts.get("saved_usd", 0.0)))
    state.saved = (tokens + facts.get("saved_tokens", 0), saved)


def _persona(entry: Entry) -> str:
    return str(facts_of(entry).get("persona", ""))


def _retry_counted(state: RunState, entry: Entry) -> None:
    persona = facts_of(entry)["persona"]
    state.retry_counts[persona] = state.retry_counts.get(persona, 0) + 1


# --- workflows ------------------------------------------------------------------------------------


def _wait_started(state: RunState, entry: Entry) -> None:
    identity = _identity(entry)
    state.waits[identity] = entry
    state.answers.pop(identity, None)  # asked again: the answer is not of the type asked for now
    if facts_of(entry).get("what") in ("answer", "escalation"):
        state.questions[identity] = entry


def _wait_ended(state: RunState, entry: Entry) -> None:
    identity = _identity(entry)
    state.answers.setdefault(identity, entry)  # the first is the one that the workflow received
    state.questions.pop(identity, None)


def _ask_again(state: RunState, *, late: bool) -> None:
    """Drop open questions, and ``late`` ones: they are asked again, with all their time.

    A run that has not ended still waits at its open ones.
    """
    dropped = [
        identity
        for identity, entry in state.answers.items()
        if late and facts_of(entry)["how"] == "timeout"
    ]
    still_asked = asked_after_retry(state)
    for identity in (*dropped, *(state.questions.keys() - still_asked.keys())):
        state.waits.pop(identity, None)
        state.answers.pop(identity, None)
    state.questions = still_asked


def asked_after_retry(state: RunState) -> dict[bytes, Entry]:
    """Return the questions that stay open when a run is retried: escalations are for what failed."""
    if state.ended is not None:
        return {}
    return {
        identity: entry
        for identity, entry in state.questions.items()
        if "escalation" not in facts_of(entry)
    }


def _outcome(state: RunState, entry: Entry) -> None:
    state.outcomes[_identity(entry)] = entry


def _step_failed(state: RunState, entry: Entry) -> None:
    if not facts_of(entry).get("refused"):  # by the policy of an executor, which is asked each time
        _outcome(state, entry)


# --- fields and tasks -----------------------------------------------------------------------------


def _fields_set(state: RunState, entry: Entry, value: Json) -> None:
    fields = value or {}
    state.set_fields(fields)
    state.field_seqs.update(dict.fromkeys(fields, entry.seq))
    for persona in fields.get("persona_states", {}):
        state.persona_seqs[persona] = entry.seq


def _task_completed(state: RunState, entry: Entry, value: Json) -> None:
    task = facts_of(entry)["task"]
    state.pending_tasks.pop(task, None)
    state.completed_tasks[task] = entry
    state.artifacts.update(value or {})


def _persona_set(state: RunState, entry: Entry, value: Json) -> None:
    persona = facts_of(entry)["persona"]
    state.persona_states.setdefault(persona, {}).update(value or {})
    state.persona_seqs[persona] = entry.seq


def _restored(state: RunState, entry: Entry) -> None:
    fresh = RunState(
        state.seq,
        state.created_at,
        state.updated_at,
        fence_floor=max(state.fence_floor, facts_of(entry).get("fence", 0)),
        restored_seq=entry.seq,
    )
    for name in RunState.__slots__:
        setattr(state, name, getattr(fresh, name))


# --- one line per kind ----------------------------------------------------------------------------

_HANDLERS: dict[int, Callable[[RunState, Entry], None]] = {
    EntryKind.ATTEMPT_STARTED: _attempt_started,
    EntryKind.ATTEMPT_FAILED: _attempt_failed,
    EntryKind.PROGRESS_SAVED: _progress_saved,
    EntryKind.MEMORY_SAVED: lambda state, entry: state.memories.update({_persona(entry): entry}),
    EntryKind.HISTORY_APPENDED: lambda state, entry: state.histories.setdefault(
        _persona(entry), []
    ).append(entry),
    EntryKind.SPENT: _spent,
    EntryKind.RUN_RESUMED: _resumed,
    EntryKind.ROUND_FAILED: lambda state, entry: state.rounds.setdefault(
        _identity(entry), []
    ).append(entry),
    EntryKind.ESCALATED: lambda state, entry: state.escalated.update({_identity(entry): entry}),
    EntryKind.ESCALATION_DELIVERED: lambda state, entry: state.delivered.update(
        {facts_of(entry)["escalation"]: entry}
    ),
    EntryKind.TASK_PENDING: lambda state, entry: state.pending_tasks.update(
        {facts_of(entry)["task"]: None}
    ),
    EntryKind.RETRY_COUNTED: _retry_counted,
    EntryKind.RESTORED: _restored,
    EntryKind.RETRIED: _retried,
    EntryKind.RUN_STARTED: lambda state, entry: setattr(state, "started", entry),
    EntryKind.RUN_ENDED: lambda state, entry: setattr(state, "ended", entry),
    EntryKind.WAIT_STARTED: _wait_started,
    EntryKind.WAIT_ENDED: _wait_ended,
    EntryKind.CHILD_STARTED: lambda state, entry: state.children.update({_identity(entry): entry}),
    EntryKind.CHILD_ENDED: _outcome,
    EntryKind.STEP_FAILED: _step_failed,
    EntryKind.STEP_CANCELLED: _outcome,
    EntryKind.VALUE_RECORDED: lambda state, entry: state.values.update({_identity(entry): entry}),
    EntryKind.CANCEL_REQUESTED: lambda state, entry: setattr(state, "cancel_requested", entry),
    EntryKind.ARGUMENTS_ADDED: lambda state, entry: state.arguments_added.append(entry),
    EntryKind.REPAIR_TRIED: _repair,
    EntryKind.REPAIR_JUDGED: _repair,
}
#: The kinds whose value is part of the state, and is loaded for it.
_VALUE_HANDLERS: dict[int, Callable[[RunState, Entry, Json], None]] = {
    EntryKind.FIELDS_SET: _fields_set,
    EntryKind.TASK_COMPLETED: _task_completed,
    EntryKind.PERSONA_SET: _persona_set,
}
#: The kinds that are folded; any other is of a newer version, and ignored.
FOLDED: frozenset[int] = frozenset({_STEP_COMPLETED, *_HANDLERS, *_VALUE_HANDLERS})


def _add_value(state: RunState, entry: Entry, load: Load) -> None:
    handler = _VALUE_HANDLERS.get(entry.kind)
    if handler is not None:
        data = load(entry)
        handler(state, entry, codec.decode(data) if data is not None else None)


# --- one step -------------------------------------------------------------------------------------


def status_of(step: StepState) -> str:
    """Return the status of a step, one of ``ExecutionStatus``."""
    if step.completed is not None:
        return "recovered" if was_healed(step) else "success"
    if step.open_attempt:
        return "running"
    last = step.log[-1] if step.log else step.last_failure
    if last is None:
        return "pending"
    return str(facts_of(last).get("status", "failed"))


def was_healed(step: StepState) -> bool:
    """Return whether something was repaired between its attempts."""
    if step.failures == 0:
        return False
    if step.repairs and any(is_fixed(entry) for entry in repairs_of(step)):
        return True
    return any(facts_of(entry).get("healed") for entry in step.log)


# --- repairs --------------------------------------------------------------------------------------


def is_fixed(tried: Entry) -> bool:
    """Return whether the cause of a failure was repaired."""
    return facts_of(tried).get("status") == "FIXED"


def repairs_of(step: StepState) -> list[Entry]:
    """Return what came of healing the failures since it was started or retried, in order."""
    if not step.repairs:
        return []
    failed = {each.attempt for each in step.log if each.kind == EntryKind.ATTEMPT_FAILED}
    return [each for each in ended_repairs(step).values() if each.attempt in failed]


def ended_repairs(step: StepState) -> dict[int, Entry]:
    """Return what came of healing each failed attempt, by its number."""
    return {
        each.attempt: each
        for each in step.repairs or ()
        if each.kind == EntryKind.REPAIR_TRIED and facts_of(each).get("status") != "IN_PROGRESS"
    }


def changed_files(step: StepState) -> dict[RepairKey, Entry]:
    """Return the entries that have what files were before a repair changed them."""
    return {
        key_of(each): each
        for each in step.repairs or ()
        if each.kind == EntryKind.REPAIR_TRIED and facts_of(each).get("status") == "IN_PROGRESS"
    }


def judged_repairs(step: StepState) -> dict[RepairKey, Entry]:
    """Return the verdicts about repairs; one that was interrupted is made again, and has none."""
    return {
        key_of(each): each
        for each in step.repairs or ()
        if each.kind == EntryKind.REPAIR_JUDGED and facts_of(each).get("verdict") != "interrupted"
    }


def interrupted_repairs(step: StepState) -> list[Entry]:
    """Return what was about to change files when its process died, and was not restored since."""
    known = {key_of(each) for each in ended_repairs(step).values()} | judged_repairs(step).keys()
    restored = {
        key_of(each): each.seq
        for each in step.repairs or ()
        if each.kind == EntryKind.REPAIR_JUDGED and facts_of(each).get("verdict") == "interrupted"
    }
    return [
        each
        for key, each in changed_files(step).items()
        if key not in known and restored.get(key, 0) < each.seq
    ]


def pending_repairs(step: StepState) -> list[Entry]:
    """Return the repairs that have no verdict yet, or none that is final."""
    found = judged_repairs(step).items()
    judged = {key for key, each in found if facts_of(each).get("verdict") != "undecided"}
    return [
        each
        for each in ended_repairs(step).values()
        if "healer" in facts_of(each) and key_of(each) not in judged
    ]


def key_of(repair: Entry) -> RepairKey:
    """Return what tells a repair from others of its step: the failed attempt, and the healer."""
    return repair.attempt, str(facts_of(repair).get("healer", ""))


def labels(state: RunState) -> dict[int, str]:
    """Return the label of each step: its name, and ``name#2`` for the second of that name."""
    seen: dict[str, int] = {}
    found = {}
    for number, step in state.steps.items():
        count = seen[step.name] = seen.get(step.name, 0) + 1
        found[number] = step.name if count == 1 else f"{step.name}#{count}"
    return found


class StepLabels:
    """The labels of a run's steps while it goes on: each step is looked at once."""

    def __init__(self) -> None:
        self._found: dict[int, str] = {}
        self._seen: dict[str, int] = {}
        self._first: int | None = None

    def known(self, number: int) -> str | None:
        """Return the label of a step, if it was asked for before, or that of a later one."""
        return self._found.get(number)

    def of(self, state: RunState, number: int) -> str | None:
        """Return the label of a step, as ``labels`` gives it; None if there is no such step."""
        first = next(iter(state.steps), None)
        if first != self._first:  # the run was restored: its steps are others
            self._found, self._seen, self._first = {}, {}, first
        new = list(takewhile(lambda each: each not in self._found, reversed(state.steps)))
        for each in reversed(new):
            name = state.steps[each].name
            count = self._seen[name] = self._seen.get(name, 0) + 1
            self._found[each] = name if count == 1 else f"{name}#{count}"
        return self._found.get(number)


def find_step(state: RunState, wanted: str | int, *, newest: bool = False) -> StepState | None:
    """Return a step by its number, its name, or ``name#2``.

    A name alone is the first step of that name, or with ``newest`` the last one.
    """
    text = str(wanted)
    if text.isdecimal() and len(text) < 19 and int(text) in state.steps:
        return state.steps[int(text)]
    if newest:
        last = next((n for n in reversed(state.steps) if state.steps[n].name == text), None)
        if last is not None:
            return state.steps[last]
    found = (n for n, label in labels(state).items() if text in (label, f"{label}#1"))
    return state.steps.get(next(found, 0))


def feedback_of(step: StepState) -> list[str]:
    """Return how earlier attempts failed, and what persons said about that, a sentence for each.

    The next attempt is given them.
    """
    repairs = ended_repairs(step) if step.repairs else {}
    last = [step.last_failure] if step.last_failure else []
    told = [
        entry
        for entry in step.log
        if entry.kind == EntryKind.ATTEMPT_FAILED and facts_of(entry).get("counts", True)
    ]
    # After a retry the last failure is still of use.
    said = [*(told if step.failures else last), *(step.advice or ())]
    if step.advice:
        said.sort(key=attrgetter("seq"))
    return [_sentence(entry, repairs) for entry in said]


def _sentence(entry: Entry, repairs: Mapping[int, Entry]) -> str:
    facts, tried = facts_of(entry), repairs.get(entry.attempt)
    if entry.kind == EntryKind.RETRIED:
        return f"{facts.get('by') or 'A person'} answered: {facts['feedback']}"
    feedback = facts.get("feedback") if tried is None else facts_of(tried).get("feedback")
    return feedback_sentence(entry.attempt, facts.get("error", {}), feedback)


def feedback_sentence(attempt: int, error: Facts, healer: str | None) -> str:
    """Return how an attempt failed, and what a healer had to say about it."""
    what = f"{error.get('category') or 'UNKNOWN'}: {error.get('message', 'no message')}"
    sentence = f"Attempt {attempt} failed: {what}"
    return f"{sentence}\n{healer}" if healer else sentence
