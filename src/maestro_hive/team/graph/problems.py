"""Problems, collected on the way through a document, all of them at once."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

from maestro_hive.team.graph.documents import json_path
from maestro_hive.team.graph.records import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable

    from maestro_hive.team.graph.documents import Document, Path

#: How many errors, and how many warnings, are reported; the rest is counted.
MOST = 1000
#: How much of a value a message shows.
_SHOWN = 60

_KINDS: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    type(None): "null",
}


def kind_of(value: object) -> str:
    """Return what a value of a document is, in words."""
    return _KINDS.get(type(value), type(value).__name__)


def quoted(text: object) -> str:
    """Return a text of the document for a message: in quotes, in one line, and not all of a long one."""
    shown = text if isinstance(text, str) else str(text)
    return repr(shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…")


def folded(name: str) -> str:
    """Return what of a name is compared: ``dependsOn`` and ``depends_on`` are the same."""
    return "".join(filter(str.isalnum, name.casefold()))


def closest(name: str, known: Iterable[str], *, similar: float = 0.6) -> str | None:
    """Return the one of some names that seems to be meant by another one; None if none is like it."""
    names: dict[str, str] = {}
    for each in known:
        names.setdefault(folded(each), each)
    near = get_close_matches(folded(name[:_SHOWN]), names, n=1, cutoff=similar)
    return names[near[0]] if near else None


def advised(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return what to do about an unknown name: write the one that is meant, or something else."""
    near = closest(name, known)
    return otherwise if near is None else f"did you mean {near!r}? If not, {otherwise}"


class Problems:
    """The errors and warnings of a document, in the order in which they were found."""

    def __init__(self, document: Document | None = None) -> None:
        self._document = document
        self.errors: list[Problem] = []
        self.warnings: list[Problem] = []
        self.more_errors = 0
        self.more_warnings = 0
        #: The task that is read; it is named in what is found.
        self.task: str | None = None

    def error(
        self, code: str, at: Path, message: str, advice: str, task: str | None = None
    ) -> None:
        """Report something because of which the graph cannot be executed."""
        if len(self.errors) < MOST:
            self.errors.append(self._problem(code, at, message, advice, task))
        else:
            self.more_errors += 1

    def warning(
        self, code: str, at: Path, message: str, advice: str, task: str | None = None
    ) -> None:
        """Report something that may not be meant."""
        if len(self.warnings) < MOST:
            self.warnings.append(self._problem(code, at, message, advice, task))
        else:
            self.more_warnings += 1

    @property
    def is_full(self) -> bool:
        """Return whether further errors are only counted."""
        return len(self.errors) >= MOST

    def wrong_type(self, at: Path, value: object, wanted: str) -> None:
        """Report a value of another type."""
        if self.is_full:
            self.more_errors += 1
            return
        name = quoted(at[-1]) if at and isinstance(at[-1], str) else "the value"
        self.error(
            "wrong-type", at, f"{name} is {kind_of(value)} and not {wanted}", f"write {wanted}"
        )

    def _problem(self, code: str, at: Path, message: str, advice: str, task: str | None) -> Problem:
        return Problem(
            code=code,
            message=message,
            advice=advice,
            path=json_path(at),
            task=task or self.task,
            line=None if self._document is None else self._document.line(at),
        )
