"""The results of tasks that declare a JSON Schema for them: ``output_schema``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from maestro_hive.kernel.errors import ConfigurationError, DocumentCorruptError
from maestro_hive.kernel.files import read_whole
from maestro_hive.team.errors import ResultRefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jsonschema import SchemaError, ValidationError

    from maestro_hive.maestro.state.strict_json import Json

#: A larger result that a command writes is refused.
MAX_RESULT_BYTES = 1024 * 1024
#: How many places an error names, and how much of each message.
_NAMED, _SHOWN = 10, 300
#: What has regular expressions in a schema.
_PATTERNS = frozenset({"pattern", "patternProperties"})
#: For how many seconds a result may be checked against them, and the program that does. It ends by
#: itself if its parent was killed meanwhile. It gets the folder of this package, which may be in none
#: of its own: modules of the current folder are not for it.
_CHECKING_SECONDS = 10.0
_CHECKING = f"""
import json, resource, sys
sys.path.append(sys.argv[1])
resource.setrlimit(resource.RLIMIT_CPU, ({_CHECKING_SECONDS * 2:.0f}, {_CHECKING_SECONDS * 2:.0f}))
from maestro_hive.team.results import wrong_places
print(json.dumps(wrong_places(*json.load(sys.stdin))))
"""
_PACKAGES = str(Path(__file__).resolve().parents[2])
_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


def check_schema(schema: dict[str, Json]) -> None:
    """Raise ``ConfigurationError`` unless a schema is one, and all that it refers to is in itself."""
    wrong = schema_problem(schema)
    if wrong is not None:
        at = "".join(f"[{each!r}]" for each in wrong.at)
        raise ConfigurationError(f"output_schema{at} is no JSON Schema: {wrong.message}")
    _check_references(schema, str(_validator(schema).META_SCHEMA.get("$schema")))
    try:
        wrong_places(None, schema)
    except RecursionError:
        raise ConfigurationError(
            "output_schema refers to itself and to nothing else, so no value can be checked by it"
        ) from None


class SchemaProblem(NamedTuple):
    """Why a schema is none, and where in it."""

    at: tuple[str | int, ...]
    message: str


def schema_problem(schema: dict[str, Json]) -> SchemaProblem | None:
    """Return why a schema is none; None if it is one."""
    from jsonschema import SchemaError

    try:
        _validator(schema).check_schema(schema)
    except SchemaError as error:
        # Of several rules that it fits none of, the one that it got furthest with says most.
        rules: Sequence[ValidationError | SchemaError] = error.context or [error]
        said = max(rules, key=lambda each: len(each.absolute_path))
        return SchemaProblem(tuple(said.absolute_path), said.message[:_SHOWN])
    return None


def _check_references(schema: dict[str, Json], dialect: str) -> None:
    """Raise ``ConfigurationError`` for a reference that leads out of a schema, or to nothing in it."""
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import specification_with

    kind = specification_with(dialect)
    root = kind.create_resource(schema)
    left = [(root, Registry().resolver_with_root(root))]
    seen: set[int] = set()
    while left:
        part, resolver = left.pop()
        if id(part.contents) in seen:
            continue
        seen.add(id(part.contents))
        left += [(each, resolver.in_subresource(each)) for each in part.subresources()]
        for reference in _references(part.contents):
            try:
                found = resolver.lookup(reference)
            except (Unresolvable, ValueError, TypeError):
                raise ConfigurationError(
                    f"output_schema refers to what is not in it: {reference[:_SHOWN]!r}; nothing is"
                    " fetched, so add it under $defs, and refer to it by '#/$defs/NAME'"
                ) from None
            left.append((kind.create_resource(found.contents), found.resolver))


def _references(part: Json) -> list[str]:
    keys = ("$ref", "$dynamicRef") if isinstance(part, dict) else ()
    return [part[key] for key in keys if isinstance(part.get(key), str)]


def check_result(value: Json, schema: dict[str, Json]) -> None:
    """Raise ``ResultRefusedError`` with all places in which a result is not as its schema says."""
    try:
        plain = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ResultRefusedError(f"the result is no JSON value: {error}") from error
    wrong = (_wrong_places_apart if _has_patterns(schema) else wrong_places)(plain, schema)
    if wrong:
        more = f"\nand {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        places = "\n".join(wrong[:_NAMED])
        raise ResultRefusedError(f"the result is not what output_schema asks for:\n{places}{more}")


def wrong_places(plain: Json, schema: dict[str, Json]) -> list[str]:
    """Return the places in which a value is not as its schema says, each with what is wrong."""
    from referencing.exceptions import Unresolvable

    try:
        problems = sorted(_validator(schema).iter_errors(plain), key=lambda each: each.json_path)
    except Unresolvable as error:
        raise ConfigurationError(f"output_schema refers to what is not in it: {error}") from error
    return [f"{each.json_path}: {each.message[:_SHOWN]}" for each in problems]


def _has_patterns(schema: Json) -> bool:
    """Return whether something in a schema can be a regular expression."""
    left = [schema]
    while left:
        each = left.pop()
        if isinstance(each, dict):
            if not _PATTERNS.isdisjoint(each):
                return True
            left += each.values()
        elif isinstance(each, list):
            left += each
    return False


def _wrong_places_apart(plain: Json, schema: dict[str, Json]) -> list[str]:
    """Do so in a process of its own: a regular expression can take for ever, and let no thread go on."""
    try:
        ended = subprocess.run(  # noqa: S603 - no text of others is in it
            [sys.executable, "-P", "-c", _CHECKING, _PACKAGES],
            input=json.dumps([plain, schema]),
            capture_output=True,
            text=True,
            timeout=_CHECKING_SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise ResultRefusedError(
            f"the result could not be checked in {_CHECKING_SECONDS:g} seconds: a pattern of its"
            " output_schema takes too long for it"
        ) from None
    except OSError as error:
        raise ResultRefusedError(f"the result could not be checked: {error}") from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip()[-_SHOWN:] or "it printed nothing"
        raise ResultRefusedError(
            f"the result could not be checked: the program that does ended with {error.returncode}:"
            f"\n{said}"
        ) from error
    found: list[str] = json.loads(ended.stdout)
    return found


def _validator(schema: dict[str, Json]) -> Any:
    """Return what checks against a schema; what that refers to is looked for in itself only."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for
    from referencing import Registry

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
