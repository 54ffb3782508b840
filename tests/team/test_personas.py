"""What personas get and say: prompt, environment, feedback, progress, exit codes and output."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from faults.team_kills import is_alive
from maestro_hive.hive.errors import RunFailedError
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.maestro.state.events import RunEvent, StepFailed, StepStarted
from maestro_hive.team import persona_checks, processes, runner
from maestro_hive.team.graph import check_graph
from maestro_hive.team.inputs import task_input
from maestro_hive.team.progress import as_checkpoint
from maestro_hive.team.prompts import prompt_of
from maestro_hive.team.restoring import restored_from
from maestro_hive.team.results import check_schema
from maestro_hive.team.state import Checkpoint, ExecutionState, TaskState
from maestro_hive.testing import ManualClock
from tests.python_processes import run_python
from tests.team.conftest import graph, statuses, task

if TYPE_CHECKING:
    from maestro_hive.team.graph import Graph
    from tests.team.conftest import Team


def state_folder(team: Team) -> Path:
    return Path(team.hive.config.state.state_dir)


def streamed(team: Team, step: str) -> str:
    async def read() -> str:
        chunks = [each async for each in team.hive.stream("r", step, follow=False)]
        return "".join(str(each.data) for each in chunks if not each.restarted)

    return asyncio.run(read())


def test_a_command_gets_its_prompt_as_one_argument_and_on_its_input(team: Team) -> None:
    hostile = "$(touch hacked); `touch hacked` \"quoted\" 'too' --flag\nsecond line"
    command = ["sh", "-c", 'printf %s "$1" > argument; cat > input', "sh", "{prompt}"]
    team.run(graph(task("A", prompt=hostile), persona={"command": command}))
    assert (team.folder / "argument").read_text() == f"{hostile}\n"
    assert (team.folder / "input").read_text() == f"{hostile}\n"
    assert not (team.folder / "hacked").exists()


def test_a_command_finds_who_it_is_in_its_environment(team: Team) -> None:
    team.run(graph(task("A", "env | grep ^MAESTRO_ > env")), workers=1)
    found = dict(line.split("=", 1) for line in team.lines("env"))
    keys = ("RUN_ID", "TASK_ID", "WORKER_ID", "ATTEMPT", "FEEDBACK")
    assert [found[f"MAESTRO_{key}"] for key in keys] == ["r", "A", "1", "1", ""]
    assert len(found["MAESTRO_EFFECT_KEY"]) > 10
    assert found["MAESTRO_PROGRESS"].endswith("A.json")


def test_the_output_of_a_failed_verification_is_the_feedback_of_the_next_attempt(
    team: Team,
) -> None:
    check = "grep -q right answer && echo the right answer || { echo the answer is wrong; exit 7; }"
    does = 'echo "$MAESTRO_FEEDBACK" >> feedback; case $MAESTRO_FEEDBACK in *wrong*) echo right;; esac > answer'
    made = graph(
        task("A", does, verification={"command": check, "expected": "the right answer"}), retry=3
    )
    team.run(made)
    told = (team.folder / "feedback").read_text()
    assert told.startswith("\n")  # nothing, at first
    for words in ("exit code 7", "the answer is wrong", "expected: the right answer"):
        assert words in told
    log = f"$ {check}\nthe answer is wrong\n$ {check}\nthe right answer\n"
    assert streamed(team, "A") == log


def test_the_output_of_a_verification_has_to_contain_what_is_expected(team: Team) -> None:
    check = {"command": "seq $MAESTRO_ATTEMPT; echo end", "expected": "2\nend\n"}
    made = graph(task("A", 'echo "$MAESTRO_FEEDBACK" > told', verification=check), retry=3)
    team.run(made)
    told = (team.folder / "told").read_text()
    assert "its output does not contain what is expected: seq" in told
    assert streamed(team, "A").count("$ seq") == 2


def test_both_levels_of_retries_are_used(team: Team) -> None:
    made = graph(task("A", "echo $MAESTRO_ATTEMPT >> log; exit 1"))
    with pytest.raises(RunFailedError):
        team.run(made)
    config = team.hive.config
    attempts = config.level1.max_attempts * config.level2.max_attempts
    assert team.lines() == [str(number + 1) for number in range(attempts)]


def test_the_output_of_a_command_is_the_log_of_its_attempt_line_by_line(team: Team) -> None:
    team.run(graph(task("A", "echo one; echo two >&2; printf 'caf\\303\\251'")))

    async def read() -> list[str]:
        return [str(each.data) async for each in team.hive.stream("r", "A", follow=False)]

    assert asyncio.run(read())[-3:] == ["one\n", "two\n", "café"]


def test_an_output_without_end_is_stored_up_to_a_limit_and_the_command_goes_on(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "MAX_LOG_BYTES", 1024**2)
    says = "yes some words | head -c 3300000; printf 'the end'"
    does = f'printf "%s" "$MAESTRO_FEEDBACK" > told; {says}; exit $((2 - MAESTRO_ATTEMPT))'
    team.run(graph(task("A", does), retry=2))
    assert (team.folder / "told").read_text().endswith("some words\nthe end")
    log = streamed(team, "A")
    assert log.endswith("some words\n… the rest is left out: a log has at most 1 MiB of output\n")
    assert 200_000 < len(log) < 1024**2


def test_what_is_expected_may_be_behind_the_limit_of_a_log(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "MAX_LOG_BYTES", 100)
    check = {"command": "seq 1000; echo passed", "expected": "passed"}
    team.run(graph(task("A", verification=check), retry=1))
    assert "passed\n" not in streamed(team, "A").partition("\n")[2]


def test_a_persona_that_takes_too_long_is_ended_with_its_group(team: Team) -> None:
    does = "sleep 100 & echo $! > pid; wait"
    with pytest.raises(RunFailedError, match="failed: A"):
        team.run(graph(task("A", does, timeout_seconds=0.2), retry=1))
    pid = team.lines("pid")[0]
    assert not is_alive(int(pid))


def test_a_full_context_is_handed_over_without_an_attempt(team: Team) -> None:
    does = (
        'cat "$MAESTRO_PROGRESS" >> seen 2>&1; echo $MAESTRO_ATTEMPT >> log;'
        ' test $(grep -c . log) -ge 3 && exit 0; echo "{\\"current_step\\": $(grep -c . log),'
        ' \\"note\\": 1}" > "$MAESTRO_PROGRESS"; exit 2'
    )
    team.run(graph(task("A", does), retry=1))
    assert team.lines() == ["1", "1", "1"]
    assert '"current_step": 2' in (team.folder / "seen").read_text()


def test_exit_code_2_without_progress_is_a_failure(team: Team) -> None:
    with pytest.raises(RunFailedError, match="failed: A"):
        team.run(graph(task("A", "exit 2"), retry=1))


def test_a_context_that_is_full_too_often_is_a_failure_that_is_not_retried(team: Team) -> None:
    does = 'echo x >> log; cp log "$MAESTRO_PROGRESS"; exit 2'
    with pytest.raises(RunFailedError, match="failed: A"):
        team.run(graph(task("A", does), retry={"max_attempts": 3, "rounds": 2, "max_handovers": 2}))
    assert len(team.lines()) == 3


@pytest.mark.parametrize("kind", ["command", "python"])
def test_the_handovers_of_a_failed_attempt_count_in_the_next(
    team: Team, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    # The second worker fails; each of the others has a full context.
    (team.folder / "forgetful.py").write_text(
        "from maestro_hive.team.progress import ContextFull\n"
        "def work(task):\n"
        "    with (task.folder / 'log').open('a') as log:\n"
        "        log.write('x\\n')\n"
        "    if (task.folder / 'log').read_text() == 'x\\nx\\n':\n"
        "        raise OSError('no')\n"
        "    raise ContextFull(current_step=1)\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    does = 'echo x >> log; test $(grep -c . log) = 2 && exit 1; cp log "$MAESTRO_PROGRESS"; exit 2'
    persona: dict[str, Any] = {} if kind == "command" else {"persona": {"python": "forgetful:work"}}
    with pytest.raises(RunFailedError, match="failed: A"):
        team.run(graph(task("A", does, **persona), retry={"max_attempts": 4, "max_handovers": 2}))
    monkeypatch.delitem(sys.modules, "forgetful", raising=False)
    assert len(team.lines()) == 4
    assert "the context was full 3 times" in failures(team)["A"]


def test_each_of_the_workers_that_go_on_has_the_time_of_the_task(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts = {}
    make = runner._Steps._step

    def noting(
        steps: runner._Steps, body: Any, name: str, options: dict[str, Any], sizing: Any
    ) -> Any:
        timeouts[name] = options["timeout"]
        return make(steps, body, name, options, sizing)

    monkeypatch.setattr(runner._Steps, "_step", noting)
    team.run(graph(task("A"), retry={"max_handovers": 3}, timeout_seconds=1000))
    assert timeouts["A"] >= 4 * 1000


_SAVED = {
    "nested deeper than Python reads": b"[" * 100_000,
    "nested deeper than is recorded": b"[" * 98 + b"]" * 98,
    "half a surrogate pair": b'"\\ud800"',
    "no number": b'{"a": NaN}',
    "two values": b'{"a": 1}{',
    "no text": b"\xff\x00",
}


@pytest.mark.parametrize("saved", _SAVED.values(), ids=_SAVED)
def test_progress_that_is_not_json_is_recorded_as_a_text(team: Team, saved: bytes) -> None:
    (team.folder / "saved").write_bytes(saved)
    does = 'test -f log && exit 0; echo x >> log; cp saved "$MAESTRO_PROGRESS"; exit 2'
    assert team.run(graph(task("A", does), retry=1))["tasks"] == {"A": {"files": {}}}


_NOT_TAKEN = {
    "too long": ('head -c 1100000 /dev/zero > "$MAESTRO_PROGRESS"', "it has 1,100,000 bytes"),
    "a folder": (
        'mkdir "$MAESTRO_PROGRESS" && touch "$MAESTRO_PROGRESS/x"',
        "it is not a regular file",
    ),
    "a pipe": ('mkfifo "$MAESTRO_PROGRESS"', "it is not a regular file"),
    "a link": ('ln -s "$PWD/log" "$MAESTRO_PROGRESS"', "it is a symbolic link"),
}


@pytest.mark.parametrize("makes, why", _NOT_TAKEN.values(), ids=_NOT_TAKEN)
def test_a_progress_file_that_cannot_be_read_is_no_progress_and_the_log_says_why(
    team: Team, makes: str, why: str
) -> None:
    does = f"echo $MAESTRO_ATTEMPT >> log; {makes} || echo no >> log; test $MAESTRO_ATTEMPT = 2"
    assert team.run(graph(task("A", does), retry=2))["tasks"] == {"A": {"files": {}}}
    assert team.lines() == ["1", "2"]
    assert streamed(team, "A").count(f"the progress file was not taken: {why}") == 2
    assert not list((state_folder(team) / "runs/r/progress").iterdir())


def test_a_progress_file_that_cannot_be_read_hides_nothing_that_was_saved_before(
    team: Team,
) -> None:
    does = (
        'echo $MAESTRO_ATTEMPT >> log; case $MAESTRO_ATTEMPT in 1) echo half > "$MAESTRO_PROGRESS";;'
        ' 2) rm "$MAESTRO_PROGRESS"; mkdir "$MAESTRO_PROGRESS";;'
        ' *) cp "$MAESTRO_PROGRESS" seen; exit 0;; esac; exit 1'
    )
    team.run(graph(task("A", does), retry=3))
    assert "half" in (team.folder / "seen").read_text()


def test_an_empty_progress_file_hides_nothing_that_was_saved_before(team: Team) -> None:
    does = (
        'case $MAESTRO_ATTEMPT in 1) echo half > "$MAESTRO_PROGRESS";; 2) : > "$MAESTRO_PROGRESS";;'
        ' *) cp "$MAESTRO_PROGRESS" seen; exit 0;; esac; exit 1'
    )
    team.run(graph(task("A", does), retry=3))
    assert "half" in (team.folder / "seen").read_text()


_WRITES_NOTHING = """
import resource, sys
from pathlib import Path
from maestro_hive.kernel.errors import StorageError
from maestro_hive.team.progress import ProgressFile
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
try:
    ProgressFile(Path(sys.argv[1]), print).offer({"current_step": 1})
except (OSError, StorageError):
    print("not written")
"""


def test_a_checkpoint_is_given_to_a_command_completely_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "A.json"
    assert "not written" in run_python(_WRITES_NOTHING, path).stdout
    assert not path.exists()


def test_a_timeout_is_one_although_the_progress_file_cannot_be_read(team: Team) -> None:
    does = 'mkdir "$MAESTRO_PROGRESS"; sleep 100'
    with pytest.raises(RunFailedError, match="failed: A"):
        team.run(graph(task("A", does, timeout_seconds=1), retry=1))
    (attempt,) = failed(team)
    assert "the persona took longer than 1 s" in attempt.message


def test_progress_of_a_failed_attempt_is_given_to_the_next(team: Team) -> None:
    does = (
        'test -s "$MAESTRO_PROGRESS" && cp "$MAESTRO_PROGRESS" seen && exit 0;'
        ' echo half > "$MAESTRO_PROGRESS"; exit 1'
    )
    team.run(graph(task("A", does), retry=2))
    assert (team.folder / "seen").read_text() == "half\n"


def test_a_blocked_task_waits_for_an_answer_and_goes_on_with_it(team: Team) -> None:
    # The answer is at the end of the prompt that the command gets the second time.
    command = ["sh", "-c", "cat > prompt; grep -q 42 prompt || { echo which number?; exit 3; }"]
    made = graph(task("A"), persona={"command": command}, retry=1)
    runner = team.hive_runner()

    async def main() -> Any:
        running = asyncio.create_task(runner.run(made, run_id="r", folder=team.folder))
        asked: list[Any] = []
        async with asyncio.timeout(60):
            while not asked:
                await asyncio.sleep(0.01)  # it is another hive, as in another process
                asked = team.hive.questions("r") if team.hive.runs() else []
        assert (asked[0].name, asked[0].about) == ("A", "which number?")
        shown: dict[str, str] = {}
        async with asyncio.timeout(60):
            while shown != {"A": "blocked"}:
                await asyncio.sleep(0.01)
                shown = statuses(team)
        team.hive.answer("r", "A", "42")
        return await running

    assert asyncio.run(main())["tasks"] == {"A": {"files": {}}}
    assert statuses(team) == {"A": "complete"}


def test_a_python_persona_gets_results_and_may_be_handed_over(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    (team.folder / "persona_module.py").write_text(
        "from maestro_hive import current\n"
        "from maestro_hive.team.progress import ContextFull\n"
        "def plan(task):\n"
        "    return {'parts': [task.id, task.title, list(task.files)]}\n"
        "async def build(task):\n"
        "    saved = current().progress.get('checkpoint')\n"
        "    if saved is None:\n"
        "        raise ContextFull(current_step=4)\n"
        "    (task.folder / 'out').write_text('built')\n"
        "    return [task.results['PLAN']['parts'], saved['current_step'], current().attempt]\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    made = graph(
        task("PLAN", persona={"python": "persona_module:plan"}, files=["x.py"]),
        task("BUILD", after="PLAN", persona={"python": "persona_module:build"}, files=["out"]),
        retry=1,
    )
    result = team.run(made)["tasks"]
    assert result["BUILD"]["value"] == [["PLAN", "PLAN", ["x.py"]], 4, 1]
    assert list(result["BUILD"]["files"]) == ["out"]
    monkeypatch.delitem(sys.modules, "persona_module")


def test_a_python_persona_saves_values_that_json_does_not_have(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    (team.folder / "dated_persona.py").write_text(
        "from datetime import date, datetime\n"
        "from maestro_hive import current\n"
        "from maestro_hive.team.progress import ContextFull\n"
        "def work(task):\n"
        "    saved = current().progress.get('checkpoint')\n"
        "    if saved is None:\n"
        "        raise ContextFull(when=datetime(2026, 1, 1), seen={(1, 2)}, days={1: date.min})\n"
        "    file = task.folder / '.mahabharatha/checkpoints/A.json'\n"
        "    (task.folder / 'kept.json').write_bytes(file.read_bytes())\n"
        "    return [saved['state_data'], current().attempt]\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    made = graph(task("A", persona={"python": "dated_persona:work"}), retry=1)
    saved = {"when": datetime(2026, 1, 1), "seen": {(1, 2)}, "days": {1: date.min}}  # noqa: DTZ001
    assert team.run(made)["tasks"]["A"]["value"] == [saved, 1]
    monkeypatch.delitem(sys.modules, "dated_persona")
    # Who has the file alone gets the same.
    assert restored_checkpoint(team, (team.folder / "kept.json").read_bytes()) == saved


def restored_checkpoint(team: Team, data: bytes) -> Any:
    folder = team.folder / "restored"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints/A.json").write_bytes(data)
    state = ExecutionState.create("test")
    state.tasks["A"] = TaskState("A")
    state.checkpoints = ["checkpoints/A.json"]
    found = restored_from(state, folder / "state.json").checkpoints
    return found["A"]["state_data"]


def test_a_prompt_names_what_the_task_says() -> None:
    document = {
        "feature": "f",
        "persona": {"command": "true"},
        "tasks": [
            {
                "id": "A",
                "title": "Title",
                "description": "Description",
                "context": "Context",
                "files": {"create": ["a.py"], "move": [{"from": "b", "to": "c"}], "read": ["d"]},
                "steps": [{"step": 1, "action": "implement", "file": "a.py", "run": "make"}],
                "acceptance_criteria": ["it works"],
                "verification": {"command": "make test", "expected": "all pass"},
            }
        ],
    }
    made = check_graph(json.dumps(document).encode()).graph
    assert made is not None
    text = prompt_of(task_input(made, made.tasks[0]))
    for words in (
        *("A: Title\n\nDescription\n\nContext", "Create: a.py", "Rename: b to c", "Read: d"),
        *(
            "1. implement; a.py; run: make",
            "- it works",
            "make test\nIts output contains: all pass",
        ),
    ):
        assert words in text


_ODD_PERSONAS = """
import sys
class Service:
    async def __call__(self, task):
        return "awaited"
service = Service()
class Verdict(BaseException):
    pass
def exits(task):
    sys.exit("enough")
async def exits_later(task):
    sys.exit(3)
def other(task):
    raise Verdict("no")
def closes(task):
    raise GeneratorExit
async def closes_later(task):
    raise GeneratorExit
def interrupts(task):
    raise KeyboardInterrupt
"""


def test_personas_are_checked_in_a_thread_and_imported_in_that_of_the_loop(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many schemas take a while, and modules may need the main thread, as for signals."""
    threads: list[threading.Thread] = []

    def check(schema: dict[str, Any]) -> None:
        threads.append(threading.current_thread())
        check_schema(schema)

    monkeypatch.setattr(persona_checks, "check_schema", check)
    name = "persona_of_the_main_thread"
    (team.folder / f"{name}.py").write_text(
        "import threading\n"
        "assert threading.current_thread() is threading.main_thread()\n"
        "def work(call): return 1\n"
    )
    made = graph(task("A", output_schema={"type": "integer"}), persona={"python": f"{name}:work"})
    assert team.run(made)["tasks"]["A"]["value"] == 1
    assert threads
    assert threading.main_thread() not in threads


def test_a_python_persona_that_exits_has_failed_and_other_tasks_go_on(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    (team.folder / "odd_personas.py").write_text(_ODD_PERSONAS)
    monkeypatch.setattr(sys, "path", [*sys.path])
    odd = {
        name: task(name.upper(), persona={"python": f"odd_personas:{name}"})
        for name in (
            "service",
            "exits",
            "exits_later",
            "other",
            "closes",
            "closes_later",
            "interrupts",
        )
    }
    with pytest.raises(RunFailedError):
        team.run(graph(*odd.values(), retry=1))
    monkeypatch.delitem(sys.modules, "odd_personas")
    assert failures(team) == {
        "EXITS": "the persona raised SystemExit: enough",
        "EXITS_LATER": "the persona raised SystemExit: 3",
        "OTHER": "the persona raised Verdict: no",
        "CLOSES": "the persona raised GeneratorExit",
        "CLOSES_LATER": "the persona raised GeneratorExit",
        "INTERRUPTS": "the persona raised KeyboardInterrupt",
    }
    assert statuses(team)["SERVICE"] == "complete"


@pytest.mark.parametrize("file", ["same_name.py", "same_name/__init__.py", "same_name/work.py"])
def test_a_module_of_another_folder_is_not_executed_in_its_place(team: Team, file: str) -> None:
    name = "same_name.work" if file == "same_name/work.py" else "same_name"
    made = graph(task("A", persona={"python": f"{name}:work"}))
    folders = team.folder, team.folder.parent / "other"
    for folder in folders:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(f"def work(task): return {folder.name!r}\n")
    assert team.run(made)["tasks"]["A"]["value"] == "work"
    runner = team.hive_runner()
    with pytest.raises(ConfigurationError, match="execute the run in a process of its own") as no:
        asyncio.run(runner.run(made, run_id="other", folder=folders[1]))
    assert all(str(each / file) in str(no.value) for each in folders)
    assert team.run(made, "again")["tasks"]["A"]["value"] == "work"


def test_a_module_that_is_installed_is_used_from_every_folder(team: Team) -> None:
    made = graph(task("A", persona={"python": "inspect:isclass"}))
    other = team.folder.parent / "other"
    other.mkdir()
    for folder in (team.folder, other):
        result = asyncio.run(team.hive_runner().run(made, run_id=folder.name, folder=folder))
        assert result["tasks"]["A"]["value"] is False
    (other / "inspect.py").write_text("def isclass(task): return 1\n")
    with pytest.raises(ConfigurationError, match="rename it"):
        asyncio.run(team.hive_runner().run(made, run_id="again", folder=other))


_TAKES_TOO_LONG = """
import time

def note(task):
    with open(task.folder / "log", "a") as log:
        log.write(task.id + "\\n")

def wait_for(path):
    until = time.monotonic() + 30
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)

def late(task):
    wait_for(task.folder / "go")
    (task.folder / "late.txt").touch()
    note(task)

def other(task):
    wait_for(task.folder / "late.txt")
    note(task)
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_function_that_goes_on_after_its_time_is_a_writer_and_has_a_worker_until_its_end(
    team: Team, workers: int
) -> None:
    (team.folder / "takes_too_long.py").write_text(_TAKES_TOO_LONG)
    late = {"python": "takes_too_long:late"}
    made = graph(
        task("LATE", persona=late, files=["late.txt", "log"], timeout_seconds=0.1),
        task("OTHER", persona={"python": "takes_too_long:other"}, files=["go", "log"]),
        retry={"max_attempts": 1, "rounds": 1},
    )

    async def main() -> None:
        runner = team.hive_runner(workers)
        running = asyncio.create_task(runner.run(made, run_id="r", folder=team.folder))
        async with asyncio.timeout(30):
            while not await asyncio.to_thread(has_failed, team):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            if workers == 1:
                await asyncio.sleep(0.2)  # a worker that is free rests for a shorter time
                assert "OTHER" not in {each.name for each in await asyncio.to_thread(begun, team)}
            (team.folder / "go").touch()
            with pytest.raises(RunFailedError, match="failed: LATE"):
                await running

    asyncio.run(main())
    assert team.lines() == ["LATE", "OTHER"]
    assert statuses(team) == {"LATE": "failed", "OTHER": "complete"}
    assert "goes on in a thread" in failures(team)["LATE"]


_CANCELS_ITSELF = """
import asyncio
async def work(task):
    asyncio.current_task().cancel()
    await asyncio.sleep(600)
"""


def test_a_python_persona_that_cancels_its_task_has_failed_and_other_tasks_go_on(
    team: Team,
) -> None:
    (team.folder / "cancels_itself.py").write_text(_CANCELS_ITSELF)
    made = graph(
        task("A", persona={"python": "cancels_itself:work"}),
        task("AFTER", after="A"),
        task("B"),
        retry={"max_attempts": 2, "rounds": 1},
    )
    for _ in range(2):  # the second time, as it was recorded
        with pytest.raises(RunFailedError, match="failed: A; 1 of 3 tasks were not started"):
            run_in_time(team, made)
        assert failures(team) == {"A": "'A' waited for something that was cancelled"}
        assert statuses(team) == {"A": "failed", "AFTER": "blocked", "B": "complete"}
    team.hive.retry("r")
    with pytest.raises(RunFailedError):
        run_in_time(team, made)
    assert statuses(team) == {"A": "failed", "AFTER": "blocked", "B": "complete"}


def run_in_time(team: Team, made: Graph) -> None:
    async def run() -> None:
        async with asyncio.timeout(30):
            await team.hive_runner().run(made, run_id="r", folder=team.folder)

    asyncio.run(run())


def test_a_check_that_takes_too_long_is_no_timeout_of_the_persona(team: Team) -> None:
    hangs = {"command": "sleep 100", "timeout_seconds": 0.1}
    gates = [{"name": "slow", **hangs}]
    made = graph(
        task("A", verification=hangs, level=2),
        task("B", level=1),
        levels={"1": {"name": "first", "tasks": ["B"], "gates": [{**gates[0], "required": False}]}},
        retry=1,
    )
    with pytest.raises(RunFailedError, match="failed: A"):
        team.run(made)
    (attempt,) = failed(team)
    assert "the verification took longer than 0.1 s" in attempt.message
    assert attempt.category == "TEST_FAILURE"


def failures(team: Team) -> dict[str, str]:
    """Return the messages of the attempts that failed, by task."""
    return {each.name: each.message for each in failed(team)}


def failed(team: Team) -> list[StepFailed]:
    return [each for each in events(team) if isinstance(each, StepFailed)]


def has_failed(team: Team) -> bool:
    return any(each.run_id == "r" for each in team.hive.runs()) and bool(failed(team))


def begun(team: Team) -> list[StepStarted]:
    return [each for each in events(team) if isinstance(each, StepStarted)]


def events(team: Team) -> list[RunEvent]:
    async def read() -> list[RunEvent]:
        return [each async for each in team.hive.events("r", follow=False)]

    return asyncio.run(read())


@pytest.mark.parametrize("saved", ["text", ["a"], {"current_step": "no", "state_data": {"b": 1}}])
def test_whatever_a_worker_saves_becomes_a_valid_checkpoint(saved: Any) -> None:
    made = as_checkpoint(saved, task="A", worker="1", now=ManualClock().now())
    assert Checkpoint.from_dict(made).task_id == "A"


def test_a_function_whose_context_is_full_and_that_saved_nothing_has_failed(team: Team) -> None:
    text = """
        from maestro_hive import current
        from maestro_hive.team.progress import ContextFull

        def nothing(task):
            with (task.folder / "log").open("a") as log:
                log.write("called\\n")
            raise ContextFull

        def by_itself(task):
            if "half" not in current().progress:
                current().save_progress(half=True)
                raise ContextFull
    """
    module = "\n".join(line[8:] for line in text.splitlines())
    (team.folder / "full_contexts.py").write_text(module)
    team.run(graph(task("A", persona={"python": "full_contexts:by_itself"}), retry=1))
    made = graph(task("B", persona={"python": "full_contexts:nothing"}), retry=1)
    with pytest.raises(RunFailedError):
        team.run(made, "other")
    assert team.lines() == ["called"]
