"""``maestro run``: start or resume a workflow of a module, or a task graph."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import os
import re
import signal
import sys
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import click

from maestro_hive.admin.folder import choose_folder
from maestro_hive.cli import graphs, output, teams
from maestro_hive.cli.command import (
    INTERRUPTED,
    PERSON_NEEDED,
    Helpful,
    print_logs,
    verb,
)
from maestro_hive.cli.show import waiting_line
from maestro_hive.cli.team_run import Manner, manner_options
from maestro_hive.engine.config import DefaultFolder
from maestro_hive.engine.errors import HelpNeeded, TokenBudgetExceeded
from maestro_hive.engine.failures import plain_text
from maestro_hive.hive.dispatching import RunReleased
from maestro_hive.hive.functions import StepFunction, StepMethod, WorkflowFunction
from maestro_hive.hive.hive import Hive, stopped_message
from maestro_hive.hive.runs import new_id
from maestro_hive.hive.typed_arguments import recorded_arguments, typed_arguments
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.kernel.process import run_async
from maestro_hive.kernel.signals import until_signal

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from types import ModuleType

    from maestro_hive.cli.command import Call
    from maestro_hive.hive.attending import Asked

_NEGATIVE_NUMBER = re.compile(r"-[0-9.][0-9.eE+-]*", re.ASCII)
#: Before a negative number that is an argument, while options are read.
MARK = "\0"
_NAME = r"[^\W\d]\w*"
_GRAPH_SUFFIXES = (".json", ".toml")
#: How many similar files a message names.
_NAMED = 3
_TARGET = re.compile(rf"({_NAME}(?:\.{_NAME})*):({_NAME}(?:\.{_NAME})*)")


class TakesArguments(Helpful):
    """A verb whose arguments may be negative numbers, which look like options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the options; a negative number is an argument, where it stands."""
        end = args.index("--") if "--" in args else len(args)
        options = [each for each in self.get_params(ctx) if isinstance(each, click.Option)]
        with_value = {name for each in options if not each.is_flag for name in each.opts}
        marked = [
            f"{MARK}{each}"
            if _NEGATIVE_NUMBER.fullmatch(each) and before not in with_value
            else each
            for before, each in zip(["", *args], args[:end], strict=False)
        ]
        return super().parse_args(ctx, [*marked, *args[end:]])


@verb("run", reads=True, cls=TakesArguments, imports=True)
@click.argument("target", metavar="MODULE:WORKFLOW|GRAPH")
@click.argument("words", metavar="[ARG]...", nargs=-1)
@click.option(
    "--run-id",
    metavar="RUN",
    help="The run's id; a run of that id is resumed.  [default: new; of a task graph, its feature's]",
)
@click.option("--dry-run", is_flag=True, help="Of a task graph: show what would run.")
@click.option(
    "--only",
    metavar="ID",
    multiple=True,
    help="Of a task graph: this task and what it depends on; may be given several times.",
)
@click.option(
    "--force", is_flag=True, help="Of a task graph: execute all of it again, as a new run."
)
@click.option(
    "--budget",
    metavar="AMOUNT",
    help="Of a task graph: what the run may spend: tokens, or money as in '$2.50'.",
)
@click.option(
    "--persona",
    metavar="AGENT|COMMAND",
    help="Of a task graph: what executes tasks without a persona: an agent, such as claude, or a"
    " command, in which {prompt} becomes one argument.",
)
@graphs.workers_option
@click.option(
    "--strict",
    is_flag=True,
    help="Of a task graph: hold it to the published schema, tasks that own the same file are errors;"
    f" and {graphs.STRICT_RUN}.",
)
@manner_options
def run_command(
    call: Call,
    target: str,
    words: tuple[str, ...],
    run_id: str | None,
    dry_run: bool,
    only: tuple[str, ...],
    force: bool,
    budget: str | None,
    persona: str | None,
    workers: int | None,
    strict: bool,
    **given: Any,
) -> int | None:
    """Run a task graph, or a workflow of a module; or resume it.

    MODULE is imported, from the current folder too, and nothing else is; it must not run workflows
    itself when it is imported. Each ARG is a text that is read as the type of its parameter, as JSON
    where that is an object or a list; NAME=TEXT gives a parameter by its name. Without ARG, an
    existing run is resumed with the arguments it was started with.

    The workflow's Hive has its state folder. The result is printed as it is, also if it has secrets;
    with --json in an object, and what the workflow prints goes to stderr. Ctrl+C or SIGTERM stops the
    run, and the same command with --run-id resumes it.

    What it asks people, by hive.wait_for, an approval or an escalation, is told on stderr with the
    command that answers. It waits, and goes on at once with the answer; with --no-wait it exits when
    all it does is wait for people, and the same command resumes it. The exit code is 75 then, and also
    if a person has to decide about a step, or about its budget, before it can go on.

    GRAPH is a file with a task graph, whose tasks are executed in the current folder. A graph is a
    program: read it first. The run is named by the feature. The same command resumes it; if the graph
    has changed since, what is unchanged is not executed again. With --dry-run no task is executed: it
    shows levels, what each worker would do, conflicts, tasks that a run would refuse (the exit code is
    1 then; modules of Python personas are imported to find out), and programs of verifications and
    gates that are not on PATH. A terminal shows a table, and each task that has ended as a line;
    elsewhere lines say what happens. The exit code is 1 if a task or a gate failed; 'maestro retry RUN'
    and 'maestro resume RUN' then go on.

    Examples:
        maestro run task-graph.json --workers 8                  execute a task graph
        maestro run task-graph.json --notify bell --grace 10m    ring at its end; let tasks end if stopped
        maestro run task-graph.json --only CART --force          one task and what it depends on, again
        maestro run shop.checkout:build "cart page"              a text
        maestro run shop.checkout:build feature=cart size=3      by name
        maestro run shop.checkout:build cart --run-id build-42   start it, or resume it
        maestro run shop.checkout:build --run-id build-42 -v     resume it, and show its log
        maestro run shop.checkout:build cart --json              for another program
        maestro run shop.checkout:build cart --no-wait           for a program that waits for nobody
        maestro run task-graph.json --dry-run --workers 8        what 8 workers would do
    """
    if _is_graph(target):
        if words:
            raise click.UsageError(f"A task graph takes no arguments, and {words[0]!r} is one.")
        if dry_run:
            return graphs.show_dry_run(
                call,
                Path(target),
                workers,
                only,
                strict=strict,
                force=force,
                persona=persona,
                run_id=run_id,
            )
        options = teams.GraphOptions(
            run_id=run_id,
            workers=workers,
            only=only,
            force=force,
            strict=strict,
            budget=budget,
            persona=persona,
            manner=Manner(**given),
        )
        return teams.run_graph(call, Path(target), options)
    no_wait = given.pop("no_wait")
    graph_only = (dry_run, only, workers is not None, strict, force, budget, persona)
    if any(graph_only) or any(each not in (None, False, ()) for each in given.values()):
        raise click.UsageError(
            "--dry-run, --only, --workers, --strict, --force, --budget, --persona, --grace, --notify"
            f" and --plain are for task graphs, and {target!r} is not an existing file"
            f"{_similar_graphs(Path(target))}."
        )
    return _run_workflow(call, target, words, run_id, no_wait=no_wait)


def _run_workflow(
    call: Call, target: str, words: tuple[str, ...], run_id: str | None, *, no_wait: bool
) -> int | None:
    """Run a workflow of a module, and print its result; return the exit code, if not 0."""
    with contextlib.redirect_stdout(sys.stderr) if call.wants_json else contextlib.nullcontext():
        found = _find(target)
        folder = use_folder_of(call, found.hive)
        run = run_id if run_id is not None else new_id(found.workflow.name)
        files.check_identifier(run, "run id")
        args, kwargs = _arguments(found, [each.removeprefix(MARK) for each in words], run_id)
        output.note(f"run: {run}")
        options = ["--no-wait"] if no_wait else []
        again = call.command_line("run", target, "--run-id", run, *options)
        work = _attended(found, args, kwargs, run, _tells(call, folder), leave=no_wait)
        code, result = _executed(work, run, again)
    if code is not None:
        return code
    # The result is what the command was called for: replaced secrets would make it another one.
    with output.printing_values():
        if call.wants_json:
            shown = {"store": str(folder), "run_id": run, "result": result}
            click.echo(output.to_json(shown, indent=2))
        elif result is not None:
            output.line(result if isinstance(result, str) else output.to_json(result))
    return None


async def _attended(
    found: Found,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    run: str,
    tell: Callable[[Asked], object],
    *,
    leave: bool,
) -> Any:
    """Return the result of the run; meanwhile, tell what it asks people."""
    attending = asyncio.create_task(found.hive.attend(run, tell, leave=leave))
    try:
        return await found.hive.run(found.workflow, *args, run_id=run, **kwargs)
    finally:
        attending.cancel()
        await asyncio.wait({attending})


def _tells(call: Call, folder: Path) -> Callable[[Asked], object]:
    """Return what prints how a question is answered: with the folder, where that is not evident."""
    answering = copy.copy(call)
    if call.chosen is None and choose_folder(None)[0].resolve() != folder.resolve():
        answering.chosen = _shown(folder)

    def tell(asked: Asked) -> None:
        output.note(waiting_line(answering, asked.run_id, asked.wait, named=asked.several))

    return tell


def _executed(work: Coroutine[Any, Any, Any], run: str, again: str) -> tuple[int | None, Any]:
    """Return the exit code of a run that was stopped, or None and the result."""
    try:
        return None, run_async(until_signal(work, stopped_message(run)))
    except KeyboardInterrupt as stopped:
        output.end_typed_line()
        output.complain(f"{str(stopped) or 'interrupted'}: {again}")
        return INTERRUPTED, None
    except SystemExit as stopped:
        number = stopped.code - 128 if isinstance(stopped.code, int) else 0
        if number in {signal.SIGTERM, signal.SIGHUP}:
            name = signal.Signals(number).name
            output.complain(f"{name} stopped the run; to resume it: {again}")
        raise
    except RunReleased:
        output.complain(f"run {run!r} waits for a person. Answer, then: {again}")
        return PERSON_NEEDED, None
    except (HelpNeeded, TokenBudgetExceeded) as error:
        output.complain(f"{error}. A person has to decide; then: {again}")
        return PERSON_NEEDED, None


def use_folder_of(call: Call, hive: Hive) -> Path:
    """Return the state folder of a hive, and show what is logged."""
    folder = Path(hive.config.state.resolve().state)
    if call.chosen is not None and call.chosen.expanduser().resolve() != folder.resolve():
        raise ConfigurationError(
            f"--store {call.chosen}: the module's Hive stores its state in {folder}; leave --store"
            f" out, or {_another_folder(hive, call.chosen)}"
        )
    # A module that configures logging has its own way of showing what is logged.
    if call.verbosity or not logging.getLogger().handlers:
        print_logs(call.verbosity)
    output.note(f"store: {_shown(folder)} (of the workflow's Hive)")
    return folder


def _shown(folder: Path) -> Path:
    here = Path.cwd()
    return folder.relative_to(here) if folder.is_relative_to(here) else folder


def _another_folder(hive: Hive, folder: Path) -> str:
    """Return how a module's Hive gets another folder, in words: by the variable, unless it has one."""
    named = os.environ.get("MAESTRO_STATE_DIR")
    used = hive.config.state.state_dir
    if isinstance(used, DefaultFolder) or (named and Path(named) == Path(used)):
        return f"set MAESTRO_STATE_DIR to {folder}"
    return f"change the module: Hive({str(folder)!r})"


def _arguments(
    found: Found, words: list[str], run_id: str | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what the workflow is called with: as it was typed, or as the run was started."""
    if run_id is not None and not words:
        recorded = recorded_arguments(found.hive, found.workflow, run_id)
        if recorded is not None:
            return recorded
    return typed_arguments(found.workflow, words)


# --- finding the workflow -------------------------------------------------------------------------


class Found(NamedTuple):
    """A workflow of a module, and the hive it was defined on."""

    workflow: WorkflowFunction[..., Any]
    hive: Hive


def _find(target: str) -> Found:
    """Import a module, and return the workflow of it that is meant."""
    parts = _TARGET.fullmatch(target)
    if parts is None or Path(target).exists():
        _refuse(target)
    module = imported(parts[1])
    value: object = module
    for name in parts[2].split("."):
        try:
            value = getattr(value, name)
        except AttributeError:
            raise ConfigurationError(
                f"the module {parts[1]!r} has no {parts[2]!r}; {_known(module)}"
            ) from None
    match value:
        case WorkflowFunction():
            hive = value.home()
        case StepFunction() | StepMethod():
            raise ConfigurationError(
                f"{target} is a step, and steps are called by workflows; {_known(module)}"
            )
        case _:
            kind = type(value).__name__
            raise ConfigurationError(f"{target} is a {kind}, and no workflow; {_known(module)}")
    if not isinstance(hive, Hive):
        raise ConfigurationError(
            f"the Hive of {target} is gone; keep it in the module, as `hive = Hive(…)`"
        )
    return Found(value, hive)


def _is_graph(target: str) -> bool:
    """Return whether a target is a file that may have a task graph."""
    path = Path(target)
    return path.is_file() and path.suffix != ".py"


def _refuse(target: str) -> NoReturn:
    """Raise an error that says what is meant instead."""
    path = Path(target)
    if path.suffix == ".py" and path.exists():
        module = ".".join(path.with_suffix("").parts)
        name = module if re.fullmatch(rf"{_NAME}(?:\.{_NAME})*", module) else path.stem
        raise ConfigurationError(
            f"{target} is a file; a workflow of it is named by its module: {name}:WORKFLOW"
        )
    if path.exists():
        raise ConfigurationError(
            f"{target} is {'a folder' if path.is_dir() else 'no regular file'}, and no task graph; name"
            " a file, or a workflow as package.module:workflow"
        )
    similar = _similar_graphs(path)
    if similar or target.endswith(_GRAPH_SUFFIXES):
        hint = similar or "; 'maestro init' writes a task graph"
        raise ConfigurationError(f"there is no file {target!r}{hint}")
    if ":" not in target:
        raise ConfigurationError(
            f"{target!r} is no file, and names no workflow; name a task graph's file, or a workflow as"
            " package.module:workflow, such as shop.checkout:build"
        )
    raise ConfigurationError(
        f"{target!r} names no workflow; name one as package.module:workflow, such as"
        " shop.checkout:build"
    )


def _similar_graphs(path: Path) -> str:
    """Return the files beside it that may be meant, in words; nothing, if there is none."""
    if ":" in path.name:  # a workflow
        return ""
    try:
        names = sorted(each.name for each in path.parent.iterdir())
    except (OSError, ValueError):  # ValueError: a zero byte
        return ""
    stems = {name: name.rpartition(".")[0] for name in names if name.endswith(_GRAPH_SUFFIXES)}
    near = [name for name, stem in stems.items() if stem in (path.name, path.stem)]
    near = (near or get_close_matches(path.name, stems, n=_NAMED))[:_NAMED]
    return (
        f"; did you mean {' or '.join(str(path.with_name(each)) for each in near)}?" if near else ""
    )


def imported(name: str) -> ModuleType:
    """Import a module, as ``python -m`` finds it: also in the current folder."""
    if name.endswith(".py"):
        raise ConfigurationError(
            f"{name!r} is no module; that of the file is {name.removesuffix('.py')!r}"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name == missing or name.startswith(f"{missing}."):
            raise ConfigurationError(
                f"there is no module {name!r} in {here}, nor among the installed packages"
            ) from error
        raise _import_failed(name, error) from error
    except Exception as error:
        raise _import_failed(name, error) from error


def _import_failed(name: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"the module {name!r} cannot be imported: {plain_text(error)}; --debug shows where"
    )


def _known(module: ModuleType) -> str:
    """Return which workflows a module has, in words."""
    names = [name for name, each in vars(module).items() if isinstance(each, WorkflowFunction)]
    return f"its workflows are: {', '.join(names)}" if names else "it has no workflow"
