"""``maestro budget`` and ``maestro costs``: what is set there holds for every process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import BudgetExceeded, Hive
from tests.cli.processes import answer, complaint, in_terminal, maestro
from tests.tables import for_each

if TYPE_CHECKING:
    from pathlib import Path


def program(hive: Hive) -> Any:
    @hive.step(persona="writer", max_tokens=60, model="claude-sonnet-4-5")
    async def ask(number: int) -> dict[str, int]:
        return {"number": number, "tokens_used": 60}

    @hive.workflow
    async def build(count: int) -> int:
        return len([await ask(number) for number in range(count)])

    return build


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a run that a budget has stopped."""
    with Hive(tmp_path / "state") as hive, pytest.raises(BudgetExceeded):
        hive.run_sync(program(hive), 3, run_id="r", budget=100)
    return tmp_path / "state"


def budgets(folder: Path) -> dict[str, dict[str, Any]]:
    found = answer(maestro("budget", "--json", "--store", folder))["budgets"]
    return {f"{each['scope']} {each['name']}": each for each in found}


def test_budgets_are_shown_with_their_limits(folder: Path) -> None:
    found = budgets(folder)
    run, writer = found["run r"], found["persona writer"]
    assert (run["tokens"], run["token_limit"], run["used"]) == (60, 100, 0.6)
    assert (writer["tokens"], writer["token_limit"], writer["used"]) == (60, None, None)
    assert [each for each in found if each.startswith("day ")]
    shown = in_terminal("budget", "--store", folder)
    assert "████████████········" in shown.text
    assert "60%" in shown.text


def test_a_raised_run_goes_on(folder: Path) -> None:
    assert answer(maestro("runs", "--json", "--store", folder))["runs"][0]["status"] == "bankrupt"
    done = maestro("budget", "raise", "run", "r", "--tokens", "100", "--store", folder)
    assert (done.returncode, done.stdout) == (0, "run r may spend 100 tokens more\n")
    with Hive(folder) as hive:
        assert hive.run_sync(program(hive), 3, run_id="r") == 3
    shown = answer(maestro("show", "r", "--json", "--store", folder))["run"]
    assert (shown["tokens"], shown["saved_tokens"]) == (180, 60)
    assert "saved:         60 tokens" in maestro("show", "r", "--store", folder).stdout


def test_limits_are_set_for_one_and_for_each(folder: Path) -> None:
    for words in (
        ["persona", "writer", "--tokens", "60"],
        ["day", "--usd", "5", "--zone", "Europe/Berlin"],
        ["run", "--tokens", "10", "--usd", "0.5"],
    ):
        assert maestro("budget", "set", *words, "--store", folder).returncode == 0
    found = answer(maestro("budget", "--json", "--store", folder))
    assert found["day_zone"] == "Europe/Berlin"
    assert budgets(folder)["persona writer"]["token_limit"] == 60
    assert budgets(folder)["run r"]["token_limit"] == 100, "its own"
    assert maestro("budget", "set", "run", "r", "--none", "--store", folder).returncode == 0
    assert budgets(folder)["run r"]["token_limit"] is None


def test_a_limit_in_the_other_unit_stays(folder: Path) -> None:
    assert maestro("budget", "set", "day", "--tokens", "900", "--store", folder).returncode == 0
    done = maestro("budget", "set", "day", "--usd", "5", "--store", folder)
    assert done.stdout == "each day may spend 900 tokens and $5\n"
    (day,) = (each for name, each in budgets(folder).items() if name.startswith("day "))
    assert (day["token_limit"], day["usd_limit"]) == (900, 5.0)
    done = maestro("budget", "set", "day", "--none", "--store", folder)
    assert done.stdout == "each day has no limit\n"
    (day,) = (each for name, each in budgets(folder).items() if name.startswith("day "))
    assert (day["token_limit"], day["usd_limit"]) == (None, None)


def test_changes_are_answered_as_json(folder: Path) -> None:
    def changed(*words: str) -> Any:
        return answer(maestro("budget", *words, "--json", "--store", folder))

    limit = {"scope": "run", "name": "r", "token_limit": 100, "usd_limit": 0.5}
    assert changed("set", "run", "r", "--usd", "0.5")["budget"] == limit
    assert changed("raise", "run", "r", "--tokens", "20")["budget"] == {**limit, "token_limit": 120}
    assert changed("set", "persona", "--tokens", "7")["budget"]["name"] == "*"
    assert changed("release")["released"] == 0


def test_the_doctor_calls_a_bankrupt_run_bankrupt(folder: Path) -> None:
    (found,) = answer(maestro("doctor", "--json", "--store", folder))["unfinished"]
    assert (found["run"], found["status"]) == ("r", "bankrupt")


@for_each(
    "words, text",
    [
        (["set", "day", "2026-99-99", "--usd", "1"], "2026-99-99"),
        (["raise", "day", "2026-02-30", "--usd", "1"], "2026-02-30"),
        (["set", "persona", "a"], "give --tokens, --usd or both"),
        (["set", "persona", "a", "--tokens", "0"], "0 is not in the range x>=1"),
        (["set", "run", "--usd", "0"], "0.0 is not in the range x>0"),
        (["set", "run", "--usd", "1", "--zone", "UTC"], "--zone is of days"),
        (["set", "day", "--usd", "1", "--zone", "Berlin"], "one is Europe/Berlin"),
        (["set", "team", "a", "--tokens", "5"], "persona"),
        (["raise", "persona", "a", "--tokens", "5"], "no limit in tokens"),
        (["raise", "persona", "a"], "how much more"),
        (["raise", "run", "nope", "--tokens", "5"], "There is no run 'nope'"),
        (["release", "persona"], "which persona"),
    ],
)
def test_what_is_typed_wrongly_is_refused(folder: Path, words: list[str], text: str) -> None:
    assert text in complaint(maestro("budget", *words, "--store", folder), 2)


def test_a_limit_of_a_run_that_is_not_there_yet_is_set_and_noted(folder: Path) -> None:
    done = maestro("budget", "set", "run", "later", "--tokens", "5", "--store", folder)
    assert (done.returncode, done.stdout) == (0, "run later may spend 5 tokens\n")
    assert "there is no run 'later' yet" in done.stderr
    assert "yet" not in maestro("budget", "set", "run", "r", "--usd", "5", "--store", folder).stderr


def test_nothing_is_released_where_nothing_was_lost(folder: Path) -> None:
    done = maestro("budget", "release", "--store", folder)
    assert (done.returncode, done.stdout) == (0, "released 0 reservations\n")


@pytest.mark.parametrize(
    "by, name", [("persona", "writer"), ("workflow", "build"), ("model", "claude-sonnet-4-5")]
)
def test_costs_are_listed(folder: Path, by: str, name: str) -> None:
    found = answer(maestro("costs", "--by", by, "--json", "--store", folder))
    (row,) = found["costs"]
    assert (found["by"], row["name"], row["calls"], row["tokens"]) == (by, name, 1, 60)
    assert row["usd"] == 0.0009
    assert name in maestro("costs", "--by", by, "--store", folder).stdout


def test_costs_stay_when_a_run_is_purged(folder: Path) -> None:
    assert maestro("purge", "r", "--yes", "--store", folder).returncode == 0
    (day,) = answer(maestro("costs", "--by", "day", "--json", "--store", folder))["costs"]
    assert day["tokens"] == 60
    assert "run r" not in budgets(folder)
