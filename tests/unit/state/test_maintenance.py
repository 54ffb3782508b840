"""What a store does by itself: leases before the log, whatever is asked for."""

from __future__ import annotations

import threading
import time

from maestro_hive.maestro.state.sqlite.maintenance import Maintenance


class Kept:
    def __init__(self) -> None:
        self.renewals = 0
        self.checkpoints = 0
        self.renewed_often = threading.Event()

    def renew_leases(self) -> None:
        self.renewals += 1
        if self.renewals >= 5:
            self.renewed_often.set()

    def checkpoint(self) -> None:
        self.checkpoints += 1


def test_checkpoints_without_pause_do_not_starve_the_leases() -> None:
    kept = Kept()
    upkeep = Maintenance(kept, interval=0.02)
    upkeep.start()
    deadline = time.monotonic() + 30
    while min(kept.renewals, kept.checkpoints) < 5 and time.monotonic() < deadline:
        upkeep.ask_for_checkpoint()
        time.sleep(0.001)
    upkeep.stop()
    assert kept.renewals >= 5
    assert kept.checkpoints >= 5


def test_leases_are_renewed_without_being_asked() -> None:
    kept = Kept()
    upkeep = Maintenance(kept, interval=0.01)
    upkeep.start()
    assert kept.renewed_often.wait(30)
    upkeep.stop()
    assert kept.checkpoints == 0
