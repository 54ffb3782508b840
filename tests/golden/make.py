"""Makes a golden state folder: ``python -m tests.golden.make tests/golden/folder``.

That writes two files: ``folder.tar.xz``, the folder as the last process left it, which was killed,
and ``folder.json``, what ``maestro`` shows of it. README.md says when a new one is made.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import io
import json
import lzma
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from maestro_hive import (
    BudgetExceeded,
    CheckpointManager,
    Hive,
    PersonaExecutor,
    RunCancelledError,
    RunFailedError,
    SafetyRetryWrapper,
    StateManager,
    StatePersistence,
)
from maestro_hive.admin.folder import reading
from maestro_hive.admin.transfer import import_run
from maestro_hive.engine.breaker import CircuitBreaker
from maestro_hive.engine.config import RecoveryStrategy, StateConfig
from maestro_hive.engine.errors import CircuitBreakerOpen, HelpNeeded, UnrecoverableError
from maestro_hive.hive import runs
from maestro_hive.kernel import clock
from maestro_hive.maestro.state import tree_codec
from maestro_hive.maestro.state.checkpoint import StateMetadata, WorkflowState
from maestro_hive.maestro.state.records import EntryKind, NewDispatch
from maestro_hive.maestro.state.store import NewRun
from maestro_hive.maestro.state.stores import close_store, open_store
from tests.cli.processes import answer, maestro
from tests.golden import program

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maestro_hive.engine.escalation import EscalationCase
    from maestro_hive.maestro.state.store import Store

ROOT = Path(__file__).resolve().parents[2]
#: Stands in the folder instead of the names of the machine that it was made on.
HOST, BOOT = "golden-host", "golden-boot"
_CENTURY = 100 * 365 * 86_400.0
#: A run of a worker whose process was killed.
QUEUED_ACTIVE = "queued-active"
_MOST_BYTES = 100_000  # of the archive
_LIVES = ("first", "killed", "killed", "spending")
_KILLED = 9


# --- archives -------------------------------------------------------------------------------------


def pack(folder: Path, archive: Path) -> None:
    """Write a folder as an archive, the same for the same files."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for path in sorted(folder.rglob("*")):
            if path.name == "journal.db-shm":  # SQLite makes it from the log
                continue
            member = tarfile.TarInfo(str(path.relative_to(folder)))
            if path.is_dir():
                member.type, member.mode = tarfile.DIRTYPE, 0o700
                tar.addfile(member)
            else:
                data = path.read_bytes()
                member.size, member.mode = len(data), 0o600
                tar.addfile(member, io.BytesIO(data))
    archive.write_bytes(lzma.compress(packed.getvalue(), preset=9))


def unpack(archive: Path, folder: Path) -> Path:
    """Write the files of an archive, which only their owner may read."""
    folder.mkdir(mode=0o700)
    for name, data in _members(archive).items():
        path = folder / name
        if data is None:
            path.mkdir(mode=0o700)
        else:
            path.write_bytes(data)
            path.chmod(0o600)
    return folder


@functools.cache
def _members(archive: Path) -> dict[str, bytes | None]:
    """Return the files of an archive and, as None, its folders; many tests unpack the same one."""
    found: dict[str, bytes | None] = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            data = tar.extractfile(member)
            found[member.name] = None if data is None else data.read()
    return found


# --- what is in a folder ----------------------------------------------------------------------------


def stored_kinds(folder: Path) -> set[int]:
    """Return the kinds of all entries."""
    with reading(folder) as reader:
        return {entry.kind for run in reader.runs() for entry in reader.entries(run.id)}


def stored_tags(folder: Path) -> set[str]:
    """Return the tags of all values of entries."""
    found: set[bytes] = set()
    with reading(folder) as reader:
        for run in reader.runs():
            for entry in reader.entries(run.id):
                found.update(re.findall(rb'"\$":"(\w+)"', reader.load(entry) or b""))
    return {tag.decode() for tag in found}


def value_tags() -> set[str]:
    """Return the tags that this version reads."""
    return set(tree_codec._DECODERS)


def summary(folder: Path) -> dict[str, Any]:
    """Return what ``maestro`` shows of a folder, without what differs from one reading to the next."""
    runs = answer(maestro("runs", "--all", "--limit", "0", "--json", "--store", folder))["runs"]
    return {
        "format": answer(maestro("doctor", "--json", "--store", folder))["format"],
        "runs": {run["run_id"]: _run_summary(folder, run["run_id"]) for run in reversed(runs)},
        "breakers": {
            each["name"]: each["state"]
            for each in answer(maestro("breakers", "--json", "--store", folder))["breakers"]
        },
        **_dispatch_summary(folder),
        **_budget_summary(folder),
    }


def _dispatch_summary(folder: Path) -> dict[str, Any]:
    """Return the runs that belong to workers; nothing of a folder that has none."""
    with reading(folder) as reader:
        found = {
            row.run_id: [row.queue, row.priority, row.state.name, row.version, row.deaths]
            for row in reader.dispatches()
        }
    return {"dispatch": found} if found else {}


def _budget_summary(folder: Path) -> dict[str, Any]:
    """Return what was spent, without days and what lapses; nothing of a folder without any of it."""
    budgets = answer(maestro("budget", "--json", "--store", folder))["budgets"]
    names = ("tokens", "usd", "cached_tokens", "token_limit", "usd_limit")
    found = {
        f"{each['scope']} {each['name']}": [each[name] for name in names]
        for each in budgets
        if each["scope"] != "day"
    }
    limited = any(each["token_limit"] or each["usd_limit"] for each in budgets)
    return {"budgets": found} if limited else {}


def _run_summary(folder: Path, run_id: str) -> dict[str, Any]:
    run = answer(maestro("show", run_id, "--all", "--json", "--store", folder))["run"]
    events = maestro("events", run_id, "--json", "--store", folder)
    names = ("workflow", "status", "parent", "forked_from", "from_step", "reason", "result")
    shown = {name: run[name] for name in names if run[name] not in (None, "")}
    if len(json.dumps(run["result"])) > 400:
        del shown["result"]
    if run["error"] is not None:
        shown["error"] = {name: run["error"][name] for name in ("type", "message")}
    if run["waits_for"]:
        shown["waits_for"] = [each["name"] for each in run["waits_for"]]
    numbers = ("attempts", "failures", "interruptions", "tokens")
    shown["steps"] = [
        " ".join([step["label"], step["persona"], step["status"], *(str(step[n]) for n in numbers)])
        for step in run["steps"]
    ]
    shown["events"] = " ".join(json.loads(line)["event"] for line in events.stdout.splitlines())
    return shown


# --- the first life ---------------------------------------------------------------------------------


def hide_machine() -> None:
    """Have neutral names recorded instead of those of this machine, and relative paths."""
    socket.gethostname = lambda: HOST
    clock._system_boot_id = lambda: BOOT  # type: ignore[assignment]
    made: Any = traceback.FrameSummary.__init__

    def shortened(self: traceback.FrameSummary, filename: str, *args: Any, **rest: Any) -> None:
        for folder in (ROOT, Path(os.__file__).parent):
            filename = filename.removeprefix(f"{folder}/")
        made(self, filename, *args, **rest)

    traceback.FrameSummary.__init__ = shortened  # type: ignore[method-assign]


async def _stop() -> None:
    """Stop this process politely, as ``kill`` does."""
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(60)


async def _kill() -> None:
    """End this process as ``kill -9`` does."""
    os._exit(_KILLED)


def _is_told(hive: Hive, run_id: str) -> bool:
    """Return whether a run waits for a person, who was told where there is a way to."""
    return any(each.delivered or each.system is None for each in hive.escalations(run_id))


async def _until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what changes is in a journal
            await asyncio.sleep(0.005)


class FirstLife:
    """Makes everything but the run that is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self) -> None:
        """Make it."""
        with program.opened(self.folder) as hive:
            hive.run_sync(program.values, program.one_of_each(), run_id="values")
            hive.run_sync(program.sizes, [60, 70], 80, run_id="sizes")
            hive.run_sync(program.family, run_id="family")
            self._stopped(hive)
            asyncio.run(self._asked(hive))
            asyncio.run(self._cancelled(hive))
            self._forked(hive)
            self._failed(hive)
            self._ambiguous(hive)
            hive.run_sync(program.streamed, "one two", run_id="streamed")
            self._stop_in(hive, "streamed", program.streamed, "née €", run_id="streamed-stopped")
            self._budgeted(hive)
        self._changed()
        self._helped()
        asyncio.run(self._escalated())
        asyncio.run(self._executed())
        self._restarted()
        self._shared()
        self._queued()

    def _budgeted(self, hive: Hive) -> None:
        """A run that a budget has stopped, and one that went on when its budget was raised."""
        hive.budget.set_limit("$100", persona="spender")
        for run_id in ("paid-bankrupt", "paid-raised"):
            with contextlib.suppress(BudgetExceeded):
                hive.run_sync(program.paid, 3, run_id=run_id, budget=100)
                raise AssertionError("its budget is enough")
        hive.budget.raise_limit(100, run="paid-raised")
        hive.run_sync(program.paid, 3, run_id="paid-raised", budget=100)

    def _stopped(self, hive: Hive) -> None:
        """Finish a run of ``work``; stop one of it, and one of ``errors``, in the middle of a step."""
        hive.run_sync(program.work, run_id="work")
        self._stop_in(hive, "count", program.work, "ants", until=4, run_id="work-stopped")
        self._stop_in(hive, "errors", program.errors, run_id="errors")

    def _stop_in(self, hive: Hive, name: str, *call: Any, **rest: Any) -> None:
        program.interruptions[name] = _stop
        with contextlib.suppress(SystemExit):
            hive.run_sync(*call, **rest)
            raise AssertionError(f"it was not stopped in {name}")
        del program.interruptions[name]

    async def _asked(self, hive: Hive) -> None:
        """Leave two runs with an open question; to one of them there is an answer, not taken yet."""
        for run_id in ("ask-waiting", "ask-answered"):
            running = asyncio.create_task(hive.run(program.ask, run_id, run_id=run_id))
            for name in ("colour", "approve"):
                await _until(lambda name=name, run_id=run_id: self._asks(hive, run_id, name))
                if name == "colour":
                    hive.answer(run_id, name, program.Colour.RED, by="ada")
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
        hive.answer("ask-answered", "approve", True, by="ada")

    def _asks(self, hive: Hive, run_id: str, name: str) -> bool:
        known = {run.run_id for run in hive.runs()}
        return run_id in known and name in {each.name for each in hive.questions(run_id)}

    async def _cancelled(self, hive: Hive) -> None:
        """Cancel two runs; the second one is left while it cleans up."""
        program.interruptions["tidied cancelling"] = lambda: asyncio.sleep(60)
        for run_id in ("cancelled", "cancelling"):
            running = asyncio.create_task(hive.run(program.tidied, run_id, run_id=run_id))
            await _until(lambda run_id=run_id: f"wait_long {run_id}" in program.calls)
            assert hive.cancel(run_id, "enough")
            await _until(lambda run_id=run_id: f"interrupted tidied {run_id}" in program.calls)
            if run_id == "cancelling":
                running.cancel()
            with contextlib.suppress(RunCancelledError, asyncio.CancelledError):
                await running
        program.interruptions.clear()

    def _forked(self, hive: Hive) -> None:
        """Fork a run: to be resumed, pending, and cancelled before it is."""
        new = {"new_run_id": "work-forked"}
        hive.fork("work", from_step="Writer.draft", until=6, **new)
        asyncio.run(hive.resume("work-forked"))
        hive.fork("work", from_step="number#5", new_run_id="work-pending")
        hive.fork("work", new_run_id="work-dropped")
        exported = maestro(
            "export", "work-stopped", "-", "--with-values", "--store", self.folder
        ).stdout.encode()
        import_run(self.folder, exported, "a file", run_id="work-imported")
        assert hive.cancel("work-dropped", "not needed")

    def _failed(self, hive: Hive) -> None:
        """Let a run fail, and another one fail and be retried."""
        for run_id in ("released-failed", "released-retried"):
            program.down.add(run_id)
            with contextlib.suppress(RunFailedError):
                hive.run_sync(program.released, run_id, run_id=run_id)
        program.down.clear()
        hive.retry("released-retried", "release")
        asyncio.run(hive.resume("released-retried"))

    def _ambiguous(self, hive: Hive) -> None:
        """Leave a run that asks whether a step had its effect, and one where it was resolved."""
        for run_id in ("bought-asked", "bought-resolved"):
            self._stop_in(hive, run_id, program.bought, run_id, run_id=run_id)
            with contextlib.suppress(HelpNeeded):
                asyncio.run(hive.resume(run_id))
                raise AssertionError("it is ambiguous")
        hive.resolve("bought-resolved", "pay", completed=program.Part("by hand", 2), by="ada")
        asyncio.run(hive.resume("bought-resolved"))

    def _changed(self) -> None:
        """Start a run, and resume it with changed code."""
        with Hive(self.folder, program.config()) as old:
            old._known(program.changed_before)
            self._stop_in(old, "changed", program.changed_before, run_id="changed")
        with program.opened(self.folder) as hive:
            asyncio.run(hive.resume("changed"))

    def _helped(self) -> None:
        """Runs with a healer, and with a step that is skipped."""

        def heal(report: Any) -> Any:
            if program.calls.count("release released-healed") < 3:
                raise RuntimeError("not now")
            program.down.clear()
            fix = {"healer": "wait until it is up"}
            return SimpleNamespace(status="FIXED", feedback="it is up again", fix=fix)

        healer = SimpleNamespace(heal_single=heal)
        skip = program.config(recovery_strategy=RecoveryStrategy.SKIP)
        hives: dict[str, dict[str, Any]] = {
            "released-healed": {"healing_engine": healer},
            "released-skipped": {"config": skip},
        }
        for run_id, helpers in hives.items():
            program.down.add(run_id)
            with program.opened(self.folder, **helpers) as hive, contextlib.suppress(HelpNeeded):
                hive.run_sync(program.released, run_id, run_id=run_id)
            program.down.clear()

    async def _escalated(self) -> None:
        """Runs whose step waits for a person; one was told of, and one has its answer."""

        async def escalate(case: EscalationCase) -> str:
            return "MD-1"

        helpers: dict[str, Any] = {"escalation": SimpleNamespace(escalate=escalate)}
        for run_id in ("shipped-escalated", "shipped-answered"):
            given = helpers if run_id == "shipped-escalated" else {}
            with program.opened(self.folder, **given) as hive:
                running = asyncio.create_task(hive.run(program.shipped, run_id, run_id=run_id))
                await _until(lambda hive=hive, run_id=run_id: _is_told(hive, run_id))
                running.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await running
        with program.opened(self.folder) as hive:
            (waiting,) = hive.escalations("shipped-answered")
            hive.answer_escalation(waiting.id, "use the mirror", by="ada")

    # --- the classes of executors ---

    def _config(self) -> Any:
        config = program.config()
        config.state = StateConfig(state_dir=str(self.folder))
        return config

    async def _executed(self) -> None:
        """A run of executors, with fields, tasks, and a checkpoint that it went back to."""
        with StatePersistence(self._config(), "executor") as state:
            state.update_state(phase="building", step=2, status="running", metrics={"lines": 120})
            state.mark_task_pending("compile")
            state.mark_task_pending("test")
            state.mark_task_completed("compile", {"binary": "a.out", "rows": program.rows(60)})
            state.increment_retry("builder")
            state.update_persona_state("builder", {"mood": "good", "part": program.Part("a")})
            state.checkpoint("golden-1")
            state.update_state(phase="lost", status="failed")
            assert state.restore("golden-1")
            with PersonaExecutor(self._config(), "builder", state_persistence=state) as executor:
                await executor.execute(program.builds, "build", program.Part("wall"))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # such a call is not known by its input
                    await executor.execute(program.takes_anything, "take", object(), 1)
                    await executor.execute(program.takes_anything, "take", object(), 1)
                with contextlib.suppress(UnrecoverableError):
                    await executor.execute(program.never_works, "break", 1)
                again = executor.options(force=True)
                await again.execute(program.builds, "build", program.Part("wall"))
                await self._wrapped(executor)
            state.state.metrics["lines"] = 130  # recorded with the checkpoint
            state.checkpoint("golden-2")

    async def _wrapped(self, executor: PersonaExecutor) -> None:
        async def escalate(case: EscalationCase) -> str:
            return "MD-2"

        escalation = SimpleNamespace(escalate=escalate)
        wrapper = SafetyRetryWrapper(self._config(), workflow_id="executor", escalation=escalation)
        with wrapper, contextlib.suppress(HelpNeeded):
            await wrapper.execute_safe(executor.execute, program.never_works, "help", 2)

    def _restarted(self) -> None:
        """A run that was started again: what it had recorded no longer counts."""
        with StatePersistence(self._config(), "restarted") as state:
            state.update_state(phase="first", status="failed")
        with StatePersistence(self._config(), "restarted", auto_restore=False) as state:
            state.update_state(phase="second", status="success")

    def _shared(self) -> None:
        """Values and a checkpoint of a StateManager, checkpoints that expire, and breakers."""
        manager = StateManager(self.folder, auto_persist=True)
        manager.set_state("each", program.one_of_each(), "golden")
        manager.set_state("rows", program.rows(60))
        manager.update_state("count", lambda count: (count or 0) + 1)
        manager.update_state("count", lambda count: (count or 0) + 1)
        manager.set_state("deleted", 1)
        manager.delete_state("deleted")
        manager.checkpoint("golden", {"why": program.Colour.RED})
        store = manager.store
        CircuitBreaker(1, _CENTURY, name="provider", store=store).record_failure()
        rated = CircuitBreaker(9, name="rated", store=store, failure_rate=0.5, window=4)
        rated.record_failure()
        rated.record_success()
        manager.shutdown()
        saved = WorkflowState(
            workflow_id="notes",
            phase="writing",
            data={"part": program.Part("a")},
            metadata=StateMetadata(custom={"created_by": "ada", "colour": "red"}),
        )
        checkpoints = CheckpointManager(self.folder / "checkpoints")
        checkpoints.create_checkpoint("notes", saved, ttl=_CENTURY)
        with program.opened(self.folder) as hive, contextlib.suppress(CircuitBreakerOpen):
            hive.run_sync(program.released, "refused", run_id="released-refused")
            raise AssertionError("the breaker is open")

    def _queued(self) -> None:
        """Runs that belong to workers, and wait for what such a run can wait for."""
        dues = {"queued-ready": 0.0, "queued-later": _CENTURY, "queued-held": None}
        dispatches = {
            name: NewDispatch(queue="golden", priority=len(name), due=due, version="v1")
            for name, due in dues.items()
        } | {QUEUED_ACTIVE: NewDispatch()}
        with _opened_store(self.folder) as store:
            store.create_runs([_new_run(*each) for each in dispatches.items()])


@contextlib.contextmanager
def _opened_store(folder: Path) -> Iterator[Store]:
    store = open_store(folder)
    try:
        yield store
    finally:
        close_store(store)


def _new_run(name: str, dispatch: NewDispatch) -> NewRun:
    given = runs.make_input("released", (), {"name": name}, ("name",))
    return NewRun(name, "released", [runs.started(given)], "pending", dispatch)


def killed_life(folder: Path) -> None:
    """Start or resume a run with large values, and kill this process in a step of its child.

    It has taken a run as a worker does.
    """
    program.interruptions["sizes"] = _kill
    with program.opened(folder) as hive, _opened_store(folder) as store:
        store.claim_runs(queue="default", workflows={"released"})
        hive.run_sync(program.sizes, [2760, 2780], 2800, run_id="sizes-killed")


def spending_life(folder: Path) -> None:
    """Kill this process in a step that has reserved a part of a budget, and spent some of it."""
    program.interruptions["charge"] = _kill
    with program.opened(folder) as hive:
        hive.run_sync(program.paid, 2, run_id="paid-killed")


# --- making it ------------------------------------------------------------------------------------


def live(life: str, folder: Path) -> None:
    """Execute one of the lives in this process."""
    hide_machine()
    if life == "first":
        FirstLife(folder).make()
    elif life == "spending":
        spending_life(folder)
    else:
        killed_life(folder)


def make(folder: Path) -> None:
    """Make a state folder: each life is a process of its own."""
    for life in _LIVES:
        command = [sys.executable, "-m", "tests.golden.make", "--life", life, str(folder)]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        assert code == (0 if life == "first" else _KILLED), f"the life {life!r} ended with {code}"


def check(folder: Path) -> None:
    """Raise if something is missing, or stands in there that names this machine."""
    missing = [kind.name for kind in EntryKind if kind not in stored_kinds(folder)]
    assert not missing, f"there is no entry of the kinds {missing}"
    assert stored_tags(folder) >= value_tags(), value_tags() - stored_tags(folder)
    names = {str(ROOT), str(Path.home()), socket.gethostname(), clock._system_boot_id()}
    for path, name in _named(folder, names):
        raise AssertionError(f"{name} stands in {path}")


def _named(folder: Path, names: set[str]) -> Iterator[tuple[Path, str]]:
    for path in folder.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            yield from ((path, name) for name in names if name.encode() in data)


def main() -> None:
    """Make a golden folder, or execute one of the lives in it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--life", choices=_LIVES)
    parser.add_argument("target", type=Path)
    given = parser.parse_args()
    if given.life:
        live(given.life, given.target)
        return
    archive, shown = (
        given.target.with_name(given.target.name + end) for end in (".tar.xz", ".json")
    )
    if archive.exists():
        sys.exit(f"{archive} exists, and a golden folder is not made again: see README.md")
    place = Path(tempfile.gettempdir(), "golden")  # recorded, where a run goes back to a checkpoint
    place.mkdir(mode=0o700)
    try:
        make(place / "state")
        pack(place / "state", archive)
        unpacked = unpack(archive, place / "unpacked")
        check(unpacked)
        text = json.dumps(summary(unpacked), indent=1, ensure_ascii=False)
        shown.write_text(f"{text}\n", encoding="utf-8")
    finally:
        shutil.rmtree(place)
    size = archive.stat().st_size
    assert size < _MOST_BYTES, f"it has {size:,} bytes"
    print(f"{archive}: {size:,} bytes")  # noqa: T201 - for who made it


if __name__ == "__main__":
    main()
