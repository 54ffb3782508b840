"""PostgreSQL: a journal that processes of many machines share.

Two connections write: one whose commits are durable on return, and one whose commits survive the
death of this process, and are durable with the next durable one. Another reads, and the last holds
an advisory lock while this process lives and listens for notifications.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from maestro_hive.journal import sql
from maestro_hive.journal.database import FORMAT, Holder, guard_against_fork
from maestro_hive.kernel.clock import SystemClock
from maestro_hive.kernel.errors import (
    ConfigurationError,
    CorruptionError,
    FormatError,
    MaestroError,
    StorageError,
    StoreClosedError,
    StoreFailedError,
    StoreUnreachable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from maestro_hive.journal.database import Row, T, Transaction
    from maestro_hive.kernel.clock import Clock

SCHEMA = "maestro"
#: The advisory lock under which the tables are created.
_CREATING = 7241
_CHANNEL = "maestro_hive"
_MOST_TRIES = 10
#: The server's clock is read again with a query after this time.
_CLOCK_SECONDS = 10.0
#: A server or a network that does not answer is an error after about 5 seconds.
_TIMEOUTS = {
    "connect_timeout": 5,
    "tcp_user_timeout": 5000,
    "keepalives_idle": 2,
    "keepalives_interval": 1,
    "keepalives_count": 3,
}
#: A process that is stopped inside a transaction must not block the one that takes over.
_SETTINGS = (
    f"-c search_path={SCHEMA} -c default_transaction_isolation=read\\ committed"
    " -c idle_in_transaction_session_timeout=10000 -c lock_timeout=15000"
    " -c synchronous_commit="
)
_AGAIN = (errors.SerializationFailure, errors.DeadlockDetected)
_DAMAGED = (errors.DataCorrupted, errors.IndexCorrupted)


class _Session:
    """A connection for one thread at a time, with its errors explained."""

    def __init__(self, url: str, *, durable: bool = True) -> None:
        self.mutex = threading.Lock()
        try:
            given = conninfo_to_dict(url)
            own = f"{given.get('options') or ''} {_SETTINGS}{'on' if durable else 'off'}"
            conninfo = make_conninfo(url, **_TIMEOUTS, options=own.strip())
        except psycopg.ProgrammingError as error:
            raise ConfigurationError(
                f"the URL of a PostgreSQL database is wrong: {error}"
            ) from None
        try:
            self.db: psycopg.Connection[Row] = psycopg.connect(
                conninfo, autocommit=True, cursor_factory=psycopg.RawCursor, prepare_threshold=1
            )
        except psycopg.Error as error:
            raise StoreUnreachable(str(error).strip()) from error

    def run(self, statement: str, /, *parameters: Any) -> list[Row]:
        """Run a statement and return its rows."""
        cursor = self.db.execute(statement, parameters)
        return cursor.fetchall() if cursor.description is not None else []

    def transact(self, body: Callable[[Transaction], T]) -> T:
        """Run ``body`` in a transaction."""
        is_committing = False
        try:
            self.run("BEGIN")
            try:
                result = body(self.run)
                is_committing = True
                self.run("COMMIT")
            except BaseException:
                if not self.db.closed:
                    self.db.rollback()
                raise
        except psycopg.Error as error:
            if isinstance(error, _AGAIN):
                raise
            raise self.explain("cannot be written", error, sent=is_committing) from error
        return result

    def explain(self, what: str, error: psycopg.Error, *, sent: bool = False) -> MaestroError:
        """Return an error of this package; ``sent``: what failed may have been committed."""
        if self.db.closed:
            return StoreUnreachable(str(error).strip(), outcome_unknown=sent)
        if isinstance(error, _DAMAGED):
            return CorruptionError(f"the journal is damaged ({error}); restore a backup")
        return StoreFailedError(f"the journal {what}: {error}")


class Postgres:
    """A journal in the schema ``maestro`` of a PostgreSQL database."""

    dialect = "postgres"

    def __init__(self, url: str, *, clock: Clock | None = None) -> None:
        self.sql = sql.statements("postgres")
        self._clock, self._is_server_time = clock or SystemClock(), clock is None
        self._offset, self._clock_read = 0.0, float("-inf")
        self._notices, self._seen = 0, threading.local()
        self._listening = threading.Lock()
        self._refusal: str | None = None
        self._sessions: list[_Session] = []
        try:
            self._reader = self._connect(url)
            self._safe = self._connect(url)
            self._fast = self._connect(url, durable=False)
            self._listener = self._connect(url)
            self._create()
            number = secrets.randbits(62)
            self._holder = Holder.of_this_process(f"{number:016x}")
            self._listener.run("SELECT pg_advisory_lock($1)", number)
            self._listener.run(f"LISTEN {_CHANNEL}")
            self._read_clock()
        except BaseException as error:
            self._close_all()
            if isinstance(error, psycopg.Error):
                raise StoreFailedError(f"the journal cannot be opened: {error}") from error
            raise
        guard_against_fork(self)

    def _connect(self, url: str, *, durable: bool = True) -> _Session:
        session = _Session(url, durable=durable)
        self._sessions.append(session)
        return session

    # --- the schema ---

    def _create(self) -> None:
        """Create the tables, unless they exist; one process does, however many start at once."""
        if not self._is_created():

            def create(tx: Transaction) -> None:
                tx("SELECT pg_advisory_xact_lock($1)", _CREATING)
                if not self._is_created():
                    if not tx("SELECT 1 FROM pg_namespace WHERE nspname = $1", SCHEMA):
                        tx(f"CREATE SCHEMA {SCHEMA}")
                    self._safe.db.execute(self.sql["SCHEMA"], prepare=False)
                    tx("CREATE TABLE format (number BIGINT NOT NULL)")
                    tx("INSERT INTO format (number) VALUES ($1)", FORMAT)

            self._safe.transact(create)

    def _is_created(self) -> bool:
        """Return whether the schema is a journal; refuse one of another format or program."""
        name = f"the schema {SCHEMA} of database {self._reader.db.info.dbname}"
        count = "SELECT count(*) FROM pg_class WHERE relnamespace = to_regnamespace($1)"
        if not self._reader.run(count, SCHEMA)[0][0]:
            return False
        if self._reader.run("SELECT to_regclass($1)", f"{SCHEMA}.format") == [(None,)]:
            raise ConfigurationError(
                f"{name} is not empty, and no journal of maestro-hive; use another database"
            )
        found = [number for (number,) in self._reader.run("SELECT number FROM format")]
        if found != [FORMAT]:
            raise FormatError(name, found[0] if found else None, FORMAT)
        return True

    # --- transactions ---

    def write(self, body: Callable[[Transaction], T], *, sync: bool) -> T:
        """Run ``body`` in one transaction, again if the server refused it; ``sync``: durable."""
        self._check()
        session = self._safe if sync else self._fast
        tries = 0
        with session.mutex:
            while True:
                tries += 1
                try:
                    return session.transact(body)
                except _AGAIN as error:
                    if tries == _MOST_TRIES:
                        raise session.explain("cannot be written", error) from error
                time.sleep(random.uniform(0, 0.01) * tries)  # noqa: S311 - no secret

    def once(self, statement: str, parameters: Sequence[Any], *, sync: bool) -> int:
        """Run one statement that is a transaction by itself; return how many rows it wrote."""
        self._check()
        session = self._safe if sync else self._fast
        with session.mutex:
            was_open = not session.db.closed
            try:
                return session.db.execute(statement, parameters).rowcount
            except psycopg.Error as error:
                raise session.explain("cannot be written", error, sent=was_open) from error

    def read(self, statement: str, *parameters: Any) -> list[Row]:
        """Run one query, beside the writers."""
        self._check()
        with self._reader.mutex:
            try:
                found = self._reader.run(statement, *parameters)
                if self._clock.boot_seconds() - self._clock_read > _CLOCK_SECONDS:
                    self._read_clock()
            except psycopg.Error as error:
                raise self._reader.explain("cannot be read", error) from error
            return found

    def _check(self) -> None:
        if self._refusal is not None:
            raise StoreClosedError(self._refusal)

    # --- time and processes ---

    def _read_clock(self) -> None:
        before = self._clock.boot_seconds()
        query = "SELECT CAST(extract(epoch FROM clock_timestamp()) AS DOUBLE PRECISION)"
        if self._is_server_time:
            ((seconds,),) = self._reader.run(query)
        else:
            seconds = self._clock.now().timestamp()
        self._clock_read = self._clock.boot_seconds()
        self._offset = seconds - (before + self._clock_read) / 2

    def backup(self, target: Path) -> None:
        """Raise: the server has its own program for this."""
        raise ConfigurationError(
            "a journal on PostgreSQL is copied with PostgreSQL's own program:"
            f" pg_dump --schema={SCHEMA} --format=custom --file={target} URL"
        )

    def check_pages(self) -> list[str]:
        """Return nothing: a server checks its pages by itself (``data_checksums``)."""
        return []

    def now(self) -> float:
        """Return the server's time, without a round trip: it is read now and then with a query."""
        return self._offset + self._clock.boot_seconds()

    def wall_time(self) -> datetime:
        """Return the server's time."""
        return datetime.fromtimestamp(self.now(), UTC)

    def holder(self) -> str:
        """Return the text under which this process holds runs."""
        return str(self._holder)

    def alive(self, holder: str) -> bool:
        """Return whether a holder's session has its lock: that of a killed process ends at once."""
        number = int(holder.partition(" ")[0], 16)
        query = """
            SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND granted
            AND classid = CAST($1 AS BIGINT)::oid AND objid = CAST($2 AS BIGINT)::oid"""
        return bool(self.read(query, number >> 32, number & 0xFFFF_FFFF))

    def notify(self) -> None:
        """Wake the processes that wait."""
        self._check()
        with self._fast.mutex:
            try:
                self._fast.run(f"NOTIFY {_CHANNEL}")
            except psycopg.Error as error:
                raise self._fast.explain("cannot be written", error) from error

    def wait(self, seconds: float) -> bool:
        """Block until a process notifies, unless one did since this thread waited last."""
        self._check()
        deadline = time.monotonic() + seconds
        if self._listening.acquire(timeout=seconds):
            try:
                left = deadline - time.monotonic()
                if getattr(self._seen, "notices", None) == self._notices and left > 0:
                    for _ in self._listener.db.notifies(timeout=left, stop_after=1):
                        self._notices += 1
            except psycopg.Error as error:
                self._check()
                raise self._listener.explain("cannot be read", error) from error
            finally:
                self._listening.release()
        last = getattr(self._seen, "notices", None)
        self._seen.notices = self._notices
        return last != self._notices

    # --- the end ---

    @property
    def is_refusing(self) -> bool:
        """Return whether every call is refused until the database is opened again."""
        return self._refusal is not None

    def close(self) -> None:
        """Close it, when the thread that waits has returned."""
        if self._refusal is None:
            try:
                with contextlib.suppress(StorageError):
                    self.notify()
            finally:
                self._refusal = "the journal is closed; open it again"
                if self._listening.acquire(timeout=5):
                    # The server ends a session later than its client does.
                    with contextlib.suppress(psycopg.Error):
                        self._listener.run("SELECT pg_advisory_unlock_all()")
                    self._listening.release()
                self._close_all()

    def _close_all(self) -> None:
        for session in self._sessions:
            session.db.close()

    def disown(self) -> None:
        """Refuse every call in a forked child, and leave the connections to the parent.

        The server sees the death of the parent when no process has the sockets open.
        """
        if self._refusal is None:
            for session in self._sessions:
                os.close(session.db.fileno())
        opener = f"process {self._holder.pid}, and this is a forked child of it"
        self._refusal = f"the journal was opened by {opener}; open it again here"
        _inherited.append(self._sessions)


#: Connections of a parent: a child that closed them would end the parent's sessions.
_inherited: list[list[_Session]] = []
