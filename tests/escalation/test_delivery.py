"""Delivery of escalations: one ticket per failure, never two, never none, wherever it is killed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from maestro_hive.engine import outbox
from maestro_hive.engine.delivery import Delivery, marker_of
from maestro_hive.engine.errors import FailureReport
from maestro_hive.engine.escalation import EscalationCase
from maestro_hive.engine.outbox import ESCALATIONS, StoredEscalation, found_escalation
from maestro_hive.testing import ManualClock, MemoryStore
from tests.escalation.file_tickets import FileTickets, lose, refuse

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.maestro.state.codec import Encoded
    from maestro_hive.maestro.state.records import Document

LAG = 120.0
#: How often a life may look for what it has to do.
_MOST_LOOKS = 200


class Killed(BaseException):
    """Ends a life, as ``kill -9`` does: nothing after it is done."""


def escalation(name: str, fingerprint: str = "f00d") -> StoredEscalation:
    case = EscalationCase(
        run_id="r",
        task_name="deploy",
        effect_key=f"key-{name}",
        summary="deploy: no route",
        description="it failed",
        failure_report=FailureReport("default", "UNKNOWN", "no route"),
        fingerprint=fingerprint,
    )
    return StoredEscalation(
        id=name, run_id="r", step="deploy", at=0, case=case.to_json(), finds=True
    )


class Store(MemoryStore):
    """A store whose process may die before or after each of its writes."""

    point: Callable[[], None] = staticmethod(lambda: None)

    def update_document(
        self,
        namespace: str,
        key: str,
        change: Callable[[bytes | None], Encoded | None],
        wake: str | None = None,
    ) -> Document | None:
        self.point()
        made = super().update_document(namespace, key, change, wake)
        self.point()
        return made


class World:
    """A ticket system, and the lives of processes that deliver to it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.tickets = FileTickets(None, LAG)
        self.tickets.now = lambda: self.clock.now().timestamp()
        self.store = Store(clock=self.clock)
        #: How many points there were, and at which of them the process is killed.
        self.points = 0
        self.kill_at: int | None = None
        self._watch()

    def add(self, *names: str, **facts: Any) -> None:
        for name in names:
            outbox.apply(self.store, outbox.added(escalation(name, **facts)))

    def end(self, name: str) -> None:
        outbox.apply(self.store, outbox.ended(name, "jo answered"))

    def found(self, name: str) -> StoredEscalation:
        record = found_escalation(self.store, name)
        assert record is not None
        return record

    def deliver(self) -> None:
        """Deliver everything, waiting where that is said, until there is nothing more to do."""
        for _ in range(_MOST_LOOKS):
            left = asyncio.run(self._all())
            waits = [each for each in left if each is not None]
            if not waits:
                return
            self.clock.advance(min(waits))
        raise AssertionError("it is never done")

    async def _all(self) -> list[float | None]:
        return [await self._once(name) for name in ESCALATIONS.all(self.store)]

    async def _once(self, name: str) -> float | None:
        return await Delivery(self.store, self.tickets).deliver(name)

    def live(self, work: Callable[[], None]) -> bool:
        """Do some work; False if the process was killed in it, and another one starts."""
        try:
            work()
        except Killed:
            self.kill_at = None
            self.store = Store(clock=self.clock, left_by=self.store)
            self._watch()
            return False
        return True

    def _watch(self) -> None:
        self.store.point = self._point
        self.tickets.before = self.tickets.after = lambda _: self._point()

    def _point(self) -> None:
        self.points += 1
        if self.points == self.kill_at:
            raise Killed


@pytest.fixture
def world() -> World:
    return World()


def test_a_failure_gets_one_ticket(world: World) -> None:
    world.add("a")
    world.deliver()
    world.deliver()
    assert list(world.tickets.tickets) == ["MD-1"]
    record = world.found("a")
    assert (record.ticket, record.delivered, record.comment) == ("MD-1", True, None)


def test_the_same_failure_again_is_a_comment(world: World) -> None:
    world.add("a")
    world.deliver()
    world.add("b")
    world.deliver()
    world.deliver()
    assert list(world.tickets.tickets) == ["MD-1"]
    (text,) = world.tickets.texts("MD-1")
    assert text.splitlines()[-1] == marker_of("key-b")
    assert (world.found("b").ticket, world.found("b").comment) == ("MD-1", "1")


def test_another_failure_gets_a_ticket_of_its_own(world: World) -> None:
    world.add("a")
    world.add("b", fingerprint="beef")
    world.deliver()
    assert list(world.tickets.tickets) == ["MD-1", "MD-2"]


def test_a_ticket_that_is_resolved_is_not_used_again(world: World) -> None:
    world.add("a")
    world.deliver()
    world.tickets.say("MD-1", "use the mirror")
    world.add("b")
    world.deliver()
    assert world.found("b").ticket == "MD-2"
    assert world.tickets.texts("MD-1") == []


@pytest.mark.parametrize("when", ["before it is read", "before the comment"])
def test_a_ticket_that_was_deleted_is_replaced_by_the_next_failure(world: World, when: str) -> None:
    world.add("a")
    world.deliver()
    if when == "before it is read":
        world.tickets.delete("MD-1")
    else:
        world.tickets.before = lambda call: (
            world.tickets.delete("MD-1") if call == "comment" else None
        )
    world.add("b")
    assert asyncio.run(world._once("b")) is None, "it is delivered at once"
    assert (world.found("b").ticket, world.found("b").comment) == ("MD-2", None)
    world.add("c")
    world.tickets.before = lambda _: None
    world.deliver()
    assert (world.found("c").ticket, len(world.tickets.texts("MD-2"))) == ("MD-2", 1)


def test_the_end_of_an_escalation_is_not_told_to_a_ticket_that_was_deleted(world: World) -> None:
    world.add("a")
    world.deliver()
    world.tickets.delete("MD-1")
    world.end("a")
    world.tickets.before = lambda call: refuse(call) if call == "find" else None
    assert asyncio.run(world._once("a")) is not None, "the address may be wrong"
    assert world.found("a").outcome == "jo answered"
    world.tickets.before = lambda _: None
    world.deliver()
    assert ESCALATIONS.all(world.store) == {}
    assert list(world.tickets.tickets) == ["MD-1"]


def test_a_ticket_that_was_there_before_gets_a_comment(world: World) -> None:
    asyncio.run(world.tickets.create(escalation("z").told_case))
    world.clock.advance(LAG)
    world.add("a")
    world.deliver()
    assert list(world.tickets.tickets) == ["MD-1"]
    assert len(world.tickets.texts("MD-1")) == 1


def test_the_ticket_is_told_how_it_ended_and_then_nothing_is_left(world: World) -> None:
    world.add("a")
    world.deliver()
    world.end("a")
    world.deliver()
    (text,) = world.tickets.texts("MD-1")
    assert text.startswith("jo answered")
    assert ESCALATIONS.all(world.store) == {}


def test_what_was_answered_before_anybody_was_told_makes_no_ticket(world: World) -> None:
    world.add("a")
    world.end("a")
    world.deliver()
    assert world.tickets.tickets == {}
    assert ESCALATIONS.all(world.store) == {}


def test_a_refusal_is_tried_again_when_the_system_says(world: World) -> None:
    world.add("a")
    world.tickets.before = lambda call: refuse(call) if call == "create" else None
    assert asyncio.run(world._once("a")) == 7.0
    assert world.found("a").problem is not None
    assert asyncio.run(world._once("a")) == 7.0  # it waits, and does not call
    world._watch()
    world.deliver()
    assert list(world.tickets.tickets) == ["MD-1"]
    assert world.found("a").problem is None


def test_one_process_delivers_at_a_time(world: World) -> None:
    world.add("a")
    with_lease = world.store.take_lease(f"escalation/{world.found('a').label}")
    assert asyncio.run(world._once("a")) == 1.0
    assert world.tickets.tickets == {}
    world.store.release_lease(with_lease)
    world.deliver()
    assert list(world.tickets.tickets) == ["MD-1"]


@pytest.mark.parametrize("call", ["create", "comment", "find", "comments", "ticket"])
@pytest.mark.parametrize("side", ["before", "after"])
def test_a_lost_response_makes_neither_two_nor_none(world: World, call: str, side: str) -> None:
    lost: list[str] = []

    def lose_once(name: str) -> None:
        if name == call and not lost:
            lost.append(name)
            lose(name)

    world.add("a")
    setattr(world.tickets, side, lose_once)
    world.deliver()
    world.add("b")
    world.deliver()
    world.end("a")
    world.deliver()
    check_one_of_each(world)


def whole_story(world: World, done: set[str]) -> None:
    """Escalate a failure twice, and end the first one; go on with what an earlier life did not do."""
    for name in ("a", "b"):
        if name not in done:
            world.add(name)
            done.add(name)
        world.deliver()
    if "end" not in done:
        world.end("a")
        done.add("end")
    world.deliver()


def check_one_of_each(world: World) -> None:
    assert list(world.tickets.tickets) == ["MD-1"]
    markers = [text.splitlines()[-1] for text in world.tickets.texts("MD-1")]
    assert sorted(markers) == [marker_of("key-a/outcome"), marker_of("key-b")]
    assert world.found("b").ticket == "MD-1"
    assert list(ESCALATIONS.all(world.store)) == ["b"]


def test_killed_at_any_point_there_is_one_ticket_and_one_of_each_comment() -> None:
    undisturbed = World()
    whole_story(undisturbed, set())
    check_one_of_each(undisturbed)
    for number in range(1, undisturbed.points + 1):
        world, done = World(), set[str]()
        world.kill_at = number
        lives = 1
        while not world.live(lambda: whole_story(world, done)):  # noqa: B023 - it is called here
            lives += 1
        assert lives == 2, f"it was not killed at point {number}"
        check_one_of_each(world)


def test_killed_twice_there_is_one_ticket() -> None:
    """A kill while what an earlier kill left in doubt is looked for."""
    for first in range(2, 9):
        for second in range(first + 1, first + 9):
            world, done = World(), set[str]()
            world.kill_at = first
            if not world.live(lambda: whole_story(world, done)):  # noqa: B023
                world.kill_at = second
            while not world.live(lambda: whole_story(world, done)):  # noqa: B023
                pass
            check_one_of_each(world)


@pytest.mark.parametrize("first", ["a", "b"])
def test_what_was_made_before_a_kill_and_answered_at_once_is_found(
    world: World, first: str
) -> None:
    """Whichever escalation of the same failure the next process looks at first."""
    world.add("a")

    def kill(call: str) -> None:
        if call == "create":
            raise Killed

    world.tickets.after = kill
    assert not world.live(world.deliver)
    world.tickets.say("MD-1", "use the mirror")
    world.clock.advance(LAG)
    world.add("b")
    for name in sorted(("a", "b"), key=lambda each: each != first):
        asyncio.run(world._once(name))
    world.deliver()
    assert world.found("a").ticket == "MD-1"
    assert world.found("b").ticket == "MD-2"  # a resolved ticket is not used for a new failure
    assert list(world.tickets.tickets) == ["MD-1", "MD-2"]


def test_a_comment_made_before_a_kill_and_answered_at_once_is_found(world: World) -> None:
    world.add("a")
    world.deliver()
    world.add("b")

    def kill(call: str) -> None:
        if call == "comment":
            raise Killed

    world.tickets.after = kill
    assert not world.live(world.deliver)
    world.tickets.say("MD-1", "use the mirror")
    world.deliver()
    assert (world.found("b").ticket, world.found("b").comment) == ("MD-1", "1")
    assert list(world.tickets.tickets) == ["MD-1"]


def test_a_comment_that_was_not_made_on_a_ticket_resolved_meanwhile_becomes_a_ticket(
    world: World,
) -> None:
    world.add("a")
    world.deliver()
    world.add("b")

    def kill(call: str) -> None:
        if call == "comment":
            raise Killed

    world.tickets.before = kill
    assert not world.live(world.deliver)
    world.tickets.say("MD-1", "use the mirror")
    world.deliver()
    assert (world.found("b").ticket, world.found("b").comment) == ("MD-2", None)


def test_a_ticket_resolved_before_the_doubt_began_is_not_taken_for_what_was_made(
    world: World,
) -> None:
    world.add("a")
    world.deliver()
    world.tickets.say("MD-1", "use the mirror")
    world.clock.advance(1)
    world.add("b")

    def kill(call: str) -> None:
        if call == "create":
            raise Killed

    world.tickets.before = kill
    assert not world.live(world.deliver)
    world.deliver()
    assert world.found("b").ticket == "MD-2"
