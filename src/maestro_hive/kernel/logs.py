"""Loggers whose handlers may fail: what is logged never changes what is executed."""

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
    """A logger that goes on when a handler or a filter of the program raises an error."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a record; print the traceback if that fails, as handlers of logging itself do."""
        if not self.isEnabledFor(level):
            return
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # not this method
        try:
            self.logger.log(level, msg, *args, **kwargs)
        except Exception:  # noqa: BLE001 - it is the program's, and can be any
            if logging.raiseExceptions and sys.stderr is not None:
                traceback.print_exc()


def get_log(name: str) -> SafeLog:
    """Return the log of a module."""
    return SafeLog(logging.getLogger(name))
