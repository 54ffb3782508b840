"""Arguments that a healer changed: for the next attempts of the step, also after a restart."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from maestro_hive.engine import values
from maestro_hive.kernel.errors import ConfigurationError, DecodeError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from maestro_hive.maestro.state.codec import Encoded

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class ChangedArguments:
    """The changed arguments of a step, by name; ``data`` is how they are recorded, if they are."""

    __slots__ = ("_changed", "_data")

    def __init__(self, changed: Mapping[str, Any] | None, data: bytes | None) -> None:
        self._changed = changed or {}
        self._data = data

    async def by_name(self) -> dict[str, Any]:
        """Return them; new objects each time if they are recorded, for a task may change them."""
        if self._data is None:
            return dict(self._changed)
        decoded = await values.decode(self._data, "arguments")
        if not isinstance(decoded, dict):
            raise DecodeError("arguments", "the arguments that a healer changed are no object")
        return decoded

    async def apply(self, task: Callable[..., Any], arguments: Arguments) -> Arguments:
        """Return the arguments of a call with these in place of its own."""
        return with_changes(task, arguments, await self.by_name())


async def encode_arguments(changed: Mapping[str, Any], *, store_input: bool) -> Encoded:
    """Return changed arguments as they are recorded; raise if they cannot be."""
    if not store_input:
        raise ConfigurationError(
            "changed arguments are recorded for the next attempt, and the step has store_input=False"
        )
    return await values.encode(dict(changed), "arguments")


def with_changes(
    task: Callable[..., Any], arguments: Arguments, changed: Mapping[str, Any]
) -> Arguments:
    """Return the arguments of a call with some replaced by name; TypeError if there is none of a name."""
    args, kwargs = arguments
    signature = inspect.signature(task)
    bound = signature.bind(*args, **kwargs)
    kinds = inspect.Parameter
    rest = next((n for n, p in signature.parameters.items() if p.kind is kinds.VAR_KEYWORD), None)
    for name, value in changed.items():
        parameter = signature.parameters.get(name)
        variadic = (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
        if parameter is not None and parameter.kind not in variadic:
            bound.arguments[name] = value
        elif rest is not None:
            bound.arguments[rest] = {**bound.arguments.get(rest, {}), name: value}
        else:
            listed = ", ".join(signature.parameters) or "none"
            raise TypeError(f"the task has no argument {name!r} to change; it has {listed}")
    return bound.args, bound.kwargs
