"""What must wait for what: order, conflicts, critical path, and what a number of workers would do.

Two tasks that own the same file, or of which one owns a folder that a file of the other is in, or that
stand together in the conflict matrix, and have no dependency path between them, run one after the
other. Which of them is first must be the same in every run, so it is decided here and not by who is
ready first: all tasks are put into one order, that of the document as far as dependencies and gates
allow, and tasks in conflict run in it. So there can be no deadlock.
"""

from __future__ import annotations

import heapq
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from statistics import median
from typing import TYPE_CHECKING

from maestro_hive.team.graph.records import Conflict, TaskState

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from maestro_hive.team.graph.records import Graph, Level

#: What a task is taken to last if no task of the graph has an estimate.
_MINUTES = 1.0
#: How many owners of a folder are named.
_NAMED = 3
#: So many of the folders that a path is in are looked at.
_DEEPEST_FOLDER = 64
#: Paths that can be written in another way.
_UNUSUAL = re.compile(r"\\|^\.{0,2}/|/\.{0,2}/|/\.{1,2}$|^\.{1,2}$")
_WILDCARD = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is derived from a graph; tasks are numbers here, by their order in the document."""

    graph: Graph
    #: The ids of the tasks, by number.
    ids: tuple[str, ...]
    #: All tasks, dependencies first.
    order: tuple[int, ...]
    #: What each task waits for: its dependencies, and what it is in conflict with.
    before: tuple[tuple[int, ...], ...]
    #: What waits for each task.
    after: tuple[tuple[int, ...], ...]
    #: The dependencies alone.
    dependencies: tuple[tuple[int, ...], ...]
    #: The conflicts that order tasks which no dependency orders.
    conflicts: tuple[Conflict, ...]
    #: What each task is taken to last; the estimate, or the median of those that there are.
    minutes: tuple[float, ...]
    #: How long it takes from the start of each task to the end of all that wait for it.
    remaining: tuple[float, ...]
    #: The ids of the tasks on the longest path, and how long they take one after the other.
    critical_path: tuple[str, ...]
    critical_minutes: float
    #: The numbers of the levels with a required gate, ascending.
    gated: tuple[int, ...]


def make_plan(graph: Graph) -> Plan:
    """Return what follows from a graph that was checked."""
    number = {task.id: at for at, task in enumerate(graph.tasks)}
    dependencies = tuple(
        tuple(dict.fromkeys(number[each] for each in task.dependencies)) for task in graph.tasks
    )
    gated = tuple(level.number for level in graph.levels if level.is_gated)
    bands = [bisect_left(gated, task.level) for task in graph.tasks]
    order, _ = sorted_tasks(dependencies, bands)
    conflicts, waits = _conflicts(graph, number, dependencies, order)
    before = tuple((*own, *waits[at]) for at, own in enumerate(dependencies))
    after = _reversed(before)
    minutes = _minutes(graph)
    remaining = [0.0] * len(order)
    for at in reversed(order):
        remaining[at] = minutes[at] + max((remaining[each] for each in after[at]), default=0.0)
    path = _longest_path(after, remaining)
    ids = tuple(number)
    return Plan(
        graph=graph,
        ids=ids,
        order=tuple(order),
        before=before,
        after=after,
        dependencies=dependencies,
        conflicts=tuple(conflicts),
        minutes=minutes,
        remaining=tuple(remaining),
        critical_path=tuple(ids[at] for at in path),
        critical_minutes=remaining[path[0]] if path else 0.0,
        gated=gated,
    )


def sorted_tasks(
    before: tuple[tuple[int, ...], ...], bands: list[int] | None = None
) -> tuple[list[int], list[int]]:
    """Return tasks with those they wait for first, in the order of the document as far as that goes.

    What is in a lower band comes before all of a higher one. The second list has the tasks that wait,
    directly or not, for themselves.
    """
    count = len(before)
    keys = bands or [0] * count
    after = _reversed(before)
    left = [len(each) for each in before]
    free = [(keys[at], at) for at in range(count) if not left[at]]
    heapq.heapify(free)
    order: list[int] = []
    while free:
        _, at = heapq.heappop(free)
        order.append(at)
        for each in after[at]:
            left[each] -= 1
            if not left[each]:
                heapq.heappush(free, (keys[each], each))
    return order, [at for at in range(count) if left[at]]


def _reversed(before: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    after: list[list[int]] = [[] for _ in before]
    for at, waits_for in enumerate(before):
        for each in waits_for:
            after[each].append(at)
    return tuple(map(tuple, after))


def _minutes(graph: Graph) -> tuple[float, ...]:
    given = [task.estimate_minutes for task in graph.tasks if task.estimate_minutes is not None]
    usual = median(given) if given else _MINUTES
    return tuple(
        usual if task.estimate_minutes is None else float(task.estimate_minutes)
        for task in graph.tasks
    )


def _longest_path(after: tuple[tuple[int, ...], ...], remaining: list[float]) -> list[int]:
    if not remaining:
        return []
    at = max(range(len(remaining)), key=lambda each: (remaining[each], -each))
    path = [at]
    while after[at]:
        at = max(after[at], key=lambda each: (remaining[each], -each))
        path.append(at)
    return path


# --- conflicts ------------------------------------------------------------------------------------


def _conflicts(
    graph: Graph,
    number: Mapping[str, int],
    dependencies: tuple[tuple[int, ...], ...],
    order: list[int],
) -> tuple[list[Conflict], list[dict[int, None]]]:
    """Return the conflicts that matter, and what each task waits for because of them."""
    place = {at: position for position, at in enumerate(order)}
    groups = [
        (each, owners, members)
        for each, owners in _declared(graph)
        if len(members := sorted((number[task] for task in each.tasks), key=place.__getitem__)) > 1
    ]
    waited_for = _WaitedFor(dependencies, order, {at for *_, members in groups for at in members})
    found: list[Conflict] = []
    waits: list[dict[int, None]] = [{} for _ in dependencies]
    for conflict, owners, members in groups:
        alone = None if owners is None else {number[each] for each in owners}
        apart: set[int] = set()
        for earlier, later in _neighbours(members, alone):
            if not waited_for.is_before(earlier, later):
                apart |= {earlier, later}
                waits[later][earlier] = None
        if apart:
            tasks = tuple(graph.tasks[at].id for at in members if at in apart)
            found.append(replace(conflict, tasks=tasks))
    return found, waits


def _neighbours(members: list[int], alone: set[int] | None) -> Iterator[tuple[int, int]]:
    """Yield pairs such that one after the other in each of them keeps all apart that must be.

    Those that are ``alone`` run at once with no other one; None: that is all. There are at most twice
    as many pairs as members.
    """
    if alone is None:
        yield from pairwise(members)
        return
    last: int | None = None
    since: list[int] = []
    for at in members:
        if at in alone and since:
            yield from ((each, at) for each in since)
        elif last is not None:
            yield last, at
        if at in alone:
            last, since = at, []
        else:
            since.append(at)


class _WaitedFor:
    """Which of some tasks each task waits for, directly or not, as the bits of a number."""

    def __init__(
        self, dependencies: tuple[tuple[int, ...], ...], order: list[int], members: set[int]
    ) -> None:
        self._bit = {at: 1 << position for position, at in enumerate(sorted(members))}
        self._reach = [0] * len(dependencies)
        if not members:
            return
        for at in order:
            reach = 0
            for each in dependencies[at]:
                reach |= self._reach[each] | self._bit.get(each, 0)
            self._reach[at] = reach

    def is_before(self, earlier: int, later: int) -> bool:
        """Return whether one task waits for another."""
        return bool(self._reach[later] & self._bit[earlier])


def _declared(graph: Graph) -> Iterator[tuple[Conflict, Collection[str] | None]]:
    """Yield every set of tasks that must not run at once, for whatever reason.

    With it are those of which none may run at once with another one of the set; None: that is all.
    """
    known = {task.id for task in graph.tasks}
    for conflict in graph.conflicts:
        tasks = tuple(each for each in conflict.tasks if each in known)
        yield replace(conflict, tasks=tasks), None
    for level in graph.levels:
        if not level.parallel:
            yield Conflict(tasks=level.tasks, reason=f"level {level.number} is not parallel"), None
    yield from _shared_files(graph)


def _shared_files(graph: Graph) -> Iterator[tuple[Conflict, Collection[str] | None]]:
    """Yield the tasks that own the same file, and those that own a folder with those that own parts."""
    files, folders = _owners(graph)
    for path, owners in files.items():
        if len(owners) > 1:
            yield Conflict(tasks=tuple(owners), reason=f"own {path}", path=path), None
    inside: defaultdict[str, list[str]] = defaultdict(list)
    if folders:
        for path, owners in (*files.items(), *folders.items()):
            for folder in _folders_of(path):
                if folder in folders and folder != path:
                    inside[folder] += owners
    for path, owners in folders.items():
        whole = dict.fromkeys((*owners, *files.get(path, ())))
        tasks = tuple(whole | dict.fromkeys(inside[path]))
        if len(tasks) > 1:
            reason = f"each with {_named(whole)} {path}/"
            yield Conflict(tasks=tasks, reason=reason, path=f"{path}/"), whole


def _named(owners: Collection[str]) -> str:
    some, more = list(islice(owners, _NAMED)), len(owners) - _NAMED
    names = ", ".join(some) + (f" and {more:,} more" if more > 0 else "")
    return f"{names}, which {'owns' if len(owners) == 1 else 'own'}"


def _owners(graph: Graph) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return who owns which files, and which folders."""
    files: defaultdict[str, list[str]] = defaultdict(list)
    folders: defaultdict[str, list[str]] = defaultdict(list)
    for task in graph.tasks:
        for name, is_folder in {owned_folder(each): 0 for each in task.files.owned}:
            (folders if is_folder else files)[name].append(task.id)
    return files, folders


def owned_path(path: str) -> str:
    """Return a path in one way of writing it: without ``.``, ``..`` and doubled slashes."""
    if not _UNUSUAL.search(path):
        return path
    parts: list[str] = []
    for part in path.replace("\\", "/").split("/"):
        if part == ".." and parts and parts[-1] != "..":
            parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    start = "/" if path.startswith("/") else ""
    end = "/" if parts and path.endswith("/") else ""
    return f"{start}{'/'.join(parts)}{end}"


def owned_folder(path: str) -> tuple[str, bool]:
    """Return the folder that a path with wildcards or a slash at its end means; else the file."""
    path = owned_path(path)
    if not path:
        return "", True
    if wild := _WILDCARD.search(path):
        return path[: wild.start()].rpartition("/")[0], True
    return path.rstrip("/"), path.endswith("/")


def _folders_of(path: str) -> Iterator[str]:
    for _ in range(_DEEPEST_FOLDER):
        path, slash, _ = path.rpartition("/")
        if not slash:
            yield ""
            return
        yield path


# --- what may start -------------------------------------------------------------------------------


class Frontier:
    """What may start, as tasks start and end; a change costs what depends on it, not the whole graph.

    A task may start when its dependencies are complete, the tasks before it that it is in conflict
    with have ended, and all required gates of lower levels have passed.
    """

    def __init__(
        self,
        plan: Plan,
        states: Mapping[str, TaskState] | None = None,
        passed: Collection[int] = (),
    ) -> None:
        """Start with the states that are known, and the levels whose gates have passed."""
        given = states or {}
        self._plan = plan
        self._number = {each: at for at, each in enumerate(plan.ids)}
        self._levels = [task.level for task in plan.graph.tasks]
        self._state = [given.get(each, TaskState.PENDING) for each in plan.ids]
        self._gates = _Gates(plan, self._state, passed)
        #: How many of those that a task waits for can still change its files or its fate.
        self._unclear = [len(each) for each in plan.before]
        self._is_clear = [False] * len(plan.order)
        self._blocked_by: dict[int, int] = {}
        self._ready: list[tuple[float, int]] = []
        #: What waits only for a gate, by level.
        self._held: list[tuple[int, int]] = []
        for at in plan.order:
            self._end(at)
        self._ready.clear()
        self._held.clear()
        for at in plan.order:
            self._offer(at)

    def ready(self) -> list[str]:
        """Return what may start now: the longest remaining path first, then as in the document."""
        self._drop_started()
        return [self._plan.ids[at] for _, at in sorted(self._ready) if self._may_start(at)]

    def take(self) -> str | None:
        """Start the most urgent task, and return it; None if none may start."""
        self._drop_started()
        if not self._ready:
            return None
        _, at = heapq.heappop(self._ready)
        self._state[at] = TaskState.RUNNING
        return self._plan.graph.tasks[at].id

    def complete(self, task_id: str) -> None:
        """Note that a task is complete."""
        at = self._number[task_id]
        if self._state[at] is not TaskState.COMPLETE:
            self._state[at] = TaskState.COMPLETE
            self._gates.complete(self._levels[at])
            self._end(at)

    def fail(self, task_id: str) -> None:
        """Note that a task has failed for good: what depends on it cannot start."""
        at = self._number[task_id]
        self._state[at] = TaskState.FAILED
        self._end(at)

    def blocked(self) -> dict[str, str]:
        """Return the tasks that cannot start, each with the failed task that is the reason."""
        ids = self._plan.ids
        return {ids[at]: ids[cause] for at, cause in sorted(self._blocked_by.items())}

    def gates_due(self) -> list[Level]:
        """Return the levels that are complete, with all lower ones, and whose gates have not run."""
        return self._gates.due()

    def pass_gates(self, level: int) -> None:
        """Note that the gates of a level have passed, or failed and are not required."""
        self._gates.pass_level(level)
        while self._held and not self._gates.hold(self._held[0][0]):
            self._offer(heapq.heappop(self._held)[1])

    def _may_start(self, at: int) -> bool:
        return (
            self._state[at] is TaskState.PENDING
            and not self._unclear[at]
            and at not in self._blocked_by
        )

    def _drop_started(self) -> None:
        while self._ready and not self._may_start(self._ready[0][1]):
            heapq.heappop(self._ready)

    def _offer(self, at: int) -> None:
        if not self._may_start(at):
            return
        if self._gates.hold(self._levels[at]):
            heapq.heappush(self._held, (self._levels[at], at))
        else:
            heapq.heappush(self._ready, (-self._plan.remaining[at], at))

    def _end(self, at: int) -> None:
        if self._state[at] is TaskState.FAILED:
            self._block(at)
        if self._state[at] in (TaskState.COMPLETE, TaskState.FAILED):
            self._clear([at])

    def _block(self, failed: int) -> None:
        reached = [failed]
        while reached:
            at = reached.pop()
            for each in self._plan.after[at]:
                if (
                    each not in self._blocked_by
                    and self._state[each] is TaskState.PENDING
                    and at in self._plan.dependencies[each]
                ):
                    self._blocked_by[each] = failed
                    reached.append(each)

    def _clear(self, ended: list[int]) -> None:
        """Note that tasks can change nothing any more: they ended, or will never start.

        What can never start counts only when all that it waits for is clear, too: what is in conflict
        with it may be in conflict with these.
        """
        while ended:
            at = ended.pop()
            if self._is_clear[at]:
                continue
            self._is_clear[at] = True
            for each in self._plan.after[at]:
                self._unclear[each] -= 1
                if not self._unclear[each]:
                    if each in self._blocked_by:
                        ended.append(each)
                    else:
                        self._offer(each)


class _Gates:
    """Which levels have gates to run, and which levels wait for them."""

    def __init__(self, plan: Plan, states: list[TaskState], passed: Collection[int]) -> None:
        self._levels = {level.number: level for level in plan.graph.levels if level.gates}
        self._required = [level for level in plan.gated if level not in passed]
        heapq.heapify(self._required)
        self._passed = set(passed)
        #: How many tasks of each level are not complete, and the levels that have some, or gates.
        self._left: Counter[int] = Counter()
        for task, state in zip(plan.graph.tasks, states, strict=True):
            self._left[task.level] += state is not TaskState.COMPLETE
        self._incomplete = sorted({*self._left, *self._levels}, reverse=True)
        self._complete: set[int] = set()
        self._note_complete()

    def complete(self, level: int) -> None:
        """Note that a task of a level is complete."""
        self._left[level] -= 1
        self._note_complete()

    def _note_complete(self) -> None:
        """Note which levels are complete, with all that are lower."""
        while self._incomplete and not self._left[self._incomplete[-1]]:
            level = self._incomplete.pop()
            if level in self._levels and level not in self._passed:
                self._complete.add(level)

    def hold(self, level: int) -> bool:
        """Return whether the tasks of a level wait for a required gate."""
        return bool(self._required) and level > self._required[0]

    def due(self) -> list[Level]:
        """Return the levels whose gates can run, the lowest first."""
        return [self._levels[each] for each in sorted(self._complete) if not self.hold(each)]

    def pass_level(self, level: int) -> None:
        """Note that the gates of a level have passed."""
        self._passed.add(level)
        self._complete.discard(level)
        while self._required and self._required[0] in self._passed:
            heapq.heappop(self._required)


# --- a part of a graph, and what workers would do with it -----------------------------------------


def select(graph: Graph, ids: Iterable[str]) -> Graph:
    """Return the graph of some tasks and of all that they depend on; raise KeyError for another id."""
    tasks = {task.id: task for task in graph.tasks}
    wanted = list(ids)
    found: set[str] = set()
    while wanted:
        each = wanted.pop()
        if each not in found:
            found.add(each)
            wanted += tasks[each].dependencies
    levels = (
        replace(level, tasks=tuple(each for each in level.tasks if each in found))
        for level in graph.levels
    )
    return replace(
        graph,
        tasks=tuple(task for task in graph.tasks if task.id in found),
        levels=tuple(level for level in levels if level.tasks),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A task in the lane of a worker, with its times in minutes from the start."""

    task: str
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What a number of workers would do, if every task took as long as its estimate."""

    #: What each worker does, in order.
    lanes: tuple[tuple[Slot, ...], ...]
    #: When the last task ends.
    minutes: float
    #: How many tasks run at the same time at most.
    most_at_once: int


def simulate(plan: Plan, workers: int) -> Schedule:
    """Return what so many workers would do; gates take no time and pass."""
    frontier = Frontier(plan)
    number = {each: at for at, each in enumerate(plan.ids)}
    lanes: list[list[Slot]] = [[] for _ in range(min(workers, max(1, len(number))))]
    idle = list(range(len(lanes)))
    running: list[tuple[float, int, str]] = []
    now, most = 0.0, 0
    while True:
        _pass_due_gates(frontier)
        while idle and (task := frontier.take()) is not None:
            lane = heapq.heappop(idle)
            end = now + plan.minutes[number[task]]
            lanes[lane].append(Slot(task=task, start=now, end=end))
            heapq.heappush(running, (end, lane, task))
        most = max(most, len(running))
        if not running:
            used = tuple(tuple(lane) for lane in lanes if lane)
            return Schedule(lanes=used, minutes=now, most_at_once=most)
        now, lane, task = heapq.heappop(running)
        frontier.complete(task)
        heapq.heappush(idle, lane)


def _pass_due_gates(frontier: Frontier) -> None:
    while due := frontier.gates_due():
        for level in due:
            frontier.pass_gates(level.number)
