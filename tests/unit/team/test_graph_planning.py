"""What may start, in which order, and how long it takes: no dependency or conflict is violated."""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations, permutations
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maestro_hive.team.graph import Frontier, Plan, TaskState, make_plan, select, simulate
from maestro_hive.team.graph.planning import owned_folder, owned_path
from tests.tables import for_each
from tests.unit.team.graphs import SEEDS, Maker, document, good, task

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

COMPLETE, FAILED, RUNNING = TaskState.COMPLETE, TaskState.FAILED, TaskState.RUNNING


def plan_of(*tasks: Any, **members: Any) -> Plan:
    plan = good(document(*tasks, **members)).plan
    assert plan is not None
    return plan


def states(**given: TaskState) -> dict[str, TaskState]:
    return given


def ready(plan: Plan, known: Mapping[str, TaskState], passed: Collection[int] = ()) -> list[str]:
    return Frontier(plan, known, passed).ready()


# --- what is ready ---


def test_a_task_is_ready_when_its_dependencies_are_complete() -> None:
    plan = plan_of(task("A"), task("B"), task("C", "A", "B"))
    assert ready(plan, {}) == ["A", "B"]
    assert ready(plan, states(A=COMPLETE, B=RUNNING)) == []
    assert ready(plan, states(A=COMPLETE, B=COMPLETE)) == ["C"]


def test_a_task_does_not_wait_for_its_level() -> None:
    plan = plan_of(task("A", level=1), task("B", level=1), task("C", "A", level=2))
    assert ready(plan, states(A=COMPLETE, B=RUNNING)) == ["C"]


def test_the_longest_remaining_path_is_first_then_the_order_of_the_document() -> None:
    plan = plan_of(
        task("A", estimate_minutes=5),
        task("B", estimate_minutes=1),
        task("C", "B", estimate_minutes=9),
        task("D", estimate_minutes=5),
    )
    assert ready(plan, {}) == ["B", "A", "D"]
    assert (plan.critical_path, plan.critical_minutes) == (("B", "C"), 10)


def test_tasks_that_own_the_same_file_never_run_at_once_in_the_order_of_the_document() -> None:
    plan = plan_of(task("A", files=["x"]), task("B", files=["./x"], estimate_minutes=99))
    assert ready(plan, {}) == ["A"]
    assert ready(plan, states(A=RUNNING)) == []
    assert ready(plan, states(A=COMPLETE)) == ["B"]
    assert ready(plan, states(A=FAILED)) == ["B"]


@for_each(
    "one, other, conflict",
    [
        ("src/", "src/a.py", True),
        ("src/**", "src/a/b.py", True),
        ("src/*.py", "src/b.py", True),
        (".", "a.py", True),
        ("src/", "srcs/a.py", False),
        ("src/a.py", "src/b.py", False),
        ("a/../b.py", "b.py", True),
    ],
)
def test_a_folder_is_in_conflict_with_what_is_in_it(one: str, other: str, conflict: bool) -> None:
    plan = plan_of(task("A", files=[one]), task("B", files=[other]))
    assert bool(plan.conflicts) is conflict
    assert ready(plan, {}) == (["A"] if conflict else ["A", "B"])


def test_tasks_that_own_files_of_a_folder_run_at_once_although_another_task_owns_it() -> None:
    parts = [task("A", files=["src/a.py"]), task("B", files=["src/b.py"])]
    plan = plan_of(*parts, task("C", "A", "B", files=["src/"]))
    assert plan.conflicts == ()
    assert ready(plan, {}) == ["A", "B"]


def test_a_task_that_owns_a_folder_runs_between_those_that_own_parts_of_it() -> None:
    plan = plan_of(
        task("A", files=["src/a.py"]),
        task("B", files=["src/b/"]),
        task("C", files=["src/"]),
        task("D", files=["src/d.py", "src/b/d.py"]),
        task("E", files=["src/e.py"]),
        task("F", files=["./src/**"]),
        task("G", files=["src"]),
    )
    assert ready(plan, {}) == ["A", "B"]
    assert ready(plan, states(A=COMPLETE)) == ["B"]
    assert ready(plan, states(A=COMPLETE, B=FAILED)) == ["C"]
    done = states(A=COMPLETE, B=COMPLETE, C=COMPLETE)
    assert ready(plan, done) == ["D", "E"]
    assert ready(plan, {**done, "D": RUNNING, "E": COMPLETE}) == []
    assert ready(plan, {**done, "D": COMPLETE, "E": COMPLETE}) == ["F"]
    assert ready(plan, {**done, "D": COMPLETE, "E": COMPLETE, "F": RUNNING}) == []
    inner, folder = plan.conflicts
    assert (folder.tasks, folder.path) == (tuple("ABCDEFG"), "src/")
    assert folder.reason == "each with C, F, G, which own src/"
    assert (inner.tasks, inner.path) == (("B", "D"), "src/b/")


def test_pairs_of_the_conflict_matrix_never_run_at_once() -> None:
    plan = plan_of(task("A"), task("B"), task("C"), conflict_matrix=[["C", "A"]])
    assert ready(plan, {}) == ["A", "B"]
    assert [each.tasks for each in plan.conflicts] == [("A", "C")]


def test_the_tasks_of_a_level_that_is_not_parallel_run_one_after_the_other() -> None:
    plan = plan_of(task("A"), task("B"), levels={"1": {"parallel": False}})
    assert ready(plan, {}) == ["A"]


def test_a_dependency_decides_the_order_of_a_conflict() -> None:
    plan = plan_of(task("A", "B", files=["x"]), task("B", files=["x"]))
    assert plan.conflicts == ()
    assert ready(plan, {}) == ["B"]


def test_conflicts_never_make_a_deadlock() -> None:
    """In the order of the document A would wait for C, C for B, B for D, and D for A."""
    plan = plan_of(
        task("A", "C", files=["x"]),
        task("B", "D", files=["y"]),
        task("C", files=["y"]),
        task("D", files=["x"]),
    )
    assert sorted(ran(plan)) == ["A", "B", "C", "D"]


def test_what_depends_on_a_failed_task_is_blocked_and_the_rest_goes_on() -> None:
    plan = plan_of(task("A"), task("B", "A"), task("C", "B"), task("D"))
    frontier = Frontier(plan)
    assert frontier.take() == "A"
    frontier.fail("A")
    assert frontier.blocked() == {"B": "A", "C": "A"}
    assert frontier.ready() == ["D"]


def test_a_blocked_task_does_not_hold_what_it_is_in_conflict_with() -> None:
    plan = plan_of(task("A"), task("B", "A", files=["x"]), task("C", files=["x"]))
    assert ready(plan, {}) == ["A"]
    assert ready(plan, states(A=FAILED)) == ["C"]


def test_what_is_behind_a_blocked_task_waits_for_those_before_it() -> None:
    """C follows B, which is blocked, and A, which runs; all three own the same file."""
    plan = plan_of(
        task("A", files=["x"]), task("F"), task("B", "F", files=["x"]), task("C", files=["x"])
    )
    assert ready(plan, states(A=RUNNING, F=FAILED)) == []
    assert ready(plan, states(A=COMPLETE, F=FAILED)) == ["C"]


# --- gates ---


def gated() -> Plan:
    return plan_of(
        task("A", level=1),
        task("B", level=2),
        task("C", level=3),
        levels={
            "1": {"gates": [{"name": "g", "command": "make"}]},
            "2": {"gates": [{"name": "hint", "command": "make", "required": False}]},
        },
    )


def test_nothing_after_a_required_gate_starts_before_it_has_passed() -> None:
    frontier = Frontier(gated())
    assert frontier.ready() == ["A"]
    assert frontier.gates_due() == []
    frontier.complete("A")
    assert frontier.ready() == []
    assert [level.number for level in frontier.gates_due()] == [1]
    frontier.pass_gates(1)
    assert frontier.gates_due() == []
    assert sorted(frontier.ready()) == ["B", "C"]


def test_a_gate_that_is_not_required_holds_nothing_and_is_due() -> None:
    frontier = Frontier(gated(), states(A=COMPLETE), passed=[1])
    frontier.complete("B")
    assert [level.number for level in frontier.gates_due()] == [2]
    assert frontier.ready() == ["C"]


def test_a_level_with_a_failed_task_never_reaches_its_gate() -> None:
    frontier = Frontier(gated())
    frontier.fail("A")
    assert (frontier.gates_due(), frontier.ready()) == ([], [])


# --- parts of a graph, and schedules ---


def test_a_part_of_a_graph_is_some_tasks_with_all_they_depend_on() -> None:
    plan = plan_of(task("A"), task("B", "A"), task("C", "B"), task("D"))
    part = select(plan.graph, ["B"])
    assert [each.id for each in part.tasks] == ["A", "B"]
    assert [level.tasks for level in part.levels] == [("A",), ("B",)]
    assert make_plan(part).critical_path == ("A", "B")
    with pytest.raises(KeyError, match="gone"):
        select(plan.graph, ["gone"])


def test_a_schedule_has_a_lane_for_each_worker() -> None:
    plan = plan_of(*(task(each, estimate_minutes=10) for each in "ABCD"), task("E", "A"))
    alone, two, many = (simulate(plan, workers) for workers in (1, 2, 100))
    assert (alone.minutes, two.minutes, many.minutes) == (50, 30, 20)
    assert [slot.task for slot in alone.lanes[0]] == ["A", "B", "C", "D", "E"]
    assert (len(two.lanes), many.most_at_once) == (2, 4)


def test_a_task_without_estimate_is_taken_as_the_median() -> None:
    plan = plan_of(task("A", estimate_minutes=2), task("B", estimate_minutes=8), task("C"))
    assert list(plan.minutes) == [2, 8, 5]
    assert list(plan_of(task("A")).minutes) == [1]


# --- simulated runs ---


def ran(plan: Plan) -> list[str]:
    """Run everything with one worker, and return the order."""
    return [slot.task for lane in simulate(plan, 1).lanes for slot in lane]


def in_conflict(plan: Plan) -> set[frozenset[str]]:
    """Return every pair that must not run at once, found in the plainest way."""
    pairs: set[frozenset[str]] = set()
    owners: defaultdict[str, set[str]] = defaultdict(set)
    for each in plan.graph.tasks:
        for path in each.files.owned:
            owners[owned_path(path)].add(each.id)
    exclusive: Iterable[Iterable[str]] = [
        *owners.values(),
        *(each.tasks for each in plan.graph.conflicts),
        *(level.tasks for level in plan.graph.levels if not level.parallel),
    ]
    for members in exclusive:
        pairs |= {frozenset(pair) for pair in combinations(sorted(set(members)), 2)}
    for one, other in permutations(plan.graph.tasks, 2):
        folders = [path for path, is_folder in map(owned_folder, one.files.owned) if is_folder]
        parts = [owned_path(path) for path in other.files.owned]
        if any(each.startswith(f"{folder}/") for folder in folders for each in parts):
            pairs.add(frozenset((one.id, other.id)))
    return pairs


@given(SEEDS)
@settings(max_examples=150, deadline=None)
def test_no_run_violates_a_dependency_a_conflict_or_a_gate(seed: int) -> None:
    maker = Maker(seed)
    plan = good(maker.document()).plan
    assert plan is not None
    graph = plan.graph
    tasks = {each.id: each for each in graph.tasks}
    required = [level for level in graph.levels if level.is_gated]
    pairs = in_conflict(plan)
    known: dict[str, TaskState] = {}
    passed: set[int] = set()
    frontier = Frontier(plan)
    for _ in range(4 * len(tasks) + len(graph.levels)):
        for level in frontier.gates_due():
            assert all(known.get(each) is COMPLETE for each in level.tasks)
            frontier.pass_gates(level.number)
            passed.add(level.number)
        may_start = frontier.ready()
        assert may_start == ready(plan, known, passed)
        running = [each for each, state in known.items() if state is RUNNING]
        for each in may_start:
            assert each not in known
            assert all(known.get(other) is COMPLETE for other in tasks[each].dependencies)
            assert not any(frozenset((each, other)) in pairs for other in running)
            assert all(
                level.number in passed for level in required if level.number < tasks[each].level
            )
        assert not any(frozenset(pair) in pairs for pair in combinations(may_start, 2))
        if not may_start and not running:
            break
        if may_start and (not running or maker.chance()):
            started = frontier.take()
            assert started == may_start[0]
            known[started] = RUNNING
        else:
            ended = maker.random.choice(running)
            failed = maker.chance(6)
            known[ended] = FAILED if failed else COMPLETE
            (frontier.fail if failed else frontier.complete)(ended)
    else:
        raise AssertionError("the run does not end")
    if FAILED not in known.values():
        assert set(known) == set(tasks)
    assert not set(frontier.blocked()) & set(known)


@given(SEEDS, st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_a_schedule_has_every_task_once_and_no_conflict_overlaps(seed: int, workers: int) -> None:
    plan = good(Maker(seed).document()).plan
    assert plan is not None
    schedule = simulate(plan, workers)
    slots = {slot.task: slot for lane in schedule.lanes for slot in lane}
    assert sorted(slots) == sorted(plan.ids)
    assert len(schedule.lanes) <= workers
    assert schedule.minutes >= plan.critical_minutes
    for pair in in_conflict(plan):
        one, other = sorted((slots[each] for each in pair), key=lambda slot: (slot.start, slot.end))
        assert one.end <= other.start
