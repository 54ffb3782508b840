"""A run through level 1 as a scenario: steps one by one and at once, a failure, and notes.

It says aloud what was acknowledged at the moment at which it was, also inside a step. After a kill
``check_execution`` lets it go on to its end, and compares.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from faults.lost import require

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    from maestro_hive.engine.config import ExecutionConfig
    from maestro_hive.maestro.state.projections import RunState
    from maestro_hive.unified_execution.persona_executor import PersonaExecutor

    Say = Callable[[str], Coroutine[Any, Any, None]]

RUN = "executed"
ONE_BY_ONE, AT_ONCE = (1, 2, 3), (4, 5, 6)
STEPS = (*ONE_BY_ONE, *AT_ONCE)
FLAKY = 2
PARTS = 2
TOKENS = 10
CLOSING = "~ closing"
SCRIPTED = "ConnectionError"
JOURNAL_ERRORS = {"CorruptionError", "StorageError", "StoreBusyError", "StoreFailedError"}


def output_of(step: int) -> dict[str, Any]:
    """Return the result of a step: in its row, or apart."""
    return {"step": step, "text": f"{step} " * (step * 211 % 1500)}


def persona_of(step: int) -> str:
    """Return who does a step: one does those that come one by one, and each other has its own."""
    return "developer" if step in ONE_BY_ONE else f"tester-{step}"


def config_in(folder: Path) -> ExecutionConfig:
    """Return the configuration of the run."""
    from maestro_hive.engine.config import (  # noqa: PLC0415 - a victim starts quickly
        ExecutionConfig,
        Level1Config,
        StateConfig,
    )

    return ExecutionConfig(
        level1=Level1Config(base_delay_seconds=0.002, jitter=0.0),
        state=StateConfig(state_dir=str(folder / "state")),
    )


def execute(folder: Path) -> Iterator[str]:
    """Execute the steps; what is kept already is only said again."""
    from maestro_hive.unified_execution.persona_executor import PersonaExecutor  # noqa: PLC0415

    executor = PersonaExecutor(config_in(folder), persona_of(1), workflow_id=RUN)
    try:
        yield from spoken(lambda say: _steps(executor, say))
        yield CLOSING
    finally:
        executor.close()


async def _steps(executor: PersonaExecutor, say: Say) -> None:
    for number in ONE_BY_ONE:
        await _step(executor, number, say)
    await asyncio.gather(*(_step(_colleague(executor, n), n, say) for n in AT_ONCE))


def _colleague(executor: PersonaExecutor, number: int) -> PersonaExecutor:
    """Return another persona's executor on the same run."""
    shared = executor.state_persistence
    return type(executor)(executor.config, persona_of(number), state_persistence=shared)


async def _step(executor: PersonaExecutor, number: int, say: Say) -> None:
    result = await executor.execute(partial(_body, say), f"s{number}", number)
    require(result.final_output == output_of(number), f"s{number} has another result")
    await say(f"kept {number}")


async def _body(say: Say, number: int) -> dict[str, Any]:
    from maestro_hive.engine.context import current  # noqa: PLC0415

    here = current()
    await say(f"started {number} {here.attempt}")
    if number == FLAKY and not here.feedback:
        raise ConnectionError("the first time never works")
    for part in range(here.progress.get("parts", 0) + 1, PARTS + 1):
        here.history.append([number, part])
        await say(f"history {number} {part}")
        here.memory[str(number)] = part
        await say(f"memory {number} {part}")
        here.spend(tokens=TOKENS)
        await say(f"spent {number} {part}")
        here.save_progress(parts=part)
        await say(f"progress {number} {part}")
    return output_of(number)


def spoken(work: Callable[[Say], Coroutine[Any, Any, None]]) -> Iterator[str]:
    """Run a coroutine, and yield what it says before it goes on."""
    said: deque[str] = deque()

    async def say(text: str) -> None:
        said.append(text)
        await asyncio.sleep(0)

    loop = asyncio.new_event_loop()
    task = loop.create_task(work(say))
    try:
        while not task.done():
            loop.call_soon(loop.stop)
            loop.run_forever()
            while said:
                yield said.popleft()
        task.result()
    finally:
        _end(loop)


def _end(loop: asyncio.AbstractEventLoop) -> None:
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.wait(left))
    loop.close()


# --- what must be left of it ---------------------------------------------------------------------


class _Said(NamedTuple):
    """What was acknowledged, by what it tells of."""

    completed: set[int]
    started: dict[int, int]
    notes: dict[str, list[tuple[int, int]]]

    @classmethod
    def read(cls, acks: list[str]) -> _Said:
        words = [ack.split() for ack in acks if ack[0] not in "!~"]
        kept = {int(word[1]) for word in words if word[0] == "kept"}
        started: dict[int, int] = {}
        notes: dict[str, list[tuple[int, int]]] = {}
        for word in words:
            if word[0] == "started":
                started[int(word[1])] = int(word[2])
            elif word[0] != "kept":
                notes.setdefault(word[0], []).append((int(word[1]), int(word[2])))
        return cls(kept, started, notes)

    def of(self, persona: str) -> _Said:
        """Return the part of it that tells of one persona's steps."""
        notes = {
            what: [pair for pair in pairs if persona_of(pair[0]) == persona]
            for what, pairs in self.notes.items()
        }
        kept = {step for step in self.completed if persona_of(step) == persona}
        return _Said(kept, self.started, notes)

    def pairs(self, what: str) -> list[tuple[int, int]]:
        """Return the steps and parts that this was said of."""
        return self.notes.get(what, [])


def is_in_a_step(acks: list[str]) -> bool:
    """Return whether a step had started and was not acknowledged as kept."""
    said = _Said.read(acks)
    return bool(said.started.keys() - said.completed)


def check_execution(folder: Path, acks: list[str], openings: int) -> None:
    """Let the run go on to its end, and compare what it says with what it had said."""
    before = _Said.read(acks)
    resumed = list(execute(folder))
    after = _Said.read(resumed)
    again = before.completed & after.started.keys()
    require(not again, f"steps {sorted(again)} were acknowledged, and started again")
    require(after.completed == set(STEPS), f"only {sorted(after.completed)} came to their end")
    for step, attempt in before.started.items():
        later = next((w for w in map(str.split, resumed) if w[:2] == ["started", str(step)]), None)
        fits = later is None or attempt < int(later[2]) <= attempt + 1 + openings
        require(fits, f"s{step} was at attempt {attempt}, and went on at {later}")
    done = dict(before.pairs("progress"))
    for step, part in after.pairs("history"):
        require(part > done.get(step, 0), f"s{step} did part {part} again, which it had saved")
    _check_journal(folder, before, after, openings)


def _check_journal(folder: Path, before: _Said, after: _Said, openings: int) -> None:
    from maestro_hive.unified_execution.state_persistence import StatePersistence  # noqa: PLC0415

    with StatePersistence(config_in(folder), RUN) as state:
        shown, run = state.state, state.run.state
        names = [f"s{step}" for step in STEPS]
        require(sorted(shown.completed_tasks) == names, f"completed: {shown.completed_tasks}")
        require(shown.pending_tasks == [], f"pending: {shown.pending_tasks}")
        for persona in sorted({persona_of(step) for step in STEPS}):
            of_persona = shown.persona_states[persona]
            _check_persona(of_persona, before.of(persona), after.of(persona), openings)
        _check_limits(run, openings)


def _check_persona(shown: dict[str, Any], before: _Said, after: _Said, openings: int) -> None:
    memory = {str(step): PARTS for step in after.completed}
    require(shown["memory"] == memory, f"the memory is {shown['memory']}")
    spent = len(before.pairs("spent")) + len(after.pairs("spent"))
    more = shown["tokens_used"] // TOKENS - spent
    require(0 <= more <= openings, f"spending was said {spent} times, and there is {more} more")
    said = Counter([*before.pairs("history"), *after.pairs("history")])
    found = Counter((step, part) for step, part in shown["history"])
    require(not said - found, f"lost from the history: {said - found}")
    extra = (found - said).total()
    require(extra <= openings, f"the history has {extra} items too many")


def _check_limits(run: RunState, openings: int) -> None:
    require(len(run.steps) == len(STEPS), f"there are {len(run.steps)} steps")
    for number, step in run.steps.items():
        require(step.completed is not None, f"step {number} is not kept")
        require(step.interruptions <= openings, f"step {number} was interrupted too often")
    kinds = Counter(_kinds_of_failures(run))
    # A journal that cannot be read fails the body that asks it, and that counts as it should.
    others = kinds.keys() - {SCRIPTED} - JOURNAL_ERRORS
    require(kinds[SCRIPTED] == 1, f"{kinds[SCRIPTED]} failures are recorded, and there was one")
    require(not others, f"failures are recorded that there were none of: {others}")


def _kinds_of_failures(run: RunState) -> Iterator[str]:
    from maestro_hive.maestro.state.projections import facts_of  # noqa: PLC0415 - as above
    from maestro_hive.maestro.state.records import EntryKind  # noqa: PLC0415 - as above

    for step in run.steps.values():
        for entry in step.log:
            facts = facts_of(entry)
            if entry.kind == EntryKind.ATTEMPT_FAILED and facts.get("counts", True):
                yield facts["error"]["type"]
