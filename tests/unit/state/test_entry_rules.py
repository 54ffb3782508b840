"""The rules for entries of a copy are complete."""

from __future__ import annotations

from maestro_hive.engine.results import ExecutionStatus
from maestro_hive.maestro.state.entry_rules import RULES, STATUSES
from maestro_hive.maestro.state.records import EntryKind


def test_every_kind_has_a_rule() -> None:
    assert set(RULES) == set(EntryKind)


def test_the_statuses_are_those_of_executions() -> None:
    assert set(STATUSES) == {each.value for each in ExecutionStatus}
