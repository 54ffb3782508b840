"""Make an environment and install into it what is pinned for it, and the project itself.

    install.py          .venv, with what dev.txt pins
    install.py bench    .venv-bench, with what bench.txt pins: the peers that `make bench` compares
                        with, kept apart because they bring some fifty packages along

`make` runs the first before everything else. It does nothing when the environment is ready, and says
what it does when it is not: it never was, the requirements changed, the folder was moved, or another
Python is asked for. An environment is ready when its stamp says so. The stamp is written last, so
that a set-up that was interrupted is begun again.
"""

from __future__ import annotations

import compileall
import fcntl
import hashlib
import json
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A folder with a Python of its own, and the file that says what belongs into it."""

    venv: Path
    requirements: Path
    about: str

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.venv / "bin" / "python"

    @property
    def stamp(self) -> Path:
        """The file that says that it was finished, and from what it was made."""
        return self.venv / "ready"


DEV = Environment(
    venv=ROOT / ".venv", requirements=ROOT / "requirements" / "dev.txt", about="about half a minute"
)
BENCH = Environment(
    venv=ROOT / ".venv-bench",
    requirements=ROOT / "requirements" / "bench.txt",
    about="DBOS, LangGraph, stamina, tenacity and what they need, to compare with; about a minute",
)


def main(words: list[str]) -> None:
    """Leave the environment that was asked for ready, or say why there is none."""
    match words:
        case []:
            make_ready(DEV)
        case ["bench"]:
            make_ready(BENCH)
        case _:
            sys.exit("Say nothing to get .venv, or `bench` to get .venv-bench.")


def make_ready(wanted: Environment) -> None:
    """Install what is pinned, and the project, unless that was done."""
    with wanted.requirements.open() as lock:
        # Two makes at once, `demo` beside `test`: one installs, the other waits for it.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_ready(wanted):
            make_venv(wanted)
            # The file has every dependency: pip need not look for one, and finds none that is newer.
            pinned = ("--require-hashes", "--no-deps", "-r", str(wanted.requirements))
            install(wanted, *pinned, lock=lock.fileno())
            project = ("--no-deps", "--no-build-isolation", "-e", str(ROOT))
            install(wanted, *project, lock=lock.fileno())
            # As pip does for what it installs: where the environment says that no bytecode is
            # written, each process would compile the project again, for half a second.
            compileall.compile_dir(ROOT / "src", quiet=2)
            wanted.stamp.write_text(made_from(wanted), encoding="utf-8")


def is_ready(wanted: Environment) -> bool:
    """Return whether an environment was finished, and was made as it would be made now."""
    alive = wanted.python.exists()  # it is a link, and what it leads to may be gone
    stamp = wanted.stamp
    return alive and stamp.exists() and stamp.read_text(encoding="utf-8") == made_from(wanted)


def made_from(wanted: Environment) -> str:
    """Say all that an environment depends on: where it is, its Python, what is installed into it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    content = json.dumps([wanted.requirements.read_text(encoding="utf-8"), project["project"]])
    digest = hashlib.sha256(content.encode()).hexdigest()
    return f"{ROOT}\nPython {sys.version}\nsha256 {digest}\n"


def make_venv(wanted: Environment) -> None:
    """Make an empty environment where there is none, and where there is one that will not do."""
    try:
        import ensurepip  # noqa: F401 - some systems leave it out, and say so late
        import venv
    except ImportError:
        sys.exit(
            f"The Python at {sys.executable} cannot make virtual environments;"
            " on Debian and Ubuntu, `apt install python3-venv` adds what is missing."
        )
    version = sys.version.split()[0]
    print(f"Setting up {wanted.venv.name} with Python {version}: {wanted.about}.", flush=True)
    wanted.stamp.unlink(missing_ok=True)
    venv.create(wanted.venv, clear=True, with_pip=True, symlinks=True)


def install(wanted: Environment, *what: str, lock: int) -> None:
    """Let pip install something; only when that fails, show what it said."""
    pip = [str(wanted.python), "-I", "-m", "pip", "install", "--no-input", *what]
    # The lock is handed down: should this process be killed, the next waits for pip to end.
    done = subprocess.run(
        [*pip, "--disable-pip-version-check"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        pass_fds=[lock],
    )
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        sys.exit(f"Setting up {wanted.venv.name} failed, for the reason that pip gives above.")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit("Setting it up was interrupted; the next make begins it again.")
