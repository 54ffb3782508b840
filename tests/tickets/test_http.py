"""Requests: what is never sent, what is never followed, and how large and how late an answer may be."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.tickets import TicketRefusedError, TicketUnknownError, http
from tests.jira_server import EMAIL, TOKEN, JiraServer
from tests.tables import for_each
from tests.tickets.cases import a_case, system

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

run = asyncio.run


@pytest.fixture
def jira(tmp_path: Path) -> Iterator[JiraServer]:
    with JiraServer(tmp_path) as server:
        yield server


def at(address: str, **settings: Any) -> Any:
    return system(jira_base_url=address, jira_email=EMAIL, jira_api_token=TOKEN, **settings)


def test_no_proxy_is_asked_for_loopback(jira: JiraServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert run(at(jira.url).create(a_case())).key == "MD-1"


def test_an_address_may_have_a_path(jira: JiraServer) -> None:
    with pytest.raises(TicketRefusedError, match="404"):
        run(at(f"{jira.url}/jira").create(a_case()))
    assert jira.requests[0].path == "/jira/rest/api/3/issue"


def test_a_server_without_a_certificate_gets_nothing(jira: JiraServer) -> None:
    with pytest.raises(TicketRefusedError, match="nothing was sent") as caught:
        run(at(jira.url.replace("http:", "https:")).create(a_case()))
    assert not caught.value.permanent
    assert jira.requests == []


def test_a_host_that_does_not_exist_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(TicketRefusedError, match="nothing was sent"):
        run(at("https://jira.invalid").create(a_case()))


def test_a_response_that_is_too_large_is_not_read(
    jira: JiraServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tickets = at(jira.url)
    run(tickets.create(a_case()))
    jira.add_comment("MD-1", "x" * 20_000)
    monkeypatch.setattr(http, "MAX_RESPONSE", 10_000)
    with pytest.raises(TicketRefusedError, match="more than 10,000 bytes"):
        run(tickets.comments("MD-1"))


def test_a_response_that_never_ends_is_given_up(jira: JiraServer) -> None:
    tickets = at(jira.url, ticket_timeout_seconds=0.3)
    said = ""
    for _ in range(20):  # a busy machine may be late for the connection, or for the first words
        jira.faults = ["create:drip"]
        try:
            run(tickets.create(a_case()))
        except (TicketUnknownError, TicketRefusedError) as error:
            said = f"{type(error).__name__}: {error}"
        if "took too long" in said:
            break
    assert said.startswith("TicketUnknownError")
    assert "took too long" in said


def test_a_key_cannot_leave_its_place_in_the_address(jira: JiraServer) -> None:
    with pytest.raises(TicketRefusedError):
        run(at(jira.url).ticket("../../../admin?x=1#y"))
    assert jira.requests[0].path == "/rest/api/3/issue/..%2F..%2F..%2Fadmin%3Fx%3D1%23y"


NOW = datetime(2030, 1, 1, tzinfo=UTC)


@for_each(
    "asked, seconds",
    [
        ("0", 0.0),
        ("1.5", 1.5),
        (format_datetime(NOW + timedelta(seconds=90), usegmt=True), 90.0),
        (format_datetime(NOW - timedelta(seconds=90), usegmt=True), 0.0),
        (format_datetime(NOW + timedelta(days=900), usegmt=True), http.MAX_RETRY_AFTER),
        ("9" * 18, http.MAX_RETRY_AFTER),
        ("9" * 400, None),
        ("-5", None),
        ("nan", None),
        ("", None),
        ("Mon, 99 Foo", None),
    ],
)
def test_a_server_asks_to_wait_by_seconds_or_by_a_date(asked: str, seconds: float | None) -> None:
    headers = {"retry-after": asked, "date": format_datetime(NOW, usegmt=True)}
    assert http.retry_after(http.Response(status=429, headers=headers, body=b"")) == seconds


def test_what_sends_requests_is_imported_only_to_send_one() -> None:
    code = (
        "import sys, maestro_hive.unified_execution, maestro_hive.cli.app\n"
        "from maestro_hive.engine.tickets import ticket_system_from\n"
        "from maestro_hive.engine.config import ExecutionConfig\n"
        "ticket_system_from(ExecutionConfig(slack_webhook_url='https://x.example/y'))\n"
        "print([name for name in ('httpx2', 'httpcore2', 'anyio') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("token", ["s3cret\nX-Other: 1", "s3crét", "s3cret\x00"])
def test_a_token_that_cannot_be_a_header_is_not_sent_and_not_repeated(
    jira: JiraServer, token: str
) -> None:
    tickets = system(jira_base_url=jira.url, jira_api_token=token)
    with pytest.raises(TicketRefusedError, match="the header Authorization for Jira") as caught:
        run(tickets.create(a_case()))
    assert caught.value.permanent
    assert "s3cr" not in str(caught.value)
    assert jira.requests == []


def test_an_address_with_other_characters_is_encoded(jira: JiraServer) -> None:
    with pytest.raises(TicketRefusedError, match="404"):
        run(at(f"{jira.url}/té%20st").create(a_case()))
    assert jira.requests[0].path == "/t%C3%A9%20st/rest/api/3/issue"
