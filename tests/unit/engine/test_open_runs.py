"""One open run for all its users in a process, and what its copies contain."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from maestro_hive.engine.config import StateConfig
from maestro_hive.engine.open_run import OpenRun, open_run
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.records import EntryKind, NewEntry
from maestro_hive.maestro.state.stores import close_store, open_store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

_FACTS = codec.dump_canonical({"name": "work", "persona": "dev"})


def config_in(folder: Path) -> StateConfig:
    return StateConfig(state_dir=str(folder), checkpoint_dir=str(folder / "checkpoints"))


def start_of(step: int) -> NewEntry:
    return NewEntry(EntryKind.ATTEMPT_STARTED, step, 1, _FACTS, identity=bytes([step]) * 32)


def copied_entries(run: OpenRun) -> int:
    assert run.copies.path is not None
    return len(json.loads(run.copies.path.read_bytes())["document"]["run"]["entries"])


def after(call: Callable[..., Any], then: Callable[[], object]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        then()
        return result

    return called


def test_what_is_recorded_while_a_checkpoint_is_written_is_in_the_next_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(config_in(tmp_path), "r")
    try:
        checkpoints = run.copies.checkpoints
        with run.copying(), monkeypatch.context() as patch:
            meanwhile = [start_of(2)]
            write = after(
                checkpoints.write, lambda: run.append([meanwhile.pop()] if meanwhile else [])
            )
            patch.setattr(checkpoints, "write", write)
            run.append([start_of(1)])
            run.write_checkpoint("first")
            assert copied_entries(run) == 1
            run._copy_due = 0.0  # as after the interval
            run._copy_in_thread()
        assert copied_entries(run) == 2
    finally:
        run.close()


def test_two_threads_that_open_a_run_at_once_keep_its_store_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_have_it = threading.Barrier(2, timeout=60)
    monkeypatch.setattr(OpenRun, "open", after(OpenRun.open, both_have_it.wait))
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: open_run(config_in(tmp_path), "r"), range(2))
    assert first is second
    first.append([start_of(1)])
    first.close()
    second.append([start_of(2)])
    second.close()


def test_a_run_that_was_closed_meanwhile_is_not_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise there would be two of it: the next one to open it finds none, and makes another."""
    known = open_run(config_in(tmp_path), "r")
    store = open_store(tmp_path)
    opened, leave = OpenRun.open, [known.close]

    def open_late(run: OpenRun, *args: Any) -> bool:
        if leave:
            leave.pop()()  # after the run was found, and before it is opened
        return opened(run, *args)

    monkeypatch.setattr(OpenRun, "open", open_late)
    again = open_run(config_in(tmp_path), "r")
    other = open_run(config_in(tmp_path), "r")
    assert again is other
    assert again is not known
    again.close()
    other.close()
    close_store(store)
