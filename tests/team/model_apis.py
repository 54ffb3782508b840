"""A server on loopback that speaks the APIs of Anthropic, OpenAI and Gemini, for agents.

It answers the requests of a conversation with the replies that it is given, in their order, and the
others that agents make on their own (titles, summaries, counts) with a reply of its own. What all of
them used is added up: an agent's adapter must report the same. Faults are those of ``LoopbackServer``;
413 says that the context is full. The operations are ``model``, ``aside`` and ``other``.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from tests.hive.model_server import Reply, answer
from tests.loopback_server import Answer, Body, LoopbackServer, Request

if TYPE_CHECKING:
    from collections.abc import Iterable

#: What is answered when nothing is left, and what those requests use that are not the conversation's.
LAST = Reply(text="done", input=11, cached=0, written=0, output=3)
ASIDE = Reply(text='{"title": "a title"}', input=5, cached=0, written=0, output=2)

_TOO_LONG = "prompt is too long: 250000 tokens > 200000 maximum"


class ModelApis(LoopbackServer):
    """The server; ``used`` has the tokens of all replies that were sent, by kind."""

    def __init__(
        self, replies: Iterable[Reply] = (), faults: Iterable[str] = (), *, tools: bool = True
    ) -> None:
        super().__init__(faults)
        self.replies = list(replies)
        self.used: Counter[str] = Counter()
        #: Whether the requests of a conversation are those that offer tools.
        self.tools = tools
        #: Which request of the conversation gets no answer; 0 for none.
        self.hang_at = 0

    def operation(self, request: Request) -> str:
        if request.method != "POST" or _form(request.path) is None:
            return "other"
        return "model" if bool(request.json().get("tools")) is self.tools else "aside"

    def execute(self, operation: str, request: Request) -> Answer:
        if operation == "other":
            return self._other(request)
        reply = ASIDE if operation == "aside" else self._next()
        form = _form(request.path)
        assert form is not None
        self.used.update(_counts(form, reply))
        if form == "gemini":
            return 200, _gemini(request.path, reply)
        return 200, Body(*answer(form, request.json(), reply))

    def _fault(self, operation: str) -> str:
        if operation == "model" and self.operations.count("model") == self.hang_at:
            return "hang"
        return super()._fault(operation)

    def _next(self) -> Reply:
        return self.replies.pop(0) if self.replies else LAST

    @staticmethod
    def _other(request: Request) -> Answer:
        if request.path.endswith("/count_tokens"):
            return 200, {"input_tokens": 7}
        if request.path.endswith(":countTokens"):
            return 200, {"totalTokens": 7}
        if request.path.endswith("/models"):
            return 200, {"object": "list", "data": []}
        return 404, {"error": {"type": "not_found_error", "message": "no such page"}}

    def refusal(self, operation: str, status: int) -> Any:
        """Return an error that all of the APIs' clients can read."""
        words = {429: "rate_limit_error", 401: "authentication_error", 413: "request_too_large"}
        kind = words.get(status, "api_error")
        said = _TOO_LONG if status == 413 else f"the server says {status}"
        error = {"type": kind, "code": status, "message": said, "status": kind.upper()}
        return {"type": "error", "error": error}

    def conversation(self) -> list[Any]:
        """Return the requests of the conversation, as JSON, in their order."""
        asked = zip(self.operations, self.requests, strict=True)
        return [request.json() for operation, request in asked if operation == "model"]


def _counts(form: str, reply: Reply) -> dict[str, int]:
    """Return what a reply uses: a response of OpenAI has what was written inside of its input."""
    written = reply.written if form.endswith(("messages", "responses")) else 0
    inside = written if form.endswith("responses") else 0
    return {
        "input": reply.input - inside,
        "cached": reply.cached,
        "written": written,
        "output": reply.output,
    }


def _form(path: str) -> str | None:
    for form in ("/v1/messages", "/v1/chat/completions", "/v1/responses"):
        if path.endswith(form):
            return form
    return "gemini" if path.endswith((":generateContent", ":streamGenerateContent")) else None


def _gemini(path: str, reply: Reply) -> Any:
    part: dict[str, Any] = {"text": reply.text}
    if reply.tool is not None:
        part = {"functionCall": {"name": reply.tool, "args": dict(reply.arguments)}}
    thoughts = min(1, reply.output)
    prompt = reply.input + reply.cached
    whole = {
        "candidates": [
            {"index": 0, "finishReason": "STOP", "content": {"role": "model", "parts": [part]}}
        ],
        "usageMetadata": {
            "promptTokenCount": prompt,
            "cachedContentTokenCount": reply.cached,
            "candidatesTokenCount": reply.output - thoughts,
            "thoughtsTokenCount": thoughts,
            "totalTokenCount": prompt + reply.output,
        },
        "modelVersion": path.rpartition("/")[2].partition(":")[0],
    }
    if path.endswith(":generateContent"):
        return whole
    return Body("text/event-stream", f"data: {json.dumps(whole)}\r\n\r\n".encode())
