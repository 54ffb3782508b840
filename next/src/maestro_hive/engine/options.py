"""The options of a step: declared once, checked when the step is made.

To add an option: a field of ``StepOptions`` and, if its type does not say all, a check in
``_CHECKS``. What was given is stored with each attempt, as far as it is plain JSON.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

from msgspec import Meta

from maestro_hive.engine.rates import Rate
from maestro_hive.engine.result_types import checked_returns
from maestro_hive.engine.retry_policy import AttemptLimit, BreakerOn, RetryOn, checked_filter
from maestro_hive.engine.settings import (
    Amount,
    Duration,
    Flag,
    Text,
    Times,
    checked,
    checked_by,
    refused,
)

if TYPE_CHECKING:
    from maestro_hive.engine.config import ExecutionConfig

Ambiguous: TypeAlias = Literal["rerun", "ask", "fail"]
Key: TypeAlias = str | Callable[..., str]

#: Breakers are shown by their names; longer ones are digests.
_LONGEST_NAME = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """How a step is executed; None where the configuration decides."""

    #: The worker: memory, history and tokens are the persona's own, and so is the breaker.
    persona: str = ""
    #: The step's name; without it, that of its function.
    name: str = ""
    #: The step's identity instead of its input: a text such as ``invoice-{number}``, or a function.
    key: Key | None = None
    #: The names of arguments that are neither identity nor input: the step gets them as they are.
    ignore: tuple[str, ...] = ()
    #: How often the step is called, in all its rounds together.
    max_attempts: int | None = None
    #: How many attempts may end with the death of their process; then the step waits for a retry.
    max_interruptions: int | None = None
    #: Into how many rounds the attempts are divided, with a long wait between two of them.
    rounds: int | None = None
    #: Seconds for one attempt.
    timeout: float | None = None
    #: Which errors are retried: types, or a function (yes, no, or seconds to wait).
    retry_on: RetryOn | None = None
    #: The name of a breaker to share, such as the provider's; without it, the persona's, and for a
    #: step without persona one of its own, ``step/NAME``.
    breaker: str | None = None
    #: Which errors the breaker counts: types, or a function (yes or no). Without it, timeouts,
    #: failed connections, rate limits, and responses with a status of 500 or more.
    breaker_on: BreakerOn | None = None
    #: How many attempts may run at once, in all processes on the store together.
    max_concurrency: int | None = None
    #: How many attempts may start in a time, as in ``60/min``, in all processes together.
    rate: Rate | str | None = None
    #: What follows an attempt that started and has no recorded end: the step runs again
    #: (``rerun``), a person is asked (``ask``), or it fails (``fail``).
    on_ambiguous: Ambiguous = "rerun"
    #: Whether the input is stored, or its digest alone.
    store_input: bool = True
    #: Whether what the step writes by ``current().write`` is stored; None: as its hive has it.
    store_streams: bool | None = None
    #: Whether a text that the step returns must be Python source that parses.
    check_source: bool = False
    #: The names of arguments that are stored as ``[redacted]``; their digest is part of the
    #: identity, and their texts are replaced in recorded errors. True: all of them, and the result
    #: is shown nowhere.
    redact: bool | tuple[str, ...] = False
    #: The type of the result: a type, such as a pydantic model, or a JSON Schema (a dict); True:
    #: what the function is annotated with. Another result fails the attempt.
    returns: Any = None

    def __post_init__(self) -> None:
        label = f"step {self.name!r}: " if self.name else ""
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if value is not default:
                made = checked_by(_CHECKS[name], value, f"{label}{name}")
                object.__setattr__(self, name, made)

    @classmethod
    def declared(cls, name: str, given: dict[str, Any]) -> Self:
        """Return the options of a step; TypeError for what is none."""
        for each in given.keys() - _DEFAULTS.keys():
            near = difflib.get_close_matches(each, _DEFAULTS, 1)
            way_out = f"did you mean {near[0]!r}?" if near else f"options: {', '.join(_DEFAULTS)}"
            raise TypeError(f"step {name!r}: there is no option {each!r}; {way_out}")
        return cls(**{"name": name, **given})

    def limit(self, config: ExecutionConfig) -> AttemptLimit:
        """Return how often the step is called, and in how many rounds.

        What is not given is the configuration's, except that ``max_attempts`` alone is one round.
        """
        if self.max_attempts is None:
            rounds = self.rounds or config.level2.max_attempts
            return AttemptLimit(rounds * config.level1.max_attempts, rounds)
        return AttemptLimit(self.max_attempts, min(self.rounds or 1, self.max_attempts))

    def breaker_name(self) -> str:
        """Return the name of the step's breaker."""
        name = self.breaker or self.persona or f"step/{self.name}"
        if len(name) <= _LONGEST_NAME and name.isprintable():
            return name
        return f"step/{hashlib.sha256(name.encode()).hexdigest()[:12]}"

    def recorded(self) -> dict[str, Any]:
        """Return the options to store with each attempt: those that were given, as plain JSON."""
        given = {name: getattr(self, name) for name in _RECORDED}
        return {name: value for name, value in given.items() if value != _DEFAULTS[name]}


_NAMES = "a tuple with the names of arguments"


def _names(what: str, value: object, wanted: str = _NAMES) -> tuple[str, ...]:
    names = tuple(value) if isinstance(value, list | tuple | set | frozenset) else None
    if names is None or not all(isinstance(each, str) and each for each in names):
        raise refused(what, value, wanted)
    return names


def _key(what: str, value: object) -> object:
    return value if callable(value) else checked(Text, value, what)


_CHECKS: dict[str, Any] = {
    "persona": Text,
    "name": Text,
    "key": _key,
    "ignore": _names,
    "max_attempts": Times,
    "max_interruptions": Amount,
    "rounds": Times,
    "timeout": Duration,
    "retry_on": lambda what, value: checked_filter(what, value, "True, False or the wait"),
    "breaker": Text,
    "breaker_on": lambda what, value: checked_filter(what, value, "True or False"),
    "max_concurrency": Times,
    "rate": lambda _, value: Rate.parse(value),
    "on_ambiguous": Annotated[Ambiguous, Meta(description="'rerun', 'ask' or 'fail'")],
    "store_input": Flag,
    "store_streams": Flag,
    "check_source": Flag,
    "redact": lambda what, value: (
        value if isinstance(value, bool) else _names(what, value, f"True, False, or {_NAMES}")
    ),
    "returns": checked_returns,
}
_DEFAULTS: dict[str, Any] = {each.name: each.default for each in fields(StepOptions)}
_RECORDED = (
    *("max_attempts", "max_interruptions", "rounds", "timeout", "breaker", "max_concurrency"),
    *("on_ambiguous", "store_streams", "check_source", "redact"),
)
