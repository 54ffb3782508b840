"""Completion in a real bash, in a terminal, by the tab key."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.cli.plays import asks, workflow
from tests.cli.processes import in_terminal

BASH = shutil.which("bash") or ""
_LINE_TO_ECHO = "\x01echo [\x05]\r"  # to its beginning, to its end

pytestmark = pytest.mark.skipif(not BASH, reason="there is no bash here")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for run in ("tenant:42:alpha", "tenant:43", "plain"):
        workflow(tmp_path / "state", run, "waiting", asks("go"))
    return tmp_path / "state"


@pytest.mark.parametrize(
    "typed, line",
    [
        ("maestro show tenant:42\t", "maestro show tenant:42:alpha"),
        ("maestro show tenant:42:\t", "maestro show tenant:42:alpha"),
        ("maestro show te\t", "maestro show tenant:4"),
        ("maestro show tenant:\t3\t", "maestro show tenant:43"),
        ("maestro show pl\t", "maestro show plain"),
        ("maestro answer tenant:43 go --ear\t", "maestro answer tenant:43 go --early"),
        ("maestro purge tenant:43 pl\t", "maestro purge tenant:43 plain"),
        ("maestro brea\tres\t", "maestro breakers reset"),
    ],
)
@pytest.mark.parametrize("breaks", ["default", "without the colon"])
def test_a_run_id_with_colons_is_completed(
    folder: Path, typed: str, line: str, breaks: str
) -> None:
    begin = 'eval "$(maestro completion bash)"; '
    if breaks != "default":
        begin += "COMP_WORDBREAKS=${COMP_WORDBREAKS//:}; "
    seen = in_terminal(
        "--norc",
        "--noprofile",
        "-i",
        command=[BASH],
        columns=200,
        typed={
            "$ ": f"{begin}echo rea''dy\r",
            "ready": f"{typed}{_LINE_TO_ECHO}",
            f"[{line}": "exit\r",
        },
        PS1="$ ",
        MAESTRO_STATE_DIR=str(folder),
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        INPUTRC="/dev/null",
    )
    assert f"[{line} ]" in seen.text or f"[{line}]" in seen.text, seen.text
