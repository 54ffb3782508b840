"""Processes forked from one that has imported every module of the package, and their end.

Packages load their modules when a name of theirs is used; without this, each forked process would
import them again, in more than 0.1 s of CPU time, and free them at its end, in 0.05 s.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from importlib import import_module
from pkgutil import walk_packages
from typing import NoReturn

import maestro_hive

#: Only programs import these: they are for pytest, or have effects.
_NOT_IMPORTED = ("maestro_hive.__main__", "maestro_hive.testing")

#: These are imported when a function needs them first.
_IMPORTED_LATE = (
    "apsw.sqlite_extra",
    "concurrent.futures.thread",
    "importlib.metadata",
    "importlib.readers",
)


def import_all() -> None:
    """Import every module that a program of the tests may use, before the process forks."""
    for module in walk_packages(maestro_hive.__path__, f"{maestro_hive.__name__}."):
        if not module.name.startswith(_NOT_IMPORTED):
            import_module(module.name)
    for name in _IMPORTED_LATE:
        import_module(name)
    gc.freeze()  # so that a collection does not copy what the processes share


def end_forked(code: int) -> NoReturn:
    """End as Python does: threads are joined, exit handlers called; but no memory is freed."""
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - as Python calls it
    atexit._run_exitfuncs()  # noqa: SLF001
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):  # it has none, or nobody reads them
        sys.exit(code)
    os._exit(code)
