"""Row 16: steps that read every file of their project, the state folder too; logs deleted or cut.

Whatever closes a file of SQLite's drops the locks that its process has on it. Three workers do that
in every step, while other processes open, list, examine, copy and close the same folder.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import subprocess
import time
import traceback
import warnings
from collections import Counter
from typing import TYPE_CHECKING

from faults.child_processes import ChildProcess, ChildProcesses, ObservedRun
from faults.registry import BrokenPromiseError, Outcome, Plan, require, row
from maestro_hive import ExecutionConfig, Hive
from maestro_hive.admin.doctor import examine
from maestro_hive.cli.app import run
from maestro_hive.engine.config import Level1Config
from maestro_hive.kernel.errors import MaestroError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.projections import fold
from maestro_hive.maestro.state.sqlite.store import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

WORKERS = ("one", "two", "three")
STEPS = 25
OURS, RAW = 3, 4
_SECONDS = 60.0


# --- the processes -----------------------------------------------------------------------------------


def _read_all(folder: Path) -> None:
    """Open, read and close every file, as a search or a packer does."""
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                path.read_bytes()
        except OSError:  # deleted just now
            continue


async def _work(observed: ObservedRun) -> int:
    """Execute a run whose steps read the folder; report each step that was acknowledged."""
    name, steps = observed.options["run"], observed.options["steps"]
    config = ExecutionConfig(level1=Level1Config(base_delay_seconds=0.0, jitter=0.0))
    hive = Hive(observed.folder / "state", config)

    @hive.step
    def read(text: str) -> str:
        observed.report(body=text)
        _read_all(observed.folder)
        return text

    @hive.workflow
    async def work(start: str) -> None:
        for number in range(steps):
            await read(f"{start}-{number}")
            observed.report(acknowledged=f"{start}-{number}")

    try:
        await hive.run(work, name, run_id=name)
        observed.report(finished=name)
        hive.close()
    except MaestroError as error:
        observed.report(error=f"{type(error).__name__}: {error}", run=name)
        return OURS
    except Exception:  # noqa: BLE001 - raw errors are what is tested for
        observed.report(raw=traceback.format_exc(limit=-3), run=name)
        return RAW
    return 0


async def _visit(observed: ObservedRun) -> int:
    """Open and close, list and examine the folder until told to stop."""
    folder, visits = observed.folder / "state", Counter[str]()
    ways: dict[str, Callable[[], object]] = {
        "opened": lambda: SqliteStore(folder).close(),
        "listed": lambda: _run_command("runs", observed),
        "examined": lambda: _examine(folder),
    }
    while not (observed.folder / "stop").exists():
        for way, visit in ways.items():
            try:
                visit()
            except MaestroError as error:
                if not (folder / "journal.db").exists():
                    continue  # nobody has opened it yet
                observed.report(error=f"{way}: {type(error).__name__}: {error}")
            except Exception:  # noqa: BLE001 - as above
                observed.report(raw=f"{way}: {traceback.format_exc(limit=-3)}")
            visits[way] += 1
    observed.report(visits=visits)
    return 0


def _run_command(verb: str, observed: ObservedRun) -> None:
    folder = observed.folder / "state"
    if (folder / "journal.db").exists():
        code = run([verb, "--store", str(folder)])
        require(code == 0, f"maestro {verb} ended with {code}: {observed.errors()[-600:]}")


def _examine(folder: Path) -> None:
    if (folder / "journal.db").exists() and (problems := examine(folder).problems):
        raise BrokenPromiseError(f"doctor found {problems}")


WORKFLOWS = {"work": _work, "visit": _visit}


# --- the row -----------------------------------------------------------------------------------------


@row(
    16,
    "the user's own code cannot break our locks",
    "200 rounds, 0 acknowledged steps repeated, 0 lost; a log deleted or cut: said",
)
def readers(plan: Plan, outcome: Outcome) -> None:
    """Workers that read the folder, visitors and copies; then logs that are deleted or cut."""
    _read_and_visit(plan, outcome)
    _harm_logs(plan, outcome)


def _read_and_visit(plan: Plan, outcome: Outcome) -> None:
    rounds, rng = plan.amount(quick=6, full=200), random.Random(plan.seed)
    totals: Counter[str] = Counter()
    with ChildProcesses("faults.readers") as children:
        for number in plan.track("rounds", range(rounds), rounds):
            folder = plan.scratch / f"readers-{number}"
            totals += Round(children, folder, rng, outcome, f"round {number}").run()
            shutil.rmtree(folder)
    outcome.ran.append(
        f"{rounds} rounds of 3 workers that read the folder, {totals['kills']} kills"
    )
    outcome.ran.append(f"{totals['visits']} opened, listed, examined; {totals['copies']} copied")
    outcome.measured.append(f"{totals['repeated']} of {totals['acknowledged']} steps repeated")
    outcome.measured.append(f"{totals['lost']} lost, {totals['errors']} errors")
    outcome.measured.append(
        f"copies: {totals['whole']} whole, {totals['incomplete']} incomplete, all said so"
    )


class Round:
    """Three workers to their end, one of them killed on the way, with visitors and a copy."""

    def __init__(
        self,
        children: ChildProcesses,
        folder: Path,
        rng: random.Random,
        outcome: Outcome,
        name: str,
    ) -> None:
        self._children = children
        self._folder = folder
        self._rng = rng
        self._outcome = outcome
        self._name = name
        self._observed = ObservedRun(folder, {})
        self.totals: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        """Execute it, and return what was counted."""
        workers = {run: self._start(run) for run in WORKERS}
        visitors = [self._children.start("visit", self._folder) for _ in range(2)]
        victim = self._rng.choice(WORKERS)
        _wait_for(self._observed, self._rng.randint(1, STEPS * 2))
        self._kill(workers[victim])
        workers[victim] = self._start(victim)
        _wait_for(self._observed, self._rng.randint(STEPS * 2, STEPS * 3 - 5))
        self._copy()
        for name, worker in workers.items():
            self._require(worker.end() == 0, f"{name} did not end: {self._observed.errors()}")
        (self._folder / "stop").touch()
        for visitor in visitors:
            self._require(visitor.end() == 0, f"a visitor crashed: {self._observed.errors()}")
        self._check()
        return self.totals

    def _start(self, run: str) -> ChildProcess:
        return self._children.start("work", self._folder, run=run, steps=STEPS)

    def _kill(self, worker: ChildProcess) -> None:
        worker.kill()
        worker.end()
        self.totals["kills"] += 1

    def _copy(self) -> None:
        """Copy the folder in use: what is opened there is whole, or says what may be wrong."""
        before = _acknowledged(self._observed)
        copy = self._folder.with_name(f"{self._folder.name}-copy")
        command = ["cp", "-r", str(self._folder / "state"), str(copy)]
        subprocess.run(command, check=False, capture_output=True)
        self.totals["copies"] += 1
        found, said = _open_and_fold(copy)
        whole = before <= found
        self.totals["whole" if whole else "incomplete"] += 1
        self._require(whole or said, f"a copy lacks {sorted(before - found)} and does not say so")
        shutil.rmtree(copy)

    def _check(self) -> None:
        reports = self._observed.reports()
        errors = [each for each in reports if "error" in each or "raw" in each]
        for each in errors:
            self._outcome.fail(f"{self._name}: {each}")
        acknowledged = _acknowledged(self._observed)
        repeated = _repeated(self._observed)
        found, _ = _open_and_fold(self._folder / "state")
        finished = {each["finished"] for each in reports if "finished" in each}
        self._require(finished == set(WORKERS), f"finished: {finished}")
        self._require(not repeated, f"acknowledged and repeated: {repeated}")
        self._require(acknowledged <= found, f"lost: {sorted(acknowledged - found)}")
        self.totals["errors"] += len(errors)
        self.totals["acknowledged"] += len(acknowledged)
        self.totals["repeated"] += len(repeated)
        self.totals["lost"] += len(acknowledged - found)
        self.totals["visits"] += sum(sum(each.get("visits", {}).values()) for each in reports)

    def _require(self, truth: object, what: str) -> None:
        self._outcome.require(truth, f"{self._name}: {what}")


def _wait_for(observed: ObservedRun, acknowledged: int) -> None:
    deadline = time.monotonic() + _SECONDS
    while len(_acknowledged(observed)) < acknowledged and time.monotonic() < deadline:
        time.sleep(0.002)


def _acknowledged(observed: ObservedRun) -> set[str]:
    return {each["acknowledged"] for each in observed.reports() if "acknowledged" in each}


def _repeated(observed: ObservedRun) -> list[str]:
    """Return the steps whose body started after they had been acknowledged."""
    acknowledged: set[str] = set()
    repeated = []
    for each in observed.reports():
        if "acknowledged" in each:
            acknowledged.add(each["acknowledged"])
        elif each.get("body") in acknowledged:
            repeated.append(each["body"])
    return repeated


def _open_and_fold(folder: Path) -> tuple[set[str], bool]:
    """Return the completed steps in a folder, and whether opening it said that some may miss."""
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("maestro_hive")
    logger.addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = set(_completed(folder))
        except MaestroError:
            return set(), True
        finally:
            logger.removeHandler(handler)
    return found, bool(caught or heard)


def _completed(folder: Path) -> Iterator[str]:
    store = SqliteStore(folder)
    try:
        for record in store.runs():
            for step in fold(store.entries(record.id), store.load).steps.values():
                value = step.completed and store.load(step.completed)
                if value:
                    yield codec.decode(value)
    finally:
        store.close()


# --- logs that are deleted or cut --------------------------------------------------------------------


def _delete(log: Path, _: random.Random) -> None:
    log.unlink()


def _cut(log: Path, rng: random.Random) -> None:
    os.truncate(log, rng.randrange(log.stat().st_size))


def _harm_logs(plan: Plan, outcome: Outcome) -> None:
    rounds, rng = plan.amount(quick=8, full=200), random.Random(plan.seed + 1)
    seen: Counter[str] = Counter()
    with ChildProcesses("faults.readers") as children:
        for number in plan.track("logs", range(rounds), rounds):
            folder = plan.scratch / f"log-{number}"
            in_use, harm = number % 2 == 0, _delete if number % 4 < 2 else _cut
            name = f"log {number} ({harm.__name__.strip('_')}, {'in use' if in_use else 'killed'})"
            seen[_harm_log(children, folder, rng, in_use, harm, outcome, name)] += 1
            shutil.rmtree(folder)
    outcome.ran.append(f"{rounds} logs deleted or cut, in use and after a kill")
    outcome.measured.append(f"{seen['said']} losses said, {seen['none']} without loss, 0 silent")


def _harm_log(
    children: ChildProcesses,
    folder: Path,
    rng: random.Random,
    in_use: bool,
    harm: Callable[[Path, random.Random], None],
    outcome: Outcome,
    name: str,
) -> str:
    """Delete or cut the log of a worker, and return whether something was lost."""
    observed = ObservedRun(folder, {})
    worker = children.start("work", folder, run="one", steps=60)
    _wait_for(observed, rng.randint(5, 40))
    log = folder / "state" / "journal.db-wal"
    if in_use:
        harm(log, rng)
        code = worker.end()
        outcome.require(code in (0, OURS), f"{name}: ended with {code}: {observed.errors()}")
    else:
        worker.kill()
        worker.end()
        harm(log, rng)
    acknowledged = _acknowledged(observed)
    problems = examine(folder / "state").problems
    found, said = _open_and_fold(folder / "state")
    lost = acknowledged - found
    outcome.require(not lost or said, f"{name}: {len(lost)} steps lost, and opening is silent")
    outcome.require(not lost or problems, f"{name}: {len(lost)} steps lost, and doctor is silent")
    raw = [each["raw"] for each in observed.reports() if "raw" in each]
    outcome.require(not raw, f"{name}: {raw}")
    end = children.start("work", folder, run="one", steps=60).end()
    outcome.require(end == 0, f"{name}: not resumed ({end}): {observed.reports()[-1]}")
    return "said" if lost else "none"
