"""Make .venv and install into it the pinned packages and this project.

`make` runs this before everything else. It does nothing when .venv is ready, and prints a line when
it is not: it was never finished, the requirements changed, the folder was moved, or another Python
is wanted. The stamp `.venv/ready` is written last, so that an interrupted set-up starts again.
"""

from __future__ import annotations

import compileall
import fcntl
import hashlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "ready"
PINS = ROOT / "requirements" / "dev.txt"


def make_ready() -> None:
    """Install the pinned packages and the project, unless that was done."""
    with PINS.open() as lock:
        # Two makes at once, `types` beside `test`: one installs, the other waits for it.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_ready():
            make_venv()
            # The file has every dependency: pip looks for no others, and finds no newer ones.
            install("--require-hashes", "--no-deps", "-r", str(PINS), lock=lock.fileno())
            project = ("--no-deps", "--no-build-isolation", "-e", str(ROOT))
            install(*project, lock=lock.fileno())
            # pip does so for packages: where the environment forbids bytecode, each process would
            # compile the project again, for half a second.
            compileall.compile_dir(ROOT / "src", quiet=2)
            STAMP.write_text(description(), encoding="utf-8")


def is_ready() -> bool:
    """Return whether .venv was finished, and was made as it would be made now."""
    runs = PYTHON.exists()  # it is a link, and its target may be gone
    return runs and STAMP.exists() and STAMP.read_text(encoding="utf-8") == description()


def description() -> str:
    """Return all that .venv depends on: its place, its Python, the pins, the project's metadata."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    content = json.dumps([PINS.read_text(encoding="utf-8"), project["project"]])
    digest = hashlib.sha256(content.encode()).hexdigest()
    return f"{ROOT}\nPython {sys.version}\nsha256 {digest}\n"


def make_venv() -> None:
    """Make an empty .venv, in place of one that is not usable."""
    try:
        import ensurepip  # noqa: F401 - some systems leave it out, and the error comes late
        import venv
    except ImportError:
        sys.exit(
            f"The Python at {sys.executable} cannot make virtual environments;"
            " on Debian and Ubuntu, `apt install python3-venv` adds the missing part."
        )
    version = sys.version.split()[0]
    print(f"Setting up next/.venv with Python {version}: about half a minute.", flush=True)
    STAMP.unlink(missing_ok=True)
    venv.create(VENV, clear=True, with_pip=True, symlinks=True)


def install(*arguments: str, lock: int) -> None:
    """Run pip; print its output only if it fails."""
    pip = [str(PYTHON), "-I", "-m", "pip", "install", "--no-input", *arguments]
    # The lock is inherited: should this process be killed, the next one waits for pip to end.
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
        sys.exit("Setting up next/.venv failed, for the reason that pip gives above.")


if __name__ == "__main__":
    try:
        make_ready()
    except KeyboardInterrupt:
        sys.exit("The set-up was interrupted; the next make starts it again.")
