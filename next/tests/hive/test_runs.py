"""Runs of workflows: what is recorded, and what a run_id means."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.attempt import current
from maestro_hive.hive.hive import Hive
from maestro_hive.kernel.errors import (
    ConfigurationError,
    EncodeError,
    InvalidIdentifierError,
    OutsideRunError,
    RunCancelledError,
    RunFailedError,
    RunMismatchError,
    StoreClosedError,
    UnknownRunError,
)
from tests.hive.conftest import quick_hive
from tests.tables import for_each

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Part:
    name: str
    size: int


class Factory:
    """A workflow of some steps, counting how often each is really called."""

    def __init__(self, hive: Hive) -> None:
        self.calls: Counter[str] = Counter()
        self.broken = False
        self.hive = hive

        @hive.step(persona="architect")
        async def design(feature: str) -> list[Part]:
            self.calls["design"] += 1
            return [Part(f"{feature}-{each}", each) for each in range(3)]

        @hive.step(persona="developer", max_attempts=4, rounds=2)
        async def implement(part: Part) -> str:
            self.calls[part.name] += 1
            if self.broken and part.size == 1:
                raise ValueError(f"{part.name} does not fit")
            return part.name.upper()

        @hive.workflow
        async def build(feature: str, *, loud: bool = False) -> list[str]:
            """Build a feature."""
            self.calls["build"] += 1
            made = await asyncio.gather(*(implement(part) for part in await design(feature)))
            return [f"{each}!" for each in made] if loud else made

        self.design, self.implement, self.build = design, implement, build


def run(factory: Factory, *args: Any, **kwargs: Any) -> Any:
    return factory.hive.run_sync(factory.build, *args, **kwargs)


def test_a_workflow_returns_what_its_function_returns(hive: Hive) -> None:
    assert run(Factory(hive), "page") == ["PAGE-0", "PAGE-1", "PAGE-2"]


def test_a_finished_run_returns_its_recorded_result_and_calls_nothing(folder: Path) -> None:
    with quick_hive(folder) as hive:
        first = run(Factory(hive), "page", run_id="r")
    with quick_hive(folder) as hive:
        again = Factory(hive)
        assert run(again, "page", run_id="r") == first
        assert not again.calls


def test_without_a_run_id_each_run_is_another(hive: Hive) -> None:
    factory = Factory(hive)
    run(factory, "page")
    run(factory, "page")
    assert factory.calls["design"] == 2
    assert len({info.run_id for info in hive.runs()}) == 2


def test_a_failed_run_raises_its_recorded_failure_until_it_is_retried(folder: Path) -> None:
    with quick_hive(folder) as hive:
        factory = Factory(hive)
        factory.broken = True
        with pytest.raises(RunFailedError, match="page-1 does not fit") as caught:
            run(factory, "page", run_id="r")
        assert type(caught.value.__cause__) is ValueError
        assert factory.calls["page-1"] == 4  # two rounds of two attempts
    with quick_hive(folder) as hive:
        factory = Factory(hive)
        with pytest.raises(RunFailedError, match="maestro retry r") as again:
            run(factory, "page", run_id="r")
        assert again.value.error_type == "ValueError"
        assert "test_runs.py" in again.value.error_traceback
        assert not factory.calls
        hive.retry("r")
        assert [info.status for info in hive.runs()] == ["stopped"]
        assert run(factory, "page", run_id="r") == ["PAGE-0", "PAGE-1", "PAGE-2"]
        assert factory.calls == {"build": 1, "page-1": 1}


@pytest.mark.parametrize("args, kwargs", [(("other",), {}), (("page",), {"loud": True})])
def test_a_run_id_with_other_arguments_is_refused(
    hive: Hive, args: tuple[str], kwargs: dict[str, bool]
) -> None:
    factory = Factory(hive)
    run(factory, "page", run_id="r")
    with pytest.raises(RunMismatchError, match=r"other arguments.*page"):
        run(factory, *args, run_id="r", **kwargs)


def test_the_same_arguments_by_name_or_by_place_are_the_same(hive: Hive) -> None:
    factory = Factory(hive)
    first = run(factory, "page", run_id="r")
    assert run(factory, feature="page", run_id="r") == first


def test_a_run_id_of_another_workflow_is_refused(hive: Hive) -> None:
    @hive.workflow
    async def other(feature: str) -> None: ...

    run(Factory(hive), "page", run_id="r")
    with pytest.raises(RunMismatchError, match="belongs to the workflow 'build', not to 'other'"):
        hive.run_sync(other, "page", run_id="r")


def test_resume_needs_the_run_id_alone(folder: Path) -> None:
    with quick_hive(folder) as hive:
        factory = Factory(hive)
        factory.broken = True
        with pytest.raises(RunFailedError):
            run(factory, "page", run_id="r", loud=True)
        hive.retry("r")
    with quick_hive(folder) as hive:
        Factory(hive)
        assert asyncio.run(hive.resume("r")) == ["PAGE-0!", "PAGE-1!", "PAGE-2!"]


def test_resume_of_an_unknown_run_or_workflow_says_so(folder: Path) -> None:
    with quick_hive(folder) as hive:
        run(Factory(hive), "page", run_id="r")
    with quick_hive(folder) as hive:
        with pytest.raises(UnknownRunError, match="no run 'nobody'"):
            asyncio.run(hive.resume("nobody"))
        with pytest.raises(ConfigurationError, match="workflow 'build', which this Hive does not"):
            asyncio.run(hive.resume("r"))


def test_retry_of_a_run_that_succeeded_is_refused(hive: Hive) -> None:
    run(Factory(hive), "page", run_id="r")
    with pytest.raises(ConfigurationError, match="has succeeded"):
        hive.retry("r")


@pytest.mark.parametrize("run_id", ["../x", "", "a/b", "x" * 129])
def test_a_run_id_that_is_no_safe_name_is_refused(hive: Hive, run_id: str) -> None:
    with pytest.raises(InvalidIdentifierError):
        run(Factory(hive), "page", run_id=run_id)


# --- which step is which --------------------------------------------------------------------------


def test_equal_calls_are_told_apart_by_their_order(folder: Path) -> None:
    calls = []

    def rolls(hive: Hive) -> list[int]:
        @hive.step
        async def roll(sides: int) -> int:
            calls.append(sides)
            return len(calls)

        @hive.workflow
        async def game(last: bool) -> list[int]:
            first = [await roll(6), await roll(6), await roll(8)]
            return [*first, *(await asyncio.gather(roll(6), roll(6)) if last else [])]

        return hive.run_sync(game, True, run_id="r")

    with quick_hive(folder) as hive:
        first = rolls(hive)
        hive.fork("r", new_run_id="s")
    assert first == [1, 2, 3, 4, 5]
    with quick_hive(folder) as hive:
        rolls(hive)
        assert asyncio.run(hive.resume("s")) == first
        assert len(calls) == 5


def test_a_key_gives_the_identity_by_hand(hive: Hive) -> None:
    calls = []

    @hive.step(key="invoice-{number}")
    async def pay(number: int, note: str) -> str:
        calls.append(number)
        return note

    @hive.step(key=lambda number: f"n{number % 10}")
    def last_digit(number: int) -> int:
        calls.append(number)
        return number

    @hive.workflow
    async def month() -> list[Any]:
        paid = [await pay(1, "a"), await pay(1, note="b"), await pay(2, "c")]
        return [*paid, await last_digit(11), await last_digit(21)]

    assert hive.run_sync(month) == ["a", "a", "c", 11, 11]
    assert calls == [1, 2, 11]


def test_a_key_that_cannot_be_made_names_the_step(hive: Hive) -> None:
    with pytest.raises(ConfigurationError, match="'pay': key names 'missing'"):

        @hive.step(key="{missing}")
        async def pay(number: int) -> None: ...


def test_steps_work_in_task_groups_loops_and_branches(hive: Hive) -> None:
    @hive.step
    def double(number: int) -> int:
        return number * 2

    @hive.workflow
    async def work(numbers: list[int]) -> int:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(double(each)) for each in numbers]
        total = sum(task.result() for task in tasks)
        while total < 1000:
            total = await double(total) if total % 2 == 0 else total + 1
        return total

    assert hive.run_sync(work, [1, 2, 3]) == 1536


def test_plain_functions_are_steps_too_and_know_their_context(hive: Hive) -> None:
    @hive.step(persona="clerk")
    def note(text: str) -> tuple[str, int]:
        current().memory["last"] = text
        return current().persona, current().attempt

    @hive.workflow
    async def work() -> tuple[str, int]:
        return await note("x")

    assert hive.run_sync(work) == ("clerk", 1)


# --- errors that say what to do ---------------------------------------------------------------


def test_a_step_outside_a_run_says_what_to_do(hive: Hive) -> None:
    factory = Factory(hive)
    with pytest.raises(OutsideRunError, match="step 'design' is called outside of a workflow"):
        asyncio.run(factory.design("page"))
    with pytest.raises(OutsideRunError, match="workflow 'build' is called outside of a workflow"):
        asyncio.run(factory.build("page"))
    assert len(asyncio.run(factory.design.function("page"))) == 3


def test_a_wrong_call_fails_at_once_and_is_not_an_attempt(hive: Hive) -> None:
    factory = Factory(hive)

    @hive.workflow
    async def careless() -> None:
        await factory.design()  # type: ignore[call-arg]

    with pytest.raises(RunFailedError, match="missing a required argument: 'feature'"):
        hive.run_sync(careless)
    with pytest.raises(TypeError, match=r"build\(feature: .*missing a required argument"):
        hive.run_sync(factory.build)
    assert not factory.calls


def test_what_is_no_workflow_cannot_be_run(hive: Hive) -> None:
    async def plain() -> None: ...

    factory = Factory(hive)
    with pytest.raises(ConfigurationError, match="plain is not a workflow"):
        hive.run_sync(plain)
    with pytest.raises(ConfigurationError, match="is not a workflow"):
        hive.run_sync(factory.design, "page")


def test_a_workflow_that_is_not_async_is_refused_where_it_stands(hive: Hive) -> None:
    with pytest.raises(ConfigurationError, match="'plain' is not an async function"):

        @hive.workflow  # type: ignore[arg-type]
        def plain() -> None: ...


def test_two_steps_that_could_not_be_told_apart_are_refused(hive: Hive) -> None:
    @hive.step
    async def one() -> None: ...

    with pytest.raises(ConfigurationError, match="two steps 'one'"):

        @hive.step(name="one")
        async def two() -> None: ...


@for_each(
    "options, message",
    [
        ({"rate": "often"}, "often"),
        ({"max_concurrency": 0}, "max_concurrency"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"timeout": -1}, "timeout"),
        ({"on_ambiguous": "guess"}, "on_ambiguous"),
        ({"key": 3}, "key"),
        ({"retry_on": 7}, "retry_on"),
    ],
)
def test_bad_settings_of_a_step_are_named_where_it_stands(
    hive: Hive, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):

        @hive.step(**options)
        async def step() -> None: ...


def test_arguments_and_results_that_have_no_form_are_named(hive: Hive) -> None:
    @hive.workflow
    async def echo(value: Any) -> Any:
        return object() if value == "bad" else value

    with pytest.raises(EncodeError, match="the input of echo: value"):
        hive.run_sync(echo, object())
    with pytest.raises(RunFailedError, match="result"):
        hive.run_sync(echo, "bad")


def test_what_names_no_store_is_refused_and_so_is_a_closed_hive(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="named by a text or a Path"):
        Hive(3)  # type: ignore[arg-type]
    hive = Hive(folder)
    hive.close()
    hive.close()
    with pytest.raises(StoreClosedError, match="was closed"):
        hive.runs()


def test_run_sync_inside_a_loop_says_what_to_do_instead(hive: Hive) -> None:
    factory = Factory(hive)

    async def main() -> None:
        hive.run_sync(factory.build, "page")

    with pytest.raises(ConfigurationError, match=r"await hive\.run"):
        asyncio.run(main())


def test_making_a_hive_opens_nothing(folder: Path) -> None:
    Hive(folder)
    assert not folder.exists()


def test_everything_is_under_the_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAESTRO_CHECKPOINT_DIR", str(tmp_path / "elsewhere"))
    with Hive(folder) as hive:
        run(Factory(hive), "page")
        assert hive.config.state.checkpoint_dir == str(folder / "checkpoints")
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


# --- the same run twice at once ---------------------------------------------------------------


def test_who_asks_for_a_run_running_waits_for_that_one(hive: Hive) -> None:
    factory = Factory(hive)

    async def main() -> list[Any]:
        return await asyncio.gather(*(hive.run(factory.build, "p", run_id="r") for _ in range(3)))

    first, *others = asyncio.run(main())
    assert others == [first, first]
    assert factory.calls["build"] == 1


def test_who_asks_for_a_run_running_with_other_arguments_is_refused(hive: Hive) -> None:
    factory = Factory(hive)

    async def main() -> tuple[Any, Any]:
        return await asyncio.gather(
            hive.run(factory.build, "p", run_id="r"),
            hive.run(factory.build, "q", run_id="r"),
            return_exceptions=True,
        )

    first, second = asyncio.run(main())
    assert first == ["P-0", "P-1", "P-2"]
    assert isinstance(second, RunMismatchError)


def test_a_run_that_runs_itself_is_refused(hive: Hive) -> None:
    @hive.workflow
    async def again() -> None:
        await hive.run(again, run_id="r")

    with pytest.raises(RunFailedError, match="by calling it"):
        hive.run_sync(again, run_id="r")


# --- handles ----------------------------------------------------------------------------------


def test_a_handle_has_the_result_and_the_status(hive: Hive) -> None:
    factory = Factory(hive)

    async def main() -> None:
        handle = await hive.start(factory.build, "p", run_id="r")
        assert handle.status in ("pending", "running")
        assert await handle.result() == ["P-0", "P-1", "P-2"]
        assert handle.status == "success"
        assert await hive.handle("r").result() == ["P-0", "P-1", "P-2"]
        assert not handle.cancel()

    asyncio.run(main())


def test_a_handle_of_no_run_says_so(hive: Hive) -> None:
    with pytest.raises(UnknownRunError, match="'nobody'"):
        hive.handle("nobody")


def test_runs_are_listed_newest_first_by_status_and_workflow(hive: Hive) -> None:
    factory = Factory(hive)
    run(factory, "p", run_id="a")
    factory.broken = True
    with pytest.raises(RunFailedError):
        run(factory, "q", run_id="b")
    assert [(info.run_id, info.workflow, info.status) for info in hive.runs()] == [
        ("b", "build", "failed"),
        ("a", "build", "success"),
    ]
    assert [info.run_id for info in hive.runs("failed")] == ["b"]
    assert [info.run_id for info in hive.runs(status="success", workflow="build")] == ["a"]
    assert hive.runs(workflow="other") == []
    assert len(hive.runs(limit=1)) == 1


def test_a_limit_counts_only_the_runs_with_the_status(hive: Hive) -> None:
    factory = Factory(hive)
    run(factory, "p", run_id="a")
    fork = hive.fork("a")
    run(factory, "q", run_id="b")
    assert [info.run_id for info in hive.runs("stopped", limit=1)] == [fork]
    assert [info.run_id for info in hive.runs("success", limit=1)] == ["b"]


def test_a_cancelled_run_stays_cancelled_until_it_is_retried(hive: Hive) -> None:
    factory = Factory(hive)
    factory.broken = True
    with pytest.raises(RunFailedError):
        run(factory, "p", run_id="r")
    hive.retry("r")
    assert hive.cancel("r", "not needed")
    assert not hive.cancel("r")
    factory.broken = False
    with pytest.raises(RunCancelledError, match="not needed"):
        run(factory, "p", run_id="r")
    hive.retry("r")
    assert run(factory, "p", run_id="r") == ["P-0", "P-1", "P-2"]


# --- what else people try ---------------------------------------------------------------------


def test_a_step_that_changes_what_it_was_given_changes_a_copy(folder: Path) -> None:
    calls: list[int] = []

    def talk(hive: Hive) -> list[str]:
        @hive.step(max_attempts=2)
        async def ask(messages: list[str]) -> str:
            calls.append(len(messages))
            messages.append("(thinking)")
            if len(calls) == 2:
                raise ValueError("once")
            return f"reply {len(messages)}"

        @hive.workflow
        async def chat() -> list[str]:
            messages = ["question"]
            for _ in range(3):
                messages.append(await ask(messages))
            return messages

        return hive.run_sync(chat, run_id="r")

    with quick_hive(folder) as hive:
        first = talk(hive)
        assert first == ["question", "reply 2", "reply 3", "reply 4"]
        assert calls == [1, 2, 2, 3]
        hive.fork("r", new_run_id="s")
    with quick_hive(folder) as hive:
        talk(hive)
        assert asyncio.run(hive.resume("s")) == first
        assert len(calls) == 4


@pytest.mark.parametrize("options", [{"ignore": ("thing",)}, {"key": "one"}])
def test_what_cannot_be_copied_is_given_as_it_is(hive: Hive, options: dict[str, Any]) -> None:
    lock = threading.Lock()

    @hive.step(**options)
    async def same(thing: object) -> bool:
        return thing is lock

    @hive.workflow
    async def work() -> bool:
        return await same(lock)

    assert hive.run_sync(work)


def test_who_joined_a_run_continues_with_it_when_the_first_gives_up(hive: Hive) -> None:
    @hive.step
    async def slow() -> str:
        await asyncio.sleep(0.5)
        return "done"

    @hive.workflow
    async def work() -> str:
        return await slow()

    async def impatient() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await hive.run(work, run_id="r")

    async def main() -> str:
        first = asyncio.create_task(impatient())
        await asyncio.sleep(0.05)
        result = await hive.run(work, run_id="r")
        await first
        return result

    assert asyncio.run(main()) == "done"


def test_a_loop_that_was_closed_over_a_run_does_not_keep_it(hive: Hive) -> None:
    @hive.workflow
    async def work(seconds: float) -> str:
        await asyncio.sleep(0.01 if done else 60)
        return "done"

    done: list[bool] = []
    loop = asyncio.new_event_loop()

    async def start_and_wait() -> None:
        await hive.start(work, 60, run_id="r")
        await asyncio.sleep(0.2)

    loop.run_until_complete(start_and_wait())
    loop.close()
    done.append(True)
    assert hive.run_sync(work, 60, run_id="r") == "done"


def test_waiting_for_something_that_was_cancelled_is_a_failure(hive: Hive) -> None:
    @hive.workflow
    async def work() -> None:
        inner = asyncio.create_task(asyncio.sleep(60))
        await asyncio.sleep(0)
        inner.cancel()
        await inner

    with pytest.raises(RunFailedError, match="cancelled"):
        hive.run_sync(work, run_id="r")
    assert [info.status for info in hive.runs()] == ["failed"]


def test_a_parameter_may_be_called_workflow(hive: Hive) -> None:
    @hive.workflow
    async def work(workflow: str) -> str:
        return workflow

    assert hive.run_sync(work, workflow="x") == "x"


def test_what_cannot_be_a_step_is_refused_where_it_stands(hive: Hive) -> None:
    with pytest.raises(ConfigurationError, match="is a generator, and a step must return"):

        @hive.step
        async def numbers() -> Any:
            yield 1

    with pytest.raises(ConfigurationError, match="is a method, and a workflow must be a function"):

        class Team:
            @hive.workflow
            async def work(self, part: str) -> None: ...

    with pytest.raises(ConfigurationError, match="'self' and is no method"):

        @hive.step
        async def work(self: object) -> None: ...


@pytest.mark.parametrize("options", [{"status": "sucess"}, {"limit": -1}])
def test_listing_what_there_never_is_is_refused(hive: Hive, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        hive.runs(**options)


def test_steps_of_one_name_have_each_their_own_limit(hive: Hive) -> None:
    busy: Counter[str] = Counter()
    most: Counter[str] = Counter()

    def review(persona: str, limit: int) -> Any:
        @hive.step(persona=persona, name="review", max_concurrency=limit)
        async def step(number: int) -> None:
            busy[persona] += 1
            most[persona] = max(most[persona], busy[persona])
            await asyncio.sleep(0.02)
            busy[persona] -= 1

        return step

    writer, lawyer = review("writer", 50), review("lawyer", 1)

    @hive.workflow
    async def work() -> None:
        await writer(0)
        await asyncio.gather(*(lawyer(number) for number in range(5)))

    hive.run_sync(work)
    assert most["lawyer"] == 1
