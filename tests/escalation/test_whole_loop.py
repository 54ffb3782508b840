"""The whole loop: a step fails for good, a ticket appears, a person answers, the run finishes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive import Hive, current, testing
from maestro_hive.engine.outbox import ESCALATIONS
from maestro_hive.hive import keeping_escalations
from maestro_hive.hive.keeping_escalations import sync_all
from maestro_hive.maestro.state.events import EscalationDelivered
from tests.escalation.file_tickets import FileTickets, refuse
from tests.hive.conftest import quick_config
from tests.timing import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping_escalations, "SYNC_SECONDS", 0.02)
    monkeypatch.setattr(keeping_escalations, "_POLL_SECONDS", 0.02)


@pytest.fixture
def tickets(tmp_path: Path) -> FileTickets:
    return FileTickets(tmp_path / "tickets.json", index_lag=0.05)


@pytest.fixture
def hive(tmp_path: Path, tickets: FileTickets) -> Iterator[Hive]:
    with Hive(tmp_path / "state", quick_config(), escalation=tickets) as made:
        yield made


def deployment(hive: Hive) -> Any:
    @hive.step(escalate=True, max_attempts=1)
    async def deploy(size: int) -> int:
        if not any("mirror" in each for each in current().feedback):
            raise OSError("no route")
        return size

    @hive.workflow
    async def release(size: int) -> str:
        try:
            return f"deployed {await deploy(size)}"
        except OSError as error:
            return f"failed: {error}"

    return release


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - it is the program's own
            await asyncio.sleep(0.005)


def is_told(hive: Hive) -> bool:
    return any(each.delivered for each in hive.escalations())


ANSWERS = [
    ("use the mirror", "deployed 3"),
    ("/result 7", "deployed 7"),
    ("/give-up", "failed: no route"),
    ("/give-up nobody knows", "failed: no route"),
]


@pytest.mark.parametrize("comment, result", ANSWERS)
def test_a_comment_on_a_ticket_that_is_resolved_is_the_answer(
    hive: Hive, tickets: FileTickets, comment: str, result: str
) -> None:
    async def main() -> Any:
        running = asyncio.create_task(hive.run(deployment(hive), 3, run_id="r"))
        await until(lambda: is_told(hive))
        tickets.say("MD-1", comment)
        return await running

    assert asyncio.run(main()) == result
    assert list(tickets.tickets) == ["MD-1"]
    (outcome,) = tickets.texts("MD-1")
    assert outcome.startswith("jo (MD-1)")
    assert hive.escalations() == []


def test_a_worker_takes_the_answer_for_a_run_that_it_released(
    hive: Hive, tickets: FileTickets
) -> None:
    work = deployment(hive)

    async def main() -> Any:
        async with hive.worker(release_after=0.05) as worker:
            handle = await hive.start(work, 3, run_id="r")
            await until(lambda: is_told(hive) and not worker.active)
            tickets.say("MD-1", "use the mirror")
            result = await handle.result()
            await until(lambda: tickets.texts("MD-1"))
            return str(result)

    assert asyncio.run(main()) == "deployed 3"
    assert len(tickets.texts("MD-1")) == 1


def test_neither_strangers_nor_our_own_comments_nor_open_tickets_answer(
    hive: Hive, tickets: FileTickets
) -> None:
    async def main() -> Any:
        running = asyncio.create_task(hive.run(deployment(hive), 3, run_id="r"))
        await until(lambda: is_told(hive))
        tickets.say("MD-1", "use the mirror", resolve=False)
        assert await sync_all(hive._open(), tickets) == []
        tickets.say("MD-1", "/give-up", "stranger")
        tickets.say("MD-1", "/give-up", "maestro")
        return await running

    assert asyncio.run(main()) == "deployed 3"


@pytest.mark.parametrize("finds", [True, False])
def test_only_where_comments_are_read_a_person_is_told_to_comment(
    hive: Hive, tickets: FileTickets, finds: bool
) -> None:
    tickets.finds = finds

    async def main() -> str:
        running = asyncio.create_task(hive.run(deployment(hive), 3, run_id="r"))
        await until(lambda: is_told(hive))
        (found,) = hive.escalations()
        hive.answer_escalation(found.id, give_up=True)
        await running
        return found.description

    assert ("comment on the ticket" in asyncio.run(main())) is finds


def test_a_ticket_without_an_answer_leaves_the_run_waiting_and_says_why(
    hive: Hive, tickets: FileTickets
) -> None:
    async def main() -> Any:
        running = asyncio.create_task(hive.run(deployment(hive), 3, run_id="r"))
        await until(lambda: is_told(hive))
        tickets.say("MD-1", "/give-up", "stranger")
        await until(lambda: "may answer" in str(hive.escalations()[0].problem))
        tickets.say("MD-1", "/result seven")
        await until(lambda: "whole number" in str(hive.escalations()[0].problem))
        tickets.say("MD-1", "/result 7")
        return await running

    assert asyncio.run(main()) == "deployed 7"


def test_only_comments_after_ours_answer_the_same_failure_of_another_run(
    hive: Hive, tickets: FileTickets
) -> None:
    work = deployment(hive)

    async def main() -> list[str]:
        first = asyncio.create_task(hive.run(work, 3, run_id="first"))
        await until(lambda: is_told(hive))
        tickets.say("MD-1", "/give-up", resolve=False)
        second = asyncio.create_task(hive.run(work, 4, run_id="second"))
        await until(lambda: len(tickets.texts("MD-1")) == 1)
        await until(lambda: all(each.delivered for each in hive.escalations("second")))
        tickets.say("MD-1", "use the mirror")
        return list(await asyncio.gather(first, second))

    assert asyncio.run(main()) == ["deployed 3", "deployed 4"]
    assert list(tickets.tickets) == ["MD-1"]


def test_events_and_listings_name_the_ticket(hive: Hive, tickets: FileTickets) -> None:
    async def main() -> list[Any]:
        running = asyncio.create_task(hive.run(deployment(hive), 3, run_id="r"))
        await until(lambda: is_told(hive))
        assert [each.ticket for each in hive.escalations()] == ["MD-1"]
        tickets.say("MD-1", "use the mirror")
        await running
        return [each async for each in hive.events("r", follow=False)]

    events = asyncio.run(main())
    (told,) = [each for each in events if isinstance(each, EscalationDelivered)]
    assert (told.ticket, told.system) == ("MD-1", "file")
    assert "jo (MD-1)" in " ".join(map(str, events))


def test_a_system_that_is_down_is_tried_again_at_the_next_start(
    tmp_path: Path, tickets: FileTickets
) -> None:
    async def stopped() -> None:
        with Hive(tmp_path / "state", quick_config(), escalation=tickets) as hive:
            running = asyncio.create_task(hive.run(deployment(hive), 3, run_id="r"))
            await until(lambda: any(each.problem for each in hive.escalations()))
            running.cancel()
            await asyncio.wait({running})

    tickets.before = refuse
    asyncio.run(stopped())
    assert tickets.tickets == {}
    up = FileTickets(tickets.path, index_lag=0.05)

    async def resumed() -> Any:
        with Hive(tmp_path / "state", quick_config(), escalation=up) as hive:
            running = asyncio.create_task(hive.run(deployment(hive), 3, run_id="r"))
            await until(lambda: up.tickets)
            up.say("MD-1", "use the mirror")
            return await running

    assert asyncio.run(resumed()) == "deployed 3"
    assert list(up.tickets) == ["MD-1"]


def test_what_waited_locally_gets_a_ticket_once_there_is_a_system(
    tmp_path: Path, tickets: FileTickets
) -> None:
    async def stopped() -> None:
        with Hive(tmp_path / "state", quick_config()) as hive:
            running = asyncio.create_task(hive.run(deployment(hive), 3, run_id="r"))
            await until(hive.escalations)
            running.cancel()
            await asyncio.wait({running})

    asyncio.run(stopped())
    with Hive(tmp_path / "state", quick_config()) as hive:
        assert asyncio.run(sync_all(hive._open(), tickets)) == []
        (record,) = ESCALATIONS.all(hive._open()).values()
        assert (record.ticket, record.system) == ("MD-1", "file")
        tickets.say("MD-1", "use the mirror")
        assert asyncio.run(sync_all(hive._open(), tickets)) == [record.id]
        assert hive.run_sync(deployment(hive), 3, run_id="r") == "deployed 3"
        asyncio.run(sync_all(hive._open(), tickets))
    assert len(tickets.texts("MD-1")) == 1


@pytest.mark.parametrize(
    "answers, result",
    [
        ([{"feedback": "use the mirror"}], "deployed 3"),
        ([{"feedback": "try"}, {"feedback": "use the mirror"}], "deployed 3"),
        ([{"feedback": "try"}, {"result": 7}], "deployed 7"),
        ([{"give_up": True}], "failed: no route"),
    ],
)
def test_killed_after_any_record_it_is_the_same_run(
    answers: list[dict[str, Any]], result: str
) -> None:
    hive = Hive("anywhere", quick_config())

    @hive.step(escalate=True, max_attempts=1)
    async def deploy(size: int) -> int:
        if not any("mirror" in each for each in current().feedback):
            raise OSError("no route")
        return size

    @hive.step
    async def announce(text: str) -> str:
        return text

    @hive.workflow
    async def release(size: int) -> str:
        async def deployed() -> str:
            try:
                return f"deployed {await deploy(size)}"
            except OSError as error:
                return f"failed: {error}"

        first, _ = await asyncio.gather(deployed(), announce("started"))
        return await announce(first)

    with testing.use(hive) as kit:
        for each in answers:  # a killed run gets the answers that the undisturbed one got
            kit.answer_escalation(deploy, **each)
        report = kit.crash_everywhere(release, 3)
    assert report.result == result
