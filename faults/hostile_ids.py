"""Row 11: hostile ids, links and umasks: nothing is written outside the folder, all files are private."""

from __future__ import annotations

import os
import shutil
import stat
import unicodedata
from typing import TYPE_CHECKING

from faults.registry import Outcome, Plan, row
from faults.scenarios import RUN, SCENARIOS, config_in
from maestro_hive.kernel.errors import MaestroError
from maestro_hive.maestro.state.checkpoint import CheckpointManager, WorkflowState
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.state_manager import StateManager
from maestro_hive.unified_execution.state_persistence import StatePersistence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_ODD_CHARACTERS = "\0\n\r\t\v\f\x1b\x7f /\\|*?<>\"'`$;&%#!~^()[]{}=+,@"
_WORDS = (
    "",
    ".",
    "..",
    "...",
    ".hidden",
    "-rf",
    "--help",
    "~",
    "~root",
    "../up",
    "../../up",
    "a/../../up",
    "a/b",
    "a//b",
    "/etc/passwd",
    "//host/share",
    "\\\\host\\share",
    "C:\\up",
    "%2e%2e%2fup",
    "..%c0%afup",
    "....//up",
    "$(id)",
    "`id`",
    "${HOME}",
    "a\0/../../up",
    "up\n",
    "\nup",
    "con\0",
    "x" * 129,
    "x" * 255,
    "x" * 256,
    "x" * 4096,
    "é" * 100,
    "/" * 4096,
    "../" * 1300 + "up",
)
_TWINS = "Аа․．／∕⁄․․＼﹨﷐ＡａǅⅠ①·‥…\u200b\u200d\u202e\u2028\ufeff\u0301\ud800"  # noqa: RUF001


def hostile_ids() -> Iterator[str]:
    """Yield ids that must not become file names."""
    yield from _WORDS
    for character in _ODD_CHARACTERS:
        yield f"run{character}1"
        yield f"{character}up"
    for twin in _TWINS:
        yield f"run{twin}1"
    yield unicodedata.normalize("NFD", "é")


@row(
    11,
    "hostile ids and links stay inside the folder",
    "≥ 100 ids, 0 escapes; files 0600, folders 0700",
)
def ids(plan: Plan, outcome: Outcome) -> None:
    """Try the ids at every entry point, links at every path, and umask 000."""
    before = os.umask(0)
    try:
        _offer_ids(plan, outcome)
        _follow_links(plan, outcome)
        _check_modes(plan, outcome)
    finally:
        os.umask(before)


# --- ids ---------------------------------------------------------------------------------------


def _offer_ids(plan: Plan, outcome: Outcome) -> None:
    around = plan.scratch / "ids"
    folder = around / "deep" / "inside"
    folder.mkdir(parents=True)
    entry_points = _entry_points(folder)
    names = list(hostile_ids())
    accepted = escaped = 0
    for name in plan.track("ids", names, len(names)):
        for entry_point, use in entry_points.items():
            seen = _outside(around, folder)
            try:
                use(name)
            except MaestroError:
                pass
            except Exception as error:  # noqa: BLE001 - raw errors are what is tested for
                outcome.fail(f"{entry_point}: {name[:40]!r}: a raw {type(error).__name__}: {error}")
            else:
                # These generate an id when given an empty one.
                if name or entry_point not in {"StatePersistence", "StatePersistence.checkpoint"}:
                    accepted += 1
                    outcome.fail(f"{entry_point}: {name[:40]!r} was accepted")
            if _outside(around, folder) != seen:
                escaped += 1
                outcome.fail(f"{entry_point}: {name[:40]!r} wrote outside the folder")
    StateManager(persistence_dir=folder / "values").shutdown()
    outcome.ran.append(f"{len(names)} ids at {len(entry_points)} entry points")
    outcome.measured.append(f"{escaped} escapes, {accepted} accepted")


def _entry_points(folder: Path) -> dict[str, Callable[[str], object]]:
    values = StateManager(persistence_dir=folder / "values")
    checkpoints = CheckpointManager(folder / "checkpoints")
    config = config_in(folder)

    def persistence(name: str) -> None:
        StatePersistence(config, name).shutdown()

    def named_checkpoint(name: str) -> None:
        with StatePersistence(config, RUN) as state:
            state.checkpoint(name)

    def lease(name: str) -> None:
        store = SqliteStore(folder / "store")
        try:
            store.acquire_run(name)
        finally:
            store.close()

    return {
        "StatePersistence": persistence,
        "StatePersistence.checkpoint": named_checkpoint,
        "CheckpointManager.create": lambda name: checkpoints.create_checkpoint(
            name, WorkflowState(name)
        ),
        "CheckpointManager.latest": checkpoints.get_latest_checkpoint,
        "CheckpointManager.get": checkpoints.get_checkpoint,
        "CheckpointManager.delete": checkpoints.delete_checkpoint,
        "StateManager.checkpoint": values.checkpoint,
        "StateManager.restore": values.restore,
        "SqliteStore.acquire_run": lease,
    }


def _outside(around: Path, folder: Path) -> list[str]:
    """List what is around the folder, but not what is in it."""
    found = [str(path) for path in around.iterdir()]
    found += [str(path) for path in folder.parent.iterdir()]
    return sorted(found + [str(path) for path in folder.iterdir() if path.name.startswith("up")])


# --- links -------------------------------------------------------------------------------------


def _follow_links(plan: Plan, outcome: Outcome) -> None:
    """Links in place of our folders and files are refused or replaced, never followed."""
    tried = 0
    for name, links in _LINKS.items():
        for link in links:
            tried += 1
            folder = plan.scratch / f"links-{tried}"
            target = plan.scratch / f"target-{tried}"
            target.mkdir()
            (target / "file").write_bytes(b"mine")
            place = folder / link
            place.parent.mkdir(parents=True, mode=0o700)
            to_file = place.suffix or place.name.startswith("journal")
            place.symlink_to(target / "file" if to_file else target)
            try:
                for _ in SCENARIOS[name](folder):
                    pass
            except MaestroError:
                pass
            except Exception as error:  # noqa: BLE001 - raw errors are what is tested for
                outcome.fail(f"a link at {link}: a raw {type(error).__name__}: {error}")
            left = {path.name: path.read_bytes() for path in target.iterdir() if path.is_file()}
            unchanged = left == {"file": b"mine"} and len(list(target.iterdir())) == 1
            outcome.require(unchanged, f"{name} wrote through a link at {link}: {sorted(left)}")
            shutil.rmtree(folder)
            shutil.rmtree(target)
    outcome.ran.append(f"{tried} links in place of our files and folders")


_LINKS = {
    "steps": (
        "journal.db",
        "journal.lock",
        "journal.users",
        "journal.readers",
        "journal.turnstile",
        "journal.marks",
        "holders",
    ),
    "checkpoint": (
        "checkpoints/faulted",
        "state/runs",
        "state/runs/faulted",
        "state/runs/faulted/execution_state.json",
        "checkpoints/faulted/000001.00000001~never~cp-1.json",
    ),
    "manager": ("checkpoints", "checkpoints/all-of-it.json"),
    "save": (".mahabharatha/state.json",),
}


# --- file modes --------------------------------------------------------------------------------


def _check_modes(plan: Plan, outcome: Outcome) -> None:
    """Under umask 000 every file is 0600 and every folder 0700."""
    count = 0
    for name in ("steps", "checkpoint", "manager", "save"):
        folder = plan.scratch / f"modes-{name}" / "a" / "b"
        for _ in SCENARIOS[name](folder):
            count += _check_mode_of_all(folder.parent.parent, outcome)
        count += _check_mode_of_all(folder.parent.parent, outcome)
    outcome.measured.append(f"{count:,} checks of file modes under umask 000, all 0600 and 0700")


def _check_mode_of_all(root: Path, outcome: Outcome) -> int:
    for path in [root, *root.rglob("*")]:
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            continue
        wanted = 0o700 if stat.S_ISDIR(mode) else 0o600
        right = stat.S_IMODE(mode) == wanted
        outcome.require(right, f"{path.name} has the mode {stat.S_IMODE(mode):o}")
    return 1
