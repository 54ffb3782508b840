"""What others want of a run: answers to its questions, and that it be cancelled.

Only the process that holds a run may write to it. Everybody else leaves a letter here, in a
document per run, which is durable when it is posted; whoever executes the run, now or later, takes
the letters from it, records what they say, and only then throws them away.
"""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from maestro_hive.kernel.errors import CodecError, ConfigurationError, DocumentCorruptError
from maestro_hive.maestro.state import codec

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.maestro.state.codec import Encoded, Json
    from maestro_hive.maestro.state.store import Store

#: With a dollar: ``StateManager`` does not show it, and does not clear it.
NAMESPACE = "$mail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer that waits to be taken; ``value`` is plain JSON with tags.

    Where somebody typed it before it was known what kind is asked for, it is ``words``.
    An answer to a question is for that question alone; one that came early is for the first of its
    name.
    """

    name: str
    value: Json
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    by: str | None = None
    words: bool = False
    #: Which question it answers, as hexadecimal; None if that was not asked yet.
    question: str | None = None


_MEMBERS = [each.name for each in dataclasses.fields(Answer)]


@dataclass(slots=True)
class Messages:
    """All that waits for one run: answers in the order they came, and why it shall be cancelled."""

    answers: list[Answer] = field(default_factory=list)
    cancel: str | None = None

    @classmethod
    def read(cls, data: bytes | None) -> Messages:
        """Return what a document says."""
        try:
            found = codec.parse(data, NAMESPACE, depth=codec.DOCUMENT_DEPTH) if data else {}
            answers = [
                Answer(**{name: each[name] for name in _MEMBERS if name in each})
                for each in found.get("answers", [])
            ]
            return cls(answers, found.get("cancel"))
        except (CodecError, AttributeError, KeyError, TypeError) as error:
            raise DocumentCorruptError(NAMESPACE, f"it holds no letters ({error})") from error

    def write(self) -> Encoded | None:
        """Return the document; None if there is nothing to say."""
        if not self.answers and self.cancel is None:
            return None
        answers = [dataclasses.asdict(each) for each in self.answers]
        data = codec.dump({"answers": answers, "cancel": self.cancel})
        return codec.encoded(data)


class Inbox:
    """The letters to all runs of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def answer(self, run_id: str, answer: Answer) -> None:
        """Leave an answer; raise if its question has one already."""

        def add(messages: Messages) -> None:
            same = [each for each in messages.answers if each.question == answer.question]
            if same and answer.question is not None:
                raise ConfigurationError(
                    f"run {run_id!r} has its answer to {answer.name!r} already, and takes it when"
                    " it goes on"
                )
            messages.answers.append(answer)

        self._change(run_id, add)

    def cancel(self, run_id: str, reason: str) -> None:
        """Ask for a run to be cancelled."""

        def ask(messages: Messages) -> None:
            messages.cancel = reason

        self._change(run_id, ask)

    def messages(self, run_id: str) -> Messages:
        """Return what waits for one run."""
        found = self._store.document(NAMESPACE, run_id)
        return Messages.read(found.value if found else None)

    def taken(self, run_id: str, answer_id: str) -> None:
        """Throw away an answer that was recorded."""

        def drop(messages: Messages) -> None:
            messages.answers = [each for each in messages.answers if each.id != answer_id]

        self._change(run_id, drop)

    def settle(self, run_id: str, status: str) -> None:
        """Throw away what a run that is over needs no more.

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
            messages = Messages.read(data)
            change(messages)
            return messages.write()

        self._store.update_document(NAMESPACE, run_id, changed)
