"""The work of a step, the same for every system that is measured.

Nothing of this project is imported here, so that a peer's process loads the peer only.
"""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.contender import Figures

#: Set by ``--quick`` for the processes it starts: smaller numbers, the same questions.
QUICK = bool(os.environ.get("MAESTRO_BENCH_QUICK"))
#: How many do something at once, where it is said that many do.
AT_ONCE = 64

_TEXT = hashlib.shake_256(b"maestro-hive").hexdigest(51_200)
_MESSAGE = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a sequence of steps does: ``given`` makes a step's input, ``task`` its result.

    ``given`` receives the step's number and the result of the step before. The time of a step is
    taken over all of them, or over the ``last`` ones where a step costs more the later it is.
    """

    count: int
    given: Callable[[int, Any], Any]
    task: Callable[[Any], Any]
    last: int | None = None


class Laps:
    """When each step of a sequence ended."""

    def __init__(self) -> None:
        self._times = [time.perf_counter()]

    def lap(self) -> None:
        """Note that a step has ended."""
        self._times.append(time.perf_counter())

    def figures(self, work: Work, ended: float | None = None) -> Figures:
        """Return the time of one step; ``ended`` is when the last one was stored, if later."""
        steps = work.last or len(self._times) - 1
        end = self._times[-1] if ended is None else ended
        return {"steps": len(self._times) - 1, "seconds": (end - self._times[-1 - steps]) / steps}


class Runs(NamedTuple):
    """Short runs: ``steps`` in each, so many after one another, or ``AT_ONCE`` so many times."""

    steps: int
    sequential: int = 0
    waves: int = 0

    @property
    def total(self) -> int:
        """How many runs in all."""
        return self.sequential + self.waves * AT_ONCE


def result(number: int) -> dict[str, object]:
    """Return what a small step returns: about 100 bytes."""
    text = f"Section {number} tells how to start, stop and look after it."
    return {"section": number, "text": text, "words": 11}


def _text(number: int, size: int) -> str:
    """Return a text of this size that begins with its number and is like no other."""
    start = number * 97 % (len(_TEXT) - size) if size < len(_TEXT) else number * 97 % size
    return f"{number:08d}{_TEXT[start:]}{_TEXT[:start]}"[:size]


def _answer(prompt: str) -> dict[str, object]:
    return {"text": _text(int(prompt[:8]), 8_192), "tokens": 2_048}


def _report(number: int) -> dict[str, object]:
    return {"text": _text(number, 102_400), "pages": 40}


def _say_more(messages: list[dict[str, str]] | None) -> list[dict[str, str]]:
    known = messages or []
    return [*known, {"role": "assistant", "content": _text(len(known), _MESSAGE)}]


SMALL = Work(count=200 if QUICK else 500, given=lambda number, _: number, task=result)
ANSWER = Work(count=100, given=lambda number, _: _text(number, 2_048), task=_answer)
REPORT = Work(count=50, given=lambda number, _: number, task=_report)
GROWING = Work(count=300, given=lambda _, before: before, task=_say_more, last=20)

#: Steps in each of the 64, where 64 do their steps at once.
STEPS_AT_ONCE = 5 if QUICK else 10
RUNS_OF_1 = Runs(1, sequential=20 if QUICK else 50)
RUNS_OF_3 = Runs(3, sequential=20 if QUICK else 50)
RUNS_OF_3_AT_ONCE = Runs(3, waves=1 if QUICK else 2)
