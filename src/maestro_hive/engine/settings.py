"""Settings: values that are checked whenever they are set, and can be frozen."""

from __future__ import annotations

import copy
import logging
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import FrozenInstanceError, dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias, TypeVar

from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.kernel.redaction import know_secret

if TYPE_CHECKING:
    from maestro_hive.maestro.state.codec import Json

PartT = TypeVar("PartT")
ChoiceT = TypeVar("ChoiceT", bound=StrEnum)

#: Takes the name of a setting, for its error message, and a value; returns the value to store.
Check: TypeAlias = Callable[[str, object], PartT]

_ADDRESS = r"https?://([\w.\-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[^\s?#]*)?"
_LONGEST_SHOWN = 80


class FrozenConfigError(ConfigurationError, FrozenInstanceError):
    """A setting of a frozen copy cannot be changed."""


class Secret:
    """A text that only ``reveal()`` returns; ``repr`` and ``str`` do not show it.

    It is replaced in all that leaves the process.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text
        know_secret(text)

    def reveal(self) -> str:
        """Return the text itself."""
        return self._text

    def __repr__(self) -> str:
        return "***"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other.reveal() == self._text

    def __hash__(self) -> int:
        return hash(self._text)


@dataclass
class Settings:
    """Settings that are checked whenever they are set, and that can be frozen."""

    _is_frozen: ClassVar[bool] = False

    if not TYPE_CHECKING:  # a type checker must still find a misspelt setting

        def __setattr__(self, name: str, value: object) -> None:
            self._set(name, value)

        def __delattr__(self, name: str) -> None:
            raise ConfigurationError(f"{self._label(name)} is a setting and cannot be deleted")

    def _set(self, name: str, value: object) -> None:
        known = {each.name: each.metadata.get("check") for each in fields(self)}
        if name not in known:
            raise ConfigurationError(
                f"{self._label(name)} is not a setting; the settings are {', '.join(known)}"
            )
        if self._is_frozen:
            raise FrozenConfigError(
                f"{self._label(name)} belongs to the frozen copy that an executor makes of its"
                " configuration; change that configuration before the executor is made"
            )
        check = known[name]
        self.__dict__[name] = check(self._label(name), value) if check else value

    def _label(self, name: str) -> str:
        return f"{type(self).__name__}.{name}"

    def frozen(self) -> Self:
        """Return a deep copy that cannot be changed."""
        return self if self._is_frozen else _freeze(copy.deepcopy(self))

    def to_dict(self) -> dict[str, Json]:
        """Return the settings as plain JSON, without secrets."""
        return {each.name: _shown(getattr(self, each.name)) for each in fields(self)}


SettingsT = TypeVar("SettingsT", bound=Settings)


def _freeze(settings: SettingsT) -> SettingsT:
    for part in vars(settings).values():
        if isinstance(part, Settings):
            _freeze(part)
    vars(settings)["_is_frozen"] = True
    return settings


def _shown(value: object) -> Json:
    match value:
        case Settings():
            return value.to_dict()
        case Secret():
            return repr(value)
        case str():
            return str(value)
        case tuple():
            return list(value)
        case _:
            return value


def setting(default: object, check: Check[object], variable: str | None = None) -> Any:
    """Declare a field of ``Settings``: its default or a factory, its check, its variable.

    The environment is read when the settings are made; an empty variable counts as unset.
    """

    def first_value() -> object:
        text = os.environ.get(variable, "").strip() if variable else ""
        if not text:
            return default() if callable(default) else default
        value: object = text
        if isinstance(default, int):
            with suppress(ValueError):  # the check below refuses what is not a number
                value = int(text)
        try:
            return check(f"the environment variable {variable}", value)
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}; unset it to use the default") from None

    return field(default_factory=first_value, metadata={"check": check})


# --- checks ----------------------------------------------------------------------------------


def refused(name: str, value: object, wanted: str) -> ConfigurationError:
    """Return the error for a value: what it is, and what it must be."""
    shown = repr(value)
    if len(shown) > _LONGEST_SHOWN:
        shown = shown[: _LONGEST_SHOWN - 3] + "..."
    return ConfigurationError(f"{name} is {shown}, and must be {wanted}")


def rule(
    kind: type[PartT], wanted: str, accepts: Callable[[PartT], object] = lambda _: True
) -> Check[PartT]:
    """Return a check that accepts values of ``kind`` for which ``accepts`` is true.

    A whole number is also a ``float``, and True is not a number.
    """
    kinds: tuple[type, ...] = (float, int) if kind is float else (kind,)

    def check(name: str, value: object) -> PartT:
        is_flag = isinstance(value, bool) and kind is not bool
        if is_flag or not isinstance(value, kinds) or not accepts(value):  # type: ignore[arg-type]
            raise refused(name, value, wanted)
        return value  # type: ignore[return-value]

    return check


def whole(least: int) -> Check[int]:
    """Accept whole numbers from ``least`` on."""
    return rule(int, f"a whole number, {least} or more", lambda value: value >= least)


_LARGEST = sys.float_info.max  # math.isfinite fails for long integers


def number(least: float) -> Check[float]:
    """Accept finite numbers from ``least`` on."""
    return rule(float, f"a finite number, {least:g} or more", lambda v: least <= v <= _LARGEST)


#: Finite numbers above 0.
positive = rule(float, "a finite number, more than 0", lambda value: 0 < value <= _LARGEST)
#: A part of a whole.
share = rule(float, "a share of all calls, more than 0 and up to 1", lambda value: 0 < value <= 1)
#: True and False alone.
flag = rule(bool, "True or False")
#: The key of a Jira project.
project_key = rule(
    str,
    "the key of a Jira project, like MD",
    lambda value: re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,254}", value),
)
#: An e-mail address.
email = rule(
    str, "an e-mail address, or None", lambda value: re.fullmatch(r"[^@\s]+@[^@\s]+", value)
)


def optional(check: Check[PartT]) -> Check[PartT | None]:
    """Accept None, and what ``check`` does."""
    return lambda name, value: None if value is None else check(name, value)


def names(name: str, value: object) -> tuple[str, ...]:
    """Accept names in a list, a tuple or a set."""
    given = tuple(value) if isinstance(value, list | tuple | set | frozenset) else None
    if given is None or not all(isinstance(each, str) and each for each in given):
        raise refused(name, value, "a tuple of names, each a text that is not empty")
    return given


def part(kind: type[PartT]) -> Check[PartT]:
    """Accept settings of ``kind``."""
    return rule(kind, f"a {kind.__name__}")


def choice(kind: type[ChoiceT]) -> Check[ChoiceT]:
    """Accept a member of ``kind``, or its value."""

    def check(name: str, value: object) -> ChoiceT:
        for member in kind:
            if value == member:
                return member
        raise refused(name, value, f"one of {', '.join(kind)}")

    return check


def log_level(name: str, value: object) -> str:
    """Accept the name of a level that ``logging`` knows, in any case."""
    known = logging.getLevelNamesMapping()
    if not isinstance(value, str) or value.upper() not in known:
        raise refused(name, value, f"one of {', '.join(known)}")
    return value.upper()


def address(name: str, value: object) -> str:
    """Accept an http address without user, password or query; empty means none."""
    wanted = "an address like https://jira.example.com, or empty for none"
    if isinstance(value, str) and "@" in value:  # not shown: it may contain a password
        raise ConfigurationError(
            f"{name} contains a user or a password, and must be {wanted};"
            " set the credentials by JIRA_EMAIL and JIRA_API_TOKEN"
        )
    if not isinstance(value, str) or (value and not re.fullmatch(_ADDRESS, value)):
        raise refused(name, value, wanted)
    return value.rstrip("/")


def secret(name: str, value: object) -> Secret | None:
    """Accept a text that is not blank, or None; no message shows it."""
    match value:
        case None | Secret():
            return value
        case str() if value.strip():
            return Secret(value.strip())
        case _:
            raise ConfigurationError(f"{name} is blank or not a text, and must be a token or None")
