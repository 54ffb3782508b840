"""Choosing few out of many, evenly, and doing work ahead on the machine's cores."""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

T = TypeVar("T")
R = TypeVar("R")


def evenly(items: Sequence[T], count: int) -> list[T]:
    """Return ``count`` of the items, evenly spread, or all of them if there are fewer."""
    if count >= len(items):
        return list(items)
    return [items[index * len(items) // count] for index in range(count)]


def ahead(work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Do work in a few threads, a little ahead of whoever takes the results, in order."""
    width = max(1, min(2, os.cpu_count() or 1))
    waiting: deque[T] = deque(items)
    with ThreadPoolExecutor(width) as pool:
        under_way = deque(
            pool.submit(work, waiting.popleft()) for _ in range(min(width + 1, len(waiting)))
        )
        while under_way:
            done = under_way.popleft().result()
            if waiting:
                under_way.append(pool.submit(work, waiting.popleft()))
            yield done
