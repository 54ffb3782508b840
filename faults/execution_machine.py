"""A state machine over ``PersonaExecutor``: bodies that fail, die and are stopped, beside a model.

A "process" here is a store and an executor on it, and its death is the store's: whatever it would
still write is refused. In memory the next process shares the data; in a folder it gets a copy of
the files as they were at the moment of death.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from faults.execution_model import DELAYS, MAX_ATTEMPTS, MAX_INTERRUPTIONS, TINY, RunModel
from faults.watch import DeadError, InboxWatcher
from maestro_hive.engine import open_run as open_run_
from maestro_hive.engine.context import current, round_number
from maestro_hive.engine.config import ExecutionConfig, Level1Config
from maestro_hive.engine.errors import UnrecoverableError
from maestro_hive.kernel.errors import StorageError
from maestro_hive.maestro.state.projections import facts_of
from maestro_hive.unified_execution import state_persistence
from maestro_hive.unified_execution.persona_executor import PersonaExecutor

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from faults.execution_model import StepModel
    from maestro_hive.engine.results import ExecutionResult
    from maestro_hive.maestro.state.projections import StepState

RUN, PERSONA = "run", "developer"
_NAMES = st.sampled_from(["a", "b", "c"])
_GIVEN = st.sampled_from([1, 2])
#: What a body does when it is called; the last but one dies in the wait after its failure.
_ACTS = st.lists(
    st.sampled_from("ok fail final die die-first die-waiting stop".split()), min_size=1, max_size=4
)
_ROUNDS = st.sampled_from([1, 1, 1, 2])
_HARMLESS = st.lists(st.sampled_from(["ok", "fail"]), min_size=1, max_size=4)


class ExecutionMachine(RuleBasedStateMachine):
    """The rules; subclasses say how a store is opened and how it dies."""

    done: ClassVar[int] = 0
    counter: ClassVar[type[ExecutionMachine]]

    def __init__(self) -> None:
        super().__init__()
        self.clock = InboxWatcher()
        self.model = RunModel()
        self.loop = asyncio.new_event_loop()
        self.top = Path(tempfile.mkdtemp(prefix="faults-execution-"))
        self.executor: PersonaExecutor | None = None
        self.outputs = 0
        #: What was wrong inside bodies, and whether several of them share the clock.
        self.wrong: list[AssertionError] = []
        self.crowded = False

    # --- what subclasses say ---

    def open_store(self) -> ExecutionConfig:
        """Let the next process find the data; return where."""
        raise NotImplementedError

    def kill_store(self) -> None:
        """Let the store refuse whatever is still to be written."""
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

    def die(self) -> None:
        """Be killed: what was recorded is there, and nothing more will be."""
        assert self.executor is not None
        state = self.executor.state_persistence
        assert state is not None
        run, self.executor = state.run, None
        self.kill_store()
        for place in [place for place, held in open_run_._held.items() if held is run]:  # noqa: SLF001
            del open_run_._held[place]  # noqa: SLF001 - a new process knows nothing of it
        state_persistence._open_states.discard(state)  # noqa: SLF001 - nor shuts it down

    def run(self, work: Coroutine[Any, Any, None], *, crowded: bool = False) -> None:
        """Run a coroutine to its end."""
        self.crowded = crowded
        try:
            self.loop.run_until_complete(work)
        finally:
            self.clock.die_in_sleep = []
            if self.wrong:
                raise self.wrong[0]

    # --- bodies ---

    async def body(self, step: StepModel, acts: list[str], name: str, given: int) -> Any:
        """Do what the acts say; the model is told of everything first, and asked."""
        round_ = round_number.get()
        step.start(round_)
        here = current()
        assert here.attempt == step.last_attempt
        assert len(here.feedback) == step.sentences()
        act = acts.pop(0) if acts else "ok"
        if act == "die-first":
            self.die()
            raise DeadError
        self._take_notes(step, name, given)
        await asyncio.sleep(0)
        match act:
            case "die":
                self.die()
                raise DeadError
            case "stop":
                step.stop()
                task = asyncio.current_task()
                assert task is not None
                self.loop.call_soon(task.cancel)  # by somebody else: it is in the middle of a turn
                return await asyncio.sleep(60)
            case "fail" | "die-waiting" | "final":
                step.fail(self.clock.true, round_, final=act == "final")
                if act == "die-waiting":
                    self.clock.die_in_sleep = [self.die]
                raise UnrecoverableError("never") if act == "final" else ValueError("not now")
            case _:
                self.outputs += 1
                step.keep({"output": self.outputs})
                return step.output

    def _take_notes(self, step: StepModel, name: str, given: int) -> None:
        """Save something of every kind, after looking whether all that was saved is there."""
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
        """Execute a step, and compare what comes of it with the model."""
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
        except (StorageError, DeadError):
            assert self.executor is None
        else:
            self._check_result(result, name, step, marked=marked)
        if expected != "called":
            assert step.last_attempt == starts, f"called, though it is {expected}"

    async def _watched_body(
        self, step: StepModel, acts: list[str], latest: list[float], name: str, given: int
    ) -> Any:
        """Keep what is wrong inside a body: the executor would take it for the body's failure."""
        try:
            self._check_time(step, latest.pop() if latest else step.due)
            return await self.body(step, acts, name, given)
        except AssertionError as error:
            self.wrong.append(error)
            raise

    def _check_time(self, step: StepModel, latest: float | None) -> None:
        """After a failure, a body is called neither early nor late."""
        now = self.clock.true
        if step.due is None or latest is None:
            return
        assert step.rebooted or now >= step.due - TINY, f"early by {step.due - now} s"
        assert self.crowded or now <= latest + TINY, f"late by {now - latest} s"

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
        """A step is executed, in a round of level 2; its body does what it does."""
        self.run(self.call(name, given, acts, round_=round_))

    @rule(name=_NAMES, given=_GIVEN, acts=_ACTS)
    def retry(self, name: str, given: int, acts: list[str]) -> None:
        """Somebody asks for a new set of attempts."""
        self.run(self.call(name, given, acts, retry=True))

    @rule(name=_NAMES, given=_GIVEN, acts=_ACTS)
    def force(self, name: str, given: int, acts: list[str]) -> None:
        """Somebody wants it done again, kept or not."""
        self.run(self.call(name, given, acts, force=True))

    @rule(chosen=st.dictionaries(st.tuples(_NAMES, _GIVEN), _HARMLESS, min_size=2, max_size=6))
    def execute_at_once(self, chosen: dict[tuple[str, int], list[str]]) -> None:
        """Several steps are executed at the same time."""

        async def together() -> None:
            calls = (self.call(*which, acts) for which, acts in chosen.items())
            await asyncio.gather(*calls)

        self.run(together(), crowded=True)

    @rule(chosen=st.sets(st.tuples(_NAMES, _GIVEN), min_size=2, max_size=6))
    def die_at_once(self, chosen: set[tuple[str, int]]) -> None:
        """Several steps are under way when the process dies."""
        executor = self.process()
        ready = {
            which
            for which in sorted(chosen)
            if self.model.step(*which).verdict() == "called" and which[0] not in self.model.marked
        }
        left, all_began = set(ready), asyncio.Event()

        async def body(which: tuple[str, int]) -> None:
            self.model.step(*which).start()
            left.discard(which)
            if left:
                await all_began.wait()
            else:
                self.die()
                all_began.set()
            raise DeadError

        async def step(name: str, given: int) -> None:
            try:
                task = partial(body, (name, given))
                await executor.execute(lambda *_: task(), name, name, given)
            except (StorageError, DeadError):
                assert self.executor is None

        async def together() -> None:
            await asyncio.gather(*(step(*which) for which in sorted(ready)))

        if ready:
            self.run(together())

    @rule(name=_NAMES)
    def mark(self, name: str) -> None:
        """Somebody says that a task is done."""
        state = self.process().state_persistence
        assert state is not None
        artifacts = {"made": name}
        state.mark_task_completed(name, artifacts)
        self.model.marked[name] = artifacts

    @rule()
    def restart(self) -> None:
        """The process ends as it should, and another one comes."""
        self.process().close()
        self.executor = None

    @rule()
    def crash(self) -> None:
        """The process dies between two steps."""
        self.process()
        self.die()

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
        """The machine is started again, perhaps with another time on the wall."""
        self.process()
        self.die()
        self.clock.reboot()
        self.clock.jump(set_to)
        self.model.reboot()

    # --- always ---

    @invariant()
    def the_run_is_the_model(self) -> None:
        """What the journal and the views say is what happened."""
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
        """Leave nothing behind."""
        if self.executor is not None:
            self.executor.close()
        self.forget_store()
        self.loop.close()
        shutil.rmtree(self.top, ignore_errors=True)

    def forget_store(self) -> None:
        """Let go of what is left."""
