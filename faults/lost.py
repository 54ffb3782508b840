"""The word for a broken promise."""

from __future__ import annotations


class LostError(AssertionError):
    """A promise was broken."""


def require(truth: object, what: str) -> None:
    """Raise ``what`` unless it is so."""
    if not truth:
        raise LostError(what)
