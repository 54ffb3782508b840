"""``maestro watch``."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from maestro_hive.admin.folder import reading
from maestro_hive.admin.watch import RunsWatch
from maestro_hive.cli.watch import pause_seconds
from tests.cli.processes import (
    complaint,
    in_terminal_process,
    maestro,
    resize,
    start_maestro,
)
from tests.cli.sample_runs import (
    RUN,
    active_run,
    add,
    asks,
    child_ends,
    crowded,
    ends,
    executed,
    starts,
    workflow,
)
from tests.timing import least

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cli.processes import Seen
    from tests.python_processes import PythonProcess

#: What enters and leaves the screen that is gone afterwards.
_SCREEN, _SCREEN_LEFT = "\x1b[?1049h", "\x1b[?1049l"


@contextlib.contextmanager
def watching(folder: Path, *words: str) -> Iterator[PythonProcess]:
    """Watch in a pipe; it is killed if it has not ended."""
    with start_maestro("watch", *words, "--store", folder) as process:
        try:
            yield process
        finally:
            process.kill()  # no effect if it has ended


def line_of(process: PythonProcess) -> list[str]:
    """Return the next line that it prints, without its time."""
    return process.stdout.readline().rstrip("\n").split("\t")[1:]


def text_of(seen: Seen) -> tuple[str, str]:
    """Return what was drawn on the screen, and what stayed, without colours."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", seen.text)
    drawn, left, stayed = plain.partition(_SCREEN_LEFT)
    assert left
    return drawn.partition(_SCREEN)[2], stayed


# --- in a pipe -----------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["success", "failed", "cancelled"])
def test_a_run_that_is_over_is_watched_to_its_end_at_once(tmp_path: Path, status: str) -> None:
    workflow(tmp_path, "child", "success", ends("success"), parent="top")
    workflow(tmp_path, "top", status, starts("child"), child_ends("child", "success"), ends(status))
    done = maestro("watch", "top", "--store", tmp_path)
    assert done.returncode == 0
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert [row[2] for row in rows] == ["child"] * 2 + ["top"] * 4
    assert rows[-1][3] == f"run ended: {status}"


def test_a_run_without_a_workflow_is_over_when_no_process_has_it_open(tmp_path: Path) -> None:
    with active_run(tmp_path) as process, watching(tmp_path, RUN) as watcher:
        assert line_of(watcher)[1] == RUN
        process.finish()
        rest, _ = watcher.communicate(timeout=60)
    assert "attempt 1 completed" in rest
    assert watcher.returncode == 0
    assert maestro("watch", RUN, "--store", executed(tmp_path / "failed")).returncode == 0


def test_a_run_that_nobody_executes_is_watched_on(tmp_path: Path) -> None:
    workflow(tmp_path, "asking", "waiting", asks("approve"))
    with watching(tmp_path, "asking") as watcher:
        assert line_of(watcher)[2] == "workflow build started"
        assert "waiting for an answer to approve" in line_of(watcher)[2]
        add(tmp_path, "asking", ends("success"), status="success")
        assert line_of(watcher)[2] == "run ended: success"
        assert watcher.communicate(timeout=60)[0] == ""
    assert watcher.returncode == 0


def test_changes_of_runs_are_lines_until_ctrl_c(tmp_path: Path) -> None:
    workflow(tmp_path, "old", "success", ends("success"))
    workflow(tmp_path, "asking", "waiting", asks("approve"))
    with watching(tmp_path) as watcher:
        assert line_of(watcher) == ["asking", "build", "waiting", "approve"]
        workflow(tmp_path, "new", "failed", ends("failed"))
        assert line_of(watcher) == ["new", "build", "failed", ""]
        add(tmp_path, "asking", ends("success"), status="success")
        assert line_of(watcher) == ["asking", "build", "success", ""]
        watcher.send_signal(signal.SIGINT)
        rest, message = watcher.communicate(timeout=60)
    assert (rest, watcher.returncode) == ("", 130)
    assert message.splitlines()[-1] == "maestro: interrupted"
    assert "Traceback" not in message


def test_wrong_use_is_one_sentence(tmp_path: Path) -> None:
    workflow(tmp_path, "checkout", "success", ends("success"))
    message = complaint(maestro("watch", "chekout", "--store", tmp_path), code=2)
    assert "Did you mean 'checkout'?" in message
    complaint(maestro("watch", "--store", tmp_path / "nothing"))
    assert not (tmp_path / "nothing").exists()


# --- on a screen ---------------------------------------------------------------------------------


def test_a_screen_shows_a_run_and_its_end_stays(tmp_path: Path) -> None:
    workflow(tmp_path, "part", "waiting", asks("approve"), parent="top", name="part")
    workflow(tmp_path, "top", "waiting", starts("part"), asks("amount"))

    def end(_: int) -> None:
        add(tmp_path, "top", ends("success"), status="success")

    seen = in_terminal_process(
        "watch", "top", "--store", tmp_path, typed={"maestro answer top": end}, columns=120
    )
    assert seen.returncode == 0
    drawn, stayed = text_of(seen)
    assert "run top: waiting" in drawn
    assert "waiting for amount (anything) since " in drawn
    assert stayed.splitlines()[0].strip() == "run top: success"
    (child,) = [line.split() for line in stayed.splitlines() if line.startswith("part ")]
    assert (child[:3], child[-1]) == (["part", "part", "waiting"], "approve")


def test_a_run_with_steps_shows_attempts_and_tokens(tmp_path: Path) -> None:
    seen = in_terminal_process("watch", RUN, "--store", executed(tmp_path), columns=120)
    _, stayed = text_of(seen)
    assert "2 steps, 2,400 tokens" in stayed
    assert re.search(r"2 +review +developer +failed +3 \(3 failed\)", stayed)


def test_a_screen_fits_again_after_the_terminal_was_resized(tmp_path: Path) -> None:
    for number in range(30):
        workflow(tmp_path, f"run-{number}", "waiting", asks(f"question-{number}"))
    seen = in_terminal_process(
        "watch",
        "--store",
        tmp_path,
        typed={"question-29 ": lambda screen: resize(screen, 12, 44), "… and 22 more": "\x03"},
        columns=120,
    )
    assert seen.returncode == 130
    drawn, stayed = text_of(seen)
    assert "30 waiting in " in drawn
    last = drawn.rpartition("\x1b[H")[2].partition("^C")[0].splitlines()
    assert max(map(len, last)) <= 44
    assert len(last) <= 12
    assert last[2].split() == ["run", "workflow", "status", "waits", "for"]
    assert last[3].split() == ["run-29", "build", "waiting", "question-29"]
    assert "maestro: interrupted" in stayed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_screen_that_a_signal_ends_leaves_the_terminal_as_it_was(
    tmp_path: Path, number: signal.Signals
) -> None:
    workflow(tmp_path, "top", "waiting", asks("amount"))

    def end(screen: int) -> None:
        os.killpg(os.tcgetpgrp(screen), number)

    seen = in_terminal_process("watch", "top", "--store", tmp_path, typed={"amount": end})
    assert seen.returncode == 128 + number
    assert seen.text.count("\x1b[?1049h") == seen.text.count("\x1b[?1049l") == 1
    assert seen.text.count("\x1b[?25l") == seen.text.count("\x1b[?25h") == 1


def test_a_terminal_that_cannot_be_drawn_on_gets_lines(tmp_path: Path) -> None:
    workflow(tmp_path, "done", "success", ends("success"))
    for options, term in ((["--plain"], "xterm-256color"), ([], "dumb")):
        seen = in_terminal_process("watch", "done", *options, "--store", tmp_path, TERM=term)
        assert seen.returncode == 0
        assert "done  run ended: success" in seen.text
        assert _SCREEN not in seen.text


def test_text_of_a_run_cannot_control_the_screen(tmp_path: Path) -> None:
    error = {"type": "E", "message": "\x1b]0;gotcha\x07"}
    workflow(tmp_path, "bad", "failed", ends("failed", error=error))
    seen = in_terminal_process("watch", "bad", "--store", tmp_path)
    assert "gotcha" in seen.text
    assert "\x1b]0;" not in seen.text


# --- cost ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cost", [0.001, 0.01, 0.05, 0.15])
def test_looking_where_nothing_happens_takes_less_than_a_fiftieth_of_the_time(cost: float) -> None:
    assert cost / pause_seconds(cost, changed=False) < 0.02
    assert pause_seconds(cost, changed=True) < 1


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_fifty_thousand_runs_where_nothing_happens_are_seldom_looked_at(tmp_path: Path) -> None:
    crowded(tmp_path)
    workflow(tmp_path, "asking", "waiting", asks("approve"))
    with watching(tmp_path) as watcher:
        assert line_of(watcher)[0] == "asking"

        def used_in_two_seconds() -> float:
            before = cpu_seconds(watcher.pid)
            time.sleep(2.0)
            return cpu_seconds(watcher.pid) - before

        time.sleep(0.5)  # the first look is not what it costs to go on
        assert least(used_in_two_seconds, 0.2) < 0.2  # of one look: 0.07


# --- which runs ----------------------------------------------------------------------------------


def test_unfinished_runs_come_first_however_old_they_are(tmp_path: Path) -> None:
    workflow(tmp_path, "asking", "waiting", asks("approve"))
    workflow(tmp_path, "left", "running")
    workflow(tmp_path, "planned", "pending")
    for number in range(5):
        workflow(tmp_path, f"done-{number}", "success", ends("success"))
        workflow(tmp_path, f"part-{number}", "failed", ends("failed"), parent=f"done-{number}")
    with active_run(tmp_path, of_workflow=True), reading(tmp_path) as reader:
        found = RunsWatch(reader).overview(5)
    assert [run.run_id for run in found.runs] == [RUN, "asking", "planned", "left", "done-4"]
    assert found.counts == {"pending": 1, "running": 1, "waiting": 1, "success": 5, "stopped": 1}
    assert found.total == 9


def test_a_run_is_told_of_once_for_each_change(tmp_path: Path) -> None:
    workflow(tmp_path, "asking", "waiting", asks("approve"))
    with reading(tmp_path) as reader:
        watched = RunsWatch(reader)

        def told() -> list[tuple[str, str]]:
            return [(run.run_id, run.status) for run in watched.changes(3)]

        assert told() == [("asking", "waiting")]
        assert told() == []
        for number in range(5):  # so many that the first one is no longer among the newest
            workflow(tmp_path, f"done-{number}", "success", ends("success"))
        assert told() == [("done-4", "success"), ("done-3", "success")]
        add(tmp_path, "asking", ends("failed"), status="failed")
        assert told() == [("asking", "failed")]
        assert told() == []
