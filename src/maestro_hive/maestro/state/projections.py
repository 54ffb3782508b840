"""What a run's entries add up to. Pure: it is given entries and values, and remembers.

What people see of it, names, personas and results, is made in ``run_view`` when somebody looks:
most steps of a long run are only ever found by their identity.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from maestro_hive.kernel.errors import CorruptionError, MaestroError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.records import Entry, EntryKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: The fields of a run that may be set by name, and what they are to begin with.
FIELDS: dict[str, Callable[[], Any]] = {
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
def _parsed(facts: bytes) -> Mapping[str, Any]:
    parsed = codec.parse(facts, "facts")
    if not isinstance(parsed, dict):
        raise TypeError("its facts are no object")
    return parsed


def facts_of(entry: Entry) -> Mapping[str, Any]:
    """Return an entry's facts, to be read only: equal ones are parsed once."""
    return _parsed(entry.facts) if entry.facts else {}


@lru_cache(maxsize=4096)
def _whose(facts: bytes) -> tuple[str, str]:
    """Return a step's name and persona: worked out once for all steps that are alike."""
    parsed = _parsed(facts)
    return str(parsed.get("name", "")), str(parsed.get("persona", ""))


@dataclass(slots=True)
class StepState:
    """One step: what it is, how often it was tried, and its result if it is finished.

    The counts start again when somebody asks for a retry; ``last_attempt`` never does.
    """

    number: int
    identity: bytes | None
    started: Entry
    name: str = ""
    persona: str = ""
    starts: int = 0
    failures: int = 0
    stops: int = 0
    last_attempt: int = 0
    open_attempt: int = 0
    #: The number of the last entry that speaks of it.
    seq: int = 0
    completed: Entry | None = None
    last_failure: Entry | None = None
    progress: Entry | None = None
    #: Beginnings and failures, in order.
    log: list[Entry] = field(default_factory=list)
    #: Tokens by attempt, where any were spent.
    tokens: dict[int, int] | None = None

    @property
    def interruptions(self) -> int:
        """Attempts that began and whose end nobody recorded, the one under way excluded."""
        ended = self.failures + self.stops + (self.completed is not None) + (self.open_attempt > 0)
        return self.starts - ended

    def failures_in(self, round_number: int) -> int:
        """Return how many attempts failed in one round of level 2."""
        return sum(
            entry.kind == EntryKind.ATTEMPT_FAILED
            and facts_of(entry).get("counts", True)
            and facts_of(entry).get("round", 1) == round_number
            for entry in self.log
        )

    def start_over(self, *, forget: bool) -> None:
        """Let it be tried again, from nothing or with what it had saved of its work.

        A step that is kept is not tried again, unless its result is to be forgotten.
        """
        if self.completed is not None and not forget:
            return
        self.starts = self.failures = self.stops = self.open_attempt = 0
        self.log = []
        if forget:
            self.completed = self.last_failure = self.progress = None


@dataclass(slots=True)
class RunState:
    """A run, folded from its entries; ``seq`` is the last of them."""

    seq: int = 0
    created_at: int = 0
    updated_at: int = 0
    phase: str = "initializing"
    step: int = 0
    status: str = "pending"
    persona_states: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: Which entry last set what a persona shows.
    persona_seqs: dict[str, int] = field(default_factory=dict)
    retry_counts: dict[str, int] = field(default_factory=dict)
    artifacts: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    # Dictionaries, so that the ten-thousandth task costs what the first did.
    completed: dict[str, Entry | None] = field(default_factory=dict)
    pending: dict[str, None] = field(default_factory=dict)
    steps: dict[int, StepState] = field(default_factory=dict)
    last_step: int = 0
    by_identity: dict[bytes, StepState] = field(default_factory=dict)
    #: How many steps of each name are not finished.
    unfinished: dict[str, int] = field(default_factory=dict)
    #: How often each persona's steps were begun again.
    restarts: dict[str, int] = field(default_factory=dict)
    #: The step that each persona was last busy with.
    latest: dict[str, StepState] = field(default_factory=dict)
    memories: dict[str, Entry] = field(default_factory=dict)
    histories: dict[str, list[Entry]] = field(default_factory=dict)
    #: Tokens and money by persona.
    spent: dict[str, tuple[int, float]] = field(default_factory=dict)
    rounds: dict[bytes, list[Entry]] = field(default_factory=dict)
    escalated: dict[bytes, Entry] = field(default_factory=dict)
    #: How a workflow's run began, and how it ended; None where no workflow drives the run.
    started: Entry | None = None
    ended: Entry | None = None
    #: What the workflow waits for, or waited for, and how that ended; by identity.
    waits: dict[bytes, Entry] = field(default_factory=dict)
    answers: dict[bytes, Entry] = field(default_factory=dict)
    #: Those of the waits that somebody must answer, and nobody has yet.
    questions: dict[bytes, Entry] = field(default_factory=dict)
    children: dict[bytes, Entry] = field(default_factory=dict)
    #: The fencing number that the run's files had reached when this journal began.
    fence_floor: int = 0

    def fields(self) -> dict[str, Any]:
        """Return the fields that were set, by name, as new containers."""
        return {
            "phase": self.phase,
            "step": self.step,
            "status": self.status,
            "persona_states": {name: dict(state) for name, state in self.persona_states.items()},
            "retry_counts": dict(self.retry_counts),
            "completed_tasks": list(self.completed),
            "pending_tasks": list(self.pending),
            "artifacts": dict(self.artifacts),
            "metrics": dict(self.metrics),
        }

    def set_fields(self, fields: dict[str, Any]) -> None:
        """Replace fields by name; those of tomorrow are passed over."""
        for name, value in fields.items():
            if name not in FIELDS:
                continue
            wanted = type(FIELDS[name]())
            if not isinstance(value, wanted):
                given = type(value).__name__
                raise TypeError(f"state.{name} is a {given}, and must be a {wanted.__name__}")
            if name == "completed_tasks":
                self.completed = {task: self.completed.get(task) for task in value}
            elif name == "pending_tasks":
                self.pending = dict.fromkeys(value)
            elif name == "persona_states":
                self.persona_states = {persona: dict(state) for persona, state in value.items()}
            else:
                setattr(self, name, value)

    def add(self, entry: Entry, load: Callable[[Entry], bytes | None]) -> None:
        """Take one more entry into account; values are loaded only where they matter."""
        self.add_all((entry,), load)

    def add_all(self, entries: Sequence[Entry], load: Callable[[Entry], bytes | None]) -> None:
        """Take entries into account, in order: a long run's in one go, for there are many."""
        handlers = _HANDLERS
        entry = None
        try:
            for entry in entries:
                handler = handlers.get(entry[1])
                if handler is not None:
                    handler(self, entry)
                else:
                    _add_field_entry(self, entry, load)
        except MaestroError:
            raise  # some are a ValueError too, and say already what is wrong
        except KeyError as error:
            raise _not_ours(entry, f"speaks of {error}, which is not there") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise _not_ours(entry, f"is not one of ours: {error}") from error
        if entry is not None:
            self._note_times(entries, entry)

    def _note_times(self, entries: Sequence[Entry], last: Entry) -> None:
        self.seq = last.seq
        self.updated_at = last.at
        # A run restored from a copy began when the copied entries did.
        first = min(map(_AT, entries))
        if first < self.created_at or not self.created_at:
            self.created_at = first


_AT = attrgetter("at")


def _not_ours(entry: Entry | None, what: str) -> CorruptionError:
    return CorruptionError(f"entry {entry.seq if entry else '?'} of the run {what}")


def fold(entries: list[Entry], load: Callable[[Entry], bytes | None]) -> RunState:
    """Return what these entries add up to."""
    state = RunState()
    state.add_all(entries, load)
    return state


def _begun(state: RunState, entry: Entry) -> None:
    step = state.steps.get(entry.step)
    if step is None:
        step = _new_step(state, entry)
    else:
        state.restarts[step.persona] = state.restarts.get(step.persona, 0) + 1
        step.starts += 1
        step.open_attempt = step.last_attempt = entry.attempt
        step.seq = entry.seq
        step.log.append(entry)
    state.latest[step.persona] = step


def _new_step(state: RunState, entry: Entry) -> StepState:
    # By position: a long run has tens of thousands, and names would cost half as much again.
    seq, _, number, attempt, _, facts, _, _, _, identity = entry
    name, persona = _whose(facts) if facts else ("", "")
    step = state.steps[number] = StepState(
        number, identity, entry, name, persona, 1, 0, 0, attempt, attempt, seq, log=[entry]
    )
    state.last_step = max(state.last_step, number)
    state.unfinished[name] = state.unfinished.get(name, 0) + 1
    if identity is not None:
        state.by_identity[identity] = step
    return step


def _failed(state: RunState, entry: Entry) -> None:
    step = state.steps[entry.step]
    facts = facts_of(entry)
    if facts.get("counts", True):
        step.failures += 1
        step.last_failure = entry
    elif facts.get("status") != "interrupted":
        step.stops += 1
    step.open_attempt = 0
    step.seq = entry.seq
    step.log.append(entry)
    state.latest[step.persona] = step


def _kept(state: RunState, entry: Entry) -> None:
    step = state.steps[entry.step]
    if step.completed is None:
        state.unfinished[step.name] -= 1
    step.open_attempt = 0
    step.completed = entry
    step.seq = entry.seq
    state.latest[step.persona] = step


def _progressed(state: RunState, entry: Entry) -> None:
    step = state.steps[entry.step]
    step.progress = entry
    step.seq = entry.seq
    state.latest[step.persona] = step


def _remembered(state: RunState, entry: Entry) -> None:
    state.memories[_persona(entry)] = entry


def _went_on(state: RunState, entry: Entry) -> None:
    state.histories.setdefault(_persona(entry), []).append(entry)


def _spent(state: RunState, entry: Entry) -> None:
    facts = facts_of(entry)
    persona = _persona(entry)
    tokens, usd = state.spent.get(persona, (0, 0.0))
    more = facts.get("tokens", 0)
    state.spent[persona] = (tokens + more, usd + facts.get("usd", 0.0))
    step = state.steps.get(entry.step)
    if step is not None:
        step.tokens = step.tokens or {}
        step.tokens[entry.attempt] = step.tokens.get(entry.attempt, 0) + more
        step.seq = entry.seq


def _persona(entry: Entry) -> str:
    return str(facts_of(entry).get("persona", ""))


def _round_failed(state: RunState, entry: Entry) -> None:
    state.rounds.setdefault(_identity(entry), []).append(entry)


def _escalated(state: RunState, entry: Entry) -> None:
    state.escalated[_identity(entry)] = entry


def _identity(entry: Entry) -> bytes:
    if entry.identity is None:
        raise TypeError("it does not say of what it speaks")
    return entry.identity


def _retried(state: RunState, entry: Entry) -> None:
    forget = bool(facts_of(entry).get("forget"))
    if entry.identity is None:
        for step in state.steps.values():
            _start_over(state, step, entry, forget=forget)
        state.rounds.clear()
        state.escalated.clear()
        if state.ended is not None and facts_of(state.ended).get("status") != "success":
            state.ended = None
        _ask_anew(state)
        return
    if entry.identity in state.by_identity:
        _start_over(state, state.by_identity[entry.identity], entry, forget=forget)
    state.rounds.pop(entry.identity, None)
    state.escalated.pop(entry.identity, None)


def _start_over(state: RunState, step: StepState, entry: Entry, *, forget: bool) -> None:
    was_completed = step.completed is not None
    step.start_over(forget=forget)
    step.seq = entry.seq
    if was_completed and step.completed is None:
        state.unfinished[step.name] += 1


def _run_started(state: RunState, entry: Entry) -> None:
    state.started = entry


def _run_ended(state: RunState, entry: Entry) -> None:
    state.ended = entry


def _wait_started(state: RunState, entry: Entry) -> None:
    identity = _identity(entry)
    state.waits[identity] = entry
    state.answers.pop(identity, None)  # asked anew, since its answer does not fit any more
    if facts_of(entry).get("what") == "answer":
        state.questions[identity] = entry


def _wait_ended(state: RunState, entry: Entry) -> None:
    identity = _identity(entry)
    state.answers.setdefault(identity, entry)  # what came first is what the workflow was told
    state.questions.pop(identity, None)


def _ask_anew(state: RunState) -> None:
    """Let questions that nobody answered in time, or not yet, be asked again with all their time."""
    late = [
        identity for identity, entry in state.answers.items() if facts_of(entry)["how"] == "timeout"
    ]
    for identity in (*late, *state.questions):
        del state.waits[identity]
        state.answers.pop(identity, None)
    state.questions.clear()


def _child_started(state: RunState, entry: Entry) -> None:
    state.children[_identity(entry)] = entry


_HANDLERS: dict[int, Callable[[RunState, Entry], None]] = {
    EntryKind.ATTEMPT_STARTED: _begun,
    EntryKind.ATTEMPT_FAILED: _failed,
    EntryKind.STEP_COMPLETED: _kept,
    EntryKind.PROGRESS_SAVED: _progressed,
    EntryKind.MEMORY_SAVED: _remembered,
    EntryKind.HISTORY_APPENDED: _went_on,
    EntryKind.SPENT: _spent,
    EntryKind.ROUND_FAILED: _round_failed,
    EntryKind.ESCALATED: _escalated,
    EntryKind.RETRIED: _retried,
    EntryKind.RUN_STARTED: _run_started,
    EntryKind.RUN_ENDED: _run_ended,
    EntryKind.WAIT_STARTED: _wait_started,
    EntryKind.WAIT_ENDED: _wait_ended,
    EntryKind.CHILD_STARTED: _child_started,
}


def _add_field_entry(state: RunState, entry: Entry, load: Callable[[Entry], bytes | None]) -> None:
    facts = facts_of(entry)
    data = load(entry)
    value = codec.decode(data) if data is not None else None
    match entry.kind:
        case EntryKind.FIELDS_SET:
            state.set_fields(value or {})
            for persona in (value or {}).get("persona_states", {}):
                state.persona_seqs[persona] = entry.seq
        case EntryKind.TASK_PENDING:
            state.pending[facts["task"]] = None
        case EntryKind.TASK_COMPLETED:
            state.pending.pop(facts["task"], None)
            state.completed[facts["task"]] = entry
            state.artifacts.update(value or {})
        case EntryKind.RETRY_COUNTED:
            persona = facts["persona"]
            state.retry_counts[persona] = state.retry_counts.get(persona, 0) + 1
        case EntryKind.PERSONA_SET:
            state.persona_states.setdefault(facts["persona"], {}).update(value or {})
            state.persona_seqs[facts["persona"]] = entry.seq
        case EntryKind.RESTORED:
            kept = (state.seq, state.created_at, state.updated_at)
            floor = max(state.fence_floor, facts.get("fence", 0))
            state.__init__(*kept, fence_floor=floor)  # type: ignore[misc]
        case _:
            pass  # of tomorrow


# --- step_view ---


def status_of(step: StepState) -> str:
    """Return where a step stands, in the words of ``ExecutionStatus``."""
    if step.completed is not None:
        return "recovered" if was_healed(step) else "success"
    if step.open_attempt:
        return "running"
    last = step.log[-1] if step.log else step.last_failure
    if last is None:
        return "pending"
    return str(facts_of(last).get("status", "failed"))


def was_healed(step: StepState) -> bool:
    """Return whether something was mended between its attempts."""
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
