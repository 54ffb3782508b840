"""Escalations whose process is killed, by ``kill -9``, between any two things that happen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.escalation.file_tickets import FileTickets
from tests.python_processes import PythonProcess
from tests.timing import wait_until

if TYPE_CHECKING:
    from pathlib import Path

#: Executes a run by a worker, and kills itself where it is told to: around a call to the ticket system,
#: or when a kind of entry was recorded.
PROGRAM = """
import asyncio, os, signal, sys
from pathlib import Path

from maestro_hive import Hive, current
from maestro_hive.engine.config import ExecutionConfig, Level1Config, Level2Config
from maestro_hive.hive import keeping_escalations
from maestro_hive.maestro.state.records import EntriesAppended, EntryKind
from tests.escalation.file_tickets import FileTickets

folder, where = Path(sys.argv[1]), sys.argv[2]
keeping_escalations.SYNC_SECONDS = keeping_escalations._POLL_SECONDS = 0.02
tickets = FileTickets(folder / "tickets.json", index_lag=0.2)

def die(place):
    if place == where:
        os.kill(os.getpid(), signal.SIGKILL)

tickets.before = lambda call: die(f"before {call}")
tickets.after = lambda call: die(f"after {call}")
config = ExecutionConfig(
    level1=Level1Config(base_delay_seconds=0),
    level2=Level2Config(base_delay_seconds=0, circuit_breaker_threshold=1000),
)
hive = Hive(folder / "state", config, escalation=tickets)

@hive.step(escalate=True, max_attempts=1)
async def deploy(size: int) -> int:
    if not any("mirror" in each for each in current().feedback):
        raise OSError("no route")
    return size

@hive.workflow
async def release(size: int) -> int:
    return await deploy(size)

def note(event):
    if isinstance(event, EntriesAppended):
        run = store.run(event.run_id)
        for entry in store.entries(run.id, event.first - 1, event.seq):
            die(EntryKind(entry.kind).name)

async def tell():
    while not any(each.delivered for each in hive.escalations()):
        await asyncio.sleep(0.01)
    (folder / "told").touch()

async def main():
    telling = asyncio.create_task(tell())
    async with hive.worker(release_after=0.1, adopt=True):
        handle = await hive.start(release, 3, run_id="r")
        result = await handle.result()
        while hive.escalations():
            await asyncio.sleep(0.01)
        telling.cancel()
        print(result)

store = hive._open()
store.notifications.add(note)
asyncio.run(main())
hive.close()
"""

PLACES = [
    "ESCALATED",
    "WAIT_STARTED",
    "before find",
    "before create",
    "after create",
    "before ticket",
    "WAIT_ENDED",
    "RETRIED",
    "STEP_COMPLETED",
    "before comment",
    "after comment",
]


@pytest.mark.parametrize("where", PLACES)
def test_killed_between_any_two_of_them_there_is_one_ticket_and_the_run_finishes(
    tmp_path: Path, where: str
) -> None:
    tickets = FileTickets(tmp_path / "tickets.json", index_lag=0.2)
    said: list[str] = []

    def answered(process: PythonProcess) -> bool:
        """Be the person, who answers the ticket when it is known; return whether it has ended."""
        if not said and (tmp_path / "told").exists():
            tickets.say("MD-1", "use the mirror")
            said.append("MD-1")
        return process.poll() is not None

    with PythonProcess(PROGRAM, tmp_path, where) as first:
        wait_until(lambda: answered(first))
        assert first.poll() == -9, "it was killed"
    with PythonProcess(PROGRAM, tmp_path, "nowhere") as second:
        wait_until(lambda: answered(second))
        assert second.poll() == 0
        assert second.stdout.read() == "3\n"
    assert list(tickets.tickets) == ["MD-1"]
    (outcome,) = tickets.texts("MD-1")
    assert outcome.startswith("jo (MD-1) answered: use the mirror")
