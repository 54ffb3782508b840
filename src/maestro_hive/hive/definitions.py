"""The steps, workflows, schedules and healers that are defined on a hive.

What these are made of is imported when the first of them is: a program may import ``Hive`` and not
use it.
"""

from __future__ import annotations

import weakref
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    ParamSpec,
    Protocol,
    TypeVar,
    Unpack,
    overload,
)

from maestro_hive.kernel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence

    from maestro_hive.engine.healing.function_healers import FunctionHealer
    from maestro_hive.engine.options import StepOptions
    from maestro_hive.hive.functions import StepFunction, WorkflowFunction
    from maestro_hive.hive.schedules import ScheduledWorkflow

P = ParamSpec("P")
R = TypeVar("R")
WorkflowT = TypeVar("WorkflowT", bound="WorkflowFunction[..., Any]")
HealerT = TypeVar("HealerT", bound="Callable[..., Any]")

#: The queue of runs that are given no other.
DEFAULT_QUEUE = "default"


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
        from maestro_hive.hive import functions

        def decorate(function: Callable[..., Any]) -> StepFunction[..., Any]:
            return self._add_step(functions.make_step(function, options))

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
        from maestro_hive.engine.healing.function_healers import checked_errors
        from maestro_hive.hive import functions

        checked = checked_errors(errors)

        def decorate(function: HealerT) -> HealerT:
            made = functions.make_healer(function, checked, name, self._healers)
            self._healers[:] = [each for each in self._healers if each.name != made.name] + [made]
            return function

        return decorate

    def _add_step(self, step: StepFunction[..., Any]) -> StepFunction[..., Any]:
        place = (step.persona, step.name)
        known = self._steps.get(place)
        if known is not None:
            from maestro_hive.hive import functions

            name = f"{step.name!r} of {step.persona!r}"
            functions.check_redefinition("steps", name, known.function, step.function)
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
        from maestro_hive.hive import functions

        def decorate(function: Callable[..., Any]) -> WorkflowFunction[..., Any]:
            made = functions.make_workflow(function, name)
            known = self._workflows.get(made.name)
            if known is not None:
                what = repr(made.name)
                functions.check_redefinition("workflows", what, known.function, function)
            made.home = weakref.ref(self)
            self._workflows[made.name] = made
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
        from maestro_hive.hive.schedules import define

        def decorate(workflow: WorkflowT) -> WorkflowT:
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
        from maestro_hive.hive import functions

        known = self._schedules.get(made.name)
        if known is not None:
            functions.check_second_schedule(made.name, known.workflow, workflow)
        self._schedules[made.name] = made

    def _known(self, workflow: Callable[..., Awaitable[R]]) -> WorkflowFunction[..., R]:
        from maestro_hive.hive import functions

        if isinstance(workflow, functions.WorkflowFunction):
            known = self._workflows.setdefault(workflow.name, workflow)
            if known is not workflow:
                raise ConfigurationError(
                    f"this Hive has another workflow {workflow.name!r}; the one to run was defined on"
                    " another Hive"
                )
            return workflow
        raise ConfigurationError(
            f"{functions.shown(workflow)} is not a workflow; put @hive.workflow above it"
        )
