"""Notifications of team runs: bell, webhook and command; one that fails changes nothing else."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from maestro_hive.cli import command
from tests.cli.processes import complaint, in_terminal
from tests.cli.test_team import called, folder, started, write
from tests.team.conftest import task
from tests.webhook_server import WebhookServer

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["folder"]


def test_a_webhook_and_a_command_are_told_of_the_end_of_a_run(folder: Path) -> None:
    graph = write(folder, task("A"), task("BAD", "exit 1"), retry=1)
    notify = "sh -c 'cat > told; echo \"$1\" > said' sh {message}"
    with WebhookServer() as server:
        done = called(folder, "run", graph, "--notify", notify, "--notify", server.address)
        (message,) = server.messages()
    assert done.returncode == command.FAILED
    assert "notification" not in done.stderr
    assert json.loads((folder / "told").read_text()) == message
    sentence = "my shop: failed, 1 of 2 tasks complete; failed: BAD"
    assert (folder / "said").read_text() == f"{sentence}\n"
    assert message == {
        "event": "run_ended",
        "run_id": "my-shop",
        "feature": "my shop",
        "status": "failed",
        "message": sentence,
        "text": sentence,
        "command": "maestro retry my-shop && maestro resume my-shop",
        "task": None,
        "question": None,
        "complete": 1,
        "total": 2,
        "failed": ["BAD"],
        "tokens": 0,
        "usd": 0.0,
    }


def test_a_person_who_is_needed_is_notified(folder: Path) -> None:
    asks = {"command": ["sh", "-c", "echo which number?; exit 3"]}
    graph = write(folder, task("A"), persona=asks)
    with WebhookServer() as server:
        done = called(folder, "run", graph, "--no-wait", "--notify", server.address)
        (message,) = server.messages()
    assert done.returncode == command.PERSON_NEEDED
    assert (message["event"], message["task"], message["question"], message["command"]) == (
        "person_needed",
        "A",
        "which number?",
        "maestro answer my-shop A TEXT",
    )


def test_a_notification_has_what_the_run_has_spent(folder: Path) -> None:
    (folder / "spending.py").write_text(
        "from maestro_hive import current\n"
        "def spend(task):\n"
        "    current().spend(tokens=500, usd=0.1)\n"
        "    current().spend(tokens=500, usd=0.2)\n"
    )
    spends = {"id": "A", "title": "A", "persona": {"python": "spending:spend"}}
    graph = write(folder, spends, task("ASK", "echo which number?; exit 3", "A"))
    notify = "sh -c 'cat > told'"
    with started(folder, "run", graph, "--no-wait", "--notify", notify) as engine:
        engine.communicate()
    assert engine.returncode == command.PERSON_NEEDED
    told = json.loads((folder / "told").read_text())
    assert (told["event"], told["tokens"], told["usd"]) == ("person_needed", 1000, 0.3)


def test_a_task_over_its_own_budget_has_no_command_that_helps(folder: Path) -> None:
    (folder / "spending.py").write_text(
        "from maestro_hive import current\ndef spend(task):\n    current().spend(tokens=500)\n"
    )
    spends = {"id": "A", "title": "A", "budget": {"tokens": 100}}
    graph = write(folder, spends, persona={"python": "spending:spend"})
    with started(folder, "run", graph, "--notify", "sh -c 'cat > told'") as engine:
        engine.communicate()
    assert engine.returncode == command.FAILED
    told = json.loads((folder / "told").read_text())
    assert (told["event"], told["failed"], told["command"]) == ("run_ended", ["A"], None)


def test_a_run_that_is_left_for_people_waits_for_its_notification(folder: Path) -> None:
    asks = {"command": ["sh", "-c", "echo which number?; exit 3"]}
    graph = write(folder, task("A"), persona=asks)
    notify = "sh -c 'sleep 2; cat > told'"
    done = called(folder, "run", graph, "--no-wait", "--notify", notify)
    assert done.returncode == command.PERSON_NEEDED
    assert json.loads((folder / "told").read_text())["event"] == "person_needed"


def test_a_notification_that_fails_is_said_and_does_not_fail_the_run(folder: Path) -> None:
    graph = write(folder, task("A"))
    targets = ["--notify", "false"]
    with WebhookServer(faults=["any:503"]) as server:
        done = called(folder, "run", graph, *targets, "--notify", server.address)
    assert done.returncode == 0
    assert done.stderr.count("maestro: a notification was not sent: ") == 2
    for part in (
        "the notification command false ended with 1",
        "answered with status 503",
    ):
        assert part in done.stderr
    assert server.path not in done.stderr


def test_the_bell_rings_in_a_terminal_and_a_variable_names_targets(folder: Path) -> None:
    graph = write(folder, task("A"))
    state = str(folder.parent / "state")
    seen = in_terminal("run", graph, "--plain", MAESTRO_STATE_DIR=state, MAESTRO_NOTIFY="bell")
    assert (seen.returncode, seen.text.count("\a")) == (0, 1)
    assert "\a" not in called(folder, "run", graph, "--notify", "bell").stderr


def test_a_target_that_cannot_be_one_is_refused_before_anything_starts(folder: Path) -> None:
    graph = write(folder, task("A", "touch started"))
    for target, reason in {
        "http://example.com/hook": "must be encrypted; use https://",
        "ftp://example.com/secret": "--notify: ftp://example.com/… is not an address of a webhook",
        "'half": "cannot be split",
        " ": "--notify needs bell, an address, or a command",
    }.items():
        refused = complaint(called(folder, "run", graph, "--notify", target), command.WRONG_USE)
        assert reason in refused
        assert "secret" not in refused
    assert not (folder / "started").exists()
    both = called(folder, "run", "shop:build", "--notify", "bell")
    assert "--notify" in complaint(both, command.WRONG_USE)
