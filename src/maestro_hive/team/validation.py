"""The bundled JSON Schemas, and checking data against them.

``jsonschema`` is imported when something is first checked, not before: it takes longer to import
than all of this package. It judges; what is written here makes it quick enough to be asked on
every save. It makes a new validator for each member of each object, where one for each part of
the schema is enough, and that is most of its time.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maestro_hive.kernel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from jsonschema import ValidationError
    from jsonschema.protocols import Validator

_FOLDER = Path(__file__).with_name("schemas")
_SUFFIX = ".schema.json"
_NAMES = ("checkpoint", "state", "task")

#: How much of a value an error message shows.
_SHOWN = 300

_RFC_3339 = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt](?:[01][0-9]|2[0-3]):[0-9]{2}:[0-9]{2}(?:\.[0-9]+)?"
    r"(?:[Zz]|[+-][0-9]{2}:[0-9]{2})?"
)


def load_schema(name: str) -> dict[str, Any]:
    """Return a bundled schema by name: ``"state.schema.json"`` or, for short, ``"state"``."""
    for known in _NAMES:
        if name in (known, known + _SUFFIX):
            text = (_FOLDER / (known + _SUFFIX)).read_text(encoding="utf-8")
            schema: dict[str, Any] = json.loads(text)
            return schema
    bundled = ", ".join(known + _SUFFIX for known in _NAMES)
    raise ConfigurationError(f"there is no schema {name!r:.80}; the bundled ones are {bundled}")


def check(data: Any, kind: str, source: str = "") -> None:
    """Return if ``data`` is a valid state, task, worker or checkpoint.

    Otherwise raise jsonschema's ``ValidationError``: its message names the ``source``, the JSON
    path and the rule that was broken.
    """
    from jsonschema import ValidationError  # noqa: PLC0415 - slow to import

    try:
        error = next(iter(_validator(kind).iter_errors(data)), None)
    except (RecursionError, ValueError) as cause:  # while jsonschema shows what it refuses
        error = ValidationError(f"cannot be checked: {cause}", validator="type")
    if error is not None:
        where = _short(_where(error.absolute_path))
        message = f"{where}: {_short(error.message)} (rule: {error.validator})"
        # Without its schema, so that str(error) is this message and not pages of pretty-print.
        raise ValidationError(
            f"{source}: {message}" if source else message,
            validator=error.validator,
            path=error.absolute_path,
            schema_path=error.absolute_schema_path,
            instance=error.instance,
        ) from None


def read_time(text: str) -> datetime:
    """Return the moment an RFC 3339 text names, in UTC, or raise ``ValueError``.

    A text without an offset, as older files have it, is taken as UTC.
    """
    if not _RFC_3339.fullmatch(text):
        raise ValueError(f"{text!r:.40} is not a date-time")
    when = datetime.fromisoformat(text.upper())
    try:
        return (when if when.tzinfo else when.replace(tzinfo=UTC)).astimezone(UTC)
    except OverflowError as error:
        raise ValueError(f"{text!r:.40} is before the year 1 or after 9999 in UTC") from error


def write_time(when: datetime) -> str:
    """Return the RFC 3339 text of a moment, in UTC; a time without a zone is taken as UTC."""
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).astimezone(UTC).isoformat()


# --- jsonschema, made quick --------------------------------------------------------------------


@cache
def _validator(kind: str) -> Validator:
    from jsonschema import Draft7Validator, FormatChecker  # noqa: PLC0415 - slow to import
    from jsonschema.validators import extend  # noqa: PLC0415

    keywords = _Keywords()
    syncs_fast = extend(  # type: ignore[no-untyped-call]
        Draft7Validator,
        {
            "properties": keywords.properties,
            "additionalProperties": keywords.additional,
            "items": keywords.items,
        },
    )
    formats = FormatChecker(formats=())
    formats.checks("date-time", raises=ValueError)(_is_time)
    validator: Validator = syncs_fast(_schema_of(kind), format_checker=formats)
    return validator


def _schema_of(kind: str) -> dict[str, Any]:
    schema = load_schema("state" if kind == "worker" else kind)
    inlined: dict[str, Any] = _inlined(schema, schema.get("definitions", {}))
    if kind == "worker":  # the one kind that has no file of its own
        inlined = inlined["definitions"]["worker"]
    return inlined


def _is_time(value: object) -> bool:
    return not isinstance(value, str) or bool(read_time(value))


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    """Put each definition where it is referred to: following a reference has its price too."""
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inlined(definitions[node["$ref"].rpartition("/")[2]], definitions)
    return {key: _inlined(value, definitions) for key, value in node.items()}


class _Keywords:
    """The keywords that lead into a value; each part of a schema is given one validator.

    Unlike the originals they take the members of an object in order, so the first error is the
    same one every time.
    """

    def __init__(self) -> None:
        self._made: dict[int, Validator] = {}

    def properties(
        self, validator: Validator, schemas: dict[str, Any], value: Any, _schema: object
    ) -> Iterator[ValidationError]:
        if isinstance(value, dict):
            for name, schema in schemas.items():
                if name in value:
                    for error in self._descend(validator, schema, value[name], name):
                        error.schema_path.appendleft(name)
                        yield error

    def additional(
        self, validator: Validator, schema: dict[str, Any], value: Any, _schema: object
    ) -> Iterator[ValidationError]:
        if isinstance(value, dict):
            for name, member in value.items():
                yield from self._descend(validator, schema, member, name)

    def items(
        self, validator: Validator, schema: dict[str, Any], value: Any, _schema: object
    ) -> Iterator[ValidationError]:
        if isinstance(value, list):
            for index, item in enumerate(value):
                yield from self._descend(validator, schema, item, index)

    def _descend(
        self, validator: Validator, schema: dict[str, Any], value: Any, at: str | int
    ) -> Iterator[ValidationError]:
        known = self._made.get(id(schema))
        if known is None:
            known = self._made[id(schema)] = validator.evolve(schema=schema)
        for error in known.iter_errors(value):
            error.path.appendleft(at)
            yield error


def _where(path: Iterable[object]) -> str:
    return "$" + "".join(
        f".{at}" if isinstance(at, str) and at.isidentifier() else f"[{at!r}]" for at in path
    )


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} … {text[-_SHOWN // 2 :]}"
