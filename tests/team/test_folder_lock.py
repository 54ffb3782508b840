"""One run at a time in a folder, whatever its tasks delete there, and whoever else executes that run."""

from __future__ import annotations

import shutil
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from maestro_hive.kernel.errors import ConfigurationError, FolderError
from maestro_hive.kernel.files import FolderLock
from maestro_hive.team.folder_lock import PATH, held_for
from tests.python_processes import PythonProcess

STORE = Path("/state")
_HOLDS = """
import sys
from pathlib import Path
from maestro_hive.team.folder_lock import held_for
with held_for(Path(sys.argv[1]), "first", Path("/state")):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_another_run_is_refused_and_the_message_names_the_one_that_is_executed(
    tmp_path: Path,
) -> None:
    link = tmp_path / "link"
    work = tmp_path / "work"
    work.mkdir()
    link.symlink_to(work)
    with PythonProcess(_HOLDS, work) as other:
        assert other.stdout.readline() == "held\n"
        for folder in (work, link):
            with (
                pytest.raises(ConfigurationError, match=r"run 'first' is .* 'maestro stop first'"),
                held_for(folder, "second", STORE),
            ):
                pass
        other.kill()
        other.wait()
    with held_for(work, "second", STORE):
        assert (work / PATH).read_text() == f"second\n{STORE}"


def test_a_folder_is_held_although_a_task_deletes_what_is_in_it(tmp_path: Path) -> None:
    with held_for(tmp_path, "first", STORE):
        shutil.rmtree(tmp_path / PATH.parent)  # as "git clean -fdx" does
        with (
            pytest.raises(ConfigurationError, match=r"another run is executed in .*'maestro stop'"),
            held_for(tmp_path, "second", STORE),
        ):
            pass


def test_who_takes_a_run_over_holds_the_folder_when_the_first_process_has_ended(
    tmp_path: Path,
) -> None:
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(held_for(tmp_path, "r", STORE))
        second.enter_context(held_for(tmp_path, "r", STORE))
        first.close()
        with pytest.raises(ConfigurationError, match="run 'r' is executed in"):
            first.enter_context(held_for(tmp_path, "other", STORE))
        second.close()
        first.enter_context(held_for(tmp_path, "other", STORE))


def test_the_last_run_is_refused_while_another_one_is_about_to_hold_the_folder(
    tmp_path: Path,
) -> None:
    with held_for(tmp_path, "last", STORE):
        pass
    with closing(FolderLock(tmp_path)) as lock:
        assert lock.try_acquire()  # and has not written yet whose it is
        with pytest.raises(ConfigurationError), held_for(tmp_path, "last", STORE):
            pass


def test_a_folder_that_cannot_be_locked_itself_is_held_by_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(lock: FolderLock) -> bool:
        raise FolderError(lock.path, "cannot be locked: bad file descriptor")

    monkeypatch.setattr(FolderLock, "try_acquire", refused)  # as on network file systems
    with held_for(tmp_path, "first", STORE):
        with (
            pytest.raises(ConfigurationError, match="run 'first' is executed in"),
            held_for(tmp_path, "second", STORE),
        ):
            pass
        with held_for(tmp_path, "first", STORE):
            pass
    with held_for(tmp_path, "second", STORE):
        pass


def test_a_run_of_the_same_name_in_another_state_folder_is_another_run(tmp_path: Path) -> None:
    other = "of the state folder /state .* 'maestro stop r --store /state'"
    with (
        held_for(tmp_path, "r", STORE),
        pytest.raises(ConfigurationError, match=other),
        held_for(tmp_path, "r", Path("/other")),
    ):
        pass
