"""Taking runs for a worker, and recovering those that nobody executes any more."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

from maestro_hive.kernel.errors import RunLeasedError
from maestro_hive.maestro.state.late_leases import LateLeases
from maestro_hive.maestro.state.sqlite.entries import last_seq
from maestro_hive.maestro.state.sqlite.leases import HolderLateError, run_lease_name
from maestro_hive.maestro.state.store import RunLease

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import apsw

    from maestro_hive.maestro.state.records import NewDispatch
    from maestro_hive.maestro.state.sqlite.connection import Row
    from maestro_hive.maestro.state.sqlite.dispatch import Abandoned, DispatchTable, Rows, Wanted
    from maestro_hive.maestro.state.sqlite.leases import Leases


class Claims:
    """Changes the tables ``dispatch`` and ``leases`` together, inside the caller's transaction."""

    def __init__(self, table: DispatchTable, leases: Leases, lease_seconds: float) -> None:
        self._table = table
        self._leases = leases
        self._lease_seconds = lease_seconds
        self._late = LateLeases()

    def claim(self, db: apsw.Connection, wanted: Wanted) -> list[RunLease]:
        """Take the leases of the runs that are next."""
        rows = partial(_rows_of, db)
        if self._table.has_other_boots(rows):
            self._table.rebase(db)
        self._table.make_due(db)
        claimed: list[RunLease] = []
        for number, name, deaths in self._table.ready(rows, wanted):
            # Its lease is free, unless it was just now taken to change or to purge the run.
            with contextlib.suppress(RunLeasedError, HolderLateError):
                lease_name = run_lease_name(name)
                lease = self._leases.take(db, lease_name, self._lease_seconds, insist=False)
                self._table.activate(db, number)
                seq = last_seq(db, number)
                run = RunLease(number, name, lease, seq, dispatched=True, deaths=deaths)
                claimed.append(run)
        return claimed

    def abandoned(
        self, rows: Rows, lives: Callable[[str, str], bool], now: float
    ) -> list[Abandoned]:
        """Return the runs whose process died, and those of workers whose process hangs."""
        dead = self._table.abandoned(rows, lives)
        late = {each.lease: each for each in self._table.late(rows)}
        overdue = self._late.overdue(late.keys() - {each.lease for each in dead}, now)
        return dead + [late[lease] for lease in sorted(overdue)]

    def recover(
        self,
        db: apsw.Connection,
        abandoned: Sequence[Abandoned],
        adopted: Mapping[str, NewDispatch | None],
    ) -> list[str]:
        """Let workers take runs whose process died, and active ones without a lease."""
        recovered: list[str] = []
        for lease, run, name, _, dispatched in abandoned:
            if not self._leases.delete_unless_renewed(db, lease):
                continue  # another process was faster, or its holder goes on
            new = adopted.get(name)
            if new is not None:
                self._table.add(db, run, new, deaths=1)
                recovered.append(name)
            elif dispatched and self._table.make_ready(db, run, deaths=1):
                recovered.append(name)
        for run, name in self._table.unleased(partial(_rows_of, db)):
            if self._table.make_ready(db, run, deaths=0):
                recovered.append(name)
        return recovered


def _rows_of(db: apsw.Connection, sql: str, bindings: Row) -> list[tuple[Any, ...]]:
    return db.execute(sql, bindings).fetchall()
