"""Twenty processes on one budget: what is admitted is never over it, also when some are killed."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import BudgetExceeded, Hive
from maestro_hive.maestro.state.records import EntryKind
from tests.crash.budget_program import BANKRUPT, LIMIT, PARTS, STEPS, TOKENS, program
from tests.python_processes import PythonProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maestro_hive.maestro.state.store import Reader

ROOT = Path(__file__).parents[2]
PROCESSES, KILLED = 20, 5
ACCOUNT = "persona:spender"
PROGRAM = "import sys; from tests.crash.budget_program import main; sys.exit(main())"
SECONDS = 240.0


class Spenders:
    """Processes that wait at a barrier, each with a run of its own; the first ones may hang."""

    def __init__(self, folder: Path, hanging: int = 0) -> None:
        self.processes = [
            # Each in another call, so that they have spent something, or reserved it only.
            PythonProcess(
                PROGRAM, folder, f"run-{each}", *([each + 1] if each < hanging else []), cwd=ROOT
            )
            for each in range(PROCESSES)
        ]
        self._hanging = hanging

    def release(self) -> None:
        """Wait until all of them are at the barrier, and release them; those that hang come first.

        Otherwise the others might spend all of the budget before these have reserved their part.
        """
        for each in self.processes:
            _wait_for(each, "ready")
        _go(self.processes[: self._hanging])
        for each in self.processes[: self._hanging]:
            _wait_for(each, "hangs")
        _go(self.processes[self._hanging :])

    def watch(self, reader: Reader, until: int | None = None) -> list[int]:
        """Return what was admitted at each look, until so much was settled, or all have ended."""
        seen: list[int] = []
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            found = reader.account(ACCOUNT)
            seen.append(found.tokens + found.reserved_tokens)
            if until is not None and found.tokens >= until:
                return seen
            if all(each.poll() is not None for each in self.processes):
                return seen
            time.sleep(0.005)
        raise AssertionError(f"they did not end within {SECONDS} seconds")

    def close(self) -> None:
        """End those that are left."""
        for each in self.processes:
            each.kill()
            with each:
                pass


def _wait_for(process: PythonProcess, word: str) -> None:
    assert process.stdout.readline() == f"{word}\n"


def _go(processes: list[PythonProcess]) -> None:
    for each in processes:
        each.stdin.write("go\n")
        each.stdin.flush()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Hive(tmp_path / "state") as hive:
        hive.budget.set_limit(LIMIT, persona="spender")
    return tmp_path / "state"


@pytest.fixture(params=[0])
def spenders(folder: Path, request: pytest.FixtureRequest) -> Iterator[Spenders]:
    made = Spenders(folder, hanging=request.param)
    yield made
    made.close()


def completed(reader: Reader) -> int:
    """Return how many steps are completed in all runs."""
    return sum(
        entry.kind == EntryKind.STEP_COMPLETED
        for run in reader.runs()
        for entry in reader.entries(run.id)
    )


def finish(hive: Hive) -> None:
    """Resume all runs with a budget that is enough, and check every total."""
    whole, steps = program(hive), PARTS * STEPS
    everything = PROCESSES * steps * TOKENS
    hive.budget.raise_limit(everything, persona="spender")

    async def resume() -> list[Any]:
        runs = (hive.run(whole, run_id=f"run-{each}") for each in range(PROCESSES))
        return list(await asyncio.gather(*runs))

    assert asyncio.run(resume()) == [steps] * PROCESSES
    store = hive._open()
    assert completed(store) == PROCESSES * steps, "no completed step was made twice"
    account = store.account(ACCOUNT)
    assert (account.tokens, account.reserved_tokens, account.in_flight) == (everything, 0, 0)
    roots = [each for each in hive.budget.spent("run") if "." not in each.name]
    assert [each.tokens for each in roots] == [steps * TOKENS] * PROCESSES
    children = [each.tokens for each in hive.budget.spent("run") if "." in each.name]
    assert children == [STEPS * TOKENS] * PROCESSES * PARTS
    (day,) = hive.budget.spent("day")
    (cost,) = store.accounts("workflow")
    assert day.tokens == cost.tokens == everything
    assert (cost.name, cost.calls) == ("part", PROCESSES * steps)
    assert store.check() == []


@pytest.mark.timeout(600)
def test_twenty_processes_never_spend_more_than_their_budget(
    folder: Path, spenders: Spenders
) -> None:
    with Hive(folder) as hive:
        store = hive._open()
        spenders.release()
        seen = spenders.watch(store)
        assert max(seen) <= LIMIT
        assert {each.returncode for each in spenders.processes} == {BANKRUPT}
        account = store.account(ACCOUNT)
        assert account.tokens == LIMIT // TOKENS * TOKENS == completed(store) * TOKENS
        assert (account.reserved_tokens, account.in_flight) == (0, 0)
        assert {each.status for each in hive.runs(roots=True)} == {"bankrupt"}
        with pytest.raises(BudgetExceeded, match="994 tokens of 1,000 tokens"):
            hive.run_sync(program(hive), run_id="run-0")
    with Hive(folder) as hive:
        finish(hive)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("spenders", [KILLED], indirect=True)
def test_what_killed_processes_had_reserved_counts_until_it_is_released(
    folder: Path, spenders: Spenders
) -> None:
    with Hive(folder) as hive:
        store = hive._open()
        spenders.release()
        seen = spenders.watch(store, until=LIMIT // 3)
        for each in spenders.processes[:KILLED]:
            each.kill()
        seen += spenders.watch(store)
        assert max(seen) <= LIMIT
        codes = [each.returncode for each in spenders.processes]
        assert codes == [-9] * KILLED + [BANKRUPT] * (PROCESSES - KILLED)
        store.recover_reservations()
        account = store.account(ACCOUNT)
        lost = [each for each in store.reservations() if each.lost]
        assert account.tokens == completed(store) * TOKENS
        assert account.reserved_tokens == len(lost) * TOKENS
        assert account.in_flight == 0
        assert LIMIT - TOKENS < account.tokens + account.reserved_tokens <= LIMIT
        assert store.check() == []
        assert len(lost) >= KILLED
        with pytest.raises(BudgetExceeded, match="maestro budget release"):
            hive.run_sync(program(hive), run_id=f"run-{PROCESSES - 1}")
        assert hive.budget.release() == len(lost)
    with Hive(folder) as hive:
        finish(hive)
