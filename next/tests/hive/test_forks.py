"""A run forked from another: what stays completed, and what runs again."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.attempt import current
from maestro_hive.kernel.errors import (
    ConfigurationError,
    RunFailedError,
    RunMismatchError,
    UnknownRunError,
)
from tests.hive.conftest import quick_hive
from tests.python_processes import run_python

if TYPE_CHECKING:
    from pathlib import Path

    from maestro_hive.hive.hive import Hive


@dataclasses.dataclass(frozen=True)
class Order:
    amount: int


STEPS = [f"step{number}" for number in range(1, 11)]


class Chain:
    """Ten steps, each fed with the one before; the seventh looks at an argument, too."""

    def __init__(self, hive: Hive) -> None:
        self.called: list[str] = []
        self.hive = hive
        self.remembered: dict[str, Any] = {}

        def make(name: str) -> Any:
            @hive.step(name=name, persona="worker")
            async def step(value: int, factor: int = 1) -> int:
                self.called.append(name)
                self.remembered[name] = dict(current().memory)
                current().memory[name] = len(self.called)
                return value * factor + 1

            return step

        steps = {name: make(name) for name in STEPS}

        @hive.workflow
        async def chain(start: int, factor: int = 1, *, even: bool = False) -> int:
            value = start
            for name in STEPS:
                value = (
                    await steps[name](value, factor)
                    if name == "step7"
                    else await steps[name](value)
                )
                if name == "step7" and even:
                    value -= value % 2
            return value

        self.chain = chain


@pytest.fixture
def chain(hive: Hive) -> Chain:
    made = Chain(hive)
    assert hive.run_sync(made.chain, 0, run_id="r") == 10
    assert made.called == STEPS
    made.called.clear()
    return made


def resumed(chain: Chain, run_id: str) -> Any:
    return asyncio.run(chain.hive.resume(run_id))


def test_steps_before_are_stored_and_those_after_run_again_if_their_input_changed(
    chain: Chain,
) -> None:
    new = chain.hive.fork("r", from_step="step7", factor=2)
    assert resumed(chain, new) == 16
    assert chain.called == STEPS[6:]


def test_steps_after_are_stored_if_their_input_came_out_the_same(chain: Chain) -> None:
    new = chain.hive.fork("r", from_step=7)
    assert resumed(chain, new) == 10
    assert chain.called == ["step7"]


def test_a_changed_input_that_no_step_sees_runs_nothing_again(chain: Chain) -> None:
    new = chain.hive.fork("r", new_run_id="copy", even=False)
    assert new == "copy"
    assert resumed(chain, "copy") == 10
    assert chain.called == []


def test_the_original_stays_as_it_is(chain: Chain) -> None:
    new = chain.hive.fork("r", from_step="step1")
    resumed(chain, new)
    chain.called.clear()
    assert chain.hive.run_sync(chain.chain, 0, run_id="r") == 10
    assert chain.called == []


def test_a_fork_can_be_run_with_its_changed_arguments_and_only_with_those(chain: Chain) -> None:
    new = chain.hive.fork("r", from_step="step7", factor=2)
    with pytest.raises(ConfigurationError, match="other arguments"):
        chain.hive.run_sync(chain.chain, 0, run_id=new)
    assert chain.hive.run_sync(chain.chain, 0, 2, run_id=new) == 16


def test_memory_is_what_it_was_before_the_step(chain: Chain) -> None:
    new = chain.hive.fork("r", from_step="step4")
    resumed(chain, new)
    assert chain.remembered["step4"] == {"step1": 1, "step2": 2, "step3": 3}


def test_a_failed_run_can_be_forked_and_its_failures_are_not_taken_along(folder: Path) -> None:
    with quick_hive(folder) as hive:
        calls: list[str] = []

        @hive.step(max_attempts=1)
        async def maybe(good: bool) -> str:
            calls.append(str(good))
            if not good:
                raise ValueError("no")
            return "yes"

        @hive.workflow
        async def work(good: bool) -> str:
            await maybe(True)
            return await maybe(good) if not good else "fine"

        with pytest.raises(RunFailedError):
            hive.run_sync(work, False, run_id="r")
        assert asyncio.run(hive.resume(hive.fork("r", good=True))) == "fine"
        assert calls.count("True") == 1


def test_children_that_succeeded_are_stored(hive: Hive) -> None:
    calls: list[int] = []

    @hive.workflow
    async def child(number: int) -> int:
        calls.append(number)
        return number * 2

    @hive.step
    async def add(one: int, two: int) -> int:
        return one + two

    @hive.workflow
    async def parent(number: int) -> int:
        return await add(await child(1), number)

    assert hive.run_sync(parent, 5, run_id="r") == 7
    assert asyncio.run(hive.resume(hive.fork("r", number=6))) == 8
    assert calls == [1]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"from_step": "step77"}, r"has no step 'step77'; it has: step1, step2"),
        ({"from_step": "step7#2"}, r"has no step 'step7#2'"),
        ({"from_step": 99}, r"has no step 99"),
        ({"speed": 3}, r"has no parameter speed; it has: start, factor, even"),
        ({"new_run_id": "r"}, r"there is a run 'r' already"),
        ({"new_run_id": "../r"}, r"run id"),
    ],
)
def test_a_fork_that_cannot_be_is_refused_and_leaves_nothing(
    chain: Chain, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        chain.hive.fork("r", **options)
    assert len(chain.hive.runs()) == 1


def test_a_fork_of_no_run_says_so(hive: Hive) -> None:
    with pytest.raises(UnknownRunError, match="'nobody'"):
        hive.fork("nobody")


def test_arguments_are_changed_by_name_whatever_kind_they_are(hive: Hive) -> None:
    @hive.workflow
    async def mixed(a: int, *rest: int, k: int = 0, **more: int) -> list[Any]:
        return [a, rest, k, more]

    hive.run_sync(mixed, 1, 2, 3, k=9, run_id="r")
    assert resumed_on(hive, hive.fork("r", k=5)) == [1, (2, 3), 5, {}]
    assert resumed_on(hive, hive.fork("r", a=7, other=8)) == [7, (2, 3), 9, {"other": 8}]


def resumed_on(hive: Hive, run_id: str) -> Any:
    return asyncio.run(hive.resume(run_id))


def test_whoever_forks_need_not_have_the_classes_of_the_arguments(folder: Path) -> None:
    with quick_hive(folder) as hive:

        @hive.workflow
        async def pay(order: Order, times: int = 1) -> list[Order]:
            return [order] * times

        hive.run_sync(pay, Order(3), run_id="r")
        script = (
            "import sys\n"
            "from maestro_hive.hive.hive import Hive\n"
            "hive = Hive(sys.argv[1])\n"
            "@hive.workflow\n"
            "async def pay(order, times=1): ...\n"
            "hive.fork('r', new_run_id='s'); hive.fork('r', new_run_id='t', times=2)\n"
        )
        run_python(script, folder, check=True)
        assert resumed_on(hive, "s") == [Order(3)]
        assert resumed_on(hive, "t") == [Order(3), Order(3)]


def test_a_workflow_that_takes_other_arguments_by_now_is_refused_before_anything(
    folder: Path,
) -> None:
    with quick_hive(folder) as hive:

        @hive.workflow(name="work")
        async def old(part: str) -> None:
            raise ValueError(part)

        with pytest.raises(RunFailedError):
            hive.run_sync(old, "x", run_id="r")
        hive.retry("r")
    with quick_hive(folder) as hive:

        @hive.workflow(name="work")
        async def new(piece: str) -> None: ...

        with pytest.raises(RunMismatchError, match="do not fit the workflow"):
            resumed_on(hive, "r")
        assert [info.status for info in hive.runs()] == ["stopped"]


def test_a_run_that_was_enqueued_by_name_is_forked_with_other_arguments(folder: Path) -> None:
    with quick_hive(folder) as without:
        without.enqueue("nap", run_id="none")
        without.enqueue("nap", 7, run_id="by-place")
        without.enqueue("nap", n=7, run_id="by-name")
    with quick_hive(folder) as hive:

        @hive.workflow
        async def nap(n: int) -> int:
            return n

        for run_id in ("none", "by-place", "by-name"):
            assert resumed_on(hive, hive.fork(run_id, n=3)) == 3
        with pytest.raises(ConfigurationError, match="has no parameter m; it has: n"):
            hive.fork("by-place", m=4)


def test_a_run_is_forked_whose_step_was_retried(hive: Hive) -> None:
    is_broken = True
    calls: list[int] = []

    @hive.step(max_attempts=1)
    async def check(number: int) -> int:
        calls.append(number)
        if is_broken:
            raise ValueError("broken")
        return number

    @hive.workflow
    async def work(number: int) -> int:
        return await check(1) + number

    with pytest.raises(RunFailedError):
        hive.run_sync(work, 1, run_id="r")
    is_broken = False
    hive.retry("r")
    assert hive.run_sync(work, 1, run_id="r") == 2
    assert asyncio.run(hive.resume(hive.fork("r", number=2))) == 3
    assert calls == [1, 1]
