"""How far a team run has come, from its events, and the table that is drawn of it."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import click
import pytest

from maestro_hive.admin.teams import TaskView, TeamView
from maestro_hive.cli import output
from maestro_hive.cli.command import Call
from maestro_hive.cli.team_progress import Happened, Progress
from maestro_hive.cli.team_report import print_report
from maestro_hive.cli.team_table import Look, table_lines
from maestro_hive.maestro.state import events
from maestro_hive.maestro.state.events import AttemptEvent, RunEvent
from maestro_hive.team.graph import Plan, check_graph
from tests.tables import for_each
from tests.team.conftest import task

_START = datetime(2026, 1, 1, 12, tzinfo=UTC)


def plan_of(*tasks: dict[str, Any], **more: Any) -> Plan:
    document = {"feature": "shop", "tasks": list(tasks), **more}
    plan = check_graph(json.dumps(document).encode()).plan
    assert plan is not None
    return plan


def at(seconds: float) -> float:
    return _START.timestamp() + seconds


class Feed:
    """A run whose events are told by hand, each at a second."""

    def __init__(self, plan: Plan, workers: int = 1, before: int = 0) -> None:
        self.progress = Progress(plan, workers, before)
        self._seq = 0

    def note(self, kind: type[RunEvent], name: str, seconds: float, **more: Any) -> list[str]:
        """Tell an event; return what is printed, without the time."""
        self._seq += 1
        facts = {"seq": self._seq, "at": _START + timedelta(seconds=seconds), "run_id": "r", **more}
        if issubclass(kind, AttemptEvent):
            facts = {"step": 1, "label": name, "persona": "p", "attempt": 1, **facts}
        lines = self.progress.note(kind(name=name, **facts))  # type: ignore[call-arg]
        return [line[10:] for line in lines]

    def execute(self, name: str, start: float, end: float) -> None:
        self.note(events.StepStarted, name, start)
        self.progress.complete(name)
        self.note(events.StepCompleted, name, end, resolved=False, by=None)

    def fail(self, name: str, seconds: float) -> list[str]:
        facts = {"status": "failed", "error_type": "E", "message": "no", "category": "", "round": 1}
        more = {"retry_in": None, "final": True, "healed": False, "fingerprint": None}
        lines = self.note(events.StepFailed, name, seconds, **facts, **more)
        return lines + self.note(
            events.StepGaveUp, name, seconds, label=name, error_type="E", message="", skipped=False
        )


def test_the_time_left_follows_estimates_and_then_measured_times() -> None:
    plan = plan_of(
        task("A", estimate_minutes=10), task("B", after="A", estimate_minutes=20), task("C")
    )
    one, two = Feed(plan, workers=1), Feed(plan, workers=2)
    assert one.progress.seconds_left(at(0)) == pytest.approx(45 * 60)  # C is taken for the median
    for feed in (one, two):
        feed.execute("A", 0, 60)  # a tenth of its estimate
        assert feed.progress.part() == pytest.approx(10 / 45)
    assert one.progress.seconds_left(at(60)) == pytest.approx(35 * 6)
    two.note(events.StepStarted, "B", 60)
    assert two.progress.seconds_left(at(60)) == pytest.approx(20 * 6)  # the longest path
    assert two.progress.seconds_left(at(100)) == pytest.approx((35 * 6 - 40) / 2)  # all of the work
    assert two.progress.seconds_left(at(1000)) == pytest.approx(20 * 60 - 940)  # B is as estimated
    assert two.progress.seconds_left(at(2000)) == pytest.approx(15 * 6 / 2)  # B is late
    unknown = Progress(plan_of(task("A")), 1, 0)
    assert unknown.seconds_left(at(0)) is None


def test_a_task_that_is_late_is_not_said_to_end_soon() -> None:
    plan = plan_of(task("A", estimate_minutes=1), task("B", after="A", estimate_minutes=2))

    def shown(seconds: float) -> str:
        return table_lines(feed.progress, Look(120, 24), at(seconds), lambda _: 1)[-1]

    feed = Feed(plan)
    feed.note(events.StepStarted, "A", 0)
    assert "about 2 min 30 s left" in shown(30)
    assert "at least 2 min left" in shown(61)
    assert "at least 2 min left" in shown(600)
    feed.execute("A", 0, 60)
    feed.note(events.StepStarted, "B", 60)
    assert "about 1 min left" in shown(120)
    assert "longer than estimated" in shown(181)
    assert "left" not in shown(181)


def test_quick_tasks_make_no_other_task_late() -> None:
    """The first task took no time, and another one takes longer: as it was estimated, or not."""

    def shown(plan: Plan, seconds: float) -> str:
        feed = Feed(plan)
        feed.execute("A", 0, 0.01)
        feed.note(events.StepStarted, "B", 1)
        return table_lines(feed.progress, Look(120, 24), at(1 + seconds), lambda _: 1)[-1]

    estimated = plan_of(task("A", estimate_minutes=1), task("B", after="A", estimate_minutes=2))
    assert "about 1 min 59 s left" in shown(estimated, 1)
    assert "longer than estimated" in shown(estimated, 121)
    unknown = plan_of(task("A"), task("B", after="A"))
    for seconds in (1, 1000):
        line = shown(unknown, seconds)
        assert line.endswith("1/2 tasks, 1 running")


def test_the_bar_says_what_waits_for_answers_and_then_no_time() -> None:
    feed = Feed(plan_of(*map(task, "ABCDE"), task("F", after="A")), workers=2)
    feed.execute("E", 0, 10)
    asked = {"what": "answer", "escalation": None, "until": None}

    def ask(name: str) -> str:
        feed.note(events.StepStarted, name, 10)
        feed.note(events.StepCompleted, name, 11, resolved=False, by=None)
        feed.note(events.WaitStarted, name, 11, **asked)
        return table_lines(feed.progress, Look(120, 24), at(12), lambda _: 1)[-1]

    feed.note(events.StepStarted, "C", 10)
    feed.note(events.StepStarted, "D", 10)
    assert " left, 2 running, 1 waits for an answer" in ask("A")
    feed.execute("D", 10, 11)
    feed.note(events.StepStarted, "C", 10)
    feed.fail("C", 11)
    assert ask("B").endswith("2/6 tasks, 2 wait for an answer, 1 failed")


def test_a_failure_blocks_what_depends_on_it_and_that_takes_no_time() -> None:
    plan = plan_of(task("A"), task("B", after="A"), task("C", after="B"), task("D"), task("E"))
    feed = Feed(plan)
    feed.execute("D", 0, 10)
    feed.note(events.StepStarted, "A", 10)
    assert feed.fail("A", 20) == ["A: attempt 1 failed: no", "A: failed for good"]
    assert feed.progress.counts() == {"failed": 1, "pending": 1, "blocked": 2, "complete": 1}
    assert feed.progress.seconds_left(at(20)) == pytest.approx(10)


@pytest.mark.parametrize("failing", ["A", "gate:1:unit"])
def test_a_required_gate_that_cannot_pass_blocks_all_that_is_after_it(failing: str) -> None:
    gate = {"name": "unit", "command": "false", "required": True}
    levels = {"1": {"tasks": ["A", "B"], "gates": [gate]}, "2": {"tasks": ["C"]}}
    feed = Feed(plan_of(task("A"), task("B"), task("C", after="B"), levels=levels))
    feed.execute("B", 0, 1)
    if failing != "A":
        feed.execute("A", 0, 1)
    feed.note(events.StepStarted, failing, 1)
    feed.fail(failing, 2)
    blocked = 1 if failing == "gate:1:unit" else 2  # then the gate as well
    assert feed.progress.counts()["blocked"] == blocked
    assert "pending" not in feed.progress.counts()


def test_rows_stand_in_the_order_of_the_graph_whatever_has_happened() -> None:
    gates = [{"name": name, "command": "true"} for name in ("b", "a")]
    levels = {"1": {"tasks": ["B", "A"], "gates": gates}, "2": {"tasks": ["C"]}}
    feed = Feed(plan_of(task("B"), task("A"), task("C"), levels=levels))
    order = ["B", "A", "gate:1:b", "gate:1:a", "C"]

    def rows() -> list[str]:
        return [row.id for row in feed.progress.chosen(10)]

    assert rows() == order
    feed.execute("A", 0, 1)
    feed.execute("B", 1, 2)
    for gate in ("gate:1:b", "gate:1:a"):
        feed.note(events.StepStarted, gate, 2)
        assert rows() == order
        feed.execute(gate, 2, 3)
        assert rows() == order
    feed.note(events.StepStarted, "C", 3)
    assert rows() == order


@for_each("first", ["the event", "the result"])
def test_a_gate_that_is_not_required_and_failed_is_not_passed_and_blocks_nothing(
    first: str,
) -> None:
    gate = {"name": "opt", "command": "false", "required": False}
    plan = plan_of(task("A"), task("B", after="A"), levels={"1": {"tasks": ["A"], "gates": [gate]}})
    feed, name, reason = Feed(plan), "gate:1:opt", "gate 'opt' ended\nsome\nthe reason"
    feed.execute("A", 0, 1)
    feed.note(events.StepStarted, name, 1)
    lines = [] if first == "the event" else feed.progress.not_passed(name, reason)
    lines += feed.note(events.StepCompleted, name, 2, resolved=False, by=None)
    if first == "the event":
        lines += [line[10:] for line in feed.progress.not_passed(name, reason)]
    assert lines == [f"{name}: not passed, and not required: gate 'opt' ended: the reason"]
    assert feed.progress.counts() == {"not_passed": 1, "pending": 1, "complete": 1}
    drawn = table_lines(feed.progress, Look(120, 24), at(2), lambda _: 0)
    assert any(line.split()[1:4] == [name, "not", "passed"] for line in drawn)


def test_what_happened_before_this_execution_is_measured_and_not_said() -> None:
    feed = Feed(plan_of(task("A"), task("B")), before=2)
    feed.execute("A", 0, 10)  # two events
    assert feed.progress.happened.executed == {}
    assert feed.progress.complete_tasks == 1
    assert feed.note(events.StepStarted, "B", 20) == ["B: started"]
    assert feed.progress.seconds_left(at(20)) == pytest.approx(10)


def test_tasks_that_wait_for_a_breaker_are_parked_and_that_is_said_once() -> None:
    feed = Feed(plan_of(task("A"), task("B"), task("C", after="A")), workers=2)
    progress = feed.progress
    feed.note(events.StepStarted, "A", 0)
    said = [progress.park(each, _START, is_parked=True) for each in ("A", "B")]
    assert [len(lines) for lines in said] == [1, 0]
    assert said[0][0].endswith("A: parked until the breaker of its persona closes")
    facts = {"status": "failed", "error_type": "E", "message": "no", "category": "", "round": 1}
    more = {"retry_in": 1.0, "final": False, "healed": False, "fingerprint": None}
    feed.note(events.StepFailed, "A", 1, **facts, **more)  # is told late
    assert progress.counts() == {"parked": 2, "pending": 1}
    progress.park("A", _START, is_parked=False)
    assert progress.counts() == {"parked": 1, "pending": 2}
    feed.note(events.StepStarted, "A", 2, attempt=2)
    progress.park("A", _START, is_parked=False)
    assert progress.counts()["running"] == 1


def test_an_attempt_that_asks_is_no_completed_task() -> None:
    feed = Feed(plan_of(task("A")))
    feed.note(events.StepStarted, "A", 0)
    assert feed.note(events.StepCompleted, "A", 1, resolved=False, by=None) == []
    asked = {"what": "answer", "escalation": None, "until": None}
    assert feed.progress.seconds_left(at(1)) is not None
    assert "waits for an answer" in feed.note(events.WaitStarted, "A", 1, **asked)[0]
    assert feed.progress.seconds_left(at(1)) is None  # nothing was measured but how long it asked
    assert feed.progress.counts() == {"waiting": 1}
    feed.note(events.WaitEnded, "A", 6, how="answered", by=None)
    assert feed.progress.happened.waited == {"A": 5.0}
    assert feed.progress.happened.executed == {}
    feed.execute("A", 6, 7)
    assert feed.progress.happened.executed == {"A": None}


def test_what_asked_is_no_completed_task_although_the_events_are_read_late() -> None:
    feed = Feed(plan_of(task("A")))
    feed.progress.ask("A", "which?")
    feed.progress.complete("A")
    asked = {"what": "answer", "escalation": None, "until": None}
    ended = {"resolved": False, "by": None}
    lines = [
        *feed.note(events.StepStarted, "A", 0),
        *feed.note(events.StepCompleted, "A", 1, **ended),
        *feed.note(events.WaitStarted, "A", 1, **asked),
        *feed.note(events.WaitEnded, "A", 2, how="answered", by=None),
        *feed.note(events.StepStarted, "A", 2),
        *feed.note(events.StepCompleted, "A", 3, **ended),
    ]
    assert [each.partition(" ")[2].split(" for")[0].split(" in")[0] for each in lines] == [
        "started",
        "waits",
        "started",
        "complete",
    ]


@for_each("colours", [False, True])
@for_each("lines", [1, 4, 10, 24])
@for_each("columns", [1, 2, 10, 20, 33, 80, 300])
def test_no_line_is_wider_than_the_terminal_and_there_are_not_too_many(
    columns: int, lines: int, colours: bool
) -> None:
    wide = [task(f"T{number}", title="部品を作る\n\x1b[2J" * 9) for number in range(50)]
    feed = Feed(plan_of(*wide, gates=[]), workers=8)
    for number in range(12):
        feed.note(events.StepStarted, f"T{number}", number)
    feed.execute("T40", 12, 13)
    look = Look(columns, lines, colours=colours)
    drawn = table_lines(feed.progress, look, at(100_000), lambda _: 3, "stopping")
    made = [click.unstyle(line) for line in drawn] if colours else drawn
    assert len(made) <= max(1, lines - 1)
    for line in made:
        assert output.cell_width(line) <= max(1, columns - 1)
        assert "\x1b" not in line
    if lines == 24 and columns >= 80:
        assert sum(" running " in line for line in made) == 12
        assert made[-2] == "… and 36 pending, 1 complete"
        assert "stopping, 1/50 tasks" in made[-1]


def test_the_cost_of_a_table_does_not_grow_with_the_graph() -> None:
    seen = 0

    class Counting(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            nonlocal seen
            seen += 1
            return super().__getitem__(key)

    feed = Feed(plan_of(*(task(f"T{number}") for number in range(1000))))
    progress = feed.progress
    progress._rows = Counting(progress._rows)
    table_lines(progress, Look(80, 24), at(0), lambda _: 0)
    feed.execute("T500", 0, 1)
    assert seen <= 1


def test_steps_that_need_a_person_are_reported_with_the_failures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def view(name: str, status: str, error: str | None) -> TaskView:
        return TaskView(
            id=name,
            title=name,
            level=1,
            is_gate=False,
            status=status,
            persona="p",
            attempts=5,
            failures=0,
            took_seconds=1.0,
            error=error,
            blocked_by=None,
        )

    found = [
        view("A", "complete", None),
        view("B", "interrupted", "the process died 5 times"),
        view("C", "help_needed", "nobody knows"),
        view("D", "bankrupt", "it was too expensive"),
    ]
    team = TeamView(
        run_id="r",
        feature="shop",
        folder=".",
        status="failed",
        executed=False,
        took_seconds=1.0,
        tokens=1200,
        usd=0.5,
        saved_tokens=1000,
        saved_usd=0.25,
        waits_for=("E",),
        suspended=None,
        tasks=tuple(found),
    )
    happened = Happened(executed={"A": None}, retried={"A": None}, healed={"A": None})
    happened.waited["A"] = 61.0
    print_report(Call(), team, happened)
    assert capsys.readouterr().out == (
        "shop: 1 of 4 tasks complete (1 executed, 0 reused)\n"
        "retried: A\n"
        "healed: A\n"
        "waited for an answer: A (1 min 1 s)\n"
        "spent: 1,200 tokens, $0.50\n"
        "saved by resuming: 1,000 tokens, $0.25\n"
        "waits for an answer: E: maestro answer r E TEXT\n"
        "\n"
        "interrupted: B, after 5 attempts\n"
        "  the process died 5 times\n"
        "  its output: maestro logs r B\n"
        "\n"
        "help needed: C, after 5 attempts\n"
        "  nobody knows\n"
        "  its output: maestro logs r C\n"
        "\n"
        "over budget: D, after 5 attempts\n"
        "  it was too expensive\n"
        "  its output: maestro logs r D\n"
        "  to go on: raise the task's budget in the graph, then 'maestro run GRAPH'\n"
        "\n"
        "to retry: maestro retry r && maestro resume r\n"
    )
