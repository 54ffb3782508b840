"""Qwen Code: ``qwen`` with events of its stream; it reports what all of a session used."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from maestro_hive.team.agents.adapter import Adapter, feedback_path, model_and_session
from maestro_hive.team.agents.calls import Call, Permissions, Totals
from maestro_hive.team.agents.events import Acted, Denied, Event, Said
from maestro_hive.team.agents.metering import with_cached_inside
from maestro_hive.team.agents.reading import Reader, in_few_words, member, objects_in, text_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from maestro_hive.engine.prices import Prices

_PERMISSIONS = {
    Permissions.OWN: (),
    Permissions.EDIT: ("--approval-mode=auto-edit",),
    Permissions.ALL: ("--approval-mode=yolo",),
}
#: What it answers with, and exit code 0, if a request failed.
_FAILED = "[API Error: "


class Qwen(Adapter):
    """The adapter of Qwen Code."""

    name = "qwen"
    install = "npm install -g @qwen-code/qwen-code"
    tried = ("0.15.10",)
    takes_session = True
    has_schema = True

    def _argv(self, call: Call, files: Mapping[str, str]) -> Iterator[str]:
        yield self.name
        yield from call.args
        yield "--output-format=stream-json"
        yield from _PERMISSIONS[call.permissions]
        yield from model_and_session(call)
        if call.schema is not None:
            yield f"--json-schema={json.dumps(dict(call.schema))}"
        if feedback_path(call) in files:
            yield f"--include-directories={call.folder}"

    def reader(self, call: Call, prices: Prices | None = None) -> Reader:
        """Return what reads the events."""
        return QwenReader(call, prices)


class QwenReader(Reader):
    """Reads the events of ``--output-format stream-json``."""

    def __init__(self, call: Call, prices: Prices | None = None) -> None:
        super().__init__(call, prices)
        self._is_answered = True

    def event(self, message: dict[str, Any]) -> Iterator[Event]:
        """Yield what an event says."""
        match message.get("type"), message.get("subtype"):
            case "system", "init":
                self.model = text_in(message, "model") or self.model
                yield from self.in_session(message.get("session_id"))
            case "assistant", _:
                yield from self._message(member(message, "message"))
            case "result", _:
                yield from self._result(message)
            case _:
                pass

    def _message(self, message: object) -> Iterator[Event]:
        so_far = _usage(member(message, "usage"))
        self._is_answered = any(so_far)
        key = text_in(message, "id")
        yield from self.used(self.meter.message(key, so_far))
        for block in objects_in(message, "content"):
            text = text_in(block, "text")
            if block.get("type") == "tool_use":
                yield Acted(tool=text_in(block, "name"), detail=in_few_words(block.get("input")))
            elif text and (self._is_answered or not text.startswith(_FAILED)):
                yield Said(text=text)

    def _result(self, message: dict[str, Any]) -> Iterator[Event]:
        yield from self.used(self.meter.whole_session(_usage(message.get("usage"))))
        for denied in objects_in(message, "permission_denials"):
            detail = in_few_words(denied.get("tool_input"))
            yield Denied(tool=text_in(denied, "tool_name"), detail=detail)
        self.text = text_in(message, "result")
        self.structured = message.get("structured_result")
        self.is_done = True
        if message.get("is_error") is True:
            if error := text_in(message, "error", "message"):
                self.failed(error)
            else:
                self.gave_up(self.text)
        elif self.text.startswith(_FAILED) and not self._is_answered:
            self.failed(self.text)


def _usage(usage: object) -> Totals:
    return with_cached_inside(
        member(usage, "input_tokens"),
        member(usage, "output_tokens"),
        member(usage, "cache_read_input_tokens"),
    )
