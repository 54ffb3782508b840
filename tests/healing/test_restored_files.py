"""Files of a repair that is undone: what became of them since does not stop the step, or the run."""

from __future__ import annotations

import asyncio
import shutil
import threading
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import Fix, Hive, PersonaExecutor
from maestro_hive.engine.healing.engine import SelfHealingEngine
from maestro_hive.engine.healing.failure import FailureType
from maestro_hive.engine.healing.workspace import FileBefore, Turn, Workspace
from maestro_hive.hive.errors import RunFailedError
from maestro_hive.kernel.errors import ConfigurationError, StorageError
from maestro_hive.maestro.state.events import RepairJudged
from tests.healing.test_user_healers import events
from tests.hive.conftest import quick_config
from tests.timing import PassingLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    made = tmp_path / "work"
    (made / "conf").mkdir(parents=True)
    (made / "conf" / "a").write_text("before")
    (tmp_path / "outside").write_text("not ours")
    return made


@pytest.fixture
def hive(tmp_path: Path, workspace: Path) -> Iterator[Hive]:
    with Hive(tmp_path / "state", quick_config(), workspace=workspace) as made:
        yield made


def judged(hive: Hive) -> list[RepairJudged]:
    return [each for each in events(hive) if isinstance(each, RepairJudged)]


def _folder(file: Path) -> None:
    file.mkdir()


def _link_out(file: Path) -> None:
    file.symlink_to(file.parents[2] / "outside")


def _link_to_itself(file: Path) -> None:
    file.symlink_to(file)


def _below_a_file(file: Path) -> None:
    shutil.rmtree(file.parent)
    file.parent.write_text("a file")


@pytest.mark.parametrize("become", [_folder, _link_out, _link_to_itself, _below_a_file])
def test_a_file_that_is_none_any_more_is_left(
    hive: Hive, workspace: Path, tmp_path: Path, become: Callable[[Path], None]
) -> None:
    file = workspace / "conf" / "a"
    calls: list[int] = []

    @hive.step(max_attempts=2)
    def work() -> str:
        calls.append(1)
        if len(calls) == 2:
            file.unlink()
            become(file)
        if len(calls) < 3:
            raise ValueError("its own error")
        return "done"

    @hive.workflow
    async def flow() -> str:
        return await work()

    hive.healer(ValueError, name="write")(
        lambda: Fix(files={"conf/a": "repaired", "b": "repaired"})
    )
    with pytest.raises(RunFailedError, match="its own error"):
        hive.run_sync(flow, run_id="r")
    (verdict,) = judged(hive)
    assert (verdict.verdict, verdict.restored, verdict.left) == ("failed", ("b",), ("conf/a",))
    assert (tmp_path / "outside").read_text() == "not ours"
    hive.retry("r")
    assert asyncio.run(hive.resume("r")) == "done"


def test_restoring_whatever_they_are_leaves_what_is_no_file(workspace: Path) -> None:
    work = Workspace(workspace)
    changed = {"conf/a": "repaired", "b": "repaired"}

    def check() -> bool:
        (workspace / "b").unlink()
        (workspace / "b").mkdir()
        (workspace / "conf" / "a").write_text("by the check")
        return False

    with pytest.raises(StorageError, match=r"b of .* could not be restored"):
        work.change(changed, check)
    assert (workspace / "conf" / "a").read_text() == "before"


# --- folders ---------------------------------------------------------------------------------------


def test_folders_that_were_made_for_a_repair_go_with_it(workspace: Path) -> None:
    work = Workspace(workspace)
    changed = {"new/deep/a": "1", "new/deep/b": "2", "new/other/c": "3", "conf/d": "4", "e": "5"}
    with pytest.raises(ConfigurationError, match="did not pass their check"):
        work.change(changed, lambda: False)
    assert sorted(each.name for each in workspace.rglob("*")) == ["a", "conf"]


def test_folders_stay_if_something_else_is_in_them(workspace: Path) -> None:
    work = Workspace(workspace)
    changed = {"new/deep/a": "1"}
    before = work.before(changed)
    work.write(changed, before, None)
    (workspace / "new" / "by_the_step").write_text("kept")
    assert work.restore(before) == (("new/deep/a",), ())
    assert not (workspace / "new" / "deep").exists()
    assert (workspace / "new" / "by_the_step").read_text() == "kept"
    assert work.restore(before) == ((), ())


def test_folders_made_by_a_process_that_died_go_too(workspace: Path) -> None:
    """It died after it made them, and before it wrote the file."""
    work = Workspace(workspace)
    recorded = {n: each.to_json() for n, each in work.before({"new/deep/a": "1"}).items()}
    (workspace / "new" / "deep").mkdir(parents=True)
    work.restore({name: FileBefore.from_json(each) for name, each in recorded.items()})
    assert not (workspace / "new").exists()


def test_a_failed_attempt_leaves_no_folder_of_its_repair(hive: Hive, workspace: Path) -> None:
    @hive.step(max_attempts=2)
    async def work() -> None:
        raise ValueError("no")

    @hive.workflow
    async def flow() -> None:
        await work()

    hive.healer(ValueError, name="write")(lambda: Fix(files={"new/deep/a": "repaired"}))
    with pytest.raises(RunFailedError):
        hive.run_sync(flow, run_id="r")
    assert [each.restored for each in judged(hive)] == [("new/deep/a",)]
    assert not (workspace / "new").exists()


# --- checks that are given up ----------------------------------------------------------------------


def test_a_check_that_outlives_its_timeout_restores_nothing_later(
    hive: Hive, workspace: Path
) -> None:
    file = workspace / "conf" / "a"
    started, go_on, over = threading.Event(), threading.Event(), threading.Event()

    def slow() -> bool:
        started.set()
        go_on.wait(20)
        threading.Timer(0.3, over.set).start()
        return False

    @hive.step(max_attempts=2, timeout=60)
    def work() -> str:
        found = file.read_text()
        if found == "before":
            raise ValueError("not repaired")
        return found

    @hive.workflow
    async def flow() -> str:
        return await work()

    hive.healer(ValueError, name="one")(lambda: Fix(files={"conf/a": "one"}, check=slow))
    hive.healer(ValueError, name="two")(lambda: Fix(files={"conf/a": "two"}))

    async def main() -> str:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, PassingLoop)
        running = asyncio.create_task(hive.run(flow, run_id="r"))
        assert await asyncio.to_thread(started.wait, 20)
        loop.advance(60)
        return await running

    with asyncio.Runner(loop_factory=PassingLoop) as runner:
        assert runner.run(main()) == "two"
    go_on.set()
    assert over.wait(20)
    assert file.read_text() == "two"
    first, second = judged(hive)
    assert (first.healer, first.verdict, first.restored) == ("one", "failed", ("conf/a",))
    assert (second.healer, second.verdict) == ("two", "worked")


def test_nothing_is_written_after_a_turn_is_over(workspace: Path) -> None:
    work, turn = Workspace(workspace), Turn()
    changed = {"conf/a": "repaired"}
    before = work.before(changed)
    turn.end()
    with pytest.raises(ConfigurationError, match="not changed any more"):
        work.write(changed, before, None, turn)
    assert (workspace / "conf" / "a").read_text() == "before"


def test_an_executor_that_is_cancelled_during_the_check_restores_the_files(
    workspace: Path,
) -> None:
    started, go_on = threading.Event(), threading.Event()

    def slow() -> bool:
        started.set()
        return go_on.wait(20)

    class Writing:
        name = "write"
        handles = frozenset(FailureType)

        def propose(self, failure: Any, workspace: Any) -> Fix:
            del failure, workspace
            return Fix(files={"conf/a": "repaired", "b": "repaired"}, check=slow)

    async def fails() -> None:
        raise ValueError("no")

    async def main() -> None:
        engine = SelfHealingEngine(workspace, auto_apply=True, healers=[Writing()])
        executor = PersonaExecutor(quick_config(), healing_engine=engine)
        task = asyncio.create_task(executor.execute(fails, "t"))
        assert await asyncio.to_thread(started.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    go_on.set()
    assert (workspace / "conf" / "a").read_text() == "before"
    assert not (workspace / "b").exists()
