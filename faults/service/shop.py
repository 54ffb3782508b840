"""The workflow of the service: each body and each recorded result is noted for the test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from pathlib import Path

from faults.service import FOLDER, PARTS
from maestro_hive import ExecutionConfig, Hive, current
from maestro_hive.unified_execution import Level1Config, Level2Config

place = Path(os.environ[FOLDER])
hive = Hive(
    place / "state",
    ExecutionConfig(
        # So many kills in a row are no fault of a step.
        level1=Level1Config(base_delay_seconds=0, max_interruptions=1_000),
        level2=Level2Config(base_delay_seconds=0),
    ),
)


def note(*words: str) -> None:
    """Add a line to the notes; a kill leaves all of it, or nothing."""
    line = " ".join((*words, str(os.getpid())))
    file = os.open(place / "notes", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)


def have_effect(key: str, text: str) -> None:
    """Do what is done once for a key, as the other side of a call would: all of it, or nothing."""
    effects = place / "effects"
    effects.mkdir(exist_ok=True)
    made = effects / f".{key}.{os.getpid()}"
    made.write_text(text, encoding="utf-8")
    with contextlib.suppress(FileExistsError):
        os.link(made, effects / key)
    made.unlink()


@hive.step
async def part(order_id: str, name: str, seconds: float) -> str:
    """Do a part of an order, whose effect happens once for its key."""
    note("starts", order_id, name)
    await asyncio.sleep(seconds * random.random())
    have_effect(current().effect_key, f"{order_id} {name}")
    await asyncio.sleep(seconds * random.random())
    return name


@hive.workflow
async def order(order_id: str, kind: str) -> list[str]:
    """Execute an order: its parts, and a wait of its kind between them."""
    done = [await part(order_id, PARTS[0], 0.15)]
    note("recorded", order_id, PARTS[0])
    match kind:
        case "asks":
            done.append(str(await hive.wait_for("approval", type=bool)))
        case "sleeps":
            await hive.sleep(0.3)
        case _:
            pass
    done.append(await part(order_id, PARTS[1], 0.15))
    note("recorded", order_id, PARTS[1])
    return done


@hive.step
async def hang(order_id: str) -> str:
    """Take a minute, until the test says that it is free."""
    note("starts", order_id, "hang")
    for _ in range(600):
        if (place / "free").exists():
            break
        await asyncio.sleep(0.1)
    return "free"


@hive.workflow
async def long_order(order_id: str) -> str:
    """Do one step that outlives the grace."""
    return await hang(order_id)
