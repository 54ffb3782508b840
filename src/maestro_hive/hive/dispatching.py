"""Runs that belong to workers: when they are due again, who is told, and how a run becomes one."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from maestro_hive.engine import settings
from maestro_hive.engine.errors import (
    BudgetExceeded,
    CircuitBreakerOpen,
    HelpNeeded,
    TokenBudgetExceeded,
    UnrecoverableError,
    parts_of,
)
from maestro_hive.engine.open_run import append_entries
from maestro_hive.engine.shared import all_shared, shared
from maestro_hive.kernel.errors import MaestroError, RunLeasedError
from maestro_hive.maestro.state.projections import facts_of
from maestro_hive.maestro.state.records import NewDispatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maestro_hive.maestro.state.projections import RunState
    from maestro_hive.maestro.state.store import Reader, Store
    from maestro_hive.maestro.state.strict_json import Json

#: The waits after failures that say nothing about the run: the first, what it grows by, the longest.
_FIRST_SECONDS = 5.0
_GROWTH = 2.0
_LAST_SECONDS = 300.0
#: A cooldown that is over is a probe of another process: it is asked again after these seconds.
_PROBE_SECONDS = 1.0
#: How deep children are nested, at most.
_DEEPEST = 1_000

#: Surrogates cannot be stored.
_version = settings.rule(
    str, "a text that is not empty, without surrogates", lambda text: text and _is_utf8(text)
)


class RunReleased(MaestroError):  # noqa: N818 - it is no failure
    """A run that only waits was released from memory; a worker takes it when it is due."""

    def __init__(self, run_id: str, due: float | None) -> None:
        super().__init__(f"run {run_id!r} waits, and was released from memory")
        self.run_id = run_id
        self.due = due

    @property
    def until(self) -> str:
        """What it waits for, in words."""
        return "an answer" if self.due is None else f"{self.due:.0f} s, or an answer"


def due_after(error: BaseException, failures: int = 0) -> float | None:
    """Return in how many seconds a worker may take a run again that was suspended by this.

    None: when it is woken, for a person has to decide. ``failures`` is how often it was suspended in
    a row by what says nothing about it, such as a store that failed.
    """
    if isinstance(error, asyncio.CancelledError):  # a polite stop
        return 0.0
    parts = list(parts_of(error))
    for part in parts:
        if isinstance(part, RunReleased):
            return part.due
    exceeded = [part for part in parts if isinstance(part, BudgetExceeded)]
    if exceeded:  # a day ends by itself
        waits = [part.retry_in for part in exceeded]
        return None if None in waits else max(each for each in waits if each is not None)
    if any(
        isinstance(part, HelpNeeded | UnrecoverableError | TokenBudgetExceeded) for part in parts
    ):
        return None
    cooldowns = [part.cooldown_seconds for part in parts if isinstance(part, CircuitBreakerOpen)]
    if cooldowns:
        return max(_PROBE_SECONDS, *cooldowns)
    return min(_FIRST_SECONDS * _GROWTH ** min(failures, 10), _LAST_SECONDS)


def is_bankrupt(error: BaseException) -> bool:
    """Return whether a run is suspended by a budget."""
    return any(isinstance(part, TokenBudgetExceeded) for part in parts_of(error))


def says_nothing(error: BaseException) -> bool:
    """Return whether a run is suspended by what is tried again after growing waits."""
    known = (RunReleased, HelpNeeded, UnrecoverableError, TokenBudgetExceeded, CircuitBreakerOpen)
    if isinstance(error, asyncio.CancelledError):
        return False
    return not any(isinstance(part, known) for part in parts_of(error))


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# --- which run belongs to workers -----------------------------------------------------------------


def check_version(version: object) -> str | None:
    """Return the version of the code that a run asks for or a worker has; raise if it is none."""
    return None if version is None else _version("version", version)


def dispatch_facts(dispatch: NewDispatch) -> dict[str, Json]:
    """Return what is recorded of it with the start of a run, so that a retry goes the same way."""
    facts: dict[str, Json] = {"queue": dispatch.queue}
    if dispatch.priority:
        facts["priority"] = dispatch.priority
    if dispatch.version is not None:
        facts["version"] = dispatch.version
    return facts


def recorded_dispatch(state: RunState) -> NewDispatch | None:
    """Return how a run was given to workers when it was started; None if it was not."""
    facts = facts_of(state.started) if state.started is not None else {}
    queue = facts.get("queue")
    if not isinstance(queue, str):
        return None
    return NewDispatch(queue, int(facts.get("priority", 0)), 0.0, facts.get("version"))


def family_of(store: Reader, run_id: str) -> Iterator[str]:
    """Yield a run, the run that started it as its child, and so on, up to the one without a parent."""
    for _ in range(_DEEPEST):
        yield run_id
        record = store.run(run_id)
        if record is None or record.parent is None:
            break
        run_id = record.parent


def root_of(store: Reader, run_id: str) -> str:
    """Return the run at the top of a run's family: the one that workers take."""
    *_, root = family_of(store, run_id)
    return root


def wake_root(store: Store, run_id: str) -> None:
    """Let a worker take the run at the top of a run's family, if that waits for one of them."""
    root = root_of(store, run_id)
    if root != run_id and store.dispatch(root) is not None:
        store.wake_run(root)
    wake_workers(store)


def belongs_to_workers(store: Reader, run_id: str) -> bool:
    """Return whether a worker executes a run, or will: it, or one that it is a child of."""
    return any(store.dispatch(each) is not None for each in family_of(store, run_id))


def give_to_workers(store: Store, run_id: str, dispatch: NewDispatch) -> bool:
    """Let a run that has not ended belong to workers, durably; False if another process has it."""
    try:
        lease = store.acquire_run(run_id)
    except RunLeasedError:
        return False
    due: float | None = 0.0
    try:
        if not lease.dispatched:
            due = dispatch.due
            append_entries(store, lease, (), dispatch=dispatch)
    finally:
        store.release_run(lease, due)
    return True


# --- the workers of this process ------------------------------------------------------------------


class WorkerSignal:
    """Lets a worker look at once; from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._event = asyncio.Event()

    def set(self) -> None:
        """Have it look."""
        with suppress(RuntimeError):  # its loop was closed
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, seconds: float) -> None:
        """Return when it was set, or after the seconds."""
        # Not by ``asyncio.timeout``, which costs an idle worker twice as much: it cancels the task.
        timer = self._loop.call_later(seconds, self._event.set)
        try:
            await self._event.wait()
        finally:
            timer.cancel()
        self._event.clear()


def register_signal(store: Store, name: str, signal: WorkerSignal) -> None:
    """Have a worker's signal set by ``wake_workers``, for as long as the worker has it."""
    shared(store, WorkerSignal, name, lambda *_: signal)


def wake_workers(store: Store) -> None:
    """Let the workers of this process look at once: there may be something to take."""
    for each in all_shared(store, WorkerSignal):
        each.set()
