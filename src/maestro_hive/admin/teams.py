"""Team runs of a state folder: their tasks in detail, and stopping the process that executes one."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from maestro_hive.admin.runs import find_run, read_run, run_details
from maestro_hive.hive.runs import read_input
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.maestro.state.records import EntryKind
from maestro_hive.team.graph import Frontier, TaskState
from maestro_hive.team.personas import task_input
from maestro_hive.team.runner import WORKFLOW, plan_of
from maestro_hive.team.scheduler import gate_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maestro_hive.maestro.state.records import RunRecord
    from maestro_hive.maestro.state.run_view import RunView, StepView
    from maestro_hive.maestro.state.store import Reader
    from maestro_hive.maestro.state.strict_json import Json
    from maestro_hive.team.graph import Plan

COMPLETE, FAILED, PENDING, BLOCKED = "complete", "failed", "pending", "blocked"
WAITING, STOPPED, BANKRUPT = "waiting", "stopped", "bankrupt"
#: For how many seconds the end of a process is waited for that was asked to stop.
_STOP_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskView:
    """A task or a gate of a team run."""

    id: str
    title: str
    level: int
    is_gate: bool
    #: complete, failed, bankrupt, running, waiting for an answer, stopped, or another status of a step;
    #: pending, or blocked by one that failed.
    status: str
    persona: str | None
    attempts: int
    #: How many of the attempts failed; others were cut off by a stop or a kill.
    failures: int
    took_seconds: float | None
    error: str | None
    blocked_by: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamView:
    """A team run: its feature, its folder, and its tasks and gates by level."""

    run_id: str
    feature: str
    folder: str
    status: str
    executed: bool
    took_seconds: float
    tokens: int
    usd: float
    saved_tokens: int
    saved_usd: float
    #: What it waits for: questions of tasks.
    waits_for: tuple[str, ...]
    #: Why no process executes it, where that was recorded.
    suspended: str | None
    tasks: tuple[TaskView, ...]

    def with_status(self, *statuses: str) -> list[TaskView]:
        """Return the tasks and gates that have one of these statuses."""
        return [each for each in self.tasks if each.status in statuses]


def team_view(reader: Reader, run_id: str) -> TeamView:
    """Return a team run in detail; raise if the run is none."""
    record = _team_run(reader, run_id)
    given = _arguments(reader, record)
    plan, run = plan_of(given["graph"]), run_details(reader, run_id)
    steps = {each.name: each for each in run.steps}  # of several calls of a task, the last
    if run.forked_from is not None:
        steps = _of_this_graph(reader, run_id, plan, steps)
    suspended = None if run.suspended is None else run.suspended.message
    return TeamView(
        run_id=run_id,
        feature=plan.graph.feature,
        folder=str(given["folder"]),
        status=run.status,
        executed=run.executed,
        took_seconds=run.took_seconds,
        tokens=run.tokens,
        usd=run.usd,
        saved_tokens=run.saved_tokens,
        saved_usd=run.saved_usd,
        waits_for=tuple(each.name for each in run.waits_for if not each.answered),
        suspended=suspended,
        tasks=tuple(_task_views(plan, run, steps)),
    )


def _team_run(reader: Reader, run_id: str) -> RunRecord:
    record = find_run(reader, run_id)
    if record.workflow != WORKFLOW:
        raise ConfigurationError(
            f"run {run_id!r} is no run of a task graph; 'maestro show {run_id}' shows it"
        )
    return record


def _arguments(reader: Reader, record: RunRecord) -> dict[str, Json]:
    for entry in reader.entries(record.id):
        if entry.kind == EntryKind.RUN_STARTED:
            return read_input(entry, reader.load).kwargs
    raise ConfigurationError(f"run {record.name!r} has no recorded start")


def _of_this_graph(
    reader: Reader, run_id: str, plan: Plan, steps: dict[str, StepView]
) -> dict[str, StepView]:
    """Return the steps without those of a changed graph, which a fork has of the other run."""
    found, recorded = {}, read_run(reader, run_id)
    tasks = {task.id: task for task in plan.graph.tasks}
    for name, step in steps.items():
        given = recorded.value(recorded.state.steps[step.step].started)
        if name in tasks and isinstance(given, dict):
            then, now = given["args"][0], task_input(plan.graph, tasks[name])
            prompt = then.pop("prompt")  # which ends with its answers, if it asked
            if not prompt.startswith(now.pop("prompt")) or then != now:
                continue
        found[name] = step
    return found


def _task_views(plan: Plan, run: RunView, steps: dict[str, StepView]) -> Iterator[TaskView]:
    done = ("success", "recovered")  # by a repair
    status = {
        name: COMPLETE if step.status in done else step.status for name, step in steps.items()
    }
    if run.status != "cancelled":  # an attempt was: the run was stopped
        status = {name: STOPPED if each == "cancelled" else each for name, each in status.items()}
    status |= {each.name: WAITING for each in run.waits_for}
    ended = {
        COMPLETE: TaskState.COMPLETE,
        FAILED: TaskState.FAILED,
        BANKRUPT: TaskState.FAILED,
    }
    states = {each: ended.get(status.get(each, ""), TaskState.PENDING) for each in plan.ids}
    blocked = Frontier(plan, states).blocked()

    def view(name: str, title: str, level: int, persona: str | None) -> TaskView:
        step, blocked_by = steps.get(name), blocked.get(name)
        now = status.get(name, BLOCKED if blocked_by else PENDING)
        return TaskView(
            id=name,
            title=title,
            level=level,
            is_gate=persona is None,
            status=now,
            persona=persona,
            attempts=0 if step is None else step.attempts,
            failures=0 if step is None else step.failures,
            took_seconds=None if step is None else step.took_seconds,
            error=None if step is None or now in (COMPLETE, STOPPED) else step.last_error,
            blocked_by=blocked_by,
        )

    tasks = {task.id: task for task in plan.graph.tasks}
    for level in plan.graph.levels:
        for each in level.tasks:
            persona = plan.graph.persona_of(tasks[each])
            named = "" if persona is None else persona.name
            yield view(each, tasks[each].title, level.number, named)
        for gate in level.gates:
            yield view(gate_name(level, gate), gate.command, level.number, None)


def stop_run(reader: Reader, run_id: str) -> bool:
    """Ask the process that executes a team run to stop, and wait; False if none executes it."""
    record = _team_run(reader, run_id)
    lease = reader.run_leases().get(record.name)
    if lease is None:
        return False
    holder = lease.holder
    if holder.host != socket.gethostname():
        raise ConfigurationError(
            f"run {run_id!r} is executed on {holder.host}, by process {holder.pid}; stop it there"
        )
    os.kill(holder.pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    while (now := reader.run_leases().get(record.name)) is not None and now.fence == lease.fence:
        if time.monotonic() > deadline:
            raise ConfigurationError(
                f"process {holder.pid} was asked to stop, and still executes run {run_id!r}"
            )
        time.sleep(0.02)
    return True
