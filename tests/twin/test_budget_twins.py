"""A run that is bankrupt, raised and resumed, and killed around all that, is the run never killed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import BudgetExceeded, Hive, current
from maestro_hive.maestro.state.records import EntriesAppended, EntryKind
from tests.hive.conftest import copy_live, quick_config

if TYPE_CHECKING:
    from pathlib import Path

TOKENS, STEPS = 60, 7
#: How often a run may be bankrupt: each time it is given one call more.
MOST_RAISES = 20


def program(hive: Hive, calls: list[Any]) -> Any:
    @hive.step(persona="a", max_tokens=TOKENS, retry_on=lambda _: 0.0)
    async def ask(text: str) -> dict[str, Any]:
        calls.append(text)
        if text == "fails" and current().attempt == 1:
            raise OSError("try again")
        return {"text": text, "tokens_used": TOKENS}

    @hive.step(persona="a", max_tokens=TOKENS, max_attempts=1)
    async def too_much() -> None:
        calls.append("too much")
        current().spend(tokens=TOKENS)
        raise ValueError("no")

    @hive.workflow
    async def part(name: str) -> list[str]:
        found = [await ask(f"{name}-1"), await ask(f"{name}-2")]
        return [each["text"] for each in found]

    @hive.workflow
    async def whole() -> list[Any]:
        found: list[Any] = [(await ask("fails"))["text"]]
        both = await asyncio.gather(part("b"), part("c"))
        try:
            await too_much()
        except ValueError as error:
            found.append(str(error))
        return [*found, *both, (await ask("last"))["text"]]

    return whole


def finish(folder: Path, watch: Any = None) -> tuple[list[Any], list[Any], int]:
    """Run it to its end, raising its budget as often as needed: its result, calls and raises."""
    calls: list[Any] = []
    with Hive(folder, quick_config()) as hive:
        if watch is not None:
            hive._open().notifications.add(watch)
        whole = program(hive, calls)
        for raises in range(MOST_RAISES):
            try:
                return hive.run_sync(whole, run_id="r", budget=TOKENS), calls, raises
            except BudgetExceeded:
                hive.budget.raise_limit(TOKENS, run="r")
    raise AssertionError("it is bankrupt again and again")


def recorded(folder: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Return the outcomes of steps, by run, as they are recorded."""
    kinds = {EntryKind.STEP_COMPLETED, EntryKind.STEP_FAILED}
    with Hive(folder) as hive:
        store = hive._open()
        return {
            run.name: sorted(
                (entry.kind, entry.sha256 or b"")
                for entry in store.entries(run.id)
                if entry.kind in kinds
            )
            for run in store.runs()
        }


@pytest.mark.timeout(600)
def test_a_bankrupt_run_killed_after_each_record_is_its_twin(tmp_path: Path) -> None:
    copies: list[Path] = []

    def kill(news: object) -> None:
        if isinstance(news, EntriesAppended):
            target = tmp_path / f"killed-{len(copies)}"
            copies.append(copy_live(tmp_path / "undisturbed", target))

    result, calls, raises = finish(tmp_path / "undisturbed", kill)
    assert result == ["fails", "no", ["b-1", "b-2"], ["c-1", "c-2"], "last"]
    assert raises == STEPS - 1, "each call but the first needed a raise"
    expected = recorded(tmp_path / "undisturbed")
    assert len(copies) > 30
    for folder in copies[::3]:
        with Hive(folder) as hive:
            hive.budget.release()
        again, more, _ = finish(folder)
        assert again == result, folder.name
        assert set(more) <= set(calls), folder.name
        assert recorded(folder) == expected, folder.name
        with Hive(folder) as hive:
            (account,) = [each for each in hive.budget.spent("run") if each.name == "r"]
            assert account.tokens == STEPS * TOKENS, folder.name
            assert account.reserved_tokens == 0, folder.name
