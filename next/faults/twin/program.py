"""Executes a generated program as a real workflow, in a process of its own: one life of a run.

A program is plain data (``programs``). Each of its nodes has a place: the run, the branch and the
position in it. The process appends to a ledger, a file outside of the state folder:

``call``, ``returned``, ``raised``
    from the bodies of steps, with the place they were called from, which they get through a context
    variable, so that equal calls stay equal;
``saw``
    what the workflow got at a place: a value, an error, the winner of a race, the way it took;
``end``
    everything that one execution of a workflow saw, and how it ended;
``result``
    what ``hive.run`` returned or raised.

Bodies sleep for random times, other ones in each life. A life may end itself by a signal, at its
N-th line or commit or a while after it, and, with ``die_at_end``, by SIGKILL when the workflow has
returned and its end is not recorded: the next life is then a replay of the whole history.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import random
import signal
import sys
import threading
import time
import warnings
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any
from zlib import crc32

from faults.twin import sabotage, values
from faults.twin.values import ERRORS, KINDS, number_of, shared_places, show, show_error
from maestro_hive.engine.attempt import current
from maestro_hive.engine.config import ExecutionConfig, Level1Config, Level2Config
from maestro_hive.hive.driver import Driver
from maestro_hive.hive.hive import Hive
from maestro_hive.hive.workflow_loop import ImpureWorkflowWarning
from maestro_hive.journal.store import Store
from maestro_hive.journal.user_classes import register_codec
from maestro_hive.kernel.errors import MaestroError, RunCancelledError
from maestro_hive.kernel.signals import until_signal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from pathlib import Path

    from maestro_hive.journal.effects import Release

Node = dict[str, Any]

RUN = "run-1"
#: Seconds that clearly do not pass, and seconds that clearly do.
LONG, SHORT = 60.0, 0.12
#: Seconds that a body takes at most, and one of five bodies.
_QUICK, _SLOW = 0.012, 0.05
#: Seconds that a body takes at least after a signal in it.
_DYING = 0.03
#: How often a loop goes round at most, and less.
_ROUNDS = 4
#: How often one process may execute the run: those of process 3 have the numbers from 3000.
EXECUTIONS = 1000
#: How long a run may wait in the memory of a worker: less than it sleeps.
_RELEASE_SECONDS = 0.01
#: How a run is stopped that a worker releases from memory.
RELEASED = "released"
_CANCELS_AGAIN = sys.version_info[:2] >= (3, 12)
#: Exit codes of lives that were stopped politely.
STOPPED = {"SIGINT": 130, "SIGTERM": 143}

place: ContextVar[str] = ContextVar("place")
register_codec(values.Money, lambda money: money.cents, values.Money, name="twin.Money")


def open_hive(folder: Path) -> Hive:
    """Open a hive that does not wait between attempts, and allows many interruptions.

    ``TWIN_POSTGRES`` is the URL of a server: then each folder has a database there.
    """
    where: Any = folder / "state"
    if server := os.environ.get("TWIN_POSTGRES"):
        where = _database(server, folder)
    config = ExecutionConfig(
        level1=Level1Config(base_delay_seconds=0, max_interruptions=1000),
        level2=Level2Config(base_delay_seconds=0, circuit_breaker_threshold=100_000),
    )
    return Hive(where, config)


def _database(server: str, folder: Path) -> str:
    """Return the URL of the database of a folder; it is made if it is new."""
    import psycopg

    known = (psycopg.errors.DuplicateDatabase, psycopg.errors.UniqueViolation)
    name = f"twin{crc32(str(folder).encode()):08x}"
    with psycopg.connect(server, autocommit=True) as connection, contextlib.suppress(*known):
        connection.execute(f"CREATE DATABASE {name}")
    return f"{server.rpartition('/')[0]}/{name}"


class Ledger:
    """The lines of one life, and the moment at which it ends itself."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(folder / "ledger", flags, 0o600)
        #: The number of this execution: a process may execute the run more than once.
        self.life = options["life"] * EXECUTIONS
        self._stop: dict[str, Any] = options.get("stop") or {}
        self._lines = self.commits = 0
        self._lock = threading.Lock()
        #: Seconds for which a body still has to last: a signal comes meanwhile.
        self.last_seconds = 0.0

    def write(self, what: str, at: str, **facts: Any) -> None:
        """Append a line; it may be the last one of this process, if it counts."""
        self._append({"what": what, "life": self.life, "at": at, **facts})
        if self._counts(what, at):
            self._count()

    def committed(self) -> None:
        """Count a commit; it may be the last one of this process."""
        self.commits += 1
        if self._stop.get("on") == "commit":
            self._count()

    def _count(self) -> None:
        with self._lock:
            self._lines += 1
            is_last = self._lines == self._stop["number"]
        if is_last and self._stop["delay"]:
            self.last_seconds = self._stop["delay"] + _DYING
            threading.Timer(self._stop["delay"], self._end).start()
        elif is_last:
            self._end()

    def _counts(self, what: str, at: str) -> bool:
        """Return whether the plan of the stop counts this line."""
        match self._stop.get("on"):
            case "line":
                return what != "cancellable"
            case "clean-up":
                return what == "call" and is_clean_up(at)
            case other:
                return what == other

    def begin(self) -> None:
        """Count one more execution of the run."""
        self.life += 1

    def release(self) -> None:
        """Note that the run is suspended: what is written from now on may not be recorded."""
        self._append({"what": "stop", "life": self.life, "at": "", "how": RELEASED})

    def kill(self) -> None:
        """End this process as ``kill -9`` does."""
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(LONG)

    def _end(self) -> None:
        """Send the signal of the plan to this process."""
        how = self._stop["signal"]
        self._append({"what": "stop", "life": self.life, "at": "", "how": how})
        os.kill(os.getpid(), signal.Signals[how])

    def _append(self, facts: dict[str, Any]) -> None:
        os.write(self._file, f"{json.dumps(facts)}\n".encode())


def is_clean_up(at: str) -> bool:
    """Return whether a place is one of a clean-up."""
    return any(word in at for word in (".finally", ".finish", ".clean"))


class Branch:
    """One line of execution in a workflow: the last value it saw, and how much it saw."""

    __slots__ = ("events", "key", "last")

    def __init__(self, key: str, last: Any) -> None:
        self.key = key
        self.last = last
        self.events: list[list[Any]] = []


class Interpreter:
    """Executes the nodes of one program on a hive."""

    def __init__(self, hive: Hive, spec: Node, ledger: Ledger, options: dict[str, Any]) -> None:
        self.hive = hive
        self.spec = spec
        self.ledger = ledger
        self._die_at_end = bool(options.get("die_at_end"))
        #: How many times longer sleeps are than the program says.
        self.slowness: float = options.get("slowness", 1.0)
        self._latency_seed = f"{spec['seed']}/{options['latency']}/{options['life']}"
        self._held: list[Any] = []
        self.steps = self._define_steps()
        self.children = [self._define_child(number) for number in range(len(spec["children"]))]
        self.stuck_child = self._define_stuck_child()
        self.main = self._define_main()
        self._run_kind: type[Run] = Run
        if options["kind"] == "anyio":
            from faults.twin.anyio_nodes import AnyioRun

            self._run_kind = AnyioRun

    # --- workflows ---

    def _define_main(self) -> Any:
        async def main(value: Any) -> Any:
            self.ledger.begin()
            return await self._workflow("run", value, self.spec["main"], is_main=True)

        return self.hive.workflow(name="main")(main)

    def _define_child(self, number: int) -> Any:
        async def child(value: Any) -> Any:
            return await self._workflow(place.get(), value, self.spec["children"][number])

        return self.hive.workflow(name=f"child{number}")(child)

    def _define_stuck_child(self) -> Any:
        async def stuck(number: int) -> Any:
            nodes = [{"op": "stuck", "how": "step", "number": number}]
            last = [{"op": "call", "step": "ticket", "arg": number}]
            node = {"op": "try", "body": nodes, "catch": [], "handler": [], "finally": last}
            return await self._workflow(place.get(), number, [node])

        return self.hive.workflow(name="stuck")(stuck)

    async def _workflow(
        self, key: str, value: Any, nodes: list[Node], *, is_main: bool = False
    ) -> Any:
        """Execute a body; at its end, write what it saw."""
        branches: list[Branch] = []
        run = self._run_kind(self, key, branches)
        branch = run.branch(key, value)
        try:
            try:
                await run.block(branch, "", nodes)
            finally:
                await run.last_step(branch)
        except asyncio.CancelledError:
            if run.is_over:  # it was cancelled and has cleaned up, or else it is suspended
                self._end(key, branches, "cancelled", is_main=is_main)
            raise
        except Exception as error:
            self._end(key, branches, show_error(error), is_main=is_main)
            raise
        self._end(key, branches, f"returned {show(branch.last)}", is_main=is_main)
        return branch.last

    def _end(self, key: str, branches: list[Branch], ended: str, *, is_main: bool) -> None:
        trace = {each.key: each.events for each in branches}
        self.ledger.write("end", key, trace=trace, ended=ended)
        if is_main and self._die_at_end:
            self.ledger.kill()

    # --- steps ---

    def _define_steps(self) -> dict[str, Callable[..., Awaitable[Any]]]:
        step = self.hive.step
        bodies: dict[str, Callable[..., Any]] = {
            "make": self._make,
            "describe": self._describe,
            "describe_in_thread": self._describe_in_thread,
            "change": self._change,
            "ticket": self._ticket,
            "stuck": self._stuck,
            "finish": self._finish,
            "part": self._part,
        }
        made: dict[str, Any] = {name: step(name=name)(body) for name, body in bodies.items()}
        flaky = (values.RefusedError, values.OutOfStockError)
        made["flaky"] = step(name="flaky", max_attempts=3, retry_on=flaky)(self._flaky)
        made["broken"] = step(name="broken", max_attempts=1, retry_on=())(self._broken)
        made["shared"] = step(name="shared", key="shared {number}")(self._shared)
        made["nested"] = step(name="nested")(self._nested)
        made["slow"] = step(name="slow", max_attempts=1, timeout=SHORT, retry_on=())(self._slow)
        return made

    async def _make(self, kind: str, number: int) -> Any:
        """Return a value of some kind, and change it afterwards."""
        await self._work("make", [kind, number])
        value = KINDS[kind](number)
        result = self._returned(value)
        self._held.append(value)
        loop = asyncio.get_running_loop()
        loop.call_soon(values.change, value)
        loop.call_later(0.004, values.change, value)
        return result

    async def _describe(self, value: Any) -> Any:
        await self._work("describe", value)
        return self._returned({"seen": show(value)[:200], "again": value})

    def _describe_in_thread(self, value: Any) -> Any:
        seconds = self._called("describe_in_thread", value)
        time.sleep(seconds)
        return self._returned((show(value)[:200],))

    async def _change(self, value: Any) -> Any:
        """Change its own argument."""
        await self._work("change", value)
        values.change(value)
        return self._returned(value)

    async def _ticket(self, number: int) -> Any:
        """Return another value at each place, as an agent may at each call."""
        await self._work("ticket", number)
        return self._returned(f"ticket {number} of {place.get()}")

    async def _shared(self, number: int) -> Any:
        """Return one value for all calls with this key."""
        await self._work("shared", number)
        return self._returned(f"shared {number} of {self.spec['seed']}")

    async def _nested(self, value: Any) -> Any:
        """Call other steps in the body of this one."""
        seconds = self._called("nested", value)
        found = [await self.steps["part"](number) for number in range(2)]
        await asyncio.sleep(seconds)
        found += await asyncio.gather(*(self.steps["part"](number) for number in range(3)))
        return self._returned([value, found])

    async def _part(self, number: int) -> str:
        return f"part {number}"

    async def _flaky(self, error: str, times: int, value: Any) -> Any:
        await self._work("flaky", [error, times, value])
        if current().attempt <= times:
            raise values.make_error(error, "flaky")
        return self._returned([value, times])

    async def _broken(self, error: str, value: Any) -> Any:
        await self._work("broken", [error, value])
        made = values.make_error(error, show(value))
        self.ledger.write("raised", place.get(), shown=show_error(made))
        raise made

    async def _slow(self, value: Any) -> Any:
        await self._work("slow", value)
        await asyncio.sleep(LONG)

    async def _stuck(self, value: Any) -> Any:
        await self._work("stuck", value)
        await asyncio.sleep(LONG)

    async def _finish(self) -> Any:
        await self._work("finish", None)
        return self._returned("finished")

    async def _work(self, name: str, given: Any) -> None:
        seconds = self._called(name, given)
        await asyncio.sleep(seconds)

    def _called(self, name: str, given: Any) -> float:
        """Write that a body was called; return the seconds that it takes."""
        at, attempt, effect = place.get(), current().attempt, current().effect_key
        self.ledger.write("call", at, step=name, input=show(given), attempt=attempt, effect=effect)
        rng = random.Random(f"{self._latency_seed}/{at}/{attempt}")
        seconds = rng.uniform(0, _SLOW if rng.random() < 0.2 else _QUICK)
        return max(seconds, self.ledger.last_seconds)

    def _returned(self, value: Any) -> Any:
        self.ledger.write("returned", place.get(), shown=show(value))
        return value


class Run:
    """One execution of a workflow, in one life."""

    def __init__(self, interpreter: Interpreter, key: str, branches: list[Branch]) -> None:
        self._interpreter = interpreter
        self._hive = interpreter.hive
        self._steps = interpreter.steps
        self._key = key
        self._branches = branches
        #: Whether its last step was completed.
        self.is_over = False

    def branch(self, key: str, last: Any) -> Branch:
        """Return a new branch; its value is its own."""
        made = Branch(key, last)
        self._branches.append(made)
        return made

    async def block(self, branch: Branch, path: str, nodes: list[Node]) -> None:
        """Execute nodes one after the other."""
        for number, node in enumerate(nodes):
            await getattr(self, f"_do_{node['op']}")(branch, f"{path}.{number}", node)

    async def last_step(self, branch: Branch) -> None:
        """Call a step: what was recorded before it is durable when it is completed.

        Python 3.13 cancels the parent of a cancelled task group again if a branch has failed, and
        3.12 with eager tasks forgets that it has taken such a cancellation back.
        """
        try:
            await self._durable(branch, ".finish", self._steps["finish"], set_last=False)
        except asyncio.CancelledError:
            if not _CANCELS_AGAIN:
                raise
            await self._durable(branch, ".finish again", self._steps["finish"], set_last=False)
        self.is_over = True

    def _saw(
        self, branch: Branch, path: str, how: str, shown: str = "", *, volatile: bool = False
    ) -> None:
        event = [path, how, shown, volatile]
        branch.events.append(event)
        at = f"{branch.key}|{len(branch.events)}"
        self._interpreter.ledger.write("saw", at, event=event, run=self._key)

    async def _durable(
        self,
        branch: Branch,
        path: str,
        call: Callable[[], Awaitable[Any]],
        *,
        set_last: bool = True,
        how: str = "value",
    ) -> Any:
        """Await something durable at its place, and write what came of it."""
        token = place.set(f"{branch.key}|{path}")
        try:
            value = await call()
        except asyncio.CancelledError:
            self._saw(branch, path, "cancelled")
            raise
        except Exception as error:
            self._saw(branch, path, "error", show_error(error))
            raise
        finally:
            place.reset(token)
        shared = shared_places(value)
        self._saw(branch, path, how, show(value) + (f" shared {shared}" if shared else ""))
        if set_last:
            branch.last = value
        return value

    # --- leaves ---

    async def _do_call(self, branch: Branch, path: str, node: Node) -> None:
        given = branch.last if node["arg"] == "last" else node["arg"]
        arguments = {
            "make": (node.get("kind"), node.get("number")),
            "flaky": (node.get("error"), node.get("times"), given),
            "broken": (node.get("error"), given),
        }.get(node["step"], (given,))
        before = show(given)
        await self._durable(branch, path, lambda: self._steps[node["step"]](*arguments))
        if show(given) != before:
            self._saw(branch, path, "argument changed", show(given))

    async def _do_child(self, branch: Branch, path: str, node: Node) -> None:
        given = branch.last if node["arg"] == "last" else node["arg"]
        before = show(given)
        child = self._interpreter.children[node["child"]]
        await self._durable(branch, path, lambda: child(given))
        if show(given) != before:
            self._saw(branch, path, "argument changed", show(given))

    async def _do_change_last(self, branch: Branch, path: str, _: Node) -> None:
        """Change the last value, in the workflow itself."""
        branch.last = branch.last if values.change(branch.last) else [branch.last]

    async def _do_raise(self, branch: Branch, path: str, node: Node) -> None:
        raise values.make_error(node["error"], f"{branch.key} {path}")

    async def _do_spin(self, branch: Branch, path: str, node: Node) -> None:
        """Let others continue many times, without waiting for anything."""
        for _ in range(node["turns"]):
            await asyncio.sleep(0)
        self._saw(branch, path, "turns", str(node["turns"]))

    async def _do_sleep(self, branch: Branch, path: str, node: Node) -> None:
        seconds = node["ms"] / 1000 * self._interpreter.slowness
        await self._durable(branch, path, lambda: self._hive.sleep(seconds), set_last=False)

    async def _do_ask(self, branch: Branch, path: str, node: Node) -> None:
        options: dict[str, Any] = {}
        if node["about"]:
            options["about"] = {"place": f"{branch.key}|{path}"}
        ask = partial(self._hive.wait_for, node["name"], **options)
        await self._durable(branch, path, ask, how="answer")

    async def _do_ask_in_vain(self, branch: Branch, path: str, _: Node) -> None:
        await self._durable(
            branch, path, lambda: self._hive.wait_for("never answered", timeout=SHORT)
        )

    async def _do_stuck(self, branch: Branch, path: str, node: Node) -> None:
        """Wait for what clearly does not come."""
        match node["how"]:
            case "sleep":
                await self._durable(branch, path, lambda: self._hive.sleep(LONG))
            case "ask":
                await self._durable(branch, path, lambda: self._hive.wait_for("never answered"))
            case "child":
                child = self._interpreter.stuck_child
                await self._durable(branch, path, lambda: child(node["number"]))
            case _:
                await self._durable(branch, path, lambda: self._steps["stuck"](node["number"]))

    async def _do_wait_to_be_cancelled(self, branch: Branch, path: str, _: Node) -> None:
        self._interpreter.ledger.write("cancellable", f"{branch.key}|{path}")
        await self._durable(branch, path, lambda: self._hive.sleep(LONG))

    async def _do_draw(self, branch: Branch, path: str, node: Node) -> None:
        """Ask the clock or the dice of the run."""
        drawn = getattr(self._hive, node["what"])()
        self._saw(branch, path, node["what"], show(drawn), volatile=True)

    # --- ways ---

    async def _do_if(self, branch: Branch, path: str, node: Node) -> None:
        way = number_of(branch.last, 2)
        self._saw(branch, path, "way", str(way))
        await self.block(branch, f"{path}.way{way}", node["ways"][way])

    async def _do_loop(self, branch: Branch, path: str, node: Node) -> None:
        rounds = number_of(branch.last, _ROUNDS)
        self._saw(branch, path, "rounds", str(rounds))
        for number in range(rounds):
            await self.block(branch, f"{path}.round{number}", node["body"])

    async def _do_try(self, branch: Branch, path: str, node: Node) -> None:
        caught: tuple[type[BaseException], ...] = tuple(ERRORS[name] for name in node["catch"])
        try:
            await self.block(branch, f"{path}.body", node["body"])
        except caught as error:
            self._saw(branch, path, "caught", show_error(error))
            await self.block(branch, f"{path}.handler", node["handler"])
        finally:
            await self.block(branch, f"{path}.finally", node["finally"])

    # --- branches ---

    async def _branch(self, parent: Branch, path: str, number: int, nodes: list[Node]) -> Any:
        own = self.branch(f"{parent.key}{path}#{number}", copy.deepcopy(parent.last))
        await self.block(own, "", nodes)
        return own.last

    def _coroutines(self, branch: Branch, path: str, node: Node) -> list[Coroutine[Any, Any, Any]]:
        blocks = node["branches"]
        return [self._branch(branch, path, number, each) for number, each in enumerate(blocks)]

    async def _do_gather(self, branch: Branch, path: str, node: Node) -> None:
        """Gather; if one fails, the others end, or are cancelled, before the program goes on."""
        tasks = [asyncio.ensure_future(each) for each in self._coroutines(branch, path, node)]
        try:
            found = await asyncio.gather(*tasks, return_exceptions=node["return_exceptions"])
        except Exception:
            await _settle(tasks, cancel=node["rest"] == "cancel")
            raise
        except asyncio.CancelledError:
            await _settle(tasks)
            raise
        branch.last = [show_error(each) if isinstance(each, Exception) else each for each in found]

    async def _do_group(self, branch: Branch, path: str, node: Node) -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in self._coroutines(branch, path, node)]
        branch.last = [task.result() for task in tasks]

    async def _do_later(self, branch: Branch, path: str, node: Node) -> None:
        """Start a task, do something else, and await it then."""
        task = asyncio.create_task(self._branch(branch, path, 0, node["task"]))
        try:
            await self.block(branch, f"{path}.meanwhile", node["meanwhile"])
        except (Exception, asyncio.CancelledError):
            await _settle([task])
            raise
        branch.last = [branch.last, await task]

    async def _do_race(self, branch: Branch, path: str, node: Node) -> None:
        """Wait for the first of some branches, and cancel the others."""
        tasks = [asyncio.create_task(each) for each in self._coroutines(branch, path, node)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            done = [number for number, task in enumerate(tasks) if task.done()]
            self._saw(branch, path, "won", str(done))
        finally:
            await _settle(tasks)
        branch.last = [_outcome(tasks[number]) for number in done]

    async def _do_arrivals(self, branch: Branch, path: str, node: Node) -> None:
        """Take results as they are completed, and cancel the rest when there are enough."""
        tasks = [
            asyncio.create_task(self._numbered(branch, path, number, each))
            for number, each in enumerate(node["branches"])
        ]
        found: list[Any] = []
        try:
            for future in asyncio.as_completed(tasks):
                number, value = await future
                self._saw(branch, path, "arrived", str(number))
                found.append([number, value])
                if len(found) == node["take"]:
                    break
        finally:
            await _settle(tasks)
        branch.last = found

    async def _numbered(
        self, branch: Branch, path: str, number: int, nodes: list[Node]
    ) -> tuple[int, Any]:
        try:
            return number, await self._branch(branch, path, number, nodes)
        except Exception as error:  # noqa: BLE001 - the program's own errors
            return number, show_error(error)

    async def _do_timeout(self, branch: Branch, path: str, node: Node) -> None:
        seconds = SHORT if node["fires"] else LONG / 2
        try:
            async with asyncio.timeout(seconds):
                await self.block(branch, f"{path}.body", node["body"])
        except TimeoutError as error:
            self._saw(branch, path, "timeout", type(error).__name__)
            raise

    async def _do_split(self, branch: Branch, path: str, node: Node) -> None:
        """Catch a part of an exception group."""
        caught: Any = tuple(ERRORS[name] for name in node["catch"])
        try:
            await self.block(branch, f"{path}.body", node["body"])
        except* caught as group:
            self._saw(branch, path, "caught", show_error(group))
            await self.block(branch, f"{path}.handler", node["handler"])

    async def _do_cancel(self, branch: Branch, path: str, node: Node) -> None:
        """Cancel a branch that waits, perhaps twice in a row, and await its clean-up."""
        task = asyncio.create_task(self._cleaning(branch, path, node))
        try:
            await self.block(branch, f"{path}.meanwhile", node["meanwhile"])
            for _ in range(node["times"]):
                task.cancel()
                for _ in range(node["turns"]):
                    await asyncio.sleep(0)
            await asyncio.wait([task])
        finally:
            await _settle([task])
        self._saw(branch, path, "cancelled", str(task.cancelled()))
        branch.last = None if task.cancelled() else _outcome(task)

    async def _cleaning(self, parent: Branch, path: str, node: Node) -> Any:
        own = self.branch(f"{parent.key}{path}#0", copy.deepcopy(parent.last))
        try:
            await self.block(own, ".waits", node["task"])
        finally:
            await self.block(own, ".clean", node["finally"])
        return own.last

    async def _do_shield(self, branch: Branch, path: str, node: Node) -> None:
        """Cancel a task that awaits a shielded one; the shielded one continues."""
        task = asyncio.create_task(self._branch(branch, path, 0, node["task"]))

        async def wait() -> Any:
            return await asyncio.shield(task)

        waiting = asyncio.create_task(wait())
        try:
            await self.block(branch, f"{path}.meanwhile", node["meanwhile"])
            waiting.cancel()
            await asyncio.wait([waiting])
            await asyncio.wait([task])
        finally:
            await _settle([waiting, task])
        branch.last = [branch.last, _outcome(task)]

    async def _do_lock(self, branch: Branch, path: str, node: Node) -> None:
        """Execute branches one at a time, in the order in which they asked for the lock."""
        lock = asyncio.Lock() if node["most"] == 1 else asyncio.Semaphore(node["most"])

        async def one(number: int, nodes: list[Node]) -> Any:
            async with lock:
                self._saw(branch, path, "entered", str(number))
                return await self._numbered(branch, path, number, nodes)

        tasks = [asyncio.create_task(one(*each)) for each in enumerate(node["branches"])]
        try:
            branch.last = await asyncio.gather(*tasks)
        finally:
            await _settle(tasks)

    async def _do_queue(self, branch: Branch, path: str, node: Node) -> None:
        """Let branches put their values into a queue, and take them out."""
        queue: asyncio.Queue[Any] = asyncio.Queue(node["most"])

        async def put(number: int, nodes: list[Node]) -> None:
            await queue.put(await self._numbered(branch, path, number, nodes))

        tasks = [asyncio.create_task(put(*each)) for each in enumerate(node["branches"])]
        found: list[Any] = []
        try:
            for turn in range(len(tasks)):
                number, value = await queue.get()
                self._saw(branch, path, "taken", str(number))
                found.append([number, value])
                branch.last = value
                await self.block(branch, f"{path}.turn{turn}", node["body"])
        finally:
            await _settle(tasks)
        branch.last = found


async def _settle(tasks: list[asyncio.Task[Any]], *, cancel: bool = True) -> None:
    """Let tasks end, or cancel them, and retrieve the errors that the program does not ask for."""
    for task in tasks if cancel else ():
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()


def _outcome(task: asyncio.Task[Any]) -> Any:
    error = task.exception()
    return task.result() if error is None else show_error(error)


# --- one life -------------------------------------------------------------------------------------


async def live(folder: Path, options: dict[str, Any]) -> int:
    """Run the program, or resume it, and write its result; return the exit code."""
    sabotage.break_on_purpose(options["sabotage"])
    warnings.simplefilter("error", ImpureWorkflowWarning)  # programs are pure
    if options["kind"] == "eager":
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined]
    ledger = Ledger(folder, options)
    spec = json.loads((folder / "spec.json").read_text())
    _count_commits(ledger)
    with open_hive(folder) as hive:
        program = Interpreter(hive, spec, ledger, options)
        if options["worker"]:
            _note_releases(ledger)
            work = _work(hive)
        else:
            work = hive.run(program.main, KINDS[spec["input"]](7), run_id=RUN)
        try:
            shown = f"returned {show(await until_signal(work, 'stopped'))}"
        except KeyboardInterrupt:
            return STOPPED["SIGINT"]
        except SystemExit as stop:
            return int(str(stop.code))
        except RunCancelledError:
            shown = "cancelled"
        except MaestroError as error:
            shown = show_error(error)
        ledger.write("result", "run", shown=shown, commits=ledger.commits)
    return 0


def _count_commits(ledger: Ledger) -> None:
    write = Store.write

    def counted(self: Store, *args: Any) -> Any:
        found = write(self, *args)
        ledger.committed()
        return found

    Store.write = counted  # type: ignore[method-assign, assignment]


async def _work(hive: Hive) -> Any:
    """Be a worker until the run has ended."""
    async with hive.worker(grace=0.0, release_after=_RELEASE_SECONDS):
        return await hive.handle(RUN).result()


def _note_releases(ledger: Ledger) -> None:
    """Write when a run is released, before its workflow notices."""
    stop = Driver.stop

    async def noted(self: Driver, release: Release, error: Exception | None = None) -> None:
        if self.run_id == RUN and not self.is_stopping and release.status == "waiting":
            ledger.release()
        await stop(self, release, error)

    Driver.stop = noted  # type: ignore[method-assign]
