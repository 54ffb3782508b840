"""A table of cases fails with each of its cases that fails, and names it."""

from __future__ import annotations

import inspect

import pytest

from tests.tables import for_each


def test_every_case_that_fails_is_reported_by_name() -> None:
    seen = []

    @for_each("one, two", [(1, 1), (1, 2), (3, 3), (0, 4)], ids=lambda value: f"<{value}>")
    def table(kept: str, one: int, two: int) -> None:
        seen.append((kept, one, two))
        with pytest.raises(ZeroDivisionError):
            one / (one - two)
        assert one

    assert list(inspect.signature(table).parameters) == ["kept"]
    with pytest.raises(BaseExceptionGroup, match="2 of 4 cases failed") as caught:
        table(kept="k")
    assert seen == [("k", 1, 1), ("k", 1, 2), ("k", 3, 3), ("k", 0, 4)]
    assert [each.__notes__ for each in caught.value.exceptions] == [
        ["in the case <1>, <2>"],
        ["in the case <0>, <4>"],
    ]


def test_a_table_has_cases() -> None:
    with pytest.raises(AssertionError, match="tests nothing"):
        for_each("one", [])
