"""Team runs of a state folder: their tasks in detail, and stopping the process that executes one."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from maestro_hive.admin.children import ChildReader
from maestro_hive.admin.runs import find_run, read_run, view_of
from maestro_hive.hive.runs import read_input
from maestro_hive.kernel.errors import ConfigurationError, MaestroError, RunLeasedError
from maestro_hive.maestro.state.projections import sum_of_usd
from maestro_hive.maestro.state.records import EntryKind
from maestro_hive.maestro.state.views import seconds_between
from maestro_hive.team.choosing import RecordedRuns, choose_run, restorable
from maestro_hive.team.graph import Frontier, TaskState
from maestro_hive.team.inputs import (
    digest_of,
    gate_input,
    results_up_to,
    task_input,
    without_answers,
)
from maestro_hive.team.plans import (
    GATE_PREFIX,
    WORKFLOW,
    asks,
    gate_name,
    plan_of,
    replaced_steps,
    why_not_passed,
)
from maestro_hive.team.progress import handovers
from maestro_hive.team.restoring import read_state, taken

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from maestro_hive.maestro.state.projections import StepState
    from maestro_hive.maestro.state.records import RunRecord
    from maestro_hive.maestro.state.run_view import RecordedRun, RunView, StepView
    from maestro_hive.maestro.state.store import Reader
    from maestro_hive.maestro.state.strict_json import Json
    from maestro_hive.team.graph import Level, Plan

COMPLETE, FAILED, PENDING, BLOCKED = "complete", "failed", "pending", "blocked"
#: The statuses of a step that is complete: also by a repair.
_DONE_STATUSES = ("success", "recovered")
WAITING, STOPPED, BANKRUPT, PARKED = "waiting", "stopped", "bankrupt", "parked"
#: It has failed, and will be attempted again.
RETRYING = "retrying"
#: Of a gate that has failed and is not required: its run goes on, and succeeds.
NOT_PASSED = "not_passed"
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
    #: pending, parked while the breaker of its persona is open, or blocked by one that failed;
    #: not_passed, of a gate that failed and is not required.
    status: str
    persona: str | None
    attempts: int
    #: How many of the attempts failed; others were cut off by a stop or a kill.
    failures: int
    #: How long its last attempt took, or has taken by now; None if that was killed, or there is none.
    took_seconds: float | None
    #: Why it failed, or has not passed.
    error: str | None
    blocked_by: str | None
    #: What it asks, while it waits for an answer.
    question: str | None = None
    #: What all of its attempts in this run spent, and how often a fresh worker went on for a full one.
    tokens: int = 0
    usd: float = 0.0
    handovers: int = 0


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
    _team_run(reader, run_id)
    recorded = read_run(reader, run_id)
    given = _arguments(recorded)
    plan, run = plan_of(given["graph"]), _view_of(reader, recorded)
    steps = {each.name: each for each in run.steps}  # of several calls of a task, the last
    restored = taken(plan, given.get("restored"))
    if run.forked_from is not None:
        steps, _ = _of_this_graph(recorded, plan, run.steps, restored)
    steps = {name: _as_task(recorded, each) for name, each in steps.items()}
    suspended = None if run.suspended is None else run.suspended.message
    known = _facts(recorded, steps)
    for name in [name for name, each in steps.items() if _is_retried(recorded, each)]:
        del steps[name]
    views = list(_task_views(plan, run, steps, known, restored))
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
        tasks=tuple(_with_parked(reader, plan, run, views)),
    )


def _view_of(reader: Reader, recorded: RecordedRun) -> RunView:
    """Return the view of a run with all its steps; nothing of a team is read from its events."""
    return view_of(reader, recorded, ChildReader(reader), None, None, most_events=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reused:
    """What an earlier run, or its state file, has of a graph: tasks that are not executed again."""

    #: Where it is: the name of a run, or the path of a state file.
    source: str
    tasks: tuple[str, ...]


def reused_by(
    reader: Reader | None,
    plan: Plan,
    folder: Path,
    *,
    store: Path,
    run_id: str | None = None,
    force: bool = False,
) -> Reused | None:
    """Return what a run of a graph in a folder would go on from; None if it starts from nothing.

    ``reader`` is that of the state folder ``store``; None if there is nothing in it.
    """
    if any(plan.graph.persona_of(task) is None for task in plan.graph.tasks):
        return None  # nobody could execute it
    runs = RecordedRuns(
        store=store,
        workflows={} if reader is None else {each.name: each.workflow for each in reader.runs()},
        arguments=partial(_started_with, reader),
    )
    chosen = choose_run(runs, plan.graph, folder, run_id=run_id, force=force)
    if force:
        return None
    source = chosen.run_id if chosen.exists else chosen.forked_from
    if source is not None and reader is not None:
        tasks = _reused_of(reader, read_run(reader, source), plan, chosen.again)
        return Reused(source=source, tasks=tasks)
    found = restorable(runs, plan.graph, folder)
    if found is None:
        return None
    complete = taken(plan, found.arguments(plan.graph, folder))
    return Reused(source=found.source, tasks=tuple(complete))


def _started_with(reader: Reader | None, run_id: str) -> tuple[dict[str, Json], Path]:
    assert reader is not None, "there are no runs without a reader"
    given = _arguments(read_run(reader, run_id))
    return given["graph"], Path(given["folder"])


def _reused_of(
    reader: Reader, recorded: RecordedRun, plan: Plan, again: Collection[str]
) -> tuple[str, ...]:
    """Return what is complete in a run, and would be in a fork of it."""
    replaced = replaced_steps(recorded.state, recorded.load)
    left = [each for each in _view_of(reader, recorded).steps if each.step not in replaced]
    executed = {each.name for each in recorded.state.steps.values()}
    restored = taken(plan, _arguments(recorded).get("restored"))
    restored = {name: each for name, each in restored.items() if name not in executed}
    _, results = _of_this_graph(recorded, plan, left, restored)
    complete: dict[str, None] = {}
    for at in plan.order:
        task = plan.graph.tasks[at]
        is_reused = task.id in results and task.id not in again
        if is_reused and all(each in complete for each in task.dependencies):
            complete[task.id] = None
    return tuple(complete)


class LeftState(NamedTuple):
    """The state file that a run leaves in its folder, and how many tasks are complete by it."""

    path: Path
    complete: int


def left_state(reader: Reader, run_id: str) -> LeftState | None:
    """Return what a team run has written beside the journal, which stays; None if there is nothing."""
    record = reader.run(run_id)
    if record is None or record.workflow != WORKFLOW:
        return None
    try:
        found = read_state(Path(_arguments(read_run(reader, run_id))["folder"]))
    except MaestroError:  # of a run or a file that cannot be read: it is deleted all the same
        return None
    if found is None or found.run_id != run_id or not found.tasks:
        return None
    return LeftState(Path(found.source), len(found.tasks))


def over_own_budget(reader: Reader, run: RunRecord, step: str | None = None) -> list[str]:
    """Return the tasks of a team run, or of them this one, that spent their own budget, not the run's."""
    view = team_view(reader, run.name) if run.workflow == WORKFLOW else None
    if view is None or view.status == BANKRUPT:
        return []
    return [each.id for each in view.with_status(BANKRUPT) if step in (None, each.id)]


def check_team_run(reader: Reader, run_id: str) -> None:
    """Raise if a run is no team run, or if there is none."""
    _team_run(reader, run_id)


def refuse_if_executed(reader: Reader, run_id: str, stop: str) -> None:
    """Raise ``RunLeasedError`` if a process executes a run; ``stop`` is the command that stops it.

    Not if its lease has expired: then the run may be taken over.
    """
    lease = reader.run_leases().get(run_id)
    if lease is not None and reader.clock.awake_seconds() < lease.expires:
        holder = lease.holder
        where = "" if holder.host == socket.gethostname() else " there"
        raise RunLeasedError(
            run_id,
            host=holder.host,
            pid=holder.pid,
            since=holder.since,
            way_out=f"stop it{where}: {stop}",
        )


def _team_run(reader: Reader, run_id: str) -> RunRecord:
    record = find_run(reader, run_id)
    if record.workflow != WORKFLOW:
        raise ConfigurationError(
            f"run {run_id!r} is no run of a task graph; 'maestro show {run_id}' shows it"
        )
    return record


def _arguments(run: RecordedRun) -> dict[str, Json]:
    started = run.state.started
    if started is None:
        raise ConfigurationError(f"run {run.record.name!r} has no recorded start")
    return read_input(started, run.load).kwargs


def _of_this_graph(
    recorded: RecordedRun, plan: Plan, steps: Iterable[StepView], restored: Mapping[str, Json]
) -> tuple[dict[str, StepView], dict[str, Json]]:
    """Return the steps by name that are of this graph, and the results of tasks that are complete.

    A fork has the steps of other graphs as well.
    """
    named: dict[str, list[StepView]] = {}
    for step in steps:
        named.setdefault(step.name, []).append(step)
    results, found = dict(restored), {}
    inputs: dict[str, str] = {}
    for at in plan.order:
        task = plan.graph.tasks[at]
        now = task_input(plan.graph, task)
        inputs[task.id] = digest_of(now)
        given = {each: results.get(each) for each in task.dependencies}
        for step in reversed(named.get(task.id, ())):
            if _has_input(recorded, step, now, given):
                found[task.id] = step
                result = _result_of(recorded, step)
                if result is not None and not asks(result):
                    results[task.id] = result
                break
    for level in plan.graph.levels:
        made = results_up_to(level, plan.graph, results) if level.gates else {}
        for gate in level.gates:
            name = gate_name(level, gate)
            now = gate_input(gate, made, inputs)
            for step in reversed(named.get(name, ())):
                if _has_input(recorded, step, now):
                    found[name] = step
                    break
    return found, results


def _result_of(recorded: RecordedRun, step: StepView) -> Json:
    """Return the result of a step; None if it is not complete."""
    is_done = step.status in _DONE_STATUSES
    return recorded.value(recorded.state.steps[step.step].completed) if is_done else None


def _as_task(recorded: RecordedRun, step: StepView) -> StepView:
    """Return a step with the status of its task.

    One that has asked for something is not complete, and one that has further rounds has not failed.
    """
    if asks(_result_of(recorded, step)):
        return replace(step, status=PENDING)
    identity, state = recorded.state.steps[step.step].identity, recorded.state
    if step.status == FAILED and identity not in state.outcomes and state.ended is None:
        return replace(step, status=RETRYING if recorded.lease is not None else STOPPED)
    return step


def _has_input(
    recorded: RecordedRun,
    step: StepView,
    now: dict[str, Json],
    results: dict[str, Json] | None = None,
) -> bool:
    """Return whether a step was executed with this, and with these results of others.

    What it asked for and the answers that it got are no difference.
    """
    given = recorded.value(recorded.state.steps[step.step].started)
    if not isinstance(given, dict):
        return True  # it was not stored
    then, *others = given["args"]
    return without_answers(then) == now and (results is None or others == [results])


class _Facts(NamedTuple):
    """What is recorded of a task or a gate, besides the view of its last step."""

    took: float | None = None
    #: Why a gate has not passed that is not required.
    not_passed: str | None = None
    tokens: int = 0
    usd: float = 0.0
    handovers: int = 0


_NO_FACTS = _Facts()


def _facts(recorded: RecordedRun, views: Mapping[str, StepView]) -> dict[str, _Facts]:
    """Return the facts of tasks and gates by their names, from their last steps by their names."""
    every: dict[str, list[StepState]] = {}
    for step in recorded.state.steps.values():
        every.setdefault(step.name, []).append(step)
    return {
        name: _Facts(
            took=_took(recorded, view),
            not_passed=_not_passed(recorded, view),
            # A task that has asked has a step for each answer.
            tokens=sum(sum((each.tokens or {}).values()) for each in every[name]),
            usd=sum_of_usd(each.usd for each in every[name]),
            handovers=sum(_handovers(recorded, each) for each in every[name]),
        )
        for name, view in views.items()
    }


def _not_passed(recorded: RecordedRun, view: StepView) -> str | None:
    if not view.name.startswith(GATE_PREFIX) or view.status not in _DONE_STATUSES:
        return None
    return why_not_passed(recorded.value(recorded.state.steps[view.step].completed))


def _handovers(recorded: RecordedRun, step: StepState) -> int:
    saved = recorded.value(step.progress)
    return handovers(saved) if isinstance(saved, dict) else 0


def _took(recorded: RecordedRun, view: StepView) -> float | None:
    """Return how long the last attempt of a step took, as its line at the end of it says."""
    step = recorded.state.steps[view.step]
    starts = [each.when for each in step.log if each.kind == EntryKind.ATTEMPT_STARTED]
    if step.open_attempt:
        ended = recorded.executed_until
    else:
        ended = (step.completed or step.log[-1]).when if step.log else None
    return seconds_between(starts[-1], ended) if starts and ended is not None else None


def _is_retried(recorded: RecordedRun, view: StepView) -> bool:
    """Return whether a step was retried and has not started since: what was before no longer counts."""
    step = recorded.state.steps[view.step]
    is_refused = step.identity in recorded.state.outcomes
    return not step.log and step.completed is None and not is_refused


def _task_views(
    plan: Plan,
    run: RunView,
    steps: dict[str, StepView],
    known: dict[str, _Facts],
    restored: Iterable[str],
) -> Iterator[TaskView]:
    status = {
        name: COMPLETE if step.status in _DONE_STATUSES else step.status
        for name, step in steps.items()
    }
    status |= dict.fromkeys(restored, COMPLETE)
    not_passed = {name: each.not_passed for name, each in known.items() if each.not_passed}
    status |= {name: NOT_PASSED for name in not_passed if name in steps}
    if run.status != "cancelled":  # an attempt was: the run was stopped
        status = {name: STOPPED if each == "cancelled" else each for name, each in status.items()}
    status |= {each.name: WAITING for each in run.waits_for}
    waiting = (each for each in run.waits_for if not each.answered and each.escalation is None)
    asked = {each.name: each.about for each in waiting if isinstance(each.about, str)}
    blocked = _blocked(plan, status)

    def view(name: str, title: str, level: int, persona: str | None) -> TaskView:
        step, blocked_by = steps.get(name), blocked.get(name)
        facts = known.get(name, _NO_FACTS)
        now = status.get(name, BLOCKED if blocked_by else PENDING)
        error = None if step is None or now in (COMPLETE, STOPPED) else step.last_error
        failures = 0 if step is None else step.failures
        if now == NOT_PASSED:  # its step is complete: it has found out that
            error, failures = not_passed[name], failures + 1
        return TaskView(
            id=name,
            title=title,
            level=level,
            is_gate=persona is None,
            status=now,
            persona=persona,
            attempts=0 if step is None else step.attempts,
            failures=failures,
            took_seconds=facts.took,
            error=error,
            blocked_by=blocked_by,
            question=asked.get(name),
            tokens=facts.tokens,
            usd=facts.usd,
            handovers=facts.handovers,
        )

    tasks = {task.id: task for task in plan.graph.tasks}
    for level in plan.graph.levels:
        for each in level.tasks:
            persona = plan.graph.persona_of(tasks[each])
            named = "" if persona is None else persona.name
            yield view(each, tasks[each].title, level.number, named)
        for gate in level.gates:
            yield view(gate_name(level, gate), gate.command, level.number, None)


def _blocked(plan: Plan, status: dict[str, str]) -> dict[str, str]:
    """Return what cannot start, each with the failed task or gate that is the reason."""
    ended = {
        COMPLETE: TaskState.COMPLETE,
        FAILED: TaskState.FAILED,
        BANKRUPT: TaskState.FAILED,
    }
    states = {each: ended.get(status.get(each, ""), TaskState.PENDING) for each in plan.ids}
    found = Frontier(plan, states).blocked()
    for level in plan.graph.levels:
        gates = {gate_name(level, gate): gate.required for gate in level.gates}
        failed = next((each for each in gates if status.get(each) == FAILED), None)
        stuck = [each for each in level.tasks if each in found or states[each] is TaskState.FAILED]
        if not level.is_gated or not (failed or stuck):
            continue
        # Nothing after the level starts; of several such levels the first one is the reason.
        cause = failed or next(each for each, is_required in gates.items() if is_required)
        found |= dict.fromkeys(gates, failed or stuck[0])
        after = [each for each in plan.graph.levels if each.number > level.number]
        names = [name for each in after for name in (*each.tasks, *_gates_of(each))]
        found = {**dict.fromkeys(names, cause), **found}
        break
    return {name: cause for name, cause in found.items() if name not in status}


def _gates_of(level: Level) -> list[str]:
    return [gate_name(level, gate) for gate in level.gates]


def _with_parked(
    reader: Reader, plan: Plan, run: RunView, views: list[TaskView]
) -> Iterator[TaskView]:
    """Yield tasks; those that could start, and wait for the breaker of their persona, as parked."""
    opened: set[str] = set()
    if run.executed:
        from maestro_hive.admin.breakers import list_breakers

        opened = {each.name for each in list_breakers(reader) if each.state == "open"}
    ready: set[str] = set()
    if opened:
        ended = {COMPLETE: TaskState.COMPLETE, FAILED: TaskState.FAILED}
        states = {each.id: ended.get(each.status, TaskState.PENDING) for each in views}
        gates = [each for each in views if each.is_gate]
        open_gates = {each.level for each in gates if each.status not in (COMPLETE, NOT_PASSED)}
        passed = {each.level for each in gates} - open_gates
        ready = set(Frontier(plan, states, passed).ready())
    for each in views:
        is_waiting = each.id in ready and each.status in (PENDING, RETRYING)
        is_parked = is_waiting and each.persona in opened
        yield replace(each, status=PARKED) if is_parked else each


def stop_run(reader: Reader, run_id: str) -> bool:
    """Ask the process that executes a team run to stop, and wait; False if none executes it."""
    return _end_run(reader, run_id, signal.SIGTERM)


def kill_run(reader: Reader, run_id: str) -> bool:
    """Kill the process that executes a team run, and wait; False if none executes it."""
    return _end_run(reader, run_id, signal.SIGKILL)


def _end_run(reader: Reader, run_id: str, number: signal.Signals) -> bool:
    from maestro_hive.team.survivors import is_suspended

    record = _team_run(reader, run_id)
    lease = reader.run_leases().get(record.name)
    if lease is None:
        return False
    holder = lease.holder
    if holder.host != socket.gethostname():
        raise ConfigurationError(
            f"run {run_id!r} is executed on {holder.host}, by process {holder.pid}; stop it there"
        )
    if number is signal.SIGTERM and is_suspended(holder.pid):
        raise ConfigurationError(
            f"run {run_id!r} was not stopped: process {holder.pid} is suspended, as by SIGSTOP or Ctrl+Z. Let"
            f" it go on by 'kill -CONT {holder.pid}' and stop it then, or kill it by 'kill -KILL"
            f" {holder.pid}'; 'maestro resume {run_id}' takes the run over when its lease has expired"
        )
    os.kill(holder.pid, number)
    deadline = time.monotonic() + _STOP_SECONDS
    while (now := reader.run_leases().get(record.name)) is not None and now.fence == lease.fence:
        if time.monotonic() > deadline:
            raise ConfigurationError(
                f"process {holder.pid} was asked to stop, and still executes run {run_id!r}"
            )
        time.sleep(0.02)
    return True
