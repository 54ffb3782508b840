"""A PostgreSQL server for the tests of one session, which all its workers share.

The first worker starts a supervisor, and that starts the server: on a port of its own on loopback,
in a folder of its own, as a user that is not root. The supervisor ends it when no worker is left,
however the workers ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

_PROGRAMS = Path("/usr/lib/postgresql")
_SETTINGS = (
    "listen_addresses=127.0.0.1",
    "unix_socket_directories=",
    "max_connections=200",
    "shared_buffers=32MB",
    "fsync=on",
)
_USER = "maestro"
_SECONDS = 60


def server_url() -> str:
    """Return the URL of a server, without the name of a database; start it if it is not running.

    Where there is none, the test is skipped; under continuous integration, that is a failure.
    """
    found = _started()
    if found.startswith("postgresql://"):
        return found
    if os.environ.get("CI"):
        pytest.fail(f"no PostgreSQL server for tests: {found}")
    pytest.skip(f"no PostgreSQL server for tests: {found}")


@cache
def _started() -> str:
    """Return the URL, or why there is none."""
    programs = sorted(_PROGRAMS.glob("*/bin"), key=lambda path: float(path.parent.name))
    if not programs:
        return f"there are no programs in {_PROGRAMS}: install the package postgresql"
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(os.getpid())
    folder = Path(tempfile.gettempdir()) / f"maestro-tests-{session[:16]}"
    folder.mkdir(mode=0o755, exist_ok=True)
    users = os.open(folder / "users", os.O_RDWR | os.O_CREAT)
    fcntl.flock(users, fcntl.LOCK_SH)  # until this process ends
    with (folder / "starting").open("w") as starting:
        fcntl.flock(starting, fcntl.LOCK_EX)
        url = folder / "url"
        if not url.exists():
            command = [sys.executable, __file__, str(folder), str(programs[-1])]
            log = folder / "log"
            with log.open("w") as output:
                subprocess.run(command, stdout=output, stderr=output, check=False, timeout=_SECONDS)
            if not url.exists():
                return log.read_text()[-2000:]
        return url.read_text()


# --- the supervisor -------------------------------------------------------------------------------


def start(folder: Path, programs: Path) -> None:
    """Start a supervisor, and end when its server is ready, or has failed."""
    ready, started = os.pipe()
    if os.fork() == 0:
        os.close(ready)
        os.setsid()
        supervise(folder, programs, started)
    else:
        os.close(started)
        os.read(ready, 1)


def supervise(folder: Path, programs: Path, started: int) -> None:
    """Run a server until no process holds the file ``users``, then delete the folder."""
    data = folder / "data"
    data.mkdir(mode=0o700)
    user = _unprivileged_user()
    if user is not None:
        os.chown(data, user.pw_uid, user.pw_gid)
    programs = _readable(programs, folder)
    ids: dict[str, Any] = (
        {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    )
    initdb: list[str | Path] = [
        programs / "initdb",
        "--auth=trust",
        f"--username={_USER}",
        "--encoding=UTF8",
    ]
    subprocess.run(
        [*initdb, "--no-locale", "--no-instructions", "--no-sync", f"--pgdata={data}"],
        check=True,
        cwd=data,
        **ids,
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = [word for each in (*_SETTINGS, f"port={port}") for word in ("-c", each)]
    server = subprocess.Popen([programs / "postgres", "-D", data, *settings], cwd=data, **ids)
    ready: list[str | Path] = [programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)]
    while subprocess.run(ready, check=False).returncode:
        if server.poll() is not None:
            sys.exit("the server has ended")
        time.sleep(0.02)
    written = folder / "url.new"
    written.write_text(f"postgresql://{_USER}@127.0.0.1:{port}")
    written.rename(folder / "url")
    os.close(started)
    users = os.open(folder / "users", os.O_RDWR)
    fcntl.flock(users, fcntl.LOCK_EX)
    (folder / "url").unlink()
    server.terminate()  # which waits for clients: there are none
    try:
        server.wait(10)
    except subprocess.TimeoutExpired:
        server.kill()
    shutil.rmtree(folder)


def _unprivileged_user() -> pwd.struct_passwd | None:
    """Return the user that the server runs as, if this process is root: the server refuses root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    sys.exit("root needs a user postgres or nobody to run a server as")


def _readable(programs: Path, folder: Path) -> Path:
    """Return the programs, copied if folders above them are closed to other users."""
    if all(each.stat().st_mode & 0o005 == 0o005 for each in (programs, *programs.parents)):
        return programs
    release = shutil.copytree(programs.parent, folder / "programs")
    share = Path("/usr/share/postgresql") / programs.parent.name
    shutil.copytree(share, folder / "share", dirs_exist_ok=True)
    return release / "bin"


if __name__ == "__main__":
    start(Path(sys.argv[1]), Path(sys.argv[2]))
