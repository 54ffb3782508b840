"""The peers: what others publish for the same work, in an environment of their own.

``requirements/bench.txt`` pins them. They are only needed by the contenders that name one, and
where they cannot be installed those contenders are left out; all others are measured all the same.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

#: What a row of the table says in place of a figure.
MISSING = "not measured: make bench-peers"

_ROOT = Path(__file__).resolve().parent.parent
_PYTHON = _ROOT / ".venv-bench" / "bin" / "python"
_NAMES = (
    "absurd-sdk",
    "apache-burr",
    "dbos",
    "langgraph",
    "langgraph-checkpoint-sqlite",
    "stamina",
    "tenacity",
)
_LOOK = f"from importlib.metadata import version; print(*map(version, {_NAMES!r}))"


def make_ready() -> bool:
    """Install the peers unless they are there, and tell whether they are."""
    command = [sys.executable, str(_ROOT / "requirements" / "install.py"), "bench"]
    return subprocess.run(command, check=False).returncode == 0


def describe() -> str:
    """Return the peers and their versions in one line."""
    done = subprocess.run([_PYTHON, "-c", _LOOK], check=True, stdout=subprocess.PIPE, text=True)
    versions = zip(_NAMES, done.stdout.split(), strict=True)
    return "peers: " + ", ".join(f"{name} {version}" for name, version in versions)


def interpreter() -> str:
    """Return the Python that can import the peers, and this project."""
    return str(_PYTHON)
