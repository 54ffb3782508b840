"""A stream whose writer and reader are killed, again and again, and started again."""

from __future__ import annotations

import json
import random
import textwrap
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.python_processes import PythonProcess

if TYPE_CHECKING:
    from pathlib import Path

_CHUNKS = 10_000
_KILLS = 6
_MOST_SECONDS = 100.0

_WRITER = """
    import asyncio, os, sys
    from maestro_hive.engine.attempt import current
    from maestro_hive.engine.config import ExecutionConfig, Level1Config
    from maestro_hive.hive.hive import Hive

    config = ExecutionConfig(level1=Level1Config(base_delay_seconds=0, max_interruptions=1000))
    hive = Hive(sys.argv[1], config)

    @hive.step
    async def draft(count):
        context = current()
        print("writes", flush=True)
        for number in range(count):
            context.write(f"{context.attempt}:{number}")
            if number % 40 == 0:
                await asyncio.sleep(0.001)
            while number == count * 9 // 10 and not os.path.exists(sys.argv[3]):
                await asyncio.sleep(0.005)  # until there are no more kills
        return count

    @hive.workflow
    async def job(count):
        return await draft(count)

    print(hive.run_sync(job, int(sys.argv[2]), run_id="r"), flush=True)
"""

#: Appends what it gets to a file, a line for each chunk, and continues after the last whole line.
_READER = """
    import asyncio, json, os, sys
    from maestro_hive.hive.hive import Hive
    from maestro_hive.kernel.errors import RunInactiveError, UnknownRunError

    path = sys.argv[2]
    out = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o600)
    text = open(path, "rb").read()
    whole = text[: text.rfind(b"\\n") + 1]
    os.ftruncate(out, len(whole))
    after = json.loads(whole.splitlines()[-1])[0] if whole else 0

    async def main():
        global after
        hive = Hive(sys.argv[1])
        while True:
            try:
                async for chunk in hive.stream("r", "draft", after=after):
                    line = [chunk.seq, chunk.attempt, chunk.restarted, chunk.data]
                    os.write(out, json.dumps(line).encode() + b"\\n")
                    after = chunk.seq
                return
            except (RunInactiveError, UnknownRunError):
                await asyncio.sleep(0.01)  # until the writer is started again

    asyncio.run(main())
"""


class _Sides:
    """Both processes, and the file that the reader writes."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "chunks"
        self.file.touch()
        self._folder = folder / "state"
        self._last = folder / "last"
        self._deadline = time.monotonic() + _MOST_SECONDS
        self.writer = self._start_writer()
        self.reader = self._start_reader()

    def _start_writer(self) -> PythonProcess:
        return PythonProcess(textwrap.dedent(_WRITER), self._folder, _CHUNKS, self._last)

    def _start_reader(self) -> PythonProcess:
        return PythonProcess(textwrap.dedent(_READER), self._folder, self.file)

    def wait_for_growth(self, size: int) -> None:
        """Return when the reader has written so many bytes more."""
        size += self.file.stat().st_size
        while self.file.stat().st_size < size:
            assert time.monotonic() < self._deadline, "it takes too long"
            time.sleep(0.001)

    def kill_writer(self) -> None:
        """Kill it in its step: what the reader wrote may have come from the one before."""
        assert self.writer.line() == "writes"
        self.writer.kill()
        self.writer.communicate()
        self.writer = self._start_writer()

    def kill_reader(self) -> None:
        self.reader.kill()
        self.reader.communicate()
        self.reader = self._start_reader()

    def finish(self) -> list[list[Any]]:
        """Return what the reader has when both have ended by themselves."""
        self._last.touch()
        assert self.writer.communicate(timeout=_MOST_SECONDS)[0] == f"writes\n{_CHUNKS}\n"
        self.reader.communicate(timeout=_MOST_SECONDS)
        assert (self.writer.wait(), self.reader.wait()) == (0, 0)
        return [json.loads(line) for line in self.file.read_text().splitlines()]


@pytest.mark.parametrize("seed", [1])
def test_a_reader_has_each_chunk_of_the_last_attempt_once_in_order(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    sides = _Sides(tmp_path)
    for number in range(_KILLS):
        sides.wait_for_growth(rng.randrange(1, 60_000))
        if number % 3 != 1:
            sides.kill_reader()
        if number % 3 != 0:
            sides.kill_writer()
    found = sides.finish()
    assert [seq for seq, *_ in found] == list(range(1, len(found) + 1))
    held: list[str] = []
    for _, _, restarted, data in found:
        if restarted:
            held.clear()
        else:
            held.append(data)
    last = found[-1][1]
    assert last == 5, "there were four kills of the writer"
    assert held == [f"{last}:{number}" for number in range(_CHUNKS)]
