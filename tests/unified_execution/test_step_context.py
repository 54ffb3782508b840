"""What a task can ask for while it is executed: ``current()``, and what it keeps with it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.context import StepContext, current
from maestro_hive.engine.errors import ExecutionException
from maestro_hive.kernel.errors import ConfigurationError, EncodeError, StorageError
from maestro_hive.maestro.state.projections import fold
from maestro_hive.unified_execution import (
    ExecutionConfig,
    GovernanceViolation,
    UnrecoverableError,
)
from maestro_hive.unified_execution.persona_executor import ExecutionStatus, PersonaExecutor
from tests.timing import LoopTime, let_turn
from tests.unified_execution.restarts import (
    RUN,
    Body,
    Restarts,
    any_restarts,  # noqa: F401 - a fixture
    execute,
    make_any_executor,  # noqa: F401 - a fixture
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from maestro_hive.engine.policy import AgentContext
    from maestro_hive.maestro.state.projections import RunState


def ask(executor: PersonaExecutor, question: Callable[[StepContext], Any], name: str = "q") -> Any:
    """Return what a step answers about its context."""
    return execute(executor, lambda: question(current()), name).final_output


def in_the_journal(executor: PersonaExecutor) -> RunState:
    """Return the run as another process would read it now."""
    run = executor._run
    assert run is not None
    return fold(run.store.entries(run.lease.run), run.store.load)


def value_of(executor: PersonaExecutor, entry: Any) -> Any:
    assert executor._run is not None
    return json.loads(executor._run.store.load(entry) or b"null")


# --- where it is ---------------------------------------------------------------------------------


def test_outside_a_step_it_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match=r"inside a step.*copy_context\(\)\.run"):
        current()


def test_it_tells_who_executes_what(restarts: Restarts) -> None:
    body = Body("x")
    execute(restarts.executor("architect"), body, "design")
    (context,) = body.contexts
    assert (context.persona_id, context.task_name, context.run_id, context.attempt) == (
        "architect", "design", RUN, 1,
    )  # fmt: skip
    with pytest.raises(ConfigurationError):
        current()


def test_it_is_found_in_child_tasks_and_in_threads_that_were_given_the_context(
    any_executor: PersonaExecutor,
) -> None:
    async def work() -> bool:
        here = current()

        async def child() -> StepContext:
            return current()

        found = list(await asyncio.gather(child(), asyncio.create_task(child())))
        found.append(await asyncio.to_thread(current))
        copied = contextvars.copy_context()
        thread = threading.Thread(target=lambda: found.append(copied.run(current)))
        thread.start()
        thread.join()
        return len(found) == 4 and all(each is here for each in found)

    assert execute(any_executor, work).final_output is True


def test_a_bare_thread_has_none(any_executor: PersonaExecutor) -> None:
    def work() -> str:
        caught: list[str] = []

        def read() -> None:
            try:
                current()
            except ConfigurationError as error:
                caught.append(str(error))

        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        return caught[0]

    assert "inside a step" in execute(any_executor, work).final_output


def test_steps_at_once_have_their_own(any_executor: PersonaExecutor) -> None:
    async def work(number: int) -> bool:
        for _ in range(3):
            await asyncio.sleep(0)
        return current().task_name == f"step {number}"

    async def main() -> list[Any]:
        made = [any_executor.execute(work, f"step {n}", n) for n in range(20)]
        return [each.final_output for each in await asyncio.gather(*made)]

    assert asyncio.run(main()) == [True] * 20


def test_a_sync_task_is_not_on_the_loops_thread(any_executor: PersonaExecutor) -> None:
    assert execute(any_executor, threading.get_ident).final_output != threading.get_ident()


def test_the_effect_key_is_the_same_for_every_attempt_and_process(restarts: Restarts) -> None:
    body = Body(ValueError("1"), ValueError("2"), "yes")
    execute(restarts.executor(), body)
    restarts.restart()
    execute(restarts.executor().options(force=True), body)
    execute(restarts.executor(), body, "step", "other")
    execute(restarts.executor(workflow_id="run-2"), body)
    keys = [context.effect_key for context in body.contexts]
    assert len(set(keys[:4])) == 1
    assert len(set(keys)) == 3


# --- memory --------------------------------------------------------------------------------------


def test_a_memory_is_durable_as_soon_as_it_is_set(restarts: Restarts) -> None:
    executor = restarts.executor()
    seen: list[Any] = []

    def work(context: StepContext) -> None:
        context.memory["topic"] = {"pages": [1]}
        seen.append(value_of(executor, in_the_journal(executor).memories["developer"]))
        context.memory.update(more=True)
        del context.memory["topic"]
        seen.append(value_of(executor, in_the_journal(executor).memories["developer"]))

    ask(executor, work)
    assert seen == [{"topic": {"pages": [1]}}, {"more": True}]


def test_a_memory_is_one_for_all_steps_of_a_persona_and_continues(restarts: Restarts) -> None:
    ask(restarts.executor(), lambda context: context.memory.update(a=1, b=[1]), "first")
    restarts.restart()
    executor = restarts.executor()
    assert ask(executor, lambda context: dict(context.memory), "second") == {"a": 1, "b": [1]}
    assert ask(restarts.executor("other"), lambda context: dict(context.memory)) == {}
    restarts.executor(workflow_id="run-2")
    other_run = restarts.executor(workflow_id="run-2")
    assert ask(other_run, lambda context: len(context.memory)) == 0


def test_what_changes_inside_a_memory_is_saved_at_the_end(any_executor: PersonaExecutor) -> None:
    def work(context: StepContext) -> None:
        context.memory["notes"] = []
        notes = context.memory["notes"]
        notes.append("one")
        context.memory["other"] = 1
        notes.append("two")

    ask(any_executor, work, "first")
    assert ask(any_executor, lambda context: dict(context.memory), "second") == {
        "notes": ["one", "two"], "other": 1,
    }  # fmt: skip


def test_what_changed_inside_a_memory_is_saved_when_the_attempt_fails_too(
    any_executor: PersonaExecutor,
) -> None:
    def work() -> list[str]:
        notes: list[str] = current().memory.setdefault("notes", [])
        notes.append(f"attempt {current().attempt}")
        if len(notes) < 3:
            raise ValueError("no")
        return notes

    any_executor = any_executor.options(retry_on=lambda error: 0)
    assert execute(any_executor, work).final_output == ["attempt 1", "attempt 2", "attempt 3"]


def test_steps_at_once_do_not_undo_what_the_others_remember(any_executor: PersonaExecutor) -> None:
    async def work(word: str) -> None:
        memory = current().memory
        assert "shared" in memory
        await asyncio.sleep(0.005)
        memory[word] = True
        await asyncio.sleep(0.005)
        memory["shared"][word] = True

    async def main() -> dict[str, Any]:
        await any_executor.execute(lambda: current().memory.update(shared={}, gone=1), "first")
        await asyncio.gather(*(any_executor.execute(work, "work", word) for word in "abc"))
        await any_executor.execute(lambda: current().memory.pop("gone"), "pop")
        found = await any_executor.execute(lambda: dict(current().memory), "last")
        assert isinstance(found.final_output, dict)
        return found.final_output

    found = asyncio.run(main())
    assert found.keys() == {"shared", "a", "b", "c"}


def test_a_memory_refuses_what_it_cannot_keep_and_stays_as_it_was(restarts: Restarts) -> None:
    def work(context: StepContext) -> dict[str, Any]:
        context.memory["good"] = 1
        with pytest.raises(EncodeError, match=r"memory\.bad"):
            context.memory["bad"] = object()
        with pytest.raises(TypeError, match="names as keys, not 5"):
            context.memory[5] = 1  # type: ignore[index]
        with pytest.raises(KeyError):
            del context.memory["never"]
        return dict(context.memory)

    assert ask(restarts.executor(), work) == {"good": 1}


def test_something_unkeepable_inside_a_memory_is_an_error_at_the_end(restarts: Restarts) -> None:
    executor = restarts.executor()
    contexts: list[StepContext] = []

    def work(context: StepContext) -> None:
        contexts.append(context)
        context.memory["list"] = []
        context.memory["list"].append(object())

    with pytest.raises(EncodeError, match=r"memory\.list\[0\]"):
        ask(executor, work)
    with pytest.raises(Exception, match="is over"):
        contexts[0].save_progress(a=1)


def test_something_unkeepable_in_a_memory_does_not_hide_how_an_attempt_failed(
    restarts: Restarts,
) -> None:
    def work() -> None:
        current().memory["list"] = []
        current().memory["list"].append(object())
        raise KeyError("the reason")

    executor = restarts.executor()
    with pytest.raises(UnrecoverableError):
        execute(executor, work)
    assert [each.error_message for each in executor.attempts] == ["'the reason'"] * 3
    trace = executor.attempts[0].error_traceback
    assert trace is not None
    assert "its memory could not be saved: memory.list[0]" in trace


def test_something_unkeepable_in_a_memory_does_not_hide_a_cancellation(restarts: Restarts) -> None:
    async def main() -> None:
        reached = asyncio.Event()

        async def work() -> None:
            current().memory["list"] = []
            current().memory["list"].append(object())
            reached.set()
            await asyncio.sleep(30)

        executor = restarts.executor()
        running = asyncio.create_task(executor.execute(work, "step"))
        await reached.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert executor.attempts[-1].status is ExecutionStatus.CANCELLED

    asyncio.run(main())


def test_a_thread_that_continues_changing_its_memory_does_not_hide_that_it_is_late(
    restarts: Restarts,
) -> None:
    over = threading.Event()

    def work() -> None:
        current().memory["numbers"] = {}
        numbers = current().memory["numbers"]
        count = 0
        while not over.is_set():
            count += 1
            numbers[str(count % 5_000)] = count
            if count % 7_000 == 0:
                numbers.clear()

    executor = restarts.executor().options(timeout=0.05, max_attempts=1)
    try:
        with pytest.raises(UnrecoverableError) as caught:
            execute(executor, work)
    finally:
        over.set()
    assert caught.value.failure_report is not None
    assert caught.value.failure_report.error_category == "TIMEOUT"


def test_what_changes_inside_a_memory_is_saved_also_if_python_calls_it_equal(
    any_executor: PersonaExecutor,
) -> None:
    def change(context: StepContext) -> None:
        context.memory["flags"]["done"] = False
        context.memory["flags"]["number"] = 1.0

    ask(
        any_executor, lambda context: context.memory.update(flags={"done": 0, "number": 1}), "first"
    )
    ask(any_executor, change, "second")
    found = ask(any_executor, lambda context: dict(context.memory), "third")
    assert repr(found["flags"]) == "{'done': False, 'number': 1.0}"


def test_a_memory_handed_to_one_step_is_not_changed_by_another(
    any_executor: PersonaExecutor,
) -> None:
    references: list[Any] = []

    def read(context: StepContext) -> None:
        references.append(context.memory["notes"])

    ask(any_executor, lambda context: context.memory.update(notes=["one"]), "first")
    ask(any_executor, read, "second")
    references[0].append("after the end of its step")
    assert ask(any_executor, lambda context: context.memory["notes"], "third") == ["one"]


def test_changing_a_key_of_a_large_memory_reads_nothing(
    restarts: Restarts, monkeypatch: Any
) -> None:
    executor = restarts.executor()
    ask(executor, lambda context: context.memory.update(large="x" * 10_000), "first")
    assert executor._run is not None

    def work(context: StepContext) -> None:
        context.memory["a"] = 1
        context.memory["b"] = 2

    with monkeypatch.context() as patch:
        patch.setattr(executor._run.store, "load", lambda _: pytest.fail("it was read"))
        ask(executor, work, "second")
    assert ask(executor, lambda context: len(context.memory), "third") == 3


def test_threads_of_a_step_do_not_undo_what_the_others_remember(
    any_executor: PersonaExecutor,
) -> None:
    def work(context: StepContext) -> int:
        def remember(number: int) -> None:
            context.memory[f"key {number}"] = [number]
            context.history.append(number)

        in_threads(remember)
        return len(context.memory) + len(context.history)

    assert ask(any_executor, work) == 80


def test_a_memory_is_a_dictionary(any_executor: PersonaExecutor) -> None:
    def work(context: StepContext) -> bool:
        memory = context.memory
        memory["a"] = 1
        assert (len(memory), list(memory), memory.get("b"), "a" in memory) == (1, ["a"], None, True)
        assert repr(memory) == "{'a': 1}"
        assert context.memory is memory
        return memory == {"a": 1}

    assert ask(any_executor, work) is True


# --- history -------------------------------------------------------------------------------------


def test_a_history_is_durable_as_soon_as_it_grew_and_continues(restarts: Restarts) -> None:
    executor = restarts.executor()
    seen: list[Any] = []

    def work(context: StepContext) -> None:
        context.history.append({"role": "user", "content": "hello"})
        entries = in_the_journal(executor).histories["developer"]
        seen.extend(value_of(executor, entry) for entry in entries)
        context.history.append("again")

    ask(executor, work, "first")
    assert seen == [{"role": "user", "content": "hello"}]
    restarts.restart()
    found = ask(restarts.executor(), lambda context: list(context.history), "second")
    assert found == [{"role": "user", "content": "hello"}, "again"]


def test_a_history_only_grows_and_cannot_be_changed(any_executor: PersonaExecutor) -> None:
    def work(context: StepContext) -> list[Any]:
        item = {"a": [1]}
        context.history.append(item)
        item["a"].append(2)
        context.history[0]["a"].append(3)
        context.history.append("b")
        assert (len(context.history), context.history[-1], context.history[:1]) == (
            2, "b", [{"a": [1]}],
        )  # fmt: skip
        assert repr(context.history) == "[{'a': [1]}, 'b']"
        assert not hasattr(context.history, "pop")
        return list(context.history)

    assert ask(any_executor, work) == [{"a": [1]}, "b"]


def test_adding_to_a_long_history_reads_nothing(restarts: Restarts, monkeypatch: Any) -> None:
    executor = restarts.executor()
    for number in range(5):
        ask(executor, lambda context: context.history.append("x" * 10_000), f"step {number}")
    assert executor._run is not None
    with monkeypatch.context() as patch:
        patch.setattr(executor._run.store, "load", lambda _: pytest.fail("it was read"))
        ask(executor, lambda context: context.history.append("more"), "second")
    assert ask(executor, lambda context: len(context.history), "third") == 6


# --- progress ------------------------------------------------------------------------------------


def test_progress_is_durable_when_saved_and_given_to_the_next_attempt(restarts: Restarts) -> None:
    executor = restarts.executor()
    seen: list[Any] = []

    def work() -> str:
        context = current()
        seen.append(context.progress)
        if context.attempt == 1:
            context.save_progress(files_created=["a.py"], current_step=1)
            (step,) = in_the_journal(executor).steps.values()
            seen.append(value_of(executor, step.progress))
            context.save_progress(current_step=2)
            context.progress["current_step"] = 99
            assert context.progress["current_step"] == 2
            raise ValueError("no")
        return "done"

    execute(executor, work)
    assert seen == [
        {},
        {"files_created": ["a.py"], "current_step": 1},
        {"files_created": ["a.py"], "current_step": 2},
    ]


def in_threads(work: Callable[[int], object]) -> None:
    """Do something forty times, in eight threads."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(40)))


def test_threads_of_a_step_do_not_undo_each_others_progress(any_executor: PersonaExecutor) -> None:
    def work(context: StepContext) -> int:
        in_threads(lambda number: context.save_progress(**{f"key {number}": number}))
        return len(context.progress)

    assert ask(any_executor, work) == 40


def test_a_thread_that_is_late_does_not_write_over_the_next_attempt(
    restarts: Restarts, monkeypatch: Any
) -> None:
    executor = restarts.executor().options(timeout=30, max_attempts=2, retry_on=lambda _: 0)
    run = executor._run
    assert run is not None
    append = run.append
    loop_time = LoopTime(monkeypatch)
    loops: list[asyncio.AbstractEventLoop] = []

    def append_slowly(entries: Any, *args: Any, **kwargs: Any) -> None:
        if threading.current_thread() in slow:
            slow.clear()
            let_turn(loops[0])
            loop_time.advance(40)
            loops[0].call_soon_threadsafe(time.monotonic)  # it waits, and looks at the time again
            time.sleep(0.5)
        append(entries, *args, **kwargs)

    slow: set[threading.Thread] = set()
    done = threading.Event()
    monkeypatch.setattr(run, "append", append_slowly)

    def work() -> str:
        context = current()
        if context.attempt == 1:
            slow.add(threading.current_thread())
            context.save_progress(of="the first")
            with contextlib.suppress(ExecutionException):  # over
                for _ in range(1000):
                    context.save_progress(late=True)
                    time.sleep(0.001)
            done.set()
        else:
            context.save_progress(of="the second")
        return "done"

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        await executor.execute(work, "step")

    asyncio.run(main())
    assert done.wait(30)
    (step,) = in_the_journal(executor).steps.values()
    assert value_of(executor, step.progress)["of"] == "the second"


def test_progress_cannot_be_changed_once_it_is_saved(any_executor: PersonaExecutor) -> None:
    def work(context: StepContext) -> dict[str, Any]:
        files = ["a.py"]
        context.save_progress(files=files)
        files.append("b.py")
        context.progress["files"].append("c.py")
        context.save_progress(step=1)
        return context.progress

    assert ask(any_executor, work) == {"files": ["a.py"], "step": 1}


def test_progress_belongs_to_one_step(any_executor: PersonaExecutor) -> None:
    ask(any_executor, lambda context: context.save_progress(a=1), "first")
    assert ask(any_executor, lambda context: context.progress, "second") == {}


def test_progress_survives_a_retry_and_not_a_force(restarts: Restarts) -> None:
    def work() -> dict[str, Any]:
        before = current().progress
        current().save_progress(tried=before.get("tried", 0) + 1)
        if before.get("tried", 0) < 3:
            raise ValueError("no")
        return before

    with pytest.raises(UnrecoverableError):
        execute(restarts.executor(), work)
    assert execute(restarts.executor().options(retry=True), work).final_output == {"tried": 3}
    with pytest.raises(UnrecoverableError):
        execute(restarts.executor().options(force=True), work)


def test_progress_that_cannot_be_stored_is_named(restarts: Restarts) -> None:
    with pytest.raises(EncodeError, match=r"progress\.photo"):
        ask(restarts.executor(), lambda context: context.save_progress(photo=object()))


# --- spending ------------------------------------------------------------------------------------


def test_spending_is_durable_when_it_returns_and_counted_once(restarts: Restarts) -> None:
    executor = restarts.executor()
    seen: list[Any] = []

    def work(context: StepContext) -> None:
        context.spend(tokens=100, usd=0.5)
        seen.append(in_the_journal(executor).spent["developer"])
        context.spend(usd=0.25)
        context.spend()

    execute(executor, lambda: work(current()), "first")
    result = execute(executor, lambda: work(current()), "second")
    assert seen == [(100, 0.5), (200, 1.25)]
    assert (result.total_tokens_used, result.attempts[0].tokens_used) == (100, 100)
    assert executor.get_token_usage() == 200
    restarts.restart()
    assert restarts.executor().get_token_usage() == 200


def test_what_failed_attempts_spent_counts(any_executor: PersonaExecutor) -> None:
    def work() -> str:
        current().spend(tokens=10 * current().attempt)
        if current().attempt < 3:
            raise ValueError("no")
        return "done"

    result = execute(any_executor.options(retry_on=lambda error: 0), work)
    assert [each.tokens_used for each in result.attempts] == [10, 20, 30]
    assert result.total_tokens_used == any_executor.get_token_usage() == 60


@pytest.mark.parametrize(
    "given",
    [
        {"tokens": -1},
        {"tokens": 1.5},
        {"usd": -1},
        {"usd": "1"},
        {"tokens": 10**5_000},
        {"usd": -(10**5_000)},
        {"usd": 1e300},
    ],
)
def test_bad_spending_is_refused(any_executor: PersonaExecutor, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="spend"):
        ask(any_executor, lambda context: context.spend(**given))


def spender(tokens: int) -> Callable[[], str]:
    def work() -> str:
        current().spend(tokens=tokens)
        return "done"

    return work


def bankrupt(executor: PersonaExecutor, task: Callable[..., Any], name: str = "step") -> str:
    """Execute a task that a budget ends, and return what the report says of it."""
    result = execute(executor, task, name)
    assert result.final_status is ExecutionStatus.BANKRUPT
    assert result.failure_report is not None
    return result.failure_report.details


def test_a_bankrupt_persona_is_not_retried_and_begins_nothing_more(restarts: Restarts) -> None:
    restarts.config.tokens.max_tokens_per_persona = 100
    executor = restarts.executor()
    execute(executor, spender(100), "first")
    assert "101 of 100 tokens used" in bankrupt(executor, spender(1), "second")
    assert executor.final_status is ExecutionStatus.BANKRUPT
    assert [each.status for each in executor.attempts] == [ExecutionStatus.BANKRUPT]
    restarts.restart()
    executor = restarts.executor()
    body = Body()
    assert "101 of 100 tokens used" in bankrupt(executor, body, "third")
    assert body.count == 0
    assert executor.final_status is ExecutionStatus.BANKRUPT
    assert execute(executor, body, "first").final_output == "done"
    assert execute(restarts.executor("other"), spender(1), "first").success


def test_the_budget_of_a_whole_execution_holds_over_all_personas(restarts: Restarts) -> None:
    restarts.config.tokens.max_tokens_per_execution = 250
    for persona in ("a", "b"):
        execute(restarts.executor(persona), spender(100))
    details = bankrupt(restarts.executor("c"), spender(51))
    assert "of the execution" in details
    assert "251 of 250 tokens used" in details
    assert execute(restarts.executor("c", workflow_id="run-2"), spender(51)).success


def test_in_memory_the_budgets_hold_too() -> None:
    config = ExecutionConfig()
    config.tokens.max_tokens_per_execution = 50
    executor = PersonaExecutor(config)
    assert "of the execution" in bankrupt(executor, spender(51))
    assert executor.final_status is ExecutionStatus.BANKRUPT
    executor.reset_token_usage()
    assert execute(executor, spender(50)).success


def test_a_reset_is_one_of_the_executor_and_of_those_made_from_it() -> None:
    executor = PersonaExecutor(ExecutionConfig())
    copy = executor.options(timeout=5)
    execute(executor, spender(5))
    copy.reset_token_usage()
    assert executor.get_token_usage() == copy.get_token_usage() == 0
    execute(copy, spender(7))
    assert executor.get_token_usage() == copy.get_token_usage() == 7


@pytest.mark.parametrize("setting", ["enforce_budget", "track_usage"])
def test_budgets_can_be_turned_off(restarts: Restarts, setting: str) -> None:
    restarts.config.tokens.max_tokens_per_persona = 10
    setattr(restarts.config.tokens, setting, False)
    executor = restarts.executor()
    execute(executor, spender(99))
    assert executor.get_token_usage() == (99 if setting == "enforce_budget" else 0)


# --- governance ----------------------------------------------------------------------------------


class Rules:
    """Allows what it is told to, and notes what it was asked."""

    def __init__(self, **verdict: Any) -> None:
        self.verdict = SimpleNamespace(**verdict)
        self.asked: list[tuple[AgentContext, str, str | None, str]] = []

    def check(
        self, *, agent: AgentContext, tool_name: str, target_path: str | None, action: str
    ) -> Any:
        self.asked.append((agent, tool_name, target_path, action))
        return self.verdict


def write_file(path: str) -> str:
    return f"wrote {path}"


def test_a_forbidden_task_is_not_called_not_retried_and_written_down(
    any_executor: PersonaExecutor, restarts: Restarts, tmp_path: Path
) -> None:
    log = tmp_path / "audit" / "log.jsonl"
    rules = Rules(
        allowed=False,
        violation_type=SimpleNamespace(value="forbidden_path"),
        message="not there",
        latency_ms=3,
    )
    given: dict[str, Any] = {
        "enforcer": rules, "audit_log_path": str(log), "persona_role": "reviewer",
    }  # fmt: skip
    executor = (
        restarts.executor(**given)
        if any_executor.workflow_id
        else PersonaExecutor(restarts.config, "developer", **given)
    )
    with pytest.raises(GovernanceViolation, match="not there") as caught:
        execute(executor, write_file, "write", path="/etc/passwd")
    assert (caught.value.violation_type, caught.value.path, caught.value.tool_name) == (
        "forbidden_path", "/etc/passwd", "write_file",
    )  # fmt: skip
    assert caught.value.agent_id == "developer"
    ((agent, tool, path, action),) = rules.asked
    assert (agent.agent_id, agent.role, tool, path, action) == (
        "developer", "reviewer", "write_file", "/etc/passwd", "write",
    )  # fmt: skip
    (line,) = log.read_text().splitlines()
    entry = json.loads(line)
    assert entry.pop("timestamp")
    assert (
        entry.items()
        >= {
            "persona_id": "developer",
            "role": "reviewer",
            "tool": "write_file",
            "path": "/etc/passwd",
            "allowed": False,
            "violation_type": "forbidden_path",
            "message": "not there",
            "latency_ms": 3,
        }.items()
    )
    assert entry.keys() >= {"number", "previous", "sha256", "action", "run_id"}
    assert log.stat().st_mode & 0o777 == 0o600
    assert executor.final_status is ExecutionStatus.FAILED


def test_an_allowed_task_is_called_and_written_down_once(
    restarts: Restarts, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    rules = Rules(allowed=True)
    executor = restarts.executor(enforcer=rules, audit_log_path=str(log))
    body = Body(ValueError("no"), "yes")
    assert execute(executor, body, "Body").final_output == "yes"
    execute(executor, body, "Body")
    assert len(rules.asked) == 1
    assert [json.loads(line)["allowed"] for line in log.read_text().splitlines()] == [True]
    assert json.loads(log.read_text())["violation_type"] is None


def test_a_violation_without_words_names_itself(restarts: Restarts) -> None:
    executor = restarts.executor(enforcer=Rules(allowed=False))
    with pytest.raises(GovernanceViolation, match="may not use write_file") as caught:
        execute(executor, write_file, "write", "x")
    assert caught.value.violation_type == "policy_violation"


def test_a_violation_that_the_task_raises_is_not_retried(any_executor: PersonaExecutor) -> None:
    body = Body(GovernanceViolation("no", "kind"))
    with pytest.raises(GovernanceViolation):
        execute(any_executor, body)
    assert body.count == 1


def test_a_path_is_seen_however_it_is_passed(restarts: Restarts) -> None:
    rules = Rules(allowed=True)
    execute(restarts.executor(enforcer=rules), write_file, "write", "/etc/passwd")
    assert rules.asked[0][2] == "/etc/passwd"


def test_arguments_that_do_not_fit_are_left_to_the_task(restarts: Restarts) -> None:
    rules = Rules(allowed=True)
    with pytest.raises(UnrecoverableError, match="positional argument"):
        execute(restarts.executor(enforcer=rules), write_file, "write", 1, 2, 3)
    assert rules.asked[0][2] is None


def test_what_cannot_be_written_down_does_not_happen(restarts: Restarts, tmp_path: Path) -> None:
    executor = restarts.executor(enforcer=Rules(allowed=True), audit_log_path=str(tmp_path))
    body = Body()
    with pytest.raises(StorageError, match=r"audit log .* cannot be written"):
        execute(executor, body)
    assert body.count == 0
