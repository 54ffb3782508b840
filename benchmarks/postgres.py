"""A Postgres server of the benchmark's own: on a free port of 127.0.0.1, in a folder that is deleted.

Its settings are its defaults, so that what it commits survives a power cut. It refuses to run as
root; then it runs as the user ``postgres``, or ``nobody``.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Where the contenders' processes find the server.
VARIABLE = "MAESTRO_BENCH_POSTGRES"
#: What a row of the table says in place of a figure.
MISSING = "not measured: no Postgres"
_START_SECONDS = 30.0


class NoPostgresError(Exception):
    """There is no server to measure with; the message says why."""


@contextmanager
def server(folder: Path) -> Iterator[None]:
    """Run a server while the body runs, and name it in the environment."""
    programs = _programs()
    with tempfile.TemporaryDirectory(dir=folder, prefix="postgres-") as place:
        user = _unprivileged_user()
        if user is not None:
            os.chown(place, pwd.getpwnam(user).pw_uid, -1)
        data = Path(place) / "data"
        _run([programs / "initdb", "-D", data, "-U", "bench", "-A", "trust", "-E", "UTF8"], user)
        port = _free_port()
        process = _start(programs, data, port, user)
        os.environ[VARIABLE] = f"postgresql://bench@127.0.0.1:{port}/postgres"
        try:
            yield
        finally:
            del os.environ[VARIABLE]
            process.send_signal(signal.SIGINT)  # ends its connections, then itself
            process.wait(_START_SECONDS)


def _programs() -> Path:
    found = shutil.which("initdb")
    places = [Path(found).resolve().parent] if found else []
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for place in places:
        if (place / "initdb").exists() and (place / "postgres").exists():
            return place
    raise NoPostgresError("there is no Postgres on this machine (Debian: apt install postgresql)")


def _unprivileged_user() -> str | None:
    """Return whom the server shall run as, or None for whoever runs this."""
    if os.geteuid() != 0:
        return None
    known = {each.pw_name for each in pwd.getpwall()}
    return next(name for name in ("postgres", "nobody") if name in known)


def _run(command: list[str | Path], user: str | None) -> None:
    done = subprocess.run(
        command,
        check=False,
        user=user,
        cwd="/",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        last = done.stdout.strip().splitlines()[-1:]
        raise NoPostgresError(f"initdb failed: {''.join(last)}")


def _start(programs: Path, data: Path, port: int, user: str | None) -> subprocess.Popen[bytes]:
    settings = {"listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": ""}
    words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    log = (data.parent / "log").open("wb")
    with log:
        process = subprocess.Popen(
            [programs / "postgres", "-D", data, *words], user=user, cwd="/", stdout=log, stderr=log
        )
    until = time.monotonic() + _START_SECONDS
    while not _answers(port):
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            process.wait()
            said = (data.parent / "log").read_text(encoding="utf-8", errors="replace")
            raise NoPostgresError(f"Postgres did not start: {said.strip()}")
        time.sleep(0.1)
    return process


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
