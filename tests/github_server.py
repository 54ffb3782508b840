"""A GitHub on loopback with one repository, for tests; the faults are those of ``loopback_server``."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from tests.loopback_server import Answer, LoopbackServer, Request

if TYPE_CHECKING:
    from collections.abc import Iterable

REPOSITORY = "acme/shop"
TOKEN = "a-token-of-github"
OWN_ACCOUNT = "acme-robot"
_BASE = f"/repos/{REPOSITORY}/issues"


class GitHubServer(LoopbackServer):
    """A GitHub; without ``may_label`` it drops labels, as it does for accounts that may not set them."""

    def __init__(self, *, faults: Iterable[str] = (), may_label: bool = True) -> None:
        super().__init__(faults)
        self.may_label = may_label
        self.issues: list[dict[str, Any]] = []
        #: By issue.
        self.said: dict[int, list[dict[str, Any]]] = {}
        #: Whether the token belongs to an app, which has no user.
        self.is_app = False

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of an ExecutionConfig whose escalations come here."""
        return {
            "github_base_url": self.url,
            "github_repository": REPOSITORY,
            "github_token": TOKEN,
        }

    def add_comment(self, key: str, text: str, author: str = "ada", kind: str = "User") -> None:
        """Comment on an issue as a person does."""
        with self.lock:
            self._add_comment(int(key), text, {"login": author, "type": kind})

    def close(self, key: str) -> None:
        """Close an issue as a person does."""
        self.issues[int(key) - 1]["state"] = "closed"

    def operation(self, request: Request) -> str:
        match request.method, request.path.removeprefix(_BASE):
            case "POST", "":
                return "create"
            case "GET", "":
                return "list"
            case "GET", "/user":
                return "user"
            case method, path if re.fullmatch(r"/\d+/comments", path):
                return "comment" if method == "POST" else "comments"
            case "GET", path if re.fullmatch(r"/\d+", path):
                return "ticket"
            case _:
                return "unknown"

    def execute(self, operation: str, request: Request) -> Answer:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return 401, {"message": "Bad credentials"}
        number = int(next(iter(re.findall(r"/issues/(\d+)", request.path)), "0"))
        if number > len(self.issues):
            return 404, {"message": "Not Found"}
        match operation:
            case "create":
                answer = self._create(request.json())
            case "list":
                answer = self._list(request.query)
            case "user" if self.is_app:
                answer = 403, {"message": "Resource not accessible by integration"}
            case "user":
                answer = 200, {"login": OWN_ACCOUNT}
            case "ticket":
                answer = 200, self.issues[number - 1]
            case "comment":
                account = {"login": OWN_ACCOUNT, "type": "Bot" if self.is_app else "User"}
                answer = 201, self._add_comment(number, request.json()["body"], account)
            case "comments":
                size, page = int(request.query["per_page"]), int(request.query["page"])
                answer = 200, self.said.get(number, [])[size * (page - 1) : size * page]
            case _:
                answer = 404, {"message": "Not Found"}
        return answer

    def _create(self, data: dict[str, Any]) -> Answer:
        if any(len(label) > 50 for label in data["labels"]):
            errors = [
                {"resource": "Label", "message": "name is too long (maximum is 50 characters)"}
            ]
            return 422, {"message": "Validation Failed", "errors": errors}
        number = len(self.issues) + 1
        labels = [{"name": label} for label in data["labels"]] if self.may_label else []
        address = f"https://github.example.com/{REPOSITORY}/issues/{number}"
        issue = {
            **data,
            "number": number,
            "state": "open",
            "labels": labels,
            "html_url": address,
            "created_at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        self.issues.append(issue)
        return 201, issue

    def _list(self, query: dict[str, str]) -> Answer:
        wanted = query["labels"].split(",")
        found = [
            each
            for each in self.issues
            if query["state"] in ("all", each["state"])
            and {label["name"] for label in each["labels"]}.issuperset(wanted)
        ]
        if query["direction"] == "desc":
            found.reverse()
        return 200, found[: int(query["per_page"])]

    def _add_comment(self, number: int, text: str, account: dict[str, str]) -> dict[str, Any]:
        comments = self.said.setdefault(number, [])
        when = datetime(2030, 1, 1, tzinfo=UTC) + timedelta(seconds=len(comments))
        made = {
            "id": 1000 * number + len(comments),
            "user": account,
            "body": text,
            "created_at": when.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        comments.append(made)
        return made
