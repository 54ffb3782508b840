"""What a workflow asks for besides steps and children: time, answers, the clock, dice."""

from __future__ import annotations

import asyncio
import datetime as dt
import random
import uuid
from typing import TYPE_CHECKING, Any, TypeVar

from maestro_hive.engine.settings import Seconds, Text, checked
from maestro_hive.hive.commands import OutsideCommand, QuestionCommand
from maestro_hive.hive.functions import driver_here

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")


async def wait_for(
    name: str,
    *,
    timeout: float | None = None,  # noqa: ASYNC109 - it is recorded with the question
    type: Any = None,  # noqa: A002 - the word for it
    about: Any = None,
) -> Any:
    """Wait in a workflow until it is answered: ``hive.answer``, or ``maestro answer``.

    The answer is recorded. ``type`` says what it must be: an answer of another kind is refused
    where it is given. After ``timeout`` seconds, those before a restart included, TimeoutError.
    ``about`` is shown to the person who answers; about something else, it is another question.
    """
    driver = driver_here("hive.wait_for()")
    checked(Text, name, "the name of the question")
    if timeout is not None:
        checked(Seconds, timeout, "the timeout")
    return await QuestionCommand(driver, name, type, about, timeout)


async def outside(coroutine: Coroutine[Any, Any, T]) -> T:
    """Execute a coroutine on the outer loop, again in each life: for I/O that cannot be a step.

    Its result is not recorded, only when it ended: a resumed workflow gets the new result at the
    same place. Code that does otherwise with another result is not the same run.
    """
    driver = driver_here("outside")

    def begin() -> asyncio.Future[T]:
        return driver.outer.create_task(coroutine)

    found: T = await OutsideCommand(driver, "outside", begin)
    return found


async def sleep(seconds: float) -> None:
    """Sleep durably: in a workflow ``asyncio.sleep`` is the same."""
    driver_here("hive.sleep()")
    given: object = seconds
    is_over = isinstance(given, int | float) and given < 0  # as in sleep(deadline - now)
    checked(Seconds, 0 if is_over else given, "the seconds to sleep")
    await asyncio.sleep(seconds)


def now() -> dt.datetime:
    """Return the time of the last outcome: the same in each life."""
    return dt.datetime.fromtimestamp(driver_here("now").loop.now, dt.UTC)


def _dice(what: str) -> random.Random:
    driver = driver_here(what)
    return random.Random(f"{driver.run_id} {driver.loop.place(what)}")  # noqa: S311 - no secret


def draw() -> float:
    """Return a random number that is the same in each life."""
    return _dice("random").random()


def make_uuid() -> uuid.UUID:
    """Return a UUID that is the same in each life."""
    return uuid.UUID(int=_dice("uuid").getrandbits(128), version=4)
