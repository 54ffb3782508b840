"""Requests to the service, kills of its processes, and what must be left after them.

A uvicorn with a worker in it, and a ``maestro worker`` beside it, share a state folder. Clients send
orders and answers, again and again until they are accepted, or give up. At random moments one of the
two processes is killed and started again; half of the kills come right after the answer to a request.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import threading
import time
from collections import Counter, deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faults.service import FOLDER, GRACE_SECONDS
from faults.service.notes import Notes
from maestro_hive import Hive
from tests.python_processes import PythonWithOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[2]
_KINDS = ("enqueued", "started", "asks", "sleeps")
_CLIENTS = 3
_START_SECONDS = 60.0
#: How many requests are accepted before the clients stop, however slow the machine is.
_LEAST_ACCEPTED = 10
#: How long everything that was accepted may take to end, after the last kill.
_FINISH_SECONDS = 120.0


@dataclass(slots=True, kw_only=True)
class Report:
    """What was done, and what was seen."""

    sent: int = 0
    accepted: int = 0
    answered: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    #: Kills while a step had started in that process, and was not recorded.
    in_a_step: int = 0
    interrupted: int = 0
    runs: int = 0
    finish_seconds: float = 0.0
    stop_seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


class Server:
    """One of the two processes, started again after each kill."""

    def __init__(self, name: str, code: str, words: list[str], environment: dict[str, str]) -> None:
        self.name = name
        self._code = code
        self._words = words
        self._environment = environment
        self._errors = Path(environment[FOLDER]) / f"{name}.errors"
        self._process: PythonWithOutput | None = None

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it, without waiting until it is ready."""
        with self._errors.open("ab") as errors:
            self._process = PythonWithOutput(
                self._code,
                *self._words,
                output=errors.fileno(),
                env=self._environment,
                cwd=ROOT,
            )

    def end(self, number: int, seconds: float = 30.0) -> int:
        """Send it a signal, and return how it ended."""
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(seconds)

    def close(self) -> None:
        """Kill it, if it was not."""
        if self._process is not None and self._process.poll() is None:
            self.end(signal.SIGKILL)

    def errors(self) -> str:
        """Return what it printed."""
        return self._errors.read_text(encoding="utf-8", errors="replace")


class Shop:
    """The two processes, the folder they share, and the requests to them."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.notes = Notes(folder)
        self._port = _free_port()
        environment = {**os.environ, FOLDER: str(folder)}
        service = ["faults.service.app:app", "--port", str(self._port)]
        service += ["--log-level", "warning", "--timeout-graceful-shutdown", "1"]
        worker = ["worker", "faults.service.shop", "--grace", "1s"]
        self.service = Server("service", "from uvicorn import main; main()", service, environment)
        maestro = "from maestro_hive.cli import main; main()"
        self.worker = Server("worker", maestro, worker, environment)

    @contextmanager
    def opened(self) -> Iterator[Hive]:
        """Have both started, and the folder open here; kill both at the end."""
        try:
            self.service.start()
            self.worker.start()
            self.wait_until_ready()
            with Hive(self.folder / "state") as hive:
                yield hive
        finally:
            self.service.close()
            self.worker.close()

    def send(
        self, path: str, body: dict[str, str] | None = None, *, method: str = "POST"
    ) -> tuple[int, Any]:
        """Return the status and the answer of a request; 0 if there was no answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        try:
            headers = {"content-type": "application/json"}
            connection.request(method, path, json.dumps(body or {}), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except (OSError, http.client.HTTPException, ValueError):
            return 0, None
        finally:
            connection.close()

    def wait_until_ready(self) -> None:
        """Wait until the service accepts connections."""
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1):
                return
            time.sleep(0.02)
        raise TimeoutError(f"the service did not start:\n{self.service.errors()[-2000:]}")


class Clients:
    """Threads that send orders and answers; what was accepted is noted."""

    def __init__(self, shop: Shop, seed: int) -> None:
        self._shop = shop
        self._stopping = threading.Event()
        self._asking: deque[str] = deque()
        self.accepted: dict[str, str] = {}
        self.answered: set[str] = set()
        self.sent = 0
        #: Set with each request that is accepted.
        self.has_accepted = threading.Event()
        work: list[Callable[[], None]] = [
            lambda number=each: self._order(number, random.Random(seed * 100 + number))  # type: ignore[misc]
            for each in range(_CLIENTS)
        ]
        self._threads = [threading.Thread(target=each, daemon=True) for each in work]
        self._answering = threading.Thread(target=self._answer, daemon=True)

    def start(self) -> None:
        """Let them send."""
        for each in (*self._threads, self._answering):
            each.start()

    def stop(self) -> None:
        """Let them send what is to be sent again, and the answers, and end."""
        self._stopping.set()
        for each in (*self._threads, self._answering):
            each.join(_FINISH_SECONDS)

    def _order(self, number: int, rng: random.Random) -> None:
        for count in range(100_000):
            if self._stopping.is_set():
                return
            order_id, kind = f"order-{number}-{count}", rng.choice(_KINDS)
            gives_up = rng.random() < 0.3
            for _ in range(3_000):
                self.sent += 1
                status, answer = self._shop.send("/orders", {"id": order_id, "kind": kind})
                if status == 202:
                    assert answer == {"id": order_id}
                    self.accepted[order_id] = kind
                    self.has_accepted.set()
                if status == 202 or gives_up:
                    break
                time.sleep(0.05)
            if kind == "asks":
                self._asking.append(order_id)
            time.sleep(rng.uniform(0.0, 0.06))

    def _answer(self) -> None:
        """Answer each question, again and again until that is accepted."""
        tries: Counter[str] = Counter()
        while not self._stopping.is_set() or self._asking or _are_alive(self._threads):
            if not self._asking:
                time.sleep(0.02)
                continue
            order_id = self._asking.popleft()
            status, _ = self._shop.send(f"/orders/{order_id}/approval?approved=true")
            tries[order_id] += 1
            if status == 202:
                self.answered.add(order_id)
            elif order_id in self.accepted or tries[order_id] < 100:
                if self._shop.notes.is_recorded(order_id, "pack"):
                    continue  # an answer without an answer was accepted
                self._asking.append(order_id)  # it has not asked yet
                time.sleep(0.02)


def _are_alive(threads: list[threading.Thread]) -> bool:
    return any(each.is_alive() for each in threads)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


# --- the test ------------------------------------------------------------------------------------


def kill_under_load(folder: Path, *, kills: int, seed: int) -> Report:
    """Kill the processes under load, stop the service politely, and return what was seen."""
    shop, report, rng = Shop(folder), Report(), random.Random(seed)
    with shop.opened() as hive:
        clients = Clients(shop, seed)
        clients.start()
        for number in range(kills):
            chosen = shop.worker if number % 3 == 2 else shop.service
            shop.wait_until_ready()
            time.sleep(rng.uniform(0.1, 0.8))
            if number % 2:  # the others at a random moment
                clients.has_accepted.clear()
                clients.has_accepted.wait(_START_SECONDS)
            chosen.end(signal.SIGKILL)
            report.kills[chosen.name] += 1
            report.in_a_step += bool(shop.notes.unrecorded_of(chosen.pid))
            chosen.start()
        shop.wait_until_ready()
        _until(lambda: len(clients.accepted) >= _LEAST_ACCEPTED)
        clients.stop()
        report.sent, report.accepted = clients.sent, len(clients.accepted)
        report.answered = len(clients.answered)
        _finish(hive, clients, report)
        _check(hive, shop, clients, report)
        _stop(shop, hive, report)
    return report


def _finish(hive: Hive, clients: Clients, report: Report) -> None:
    """Wait until everything has ended."""
    started = time.monotonic()
    while time.monotonic() - started < _FINISH_SECONDS:
        open_runs = [run for run in hive.runs() if run.status not in ("success", "failed")]
        # Who gave up gave no answer: its question may stay open.
        left = [run.run_id for run in open_runs if run.run_id in clients.accepted]
        others = [run for run in open_runs if run.run_id not in clients.accepted]
        if not left and all(run.status == "waiting" for run in others):
            break
        time.sleep(0.1)
    report.finish_seconds = time.monotonic() - started


def _check(hive: Hive, shop: Shop, clients: Clients, report: Report) -> None:
    """Note what is wrong: runs that are lost or have not ended, and what was done twice."""
    runs = {run.run_id: run.status for run in hive.runs()}
    report.runs = len(runs)
    for order_id in clients.accepted:
        status = runs.get(order_id, "lost")
        if status != "success":
            report.wrong.append(f"{order_id} was accepted and is {status}")
    for order_id, status in runs.items():
        if status not in ("success", "waiting"):
            report.wrong.append(f"{order_id} is {status}")
    report.wrong += shop.notes.repeated()
    report.wrong += shop.notes.wrong_effects(set(clients.accepted))
    report.interrupted = shop.notes.interrupted()
    for server in (shop.service, shop.worker):
        if "Traceback" in server.errors():
            report.wrong.append(f"the {server.name} printed:\n{server.errors()[-1500:]}")


def _stop(shop: Shop, hive: Hive, report: Report) -> None:
    """Stop the service while it executes a run that outlives its grace, and a request waits for it."""
    ended = shop.worker.end(signal.SIGTERM)
    if ended not in (0, -signal.SIGTERM):
        report.wrong.append(f"the worker ended with {ended}:\n{shop.worker.errors()[-1500:]}")
    status, _ = shop.send("/orders", {"id": "long", "kind": "long"})
    _until(lambda: shop.notes.has("starts", "long"))
    if not shop.notes.has("starts", "long"):
        report.wrong.append("the service does not take a run")
    asking = threading.Thread(  # a request that waits, and must not keep the service from stopping
        target=shop.send, args=("/orders/long?wait=25",), kwargs={"method": "GET"}, daemon=True
    )
    asking.start()
    time.sleep(0.2)
    started = time.monotonic()
    ended = shop.service.end(signal.SIGTERM)
    report.stop_seconds = time.monotonic() - started
    # The request that waits would take 25 s; a busy machine may need some of them.
    if not GRACE_SECONDS <= report.stop_seconds <= GRACE_SECONDS + 15:
        report.wrong.append(f"SIGTERM took {report.stop_seconds:.1f} s, grace {GRACE_SECONDS} s")
    if ended not in (0, -signal.SIGTERM) or not shop.notes.has("closed", "app", shop.service.pid):
        report.wrong.append(f"it was not shut down: {ended}\n{shop.service.errors()[-1500:]}")
    (shop.folder / "free").touch()
    shop.worker.start()
    _until(lambda: hive.handle("long").status == "success")
    if status != 202 or hive.handle("long").status != "success":
        report.wrong.append(f"the run that was let go is {hive.handle('long').status}")


def _until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not condition():
        time.sleep(0.02)
