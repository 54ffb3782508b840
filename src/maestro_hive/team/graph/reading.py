"""From a document to the parts of a graph: every variant in use, with all problems at once.

What is read here is one part at a time; ``checks`` compares the parts with each other. A part that is
wrong is reported and left out, so that the rest is read as well.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from maestro_hive.team.graph.additions import Additions
from maestro_hive.team.graph.problems import quoted
from maestro_hive.team.graph.records import (
    Conflict,
    Files,
    Move,
    Step,
    Task,
    Verification,
    read_from,
)
from maestro_hive.team.graph.values import ID, ID_ADVICE, keys

if TYPE_CHECKING:
    from collections.abc import Iterable

    from maestro_hive.maestro.state.strict_json import Json
    from maestro_hive.team.graph.documents import Path
    from maestro_hive.team.graph.problems import Problems
    from maestro_hive.team.graph.records import Gate, Persona

#: More tasks than these are refused.
MAX_TASKS = 20_000
#: More dependencies than these, of all tasks together, are refused.
MAX_DEPENDENCIES = 400_000

_LEVEL_NUMBER = re.compile(r"[0-9]{1,6}", re.ASCII)
_MAX_LEVEL = 999_999
_LONGEST_MINUTES = 1e6
_ARROW = re.compile(r"\s*(?:->|→|=>)\s*")

#: Where keys belong that stand in a task or at the top of a graph by mistake.
_ELSEWHERE = {
    **dict.fromkeys(("max_attempts", "rounds", "max_handovers"), "it belongs into 'retry'"),
    **dict.fromkeys(("tokens", "usd"), "it belongs into 'budget'"),
    **dict.fromkeys(("agent", "model", "permissions"), "it belongs into 'persona'"),
    **dict.fromkeys(("gate", "gates"), "it belongs into a level, as 'gates' there, in 'levels'"),
}
_GRAPH_KEYS = keys(
    "feature tasks levels conflict_matrix persona personas budget retry timeout_seconds version"
    " generated total_tasks estimated_duration_minutes max_parallelization critical_path"
    " critical_path_minutes",
    _ELSEWHERE | {"workers": "the command says it: maestro run GRAPH --workers N"},
    timeout="timeout_seconds",
)
_TASK_KEYS = keys(
    "id title description level dependencies files files_owned files_read verification"
    " estimate_minutes status critical_path steps context acceptance_criteria consumers"
    " integration_test skills_required phase persona prompt budget retry timeout_seconds"
    " output_schema",
    _ELSEWHERE | {"expected": "it belongs into 'verification'"},
    **dict.fromkeys(("depends_on", "depends", "deps", "blocked_by", "requires"), "dependencies"),
    **dict.fromkeys(("estimated_minutes", "estimate", "minutes"), "estimate_minutes"),
    **dict.fromkeys(("name", "summary"), "title"),
    **dict.fromkeys(("verify", "check", "verify_command"), "verification"),
    timeout="timeout_seconds",
)
_FILES_KEYS = keys("create modify delete read move")
_VERIFICATION_KEYS = keys("command timeout_seconds expected", timeout="timeout_seconds")
_LEVEL_KEYS = keys(
    "level number name tasks parallel gates estimated_minutes depends_on_levels",
    estimate_minutes="estimated_minutes",
)
_NUMBERED = ("level", "number")


@dataclass(slots=True)
class LevelDraft:
    """A level as the document has it; it may lack almost everything."""

    at: Path
    number: int
    source: Json
    name: str | None = None
    tasks: tuple[str, ...] = ()
    parallel: bool = True
    gates: tuple[Gate, ...] = ()
    estimated_minutes: float | None = None
    depends_on_levels: tuple[int, ...] = ()


@dataclass(slots=True)
class TaskDraft:
    """A task as the document has it; its level may be derived later."""

    at: Path
    id: str
    level: int | None
    dependencies: tuple[str, ...]
    files: Files
    fields: dict[str, Any]
    source: Json


@dataclass(slots=True)
class Parts:
    """What a document has."""

    feature: str = ""
    tasks: list[TaskDraft] = field(default_factory=list)
    levels: list[LevelDraft] = field(default_factory=list)
    conflicts: list[tuple[Path, Conflict]] = field(default_factory=list)
    personas: list[Persona] = field(default_factory=list)
    #: Their names, and those of personas that were refused.
    persona_names: frozenset[str] = frozenset()
    fields: dict[str, Any] = field(default_factory=dict)


def read_parts(tree: Json, problems: Problems) -> Parts:
    """Return what a document has of a graph; what is wrong with its parts is in ``problems``."""
    if type(tree) is not dict:
        problems.wrong_type((), tree, "an object with 'feature' and 'tasks'")
        return Parts()
    return _Reader(problems).parts(tree)


class _Reader(Additions):
    """Reads values of the right type out of a document, and reports the others."""

    def __init__(self, problems: Problems) -> None:
        super().__init__(problems)
        self._dependencies = 0

    def parts(self, tree: dict[str, Json]) -> Parts:
        """Read the whole document."""
        parts = Parts()
        feature = self.text(tree, "feature", ())
        if not feature:
            if tree.get("feature") in (None, ""):
                self.missing((), "feature", "the graph", "what the tasks build")
        else:
            parts.feature = feature
        parts.personas = self.personas(tree)
        if type(named := tree.get("personas")) is dict:
            parts.persona_names = frozenset(named)
        parts.tasks = self.tasks(tree)
        parts.levels = self.levels(tree)
        parts.conflicts = self.conflicts(tree)
        parts.fields = {
            "persona": self.persona(tree, ()),
            "budget": self.budget(tree, ()),
            "retry": self.retry(tree, ()),
            "timeout_seconds": self.seconds(tree, ()),
        }
        self._check_count(tree, len(parts.tasks))
        self.judge_keys(tree, (), _GRAPH_KEYS)
        return parts

    def _check_count(self, tree: dict[str, Json], count: int) -> None:
        said = tree.get("total_tasks")
        if type(said) is int and said != count:
            self._problems.warning(
                "wrong-count",
                ("total_tasks",),
                f"it says {said:.0f} tasks, and there are {count}" if said < 1e9 else "it is huge",
                "correct it; nothing depends on it",
            )

    # --- tasks ---

    def tasks(self, tree: dict[str, Json]) -> list[TaskDraft]:
        """Read the tasks: a list, or a map by id."""
        value = tree.get("tasks")
        if not isinstance(value, list | dict):
            if value is None:
                self.missing((), "tasks", "the graph", "a list of objects with 'id' and 'title'")
            else:
                self._problems.wrong_type(("tasks",), value, "a list of tasks, or a map by id")
            return []
        if not value:
            self._problems.error(
                "no-tasks", ("tasks",), "the graph has no tasks", "add a task with 'id' and 'title'"
            )
        if len(value) > MAX_TASKS:
            self._problems.error(
                "too-many-tasks",
                ("tasks",),
                f"the graph has {len(value):,} tasks, and the limit is {MAX_TASKS:,}",
                "split it into several graphs",
            )
            return []
        items: Iterable[tuple[str | int, Json]]
        items = value.items() if isinstance(value, dict) else enumerate(value)
        drafts = [self.task(key, each) for key, each in items]
        self._problems.task = None
        return [each for each in drafts if each is not None]

    def task(self, key: str | int, value: Json) -> TaskDraft | None:
        """Read one task; the key of a map is its id."""
        at: Path = ("tasks", key)
        self._problems.task = None
        if type(value) is not dict:
            self._problems.wrong_type(at, value, "a task: an object with 'id' and 'title'")
            return None
        task_id = self._task_id(key, value, at)
        self._problems.task = task_id
        title = self.text(value, "title", at)
        if value.get("title") is None or (title is not None and not title.strip()):
            self.missing(at, "title", "the task", "what it does, in a few words")
        self.judge_keys(value, at, _TASK_KEYS)
        return TaskDraft(
            at=at,
            id=task_id or "",
            level=self.whole(value, "level", at, least=0, most=_MAX_LEVEL),
            dependencies=self._task_dependencies(value, at),
            files=self.files(value, at),
            fields=self._task_fields(value, at) | {"title": title or ""},
            source=value,
        )

    def _task_id(self, key: str | int, value: dict[str, Json], at: Path) -> str | None:
        given = value.get("id")
        if given is None and isinstance(key, str):
            given = key
        elif given is None or given == "":
            self.missing(at, "id", "the task", "a name for dependencies to refer to")
            return None
        elif type(given) is not str:
            self._problems.wrong_type((*at, "id"), given, "a text")
            return None
        if not ID.fullmatch(given):
            self._problems.error(
                "bad-id",
                (*at, "id") if "id" in value else at,
                f"{quoted(given)} is no id",
                ID_ADVICE,
            )
            return None
        if isinstance(key, str) and given != key:
            self._problems.error(
                "two-ids",
                (*at, "id"),
                f"the task is {quoted(key)} in the map, and its 'id' is {quoted(given)}",
                "give it one id",
                given,
            )
        return given

    def _task_dependencies(self, value: dict[str, Json], at: Path) -> tuple[str, ...]:
        found = self.texts(value, "dependencies", at)
        self._dependencies += len(found)
        if self._dependencies > MAX_DEPENDENCIES:
            if self._dependencies - len(found) <= MAX_DEPENDENCIES:
                self._problems.error(
                    "too-many-dependencies",
                    (*at, "dependencies"),
                    f"the tasks have more than {MAX_DEPENDENCIES:,} dependencies together",
                    "name only direct dependencies, or split the graph",
                )
            return ()
        return found

    def _task_fields(self, value: dict[str, Json], at: Path) -> dict[str, Any]:
        return {
            "description": self.text(value, "description", at) or "",
            "verification": self.verification(value, at),
            "estimate_minutes": self.number(value, "estimate_minutes", at, most=_LONGEST_MINUTES),
            "persona": self.persona(value, at),
            "prompt": self.text(value, "prompt", at),
            "timeout_seconds": self.seconds(value, at),
            "budget": self.budget(value, at),
            "retry": self.retry(value, at),
            "output_schema": self.output_schema(value, at),
            "steps": self.steps(value, at),
            "context": self.note(value, "context", at),
            "acceptance_criteria": self.notes(value, "acceptance_criteria", at),
            "consumers": self.notes(value, "consumers", at),
            "integration_test": self.note(value, "integration_test", at),
            "skills_required": self.notes(value, "skills_required", at),
            "phase": self.note(value, "phase", at),
            "status": self.note(value, "status", at),
        }

    def files(self, task: dict[str, Json], at: Path) -> Files:
        """Read the files of a task: an object, a plain list, or ``files_owned`` and ``files_read``."""
        value = task.get("files")
        if value is None and ("files_owned" in task or "files_read" in task):
            return read_from(
                Files(
                    modify=self.texts(task, "files_owned", at, paths=True),
                    read=self.texts(task, "files_read", at, paths=True),
                )
            )
        inside: Path = (*at, "files")
        if value is None:
            return Files()
        if type(value) is list:
            owned = self.text_items(value, inside, paths=True)
            return read_from(Files(modify=owned, source=value))
        if type(value) is not dict:
            self._problems.wrong_type(inside, value, "an object with 'create', 'modify', 'read'")
            return Files()
        self.judge_keys(value, inside, _FILES_KEYS)
        return read_from(
            Files(
                create=self.texts(value, "create", inside, paths=True),
                modify=self.texts(value, "modify", inside, paths=True),
                delete=self.texts(value, "delete", inside, paths=True),
                read=self.texts(value, "read", inside, paths=True),
                move=self._moves(value.get("move"), (*inside, "move")),
                source=value,
            )
        )

    def _moves(self, value: Json, at: Path) -> tuple[Move, ...]:
        if value is None:
            return ()
        items: list[tuple[str | int, Json]]
        if type(value) is dict:
            items = [(key, [key, each]) for key, each in value.items()]
        elif type(value) is list:
            items = list(enumerate(value))
        else:
            self._problems.wrong_type(at, value, 'a list of {"from": …, "to": …}')
            return ()
        return tuple(
            move for key, each in items if (move := self._move(each, (*at, key))) is not None
        )

    def _move(self, value: Json, at: Path) -> Move | None:
        match value:
            case {"from": str(before), "to": str(after)}:
                pair = [before, after]
            case {"source": str(before), "target": str(after)}:
                pair = [before, after]
            case [str(before), str(after)]:
                pair = [before, after]
            case str() if len(pair := _ARROW.split(value)) == 2:
                pass
            case _:
                self._problems.wrong_type(at, value, "an object with 'from' and 'to'")
                return None
        if not (self._is_path(pair[0], at) and self._is_path(pair[1], at)):
            return None
        return read_from(Move(source_path=pair[0], target_path=pair[1], source=value))

    def verification(self, task: dict[str, Json], at: Path) -> Verification | None:
        """Read how a task is verified: an object, or the command alone."""
        value = task.get("verification")
        inside: Path = (*at, "verification")
        if value is None:
            return None
        if type(value) is str:
            command = self.command(value, inside, "the verification")
            if command is None:
                return None
            return read_from(Verification(command=command, source=value))
        if type(value) is not dict:
            self._problems.wrong_type(inside, value, "an object with 'command', or a text")
            return None
        self.judge_keys(value, inside, _VERIFICATION_KEYS)
        if value.get("command") is None:
            self.missing(inside, "command", "the verification", "what decides that it is done")
            command = None
        else:
            command = self.command(value["command"], (*inside, "command"), "the verification")
        timeout = self.seconds(value, inside)
        expected = self.text(value, "expected", inside)
        if command is None:
            return None
        return read_from(
            Verification(
                command=command, timeout_seconds=timeout, expected=expected or None, source=value
            )
        )

    def steps(self, task: dict[str, Json], at: Path) -> tuple[Step, ...]:
        """Read the steps of a task."""
        value = task.get("steps")
        if value is None:
            return ()
        if type(value) is not list:
            self._problems.wrong_type((*at, "steps"), value, "a list of steps")
            return ()
        found = [self._step(each, (*at, "steps", number)) for number, each in enumerate(value)]
        return tuple(each for each in found if each is not None)

    def _step(self, value: Json, at: Path) -> Step | None:
        if type(value) is not dict:
            self._problems.wrong_type(at, value, "an object with 'step' and 'action'")
            return None
        number = self.whole(value, "step", at, least=0, most=_MAX_LEVEL)
        action = self.text(value, "action", at)
        for key in ("step", "action"):
            if value.get(key) is None:
                self.missing(at, key, "the step", "every step has one")
        if number is None or action is None:
            return None
        others = {
            key: self.note(value, key, at) for key in ("file", "code_snippet", "run", "verify")
        }
        return read_from(Step(step=number, action=action, source=value, **others))

    # --- levels and conflicts ---

    def levels(self, tree: dict[str, Json]) -> list[LevelDraft]:
        """Read the levels: a map by number, a list of levels, or a list of lists of ids."""
        value = tree.get("levels")
        if value is None:
            return []
        if type(value) is dict:
            found = [self._keyed_level(key, each) for key, each in value.items()]
        elif type(value) is list:
            first = 0 if _has_level_zero(tree) else 1
            found = [
                self.level(each, ("levels", number), number + first)
                for number, each in enumerate(value)
            ]
        else:
            self._problems.wrong_type(("levels",), value, "a map by level, or a list")
            return []
        drafts = [each for each in found if each is not None]
        seen: set[int] = set()
        for each in drafts:
            if each.number in seen:
                self._problems.error(
                    "duplicate-level", each.at, f"level {each.number} stands twice", "join the two"
                )
            seen.add(each.number)
        return sorted(drafts, key=lambda each: each.number)

    def _keyed_level(self, key: str, value: Json) -> LevelDraft | None:
        if not _LEVEL_NUMBER.fullmatch(key):
            self._problems.error(
                "bad-level",
                ("levels", key),
                f"{quoted(key)} is no level",
                'write its number, such as "1"',
            )
            return None
        return self.level(value, ("levels", key), int(key))

    def level(self, value: Json, at: Path, number: int) -> LevelDraft | None:
        """Read one level; a plain list has its tasks."""
        if type(value) is list:
            return LevelDraft(at, number, value, tasks=self.text_items(value, at))
        if type(value) is not dict:
            self._problems.wrong_type(at, value, "a level: an object with 'name' and 'tasks'")
            return None
        self.judge_keys(value, at, _LEVEL_KEYS)
        if isinstance(at[-1], int):
            said = [self.whole(value, key, at, least=0, most=_MAX_LEVEL) for key in _NUMBERED]
            number = next((each for each in said if each is not None), number)
        return LevelDraft(
            at,
            number,
            value,
            name=self.text(value, "name", at),
            tasks=self.texts(value, "tasks", at),
            parallel=self.flag(value, "parallel", at, default=True),
            gates=self.gates(value, at),
            estimated_minutes=self.number(value, "estimated_minutes", at, most=_LONGEST_MINUTES),
            depends_on_levels=self._level_numbers(value, at),
        )

    def _level_numbers(self, level: dict[str, Json], at: Path) -> tuple[int, ...]:
        value = level.get("depends_on_levels")
        if value is None:
            return ()
        if type(value) is list and all(type(each) is int for each in value):
            return tuple(value)
        self._ignored(at, "depends_on_levels", value, "a list of numbers")
        return ()

    def conflicts(self, tree: dict[str, Json]) -> list[tuple[Path, Conflict]]:
        """Read the conflict matrix: an object with ``conflicts``, or that list alone."""
        value = tree.get("conflict_matrix")
        at: Path = ("conflict_matrix",)
        if type(value) is dict and "conflicts" in value:
            value, at = value["conflicts"], (*at, "conflicts")
        if value is None:
            return []
        items: list[tuple[Path, Json]]
        if type(value) is dict:  # the tasks that each task is in conflict with
            items = [
                ((*at, key), [key, *each]) for key, each in value.items() if type(each) is list
            ]
        elif type(value) is list:
            items = [((*at, number), each) for number, each in enumerate(value)]
        else:
            self._problems.wrong_type(at, value, "a list of conflicts")
            return []
        return [
            (place, found)
            for place, each in items
            if (found := self._conflict(each, place)) is not None
        ]

    def _conflict(self, value: Json, at: Path) -> Conflict | None:
        tasks = value.get("tasks") if type(value) is dict else value
        if type(tasks) is not list or not all(type(each) is str for each in tasks):
            self._problems.warning(
                "unknown-conflict",
                at,
                "it is not known which tasks are in conflict",
                'write {"tasks": [id, id], "reason": …}',
            )
            return None
        reason = self.note(value, "reason", at) if type(value) is dict else None
        tasks = tuple(dict.fromkeys(tasks))
        return read_from(Conflict(tasks=tasks, reason=reason or "", source=value))


def _has_level_zero(tree: dict[str, Json]) -> bool:
    tasks = tree.get("tasks")
    values = tasks.values() if type(tasks) is dict else tasks if type(tasks) is list else ()
    return any(type(each) is dict and each.get("level") == 0 for each in values)


def task_of(draft: TaskDraft, index: int, level: int) -> Task:
    """Return the task of a draft that has no errors."""
    return read_from(
        Task(
            id=draft.id,
            level=level,
            index=index,
            dependencies=draft.dependencies,
            files=draft.files,
            source=draft.source,
            **draft.fields,
        )
    )
