"""Calls an agent for a task: in a session that is recorded first, its usage counted as it is read.

It is called inside of a step. The next attempt, also after a kill, goes on in the recorded session.
"""

from __future__ import annotations

import asyncio
import subprocess
import uuid
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from maestro_hive.engine.context import current, records_around
from maestro_hive.engine.values import in_thread
from maestro_hive.kernel.errors import StorageError
from maestro_hive.kernel.files import make_private_folder, reason_of
from maestro_hive.team.agents import (
    Acted,
    Denied,
    FailureKind,
    Said,
    Session,
    SessionKnown,
    Used,
    Waiting,
    adapter,
    call_for,
)
from maestro_hive.team.progress import one_more_handover
from maestro_hive.team.results import result_in

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from maestro_hive.engine.prices import Prices
    from maestro_hive.maestro.state.strict_json import Json
    from maestro_hive.team.agents import Command, Event, Outcome
    from maestro_hive.team.graph import Graph, Persona
    from maestro_hive.team.processes import Ended

    #: Executes a command; what it prints is passed on in pieces, in a thread.
    Execute = Callable[[Command, Callable[[str], None]], Awaitable[Ended]]

#: Under which name the session is in the progress of a step.
SESSION = "agent_session"
#: How often one attempt calls again because only the session was wrong.
_MOST_SESSION_ERRORS = 3
#: How long a chunk of the log is at most.
_CHUNK_CHARACTERS = 8_000


class AgentTask:
    """One attempt of an agent at a task; made inside of its step."""

    def __init__(
        self,
        persona: Persona,
        *,
        prompt: str,
        folder: Path,
        execute: Execute,
        budget_usd: float | None = None,
        prices: Prices | None = None,
        schema: dict[str, Json] | None = None,
    ) -> None:
        assert persona.agent is not None
        self._persona = persona
        self._adapter = adapter(persona.agent)
        self._prompt = prompt
        #: Of its calls, for long texts.
        self._folder = folder
        self._execute = execute
        #: What the step may spend, in all of its attempts.
        self._budget_usd = budget_usd
        self._prices = prices
        #: Of its result; agents that do not know schemas are told in the prompt alone.
        self._schema = schema
        self._context = current()
        self._saved: Json = self._context.progress.get(SESSION)
        self._session_errors = 0

    async def call(self) -> Json:
        """Return what the agent says when it is done; None if its context is full.

        If its result has a schema, it is the result; it is not checked yet. With a full context, the
        next call is made in a fresh session. What failed is raised, as the engine takes it.
        """
        while True:
            outcome, is_full = await self._call()
            failure = outcome.failure
            if failure is None:
                text = _clean(outcome.text)
                if self._schema is None or outcome.structured is not None:
                    return text if self._schema is None else outcome.structured
                return result_in(text)
            if outcome.try_again_now and self._session_errors < _MOST_SESSION_ERRORS:
                self._session_errors += 1
                continue
            if is_full:
                return None
            raise failure.error(self._adapter.name)

    async def _call(self) -> tuple[Outcome, bool]:
        """Make one call; return how it ended, and whether the next one needs a fresh session."""
        is_fresh = self._saved is None
        call = call_for(
            self._persona,
            prompt=self._prompt,
            folder=str(self._folder),
            session=self._session(),
            budget_usd=self._left(),
            schema=self._schema if self._adapter.has_schema else None,
            feedback="\n\n".join(self._context.feedback),
        )
        command = self._adapter.command(call)
        self._write_files(command)
        self._save(command.session)
        reader = self._adapter.reader(call, self._prices)
        has_worked = False

        def take(events: Iterable[Event]) -> None:
            nonlocal has_worked
            for each in events:
                has_worked = has_worked or isinstance(each, Said | Acted | Used)
                self._take(each)

        ended = await self._until_error(command, lambda piece: take(reader.feed(piece)))
        outcome = reader.end(ended.code)
        take(outcome.events)
        failure = outcome.failure
        is_full = failure is not None and failure.kind is FailureKind.CONTEXT_FULL
        # A task that fits into no context would not fit into the next one.
        is_full = is_full and (has_worked or not is_fresh)
        counted = one_more_handover(self._context.progress) if is_full else {}
        self._save(outcome.session, **counted)
        return outcome, is_full

    async def _until_error(self, command: Command, take: Callable[[str], None]) -> Ended:
        """Execute the command; end it when its output cannot be taken, as over a budget."""
        loop, errors = asyncio.get_running_loop(), list[Exception]()

        def write(piece: str) -> None:
            if errors:
                return
            try:
                take(piece)
            except Exception as error:
                errors.append(error)
                loop.call_soon_threadsafe(work.cancel)
                raise

        work = asyncio.ensure_future(self._execute(command, write))
        try:
            return await work
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not errors or (task is not None and task.cancelling()):
                raise
            raise errors[0] from None

    def _take(self, event: Event) -> None:
        match event:
            case SessionKnown():
                self._save(event.session)
            case Used():
                self._count(event)
            case Said():
                self._log(event.text)
            case Acted():
                self._log(f"{event.tool}: {event.detail}" if event.detail else event.tool)
            case Denied():
                self._log(f"not permitted: {event.tool} {event.detail}")
            case Waiting():
                self._log(f"{self._adapter.name} waits: {event.message}")

    def _count(self, event: Used) -> None:
        """Count what was used, in one record with the session: reports of it go on from there."""
        if event.session is None:
            self._context.spend(**event.spent())
            return
        self._saved = event.session.to_json()
        self._context.spend_and_save({SESSION: self._saved}, **event.spent())

    def _log(self, text: str) -> None:
        line = f"{_clean(text).rstrip()}\n"
        for start in range(0, len(line), _CHUNK_CHARACTERS):
            self._context.write(line[start : start + _CHUNK_CHARACTERS])

    def _session(self) -> Session | None:
        """Return the recorded session, or a new one, which no other run can have."""
        if self._saved is not None:
            return Session.from_json(self._saved)
        return self._adapter.new_session(uuid.uuid4().hex)

    def _save(self, session: Session | None, **more: Json) -> None:
        """Record the session for the next call, durably, and more with it."""
        value = None if session is None else session.to_json()
        if value != self._saved or more:
            self._context.save_progress(**{SESSION: value}, **more)
            self._saved = value

    def _left(self) -> float | None:
        """Return what the step may still spend."""
        if self._budget_usd is None:
            return None
        _, spent = next(records_around()).spent_in_all()
        return self._budget_usd - spent / 1e6

    def _write_files(self, command: Command) -> None:
        make_private_folder(self._folder)
        for path, text in command.files.items():
            try:
                Path(path).write_text(text, encoding="utf-8", errors="replace")
            except OSError as error:
                raise StorageError(f"{path} was not written: {reason_of(error)}") from error


def _clean(text: str) -> str:
    """Return a text that can be encoded: the output of a program may have half a character."""
    return text.encode("utf-8", "replace").decode("utf-8")


# --- versions -------------------------------------------------------------------------------------

#: For how many seconds an agent may think about its version.
_VERSION_SECONDS = 30.0


async def version_warnings(graph: Graph) -> list[str]:
    """Return what to say about the versions of a graph's agents; nothing about those that were tried."""
    personas = map(graph.persona_of, graph.tasks)
    agents = sorted({each.agent for each in personas if each is not None and each.agent})
    found = await asyncio.gather(*(in_thread(partial(_version_warning, each)) for each in agents))
    return [each for each in found if each is not None]


def _version_warning(agent: str) -> str | None:
    known = adapter(agent)
    try:
        done = subprocess.run(  # noqa: S603 - as the graph says
            known.version_argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_VERSION_SECONDS,
            check=False,
            start_new_session=True,
        )
    except (OSError, subprocess.TimeoutExpired):
        return known.version_warning("")
    return known.version_warning(done.stdout.decode("utf-8", "replace"))
