"""``maestro run GRAPH`` with an agent: a program that stands for Claude Code, and speaks as it does."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from faults.team_kills import is_alive
from maestro_hive import Hive
from maestro_hive.cli import command
from maestro_hive.team.graph import check_graph
from maestro_hive.team.runner import TeamRunner
from tests.cli.processes import answer, maestro, start_maestro
from tests.cli.test_team import number_in, wait_until
from tests.hive.conftest import quick_config
from tests.team.conftest import task

if TYPE_CHECKING:
    from tests.cli.processes import Done

#: Does what the first line of ``plan`` says that no call has done before, and notes its call.
_CLAUDE = r"""
import json, os, sys, time

def say(kind, **more):
    print(json.dumps({"type": kind, "session_id": session, **more}), flush=True)

def message(name, given, made):
    usage = {"input_tokens": given, "output_tokens": 1, "cache_read_input_tokens": 5}
    found = {"id": name, "model": "claude-sonnet-4-5", "usage": usage}
    say("stream_event", event={"type": "message_start", "message": found})
    say("assistant", message={**found, "content": [{"type": "text", "text": name}]})
    say("stream_event", event={"type": "message_delta", "usage": {"output_tokens": made}})

def result(text="done", **more):
    usage = {"inputTokens": 100, "outputTokens": 20, "cacheReadInputTokens": 5, "costUSD": 0.25}
    more.setdefault("modelUsage", {"claude-sonnet-4-5": usage})
    say("result", subtype="success", **{"is_error": False, "result": text, **more})

if sys.argv[1:] == ["--version"]:
    print(os.environ.get("CLAUDE_VERSION", "2.1.197"), "(Claude Code)")
    sys.exit()
flags = dict(each.partition("=")[::2] for each in sys.argv[1:])
session = flags.get("--resume") or flags["--session-id"]
with open("calls", "a+") as calls:
    calls.seek(0)
    number = len(calls.readlines())
    files = os.listdir(flags["--add-dir"]) if "--add-dir" in flags else []
    call = {"flags": flags, "stdin": sys.stdin.read(), "files": files}
    calls.write(json.dumps(call) + "\n")
plan = open("plan").read().split()
does = plan[min(number, len(plan) - 1)]
model, version = "claude-sonnet-4-5", "2.1.197"
say("system", subtype="init", model=model, claude_code_version=version)
if does == "hang":
    message("half of it", 70, 30)
    with open("pid", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
elif does == "429":
    text = "API Error: 429 rate limited, retry after 0.1 s"
    result(text, is_error=True, api_error_status=429, modelUsage={})
    sys.exit(1)
elif does in ("full", "too-long"):
    if does == "full":
        message("a long conversation", 100, 20)
    result("Prompt is too long", is_error=True, modelUsage={})
    sys.exit(1)
elif does == "forgotten":
    print("No conversation found with session ID:", session, file=sys.stderr)
    sys.exit(1)
elif does == "refused":
    result("Invalid API key", is_error=True, api_error_status=401, modelUsage={})
    sys.exit(1)
elif does == "expensive":
    message("one", 900_000, 20)
    time.sleep(600)
elif does.startswith("n="):
    result("done", structured_output={"n": int(does[2:])})
else:
    message("hello", 100, 20)
    open("made", "w").write(does)
    result("it is made\ud800")
"""


class Desk:
    """A folder to work in, with the agent on PATH."""

    def __init__(self, folder: Path) -> None:
        self.work = folder / "work"
        self.programs = folder / "programs"
        for each in (self.work, self.programs):
            each.mkdir()
        program = self.programs / "claude"
        program.write_text(f"#!{sys.executable} -IS\n{_CLAUDE}")
        program.chmod(0o755)
        self.environment = {
            "MAESTRO_STATE_DIR": str(folder / "state"),
            "PATH": f"{self.programs}{os.pathsep}{os.environ['PATH']}",
        }

    def write(self, plan: str, *tasks: dict[str, Any], **more: Any) -> str:
        """Write what the agent does, call by call, and the graph."""
        (self.work / "plan").write_text(plan)
        document = {"feature": "shop", "persona": "claude", "tasks": list(tasks), **more}
        (self.work / "graph.json").write_text(json.dumps(document))
        return "graph.json"

    def maestro(self, *words: str) -> Done:
        return maestro(*words, **self.environment)

    def calls(self) -> list[dict[str, Any]]:
        """Return the flags and the prompts that the agent was called with."""
        path = self.work / "calls"
        return [json.loads(each) for each in path.read_text().splitlines()] if path.exists() else []

    def spent(self) -> tuple[int, float]:
        shown = answer(self.maestro("status", "--json"))["run"]
        return shown["tokens"], shown["usd"]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    made = Desk(tmp_path)
    monkeypatch.chdir(made.work)
    return made


def session_of(call: dict[str, Any]) -> str:
    found: str = call["flags"].get("--session-id") or call["flags"]["--resume"]
    return found


def test_an_agent_does_a_task_its_usage_is_counted_once_and_verification_decides(
    desk: Desk,
) -> None:
    persona = {"agent": "claude", "model": "sonnet", "permissions": "edit", "budget": {"usd": 2}}
    checked = task("A", "Make it", verification="grep right made", files=["made", "calls"])
    graph = desk.write("wrong right", checked, persona=persona)
    done = desk.maestro("run", graph)
    assert done.returncode == 0, done
    first, second = desk.calls()
    assert first["stdin"].startswith("A: A\n\nMake it\n")
    for flag, value in {"--permission-mode": "acceptEdits", "--model": "sonnet"}.items():
        assert first["flags"][flag] == value
    assert (first["flags"]["--max-budget-usd"], second["flags"]["--max-budget-usd"]) == (
        "2",
        "1.75",
    )
    # The second attempt goes on in the session, and is told why the first one failed.
    assert second["flags"]["--resume"] == first["flags"]["--session-id"]
    assert "The task is not done yet." in second["stdin"]
    assert "the verification ended with exit code 1" in second["stdin"]
    assert desk.spent() == (240, 0.5)
    assert "240" in desk.maestro("budget").stdout
    assert desk.maestro("logs", "shop", "A").stdout == "hello\n$ grep right made\nright\n"


def test_the_result_of_an_agent_is_checked_against_the_schema_of_its_task(desk: Desk) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 5}}}
    graph = desk.write("n=1 n=7", task("A", output_schema=schema))
    assert desk.maestro("run", graph).returncode == 0
    first, second = desk.calls()
    assert json.loads(first["flags"]["--json-schema"]) == schema
    assert "$.n: 1 is less than the minimum of 5" in second["stdin"]
    assert '"n": 7' in desk.maestro("show", "shop", "A", "--json").stdout


def test_killed_in_the_middle_it_is_resumed_in_its_session_and_counted_once(desk: Desk) -> None:
    graph = desk.write("hang right", task("A"))
    with start_maestro("run", graph, cwd=desk.work, **desk.environment) as engine:
        pid = number_in(desk.work / "pid")
        # What it has said up to then is read, and counted.
        wait_until(lambda: desk.spent()[0] == 100)
        engine.kill()
    wait_until(lambda: not is_alive(pid))
    resumed = desk.maestro("resume")
    assert resumed.returncode == 0, resumed
    first, second = desk.calls()
    assert second["flags"]["--resume"] == first["flags"]["--session-id"]
    assert second["stdin"].startswith("You were interrupted.")
    assert desk.spent()[0] == 100 + 120


def test_a_rate_limit_is_retried_and_named(desk: Desk) -> None:
    done = desk.maestro("run", desk.write("429 right", task("A")))
    assert done.returncode == 0, done
    assert "A: attempt 1 failed: claude: rate limited: API Error: 429" in done.stdout
    assert "shop: 1 of 1 task complete (1 executed, 0 reused)\nretried: A\n" in done.stdout
    assert len({session_of(each) for each in desk.calls()}) == 1


def test_a_full_context_goes_on_in_a_fresh_session_without_an_attempt(desk: Desk) -> None:
    done = desk.maestro("run", desk.write("full right", task("A"), retry=1))
    assert done.returncode == 0, done
    assert len({session_of(each) for each in desk.calls()}) == 2
    assert ["--session-id" in each["flags"] for each in desk.calls()] == [True, True]


def test_the_fresh_sessions_of_a_failed_attempt_count_in_the_next(desk: Desk) -> None:
    retry = {"max_attempts": 4, "max_handovers": 1}
    done = desk.maestro("run", desk.write("full 429 full right", task("A"), retry=retry))
    assert done.returncode == command.FAILED
    assert "the context was full 2 times, and the limit of fresh workers is 1" in done.stdout
    assert len(desk.calls()) == 3


def test_a_task_that_fits_into_no_context_fails(desk: Desk) -> None:
    done = desk.maestro("run", desk.write("too-long", task("A"), retry=1))
    assert done.returncode == command.FAILED
    assert "claude: context full: Prompt is too long" in done.stdout
    assert len(desk.calls()) == 1


def test_a_session_that_the_agent_has_not_saved_costs_no_attempt(desk: Desk) -> None:
    done = desk.maestro("run", desk.write("429 forgotten right", task("A"), retry=2))
    assert done.returncode == 0, done
    assert ["--resume" in each["flags"] for each in desk.calls()] == [False, True, False]
    endless = desk.write("forgotten", task("B"), retry=1)
    assert desk.maestro("run", endless).returncode == command.FAILED
    assert len(desk.calls()) == 3 + 4


def test_a_refused_key_is_not_retried(desk: Desk) -> None:
    done = desk.maestro("run", desk.write("refused", task("A")))
    assert done.returncode == command.FAILED
    assert "claude: not authenticated: Invalid API key" in done.stdout
    assert len(desk.calls()) == 1


def test_an_agent_that_spends_too_much_is_ended(desk: Desk) -> None:
    graph = desk.write("expensive", task("A", budget={"tokens": 1000}), task("B", after="A"))
    done = desk.maestro("run", graph)
    assert done.returncode == command.FAILED
    for line in ("not started: B (needs A)\n", "over budget: A, after 1 attempt\n", "to go on: "):
        assert line in done.stdout
    assert desk.spent()[0] == 900_020
    assert len(desk.calls()) == 1


def test_a_version_that_was_not_tried_is_a_warning(desk: Desk) -> None:
    graph = desk.write("right", task("A"))
    desk.environment["CLAUDE_VERSION"] = "9.8.7"
    done = desk.maestro("run", graph)
    assert done.returncode == 0, done
    assert "maestro: claude 9.8.7 was not tried with this version of maestro-hive" in done.stderr
    desk.environment["CLAUDE_VERSION"] = "2.1.197"
    assert "was not tried" not in desk.maestro("run", graph, "--force").stderr


def test_long_feedback_is_a_file_while_the_task_is_not_done(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = f"grep right made || {{ echo {'x' * 1_400}; exit 1; }}"
    retry = {"max_attempts": 9, "rounds": 1}
    path = desk.write("1 2 3 4 5 6 7 8 right", task("A", verification=check), retry=retry)
    checked = check_graph(Path(path).read_bytes())
    assert checked.graph is not None
    monkeypatch.setenv("PATH", desk.environment["PATH"])
    with Hive(desk.environment["MAESTRO_STATE_DIR"], quick_config()) as hive:
        asyncio.run(TeamRunner(hive).run(checked.graph, run_id="shop"))
    call = desk.calls()[-1]
    folder = Path(call["flags"]["--add-dir"])
    assert f"What failed before is in the file {folder}/feedback.txt: read it." in call["stdin"]
    assert call["files"] == ["feedback.txt"]
    assert not folder.exists()


def test_agents_that_are_not_installed_are_named_before_anything_starts(
    desk: Desk, tmp_path: Path
) -> None:
    graph = desk.write("right", task("A"), task("B", persona="codex"), task("C", persona="claude"))
    desk.environment["PATH"] = str(tmp_path / "nothing")
    refused = desk.maestro("run", graph)
    assert refused.returncode == command.WRONG_USE
    for line in (
        "  A, C: the agent 'claude' is not installed, or not on PATH; install it: npm install",
        "  B: the agent 'codex' is not installed, or not on PATH; install it: npm install",
    ):
        assert line in refused.stderr
    assert not (tmp_path / "state").exists()
    planned = desk.maestro("run", graph, "--dry-run")
    assert planned.returncode == command.FAILED
    for line in ("A, C: the agent 'claude' is not", "B: the agent 'codex' is not installed"):
        assert f"\ncannot be executed: {line}" in planned.stdout
