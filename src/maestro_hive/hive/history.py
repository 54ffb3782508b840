"""The order in which a workflow gets the outcomes of what it called: that of their record.

A workflow may depend on which of two results came first. So outcomes are delivered in the order in
which they were recorded, each when the workflow has reacted to the one before: in the life in which
they happen, and again when a run is resumed. Those that were recorded in one transaction, and have its
time, are delivered together. What is not recorded yet is executed only when everything that is recorded
was delivered.

An outcome that changed code no longer waits for is not waited for either: of those that the workflow
does wait for, the earliest is next.
"""

from __future__ import annotations

import contextvars
from collections import deque
from functools import partial
from heapq import heappop, heappush
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from maestro_hive.hive.branches import CONTENT_BYTES, branch_of, is_in_body
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.projections import facts_of
from maestro_hive.maestro.state.records import EntryKind, NewEntry

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from maestro_hive.hive.branches import Branch
    from maestro_hive.maestro.state.projections import RunState
    from maestro_hive.maestro.state.records import Entry

#: Where it cannot be seen what a loop has to do: after so many turns of it in which all tasks wait,
#: the workflow has reacted. More than one, because the end of a task reaches who waits for it
#: through callbacks (of a ``gather``).
_QUIET_TURNS = 8
#: A workflow that is never done reacting, such as one that polls, gets the next outcome after the
#: first number of turns; soon after fewer of them, until it has reacted; but not fewer than these.
_MOST_TURNS = 2_000
_LEAST_TURNS = 20
#: For how many seconds a workflow that waits for a time of its own may take to ask for an outcome
#: that is recorded before those that it does ask for.
_OWN_TIME_SECONDS = 5.0


class Slot:
    """The place of one outcome in the order; ``deliver`` is called when it is its turn."""

    __slots__ = ("at", "deliver", "number", "seq")

    def __init__(self, outcome: Entry, number: int) -> None:
        self.seq = outcome.seq
        #: The time of its transaction.
        self.at = outcome.at
        self.number = number
        #: None until what is delivered is at hand.
        self.deliver: Callable[[], None] | None = None

    def __lt__(self, other: Slot) -> bool:
        return (self.seq, self.number) < (other.seq, other.number)

    def comes_before(self, outcome: Entry) -> bool:
        """Return whether it is delivered before an outcome, and not together with it."""
        return self.seq < outcome.seq and self.at != outcome.at


def _nothing() -> None:
    """Deliver an outcome that is no longer waited for."""


class Turns:
    """The turns of one loop: in each, those workflows that have reacted get their next outcome.

    The loop is asked what it has to do, once for all runs on it; not every loop shows that.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: dict[History, None] = {}
        self._is_taking = False
        # What is called runs in contexts of its own.
        self._context = contextvars.Context()
        ready, timers = getattr(loop, "_ready", None), getattr(loop, "_scheduled", None)
        self.ready: deque[asyncio.Handle] | None = ready if isinstance(ready, deque) else None
        self._timers: list[asyncio.TimerHandle] = timers if isinstance(timers, list) else []

    def add(self, history: History) -> None:
        """Have ``take_turn`` of a run called at the end of what the loop has to do now."""
        if not self._due and not self._is_taking:
            self._loop.call_soon(self._take, context=self._context)
        self._due[history] = None

    def _take(self) -> None:
        due, self._due = self._due, {}
        # Of a copy, which is made at once: other threads may add to it meanwhile.
        active = None if self.ready is None else set(map(_history_of, self.ready.copy()))
        self._is_taking = True
        try:
            for history in due:
                history.take_turn(None if active is None else history in active)
        finally:
            self._is_taking = False
            if self._due:  # not before: what was delivered to any of them comes first
                self._loop.call_soon(self._take, context=self._context)

    def own_time(self, history: History) -> float | None:
        """Return when the next timer of a workflow's own is due, in the time of the loop."""
        own = [each.when() for each in self._timers if _is_of(history, each)]
        return min(own, default=None)

    def call_at(self, when: float, history: History) -> None:
        """Have ``take_turn`` of a run called when the loop's time has come."""
        self._loop.call_at(when, self.add, history, context=self._context)


def _history_of(handle: asyncio.Handle) -> History | None:
    """Return the history of the workflow whose code made a callback; None if it is no workflow's."""
    branch = branch_of(handle)
    return None if branch is None else branch.history


def _is_of(history: History, timer: asyncio.TimerHandle) -> bool:
    return not timer.cancelled() and _history_of(timer) is history


#: Of each loop that runs are executed on.
_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, Turns] = WeakKeyDictionary()


def _turns_of(loop: asyncio.AbstractEventLoop) -> Turns:
    found = _turns.get(loop)
    if found is None:
        found = _turns[loop] = Turns(loop)
    return found


class History:
    """The outcomes that one run's workflow waits for, and its tasks."""

    def __init__(self, loop: asyncio.AbstractEventLoop, replay: Replay) -> None:
        self.loop = loop
        self._replay = replay
        #: Whether outcomes that were recorded before may still be delivered.
        self.is_replaying = replay.is_resumed
        #: The branches whose task has not ended, and those of them that are in the workflow's code,
        #: unless they are known to wait.
        self.branches: set[Branch] = set()
        self.reacting: set[Branch] = set()
        self.slots: list[Slot] = []
        self._numbers = 0
        #: What is called, in this order, when all that is recorded was delivered.
        self._unclaimed: list[Callable[[], None]] = []
        self._first_calls: list[Callable[[], None]] = []
        self._holds = 0
        #: By number: the entry after which an outcome is being recorded, in the order of their start.
        self.recording: dict[int, int] = {}
        self._turns = _turns_of(loop)
        self._ready = self._turns.ready
        self._count = self._quiet = 0
        self._most = _MOST_TURNS
        #: Until when it is waited for a timer of the workflow's own.
        self._own_time: float | None = None

    # --- the workflow's tasks ---

    def add(self, branch: Branch) -> None:
        """Note a new branch, whose task exists."""
        task = branch.task
        assert task is not None
        if task.done():  # an eager one
            self.remove(branch)
            return
        self.branches.add(branch)
        if not branch.is_busy:
            self.reacting.add(branch)
        task.add_done_callback(lambda _: self.remove(branch), context=_NO_CONTEXT)

    def remove(self, branch: Branch) -> None:
        """Note that the task of a branch has ended."""
        branch.end()
        self.branches.discard(branch)
        self.reacting.discard(branch)
        self._schedule_if_needed()

    def leave(self, branch: Branch) -> None:
        """Note that a branch is in the workflow's own code again."""
        if branch in self.branches:
            self.reacting.add(branch)

    def hold(self) -> None:
        """Deliver nothing until ``release``: it is being found out what the workflow asks for."""
        self._holds += 1

    def release(self) -> None:
        """Go on."""
        self._holds -= 1
        self._schedule_if_needed()

    # --- outcomes ---

    def start_recording(self, before: int) -> int:
        """Note that an outcome is being recorded: no later one is delivered before it is."""
        self._numbers += 1
        self.recording[self._numbers] = before
        return self._numbers

    def end_recording(self, number: int) -> None:
        """Note that it is recorded: who called takes its place at once, before the next turn."""
        del self.recording[number]
        self._schedule_if_needed()

    def _may_follow_another(self, slot: Slot) -> bool:
        """Return whether an outcome that is being recorded may turn out to be an earlier one."""
        return slot.seq > next(iter(self.recording.values()), slot.seq)

    @property
    def is_alone(self) -> bool:
        """Whether there is one branch, and nothing to come before it: then there is no order."""
        if len(self.branches) > 1 or self.slots or self.recording:
            return False
        # A task that was made without the factory may be about to start, if the loop has more to do.
        return not self.is_replaying or not (self._ready is None or self._ready)

    @property
    def is_delivering(self) -> bool:
        """Whether outcomes wait for their turn, or it is being found out what comes next."""
        return bool(self.slots or self._holds or self._unclaimed or self._first_calls)

    @property
    def has_own_timer(self) -> bool:
        """Whether the workflow waits for a time of its own, which is not durable."""
        return self._turns.own_time(self) is not None

    def reserve(self, outcome: Entry) -> Slot:
        """Return the place of an outcome."""
        self._numbers += 1
        slot = Slot(outcome, self._numbers)
        heappush(self.slots, slot)
        return slot

    def set_ready(self, slot: Slot, deliver: Callable[[], None]) -> None:
        """Have an outcome delivered when it is its turn."""
        slot.deliver = deliver
        self._schedule()

    def drop(self, slot: Slot) -> None:
        """Wait for an outcome no more."""
        self.set_ready(slot, _nothing)

    def when_unclaimed(self, call: Callable[[], None]) -> None:
        """Call this when no branch waits for what is recorded: what is left may be claimed."""
        self._unclaimed.append(call)
        self._schedule()

    def when_replayed(self, call: Callable[[], None]) -> None:
        """Call this when everything that is recorded was delivered."""
        self._first_calls.append(call)
        self._schedule()

    def _is_waited_for(self) -> bool:
        return bool(self.slots or self._unclaimed or self._first_calls)

    def _schedule(self) -> None:
        self._turns.add(self)

    def _schedule_if_needed(self) -> None:
        if self._is_waited_for():
            self._schedule()

    def take_turn(self, is_active: bool | None) -> None:
        """Deliver the next outcome, if the workflow has reacted to the one before.

        ``is_active`` is whether the loop has something to do for it; None if that is not known.
        """
        if self._holds:
            return  # ``release`` goes on
        if is_active or (is_active is None and not self._seems_quiet()):
            self._own_time = None
            self._count += 1
            if self._count < self._most:
                self._schedule()
                return
            self._most = max(_LEAST_TURNS, self._most // 4)
        else:
            self._most = _MOST_TURNS
            if self.is_replaying and self._may_ask_for_earlier():
                return  # its timer goes on
        self._count = self._quiet = 0
        self._own_time = None
        if self.slots:
            self._deliver()
        elif self._unclaimed:
            self._call_all(self._unclaimed)
        elif self._first_calls:
            self.is_replaying = False
            self._call_all(self._first_calls)

    def _deliver(self) -> None:
        """Deliver the earliest outcome, and those that were recorded with it."""
        slots = self.slots
        group: list[Slot] = []
        while slots and slots[0].at == (group[0] if group else slots[0]).at:
            group.append(heappop(slots))
        is_early = any(each.deliver is None for each in group)
        if is_early or self._may_follow_another(group[-1]):
            for each in group:
                heappush(slots, each)
            return  # ``set_ready`` or ``end_recording`` goes on
        for each in group:
            # Its operation has the slot: both would wait for the garbage collector.
            deliver, each.deliver = each.deliver, _nothing
            if deliver is not None:
                deliver()
        self._schedule_if_needed()

    def _call_all(self, calls: list[Callable[[], None]]) -> None:
        now, calls[:] = list(calls), []
        for call in now:
            call()
        self._schedule_if_needed()

    def _seems_quiet(self) -> bool:
        """Return whether all tasks of the workflow waited, for some turns."""
        for branch in list(self.reacting):
            waits_for = getattr(branch.task, "_fut_waiter", None)
            if waits_for is None or waits_for.done():
                self._quiet = 0
                return False
            # Not asked again until that is done: a workflow may have many tasks that wait.
            self.reacting.discard(branch)
            back = partial(self._react_again, branch)
            waits_for.add_done_callback(back, context=_NO_CONTEXT)
        self._quiet += 1
        return self._quiet >= _QUIET_TURNS

    def _react_again(self, branch: Branch, _: object) -> None:
        if not branch.is_busy:
            self.leave(branch)
        self._quiet = 0

    def _may_ask_for_earlier(self) -> bool:
        """Return whether an outcome is still to be asked for, before those that are asked for.

        That is so where the workflow waits for a time of its own (``asyncio.sleep``) first.
        """
        earliest, following = self._replay.earliest(), self.slots[0] if self.slots else None
        if earliest is None or (following is not None and following.comes_before(earliest)):
            return False
        now, due = self.loop.time(), self._turns.own_time(self)
        if due is None:
            return False
        if self._own_time is None:
            self._own_time = now + _OWN_TIME_SECONDS
        if now >= self._own_time:
            self._replay.give_up_until(following)
            return False
        self._turns.call_at(min(due, self._own_time), self)
        return True


#: For callbacks that are not the workflow's.
_NO_CONTEXT = contextvars.Context()


#: What waits for a person: a question of the workflow is found in another way, and the escalation of
#: a step is the step's own.
_QUESTIONS = ("answer", "escalation")


class Replay:
    """What was recorded before this process executes the run, and which of it was claimed again."""

    def __init__(self, state: RunState, seq: int) -> None:
        self._state = state
        self._seq = seq
        self.is_resumed = seq > 0
        #: The outcomes that were recorded, the latest first; those that were claimed are removed.
        self._outcomes: list[tuple[Entry, bytes]] | None = None
        self._claimed: set[bytes] = set()
        #: The calls by their content, the latest first; those that were claimed are removed.
        self._by_content: dict[bytes, list[bytes]] | None = None
        #: The names of the calls with an outcome that were not claimed; None until it matters.
        self._left: dict[bytes, str] | None = None
        self._new: list[str] = []
        #: Whether a call is executed that was being executed when the run stopped.
        self._is_past = False

    def claim(self, identity: bytes) -> bool:
        """Claim what is recorded of a call; False if nothing is, or another call has claimed it."""
        state = self._state
        if identity in self._claimed:
            return False
        if (
            identity in state.by_identity
            or identity in state.outcomes
            or identity in state.children
            or identity in state.waits
        ):
            self._claimed.add(identity)
            if self._left is not None:
                self._left.pop(identity, None)
            return True
        return False

    def earliest(self) -> Entry | None:
        """Return the earliest outcome that was not claimed."""
        if self._outcomes is None:
            found = ((self._outcome_of(each), each) for each in self._calls())
            recorded = [(entry, each) for entry, each in found if entry is not None]
            self._outcomes = sorted(recorded, key=lambda each: each[0].seq, reverse=True)
        left = self._outcomes
        while left and left[-1][1] in self._claimed:
            left.pop()
        return left[-1][0] if left else None

    def give_up_until(self, slot: Slot | None) -> None:
        """Wait no more for the outcomes that come before this one, or for any."""
        while (earliest := self.earliest()) is not None:
            if slot is not None and slot.comes_before(earliest):
                return
            assert self._outcomes is not None
            self._outcomes.pop()

    def is_claimed(self, identity: bytes) -> bool:
        """Return whether a call was made in this life that is recorded by this identity."""
        return identity in self._claimed

    def find(self, contents: tuple[bytes, ...]) -> bytes | None:
        """Return the first call with one of these contents that was not claimed."""
        if self._by_content is None:
            self._by_content = {}
            for identity in reversed(self._calls()):
                self._by_content.setdefault(identity[:CONTENT_BYTES], []).append(identity)
        for content in contents:
            known = self._by_content.get(content[:CONTENT_BYTES], [])
            while known and known[-1] in self._claimed:
                known.pop()
            if known:
                return known[-1]
        return None

    def _calls(self) -> dict[bytes, str]:
        """Return the calls that the workflow itself had made, with their names; no questions."""
        state, calls = self._state, {}
        for identity, step in state.by_identity.items():
            if step.started.seq <= self._seq:
                calls[identity] = step.name
        for entries in (state.children, state.outcomes, state.waits):
            for identity, entry in entries.items():
                facts = facts_of(entry)
                if entry.seq <= self._seq and facts.get("what") not in _QUESTIONS:
                    name = str(facts.get("name") or facts.get("workflow") or "")
                    calls.setdefault(identity, name)
        return {identity: name for identity, name in calls.items() if not is_in_body(identity)}

    def note_executed(self, identity: bytes, name: str) -> None:
        """Note a call that is executed; a new one, if not all that is recorded was claimed."""
        if identity in self._claimed:
            self._is_past = True
        elif not self._is_past and len(self._new) < _MOST_NAMES and self._unclaimed():
            self._new.append(name)

    def _unclaimed(self) -> dict[bytes, str]:
        if self._left is None:
            self._left = {
                identity: name
                for identity, name in self._calls().items()
                if identity not in self._claimed and self._outcome_of(identity)
            }
        return self._left

    def _outcome_of(self, identity: bytes) -> Entry | None:
        """Return the entry of a call's outcome, if it has one."""
        state = self._state
        step = state.by_identity.get(identity)
        completed = None if step is None else step.completed
        return completed or state.outcomes.get(identity) or state.answers.get(identity)

    def differences(self) -> NewEntry | None:
        """Return the entry that reports what is recorded and was not asked for, or is new."""
        missing = list(self._unclaimed().values()) if self._seq else []
        if not missing and not self._new:
            return None
        facts = {"missing": missing[:_MOST_NAMES], "new": self._new}
        return NewEntry(EntryKind.REPLAY_DIFFERED, facts=codec.dump_canonical(facts))


#: How many names a report of differences has.
_MOST_NAMES = 50
