"""``maestro demo``: in a terminal, in a pipe, stopped in the middle, and its proof that can fail."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from docs.generate import pictures
from docs.generate.pages import PICTURES
from maestro_hive.cli import demo
from maestro_hive.demo.proof import Start, completions, contradictions, read_ledger
from maestro_hive.demo.session import Session
from tests.cli.processes import (
    answer,
    complaint,
    in_terminal_process,
    maestro,
    start_maestro,
)
from tests.docs.test_documents import start_forked
from tests.tables import for_each

if TYPE_CHECKING:
    from collections.abc import Callable

TASKS = ("DESIGN", "BACKEND", "FRONTEND", "DOCS", "TESTS", "REVIEW")
LEDGER = [
    *("BACKEND 1", "BACKEND 2", "DESIGN 1", "DOCS 1", "DOCS 2"),
    *("FRONTEND 1", "FRONTEND 2", "REVIEW 1", "TESTS 1"),
]


#: It takes a quarter of a minute, and more on a busy machine; in seconds.
_PATIENCE = 240


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the demonstration makes its temporary folder."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def processes_in(place: Path) -> list[str]:
    """Return the processes that work in a folder below a place."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cwd"):
        try:
            where = str(each.readlink())
        except OSError:
            continue
        if where.startswith(str(place)):
            found.append(f"{each.parent.name} in {where}")
    return found


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def nothing_is_left(place: Path) -> bool:
    return not processes_in(place) and not list(place.iterdir())


# --- all of it ------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_in_a_terminal_it_shows_what_the_picture_shows_and_leaves_nothing(place: Path) -> None:
    printed = pictures.demonstrated(place, start_forked)
    picture = (PICTURES / "demo.svg").read_text(encoding="utf-8")
    assert "Proven: 6 tasks are complete" in printed
    assert pictures.shows(picture, printed, in_order=False), f"type `make docs`: not of\n{printed}"
    wait_until(lambda: nothing_is_left(place))


@pytest.mark.timeout(300)
def test_in_a_pipe_it_prints_plain_lines_whatever_the_user_has_set_and_can_keep_its_folder(
    place: Path,
) -> None:
    process = start_maestro(
        *("demo", "--keep"),
        cwd=place,
        MAESTRO_L1_MAX_ATTEMPTS="1",
        MAESTRO_STATE_DIR=str(place / "not here"),
    )
    out, err = process.communicate(_PATIENCE)
    assert (process.wait(), err) == (0, ""), out + err
    assert "\x1b" not in out
    lines = out.splitlines()
    assert any("scripted" in line for line in lines)
    assert sum("Proven" in line for line in lines) == 1
    assert any(line.startswith("$ kill -9 ") for line in lines)

    header = next(line for line in lines if line.startswith("task  "))
    rows = lines[lines.index(header) + 1 :][: len(TASKS)]
    assert "attempts before the kill  and after it  complete in the journal" in header
    assert sorted(row.split()[0] for row in rows) == sorted(TASKS)
    assert {row.index("by attempt") for row in rows} == {header.index("complete in")}

    (folder,) = place.iterdir()
    assert f"cd {folder / 'project'}" in lines
    assert sorted((folder / "ledger.txt").read_text().splitlines()) == LEDGER
    assert "Approved" in (folder / "project" / "REVIEW.md").read_text()
    shown = answer(maestro("status", "shortener", "--store", folder / "state", "--json"))
    assert shown["run"]["status"] == "success"
    assert not processes_in(place)

    # The proof is of this ledger: another line in it, and it does not hold.
    session = Session(folder)
    completed = completions(session.events())
    assert contradictions(session.tasks(), session.ledger(), completed) == []
    with (folder / "ledger.txt").open("a") as ledger:
        ledger.write("BACKEND 3\n")
    assert contradictions(session.tasks(), session.ledger(), completed) == [
        "BACKEND was started again in attempt 3, and attempt 2 had completed it"
    ]


@for_each(
    "on_path, session, typed",
    [
        (True, None, "maestro init "),
        (False, None, "env/bin/maestro init "),
        (False, Session(Path("/demo")), "{}/env/bin/maestro init "),
    ],
)
def test_what_is_next_can_be_typed_although_the_command_is_not_on_path(
    on_path: bool,
    session: Session | None,
    typed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program = tmp_path / "env" / "bin" / "maestro"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    monkeypatch.setenv("PATH", str(program.parent if on_path else tmp_path))
    demo._show_what_is_next(session)
    assert typed.format(tmp_path) in [
        line[: len(typed.format(tmp_path))] for line in capsys.readouterr().out.splitlines()
    ]


# --- stopped in the middle ------------------------------------------------------------------------


def test_control_c_leaves_no_process_and_no_folder(place: Path) -> None:
    seen = in_terminal_process(
        "demo", typed={"BACKEND: started": "\x03"}, TMPDIR=str(place), columns=100
    )
    assert seen.returncode == 130, seen.text
    assert "Proven" not in seen.text
    wait_until(lambda: nothing_is_left(place))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_process_and_no_folder(place: Path, number: signal.Signals) -> None:
    process = start_maestro("demo", cwd=place.parent)
    wait_until(lambda: any(place.glob("*/project/personas.py")) and processes_in(place))
    os.kill(process.pid, number)
    process.communicate(60)
    assert process.wait() == 128 + number
    wait_until(lambda: nothing_is_left(place))


def test_a_demonstration_that_is_killed_takes_its_engine_with_it(place: Path) -> None:
    process = start_maestro("demo", cwd=place.parent)
    # With the journal there, its engine executes the run.
    wait_until(lambda: any(place.glob("*/state/journal.db")) and processes_in(place))
    process.kill()
    process.communicate(60)
    wait_until(lambda: not processes_in(place))


# --- what cannot be -------------------------------------------------------------------------------


def test_a_proof_that_fails_is_an_error_that_says_why(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    completed = dict.fromkeys(TASKS, 1)
    ledger = [Start(task, 1) for task in TASKS]
    doubled = contradictions(TASKS, [*ledger, Start("DOCS", 1)], completed)
    monkeypatch.setattr(demo, "_shown", lambda session: doubled)
    done = maestro("demo")
    assert done.returncode == 1
    assert "DOCS was started 2 times in attempt 1" in done.stderr
    assert "the ledger contradicts the journal" in done.stderr
    assert "Next" not in done.stdout
    assert not list(place.iterdir())


@for_each(
    "ledger, completed, found",
    [
        ("A 1", {"A": 1}, []),
        ("A 1\nA 2", {"A": 2}, []),
        ("A 1\nA 1", {"A": 1}, ["A was started 2 times in attempt 1"]),
        (
            "A 1\nA 2",
            {"A": 1},
            ["A was started again in attempt 2, and attempt 1 had completed it"],
        ),
        ("A 1", {}, ["A is not complete in the journal"]),
        ("", {"A": 1}, ["A is complete by attempt 1, which the ledger does not have"]),
        ("A 1\nB 1", {"A": 1}, ["B is in the ledger, and not in the graph"]),
    ],
)
def test_the_ledger_and_the_journal_are_compared_start_by_start(
    ledger: str, completed: dict[str, int], found: list[str]
) -> None:
    assert contradictions(["A"], read_ledger(ledger), completed) == found


def test_a_state_folder_for_the_demonstration_is_refused(tmp_path: Path) -> None:
    said = complaint(maestro("demo", "--store", tmp_path), 2)
    assert "has a state folder of its own" in said
