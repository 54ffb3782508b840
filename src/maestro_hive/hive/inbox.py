"""Messages to runs: answers to their questions, resolutions of ambiguous steps, cancellations.

Only the process that has a run's lease may write to it. Everybody else posts a message to the run's
inbox, a document, which is durable when it is posted. Whether it is taken or refused is decided in the
transaction that posts it, by what is recorded of the run and what waits there already. The process
that executes the run, now or later, records what a message says and removes it in one transaction.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from maestro_hive.engine.shared import all_shared, shared
from maestro_hive.engine.values import in_thread
from maestro_hive.hive.dispatching import root_of, wake_workers
from maestro_hive.kernel.errors import (
    CodecError,
    ConfigurationError,
    DocumentCorruptError,
    MaestroError,
    StoreBusyError,
)
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.store import DocumentChange
from maestro_hive.maestro.state.views import OVER

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from maestro_hive.hive.active_run import ActiveRun
    from maestro_hive.maestro.state.codec import Encoded, Json
    from maestro_hive.maestro.state.store import Store

    Deliver = Callable[[ActiveRun, "Inbox", list["Answer"]], Awaitable[None]]

MessageT = TypeVar("MessageT")

#: With a dollar: ``StateManager`` does not show it, and does not clear it.
NAMESPACE = "$inbox"
#: How long a message from another process may wait. One from this process is read at once.
_CHECK_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer that waits to be recorded; ``value`` is plain JSON with tags.

    An answer to a question is for that question alone. One that came early is for the next of its
    name: asking that question makes it the answer to it. ``as_text``: it was typed before it was
    known what type is asked for.
    """

    name: str
    value: Json
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    by: str | None = None
    as_text: bool = False
    #: Which question it answers, as hexadecimal; None if that was not asked yet.
    question: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """What a person says of an ambiguous step: its result, as it is stored, or to run it again."""

    #: The identity of the step, as hexadecimal, and the attempt that is settled.
    step: str
    attempt: int
    rerun: bool
    value: Json = None
    by: str | None = None


_MEMBERS: dict[type, list[str]] = {
    kind: [each.name for each in dataclasses.fields(kind)] for kind in (Answer, Resolution)
}


@dataclass(slots=True)
class Messages:
    """What waits for one run: answers and resolutions as they came, and the reason to cancel it."""

    answers: list[Answer] = field(default_factory=list)
    cancel: str | None = None
    resolutions: list[Resolution] = field(default_factory=list)

    def to(self, identity: bytes) -> Answer | None:
        """Return the answer to a question."""
        return next((each for each in self.answers if each.question == identity.hex()), None)

    def early(self, name: str) -> Answer | None:
        """Return the answer to the next question of a name."""
        early = (each for each in self.answers if each.question is None and each.name == name)
        return next(early, None)

    def remove(self, answer: Answer) -> None:
        """Remove an answer."""
        self.answers = [each for each in self.answers if each.id != answer.id]

    def drop(self, resolution: Resolution) -> None:
        """Remove a resolution."""
        self.resolutions = [each for each in self.resolutions if each != resolution]

    @classmethod
    def decode(cls, data: bytes | None) -> Messages:
        """Return what a document says."""
        try:
            found = codec.parse(data, NAMESPACE, depth=codec.DOCUMENT_DEPTH) if data else {}
            answers = [_made(Answer, each) for each in found.get("answers", [])]
            resolutions = [_made(Resolution, each) for each in found.get("resolutions", [])]
            return cls(answers, found.get("cancel"), resolutions)
        except (CodecError, AttributeError, KeyError, TypeError) as error:
            raise DocumentCorruptError(NAMESPACE, f"it holds no messages ({error})") from error

    def encode(self) -> Encoded | None:
        """Return the document; None if there is none to write."""
        if not self.answers and not self.resolutions and self.cancel is None:
            return None
        members: dict[str, Json] = {
            "answers": [dataclasses.asdict(each) for each in self.answers],
            "cancel": self.cancel,
        }
        if self.resolutions:
            members["resolutions"] = [dataclasses.asdict(each) for each in self.resolutions]
        return codec.encoded(codec.dump(members))


def _made(kind: type[MessageT], members: Json) -> MessageT:
    """Return a message of its members; those of a newer version are left out."""
    return kind(**{name: members[name] for name in _MEMBERS[kind] if name in members})


class Inbox:
    """The messages to all runs of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def post(self, run_id: str, add: Callable[[Messages], Any]) -> None:
        """Post what ``add`` adds to the messages of a run; or nothing, if it raises.

        It is called in the transaction: what it reads of the run and of its messages holds until the
        message is there. If no process has the run, and it belongs to workers, one of them takes it.
        """
        wake = root_of(self._store, run_id)
        self._store.update_document(*changed_messages(run_id, add, wake))
        check_soon(self._store)

    def cancel(self, run_id: str, reason: str) -> bool:
        """Request that a run be cancelled; False if it has ended."""
        is_over = False

        def request(messages: Messages) -> None:
            nonlocal is_over
            record = self._store.run(run_id)
            is_over = record is not None and record.status in OVER
            if not is_over:
                messages.cancel = reason

        self.post(run_id, request)
        return not is_over

    def messages(self, run_id: str) -> Messages:
        """Return what waits for one run."""
        found = self._store.document(NAMESPACE, run_id)
        return Messages.decode(found.value if found else None)

    def waiting(self) -> dict[str, bytes]:
        """Return the messages of every run that has any, not yet decoded."""
        return {each.key: each.value for each in self._store.documents(NAMESPACE)}

    def remove(self, run_id: str, answer: Answer) -> None:
        """Remove an answer that no question will take."""
        removed = changed_messages(run_id, lambda messages: messages.remove(answer))
        self._store.update_document(*removed)

    def clear(self, run_id: str, status: str) -> None:
        """Remove what a run that ended with this status needs no more.

        One that did not succeed may be retried, and then it takes the answers it was given.
        """
        if self._store.document(NAMESPACE, run_id) is None:
            return

        def drop(messages: Messages) -> None:
            messages.cancel = None
            messages.resolutions.clear()
            if status == "success":
                messages.answers.clear()

        self._store.update_document(*changed_messages(run_id, drop))


def check_text(name: str, value: object) -> None:
    """Raise if that part of a message is no text, or one that cannot be stored."""
    try:
        if isinstance(value, str):
            value.encode()
            return
        wanted = "a text"
    except UnicodeEncodeError:  # half a surrogate pair
        wanted = "a text that UTF-8 can encode"
    raise ConfigurationError(f"{name}={value!a} cannot be stored; it must be {wanted}")


def changed_messages(
    run_id: str, change: Callable[[Messages], Any], wake: str | None = None
) -> DocumentChange:
    """Return a change of a run's messages, for a transaction; it wakes the run ``wake``."""

    def changed(data: bytes | None) -> Encoded | None:
        messages = Messages.decode(data)
        change(messages)
        return messages.encode()

    return DocumentChange(NAMESPACE, run_id, changed, wake)


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
        task = asyncio.current_task()
        assert task is not None
        # Not for ever: cancelled while it records, it may be told that this failed, and not of that.
        while not task.cancelling():
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
            if messages.answers:  # also to what a cancelled workflow asks while it cleans up
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
    """Have all watchers and workers of this store, in this process, read at once."""
    for watcher in all_shared(store, InboxWatcher):
        watcher.check_soon()
    wake_workers(store)
