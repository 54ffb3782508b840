"""Processes that write one audit log and are killed: it is never taken for one that was changed."""

from __future__ import annotations

import random
import textwrap
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from maestro_hive.engine.audit import verify
from maestro_hive.maestro.state.stores import close_store, open_store
from tests.python_processes import PythonProcess

if TYPE_CHECKING:
    from maestro_hive.maestro.state.store import Reader

KILLS, AT_ONCE = 50, 3
_BUSY_TIMEOUT = 60.0

_WRITER = textwrap.dedent("""
    import sys
    from pathlib import Path
    from maestro_hive.engine.audit import AuditLog
    from maestro_hive.maestro.state.stores import open_store

    folder = Path(sys.argv[1])
    log = AuditLog(folder / "audit.jsonl", open_store(folder))
    log.write({"persona_id": sys.argv[2], "allowed": True})
    print("ready", flush=True)
    while True:
        log.write({"persona_id": sys.argv[2], "allowed": True, "message": "x" * 500})
""")

#: Ends the process at a point of one write: what is called there is replaced by a kill.
_KILLED_AT = textwrap.dedent("""
    import os, signal, sys
    from pathlib import Path
    from maestro_hive.engine import audit
    from maestro_hive.kernel import appending
    from maestro_hive.maestro.state.stores import open_store

    folder, point = Path(sys.argv[1]), sys.argv[2]
    log = audit.AuditLog(folder / "audit.jsonl", open_store(folder))

    def kill(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def kill_after(call):
        def called(*given):
            call(*given)
            kill()
        return called

    def half(self, fd, data, at):
        os.pwrite(fd, data[: len(data) // 2], at)
        kill()

    match point:
        case "before the line":
            appending.AppendedFile.append = kill
        case "in the line":
            appending.AppendedFile._write = half
        case "before the sync":
            appending.os.fsync = kill
        case "before the anchor":
            audit.AuditLog._set_anchor = kill
        case "after the anchor":
            audit.AuditLog._set_anchor = kill_after(audit.AuditLog._set_anchor)
    log.write({"allowed": False})
""")


def check(reader: Reader) -> int:
    """Verify the log with its journal, and return how many lines it has."""
    report = verify(Path(reader.location) / "audit.jsonl", reader)
    assert report.is_intact, report
    assert report.anchored is not None
    assert report.lines - report.anchored in {0, 1}
    return report.lines


def test_a_log_is_intact_after_fifty_kills(tmp_path: Path) -> None:
    dice, lines, started = random.Random(14), 0, 0
    folder = tmp_path / "state"
    store = open_store(folder)
    writers: deque[PythonProcess] = deque()
    for _ in range(KILLS):
        while started < KILLS and len(writers) < AT_ONCE:
            writers.append(PythonProcess(_WRITER, folder, f"w{started}"))
            started += 1
        victim = writers.popleft()
        assert victim.stdout.readline() == "ready\n"
        time.sleep(dice.uniform(0.0, 0.01))  # another moment of its writes each time
        victim.kill()
        victim.communicate(timeout=_BUSY_TIMEOUT)
        before, lines = lines, check(store)
        assert lines >= before, "no line is lost"
    close_store(store)
    assert lines >= KILLS, "each wrote one"


@pytest.mark.parametrize(
    "point, lines",
    [
        ("before the line", 1),
        ("in the line", 1),
        ("before the sync", 2),
        ("before the anchor", 2),
        ("after the anchor", 2),
    ],
)
def test_a_kill_at_any_point_of_a_write_is_no_tampering(
    tmp_path: Path, point: str, lines: int
) -> None:
    folder = tmp_path / "state"
    store = open_store(folder)

    def write(where: str) -> int:
        process = PythonProcess(_KILLED_AT, folder, where)
        process.communicate(timeout=_BUSY_TIMEOUT)
        return process.wait()

    assert write("nowhere") == 0
    assert write(point) == -9
    assert check(store) == lines
    assert write("nowhere") == 0, "the next process goes on"
    assert check(store) == lines + 1
    close_store(store)
