"""What a queue measures, whoever's it is: workers in processes of their own, and when runs began.

First many runs are enqueued, and then the workers start: the rate is taken from the first body to the
last recorded end. Then runs are enqueued one by one, at random moments, while the workers have
nothing else to do: the latency is taken from before a run is enqueued to its body. The clock is
``time.monotonic``, which all processes of a machine share.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import work
from benchmarks.contender import Figures, measured

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RUNS = 200 if work.QUICK else 1_000
_LATE_RUNS = 40 if work.QUICK else 200
_LONGEST_PAUSE = 0.05
_SECONDS = 600.0
_ROOT = Path(__file__).resolve().parents[2]


class Bodies:
    """When the bodies of a worker's process began: written when it ends."""

    def __init__(self) -> None:
        self.began: dict[str, float] = {}

    def begin(self, number: str) -> None:
        """Note that a body begins."""
        self.began.setdefault(number, time.monotonic())

    def serve(self, place: Path, started: Callable[[], None]) -> None:
        """Say that the process is ready; start the worker when told so; and end when told so."""
        print("ready", flush=True)
        sys.stdin.readline()
        started()
        sys.stdin.readline()
        place.write_text(json.dumps(self.began), encoding="utf-8")


class _Workers:
    """Processes with a worker each."""

    def __init__(self, module: str, folder: Path, count: int, words: tuple[str, ...]) -> None:
        self._places = [folder / f"began-{number}.json" for number in range(count)]
        self._processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    f"benchmarks.contenders.{module}",
                    str(folder),
                    place,
                    *words,
                ],
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for place in self._places
        ]
        for each in self._processes:
            assert each.stdout is not None
            assert each.stdout.readline() == "ready\n", "a worker did not start"

    def tell(self) -> None:
        """Let all of them go on."""
        for each in self._processes:
            assert each.stdin is not None
            each.stdin.write("\n")
            each.stdin.flush()

    def began(self) -> dict[str, float]:
        """Return when bodies began, after the end of all processes."""
        found: dict[str, float] = {}
        for each, place in zip(self._processes, self._places, strict=True):
            assert each.wait(_SECONDS) == 0, "a worker failed"
            for number, began in json.loads(place.read_text(encoding="utf-8")).items():
                found[number] = min(began, found.get(number, began))
        return found

    def close(self) -> None:
        """End those that have not ended."""
        for each in self._processes:
            each.kill()
            each.communicate()


@contextmanager
def _workers(module: str, folder: Path, count: int, words: tuple[str, ...]) -> Iterator[_Workers]:
    made = _Workers(module, folder, count, words)
    try:
        yield made
    finally:
        made.close()


class Queue:
    """What is asked of a queue from outside of its workers."""

    def __init__(self, enqueue: Callable[[str], object], ended: Callable[[], int]) -> None:
        self.enqueue = enqueue
        #: How many runs have ended.
        self.ended = ended

    def wait(self, count: int) -> float:
        """Return when so many had ended."""
        deadline = time.monotonic() + _SECONDS
        while self.ended() < count:
            assert time.monotonic() < deadline, "the runs did not end"
            time.sleep(0.02)
        return time.monotonic()


def measure(
    queue: Queue, module: str, folder: Path, *, workers: int, words: tuple[str, ...] = ()
) -> Figures:
    """Return the rate, and the latencies, through so many workers."""
    for number in range(RUNS):
        queue.enqueue(f"run-{number}")
    with _workers(module, folder, workers, words) as made:
        with measured():
            made.tell()
            last = queue.wait(RUNS)
        enqueued = _enqueue_late(queue)
        queue.wait(RUNS + _LATE_RUNS)
        made.tell()
        began = made.began()
    waited = sorted(began[number] - at for number, at in enqueued.items())
    first = min(at for number, at in began.items() if number.startswith("run-"))
    return {
        "steps": RUNS,
        "seconds": (last - first) / RUNS,
        "median": statistics.median(waited),
        "p99": waited[min(len(waited) - 1, int(len(waited) * 0.99))],
    }


def _enqueue_late(queue: Queue) -> dict[str, float]:
    rng = random.Random(2030)
    enqueued: dict[str, float] = {}
    for number in range(_LATE_RUNS):
        time.sleep(rng.uniform(0, _LONGEST_PAUSE))
        enqueued[f"late-{number}"] = time.monotonic()
        queue.enqueue(f"late-{number}")
    return enqueued
