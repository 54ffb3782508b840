"""The results of tasks that declare a JSON Schema for them: ``output_schema``."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from maestro_hive.kernel.errors import ConfigurationError, DocumentCorruptError
from maestro_hive.kernel.files import read_whole
from maestro_hive.team.errors import ResultRefusedError

if TYPE_CHECKING:
    from pathlib import Path

    from maestro_hive.maestro.state.strict_json import Json

#: A larger result that a command writes is refused.
MAX_RESULT_BYTES = 1024 * 1024
#: How many places an error names, and how much of each message.
_NAMED, _SHOWN = 10, 300
_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


def check_schema(schema: dict[str, Json]) -> None:
    """Raise ``ConfigurationError`` unless a schema is one."""
    from jsonschema import SchemaError  # noqa: PLC0415 - slow to import

    try:
        _validator(schema).check_schema(schema)
    except SchemaError as error:
        at = "".join(f"[{each!r}]" for each in error.absolute_path)
        raise ConfigurationError(
            f"output_schema{at} is no JSON Schema: {error.message[:_SHOWN]}"
        ) from None


def check_result(value: Json, schema: dict[str, Json]) -> None:
    """Raise ``ResultRefusedError`` with all places in which a result is not as its schema says."""
    from referencing.exceptions import Unresolvable  # noqa: PLC0415 - slow to import

    try:
        plain = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ResultRefusedError(f"the result is no JSON value: {error}") from error
    try:
        problems = sorted(_validator(schema).iter_errors(plain), key=lambda each: each.json_path)
    except Unresolvable as error:
        raise ConfigurationError(f"output_schema refers to what is not in it: {error}") from error
    if problems:
        lines = [f"{each.json_path}: {each.message[:_SHOWN]}" for each in problems[:_NAMED]]
        more = f"\nand {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
        places = "\n".join(lines)
        raise ResultRefusedError(f"the result is not what output_schema asks for:\n{places}{more}")


def _validator(schema: dict[str, Json]) -> Any:
    """Return what checks against a schema; what that refers to is looked for in itself only."""
    from jsonschema import Draft202012Validator  # noqa: PLC0415 - slow to import
    from jsonschema.validators import validator_for  # noqa: PLC0415
    from referencing import Registry  # noqa: PLC0415

    kind = validator_for(schema, default=Draft202012Validator)
    return kind(schema, registry=Registry())


def written_result(path: Path) -> Json:
    """Return the result that a command has written."""
    try:
        data = read_whole(path, MAX_RESULT_BYTES)
    except FileNotFoundError:
        raise ResultRefusedError(
            "the command has written no result: the task has an output_schema, so JSON is expected in the"
            " file that MAESTRO_RESULT names"
        ) from None
    except (DocumentCorruptError, OSError) as error:
        raise ResultRefusedError(f"the result cannot be read: {error}") from error
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ResultRefusedError(f"the result is no JSON: {error}") from error


def result_in(text: str) -> Json:
    """Return the result in what an agent says: its whole text, or the last block of code in it."""
    for each in (text, *reversed(_FENCED.findall(text))):
        try:
            found = json.loads(each)
        except (ValueError, RecursionError):
            continue
        if found is not None:
            return found
    raise ResultRefusedError(
        "the answer is no JSON: the task has an output_schema, so the answer must be the result and"
        " nothing else"
    )
