"""Requests to a ticket system, and what a failed one means: nothing was made, or perhaps something.

Each request has a connection of its own: on one that was used before, a request that the server
closed unread could not be told from one that it executed.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import quote, urlencode, urlsplit

from maestro_hive.engine.tickets import TicketMissingError, TicketRefusedError, TicketUnknownError
from maestro_hive.kernel.errors import ConfigurationError

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterable, Callable, Mapping

    from maestro_hive.engine.settings import Secret

#: The largest response that is read, in bytes.
MAX_RESPONSE = 16 * 1024 * 1024
#: The longest wait that a server may ask for: a wrong clock must not stop delivery for a year.
MAX_RETRY_AFTER = 24 * 3600.0
#: How much of a server's own message an error contains.
_MAX_MESSAGE = 500
#: What is not encoded in the path of an address: it may be encoded already.
_IN_PATHS = "/%:@!$&'()*+,;=~"
#: The server did not execute the request, and may do so later.
_TRY_LATER = frozenset({408, 425, 429, 503})

#: Makes the headers of a request, with its credentials, from its body; called once per request.
Headers: TypeAlias = "Callable[[bytes], Mapping[str, str]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What a server answered: its status, its headers, and its body, decoded if it is JSON."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """Return the decoded body; None if it is not JSON."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None

    def document(self) -> dict[str, Any]:
        """Return the decoded body if it is a JSON object; otherwise an empty one."""
        found = self.json()
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One ticket system's server: where it is, what it is called, and how requests prove who sends them.

    ``address`` may have a path and a query, which can be a secret: no error and no log contains them.
    ``secrets`` are removed from what the server says.
    """

    name: str
    setting: str
    address: str = field(repr=False)
    headers: Headers = field(repr=False)
    timeout: float
    secrets: tuple[Secret, ...] = ()

    def __post_init__(self) -> None:
        """Refuse an address that would send credentials unencrypted."""
        parts = urlsplit(self.address)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ConfigurationError(f"{self.setting} is not an address, like https://example.com")
        if parts.scheme == "http" and not _is_loopback(parts.hostname):
            raise ConfigurationError(
                f"{self.setting} starts with http://, and what is sent to {parts.hostname} must be"
                " encrypted; use https://"
            )

    async def request(
        self,
        method: str,
        path: str = "",
        *,
        query: Mapping[str, str | int] | None = None,
        data: object = None,
        headers: Mapping[str, str] | None = None,
        changes: bool,
    ) -> Response:
        """Send a request; return the response, whatever its status is.

        ``changes`` says whether the request makes something: if it does and no response is
        received, TicketUnknownError is raised, and otherwise TicketRefusedError.
        """
        body = b"" if data is None else json.dumps(data, default=str).encode()
        given = {"Accept": "application/json", "User-Agent": "maestro-hive"}
        if data is not None:
            given["Content-Type"] = "application/json"
        given |= {**self.headers(body), **(headers or {})}
        for name, value in given.items():  # the client would repeat the value in its error
            if not (value.isascii() and value.isprintable()):
                raise TicketRefusedError(
                    f"the header {name} for {self.name} cannot be sent: it has characters other than"
                    " printable ASCII; check the token",
                    permanent=True,
                )
        suffix = "?" + urlencode(query) if query else ""
        what = f"{method} {path or 'request'} to {self.host()}"
        try:
            async with asyncio.timeout(3 * self.timeout):  # each phase has the timeout once
                return await self._exchange(method, path + suffix, given, body)
        except TimeoutError:
            raise self.no_response(what, "the response took too long", changes=changes) from None
        except _FailedExchangeError as failure:
            if failure.sent:
                raise self.no_response(what, failure.reason, changes=changes) from None
            raise TicketRefusedError(
                f"{self.name} was not reached ({what}): {failure.reason}; nothing was sent"
            ) from None

    async def _exchange(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Response:
        import httpx2

        parts = urlsplit(self.address)
        target = quote(parts.path.rstrip("/"), safe=_IN_PATHS) + path or "/"
        if parts.query:
            target += ("&" if "?" in target else "?") + quote(parts.query, safe=_IN_PATHS + "?")
        # The client logs addresses, also those that are secrets; the target is not part of them.
        address = f"{parts.scheme}://{parts.netloc}/"
        loopback = _is_loopback(parts.hostname or "")
        client = httpx2.AsyncClient(
            timeout=self.timeout,
            trust_env=not loopback,  # no proxy is between a machine and itself
            verify=_tls(),
            follow_redirects=False,
        )
        extensions = {"target": target.encode("ascii")}
        sent = {"Accept-Encoding": "identity", **headers}
        try:
            async with (
                client,
                client.stream(
                    method, address, headers=sent, content=body, extensions=extensions
                ) as response,
            ):
                received = await _limited(response.aiter_bytes())
                return Response(
                    status=response.status_code, headers=dict(response.headers), body=received
                )
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout) as error:
            raise _FailedExchangeError(_reason(error), sent=False) from error
        except (httpx2.ProxyError, httpx2.UnsupportedProtocol, httpx2.LocalProtocolError) as error:
            raise _FailedExchangeError(_reason(error), sent=False) from error
        except httpx2.HTTPError as error:
            raise _FailedExchangeError(_reason(error), sent=True) from error

    def _shown(self, text: str) -> str:
        """Return a server's message in one line, without the secrets that it may repeat."""
        for secret in self.secrets:
            text = text.replace(secret.reveal(), "***")
        text = " ".join(text.split())
        return text if len(text) <= _MAX_MESSAGE else text[: _MAX_MESSAGE - 1] + "…"

    def host(self) -> str:
        """Return the host, as errors name it."""
        return urlsplit(self.address).netloc

    def no_response(
        self, what: str, reason: str, *, changes: bool
    ) -> TicketRefusedError | TicketUnknownError:
        """Return the error for a request that was sent and has no response that can be used."""
        message = f"{self.name} gave no usable response ({what}): {reason}"
        if changes:
            return TicketUnknownError(f"{message}; whether it was executed is not known")
        return TicketRefusedError(message)

    def failed(
        self, response: Response, detail: str, *, changes: bool
    ) -> TicketRefusedError | TicketUnknownError:
        """Return the error for a response whose status is not one of success."""
        status = response.status
        said = f": {self._shown(detail)}" if detail else ""
        message = f"{self.name} ({self.host()}) answered with status {status}{said}"
        if status in _TRY_LATER:
            return TicketRefusedError(message, retry_after=retry_after(response))
        if status in {404, 410}:
            return TicketMissingError(message, permanent=True)
        if 400 <= status < 500:
            return TicketRefusedError(message, permanent=True)
        if status in {301, 302, 307, 308}:
            where = urlsplit(response.headers.get("location", "")).netloc or "another path"
            hint = f"it redirects to {where}, which is not followed; check {self.setting}"
            return TicketRefusedError(f"{message}; {hint}", permanent=True)
        if changes:
            return TicketUnknownError(f"{message}; whether it was executed is not known")
        return TicketRefusedError(message, retry_after=retry_after(response))


class _FailedExchangeError(Exception):
    """No whole response was received; ``sent`` says whether the server may have the request."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.sent = sent


async def _limited(chunks: AsyncIterable[bytes]) -> bytes:
    received = bytearray()
    async for chunk in chunks:
        received += chunk
        if len(received) > MAX_RESPONSE:
            raise _FailedExchangeError(f"it has more than {MAX_RESPONSE:,} bytes", sent=True)
    return bytes(received)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


@cache
def _tls() -> ssl.SSLContext:
    """Return the context of encrypted connections; to read the certificates takes a while."""
    import httpx2

    return httpx2.create_ssl_context()


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def retry_after(response: Response) -> float | None:
    """Return how many seconds a server asks to wait: a number, or the time until a date."""
    text = response.headers.get("retry-after", "").strip()
    if re.fullmatch(r"[0-9]{1,18}(\.[0-9]+)?", text):
        return min(float(text), MAX_RETRY_AFTER)
    wanted, now = _date(text), _date(response.headers.get("date", "")) or datetime.now(UTC)
    if wanted is None:
        return None
    return min(max((wanted - now).total_seconds(), 0.0), MAX_RETRY_AFTER)


def by_its_clock(response: Response, when: datetime) -> datetime:
    """Return a time of this machine as the clock of the server shows it; never later.

    A response has the server's time without fractions, and so have some of its documents.
    """
    shown = _date(response.headers.get("date", ""))
    ahead = timedelta(0) if shown is None else shown - datetime.now(UTC)
    return when + ahead - timedelta(seconds=1)


def _date(text: str) -> datetime | None:
    try:
        found = parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError):
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
