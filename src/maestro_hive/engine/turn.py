"""One at a time: who executes a step of a run, and who waits for that."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from maestro_hive.kernel.errors import ConfigurationError

if TYPE_CHECKING:
    from maestro_hive.engine.open_run import OpenRun

#: The steps that this task is inside of.
_inside: ContextVar[frozenset[tuple[str, bytes]]] = ContextVar("steps_inside", default=frozenset())


class Turn:
    """The right to execute one step of a run; others in this process wait for it."""

    __slots__ = ("_identity", "_name", "_run", "_token")

    def __init__(self, run: OpenRun, identity: bytes, name: str) -> None:
        self._run = run
        self._identity = identity
        self._name = name
        self._token: Any = None

    def take(self) -> bool:
        """Take the turn; False if another task has it: then ``wait`` for that."""
        run, identity = self._run, self._identity
        if not run.enter(identity):
            return False
        self._token = _inside.set(_inside.get() | {(run.run_id, identity)})
        return True

    async def wait(self) -> None:
        """Return after another task's turn: it may have completed the step."""
        run, identity = self._run, self._identity
        if (run.run_id, identity) in _inside.get():
            raise ConfigurationError(
                f"{self._name!r} executes itself, with the same input, and would wait for ever"
            )
        waiter = run.wait_for(identity)
        if waiter is not None:
            await asyncio.shield(asyncio.wrap_future(waiter))

    def give_back(self) -> None:
        """Let the next one have it."""
        try:  # noqa: SIM105 - on the path of every step
            _inside.reset(self._token)
        except ValueError:  # closed by another context
            pass
        self._run.leave(self._identity)
