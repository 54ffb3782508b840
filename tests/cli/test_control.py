"""``maestro answer``, ``retry``, ``cancel`` and ``fork``, as processes, on runs of other processes."""

from __future__ import annotations

import json
import textwrap
import time
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import Hive
from maestro_hive.hive.runs import read_run
from maestro_hive.maestro.state.projections import facts_of
from maestro_hive.maestro.state.records import EntryKind
from maestro_hive.maestro.state.views import open_waits
from tests.cli.processes import answer, complaint, in_terminal_process, maestro
from tests.cli.sample_runs import asks, entry, workflow
from tests.python_processes import PythonProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_PROGRAM = textwrap.dedent("""
    import asyncio, sys
    from dataclasses import dataclass
    from datetime import date
    from enum import Enum
    from pathlib import Path
    from maestro_hive import ExecutionConfig, Hive
    from maestro_hive.unified_execution import Level1Config, Level2Config

    folder = Path(sys.argv[1])
    config = ExecutionConfig(
        level1=Level1Config(base_delay_seconds=0), level2=Level2Config(base_delay_seconds=0)
    )
    hive = Hive(folder, config)

    @dataclass
    class Plan:
        size: int
        note: str = ""

    class Colour(Enum):
        RED = "r"
        BLUE = "b"

    @hive.step(max_attempts=2, rounds=2)
    async def build(part, factor=1):
        print("building", part, flush=True)
        if (folder.parent / "broken").exists() and part == "b":
            raise ValueError("b does not fit")
        return part * factor

    @hive.workflow
    async def assemble(factor=1):
        return [await build("a"), await build("b", factor), await build("c")]

    @hive.workflow
    async def typed(plan: Plan, on: date, colour: Colour = Colour.RED, *, tags: set[str] = frozenset()):
        return [plan, on, colour, tags]

    @hive.workflow
    async def ask():
        plan = await hive.wait_for("plan", type=Plan)
        return [plan.size, plan.note, await hive.wait_for("approve", type=bool)]

    async def main():
        what, run_id = sys.argv[2:]
        if what == "resume":
            print(await hive.resume(run_id))
        elif what == "typed":
            print(await hive.run(typed, Plan(1), date(2030, 1, 2), run_id=run_id))
        else:
            print(await hive.run({"ask": ask, "assemble": assemble}[what], run_id=run_id))

    asyncio.run(main())
""")


class Programs:
    """A state folder, and programs that use it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.folder = place / "state"
        self._started: list[PythonProcess] = []
        self._hive: Hive | None = None

    def start(self, what: str, run_id: str) -> PythonProcess:
        process = PythonProcess(_PROGRAM, self.folder, what, run_id, stderr=True)
        self._started.append(process)
        return process

    def run(self, what: str, run_id: str) -> tuple[int, str, str]:
        process = self.start(what, run_id)
        out, err = process.communicate(timeout=60)
        return process.wait(), out, err

    def maestro(self, *arguments: str) -> Any:
        return maestro(*arguments, "--store", self.folder)

    def status(self, run_id: str) -> str:
        """Return where a run stands, as ``maestro runs`` says; without a process for each look."""
        if self._hive is None and (self.folder / "journal.db").exists():
            self._hive = Hive(self.folder)
        runs = self._hive.runs() if self._hive is not None else []
        return next((info.status for info in runs if info.run_id == run_id), "none")

    def asks(self, run_id: str, name: str) -> bool:
        """Return whether a run waits for this answer just now."""
        if self.status(run_id) != "waiting" or self._hive is None:
            return False
        waits = open_waits(read_run(self._hive._open(), run_id))
        return name in [facts_of(entry)["name"] for entry in waits]

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, "it takes too long"
            time.sleep(0.05)

    def end(self) -> None:
        if self._hive is not None:
            self._hive.close()
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.communicate()


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    made = Programs(tmp_path)
    yield made
    made.end()


def test_an_active_run_is_answered_and_a_wrong_answer_changes_nothing(programs: Programs) -> None:
    life = programs.start("ask", "r")
    programs.until(lambda: programs.status("r") == "waiting")
    for bad in ["large", "3", '{"size": "x"}', '{"note": "y"}', '{"size": 1, "colour": 2}']:
        assert "plan" in complaint(programs.maestro("answer", "r", "plan", bad), code=2)
    done = programs.maestro("answer", "r", "plan", '{"size": 3}')
    assert done.returncode == 0, done.stderr
    programs.until(lambda: programs.asks("r", "approve"))
    assert "yes or no" in complaint(programs.maestro("answer", "r", "approve", "perhaps"), code=2)
    assert programs.maestro("answer", "r", "approve", "yes").returncode == 0
    out, err = life.communicate(timeout=60)
    assert (life.returncode, out) == (0, "[3, '', True]\n"), err
    events = programs.maestro("events", "r").stdout
    assert "answered" in events


def test_a_run_that_no_process_executes_is_answered_once_and_continues(programs: Programs) -> None:
    life = programs.start("ask", "r")
    programs.until(lambda: programs.status("r") == "waiting")
    life.kill()
    life.communicate()
    assert programs.maestro("answer", "r", "plan", '{"size": 1, "note": "n"}').returncode == 0
    again = complaint(programs.maestro("answer", "r", "plan", '{"size": 2}'), code=2)
    assert "has its answer to 'plan' already" in again
    assert programs.maestro("answer", "r", "approve", "no", "--early").returncode == 0
    assert programs.run("ask", "r")[:2] == (0, "[1, 'n', False]\n")


def test_an_unknown_question_or_run_is_named(programs: Programs) -> None:
    life = programs.start("ask", "r")
    programs.until(lambda: programs.status("r") == "waiting")
    message = complaint(programs.maestro("answer", "r", "colour", "red"), code=2)
    assert "does not wait for 'colour'; it waits for 'plan'" in message
    assert "There is no run 'q'" in complaint(programs.maestro("answer", "q", "plan", "1"), code=2)
    message = complaint(programs.maestro("answer", "r", "plan"), code=2)
    assert "an object with" in message
    life.kill()
    life.communicate()


def test_the_answer_is_asked_for_in_a_terminal(programs: Programs) -> None:
    life = programs.start("ask", "r")
    programs.until(lambda: programs.status("r") == "waiting")
    seen = in_terminal_process(
        "answer", "r", "plan", "--store", programs.folder, typed={"plan (": '{"size": 5}\r'}
    )
    assert seen.returncode == 0, seen.text
    programs.maestro("answer", "r", "approve", "y", "--early")
    assert life.communicate(timeout=60)[0] == "[5, '', True]\n"


@pytest.mark.parametrize("number", ["-5", "-0.5", "-1e3"])
@pytest.mark.parametrize("order", ["last", "first", "marked"])
def test_an_answer_may_be_a_negative_number(tmp_path: Path, number: str, order: str) -> None:
    question = entry(EntryKind.WAIT_STARTED, name="n", what="answer", shape={"type": "number"})
    workflow(tmp_path, "r", "waiting", question)
    options = ["--store", str(tmp_path), "--by", "me"]
    words = {
        "last": ["r", "n", number, *options],
        "first": [*options, "r", "n", number],
        "marked": [*options, "r", "n", "--", number],
    }[order]
    done = maestro("answer", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"run r has its answer to n: {number}\n"


def test_what_looks_like_an_option_and_is_no_number_is_still_wrong(tmp_path: Path) -> None:
    workflow(tmp_path, "r", "waiting", asks("n"))
    message = complaint(maestro("answer", "r", "n", "--earyl", "--store", tmp_path), code=2)
    assert "--earyl" in message


def test_a_failed_run_is_retried_and_its_completed_steps_are_not(programs: Programs) -> None:
    (programs.place / "broken").touch()
    code, out, err = programs.run("assemble", "r")
    assert (code, out) == (1, "building a\nbuilding b\nbuilding b\n")
    assert "RunFailedError: run 'r' failed: ValueError" in err
    assert programs.run("assemble", "r")[1] == ""
    (programs.place / "broken").unlink()
    assert programs.maestro("retry", "r").returncode == 0
    assert programs.status("r") == "pending"
    assert programs.run("assemble", "r")[:2] == (0, "building b\nbuilding c\n['a', 'b', 'c']\n")
    assert "has succeeded" in complaint(programs.maestro("retry", "r"), code=2)


def test_retrying_a_run_that_is_being_executed_is_refused(programs: Programs) -> None:
    life = programs.start("ask", "r")
    programs.until(lambda: programs.status("r") == "waiting")
    assert f"process {life.pid}" in complaint(programs.maestro("retry", "r"))
    life.kill()
    life.communicate()


def test_an_active_run_is_cancelled_after_asking(programs: Programs) -> None:
    life = programs.start("ask", "r")
    programs.until(lambda: programs.status("r") == "waiting")
    assert "stdin is not a terminal" in complaint(programs.maestro("cancel", "r"), code=2)
    seen = in_terminal_process("cancel", "r", "--store", programs.folder, typed={"[y/N]": "n\r"})
    assert seen.returncode == 1
    assert programs.status("r") == "waiting"
    done = programs.maestro("cancel", "r", "--reason", "wrong page", "--yes")
    assert done.returncode == 0, done.stderr
    _, err = life.communicate(timeout=60)
    assert "RunCancelledError: run 'r' was cancelled (wrong page)" in err
    assert programs.status("r") == "cancelled"
    assert "is over already" in programs.maestro("cancel", "r", "--yes").stdout


def test_a_run_that_no_process_executes_is_cancelled_at_once(programs: Programs) -> None:
    life = programs.start("ask", "r")
    programs.until(lambda: programs.status("r") == "waiting")
    life.kill()
    life.communicate()
    assert "run r is cancelled" in programs.maestro("cancel", "r", "--yes").stdout
    assert programs.status("r") == "cancelled"


def test_a_fork_runs_again_only_what_it_must(programs: Programs) -> None:
    programs.run("assemble", "r")
    done = programs.maestro("fork", "r", "--from-step", "build#2", "--set", "factor=3", "--as", "s")
    assert done.returncode == 0, done.stderr
    assert programs.status("s") == "pending"
    assert programs.run("resume", "s")[:2] == (0, "building b\n['a', 'bbb', 'c']\n")
    shown = answer(programs.maestro("show", "s", "--json"))
    assert json.dumps(shown)


def test_runs_and_show_agree(programs: Programs) -> None:
    def of_both(run_id: str) -> tuple[Any, Any]:
        runs = answer(programs.maestro("runs", "--json"))["runs"]
        (listed,) = [run for run in runs if run["run_id"] == run_id]
        shown = answer(programs.maestro("show", run_id, "--json"))["run"]
        names = [[wait["name"] for wait in run["waits_for"]] for run in (listed, shown)]
        return (listed["status"], names[0]), (shown["status"], names[1])

    programs.run("assemble", "done")
    before = answer(programs.maestro("show", "done", "--json"))["run"]
    programs.maestro("fork", "done", "--from-step", "build#2", "--as", "forked")
    listed, shown = of_both("forked")
    assert listed == shown
    forked = answer(programs.maestro("show", "forked", "--json"))["run"]
    assert forked["started_at"] > before["updated_at"]
    assert forked["updated_at"] >= forked["started_at"]
    life = programs.start("ask", "asking")
    programs.until(lambda: programs.status("asking") == "waiting")
    life.kill()
    life.communicate()
    assert of_both("asking") == (("waiting", ["plan"]), ("waiting", ["plan"]))
    assert programs.maestro("retry", "asking").returncode == 0
    listed, shown = of_both("asking")
    assert listed == shown


def test_a_setting_that_is_no_json_of_ours_is_text(programs: Programs) -> None:
    programs.run("assemble", "r")
    for number, text in enumerate(["9" * 5000, "[" * 100_000, "NaN", "-Infinity", "1e999", "a b"]):
        done = programs.maestro("fork", "r", "--set", f"factor={text}", "--as", f"s{number}")
        assert done.returncode == 0, done.stderr[-300:]
        shown = answer(programs.maestro("show", f"s{number}", "--json"))["run"]
        assert text in json.dumps(shown["input"])


def test_a_setting_is_of_the_type_of_its_parameter(programs: Programs) -> None:
    programs.run("typed", "r")
    for number, setting, made in [
        (1, 'plan={"size": 7}', "Plan(size=7, note='')"),
        (2, "on=2031-05-06", "datetime.date(2031, 5, 6)"),
        (3, "colour=blue", "<Colour.BLUE: 'b'>"),
        (4, "colour=b", "<Colour.BLUE: 'b'>"),
    ]:
        done = programs.maestro("fork", "r", "--set", setting, "--as", f"s{number}")
        assert done.returncode == 0, done.stderr
        assert made in programs.run("resume", f"s{number}")[1]
    for setting, message in [
        ("plan=big", "the parameter 'plan' of typed must be an object with"),
        (
            'plan={"size": "big"}',
            "the parameter 'plan' of typed.size is 'big', and must be a whole",
        ),
        ("on=soon", "the parameter 'on' of typed is 'soon', and must be a date, as 2030-01-31"),
        ("colour=green", "is 'green', and must be one of: RED, BLUE"),
        (
            "tags=[1]",
            "the parameter 'tags' of typed is of the type set[str], which cannot be typed",
        ),
    ]:
        done = programs.maestro("fork", "r", "--set", setting, "--as", "wrong")
        assert message in complaint(done, code=2)
    assert programs.status("wrong") == "none"


def test_an_answer_that_does_not_fit_is_explained_and_asked_for_again(programs: Programs) -> None:
    life = programs.start("ask", "r")
    programs.until(lambda: programs.status("r") == "waiting")
    words = ["answer", "r", "plan", "--store", str(programs.folder)]
    typed = {"plan (": "5\r", "again": '{"size": "x"}\r', "size is": '{"size": 5}\r'}
    seen = in_terminal_process(*words, typed=typed)
    assert seen.returncode == 0, seen.text
    assert seen.text.count("Ctrl+C leaves the question open") == 2
    programs.maestro("answer", "r", "approve", "y", "--early")
    assert life.communicate(timeout=60)[0] == "[5, '', True]\n"


def test_the_question_stays_open_if_no_answer_fits(programs: Programs) -> None:
    life = programs.start("ask", "r")
    programs.until(lambda: programs.status("r") == "waiting")
    words = ["answer", "r", "plan", "--store", str(programs.folder)]
    left = in_terminal_process(*words, typed={"plan (": "5\r", "again": "\x03"})
    assert left.returncode == 130, left.text
    assert programs.asks("r", "plan")
    life.kill()
    life.communicate()


def test_a_fork_that_cannot_be_made_is_an_error_with_the_reason(programs: Programs) -> None:
    programs.run("assemble", "r")
    for arguments, message in [
        (["--from-step", "nail"], "has no step 'nail'; it has: build"),
        (["--set", "colour=1"], "has no parameter colour; it has: factor"),
        (["--set", "factor"], "--set takes NAME=VALUE"),
        (["--as", "r"], "there is a run 'r' already"),
    ]:
        assert message in complaint(programs.maestro("fork", "r", *arguments), code=2)
