"""LangGraph with its SQLite checkpointer and ``durability="sync"``: a node that is run again.

Of its two interfaces this is the one that keeps a step before it goes on to the next: the results of
an ``@task`` are written in the background, whatever the durability. Measured as a coroutine with the
checkpointer for asyncio, and as a plain function with the other, which is the faster one.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, TypedDict

from benchmarks import steps
from benchmarks.contender import Contender, Figures, measured
from benchmarks.contenders.executing import AT_ONCE, SEQUENTIAL_STEPS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_STEPS_AT_ONCE = 20
_WARM_STEPS = 300
_DURABLE = "power cut (WAL, synchronous=FULL: the result, then the checkpoint)"


class _State(TypedDict):
    number: int
    last: int
    result: dict[str, object]


def _step(state: _State) -> dict[str, object]:
    number = state["number"] + 1
    return {"number": number, "result": steps.result(number)}


async def _step_async(state: _State) -> dict[str, object]:
    return _step(state)


def _next(state: _State) -> str:
    return "step" if state["number"] < state["last"] else "__end__"


def _graph(step: Callable[[_State], Any], checkpointer: object) -> Any:
    os.environ["LANGSMITH_TRACING"] = os.environ["LANGCHAIN_TRACING_V2"] = "false"
    from langgraph.graph import StateGraph  # type: ignore[import-not-found]

    graph = StateGraph(_State)
    graph.add_node("step", step)
    graph.set_entry_point("step")
    graph.add_conditional_edges("step", _next, ["step", "__end__"])
    return graph.compile(checkpointer=checkpointer)


def _input(last: int) -> _State:
    return {"number": 0, "last": last, "result": {}}


def _settings(thread: str) -> dict[str, Any]:
    return {"configurable": {"thread_id": thread}, "recursion_limit": 2 * SEQUENTIAL_STEPS}


def _run_plain(folder: Path) -> Figures:
    from langgraph.checkpoint.sqlite import (  # type: ignore[import-not-found]
        SqliteSaver,
    )

    with SqliteSaver.from_conn_string(str(folder / "langgraph.db")) as saver:
        graph = _graph(_step, saver)
        graph.invoke(_input(_WARM_STEPS), _settings("warm-up"), durability="sync")
        with measured() as span:
            graph.invoke(_input(SEQUENTIAL_STEPS), _settings("bench"), durability="sync")
    return {"steps": SEQUENTIAL_STEPS, "rate": SEQUENTIAL_STEPS / span.seconds}


def _run(folder: Path, *, at_once: int, each: int) -> Figures:
    """Let ``at_once`` graphs run ``each`` steps."""
    from langgraph.checkpoint.sqlite.aio import (  # type: ignore[import-not-found]
        AsyncSqliteSaver,
    )

    async def main() -> Figures:
        place = str(folder / "langgraph.db")
        async with AsyncSqliteSaver.from_conn_string(place) as saver:
            graph = _graph(_step_async, saver)
            await graph.ainvoke(_input(_WARM_STEPS), _settings("warm-up"), durability="sync")
            with measured() as span:
                await asyncio.gather(
                    *(
                        graph.ainvoke(_input(each), _settings(f"bench-{number}"), durability="sync")
                        for number in range(at_once)
                    )
                )
        return {"steps": at_once * each, "rate": at_once * each / span.seconds}

    return asyncio.run(main())


def _one_by_one(folder: Path) -> Figures:
    return _run(folder, at_once=1, each=SEQUENTIAL_STEPS)


def _many_at_once(folder: Path) -> Figures:
    return _run(folder, at_once=AT_ONCE, each=_STEPS_AT_ONCE)


CONTENDERS = tuple(
    Contender(name=name, group="execute", peer="LangGraph", measure=measure, durable=_DURABLE)
    for name, measure in (
        ("langgraph", _one_by_one),
        ("langgraph-plain", _run_plain),
        ("langgraph-64", _many_at_once),
    )
)
