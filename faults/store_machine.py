"""A state machine over the ``Store`` contract: two processes, crashes, and a model.

A "process" here is a store object. In a folder a crash is a copy of the folder as it is, journal and
WAL included, that is opened from then on: exactly what a killed process leaves.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from maestro_hive.kernel.clock import ManualClock
from maestro_hive.kernel.errors import FencedError, RunLeasedError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.memory import MemoryStore
from maestro_hive.maestro.state.records import EntryKind, NewEntry
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.store import Append

if TYPE_CHECKING:
    from maestro_hive.maestro.state.store import RunLease, Store

_LEASE = 10.0
_RUNS = st.sampled_from(["alpha", "beta", "gamma"])
_PROCESSES = st.sampled_from([0, 1])
_KEYS = st.sampled_from(["k1", "k2"])
_SPACES = st.sampled_from(["default", "circuit_breakers"])
#: Small values, values that do not fit into a row, and values that grow.
_VALUES = st.one_of(
    st.integers(),
    st.text(max_size=20),
    st.builds(lambda n: {"messages": [f"message {i} " * 9 for i in range(n)]}, st.integers(8, 60)),
)


@dataclass
class _Run:
    """The model of a run."""

    entries: list[tuple[int, bytes]] = field(default_factory=list)
    status: str = "pending"


class StoreMachine(RuleBasedStateMachine):
    """The rules; subclasses define how stores are opened and how they crash."""

    done: ClassVar[int] = 0
    counter: ClassVar[type[StoreMachine]]

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.stores: list[Store | None] = [None, None]
        self.holds: list[dict[str, RunLease]] = [{}, {}]
        self.owner: dict[str, int] = {}
        self.expires: dict[str, float] = {}
        self.fences: dict[str, int] = {}
        self.runs: dict[str, _Run] = {}
        self.documents: dict[tuple[str, str], bytes] = {}

    # --- defined by subclasses ---

    def open_store(self) -> Store:
        """Open another store on the shared data."""
        raise NotImplementedError

    def crash_all(self) -> None:
        """Kill both processes."""
        raise NotImplementedError

    # --- helpers ---

    def store(self, process: int) -> Store:
        """Return a process's store, opened if need be."""
        store = self.stores[process]
        if store is None:
            store = self.stores[process] = self.open_store()
        return store

    def _now(self) -> float:
        return self.clock.awake_seconds()

    def _is_leased(self, run: str) -> bool:
        return run in self.owner and self._now() < self.expires[run]

    def _renewed(self, process: int) -> None:
        for run, owner in self.owner.items():
            if owner == process:
                self.expires[run] = self._now() + _LEASE

    def _forget(self, process: int) -> None:
        self.holds[process] = {}
        for run in [run for run, owner in self.owner.items() if owner == process]:
            del self.owner[run]

    # --- rules: runs ---

    @initialize()
    def open_first(self) -> None:
        """Open the first store."""
        self.store(0)

    @rule(process=_PROCESSES, run=_RUNS)
    def hold(self, process: int, run: str) -> None:
        """One process at a time leases a run; a new owner gets a higher fence."""
        store = self.store(process)
        owned_by_other = self._is_leased(run) and self.owner[run] != process
        mine = self.owner.get(run) == process and run in self.holds[process]
        try:
            hold = store.acquire_run(run)
        except RunLeasedError:
            assert owned_by_other
            return
        assert not owned_by_other
        if not mine:
            assert hold.lease.fence > self.fences.get(run, 0)
            self.expires[run] = self._now() + _LEASE
        self.fences[run] = hold.lease.fence
        self.owner[run] = process
        self.holds[process][run] = hold
        self.runs.setdefault(run, _Run())
        assert hold.seq == len(self.runs[run].entries)

    @rule(process=_PROCESSES, run=_RUNS, values=st.lists(_VALUES, max_size=4), sync=st.booleans())
    def append(self, process: int, run: str, values: list[object], sync: bool) -> None:
        """The holder of a run appends; a process that was taken over is refused and writes nothing."""
        hold = self.holds[process].get(run)
        if hold is None or self.stores[process] is None:
            return
        encoded = [codec.encode(value) for value in values]
        kinds = EntryKind.SPENT
        entries = [NewEntry(kinds, value=value, family="values") for value in encoded]
        status = f"status {len(values)}"
        (refused,) = self.store(process).append([Append(hold, entries, status)], sync=sync)
        if self.owner.get(run) != process:
            assert isinstance(refused, FencedError)
            return
        assert not isinstance(refused, FencedError)
        self.runs[run].entries += [(int(kinds), value.data) for value in encoded]
        self.runs[run].status = status

    @rule(process=_PROCESSES, run=_RUNS)
    def release(self, process: int, run: str) -> None:
        """A released run is free."""
        hold = self.holds[process].pop(run, None)
        if hold is None:
            return
        hold.users = 1
        self.store(process).release_run(hold)
        if self.owner.get(run) == process:
            del self.owner[run]

    @rule(process=_PROCESSES, run=_RUNS)
    def purge(self, process: int, run: str) -> None:
        """A purged run is gone; a run that is leased is not purged."""
        leased = self._is_leased(run)
        try:
            gone = self.store(process).purge_runs([run])
        except RunLeasedError:
            assert leased
            return
        assert gone == (run in self.runs)
        if gone:
            assert not leased
            del self.runs[run]
            self.fences[run] = self.fences.get(run, 0) + 1
            self.owner.pop(run, None)
            for holds in self.holds:
                holds.pop(run, None)

    # --- rules: documents ---

    @rule(process=_PROCESSES, space=_SPACES, key=_KEYS, value=_VALUES)
    def put(self, process: int, space: str, key: str, value: object) -> None:
        """The function that changes a document sees its latest value."""
        before = self.documents.get((space, key))
        encoded = codec.encode(value)
        seen: list[bytes | None] = []

        def change(found: bytes | None) -> codec.Encoded:
            seen[:] = [found]
            return encoded

        self.store(process).update_document(space, key, change)
        assert seen == [before]
        self.documents[space, key] = encoded.data

    @rule(process=_PROCESSES, space=_SPACES, key=_KEYS)
    def delete(self, process: int, space: str, key: str) -> None:
        """A deleted document is gone."""
        self.store(process).update_document(space, key, lambda _: None)
        self.documents.pop((space, key), None)

    @rule(process=_PROCESSES, space=_SPACES)
    def delete_all(self, process: int, space: str) -> None:
        """A namespace is deleted as a whole."""
        gone = [key for key in self.documents if key[0] == space]
        assert self.store(process).delete_documents(space) == len(gone)
        for key in gone:
            del self.documents[key]

    # --- rules: time, maintenance, crashes ---

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]))
    def wait(self, seconds: float) -> None:
        """Time passes; under a manual clock nothing is renewed automatically."""
        self.clock.advance(seconds)

    @rule(process=_PROCESSES)
    def renew(self, process: int) -> None:
        """A process that renews its leases keeps them."""
        self.store(process).renew_leases()
        self._renewed(process)

    @rule(process=_PROCESSES)
    def collect(self, process: int) -> None:
        """Garbage collection removes nothing that is used."""
        self.store(process).collect()

    @rule(process=_PROCESSES)
    def close(self, process: int) -> None:
        """A process that closes its store releases everything."""
        store = self.stores[process]
        if store is not None:
            store.close()
            self.stores[process] = None
            self._forget(process)

    @rule()
    def crash(self) -> None:
        """All processes are killed, and the next one finds everything."""
        self.crash_all()
        self.stores = [None, None]
        self._forget(0)
        self._forget(1)

    # --- invariants ---

    @invariant()
    def the_store_is_the_model(self) -> None:
        """What is read is what was written, by either process."""
        type(self).counter.done += 1
        for process, store in enumerate(self.stores):
            if store is not None:
                self._compare(store, process)
                break

    def _compare(self, store: Store, _process: int) -> None:
        assert {record.name for record in store.runs()} == set(self.runs)
        for name, run in self.runs.items():
            record = store.run(name)
            assert record is not None
            assert record.status == run.status
            entries = store.entries(record.id)
            assert [(entry.kind, store.load(entry)) for entry in entries] == run.entries
            assert [entry.seq for entry in entries] == list(range(1, len(entries) + 1))
        found = {(each.namespace, each.key): each.value for each in store.documents()}
        assert found == self.documents

    @invariant()
    def nothing_is_wrong(self) -> None:
        """``check`` finds nothing wrong."""
        for store in self.stores:
            if store is not None:
                assert store.check() == []
                break


class MemoryMachine(StoreMachine):
    """The machine over stores in memory that share their data."""

    def __init__(self) -> None:
        super().__init__()
        self._root = MemoryStore(clock=self.clock, lease_seconds=_LEASE)

    def open_store(self) -> Store:
        """Open another store on the shared data."""
        return MemoryStore(clock=self.clock, lease_seconds=_LEASE, shared_with=self._root)

    def crash_all(self) -> None:
        """Abandon the stores without closing them."""
        for store in self.stores:
            if isinstance(store, MemoryStore):
                store.abandon()


class FolderMachine(StoreMachine):
    """The machine over a journal in a folder."""

    def __init__(self) -> None:
        super().__init__()
        self._top = Path(tempfile.mkdtemp(prefix="faults-model-"))
        self._folder = self._top / "0"

    def open_store(self) -> Store:
        """Open the folder."""
        return SqliteStore(self._folder, clock=self.clock, lease_seconds=_LEASE, busy_seconds=5)

    def crash_all(self) -> None:
        """Copy the folder as it is, and delete the old one."""
        crashed = self._top / str(int(self._folder.name) + 1)
        if self._folder.exists():
            skipped = shutil.ignore_patterns("*-shm")  # shared memory, gone with its processes
            shutil.copytree(self._folder, crashed, ignore=skipped)
        for store in self.stores:
            if store is not None:
                store.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = crashed

    @precondition(lambda self: any(self.stores))
    @rule()
    def checkpoint_the_wal(self) -> None:
        """The WAL is copied into the database."""
        for store in self.stores:
            if isinstance(store, SqliteStore):
                store.checkpoint()

    def teardown(self) -> None:
        """Remove everything."""
        for store in self.stores:
            if store is not None:
                store.close()
        shutil.rmtree(self._top, ignore_errors=True)
