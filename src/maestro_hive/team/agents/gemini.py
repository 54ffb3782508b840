"""Gemini CLI: ``gemini`` with events of its stream; it reports what a call used when it ends."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, ClassVar

from maestro_hive.team.agents.adapter import Adapter, feedback_path, model_and_session
from maestro_hive.team.agents.calls import Call, Permissions, Totals
from maestro_hive.team.agents.events import Acted, Denied, Event, Said, Waiting
from maestro_hive.team.agents.failures import FailureKind
from maestro_hive.team.agents.metering import tokens, with_cached_inside
from maestro_hive.team.agents.reading import Reader, in_few_words, member, text_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from maestro_hive.engine.prices import Prices

_PERMISSIONS = {
    # It does not start in a folder that nobody has trusted: only the graph can say that it may.
    Permissions.OWN: (),
    Permissions.EDIT: ("--skip-trust", "--approval-mode=auto_edit"),
    Permissions.ALL: ("--skip-trust", "--approval-mode=yolo"),
}


class Gemini(Adapter):
    """The adapter of Gemini CLI."""

    name = "gemini"
    install = "npm install -g @google/gemini-cli"
    tried = ("0.61.0",)
    takes_session = True
    environment: ClassVar[Mapping[str, str]] = {"NO_BROWSER": "true"}

    def _argv(self, call: Call, files: Mapping[str, str]) -> Iterator[str]:
        yield self.name
        yield from call.args
        yield "--output-format=stream-json"
        yield from _PERMISSIONS[call.permissions]
        yield from model_and_session(call)
        if feedback_path(call) in files:
            yield f"--include-directories={call.folder}"

    def reader(self, call: Call, prices: Prices | None = None) -> Reader:
        """Return what reads the events."""
        return GeminiReader(call, prices)


class GeminiReader(Reader):
    """Reads the events of ``--output-format stream-json``."""

    exit_codes: ClassVar[Mapping[int, FailureKind]] = {
        41: FailureKind.NOT_AUTHENTICATED,
        55: FailureKind.NOT_PERMITTED,
    }

    def __init__(self, call: Call, prices: Prices | None = None) -> None:
        super().__init__(call, prices)
        self._tools: dict[str, str] = {}
        self._answer = ""

    def event(self, message: dict[str, Any]) -> Iterator[Event]:
        """Yield what an event says."""
        match message.get("type"):
            case "init":
                self.model = text_in(message, "model") or self.model
                yield from self.in_session(message.get("session_id"))
            case "message" if message.get("role") == "assistant":
                text = text_in(message, "content")
                self._answer += text
                yield Said(text=text)
            case "tool_use":
                self._answer = ""  # what it says last is after its last tool
                tool = text_in(message, "tool_name")
                self._tools[text_in(message, "tool_id")] = tool
                yield Acted(tool=tool, detail=in_few_words(message.get("parameters")))
            case "tool_result" if member(message, "error", "type") in _NOT_PERMITTED:
                tool = self._tools.get(text_in(message, "tool_id"), "")
                yield Denied(tool=tool, detail=text_in(message, "error", "message"))
            case "result":
                yield from self._result(message)
            case _:
                pass

    def _result(self, message: dict[str, Any]) -> Iterator[Event]:
        total = Totals()
        models = member(message, "stats", "models")
        for each in models.values() if type(models) is dict else ():
            given = tokens(member(each, "input_tokens"))
            # Its output tokens lack those of thoughts, which the total has.
            made = max(0, tokens(member(each, "total_tokens")) - given)
            total = total.plus(with_cached_inside(given, made, member(each, "cached")))
        yield from self.used(self.meter.call(total))
        self.is_done = True
        self.text = self._answer
        if message.get("status") != "success":
            said = text_in(message, "error", "message") or "it does not say why"
            self.failed(said, _code(said))

    def prose(self, line: str) -> Iterator[Event]:
        """Yield that it waits, which it says in prose, on standard error."""
        yield from super().prose(line)
        if line.startswith("Attempt ") and "Retrying" in line:
            is_limit = "status 429" in line
            kind = FailureKind.RATE_LIMITED if is_limit else FailureKind.UNAVAILABLE
            yield Waiting(kind=kind, message=line.strip()[:500])


_NOT_PERMITTED = frozenset({"tool_not_registered", "policy_violation", "permission_denied"})


def _code(said: str) -> object:
    """Return the status in a message that quotes a response."""
    _, brace, rest = said.partition("{")
    try:
        return member(json.loads(brace + rest.rpartition("}")[0] + "}"), "error", "code")
    except (ValueError, RecursionError):
        return None
