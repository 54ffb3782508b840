"""A step as an executor records it: started without fsync, its outcome with one."""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING

from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.records import EntryKind, NewEntry
from maestro_hive.maestro.state.store import Append

if TYPE_CHECKING:
    from maestro_hive.maestro.state.recorder import Recorder
    from maestro_hive.maestro.state.sqlite.store import SqliteStore
    from maestro_hive.maestro.state.store import RunLease

_NAME, _PERSONA = "draft_section", "technical_writer"
_FAMILY = f"{_PERSONA}/{_NAME}"
#: Enough entries that the log grows over the size at which it is copied, and begins again.
_WARM_STEPS = 600
_BATCH = 500


def started(number: int) -> NewEntry:
    """Return the entry that says that a step begins, its input and its identity worked out."""
    given = codec.encode({"section": number, "style": "plain", "audience": "operators"}, "input")
    identity = hashlib.sha256(f"{_NAME}\0{_PERSONA}\0".encode() + given.sha256).digest()
    facts = codec.dump_canonical({"name": _NAME, "persona": _PERSONA})
    return NewEntry(EntryKind.ATTEMPT_STARTED, number, 1, facts, given, _FAMILY, identity)


def result(number: int) -> dict[str, object]:
    """Return what a step returns: about 100 bytes."""
    text = f"Section {number} tells how to start, stop and look after it."
    return {"section": number, "text": text, "words": 11}


def completed(number: int) -> NewEntry:
    """Return the entry that says that a step is finished."""
    value = codec.encode(result(number), "result")
    facts = codec.dump_canonical({"tokens": 512 + number % 7})
    return NewEntry(EntryKind.STEP_COMPLETED, number, 1, facts, value, _FAMILY)


async def record(recorder: Recorder, hold: RunLease, number: int, *, sync: bool = True) -> None:
    """Record one step."""
    await recorder.append(hold, [started(number)], sync=False)
    await recorder.append(hold, [completed(number)], sync=sync)


def fill(store: SqliteStore, hold: RunLease, first: int, last: int) -> None:
    """Record finished steps ``first`` to ``last`` in large batches."""
    for start in range(first, last + 1, _BATCH):
        numbers = range(start, min(start + _BATCH, last + 1))
        entries = [make(number) for number in numbers for make in (started, completed)]
        store.append([Append(hold, entries)], sync=False)


async def warm(store: SqliteStore, recorder: Recorder) -> None:
    """Let the log grow and begin again, as it has in any journal in use."""
    hold = store.acquire_run("warm-up")
    for number in range(1, _WARM_STEPS + 1):
        await record(recorder, hold, number, sync=False)
    store.release_run(hold)
    await asyncio.to_thread(store.checkpoint)
