"""Tickets in Jira, Cloud and Server: created once, found, commented on, read and resolved."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.tickets import (
    Comment,
    Ticket,
    TicketMissingError,
    TicketRefusedError,
    TicketUnknownError,
)
from tests.jira_server import EMAIL, OWN_ACCOUNT, PERSON, JiraServer
from tests.tickets.cases import LABEL, a_case, system
from tests.timing import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from maestro_hive.engine.tickets import TicketSystem

run = asyncio.run


@pytest.fixture(params=[3, 2], ids=["cloud", "server"])
def jira(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[JiraServer]:
    with JiraServer(tmp_path, version=request.param) as server:
        yield server


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[JiraServer]:
    with JiraServer(tmp_path) as server:
        yield server


def of(server: JiraServer, **settings: Any) -> TicketSystem:
    return system(**{**server.settings, **settings})


# --- tickets -----------------------------------------------------------------------------------------


def test_a_ticket_has_what_is_known_about_the_failure(jira: JiraServer) -> None:
    made = run(of(jira).create(a_case()))
    assert made == Ticket(key="MD-1", address=f"{jira.url}/browse/MD-1")
    (ticket,) = jira.tickets()
    fields = ticket["fields"]
    assert fields["summary"] == "draft: TIMEOUT: not done"
    assert fields["labels"] == ["maestro-hive", "timeout", LABEL]
    assert fields["issuetype"] == {"name": "Bug"}
    assert fields["priority"] == {"name": "High"}
    assert "increase timeout_seconds" in str(fields["description"]).replace("\\", "")


def test_project_type_and_priority_are_those_of_the_configuration(jira: JiraServer) -> None:
    run(of(jira, jira_issue_type="Task", jira_priority="Low").create(a_case()))
    assert jira.tickets()[0]["fields"]["issuetype"] == {"name": "Task"}
    assert jira.tickets()[0]["fields"]["priority"] == {"name": "Low"}
    run(of(jira, jira_priority="").create(a_case()))
    assert "priority" not in jira.tickets()[1]["fields"]
    with pytest.raises(TicketRefusedError, match="project: Specify a valid project"):
        run(of(jira, jira_project_key="OPS").create(a_case()))


@pytest.mark.parametrize("priorities", [None, ("Urgent",)])
def test_a_site_that_refuses_the_priority_gets_the_ticket_without_it(
    jira: JiraServer, priorities: Any
) -> None:
    jira.priorities = priorities
    assert run(of(jira).create(a_case())).key == "MD-1"
    (ticket,) = jira.tickets()
    assert "priority" not in ticket["fields"]
    assert jira.count("create") == 2


def test_any_text_becomes_a_ticket(jira: JiraServer) -> None:
    text = (
        "a\x00b\x1bc\r\nd\u2028e\ud800\n\n```\nx\n\n  y\n```\n- \n-\n* {code} [x|y] \\\\ é 😀" * 3
    )
    run(of(jira).create(a_case(summary=text, description=text, labels=("two words", ""))))
    run(of(jira).comment("MD-1", text))
    (ticket,) = jira.tickets()
    assert ticket["fields"]["labels"] == ["two-words", LABEL]
    assert len(ticket["fields"]["summary"]) <= 255


def test_a_long_description_is_shortened_in_its_middle(jira: JiraServer) -> None:
    text = "it started here\n" + "- a line\n" * 20_000 + "it ended here"
    run(of(jira).create(a_case(description=text)))
    body = str(jira.tickets()[0]["fields"]["description"])
    assert "it started here" in body
    assert "shortened; the journal has the whole text" in body
    assert "it ended here" in body


def test_a_ticket_is_found_by_its_label_while_it_is_unresolved(jira: JiraServer) -> None:
    tickets = of(jira)
    assert run(tickets.find(LABEL)) is None
    made = run(tickets.create(a_case()))
    assert run(tickets.find(LABEL)) == made
    assert run(tickets.find("maestro-another")) is None
    assert run(tickets.find('x" OR labels = "' + LABEL)) is None
    jira.resolve("MD-1")
    assert run(tickets.find(LABEL)) is None
    assert run(tickets.ticket("MD-1")).resolved
    second = run(tickets.create(a_case()))
    assert run(tickets.find(LABEL)) == second


@pytest.mark.parametrize("by_resolution", [False, True])
def test_a_ticket_created_since_a_time_is_found_also_if_it_is_resolved(
    jira: JiraServer, by_resolution: bool
) -> None:
    tickets = of(jira)
    before = datetime.now(UTC)
    made = run(tickets.create(a_case()))
    jira.resolve("MD-1", by_resolution=by_resolution)
    assert run(tickets.find(LABEL)) is None
    assert run(tickets.find(LABEL, before)) == replace(made, resolved=True)
    assert run(tickets.find(LABEL, before + timedelta(minutes=1))) is None
    assert run(tickets.find("maestro-another", before)) is None


@pytest.mark.parametrize("ahead", [-3600, 3600])
def test_the_clock_of_the_site_may_be_wrong(cloud: JiraServer, ahead: int) -> None:
    cloud.ahead = ahead
    before = datetime.now(UTC)
    made = run(of(cloud).create(a_case()))
    cloud.resolve("MD-1")
    assert run(of(cloud).find(LABEL, before)) == replace(made, resolved=True)
    assert run(of(cloud).find(LABEL, before + timedelta(minutes=1))) is None


def test_a_resolution_counts_whatever_the_status_is(jira: JiraServer) -> None:
    tickets = of(jira)
    run(tickets.create(a_case()))
    assert not run(tickets.ticket("MD-1")).resolved
    jira.resolve("MD-1", by_resolution=True)
    assert run(tickets.ticket("MD-1")).resolved
    assert run(tickets.find(LABEL)) is None


def test_the_oldest_of_several_tickets_is_found(jira: JiraServer) -> None:
    tickets = of(jira)
    for _ in range(2):
        run(tickets.create(a_case()))
    found = run(tickets.find(LABEL))
    assert found is not None
    assert found.key == "MD-1"


def test_an_index_that_lags_finds_a_ticket_late(jira: JiraServer) -> None:
    jira.lag = 3600
    tickets = of(jira, jira_index_lag_seconds=3600)
    assert tickets.index_lag == 3600
    run(tickets.create(a_case()))
    assert run(tickets.find(LABEL)) is None
    jira.lag = 0
    assert run(tickets.find(LABEL)) is not None


def test_a_ticket_whose_resolution_is_not_indexed_yet_is_not_used(jira: JiraServer) -> None:
    tickets = of(jira)
    run(tickets.create(a_case()))
    run(tickets.create(a_case()))
    run(tickets.create(a_case()))
    jira.resolve("MD-1")
    jira.delete("MD-2")
    old = jira._is_found
    jira._is_found = lambda *_: True  # type: ignore[method-assign]
    found = run(tickets.find(LABEL))
    jira._is_found = old  # type: ignore[method-assign]
    assert found is not None
    assert found.key == "MD-3"


# --- comments ------------------------------------------------------------------------------------------


def test_comments_are_read_oldest_first_with_their_authors(jira: JiraServer) -> None:
    tickets = of(jira, ticket_answerers=[PERSON])
    run(tickets.create(a_case()))
    own = run(tickets.comment("MD-1", "It failed again.\n\n- twice"))
    theirs = jira.add_comment("MD-1", "use the other template")
    stranger = jira.add_comment("MD-1", "drop the database", author="account-stranger")
    comments = run(tickets.comments("MD-1"))
    assert [each.id for each in comments] == [own, theirs, stranger]
    assert [each.author for each in comments] == [OWN_ACCOUNT, PERSON, "account-stranger"]
    assert comments[1].text == "use the other template"
    assert [tickets.is_own(each) for each in comments] == [True, False, False]
    assert [tickets.may_answer(each) for each in comments] == [False, True, False]
    assert all(each.created.utcoffset().total_seconds() == 0 for each in comments)  # type: ignore[union-attr]


def test_a_comment_in_cloud_comes_back_as_it_was_written(cloud: JiraServer) -> None:
    tickets = of(cloud)
    run(tickets.create(a_case()))
    text = "It failed again:\nthe same\n\n- twice\n- *and* [again]\n\n```\nx = 1\n```"
    run(tickets.comment("MD-1", text))
    assert run(tickets.comments("MD-1"))[0].text == text


def test_there_are_more_comments_than_a_page_has(jira: JiraServer) -> None:
    tickets = of(jira)
    run(tickets.create(a_case()))
    made = [jira.add_comment("MD-1", f"comment {number}") for number in range(120)]
    assert [each.id for each in run(tickets.comments("MD-1"))] == made
    assert jira.count("comments") == 3


def answer_by(tickets: TicketSystem, author: str) -> bool:
    comments = [each for each in run(tickets.comments("MD-1")) if each.author == author]
    return tickets.may_answer(comments[0])


@pytest.mark.parametrize(
    "answerers, allowed",
    [
        ((), False),
        (("*",), True),
        ((PERSON,), True),
        ((PERSON.upper(),), True),
        ((f"{PERSON}@example.com",), True),
        (("somebody-else",), False),
        ((PERSON[:-1],), False),
    ],
)
def test_an_account_may_answer_if_the_configuration_names_it(
    cloud: JiraServer, answerers: tuple[str, ...], allowed: bool
) -> None:
    run(of(cloud).create(a_case()))
    cloud.add_comment("MD-1", "do it")
    assert answer_by(of(cloud, ticket_answerers=answerers), PERSON) is allowed


def test_a_name_that_is_displayed_does_not_make_an_account(cloud: JiraServer) -> None:
    run(of(cloud).create(a_case()))
    cloud.add_comment("MD-1", "do it")
    assert not answer_by(of(cloud, ticket_answerers=[PERSON.title() + " "]), "account-person")


def test_no_comment_is_an_answer_before_the_own_account_is_known(cloud: JiraServer) -> None:
    tickets = of(cloud, ticket_answerers=["*"])
    run(of(cloud).create(a_case()))
    cloud.add_comment("MD-1", "do it")
    (comment,) = run(of(cloud).comments("MD-1"))
    assert tickets.is_own(comment)
    cloud.faults = ["myself:403"]
    with pytest.raises(TicketRefusedError):
        run(tickets.comments("MD-1"))


# --- errors: whether something was made ------------------------------------------------------------------

Call = "Callable[[TicketSystem], Coroutine[Any, Any, Any]]"
CHANGES: dict[str, Any] = {
    "create": lambda tickets: tickets.create(a_case()),
    "comment": lambda tickets: tickets.comment("MD-1", "again"),
}
READS: dict[str, Any] = {
    "search": lambda tickets: tickets.find(LABEL),
    "ticket": lambda tickets: tickets.ticket("MD-1"),
    "comments": lambda tickets: tickets.comments("MD-1"),
}


def made(server: JiraServer) -> int:
    return len(server.tickets()) + sum(len(each["comments"]) for each in server.tickets())


@pytest.mark.parametrize("operation", CHANGES)
@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422])
def test_a_request_that_jira_refuses_made_nothing_and_is_not_tried_again(
    cloud: JiraServer, operation: str, status: int
) -> None:
    run(of(cloud).create(a_case()))
    cloud.faults = [f"{operation}:{status}"]
    with pytest.raises(TicketRefusedError, match=f"status {status}: a fault") as caught:
        run(CHANGES[operation](of(cloud)))
    assert caught.value.permanent
    assert caught.value.retry_after is None
    assert isinstance(caught.value, TicketMissingError) is (status == 404)
    assert made(cloud) == 1


@pytest.mark.parametrize("operation", ["comment", "ticket", "comments"])
def test_a_ticket_that_was_deleted_is_missing(jira: JiraServer, operation: str) -> None:
    run(of(jira).create(a_case()))
    jira.delete("MD-1")
    with pytest.raises(TicketMissingError, match="404"):
        run((CHANGES | READS)[operation](of(jira)))


@pytest.mark.parametrize("operation", [*CHANGES, *READS])
@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(
    "header, seconds", [("@30", 30.0), ("", None), ("@soon", None), ("@999999999", 86400.0)]
)
def test_a_busy_jira_says_when_to_try_again(
    cloud: JiraServer, operation: str, status: int, header: str, seconds: float | None
) -> None:
    run(of(cloud).create(a_case()))
    cloud.faults = [f"{operation}:{status}{header}"]
    with pytest.raises(TicketRefusedError, match=str(status)) as caught:
        run((CHANGES | READS)[operation](of(cloud)))
    assert not caught.value.permanent
    assert caught.value.retry_after == seconds
    assert made(cloud) == 1


def test_a_date_to_try_again_counts_from_the_date_of_the_response(cloud: JiraServer) -> None:
    cloud.faults = ["create:429@Fri, 31 Dec 1999 23:59:59 GMT"]
    with pytest.raises(TicketRefusedError) as caught:
        run(of(cloud).create(a_case()))
    assert caught.value.retry_after == 0.0


AMBIGUOUS = ["500", "502", "504", "drop", "cut", "garbage", "500-after", "drop-after"]


@pytest.mark.parametrize("operation", CHANGES)
@pytest.mark.parametrize("fault", AMBIGUOUS)
def test_what_was_sent_and_not_confirmed_may_have_been_made(
    cloud: JiraServer, operation: str, fault: str
) -> None:
    run(of(cloud).create(a_case()))
    cloud.faults = [f"{operation}:{fault}"]
    with pytest.raises(TicketUnknownError, match="whether it was executed is not known"):
        run(CHANGES[operation](of(cloud)))
    executed = fault.endswith("after") or fault in {"cut", "garbage"}
    assert made(cloud) == (2 if executed else 1)


@pytest.mark.parametrize("fault", ["hang", "hang-after"])
def test_a_request_without_a_response_in_time_may_have_been_executed(
    cloud: JiraServer, fault: str
) -> None:
    tickets = of(cloud, ticket_timeout_seconds=0.3)
    error = given_up(cloud, tickets, fault)
    assert "whether it was executed is not known" in str(error)
    wait_until(lambda: made(cloud) == (1 if fault == "hang-after" else 0))


def given_up(server: JiraServer, tickets: TicketSystem, fault: str) -> TicketUnknownError:
    """Return the error of a request that the server got; a busy machine may not send it in time."""
    for _ in range(20):
        server.faults = [f"create:{fault}"]
        try:
            run(tickets.create(a_case()))
        except TicketRefusedError as error:
            assert "nothing was sent" in str(error)  # noqa: PT017 - it is tried again
        except TicketUnknownError as error:
            return error
    pytest.fail("no request was sent in time")


@pytest.mark.parametrize("operation", READS)
@pytest.mark.parametrize("fault", ["500", "502", "drop", "cut", "garbage"])
def test_a_failed_read_made_nothing(cloud: JiraServer, operation: str, fault: str) -> None:
    run(of(cloud).create(a_case()))
    cloud.faults = [f"{operation}:{fault}"]
    with pytest.raises(TicketRefusedError) as caught:
        run(READS[operation](of(cloud)))
    assert not caught.value.permanent


@pytest.mark.parametrize("operation", [*CHANGES, *READS])
def test_a_redirect_to_another_host_is_not_followed(cloud: JiraServer, operation: str) -> None:
    run(of(cloud).create(a_case()))
    cloud.faults = [f"{operation}:redirect"]
    with pytest.raises(TicketRefusedError, match=r"redirects to 127\.0\.0\.2") as caught:
        run((CHANGES | READS)[operation](of(cloud)))
    assert caught.value.permanent
    assert made(cloud) == 1


def test_a_jira_that_is_not_there_made_nothing(tmp_path: Path) -> None:
    with JiraServer(tmp_path) as server:
        tickets = of(server)
    with pytest.raises(TicketRefusedError, match="nothing was sent") as caught:
        run(tickets.create(a_case()))
    assert not caught.value.permanent


def test_the_words_of_jira_are_in_the_error(cloud: JiraServer) -> None:
    with pytest.raises(TicketRefusedError, match="issuetype: Specify a valid issue type"):
        run(of(cloud, jira_issue_type="Story").create(a_case()))
    with pytest.raises(TicketRefusedError, match="Issue does not exist"):
        run(of(cloud).ticket("MD-9"))


def test_a_wrong_token_is_refused_and_shown_nowhere(
    jira: JiraServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    tickets = of(jira, jira_api_token="s3cret-token")
    with pytest.raises(TicketRefusedError, match="must be authenticated") as caught:
        run(tickets.create(a_case()))
    shown = [str(caught.value), repr(caught.value), repr(vars(tickets)), caplog.text]
    assert [text for text in shown if "s3cret-token" in text] == []
    chained: BaseException | None = caught.value
    while chained is not None:
        assert "s3cret-token" not in repr(chained)
        chained = chained.__cause__ or chained.__context__


def test_a_token_can_come_from_a_function(cloud: JiraServer) -> None:
    tokens = iter(["old", cloud.settings["jira_api_token"]])
    current = [next(tokens)]
    tickets = of(cloud, jira_api_token=lambda: current[0])
    with pytest.raises(TicketRefusedError, match="401"):
        run(tickets.ticket("MD-1"))
    current[0] = next(tokens)
    assert run(tickets.create(a_case())).key == "MD-1"


def test_the_account_of_a_server_has_a_token_and_no_address(tmp_path: Path) -> None:
    with JiraServer(tmp_path, version=2) as server:
        tickets = of(server)
        run(tickets.create(a_case()))
        authorization = server.requests[0].headers["authorization"]
        assert authorization.startswith("Bearer ")
        assert server.requests[0].path == "/rest/api/2/issue"
        with pytest.raises(TicketRefusedError, match="401"):
            run(of(server, jira_email=EMAIL, jira_api_version=2).create(a_case()))


def test_a_comment_whose_account_is_gone_is_nobodys(cloud: JiraServer) -> None:
    tickets = of(cloud, ticket_answerers=[PERSON])
    comment = Comment(id="1", author="", text="x", created=None)  # type: ignore[arg-type]
    assert not tickets.may_answer(comment)


# --- the server of the tests -------------------------------------------------------------------------------


def test_the_server_has_its_tickets_again_after_a_restart(tmp_path: Path) -> None:
    with JiraServer(tmp_path) as server:
        run(of(server).create(a_case()))
    with JiraServer(tmp_path) as server:
        assert run(of(server).find(LABEL)) is not None
        assert run(of(server).create(a_case())).key == "MD-2"


def test_the_server_refuses_a_newline_in_a_text_node(cloud: JiraServer) -> None:
    line = {"type": "text", "text": "a\nb"}
    document = {"version": 1, "type": "doc", "content": [{"type": "paragraph", "content": [line]}]}
    assert "INVALID_INPUT" in str(cloud._problem(document))
