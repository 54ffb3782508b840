"""``maestro checkpoints``: listed, shown, verified, compared and restored."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.maestro.state import run_document as documents
from maestro_hive.maestro.state.checkpoint import CheckpointManager, WorkflowState
from maestro_hive.unified_execution import PersonaExecutor, StatePersistence
from tests.cli.processes import (
    Done,
    answer,
    complaint,
    config_in,
    copy_of,
    execute_steps,
    filled,
    in_terminal,
    in_terminal_process,
    maestro,
    maestro_process,
)
from tests.python_processes import run_python

if TYPE_CHECKING:
    from pathlib import Path

STEPS = ("design", "implement", "review")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy_of(_with_checkpoints, tmp_path / "state")


def _with_checkpoints(folder: Path) -> None:
    execute_steps(filled(folder), "build", *STEPS)


def checkpoints(folder: Path, *arguments: str | Path, **changes: str) -> Done:
    return maestro("checkpoints", *arguments, "--store", folder, **changes)


def file_of(folder: Path, checkpoint_id: str) -> Path:
    (path,) = folder.glob(f"checkpoints/*/*~{checkpoint_id}.json")
    return path


def damage(path: Path) -> None:
    text = bytearray(path.read_bytes())
    text[len(text) // 2] ^= 1
    path.write_bytes(text)


def completed_steps(folder: Path, run: str = "build") -> list[str]:
    with StatePersistence(config_in(folder), run) as persistence:
        return persistence.state.completed_tasks


# --- list ---


def test_they_are_listed_newest_first(folder: Path) -> None:
    lines = [line.split("\t") for line in checkpoints(folder, "list").stdout.splitlines()]
    assert [line[:2] for line in lines] == [[f"after-{step}", "build"] for step in reversed(STEPS)]
    found = answer(checkpoints(folder, "list", "build", "--json"))["checkpoints"]
    assert [each["id"] for each in found] == [f"after-{step}" for step in reversed(STEPS)]
    for each in found:
        assert each["bytes"] > 500
        assert each["created_at"].endswith("+00:00")
        assert each["path"].endswith(".json")


def test_a_run_without_any_has_an_empty_list(folder: Path) -> None:
    done = checkpoints(folder, "list", "run")
    assert (done.returncode, done.stdout) == (0, "")
    assert "no checkpoints of run 'run'" in done.stderr


def test_they_are_found_where_the_environment_says(folder: Path, tmp_path: Path) -> None:
    (folder / "checkpoints").rename(tmp_path / "elsewhere")
    assert checkpoints(folder, "list").stdout == ""
    found = checkpoints(folder, "list", MAESTRO_CHECKPOINT_DIR=str(tmp_path / "elsewhere"))
    assert found.stdout.count("\n") == 3


def test_they_can_be_read_although_the_journal_is_gone(folder: Path) -> None:
    (folder / "journal.db").unlink()
    assert checkpoints(folder, "list").stdout.count("\n") == 3
    assert checkpoints(folder, "verify").returncode == 0
    assert not (folder / "journal.db").exists()


# --- show ---


def test_one_is_shown_with_its_steps(folder: Path) -> None:
    shown = checkpoints(folder, "show", "after-implement").stdout
    assert "design\tdeveloper\tsuccess\t1\tthe output of design" in shown
    assert "implement\tdeveloper\tsuccess" in shown
    assert "review" not in shown
    found = answer(checkpoints(folder, "show", "after-implement", "--json"))["checkpoint"]
    assert (found["run"], found["id"]) == ("build", "after-implement")
    assert [step["name"] for step in found["contents"]["steps"]] == ["design", "implement"]
    memory = found["contents"]["persona_states"]["developer"]["memory"]
    assert memory == {"design": "done", "implement": "done"}


def test_an_unknown_id_is_an_error_with_the_known_ones(folder: Path) -> None:
    message = complaint(checkpoints(folder, "show", "after-lunch"))
    assert "'after-lunch'" in message
    assert "after-review" in message


def test_an_id_that_two_runs_have_needs_the_run(folder: Path) -> None:
    execute_steps(folder, "other", "design")
    message = complaint(checkpoints(folder, "show", "after-design"))
    assert "build, other" in message
    assert "--run" in message
    found = answer(checkpoints(folder, "show", "after-design", "--run", "other", "--json"))
    assert found["checkpoint"]["run"] == "other"


def test_one_made_of_other_data_is_shown_too(folder: Path) -> None:
    manager = CheckpointManager(folder / "checkpoints")
    made = manager.create_checkpoint("flow", WorkflowState("flow", data={"answer": 42}))
    found = answer(checkpoints(folder, "show", made.checkpoint_id, "--json"))
    assert found["checkpoint"]["contents"]["data"] == {"answer": 42}
    assert '{"answer": 42}' in checkpoints(folder, "show", made.checkpoint_id).stdout
    assert checkpoints(folder, "verify").returncode == 0


def test_what_a_model_wrote_cannot_control_the_terminal(folder: Path) -> None:
    with StatePersistence(config_in(folder), "build") as persistence:
        persistence.update_state(phase="\x1b]0;owned\x07\x1b[2J")
        persistence.checkpoint("evil")
    assert "\x1b" not in checkpoints(folder, "show", "evil").stdout
    seen = in_terminal("checkpoints", "show", "evil", "--store", folder, NO_COLOR="1")
    assert "\x1b" not in seen.text
    assert "owned" in seen.text


# --- verify ---


def test_a_run_that_is_not_there_is_named(folder: Path) -> None:
    for more in ([], ["--json"]):
        message = complaint(checkpoints(folder, "verify", "buidl", *more), 2)
        assert "There is no run 'buidl'" in message
        assert "Did you mean 'build'?" in message


def test_valid_ones_are_verified(folder: Path) -> None:
    done = checkpoints(folder, "verify")
    assert done.returncode == 0
    assert [line.split("\t")[2] for line in done.stdout.splitlines()] == ["valid"] * 3


def test_a_damaged_one_is_named_and_left_where_it_is(folder: Path) -> None:
    path = file_of(folder, "after-implement")
    damage(path)
    done = checkpoints(folder, "verify", "build")
    assert done.returncode == 1
    verdicts = {line.split("\t")[0]: line.split("\t")[2:] for line in done.stdout.splitlines()}
    assert verdicts["after-design"][0] == "valid"
    assert verdicts["after-implement"][0] == "damaged"
    assert str(path) in verdicts["after-implement"][1]
    assert path.exists()
    found = answer(checkpoints(folder, "verify", "--json"), 1)
    assert found["damaged"] == 1
    assert [each["id"] for each in found["checkpoints"] if each["damage"]] == ["after-implement"]


def test_one_whose_entries_do_not_add_up_is_damaged_although_its_digest_is_right(
    folder: Path,
) -> None:
    path = file_of(folder, "after-design")
    body = documents.unseal(path.read_bytes(), "checkpoint", "x")
    body["state"]["entries"][0]["kind"] = "step_completed"
    path.write_bytes(documents.seal("checkpoint", body))
    assert checkpoints(folder, "verify").returncode == 1


def test_a_class_that_only_the_program_knows_is_no_damage(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Order:\n    number: int\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        import shop  # type: ignore[import-not-found]

        with StatePersistence(config_in(folder), "shop") as persistence:
            persistence.mark_task_completed("sell", {"order": shop.Order(7)})
            persistence.checkpoint("sold")
    finally:
        sys.path.remove(str(tmp_path))
    assert checkpoints(folder, "verify").returncode == 0
    assert maestro("doctor", "--store", folder).returncode == 0


SHOP = """
import asyncio, sys
from dataclasses import dataclass
from maestro_hive.unified_execution import *
@dataclass
class Order:
    number: int
async def sell(number):
    print("selling", number, flush=True)
    return Order(number)
async def main():
    config = ExecutionConfig.in_folder(sys.argv[1])
    for number in (1, 2):
        with PersonaExecutor(config, "clerk", workflow_id="shop") as executor:
            await executor.execute(sell, f"sell-{number}", number)
        with StatePersistence(config, "shop") as persistence:
            persistence.update_persona_state("clerk", {"order": Order(number)})
            persistence.mark_task_completed(f"sold-{number}", {"order": Order(number)})
            persistence.checkpoint(f"sold-{number}")
asyncio.run(main())
"""


def shop(folder: Path) -> list[str]:
    """Execute a run whose values are of a class in ``__main__``; return what it did now."""
    return run_python(SHOP, folder, check=True).stdout.splitlines()


def test_values_of_a_class_in_main_are_verified_shown_compared_and_restored(folder: Path) -> None:
    assert shop(folder) == ["selling 1", "selling 2"]
    assert checkpoints(folder, "verify").returncode == 0
    found = answer(checkpoints(folder, "show", "sold-1", "--json"))["checkpoint"]["contents"]
    assert found["artifacts"]["order"]["t"] == "__main__:Order"
    assert ("step", "added", "clerk/sell-2") in differences(folder, "sold-1", "sold-2")
    done = checkpoints(folder, "restore", "shop", "sold-1", "--yes")
    assert done.returncode == 0, done.stderr
    assert "2 (sell-2, sold-2)" in done.stdout
    assert shop(folder) == ["selling 2"]


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_was_restored_is_what_a_folder_without_a_journal_resumes_from(
    folder: Path, *, is_lost: bool
) -> None:
    shop(folder)
    if is_lost:
        (folder / "journal.db").unlink()
        filled(folder)
    assert checkpoints(folder, "restore", "shop", "sold-1", "--yes").returncode == 0
    (folder / "journal.db").unlink()
    assert shop(folder) == ["selling 2"]
    assert list(folder.rglob("*.damaged-*")) == []


def test_doctor_knows_runs_of_a_class_in_main(folder: Path) -> None:
    shop(folder)
    copy = folder / "runs" / "shop" / "execution_state.json"
    copy.unlink()
    words = ("doctor", "--json", "--store", folder)
    assert "write the missing copy of run 'shop'" in answer(maestro(*words))["repairs"][0]
    assert answer(maestro(*words, "--fix"))["repaired"]
    assert copy.exists()
    assert shop(folder) == []


# --- diff ---


def differences(folder: Path, first: str, second: str) -> set[tuple[str, str, str]]:
    found = answer(checkpoints(folder, "diff", first, second, "--json"))["differences"]
    return {(each["part"], each["change"], each["name"]) for each in found}


def test_what_was_added_from_one_to_another_is_shown(folder: Path) -> None:
    assert differences(folder, "after-design", "after-review") == {
        ("field", "changed", "phase"),
        ("field", "changed", "step"),
        ("field", "changed", "completed_tasks"),
        ("step", "added", "developer/implement"),
        ("step", "added", "developer/review"),
        ("memory", "added", "developer.implement"),
        ("memory", "added", "developer.review"),
    }


def test_what_was_added_one_way_was_removed_the_other_way(folder: Path) -> None:
    there = differences(folder, "after-design", "after-review")
    back = differences(folder, "after-review", "after-design")
    swapped = {"added": "removed", "removed": "added", "changed": "changed"}
    assert back == {(part, swapped[change], name) for part, change, name in there}


def test_changes_are_shown_before_and_after(folder: Path) -> None:
    with StatePersistence(config_in(folder), "build") as persistence:
        persistence.update_state(phase="testing", metrics={"cost": 3})
        persistence.checkpoint("later")
    done = checkpoints(folder, "diff", "after-review", "later")
    assert "~\tfield\tphase\treview\ttesting\n" in done.stdout
    assert "+\tfield\tmetrics.cost\t\t3\n" in done.stdout


def test_the_same_ones_do_not_differ(folder: Path) -> None:
    done = checkpoints(folder, "diff", "after-review", "after-review")
    assert (done.returncode, done.stdout) == (0, "")
    assert "the same" in done.stderr


# --- restore ---


def test_a_restore_prints_what_will_run_again_and_asks(folder: Path) -> None:
    words = ("checkpoints", "restore", "build", "after-design", "--store", folder)
    refused = in_terminal_process(*words, typed={"[y/N]": "n\r"})
    assert refused.returncode == 1
    assert "2 (implement, review)" in refused.text
    assert "nothing was changed" in refused.text
    assert completed_steps(folder) == list(STEPS)
    agreed = in_terminal_process(*words, typed={"[y/N]": "y\r"})
    assert agreed.returncode == 0
    assert completed_steps(folder) == ["design"]


@pytest.mark.parametrize("keys, code", [("\x03", 130), ("\x04", 1)])
def test_leaving_the_question_changes_nothing(folder: Path, keys: str, code: int) -> None:
    words = ("checkpoints", "restore", "build", "after-design", "--store", folder)
    seen = in_terminal_process(*words, typed={"[y/N]": keys})
    assert seen.returncode == code
    assert "Traceback" not in seen.text
    assert completed_steps(folder) == list(STEPS)


def test_without_a_terminal_yes_is_required(folder: Path) -> None:
    done = checkpoints(folder, "restore", "build", "after-design")
    assert done.returncode == 2
    assert "--yes" in done.stderr
    assert completed_steps(folder) == list(STEPS)
    done = checkpoints(folder, "restore", "build", "after-design", "--yes")
    assert done.returncode == 0
    assert "2 (implement, review)" in done.stdout


def test_just_the_steps_it_named_run_again(folder: Path) -> None:
    assert checkpoints(folder, "restore", "build", "after-design", "--yes").returncode == 0
    ran = []

    async def again() -> None:
        config = config_in(folder)
        with PersonaExecutor(config, "developer", workflow_id="build") as executor:
            for step in STEPS:
                await executor.execute(lambda step=step: ran.append(step), step)

    asyncio.run(again())
    assert ran == ["implement", "review"]


def test_a_later_checkpoint_can_be_restored_after_an_earlier_one(folder: Path) -> None:
    assert checkpoints(folder, "restore", "build", "after-design", "--yes").returncode == 0
    done = checkpoints(folder, "restore", "build", "after-review", "--yes")
    assert "will run again: none" in done.stdout
    assert completed_steps(folder) == list(STEPS)


def test_a_run_that_a_process_executes_is_refused_and_its_holder_named(folder: Path) -> None:
    with StatePersistence(config_in(folder), "build"):
        words = ("restore", "build", "after-design", "--yes", "--store", folder)
        message = complaint(maestro_process("checkpoints", *words))
    assert f"process {os.getpid()}" in message
    assert completed_steps(folder) == list(STEPS)


def test_a_run_whose_journal_is_gone_is_restored_into_a_new_one(
    folder: Path, tmp_path: Path
) -> None:
    other = filled(tmp_path / "other")
    (folder / "checkpoints" / "build").rename(other / "checkpoints" / "build")
    done = checkpoints(other, "restore", "build", "after-implement", "--yes")
    assert done.returncode == 0, done.stderr
    assert completed_steps(other) == ["design", "implement"]


def test_a_damaged_checkpoint_is_not_restored(folder: Path) -> None:
    damage(file_of(folder, "after-design"))
    message = complaint(checkpoints(folder, "restore", "build", "after-design", "--yes"))
    assert "SHA-256" in message
    assert completed_steps(folder) == list(STEPS)


def test_one_of_another_run_or_of_none_is_not_restored(folder: Path) -> None:
    complaint(checkpoints(folder, "restore", "run", "after-design", "--yes"))
    manager = CheckpointManager(folder / "checkpoints")
    made = manager.create_checkpoint("flow", WorkflowState("flow", data={"answer": 42}))
    message = complaint(checkpoints(folder, "restore", "flow", made.checkpoint_id, "--yes"))
    assert "not a copy of a run" in message
    runs: dict[str, Any] = answer(maestro("doctor", "--json", "--store", folder))
    assert runs["runs"] == 2


@pytest.mark.parametrize("arguments", [["show"], ["diff", "a"], ["restore", "run"], ["nope"]])
def test_wrong_use_is_refused(folder: Path, arguments: list[str]) -> None:
    complaint(checkpoints(folder, *arguments), 2)


def test_the_json_of_a_terminal_is_pure_json(folder: Path) -> None:
    seen = in_terminal("checkpoints", "list", "--json", "--store", folder, NO_COLOR="1")
    _, _, printed = seen.text.partition("\n")  # behind the store's line
    assert len(json.loads(printed)["checkpoints"]) == 3
