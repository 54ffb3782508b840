"""Jira Server's markup: a text is displayed as it was written."""

from __future__ import annotations

import pytest

from maestro_hive.engine.tickets import wiki
from tests.tables import for_each

ESCAPED = [
    ("plain words, and a full stop.", "plain words, and a full stop."),
    ("my_function(a*b)", r"my\_function(a\*b)"),
    ("{code}[x|https://x]{code}", r"\{code\}\[x\|https://x\]\{code\}"),
    ("C:\\temp", "C:&#92;temp"),
    ("a\\\\b", "a&#92;&#92;b"),
    ("&lt;b&gt; & c", "&amp;lt;b&amp;gt; & c"),
    ("well-known -struck- -- ---", r"well-known \-struck\- \-\- \-\-\-"),
    ("h1. Title", "h1&#46; Title"),
    ("bq. said", "bq&#46; said"),
    ("# first", r"\# first"),
    ("issue #7", "issue #7"),
    ("why? what??", r"why? what\?\?"),
    ("!image.png! ^up^ ~down~ +in+", r"\!image.png\! \^up\^ \~down\~ \+in\+"),
    ("done :) (x) (!) (on)", r"done \:) \(x) \(\!) \(on)"),
]


@for_each("text, markup", ESCAPED)
def test_nothing_in_a_text_is_markup(text: str, markup: str) -> None:
    assert wiki.escaped(text) == markup


def test_lists_and_code_are_displayed_as_such() -> None:
    assert wiki.markup("a\nb\n- c\n- d\n```\nx {y}\n```") == (
        "a\nb\n\n* c\n* d\n\n{noformat}\nx {y}\n{noformat}"
    )


def test_code_that_would_end_its_block_is_escaped() -> None:
    assert wiki.markup("```\na {noformat} b\n```") == r"a \{noformat\} b"


@pytest.mark.parametrize("text", ["{" * 40_000, "x" * 40_000, "- *\n" * 30_000])
def test_markup_is_never_longer_than_jira_accepts(text: str) -> None:
    assert 20_000 < len(wiki.markup(text)) <= wiki.LIMIT
