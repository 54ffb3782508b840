"""Generated workflows, killed and resumed, next to the same ones left alone: a few."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from faults.twin import sabotage
from faults.twin.comparison import Kind
from faults.twin.programs import can_end, generate, is_ordered, ops, size
from faults.twin.reduce import candidates
from faults.twin.suite import describe, few, killed_at_commits, kills, landings, run_all
from faults.twin.values import KINDS, make_error, show, show_error
from tests.tables import for_each

if TYPE_CHECKING:
    from pathlib import Path

    from faults.twin.comparison import Report


def call(step: str, arg: Any = "last", **options: Any) -> dict[str, Any]:
    return {"op": "call", "step": step, "arg": arg, **options}


def spec(*main: dict[str, Any], parts: tuple[float, ...] = (0.6,)) -> dict[str, Any]:
    stops = [{"signal": "SIGKILL", "on": "call", "part": part, "delay": 0.002} for part in parts]
    return {"main": [*main], "children": [[], []], "input": "dict", "seed": 1, "stops": stops}


#: Programs at a time: each lane starts a process that imports everything.
_LANES = 2

#: What is broken on purpose, and a program that shows it.
SABOTAGES = {
    "sorted-dicts": spec(call("make", kind="dict", number=1), call("describe")),
    "lost-cause": spec(
        {
            "op": "try",
            "body": [call("broken", error="cause")],
            "catch": ["RefusedError"],
            "handler": [call("ticket", 0)],
            "finally": [],
        }
    ),
    "order-of-calls": spec(
        {"op": "arrivals", "branches": [[call("ticket", 0)]] * 4, "take": 4},
        call("describe"),
        parts=(0.9,),
    ),
}

#: A program that a worker releases from memory several times, and wakes by times and answers.
RELEASED = spec(
    {"op": "sleep", "ms": 20},
    call("ticket", 0),
    {"op": "ask", "name": "approve", "about": True},
    {"op": "child", "child": 0, "arg": "last"},
    {
        "op": "gather",
        "branches": [
            [{"op": "ask", "name": "colour", "about": True}],
            [{"op": "sleep", "ms": 20}, call("ticket", 0)],
        ],
        "return_exceptions": False,
        "rest": "finish",
    },
)
RELEASED["children"][0] = [{"op": "sleep", "ms": 20}, {"op": "ask", "name": "a", "about": True}]

#: A timeout that ends while no process executes the run.
LATE = spec(
    {
        "op": "try",
        "body": [
            {
                "op": "timeout",
                "fires": True,
                "body": [{"op": "stuck", "how": "step", "number": 1}],
            }
        ],
        "catch": ["TimeoutError"],
        "handler": [call("ticket", 0)],
        "finally": [],
    },
    call("describe"),
)
LATE["stops"] = [{"signal": "SIGKILL", "on": "call", "part": 0.1, "delay": 0, "pause": 0.2}]


def differing(reports: list[Report]) -> str:
    return "\n\n".join(describe(each) for each in reports if each.differences)


def test_killed_or_not_it_is_the_same_run(tmp_path: Path) -> None:
    """Among them are those that show what is broken in a sabotaged engine."""
    specs = [*few(5, 2030), LATE, *SABOTAGES.values()]
    reports = run_all(specs, tmp_path, lanes=_LANES)
    assert not differing(reports)
    inside, landed = kills(reports)
    assert inside >= 4
    assert inside >= 0.8 * landed


def test_killed_after_any_commit_it_is_the_same_run(tmp_path: Path) -> None:
    stuck = [{"op": "stuck", "how": "child", "number": 1}]
    cancelled = {"op": "cancel", "task": stuck, "meanwhile": [call("nested")], "times": 2}
    program = spec(
        {**cancelled, "finally": [call("ticket", 0)], "turns": 1},
        {
            "op": "gather",
            "branches": [[call("shared", 1)], [{"op": "spin", "turns": 130}, call("shared", 1)]],
            "return_exceptions": False,
            "rest": "finish",
        },
        {"op": "ask", "name": "approve", "about": True},
    )
    specs = killed_at_commits(program, range(1, 28, 2))
    reports = run_all(specs, tmp_path, lanes=_LANES)
    assert not differing(reports)
    assert landings(reports)["not reached"] < len(specs) / 2


LOOPS = ["anyio", "uvloop", *(["eager"] if sys.version_info >= (3, 12) else [])]


@pytest.mark.parametrize("loop", LOOPS)
def test_killed_or_not_it_is_the_same_run_on_other_loops(loop: str, tmp_path: Path) -> None:
    reports = run_all(few(4, 2032), tmp_path, Kind(loop), lanes=_LANES)
    assert not differing(reports)


def test_enqueued_and_executed_by_workers_it_is_the_same_run(tmp_path: Path) -> None:
    reports = run_all([RELEASED, *few(1, 2031)], tmp_path, Kind(worker=True), lanes=_LANES)
    assert not differing(reports)
    assert landings(reports)["releases"] >= 3


@pytest.mark.parametrize("name", SABOTAGES)
def test_a_sabotaged_engine_is_noticed(name: str, tmp_path: Path) -> None:
    # The order in which branches arrive depends on the seed; it may be that of their calls.
    specs = [{**SABOTAGES[name], "seed": seed} for seed in range(5)]
    assert any(each.differences for each in run_all(specs, tmp_path, Kind(sabotage=name)))


def test_an_unknown_sabotage_is_refused() -> None:
    with pytest.raises(KeyError):
        sabotage.break_on_purpose("nothing known")


def test_the_same_seed_generates_the_same_programs_and_all_of_them_can_end() -> None:
    programs = generate(12, 7)
    assert programs == generate(12, 7)
    assert all(map(can_end, programs))
    assert len({size(each) for each in programs}) > 3


def test_programs_have_all_that_concurrent_code_does() -> None:
    met = set[str]().union(*map(ops, generate(60, 2030)))
    assert met >= {"cancel", "shield", "lock", "queue", "split", "timeout", "race", "arrivals"}
    assert met >= {"step nested", "step shared", "how child", "wait_to_be_cancelled"}


def test_a_race_depends_on_order_unless_the_others_wait_in_vain() -> None:
    quick, stuck = [call("ticket", 0)], [{"op": "stuck", "how": "sleep", "number": 0}]
    assert is_ordered(spec({"op": "race", "branches": [quick, quick]}))
    assert not is_ordered(spec({"op": "race", "branches": [quick, stuck]}))


def test_candidates_are_smaller() -> None:
    whole = SABOTAGES["order-of-calls"]
    found = list(candidates(whole))
    assert found
    for each in found:
        less = size(each) < size(whole) or len(each["stops"]) < len(whole["stops"])
        assert less or each["input"] == "number"


@for_each(
    "one, two",
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (0.0, -0.0),
        (1, True),
        (1, 1.0),
        ((1,), [1]),
        (b"a", bytearray(b"a")),
        ({1}, frozenset({1})),
    ],
)
def test_values_that_a_workflow_can_tell_apart_are_shown_differently(one: Any, two: Any) -> None:
    assert show(one) != show(two)


@for_each("kind", KINDS)
def test_equal_values_are_shown_alike(kind: str) -> None:
    assert show(KINDS[kind](3)) == show(KINDS[kind](3))


def test_an_error_is_shown_with_its_attributes_and_causes() -> None:
    shown = show_error(make_error("cause", "text"))
    assert "RefusedError('refused', 'text') from OutOfStockError" in shown
    assert "'left': 1" in shown
    assert shown.endswith("from KeyError('warehouse')")
