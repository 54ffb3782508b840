"""A ``.mahabharatha`` save that is killed, or refused by the disk, at each of its calls.

Run as a program, this file is the victim: it forks a process for each call, which kills itself
there (``kill``) or has that call fail (``fail``), and prints what it found afterwards.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.kernel.errors import MaestroError
from maestro_hive.team.state import ExecutionState, TaskState, TaskStatus

if TYPE_CHECKING:
    from collections.abc import Callable

#: The calls that change something on the disk, and those that are made for it.
CALLS = ("open", "mkdir", "chmod", "fchmod", "write", "fsync", "rename", "unlink")
SAVED, REFUSED = 0, 3

Found = list[dict[str, Any]]


@pytest.mark.parametrize("launch", ["first", "later"])
def test_a_save_killed_at_any_call_leaves_the_old_state_or_the_new_one(
    tmp_path: Path, launch: str
) -> None:
    found = _run_program(tmp_path, "kill", launch)
    *killed, last = found
    assert [each["end"] for each in killed] == [-signal.SIGKILL] * len(killed)
    assert {each["call"] for each in killed} >= {"open", "write", "fsync", "rename", "close"}
    before = "none" if launch == "first" else "old"
    seen = [each["loaded"] for each in killed]
    assert seen == [before] * seen.count(before) + ["new"] * seen.count("new")
    assert min(seen.count(before), seen.count("new")) > 0
    assert sum(each["call"] == "write" for each in killed) >= 5  # in the middle of the text, too
    assert max(each["strays"] for each in killed) == 1
    assert all(each["strays_after_next_save"] <= 1 for each in killed)
    assert all(each["next"] == "next" for each in found)
    assert (last["end"], last["loaded"], last["strays"]) == (SAVED, "new", 0)


@pytest.mark.parametrize("launch", ["first", "later"])
def test_a_save_whose_disk_fails_at_any_call_is_an_error_of_ours(
    tmp_path: Path, launch: str
) -> None:
    found = _run_program(tmp_path, "fail", launch)
    *failed, last = found
    assert [each["end"] for each in failed] == [REFUSED] * len(failed)
    assert {each["loaded"] for each in failed} <= {"none", "old", "new"}
    assert all(each["next"] == "next" for each in found)
    assert max(each["strays"] for each in found) == 0
    assert (last["end"], last["loaded"]) == (SAVED, "new")


def _run_program(folder: Path, how: str, launch: str) -> Found:
    done = subprocess.run(
        [sys.executable, __file__, str(folder), how, launch],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    found: Found = json.loads(done.stdout)
    return found


# --- the victim --------------------------------------------------------------------------------


def _state(feature: str) -> ExecutionState:
    """A state in which every task tells which state it belongs to."""
    made = ExecutionState.create(feature)
    for number in range(8):
        made.tasks[f"T{number}"] = TaskState(f"T{number}", TaskStatus.RUNNING, error=feature)
    return made


def _loaded(path: Path) -> str:
    state = ExecutionState.load(path)
    if state is None:
        return "none"
    assert {task.error for task in state.tasks.values()} == {state.feature}
    return state.feature


def _strays(folder: Path) -> int:
    return sum(each.name != "state.json" for each in folder.iterdir()) if folder.exists() else 0


def _break_at(number: int, how: str, log: int) -> None:
    """Let the ``number``-th of the calls be the last one, or fail."""
    calls = 0

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                real_write(log, name.encode())
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(errno.EIO, "Input/output error")
            if name == "write":  # half of it at a time: there is a middle to be killed in
                args = (args[0], args[1][: (len(args[1]) + 1) // 2])
            return real(*args, **options)

        return wrapped

    real_write = os.write
    for name in (*CALLS, "close") if how == "kill" else CALLS:
        setattr(os, name, wrap(name, getattr(os, name)))


def _try(path: Path, number: int, how: str) -> tuple[int, str]:
    """Save in a process of its own; return how that ended, and at which call."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        end = 1
        try:
            _break_at(number, how, writer)
            NEW.save(path)
            end = SAVED
        except MaestroError:
            end = REFUSED
        finally:
            os._exit(end)
    os.close(writer)
    _, status = os.waitpid(pid, 0)
    with os.fdopen(reader) as log:
        return os.waitstatus_to_exitcode(status), log.read()


def _main(root: Path, how: str, launch: str) -> None:
    found: Found = []
    for number in count(1):
        folder = root / "state"
        shutil.rmtree(folder, ignore_errors=True)
        path = folder / "deeper" / "state.json"
        if launch == "later":
            OLD.save(path)
        end, call = _try(path, number, how)
        each = {"end": end, "call": call, "loaded": _loaded(path), "strays": _strays(path.parent)}
        NEXT.save(path)
        each |= {"next": _loaded(path), "strays_after_next_save": _strays(path.parent)}
        found.append(each)
        if not call:
            break
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    OLD, NEW, NEXT = _state("old"), _state("new"), _state("next")
    _main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
