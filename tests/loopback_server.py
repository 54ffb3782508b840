"""HTTP servers on loopback for tests, which answer, refuse, hang and drop connections as they are told.

A fault is a text ``operation:what``, which is used for one request and then forgotten:

- ``create:429`` and any other status: answered instead of executing the request. ``create:429@30`` has
  the header ``Retry-After: 30``, and what follows the ``@`` may also be a date.
- ``create:drop``: the connection is closed; ``create:hang``: there is no answer; ``create:slow``: the
  request is executed, and answered after half a second.
- ``create:drip``: the request is executed, and its answer never ends.
- ``create:garbage``: an answer that is not JSON; ``create:cut``: half of an answer; ``create:redirect``.
- ``create:500-after`` and so on: the same, after the request was executed.

The operation ``any`` is every request.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias
from urllib.parse import parse_qsl, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Where ``redirect`` leads to: another host.
ELSEWHERE = "http://127.0.0.2:9/elsewhere"

Answer: TypeAlias = tuple[int, Any]


class Body(NamedTuple):
    """An answer that is not JSON, with its content type."""

    kind: str
    content: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request as it was received."""

    method: str
    path: str
    query: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str]
    raw: bytes

    def json(self) -> Any:
        return json.loads(self.raw) if self.raw else None


class LoopbackServer:
    """A server in a thread of its own; subclasses say which operation a request is, and execute it."""

    def __init__(self, faults: Iterable[str] = (), port: int = 0) -> None:
        #: What goes wrong with the next requests; a test may change it at any time.
        self.faults = list(faults)
        #: The operations that were asked for, and the requests, in their order.
        self.operations: list[str] = []
        self.requests: list[Request] = []
        #: By how many seconds the clock of the server is ahead.
        self.ahead = 0.0
        self.lock = threading.RLock()
        self.stopping = threading.Event()
        self._http = _Http(("127.0.0.1", port), _Handler)
        self._http.owner = self
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def operation(self, request: Request) -> str:
        """Return the name of the operation that is asked for."""
        raise NotImplementedError

    def execute(self, operation: str, request: Request) -> Answer:
        """Execute a request; return the status and the JSON of the answer, or a ``Body``."""
        raise NotImplementedError

    def refusal(self, operation: str, status: int) -> Any:
        """Return the JSON of an answer with a status that is a fault."""
        return {"errorMessages": [f"a fault: {status}"]}

    def count(self, operation: str) -> int:
        """Return how often an operation was asked for."""
        return self.operations.count(operation)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def settle(self) -> None:
        """Return when everything that was sent by processes that are gone has been executed."""
        host, port = self._http.server_address[:2]
        with socket.create_connection((str(host), port)) as last:  # accepted after all of these
            last.sendall(b"GET /settle HTTP/1.0\r\n\r\n")
            last.recv(1)
        while self._http.unread:
            time.sleep(0.001)

    def _fault(self, operation: str) -> str:
        with self.lock:
            for number, fault in enumerate(self.faults):
                wanted, _, what = fault.partition(":")
                if wanted in {operation, "any"}:
                    del self.faults[number]
                    return what
        return ""


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    owner: LoopbackServer
    #: How many connections were accepted whose requests were not executed yet.
    unread = 0

    def process_request(self, request: Any, client_address: Any) -> None:
        with self.owner.lock:
            self.unread += 1
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing about connections that clients or faults closed."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Http

    is_read = False

    def finish(self) -> None:
        self._note_read()
        super().finish()

    def _note_read(self) -> None:
        with self.server.owner.lock:
            self.server.unread -= not self.is_read
            self.is_read = True

    def date_time_string(self, timestamp: float | None = None) -> str:
        """Return the time of the server, for its responses."""
        now = time.time() + self.server.owner.ahead if timestamp is None else timestamp
        return super().date_time_string(now)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def _respond(self) -> None:
        owner = self.server.owner
        parts = urlsplit(self.path)
        request = Request(
            method=self.command,
            path=parts.path,
            query=dict(parse_qsl(parts.query, keep_blank_values=True)),
            headers={name.lower(): value for name, value in self.headers.items()},
            raw=self.rfile.read(int(self.headers.get("Content-Length") or 0)),
        )
        if request.path == "/settle":
            self._note_read()
            self._send(200, b"{}")
            return
        operation = owner.operation(request)
        with owner.lock:
            owner.requests.append(request)
            owner.operations.append(operation)
        what, _, after = owner._fault(operation).partition("-")
        answer: Answer | None = None
        if not what or after == "after" or what in {"garbage", "cut", "slow", "drip"}:
            with owner.lock:
                answer = owner.execute(operation, request)
        self._note_read()
        self._answer(operation, what, answer)

    do_GET = do_POST = _respond  # noqa: N815 - the names that the standard library calls

    def _answer(self, operation: str, what: str, answer: Answer | None) -> None:
        kind, _, detail = what.partition("@")
        match kind:
            case "" | "slow":
                assert answer is not None
                self.server.owner.stopping.wait(0.5 if kind else 0)
                status, content = answer
                if isinstance(content, Body):
                    self._send(status, content.content, kind=content.kind)
                else:
                    self._send(status, json.dumps(content).encode())
            case "drop":
                self.close_connection = True
            case "hang":
                self.server.owner.stopping.wait(60)
                self.close_connection = True
            case "garbage":
                self._send(200, b"<html>a page of a proxy</html>")
            case "cut":
                self._send(200, b'{"key": "MD-', length=1000)
                self.close_connection = True
            case "drip":
                self._send(200, b"{", length=1_000_000)
                while not self.server.owner.stopping.wait(0.05):
                    self.wfile.write(b" ")
            case "redirect":
                self._send(302, b"", headers={"Location": ELSEWHERE})
            case _:
                headers = {"Retry-After": detail} if detail else {}
                said = self.server.owner.refusal(operation, int(kind))
                self._send(int(kind), json.dumps(said).encode(), headers=headers)

    def _send(
        self,
        status: int,
        body: bytes,
        *,
        kind: str = "application/json",
        length: int | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
