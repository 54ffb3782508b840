"""Tickets made by a command of the user's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from typing import TYPE_CHECKING, Any

from maestro_hive.engine.tickets import Ticket, TicketRefusedError, TicketUnknownError
from maestro_hive.engine.tickets.one_way import OneWay, comment_message, escalation_message

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from maestro_hive.engine.escalation import EscalationCase

#: How much is read of what a command prints.
_MAX_OUTPUT = 64 * 1024
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
        self._arguments = arguments
        self._timeout = timeout

    async def create(self, case: EscalationCase) -> Ticket:
        """Give a failure to the command."""
        lines = await self._output(escalation_message(case))
        if not lines or not lines[0].strip():
            raise TicketUnknownError(
                f"{self._shown()} ended with 0 and printed nothing, and must print the ticket's key"
            )
        address = lines[1].strip() if len(lines) > 1 else ""
        return Ticket(key=lines[0].strip(), address=address or None)

    async def comment(self, key: str, text: str) -> str:
        """Give a comment to the command; return the id that it prints, or the effect key."""
        message = comment_message(key, text)
        lines = await self._output(message)
        return (lines[0].strip() if lines else "") or str(message["effect_key"])

    async def _output(self, message: dict[str, Any]) -> list[str]:
        async with self._started() as process:
            try:
                async with asyncio.timeout(self._timeout):
                    printed, errors = await _conversation(
                        process, json.dumps(message, default=str).encode()
                    )
                    code = await process.wait()
            except TimeoutError:
                raise TicketUnknownError(
                    f"{self._shown()} did not end in {self._timeout:g} seconds and was killed;"
                    " whether it made something is not known"
                ) from None
        said = " ".join(errors.decode("utf-8", "replace").split())[:500]
        if code < 0:
            raise TicketUnknownError(
                f"{self._shown()} was killed by signal {-code}: {said or 'it printed no error'};"
                " whether it made something is not known"
            )
        if code:
            raise TicketRefusedError(
                f"{self._shown()} ended with {code}: {said or 'it printed no error'}"
            )
        return printed.decode("utf-8", "replace").splitlines()

    @contextlib.asynccontextmanager
    async def _started(self) -> AsyncIterator[asyncio.subprocess.Process]:
        """Start the command in a process group of its own; end all of that group if it is given up."""
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *self._arguments, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            )
        except (OSError, ValueError) as error:
            raise TicketRefusedError(
                f"{self._shown()} cannot be started: {error}; check escalation_command",
                permanent=True,
            ) from error
        try:
            yield process
        except BaseException:
            await _end(process)
            raise

    def _shown(self) -> str:
        """Return the program's name; its arguments may have secrets."""
        return f"the escalation command {self._arguments[0]}"


async def _conversation(process: asyncio.subprocess.Process, message: bytes) -> tuple[bytes, bytes]:
    """Write all of the message; return the start of what is printed, and of the errors."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    _, printed, errors = await asyncio.gather(
        _write(process.stdin, message), _read(process.stdout), _read(process.stderr)
    )
    return printed, errors


async def _write(stream: asyncio.StreamWriter, message: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it does not have to read it
        stream.write(message)
        await stream.drain()
    stream.close()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        await stream.wait_closed()


async def _read(stream: asyncio.StreamReader) -> bytes:
    """Read to the end; return the start. What is not read would block the command."""
    read = b""
    while chunk := await stream.read(8192):
        read += chunk[: _MAX_OUTPUT - len(read)]
    return read


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the process group: politely, and after a while by force."""
    for number in (signal.SIGTERM, signal.SIGKILL):  # the second also ends what the first left over
        _signal(process, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE):
                await process.wait()


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
