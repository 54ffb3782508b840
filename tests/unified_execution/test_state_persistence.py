"""An execution's state outlives its process: what was recorded is there again, wherever it died.

AC-1: state is on disk. AC-2: a restart resumes. AC-3: every step is kept. AC-4: also after a kill.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import signal
import stat
import subprocess
import threading
import time
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine.copies import copier
from maestro_hive.kernel.errors import (
    ConfigurationError,
    EncodeError,
    FolderError,
    InvalidIdentifierError,
    MaestroError,
    NewerFormatError,
    RunLeasedError,
    StorageError,
    StoreBusyError,
)
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state import run_document as documents
from maestro_hive.maestro.state.checkpoint import CheckpointManager, WorkflowState
from maestro_hive.maestro.state.projections import FIELDS
from maestro_hive.maestro.state.records import EntryKind, NewEntry
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.store import Append
from maestro_hive.unified_execution import (
    DEFAULT_CHECKPOINT_PATH,
    DEFAULT_STATE_PATH,
    ErrorCategory,
    ExecutionConfig,
    ExecutionState,
    StateConfig,
    StateCorruptionError,
    StatePersistence,
    get_execution_config,
    get_state_persistence,
    load_state,
    reset_execution_config,
    save_state,
)
from tests.python_processes import PythonProcess
from tests.tables import for_each
from tests.unified_execution.restarts import persona_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass
class Finding:
    """A value of a type of the caller's own."""

    file: str
    lines: list[int] = field(default_factory=list)


# --- helpers -----------------------------------------------------------------------------------

PREAMBLE = """
import json, os, sys, time
from maestro_hive.unified_execution import *

state_dir, checkpoint_dir, *args = sys.argv[1:]
config = ExecutionConfig(state=StateConfig(state_dir=state_dir, checkpoint_dir=checkpoint_dir))
"""


def start(code: str, config: ExecutionConfig, *args: str) -> PythonProcess:
    folders = [config.state.state_dir, config.state.checkpoint_dir]
    return PythonProcess(PREAMBLE + code, *folders, *args, stderr=True)


def finish(process: PythonProcess) -> str:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out


def read_until(process: PythonProcess, wanted: str) -> None:
    for line in process.stdout:
        if line.strip() == wanted:
            return
    raise AssertionError(f"it ended without saying {wanted!r}: {process.communicate()[1]}")


def kill(process: PythonProcess, how: int = signal.SIGKILL) -> None:
    process.send_signal(how)
    process.communicate(timeout=30)


@contextmanager
def holding(config: ExecutionConfig, run: str) -> Iterator[PythonProcess]:
    """Have another process hold a run."""
    code = f"p = StatePersistence(config, {run!r})\nprint('held', flush=True)\ntime.sleep(60)"
    process = start(code, config)
    try:
        read_until(process, "held")
        yield process
    finally:
        kill(process)


def state_folder(config: ExecutionConfig) -> Path:
    return Path(config.state.state_dir)


def checkpoint_files(config: ExecutionConfig, run: str) -> list[Path]:
    """Return a run's checkpoint files, oldest first."""
    return sorted((Path(config.state.checkpoint_dir) / run).glob("*.json"))


def lose_journal(config: ExecutionConfig) -> None:
    """Delete everything in the state folder but the JSON copies of the runs."""
    for path in state_folder(config).iterdir():
        if path.name != "runs":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def all_files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def worked(config: ExecutionConfig, run: str, *tasks: str, checkpoint: bool = True) -> None:
    """Open a run, do some tasks, close it."""
    with StatePersistence(config, run) as persistence:
        for task in tasks:
            persistence.mark_task_completed(task)
        if checkpoint:
            persistence.checkpoint()


def reopened(config: ExecutionConfig, run: str) -> ExecutionState:
    with StatePersistence(config, run) as persistence:
        return persistence.state


# --- AC-1: the state, and that it is on disk -----------------------------------------------------


def test_ac1_the_default_folders_are_not_in_tmp() -> None:
    assert DEFAULT_STATE_PATH == "/var/maestro/state"
    assert DEFAULT_CHECKPOINT_PATH == "/var/maestro/checkpoints"


def test_ac1_a_new_state_has_the_fields_and_defaults_of_the_schema() -> None:
    state = ExecutionState("w")
    assert (state.phase, state.step, state.status) == ("initializing", 0, "pending")
    assert (state.persona_states, state.retry_counts) == ({}, {})
    assert (state.completed_tasks, state.pending_tasks) == ([], [])
    assert (state.artifacts, state.metrics, state.checksum) == ({}, {}, "")
    assert datetime.fromisoformat(state.created_at).tzinfo is not None
    assert datetime.fromisoformat(state.updated_at).tzinfo is not None


def test_ac1_two_states_share_nothing() -> None:
    first, second = ExecutionState("a"), ExecutionState("b")
    first.completed_tasks.append("t")
    first.metrics["m"] = 1
    assert (second.completed_tasks, second.metrics) == ([], {})


def test_ac1_a_state_survives_its_dictionary() -> None:
    state = ExecutionState("w", "build", 3, "running", {"dev": {"memory": [1]}}, {"dev": 2})
    state.artifacts["a"] = datetime(2030, 1, 1, tzinfo=UTC)
    again = ExecutionState.from_dict(state.to_dict())
    again.checksum = ""
    assert again == state


def test_ac1_a_states_dictionary_is_a_copy_that_keeps_types() -> None:
    finding = Finding("a.py", [1])
    state = ExecutionState("w", persona_states={"dev": {"finding": finding}})
    shown = state.to_dict()["persona_states"]["dev"]["finding"]
    assert shown == finding
    assert shown is not finding


def test_ac1_updating_a_state_sets_fields_and_the_time() -> None:
    state = ExecutionState("w", updated_at="2000-01-01T00:00:00+00:00")
    state.update(phase="test", step=4)
    assert (state.phase, state.step) == ("test", 4)
    assert state.updated_at > "2020"
    with pytest.raises(TypeError, match="colour"):
        state.update(colour="red")


def test_ac1_the_checksum_covers_every_field() -> None:
    whole = ExecutionState("w", artifacts={"a": 1}).to_dict()
    assert len(whole["checksum"]) == 64
    others = {
        "workflow_id": "x", "phase": "x", "step": 1, "status": "x", "persona_states": {"x": {}},
        "retry_counts": {"x": 1}, "completed_tasks": ["x"], "pending_tasks": ["x"],
        "artifacts": {"a": 2}, "metrics": {"x": 1}, "created_at": "x", "updated_at": "x",
    }  # fmt: skip
    assert others.keys() == whole.keys() - {"checksum"}
    for name, value in others.items():
        with pytest.raises(StateCorruptionError, match="checksum"):
            ExecutionState.from_dict({**whole, name: value})


@for_each(
    "data",
    [
        None,
        [],
        {},
        {"phase": "x"},
        {"workflow_id": None},
        {"workflow_id": "w", "step": "3"},
        {"workflow_id": "w", "step": True},
        {"workflow_id": "w", "step": None},
        {"workflow_id": "w", "completed_tasks": "abc"},
        {"workflow_id": "w", "persona_states": []},
        {"workflow_id": "w", "persona_states": {"p": None}},
        {"workflow_id": "w", "persona_states": {1: {}}},
        {"workflow_id": "w", "retry_counts": {"p": True}},
        {"workflow_id": "w", "completed_tasks": [["x"]]},
        {"workflow_id": "w", "pending_tasks": [None]},
        {"workflow_id": "w", "artifacts": {1: "x"}},
        {"workflow_id": "w", "metrics": {None: "x"}},
        {"workflow_id": "w", "surprise": 1},
        {"workflow_id": "w", 3: 1},
    ],
)
def test_ac1_what_is_no_state_is_refused(data: Any) -> None:
    with pytest.raises(StateCorruptionError):
        ExecutionState.from_dict(data)


def test_ac1_a_change_is_on_disk_when_the_method_returns(config: ExecutionConfig) -> None:
    with StatePersistence(config, "w") as persistence:
        persistence.mark_task_completed("t1", {"file": "a.py"})
        read = """
state = load_state(args[0])
print(json.dumps([state.completed_tasks, state.artifacts]))
"""
        env_code = "os.environ.update(MAESTRO_STATE_DIR=state_dir)\nreset_execution_config()\n"
        seen = finish(start(env_code + read, config, "w"))
    assert json.loads(seen) == [["t1"], {"file": "a.py"}]


def test_ac1_every_change_is_synced_before_the_method_returns(
    config: ExecutionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs: list[int] = []
    real = os.fdatasync

    def counted(fd: int) -> None:
        real(fd)
        syncs.append(fd)

    with StatePersistence(config, "w") as persistence:
        monkeypatch.setattr(os, "fdatasync", counted)
        changes: list[Callable[[], object]] = [
            lambda: persistence.update_state(phase="x"),
            lambda: persistence.mark_task_pending("t"),
            lambda: persistence.mark_task_completed("t"),
            lambda: persistence.increment_retry("dev"),
            lambda: persistence.update_persona_state("dev", {"a": 1}),
        ]
        for number, change in enumerate(changes, 1):
            change()
            assert len(syncs) >= number
    assert reopened(config, "w").phase == "x"


def test_ac1_the_state_path_is_inside_the_state_folder(config: ExecutionConfig) -> None:
    with StatePersistence(config, "w") as persistence:
        path = persistence.get_state_path()
        assert path == state_folder(config) / "runs" / "w" / "execution_state.json"
        persistence.update_state(phase="x")
        persistence.checkpoint()
    body = documents.unseal(path.read_bytes(), "execution_state", "it")
    assert body["run"]["state"]["phase"] == "x"


def test_ac1_without_an_id_each_execution_gets_one_of_its_own(config: ExecutionConfig) -> None:
    with StatePersistence(config) as first, StatePersistence(config) as second:
        assert first.workflow_id.startswith("wf_")
        assert second.workflow_id.startswith("wf_")
        assert first.workflow_id != second.workflow_id
        assert first.state.workflow_id == first.workflow_id


def test_ac1_files_are_private_whatever_the_umask(config: ExecutionConfig, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        worked(config, "w", "t")
    finally:
        os.umask(before)
    modes = {
        path: stat.S_IMODE(path.stat().st_mode)
        for folder in (tmp_path / "state", tmp_path / "checkpoints")
        for path in (folder, *folder.rglob("*"))
    }
    assert len(modes) > 6
    wrong = {path for path, mode in modes.items() if mode != (0o700 if path.is_dir() else 0o600)}
    assert wrong == set()


# --- AC-2: a restart resumes ---------------------------------------------------------------------


def test_ac2_everything_is_there_again_after_a_restart(config: ExecutionConfig) -> None:
    with StatePersistence(config, "w") as persistence:
        persistence.update_state("build", 3, "running", metrics={"cost": 1.5})
        persistence.mark_task_pending("t1")
        persistence.mark_task_pending("t2")
        persistence.mark_task_completed("t1", {"out": "a.txt"})
        persistence.increment_retry("dev")
        persistence.increment_retry("dev")
        persistence.update_persona_state("dev", {"memory": {"k": "v"}, "history": ["hello"]})
        before = persistence.state.to_dict()
    with StatePersistence(config, "w") as persistence:
        assert persistence.state.to_dict() == before
        assert persistence.restored is None
        assert persistence.get_retry_count("dev") == 2
        assert persistence.get_persona_state("dev") == {"memory": {"k": "v"}, "history": ["hello"]}
        state = persistence.state
    assert (state.phase, state.step, state.status) == ("build", 3, "running")
    assert (state.completed_tasks, state.pending_tasks) == (["t1"], ["t2"])
    assert (state.artifacts, state.metrics) == ({"out": "a.txt"}, {"cost": 1.5})


def test_ac2_nothing_is_lost_without_shutdown_or_checkpoint(config: ExecutionConfig) -> None:
    code = "StatePersistence(config, 'w').mark_task_completed('t1')\nos._exit(0)"
    finish(start(code, config))
    assert reopened(config, "w").completed_tasks == ["t1"]


def test_ac2_a_run_of_another_id_sees_nothing(config: ExecutionConfig) -> None:
    worked(config, "one", "t1")
    assert reopened(config, "two").completed_tasks == []


def test_ac2_the_time_of_its_beginning_stays(config: ExecutionConfig) -> None:
    worked(config, "w", "t1")
    first = reopened(config, "w")
    worked(config, "w", "t2")
    again = reopened(config, "w")
    assert again.created_at == first.created_at
    assert again.updated_at > first.updated_at


def test_ac2_without_auto_restore_an_execution_starts_afresh(config: ExecutionConfig) -> None:
    worked(config, "w", "t1")
    with StatePersistence(config, "w", auto_restore=False) as persistence:
        assert persistence.state.completed_tasks == []
        persistence.mark_task_completed("t2")
        assert persistence.state.completed_tasks == ["t2"]
    assert reopened(config, "w").completed_tasks == ["t2"]


def test_ac2_looking_without_auto_restore_forgets_nothing(config: ExecutionConfig) -> None:
    worked(config, "w", "t1")
    with StatePersistence(config, "w", auto_restore=False) as persistence:
        assert persistence.state.completed_tasks == []
    assert reopened(config, "w").completed_tasks == ["t1"]


def test_ac2_a_checkpoint_of_a_fresh_start_holds_nothing_from_before(
    config: ExecutionConfig,
) -> None:
    worked(config, "w", "t1")
    with StatePersistence(config, "w", auto_restore=False) as persistence:
        persistence.checkpoint("fresh")
        persistence.mark_task_completed("t2")
        assert persistence.restore("fresh") is True
        assert persistence.state.completed_tasks == []
    lose_journal(config)
    assert reopened(config, "w").completed_tasks == []


def test_ac2_restore_latest_before_the_first_change_brings_it_back(
    config: ExecutionConfig,
) -> None:
    worked(config, "w", "t1")
    with StatePersistence(config, "w", auto_restore=False) as persistence:
        assert persistence.restore_latest() is True
        persistence.mark_task_completed("t2")
        assert persistence.state.completed_tasks == ["t1", "t2"]


def test_ac2_there_is_nothing_to_restore_in_a_new_run(config: ExecutionConfig) -> None:
    with StatePersistence(config, "w") as persistence:
        assert persistence.restore_latest() is False
        assert persistence.restore("cp_1") is False
        assert persistence.list_checkpoints() == []


# --- AC-3: every change is kept ------------------------------------------------------------------


def test_ac3_update_state_leaves_what_it_is_not_given(config: ExecutionConfig) -> None:
    with StatePersistence(config, "w") as persistence:
        persistence.update_state(phase="a", step=2, status="running")
        persistence.update_state(step=0)
        state = persistence.state
        assert (state.phase, state.step, state.status) == ("a", 0, "running")
        persistence.update_state()
        assert persistence.state is state


def test_ac3_a_field_that_does_not_exist_is_an_error(config: ExecutionConfig) -> None:
    with StatePersistence(config, "w") as persistence:
        with pytest.raises(TypeError, match="colour"):
            persistence.update_state(colour="red")
        with pytest.raises(TypeError, match=r"state\.step is a str"):
            persistence.update_state(step="3")  # type: ignore[arg-type]
        assert persistence.state.step == 0


def test_ac3_a_completed_task_is_not_pending_and_not_twice(config: ExecutionConfig) -> None:
    with StatePersistence(config, "w") as persistence:
        persistence.mark_task_pending("t")
        persistence.mark_task_pending("t")
        assert persistence.state.pending_tasks == ["t"]
        persistence.mark_task_completed("t", {"a": 1})
        persistence.mark_task_completed("t", {"b": 2})
        persistence.mark_task_pending("t")
        state = persistence.state
    assert (state.completed_tasks, state.pending_tasks) == (["t"], [])
    assert state.artifacts == {"a": 1, "b": 2}


#: Fields that cannot be, and where the error says they are wrong.
WRONG_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"phase": 3}, "state.phase is a int, and must be a str"),
    ({"phase": ErrorCategory.TIMEOUT}, "state.phase is a ErrorCategory, and must be a str"),
    ({"status": ["x"]}, "state.status is a list, and must be a str"),
    ({"step": "3"}, "state.step is a str, and must be a int"),
    ({"step": True}, "state.step is a bool, and must be a int"),
    ({"completed_tasks": "abc"}, "state.completed_tasks is a str, and must be a list"),
    ({"completed_tasks": ("a",)}, "state.completed_tasks is a tuple, and must be a list"),
    ({"completed_tasks": [["x"]]}, "state.completed_tasks[0] is a list, and must be a str"),
    ({"pending_tasks": ["a", 1]}, "state.pending_tasks[1] is a int, and must be a str"),
    ({"retry_counts": {"a": "b"}}, "state.retry_counts.a is a str, and must be a int"),
    ({"retry_counts": {"a": True}}, "state.retry_counts.a is a bool, and must be a int"),
    ({"retry_counts": {1: 1}}, "state.retry_counts has the key 1, a int, and must have only str"),
    ({"persona_states": {"p": 5}}, "state.persona_states.p is a int, and must be a dict"),
    ({"persona_states": {"a b": []}}, "state.persona_states['a b'] is a list, and must be a dict"),
    ({"persona_states": {None: {}}}, "state.persona_states has the key None"),
    ({"artifacts": [1]}, "state.artifacts is a list, and must be a dict"),
    ({"artifacts": {1: "x"}}, "state.artifacts has the key 1, a int, and must have only str"),
    ({"metrics": {("a",): 1}}, "state.metrics has the key ('a',), a tuple"),
    ({"metrics": None}, "state.metrics is a NoneType, and must be a dict"),
]


def test_ac3_wrong_fields_are_refused_before_anything_is_recorded(config: ExecutionConfig) -> None:
    worked(config, "w", "t")
    before = reopened(config, "w").to_dict()
    with StatePersistence(config, "w") as persistence:
        for changes, caught in WRONG_FIELDS:
            with pytest.raises(TypeError, match=re.escape(caught)):
                persistence.update_state(**{"phase": "new", **changes})
            assert persistence.state.to_dict() == before, changes
        persistence.checkpoint()
    assert reopened(config, "w").to_dict() == before


@for_each("changes, caught", WRONG_FIELDS)
def test_ac3_wrong_edits_are_refused_before_anything_is_recorded(
    config: ExecutionConfig, changes: dict[str, Any], caught: str
) -> None:
    worked(config, "w", "t")
    persistence = StatePersistence(config, "w")
    for name, value in changes.items():
        setattr(persistence.state, name, value)
    with pytest.raises(TypeError, match=re.escape(caught)):
        persistence.checkpoint()
    with pytest.raises(TypeError, match=re.escape(caught)):
        persistence.shutdown()
    state = reopened(config, "w")
    fresh = ExecutionState("w", completed_tasks=["t"])
    assert {name: getattr(state, name) for name in FIELDS} == {
        name: getattr(fresh, name) for name in FIELDS
    }


def test_ac3_wrong_edits_inside_the_state_are_refused_at_shutdown(config: ExecutionConfig) -> None:
    edits: list[Callable[[Any], object]] = [
        lambda state: state.completed_tasks.append([1]),
        lambda state: state.persona_states.update(p=None),
        lambda state: state.retry_counts.update(p="b"),
        lambda state: state.artifacts.update({1: 2}),
    ]
    for edit in edits:
        persistence = StatePersistence(config, "w")
        edit(persistence.state)
        with pytest.raises(TypeError, match=r"state\."):
            persistence.shutdown()
        assert reopened(config, "w").completed_tasks == []


def test_ac3_an_edit_that_is_equal_and_of_another_type_does_not_spoil_the_copy() -> None:
    with get_state_persistence("w") as persistence:
        persistence.update_state(step=1, retry_counts={"dev": 1})
        persistence.state.step = True
        persistence.state.retry_counts["dev"] = 1.0  # type: ignore[assignment]
        persistence.checkpoint()
    lose_journal(get_execution_config())
    loaded = load_state("w")
    assert loaded is not None
    assert (repr(loaded.step), repr(loaded.retry_counts)) == ("1", "{'dev': 1}")


def test_ac3_a_wrong_edit_does_not_keep_the_other_runs_from_their_copies_at_the_end(
    config: ExecutionConfig,
) -> None:
    code = """
runs = [StatePersistence(config, name) for name in ("a", "b", "c")]
for run in runs:
    run.mark_task_completed("t")
    run.state.step = "three" if args[0] == run.workflow_id else 3
"""
    for wrong in ("a", "b", "c"):
        process = start(code, config, wrong)
        caught = process.communicate(timeout=60)[1]
        assert process.returncode == 0
        assert f"run {wrong}: state.step is a str" in caught
        assert "Traceback" not in caught
        steps = {name: reopened(config, name).step for name in ("a", "b", "c")}
        assert {name for name, step in steps.items() if step == 3} >= {"a", "b", "c"} - {wrong}
        shutil.rmtree(state_folder(config))


@pytest.mark.parametrize("artifacts", [["a.py"], ["ab"], [], "out.py", "", 0, {1: "x"}])
def test_ac3_artifacts_that_are_no_dictionary_are_refused(
    config: ExecutionConfig, artifacts: Any
) -> None:
    with StatePersistence(config, "w") as persistence:
        with pytest.raises(TypeError, match=r"state\.artifacts "):
            persistence.mark_task_completed("t", artifacts)
        assert persistence.state.completed_tasks == []
        persistence.mark_task_completed("t", {})
        persistence.mark_task_completed("u", None)
    state = reopened(config, "w")
    assert (state.completed_tasks, state.artifacts) == (["t", "u"], {})


@pytest.mark.parametrize("shown", [None, 5, "ab", ["ab"], [("a", 1)]])
def test_ac3_what_a_persona_shows_is_a_dictionary(config: ExecutionConfig, shown: Any) -> None:
    with StatePersistence(config, "w") as persistence:
        with pytest.raises(TypeError, match=r"state\.persona_states\.dev is a .* must be a dict"):
            persistence.update_persona_state("dev", shown)
        assert persistence.state.persona_states == {}
        persistence.update_persona_state("dev", defaultdict(list, a=1))
    assert reopened(config, "w").persona_states == {"dev": {"a": 1}}


def test_ac3_saving_a_state_with_wrong_fields_is_an_error_and_saves_nothing() -> None:
    with pytest.raises(TypeError, match=r"state\.pending_tasks\[0\]"):
        save_state(ExecutionState("w", pending_tasks=[1]))  # type: ignore[list-item]
    with pytest.raises(StateCorruptionError, match=r"state\.pending_tasks\[0\]"):
        save_state({"workflow_id": "w", "pending_tasks": [1]})
    assert load_state("w") is None


@for_each("name", ["", None, 3, [1], {}, True, "\ud800", "a\udfffb"])
def test_ac3_a_task_or_persona_without_a_name_is_an_error(
    config: ExecutionConfig, name: Any
) -> None:
    with StatePersistence(config, "w") as persistence:
        for change in (
            persistence.mark_task_pending,
            persistence.mark_task_completed,
            persistence.increment_retry,
            lambda persona: persistence.update_persona_state(persona, {}),
        ):
            with pytest.raises(ConfigurationError, match=r"not empty|half a surrogate pair"):
                change(name)
        assert persistence._run.state.seq == 0


def test_ac3_retries_are_read_while_nobody_else_changes_them(config: ExecutionConfig) -> None:
    with StatePersistence(config, "w") as persistence:
        read_inside = []

        class Watched(dict[str, int]):
            def get(self, key: str, default: Any = None) -> Any:
                read_inside.append(persistence._mutex._is_owned())  # type: ignore[attr-defined]
                return super().get(key, default)

        persistence._run.state.retry_counts = Watched()
        assert persistence.get_retry_count("dev") == 0
    assert read_inside == [True]


def test_ac3_retries_are_counted_by_persona(config: ExecutionConfig) -> None:
    with StatePersistence(config, "w") as persistence:
        assert persistence.get_retry_count("dev") == 0
        assert [persistence.increment_retry("dev") for _ in range(3)] == [1, 2, 3]
        assert persistence.increment_retry("qa") == 1
        assert persistence.state.retry_counts == {"dev": 3, "qa": 1}


def test_ac3_a_personas_other_keys_stay(config: ExecutionConfig) -> None:
    with StatePersistence(config, "w") as persistence:
        persistence.update_persona_state("dev", {"status": "running", "tokens_used": 7})
        persistence.update_persona_state("dev", {"status": "success"})
        assert persistence.get_persona_state("dev") == {"status": "success", "tokens_used": 7}
        assert persistence.get_persona_state("nobody") is None


def test_ac3_what_get_persona_state_returns_is_the_callers(config: ExecutionConfig) -> None:
    with StatePersistence(config, "w") as persistence:
        persistence.update_persona_state("dev", {"history": [1]})
        persona_state(persistence, "dev")["history"].append(2)
        assert persistence.get_persona_state("dev") == {"history": [1]}


def test_ac3_values_come_back_as_the_same_types(config: ExecutionConfig) -> None:
    value = {
        "when": datetime(2030, 1, 2, 3, tzinfo=UTC),
        "wait": timedelta(seconds=1.5),
        "path": Path("a/b"),
        "raw": b"\0\xff",
        "pair": (1, "two"),
        "names": {"a", "b"},
        "price": Decimal("1.10"),
        "category": ErrorCategory.TIMEOUT,
        "finding": Finding("a.py", [1, 2]),
        1: "a key that is a number",
    }
    with StatePersistence(config, "w") as persistence:
        persistence.update_persona_state("dev", {"memory": value})
        persistence.mark_task_completed("t", {"result": value})
        persistence.checkpoint()
    with StatePersistence(config, "w") as persistence:
        assert persona_state(persistence, "dev")["memory"] == value
        assert persistence.state.artifacts["result"] == value
        assert isinstance(persistence.state.artifacts["result"]["pair"], tuple)
    lose_journal(config)
    with StatePersistence(config, "w") as persistence:
        assert persona_state(persistence, "dev")["memory"] == value
        assert persistence.state.artifacts["result"] == value


def test_ac3_a_value_that_cannot_be_stored_is_an_error_that_names_it(
    config: ExecutionConfig,
) -> None:
    with StatePersistence(config, "w") as persistence:
        with pytest.raises(EncodeError, match=r"persona_state\.memory\[1\]"):
            persistence.update_persona_state("dev", {"memory": [1, object()]})
        assert persistence.get_persona_state("dev") is None
        persistence.update_persona_state("dev", {"memory": [1]})
    assert reopened(config, "w").persona_states == {"dev": {"memory": [1]}}


def test_ac3_what_was_accepted_can_be_checkpointed_however_deep(config: ExecutionConfig) -> None:
    """The limit on nesting must be met when a value comes in, not when the whole is written."""
    accepted = []
    with StatePersistence(config, "w") as persistence:
        for depth in [*range(85, 105), 49]:
            value: Any = depth
            for _ in range(depth):
                value = {1: (value,)} if depth == 49 else [value]  # each a tag of several levels
            try:
                persistence.update_persona_state("dev", {f"d{depth}": value})
                persistence.mark_task_completed(f"t{depth}", {f"d{depth}": value})
                accepted.append(depth)
            except EncodeError:
                continue
            persistence.checkpoint()
    assert accepted[0] == 85
    assert accepted[-1] == 49
    lose_journal(config)
    assert len(reopened(config, "w").persona_states["dev"]) >= len(accepted)


def test_ac3_edits_of_the_state_object_are_recorded_at_the_next_checkpoint(
    config: ExecutionConfig,
) -> None:
    with StatePersistence(config, "w") as persistence:
        persistence.update_persona_state("dev", {"memory": [1]})
        persistence.state.phase = "edited"
        persistence.state.metrics["cost"] = 2
        persistence.state.persona_states["dev"]["memory"].append(2)
        persistence.state.completed_tasks.append("t")
        persistence.checkpoint()
        code = """
os.environ.update(MAESTRO_STATE_DIR=state_dir)
reset_execution_config()
s = load_state("w")
print(json.dumps([s.phase, s.metrics, s.persona_states, s.completed_tasks]))
"""
        seen = json.loads(finish(start(code, config)))
    assert seen == ["edited", {"cost": 2}, {"dev": {"memory": [1, 2]}}, ["t"]]


def test_ac3_edits_are_recorded_at_shutdown_too(config: ExecutionConfig) -> None:
    with StatePersistence(config, "w") as persistence:
        persistence.state.update(phase="edited")
    assert reopened(config, "w").phase == "edited"


def test_ac3_an_edit_and_a_change_by_method_do_not_undo_each_other(
    config: ExecutionConfig,
) -> None:
    with StatePersistence(config, "w") as persistence:
        persistence.mark_task_completed("first")
        persistence.update_persona_state("dev", {"a": 1})
        state = persistence.state
        state.completed_tasks.append("by edit")
        state.persona_states["dev"]["b"] = 2
        state.retry_counts["qa"] = 9
        persistence.mark_task_completed("by method")
        persistence.update_persona_state("dev", {"c": 3})
        persistence.increment_retry("dev")
        persistence.checkpoint()
    seen = reopened(config, "w")
    assert sorted(seen.completed_tasks) == ["by edit", "by method", "first"]
    assert seen.persona_states == {"dev": {"a": 1, "b": 2, "c": 3}}
    assert seen.retry_counts == {"dev": 1, "qa": 9}


def test_ac3_what_an_edit_removes_is_gone(config: ExecutionConfig) -> None:
    with StatePersistence(config, "w") as persistence:
        persistence.update_state(metrics={"a": 1, "b": 2}, pending_tasks=["x", "y"])
        state = persistence.state
        del state.metrics["a"]
        state.pending_tasks.remove("x")
        persistence.mark_task_pending("z")
        persistence.checkpoint()
    seen = reopened(config, "w")
    assert (seen.metrics, seen.pending_tasks) == ({"b": 2}, ["y", "z"])


def test_ac3_an_edit_that_cannot_be_stored_is_an_error_until_it_is_fixed(
    config: ExecutionConfig,
) -> None:
    with StatePersistence(config, "w") as persistence:
        state = persistence.state
        state.step = "three"  # type: ignore[assignment]
        for _ in range(2):
            with pytest.raises(TypeError, match=r"state\.step"):
                persistence.checkpoint()
        state.step = 3
        state.metrics["lock"] = threading.Lock()
        with pytest.raises(EncodeError, match=r"state\.metrics\.lock"):
            persistence.checkpoint()
        del state.metrics["lock"]
        persistence.checkpoint()
    assert reopened(config, "w").step == 3


def test_ac3_two_objects_of_one_process_share_the_run(config: ExecutionConfig) -> None:
    with StatePersistence(config, "w") as first, StatePersistence(config, "w") as second:
        assert second.state.completed_tasks == []
        first.mark_task_completed("t1")
        first.update_persona_state("dev", {"a": 1})
        first.increment_retry("dev")
        assert second.state.completed_tasks == ["t1"]
        assert second.get_persona_state("dev") == {"a": 1}
        assert second.get_retry_count("dev") == 1
        second.mark_task_completed("t2")
        assert first.state.completed_tasks == ["t1", "t2"]
    assert reopened(config, "w").completed_tasks == ["t1", "t2"]


def test_ac3_the_first_to_shut_down_does_not_take_the_run_from_the_second(
    config: ExecutionConfig,
) -> None:
    first, second = StatePersistence(config, "w"), StatePersistence(config, "w")
    first.shutdown()
    first.shutdown()
    second.mark_task_completed("t")
    second.shutdown()
    assert reopened(config, "w").completed_tasks == ["t"]


def test_ac3_many_threads_lose_nothing(config: ExecutionConfig) -> None:
    errors: list[BaseException] = []
    with StatePersistence(config, "w") as persistence:

        def work(number: int) -> None:
            try:
                for turn in range(20):
                    persistence.increment_retry("dev")
                    persistence.mark_task_completed(f"t{number}-{turn}", {f"a{number}": turn})
                    persistence.update_persona_state("dev", {f"k{number}": turn})
                    _ = persistence.state.completed_tasks
                    if turn == 10:
                        persistence.checkpoint()
            except BaseException as error:  # noqa: BLE001 - told to the test below
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    seen = reopened(config, "w")
    assert seen.retry_counts == {"dev": 120}
    assert len(seen.completed_tasks) == len(set(seen.completed_tasks)) == 120
    assert seen.persona_states["dev"] == {f"k{number}": 19 for number in range(6)}
    assert seen.artifacts == {f"a{number}": 19 for number in range(6)}


# --- AC-4: it survives a kill --------------------------------------------------------------------

WORKER = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where it was ignored: nohup ... &
side = args[0]
with StatePersistence(config, "w") as p:
    for number in range(10):
        task = f"task-{number}"
        if task in p.state.completed_tasks:
            continue
        with open(side, "a") as file:
            file.write(task + "\\n")
        if number == 5 and "pause" in args:
            p.increment_retry("dev")
            print("in the middle", flush=True)
            time.sleep(60)
        p.mark_task_completed(task, {task: number})
        p.update_persona_state("dev", {"history": (p.get_persona_state("dev") or {}).get("history", []) + [number]})
        if number == 2:
            p.checkpoint()
"""


def test_ac4_survives_kill_and_resumes(config: ExecutionConfig, tmp_path: Path) -> None:
    executions = tmp_path / "executions"
    first = start(WORKER, config, str(executions), "pause")
    read_until(first, "in the middle")
    kill(first, signal.SIGKILL)
    assert first.returncode == -signal.SIGKILL
    started = executions.read_text().split()
    assert started == [f"task-{number}" for number in range(6)]

    finish(start(WORKER, config, str(executions)))

    done = executions.read_text().split()
    finished_before = [f"task-{number}" for number in range(5)]
    assert [done.count(task) for task in finished_before] == [1] * 5
    assert done[6:] == [f"task-{number}" for number in range(5, 10)]
    state = reopened(config, "w")
    assert state.completed_tasks == [f"task-{number}" for number in range(10)]
    assert state.artifacts == {f"task-{number}": number for number in range(10)}
    assert state.persona_states == {"dev": {"history": list(range(10))}}
    assert state.retry_counts == {"dev": 1}


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_ac4_survives_a_graceful_signal_and_resumes(
    config: ExecutionConfig, tmp_path: Path, how: signal.Signals
) -> None:
    executions = tmp_path / "executions"
    first = start(WORKER, config, str(executions), "pause")
    read_until(first, "in the middle")
    kill(first, how)
    assert first.returncode != 0
    finish(start(WORKER, config, str(executions)))
    done = executions.read_text().split()
    assert [done.count(f"task-{number}") for number in range(10)] == [1] * 5 + [2] + [1] * 4


def test_ac4_a_second_process_learns_who_holds_the_run(config: ExecutionConfig) -> None:
    before = datetime.now(UTC)
    with holding(config, "w") as process, pytest.raises(RunLeasedError) as caught:
        StatePersistence(config, "w")
    assert caught.value.pid == process.pid
    assert caught.value.host == os.uname().nodename
    assert abs(caught.value.since - before) < timedelta(seconds=30)
    assert str(process.pid) in str(caught.value)


def test_ac4_a_refused_opener_leaves_no_trace_and_may_try_again(config: ExecutionConfig) -> None:
    with holding(config, "w"):
        for _ in range(3):
            with pytest.raises(RunLeasedError):
                StatePersistence(config, "w")
        worked(config, "another", "t")
    assert reopened(config, "w").completed_tasks == []


def test_ac4_after_a_kill_the_next_opener_gets_the_run_at_once(config: ExecutionConfig) -> None:
    with holding(config, "w") as process:
        kill(process)
        started = time.monotonic()
        worked(config, "w", "t")
        assert time.monotonic() - started < 5  # a third of a lease


# --- only the JSON files are left ----------------------------------------------------------------


def test_with_the_journal_gone_a_run_resumes_and_says_from_when(
    config: ExecutionConfig, caplog: pytest.LogCaptureFixture
) -> None:
    before = datetime.now(UTC)
    worked(config, "w", "t1", "t2")
    lose_journal(config)
    with caplog.at_level(logging.WARNING), StatePersistence(config, "w") as persistence:
        assert persistence.state.completed_tasks == ["t1", "t2"]
        assert persistence.restored is not None
        saved_at = persistence.restored.saved_at
        assert before <= datetime.fromisoformat(saved_at) <= datetime.now(UTC)
        persistence.mark_task_completed("t3")
    (record,) = caplog.records
    assert "w had no journal" in record.message
    assert saved_at in record.message
    assert persistence.restored.source in record.message
    with StatePersistence(config, "w") as persistence:
        assert persistence.restored is None
        assert persistence.state.completed_tasks == ["t1", "t2", "t3"]


def test_with_only_checkpoint_files_left_a_run_resumes(config: ExecutionConfig) -> None:
    worked(config, "w", "t1", "t2")
    (newest,) = checkpoint_files(config, "w")
    shutil.rmtree(state_folder(config))
    with StatePersistence(config, "w") as persistence:
        assert persistence.state.completed_tasks == ["t1", "t2"]
        assert persistence.restored is not None
        assert newest.name in persistence.restored.source


def test_with_only_the_state_file_left_a_run_resumes(config: ExecutionConfig) -> None:
    worked(config, "w", "t1", "t2", checkpoint=False)
    lose_journal(config)
    assert checkpoint_files(config, "w") == []
    with StatePersistence(config, "w") as persistence:
        assert persistence.state.completed_tasks == ["t1", "t2"]
        assert persistence.restored is not None
        assert persistence.restored.source == str(persistence.get_state_path())


def test_a_folder_copied_to_another_machine_resumes_there(
    config: ExecutionConfig, tmp_path: Path
) -> None:
    worked(config, "w", "t1")
    path = tmp_path / "elsewhere"
    shutil.copytree(state_folder(config) / "runs", path / "runs")
    other = ExecutionConfig(
        state=StateConfig(state_dir=str(path), checkpoint_dir=str(tmp_path / "new"))
    )
    assert reopened(other, "w").completed_tasks == ["t1"]


def test_with_both_present_the_journal_wins(config: ExecutionConfig) -> None:
    with StatePersistence(config, "w") as persistence:
        persistence.mark_task_completed("t1")
        persistence.checkpoint()
        old = persistence.get_state_path().read_bytes()
        persistence.mark_task_completed("t2")
    persistence.get_state_path().write_bytes(old)
    with StatePersistence(config, "w") as persistence:
        assert persistence.state.completed_tasks == ["t1", "t2"]
        assert persistence.restored is None


def test_the_newer_of_state_file_and_checkpoint_is_used(config: ExecutionConfig) -> None:
    with StatePersistence(config, "w") as persistence:
        persistence.mark_task_completed("t1")
        persistence.checkpoint()
        old = persistence.get_state_path().read_bytes()
        persistence.mark_task_completed("t2")
        persistence.checkpoint()
    persistence.get_state_path().write_bytes(old)
    lose_journal(config)
    assert reopened(config, "w").completed_tasks == ["t1", "t2"]


def test_a_stale_file_with_a_lower_fence_is_ignored(config: ExecutionConfig) -> None:
    """A process that hung, was taken over and woke up writes late: its file is not the newest."""
    with StatePersistence(config, "w") as persistence:
        persistence.mark_task_completed("stale")
        for number in range(40):
            persistence.increment_retry(f"p{number}")
        persistence.checkpoint("stale")
        late_state = persistence.get_state_path().read_bytes()
    (stale,) = checkpoint_files(config, "w")
    with StatePersistence(config, "w", auto_restore=False) as persistence:
        persistence.mark_task_completed("good")
        persistence.checkpoint("good")
    # The late ones: written last, and with higher numbers of their own.
    run = documents.unseal(late_state, "execution_state", "it")["run"] | {"seq": 999}
    late_state = documents.seal("execution_state", {"run": run})
    persistence.get_state_path().write_bytes(late_state)
    stale.rename(stale.with_name(stale.name.replace(".00000001~", ".00000099~")))
    lose_journal(config)
    seen = reopened(config, "w")
    assert (seen.completed_tasks, seen.retry_counts) == (["good"], {})


def test_after_a_lost_journal_the_new_files_are_the_newest(config: ExecutionConfig) -> None:
    """Fencing numbers begin anew with a journal, and the files of the old one have high ones."""
    for number in range(4):
        worked(config, "w", f"old-{number}")
    for loss in range(3):
        lose_journal(config)
        worked(config, "w", f"after-loss-{loss}")
        worked(config, "w", f"and-again-{loss}")
    lose_journal(config)
    shutil.rmtree(state_folder(config) / "runs")
    done = reopened(config, "w").completed_tasks
    assert done[:4] == [f"old-{number}" for number in range(4)]
    assert done[4:] == [f"{what}-{n}" for n in range(3) for what in ("after-loss", "and-again")]


def test_after_a_lost_journal_a_fresh_start_is_the_newest_too(config: ExecutionConfig) -> None:
    for number in range(4):
        worked(config, "w", f"old-{number}")
    lose_journal(config)
    with StatePersistence(config, "w", auto_restore=False) as persistence:
        persistence.mark_task_completed("new")
        persistence.checkpoint()
    lose_journal(config)
    assert reopened(config, "w").completed_tasks == ["new"]


def test_with_an_older_journal_brought_back_new_checkpoints_are_stored(
    config: ExecutionConfig, tmp_path: Path
) -> None:
    config.state.max_checkpoints_per_workflow = 2
    worked(config, "w", "t1")
    shutil.copytree(state_folder(config), tmp_path / "backup")
    for number in range(5):
        worked(config, "w", f"later-{number}")
    shutil.rmtree(state_folder(config))
    shutil.copytree(tmp_path / "backup", state_folder(config))
    with StatePersistence(config, "w") as persistence:
        name = persistence.checkpoint()
        assert persistence.list_checkpoints()[0] == name
        assert persistence.restore(name) is True


def test_a_torn_newest_checkpoint_is_named_set_aside_and_the_one_before_it_used(
    config: ExecutionConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with StatePersistence(config, "w") as persistence:
        persistence.mark_task_completed("t1")
        persistence.checkpoint("good")
        persistence.mark_task_completed("t2")
        persistence.checkpoint("torn")
    newest = checkpoint_files(config, "w")[-1]
    half = newest.read_bytes()[: newest.stat().st_size // 2]
    newest.write_bytes(half)
    shutil.rmtree(state_folder(config))
    with caplog.at_level(logging.WARNING):
        seen = reopened(config, "w")
    assert seen.completed_tasks == ["t1"]
    aside = newest.with_name(f"{newest.name}.damaged-1")
    assert aside.read_bytes() == half
    assert not newest.exists()
    first = caplog.records[0].message
    assert "torn" in first
    assert newest.name in first
    assert str(aside) in first


def test_an_altered_state_file_is_set_aside_and_the_checkpoint_used(
    config: ExecutionConfig, caplog: pytest.LogCaptureFixture
) -> None:
    worked(config, "w", "t1")
    path = state_folder(config) / "runs" / "w" / "execution_state.json"
    path.write_bytes(path.read_bytes().replace(b'"t1"', b'"t9"'))
    lose_journal(config)
    with caplog.at_level(logging.WARNING):
        assert reopened(config, "w").completed_tasks == ["t1"]
    assert path.with_name("execution_state.json.damaged-1").exists()
    assert "it was altered" in caplog.records[0].message


def test_a_checkpoint_that_is_no_copy_of_a_run_is_passed_over(config: ExecutionConfig) -> None:
    worked(config, "w", "t1")
    CheckpointManager(config.state.checkpoint_dir).create_checkpoint("w", WorkflowState("w"))
    shutil.rmtree(state_folder(config))
    assert reopened(config, "w").completed_tasks == ["t1"]


def test_the_file_of_another_run_is_not_taken_for_ours(config: ExecutionConfig) -> None:
    worked(config, "theirs", "t1")
    runs = state_folder(config) / "runs"
    shutil.copytree(runs / "theirs", runs / "ours")
    assert reopened(config, "ours").completed_tasks == []
    assert (runs / "ours" / "execution_state.json.damaged-1").exists()


def test_a_copy_of_a_newer_format_is_refused_and_left_alone(config: ExecutionConfig) -> None:
    path = state_folder(config) / "runs" / "w" / "execution_state.json"
    path.parent.mkdir(parents=True)
    sealed = documents.seal("execution_state", {"run": {}})
    text = sealed.replace(b'"format":1', b'"format":2')
    inside = text[len(b'{"document":') : text.rindex(b',"sha256"')]
    digest = hashlib.sha256(inside).hexdigest().encode()
    path.write_bytes(b'{"document":' + inside + b',"sha256":"' + digest + b'"}\n')
    written = path.read_bytes()
    with pytest.raises(NewerFormatError, match="format 2"):
        StatePersistence(config, "w")
    assert path.read_bytes() == written
    assert reopened(config, "another").completed_tasks == []


def test_a_copy_whose_values_were_exchanged_is_not_used_although_its_own_digest_is_right(
    config: ExecutionConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with StatePersistence(config, "w") as persistence:
        persistence.mark_task_completed("t", {"answer": 42})
        persistence.checkpoint()
        persistence.mark_task_completed("later")
    path = persistence.get_state_path()
    run = documents.unseal(path.read_bytes(), "execution_state", "it")["run"]
    run["entries"][0]["value"]["answer"] = 43
    path.write_bytes(documents.seal("execution_state", {"run": run}))
    lose_journal(config)
    with caplog.at_level(logging.WARNING):
        seen = reopened(config, "w")
    assert (seen.completed_tasks, seen.artifacts) == (["t"], {"answer": 42})
    assert path.with_name("execution_state.json.damaged-1").exists()
    assert "entries[0]" in caplog.records[0].message


def test_completed_steps_and_growing_values_survive_in_the_json_copy(
    config: ExecutionConfig,
) -> None:
    """What executors append under the same hold is part of the run, and of its copies."""
    messages: list[str] = []
    results = []
    with StatePersistence(config, "w") as persistence:
        for number in range(1, 31):
            messages.append(f"{number}:" + "x" * 4000)
            value = codec.encode({"messages": messages})
            results.append(value.data)
            facts = codec.dump_canonical({"name": "chat", "persona": "dev"})
            started = NewEntry(
                EntryKind.ATTEMPT_STARTED,
                step=number,
                attempt=1,
                facts=facts,
                value=codec.encode({"turn": number}),
                identity=number.to_bytes(32, "big"),
            )
            completed = NewEntry(
                EntryKind.STEP_COMPLETED, number, 1, value=value, family="dev/chat"
            )
            (appended,) = persistence._run.store.append(
                [Append(persistence._run.lease, [started, completed])]
            )
            assert isinstance(appended, list)
            assert appended[-1].seq == 2 * number
        unfinished = NewEntry(EntryKind.ATTEMPT_STARTED, step=31, attempt=1, identity=b"u" * 32)
        persistence._run.store.append([Append(persistence._run.lease, [unfinished])])
        persistence.checkpoint()
        size = persistence.get_state_path().stat().st_size
    assert size < 3 * len(results[-1])
    lose_journal(config)
    with StatePersistence(config, "w") as persistence:
        steps = persistence._run.state.steps
        assert sorted(steps) == list(range(1, 32))
        for number, result in enumerate(results, 1):
            step = persistence._run.state.by_identity[number.to_bytes(32, "big")]
            assert step.completed is not None
            assert persistence._run.store.load(step.completed) == result
        assert steps[31].completed is None
        assert steps[31].starts == 1


def test_a_disk_that_does_not_say_whether_a_copy_is_a_link_is_an_error_of_ours(
    config: ExecutionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_path: Path) -> bool:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "is_symlink", broken)
    with pytest.raises(FolderError, match="cannot be examined: Input/output error"):
        StatePersistence(config, "w")
    monkeypatch.undo()
    StatePersistence(config, "w").shutdown()


def test_a_fresh_start_is_not_forgotten_when_its_first_write_fails(
    config: ExecutionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StatePersistence(config, "w") as persistence:
        persistence.mark_task_completed("old")
    with StatePersistence(config, "w", auto_restore=False) as persistence:
        with monkeypatch.context() as busy:
            busy.setattr(SqliteStore, "append", always_busy)
            with pytest.raises(StoreBusyError):
                persistence.mark_task_completed("new")
        persistence.mark_task_completed("new")
        assert persistence.state.completed_tasks == ["new"]


def always_busy(*_arguments: Any, **_options: Any) -> None:
    raise StoreBusyError("another process is in the way")


# --- checkpoints ---------------------------------------------------------------------------------


def test_checkpoints_made_within_one_second_do_not_overwrite_each_other(
    config: ExecutionConfig,
) -> None:
    with StatePersistence(config, "w") as persistence:
        made = []
        for step in range(5):
            persistence.update_state(step=step)
            made.append(persistence.checkpoint())
        assert len(set(made)) == 5
        assert persistence.list_checkpoints() == made[::-1]
        for step, name in enumerate(made):
            assert persistence.restore(name)
            assert persistence.state.step == step


def test_restore_goes_back_to_a_checkpoint_and_the_journal_remembers(
    config: ExecutionConfig,
) -> None:
    with StatePersistence(config, "w") as persistence:
        persistence.mark_task_completed("t1")
        assert persistence.checkpoint("before-deploy") == "before-deploy"
        persistence.mark_task_completed("t2")
        assert persistence.restore("before-deploy") is True
        assert persistence.state.completed_tasks == ["t1"]
        persistence.mark_task_completed("t3")
    assert reopened(config, "w").completed_tasks == ["t1", "t3"]


def test_a_checkpoint_of_the_same_name_replaces_the_first(config: ExecutionConfig) -> None:
    with StatePersistence(config, "w") as persistence:
        persistence.update_state(step=1)
        persistence.checkpoint("here")
        persistence.update_state(step=2)
        persistence.checkpoint("here")
        assert persistence.list_checkpoints() == ["here"]
        persistence.update_state(step=3)
        persistence.restore("here")
        assert persistence.state.step == 2


def test_restoring_again_and_again_does_not_pile_up(config: ExecutionConfig) -> None:
    with StatePersistence(config, "w") as persistence:
        for number in range(10):
            persistence.mark_task_completed(f"t{number}")
        sizes = []
        for _ in range(8):
            assert persistence.restore(persistence.checkpoint())
            sizes.append(persistence.get_state_path().stat().st_size)
        assert max(sizes) < 1.2 * min(sizes)
        assert len(persistence.state.completed_tasks) == 10


def test_restoring_a_torn_checkpoint_is_an_error_and_changes_nothing(
    config: ExecutionConfig,
) -> None:
    with StatePersistence(config, "w") as persistence:
        persistence.update_state(step=1)
        persistence.checkpoint("torn")
        persistence.update_state(step=2)
        (path,) = checkpoint_files(config, "w")
        path.write_bytes(path.read_bytes()[:-10])
        with pytest.raises(StateCorruptionError, match="torn"):
            persistence.restore("torn")
        assert persistence.state.step == 2
        persistence.update_state(step=3)
    assert reopened(config, "w").step == 3


def test_no_more_checkpoints_are_stored_than_configured(config: ExecutionConfig) -> None:
    config.state.max_checkpoints_per_workflow = 3
    with StatePersistence(config, "w") as persistence, StatePersistence(config, "x") as other:
        other.checkpoint("theirs")
        made = [persistence.checkpoint() for _ in range(7)]
        assert persistence.list_checkpoints() == made[:3:-1]
        assert len(checkpoint_files(config, "w")) == 3
        assert other.list_checkpoints() == ["theirs"]
        assert persistence.restore(made[0]) is False


def test_the_state_file_is_written_by_the_clock_too(
    config: ExecutionConfig,
) -> None:
    config.state.auto_checkpoint_interval_seconds = 0.001
    persistence = StatePersistence(config, "w")
    time.sleep(0.01)
    persistence.mark_task_completed("t1")
    copier().flush(persistence.run.store)  # it is written in a thread
    body = documents.unseal(persistence.get_state_path().read_bytes(), "execution_state", "it")
    assert body["run"]["state"]["completed_tasks"] == ["t1"]
    persistence.shutdown()


# --- hostile names -------------------------------------------------------------------------------

HOSTILE = [
    "../x",
    "..",
    ".",
    "/etc/x",
    "a/b",
    "a\0b",
    "a\nb",
    "",
    "a" * 200,
    "-x",
    ".x",
    "ä",
    "%2e",
]


@for_each("name", HOSTILE)
def test_a_hostile_workflow_id_is_refused_and_nothing_is_written(
    config: ExecutionConfig, tmp_path: Path, name: str
) -> None:
    worked(config, "good", "t")
    before = all_files(tmp_path)
    with pytest.raises(InvalidIdentifierError):
        StatePersistence(config, name)
    assert all_files(tmp_path) - before == set()


@for_each("name", HOSTILE)
def test_a_hostile_checkpoint_id_is_refused_and_nothing_is_written(
    config: ExecutionConfig, tmp_path: Path, name: str
) -> None:
    with StatePersistence(config, "w") as persistence:
        persistence.checkpoint()
        before = all_files(tmp_path)
        with pytest.raises(InvalidIdentifierError):
            persistence.checkpoint(name)
        with pytest.raises(InvalidIdentifierError):
            persistence.restore(name)
        assert all_files(tmp_path) == before


def test_loading_a_hostile_workflow_id_touches_no_file_outside(tmp_path: Path) -> None:
    get_state_persistence("w").shutdown()
    runs = Path(get_execution_config().state.state_dir) / "runs"
    runs.mkdir(exist_ok=True)
    target = runs.parent / "target" / "execution_state.json"
    target.parent.mkdir()
    target.write_text("{}")
    with pytest.raises(InvalidIdentifierError):
        load_state("../target")
    assert [path.name for path in target.parent.iterdir()] == ["execution_state.json"]


def test_a_run_folder_that_is_a_link_is_not_followed(
    config: ExecutionConfig, tmp_path: Path
) -> None:
    worked(config, "w", "t")
    lose_journal(config)
    folder = state_folder(config) / "runs" / "w"
    shutil.move(folder, tmp_path / "away")
    folder.symlink_to(tmp_path / "away")
    before = all_files(tmp_path / "away")
    with pytest.raises(MaestroError, match="symbolic link"):
        StatePersistence(config, "w")
    assert all_files(tmp_path / "away") == before


# --- without persistence -------------------------------------------------------------------------


def test_without_persistence_nothing_is_written_anywhere(
    tmp_path: Path, home_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("state", "checkpoints"):
        monkeypatch.setattr(
            f"maestro_hive.engine.config.DEFAULT_{name.upper().rstrip('S')}_DIR",
            str(tmp_path / "default" / name),
        )
    monkeypatch.delenv("MAESTRO_STATE_DIR")
    monkeypatch.delenv("MAESTRO_CHECKPOINT_DIR")
    monkeypatch.chdir(tmp_path)
    config = ExecutionConfig(
        state=StateConfig(enable_persistence=False, auto_checkpoint_interval_seconds=0.0001)
    )
    assert config.state.state_dir.startswith(str(tmp_path))
    with StatePersistence(config, "w") as persistence:
        persistence.update_state(phase="x")
        time.sleep(0.001)
        persistence.mark_task_completed("t1", {"a": 1})
        persistence.update_persona_state("dev", {"m": ["x" * 5000]})
        name = persistence.checkpoint()
        persistence.mark_task_completed("t2")
        assert persistence.list_checkpoints() == [name]
        assert persistence.restore(name) is True
        assert persistence.state.completed_tasks == ["t1"]
        with pytest.raises(ConfigurationError, match="enable_persistence"):
            persistence.get_state_path()
    assert all_files(tmp_path) == set()


# --- trouble -------------------------------------------------------------------------------------


def test_a_full_disk_is_an_error_and_never_success(small_disk: Path) -> None:
    state = StateConfig(
        state_dir=str(small_disk / "state"), checkpoint_dir=str(small_disk / "checkpoints")
    )
    config = ExecutionConfig(state=state)
    acknowledged: list[str] = []
    persistence = StatePersistence(config, "w")

    def fill() -> None:
        for number in range(500):
            persistence.mark_task_completed(f"t{number}", {f"a{number}": os.urandom(700).hex()})
            acknowledged.append(f"t{number}")

    with pytest.raises(MaestroError, match=r"full|No space"):
        fill()
    with pytest.raises(StorageError):
        persistence.mark_task_completed("one more")
    with pytest.raises(MaestroError):
        persistence.shutdown()
    assert len(acknowledged) > 2
    subprocess.run(["mount", "-o", "remount,size=4m", str(small_disk)], check=True)
    seen = reopened(config, "w").completed_tasks
    assert seen[: len(acknowledged)] == acknowledged
    assert len(seen) <= len(acknowledged) + 1


def test_a_checkpoint_for_which_there_is_no_room_is_an_error(
    small_disk: Path, tmp_path: Path
) -> None:
    state = StateConfig(
        state_dir=str(tmp_path / "state"), checkpoint_dir=str(small_disk / "checkpoints")
    )
    config = ExecutionConfig(state=state)
    with StatePersistence(config, "w") as persistence:
        persistence.update_state(step=1)
        name = persistence.checkpoint()
        (small_disk / "filler").write_bytes(b"x" * 200_000)
        persistence.update_state(metrics={"large": "y" * 100_000})
        with pytest.raises(StorageError, match="No space"):
            persistence.checkpoint()
        assert persistence.list_checkpoints() == [name]
        assert [path.name for path in (small_disk / "checkpoints" / "w").iterdir()] == [
            path.name for path in checkpoint_files(config, "w")
        ]
        persistence.update_state(step=2)  # the journal is on another disk, and goes on
    assert reopened(config, "w").step == 2


def test_shutting_down_twice_is_no_error_and_use_afterwards_is_a_clear_one(
    config: ExecutionConfig,
) -> None:
    persistence = StatePersistence(config, "w")
    persistence.mark_task_completed("t")
    persistence.shutdown()
    persistence.shutdown()
    for use in (
        lambda: persistence.update_state(phase="x"),
        lambda: persistence.mark_task_pending("x"),
        lambda: persistence.mark_task_completed("x"),
        lambda: persistence.increment_retry("x"),
        lambda: persistence.update_persona_state("x", {}),
        persistence.checkpoint,
        persistence.restore_latest,
        lambda: persistence.restore("cp"),
    ):
        with pytest.raises(StorageError, match="'w' was shut down; open it again"):
            use()
    assert persistence.state.completed_tasks == ["t"]


def test_the_context_manager_shuts_down_also_after_an_error(config: ExecutionConfig) -> None:
    opened = []

    def work() -> None:
        with StatePersistence(config, "w") as persistence:
            opened.append(persistence)
            persistence.mark_task_completed("t")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    with pytest.raises(StorageError, match="shut down"):
        opened[0].checkpoint()
    assert reopened(config, "w").completed_tasks == ["t"]


# --- the functions -------------------------------------------------------------------------------


def test_save_and_load_use_the_folders_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        monkeypatch.setenv("MAESTRO_STATE_DIR", str(tmp_path / name / "s"))
        monkeypatch.setenv("MAESTRO_CHECKPOINT_DIR", str(tmp_path / name / "c"))
        reset_execution_config()
        assert load_state("w") is None
        checkpoint = save_state(ExecutionState("w", phase=name, completed_tasks=["t"]))
        assert (tmp_path / name / "s" / "journal.db").exists()
        assert len(list((tmp_path / name / "c" / "w").glob(f"*{checkpoint}.json"))) == 1
    loaded = load_state("w")
    assert loaded is not None
    assert (loaded.phase, loaded.completed_tasks) == ("two", ["t"])


def test_save_takes_a_dictionary_another_id_and_no_checkpoint(tmp_path: Path) -> None:
    state = ExecutionState("w", metrics={"a": 1})
    assert save_state(state.to_dict(), workflow_id="other", checkpoint=False) == "other"
    loaded = load_state("other")
    assert loaded is not None
    assert loaded.workflow_id == "other"
    assert loaded.metrics == {"a": 1}
    assert load_state("w") is None
    assert not list((tmp_path / "environment" / "checkpoints").rglob("*.json"))


def test_saving_an_altered_dictionary_is_an_error() -> None:
    data = ExecutionState("w").to_dict() | {"step": 4}
    with pytest.raises(StateCorruptionError):
        save_state(data)
    assert load_state("w") is None


def test_load_works_while_another_process_holds_the_run() -> None:
    shared = get_execution_config()
    with holding(shared, "w"):
        assert load_state("w") is None
    save_state(ExecutionState("w", phase="x"))
    with holding(shared, "w"):
        loaded = load_state("w")
    assert loaded is not None
    assert loaded.phase == "x"


def test_load_without_a_journal_reads_the_copies_and_keeps_types() -> None:
    finding = Finding("a.py", [3])
    with get_state_persistence("w") as persistence:
        persistence.update_persona_state("dev", {"finding": finding, "pair": (1, 2)})
        persistence.checkpoint()
        whole = persistence.state.to_dict()
    lose_journal(get_execution_config())
    loaded = load_state("w")
    assert loaded is not None
    assert loaded.persona_states["dev"] == {"finding": finding, "pair": (1, 2)}
    assert loaded.to_dict() == whole


def test_get_state_persistence_resumes_or_not_as_it_is_told() -> None:
    with get_state_persistence("w") as persistence:
        persistence.update_state(step=5)
    with get_state_persistence("w", auto_restore=False) as persistence:
        assert persistence.state.step == 0
    with get_state_persistence("w") as persistence:
        assert persistence.state.step == 5
    with get_state_persistence() as persistence:
        assert persistence.workflow_id.startswith("wf_")


def test_a_run_of_the_same_name_in_another_folder_is_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MAESTRO_CHECKPOINT_DIR", raising=False)
    one, two = (
        ExecutionConfig(state=StateConfig(state_dir=str(tmp_path / name))) for name in ("1", "2")
    )
    with StatePersistence(one, "build") as persistence:
        persistence.mark_task_completed("compile")
        persistence.checkpoint()
    with StatePersistence(two, "build") as persistence:
        assert persistence.state.completed_tasks == []
        assert persistence.restored is None
        assert persistence.list_checkpoints() == []
