"""The kit: a Hive in memory for a test, and what the test has happen in it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from maestro_hive.hive.hive import Hive
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.testing.bodies import NOTHING
from maestro_hive.testing.clock import SkippingClock
from maestro_hive.testing.crashes import Twins
from maestro_hive.testing.lives import Killed, Lives, Work

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from contextlib import AbstractContextManager
    from datetime import datetime

    from maestro_hive.maestro.state.memory import MemoryStore
    from maestro_hive.testing.bodies import Call, StandIn, Step, When
    from maestro_hive.testing.crashes import CrashReport

R = TypeVar("R")

#: How often a run may be killed and resumed.
_MOST_LIVES = 1_000


@contextmanager
def use(*hives: Hive, start: datetime | None = None) -> Iterator[Kit]:
    """Let hives that exist work in memory, with a ``Kit``, until the block ends.

    Their steps and workflows stay what they are; their folders are neither read nor written. Of
    several, which share one journal, the first is the kit's ``hive``. Without one, the kit has a new
    Hive, which runs workflows of any. ``start`` is the time at which the kit's clock starts.
    """
    clock = SkippingClock() if start is None else SkippingClock(start)
    used = hives or (Hive("memory"),)
    lives = Lives(used, clock)
    try:
        yield Kit(used[0], lives)
    finally:
        lives.close()


class Kit:
    """What a test has of a Hive in memory: its clock, its steps' calls, its answers, its crashes."""

    def __init__(self, hive: Hive, lives: Lives) -> None:
        self.hive = hive
        self._lives = lives

    @property
    def clock(self) -> SkippingClock:
        """The clock of the test; ``clock.instant`` is what ``hive.now()`` gives."""
        return self._lives.clock

    @property
    def store(self) -> MemoryStore:
        """The journal in memory."""
        return self._lives.store

    # --- running ---

    def run(
        self,
        workflow: Callable[..., Awaitable[R]],
        /,
        *args: Any,
        run_id: str | None = None,
        **kwargs: Any,
    ) -> R:
        """Run a workflow to its end, as ``hive.run_sync``; where it is killed, resume it.

        ``UnansweredError`` if it waits for nothing but answers, and the test has none for it.
        """
        lives = self._lives
        work = Work(workflow, args, kwargs, run_id or lives.new_run_id(workflow))
        for _ in range(_MOST_LIVES):
            try:
                result: R = lives.live(work, may_die=True)
            except Killed:
                continue
            return result
        raise ConfigurationError(f"run {work.run_id!r} was killed {_MOST_LIVES} times")

    def crash_everywhere(
        self,
        workflow: Callable[..., Awaitable[Any]],
        /,
        *args: Any,
        vary_order: bool = True,
        **kwargs: Any,
    ) -> CrashReport:
        """Run a workflow undisturbed, and then killed after each record and resumed; compare.

        ``CrashDifferenceError`` says where a resumed run came to another result, raised another error
        or called steps with other inputs. With ``vary_order``, steps that run at the same time end in
        another order where the run is resumed; without it, where the result may depend on that.
        """
        __tracebackhide__ = True  # pytest shows the test, and not how it was found out
        work = Work(workflow, args, kwargs, self._lives.new_run_id(workflow))
        return Twins(self._lives, work, vary_order=vary_order).compare()

    # --- what happens in it ---

    @property
    def calls(self) -> list[Call]:
        """All calls of steps, also of stand-ins, in their order; one for each attempt."""
        return self._lives.bodies.calls

    def calls_of(self, step: Step) -> list[Call]:
        """Return the calls of one step, or of its stand-ins."""
        return [call for call in self.calls if call.step == step.name]

    def replace(
        self,
        step: Step,
        *,
        returns: Any = NOTHING,
        raises: BaseException | type[BaseException] | None = None,
        calls: Callable[..., Any] | None = None,
        takes: float = 0.0,
    ) -> StandIn:
        """Have a stand-in called instead of a step, at once; as a context manager, for a block.

        It returns a value, raises an error, or calls a function with the same arguments; after
        ``takes`` seconds on the kit's clock.
        """
        return self._lives.bodies.replace(step, returns, raises, calls, takes)

    def answer(self, name: str, value: Any = None) -> None:
        """Answer the next question of this name, in whichever run; several are used in their order."""
        self._lives.answers.setdefault(name, []).append(value)

    def answer_escalation(self, step: Step, feedback: str | None = None, **given: Any) -> None:
        """Answer the next escalation of a step, as ``hive.answer_escalation`` does; in their order."""
        self._lives.replies.setdefault(step.name, []).append({"feedback": feedback, **given})

    def hold_time(self) -> AbstractContextManager[None]:
        """Let no time be skipped in a ``with`` block: nothing that waits becomes late in it.

        For what the program itself does while a run waits, such as to answer a question that has a
        timeout. ``clock.advance(seconds)`` lets time pass in the block. After it, it is skipped again.
        """
        return self.clock.held()

    def fail(self, step: Step, error: BaseException, *, call: int = 1) -> None:
        """Have a call of a step raise, counted from now on; the others are as before."""
        self._lives.bodies.plan(step, call, error=error)

    def kill(self, step: Step, *, call: int = 1, when: When = "before") -> None:
        """Crash at a call of a step, counted from now on, as ``kill -9`` does; ``run`` resumes.

        ``before``: the attempt is recorded, and its body not called. ``after``: the body has had its
        effect, and its result is lost.
        """
        if when not in {"before", "after"}:
            raise ConfigurationError(f"when={when!r}: a kill is 'before' or 'after' the body")
        self._lives.bodies.plan(step, call, kill=when)


def crash_everywhere(
    workflow: Callable[..., Awaitable[Any]], /, *args: Any, vary_order: bool = True, **kwargs: Any
) -> CrashReport:
    """Run a workflow undisturbed, and then killed after each record and resumed; compare.

    With a kit of its own. For stand-ins and answers, use ``Kit.crash_everywhere``.
    """
    __tracebackhide__ = True
    with use() as kit:
        return kit.crash_everywhere(workflow, *args, vary_order=vary_order, **kwargs)
