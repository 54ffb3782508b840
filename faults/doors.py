"""The doors through which files come in, and what each makes of a hostile one.

``python -m faults.doors files FOLDER`` offers every hostile file; ``fuzz:SEED:SECONDS`` offers
mutants of good ones. Both print a line of JSON for each, measured in this process, whose memory
is limited.
"""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from faults import hostile_texts
from faults.scenarios import RUN, checkpoint, config_in, manager, save
from maestro_hive.kernel.errors import MaestroError
from maestro_hive.maestro.state.checkpoint import CheckpointManager
from maestro_hive.maestro.state.state_manager import StateManager
from maestro_hive.team.state import ExecutionState
from maestro_hive.unified_execution.state_persistence import StatePersistence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MEMORY = 2 << 30
_NEWEST = "000009.00000099~never~hostile.json"


class Door:
    """One way in: a good folder, the file that is replaced, and how it is read."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.root = root / name
        self.good = b""
        self.path, self.read = _OPENERS[name](self)

    def offer(self, place: Callable[[Path], object]) -> tuple[str, str]:
        """Put a hostile file in place and read; return how that ended, and the error."""
        if self.path.is_dir() and not self.path.is_symlink():
            shutil.rmtree(self.path)
        self.path.unlink(missing_ok=True)
        place(self.path)
        try:
            taken = self.read()
        except MaestroError as error:
            return "refused", f"{type(error).__name__}: {error}"[:200]
        except BaseException as error:  # noqa: BLE001 - that is what is looked for
            kind = type(error).__name__
            expected = self.name == "team_state" and kind == "ValidationError"  # jsonschema's own
            return ("refused" if expected else "raw"), f"{kind}: {error}"[:400]
        return ("taken" if taken else "refused"), ""


# --- the doors ---------------------------------------------------------------------------------


def _checkpoint_door(door: Door) -> tuple[Path, Callable[[], bool]]:
    path = _run_folder(door) / "checkpoints" / RUN / _NEWEST
    (good,) = path.parent.glob("*cp-2.json")
    door.good = good.read_bytes().replace(b'"checkpoint_id":"cp-2"', b'"checkpoint_id":"hostile"')
    return path, lambda: _resumes_from(door, "hostile") or _reads_one(door)


def _state_door(door: Door) -> tuple[Path, Callable[[], bool]]:
    path = _run_folder(door) / "state" / "runs" / RUN / "execution_state.json"
    door.good = path.read_bytes()
    return path, lambda: _resumes_from(door, "execution_state")


def _values_door(door: Door) -> tuple[Path, Callable[[], bool]]:
    for _ in manager(door.root, count=2):
        pass
    path = door.root / "checkpoints" / "all-of-it.json"
    door.good = path.read_bytes()
    values = StateManager(persistence_dir=door.root)
    return path, lambda: values.restore("all-of-it")


def _team_door(door: Door) -> tuple[Path, Callable[[], bool]]:
    for _ in save(door.root, count=1):
        pass
    path = door.root / ".mahabharatha" / "state.json"
    door.good = path.read_bytes()
    return path, lambda: ExecutionState.load(path) is not None


def _run_folder(door: Door) -> Path:
    """Make a run with two checkpoints, and take its journal away."""
    for _ in checkpoint(door.root, count=2):
        pass
    _forget_journal(door.root)
    return door.root


def _forget_journal(folder: Path) -> None:
    for path in (folder / "state").glob("journal*"):
        path.unlink()


def _resumes_from(door: Door, source: str) -> bool:
    _forget_journal(door.root)
    state = StatePersistence(config_in(door.root), RUN)
    try:
        return state.restored is not None and source in state.restored.source
    finally:
        state.shutdown()


def _reads_one(door: Door) -> bool:
    checkpoints = CheckpointManager(door.root / "checkpoints")
    checkpoints.list_checkpoints(RUN)
    return False


_OPENERS: dict[str, Callable[[Door], tuple[Path, Callable[[], bool]]]] = {
    "checkpoint": _checkpoint_door,
    "execution_state": _state_door,
    "state_manager_checkpoint": _values_door,
    "team_state": _team_door,
}


# --- what is offered ---------------------------------------------------------------------------


def texts_for(door: Door) -> Iterator[tuple[str, bytes]]:
    """Yield every hostile text for one door."""
    yield from hostile_texts.plain()
    kind = door.name
    if kind == "team_state":
        good: dict[str, object] = json.loads(door.good)
        for name, value in hostile_texts.odd_values():
            yield (
                f"{name} as tasks",
                json.dumps({**good, "tasks": "@@"}).encode().replace(b'"@@"', value),
            )
        return
    yield from hostile_texts.heads(kind)
    members = json.loads(door.good)["document"]
    small = hostile_texts.spoiled({k: members[k] for k in members.keys() - _OWN}, kind)
    yield from (each for number, each in enumerate(small) if number % 11 == 0)
    if kind in {"checkpoint", "execution_state"}:
        yield from hostile_texts.bad_differences(kind, RUN)


_OWN = {"format", "kind"}


def odd_files() -> Iterator[tuple[str, Callable[[Path], object]]]:
    """Yield things that are no regular file, or a huge one."""
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


def _offerings(door: Door) -> Iterator[tuple[str, Callable[[Path], object]]]:
    yield from odd_files()
    for name, text in texts_for(door):
        yield name, lambda path, text=text: path.write_bytes(text)  # type: ignore[misc]


def _offer_all(folder: Path) -> None:
    for kind in _OPENERS:
        door = Door(kind, folder)
        for name, place in _offerings(door):
            before = _reset_peak()
            started = time.perf_counter()
            end, error = door.offer(place)
            report = {
                "file": name,
                "door": kind,
                "end": _expected(kind, name, end),
                "error": error,
                "seconds": time.perf_counter() - started,
                "grown": max(0, _peak() - before),
            }
            print(json.dumps(report), flush=True)


#: Odd, and yet nothing is wrong with them where they stand: members that nobody reads back.
_HARMLESS = {"a link to nothing"}


def _expected(door: str, name: str, end: str) -> str:
    if end != "taken":
        return end
    if door == "team_state":
        return "harmless" if name in _HARMLESS else end
    return "harmless" if " at " in name or name in _HARMLESS else end


def _reset_peak() -> int:
    """Start measuring the largest size anew, and return what it is now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _peak()


def _peak() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


# --- the fuzzer --------------------------------------------------------------------------------


def _fuzz(folder: Path, seed: int, seconds: float) -> None:
    chance = random.Random(seed)
    doors = [Door(kind, folder) for kind in _OPENERS]
    tried, slowest = 0, 0.0
    errors: list[str] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and len(errors) < 20:
        door = chance.choice(doors)
        mutant = mutate(door, chance)
        started = time.perf_counter()
        end, error = door.offer(lambda path, mutant=mutant: path.write_bytes(mutant))  # type: ignore[misc]
        slowest = max(slowest, time.perf_counter() - started)
        tried += 1
        if end == "raw":
            errors.append(f"{door.name}: {error}: {mutant[:300]!r}")
    print(json.dumps({"tried": tried, "slowest": slowest, "errors": errors}))


_SCRAPS = (b"{", b"}", b"[", b"]", b'"', b",", b":", b"null", b"-1", b"1e999", b'"$"', b"\\u0000")


def mutate(door: Door, chance: random.Random) -> bytes:
    """Return the good text of a door with a few things changed, sealed again in most cases."""
    text = bytearray(door.good)
    sealed = door.name != "team_state" and chance.random() < 0.9
    if sealed:
        text = text[len(b'{"document":') : text.rfind(b',"sha256":"')]
    for _ in range(chance.randrange(1, 5)):
        at = chance.randrange(len(text) + 1)
        length = chance.choice((0, 1, 1, 4, 30))
        text[at : at + length] = chance.choice(
            (chance.randbytes(1), chance.choice(_SCRAPS), b"", bytes(text[:40]), b"9" * 20)
        )
    return hostile_texts.sealed(bytes(text)) if sealed else bytes(text)


def main(work: str, folder: Path) -> None:
    """Do one kind of work."""
    logging.getLogger("maestro_hive").addHandler(logging.NullHandler())
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    if work == "files":
        _offer_all(folder)
    else:
        _, seed, seconds = work.split(":")
        _fuzz(folder, int(seed), float(seconds))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
