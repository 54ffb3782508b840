"""What was spent, and the progress that goes with it, are one record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import Hive, current
from maestro_hive.engine.errors import TokenBudgetExceeded
from maestro_hive.engine.open_run import OpenRun
from maestro_hive.maestro.state.records import EntryKind
from tests.hive.conftest import quick_config

if TYPE_CHECKING:
    from pathlib import Path


def appended(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return the kinds of entries of each transaction that is made from now on."""
    seen: list[list[int]] = []
    append = OpenRun.append

    def noted(self: OpenRun, entries: Any, *args: Any, **kwargs: Any) -> None:
        made = list(entries)
        seen.append([each.kind for each in made])
        append(self, made, *args, **kwargs)

    monkeypatch.setattr(OpenRun, "append", noted)
    return seen


def test_what_was_spent_and_its_progress_are_one_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Hive(tmp_path / "state", quick_config()) as hive:

        @hive.step
        def work() -> dict[str, Any]:
            current().save_progress(other=1)
            current().spend_and_save({"counted": 100}, tokens=100)
            current().spend_and_save({"counted": 150}, tokens=50)
            current().spend_and_save({"counted": 150, "session": "x"})  # nothing was spent
            return current().progress

        @hive.workflow
        async def build() -> dict[str, Any]:
            return await work()

        seen = appended(monkeypatch)
        assert hive.run_sync(build, run_id="r") == {"other": 1, "counted": 150, "session": "x"}
        both = [EntryKind.SPENT, EntryKind.PROGRESS_SAVED]
        assert [each for each in seen if EntryKind.SPENT in each] == [both, both]
        assert [each for each in seen if each == [EntryKind.PROGRESS_SAVED]] == [both[1:]] * 2


def test_what_is_over_a_budget_is_saved_as_well(tmp_path: Path) -> None:
    saved = []
    with Hive(tmp_path / "state", quick_config()) as hive:

        @hive.step(budget=10)
        def work() -> None:
            try:
                current().spend_and_save({"counted": 100}, tokens=100)
            finally:
                saved.append(current().progress)

        @hive.workflow
        async def build() -> None:
            await work()

        with pytest.raises(Exception, match="budget") as failed:
            hive.run_sync(build, run_id="r")
    assert isinstance(failed.value.__cause__ or failed.value, TokenBudgetExceeded)
    assert saved == [{"counted": 100}]
