"""A server on loopback that answers as OpenAI and Anthropic do, with the usage that it is given."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

CHAT_USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 20,
    "total_tokens": 120,
    "prompt_tokens_details": {"cached_tokens": 60},
}
RESPONSE_USAGE = {
    "input_tokens": 100,
    "input_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 7},
    "output_tokens": 20,
    "output_tokens_details": {"reasoning_tokens": 5},
    "total_tokens": 120,
}
MESSAGE_USAGE = {
    "input_tokens": 40,
    "output_tokens": 20,
    "cache_creation_input_tokens": 7,
    "cache_read_input_tokens": 60,
}


def chat(model: str) -> dict[str, Any]:
    return {
        "id": "chat-1",
        "object": "chat.completion",
        "created": 1,
        "model": model,
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "logprobs": None,
                "message": {"role": "assistant", "content": "hello", "refusal": None},
            }
        ],
        "usage": CHAT_USAGE,
    }


def chat_chunks(model: str) -> list[dict[str, Any]]:
    common = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": model}
    words = [
        {
            **common,
            "choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}],
            "usage": None,
        }
        for word in ("hel", "lo")
    ]
    return [*words, {**common, "choices": [], "usage": CHAT_USAGE}]


def response(model: str) -> dict[str, Any]:
    return {
        "id": "resp-1",
        "object": "response",
        "created_at": 1,
        "status": "completed",
        "model": model,
        "output": [
            {
                "type": "message",
                "id": "m",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "hello", "annotations": []}],
            }
        ],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": RESPONSE_USAGE,
    }


def response_events(model: str) -> list[dict[str, Any]]:
    before = {**response(model), "status": "in_progress", "usage": None, "output": []}
    return [
        {"type": "response.created", "sequence_number": 0, "response": before},
        {"type": "response.completed", "sequence_number": 1, "response": response(model)},
    ]


def message(model: str) -> dict[str, Any]:
    return {
        "id": "msg-1",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [{"type": "text", "text": "hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": MESSAGE_USAGE,
    }


def message_events(model: str) -> list[dict[str, Any]]:
    first = {**message(model), "content": [], "stop_reason": None}
    first["usage"] = {**MESSAGE_USAGE, "output_tokens": 1}
    text = {"type": "text", "text": ""}
    delta = {"type": "text_delta", "text": "hello"}
    return [
        {"type": "message_start", "message": first},
        {"type": "content_block_start", "index": 0, "content_block": text},
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"output_tokens": 20},
        },
        {"type": "message_stop"},
    ]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        model, streamed = asked["model"], asked.get("stream", False)
        whole, events = {
            "/v1/chat/completions": (chat, chat_chunks),
            "/v1/responses": (response, response_events),
            "/v1/messages": (message, message_events),
        }[self.path.split("?")[0]]
        if not streamed:
            self._send("application/json", json.dumps(whole(model)).encode())
            return
        lines = []
        for event in events(model):
            name = f"event: {event['type']}\n" if "type" in event else ""
            lines.append(f"{name}data: {json.dumps(event)}\n\n")
        if self.path.endswith("completions"):
            lines.append("data: [DONE]\n\n")
        self._send("text/event-stream", "".join(lines).encode())

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
