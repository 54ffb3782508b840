"""What a process leaves behind that opens one event loop after another."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING

from faults.child_processes import ObservedRun
from maestro_hive.maestro.state import recorder

if TYPE_CHECKING:
    from pathlib import Path


def test_a_loop_that_ended_is_not_kept_alive_by_what_was_recorded_on_it(tmp_path: Path) -> None:
    gc.collect()
    before = len(recorder._recorders())
    with ObservedRun(tmp_path, {}).executor() as executor:
        for number in range(5):
            asyncio.run(executor.execute(str, "step", number))
        gc.collect()
        assert len(recorder._recorders()) - before <= 1
