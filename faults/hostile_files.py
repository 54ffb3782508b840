"""Row 10: hostile files are refused, quickly and with our error.

``python -m faults.hostile_files files FOLDER`` offers every hostile file at every entry point, that
is, wherever a file is read; ``fuzz:SEED:SECONDS`` offers mutants of good files. Both print a line of
JSON for each, measured in this process, whose memory is limited.
"""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faults import hostile_texts
from faults.registry import Outcome, Plan, row
from faults.scenarios import RUN, checkpoint, config_in, manager, save
from faults.strace import ROOT
from maestro_hive.kernel.errors import MaestroError
from maestro_hive.maestro.state.checkpoint import CheckpointManager
from maestro_hive.maestro.state.state_manager import StateManager
from maestro_hive.team.state import ExecutionState
from maestro_hive.unified_execution.state_persistence import StatePersistence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_MOST_SECONDS, _MOST_BYTES = 1.0, 100 << 20


@row(
    10,
    "hostile files are refused",
    "≥ 150 files and a fuzzer: only our errors, ≤ 1 s and ≤ 100 MB each",
)
def hostile_files(plan: Plan, outcome: Outcome) -> None:
    """Offer each hostile file at each entry point, in a process whose time and memory are measured."""
    before = outcome.failed
    reports = _readings(plan, "files", 240)
    slowest = max((each["seconds"] for each in reports), default=0.0)
    largest = max((each["grown"] for each in reports), default=0)
    for each in reports:
        what = f"{each['file']} as {each['entry_point']}"
        outcome.require(each["end"] != "raw", f"{what}: {each['error']}")
        outcome.require(each["end"] != "accepted", f"{what}: it was accepted")
        outcome.require(each["seconds"] <= _MOST_SECONDS, f"{what}: {each['seconds']:.1f} s")
        outcome.require(each["grown"] <= _MOST_BYTES, f"{what}: {each['grown'] >> 20} MB")
    outcome.ran.append(f"{len(reports)} hostile files at 4 entry points")
    outcome.require(len(reports) >= 150, f"only {len(reports)} files were tried")
    outcome.measured.append(
        f"{outcome.failed - before} wrong; slowest {slowest:.2f} s; most memory {largest >> 20} MB"
    )
    _fuzz(plan, outcome)
    _mutate_copies(plan, outcome)


def _mutate_copies(plan: Plan, outcome: Outcome) -> None:
    """Offer structural mutants of runs, with valid digests, to everything that reads a run."""
    count = plan.amount(quick=300, full=2000)
    plan.show(f"{count} mutants of exports, checkpoints and copies")
    line = [sys.executable, "-m", "faults.hostile_copies", "--json"]
    done = subprocess.run(
        [*line, "--count", str(count), "--seed", str(plan.seed)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60 + count,
    )
    found = json.loads(done.stdout)
    for wrong in found["wrong"]:
        outcome.fail(wrong)
    outcome.ran.append(f"{found['tried']:,} mutants of runs with valid digests")
    outcome.require(found["accepted"] > found["tried"] // 20, "nearly all mutants were refused")
    outcome.measured.append(
        f"{found['refused']:,} refused, {found['accepted']:,} accepted, {len(found['wrong'])} wrong,"
        f" slowest call {found['slowest']:.2f} s, most memory {found['largest'] >> 20} MB"
    )


def _fuzz(plan: Plan, outcome: Outcome) -> None:
    seconds = plan.amount(quick=20, full=600)
    plan.show(f"fuzzing for {seconds} s")
    (report,) = _readings(plan, f"fuzz:{plan.seed}:{seconds}", seconds + 240)
    for error in report["errors"]:
        outcome.fail(f"fuzzer: {error}")
    outcome.ran.append(f"a seeded mutation fuzzer for {seconds} s")
    outcome.measured.append(
        f"{report['tried']:,} mutants, {len(report['errors'])} raw errors,"
        f" slowest {report['slowest']:.2f} s"
    )
    outcome.require(report["slowest"] <= _MOST_SECONDS, "a mutant took more than 1 s")


def _readings(plan: Plan, work: str, seconds: float) -> list[dict[str, Any]]:
    folder: Path = plan.scratch / work.partition(":")[0]
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "faults.hostile_files", work, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
    )
    if done.returncode:
        raise RuntimeError(f"the reader ended with {done.returncode}: {done.stderr[-500:]}")
    return [json.loads(line) for line in done.stdout.splitlines()]


_MEMORY = 2 << 30
_NEWEST = "000009.00000099~never~hostile.json"


class EntryPoint:
    """One place where files are read: a good folder, the file that is replaced, and the reader."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.root = root / name
        self.good = b""
        self.path, self.read = _OPENERS[name](self)

    def offer(self, place: Callable[[Path], object]) -> tuple[str, str]:
        """Write a hostile file and read it; return how that ended, and the error."""
        if self.path.is_dir() and not self.path.is_symlink():
            shutil.rmtree(self.path)
        self.path.unlink(missing_ok=True)
        place(self.path)
        try:
            accepted = self.read()
        except MaestroError as error:
            return "refused", f"{type(error).__name__}: {error}"[:200]
        except BaseException as error:  # noqa: BLE001 - raw errors are what is tested for
            kind = type(error).__name__
            expected = self.name == "team_state" and kind == "ValidationError"  # jsonschema's own
            return ("refused" if expected else "raw"), f"{kind}: {error}"[:400]
        return ("accepted" if accepted else "refused"), ""


# --- the entry points --------------------------------------------------------------------------


def _checkpoint_entry(entry: EntryPoint) -> tuple[Path, Callable[[], bool]]:
    path = _run_folder(entry) / "checkpoints" / RUN / _NEWEST
    (good,) = path.parent.glob("*cp-2.json")
    entry.good = good.read_bytes().replace(b'"checkpoint_id":"cp-2"', b'"checkpoint_id":"hostile"')
    return path, lambda: _resumes_from(entry, "hostile") or _reads_one(entry)


def _state_entry(entry: EntryPoint) -> tuple[Path, Callable[[], bool]]:
    path = _run_folder(entry) / "state" / "runs" / RUN / "execution_state.json"
    entry.good = path.read_bytes()
    return path, lambda: _resumes_from(entry, "execution_state")


def _values_entry(entry: EntryPoint) -> tuple[Path, Callable[[], bool]]:
    for _ in manager(entry.root, count=2):
        pass
    path = entry.root / "checkpoints" / "all-of-it.json"
    entry.good = path.read_bytes()
    values = StateManager(persistence_dir=entry.root)
    return path, lambda: values.restore("all-of-it")


def _team_entry(entry: EntryPoint) -> tuple[Path, Callable[[], bool]]:
    for _ in save(entry.root, count=1):
        pass
    path = entry.root / ".mahabharatha" / "state.json"
    entry.good = path.read_bytes()
    return path, lambda: ExecutionState.load(path) is not None


def _run_folder(entry: EntryPoint) -> Path:
    """Create a run with two checkpoints, and delete its journal."""
    for _ in checkpoint(entry.root, count=2):
        pass
    _delete_journal(entry.root)
    return entry.root


def _delete_journal(folder: Path) -> None:
    for path in (folder / "state").glob("journal*"):
        path.unlink()


def _resumes_from(entry: EntryPoint, source: str) -> bool:
    _delete_journal(entry.root)
    state = StatePersistence(config_in(entry.root), RUN)
    try:
        return state.restored is not None and source in state.restored.source
    finally:
        state.shutdown()


def _reads_one(entry: EntryPoint) -> bool:
    checkpoints = CheckpointManager(entry.root / "checkpoints")
    checkpoints.list_checkpoints(RUN)
    return False


_OPENERS: dict[str, Callable[[EntryPoint], tuple[Path, Callable[[], bool]]]] = {
    "checkpoint": _checkpoint_entry,
    "execution_state": _state_entry,
    "state_manager_checkpoint": _values_entry,
    "team_state": _team_entry,
}


# --- what is offered ---------------------------------------------------------------------------


def texts_for(entry: EntryPoint) -> Iterator[tuple[str, bytes]]:
    """Yield every hostile text for one entry point."""
    yield from hostile_texts.plain()
    kind = entry.name
    if kind == "team_state":
        good: dict[str, object] = json.loads(entry.good)
        for name, value in hostile_texts.odd_values():
            yield (
                f"{name} as tasks",
                json.dumps({**good, "tasks": "@@"}).encode().replace(b'"@@"', value),
            )
        return
    yield from hostile_texts.heads(kind)
    members = json.loads(entry.good)["document"]
    small = hostile_texts.altered({k: members[k] for k in members.keys() - _OWN}, kind)
    yield from (each for number, each in enumerate(small) if number % 11 == 0)
    if kind in {"checkpoint", "execution_state"}:
        yield from hostile_texts.bad_differences(kind, RUN)


_OWN = {"format", "kind"}


def odd_files() -> Iterator[tuple[str, Callable[[Path], object]]]:
    """Yield things that are not a regular file, or a very large one."""
    yield "a folder", lambda path: path.mkdir()
    yield "a fifo", os.mkfifo
    yield "a link to a device", lambda path: path.symlink_to("/dev/zero")
    yield "a link to a secret", lambda path: path.symlink_to("/etc/passwd")
    yield "a link to itself", lambda path: path.symlink_to(path)
    yield "a link to nothing", lambda path: path.symlink_to(path.with_name("nothing"))
    yield "300 MB of nothing", lambda path: _sparse(path, 300 << 20)
    yield "90 MB of nothing", lambda path: _sparse(path, 90 << 20)
    yield "10 TB of nothing", lambda path: _sparse(path, 10 << 40)


def _sparse(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


def _offerings(entry: EntryPoint) -> Iterator[tuple[str, Callable[[Path], object]]]:
    yield from odd_files()
    for name, text in texts_for(entry):
        yield name, lambda path, text=text: path.write_bytes(text)  # type: ignore[misc]


def _offer_all(folder: Path) -> None:
    for kind in _OPENERS:
        entry = EntryPoint(kind, folder)
        for name, place in _offerings(entry):
            before = _reset_peak()
            started = time.process_time()  # a busy machine is no fault of theirs
            end, error = entry.offer(place)
            report = {
                "file": name,
                "entry_point": kind,
                "end": _expected(kind, name, end),
                "error": error,
                "seconds": time.process_time() - started,
                "grown": max(0, _peak() - before),
            }
            print(json.dumps(report), flush=True)


#: Files that may be accepted: what is wrong in them is never read back.
_HARMLESS = {"a link to nothing"}


def _expected(entry: str, name: str, end: str) -> str:
    if end != "accepted":
        return end
    if entry == "team_state":
        return "harmless" if name in _HARMLESS else end
    return "harmless" if " at " in name or name in _HARMLESS else end


def _reset_peak() -> int:
    """Reset the peak memory, and return its value."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _peak()


def _peak() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


# --- the fuzzer --------------------------------------------------------------------------------


def _offer_mutants(folder: Path, seed: int, seconds: float) -> None:
    rng = random.Random(seed)
    entries = [EntryPoint(kind, folder) for kind in _OPENERS]
    tried, slowest = 0, 0.0
    errors: list[str] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and len(errors) < 20:
        entry = rng.choice(entries)
        mutant = mutate(entry, rng)
        started = time.process_time()
        end, error = entry.offer(lambda path, mutant=mutant: path.write_bytes(mutant))  # type: ignore[misc]
        slowest = max(slowest, time.process_time() - started)
        tried += 1
        if end == "raw":
            errors.append(f"{entry.name}: {error}: {mutant[:300]!r}")
    print(json.dumps({"tried": tried, "slowest": slowest, "errors": errors}))


_SCRAPS = (b"{", b"}", b"[", b"]", b'"', b",", b":", b"null", b"-1", b"1e999", b'"$"', b"\\u0000")


def mutate(entry: EntryPoint, rng: random.Random) -> bytes:
    """Return the good text of an entry point with a few changes, mostly with a valid digest."""
    text = bytearray(entry.good)
    digested = entry.name != "team_state" and rng.random() < 0.9
    if digested:
        text = text[len(b'{"document":') : text.rfind(b',"sha256":"')]
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(text) + 1)
        length = rng.choice((0, 1, 1, 4, 30))
        text[at : at + length] = rng.choice(
            (rng.randbytes(1), rng.choice(_SCRAPS), b"", bytes(text[:40]), b"9" * 20)
        )
    return hostile_texts.with_digest(bytes(text)) if digested else bytes(text)


def main(work: str, folder: Path) -> None:
    """Offer all files, or mutants for some seconds."""
    logging.getLogger("maestro_hive").addHandler(logging.NullHandler())
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    if work == "files":
        _offer_all(folder)
    else:
        _, seed, seconds = work.split(":")
        _offer_mutants(folder, int(seed), float(seconds))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
