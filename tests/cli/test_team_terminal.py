"""``maestro run GRAPH`` in a terminal: the table, its size, Ctrl+C once and twice, and its end."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import pytest

from faults.team_kills import is_alive
from maestro_hive.cli import command
from tests.cli.processes import answer, in_terminal
from tests.cli.terminals import Terminal, TerminalScreen
from tests.cli.test_team import _LONG, called, folder, number_in, wait_until, write
from tests.team.conftest import task
from tests.timing import least

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["folder"]

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def in_a_terminal(folder: Path, *words: str, **more: Any) -> Terminal:
    return Terminal(*words, cwd=folder, MAESTRO_STATE_DIR=str(folder.parent / "state"), **more)


def row_of(name: str, text: str) -> list[str]:
    """Return the words of a row of the table; of its last one, if lines above name it, too."""
    return [line.split() for line in text.splitlines() if name in line.split()[:2]][-1]


def results(folder: Path) -> dict[str, str]:
    """Return the status of each task of the run, which must have ended well."""
    run = answer(called(folder, "status", "my-shop", "--json"))["run"]
    assert run["status"] == "success"
    return {each["id"]: each["status"] for each in run["tasks"]}


@pytest.fixture
def graph(folder: Path) -> str:
    """A graph whose second task is executed until the file ``go`` is there."""
    more = [task(f"T{number:02}", after="LONG") for number in range(40)]
    return write(folder, task("A"), task("LONG", _LONG, "A"), *more)


def test_a_terminal_shows_a_table_and_a_line_for_each_task_that_has_ended(folder: Path) -> None:
    graph = write(folder, task("A"), task("LONG", _LONG, "A"), task("LAST", after="LONG"))
    with in_a_terminal(folder, "run", graph, "--workers", "2", columns=100) as terminal:
        text = terminal.wait_for(lambda text: "1/3 tasks" in text and "LONG  running" in text)
        assert re.search(r"^\d\d:\d\d:\d\d  A: complete in \d+ ", text, re.MULTILINE)
        assert "started" not in text
        heading = next(line for line in text.splitlines() if line.startswith("level"))
        assert heading.split() == [
            *("level", "task", "status", "worker", "attempt", "elapsed", "tokens", "title")
        ]
        level, name, status, worker, attempt, *_ = row_of("LONG", text)
        assert (level, name, status, attempt) == ("2", "LONG", "running", "1")
        assert worker in {"1", "2"}
        assert row_of("LAST", text) == ["3", "LAST", "pending", "LAST"]
        (folder / "go").touch()
        assert terminal.ended() == 0
    assert "\x1b[?" not in terminal.written  # nothing that would have to be restored
    after = terminal.screen.text
    assert "level" not in after
    assert after.rstrip().endswith("my shop: 3 of 3 tasks complete (3 executed, 0 reused)")
    assert results(folder) == dict.fromkeys(("A", "LONG", "LAST"), "complete")


def test_the_bar_of_a_run_that_only_waits_says_so_and_no_time(folder: Path) -> None:
    asks = [task(name, "echo which?; exit 3", "A") for name in ("ASK", "MORE")]
    graph = write(folder, task("A", estimate_minutes=5), *asks, task("LAST", after="ASK"))
    with in_a_terminal(folder, "run", graph, columns=120) as terminal:
        text = terminal.wait_for(lambda text: "1/4 tasks, 2 wait for an answer" in text)
        assert "left" not in text.splitlines()[-1]
        terminal.type("\x03")
        assert terminal.ended() == 130


def test_the_table_follows_the_size_of_the_terminal(folder: Path, graph: str) -> None:
    with in_a_terminal(folder, "run", graph, lines=24, columns=100, NO_COLOR="1") as terminal:
        text = terminal.wait_for(
            lambda text: (
                "LONG  running" in text and re.search(r"^… and \d+ pending", text, re.MULTILINE)
            )
        )
        assert row_of("LONG", text)[0] == "2"
        terminal.resize(12, 34)
        text = terminal.wait_for(lambda text: re.search(r"^LONG  running", text, re.MULTILINE))
        assert "level" not in text
        assert len(text.splitlines()) <= 12
        terminal.resize(4, 20)
        terminal.wait_for(lambda text: "LONG" not in text and "1/42 tasks" in text)
        terminal.resize(40, 100)
        text = terminal.wait_for(
            lambda text: (
                re.search(r"^ +2  LONG  running", text, re.MULTILINE) and "1/42 tasks" in text
            )
        )
        assert sum(line.startswith("level") for line in text.splitlines()) == 1  # nothing is left
        assert text.count("1/42 tasks") == 1
        (folder / "go").touch()
        assert terminal.ended() == 0
    assert not _COLOUR.search(terminal.written)
    assert "42 of 42 tasks complete" in terminal.screen.text


def test_ctrl_c_ends_the_tasks_and_the_run_is_resumed(folder: Path, graph: str) -> None:
    with in_a_terminal(folder, "run", graph) as terminal:
        pid = number_in(folder / "pid")
        terminal.wait_for(lambda text: "LONG  running" in text)
        terminal.type("\x03")
        assert terminal.ended() == 130
    assert not is_alive(pid)
    assert terminal.written.endswith(
        "maestro: run 'my-shop' was stopped, 1 of 42 tasks complete; to resume it: maestro resume"
        " my-shop\r\n"
    )
    assert "LONG: stopped" in terminal.screen.text
    (folder / "go").touch()
    assert "(41 executed, 1 reused)" in called(folder, "resume").stdout
    assert set(results(folder).values()) == {"complete"}


#: Within how many seconds Ctrl+C ends a run, whatever its commands do.
_STOP_SECONDS = 5.0


@pytest.mark.timing
def test_ctrl_c_ends_commands_that_ignore_sigterm_within_five_seconds(folder: Path) -> None:
    stubborn = "trap '' TERM INT HUP; echo $$ > pid-$MAESTRO_TASK_ID; while :; do sleep 0.05; done"
    names = [f"T{number}" for number in range(4)]
    graph = write(folder, *[task(name, stubborn) for name in names])

    def stopped() -> float:
        files = [folder / f"pid-{name}" for name in names]
        for each in files:
            each.unlink(missing_ok=True)
        with in_a_terminal(folder, "run", graph, "--workers", "4") as terminal:
            pids = [number_in(each) for each in files]
            typed = time.monotonic()
            terminal.type("\x03")
            assert terminal.ended() == 130
            seconds = time.monotonic() - typed
        assert not any(map(is_alive, pids))
        return seconds

    assert least(stopped, _STOP_SECONDS, tries=3) < _STOP_SECONDS


def test_ctrl_c_twice_stops_at_once_and_the_run_is_resumed(folder: Path) -> None:
    graph = write(folder, task("A"), task("LONG", f"trap '' TERM; {_LONG}", "A"))
    with in_a_terminal(folder, "run", graph) as terminal:
        pid = number_in(folder / "pid")
        terminal.type("\x03")
        terminal.wait_for(lambda text: "stopping: 1 task will be ended" in text)
        terminal.type("\x03")
        assert terminal.ended() == 130
    wait_until(lambda: not is_alive(pid))  # the guard ends it when the engine has ended
    assert terminal.written.endswith("to resume it: maestro resume my-shop\r\n")
    (folder / "go").touch()
    assert "2 of 2 tasks complete (1 executed, 1 reused)" in called(folder, "resume").stdout
    assert set(results(folder).values()) == {"complete"}


def test_a_closed_terminal_stops_the_run_which_is_resumed(folder: Path) -> None:
    graph = write(folder, task("A"), task("LONG", _LONG, "A"))
    with in_a_terminal(folder, "run", graph) as terminal:
        pid = number_in(folder / "pid")
        terminal.wait_for(lambda text: "LONG  running" in text)
        terminal.close()
        assert terminal.ended() == 129
    assert not is_alive(pid)
    shown = answer(called(folder, "status", "my-shop", "--json"))["run"]
    assert (shown["executed"], shown["tasks"][1]["status"]) == (False, "stopped")
    (folder / "go").touch()
    assert "2 of 2 tasks complete (1 executed, 1 reused)" in called(folder, "resume").stdout
    assert set(results(folder).values()) == {"complete"}


def test_with_grace_what_is_executed_may_end_and_nothing_more_starts(
    folder: Path, graph: str
) -> None:
    with in_a_terminal(folder, "run", graph, "--grace", "10m") as terminal:
        number_in(folder / "pid")
        terminal.type("\x03")
        terminal.wait_for(lambda text: "stopping, 1/42 tasks" in text)
        (folder / "go").touch()
        assert terminal.ended() == 130
    assert "was stopped, 2 of 42 tasks complete" in terminal.written
    assert "(40 executed, 2 reused)" in called(folder, "resume").stdout


def test_a_file_that_was_declared_and_not_made_is_named_at_the_end(folder: Path) -> None:
    """Also of a run that failed; not what another task has made, and not what a failed task has not."""
    files = {"create": ["a", "of-b", "sub/none.py", "kept/*.py"]}
    graph = write(
        folder,
        task("A", "touch a; mkdir kept", files=files),
        task("B", "touch of-b", "A", files={"create": ["of-b"]}),
        task("BAD", "test -f mended", "B", files={"create": ["bad"]}),
        retry=1,
    )
    warning = "maestro: declared, and not made: sub/none.py (A)"
    done = called(folder, "run", graph)
    assert done.returncode == command.FAILED
    assert warning in done.stderr.splitlines()
    (folder / "mended").touch()
    assert called(folder, "retry", "my-shop").returncode == command.SUCCESS
    with in_a_terminal(folder, "resume", columns=120) as terminal:
        assert terminal.ended() == command.SUCCESS
    assert f"{warning[:-4]} (A), bad (BAD)" in terminal.screen.text
    assert set(results(folder).values()) == {"complete"}


def test_a_dumb_terminal_gets_plain_lines(folder: Path) -> None:
    graph = write(folder, task("A"))
    state = str(folder.parent / "state")
    seen = in_terminal("run", graph, TERM="dumb", MAESTRO_STATE_DIR=state)
    assert seen.returncode == 0
    assert "\x1b" not in seen.text
    assert "A: started" in seen.text


def test_what_a_persona_prints_is_above_the_table_and_controls_nothing(folder: Path) -> None:
    (folder / "printing.py").write_text(
        "import sys, pathlib, time\n"
        "def say(task):\n"
        "    print('hello \\x1b[2J\\x1b[Hfrom a persona')\n"
        "    sys.stderr.write('not ended')\n"
        "    while not pathlib.Path('go').exists():\n"
        "        time.sleep(0.01)\n"
    )
    graph = write(folder, {"id": "A", "title": "A"}, persona={"python": "printing:say"})
    with in_a_terminal(folder, "run", graph) as terminal:
        text = terminal.wait_for(lambda text: "hello" in text and "A     running" in text)
        assert text.index("hello from a persona") < text.index("A     running")
        (folder / "go").touch()
        assert terminal.ended() == 0
    assert "not ended" in terminal.screen.text


def test_the_reader_of_screens_shows_what_a_terminal_would() -> None:
    screen = TerminalScreen(4, 10)
    for piece in ("one\r\ntwo\r\nthree\r\n", "\x1b[", "2Fdos\x1b[K\r\n\x1b[1mt", "hree\x1b[0m\r\n"):
        screen.feed(piece)
    assert screen.text == "one\ndos\nthree\n"
    screen.feed("a long line that wraps\r\n\x1b[J")
    assert screen.text == "a long lin\ne that wra\nps\n"
    screen.feed("\x1b[H\x1b[2Jnew\a")
    assert (screen.text, screen.bells) == ("new\n\n\n", 1)
