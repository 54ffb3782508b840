"""Row 19: limits under many processes on loaded cores that are killed and stopped.

Each body writes when it starts and when it ends to a file of its own making, on the boot-time clock.
From that file alone, and from the moments of the kills, follows how many were active at once and how
many started in a window; nothing of the journal is asked.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from faults.child_processes import ChildProcesses
from faults.registry import Outcome, Plan, row
from maestro_hive import Hive
from maestro_hive.engine.config import ExecutionConfig, Level1Config, Level2Config
from maestro_hive.engine.rates import Rate
from maestro_hive.maestro.state.sqlite.store import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from faults.child_processes import ChildProcess, ObservedRun


class Limited(NamedTuple):
    """A step with a limit: how its body behaves, and what must never be exceeded."""

    persona: str
    is_async: bool
    #: Seconds that a body takes at most; those that take longer than the timeout go on after it.
    seconds: float
    timeout: float
    max_concurrency: int | None = None
    rate: str | None = None


#: By name: sync and async bodies, with timeouts shorter than many of them.
STEPS = {
    "one_thread": Limited("reviewer", False, 0.20, 0.08, max_concurrency=1),
    "threads": Limited("developer", False, 0.30, 0.10, max_concurrency=3),
    "tasks": Limited("developer", True, 0.30, 0.10, max_concurrency=3),
    "paced": Limited("tester", True, 0.30, 0.20, rate="20/s"),
    "paced_threads": Limited("tester", False, 0.20, 0.10, rate="15/500ms"),
    "both": Limited("architect", False, 0.20, 0.10, max_concurrency=2, rate="10/s"),
}
#: How many tasks of a run call its step, and how often each of them.
_CALLERS = 3
_CALLS = 5
_NEVER = 1_000_000
#: Which part of the kills is made in any case, and not only in a body; how often one is looked for.
_BLIND = 0.05
_LOOKS = 200
#: Seconds of a killed process's end after which others may have waited for its locks for too long.
_SLOW_END = 10.0
#: How long the bodies that must have started are waited for, in seconds: a busy machine is slow.
_PATIENCE = 30.0


# --- in the processes that are killed --------------------------------------------------------------


class Ledger:
    """What the bodies of one process write, a line at a time."""

    def __init__(self, folder: Path, life: int) -> None:
        self._file = os.open(folder / "ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._life = life
        self._numbers = itertools.count(1)

    def start(self, name: str) -> int:
        """Write that a body starts; the moment is the first thing that it takes."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        number = next(self._numbers)
        os.write(self._file, f"+ {name} {self._life} {number} {now!r}\n".encode())
        return number

    def end(self, name: str, number: int) -> None:
        """Write that a body ends; the moment is the last thing that it takes."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        os.write(self._file, f"- {name} {self._life} {number} {now!r}\n".encode())


def _sync_body(ledger: Ledger, name: str, limited: Limited) -> Callable[[int, int], None]:
    def body(caller: int, call: int) -> None:
        number = ledger.start(name)
        time.sleep(_duration(limited, caller, call))
        ledger.end(name, number)

    return body


def _async_body(ledger: Ledger, name: str, limited: Limited) -> Any:
    async def body(caller: int, call: int) -> None:
        number = ledger.start(name)
        seconds = _duration(limited, caller, call)
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            if call % 2:
                raise
            await asyncio.sleep(seconds / 2)  # it refuses, and goes on
        finally:
            ledger.end(name, number)

    return body


def _duration(limited: Limited, caller: int, call: int) -> float:
    return limited.seconds * random.Random(caller * 1009 + call).random()


async def limited_runs(observed: ObservedRun) -> None:
    """Execute run after run of each step, until this process is killed; first those cut off."""
    worker, life = observed.options["worker"], observed.options["life"]
    ledger = Ledger(observed.folder, life)
    config = ExecutionConfig(
        level1=Level1Config(base_delay_seconds=0, max_interruptions=_NEVER),
        level2=Level2Config(base_delay_seconds=0, circuit_breaker_threshold=_NEVER),
    )
    hive = Hive(observed.folder / "state", config)
    steps = {}
    for name, limited in STEPS.items():
        made = _async_body if limited.is_async else _sync_body
        steps[name] = hive.step(
            name=name,
            persona=limited.persona,
            timeout=limited.timeout,
            max_attempts=2,
            max_concurrency=limited.max_concurrency,
            rate=limited.rate,
        )(made(ledger, name, limited))

    async def call_often(name: str, caller: int) -> None:
        for number in range(_CALLS):
            with suppress(TimeoutError):
                await steps[name](caller, number)

    @hive.workflow
    async def build(name: str, number: int) -> None:
        first = number * _CALLERS
        await asyncio.gather(*(call_often(name, first + each) for each in range(_CALLERS)))

    async def run_often(name: str) -> None:
        done = observed.folder / f"done-{worker}-{name}"
        for number in itertools.count(int(done.read_text() or 0) if done.exists() else 0):
            await hive.run(build, name, number, run_id=f"{name}-{worker}-{number}")
            done.write_text(str(number + 1))

    await asyncio.gather(*map(run_often, steps))


WORKFLOWS = {"limited": limited_runs}


# --- the ledger, read ------------------------------------------------------------------------------


@dataclass(slots=True)
class Body:
    """One call of a body; the life of a process is known by its number."""

    name: str
    life: int
    started: float
    ended: float | None = None


@dataclass(slots=True)
class Bodies:
    """The bodies that a ledger tells of, read as it grows."""

    path: Path
    found: dict[tuple[int, int], Body] = field(default_factory=dict)
    _active: dict[int, dict[int, Body]] = field(default_factory=lambda: defaultdict(dict))
    #: When each life last wrote something.
    latest: dict[int, float] = field(default_factory=dict)
    _read: int = 0

    def read(self) -> None:
        """Read what was added."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.decode().splitlines():
            sign, name, life, number, at = line.split()
            key, moment = (int(life), int(number)), float(at)
            self.latest[int(life)] = moment
            if sign == "+":
                self.found[key] = self._active[key[0]][key[1]] = Body(name, key[0], moment)
            else:
                self.found[key].ended = moment
                del self._active[key[0]][key[1]]

    def active(self, life: int) -> int:
        """Return how many bodies of a process have not ended."""
        return len(self._active[life])

    def by_name(self, deaths: dict[int, float]) -> dict[str, list[tuple[float, float]]]:
        """Return when the bodies of each step started and ended: at the latest with their process.

        A process was alive when it was about to be killed, and when it last wrote.
        """
        spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for body in self.found.values():
            ended = body.ended
            if ended is None:
                ended = max(deaths[body.life], self.latest[body.life])
            spans[body.name].append((body.started, ended))
        return spans


def most_at_once(spans: list[tuple[float, float]]) -> int:
    """Return how many were active at one moment; who starts when another ends comes after it."""
    changes = sorted([(at, 1) for at, _ in spans] + [(at, -1) for _, at in spans])
    return max(itertools.accumulate(change for _, change in changes), default=0)


def most_in_window(spans: list[tuple[float, float]], seconds: float) -> int:
    """Return how many started in the fullest window."""
    starts = sorted(started for started, _ in spans)
    most = first = 0
    for last, at in enumerate(starts):
        while at - starts[first] >= seconds:
            first += 1
        most = max(most, last - first + 1)
    return most


# --- the processes, and what is done to them -------------------------------------------------------


class _Workers:
    """Processes that are killed, started again, stopped and continued."""

    def __init__(self, children: ChildProcesses, folder: Path, count: int) -> None:
        self._children = children
        self._folder = folder
        self._lives = itertools.count(1)
        self.bodies = Bodies(folder / "ledger")
        self.deaths: dict[int, float] = {}
        self.landed: Counter[str] = Counter()
        self.errors: list[str] = []
        self.stops = 0
        #: How long the system took to end a process that was killed, at most. Until then it has its
        #: locks, and on a machine that is short of memory or time that may be half a minute.
        self.slowest_end = 0.0
        self._mutex = threading.Lock()
        self._stopped: set[int] = set()
        self.alive: dict[int, tuple[int, ChildProcess]] = {}
        for worker in range(count):
            self._start(worker)

    def _start(self, worker: int) -> None:
        life = next(self._lives)
        child = self._children.start("limited", self._folder, worker=worker, life=life)
        self.alive[worker] = (life, child)

    def kill(self, worker: int, *, again: bool = True) -> None:
        """Kill a process, note when, and start it again."""
        life, child = self.alive.pop(worker)
        with self._mutex:
            self._stopped.discard(life)
        self.deaths[life] = time.clock_gettime(time.CLOCK_BOOTTIME)
        child.kill()
        code = child.end()
        took = time.clock_gettime(time.CLOCK_BOOTTIME) - self.deaths[life]
        self.slowest_end = max(self.slowest_end, took)
        if code != -signal.SIGKILL:
            said = (self._folder / "errors").read_text()[-500:]
            self.errors.append(f"process {worker} ended by itself, with {code}: {said}")
        if again:
            self.bodies.read()
            self.landed["in a body" if self.bodies.active(life) else "elsewhere"] += 1
            self._start(worker)

    def choose(self, rng: random.Random) -> int:
        """Return a process to kill: mostly one of those in which a body is active."""
        for _ in range(_LOOKS if rng.random() >= _BLIND else 0):
            self.bodies.read()
            busy = [each for each, (life, _) in self.alive.items() if self.bodies.active(life)]
            if busy:
                return rng.choice(busy)
            time.sleep(0.01)
        return rng.choice(list(self.alive))

    def wait_for_bodies(self, least: int) -> None:
        """Return when so many bodies of each step have started, or after half a minute."""
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until:
            self.bodies.read()
            started = Counter(body.name for body in self.bodies.found.values())
            if all(started[name] >= least for name in STEPS):
                return
            time.sleep(0.05)

    def stop(self, worker: int, seconds: float) -> None:
        """Stop a process for so long, whatever happens to others meanwhile."""
        life, child = self.alive[worker]
        if life in self._stopped:
            return
        self.stops += 1
        self._stopped.add(life)
        child.kill(signal.SIGSTOP)
        timer = threading.Timer(seconds, self._continue, [life, child])
        timer.daemon = True
        timer.start()

    def _continue(self, life: int, child: ChildProcess) -> None:
        with self._mutex:  # it is not killed meanwhile, so that its id is its own
            if life in self._stopped:
                self._stopped.discard(life)
                child.kill(signal.SIGCONT)


def _load(stack: ExitStack, count: int) -> None:
    """Keep so many cores busy until the end."""
    for _ in range(count):
        burning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        stack.callback(burning.wait)
        stack.callback(burning.kill)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """How hard limits are attacked."""

    seed: int
    kills: int
    workers: int = 8
    burning: int = 2
    #: How long a process may live between two kills of any of them.
    pause: float = 0.4
    #: How many bodies of each step must have started: after the kills, they are waited for.
    least: int = 20


def attack_limits(attack: Attack, folder: Path, track: Callable[[Iterator[int]], Any]) -> _Workers:
    """Kill and stop processes that execute limited steps; return what they and the kills left."""
    rng = random.Random(attack.seed)
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        children = stack.enter_context(ChildProcesses("faults.limits"))
        workers = _Workers(children, folder, attack.workers)
        _load(stack, attack.burning)
        time.sleep(1.0)
        for _ in track(iter(range(attack.kills))):
            time.sleep(rng.uniform(0.02, attack.pause))
            if rng.random() < 0.25:
                workers.stop(rng.choice(list(workers.alive)), rng.uniform(0.02, 1.2))
            workers.kill(workers.choose(rng))
        workers.wait_for_bodies(attack.least)
        for worker in list(workers.alive):
            workers.kill(worker, again=False)
    workers.bodies.read()
    return workers


def check_limits(workers: _Workers, folder: Path, outcome: Outcome, least: int) -> None:
    """Compare what the ledger says with what the steps allow; of each, so many must have started."""
    spans = workers.bodies.by_name(workers.deaths)
    for name, limited in STEPS.items():
        started = spans.get(name, [])
        outcome.require(len(started) >= least, f"{name}: only {len(started)} bodies started")
        facts = [f"{len(started):,} bodies"]
        if limited.max_concurrency is not None:
            most, allowed = most_at_once(started), limited.max_concurrency
            outcome.require(most <= allowed, f"{name}: {most} at once, {allowed} are allowed")
            facts.append(f"{most} at once of {allowed}")
        if limited.rate is not None:
            rate = Rate.parse(limited.rate)
            most = most_in_window(started, rate.seconds)
            outcome.require(most <= rate.times, f"{name}: {most} in a window of {rate}")
            facts.append(f"{most} in a window of {rate}, {_used(started, rate):.0%} used")
        outcome.measured.append(f"{name}: {', '.join(facts)}")
    for error in workers.errors:
        if "seconds; it may be stopped" in error and workers.slowest_end > _SLOW_END:
            outcome.not_run.append(f"killed, a process took {workers.slowest_end:.0f} s to end")
        else:
            outcome.fail(error)
    store = SqliteStore(folder / "state")
    try:
        outcome.require(not store.check(), "the journal is damaged")
        held = [lease.name for lease in store.leases() if store.is_alive(lease)]
        outcome.require(not held, f"of dead processes, {held} are held")
    finally:
        store.close()


def _used(spans: list[tuple[float, float]], rate: Rate) -> float:
    starts = [started for started, _ in spans]
    if len(starts) < 2:
        return 0.0
    return (len(starts) - 1) * rate.seconds / rate.times / (max(starts) - min(starts))


@row(
    19,
    "a limit is a limit: a permit until its body has ended, a rate by the calls of bodies",
    "500 kills, 8 processes, 2 loaded cores: never exceeded",
)
def limits(plan: Plan, outcome: Outcome) -> None:
    """Attack all limits at once, and count by the ledger."""
    kills = plan.amount(quick=40, full=500)
    attack = Attack(seed=plan.seed, kills=kills, least=plan.amount(quick=5, full=20))
    folder = plan.scratch / "limits"
    workers = attack_limits(attack, folder, lambda items: plan.track("kills", items, kills))
    check_limits(workers, folder, outcome, attack.least)
    inside = workers.landed["in a body"]
    outcome.require(inside >= 0.8 * kills, f"only {inside} of {kills} kills landed in a body")
    outcome.ran.append(f"{kills} kills and {workers.stops} stops of {attack.workers} processes")
    outcome.measured.append(f"seed {plan.seed}: {inside} of {kills} kills landed in a body")
