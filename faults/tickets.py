"""Row 12: processes that escalate to a Jira are killed around each request and each record.

The Jira is a server on loopback that refuses, hangs, fails, loses responses, and whose search lags. A
process escalates the same failure in two runs: of a ``Hive``, whose runs wait for a person, or of a
``SafetyRetryWrapper``. It kills itself at one point; another one goes on. A person comments on the
ticket and resolves it. Then the server is asked what there is: by this alone it is judged.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from faults.child_processes import ChildProcesses
from faults.registry import Outcome, Plan, row
from maestro_hive import Hive, PersonaExecutor, SafetyRetryWrapper, current
from maestro_hive.cli import app
from maestro_hive.engine import delivery
from maestro_hive.engine.callers_tickets import chosen_system
from maestro_hive.engine.config import ExecutionConfig, Level1Config, Level2Config, StateConfig
from maestro_hive.engine.errors import HelpNeeded
from maestro_hive.engine.outbox import ESCALATIONS
from maestro_hive.engine.tickets import adf, http
from maestro_hive.engine.tickets.http import Server
from maestro_hive.hive import keeping_escalations
from maestro_hive.hive.keeping_escalations import sync_all
from maestro_hive.maestro.state.records import EntryKind
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.stores import close_store, open_store
from tests.jira_server import OWN_ACCOUNT, PERSON, JiraServer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from faults.child_processes import ObservedRun

ANSWER = "use the mirror"
_MARKER = "maestro-hive effect: "
#: How late the server's search is, and how late the configuration says that it may be.
_LAG = 0.3
_INDEX_LAG = 0.6
#: How long a response is waited for where there is none.
_TIMEOUT = 0.5
_POLL_SECONDS = 0.02
#: How often the person asks for the answer to be taken.
_SYNC_SECONDS = 2.0
_PATIENCE = 50.0
#: A point that is passed very often is one like the others from here on.
_MOST_TIMES = 3

#: Once for all processes that are forked: to read the certificates takes each of them long.
http._tls()  # noqa: SLF001


# --- in the processes that are killed --------------------------------------------------------------


class Points:
    """The points around each request and record of a process, which kills itself at one of them."""

    def __init__(self, kill_at: str | None) -> None:
        self._kill_at = kill_at
        self.passed: Counter[str] = Counter()

    def pass_by(self, name: str) -> None:
        """Note a point; it is known by its name and by how often it was passed."""
        self.passed[name] += 1
        if self._kill_at == f"{name} {self.passed[name]}":
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self) -> None:
        """Pass points from now on."""
        self._watch_requests()
        self._watch_records()

    def _watch_requests(self) -> None:
        request = Server.request

        async def watched(server: Server, method: str, path: str = "", **given: Any) -> Any:
            name = f"{method} {path.rpartition('/')[2].rstrip('-0123456789')}"
            self.pass_by(f"before {name}")
            response = await request(server, method, path, **given)
            self.pass_by(f"after {name}")
            return response

        Server.request = watched  # type: ignore[method-assign, assignment]

    def _watch_records(self) -> None:
        append, update_document = SqliteStore.append, SqliteStore.update_document

        def appended(store: SqliteStore, appends: Any, **given: Any) -> Any:
            kinds = [EntryKind(entry.kind).name for each in appends for entry in each.entries]
            if not kinds:
                return append(store, appends, **given)
            self.pass_by(f"before {kinds[0]}")
            made = append(store, appends, **given)
            self.pass_by(f"after {kinds[0]}")
            return made

        def updated(store: SqliteStore, namespace: str, *args: Any, **given: Any) -> Any:
            self.pass_by(f"before {namespace}")
            made = update_document(store, namespace, *args, **given)
            self.pass_by(f"after {namespace}")
            return made

        SqliteStore.append = appended  # type: ignore[method-assign, assignment]
        SqliteStore.update_document = updated  # type: ignore[method-assign, assignment]


def _start(observed: ObservedRun) -> tuple[Points, ExecutionConfig]:
    """Make failed deliveries wait shortly, and watch; return the configuration of the environment."""
    os.environ |= observed.options["environment"]
    delivery._FIRST_SECONDS = 0.05  # noqa: SLF001
    delivery._PERMANENT_SECONDS = 0.1  # noqa: SLF001
    keeping_escalations._POLL_SECONDS = 0.02  # noqa: SLF001
    keeping_escalations.SYNC_SECONDS = _PATIENCE  # a person asks for it
    points = Points(observed.options["kill_at"])
    points.watch()
    return points, ExecutionConfig(
        level1=Level1Config(base_delay_seconds=0, max_attempts=1),
        level2=Level2Config(base_delay_seconds=0, max_attempts=1, circuit_breaker_threshold=1000),
        state=StateConfig(state_dir=str(observed.folder / "state")),
    )


async def _deploy(size: int) -> int:
    if not any(ANSWER in each for each in current().feedback):
        raise OSError("no route")
    return size


async def waiting_runs(observed: ObservedRun) -> None:
    """Escalate the same failure in some runs, and end when they are answered and tickets told."""
    points, config = _start(observed)
    hive, count = Hive(observed.folder / "state", config), observed.options["runs"]
    deploy = hive.step(name="deploy", escalate=True, max_attempts=1)(_deploy)

    @hive.workflow
    async def release(size: int) -> int:
        return await deploy(size)

    async def run(number: int) -> int:
        return await hive.run(release, 3, run_id=f"run-{number}")

    runs = [asyncio.create_task(run(number)) for number in range(count)]
    is_told = False
    while not all(each.done() for each in runs):
        known = 0 if is_told else sum(each.delivered for each in hive.escalations())
        if not is_told and known + sum(each.done() for each in runs) >= count:
            observed.report(told=True)
            is_told = True
        await asyncio.wait(runs, timeout=_POLL_SECONDS)
    results = [each.result() for each in runs]
    system, store = chosen_system(config), open_store(observed.folder / "state")
    assert system is not None
    while ESCALATIONS.all(store):
        await sync_all(store, system)
        await asyncio.sleep(_POLL_SECONDS)
    observed.report(done=results, points=dict(points.passed))
    close_store(store)
    hive.close()


async def wrapped_calls(observed: ObservedRun) -> None:
    """Have the same failure in some runs of a wrapper, and end when a person was told of each."""
    points, config = _start(observed)
    for number in range(observed.options["runs"]):
        await _call_until_told(config, f"run-{number}")
    observed.report(told=True, done=[], points=dict(points.passed))


async def _call_until_told(config: ExecutionConfig, run_id: str) -> None:
    with (
        PersonaExecutor(config, "writer", workflow_id=run_id) as executor,
        SafetyRetryWrapper(config, workflow_id=run_id) as wrapper,
    ):
        while True:
            try:
                await wrapper.execute_safe(executor.execute, _deploy, "deploy", 3)
            except HelpNeeded as needed:
                if "ticket_url" in needed.context:
                    return
            await asyncio.sleep(_POLL_SECONDS)


async def sync_by_hand(observed: ObservedRun) -> None:
    """Take answers as a person does: ``maestro escalations sync``."""
    os.environ |= observed.options["environment"]
    words = ["--store", str(observed.folder / "state"), "escalations", "sync"]
    await asyncio.to_thread(app.run, words)


WORKFLOWS = {"waiting": waiting_runs, "wrapped": wrapped_calls, "sync": sync_by_hand}


# --- the person, and what is judged ----------------------------------------------------------------


class Case(NamedTuple):
    """One attack: what escalates, where it is killed, what the server does, when a person answers."""

    story: str = "waiting"
    version: int = 3
    #: A point by its name and its number; None: it is not killed.
    kill_at: str | None = None
    faults: tuple[str, ...] = ()
    runs: int = 2
    #: Whether a person answers as soon as the process was killed, if there is a ticket then.
    early: bool = False

    def __str__(self) -> str:
        when = ", answered at once" if self.early else ""
        server = " ".join(self.faults) or "a sound server"
        return f"{self.story} v{self.version}, killed {self.kill_at}, {server}{when}"


@dataclass(slots=True)
class Seen:
    """What came of an attack."""

    killed: bool = False
    tickets: int = 0
    comments: int = 0
    doubled: int = 0
    missing: int = 0
    wrong: list[str] = field(default_factory=list)
    points: dict[str, int] = field(default_factory=dict)


class Attack:
    """One case against a server of its own, in a folder of its own."""

    def __init__(self, case: Case, folder: Path, children: ChildProcesses) -> None:
        self._case = case
        self._folder = folder
        self._children = children
        self._answered = False
        self._seen = Seen()

    def make(self) -> Seen:
        """Make it; return what came of it."""
        case = self._case
        self._folder.mkdir(parents=True)
        with JiraServer(
            self._folder / "server", version=case.version, lag=_LAG, faults=case.faults
        ) as self._server:
            if case.kill_at is not None:
                code = self._live(case.kill_at)
                self._seen.killed = code == -signal.SIGKILL
                if code not in (0, -signal.SIGKILL):
                    self._seen.wrong.append(f"it ended with {code}: {self._errors()}")
                self._server.settle()
                if case.early and self._server.tickets() and not self._answered:
                    self._answer()
            code = self._live(None)
            if code != 0:
                self._seen.wrong.append(f"the last one ended with {code}: {self._errors()}")
            self._judge(self._server.tickets())
        return self._seen

    def _live(self, kill_at: str | None) -> int:
        """Have a process work until its end, and answer when it says so; return its exit code."""
        case = self._case
        options = {"kill_at": kill_at, "environment": self._environment, "runs": case.runs}
        child = self._children.start(case.story, self._folder, **options)
        sync_at, deadline = time.monotonic(), time.monotonic() + _PATIENCE
        while (code := child.poll()) is None:
            is_told = case.story == "waiting" and any("told" in each for each in child.reports())
            if is_told and time.monotonic() >= sync_at:
                if not self._answered:
                    self._answer()
                self._children.start("sync", self._folder, **options).end()
                sync_at = time.monotonic() + _SYNC_SECONDS
            if time.monotonic() > deadline:
                self._seen.wrong.append(f"it never ended: {self._errors()}")
                child.kill()
                return child.end()
            time.sleep(_POLL_SECONDS)
        reports = child.reports()
        if code == 0 and reports:
            self._seen.points = reports[-1]["points"]
            if case.story == "waiting" and reports[-1]["done"] != [3] * case.runs:
                self._seen.wrong.append(f"the runs returned {reports[-1]['done']}")
        return code

    @property
    def _environment(self) -> dict[str, str]:
        hangs = any("hang" in each for each in self._case.faults)
        return {
            **self._server.environment,
            "MAESTRO_JIRA_INDEX_LAG": str(_INDEX_LAG),
            "MAESTRO_TICKET_TIMEOUT": str(_TIMEOUT if hangs else 10.0),
            "MAESTRO_TICKET_ANSWERERS": PERSON,
        }

    def _answer(self) -> None:
        self._answered = True
        for each in self._server.tickets():
            self._server.add_comment(each["key"], ANSWER)
            self._server.resolve(each["key"])

    def _errors(self) -> str:
        errors = self._folder / "errors"
        return errors.read_text()[-600:] if errors.exists() else ""

    def _judge(self, tickets: list[dict[str, Any]]) -> None:
        """Count: one ticket, a comment for each further run, and how each of them ended."""
        case, seen = self._case, self._seen
        wanted = case.runs - 1 + (case.runs if case.story == "waiting" else 0)
        made = [line for each in tickets for line in _markers(each)]
        seen.tickets, seen.comments = len(tickets), len(made)
        seen.doubled = max(len(tickets) - 1, 0) + len(made) - len(set(made))
        seen.missing = (not tickets) + max(wanted - len(set(made)), 0)
        if seen.doubled or seen.missing or len(made) != wanted:
            seen.wrong.append(f"{len(tickets)} tickets with the comments {sorted(made)}")


def _markers(ticket: dict[str, Any]) -> Iterator[str]:
    """Yield the lines by which our comments on a ticket are recognized."""
    for each in ticket["comments"]:
        if each["author"] == OWN_ACCOUNT:
            body = each["body"]
            text = body if isinstance(body, str) else adf.text_of(body)
            yield next(line for line in text.splitlines() if line.startswith(_MARKER))


# --- which cases there are -------------------------------------------------------------------------

#: What the server does wrong: with one request that creates, comments or reads.
FAULTS = (
    *(f"{call}:{what}" for call in ("create", "comment") for what in (
        "401", "429@1", "503", "500", "500-after", "drop", "drop-after", "hang", "hang-after",
        "cut", "garbage")),
    "search:500", "search:drop", "comments:500", "ticket:503", "myself:drop",
)  # fmt: skip
#: The points that are also tried while the server does something wrong.
_AROUND = {
    "create": (
        "before POST issue 1",
        "after POST issue 1",
        "after $tickets 2",
        "before $tickets 3",
    ),
    "comment": ("before POST comment 1", "after POST comment 1", "after escalations 3"),
    "other": ("before $tickets 1", "after POST issue 1", "after POST comment 1"),
}
#: The points after which a person may find a ticket that no process knows.
_EARLY = ("after POST issue 1", "before $tickets 2", "after $tickets 2", "before escalations 1",
          "after escalations 1", "after escalations 2")  # fmt: skip


def every_case(points: dict[tuple[str, int], dict[str, int]]) -> list[Case]:
    """Return all cases; ``points`` are those that each story passes when it is not killed."""
    cases = [
        Case(story=story, version=version, kill_at=f"{name} {number}")
        for (story, version), passed in points.items()
        for name, times in passed.items()
        for number in range(1, min(times, _MOST_TIMES) + 1)
    ]
    for story, version in points:
        for fault in FAULTS:
            at = _AROUND.get(fault.partition(":")[0], _AROUND["other"])
            case = Case(story=story, version=version, faults=(fault,))
            cases += [case, *(case._replace(kill_at=each) for each in at)]
    for version in (3, 2):
        early = Case(version=version, runs=1, early=True)
        cases += [early._replace(kill_at=each) for each in _EARLY]
        lost = early._replace(faults=("create:drop-after",))
        cases += [
            lost._replace(kill_at=each) for each in ("after $tickets 2", "before escalations 1")
        ]
    return cases


def quick_cases() -> list[Case]:
    """Return the cases at which something different happens each."""
    return [
        Case(kill_at="before POST issue 1"),
        Case(kill_at="after POST issue 1", runs=1, early=True),
        Case(kill_at="after POST comment 1", version=2),
        Case(kill_at="after $tickets 1", faults=("create:drop-after",), version=2),
        Case(story="wrapped", kill_at="after POST issue 1", faults=("comment:drop-after",)),
        Case(story="wrapped", kill_at="before POST comment 1", faults=("create:500",), version=2),
        Case(kill_at="after POST comment 2", faults=("create:429@1",)),
        Case(story="wrapped", kill_at="after ESCALATED 1", faults=("create:hang-after",)),
        Case(kill_at="before $tickets 2", runs=1, early=True, version=2),
        Case(story="wrapped", kill_at="before escalations 1", faults=("create:401",), version=2),
        Case(kill_at="after escalations 3", faults=("comment:500-after",)),
        Case(story="wrapped", kill_at="after $tickets 2", faults=("search:drop",)),
    ]


def undisturbed(folder: Path, children: ChildProcesses) -> dict[tuple[str, int], dict[str, int]]:
    """Return the points that each story passes with each version."""
    found = {}
    for story, version in ((each, number) for each in ("waiting", "wrapped") for number in (3, 2)):
        case = Case(story=story, version=version)
        found[story, version] = Attack(case, folder / f"{story}-{version}", children).make().points
    return found


def attack_all(cases: list[Case], folder: Path, at_once: int = 2) -> Iterator[tuple[Case, Seen]]:
    """Make attacks, some at once; yield each with what came of it."""

    def make(numbers: Iterable[int]) -> list[tuple[Case, Seen]]:
        made = []
        with ChildProcesses("faults.tickets") as children:
            for number in numbers:
                where = folder / f"case-{number}"
                made.append((cases[number], Attack(cases[number], where, children).make()))
                shutil.rmtree(where)
        return made

    size = 20
    parts = [range(first, min(first + size, len(cases))) for first in range(0, len(cases), size)]
    if len(parts) < at_once:
        parts = [range(first, len(cases), at_once) for first in range(at_once)]
    with ThreadPoolExecutor(at_once) as pool:
        for done in pool.map(make, parts):
            yield from done


@row(
    12,
    "one ticket per failure, and one of each comment",
    "killed at every point around the calls: 0 doubled, 0 missing",
)
def one_ticket(plan: Plan, outcome: Outcome) -> None:
    """Attack, and count what the server has."""
    cases = quick_cases()
    if not plan.quick:
        with ChildProcesses("faults.tickets") as children:
            cases = every_case(undisturbed(plan.scratch / "undisturbed", children))
        random.Random(plan.seed).shuffle(cases)
    landed: Counter[str] = Counter()
    total: Counter[str] = Counter()
    attacks = attack_all(cases, plan.scratch / "tickets")
    for case, seen in plan.track("attacks", attacks, len(cases)):
        for wrong in seen.wrong:
            outcome.fail(f"{case}: {wrong}")
        total.update(tickets=seen.tickets, comments=seen.comments)
        total.update(doubled=seen.doubled, missing=seen.missing)
        if seen.killed:
            landed[str(case.kill_at).rpartition(" ")[0]] += 1
    kills, wanted = landed.total(), sum(case.kill_at is not None for case in cases)
    outcome.require(kills >= 0.8 * wanted, f"only {kills} of {wanted} processes were killed")
    outcome.ran.append(f"{len(cases)} failures with {kills} kills, Jira v3 and v2")
    outcome.measured.append(
        f"{total['tickets']} tickets, {total['comments']} comments,"
        f" {total['doubled']} doubled, {total['missing']} missing"
    )
    outcome.measured.append(f"landed at {len(landed)} kinds of points")
