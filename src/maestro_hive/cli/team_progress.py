"""How far a team run has come: kept up to date by its events, at the cost of each event alone.

It decides and touches nothing: times are given to it.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from maestro_hive.admin.teams import (
    BLOCKED,
    COMPLETE,
    FAILED,
    NOT_PASSED,
    PARKED,
    PENDING,
    STOPPED,
    WAITING,
)
from maestro_hive.cli import output
from maestro_hive.maestro.state import events
from maestro_hive.maestro.state.projections import sum_of_usd
from maestro_hive.team.plans import gate_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime

    from maestro_hive.maestro.state.events import RunEvent
    from maestro_hive.team.graph import Plan

RUNNING, RETRYING, OVER_BUDGET = "running", "retrying", "over budget"
INTERRUPTED, HELP_NEEDED = "interrupted", "help_needed"
#: What has failed for good, or needs a person before it goes on.
UNSUCCESSFUL = (FAILED, OVER_BUDGET, INTERRUPTED, HELP_NEEDED)
#: What is not executed any more, unless something is done about it.
_OVER = frozenset({COMPLETE, BLOCKED, *UNSUCCESSFUL})
#: What an attempt that ended without a failure means.
_STOPPED_AS = {"bankrupt": OVER_BUDGET, "interrupted": INTERRUPTED}
_ORDER = (
    *(RUNNING, RETRYING, WAITING, *UNSUCCESSFUL, NOT_PASSED),
    *(PARKED, STOPPED, PENDING, BLOCKED, COMPLETE),
)
#: How much of an error is shown in a line.
_LINE = 160
#: What the message of an error ends with besides, if its kind is known.
_CODE = re.compile(r" \([A-Z_]+\)$")
_MINUTE = 60.0
#: What is left of a sum of estimates, in minutes, when all are subtracted again.
_NEARLY_NONE = 1e-9


@dataclass(slots=True, kw_only=True, eq=False)
class Row:
    """A task or a gate."""

    id: str
    title: str
    level: int
    #: Where it stands in the graph: by level, the gates of a level after its tasks.
    place: int
    #: Its number in the plan; None of a gate.
    number: int | None
    #: What it is taken to last, in minutes, and whether the graph says so.
    minutes: float
    is_estimated: bool
    status: str = PENDING
    attempt: int = 0
    #: When its last attempt started, and how long it has taken at its end.
    started: float | None = None
    took: float | None = None
    has_failed: bool = False
    tokens: int = 0
    #: How often a step of it was completed, by the events, and how often it asked, by the workflow.
    times_ended: int = 0
    times_asked: int = 0

    def elapsed(self, now: float) -> float | None:
        """Return how long its attempt takes, or has taken."""
        if self.status == RUNNING and self.started is not None:
            return max(0.0, now - self.started)
        return self.took


class _Line(NamedTuple):
    """A line that is to be printed."""

    time: str
    text: str
    #: What has ended, of which the line is, and how often it had by then: how is not known at once.
    ended: Row | None
    times: int = 0


@dataclass(slots=True)
class Happened:
    """What has happened in this execution, by the names of tasks and gates, in order."""

    executed: dict[str, None] = field(default_factory=dict)
    retried: dict[str, None] = field(default_factory=dict)
    healed: dict[str, None] = field(default_factory=dict)
    #: For how many seconds answers were waited for.
    waited: dict[str, float] = field(default_factory=dict)


class Progress:
    """The tasks and gates of a run by their statuses, and the time that is left."""

    def __init__(
        self,
        plan: Plan,
        workers: int,
        last_event: int,
        *,
        tells_starts: bool = True,
        how_to_answer: Callable[[str], str] = lambda _: "",
    ) -> None:
        """Start a run whose events up to the last one happened before this execution.

        ``tells_starts``: whether there is a line for each attempt that starts. ``how_to_answer``: the
        command that answers a task's question.
        """
        self._tells_starts = tells_starts
        self._how_to_answer = how_to_answer
        #: What tasks ask, or have asked last.
        self._questions: dict[str, str] = {}
        self.feature = plan.graph.feature
        self.happened = Happened()
        self.tokens = 0
        self.usd = 0.0
        #: How many tasks are complete.
        self.complete_tasks = 0
        self._plan = plan
        self._workers = workers
        self._last_event = last_event
        self._rows = {each.id: each for each in _rows(plan)}
        #: The rows with each status, in the order of levels or of changes.
        self._groups: dict[str, dict[str, Row]] = {status: {} for status in _ORDER}
        self._groups[PENDING] = dict(self._rows)
        self._parked: set[str] = set()
        #: The levels whose required gates can still pass, as far as others above can.
        self._gated = set(plan.gated)
        self._waiting_since: dict[str, float] = {}
        #: What the workflow knows to be complete.
        self._complete: set[str] = set()
        #: Why gates have not passed that are not required.
        self._not_passed: dict[str, str] = {}
        #: Lines in the order of the journal, without those of ends that the workflow does not know.
        self._lines: deque[_Line] = deque()
        #: Of all tasks, of those that are complete, and of those that may still be executed.
        self._minutes = self._minutes_left = sum(plan.minutes)
        self._minutes_done = 0.0
        self._has_estimates = any(each.estimate_minutes is not None for each in plan.graph.tasks)
        #: The minutes that measured tasks were taken to last, and the seconds that they took.
        self._measured = (0.0, 0.0)

    # --- what it knows ---

    @property
    def total(self) -> int:
        """How many tasks there are."""
        return len(self._plan.ids)

    def counts(self) -> dict[str, int]:
        """Return how many tasks and gates have each status that there is."""
        return {status: len(rows) for status, rows in self._groups.items() if rows}

    def chosen(self, most: int) -> list[Row]:
        """Return so many tasks and gates, by level: what is executed first, then what comes next."""
        found: list[Row] = []
        for status in _ORDER:
            if len(found) >= most:
                break
            rows = self._groups[status].values()
            # Of those that are complete, the last ones; their order is that of their ends.
            ordered = reversed(rows) if status == COMPLETE else iter(rows)
            found += (row for row, _ in zip(ordered, range(most - len(found)), strict=False))
        return sorted(found, key=lambda row: row.place)

    def part(self) -> float:
        """Return which part of the work is done, by estimates: from 0 to 1."""
        return self._minutes_done / self._minutes if self._minutes else 1.0

    def seconds_left(self, now: float) -> float | None:
        """Return how long the rest takes, by estimates and measured times; None if that is unknown.

        All workers share the work that is left, and no path of tasks takes less than its tasks do.
        """
        rate = self._rate()
        if rate is None or self._waits_for_people():
            return None
        work, path = self._minutes_left * rate, 0.0
        for row in self._groups[RUNNING].values():
            if row.number is not None:
                expected = _expected(row, rate, now)
                done = row.minutes * rate - expected + min(row.elapsed(now) or 0.0, expected)
                work -= done
                path = max(path, self._plan.remaining[row.number] * rate - done)
        at_once = min(self._workers, self.total - self.complete_tasks)
        return max(work / max(1, at_once), path)

    def late(self, now: float) -> list[Row]:
        """Return the tasks that take longer than they were taken to: nobody knows when they end."""
        rate = self._rate()
        if rate is None:
            return []
        return [
            row
            for row in self._groups[RUNNING].values()
            if row.number is not None and (row.elapsed(now) or 0.0) > _expected(row, rate, now)
        ]

    def _waits_for_people(self) -> bool:
        """Return whether nothing is executed, and nothing can be, before a person has answered."""
        active = any(self._groups[each] for each in (RUNNING, RETRYING, PARKED))
        return bool(self._groups[WAITING]) and not active

    def _rate(self) -> float | None:
        """Return how many seconds an estimated minute takes; None if nothing is estimated or measured."""
        minutes, seconds = self._measured
        if minutes > _NEARLY_NONE:
            return seconds / minutes
        return _MINUTE if self._has_estimates else None

    # --- what happens ---

    def complete(self, name: str) -> list[str]:
        """Note that a task or gate is complete, here or before; return the lines to be printed."""
        self._complete.add(name)
        self._set(self._rows[name], COMPLETE)
        return self._released()

    def not_passed(self, name: str, reason: str) -> list[str]:
        """Note that a gate that is not required has not passed; return the lines to be printed."""
        self._complete.add(name)
        self._not_passed[name] = reason
        self._set(self._rows[name], NOT_PASSED)
        return self._released()

    def end(self) -> list[str]:
        """Return the lines that are left at the end of this execution."""
        left, self._lines = self._lines, deque()
        return [f"{line.time}{line.text}" for line in left if line.ended is None]

    def park(self, name: str, at: datetime, *, is_parked: bool) -> list[str]:
        """Note that a task waits for a breaker, or does not any more; return the lines to be printed.

        There is a line for the first that waits alone: all tasks of a persona may wait at once.
        """
        row, is_first = self._rows[name], is_parked and not self._parked
        if is_parked:
            self._parked.add(name)
            self._set(row, PARKED)
        else:
            self._parked.discard(name)
            if row.status == PARKED:
                self._set(row, PENDING)
        line = f"{at.astimezone():%H:%M:%S}  {name}: parked until the breaker of its persona closes"
        return [line] if is_first else []

    def ask(self, name: str, question: str) -> None:
        """Note what a task asks; the line of it is printed when its wait is recorded."""
        self._questions[name] = question
        self._rows[name].times_asked += 1

    def note(self, event: RunEvent) -> list[str]:
        """Note an event; return the lines that are to be printed of it."""
        name = getattr(event, "name", None)
        row = self._rows.get(name) if isinstance(name, str) else None
        self._measure(event, row)
        if row is not None and isinstance(event, events.StepCompleted):
            row.times_ended += 1
        if event.seq <= self._last_event or row is None:
            return []
        for text in self._noted(event, row):
            # What the result of a step means is known when the workflow has noted it: it may ask.
            ended = row if isinstance(event, events.StepCompleted) else None
            self._lines.append(_Line(_time_of(event), text, ended, row.times_ended))
        return self._released()

    def _released(self) -> list[str]:
        """Return the lines up to the first of which is not known yet whether it is printed."""
        found: list[str] = []
        while self._lines:
            line = self._lines[0]
            if line.ended is None:
                found.append(f"{line.time}{line.text}")
            elif line.times > line.ended.times_asked:  # or it asked, and its wait is a line
                if line.ended.id not in self._complete:
                    break
                found.append(f"{line.time}{self._how_ended(line.ended)}")
            self._lines.popleft()
        return found

    def _how_ended(self, row: Row) -> str:
        reason = self._not_passed.get(row.id)
        if reason is None:
            return f"{row.id}: complete in {output.took(row.took or 0.0)}"
        return f"{row.id}: not passed, and not required: {_with_last_line(reason)}"

    def _measure(self, event: RunEvent, row: Row | None) -> None:
        """Note what attempts spend and take, in this execution and before."""
        at = event.at.timestamp()
        match event:
            case events.Spent():
                self.tokens += event.tokens
                self.usd = sum_of_usd((self.usd, event.usd))
                if row is not None:
                    row.tokens += event.tokens
            case events.StepStarted() if row is not None:
                row.attempt, row.started, row.took = event.attempt, at, None
            case events.StepCompleted() | events.StepFailed() | events.StepStopped() if (
                row is not None and row.started is not None
            ):
                row.took = at - row.started
                row.has_failed = row.has_failed or isinstance(event, events.StepFailed)
                if isinstance(event, events.StepCompleted):
                    self._add_measured(row, row.took, 1)
            case events.WaitStarted() if row is not None and event.what == "answer":
                # What was measured is how long it took to ask.
                self._add_measured(row, row.took or 0.0, -1)

    def _add_measured(self, row: Row, took: float, times: int) -> None:
        if row.number is not None:
            minutes, seconds = self._measured
            self._measured = (minutes + times * row.minutes, seconds + times * took)

    def _noted(self, event: RunEvent, row: Row) -> Iterator[str]:
        match event:
            case events.StepStarted():
                self._set(row, RUNNING)
                if event.attempt > 1 and row.has_failed:
                    self.happened.retried[row.id] = None
                again = f" (attempt {event.attempt})" if event.attempt > 1 else ""
                if self._tells_starts:
                    yield f"{row.id}: started{again}"
            case events.StepFailed():
                self._set(row, PARKED if row.id in self._parked else RETRYING)
                yield f"{row.id}: attempt {event.attempt} failed: {_reason(event)}"
            case events.StepCompleted():
                self._set(row, NOT_PASSED if row.id in self._not_passed else COMPLETE)
                self.happened.executed[row.id] = None
                yield ""  # the line says how it ended
            case events.StepStopped():
                status = _STOPPED_AS.get(event.status, STOPPED)
                self._set(row, status)
                reason = "" if status == STOPPED else f": {_short(event.message)}"
                yield f"{row.id}: {status}{reason}"
            case events.StepGaveUp():
                is_said = row.status in UNSUCCESSFUL
                is_over = (event.error_type or "").endswith("BudgetExceeded")
                status = OVER_BUDGET if is_over else FAILED
                self._fail(row, row.status if is_said else status)
                if not is_said:
                    # Over a budget no attempt is started, of which there would be a line.
                    reason = f"over budget: {_short(event.message or '')}"
                    yield f"{row.id}: {reason if is_over else 'failed for good'}"
            case _:
                yield from self._note_wait(event, row)

    def _note_wait(self, event: RunEvent, row: Row) -> Iterator[str]:
        match event:
            case events.WaitStarted() if event.what in {"answer", "escalation"}:
                self._set(row, WAITING if event.what == "answer" else HELP_NEEDED)
                self._waiting_since[row.id] = event.at.timestamp()
                self._lines = deque(each for each in self._lines if each.ended is not row)
                self.happened.executed.pop(row.id, None)
                if event.what == "answer":
                    question = self._questions.get(row.id, "")
                    yield question_line(row.id, question, self._how_to_answer(row.id))
            case events.WaitEnded() if row.id in self._waiting_since:
                self._set(row, PENDING)
                since = self._waiting_since.pop(row.id)
                waited = event.at.timestamp() - since + self.happened.waited.get(row.id, 0.0)
                self.happened.waited[row.id] = waited
            case events.RepairJudged() if event.verdict == "worked":
                self.happened.healed[row.id] = None

    def _set(self, row: Row, status: str) -> None:
        if row.status == status:
            return
        if row.number is not None:
            done = (status == COMPLETE) - (row.status == COMPLETE)
            self.complete_tasks += done
            self._minutes_done += done * row.minutes
            self._minutes_left -= ((status in _OVER) - (row.status in _OVER)) * row.minutes
        del self._groups[row.status][row.id]
        row.status = status
        self._groups[status][row.id] = row

    def _fail(self, row: Row, status: str) -> None:
        """Note that a task or a gate has failed for good: what depends on it is blocked."""
        self._set(row, status)
        reached = [] if row.number is None else [row.number]
        levels = {row.level}
        while reached:
            at = reached.pop()
            for each in self._plan.after[at]:
                blocked = self._rows[self._plan.ids[each]]
                if at in self._plan.dependencies[each] and blocked.status == PENDING:
                    self._set(blocked, BLOCKED)
                    reached.append(each)
                    levels.add(blocked.level)
        if gated := levels & self._gated:
            self._block_after(min(gated))

    def _block_after(self, level: int) -> None:
        """Note that the required gates of a level cannot pass: nothing after them starts."""
        self._gated = {each for each in self._gated if each < level}
        for each in list(self._groups[PENDING].values()):
            if each.level > level or (each.number is None and each.level == level):
                self._set(each, BLOCKED)


def question_line(name: str, question: str, command: str) -> str:
    """Return what a task asks, and the command that answers."""
    text = output.redacted(" ".join(question.split()))
    asks = f" to {output.shortened(text, _LINE)!r}" if text else ""
    return f"{name}: waits for an answer{asks}: {command}"


def _rows(plan: Plan) -> Iterator[Row]:
    numbers = {each: number for number, each in enumerate(plan.ids)}
    place = count()
    for level in plan.graph.levels:
        for number in sorted(numbers[each] for each in level.tasks):
            yield Row(
                id=plan.ids[number],
                title=plan.graph.tasks[number].title,
                level=level.number,
                place=next(place),
                number=number,
                minutes=plan.minutes[number],
                is_estimated=plan.graph.tasks[number].estimate_minutes is not None,
            )
        for gate in level.gates:
            yield Row(
                id=gate_name(level, gate),
                title=gate.command,
                level=level.number,
                place=next(place),
                number=None,
                minutes=0.0,
                is_estimated=False,
            )


def _expected(row: Row, rate: float, now: float) -> float:
    """Return how many seconds a task is taken to last, if a minute of an estimate takes ``rate``.

    One that outlasts that may be as its own estimate says: those that were measured may have been quick.
    """
    measured = row.minutes * rate
    is_longer = row.is_estimated and (row.elapsed(now) or 0.0) > measured
    return max(measured, row.minutes * _MINUTE) if is_longer else measured


def _time_of(event: RunEvent) -> str:
    return f"{event.at.astimezone():%H:%M:%S}  "


def _reason(event: events.StepFailed) -> str:
    """Return why an attempt failed, in a line: of the output of a command its last line."""
    first, _, rest = event.message.strip().partition("\n")
    last = _CODE.sub("", rest.rpartition("\n")[2])
    match event.error_type.rpartition(".")[2]:
        case "VerificationFailedError" if last and "ended " in first:
            return _short(f"{last}; {first}")  # which has the command, however long
        case "CommandFailedError" | "GateFailedError":
            return _with_last_line(event.message)
        case _:
            return _short(event.message)


def _with_last_line(text: str) -> str:
    """Return what has failed, and the last line of its output, in a line."""
    first, _, rest = text.strip().partition("\n")
    last = _CODE.sub("", rest.rpartition("\n")[2])
    return _short(f"{first}: {last}" if last else text)


def _short(text: str) -> str:
    return output.shortened(output.in_one_line(" ".join(text.split())), _LINE) or ""
