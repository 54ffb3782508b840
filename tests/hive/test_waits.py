"""Durable sleeps, and questions that somebody answers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

import pytest

from maestro_hive import Hive, RunFailedError
from maestro_hive.hive import OutsideRunError, UnknownRunError
from maestro_hive.hive.active_run import ActiveRun
from maestro_hive.hive.answer_types import ShapeError
from maestro_hive.hive.runs import read_run
from maestro_hive.kernel.errors import ConfigurationError, CorruptionError
from maestro_hive.maestro.state.projections import facts_of
from maestro_hive.maestro.state.records import EntryKind
from maestro_hive.maestro.state.views import open_waits
from tests.hive.conftest import quick_config
from tests.timing import least

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tests.hive.conftest import PassedTime


class Verdict(Enum):
    YES = "yes"
    NO = "no"


@dataclass(frozen=True)
class Approval:
    amount: float
    note: str = ""


async def until(condition: Callable[[], bool]) -> None:
    """Wait until something is so, for half a minute at most: the machine may be busy."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what changes is in a journal
            await asyncio.sleep(0.01)


def status(hive: Hive, run_id: str = "r") -> str:
    return next((info.status for info in hive.runs() if info.run_id == run_id), "none")


async def leave(running: asyncio.Task[Any]) -> None:
    """Leave a run in the middle, as Ctrl+C would."""
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def test_a_run_sleeps_once_and_only_for_what_is_left(folder: Path, clock: PassedTime) -> None:
    starts: list[str] = []

    def sleeper(hive: Hive) -> Callable[..., Awaitable[str]]:
        @hive.workflow
        async def nap() -> str:
            starts.append("nap")
            await hive.sleep(3600)
            return "awake"

        return nap

    async def first() -> None:
        with Hive(folder, quick_config()) as hive:
            running = asyncio.create_task(hive.run(sleeper(hive), run_id="r"))
            await until(lambda: bool(hive.runs()) and bool(read_run(hive._open(), "r").waits))
            clock.advance(3000)
            await leave(running)
            assert status(hive) == "stopped"

    async def second() -> None:
        with Hive(folder, quick_config()) as hive:
            nap = sleeper(hive)
            running = asyncio.create_task(hive.run(nap, run_id="r"))
            await until(lambda: len(starts) == 2)
            clock.advance(500)
            await asyncio.sleep(0.1)
            assert not running.done()
            clock.advance(100)
            assert await running == "awake"
            assert await hive.run(nap, run_id="r") == "awake"

    asyncio.run(first())
    asyncio.run(second())


def test_sleeps_of_equal_length_are_different_sleeps(hive: Hive) -> None:
    @hive.workflow
    async def naps() -> None:
        await asyncio.gather(hive.sleep(0.1), hive.sleep(0.1))
        await hive.sleep(0.1)

    started = time.monotonic()
    hive.run_sync(naps)
    assert time.monotonic() - started >= 0.2


def test_a_sleep_whose_end_is_past_is_over_at_once(hive: Hive) -> None:
    @hive.workflow
    async def nap() -> str:
        await hive.sleep(-0.001)
        return "awake"

    assert hive.run_sync(nap) == "awake"


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), "long"])
def test_a_sleep_that_is_no_number_is_refused(hive: Hive, seconds: Any) -> None:
    @hive.workflow
    async def nap() -> None:
        await hive.sleep(seconds)

    with pytest.raises(RunFailedError, match="the seconds to sleep"):
        hive.run_sync(nap)


def ask(hive: Hive, name: str = "approve", **options: Any) -> Callable[..., Awaitable[Any]]:
    @hive.workflow(name="ask")
    async def asking() -> Any:
        return await hive.wait_for(name, **options)

    return asking


@pytest.mark.timing
def test_an_answer_in_the_same_process_arrives_at_once(hive: Hive) -> None:
    asking, names = ask(hive), iter("abcde")

    async def seconds(run_id: str) -> float:
        running = asyncio.create_task(hive.run(asking, run_id=run_id))
        await until(lambda: status(hive, run_id) == "waiting")
        hive.answer(run_id, "approve", {"by": "me"})
        answered = time.monotonic()
        assert await running == {"by": "me"}
        return time.monotonic() - answered

    assert least(lambda: asyncio.run(seconds(next(names))), 0.15) < 0.15
    assert status(hive, "a") == "success"


def test_an_answer_arrives_although_another_thread_takes_a_question_into_account(
    hive: Hive, monkeypatch: pytest.MonkeyPatch
) -> None:
    listens = ActiveRun.listens
    others: list[bytes] = []

    def listens_later(run: ActiveRun, identity: bytes) -> bool:
        questions = run.run.state.questions
        if others:
            questions.pop(others[0], None)
            return listens(run, identity)
        others.append(identity[::-1])
        taking = threading.Thread(target=questions.setdefault, args=(*others, questions[identity]))
        taking.start()
        taking.join()
        return False  # as if the question was being settled

    monkeypatch.setattr(ActiveRun, "listens", listens_later)

    async def main() -> None:
        running = asyncio.create_task(hive.run(ask(hive), run_id="r"))
        await until(lambda: status(hive) == "waiting")
        hive.answer("r", "approve", "yes")
        async with asyncio.timeout(30):
            assert await running == "yes"

    asyncio.run(main())


def test_a_waiting_run_can_be_left_and_answered_while_no_process_runs_it(folder: Path) -> None:
    async def first() -> None:
        with Hive(folder, quick_config()) as hive:
            running = asyncio.create_task(hive.run(ask(hive), run_id="r"))
            await until(lambda: status(hive) == "waiting")
            await leave(running)

    asyncio.run(first())
    with Hive(folder, quick_config()) as hive:
        assert status(hive) == "waiting"
        hive.answer("r", "approve", 7)
    with Hive(folder, quick_config()) as hive:
        asking = ask(hive)
        assert hive.run_sync(asking, run_id="r") == 7
        assert hive.run_sync(asking, run_id="r") == 7


def test_an_answer_may_come_before_the_question(hive: Hive) -> None:
    gate = asyncio.Event()

    @hive.workflow
    async def later() -> Any:
        await gate.wait()
        return [await hive.wait_for("n"), await hive.wait_for("n"), await hive.wait_for("m")]

    async def main() -> Any:
        running = asyncio.create_task(hive.run(later, run_id="r"))
        await until(lambda: status(hive) == "running")
        for name, value in [("n", 1), ("m", 3)]:
            hive.answer("r", name, value, early=True)
        gate.set()
        await until(lambda: len(read_run(hive._open(), "r").waits) == 2)
        hive.answer("r", "n", 2, early=True)
        return await running

    assert asyncio.run(main()) == [1, 2, 3]


def test_nobody_answering_in_time_is_a_timeout_that_is_stored(folder: Path) -> None:
    outcomes = []

    def impatient(hive: Hive, seconds: float) -> Callable[..., Awaitable[str]]:
        @hive.workflow
        async def asking() -> str:
            try:
                return str(await hive.wait_for("approve", timeout=seconds))
            except TimeoutError as error:
                outcomes.append(str(error))
            await hive.wait_for("more")
            return "never"

        return asking

    async def once(seconds: float) -> None:
        with Hive(folder, quick_config()) as hive:
            before = len(outcomes)
            running = asyncio.create_task(hive.run(impatient(hive, seconds), run_id="r"))
            await until(lambda: len(outcomes) > before)
            await leave(running)

    asyncio.run(once(0.2))
    asyncio.run(once(3600))  # it does not wait again
    assert outcomes == ["there was no answer to 'approve' of run 'r' in time"] * 2


TYPED: list[tuple[Any, Any, Any]] = [
    (bool, True, "maybe"),
    (int, 3, True),
    (str, "x", 3),
    (Verdict, "YES", "PERHAPS"),
    (Literal["a", "b"], "a", "c"),
    (Approval, {"amount": 3.5}, {"amount": "much"}),
    (list[int], [1, 2], [1, "x"]),
]


@pytest.mark.parametrize("kind, good, bad", TYPED, ids=[str(each[0]) for each in TYPED])
def test_an_answer_of_another_kind_is_refused_where_it_is_given(
    hive: Hive, kind: Any, good: Any, bad: Any
) -> None:
    async def main() -> Any:
        running = asyncio.create_task(hive.run(ask(hive, type=kind), run_id="r"))
        await until(lambda: status(hive) == "waiting")
        with pytest.raises(ShapeError, match="the answer to 'approve'"):
            hive.answer("r", "approve", bad)
        assert status(hive) == "waiting"
        hive.answer("r", "approve", good)
        return await running

    result = asyncio.run(main())
    if kind is Verdict:
        assert result is Verdict.YES
    elif kind is Approval:
        assert result == Approval(3.5)
    else:
        assert result == good


@pytest.mark.parametrize("value", [Verdict.NO, "NO", "no"])
def test_a_member_of_an_enum_is_answered_as_itself_or_by_name_or_value(
    hive: Hive, value: Any
) -> None:
    async def main() -> Any:
        running = asyncio.create_task(hive.run(ask(hive, type=Verdict), run_id="r"))
        await until(lambda: status(hive) == "waiting")
        hive.answer("r", "approve", value)
        return await running

    assert asyncio.run(main()) is Verdict.NO


def test_an_early_answer_of_the_wrong_kind_is_dropped_out_loud(
    hive: Hive, caplog: pytest.LogCaptureFixture
) -> None:
    gate = asyncio.Event()

    @hive.workflow
    async def later() -> int:
        await gate.wait()
        return await hive.wait_for("n", type=int)

    async def main() -> int:
        running = asyncio.create_task(hive.run(later, run_id="r"))
        await until(lambda: status(hive) == "running")
        hive.answer("r", "n", "many", early=True)
        gate.set()
        await until(lambda: bool(caplog.records))
        hive.answer("r", "n", 5)
        return await running

    assert asyncio.run(main()) == 5
    assert "run r still waits: the answer to 'n' is 'many'" in caplog.text


def test_an_answer_to_no_run_or_to_one_that_is_over_is_refused(hive: Hive) -> None:
    @hive.workflow
    async def quick() -> None: ...

    hive.run_sync(quick, run_id="r")
    with pytest.raises(UnknownRunError, match="'nobody'"):
        hive.answer("nobody", "approve")
    with pytest.raises(ConfigurationError, match="has ended"):
        hive.answer("r", "approve")


def test_sleep_and_wait_outside_a_workflow_say_so(hive: Hive) -> None:
    with pytest.raises(OutsideRunError, match=r"hive\.sleep\(\) was called outside a run"):
        asyncio.run(hive.sleep(1))
    with pytest.raises(OutsideRunError, match=r"hive\.wait_for\(\)"):
        asyncio.run(hive.wait_for("x"))


def test_many_waits_hold_no_thread(hive: Hive) -> None:
    import threading

    before = threading.active_count()

    @hive.workflow
    async def many() -> list[Any]:
        return await asyncio.gather(*(hive.wait_for(f"q{number}") for number in range(60)))

    async def main() -> list[Any]:
        running = asyncio.create_task(hive.run(many, run_id="r"))
        await until(lambda: status(hive) == "waiting")
        await until(lambda: len(open_waits(read_run(hive._open(), "r"))) == 60)
        await asyncio.sleep(0.3)
        assert threading.active_count() < before + 20
        for number in range(60):
            hive.answer("r", f"q{number}", number)
        return await running

    assert asyncio.run(main()) == list(range(60))


# --- one question, one answer --------------------------------------------------------------------------


def test_a_second_answer_to_one_question_does_not_answer_the_next(hive: Hive) -> None:
    @hive.workflow
    async def spend() -> list[str]:
        return [what for what in ("rent", "yacht") if await hive.wait_for("approve", type=bool)]

    async def main() -> Any:
        running = asyncio.create_task(hive.run(spend, run_id="r"))
        await until(lambda: status(hive) == "waiting")
        hive.answer("r", "approve", True)
        with pytest.raises(ConfigurationError, match="has its answer to 'approve' already"):
            hive.answer("r", "approve", True)
        await until(lambda: len(read_run(hive._open(), "r").waits) == 2)
        await asyncio.sleep(0.3)
        assert status(hive) == "waiting"  # for the second one
        hive.answer("r", "approve", False)
        return await running

    assert asyncio.run(main()) == ["rent"]


def test_an_answer_that_is_not_waited_for_needs_to_be_called_early(hive: Hive) -> None:
    async def main() -> None:
        running = asyncio.create_task(hive.run(ask(hive), run_id="r"))
        await until(lambda: status(hive) == "waiting")
        with pytest.raises(ConfigurationError, match="does not wait for 'colour'; it waits for"):
            hive.answer("r", "colour", 1)
        await leave(running)

    asyncio.run(main())


def test_a_question_that_timed_out_is_asked_again_after_a_retry(
    hive: Hive, clock: PassedTime
) -> None:
    impatient = ask(hive, timeout=60)

    async def unanswered() -> None:
        running = asyncio.create_task(hive.run(impatient, run_id="r"))
        await until(lambda: status(hive) == "waiting")
        clock.advance(60)
        await running

    with pytest.raises(RunFailedError, match="in time"):
        asyncio.run(unanswered())
    hive.retry("r")

    async def main() -> Any:
        running = asyncio.create_task(hive.run(impatient, run_id="r"))
        await until(lambda: status(hive) == "waiting")
        hive.answer("r", "approve", "yes")
        return await running

    assert asyncio.run(main()) == "yes"


def test_the_workflow_is_told_what_the_journal_says_when_an_answer_comes_in_the_last_moment(
    hive: Hive,
) -> None:
    @hive.workflow
    async def close_call() -> str:
        try:
            return str(await hive.wait_for("approve", timeout=0.05))
        except TimeoutError:
            return "timeout"

    async def one(number: int) -> None:
        run_id = f"r{number}"
        running = asyncio.create_task(hive.run(close_call, run_id=run_id))
        await until(lambda: status(hive, run_id) in ("waiting", "success"))
        await asyncio.sleep(0.02 + number % 10 * 0.005)
        with contextlib.suppress(ConfigurationError):  # it is over already
            hive.answer(run_id, "approve", "yes")
        result = await running
        state = read_run(hive._open(), run_id)
        (ended,) = state.answers.values()
        assert result == {"timeout": "timeout", "answered": "yes"}[facts_of(ended)["how"]]

    async def main() -> None:
        for first in range(0, 40, 10):
            await asyncio.gather(*(one(first + each) for each in range(10)))

    asyncio.run(main())


def test_an_answer_given_before_a_failure_is_taken_after_the_retry(hive: Hive) -> None:
    broken = [True]
    go = asyncio.Event()

    @hive.step(max_attempts=1)
    async def first() -> None:
        await go.wait()
        if broken:
            raise ValueError("no")

    @hive.workflow
    async def work() -> Any:
        await first()
        return await hive.wait_for("approve", type=str)

    async def main() -> None:
        running = asyncio.create_task(hive.run(work, run_id="r"))
        await until(lambda: status(hive) == "running")
        hive.answer("r", "approve", "yes", early=True)
        go.set()
        with pytest.raises(RunFailedError):
            await running

    asyncio.run(main())
    broken.clear()
    hive.retry("r")
    assert hive.run_sync(work, run_id="r") == "yes"


def waits_started(hive: Hive) -> int:
    store = hive._open()
    run = store.run("r")
    assert run is not None
    return [entry.kind for entry in store.entries(run.id)].count(EntryKind.WAIT_STARTED)


@pytest.mark.parametrize("answered", [False, True])
def test_a_question_whose_type_has_changed_is_asked_again(folder: Path, answered: bool) -> None:
    async def first() -> None:
        with Hive(folder, quick_config()) as hive:

            @hive.workflow(name="ask")
            async def asking() -> None:
                await hive.wait_for("approve", type=bool)
                await hive.sleep(60)

            running = asyncio.create_task(hive.run(asking, run_id="r"))
            await until(lambda: status(hive) == "waiting")
            if answered:
                hive.answer("r", "approve", True)
                await until(lambda: status(hive) == "running")
            await leave(running)

    async def second() -> Any:
        with Hive(folder, quick_config()) as hive:
            before = waits_started(hive)
            running = asyncio.create_task(hive.run(ask(hive, type=str), run_id="r"))
            await until(lambda: waits_started(hive) > before)
            hive.answer("r", "approve", "in words")
            return await running

    asyncio.run(first())
    assert asyncio.run(second()) == "in words"


def test_a_plain_step_may_wait_in_a_loop_of_its_own(hive: Hive) -> None:
    @hive.step(timeout=20)
    def blocking() -> Any:
        return asyncio.run(hive.wait_for("approve"))

    @hive.workflow
    async def work() -> Any:
        return await blocking()

    async def main() -> Any:
        running = asyncio.create_task(hive.run(work, run_id="r"))
        await until(lambda: status(hive) == "waiting")
        hive.answer("r", "approve", 5)
        return await running

    assert asyncio.run(main()) == 5


def test_messages_that_cannot_be_read_are_an_error_of_their_run_alone(hive: Hive) -> None:
    from maestro_hive.maestro.state import codec

    async def main() -> Any:
        asking = ask(hive)
        hive._open().update_document("$inbox", "other", lambda _: codec.encode({"answers": [{}]}))
        running = asyncio.create_task(hive.run(asking, run_id="r"))
        other = asyncio.create_task(hive.run(asking, run_id="other"))
        with pytest.raises(CorruptionError, match="it holds no messages"):
            await other
        await until(lambda: status(hive) == "waiting")
        hive.answer("r", "approve", 5)
        return await running

    assert asyncio.run(main()) == 5


def test_a_message_that_could_not_be_delivered_is_not_dropped(
    hive: Hive, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims = [False]  # somebody else settles the question just now, and gives it up again
    claim = ActiveRun.claim
    monkeypatch.setattr(
        ActiveRun, "claim", lambda run, identity: claims.pop() if claims else claim(run, identity)
    )

    async def main() -> Any:
        running = asyncio.create_task(hive.run(ask(hive), run_id="r"))
        await until(lambda: status(hive) == "waiting")
        hive.answer("r", "approve", 5)
        async with asyncio.timeout(5):
            return await running

    assert asyncio.run(main()) == 5
    assert not claims


def test_a_timeout_in_the_body_of_a_step_holds_for_all_attempts(hive: Hive) -> None:
    ended: list[str] = []

    @hive.step(max_attempts=2)
    async def body() -> None:
        try:
            async with hive.timeout(0.02):
                await asyncio.sleep(30)
        except BaseException as error:
            ended.append(type(error).__name__)
            raise

    @hive.workflow
    async def work() -> str:
        try:
            await body()
        except TimeoutError:
            return "in time"
        return "late"

    assert hive.run_sync(work) == "in time"
    assert ended == ["TimeoutError", "TimeoutError"]


def test_a_timeout_holds_on_another_loop_of_the_workflow(hive: Hive) -> None:
    async def elsewhere() -> str:
        started = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with hive.timeout(0.02):
                await asyncio.sleep(60)
        return "in time" if time.monotonic() - started < 30 else "late"

    @hive.workflow
    async def work() -> str:
        return await asyncio.to_thread(asyncio.run, elsewhere())

    assert hive.run_sync(work) == "in time"


def test_the_time_can_be_asked_for_in_a_callback_and_in_a_step_that_blocks(hive: Hive) -> None:
    times: list[Any] = []

    @hive.step(max_attempts=2)
    def blocks() -> int:
        times.append(hive.now())
        if len(times) == 1:
            raise ValueError("again")
        return len(times)

    @hive.workflow
    async def work() -> bool:
        assert await blocks() == 2
        loop = asyncio.get_running_loop()
        found: asyncio.Future[Any] = loop.create_future()
        loop.call_soon(lambda: found.set_result(hive.now()))
        return bool(await found > times[0])

    assert hive.run_sync(work)
    assert times[0] == times[1]  # recorded once for all attempts
