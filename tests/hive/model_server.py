"""A server on loopback that answers as OpenAI and Anthropic do, with the usage that it is given."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a model answers: a text, or a call of a tool, with its usage."""

    text: str = "hello"
    #: The tool that is called, and with what.
    tool: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    #: Tokens of the input that were not cached, that were, that were written to a cache, and output.
    input: int = 40
    cached: int = 60
    written: int = 7
    output: int = 20

    def chat_usage(self) -> dict[str, Any]:
        """Return the usage as a chat completion of OpenAI reports it."""
        prompt = self.input + self.cached
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.output,
            "total_tokens": prompt + self.output,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    def response_usage(self) -> dict[str, Any]:
        """Return the usage as a response of OpenAI reports it: what was written is input as well."""
        given = self.input + self.cached
        details = {"cached_tokens": self.cached, "cache_write_tokens": self.written}
        return {
            "input_tokens": given,
            "input_tokens_details": details,
            "output_tokens": self.output,
            "output_tokens_details": {"reasoning_tokens": min(5, self.output)},
            "total_tokens": given + self.output,
        }

    def message_usage(self) -> dict[str, Any]:
        """Return the usage as a message of Anthropic reports it: what was cached is beside the input."""
        return {
            "input_tokens": self.input,
            "output_tokens": self.output,
            "cache_creation_input_tokens": self.written,
            "cache_read_input_tokens": self.cached,
        }

    @property
    def call_id(self) -> str:
        """Return the id of the call of the tool."""
        return f"call_{self.input}_{self.output}"


HELLO = Reply()


# --- chat completions of OpenAI -------------------------------------------------------------------


def _chat_call(reply: Reply) -> dict[str, Any]:
    function = {"name": reply.tool, "arguments": json.dumps(dict(reply.arguments))}
    return {"id": reply.call_id, "type": "function", "function": function}


def chat(model: str, reply: Reply = HELLO) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
    if reply.tool is not None:
        said = {**said, "content": None, "tool_calls": [_chat_call(reply)]}
    return {
        "id": "chat-1",
        "object": "chat.completion",
        "created": 1,
        "model": model,
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop" if reply.tool is None else "tool_calls",
                "logprobs": None,
                "message": said,
            }
        ],
        "usage": reply.chat_usage(),
    }


def chat_chunks(model: str, reply: Reply = HELLO) -> list[dict[str, Any]]:
    common = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": model}
    deltas: list[dict[str, Any]]
    if reply.tool is None:
        half = len(reply.text) // 2
        deltas = [{"content": part} for part in (reply.text[:half], reply.text[half:])]
    else:
        deltas = [{"tool_calls": [{"index": 0, **_chat_call(reply)}]}]
    ends = [None] * (len(deltas)) + ["stop" if reply.tool is None else "tool_calls"]
    parts = [
        {
            **common,
            "choices": [
                {"index": 0, "delta": {"role": "assistant", **delta}, "finish_reason": end}
            ],
            "usage": None,
        }
        for delta, end in zip([*deltas, {}], ends, strict=True)
    ]
    return [*parts, {**common, "choices": [], "usage": reply.chat_usage()}]


# --- responses of OpenAI --------------------------------------------------------------------------


def _output_item(reply: Reply) -> dict[str, Any]:
    if reply.tool is not None:
        return {
            "type": "function_call",
            "id": "f",
            "call_id": reply.call_id,
            "name": reply.tool,
            "arguments": json.dumps(dict(reply.arguments)),
            "status": "completed",
        }
    return {
        "type": "message",
        "id": "m",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": reply.text, "annotations": []}],
    }


def response(model: str, reply: Reply = HELLO) -> dict[str, Any]:
    return {
        "id": "resp-1",
        "object": "response",
        "created_at": 1,
        "status": "completed",
        "model": model,
        "output": [_output_item(reply)],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": reply.response_usage(),
    }


def response_events(model: str, reply: Reply = HELLO) -> list[dict[str, Any]]:
    whole = response(model, reply)
    before = {**whole, "status": "in_progress", "usage": None, "output": []}
    item = whole["output"][0]
    return [
        {"type": "response.created", "sequence_number": 0, "response": before},
        {
            "type": "response.output_item.done",
            "sequence_number": 1,
            "output_index": 0,
            "item": item,
        },
        {"type": "response.completed", "sequence_number": 2, "response": whole},
    ]


# --- messages of Anthropic ------------------------------------------------------------------------


def _block(reply: Reply) -> dict[str, Any]:
    if reply.tool is None:
        return {"type": "text", "text": reply.text}
    return {
        "type": "tool_use",
        "id": reply.call_id,
        "name": reply.tool,
        "input": dict(reply.arguments),
    }


def message(model: str, reply: Reply = HELLO) -> dict[str, Any]:
    return {
        "id": f"msg-{reply.input}-{reply.output}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [_block(reply)],
        "stop_reason": "end_turn" if reply.tool is None else "tool_use",
        "stop_sequence": None,
        "usage": reply.message_usage(),
    }


def message_events(model: str, reply: Reply = HELLO) -> list[dict[str, Any]]:
    whole = message(model, reply)
    first = {**whole, "content": [], "stop_reason": None}
    first["usage"] = {**reply.message_usage(), "output_tokens": 1}
    empty: dict[str, Any]
    if reply.tool is None:
        empty, delta = {"text": ""}, {"type": "text_delta", "text": reply.text}
    else:
        written = json.dumps(dict(reply.arguments))
        empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": written}
    return [
        {"type": "message_start", "message": first},
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {**whole["content"][0], **empty},
        },
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": whole["stop_reason"], "stop_sequence": None},
            "usage": {"output_tokens": reply.output},
        },
        {"type": "message_stop"},
    ]


#: The forms of an answer, whole and in events, by path.
FORMS: dict[str, tuple[Callable[..., dict[str, Any]], Callable[..., list[dict[str, Any]]]]] = {
    "/v1/chat/completions": (chat, chat_chunks),
    "/v1/responses": (response, response_events),
    "/v1/messages": (message, message_events),
}


def answer(path: str, asked: Mapping[str, Any], reply: Reply = HELLO) -> tuple[str, bytes]:
    """Return the content type and the body of an answer: events, if they were asked for."""
    whole, events = FORMS[path]
    if not asked.get("stream", False):
        return "application/json", json.dumps(whole(asked["model"], reply)).encode()
    lines = []
    for event in events(asked["model"], reply):
        name = f"event: {event['type']}\n" if "type" in event else ""
        lines.append(f"{name}data: {json.dumps(event)}\n\n")
    if path.endswith("completions"):
        lines.append("data: [DONE]\n\n")
    return "text/event-stream", "".join(lines).encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._send(*answer(self.path.split("?")[0], asked))

    def _send(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def model_server() -> Iterator[str]:
    """Serve on loopback while the block runs; gives the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
