"""Whether the parts of a graph fit together: ids, dependencies, levels, gates, files and personas."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from maestro_hive.kernel.errors import MaestroError
from maestro_hive.team.graph.documents import Document, UnreadableError, parse_document
from maestro_hive.team.graph.planning import Plan, make_plan, owned_path, sorted_tasks
from maestro_hive.team.graph.problems import Problems, advised, quoted
from maestro_hive.team.graph.reading import read_parts, task_of
from maestro_hive.team.graph.records import (
    AGENTS,
    Graph,
    Level,
    Origin,
    Persona,
    Problem,
    read_from,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from maestro_hive.team.graph.documents import Form, Path
    from maestro_hive.team.graph.reading import LevelDraft, Parts, TaskDraft

#: How many ids a message names.
_NAMED = 12
#: With more ids, multiplied by what was found so far, an unknown id is not compared: it takes long.
_COMPARED = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What was found out about a document; graph and plan are there if it has no errors."""

    graph: Graph | None
    plan: Plan | None
    errors: tuple[Problem, ...]
    warnings: tuple[Problem, ...]
    #: How many there are besides those that are listed.
    more_errors: int = 0
    more_warnings: int = 0


class GraphError(MaestroError, ValueError):
    """A task graph has errors; ``problems`` lists all of them."""

    def __init__(self, name: str, problems: Sequence[Problem], more: int = 0) -> None:
        count = len(problems) + more
        found = "\n".join(f"  {each}" for each in problems)
        rest = f"\n  and {more:,} more" if more else ""
        super().__init__(
            f"{name} is no valid task graph: {count:,} {'error' if count == 1 else 'errors'}"
            f"\n{found}{rest}"
        )
        self.name = name
        self.problems = tuple(problems)


def check_graph(data: bytes, form: Form | None = None, *, strict: bool = False) -> Checked:
    """Return the graph of a document, or everything that is wrong with it.

    ``strict`` makes errors of tasks that own the same file. ``team.graph_files`` checks what needs more
    than the document: the published schema, to which it holds a strict graph as well, the schemas of
    results, and whether the shell can read verifications and gates.
    """
    try:
        document = parse_document(data, form)
    except UnreadableError as error:
        problem = Problem(
            code="unreadable", message=error.reason, advice=error.advice, path="$", line=error.line
        )
        return Checked(graph=None, plan=None, errors=(problem,), warnings=())
    return check_document(document, strict=strict)


def check_document(document: Document, *, strict: bool = False) -> Checked:
    """Return the graph of a document that was parsed, or everything that is wrong with it."""
    problems = Problems(document)
    parts = read_parts(document.tree, problems)
    numbers = _numbers(parts.tasks, problems)
    dependencies = _dependencies(parts.tasks, numbers, problems)
    order, in_cycles = sorted_tasks(dependencies)
    _report_cycles(parts.tasks, dependencies, in_cycles, problems)
    levels = _task_levels(parts, numbers, dependencies, order, problems)
    _check_levels(parts, levels, dependencies, order, problems)
    _check_gates(parts, levels, problems)
    _check_names(parts, numbers, problems)
    _check_personas(parts, problems)
    _check_files(parts.tasks, problems, strict=strict)
    graph = plan = None
    if not in_cycles and len(numbers) == len(parts.tasks):
        for task in parts.tasks if problems.errors else ():
            task.dependencies = tuple({each: 0 for each in task.dependencies if each in numbers})
        graph = _graph(parts, levels, document)
        plan = make_plan(graph)
        _report_conflicts(plan, parts, numbers, problems, strict=strict)
    failed = bool(problems.errors)
    return Checked(
        graph=None if failed else graph,
        plan=None if failed else plan,
        errors=tuple(problems.errors),
        warnings=tuple(problems.warnings),
        more_errors=problems.more_errors,
        more_warnings=problems.more_warnings,
    )


def _graph(parts: Parts, levels: Sequence[int], document: Document) -> Graph:
    tasks = tuple(
        task_of(draft, at, level)
        for at, (draft, level) in enumerate(zip(parts.tasks, levels, strict=True))
    )
    members: dict[int, list[str]] = {level.number: [] for level in parts.levels}
    for task in tasks:
        members.setdefault(task.level, []).append(task.id)
    drafts = {level.number: level for level in parts.levels}
    return read_from(
        Graph(
            feature=parts.feature,
            tasks=tasks,
            levels=tuple(
                _level(number, members[number], drafts.get(number)) for number in sorted(members)
            ),
            conflicts=tuple(conflict for _, conflict in parts.conflicts),
            personas=tuple(parts.personas),
            source=document.tree,
            origin=Origin(document.form, document.file),
            **parts.fields,
        )
    )


def _level(number: int, tasks: list[str], draft: LevelDraft | None) -> Level:
    if draft is None:
        return Level(number=number, name=f"level {number}", tasks=tuple(tasks))
    return read_from(
        Level(
            number=number,
            name=draft.name or f"level {number}",
            tasks=tuple(tasks),
            parallel=draft.parallel,
            gates=draft.gates,
            estimated_minutes=draft.estimated_minutes,
            depends_on_levels=draft.depends_on_levels,
            source=draft.source,
        )
    )


# --- ids and dependencies -------------------------------------------------------------------------


def _numbers(tasks: Sequence[TaskDraft], problems: Problems) -> dict[str, int]:
    """Return the number of each task by its id; report ids that stand twice."""
    numbers: dict[str, int] = {}
    folded: dict[str, str] = {}
    for at, task in enumerate(tasks):
        if not task.id:
            continue
        if task.id in numbers:
            problems.error(
                "duplicate-id",
                (*task.at, "id"),
                f"the id {task.id} stands twice",
                "give one of the two tasks another id, and check which one dependencies mean",
                task.id,
            )
            continue
        other = folded.setdefault(task.id.lower(), task.id)
        if other != task.id:
            problems.warning(
                "similar-id",
                (*task.at, "id"),
                f"the ids {other} and {task.id} differ only in case",
                "give one of the two tasks another id: some file systems take them for one",
                task.id,
            )
        numbers[task.id] = at
    return numbers


def _dependencies(
    tasks: Sequence[TaskDraft], numbers: dict[str, int], problems: Problems
) -> tuple[tuple[int, ...], ...]:
    found = []
    for at, task in enumerate(tasks):
        own: dict[int, None] = {}
        for position, each in enumerate(task.dependencies):
            if each in numbers:
                own[numbers[each]] = None
            elif problems.is_full:
                problems.more_errors += 1
            else:
                problems.error(
                    "unknown-dependency",
                    (*task.at, "dependencies", position),
                    f"there is no task {quoted(each)}",
                    _task_advice(each, numbers, problems),
                    task.id or None,
                )
        if at in own:
            problems.error(
                "cycle",
                (*task.at, "dependencies"),
                f"{task.id} depends on itself",
                "remove that dependency",
                task.id,
            )
            del own[at]
        found.append(tuple(own))
    return tuple(found)


def _task_advice(name: str, numbers: dict[str, int], problems: Problems) -> str:
    """Return what to do about an id of no task; for the first ones, which id may be meant."""
    found = 1 + len(problems.errors) + len(problems.warnings)
    known = numbers if found * len(numbers) <= _COMPARED else ()
    return advised(name, known, "remove it, or write the id of a task")


def _report_cycles(
    tasks: Sequence[TaskDraft],
    dependencies: tuple[tuple[int, ...], ...],
    suspects: list[int],
    problems: Problems,
) -> None:
    """Report a shortest cycle of each set of tasks that depend on each other."""
    for members in _components(dependencies, suspects):
        cycle = _cycle(dependencies, members)
        ids = [tasks[at].id for at in cycle]
        shown = ids if len(ids) <= _NAMED else [*ids[: _NAMED - 1], "…", ids[-1]]
        also = len(members) - len(cycle)
        problems.error(
            "cycle",
            (*tasks[cycle[0]].at, "dependencies"),
            f"the tasks {' → '.join([*shown, ids[0]])} depend on each other in a circle"
            + (f", and so do {also} more" if also else ""),
            "remove one of these dependencies",
            ids[0],
        )


def _components(
    dependencies: tuple[tuple[int, ...], ...], suspects: list[int]
) -> Iterator[set[int]]:
    """Yield the sets of tasks that all depend on each other (Kosaraju's algorithm)."""
    inside = set(suspects)
    needs = {at: [each for each in dependencies[at] if each in inside] for at in suspects}
    needed_by: dict[int, list[int]] = {at: [] for at in suspects}
    for at, wanted in needs.items():
        for each in wanted:
            needed_by[each].append(at)
    seen: set[int] = set()
    for root in reversed(_finished(needs)):
        members = {root} - seen
        reached = list(members)
        while reached:
            found = set(needed_by[reached.pop()]) - seen - members
            members |= found
            reached += found
        seen |= members
        if len(members) > 1:
            yield members


def _finished(needs: dict[int, list[int]]) -> list[int]:
    """Return tasks, each after all that it needs and that does not need it."""
    finished: list[int] = []
    entered: set[int] = set()
    for root, wanted in needs.items():
        work = [] if root in entered else [(root, iter(wanted))]
        entered.add(root)
        while work:
            at, rest = work[-1]
            found = next((each for each in rest if each not in entered), None)
            if found is None:
                finished.append(at)
                work.pop()
            else:
                entered.add(found)
                work.append((found, iter(needs[found])))
    return finished


def _cycle(dependencies: tuple[tuple[int, ...], ...], members: set[int]) -> list[int]:
    """Return a shortest cycle through the first of some tasks: each depends on the next one."""
    first = min(members)
    came_from = {first: first}
    reached = deque([first])
    while reached:
        at = reached.popleft()
        for each in dependencies[at]:
            if each == first:
                path = [at]
                while path[-1] != first:
                    path.append(came_from[path[-1]])
                return path[::-1]
            if each in members and each not in came_from:
                came_from[each] = at
                reached.append(each)
    raise AssertionError("the tasks do not depend on each other")


# --- levels and gates -----------------------------------------------------------------------------


def _task_levels(
    parts: Parts,
    numbers: dict[str, int],
    dependencies: tuple[tuple[int, ...], ...],
    order: list[int],
    problems: Problems,
) -> list[int]:
    """Return the level of each task: its own, that of ``levels``, or derived from dependencies."""
    listed = _listed_levels(parts, numbers, problems)
    given = [task.level if task.level is not None else listed.get(at)
             for at, task in enumerate(parts.tasks)]  # fmt: skip
    first = 0 if 0 in given else 1
    levels = [first if each is None else each for each in given]
    for at in order:
        if given[at] is None:
            levels[at] = max((levels[each] + 1 for each in dependencies[at]), default=first)
    return levels


def _listed_levels(parts: Parts, numbers: dict[str, int], problems: Problems) -> dict[int, int]:
    listed: dict[int, int] = {}
    for level in parts.levels:
        for position, each in enumerate(level.tasks):
            at: Path = (*level.at, *(("tasks",) if type(level.source) is dict else ()), position)
            if each not in numbers:
                problems.warning(
                    "unknown-task",
                    at,
                    f"level {level.number} names {quoted(each)}, and there is no such task",
                    _task_advice(each, numbers, problems),
                )
                continue
            task = numbers[each]
            own = parts.tasks[task].level
            other = own if own is not None else listed.get(task)
            if other is not None and other != level.number:
                problems.warning(
                    "two-levels",
                    at,
                    f"{each} stands in level {level.number}, and its level is {other}",
                    f"correct one of the two; it is taken to be in level {other}",
                    each,
                )
            listed.setdefault(task, level.number)
    return listed


def _check_levels(
    parts: Parts,
    levels: list[int],
    dependencies: tuple[tuple[int, ...], ...],
    order: list[int],
    problems: Problems,
) -> None:
    """Report dependencies within a level and on later ones, and gates that can never be reached."""
    gated = [level.number for level in parts.levels if any(gate.required for gate in level.gates)]
    for at in sorted(order):  # without those in circles, whose levels mean nothing
        task, level = parts.tasks[at], levels[at]
        late = [each for each in dependencies[at] if levels[each] >= level]
        places = {name: place for place, name in enumerate(task.dependencies)} if late else {}
        for each in late:
            other = parts.tasks[each].id
            place: Path = (*task.at, "dependencies", places[other])
            gate = bisect_left(gated, level)
            if levels[each] == level:
                problems.warning(
                    "same-level",
                    place,
                    f"{task.id} depends on {other} of the same level",
                    "nothing, if that is meant: it runs after it",
                    task.id,
                )
            elif gate < len(gated) and gated[gate] < levels[each]:
                problems.error(
                    "unreachable-gate",
                    place,
                    f"{task.id} of level {level} depends on {other} of level {levels[each]},"
                    f" which waits for the gate of level {gated[gate]}",
                    f"move {task.id} to a later level, or the gate",
                    task.id,
                )
            else:
                problems.warning(
                    "later-level",
                    place,
                    f"{task.id} of level {level} depends on {other} of level {levels[each]}",
                    f"give {task.id} a later level; it runs after it in any case",
                    task.id,
                )


def _check_gates(parts: Parts, levels: list[int], problems: Problems) -> None:
    """Warn of gates that check no task."""
    numbers = set(levels)
    for level in parts.levels:
        if level.gates and level.number not in numbers:
            problems.warning(
                "gate-without-tasks",
                (*level.at, "gates"),
                f"level {level.number} has a gate, and no task",
                "move the gate to the level whose tasks it checks, or give tasks this level; it is"
                " executed when all lower levels are complete",
            )


# --- names, personas and files --------------------------------------------------------------------


def _check_names(parts: Parts, numbers: dict[str, int], problems: Problems) -> None:
    """Warn of tasks that conflicts and consumers name and that do not exist."""
    for at, conflict in parts.conflicts:
        for each in conflict.tasks:
            if each not in numbers:
                problems.warning(
                    "unknown-task",
                    at,
                    f"a conflict names {quoted(each)}, and there is no such task",
                    _task_advice(each, numbers, problems),
                )
    for task in parts.tasks:
        for position, each in enumerate(task.fields["consumers"]):
            if each not in numbers:
                problems.warning(
                    "unknown-task",
                    (*task.at, "consumers", position),
                    f"there is no task {quoted(each)}",
                    _task_advice(each, numbers, problems),
                    task.id,
                )


def _check_personas(parts: Parts, problems: Problems) -> None:
    known = parts.persona_names | set(AGENTS)
    some = ", ".join(sorted(known)[:_NAMED])
    used: list[tuple[Path, str | Persona | None, str | None]]
    used = [((), parts.fields.get("persona"), None)]
    used += [(task.at, task.fields["persona"], task.id) for task in parts.tasks]
    for at, persona, task_id in used:
        if isinstance(persona, str) and persona not in known:
            problems.error(
                "unknown-persona",
                (*at, "persona"),
                f"there is no persona {quoted(persona)}",
                advised(persona, sorted(known), f"add it to 'personas', or use one of {some}"),
                task_id,
            )


def _check_files(tasks: Sequence[TaskDraft], problems: Problems, *, strict: bool) -> None:
    report = problems.error if strict else problems.warning
    for task in tasks:
        for path in task.files.owned:
            if (".." in path or path[:1] in "/\\") and _is_outside(owned_path(path)):
                report(
                    "outside",
                    (*task.at, "files"),
                    f"{task.id} owns {quoted(path)}, which is outside of the project's folder",
                    "write a path that is relative to that folder",
                    task.id,
                )


def _is_outside(path: str) -> bool:
    return path == ".." or path.startswith(("/", "../"))


def _report_conflicts(
    plan: Plan, parts: Parts, numbers: dict[str, int], problems: Problems, *, strict: bool
) -> None:
    report = problems.error if strict else problems.warning
    for conflict in plan.conflicts:
        if conflict.path is None:
            continue  # it is declared, and meant
        ids = conflict.tasks
        shown = ids if len(ids) <= _NAMED else (*ids[:_NAMED], f"{len(ids) - _NAMED} more")
        second = parts.tasks[numbers[ids[1]]]
        parts_too = " or parts of it" if conflict.path.endswith("/") else ""
        report(
            "shared-file",
            (*second.at, "files"),
            f"{', '.join(shown[:-1])} and {shown[-1]} own {quoted(conflict.path)}{parts_too}, and no"
            " dependency says which is first",
            "add a dependency; they never run at once, in the order of the document",
            second.id,
        )
