"""Typed results as plain data for JSON."""

from __future__ import annotations

import dataclasses
from functools import singledispatch
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maestro_hive.maestro.state.codec import Json


@singledispatch
def to_dict(result: Json) -> Json:
    """Return a typed result as plain data: tuples as lists, all other values unchanged.

    A class whose JSON is not its fields registers what makes it.
    """
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return fields_of(result)
    return result


@to_dict.register(tuple)
def _(result: tuple[Json, ...]) -> Json:
    return [to_dict(each) for each in result]


def fields_of(result: Json) -> dict[str, Json]:
    """Return the fields of a record as plain data, by name."""
    return {each.name: to_dict(getattr(result, each.name)) for each in dataclasses.fields(result)}
