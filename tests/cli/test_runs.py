"""``maestro runs``."""

from __future__ import annotations

import time
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import Hive
from maestro_hive.maestro.state.records import EntryKind
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.unified_execution import ExecutionConfig, StatePersistence
from tests.cli.processes import answer, complaint, in_terminal, maestro
from tests.cli.sample_runs import (
    active_run,
    add,
    asks,
    crowded,
    ends,
    entry,
    execute,
    starts,
    workflow,
)

if TYPE_CHECKING:
    from pathlib import Path


def listed(folder: Path, *options: str) -> list[dict[str, Any]]:
    runs = answer(maestro("runs", *options, "--json", "--store", folder))["runs"]
    assert isinstance(runs, list)
    return runs


def statuses(folder: Path) -> dict[str, str]:
    return {run["run_id"]: run["status"] for run in listed(folder)}


def test_runs_are_listed_newest_first_one_per_line(tmp_path: Path) -> None:
    workflow(tmp_path, "first", "success", ends("success"))
    workflow(tmp_path, "second", "failed", ends("failed"), name="deploy")
    done = maestro("runs", "--store", tmp_path)
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert [line[:3] for line in lines] == [
        ["second", "deploy", "failed"],
        ["first", "build", "success"],
    ]
    assert all(datetime.fromisoformat(moment) for line in lines for moment in line[3:5])
    assert done.returncode == 0


def test_json_has_the_same_and_more(tmp_path: Path) -> None:
    workflow(tmp_path, "asking", "waiting", asks("approve"), asks("amount"))
    done = answer(maestro("runs", "--json", "--store", tmp_path))
    assert (done["store"], done["total"]) == (str(tmp_path), 1)
    (run,) = done["runs"]
    assert run.keys() == {
        "run_id",
        "workflow",
        "parent",
        "status",
        "executed",
        "started_at",
        "updated_at",
        "holder",
        "waits_for",
        "damage",
    }
    assert [wait["name"] for wait in run["waits_for"]] == ["approve", "amount"]
    since, until = (datetime.fromisoformat(run["waits_for"][0][key]) for key in ("since", "until"))
    assert (until - since).total_seconds() == 3600


def test_a_waiting_run_shows_for_what(tmp_path: Path) -> None:
    workflow(tmp_path, "asking", "waiting", asks("approve"), asks("amount"))
    assert maestro("runs", "--store", tmp_path).stdout.rstrip().endswith("\tapprove, amount")


def test_a_run_is_running_while_its_process_lives_and_stopped_when_it_was_killed(
    tmp_path: Path,
) -> None:
    with active_run(tmp_path, "run-1", of_workflow=True) as process:
        (run,) = listed(tmp_path)
        assert run["status"] == "running"
        assert (run["holder"]["pid"], run["executed"]) == (process.pid, True)
        process.kill()
        (run,) = listed(tmp_path)
        assert (run["status"], run["holder"], run["executed"]) == ("stopped", None, False)
        assert [each["run_id"] for each in listed(tmp_path, "--status", "stopped")] == ["run-1"]
        assert listed(tmp_path, "--status", "running") == []


def test_a_run_was_updated_when_its_last_entry_was_recorded(tmp_path: Path) -> None:
    workflow(tmp_path, "killed", "running", starts("part"))
    (before,) = listed(tmp_path)
    add(tmp_path, "killed", starts("another"))
    (after,) = listed(tmp_path)
    assert after["started_at"] == before["started_at"]
    assert after["updated_at"] > before["updated_at"]
    shown = answer(maestro("show", "killed", "--json", "--store", tmp_path))["run"]
    assert after["updated_at"] == shown["updated_at"]
    line = maestro("runs", "--store", tmp_path).stdout.split("\t")
    assert datetime.fromisoformat(line[4]) == datetime.fromisoformat(after["updated_at"])


def test_a_run_without_a_workflow_is_running_while_a_process_has_it_open(tmp_path: Path) -> None:
    execute(tmp_path, "left")
    with active_run(tmp_path, "live") as process:
        assert statuses(tmp_path) == {"live": "running", "left": "failed"}
        process.finish()
    assert statuses(tmp_path) == {"live": "success", "left": "failed"}


def test_runs_are_chosen_by_status_and_workflow(tmp_path: Path) -> None:
    for number, status in enumerate(["success", "failed", "cancelled", "failed"]):
        name = "even" if number % 2 == 0 else "odd"
        workflow(tmp_path, f"run-{number}", status, ends(status), name=name)

    def found(*options: str) -> list[str]:
        return [run["run_id"] for run in listed(tmp_path, *options)]

    assert found("--status", "failed") == ["run-3", "run-1"]
    assert found("--status", "failed", "--status", "success") == ["run-3", "run-1", "run-0"]
    assert found("--workflow", "even") == ["run-2", "run-0"]
    assert found("--workflow", "even", "--status", "failed") == []
    done = maestro("runs", "--status", "waiting", "--store", tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert "there are no such runs" in done.stderr


def test_children_are_listed_with_all_and_show_whose_they_are(tmp_path: Path) -> None:
    workflow(tmp_path, "whole", "success", ends("success"))
    for name in ("part-1", "part-2"):
        workflow(tmp_path, name, "success", ends("success"), name="part", parent="whole")
    workflow(tmp_path, "other", "failed", ends("failed"))
    assert [run["run_id"] for run in listed(tmp_path)] == ["other", "whole"]
    assert {run["run_id"]: run["parent"] for run in listed(tmp_path, "--all")} == {
        "other": None,
        "part-2": "whole",
        "part-1": "whole",
        "whole": None,
    }
    done = maestro("runs", "--all", "--limit", "2", "--store", tmp_path)
    assert [line.split("\t")[-1] for line in done.stdout.splitlines()] == ["", "whole"]
    assert "… and 2 more: --limit 0" in done.stderr
    done = maestro("runs", "--limit", "1", "--store", tmp_path)
    assert "… and 1 more: --limit 0" in done.stderr
    assert [run["run_id"] for run in listed(tmp_path, "--status", "success")] == ["whole"]


def test_a_hive_lists_all_runs_or_roots_with_their_parents(tmp_path: Path) -> None:
    workflow(tmp_path, "whole", "success", ends("success"))
    workflow(tmp_path, "part", "running", name="part", parent="whole")
    with active_run(tmp_path, "live", of_workflow=True):
        hive = Hive(tmp_path)
        found = {run.run_id: (run.parent, run.executed) for run in hive.runs()}
        roots = [run.run_id for run in hive.runs(roots=True)]
        hive.close()
    assert found == {"live": (None, True), "part": ("whole", False), "whole": (None, False)}
    assert roots == ["live", "whole"]


def test_a_status_that_no_run_can_have_is_refused(tmp_path: Path) -> None:
    workflow(tmp_path, "run", "success", ends("success"))
    for verb in (["runs"], ["runs", "--json"], ["purge", "--yes"]):
        done = maestro(*verb, "--status", "succes", "--store", tmp_path)
        message = complaint(done, code=2)
        assert "'succes' is not a status of a run" in message
        assert "pending, running, waiting, success, failed, cancelled, stopped" in message
    with StatePersistence(ExecutionConfig.in_folder(tmp_path), "own") as persistence:
        persistence.update_state(status="half-baked")
    assert [run["run_id"] for run in listed(tmp_path, "--status", "half-baked")] == ["own"]


def test_a_question_with_an_answer_on_its_way_is_listed_as_answered(tmp_path: Path) -> None:
    question = entry(EntryKind.WAIT_STARTED, name="n", what="answer", shape={"type": "number"})
    workflow(tmp_path, "run", "waiting", question)
    (before,) = listed(tmp_path)
    assert [wait["answered"] for wait in before["waits_for"]] == [False]
    assert maestro("answer", "run", "n", "5", "--store", tmp_path).returncode == 0
    (after,) = listed(tmp_path)
    assert [wait["answered"] for wait in after["waits_for"]] == [True]


def test_what_is_not_listed_is_counted(tmp_path: Path) -> None:
    for number in range(5):
        workflow(tmp_path, f"run-{number}", "success", ends("success"))
    done = maestro("runs", "--limit", "2", "--store", tmp_path)
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["run-4", "run-3"]
    assert "… and 3 more: --limit 0" in done.stderr
    everything = maestro("runs", "--limit", "0", "--store", tmp_path)
    assert len(everything.stdout.splitlines()) == 5
    assert "more" not in everything.stderr
    assert answer(maestro("runs", "--limit", "1", "--json", "--store", tmp_path))["total"] == 5


def test_a_folder_without_runs_is_reported_as_such(tmp_path: Path) -> None:
    SqliteStore(tmp_path / "state").close()
    done = maestro("runs", "--store", tmp_path / "state")
    assert (done.returncode, done.stdout) == (0, "")
    assert "there are no runs" in done.stderr
    assert listed(tmp_path / "state") == []


def test_wrong_use_is_one_sentence(tmp_path: Path) -> None:
    assert "it does not exist" in complaint(maestro("runs", "--store", tmp_path / "nothing"))
    assert not (tmp_path / "nothing").exists()
    complaint(maestro("runs", "--limit", "-1", "--store", tmp_path), code=2)
    complaint(maestro("runs", "a run", "--store", tmp_path), code=2)


def test_a_terminal_shows_a_table_with_relative_times(tmp_path: Path) -> None:
    workflow(tmp_path, "asking", "waiting", asks())
    seen = in_terminal("runs", "--store", tmp_path, NO_COLOR="1")
    assert seen.returncode == 0
    heading, line = seen.text.splitlines()[1:3]
    assert heading.split() == ["run", "workflow", "status", "started", "updated", "waits", "for"]
    assert line.split()[:3] == ["asking", "build", "waiting"]
    assert "ago" in line or "now" in line


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 120])
def test_a_long_run_id_hides_nothing_however_narrow_the_terminal(
    tmp_path: Path, columns: int
) -> None:
    long = "parent.build-0123456789." * 5
    workflow(tmp_path, long, "waiting", asks("approve-release"), name="release-to-production")
    workflow(tmp_path, "short", "failed", ends("failed"))
    seen = in_terminal("runs", "--store", tmp_path, columns=columns, NO_COLOR="1")
    lines = seen.text.splitlines()
    table = lines[next(at for at, line in enumerate(lines) if line.startswith("run")) :]
    assert max(map(len, table)) <= columns
    for word in ("waiting", "failed", "short"):
        assert any(word in line.split() for line in table), seen.text
    column = -1 if columns < 80 else 0  # where there is no room for a table, one block per run
    assert long in "".join(line.split()[column] for line in table if line.strip())


def test_fifty_thousand_runs_are_listed_quickly(tmp_path: Path) -> None:
    crowded(tmp_path)
    for options, more in (((), 4_950), (("--all",), 49_950)):
        started = time.process_time()
        done = maestro("runs", *options, "--store", tmp_path)
        took = time.process_time() - started
        assert len(done.stdout.splitlines()) == 50
        assert "\tstopped\t" in done.stdout
        assert f"… and {more:,} more: --limit 0" in done.stderr
        assert took < 1  # 0.1 on a machine that is not busy
