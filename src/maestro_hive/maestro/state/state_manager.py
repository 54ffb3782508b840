"""``StateManager``: shared values in namespaces, with subscriptions and checkpoints.

Runs, breakers, budgets and escalations appear as namespaces that can be read and observed here,
and are set by their owners only: there is one copy of each, in the journal.
"""

from __future__ import annotations

import copy
import fnmatch
import itertools
import threading
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maestro_hive.kernel import files
from maestro_hive.kernel.clock import to_micros
from maestro_hive.kernel.errors import ConfigurationError, DocumentCorruptError
from maestro_hive.kernel.hooks import Hooks
from maestro_hive.kernel.process import PerProcess
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state import run_document as documents
from maestro_hive.maestro.state.memory import MemoryStore
from maestro_hive.maestro.state.projections import RunState, fold
from maestro_hive.maestro.state.records import DocumentChanged, EntriesAppended
from maestro_hive.maestro.state.shared_records import BREAKERS
from maestro_hive.maestro.state.stores import close_store, open_store
from maestro_hive.maestro.state.views import ViewCache, show_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime

    from maestro_hive.maestro.state.records import Notification, RunRecord
    from maestro_hive.maestro.state.store import Store


@dataclass(frozen=True, slots=True)
class StateChange:
    """One change, as subscribers see it; ``change_type`` is set, delete or clear."""

    key: str
    old_value: Any
    new_value: Any
    namespace: str
    timestamp: datetime
    change_type: str


@dataclass(frozen=True, slots=True)
class Subscription:
    """A callback, and the shell-style patterns of the keys and namespaces it is for."""

    callback: Callable[[StateChange], object]
    key_pattern: str
    namespace: str

    def __call__(self, change: StateChange) -> None:
        """Call it with a change that matches."""
        if fnmatch.fnmatchcase(change.key, self.key_pattern) and fnmatch.fnmatchcase(
            change.namespace, self.namespace
        ):
            self.callback(change)


# --- runs ---


@dataclass(slots=True)
class _Watched:
    number: int
    state: RunState
    cache: ViewCache = field(default_factory=ViewCache)
    shown: dict[str, object] = field(default_factory=dict)


class RunWatch:
    """The runs of one store that were read before, so that only new entries are folded."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._runs: dict[str, _Watched] = {}
        self._mutex = threading.Lock()

    def view(self, run_id: str) -> dict[str, object] | None:
        """Return a run in its current state, as a new object; None if there is none."""
        record = self._store.run(run_id)
        with self._mutex:
            return copy.deepcopy(self._up_to_date(record).shown) if record else None

    def change(self, event: EntriesAppended) -> tuple[object, object]:
        """Return a run before and after its latest entries; not to be changed."""
        record = self._store.run(event.run_id)
        if record is None:
            return None, None
        with self._mutex:
            before = self._before(record, event)
            return before, self._up_to_date(record).shown

    def _up_to_date(self, record: RunRecord) -> _Watched:
        watched = self._runs.get(record.name)
        if watched is None or watched.number != record.id:  # purged, and started again
            state = RunState(created_at=to_micros(record.created_at))
            watched = self._runs[record.name] = _Watched(record.id, state)
        new = self._store.entries(record.id, after=watched.state.seq)
        watched.state.add_all(new, self._store.load)
        if new or not watched.shown:
            watched.shown = show_run(watched.state, record.name, self._store.load, watched.cache)
        return watched

    def _before(self, record: RunRecord, event: EntriesAppended) -> dict[str, object] | None:
        if event.first == 1:
            return None
        watched = self._runs.get(record.name)
        if watched and watched.number == record.id and watched.state.seq == event.first - 1:
            return watched.shown
        earlier = self._store.entries(record.id)[: event.first - 1]
        return show_run(fold(earlier, self._store.load), record.name, self._store.load)


# --- values ---


WORKFLOWS = "workflows"
DEFAULT_NAMESPACE = "default"
#: Namespaces that start with it are the journal's own: neither shown nor cleared here.
_INTERNAL = "$"
#: Namespaces that show what is in the journal, and what sets them.
_READ_ONLY = {
    WORKFLOWS: "StatePersistence",
    BREAKERS.namespace: "CircuitBreaker",
    "budgets": "the budget itself",
    "escalations": "the escalation itself",
}
_KIND = "state_manager_checkpoint"


@dataclass(slots=True)
class _Managers:
    """The managers of this process."""

    mutex: threading.RLock = field(default_factory=threading.RLock)
    first: StateManager | None = None
    by_folder: dict[Path, StateManager] = field(default_factory=dict)


_managers = PerProcess(_Managers)


class _OnePerFolder(type):
    """Makes one manager per resolved folder; without a folder, there is the first one made."""

    @property
    def _instance(cls) -> StateManager | None:
        """The first manager made; setting it to None starts over."""
        return _managers().first

    @_instance.setter
    def _instance(cls, manager: StateManager | None) -> None:
        _managers().first = manager

    def __call__(
        cls,
        persistence_dir: str | Path | None = None,
        auto_persist: bool = False,
        persist_interval_seconds: float = 60,
    ) -> StateManager:
        managers = _managers()
        with managers.mutex:
            if persistence_dir is None:
                found = managers.first or cls._make(None)
            else:
                folder = Path(persistence_dir).expanduser().resolve()
                found = managers.by_folder.get(folder) or cls._make(folder)
                if auto_persist:
                    found.persist()
                managers.by_folder[folder] = found
            managers.first = managers.first or found
            return found

    def _make(cls, folder: Path | None) -> StateManager:
        return type.__call__(cls, folder)  # type: ignore[no-any-return]


class StateManager(metaclass=_OnePerFolder):
    """One per folder and process; without a folder, the first one made.

    With a folder and ``auto_persist=True``, what ``set_state`` returned from is on disk, is seen
    by other processes, and is there in the next one. Otherwise values live in this process, and
    ``checkpoint`` saves them. ``persist_interval_seconds`` is accepted for older callers:
    persistent values never wait for an interval.
    """

    def __init__(
        self,
        persistence_dir: str | Path | None = None,
        auto_persist: bool = False,
        persist_interval_seconds: float = 60,
    ) -> None:
        self._folder = None if persistence_dir is None else Path(persistence_dir)
        self._hooks: Hooks[StateChange] = Hooks()
        self._subscriptions: dict[str, Callable[[], None]] = {}
        self._numbers = itertools.count(1)
        self._checkpoints: dict[str, bytes] = {}
        self._is_shut = False
        self._is_persistent = False
        self._attach(
            MemoryStore() if self._folder is None else open_store(self._folder, persistent=False)
        )

    def _attach(self, store: Store) -> None:
        self._store = store
        self._runs = RunWatch(store)
        self._detach = store.notifications.add(self._on_notification)

    def persist(self) -> None:
        """Move to the folder's journal, with what this process has set so far."""
        if self._is_persistent and self._store.usable:
            return
        assert self._folder is not None
        earlier, detach, was_persistent = self._store, self._detach, self._is_persistent
        self._attach(open_store(self._folder))
        self._is_persistent = True
        detach()
        if not was_persistent:
            values: dict[tuple[str, str], codec.Encoded | None] = {
                (document.namespace, document.key): codec.Encoded(document.value, document.sha256)
                for document in earlier.documents()
            }
            if values:
                self._store.set_documents(values)
            close_store(earlier)

    @property
    def store(self) -> Store:
        """The journal behind it."""
        return self._store

    # --- values ---

    def get_state(self, key: str, namespace: str = "default", default: Any = None) -> Any:
        """Return the value under ``key``; a new object each time, which the caller may change."""
        check_text("key", key)
        check_text("namespace", namespace)
        if namespace == WORKFLOWS:
            view = self._runs.view(key)
            return default if view is None else view
        document = self._store.document(namespace, key)
        return default if document is None else codec.decode(document.value, f"{namespace}/{key}")

    def set_state(
        self, key: str, value: object, namespace: str = "default", notify: bool = True
    ) -> None:
        """Put ``value`` under ``key``."""
        self._check_name(key, namespace)
        encoded = codec.encode(value, f"{namespace}/{key}")
        with _silenced(silent=not notify):
            self._store.update_document(namespace, key, lambda _: encoded)

    def update_state(
        self, key: str, fn: Callable[[Any], object], namespace: str = "default"
    ) -> Any:
        """Replace a value by the result of ``fn`` (called with None at first), atomically."""
        self._check_name(key, namespace)
        made: list[object] = []

        def change(before: bytes | None) -> codec.Encoded:
            value = None if before is None else codec.decode(before, f"{namespace}/{key}")
            made[:] = [fn(value)]
            return codec.encode(made[0], f"{namespace}/{key}")

        self._store.update_document(namespace, key, change)
        return made[0]

    def delete_state(self, key: str, namespace: str = "default", notify: bool = True) -> bool:
        """Remove a key; False if it was not there."""
        self._check_name(key, namespace)
        found: list[bool] = []

        def change(before: bytes | None) -> None:
            found[:] = [before is not None]

        with _silenced(silent=not notify):
            self._store.update_document(namespace, key, change)
        return found[0]

    def get_all_state(self, namespace: str | None = None) -> dict[str, Any]:
        """Return a namespace as a dictionary, or all namespaces as a dictionary of those."""
        if namespace is None:
            return {name: self.get_all_state(name) for name in self.get_namespaces()}
        if namespace == WORKFLOWS:
            return {run.name: self.get_state(run.name, WORKFLOWS) for run in self._store.runs()}
        return {
            document.key: codec.decode(document.value, f"{namespace}/{document.key}")
            for document in self._store.documents(namespace)
        }

    def get_namespaces(self) -> list[str]:
        """Return the namespaces: ``default``, and those that have something in them."""
        found = {document.namespace for document in self._store.documents()}
        names = {name for name in found if not name.startswith(_INTERNAL)} | {DEFAULT_NAMESPACE}
        if self._store.runs(limit=1):
            names.add(WORKFLOWS)
        return sorted(names)

    def clear(self, namespace: str | None = None) -> None:
        """Remove every value of a namespace, or of all that can be set here."""
        if namespace is not None:
            self._check_name("*", namespace)
        names = self.get_namespaces() if namespace is None else [namespace]
        token = _clearing.set(True)
        try:
            for name in names:
                if name not in _READ_ONLY:
                    self._store.delete_documents(name)
        finally:
            _clearing.reset(token)

    # --- subscriptions ---

    def subscribe(
        self,
        callback: Callable[[StateChange], object],
        key_pattern: str = "*",
        namespace: str = "*",
    ) -> str:
        """Have ``callback`` called for changes made in this process; patterns are shell-style.

        The values of runs that it receives are shared with later calls and must not be changed.
        """
        subscription_id = f"sub_{next(self._numbers)}"
        subscription = Subscription(callback, key_pattern, namespace)
        self._subscriptions[subscription_id] = self._hooks.add(subscription)
        return subscription_id

    def unsubscribe(self, subscription_id: str) -> bool:
        """End a subscription; False if there is none of that id."""
        remove = self._subscriptions.pop(subscription_id, None)
        if remove is not None:
            remove()
        return remove is not None

    def _on_notification(self, event: Notification) -> None:
        if not self._hooks or _silent.get():
            return
        if isinstance(event, DocumentChanged):
            if event.before is None and event.after is None:
                return  # a document that did not exist was deleted
            before = None if event.before is None else codec.decode(event.before)
            after = None if event.after is None else codec.decode(event.after)
            self._emit(event.key, event.namespace, before, after)
        elif isinstance(event, EntriesAppended):
            self._emit(event.run_id, WORKFLOWS, *self._runs.change(event))

    def _emit(self, key: str, namespace: str, before: object, after: object) -> None:
        gone = "clear" if _clearing.get() else "delete"
        kind = gone if after is None else "set"
        now = self._store.clock.now()
        self._hooks.emit(StateChange(key, before, after, namespace, now, kind))

    # --- checkpoints ---

    def checkpoint(
        self, checkpoint_id: str, metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Save all values under this id, with a folder as a file in it; return what was saved.

        That is a ``checkpoint_id``, a ``timestamp`` (ISO 8601, UTC), the values by namespace as
        ``state_snapshot``, and the ``metadata``.
        """
        files.check_identifier(checkpoint_id, "checkpoint id")
        values = {
            name: self.get_all_state(name)
            for name in self.get_namespaces()
            if name not in _READ_ONLY
        }
        created_at = self._store.clock.now().isoformat()
        body = {
            "checkpoint_id": checkpoint_id,
            "created_at": created_at,
            "metadata": _as_json(metadata or {}, "metadata"),
            "values": _as_json(values, "values"),
        }
        text = documents.seal(_KIND, body)
        if self._folder is None:
            self._checkpoints[checkpoint_id] = text
        else:
            folder = files.make_folder_inside(self._folder, "checkpoints")
            files.write_atomically(folder / f"{checkpoint_id}.json", text)
        return {
            "checkpoint_id": checkpoint_id,
            "timestamp": created_at,
            "state_snapshot": values,
            "metadata": copy.deepcopy(metadata or {}),
        }

    def restore(self, checkpoint_id: str) -> bool:
        """Set all values back to a checkpoint; False if there is none of that id."""
        files.check_identifier(checkpoint_id, "checkpoint id")
        text = self._read_checkpoint(checkpoint_id)
        if text is None:
            return False
        name = f"checkpoint {checkpoint_id}"
        values = _checkpoint_values(documents.unseal(text, _KIND, name).get("values"), name)
        changes: dict[tuple[str, str], codec.Encoded | None] = {
            (document.namespace, document.key): None
            for document in self._store.documents()
            if document.namespace not in _READ_ONLY
        }
        for namespace, items in values.items():
            for key, value in items.items():
                changes[namespace, key] = codec.encode(value, f"{namespace}/{key}")
        self._store.set_documents(changes)
        return True

    def _read_checkpoint(self, checkpoint_id: str) -> bytes | None:
        if self._folder is None:
            return self._checkpoints.get(checkpoint_id)
        try:
            return files.read_whole(self._folder / "checkpoints" / f"{checkpoint_id}.json")
        except FileNotFoundError:
            return None

    def list_checkpoints(self) -> list[str]:
        """Return the ids of the checkpoints there are."""
        if self._folder is None:
            return sorted(self._checkpoints)
        found = (self._folder / "checkpoints").glob("[A-Za-z0-9]*.json")
        return sorted(path.stem for path in found if path.is_file())

    def shutdown(self) -> None:
        """Close the folder; the next ``StateManager`` on it is a new one."""
        if self._is_shut:
            return  # or the store would be closed for another user of it
        self._is_shut = True
        managers = _managers()
        with managers.mutex:
            for folder in [at for at, known in managers.by_folder.items() if known is self]:
                del managers.by_folder[folder]
            if managers.first is self:
                managers.first = None
        self._detach()
        close_store(self._store)

    # --- inside ---

    def _check_name(self, key: str, namespace: str) -> None:
        if namespace in _READ_ONLY:
            raise ConfigurationError(
                f"namespace {namespace!r} shows what is in the journal and cannot be set here;"
                f" use {_READ_ONLY[namespace]}"
            )
        check_text("key", key)
        check_text("namespace", namespace)
        if namespace.startswith(_INTERNAL):
            raise ConfigurationError(
                f"namespace {namespace!r} cannot be set: those with {_INTERNAL!r} are the journal's own"
            )


def get_state_manager(**options: Any) -> StateManager:
    """Return ``StateManager(**options)``."""
    return StateManager(**options)


def check_text(what: str, value: object) -> str:
    """Return a text with a form in UTF-8; raise for anything else, and for an empty one."""
    with suppress(UnicodeEncodeError):
        if isinstance(value, str) and value.encode():
            return value
    raise ConfigurationError(
        f"a {what} is a text that is not empty and has no half characters, not {value!r}"
    )


def _as_json(values: object, path: str) -> codec.Json:
    written = codec.encode(values, path, depth=codec.WHOLE_DEPTH).data
    return codec.parse(written, path, depth=codec.DOCUMENT_DEPTH)


def _checkpoint_values(written: codec.Json, name: str) -> dict[str, dict[str, object]]:
    """Return the values of a checkpoint by namespace and key, or raise our error."""
    values = codec.decode_tree(written, "values", depth=codec.WHOLE_DEPTH)
    if type(values) is not dict or not all(type(items) is dict for items in values.values()):
        raise DocumentCorruptError(name, "it holds no values")
    try:
        for namespace, items in values.items():
            check_text("namespace", namespace)
            for key in items:
                check_text("key", key)
    except ConfigurationError as error:
        raise DocumentCorruptError(name, str(error)) from error
    return values


_silent: ContextVar[bool] = ContextVar("maestro_hive_silent", default=False)
#: Whether what is deleted here is deleted by ``clear``.
_clearing: ContextVar[bool] = ContextVar("maestro_hive_clearing", default=False)


@contextmanager
def _silenced(*, silent: bool) -> Iterator[None]:
    """Call no subscriber for changes made in this block, if ``silent``."""
    token = _silent.set(silent or _silent.get())
    try:
        yield
    finally:
        _silent.reset(token)
