"""Messages of other processes to the runs of this one: answers and cancel requests, taken once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maestro_hive.hive.answers import read_answer
from maestro_hive.hive.commands import AwaitedRunCommand
from maestro_hive.journal.effects import Take, Watch
from maestro_hive.kernel.errors import CorruptionError, MaestroError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping

    from maestro_hive.hive.driver import Driver
    from maestro_hive.journal.store import Message, Store

POLL_SECONDS = 0.02


class Inbox:
    """Looks for messages while runs are active."""

    def __init__(
        self, store: Store, active: Mapping[str, Driver], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._store, self._active, self._loop = store, active, loop
        self._next: asyncio.Handle | None = None
        self._is_soon = False

    def start(self) -> None:
        """Look from time to time."""
        if self._next is None:
            self._next = self._loop.call_later(POLL_SECONDS, self._check)

    def stop(self) -> None:
        """Look no more."""
        if self._next is not None:
            self._next.cancel()
        self._next, self._is_soon = None, False

    def check_soon(self) -> None:
        """Look at once: a question was asked, or a message was sent from this process."""
        if not self._is_soon:
            self._is_soon = True
            if self._next is not None:
                self._next.cancel()
            self._next = self._loop.call_soon(self._check)

    def _check(self) -> None:
        self._next, self._is_soon = None, False
        if self._active:
            self.start()
            self.check()

    def check(self) -> None:
        """Look now, and give the messages to their runs."""
        try:
            messages = self._store.messages()
        except MaestroError as error:  # or the runs would wait for ever
            for driver in list(self._active.values()):
                driver.suspend(error)
            return
        for driver in self._active.values():
            if driver.is_live and not driver.has_looked:
                driver.has_looked = True
                driver.wake()
        for message in messages:
            found = self._active.get(message.run_id)
            if found is not None and not found.is_stopping:
                _take(found, message)


def _take(driver: Driver, message: Message) -> None:
    """Give a message to its run; one that the run cannot take yet stays."""
    take = Take(message.number)
    match message.kind:
        case "answer":
            try:
                answer = read_answer(message.data)
            except CorruptionError as error:  # of this run alone
                driver.suspend(error)
            else:
                driver.answer(message.target, answer, take)
        case "early":
            pass  # its question takes it
        case "cancel":
            driver.request_cancel(message.target, (take,))
        case "ended":
            _take_end(driver, message.target, take)
        case unknown:
            driver.suspend(MaestroError(f"a message of the unknown kind {unknown!r}"))


def _take_end(driver: Driver, target: str, take: Take) -> None:
    """Record the end of a run that a workflow waits for; drop a message about another."""
    if not driver.is_live:
        return
    waiting = [
        each
        for each in driver.open.values()
        if isinstance(each, AwaitedRunCommand)
        and each.target == target
        and not driver.is_recorded(each.identity)
    ]
    found = [each.ended_entry() for each in waiting]
    ended = [entry for entry in found if entry is not None]
    if len(ended) < len(waiting):  # it was retried meanwhile
        driver.journal.record_soon(effects=(take, Watch(target)))
    elif ended:
        driver.record(*ended, effects=(take,))
    elif driver.is_quiet:
        driver.journal.record_soon(effects=(take,))
