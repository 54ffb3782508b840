"""Every module of the package, imported before a process forks others.

Packages load their modules when a name of theirs is used; without this, each forked process would
import them again, in more than 0.1 s of CPU time.
"""

from __future__ import annotations

import gc
from importlib import import_module
from pkgutil import walk_packages

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
