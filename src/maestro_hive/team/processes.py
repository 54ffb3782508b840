"""Commands as process groups that never outlive the process that executes the run.

Each command is the leader of a group of its own. It is started behind a gate: a shell that waits for a
line on its standard input and then becomes the command. Before that line is written the group is known
in two places, so that whatever is killed and whenever, it is ended:

- to the guard, one small process for each engine. It reads a pipe that the engine has open, and
  kills all groups that are left when the pipe closes, as it does when the engine is killed;
- in a file of the run, by boot id, process id and start time. The next start of a run in the same
  folder, and of the same state folder, ends what is left, if the guard was killed as well.

An engine that dies before it has written the line closes the pipe, and the command is never executed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import os
import select
import signal
import subprocess
import termios
import threading
import time
from array import array
from codecs import getincrementaldecoder
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import IO, TYPE_CHECKING, Any

from maestro_hive.kernel.files import reason_of
from maestro_hive.kernel.process import PerProcess, is_interrupted, threads
from maestro_hive.team.errors import CommandFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from maestro_hive.team.survivors import Survivors

SHELL = "/bin/sh"
#: Waits for a line, byte by byte as shells read pipes, and becomes the command: what follows the
#: line on its standard input is the command's.
_BEHIND_GATE = 'read -r _ && exec "$@"'
#: How many seconds a group has between SIGTERM and SIGKILL.
GRACE_SECONDS = 2.0
#: How long its end is waited for after that; half of it for output that others hold.
_KILLED_SECONDS = 1.0
#: How much of the end of an output is given in errors, and how long one chunk of it is at most.
_TAIL_CHARACTERS = 1_500
_CHUNK_CHARACTERS = 8_000
#: For how many seconds the end of an output is waited for that a process outside of the group holds,
#: and how often its reader looks whether the group has ended.
_OUTPUT_SECONDS = 2.0
_LOOK_MILLISECONDS = 200
_READ_BYTES = 1 << 16
#: How much of the output of commands is stored for one attempt, each line with what it takes besides.
MAX_LOG_BYTES = 16 * 1024 * 1024
_LINE_BYTES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a command ended: its exit code, minus the number of a signal, and the end of its output."""

    code: int
    tail: str

    def __str__(self) -> str:
        if self.code < 0:
            with contextlib.suppress(ValueError):
                return f"was ended by {signal.Signals(-self.code).name}"
        return f"ended with exit code {self.code}"


async def execute(
    arguments: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    survivors: Survivors,
    text: str = "",
    write: Callable[[str], None],
) -> Ended:
    """Execute a command with a text on its standard input; whoever cancels this ends its group.

    Each line of its output is given to ``write``, in a thread. What the command leaves in its group
    when it ends is killed.
    """
    group = _Group(arguments, folder, environment, write)
    try:
        survivors.add(group.pid)
        _guard().add(group.pid)
        attended = asyncio.wrap_future(group.start(text, survivors))
    except BaseException:
        group.never_start(survivors)
        raise
    try:
        return await asyncio.shield(attended)
    except asyncio.CancelledError:
        await _end(group, attended)
        raise


async def _end(group: _Group, attended: asyncio.Future[Ended]) -> None:
    """End a group, politely first; return when it has ended."""
    attended.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    group.output.seconds = _KILLED_SECONDS / 2
    group.signal(signal.SIGTERM)
    try:
        await _done(attended, GRACE_SECONDS)
    finally:
        group.signal(signal.SIGKILL)
    await _done(attended, _KILLED_SECONDS)


async def _done(future: asyncio.Future[Ended], seconds: float) -> None:
    """Return when a future is done, or the time is over; or if the process is to end at once.

    Not when the caller is cancelled again: to stop a run cancels its calls several times, as each of
    the tasks that they are inside of does.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not future.done() and loop.time() < deadline and not is_interrupted(loop):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({future}, timeout=deadline - loop.time())


def start_guarded(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a command that is killed with its group when this process dies; its output is a pipe.

    Whoever has waited for its end calls ``unguard``.
    """
    process = _behind_gate(arguments, folder, environment)
    assert process.stdin is not None
    try:
        _guard().add(process.pid)
        process.stdin.write(b"\n")
        process.stdin.close()
    except BaseException:
        with process:
            process.kill()
            _guard().remove(process.pid)
        raise
    return process


def unguard(pid: int) -> None:
    """Note that a command of ``start_guarded`` has ended: its number may be another's."""
    _guard().remove(pid)


def _behind_gate(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start the shell that becomes the command when it gets a line, as the leader of a group."""
    try:
        return subprocess.Popen(  # noqa: S603 - a graph is a program
            [SHELL, "-c", _BEHIND_GATE, "sh", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=dict(environment),
            start_new_session=True,
            bufsize=0,
        )
    except OSError as error:
        raise CommandFailedError(
            f"{arguments[0]} could not be started in {folder}: {reason_of(error)}"
        ) from error


class _Group:
    """A command behind its gate, the leader of a process group; then the command."""

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        write: Callable[[str], None],
    ) -> None:
        self._process = _behind_gate(arguments, folder, environment)
        self.pid = self._process.pid
        self.output = _Output(write)
        self._lock = threading.Lock()
        self._is_reaped = False

    def start(self, text: str, survivors: Survivors) -> Future[Ended]:
        """Let it become the command, and give it the text; return what will be how it ended.

        That takes three threads, and none of them does anything before all of them were started.
        """
        have_started: Future[bool] = Future()

        def when_started(work: Callable[[], Any]) -> Any:
            return work() if have_started.result() else None

        try:
            threads.run(partial(when_started, self._read))
            attended = threads.run(partial(when_started, partial(self._attend, survivors)))
            threads.run(partial(when_started, partial(self._give, text)))
        except BaseException:
            have_started.set_result(False)
            raise
        have_started.set_result(True)
        return attended

    def never_start(self, survivors: Survivors) -> None:
        """End it before it becomes the command."""
        self.signal(signal.SIGKILL)
        _guard().remove(self.pid)  # as long as its number cannot be another's
        with self._process:
            pass
        survivors.remove(self.pid)

    def _read(self) -> None:
        assert self._process.stdout is not None
        self.output.read(self._process.stdout)

    def _give(self, text: str) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended, or reads no more
            left = memoryview(b"\n" + text.encode("utf-8", "replace"))
            while left:
                left = left[stdin.write(left) :]
        with contextlib.suppress(BrokenPipeError):
            stdin.close()

    def signal(self, number: int) -> None:
        """Send a signal to all of the group; not after its end, when its number may be another's."""
        with self._lock, contextlib.suppress(ProcessLookupError, PermissionError):
            if not self._is_reaped:
                os.killpg(self.pid, number)

    def _attend(self, survivors: Survivors) -> Ended:
        """Let the output be read to its end, end what is left of the group; return how it ended."""
        # Without reaping it: until then no other group can get its number.
        is_known = True
        try:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            is_known = False
        self.signal(signal.SIGKILL)
        self.output.group_has_ended.set()
        self.output.is_read.wait()
        with self._lock:
            self._is_reaped = True
        _guard().remove(self.pid)
        code = self._process.wait()
        survivors.remove(self.pid)
        self.output.end()
        if not is_known:
            raise CommandFailedError(
                "how the command ended is not known: other code in this process waits for all of its"
                " children, or ignores SIGCHLD"
            )
        return Ended(code=code, tail=self.output.tail)


class _Output:
    """Passes an output on line by line, and remembers its end."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self.group_has_ended = threading.Event()
        #: Set when nothing more is passed on.
        self.is_read = threading.Event()
        #: For how long its end is waited for then.
        self.seconds = _OUTPUT_SECONDS
        self._write = write
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._line = ""
        self._last: deque[str] = deque()
        self._length = 0
        self._error: Exception | None = None

    @property
    def tail(self) -> str:
        """The end of what was written."""
        text = "".join(self._last).strip()
        if len(text) <= _TAIL_CHARACTERS:
            return text
        return f"…{text[-_TAIL_CHARACTERS:]}"

    def read(self, output: IO[bytes]) -> None:
        """Read to the end, and close it. A pipe that is full stops the command, not the engine.

        Nobody else closes it: its number would be that of the next command's output, and this would read
        that one. What others write later is read as well, and not passed on.
        """
        with output:
            try:
                for data in self._chunks(output.fileno()):
                    self._take(self._decoder.decode(data))
                self._take(self._decoder.decode(b"", final=True))
                self._pass_on(self._line)
            finally:
                self.is_read.set()
            while os.read(output.fileno(), _READ_BYTES):
                pass

    def _chunks(self, fd: int) -> Iterator[bytes]:
        """Yield an output up to its end; if others hold it, up to some seconds after that of the group.

        What the group has written is in the pipe when it has ended. That is yielded however long it takes
        to store: the time is limited for what others write.
        """
        readable = select.poll()
        readable.register(fd, select.POLLIN)
        left, deadline = 0, math.inf
        while left > 0 or time.monotonic() < deadline:
            if deadline == math.inf and self.group_has_ended.is_set():
                left, deadline = _bytes_in(fd), time.monotonic() + self.seconds
            if left > 0 or readable.poll(_LOOK_MILLISECONDS):
                data = os.read(fd, _READ_BYTES)
                if not data:
                    return
                left -= len(data)
                yield data

    def _take(self, text: str) -> None:
        lines = (self._line + text).splitlines(keepends=True)
        self._line = lines.pop() if lines and not lines[-1].endswith("\n") else ""
        if len(self._line) >= _CHUNK_CHARACTERS:
            lines.append(self._line)
            self._line = ""
        for line in lines:
            self._pass_on(line)

    def _pass_on(self, line: str) -> None:
        for start in range(0, len(line), _CHUNK_CHARACTERS):
            piece = line[start : start + _CHUNK_CHARACTERS]
            self._last.append(piece)
            self._length += len(piece)
            while self._length - len(self._last[0]) > _TAIL_CHARACTERS:
                self._length -= len(self._last.popleft())
            self._pass_piece_on(piece)

    def _pass_piece_on(self, piece: str) -> None:
        if self._error is not None:
            return  # it is read all the same, or the command would stop
        try:
            self._write(piece)
        except Exception as error:  # noqa: BLE001 - raised by ``end``, when the command has ended
            self._error = error

    def end(self) -> None:
        """Raise if something could not be passed on."""
        if self._error is not None:
            raise self._error


class LimitedLog:
    """Passes an output on up to a limit, and then a line that says so; the rest is left out."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._left = MAX_LOG_BYTES

    def write(self, piece: str) -> None:
        """Pass a piece on, if it is below the limit."""
        if self._left <= 0:
            return
        self._left -= len(piece.encode("utf-8", "replace")) + _LINE_BYTES
        self._write(piece)
        if self._left <= 0:
            start = "" if piece.endswith("\n") else "\n"
            limit = f"{MAX_LOG_BYTES // 1024**2} MiB"
            self._write(f"{start}… the rest is left out: a log has at most {limit} of output\n")


def _bytes_in(pipe: int) -> int:
    """Return how many bytes can be read from a pipe without waiting."""
    count = array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]


# --- the guard ------------------------------------------------------------------------------------

#: Reads ``+ PID`` and ``- PID`` until its input closes, and kills the groups that are left. In the
#: background of a shell that ends at once, so that nobody has to wait for it; a shell gives what is
#: in the background another standard input, unless it is named.
_GUARD = """
trap '' INT TERM HUP
exec 3<&0
(
    groups=' '
    while read -r change group; do
        case $change in
        +) groups="$groups$group " ;;
        -) groups="${groups%% $group *} ${groups#* $group }" ;;
        esac
    done
    for group in $groups; do kill -s KILL -- "-$group"; done
) <&3 3<&- &
"""


class _Guard:
    """Kills the groups of this process when this process dies."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: set[int] = set()
        self._pipe = -1

    def add(self, pid: int) -> None:
        """Have a group killed, if this process dies before ``remove``."""
        with self._lock:
            self._groups.add(pid)
            try:
                self._say(f"+ {pid}\n")
            except BaseException:
                self._groups.remove(pid)
                raise

    def remove(self, pid: int) -> None:
        """Note that a group has ended."""
        with self._lock:
            if pid in self._groups:
                self._groups.remove(pid)
                # One that was killed and cannot be started now is started with the next group.
                with contextlib.suppress(OSError, subprocess.SubprocessError):
                    self._say(f"- {pid}\n")

    def close_inherited(self) -> None:
        """Close the pipe in a forked child: it must close when the parent dies."""
        if self._pipe >= 0:
            os.close(self._pipe)

    def _say(self, line: str) -> None:
        try:
            if self._pipe >= 0:
                os.write(self._pipe, line.encode())
                return
        except BrokenPipeError:  # it was killed
            pipe, self._pipe = self._pipe, -1
            os.close(pipe)
        self._pipe = self._started()
        os.write(self._pipe, "".join(f"+ {each}\n" for each in self._groups).encode())

    def _started(self) -> int:
        reading, writing = os.pipe()
        try:
            subprocess.run(  # noqa: S603 - no text of others is in it
                [SHELL, "-c", _GUARD],
                stdin=reading,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
                check=True,
            )
        except BaseException:
            os.close(writing)
            raise
        finally:
            os.close(reading)
        return writing


_guard = PerProcess(_Guard, inherited=_Guard.close_inherited)
