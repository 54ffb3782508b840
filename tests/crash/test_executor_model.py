"""Random sequences of bodies that fail, die and are stopped, beside a model: a few."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from faults.execution_machine import FolderExecutionMachine, MemoryExecutionMachine
from faults.model import run_machine

if TYPE_CHECKING:
    from faults.execution_machine import ExecutionMachine

EXAMPLES = {MemoryExecutionMachine: 25, FolderExecutionMachine: 5}


@pytest.mark.parametrize("machine", EXAMPLES)
def test_an_executor_does_what_its_model_does(machine: type[ExecutionMachine]) -> None:
    run_machine(machine, examples=EXAMPLES[machine], length=30, start=1, shrink=False)


def test_a_graceful_stop_is_not_fed_back_as_a_failure() -> None:
    machine = MemoryExecutionMachine()
    machine.execute(name="a", given=1, acts=["fail", "stop"])
    machine.execute(name="a", given=1, acts=["ok"])  # the model counts the sentences of feedback
    machine.teardown()
