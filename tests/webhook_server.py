"""A receiver of webhooks on loopback, for tests; the faults are those of ``loopback_server``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.loopback_server import Answer, LoopbackServer, Request

if TYPE_CHECKING:
    from collections.abc import Iterable


class WebhookServer(LoopbackServer):
    """Receives messages, and answers each with the same; ``path`` is a secret, as Slack has it."""

    path = "/services/T000/B000/a-secret-path"

    def __init__(self, answer: Any = None, faults: Iterable[str] = ()) -> None:
        super().__init__(faults)
        self.answer = answer

    @property
    def address(self) -> str:
        return self.url + self.path

    def messages(self) -> list[Any]:
        """Return what was received."""
        return [each.json() for each in self.requests]

    def operation(self, request: Request) -> str:
        return "post"

    def execute(self, operation: str, request: Request) -> Answer:
        if request.path != self.path:
            return 404, "no_service"
        return 200, self.answer
