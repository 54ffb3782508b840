"""Logs: no secret leaves through them, and no handler that fails changes what is executed."""

from __future__ import annotations

import io
import logging
from typing import TYPE_CHECKING

import pytest

from maestro_hive.kernel.logs import get_log
from tests.planted_secrets import SHAPED

if TYPE_CHECKING:
    from collections.abc import Iterator

SECRET = SHAPED["github"]
LOG = get_log("maestro_hive.tests")


@pytest.fixture
def printed() -> Iterator[io.StringIO]:
    printed = io.StringIO()
    handler = logging.StreamHandler(printed)
    LOG.logger.addHandler(handler)
    yield printed
    LOG.logger.removeHandler(handler)


def test_a_message_its_arguments_and_its_traceback_have_no_secrets(printed: io.StringIO) -> None:
    LOG.warning("the key is %s", SECRET)
    try:
        int(SECRET)
    except ValueError:
        LOG.exception("it failed", stack_info=True)
    text = printed.getvalue()
    assert SECRET not in text
    assert "the key is [redacted]" in text
    assert "ValueError: invalid literal for int() with base 10: '[redacted]'" in text
    assert "Stack (most recent call last)" in text


def test_a_record_without_secrets_is_left_as_it_is(printed: io.StringIO) -> None:
    LOG.warning("%d of %d", 1, 2)
    assert printed.getvalue() == "1 of 2\n"


def test_a_record_names_the_line_that_logged_it(caplog: pytest.LogCaptureFixture) -> None:
    LOG.warning("here")
    assert [record.filename for record in caplog.records] == ["test_logs.py"]


class Broken(logging.Handler):
    """A handler of a program that fails."""

    def emit(self, record: logging.LogRecord) -> None:
        raise OSError(f"the log server refused {SECRET}")


def test_a_handler_that_fails_is_reported_and_the_caller_continues(
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = Broken()
    LOG.logger.addHandler(broken)
    try:
        LOG.warning("one")
    finally:
        LOG.logger.removeHandler(broken)
    shown = capsys.readouterr().err
    assert "the log server refused [redacted]" in shown
    assert SECRET not in shown


def test_arguments_that_do_not_fit_their_message_are_reported_by_logging(
    printed: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    LOG.warning("%d", "no number")
    assert printed.getvalue() == ""
    assert "Logging error" in capsys.readouterr().err
