"""The error of a failed step is in the journal, and travels with the run; people see its text."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import RunFailedError
from maestro_hive.admin import transfer
from maestro_hive.admin.runs import find_run, run_details, step_details
from maestro_hive.engine.recorded_errors import error_from
from maestro_hive.maestro.state.projections import facts_of
from maestro_hive.maestro.state.records import EntryKind
from maestro_hive.maestro.state.stores import open_reader

if TYPE_CHECKING:
    from pathlib import Path

    from maestro_hive import Hive


class OutOfStockError(Exception):
    def __init__(self, sku: str) -> None:
        super().__init__(f"{sku} is sold out")
        self.sku = sku


@pytest.fixture
def failed(hive: Hive, folder: Path) -> Path:
    @hive.step(retry_on=())
    async def sell(sku: str) -> None:
        raise OutOfStockError(sku)

    @hive.workflow
    async def order(sku: str) -> None:
        await sell(sku)

    with pytest.raises(RunFailedError):
        hive.run_sync(order, "sku-1", run_id="r")
    return folder


def recorded(folder: Path, run_id: str) -> list[dict[str, Any]]:
    """Return the errors of the attempts of a run."""
    with closing(open_reader(folder)) as reader:
        entries = reader.entries(find_run(reader, run_id).id)
    kind = EntryKind.ATTEMPT_FAILED
    return [facts_of(each)["error"] for each in entries if each.kind == kind]


def test_the_error_of_an_attempt_can_be_made_again(failed: Path) -> None:
    made = error_from(recorded(failed, "r")[-1])
    assert type(made) is OutOfStockError
    assert (made.sku, str(made)) == ("sku-1", "sku-1 is sold out")
    assert "in sell" in made.__notes__[-1]


def test_an_exported_run_has_its_errors(failed: Path, tmp_path: Path) -> None:
    with closing(open_reader(failed)) as reader:
        text = transfer.export_run(reader, "r", with_values=True).text
    transfer.import_run(tmp_path / "other", text, "r.json")
    assert recorded(tmp_path / "other", "r") == recorded(failed, "r")


def test_people_see_the_text_of_an_error_alone(failed: Path) -> None:
    with closing(open_reader(failed)) as reader:
        run, step = run_details(reader, "r"), step_details(reader, "r", "sell")
    shown = {"type", "message", "category", "traceback"}
    assert run.error is not None
    assert run.error.keys() - {"recoverable"} == shown
    for attempt in step.attempts:
        assert attempt.error is not None
        assert attempt.error.keys() - {"recoverable"} == shown
