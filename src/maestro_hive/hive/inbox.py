"""Messages to runs: answers to their questions, and requests to cancel them.

Only the process that has a run's lease may write to it. Everybody else posts a message to the run's
inbox, a document, which is durable when it is posted; the process that executes the run, now or
later, records what a message says, and only then removes it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from maestro_hive.engine.shared import all_shared, shared
from maestro_hive.engine.values import in_thread
from maestro_hive.kernel.errors import (
    CodecError,
    ConfigurationError,
    DocumentCorruptError,
    MaestroError,
    StoreBusyError,
)
from maestro_hive.maestro.state import codec

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from maestro_hive.hive.active_run import ActiveRun
    from maestro_hive.maestro.state.codec import Encoded, Json
    from maestro_hive.maestro.state.store import Store

    Deliver = Callable[[ActiveRun, "Inbox", list["Answer"]], Awaitable[None]]

#: With a dollar: ``StateManager`` does not show it, and does not clear it.
NAMESPACE = "$inbox"
#: How long a message from another process may wait. One from this process is read at once.
_CHECK_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer that waits to be recorded; ``value`` is plain JSON with tags.

    ``as_text``: it was typed before it was known what type is asked for. An answer to a question is
    for that question alone; one that came early is for the first of its name.
    """

    name: str
    value: Json
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    by: str | None = None
    as_text: bool = False
    #: Which question it answers, as hexadecimal; None if that was not asked yet.
    question: str | None = None


_MEMBERS = [each.name for each in dataclasses.fields(Answer)]


@dataclass(slots=True)
class Messages:
    """What waits for one run: answers in the order they came, and the reason for a cancellation."""

    answers: list[Answer] = field(default_factory=list)
    cancel: str | None = None

    @classmethod
    def decode(cls, data: bytes | None) -> Messages:
        """Return what a document says."""
        try:
            found = codec.parse(data, NAMESPACE, depth=codec.DOCUMENT_DEPTH) if data else {}
            answers = [
                Answer(**{name: each[name] for name in _MEMBERS if name in each})
                for each in found.get("answers", [])
            ]
            return cls(answers, found.get("cancel"))
        except (CodecError, AttributeError, KeyError, TypeError) as error:
            raise DocumentCorruptError(NAMESPACE, f"it holds no messages ({error})") from error

    def encode(self) -> Encoded | None:
        """Return the document; None if there is none to write."""
        if not self.answers and self.cancel is None:
            return None
        answers = [dataclasses.asdict(each) for each in self.answers]
        data = codec.dump({"answers": answers, "cancel": self.cancel})
        return codec.encoded(data)


class Inbox:
    """The messages to all runs of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def answer(self, run_id: str, answer: Answer) -> None:
        """Post an answer; raise if its question has one already."""

        def add(messages: Messages) -> None:
            same = [each for each in messages.answers if each.question == answer.question]
            if same and answer.question is not None:
                raise ConfigurationError(
                    f"run {run_id!r} has its answer to {answer.name!r} already, and takes it when"
                    " it is resumed"
                )
            messages.answers.append(answer)

        self._change(run_id, add)
        check_soon(self._store)

    def cancel(self, run_id: str, reason: str) -> None:
        """Request that a run be cancelled."""

        def request(messages: Messages) -> None:
            messages.cancel = reason

        self._change(run_id, request)
        check_soon(self._store)

    def messages(self, run_id: str) -> Messages:
        """Return what waits for one run."""
        found = self._store.document(NAMESPACE, run_id)
        return Messages.decode(found.value if found else None)

    def waiting(self) -> dict[str, bytes]:
        """Return the messages of every run that has any, not yet decoded."""
        return {each.key: each.value for each in self._store.documents(NAMESPACE)}

    def remove(self, run_id: str, answer_id: str) -> None:
        """Remove an answer that was recorded."""

        def drop(messages: Messages) -> None:
            messages.answers = [each for each in messages.answers if each.id != answer_id]

        self._change(run_id, drop)

    def clear(self, run_id: str, status: str) -> None:
        """Remove what a run that ended with this status needs no more.

        One that did not succeed may be retried, and then it takes the answers it was given.
        """
        if self._store.document(NAMESPACE, run_id) is None:
            return

        def drop(messages: Messages) -> None:
            messages.cancel = None
            if status == "success":
                messages.answers.clear()

        self._change(run_id, drop)

    def _change(self, run_id: str, change: Callable[[Messages], Any]) -> None:
        def changed(data: bytes | None) -> Encoded | None:
            messages = Messages.decode(data)
            change(messages)
            return messages.encode()

        self._store.update_document(NAMESPACE, run_id, changed)


# --- reading them --------------------------------------------------------------------------------


class InboxWatcher:
    """Reads the messages to the runs that one event loop executes."""

    def __init__(self, store: Store, deliver: Deliver) -> None:
        self.store = store
        self.inbox = Inbox(store)
        self.runs: dict[str, ActiveRun] = {}
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._check_now = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, run: ActiveRun) -> None:
        """Watch a run's messages from now on."""
        self.runs[run.run_id] = run
        run.check_inbox = self.check_soon
        if self._task is None or self._task.done():
            self._task = self._loop.create_task(self._watch())

    def remove(self, run: ActiveRun) -> None:
        """Watch it no more."""
        self.runs.pop(run.run_id, None)
        if not self.runs and self._task is not None:
            self._task.cancel()
            self._task = None

    def check_soon(self) -> None:
        """Read at once; from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._check_now.set)

    async def _watch(self) -> None:
        while True:
            try:
                async with asyncio.timeout(_CHECK_SECONDS):
                    await self._check_now.wait()
            except TimeoutError:
                pass
            self._check_now.clear()
            try:
                waiting = await self._waiting()
            except StoreBusyError:
                continue  # there is another check
            except MaestroError as error:
                for run in list(self.runs.values()):
                    run.notify_all(error)
                continue
            for run_id, data in waiting.items():
                run = self.runs.get(run_id)  # type: ignore[assignment]
                if run is not None:
                    await self._handle(run, data)

    async def _waiting(self) -> dict[str, bytes]:
        if self.store.syncs_fast():
            return self.inbox.waiting()
        return await in_thread(self.inbox.waiting)

    async def _handle(self, run: ActiveRun, data: bytes) -> None:
        try:
            messages = Messages.decode(data)
            if messages.cancel is not None:
                run.cancel(messages.cancel)
            elif messages.answers:
                await self._deliver(run, self.inbox, messages.answers)
        except StoreBusyError:
            return  # there is another check
        except MaestroError as error:
            # No task waits for an answer that cannot be read, or not be recorded.
            run.notify_all(error)


def watcher_for(store: Store, deliver: Deliver) -> InboxWatcher:
    """Return the watcher of the running loop."""
    loop = asyncio.get_running_loop()
    return shared(
        store, InboxWatcher, f"loop {id(loop):x}", lambda store, _: InboxWatcher(store, deliver)
    )


def check_soon(store: Store) -> None:
    """Have all watchers of this store, in this process, read at once."""
    for watcher in all_shared(store, InboxWatcher):
        watcher.check_soon()
