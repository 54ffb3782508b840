"""Leases: a row in the journal, and a locked file that proves that the holder's process lives.

The table has a row per lease that is held. Its key is the fencing number: every acquisition
inserts a row with a key that was never used before, and releasing or taking over deletes it. So a
lease is current exactly while its row exists.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from typing import TYPE_CHECKING, Any

from maestro_hive.kernel import files
from maestro_hive.kernel.clock import from_micros, to_micros
from maestro_hive.kernel.errors import FencedError, RunLeasedError, StorageError
from maestro_hive.kernel.files import FileLock, is_locked
from maestro_hive.maestro.state.records import Holder, Lease

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import apsw

    from maestro_hive.kernel.clock import Clock

LIST_LEASES = "SELECT id, name, holder, host, pid, since, boot, expires FROM leases ORDER BY name"
FIND_LEASE = "SELECT id, name, holder, host, pid, since, boot, expires FROM leases WHERE name = ?"

_RUN = "run/"


def run_lease_name(run: str) -> str:
    """Return the name of a run's lease."""
    return _RUN + run


class Presence:
    """This process as a holder: a file of its own, locked for as long as the process lives.

    The name is random and never used again, so a file that is not locked belongs to a dead
    process.
    """

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder = folder / "holders"
        self._clock = clock
        self._lock: FileLock | None = None
        self._holder: Holder | None = None

    def holder(self) -> Holder:
        """Return this process as others see it; the file is made at the first call."""
        if self._holder is None:
            self._holder = self._register()
        return self._holder

    def _register(self) -> Holder:
        files.make_folder_inside(self._folder.parent, self._folder.name)
        self._remove_dead()
        holder = Holder(
            id=secrets.token_hex(8),
            host=socket.gethostname(),
            pid=os.getpid(),
            since=self._clock.now(),
        )
        lock = FileLock(self._file(holder.id))
        # No other process can remove it before it is locked: this happens inside a transaction.
        if not lock.acquire(timeout=1.0):
            raise StorageError(f"{lock.path} is locked by another process, though just created")
        facts = {"host": holder.host, "pid": holder.pid, "since": holder.since.isoformat()}
        lock.write(json.dumps(facts).encode())
        self._lock = lock
        return holder

    def _remove_dead(self) -> None:
        """Delete the files of dead processes; what cannot be deleted now stays for the next."""
        with contextlib.suppress(OSError, StorageError):
            for path in self._folder.glob("*.json"):
                if not is_locked(path):
                    path.unlink(missing_ok=True)

    def is_alive(self, lease: Lease) -> bool:
        """Return whether the process that holds a lease lives, on this machine."""
        return self.lives(lease.holder.id, lease.boot)

    def lives(self, holder_id: str, boot: str) -> bool:
        """Return whether a holder of leases that were taken in this boot lives."""
        return boot == self._clock.boot_id() and is_locked(self._file(holder_id))

    def run_leases(self, rows: Iterable[tuple[Any, ...]]) -> dict[str, Lease]:
        """Return, of these rows, the leases of runs whose holders live; one check per holder."""
        alive: dict[str, bool] = {}
        held: dict[str, Lease] = {}
        for lease in map(read_lease, rows):
            if not lease.name.startswith(_RUN):
                continue
            holder = lease.holder.id
            if holder not in alive:
                alive[holder] = self.is_alive(lease)
            if alive[holder]:
                held[lease.name.removeprefix(_RUN)] = lease
        return held

    def close(self) -> None:
        """Release and delete the file."""
        if self._lock is not None:
            with contextlib.suppress(OSError):  # the disk failed; the lock ends all the same
                self._lock.path.unlink(missing_ok=True)
            self._lock.close()
            self._lock = None
            self._holder = None

    def _file(self, holder_id: str) -> Path:
        return self._folder / f"{holder_id}.json"


class HolderLateError(Exception):
    """A lease has expired, and its holder lives: it may only have been unable to renew."""


class Leases:
    """The ``leases`` table, used inside the caller's transaction."""

    def __init__(self, presence: Presence, clock: Clock) -> None:
        self._presence = presence
        self._clock = clock

    def take(self, db: apsw.Connection, name: str, seconds: float, *, insist: bool) -> Lease:
        """Take a lease that is free, expired, or held by a dead process; raise otherwise.

        One whose holder lives and is merely late is taken only with ``insist``.
        """
        current = self.find(db, name)
        if current is not None:
            self._check_free(current, insist=insist)
            db.execute("DELETE FROM leases WHERE name = ?", (name,))
        holder = self._presence.holder()
        now = self._clock.now()
        boot, expires = self._clock.boot_id(), self._clock.awake_seconds() + seconds
        db.execute(
            "INSERT INTO leases (name, holder, host, pid, since, boot, expires)"
            " VALUES (?, ?, ?, ?, ?, ?, ?)",
            (name, holder.id, holder.host, holder.pid, to_micros(now), boot, expires),
        )
        held_since = Holder(id=holder.id, host=holder.host, pid=holder.pid, since=now)
        fence = db.last_insert_rowid()
        return Lease(name=name, fence=fence, holder=held_since, boot=boot, expires=expires)

    def find(self, db: apsw.Connection, name: str) -> Lease | None:
        """Return a lease that was not released, whether or not its holder lives."""
        row = db.execute(FIND_LEASE, (name,)).fetchone()
        return None if row is None else read_lease(row)

    def _check_free(self, current: Lease, *, insist: bool) -> None:
        if not self._presence.is_alive(current):
            return
        if self._clock.awake_seconds() < current.expires:
            holder = current.holder
            raise RunLeasedError(
                current.name.removeprefix(_RUN),
                host=holder.host,
                pid=holder.pid,
                since=holder.since,
            )
        if not insist:
            raise HolderLateError

    def is_current(self, db: apsw.Connection, lease: Lease) -> bool:
        """Return whether a lease was neither released nor taken over."""
        sql = "SELECT 1 FROM leases WHERE id = ?"
        return db.execute(sql, (lease.fence,)).fetchone() is not None

    def refusal(self, db: apsw.Connection, lease: Lease) -> FencedError | None:
        """Return the error for writing under this lease; None if the lease is current."""
        if self.is_current(db, lease):
            return None
        row = db.execute("SELECT id FROM leases WHERE name = ?", (lease.name,)).fetchone()
        current = int(row[0]) if row else 0
        return FencedError(lease.name.removeprefix(_RUN), fence=lease.fence, current=current)

    def renew(self, db: apsw.Connection, seconds: float) -> None:
        """Extend every lease of this process."""
        expires, boot = self._clock.awake_seconds() + seconds, self._clock.boot_id()
        db.execute(
            "UPDATE leases SET expires = ?, boot = ? WHERE holder = ?",
            (expires, boot, self._presence.holder().id),
        )

    def release(self, db: apsw.Connection, lease: Lease) -> bool:
        """Release a lease; False if it was not current any more."""
        return self.delete(db, lease.fence)

    def delete(self, db: apsw.Connection, fence: int) -> bool:
        """Delete the lease with this fencing number; False if there is none."""
        db.execute("DELETE FROM leases WHERE id = ?", (fence,))
        return db.changes() > 0

    def delete_unless_renewed(self, db: apsw.Connection, fence: int) -> bool:
        """Delete a lease whose holder is dead or late; False if there is none, or it was renewed."""
        row = db.execute(
            "SELECT holder, boot, expires FROM leases WHERE id = ?", (fence,)
        ).fetchone()
        if row is None:
            return False
        holder, boot, expires = row
        lives = self._presence.lives(holder, boot)
        return not (lives and self._clock.awake_seconds() < expires) and self.delete(db, fence)


def read_lease(row: tuple[Any, ...]) -> Lease:
    """Turn a row of ``leases`` into a record."""
    number, name, holder, host, pid, since, boot, expires = row
    return Lease(
        name=str(name),
        fence=int(number),
        holder=Holder(id=str(holder), host=str(host), pid=int(pid), since=from_micros(int(since))),
        boot=str(boot),
        expires=float(expires),
    )
