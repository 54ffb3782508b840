"""How one call of an executor differs from its configuration."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, runtime_checkable

from maestro_hive.engine import settings
from maestro_hive.engine.retry_policy import RetryOn, check_retry_on
from maestro_hive.kernel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable


@runtime_checkable
class Gate(Protocol):
    """Lets attempts begin, one by one or some at a time, now or later."""

    async def enter(self) -> Callable[[], None]:
        """Wait until an attempt may begin; return what says that it has ended."""
        ...


Ambiguous = Literal["rerun", "ask", "fail"]

_AMBIGUOUS = ("rerun", "ask", "fail")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """What ``PersonaExecutor.options`` takes."""

    #: Execute the task even if its result is kept; that result is forgotten.
    force: bool = False
    #: Give a step that failed or was interrupted for good a new set of attempts. One that is not
    #: at its end goes on with those it has left.
    retry: bool = False
    #: What tells the step from others of its persona and name, instead of its input.
    key: str | None = None
    #: Seconds for one attempt, instead of the configuration's ``timeout_seconds``.
    timeout: float | None = None
    max_attempts: int | None = None
    max_elapsed_seconds: float | None = None
    #: Which errors are worth another attempt: types, or a function (yes, no, or seconds to wait).
    retry_on: RetryOn | None = None
    #: What to do about an attempt that began and whose end was never recorded.
    on_ambiguous: Ambiguous = "rerun"
    #: Whether the input is kept, or its digest alone.
    store_input: bool = True
    #: Which of several equal calls it is: the second is another step than the first.
    occurrence: int = 1
    #: What every attempt has to pass before it begins; its time limit does not run meanwhile.
    gate: Gate | None = None

    def changed(self, given: dict[str, Any]) -> Self:
        """Return these options with some of them replaced, all of them checked."""
        unknown = sorted(given.keys() - _CHECKS.keys())
        if unknown:
            raise ConfigurationError(
                f"there is no option {', '.join(unknown)}; the options are {', '.join(_CHECKS)}"
            )
        checked = {
            name: _CHECKS[name](f"the option {name}", value) for name, value in given.items()
        }
        return replace(self, **checked)


def _check_key(name: str, value: object) -> str:
    try:
        good = isinstance(value, str) and bool(value.encode())
    except UnicodeEncodeError:  # half a surrogate pair
        good = False
    if not good:
        raise settings.refused(name, value, "a text that is not empty, with a form in UTF-8")
    return str(value)


def _check_ambiguous(name: str, value: object) -> str:
    if value not in _AMBIGUOUS:
        raise settings.refused(name, value, "'rerun', 'ask' or 'fail'")
    return str(value)


def _check_gate(name: str, value: object) -> object:
    if not isinstance(value, Gate):
        raise settings.refused(name, value, "something with a method enter()")
    return value


_CHECKS: dict[str, Any] = {
    "force": settings.flag,
    "retry": settings.flag,
    "key": settings.optional(_check_key),
    "timeout": settings.optional(settings.positive),
    "max_attempts": settings.optional(settings.whole(1)),
    "max_elapsed_seconds": settings.optional(settings.number(0)),
    "retry_on": settings.optional(lambda _, value: check_retry_on(value)),
    "on_ambiguous": _check_ambiguous,
    "store_input": settings.flag,
    "occurrence": settings.whole(1),
    "gate": settings.optional(_check_gate),
}

assert set(_CHECKS) == {each.name for each in fields(CallOptions)}
