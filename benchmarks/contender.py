"""What a contender is: a function that measures something in a folder and returns figures."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

Figures = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """Something to measure.

    ``measure`` runs in a fresh process; so does ``prepare``, before it, on the same folder. ``durable``
    says what its writes survive, for contenders that write. ``once``: its figures hardly vary and it
    takes long, so that one round is enough. ``filled``: preparing takes long, so that it is done
    once, and every round gets a copy. ``peer`` names what it needs besides this project, and
    ``postgres`` says that it needs a server, too. ``unit`` is what its figure "steps" counts.
    """

    name: str
    group: str
    measure: Callable[[Path], Figures]
    prepare: Callable[[Path], None] | None = None
    durable: str = ""
    once: bool = False
    filled: bool = False
    peer: str = ""
    postgres: bool = False
    unit: str = "step"


@dataclass(slots=True)
class Span:
    """How long the measured part took."""

    seconds: float = 0.0


@contextmanager
def measured() -> Iterator[Span]:
    """Time the body, and mark its begin and end for whoever counts system calls."""
    span = Span()
    _mark()
    started = time.perf_counter()
    yield span
    span.seconds = time.perf_counter() - started
    _mark()


def _mark() -> None:
    os.kill(os.getpid(), 0)  # does nothing, and strace sees it
