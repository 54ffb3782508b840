"""The systems that escalations are delivered to: Jira, GitHub, webhooks, and commands of users.

``TicketSystem`` is the interface, and ``ticket_system_from`` makes the one that a configuration
names. A system keeps nothing on disk and tries nothing again: who calls it has a journal, and
decides by the error. After a ``TicketRefusedError`` nothing was made. After a ``TicketUnknownError``
the ticket may exist, and has to be searched for until the index of the system must contain it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from maestro_hive.kernel.errors import MaestroError

if TYPE_CHECKING:
    from datetime import datetime

    from maestro_hive.engine.config import ExecutionConfig
    from maestro_hive.engine.escalation import EscalationCase


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A ticket: its key, where people find it, and whether it is resolved."""

    key: str
    address: str | None = None
    resolved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Comment:
    """A comment on a ticket; ``author`` identifies an account, and ``created`` is in UTC."""

    id: str
    author: str
    text: str
    created: datetime


class TicketRefusedError(MaestroError):
    """Nothing was made: the system refused the request, or did not get it.

    ``retry_after`` is how many seconds the system asks to wait. ``permanent`` means that the same
    request is refused again until a person changes something, such as the configuration.
    """

    def __init__(
        self, message: str, retry_after: float | None = None, permanent: bool = False
    ) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.permanent = permanent


class TicketMissingError(TicketRefusedError):
    """What the request is about is not there: a ticket that was deleted, or a wrong address."""


class TicketUnknownError(MaestroError):
    """No response was received for a request that was sent: it may or may not have taken effect."""


class TicketSystem(Protocol):
    """A system with tickets that people answer.

    Every method but the last two can raise TicketRefusedError and TicketUnknownError; those that are
    given a key raise TicketMissingError if there is no such ticket any more.
    """

    #: Which system it is: "jira", "github", "webhook", "slack" or "command".
    name: str
    #: Whether ``find``, ``comments`` and ``ticket`` work; without them delivery is at least once.
    finds: bool
    #: After how many seconds at most a ticket that was created is found.
    index_lag: float

    async def find(self, label: str, since: datetime | None = None) -> Ticket | None:
        """Return an unresolved ticket with this label, the oldest; None if there is none.

        A ticket that was created at ``since`` or later is found also if it is resolved.
        """
        ...

    async def create(self, case: EscalationCase) -> Ticket:
        """Create a ticket, with the label ``label_of(case)``."""
        ...

    async def comment(self, key: str, text: str) -> str:
        """Add a comment to a ticket; return the comment's id."""
        ...

    async def comments(self, key: str) -> list[Comment]:
        """Return the comments on a ticket, the oldest first."""
        ...

    async def ticket(self, key: str) -> Ticket:
        """Return a ticket as it is now."""
        ...

    def is_own(self, comment: Comment) -> bool:
        """Return whether a comment was made by the account that is used here."""
        ...

    def may_answer(self, comment: Comment) -> bool:
        """Return whether a comment is by an account that the configuration allows to answer."""
        ...


def label_of(case: EscalationCase) -> str:
    """Return the label that tickets about this failure have, and no others."""
    return f"maestro-{case.fingerprint}"


def ticket_system_from(config: ExecutionConfig) -> TicketSystem | None:
    """Return the ticket system that a configuration names; None if it names none."""
    from maestro_hive.engine.tickets.configured import ticket_system

    return ticket_system(config)
