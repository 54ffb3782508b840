"""Models of pydantic and values of numpy: their parts, and how they are made of them again.

Neither library is imported to write a value: who has the value has imported its library.
"""

from __future__ import annotations

import math
import re
import sys
from typing import Any

from maestro_hive.journal.user_classes import AtPathError, UnknownClassAtPathError

#: Booleans, numbers, texts, bytes and times; not objects, not structures.
_DTYPE = re.compile(r"[<>|][biufcSUmM][0-9]{1,9}(\[[0-9]{0,9}[a-zA-Z]{1,2}\])?")


# --- pydantic ---------------------------------------------------------------------------------


def is_model(kind: type) -> bool:
    """Return whether a class is a pydantic model."""
    return hasattr(kind, "__pydantic_validator__")


def model_fields(model: Any) -> dict[str, Any]:
    """Return the fields by the names that the model is made with, and its extra ones."""
    fields: dict[str, Any] = {}
    for name, info in type(model).model_fields.items():
        alias = getattr(info.validation_alias, "choices", [info.validation_alias])[0]
        fields[alias if isinstance(alias, str) else name] = getattr(model, name)
    return fields | (model.model_extra or {})


def make_model(kind: Any, fields: dict[str, Any]) -> Any:
    """Return a model with these fields, validated."""
    is_root = getattr(kind, "__pydantic_root_model__", False)
    return kind.model_validate(fields["root"] if is_root else fields)


# --- numpy ------------------------------------------------------------------------------------


def is_numpy(value: Any) -> bool:
    """Return whether a value of the package is one that has a form: a scalar or an array."""
    numpy: Any = sys.modules["numpy"]
    return type(value) is numpy.ndarray or isinstance(value, numpy.generic)


def is_array(value: Any) -> bool:
    """Return whether a value of numpy is an array."""
    return isinstance(value, sys.modules["numpy"].ndarray)


def is_number(dtype: Any) -> bool:
    """Return whether scalars of a type are written as JSON's numbers and booleans."""
    return dtype.kind in "biuf" and dtype.itemsize <= 8


def dtype_name(value: Any) -> str:
    """Return the type of a scalar or an array as it is stored."""
    name: str = value.dtype.str
    if value.dtype.itemsize == 0 or _DTYPE.fullmatch(name) is None:
        raise AtPathError(f"a numpy value of type {value.dtype} has no form of its own")
    return name


def find_dtype(name: object) -> Any:
    """Return the type of that name; numpy is imported."""
    try:  # by this name alone, and only if there is such a value
        import numpy as np
    except ImportError as error:
        raise UnknownClassAtPathError(f"it is a value of numpy ({error}); install numpy") from error
    if type(name) is not str or _DTYPE.fullmatch(name) is None:
        raise AtPathError(f"{str(name)[:40]!r} is not a type of numpy's")
    return np.dtype(name)


def make_number(dtype: Any, value: object) -> Any:
    """Return a scalar of a number or a boolean."""
    if type(value) is not {"b": bool, "f": float}.get(dtype.kind, int):
        raise AtPathError(f"{str(value)[:40]} is not of the type {dtype}")
    return dtype.type(value)


def make_array(dtype: Any, shape: list[int], data: bytearray) -> Any:
    """Return an array; it is writable, since a bytearray is."""
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data):
        raise AtPathError("not a valid array: its shape is not that of its data")
    numpy: Any = sys.modules["numpy"]
    return numpy.frombuffer(data, dtype).reshape(shape)
