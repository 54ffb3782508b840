"""Row 10, the copies: mutated runs with a valid SHA-256, through everything that reads a run.

``python -m faults.hostile_copies --count 2000 --seed 3`` mutates the runs of the golden
folder, which has everything that can be stored, as exports, checkpoints and ``execution_state.json``.
Each mutant is offered to what users call (``maestro import``, ``maestro checkpoints restore``, a
``Hive`` on a folder that has lost its journal), and then the folder is read and resumed. Only our
own errors may come of it, what was accepted can be shown, and other runs are not affected.
``--only 17`` repeats one mutation, and shows the traceback.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import io
import json
import logging
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from faults import mutations
from maestro_hive import StatePersistence, failure_of
from maestro_hive.admin.folder import reading
from maestro_hive.admin.transfer import export_run
from maestro_hive.cli import app
from maestro_hive.cli.command import Call
from maestro_hive.engine.config import ExecutionConfig, StateConfig
from maestro_hive.hive.runner import Runner
from maestro_hive.kernel.errors import MaestroError
from tests.golden import make, program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: The run that is mutated, and one next to it, which must not be affected; ids in every folder.
HOSTILE, GOOD = "hostile", "good"
MOST_SECONDS, MOST_BYTES = 1.0, 100 << 20
_MEMORY = 3 << 30
_CHECKPOINT = "000099.00000099~never~hostile.json"
#: Longer texts are mutated in places that do not matter.
_MOST_TEXT = 100_000
#: For how long a resumed run may wait.
_RESUME_SECONDS = 0.1
GOLDEN = Path(make.__file__).with_name("folder.tar.xz")


@dataclass(slots=True, kw_only=True)
class Tally:
    """What came of the mutants."""

    tried: int = 0
    accepted: int = 0
    refused: int = 0
    slowest: float = 0.0
    largest: int = 0
    #: One line for each promise that was broken.
    wrong: list[str] = field(default_factory=list)


class Samples:
    """Good runs as documents, and the folders in which mutants of them are read."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.template = scratch / "template"
        golden = make.unpack(GOLDEN, scratch / "golden")
        self.exports = dict(_exports(golden))
        self._make_template()

    def _make_template(self) -> None:
        """Make a folder with one good run, in its journal and as a copy."""
        self.template.mkdir(mode=0o700)
        text = next(text for text in self.exports.values() if _is_good(text))
        good = self.scratch / "good.json"
        good.write_bytes(_text(_state(GOOD, text)))
        _maestro("import", good, "--store", self.template)
        self.place_state(self.template, GOOD, good.read_bytes())

    def folder(self, *, journal: bool) -> Path:
        """Return a new folder, with a journal or without."""
        folder = self.scratch / "state"
        shutil.rmtree(folder, ignore_errors=True)
        ignored = None if journal else shutil.ignore_patterns("journal*", "holders")
        shutil.copytree(self.template, folder, ignore=ignored)
        return folder

    @staticmethod
    def place_state(folder: Path, run: str, text: bytes) -> None:
        """Write an ``execution_state.json``."""
        place = folder / "runs" / run
        place.mkdir(parents=True, mode=0o700)
        (place / "execution_state.json").write_bytes(text)

    @staticmethod
    def place_checkpoint(folder: Path, text: bytes) -> None:
        """Write a checkpoint."""
        place = folder / "checkpoints" / HOSTILE
        place.mkdir(parents=True, mode=0o700)
        (place / _CHECKPOINT).write_bytes(text)


def _exports(golden: Path) -> Iterator[tuple[str, bytes]]:
    with reading(golden) as reader:
        for record in reader.runs():
            text = export_run(reader, record.name, with_values=True).text
            if len(text) < _MOST_TEXT:
                yield record.name, text


# --- the places where copies are read ---------------------------------------------------------------


def _is_good(text: bytes) -> bool:
    """Return whether it is a run of ``called("good")`` that has succeeded."""
    entries = json.loads(text)["document"]["run"]["entries"]
    first, last = entries[0], entries[-1]
    return bool(
        first["kind"] == "run_started"
        and first["facts"]["workflow"] == "called"
        and first["value"] == {"args": [], "kwargs": {"name": "good"}}
        and last["kind"] == "run_ended"
    )


def _as(run_id: str, good: bytes) -> dict[str, Any]:
    run: dict[str, Any] = json.loads(good)["document"]["run"]
    return {**run, "workflow_id": run_id}


def _state(run_id: str, good: bytes) -> dict[str, Any]:
    return {"format": 1, "kind": "execution_state", "run": _as(run_id, good)}


def _through_import(samples: Samples, good: bytes, rng: random.Random) -> bool:
    """Import a mutated export; with ``--as``, and with the id that is in it."""
    text = mutations.mutant(_state(HOSTILE, good), "run", rng)
    folder, file = samples.folder(journal=True), samples.scratch / "mutant.json"
    file.write_bytes(text)
    if rng.random() < 0.3:
        _maestro("import", file, "--store", folder)  # its id may be another one
    refused = _maestro("import", file, "--as", HOSTILE, "--store", folder)
    accepted = not refused or "already" in refused
    _read_all(folder, shown=accepted)
    return accepted


def _through_state(samples: Samples, good: bytes, rng: random.Random) -> bool:
    """Open a folder that has only a mutated ``execution_state.json`` of the run."""
    folder = samples.folder(journal=False)
    samples.place_state(folder, HOSTILE, mutations.mutant(_state(HOSTILE, good), "run", rng))
    return _opened(folder)


def _through_checkpoint(samples: Samples, good: bytes, rng: random.Random) -> bool:
    """Open a folder that has only a mutated checkpoint of the run."""
    folder = samples.folder(journal=False)
    samples.place_checkpoint(folder, _checkpoint(good, rng))
    return _opened(folder)


def _through_restore(samples: Samples, good: bytes, rng: random.Random) -> bool:
    """Verify, show, compare and restore a mutated checkpoint."""
    folder = samples.folder(journal=True)
    samples.place_checkpoint(folder, _checkpoint(good, rng))
    store = ("--run", HOSTILE, "--store", folder)
    _maestro("checkpoints", "list", "--store", folder)
    _maestro("checkpoints", "verify", "--store", folder)
    damage = _maestro("checkpoints", "show", "hostile", *store)
    _maestro("checkpoints", "show", "hostile", *store, "--json")
    _maestro("checkpoints", "diff", "hostile", "hostile", *store)
    words = ("checkpoints", "restore", HOSTILE, "hostile", "--yes", "--store", folder)
    accepted = not _maestro(*words)
    _require(not (accepted and damage), f"it was restored, and is not shown: {damage}")
    _read_all(folder, shown=accepted)
    return accepted


_WAYS: tuple[Callable[[Samples, bytes, random.Random], bool], ...] = (
    *(_through_import, _through_import, _through_state),
    *(_through_checkpoint, _through_restore),
)


def _text(document: dict[str, Any]) -> bytes:
    return mutations.seal(document, random.Random(0))


def _checkpoint(good: bytes, rng: random.Random) -> bytes:
    document = {
        "checkpoint_id": "hostile",
        "created_at": "2030-01-01T00:00:00+00:00",
        "expires_at": None,
        "format": 1,
        "kind": "checkpoint",
        "state": _as(HOSTILE, good),
        "workflow_id": HOSTILE,
    }
    return mutations.mutant(document, "state", rng)


# --- reading and resuming ---------------------------------------------------------------------------


def _opened(folder: Path) -> bool:
    """Open the run by the class that restores it; then resume and read everything."""
    state = StateConfig(state_dir=str(folder), checkpoint_dir=str(folder / "checkpoints"))
    accepted = False
    with (
        contextlib.suppress(MaestroError),
        StatePersistence(ExecutionConfig(state=state), HOSTILE) as persistence,
    ):
        accepted = persistence.restored is not None
        _limited(persistence.state.to_dict)
        persistence.update_state(phase="resumed")
        persistence.checkpoint("again")
    _read_all(folder, shown=accepted)
    return accepted


def _read_all(folder: Path, *, shown: bool) -> None:
    """Read a folder as users do; what was accepted can be shown, and the good run always."""

    def require(*words: str) -> None:
        failed = _maestro(*words, "--store", folder)
        _require(not failed, f"'maestro {' '.join(words)}' fails: {failed}")

    if (folder / "journal.db").exists():
        require("runs")
        require("runs", "--json")
    if shown:
        for verb in ("show", "events"):
            require(verb, HOSTILE)
            require(verb, HOSTILE, "--json")
        for step in ("1", "2", "interrupted"):
            _maestro("show", HOSTILE, step, "--store", folder)
        require("export", HOSTILE, "-")
    _resume(folder)
    if shown:
        _maestro("answer", HOSTILE, "colour", "RED", "--store", folder)
        _maestro("fork", HOSTILE, "--as", "forked", "--store", folder)
        _maestro("retry", HOSTILE, "--store", folder)
        _resume(folder)
        _maestro("cancel", HOSTILE, "--store", folder)
        require("show", HOSTILE)
    require("runs")
    require("show", GOOD)


def _resume(folder: Path) -> None:
    """Resume the run and the good one, with the program that they are of."""

    async def both() -> None:
        asyncio.get_running_loop().set_exception_handler(_note_unhandled)
        hive = program.opened(folder)
        try:
            with contextlib.suppress(MaestroError, TimeoutError):
                async with asyncio.timeout(_RESUME_SECONDS):
                    await hive.resume(HOSTILE)
            with contextlib.suppress(MaestroError):
                async for _ in hive.events(HOSTILE, follow=False):
                    pass
                hive.questions(HOSTILE)
            await hive.run(program.called, "good", run_id=GOOD)
            hive.runs()
        finally:
            with contextlib.suppress(MaestroError):
                hive.close()

    with _noting_errors_of_ours():
        _limited(lambda: asyncio.run(both()))
    if _unhandled:
        raise _unhandled.pop()


#: Raw errors that a workflow got, or nobody.
_unhandled: list[BaseException] = []


def _note_unhandled(_: object, context: dict[str, Any]) -> None:
    error = context.get("exception")
    _unhandled.append(error or RuntimeError(str(context.get("message"))))


@contextlib.contextmanager
def _noting_errors_of_ours() -> Iterator[None]:
    """Note raw errors that our own code raises inside of a workflow: its failure would hide them."""
    _unhandled.clear()
    fail = Runner._fail  # noqa: SLF001 - where they would be recorded

    async def noting(*args: Any) -> None:
        error = args[2]
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        is_ours = "maestro_hive" in last and failure_of(error) is None
        if is_ours and not isinstance(error, MaestroError | _DURABLE):
            _unhandled.append(error)
        await fail(*args)

    Runner._fail = noting  # type: ignore[assignment, method-assign]  # noqa: SLF001 - as above
    try:
        yield
    finally:
        Runner._fail = fail  # type: ignore[method-assign]  # noqa: SLF001 - as above


#: What our code raises in a workflow by its promises.
_DURABLE = TimeoutError | asyncio.CancelledError


# --- calls, measured -------------------------------------------------------------------------------


class _Peaks:
    seconds = 0.0


def _limited(call: Callable[[], Any]) -> Any:
    """Make a call, and note how long it kept a processor busy."""
    started = time.process_time()
    try:
        return call()
    finally:
        _Peaks.seconds = max(_Peaks.seconds, time.process_time() - started)


def _maestro(*words: object) -> str:
    """Run a command line in this process; return the error that it ended with, empty if none."""

    def called() -> str:
        out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            try:
                app._called([str(word) for word in words], Call())  # noqa: SLF001 - raises
            except (MaestroError, click.ClickException) as error:
                return f"{type(error).__name__}: {error}"
            except click.exceptions.Exit:
                pass
        return ""

    return str(_limited(called))


def _require(truth: object, what: str) -> None:
    if not truth:
        raise AssertionError(what)


def _peak() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


def fuzz(samples: Samples, seed: int, numbers: range, *, debug: bool = False) -> Tally:
    """Offer mutants; each follows from the seed and its number alone."""
    tally = Tally()
    runs = sorted(samples.exports)
    for number in numbers:
        rng = random.Random(f"{seed}/{number}")
        run, way = rng.choice(runs), rng.choice(_WAYS)
        _Peaks.seconds = 0.0
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = _peak()
        what = f"mutation {number} of {run}, {way.__name__.strip('_').replace('_', ' ')}"
        try:
            accepted = way(samples, samples.exports[run], rng)
            tally.accepted += accepted
            tally.refused += not accepted
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - raw errors are what is looked for
            if debug:
                traceback.print_exc()
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(frame.filename).name}:{frame.lineno}"
            tally.wrong.append(f"{what}: {type(error).__name__} at {where}: {error}"[:400])
        grown = max(0, _peak() - before)
        if _Peaks.seconds > MOST_SECONDS or grown > MOST_BYTES:
            tally.wrong.append(f"{what}: {_Peaks.seconds:.2f} s, {grown >> 20} MB")
        tally.tried += 1
        tally.slowest = max(tally.slowest, _Peaks.seconds)
        tally.largest = max(tally.largest, grown)
    return tally


def main() -> int:
    """Fuzz, and print what was found as text or as a line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m faults.hostile_copies", description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=2030)
    parser.add_argument("--only", type=int, help="the number of one mutation to repeat")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.disable()
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    only = options.only
    numbers = range(options.count) if only is None else range(only, only + 1)
    scratch = Path(tempfile.mkdtemp(prefix="hostile-copies-"))
    try:
        tally = fuzz(Samples(scratch), options.seed, numbers, debug=only is not None)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if options.json:
        print(json.dumps(dataclasses.asdict(tally)))
        return 0
    for line in tally.wrong:
        print(line)
    print(
        f"{tally.tried} mutants: {tally.refused} refused, {tally.accepted} accepted,"
        f" {len(tally.wrong)} wrong; slowest call {tally.slowest:.2f} s,"
        f" most memory {tally.largest >> 20} MB"
    )
    return int(bool(tally.wrong))


if __name__ == "__main__":
    sys.exit(main())
