"""Settings: values that are checked whenever they are set, and can be frozen."""

from __future__ import annotations

import copy
import logging
import os
import re
import shlex
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

    It is replaced in all that leaves the process. It can be made from a function that returns the
    text, and is called whenever it is needed: to read it from a vault, or to get one that was renewed.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str | Callable[[], str]) -> None:
        self._text = text
        if isinstance(text, str):
            know_secret(text)

    def reveal(self) -> str:
        """Return the text itself."""
        if isinstance(self._text, str):
            return self._text
        text: object = self._text()
        if not isinstance(text, str) or not text.strip():
            name = getattr(self._text, "__qualname__", type(self._text).__name__)
            raise ConfigurationError(f"{name} returned no text, and must return a secret")
        know_secret(text.strip())
        return text.strip()

    def __repr__(self) -> str:
        return "***"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

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
        known = _checks(type(self))
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


#: By class, for they are asked for with every setting of every configuration.
_CHECKS: dict[type, dict[str, Check[object] | None]] = {}


def _checks(kind: type[Settings]) -> dict[str, Check[object] | None]:
    found = _CHECKS.get(kind)
    if found is None:
        found = _CHECKS[kind] = {each.name: each.metadata.get("check") for each in fields(kind)}
    return found


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
        if isinstance(default, int | float):
            with suppress(ValueError):  # the check below refuses what is not a number
                value = int(text) if isinstance(default, int) else float(text)
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
#: A text that is not blank.
text = rule(str, "a text that is not blank", lambda value: value.strip())
#: A text; empty means none.
any_text = rule(str, "a text, or empty for none")
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


def address(example: str, credentials: str) -> Check[str]:
    """Accept an http address without user, password or query; empty means none."""
    wanted = f"an address like {example}, or empty for none"

    def check(name: str, value: object) -> str:
        if isinstance(value, str) and "@" in value:  # not shown: it may contain a password
            raise ConfigurationError(
                f"{name} contains a user or a password, and must be {wanted};"
                f" set the credentials by {credentials}"
            )
        if not isinstance(value, str) or (value and not re.fullmatch(_ADDRESS, value)):
            raise refused(name, value, wanted)
        return value.rstrip("/")

    return check


def secret(name: str, value: object) -> Secret | None:
    """Accept a text that is not blank, a function that returns one, or None; no message shows it."""
    match value:
        case None | Secret():
            return value
        case str() if value.strip():
            return Secret(value.strip())
        case _ if callable(value):
            return Secret(value)
        case _:
            raise ConfigurationError(
                f"{name} is blank or not a text, and must be a token, a function that returns it, or"
                " None"
            )


def api_version(name: str, value: object) -> int | None:
    """Accept the versions of Jira's REST interface that are spoken, or None."""
    if value is None:
        return None
    if not isinstance(value, int | str) or str(value) not in {"2", "3"}:
        raise refused(name, value, "2 (Jira Server and Data Center), 3 (Jira Cloud) or None")
    return int(value)


def repository(name: str, value: object) -> str:
    """Accept the owner and the name of a repository; empty means none."""
    if not isinstance(value, str) or not re.fullmatch(r"([\w.-]+/[\w.-]+)?", value):
        raise refused(name, value, "a repository like owner/name, or empty for none")
    return value


def accounts(name: str, value: object) -> tuple[str, ...]:
    """Accept names of accounts, also as a text with commas between them."""
    if isinstance(value, str):
        return tuple(each.strip() for each in value.split(",") if each.strip())
    return names(name, value)


def arguments(name: str, value: object) -> tuple[str, ...]:
    """Accept a program and its arguments; a text is split as a shell does it, and no shell is used."""
    wanted = "a program and its arguments, as a list of texts"
    given: object = value
    if isinstance(value, str):
        try:
            given = shlex.split(value)
        except ValueError as error:
            raise refused(name, value, f"{wanted} ({error})") from None
    if not isinstance(given, list | tuple) or not all(isinstance(each, str) for each in given):
        raise refused(name, value, wanted)
    if given and not given[0]:
        raise refused(name, value, f"{wanted} of which the first is not empty")
    return tuple(given)
