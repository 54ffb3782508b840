"""Places of the calls of a workflow, and recorded outcomes that changed code has not claimed.

An identity is ``branch|content|number``: the path of the task, name and input of the call, and its
number among the equal calls of that branch. The order of outcomes does not depend on it (the log
has that): it is for changed code, where a call claims its outcome as long as its content is equal.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

#: The first character of identities that are no place of a workflow: of steps in a body, of keys,
#: and of keys whose call was cancelled before.
NESTED, KEYED, KEYED_AGAIN = "@", "=", "+"
#: The first character of the content of questions.
_QUESTION = "?"


def nested_identity(outer: str, content: str, number: int) -> str:
    """Return the identity of a step that is called in the body of another."""
    return f"{NESTED}{outer}|{content}|{number}"


def keyed_identity(key: str, number: int = 0) -> str:
    """Return the identity of a step with a key, which was cancelled so often before.

    Equal keys of one run share an outcome; a call after a cancelled one is a new call.
    """
    return f"{KEYED_AGAIN}{number}{KEYED}{key}" if number else f"{KEYED}{key}"


def is_keyed(identity: str) -> bool:
    """Return whether calls share the outcome."""
    return identity[:1] in (KEYED, KEYED_AGAIN)


def question_content(name: str, kind: str, digest: str) -> str:
    """Return the content of a question: its name, the type of its answer, and its subject."""
    return f"{_QUESTION}{name}:{kind}:{digest}"


def content_of(identity: str) -> str:
    """Return the content of a call: equal wherever the call stands."""
    return identity.partition("|")[2].rpartition("|")[0]


def name_of(identity: str) -> str:
    """Return the name of a call, for people."""
    if is_keyed(identity):
        return identity.partition(KEYED)[2]
    return content_of(identity).removeprefix(_QUESTION).partition(":")[0].rpartition("/")[2]


class Unclaimed:
    """Recorded outcomes that no call has claimed when a run has caught up with its log.

    There are none unless the code was changed: then equal calls at other places take them, and the
    difference is reported.
    """

    def __init__(self, outcomes: Mapping[str, object]) -> None:
        self._outcomes = outcomes
        self._by_content: dict[str, deque[str]] = {}
        #: Names of the new calls that were made before the last recorded one.
        self.new: list[str] = []
        self._maybe_new: list[str] = []
        for identity in outcomes:  # in the order of the log
            if identity[0] != NESTED and not is_keyed(identity):
                self._by_content.setdefault(content_of(identity), deque()).append(identity)

    def __bool__(self) -> bool:
        return bool(self._by_content)

    def __iter__(self) -> Iterator[str]:
        """Yield the identities that are still unclaimed."""
        for places in self._by_content.values():
            yield from (each for each in places if each in self._outcomes)

    def take(self, identity: str, earlier: Iterable[str] = ()) -> str | None:
        """Return the place of the oldest equal call, if there is one; questions do not move.

        ``earlier`` are contents by which the same call was recorded before its code was changed.
        """
        content = content_of(identity)
        if is_keyed(identity) or content[:1] == _QUESTION:
            return None
        for each in (content, *earlier):
            places = self._by_content.get(each, deque())
            while places:
                origin = places.popleft()
                if origin in self._outcomes:  # or the call at that place has claimed it meanwhile
                    return origin
        return None

    def met(self, identity: str, *, is_recorded: bool) -> None:
        """Take up a call in order, for the report."""
        if is_recorded:
            self.new += self._maybe_new
            self._maybe_new.clear()
        elif any(True for _ in self):
            self._maybe_new.append(name_of(identity))

    @property
    def missing(self) -> list[str]:
        """Return the names of the recorded calls that were not made again."""
        return [name_of(identity) for identity in self]
