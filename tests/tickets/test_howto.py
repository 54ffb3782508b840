"""The examples of docs/howto/ticket-systems.md work as they are."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
from typing import TYPE_CHECKING, Any

import pytest

from docs.generate.pages import ROOT
from maestro_hive.engine.config import ExecutionConfig
from maestro_hive.engine.tickets import ticket_system_from
from tests.github_server import GitHubServer
from tests.jira_server import JiraServer
from tests.tickets.cases import a_case
from tests.webhook_server import WebhookServer

if TYPE_CHECKING:
    from pathlib import Path

    from maestro_hive.engine.tickets import Ticket, TicketSystem

PAGE = (ROOT / "docs" / "howto" / "ticket-systems.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)


def variables(first: str, containing: str = "") -> dict[str, str]:
    """Return what the one example exports that has this variable and this text."""
    (block,) = [each for each in blocks("sh") if f"export {first}=" in each and containing in each]
    pairs = (shlex.split(line.removeprefix("export "))[0] for line in block.splitlines())
    return dict(pair.split("=", 1) for pair in pairs)


def example(monkeypatch: pytest.MonkeyPatch, exported: dict[str, str], **replaced: str) -> Any:
    """Return the system of an example, with addresses of loopback."""
    for name in list(os.environ):
        if name.startswith(("JIRA_", "MAESTRO_")):
            monkeypatch.delenv(name)
    assert replaced.keys() <= exported.keys()
    for name, value in {**exported, **replaced}.items():
        monkeypatch.setenv(name, value)
    return ticket_system_from(ExecutionConfig())


def create(system: TicketSystem) -> Ticket:
    return asyncio.run(system.create(a_case()))


@pytest.mark.parametrize("version, host", [(3, "atlassian.net"), (2, "jira.example.com")])
def test_jira(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: int, host: str) -> None:
    with JiraServer(tmp_path, version=version) as server:
        system = example(monkeypatch, variables("JIRA_BASE_URL", host), JIRA_BASE_URL=server.url)
        assert create(system).key == "MD-1"
        assert len(server.tickets()) == 1


def test_github(monkeypatch: pytest.MonkeyPatch) -> None:
    exported = variables("MAESTRO_GITHUB_REPOSITORY") | variables("MAESTRO_TICKET_ANSWERERS")
    with GitHubServer() as server:
        system = example(monkeypatch, exported, MAESTRO_GITHUB_BASE_URL=server.url)
        key = create(system).key
        server.add_comment(key, "use the other template")
        (comment,) = asyncio.run(system.comments(key))
        assert system.may_answer(comment)


def test_the_receiver_of_a_webhook_knows_what_is_genuine(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = [each for each in blocks("python") if "is_genuine" in each]
    space: dict[str, Any] = {}
    exec(code, space)
    exported = variables("MAESTRO_WEBHOOK_URL")
    with WebhookServer() as server:
        create(example(monkeypatch, exported, MAESTRO_WEBHOOK_URL=server.address))
        (request,) = server.requests
    signed = [request.headers[f"x-maestro-{name}"] for name in ("timestamp", "signature")]
    is_genuine = space["is_genuine"]
    assert is_genuine(exported["MAESTRO_WEBHOOK_SECRET"], *signed, request.raw)
    assert not is_genuine("another", *signed, request.raw)
    assert not is_genuine(exported["MAESTRO_WEBHOOK_SECRET"], *signed, request.raw + b" ")
    assert not is_genuine(exported["MAESTRO_WEBHOOK_SECRET"], "1", signed[1], request.raw)
    assert all(f"`{name}`" in PAGE for name in request.json() if name != "event")


def test_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    with WebhookServer() as server:
        exported = variables("MAESTRO_SLACK_WEBHOOK_URL")
        assert exported["MAESTRO_SLACK_WEBHOOK_URL"].endswith(server.path)
        create(example(monkeypatch, exported, MAESTRO_SLACK_WEBHOOK_URL=server.address))
        assert "draft" in server.messages()[0]["text"]


def test_the_command_makes_one_ticket_for_an_effect_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (code,) = [each for each in blocks("python") if "json.load(sys.stdin)" in each]
    (tmp_path / "make_ticket.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    exported = variables("MAESTRO_ESCALATION_COMMAND")
    command = exported["MAESTRO_ESCALATION_COMMAND"].replace("python3", sys.executable)
    system = example(monkeypatch, exported, MAESTRO_ESCALATION_COMMAND=command)
    assert [create(system).key, create(system).key] == ["T-1", "T-1"]
    assert asyncio.run(system.create(a_case(effect_key="effect-2"))).key == "T-2"


SYSTEMS = ("jira", "ticket", "github", "webhook", "slack", "escalation")


def test_every_setting_of_a_ticket_system_is_on_the_page() -> None:
    named = [name for name in vars(ExecutionConfig()) if name.startswith(SYSTEMS)]
    assert [name for name in named if name.upper() not in PAGE.upper()] == []
