"""Personas that fail in one way, again and again, unless what they are told contains the repair."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from maestro_hive import current

if TYPE_CHECKING:
    from collections.abc import Callable


class Invoice(BaseModel):
    """What a persona is to return."""

    customer: str
    total: float


SCHEMA = {
    "type": "object",
    "properties": {"total": {"type": "number"}},
    "required": ["total"],
}


def _told(*parts: str) -> bool:
    text = "\n".join(current().feedback)
    return all(part in text for part in parts)


@dataclass
class Persona:
    """A body that is called, and a clock that it looks at; ``calls`` counts."""

    now: Callable[[], float]
    calls: int = 0
    started: float | None = None
    seen: list[str] = field(default_factory=list)

    def _call(self) -> None:
        self.calls += 1
        self.seen = list(current().feedback)
        if self.started is None:
            self.started = self.now()

    def syntax(self) -> str:
        """Write source that parses only if the line with a caret was shown."""
        self._call()
        shown = ">    2     return 1 +\n" + " " * 21 + "^"
        return "def f():\n    return 1\n" if _told(shown) else "def f():\n    return 1 +\n"

    def test_failure(self) -> str:
        """Pass a test only if the failing assertion and its place were told."""
        self._call()
        total = 4 if _told("assert total == 4", "in line", "scripted.py") else 3
        assert total == 4
        return "passed"

    def missing_module(self) -> str:
        """Do without a module only if it was told that nothing is installed."""
        self._call()
        if not _told("The module 'no_such_module' is not installed", "Nothing is installed"):
            import no_such_module  # type: ignore[import-not-found]  # noqa: F401
        return "without"

    def rate_limit(self) -> str:
        """Answer only after the wait that the message names."""
        self._call()
        assert self.started is not None
        if self.now() - self.started < 80:
            raise RuntimeError("Rate limit reached for requests. Please try again in 1m20s.")
        return "answered"

    def too_long(self) -> str:
        """Take less only if it was asked for, with how much."""
        self._call()
        if not _told("leave out or summarise", "At least 19 % has to go"):
            raise RuntimeError(
                "This model's maximum context length is 4096 tokens. However, your messages"
                " resulted in 5000 tokens. Please reduce the length of the messages."
            )
        return "shorter"

    def json(self) -> Any:
        """Write JSON that parses only if the place was shown."""
        self._call()
        shown = '  {"a": 1,, "b": 2}\n          ^'
        return json.loads('{"a": 1}' if _told(shown) else '{"a": 1,, "b": 2}')

    def annotation(self) -> dict[str, list[int]]:
        """Return what it declares only if the place was told."""
        self._call()
        told = _told("result['b'][1]: must be a int, and is a str")
        return {"a": [1], "b": [1, 2]} if told else {"a": ["1"], "b": [1, "2"]}  # type: ignore[list-item]

    def model(self) -> Any:
        """Return what makes a model only if the missing field was named."""
        self._call()
        return {"customer": "c", "total": 5} if _told("result.total: Field required") else {}

    def schema(self) -> Any:
        """Return what fits a JSON Schema only if the place was told."""
        self._call()
        told = _told("result.total: 'five' is not of type 'number'", '"required": ["total"]')
        return {"total": 5 if told else "five"}

    def own_model(self) -> Any:
        """Make a model in the step itself, which refuses until the field is named."""
        self._call()
        told = _told("is not of the declared type", "Field required")
        text = '{"customer": "c", "total": 5}' if told else '{"customer": "c"}'
        return Invoice.model_validate_json(text).total


@dataclass(frozen=True)
class Scenario:
    """A persona's way to fail, the healer that heals it, and the options of the step."""

    body: str
    healer: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.body


SCENARIOS = [
    Scenario("syntax", "syntax", {"check_source": True}),
    Scenario("test_failure", "test_failure"),
    Scenario("missing_module", "missing_module"),
    Scenario("rate_limit", "rate_limit"),
    Scenario("too_long", "too_long"),
    Scenario("json", "json"),
    Scenario("annotation", "result_type", {"returns": True}),
    Scenario("model", "result_type", {"returns": Invoice}),
    Scenario("schema", "result_type", {"returns": SCHEMA}),
    Scenario("own_model", "result_type"),
]
