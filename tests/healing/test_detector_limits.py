"""Reports and logs that no tool would write: they are read as far as they can be."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from maestro_hive.engine.healing.detector import FailureDetector

if TYPE_CHECKING:
    from pathlib import Path


def test_a_report_whose_error_lines_are_empty_is_a_failure_all_the_same(tmp_path: Path) -> None:
    call = {"outcome": "failed", "longrepr": "E  \nE   "}
    report = {"tests": [{"nodeid": "a.py::test_x", "call": call}]}
    (tmp_path / "report.json").write_text(json.dumps(report))
    detector = FailureDetector(tmp_path)
    detector.scan_pytest_json(tmp_path / "report.json")
    assert len(detector.failures) == 1


def test_a_line_number_of_thousands_of_digits_is_none(tmp_path: Path) -> None:
    lines = [
        "Traceback (most recent call last):",
        f'  File "a.py", line {"9" * 5000}, in f',
        "ValueError: no",
    ]
    (tmp_path / "app.log").write_text("\n".join(lines))
    detector = FailureDetector(tmp_path)
    detector.scan_logs(tmp_path / "app.log")
    assert [each.line_number for each in detector.failures] == [None]
