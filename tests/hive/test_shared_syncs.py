"""Steps that are executed at the same time share the syncs of their records."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from maestro_hive import Hive
from maestro_hive.maestro.state.sqlite.store import SqliteStore

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_chains_of_steps_get_into_step_and_share_their_syncs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    real = SqliteStore.append

    def append(self: SqliteStore, appends: Any, *, sync: bool = True, **options: Any) -> Any:
        if sync:
            synced.append(len(appends))
        return real(self, appends, sync=sync, **options)

    monkeypatch.setattr(SqliteStore, "append", append)
    monkeypatch.setattr(SqliteStore, "syncs_fast", lambda _: True)  # so that no thread is needed
    hive = Hive(tmp_path / "state")
    chains, steps = 8, 20

    @hive.step(persona="writer")
    async def draft(number: int) -> int:
        return number

    @hive.workflow
    async def write() -> None:
        async def chain(number: int) -> None:
            for at in range(steps):
                await draft(at * chains + number)

        await draft(-1)  # alone, so that the first of those that follow seems to be
        await asyncio.gather(*(chain(number) for number in range(chains)))

    async def main() -> None:
        async with hive:
            await hive.run(write)

    asyncio.run(main())
    assert sum(synced) >= chains * steps
    assert synced.count(chains) >= steps / 2  # all of them at once
