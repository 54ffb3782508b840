"""What a result says it used: the usage that OpenAI and Anthropic report, and that of older callers.

A usage is read from dictionaries and from objects alike, and each token is counted once. Tokens that
were read from a provider's cache are counted apart, as ``cached``: OpenAI has them among the input,
and Anthropic beside it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

#: A larger number is a mistake, and sums of such numbers would have no form in JSON.
MOST_TOKENS = 10**15
#: What a stream of Anthropic says once per message, and what it says again and again, growing.
_COUNTS = (
    *("input_tokens", "output_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"),
)
#: The parts that are recorded, in the order of ``Usage``.
_PARTS = ("cached", "input", "output", "cache_write")


class Usage(NamedTuple):
    """What a call used; ``usd``, in millionths, is None where only a price could say it.

    ``tokens`` are those that count: input that was not cached, what was written to a cache, and
    output. ``cached`` are those that were read from a cache.
    """

    tokens: int = 0
    cached: int = 0
    input: int = 0
    output: int = 0
    cache_write: int = 0
    usd: int | None = None
    model: str = ""

    def facts(self) -> dict[str, Any]:
        """Return what is recorded of its parts, where they are known."""
        parts = self[1:5]
        if not any(parts):
            return {}
        return {name: value for name, value in zip(_PARTS, parts, strict=True) if value}


def usage_in(result: object) -> Usage | None:
    """Return the usage that a result reports, or an error; None if it reports none.

    That is its ``tokens_used``, or else its ``usage``; and what it cost, if it says so
    (``total_cost_usd``, as command-line agents do).
    """
    get = result.get if type(result) is dict else partial(member, result)
    usd, model, used = get("total_cost_usd"), get("model"), _count(get("tokens_used"))
    usd = None if usd is None else _money(usd)
    model = _text(model)
    if used:
        return Usage(used, 0, 0, 0, 0, usd, model)
    found = usage_of(get("usage"))
    if found is None:
        return None if usd is None else Usage(usd=usd, model=model)
    return found._replace(usd=found.usd if usd is None else usd, model=found.model or model)


def usage_of(usage: object) -> Usage | None:
    """Return a usage by itself, as a response has it; None if it is none."""
    if usage is None:
        return None
    prompt, completion = (
        _count(member(usage, "prompt_tokens")),
        _count(member(usage, "completion_tokens")),
    )
    given, made = _count(member(usage, "input_tokens")), _count(member(usage, "output_tokens"))
    total = _count(member(usage, "total_tokens"))
    if prompt or completion:  # OpenAI's chat completions
        details = member(usage, "prompt_tokens_details")
        return _with_cached_inside(prompt, completion, total, details)
    if total:  # OpenAI's responses, and what has no parts
        return _with_cached_inside(given, made, total, member(usage, "input_tokens_details"))
    written = _count(member(usage, "cache_creation_input_tokens"))
    cached = _count(member(usage, "cache_read_input_tokens"))
    if not (given or made or written or cached):
        return None
    return Usage(given + made + written, cached, given, made, written)


def _with_cached_inside(given: int, made: int, total: int, details: object) -> Usage:
    cached = min(_count(member(details, "cached_tokens")), given)
    written = min(_count(member(details, "cache_write_tokens")), given - cached)
    tokens = max(total or given + made, cached) - cached
    return Usage(tokens, cached, given - cached - written, made, written)


def member(value: object, name: str) -> object:
    """Return a member of a dictionary, or an attribute; None if there is none."""
    if isinstance(value, dict):
        return value.get(name)
    try:
        return getattr(value, name, None)
    except Exception:  # noqa: BLE001 - a property of the user's making
        return None


def _count(value: object) -> int:
    return value if type(value) is int and 0 < value <= MOST_TOKENS else 0


def _money(value: object) -> int | None:
    if type(value) not in (int, float) or not 0 < value <= MOST_TOKENS:  # type: ignore[operator]
        return None
    return round(value * 1e6)  # type: ignore[operator]


def _text(value: object) -> str:
    return value[:200] if type(value) is str else ""


class StreamUsage:
    """The usage of a response that comes in parts: what its events say, each token once.

    OpenAI's last chunk has the whole usage, and so has the last event of its responses. Anthropic's
    first event has the input, and later ones the output so far.
    """

    def __init__(self) -> None:
        self._whole: Usage | None = None
        self._counts: dict[str, int] = {}
        self._model = ""

    def add(self, event: object) -> None:
        """Read one event of the stream."""
        for inner in (event, member(event, "message"), member(event, "response")):
            if inner is None:
                continue
            self._model = _text(member(inner, "model")) or self._model
            usage = member(inner, "usage")
            if usage is None:
                continue
            if _count(member(usage, "total_tokens")) or _count(member(usage, "prompt_tokens")):
                self._whole = usage_of(usage) or self._whole
                continue
            found = {name: _count(member(usage, name)) for name in _COUNTS}
            self._counts.update({name: count for name, count in found.items() if count})

    def usage(self) -> Usage | None:
        """Return what was used so far; None if no event says anything of it."""
        found = self._whole or usage_of(self._counts)
        return None if found is None else found._replace(model=found.model or self._model)
