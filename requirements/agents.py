"""Install the agents that the adapters of ``maestro_hive.team.agents`` know, for the tests with them.

Each in the version that its adapter was tried with last, into ``build/agents``, which git ignores: what
npm and pip record there stays there. One that cannot be installed is named, and the others are
installed all the same. Where npm or pip look is for their own settings to say.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from maestro_hive.team.agents import ADAPTERS, Adapter

FOLDER = Path(__file__).resolve().parent.parent / "build" / "agents"
#: A registry that does not answer is not waited for.
SECONDS = 600


def main() -> None:
    """Install what can be installed, and say what was."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for known in ADAPTERS.values():
        print(f"{known.name} {known.tried[-1]}: {_installed(known)}", flush=True)


def _installed(known: Adapter) -> str:
    """Install one agent; return what came of it."""
    folder = FOLDER / known.name
    try:
        for command in _commands(known, folder):
            _execute(command)
        printed = _execute([str(_program(known, folder)), "--version"])
    except subprocess.CalledProcessError as error:
        said = (error.stderr or error.stdout or "").strip().splitlines()
        return f"not installed: {said[-1] if said else f'exit code {error.returncode}'}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"not installed: {error}"
    return known.version_warning(printed) or "installed"


def _commands(known: Adapter, folder: Path) -> list[list[str]]:
    package, version = known.install.split()[-1], known.tried[-1]
    if known.install.startswith("npm "):
        quiet = ["--no-package-lock", "--no-save", "--no-audit", "--no-fund"]
        return [["npm", "install", *quiet, "--prefix", str(folder), f"{package}@{version}"]]
    python = str(folder / "bin" / "python")
    quiet = ["--quiet", "--disable-pip-version-check"]
    return [
        [sys.executable, "-m", "venv", str(folder)],
        [python, "-m", "pip", "install", *quiet, f"{package}=={version}"],
    ]


def _program(known: Adapter, folder: Path) -> Path:
    npm = known.install.startswith("npm ")
    return folder / ("node_modules/.bin" if npm else "bin") / known.name


def _execute(command: list[str]) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=SECONDS)
    return done.stdout


if __name__ == "__main__":
    main()
