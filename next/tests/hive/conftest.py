"""A hive on a real folder that does not wait between attempts, and ways to wait for records."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.config import ExecutionConfig, Level1Config, Level2Config
from maestro_hive.hive.hive import Hive
from maestro_hive.journal.sqlite import SqliteFile
from maestro_hive.journal.store import Store
from maestro_hive.kernel.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    from maestro_hive.journal.entries import Entry


def quick_config() -> ExecutionConfig:
    """Return settings that do not wait between attempts, nor between rounds."""
    return ExecutionConfig(
        level1=Level1Config(base_delay_seconds=0),
        level2=Level2Config(base_delay_seconds=0, circuit_breaker_threshold=1000),
    )


def quick_hive(folder: Path | str, **options: Any) -> Hive:
    return Hive(folder, quick_config(), **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def hive(folder: Path) -> Iterator[Hive]:
    with quick_hive(folder) as made:
        yield made


async def until(condition: Callable[[], object]) -> None:
    """Wait for a record, for half a minute at most: the machine may be busy."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - the condition is in a journal
            await asyncio.sleep(0.005)


class PassedTime:
    """A clock and, with ``run``, an event loop on which more time has passed than really has."""

    def __init__(self) -> None:
        self.seconds, self._system = 0.0, SystemClock()
        self.awake_seconds, self.boot_id = self._system.awake_seconds, self._system.boot_id
        self.sleep = self._system.sleep
        self._loop: asyncio.AbstractEventLoop | None = None

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.seconds += seconds
        if self._loop is not None:
            self._loop.call_soon(lambda: None)  # it looks at its timers again

    def now(self) -> datetime:
        return self._system.now() + timedelta(seconds=self.seconds)

    def micros(self) -> int:
        return self._system.micros() + int(self.seconds * 1e6)

    def boot_seconds(self) -> float:
        return self._system.boot_seconds() + self.seconds

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on a loop with this time."""
        with asyncio.Runner(loop_factory=self._make_loop) as runner:
            return runner.run(main)

    def _make_loop(self) -> asyncio.AbstractEventLoop:
        clock = self

        class Loop(asyncio.SelectorEventLoop):
            def time(self) -> float:
                return super().time() + clock.seconds

        self._loop = Loop()
        return self._loop


@pytest.fixture
def clock() -> PassedTime:
    return PassedTime()


def hive_at(folder: Path, clock: PassedTime) -> Hive:
    """Return a hive whose journal has this clock."""
    folder.mkdir(exist_ok=True)
    made = quick_hive(folder)
    made._opened = Store(SqliteFile(str(folder / "journal.db"), clock=clock), str(folder))  # noqa: SLF001
    return made


def status(hive: Hive, run_id: str = "r") -> str:
    return next((each.status for each in hive.runs() if each.run_id == run_id), "none")


def asks(hive: Hive, run_id: str = "r") -> list[str]:
    """Return the names of the questions that a run waits for; none before it starts."""
    return [each.name for each in hive.questions(run_id)] if status(hive, run_id) != "none" else []


def store_of(hive: Hive) -> Store:
    """Return the journal, for tests of what is stored."""
    return hive._open()  # noqa: SLF001


def recorded(hive: Hive, run_id: str = "r") -> list[Entry]:
    """Return the entries of a run, outside of an event loop too."""
    store = store_of(hive)
    return store.entries(store.find(run_id).number)


async def entries_of(hive: Hive, run_id: str = "r") -> list[Entry]:
    return [each.entry async for each in hive.events(run_id, follow=False)]


async def until_recorded(hive: Hive, kind: type[Entry], run_id: str = "r") -> None:
    """Wait for an entry of this kind."""
    await until(lambda: status(hive, run_id) != "none")
    async with asyncio.timeout(30):
        while not any(isinstance(each, kind) for each in await entries_of(hive, run_id)):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def leave(running: asyncio.Task[Any]) -> None:
    """Stop a run in the middle, as Ctrl+C does."""
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def copy_live(folder: Path, target: Path) -> Path:
    """Copy a state folder as a kill at this moment would leave it."""
    return shutil.copytree(folder, target, copy_function=_copy_if_there)


def _copy_if_there(source: str, target: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(source, target)
