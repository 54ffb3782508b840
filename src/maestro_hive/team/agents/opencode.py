"""OpenCode: ``opencode run --format json``; it names its sessions itself, and reports by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from maestro_hive.team.agents.adapter import Adapter, feedback_path
from maestro_hive.team.agents.calls import Call, Permissions, Totals
from maestro_hive.team.agents.events import Acted, Denied, Event, Said
from maestro_hive.team.agents.metering import micros, tokens
from maestro_hive.team.agents.reading import Reader, in_few_words, member, text_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from maestro_hive.engine.prices import Prices

_PERMISSIONS = {
    # Its own settings let it change files and run commands, where nobody has changed them.
    Permissions.OWN: (),
    Permissions.EDIT: (),
    Permissions.ALL: ("--auto",),
}


class Opencode(Adapter):
    """The adapter of OpenCode."""

    name = "opencode"
    install = "npm install -g opencode-ai"
    tried = ("1.18.33",)
    takes_session = False
    environment: ClassVar[Mapping[str, str]] = {"OPENCODE_DISABLE_AUTOUPDATE": "1"}

    def _argv(self, call: Call, files: Mapping[str, str]) -> Iterator[str]:
        yield from (self.name, "run")
        yield from call.args
        yield "--format=json"
        yield from _PERMISSIONS[call.permissions]
        if call.model:
            yield f"--model={call.model}"
        if call.resumes:
            yield f"--session={call.resumes}"
        else:
            yield "--title=maestro"  # else a model is asked for one, and nobody counts that
        if feedback_path(call) in files:
            yield f"--file={feedback_path(call)}"

    def reader(self, call: Call, prices: Prices | None = None) -> Reader:
        """Return what reads the events."""
        return OpencodeReader(call, prices)


class OpencodeReader(Reader):
    """Reads the events of ``--format json``."""

    def event(self, message: dict[str, Any]) -> Iterator[Event]:
        """Yield what an event says."""
        yield from self.in_session(message.get("sessionID"))
        part = message.get("part")
        match message.get("type"):
            case "text" if not member(part, "synthetic"):
                self.text = text_in(part, "text")
                yield Said(text=self.text)
            case "tool_use":
                yield from _acted(part)
            case "step_finish":
                yield from self._step(part)
            case "error":
                self._error(message.get("error"))
            case _:
                pass

    def _step(self, part: object) -> Iterator[Event]:
        counts = member(part, "tokens")
        cost = micros(member(part, "cost"))
        so_far = Totals(
            tokens(member(counts, "input")),
            tokens(member(counts, "output")) + tokens(member(counts, "reasoning")),
            tokens(member(counts, "cache", "read")),
            tokens(member(counts, "cache", "write")),
            cost,
        )
        yield from self.used(self.meter.message(text_in(part, "id"), so_far), has_usd=cost > 0)
        self.is_done = member(part, "reason") != "tool-calls"
        self.failure = None  # it has recovered, as it does by shortening its context

    def _error(self, error: object) -> None:
        data = member(error, "data")
        name = text_in(error, "name")
        self.failed(
            text_in(data, "message") or name or "it does not say why",
            member(data, "statusCode") if name == "APIError" else name,
            retry_after=member(data, "responseHeaders", "retry-after"),
        )


def _acted(part: object) -> Iterator[Event]:
    tool, state = text_in(part, "tool"), member(part, "state")
    yield Acted(tool=tool, detail=in_few_words(member(state, "input")))
    error = text_in(state, "error")
    if member(state, "status") == "error" and "permission" in error.lower():
        yield Denied(tool=tool, detail=error)
