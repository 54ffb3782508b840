"""News: whoever asked hears it, in order, and nobody's failure stops it."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import NoReturn

import pytest

from maestro_hive.kernel.hooks import Hooks


@dataclass(frozen=True, slots=True)
class Event:
    number: int


@pytest.fixture
def hooks() -> Hooks[Event]:
    return Hooks()


def test_every_hook_hears_every_event_in_the_order_of_adding(hooks: Hooks[Event]) -> None:
    heard: list[tuple[str, int]] = []
    hooks.add(lambda event: heard.append(("first", event.number)))
    hooks.add(lambda event: heard.append(("second", event.number)))
    hooks.emit(Event(1))
    hooks.emit(Event(2))
    assert heard == [("first", 1), ("second", 1), ("first", 2), ("second", 2)]


def test_a_hook_receives_the_event_itself(hooks: Hooks[Event]) -> None:
    heard: list[Event] = []
    hooks.add(heard.append)
    event = Event(1)
    hooks.emit(event)
    assert heard[0] is event


def test_without_hooks_there_is_nobody_to_build_events_for(hooks: Hooks[Event]) -> None:
    assert not hooks
    hooks.emit(Event(1))
    remove = hooks.add(print)
    assert hooks
    remove()
    assert not hooks


def test_a_hook_added_later_does_not_hear_what_was_before(hooks: Hooks[Event]) -> None:
    heard: list[Event] = []
    hooks.emit(Event(1))
    hooks.add(heard.append)
    hooks.emit(Event(2))
    assert heard == [Event(2)]


def test_a_removed_hook_hears_nothing_more_and_removing_twice_is_no_error(
    hooks: Hooks[Event],
) -> None:
    kept: list[Event] = []
    removed: list[Event] = []
    remove = hooks.add(removed.append)
    hooks.add(kept.append)
    hooks.emit(Event(1))
    remove()
    remove()
    hooks.emit(Event(2))
    assert (removed, kept) == ([Event(1)], [Event(1), Event(2)])


def test_a_hook_added_twice_hears_twice_and_each_removal_ends_one(hooks: Hooks[Event]) -> None:
    heard: list[Event] = []
    hook = heard.append
    first, second = hooks.add(hook), hooks.add(hook)
    hooks.emit(Event(1))
    first()
    first()
    hooks.emit(Event(2))
    second()
    hooks.emit(Event(3))
    assert heard == [Event(1), Event(1), Event(2)]


def fail(event: Event) -> NoReturn:
    raise ValueError(f"no interest in {event.number}")


def test_a_failing_hook_is_logged_and_the_others_are_still_called(
    hooks: Hooks[Event], caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[Event] = []
    hooks.add(fail)
    hooks.add(heard.append)
    hooks.emit(Event(7))
    assert heard == [Event(7)]
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert record.name == "maestro_hive.kernel.hooks"
    assert "Event(number=7)" in record.getMessage()
    assert record.exc_info is not None
    assert "no interest in 7" in str(record.exc_info[1])


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_an_interruption_inside_a_hook_is_not_held_back(
    hooks: Hooks[Event], interruption: type[BaseException]
) -> None:
    def interrupt(event: Event) -> NoReturn:
        raise interruption

    hooks.add(interrupt)
    with pytest.raises(interruption):
        hooks.emit(Event(1))


def test_a_hook_may_remove_itself_while_it_is_called(hooks: Hooks[Event]) -> None:
    heard: list[Event] = []

    def once(event: Event) -> None:
        heard.append(event)
        remove()

    remove = hooks.add(once)
    hooks.add(heard.append)
    hooks.emit(Event(1))
    hooks.emit(Event(2))
    assert heard == [Event(1), Event(1), Event(2)]


def test_a_hook_may_add_another_which_hears_the_next_event(hooks: Hooks[Event]) -> None:
    heard: list[Event] = []
    remove = hooks.add(lambda event: hooks.add(heard.append))
    hooks.emit(Event(1))
    remove()
    hooks.emit(Event(2))
    assert heard == [Event(2)]


def test_a_hook_may_emit_in_turn(hooks: Hooks[Event]) -> None:
    heard: list[int] = []

    def count_down(event: Event) -> None:
        heard.append(event.number)
        if event.number:
            hooks.emit(Event(event.number - 1))

    hooks.add(count_down)
    hooks.emit(Event(3))
    assert heard == [3, 2, 1, 0]


def test_hooks_may_be_added_and_removed_from_many_threads_at_once(hooks: Hooks[Event]) -> None:
    heard: list[Event] = []
    hooks.add(heard.append)

    def come_and_go() -> None:
        for _ in range(200):
            hooks.add(lambda event: None)()
            hooks.emit(Event(0))

    threads = [threading.Thread(target=come_and_go) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(heard) == 1600
    hooks.emit(Event(1))
    assert heard[-1] == Event(1)
