"""Values of classes that only the program which stored them knows."""

from __future__ import annotations

from maestro_hive.kernel.errors import DecodeError


def is_of_unknown_class(error: BaseException) -> bool:
    """Tell whether something could not be read only because nobody imported its class here.

    It is whole all the same: its digest was checked, and its own program can read it.
    """
    at: BaseException | None = error
    for _ in range(10):  # a chain of causes is short
        if isinstance(at, DecodeError):
            return "is not imported" in at.reason
        if at is None:
            break
        at = at.__cause__
    return False
