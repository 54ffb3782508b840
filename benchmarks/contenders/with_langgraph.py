"""LangGraph's functional API on SQLite: an entrypoint that calls tasks, ``durability="sync"``.

Whatever the durability, the results of tasks are written in the background, so that a step may be
lost that the entrypoint has gone on from. Its time is therefore taken until the run has returned.
Measured with coroutines and the checkpointer for asyncio, and with plain functions and the other.

A state that grows is measured with a graph, which stores each step before the next one begins: the
time of the last steps cannot be told from what is written in the background for all.
"""

from __future__ import annotations

import asyncio
import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

from benchmarks import work
from benchmarks.contender import Contender, Figures, measured

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from benchmarks.work import Runs, Work

_PEER = "LangGraph"
_WARM_STEPS = 300
_WARM_RUNS = 5
_DURABLE = "power cut once the run is over (WAL, synchronous=FULL, in the background)"

_NO_TRACING = {"LANGSMITH_TRACING": "false", "LANGCHAIN_TRACING_V2": "false"}


def _func() -> Any:
    os.environ.update(_NO_TRACING)
    from langgraph import func  # type: ignore[import-not-found]

    return func


def _settings(thread: str) -> dict[str, Any]:
    return {"configurable": {"thread_id": thread}}


def _task(job: Work) -> Any:
    async def draft(given: Any) -> Any:
        return job.task(given)

    return _func().task(draft)


async def _call(run: Any, given: Any, thread: str) -> None:
    await run.ainvoke(given, _settings(thread), durability="sync")


def _with_saver(folder: Path, body: Callable[[Any], Coroutine[Any, Any, Figures]]) -> Figures:
    """Run a coroutine with a checkpointer whose log is warm."""
    from langgraph.checkpoint.sqlite.aio import (  # type: ignore[import-not-found]
        AsyncSqliteSaver,
    )

    async def main() -> Figures:
        async with AsyncSqliteSaver.from_conn_string(str(folder / "langgraph.db")) as saver:
            run = _run_of(work.SMALL, saver)
            await _call(run, _WARM_STEPS, "warm-up")
            for number in range(_WARM_RUNS):
                await _call(run, 1, f"warm-up-{number}")
            return await body(saver)

    return asyncio.run(main())


def _run_of(job: Work, saver: Any) -> Any:
    """Return an entrypoint of a number of steps."""
    step = _task(job)

    async def run(count: int) -> int:
        for number in range(count):
            await step(number)
        return count

    return _func().entrypoint(checkpointer=saver)(run)


def _sequence(folder: Path, *, job: Work) -> Figures:
    async def body(saver: Any) -> Figures:
        step = _task(job)
        found: list[work.Laps] = []

        async def run(count: int) -> int:
            before = None
            laps = work.Laps()
            found.append(laps)
            for number in range(1, count + 1):
                before = await step(job.given(number, before))
                laps.lap()
            return count

        with measured():
            await _call(_func().entrypoint(checkpointer=saver)(run), job.count, "bench")
        return found[0].figures(job, ended=time.perf_counter())

    return _with_saver(folder, body)


class _State(TypedDict):
    number: int
    result: Any


def _growing(folder: Path) -> Figures:
    """Let a graph of one node, done again and again, add to its state."""
    from langgraph.graph import StateGraph  # type: ignore[import-not-found]

    job, laps = work.GROWING, work.Laps()

    async def draft(state: _State) -> _State:
        laps.lap()  # what was done before is stored
        number = state["number"] + 1
        return {"number": number, "result": job.task(job.given(number, state["result"]))}

    async def body(saver: Any) -> Figures:
        graph = StateGraph(_State)
        graph.add_node("draft", draft)
        graph.set_entry_point("draft")
        graph.add_conditional_edges(
            "draft",
            lambda state: "draft" if state["number"] < job.count else "__end__",
            ["draft", "__end__"],
        )
        settings = {**_settings("bench"), "recursion_limit": 2 * job.count}
        compiled = graph.compile(checkpointer=saver)
        await compiled.ainvoke({"number": 0, "result": None}, settings, durability="sync")
        return laps.figures(job)

    return _with_saver(folder, body)


def _sequence_plain(folder: Path) -> Figures:
    from langgraph.checkpoint.sqlite import (  # type: ignore[import-not-found]
        SqliteSaver,
    )

    step = _func().task(work.SMALL.task)

    def run(count: int) -> int:
        for number in range(1, count + 1):
            step(number).result()
        return count

    with SqliteSaver.from_conn_string(str(folder / "langgraph.db")) as saver:
        entrypoint = _func().entrypoint(checkpointer=saver)(run)
        entrypoint.invoke(_WARM_STEPS, _settings("warm-up"), durability="sync")
        count = work.SMALL.count
        with measured() as span:
            entrypoint.invoke(count, _settings("bench"), durability="sync")
    return {"steps": count, "seconds": span.seconds / count}


def _at_once(folder: Path) -> Figures:
    """Let 64 chains of steps go on at once in one run."""

    async def body(saver: Any) -> Figures:
        step = _task(work.SMALL)

        async def chain(first: int) -> None:
            for number in range(work.STEPS_AT_ONCE):
                await step(number * work.AT_ONCE + first)

        async def run(width: int) -> int:
            await asyncio.gather(*(chain(number) for number in range(width)))
            return width

        entrypoint = _func().entrypoint(checkpointer=saver)(run)
        with measured() as span:
            await _call(entrypoint, work.AT_ONCE, "bench")
        count = work.AT_ONCE * work.STEPS_AT_ONCE
        return {"steps": count, "seconds": span.seconds / count}

    return _with_saver(folder, body)


def _short_runs(folder: Path, *, runs: Runs) -> Figures:
    async def body(saver: Any) -> Figures:
        run = _run_of(work.SMALL, saver)
        with measured() as span:
            for number in range(runs.sequential):
                await _call(run, runs.steps, f"bench-{number}")
            for wave in range(runs.waves):
                threads = (f"bench-{wave}-{number}" for number in range(work.AT_ONCE))
                await asyncio.gather(*(_call(run, runs.steps, thread) for thread in threads))
        return {"steps": runs.total, "seconds": span.seconds / runs.total}

    return _with_saver(folder, body)


CONTENDERS = (
    Contender(
        name="langgraph/steps",
        group="hive-steps",
        peer=_PEER,
        measure=partial(_sequence, job=work.SMALL),
        durable=_DURABLE,
    ),
    Contender(
        name="langgraph/plain-steps",
        group="hive-steps",
        peer=_PEER,
        measure=_sequence_plain,
        durable=_DURABLE,
    ),
    Contender(name="langgraph/64", group="hive-64", peer=_PEER, measure=_at_once),
    *(
        Contender(
            name=f"langgraph/{name}", group=group, peer=_PEER, measure=partial(_sequence, job=job)
        )
        for name, group, job in (
            ("answer", "hive-payload", work.ANSWER),
            ("report", "hive-payload", work.REPORT),
        )
    ),
    Contender(name="langgraph/growing", group="hive-growth", peer=_PEER, measure=_growing),
    *(
        Contender(
            name=f"langgraph/{name}",
            group="hive-runs",
            peer=_PEER,
            measure=partial(_short_runs, runs=runs),
        )
        for name, runs in (
            ("runs-of-1", work.RUNS_OF_1),
            ("runs-of-3", work.RUNS_OF_3),
            ("64-runs-of-3", work.RUNS_OF_3_AT_ONCE),
        )
    ),
)
