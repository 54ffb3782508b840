"""Webhooks: what is sent, how it is signed, and that nothing shows their addresses."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.tickets import Ticket, TicketRefusedError, TicketUnknownError
from tests.tickets.cases import LABEL, a_case, system
from tests.webhook_server import WebhookServer

if TYPE_CHECKING:
    from collections.abc import Iterator

run = asyncio.run
SECRET = "shared-secret"


@pytest.fixture
def receiver() -> Iterator[WebhookServer]:
    with WebhookServer() as server:
        yield server


def webhook(server: WebhookServer, **settings: Any) -> Any:
    return system(webhook_url=server.address, webhook_secret=SECRET, **settings)


def slack(server: WebhookServer) -> Any:
    return system(slack_webhook_url=server.address)


def test_a_failure_is_sent_as_json(receiver: WebhookServer) -> None:
    made = run(webhook(receiver).create(a_case()))
    assert made == Ticket(key="effect-1")
    (message,) = receiver.messages()
    assert message["event"] == "escalation"
    assert message["label"] == LABEL
    assert message["run_id"] == "checkout-42"
    assert message["failure_report"]["error_category"] == "TIMEOUT"
    assert receiver.requests[0].headers["idempotency-key"] == "effect-1"


def test_the_receiver_may_name_the_ticket(receiver: WebhookServer) -> None:
    receiver.answer = {"key": 7, "address": "https://tracker.example/7"}
    made = run(webhook(receiver).create(a_case()))
    assert made == Ticket(key="7", address="https://tracker.example/7")


def test_a_message_is_signed_with_the_time_it_was_sent_at(receiver: WebhookServer) -> None:
    run(webhook(receiver).create(a_case()))
    (request,) = receiver.requests
    timestamp = request.headers["x-maestro-timestamp"]
    signed = timestamp.encode() + b"." + request.raw
    digest = hmac.new(SECRET.encode(), signed, hashlib.sha256).hexdigest()
    assert request.headers["x-maestro-signature"] == f"sha256={digest}"
    assert abs(int(timestamp) - time.time()) < 60


def test_slack_gets_a_text_in_which_nobody_is_mentioned(receiver: WebhookServer) -> None:
    made = run(slack(receiver).create(a_case(description="<!channel> & <@U1>")))
    assert made.key == "effect-1"
    run(slack(receiver).create(a_case(description="again " * 2000)))
    first, second = (each["text"] for each in receiver.messages())
    assert first == "*draft: TIMEOUT: not done*\n&lt;!channel&gt; &amp; &lt;@U1&gt;"
    assert second.startswith("*draft: TIMEOUT: not done*\nagain")
    assert len(second) <= 4000


@pytest.mark.parametrize("make", [webhook, slack])
def test_they_cannot_be_asked(receiver: WebhookServer, make: Any) -> None:
    tickets = make(receiver)
    assert not tickets.finds
    asked = tickets.find(LABEL), tickets.comments("1"), tickets.ticket("1")
    for call in (*asked, tickets.comment("1", "again")):
        with pytest.raises(TicketRefusedError, match="maestro answer") as caught:
            run(call)
        assert caught.value.permanent


@pytest.mark.parametrize("make", [webhook, slack])
def test_errors_say_whether_it_was_delivered(receiver: WebhookServer, make: Any) -> None:
    receiver.faults = ["post:429@5", "post:404", "post:500", "post:drop"]
    with pytest.raises(TicketRefusedError) as busy:
        run(make(receiver).create(a_case()))
    assert busy.value.retry_after == 5
    with pytest.raises(TicketRefusedError) as refused:
        run(make(receiver).create(a_case()))
    assert refused.value.permanent
    for _ in range(2):
        with pytest.raises(TicketUnknownError):
            run(make(receiver).create(a_case()))


@pytest.mark.parametrize("make", [webhook, slack])
def test_the_address_of_a_webhook_is_shown_nowhere(
    receiver: WebhookServer, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    tickets = make(receiver)
    run(tickets.create(a_case()))
    receiver.faults = ["post:500", "post:drop", "post:redirect"]
    shown = [repr(vars(tickets))]
    for _ in range(3):
        with pytest.raises((TicketUnknownError, TicketRefusedError)) as caught:
            run(tickets.create(a_case()))
        shown.append(repr(caught.value))
        if caught.value.__context__ is not None:
            shown.append(repr(caught.value.__context__))
    shown.append(caplog.text)
    assert [text for text in shown if "a-secret-path" in text or SECRET in text] == []


def test_an_address_may_have_a_query(receiver: WebhookServer) -> None:
    run(system(webhook_url=receiver.address + "?code=1", webhook_secret="s").create(a_case()))
    assert receiver.requests[0].query == {"code": "1"}


def test_a_key_with_other_characters_is_encoded(receiver: WebhookServer) -> None:
    run(webhook(receiver).create(a_case(effect_key="run/ü 1")))
    assert receiver.requests[0].headers["idempotency-key"] == "run/%C3%BC 1"
