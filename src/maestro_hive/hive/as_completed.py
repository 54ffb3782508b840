"""The order of the tasks that ``asyncio.as_completed`` makes of coroutines.

It makes a set of them first, whose order is that of their addresses, so that a resumed workflow would
number the same tasks in another way.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import sys
from typing import TYPE_CHECKING, Any

from maestro_hive.kernel.errors import MaestroError
from maestro_hive.maestro.state import codec

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from types import FrameType

    from maestro_hive.hive.branches import Branch

    Work = Coroutine[Any, Any, Any]

#: How much of a digest tells coroutines apart.
_CONTENT_BYTES = 12
#: Where ``as_completed`` makes its tasks, and the name of what it was given there.
_iterator: Any = getattr(asyncio.tasks, "_AsCompletedIterator", None)  # of Python 3.13
_maker: Any = asyncio.as_completed if _iterator is None else _iterator.__init__
_AS_COMPLETED = _maker.__code__
_GIVEN = "aws" if "aws" in _AS_COMPLETED.co_varnames else "fs"
_COROUTINE = inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Given:
    """The coroutines of a list that ``as_completed`` was given; it makes a set of them.

    The order of that set is that of their addresses. Their tasks are made in the order of the list
    instead: for ``as_completed`` it is all the same which of them it gets when.
    """

    def __init__(self, given: list[Any] | tuple[Any, ...]) -> None:
        self.given = given
        self._all = dict.fromkeys(each for each in given if asyncio.iscoroutine(each))
        self._left = list(reversed(self._all))

    def instead_of(self, work: Work) -> Work | None:
        """Return the coroutine whose task is to be made instead of this one; None if not known."""
        return self._left.pop() if work in self._all and self._left else None

    def is_over(self) -> bool:
        """Return whether all tasks were made."""
        return not self._left


def ordered(parent: Branch, work: Work) -> tuple[Work, Branch]:
    """Return the coroutine whose task is to be made, and its branch."""
    given = _given_to_as_completed()
    if given is None:
        return work, parent.new()
    if isinstance(given, list | tuple):
        if parent.given is None or parent.given.given is not given:
            parent.given = Given(given)
        found = parent.given.instead_of(work)
        if parent.given.is_over():
            parent.given = None
        if found is not None:
            return found, parent.new()
    # A set, or what is left of a generator: by what is called there.
    content = _content_of(work)
    return work, parent.new(f"={content.hex()}.{parent.number_of(content)}")


def _given_to_as_completed() -> object:
    """Return what ``as_completed`` was given, if it is what makes a task here."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the only way
    while frame is not None and not frame.f_code.co_flags & _COROUTINE:
        if frame.f_code is _AS_COMPLETED:
            return frame.f_locals[_GIVEN]
        frame = frame.f_back
    return None


def _content_of(work: Work) -> bytes:
    """Return a digest of the function that a coroutine is of, and of its arguments."""
    found = hashlib.sha256(str(getattr(work, "__qualname__", "")).encode())
    frame: FrameType | None = getattr(work, "cr_frame", None)
    if frame is not None:
        arguments = inspect.getargvalues(frame)
        names = [*arguments.args, arguments.varargs, arguments.keywords]
        for name in names:
            if name is not None:
                found.update(_digest_of(arguments.locals.get(name)))
    return found.digest()[:_CONTENT_BYTES]


def _digest_of(value: object) -> bytes:
    """Return a digest of an argument; of one that cannot be encoded, of its class and name."""
    try:
        return codec.encode(value, "argument").sha256
    except (MaestroError, TypeError, ValueError):
        name = getattr(value, "name", None)
        text = f"{type(value).__qualname__} {name if isinstance(name, str) else ''}"
        return hashlib.sha256(text.encode()).digest()
