"""Executes a team run in front of a person: shows how it goes on, stops it by signals, and notifies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from maestro_hive.admin import teams
from maestro_hive.cli import output
from maestro_hive.cli.command import FAILED, INTERRUPTED, PERSON_NEEDED, duration_or_none
from maestro_hive.cli.screen import Screen
from maestro_hive.cli.show import waiting_line
from maestro_hive.cli.team_progress import Happened, Progress, question_line
from maestro_hive.cli.team_report import UNSUCCESSFUL, print_report, retry_command
from maestro_hive.cli.team_table import Look, table_lines
from maestro_hive.engine.errors import HelpNeeded, TokenBudgetExceeded, parts_of
from maestro_hive.hive.dispatching import RunReleased
from maestro_hive.hive.errors import RunCancelledError, RunFailedError
from maestro_hive.kernel.errors import MaestroError
from maestro_hive.kernel.files import reason_of
from maestro_hive.kernel.process import run_async
from maestro_hive.kernel.signals import until_signal
from maestro_hive.maestro.state.views import OVER
from maestro_hive.team import notifications
from maestro_hive.team.agent_calls import version_warnings
from maestro_hive.team.errors import GraphFailedError
from maestro_hive.team.notifications import Notification, Notifier

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from maestro_hive.admin.teams import TeamView
    from maestro_hive.cli.command import Call
    from maestro_hive.hive.attending import Asked
    from maestro_hive.hive.hive import Hive
    from maestro_hive.team.runner import Executing

#: How long the end of a run waits for what agents say of their versions.
_VERSION_SECONDS = 10.0
#: How long what was recorded last may take to be shown after the end.
_LAST_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How a run is executed, whichever it is: what ``run`` and ``resume`` share."""

    no_wait: bool = False
    #: For how many seconds a stop waits for what is executed.
    grace: float | None = None
    notify: tuple[str, ...] = ()
    plain: bool = False


def manner_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a verb the options of ``Manner``."""
    for option in reversed(_MANNER):
        command = option(command)
    return command


_MANNER = (
    click.option(
        "--no-wait", is_flag=True, help="Exit with 75 when only people can go on with it."
    ),
    click.option("--plain", is_flag=True, help="Print lines, as in a pipe, and no table."),
    click.option(
        "--grace",
        metavar="DURATION",
        type=duration_or_none,
        help="When it is stopped, wait so long for tasks that are executed.",
    ),
    click.option(
        "--notify",
        metavar="TARGET",
        multiple=True,
        help="Notify at the end, and when a person is needed: bell, the address of a webhook, or a"
        f" command; may be given several times.  [default: {notifications.VARIABLE}]",
    ),
)


def shows_table(call: Call, manner: Manner) -> bool:
    """Return whether stdout is a terminal that is drawn on.

    What is logged is for reading, and CI has no screen although it may have a terminal.
    """
    is_plain = call.wants_json or manner.plain or call.verbosity or os.environ.get("CI")
    return not is_plain and output.is_terminal() and output.has_screen()


class Shown:
    """How far the run has come that this process executes: told by it, and drawn or printed."""

    def __init__(self, call: Call, *, on_screen: bool) -> None:
        self._call = call
        self.on_screen = on_screen
        self.progress: Progress | None = None
        self._run: Executing | None = None
        self._started = asyncio.Event()
        self._lock = threading.Lock()  # a screen is drawn by another thread
        #: What the table says of the run besides.
        self._note = ""

    @property
    def happened(self) -> Happened:
        """What has happened in this execution."""
        return Happened() if self.progress is None else self.progress.happened

    def executing(self, run: Executing) -> None:
        """Note that this process has started to execute a run."""
        self.progress = Progress(
            run.plan,
            len(run.slots.numbers),
            run.last_event,
            tells_starts=not self.on_screen,
            how_to_answer=lambda name: self._call.command_line("answer", run.run_id, name, "TEXT"),
        )
        self._run = run
        self._started.set()

    def complete(self, name: str) -> None:
        """Note that a task or a gate is complete, also if it was before."""
        assert self.progress is not None
        with self._lock:
            lines = self.progress.complete(name)
        _print(lines)

    def not_passed(self, name: str, reason: str) -> None:
        """Note that a gate that is not required has not passed, also if that was before."""
        assert self.progress is not None
        with self._lock:
            lines = self.progress.not_passed(name, reason)
        _print(lines)

    def parked(self, name: str, *, is_parked: bool) -> None:
        """Note that a task waits for the breaker of its persona, or does not any more."""
        assert self.progress is not None
        with self._lock:
            lines = self.progress.park(name, datetime.now(UTC), is_parked=is_parked)
        _print(lines)

    def asks(self, name: str, question: str) -> None:
        """Note what a task asks."""
        assert self.progress is not None
        with self._lock:
            self.progress.ask(name, question)

    def is_said(self, asked: Asked) -> bool:
        """Return whether the line of a question is printed where the journal has it."""
        return (
            self._run is not None
            and asked.run_id == self._run.run_id
            and asked.wait.name in self._run.plan.ids
            and asked.wait.escalation is None
            and asked.wait.id not in self._run.questions
        )

    async def started(self) -> Executing:
        """Return the run when this process executes it."""
        await self._started.wait()
        assert self._run is not None
        return self._run

    async def follow(self, hive: Hive) -> None:
        """Note the events of the run, and print them, until no process executes it."""
        run = await self.started()
        assert self.progress is not None
        async for event in hive.events(run.run_id):
            with self._lock:
                lines = self.progress.note(event)
            _print(lines)

    def end(self) -> None:
        """Print what is left to be printed."""
        if self.progress is not None:
            with self._lock:
                lines = self.progress.end()
            _print(lines)

    def note_stop(self, seconds: float | None) -> None:
        """Say that the run is stopped, and how long what is executed may take."""
        if self._run is None:
            return
        self._note = "stopping"
        tasks = output.many(len(set(self._run.slots.busy().values())), "task")
        if seconds is None:
            output.note(f"stopping: {tasks} will be ended; Ctrl+C again stops at once")
            return
        output.note(
            f"stopping: nothing more is started, and {output.duration(seconds)} are left to {tasks};"
            " Ctrl+C again stops at once"
        )

    async def drain(self, seconds: float) -> None:
        """Let nothing more start, and return when what is executed has ended, or after so long."""
        if self._run is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._run.slots.drain(), seconds)

    def draw(self, columns: int, lines: int) -> list[str]:
        """Return the table, for a terminal of this size."""
        if self.progress is None or self._run is None:
            return []
        look = Look(columns, lines, output.may_use_colours(), _writes_unicode())
        worker_of = self._run.slots.worker_of
        with self._lock:
            return table_lines(self.progress, look, time.time(), worker_of, self._note)


def _print(lines: Iterable[str]) -> None:
    for each in lines:
        with contextlib.suppress(OSError):  # the reader has left; the run goes on
            output.line(each)
            sys.stdout.flush()


def _writes_unicode() -> bool:
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


class TeamCall:
    """One execution of a team run by a verb: from its start to its report."""

    def __init__(
        self,
        call: Call,
        hive: Hive,
        run_id: str,
        shown: Shown,
        manner: Manner,
        notifier: Notifier,
    ) -> None:
        self._call = call
        self._hive = hive
        self._run_id = run_id
        self._shown = shown
        self._manner = manner
        self._notifier = notifier

    def execute(self, start: Callable[[], Coroutine[Any, Any, Any]]) -> int | None:
        """Execute the run, show what happens, and report at its end; return the exit code."""
        self._hive.runs(limit=1)  # which makes a folder that is new
        with self._call.reading() as reader:
            stop = self._call.command_line("stop", self._run_id)
            teams.refuse_if_executed(reader, self._run_id, stop)  # before anything is shown of it
        output.note(f"run: {self._run_id}")
        code, said, is_stopped = self._ended(start)
        if said is not None:
            output.complain(said)
        if is_stopped and not self._call.wants_json:
            return code
        with self._call.reading() as reader:
            view = teams.team_view(reader, self._run_id)
        if not self._report(view):
            code = code or FAILED
        if not is_stopped:  # who has stopped it knows
            run_async(self._notify_end(view))
        return code

    def _report(self, view: TeamView) -> bool:
        """Print the report; return whether nothing of it was lost. A reader may leave early."""
        try:
            print_report(self._call, view, self._shown.happened)
            sys.stdout.flush()
        except OSError as error:
            # What is buffered is not written again when the process ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if isinstance(error, BrokenPipeError):
                return True
            output.complain(
                f"the report could not be printed: {reason_of(error)}. Run {view.run_id}:"
                f" {view.status}; to see it: {self._call.command_line('status', view.run_id)}"
            )
            return False
        return True

    def _ended(
        self, start: Callable[[], Coroutine[Any, Any, Any]]
    ) -> tuple[int | None, str | None, bool]:
        """Return the exit code, what is said of it, and whether a signal has stopped the run."""
        options = ["--no-wait"] if self._manner.no_wait else []
        again = self._call.command_line("resume", self._run_id, *options)
        stopped = f"run {self._run_id!r} was stopped"
        try:
            with self._screen():
                grace = self._manner.grace
                drain = None if grace is None else partial(self._shown.drain, grace)
                note = partial(self._shown.note_stop, grace)
                run_async(until_signal(self._attended(start()), stopped, drain, note))
        except (KeyboardInterrupt, SystemExit) as error:
            code = INTERRUPTED
            if isinstance(error, SystemExit):
                code = error.code if isinstance(error.code, int) else FAILED
            else:
                output.end_typed_line()
            return code, f"{stopped}{self._how_far()}; to resume it: {again}", True
        except RunCancelledError as error:
            return FAILED, str(error), False
        except RunFailedError as error:
            return FAILED, _why_failed(error), False
        except (RunReleased, HelpNeeded, TokenBudgetExceeded) as error:
            needed = f"run {self._run_id!r} waits for a person. Answer, then"
            if not isinstance(error, RunReleased):
                needed = f"{error}. A person has to decide; then"
            return PERSON_NEEDED, f"{needed}: {again}", False
        return None, None, False

    def _how_far(self) -> str:
        """Return how many tasks are complete, by the journal: the display may not know it yet."""
        try:
            with self._call.reading() as reader:
                view = teams.team_view(reader, self._run_id)
        except MaestroError:  # it was stopped before it was recorded
            return ""
        tasks = [each for each in view.tasks if not each.is_gate]
        complete = sum(each.status == teams.COMPLETE for each in tasks)
        return f", {complete:,} of {output.many(len(tasks), 'task')} complete"

    def _screen(self) -> contextlib.AbstractContextManager[object]:
        """Return what stdout is meanwhile."""
        if self._call.wants_json:
            return contextlib.redirect_stdout(sys.stderr)
        return Screen(self._shown.draw) if self._shown.on_screen else contextlib.nullcontext()

    async def _attended(self, work: Coroutine[Any, Any, Any]) -> None:
        """Execute the run; meanwhile, show what happens, and tell what it asks people."""
        following = asyncio.create_task(self._shown.follow(self._hive))
        attending = asyncio.create_task(
            self._hive.attend(self._run_id, self._tell, leave=self._manner.no_wait)
        )
        warning = asyncio.create_task(self._warn())
        is_stopped = False
        try:
            await work
        except asyncio.CancelledError:
            is_stopped = True
            warning.cancel()
            raise
        finally:
            attending.cancel()
            if self._shown.progress is None:  # it was not executed
                following.cancel()
                warning.cancel()
            await asyncio.wait({following}, timeout=_LAST_SECONDS)
            self._shown.end()
            await asyncio.wait({warning}, timeout=_VERSION_SECONDS)
            if not is_stopped:  # who has stopped it waits for its end
                await self._notifier.finish()

    async def _warn(self) -> None:
        """Say which agents have a version that was not tried, while they work."""
        run = await self._shown.started()
        for each in await version_warnings(run.plan.graph):
            output.complain(each)

    def _tell(self, asked: Asked) -> None:
        """Say what the run asks a person."""
        wait = asked.wait
        words = ["answer", asked.run_id, wait.name, "TEXT"]
        if asked.several:
            words += ["--question", wait.id]
        command = self._call.command_line(*words)
        question = output.redacted(" ".join(str(wait.about or "").split()))
        if not self._shown.is_said(asked):
            if wait.escalation is not None:
                line = waiting_line(self._call, asked.run_id, wait, named=asked.several)
            else:
                line = question_line(wait.name, question, command)
            _print([f"{time.strftime('%H:%M:%S')}  {line}"])
        progress = self._shown.progress
        self._notifier.notify(
            Notification(
                event=notifications.PERSON_NEEDED,
                run_id=asked.run_id,
                feature="" if progress is None else progress.feature,
                status="waiting",
                message=f"run {asked.run_id}: {wait.name} waits for an answer: {question}",
                command=command,
                task=wait.name,
                question=question,
                complete=0 if progress is None else progress.complete_tasks,
                total=0 if progress is None else progress.total,
                tokens=asked.tokens,
                usd=asked.usd,
            )
        )

    async def _notify_end(self, view: TeamView) -> None:
        if view.status == "waiting":
            return  # what it asks was told
        tasks = [each for each in view.tasks if not each.is_gate]
        failed = tuple(each.id for each in view.with_status(*UNSUCCESSFUL))
        complete = sum(each.status == teams.COMPLETE for each in tasks)
        trouble = f"; failed: {output.listed(failed, 8)}" if failed else ""
        is_ended = view.status in OVER
        self._notifier.notify(
            Notification(
                event=notifications.RUN_ENDED if is_ended else notifications.PERSON_NEEDED,
                run_id=view.run_id,
                feature=view.feature,
                status=view.status,
                message=f"{output.in_one_line(view.feature)}: {view.status}, {complete} of"
                f" {output.many(len(tasks), 'task')} complete{trouble}",
                command=self._command_to_go_on(view),
                complete=complete,
                total=len(tasks),
                failed=failed,
                tokens=view.tokens,
                usd=view.usd,
            )
        )
        await self._notifier.finish()

    def _command_to_go_on(self, view: TeamView) -> str | None:
        """Return what to type next, as the report says it; None if no command alone helps."""
        match view.status:
            case "success":
                return None
            case "failed" | "cancelled":
                return retry_command(self._call, view)
            case _:
                return self._call.command_line("resume", view.run_id)


def _why_failed(error: RunFailedError) -> str | None:
    """Return why a run failed; None if tasks and gates did: the report has these."""
    cause = error.__cause__
    if isinstance(cause, GraphFailedError):
        return None
    parts = parts_of(cause) if isinstance(cause, ExceptionGroup) else ()
    return str(error) + "".join(f"\n  {type(each).__name__}: {each}" for each in parts)


def notifier_of(manner: Manner, hive: Hive) -> Notifier:
    """Return who is told of a run; raise if a target cannot be told."""
    named = os.environ.get(notifications.VARIABLE)
    targets = manner.notify or ((named,) if named else ())
    return Notifier([notifications.target(each, hive.config) for each in targets], output.complain)
