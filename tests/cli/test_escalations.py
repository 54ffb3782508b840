"""``maestro escalations`` and ``maestro answer ESCALATION``, on a run whose program has stopped."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import Hive, current
from tests.cli.processes import answer, complaint, maestro
from tests.escalation.file_tickets import FileTickets
from tests.hive.conftest import quick_config
from tests.timing import PATIENCE_SECONDS

if TYPE_CHECKING:
    from pathlib import Path


def program(folder: Path) -> tuple[Hive, Any]:
    hive = Hive(folder, quick_config())

    @hive.step(escalate=True, max_attempts=1)
    async def deploy(size: int) -> int:
        if not any("mirror" in each for each in current().feedback):
            raise OSError("no route")
        return size

    @hive.workflow
    async def release(size: int) -> str:
        try:
            return f"deployed {await deploy(size)}"
        except OSError as error:
            return f"failed: {error}"

    return hive, release


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A state folder with a run that waits for a person."""

    async def stopped() -> None:
        hive, release = program(tmp_path / "state")
        with hive:
            running = asyncio.create_task(hive.run(release, 3, run_id="r"))
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not hive.escalations():  # noqa: ASYNC110 - it is the program's own
                    await asyncio.sleep(0.01)
            running.cancel()
            await asyncio.wait({running})

    asyncio.run(stopped())
    return tmp_path / "state"


def resumed(folder: Path) -> str:
    hive, release = program(folder)
    with hive:
        return str(hive.run_sync(release, 3, run_id="r"))


def listed(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = answer(maestro("--store", folder, "escalations", "--json"))[
        "escalations"
    ]
    return found


@pytest.mark.parametrize(
    "words, result, then",
    [
        (["use the mirror"], "deployed 3", "deploy is attempted again with that"),
        (["--result", "7"], "deployed 7", "deploy counts as completed with 7"),
        (["--result", "-7"], "deployed -7", "deploy counts as completed with -7"),
        (["--give-up"], "failed: no route", "the workflow gets the error of deploy"),
        (["nobody knows", "--give-up"], "failed: no route", "the workflow gets the error"),
    ],
)
def test_an_escalation_is_listed_and_answered(
    folder: Path, words: list[str], result: str, then: str
) -> None:
    (found,) = listed(folder)
    assert (found["status"], found["run_id"], found["step"]) == ("waiting", "r", "deploy")
    assert f"maestro answer {found['id']} --give-up" in found["description"]
    assert found["id"] in maestro("--store", folder, "escalations").stdout
    done = maestro("--store", folder, "answer", found["id"], *words)
    assert (done.returncode, then in done.stdout) == (0, True)
    assert listed(folder)[0]["status"] == "answered"
    assert resumed(folder) == result
    assert listed(folder) == []
    assert "nothing waits" in maestro("--store", folder, "escalations").stderr


def test_show_says_how_to_answer(folder: Path) -> None:
    shown = maestro("--store", folder, "show", "r").stdout
    (found,) = listed(folder)
    assert f"answer {found['id']} --result VALUE" in shown
    assert "deploy failed, and waits for a person" in shown
    maestro("--store", folder, "answer", found["id"], "use the mirror", "--by", "kim")
    assert "is answered" in maestro("--store", folder, "show", "r").stdout
    assert resumed(folder) == "deployed 3"
    assert "with feedback by kim" in maestro("--store", folder, "events", "r").stdout


@pytest.mark.parametrize(
    "words, reason",
    [
        (["--result", "seven"], "a whole number"),
        ([], "Give escalation"),
        (["text", "--result", "7"], "Give escalation"),
        (["--result", "7", "--give-up"], "Give escalation"),
        ([" "], "the feedback is empty"),
        (["use", "this"], "quote it, as 'use this'"),
    ],
)
def test_what_is_no_answer_is_refused(folder: Path, words: list[str], reason: str) -> None:
    (found,) = listed(folder)
    done = maestro("--store", folder, "answer", found["id"], *words)
    assert reason in complaint(done, 2)
    assert listed(folder)[0]["status"] == "waiting"


def test_an_unknown_escalation_and_a_second_answer_are_refused(folder: Path) -> None:
    done = maestro("--store", folder, "answer", "esc-0", "--give-up")
    assert "'maestro escalations' lists them" in complaint(done, 2)
    (found,) = listed(folder)
    maestro("--store", folder, "answer", found["id"], "--result", "7")
    done = maestro("--store", folder, "answer", found["id"], "--result", "8")
    assert "has its answer" in complaint(done, 2)
    resumed(folder)
    for words in (["--result", "9"], ["too late"]):
        done = maestro("--store", folder, "answer", found["id"], *words)
        assert "if there was one, its run has gone on" in complaint(done, 2)


@pytest.mark.parametrize(
    "words, said",
    [
        (["use the mirror"], "kim answered: use the mirror"),
        (["--result", "7"], "kim gave the result 7"),
        (["--give-up"], "kim gave up"),
        (["nobody knows", "--give-up"], "kim gave up: nobody knows"),
    ],
)
def test_who_answers_second_is_told_what_was_said(
    folder: Path, words: list[str], said: str
) -> None:
    (found,) = listed(folder)
    maestro("--store", folder, "answer", found["id"], *words, "--by", "kim")
    done = maestro("--store", folder, "answer", found["id"], "--result", "8")
    expected = (
        f"escalation {found['id']} of run 'r' has its answer already: {said}; this one is not"
    )
    assert expected in complaint(done, 2)


def test_sync_makes_the_ticket_and_takes_its_answer(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = maestro("--store", folder, "escalations", "sync")
    assert "No ticket system is configured" in complaint(done, 2)
    tickets = FileTickets(tmp_path / "tickets.json")
    monkeypatch.setattr("maestro_hive.cli.escalations.chosen_system", lambda _: tickets)
    done = maestro("--store", folder, "escalations", "sync")
    assert "1 escalation waiting for a person" in done.stdout
    assert listed(folder)[0]["ticket"] == "MD-1"
    tickets.say("MD-1", "/result seven")
    assert "is not taken" in maestro("--store", folder, "escalations", "sync").stderr
    tickets.say("MD-1", "use the mirror")
    (found,) = listed(folder)
    synced = answer(maestro("--store", folder, "escalations", "sync", "--json"))
    assert synced["answered"] == [found["id"]]
    assert [each["problem"] for each in synced["escalations"]] == [None]
    assert resumed(folder) == "deployed 3"


def test_a_ticket_that_was_deleted_is_named_and_its_run_still_waits(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tickets = FileTickets(tmp_path / "tickets.json")
    monkeypatch.setattr("maestro_hive.cli.escalations.chosen_system", lambda _: tickets)
    maestro("--store", folder, "escalations", "sync")
    tickets.delete("MD-1")
    maestro("--store", folder, "escalations", "sync")
    done = maestro("--store", folder, "escalations", "sync")
    (found,) = listed(folder)
    problem = f"ticket MD-1 is gone: there is no MD-1; answer it by maestro answer {found['id']}"
    assert (found["status"], found["problem"]) == ("waiting", problem)
    assert done.stderr.count("MD-1 is gone") == 1, "it is warned of once, and listed"


def test_purging_a_run_deletes_its_escalations(folder: Path) -> None:
    maestro("--store", folder, "cancel", "r", "--yes")
    done = maestro("--store", folder, "purge", "r", "--yes")
    assert done.returncode == 0
    assert listed(folder) == []
    assert "ticket" not in done.stderr
    with Hive(folder, quick_config()) as hive:
        assert hive._open().documents("escalations") == []


def test_a_purge_says_which_tickets_nobody_will_comment_on_any_more(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tickets = FileTickets(tmp_path / "tickets.json")
    monkeypatch.setattr("maestro_hive.cli.escalations.chosen_system", lambda _: tickets)
    maestro("--store", folder, "escalations", "sync")
    done = maestro("--store", folder, "purge", "r", "--yes")
    # How many copies there are depends on the moment at which the run was last saved.
    assert (done.returncode, done.stdout[:24]) == (0, "run 'r' is purged, with ")
    (told,) = done.stderr.splitlines()[1:]
    assert told == (
        "maestro: ticket MD-1 (file) is about a step of run 'r', and is not told that the run was"
        " purged: close it yourself"
    )
    assert listed(folder) == []
