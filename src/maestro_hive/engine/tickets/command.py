"""Tickets made by a command of the user's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any

from maestro_hive.engine.tickets import Ticket, TicketRefusedError, TicketUnknownError
from maestro_hive.engine.tickets.one_way import OneWay, escalation_message

if TYPE_CHECKING:
    from maestro_hive.engine.escalation import EscalationCase

#: How much is read of what a command prints, and how much of that an error contains.
_MAX_OUTPUT = 64 * 1024
_MAX_ERROR = 500
#: How long a command may take to end after it was asked to.
_GRACE = 2.0


class CommandTickets(OneWay):
    """Starts a command, without a shell, with the failure as JSON on its standard input.

    It prints the key of the ticket as its first line, and may print its address as the second. An
    exit code other than 0 means that it made nothing. If it does not end in time, it and what it
    started are killed, and what it made is not known.
    """

    name = "command"

    def __init__(self, arguments: tuple[str, ...], timeout: float) -> None:
        self._command = UserCommand("escalation", arguments, timeout, "escalation_command")

    async def create(self, case: EscalationCase) -> Ticket:
        """Give a failure to the command."""
        lines = await self._command.output(escalation_message(case))
        if not lines or not lines[0].strip():
            raise TicketUnknownError(
                f"{self._command} ended with 0 and printed nothing, and must print the ticket's key"
            )
        address = lines[1].strip() if len(lines) > 1 else ""
        return Ticket(key=lines[0].strip(), address=address or None)


@dataclass(frozen=True, slots=True)
class UserCommand:
    """A command of the user's that is given messages; ``setting`` says where it was named."""

    kind: str
    arguments: tuple[str, ...]
    timeout: float
    setting: str

    async def output(self, message: dict[str, Any]) -> list[str]:
        """Execute the command; return the lines that it printed.

        It reads and prints files: pipes would stay open as long as anything that it started, and a
        command that prints much would have to be read all the time.
        """
        with TemporaryFile() as given, TemporaryFile() as printed, TemporaryFile() as errors:
            given.write(json.dumps(message, default=str).encode())
            given.seek(0)
            code = await self._execute(given, printed, errors)
            said = " ".join(_start_of(errors)[:_MAX_ERROR].split()) or "it printed no error"
            if code < 0:
                raise TicketUnknownError(
                    f"{self} was killed by signal {-code}: {said};"
                    " whether it made something is not known"
                )
            if code:
                raise TicketRefusedError(f"{self} ended with {code}: {said}")
            return _start_of(printed).splitlines()

    async def _execute(self, given: IO[bytes], printed: IO[bytes], errors: IO[bytes]) -> int:
        """Start the command in a process group of its own; return its exit code.

        All of the group is ended if the command takes too long, or if the call is cancelled.
        """
        try:
            process = subprocess.Popen(  # noqa: ASYNC220, S603 - a file of its own; the user's
                self.arguments, stdin=given, stdout=printed, stderr=errors, start_new_session=True
            )
        except (OSError, ValueError) as error:
            raise TicketRefusedError(
                f"{self} cannot be started: {error}; check {self.setting}",
                permanent=True,
            ) from error
        try:
            code = await _code(process, self.timeout)
        except BaseException:
            await _end(process)
            raise
        if code is None:
            await _end(process)
            raise TicketUnknownError(
                f"{self} did not end in {self.timeout:g} seconds and was killed; whether it"
                " made something is not known"
            )
        return code

    def __str__(self) -> str:
        """Return the program's name; its arguments may have secrets."""
        return f"the {self.kind} command {self.arguments[0]}"


async def _code(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Return the exit code of a process; None if it has not ended in time.

    It is asked for again and again: asyncio's own processes cannot be cancelled while they start.
    """
    deadline = time.monotonic() + seconds
    pause = 0.005
    while (code := process.poll()) is None and time.monotonic() < deadline:
        await asyncio.sleep(pause)
        pause = min(2 * pause, 0.1)
    return code


async def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process group: politely, and after a while by force."""
    for number in (signal.SIGTERM, signal.SIGKILL):  # the second also ends what the first left over
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        await _code(process, _GRACE)


def _start_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_MAX_OUTPUT).decode("utf-8", "replace")
