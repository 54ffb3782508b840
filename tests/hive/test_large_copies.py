"""Runs with more results than fit into memory at once: what is written can be read.

The limit of a document is one rule for both sides; everything here is over the limit for a single
value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from maestro_hive.admin.transfer import export_run, import_run
from maestro_hive.engine.config import StateConfig
from maestro_hive.engine.copies import KIND, RunCopies
from maestro_hive.engine.open_run import open_run
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import DocumentCorruptError, StorageError
from maestro_hive.maestro.state import codec, run_document
from maestro_hive.maestro.state.records import EntryKind, NewEntry
from tests.hive.test_copies import lose_journal
from tests.python_processes import run_python

if TYPE_CHECKING:
    from pathlib import Path

    from maestro_hive.engine.open_run import OpenRun

#: Every limit of 256 MiB in this process becomes a tenth of it, whatever it is called.
_SMALLER_LIMITS = """
import sys
from types import FunctionType

def smaller(value):
    return value // 10 if type(value) is int and 256 << 20 <= value < 512 << 20 else value

for module in [each for name, each in sys.modules.items() if name.startswith("maestro_hive.")]:
    for name, value in list(vars(module).items()):
        setattr(module, name, smaller(value))
        if isinstance(value, FunctionType) and value.__defaults__:
            value.__defaults__ = tuple(map(smaller, value.__defaults__))
"""

_PROGRAM = """
import resource, sys
from pathlib import Path
from maestro_hive import Hive
from maestro_hive.engine.copies import copier
hive = Hive(Path(sys.argv[1]))

@hive.step
async def make(number: int) -> str:
    print("called", number)
    return chr(97 + number) * 2_700_000

@hive.workflow
async def build() -> list[int]:
    return [len(await make(number)) for number in range(10)]

def megabytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

before = megabytes()
with hive:
    print(hive.run_sync(build, run_id="large"))
    copier().flush(hive._open(), 100)
print("MB", megabytes() - before)
"""


def test_a_run_with_more_results_than_the_limit_resumes_from_its_copy(tmp_path: Path) -> None:
    """With 270 MB it is the same, and takes much longer."""
    folder = tmp_path / "state"
    first = run_python(_SMALLER_LIMITS + _PROGRAM, folder)
    assert first.stdout.count("called") == 10, first.stderr
    copy = folder / "runs" / "large" / "execution_state.json"
    assert copy.stat().st_size > codec.MAX_BYTES // 10
    lose_journal(folder)
    again = run_python(_SMALLER_LIMITS + _PROGRAM, folder)
    assert "called" not in again.stdout
    assert "[2700000, " in again.stdout
    megabytes = int(again.stdout.split()[-1])
    assert megabytes < 85  # about 70; with all results in memory once more, over 90


# --- the limit --------------------------------------------------------------------------------------


def opened(folder: Path, results: int) -> OpenRun:
    run = open_run(config_in(folder), "r")
    run.load()
    for step in range(1, results + 1):
        facts = codec.dump_canonical({"name": "work", "persona": ""})
        value = codec.encode(f"{step} " * 2000)
        started = NewEntry(EntryKind.ATTEMPT_STARTED, step, 1, facts)
        run.append([started, NewEntry(EntryKind.STEP_COMPLETED, step, 1, value=value)])
    return run


def results_of(run: OpenRun) -> list[bytes | None]:
    return [each.completed and run.store.load(each.completed) for each in run.state.steps.values()]


def config_in(folder: Path) -> StateConfig:
    return StateConfig(state_dir=str(folder), checkpoint_dir=str(folder / "checkpoints"))


def test_a_copy_over_the_limit_is_not_written_and_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = opened(tmp_path / "state", 3)
    with run.copying():  # or the thread would write one in the middle of this
        run.write_copy()
        path = run.copies.path
        assert path is not None
        before = path.read_bytes()
        monkeypatch.setattr(run_document, "MAX_DOCUMENT_BYTES", len(before) - 1)
        with pytest.raises(StorageError, match=r"could not be read again.*'maestro backup'"):
            run.write_copy()
        assert path.read_bytes() == before
        assert [each.name for each in path.parent.iterdir()] == [path.name]
        with pytest.raises(DocumentCorruptError, match="the limit is"):
            run_document.unseal(before, KIND, "it", lazy=True)
        monkeypatch.setattr(run_document, "MAX_DOCUMENT_BYTES", len(before))
        run.write_copy()
    assert RunCopies(config_in(tmp_path / "state"), "r", run.store.clock).newest() is not None
    run.close()


def test_checkpoints_and_exports_are_read_in_parts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that has a run is read as a whole: the limit for that is below their size here."""
    run = opened(tmp_path / "state", 5)
    run.copies.checkpoints.write("r", "saved", run.as_document(), fence=run.fence)
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 1000)
    monkeypatch.setattr("maestro_hive.maestro.state.strict_json.MAX_BYTES", 12_000)
    found = run.copies.checkpoint("saved")
    assert len(found.entries) == 10
    exported = export_run(run.store, "r", with_values=True)
    assert exported.size > 20_000
    import_run(tmp_path / "other", exported.text, "a file")
    there = open_run(config_in(tmp_path / "other"), "r")
    there.load()
    assert results_of(there) == results_of(run)
    there.close()
    run.close()


def test_a_run_that_is_purged_while_it_is_copied_is_an_error(tmp_path: Path) -> None:
    run = opened(tmp_path / "state", 600)
    chunks = iter(run.as_document())
    for _ in range(2):
        next(chunks)
    store = run.store
    store.release_run(run.lease)
    store.purge_runs(["r"])
    with pytest.raises(StorageError, match="was purged while it was copied"):
        list(chunks)
    run.close(released=True)
