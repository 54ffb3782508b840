"""Tickets as issues of GitHub: found by label without a lag, closed when they are resolved."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.tickets import (
    Ticket,
    TicketMissingError,
    TicketRefusedError,
    TicketUnknownError,
)
from tests.github_server import OWN_ACCOUNT, GitHubServer
from tests.tickets.cases import DESCRIPTION, LABEL, a_case, system

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maestro_hive.engine.tickets import TicketSystem

run = asyncio.run


@pytest.fixture
def github() -> Iterator[GitHubServer]:
    with GitHubServer() as server:
        yield server


def of(server: GitHubServer, **settings: Any) -> TicketSystem:
    return system(**{**server.settings, **settings})


def test_an_issue_is_opened_found_and_closed(github: GitHubServer) -> None:
    tickets = of(github)
    assert tickets.index_lag == 0
    assert run(tickets.find(LABEL)) is None
    made = run(tickets.create(a_case()))
    assert made == Ticket(key="1", address="https://github.example.com/acme/shop/issues/1")
    assert github.issues[0]["title"] == "draft: TIMEOUT: not done"
    assert github.issues[0]["body"] == DESCRIPTION
    assert run(tickets.find(LABEL)) == made
    assert run(tickets.find("maestro-other")) is None
    github.close("1")
    assert run(tickets.find(LABEL)) is None
    assert run(tickets.ticket("1")).resolved


def test_an_issue_created_since_a_time_is_found_also_if_it_is_closed(github: GitHubServer) -> None:
    tickets = of(github)
    before = datetime.now(UTC)
    made = run(tickets.create(a_case()))
    github.close(made.key)
    assert run(tickets.find(LABEL)) is None
    assert run(tickets.find(LABEL, before)) == replace(made, resolved=True)
    assert run(tickets.find(LABEL, before + timedelta(minutes=1))) is None
    run(tickets.create(a_case()))
    assert run(tickets.find(LABEL, before)) == replace(made, resolved=True), "the oldest"


def test_a_pull_request_with_the_label_is_not_a_ticket(github: GitHubServer) -> None:
    tickets = of(github)
    run(tickets.create(a_case()))
    github.issues[0]["pull_request"] = {}
    assert run(tickets.find(LABEL)) is None


def test_a_long_fingerprint_fits_into_a_label(github: GitHubServer) -> None:
    tickets = of(github)
    case = a_case(fingerprint="0123456789abcdef" * 4, labels=("x" * 80, "a,b"))
    made = run(tickets.create(case))
    assert run(tickets.find(f"maestro-{case.fingerprint}")) == made
    assert {"name": "a-b"} in github.issues[0]["labels"]


def test_comments_have_their_authors(github: GitHubServer) -> None:
    tickets = of(github, ticket_answerers="ada, grace")
    run(tickets.create(a_case()))
    own = run(tickets.comment("1", "It failed again."))
    github.add_comment("1", "use the other\r\ntemplate", author="Ada")
    github.add_comment("1", "drop it", author="mallory")
    comments = run(tickets.comments("1"))
    assert comments[0].id == own
    assert [each.author for each in comments] == [OWN_ACCOUNT, "Ada", "mallory"]
    assert comments[1].text == "use the other\ntemplate"
    assert [tickets.is_own(each) for each in comments] == [True, False, False]
    assert [tickets.may_answer(each) for each in comments] == [False, True, False]


def test_nobody_may_answer_unless_the_configuration_says_so(github: GitHubServer) -> None:
    run(of(github).create(a_case()))
    github.add_comment("1", "do it")
    (comment,) = run(of(github).comments("1"))
    assert not of(github).may_answer(comment)
    assert of(github, ticket_answerers=["*"]).may_answer(comment)


def test_an_app_takes_all_comments_of_apps_for_its_own(github: GitHubServer) -> None:
    github.is_app = True
    tickets = of(github)
    run(tickets.create(a_case()))
    run(tickets.comment("1", "again"))
    github.add_comment("1", "use it")
    comments = run(tickets.comments("1"))
    assert [tickets.is_own(each) for each in comments] == [True, False]


def test_there_are_more_comments_than_a_page_has(github: GitHubServer) -> None:
    tickets = of(github)
    run(tickets.create(a_case()))
    for number in range(205):
        github.add_comment("1", f"comment {number}")
    assert [each.text for each in run(tickets.comments("1"))][-1] == "comment 204"
    assert github.count("comments") == 3


def test_a_label_that_was_dropped_is_warned_about(
    github: GitHubServer, caplog: pytest.LogCaptureFixture
) -> None:
    github.may_label = False
    assert run(of(github).create(a_case())).key == "1"
    assert "without the label maestro-0123abcd" in caplog.text


@pytest.mark.parametrize("fault", ["500", "502", "drop-after", "garbage", "cut"])
def test_what_was_not_confirmed_may_have_been_made(github: GitHubServer, fault: str) -> None:
    github.faults = [f"create:{fault}"]
    with pytest.raises(TicketUnknownError):
        run(of(github).create(a_case()))


@pytest.mark.parametrize("status", [403, 429])
def test_a_rate_limit_is_waited_for(github: GitHubServer, status: int) -> None:
    github.faults = [f"create:{status}@7"]
    with pytest.raises(TicketRefusedError) as caught:
        run(of(github).create(a_case()))
    assert (caught.value.permanent, caught.value.retry_after) == (False, 7.0)


@pytest.mark.parametrize("status", [404, 410])
def test_an_issue_that_was_deleted_is_missing(github: GitHubServer, status: int) -> None:
    run(of(github).create(a_case()))
    github.faults = [f"comment:{status}", f"ticket:{status}"]
    with pytest.raises(TicketMissingError):
        run(of(github).comment("1", "again"))
    with pytest.raises(TicketMissingError):
        run(of(github).ticket("1"))


def test_the_words_of_github_are_in_the_error(github: GitHubServer) -> None:
    with pytest.raises(TicketRefusedError, match="401: Bad credentials") as caught:
        run(of(github, github_token="wrong-token").create(a_case()))
    assert caught.value.permanent
    assert "wrong-token" not in str(caught.value)
