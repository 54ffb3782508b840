"""Names that become file names: plain ones pass, and nothing else does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maestro_hive.kernel import files
from maestro_hive.kernel.errors import InvalidIdentifierError
from tests.tables import for_each

HOSTILE_NAMES = [
    # Ways out of the folder.
    "..", "../x", "../../etc/passwd", "..\\x", "a/../b", "a/..", "./a", "a/.", "a/./b", "../",
    "..a/../b", "....//x", "..;/x", "..%2fx", "%2e%2e%2fx", "%2e%2e", "..%00", "..%c0%afx",
    "a/b", "a//b", "a/", "a\\b", "\\\\host\\share", "C:\\x", "file:///etc/passwd", "a:b/c",
    # Absolute.
    "/", "//", "/a", "/etc/passwd", "/dev/null", "/proc/self/mem", "//etc", "~", "~/x", "~root",
    # The folder itself, hidden names, options.
    "", ".", "...", ". .", ".a", ".hidden", ".git", ".tmp", "-", "-rf", "--help", "_", "_a", ":a",
    # White space and line ends.
    " ", "  ", " a", "a ", "a b", "\t", "\n", "\r", "a\n", "a\r", "a\r\n", "\na", "a\nb", "a\tb",
    "a\x0b", "a\x0c", "a\x1c", "a\x85", "a\u2028", "a\u2029", "a\u00a0b", "a\u3000", "a\u200b",
    # Control characters.
    "\0", "a\0", "\0a", "a\0b", "a\x01", "a\x1b[31m", "a\x7f", "a\x80", "a\x9b", "a\x08",
    # Shells, patterns, markup.
    "*", "a*", "a?", "[a]", "{a,b}", "$HOME", "${x}", "$(id)", "`id`", "a;b", "a|b", "a&b", "a>b",
    "a<b", "a'b", 'a"b', "a!b", "a#b", "a%b", "a^b", "a=b", "a+b", "a,b", "a@b", "(a)", "<b>",
    # Twins: they look like letters, digits, dots and slashes, or become them when normalised.
    "\u0430bc", "a\u0441", "\u03b1", "\uff41", "\uff0e\uff0e", "a\uff0fb", "\u2024\u2024", "\u2025",
    "\u2026", "a\u2044b", "a\u2215b", "a\u29f8b", "\uff11", "\u0661", "a\u0663", "\u00b2", "\u2160",
    "\u0131", "\u017f", "\u212a", "\u00e9", "e\u0301", "a\u0300", "\u00df", "\ufb01", "a\u2010b",
    "a\u2013b", "a\u2212b", "a\ufe63b", "a\uff0db", "a\uff3fb", "a\u02d0b", "a\ua789b", "a\uff1ab",
    # What cannot be seen, or turns the text around.
    "\ufeffa", "a\u200d", "a\u200e", "a\u202eb", "a\u2066b", "a\u00ad", "a\ufe0f", "\U0001f600",
    "a\U000e0041",
    # What is no text at all.
    "\ud800", "a\udc80", "\udcff", "\ud83d\ude00", "a\udfff",
    # Too long.
    "a" * 129, "a" * 255, "a" * 4096, "../" * 1365, "\u00e9" * 128, "a" * 128 + "\n",
]  # fmt: skip

NOT_NAMES: list[object] = [
    None, True, False, 0, 1, -1, 1.5, float("nan"), b"a", bytearray(b"a"), b"../x", Path("a"),
    ["a"], ("a",), {"a"}, {"a": 1}, object(), str, Exception("a"), range(1), memoryview(b"a"),
]  # fmt: skip


def test_there_are_more_than_a_hundred_hostile_names_and_no_two_are_equal() -> None:
    assert len(set(HOSTILE_NAMES)) == len(HOSTILE_NAMES) > 150


@for_each("name", HOSTILE_NAMES, ids=lambda name: ascii(name)[:24])
def test_a_hostile_name_is_refused_by_a_text_that_can_be_printed_and_is_short(name: str) -> None:
    with pytest.raises(InvalidIdentifierError) as caught:
        files.check_identifier(name, "workflow id")
    assert caught.value.value == name
    assert caught.value.what == "workflow id"
    shown = str(caught.value)
    assert shown.isprintable()
    assert len(shown.encode()) < 500
    assert shown.startswith("workflow id ")


@for_each("value", NOT_NAMES, ids=lambda value: type(value).__name__)
def test_what_is_not_a_text_is_refused_with_its_type(value: Any) -> None:
    with pytest.raises(InvalidIdentifierError, match=f"is a {type(value).__name__}, not a string"):
        files.check_identifier(value, "workflow id")


@for_each("name", ["a", "A", "7", "wf_1", "a.b", "a..b", "a:b", "a-", "a.", "0" * 128, "Z._:-z"])
def test_an_ordinary_name_is_returned_as_it_is(name: str) -> None:
    assert files.check_identifier(name, "workflow id") is name


@given(st.text())
def test_whatever_is_accepted_is_one_plain_file_name(text: str) -> None:
    try:
        files.check_identifier(text, "name")
    except InvalidIdentifierError:
        return
    assert text.isascii()
    assert os.path.normpath(text) == os.path.split(text)[1] == text
    assert not text.startswith((".", "-"))
    assert len(os.fsencode(text)) <= 128
