"""Replaces ``time.sleep``, which fails under libfaketime 0.9.10.

Python sleeps until a time of the clock since boot, from which libfaketime subtracts the faked time.
"""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import SupportsIndex


def _sleep(seconds: float | SupportsIndex, /) -> None:
    select.select([], [], [], float(seconds))


time.sleep = _sleep
