"""Steps and workflows as their authors call them: the functions they were made of, durable."""

from __future__ import annotations

import functools
import inspect
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    ParamSpec,
    Protocol,
    TypeVar,
    Unpack,
    overload,
)

from maestro_hive.engine.attempt import is_async
from maestro_hive.engine.options import Options, StepOptions
from maestro_hive.engine.plan import Planner
from maestro_hive.hive.active_run import active_run
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from maestro_hive.engine.options import Key

P = ParamSpec("P")
R = TypeVar("R")


class StepFunction(Generic[P, R]):
    """What ``@hive.step`` makes of a function: awaited in a workflow, it runs once, durably.

    ``function`` is the function itself, to be called where nothing shall be recorded, as in a test.
    """

    def __init__(self, function: Callable[P, Any], name: str, options: Options) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.name = name
        self.persona = options.persona
        self.options = options
        self.signature = inspect.signature(function)
        self.is_async = is_async(function)
        self.planner = Planner(options.persona, name, options.recorded())
        #: How many arguments a call has that needs no binding; None where each call is bound.
        self._arity = _simple_arity(self.signature)

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the recorded result, or else call the function until it succeeds."""
        run = active_run("the step", self.name)
        given: tuple[tuple[Any, ...], dict[str, Any]] = args, kwargs
        if kwargs or len(args) != self._arity:
            bound = self.signature.bind(*args, **kwargs)  # a wrong call fails here, unrecorded
            given = bound.args, bound.kwargs
        result: R = await run.call(self, *given)
        return result

    def key_for(self, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Return the identity that was given by hand, for these arguments."""
        if callable(key):
            return key(*args, **kwargs)
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        try:
            return key.format(**bound.arguments)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ConfigurationError(
                f"the key {key!r} of step {self.name!r} cannot be made of its arguments"
                f" ({', '.join(bound.arguments)}): {error!r}"
            ) from error

    def __repr__(self) -> str:
        return f"<step {self.name!r} of {self.persona!r}>"


def _simple_arity(signature: inspect.Signature) -> int | None:
    parameters = signature.parameters.values()
    simple = all(
        each.kind is each.POSITIONAL_OR_KEYWORD and each.default is each.empty
        for each in parameters
    )
    return len(parameters) if simple else None


class WorkflowFunction(Generic[P, R]):
    """What ``@hive.workflow`` makes of a function: ``hive.run`` executes it.

    Awaited inside another workflow it is a child: a run of its own, recorded like a step, on the
    hive that runs the other.
    """

    def __init__(self, function: Callable[P, Awaitable[R]], name: str) -> None:
        if not inspect.iscoroutinefunction(function):
            raise ConfigurationError(
                f"the workflow {name!r} is not an async function: write `async def {name}(…)`,"
                " and put what blocks into a step, which may be a plain function"
            )
        functools.update_wrapper(self, function)
        self.function = function
        self.name = name
        self.signature = inspect.signature(function)
        #: Its parameters' names, with stars as in its signature.
        self.parameters = _starred(self.signature)

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run it as a child of the workflow that calls it."""
        parent = active_run("the workflow", self.name)
        result: R = await parent.run_child(self, *self.bind(args, kwargs))
        return result

    def bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments as the function takes them, by name if it lets us.

        So a call by place and one by name are the same. Raises TypeError if it does not take them.
        """
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}{self.signature} was called wrongly: {error}") from None
        kinds = inspect.Parameter
        unnamed = (kinds.POSITIONAL_ONLY, kinds.VAR_POSITIONAL)
        if any(self.signature.parameters[name].kind in unnamed for name in bound.arguments):
            return bound.args, bound.kwargs
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            others = self.signature.parameters[name].kind is kinds.VAR_KEYWORD
            named.update(value if others else {name: value})
        return (), named

    def __repr__(self) -> str:
        return f"<workflow {self.name!r}>"


def _starred(signature: inspect.Signature) -> tuple[str, ...]:
    found: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            found.append(f"*{parameter.name}")
        elif parameter.kind is parameter.VAR_KEYWORD:
            found.append(f"**{parameter.name}")
        else:
            if parameter.kind is parameter.KEYWORD_ONLY and not any(n[0] == "*" for n in found):
                found.append("*")
            found.append(parameter.name)
    return tuple(found)


def function_name(function: Callable[..., Any]) -> str:
    """Return the name that a function gives to what is made of it."""
    name = getattr(function, "__name__", "")
    if not name or name == "<lambda>":
        raise ConfigurationError(f"{function!r} has no name of its own to be found by; give name=")
    return str(name)


# --- those that are defined on a hive ---------------------------------------------------------------


class StepDecorator(Protocol):
    """The type of what ``hive.step(…)`` returns: makes a step of a function, async or not."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> StepFunction[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> StepFunction[P, R]: ...


class WorkflowDecorator(Protocol):
    """The type of what ``hive.workflow(…)`` returns: makes a workflow of an async function."""

    def __call__(self, function: Callable[P, Awaitable[R]], /) -> WorkflowFunction[P, R]:
        """Make the workflow."""
        ...


class Definitions:
    """The steps and workflows of a hive, by name."""

    def __init__(self) -> None:
        self._workflows: dict[str, WorkflowFunction[..., Any]] = {}
        self._steps: dict[tuple[str, str], StepFunction[..., Any]] = {}

    @overload
    def step(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> StepFunction[P, R]: ...
    @overload
    def step(self, function: Callable[P, R], /) -> StepFunction[P, R]: ...
    @overload
    def step(self, **options: Unpack[StepOptions]) -> StepDecorator: ...
    def step(  # type: ignore[misc]  # the overloads are narrower
        self, function: Callable[..., Any] | None = None, /, **options: Any
    ) -> Any:
        """Make a durable step of a function, async or not.

        The options are those of ``StepOptions``; the configuration decides what is not given.
        """

        def decorate(function: Callable[..., Any]) -> StepFunction[..., Any]:
            _check_function("step", function)
            name = options.get("name")
            named = function_name(function) if name is None else name
            what = f"of step {named!r} the option"
            checked = Options().changed(dict(options), StepOptions, what)
            return self._add_step(StepFunction(function, named, checked))

        return decorate if function is None else decorate(function)

    def _add_step(self, step: StepFunction[..., Any]) -> StepFunction[..., Any]:
        place = (step.persona, step.name)
        known = self._steps.get(place)
        if known is not None and _origin(known.function) != _origin(step.function):
            raise ConfigurationError(
                f"there are two steps {place[1]!r} of {place[0]!r}, {_shown(known.function)} and"
                f" {_shown(step.function)}, which have one identity; give one of them name="
            )
        self._steps[place] = step
        return step

    @overload
    def workflow(self, function: Callable[P, Awaitable[R]], /) -> WorkflowFunction[P, R]: ...
    @overload
    def workflow(self, *, name: str | None = ...) -> WorkflowDecorator: ...
    def workflow(
        self, function: Callable[..., Any] | None = None, *, name: str | None = None
    ) -> Any:
        """Make a workflow of an async function; its runs are resumed by its name."""

        def decorate(function: Callable[..., Any]) -> WorkflowFunction[..., Any]:
            _check_function("workflow", function)
            own = files.check_identifier(name or function_name(function), "workflow")
            known = self._workflows.get(own)
            if known is not None and _origin(known.function) != _origin(function):
                raise ConfigurationError(
                    f"there are two workflows {own!r}, {_shown(known.function)} and"
                    f" {_shown(function)}; give one of them name="
                )
            made = WorkflowFunction(function, own)
            self._workflows[own] = made
            return made

        return decorate if function is None else decorate(function)

    def _known(self, workflow: Callable[..., Awaitable[R]]) -> WorkflowFunction[..., R]:
        if isinstance(workflow, WorkflowFunction):
            known = self._workflows.setdefault(workflow.name, workflow)
            if known is not workflow:
                raise ConfigurationError(
                    f"this Hive has another workflow {workflow.name!r}; the one to run was defined on"
                    " another Hive"
                )
            return workflow
        raise ConfigurationError(
            f"{_shown(workflow)} is not a workflow; put @hive.workflow above it"
        )


def _check_function(what: str, function: object) -> None:
    if isinstance(function, StepFunction | WorkflowFunction):
        raise ConfigurationError(f"{function!r} cannot be made a {what} as well")
    if not callable(function) or isinstance(function, type):
        raise ConfigurationError(f"a {what} must be a function, not {function!r}")
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise ConfigurationError(
            f"{_shown(function)} is a generator, and a {what} must return: return a list"
        )
    first = next(iter(inspect.signature(function).parameters), None)
    if first in ("self", "cls"):
        raise ConfigurationError(
            f"{_shown(function)} is a method, and a {what} must be a function: an object cannot be"
            f" identified after a restart. Define the {what} outside of the class"
        )


def _origin(function: Callable[..., Any]) -> tuple[str, str]:
    """Return where a function is defined; one that is defined again there replaces the first."""
    return getattr(function, "__module__", ""), getattr(function, "__qualname__", "")


def _shown(function: object) -> str:
    return str(getattr(function, "__qualname__", None) or repr(function))
