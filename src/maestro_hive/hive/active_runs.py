"""The runs that this process executes: each once, and whoever else asks for one waits for it."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from maestro_hive.hive.errors import RunInactiveError

if TYPE_CHECKING:
    from maestro_hive.hive.runs import Input
    from maestro_hive.maestro.state.store import Store


class UnderWay(NamedTuple):
    """A run, with what its workflow was given, and what its result will be put into."""

    given: Input
    done: Future[Any]
    loop: asyncio.AbstractEventLoop


_mutex = threading.Lock()
_runs: dict[tuple[int, str], UnderWay] = {}


def enter(store: Store, run_id: str, given: Input) -> tuple[UnderWay, bool]:
    """Return a run that is under way, and whether that begins here and now."""
    mine = UnderWay(given, Future(), asyncio.get_running_loop())
    with _mutex:
        place = (id(store), run_id)
        other = _runs.get(place)
        if other is not None and not other.loop.is_closed():
            return other, False
        _runs[place] = mine  # a loop that was closed over its tasks ends nothing any more
        return mine, True


def leave(store: Store, run_id: str, mine: UnderWay, task: asyncio.Task[Any]) -> None:
    """Say how a run ended, to those who waited for it here."""
    with _mutex:
        if _runs.get((id(store), run_id)) is mine:
            del _runs[id(store), run_id]
    if task.cancelled():
        mine.done.set_exception(RunInactiveError(run_id))
    elif (error := task.exception()) is not None:
        mine.done.set_exception(error)
    else:
        mine.done.set_result(task.result())


def here(store: Store, run_id: str) -> UnderWay | None:
    """Return a run that this process executes; None if it does not."""
    with _mutex:
        found = _runs.get((id(store), run_id))
    return None if found is None or found.loop.is_closed() else found


def _forget_in_child() -> None:
    global _mutex  # noqa: PLW0603 - a thread that is not in the child may have held it
    _mutex = threading.Lock()
    _runs.clear()


os.register_at_fork(after_in_child=_forget_in_child)
