"""What goes in and out: closed streams, bytes that are no text, characters that control terminals."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.cli.processes import COMMAND, environment, in_terminal, maestro
from tests.cli.sample_runs import asks, ends, workflow

if TYPE_CHECKING:
    from pathlib import Path

HOSTILE = "a\x9b31m\u202eb\u2028c\x7f\u061c"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    workflow(tmp_path / "state", "done", "success", ends("success", HOSTILE))
    workflow(tmp_path / "state", "asking", "waiting", asks())
    return tmp_path / "state"


# --- closed streams ---


ALL = "<&- >&- 2>&-"


@pytest.mark.parametrize(
    "words, closed",
    [
        *(("runs", closed) for closed in ("<&-", ">&-", "2>&-", ALL)),
        *(("answer asking approve", closed) for closed in ("<&-", "2>&-")),
        ("cancel asking", ">&-"),
        ("--help", ALL),
    ],
)
def test_a_stream_that_is_closed_is_an_empty_one(folder: Path, words: str, closed: str) -> None:
    command = ["bash", "-c", f'exec "$@" {closed}', "bash", *COMMAND, *words.split()]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env=environment(MAESTRO_STATE_DIR=str(folder)),
    )
    assert done.returncode == (0 if words in ("runs", "--help") else 2), done
    assert "Traceback" not in done.stderr
    assert "internal error" not in done.stderr
    if words == "runs":
        assert bool(done.stdout) == (">&-" not in closed.split())


# --- what is typed ---


@pytest.mark.parametrize("words", [["show", b"\xff"], ["--store", b"a\xff", "runs"], [b"\xff"]])
def test_bytes_that_are_no_text_are_wrong_use(words: list[str | bytes]) -> None:
    done = subprocess.run([*COMMAND, *words], capture_output=True, check=False, env=environment())
    assert done.returncode == 2
    assert done.stderr.decode().startswith("maestro: ")
    assert b"UTF-8" in done.stderr
    assert b"internal error" not in done.stderr


# --- what is printed ---


@pytest.mark.parametrize("words", [["show", "done"], ["events", "evil"], ["runs"]])
def test_json_controls_no_terminal_and_means_the_same(folder: Path, words: list[str]) -> None:
    workflow(folder, "evil", "failed", ends("failed", error={"type": HOSTILE, "message": HOSTILE}))
    workflow(folder, "asks", "waiting", asks(HOSTILE))
    done = maestro(*words, "--json", "--store", folder)
    assert not set(done.stdout) & set(HOSTILE) - set("abc31m")
    lines = done.stdout.splitlines() if "events" in words else [done.stdout]
    assert HOSTILE in _texts([json.loads(line) for line in lines])


def _texts(value: object) -> list[str]:
    match value:
        case dict():
            return [text for each in value.values() for text in _texts(each)]
        case list():
            return [text for each in value for text in _texts(each)]
        case _:
            return [str(value)]


@pytest.mark.parametrize("words", [["runs"], ["show", "done"], ["runs", "--help"]])
def test_a_terminal_that_knows_no_escapes_gets_none(folder: Path, words: list[str]) -> None:
    seen = in_terminal(*words, "--store", folder, TERM="dumb")
    assert seen.returncode == 0
    assert "\x1b" not in seen.text
    if words == ["runs"]:
        assert "\x1b" in in_terminal(*words, "--store", folder).text
