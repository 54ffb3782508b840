"""A level 1 execution as a scenario: sequential and concurrent steps, a failure, saved state.

It reports every acknowledgement at once, also inside a step. After a kill ``check_execution``
resumes it to its end, and compares.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from faults.registry import require

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    from maestro_hive.engine.config import ExecutionConfig
    from maestro_hive.maestro.state.projections import RunState
    from maestro_hive.unified_execution.persona_executor import PersonaExecutor

    Report = Callable[[str], Coroutine[Any, Any, None]]

RUN = "executed"
SEQUENTIAL, CONCURRENT = (1, 2, 3), (4, 5, 6)
STEPS = (*SEQUENTIAL, *CONCURRENT)
FLAKY = 2
PARTS = 2
TOKENS = 10
CLOSING = "~ closing"
SCRIPTED = "ConnectionError"
JOURNAL_ERRORS = {"CorruptionError", "StorageError", "StoreBusyError", "StoreFailedError"}


def output_of(step: int) -> dict[str, Any]:
    """Return the result of a step: some fit into their row, some do not."""
    return {"step": step, "text": f"{step} " * (step * 211 % 1500)}


def persona_of(step: int) -> str:
    """Return the persona of a step: one for the sequential steps, one for each concurrent step."""
    return "developer" if step in SEQUENTIAL else f"tester-{step}"


def config_in(folder: Path) -> ExecutionConfig:
    """Return the configuration of the run."""
    from maestro_hive.engine.config import (
        ExecutionConfig,
        Level1Config,
        StateConfig,
    )

    return ExecutionConfig(
        level1=Level1Config(base_delay_seconds=0.002, jitter=0.0),
        state=StateConfig(state_dir=str(folder / "state")),
    )


def execute(folder: Path) -> Iterator[str]:
    """Execute the steps; completed ones are only reported again."""
    from maestro_hive.unified_execution.persona_executor import PersonaExecutor

    executor = PersonaExecutor(config_in(folder), persona_of(1), workflow_id=RUN)
    try:
        yield from reported(lambda report: _steps(executor, report))
        yield CLOSING
    finally:
        executor.close()


async def _steps(executor: PersonaExecutor, report: Report) -> None:
    for number in SEQUENTIAL:
        await _step(executor, number, report)
    await asyncio.gather(*(_step(_other_persona(executor, n), n, report) for n in CONCURRENT))


def _other_persona(executor: PersonaExecutor, number: int) -> PersonaExecutor:
    """Return another persona's executor on the same run."""
    shared = executor.state_persistence
    return type(executor)(executor.config, persona_of(number), state_persistence=shared)


async def _step(executor: PersonaExecutor, number: int, report: Report) -> None:
    result = await executor.execute(partial(_body, report), f"s{number}", number)
    require(result.final_output == output_of(number), f"s{number} has another result")
    await report(f"completed {number}")


async def _body(report: Report, number: int) -> dict[str, Any]:
    from maestro_hive.engine.context import current

    here = current()
    await report(f"started {number} {here.attempt}")
    if number == FLAKY and not here.feedback:
        raise ConnectionError("the first attempt fails")
    for part in range(here.progress.get("parts", 0) + 1, PARTS + 1):
        here.history.append([number, part])
        await report(f"history {number} {part}")
        here.memory[str(number)] = part
        await report(f"memory {number} {part}")
        here.spend(tokens=TOKENS)
        await report(f"spent {number} {part}")
        here.save_progress(parts=part)
        await report(f"progress {number} {part}")
    return output_of(number)


def reported(work: Callable[[Report], Coroutine[Any, Any, None]]) -> Iterator[str]:
    """Run a coroutine, and yield each of its reports before it continues."""
    reports: deque[str] = deque()

    async def report(text: str) -> None:
        reports.append(text)
        await asyncio.sleep(0)

    loop = asyncio.new_event_loop()
    task = loop.create_task(work(report))
    try:
        while not task.done():
            loop.call_soon(loop.stop)
            loop.run_forever()
            while reports:
                yield reports.popleft()
        task.result()
    finally:
        _end(loop)


def _end(loop: asyncio.AbstractEventLoop) -> None:
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left))
    # What waits for a task that has just failed, as `gather` does, takes note of its error in a callback.
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


# --- what must be left of it ---------------------------------------------------------------------


class _Acks(NamedTuple):
    """The acknowledgements, by kind."""

    completed: set[int]
    started: dict[int, int]
    notes: dict[str, list[tuple[int, int]]]

    @classmethod
    def read(cls, acks: list[str]) -> _Acks:
        words = [ack.split() for ack in acks if ack[0] not in "!~"]
        completed = {int(word[1]) for word in words if word[0] == "completed"}
        started: dict[int, int] = {}
        notes: dict[str, list[tuple[int, int]]] = {}
        for word in words:
            if word[0] == "started":
                started[int(word[1])] = int(word[2])
            elif word[0] != "completed":
                notes.setdefault(word[0], []).append((int(word[1]), int(word[2])))
        return cls(completed, started, notes)

    def of(self, persona: str) -> _Acks:
        """Return the acknowledgements of one persona's steps."""
        notes = {
            what: [pair for pair in pairs if persona_of(pair[0]) == persona]
            for what, pairs in self.notes.items()
        }
        completed = {step for step in self.completed if persona_of(step) == persona}
        return _Acks(completed, self.started, notes)

    def pairs(self, what: str) -> list[tuple[int, int]]:
        """Return the steps and parts of one kind."""
        return self.notes.get(what, [])


def was_in_a_step(acks: list[str]) -> bool:
    """Return whether a step had started and was not acknowledged as completed."""
    read = _Acks.read(acks)
    return bool(read.started.keys() - read.completed)


def check_execution(folder: Path, acks: list[str], openings: int) -> None:
    """Resume the run to its end, and compare its acknowledgements before and after."""
    before = _Acks.read(acks)
    resumed = list(execute(folder))
    after = _Acks.read(resumed)
    again = before.completed & after.started.keys()
    require(not again, f"steps {sorted(again)} were acknowledged, and started again")
    require(after.completed == set(STEPS), f"only {sorted(after.completed)} completed")
    for step, attempt in before.started.items():
        later = next((w for w in map(str.split, resumed) if w[:2] == ["started", str(step)]), None)
        fits = later is None or attempt < int(later[2]) <= attempt + 1 + openings
        require(fits, f"s{step} was at attempt {attempt}, and resumed at {later}")
    done = dict(before.pairs("progress"))
    for step, part in after.pairs("history"):
        require(part > done.get(step, 0), f"s{step} did part {part} again, which it had saved")
    _check_journal(folder, before, after, openings)


def _check_journal(folder: Path, before: _Acks, after: _Acks, openings: int) -> None:
    from maestro_hive.unified_execution.state_persistence import StatePersistence

    with StatePersistence(config_in(folder), RUN) as state:
        shown, run = state.state, state.run.state
        names = [f"s{step}" for step in STEPS]
        require(sorted(shown.completed_tasks) == names, f"completed: {shown.completed_tasks}")
        require(shown.pending_tasks == [], f"pending: {shown.pending_tasks}")
        for persona in sorted({persona_of(step) for step in STEPS}):
            of_persona = shown.persona_states[persona]
            _check_persona(of_persona, before.of(persona), after.of(persona), openings)
        _check_limits(run, openings)


def _check_persona(shown: dict[str, Any], before: _Acks, after: _Acks, openings: int) -> None:
    memory = {str(step): PARTS for step in after.completed}
    require(shown["memory"] == memory, f"the memory is {shown['memory']}")
    spent = len(before.pairs("spent")) + len(after.pairs("spent"))
    more = shown["tokens_used"] // TOKENS - spent
    require(
        0 <= more <= openings, f"spending was acknowledged {spent} times, and there is {more} more"
    )
    acked = Counter([*before.pairs("history"), *after.pairs("history")])
    found = Counter((step, part) for step, part in shown["history"])
    require(not acked - found, f"lost from the history: {acked - found}")
    extra = (found - acked).total()
    require(extra <= openings, f"the history has {extra} items too many")


def _check_limits(run: RunState, openings: int) -> None:
    require(len(run.steps) == len(STEPS), f"there are {len(run.steps)} steps")
    for number, step in run.steps.items():
        require(step.completed is not None, f"step {number} is not completed")
        require(step.interruptions <= openings, f"step {number} was interrupted too often")
    kinds = Counter(_kinds_of_failures(run))
    # A body that reads the journal fails when the journal cannot be read: a counted failure.
    others = kinds.keys() - {SCRIPTED} - JOURNAL_ERRORS
    require(kinds[SCRIPTED] == 1, f"{kinds[SCRIPTED]} failures are recorded, not 1")
    require(not others, f"failures are recorded that did not happen: {others}")


def _kinds_of_failures(run: RunState) -> Iterator[str]:
    from maestro_hive.maestro.state.projections import facts_of
    from maestro_hive.maestro.state.records import EntryKind

    for step in run.steps.values():
        for entry in step.log:
            facts = facts_of(entry)
            if entry.kind == EntryKind.ATTEMPT_FAILED and facts.get("counts", True):
                yield facts["error"]["type"]
