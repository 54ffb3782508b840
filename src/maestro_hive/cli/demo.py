"""``maestro demo``: a team builds a program, its engine is killed, and nothing is done twice."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from maestro_hive.cli import output
from maestro_hive.cli.command import FAILED, verb
from maestro_hive.demo import proof
from maestro_hive.demo.session import GRAPH, INTERRUPTED, LOOK_SECONDS, RUN, STORE, Session
from maestro_hive.kernel.errors import MaestroError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType
    from typing import NoReturn

    from maestro_hive.cli.command import Call
    from maestro_hive.demo.session import Engine

#: How long the first half may take, in seconds.
_HALF_SECONDS = 150.0
#: For how long nothing is printed before the kill: so all that was done until then is seen.
_QUIET_SECONDS = 1.0
#: Lines of the engine that have a colour, by a word in them.
_COLOURS = {" failed": "yellow", ": complete": "green", "complete (": "green"}


class DemonstrationError(MaestroError):
    """The demonstration did not show what it promises."""


@verb("demo")
@click.option("--keep", is_flag=True, help="Keep the folder, to look at the project and the run.")
def demo_command(call: Call, *, keep: bool) -> int | None:
    """See a team work, its engine killed, and nothing done twice.

    An architect, then a backend, a frontend and a docs persona in parallel, a tester and a reviewer build
    a small web service in a temporary folder. They are scripted: it needs no model, no key, no network and
    no configuration, and takes about a quarter of a minute. All else is real: the task graph, the
    processes, a verification that fails once and whose output is the feedback of the next attempt, a test
    run as gate. Half-way the engine is killed with kill -9, and the run is resumed.

    Each persona writes a line to a ledger when it starts, which the engine knows nothing of. At the end
    the ledger is compared with the journal: if a task was started after it was complete, that is said,
    and the exit code is 1.

    Examples:
        maestro demo            watch it
        maestro demo --keep     and keep what was made: project, state folder and ledger
        maestro demo | cat      plain lines, as in CI
    """
    if call.chosen is not None:
        raise click.UsageError(
            "The demonstration has a state folder of its own: leave --store out."
        )
    folder = Path(tempfile.mkdtemp(prefix="maestro-demo-"))
    session = Session(folder)
    with _signals_end_it():
        try:
            session.prepare()
            _introduce()
            if keep:
                output.line(f"The folder: {folder}")
            found = _shown(session)
        finally:
            if not keep:
                shutil.rmtree(folder, ignore_errors=True)
    for each in found:
        output.complain(each)
    if found:
        output.complain("the ledger contradicts the journal: a completed task is not safe here")
        return FAILED
    _show_what_is_next(session if keep else None)
    return None


@contextlib.contextmanager
def _signals_end_it() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the demonstration as Ctrl+C does: with nothing left behind."""

    def end(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    ours = [
        each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) == signal.SIG_DFL
    ]
    for each in ours:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in ours:
            signal.signal(each, signal.SIG_DFL)


# --- the scenes -----------------------------------------------------------------------------------


def _introduce() -> None:
    output.heading("Six personas build a small web service; half-way their engine is killed.")
    output.line(
        "They are scripted: no model, no key, no network. Graph, tests and journal are real."
    )


def _shown(session: Session) -> list[str]:
    """Show the run, the kill, the journal and the rest; return what contradicts the promise."""
    _type("run", GRAPH, "--workers", "3")
    with _engine(session, "run", GRAPH, "--workers", "3") as engine:
        _show_half(session, engine)
        output.line()
        output.heading(f"$ kill -9 {engine.pid}")
        engine.kill()
    started = len(session.ledger())
    output.line(
        f"The engine is dead, and {' and '.join(INTERRUPTED)} with it. The journal has what was done:"
    )
    _type("status", RUN)
    sys.stdout.flush()
    subprocess.run(  # noqa: S603 - of this package
        session.command("status", RUN),
        cwd=session.project,
        env=session.environment(),
        stderr=subprocess.STDOUT,
        check=False,
    )
    _type("resume", RUN)
    with _engine(session, "resume", RUN) as engine:
        for text in engine.lines():
            _show_line(text)
        if code := engine.wait():
            raise DemonstrationError(f"the resumed run ended with exit code {code}, as shown above")
    return _proven(session, started)


@contextlib.contextmanager
def _engine(session: Session, *words: str) -> Iterator[Engine]:
    engine = session.start(*words)
    try:
        yield engine
    finally:
        engine.stop()


def _show_half(session: Session, engine: Engine) -> None:
    """Show what the engine prints, until the run is half-way and has printed nothing for a moment."""
    quiet, deadline = 0.0, time.monotonic() + _HALF_SECONDS
    for text in engine.lines():
        _show_line(text)
        quiet = quiet + LOOK_SECONDS if text is None and session.is_half_way() else 0.0
        if quiet >= _QUIET_SECONDS:
            return
        if time.monotonic() > deadline:
            raise DemonstrationError(
                f"the run was not half-way after {_HALF_SECONDS:g} s: is the machine very busy?"
            )
    raise DemonstrationError(
        f"the engine ended with exit code {engine.wait()} before it could be killed, as shown above"
    )


def _proven(session: Session, started: int) -> list[str]:
    """Compare the ledger with the journal; return what contradicts."""
    tasks, ledger = session.tasks(), session.ledger()
    completed = proof.completions(session.events())
    output.line()
    output.heading("The ledger, which the personas wrote, and the journal:")
    rows = [
        [
            task,
            _listed([each.attempt for each in ledger[:started] if each.task == task]),
            _listed([each.attempt for each in ledger[started:] if each.task == task]),
            f"by attempt {completed[task]}" if task in completed else "no",
        ]
        for task in tasks
    ]
    _table(["task", "attempts before the kill", "and after it", "complete in the journal"], rows)
    found = proof.contradictions(tasks, ledger, completed)
    if not found:
        again = {each.task for each in ledger[started:]}
        before = " and ".join(task for task in tasks if task not in again)
        output.line()
        click.secho(
            f"Proven: {len(tasks)} tasks are complete, and none was started after it was complete;"
            f"\n{before} were not started again after the kill.",
            fg="green",
        )
    return found


def _table(columns: list[str], rows: list[list[str]]) -> None:
    """Print a table to be read, in a pipe too: nobody takes it apart there."""
    if output.is_terminal():
        output.table(columns, rows)
        return
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        cells = [f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)]
        output.line((" " * output.GAP).join(cells).rstrip())


def _listed(attempts: list[int]) -> str:
    return ", ".join(map(str, attempts))


def _show_what_is_next(session: Session | None) -> None:
    output.line()
    output.heading("Next")
    maestro = _typed(from_here=session is None)
    if session is None:
        found = {f"{maestro} demo --keep": "keep the folder, and look around in it"}
    else:
        output.line(f"cd {shlex.quote(str(session.project))}")
        found = {
            f"{maestro} status {RUN} --store {STORE}": "its tasks",
            f"{maestro} show {RUN} BACKEND --store {STORE}": "why an attempt failed, and what healed it",
            f"{maestro} logs {RUN} BACKEND --store {STORE}": "what a persona wrote",
            "python3 app.py": "what they have built, on http://127.0.0.1:8000",
        }
    found |= {
        f"{maestro} init": "write a task graph of your own",
        f"{maestro} run --help": "how it is executed: by commands, functions, claude, codex, …",
    }
    width = max(map(len, found))
    for command, purpose in found.items():
        output.line(f"{command:{width}}   {purpose}")


def _typed(*, from_here: bool) -> str:
    """Return how the command can be typed, in the current folder or in any: it may not be on PATH."""
    if shutil.which("maestro") is not None:
        return "maestro"
    program = Path(sys.executable).absolute().with_name("maestro")
    if not program.is_file():
        return f"{shlex.quote(sys.executable)} -m maestro_hive"
    here = Path.cwd()
    if from_here and program.is_relative_to(here):
        program = program.relative_to(here)
    return shlex.quote(str(program))


# --- lines ----------------------------------------------------------------------------------------


def _type(*words: str) -> None:
    output.line()
    output.heading(f"$ maestro {shlex.join(words)} --store {STORE}")


def _show_line(text: str | None) -> None:
    """Print a line of the engine; in a terminal in its colour, and folded between words."""
    if text is None:
        return
    if output.is_terminal():
        colour = next((each for word, each in _COLOURS.items() if word in text), None)
        width = os.get_terminal_size(sys.stdout.fileno()).columns or 80
        folded = textwrap.wrap(text, max(width, 40), subsequent_indent=" " * 10) or [""]
        click.secho(output.printable("\n".join(folded)), fg=colour)
    else:
        output.line(text)
        sys.stdout.flush()
