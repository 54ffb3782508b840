"""The options of a step: declared once, checked by one table, the same for Hive and executors.

To add an option: one field of ``Options`` with its check, and one line in the ``TypedDict`` of who
may set it. One that is ``recorded`` is stored with each attempt, and shown. The reference page is
made from these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Literal, Self, TypeAlias, TypedDict

from maestro_hive.engine import settings
from maestro_hive.engine.breaker import checked_name
from maestro_hive.engine.rates import Rate
from maestro_hive.engine.retry_policy import RetryOn, check_retry_on
from maestro_hive.kernel.errors import ConfigurationError

Ambiguous: TypeAlias = Literal["rerun", "ask", "fail"]
Key: TypeAlias = str | Callable[..., str]


class StepOptions(TypedDict, total=False):
    """What ``@hive.step(…)`` takes; all of it may be left out."""

    persona: str
    name: str | None
    max_attempts: int | None
    timeout: float | None
    retry_on: RetryOn | None
    breaker: str | None
    max_concurrency: int | None
    rate: str | Rate | None
    key: Key | None
    on_ambiguous: Ambiguous
    store_input: bool
    budget: int | None


class CallOptions(TypedDict, total=False):
    """What ``PersonaExecutor.options(…)`` takes; all of it may be left out."""

    force: bool
    retry: bool
    key: str | None
    timeout: float | None
    max_attempts: int | None
    max_elapsed_seconds: float | None
    retry_on: RetryOn | None
    on_ambiguous: Ambiguous
    store_input: bool


# --- checks --------------------------------------------------------------------------------------

Check: TypeAlias = Callable[[str, object], Any]


def _option(default: Any, check: Check, *, recorded: bool = False) -> Any:
    """Declare an option; a ``recorded`` one has values that are plain JSON, and is no secret."""
    return field(default=default, metadata={"check": check, "recorded": recorded})


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise settings.refused(name, value, "a text that is not empty")
    return value


def _key(name: str, value: object) -> Key:
    if callable(value):
        return value
    try:
        good = isinstance(value, str) and bool(value.encode())
    except UnicodeEncodeError:  # half a surrogate pair
        good = False
    if not good:
        wanted = "a text that is not empty, with a form in UTF-8, or a function of the arguments"
        raise settings.refused(name, value, wanted)
    return str(value)


def _ambiguous(name: str, value: object) -> str:
    if value not in ("rerun", "ask", "fail"):
        raise settings.refused(name, value, "'rerun', 'ask' or 'fail'")
    return str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a step is executed; None where the configuration decides."""

    #: Who does the work: memory, history and tokens are the persona's own, and so is the breaker.
    persona: str = _option("default", _text)
    #: What the step is called; without it, as its function.
    name: str | None = _option(None, settings.optional(_text))
    #: How many attempts may fail in one round.
    max_attempts: int | None = _option(None, settings.optional(settings.whole(1)), recorded=True)
    #: Seconds for one attempt.
    timeout: float | None = _option(None, settings.optional(settings.positive), recorded=True)
    #: Which errors are worth another attempt: types, or a function (yes, no, or seconds to wait).
    retry_on: RetryOn | None = _option(
        None, settings.optional(lambda _, value: check_retry_on(value))
    )
    #: The name of a breaker to share, such as the provider's; without it, the persona's.
    breaker: str | None = _option(None, settings.optional(checked_name), recorded=True)
    #: How many attempts may run at once, in all processes on the store together.
    max_concurrency: int | None = _option(None, settings.optional(settings.whole(1)), recorded=True)
    #: How many attempts may start in a time, as in ``60/min``, in all processes together.
    rate: Rate | None = _option(None, settings.optional(lambda _, value: Rate.parse(value)))
    #: The step's identity instead of its input: a text such as ``invoice-{number}``, or a function.
    key: Key | None = _option(None, settings.optional(_key))
    #: What to do about an attempt that started and whose end was never recorded: execute the step
    #: again (``rerun``), ask a person (``ask``), or let it fail (``fail``).
    on_ambiguous: Ambiguous = _option("rerun", _ambiguous, recorded=True)
    #: Whether the input is stored, or its digest alone.
    store_input: bool = _option(True, settings.flag)
    #: How many tokens the persona may spend in the run.
    budget: int | None = _option(None, settings.optional(settings.whole(1)), recorded=True)
    #: Execute the task even if it is completed; its result is discarded.
    force: bool = _option(False, settings.flag)
    #: Give a step that failed or was interrupted for good a new set of attempts. One that has
    #: attempts left goes on with those.
    retry: bool = _option(False, settings.flag)
    #: Seconds from the start of the first attempt after which no other one starts.
    max_elapsed_seconds: float | None = _option(None, settings.optional(settings.number(0)))

    def changed(self, given: dict[str, Any], allowed: type[Any], what: str = "the option") -> Self:
        """Return these options with some replaced, all checked; ``allowed`` is a ``TypedDict``."""
        names = allowed.__annotations__
        unknown = sorted(given.keys() - names.keys())
        if unknown:
            raise ConfigurationError(
                f"there is no option {', '.join(unknown)}; the options are {', '.join(names)}"
            )
        checked = {name: CHECKS[name](f"{what} {name}", value) for name, value in given.items()}
        return replace(self, **checked)

    def recorded(self) -> dict[str, Any]:
        """Return the options to store with each attempt: the recorded ones that were given."""
        chosen = {name: getattr(self, name) for name in RECORDED}
        return {name: value for name, value in chosen.items() if value != DEFAULTS[name]}


#: How each option is checked, by name.
CHECKS: dict[str, Check] = {each.name: each.metadata["check"] for each in fields(Options)}
#: The options that are stored with each attempt.
RECORDED: tuple[str, ...] = tuple(
    each.name for each in fields(Options) if each.metadata["recorded"]
)
#: What each option is when it is not given, by name.
DEFAULTS: dict[str, Any] = {
    each.name: each.default for each in fields(Options) if each.default is not MISSING
}

for _allowed in (StepOptions, CallOptions):
    assert _allowed.__annotations__.keys() <= CHECKS.keys(), _allowed
