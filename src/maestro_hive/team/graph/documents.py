"""From bytes to a document: JSON or TOML, read strictly, with limits, and the lines of its parts."""

from __future__ import annotations

import json
import math
import re
import tomllib
from dataclasses import dataclass, field
from datetime import date, datetime, time
from typing import TYPE_CHECKING, Literal

from maestro_hive.maestro.state import strict_json
from maestro_hive.maestro.state.strict_json import AtPathError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maestro_hive.maestro.state.strict_json import Json

Form = Literal["json", "toml"]
Path = tuple[str | int, ...]

#: A larger document than this is refused.
MAX_BYTES = 10_000_000
#: A larger one in TOML, which is for people who write by hand and reads fifty times slower.
MAX_TOML_BYTES = 1_000_000
#: Deeper nesting than this is refused.
MAX_DEPTH = 50
#: Of how many parts of a document the line is looked for.
MOST_LINES = 200

#: The TOML parser's time grows with the square of the parts of one name.
_LONG_TOML_NAME = re.compile(
    r"""(?<![\w-])(?:(?:[\w-]+|"[^"\n]{0,200}"|'[^'\n]{0,200}')[ \t]*\.[ \t]*){50}"""
)
#: What matters of JSON that was parsed; the colon after a text says that it is a key.
_JSON_TOKEN = re.compile(
    r"""[{}\[\]]|(?P<text>"[^"\\]*(?:\\.[^"\\]*)*")(?P<colon>\s*:)?|-?Infinity|NaN|-?[0-9][0-9.eE+-]*"""
)
_TOML_PLACE = re.compile(r"\(at (?:line (\d+), column \d+|end of document)\)")


class UnreadableError(Exception):
    """The bytes are no document: the reason, what to do, and the line if it is known."""

    def __init__(self, reason: str, advice: str, line: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.advice = advice
        self.line = line


@dataclass(slots=True)
class Document:
    """The values of a document, and its text to find their lines in."""

    tree: Json
    text: str
    form: Form
    #: The file that it was read from, as it was given.
    file: str | None = None
    _positions: dict[int, dict[str | int, int]] = field(default_factory=dict)
    _counted: tuple[int, int] = (0, 1)
    _toml: _TomlLines | None = None
    _lines_left: int = MOST_LINES

    def line(self, path: Path) -> int | None:
        """Return the line of a part, or of what encloses it if it is missing; None for a lot of parts."""
        if self._lines_left == 0:
            return None
        self._lines_left -= 1
        if self.form == "json":
            return self._json_line(path)
        if self._toml is None:
            self._toml = _TomlLines(self.text)
        return self._toml.line(path)

    def _json_line(self, path: Path) -> int:
        at = _after_space(self.text, 0)
        for part in path:
            if at not in self._positions:
                self._positions[at] = _members(self.text, at)
            if part not in self._positions[at]:
                break
            at = self._positions[at][part]
        counted, line = self._counted
        if at < counted:
            counted, line = 0, 1
        line += self.text.count("\n", counted, at)
        self._counted = at, line
        return line


def parse_document(data: bytes, form: Form | None = None) -> Document:
    """Return the document of some bytes; raise UnreadableError if they are none.

    Without a form it is JSON if it starts with a brace, and TOML otherwise.
    """
    if len(data) > MAX_BYTES:
        raise _too_large(len(data), MAX_BYTES)
    try:
        text = str(data, "utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UnreadableError("it is not UTF-8", "save it as UTF-8", line) from None
    if form is None:
        form = "json" if text.lstrip()[:1] in ("{", "[", "") else "toml"
    tree = _parsed_json(text) if form == "json" else _parsed_toml(text, len(data))
    return Document(tree, text, form)


def _too_large(size: int, limit: int) -> UnreadableError:
    return UnreadableError(
        f"it has {size:,} bytes, and the limit is {limit:,}",
        "split it into several graphs, or move long texts into files that the tasks read",
    )


def _parsed_json(text: str) -> Json:
    try:
        return strict_json.parse_text(text, MAX_DEPTH)
    except (AtPathError, RecursionError) as error:
        raise _refused(error, _refused_line(text)) from None
    except json.JSONDecodeError as error:
        raise UnreadableError(f"it is not JSON: {error.msg}", "correct it", error.lineno) from None
    except ValueError as error:  # a number of thousands of digits, or half of a surrogate pair
        raise UnreadableError(f"it is not JSON: {error!s:.200}", "correct it") from None


def _refused(error: AtPathError | RecursionError, line: int | None = None) -> UnreadableError:
    reason = error.reason if isinstance(error, AtPathError) else f"nested deeper than {MAX_DEPTH}"
    return UnreadableError(f"it is refused: {reason}", "correct it", line)


def _refused_line(text: str) -> int | None:
    """Return the line of the first thing that only this project refuses in JSON; the parser tells none."""
    keys: list[set[str]] = []  # of the objects around it; those of a list stay empty
    for found in _JSON_TOKEN.finditer(text):
        token = found[0]
        match token[0]:
            case "{" | "[":
                keys.append(set())
                is_refused = len(keys) > MAX_DEPTH
            case "}" | "]":
                keys.pop()
                is_refused = False
            case '"' if found["colon"] is not None:
                key = json.loads(found["text"])
                is_refused = key in keys[-1]
                keys[-1].add(key)
            case '"':
                is_refused = False
            case _:
                is_whole = token.lstrip("-").isdigit()  # it may have any size
                is_refused = not is_whole and not math.isfinite(float(token))
        if is_refused:
            return text.count("\n", 0, found.start()) + 1
    return None


def _parsed_toml(text: str, size: int) -> Json:
    if size > MAX_TOML_BYTES:
        raise _too_large(size, MAX_TOML_BYTES)
    if found := _LONG_TOML_NAME.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise UnreadableError("a name has 50 parts or more", "use fewer", line)
    try:
        tree = tomllib.loads(text)
        strict_json.check(tree, MAX_DEPTH)
        return _as_json(tree)
    except (AtPathError, RecursionError) as error:
        raise _refused(error) from None
    except ValueError as error:
        place = _TOML_PLACE.search(str(error))
        reason = _TOML_PLACE.sub("", str(error)).strip()
        at = int(place[1]) if place and place[1] else None
        raise UnreadableError(f"it is not TOML: {reason:.200}", "correct it", at) from None


def _as_json(value: Json) -> Json:
    """Return a value of TOML as JSON has it: times are texts."""
    match value:
        case dict():
            return {key: _as_json(each) for key, each in value.items()}
        case list():
            return [_as_json(each) for each in value]
        case float() if not math.isfinite(value):
            raise AtPathError(f"{value} is not a number that JSON has")
        case datetime() | date() | time():
            return value.isoformat()
        case _:
            return value


# --- places ---------------------------------------------------------------------------------------


def json_path(path: Sequence[str | int]) -> str:
    """Return a path as it is written: ``$.tasks[3].title``."""
    return "$" + "".join(
        f"[{part}]" if isinstance(part, int) else strict_json.member(part) for part in path
    )


#: The places of more members are not looked for: their lines are that of what encloses them.
_MOST_MEMBERS = 50_000
_SPACE = re.compile(r"[ \t\n\r]*")


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()


def _members(text: str, at: int) -> dict[str | int, int]:
    """Return where the members of the object, or the items of the list, at a position start."""
    found: dict[str | int, int] = {}
    if text[at : at + 1] not in ("{", "["):
        return found
    is_object = text[at] == "{"
    at = _after_space(text, at + 1)
    while text[at] not in "}]" and len(found) < _MOST_MEMBERS:
        key: str | int = len(found)
        if is_object:
            key, at = json.decoder.scanstring(text, at + 1)  # type: ignore[attr-defined]
            at = _after_space(text, _after_space(text, at) + 1)
        found[key] = at
        at = _after_space(text, strict_json.scan_once(text, at)[1])
        if text[at] == ",":
            at = _after_space(text, at + 1)
    return found


class _TomlLines:
    """The lines of tasks and of their members, where tables are written in the usual way.

    The parser tells no places. Headers in the middle of a long text could be mistaken for ones.
    """

    def __init__(self, text: str) -> None:
        self._lines = text.split("\n")
        headers = enumerate(self._lines)
        self._headers = [number for number, line in headers if line.lstrip().startswith("[")]
        #: Where the tables of a list start, by its name, and where the last one ends.
        self._tables: dict[str | int, list[int]] = {}

    def line(self, path: Path) -> int | None:
        """Return the line of a part; None if it is not found."""
        if len(path) < 2:
            return self._line_of(0, len(self._lines), path[0]) if path else None
        bounds = self._bounds(path[0], path[1])
        if bounds is None:
            return None
        start, end = bounds
        member = self._line_of(start + 1, end, path[2]) if len(path) > 2 else None
        return member or start + 1

    def _bounds(self, table: str | int, key: str | int) -> tuple[int, int] | None:
        """Return where a table starts, by its position in a list or by its name, and where it ends."""
        name = re.escape(str(table))
        if isinstance(key, int):
            if table not in self._tables:
                starts = self._headers_like(rf"\s*\[\[\s*{name}\s*\]\]")
                self._tables[table] = [*starts, len(self._lines)]
            starts = self._tables[table]
            return (starts[key], starts[key + 1]) if key + 1 < len(starts) else None
        quoted = rf"""["']?{re.escape(key)}["']?"""
        starts = self._headers_like(rf"\s*\[+\s*{name}\s*\.\s*{quoted}\s*[\].]")
        return (starts[0], len(self._lines)) if starts else None

    def _headers_like(self, pattern: str) -> list[int]:
        wanted = re.compile(pattern)
        return [number for number in self._headers if wanted.match(self._lines[number])]

    def _line_of(self, start: int, end: int, key: str | int) -> int | None:
        name = str(key)
        wanted = re.compile(rf"""\s*\[*\s*(?:[\w.-]+\.)?["']?{re.escape(name)}["']?\s*[=\].]""")
        for number in range(start, end):
            line = self._lines[number]
            if name in line and wanted.match(line):
                return number + 1
        return None
