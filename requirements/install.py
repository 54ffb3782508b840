"""Make .venv and install into it what dev.txt pins, and the project itself.

`make` runs this before everything else. It does nothing when .venv is ready, and says what it does
when it is not: it never was, the requirements changed, the folder was moved, or another Python is
asked for. A .venv is ready when its stamp says so. The stamp is written last, so that a set-up that
was interrupted is begun again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements" / "dev.txt"
VENV = ROOT / ".venv"
STAMP = VENV / "ready"


def main() -> None:
    """Leave a .venv that is ready, or say why there is none."""
    with REQUIREMENTS.open() as lock:
        # Two makes at once, `demo` beside `test`: one installs, the other waits for it.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_ready():
            make_venv()
            install("--require-hashes", "-r", str(REQUIREMENTS), lock=lock.fileno())
            install("--no-deps", "--no-build-isolation", "-e", str(ROOT), lock=lock.fileno())
            STAMP.write_text(wanted(), encoding="utf-8")


def is_ready() -> bool:
    """Tell whether .venv was finished, and was made as it would be made now."""
    alive = (VENV / "bin" / "python").exists()  # it is a link, and what it leads to may be gone
    return alive and STAMP.exists() and STAMP.read_text(encoding="utf-8") == wanted()


def wanted() -> str:
    """Say all that a .venv depends on: where it is, its Python, what is installed into it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    content = json.dumps([REQUIREMENTS.read_text(encoding="utf-8"), project["project"]])
    digest = hashlib.sha256(content.encode()).hexdigest()
    return f"{ROOT}\nPython {sys.version}\nsha256 {digest}\n"


def make_venv() -> None:
    """Make an empty .venv where there is none, and where there is one that will not do."""
    try:
        import ensurepip  # noqa: F401, PLC0415 - some systems leave it out, and say so late
        import venv  # noqa: PLC0415
    except ImportError:
        sys.exit(
            f"The Python at {sys.executable} cannot make virtual environments;"
            " on Debian and Ubuntu, `apt install python3-venv` adds what is missing."
        )
    version = sys.version.split()[0]
    print(f"Setting up .venv with Python {version}: about half a minute.", flush=True)
    STAMP.unlink(missing_ok=True)
    venv.create(VENV, clear=True, with_pip=True, symlinks=True)


def install(*what: str, lock: int) -> None:
    """Let pip install something; only when that fails, show what it said."""
    pip = [str(VENV / "bin" / "python"), "-I", "-m", "pip", "install", "--no-input", *what]
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
        sys.exit("Setting up .venv failed, for the reason that pip gives above.")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("Setting up .venv was interrupted; the next make begins it again.")
