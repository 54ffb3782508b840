"""The journal's entries: one frozen struct per kind, with its change of the state and its text.

An entry is one JSON object: kind, number, time, and values as their codec wrote them (``Raw``).
A kind that is an **outcome** reaches a workflow: it is synced, and delivered in the order of the
log. Adding a kind: write the struct; its check, schema, export and documentation follow.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Annotated, Any, ClassVar, Literal, Union

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from maestro_hive.journal.state import Outcome, RunState, StepState

Count = Annotated[int, Meta(ge=0, le=1 << 53)]
#: A time: microseconds since 1970, UTC.
Micros = Annotated[int, Meta(ge=0, le=253_402_300_799_999_999)]
#: A value or an error as its codec wrote it.
Value = Raw | UnsetType
EndStatus = Literal["success", "failed", "cancelled"]


def value_text(value: Value) -> bytes:
    """Return the JSON of a value; null for one that is not stored."""
    return b"null" if isinstance(value, UnsetType) else bytes(value)


def _tag(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Entry(
    Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False, tag_field="kind", tag=_tag
):
    """One entry; ``seq`` and ``at`` are set by the store when it is written."""

    seq: Count = 0
    at: Micros = 0

    #: Whether a workflow sees it.
    is_outcome: ClassVar[bool] = False
    #: Whether it is durable before its append returns; the last entry of an append decides.
    is_synced: ClassVar[bool] = False
    #: Its fields that are values.
    values: ClassVar[tuple[str, ...]] = ()
    #: Its fields for people: secrets in them are replaced before they are written.
    redacted: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.is_synced = cls.is_synced or cls.is_outcome
        own = (name for name, kind in cls.__annotations__.items() if kind == "Value")
        cls.values = (*cls.values, *own)

    @property
    def kind(self) -> str:
        """Return the name of its kind, as it is stored."""
        return str(self.__struct_config__.tag)

    def fold(self, run: RunState) -> None:
        """Change the state of the run; news for people changes nothing."""

    def text(self) -> str:
        """Return its line for people."""
        return self.kind.replace("_", " ")


class OfStep(Entry, frozen=True, kw_only=True):
    """Of an attempt at a step."""

    step: Count
    attempt: Count = 1


class OfCall(Entry, frozen=True, kw_only=True):
    """Of a durable call of the workflow, by its identity."""

    identity: str


# --- runs -----------------------------------------------------------------------------------------


class RunStarted(Entry, frozen=True, kw_only=True):
    """A run was accepted: started, enqueued, called by ``parent``, or forked from another run."""

    is_synced = True
    workflow: str
    input: Value = UNSET
    parent: str | None = None
    forked_from: str | None = None
    from_step: str | None = None
    #: The schedule, and its tick, that the run is for.
    schedule: str | None = None
    #: Turns after which a busy workflow loop is frozen: part of the history.
    turns: Count = 100

    def fold(self, run: RunState) -> None:
        """Begin the run."""
        run.started = self

    def text(self) -> str:
        """Return its line for people."""
        origin = f" as a fork of {self.forked_from}" if self.forked_from else ""
        return f"run of {self.workflow} started{origin}"


class RunEnded(Entry, frozen=True, kw_only=True):
    """The workflow returned, raised or was cancelled."""

    redacted = ("error", "reason")
    is_synced = True
    status: EndStatus
    result: Value = UNSET
    error: Value = UNSET
    #: Why it was cancelled.
    reason: str = ""
    #: The identities of the calls whose errors the workflow did not catch.
    failed: tuple[str, ...] = ()

    def fold(self, run: RunState) -> None:
        """End the run."""
        run.ended = self

    def text(self) -> str:
        """Return its line for people."""
        return f"run ended: {self.status}"


class RunSuspended(Entry, frozen=True, kw_only=True):
    """No process executes the run any more, although it has not ended."""

    redacted = ("message",)
    #: ``stopped`` by a person or a program, ``interrupted`` too often, or an ``error`` of ours.
    reason: Literal["stopped", "interrupted", "breaker", "budget", "person", "error"]
    message: str = ""
    until: Micros = 0

    def fold(self, run: RunState) -> None:
        """Remember why; the next life forgets it."""
        run.suspended = self

    def text(self) -> str:
        """Return its line for people."""
        return f"run suspended ({self.reason}): {self.message}"


class RunResumed(Entry, frozen=True, kw_only=True):
    """Another life of the run began, after a stop or the death of its process."""

    process: str = ""
    #: How many processes have died while they held the run.
    deaths: Count = 0
    #: How many of them in a row have died in the workflow's own code, without a result between.
    deaths_outside: Count = 0
    #: What the completed steps had spent, which is not spent again.
    saved_tokens: Count = 0
    saved_micros: Count = 0

    def fold(self, run: RunState) -> None:
        """Count the deaths that no step can be blamed for."""
        run.suspended, run.resumed_at = None, self.at
        run.deaths, run.deaths_outside = self.deaths, self.deaths_outside
        for step in run.steps.values():  # the attempt has ended with its process
            step.open_attempt = 0

    def text(self) -> str:
        """Return its line for people."""
        return f"run resumed by process {self.process}"


class Restored(Entry, frozen=True, kw_only=True):
    """The run continues from a copy: earlier entries no longer count, the copy's follow."""

    source: str
    saved_at: Micros = 0

    def fold(self, run: RunState) -> None:
        """Forget what was folded."""
        run.reset()

    def text(self) -> str:
        """Return its line for people."""
        return f"restored from {self.source}"


class CancelRequested(Entry, frozen=True, kw_only=True):
    """The run is cancelled: its workflow sees that now, and may clean up until ``until``."""

    redacted = ("reason",)
    is_outcome = True
    reason: str = ""
    until: Micros = 0

    def fold(self, run: RunState) -> None:
        """Deliver the cancellation."""
        run.cancel_requested = self
        run.signal(self)

    def text(self) -> str:
        """Return its line for people."""
        return f"cancellation requested: {self.reason}" if self.reason else "cancellation requested"


class Retried(Entry, frozen=True, kw_only=True):
    """A person requested a retry: of one step, or of all that failed."""

    redacted = ("feedback",)
    is_synced = True
    #: The identities of the calls whose outcomes no longer count.
    identities: tuple[str, ...] = ()
    name: str = ""
    feedback: str = ""
    by: str = ""

    def fold(self, run: RunState) -> None:
        """Forget these outcomes, and the end of the run."""
        run.retry(self)

    def text(self) -> str:
        """Return its line for people."""
        what = f"step {self.name}" if self.name else "what failed"
        return f"retry of {what} requested{f' by {self.by}' if self.by else ''}"


class Ticked(Entry, frozen=True, kw_only=True):
    """A workflow that is never quiet was given more turns."""

    is_outcome = True
    turns: Count

    def fold(self, run: RunState) -> None:
        """Deliver the turns."""
        run.signal(self)


# --- steps ----------------------------------------------------------------------------------------


class AttemptStarted(OfStep, frozen=True, kw_only=True):
    """An attempt at a step started; the first one carries the step's name and input."""

    redacted = ("input",)
    identity: str = ""
    name: str = ""
    persona: str = ""
    input: Value = UNSET
    #: The options that were given, as plain JSON.
    options: dict[str, Any] = {}

    def fold(self, run: RunState) -> None:
        """Count the start: without an end, it is an interruption."""
        step = run.steps.get(self.step)
        if step is None:  # read from the log: the executing process has it already
            step = run.add_step(StepState(self.step, self.identity))
        if self.name and not step.label:
            number = run.step_names[self.name] = run.step_names.get(self.name, 0) + 1
            step.label = self.name if number == 1 else f"{self.name}#{number}"
        step.starts += 1
        step.open_attempt = self.attempt

    def text(self) -> str:
        """Return its line for people."""
        return f"{self.name or f'step {self.step}'}, attempt {self.attempt} started"


class AttemptFailed(OfStep, frozen=True, kw_only=True):
    """An attempt ended without a result; ``retry_at`` is when the next one may start."""

    redacted = ("error", "feedback")
    is_synced = True
    status: Literal["failed", "timeout", "stopped"] = "failed"
    error: Value = UNSET
    category: str = ""
    #: The round of the next attempt.
    round: Count = 1
    #: 0: there is no next attempt.
    retry_at: Micros = 0
    fingerprint: str = ""
    #: What the next attempt is told about this one.
    feedback: str = ""

    def fold(self, run: RunState) -> None:
        """Count the failure, or the stop."""
        step = run.steps[self.step]
        step.open_attempt = 0
        if self.status == "stopped":
            step.stops += 1
        else:
            step.failed.append(self)

    def text(self) -> str:
        """Return its line for people."""
        return f"step {self.step}, attempt {self.attempt} {self.status}"


class StepCompleted(OfStep, frozen=True, kw_only=True):
    """A step has its result, and never runs again."""

    is_outcome = True
    result: Value = UNSET
    #: Whether its body ended after the workflow had cancelled it.
    despite: bool = False
    #: Who gave the result, of a step that was settled by a person.
    by: str = ""

    def fold(self, run: RunState) -> None:
        """Close the step."""
        run.close_step(run.steps[self.step], self)

    def text(self) -> str:
        """Return its line for people."""
        return f"step {self.step}, attempt {self.attempt} completed"


class StepClosed(OfCall, frozen=True, kw_only=True):
    """A step ended without a result."""

    redacted = ("error",)
    is_outcome = True
    how: Literal["failed", "cancelled", "skipped"]
    error: Value = UNSET
    despite: bool = False
    by: str = ""

    def fold(self, run: RunState) -> None:
        """Close the step."""
        run.close_step(run.by_identity.get(self.identity) or StepState(0, self.identity), self)

    def text(self) -> str:
        """Return its line for people."""
        return f"step {self.how}"


class ProgressSaved(OfStep, frozen=True, kw_only=True):
    """A step saved its progress for its next attempt."""

    is_synced = True
    progress: Value = UNSET

    def fold(self, run: RunState) -> None:
        """Keep the latest."""
        if (step := run.steps.get(self.step)) is not None:
            step.progress = self


class Spent(OfStep, frozen=True, kw_only=True):
    """Tokens or money were spent; money in millionths of a US dollar."""

    is_synced = True
    persona: str = ""
    model: str = ""
    tokens: Count = 0
    cached: Count = 0
    micros: Count = 0

    def fold(self, run: RunState) -> None:
        """Add it to what the run has spent."""
        run.tokens += self.tokens
        run.micros += self.micros
        if (step := run.steps.get(self.step)) is not None:
            step.tokens += self.tokens
            step.micros += self.micros

    def text(self) -> str:
        """Return its line for people."""
        return f"step {self.step} spent {self.tokens:,} tokens, ${self.micros / 1e6:.4f}"


class Repair(OfStep, frozen=True, kw_only=True):
    """A healer proposed a repair of a failure, or a repair was judged (``verdict``)."""

    redacted = ("fix", "feedback", "reason")
    fingerprint: str
    status: str = ""
    verdict: Literal["", "worked", "failed", "undecided", "interrupted"] = ""
    failure_type: str = ""
    healer: str = ""
    fix: str = ""
    feedback: str = ""
    files: tuple[str, ...] = ()
    reason: str = ""

    def text(self) -> str:
        """Return its line for people."""
        found = self.verdict or self.status
        return f"step {self.step}, attempt {self.attempt}: repair by {self.healer} {found}"


# --- other calls of a workflow --------------------------------------------------------------------


class TimerFired(OfCall, frozen=True, kw_only=True):
    """A timer fired; it has no entry when it is set or cancelled."""

    is_outcome = True
    #: Whether it cancels a block of the workflow, as ``asyncio.timeout`` does.
    is_timeout: bool = False

    def fold(self, run: RunState) -> None:
        """Deliver it; that time has passed is no result."""
        deaths = run.deaths_outside
        run.close(self.identity, self)
        run.deaths_outside = deaths


class ThreadEnded(OfCall, frozen=True, kw_only=True):
    """A call outside of the workflow's loop ended: it is executed again in each life."""

    is_outcome = True

    def fold(self, run: RunState) -> None:
        """Deliver it."""
        run.close(self.identity, self)


class WaitStarted(OfCall, frozen=True, kw_only=True):
    """The run waits for a person or another program."""

    is_synced = True
    name: str
    what: Literal["question", "escalation", "ambiguous", "approval"] = "question"
    about: Value = UNSET
    #: JSON Schema of the answer, as text; empty: any answer.
    type: str = ""
    until: Micros = 0
    step: Count = 0

    def fold(self, run: RunState) -> None:
        """Open the question."""
        run.questions[self.identity] = self

    def text(self) -> str:
        """Return its line for people."""
        return f"waits for an answer to {self.name} ({self.what})"


class WaitEnded(OfCall, frozen=True, kw_only=True):
    """A question has its answer."""

    is_outcome = True
    answer: Value = UNSET
    by: str = ""

    def fold(self, run: RunState) -> None:
        """Close the question, and deliver the answer."""
        run.questions.pop(self.identity, None)
        run.close(self.identity, self)

    def text(self) -> str:
        """Return its line for people."""
        return f"answered{f' by {self.by}' if self.by else ''}"


class WaitWithdrawn(OfCall, frozen=True, kw_only=True):
    """The workflow does not wait for this answer any more: a timeout, or a cancellation."""

    def fold(self, run: RunState) -> None:
        """Close the question; nothing is delivered."""
        run.questions.pop(self.identity, None)

    def text(self) -> str:
        """Return its line for people."""
        return "the question is withdrawn"


class AnswerDropped(OfCall, frozen=True, kw_only=True):
    """An answer was not taken: its question is gone, or it came early and does not fit."""

    name: str
    by: str = ""
    reason: str = ""

    def text(self) -> str:
        """Return its line for people."""
        by = f" by {self.by}" if self.by else ""
        return f"the answer to {self.name}{by} was not taken: {self.reason}"


class ChildStarted(OfCall, frozen=True, kw_only=True):
    """The workflow called, or enqueued, another run."""

    run_id: str
    workflow: str
    #: Whether workers execute it.
    is_enqueued: bool = False

    def fold(self, run: RunState) -> None:
        """Remember the child until it ends."""
        run.children[self.identity] = self

    def text(self) -> str:
        """Return its line for people."""
        return f"child {self.run_id} started"


class ChildEnded(OfCall, frozen=True, kw_only=True):
    """A child has ended."""

    redacted = ("error",)
    is_outcome = True
    status: EndStatus
    result: Value = UNSET
    error: Value = UNSET
    despite: bool = False

    def fold(self, run: RunState) -> None:
        """Forget the child, and deliver its end."""
        run.children.pop(self.identity, None)
        run.close(self.identity, self)

    def text(self) -> str:
        """Return its line for people."""
        return f"child ended: {self.status}"


class CallMoved(OfCall, frozen=True, kw_only=True):
    """In changed code, a call took the outcome that was recorded at another place."""

    is_outcome = True
    origin: str

    def fold(self, run: RunState) -> None:
        """Deliver the outcome here: from now on it is this call's own."""
        found = run.outcomes.pop(self.origin, None)
        if found is not None:
            run.latest = Outcome(self.seq, self.at, self.identity, found.entry)
            run.outcomes[self.identity] = run.latest

    def text(self) -> str:
        """Return its line for people."""
        return f"{self.identity} took the outcome of {self.origin}"


# --- what is stored with a run --------------------------------------------------------------------


class PersonaSaved(Entry, frozen=True, kw_only=True):
    """A persona's memory or state was replaced, its history got an item, or a retry was counted."""

    is_synced = True
    persona: str
    what: Literal["memory", "history", "state", "retry"]
    value: Value = UNSET

    def fold(self, run: RunState) -> None:
        """Keep it."""
        run.persona(self.persona).save(self)

    def text(self) -> str:
        """Return its line for people."""
        return f"{self.what} of {self.persona} saved"


class FieldsSet(Entry, frozen=True, kw_only=True):
    """Fields of the run were set by name, such as its phase; null removes one."""

    is_synced = True
    fields: dict[str, Raw]

    def fold(self, run: RunState) -> None:
        """Keep the latest of each."""
        run.fields.update(self.fields)

    def text(self) -> str:
        """Return its line for people."""
        return f"set: {', '.join(self.fields)}"


class TaskSet(Entry, frozen=True, kw_only=True):
    """A task was marked by hand."""

    is_synced = True
    task: str
    status: Literal["pending", "completed"]
    artifacts: Value = UNSET

    def fold(self, run: RunState) -> None:
        """Keep the latest of each task, in the order in which they were marked."""
        run.tasks.pop(self.task, None)
        run.tasks[self.task] = self

    def text(self) -> str:
        """Return its line for people."""
        return f"task {self.task} {self.status}"


# --- news for people ------------------------------------------------------------------------------


class EscalationDelivered(OfCall, frozen=True, kw_only=True):
    """A person was informed about an escalation, by a ticket or a comment on it."""

    redacted = ("comment",)
    system: str
    ticket: str = ""
    address: str = ""
    comment: str = ""

    def text(self) -> str:
        """Return its line for people."""
        return f"delivered to {self.system}: {self.ticket or self.comment}"


class BudgetWarned(OfStep, frozen=True, kw_only=True):
    """An attempt used up a part of a budget, for the first time."""

    account: str
    percent: Count
    used: Count
    most: Count

    def text(self) -> str:
        """Return its line for people."""
        return f"{self.percent} % of {self.account} is used"


class ReplayDiffered(Entry, frozen=True, kw_only=True):
    """A resumed workflow did not make recorded calls again, or made others between them."""

    missing: tuple[str, ...] = ()
    new: tuple[str, ...] = ()

    def text(self) -> str:
        """Return its line for people."""
        shown = {"recorded and not called again": self.missing}
        shown["new among recorded calls"] = self.new
        parts = [f"{what}: {_counted(names)}" for what, names in shown.items() if names]
        return f"the resumed workflow went another way; {'; '.join(parts)}"


def _counted(names: tuple[str, ...]) -> str:
    counts = Counter(names).items()
    return ", ".join(f"{name} ({times} times)" if times > 1 else name for name, times in counts)


class ArgumentsAdded(Entry, frozen=True, kw_only=True):
    """A step has arguments with defaults that it did not have when its results were recorded."""

    name: str
    arguments: tuple[str, ...]
    persona: str = ""

    def text(self) -> str:
        """Return its line for people."""
        return f"{self.name} has new arguments: {', '.join(self.arguments)}"


# --- all of them ----------------------------------------------------------------------------------


def _leaves(cls: type[Entry]) -> list[type[Entry]]:
    below = [leaf for sub in cls.__subclasses__() for leaf in _leaves(sub)]
    return below if cls.__subclasses__() else [cls]


KINDS: dict[str, type[Entry]] = {str(kind.__struct_config__.tag): kind for kind in _leaves(Entry)}
AnyEntry = Union[tuple(KINDS.values())]  # type: ignore[valid-type]  # noqa: UP007 - made at runtime

encode = msgspec.json.Encoder().encode
decode: Any = msgspec.json.Decoder(AnyEntry).decode
replace = msgspec.structs.replace


def schema() -> dict[str, Any]:
    """Return the JSON Schema of all kinds."""
    return msgspec.json.schema(AnyEntry, schema_hook=lambda _: {})
