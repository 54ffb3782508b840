"""Count what one step calls: ``python -m benchmarks.walk``.

Counted are the calls of functions of ``maestro_hive`` on the thread of the loop, on a folder, in
the middle of a run. A coroutine or generator counts once, however often it is resumed; a
comprehension counts where Python makes a function of it (before 3.12).
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import maestro_hive
from maestro_hive.hive.hive import Hive

if TYPE_CHECKING:
    from types import CodeType, FrameType

_SOURCE = f"{Path(maestro_hive.__file__).parent}/"
_RESUMABLE = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
#: Steps before those that are counted, and how many are.
_WARM, _COUNTED = 10, 50


class Walk(NamedTuple):
    """The functions of one step, each as (module, name), and how often a step calls them."""

    calls: dict[tuple[str, str], float]

    @property
    def total(self) -> float:
        """Return the number of calls."""
        return sum(self.calls.values())

    @property
    def modules(self) -> set[str]:
        """Return the modules that every step visits."""
        return {module for (module, _), count in self.calls.items() if count >= 1}

    def text(self) -> str:
        """Return the calls by module and function."""
        lines = []
        for module in sorted(self.modules):
            own = {name: count for (of, name), count in self.calls.items() if of == module}
            lines.append(f"{sum(own.values()):7.1f}  {module}")
            lines += [f"{count:14.1f}  {name}" for name, count in own.items() if count >= 0.5]
        return "\n".join(lines)


class _Counter:
    """The calls of our functions between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self._codes: list[CodeType] = []
        #: Frames that can be resumed: as long as they are here, no two are the same object.
        self._started: dict[int, FrameType] = {}

    def start(self) -> None:
        sys.setprofile(self._profile)

    def stop(self) -> Walk:
        sys.setprofile(None)
        names = Counter(map(_name_of, self._codes))
        return Walk({name: count / _COUNTED for name, count in names.items()})

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(_SOURCE):
            return
        if code.co_flags & _RESUMABLE:
            if id(frame) in self._started:
                return
            self._started[id(frame)] = frame
        self._codes.append(code)


def _name_of(code: CodeType) -> tuple[str, str]:
    module = code.co_filename.removeprefix(_SOURCE).removesuffix(".py").replace("/", ".")
    return module, code.co_qualname


async def _walk(hive: Hive, *, is_replay: bool) -> Walk:
    """Execute the steps of a run, or find them completed, and stop it politely."""
    found: list[Walk] = []
    counted = asyncio.Event()

    @hive.step
    async def draft(given: dict[str, Any]) -> dict[str, Any]:
        assert not is_replay, "a completed step was executed again"
        return given

    @hive.workflow
    async def write() -> None:
        for number in range(_WARM):
            await draft({"section": -number})
        counter = _Counter()
        counter.start()
        for number in range(_COUNTED):
            await draft({"section": number})
        found.append(counter.stop())
        counted.set()
        await hive.sleep(1000)

    running = asyncio.create_task(hive.run(write, run_id="walk"))
    _, _ = await asyncio.wait(
        (running, asyncio.create_task(counted.wait())), return_when=asyncio.FIRST_COMPLETED
    )
    running.cancel()
    await asyncio.wait((running,))
    return found[0]


def walk() -> tuple[Walk, Walk]:
    """Return what a step calls the first time, and on replay."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for is_replay in (False, True):
            with Hive(folder) as hive:
                found.append(asyncio.run(_walk(hive, is_replay=is_replay)))
    return found[0], found[1]


def main() -> None:
    """Print both."""
    for name, each in zip(("the first time", "on replay"), walk(), strict=True):
        print(f"\n{name}: {each.total:.1f} calls in {len(each.modules)} modules\n{each.text()}")


if __name__ == "__main__":
    main()
