"""The agents themselves, called by their adapters, against a model server on loopback.

``make agents`` installs them; without that these tests are skipped, and say so.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.team.graph import AGENTS

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
#: A call of an agent takes seconds, of which most are its own start.
pytestmark = pytest.mark.timeout(400)

Report = dict[str, Any]


@cache
def network() -> tuple[str, ...] | None:
    """Return the command that starts another in a network of its own; None if nobody may."""
    command = ("unshare", "-n") if os.geteuid() == 0 else ("unshare", "-rn")
    if shutil.which("unshare") is None:
        return None
    done = subprocess.run([*command, "true"], capture_output=True, check=False)
    return None if done.returncode else command


def folders(agent: str) -> list[str]:
    """Return where ``make agents`` has installed an agent."""
    places = [ROOT / "build/agents" / agent / each for each in ("node_modules/.bin", "bin")]
    return [str(each) for each in places if (each / agent).exists()]


@pytest.fixture
def trial(tmp_path: Path) -> Callable[[str, str], Report]:
    def execute(agent: str, name: str) -> Report:
        found = folders(agent)
        if not found:
            pytest.skip(f"{agent} is not installed in build/agents: run `make agents`")
        apart = network()
        if apart is None:
            pytest.skip("agents call home, and no network namespace can be made for them here")
        command = [*apart, sys.executable, "-m", "tests.team.agent_trial", agent, name]
        path = os.pathsep.join([*found, os.environ["PATH"]])
        done = subprocess.run(
            [*command, str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
            timeout=380,
        )
        assert done.returncode == 0, done.stderr
        report: Report = json.loads(done.stdout)
        return report

    return execute


def served(report: Report, agent: str) -> dict[str, int]:
    """Return what the models have served, as far as the agent tells it apart."""
    used = {"input": 0, "output": 0, "cached": 0, "written": 0, **report["served"]}
    if agent == "aider":  # to which what was cached is input as well
        used["input"] += used.pop("cached")
        used["cached"] = 0
    return used


def reported(report: Report) -> dict[str, int]:
    return {name: count for name, count in report["reported"].items() if name != "usd"}


@pytest.mark.parametrize("agent", AGENTS)
def test_it_writes_a_file_answers_and_goes_on_in_its_session(
    agent: str, trial: Callable[[str, str], Report]
) -> None:
    report = trial(agent, "answer")
    assert report["failures"] == [None, None], report["messages"]
    assert report["text"].strip() == "second"
    assert report["made"] == "written\n"
    assert report["left"] == ["made.txt"], "it leaves no files of its own in the folder"
    assert len(set(report["sessions"])) == 1
    assert report["remembers"]
    assert reported(report) == served(report, agent)


@pytest.mark.parametrize("agent", AGENTS)
def test_killed_in_the_middle_it_is_resumed_in_its_session_and_counted_once(
    agent: str, trial: Callable[[str, str], Report]
) -> None:
    report = trial(agent, "killed")
    assert report["failures"] == ["cut", None], report["messages"]
    assert report["text"].strip() == "resumed"
    assert len(set(report["sessions"])) == 1
    if agent != "aider":  # it was killed in its only request
        assert report["remembers"]
        assert report["made"] == "written\n"
    if agent == "gemini":  # it says what a call used only when it ends
        assert reported(report) == {"input": 61, "output": 8, "cached": 2, "written": 0}
    else:
        assert reported(report) == served(report, agent)


@pytest.mark.parametrize("agent", AGENTS)
def test_killed_before_the_first_answer_it_is_called_again(
    agent: str, trial: Callable[[str, str], Report]
) -> None:
    report = trial(agent, "unanswered")
    assert report["failures"][0] == "cut"
    assert report["failures"][1:] in ([None], ["no session", None]), report["messages"]
    assert report["text"].strip() == "done"
    assert reported(report) == served(report, agent)


@pytest.mark.parametrize("agent", AGENTS)
def test_too_many_requests_are_a_rate_limit_or_waited_for(
    agent: str, trial: Callable[[str, str], Report]
) -> None:
    report = trial(agent, "limited")
    gives_up = agent in {"claude", "codex"}
    assert report["failures"] == (["rate limited"] if gives_up else [None]), report["messages"]
    if gives_up:
        assert set(report["waited"]) == {"rate limited"}
    assert reported(report) == served(report, agent)


@pytest.mark.parametrize("agent", AGENTS)
def test_a_key_that_is_refused_is_no_result(
    agent: str, trial: Callable[[str, str], Report]
) -> None:
    report = trial(agent, "refused")
    assert report["failures"] == ["not authenticated"], report["messages"]


@pytest.mark.parametrize("agent", ["claude", "codex", "gemini", "opencode", "qwen"])
def test_a_context_that_is_full_is_said(agent: str, trial: Callable[[str, str], Report]) -> None:
    report = trial(agent, "full")
    assert report["failures"] == ["context full"], report["messages"]
    assert report["sessions"] == [None]


@pytest.mark.parametrize("agent", ["claude", "codex", "qwen"])
def test_a_schema_gives_a_structured_result(
    agent: str, trial: Callable[[str, str], Report]
) -> None:
    assert trial(agent, "structured")["structured"] == {"n": 3}


@pytest.mark.parametrize("agent", ["claude", "codex", "gemini", "qwen"])
def test_without_a_word_of_the_graph_it_writes_no_file(
    agent: str, trial: Callable[[str, str], Report]
) -> None:
    report = trial(agent, "own")
    assert report["made"] is None
    if agent == "gemini":
        assert report["failures"] == ["not permitted"]
    elif agent != "codex":  # which does not say that its sandbox has refused
        assert report["denied"]


@pytest.mark.parametrize("agent", ["claude", "gemini", "qwen"])
def test_a_session_that_exists_is_found_and_resumed(
    agent: str, trial: Callable[[str, str], Report]
) -> None:
    report = trial(agent, "session_used_twice")
    assert report["failures"] == [None, "session exists", None], report["messages"]
    assert reported(report) == served(report, agent)


@pytest.mark.parametrize("agent", AGENTS)
def test_a_run_that_was_killed_is_resumed_and_the_agent_in_its_session(
    agent: str, trial: Callable[[str, str], Report]
) -> None:
    report = trial(agent, "in_a_team")
    assert report["code"] == 0, report["printed"]
    assert [each["status"] for each in report["run"]["tasks"]] == ["complete"]
    if agent != "aider":  # it was killed in its only request
        assert report["remembers"]
    counted = served(report, agent)
    tokens = sum(counted.values()) - counted["cached"]
    if agent == "gemini":  # it reports a call at its end: what a killed one used is unknown
        tokens = 61 + 8
    assert report["run"]["tokens"] == tokens
