"""Values on an event loop: what takes longer than a few milliseconds is encoded in a thread."""

from __future__ import annotations

import asyncio
import copy
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from maestro_hive.kernel.process import threads
from maestro_hive.maestro.state import codec, codec_large
from maestro_hive.maestro.state.codec import IMMUTABLE

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from maestro_hive.engine.plan import Plan
    from maestro_hive.maestro.state.codec import Encoded

ResultT = TypeVar("ResultT")

#: What is longer than this takes too long for an event loop.
_LARGE_BYTES = 256 * 1024


async def in_thread(
    call: Callable[[], ResultT], undo: Callable[[ResultT | None], object] | None = None
) -> ResultT:
    """Return what a call that blocks returns, made in a thread.

    A task that is cancelled does not wait for the thread: ``undo`` is called there with the result
    of the call, or with None if there is none.
    """
    active = threads.run(call)
    try:
        return await asyncio.wrap_future(active)
    except BaseException:
        if undo is not None:
            active.add_done_callback(lambda ended: undo(_result(ended)))
        raise


def _result(ended: Future[ResultT]) -> ResultT | None:
    return None if ended.cancelled() or ended.exception() else ended.result()


async def encode(value: Any, path: str) -> Encoded:
    """Return a value as it will be recorded; raise if it would not come back the same."""
    if codec_large.is_large(value):
        return await in_thread(partial(codec_large.encode_large, value, path))
    return codec.encode(value, path)


async def record(output: Any, reads_back: bool) -> tuple[Encoded, Any, bool]:
    """Return a result as it will be recorded, as it is given on, and whether that is to be read back.

    What others may change meanwhile is copied first, if that takes no time.
    """
    copied = codec.plain_copy(output, codec.FEW_TO_COPY) if reads_back else None
    if copied is None:
        return await encode(output, "result"), output, reads_back
    if copied.cost > codec_large.LARGE:
        made = partial(codec_large.encode_large, copied.value, "result")
        return await in_thread(made), copied.value, False
    return codec.encode_copy(copied, "result"), copied.value, False


def is_large(data: bytes) -> bool:
    """Return whether it takes too long for an event loop to decode a value."""
    return len(data) > _LARGE_BYTES


async def decode(data: bytes, path: str) -> Any:
    """Return the value that was recorded."""
    if is_large(data):
        return await in_thread(partial(codec_large.decode_large, data, path))
    return codec.decode(data, path)


async def plan(made: Callable[..., Plan], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """Return the plan of a call whose arguments may be large; ``made`` takes what encodes them."""
    if codec_large.is_large([list(args), kwargs]):
        return await in_thread(partial(made, encode=codec_large.encode_call_large))
    return made()


class OwnArguments:
    """Copies of a step's arguments, for each attempt: it must not change those of its workflow.

    A completed step is not called again. If it could change what it was given, a workflow would go
    another way after a restart, and a second attempt would not start like the first.
    """

    __slots__ = ("_first", "characters", "encoded", "planned")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the arguments before anybody can change them, if copying them takes no time."""
        copied = codec.plain_copy([list(args), kwargs], codec.FEW_TO_COPY)
        #: Those of the first attempt, if they need not be read back.
        self._first = None if copied is None else (tuple(copied.value[0]), copied.value[1])
        #: How many characters they have, if that is few and they are plain.
        is_small = copied is not None and copied.cost <= codec_large.LARGE
        self.characters = copied.characters if copied is not None and is_small else None
        #: What the step is planned with, and what that was encoded to, if it could be.
        self.planned: tuple[tuple[Any, ...], dict[str, Any]] = self._first or (args, kwargs)
        self.encoded: Encoded | None = None

    async def __call__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments as they would be read back; copies of what has no form in JSON."""
        if self.encoded is None:
            return tuple(map(_copy, args)), {name: _copy(each) for name, each in kwargs.items()}
        first, self._first = self._first, None
        if first is not None:
            return first
        given = await decode(self.encoded.data, "input")
        return tuple(given["args"]), given["kwargs"]


def _copy(value: Any) -> Any:
    """Return a copy of an argument, or what cannot be copied itself."""
    if type(value) in IMMUTABLE:
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - the user's own object, such as a client with a lock in it
        return value
