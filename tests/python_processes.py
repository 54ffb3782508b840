"""Programs in processes of their own, forked from one that has imported maestro_hive.

``python -c`` spends its first 150 ms of CPU time on imports, a forked process none. It ends as any
other: threads are joined, exit handlers are called, an exception is printed and sets the exit code;
only the objects that are left are not freed, which would take 50 ms.
Where the start itself or the modules imported are the point of a test, it starts a real one.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

from faults.imports import end_forked, import_all

if TYPE_CHECKING:
    from collections.abc import Mapping

_ROOT = Path(__file__).resolve().parents[1]
_POLL_SECONDS = 0.002
_SUSPEND_SECONDS = 30.0
_PIECE = 1 << 16
#: The name of the file that ``python -c`` executes.
_FILE = "<string>"


class _Forked:
    """A process that executes Python code."""

    def __init__(
        self,
        code: str,
        arguments: tuple[object, ...],
        streams: list[int],
        env: Mapping[str, str] | None,
        cwd: Path | None,
    ) -> None:
        """Start it; its input, output and errors are these streams."""
        self.returncode: int | None = None
        request = {
            "code": code,
            "arguments": [*map(str, arguments)],
            "environment": dict(os.environ if env is None else env),
            "folder": str(cwd or Path.cwd()),
        }
        self.pid = int(_server().ask(request, streams)["pid"])

    def poll(self) -> int | None:
        """Return its exit code, or minus the number of the signal that ended it; None if it runs."""
        if self.returncode is None:
            self.returncode = _server().ask({"poll": self.pid})["code"]
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return its exit code."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            _wait_for_end(self.pid, left)
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        self.send_signal(signal.SIGKILL)


class PythonProcess(_Forked):
    """A process that executes Python code; used as a ``subprocess.Popen`` with text pipes."""

    def __init__(
        self,
        code: str,
        *arguments: object,
        stderr: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        """Start it; its standard error is a pipe, too, if ``stderr``."""
        child_in, to_child = os.pipe()
        from_child, child_out = os.pipe()
        from_errors, child_err = os.pipe() if stderr else (-1, os.dup(2))
        streams = [child_in, child_out, child_err]
        try:
            super().__init__(code, arguments, streams, env, cwd)
        finally:
            for end in streams:
                os.close(end)
        self.stdin: TextIO = os.fdopen(to_child, "w", encoding="utf-8")
        self.stdout: TextIO = os.fdopen(from_child, encoding="utf-8")
        self.stderr = os.fdopen(from_errors, encoding="utf-8") if stderr else None

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Close its input, and return its output and its errors when it has ended."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        read = {"out": "", "err": ""}

        def read_all(name: str, stream: TextIO) -> None:
            read[name] = stream.read()

        streams = {"out": self.stdout, "err": self.stderr}
        readers = [
            threading.Thread(target=read_all, args=(name, stream), daemon=True)
            for name, stream in streams.items()
            if stream is not None and not stream.closed
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        self._close()
        return read["out"], read["err"]

    def _close(self) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        self.wait()


class PythonWithOutput(_Forked):
    """A process that executes Python code; what it prints goes into a file."""

    def __init__(
        self,
        code: str,
        *arguments: object,
        output: int,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        """Start it; it has no input."""
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            super().__init__(code, arguments, [nothing, output, output], env, cwd)
        finally:
            os.close(nothing)


class PythonInTerminal(_Forked):
    """A process that executes Python code in a terminal of its own, that Ctrl+C comes from."""

    def __init__(
        self,
        code: str,
        *arguments: object,
        terminal: int,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        """Start it."""
        super().__init__(_IN_TERMINAL + code, arguments, [terminal] * 3, env, cwd)


class ForkedCommand:
    """An executable file: what starts it gets a process that is forked and executes this code.

    For shells that start it by name. It connects to this process, with its streams and arguments.
    """

    def __init__(self, name: str, code: str) -> None:
        """Write it."""
        self._code = code
        #: Short, because of the limit for the addresses of sockets.
        self._place = tempfile.TemporaryDirectory(prefix="m")
        self.folder = Path(self._place.name)
        path, address = self.folder / name, self.folder / "socket"
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(address))
        self._listening.listen()
        path.write_text(f"#!{sys.executable} -IS\n{_CONNECT.format(str(address))}")
        path.chmod(0o755)
        self._thread = threading.Thread(target=self._answer, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)  # ends its thread
        self._thread.join()
        self._listening.close()
        self._place.cleanup()

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            with connection:
                given, streams = _receive(connection)
                assert given is not None
                process = _Forked(
                    self._code,
                    tuple(given["arguments"]),
                    streams,
                    given["environment"],
                    Path(given["folder"]),
                )
                for stream in streams:
                    os.close(stream)
                connection.sendall(b"%d" % process.wait())


_CONNECT = """
import json, os, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect({!r})
given = dict(arguments=sys.argv[1:], environment=dict(os.environ), folder=os.getcwd())
line = (json.dumps(given) + "\\n").encode()
connection.sendall(line[socket.send_fds(connection, [line], [0, 1, 2]):])
sys.exit(int(connection.recv(16)))
"""

#: A new session, and streams that are those of a process that was started in the terminal.
_IN_TERMINAL = """
import os, sys
os.setsid()
os.close(os.open(os.ttyname(0), os.O_RDWR))
for number, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
    setattr(sys, name, open(number, mode, buffering=1, closefd=False))
"""


def run_python(
    code: str,
    *arguments: object,
    check: bool = False,
    timeout: float = 60,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
) -> subprocess.CompletedProcess[str]:
    """Execute code in a process and return how it ended, as ``subprocess.run`` does."""
    process = PythonProcess(code, *arguments, stderr=True, env=env)
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(stdin)
        out, err = process.communicate(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    code_of_end = process.wait()
    assert not check or code_of_end == 0, err
    return subprocess.CompletedProcess([*map(str, arguments)], code_of_end, out, err)


def _wait_for_end(pid: int, seconds: float | None) -> None:
    """Wait until a process has ended, at most so long; where that cannot be, wait a moment."""
    if not hasattr(os, "pidfd_open"):
        time.sleep(_POLL_SECONDS)
        return
    try:
        file = os.pidfd_open(pid)
    except OSError:  # it has ended, or the system does not have them
        time.sleep(_POLL_SECONDS)
        return
    try:
        select.select([file], [], [], seconds)
    finally:
        os.close(file)


def suspend(pid: int) -> None:
    """Send SIGSTOP, and return when no thread of the process executes anything.

    Until a thread that writes to a slow disk takes the signal, the others go on.
    """
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    deadline = time.monotonic() + _SUSPEND_SECONDS
    while any(_state_of(each) not in "TtZX" for each in threads.glob("*")):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(_POLL_SECONDS)


def _state_of(thread: Path) -> str:
    try:
        text = (thread / "stat").read_text("utf-8", "replace")
    except OSError:  # it has ended
        return "X"
    return text.rpartition(")")[2].split()[0]


# --- the process that forks the others -----------------------------------------------------------


class _Server:
    """The process that forks; it ends when the connection to it is closed."""

    def __init__(self) -> None:
        self._connection, its_end = socket.socketpair()
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.python_processes", str(its_end.fileno())],
            cwd=_ROOT,
            pass_fds=[its_end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        its_end.close()

    def ask(self, request: dict[str, Any], files: list[int] | None = None) -> dict[str, Any]:
        """Send a request and return the answer."""
        with self._lock:
            line = f"{json.dumps(request)}\n".encode()
            sent = socket.send_fds(self._connection, [line], files or [])
            self._connection.sendall(line[sent:])
            answer, _ = _receive(self._connection)
            assert answer is not None, "the process that starts the others has ended"
            return answer

    def close(self) -> None:
        """End it."""
        self._connection.close()
        self._process.wait()


def _receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return the next line of JSON, or None at the end, and the files that came with it."""
    line, files, _, _ = socket.recv_fds(connection, _PIECE, 3)
    while line and not line.endswith(b"\n"):
        line += connection.recv(_PIECE)
    return (json.loads(line) if line else None), files


_starting = threading.Lock()


def _server() -> _Server:
    """Return the process that forks, which the first of all threads starts."""
    with _starting:
        return _started_server()


@functools.cache
def _started_server() -> _Server:
    server = _Server()
    atexit.register(server.close)
    return server


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """Answer requests; in a forked process, return what it has to execute."""
    codes: dict[int, int] = {}
    running: set[int] = set()
    while True:
        request, files = _receive(connection)
        if request is None:
            break
        answer: dict[str, Any]
        if "poll" in request:
            _reap(running, codes)
            answer = {"code": codes.get(request["poll"])}
        else:
            pid = os.fork()
            if pid == 0:
                _take_over(connection, files)
                return request
            for file in files:
                os.close(file)
            running.add(pid)
            answer = {"pid": pid}
        connection.sendall(f"{json.dumps(answer)}\n".encode())
    _reap(running, codes)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return None


def _reap(running: set[int], codes: dict[int, int]) -> None:
    for pid in list(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            codes[pid] = os.waitstatus_to_exitcode(status)
            running.discard(pid)


def _take_over(connection: socket.socket, files: list[int]) -> None:
    connection.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
    for file in files:
        os.close(file)


def _execute(request: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = ["-c", *request["arguments"]]
    sys.path[0] = ""
    sys.excepthook = _print_error
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(request["code"], _FILE, "exec"), main.__dict__)
    except SystemExit as ended:
        if type(ended.code) is not int:  # a text that is printed, or nothing
            raise
        end_forked(ended.code)
    end_forked(0)


def _print_error(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    """Print an error as ``python -c`` does: without the lines of this file."""
    while trace is not None and trace.tb_frame.f_code.co_filename != _FILE:
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)


if __name__ == "__main__":
    import_all()
    _request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if _request is not None:
        _execute(_request)
