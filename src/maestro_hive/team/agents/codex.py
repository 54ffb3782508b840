"""Codex: ``codex exec --json``; it names its sessions itself, and reports what all of one used."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from maestro_hive.team.agents.adapter import Adapter, schema_path
from maestro_hive.team.agents.calls import Call, Permissions
from maestro_hive.team.agents.events import Acted, Event, Said, Waiting
from maestro_hive.team.agents.failures import kind_of, wait_in
from maestro_hive.team.agents.metering import with_cached_inside
from maestro_hive.team.agents.reading import Reader, in_few_words, member, text_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from maestro_hive.engine.prices import Prices

_PERMISSIONS = {
    Permissions.OWN: (),
    Permissions.EDIT: ("-c", 'sandbox_mode="workspace-write"'),
    Permissions.ALL: ("--dangerously-bypass-approvals-and-sandbox",),
}


class Codex(Adapter):
    """The adapter of Codex."""

    name = "codex"
    install = "npm install -g @openai/codex"
    tried = ("0.169.0",)
    takes_session = False
    has_schema = True

    def _argv(self, call: Call, files: Mapping[str, str]) -> Iterator[str]:
        yield from (self.name, "exec")
        if call.resumes:
            yield "resume"
        yield from call.args
        yield from ("--json", "--skip-git-repo-check")
        yield from _PERMISSIONS[call.permissions]
        if call.model:
            yield f"--model={call.model}"
        if call.schema is not None:
            yield f"--output-schema={schema_path(call)}"
        # A lone dash is the standard input.
        yield from ("--", call.resumes, "-") if call.resumes else ("--", "-")

    def _files(self, call: Call) -> dict[str, str]:
        files = super()._files(call)
        if call.schema is not None:
            files[schema_path(call)] = json.dumps(dict(call.schema))
        return files

    def reader(self, call: Call, prices: Prices | None = None) -> Reader:
        """Return what reads the events."""
        return CodexReader(call, prices)


class CodexReader(Reader):
    """Reads the events of ``--json``."""

    def event(self, message: dict[str, Any]) -> Iterator[Event]:
        """Yield what an event says."""
        match message.get("type"):
            case "thread.started":
                yield from self.in_session(message.get("thread_id"))
            case "item.started":
                yield from _acted(message.get("item"))
            case "item.completed":
                yield from self._said(message.get("item"))
            case "error":
                said = text_in(message, "message")
                if said.startswith("Reconnecting"):
                    yield Waiting(kind=kind_of(said), message=said, seconds=wait_in(said))
            case "turn.completed":
                yield from self._completed(message.get("usage"))
            case "turn.failed":
                self.failed(member(message, "error", "message") or "it does not say why")
            case _:
                pass

    def _said(self, item: object) -> Iterator[Event]:
        if member(item, "type") == "agent_message" and (text := text_in(item, "text")):
            self.text = text
            yield Said(text=text)

    def _completed(self, usage: object) -> Iterator[Event]:
        total = with_cached_inside(
            member(usage, "input_tokens"),
            member(usage, "output_tokens"),
            member(usage, "cached_input_tokens"),
            member(usage, "cache_write_input_tokens"),
        )
        yield from self.used(self.meter.whole_session(total))
        self.is_done = True
        if self._call.schema is not None:
            self.structured = _parsed(self.text)


def _acted(item: object) -> Iterator[Event]:
    if (kind := text_in(item, "type")) and kind not in {"agent_message", "reasoning", "error"}:
        what = member(item, "command") or member(item, "tool") or member(item, "query")
        yield Acted(tool=kind, detail=in_few_words({"": what}))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
