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


def arguments_by_name(
    task: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name, as far as they have one; those of ``*rest`` as ``rest``.

    ``with_changes`` takes them back: given all of them, it changes nothing.
    """
    try:
        signature = inspect.signature(task)
        bound = signature.bind_partial(*args, **kwargs)
    except (TypeError, ValueError):  # it takes no such arguments, or does not declare them
        return dict(kwargs)
    bound.apply_defaults()
    others = _variadic(signature, inspect.Parameter.VAR_KEYWORD)
    more = {} if others is None else bound.arguments.pop(others)
    return {**more, **bound.arguments}


def with_changes(
    task: Callable[..., Any], arguments: Arguments, changed: Mapping[str, Any]
) -> Arguments:
    """Return the arguments of a call with some replaced by name; TypeError if there is none of a name."""
    args, kwargs = arguments
    signature = inspect.signature(task)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()  # what stands after one that is missing could not be given by its place
    kinds = inspect.Parameter
    rest, others = (
        _variadic(signature, kinds.VAR_POSITIONAL),
        _variadic(signature, kinds.VAR_KEYWORD),
    )
    for name, value in changed.items():
        if name == rest:
            if not isinstance(value, list | tuple):
                raise TypeError(
                    f"*{name} is changed to a list or a tuple, and not to {value!r:.80}"
                )
            bound.arguments[name] = tuple(value)
        elif name in signature.parameters and name != others:
            bound.arguments[name] = value
        elif others is not None:
            bound.arguments[others] = {**bound.arguments[others], name: value}
        else:
            listed = ", ".join(signature.parameters) or "none"
            raise TypeError(f"the task has no argument {name!r} to change; it has {listed}")
    return bound.args, bound.kwargs


def _variadic(signature: inspect.Signature, kind: object) -> str | None:
    """Return the name of ``*args`` or of ``**kwargs``, if there is one."""
    return next((name for name, each in signature.parameters.items() if each.kind is kind), None)
