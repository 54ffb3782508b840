"""Messages to webhooks: signed JSON for programs of users, and Slack's format for chats.

A signed message has these headers:

- ``X-Maestro-Timestamp``: when it was sent, in seconds since 1970.
- ``X-Maestro-Signature``: ``sha256=`` and the HMAC-SHA256, in hexadecimal digits, of the timestamp,
  a dot, and the body as it was sent, with the secret as key.
- ``Idempotency-Key``: the same whenever the same message is sent again.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from maestro_hive.engine.tickets import Ticket
from maestro_hive.engine.tickets.one_way import OneWay, escalation_message
from maestro_hive.engine.tickets.texts import clean, fitting

if TYPE_CHECKING:
    from maestro_hive.engine.escalation import EscalationCase
    from maestro_hive.engine.settings import Secret
    from maestro_hive.engine.tickets.http import Response, Server

#: What is not encoded in the key of a message; keys have no other characters, as a rule.
_IN_KEYS = "/:@!$&'()*+,;=~#[] "
#: Slack displays no more of a message; it accepts ten times as much.
_MAX_CHAT = 4000


class WebhookTickets(OneWay):
    """Sends failures and comments as signed JSON.

    The receiver may answer with JSON: ``key`` and ``address`` of the ticket that it made, and
    ``id`` of a comment. Without them the effect key is used.
    """

    name = "webhook"

    def __init__(self, server: Server) -> None:
        self._server = server

    async def create(self, case: EscalationCase) -> Ticket:
        """Send a failure."""
        answer = (await self._post(escalation_message(case))).document()
        address = answer.get("address")
        return Ticket(
            key=_text(answer.get("key")) or case.effect_key,
            address=address if isinstance(address, str) else None,
        )

    async def _post(self, message: dict[str, Any]) -> Response:
        headers = {"Idempotency-Key": quote(str(message["effect_key"]), safe=_IN_KEYS)}
        return await post(self._server, message, headers)


class SlackTickets(OneWay):
    """Posts failures to a chat, by an incoming webhook that takes Slack's format."""

    name = "slack"

    def __init__(self, server: Server) -> None:
        self._server = server

    async def create(self, case: EscalationCase) -> Ticket:
        """Post a failure; its key is the effect key, since a message has none."""
        await post(self._server, {"text": _chat_text(f"*{case.summary}*\n{case.description}")})
        return Ticket(key=case.effect_key)


def signature(secret: Secret, body: bytes) -> dict[str, str]:
    """Return the headers that prove who sent a body, and when."""
    timestamp = str(int(time.time()))
    signed = f"{timestamp}.".encode() + body
    digest = hmac.new(secret.reveal().encode(), signed, hashlib.sha256).hexdigest()
    return {"X-Maestro-Timestamp": timestamp, "X-Maestro-Signature": f"sha256={digest}"}


async def post(
    server: Server, message: dict[str, Any], headers: dict[str, str] | None = None
) -> Response:
    """Send a message; raise if it was not taken."""
    response = await server.request("POST", data=message, headers=headers, changes=True)
    if 200 <= response.status < 300:
        return response
    said = response.body.decode("utf-8", "replace")
    raise server.failed(response, said, changes=True)


def _chat_text(text: str) -> str:
    """Return a text in which nothing mentions a person or a channel, and nothing is a link."""
    shown = clean(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return fitting(shown, _MAX_CHAT)


def _text(value: object) -> str:
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
