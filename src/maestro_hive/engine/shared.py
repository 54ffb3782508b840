"""The registry of a process: what it shares for one store, such as open runs, breakers and limits.

Also what must live on without a reference. A forked child starts with an empty one.
"""

from __future__ import annotations

import _thread
import threading
import weakref
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from maestro_hive.kernel.errors import MaestroError
from maestro_hive.kernel.process import PerProcess

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


def call_for_collected(call: Callable[[], object]) -> None:
    """Make the last call for an object that is being collected; an error of ours is ignored.

    In a thread: the collector may have come here from inside the store, with its locks held.
    """

    def call_quietly() -> None:
        with suppress(MaestroError):  # a store that failed or was closed holds nothing
            call()

    with suppress(RuntimeError):  # the process ends, and what it holds with it
        _thread.start_new_thread(call_quietly, ())
