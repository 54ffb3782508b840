"""Steps and workflows as functions that a user calls: the functions they were made of, durable."""

from __future__ import annotations

import copy
import functools
import inspect
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    TypeVar,
    cast,
    overload,
)

import msgspec
from msgspec import Raw

from maestro_hive.engine.attempt import Attempt, find_current
from maestro_hive.engine.parameters import is_in_class
from maestro_hive.engine.plan import Call, Plan, StepDefinition
from maestro_hive.engine.step import StepExecution
from maestro_hive.hive.commands import ChildCommand, StepCommand
from maestro_hive.hive.positions import nested_identity
from maestro_hive.hive.workflow_loop import workflow_loop_here
from maestro_hive.journal import values
from maestro_hive.journal.entries import StepClosed
from maestro_hive.journal.recorded_errors import decode_error
from maestro_hive.kernel.errors import (
    ConfigurationError,
    EncodeError,
    OutsideRunError,
    RunMismatchError,
)
from maestro_hive.kernel.files import check_identifier

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping

    from maestro_hive.hive.commands import Workflow
    from maestro_hive.hive.driver import Driver

P = ParamSpec("P")
Q = ParamSpec("Q")
Options = ParamSpec("Options")
R = TypeVar("R")
S = TypeVar("S")

#: Encoded arguments: by place, and by name.
_Arguments = tuple[list[Raw], dict[str, Raw]]
_LONGEST_SHOWN = 300
_KINDS = inspect.Parameter


def driver_here(what: str) -> Driver:
    """Return the run whose workflow calls this."""
    loop = workflow_loop_here()
    if loop is None:
        raise OutsideRunError(f"{what} is called outside of a workflow")
    return cast("Driver", loop.host)


class StepFunction(Generic[P, R]):
    """A function as a durable step: awaited in a workflow, it runs once.

    ``function`` is the function itself, to be called where nothing is recorded, as in a test. On a
    method, the instance is part of the step's identity: by its attribute ``step_identity``, a text,
    or else as it is encoded.
    """

    def __init__(self, definition: StepDefinition) -> None:
        self.definition = definition
        self.function: Callable[P, Any] = definition.body
        #: The instance, on a method of one.
        self._own: tuple[Any, ...] = ()
        functools.update_wrapper(self, definition.body)

    @property
    def name(self) -> str:
        """Return the name of the step."""
        return self.definition.name

    def named(self, name: str) -> StepFunction[P, R]:
        """Return the step under another name, which is another step with the same options."""
        return StepFunction(self.definition.named(name))

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what is recorded of this call, or execute it."""
        result: R
        loop = workflow_loop_here()
        call = self.definition.call((*self._own, *args), kwargs)
        if loop is not None:
            driver = cast("Driver", loop.host)
            identity = loop.place(call.content) if call.key is None else driver.keyed(call.key)
            result = await StepCommand(driver, Plan(self.definition, driver.run_id, identity, call))
            return result
        attempt = find_current()
        if attempt is None:
            raise OutsideRunError(
                f"step {self.name!r} is called outside of a workflow: call it in one that hive.run"
                f" executes, or call its function alone, {self.name}.function(…)"
            )
        result = await self._call_nested(attempt, call)
        return result

    async def _call_nested(self, outer: Attempt, call: Call) -> Any:
        """Execute a step in the body of another: recorded once, in no order."""
        content = call.content if call.key is None else f"{self.definition.label}={call.key}"
        plan = Plan(self.definition, outer.plan.run_id, nested_place(outer, content), call)
        outcome = await StepExecution(plan, outer.journal, outer.stages, is_nested=True).run()
        match outcome.entry:
            case StepClosed(how="skipped"):
                return None
            case StepClosed():
                raise decode_error(outer.journal.text(outcome.entry.error))
            case _:
                return values.decode(outer.journal.text(outcome.entry.result))

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> StepFunction[P, R]: ...
    @overload
    def __get__(
        self: StepFunction[Concatenate[S, Q], R], instance: S, owner: type[S] | None = None
    ) -> StepFunction[Q, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Return the step as a method of an instance."""
        if instance is None or not self.definition.is_method:
            return self
        made = copy.copy(self)
        vars(made).update(_own=(instance,), function=functools.partial(self.function, instance))
        return made

    def __repr__(self) -> str:
        return f"<step {self.definition.label!r}>"


def nested_place(attempt: Attempt, content: str) -> str:
    """Return the identity of a call in the body of an attempt: the equal ones are numbered."""
    number = attempt.counts[content] = attempt.counts.get(content, 0) + 1
    return nested_identity(attempt.plan.identity, content, number)


class WorkflowFunction(Generic[P, R]):
    """A coroutine function that calls durable operations: ``hive.run`` executes it.

    Awaited in another workflow it is a child: a run of its own, on the hive that runs the other.
    """

    def __init__(self, function: Callable[P, Awaitable[R]], name: str | None) -> None:
        check_function("workflow", function)
        name = name or getattr(function, "__name__", "")
        if not name or name == "<lambda>":
            raise ConfigurationError(f"{function!r} is a lambda; give name=")
        check_identifier(name, "workflow")
        if not inspect.iscoroutinefunction(function):
            raise ConfigurationError(
                f"the workflow {name!r} is not an async function: write `async def {name}(…)`, and"
                " put what blocks into a step, which may be a plain function"
            )
        functools.update_wrapper(self, function)
        self.function, self.name = function, name
        self.body: Callable[..., Coroutine[Any, Any, Any]] = function
        self.signature = inspect.signature(function)

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run it as a child of the workflow that calls it."""
        driver = driver_here(f"workflow {self.name!r}")
        result: R = await ChildCommand(driver, self, self.encode(args, kwargs))
        return result

    # --- its arguments ---

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """Return the encoded arguments of a call: by name, where the function takes them so.

        So a call by place and one by name are the same. Raises TypeError if they do not fit.
        """
        try:
            args, kwargs = self._by_name(self.signature.bind(*args, **kwargs))
        except TypeError as error:
            called = f"{self.name}{self.signature}"
            raise TypeError(f"wrong arguments for the workflow {called}: {error}") from None
        try:
            return values.encode_call(args, kwargs, "input").text()
        except EncodeError as error:
            path = error.path.removeprefix("input").lstrip(".") or "it"
            raise EncodeError(f"the input of {self.name}: {path}", error.reason) from error

    def _by_name(self, bound: inspect.BoundArguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments by name, or as the function takes them if one has no name."""
        kinds = {name: self.signature.parameters[name].kind for name in bound.arguments}
        if {_KINDS.POSITIONAL_ONLY, _KINDS.VAR_POSITIONAL} & {*kinds.values()}:
            return bound.args, bound.kwargs
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            others = kinds[name] is _KINDS.VAR_KEYWORD
            named.update(value if others else {name: value})
        return (), named

    def check(self, run_id: str, args: list[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise if the recorded arguments of a run do not fit the function."""
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise RunMismatchError(
                f"run {run_id!r} cannot start: its arguments do not fit the workflow"
                f" {self.name}{self.signature}: {error}; cancel it with `maestro cancel {run_id}`"
                " and enqueue it again"
            ) from None

    def normal(self, data: bytes) -> bytes:
        """Return recorded arguments, perhaps of a call without the code, as ``encode`` has them."""
        args, kwargs = _arguments(data)
        try:
            return msgspec.json.encode(self._by_name(self.signature.bind(*args, **kwargs)))
        except TypeError:
            return data

    def encode_changed(self, data: bytes, changed: dict[str, Any]) -> bytes:
        """Return recorded arguments with others by name; the classes of the rest need not exist."""
        args, kwargs = _arguments(data)
        bound, known = self.signature.bind_partial(*args, **kwargs), self.signature.parameters
        rest = [each.name for each in known.values() if each.kind is each.VAR_KEYWORD]
        for name, value in changed.items():
            text = Raw(values.encode(value, f"the input of {self.name}: {name}").data)
            if name in known and known[name].kind is not _KINDS.VAR_POSITIONAL:
                bound.arguments[name] = text
            elif rest:
                bound.arguments.setdefault(rest[0], {})[name] = text
            else:
                raise ConfigurationError(
                    f"the workflow {self.name!r} has no parameter {name}; it has:"
                    f" {', '.join(known)}"
                )
        return msgspec.json.encode(self._by_name(bound))

    def __repr__(self) -> str:
        return f"<workflow {self.name!r}>"


def _arguments(data: bytes) -> _Arguments:
    found: _Arguments = msgspec.json.decode(data, type=_Arguments)
    return found


def check_same(run_id: str, recorded: bytes, data: bytes, workflow: Workflow | None = None) -> None:
    """Raise if a run was started with other arguments; keywords may come in any order."""
    if recorded == data:
        return
    known = recorded if workflow is None else workflow.normal(recorded)
    if _arguments(known) != _arguments(data):
        before, now = (_short(each.decode()) for each in (recorded, data))
        raise RunMismatchError(
            f"run {run_id!r} was started with other arguments: {before}, and now it is given"
            f" {now}; give this call another run_id, or fork the run"
        )


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


# --- decorators -----------------------------------------------------------------------------------


class StepDecorator(Protocol):
    """The type of ``hive.step(…)``: makes a step of a function, async or not."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> StepFunction[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> StepFunction[P, R]: ...


class StepMaker(Protocol[Options]):
    """The type of ``hive.step``: makes a step of a function, or takes the options of one."""

    @overload
    def __call__(  # type: ignore[overload-overlap]  # options have names
        self, *_: Options.args, **options: Options.kwargs
    ) -> StepDecorator: ...
    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> StepFunction[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> StepFunction[P, R]: ...


def with_options_of(
    _kind: Callable[Options, object],
) -> Callable[[Callable[..., Any]], StepMaker[Options]]:
    """Give a method of a hive the type that ``hive.step`` has."""
    return lambda method: cast("StepMaker[Options]", method)


def check_function(what: str, function: object) -> None:
    """Raise if no step or workflow can be made of a function."""
    if isinstance(function, StepFunction | WorkflowFunction):
        raise ConfigurationError(f"{function!r} cannot be made a {what} as well")
    if isinstance(function, classmethod | staticmethod):
        kind = type(function).__name__
        raise ConfigurationError(f"put @hive.{what} below @{kind}, not above it")
    if not callable(function) or (what == "workflow" and isinstance(function, type)):
        raise ConfigurationError(f"a {what} must be a function, not {function!r}")
    shown = getattr(function, "__qualname__", repr(function))
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise ConfigurationError(f"{shown} is a generator, and a {what} must return: return a list")
    first = next(iter(getattr(getattr(function, "__code__", None), "co_varnames", ())), None)
    if what == "workflow" and is_in_class(function):
        raise ConfigurationError(
            f"{shown} is a method, and a workflow must be a function: it is called by its name"
            " after a restart, where there is no object. Define it outside of the class, with the"
            " object as an argument; its steps may be methods"
        )
    if first in ("self", "cls") and not is_in_class(function):
        raise ConfigurationError(
            f"{shown} has an argument {first!r} and is no method: give it another name, or define"
            " it in its class"
        )


def check_redefined(
    what: str, name: str, known: Callable[..., Any], new: Callable[..., Any]
) -> None:
    """Raise if two functions would be found by one name; one that is defined again replaces it."""
    origins = [
        f"{each.__module__}.{each.__qualname__}"
        for each in (known, new)
        if hasattr(each, "__qualname__")
    ]
    if len(set(origins)) == 2:
        before, now = origins
        raise ConfigurationError(
            f"two {what} {name!r}: {before} and {now}; give one of them another name="
        )
