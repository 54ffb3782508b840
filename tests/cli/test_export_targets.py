"""Where ``maestro export`` writes: to a file of its own, and over nothing that is no file."""

from __future__ import annotations

import os
import socket
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.cli.processes import COMMAND, complaint, environment, maestro, start_maestro
from tests.cli.sample_runs import RUN, executed

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return executed(tmp_path / "old")


@pytest.mark.parametrize("force", [[], ["--force"]], ids=["unforced", "forced"])
@pytest.mark.parametrize("kind", ["fifo", "link", "dangling", "socket"])
def test_what_is_no_file_is_never_replaced(
    old: Path, tmp_path: Path, kind: str, force: list[str]
) -> None:
    target, other = tmp_path / "there", tmp_path / "other"
    match kind:
        case "fifo":
            os.mkfifo(target)
        case "socket":
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(os.path.relpath(target))  # a path may be too long for one
        case _:
            target.symlink_to(other)
    if kind == "link":
        other.write_text("precious")
    before = target.lstat().st_ino
    message = complaint(maestro("export", RUN, target, *force, "--store", old), code=2)
    assert "is not replaced" in message
    assert target.lstat().st_ino == before
    assert not other.exists() or other.read_text() == "precious"


def test_of_two_exports_to_one_file_one_is_refused(old: Path, tmp_path: Path) -> None:
    target = tmp_path / "there.json"
    started = [
        start_maestro("export", RUN, target, "--with-values", "--store", old) for _ in range(4)
    ]
    for process in started:
        process.communicate(timeout=60)
    assert sorted(process.wait() for process in started) == [0, 2, 2, 2]
    assert maestro("import", target, "--as", "copy", "--store", old).returncode == 0


def test_an_export_that_fails_leaves_no_file(old: Path, tmp_path: Path) -> None:
    target = tmp_path / "there.json"
    code = "ulimit -f 1; trap '' XFSZ; exec \"$@\""
    command = ["bash", "-c", code, "bash", *COMMAND, "export", RUN, str(target)]
    done = subprocess.run(
        [*command, "--store", str(old)], capture_output=True, check=False, env=environment()
    )
    assert done.returncode == 1
    assert not target.exists()
