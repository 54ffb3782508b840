"""Arguments that a healer changes: of tasks with any kinds of parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import Fix, Hive, PersonaExecutor
from maestro_hive.engine.healing.arguments import arguments_by_name, with_changes
from maestro_hive.engine.healing.engine import SelfHealingEngine
from maestro_hive.engine.healing.failure import FailureType
from maestro_hive.maestro.state.events import RepairTried
from tests.healing.test_user_healers import events
from tests.hive.conftest import quick_config
from tests.tables import for_each
from tests.unified_execution.restarts import execute

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from maestro_hive import Failure


@pytest.fixture
def hive(tmp_path: Path) -> Iterator[Hive]:
    with Hive(tmp_path / "state", quick_config()) as made:
        yield made


def every_kind(first: Any, /, second: Any = 2, *rest: Any, last: Any = 9, **more: Any) -> Any:
    return first, second, rest, last, more


CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((1,), {}),
    ((1, 2, 3, 4), {"last": 5}),
    ((1,), {"second": 3, "colour": "red", "size": 4}),
    ((1, 2, 3), {"rest": "a keyword of that name", "more": "and of this"}),
    ((1,), {"first": "a keyword named as one given by its place"}),
]


@for_each("args, kwargs", CALLS)
def test_arguments_that_are_given_back_change_nothing(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    named = arguments_by_name(every_kind, args, kwargs)
    changed, by_name = with_changes(every_kind, (args, kwargs), named)
    assert every_kind(*changed, **by_name) == every_kind(*args, **kwargs)


@for_each(
    "change, expected",
    [
        ({"first": 0}, (0, 2, (), 9, {})),
        ({"second": 0}, (1, 0, (), 9, {})),
        ({"rest": [3, 4]}, (1, 2, (3, 4), 9, {})),
        ({"last": 0}, (1, 2, (), 0, {})),
        ({"colour": "red"}, (1, 2, (), 9, {"colour": "red"})),
    ],
)
def test_each_kind_of_argument_is_changed_by_its_name(
    change: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    args, kwargs = with_changes(every_kind, ((1,), {}), change)
    assert every_kind(*args, **kwargs) == expected


def test_those_given_by_their_place_alone_may_have_defaults_before_them() -> None:
    def places(first: int = 1, second: int = 2, /) -> tuple[int, int]:
        return first, second

    args, kwargs = with_changes(places, ((), {}), {"second": 5})
    assert places(*args, **kwargs) == (1, 5)


@pytest.mark.parametrize("wrong", [5, "text", None])
def test_the_rest_of_the_places_is_a_list(wrong: object) -> None:
    def task(*rest: int) -> None: ...

    with pytest.raises(TypeError, match=r"\*rest is changed to a list or a tuple"):
        with_changes(task, ((), {}), {"rest": wrong})


def test_a_healer_may_give_all_arguments_back_with_one_changed(hive: Hive) -> None:
    seen: list[Any] = []

    @hive.step
    async def work(*parts: str, depth: int = 1, **more: str) -> str:
        seen.append((parts, depth, more))
        if depth < 2:
            raise ValueError("too flat")
        return "done"

    @hive.workflow
    async def flow() -> str:
        return await work("a", "b", colour="red")

    @hive.healer(ValueError)
    def deeper(failure: Failure, arguments: dict[str, Any]) -> dict[str, Any]:
        return {**arguments, "depth": arguments["depth"] + 1}

    assert hive.run_sync(flow, run_id="r") == "done"
    assert seen == [(("a", "b"), 1, {"colour": "red"}), (("a", "b"), 2, {"colour": "red"})]


class Rules:
    """Forbids one path, and notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str | None] = []

    def check(
        self, agent: Any, tool_name: str, target_path: str | None = None, action: str = ""
    ) -> Any:
        del agent, tool_name, action
        self.asked.append(target_path)
        allowed = target_path != "/secret"
        return SimpleNamespace(allowed=allowed, violation_type=None, message="keep out")


def test_changed_arguments_are_checked_by_the_policy(tmp_path: Path) -> None:
    rules, seen = Rules(), list[str]()
    with Hive(tmp_path / "state", quick_config(), enforcer=rules) as hive:

        @hive.step(max_attempts=2)
        async def read(path: str) -> str:
            seen.append(path)
            if path == "/empty":
                raise ValueError("nothing there")
            return path

        @hive.workflow
        async def flow() -> str:
            return await read("/empty")

        hive.healer(ValueError, name="daring")(lambda: {"path": "/secret"})
        hive.healer(ValueError, name="modest")(lambda: {"path": "/public"})
        assert hive.run_sync(flow, run_id="r") == "/public"
        (tried,) = (each for each in events(hive) if isinstance(each, RepairTried))
    assert (seen, rules.asked) == (["/empty", "/public"], ["/empty", "/secret", "/public"])
    assert (tried.healer, str(tried.error)[:29]) == ("modest", "daring: GovernanceViolation: ")


def test_an_executors_task_gets_all_arguments_back_with_one_changed() -> None:
    seen: list[Any] = []

    class Deeper:
        name = "deeper"
        handles = frozenset(FailureType)

        def propose(self, failure: Failure, workspace: object) -> Fix:
            arguments = failure.context["arguments"]
            return Fix("go deeper", arguments={**arguments, "depth": 2})

    def work(*parts: str, depth: int = 1, **more: str) -> str:
        seen.append((parts, depth, more))
        if depth < 2:
            raise ValueError("too flat")
        return "done"

    engine = SelfHealingEngine(healers=[Deeper()])
    executor = PersonaExecutor(quick_config(), healing_engine=engine)
    execute(executor, work, "work", "a", colour="red")
    assert seen == [(("a",), 1, {"colour": "red"}), (("a",), 2, {"colour": "red"})]
