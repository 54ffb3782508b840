"""A ticket system in one file, which outlives the processes that use it; or in memory.

Its index lags, as Jira's does: a ticket is found some time after it was created. It can lose the
response to a call, before or after the effect, refuse, and be killed in a call.
"""

from __future__ import annotations

import fcntl
import json
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NoReturn

from maestro_hive.engine.tickets import (
    Comment,
    Ticket,
    TicketMissingError,
    TicketRefusedError,
    TicketUnknownError,
    label_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from maestro_hive.engine.escalation import EscalationCase

OURS = "maestro"


class FileTickets:
    """Tickets and comments in a file; ``before`` and ``after`` are called around each effect."""

    name = "file"
    finds = True

    def __init__(self, path: Path | None, index_lag: float = 0.0) -> None:
        self.path = path
        self._memory: dict[str, Any] = {}
        self.index_lag = index_lag
        self.now: Callable[[], float] = lambda: datetime.now(UTC).timestamp()
        #: Called with the name of the call: before it, and after its effect.
        self.before: Callable[[str], None] = _nothing
        self.after: Callable[[str], None] = _nothing

    # --- as people see it ---

    @property
    def tickets(self) -> dict[str, dict[str, Any]]:
        """All tickets, by key."""
        with self._changed() as data:
            return data

    def say(self, key: str, text: str, author: str = "jo", *, resolve: bool = True) -> None:
        """Comment on a ticket, as a person, and resolve it."""
        with self._changed() as data:
            self._add_comment(data, key, author, text)
            data[key]["resolved"] = resolve

    def delete(self, key: str) -> None:
        """Delete a ticket, as a person."""
        with self._changed() as data:
            data[key]["deleted"] = True

    def texts(self, key: str) -> list[str]:
        """Return the texts of the comments that we made."""
        return [each["text"] for each in self.tickets[key]["comments"] if each["author"] == OURS]

    # --- as a ticket system ---

    async def find(self, label: str, since: datetime | None = None) -> Ticket | None:
        self.before("find")
        for key, each in self.tickets.items():
            is_indexed = each["created"] + self.index_lag <= self.now()
            is_new = since is not None and each["created"] >= since.timestamp()
            if "deleted" in each:
                continue
            if label in each["labels"] and is_indexed and (is_new or not each["resolved"]):
                return Ticket(key=key, resolved=each["resolved"])
        return None

    async def create(self, case: EscalationCase) -> Ticket:
        self.before("create")
        with self._changed() as data:
            key = f"MD-{len(data) + 1}"
            data[key] = {
                "summary": case.summary,
                "labels": [label_of(case)],
                "created": self.now(),
                "resolved": False,
                "comments": [],
            }
        self.after("create")
        return Ticket(key=key)

    async def comment(self, key: str, text: str) -> str:
        self.before("comment")
        self._existing(key)
        with self._changed() as data:
            made = self._add_comment(data, key, OURS, text)
        self.after("comment")
        return made

    async def comments(self, key: str) -> list[Comment]:
        self.before("comments")
        return [
            Comment(
                id=each["id"],
                author=each["author"],
                text=each["text"],
                created=datetime.fromtimestamp(each["created"], UTC),
            )
            for each in self._existing(key)["comments"]
        ]

    async def ticket(self, key: str) -> Ticket:
        self.before("ticket")
        return Ticket(key=key, resolved=self._existing(key)["resolved"])

    def _existing(self, key: str) -> dict[str, Any]:
        found = self.tickets[key]
        if "deleted" in found:
            raise TicketMissingError(f"there is no {key}", permanent=True)
        return found

    def is_own(self, comment: Comment) -> bool:
        return comment.author == OURS

    def may_answer(self, comment: Comment) -> bool:
        return comment.author != "stranger"

    # --- the file ---

    def _add_comment(self, data: dict[str, Any], key: str, author: str, text: str) -> str:
        comments = data[key]["comments"]
        made = str(len(comments) + 1)
        comments.append({"id": made, "author": author, "text": text, "created": self.now()})
        return made

    @contextmanager
    def _changed(self) -> Iterator[dict[str, Any]]:
        if self.path is None:
            yield self._memory
            return
        with self.path.open("a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            text = file.read()
            data: dict[str, Any] = json.loads(text) if text else {}
            yield data
            new = json.dumps(data)
            if new != text:
                file.truncate(0)
                file.write(new)


def _nothing(_: str) -> None:
    pass


def lose(call: str) -> NoReturn:
    """Lose the response to a call."""
    raise TicketUnknownError(f"no response to {call}")


def refuse(call: str) -> NoReturn:
    """Refuse a call."""
    raise TicketRefusedError(f"{call} was refused", retry_after=7.0)
