"""What a copy of a run has of its budget: exports, forks, and the JSON files beside a journal."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import BudgetExceeded, Hive
from maestro_hive.admin.transfer import export_run, import_run, read_export
from maestro_hive.kernel.errors import DocumentCorruptError
from maestro_hive.maestro.state import run_document

if TYPE_CHECKING:
    from pathlib import Path


def program(hive: Hive, *, nested: bool = False) -> Any:
    @hive.step(persona="writer", max_tokens=60)
    async def ask(number: int) -> dict[str, int]:
        return {"number": number, "tokens_used": 60}

    @hive.workflow
    async def build(count: int) -> int:
        return len([await ask(number) for number in range(count)])

    @hive.workflow
    async def parent(count: int) -> int:
        return await build(count)

    return parent if nested else build


def budget(hive: Hive, run_id: str) -> tuple[int, int | None]:
    found = {each.name: each for each in hive.budget.spent("run")}
    return (found[run_id].tokens, found[run_id].token_limit) if run_id in found else (0, None)


@pytest.fixture
def bankrupt(tmp_path: Path) -> Path:
    """A folder with a run that has spent 120 tokens of 160, of which 10 were added by hand."""
    with Hive(tmp_path / "state") as hive:
        build = program(hive)
        with pytest.raises(BudgetExceeded):
            hive.run_sync(build, 3, run_id="r", budget=150)
        hive.budget.raise_limit(10, run="r")
        with pytest.raises(BudgetExceeded):
            hive.run_sync(build, 3, run_id="r", budget=150)
    return tmp_path / "state"


def exported(folder: Path) -> bytes:
    with Hive(folder) as hive:
        return export_run(hive._open(), "r", with_values=True).text


@pytest.mark.parametrize("name", ["r", "copied"])
def test_an_imported_run_has_its_limit_and_what_it_spent(
    bankrupt: Path, tmp_path: Path, name: str
) -> None:
    import_run(tmp_path / "other", exported(bankrupt), "r.json", run_id=name)
    with Hive(tmp_path / "other") as hive:
        build = program(hive)
        assert budget(hive, name) == (120, 160)
        assert hive.budget.spent("persona") == [], "which was spent elsewhere"
        with pytest.raises(BudgetExceeded):
            hive.run_sync(build, 3, run_id=name, budget=150)
        assert budget(hive, name) == (120, 160), "declared before: what was raised stays"
        hive.budget.raise_limit(20, run=name)
        assert hive.run_sync(build, 3, run_id=name) == 3
        assert budget(hive, name) == (180, 180)
        assert hive._open().check() == []


def test_a_folder_without_its_journal_has_the_limit_and_the_spending_of_its_runs(
    bankrupt: Path,
) -> None:
    for path in bankrupt.glob("journal*"):
        path.unlink()
    with Hive(bankrupt) as hive:
        build = program(hive)
        for _ in range(2):
            with pytest.raises(BudgetExceeded):
                hive.run_sync(build, 3, run_id="r", budget=150)
            assert budget(hive, "r") == (120, 160)


def test_a_limit_that_was_set_by_hand_before_an_import_stays(
    bankrupt: Path, tmp_path: Path
) -> None:
    with Hive(tmp_path / "other") as hive:
        hive.budget.set_limit(7, run="r")
    import_run(tmp_path / "other", exported(bankrupt), "r.json")
    with Hive(tmp_path / "other") as hive:
        assert budget(hive, "r") == (120, 7)


def test_a_fork_has_the_limit_and_pays_for_its_own_steps(bankrupt: Path) -> None:
    with Hive(bankrupt) as hive:
        build = program(hive)
        fork = hive.fork("r", from_step="ask")
        assert budget(hive, fork) == (0, 160)
        more = hive.fork("r", count=5)
        with pytest.raises(BudgetExceeded):
            hive.run_sync(build, 5, run_id=more)
        assert budget(hive, more) == budget(hive, "r") == (120, 160)


def test_a_copy_of_a_parent_has_what_its_children_spent(tmp_path: Path) -> None:
    with Hive(tmp_path / "state") as hive:
        assert hive.run_sync(program(hive, nested=True), 2, run_id="r") == 2
        text = export_run(hive._open(), "r", with_values=True).text
    import_run(tmp_path / "other", text, "r.json")
    with Hive(tmp_path / "other") as hive:
        assert budget(hive, "r") == (120, None)


def test_a_run_that_spent_nothing_has_no_budget_in_its_copy(tmp_path: Path) -> None:
    with Hive(tmp_path / "state") as hive:
        hive.run_sync(program(hive), 0, run_id="r")
        assert (
            "budget"
            not in json.loads(export_run(hive._open(), "r", with_values=True).text)["document"][
                "run"
            ]
        )


@pytest.mark.parametrize(
    "wrong", [None, 7, {"tokens": 1}, {"limit": {"tokens": "x"}}, {"tokens": -1}, {"calls": 1.5}]
)
def test_a_wrong_budget_in_a_copy_is_found(bankrupt: Path, wrong: Any) -> None:
    run = json.loads(exported(bankrupt))["document"]["run"]
    run["budget"] = {**run["budget"], **wrong} if isinstance(wrong, dict) else wrong
    if wrong == {"tokens": 1}:
        del run["budget"]["limit"]
    text = run_document.seal("execution_state", {"run": run})
    with pytest.raises(DocumentCorruptError, match=r"run\.budget"):
        read_export(text, "r.json")
