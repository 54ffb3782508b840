"""A run that this process executes: its steps, its waits, and being cancelled."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from maestro_hive.engine.tracebacks import with_own_lines
from maestro_hive.hive import runs as entries
from maestro_hive.hive.errors import OutsideRunError
from maestro_hive.hive.runs import identity_of
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.maestro.state.records import EntryKind
from maestro_hive.maestro.state.views import open_waits
from maestro_hive.unified_execution.persona_executor import PersonaExecutor
from maestro_hive.unified_execution.safety_retry import SafetyRetryWrapper

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from maestro_hive.engine.config import ExecutionConfig
    from maestro_hive.engine.escalation import Escalation
    from maestro_hive.engine.healing import Healer
    from maestro_hive.engine.policy import Enforcer
    from maestro_hive.hive.step_terms import Key, Step, StepOptions
    from maestro_hive.maestro.state.records import NewEntry
    from maestro_hive.unified_execution.call_options import Gate
    from maestro_hive.unified_execution.state_persistence import StatePersistence

_active: ContextVar[ActiveRun | None] = ContextVar("live_run", default=None)


class Workflow(Protocol):
    """What a run is executed of."""

    @property
    def name(self) -> str:
        """What its runs are found by."""
        ...

    @property
    def function(self) -> Callable[..., Awaitable[Any]]:
        """What is called, at every start."""
        ...

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of what it takes, with stars as in its signature."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Staff:
    """What the steps of every run work with."""

    config: ExecutionConfig
    #: Returns what the attempts of a step have to pass; None where nothing limits them.
    gate: Callable[[StepOptions], Gate | None]
    #: Runs a workflow as the child of a run.
    run_child: Callable[[ActiveRun, Workflow, tuple[Any, ...], dict[str, Any]], Awaitable[Any]]
    healer: Healer | None = None
    enforcer: Enforcer | None = None
    escalation: Escalation | None = None


class ActiveRun:
    """A run under way. ``cancelled_because`` is set once somebody wants its end."""

    def __init__(self, staff: Staff, state: StatePersistence, parent: ActiveRun | None) -> None:
        self.run_id = state.workflow_id
        self.state = state
        self.held = state.run
        self.parent = parent
        self.children: set[ActiveRun] = set()
        self.cancelled_because: str | None = None
        #: The questions that the workflow asks just now, and those that somebody settles.
        self._listeners: dict[bytes, asyncio.Future[None]] = {}
        self._claimed: set[bytes] = set()
        #: Asks for letters to be looked for at once; set by whoever looks for them.
        self.check_inbox: Callable[[], None] = _no_watcher
        self.loop = asyncio.get_running_loop()
        self._staff = staff
        self._tasks: Counter[asyncio.Task[Any]] = Counter()
        self._calls: Counter[bytes] = Counter()
        self._executors: dict[Step, PersonaExecutor] = {}
        self._wrappers: dict[str | None, SafetyRetryWrapper] = {}

    # --- being the one under way ---

    async def drive(self, body: Callable[[], Any]) -> Any:
        """Return what a workflow's function returns; what it started and left behind is stopped."""
        token = _active.set(self)
        try:
            return await self.owning(body)
        finally:
            _active.reset(token)
            await self._stop_leftovers()

    async def owning(self, call: Callable[[], Any]) -> Any:
        """Await a call as part of this run: cancelling the run cancels it."""
        task = asyncio.current_task()
        assert task is not None
        self.check_going()
        self._tasks[task] += 1
        try:
            return await call()
        finally:
            self._tasks[task] -= 1
            if not self._tasks[task]:
                del self._tasks[task]

    async def _stop_leftovers(self) -> None:
        left = [task for task in self._tasks if not task.done()]
        for task in left:
            task.get_loop().call_soon_threadsafe(task.cancel)
        here = [task for task in left if task.get_loop() is self.loop]
        if here:
            await asyncio.wait(here)

    def check_going(self) -> None:
        """Raise if the run was cancelled: nothing more shall begin."""
        if self.cancelled_because is not None:
            raise asyncio.CancelledError(f"run {self.run_id!r} was cancelled")

    def cancel(self, reason: str) -> None:
        """Cancel it, its children, and all that they are busy with; from any thread."""
        self.loop.call_soon_threadsafe(self._cancel, reason)

    def _cancel(self, reason: str) -> None:
        if self.cancelled_because is not None:
            return  # once: what cleans up after itself shall not be cancelled again
        tasks = {task for run in self._family() for task in run._tasks}  # noqa: SLF001 - of ours
        for run in self._family():
            run.cancelled_because = run.cancelled_because or reason
        for task in tasks:
            task.get_loop().call_soon_threadsafe(task.cancel)

    def _family(self) -> list[ActiveRun]:
        found = [self]
        for run in found:
            found.extend(run.children)
        return found

    def close(self) -> None:
        """Let go of what its steps needed; the run itself is its opener's to let go."""
        for wrapper in self._wrappers.values():
            wrapper.close()

    # --- questions ---
    # A workflow's code may run in more than one loop, each in its thread: the run's lock decides.

    def listen(self, identity: bytes) -> asyncio.Future[None]:
        """Return what is done when a question is answered; in the loop that asks it."""
        with self.held.mutex:
            self._claimed.discard(identity)
            listener = asyncio.get_running_loop().create_future()
            self._listeners[identity] = listener
            return listener

    def listen_no_more(self, identity: bytes) -> None:
        """Say that nobody waits for the answer any more."""
        with self.held.mutex:
            self._listeners.pop(identity, None)

    def listens(self, identity: bytes) -> bool:
        """Return whether the workflow asks this just now, and nobody is about to settle it."""
        with self.held.mutex:
            return identity in self._listeners and identity not in self._claimed

    def claim(self, identity: bytes) -> bool:
        """Become the one who settles a question, by an answer or by saying that it is too late."""
        with self.held.mutex:
            mine = self.listens(identity)
            if mine:
                self._claimed.add(identity)
            return mine

    def give_up_claim(self, identity: bytes) -> None:
        """Let somebody else settle it."""
        with self.held.mutex:
            self._claimed.discard(identity)

    def tell(self, identity: bytes, error: Exception | None = None) -> None:
        """Wake whoever waits for the answer, or say why it cannot be had."""
        with self.held.mutex:
            listener = self._listeners.get(identity)
        if listener is not None:
            listener.get_loop().call_soon_threadsafe(_settle, listener, error)

    def tell_all(self, error: Exception) -> None:
        """Say to all who wait why no answer can be had."""
        for identity in list(self._listeners):
            self.tell(identity, error)

    # --- which of several equal calls ---

    def occurrence(self, identity: bytes) -> int:
        """Count the calls that are equal, since the run was opened."""
        self._calls[identity] += 1
        return self._calls[identity]

    def told_apart(self, *parts: str | bytes) -> bytes:
        """Return an identity for one more call that these parts describe."""
        identity = identity_of(*parts)
        number = self.occurrence(identity)
        return identity if number == 1 else hashlib.sha256(identity + b"#%d" % number).digest()

    # --- steps ---

    async def call(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a step's result: from the journal if it is there, else through both levels."""
        executor = self._executor(step)
        terms, function = step.terms, step.body
        if terms.key is not None:
            executor = executor.options(key=_key_of(step, terms.key, args, kwargs))
        else:
            identity = executor.step_identity(function, terms.name, *args, **kwargs)
            assert identity is not None
            number = self.occurrence(identity)
            if number > 1:
                executor = executor.options(occurrence=number)
        kept = executor.completed_result(function, terms.name, *args, **kwargs)
        if kept is not None:
            return kept.final_output
        wrapper = self._wrapper(terms.breaker)
        try:
            done = await self.owning(
                lambda: wrapper.execute_safe(
                    executor.execute, function, *args, task_name=terms.name, **kwargs
                )
            )
        except Exception as error:  # noqa: BLE001 - whatever the step raised
            raise with_own_lines(error)  # noqa: B904 - it is the same error
        return done.level1_results[-1].final_output

    def _executor(self, step: Step) -> PersonaExecutor:
        found = self._executors.get(step)
        if found is None:
            found = self._executors[step] = self._new_executor(step.terms)
        return found

    def _new_executor(self, terms: StepOptions) -> PersonaExecutor:
        config = self._staff.config
        if terms.budget is not None:
            tokens = replace(config.tokens, max_tokens_per_persona=terms.budget)
            config = replace(config, tokens=tokens)
        executor = PersonaExecutor(
            config,
            terms.persona,
            self._staff.healer,
            state_persistence=self.state,
            enforcer=self._staff.enforcer,
        )
        options = terms.options
        return executor.options(
            max_attempts=options.max_attempts,
            timeout=options.timeout,
            retry_on=options.retry_on,
            on_ambiguous=options.on_ambiguous,
            store_input=options.store_input,
            gate=self._staff.gate(terms),
        )

    def _wrapper(self, breaker: str | None) -> SafetyRetryWrapper:
        found = self._wrappers.get(breaker)
        if found is None:
            found = self._wrappers[breaker] = SafetyRetryWrapper(
                self._staff.config,
                workflow_id=self.run_id,
                breaker=breaker,
                store=self.held.store,
                escalation=self._staff.escalation,
            )
        return found

    async def run_child(
        self, workflow: Workflow, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of another workflow, in a run of its own."""
        return await self._staff.run_child(self, workflow, args, kwargs)

    # --- what is recorded of the run itself ---

    async def record(self, entry: NewEntry, *, sync: bool = True) -> None:
        """Record an entry, and let listings show where the run stands after it."""
        status = self._status_with(entry)
        await self.held.record(entry, sync=sync, status=status)

    def _status_with(self, entry: NewEntry) -> str:
        """Return the run's status once the entry is written."""
        asked = {each.identity for each in open_waits(self.held.state)}
        match entry.kind:
            case EntryKind.WAIT_STARTED if entries.asks_a_person(entry):
                asked.add(entry.identity)
            case EntryKind.WAIT_ENDED:
                asked.discard(entry.identity)
            case _:
                pass
        return entries.WAITING if asked else entries.RUNNING


def _settle(listener: asyncio.Future[None], error: Exception | None) -> None:
    if listener.done():
        return
    if error is None:
        listener.set_result(None)
    else:
        listener.set_exception(error)


def _no_watcher() -> None:
    """There is nobody to be asked yet."""


def _key_of(step: Step, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the key that a step was given by hand, for these arguments."""
    if callable(key):
        return key(*args, **kwargs)
    bound = step.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    try:
        return key.format(**bound.arguments)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ConfigurationError(
            f"the key {key!r} of step {step.terms.name!r} cannot be made of its arguments"
            f" ({', '.join(bound.arguments)}): {error!r}"
        ) from error


def active_run(what: str) -> ActiveRun:
    """Return the run that is under way here; ``what`` needs one."""
    found = _active.get()
    if found is None:
        raise OutsideRunError(
            f"{what} was called outside a run: call it from a workflow that hive.run executes"
        )
    return found


def active_run_or_none() -> ActiveRun | None:
    """Return the run that is under way here, if there is one."""
    return _active.get()
