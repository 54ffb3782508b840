"""Values that belong to one process: made when first used, and made again in a forked child.

A child of ``fork`` inherits every object of its parent, with locks that a thread of the parent may
hold and with the right to files that are the parent's. So whatever is shared by the whole process
is declared here, and the child starts without it.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

ValueT = TypeVar("ValueT")


class PerProcess(Generic[ValueT]):
    """One value for the whole process; a forked child makes its own.

    ``inherited`` is called in the child with the parent's value, if it had one: to remember what
    must not be touched there.
    """

    __slots__ = ("__weakref__", "_inherited", "_lock", "_make", "_value")

    def __init__(
        self, make: Callable[[], ValueT], inherited: Callable[[ValueT], None] | None = None
    ) -> None:
        self._make = make
        self._inherited = inherited
        self._value: ValueT | None = None
        self._lock = threading.Lock()
        _all.add(self)

    def __call__(self) -> ValueT:
        """Return the value of this process."""
        value = self._value
        if value is None:
            with self._lock:
                value = self._value
                if value is None:
                    value = self._value = self._make()
        return value

    def reset(self) -> None:
        """Forget the value: the next caller makes another one."""
        self._lock = threading.Lock()
        value, self._value = self._value, None
        if value is not None and self._inherited is not None:
            self._inherited(value)


_all: weakref.WeakSet[PerProcess[Any]] = weakref.WeakSet()


def _reset_in_child() -> None:
    for each in list(_all):
        each.reset()


os.register_at_fork(after_in_child=_reset_in_child)


# --- the end of the process ------------------------------------------------------------------------

_exit_functions: list[tuple[int, Callable[[], None]]] = []


def run_at_exit(order: int, function: Callable[[], None]) -> None:
    """Have ``function`` called when the process exits; those of a lower order come first.

    Executions close their runs (0), then copies are written (1), then stores are closed (2),
    whichever module was imported first.
    """
    _exit_functions.append((order, function))


@atexit.register
def _run_exit_functions() -> None:
    for _, function in sorted(_exit_functions, key=lambda each: each[0]):
        function()
