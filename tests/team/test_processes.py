"""Process groups do not outlive their engine: it is killed, and so is its guard."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from faults.team_kills import guards_of, is_alive
from maestro_hive.kernel.clock import SystemClock
from maestro_hive.kernel.process import DaemonThreads, PerProcess
from maestro_hive.team import processes
from maestro_hive.team.errors import CommandFailedError
from maestro_hive.team.processes import SHELL, Ended, _Group, _Guard, execute
from maestro_hive.team.survivors import Survivors
from tests.python_processes import PythonProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

_SECONDS = 60.0
#: More than the number of any process.
_NO_PROCESS = 2**22 + 1

_ENGINE = textwrap.dedent("""
    import asyncio, os, sys
    from pathlib import Path
    from maestro_hive.team.processes import SHELL, execute
    from maestro_hive.team.survivors import Survivors

    folder = Path(sys.argv[1])

    async def main():
        asyncio.get_running_loop().call_later(0.1, forked)
        await execute(
            [SHELL, "-c", sys.argv[2]],
            folder=folder,
            environment={**os.environ, "MAESTRO_RUN_ID": "r"},
            survivors=Survivors(folder / "processes", "r"),
            write=print,
        )

    def forked():
        if len(sys.argv) > 3 and not os.fork():  # a child that outlives the engine
            (folder / "child").write_text(str(os.getpid()))
            os.execvp("sleep", ["sleep", "60"])

    asyncio.run(main())
""")


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def number_in(path: Path) -> int:
    wait_until(lambda: path.exists() and path.read_text().strip())
    return int(path.read_text())


@pytest.fixture
def ended_later() -> Iterator[list[int]]:
    pids: list[int] = []
    yield pids
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("forks", [(), ("forks",)])
def test_a_group_dies_with_an_engine_that_is_killed(
    tmp_path: Path, ended_later: list[int], forks: tuple[str, ...]
) -> None:
    does = "trap '' TERM HUP; sleep 100 & echo $! > pid; wait"
    with PythonProcess(_ENGINE, tmp_path, does, *forks) as engine:
        pid = number_in(tmp_path / "pid")
        ended_later.append(pid)
        if forks:
            ended_later.append(number_in(tmp_path / "child"))
        engine.kill()
    wait_until(lambda: not is_alive(pid))


@pytest.mark.parametrize("leader", ["stays", "ends"])
def test_the_next_start_ends_what_outlived_engine_and_guard(
    tmp_path: Path, ended_later: list[int], leader: str
) -> None:
    does = "sleep 100 & echo $! > pid; wait"
    with PythonProcess(_ENGINE, tmp_path, does) as engine:
        pid = number_in(tmp_path / "pid")
        ended_later.append(pid)
        wait_until(lambda: guards_of(engine.pid))
        for guard in guards_of(engine.pid):
            os.kill(guard, signal.SIGKILL)
        engine.kill()
    (record,) = (tmp_path / "processes").iterdir()
    if leader == "ends":
        os.kill(int(record.name), signal.SIGKILL)
        wait_until(lambda: not is_alive(int(record.name)))
    assert is_alive(pid)
    assert Survivors(tmp_path / "processes", "r").end() == 1
    assert not is_alive(pid)
    assert not list((tmp_path / "processes").iterdir())


def test_the_next_start_ends_programs_that_have_cleared_their_environment(
    tmp_path: Path, ended_later: list[int]
) -> None:
    does = "env -i sleep 100 & echo $! > pid; exec env -i sleep 100"
    environment = {**os.environ, "MAESTRO_RUN_ID": "r"}
    leader = subprocess.Popen(
        [SHELL, "-c", does], cwd=tmp_path, env=environment, start_new_session=True
    )
    pid = number_in(tmp_path / "pid")
    ended_later.extend([pid, leader.pid])
    Survivors(tmp_path / "processes", "r").add(leader.pid)
    wait_until(lambda: all(b"MAESTRO" not in environment_of(each) for each in (pid, leader.pid)))
    assert Survivors(tmp_path / "processes", "r").end() == 1
    assert (is_alive(pid), leader.wait(_SECONDS)) == (False, -signal.SIGKILL)


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def start_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def test_a_number_that_is_another_process_now_is_left_alone(tmp_path: Path) -> None:
    survivors = Survivors(tmp_path, "r")
    other = subprocess.Popen(
        ["sleep", "100"], start_new_session=True, env={**os.environ, "MAESTRO_RUN_ID": "r"}
    )
    try:
        for text in (f"{SystemClock().boot_id()} 1\n", f"another-boot {start_of(other.pid)}\n", ""):
            (tmp_path / str(other.pid)).write_text(text)
            assert survivors.end() == 0
            assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_an_engine_that_dies_before_the_gate_opens_executes_nothing(tmp_path: Path) -> None:
    behind = subprocess.Popen(
        [SHELL, "-c", 'read -r _ && exec "$@"', "sh", "touch", "executed"],
        stdin=subprocess.PIPE,
        cwd=tmp_path,
    )
    assert behind.stdin is not None
    behind.stdin.close()
    assert behind.wait(_SECONDS) != 0
    assert not (tmp_path / "executed").exists()


def called(folder: Path, *arguments: str, text: str = "") -> tuple[Ended, list[str]]:
    written: list[str] = []
    survivors = Survivors(folder / "processes", "r")
    work = execute(
        arguments,
        folder=folder,
        environment=dict(os.environ),
        survivors=survivors,
        text=text,
        write=written.append,
    )
    return asyncio.run(work), written


def test_a_command_gets_a_long_text_and_gives_long_lines_in_pieces(tmp_path: Path) -> None:
    text = "é" * 300_000
    ended, written = called(tmp_path, "cat", text=text)
    assert ended.code == 0
    assert "".join(written) == text
    assert max(map(len, written)) <= 8_000
    assert ended.tail == f"…{'é' * 1_500}"


def test_what_a_command_leaves_behind_is_ended_with_it(tmp_path: Path) -> None:
    ended, _ = called(tmp_path, SHELL, "-c", "sleep 100 & echo $! > pid", text="not read")
    assert ended.code == 0
    pid = number_in(tmp_path / "pid")
    wait_until(lambda: not is_alive(pid))
    assert not list((tmp_path / "processes").iterdir())


def test_a_command_that_a_signal_ended_says_so(tmp_path: Path) -> None:
    ended, _ = called(tmp_path, SHELL, "-c", "kill -9 $$")
    assert (ended.code, str(ended)) == (-9, "was ended by SIGKILL")


def test_a_folder_that_is_gone_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(CommandFailedError, match="gone"):
        asyncio.run(
            execute(
                ["true"],
                folder=tmp_path / "gone",
                environment={},
                survivors=Survivors(tmp_path, "r"),
                write=print,
            )
        )


def test_an_output_that_cannot_be_stored_fails_the_command_after_its_end(tmp_path: Path) -> None:
    def full(_: str) -> None:
        raise OSError("no space left")

    work = execute(
        [SHELL, "-c", "seq 100000; touch ended"],
        folder=tmp_path,
        environment=dict(os.environ),
        survivors=Survivors(tmp_path / "processes", "r"),
        write=full,
    )
    with pytest.raises(OSError, match="no space left"):
        asyncio.run(work)
    assert (tmp_path / "ended").exists()
    assert not list((tmp_path / "processes").iterdir())


def test_a_command_has_its_grace_although_its_caller_is_cancelled_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", _SECONDS)  # a busy machine is slow
    # As a stop of a run does: it cancels the call, the branch it stands in, and their group.
    does = (
        "trap 'touch stopping; while ! test -f go; do sleep 0.01; done; touch saved; exit 0' TERM"
    )
    work = execute(
        [SHELL, "-c", f"{does}; touch started; while :; do sleep 0.01; done"],
        folder=tmp_path,
        environment=dict(os.environ),
        survivors=Survivors(tmp_path / "processes", "r"),
        write=print,
    )

    async def until(name: str) -> None:
        async with asyncio.timeout(_SECONDS):
            is_there = False
            while not is_there:
                await asyncio.sleep(0.01)
                is_there = (tmp_path / name).exists()

    async def main() -> None:
        task = asyncio.create_task(work)
        await until("started")
        task.cancel()
        await until("stopping")
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        (tmp_path / "go").touch()
        await asyncio.wait({task})
        assert task.cancelled()

    asyncio.run(main())
    assert (tmp_path / "saved").exists()
    assert not list((tmp_path / "processes").iterdir())


@pytest.mark.parametrize("refused", ["the guard", 0, 1, 2])
def test_a_command_that_cannot_be_attended_is_not_started_and_nobody_kills_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str | int
) -> None:
    started: list[_Group] = []

    class Remembered(_Group):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            started.append(self)

    monkeypatch.setattr(processes, "_Group", Remembered)
    if refused == "the guard":
        monkeypatch.setattr(processes, "_guard", PerProcess(NoGuard))
    else:
        monkeypatch.setattr(processes, "threads", FewThreads(int(refused)))
    with pytest.raises((OSError, RuntimeError), match="no more"):
        called(tmp_path, "touch", str(tmp_path / "executed"))
    (group,) = started
    assert group.pid not in processes._guard()._groups
    assert not is_alive(group.pid)
    assert not list((tmp_path / "processes").iterdir())
    assert not (tmp_path / "executed").exists()


class NoGuard(_Guard):
    """A guard that the system has no process for."""

    def _started(self) -> int:
        raise OSError("no more processes")


class FewThreads(DaemonThreads):
    """So many threads, and no more."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._left = count

    def run(self, function: Callable[[], Any]) -> Future[Any]:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("no more threads")
        return super().run(function)


def test_a_guard_that_cannot_be_started_again_leaves_other_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: object) -> int:
        raise OSError("no more processes")

    guard = processes._Guard()
    reading, guard._pipe = os.pipe()
    os.close(reading)  # as if the guard was killed
    with monkeypatch.context() as patch:
        patch.setattr(processes._Guard, "_started", refused)
        with pytest.raises(OSError, match="no more processes"):
            guard.add(_NO_PROCESS)
    with (tmp_path / "a").open("wb") as one, (tmp_path / "b").open("wb") as other:
        guard.remove(_NO_PROCESS)  # one of them has the number that the pipe had
        assert (os.fstat(one.fileno()).st_size, os.fstat(other.fileno()).st_size) == (0, 0)
    guard.close_inherited()


def test_an_exit_code_that_other_code_took_is_no_success(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(CommandFailedError, match="how the command ended is not known"):
            called(tmp_path, SHELL, "-c", "exit 1")
    finally:
        signal.signal(signal.SIGCHLD, before)


#: Leaves a process outside of its group that holds its output, and does this.
_LEAVES = """
import os, pathlib, time
pid = pathlib.Path("pid")
print("from the group", flush=True)  # before the other one writes: lines in the pipe could mix
if os.fork():
    while not pid.exists():
        time.sleep(0.01)
    os._exit(0)
os.setsid()
pathlib.Path("new").write_text(str(os.getpid()))
os.rename("new", pid)
"""
_SAYS_LATE = """
while not pathlib.Path("go").exists():
    time.sleep(0.01)
os.write(1, b"late\\n")
pathlib.Path("said").touch()
time.sleep(100)
"""
_SAYS_MORE = """
while True:
    os.write(1, b"more\\n" * 1000)
"""


def test_output_that_another_process_holds_takes_nothing_from_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended_later: list[int]
) -> None:
    monkeypatch.setattr(processes, "_OUTPUT_SECONDS", 0.1)
    _, written = called(tmp_path, sys.executable, "-c", _LEAVES + _SAYS_LATE)
    ended_later.append(number_in(tmp_path / "pid"))
    assert written == ["from the group\n"]
    # What read the output of the first command would read that of this one from now on.
    does = "touch go; until test -f said; do sleep 0.01; done; for i in 1 2 3; do echo $i; sleep 0.1; done"
    ended, after = called(tmp_path, SHELL, "-c", does)
    assert (ended.code, after) == (0, ["1\n", "2\n", "3\n"])
    assert written == ["from the group\n"]


def test_a_command_ends_although_another_process_goes_on_writing_to_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended_later: list[int]
) -> None:
    monkeypatch.setattr(processes, "_OUTPUT_SECONDS", 0.1)
    ended, written = called(tmp_path, sys.executable, "-c", _LEAVES + _SAYS_MORE)
    ended_later.append(number_in(tmp_path / "pid"))
    assert ended.code == 0
    assert "from the group\n" in written


#: Ends when all of its output is in the pipe.
_WRITES_ALL = """
import fcntl, os, pathlib
fcntl.fcntl(1, fcntl.F_SETPIPE_SZ, 1 << 19)
pathlib.Path("pid").write_text(str(os.getpid()))
os.write(1, b"".join(b"%07d\\n" % number for number in range(40_000)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the size of a pipe is set")
def test_output_that_is_stored_slowly_is_stored_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_OUTPUT_SECONDS", 0.0)
    written: list[str] = []

    def write(line: str) -> None:
        if not written:  # as an fsync that takes longer than the command
            leader = number_in(tmp_path / "pid")
            wait_until(lambda: not is_alive(leader))
        written.append(line)

    work = execute(
        [sys.executable, "-c", _WRITES_ALL],
        folder=tmp_path,
        environment=dict(os.environ),
        survivors=Survivors(tmp_path / "processes", "r"),
        write=write,
    )
    ended = asyncio.run(work)
    assert written == [f"{number:07}\n" for number in range(40_000)]
    assert ended.tail.endswith("0039999")
