"""Reading the output of an agent, line by line."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from maestro_hive.team.agents.calls import Session, Totals, is_session_id
from maestro_hive.team.agents.events import (
    Acted,
    Denied,
    Event,
    Outcome,
    Said,
    SessionKnown,
    Used,
    Waiting,
)
from maestro_hive.team.agents.failures import (
    Failure,
    FailureKind,
    failure_of,
    kind_in_output,
    quoted,
)
from maestro_hive.team.agents.metering import Meter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from maestro_hive.engine.prices import Prices
    from maestro_hive.team.agents.calls import Call

#: How many characters of lines that are no events are remembered, for the message of a failure.
_PROSE = 4_000
#: A line that is longer than this is no event.
_LONGEST_LINE = 32_000_000


class Reader(ABC):
    """Reads one call's output; subclasses know one agent's events.

    It never raises: a line that is no event, or one of another form than expected, is skipped.
    """

    #: What the agent's exit codes mean.
    exit_codes: ClassVar[Mapping[int, FailureKind]] = {}

    def __init__(self, call: Call, prices: Prices | None = None) -> None:
        self._call = call
        self._session = call.session
        self._is_told = False
        self._meter = Meter(call.session.counted if call.session else Totals(), prices)
        #: What its subclasses find.
        self.model = call.model or ""
        self.text = ""
        self.structured: Any = None
        self.failure: Failure | None = None
        self.is_done = False
        self._waits: Waiting | None = None
        #: The tools that it was not permitted to use.
        self.denied: list[str] = []
        self._prose = ""
        self._pieces: list[str] = []
        self._length = 0
        #: The line that is being read.
        self.line = ""

    def feed(self, piece: str) -> list[Event]:
        """Return what a piece of the output says, which may be a part of a line, or several.

        Only a line feed ends a line: in an event other separators are text.
        """
        events: list[Event] = []
        *ended, rest = piece.split("\n")
        for part in ended:
            events += self.read("".join([*self._pieces, part]))
            self._pieces.clear()
            self._length = 0
        if rest and self._length <= _LONGEST_LINE:  # of a longer one the rest is left out
            self._pieces.append(rest)
            self._length += len(rest)
        return events

    def read(self, line: str) -> list[Event]:
        """Return what a line of the output says."""
        self.line = line
        try:
            message = json.loads(line) if line.lstrip().startswith("{") else None
        except (ValueError, RecursionError):
            message = None
        found = self.event(message) if type(message) is dict else self.prose(line)
        events = []
        for each in found:
            if isinstance(each, Denied):
                self.denied.append(each.tool)
            if isinstance(each, Waiting):
                self._waits = each
            elif isinstance(each, Said | Acted | Used):
                self._waits = None  # a model has answered since
            events.append(each)
        return events

    @abstractmethod
    def event(self, message: dict[str, Any]) -> Iterator[Event]:
        """Yield what an event of the agent says."""

    def prose(self, line: str) -> Iterator[Event]:
        """Yield what a line says that is no event; it is remembered for the message of a failure."""
        self._prose = f"{self._prose}{line.rstrip()}\n"[-_PROSE:]
        yield from ()

    # --- what subclasses say ----------------------------------------------------------------------

    def in_session(self, found: object) -> Iterator[Event]:
        """Yield that the session is known, once."""
        if self._is_told or not is_session_id(found):
            return
        self._is_told = True
        counted = self._session.counted if self._session else Totals()
        if self._session is None or self._session.id != found:
            counted = Totals()  # the agent has started another one
            self._meter.session = counted
        self._session = Session(id=str(found), started=True, counted=counted)
        yield SessionKnown(session=self._session)

    def used(self, more: Totals, *, has_usd: bool = False) -> Iterator[Event]:
        """Yield what was used, if anything was."""
        if self._session is not None:
            self._session = replace(self._session, counted=self._meter.session)
        if any(more):
            yield Used(amount=more, model=self.model, has_usd=has_usd, session=self._session)

    @property
    def meter(self) -> Meter:
        """Return what counts."""
        return self._meter

    def failed(self, message: object, code: object = None, *, retry_after: object = None) -> None:
        """Remember why the call failed: by a code, or an error of the agent's own."""
        text = message if isinstance(message, str) else json.dumps(message)[:_PROSE]
        found = failure_of(text, code, retry_after=retry_after)
        waits = self._waits
        if found.retry_after is None and waits is not None and waits.kind is found.kind:
            found = replace(found, retry_after=waits.seconds)
        self.failure = found

    def gave_up(self, said: str) -> None:
        """Remember that the call failed, of which there is only what the model said."""
        self.failure = Failure(kind=FailureKind.FAILED, message=quoted(said))

    # --- the end ----------------------------------------------------------------------------------

    def end(self, code: int, errors: str = "") -> Outcome:
        """Return how the call ended, by the exit code and what was written to standard error.

        What that was may have been read as well, in its place.
        """
        last = self.feed("\n")  # of a line without an end
        failure = self.failure or self._failure_at_end(code, errors.strip())
        if failure is None and self._call.schema is not None and self.structured is None:
            said = quoted(self.text) or "nothing"
            failure = Failure(
                kind=FailureKind.NO_STRUCTURE,
                message=f"the result is not what the schema asks for, but: {said}",
            )
        return Outcome(
            text=self.text,
            failure=failure,
            structured=None if failure else self.structured,
            session=self._next_session(failure),
            denied=tuple(dict.fromkeys(self.denied)),
            events=tuple(last),
        )

    def _failure_at_end(self, code: int, errors: str) -> Failure | None:
        said = errors or self._prose.strip()
        if code > 0:
            kind = self.exit_codes.get(code) or self.kind_at_end(said)
            message = f"it ended with exit code {code}: {quoted(said)}"
            return Failure(kind=kind, message=message)
        if code == 0 and self.is_done:
            return None
        if self._waits is not None:
            waits = self._waits
            return Failure(kind=waits.kind, message=waits.message, retry_after=waits.seconds)
        how = f"was ended by signal {-code}" if code else "ended"
        return Failure(kind=FailureKind.CUT, message=f"it {how} without a result. {quoted(said)}")

    def kind_at_end(self, said: str) -> FailureKind:
        """Return the kind of a failure by what is no event of an output that ended with an exit code."""
        return kind_in_output(said)

    def _next_session(self, failure: Failure | None) -> Session | None:
        session = self._session
        if session is None:
            return None
        match failure:
            case Failure(kind=FailureKind.NO_SESSION):
                return replace(session, started=False)
            case Failure(kind=FailureKind.CONTEXT_FULL):
                return None
            case _:
                return replace(session, started=True, counted=self._meter.session)


def member(value: object, *names: str) -> Any:
    """Return a member of nested objects; None where there is none."""
    for name in names:
        value = value.get(name) if type(value) is dict else None
    return value


def text_in(value: object, *names: str) -> str:
    """Return a text in nested objects; an empty one where there is none."""
    found = member(value, *names)
    return found if type(found) is str else ""


def objects_in(value: object, *names: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of a list in nested objects."""
    found = member(value, *names)
    for each in found if type(found) is list else ():
        if type(each) is dict:
            yield each


def in_few_words(given: object) -> str:
    """Return what a tool is called with as one short line."""
    words = [each for each in given.values() if type(each) is str] if type(given) is dict else []
    return " ".join(" ".join(words[:1]).split())[:120]
