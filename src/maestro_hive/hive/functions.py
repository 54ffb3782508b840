"""Steps and workflows as their authors call them: the functions they were made of, durable."""

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
    TypeVar,
    overload,
)

from maestro_hive.engine.attempt import is_async
from maestro_hive.engine.definitions import is_same_definition, origin
from maestro_hive.engine.healing.function_healers import FunctionHealer
from maestro_hive.engine.healing.healers import DEFAULT_HEALERS, name_of
from maestro_hive.engine.options import Options, StepOptions, checked_text
from maestro_hive.engine.parameters import Parameters, is_in_class
from maestro_hive.engine.plan import Planner
from maestro_hive.hive.answer_types import declared_result, declared_types
from maestro_hive.hive.branches import active_run
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping

    from maestro_hive.engine.options import Key
    from maestro_hive.hive.active_run import ActiveRun
    from maestro_hive.hive.definitions import Definitions
    from maestro_hive.hive.run_context import PreparedStep
    from maestro_hive.maestro.state.strict_json import Json

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")


class StepFunction(Generic[P, R]):
    """What ``@hive.step`` makes of a function: awaited in a workflow, it runs once, durably.

    ``function`` is the function itself, to be called where nothing shall be recorded, as in a test.
    On a method, the instance is part of the step's identity: by its attribute ``step_identity``, a
    text, or else as it is encoded.
    """

    def __init__(self, function: Callable[P, Any], name: str, options: Options) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.name = name
        self.persona = options.persona
        self.options = options
        self.parameters = Parameters(function, name, options.ignore, options.redact)
        self.signature = self.parameters.signature
        #: What is called with the arguments as they are recorded.
        self.task = self.parameters.function
        self.is_async = is_async(function)
        #: The step whose limits and breaker it has: itself, or the one that it is a named part of.
        self.definition: StepFunction[..., Any] = self
        #: How it is executed in all runs of a hive, once it was in one of them.
        self.prepared: PreparedStep | None = None
        self._defaults = self.parameters.defaults
        #: The key of a call without one of its own: an empty one stands for its input.
        self._own_key = "" if options.input_is_key else None
        #: How many arguments a call has that is recorded as it is; None where each call is bound.
        self._arity = self.parameters.arity
        needs_names = options.key is not None and (self._defaults or not callable(options.key))
        if needs_names or self.parameters.is_method:
            self._arity = None
        if not self._defaults:
            _ = self.planner

    def named(self, name: str) -> StepFunction[P, R]:
        """Return the same step under another name: what all its names share is made once."""
        _ = self._recorded  # or each of them would make it
        made = copy.copy(self)
        made.name = name
        made.__dict__.pop("planner", None)
        return made

    @functools.cached_property
    def planner(self) -> Planner:
        """Plans its calls; with defaults it is made at the first one: their codecs are there then."""
        asks = self.options.on_ambiguous == "ask" or self.options.escalate
        returns = declared_result(self.function) if asks else None
        return Planner(self.persona, self.name, self._recorded, self.parameters, returns)

    @functools.cached_property
    def _recorded(self) -> dict[str, Any]:
        """Its options as they are recorded with each attempt."""
        return self.options.recorded()

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the recorded result, or else call the function until it succeeds."""
        run = active_run("the step", self.name)
        result: R
        if kwargs or len(args) != self._arity:
            result = await self._call_bound(run, args, kwargs)
        else:
            defaults, by_hand = self._defaults, self.options.key
            key = self._own_key
            if by_hand is not None:
                key = self._checked_key(by_hand(*args))  # type: ignore[operator]
            result = await run.steps.call(self, args, {**defaults} if defaults else kwargs, key)
        return result

    async def _call_bound(
        self, run: ActiveRun, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        bound = self.parameters.bind(args, kwargs)  # a wrong call fails here, unrecorded
        key = self._own_key
        if self.options.key is not None:
            key = self._key_for(self.options.key, bound)
        given = self.parameters.recorded(bound, has_key=key is not None)
        return await run.steps.call(self, given.args, given.kwargs, key, given.task)

    def _key_for(self, key: Key, bound: inspect.BoundArguments) -> str:
        """Return the identity that was given by hand, for these arguments."""
        if callable(key):
            return self._checked_key(key(*bound.args, **bound.kwargs))
        try:
            text = key.format(**bound.arguments)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ConfigurationError(
                f"the key {key!r} of step {self.name!r} cannot be made of its arguments"
                f" ({', '.join(bound.arguments)}): {error!r}"
            ) from error
        return self._checked_key(text)

    def _checked_key(self, made: object) -> str:
        return checked_text(f"the key of step {self.name!r}", made)

    # --- as a method ---

    def __set_name__(self, owner: type, name: str) -> None:
        if f"{owner.__qualname__}.{name}" == getattr(self.function, "__qualname__", ""):
            self.parameters.is_method, self._arity = True, None

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> StepFunction[P, R]: ...
    @overload
    def __get__(
        self: StepFunction[Concatenate[S, Q], R], instance: S, owner: type[S] | None = None
    ) -> StepMethod[Q, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Return the step of one instance."""
        step: Any = self
        return step if instance is None else StepMethod(step, instance)

    def __repr__(self) -> str:
        return f"<step {self.name!r} of {self.persona!r}>"


class StepMethod(Generic[P, R]):
    """A step that is a method, of one instance: what ``agent.research`` is."""

    __slots__ = ("__self__", "step")

    def __init__(self, step: StepFunction[Concatenate[Any, P], R], instance: object) -> None:
        self.step = step
        self.__self__ = instance

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Return the recorded result, or else call the method until it succeeds."""
        return self.step(self.__self__, *args, **kwargs)

    @property
    def function(self) -> Callable[P, Any]:
        """The method itself, to be called where nothing shall be recorded."""
        return functools.partial(self.step.function, self.__self__)

    @property
    def name(self) -> str:
        """What the step is called."""
        return self.step.name

    def __repr__(self) -> str:
        return f"<step {self.name!r} of {self.step.persona!r}, of {self.__self__!r}>"


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
        #: Gives the hive it was defined on, while that exists.
        self.home: Callable[[], Definitions | None] = lambda: None

    @functools.cached_property
    def types(self) -> dict[str, Json]:
        """The shapes of those parameters that declare a type; read late, when all types are defined."""
        types = declared_types(self.function)
        return {name: types[name] for name in self.signature.parameters if types.get(name)}

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run it as a child of the workflow that calls it."""
        parent = active_run("the workflow", self.name)
        result: R = await parent.run_child(parent, self, *self.bind(args, kwargs))
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
    """Return the name that a function gives to what is made of it; a method's has its class."""
    name = str(getattr(function, "__name__", ""))
    if not name or name == "<lambda>":
        raise ConfigurationError(f"{function!r} has no name of its own to be found by; give name=")
    if is_in_class(function) and not inspect.ismethod(function):
        return str(function.__qualname__.rpartition("<locals>.")[2])
    return name


# --- those that are defined on a hive ---------------------------------------------------------------


def make_step(function: Callable[..., Any], options: Mapping[str, Any]) -> StepFunction[..., Any]:
    """Return the step that a function makes with these options; raise if it makes none."""
    _check_function("step", function)
    name = options.get("name")
    named = function_name(function) if name is None else name
    checked = Options().changed(dict(options), StepOptions, f"of step {named!r} the option")
    return StepFunction(function, named, checked)


def make_workflow(function: Callable[..., Any], name: str | None) -> WorkflowFunction[..., Any]:
    """Return the workflow that a function makes; raise if it makes none."""
    _check_function("workflow", function)
    own = files.check_identifier(name or function_name(function), "workflow")
    return WorkflowFunction(function, own)


def make_healer(
    function: Callable[..., Any],
    errors: tuple[type[BaseException], ...],
    name: str | None,
    known: list[FunctionHealer],
) -> FunctionHealer:
    """Return the healer that a function makes beside those that are known; raise if it makes none."""
    called = str(name or getattr(function, "__name__", type(function).__name__))
    made = FunctionHealer(function, errors, called)
    _check_healer(called, function, known)
    return made


def _check_function(what: str, function: object) -> None:
    if isinstance(function, StepFunction | WorkflowFunction | StepMethod):
        raise ConfigurationError(f"{function!r} cannot be made a {what} as well")
    if isinstance(function, classmethod | staticmethod):
        kind = type(function).__name__
        raise ConfigurationError(
            f"{shown(function.__func__)} is a {kind}: put @hive.{what} below @{kind}"
        )
    if not callable(function) or isinstance(function, type):
        raise ConfigurationError(f"a {what} must be a function, not {function!r}")
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise ConfigurationError(
            f"{shown(function)} is a generator, and a {what} must return: return a list"
        )
    first = next(iter(inspect.signature(function).parameters), None)
    if first not in ("self", "cls"):
        return
    if what == "workflow":
        raise ConfigurationError(
            f"{shown(function)} is a method, and a workflow must be a function: it is called by its"
            " name after a restart, where there is no object. Define it outside of the class, with"
            " the object as an argument; its steps may be methods"
        )
    if not is_in_class(function):
        raise ConfigurationError(
            f"{shown(function)} has an argument {first!r} and is no method: give it another name, or"
            " define it in its class"
        )


def _check_healer(name: str, function: object, known: list[FunctionHealer]) -> None:
    """Raise if a healer cannot have its name; a reloaded module replaces what it defined."""
    if name in {name_of(each) for each in DEFAULT_HEALERS}:
        raise ConfigurationError(
            f"the healer {name!r} has the name of one that ships; give it another:"
            f" @hive.healer(…, name=…)"
        )
    for each in known:
        if each.name == name and not is_same_definition(each.function, function):
            raise ConfigurationError(
                f"there are two healers {name!r}, {shown(each.function)} and {shown(function)};"
                " give one of them name="
            )


def check_redefinition(what: str, name: str, known: object, new: object) -> None:
    """Raise if there would be two of one name; one that is defined again replaces the first."""
    if is_same_definition(known, new):
        return
    if origin(known) != origin(new):
        raise ConfigurationError(
            f"there are two {what} {name}, {shown(known)} and {shown(new)}, which have one identity;"
            " give one of them name="
        )
    raise ConfigurationError(
        f"there are two {what} {name}, both made of {shown(new)} and not the same: one would get the"
        " results of the other; give each of them its own name="
    )


def check_second_schedule(
    name: str, first: WorkflowFunction[..., Any], second: WorkflowFunction[..., Any]
) -> None:
    """Raise if a schedule would be of two workflows; one that is defined again replaces the first."""
    if first is second or not is_same_definition(first.function, second.function):
        raise ConfigurationError(
            f"there are two schedules {name!r}, of {shown(first)} and of {shown(second)};"
            " give one of them name="
        )


def shown(function: object) -> str:
    """Return what a function is called in a message."""
    return str(getattr(function, "__qualname__", None) or repr(function))
