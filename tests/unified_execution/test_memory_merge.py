"""A persona's memory that steps change at the same time: no one undoes what another did."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

import pytest

from maestro_hive.engine.context import current, merge
from maestro_hive.unified_execution import PersonaExecutor, StatePersistence
from tests.tables import for_each

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from maestro_hive.unified_execution import ExecutionConfig


class Steps:
    """Steps of one persona that are executed at the same time, in an order that a test decides."""

    def __init__(self, config: ExecutionConfig, *, durable: bool) -> None:
        state = StatePersistence(config, "w") if durable else None
        self.executor = PersonaExecutor(config, "p", state_persistence=state)
        self._close: Callable[[], None] = state.shutdown if state else lambda: None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def start_with(self, **memory: Any) -> None:
        async def remember() -> None:
            current().memory.update(memory)

        asyncio.run(self.executor.execute(remember, "start"))

    def together(self, *bodies: Callable[[Turns], Awaitable[object]]) -> None:
        async def execute() -> None:
            turns = Turns()
            await asyncio.gather(
                *(
                    self.executor.execute(lambda body=body: body(turns), f"step {number}")
                    for number, body in enumerate(bodies)
                )
            )

        asyncio.run(execute())

    def memory(self) -> dict[str, Any]:
        found: dict[str, Any] = {}

        async def read() -> None:
            found.update(current().memory)

        asyncio.run(self.executor.options(key="read").execute(read, "read"))
        return found


class Turns:
    """Events by name, for steps that wait for each other."""

    def __init__(self) -> None:
        self._events: dict[str, asyncio.Event] = {}

    def __getitem__(self, name: str) -> asyncio.Event:
        return self._events.setdefault(name, asyncio.Event())


@pytest.fixture(params=["durable", "in memory"])
def steps(request: pytest.FixtureRequest, config: ExecutionConfig) -> Steps:
    return Steps(config, durable=request.param == "durable")


def append(key: str, item: object, mine: str, other: str) -> Callable[[Turns], Awaitable[None]]:
    """Return a step that reads a list, and appends to it when another has read it too."""

    async def body(turns: Turns) -> None:
        log = current().memory[key]
        turns[mine].set()
        await turns[other].wait()
        log.append(item)

    return body


def test_both_items_are_there_that_two_steps_append(steps: Steps) -> None:
    with steps:
        steps.start_with(log=["first"])
        steps.together(append("log", "a", "A", "B"), append("log", "b", "B", "A"))
        log = steps.memory()["log"]
        assert (log[0], sorted(log)) == ("first", ["a", "b", "first"])


def test_equal_items_are_both_there(steps: Steps) -> None:
    with steps:
        steps.start_with(log=[])
        steps.together(append("log", "same", "A", "B"), append("log", "same", "B", "A"))
        assert steps.memory()["log"] == ["same", "same"]


def test_a_list_that_both_make_has_what_both_put_in(steps: Steps) -> None:
    have_looked = asyncio.Barrier(2)

    async def make(_: Turns) -> None:
        assert current().memory.get("log") is None
        await have_looked.wait()
        current().memory.setdefault("log", []).append("one")

    with steps:
        steps.together(make, make)
        assert steps.memory()["log"] == ["one", "one"]


def test_members_of_a_dictionary_are_changed_one_by_one(steps: Steps) -> None:
    async def first(turns: Turns) -> None:
        files = current().memory["files"]
        turns["read"].set()
        await turns["changed"].wait()
        files["a"] = 1
        del files["gone"]
        files["deep"]["list"].append("a")

    async def second(turns: Turns) -> None:
        await turns["read"].wait()
        current().memory["files"]["b"] = 2
        current().memory["files"]["deep"]["list"].append("b")
        current().memory["saved"] = True
        turns["changed"].set()

    with steps:
        steps.start_with(files={"gone": 0, "stays": 0, "deep": {"list": []}})
        steps.together(first, second)
        assert steps.memory()["files"] == {
            "stays": 0, "deep": {"list": ["b", "a"]}, "b": 2, "a": 1,
        }  # fmt: skip


def test_what_is_in_hand_is_saved_although_others_changed_it_meanwhile(steps: Steps) -> None:
    async def first(turns: Turns) -> None:
        memory = current().memory
        log = memory["log"]
        log.append("one")
        turns["read"].set()
        await turns["changed"].wait()
        memory["other"] = 1  # saves "one", and sees what the other step did
        assert memory["log"] == ["theirs", "one"]
        log.append("two")  # in hand since before
        memory["log"].append("three")

    async def second(turns: Turns) -> None:
        await turns["read"].wait()
        current().memory["log"].append("theirs")
        current().memory["second"] = True
        turns["changed"].set()

    with steps:
        steps.start_with(log=[])
        steps.together(first, second)
        assert sorted(steps.memory()["log"]) == ["one", "theirs", "three", "two"]


def test_a_value_that_nobody_else_changes_stays_the_same_object(steps: Steps) -> None:
    async def work() -> None:
        memory = current().memory
        log = memory["log"]
        log.append(1)
        memory["other"] = 1
        assert memory["log"] is log
        memory["log"] = log
        assert memory["log"] is log

    with steps:
        steps.start_with(log=[])
        assert asyncio.run(steps.executor.execute(work, "work")).success
        assert steps.memory()["log"] == [1]


def test_a_value_that_is_set_replaces_what_is_in_hand(steps: Steps) -> None:
    async def work() -> None:
        memory = current().memory
        old = memory["log"]
        memory["log"] = ["new"]
        old.append("lost, as from any dictionary")

    with steps:
        steps.start_with(log=[])
        assert asyncio.run(steps.executor.execute(work, "work")).success
        assert steps.memory()["log"] == ["new"]


def test_a_change_inside_a_key_that_another_deleted_brings_it_back(steps: Steps) -> None:
    async def first(turns: Turns) -> None:
        log = current().memory["log"]
        turns["read"].set()
        await turns["deleted"].wait()
        log.append("a")

    async def second(turns: Turns) -> None:
        await turns["read"].wait()
        del current().memory["log"]
        turns["deleted"].set()

    with steps:
        steps.start_with(log=["first"])
        steps.together(first, second)
        assert steps.memory()["log"] == ["first", "a"]


@for_each(
    "before, mine, theirs, merged",
    [
        ([1], [1, 2], [1, 3], [1, 3, 2]),
        ([1, 2], [2], [1, 2, 3], [2, 3]),
        ([1, 2], [1, 2, 3], [2], [2, 3]),
        ([1, 2], [5, 2, 3], [1, 6, 4], [5, 6, 4, 3]),
        ([1, 2], [2], [1], [2]),
        ([{"n": 1}], [{"n": 1, "a": 2}], [{"n": 3}], [{"n": 3, "a": 2}]),
        ({"a": 1}, {"a": 2}, {"a": 3}, {"a": 2}),
        ({"a": 1}, {}, {"a": 1, "b": 2}, {"b": 2}),
        ({"a": 1}, {"a": 1, "c": 3}, {}, {"c": 3}),
        ({"a": 1}, {"a": 5}, {}, {"a": 5}),
        ({}, {"l": [1]}, {"l": [2]}, {"l": [2, 1]}),
        ({}, {"l": 1}, {"l": [2]}, {"l": 1}),
        ({1, 2}, {1, 3}, {1, 2, 4}, {1, 3, 4}),
        ([1], {"a": 1}, [1, 2], {"a": 1}),
        (1, 1, 2, 2),
        ([True], [1], [True, 2], [1, 2]),
    ],
)
def test_changes_are_merged(before: Any, mine: Any, theirs: Any, merged: Any) -> None:
    found = merge(before, mine, theirs)
    assert found == merged
    assert repr(found) == repr(merged)
