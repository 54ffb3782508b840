"""The lives of a process that is none: each has a store and an event loop, which a kill drops."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from maestro_hive.hive import answers, escalations
from maestro_hive.hive.runs import ANSWER, ESCALATION
from maestro_hive.kernel.errors import ConfigurationError, MaestroError
from maestro_hive.maestro.state.memory import MemoryStore
from maestro_hive.maestro.state.projections import facts_of
from maestro_hive.maestro.state.records import EntriesAppended, EntryKind
from maestro_hive.maestro.state.stores import put_memory_store
from maestro_hive.maestro.state.views import OVER
from maestro_hive.testing.bodies import Bodies

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from maestro_hive.engine.config import ExecutionConfig
    from maestro_hive.hive.hive import Hive
    from maestro_hive.maestro.state.records import Entry, Notification
    from maestro_hive.testing.clock import SkippingClock

#: How often it is checked whether a run waits for an answer that nobody gives; in seconds.
_CHECK_SECONDS = 0.02
#: What of a Hive belongs to its store.
_ATTRIBUTES = ("config", "_helpers", "_tickets", "_store", "_runner", "_is_closed")


class UnansweredError(AssertionError):
    """A run only waits, and for answers that the test does not give."""


class Killed(SystemExit):
    """Ends an event loop at once: it passes every handler of errors of asyncio."""


class KitStore(MemoryStore):
    """A store in memory whose clock knows what a worker waits for."""

    def __init__(self, *, clock: SkippingClock, left_by: KitStore | None = None) -> None:
        super().__init__(clock=clock, left_by=left_by)
        self._skipping = clock

    def seconds_to_next(self) -> float | None:
        """Return when something is due, and let time pass until then if there is nothing else to do."""
        seconds = super().seconds_to_next()
        if seconds:
            with contextlib.suppress(RuntimeError):  # a thread asks, which has no loop to wait on
                self._skipping.expect(seconds)
        return seconds


class Work(NamedTuple):
    """A workflow to be run."""

    workflow: Callable[..., Awaitable[Any]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    run_id: str


class _Saved(NamedTuple):
    """What a Hive was before a kit used it."""

    hive: Hive
    attributes: dict[str, Any]


class Lives:
    """Hives over one store in memory, which can be exchanged for what a kill left of it."""

    def __init__(self, hives: Sequence[Hive], clock: SkippingClock) -> None:
        self.clock = clock
        self.bodies = Bodies(clock, hives[0].config.timeout_seconds, self._die)
        #: Called after each transaction with entries, and before what was asked is answered.
        self.on_record: Callable[[EntriesAppended], None] | None = None
        #: The answers to the next questions, by name; and to the next escalations, by step.
        self.answers: dict[str, list[Any]] = {}
        self.replies: dict[str, list[dict[str, Any]]] = {}
        #: By run and question: after a kill the same one gets the same answer.
        self._given: dict[tuple[str, str], Any] = {}
        self._refused: MaestroError | None = None
        self._runs = 0
        self._may_die = False
        self._left: KitStore | None = None
        self._folder = Path(f"memory-{secrets.token_hex(8)}").absolute()
        self._saved = [_saved(each) for each in hives]
        self.start(KitStore(clock=clock), clock)
        for each in hives:
            each.config = _config_in_memory(each.config, self._folder)
            each._tickets = None  # noqa: SLF001 - nobody is told of what fails in a test
            each._helpers = {**each._helpers, "substitutes": self.bodies}  # type: ignore[dict-item]  # noqa: SLF001

    def close(self) -> None:
        """Give the hives back what they had; raise if an answer of the test did not fit."""
        for saved in self._saved:
            for name, value in saved.attributes.items():
                setattr(saved.hive, name, value)
        put_memory_store(self._folder, None)
        if self._refused is not None:
            raise self._refused

    # --- one life ---

    def start(self, store: KitStore, clock: SkippingClock) -> None:
        """Go on with a store, as a process does that starts."""
        self.store, self.clock, self.bodies.clock = store, clock, clock
        self.bodies.is_dying = False
        store.notifications.add(self._note)
        put_memory_store(self._folder, store)
        for hive in (each.hive for each in self._saved):
            hive._store = hive._runner = None  # noqa: SLF001 - it opens the other one
            hive._is_closed = False  # noqa: SLF001

    def new_run_id(self, workflow: Callable[..., Any]) -> str:
        """Return the id of a further run; the same in each execution of a test."""
        self._runs += 1
        return f"{getattr(workflow, 'name', 'run')[:100]}-{self._runs}"

    def live(self, work: Work, *, may_die: bool = False) -> Any:
        """Run a workflow, or resume it, on a loop of its own; ``Killed`` if the life ended before.

        Then the next one can be started.
        """
        _check_no_loop()
        self._may_die = may_die
        runner = asyncio.Runner()
        try:
            result = runner.run(self._watched(work))
        except Killed:
            _drop(runner.get_loop())
            assert self._left is not None
            self.clock.forget()
            self.start(self._left, self.clock)
            raise
        except BaseException:
            runner.close()
            raise
        finally:
            self._may_die = False
        runner.close()
        return result

    def _die(self) -> None:
        if not self._may_die:
            raise ConfigurationError(
                "a kill drops the event loop, so the run must be started by kit.run(…)"
            )
        self._left = KitStore(clock=self.clock, left_by=self.store)
        asyncio.get_running_loop().call_soon(_raise_killed)

    async def _watched(self, work: Work) -> Any:
        """Run a workflow, and end it if it would wait for ever."""
        self._answer_open()
        hive = self._saved[0].hive
        made = hive.run(work.workflow, *work.args, run_id=work.run_id, **work.kwargs)
        run = asyncio.ensure_future(made)
        was_stuck = False
        while not run.done():
            await asyncio.wait({run}, timeout=_CHECK_SECONDS)
            is_stuck = not run.done() and self.clock.only_waits(run.get_loop())
            unanswered = self._open_questions() if is_stuck and was_stuck else []
            if unanswered or self._refused is not None:
                run.cancel()
                await asyncio.wait({run})
                raise self._take_refused() or UnansweredError(_unanswered(unanswered))
            was_stuck = is_stuck
        return run.result()

    # --- answers ---

    def _note(self, event: Notification) -> None:
        """Answer the questions that were just recorded."""
        if not isinstance(event, EntriesAppended):
            return
        if self.on_record is not None:
            self.on_record(event)
        run = self.store.run(event.run_id) if self.answers or self.replies else None
        if run is not None and any(
            map(_is_question, self.store.entries(run.id, event.first - 1, event.seq))
        ):
            self._answer(event.run_id)

    def _answer_open(self) -> None:
        """Answer what was asked before this life."""
        for run in self.store.runs():
            if run.status not in OVER:
                self._answer(run.name)

    def _answer(self, run_id: str) -> None:
        try:
            for question in answers.questions(self.store, run_id):
                place, waiting = (run_id, question.id), self.answers.get(question.name)
                if place not in self._given:
                    if not waiting:
                        continue
                    self._given[place] = waiting.pop(0)
                given = self._given[place]
                answers.answer(self.store, run_id, question.name, given, question=question.id)
            self._reply(run_id)
        except MaestroError as error:
            self._refused = error

    def _reply(self, run_id: str) -> None:
        """Answer the escalations of a run."""
        hive = self._saved[0].hive
        for each in escalations.list_escalations(self.store, run_id):
            place, waiting = (run_id, each.id), self.replies.get(each.step.partition("#")[0])
            if each.status != "waiting" or not (waiting or place in self._given):
                continue
            if place not in self._given and waiting:
                self._given[place] = waiting.pop(0)
            hive.answer_escalation(each.id, **self._given[place])

    def _take_refused(self) -> MaestroError | None:
        refused, self._refused = self._refused, None
        return refused

    def _open_questions(self) -> list[str]:
        return [
            f"{question.name!r} of run {run.name!r}"
            for run in self.store.runs()
            if run.status not in OVER
            for question in answers.questions(self.store, run.name)
        ] + [
            f"escalation {each.id} of {each.step!r} of run {each.run_id!r}"
            for each in escalations.list_escalations(self.store)
            if each.status == "waiting"
        ]


def _is_question(entry: Entry) -> bool:
    asks = facts_of(entry).get("what") in (ANSWER, ESCALATION)
    return entry.kind == EntryKind.WAIT_STARTED and asks


def _unanswered(questions: list[str]) -> str:
    return (
        f"the test would wait for ever: there is no answer to {', '.join(questions)}; give it before"
        " the run starts, by kit.answer(name, value) or kit.answer_escalation(step, …)"
    )


# --- hives in memory ------------------------------------------------------------------------------


def _saved(hive: Hive) -> _Saved:
    if hive._helpers.get("substitutes") is not None:  # noqa: SLF001 - a kit is part of the house
        raise ConfigurationError("this Hive is used by another kit already")
    return _Saved(hive, {name: getattr(hive, name) for name in _ATTRIBUTES})


def _config_in_memory(config: ExecutionConfig, folder: Path) -> ExecutionConfig:
    """Return a configuration that stores nothing, tells nobody, and waits as long each time."""
    state = replace(
        config.state,
        state_dir=str(folder),
        checkpoint_dir=str(folder / "checkpoints"),
        enable_persistence=False,
        auto_checkpoint_interval_seconds=0,
    )
    level1, level2 = replace(config.level1, jitter=0), replace(config.level2, jitter=0)
    changed = replace(config, state=state, level1=level1, level2=level2, jira_base_url="")
    return changed.frozen()


# --- event loops ----------------------------------------------------------------------------------


def _check_no_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise ConfigurationError(
        "kit.run() and crash_everywhere() use event loops of their own, and one is running here; call"
        " them in a test that is not async, or `await asyncio.to_thread(kit.run, …)`"
    )


def _raise_killed() -> None:
    raise Killed


def _drop(loop: asyncio.AbstractEventLoop) -> None:
    """Never run a loop again: none of its tasks gets to its ``finally``, as after a kill.

    So they must not be collected either, which would close their coroutines.
    """
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001 - meant to be
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))
    loop.close()
    asyncio.set_event_loop(None)
