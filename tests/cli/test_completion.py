"""Completion in a real bash, in a terminal, by the tab key."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from tests.cli.processes import MAIN, in_terminal_process
from tests.cli.sample_runs import asks, workflow
from tests.python_processes import ForkedCommand

if TYPE_CHECKING:
    from pathlib import Path

BASH = shutil.which("bash") or ""

pytestmark = pytest.mark.skipif(not BASH, reason="there is no bash here")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for run in ("tenant:42:alpha", "tenant:43", "plain"):
        workflow(tmp_path / "state", run, "waiting", asks("go"))
    return tmp_path / "state"


LINES = {
    "maestro show tenant:42\t": "maestro show tenant:42:alpha",
    "maestro show tenant:42:\t": "maestro show tenant:42:alpha",
    "maestro show te\t": "maestro show tenant:4",
    "maestro show tenant:\t3\t": "maestro show tenant:43",
    "maestro show pl\t": "maestro show plain",
    "maestro answer tenant:43 go --ear\t": "maestro answer tenant:43 go --early",
    "maestro purge tenant:43 pl\t": "maestro purge tenant:43 plain",
    "maestro brea\tres\t": "maestro breakers reset",
}


@pytest.mark.parametrize("breaks", ["default", "without the colon"])
def test_run_ids_with_colons_are_completed(folder: Path, breaks: str) -> None:
    """One session of bash, in which each line is completed and then echoed with its number."""
    begin = 'eval "$(maestro completion bash)"; '
    lines = dict(LINES)
    if breaks != "default":
        begin += "COMP_WORDBREAKS=${COMP_WORDBREAKS//:}; "
        lines = {typed: line for typed, line in LINES.items() if "show tenant:" in typed}
    typed, awaited = {"$ ": f"{begin}echo rea''dy\r"}, "ready"
    for number, (keys, line) in enumerate(lines.items()):
        typed[awaited] = f"{keys}\x01echo {number}[\x05]\r"  # to its beginning, to its end
        awaited = f"{number}[{line}"
    typed[awaited] = "exit\r"
    with ForkedCommand("maestro", MAIN) as command:
        seen = in_terminal_process(
            BASH,
            "--norc",
            "--noprofile",
            "-i",
            program="os.execv(sys.argv[1], sys.argv[1:])",
            columns=200,
            typed=typed,
            PS1="$ ",
            MAESTRO_STATE_DIR=str(folder),
            PATH=f"{command.folder}:{os.environ['PATH']}",
            INPUTRC="/dev/null",
        )
    for number, line in enumerate(lines.values()):
        assert f"{number}[{line} ]" in seen.text or f"{number}[{line}]" in seen.text, seen.text
