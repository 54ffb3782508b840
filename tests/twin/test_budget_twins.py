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
        if text == "fails" and current().attempt == 1:
            raise OSError("try again")
        calls.append(text)
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


def nested_program(hive: Hive, calls: list[Any]) -> Any:
    """Return a workflow whose steps await steps, next to one that is not on the account."""

    @hive.step(persona="a", max_tokens=TOKENS)
    async def ask(text: str) -> dict[str, Any]:
        calls.append(text)
        return {"text": text, "tokens_used": TOKENS}

    @hive.workflow
    async def part(name: str) -> str:
        return str((await ask(name))["text"])

    @hive.step(persona="a")
    async def think(name: str) -> dict[str, Any]:
        calls.append(f"think {name}")
        found = await asyncio.gather(ask(f"{name}-1"), part(f"{name}-2"))
        return {"found": [found[0]["text"], found[1]], "tokens_used": 0}

    @hive.step(persona="free")
    async def beside(name: str) -> dict[str, Any]:
        calls.append(name)
        await asyncio.sleep(0.01)
        return {"text": name, "tokens_used": TOKENS}

    @hive.workflow
    async def siblings(name: str) -> list[str]:
        return [(await beside(f"{name}-1"))["text"], (await beside(f"{name}-2"))["text"]]

    @hive.workflow
    async def whole() -> list[Any]:
        first, second, free = await asyncio.gather(think("b"), think("c"), siblings("free"))
        return [first["found"], second["found"], free]

    return whole


def finish(
    folder: Path, watch: Any = None, make: Any = program, **account: Any
) -> tuple[list[Any], list[Any], int]:
    """Run it to its end, raising its budget as often as needed: its result, calls and raises."""
    calls: list[Any] = []
    account = account or {"run": "r"}
    ((scope, name),) = account.items()
    with Hive(folder, quick_config(), budget={scope: {name: TOKENS}}) as hive:
        if watch is not None:
            hive._open().notifications.add(watch)
        whole = make(hive, calls)
        for raises in range(MOST_RAISES):
            try:
                return hive.run_sync(whole, run_id="r"), calls, raises
            except BudgetExceeded:
                hive.budget.raise_limit(TOKENS, **account)
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
            before = sum(each.tokens for each in hive.budget.spent("run") if each.name == "r")
        again, more, _ = finish(folder)
        assert again == result, folder.name
        assert set(more) <= set(calls), folder.name
        assert recorded(folder) == expected, folder.name
        with Hive(folder) as hive:
            (account,) = [each for each in hive.budget.spent("run") if each.name == "r"]
            assert account.tokens == before + len(more) * TOKENS, folder.name
            # Killed after it spent and before it failed, that attempt is made, and paid, again.
            most = STEPS + ("too much" in more)
            assert STEPS * TOKENS <= account.tokens <= most * TOKENS, folder.name
            assert account.reserved_tokens == 0, folder.name


@pytest.mark.timeout(600)
def test_nested_calls_and_bankrupt_siblings_killed_after_each_record_are_their_twin(
    tmp_path: Path,
) -> None:
    copies: list[Path] = []

    def kill(news: object) -> None:
        if isinstance(news, EntriesAppended):
            target = tmp_path / f"killed-{len(copies)}"
            copies.append(copy_live(tmp_path / "undisturbed", target))

    result, calls, raises = finish(tmp_path / "undisturbed", kill, nested_program, persona="a")
    assert result == [["b-1", "b-2"], ["c-1", "c-2"], ["free-1", "free-2"]]
    assert raises == 3, "each call of the persona but the first needed a raise"
    for name in ("b-1", "b-2", "c-1", "c-2", "free-1", "free-2"):
        assert calls.count(name) == 1, "no call that was in flight is paid for again"
    expected = recorded(tmp_path / "undisturbed")
    assert len(copies) > 20
    for folder in copies[::5]:
        with Hive(folder) as hive:
            hive.budget.release()
        again, more, _ = finish(folder, None, nested_program, persona="a")
        assert again == result, folder.name
        assert set(more) <= set(calls), folder.name
        assert recorded(folder) == expected, folder.name
        with Hive(folder) as hive:
            spent = {each.name: each for each in hive.budget.spent("persona")}
            assert spent["a"].tokens == 4 * TOKENS, folder.name
            assert spent["free"].tokens == 2 * TOKENS, folder.name
            assert spent["a"].reserved_tokens == spent["a"].in_flight == 0, folder.name
