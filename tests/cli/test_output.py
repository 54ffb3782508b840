"""How times, sizes and foreign texts are shown."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
import pytest

from maestro_hive import mark_secret
from maestro_hive.cli import command, output
from tests.tables import for_each

NOW = datetime(2030, 1, 1, tzinfo=UTC)


@for_each(
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


@for_each(
    "seconds, shown",
    [(0.2, "now"), (5, "5 s ago"), (200, "3 min ago"), (7500, "2 h ago"), (-30, "in 30 s")],
)
def test_a_time_is_shown_as_how_long_ago_it_was(seconds: float, shown: str) -> None:
    assert output.ago(NOW - timedelta(seconds=seconds), NOW) == shown


@for_each(
    "count, shown",
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (4_242_000, "4.24 MB"), (82e9, "82.0 GB")],
)
def test_bytes_are_counted_in_thousands(count: int, shown: str) -> None:
    assert output.size(count) == shown


def test_one_thing_and_many_things() -> None:
    assert output.many(1, "run") == "1 run"
    assert output.many(1200, "run") == "1,200 runs"
    assert output.many(2, "copy", "copies") == "2 copies"


@for_each(
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


@for_each(
    "typed, seconds",
    [("90", 90), ("1.5s", 1.5), ("10m", 600), ("10 min", 600), ("2h", 7200), ("30d", 2_592_000)],
)
def test_a_duration_is_read_with_and_without_a_unit(typed: str, seconds: float) -> None:
    assert command.duration(typed) == seconds


@for_each("typed", ["", "x", "-1", "0", "1y", "nan", "inf", "1e9", "9" * 12 + "w"])
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


def test_a_secret_in_one_cell_of_a_long_table_is_replaced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looked_at: list[str] = []
    redact = output.redacted

    def counted(text: str) -> str:
        looked_at.append(text)
        return redact(text)

    monkeypatch.setattr(output, "redacted", counted)
    rows: list[list[output.Cell]] = [[number, f"task {number}", None] for number in range(200)]
    output.table(["number", "title", "because"], rows)
    assert len(looked_at) == 1  # all of it at once
    mark_secret("correct-horse-battery-7")
    rows[100][2] = "it printed correct-horse-battery-7, and ended"
    output.table(["number", "title", "because"], rows)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 400
    assert lines[100] == "100\ttask 100\t"
    assert lines[300] == "100\ttask 100\tit printed [redacted], and ended"
