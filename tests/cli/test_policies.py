"""``maestro policy`` and ``maestro audit``, and a policy seen through the command alone."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

from maestro_hive.engine.audit import AuditLog
from tests.cli.processes import answer, complaint, maestro, maestro_process, start_maestro

if TYPE_CHECKING:
    from pathlib import Path

_SECONDS = 60.0

POLICY = """
default = "deny"

[protected]
paths = [".env"]

[personas]
dev = "developer"

[roles.developer]
allow_tools = ["write_file", "deploy"]

[[rules]]
effect = "allow"
paths = ["src/**"]

[[rules]]
name = "a person deploys"
effect = "ask"
tools = ["deploy"]
"""

PROGRAM = """
from maestro_hive import Hive

hive = Hive("state", policy="policy.toml")

@hive.step(persona="dev")
async def write_file(path: str) -> str:
    return f"wrote {path}"

@hive.step(persona="dev")
async def deploy() -> str:
    return "deployed"

@hive.workflow
async def write(path: str) -> str:
    return await write_file(path)

@hive.workflow
async def release() -> str:
    return await deploy()
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "policy.toml").write_text(POLICY)
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- policy check ---------------------------------------------------------------------------------


def test_a_valid_policy_is_summarised(project: Path) -> None:
    done = maestro("policy", "check", "policy.toml")
    assert done.returncode == 0
    assert done.stdout == (
        "policy.toml is valid: 1 protected path, 1 role, 1 persona, 2 rules; default: deny\n"
    )
    assert answer(maestro("policy", "check", "policy.toml", "--json"))["valid"] is True


@pytest.mark.parametrize(
    "words, code, text",
    [
        ("--tool write_file --path src/a --role developer", 0, "allowed by rules[0]"),
        ("--tool write_file --path src/../.env --persona dev", 1, "denied by protected.paths[0]"),
        ("--tool write_file --path x --persona dev", 1, "denied by default"),
        ("--tool deploy --persona dev", 75, "needs approval by rules[1]"),
        ("--tool other --persona dev", 1, "denied by roles.developer.allow_tools"),
    ],
)
def test_a_decision_is_printed_with_its_rule(
    project: Path, words: str, code: int, text: str
) -> None:
    done = maestro("policy", "check", "policy.toml", *words.split())
    assert (done.returncode, done.stdout.startswith(text)) == (code, True), done
    found = answer(maestro("policy", "check", "policy.toml", *words.split(), "--json"), code)
    assert text.endswith(f"by {found['rule']}")


def test_all_errors_of_a_policy_are_printed(project: Path) -> None:
    (project / "policy.toml").write_text("protected.paths = 5\nrules = [{}]")
    done = maestro("policy", "check", "policy.toml")
    assert done.returncode == 2
    for place in ("the file: 'default'", "protected.paths: ", "rules[0]: 'effect'"):
        assert place in done.stderr


def test_a_path_without_a_tool_is_wrong_use(project: Path) -> None:
    assert "--tool" in complaint(maestro("policy", "check", "policy.toml", "--path", "a"), 2)


# --- through the command alone --------------------------------------------------------------------


def test_a_policy_forbids_allows_and_asks(project: Path) -> None:
    allowed = maestro_process("run", "program:write", "src/a", "--run-id", "one")
    assert (allowed.returncode, allowed.stdout) == (0, "wrote src/a\n")
    denied = maestro_process("run", "program:write", ".env", "--run-id", "two")
    assert denied.returncode == 1
    assert "'.env' is protected (protected_path" in denied.stderr
    for run, word, said in (("yes", "yes", "deployed\n"), ("no", "no", "")):
        running = start_maestro("run", "program:release", "--run-id", run)
        wait_until_asked(run)
        running.kill()  # what was asked stays asked
        running.communicate(timeout=_SECONDS)
        done = maestro("answer", run, "approve-deploy", word, "--by", "eve", "--store", "state")
        assert done.returncode == 0, done
        resumed = maestro_process("run", "program:release", "--run-id", run)
        assert resumed.stdout == said, resumed
    again = maestro_process("run", "program:release", "--run-id", "no")
    assert (again.returncode, "refused by eve (approval_refused" in again.stderr) == (1, True)

    shown = answer(maestro("audit", "show", "--store", "state", "--json"))["decisions"]
    assert [(each["run_id"], each["allowed"]) for each in shown] == [
        ("one", True),
        ("two", False),
        ("yes", True),
        ("no", False),
    ]
    assert maestro("audit", "verify", "--store", "state").returncode == 0


def wait_until_asked(run: str) -> None:
    deadline = time.monotonic() + _SECONDS
    while "approve-deploy" not in maestro("runs", "--store", "state").stdout:
        assert time.monotonic() < deadline, f"run {run} does not ask"
        time.sleep(0.02)


# --- audit ----------------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from maestro_hive.maestro.state.stores import close_store, open_store

    monkeypatch.chdir(tmp_path)
    store = open_store("state")
    made = AuditLog("state/audit.jsonl", store)
    for number in range(4):
        made.write(
            {
                "timestamp": f"2026-11-18T01:00:0{number}+00:00",
                "persona_id": f"p{number % 2}",
                "role": "developer",
                "tool": "write_file",
                "path": "a.py",
                "allowed": number != 2,
                "violation_type": "forbidden" if number == 2 else None,
                "run_id": "r1" if number < 2 else "r2",
                "rule": "default",
            }
        )
    close_store(store)
    return tmp_path / "state" / "audit.jsonl"


@pytest.mark.parametrize(
    "words, numbers",
    [
        ("", [1, 2, 3, 4]),
        ("--run r2", [3, 4]),
        ("--persona p0", [1, 3]),
        ("--denied", [3]),
        ("--limit 1", [4]),
        ("--run r1 --persona p1", [2]),
        ("state/audit.jsonl --denied", [3]),
    ],
)
def test_decisions_are_chosen(log: Path, words: str, numbers: list[int]) -> None:
    found = answer(maestro("audit", "show", *words.split(), "--store", "state", "--json"))
    assert [each["number"] for each in found["decisions"]] == numbers


def test_decisions_are_shown(log: Path) -> None:
    done = maestro("audit", "show", "--denied", "--store", "state")
    assert done.stdout == (
        "3\t2026-11-18T01:00:02+00:00\tp0\twrite_file\ta.py\tforbidden\tdefault\tr2\n"
    )


def test_a_log_is_verified_with_its_journal(log: Path) -> None:
    done = maestro("audit", "verify", "--store", "state")
    assert (done.returncode, done.stdout) == (
        0,
        "state/audit.jsonl: 4 lines, as written, and complete\n",
    )
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:3]))
    text = complaint(maestro("audit", "verify", "--store", "state"))
    assert "maestro: state/audit.jsonl: line 4: it is missing" in text
    found = answer(maestro("audit", "verify", "--store", "state", "--json"), 1)["logs"][0]
    assert (found["bad_line"], found["intact"], found["anchored"]) == (4, False, 4)
    log.unlink()
    assert "line 1: the file was deleted" in complaint(
        maestro("audit", "verify", "--store", "state")
    )
    shown = maestro("audit", "show", "--store", "state")
    assert "there is no audit log" in complaint(shown)


def test_a_log_without_a_journal_is_verified_as_far_as_it_can_be(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    AuditLog(path).write({"allowed": True})
    done = maestro("audit", "verify", path, "--store", tmp_path / "none")
    assert (done.returncode, done.stdout) == (0, f"{path}: 1 line, as written\n")
    assert "no anchor in a journal" in done.stderr
    path.write_text(json.dumps({"allowed": True}) + "\n")
    assert "line 1: " in complaint(maestro("audit", "verify", path, "--store", tmp_path / "none"))
    missing = maestro("audit", "verify", tmp_path / "missing", "--store", tmp_path / "none")
    assert "there is no audit log" in complaint(missing)


def test_a_folder_without_a_log_says_so(log: Path, tmp_path: Path) -> None:
    from maestro_hive.maestro.state.stores import close_store, open_store

    close_store(open_store(tmp_path / "empty"))
    for verb in ("verify", "show"):
        text = complaint(maestro("audit", verb, "--store", tmp_path / "empty"), 2)
        assert "anchors no audit log" in text
