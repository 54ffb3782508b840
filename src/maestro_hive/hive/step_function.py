"""A step as its author calls it: the function it was made of, durable."""

from __future__ import annotations

import copy
import functools
import inspect
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from maestro_hive.hive.active_run import active_run

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.hive.step_terms import StepOptions

P = ParamSpec("P")
R = TypeVar("R")


_IMMUTABLE = frozenset({str, int, float, bool, bytes, type(None)})


def _own(value: Any) -> Any:
    """Return a copy of an argument, or what cannot be copied itself."""
    if type(value) in _IMMUTABLE:
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - the user's own object, such as a client with a lock in it
        return value


def _given_copies(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, called with copies of its arguments.

    A step that is kept is not called again. If it could change what it was given, a workflow would
    go another way after a restart, and a second attempt would not begin like the first.
    """
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call(*args: Any, **kwargs: Any) -> Any:
            named = {name: _own(value) for name, value in kwargs.items()}
            return await function(*map(_own, args), **named)

        return call

    @functools.wraps(function)
    def call_blocking(*args: Any, **kwargs: Any) -> Any:
        named = {name: _own(value) for name, value in kwargs.items()}
        return function(*map(_own, args), **named)

    return call_blocking


class StepFunction(Generic[P, R]):
    """What ``@hive.step`` makes of a function: awaited in a workflow, it runs once and is kept.

    ``function`` is the function itself, to be called where nothing shall be kept, as in a test.
    """

    def __init__(self, function: Callable[P, Any], terms: StepOptions) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.terms = terms
        self.signature = inspect.signature(function)
        #: What an attempt calls.
        self.body = _given_copies(function)

    async def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the result that is kept, or else call the function until it succeeds."""
        run = active_run(f"the step {self.terms.name!r}")
        bound = self.signature.bind(*args, **kwargs)  # a wrong call fails here, not in an attempt
        result: R = await run.call(self, bound.args, bound.kwargs)
        return result

    def __repr__(self) -> str:
        return f"<step {self.terms.name!r} of {self.terms.persona!r}>"
