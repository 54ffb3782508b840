"""Runs that tests record in a journal, without a hive."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from msgspec import Raw

from maestro_hive.journal.differences import difference
from maestro_hive.journal.effects import Release
from maestro_hive.journal.entries import AttemptStarted, RunEnded, RunStarted, StepCompleted
from maestro_hive.journal.store import BITS, Acquire, Append, RunLease, Store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maestro_hive.journal.effects import Effect
    from maestro_hive.journal.entries import Entry


def raw(value: object) -> Raw:
    return Raw(json.dumps(value, separators=(",", ":")).encode())


def write(store: Store, run: RunLease, *entries: Entry, effects: Sequence[Effect] = ()) -> None:
    (found,) = store.write([Append(run, entries, effects, sync=True)])
    if isinstance(found, Exception):
        raise found


def start(store: Store, name: str, *, parent: str | None = None) -> RunLease:
    first = RunStarted(workflow="build", input=raw(["x"]), parent=parent)
    (found,) = store.write([Acquire(name, first, sync=True)])
    assert isinstance(found, RunLease), found
    return found


def complete(store: Store, run: RunLease, step: int, result: Any = "done") -> None:
    write(
        store,
        run,
        AttemptStarted(step=step, identity=f"s{step}", name="work", input=raw([step])),
        StepCompleted(step=step, result=result if isinstance(result, Raw) else raw(result)),
    )


def end(store: Store, run: RunLease, result: object = "built") -> None:
    write(store, run, RunEnded(status="success", result=raw(result)), effects=[Release("success")])


def stop(store: Store, run: RunLease) -> None:
    write(store, run, effects=[Release("stopped")])


def recorded(store: Store, name: str = "r", steps: int = 3, *, is_ended: bool = True) -> RunLease:
    """Record a run of some steps."""
    run = start(store, name)
    for step in range(1, steps + 1):
        complete(store, run, step)
    (end if is_ended else stop)(store, run)
    return run


def store_value(
    store: Store, run: RunLease, number: int, text: bytes, *, base: bytes | None = None
) -> Raw:
    """Store a large value, whole or as a difference to the one before it; refer to it."""
    digest = hashlib.sha256(text)
    data = text if base is None else difference(base, text)
    row = (run.number << BITS | number, None if base is None else number - 1, digest.digest(), data)
    store.db.write(lambda tx: tx(store.sql["ADD_PAYLOAD"], *row), sync=True)
    return raw({"$": "payload", "v": [number, len(text), digest.hexdigest()]})


def texts(store: Store, name: str) -> list[str]:
    """Return the entries of a run as people read them."""
    return [each.text() for each in store.entries(store.find(name).number)]
