"""Tasks that share a folder write the files that they own, and no others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import Hive
from maestro_hive.hive.errors import RunFailedError
from maestro_hive.team import folder_files, ownership
from maestro_hive.team.errors import OwnerUnknownError
from maestro_hive.team.runner import TeamRunner
from tests.hive.conftest import quick_config
from tests.team.conftest import SHELL, graph, task

if TYPE_CHECKING:
    from pathlib import Path

    from tests.team.conftest import Team

#: What a persona prints of the feedback that it gets.
FEEDBACK = 'printf "%s" "$MAESTRO_FEEDBACK" > ../feedback'
#: Two tasks are executed at the same time: each waits for the other.
MEET = "touch ../$MAESTRO_TASK_ID; while ! [ -f ../A -a -f ../B ]; do sleep 0.02; done"
#: Then one of them waits for what the other one makes.
AFTER = "while ! [ -f nobodys ]; do sleep 0.02; done"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run."""
    made = tmp_path / "work"
    made.mkdir()
    return made


def test_a_task_that_changes_a_file_of_nobody_fails_and_is_told_which(team: Team) -> None:
    (team.folder / "read.me").write_text("first")
    (team.folder / "old").touch()
    does = f"{FEEDBACK}; touch mine other; echo longer > read.me; rm old"
    with pytest.raises(RunFailedError, match="failed: A"):
        team.run(graph(task("A", does, files=["mine"]), retry=2))
    told = (team.folder / "../feedback").read_text()
    assert "created other" in told
    assert "changed read.me" in told
    assert "deleted old" in told
    assert "mine" not in told


def test_a_task_that_puts_everything_back_succeeds(team: Team) -> None:
    (team.folder / "kept").write_text("12345")
    does = "touch mine; if [ -f other ]; then rm other; printf 12345 > kept; else touch other; rm kept; fi"
    team.run(graph(task("A", does, files=["mine"]), retry=2))
    assert sorted(each.name for each in team.folder.iterdir()) == [".mahabharatha", "kept", "mine"]


def test_files_whose_names_are_no_utf8_are_named_and_can_be_put_back(team: Team) -> None:
    kept = team.folder / os.fsdecode(b"kept\xff")
    kept.write_text("12345")
    does = r"""
        touch mine; new=$(printf 'new\377'); kept=$(printf 'kept\377'); %s;
        case $MAESTRO_ATTEMPT in
        1) touch "$new"; rm "$kept" ;;
        2) rm "$new"; printf 54321 > "$kept" ;;
        3) printf 12345 > "$kept" ;;
        esac
    """
    team.run(graph(task("A", " ".join((does % FEEDBACK).split("\n")), files=["mine"]), retry=3))
    told = (team.folder / "../feedback").read_text()
    assert r"created new\xff" in told
    assert r"deleted kept\xff" in told
    assert r"changed kept\xff" in told
    assert kept.read_text() == "12345"


def test_a_change_to_a_name_that_is_no_utf8_can_be_of_two_tasks(
    team: Team, caplog: pytest.LogCaptureFixture
) -> None:
    made = graph(
        task("A", f"{MEET}; {AFTER}; touch a", files=["a", "nobodys"]),
        task("B", f"{MEET}; touch b \"$(printf 'x\\377')\" nobodys", files=["b"]),
        retry=1,
    )
    with caplog.at_level(logging.WARNING, "maestro_hive"):
        team.run(made)
    assert r"x\xff (by A or B)" in caplog.text


def test_other_contents_of_the_same_size_are_not_put_back(team: Team) -> None:
    (team.folder / "kept").write_text("12345")
    does = "echo once >> ../log; touch mine; printf 54321 > kept"
    with pytest.raises(RunFailedError):
        team.run(graph(task("A", does, files=["mine"]), retry=2))
    assert len(team.lines("../log")) == 2
    does = "touch mine; [ -f ../again ] || printf 99999 > kept; [ -f ../again ] && printf 54321 > kept; touch ../again"
    team.run(graph(task("A", does, files=["mine"]), retry=2), "again")


def test_a_file_that_is_written_again_as_it_was_is_not_changed(team: Team) -> None:
    (team.folder / "kept").write_text("12345")
    team.run(graph(task("A", "printf 12345 > new; mv new kept", files=["mine"]), retry=1))


def test_of_a_large_file_that_was_not_read_the_size_counts(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "MAX_READ_BYTES", 3)
    (team.folder / "kept").write_text("12345")
    does = "touch mine; if [ -f other ]; then rm other; printf 54321 > kept; else touch other; rm kept; fi"
    team.run(graph(task("A", does, files=["mine"]), retry=2))


def test_what_is_not_put_back_fails_the_next_attempts_too(team: Team) -> None:
    does = "echo once >> ../log; touch mine; [ -f other ] || touch other"
    with pytest.raises(RunFailedError):
        team.run(graph(task("A", does, files=["mine"]), retry=3))
    assert len(team.lines("../log")) == 3


@pytest.mark.parametrize("own", ["out/", "out/*.txt", "./out", "other/../out/deep/"])
def test_a_folder_that_is_owned_is_owned_with_all_that_is_in_it(team: Team, own: str) -> None:
    does = "mkdir -p out/deep; touch out/deep/a"
    team.run(graph(task("A", does, files={"create": [own]}), retry=1))


def test_files_that_are_moved_and_deleted_are_owned(team: Team) -> None:
    for name in ("a", "b"):
        (team.folder / name).touch()
    files = {"delete": ["a"], "move": [{"from": "b", "to": "c"}]}
    team.run(graph(task("A", "rm a; mv b c", files=files), retry=1))


def test_python_personas_are_checked_as_well(team: Team) -> None:
    text = "def work(task):\n    (task.folder / 'other').touch()\n"
    (team.folder / "writes_other.py").write_text(text)
    python = {"python": "writes_other:work"}
    with pytest.raises(RunFailedError):
        team.run(graph(task("A", persona=python, files=["mine"]), retry=1))


def test_caches_verifications_and_what_git_ignores_are_nobodys_failure(team: Team) -> None:
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    subprocess.run(["git", "init", "-q", str(team.folder)], check=True)
    (team.folder / ".gitignore").write_text("*.log\n")
    does = "mkdir __pycache__ .pytest_cache; touch a __pycache__/x .pytest_cache/y a.log"
    made = graph(
        task("A", does, files=["a"], verification="mkdir build; touch build/report"), retry=1
    )
    team.run(made)


def test_a_task_that_declares_no_files_is_not_checked(team: Team) -> None:
    made = graph(task("A", "touch a", files=["a"]), task("B", "touch b", "A"), retry=1)
    team.run(made)
    with pytest.raises(RunFailedError):  # it says that it writes nothing
        team.run(graph(task("A", "touch c", files={"read": ["a"]}), retry=1), "again")


def test_a_change_that_can_be_of_two_tasks_names_both(
    team: Team, caplog: pytest.LogCaptureFixture
) -> None:
    made = graph(
        task("A", f"{MEET}; {AFTER}; touch a", files=["a"]),
        task("B", f"{MEET}; touch b nobodys", files=["b"]),
        retry=1,
    )
    with caplog.at_level(logging.WARNING, "maestro_hive"):
        team.run(made)
    (said,) = [each.getMessage() for each in caplog.records if "owns" in each.getMessage()]
    assert "nobodys (by A or B)" in said


def test_strict_stops_the_run_for_a_change_that_can_be_of_two_tasks(team: Team) -> None:
    made = graph(
        task("A", f"{MEET}; {AFTER}; touch a", files=["a"]),
        task("B", f"{MEET}; [ -f nobodys ] || touch nobodys; touch b", files=["b"]),
        task("LAST", "touch last", "A B", files=["last"]),
        retry=1,
    )
    with pytest.raises(OwnerUnknownError, match=r"nobodys \(by A or B\)"):
        team.run_strictly(made)
    assert not (team.folder / "last").exists()
    team.run_strictly(made)  # a person has looked at it
    assert (team.folder / "last").exists()


def test_a_file_of_another_task_that_runs_is_its_own(team: Team) -> None:
    made = graph(
        task("A", f"{MEET}; touch b1 b2", files=["b1", "b2"]),
        task("B", f"{MEET}; while ! [ -f b2 ]; do sleep 0.02; done", files=["c"]),
        retry=1,
    )
    team.run(made)


def test_what_a_failing_verification_writes_is_held_against_no_other_task(team: Team) -> None:
    again = "[ -f report.xml ] && touch ../again"
    made = graph(
        task(
            "A",
            f"{MEET}; touch a; {again}; :",
            files=["a"],
            verification="[ -f report.xml ] || { touch report.xml; exit 1; }",
        ),
        # It ends when the next attempt of A has started.
        task("B", f"{MEET}; while ! [ -f ../again ]; do sleep 0.02; done; touch b", files=["b"]),
        retry=2,
    )
    team.run(made)


def test_a_task_that_fails_during_a_look_may_have_changed_what_that_has_passed(
    team: Team, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scan, scanned, may_end = folder_files.snapshot, threading.Event(), threading.Event()
    may_end.set()

    def slow(*given: Any) -> Any:
        found = scan(*given)
        scanned.set()
        assert may_end.wait(30)
        return found

    monkeypatch.setattr(ownership, "snapshot", slow)
    made = graph(*(task(name, files=[name.lower()]) for name in "ABC"))

    @team.hive.step(max_attempts=1)
    async def tasks() -> None:
        owner = ownership.Ownership(made, team.folder)

        async def begin_c() -> None:
            async with owner.working("C"):
                pass

        async with owner.working("B"):
            with contextlib.suppress(ZeroDivisionError):
                async with owner.working("A"):
                    scanned.clear()
                    may_end.clear()
                    other = asyncio.create_task(begin_c())
                    assert await asyncio.to_thread(scanned.wait, 30)
                    (team.folder / "nobodys").touch()
                    raise ZeroDivisionError
            may_end.set()
            await other

    @team.hive.workflow
    async def flow() -> None:
        await tasks()

    with caplog.at_level(logging.WARNING, "maestro_hive"):
        asyncio.run(team.hive.run(flow))
    assert "nobodys (by A or B" in caplog.text


def test_a_folder_with_too_many_files_is_not_checked_and_that_is_said(
    team: Team, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(folder_files, "MAX_FILES", 3)
    monkeypatch.setattr(ownership, "MAX_FILES", 3)
    for name in "abcd":
        (team.folder / name).touch()
    with caplog.at_level(logging.WARNING, "maestro_hive"):
        team.run(graph(task("A", "touch other", files=["mine"]), retry=1))
    assert "more than 3 files" in caplog.text


def test_a_folder_that_had_too_many_files_for_a_while_fails_no_task(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_files, "MAX_FILES", 10)
    is_less = "grep -q '.C.: .*.complete.,' .mahabharatha/state.json"
    made = graph(
        task("A", f"{MEET}; while ! {is_less}; do sleep 0.02; done; touch a", files=["a"]),
        task(
            "B", f"{MEET}; mkdir b; for i in 0 1 2 3 4 5; do touch b/$i b/$i$i; done", files=["b/"]
        ),
        task("C", "rm -r b", "B"),
        retry=1,
        timeout_seconds=60,
    )
    team.run(made)


def test_nothing_is_looked_at_if_no_task_declares_files(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(ownership, "snapshot", fail)
    team.run(graph(task("A", "touch a"), task("B", "touch b", "A")))


def test_symbolic_links_and_unreadable_folders_are_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").touch()
    found = folder_files.snapshot(tmp_path)
    assert found is not None
    assert sorted(found) == ["dangling", "in/a", "loop"]
    assert folder_files.snapshot(tmp_path / "missing") == {}


@pytest.mark.parametrize("state", ["link/state", "work/state", "link/other"])
@pytest.mark.parametrize("place", ["link", "work"])
def test_a_state_folder_in_the_folder_of_the_run_is_no_task_s_also_by_a_link(
    tmp_path: Path, place: str, state: str
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "link").symlink_to("work")
    (tmp_path / "work/real").mkdir()
    (tmp_path / "work/other").symlink_to("real")
    does = 'touch mine; echo "{\\"current_step\\": 1}" > "$MAESTRO_PROGRESS"'
    made = graph(task("A", does, files=["mine"]), retry=1)

    async def execute() -> dict[str, Any]:
        async with Hive(tmp_path / state, quick_config()) as hive:
            return await TeamRunner(hive).run(made, run_id="r", folder=tmp_path / place)

    assert list(asyncio.run(execute())["tasks"]["A"]["files"]) == ["mine"]


def test_the_digest_of_a_folder_leaves_the_same_out_when_it_is_reached_by_a_link(
    tmp_path: Path,
) -> None:
    (tmp_path / "work/out/state").mkdir(parents=True)
    (tmp_path / "link").symlink_to("work")
    (tmp_path / "work/out/a").write_text("a")
    apart = {str(tmp_path.resolve() / "work/out/state")}
    before = folder_files.digest_of_folder(tmp_path / "link/out", apart)
    (tmp_path / "work/out/state/journal.db").touch()
    assert folder_files.digest_of_folder(tmp_path / "link/out", apart) == before


@pytest.mark.parametrize("how", ["> run.log 2>&1", "2>&1 | tee run.log"])
def test_a_log_that_the_output_goes_to_is_no_change_of_a_task(folder: Path, how: str) -> None:
    document = {
        "feature": "test",
        "persona": SHELL,
        "retry": 1,
        # Both write it while they are executed, one after the other and not alone.
        "tasks": [
            task(
                "A",
                "echo one; while ! grep -q A: run.log; do sleep 0.02; done; touch a",
                files=["a"],
            ),
            task("B", "while ! grep -q B: run.log; do sleep 0.02; done; touch b", "A", files=["b"]),
        ],
    }
    (folder / "graph.json").write_text(json.dumps(document))
    command = f"{sys.executable} -m maestro_hive run graph.json --store ../state {how}"
    subprocess.run(["sh", "-c", command], cwd=folder, timeout=120, check=False)
    assert "2 of 2 tasks complete" in (folder / "run.log").read_text()


def test_a_file_that_a_task_has_open_is_its_change(team: Team) -> None:
    made = graph(task("A", "exec 3> other; echo a >&3; sleep 600 & touch a", files=["a"]), retry=1)
    with pytest.raises(RunFailedError):
        team.run(made)
