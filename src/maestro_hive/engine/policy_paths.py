"""Which paths a call names, where they lead, and the patterns of a policy that match them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from maestro_hive.engine.parameters import completed

if TYPE_CHECKING:
    from pathlib import Path

#: The last words of names of arguments that name paths.
_PATH_WORDS = frozenset(
    "path paths file files filepath filepaths filename filenames target targets dest destination"
    " destinations source sources src dst folder folders directory directories dir dirs cwd workdir"
    " root".split()
)
#: What separates the words of a name: ``file_path``, ``filePath``, ``file-path``.
_BETWEEN_WORDS = re.compile(r"[^A-Za-z]+|(?<=[a-z])(?=[A-Z])")


def names_path(name: object) -> bool:
    """Return whether an argument, or a key of a dictionary, is called as paths are."""
    if not isinstance(name, str):
        return False
    words = [word for word in _BETWEEN_WORDS.split(name) if word]
    return bool(words) and words[-1].lower() in _PATH_WORDS


# --- the targets of a call ------------------------------------------------------------------------


def arguments_of(
    task: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return all arguments of a call by name: also ignored ones, defaults, and those of a partial.

    Where a callable does not say how its arguments are called, they count as paths.
    """
    given = completed(task, args, kwargs)
    if given is not None:
        task, args, kwargs = given.task or task, given.args, given.kwargs
    while isinstance(task, functools.partial):
        args, kwargs = (*task.args, *args), {**task.keywords, **kwargs}
        task = task.func
    try:
        signature = inspect.signature(task)
    except (TypeError, ValueError):
        return {"paths": args, **kwargs}
    try:
        bound = signature.bind_partial(*args, **kwargs)
    except TypeError:  # the call fails by itself
        return kwargs
    bound.apply_defaults()
    return {**bound.arguments, **kwargs}


def targets_of(arguments: Mapping[str, Any]) -> list[str]:
    """Return every path that arguments name, each once, in their order.

    These are texts in arguments, keys and fields that are called as paths are, however deep, and
    path objects anywhere.
    """
    found: dict[str, None] = {}
    seen: set[int] = set()
    # With the last one first, so that what is found next stands in its place.
    waiting: list[tuple[Any, bool]] = [*reversed([*_items(arguments, is_path=False)])]
    while waiting:
        value, is_path = waiting.pop()
        text = _path_text(value, is_path=is_path)
        if text is not None:
            if text:
                found[text] = None
        elif id(value) not in seen:
            seen.add(id(value))
            waiting += reversed([*_parts(value, is_path=is_path)])
    return [*found]


def _path_text(value: object, *, is_path: bool) -> str | None:
    """Return a path as text; None for what is none, and may have some inside."""
    if isinstance(value, str | bytes):
        return os.fsdecode(value) if is_path else ""
    if isinstance(value, os.PathLike):
        return os.fsdecode(os.fspath(value))
    return None


def _parts(value: object, *, is_path: bool) -> Iterator[tuple[Any, bool]]:
    """Yield what is in a value, and whether it is called as paths are."""
    if isinstance(value, Mapping):
        yield from _items(value, is_path=is_path)
    elif isinstance(value, list | tuple | AbstractSet):
        fields = getattr(value, "_fields", None)  # of a named tuple
        if isinstance(value, tuple) and fields is not None:
            yield from _items(dict(zip(fields, value, strict=True)), is_path=False)
        else:
            yield from ((each, is_path) for each in value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields_of = {
            each.name: getattr(value, each.name, None) for each in dataclasses.fields(value)
        }
        yield from _items(fields_of, is_path=False)
    elif hasattr(type(value), "model_fields"):  # of pydantic
        yield from _items(vars(value), is_path=False)


def _items(value: Mapping[Any, Any], *, is_path: bool) -> Iterator[tuple[Any, bool]]:
    for key, each in value.items():
        if is_path or isinstance(key, os.PathLike):
            yield key, True  # as in files={"a.py": "…"}
        yield each, is_path or names_path(key)


# --- where they lead ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """Where a path leads: by its name alone, and after links were followed; absolute, without ``..``."""

    named: str
    resolved: str


def place_of(target: str, workspace: Path) -> Place:
    """Return where a path leads that is named relative to a folder, or absolutely."""
    root = os.path.realpath(workspace)
    given = _expanded(target)
    unresolved = os.path.abspath(workspace)  # noqa: PTH100 - without following links
    if os.path.isabs(given) and unresolved != root:  # noqa: PTH117
        relative = os.path.relpath(os.path.normpath(given), unresolved)
        if relative != ".." and not relative.startswith("../"):
            named = os.path.normpath(os.path.join(root, relative))  # noqa: PTH118
            return Place(named, _resolved(given, named))
    joined = os.path.join(root, given)  # noqa: PTH118 - a target is no path of ours
    named = os.path.normpath(joined)
    return Place(_one_slash(named), _resolved(joined, named))


def _resolved(path: str, named: str) -> str:
    try:
        return _one_slash(os.path.realpath(path))
    except (OSError, ValueError):  # it has a zero byte, or a link that cannot be read
        return _one_slash(named)


def _one_slash(path: str) -> str:
    return "/" + path.lstrip("/")  # POSIX lets two slashes stand


def _expanded(target: str) -> str:
    """Return what many tools make of a path before they use it."""
    if target.lower().startswith("file:"):
        parts = urlsplit(target)
        return unquote(parts.path) or target
    return os.path.expanduser(target) if target.startswith("~") else target  # noqa: PTH111


def places_asked(target: str, workspace: Path) -> list[str]:
    """Return what an enforcer is asked about: a path as it is named, and where it leads if elsewhere.

    That is relative to the workspace, too, if the name is and it leads to somewhere inside.
    """
    place, root = place_of(target, workspace), os.path.realpath(workspace)
    plain = target if os.path.isabs(target) else os.path.join(root, target)  # noqa: PTH117, PTH118
    if place.resolved == plain.rstrip("/") or place.resolved == _without_dots(plain):
        return [target]
    if not os.path.isabs(target) and is_inside(place.resolved, root):  # noqa: PTH117
        return [target, os.path.relpath(place.resolved, root)]
    return [target, place.resolved]


def _without_dots(path: str) -> str:
    """Return a path without ``./``, which leads nowhere else."""
    return "/" + "/".join(part for part in path.split("/") if part not in {"", "."})


def is_inside(path: str, folder: str) -> bool:
    """Return whether an absolute path is a folder, or below it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


# --- patterns -------------------------------------------------------------------------------------


class PathPattern:
    """A pattern of a policy: ``*`` and ``?`` within a name, ``**`` for any number of folders.

    One with a slash is relative to the workspace, unless it starts with ``/`` or ``~``; one without
    is a name in any folder. What forbids ignores case, and covers all that is below; what allows
    does neither, and reaches outside of the workspace only if it is absolute.
    """

    def __init__(self, text: str, workspace: Path) -> None:
        self.text = text
        self._root = os.path.realpath(workspace)
        pattern = os.path.expanduser(unicodedata.normalize("NFC", text))  # noqa: PTH111
        if pattern.endswith("/"):
            pattern += "**"
        self._is_absolute = pattern.startswith("/")
        self._is_name = "/" not in pattern
        if self._is_name:
            parts = ["**", pattern]
        else:
            parts = [part for part in pattern.split("/") if part not in {"", "."}]
        #: The folder, or file, that all of it is below.
        self._fixed = "" if self._is_absolute else self._root.rstrip("/")
        if not self._is_name:
            for part in parts:
                if _WILD.search(part):
                    break
                self._fixed += f"/{part}"
        start = "" if self._is_absolute else re.escape(_normal(self._root.rstrip("/")))
        whole = start + "".join(map(_part, parts))
        anywhere = "".join(map(_part, parts)) if self._is_name else whole
        self._allows = re.compile(whole)
        self._forbids = re.compile(anywhere + "(?:/.*)?", re.IGNORECASE | re.DOTALL)

    def forbids(self, place: Place, action: str) -> bool:
        """Return whether a path, or where it leads, is covered; or is deleted with a folder."""
        either = (place.named, place.resolved)
        if any(self._forbids.fullmatch(_normal(each)) for each in either):
            return True
        fixed = _normal(self._fixed).casefold()
        return (
            action == "delete"
            and not self._is_name
            and any(is_inside(fixed, _normal(each).casefold() or "/") for each in either)
        )

    def allows(self, place: Place) -> bool:
        """Return whether a path and where it leads both match."""
        both = (place.named, place.resolved)
        return all(self._allows.fullmatch(_normal(each)) for each in both)

    def __repr__(self) -> str:
        return repr(self.text)


def _normal(path: str) -> str:
    """Return a path as patterns see it: in one form of Unicode, the root empty."""
    return unicodedata.normalize("NFC", path).rstrip("/")


_WILD = re.compile(r"[*?\[]")


def _part(part: str) -> str:
    return "(?:/[^/]+)*" if part == "**" else "/" + _name(part)


def _name(part: str) -> str:
    """Return the regular expression of one name with wildcards."""
    made, at = "", 0
    while at < len(part):
        char, at = part[at], at + 1
        if char == "*":
            made += "[^/]*"
        elif char == "?":
            made += "[^/]"
        elif char == "[" and (end := part.find("]", at + 1)) > 0:
            inside, at = part[at:end].replace("\\", r"\\"), end + 1
            made += f"[^/{inside[1:]}]" if inside[0] in "!^" else f"[{inside}]"
        else:
            made += re.escape(char)
    return made


def matches_any(name: str, patterns: Iterable[str], *, ignore_case: bool) -> str | None:
    """Return the first pattern that matches a name, as of a tool or a role."""
    flags = re.IGNORECASE if ignore_case else 0
    for pattern in patterns:
        if re.fullmatch(_name(pattern).replace("[^/]", "."), name, flags | re.DOTALL):
            return pattern
    return None
