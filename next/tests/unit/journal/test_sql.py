"""The statements of a journal: texts that both databases read."""

from __future__ import annotations

import re

import pytest

from maestro_hive.journal import sql

STATEMENTS = {
    (dialect, name): text
    for dialect in sql.DIALECTS
    for name, text in sql.statements(dialect).items()
    if not text.startswith("AND ")  # a condition of another statement
}


@pytest.mark.parametrize("dialect, name", STATEMENTS)
def test_parameters_are_numbered_in_the_order_in_which_they_first_appear(
    dialect: str, name: str
) -> None:
    numbers = list(dict.fromkeys(map(int, re.findall(r"\$(\d+)", STATEMENTS[dialect, name]))))
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("dialect", sql.DIALECTS)
def test_an_append_of_rows_numbers_its_parameters_in_order(dialect: str) -> None:
    numbers = [int(each) for each in re.findall(r"\$(\d+)", sql.append(dialect, 3))]
    assert numbers == list(range(1, 16))
