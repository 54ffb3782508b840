"""Tickets in Jira: Cloud through REST version 3, Server and Data Center through version 2."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from maestro_hive.engine.tickets import Comment, Ticket, adf, label_of, wiki
from maestro_hive.engine.tickets.accounts import is_allowed
from maestro_hive.engine.tickets.http import by_its_clock
from maestro_hive.engine.tickets.texts import one_line

if TYPE_CHECKING:
    from maestro_hive.engine.escalation import EscalationCase
    from maestro_hive.engine.settings import Secret
    from maestro_hive.engine.tickets.http import Response, Server

#: What Jira accepts as a summary and as a label.
_MAX_SUMMARY = 255
_MAX_LABEL = 255
_PAGE = 50
#: More pages of comments than any ticket that people read has.
_MAX_PAGES = 200
#: By how many minutes the search reaches further back than asked for: a clock may be set.
_SPARE_MINUTES = 5
_STATUS_FIELDS = ["status", "resolution"]


class JiraTickets:
    """Tickets in one project of a Jira site.

    Its search finds a new ticket only when the index contains it, at the latest after
    ``index_lag`` seconds; everything else is read as it is.
    """

    name = "jira"
    finds = True

    def __init__(
        self,
        server: Server,
        *,
        version: int,
        project_key: str,
        issue_type: str,
        priority: str,
        index_lag: float,
        answerers: tuple[str, ...],
    ) -> None:
        self.index_lag = index_lag
        self._server = server
        self._version = version
        self._project_key = project_key
        self._issue_type = issue_type
        self._priority = priority
        self._answerers = answerers
        #: By the id of an account, everything it may be called in the configuration.
        self._names: dict[str, frozenset[str]] = {}
        self._own: str | None = None

    async def find(self, label: str, since: datetime | None = None) -> Ticket | None:
        """Return an unresolved ticket with this label, the oldest; None if there is none.

        One that was created at ``since`` or later is found also if it is resolved. What the search
        returns is read again: its index may be older than a ticket's resolution.
        """
        state = "statusCategory != Done"
        if since is not None:
            state = f'({state} OR created >= "{_minutes_since(since)}")'
        jql = (
            f"project = {_quoted(self._project_key)} AND labels = {_quoted(_label(label))}"
            f" AND {state} ORDER BY created ASC"
        )
        wanted = {"jql": jql, "fields": [*_STATUS_FIELDS, "created"], "maxResults": _PAGE}
        path = "/search/jql" if self._version == 3 else "/search"
        response = await self._request("POST", path, data=wanted, changes=False)
        first = None if since is None else by_its_clock(response, since)
        for issue in _listed(response.document(), "issues"):
            key = issue.get("key")
            is_new = first is not None and self._time(_part(issue, "fields", "created")) >= first
            if isinstance(key, str) and (is_new or not _is_resolved(issue)):
                ticket = await self._existing(key)
                if ticket is not None and (is_new or not ticket.resolved):
                    return ticket
        return None

    async def _existing(self, key: str) -> Ticket | None:
        """Return a ticket as it is now; None if it was deleted after it was indexed."""
        response = await self._send("GET", _issue(key), query=_STATUS_QUERY, changes=False)
        if response.status in {404, 410}:
            return None
        return self._read(key, self._checked(response, changes=False))

    async def create(self, case: EscalationCase) -> Ticket:
        """Create a ticket; without a priority, if the site refuses the one that is configured."""
        fields = self._fields(case)
        response = await self._send("POST", "/issue", data={"fields": fields}, changes=True)
        if response.status == 400 and "priority" in fields and _refuses(response, "priority"):
            del fields["priority"]
            response = await self._send("POST", "/issue", data={"fields": fields}, changes=True)
        key = self._checked(response, changes=True).document().get("key")
        if not isinstance(key, str) or not key:
            raise self._server.no_response("POST /issue", "it has no key", changes=True)
        return self._ticket(key, resolved=False)

    def _fields(self, case: EscalationCase) -> dict[str, Any]:
        labels = dict.fromkeys(_label(each) for each in (*case.labels, label_of(case)) if each)
        fields: dict[str, Any] = {
            "project": {"key": self._project_key},
            "issuetype": {"name": self._issue_type},
            "summary": one_line(case.summary, _MAX_SUMMARY),
            "description": self._body(case.description),
            "labels": list(labels),
        }
        if self._priority:
            fields["priority"] = {"name": self._priority}
        return fields

    async def comment(self, key: str, text: str) -> str:
        """Add a comment to a ticket; return the comment's id."""
        response = await self._request(
            "POST", f"{_issue(key)}/comment", data={"body": self._body(text)}, changes=True
        )
        made = response.document().get("id")
        if not isinstance(made, str | int) or not str(made):
            raise self._server.no_response("POST comment", "it has no id", changes=True)
        return str(made)

    async def comments(self, key: str) -> list[Comment]:
        """Return the comments on a ticket, the oldest first."""
        await self._learn_own_account()
        found: dict[str, Comment] = {}
        for _ in range(_MAX_PAGES):
            query = {"startAt": len(found), "maxResults": _PAGE, "orderBy": "created"}
            response = await self._request(
                "GET", f"{_issue(key)}/comment", query=query, changes=False
            )
            page = [self._comment(each) for each in _listed(response.document(), "comments")]
            new = {each.id: each for each in page if each.id not in found}
            found |= new
            total = response.document().get("total")
            if not new or (isinstance(total, int) and len(found) >= total):
                break
        return sorted(found.values(), key=lambda each: each.created)  # stable: ids stay in order

    async def ticket(self, key: str) -> Ticket:
        """Return a ticket as it is now."""
        return self._read(
            key, await self._request("GET", _issue(key), query=_STATUS_QUERY, changes=False)
        )

    def is_own(self, comment: Comment) -> bool:
        """Return whether a comment was made by the account of the token.

        Before any comment was read here the account is not known, and none may be an answer.
        """
        return self._own is None or comment.author == self._own

    def may_answer(self, comment: Comment) -> bool:
        """Return whether a comment is by an account that ``ticket_answerers`` names."""
        names = self._names.get(comment.author, frozenset())
        return is_allowed(self._answerers, names | {comment.author})

    # --- what is sent and received -----------------------------------------------------------------

    def _body(self, text: str) -> object:
        return adf.document(text) if self._version == 3 else wiki.markup(text)

    def _comment(self, found: dict[str, Any]) -> Comment:
        body = found.get("body")
        author = found.get("author")
        account = author if isinstance(author, dict) else {}
        name = _account_id(account)
        address = account.get("emailAddress")
        self._names[name] = frozenset({address} if isinstance(address, str) and address else ())
        return Comment(
            id=str(found.get("id", "")),
            author=name,
            text=body if isinstance(body, str) else adf.text_of(body),
            created=self._time(found.get("created")),
        )

    def _time(self, text: object) -> datetime:
        try:
            return datetime.fromisoformat(str(text)).astimezone(UTC)
        except ValueError:
            reason = f"it has the time {text!r}"
            raise self._server.no_response("response", reason, changes=False) from None

    async def _learn_own_account(self) -> None:
        if self._own is None:
            response = await self._request("GET", "/myself", changes=False)
            own = _account_id(response.document())
            if not own:
                raise self._server.no_response("GET /myself", "it has no account", changes=False)
            self._own = own

    def _read(self, key: str, response: Response) -> Ticket:
        found = response.document()
        moved = found.get("key")  # a ticket that was moved to another project has another key
        return self._ticket(
            moved if isinstance(moved, str) and moved else key, resolved=_is_resolved(found)
        )

    def _ticket(self, key: str, *, resolved: bool) -> Ticket:
        address = f"{self._server.address}/browse/{quote(key)}"
        return Ticket(key=key, address=address, resolved=resolved)

    async def _request(self, method: str, path: str, *, changes: bool, **given: Any) -> Response:
        return self._checked(
            await self._send(method, path, changes=changes, **given), changes=changes
        )

    async def _send(self, method: str, path: str, *, changes: bool, **given: Any) -> Response:
        full = f"/rest/api/{self._version}{path}"
        return await self._server.request(method, full, changes=changes, **given)

    def _checked(self, response: Response, *, changes: bool) -> Response:
        if 200 <= response.status < 300:
            if response.json() is None:
                raise self._server.no_response("response", "it is not JSON", changes=changes)
            return response
        raise self._server.failed(response, _said(response), changes=changes)


_STATUS_QUERY = {"fields": ",".join(_STATUS_FIELDS)}


def credentials(email: str | None, token: Secret) -> dict[str, str]:
    """Return the header that proves who sends a request: of an e-mail address, or of a token alone."""
    if email is None:
        return {"Authorization": f"Bearer {token.reveal()}"}
    pair = base64.b64encode(f"{email}:{token.reveal()}".encode()).decode()
    return {"Authorization": f"Basic {pair}"}


def _issue(key: str) -> str:
    return f"/issue/{quote(key, safe='')}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _minutes_since(when: datetime) -> str:
    """Return a time as JQL has it in whatever zone its account is: so many minutes ago, or more."""
    passed = max((datetime.now(UTC) - when).total_seconds(), 0.0)
    return f"-{int(passed // 60) + _SPARE_MINUTES}m"


def _label(text: str) -> str:
    """Return a label as Jira accepts it: without blanks."""
    return "-".join(text.split())[:_MAX_LABEL]


def _listed(document: dict[str, Any], name: str) -> list[dict[str, Any]]:
    found = document.get(name)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _part(document: object, *path: str) -> object:
    for name in path:
        document = document.get(name) if isinstance(document, dict) else None
    return document


def _is_resolved(issue: dict[str, Any]) -> bool:
    done = _part(issue, "fields", "status", "statusCategory", "key") == "done"
    return done or _part(issue, "fields", "resolution") is not None


def _account_id(account: dict[str, Any]) -> str:
    """Return what identifies an account: its id in Cloud, its name or key on a server."""
    for name in ("accountId", "name", "key"):
        found = account.get(name)
        if isinstance(found, str) and found:
            return found
    return ""


def _refuses(response: Response, field: str) -> bool:
    errors = response.document().get("errors")
    return isinstance(errors, dict) and field in errors


def _said(response: Response) -> str:
    """Return what Jira says about an error, in its own words."""
    document = response.document()
    messages = document.get("errorMessages")
    errors = document.get("errors")
    said = [str(each) for each in messages] if isinstance(messages, list) else []
    if isinstance(errors, dict):
        said += [f"{name}: {text}" for name, text in errors.items()]
    for name in ("message", "errorMessage"):
        if isinstance(document.get(name), str):
            said.append(document[name])
    return "; ".join(said)
