"""Notifications of people: at the end of a team run, and when it needs one of them.

They go to the bell of a terminal, to a webhook as JSON, or to a command of the user's, as escalations do.
One that cannot be delivered is said, and changes nothing about the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from maestro_hive.engine.tickets.command import UserCommand
from maestro_hive.engine.tickets.http import Server
from maestro_hive.engine.tickets.webhook import post, signature
from maestro_hive.kernel.errors import ConfigurationError, MaestroError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from maestro_hive.engine.config import ExecutionConfig

RUN_ENDED, PERSON_NEEDED = "run_ended", "person_needed"
#: Where targets are named, besides the option.
VARIABLE = "MAESTRO_NOTIFY"
_OPTION = "--notify"
#: How long a command may take, and how long the end of a run waits for all that is on its way.
_COMMAND_SECONDS = 30.0
_END_SECONDS = 35.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """What a person is told: the event, the run, a sentence, and what to type next."""

    event: str
    run_id: str
    feature: str
    #: Of the run: success, failed, cancelled, waiting or bankrupt.
    status: str
    message: str
    #: The command that goes on with it, as the terminal says it; None if there is none.
    command: str | None = None
    #: The task that asks, and what it asks.
    task: str | None = None
    question: str | None = None
    #: How many tasks are complete, of how many, and which failed.
    complete: int = 0
    total: int = 0
    failed: tuple[str, ...] = ()
    tokens: int = 0
    usd: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON; ``text`` is what chats show."""
        return {**asdict(self), "failed": list(self.failed), "text": self.message}


class Target(Protocol):
    """Where notifications go."""

    async def send(self, told: Notification) -> None:
        """Deliver a notification; raise ``MaestroError`` if that is not possible."""


class Bell:
    """The bell of the terminal; where there is none, nothing."""

    async def send(self, told: Notification) -> None:
        """Ring it, and nothing else: whatever is drawn there stays."""
        for stream in (sys.stderr, sys.stdout):
            with contextlib.suppress(OSError, ValueError):
                if stream.isatty():
                    os.write(stream.fileno(), b"\a")
                    return


class Webhook:
    """An address that takes JSON; signed, if there is a secret of webhooks."""

    def __init__(self, address: str, config: ExecutionConfig) -> None:
        parts = urlsplit(address)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            # Who has the path of a webhook may send to it: so it is not repeated.
            given = f"{parts.scheme}://{parts.hostname or ''}{'/…' if parts.path else ''}"
            raise ConfigurationError(
                f"{_OPTION}: {given} is not an address of a webhook, like https://example.com; name"
                " one, or bell, or a command"
            )
        secret = config.webhook_secret
        self._server = Server(
            name="the webhook",
            setting=_OPTION,
            address=address,
            headers=lambda body: {} if secret is None else signature(secret, body),
            timeout=config.ticket_timeout_seconds,
            secrets=() if secret is None else (secret,),
        )

    async def send(self, told: Notification) -> None:
        """Send it as JSON."""
        await post(self._server, told.to_dict())


class Command:
    """A command that gets JSON on its standard input; ``{message}`` becomes one argument of it."""

    def __init__(self, text: str) -> None:
        try:
            words = tuple(shlex.split(text))
        except ValueError as error:
            raise ConfigurationError(f"{_OPTION}: {text!r} cannot be split: {error}") from None
        if not words:
            raise ConfigurationError(f"{_OPTION} needs bell, an address, or a command")
        if shutil.which(words[0]) is None:
            raise ConfigurationError(f"{_OPTION}: the program {words[0]!r} is not on PATH")
        self._command = UserCommand("notification", words, _COMMAND_SECONDS, _OPTION)

    async def send(self, told: Notification) -> None:
        """Execute it."""
        message = told.message.replace("\0", "")
        words = tuple(each.replace("{message}", message) for each in self._command.arguments)
        await replace(self._command, arguments=words).output(told.to_dict())


def target(text: str, config: ExecutionConfig) -> Target:
    """Return where notifications go that are sent to this: bell, an address, or a command."""
    if text == "bell":
        return Bell()
    return Webhook(text, config) if "://" in text.split(" ", 1)[0] else Command(text)


class Notifier:
    """Sends notifications to all targets, while the run goes on."""

    def __init__(self, targets: Iterable[Target], complain: Callable[[str], None]) -> None:
        self._targets = list(targets)
        self._complain = complain
        self._sending: set[asyncio.Task[None]] = set()

    def notify(self, told: Notification) -> None:
        """Send a notification, and do not wait for it."""
        for each in self._targets:
            sending = asyncio.get_running_loop().create_task(self._send(each, told))
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)

    async def finish(self) -> None:
        """Wait until all is sent, or has failed; for a while."""
        if self._sending:
            _, late = await asyncio.wait(self._sending, timeout=_END_SECONDS)
            if late:
                self._complain("a notification was not sent: it took too long")

    async def _send(self, to: Target, told: Notification) -> None:
        try:
            await to.send(told)
        except MaestroError as error:
            self._complain(f"a notification was not sent: {error}")
