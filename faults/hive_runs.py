"""A workflow's run as a scenario: steps, a child, a sleep, an answer by letter, a fork, an end.

It says aloud what was acknowledged. After a kill ``check_runs`` lets it all go on to its end, and
compares.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from faults.executing import CLOSING, spoken
from faults.lost import require

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    from maestro_hive import Hive
    from maestro_hive.hive import WorkflowFunction
    from maestro_hive.maestro.state.projections import RunState

    Say = Callable[[str], Coroutine[Any, Any, None]]

RUN, FORK, ENDED = "shipped", "shipped-again", "given-up"
RESULT = [1, 10, "approved", 2, 3]
#: Steps of the run and of its child.
STEPS = {"1", "2", "3", "child"}
#: How often it is looked whether a run has come so far, a millisecond apart.
_LOOKS = 30_000


def run(folder: Path) -> Iterator[str]:
    """Run the workflow, fork it, and cancel another run; what is done already is only said."""
    from maestro_hive import ExecutionConfig, Hive  # noqa: PLC0415 - a victim starts quickly
    from maestro_hive.unified_execution import Level1Config  # noqa: PLC0415 - as above

    config = ExecutionConfig(level1=Level1Config(base_delay_seconds=0.002, jitter=0.0))
    hive = Hive(folder / "state", config)
    try:
        yield from spoken(lambda say: _all(hive, say))
        yield CLOSING
    finally:
        hive.close()


async def _all(hive: Hive, say: Say) -> None:
    ship, wait = _defined(hive, say)
    working = asyncio.create_task(hive.run(ship, "x" * 3000, run_id=RUN))
    await _answer(hive, working, say)
    require(await working == RESULT, "the run has another result")
    await say("done")
    await _fork(hive, say)
    await _cancel(hive, wait, say)


def _defined(
    hive: Hive, say: Say
) -> tuple[WorkflowFunction[[str], list[Any]], WorkflowFunction[[], None]]:
    @hive.step(persona="worker", max_concurrency=2)
    async def work(number: int) -> int:
        await say(f"started {number}")
        return number

    @hive.step
    async def help_out(text: str) -> int:
        await say("started child")
        return len(text) // 300

    @hive.workflow
    async def child(text: str) -> int:
        return await help_out(text)

    @hive.workflow
    async def ship(text: str) -> list[Any]:
        found: list[Any] = [await work(1)]
        await say("kept 1")
        found.append(await child(text))
        await say("kept child")
        await hive.sleep(0.01)
        await say("slept")
        found.append(await hive.wait_for("verdict", type=str))
        await say("heard")
        return [*found, *await asyncio.gather(work(2), work(3))]

    @hive.workflow
    async def wait() -> None:
        await hive.sleep(3600)

    return ship, wait


async def _answer(hive: Hive, working: asyncio.Task[Any], say: Say) -> None:
    """Answer the question once it is asked, unless that was done in another life."""
    for _ in range(_LOOKS):
        if working.done():
            return
        waiting = [info for info in hive.runs("waiting") if info.run_id == RUN]
        if waiting:
            await _answer_once(hive, say)
            return
        await asyncio.sleep(0.001)


async def _answer_once(hive: Hive, say: Say) -> None:
    from maestro_hive.hive.inbox import Inbox  # noqa: PLC0415 - a victim starts quickly

    store = hive._open()  # noqa: SLF001 - looks at what is under way
    if not Inbox(store).messages(RUN).answers and not _state(hive, RUN).answers_to("verdict"):
        hive.answer(RUN, "verdict", "approved")
        await say("posted")


class _State:
    def __init__(self, state: RunState) -> None:
        self.run = state

    def answers_to(self, name: str) -> bool:
        """Return whether a question of that name was answered."""
        from maestro_hive.maestro.state.projections import facts_of  # noqa: PLC0415 - as above

        return any(facts_of(entry).get("name") == name for entry in self.run.answers.values())


def _state(hive: Hive, run_id: str) -> _State:
    from maestro_hive.hive.runs import read_run  # noqa: PLC0415 - as above

    return _State(read_run(hive._open(), run_id))  # noqa: SLF001 - looks inside


async def _fork(hive: Hive, say: Say) -> None:
    if not any(info.run_id == FORK and info.status != "pending" for info in hive.runs()):
        _begin_fork(hive)
    require(await hive.resume(FORK) == RESULT, "the fork has another result")
    await say("forked")


def _begin_fork(hive: Hive) -> None:
    """Begin the fork, unless that was done; a kill may have left its name with nothing in it."""
    from maestro_hive.hive.errors import UnknownRunError  # noqa: PLC0415 - as above

    try:
        begun = _state(hive, FORK).run.started is not None
    except UnknownRunError:
        begun = False
    if not begun:
        hive.fork(RUN, from_step="work#2", new_run_id=FORK)


async def _cancel(hive: Hive, wait: WorkflowFunction[[], None], say: Say) -> None:
    from maestro_hive import RunCancelledError  # noqa: PLC0415 - a victim starts quickly

    working = asyncio.create_task(hive.run(wait, run_id=ENDED))
    for _ in range(_LOOKS):
        if working.done() or any(info.run_id == ENDED for info in hive.runs("running")):
            break
        await asyncio.sleep(0.001)
    if not working.done():
        hive.cancel(ENDED, "enough")
        await say("asked to end")
    try:
        await working
    except RunCancelledError:
        await say("ended")
    else:
        require(False, "a run that was cancelled came to another end")


# --- what must be left of it -----------------------------------------------------------------------


def check_runs(folder: Path, acks: list[str], openings: int) -> None:
    """Let everything go on to its end, and compare what it says with what it had said."""
    before = {ack for ack in acks if ack[0] not in "!~"}
    after = list(run(folder))
    for step in STEPS:
        kept = f"kept {step}" in before or "done" in before
        again = f"started {step}" in after and not _is_forked(step, before, after)
        require(not (kept and again), f"step {step} was acknowledged, and started again")
    require("posted" not in before or "posted" not in after, "the answer was posted twice")
    require({"done", "forked", "ended"} <= set(after), f"it came only to {after[-3:]}")
    _check_limits(folder, openings)


def _is_forked(step: str, before: set[str], after: list[str]) -> bool:
    """Return whether a step may have started in the fork: the one that the fork executes anew."""
    done = after.index("done") if "done" in after else 0
    return step == "2" and "forked" not in before and f"started {step}" not in after[:done]


def _check_limits(folder: Path, openings: int) -> None:
    from maestro_hive.hive.runs import read_run  # noqa: PLC0415 - as above
    from maestro_hive.maestro.state.sqlite.store import SqliteStore  # noqa: PLC0415 - as above

    store = SqliteStore(folder / "state")
    try:
        for record in store.runs():
            for step in read_run(store, record.name).steps.values():
                fine = step.completed is not None and step.interruptions <= openings
                require(fine, f"step {step.name} of {record.name} is not as it should be")
        require(not store.documents("$mail"), "letters are left over")
    finally:
        store.close()
