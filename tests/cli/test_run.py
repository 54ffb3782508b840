"""``maestro run``: a workflow of a module, started and resumed without a script, in real processes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import textwrap
import time
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.cli import command
from tests.cli.processes import complaint, maestro, maestro_process, start_maestro
from tests.tables import for_each

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cli.processes import Done
    from tests.python_processes import PythonProcess

_SECONDS = 60.0

_SHOP = """
import asyncio, datetime, enum, os
from dataclasses import dataclass
from pathlib import Path

from maestro_hive import ExecutionConfig, Hive, current
from maestro_hive.engine.errors import HelpNeeded
from maestro_hive.unified_execution import Level1Config, Level2Config

level1 = Level1Config(base_delay_seconds=0, max_attempts=2)
hive = Hive("state", ExecutionConfig(level1=level1, level2=Level2Config(max_attempts=1)))

def say(*words):
    with Path("said").open("a") as file:
        print(*words, file=file)

class Colour(enum.Enum):
    RED = "red"

@dataclass
class Size:
    wide: int
    high: int = 1

@hive.step
async def cut(feature, size):
    say("cut", feature, current().attempt)
    return f"{feature} x {size!r}"

@hive.step
async def slow(feature):
    say("slow", feature, current().attempt)
    if not Path("go").exists():
        await asyncio.sleep(60)
    return f"{feature} is done"

@hive.workflow
async def build(feature: str, size: int = 1):
    print("printed")
    return await cut(feature, size)

@hive.workflow
async def typed(
    day: datetime.date, size: Size, *numbers: int, colour: Colour = Colour.RED, **rest: bool
):
    return [repr(each) for each in (day, size, numbers, colour, rest)]

@hive.workflow
async def twice(feature: str):
    await cut(feature, 1)
    return {"slow": await slow(feature)}

@hive.step
async def broken(name):
    return {}[name]

@hive.workflow
async def fails():
    await broken("b")

@hive.step(on_ambiguous="ask")
async def pay():
    say("paid")
    if not Path("go").exists():
        os.kill(os.getpid(), 9)

@hive.workflow
async def buys():
    await pay()

@hive.step(escalate=True, max_attempts=1)
async def upload() -> int:
    raise OSError("no route")

@hive.workflow
async def uploads():
    return await upload() + 1

@hive.workflow
async def asks():
    return await hive.wait_for("size", type=int) + 1

@hive.workflow
async def parent():
    return await uploads() + await asks()

@hive.workflow
async def naps():
    try:
        await hive.wait_for("size", type=int, timeout=0.3)
    except TimeoutError:
        return 1

@hive.workflow
async def untyped(anything):
    return anything

@hive.workflow
async def takes(what: Hive): ...

@hive.workflow
async def nothing() -> None: ...

async def plain(): ...
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a package, where it is the current one."""
    package = tmp_path / "shop"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "checkout.py").write_text(_SHOP)
    (tmp_path / "nobud.toml").touch()
    (tmp_path / "unused.py").write_text("raise AssertionError('it is not the module given')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str, **changes: str) -> Done:
    """Run the verb in a process."""
    return maestro_process("run", *words, **changes)


def start(*words: str) -> PythonProcess:
    return start_maestro("run", *words)


def said(folder: Path) -> list[str]:
    path = folder / "said"
    return path.read_text().splitlines() if path.exists() else []


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.01)


# --- arguments and results ---


def test_a_workflow_is_run_and_its_result_printed(shop: Path) -> None:
    done = run("shop.checkout:build", "cart page", "-3")
    assert (done.returncode, done.stdout) == (0, "printed\ncart page x -3\n"), done.stderr
    store, name = done.stderr.splitlines()
    assert store == "store: state (of the workflow's Hive)"
    assert name.startswith("run: build-")


def test_arguments_are_read_as_the_types_of_their_parameters(shop: Path) -> None:
    words = ["2030-01-31", '{"wide": 3}', "-1", "2", "colour=red", "fast=yes", "--json"]
    done = run("shop.checkout:typed", *words, "--run-id", "t")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "store": str(shop / "state"),
        "run_id": "t",
        "result": [
            "datetime.date(2030, 1, 31)",
            "Size(wide=3, high=1)",
            "(-1, 2)",
            "<Colour.RED: 'red'>",
            "{'fast': True}",
        ],
    }


def in_this_process(shop: Path, *words: str, **changes: str) -> Any:
    """Run the verb here, with a module of its own: it stays imported."""
    name = f"shop_{abs(hash(shop))}"
    (shop / f"{name}.py").write_text(_SHOP)
    return maestro("run", *(each.replace("MODULE", name) for each in words), **changes)


@pytest.mark.parametrize(
    "text, result", [("[1, 2]", "[1, 2]"), ("a text", "a text"), ("anything=a=b", "a=b")]
)
def test_an_argument_without_a_type_is_json_or_text(shop: Path, text: str, result: str) -> None:
    done = in_this_process(shop, "MODULE:untyped", text)
    assert (done.returncode, done.stdout) == (0, f"{result}\n"), done.stderr


def test_a_workflow_without_a_result_prints_nothing(shop: Path) -> None:
    done = in_this_process(shop, "MODULE:nothing")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_with_json_only_the_object_is_on_stdout(shop: Path) -> None:
    done = in_this_process(shop, "MODULE:build", "cart", "--json", "--run-id", "r")
    assert json.loads(done.stdout)["result"] == "cart x 1"
    assert "printed\n" in done.stderr


# --- wrong use ---


WRONG = {
    (
        "build",
    ): "'build' is no file, and names no workflow; name a task graph's file, or a workflow",
    ("nobud",): "there is no file 'nobud'; did you mean nobud.toml?",
    ("nobud.tml",): "there is no file 'nobud.tml'; did you mean nobud.toml?",
    ("nobdu.toml",): "there is no file 'nobdu.toml'; did you mean nobud.toml?",
    ("nobud", "--force"): "'nobud' is not an existing file; did you mean nobud.toml?",
    ("sub/nobud",): "'sub/nobud' is no file, and names no workflow",
    ("shop.json",): "there is no file 'shop.json'; 'maestro init' writes a task graph",
    ("shop",): "shop is a folder, and no task graph; name a file, or a workflow as",
    ("shop/checkout.py",): "a workflow of it is named by its module: shop.checkout:WORKFLOW",
    ("shop/checkout:build",): "'shop/checkout:build' names no workflow",
    ("raises.py:build",): "'raises.py' is no module; that of the file is 'raises'",
    ("nowhere.to:build",): "there is no module 'nowhere.to' in",
    ("shop.nowhere:build",): "there is no module 'shop.nowhere' in",
    ("imports_nothing:build",): "cannot be imported: ModuleNotFoundError: No module named 'gone'",
    ("raises:build",): "the module 'raises' cannot be imported: ZeroDivisionError",
    ("MODULE:buidl",): "has no 'buidl'; its workflows are: build, typed, twice, fails,",
    ("MODULE:cut",): "is a step, and steps are called by workflows; its workflows are: build",
    ("MODULE:hive",): "is a Hive, and no workflow; its workflows are: build",
    ("MODULE:plain",): "is a function, and no workflow",
    ("raised:nothing",): "has no 'nothing'; it has no workflow",
    ("MODULE:build",): "build(feature: str, size: int = 1) was called wrongly: missing a required",
    ("MODULE:build", "cart", "1", "2"): "was called wrongly: too many positional arguments",
    ("MODULE:build", "cart", "big"): "size' of build is 'big', and must be a whole number",
    ("MODULE:build", "cart", "colour=red"): "'colour=red' names a parameter 'colour', which build(",
    ("MODULE:build", "feature=a", "feature=b"): "the parameter 'feature' is given twice",
    (
        "MODULE:build",
        "a",
        "feature=b",
    ): "was called wrongly: multiple values for argument 'feature'",
    ("MODULE:takes", "x"): "is of the type Hive, which cannot be typed as a text; start the run in",
    ("MODULE:build", "cart", "--run-id", "a/b"): "'a/b'",
    ("MODULE:build", "cart", "--store", "other"): "or change the module: Hive('other')",
}


@for_each("words", WRONG, ids=" ".join)
def test_what_cannot_be_run_is_wrong_use_and_says_what_can(
    shop: Path, words: tuple[str, ...]
) -> None:
    (shop / "imports_nothing.py").write_text("import gone")
    (shop / "raises.py").write_text("1 / 0")
    (shop / "raised.py").touch()
    assert WRONG[words] in complaint(in_this_process(shop, *words), command.WRONG_USE)
    assert not (shop / "said").exists()


def test_a_mistyped_option_is_not_an_argument(shop: Path) -> None:
    done = in_this_process(shop, "MODULE:build", "cart", "--runid", "x")
    assert done.returncode == command.WRONG_USE
    assert "--run-id" in done.stderr


# --- failures ---


def test_a_run_that_failed_ends_with_1_and_the_type_of_its_error(shop: Path) -> None:
    done = in_this_process(shop, "MODULE:fails", "--run-id", "r")
    assert (done.returncode, done.stdout) == (command.FAILED, "")
    assert "maestro: run 'r' failed: KeyError: 'b'; fix the cause" in done.stderr
    assert "attempt" not in done.stderr


def test_v_shows_what_is_logged(shop: Path) -> None:
    done = in_this_process(shop, "MODULE:fails", "--run-id", "r", "-v")
    lines = [line.partition(" ")[2] for line in done.stderr.splitlines()]
    over = "this round is over: 2 of 2 attempts have failed"
    assert lines[2:-1] == [
        "info: run r (fails) started",
        "warning: step broken of run r: attempt 1 failed: KeyError: 'b'; the next one starts at once",
        f"warning: step broken of run r: attempt 2 failed: KeyError: 'b'; {over}",
        "error: run r failed: KeyError: 'b'",
    ]


def test_vv_shows_each_attempt_and_tracebacks(shop: Path) -> None:
    done = in_this_process(shop, "MODULE:fails", "--run-id", "r", "-vv")
    assert "debug: step broken of run r: attempt 1 starts" in done.stderr
    assert "    return {}[name]\n" in done.stderr


def test_a_step_that_a_person_has_to_decide_about_ends_with_75(shop: Path) -> None:
    assert run("shop.checkout:buys", "--run-id", "r").returncode == -signal.SIGKILL
    done = run("shop.checkout:buys", "--run-id", "r")
    assert (done.returncode, done.stdout) == (command.PERSON_NEEDED, "")
    assert "maestro run shop.checkout:buys --run-id r" in done.stderr.splitlines()[-1]
    assert said(shop) == ["paid"]


# --- waiting for a person ---


def answer_as_told(process: PythonProcess, *values: str) -> list[str]:
    """Answer each question by the command that is printed, with its value; return the lines."""
    assert process.stderr is not None
    lines = []
    for value in values:
        for line in process.stderr:
            if "maestro answer " in line:
                break
        lines.append(line.strip())
        told = line.partition("maestro answer ")[2].split(";")
        words = shlex.split(next(each for each in told if "VALUE" in each).replace("VALUE", value))
        words = words[2:] if words[:2] == ["maestro", "answer"] else words
        assert maestro("answer", *words).returncode == 0
    return lines


def test_who_runs_a_workflow_is_told_what_it_waits_for_and_how_to_answer(shop: Path) -> None:
    process = start("shop.checkout:parent", "--run-id", "r", "--json")
    escalated, asked = answer_as_told(process, "7", "5")
    out, err = process.communicate(timeout=_SECONDS)
    assert (process.returncode, json.loads(out)["result"]) == (0, 14), err
    assert escalated.startswith("upload failed, and waits for a person")
    assert "maestro answer esc-" in escalated
    assert asked.startswith("waiting for size (a whole number)")
    assert "answer" not in err


@pytest.mark.parametrize("workflow, value", [("uploads", "--result=7"), ("asks", "7")])
def test_with_no_wait_a_run_that_waits_for_people_only_ends_with_75(
    shop: Path, workflow: str, value: str
) -> None:
    words = f"shop.checkout:{workflow}", "--run-id", "r", "--no-wait"
    done = run(*words)
    assert (done.returncode, done.stdout) == (command.PERSON_NEEDED, ""), done.stderr
    *_, how, last = done.stderr.splitlines()
    again = "maestro run shop.checkout:{} --run-id r --no-wait"
    assert last == f"maestro: run 'r' waits for a person. Answer, then: {again.format(workflow)}"
    assert maestro("show", "r", "--store", shop / "state").stdout.count("status:        waiting")
    escalation = how.partition("maestro answer ")[2].split()[0]
    given = [escalation, value] if workflow == "uploads" else ["r", "size", value]
    assert maestro("answer", *given, "--store", shop / "state").returncode == 0
    done = run(*words)
    assert (done.returncode, done.stdout) == (0, "8\n"), done.stderr


def test_with_no_wait_a_question_whose_time_is_soon_over_is_waited_for(shop: Path) -> None:
    done = in_this_process(shop, "MODULE:naps", "--run-id", "r", "--no-wait")
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_another_workflow_or_other_arguments_are_refused(shop: Path) -> None:
    assert in_this_process(shop, "MODULE:build", "cart", "--run-id", "r").returncode == 0
    for words in (["MODULE:nothing"], ["MODULE:build", "other"]):
        found = complaint_of_run(in_this_process(shop, *words, "--run-id", "r"))
        assert "run 'r' " in found


def complaint_of_run(done: Any) -> str:
    assert (done.returncode, done.stdout) == (command.WRONG_USE, ""), done
    return str(done.stderr.splitlines()[-1])


# --- stopped, killed and resumed ---


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_run_and_the_same_command_resumes_it(
    shop: Path, number: signal.Signals, code: int
) -> None:
    process = start("shop.checkout:twice", "cart", "--run-id", "r")
    wait_for(lambda: "slow cart 1" in said(shop))
    process.send_signal(number)
    out, err = process.communicate(timeout=_SECONDS)
    assert (process.returncode, out) == (code, ""), err
    said_why = {
        signal.SIGINT: "run 'r' was stopped; it resumes when it is started again",
        signal.SIGTERM: "SIGTERM stopped the run; to resume it",
    }
    again = "maestro run shop.checkout:twice --run-id r"
    assert err.splitlines()[-1] == f"maestro: {said_why[number]}: {again}"
    events = maestro("events", "r", "--json", "--store", shop / "state").stdout.splitlines()
    assert json.loads(events[-1])["event"] == "step_stopped"
    (shop / "go").touch()
    done = run("shop.checkout:twice", "--run-id", "r")
    assert (done.returncode, done.stdout) == (0, '{"slow": "cart is done"}\n'), done.stderr
    assert said(shop) == ["cut cart 1", "slow cart 1", "slow cart 2"]


def test_a_killed_run_is_resumed_by_its_id_and_completed_steps_are_not_called_again(
    shop: Path,
) -> None:
    process = start("shop.checkout:twice", "cart", "--run-id", "r")
    wait_for(lambda: "slow cart 1" in said(shop))
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=_SECONDS)
    (shop / "go").touch()
    for _ in range(2):  # the second time it has ended
        done = run("shop.checkout:twice", "cart", "--run-id", "r")
        assert (done.returncode, done.stdout) == (0, '{"slow": "cart is done"}\n'), done.stderr
    assert said(shop) == ["cut cart 1", "slow cart 1", "slow cart 2"]


def test_a_module_that_configures_logging_shows_it_in_its_own_way(shop: Path) -> None:
    configured = textwrap.dedent("""
        import logging
        logging.basicConfig(level="INFO", format="OWN %(message)s")
    """)
    (shop / "shop" / "checkout.py").write_text(configured + _SHOP)
    done = run("shop.checkout:build", "cart", "--run-id", "r")
    assert "OWN run r (build) started" in done.stderr.splitlines()
