"""Who holds what: a lease in the journal, and a locked file that proves its process alive."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from typing import TYPE_CHECKING, Any

from maestro_hive.kernel import files
from maestro_hive.kernel.errors import FencedError, RunLeasedError, StorageError
from maestro_hive.kernel.locks import FileLock, is_locked
from maestro_hive.maestro.state.records import Holder, Lease, from_micros, to_micros

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import apsw

    from maestro_hive.kernel.clock import Clock

_TAKEN = (
    "SELECT id, name, fence, holder, host, pid, since, boot, expires FROM leases WHERE holder <> ''"
)
FIND_LEASE = f"{_TAKEN} AND name = ?"
FIND_RUN_LEASES = f"{_TAKEN} AND name GLOB 'run/*'"


class Presence:
    """This process as a holder: a file of its own, locked for as long as it lives.

    The name is random and never used again, so a file whose lock is free belongs to the dead.
    """

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder = folder / "holders"
        self._clock = clock
        self._lock: FileLock | None = None
        self._holder: Holder | None = None

    def holder(self) -> Holder:
        """Return this process as others will see it; the file is made when first asked."""
        if self._holder is None:
            self._holder = self._announce()
        return self._holder

    def _announce(self) -> Holder:
        files.make_folder_inside(self._folder.parent, self._folder.name)
        self._sweep()
        holder = Holder(
            id=secrets.token_hex(8),
            host=socket.gethostname(),
            pid=os.getpid(),
            since=self._clock.now(),
        )
        lock = FileLock(self._file(holder.id))
        # Nobody else can sweep it away before it is locked: this happens inside a transaction.
        if not lock.acquire(timeout=1.0):
            raise StorageError(f"{lock.path} was locked by somebody else, though just made")
        facts = {"host": holder.host, "pid": holder.pid, "since": holder.since.isoformat()}
        lock.write(json.dumps(facts).encode())
        self._lock = lock
        return holder

    def _sweep(self) -> None:
        """Delete the files of the dead; what cannot be deleted now will be another time."""
        with contextlib.suppress(OSError, StorageError):
            for path in self._folder.glob("*.json"):
                if not is_locked(path):
                    path.unlink(missing_ok=True)

    def is_alive(self, holder_id: str) -> bool:
        """Return whether the process of that holder lives, on this machine."""
        return is_locked(self._file(holder_id))

    def close(self) -> None:
        """Leave."""
        if self._lock is not None:
            with contextlib.suppress(OSError):  # the disk failed; the lock ends all the same
                self._lock.path.unlink(missing_ok=True)
            self._lock.close()
            self._lock = None
            self._holder = None

    def _file(self, holder_id: str) -> Path:
        return self._folder / f"{holder_id}.json"


class HolderLateError(Exception):
    """A lease has expired, and its holder lives: it may only have been kept from renewing."""


class Leases:
    """The ``leases`` table, used inside the caller's transaction."""

    def __init__(self, presence: Presence, clock: Clock) -> None:
        self._presence = presence
        self._clock = clock

    def take(self, db: apsw.Connection, name: str, seconds: float, *, insist: bool) -> Lease:
        """Take a lease that is free, forsaken or expired; raise if somebody has it.

        One whose holder lives and is merely late is taken only by who insists.
        """
        current = self.find(db, name)
        if current is not None and self._is_alive(current):
            if self._clock.awake_seconds() < current.expires:
                holder = current.holder
                raise RunLeasedError(
                    name.removeprefix("run/"), host=holder.host, pid=holder.pid, since=holder.since
                )
            if not insist:
                raise HolderLateError
        me = self._presence.holder()
        since = to_micros(self._clock.now())
        expires = self._clock.awake_seconds() + seconds
        db.execute(
            "INSERT INTO leases (name, fence, holder, host, pid, since, boot, expires)"
            " VALUES (?, 1, ?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (name) DO UPDATE SET fence = fence + 1, holder = excluded.holder,"
            " host = excluded.host, pid = excluded.pid, since = excluded.since,"
            " boot = excluded.boot, expires = excluded.expires",
            (name, me.id, me.host, me.pid, since, self._clock.boot_id(), expires),
        )
        taken = self.find(db, name)
        assert taken is not None
        return taken

    def _is_alive(self, lease: Lease) -> bool:
        boot = self._clock.boot_id()
        return lease.boot == boot and self._presence.is_alive(lease.holder.id)

    def find(self, db: apsw.Connection, name: str) -> Lease | None:
        """Return a lease that was not given back."""
        row = db.execute(FIND_LEASE, (name,)).fetchone()
        return read_lease(row) if row else None

    def run_leases(self, rows: Iterable[tuple[Any, ...]]) -> dict[str, Lease]:
        """Return the runs of these leases whose holders live; one look at each holder."""
        living: dict[str, bool] = {}
        held: dict[str, Lease] = {}
        for lease in map(read_lease, rows):
            holder = lease.holder.id
            if holder not in living:
                living[holder] = self._is_alive(lease)
            if living[holder]:
                held[lease.name.removeprefix("run/")] = lease
        return held

    def check(self, db: apsw.Connection, lease: Lease) -> FencedError | None:
        """Return the reason why writing under this lease must be refused, if there is one."""
        row = db.execute("SELECT fence, holder FROM leases WHERE id = ?", (lease.id,)).fetchone()
        if row == (lease.fence, lease.holder.id):
            return None
        current = int(row[0]) if row else 0
        return FencedError(lease.name.removeprefix("run/"), fence=lease.fence, current=current)

    def renew(self, db: apsw.Connection, seconds: float) -> None:
        """Extend whatever this process has."""
        db.execute(
            "UPDATE leases SET expires = ?, boot = ? WHERE holder = ?",
            (
                self._clock.awake_seconds() + seconds,
                self._clock.boot_id(),
                self._presence.holder().id,
            ),
        )

    def release(self, db: apsw.Connection, lease: Lease) -> None:
        """Give a lease back, if it is still ours."""
        db.execute(
            "UPDATE leases SET holder = '' WHERE id = ? AND fence = ? AND holder = ?",
            (lease.id, lease.fence, lease.holder.id),
        )


def read_lease(row: tuple[Any, ...]) -> Lease:
    """Turn a row of ``leases`` into a record."""
    number, name, fence, holder, host, pid, since, boot, expires = row
    return Lease(
        id=int(number),
        name=str(name),
        fence=int(fence),
        holder=Holder(id=str(holder), host=str(host), pid=int(pid), since=from_micros(int(since))),
        boot=str(boot),
        expires=float(expires),
    )
