"""``maestro worker``, ``enqueue`` and ``queues``, as processes."""

from __future__ import annotations

import asyncio
import json
import signal
import stat
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import Hive
from maestro_hive.admin import folder
from tests.cli.processes import complaint, maestro, start_maestro
from tests.hive.conftest import quick_config
from tests.hive.worker_programs import until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.python_processes import PythonProcess

_MODULE = textwrap.dedent("""
    import asyncio
    from pathlib import Path
    from maestro_hive import Hive

    place = Path(__file__).parent
    hive = Hive(place / "state")
    other = Hive(place / "other")
    number = 7

    @hive.step
    async def part(name, number):
        with (place / "log").open("a") as log:
            log.write(f"{name} {number}\\n")
        if name == "slow" and not (place / "free").exists():
            await asyncio.sleep(60)
        return number

    @hive.workflow
    async def job(name: str, parts: int = 2) -> list[int]:
        return [await part(name, number) for number in range(parts)]
""")


class Shop:
    """A folder with a module, and its state."""

    def __init__(self, place: Path) -> None:
        self.place = place
        (place / "shop.py").write_text(_MODULE)
        self.hive = Hive(place / "state", quick_config())
        self._workers: list[PythonProcess] = []

    def maestro(self, *words: str) -> Any:
        return maestro(*words, "--store", self.place / "state")

    def worker(self, *words: str) -> PythonProcess:
        worker = start_maestro("worker", "shop", *words, cwd=self.place)
        self._workers.append(worker)
        return worker

    def result(self, run_id: str) -> Any:
        return asyncio.run(self.hive.handle(run_id).result())

    def notes(self) -> list[str]:
        log = self.place / "log"
        return log.read_text().splitlines() if log.exists() else []

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.communicate()
        self.hive.close()


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(tmp_path)
    made.hive.runs()  # the folder exists
    yield made
    made.close()


def test_what_is_enqueued_is_executed_by_a_worker_until_it_is_stopped(shop: Shop) -> None:
    done = shop.maestro("enqueue", "job", "name=a", "parts=3", "--run-id", "r")
    assert (done.returncode, done.stdout) == (0, "run r is enqueued\n")
    again = shop.maestro("enqueue", "job", "parts=3", "name=a", "--run-id", "r")
    assert again.stdout == "run r is enqueued, which is there already (pending)\n"
    wrong = shop.maestro("enqueue", "job", "name=b", "--run-id", "r")
    assert "was started with other arguments" in complaint(wrong, 2)
    worker = shop.worker("-v", "--grace", "0.3")
    assert shop.result("r") == [0, 1, 2]
    shop.maestro("enqueue", "job", "slow", "--run-id", "slow")
    until(lambda: "slow 0" in shop.notes())
    worker.send_signal(signal.SIGTERM)
    out, err = worker.communicate(timeout=60)
    shop.place.joinpath("free").touch()  # not before: the step may not have looked yet
    assert worker.returncode == 0, err
    assert "run r (job) started" in err
    assert out == ""
    assert shop.hive.handle("slow").status == "pending"
    shop.worker("--grace", "0")
    assert shop.result("slow") == [0, 1]
    assert shop.notes().count("slow 0") == 2


def test_the_first_run_makes_the_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = tmp_path / "new" / "state"
    done = maestro("enqueue", "job", "--run-id", "r", "--store", new)
    assert (done.returncode, done.stdout) == (0, "run r is enqueued\n")
    assert "the state folder is new" in done.stderr
    assert stat.S_IMODE(new.stat().st_mode) == 0o700
    assert "is new" not in maestro("enqueue", "job", "--store", new).stderr
    # Not in a folder of something else.
    assert "it has no journal.db" in complaint(maestro("enqueue", "job", "--store", new.parent), 1)
    # Where the default folder cannot be used, in the one that programs use.
    tmp_path.joinpath("file").touch()
    monkeypatch.setattr(folder, "DEFAULT_STATE_DIR", str(tmp_path / "file" / "state"))
    monkeypatch.setattr(folder, "FALLBACK_STATE_DIR", str(tmp_path / "home"))
    assert maestro("enqueue", "job", "--run-id", "r").returncode == 0
    assert (tmp_path / "home" / "journal.db").exists()


def test_the_worker_says_what_it_cannot_use(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shop.place)
    monkeypatch.syspath_prepend(str(shop.place))
    monkeypatch.delitem(sys.modules, "shop", raising=False)  # of another test
    for target, message in {
        "shop:number": "has no Hive 'number'; its Hives are: hive, other",
        "nowhere": "there is no module 'nowhere'",
        "a/b.py": "names no Hive",
    }.items():
        assert message in complaint(maestro("worker", target), 2)
    monkeypatch.delitem(sys.modules, "shop")


def test_advice_for_another_store_is_the_variable_where_that_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = "from maestro_hive import ExecutionConfig, Hive\nhive = Hive({})\n"
    variable = {"MAESTRO_STATE_DIR": str(tmp_path / "here")}
    for name, given, advice in (
        ("by_variable", "config=ExecutionConfig()", "or set MAESTRO_STATE_DIR to other"),
        ("by_module", "'there'", "or change the module: Hive('other')"),
    ):
        (tmp_path / f"{name}.py").write_text(made.format(given))
        done = maestro("worker", name, "--store", "other", **variable)
        monkeypatch.delitem(sys.modules, name)
        assert complaint(done, 2).endswith(advice)


def test_the_queues_are_shown_with_what_no_worker_takes(shop: Shop) -> None:
    shop.maestro("enqueue", "job", "a", "--queue", "mail")
    shop.maestro("enqueue", "strange", "--queue", "mail", "--priority", "3")
    shop.maestro("enqueue", "job", "a", "--delay", "2h")
    shown = shop.maestro("queues")
    assert shown.stdout.splitlines()[0].split("\t")[:2] == ["default", "0"]
    assert shown.stdout.splitlines()[1].split("\t")[:2] == ["mail", "2"]
    assert "no worker takes 1 run of the workflow 'strange' (queue mail)" in shown.stderr
    assert "there is no worker" in shown.stderr
    shop.worker("--queue", "mail", "--concurrency", "4", "--version", "2.1")
    until(lambda: shop.notes() == ["a 0", "a 1"])
    found = json.loads(shop.maestro("queues", "--json").stdout)
    (default, mail) = found["queues"]
    assert (default["scheduled"], mail["ready"], mail["held"]) == (1, 1, 0)
    (worker,) = found["workers"]
    assert (worker["queues"], worker["concurrency"], worker["version"]) == (["mail"], 4, "2.1")
    assert worker["workflows"] == ["job"]
    assert [left["workflow"] for left in found["left"]] == ["strange"]


def test_a_priority_may_be_negative_and_so_may_an_argument(shop: Shop) -> None:
    words = ("enqueue", "job", "-3", "--priority", "-5", "--run-id", "r")
    assert shop.maestro(*words).returncode == 0
    found = shop.hive._open().dispatch("r")
    assert found is not None
    assert found.priority == -5
    assert "'-1' is no duration" in shop.maestro("enqueue", "job", "--delay", "-1").stderr


@pytest.mark.parametrize(
    "words",
    [
        ("enqueue", "job", "--delay", "soon"),
        ("enqueue", "job", "--priority", "high"),
        ("enqueue", "../job"),
        ("enqueue", "job", "a=1", "a=2"),
        ("worker",),
    ],
    ids=" ".join,
)
def test_wrong_words_are_refused(shop: Shop, words: tuple[str, ...]) -> None:
    assert shop.maestro(*words).returncode == 2
    assert shop.hive.runs() == []
