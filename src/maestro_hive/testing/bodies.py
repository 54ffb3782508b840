"""What is called instead of the bodies of steps: a record of each call, stand-ins, failures, kills."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self
from uuid import UUID

from maestro_hive.engine.attempt import call_in_thread, is_async
from maestro_hive.engine.parameters import Given, completed
from maestro_hive.hive.functions import StepFunction, StepMethod
from maestro_hive.kernel.errors import ConfigurationError, MaestroError
from maestro_hive.maestro.state import codec

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.testing.clock import SkippingClock

#: What a stand-in has where it was given nothing.
NOTHING: Any = object()

When = Literal["before", "after"]
Step = StepFunction[..., Any] | StepMethod[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a step's body, or of its stand-in: ``arguments`` are by name."""

    step: str
    arguments: dict[str, Any]
    run_id: str
    #: Which durable call of the run it is an attempt of.
    identity: bytes = field(default=b"", repr=False, compare=False)
    #: The arguments as they are stored.
    digest: bytes = field(default=b"", repr=False, compare=False)

    def __str__(self) -> str:
        given = ", ".join(f"{name}={_short(value)}" for name, value in self.arguments.items())
        return f"{self.step}({given})"


class StandIn:
    """What is called instead of a step: from when it is made, to the end of its ``with`` block."""

    def __init__(
        self,
        step: StepFunction[..., Any],
        remove: Callable[[StandIn], None],
        returns: Any,
        raises: BaseException | type[BaseException] | None,
        calls: Callable[..., Any] | None,
        takes: float,
    ) -> None:
        self.step = step
        #: The calls it got, in their order.
        self.calls: list[Call] = []
        self._remove = remove
        self.returns = returns
        self.raises = raises
        self.function = calls
        self.takes = takes

    @property
    def arguments(self) -> list[dict[str, Any]]:
        """The arguments of its calls, by name."""
        return [call.arguments for call in self.calls]

    def remove(self) -> None:
        """Let the step itself be called again."""
        self._remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<stand-in for step {self.step.name!r}, called {len(self.calls)} times>"


@dataclass(frozen=True, slots=True)
class _Planned:
    """What is to happen at one call of a step."""

    error: BaseException | None = None
    kill: When | None = None


class State(NamedTuple):
    """What was called up to a moment, and what is planned."""

    calls: list[Call]
    numbers: Counter[tuple[str, str]]
    planned: dict[tuple[str, str, int], _Planned]
    stand_ins: dict[StandIn, list[Call]]


class Bodies:
    """The calls of all steps that are executed with a kit."""

    def __init__(
        self, clock: SkippingClock, timeout_seconds: float, die: Callable[[], None]
    ) -> None:
        self.clock = clock
        self.timeout_seconds = timeout_seconds
        self.calls: list[Call] = []
        #: Whether the process is being killed, as far as a workflow can tell: nothing more is called.
        self.is_dying = False
        self._die = die
        self._stand_ins: dict[tuple[str, str], list[StandIn]] = {}
        self._planned: dict[tuple[str, str, int], _Planned] = {}
        self._numbers: Counter[tuple[str, str]] = Counter()

    # --- what tests ask for ---

    def replace(
        self,
        step: Step,
        returns: Any,
        raises: BaseException | type[BaseException] | None,
        calls: Callable[..., Any] | None,
        takes: float,
    ) -> StandIn:
        """Put a stand-in before what is called now."""
        given = [returns is not NOTHING, raises is not None, calls is not None]
        if sum(given) > 1:
            raise ConfigurationError("a stand-in takes one of returns=, raises= and calls=")
        found = _step_of(step)
        answer = None if returns is NOTHING else returns
        made = StandIn(found, self._remove, answer, raises, calls, takes)
        self._stand_ins.setdefault(_place(found), []).append(made)
        return made

    def _remove(self, stand_in: StandIn) -> None:
        there = self._stand_ins.get(_place(stand_in.step), [])
        if stand_in in there:
            there.remove(stand_in)

    def plan(
        self, step: Step, call: int, error: BaseException | None = None, kill: When | None = None
    ) -> None:
        """Have something happen at a call that is yet to come; the next one has the number 1."""
        place = _place(_step_of(step))
        if call < 1:
            raise ConfigurationError(f"call={call!r}: calls are counted from 1, from now on")
        key = (*place, self._numbers[place] + call)
        before = self._planned.get(key, _Planned())
        self._planned[key] = _Planned(error or before.error, kill or before.kill)

    # --- going back in time ---

    def state(self) -> State:
        """Return what was called, and what is planned."""
        made = {each: list(each.calls) for group in self._stand_ins.values() for each in group}
        return State(list(self.calls), Counter(self._numbers), dict(self._planned), made)

    def restore(self, state: State) -> None:
        """Let it be as it was."""
        self.calls[:] = state.calls
        self._numbers, self._planned = Counter(state.numbers), dict(state.planned)
        for stand_in, calls in state.stand_ins.items():
            stand_in.calls[:] = calls

    # --- what runs ask for ---

    def body(
        self, step: StepFunction[..., Any], run_id: str, identity: bytes, task: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return what is called in each attempt of one call of a step."""

        @functools.wraps(task)
        async def body(*args: Any, **kwargs: Any) -> Any:
            if self.is_dying:
                await _never()
            running = self.clock.enter()
            try:
                call = _made_call(step, run_id, identity, task, args, kwargs)
                try:
                    result = await self._call(step, call, task, args, kwargs)
                except Exception:
                    await self.clock.may_end(running)
                    raise
                await self.clock.may_end(running)
                return result
            finally:
                self.clock.leave(running)

        return body

    async def _call(
        self,
        step: StepFunction[..., Any],
        call: Call,
        task: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        place = _place(step)
        self._numbers[place] += 1
        planned = self._planned.pop((*place, self._numbers[place]), _Planned())
        self.calls.append(call)
        if planned.kill == "before":
            await self._killed()
        if planned.error is not None:
            raise planned.error
        stand_ins = self._stand_ins.get(place)
        if stand_ins:
            stand_in = stand_ins[-1]
            stand_in.calls.append(call)
            if stand_in.takes:
                await self._take_time(step, stand_in.takes)
            given = completed(task, args, kwargs) or Given(args, kwargs)
            result = await _answer_of(stand_in, given.args, given.kwargs)
        elif is_async(task):
            result = await task(*args, **kwargs)
        else:
            result = await call_in_thread(task, args, kwargs)
        if planned.kill == "after":
            await self._killed()
        return result

    async def _take_time(self, step: StepFunction[..., Any], seconds: float) -> None:
        """Let time pass, as far as the step's time limit allows: that is measured in real time."""
        most = step.options.timeout or self.timeout_seconds
        await self.clock.sleep(min(seconds, most))
        if seconds > most:
            raise TimeoutError(f"{step.name!r} was not done within {most:g} seconds")

    async def _killed(self) -> None:
        self.is_dying = True
        self._die()
        await _never()

    def value(self, name: str, run_id: str, identity: bytes) -> Any:
        """Return the time, or a random value that is the same whenever the same call is made."""
        if name == "now":
            return self.clock.instant
        dice = random.Random(f"{name} {run_id} {identity.hex()}")  # noqa: S311 - to be the same
        return dice.random() if name == "random" else UUID(bytes=dice.randbytes(16), version=4)


async def _answer_of(stand_in: StandIn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return or raise what a stand-in was given for that."""
    raises, function = stand_in.raises, stand_in.function
    if raises is not None:
        error = raises() if isinstance(raises, type) else raises
        raise error.with_traceback(None)
    if function is not None:
        made = function(*args, **kwargs)
        return await made if inspect.isawaitable(made) else made
    return copy.deepcopy(stand_in.returns)


async def _never() -> None:
    """Wait for ever: the loop is not run again."""
    await asyncio.get_running_loop().create_future()


def _step_of(step: Step) -> StepFunction[..., Any]:
    given: object = step
    if isinstance(given, StepMethod):
        return given.step
    if isinstance(given, StepFunction):
        return given
    raise ConfigurationError(f"{step!r} is not a step; give the function that @hive.step decorates")


def _place(step: StepFunction[..., Any]) -> tuple[str, str]:
    return step.persona, step.name


def _made_call(
    step: StepFunction[..., Any],
    run_id: str,
    identity: bytes,
    task: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Call:
    recorded = _by_name(task, args, kwargs)
    digest = b"".join(_digest(each) for pair in recorded.items() for each in pair)
    whole = completed(task, args, kwargs)
    given = recorded if whole is None else _by_name(whole.task or task, whole.args, whole.kwargs)
    return Call(
        step=step.name,
        # What is not recorded is the program's own, such as the instance of a method: no copy of it.
        arguments={
            name: _own(value) if value is recorded.get(name, NOTHING) else value
            for name, value in given.items()
        },
        run_id=run_id,
        identity=identity,
        digest=digest,
    )


def _by_name(
    task: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    try:
        bound = inspect.signature(task).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return {**{str(number): value for number, value in enumerate(args)}, **kwargs}
    bound.apply_defaults()
    return dict(bound.arguments)


def _digest(value: Any) -> bytes:
    """Return a digest of an argument; of one that cannot be stored, of its class."""
    try:
        return codec.encode(value, "argument").sha256
    except (MaestroError, TypeError, ValueError):
        return codec.encode(type(value).__qualname__, "argument").sha256


def _own(value: Any) -> Any:
    """Return a copy that stays as it is now, where there can be one."""
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - any class may refuse to be copied, in its own way
        return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
