"""The options of a step: declared once, checked by one table, the same for Hive and executors.

To add an option: one field of ``Options`` with its check, and one line in the ``TypedDict`` of who
may set it. One that is ``recorded`` is stored with each attempt, and shown. The reference page is
made from these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeAlias, TypedDict

from maestro_hive.engine import settings
from maestro_hive.engine.accounts import UNSIZED, Sizing
from maestro_hive.engine.breaker import checked_name, step_breaker
from maestro_hive.engine.budget import checked_amount, checked_money
from maestro_hive.engine.rates import Rate
from maestro_hive.engine.result_types import check_returns
from maestro_hive.engine.retry_policy import BreakerOn, RetryOn, check_breaker_on, check_retry_on
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.maestro.state.budgets import MICROS

if TYPE_CHECKING:
    from maestro_hive.engine.config import ExecutionConfig
    from maestro_hive.engine.prices import Prices
    from maestro_hive.engine.step_spec import Stage

Ambiguous: TypeAlias = Literal["rerun", "ask", "fail"]
Key: TypeAlias = str | Callable[..., str]
#: How much may be spent: tokens, money as in ``"$2.50"``, or both by name.
Amount: TypeAlias = int | str | dict[str, float]


class StepOptions(TypedDict, total=False):
    """What ``@hive.step(…)`` takes; all of it may be left out."""

    persona: str
    role: str | None
    name: str | None
    max_attempts: int | None
    rounds: int | None
    timeout: float | None
    retry_on: RetryOn | None
    breaker: str | None
    breaker_on: BreakerOn | None
    max_concurrency: int | None
    rate: str | Rate | None
    key: Key | None
    ignore: tuple[str, ...]
    on_ambiguous: Ambiguous
    escalate: bool
    store_input: bool
    redact: bool | tuple[str, ...]
    store_streams: bool | None
    check_source: bool | None
    returns: Any
    healing: bool | None
    disabled_healers: tuple[str, ...]
    budget: Amount | None
    max_tokens: int | None
    max_usd: float | None
    model: str | None


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
    redact: bool | tuple[str, ...]
    store_streams: bool | None
    check_source: bool | None
    returns: Any
    healing: bool | None
    disabled_healers: tuple[str, ...]
    max_tokens: int | None
    max_usd: float | None
    model: str | None


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
    return checked_text(name, value, ", or a function of the arguments")


def checked_text(name: str, value: object, more: str = "") -> str:
    """Return a text that identifies something; raise if it is none."""
    try:
        good = isinstance(value, str) and bool(value.encode())
    except UnicodeEncodeError:  # half a surrogate pair
        good = False
    if not good:
        raise settings.refused(name, value, f"a text that is not empty, with a form in UTF-8{more}")
    return str(value)


def _names(name: str, value: object) -> tuple[str, ...]:
    names = tuple(value) if isinstance(value, list | tuple | set | frozenset) else None
    if names is None or not all(isinstance(each, str) and each for each in names):
        raise settings.refused(name, value, "a tuple with the names of arguments")
    return names


def _redact(name: str, value: object) -> bool | tuple[str, ...]:
    if isinstance(value, bool):
        return value
    try:
        return _names(name, value)
    except ConfigurationError:
        message = "True, False, or a tuple with the names of arguments"
        raise settings.refused(name, value, message) from None


def _ambiguous(name: str, value: object) -> str:
    if value not in ("rerun", "ask", "fail"):
        raise settings.refused(name, value, "'rerun', 'ask' or 'fail'")
    return str(value)


class AttemptLimit(NamedTuple):
    """How often a step may be called: in all, and in how many rounds.

    The rounds are as long as each other; where that cannot be, the first ones are longer by one.
    """

    rounds: int
    attempts: int

    def in_round(self, number: int) -> int:
        """Return how many attempts may fail in a round; those of an outer level 2 repeat them."""
        each, left = divmod(self.attempts, self.rounds)
        return each + ((number - 1) % self.rounds < left)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a step is executed; None where the configuration decides."""

    #: Who does the work: memory, history and tokens are the persona's own, and so is the breaker.
    persona: str = _option("default", _text)
    #: The role by which a policy decides about the step; without it, that of its persona in the policy.
    role: str | None = _option(None, settings.optional(_text), recorded=True)
    #: What the step is called; without it, as its function.
    name: str | None = _option(None, settings.optional(_text))
    #: How often a step of a hive is called, in all its rounds together; without ``rounds`` there is
    #: one. For an executor: how many attempts may fail in one round.
    max_attempts: int | None = _option(None, settings.optional(settings.whole(1)), recorded=True)
    #: Into how many rounds the attempts are divided, with a long wait between two of them.
    rounds: int | None = _option(None, settings.optional(settings.whole(1)), recorded=True)
    #: Seconds for one attempt.
    timeout: float | None = _option(None, settings.optional(settings.positive), recorded=True)
    #: Which errors are worth another attempt: types, or a function (yes, no, or seconds to wait).
    retry_on: RetryOn | None = _option(
        None, settings.optional(lambda _, value: check_retry_on(value))
    )
    #: The name of a breaker to share, such as the provider's; without it, the persona's, and for a
    #: step without persona one of its own, ``step/NAME``.
    breaker: str | None = _option(None, settings.optional(checked_name), recorded=True)
    #: Which errors the breaker counts: types, or a function (yes or no). Without it those that are
    #: about the other side: timeouts, failed connections, rate limits, responses with a status of 500
    #: or more.
    breaker_on: BreakerOn | None = _option(
        None, settings.optional(lambda _, value: check_breaker_on(value))
    )
    #: How many attempts may run at once, in all processes on the store together.
    max_concurrency: int | None = _option(None, settings.optional(settings.whole(1)), recorded=True)
    #: How many attempts may start in a time, as in ``60/min``, in all processes together.
    rate: Rate | None = _option(None, settings.optional(lambda _, value: Rate.parse(value)))
    #: The step's identity instead of its input: a text such as ``invoice-{number}``, or a function.
    key: Key | None = _option(None, settings.optional(_key))
    #: The names of arguments that are neither identity nor input: the step gets them as they are.
    ignore: tuple[str, ...] = _option((), _names)
    #: What to do about an attempt that started and whose end was never recorded: execute the step
    #: again (``rerun``), ask a person (``ask``), or let it fail (``fail``).
    on_ambiguous: Ambiguous = _option("rerun", _ambiguous, recorded=True)
    #: Whether a person is asked when the step has failed for good: its run waits until one gives
    #: feedback for further attempts, the result itself, or gives up. Without it, the workflow gets
    #: the error.
    escalate: bool = _option(False, settings.flag, recorded=True)
    #: Whether the input is stored, or its digest alone.
    store_input: bool = _option(True, settings.flag)
    #: The names of arguments that are not stored: ``[redacted]`` is, and their digest is part of the
    #: identity. True means all of them, and that the result is stored, and shown nowhere. Secrets in its
    #: errors, and the texts of those arguments, are replaced before they are recorded.
    redact: bool | tuple[str, ...] = _option(False, _redact, recorded=True)
    #: Whether what the step writes by ``current().write`` is stored, for ``hive.stream``. Without it,
    #: ``StateConfig.store_streams`` decides.
    store_streams: bool | None = _option(None, settings.optional(settings.flag), recorded=True)
    #: Whether a text that the step returns must be Python source that parses. Without it, a step of a
    #: hive is not checked; for an executor ``Level1Config.enable_syntax_validation`` decides, and only
    #: what looks like source must parse.
    check_source: bool | None = _option(None, settings.optional(settings.flag), recorded=True)
    #: What the result must be: a type, such as a pydantic model, or a JSON Schema (a dict); True means
    #: what the function is annotated with. A result that is something else fails the attempt. Without
    #: it, results are not checked.
    returns: Any = _option(None, settings.optional(check_returns))
    #: Whether healers are asked when an attempt fails. Without it, ``Level1Config.enable_self_healing``
    #: decides.
    healing: bool | None = _option(None, settings.optional(settings.flag), recorded=True)
    #: The names of healers that are not asked, besides those of ``Level1Config.disabled_healers``.
    disabled_healers: tuple[str, ...] = _option((), settings.names, recorded=True)
    #: How much one call of the step may spend, in all its attempts: tokens, money as in ``"$2.50"``, or
    #: both. Over that it raises ``TokenBudgetExceeded``.
    budget: Amount | None = _option(None, settings.optional(checked_amount), recorded=True)
    #: How many tokens one attempt uses at most: under a limit it starts only when so many are left.
    max_tokens: int | None = _option(None, settings.optional(settings.whole(0)), recorded=True)
    #: The same in US dollars.
    max_usd: float | None = _option(None, settings.optional(checked_money), recorded=True)
    #: The model that is called, where the result does not name it: for its price.
    model: str | None = _option(None, settings.optional(_text), recorded=True)
    #: Execute the task even if it is completed; its result is discarded.
    force: bool = _option(False, settings.flag)
    #: Give a step that failed or was interrupted for good a new set of attempts. One that has
    #: attempts left goes on with those.
    retry: bool = _option(False, settings.flag)
    #: Seconds from the start of the first attempt after which no other one starts.
    max_elapsed_seconds: float | None = _option(None, settings.optional(settings.number(0)))
    #: What is told the step's name, and whether it waits; None: an open breaker suspends its run.
    waits_for_breaker: Callable[[str, bool], None] | None = _option(None, lambda _, value: value)
    #: What is known of what its calls spend, where the options above do not say it.
    sizing: Sizing = _option(UNSIZED, lambda _, value: value)
    #: Whether its input is its key: the same input is the same step, wherever it is called.
    input_is_key: bool = _option(False, settings.flag)
    #: What each attempt passes besides the stages that follow from the other options.
    stages: tuple[Stage, ...] = _option((), lambda _, value: value)

    def changed(self, given: dict[str, Any], allowed: type[Any], what: str = "the option") -> Self:
        """Return these options with some replaced, all checked; ``allowed`` is a ``TypedDict``."""
        names = allowed.__annotations__
        unknown = sorted(given.keys() - names.keys())
        if unknown:
            raise ConfigurationError(
                f"there is no option {', '.join(unknown)}; the options are {', '.join(names)}"
                f"{_as_settings(unknown)}"
            )
        checked = {name: CHECKS[name](f"{what} {name}", value) for name, value in given.items()}
        return replace(self, **checked)

    def attempt_limit(self, config: ExecutionConfig) -> AttemptLimit:
        """Return how often a step of a hive is called, and in how many rounds.

        What is not given is the configuration's, except that ``max_attempts`` alone is one round.
        """
        if self.max_attempts is None:
            rounds = self.rounds or config.level2.max_attempts
            return AttemptLimit(rounds, rounds * config.level1.max_attempts)
        return AttemptLimit(min(self.rounds or 1, self.max_attempts), self.max_attempts)

    @property
    def records_arguments(self) -> bool:
        """Whether arguments may be recorded: none of them is to be left out."""
        return self.store_input and not self.redact

    def breaker_name(self, step: str) -> str:
        """Return the name of the breaker of a step with that name."""
        if self.breaker is not None:
            return self.breaker
        return self.persona if self.persona != DEFAULTS["persona"] else step_breaker(step)

    def recorded(self) -> dict[str, Any]:
        """Return the options to store with each attempt: the recorded ones that were given."""
        chosen = {name: getattr(self, name) for name in RECORDED}
        return {name: value for name, value in chosen.items() if value != DEFAULTS[name]}


def sizing_of(options: Options, prices: Prices | None, *, is_enforced: bool = True) -> Sizing:
    """Return what the options say about what a call spends."""
    known = options.sizing
    usd = known.max_usd if options.max_usd is None else round(options.max_usd * MICROS)
    tokens = known.max_tokens if options.max_tokens is None else options.max_tokens
    return Sizing(tokens, usd, options.model or "", prices, is_enforced, known.alike)


def _as_settings(unknown: list[str]) -> str:
    """Return where those of the names are set that are settings, for all steps."""
    from maestro_hive.engine.config import Level1Config, Level2Config

    levels: tuple[tuple[str, type[Any]], ...] = (("level1", Level1Config), ("level2", Level2Config))
    found = [
        f". {name} is a setting, for all steps: ExecutionConfig({level}={kind.__name__}({name}=…))"
        for name in unknown
        for level, kind in levels
        if name in {each.name for each in fields(kind)}
    ]
    return "".join(found)


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
