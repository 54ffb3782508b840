"""Looks for letters to the runs that an event loop executes."""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING

from maestro_hive.hive.inbox import Inbox
from maestro_hive.hive.waits import deliver
from maestro_hive.kernel.errors import MaestroError, StoreBusyError

if TYPE_CHECKING:
    from maestro_hive.hive.active_run import ActiveRun
    from maestro_hive.hive.inbox import Messages
    from maestro_hive.maestro.state.store import Store

#: How long a letter from another process may lie. One from this process is seen at once.
_LOOK_EVERY = 0.2

_watchers: weakref.WeakSet[InboxWatcher] = weakref.WeakSet()


class InboxWatcher:
    """The runs of one loop on one store, and what looks after their letters."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.mail = Inbox(store)
        self.runs: dict[str, ActiveRun] = {}
        self._loop = asyncio.get_running_loop()
        self._look_now = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        _watchers.add(self)

    def add(self, run: ActiveRun) -> None:
        """Look after a run's letters from now on."""
        self.runs[run.run_id] = run
        run.check_inbox = self.check_soon
        self._look_now.set()
        if self._task is None or self._task.done():
            self._task = self._loop.create_task(self._look())

    def remove(self, run: ActiveRun) -> None:
        """Look after it no more."""
        self.runs.pop(run.run_id, None)
        if not self.runs and self._task is not None:
            self._task.cancel()
            self._task = None

    def check_soon(self) -> None:
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

    async def _letters(self, run_id: str) -> Messages:
        if self.store.syncs_fast():
            return self.mail.messages(run_id)
        return await asyncio.to_thread(self.mail.messages, run_id)

    async def _hand_over(self, run: ActiveRun, messages: Messages) -> None:
        if messages.cancel is not None:
            run.cancel(messages.cancel)
        elif messages.answers:
            await deliver(run, self.mail, messages.answers)


def check_soon(store: Store) -> None:
    """Let all who look after runs on this store, in this process, look at once."""
    for watch in list(_watchers):
        if watch.store is store:
            watch.check_soon()
