"""What is common to the adapters of all agents: prompts, versions, sessions."""

from __future__ import annotations

import json
import re
import uuid
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.team.agents.calls import Command, Session, as_used

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from maestro_hive.engine.prices import Prices
    from maestro_hive.team.agents.calls import Call
    from maestro_hive.team.agents.reading import Reader

#: Longer feedback goes into a file, and its end into the prompt.
LONG_FEEDBACK = 8_000
_SHOWN_FEEDBACK = 2_000
#: A longer schema is no argument of a command.
_MOST_SCHEMA = 100_000
_LEAST_USD = 0.000001
#: What these stand for at the start of a prompt is a command to the agent itself.
_COMMANDS = ("/", "!", "@", "#", "-")
_SESSIONS = uuid.UUID("6f6fb7ac-2c36-5a3f-9a53-0d0c0a5b8d0e")
_VERSION = re.compile(r"\b(\d{1,6})\.(\d{1,6})\.(\d{1,9})\b")


class Adapter(ABC):
    """Knows one agent: its program, its flags and its output."""

    #: The name in a graph, and of the program.
    name: ClassVar[str]
    #: How it is installed.
    install: ClassVar[str]
    #: The versions that it was tried with, the oldest first.
    tried: ClassVar[tuple[str, ...]]
    #: Whether it is told the id of a session; else it says which one it has started.
    takes_session: ClassVar[bool]
    #: Whether it has a structured result.
    has_schema: ClassVar[bool] = False
    #: What is added to its environment.
    environment: ClassVar[Mapping[str, str]] = {}

    @property
    def version_argv(self) -> tuple[str, ...]:
        """Return the command that prints the version."""
        return (self.name, "--version")

    def version_warning(self, printed: str) -> str | None:
        """Return what to say about the version that was printed; None if it was tried."""
        known = [_numbers(each) for each in self.tried]
        found = _numbers(printed)
        if found and known[0][:2] <= found[:2] <= known[-1][:2]:
            return None
        which = ".".join(map(str, found)) or "of an unknown version"
        return (
            f"{self.name} {which} was not tried with this version of maestro-hive (tried:"
            f" {', '.join(self.tried)}); its flags or its output may differ"
        )

    def new_session(self, seed: str) -> Session | None:
        """Return a session for a first call, the same for the same seed; None if the agent names it."""
        return Session(id=str(uuid.uuid5(_SESSIONS, seed))) if self.takes_session else None

    def command(self, call: Call) -> Command:
        """Return what is to be started for a call."""
        if not call.folder.startswith("/"):
            raise ConfigurationError(f"{call.folder!r} is no absolute path of a folder")
        if call.budget_usd is not None and call.budget_usd < _LEAST_USD:
            raise ConfigurationError(
                f"{call.budget_usd} US dollars are no budget of a call: nothing is left to spend"
            )
        if call.schema is not None and len(json.dumps(dict(call.schema))) > _MOST_SCHEMA:
            raise ConfigurationError(
                f"the schema of the result has more than {_MOST_SCHEMA:,} characters; shorten it"
            )
        files = self._files(call)
        return Command(
            argv=tuple(self._argv(call, files)),
            stdin=_prompt(call, files),
            environment=dict(self.environment),
            files=files,
            session=as_used(call.session) if self.takes_session else call.session,
        )

    @abstractmethod
    def reader(self, call: Call, prices: Prices | None = None) -> Reader:
        """Return what reads the output of a call; ``prices`` are those of its models, where known."""

    @abstractmethod
    def _argv(self, call: Call, files: Mapping[str, str]) -> Iterator[str]:
        """Yield the arguments; the prompt is not among them."""

    def _files(self, call: Call) -> dict[str, str]:
        """Return the files that are written before the start."""
        if len(call.feedback) <= LONG_FEEDBACK:
            return {}
        return {feedback_path(call): call.feedback}


def model_and_session(call: Call) -> Iterator[str]:
    """Yield the flags for both, as claude has them and those that follow its command line."""
    if call.model:
        yield f"--model={call.model}"
    if call.session is not None:
        flag = "--resume" if call.session.started else "--session-id"
        yield f"{flag}={call.session.id}"


def feedback_path(call: Call) -> str:
    """Return where long feedback is written."""
    return f"{call.folder}/feedback.txt"


def schema_path(call: Call) -> str:
    """Return where the schema of a result is written, for agents that read it from a file."""
    return f"{call.folder}/schema.json"


def _prompt(call: Call, files: Mapping[str, str]) -> str:
    """Return what the agent is told, on its standard input."""
    task = call.prompt.replace("\0", "")
    feedback = _feedback(call, files).replace("\0", "")
    if call.resumes and feedback:
        return f"The task is not done yet.\n\n{feedback}\n\nThe task was:\n\n{task}\n"
    if call.resumes:
        return "You were interrupted. See what is done already, and go on. The task is:\n\n" + task
    if feedback:
        return f"The task:\n\n{task}\n\n{feedback}\n"
    return f"The task:\n\n{task}" if task.lstrip().startswith(_COMMANDS) else task


def _feedback(call: Call, files: Mapping[str, str]) -> str:
    if not call.feedback.strip():
        return ""
    path = feedback_path(call)
    if path not in files:
        return f"What failed before:\n\n{call.feedback.strip()}"
    end = call.feedback.strip()[-_SHOWN_FEEDBACK:]
    return f"What failed before is in the file {path}: read it. It ends with:\n\n{end}"


def _numbers(text: str) -> tuple[int, ...]:
    found = _VERSION.search(text)
    return tuple(int(each) for each in found.groups()) if found else ()


def plain_number(amount: float) -> str:
    """Return an amount of money as digits, without an exponent."""
    return f"{amount:.6f}".rstrip("0").rstrip(".")
