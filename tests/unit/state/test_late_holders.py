"""A holder that was kept from renewing is not a holder that hangs."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from maestro_hive.kernel.errors import RunLeasedError
from maestro_hive.maestro.state.codec import Encoded, encode
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.store import LEASE_SECONDS
from maestro_hive.testing import ManualClock

if TYPE_CHECKING:
    from pathlib import Path

LEASE = 1.5


def test_a_write_longer_than_the_lease_costs_no_healthy_holder_its_run(tmp_path: Path) -> None:
    holder, slow, other = (SqliteStore(tmp_path / "s", lease_seconds=LEASE) for _ in range(3))
    fence = holder.acquire_run("run-1").lease.fence
    inside = threading.Event()

    def take_long(_before: bytes | None) -> Encoded:
        inside.set()
        time.sleep(LEASE + 0.5)  # nobody can renew anything meanwhile
        return encode(1)

    keeper = threading.Thread(target=slow.update_document, args=("space", "key", take_long))
    keeper.start()
    assert inside.wait(30)
    with pytest.raises(RunLeasedError):
        other.acquire_run("run-1")
    keeper.join()
    lease = holder.lease("run/run-1")
    assert lease is not None
    assert lease.fence == fence
    for store in (other, slow, holder):
        store.close()


def test_a_late_holder_that_lives_may_renew_before_it_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    holder, other = (SqliteStore(tmp_path / "s", clock=clock) for _ in range(2))
    holder.acquire_run("run-1")
    clock.advance(LEASE_SECONDS + 1)
    monkeypatch.setattr(time, "sleep", lambda _seconds: holder.renew_leases())
    with pytest.raises(RunLeasedError):
        other.acquire_run("run-1")
    for store in (other, holder):
        store.close()
