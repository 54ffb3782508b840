"""A state machine over ``PersonaExecutor``: bodies fail, crash and are stopped, next to a model.

``StepModel`` and ``RunModel`` say what must be true; they know nothing of journals. A "process"
here is a store and an executor on it, and its crash is the store's: whatever it would still write
is refused. In memory the next process shares the data; in a folder it gets a copy of the files as
they were at the crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from faults.manual_clocks import CrashedError, CrashingClock
from maestro_hive.engine.config import ExecutionConfig, Level1Config, StateConfig
from maestro_hive.engine.context import current, round_number
from maestro_hive.engine.errors import UnrecoverableError
from maestro_hive.engine.open_run import OpenRun
from maestro_hive.engine.shared import forget_shared, release
from maestro_hive.kernel.errors import StorageError
from maestro_hive.maestro.state import stores as opened
from maestro_hive.maestro.state.memory import MemoryStore
from maestro_hive.maestro.state.projections import facts_of
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.unified_execution.persona_executor import PersonaExecutor

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from maestro_hive.engine.results import ExecutionResult
    from maestro_hive.maestro.state.projections import StepState


MAX_ATTEMPTS, MAX_INTERRUPTIONS = 3, 2
DELAYS = {1: 4.0, 2: 8.0}
#: Rounding errors of clock arithmetic are smaller than this.
TINY = 1e-3


@dataclass
class StepModel:
    """One step."""

    completed: bool = False
    output: Any = None
    starts: int = 0
    #: Failures by round of level 2: each has its own set of attempts.
    by_round: dict[int, int] = field(default_factory=dict)
    #: The rounds it was started in.
    rounds: set[int] = field(default_factory=set)
    stops: int = 0
    interruptions: int = 0
    last_attempt: int = 0
    open: bool = False
    #: The round that a failure ended.
    final: int | None = None
    #: Whether it ever failed, also before a retry was requested.
    failed_before: bool = False
    progress: dict[str, Any] = field(default_factory=dict)
    #: When it may be called again, in true time, if its last outcome was a failure.
    due: float | None = None
    #: How long the wait is that ``due`` ends, and whether the machine was rebooted in it.
    wait: float = 0.0
    rebooted: bool = False

    @property
    def started(self) -> bool:
        """Return whether the journal has an attempt of it."""
        return self.last_attempt > 0

    @property
    def failures(self) -> int:
        """The number of failed attempts."""
        return sum(self.by_round.values())

    def sentences(self) -> int:
        """Return how many sentences of feedback there are; after a retry only the last failure's."""
        return self.failures or int(self.failed_before)

    def verdict(self, number: int = 1) -> str:
        """Return what a call in this round results in: ``called`` if the body is called."""
        if self.completed:
            return "completed"
        if self.interruptions + self.open > MAX_INTERRUPTIONS:
            return "interrupted"
        failures = self.by_round.get(number, 0)
        if failures and (self.final == number or failures >= MAX_ATTEMPTS):
            return "failed"
        return "called"

    def earliest(self, now: float) -> float:
        """Return the earliest time of the next call."""
        return now if self.due is None or self.rebooted else max(now, self.due)

    def latest(self, now: float) -> float:
        """Return the latest time of the first call of the body, for an execution requested now."""
        if self.due is None:
            return now
        return now + self.wait if self.rebooted else max(now, self.due)

    # --- events ---

    def start(self, number: int = 1) -> None:
        """An attempt starts; an earlier one that never ended is an interruption."""
        verdict = self.verdict(number)
        assert verdict == "called", f"called, but it is {verdict}"
        self.interruptions += self.open
        self.starts += 1
        self.rounds.add(number)
        self.last_attempt += 1
        self.open = True
        self.due = None

    def complete(self, output: Any) -> None:
        """It completes."""
        self.open, self.completed, self.output = False, True, output

    def fail(self, now: float, number: int, *, final: bool) -> None:
        """It fails, and is retried after a delay unless this failure is final."""
        self.open = False
        failures = self.by_round[number] = self.by_round.get(number, 0) + 1
        self.due, self.final = None, None
        self.failed_before = True
        if final or failures >= MAX_ATTEMPTS:
            self.final = number
        else:
            self.wait = DELAYS[failures]
            self.due, self.rebooted = now + self.wait, False

    def stop(self) -> None:
        """It is stopped gracefully."""
        self.open = False
        self.stops += 1

    def interrupt(self) -> None:
        """It exceeds its limit of interruptions, and that is recorded."""
        self.interruptions += self.open
        self.open = False

    def start_over(self, *, forget: bool) -> None:
        """A retry is requested, or with ``forget`` a complete repetition."""
        if not self.started or (self.completed and not forget):
            return
        self.starts = self.stops = self.interruptions = 0
        self.by_round, self.rounds = {}, set()
        self.open = False
        self.due = self.final = None
        if forget:
            self.completed, self.output, self.progress = False, None, {}
            self.failed_before = False


@dataclass
class RunModel:
    """One run of one persona."""

    steps: dict[tuple[str, int], StepModel] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    history: list[Any] = field(default_factory=list)
    tokens: int = 0
    marked: dict[str, Any] = field(default_factory=dict)

    def step(self, name: str, given: int) -> StepModel:
        """Return a step, which may be new."""
        return self.steps.setdefault((name, given), StepModel())

    def completed(self) -> set[str]:
        """Return the names of completed tasks."""
        started = [(name, step) for (name, _), step in self.steps.items() if step.started]
        waiting = {name for name, step in started if not step.completed}
        return {name for name, _ in started if name not in waiting} | set(self.marked)

    def retries(self) -> int:
        """Return the number of attempts after the first one."""
        return sum(step.last_attempt - 1 for step in self.steps.values() if step.started)

    def reboot(self) -> None:
        """The machine reboots: a wait may now end early, and lasts at most one full wait more."""
        for step in self.steps.values():
            step.rebooted = True


RUN, PERSONA = "run", "developer"
_NAMES = st.sampled_from(["a", "b", "c"])
_GIVEN = st.sampled_from([1, 2])
#: What a body does when it is called; ``crash-waiting`` crashes in the wait after its failure.
_ACTS = st.lists(
    st.sampled_from("ok fail final crash crash-first crash-waiting stop".split()),
    min_size=1,
    max_size=4,
)
_ROUNDS = st.sampled_from([1, 1, 1, 2])
_HARMLESS = st.lists(st.sampled_from(["ok", "fail"]), min_size=1, max_size=4)


class ExecutionMachine(RuleBasedStateMachine):
    """The rules; subclasses define how a store is opened and how it crashes."""

    done: ClassVar[int] = 0
    counter: ClassVar[type[ExecutionMachine]]

    def __init__(self) -> None:
        super().__init__()
        self.clock = CrashingClock()
        self.model = RunModel()
        self.loop = asyncio.new_event_loop()
        self.top = Path(tempfile.mkdtemp(prefix="faults-execution-"))
        self.executor: PersonaExecutor | None = None
        self.outputs = 0
        #: Failed assertions inside bodies, and whether several bodies share the clock.
        self.wrong: list[AssertionError] = []
        self.concurrent = False

    # --- defined by subclasses ---

    def open_store(self) -> ExecutionConfig:
        """Open the store for the next process; return its configuration."""
        raise NotImplementedError

    def kill_store(self) -> None:
        """Make the store refuse all further writes."""
        raise NotImplementedError

    # --- processes ---

    @initialize()
    def open(self) -> None:
        """Start a process."""
        config = self.open_store()
        config.level1 = Level1Config(
            max_attempts=MAX_ATTEMPTS,
            max_interruptions=MAX_INTERRUPTIONS,
            base_delay_seconds=DELAYS[1],
            backoff_multiplier=DELAYS[2] / DELAYS[1],
            max_delay_seconds=60.0,
            jitter=0.0,
        )
        self.executor = PersonaExecutor(config, PERSONA, workflow_id=RUN)

    def process(self) -> PersonaExecutor:
        """Return the process, started if need be."""
        if self.executor is None:
            self.open()
        assert self.executor is not None
        return self.executor

    def crash_process(self) -> None:
        """Crash: what was recorded is there, and nothing more is written."""
        assert self.executor is not None
        state = self.executor.state_persistence
        assert state is not None
        run, self.executor = state.run, None
        self.kill_store()
        forget_shared(run.store, OpenRun, run.run_id, run)  # a new process starts without it
        release(state)  # and does not shut it down

    def run(self, work: Coroutine[Any, Any, None], *, concurrent: bool = False) -> None:
        """Run a coroutine to its end."""
        self.concurrent = concurrent
        try:
            self.loop.run_until_complete(work)
        finally:
            self.clock.crash_in_sleep = []
            if self.wrong:
                raise self.wrong[0]

    # --- bodies ---

    async def body(self, step: StepModel, acts: list[str], name: str, given: int) -> Any:
        """Do the next act; the model is updated first, and compared."""
        round_ = round_number.get()
        step.start(round_)
        here = current()
        assert here.attempt == step.last_attempt
        assert len(here.feedback) == step.sentences()
        act = acts.pop(0) if acts else "ok"
        if act == "crash-first":
            self.crash_process()
            raise CrashedError
        self._save_state(step, name, given)
        await asyncio.sleep(0)
        match act:
            case "crash":
                self.crash_process()
                raise CrashedError
            case "stop":
                step.stop()
                task = asyncio.current_task()
                assert task is not None
                self.loop.call_soon(task.cancel)  # from outside: a task cannot cancel itself here
                return await asyncio.sleep(60)
            case "fail" | "crash-waiting" | "final":
                step.fail(self.clock.true, round_, final=act == "final")
                if act == "crash-waiting":
                    self.clock.crash_in_sleep = [self.crash_process]
                raise UnrecoverableError("never") if act == "final" else ValueError("not now")
            case _:
                self.outputs += 1
                step.complete({"output": self.outputs})
                return step.output

    def _save_state(self, step: StepModel, name: str, given: int) -> None:
        """Save something of every kind, after checking that everything saved before is there."""
        here, model = current(), self.model
        assert here.progress == step.progress
        assert dict(here.memory) == model.memory
        assert list(here.history) == model.history
        here.save_progress(attempt=here.attempt)
        step.progress = {"attempt": here.attempt}
        here.memory[f"{name}{given}"] = here.attempt
        model.memory[f"{name}{given}"] = here.attempt
        here.history.append([name, given, here.attempt])
        model.history.append([name, given, here.attempt])
        here.spend(tokens=3)
        model.tokens += 3

    async def call(
        self, name: str, given: int, acts: list[str], *, round_: int = 1, **options: Any
    ) -> None:
        """Execute a step, and compare the outcome with the model."""
        round_number.set(round_)
        step, executor = self.model.step(name, given), self.process().options(**options)
        over = step.verdict(round_) in ("failed", "interrupted")
        if options.get("force") or (
            options.get("retry") and over and not self._is_marked(name, step)
        ):
            step.start_over(forget=bool(options.get("force")))
        marked = self._is_marked(name, step) and not options.get("force")
        expected = "marked" if marked else step.verdict(round_)
        starts = step.last_attempt
        task = partial(self._watched_body, step, acts, [step.latest(self.clock.true)])
        try:
            result = await executor.execute(task, name, name, given)
        except UnrecoverableError as error:
            self._check_failure(error, step, step.verdict(round_))
        except asyncio.CancelledError:
            assert not step.open
        except (StorageError, CrashedError):
            assert self.executor is None
        else:
            self._check_result(result, name, step, marked=marked)
        if expected != "called":
            assert step.last_attempt == starts, f"called, though it is {expected}"

    async def _watched_body(
        self, step: StepModel, acts: list[str], latest: list[float], name: str, given: int
    ) -> Any:
        """Record a failed assertion of a body: the executor would take it for a failure of the body."""
        try:
            self._check_time(step, latest.pop() if latest else step.due)
            return await self.body(step, acts, name, given)
        except AssertionError as error:
            self.wrong.append(error)
            raise

    def _check_time(self, step: StepModel, latest: float | None) -> None:
        """After a failure, a body is called neither too early nor too late."""
        now = self.clock.true
        if step.due is None or latest is None:
            return
        assert step.rebooted or now >= step.due - TINY, f"early by {step.due - now} s"
        assert self.concurrent or now <= latest + TINY, f"late by {now - latest} s"

    def _check_failure(self, error: UnrecoverableError, step: StepModel, verdict: str) -> None:
        assert verdict in ("failed", "interrupted")
        assert error.result.final_status == verdict
        assert error.result.attempt_count == step.starts
        if verdict == "interrupted":
            step.interrupt()

    def _is_marked(self, name: str, step: StepModel) -> bool:
        return name in self.model.marked and not step.completed

    def _check_result(
        self, result: ExecutionResult, name: str, step: StepModel, *, marked: bool
    ) -> None:
        assert result.success
        assert result.final_output == (self.model.marked[name] if marked else step.output)
        assert marked or result.attempt_count == step.starts

    # --- rules ---

    @rule(name=_NAMES, given=_GIVEN, acts=_ACTS, round_=_ROUNDS)
    def execute(self, name: str, given: int, acts: list[str], round_: int = 1) -> None:
        """A step is executed, in a round of level 2."""
        self.run(self.call(name, given, acts, round_=round_))

    @rule(name=_NAMES, given=_GIVEN, acts=_ACTS)
    def retry(self, name: str, given: int, acts: list[str]) -> None:
        """A new set of attempts is requested."""
        self.run(self.call(name, given, acts, retry=True))

    @rule(name=_NAMES, given=_GIVEN, acts=_ACTS)
    def force(self, name: str, given: int, acts: list[str]) -> None:
        """The step is executed again, completed or not."""
        self.run(self.call(name, given, acts, force=True))

    @rule(chosen=st.dictionaries(st.tuples(_NAMES, _GIVEN), _HARMLESS, min_size=2, max_size=6))
    def execute_concurrently(self, chosen: dict[tuple[str, int], list[str]]) -> None:
        """Several steps are executed concurrently."""

        async def together() -> None:
            calls = (self.call(*which, acts) for which, acts in chosen.items())
            await asyncio.gather(*calls)

        self.run(together(), concurrent=True)

    @rule(chosen=st.sets(st.tuples(_NAMES, _GIVEN), min_size=2, max_size=6))
    def crash_with_several_steps(self, chosen: set[tuple[str, int]]) -> None:
        """Several steps are running when the process crashes."""
        executor = self.process()
        ready = {
            which
            for which in sorted(chosen)
            if self.model.step(*which).verdict() == "called" and which[0] not in self.model.marked
        }
        left, all_started = set(ready), asyncio.Event()

        async def body(which: tuple[str, int]) -> None:
            self.model.step(*which).start()
            left.discard(which)
            if left:
                await all_started.wait()
            else:
                self.crash_process()
                all_started.set()
            raise CrashedError

        async def step(name: str, given: int) -> None:
            try:
                task = partial(body, (name, given))
                await executor.execute(lambda *_: task(), name, name, given)
            except (StorageError, CrashedError):
                assert self.executor is None

        async def together() -> None:
            await asyncio.gather(*(step(*which) for which in sorted(ready)))

        if ready:
            self.run(together())

    @rule(name=_NAMES)
    def mark(self, name: str) -> None:
        """A task is marked as completed."""
        state = self.process().state_persistence
        assert state is not None
        artifacts = {"made": name}
        state.mark_task_completed(name, artifacts)
        self.model.marked[name] = artifacts

    @rule()
    def restart(self) -> None:
        """The process ends, and another one starts."""
        self.process().close()
        self.executor = None

    @rule()
    def crash(self) -> None:
        """The process crashes between two steps."""
        self.process()
        self.crash_process()

    @rule(seconds=st.sampled_from([0.5, 3.0, 60.0]))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.clock.advance(seconds)

    @rule(seconds=st.sampled_from([-3600.0, 3600.0]))
    def set_the_clock(self, seconds: float) -> None:
        """The wall clock is set."""
        self.clock.jump(seconds)

    @rule(set_to=st.sampled_from([-3600.0, 0.0, 3600.0]))
    def reboot(self, set_to: float) -> None:
        """The machine reboots, perhaps with another wall time."""
        self.process()
        self.crash_process()
        self.clock.reboot()
        self.clock.jump(set_to)
        self.model.reboot()

    # --- invariants ---

    @invariant()
    def the_run_is_the_model(self) -> None:
        """The journal and the views show what happened."""
        type(self).counter.done += 1
        if self.executor is None:
            return
        state = self.executor.state_persistence
        assert state is not None
        self._compare_steps(list(state.run.state.steps.values()))
        shown = state.state
        assert set(shown.completed_tasks) == self.model.completed()
        assert shown.retry_counts.get(PERSONA, 0) == self.model.retries()
        persona = state.get_persona_state(PERSONA)
        if persona:
            assert persona["memory"] == self.model.memory
            assert persona["history"] == self.model.history
            assert persona["tokens_used"] == self.model.tokens
        assert self.executor.get_token_usage() == self.model.tokens

    def _compare_steps(self, found: list[StepState]) -> None:
        model = {which: step for which, step in self.model.steps.items() if step.started}
        assert len(found) == len(model)
        counts = sorted(
            (
                facts_of(step.started)["name"],
                *(step.starts, step.failures, step.stops, step.interruptions),
                *(step.open_attempt > 0, step.completed is not None),
            )
            for step in found
        )
        assert counts == sorted(
            (
                name,
                *(step.starts, step.failures, step.stops, step.interruptions),
                *(step.open, step.completed),
            )
            for (name, _), step in model.items()
        )
        for step in model.values():
            assert max(step.by_round.values(), default=0) <= MAX_ATTEMPTS
            rounds = max(1, len(step.rounds))
            ended = step.starts - step.stops - step.open
            assert ended <= MAX_ATTEMPTS * rounds + MAX_INTERRUPTIONS

    def teardown(self) -> None:
        """Remove everything."""
        if self.executor is not None:
            self.executor.close()
        self.forget_store()
        self.loop.close()
        shutil.rmtree(self.top, ignore_errors=True)

    def forget_store(self) -> None:
        """Forget the store."""


class MemoryExecutionMachine(ExecutionMachine):
    """The machine over stores in memory that share their data."""

    def __init__(self) -> None:
        super().__init__()
        self._root = MemoryStore(clock=self.clock)

    def open_store(self) -> ExecutionConfig:
        """Open another store on the shared data."""
        known = opened._stores().opened  # noqa: SLF001 - the registry of open stores
        if (self.top, False) not in known:
            store = MemoryStore(clock=self.clock, shared_with=self._root)
            known[self.top, False] = opened._Opened(store)  # noqa: SLF001
        state = StateConfig(state_dir=str(self.top), enable_persistence=False)
        return ExecutionConfig(state=state)

    def kill_store(self) -> None:
        """Abandon the store without closing it."""
        store = opened._stores().opened.pop((self.top, False)).store  # noqa: SLF001
        assert isinstance(store, MemoryStore)
        store.abandon()

    def forget_store(self) -> None:
        """Forget the store."""
        opened._stores().opened.pop((self.top, False), None)  # noqa: SLF001


class FolderExecutionMachine(ExecutionMachine):
    """The machine over a journal in a folder."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = (self.top / "0").resolve()

    def open_store(self) -> ExecutionConfig:
        """Open the folder, with the manual clock."""
        known = opened._stores().opened  # noqa: SLF001 - the registry of open stores
        if (self._folder, True) not in known:
            store = SqliteStore(self._folder, clock=self.clock)
            known[self._folder, True] = opened._Opened(store)  # noqa: SLF001
        return ExecutionConfig(state=StateConfig(state_dir=str(self._folder)))

    def kill_store(self) -> None:
        """Copy the folder as it is, and delete the old one."""
        old = self._folder
        store = opened._stores().opened.pop((old, True)).store  # noqa: SLF001
        self._folder = old.with_name(str(int(old.name) + 1))
        skipped = shutil.ignore_patterns("*-shm")
        shutil.copytree(old, self._folder, ignore=skipped, copy_function=_copy_if_there)
        store.close()
        shutil.rmtree(old, ignore_errors=True)


def _copy_if_there(old: str, new: str) -> None:
    """Copy a file, unless it was renamed meanwhile: a thread writes copies of runs."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(old, new)
