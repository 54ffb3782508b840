"""Counts calls of this package's functions: a measure of work that no other load changes."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import maestro_hive

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_SOURCE = str(Path(maestro_hive.__file__).parent)


def calls_of(work: Callable[[], Any]) -> int:
    """Return how many functions of the package are called by some work, in all its new threads.

    A coroutine that goes on counts again.
    """
    count = 0
    lock = threading.Lock()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        if event == "call" and frame.f_code.co_filename.startswith(_SOURCE):
            with lock:
                count += 1

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    return count


def calls_for_each(work: Callable[[int], Callable[[], Any]], few: int, many: int) -> float:
    """Return how many calls one more of something costs: ``work(n)`` is the work with n of them."""
    return (calls_of(work(many)) - calls_of(work(few))) / (many - few)
