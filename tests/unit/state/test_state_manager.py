"""Keys and values: one manager per folder, seen by every process, told to whoever asked."""

from __future__ import annotations

import logging
import shutil
import sys
import threading
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import maestro_hive
from maestro_hive.core import state_manager as door
from maestro_hive.kernel.errors import (
    ConfigurationError,
    DocumentCorruptError,
    EncodeError,
    InvalidIdentifierError,
    StorageError,
    StoreFailedError,
)
from maestro_hive.maestro.state import codec, state_manager
from maestro_hive.maestro.state.records import Breaker, EntryKind, NewEntry
from maestro_hive.maestro.state.shared_records import BREAKERS
from maestro_hive.maestro.state.sqlite.store import SqliteStore
from maestro_hive.maestro.state.state_manager import StateManager, get_state_manager
from maestro_hive.maestro.state.store import Append
from maestro_hive.unified_execution import ExecutionConfig, StateConfig, StatePersistence
from tests.python_processes import PythonProcess, run_python
from tests.tables import for_each

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from maestro_hive.maestro.state.state_manager import StateChange


@dataclass
class Shape:
    sides: int


@pytest.fixture(autouse=True)
def no_managers_left() -> Iterator[None]:
    """Begin and end without any."""
    StateManager._instance = None
    yield
    for manager in list(state_manager._managers().by_folder.values()):
        manager.shutdown()
    StateManager._instance = None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture(params=["persistent", "in a folder", "in memory"])
def manager(request: pytest.FixtureRequest, folder: Path) -> StateManager:
    """What callers see is the same for all three."""
    match request.param:
        case "persistent":
            return StateManager(folder, auto_persist=True)
        case "in a folder":
            return StateManager(folder)
        case _:
            return StateManager()


@pytest.fixture
def persistent(folder: Path) -> StateManager:
    return StateManager(folder, auto_persist=True)


def in_another_process(folder: Path, code: str) -> str:
    whole = f"""
import sys
from maestro_hive.core.state_manager import StateManager
sm = StateManager(sys.argv[1], auto_persist=True)
{code}
"""
    return run_python(whole, folder, check=True).stdout.strip()


def persistence_on(folder: Path, run: str = "run") -> StatePersistence:
    state = StateConfig(state_dir=str(folder), checkpoint_dir=str(folder.parent / "checkpoints"))
    return StatePersistence(ExecutionConfig(state=state), run)


# --- which manager it is ---


def test_without_a_folder_it_is_always_the_first_one_made() -> None:
    first = StateManager()
    assert StateManager() is first
    assert get_state_manager() is first
    assert door.StateManager is StateManager
    assert door.get_state_manager() is first
    assert maestro_hive.StateManager is StateManager


def test_the_first_one_made_may_have_a_folder(folder: Path) -> None:
    first = StateManager(folder)
    assert StateManager() is first


def test_setting_instance_to_none_forgets_the_first() -> None:
    first = StateManager()
    first.set_state("k", 1)
    StateManager._instance = None
    second = StateManager()
    assert second is not first
    assert second.get_state("k") is None


def test_a_second_folder_is_not_ignored(tmp_path: Path) -> None:
    one = StateManager(tmp_path / "one", auto_persist=True)
    two = StateManager(tmp_path / "two", auto_persist=True)
    assert one is not two
    one.set_state("k", "in one")
    assert two.get_state("k") is None
    assert (tmp_path / "one" / "journal.db").exists()
    assert (tmp_path / "two" / "journal.db").exists()


def test_one_folder_has_one_manager_however_it_is_spelt(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    (folder.parent / "link").symlink_to(folder)
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("HOME", str(folder.parent))
    first = StateManager(folder)
    for spelling in (str(folder), "state", "./x/../state", "~/state", folder.parent / "link"):
        assert StateManager(spelling) is first
        assert get_state_manager(persistence_dir=spelling) is first


def test_its_signature_is_what_callers_know() -> None:
    manager = StateManager(persistence_dir=None, auto_persist=False, persist_interval_seconds=5)
    assert manager is StateManager(None, False, 60)


def test_many_threads_get_the_same_one(folder: Path) -> None:
    found: list[StateManager] = []
    barrier = threading.Barrier(8)

    def ask() -> None:
        barrier.wait()
        found.append(StateManager(folder, auto_persist=True))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1


# --- values ---


def test_a_value_is_set_read_replaced_and_deleted(manager: StateManager) -> None:
    assert manager.get_state("k") is None
    assert manager.get_state("k", default=7) == 7
    manager.set_state("k", [1])
    manager.set_state("k", [1, 2])
    assert manager.get_state("k") == [1, 2]
    assert manager.delete_state("k") is True
    assert manager.delete_state("k") is False
    assert manager.get_state("k") is None


def test_a_value_of_none_is_a_value(manager: StateManager) -> None:
    manager.set_state("k", None)
    assert manager.get_state("k", default="other") is None
    assert manager.get_all_state("default") == {"k": None}


def test_what_get_state_returns_is_the_callers(manager: StateManager) -> None:
    given = {"list": [1]}
    manager.set_state("k", given)
    given["list"].append(2)
    manager.get_state("k")["list"].append(3)
    manager.get_all_state("default")["k"]["list"].append(4)
    assert manager.get_state("k") == {"list": [1]}


def test_values_come_back_as_the_same_types(manager: StateManager) -> None:
    value = {
        "when": datetime(2030, 1, 1, tzinfo=UTC),
        "wait": timedelta(1),
        "raw": b"\0",
        "pair": (1, 2),
        "path": Path("a"),
        "shape": Shape(3),
        3: {"set"},
    }
    manager.set_state("k", value)
    found = manager.get_state("k")
    assert found == value
    assert {key: type(each) for key, each in found.items()} == {
        key: type(each) for key, each in value.items()
    }


def test_a_value_that_cannot_be_kept_is_an_error_that_names_it(manager: StateManager) -> None:
    manager.set_state("k", 1)
    with pytest.raises(EncodeError, match=r"default/k\.users\[1\]"):
        manager.set_state("k", {"users": [1, object()]})
    assert manager.get_state("k") == 1


def test_namespaces_do_not_mix(manager: StateManager) -> None:
    manager.set_state("k", 1)
    manager.set_state("k", 2, namespace="other")
    manager.set_state("j", 3, "other")
    assert manager.get_state("k") == 1
    assert manager.get_namespaces() == ["default", "other"]
    assert manager.get_all_state("other") == {"j": 3, "k": 2}
    assert manager.get_all_state() == {"default": {"k": 1}, "other": {"j": 3, "k": 2}}
    assert manager.delete_state("k", "other") is True
    assert manager.get_state("k") == 1


def test_clear_empties_one_namespace_or_all(manager: StateManager) -> None:
    for namespace in ("a", "b", "c"):
        manager.set_state("k", 1, namespace)
    manager.clear("a")
    assert manager.get_namespaces() == ["b", "c", "default"]
    manager.clear()
    assert manager.get_namespaces() == ["default"]
    assert manager.get_all_state() == {"default": {}}


def test_update_state_sees_the_latest_value_and_returns_the_new_one(
    manager: StateManager,
) -> None:
    assert manager.update_state("n", lambda n: (n or 0) + 1) == 1
    assert manager.update_state("n", lambda n: n + 1) == 2
    assert manager.update_state("n", lambda n: 10, "other") == 10
    assert (manager.get_state("n"), manager.get_state("n", "other")) == (2, 10)


def test_an_update_whose_function_raises_changes_nothing(manager: StateManager) -> None:
    manager.set_state("n", 1)
    with pytest.raises(ZeroDivisionError):
        manager.update_state("n", lambda n: n / 0)
    assert manager.get_state("n") == 1
    manager.set_state("n", 2)
    assert manager.get_state("n") == 2


def test_an_update_that_writes_inside_is_refused_and_harms_nobody(
    persistent: StateManager,
) -> None:
    persistent.set_state("k", 1)
    with pytest.raises(StorageError, match="must not write"):
        persistent.update_state("k", lambda _: persistent.set_state("j", 1))
    assert persistent.get_state("k") == 1
    persistent.set_state("k", 2)
    assert persistent.get_state("k") == 2


@for_each("name", ["", None, 3])
def test_a_key_or_namespace_without_a_name_is_an_error(manager: StateManager, name: Any) -> None:
    with pytest.raises(ConfigurationError, match="a key is a text"):
        manager.set_state(name, 1)
    with pytest.raises(ConfigurationError, match="a namespace is a text"):
        manager.set_state("k", 1, name)


def test_any_text_may_be_a_key(manager: StateManager) -> None:
    for key in ("../x", "a b", "ä/ö", "'; DROP TABLE documents; --", "\0", "x" * 5000):
        manager.set_state(key, key)
        assert manager.get_state(key) == key


# --- over processes ---


def test_what_was_set_is_seen_by_another_process_and_after_a_restart(
    persistent: StateManager, folder: Path
) -> None:
    persistent.set_state("k", {"a": 1})
    assert in_another_process(folder, "print(sm.get_state('k')); sm.set_state('j', 2)") == (
        "{'a': 1}"
    )
    assert persistent.get_state("j") == 2
    persistent.shutdown()
    again = StateManager(folder, auto_persist=True)
    assert again is not persistent
    assert again.get_all_state() == {"default": {"k": {"a": 1}, "j": 2}}


def test_what_was_set_survives_a_process_that_just_ends(folder: Path) -> None:
    in_another_process(folder, "import os\nsm.set_state('k', 1)\nos._exit(0)")
    assert StateManager(folder, auto_persist=True).get_state("k") == 1


def test_without_auto_persist_values_stay_in_the_process(folder: Path) -> None:
    manager = StateManager(folder)
    manager.set_state("k", 1)
    assert not folder.exists()


def test_asking_for_persistence_later_keeps_what_was_set(folder: Path) -> None:
    in_another_process(folder, "sm.set_state('theirs', 1); sm.set_state('both', 'theirs')")
    manager = StateManager(folder)
    manager.set_state("ours", (2, 3))
    manager.set_state("both", "ours", "default")
    seen: list[StateChange] = []
    manager.subscribe(seen.append)
    assert StateManager(folder, auto_persist=True) is manager
    assert manager.get_all_state("default") == {"theirs": 1, "ours": (2, 3), "both": "ours"}
    manager.set_state("new", 1)
    assert [change.key for change in seen if change.key == "new"] == ["new"]
    assert in_another_process(folder, "print(sm.get_state('ours'))") == "(2, 3)"


def test_four_processes_updating_one_key_lose_nothing(folder: Path) -> None:
    code = """
import sys
from maestro_hive.core.state_manager import StateManager
sm = StateManager(sys.argv[1], auto_persist=True)
for _ in range(50):
    sm.update_state("n", lambda n: (n or 0) + 1)
"""
    workers = [PythonProcess(code, folder, stderr=True) for _ in range(4)]
    errors = [worker.communicate()[1] for worker in workers]
    assert errors == [""] * 4
    assert StateManager(folder, auto_persist=True).get_state("n") == 200


# --- news ---


def test_a_subscriber_is_told_of_creations_updates_and_deletions(manager: StateManager) -> None:
    seen: list[StateChange] = []
    manager.subscribe(seen.append)
    before = datetime.now(UTC)
    manager.set_state("k", [1])
    manager.set_state("k", [2], notify=True)
    manager.update_state("k", lambda value: [*value, 3])
    manager.delete_state("k")
    told = [(change.change_type, change.old_value, change.new_value) for change in seen]
    assert told == [
        ("set", None, [1]),
        ("set", [1], [2]),
        ("set", [2], [2, 3]),
        ("delete", [2, 3], None),
    ]
    assert {(change.key, change.namespace) for change in seen} == {("k", "default")}
    assert all(before <= change.timestamp <= datetime.now(UTC) for change in seen)


def test_deleting_what_is_not_there_is_no_news(manager: StateManager) -> None:
    seen: list[StateChange] = []
    manager.subscribe(seen.append)
    manager.delete_state("k")
    manager.clear()
    assert seen == []


def test_clearing_is_told_key_by_key(manager: StateManager) -> None:
    manager.set_state("a", 1)
    manager.set_state("b", 2)
    seen: list[StateChange] = []
    manager.subscribe(seen.append)
    manager.clear("default")
    told = [(change.key, change.change_type, change.old_value) for change in seen]
    assert told == [("a", "clear", 1), ("b", "clear", 2)]


def test_patterns_choose_keys_and_namespaces(manager: StateManager) -> None:
    seen: dict[str, list[str]] = {"all": [], "task": [], "space": [], "both": []}

    def listener(name: str) -> Callable[[StateChange], None]:
        return lambda change: seen[name].append(f"{change.namespace}/{change.key}")

    manager.subscribe(listener("all"))
    manager.subscribe(listener("task"), key_pattern="task.*")
    manager.subscribe(listener("space"), namespace="team-[ab]")
    manager.subscribe(listener("both"), "task.*", "team-a")
    manager.set_state("task.1", 1)
    manager.set_state("Task.2", 1, "team-a")
    manager.set_state("task.3", 1, "team-a")
    manager.set_state("x", 1, "team-c")
    assert len(seen["all"]) == 4
    assert seen["task"] == ["default/task.1", "team-a/task.3"]
    assert seen["space"] == ["team-a/Task.2", "team-a/task.3"]
    assert seen["both"] == ["team-a/task.3"]


def test_notify_false_is_quiet_for_that_change_only(manager: StateManager) -> None:
    seen: list[StateChange] = []
    manager.subscribe(seen.append)
    manager.set_state("k", 1, notify=False)
    manager.delete_state("k", notify=False)
    assert seen == []
    manager.set_state("k", 2)
    assert [change.new_value for change in seen] == [2]


def test_unsubscribing_ends_it(manager: StateManager) -> None:
    seen: list[StateChange] = []
    first, second = manager.subscribe(seen.append), manager.subscribe(seen.append)
    assert first != second
    assert manager.unsubscribe(first) is True
    assert manager.unsubscribe(first) is False
    assert manager.unsubscribe("never") is False
    manager.set_state("k", 1)
    assert len(seen) == 1
    manager.unsubscribe(second)
    manager.set_state("k", 2)
    assert len(seen) == 1


def test_a_callback_that_raises_breaks_nothing(
    manager: StateManager, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[StateChange] = []

    def broken(change: StateChange) -> None:
        raise ZeroDivisionError(change.key)

    manager.subscribe(broken)
    manager.subscribe(seen.append)
    with caplog.at_level(logging.ERROR):
        manager.set_state("k", 1)
    assert manager.get_state("k") == 1
    assert len(seen) == 1
    assert "a hook failed" in caplog.text


def test_a_callback_may_set_other_values(manager: StateManager) -> None:
    manager.subscribe(lambda change: manager.set_state("copy", change.new_value), "source")
    manager.set_state("source", 5)
    assert manager.get_state("copy") == 5


# --- windows ---


def test_a_run_is_seen_through_the_window_and_stored_once(
    persistent: StateManager, folder: Path
) -> None:
    with persistence_on(folder) as persistence:
        persistence.update_state("build", 2, "running")
        persistence.mark_task_completed("t1", {"a": 1})
        persistence.update_persona_state("dev", {"memory": [1]})
        shown = persistent.get_state("run", "workflows")
        assert (shown["phase"], shown["step"], shown["status"]) == ("build", 2, "running")
        assert shown["completed_tasks"] == ["t1"]
        assert shown["persona_states"] == {"dev": {"memory": [1]}}
        assert persistent.get_all_state("workflows") == {"run": shown}
        assert persistent.get_namespaces() == ["default", "workflows"]
        assert persistent.store.documents() == []
        persistence.mark_task_completed("t2")
        assert persistent.get_state("run", "workflows")["completed_tasks"] == ["t1", "t2"]
    assert persistent.get_state("another", "workflows") is None
    assert persistent.get_state("another", "workflows", default={}) == {}


def test_steps_are_seen_through_the_window(persistent: StateManager, folder: Path) -> None:
    with persistence_on(folder) as persistence:
        facts = codec.dump_canonical({"name": "design", "persona": "architect"})
        begun = NewEntry(EntryKind.ATTEMPT_STARTED, 1, 1, facts=facts, identity=b"x")
        persistence._run.store.append([Append(persistence._run.lease, [begun])])
        (step,) = persistent.get_state("run", "workflows")["steps"]
        assert (step["name"], step["persona"], step["status"]) == (
            "design",
            "architect",
            "running",
        )
        kept = NewEntry(EntryKind.STEP_COMPLETED, 1, 1, value=codec.encode("done"))
        persistence._run.store.append([Append(persistence._run.lease, [kept])])
        (step,) = persistent.get_state("run", "workflows")["steps"]
        assert (step["status"], step["attempts"], step["failures"]) == ("success", 1, 0)


def test_what_the_window_shows_is_the_callers(persistent: StateManager, folder: Path) -> None:
    with persistence_on(folder) as persistence:
        persistence.update_persona_state("dev", {"memory": [1]})
        persistent.get_state("run", "workflows")["persona_states"]["dev"]["memory"].append(2)
        shown = persistent.get_state("run", "workflows")
        assert shown["persona_states"] == {"dev": {"memory": [1]}}
        assert persistence.get_persona_state("dev") == {"memory": [1]}


def test_a_run_of_another_process_is_seen(persistent: StateManager, folder: Path) -> None:
    code = """
from maestro_hive.unified_execution import *
state = StateConfig(state_dir=sys.argv[1], checkpoint_dir=sys.argv[1] + "-c")
with StatePersistence(ExecutionConfig(state=state), "theirs") as p:
    p.mark_task_completed("t")
"""
    in_another_process(folder, code)
    assert persistent.get_state("theirs", "workflows")["completed_tasks"] == ["t"]


def test_a_subscriber_is_told_of_a_runs_changes(persistent: StateManager, folder: Path) -> None:
    seen: list[StateChange] = []
    persistent.subscribe(seen.append, key_pattern="run", namespace="workflows")
    with persistence_on(folder) as persistence, persistence_on(folder, "other") as other:
        persistence.update_state(phase="one")
        other.update_state(phase="not asked for")
        persistence.update_state(phase="two")
    first, second = seen[:2]
    assert (first.key, first.namespace, first.change_type) == ("run", "workflows", "set")
    assert (first.old_value, first.new_value["phase"]) == (None, "one")
    assert second.change_type == "set"
    assert (second.old_value["phase"], second.new_value["phase"]) == ("one", "two")
    assert {change.key for change in seen} == {"run"}
    assert len(seen) == 2  # checkpoints and shutdown change nothing


def test_a_subscriber_who_comes_late_is_told_what_was_there_before(
    persistent: StateManager, folder: Path
) -> None:
    with persistence_on(folder) as persistence:
        persistence.update_state(phase="one")
        seen: list[StateChange] = []
        persistent.subscribe(seen.append, namespace="workflows")
        persistence.update_state(phase="two")
    (change,) = seen
    assert (change.change_type, change.old_value["phase"]) == ("set", "one")


def test_a_breaker_is_seen_through_the_window_and_stored_once(
    persistent: StateManager, folder: Path
) -> None:
    seen: list[StateChange] = []
    persistent.subscribe(seen.append, namespace="circuit_breakers")
    made = Breaker(name="anthropic", consecutive_failures=2)
    BREAKERS.update(persistent.store, "anthropic", lambda _: made)
    shown = persistent.get_state("anthropic", "circuit_breakers")
    assert (shown["state"], shown["consecutive_failures"]) == ("closed", 2)
    assert list(persistent.get_all_state("circuit_breakers")) == ["anthropic"]
    assert len(persistent.store.documents()) == 1
    assert [change.change_type for change in seen] == ["set"]
    assert "2" in in_another_process(
        folder, "print(sm.get_state('anthropic', 'circuit_breakers')['consecutive_failures'])"
    )


@for_each("namespace", ["workflows", "circuit_breakers", "budgets", "escalations"])
def test_setting_through_a_window_is_a_clear_error(manager: StateManager, namespace: str) -> None:
    uses: list[Callable[[], object]] = [
        lambda: manager.set_state("k", {}, namespace),
        lambda: manager.update_state("k", lambda _: {}, namespace),
        lambda: manager.delete_state("k", namespace),
        lambda: manager.clear(namespace),
    ]
    for use in uses:
        with pytest.raises(ConfigurationError, match=f"{namespace!r} shows what is in the journal"):
            use()
    assert manager.get_namespaces() == ["default"]


def test_clearing_everything_leaves_runs_and_breakers(
    persistent: StateManager, folder: Path
) -> None:
    persistent.set_state("k", 1)
    BREAKERS.update(persistent.store, "b", lambda _: Breaker(name="b"))
    with persistence_on(folder) as persistence:
        persistence.update_state(phase="x")
    persistent.clear()
    assert persistent.get_namespaces() == ["circuit_breakers", "default", "workflows"]
    assert persistent.get_state("run", "workflows")["phase"] == "x"


def test_many_threads_may_look_while_a_run_changes(persistent: StateManager, folder: Path) -> None:
    errors: list[BaseException] = []
    done = threading.Event()

    def look() -> None:
        try:
            while not done.is_set():
                persistent.get_state("run", "workflows")
        except BaseException as error:  # noqa: BLE001 - told to the test below
            errors.append(error)

    threads = [threading.Thread(target=look) for _ in range(3)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with persistence_on(folder) as persistence:
            for thread in threads:
                thread.start()
            for number in range(150):
                persistence.update_persona_state(f"p{number}", {"n": number})
            done.set()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(before)
    assert errors == []
    assert len(persistent.get_state("run", "workflows")["persona_states"]) == 150


# --- checkpoints ---


def test_a_checkpoint_brings_all_values_back(manager: StateManager) -> None:
    manager.set_state("k", (1, 2))
    manager.set_state("k", Shape(4), "other")
    made = manager.checkpoint("before", metadata={"why": "deploy"})
    assert (made["checkpoint_id"], made["metadata"]) == ("before", {"why": "deploy"})
    assert made["state_snapshot"] == {"default": {"k": (1, 2)}, "other": {"k": Shape(4)}}
    manager.set_state("k", "changed")
    manager.set_state("new", 1)
    manager.delete_state("k", "other")
    assert manager.restore("before") is True
    assert manager.get_all_state() == {"default": {"k": (1, 2)}, "other": {"k": Shape(4)}}


def test_checkpoints_are_listed_and_may_be_missing(manager: StateManager) -> None:
    assert manager.list_checkpoints() == []
    assert manager.restore("never") is False
    manager.checkpoint("b.2")
    manager.checkpoint("a")
    manager.checkpoint("a")
    assert manager.list_checkpoints() == ["a", "b.2"]


@for_each("name", ["../x", "", "a/b", ".x", "a\0", "x" * 200])
def test_a_hostile_checkpoint_id_is_refused(
    manager: StateManager, tmp_path: Path, name: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InvalidIdentifierError):
        manager.checkpoint(name)
    with pytest.raises(InvalidIdentifierError):
        manager.restore(name)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_checkpoint_in_a_folder_is_a_file_and_outlives_the_process(folder: Path) -> None:
    manager = StateManager(folder)
    manager.set_state("k", 1)
    manager.checkpoint("c")
    assert (folder / "checkpoints" / "c.json").stat().st_mode & 0o777 == 0o600
    code = "print(sm.list_checkpoints(), sm.restore('c'), sm.get_state('k'))"
    assert in_another_process(folder, code) == "['c'] True 1"


def test_an_altered_checkpoint_is_refused_and_changes_nothing(
    persistent: StateManager, folder: Path
) -> None:
    persistent.set_state("k", 1)
    persistent.checkpoint("c")
    path = folder / "checkpoints" / "c.json"
    path.write_bytes(path.read_bytes().replace(b'"k":1', b'"k":2'))
    with pytest.raises(DocumentCorruptError, match="checkpoint c"):
        persistent.restore("c")
    assert persistent.get_state("k") == 1


def test_a_checkpoint_leaves_runs_and_breakers_alone(
    persistent: StateManager, folder: Path
) -> None:
    persistent.set_state("k", 1)
    persistent.checkpoint("c")
    BREAKERS.update(persistent.store, "b", lambda _: Breaker(name="b", consecutive_failures=4))
    with persistence_on(folder) as persistence:
        persistence.update_state(phase="x")
        persistent.restore("c")
        assert persistent.get_state("run", "workflows")["phase"] == "x"
    assert persistent.get_state("b", "circuit_breakers")["consecutive_failures"] == 4


def test_what_was_accepted_can_be_checkpointed_however_deep(manager: StateManager) -> None:
    for depth in (45, 95, 98, 99):
        value: Any = depth
        for _ in range(depth):
            value = (value,) if depth == 45 else [value]
        manager.set_state(f"d{depth}", value)
    before = manager.get_all_state()
    manager.checkpoint("c")
    manager.clear()
    assert manager.restore("c") is True
    assert manager.get_all_state() == before


# --- the end ---


def test_after_shutdown_the_next_manager_is_a_new_one(folder: Path) -> None:
    manager = StateManager(folder, auto_persist=True)
    manager.set_state("k", 1)
    manager.shutdown()
    with pytest.raises(StorageError, match=r"closed|shut down"):
        manager.get_state("k")
    with pytest.raises(StorageError, match=r"closed|shut down"):
        manager.set_state("k", 2)
    again = StateManager(folder, auto_persist=True)
    assert again is not manager
    assert again.get_state("k") == 1
    assert StateManager() is again


def test_shutting_down_twice_takes_nothing_from_others(folder: Path) -> None:
    manager = StateManager(folder, auto_persist=True)
    with persistence_on(folder) as persistence:
        manager.shutdown()
        manager.shutdown()
        persistence.update_state(phase="x")
        assert persistence.state.phase == "x"


def test_after_shutdown_nobody_is_told_anything(folder: Path) -> None:
    manager = StateManager(folder, auto_persist=True)
    seen: list[StateChange] = []
    manager.subscribe(seen.append)
    manager.shutdown()
    StateManager(folder, auto_persist=True).set_state("k", 1)
    assert seen == []


def test_shutting_down_one_in_memory_forgets_it() -> None:
    manager = StateManager()
    manager.set_state("k", 1)
    manager.shutdown()
    assert StateManager() is not manager
    assert StateManager().get_state("k") is None


def test_after_a_failed_write_asking_again_opens_the_store_again(
    persistent: StateManager, folder: Path
) -> None:
    persistent.set_state("k", 1)
    seen: list[StateChange] = []
    persistent.subscribe(seen.append)
    store = persistent.store
    assert isinstance(store, SqliteStore)
    store._file._fail("the disk is full")
    with pytest.raises(StoreFailedError, match="reopen"):
        persistent.set_state("k", 2)
    with pytest.raises(StoreFailedError):
        persistent.get_state("k")
    assert StateManager(folder, auto_persist=True) is persistent
    assert persistent.get_state("k") == 1
    persistent.set_state("k", 3)
    assert [change.new_value for change in seen] == [3]


def test_after_a_failed_write_this_process_gets_its_run_back(
    persistent: StateManager, folder: Path
) -> None:
    """The failed store must not go on holding runs that the reopened one wants."""
    persistence = persistence_on(folder)
    persistence.update_state(phase="one")
    assert isinstance(persistence._run.store, SqliteStore)
    persistence._run.store._file._fail("the disk is full")
    with pytest.raises(StoreFailedError):
        persistence.update_state(phase="two")
    with pytest.raises(StoreFailedError):
        persistence.shutdown()
    with persistence_on(folder) as again:
        assert again.state.phase == "one"
        again.update_state(phase="three")
    StateManager(folder, auto_persist=True)
    assert persistent.get_state("run", "workflows")["phase"] == "three"


def test_a_folder_that_cannot_be_used_is_an_error_and_may_be_mended(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "state"
    with pytest.raises(OSError, match="not a folder"):
        StateManager(place, auto_persist=True)
    (tmp_path / "file").unlink()
    manager = StateManager(place, auto_persist=True)
    manager.set_state("k", 1)
    assert manager.get_state("k") == 1
    manager.shutdown()
    shutil.rmtree(tmp_path / "file")


@pytest.mark.parametrize("call", ["set_state", "delete_state", "get_state"])
def test_half_a_character_is_no_name(call: str) -> None:
    manager = StateManager()
    arguments = ("\ud800", 1) if call == "set_state" else ("\ud800",)
    with pytest.raises(ConfigurationError, match="half characters"):
        getattr(manager, call)(*arguments)
