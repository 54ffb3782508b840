"""What the rows share: programs they need, even samples, and work done ahead in threads."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


#: Program → Debian package.
_PACKAGES = {
    "strace": "strace",
    "faketime": "faketime",
    "unshare": "util-linux",
    "mkfs.xfs": "xfsprogs",
    "mkfs.ext4": "e2fsprogs",
    "mount": "mount",
}
_SBIN = "/usr/sbin:/sbin"


def find(program: str) -> str | None:
    """Return the path of a program; the folders of root's programs are searched too."""
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:{_SBIN}")


@cache
def missing(*programs: str) -> str:
    """Install missing programs; return why they cannot be used, or an empty text."""
    wanted = sorted({_PACKAGES[each] for each in programs if find(each) is None})
    if not wanted:
        return ""
    names = " ".join(wanted)
    if find("apt-get") is None or os.geteuid() != 0:
        return f"{names} is missing, and only root on a Debian system can install it"
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    codes = [
        subprocess.run(
            ["apt-get", *words], env=environment, capture_output=True, check=False, timeout=300
        ).returncode
        for words in (["update", "-q"], ["install", "-qy", "--no-install-recommends", *wanted])
    ]
    if codes[-1]:
        return f"{names} is missing, and apt-get could not install it"
    return "" if all(find(each) for each in programs) else f"{names} was installed, but not found"


def unprivileged() -> str:
    """Return why file systems cannot be mounted here, or an empty text."""
    return "" if os.geteuid() == 0 else "only root can mount file systems"


T = TypeVar("T")
R = TypeVar("R")


def evenly(items: Sequence[T], count: int) -> list[T]:
    """Return ``count`` of the items, evenly spread, or all of them if there are fewer."""
    if count >= len(items):
        return list(items)
    return [items[index * len(items) // count] for index in range(count)]


def ahead(work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield the results of ``work`` in order; a few threads work ahead of the caller."""
    width = max(1, min(2, os.cpu_count() or 1))
    waiting: deque[T] = deque(items)
    with ThreadPoolExecutor(width) as pool:
        running = deque(
            pool.submit(work, waiting.popleft()) for _ in range(min(width + 1, len(waiting)))
        )
        while running:
            done = running.popleft().result()
            if waiting:
                running.append(pool.submit(work, waiting.popleft()))
            yield done
