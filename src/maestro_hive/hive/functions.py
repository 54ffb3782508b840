"""Steps and workflows as their authors call them: the functions they were made of, durable."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from maestro_hive.engine.attempt import is_async
from maestro_hive.engine.plan import Planner
from maestro_hive.hive.active_run import active_run
from maestro_hive.kernel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from maestro_hive.engine.options import Key, Options

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
