"""Tickets as issues of a GitHub repository."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from maestro_hive.engine.tickets import Comment, Ticket, TicketRefusedError, label_of
from maestro_hive.engine.tickets.accounts import is_allowed
from maestro_hive.engine.tickets.http import MAX_RETRY_AFTER, by_its_clock, retry_after
from maestro_hive.engine.tickets.texts import clean, fitting, one_line
from maestro_hive.kernel.logs import get_logger

if TYPE_CHECKING:
    from maestro_hive.engine.escalation import EscalationCase
    from maestro_hive.engine.settings import Secret
    from maestro_hive.engine.tickets.http import Response, Server

logger = get_logger(__name__)

#: What GitHub accepts.
_MAX_TITLE = 256
_MAX_BODY = 65_536
_MAX_LABEL = 50
_PAGE = 100
#: More pages of comments than any issue that people read has.
_MAX_PAGES = 100


class GitHubTickets:
    """Issues of one repository; found by their label in the list of issues, which is always current."""

    name = "github"
    finds = True
    index_lag = 0.0

    def __init__(self, server: Server, *, repository: str, answerers: tuple[str, ...]) -> None:
        self._server = server
        self._path = f"/repos/{repository}/issues"
        self._answerers = answerers
        self._bots: set[str] = set()
        #: The name of the token's account; empty if it belongs to an app, which has none.
        self._own: str | None = None

    async def find(self, label: str, since: datetime | None = None) -> Ticket | None:
        """Return an open issue with this label, the oldest; None if there is none.

        One that was created at ``since`` or later is found also if it is closed.
        """
        query: dict[str, str | int] = {
            "labels": _label(label),
            "state": "open" if since is None else "all",
            "sort": "created",
            "direction": "asc" if since is None else "desc",  # closed ones may be many, and old
            "per_page": _PAGE,
        }
        response = await self._request("GET", self._path, query=query, changes=False)
        first = None if since is None else by_its_clock(response, since)
        found = []
        for issue in _listed(response):
            if "pull_request" not in issue:
                ticket = self._ticket(issue, changes=False)
                if not ticket.resolved or (first is not None and self._created(issue) >= first):
                    found.append(ticket)
        return min(found, key=lambda each: int(each.key), default=None)

    async def create(self, case: EscalationCase) -> Ticket:
        """Open an issue; log a warning if GitHub gave it no label, by which it would be found."""
        label = _label(label_of(case))
        labels = dict.fromkeys((*(_label(each) for each in case.labels if each), label))
        data = {
            "title": one_line(case.summary, _MAX_TITLE),
            "body": fitting(clean(case.description), _MAX_BODY),
            "labels": list(labels),
        }
        response = await self._request("POST", self._path, data=data, changes=True)
        ticket = self._ticket(response.document(), changes=True)
        if label not in _labels(response.document()):
            logger.warning(
                "GitHub created issue %s without the label %s, by which it would be found again: give"
                " the token's account the right to set labels",
                ticket.key,
                label,
            )
        return ticket

    async def comment(self, key: str, text: str) -> str:
        """Add a comment to an issue; return the comment's id."""
        data = {"body": fitting(clean(text), _MAX_BODY)}
        path = f"{self._issue(key)}/comments"
        response = await self._request("POST", path, data=data, changes=True)
        made = response.document().get("id")
        if not isinstance(made, str | int):
            raise self._server.no_response("POST comment", "it has no id", changes=True)
        return str(made)

    async def comments(self, key: str) -> list[Comment]:
        """Return the comments on an issue, the oldest first."""
        await self._learn_own_account()
        found: list[Comment] = []
        for page in range(1, _MAX_PAGES + 1):
            query = {"per_page": _PAGE, "page": page}
            path = f"{self._issue(key)}/comments"
            listed = _listed(await self._request("GET", path, query=query, changes=False))
            found += [self._comment(each) for each in listed]
            if len(listed) < _PAGE:
                break
        return sorted(found, key=lambda each: each.created)

    async def ticket(self, key: str) -> Ticket:
        """Return an issue as it is now."""
        response = await self._request("GET", self._issue(key), changes=False)
        return self._ticket(response.document(), changes=False)

    def is_own(self, comment: Comment) -> bool:
        """Return whether a comment was made by the account of the token.

        An app cannot ask for its own name: comments of all apps count as its own.
        """
        if self._own is None:
            return True
        if not self._own:
            return comment.author in self._bots
        return comment.author.casefold() == self._own.casefold()

    def may_answer(self, comment: Comment) -> bool:
        """Return whether a comment is by an account that ``ticket_answerers`` names."""
        return is_allowed(self._answerers, frozenset({comment.author}))

    # --- what is sent and received -----------------------------------------------------------------

    def _issue(self, key: str) -> str:
        return f"{self._path}/{quote(key, safe='')}"

    def _ticket(self, issue: dict[str, Any], *, changes: bool) -> Ticket:
        number, address = issue.get("number"), issue.get("html_url")
        if not isinstance(number, int):
            raise self._server.no_response("issue", "it has no number", changes=changes)
        return Ticket(
            key=str(number),
            address=address if isinstance(address, str) else None,
            resolved=issue.get("state") == "closed",
        )

    def _comment(self, found: dict[str, Any]) -> Comment:
        user = found.get("user")  # none if the account was deleted
        account = user if isinstance(user, dict) else {}
        author = str(account.get("login") or "")
        if account.get("type") == "Bot":
            self._bots.add(author)
        text = str(found.get("body") or "").replace("\r\n", "\n")
        return Comment(
            id=str(found.get("id")), author=author, text=text, created=self._created(found)
        )

    def _created(self, found: dict[str, Any]) -> datetime:
        text = str(found.get("created_at"))
        try:
            return datetime.fromisoformat(text).astimezone(UTC)
        except ValueError:
            reason = f"it has the time {text!r}"
            raise self._server.no_response("response", reason, changes=False) from None

    async def _learn_own_account(self) -> None:
        if self._own is not None:
            return
        response = await self._send("GET", "/user", changes=False)
        if response.status == 403 and retry_after(response) is None and not _is_limited(response):
            self._own = ""
            return
        self._own = str(self._checked(response, changes=False).document().get("login") or "")

    async def _request(self, method: str, path: str, *, changes: bool, **given: Any) -> Response:
        return self._checked(
            await self._send(method, path, changes=changes, **given), changes=changes
        )

    async def _send(self, method: str, path: str, *, changes: bool, **given: Any) -> Response:
        return await self._server.request(method, path, changes=changes, **given)

    def _checked(self, response: Response, *, changes: bool) -> Response:
        if 200 <= response.status < 300:
            if response.json() is None:
                raise self._server.no_response("response", "it is not JSON", changes=changes)
            return response
        failed = self._server.failed(response, _said(response), changes=changes)
        if response.status in {403, 429} and _is_limited(response):
            raise TicketRefusedError(str(failed), retry_after=_wait(response))
        raise failed


def credentials(token: Secret) -> dict[str, str]:
    """Return the headers that prove who sends a request, and name the version of the interface."""
    return {
        "Authorization": f"Bearer {token.reveal()}",
        "Accept": "application/vnd.github+json",
        "X-GitHub-Api-Version": "2022-11-28",
    }


def _label(text: str) -> str:
    """Return a label as GitHub accepts it; the start of a fingerprint identifies it too."""
    return text.replace(",", "-")[:_MAX_LABEL]  # a comma would be two labels when searched for


def _labels(issue: dict[str, Any]) -> set[str]:
    found = issue.get("labels")
    each = found if isinstance(found, list) else []
    return {str(label.get("name") if isinstance(label, dict) else label) for label in each}


def _listed(response: Response) -> list[dict[str, Any]]:
    found = response.json()
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _is_limited(response: Response) -> bool:
    """Return whether a refusal is about the rate of requests; GitHub uses 403 for it too."""
    headers = response.headers
    named = headers.get("x-ratelimit-remaining") == "0" or "retry-after" in headers
    return named or "rate limit" in _said(response).lower()


def _wait(response: Response) -> float | None:
    asked = retry_after(response)
    reset = response.headers.get("x-ratelimit-reset", "")
    if asked is not None or not (reset.isascii() and reset.isdigit()):
        return asked
    return min(max(int(reset[:18]) - time.time(), 0.0), MAX_RETRY_AFTER)


def _said(response: Response) -> str:
    document = response.document()
    errors = document.get("errors")
    parts = [document.get("message"), *(errors if isinstance(errors, list) else ())]
    said = (each.get("message") or each if isinstance(each, dict) else each for each in parts)
    return "; ".join(str(each) for each in said if each)
