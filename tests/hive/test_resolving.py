"""An ambiguous step is settled for exactly its call, whatever is killed, and whoever has the run."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import Hive
from maestro_hive.hive.runs import read_run
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.maestro.state.events import Retried, RunSuspended, StepCompleted
from maestro_hive.maestro.state.projections import labels
from maestro_hive.maestro.state.views import ambiguous_steps
from maestro_hive.unified_execution import HelpNeeded
from tests.cli.processes import answer, complaint, maestro
from tests.hive.conftest import quick_config
from tests.python_processes import run_python

if TYPE_CHECKING:
    from pathlib import Path

_PROGRAM = textwrap.dedent("""
    import asyncio, os, sys
    from dataclasses import dataclass
    from datetime import date
    from maestro_hive import Hive

    hive = Hive(sys.argv[1])
    how, *dies = sys.argv[2:]

    @dataclass
    class Receipt:
        id: str
        paid_on: date
        cents: int = 0

    @hive.step(on_ambiguous="ask")
    async def charge(customer: str, cents: int = 500) -> Receipt:
        print("charging", customer, flush=True)
        if customer in dies:
            os.kill(os.getpid(), 9)
        return Receipt(f"{customer}-receipt", date(2030, 1, 2), cents)

    @hive.step
    async def pack(what: str) -> str:
        return what

    @hive.workflow
    async def sell(customers: list[str]) -> list[Receipt]:
        await pack("box")
        if how == "one-by-one":
            return [await charge(each) for each in customers]
        async with asyncio.TaskGroup() as group:
            asked = [group.create_task(charge(each)) for each in customers]
        return [each.result() for each in asked]

    @hive.workflow
    async def shop(customers: list[str]) -> list[Receipt]:
        return await sell(customers)

    print(hive.run_sync(shop if "child" in dies else sell, ["a", "b"], run_id="r"))
""")


def program(folder: Path, *dies: str, how: str = "one-by-one") -> Any:
    return run_python(_PROGRAM, folder, how, *dies)


def at_once(folder: Path, *dies: str) -> Any:
    """Charge both at once: when one dies, the other one has been started, or has not."""
    return program(folder, *dies, how="at-once")


def ambiguous(folder: Path, run_id: str = "r") -> list[str]:
    with Hive(folder) as hive:
        state = read_run(hive._open(), run_id)
        return [labels(state)[step.number] for step in ambiguous_steps(state, held=False)]


@pytest.fixture
def killed(folder: Path) -> Path:
    """Return a folder with a run that was killed while it charged both, and asks."""
    assert at_once(folder, "b").returncode == -signal.SIGKILL
    asked = at_once(folder)
    assert asked.returncode == 1
    assert asked.stdout == ""
    assert "charge is ambiguous" in asked.stderr
    return folder


def test_the_message_names_the_command_and_the_command_settles_one_call(killed: Path) -> None:
    names = ambiguous(killed)
    message = at_once(killed).stderr
    command = f"maestro resolve r {names[0]} --completed RESULT"
    assert command in message.replace("'", "")
    assert "mark_task_completed" not in message
    for name, customer in zip(names, "ab", strict=False):
        value = json.dumps({"id": f"{customer}-by-hand", "paid_on": "2031-05-06"})
        done = maestro("resolve", "r", name, "--completed", value, "--by", "ann", "--store", killed)
        assert done.returncode == 0, done.stderr
    last = at_once(killed)
    assert last.returncode == 0, last.stderr
    made = [f"'{each}-by-hand'" in last.stdout for each in "ab"]
    assert made == [True, len(names) == 2]
    assert "datetime.date(2031, 5, 6)" in last.stdout
    assert "charging" not in last.stdout
    assert at_once(killed).stdout == last.stdout


def test_each_of_two_calls_gets_its_own_result(folder: Path) -> None:
    """B must not get A's receipt."""
    assert program(folder, "a").returncode == -signal.SIGKILL
    (first,) = ambiguous(folder)
    assert first == "charge"
    receipt = '{"id": "A", "paid_on": "2031-05-06", "cents": 7}'
    done = maestro("resolve", "r", "charge", "--completed", receipt, "--json", "--store", folder)
    resolved = answer(done)["resolved"]
    assert {name: resolved[name] for name in ("run_id", "label", "rerun", "taken")} == {
        "run_id": "r",
        "label": "charge",
        "rerun": False,
        "taken": True,
    }
    last = program(folder)
    assert last.stdout.splitlines()[0] == "charging b"
    assert "id='A'" in last.stdout
    assert "id='b-receipt'" in last.stdout


def test_a_step_that_had_no_effect_is_executed_again_and_the_others_are_not(killed: Path) -> None:
    for name in ambiguous(killed):
        assert maestro("resolve", "r", name, "--rerun", "--store", killed).returncode == 0
    last = at_once(killed)
    assert "id='a-receipt'" in last.stdout
    assert "id='b-receipt'" in last.stdout
    assert at_once(killed, "a", "b").stdout.splitlines() == last.stdout.splitlines()[-1:]


def test_a_step_that_is_killed_again_asks_again(folder: Path) -> None:
    assert program(folder, "a").returncode == -signal.SIGKILL
    for _ in range(3):
        assert maestro("resolve", "r", "charge", "--rerun", "--store", folder).returncode == 0
        message = complaint(maestro("resolve", "r", "charge", "--rerun", "--store", folder), 2)
        assert "was resolved or retried already" in message
        assert program(folder, "a").returncode == -signal.SIGKILL
    assert maestro("resolve", "r", "charge", "--rerun", "--store", folder).returncode == 0
    assert program(folder).returncode == 0


def test_a_step_of_a_child_is_settled_in_its_own_run(folder: Path) -> None:
    assert program(folder, "child", "a").returncode == -signal.SIGKILL
    asked = program(folder, "child")
    child = next(word for word in asked.stderr.split() if word.startswith("r.sell-"))
    assert f"maestro resolve {child} charge --rerun" in asked.stderr
    assert maestro("resolve", child, "charge", "--rerun", "--store", folder).returncode == 0
    assert program(folder, "child").returncode == 0


@pytest.mark.parametrize(
    "words, message",
    [
        (["charge", "--completed", "{}"], "the result of charge.id is missing"),
        (
            ["charge", "--completed", "paid"],
            "id (text), paid_on (date, as 2030-01-31), written as JSON",
        ),
        (
            ["charge", "--completed", '{"id": "x", "paid_on": "May"}'],
            "paid_on is 'May', and must be",
        ),
        (["pack", "--rerun"], "step 'pack' of run 'r' is completed; ambiguous are: charge"),
        (["ship", "--rerun"], "run 'r' has no step 'ship'; it has: pack, charge"),
        (["charge"], "Give either --completed VALUE or --rerun"),
        (["charge", "--rerun", "--completed", "1"], "Give either --completed VALUE or --rerun"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    folder: Path, words: list[str], message: str
) -> None:
    program(folder, "a")
    assert message in complaint(maestro("resolve", "r", *words, "--store", folder), 2)
    assert ambiguous(folder) == ["charge"]


def test_a_step_that_was_completed_by_hand_says_so(folder: Path) -> None:
    program(folder, "a")
    receipt = '{"id": "A", "paid_on": "2031-05-06"}'
    words = [
        "resolve",
        "r",
        "charge",
        "--completed",
        receipt,
        "--by",
        "ann",
        "--store",
        str(folder),
    ]
    assert maestro(*words).returncode == 0
    message = complaint(maestro(*words), 2)
    assert "was resolved already by ann: completed with {" in message
    shown = maestro("show", "r", "charge", "--store", folder).stdout
    assert "paid_on=2031-05-06" in shown
    assert (
        "charge (default) attempt 1 resolved by ann: it was completed"
        in maestro("events", "r", "--store", folder).stdout
    )


def test_show_says_why_a_run_is_suspended_and_how_it_goes_on(killed: Path) -> None:
    shown = maestro("show", "r", "--store", killed).stdout
    assert "suspended:     HelpNeeded: charge is ambiguous" in shown
    name = ambiguous(killed)[0]
    assert f"maestro resolve r {name} --completed VALUE --store {killed}" in shown.replace("'", "")
    assert "(an object with: cents (whole number, optional), id (text), paid_on (date, as" in shown
    view = answer(maestro("show", "r", "--json", "--store", killed))["run"]
    assert [each["label"] for each in view["ambiguous"]] == ambiguous(killed)
    assert view["suspended"]["error_type"] == "HelpNeeded"
    followed = maestro("events", "r", "--follow", "--store", killed)
    assert followed.returncode == 75  # a person is needed


# --- in a program ----------------------------------------------------------------------------------


@dataclasses.dataclass
class Paid:
    cents: int


def shop(hive: Hive, started: asyncio.Event | None, calls: list[str]) -> Any:
    @hive.step(on_ambiguous="ask")
    async def charge(customer: str) -> Paid:
        calls.append(customer)
        if started is not None:
            started.set()
            await asyncio.sleep(60)
        return Paid(1)

    @hive.step(on_ambiguous="ask")
    async def guess() -> set[int]:
        calls.append("guess")
        if started is not None:
            started.set()
            await asyncio.sleep(60)
        return {1}

    @hive.workflow
    async def sell(what: str = "charge") -> Any:
        return await (charge("a") if what == "charge" else guess())

    return sell


async def stopped(folder: Path, *what: str) -> None:
    """Stop a run in the middle of a step."""
    async with Hive(folder, quick_config()) as hive:
        started = asyncio.Event()
        running = asyncio.create_task(hive.run(shop(hive, started, []), *what, run_id="r"))
        await started.wait()
        running.cancel()
        await asyncio.wait({running})


def test_a_program_resolves_with_a_value_of_the_declared_type(folder: Path) -> None:
    asyncio.run(stopped(folder))
    calls: list[str] = []
    with Hive(folder, quick_config()) as hive:
        sell = shop(hive, None, calls)
        with pytest.raises(HelpNeeded, match="charge is ambiguous"):
            hive.run_sync(sell, run_id="r")
        for wrong in ({"completed": 1, "rerun": True}, {}):
            with pytest.raises(ConfigurationError, match="either completed=… or rerun=True"):
                hive.resolve("r", "charge", **wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=r"the result of charge\.cents is 'x'"):
            hive.resolve("r", "charge", completed={"cents": "x"})
        with pytest.raises(HelpNeeded):
            hive.run_sync(sell, run_id="r")
        hive.resolve("r", "charge", completed=Paid(7), by="ann")
        assert hive.run_sync(sell, run_id="r") == Paid(7)
        events = asyncio.run(_events(hive))
        assert [(each.by, each.resolved) for each in events if type(each) is StepCompleted] == [
            ("ann", True)
        ]
        assert sum(type(each) is RunSuspended for each in events) == 1  # though it was tried twice
    assert calls == []


async def _events(hive: Hive) -> list[Any]:
    return [event async for event in hive.events("r", follow=False)]


def test_a_program_may_let_it_run_again(folder: Path) -> None:
    asyncio.run(stopped(folder))
    calls: list[str] = []
    with Hive(folder, quick_config()) as hive:
        hive.resolve("r", "charge", rerun=True)  # before it was resumed, too
        assert hive.run_sync(shop(hive, None, calls), run_id="r") == Paid(1)
        assert any(type(each) is Retried and each.resolved for each in asyncio.run(_events(hive)))
    assert calls == ["a"]


def test_a_type_that_is_not_written_as_text_is_resolved_in_a_program(folder: Path) -> None:
    asyncio.run(stopped(folder, "guess"))
    done = maestro("resolve", "r", "guess", "--completed", "[1]", "--store", folder)
    assert "the result of guess is a set[int], which cannot be typed" in complaint(done, 2)
    with Hive(folder, quick_config()) as hive:
        hive.resolve("r", "guess", completed={3, 4})
        assert hive.run_sync(shop(hive, None, []), "guess", run_id="r") == {3, 4}


def test_while_a_process_has_the_run_it_is_a_message_that_is_taken_once(folder: Path) -> None:
    asyncio.run(stopped(folder))
    with Hive(folder, quick_config()) as hive:
        sell = shop(hive, None, [])
        with pytest.raises(HelpNeeded):
            hive.run_sync(sell, run_id="r")
        store = hive._open()
        held = store.acquire_run("r")
        try:
            words = [
                "resolve",
                "r",
                "charge",
                "--completed",
                '{"cents": 8}',
                "--store",
                str(folder),
            ]
            done = maestro(*words)
            assert done.returncode == 0, done.stderr
            assert "as soon as the process that has the run resumes it" in done.stdout
            message = complaint(maestro(*words), 2)
            assert "was resolved already; that is taken when the run is resumed" in message
        finally:
            store.release_run(held)
        assert hive.run_sync(sell, run_id="r") == Paid(8)
        assert store.documents("$inbox") == []


def test_a_step_that_is_being_executed_is_not_resolved(folder: Path) -> None:
    async def main() -> None:
        async with Hive(folder, quick_config()) as hive:
            started = asyncio.Event()
            running = asyncio.create_task(hive.run(shop(hive, started, []), run_id="r"))
            await started.wait()
            with pytest.raises(ConfigurationError, match="'charge' of run 'r' is being executed"):
                hive.resolve("r", "charge", rerun=True)
            running.cancel()
            await asyncio.wait({running})

    asyncio.run(main())


_EXECUTOR = textwrap.dedent("""
    import asyncio, os, sys
    from maestro_hive import ExecutionConfig, PersonaExecutor

    async def charge(customer):
        if customer in sys.argv[2:]:
            os.kill(os.getpid(), 9)
        return f"{customer} paid"

    config = ExecutionConfig.in_folder(sys.argv[1])
    with PersonaExecutor(config, workflow_id="r") as executor:
        asking = executor.options(on_ambiguous="ask")
        for customer in "ab":
            result = asyncio.run(asking.execute(charge, "charge", customer))
            print(result.final_output, flush=True)
""")


def test_a_step_of_an_executor_is_settled_by_the_same_command(folder: Path) -> None:
    assert run_python(_EXECUTOR, folder, "a").returncode == -signal.SIGKILL
    assert "maestro resolve r charge --completed RESULT" in run_python(_EXECUTOR, folder).stderr
    words = ["resolve", "r", "charge", "--completed", '"by hand"', "--store", str(folder)]
    assert maestro(*words).returncode == 0
    assert run_python(_EXECUTOR, folder).stdout.splitlines() == ["by hand", "b paid"]
