"""What each setting of the ticket systems changes, seen from the other side."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from maestro_hive.engine.settings import Secret
from maestro_hive.engine.tickets import TicketRefusedError, TicketUnknownError, ticket_system_from
from tests.github_server import GitHubServer
from tests.jira_server import EMAIL, PERSON, TOKEN, JiraServer
from tests.tickets.cases import a_case
from tests.webhook_server import WebhookServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.engine.config import ExecutionConfig
    from maestro_hive.engine.tickets import TicketSystem


def made_by(config: ExecutionConfig) -> TicketSystem:
    made = ticket_system_from(config)
    assert made is not None
    return made


def create(config: ExecutionConfig) -> str:
    """Create a ticket; return its key, or which error there was."""
    try:
        return asyncio.run(made_by(config).create(a_case())).key
    except (TicketRefusedError, TicketUnknownError) as error:
        return type(error).__name__


def jira_request(config: ExecutionConfig) -> tuple[object, ...]:
    """Return how Jira is asked for a ticket."""
    with tempfile.TemporaryDirectory() as folder, JiraServer(Path(folder)) as server:
        config.jira_base_url = server.url
        config.jira_email = config.jira_email or EMAIL
        config.jira_api_token = config.jira_api_token or Secret(TOKEN)
        create(config)
        request = server.requests[0]
        return request.path, request.headers["authorization"], request.raw


def jira_in_time(config: ExecutionConfig) -> str:
    """Return what becomes of a ticket that a slow Jira creates."""
    faults = ["create:slow"]
    with tempfile.TemporaryDirectory() as folder, JiraServer(Path(folder), faults=faults) as server:
        config.jira_base_url, config.jira_email = server.url, EMAIL
        config.jira_api_token = Secret(TOKEN)
        return create(config)


def index_lag(config: ExecutionConfig) -> float:
    config.jira_base_url, config.jira_api_token = "https://jira.example.com", Secret(TOKEN)
    return made_by(config).index_lag


def may_answer(config: ExecutionConfig) -> bool:
    with tempfile.TemporaryDirectory() as folder, JiraServer(Path(folder)) as server:
        config.jira_base_url, config.jira_email = server.url, EMAIL
        config.jira_api_token = Secret(TOKEN)
        tickets = made_by(config)
        asyncio.run(tickets.create(a_case()))
        server.add_comment("MD-1", "do it")
        (comment,) = asyncio.run(tickets.comments("MD-1"))
        return tickets.may_answer(comment)


def github_request(config: ExecutionConfig) -> tuple[object, ...]:
    with GitHubServer() as server:
        config.github_repository = config.github_repository or "acme/shop"
        config.github_token = config.github_token or Secret("t")
        config.github_base_url = server.url
        create(config)
        return server.requests[0].path, server.requests[0].headers["authorization"]


def github_address(config: ExecutionConfig) -> object:
    config.github_repository, config.github_token = "acme/shop", Secret("t")
    server = vars(made_by(config))["_server"]
    return server.host()


def webhook_signature(config: ExecutionConfig) -> bool:
    """Return whether what is sent is signed with the secret that the receiver expects."""
    with WebhookServer() as server:
        config.webhook_url = Secret(server.address)
        config.webhook_secret = config.webhook_secret or Secret("expected")
        create(config)
        request = server.requests[0]
        signed = request.headers["x-maestro-timestamp"].encode() + b"." + request.raw
        digest = hmac.new(b"expected", signed, hashlib.sha256).hexdigest()
        return request.headers["x-maestro-signature"] == f"sha256={digest}"


def system_name(config: ExecutionConfig) -> str | None:
    config.webhook_secret = Secret("s") if config.webhook_url else None
    made = ticket_system_from(config)
    return made.name if made else None


def command_in_time(config: ExecutionConfig) -> str:
    config.escalation_command = ("/bin/sh", "-c", "sleep 0.5; echo A-1")
    return create(config)


#: By setting: the value that is set, and what it changes.
TICKET_SETTINGS: dict[str, tuple[object, Callable[[ExecutionConfig], object]]] = {
    "jira_email": ("me@example.com", jira_request),
    "jira_api_token": ("another", jira_request),
    "jira_api_version": (2, jira_request),
    "jira_issue_type": ("Task", jira_request),
    "jira_priority": ("Low", jira_request),
    "jira_index_lag_seconds": (3, index_lag),
    "ticket_answerers": ((PERSON,), may_answer),
    "ticket_timeout_seconds": (0.05, jira_in_time),
    "github_repository": ("acme/other", github_request),
    "github_token": ("another", github_request),
    "github_base_url": ("https://github.example.com/api/v3", github_address),
    "webhook_url": ("https://hooks.example.com/x", system_name),
    "webhook_secret": ("another", webhook_signature),
    "slack_webhook_url": ("https://hooks.example.com/x", system_name),
    "escalation_command": (("true",), system_name),
    "escalation_command_timeout_seconds": (0.05, command_in_time),
}
