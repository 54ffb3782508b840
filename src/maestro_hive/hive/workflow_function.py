"""A workflow as its author calls it: the function it was made of, run by a hive."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from maestro_hive.hive.active_run import active_run
from maestro_hive.kernel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

P = ParamSpec("P")
R = TypeVar("R")


class WorkflowFunction(Generic[P, R]):
    """What ``@hive.workflow`` makes of a function: ``hive.run`` executes it.

    Awaited inside another workflow it is a child: a run of its own, kept like a step, on the hive
    that runs the other.
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
        parent = active_run(f"the workflow {self.name!r}")
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
