"""What an agent is called with, and the command that calls it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from maestro_hive.engine.usage import MOST_TOKENS
from maestro_hive.kernel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from maestro_hive.maestro.state.strict_json import Json

#: An id of a session: it is an argument, and of some agents the name of a file.
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")


class Permissions(StrEnum):
    """What an agent may do without being asked, as the graph says."""

    #: What its own settings say; no flag is given.
    OWN = "own"
    #: It may change files of the folder that it works in.
    EDIT = "edit"
    #: Everything: its own checks are switched off.
    ALL = "all"


class Totals(NamedTuple):
    """Tokens by kind, and money in millionths of a US dollar."""

    #: Input that was neither read from a cache nor written to one.
    input: int = 0
    output: int = 0
    #: Read from a provider's cache.
    cached: int = 0
    #: Written to a provider's cache.
    written: int = 0
    usd: int = 0

    def plus(self, other: Totals) -> Totals:
        """Return the sum of both; a larger one than any that is right stays the largest."""
        pairs = zip(self, other, strict=True)
        return Totals(*(min(mine + theirs, MOST_TOKENS) for mine, theirs in pairs))

    def beyond(self, other: Totals) -> Totals:
        """Return by how much this is more than another, part by part; never less than nothing."""
        return Totals(*(max(0, mine - theirs) for mine, theirs in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A conversation with an agent, which its next call goes on with; recorded by who calls it."""

    id: str
    #: Whether a call may have used it: the next one resumes it.
    started: bool = False
    #: What was counted of it up to now, for agents that report all that a session used.
    counted: Totals = field(default_factory=Totals)

    def __post_init__(self) -> None:
        if not is_session_id(self.id):
            raise ConfigurationError(
                f"{self.id!r:.80} is no id of a session; use up to 128 characters of A-Z, a-z, 0-9,"
                " '-' and '_', starting with a letter or digit"
            )

    def to_json(self) -> dict[str, Json]:
        """Return it as JSON values, to be recorded."""
        return {"id": self.id, "started": self.started, "counted": list(self.counted)}

    @classmethod
    def from_json(cls, value: Json) -> Self:
        """Return a session that was recorded; raise ``ConfigurationError`` if it is none."""
        counted = value.get("counted") if isinstance(value, dict) else None
        good = (
            isinstance(value, dict)
            and isinstance(value.get("id"), str)
            and isinstance(counted, list)
            and len(counted) == len(Totals._fields)
            and all(type(each) is int and 0 <= each <= MOST_TOKENS for each in counted)
        )
        if not good:
            raise ConfigurationError(f"this is no recorded session of an agent: {value!r:.200}")
        return cls(
            id=value["id"], started=value.get("started") is True, counted=Totals(*counted or ())
        )


def is_session_id(value: object) -> bool:
    """Return whether something can be the id of a session; it comes from the output of a program."""
    return isinstance(value, str) and _ID.fullmatch(value) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What one call of an agent is made of."""

    prompt: str
    #: A folder of its own, as absolute path, for long texts; it exists before the command starts.
    folder: str
    model: str | None = None
    #: The session that it is made in; None starts one whose id the agent gives.
    session: Session | None = None
    #: What it may spend, in US dollars; agents without such a limit are not told.
    budget_usd: float | None = None
    #: The JSON Schema of its result; agents without structured output are not told.
    schema: Mapping[str, Any] | None = None
    #: What failed before.
    feedback: str = ""
    permissions: Permissions = Permissions.OWN
    #: Further arguments, which the graph gives.
    args: tuple[str, ...] = ()

    @property
    def resumes(self) -> str | None:
        """Return the id of the session to go on with; None if it is a new one."""
        return self.session.id if self.session is not None and self.session.started else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What is started: nothing of it goes through a shell."""

    argv: tuple[str, ...]
    #: The prompt: no text of it can be taken for an argument.
    stdin: str
    #: Variables that are added to the environment.
    environment: Mapping[str, str] = field(default_factory=dict)
    #: What must be written before the start, by absolute path.
    files: Mapping[str, str] = field(default_factory=dict)
    #: What must be recorded before the start; None if the agent says it in its output.
    session: Session | None = None


def as_used(session: Session | None) -> Session | None:
    """Return a session as it is recorded before a call uses it."""
    return None if session is None else replace(session, started=True)
