"""Level 2: rounds around an executor, few and slow, behind a circuit breaker; then a person.

A round is the whole of what is wrapped, once: with a ``PersonaExecutor`` a fresh set of attempts at
the same step. With a ``workflow_id`` the rounds made, the wait between them and the final failure
survive a restart; the breaker survives in any case, and is shared by all processes.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import copy
import random
import threading
import weakref
from typing import TYPE_CHECKING, Any, Self

from maestro_hive.engine import settings
from maestro_hive.engine.breaker import CircuitBreaker, CircuitState
from maestro_hive.engine.config import ExecutionConfig, get_execution_config
from maestro_hive.engine.escalation import (
    Escalation,
    JiraClient,
    JiraEscalation,
    checked,
)
from maestro_hive.engine.open_run import OpenRun, open_run
from maestro_hive.engine.results import Level2Result
from maestro_hive.engine.retry_policy import delay_before
from maestro_hive.kernel.errors import ConfigurationError, MaestroError
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.stores import borrow_memory_store, borrow_store, return_store
from maestro_hive.unified_execution.level2 import Level2, Level2Execution
from maestro_hive.unified_execution.persona_executor import PersonaExecutor
from maestro_hive.unified_execution.state_persistence import StatePersistence
from maestro_hive.unified_execution.steps import UNNAMED
from maestro_hive.unified_execution.wrapped_call import WrappedCall, understand, warn_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.maestro.state.store import Store

__all__ = [
    "CircuitBreaker",
    "CircuitState",
    "Level2Result",
    "SafetyRetryWrapper",
    "execute_with_full_retry",
]

DEFAULT_BREAKER = "default"


class SafetyRetryWrapper:
    """Slow rounds around an executor, behind a breaker that all share; then it asks for help.

    ``breaker`` is a breaker or the name of one, such as the provider's, to share it; by default it
    has the persona's name. It lives in ``store``, which stays the caller's, or else in the journal
    of ``config.state.state_dir``. What the wrapper opens it holds until ``close``, the end of a
    ``with`` block, or its own end.
    """

    def __init__(
        self,
        config: ExecutionConfig | None = None,
        jira_client: JiraClient | None = None,
        *,
        workflow_id: str | None = None,
        breaker: str | CircuitBreaker | None = None,
        store: Store | None = None,
        escalation: Escalation | None = None,
    ) -> None:
        self.config = (config or get_execution_config()).frozen()
        self.workflow_id = workflow_id
        self._escalation = self._chosen_escalation(jira_client, escalation)
        self._breakers: dict[str, CircuitBreaker] = {}
        self._given = breaker if isinstance(breaker, CircuitBreaker) else None
        self._held = _Held(self.config, workflow_id, store, needed=self._given is None)
        self._name = self._given.name if self._given else _checked_name(breaker)
        self._latest = self._name or DEFAULT_BREAKER
        self._retry = False
        self._warned: set[str] = set()
        self._lent_by: Self | None = None
        self._random = random.Random(self.config.level2.jitter_seed)  # noqa: S311 - for jitter
        self._finalizer = weakref.finalize(self, _close_quietly, self._held)
        self._finalizer.atexit = False  # the stores themselves close then

    def _chosen_escalation(
        self, jira_client: JiraClient | None, escalation: Escalation | None
    ) -> Escalation | None:
        jira = None
        if jira_client is not None:
            jira = JiraEscalation(jira_client, self.config.jira_project_key)
        if escalation is not None:
            checked(escalation, "escalate", "escalation")
            return escalation
        return jira if self.config.level2.enable_jira_escalation else None

    # --- the breaker ---

    @property
    def circuit_breaker(self) -> CircuitBreaker:
        """The breaker that was asked last; before the first call, the one for plain functions."""
        return self._breaker(self._latest)

    def _breaker(self, name: str) -> CircuitBreaker:
        if self._given is not None:
            return self._given
        found = self._breakers.get(name)
        store = self._held.store()
        if found is None or found.store is not store:  # the store failed, and was opened again
            level2 = self.config.level2
            found = self._breakers[name] = CircuitBreaker(
                level2.circuit_breaker_threshold,
                level2.circuit_breaker_cooldown_seconds,
                name=name,
                store=store,
            )
        return found

    def _calculate_delay(self, attempt: int) -> float:
        """Return the wait after that many failed rounds, without jitter."""
        return delay_before(self.config.level2, attempt)

    # --- execution ---

    def options(self, *, retry: bool = False) -> Self:
        """Return this wrapper with other options for its calls.

        ``retry`` gives a call that ended with ``HelpNeeded`` all of its rounds again, and the
        executor's step new attempts.
        """
        other = copy.copy(self)
        other._retry = settings.flag("the option retry", retry)  # noqa: SLF001 - it is one of us
        other._lent_by = self  # noqa: SLF001 - what is held is let go when the last of us ends
        return other

    async def execute_safe(
        self,
        executor_func: Callable[..., Any],
        *args: Any,
        task_name: str = UNNAMED,
        **kwargs: Any,
    ) -> Level2Result:
        """Call ``executor_func`` until it succeeds or the rounds are used up.

        ``PersonaExecutor.execute`` is told the ``task_name``; then all that follows the task is the
        task's own. Without it the name follows the task, as in ``execute``. A function that is not
        async is called in a thread. Raises ``CircuitBreakerOpen`` before anything is called, and
        ``HelpNeeded`` at the end; what must not be retried is raised as it is.
        """
        call = understand(executor_func, args, kwargs, task_name)
        if self._retry:
            call = call.starting_over()
        name = self._name or call.persona or DEFAULT_BREAKER
        if not self._held.ready:
            await asyncio.to_thread(self._held.open)
        self._latest = name
        run = self._held.run()
        identity = self._identity(call) if run is not None else b""
        level2 = Level2(
            config=self.config.level2,
            breaker=self._breaker(name),
            run=run,
            escalation=self._escalation,
            random=self._random,
        )
        return await Level2Execution(level2, call, identity).result()

    def _identity(self, call: WrappedCall) -> bytes:
        """Return what tells a call from others; say so, once for a name, if that may not do."""
        identity, doubt = call.identity()
        if doubt is not None and call.name not in self._warned:
            self._warned.add(call.name)
            warn_of(call.name, doubt)
        return identity

    # --- what it holds ---

    def close(self) -> None:
        """Let go of the run and the journal that were opened here; twice is no error."""
        self._finalizer.detach()
        self._held.close()

    def __enter__(self) -> Self:
        """Use it in a ``with`` statement."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let go at the end of it."""
        self.close()


class _Held:
    """The journal and the run that a wrapper uses, opened when first needed."""

    def __init__(
        self,
        config: ExecutionConfig,
        workflow_id: str | None,
        store: Store | None,
        *,
        needed: bool,
    ) -> None:
        self._is_store_needed = needed
        self._config = config
        self._workflow_id = workflow_id
        self._given = store
        self._borrowed: Store | None = None
        self._run: OpenRun | None = None
        self._state: StatePersistence | None = None
        self._mutex = threading.RLock()

    @property
    def ready(self) -> bool:
        """Return whether all is open that is needed."""
        has_store = self._given is not None or self._borrowed is not None
        has_store = has_store or not self._is_store_needed
        return has_store and (self._run is not None or self._workflow_id is None)

    def open(self) -> None:
        """Open all that is needed; it may take a while."""
        if self._is_store_needed:
            self.store()
        self.run()

    def store(self) -> Store:
        """Return the store that breakers live in."""
        with self._mutex:
            if self._given is not None:
                return self._given
            if isinstance(self._borrowed, SqliteStore) and not self._borrowed.usable:
                return_store(self._borrowed)
                self._borrowed = None
            if self._borrowed is None:
                folders = self._config.state.resolve()
                borrow = borrow_store if folders.persistent else borrow_memory_store
                self._borrowed = borrow(folders.state)
            return self._borrowed

    def run(self) -> OpenRun | None:
        """Return the run, if there is one."""
        with self._mutex:
            if self._run is None and self._workflow_id is not None:
                self._run = self._opened_run(self._workflow_id)
            return self._run

    def _opened_run(self, workflow_id: str) -> OpenRun:
        run = open_run(self._config.state.resolve(), workflow_id)
        try:
            if run.users == 1:  # the first here: without a journal, copies are looked for
                self._state = StatePersistence(self._config, workflow_id)
            run.catch_up()
        except BaseException:
            run.close()
            raise
        return run

    def close(self) -> None:
        """Let both go."""
        with self._mutex:
            run, self._run = self._run, None
            state, self._state = self._state, None
            store, self._borrowed = self._borrowed, None
        if run is not None:
            run.close()
        if state is not None:
            state.shutdown()
        if isinstance(store, SqliteStore):
            return_store(store)


def _close_quietly(held: _Held) -> None:
    # In a thread: the collector may have come here from inside the store, with its locks held.
    with contextlib.suppress(RuntimeError):  # the process ends, and closes its stores
        _thread.start_new_thread(_close_in_thread, (held,))


def _close_in_thread(held: _Held) -> None:
    with contextlib.suppress(MaestroError):  # a store that failed has nothing to let go
        held.close()


def _checked_name(breaker: object) -> str | None:
    if breaker is None:
        return None
    if not isinstance(breaker, str):
        raise ConfigurationError(f"breaker is {breaker!r}, and must be a CircuitBreaker or a name")
    return CircuitBreaker(name=breaker).name


async def execute_with_full_retry(
    task: Callable[..., Any],
    task_name: str,
    persona_id: str,
    config: ExecutionConfig | None = None,
    *args: Any,
    **kwargs: Any,
) -> Level2Result:
    """Execute a task once, through both levels; the persona's breaker is the shared one."""
    executor = PersonaExecutor(config, persona_id)
    wrapper = SafetyRetryWrapper(config)
    try:
        return await wrapper.execute_safe(executor.execute, task, task_name, *args, **kwargs)
    finally:
        await asyncio.to_thread(wrapper.close)  # the last one closes the journal, which takes time
