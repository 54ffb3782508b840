"""A web service whose processes are killed under load: ``python -m faults --row 18`` kills more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from faults.service.load import kill_under_load

if TYPE_CHECKING:
    from pathlib import Path


def test_a_killed_service_finishes_what_it_accepted_and_stops_politely(tmp_path: Path) -> None:
    seen = kill_under_load(tmp_path / "shop", kills=2, seed=18)
    assert not seen.wrong
    assert seen.kills.total() == 2
    assert seen.accepted > 3
