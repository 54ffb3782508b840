"""Random sequences of all that a store can do, crashes among them, beside a model: a few."""

from __future__ import annotations

import pytest

from faults.model import run_machine
from faults.store_machine import FolderMachine, MemoryMachine, StoreMachine


@pytest.mark.parametrize("machine", [FolderMachine, MemoryMachine])
def test_a_store_does_what_its_model_does(machine: type[StoreMachine]) -> None:
    run_machine(machine, examples=15, length=30, start=1)
