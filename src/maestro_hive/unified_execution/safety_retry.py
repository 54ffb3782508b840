"""Level 2: rounds around an executor, few and slow, behind a circuit breaker; then a person.

A round is the whole of what is wrapped, once: with a ``PersonaExecutor`` a fresh set of attempts at
the same step. With a ``workflow_id`` the rounds made, the wait between them and the final failure
survive a restart; the breaker survives in any case, and is shared by all processes.
"""

from __future__ import annotations

import copy
import inspect
import random
import threading
import warnings
import weakref
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from maestro_hive.engine import settings
from maestro_hive.engine.attempt import call_in_thread, is_async
from maestro_hive.engine.breaker import CircuitBreaker, CircuitState, checked_name
from maestro_hive.engine.callers_tickets import chosen_system
from maestro_hive.engine.config import ExecutionConfig, frozen_config
from maestro_hive.engine.errors import HelpNeeded, TokenBudgetExceeded, writable
from maestro_hive.engine.execution_log import STEPS, ExecutionLog, names
from maestro_hive.engine.open_run import OpenRun, Turn, open_run
from maestro_hive.engine.plan import UNNAMED, UnencodableInputWarning, distance_to_user
from maestro_hive.engine.results import (
    ExecutionResult,
    ExecutionStatus,
    Level2Result,
    drop_metrics,
)
from maestro_hive.engine.retry_policy import delay_before
from maestro_hive.engine.rounds import RoundPolicy, Rounds, RoundsSkippedError
from maestro_hive.engine.shared import call_for_collected
from maestro_hive.engine.step import SkippedError
from maestro_hive.engine.values import in_thread
from maestro_hive.kernel.errors import ConfigurationError, EncodeError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.stores import close_store, open_store
from maestro_hive.unified_execution.persona_executor import Call, PersonaExecutor

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.engine.breaker import Permit
    from maestro_hive.engine.escalation import Escalation, JiraClient
    from maestro_hive.engine.tickets import TicketSystem
    from maestro_hive.maestro.state.store import Store


__all__ = [
    "CircuitBreaker",
    "CircuitState",
    "Level2Result",
    "SafetyRetryWrapper",
    "execute_with_full_retry",
]

DEFAULT_BREAKER = "default"


class ExecutorCall:
    """A call of a ``PersonaExecutor``: a round is one set of attempts at its step."""

    def __init__(self, executor: PersonaExecutor, call: Call) -> None:
        self.executor = executor
        self.call = call
        self.name = call.name
        self.persona: str | None = executor.persona_id
        self.uses_guard = False
        #: Whether the rounds are made in the turn of the step: they are recorded in its run.
        self.has_turn = False

    async def make(self, number: int, permit: Permit) -> ExecutionResult:
        """Make the attempts of one round."""
        guard = permit.guard if self.uses_guard else None
        return _succeeded(
            await self.executor.make(self.call, number, guard, has_turn=self.has_turn)
        )

    def identity(self) -> Identity:
        """Return the step's own; in memory, its task is known by its name."""
        if self.call.plan is not None:
            return Identity(self.call.plan.identity)
        return identity_of(self.name, self.persona, self.call.args, self.call.kwargs)


class SafetyRetryWrapper:
    """Slow rounds around an executor, behind a breaker that all share; then it asks for help.

    ``breaker`` is a breaker or the name of one, such as the provider's, to share it; by default it
    has the persona's name. It counts every round that failed. It lives in ``store``, which stays the
    caller's, or else in the journal of ``config.state.state_dir``. What the wrapper opens stays open
    until ``close``, the end of a ``with`` block, or its own end.
    """

    def __init__(
        self,
        config: ExecutionConfig | None = None,
        jira_client: JiraClient | None = None,
        *,
        workflow_id: str | None = None,
        breaker: str | CircuitBreaker | None = None,
        store: Store | None = None,
        escalation: TicketSystem | Escalation | None = None,
    ) -> None:
        self.config = frozen_config(config)
        self.workflow_id = workflow_id
        self._log = ExecutionLog(STEPS, self.config.log_level)
        self._escalation = chosen_system(self.config, jira_client, escalation)
        self._breakers: dict[str, CircuitBreaker] = {}
        self._given = breaker if isinstance(breaker, CircuitBreaker) else None
        store = self._given.store if self._given is not None else store
        self._opened = _Opened(self.config, workflow_id, store)
        self._name = self._given.name if self._given else _checked_name(breaker)
        self._latest = self._name or DEFAULT_BREAKER
        self._retry = False
        self._warned: set[str] = set()
        self._made_from: Self | None = None
        self._random = random.Random(self.config.level2.jitter_seed)  # noqa: S311 - for jitter
        self._finalizer = weakref.finalize(self, call_for_collected, self._opened.close)
        self._finalizer.atexit = False  # the stores themselves close then

    # --- the breaker ---

    @property
    def circuit_breaker(self) -> CircuitBreaker:
        """The breaker that was asked last; before the first call, the one for plain functions."""
        return self._breaker(self._latest)

    def _breaker(self, name: str) -> CircuitBreaker:
        if self._given is not None:
            return self._given
        found = self._breakers.get(name)
        store = self._opened.store()
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
        other._made_from = self  # noqa: SLF001 - what is open is closed when the last of us ends
        return other

    async def execute_safe(
        self,
        executor_func: Callable[..., object],
        *args: object,
        task_name: str = UNNAMED,
        **kwargs: object,
    ) -> Level2Result:
        """Call ``executor_func`` until it succeeds or the rounds are used up.

        ``PersonaExecutor.execute`` is told the ``task_name``; then all that follows the task is the
        task's own. Without it the name follows the task, as in ``execute``. A function that is not
        async is called in a thread. Raises ``CircuitBreakerOpen`` before anything is called, and
        ``HelpNeeded`` at the end; what must not be retried is raised as it is. A result with the
        status ``BANKRUPT`` is not retried: then the result of level 2 has that status too.
        """
        call = _understand(executor_func, args, kwargs, task_name, retry=self._retry)
        if not self._opened.ready:
            await in_thread(self._opened.open)
        run = self._opened.run()
        self._latest = self._name or call.persona or DEFAULT_BREAKER
        policy = RoundPolicy(
            config=self.config.level2,
            breaker=self._breaker(self._latest),
            escalation=self._escalation,
            escalates=self._escalation is not None or self.config.level2.enable_jira_escalation,
            rng=self._random,
            counts_all=True,
            log=self._log,
        )
        if isinstance(call, ExecutorCall):
            executor_run = call.executor.run
            call.uses_guard = (
                executor_run is not None and executor_run.store is policy.breaker.store
            )
            call.has_turn = run is not None and run is executor_run
        if run is None:
            return await self._rounds(Rounds(policy, call, None, b""), call)
        identity = self._identity(call)
        turn = Turn(run, identity, call.name)
        while not turn.take():
            await turn.wait()
        try:
            rounds = Rounds(policy, call, run, identity)
            if self._retry or (isinstance(call, ExecutorCall) and call.executor.starts_over):
                await rounds.start_over()
            return await self._rounds(rounds, call)
        finally:
            turn.give_back()

    async def _rounds(self, rounds: Rounds, call: ForeignCall | ExecutorCall) -> Level2Result:
        """Make the rounds, log how they ended, and leave out metrics that are not captured."""
        try:
            result = await self._ended_rounds(rounds, call)
        except HelpNeeded as help_needed:
            extra = names(rounds.run_id, call.name)
            self._log.info("%s needs help: %s", call.name, help_needed, extra=extra)
            self._without_metrics(help_needed.result)
            raise
        self._log.info(
            "%s ended after %d rounds: %s",
            call.name,
            result.level2_attempts,
            result.final_status.value,
            extra=names(rounds.run_id, call.name),
        )
        return self._without_metrics(result)

    def _without_metrics(self, result: Level2Result) -> Level2Result:
        if not self.config.capture_metrics and isinstance(result, Level2Result):
            for each in result.level1_results:
                drop_metrics(each)
        return result

    async def _ended_rounds(self, rounds: Rounds, call: ForeignCall | ExecutorCall) -> Level2Result:
        found = call.executor.found(call.call) if isinstance(call, ExecutorCall) else None
        if found is not None:
            return _done(rounds, found)
        try:
            outcome = await rounds.run()
        except RoundsSkippedError as skipped:
            return skipped.result
        except BankruptError as bankrupt:
            own = rounds.own_attempts(bankrupt.result)
            return rounds.level2_result(ExecutionStatus.BANKRUPT, own)
        if isinstance(call, ForeignCall) or call.call.plan is None:
            await rounds.forget()  # nothing is recorded of its result: the next call starts again
        if isinstance(outcome, ExecutionResult):
            return _done(rounds, outcome)
        made = rounds.one_call(rounds.elapsed(), ExecutionStatus.SUCCESS, final_output=outcome)
        return _done(rounds, made)

    def _identity(self, call: ForeignCall | ExecutorCall) -> bytes:
        """Return what identifies a call; warn, once for a name, if that may not be enough."""
        identity, doubt = call.identity()
        if doubt is not None and call.name not in self._warned:
            self._warned.add(call.name)
            warn_of(call.name, doubt)
        return identity

    # --- what is open ---

    def close(self) -> None:
        """Close the run and the journal that were opened here; twice is no error."""
        self._finalizer.detach()
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class BankruptError(TokenBudgetExceeded):
    """A round ended with a result that says so: what a budget refuses is not retried."""

    def __init__(self, result: ExecutionResult) -> None:
        used = result.total_tokens_used
        super().__init__("the budget is used up", result.persona_id, used, used)
        self.result = result


def _succeeded(result: ExecutionResult) -> ExecutionResult:
    """Return a result with success; raise what a round makes of any other."""
    if result.success:
        return result
    if result.final_status is ExecutionStatus.BANKRUPT:
        raise BankruptError(result)
    raise SkippedError(result)


def _done(rounds: Rounds, result: ExecutionResult) -> Level2Result:
    again = rounds.failed or result.final_status is ExecutionStatus.RECOVERED
    status = ExecutionStatus.RECOVERED if again else ExecutionStatus.SUCCESS
    return rounds.level2_result(status, rounds.own_attempts(result))


def _understand(
    function: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    task_name: str,
    *,
    retry: bool,
) -> ForeignCall | ExecutorCall:
    """Return the call that was meant: an executor is given the task's name, and names its persona.

    ``execute`` takes the name after the task. With ``task_name=`` it is put there, and everything
    that follows the task is the task's own.
    """
    if not callable(function):
        raise ConfigurationError(f"execute_safe() was given {function!r}, which cannot be called")
    owner = getattr(function, "__self__", None)
    persona = getattr(owner, "persona_id", None)
    if getattr(function, "__name__", "") != "execute" or not isinstance(persona, str):
        return ForeignCall(function=function, name=task_name, args=args, kwargs=kwargs)
    task, name, rest, named = _executor_arguments(persona, args, kwargs, task_name)
    if isinstance(owner, PersonaExecutor):
        executor = owner.options(retry=True) if retry else owner
        return ExecutorCall(executor, executor.plan(task, name, rest, named))
    return ForeignCall(
        function=function,
        name=name,
        persona=persona,
        args=(task, name, *rest),
        kwargs=named,
        identified_from=2,
    )


def _executor_arguments(
    persona: str, args: tuple[Any, ...], kwargs: dict[str, Any], task_name: str
) -> tuple[object, str, tuple[object, ...], dict[str, object]]:
    """Return the task, its name and its own arguments."""
    named = dict(kwargs)
    if args:
        task, rest = args[0], args[1:]
    elif "task" in named:
        task, rest = named.pop("task"), ()
    else:
        raise ConfigurationError(f"the executor of {persona!r} was given no task")
    if task_name != UNNAMED:
        return task, task_name, rest, named
    if rest:
        return task, rest[0], rest[1:], named
    return task, named.pop("task_name", UNNAMED), rest, named


class _Opened:
    """The journal and the run that a wrapper uses, opened when first needed."""

    def __init__(
        self, config: ExecutionConfig, workflow_id: str | None, store: Store | None
    ) -> None:
        self._config = config
        self._workflow_id = workflow_id
        self._given = store
        self._store: Store | None = None
        self._run: OpenRun | None = None
        self._mutex = threading.RLock()

    @property
    def ready(self) -> bool:
        """Return whether both are open, or not needed."""
        has_store = self._given is not None or self._store is not None
        return has_store and (self._run is not None or self._workflow_id is None)

    def open(self) -> None:
        """Open both; it may take a while."""
        self.store()
        self.run()

    def store(self) -> Store:
        """Return the store that breakers live in; one that failed is opened again."""
        with self._mutex:
            if self._given is not None:
                return self._given
            if self._store is not None and not self._store.usable:
                close_store(self._store)
                self._store = None
            if self._store is None:
                folders = self._config.state.resolve()
                self._store = open_store(folders.state, persistent=folders.persistent)
            return self._store

    def run(self) -> OpenRun | None:
        """Return the run, if there is one."""
        with self._mutex:
            if self._run is None and self._workflow_id is not None:
                run = open_run(self._config.state, self._workflow_id)
                try:
                    if run.users == 1:
                        run.load()
                    else:
                        run.catch_up()
                except BaseException:
                    run.close()
                    raise
                self._run = run
            return self._run

    def close(self) -> None:
        """Close both."""
        with self._mutex:
            run, self._run = self._run, None
            store, self._store = self._store, None
        if run is not None:
            try:
                if run.users == 1 and run.state.seq:
                    with run.copying():
                        run.write_copy()
            finally:
                run.close()
        if store is not None:
            close_store(store)


def _checked_name(breaker: object) -> str | None:
    if breaker is None:
        return None
    if not isinstance(breaker, str):
        raise ConfigurationError(f"breaker is {breaker!r}, and must be a CircuitBreaker or a name")
    return checked_name("breaker", breaker)


async def execute_with_full_retry(
    task: Callable[..., object],
    task_name: str = "task",
    persona_id: str = "default",
    config: ExecutionConfig | None = None,
    *args: object,
    **kwargs: Any,
) -> Level2Result:
    """Execute a task once, through both levels; the persona's breaker is the shared one."""
    executor = PersonaExecutor(config, persona_id)
    wrapper = SafetyRetryWrapper(config)
    try:
        return await wrapper.execute_safe(executor.execute, task, task_name, *args, **kwargs)
    finally:
        # In a thread: the last one closes the journal, which takes time.
        await in_thread(wrapper.close)


# --- what is called when it is no step of ours -----------------------------------------------------


class Identity(NamedTuple):
    """What identifies a call in its run, also after a restart; and what it leaves out."""

    digest: bytes
    doubt: str | None = None


@dataclass(slots=True, kw_only=True)
class ForeignCall:
    """A function and its arguments; a round calls it once, in a thread if it blocks."""

    function: Callable[..., object]
    name: str
    args: tuple[object, ...] = ()
    kwargs: dict[str, object] = field(default_factory=dict)
    persona: str | None = None
    uses_guard: bool = False
    #: How many of the arguments before do not identify the call.
    identified_from: int = 0

    async def make(self, number: int, permit: Permit) -> object:
        """Call it once, and wait for what it returns."""
        del number, permit
        if is_async(self.function):
            outcome = self.function(*self.args, **self.kwargs)
            outcome = await outcome if inspect.isawaitable(outcome) else outcome
        else:
            outcome = await call_in_thread(self.function, self.args, self.kwargs)
        return _succeeded(outcome) if isinstance(outcome, ExecutionResult) else outcome

    def identity(self) -> Identity:
        """Return what identifies it: its name, its arguments, and what its function carries."""
        own = self.args[self.identified_from :]
        carrier = None if self.identified_from else self.function
        return identity_of(self.name, self.persona, own, self.kwargs, carrier)


def identity_of(
    name: object,
    persona: str | None,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    function: Callable[..., object] | None = None,
) -> Identity:
    """Return what identifies a call of that name, with what ``function`` carries if it is given."""
    if not isinstance(name, str) or name in ("", UNNAMED):
        raise ConfigurationError(
            f"a call whose rounds are recorded needs a name to be found by, and {name!r} is"
            " none; give execute_safe() a task_name"
        )
    digests = _Digests()
    carried = [] if function is None else digests.carried_by(function)
    given = [digests.of(value, f"args[{number}]") for number, value in enumerate(args)]
    named = {key: digests.of(value, key) for key, value in kwargs.items()}
    parts = ["level2", name, persona, carried, given, named]
    return Identity(codec.canonical_digest(parts), digests.doubt)


class _Digests:
    """Digests of values; ``doubt`` names the first that has none."""

    def __init__(self) -> None:
        self.doubt: str | None = None

    def of(self, value: object, path: str) -> str | None:
        """Return the digest of a value's data; None if it has no form in JSON."""
        try:
            return codec.canonical_digest(value, path).hex()
        except EncodeError as error:
            self.doubt = self.doubt or str(error)
            return None

    def carried_by(self, function: object) -> list[object]:
        """Return digests of the data that a function carries.

        Its own name does not count: it may change, and the call is still the same.
        """
        if isinstance(function, partial):
            given = [self.of(value, f"partial[{n}]") for n, value in enumerate(function.args)]
            named = {name: self.of(value, name) for name, value in function.keywords.items()}
            return [_qualified(function.func), given, named, self.carried_by(function.func)]
        if isinstance(function, FunctionType):
            self._doubt_local(function)
            return []
        owner = getattr(function, "__self__", function)
        if owner is None or isinstance(owner, type | ModuleType):
            return []
        return [self.of(owner, "self")]

    def _doubt_local(self, function: FunctionType) -> None:
        is_lambda = function.__name__ == "<lambda>"
        carries = function.__closure__ or function.__defaults__ or function.__kwdefaults__
        if is_lambda or ("<locals>" in function.__qualname__ and carries):
            what = "a lambda" if is_lambda else f"{function.__name__}, a local function,"
            self.doubt = self.doubt or f"what {what} carries is not part of it"


def _qualified(value: object) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    return writable(f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', '')}")


def warn_of(name: str, doubt: str) -> None:
    """Warn, at the user's own line, that a call may be taken for another."""
    warnings.warn(
        f"{name!r} is identified by its name and its plain arguments alone: {doubt}."
        " Give plain data as arguments, or each call its own task_name",
        UnencodableInputWarning,
        stacklevel=distance_to_user(),
    )
