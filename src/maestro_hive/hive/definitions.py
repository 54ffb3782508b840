"""The steps and workflows that are defined on a ``Hive``."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, Unpack, overload

from maestro_hive.engine.options import Options, StepOptions
from maestro_hive.hive.functions import StepFunction, WorkflowFunction, function_name
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine


P = ParamSpec("P")
R = TypeVar("R")


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
        self, function: Callable[..., Any] | None = None, /, **options: Unpack[StepOptions]
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
