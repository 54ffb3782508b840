"""A Jira on loopback that speaks REST versions 3 and 2 as documented, for tests.

``with JiraServer(folder, version=3, lag=0.5, faults=["create:drop-after"]) as server`` stores what it has
in a file of the folder before it answers: a server that is started on the same folder has the same
tickets. The search finds a ticket when it is ``lag`` seconds old, and sees a resolution as late; all
else is current. The faults are those of ``tests/loopback_server.py``, for the operations ``create``,
``search``, ``ticket``, ``comment``, ``comments`` and ``myself``.
"""

from __future__ import annotations

import base64
import json
import re
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.loopback_server import Answer, LoopbackServer, Request

if TYPE_CHECKING:
    from collections.abc import Iterable

PROJECT = "MD"
EMAIL = "robot@example.com"
TOKEN = "a-token-of-jira"
OWN_ACCOUNT = "account-robot"
PERSON = "account-person"

_BLOCKS = {"paragraph", "codeBlock", "bulletList", "orderedList", "heading", "rule", "blockquote"}
_CHILDREN = {
    "doc": _BLOCKS,
    "paragraph": {"text", "hardBreak"},
    "heading": {"text", "hardBreak"},
    "codeBlock": {"text"},
    "bulletList": {"listItem"},
    "orderedList": {"listItem"},
    "listItem": {"paragraph", "bulletList", "orderedList", "codeBlock"},
    "blockquote": {"paragraph"},
}


class JiraServer(LoopbackServer):
    """A Jira with one project."""

    def __init__(
        self,
        folder: Path,
        *,
        version: int = 3,
        lag: float = 0.0,
        faults: Iterable[str] = (),
        priorities: Iterable[str] | None = ("High", "Low"),
        port: int = 0,
    ) -> None:
        super().__init__(faults, port)
        self.version = version
        #: After how many seconds the search finds what was created; a test may change it.
        self.lag = lag
        #: The priorities that tickets can have; None if tickets of the project have none.
        self.priorities = None if priorities is None else set(priorities)
        self._file = Path(folder) / "jira.json"
        self._file.parent.mkdir(parents=True, exist_ok=True)

    # --- what tests ask and do -----------------------------------------------------------------------

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of an ExecutionConfig whose escalations come here."""
        email = {"jira_email": EMAIL} if self.version == 3 else {}
        return {"jira_base_url": self.url, "jira_api_token": TOKEN, **email}

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of a process whose escalations come here."""
        email = {"JIRA_EMAIL": EMAIL} if self.version == 3 else {}
        return {"JIRA_BASE_URL": self.url, "JIRA_API_TOKEN": TOKEN, **email}

    def tickets(self) -> list[dict[str, Any]]:
        """Return all tickets, the oldest first: key, created, resolved, fields, comments."""
        with self.lock:
            if not self._file.exists():
                return []
            found: list[dict[str, Any]] = json.loads(self._file.read_text())
            return found

    def add_comment(self, key: str, text: str, author: str = PERSON, **made: Any) -> str:
        """Comment on a ticket as a person does; return the comment's id."""
        body: Any = text
        if self.version == 3:
            line = {"type": "text", "text": text}
            body = {
                "version": 1,
                "type": "doc",
                "content": [{"type": "paragraph", "content": [line]}],
            }
        with self.lock:
            return str(self._add_comment(key, made.pop("body", body), author)["id"])

    def resolve(self, key: str, *, by_resolution: bool = False) -> None:
        """Resolve a ticket as a person does: by its status, or by a resolution alone."""
        with self.lock:
            tickets = self.tickets()
            ticket = _with_key(tickets, key)
            ticket["resolved"] = self._now()
            ticket["by_resolution"] = by_resolution
            self._store(tickets)

    def delete(self, key: str) -> None:
        """Delete a ticket; the search finds it until its index knows."""
        with self.lock:
            tickets = self.tickets()
            _with_key(tickets, key)["deleted"] = self._now()
            self._store(tickets)

    # --- requests --------------------------------------------------------------------------------------

    def operation(self, request: Request) -> str:
        path = request.path.removeprefix(f"/rest/api/{self.version}")
        search = "/search/jql" if self.version == 3 else "/search"
        known = {
            ("POST", "/issue"): "create",
            ("POST", search): "search",
            ("GET", "/myself"): "myself",
        }
        if (request.method, path) in known:
            return known[request.method, path]
        if re.fullmatch(r"/issue/[^/]+/comment", path):
            return "comment" if request.method == "POST" else "comments"
        if re.fullmatch(r"/issue/[^/]+", path) and request.method == "GET":
            return "ticket"
        return "unknown"

    def execute(self, operation: str, request: Request) -> Answer:
        if not self._is_known(request.headers.get("authorization", "")):
            return _refused(401, "Client must be authenticated to access this resource.")
        if request.method == "POST" and request.headers.get("content-type") != "application/json":
            return _refused(415, "Unsupported Media Type")
        match operation:
            case "create":
                answer = self._create(request.json())
            case "search":
                answer = self._search(request.json())
            case "myself":
                answer = 200, self._account(OWN_ACCOUNT)
            case "unknown":
                answer = _refused(404, f"there is no {request.method} {request.path}")
            case _:
                answer = self._about_ticket(operation, request)
        return answer

    def _about_ticket(self, operation: str, request: Request) -> Answer:
        key = request.path.removeprefix(f"/rest/api/{self.version}/issue/").partition("/")[0]
        found = [each for each in self.tickets() if each["key"] == key and "deleted" not in each]
        if not found:
            return _refused(404, "Issue does not exist or you do not have permission to see it.")
        operations = {
            "ticket": self._ticket,
            "comment": self._comment,
            "comments": self._comments,
        }
        return operations[operation](found[0], request)

    def _is_known(self, given: str) -> bool:
        pair = base64.b64encode(f"{EMAIL}:{TOKEN}".encode()).decode()
        return given == (f"Basic {pair}" if self.version == 3 else f"Bearer {TOKEN}")

    def _create(self, data: Any) -> Answer:
        fields = data["fields"]
        if errors := self._errors(fields):
            return 400, {"errorMessages": [], "errors": errors}
        tickets = self.tickets()
        number = len(tickets) + 1
        key = f"{PROJECT}-{number}"
        tickets.append(
            {"key": key, "id": str(10_000 + number), "created": self._now(), "fields": fields,
             "comments": []}
        )  # fmt: skip
        self._store(tickets)
        where = f"{self.url}/rest/api/{self.version}/issue/{10_000 + number}"
        return 201, {"id": str(10_000 + number), "key": key, "self": where}

    def _errors(self, fields: dict[str, Any]) -> dict[str, str]:
        errors = {}
        if fields.get("project") != {"key": PROJECT}:
            errors["project"] = "Specify a valid project ID or key"
        if fields.get("issuetype") not in ({"name": "Bug"}, {"name": "Task"}):
            errors["issuetype"] = "Specify a valid issue type"
        summary = fields.get("summary")
        if not summary or "\n" in summary or len(summary) > 255:
            errors["summary"] = "The summary is invalid because it contains newline characters."
        if problem := self._problem(fields.get("description")):
            errors["description"] = problem
        if any(" " in label for label in fields.get("labels", [])):
            errors["labels"] = "The label contains spaces which is invalid."
        if "priority" in fields:
            if self.priorities is None:
                errors["priority"] = "Field 'priority' cannot be set. It is not on the screen."
            elif fields["priority"].get("name") not in self.priorities:
                errors["priority"] = "Specify the Priority (name) in string format"
        return errors

    def _problem(self, body: Any) -> str | None:
        if self.version == 2:
            sound = isinstance(body, str) and len(body) <= 32_767
            return None if sound else "Operation value must be a string"
        return adf_problem(body)

    def _search(self, data: Any) -> Answer:
        clauses, _, _ = data.get("jql", "").partition(" ORDER BY ")
        wanted: dict[str, str] = {}
        for clause in clauses.split(" AND "):
            if clause == "statusCategory != Done":
                wanted["unresolved"] = "yes"
            elif found := re.fullmatch(
                r'\(statusCategory != Done OR created >= "-(\d+)m"\)', clause
            ):
                wanted |= {"unresolved": "yes", "minutes": found[1]}
            elif found := re.fullmatch(r'(project|labels) = "((?:[^"\\]|\\.)*)"', clause):
                wanted[found[1]] = found[2]
            else:
                return _refused(400, f"Error in the JQL Query: {clause!r}")
        if "labels" not in wanted:
            return _refused(400, "Unbounded JQL queries are not allowed here.")
        found_issues = [each for each in self.tickets() if self._is_found(each, wanted)]
        shown = [self._issue(each, data.get("fields"), self.lag) for each in found_issues]
        extra: dict[str, Any] = {"isLast": True}
        if self.version == 2:
            extra = {"startAt": 0, "maxResults": 50, "total": len(shown)}
        return 200, {"issues": shown[: data.get("maxResults", 50)], **extra}

    def _is_found(self, ticket: dict[str, Any], wanted: dict[str, str]) -> bool:
        seen = self._now() - self.lag
        is_new = ticket["created"] >= self._now() - 60 * int(wanted.get("minutes", "0"))
        return (
            ticket["created"] <= seen
            and ticket.get("deleted", seen) >= seen
            and wanted.get("project") == PROJECT
            and wanted["labels"] in ticket["fields"].get("labels", [])
            and not ("unresolved" in wanted and _is_done(ticket, seen) and not is_new)
        )

    def _issue(self, ticket: dict[str, Any], fields: Any, lag: float = 0.0) -> dict[str, Any]:
        if (
            fields is None and self.version == 3
        ):  # as documented: without fields there are ids alone
            return {"id": ticket["id"]}
        seen = self._now() - lag
        done = _is_done(ticket, seen)
        resolved = ticket.get("resolved", seen + 1) <= seen
        category = {"key": "done"} if done else {"key": "new"}
        status = {"name": "Done" if done else "To Do", "statusCategory": category}
        resolution = {"name": "Fixed"} if resolved and ticket.get("by_resolution") else None
        created = _time(ticket["created"])
        every = {**ticket["fields"], "status": status, "resolution": resolution, "created": created}
        shown = {name: every.get(name) for name in fields or every}
        return {"id": ticket["id"], "key": ticket["key"], "fields": shown}

    def _ticket(self, ticket: dict[str, Any], request: Request) -> Answer:
        wanted = request.query.get("fields")
        return 200, self._issue(ticket, wanted.split(",") if wanted else [])

    def _comment(self, ticket: dict[str, Any], request: Request) -> Answer:
        body = request.json().get("body")
        if problem := self._problem(body):
            return 400, {"errorMessages": [], "errors": {"comment": problem}}
        return 201, self._shown(self._add_comment(ticket["key"], body, OWN_ACCOUNT))

    def _comments(self, ticket: dict[str, Any], request: Request) -> Answer:
        start = int(request.query.get("startAt", "0"))
        most = int(request.query.get("maxResults", "50"))
        every = ticket["comments"]
        shown = [self._shown(each) for each in every[start : start + most]]
        page = {"startAt": start, "maxResults": most, "total": len(every), "comments": shown}
        return 200, page

    def _add_comment(self, key: str, body: Any, author: str) -> dict[str, Any]:
        tickets = self.tickets()
        comments = _with_key(tickets, key)["comments"]
        made = {
            "id": str(20_000 + sum(len(each["comments"]) for each in tickets)),
            "author": author,
            "body": body,
            "created": self._now(),
        }
        comments.append(made)
        self._store(tickets)
        return made

    def _shown(self, comment: dict[str, Any]) -> dict[str, Any]:
        created = _time(comment["created"])
        return {**comment, "author": self._account(comment["author"]), "created": created}

    def _account(self, name: str) -> dict[str, Any]:
        mail = EMAIL if name == OWN_ACCOUNT else f"{name}@example.com"
        if self.version == 3:
            return {"accountId": name, "emailAddress": mail, "displayName": name.title()}
        return {"name": name, "key": f"KEY-{name}", "displayName": name.title()}

    def _now(self) -> float:
        return time.time() + self.ahead

    def _store(self, tickets: list[dict[str, Any]]) -> None:
        written = self._file.with_suffix(".new")
        written.write_text(json.dumps(tickets))
        written.replace(self._file)


def _with_key(tickets: list[dict[str, Any]], key: str) -> dict[str, Any]:
    (found,) = [each for each in tickets if each["key"] == key]
    return found


def _time(seconds: float) -> str:
    """Return a time as Jira writes it: in the zone of the account, which need not be UTC."""
    when = datetime.fromtimestamp(seconds, timezone(timedelta(hours=-7)))
    return when.strftime("%Y-%m-%dT%H:%M:%S.") + f"{when.microsecond // 1000:03}-0700"


def _is_done(ticket: dict[str, Any], seen: float) -> bool:
    return not ticket.get("by_resolution") and ticket.get("resolved", seen + 1) <= seen


def _refused(status: int, message: str) -> Answer:
    return status, {"errorMessages": [message], "errors": {}}


def adf_problem(body: Any) -> str | None:
    """Return why a document is not one; None if it is."""
    if not isinstance(body, dict) or body.get("version") != 1 or body.get("type") != "doc":
        return "Operation value must be an Atlassian Document (see the Atlassian Document Format)"
    if not body.get("content"):
        return "the document is empty"
    if len(json.dumps(body, ensure_ascii=False)) > 2 * 32_767:
        return "CONTENT_LIMIT_EXCEEDED"
    return _node_problem(body)


def _node_problem(node: dict[str, Any]) -> str | None:
    kind = node["type"]
    if kind == "text":
        text = node.get("text")
        sound = isinstance(text, str) and text and not re.search(r"[\r\n]", text)
        return None if sound else f"INVALID_INPUT: text {text!r}"
    if kind in {"hardBreak", "rule"}:
        return None
    for child in node.get("content", []):
        if child.get("type") not in _CHILDREN[kind]:
            return f"INVALID_INPUT: {child.get('type')} in {kind}"
        if problem := _node_problem(child):
            return problem
    return None
