"""``maestro worker``, ``enqueue`` and ``queues``: runs without a caller."""

from __future__ import annotations

import asyncio
import re
import signal
from typing import TYPE_CHECKING, Any

import click

from maestro_hive.admin.queues import show_queues
from maestro_hive.cli import output
from maestro_hive.cli.command import INTERRUPTED, duration_or_none, verb
from maestro_hive.cli.running import MARK, TakesArguments, imported, use_folder_of
from maestro_hive.hive.accepting import Order, enqueue, new_dispatch
from maestro_hive.hive.hive import Hive
from maestro_hive.hive.runs import make_input, new_id
from maestro_hive.hive.typed_arguments import stored_argument
from maestro_hive.kernel import files
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.kernel.process import run_async
from maestro_hive.kernel.signals import stop_politely
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.plain import to_dict

if TYPE_CHECKING:
    from maestro_hive.admin.queues import LeftRuns, QueueView, WorkerView
    from maestro_hive.cli.command import Call
    from maestro_hive.hive.worker import Worker

_TARGET = re.compile(r"([^\W\d][\w.]*)(?::([^\W\d]\w*))?")
_BY_NAME = re.compile(r"([^\W\d]\w*)=(.*)", re.DOTALL)


# --- worker ---------------------------------------------------------------------------------------


@verb("worker", imports=True)
@click.argument("target", metavar="MODULE[:HIVE]")
@click.option("--queue", "queues", metavar="NAME", multiple=True, help="Only from this queue.")
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="How many runs at once.",
)
@click.option("--version", metavar="TEXT", help="The version of the code; runs may ask for one.")
@click.option("--adopt", is_flag=True, help="Also take runs that a person stopped.")
@click.option(
    "--grace",
    metavar="DURATION",
    type=duration_or_none,
    default="10s",
    show_default=True,
    help="How long it waits for its runs when it is stopped.",
)
def worker_command(
    call: Call,
    target: str,
    queues: tuple[str, ...],
    concurrency: int,
    version: str | None,
    grace: float,
    *,
    adopt: bool,
) -> int | None:
    """Execute enqueued runs with the workflows of a module.

    MODULE is imported, from the current folder too, and nothing else is. HIVE is its variable with the
    Hive, which has the state folder; without it, 'hive'. The worker takes runs that are due, and those
    whose process died, until it is stopped: at the first Ctrl+C or SIGTERM it takes nothing more, waits for its runs, and leaves
    the rest to the next worker. A second one ends it at once.

    Examples:
        maestro worker shop.service                         all queues, 50 runs at once
        maestro worker shop.service:hive --queue mail       only those of one queue
        maestro worker shop.service --version 2.1 -v        what it executes is logged
        maestro worker shop.service --adopt --grace 30s     also what was stopped by hand
    """
    hive = _find_hive(target)
    use_folder_of(call, hive)
    worker = hive.worker(
        list(queues) or None, concurrency, version=version, adopt=adopt, grace=grace
    )
    ended_by = run_async(_until_stopped(worker))
    return INTERRUPTED if ended_by is signal.SIGINT else None


async def _until_stopped(worker: Worker) -> signal.Signals | None:
    """Let a worker execute runs until a signal comes, and return that."""
    stop = stop_politely(steps_go_on=True)
    try:
        async with stop, worker:
            output.note(f"worker {worker.id} takes runs; Ctrl+C stops it")
            await asyncio.Event().wait()
    except asyncio.CancelledError:
        if stop.signal is None:
            raise
    return stop.signal


def _find_hive(target: str) -> Hive:
    parts = _TARGET.fullmatch(target)
    if parts is None:
        raise ConfigurationError(
            f"{target!r} names no Hive; name it as package.module or package.module:variable"
        )
    module, name = imported(parts[1]), parts[2] or "hive"
    found = getattr(module, name, None)
    if not isinstance(found, Hive):
        names = [name for name, each in vars(module).items() if isinstance(each, Hive)]
        known = f"its Hives are: {', '.join(names)}" if names else "it has no Hive"
        raise ConfigurationError(f"the module {parts[1]!r} has no Hive {name!r}; {known}")
    return found


# --- enqueue --------------------------------------------------------------------------------------


@verb("enqueue", cls=TakesArguments)
@click.argument("workflow", metavar="WORKFLOW")
@click.argument("words", metavar="[ARG]...", nargs=-1)
@click.option("--run-id", metavar="RUN", help="The run's id; the same one again is no other run.")
@click.option("--queue", metavar="NAME", default="default", show_default=True)
@click.option(
    "--priority",
    type=int,
    default=0,
    show_default=True,
    help="One more is worth a minute of waiting.",
)
@click.option(
    "--delay",
    metavar="DURATION",
    type=duration_or_none,
    default="0",
    help="Not before, as in 90, 10m or 2h.",
)
@click.option("--version", metavar="TEXT", help="Only by workers of this version.")
def enqueue_command(
    call: Call,
    workflow: str,
    words: tuple[str, ...],
    run_id: str | None,
    queue: str,
    priority: int,
    delay: float,
    version: str | None,
) -> None:
    """Record a run of a workflow, for any worker.

    WORKFLOW is a name: its code is needed where a worker executes it, and not here. Each ARG is JSON, or
    else text; NAME=VALUE gives a parameter by its name. The run is safe when the command has ended.
    A state folder that does not exist yet is made.

    Examples:
        maestro enqueue build feature=cart size=3             by name
        maestro enqueue build cart --run-id build-42          once, however often it is called
        maestro enqueue digest --queue mail --delay 2h        in two hours, from another queue
        maestro enqueue build '{"wide": 3}' --priority 5      an object, before others
    """
    dispatch = new_dispatch(queue, priority, delay, version)
    files.check_identifier(workflow, "workflow")
    name = run_id if run_id is not None else new_id(workflow)
    files.check_identifier(name, "run id")
    args, kwargs = _arguments([each.removeprefix(MARK) for each in words])
    given = make_input(workflow, args, kwargs)
    with call.writing(create=True) as store:
        known = store.run(name)
        enqueue(store, Order(name, given, dispatch))
    already = "" if known is None else f", which is there already ({known.status})"
    output.line(f"run {name} is enqueued{already}")


def _arguments(words: list[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for word in words:
        named = _BY_NAME.fullmatch(word)
        if named is None:
            args.append(_value(word, word))
        elif named[1] in kwargs:
            raise ConfigurationError(f"the parameter {named[1]!r} is given twice")
        else:
            kwargs[named[1]] = _value(named[1], named[2])
    return tuple(args), kwargs


def _value(name: str, text: str) -> Any:
    tree = stored_argument(f"the argument {name!r}", text, None, "")
    return codec.decode(codec.dump_canonical(tree), name)


# --- queues ---------------------------------------------------------------------------------------


@verb("queues", reads=True)
def queues_command(call: Call) -> None:
    """Show what waits in the queues, and the workers.

    Ready runs are taken as soon as a worker has room. Scheduled ones wait for a time, and held ones
    for an answer or a decision.

    Examples:
        maestro queues
        maestro queues --json     the same, for another program
    """
    with call.reading() as reader:
        found = show_queues(reader)
    if call.wants_json:
        call.print_json(
            queues=[to_dict(each) for each in found.queues],
            workers=[to_dict(each) for each in found.workers],
            left=[to_dict(each) for each in found.left],
        )
        return
    output.table(
        ["queue", "ready", "oldest", "active", "scheduled", "held"],
        [_queue_row(each) for each in found.queues],
        empty="no queue has unfinished runs",
    )
    output.table(
        ["worker", "process", "since", "takes", "at once", "version"],
        [_worker_row(each) for each in found.workers],
        empty="there is no worker: 'maestro worker MODULE' starts one",
    )
    for left in found.left:
        output.complain(_left_sentence(left))


def _queue_row(queue: QueueView) -> list[output.Cell]:
    return [
        queue.name,
        queue.ready,
        queue.oldest,
        queue.active,
        queue.scheduled,
        queue.held,
    ]


def _worker_row(worker: WorkerView) -> list[output.Cell]:
    return [
        worker.id,
        f"{worker.pid} on {worker.host}",
        worker.since,
        "all queues" if worker.queues is None else ", ".join(worker.queues),
        worker.concurrency,
        worker.version,
    ]


def _left_sentence(left: LeftRuns) -> str:
    runs = "1 run" if left.count == 1 else f"{left.count} runs"
    version = f", version {left.version}" if left.version is not None else ""
    return (
        f"no worker takes {runs} of the workflow {left.workflow!r} (queue {left.queue}{version});"
        " start one that has it"
    )
