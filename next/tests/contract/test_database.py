"""Every database gives the same promises: transactions, durability, a clock, liveness."""

from __future__ import annotations

import os
import socket
import threading
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from maestro_hive.journal.database import Database, Holder
from maestro_hive.journal.entries import RunStarted
from maestro_hive.journal.store import Acquire, open_store
from maestro_hive.kernel.errors import (
    MaestroError,
    RunLeasedError,
    StoreClosedError,
    StoreFailedError,
)
from tests.programs import Program, run_together
from tests.python_processes import run_python

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.journal.database import Transaction

ADD = "INSERT INTO accounts (account, used, held, most) VALUES ($1, 0, 0, 0)"
INCREMENT = "UPDATE accounts SET used = used + 1 WHERE account = $1"
USED = "SELECT used FROM accounts WHERE account = $1"
ACCOUNTS = "SELECT account FROM accounts ORDER BY account"

#: Opens a place, reports its holder, and executes a statement per line.
OTHER = """
import sys
from maestro_hive.journal.store import open_store
db = open_store(sys.argv[1]).db
print(db.holder(), flush=True)
for line in sys.stdin:
    match line.strip():
        case "notify": db.notify(); print("notified", flush=True)
        case "close": db.close(); print("closed", flush=True)
        case name: db.once(
            "INSERT INTO accounts (account, used, held, most) VALUES ($1, 0, 0, 0)",
            (name,), sync=True); print("added", flush=True)
"""


def accounts(database: Database) -> list[str]:
    return [name for (name,) in database.read(ACCOUNTS)]


# --- transactions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [True, False])
def test_a_transaction_returns_what_its_body_returns(database: Database, sync: bool) -> None:
    def body(tx: Transaction) -> str:
        tx(ADD, "one")
        tx(ADD, "two")
        ((name,),) = tx("SELECT max(account) FROM accounts")
        return f"{name}!"

    assert database.write(body, sync=sync) == "two!"
    assert accounts(database) == ["one", "two"]


@pytest.mark.parametrize("sync", [True, False])
def test_an_exception_undoes_the_transaction(database: Database, sync: bool) -> None:
    def body(tx: Transaction) -> None:
        tx(ADD, "one")
        raise LookupError("stop")

    with pytest.raises(LookupError, match="stop"):
        database.write(body, sync=sync)
    assert accounts(database) == []
    database.write(lambda tx: tx(ADD, "two"), sync=sync)
    assert accounts(database) == ["two"]


def test_a_statement_that_fails_undoes_the_transaction(database: Database) -> None:
    def body(tx: Transaction) -> None:
        tx(ADD, "one")
        tx(ADD, "one")

    with pytest.raises(StoreFailedError, match="cannot be written"):
        database.write(body, sync=True)
    with pytest.raises(StoreFailedError, match="cannot be written"):
        database.once("INSERT INTO nowhere VALUES ($1)", (1,), sync=True)
    assert accounts(database) == []


def test_a_query_that_fails_is_an_error_of_this_package(database: Database) -> None:
    with pytest.raises(StoreFailedError, match="cannot be read"):
        database.read("SELECT nothing FROM nowhere")
    assert accounts(database) == []


def test_a_statement_alone_returns_how_many_rows_it_wrote(database: Database) -> None:
    add = "INSERT INTO accounts VALUES ($1, 0, 0, 0), ($2, 0, 0, 0)"
    assert database.once(add, ("one", "two"), sync=True) == 2
    again = f"{ADD} ON CONFLICT DO NOTHING RETURNING account"
    assert database.once(again, ("one",), sync=True) == 0
    assert database.once(again, ("three",), sync=False) == 1
    assert accounts(database) == ["one", "three", "two"]


def test_a_savepoint_undoes_a_part_of_a_transaction(database: Database) -> None:
    def body(tx: Transaction) -> None:
        tx(ADD, "one")
        tx("SAVEPOINT part")
        tx(ADD, "two")
        tx("ROLLBACK TO part")
        tx("RELEASE part")

    database.write(body, sync=True)
    assert accounts(database) == ["one"]


def test_threads_that_write_at_once_lose_nothing(database: Database) -> None:
    database.once(ADD, ("shared",), sync=True)

    def increment(sync: bool) -> None:
        for _ in range(25):
            database.write(lambda tx: tx(INCREMENT, "shared"), sync=sync)
            assert database.once(INCREMENT, ("shared",), sync=not sync) == 1
            database.read(USED, "shared")

    threads = [threading.Thread(target=increment, args=(each % 2 == 0,)) for each in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert database.read(USED, "shared") == [(200,)]


def test_text_bytes_and_large_numbers_are_read_as_they_were_written(database: Database) -> None:
    text, data = "ü\N{GRINNING FACE}\n'\"$1", bytes(range(256))
    add = "INSERT INTO entries (id, entry, sha256) VALUES ($1, $2, $3)"
    database.once(add, (2**62, text, data), sync=True)
    ((number, found_text, found),) = database.read("SELECT id, entry, sha256 FROM entries")
    assert (number, found_text, bytes(found)) == (2**62, text, data)


# --- time and waiting -----------------------------------------------------------------------------


def test_the_clock_tells_the_time_and_does_not_go_back(database: Database) -> None:
    assert abs(database.now() - time.time()) < 5
    times = [database.now() for _ in range(1000)]
    assert times == sorted(times)


def test_a_thread_that_waits_is_woken_by_a_notification(database: Database) -> None:
    database.wait(0.0)
    woken = threading.Event()

    def wait() -> None:
        database.wait(0.0)  # what happened before this thread
        while not database.wait(60):
            pass
        woken.set()

    thread = threading.Thread(target=wait)
    thread.start()
    while not woken.wait(0.01):
        database.notify()
    thread.join()


def test_a_notification_before_the_wait_is_not_missed(database: Database) -> None:
    while database.wait(0.0):
        pass
    database.notify()
    assert database.wait(60)


def test_a_wait_ends_when_nothing_happens(database: Database) -> None:
    while database.wait(0.1):
        pass
    assert not database.wait(0.05)


# --- holders --------------------------------------------------------------------------------------


def test_a_holder_names_its_process(database: Database) -> None:
    holder = Holder.of(database.holder())
    assert (holder.pid, holder.host) == (os.getpid(), socket.gethostname())
    assert abs((datetime.now(UTC) - holder.since).total_seconds()) < 60
    assert str(holder) == database.holder()


def test_a_run_that_another_process_holds_is_refused_with_its_pid_and_host(
    shared_place: str,
) -> None:
    code = """
import sys
from maestro_hive.journal.entries import RunStarted
from maestro_hive.journal.store import Acquire, open_store
store = open_store(sys.argv[1])
store.write([Acquire("run-1", RunStarted(workflow="work"))])
print("holds", flush=True)
sys.stdin.read()
"""
    with Program(code, shared_place) as other:
        assert other() == "holds"
        store = open_store(shared_place)
        (refusal,) = store.write([Acquire("run-1", RunStarted(workflow="work"))])
        assert isinstance(refusal, RunLeasedError)
        assert f"process {other.pid} on {socket.gethostname()} (since" in str(refusal)
        store.db.close()


def test_a_process_is_alive_for_itself_and_one_that_never_was_is_not(database: Database) -> None:
    assert database.alive(database.holder())
    assert not database.alive("00000000000000aa 1 0 nowhere")


def test_a_process_is_alive_until_it_closes_or_is_killed(shared_place: str) -> None:
    database = open_store(shared_place).db
    with Program(OTHER, shared_place) as one, Program(OTHER, shared_place) as two:
        first, second = one(), two()
        assert database.alive(first)
        assert database.alive(second)
        one("close")
        assert not database.alive(first)
        assert database.alive(second)
        two.end_by_kill()
        while database.alive(second):  # the system, or the server, has to see it
            pass
    database.close()


# --- several processes ----------------------------------------------------------------------------


def test_what_one_process_writes_wakes_the_others_and_is_read_there(shared_place: str) -> None:
    database = open_store(shared_place).db
    with Program(OTHER, shared_place) as other:
        other()
        while database.wait(0.1):
            pass
        assert other("one") == "added"
        assert other("notify") == "notified"
        assert database.wait(60)
        assert accounts(database) == ["one"]
    database.close()


def test_ten_processes_open_an_empty_place_at_once(shared_place: str) -> None:
    code = """
import sys
from maestro_hive.journal.store import open_store
sys.stdin.readline()
db = open_store(sys.argv[1]).db
db.once("INSERT INTO accounts VALUES ($1, 0, 0, 0)", (sys.argv[2],), sync=True)
db.close()
"""
    run_together(code, [(shared_place, number) for number in range(10)])
    database = open_store(shared_place).db
    assert accounts(database) == [str(number) for number in range(10)]
    database.close()


def test_processes_that_write_at_once_lose_nothing(shared_place: str) -> None:
    database = open_store(shared_place).db
    database.once(ADD, ("shared",), sync=True)
    code = f"""
import sys
from maestro_hive.journal.store import open_store
db = open_store(sys.argv[1]).db
for number in range(100):
    db.write(lambda tx: tx({INCREMENT!r}, "shared"), sync=number % 2 == 0)
db.close()
"""
    run_together(code, [(shared_place,)] * 4)
    assert database.read(USED, "shared") == [(400,)]
    database.close()


# --- the end --------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[Database], object]] = {
    "write": lambda db: db.write(lambda tx: tx(ADD, "one"), sync=True),
    "once": lambda db: db.once(ADD, ("one",), sync=False),
    "read": lambda db: db.read(ACCOUNTS),
    "wait": lambda db: db.wait(0.0),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_closed_database_says_so(database: Database, call: str) -> None:
    database.close()
    database.close()
    with pytest.raises(StoreClosedError, match="closed"):
        CALLS[call](database)


def test_closing_ends_a_wait(database: Database) -> None:
    outcome: list[MaestroError | bool] = []

    def wait() -> None:
        try:
            while True:
                database.wait(60)
        except MaestroError as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    database.close()
    thread.join()
    (error,) = outcome
    assert isinstance(error, StoreClosedError)


FORKED = f"""
import os, sys
from maestro_hive.journal.store import open_store
from maestro_hive.kernel.errors import StoreClosedError
db = open_store(sys.argv[1]).db
add = {ADD!r}
db.once(add, ("before",), sync=True)
child = os.fork()
if child == 0:
    refused = 0
    for call in (
        lambda: db.write(lambda tx: tx(add, "child"), sync=True),
        lambda: db.once(add, ("child",), sync=True),
        lambda: db.read({ACCOUNTS!r}),
        lambda: db.wait(0.0),
    ):
        try:
            call()
        except StoreClosedError as error:
            refused += f"process {{os.getppid()}}, and this is a forked child" in str(error)
    db.close()
    sys.exit(refused)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert db.alive(db.holder())
db.once(add, ("after",), sync=True)
print(*[name for name, in db.read({ACCOUNTS!r})])
db.close()
"""


def test_a_forked_child_is_refused_and_does_its_parent_no_harm(place: str) -> None:
    assert run_python(FORKED, place, check=True).stdout.split("\n")[:2] == ["4", "after before"]


def test_a_forked_child_does_not_keep_its_dead_parent_alive(shared_place: str) -> None:
    code = """
import os, sys, time
from maestro_hive.journal.store import open_store
db = open_store(sys.argv[1]).db
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
print(db.holder(), flush=True)
time.sleep(60)
"""
    database = open_store(shared_place).db
    with Program(code, shared_place) as parent:
        holder = parent()
        assert database.alive(holder)
        parent.kill()
        parent.wait()
        while database.alive(holder):  # the system, or the server, has to see it
            pass
    database.close()
