"""Starting workers and talking to them in lines of JSON."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Self

from faults.strace import ROOT

if TYPE_CHECKING:
    from pathlib import Path


class SilentError(Exception):
    """A worker did not answer in time, or ended."""


class Worker:
    """One process of ``faults.workers``; as a context manager it is gone at the end."""

    def __init__(self, role: str, folder: Path, number: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "faults.workers", role, str(folder), str(number)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        )
        self._rest = b""

    def tell(self) -> None:
        """Let it begin."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")

    def hear(self, seconds: float) -> dict[str, Any]:
        """Return the next line it says."""
        assert self.process.stdout is not None
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self.process.stdout], [], [], seconds)
            more = self.process.stdout.read(65536) if ready else b""
            if not more:
                raise SilentError(f"a worker said nothing for {seconds:g} s: {self._complaint()}")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        said: dict[str, Any] = json.loads(line)
        return said

    def _complaint(self) -> str:
        self.process.kill()
        _, errors = self.process.communicate()
        return errors.decode(errors="replace")[-400:]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
