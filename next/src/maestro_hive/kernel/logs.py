"""Loggers whose handlers may fail, and whose records have no secrets.

Logging never changes what is executed.
"""

from __future__ import annotations

import logging
import sys
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    LoggerAdapter = logging.LoggerAdapter[logging.Logger]
else:
    LoggerAdapter = logging.LoggerAdapter


class SafeLog(LoggerAdapter):
    """A logger that survives handlers and filters of the program that raise errors."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a record; print the traceback if that fails, as handlers of logging itself do."""
        if not self.isEnabledFor(level):
            return
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # not this method
        try:
            self.logger.log(level, msg, *args, **kwargs)
        except Exception:  # noqa: BLE001 - it is the program's, and can be any
            if logging.raiseExceptions and sys.stderr is not None:
                sys.stderr.write(_redact(traceback.format_exc()))


class RedactionFilter(logging.Filter):
    """Replaces secrets in the records of a logger: in the message, its arguments, the traceback.

    It refuses no record, and leaves one without secrets as it is. A record whose exception has
    secrets loses the exception, and has its traceback as text, which every formatter prints.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Redact a record."""
        _redact_message(record)
        if record.exc_info and record.exc_info[0] is not None:
            trace = logging.Formatter().formatException(record.exc_info)
            redacted = _redact(trace)
            if redacted != trace:
                record.exc_info, record.exc_text = None, redacted
        if record.stack_info:
            record.stack_info = _redact(record.stack_info)
        return True


def _redact_message(record: logging.LogRecord) -> None:
    try:
        message = record.getMessage()
    except Exception:  # noqa: BLE001 - of an argument; handlers report it, and print no message
        return
    redacted = _redact(message)
    if redacted != message:
        record.msg, record.args = redacted, ()


_FILTER = RedactionFilter()


def get_log(name: str) -> SafeLog:
    """Return the log of a module."""
    logger = logging.getLogger(name)
    logger.addFilter(_FILTER)  # once, however often it is added
    return SafeLog(logger)


def _redact(text: str) -> str:
    from maestro_hive.kernel.redaction import redact_text  # late: its patterns take time to import

    return redact_text(text)
