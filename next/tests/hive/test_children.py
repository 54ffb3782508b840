"""Workflows that call workflows."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.kernel.errors import (
    ConfigurationError,
    MaestroError,
    OutsideRunError,
    RunFailedError,
)
from tests.hive.conftest import quick_hive, status

if TYPE_CHECKING:
    from pathlib import Path

    from maestro_hive.hive.hive import Hive


class Family:
    """A parent with children, one of which fails while ``broken``."""

    def __init__(self, hive: Hive, *, broken: bool = False) -> None:
        self.calls: Counter[str] = Counter()
        self.hive = hive
        self.broken = broken

        @hive.step(max_attempts=1)
        async def work(name: str) -> str:
            self.calls[name] += 1
            if self.broken and name == "b":
                raise ValueError("no")
            return name.upper()

        @hive.workflow
        async def child(name: str) -> str:
            self.calls[f"child {name}"] += 1
            return await work(name)

        @hive.workflow
        async def parent(names: list[str]) -> list[str]:
            self.calls["parent"] += 1
            return list(await asyncio.gather(*(child(name) for name in names)))

        self.child, self.parent = child, parent


def test_a_child_is_a_run_of_its_own(hive: Hive) -> None:
    family = Family(hive)
    assert hive.run_sync(family.parent, ["a", "b", "a"], run_id="r") == ["A", "B", "A"]
    infos = {info.run_id: info for info in hive.runs()}
    assert len(infos) == 4
    assert [info.workflow for name, info in infos.items() if name != "r"] == ["child"] * 3
    assert all(name == "r" or name.startswith("r/child.") for name in infos)
    assert {info.status for info in infos.values()} == {"success"}


def test_the_failure_of_a_child_is_stored_and_retried_with_its_parent(folder: Path) -> None:
    with quick_hive(folder) as hive:
        family = Family(hive, broken=True)
        with pytest.raises(RunFailedError, match=r"run 'r' failed: RunFailedError: run 'r/child\."):
            hive.run_sync(family.parent, ["a", "b"], run_id="r")
    with quick_hive(folder) as hive:
        family = Family(hive)
        hive.retry("r")
        assert hive.run_sync(family.parent, ["a", "b"], run_id="r") == ["A", "B"]
        assert family.calls["a"] == 0
        assert family.calls["child a"] <= 1
        assert family.calls["b"] == 1


def test_a_parent_may_catch_what_its_child_raises(hive: Hive) -> None:
    family = Family(hive, broken=True)

    @hive.workflow
    async def forgiving() -> str:
        try:
            return await family.child("b")
        except RunFailedError as error:
            return error.error_type

    assert hive.run_sync(forgiving) == "ValueError"


def test_children_of_different_parents_are_different_however_long_their_names(hive: Hive) -> None:
    family = Family(hive)
    for last in "xy":
        hive.run_sync(family.parent, ["a"], run_id="r" * 127 + last)
    assert family.calls["a"] == 2


def test_every_leaf_of_a_deep_family_is_executed(hive: Hive) -> None:
    leaves: list[str] = []

    @hive.workflow
    async def node(depth: int, path: str) -> int:
        if not depth:
            leaves.append(path)
            return 1
        return sum(await asyncio.gather(*(node(depth - 1, "same") for _ in range(2))))

    assert hive.run_sync(node, 6, "same", run_id="a-rather-long-name-of-a-run") == 64
    assert len(leaves) == 64


def test_a_workflow_of_another_hive_runs_with_all_its_parts_where_it_is_run(
    hive: Hive, tmp_path: Path
) -> None:
    with quick_hive(tmp_path / "other") as other:
        theirs = Family(other)

        @hive.workflow
        async def mixed() -> str:
            return await theirs.child("a")

        assert hive.run_sync(mixed, run_id="m") == "A"
        assert hive.run_sync(theirs.parent, ["b"], run_id="p") == ["B"]
        assert asyncio.run(hive.resume("p")) == ["B"]
        assert len(hive.runs()) == 4
        assert other.runs() == []

        @hive.workflow(name="child")
        async def namesake() -> None: ...

        with pytest.raises(ConfigurationError, match="two workflows 'child'"):
            hive.run_sync(theirs.child, "a")


def test_a_run_inside_a_workflow_is_refused_with_the_way_out(hive: Hive) -> None:
    family = Family(hive)

    @hive.workflow
    async def runs_another() -> str:
        return await hive.run(family.child, "a", run_id="other")

    with pytest.raises(RunFailedError, match="by calling it") as caught:
        hive.run_sync(runs_another)
    assert isinstance(caught.value.__cause__, OutsideRunError)


@dataclass
class Finding:
    """What a child returns, of a class that a later process may not import."""

    text: str


def test_a_result_of_a_child_that_cannot_be_read_suspends_its_parent(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def define(hive: Hive, *, is_first: bool) -> Any:
        @hive.workflow
        async def search() -> Finding:
            return Finding("found")

        @hive.workflow
        async def parent() -> str:
            try:
                found = await search()
            except Exception as error:
                seen.append(type(error).__name__)
                raise
            if is_first:
                raise ValueError("to be retried")
            return found.text

        return parent

    with quick_hive(folder) as hive:
        with pytest.raises(RunFailedError):
            hive.run_sync(define(hive, is_first=True), run_id="r")
        hive.retry("r")
    with quick_hive(folder) as hive:
        parent = define(hive, is_first=False)
        with monkeypatch.context() as patched:
            patched.delattr(sys.modules[__name__], "Finding")
            with pytest.raises(MaestroError, match="Finding"):
                hive.run_sync(parent, run_id="r")
        assert status(hive) != "failed"
        assert hive.run_sync(parent, run_id="r") == "found"
    assert not seen
