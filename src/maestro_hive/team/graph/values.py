"""Values of a document: each is of the right type and in its range, or reported."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, NamedTuple

from maestro_hive.team.graph.problems import advised, closest, folded, kind_of, quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from maestro_hive.maestro.state.strict_json import Json
    from maestro_hive.team.graph.documents import Path
    from maestro_hive.team.graph.problems import Problems

#: Ids are file names, branch names and environment variables: nothing in them means anything there.
ID = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}", re.ASCII)
ID_ADVICE = "use up to 64 characters of A-Z, a-z, 0-9, '-' and '_', starting with A-Z or a-z"

#: More keys than these are not compared with known ones, in all parts of a document together.
_COMPARED = 500
#: How similar a key is to the known one that is meant: one with two characters swapped is.
_SIMILAR = 0.8
_LONGEST_SECONDS = 1e8
_LONGEST_PATH = 4096
_TEXT = frozenset({str})


class Keys(NamedTuple):
    """The keys that a part of a document may have; all others are the document's own business."""

    known: frozenset[str]
    #: What to do about keys that would be ignored although they mean something, folded.
    advice: dict[str, str]
    #: Which of these are so clear that keys like them are meant as well.
    like: frozenset[str]


def keys(known: str, elsewhere: Mapping[str, str] | None = None, **other_names: str) -> Keys:
    """Return the keys of a part; ``elsewhere`` says where keys belong that stand there by mistake."""
    names = known.split()
    advice = {folded(name): _instead(name) for name in names}
    advice |= {folded(name): text for name, text in (elsewhere or {}).items()}
    like = frozenset(advice)
    advice |= {folded(name): _instead(meant) for name, meant in other_names.items()}
    return Keys(frozenset(names), advice, like)


def _instead(name: str) -> str:
    return f"did you mean {name!r}?"


class Values:
    """Reads values out of a document; one that is missing or wrong is None, or empty."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        #: What to do about a key of a part, if that is known.
        self._advice: dict[tuple[frozenset[str], str], str | None] = {}

    def judge_keys(self, value: dict[str, Json], at: Path, part: Keys) -> None:
        """Warn of keys that look like mistyped or misplaced ones, in the order of the document."""
        if value.keys() <= part.known:
            return
        there = {_instead(key) for key in value}
        for key in value:
            advice = None if key in part.known else self._advice_on(key, part)
            if advice is not None and advice not in there:
                self._problems.warning(
                    "unknown-key", (*at, key), f"{quoted(key)} is not read", advice
                )

    def _advice_on(self, key: str, part: Keys) -> str | None:
        asked = (part.known, key)
        if asked not in self._advice and len(self._advice) < _COMPARED:
            near = folded(key)
            if near not in part.advice:
                near = closest(key, sorted(part.like), similar=_SIMILAR) or near
            self._advice[asked] = part.advice.get(near)
        return self._advice.get(asked)

    def text(self, owner: dict[str, Json], key: str, at: Path) -> str | None:
        """Return a text; None if there is none."""
        value = owner.get(key)
        if value is None or type(value) is str:
            return value
        self._problems.wrong_type((*at, key), value, "a text")
        return None

    def note(self, owner: dict[str, Json], key: str, at: Path) -> str | None:
        """Return a text that only personas read; another value is no error."""
        value = owner.get(key)
        if value is None or type(value) is str:
            return value
        self._ignored(at, key, value, "a text")
        return None

    def notes(self, owner: dict[str, Json], key: str, at: Path) -> tuple[str, ...]:
        """Return texts that only personas read; another value is no error."""
        value = owner.get(key)
        if value is None:
            return ()
        if type(value) is list and all(type(each) is str for each in value):
            return tuple(value)
        self._ignored(at, key, value, "a list of texts")
        return ()

    def _ignored(self, at: Path, key: str, value: Json, wanted: str) -> None:
        self._problems.warning(
            "ignored",
            (*at, key),
            f"{quoted(key)} is {kind_of(value)} and not {wanted}: it is stored, and not used",
            f"write {wanted}",
        )

    def texts(
        self, owner: dict[str, Json], key: str, at: Path, *, paths: bool = False
    ) -> tuple[str, ...]:
        """Return a list of texts."""
        value = owner.get(key)
        if value is None:
            return ()
        return self.text_items(value, (*at, key), paths=paths)

    def text_items(self, value: Json, at: Path, *, paths: bool = False) -> tuple[str, ...]:
        """Return the texts of a list."""
        if type(value) is not list:
            self._problems.wrong_type(at, value, "a list of texts")
            return ()
        if not paths and _TEXT.issuperset(map(type, value)):
            return tuple(value)
        found = []
        for number, each in enumerate(value):
            if type(each) is not str:
                self._problems.wrong_type((*at, number), each, "a text")
            elif not paths or self._is_path(each, (*at, number)):
                found.append(each)
        return tuple(found)

    def _is_path(self, text: str, at: Path) -> bool:
        if text.strip() and "\0" not in text and len(text) <= _LONGEST_PATH:
            return True
        self._problems.error(
            "bad-path",
            at,
            f"{quoted(text)} is no path",
            f"write a path of 1 to {_LONGEST_PATH} characters",
        )
        return False

    def number(
        self,
        owner: dict[str, Json],
        key: str,
        at: Path,
        *,
        most: float,
        above: float = -1.0,
        least: float = 0.0,
    ) -> float | None:
        """Return a number in its range."""
        value = owner.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._problems.wrong_type((*at, key), value, "a number")
            return None
        if not (above < value <= most and value >= least and math.isfinite(value)):
            lowest = f"{least:.6f}" if least else "0"
            bound = "more than 0" if above >= 0 else f"{lowest} or more"
            self._out_of_range((*at, key), f"a number, {bound}, up to {most:,.0f}")
            return None
        return value

    def whole(
        self, owner: dict[str, Json], key: str, at: Path, *, least: int, most: int
    ) -> int | None:
        """Return a whole number in its range."""
        value = owner.get(key)
        if value is None:
            return None
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int:
            self._problems.wrong_type((*at, key), value, "a whole number")
            return None
        if not least <= value <= most:
            self._out_of_range((*at, key), f"a whole number from {least} to {most:,}")
            return None
        return value

    def _out_of_range(self, at: Path, wanted: str) -> None:
        name = quoted(at[-1])
        self._problems.error("out-of-range", at, f"{name} is out of range", f"write {wanted}")

    def flag(self, owner: dict[str, Json], key: str, at: Path, *, default: bool) -> bool:
        """Return true or false."""
        value = owner.get(key)
        if value is None or type(value) is bool:
            return default if value is None else value
        self._problems.wrong_type((*at, key), value, "true or false")
        return default

    def seconds(self, owner: dict[str, Json], at: Path) -> float | None:
        """Return a timeout."""
        return self.number(owner, "timeout_seconds", at, most=_LONGEST_SECONDS, above=0.0)

    def missing(self, at: Path, key: str, whose: str, what: str) -> None:
        """Report a member that must be there."""
        self._problems.error(
            f"missing-{key}", at, f"{whose} has no {key!r}", f"add {key!r}: {what}"
        )

    def command(self, value: Json, at: Path, whose: str) -> str | None:
        """Return a command for a shell; None if it cannot be executed."""
        if type(value) is not str:
            self._problems.wrong_type(at, value, "a command, as a text")
        elif not value.strip() or "\0" in value:
            self._problems.error(
                "not-executable",
                at,
                f"{whose} has a command that cannot be executed: {quoted(value)}",
                "write a command for the shell, such as 'pytest tests/test_cart.py'",
            )
        else:
            return value
        return None

    def only(self, value: dict[str, Json], at: Path, known: tuple[str, ...]) -> None:
        """Warn of other keys in a part that only this project reads."""
        for key in value:
            if key not in known:
                self._problems.warning(
                    "unknown-key",
                    (*at, key),
                    f"{quoted(key)} is not read",
                    advised(key, known, f"remove it; the keys here are {', '.join(known)}"),
                )
