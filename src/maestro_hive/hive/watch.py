"""Looks for letters to the runs that an event loop executes."""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING

from maestro_hive.hive.mail import Mail
from maestro_hive.hive.waiting import deliver
from maestro_hive.kernel.errors import MaestroError, StoreBusyError

if TYPE_CHECKING:
    from maestro_hive.hive.live_run import LiveRun
    from maestro_hive.hive.mail import Letters
    from maestro_hive.maestro.state.store import Store

#: How long a letter from another process may lie. One from this process is seen at once.
_LOOK_EVERY = 0.2

_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


class Watch:
    """The runs of one loop on one store, and what looks after their letters."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.mail = Mail(store)
        self.runs: dict[str, LiveRun] = {}
        self._loop = asyncio.get_running_loop()
        self._look_now = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        _watches.add(self)

    def add(self, run: LiveRun) -> None:
        """Look after a run's letters from now on."""
        self.runs[run.run_id] = run
        run.look_for_letters = self.look_soon
        self._look_now.set()
        if self._task is None or self._task.done():
            self._task = self._loop.create_task(self._look())

    def remove(self, run: LiveRun) -> None:
        """Look after it no more."""
        self.runs.pop(run.run_id, None)
        if not self.runs and self._task is not None:
            self._task.cancel()
            self._task = None

    def look_soon(self) -> None:
        """Look at once; from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._look_now.set)

    async def _look(self) -> None:
        while True:
            self._look_now.clear()
            for run in list(self.runs.values()):
                try:
                    await self._hand_over(run, await self._letters(run.run_id))
                except StoreBusyError:
                    continue  # there is another look
                except MaestroError as error:
                    # Nobody waits for an answer that cannot be read, or not be written down.
                    run.tell_all(error)
            try:
                async with asyncio.timeout(_LOOK_EVERY):
                    await self._look_now.wait()
            except TimeoutError:
                continue

    async def _letters(self, run_id: str) -> Letters:
        if self.store.quick():
            return self.mail.letters(run_id)
        return await asyncio.to_thread(self.mail.letters, run_id)

    async def _hand_over(self, run: LiveRun, letters: Letters) -> None:
        if letters.cancel is not None:
            run.cancel(letters.cancel)
        elif letters.answers:
            await deliver(run, self.mail, letters.answers)


def look_soon(store: Store) -> None:
    """Let all who look after runs on this store, in this process, look at once."""
    for watch in list(_watches):
        if watch.store is store:
            watch.look_soon()
