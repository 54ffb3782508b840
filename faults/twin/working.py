"""One life of a run that is enqueued: a worker, which releases it from memory whenever it only waits."""

from __future__ import annotations

import importlib
import json
import os
from typing import TYPE_CHECKING, Any

from faults.child_processes import RUN
from faults.twin import program
from faults.twin.values import KINDS, show, show_error
from maestro_hive import Hive, MaestroError
from maestro_hive.hive import RunCancelledError
from maestro_hive.kernel.signals import until_signal

if TYPE_CHECKING:
    from pathlib import Path

    from faults.child_processes import ObservedRun, Workflow
    from faults.twin.programs import Node

#: How long a run may wait in memory: less than it sleeps, and than its questions take.
_RELEASE_SECONDS = 0.01
#: How many times longer sleeps are than those of the undisturbed run, and seconds to an answer.
SLOWNESS = 6.0
ANSWER_SECONDS = 0.12


def enqueue(folder: Path, spec: Node) -> None:
    """Enqueue the run of a program, from a process without its code."""
    with Hive(folder / "state", program.config()) as hive:
        hive.enqueue("main", KINDS[spec["input"]](7), run_id=RUN)


async def work(observed: ObservedRun) -> int:
    """Be a worker until the run has ended, and write what came of it; return the exit code."""
    program.sabotage(os.environ.get(program.SABOTAGE, ""))
    folder, options = observed.folder, observed.options
    ledger = program.Ledger(folder, options)
    spec = json.loads((folder / "spec.json").read_text())
    _note_releases(ledger)
    with Hive(folder / "state", program.config()) as hive:
        program.Interpreter(hive, spec, ledger, options)
        try:
            shown = f"returned {show(await until_signal(_result(hive), 'stopped'))}"
        except (SystemExit, KeyboardInterrupt) as stop:
            return 130 if isinstance(stop, KeyboardInterrupt) else int(str(stop.code))
        except RunCancelledError:
            shown = "cancelled"
        except MaestroError as error:
            shown = show_error(error)
        ledger.write("result", "run", shown=shown)
    return 0


async def _result(hive: Hive) -> Any:
    async with hive.worker(grace=0.0, release_after=_RELEASE_SECONDS):
        return await hive.handle(RUN).result()


def _note_releases(ledger: program.Ledger) -> None:
    """Write when a run is released, before its workflow notices."""
    modules = [
        importlib.import_module(f"maestro_hive.hive.{name}") for name in ("release", "worker")
    ]
    release = modules[0].release

    def noted(run: Any) -> None:
        if run.run_id == RUN and not run.is_suspended:
            ledger.release()
        release(run)

    for module in modules:
        module.release = noted  # type: ignore[attr-defined]


WORKFLOWS: dict[str, Workflow] = {**program.WORKFLOWS, "work": work}
