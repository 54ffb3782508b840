"""What a task graph is made of: frozen records, each with the part of the document it was read from.

A graph is not changed: ``dataclasses.replace`` makes another one. ``to_document`` writes the
document again. What was not replaced is written as it was read, in its own shape, with the keys that
nobody declared and in their order; what was replaced is written in the shape of the published format.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from maestro_hive.maestro.state.strict_json import copied

if TYPE_CHECKING:
    from collections.abc import Iterable

    from maestro_hive.maestro.state.strict_json import Json
    from maestro_hive.team.graph.documents import Form

#: The agents that a persona may name.
AGENTS = ("claude", "codex", "gemini", "opencode", "qwen", "aider")
#: What a persona may let its agent do: what its own settings say, change files, or everything.
PERMISSIONS = ("own", "edit", "all")


class TaskState(Enum):
    """What is known of a task, for the decision what may start."""

    #: It has not started.
    PENDING = "pending"
    #: A worker executes it.
    RUNNING = "running"
    #: Its verification has passed.
    COMPLETE = "complete"
    #: It has failed for good.
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A part of a graph, and the part of the document it was read from."""

    #: What it was read from; None if a program made it.
    source: Json = field(default=None, compare=False, repr=False)
    #: The record as it was read, to find what was replaced since.
    as_read: Any = field(default=None, compare=False, repr=False)

    #: The members of a document that are read into fields under another name.
    other_keys: ClassVar[frozenset[str]] = frozenset()

    @property
    def extra(self) -> dict[str, Json]:
        """Return the members of the document that no field holds."""
        if type(self.source) is not dict:
            return {}
        known = {each.name for each in fields(self) if each.compare} | self.other_keys
        return {key: copied(value) for key, value in self.source.items() if key not in known}

    @property
    def is_as_read(self) -> bool:
        """Whether it is what was read from ``source``, with nothing replaced."""
        return self is self.as_read

    def to_document(self) -> Json:
        """Return the record as JSON values: as it was read, but for what was replaced."""
        if self.source is None or self.as_read is None:
            return self._canonical()
        if self.is_as_read:
            return copied(self.source)
        if type(self.source) is not dict:  # a short form, such as a command instead of an object
            return copied(self.source) if self == self.as_read else self._canonical()
        document = copied(self.source)
        for each in fields(self):
            value = getattr(self, each.name)
            if each.compare and value != getattr(self.as_read, each.name):
                self._replace(document, each.name, value)
        return document

    def _replace(self, document: dict[str, Json], name: str, value: object) -> None:
        written = plain(value)
        if written is None:
            document.pop(name, None)
        else:
            document[name] = written

    def _canonical(self) -> Json:
        members = {
            each.name: plain(getattr(self, each.name)) for each in fields(self) if each.compare
        }
        return {name: value for name, value in members.items() if value not in (None, [], {})}


RecordT = TypeVar("RecordT", bound=Record)


def read_from(record: RecordT) -> RecordT:
    """Return a record that remembers that it is as it was read."""
    object.__setattr__(record, "as_read", record)
    return record


def plain(value: object) -> Json:
    """Return a field as JSON values."""
    if isinstance(value, Record):
        return value.to_document()
    if isinstance(value, tuple):
        return [plain(each) for each in value]
    return value


# --- parts of a task ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Move(Record):
    """A file that a task gives another name."""

    #: The path before and after.
    source_path: str
    target_path: str

    def _canonical(self) -> Json:
        return {"from": self.source_path, "to": self.target_path}


@dataclass(frozen=True, slots=True, kw_only=True)
class Files(Record):
    """The files of a task; those it writes in any way are its own while it is executed."""

    create: tuple[str, ...] = ()
    modify: tuple[str, ...] = ()
    delete: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    move: tuple[Move, ...] = ()

    @property
    def owned(self) -> tuple[str, ...]:
        """Return every path that the task may write, each once, in the order of the document."""
        every = [*self.create, *self.modify, *self.delete]
        for each in self.move:
            every += (each.source_path, each.target_path)
        return tuple(dict.fromkeys(every))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification(Record):
    """The command that decides whether a task is done: it is when the exit code is 0.

    If a text is expected, the output has to contain it, too.
    """

    #: It is executed by a shell: two thirds of those in use have ``&&``, ``|`` or ``;``.
    command: str
    timeout_seconds: float | None = None
    #: A text that the output has to contain.
    expected: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Record):
    """One of the steps that a task suggests to its persona."""

    step: int
    action: str
    file: str | None = None
    code_snippet: str | None = None
    run: str | None = None
    verify: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget(Record):
    """What may be spent: tokens, money in USD, or both."""

    tokens: int | None = None
    usd: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry(Record):
    """How often something is tried; None where the configuration decides."""

    #: How many attempts a task has, in all its rounds together.
    max_attempts: int | None = None
    #: Into how many rounds they are divided.
    rounds: int | None = None
    #: How often a fresh worker may go on from the progress of one whose context is full.
    max_handovers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Persona(Record):
    """Who does the work: a command, a Python callable, or an agent; exactly one of the three."""

    name: str
    #: The arguments of a command, ``{prompt}`` among them; no shell sees them.
    command: tuple[str, ...] | None = None
    #: A function, as ``package.module:name``.
    python: str | None = None
    #: One of ``AGENTS``.
    agent: str | None = None
    model: str | None = None
    #: Further arguments for an agent.
    args: tuple[str, ...] = ()
    #: What an agent may do without being asked, one of ``PERMISSIONS``; None: what its settings say.
    permissions: str | None = None
    timeout_seconds: float | None = None
    budget: Budget | None = None
    retry: Retry | None = None


# --- tasks, levels and the graph ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(Record):
    """One task: what shall be done, after which others, with which files, and how it is verified."""

    id: str
    title: str
    level: int
    description: str = ""
    dependencies: tuple[str, ...] = ()
    files: Files = field(default_factory=Files)
    verification: Verification | None = None
    estimate_minutes: float | None = None
    #: The name of a persona of the graph, an agent's name, or a persona of its own.
    persona: str | Persona | None = None
    #: What the persona is told instead of title, description and context.
    prompt: str | None = None
    timeout_seconds: float | None = None
    budget: Budget | None = None
    retry: Retry | None = None
    #: The JSON Schema of its result.
    output_schema: dict[str, Json] | None = field(default=None, hash=False)
    steps: tuple[Step, ...] = ()
    context: str | None = None
    acceptance_criteria: tuple[str, ...] = ()
    consumers: tuple[str, ...] = ()
    integration_test: str | None = None
    skills_required: tuple[str, ...] = ()
    phase: str | None = None
    #: What the document says; a run has its own record of it.
    status: str | None = None
    #: Its place in the document: what is equal otherwise is done in this order.
    index: int = field(default=0, compare=False)

    other_keys = frozenset({"files_owned", "files_read", "critical_path"})

    def _replace(self, document: dict[str, Json], name: str, value: object) -> None:
        if name == "files":
            document.pop("files_owned", None)
            document.pop("files_read", None)
        Record._replace(self, document, name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate(Record):
    """A command that runs when a level is complete."""

    name: str
    #: It is executed by a shell.
    command: str
    #: Whether nothing of a later level starts before it has passed.
    required: bool = True
    timeout_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Level(Record):
    """A level of a graph: its tasks in the order of the document, and its gates."""

    number: int
    name: str
    tasks: tuple[str, ...] = ()
    #: Whether its tasks may run at the same time.
    parallel: bool = True
    gates: tuple[Gate, ...] = ()
    estimated_minutes: float | None = None
    #: What the document says. A run waits for dependencies and gates only.
    depends_on_levels: tuple[int, ...] = ()

    @property
    def is_gated(self) -> bool:
        """Return whether later levels wait for a gate of this one."""
        return any(gate.required for gate in self.gates)

    def _canonical(self) -> Json:
        members = Record._canonical(self)  # noqa: SLF001 - a slotted class has no super()
        del members["number"]
        return members


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict(Record):
    """Tasks of which no two may run at the same time; they run in the order of the document.

    Of a folder that is owned by some of them it is each of these with all others.
    """

    tasks: tuple[str, ...]
    reason: str = ""
    #: The path that all of them own, or own parts of, if that is why.
    path: str | None = None


class Origin(NamedTuple):
    """What a graph was read from: messages name its file, and have its syntax."""

    form: Form
    #: The file, as it was given; None if the document is no file.
    file: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph(Record):
    """A task graph that was read and checked."""

    feature: str
    tasks: tuple[Task, ...]
    #: In ascending order; those that the document lacks are made from the levels of the tasks.
    levels: tuple[Level, ...] = ()
    #: The conflicts that the document declares.
    conflicts: tuple[Conflict, ...] = ()
    personas: tuple[Persona, ...] = ()
    #: The persona of tasks that name none.
    persona: str | Persona | None = None
    budget: Budget | None = None
    retry: Retry | None = None
    timeout_seconds: float | None = None
    #: None if a program made it, or a journal has it.
    origin: Origin | None = field(default=None, compare=False, repr=False)

    other_keys = frozenset(
        {
            *("version", "generated", "total_tasks", "estimated_duration_minutes"),
            *("max_parallelization", "critical_path", "critical_path_minutes", "conflict_matrix"),
        }
    )

    def persona_of(self, task: Task) -> Persona | None:
        """Return who executes a task: its own persona, the graph's, or None."""
        chosen = task.persona if task.persona is not None else self.persona
        if not isinstance(chosen, str):
            return chosen
        named = {each.name: each for each in self.personas}
        return named.get(chosen) or Persona(name=chosen, agent=chosen)

    def _replace(self, document: dict[str, Json], name: str, value: object) -> None:
        match name:
            case "tasks":
                document[name] = _collected(document.get(name), self.tasks, lambda task: task.id)
            case "levels":
                document[name] = _collected(
                    document.get(name, {}), self.levels, lambda level: str(level.number)
                )
            case "personas":
                document[name] = {each.name: each.to_document() for each in self.personas}
            case "conflicts":
                document["conflict_matrix"] = {"conflicts": plain(value)}
            case _:
                Record._replace(self, document, name, value)

    def _canonical(self) -> Json:
        document: dict[str, Json] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.compare and value is not None and value != ():
                self._replace(document, each.name, value)
        return document


def _collected(before: Json, records: Iterable[Any], key: Any) -> Json:
    """Return records in the container that the document had for them: a map, or a list."""
    if isinstance(before, dict):
        return {key(each): each.to_document() for each in records}
    return [each.to_document() for each in records]


# --- problems -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that is wrong with a graph, where, and what to do about it."""

    #: The kind, for programs: ``unknown-dependency``.
    code: str
    message: str
    #: What to do.
    advice: str
    #: Where, as JSON path: ``$.tasks[3].dependencies[0]``.
    path: str
    task: str | None = None
    #: The line of the document, where it is known.
    line: int | None = None

    def __str__(self) -> str:
        line = f"line {self.line}, " if self.line is not None else ""
        task = f" (task {self.task})" if self.task else ""
        return f"{line}{self.path}{task}: {self.message}; {self.advice}"
