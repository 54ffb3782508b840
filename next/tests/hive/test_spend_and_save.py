"""What a step saves while it works is durable when the statement returns."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.attempt import current
from maestro_hive.engine.errors import AttemptOverError
from maestro_hive.hive.hive import Hive
from maestro_hive.journal import values
from maestro_hive.journal.entries import PersonaSaved, ProgressSaved, Spent, value_text
from maestro_hive.kernel.errors import (
    ConfigurationError,
    EncodeError,
    OutsideRunError,
    RunFailedError,
)
from tests.hive.conftest import quick_config, recorded, store_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from maestro_hive.engine.context import StepContext
    from maestro_hive.journal.state import RunState


def in_the_journal(hive: Hive, run_id: str = "r") -> RunState:
    """Return the run as another process would read it now."""
    return hive.state(run_id)


def run(hive: Hive, *bodies: Callable[[], Any], **options: Any) -> list[Any]:
    """Run a workflow that executes these bodies as steps, one after another."""
    steps = [hive.step(name=f"s{at}", **options)(body) for at, body in enumerate(bodies)]

    @hive.workflow
    async def work() -> list[Any]:
        return [await step() for step in steps]

    found: list[Any] = hive.run_sync(work, run_id="r")
    return found


def in_threads(work: Callable[[int], object]) -> None:
    """Do something forty times, in eight threads that have the context of the step."""
    context = contextvars.copy_context()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: context.copy().run(work, number), range(40)))


# --- where it is ----------------------------------------------------------------------------------


def test_outside_of_a_step_it_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(OutsideRunError, match=r"body of a step.*copy_context\(\)\.run"):
        current()


def test_it_is_found_in_child_tasks_and_in_threads_that_were_given_the_context(hive: Hive) -> None:
    async def work() -> bool:
        here = current()

        async def child() -> StepContext:
            return current()

        found = list(await asyncio.gather(child(), asyncio.create_task(child())))
        found.append(await asyncio.to_thread(current))
        return all(each is here for each in found)

    assert run(hive, work) == [True]


def test_a_sync_step_is_not_on_the_loops_thread(hive: Hive) -> None:
    assert run(hive, lambda: threading.get_ident()) != [threading.get_ident()]  # noqa: PLW0108


def test_the_effect_key_is_the_same_for_every_attempt_and_process(folder: Path) -> None:
    keys: list[str] = []
    for stop in (True, False):
        with Hive(folder, quick_config()) as hive:

            async def work(stop: bool = stop) -> None:
                keys.append(current().effect_key)
                if stop and len(keys) == 2:
                    raise KeyboardInterrupt
                raise ValueError

            with pytest.raises(KeyboardInterrupt if stop else RunFailedError):
                run(hive, work, ignore=("stop",), max_attempts=3)
    assert len(keys) == 4
    assert len(set(keys)) == 1


# --- progress and spending ------------------------------------------------------------------------


@pytest.mark.parametrize("in_thread", [True, False])
def test_progress_is_durable_when_saved_and_given_to_the_next_attempt(
    hive: Hive, *, in_thread: bool
) -> None:
    seen: list[Any] = []

    def work() -> str:
        context = current()
        seen.append(context.progress)
        if context.attempt == 1:
            context.save_progress(files_created=["a.py"], current_step=1)
            (step,) = in_the_journal(hive).steps.values()
            assert step.progress is not None
            seen.append(values.decode(value_text(step.progress.progress)))
            context.save_progress(current_step=2)
            context.progress["current_step"] = 99
            assert context.progress["current_step"] == 2
            raise ValueError("no")
        return "done"

    async def on_the_loop() -> str:
        return work()

    assert run(hive, work if in_thread else on_the_loop) == ["done"]
    assert seen == [
        {},
        {"files_created": ["a.py"], "current_step": 1},
        {"files_created": ["a.py"], "current_step": 2},
    ]


def test_threads_of_a_step_do_not_undo_each_others_progress(hive: Hive) -> None:
    def work() -> int:
        in_threads(lambda number: current().save_progress(**{f"key {number}": number}))
        return len(current().progress)

    assert run(hive, work) == [40]


def test_what_was_spent_and_its_progress_are_one_transaction(hive: Hive) -> None:
    def work() -> dict[str, Any]:
        current().save_progress(other=1)
        current().spend(100, usd=0.5, model="m", cached=7, progress={"counted": 100})
        current().spend(50, progress={"counted": 150})
        current().spend(progress={"session": "x"})  # nothing was spent
        return current().progress

    assert run(hive, work) == [{"other": 1, "counted": 150, "session": "x"}]
    entries = recorded(hive, "r")
    kinds = [(type(each), each.at) for each in entries if isinstance(each, Spent | ProgressSaved)]
    assert [kind for kind, _ in kinds] == [
        *(ProgressSaved, Spent, ProgressSaved, Spent, ProgressSaved, ProgressSaved)
    ]
    assert kinds[1][1] == kinds[2][1]
    assert kinds[3][1] == kinds[4][1]
    state = in_the_journal(hive)
    assert (state.tokens, state.micros) == (150, 500_000)


@pytest.mark.parametrize(
    "given", [{"tokens": -1}, {"tokens": 1.5}, {"usd": float("nan")}, {"cached": True}]
)
def test_amounts_that_cannot_be_spent_are_refused(hive: Hive, given: dict[str, Any]) -> None:
    def work() -> str:
        with pytest.raises(ConfigurationError, match=r"spend\(.*=…\) is .*, and must be"):
            current().spend(**given)
        return "refused"

    assert run(hive, work) == ["refused"]


# --- memory and history ---------------------------------------------------------------------------


def test_a_memory_is_durable_as_soon_as_it_is_set(hive: Hive) -> None:
    seen: list[Any] = []

    def look() -> None:
        memory = in_the_journal(hive).personas["developer"].memory
        assert memory is not None
        seen.append(values.decode(value_text(memory)))

    def work() -> None:
        memory = current().memory
        memory["topic"] = {"pages": [1]}
        look()
        memory.update(more=True)
        del memory["topic"]
        look()

    run(hive, work, persona="developer")
    assert seen == [{"topic": {"pages": [1]}}, {"more": True}]


def test_a_memory_is_one_for_all_steps_of_a_persona(hive: Hive) -> None:
    first = hive.step(name="first", persona="p")(lambda: current().memory.update(a=1, b=[1]))
    second = hive.step(name="second", persona="p")(lambda: dict(current().memory))
    other = hive.step(name="third", persona="q")(lambda: dict(current().memory))

    @hive.workflow
    async def work() -> list[Any]:
        await first()
        return [await second(), await other()]

    assert hive.run_sync(work) == [{"a": 1, "b": [1]}, {}]


def test_what_changes_inside_a_memory_is_saved_at_the_end(hive: Hive) -> None:
    def first() -> None:
        memory = current().memory
        memory["notes"] = []
        notes = memory["notes"]
        notes.append("one")
        memory["other"] = 1
        notes.append("two")

    assert run(hive, first, lambda: dict(current().memory)) == [
        None,
        {"notes": ["one", "two"], "other": 1},
    ]


def test_what_changed_inside_a_memory_is_saved_when_the_attempt_fails_too(hive: Hive) -> None:
    def work() -> list[str]:
        notes: list[str] = current().memory.setdefault("notes", [])
        notes.append(f"attempt {current().attempt}")
        if len(notes) < 3:
            raise ValueError("no")
        return notes

    assert run(hive, work) == [["attempt 1", "attempt 2", "attempt 3"]]


def test_a_memory_refuses_what_it_cannot_hold_and_stays_as_it_was(hive: Hive) -> None:
    def work() -> dict[str, Any]:
        memory = current().memory
        memory["good"] = 1
        with pytest.raises(EncodeError, match=r"memory\.bad|memory\['bad'\]"):
            memory["bad"] = object()
        with pytest.raises(TypeError, match="names as keys, not 5"):
            memory[5] = 1  # type: ignore[index]
        with pytest.raises(KeyError):
            del memory["never"]
        return dict(memory)

    assert run(hive, work) == [{"good": 1}]


def test_something_in_a_memory_that_cannot_be_saved_does_not_hide_how_an_attempt_failed(
    hive: Hive,
) -> None:
    def work() -> None:
        current().memory["list"] = []
        current().memory["list"].append(object())
        raise KeyError("the reason")

    with pytest.raises(RunFailedError, match="the reason"):
        run(hive, work, max_attempts=1)


def test_something_in_a_memory_that_cannot_be_saved_is_an_error_at_the_end(hive: Hive) -> None:
    def work() -> None:
        current().memory["list"] = []
        current().memory["list"].append(object())

    with pytest.raises(RunFailedError, match="object"):
        run(hive, work, max_attempts=1)


def test_threads_of_a_step_do_not_undo_what_the_others_remember(hive: Hive) -> None:
    def work() -> int:
        def remember(number: int) -> None:
            current().memory[f"key {number}"] = [number]
            current().history.append(number)

        in_threads(remember)
        return len(current().memory) + len(current().history)

    assert run(hive, work) == [80]


def test_a_history_only_grows_and_cannot_be_changed(hive: Hive) -> None:
    def work() -> list[Any]:
        history = current().history
        item = {"a": [1]}
        history.append(item)
        item["a"].append(2)
        history[0]["a"].append(3)
        history.append("b")
        assert (len(history), history[-1], history[:1]) == (2, "b", [{"a": [1]}])
        assert repr(history) == "[{'a': [1]}, 'b']"
        assert not hasattr(history, "pop")
        return list(history)

    assert run(hive, work) == [[{"a": [1]}, "b"]]
    store = store_of(hive)
    saved = [e for e in store.entries(store.find("r").number) if isinstance(e, PersonaSaved)]
    assert [each.what for each in saved] == ["history", "history"]


# --- feedback -------------------------------------------------------------------------------------


def test_feedback_has_a_sentence_on_each_failed_attempt(hive: Hive) -> None:
    async def work() -> list[str]:
        match current().attempt:
            case 1:
                raise ValueError("it does not rhyme")
            case 2:
                await asyncio.sleep(60)
            case 3:
                raise KeyError
            case _:
                pass
        return current().feedback

    assert run(hive, work, timeout=0.3) == [
        [
            "Attempt 1 failed: it does not rhyme",
            "Attempt 2 failed: TIMEOUT: 's0' was not done within 0.3 seconds",
            "Attempt 3 failed: KeyError",
        ]
    ]


# --- the end of an attempt ------------------------------------------------------------------------


def test_a_thread_that_is_late_saves_nothing_and_its_spending_counts(hive: Hive) -> None:
    ended, found = threading.Event(), []

    def work() -> str:
        context = current()
        if context.attempt > 1:
            while not ended.wait(0.02):
                context.heartbeat()
            return "another"
        try:
            while True:
                context.heartbeat()
                threading.Event().wait(0.6)  # past the time limit
        except AttemptOverError as error:
            found.append(str(error))
        with pytest.raises(AttemptOverError):
            context.save_progress(a=1)
        with pytest.raises(AttemptOverError):
            context.memory["a"] = 1
        context.spend(5)
        ended.set()
        return "first"

    assert run(hive, work, timeout=0.2, max_attempts=20) == ["another"]
    assert found == ["attempt 1 of step 's0' is over: it took too long or stopped"]
    assert in_the_journal(hive).tokens == 5
    assert not in_the_journal(hive).personas


def test_a_heartbeat_extends_the_time_limit(hive: Hive) -> None:
    async def work() -> int:
        for _ in range(12):
            await asyncio.sleep(0.1)
            current().heartbeat()
        return current().attempt

    assert run(hive, work, timeout=1) == [1]


def test_a_step_that_waits_for_something_that_is_cancelled_has_failed(hive: Hive) -> None:
    async def work() -> int:
        if current().attempt == 2:
            return 2
        waiting = asyncio.get_running_loop().create_future()
        waiting.cancel()
        await waiting
        return 1

    assert run(hive, work) == [2]


def test_spending_is_counted_by_persona_model_and_day(hive: Hive) -> None:
    @hive.step(persona="developer")
    async def work(tokens: int) -> None:
        current().spend(tokens, usd=0.5, model="large", cached=3)

    @hive.workflow
    async def build() -> None:
        await work(100)
        await work(20)

    hive.run_sync(build, run_id="r")
    columns = "persona, model, tokens, cached, micros, day"
    ((*spent, day),) = store_of(hive).db.read(f"SELECT {columns} FROM usage")
    assert spent == ["developer", "large", 120, 6, 1_000_000]
    assert abs(day - time.time() / 86_400) < 2
