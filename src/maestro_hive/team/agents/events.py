"""What the output of an agent says, as events; and how a call ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from maestro_hive.maestro.state.strict_json import Json
    from maestro_hive.team.agents.calls import Session, Totals
    from maestro_hive.team.agents.failures import Failure, FailureKind


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionKnown:
    """The agent works in this session; record it, so that the next attempt can resume it."""

    session: Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The agent said something."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Acted:
    """The agent uses a tool."""

    tool: str
    #: What for, in a few words, where the output says it.
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Denied:
    """The agent was not permitted to use a tool."""

    tool: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A model refused a request, and the agent tries again by itself."""

    kind: FailureKind
    message: str
    #: After how long, where the output says it.
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """The agent used this much more: what no earlier event has counted.

    ``session`` is recorded with it, so that what is counted is not counted again after a kill.
    """

    amount: Totals
    model: str = ""
    #: Whether the money of ``amount`` is known; else the price of the model says it.
    has_usd: bool = False
    session: Session | None = None

    def spent(self) -> dict[str, Any]:
        """Return the arguments of ``maestro_hive.current().spend``."""
        usage = {
            "input_tokens": self.amount.input,
            "output_tokens": self.amount.output,
            "cache_creation_input_tokens": self.amount.written,
            "cache_read_input_tokens": self.amount.cached,
        }
        return {
            **({"usage": usage} if any(usage.values()) else {}),
            "usd": self.amount.usd / 1e6 if self.has_usd else None,
            "model": self.model,
        }


Event: TypeAlias = SessionKnown | Said | Acted | Denied | Waiting | Used


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a call of an agent ended."""

    #: What it said last.
    text: str
    #: Why it failed; None if it did not.
    failure: Failure | None = None
    #: Its result against the schema of the call; None if there is none.
    structured: Json = None
    #: The session for the next call.
    session: Session | None = None
    #: The tools that it was not permitted to use.
    denied: tuple[str, ...] = ()
    #: What a last line without an end has said, as the other events.
    events: tuple[Event, ...] = ()

    @property
    def try_again_now(self) -> bool:
        """Return whether only the session was wrong: another call with ``session`` costs no attempt."""
        return self.failure is not None and self.failure.is_about_session
