"""Generated workflows, killed and resumed, next to the same ones left alone: a few."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from faults.twin import program
from faults.twin.programs import can_end, generate, is_ordered, size
from faults.twin.reduce import candidates
from faults.twin.row import describe, few, run_all
from faults.twin.values import KINDS, make_error, show, show_error
from tests.tables import for_each

if TYPE_CHECKING:
    from pathlib import Path

    from faults.twin.driver import Report


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
    "arrival-occurrence": spec(
        {
            "op": "gather",
            "branches": [[call("weigh", 0), call("ticket", 0)]] * 4,
            "return_exceptions": False,
            "rest": "finish",
        },
        parts=(0.7, 0.5, 0.5),
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


def differing(reports: list[Report]) -> str:
    return "\n\n".join(describe(each) for each in reports if each.differences)


def test_killed_or_not_it_is_the_same_run(tmp_path: Path) -> None:
    """Among them are those that show what is broken in a sabotaged engine."""
    reports = run_all([*few(5, 2030), *SABOTAGES.values()], tmp_path, lanes=_LANES)
    assert not differing(reports)
    assert sum(each.landed["in a step"] for each in reports) >= 4


def test_enqueued_and_executed_by_workers_it_is_the_same_run(tmp_path: Path) -> None:
    reports = run_all([RELEASED, *few(1, 2031)], tmp_path, lanes=_LANES, workers=True)
    assert not differing(reports)
    assert sum(each.landed["releases"] for each in reports) >= 3


@pytest.mark.parametrize("name", SABOTAGES)
def test_a_sabotaged_engine_is_noticed(name: str, tmp_path: Path) -> None:
    # Which of the branches arrives first is a matter of chance.
    times = 5 if name == "arrival-occurrence" else 1
    sabotaged = (
        run_all([SABOTAGES[name]], tmp_path / str(number), sabotage=name) for number in range(times)
    )
    assert any(report.differences for reports in sabotaged for report in reports)


def test_an_unknown_sabotage_is_refused() -> None:
    with pytest.raises(KeyError):
        program.sabotage("nothing known")


def test_the_same_seed_generates_the_same_programs_and_all_of_them_can_end() -> None:
    programs = generate(12, 7)
    assert programs == generate(12, 7)
    assert all(map(can_end, programs))
    assert len({size(each) for each in programs}) > 3


def test_a_race_depends_on_order_unless_the_others_wait_in_vain() -> None:
    quick, stuck = [call("ticket", 0)], [{"op": "stuck", "how": "sleep", "number": 0}]
    assert is_ordered(spec({"op": "race", "branches": [quick, quick]}))
    assert not is_ordered(spec({"op": "race", "branches": [quick, stuck]}))


def test_candidates_are_smaller() -> None:
    whole = SABOTAGES["arrival-occurrence"]
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
