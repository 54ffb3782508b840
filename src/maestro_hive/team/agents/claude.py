"""Claude Code: ``claude -p`` with events of its stream."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, ClassVar

from maestro_hive.team.agents.adapter import Adapter, feedback_path, model_and_session, plain_number
from maestro_hive.team.agents.calls import Call, Permissions, Totals
from maestro_hive.team.agents.events import Acted, Denied, Event, Said, Waiting
from maestro_hive.team.agents.failures import Failure, FailureKind, kind_of, quoted
from maestro_hive.team.agents.metering import micros, tokens
from maestro_hive.team.agents.reading import Reader, in_few_words, member, objects_in, text_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from maestro_hive.engine.prices import Prices

#: From this version on ``modelUsage`` and the cost are those of the whole session.
_WHOLE_SESSION = (2, 1, 325)
_PERMISSIONS = {
    Permissions.OWN: (),
    Permissions.EDIT: ("--permission-mode=acceptEdits",),
    Permissions.ALL: ("--dangerously-skip-permissions",),
}


class Claude(Adapter):
    """The adapter of Claude Code."""

    name = "claude"
    install = "npm install -g @anthropic-ai/claude-code"
    tried = ("2.1.197", "2.1.326")
    takes_session = True
    has_schema = True
    environment: ClassVar[Mapping[str, str]] = {"DISABLE_AUTOUPDATER": "1"}

    def _argv(self, call: Call, files: Mapping[str, str]) -> Iterator[str]:
        yield self.name
        yield from call.args
        # Only with partial messages is the output of a message counted before the call ends.
        yield from ("-p", "--output-format=stream-json", "--verbose", "--include-partial-messages")
        yield from _PERMISSIONS[call.permissions]
        yield from model_and_session(call)
        if call.budget_usd is not None:
            yield f"--max-budget-usd={plain_number(call.budget_usd)}"
        if call.schema is not None:
            yield f"--json-schema={json.dumps(dict(call.schema))}"
        if feedback_path(call) in files:
            yield f"--add-dir={call.folder}"

    def reader(self, call: Call, prices: Prices | None = None) -> Reader:
        """Return what reads the events."""
        return ClaudeReader(call, prices)


class ClaudeReader(Reader):
    """Reads the events of ``--output-format stream-json``."""

    def __init__(self, call: Call, prices: Prices | None = None) -> None:
        super().__init__(call, prices)
        self._version: tuple[int, ...] = ()
        self._message = ""
        self._so_far: dict[str, int] = {}
        #: What it calls the error that its last message is about.
        self._error: object = None

    def event(self, message: dict[str, Any]) -> Iterator[Event]:
        """Yield what an event says."""
        match message.get("type"), message.get("subtype"):
            case "system", "init":
                self._version = _version(text_in(message, "claude_code_version"))
                self.model = text_in(message, "model") or self.model
                yield from self.in_session(message.get("session_id"))
            case "system", "api_retry":
                yield _waiting(message)
            case "system", "permission_denied":
                detail = text_in(message, "message")
                yield Denied(tool=text_in(message, "tool_name"), detail=detail)
            case "stream_event", _:
                yield from self._streamed(member(message, "event"))
            case "assistant", _:
                self._error = message.get("error")
                yield from _said(message)
            case "result", _:
                yield from self._result(message)
            case _:
                pass

    def _streamed(self, event: object) -> Iterator[Event]:
        """Count a message while it comes: its first event has the input, the last the output."""
        if member(event, "type") == "message_start":
            self._message = text_in(event, "message", "id")
            self._so_far = {}
            usage = member(event, "message", "usage")
            self.model = text_in(event, "message", "model") or self.model
        elif member(event, "type") == "message_delta":
            usage = member(event, "usage")
        else:
            return
        names = ("input_tokens", "output_tokens", "cache_read_input_tokens")
        for name in (*names, "cache_creation_input_tokens"):
            self._so_far[name] = max(self._so_far.get(name, 0), tokens(member(usage, name)))
        if member(event, "type") == "message_start":
            return  # the number of its output is only a start
        so_far = Totals(*self._so_far.values())
        yield from self.used(self.meter.message(self._message, so_far, self.model), has_usd=True)

    def _result(self, message: dict[str, Any]) -> Iterator[Event]:
        yield from self.in_session(message.get("session_id"))
        for denied in objects_in(message, "permission_denials"):
            if (tool := text_in(denied, "tool_name")) not in self.denied:
                yield Denied(tool=tool, detail=in_few_words(denied.get("tool_input")))
        yield from self.used(self._counted(message), has_usd=True)
        self.text = text_in(message, "result")
        self.structured = message.get("structured_output")
        self.is_done = True
        listed = member(message, "errors")
        errors = "\n".join(map(str, listed)) if type(listed) is list else ""
        if message.get("subtype") == "error_max_budget_usd":
            self.failure = Failure(kind=FailureKind.BUDGET, message=quoted(errors))
        elif message.get("is_error") is True:
            self._failed(message, errors)

    def _failed(self, message: dict[str, Any], errors: str) -> None:
        """Remember why: its result is an error of its own only where its session went well."""
        code = message.get("api_error_status") or self._error
        is_own = message.get("subtype") == "success"
        if own := (self.text if is_own else errors) or errors:
            self.failed(own, code)
        else:
            self.gave_up(self.text or f"it ended with {message.get('subtype')}")

    def _counted(self, message: dict[str, Any]) -> Totals:
        """Count what the result reports: by model, of the call or of the session; or else the usage."""
        by_model = _by_model(message.get("modelUsage"))
        if not any(by_model):
            return self.meter.call(_usage(message))
        if self._version < _WHOLE_SESSION:
            return self.meter.call(by_model)
        # That of the call comes first: a session may have forgotten a call that was killed.
        of_call = self.meter.call(_by_model(message.get("model_usage_since_last_result")))
        return of_call.plus(self.meter.whole_session(by_model))


def _said(message: dict[str, Any]) -> Iterator[Event]:
    if message.get("error") is not None:
        return  # its text is in the result
    for block in objects_in(message, "message", "content"):
        if block.get("type") == "text" and (text := text_in(block, "text")):
            yield Said(text=text)
        elif block.get("type") == "tool_use":
            yield Acted(tool=text_in(block, "name"), detail=in_few_words(block.get("input")))


def _waiting(message: dict[str, Any]) -> Waiting:
    status, error = message.get("error_status"), text_in(message, "error")
    delay = message.get("retry_delay_ms")
    seconds = delay / 1000 if isinstance(delay, int | float) else None
    return Waiting(
        kind=kind_of(error, status),
        message=f"{error} (status {status}), attempt {message.get('attempt')}",
        seconds=seconds,
    )


def _by_model(usage: object) -> Totals:
    total = Totals()
    for each in usage.values() if type(usage) is dict else ():
        total = total.plus(
            Totals(
                tokens(member(each, "inputTokens")),
                tokens(member(each, "outputTokens")),
                tokens(member(each, "cacheReadInputTokens")),
                tokens(member(each, "cacheCreationInputTokens")),
                micros(member(each, "costUSD")),
            )
        )
    return total


def _usage(message: dict[str, Any]) -> Totals:
    usage = message.get("usage")
    return Totals(
        tokens(member(usage, "input_tokens")),
        tokens(member(usage, "output_tokens")),
        tokens(member(usage, "cache_read_input_tokens")),
        tokens(member(usage, "cache_creation_input_tokens")),
        micros(message.get("total_cost_usd")),
    )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d{1,9}", text)[:3])
