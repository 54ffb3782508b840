"""Arguments of a workflow that were typed as texts: the types of its parameters decide what they mean."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from maestro_hive.hive import answer_types
from maestro_hive.hive.errors import RunMismatchError
from maestro_hive.hive.runs import read_input, read_run
from maestro_hive.hive.same_run import check_fits
from maestro_hive.kernel.errors import ConfigurationError, DecodeError
from maestro_hive.maestro.state import codec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from inspect import Parameter

    from maestro_hive.hive.functions import WorkflowFunction
    from maestro_hive.hive.hive import Hive
    from maestro_hive.maestro.state.strict_json import Json

    Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_BY_NAME = re.compile(r"([^\W\d]\w*)=(.*)", re.DOTALL)


def stored_argument(path: str, text: str, shape: Json, way_out: str) -> Json:
    """Return a typed argument as it is stored, by the shape of its parameter's type.

    Without a type it is JSON, or else text. Raises if it is not of its type; ``way_out`` is what to do
    where no text can be.
    """
    shape = shape or {}
    if "unknown" in shape:
        raise ConfigurationError(
            f"{path} is of the type {shape['unknown']}, which cannot be typed as a text; {way_out}"
        )
    if shape:
        return answer_types.to_tree(shape, answer_types.parse_words(shape, text, path), path)
    try:
        return codec.parse(text.encode(), path)
    except DecodeError:
        return text


def typed_arguments(workflow: WorkflowFunction[..., Any], words: Sequence[str]) -> Arguments:
    """Return what a workflow is called with: ``words`` are texts by place, and ``name=value`` by name.

    Raises ``ConfigurationError`` if it does not take them.
    """
    known = workflow.signature.parameters
    more = next((each for each in known.values() if each.kind is each.VAR_KEYWORD), None)
    places = _places(workflow)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for word in words:
        named = _BY_NAME.fullmatch(word)
        if named is None:
            place = next(places, None)
            args.append(_value(workflow, "" if place is None else place.name, word))
            continue
        name, text = named.groups()
        if name not in known and more is None:
            raise ConfigurationError(
                f"{word!r} names a parameter {name!r}, which {_shown(workflow)} does not have; a text"
                " with such a beginning is given by the name of its parameter: NAME=TEXT"
            )
        if name in kwargs:
            raise ConfigurationError(f"the parameter {name!r} is given twice")
        declared = name if name in known or more is None else more.name
        kwargs[name] = _value(workflow, declared, text)
    try:
        workflow.bind(tuple(args), kwargs)
    except TypeError as error:
        raise ConfigurationError(str(error)) from None
    return tuple(args), kwargs


def _places(workflow: WorkflowFunction[..., Any]) -> Iterator[Parameter]:
    """Yield the parameters of arguments by place; the one that takes the rest, for ever."""
    for each in workflow.signature.parameters.values():
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD):
            yield each
        while each.kind is each.VAR_POSITIONAL:
            yield each


def _value(workflow: WorkflowFunction[..., Any], name: str, text: str) -> Any:
    path = f"the parameter {name!r} of {workflow.name}" if name else f"an argument {text!r}"
    way_out = "start the run in a program: hive.run_sync(…)"
    tree = stored_argument(path, text, workflow.types.get(name), way_out)
    return codec.decode(codec.dump_canonical(tree), path)


def _shown(workflow: WorkflowFunction[..., Any]) -> str:
    return f"{workflow.name}{workflow.signature}"


def recorded_arguments(
    hive: Hive, workflow: WorkflowFunction[..., Any], run_id: str
) -> Arguments | None:
    """Return what a run was started with; None if there is no run of a workflow with that id.

    Raises ``RunMismatchError`` if it is one of another workflow, or this one takes others by now.
    """
    store = hive._open()  # noqa: SLF001 - of this package
    if store.run(run_id) is None:
        return None
    started = read_run(store, run_id).started
    if started is None:
        return None
    given = read_input(started, store.load)
    if given.workflow != workflow.name:
        raise RunMismatchError(
            f"run {run_id!r} belongs to the workflow {given.workflow!r}, not to {workflow.name!r};"
            " name that one, or give this one another run id"
        )
    return check_fits(store, run_id, workflow, given)
