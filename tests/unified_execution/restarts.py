"""Processes that run one after the other on the same state, and tasks that record their calls.

Each process is simulated by a store of its own: in a folder it ends as a process that exits, in
memory it can also end as one that is killed. The clock is manual, so no test waits.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.context import StepContext, current
from maestro_hive.engine.shared import release
from maestro_hive.maestro.state import stores as opened
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.testing import ManualClock, MemoryStore
from maestro_hive.unified_execution import (
    ExecutionConfig,
    FailureReport,
    StateConfig,
    StatePersistence,
    UnrecoverableError,
    persona_executor,
)
from maestro_hive.unified_execution.persona_executor import (
    ExecutionResult,
    ExecutionStatus,
    PersonaExecutor,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: So long that no store renews a lease by real time while a test advances the manual clock.
LEASE = 1e9
RUN = "run-1"


class Restarts:
    """One state, and the executors of the current process."""

    def __init__(self, folder: Path, *, persistent: bool) -> None:
        self.config = ExecutionConfig(
            state=StateConfig(
                state_dir=str(folder / "state"),
                checkpoint_dir=str(folder / "checkpoints"),
                enable_persistence=persistent,
                auto_checkpoint_interval_seconds=0,
            )
        )
        self.config.level1.jitter = 0
        self.clock = ManualClock()
        self._persistent = persistent
        self._place = Path(self.config.state.state_dir).resolve()
        self._executors: list[PersonaExecutor] = []
        self._memory: MemoryStore | None = None
        self._open()

    def _open(self) -> None:
        if self._persistent:
            store = SqliteStore(self._place, clock=self.clock, lease_seconds=LEASE)
            opened._stores().opened[store.folder, True] = opened._Opened(store, users=1)
            self._folder_store = store
        else:
            self._memory = MemoryStore(
                clock=self.clock, lease_seconds=LEASE, shared_with=self._memory
            )
            opened._stores().opened[self._place, False] = opened._Opened(self._memory)

    def executor(self, persona: str = "developer", **given: Any) -> PersonaExecutor:
        """Return an executor of the run."""
        given.setdefault("workflow_id", RUN)
        made = PersonaExecutor(self.config, persona, **given)
        self._executors.append(made)
        return made

    def restart(self) -> None:
        """End the process, and start the next one."""
        self.end()
        self._open()

    def kill(self) -> None:
        """Kill the process, and start the next one."""
        assert self._memory is not None, "only in memory can a test outlive its process"
        self._memory.abandon()
        for executor in self._executors:
            release(executor.state_persistence)
        self._executors.clear()
        self._open()

    def end(self) -> None:
        """End the process."""
        for executor in self._executors:
            executor.close()
        self._executors.clear()
        if self._persistent:
            opened.close_store(self._folder_store)


@pytest.fixture(params=[True, False], ids=["in a folder", "in memory"], name="restarts")
def any_restarts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Restarts]:
    """Restarts on either store."""
    restarts = Restarts(tmp_path, persistent=request.param)
    yield restarts
    restarts.end()


@pytest.fixture(name="any_executor")
def make_any_executor(
    request: pytest.FixtureRequest, restarts: Restarts, monkeypatch: pytest.MonkeyPatch
) -> PersonaExecutor:
    """Return an executor with a journal on either store, or without one: see ``conftest.py``."""
    if request.param:
        return restarts.executor()
    monkeypatch.setattr(persona_executor, "SystemClock", lambda: restarts.clock)
    return PersonaExecutor(restarts.config, "developer")


@pytest.fixture(name="killable")
def killable_restarts(tmp_path: Path) -> Iterator[Restarts]:
    """Restarts of processes that can be killed."""
    restarts = Restarts(tmp_path, persistent=False)
    yield restarts
    restarts.end()


class Body:
    """A task that raises or returns the given outcomes in order; the last one repeatedly."""

    def __init__(self, *outcomes: object) -> None:
        self._outcomes = list(outcomes) or ["done"]
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.contexts: list[StepContext] = []

    @property
    def count(self) -> int:
        """How often it was called."""
        return len(self.calls)

    async def __call__(self, *args: Any, **kwargs: Any) -> object:
        self.calls.append((args, kwargs))
        self.contexts.append(current())
        outcome = self._outcomes.pop(0) if len(self._outcomes) > 1 else self._outcomes[0]
        if isinstance(outcome, BaseException):
            raise outcome.with_traceback(None)  # or it would grow from raise to raise
        return outcome


def persona_state(state: StatePersistence | None, persona: str) -> dict[str, Any]:
    """Return what is known of a persona, of which something is."""
    found = state.get_persona_state(persona) if state is not None else None
    assert found is not None
    return found


def execute(
    executor: PersonaExecutor,
    task: Callable[..., Any],
    name: str = "step",
    *args: Any,
    **kwargs: Any,
) -> ExecutionResult:
    """Execute a task on a loop of its own."""
    return asyncio.run(executor.execute(task, name, *args, **kwargs))


def kill_during(restarts: Restarts, name: str = "step", **options: Any) -> None:
    """Start an attempt, and kill the process in the middle of it."""

    async def main() -> None:
        started = asyncio.Event()

        async def hang() -> None:
            started.set()
            await asyncio.Event().wait()

        executor = restarts.executor().options(**options)
        attempt = asyncio.create_task(executor.execute(hang, name))
        await started.wait()
        restarts.kill()
        attempt.cancel()
        await asyncio.gather(attempt, return_exceptions=True)  # what a dead process does is lost

    asyncio.run(main())


def failed(executor: PersonaExecutor, task: Callable[..., Any], *args: Any) -> UnrecoverableError:
    """Return what is raised when a task fails for good."""
    with pytest.raises(UnrecoverableError) as caught:
        execute(executor, task, "step", *args)
    return caught.value


def reported(error: UnrecoverableError) -> FailureReport:
    """Return the report that an error carries."""
    assert error.failure_report is not None
    return error.failure_report


def stop_while_waiting(
    restarts: Restarts, body: Body, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    """Execute until it waits for its next attempt, and stop there."""

    async def stop(_: float) -> None:
        raise asyncio.CancelledError

    executor = restarts.executor().options(**options)
    with monkeypatch.context() as patch:
        patch.setattr(restarts.clock, "sleep", stop)
        with pytest.raises(asyncio.CancelledError):
            execute(executor, body)
    assert executor.final_status is ExecutionStatus.CANCELLED
