"""Who may answer: which accounts of a ticket system the configuration allows."""

from __future__ import annotations

EVERYONE = "*"


def is_allowed(answerers: tuple[str, ...], names: frozenset[str]) -> bool:
    """Return whether one of an account's names is among those that may answer.

    Where nobody is named, nobody may answer: on many trackers anyone can comment, and an answer is
    given to an agent.
    """
    known = {each.casefold() for each in answerers}
    return EVERYONE in known or not known.isdisjoint(each.casefold() for each in names)
