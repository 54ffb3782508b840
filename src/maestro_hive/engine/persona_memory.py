"""What a persona remembers, as its tasks see it: a dictionary, and a list that only grows."""

from __future__ import annotations

import copy
from collections.abc import Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from maestro_hive.kernel.errors import EncodeError
from maestro_hive.maestro.state import codec

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

#: Nothing can be changed inside of these.
_WHOLE = (str, int, float, bool, bytes, type(None))


class Memory(MutableMapping[str, Any]):
    """A dictionary that is saved whenever a key changes, and once more when the attempt ends.

    What changes inside a value is noticed at the end, or at the next change of a key. Steps of one
    persona that are executed at the same time change its memory key by key: neither undoes what
    the other did, and sees it at its own next change.
    """

    def __init__(
        self,
        values: dict[str, Any],
        change: Callable[[dict[str, Any], set[str]], dict[str, Any]],
        lock: AbstractContextManager[object],
    ) -> None:
        #: As it is saved. Others have the same objects, so they are never changed.
        self._saved = values
        self._change = change
        self._lock = lock
        #: What the task has in hand and may change inside: the value, and how it was when saved.
        self._in_hand: dict[str, tuple[Any, object]] = {}

    def __getitem__(self, key: str) -> Any:
        value = self._saved[key]
        if type(value) in _WHOLE:
            return value
        with self._lock:
            if key not in self._in_hand:
                own = copy.deepcopy(self._saved[key])
                self._in_hand[key] = (own, _look_of(own))
            return self._in_hand[key][0]

    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(key, str):
            raise TypeError(f"a persona's memory has names as keys, not {key!r}")
        self._apply({key: value}, set())

    def __delitem__(self, key: str) -> None:
        if key not in self._saved:
            raise KeyError(key)
        self._apply({}, {key})

    def __iter__(self) -> Iterator[str]:
        return iter(self._saved)

    def __len__(self) -> int:
        return len(self._saved)

    def __repr__(self) -> str:
        return repr({**self._saved, **{key: own for key, (own, _) in self._in_hand.items()}})

    def save_if_changed(self) -> None:
        """Save what was changed inside the values."""
        if self._changed_inside():
            self._apply({}, set())

    def _changed_inside(self) -> dict[str, Any]:
        with self._lock:
            in_hand = list(self._in_hand.items())
        return {key: value for key, (value, look) in in_hand if _look_of(value) != look}

    def _apply(self, changed: dict[str, Any], gone: set[str]) -> None:
        """Save changes, and what was changed inside other values; an error changes nothing."""
        with self._lock:
            inside = {key: each for key, each in self._changed_inside().items() if key not in gone}
            changed = {**inside, **changed}
            before, self._saved = self._saved, self._change(changed, gone)
            for key in [key for key in self._in_hand if key not in changed]:
                if key not in self._saved or self._saved[key] is not before.get(key):
                    del self._in_hand[key]  # another step changed it, or it is gone
            for key, value in changed.items():
                if type(value) in _WHOLE:
                    self._in_hand.pop(key, None)
                else:  # an object that the task has in hand stays the one that is looked at
                    self._in_hand[key] = (value, _look_of(value))


def _look_of(value: object) -> object:
    """Return what differs when a value does: its bytes in the journal, where 1 is not True."""
    try:
        return codec.encode(value).sha256
    except EncodeError:  # in memory, anything can be remembered
        try:
            return copy.deepcopy(value)
        except Exception:  # noqa: BLE001 - an object of the user's making
            return object()


class History(Sequence[Any]):
    """A list that only grows; what ``append`` returned from is saved.

    It is read when somebody looks at it, and not before: adding to a long one costs no more.
    """

    def __init__(
        self,
        load: Callable[[], list[Any]],
        add: Callable[[Any], None],
        lock: AbstractContextManager[object],
    ) -> None:
        self._load = load
        self._add = add
        self._lock = lock
        self._loaded: list[Any] | None = None

    def append(self, item: Any) -> None:
        """Add an item at the end."""
        with self._lock:
            self._add(item)
            if self._loaded is not None:
                self._loaded.append(copy.deepcopy(item))

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return copy.deepcopy(self._items()[index])

    def __len__(self) -> int:
        return len(self._items())

    def __repr__(self) -> str:
        return repr(self._items())

    def _items(self) -> list[Any]:
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded
