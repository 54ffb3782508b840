"""The registry of a process: what it shares for one store, such as open runs, breakers and limits.

Also what must live on without a reference. A forked child starts with an empty one.
"""

from __future__ import annotations

import _thread
import sys
import threading
import time
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from maestro_hive.kernel.errors import MaestroError
from maestro_hive.kernel.process import PerProcess, run_at_exit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from maestro_hive.maestro.state.store import Store

SharedT = TypeVar("SharedT")


_Objects = weakref.WeakValueDictionary[tuple[type, str], Any]


class _Registry:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        # Weakly on both sides: an object lives as long as it is used, and refers to its store.
        self.stores: weakref.WeakKeyDictionary[Store, _Objects] = weakref.WeakKeyDictionary()
        self.retained: set[object] = set()


_registry = PerProcess(_Registry)


@contextmanager
def _objects(store: Store) -> Iterator[_Objects]:
    """Lock the registry, and give the objects of one store."""
    registry = _registry()
    with registry.lock:
        found = registry.stores.get(store)
        if found is None:
            found = registry.stores[store] = weakref.WeakValueDictionary()
        yield found


def shared(
    store: Store, kind: type[SharedT], name: str, make: Callable[[Store, str], SharedT]
) -> SharedT:
    """Return this process's object of that kind and name on that store, made if there is none."""
    with _objects(store) as objects:
        found: SharedT | None = objects.get((kind, name))
        if found is None:
            found = objects[kind, name] = make(store, name)
        return found


def find_shared(store: Store, kind: type[SharedT], name: str) -> SharedT | None:
    """Return this process's object of that kind and name, if there is one."""
    with _objects(store) as objects:
        return objects.get((kind, name))


def all_shared(store: Store, kind: type[SharedT]) -> list[SharedT]:
    """Return this process's objects of that kind on that store."""
    with _objects(store) as objects:
        return [each for (what, _), each in list(objects.items()) if what is kind]


def forget_shared(store: Store, kind: type, name: str, known: object) -> None:
    """Let the next caller make another one; nothing happens if ``known`` was replaced already."""
    with _objects(store) as objects:
        if objects.get((kind, name)) is known:
            del objects[kind, name]


# --- objects that live without a reference --------------------------------------------------------


def retain(thing: object) -> None:
    """Let an object live until it is released, or the process ends."""
    _registry().retained.add(thing)


def release(thing: object) -> None:
    """Let an object go; nothing happens if it was not retained in this process."""
    _registry().retained.discard(thing)


def retained(kind: type[SharedT]) -> list[SharedT]:
    """Return the objects of a kind that are retained."""
    return [each for each in list(_registry().retained) if isinstance(each, kind)]


#: For how long the exit of the process waits for them, in seconds.
PATIENCE = 5.0


class _LastCalls:
    """The calls for collected objects that have not returned yet."""

    def __init__(self) -> None:
        #: A lock for each, which is free when its call has returned. The set's operations are
        #: atomic: the collector may come here at any point, so nothing here may wait for a lock.
        self.running: set[_thread.LockType] = set()
        self.refused = False

    def start(self, call: Callable[[], object]) -> None:
        if self.refused:
            return
        returned = _thread.allocate_lock()
        returned.acquire()
        self.running.add(returned)
        try:
            _thread.start_new_thread(self._make, (call, returned))
        except RuntimeError:  # no thread may be started: the process ends, or has too many
            self.running.discard(returned)

    def _make(self, call: Callable[[], object], returned: _thread.LockType) -> None:
        try:
            call()
        except MaestroError:  # a store that failed or was closed holds nothing
            pass
        except Exception:  # noqa: BLE001 - there is no caller to raise it to
            # Here, and not when the thread ends: nothing may be printed once the process ends.
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), None)))
        finally:
            self.running.discard(returned)
            returned.release()

    def end(self) -> None:
        """Make no further call, and wait for those that run."""
        self.refused = True
        until = time.monotonic() + PATIENCE
        for returned in list(self.running):
            returned.acquire(timeout=max(0.0, until - time.monotonic()))


_last_calls = PerProcess(_LastCalls)


def call_for_collected(call: Callable[[], object]) -> None:
    """Make the last call for an object that is being collected; an error of ours is ignored.

    In a thread: the collector may have come here from inside the store, with its locks held. The
    process waits for it at its exit; an object that is collected later is not called for, since
    what the process holds ends with it.
    """
    _last_calls().start(call)


# First: a thread that closes a run while the stores are closed, or that is still there when the
# interpreter ends, could fail or end the process with an error.
run_at_exit(-1, lambda: _last_calls().end())
