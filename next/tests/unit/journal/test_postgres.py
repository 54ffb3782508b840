"""A journal on a PostgreSQL server: its schema, and a server that is gone."""

from __future__ import annotations

import os
import socket
import threading
from typing import TYPE_CHECKING

import psycopg
import pytest

from maestro_hive.journal.database import FORMAT, Holder
from maestro_hive.journal.postgres import Postgres
from maestro_hive.kernel.errors import (
    ConfigurationError,
    FormatError,
    StoreFailedError,
    StoreUnreachable,
)
from tests import stores

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maestro_hive.journal.database import Transaction

ADD = "INSERT INTO accounts VALUES ($1, 0, 0, 0)"
COUNT = "SELECT count(*) FROM accounts"
TABLES = "SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace"


@pytest.fixture
def url() -> Iterator[str]:
    with stores.postgres_place() as found:
        yield found


@pytest.fixture
def admin(url: str) -> Iterator[psycopg.Connection]:
    """A connection of another program."""
    with psycopg.connect(url, autocommit=True) as db:
        yield db


@pytest.fixture
def database(url: str) -> Iterator[Postgres]:
    found = Postgres(url)
    yield found
    found.close()


def end_sessions(admin: psycopg.Connection) -> None:
    """End all sessions of the journal, as the death of the server does."""
    admin.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )


# --- the schema -----------------------------------------------------------------------------------


def test_all_tables_are_in_a_schema_of_their_own(
    database: Postgres, admin: psycopg.Connection
) -> None:
    (ours,) = admin.execute(f"{TABLES} WHERE nspname = 'maestro'").fetchone() or (0,)
    (public,) = admin.execute(f"{TABLES} WHERE nspname = 'public'").fetchone() or (0,)
    assert ours > 5
    assert public == 0


def test_an_empty_schema_may_exist(url: str, admin: psycopg.Connection) -> None:
    admin.execute("CREATE SCHEMA maestro")
    database = Postgres(url)
    assert database.read(COUNT) == [(0,)]
    database.close()


def test_another_format_is_refused_by_name_and_nothing_is_touched(
    url: str, admin: psycopg.Connection
) -> None:
    Postgres(url).close()
    admin.execute("UPDATE maestro.format SET number = 999")
    admin.execute("DROP TABLE maestro.holds")
    with pytest.raises(
        FormatError, match=f"schema maestro.* has format 999.*reads format {FORMAT}"
    ):
        Postgres(url)
    assert admin.execute("SELECT to_regclass('maestro.holds')").fetchone() == (None,)


def test_a_schema_of_another_program_is_refused_and_nothing_is_touched(
    url: str, admin: psycopg.Connection
) -> None:
    admin.execute("CREATE SCHEMA maestro")
    admin.execute("CREATE TABLE maestro.runs (theirs INT)")
    with pytest.raises(ConfigurationError, match="no journal of maestro-hive"):
        Postgres(url)
    assert admin.execute(f"{TABLES} WHERE nspname = 'maestro'").fetchone() == (1,)


def test_options_of_the_url_are_respected(url: str) -> None:
    database = Postgres(f"{url}?options=-c%20work_mem%3D7MB&application_name=mine")
    assert database.read("SHOW work_mem") == [("7MB",)]
    assert database.read("SHOW application_name") == [("mine",)]
    assert database.read("SHOW search_path") == [("maestro",)]
    database.close()


# --- a server that is gone ------------------------------------------------------------------------


def test_a_url_that_is_no_url_is_named() -> None:
    with pytest.raises(ConfigurationError, match="URL of a PostgreSQL database is wrong"):
        Postgres("postgresql://localhost?nonsense=1")


def test_a_server_that_does_not_exist_is_an_error() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(StoreUnreachable) as caught:
            Postgres(f"postgresql://127.0.0.1:{free.getsockname()[1]}/test")
    assert not caught.value.outcome_unknown


def test_a_password_is_not_shown(url: str) -> None:
    with_password = url.replace("@", ":topsecret@")
    with pytest.raises(StoreUnreachable) as caught:
        Postgres(f"{with_password}_missing")
    assert "topsecret" not in str(caught.value)


def test_a_write_before_the_commit_has_a_known_outcome(
    database: Postgres, admin: psycopg.Connection
) -> None:
    def body(tx: Transaction) -> None:
        tx(ADD, "one")
        end_sessions(admin)
        tx(ADD, "two")

    with pytest.raises(StoreUnreachable) as caught:
        database.write(body, sync=True)
    assert not caught.value.outcome_unknown
    assert admin.execute("SELECT count(*) FROM maestro.accounts").fetchone() == (0,)


def test_a_commit_without_an_answer_has_an_unknown_outcome(
    database: Postgres, admin: psycopg.Connection
) -> None:
    def body(tx: Transaction) -> None:
        tx(ADD, "one")
        end_sessions(admin)

    with pytest.raises(StoreUnreachable, match="may have succeeded") as caught:
        database.write(body, sync=True)
    assert caught.value.outcome_unknown


def test_a_statement_without_an_answer_has_an_unknown_outcome(
    database: Postgres, admin: psycopg.Connection
) -> None:
    end_sessions(admin)
    with pytest.raises(StoreUnreachable) as first:
        database.once(ADD, ("one",), sync=True)
    with pytest.raises(StoreUnreachable) as second:
        database.once(ADD, ("one",), sync=True)
    assert (first.value.outcome_unknown, second.value.outcome_unknown) == (True, False)


def test_every_call_says_that_the_server_is_gone(
    database: Postgres, admin: psycopg.Connection
) -> None:
    end_sessions(admin)
    for call in (
        lambda: database.read(COUNT),
        lambda: database.alive(database.holder()),
        database.notify,
        lambda: [database.wait(60) for _ in range(2)],
    ):
        with pytest.raises(StoreUnreachable):
            call()


def test_a_process_whose_session_ended_is_dead_for_others(
    url: str, database: Postgres, admin: psycopg.Connection
) -> None:
    holder = database.holder()
    end_sessions(admin)
    other = Postgres(url)
    assert not other.alive(holder)
    other.close()


# --- others that write ----------------------------------------------------------------------------


def test_a_deadlock_is_tried_again(database: Postgres, url: str) -> None:
    other = Postgres(url)
    for name in ("one", "two"):
        database.once(ADD, (name,), sync=True)
    meet = threading.Barrier(2)
    tries: list[str] = []
    take = "UPDATE accounts SET used = used + 1 WHERE account = $1"

    def run(db: Postgres, first: str, second: str) -> None:
        def body(tx: Transaction) -> None:
            tx(take, first)
            tries.append(first)
            if len(tries) <= 2:
                meet.wait()
            tx(take, second)

        db.write(body, sync=True)

    threads = [
        threading.Thread(target=run, args=(database, "one", "two")),
        threading.Thread(target=run, args=(other, "two", "one")),
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert database.read("SELECT used FROM accounts") == [(2,), (2,)]
    assert len(tries) > 2
    other.close()


def test_a_holder_is_a_process_of_a_host(database: Postgres) -> None:
    holder = Holder.of(database.holder())
    assert (holder.pid, holder.host) == (os.getpid(), socket.gethostname())


def test_settings_of_the_server_do_not_weaken_a_commit(url: str, admin: psycopg.Connection) -> None:
    name = url.rpartition("/")[2]
    admin.execute(f"ALTER DATABASE {name} SET synchronous_commit = off".encode())
    admin.execute(
        f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'".encode()
    )
    database = Postgres(url)
    shown = database.write(
        lambda tx: (tx("SHOW synchronous_commit"), tx("SHOW transaction_isolation")), sync=True
    )
    assert shown == ([("on",)], [("read committed",)])
    database.close()


def test_a_statement_that_the_server_refuses_is_no_loss_of_the_server(database: Postgres) -> None:
    with pytest.raises(StoreFailedError, match="nowhere"):
        database.once("INSERT INTO nowhere VALUES ($1)", ("x",), sync=True)
    assert database.read(COUNT) == [(0,)]
