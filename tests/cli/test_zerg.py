"""``maestro zerg``: the verbs that zerg's users know, with its flags."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import pytest

from faults.team_kills import is_alive
from tests.cli.processes import answer, complaint
from tests.cli.test_team import called, folder, number_in, started
from tests.team.conftest import SHELL, task

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["folder"]  # a fixture

STATE = ".mahabharatha/state.json"
#: Fails until there is a file that is called as it says.
NEEDS_MORE = "test -f more || { echo more is missing; exit 1; }"


def spec(folder: Path, feature: str, *tasks: dict[str, Any], **more: Any) -> str:
    """Write a graph where zerg has it."""
    path = folder / ".gsd" / "specs" / feature / "task-graph.json"
    path.parent.mkdir(parents=True)
    document = {"feature": feature, "persona": SHELL, "tasks": list(tasks), **more}
    path.write_text(json.dumps(document))
    return str(path.relative_to(folder))


def two_levels(folder: Path, second: str = "echo b > b") -> str:
    first = task("A", "echo made a; echo a > a", files=["a"])
    return spec(
        folder, "shop", first, task("B", second, "A"), retry={"max_attempts": 1, "rounds": 1}
    )


def zerg(folder: Path, *words: str) -> Any:
    return called(folder, "zerg", *words)


def statuses(folder: Path) -> dict[str, str]:
    shown = answer(zerg(folder, "status", "--json"))
    return {each["id"]: each["status"] for each in shown["run"]["tasks"]}


# --- rush -----------------------------------------------------------------------------------------


def test_rush_executes_the_only_graph_and_again_executes_nothing(folder: Path) -> None:
    two_levels(folder)
    assert "would" not in zerg(folder, "rush").stdout
    assert statuses(folder) == {"A": "complete", "B": "complete"}
    again = zerg(folder, "rush", "--resume", "--level", "2", "-w", "2")
    assert again.returncode == 0
    assert "2 reused" in again.stdout


def test_rush_takes_the_current_feature_of_several(folder: Path) -> None:
    spec(folder, "cart", task("A", "true"))
    spec(folder, "mail", task("A", "true"))
    said = complaint(zerg(folder, "rush"), 2)
    assert "several features" in said
    assert "cart, mail" in said
    (folder / ".gsd" / ".current-feature").write_text("mail\n")
    assert "run: mail" in zerg(folder, "rush").stderr
    assert "run: cart" in zerg(folder, "rush", "--feature", "cart").stderr
    assert "run mail" in zerg(folder, "status").stdout
    assert "there is: cart, mail" in complaint(zerg(folder, "rush", "--feature", "page"), 2)


def test_rush_without_a_graph_says_where_it_was_looked_for(folder: Path) -> None:
    assert ".gsd/specs/*/task-graph.json" in complaint(zerg(folder, "rush"), 2)


def test_rush_dry_run_executes_nothing(folder: Path) -> None:
    path = two_levels(folder)
    done = zerg(folder, "rush", "-g", path, "--dry-run", "-w", "3")
    assert "with 3 workers" in done.stdout
    assert not (folder / "a").exists()


def test_rush_resume_and_level_need_what_they_go_on_from(folder: Path) -> None:
    two_levels(folder, NEEDS_MORE)
    (folder / ".gsd" / "specs" / "other").mkdir()
    assert zerg(folder, "rush").returncode == 1
    other = spec(folder, "another", task("A", "true"))
    said = complaint(zerg(folder, "rush", "--resume", "-g", other), 2)
    assert "--resume: there is no run of 'another'" in said
    said = complaint(zerg(folder, "rush", "--level", "3", "--feature", "shop"), 2)
    assert "tasks below it are not complete: B" in said


def test_rush_stops_when_its_time_is_over_and_can_be_resumed(folder: Path) -> None:
    two_levels(folder, "test -f more || { echo $$ > pid; sleep 60; }")
    process = started(folder, "zerg", "rush", "--timeout", "2")
    assert process.wait(60) == 128 + signal.SIGTERM
    _, said = process.communicate()
    assert "--timeout: 2 s are over" in said
    (folder / "more").touch()
    assert zerg(folder, "rush").returncode == 0
    assert not (folder / "pid").exists() or not is_alive(number_in(folder / "pid"))


# --- status and logs ------------------------------------------------------------------------------


def test_status_shows_one_level_or_the_workers(folder: Path) -> None:
    two_levels(folder)
    zerg(folder, "rush", "-w", "1")
    assert zerg(folder, "status", "-l", "1").stdout == "1\tA\tcomplete\t1\tA\n"
    shown = zerg(folder, "status", "--tasks", "--workers").stdout.splitlines()
    assert shown[-1].split("\t") == ["1", "idle", "", "2"]
    assert "has the levels 1, 2" in complaint(zerg(folder, "status", "-l", "7"), 2)
    assert "cannot be combined" in complaint(zerg(folder, "status", "-l", "1", "--watch"), 2)
    assert zerg(folder, "status", "--watch").returncode == 0


def test_status_of_a_folder_without_a_run_says_how_to_start_one(folder: Path) -> None:
    spec(folder, "shop", task("A", "true"))
    zerg(folder, "rush")
    said = complaint(zerg(folder, "status", "--feature", "mail"), 2)
    assert "there is no run of 'mail'" in said
    assert "maestro zerg rush" in said


def test_logs_are_those_of_tasks(folder: Path) -> None:
    two_levels(folder, "echo one; echo two; echo three")
    zerg(folder, "rush")
    assert zerg(folder, "logs", "--task", "A").stdout == "made a\n"
    assert zerg(folder, "logs", "--task", "B", "-n", "2").stdout == "two\nthree\n"
    assert "==> A <==" in zerg(folder, "logs", "--follow").stdout
    lines = zerg(folder, "logs", "--task", "A", "--json").stdout.splitlines()
    assert "".join(json.loads(each)["data"] for each in lines) == "made a\n"
    assert "use --task ID" in complaint(zerg(folder, "logs", "1"), 2)
    assert "not possible with --follow" in complaint(zerg(folder, "logs", "-n", "2", "--follow"), 2)


# --- stop and retry -------------------------------------------------------------------------------


@pytest.mark.parametrize("force", [False, True])
def test_stop_ends_the_process_and_what_it_executes(folder: Path, force: bool) -> None:
    two_levels(folder, "test -f more || { echo $$ > pid; sleep 60; }")
    process = started(folder, "zerg", "rush")
    pid = number_in(folder / "pid")
    done = zerg(folder, "stop", *(["--force"] if force else []))
    assert ("was killed" if force else "was stopped") in done.stdout
    assert process.wait(60) == (-signal.SIGKILL if force else 128 + signal.SIGTERM)
    process.communicate()
    (folder / "more").touch()
    assert zerg(folder, "rush").returncode == 0
    assert not is_alive(pid)
    assert "is executed by no process" in zerg(folder, "stop", "--force").stdout


def test_a_worker_cannot_be_stopped_alone(folder: Path) -> None:
    said = complaint(zerg(folder, "stop", "-w", "2"), 2)
    assert "a worker is no process" in said
    assert "maestro zerg rush --workers N" in said


@pytest.mark.parametrize("what", [["B", "--reset"], ["--all-failed"]])
def test_what_failed_is_executed_by_the_next_rush_after_a_retry(
    folder: Path, what: list[str]
) -> None:
    two_levels(folder, NEEDS_MORE)
    assert zerg(folder, "rush").returncode == 1
    (folder / "more").touch()
    assert "is retried when it is resumed" in zerg(folder, "retry", *what).stdout
    assert zerg(folder, "rush").returncode == 0
    assert statuses(folder) == {"A": "complete", "B": "complete"}


def test_retry_needs_a_task_or_all_failed(folder: Path) -> None:
    for words in ([], ["A", "--all-failed"]):
        assert "Name a task, or give --all-failed" in complaint(zerg(folder, "retry", *words), 2)


# --- cleanup --------------------------------------------------------------------------------------


def test_cleanup_deletes_the_runs_and_the_state_file_and_leaves_the_files(folder: Path) -> None:
    two_levels(folder)
    zerg(folder, "rush")
    shown = zerg(folder, "cleanup", "--dry-run", "--keep-branches").stdout
    assert shown == f"would delete run shop\nwould delete {STATE}\n"
    assert "maestro logs shop" in complaint(zerg(folder, "cleanup", "--keep-logs"), 2)
    assert "Confirm with --yes" in complaint(zerg(folder, "cleanup"), 2)
    assert (folder / STATE).exists()
    purged, *rest = zerg(folder, "cleanup", "--yes").stdout.splitlines()
    assert purged.startswith("run 'shop' is purged")
    assert rest == [f"{STATE} is deleted"]
    assert not (folder / STATE).exists()
    assert (folder / "a").exists()
    assert "there is no run" in complaint(zerg(folder, "status"), 2)
    assert "2 executed" in zerg(folder, "rush").stdout


def test_a_state_file_that_is_none_is_named(folder: Path) -> None:
    two_levels(folder)
    zerg(folder, "rush")
    (folder / STATE).write_text("{}")
    assert STATE in complaint(zerg(folder, "cleanup", "--yes"), 2)
