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
    """

    id: str
    name: str
    value: Json
    by: str | None = None
    words: bool = False


@dataclass(slots=True)
class Letters:
    """All that waits for one run: answers in the order they came, and why it shall be cancelled."""

    answers: list[Answer] = field(default_factory=list)
    cancel: str | None = None

    @classmethod
    def read(cls, data: bytes | None) -> Letters:
        """Return what a document says."""
        found = codec.parse(data, "mail", depth=codec.DOCUMENT_DEPTH) if data else {}
        answers = [
            Answer(
                id=each["id"],
                name=each["name"],
                value=each["value"],
                by=each.get("by"),
                words=each.get("words", False),
            )
            for each in found.get("answers", [])
        ]
        return cls(answers, found.get("cancel"))

    def write(self) -> Encoded | None:
        """Return the document; None if there is nothing to say."""
        if not self.answers and self.cancel is None:
            return None
        answers = [dataclasses.asdict(each) for each in self.answers]
        data = codec.dump_canonical({"answers": answers, "cancel": self.cancel})
        return codec.encoded(data)


class Mail:
    """The letters to all runs of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def answer(
        self, run_id: str, name: str, value: Json, by: str | None = None, *, words: bool = False
    ) -> None:
        """Leave an answer; the n-th one is for the run's n-th question of that name."""
        new = Answer(id=secrets.token_hex(8), name=name, value=value, by=by, words=words)
        self._change(run_id, lambda letters: letters.answers.append(new))

    def cancel(self, run_id: str, reason: str) -> None:
        """Ask for a run to be cancelled."""

        def ask(letters: Letters) -> None:
            letters.cancel = reason

        self._change(run_id, ask)

    def letters(self, run_id: str) -> Letters:
        """Return what waits for one run."""
        found = self._store.document(NAMESPACE, run_id)
        return Letters.read(found.value if found else None)

    def all(self) -> dict[str, Letters]:
        """Return what waits, by run."""
        return {each.key: Letters.read(each.value) for each in self._store.documents(NAMESPACE)}

    def taken(self, run_id: str, answer_id: str) -> None:
        """Throw away an answer that was recorded."""

        def drop(letters: Letters) -> None:
            letters.answers = [each for each in letters.answers if each.id != answer_id]

        self._change(run_id, drop)

    def throw_away(self, run_id: str) -> None:
        """Throw away whatever waits for a run: it is over."""
        if self._store.document(NAMESPACE, run_id) is not None:
            self._store.update_document(NAMESPACE, run_id, lambda _: None)

    def throw_away_request(self, run_id: str) -> None:
        """Throw away the request to cancel a run; answers stay."""

        def drop(letters: Letters) -> None:
            letters.cancel = None

        self._change(run_id, drop)

    def _change(self, run_id: str, change: Callable[[Letters], Any]) -> None:
        def changed(data: bytes | None) -> Encoded | None:
            letters = Letters.read(data)
            change(letters)
            return letters.write()

        self._store.update_document(NAMESPACE, run_id, changed)
