"""A list of messages that grows by 4 KB a step, stored as the result of every step."""

from __future__ import annotations

import hashlib
import time
from functools import partial
from typing import TYPE_CHECKING

from benchmarks import steps
from benchmarks.contender import Contender, Figures
from maestro_hive import ExecutionConfig, StatePersistence
from maestro_hive.engine.config import StateConfig
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.store import Append

if TYPE_CHECKING:
    from pathlib import Path

#: The last steps, over which the time per step is taken.
_LAST = 20
_CHECKPOINTS = 15


def _grow(folder: Path, *, count: int) -> Figures:
    store = SqliteStore(folder)
    hold = store.acquire_run("run")
    spent = {"encode": 0.0, "store": 0.0}
    messages = _Messages()
    for number in range(1, count + 1):
        messages.add(number)
        entry = steps.completed(number)._replace(value=messages.encoded())
        if number > count - _LAST:
            started = time.perf_counter()
            assert codec.encode(messages.items) == entry.value
            spent["encode"] += time.perf_counter() - started
        started = time.perf_counter()
        store.append([Append(hold, [steps.started(number)])], sync=False)
        store.append([Append(hold, [entry])])
        if number > count - _LAST:
            spent["store"] += time.perf_counter() - started
    last = store.entries(hold.run)[-1]
    data = store.load(last)
    assert data == messages.encoded().data
    store.checkpoint()
    log = _size(folder / "journal.db-wal")
    store.close()
    journal = sum(_size(folder / f"journal.db{end}") for end in ("", "-wal"))
    return {
        "data": len(data),
        "journal": journal,
        "log": log,
        "ratio": journal / len(data),
        **{part: seconds / _LAST for part, seconds in spent.items()},
    }


class _Messages:
    """The list and its canonical bytes, which grow with it.

    Encoding it for every step would take some ten minutes. The last steps are encoded for real,
    and must come out the same.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, str]] = []
        self._text = bytearray(b"[")
        self._hash = hashlib.sha256(b"[")

    def add(self, number: int) -> None:
        text = hashlib.shake_256(str(number).encode()).hexdigest(2_000)
        message = {"role": "assistant", "content": text}
        added = (b"," if self.items else b"") + codec.encode(message).data
        self.items.append(message)
        self._text += added
        self._hash.update(added)

    def encoded(self) -> codec.Encoded:
        whole = self._hash.copy()
        whole.update(b"]")
        return codec.Encoded(bytes(self._text) + b"]", whole.digest())


def _checkpoints(folder: Path) -> Figures:
    """Write more checkpoints than are kept, of a run whose artifacts keep growing."""
    kept = folder / "checkpoints"
    config = ExecutionConfig(
        state=StateConfig(state_dir=str(folder / "state"), checkpoint_dir=str(kept))
    )
    with StatePersistence(config, "run") as persistence:
        for number in range(_CHECKPOINTS):
            text = hashlib.shake_256(str(number).encode()).hexdigest(2_000)
            persistence.mark_task_completed(f"task-{number}", {f"message-{number}": text})
            persistence.checkpoint()
        listed = len(persistence.list_checkpoints())
    found = [path for path in kept.rglob("*") if path.is_file() and path.suffix == ".json"]
    return {"files": len(found), "listed": listed, "bytes": sum(_size(path) for path in found)}


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


CONTENDERS = (
    Contender(name="grow-400", group="growth", measure=partial(_grow, count=400), once=True),
    Contender(name="checkpoints", group="growth", measure=_checkpoints, once=True),
    Contender(name="grow-5000", group="growth", measure=partial(_grow, count=5_000), once=True),
)
