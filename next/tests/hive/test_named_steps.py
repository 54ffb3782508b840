"""One step under several names, and the arguments that its attempts get."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from maestro_hive.journal.entries import AttemptStarted
from tests.hive.conftest import recorded

if TYPE_CHECKING:
    from maestro_hive.hive.hive import Hive


def test_a_step_under_another_name_is_another_step_with_the_same_options(hive: Hive) -> None:
    called: list[tuple[str, int]] = []

    @hive.step(persona="writer", max_attempts=2)
    async def draft(number: int) -> int:
        called.append(("draft", number))
        if len(called) % 2:
            raise ConnectionError("once")
        return number

    @hive.workflow
    async def write() -> list[int]:
        first, other = draft.named("first"), draft.named("other")
        return [await first(1), await other(1), await first(1)]

    assert hive.run_sync(write, run_id="r") == [1, 1, 1]
    assert len(called) == 6
    entries = recorded(hive, "r")
    started = [each for each in entries if isinstance(each, AttemptStarted)]
    assert [each.name for each in started[::2]] == ["first", "other", "first"]
    assert {each.persona for each in started} == {"writer"}


def test_what_a_workflow_changes_while_a_step_waits_does_not_reach_the_step(hive: Hive) -> None:
    seen: list[Any] = []

    @hive.step(max_concurrency=1)
    async def work(given: dict[str, Any]) -> None:
        seen.append(given)
        await asyncio.sleep(0)

    @hive.workflow
    async def program() -> None:
        first: dict[str, list[Any]] = {"items": [1]}
        second: dict[str, list[Any]] = {"items": [2]}
        calls = [asyncio.create_task(work(each)) for each in (first, second)]
        await asyncio.sleep(0)
        first["items"].append("late")
        second["items"].append("late")
        await asyncio.gather(*calls)

    hive.run_sync(program)
    assert sorted(each["items"] for each in seen) == [[1], [2]]


def test_a_key_by_a_function_gets_the_arguments_however_they_are_given(hive: Hive) -> None:
    keys: list[tuple[int, int]] = []

    def key(left: int, right: int) -> str:
        keys.append((left, right))
        return f"{left}-{right}"

    @hive.step(key=key)
    async def add(left: int, right: int) -> int:
        return left + right

    @hive.workflow
    async def program() -> list[int]:
        return [await add(1, 2), await add(1, right=2), await add(left=2, right=2)]

    assert hive.run_sync(program) == [3, 3, 4]
    assert keys == [(1, 2), (1, 2), (2, 2)]
