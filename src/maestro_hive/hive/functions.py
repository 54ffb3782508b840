"""Steps and workflows as their authors call them: the functions they were made of, durable."""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    TypeVar,
    Unpack,
    overload,
)

from maestro_hive.engine.attempt import is_async
from maestro_hive.engine.definitions import is_same_definition, origin
from maestro_hive.engine.healing.function_healers import FunctionHealer, checked_errors
from maestro_hive.engine.healing.healers import DEFAULT_HEALERS, name_of
from maestro_hive.engine.options import Options, StepOptions, checked_text
from maestro_hive.engine.parameters import Parameters, is_in_class
from maestro_hive.engine.plan import Planner
from maestro_hive.hive.answer_types import declared_result, declared_types
from maestro_hive.hive.branches import active_run
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence

    from maestro_hive.engine.options import Key
    from maestro_hive.hive.active_run import ActiveRun
    from maestro_hive.hive.schedules import ScheduledWorkflow
    from maestro_hive.maestro.state.strict_json import Json

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")
WorkflowT = TypeVar("WorkflowT", bound="WorkflowFunction[..., Any]")
HealerT = TypeVar("HealerT", bound="Callable[..., Any]")


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
        #: How many arguments a call has that is recorded as it is; None where each call is bound.
        self._arity = self.parameters.arity
        if options.key is not None or self.parameters.is_method:
            self._arity = None
        self._defaults = self.parameters.defaults
        if not self._defaults:
            _ = self.planner

    @functools.cached_property
    def planner(self) -> Planner:
        """Plans its calls; with defaults it is made at the first one: their codecs are there then."""
        asks = self.options.on_ambiguous == "ask" or self.options.escalate
        returns = declared_result(self.function) if asks else None
        options = self.options.recorded()
        return Planner(self.persona, self.name, options, self.parameters, returns)

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the recorded result, or else call the function until it succeeds."""
        run = active_run("the step", self.name)
        result: R
        if kwargs or len(args) != self._arity:
            result = await self._call_bound(run, args, kwargs)
        else:
            defaults = self._defaults
            result = await run.steps.call(self, args, {**defaults} if defaults else kwargs)
        return result

    async def _call_bound(
        self, run: ActiveRun, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        bound = self.parameters.bind(args, kwargs)  # a wrong call fails here, unrecorded
        key = None if self.options.key is None else self._key_for(self.options.key, bound)
        given = self.parameters.recorded(bound, has_key=key is not None)
        return await run.steps.call(self, given.args, given.kwargs, key, given.task)

    def _key_for(self, key: Key, bound: inspect.BoundArguments) -> str:
        """Return the identity that was given by hand, for these arguments."""
        if callable(key):
            made: object = key(*bound.args, **bound.kwargs)
            return checked_text(f"the key of step {self.name!r}", made)
        try:
            text = key.format(**bound.arguments)
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ConfigurationError(
                f"the key {key!r} of step {self.name!r} cannot be made of its arguments"
                f" ({', '.join(bound.arguments)}): {error!r}"
            ) from error
        return checked_text(f"the key of step {self.name!r}", text)

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


class ScheduleDecorator(Protocol):
    """The type of what ``hive.schedule(…)`` returns: gives a workflow a schedule, and returns it."""

    def __call__(self, workflow: WorkflowT, /) -> WorkflowT:
        """Add the schedule."""
        ...


class Definitions:
    """The steps, workflows, schedules and healers of a hive, by name."""

    def __init__(self) -> None:
        self._workflows: dict[str, WorkflowFunction[..., Any]] = {}
        self._steps: dict[tuple[str, str], StepFunction[..., Any]] = {}
        self._schedules: dict[str, ScheduledWorkflow] = {}
        self._healers: list[FunctionHealer] = []

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

    def healer(
        self, *errors: type[BaseException], name: str | None = None
    ) -> Callable[[HealerT], HealerT]:
        """Ask a function, async or not, about attempts that fail by errors of these types.

        It is called with the failure, the step's arguments by name, and what was tried; it takes the
        first of these if it takes fewer. It answers with feedback for the next attempt (a text), with
        changed arguments (a dict), with a ``Fix``, which may also repair files of the workspace, or
        with None. ``name``, or the function's own, is what it is called in records.
        """
        checked = checked_errors(errors)

        def decorate(function: HealerT) -> HealerT:
            called = str(name or getattr(function, "__name__", type(function).__name__))
            made = FunctionHealer(function, checked, called)
            _check_healer(called, function, self._healers)
            self._healers[:] = [each for each in self._healers if each.name != called] + [made]
            return function

        return decorate

    def _add_step(self, step: StepFunction[..., Any]) -> StepFunction[..., Any]:
        place = (step.persona, step.name)
        known = self._steps.get(place)
        if known is not None:
            name = f"{step.name!r} of {step.persona!r}"
            _check_redefinition("steps", name, known.function, step.function)
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
            if known is not None:
                _check_redefinition("workflows", repr(own), known.function, function)
            made = WorkflowFunction(function, own)
            made.home = weakref.ref(self)
            self._workflows[own] = made
            return made

        return decorate if function is None else decorate(function)

    def schedule(
        self,
        expression: str,
        *,
        tz: str = "UTC",
        catch_up: Literal["latest", "all", "none"] = "latest",
        overlap: Literal["skip", "queue", "allow"] = "skip",
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        tick: str | None = None,
        name: str | None = None,
        queue: str = "default",
    ) -> ScheduleDecorator:
        """Run a workflow at the times of a cron expression, in a time zone; workers do it.

        Each tick is a run, ``NAME-20261117T080000Z``. ``catch_up`` is for ticks that passed while no
        worker was there: one run for the "latest", "all" of them, or "none". ``overlap`` is for a
        tick that comes while a run is unfinished: "skip" it, "queue" it, or "allow" both. ``args``
        and ``kwargs`` are the workflow's arguments, and its parameter ``tick`` gets the tick's time.
        Stands above ``@hive.workflow``; a second one of the same workflow needs a ``name``.
        """

        def decorate(workflow: WorkflowT) -> WorkflowT:
            from maestro_hive.hive.schedules import define  # noqa: PLC0415 - not for all programs

            made = define(
                workflow,
                name,
                expression=expression,
                tz=tz,
                catch_up=catch_up,
                overlap=overlap,
                args=tuple(args),
                kwargs=dict(kwargs or {}),
                tick=tick,
                queue=queue,
            )
            self._add_schedule(self._known(workflow), made)
            return workflow

        return decorate

    def _add_schedule(self, workflow: WorkflowFunction[..., Any], made: ScheduledWorkflow) -> None:
        known = self._schedules.get(made.name)
        if known is not None:
            first = known.workflow
            if first is workflow or not is_same_definition(first.function, workflow.function):
                raise ConfigurationError(
                    f"there are two schedules {made.name!r}, of {_shown(first)} and of"
                    f" {_shown(workflow)}; give one of them name="
                )
        self._schedules[made.name] = made

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
    if isinstance(function, StepFunction | WorkflowFunction | StepMethod):
        raise ConfigurationError(f"{function!r} cannot be made a {what} as well")
    if isinstance(function, classmethod | staticmethod):
        kind = type(function).__name__
        raise ConfigurationError(
            f"{_shown(function.__func__)} is a {kind}: put @hive.{what} below @{kind}"
        )
    if not callable(function) or isinstance(function, type):
        raise ConfigurationError(f"a {what} must be a function, not {function!r}")
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise ConfigurationError(
            f"{_shown(function)} is a generator, and a {what} must return: return a list"
        )
    first = next(iter(inspect.signature(function).parameters), None)
    if first not in ("self", "cls"):
        return
    if what == "workflow":
        raise ConfigurationError(
            f"{_shown(function)} is a method, and a workflow must be a function: it is called by its"
            " name after a restart, where there is no object. Define it outside of the class, with"
            " the object as an argument; its steps may be methods"
        )
    if not is_in_class(function):
        raise ConfigurationError(
            f"{_shown(function)} has an argument {first!r} and is no method: give it another name, or"
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
                f"there are two healers {name!r}, {_shown(each.function)} and {_shown(function)};"
                " give one of them name="
            )


def _check_redefinition(what: str, name: str, known: object, new: object) -> None:
    """Raise if there would be two of one name; one that is defined again replaces the first."""
    if is_same_definition(known, new):
        return
    if origin(known) != origin(new):
        raise ConfigurationError(
            f"there are two {what} {name}, {_shown(known)} and {_shown(new)}, which have one identity;"
            " give one of them name="
        )
    raise ConfigurationError(
        f"there are two {what} {name}, both made of {_shown(new)} and not the same: one would get the"
        " results of the other; give each of them its own name="
    )


def _shown(function: object) -> str:
    return str(getattr(function, "__qualname__", None) or repr(function))
