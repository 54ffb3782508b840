"""A workflow's run as a scenario: steps, a child, a sleep, an answer, a fork, a cancellation.

It reports every acknowledgement. After a kill ``check_runs`` resumes it to its end, and compares.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from faults.executor_scenario import CLOSING, reported
from faults.registry import require

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    from maestro_hive import Hive
    from maestro_hive.hive import WorkflowFunction
    from maestro_hive.maestro.state.projections import RunState

    Report = Callable[[str], Coroutine[Any, Any, None]]

RUN, FORK, CANCELLED = "shipped", "shipped-fork", "cancelled"
RESULT = [1, 10, "approved", 2, 3]
#: Steps of the run and of its child.
STEPS = {"1", "2", "3", "child"}
#: How often a run's status is polled, a millisecond apart.
_POLLS = 30_000


def run(folder: Path) -> Iterator[str]:
    """Run the workflow, fork it, and cancel another run; what was done before is only reported."""
    from maestro_hive import ExecutionConfig, Hive
    from maestro_hive.unified_execution import Level1Config

    config = ExecutionConfig(level1=Level1Config(base_delay_seconds=0.002, jitter=0.0))
    hive = Hive(folder / "state", config)
    try:
        yield from reported(lambda report: _all(hive, report))
        yield CLOSING
    finally:
        hive.close()


async def _all(hive: Hive, report: Report) -> None:
    ship, wait = _defined(hive, report)
    running = asyncio.create_task(hive.run(ship, "x" * 3000, run_id=RUN))
    await _answer(hive, running, report)
    require(await running == RESULT, "the run has another result")
    await report("done")
    await _fork(hive, report)
    await _cancel(hive, wait, report)


def _defined(
    hive: Hive, report: Report
) -> tuple[WorkflowFunction[[str], list[Any]], WorkflowFunction[[], None]]:
    @hive.step(persona="worker", max_concurrency=2)
    async def work(number: int) -> int:
        await report(f"started {number}")
        return number

    @hive.step
    async def help_out(text: str) -> int:
        await report("started child")
        return len(text) // 300

    @hive.workflow
    async def child(text: str) -> int:
        return await help_out(text)

    @hive.workflow
    async def ship(text: str) -> list[Any]:
        found: list[Any] = [await work(1)]
        await report("completed 1")
        found.append(await child(text))
        await report("completed child")
        await hive.sleep(0.01)
        await report("slept")
        found.append(await hive.wait_for("verdict", type=str))
        await report("answered")
        return [*found, *await asyncio.gather(work(2), work(3))]

    @hive.workflow
    async def wait() -> None:
        await hive.sleep(3600)

    return ship, wait


async def _answer(hive: Hive, running: asyncio.Task[Any], report: Report) -> None:
    """Answer the question once it is asked, unless an earlier process has answered it."""
    for _ in range(_POLLS):
        if running.done():
            return
        waiting = [info for info in hive.runs("waiting") if info.run_id == RUN]
        if waiting:
            await _answer_once(hive, report)
            return
        await asyncio.sleep(0.001)


async def _answer_once(hive: Hive, report: Report) -> None:
    from maestro_hive.hive.inbox import Inbox

    store = hive._open()  # noqa: SLF001 - reads the store
    if not Inbox(store).messages(RUN).answers and not _state(hive, RUN).answers_to("verdict"):
        hive.answer(RUN, "verdict", "approved")
        await report("sent")


class _State:
    def __init__(self, state: RunState) -> None:
        self.run = state

    def answers_to(self, name: str) -> bool:
        """Return whether a question of that name was answered."""
        from maestro_hive.maestro.state.projections import facts_of

        return any(facts_of(entry).get("name") == name for entry in self.run.answers.values())


def _state(hive: Hive, run_id: str) -> _State:
    from maestro_hive.hive.runs import read_run

    return _State(read_run(hive._open(), run_id))  # noqa: SLF001 - reads the store


async def _fork(hive: Hive, report: Report) -> None:
    if not any(info.run_id == FORK and info.status != "pending" for info in hive.runs()):
        _start_fork(hive)
    require(await hive.resume(FORK) == RESULT, "the fork has another result")
    await report("forked")


def _start_fork(hive: Hive) -> None:
    """Start the fork, unless it has started; a kill may have left an empty run of its name."""
    from maestro_hive.hive.errors import UnknownRunError

    try:
        started = _state(hive, FORK).run.started is not None
    except UnknownRunError:
        started = False
    if not started:
        hive.fork(RUN, from_step="work#2", new_run_id=FORK)


async def _cancel(hive: Hive, wait: WorkflowFunction[[], None], report: Report) -> None:
    from maestro_hive import RunCancelledError

    running = asyncio.create_task(hive.run(wait, run_id=CANCELLED))
    for _ in range(_POLLS):
        if running.done() or any(info.run_id == CANCELLED for info in hive.runs("running")):
            break
        await asyncio.sleep(0.001)
    if not running.done():
        hive.cancel(CANCELLED, "enough")
        await report("cancellation sent")
    try:
        await running
    except RunCancelledError:
        await report("cancelled")
    else:
        require(False, "a cancelled run ended in another way")


# --- what must be left of it -----------------------------------------------------------------------


def check_runs(folder: Path, acks: list[str], openings: int) -> None:
    """Resume everything to its end, and compare the acknowledgements before and after."""
    before = {ack for ack in acks if ack[0] not in "!~"}
    after = list(run(folder))
    for step in STEPS:
        completed = f"completed {step}" in before or "done" in before
        again = f"started {step}" in after and not _is_forked(step, before, after)
        require(not (completed and again), f"step {step} was acknowledged, and started again")
    require("sent" not in before or "sent" not in after, "the answer was sent twice")
    require({"done", "forked", "cancelled"} <= set(after), f"it ended with {after[-3:]}")
    _check_limits(folder, openings)


def _is_forked(step: str, before: set[str], after: list[str]) -> bool:
    """Return whether a step may have started in the fork: the one that the fork executes again."""
    done = after.index("done") if "done" in after else 0
    return step == "2" and "forked" not in before and f"started {step}" not in after[:done]


def _check_limits(folder: Path, openings: int) -> None:
    from maestro_hive.hive.runs import read_run
    from maestro_hive.maestro.state.sqlite.store import SqliteStore

    store = SqliteStore(folder / "state")
    try:
        for record in store.runs():
            for step in read_run(store, record.name).steps.values():
                fine = step.completed is not None and step.interruptions <= openings
                require(
                    fine,
                    f"step {step.name} of {record.name} is not completed, or was interrupted too often",
                )
        require(not store.documents("$mail"), "messages are left in the inbox")
    finally:
        store.close()
