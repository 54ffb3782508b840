"""aider: its output is prose, and its log of events, which goes to the same place, is not.

It asks questions, and takes the end of its input for a yes, also to running commands. So it is told
to say yes itself, which it does not do for commands. What it is told may be a command to it as well:
a prompt never starts with one. A session is the file of its chat.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar

from maestro_hive.team.agents.adapter import Adapter, feedback_path
from maestro_hive.team.agents.calls import Call, Totals
from maestro_hive.team.agents.events import Event, Said, Waiting
from maestro_hive.team.agents.failures import FailureKind, kind_of, wait_in
from maestro_hive.team.agents.metering import micros, tokens
from maestro_hive.team.agents.reading import Reader, member

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from maestro_hive.engine.prices import Prices

#: What a graph may change by its own arguments.
_DEFAULTS = (
    # In a folder without a repository, a yes to its first question creates one.
    *("--no-git", "--no-show-model-warnings", "--no-detect-urls", "--no-suggest-shell-commands"),
    *("--no-check-update", "--no-show-release-notes", "--no-gitignore"),
)
#: What its output is read by. Nothing is sent anywhere: the log of events is only printed.
_NEEDED = (
    *("--yes-always", "--no-stream", "--no-pretty", "--no-fancy-input"),
    *("--no-analytics", "--analytics-log=/dev/stdout"),
)
#: An error of a provider, and its name.
_ERROR = re.compile(r"litellm\.(\w{1,60}): ")
_RETRYING = re.compile(r"Retrying in \d")


class Aider(Adapter):
    """The adapter of aider."""

    name = "aider"
    install = "python -m pip install aider-chat"
    tried = ("0.86.2",)
    takes_session = True
    environment: ClassVar[Mapping[str, str]] = {"NO_COLOR": "1"}

    def _argv(self, call: Call, files: Mapping[str, str]) -> Iterator[str]:
        yield self.name
        yield from _DEFAULTS
        yield from call.args
        yield from _NEEDED
        if call.model:
            yield f"--model={call.model}"
        if call.session is not None:
            # In the workplace they would be files that no task owns.
            chat = f"{call.folder}/{call.session.id}"
            yield f"--chat-history-file={chat}.chat.md"
            yield f"--input-history-file={chat}.input"
        if call.resumes:
            yield "--restore-chat-history"
        if feedback_path(call) in files:
            yield f"--read={feedback_path(call)}"
        yield "--message-file=/dev/stdin"

    def reader(self, call: Call, prices: Prices | None = None) -> Reader:
        """Return what reads the output."""
        return AiderReader(call, prices)


class AiderReader(Reader):
    """Reads prose, and the events of ``--analytics-log``."""

    def __init__(self, call: Call, prices: Prices | None = None) -> None:
        super().__init__(call, prices)
        self._sent = 0
        self._lines: list[str] = []
        self._error = self._name = ""

    def event(self, message: dict[str, Any]) -> Iterator[Event]:
        """Yield what an event of its log says; other objects are part of what it says."""
        match message.get("event"):
            case "launched":
                if self._call.session is not None:
                    yield from self.in_session(self._call.session.id)
            case "message_send_starting":
                self._lines = []
            case "message_send":
                yield from self._message(message.get("properties"))
            case "exit":
                yield from self._exit()
            case _:
                yield from self.prose(self.line)

    def _message(self, found: object) -> Iterator[Event]:
        self._sent += 1
        cost = micros(member(found, "cost"))
        used = Totals(
            tokens(member(found, "prompt_tokens")),
            tokens(member(found, "completion_tokens")),
            usd=cost,
        )
        yield from self.used(self.meter.message(str(self._sent), used), has_usd=cost > 0)
        self.is_done = True
        self._error = self._name = ""  # it has tried again, with success
        self.text = "\n".join(self._lines).strip()

    def _exit(self) -> Iterator[Event]:
        """It ends with exit code 0, whatever has happened."""
        if self._error:
            self.failed(self._error, self._name)
        yield from ()

    def kind_at_end(self, said: str) -> FailureKind:
        """Return the kind of a failure by the last error: what else is no event, a model may have said."""
        return kind_of(self._error, self._name)

    def prose(self, line: str) -> Iterator[Event]:
        """Yield what it says, and that it waits."""
        yield from super().prose(line)
        said = line.rstrip()
        if (found := _ERROR.match(said)) is not None:
            self._error, self._name = said, found[1]
        elif self._error and said and not _RETRYING.match(said):
            self._error = f"{self._error} {said}"[:2_000]
        if _RETRYING.match(said):
            seconds = wait_in(said)
            kind = kind_of(self._error, self._name)
            yield Waiting(kind=kind, message=self._error, seconds=seconds)
            return
        if found is None and not self._error and said and not said.startswith("Tokens: "):
            self._lines.append(said)
            yield Said(text=said)
