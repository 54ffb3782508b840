"""Settings: checked by their types whenever they are set, and frozen in copies."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import FrozenInstanceError, dataclass, field, fields
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeAlias

import msgspec
from msgspec import Meta

from maestro_hive.kernel.errors import ConfigurationError

#: Takes the name of a setting, for its message, and a value; returns the value to store.
Check: TypeAlias = Callable[[str, object], object]

#: Longer values are cut in messages.
_LONGEST_SHOWN = 80
_LARGEST = 1.7e308

Times = Annotated[int, Meta(ge=1, description="a whole number, 1 or more")]
Amount = Annotated[int, Meta(ge=0, description="a whole number, 0 or more")]
Seconds = Annotated[float, Meta(ge=0, le=_LARGEST, description="seconds, 0 or more, and finite")]
Duration = Annotated[float, Meta(gt=0, le=_LARGEST, description="seconds, more than 0, and finite")]
Factor = Annotated[float, Meta(ge=1, le=_LARGEST, description="a number, 1 or more, and finite")]
Flag = Annotated[bool, Meta(description="True or False")]
Text = Annotated[str, Meta(min_length=1, description="a text that is not empty")]


class FrozenConfigError(ConfigurationError, FrozenInstanceError):
    """A setting of a frozen copy cannot be changed."""


def refused(what: str, value: object, wanted: str) -> ConfigurationError:
    """Return the error for a value: its name, the value, and what it must be."""
    shown = repr(value)
    if len(shown) > _LONGEST_SHOWN:
        shown = shown[: _LONGEST_SHOWN - 3] + "..."
    return ConfigurationError(f"{what} is {shown}, and must be {wanted}")


def checked(kind: Any, value: object, what: str) -> Any:
    """Return a value as its type has it; raise if it is of another, or outside of its bounds.

    The type is an ``Annotated`` one, whose description says what the value must be.
    """
    try:
        return msgspec.convert(value, kind, strict=True)
    except (msgspec.ValidationError, RecursionError):
        raise refused(what, value, kind.__metadata__[0].description) from None


def checked_by(check: Any, value: object, what: str) -> Any:
    """Return a value as its check, which is a function, or its type returns it."""
    return check(what, value) if isinstance(check, FunctionType) else checked(check, value, what)


@dataclass
class Settings:
    """Settings that are checked whenever they are set, and that can be frozen."""

    _is_frozen: ClassVar[bool] = False

    if not TYPE_CHECKING:  # a type checker must still find a misspelt setting

        def __setattr__(self, name: str, value: object) -> None:
            label = f"{type(self).__name__}.{name}"
            known = _checks(type(self))
            if name not in known:
                raise ConfigurationError(
                    f"{label} is not a setting; the settings are {', '.join(known)}"
                )
            if self._is_frozen:
                raise FrozenConfigError(
                    f"{label} belongs to the frozen copy that was made of a configuration; change"
                    " that configuration before a hive or an executor is made of it"
                )
            self.__dict__[name] = known[name](label, value)

        def __delattr__(self, name: str) -> None:
            raise ConfigurationError(
                f"{type(self).__name__}.{name} is a setting and cannot be deleted"
            )

    def frozen(self) -> Self:
        """Return a deep copy that cannot be changed."""
        if self._is_frozen:
            return self
        made = copy.deepcopy(self)
        for each in (made, *vars(made).values()):
            if isinstance(each, Settings):
                vars(each)["_is_frozen"] = True
        return made

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain JSON, without secrets."""

        def plain(value: object) -> object:  # a secret shows nothing as a text
            return value if isinstance(value, bool | int | float | None) else str(value)

        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: value.to_dict() if isinstance(value, Settings) else plain(value)
            for name, value in values.items()
        }


@cache
def _checks(kind: type[Settings]) -> dict[str, Check]:
    return {each.name: each.metadata["check"] for each in fields(kind)}


def setting(default: object, kind: Any, variable: str = "") -> Any:
    """Declare a setting: its default or a factory, its type or check, its environment variable.

    The environment is read when the settings are made; an empty variable counts as unset.
    """

    def check(label: str, value: object) -> object:
        return checked_by(kind, value, label)

    def first_value() -> object:
        text = os.environ.get(variable, "").strip() if variable else ""
        if not text:
            return default() if callable(default) else default
        value: object = text
        if isinstance(default, int | float):
            with suppress(ValueError):  # the check below refuses what is not a number
                value = type(default)(text)
        try:
            return check(f"the environment variable {variable}", value)
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}; unset it to use the default") from None

    return field(default_factory=first_value, metadata={"check": check})
