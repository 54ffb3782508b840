"""The port to a database: transactions, durability, a clock that all processes share, liveness."""

from __future__ import annotations

import os
import secrets
import socket
import time
import weakref
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeVar

from maestro_hive.kernel.process import PerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

#: The format of journals, in SQLite files and in PostgreSQL; those before it were never released.
FORMAT = 5

T = TypeVar("T")
Row = tuple[Any, ...]


class Transaction(Protocol):
    """Runs one statement inside a transaction."""

    def __call__(self, statement: str, /, *parameters: Any) -> list[Row]:
        """Run one statement and return its rows."""


class Database(Protocol):
    """The place where a journal is stored. Every method may be called from any thread.

    The methods raise ``StoreFailedError`` for what was not written or read, ``StoreUnreachable``
    where a server does not answer, ``CorruptionError`` for damage, and ``StoreClosedError`` after
    ``close`` and in a forked child.
    """

    #: The key of ``sql.DIALECTS``.
    dialect: str
    #: The statements of ``sql``, by name.
    sql: Mapping[str, str]

    @property
    def is_refusing(self) -> bool:
        """Return whether every call is refused until the database is opened again."""

    def write(self, body: Callable[[Transaction], T], *, sync: bool) -> T:
        """Run ``body`` in one transaction; with ``sync`` it is durable on return.

        An exception of ``body`` undoes the transaction. ``body`` may be called again.
        """

    def once(self, statement: str, parameters: Sequence[Any], *, sync: bool) -> int:
        """Run one statement that is a transaction by itself; return how many rows it wrote."""

    def read(self, statement: str, *parameters: Any) -> list[Row]:
        """Run one query beside the writers."""

    def now(self) -> float:
        """Return seconds since 1970 on the clock that all processes share."""

    def wall_time(self) -> datetime:
        """Return the time on the clock that people set, for schedules."""

    def holder(self) -> str:
        """Return the text under which this process holds runs: that of a ``Holder``."""

    def alive(self, holder: str) -> bool:
        """Return whether the process of a holder is alive, as far as can be known."""

    def notify(self) -> None:
        """Wake the processes that ``wait``."""

    def wait(self, seconds: float) -> bool:
        """Block until something was written, at most for ``seconds``; return whether it was."""

    def backup(self, target: Path) -> None:
        """Copy everything, as of one moment, to a new file; writers get their turn meanwhile."""

    def check_pages(self) -> list[str]:
        """Return what is wrong with the files below small tables, in the database's own words."""

    def close(self) -> None:
        """Close it. Closing it again does nothing."""


class Holder(NamedTuple):
    """A process that holds runs. Its text is stored with the run, so errors can name it."""

    token: str
    pid: int
    since: datetime
    host: str

    @classmethod
    def of_this_process(cls, token: str | None = None) -> Self:
        """Return a holder with a token that no other one has."""
        since = datetime.fromtimestamp(int(time.time()), UTC)
        return cls(token or secrets.token_hex(8), os.getpid(), since, socket.gethostname())

    @classmethod
    def of(cls, text: str) -> Self:
        """Return the holder that a database stored."""
        token, pid, since, host = text.split(" ", 3)
        return cls(token, int(pid), datetime.fromtimestamp(int(since), UTC), host)

    @property
    def description(self) -> str:
        """The process, for messages."""
        return f"process {self.pid} on {self.host} (since {self.since:%Y-%m-%d %H:%M} UTC)"

    def __str__(self) -> str:
        return f"{self.token} {self.pid} {int(self.since.timestamp())} {self.host}"


# --- forked children ---


class Inherited(Protocol):
    """An object with files or connections that a forked child must not use."""

    def disown(self) -> None:
        """Refuse every later call in this process, and let go of the parent's locks."""


def _disown_all(opened: weakref.WeakSet[Inherited]) -> None:
    for each in list(opened):
        each.disown()


_open: PerProcess[weakref.WeakSet[Inherited]] = PerProcess(weakref.WeakSet, inherited=_disown_all)


def guard_against_fork(opened: Inherited) -> None:
    """Call ``disown`` in each process that is forked from this one."""
    _open().add(opened)
