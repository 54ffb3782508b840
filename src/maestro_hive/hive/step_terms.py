"""What a step's decorator was given, checked where it stands."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from maestro_hive.engine import settings
from maestro_hive.engine.breaker import CircuitBreaker
from maestro_hive.engine.rates import Rate
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.unified_execution.call_options import CallOptions

if TYPE_CHECKING:
    from maestro_hive.engine.retry_policy import RetryOn
    from maestro_hive.unified_execution.call_options import Ambiguous

Key = str | Callable[..., str]

#: Keywords that the levels below take for themselves.
_TAKEN = ("task", "task_name", "executor_func")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """How a step is executed; None where the configuration decides."""

    name: str
    persona: str
    options: CallOptions
    breaker: str | None = None
    max_concurrency: int | None = None
    rate: Rate | None = None
    key: Key | None = None
    budget: int | None = None

    @classmethod
    def checked(
        cls,
        function: Callable[..., Any],
        *,
        name: str | None,
        persona: str,
        max_attempts: int | None,
        timeout: float | None,
        retry_on: RetryOn | None,
        breaker: str | None,
        max_concurrency: int | None,
        rate: str | Rate | None,
        key: Key | None,
        on_ambiguous: Ambiguous,
        store_input: bool,
        budget: int | None,
    ) -> StepOptions:
        """Return the terms; what cannot be used is named, with the step."""
        step = function_name(function) if name is None else name
        options = CallOptions().changed(
            {
                "max_attempts": max_attempts,
                "timeout": timeout,
                "retry_on": retry_on,
                "on_ambiguous": on_ambiguous,
                "store_input": store_input,
            }
        )
        _check_parameters(function, step)
        return cls(
            name=_text(f"the name of step {step!r}", step),
            persona=_text(f"the persona of step {step!r}", persona),
            options=options,
            breaker=None if breaker is None else CircuitBreaker(name=breaker).name,
            max_concurrency=_optional_whole(f"max_concurrency of step {step!r}", max_concurrency),
            rate=None if rate is None else Rate.parse(rate),
            key=_checked_key(step, key),
            budget=_optional_whole(f"the budget of step {step!r}", budget),
        )


class Step(Protocol):
    """A function with its terms."""

    body: Callable[..., Any]
    terms: StepOptions
    signature: inspect.Signature


def function_name(function: Callable[..., Any]) -> str:
    """Return the name that a function gives to what is made of it."""
    name = getattr(function, "__name__", "")
    if not name or name == "<lambda>":
        raise ConfigurationError(f"{function!r} has no name of its own to be found by; give name=")
    return str(name)


def _check_parameters(function: Callable[..., Any], step: str) -> None:
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name in _TAKEN:
            raise ConfigurationError(
                f"step {step!r} cannot have a keyword-only parameter {parameter.name!r};"
                " call it something else"
            )


def _text(what: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise settings.refused(what, value, "a text that is not empty")
    return value


def _optional_whole(what: str, value: object) -> int | None:
    return None if value is None else int(settings.whole(1)(what, value))


def _checked_key(step: str, key: object) -> Key | None:
    if key is None or isinstance(key, str) or callable(key):
        return key
    raise settings.refused(
        f"the key of step {step!r}", key, "a text such as 'invoice-{number}', or a function"
    )
