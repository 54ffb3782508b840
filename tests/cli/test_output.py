"""How times, sizes and foreign texts are shown."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
import pytest

from maestro_hive.cli import command, output

NOW = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    "seconds, shown",
    [
        (0, "0 s"),
        (59.4, "59 s"),
        (60, "1 min"),
        (99, "1 min 39 s"),
        (600, "10 min"),
        (3600, "1 h"),
        (7500, "2 h 5 min"),
        (86_400, "1 d"),
        (90_000, "1 d 1 h"),
        (30 * 86_400 + 5000, "30 d"),
    ],
)
def test_a_duration_is_shown_in_its_largest_units(seconds: float, shown: str) -> None:
    assert output.duration(seconds) == shown


@pytest.mark.parametrize(
    "seconds, shown",
    [(0.2, "now"), (5, "5 s ago"), (200, "3 min ago"), (7500, "2 h ago"), (-30, "in 30 s")],
)
def test_a_time_is_shown_as_how_long_ago_it_was(seconds: float, shown: str) -> None:
    assert output.ago(NOW - timedelta(seconds=seconds), NOW) == shown


@pytest.mark.parametrize(
    "count, shown",
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (4_242_000, "4.24 MB"), (82e9, "82.0 GB")],
)
def test_bytes_are_counted_in_thousands(count: int, shown: str) -> None:
    assert output.size(count) == shown


def test_one_thing_and_many_things() -> None:
    assert output.many(1, "run") == "1 run"
    assert output.many(1200, "run") == "1,200 runs"
    assert output.many(2, "copy", "copies") == "2 copies"


@pytest.mark.parametrize(
    "text",
    ["\x1b[31mred", "\x1b]0;title\x07", "over\rwritten", "\x9b2J", "\u202egnp.exe", "\x00", "\x7f"],
)
def test_a_text_cannot_control_a_terminal(text: str) -> None:
    shown = output.printable(text)
    assert shown.isprintable()
    assert "\\" in shown


def test_letters_of_all_scripts_line_ends_and_tabs_stay() -> None:
    assert output.printable("日本 é\n\tñ 🐝") == "日本 é\n\tñ 🐝"
    assert output.in_one_line("a\n\tb") == "a\\n\\tb"


@pytest.mark.parametrize(
    "typed, seconds",
    [("90", 90), ("1.5s", 1.5), ("10m", 600), ("10 min", 600), ("2h", 7200), ("30d", 2_592_000)],
)
def test_a_duration_is_read_with_and_without_a_unit(typed: str, seconds: float) -> None:
    assert command.duration(typed) == seconds


@pytest.mark.parametrize("typed", ["", "x", "-1", "0", "1y", "nan", "inf", "1e9", "9" * 12 + "w"])
def test_what_is_no_duration_is_refused(typed: str) -> None:
    with pytest.raises(click.BadParameter, match="no duration"):
        command.duration(typed)


@dataclass
class Point:
    x: int


def test_whatever_a_step_returned_has_a_form_in_json() -> None:
    value = {
        "when": NOW,
        "where": Path("/a"),
        "what": Point(1),
        "set": {1},
        "bytes": b"\xff",
        "never": float("nan"),
        (1, 2): "an odd key",
        "lambda": print,
    }
    read = json.loads(output.to_json(value))
    assert read["when"] == "2030-01-01T00:00:00+00:00"
    assert read["where"] == "/a"
    assert read["never"] == "nan"
    assert read["(1, 2)"] == "an odd key"
    assert "Point" in json.dumps(read["what"])
    assert "print" in read["lambda"]
