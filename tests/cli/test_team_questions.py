"""Tasks that ask a person: what is printed of them, and what their log has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maestro_hive.cli import command
from tests.cli.processes import answer, complaint
from tests.cli.test_team import called, folder, started, wait_until, without_times, write
from tests.team.conftest import task

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["folder"]

_SECONDS = 60.0
#: Asks two questions, one after the other.
_SCRIPT = """
case "$(cat)" in
*"answer: 2"*) echo both ;;
*"answer: 1"*) echo first; echo and then?; exit 3 ;;
*) echo nothing yet; echo which number?; exit 3 ;;
esac
"""
_ASKS = {"command": ["sh", "-c", _SCRIPT]}


def answer_at_once(folder: Path, text: str) -> None:
    """Answer the question of ``ASK`` as soon as it can be."""
    wait_until(lambda: called(folder, "answer", "my-shop", "ASK", text).returncode == 0)


def test_each_question_has_its_line_where_the_journal_has_it(folder: Path) -> None:
    graph = write(folder, task("ASK"), persona=_ASKS)
    with started(folder, "run", graph) as engine:
        answer_at_once(folder, "1")
        answer_at_once(folder, "2")
        out, err = engine.communicate(_SECONDS)
    assert engine.returncode == 0, err
    assert without_times(out)[:6] == [
        "ASK: started",
        "ASK: waits for an answer to 'which number?': maestro answer my-shop ASK TEXT",
        "ASK: started",
        "ASK: waits for an answer to 'and then?': maestro answer my-shop ASK TEXT",
        "ASK: started",
        "ASK: complete",
    ]


def test_the_log_of_a_task_that_asked_is_whole_and_under_its_id(folder: Path) -> None:
    graph = write(folder, task("ASK"), persona=_ASKS)
    assert called(folder, "run", graph, "--no-wait").returncode == 75
    assert called(folder, "logs", "my-shop", "ASK", "-f").returncode == 75  # more is to come
    for text in ("1", "2"):
        assert called(folder, "answer", "my-shop", "ASK", text).returncode == 0
        called(folder, "resume", "--no-wait")
    written = "nothing yet\nwhich number?\nfirst\nand then?\nboth\n"
    assert called(folder, "logs", "my-shop", "ASK").stdout == written
    assert called(folder, "logs", "my-shop", "ASK", "--follow").stdout == written
    assert called(folder, "logs", "my-shop").stdout == f"==> ASK <==\n{written}"
    assert called(folder, "logs", "my-shop", "ASK#2").stdout == "first\nand then?\n"
    unknown = called(folder, "logs", "my-shop", "ASKS")
    assert "has no step 'ASKS'; did you mean ASK " in unknown.stderr
    assert answer(called(folder, "status", "--json"))["run"]["status"] == "success"


def test_a_task_is_shown_by_its_newest_step(folder: Path) -> None:
    graph = write(folder, task("ASK"), persona=_ASKS)
    assert called(folder, "run", graph, "--no-wait").returncode == 75
    assert called(folder, "answer", "my-shop", "ASK", "1").returncode == 0
    called(folder, "resume", "--no-wait")

    def shown(run_id: str, step: str) -> str:
        found = answer(called(folder, "show", run_id, step, "--json"))["step"]
        return str(found["label"])

    assert [shown("my-shop", each) for each in ("ASK", "ASK#1", "ASK#2", "1")] == [
        "ASK#2",
        "ASK",
        "ASK#2",
        "ASK",
    ]
    assert "and then?" in called(folder, "show", "my-shop", "ASK").stdout
    write(folder, task("ASK", description="another"), persona=_ASKS)
    assert called(folder, "run", graph, "--no-wait").returncode == 75
    assert shown("my-shop-2", "ASK") == "ASK#3"


def test_a_task_that_failed_after_its_answer_is_retried(folder: Path) -> None:
    script = 'case "$(cat)" in *answer:*) test -f mended ;; *) echo which?; exit 3 ;; esac'
    graph = write(folder, task("ASK"), persona={"command": ["sh", "-c", script]}, retry=1)
    assert called(folder, "run", graph, "--no-wait").returncode == 75
    waits = called(folder, "retry", "my-shop", "ASK")
    assert "it waits for an answer" in waits.stderr
    assert called(folder, "answer", "my-shop", "ASK", "this").returncode == 0
    continues = "the run continues when it is resumed: maestro resume my-shop\n"
    assert continues in called(folder, "show", "my-shop").stdout
    assert called(folder, "resume").returncode == 1
    (folder / "mended").touch()
    assert called(folder, "retry", "my-shop", "ASK").returncode == 0
    assert called(folder, "resume").returncode == 0


def test_a_question_from_before_is_said_again_unless_it_is_answered(folder: Path) -> None:
    graph = write(folder, task("ASK"), persona=_ASKS)
    assert called(folder, "run", graph, "--no-wait").returncode == 75
    again = called(folder, "resume", "--no-wait")
    asked = "ASK: waits for an answer to 'which number?': maestro answer my-shop ASK TEXT"
    assert without_times(again.stdout)[0] == asked
    assert called(folder, "answer", "my-shop", "ASK", "1").returncode == 0
    answered = called(folder, "resume", "--no-wait")
    assert without_times(answered.stdout)[0] == "ASK: started"
    assert "'and then?'" in without_times(answered.stdout)[1]


def test_a_retry_leaves_the_questions_of_other_tasks_open(folder: Path) -> None:
    asks = 'grep -q "The answer" && exit 0; echo Which?; exit 3'
    graph = write(
        folder,
        task("Q", persona={"command": ["sh", "-c", asks]}),
        task("BAD", "test -f go"),
        retry=1,
    )
    assert called(folder, "run", graph, "--no-wait").returncode == command.PERSON_NEEDED
    (folder / "go").touch()
    assert called(folder, "retry", "my-shop").returncode == command.SUCCESS
    (shown, *_) = answer(called(folder, "status", "--json"))["run"]["tasks"]
    assert (shown["status"], shown["question"]) == ("waiting", "Which?")
    assert called(folder, "answer", "my-shop", "Q", "this").returncode == command.SUCCESS
    done = called(folder, "resume")
    assert done.returncode == command.SUCCESS, done
    assert "2 of 2 tasks complete" in done.stdout


def test_a_task_that_was_not_started_is_no_unknown_one(folder: Path) -> None:
    graph = write(folder, task("BAD", "exit 1"), task("LATER", after="BAD"), retry=1)
    assert called(folder, "run", graph).returncode == command.FAILED
    for words in (("logs",), ("show",), ("retry",)):
        refused = complaint(called(folder, *words, "my-shop", "LATER"), command.WRONG_USE)
        assert "LATER of run 'my-shop' was not started yet" in refused
        assert "maestro status my-shop" in refused
        unknown = complaint(called(folder, *words, "my-shop", "LATE"), command.WRONG_USE)
        assert "did you mean LATER?" in unknown


def test_a_task_that_only_asked_is_not_complete(folder: Path) -> None:
    def statuses(run_id: str) -> dict[str, str]:
        shown = answer(called(folder, "status", run_id, "--json"))["run"]["tasks"]
        return {each["id"]: each["status"] for each in shown}

    graph = write(folder, task("A"), task("ASK", persona=_ASKS))
    assert called(folder, "run", graph, "--no-wait").returncode == 75
    write(folder, task("A", "true"), task("ASK", persona=_ASKS))
    dry = called(folder, "run", graph, "--dry-run").stdout
    assert "already done, by my-shop: 0 of 2 tasks\n" in dry
    assert called(folder, "run", graph, "--no-wait").returncode == 75
    for run_id in ("my-shop", "my-shop-2"):
        assert statuses(run_id) == {"A": "complete", "ASK": "waiting"}
        assert called(folder, "cancel", run_id, "--yes").returncode == 0
        assert statuses(run_id) == {"A": "complete", "ASK": "pending"}
        assert "1 of 2 tasks complete" in called(folder, "status", run_id).stdout
