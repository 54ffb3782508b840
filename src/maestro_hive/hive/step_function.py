"""A step as its author calls it: the function it was made of, durable."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from maestro_hive.hive.live_run import live_run

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.hive.step_terms import StepTerms

P = ParamSpec("P")
R = TypeVar("R")


class StepFunction(Generic[P, R]):
    """What ``@hive.step`` makes of a function: awaited in a workflow, it runs once and is kept.

    ``function`` is the function itself, to be called where nothing shall be kept, as in a test.
    """

    def __init__(self, function: Callable[P, Any], terms: StepTerms) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.terms = terms
        self.signature = inspect.signature(function)

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the result that is kept, or else call the function until it succeeds."""
        run = live_run(f"the step {self.terms.name!r}")
        bound = self.signature.bind(*args, **kwargs)  # a wrong call fails here, not in an attempt
        result: R = await run.call(self, bound.args, bound.kwargs)
        return result

    def __repr__(self) -> str:
        return f"<step {self.terms.name!r} of {self.terms.persona!r}>"
