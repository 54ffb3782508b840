"""Row 20: queued runs, and workers that are killed while they execute them.

Each workflow writes when it starts and when it ends, each body of a step when it is called, and the
workflow what it saw of it, to files of their own making. From these alone, and from the moments of the
kills, follows what ran again, how many of a queue were executed at once, and how many were started in
a window; the journal is asked only whether all runs have ended.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from faults.child_processes import ChildProcesses
from faults.limits import Bodies, Ledger, most_at_once, most_in_window
from faults.registry import Outcome, Plan, row
from maestro_hive import Hive, current
from maestro_hive.engine.config import ExecutionConfig, Level1Config, Level2Config
from maestro_hive.engine.rates import Rate
from maestro_hive.kernel.errors import MaestroError
from maestro_hive.maestro.state.sqlite.store import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from faults.child_processes import ChildProcess, ObservedRun

#: The queues, each with its part of the runs: one without limits, and two with one over all workers.
CONCURRENCY = 3
RATE = "30/s"
QUEUES = {"free": 0.3, "three": 0.2, "paced": 0.5}
#: How a run is made: steps one after the other, beside each other, in a child, with a sleep after
#: which it is taken again, or with a question.
SHAPES = ("line", "beside", "child", "sleeps", "asks")
#: How long a run that only waits stays in memory, and how long it sleeps.
_RELEASE_SECONDS = 0.3
_SLEEP_SECONDS = 1.5
#: Which part of the kills is aimed at a worker that executes a run.
_BUSY = 0.9
#: How many runs a worker executes at once.
_AT_ONCE = 10


# --- in the processes that are killed --------------------------------------------------------------


class StepLog:
    """What is called, what happens and what is seen, in lines that all processes add to."""

    def __init__(self, folder: Path) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = os.open(folder / "steps", flags, 0o600)
        self._effects = folder / "effects"
        self._effects.mkdir(exist_ok=True)

    def write(self, what: str, place: str, key: str = "-") -> None:
        """Add a line."""
        os.write(self._file, f"{what} {place} {key}\n".encode())

    def happen(self, place: str, key: str) -> None:
        """Have an effect, unless one with this key has happened: as a payment provider does."""
        try:
            os.close(os.open(self._effects / key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            self.write("refused", place, key)
        else:
            self.write("happened", place, key)


def make_hive(folder: Path, life: int) -> Hive:
    """Return the hive of a worker: its workflows, and the limits of its queues."""
    config = ExecutionConfig(
        # Many: of 60 kills that are aimed at workers with runs, a step may get more than five.
        level1=Level1Config(base_delay_seconds=0, max_interruptions=50),
        level2=Level2Config(base_delay_seconds=0),
    )
    hive = Hive(folder / "state", config)
    ledger, log = Ledger(folder, life), StepLog(folder)
    hive.queue("three", concurrency=CONCURRENCY)
    hive.queue("paced", rate=RATE)

    @hive.step
    async def act(place: str, seconds: float) -> str:
        key = current().effect_key
        log.write("called", place, key)
        await asyncio.sleep(seconds / 2)
        log.happen(place, key)
        await asyncio.sleep(seconds / 2)
        return key

    @hive.step
    def act_in_thread(place: str, seconds: float) -> str:
        key = current().effect_key
        log.write("called", place, key)
        time.sleep(seconds / 2)
        log.happen(place, key)
        time.sleep(seconds / 2)
        return key

    async def one(place: str, number: int, seconds: float) -> None:
        step = act_in_thread if number % 2 else act
        key = await step(f"{place}/{number}", seconds)
        log.write("seen", f"{place}/{number}", key)

    @hive.workflow
    async def part(place: str, seconds: float) -> str:
        await one(place, 0, seconds)
        await one(place, 1, seconds)
        return place

    @hive.workflow
    async def job(queue: str, name: str, shape: str, seconds: float) -> list[str]:
        number = ledger.start(queue)
        try:
            await one(name, 0, seconds)
            match shape:
                case "beside":
                    await asyncio.gather(*(one(name, each, seconds) for each in (1, 2, 3)))
                case "child":
                    await part(f"{name}/child", seconds)
                case "sleeps":
                    await hive.sleep(_SLEEP_SECONDS)
                case "asks":
                    await hive.wait_for("go", type=str)
                case _:
                    await one(name, 1, seconds)
            await one(name, 4, seconds)
            return [name, shape]
        finally:
            ledger.end(queue, number)

    return hive


async def serve(observed: ObservedRun) -> None:
    """Take runs until this process is killed."""
    hive = make_hive(observed.folder, observed.options["life"])
    async with hive.worker(concurrency=_AT_ONCE, release_after=_RELEASE_SECONDS):
        observed.report(serves=observed.options["life"])
        await asyncio.Event().wait()


WORKFLOWS = {"worker": serve}


# --- the processes, and what is done to them -------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """How many runs there are, and how the workers are killed."""

    seed: int
    runs: int
    kills: int
    workers: int = 4
    #: Seconds from one kill to the next.
    pause: float = 1.0
    #: How long a step takes at most.
    step_seconds: float = 0.3
    #: For how many seconds after the last kill runs may go on.
    patience: float = 120.0


class Pool:
    """Workers that are killed, stopped and continued, and started again."""

    def __init__(self, children: ChildProcesses, folder: Path, count: int) -> None:
        self._children = children
        self._folder = folder
        self._lives = itertools.count(1)
        self.bodies = Bodies(folder / "ledger")
        self.deaths: dict[int, float] = {}
        self.landed: Counter[str] = Counter()
        self.errors: list[str] = []
        self.stops = 0
        self.alive: dict[int, tuple[int, ChildProcess]] = {}
        self._mutex = threading.Lock()
        self._stopped: set[int] = set()
        for worker in range(count):
            self.start(worker)

    def start(self, worker: int) -> None:
        """Start a worker."""
        life = next(self._lives)
        self.alive[worker] = (life, self._children.start("worker", self._folder, life=life))

    def kill(self, worker: int) -> None:
        """Kill a worker, and note when."""
        life, child = self.alive.pop(worker)
        with self._mutex:
            self._stopped.discard(life)
        self.deaths[life] = time.clock_gettime(time.CLOCK_BOOTTIME)
        child.kill()
        code = child.end()
        self.bodies.read()
        self.landed["in a run" if self.bodies.active(life) else "elsewhere"] += 1
        if code != -signal.SIGKILL:
            said = (self._folder / "errors").read_text()[-500:]
            self.errors.append(f"worker {worker} ended by itself, with {code}: {said}")

    def choose(self, rng: random.Random) -> int:
        """Return a worker to kill: mostly one of those that execute a run."""
        self.bodies.read()
        busy = [each for each, (life, _) in self.alive.items() if self.bodies.active(life)]
        return rng.choice(busy if busy and rng.random() < _BUSY else list(self.alive))

    def stop(self, worker: int, seconds: float) -> None:
        """Stop a worker for so long, whatever happens to others meanwhile."""
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


class Orders(NamedTuple):
    """A run that was enqueued."""

    run_id: str
    queue: str
    shape: str
    seconds: float


class _Answers(threading.Thread):
    """Answers the questions of runs, from outside."""

    def __init__(self, hive: Hive, asked: list[str]) -> None:
        super().__init__(daemon=True)
        self._hive = hive
        self._left = set(asked)
        self._over = threading.Event()

    def run(self) -> None:
        """Answer each once it is asked."""
        while self._left and not self._over.wait(0.1):
            waiting = {each.run_id for each in self._hive.runs(status="waiting")}
            for run_id in sorted(self._left & waiting):
                try:
                    self._hive.answer(run_id, "go", "yes")
                except MaestroError:  # it is not asked yet
                    continue
                self._left.discard(run_id)

    def end(self) -> None:
        """Answer no more."""
        self._over.set()
        self.join()


@dataclass(slots=True)
class Seen:
    """What came of an attack."""

    folder: Path
    pool: Pool
    orders: list[Orders]
    seconds: float = 0.0
    after_kills: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)
    unfinished: list[str] = field(default_factory=list)


def make_orders(attack: Attack) -> list[Orders]:
    """Return the runs, of all queues and shapes in turn; those under the rate are short."""
    rng = random.Random(attack.seed)
    made = []
    for number in range(attack.runs):
        (queue,) = rng.choices(list(QUEUES), list(QUEUES.values()))
        most = attack.step_seconds / 10 if queue == "paced" else attack.step_seconds
        seconds = round(rng.uniform(most / 10, most), 3)
        made.append(Orders(f"{queue}-{number}", queue, SHAPES[number % len(SHAPES)], seconds))
    return made


def enqueue(hive: Hive, orders: list[Orders]) -> None:
    """Enqueue runs, from a process without their code."""
    for name, queue, shape, seconds in orders:
        hive.enqueue("job", queue, name, shape, seconds, run_id=name, queue=queue)


def attack_workers(
    attack: Attack, folder: Path, track: Callable[[Iterator[int]], Any] = iter
) -> Seen:
    """Kill workers that execute queued runs, one after the other; return what all of them left."""
    rng = random.Random(attack.seed)
    folder.mkdir(parents=True)
    with Hive(folder / "state") as hive, ChildProcesses("faults.worker_kills") as children:
        started = time.monotonic()
        orders = make_orders(attack)
        left = orders[attack.runs // 2 :]  # these come while workers are killed
        enqueue(hive, orders[: attack.runs // 2])
        pool = Pool(children, folder, attack.workers)
        answers = _Answers(hive, [each.run_id for each in orders if each.shape == "asks"])
        answers.start()
        for kill in track(iter(range(attack.kills))):
            part = len(left) // (attack.kills - kill)
            enqueue(hive, left[:part])
            left = left[part:]
            time.sleep(attack.pause)
            victim = pool.choose(rng)
            if rng.random() < 0.25:
                other = (victim + 1) % attack.workers
                pool.stop(other, rng.uniform(0.05, 1.5))
            pool.kill(victim)
            pool.start(victim)
        killed = time.monotonic()
        store = hive._open()  # noqa: SLF001 - the rows of those that have not ended
        while store.dispatch_counts() and time.monotonic() - killed < attack.patience:
            time.sleep(0.1)
        seen = Seen(folder, pool, orders, seconds=time.monotonic() - started)
        seen.after_kills = time.monotonic() - killed
        answers.end()
        time.sleep(0.5)
        for worker in list(pool.alive):
            pool.kill(worker)
        seen.statuses = Counter(each.status for each in hive.runs())
        known = {each.run_id for each in orders}
        seen.unfinished = [
            f"{each.run_id} ({each.status})"
            for each in hive.runs()
            if each.status != "success" and each.run_id in known
        ]
    pool.bodies.read()
    return seen


# --- what was written, read ------------------------------------------------------------------------


def steps_of(order: Orders) -> list[str]:
    """Return the places of a run's steps."""
    numbers = {"line": (0, 1, 4), "beside": (0, 1, 2, 3, 4)}.get(order.shape, (0, 4))
    places = [f"{order.run_id}/{number}" for number in numbers]
    if order.shape == "child":
        places += [f"{order.run_id}/child/{number}" for number in (0, 1)]
    return places


def check_workers(seen: Seen, outcome: Outcome, most_seconds: float) -> None:
    """Compare what was written with what is promised; a queue's longest pause is limited, too."""
    require = outcome.require
    for error in seen.pool.errors:
        outcome.fail(error)
    require(not seen.unfinished, f"{len(seen.unfinished)} have not ended: {seen.unfinished[:8]}")
    _check_steps(seen, outcome)
    _check_limits(seen, outcome)
    _check_pauses(seen, outcome, most_seconds)
    with_store = SqliteStore(seen.folder / "state")
    try:
        require(not with_store.check(), "the journal is damaged")
        held = [each.name for each in with_store.leases() if with_store.is_alive(each)]
        require(not held, f"of dead processes, {held} are held")
    finally:
        with_store.close()


def _check_steps(seen: Seen, outcome: Outcome) -> None:
    """Check that nothing which was completed ran again, and that each effect happened once."""
    lines = [line.split() for line in (seen.folder / "steps").read_text().splitlines()]
    over: set[str] = set()
    keys: dict[str, set[str]] = defaultdict(set)
    happened: Counter[str] = Counter()
    called: Counter[str] = Counter()
    again = 0
    for what, place, key in lines:
        keys[place].add(key)
        if what == "called":
            called[place] += 1
            again += place in over
        elif what == "seen":
            over.add(place)
        elif what == "happened":
            happened[place] += 1
    expected = {place for order in seen.orders for place in steps_of(order)}
    many = [place for place, found in keys.items() if len(found) > 1]
    twice = [place for place, count in happened.items() if count > 1]
    missing = expected - happened.keys()
    outcome.require(not again, f"{again} steps were completed, and called again")
    outcome.require(not many, f"{len(many)} steps have several effect keys: {many[:5]}")
    outcome.require(not twice, f"{len(twice)} effects happened twice: {twice[:5]}")
    outcome.require(not missing, f"{len(missing)} effects did not happen: {sorted(missing)[:5]}")
    outcome.require(happened.keys() <= expected, f"unknown effects: {happened.keys() - expected}")
    repeated = called.total() - len(called)
    outcome.measured.append(
        f"{len(expected):,} effects, each once; {repeated} bodies interrupted and called again,"
        f" {again} after they were completed"
    )


def _check_limits(seen: Seen, outcome: Outcome) -> None:
    spans = seen.pool.bodies.by_name(seen.pool.deaths)
    most = most_at_once(spans["three"])
    outcome.require(most <= CONCURRENCY, f"{most} at once of the queue with {CONCURRENCY}")
    rate = Rate.parse(RATE)
    starts = most_in_window(spans["paced"], rate.seconds)
    outcome.require(starts <= rate.times, f"{starts} started in a window of {rate}")
    counts = ", ".join(f"{len(spans[queue])} {queue}" for queue in QUEUES)
    outcome.measured.append(
        f"starts: {counts}; {most} at once of {CONCURRENCY}, {starts} in a window of {rate}"
    )


def _check_pauses(seen: Seen, outcome: Outcome, most_seconds: float) -> None:
    """Check that each queue went on as long as it had runs: from each start to the next."""
    spans = seen.pool.bodies.by_name(seen.pool.deaths)
    pauses = {}
    for queue in QUEUES:
        starts = sorted(at for at, _ in spans[queue])
        gaps = [after - before for before, after in itertools.pairwise(starts)]
        pauses[queue] = max(gaps, default=0.0)
    for queue, pause in pauses.items():
        outcome.require(pause <= most_seconds, f"nothing of {queue} started for {pause:.1f} s")
    shown = ", ".join(f"{pause:.1f} s {queue}" for queue, pause in pauses.items())
    outcome.measured.append(f"longest pauses: {shown}")


@row(
    20,
    "workers under kills: every queued run ends, nothing completed runs again, limits hold",
    "200 runs, 4 workers, a kill each second for a minute: all end, none exceeded",
)
def workers_under_kills(plan: Plan, outcome: Outcome) -> None:
    """Kill workers, and check all by what their workflows and steps wrote."""
    kills = plan.amount(quick=12, full=60)
    attack = Attack(
        seed=plan.seed,
        runs=plan.amount(quick=40, full=200),
        kills=kills,
        pause=0.6 if plan.quick else 1.0,
        step_seconds=0.3 if plan.quick else 1.5,
    )
    seen = attack_workers(
        attack, plan.scratch / "workers", lambda items: plan.track("kills", items, kills)
    )
    check_workers(seen, outcome, most_seconds=plan.amount(quick=10, full=20))
    landed = seen.pool.landed["in a run"]
    outcome.ran.append(f"{attack.runs} runs, {kills} kills and {seen.pool.stops} stops")
    outcome.measured.append(
        f"seed {plan.seed}: {landed} kills landed in a run; {dict(seen.statuses)};"
        f" {seen.seconds:.0f} s, {seen.after_kills:.0f} s of them after the last kill"
    )
