"""Steps through the whole executor: looked for, recorded, called, recorded, returned."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from benchmarks import steps
from benchmarks.contender import Contender, Figures, measured
from maestro_hive import ExecutionConfig
from maestro_hive.engine.config import StateConfig
from maestro_hive.maestro.state.recorder import recorder_for
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.stores import close_store, open_store
from maestro_hive.unified_execution.persona_executor import PersonaExecutor

if TYPE_CHECKING:
    from pathlib import Path

#: What a peer is asked for, too.
SEQUENTIAL_STEPS = 500
AT_ONCE = 64
_WARM_STEPS = 50


def executor_on(folder: Path, workflow_id: str) -> PersonaExecutor:
    """Return an executor of one run that is kept in the folder."""
    config = ExecutionConfig()
    config.state = StateConfig(state_dir=str(folder), checkpoint_dir=str(folder / "checkpoints"))
    return PersonaExecutor(config, persona_id="writer", workflow_id=workflow_id)


async def draft(number: int) -> dict[str, object]:
    """Succeed at once: the task of every step."""
    return steps.result(number)


def _execute(folder: Path, *, at_once: int, each: int, runs: int = 1) -> Figures:
    """Let ``at_once`` tasks execute ``each`` steps, spread over ``runs`` runs."""

    async def main() -> Figures:
        store = open_store(folder)  # the one that the executors use
        assert isinstance(store, SqliteStore)
        await steps.warm(store, recorder_for(store))
        await _warm(folder)
        with ExitStack() as opened:
            executors = [
                opened.enter_context(executor_on(folder, f"bench-{number}"))
                for number in range(runs)
            ]

            async def chain(number: int) -> None:
                executor = executors[number % runs]
                for step in range(each):
                    await executor.execute(draft, "draft", step * at_once + number + 1)

            with measured() as span:
                await asyncio.gather(*(chain(number) for number in range(at_once)))
        close_store(store)
        return {"steps": at_once * each, "rate": at_once * each / span.seconds}

    return asyncio.run(main())


async def _warm(folder: Path) -> None:
    with executor_on(folder, "executor-warm-up") as executor:
        for number in range(1, _WARM_STEPS + 1):
            await executor.execute(draft, "draft", number)


CONTENDERS = (
    Contender(
        name="execute",
        group="execute",
        measure=partial(_execute, at_once=1, each=SEQUENTIAL_STEPS),
        durable="power cut (begun: kill -9)",
    ),
    Contender(
        name="execute-64",
        group="execute",
        measure=partial(_execute, at_once=AT_ONCE, each=100),
        durable="power cut (begun: kill -9)",
    ),
    Contender(
        name="execute-64-runs",
        group="execute",
        measure=partial(_execute, at_once=AT_ONCE, each=100, runs=AT_ONCE),
        durable="power cut (begun: kill -9)",
    ),
)
