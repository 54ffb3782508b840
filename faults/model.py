"""Row 13: random sequences of operations on a store or an executor, with crashes, against a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from faults.execution_machine import FolderExecutionMachine, MemoryExecutionMachine
from faults.registry import Outcome, Plan, row
from faults.store_machine import FolderMachine, MemoryMachine, StoreMachine

if TYPE_CHECKING:
    from typing import Any

    from faults.execution_machine import ExecutionMachine


@row(13, "the model holds", "≥ 2,000 x 50 steps")
def model(plan: Plan, outcome: Outcome) -> None:
    """Run the machines, each over both stores."""
    length = plan.amount(quick=30, full=50)
    machines: tuple[tuple[type[StoreMachine | ExecutionMachine], int], ...] = (
        (FolderMachine, plan.amount(quick=60, full=2300)),
        (MemoryMachine, plan.amount(quick=60, full=2300)),
        (MemoryExecutionMachine, plan.amount(quick=100, full=2300)),
        (FolderExecutionMachine, plan.amount(quick=20, full=400)),
    )
    for machine, examples in machines:
        plan.show(f"{machine.__name__}: {examples} x {length} steps")
        machine.done = 0
        try:
            run_machine(machine, examples, length, plan.seed)
        except Exception as error:  # noqa: BLE001 - Hypothesis raises the store's error
            outcome.fail(f"{machine.__name__}: {type(error).__name__}: {error}\n{_notes(error)}")
        outcome.ran.append(f"{machine.__name__}: {examples:,} x {length} steps at most")
        outcome.measured.append(f"{machine.done:,} steps done")


def run_machine(
    machine: type[StoreMachine | ExecutionMachine],
    examples: int,
    length: int,
    start: int,
    *,
    shrink: bool = True,
) -> None:
    """Run a machine with Hypothesis; raise its failure, with the steps that lead to it.

    ``shrink`` searches for the fewest such steps, which can take minutes.
    """
    chosen = settings(
        max_examples=examples,
        stateful_step_count=length,
        deadline=None,
        database=None,
        phases=(Phase.generate, *([Phase.shrink] if shrink else [])),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )

    @seed(start)
    class Seeded(machine):  # type: ignore[misc,valid-type]
        pass

    Seeded.counter = machine
    run_state_machine_as_test(Seeded, settings=chosen)


def _notes(error: BaseException) -> str:
    notes: list[Any] = getattr(error, "__notes__", [])
    return "\n".join(str(note) for note in notes)[-3000:]
