"""All contenders, in the order in which they take their turns."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.contender import Contender

#: Modules of ``benchmarks.contenders``.
_MODULES = (
    "raw",
    "hive_steps",
    "with_dbos",
    "with_langgraph",
    "with_absurd",
    "with_burr",
    "hive_rows",
    "hive_resume",
    "hive_start",
    "hive_queue",
    "dbos_queue",
    "team",
    "recording",
    "executing",
    "peer_dbos",
    "peer_langgraph",
    "resuming",
    "retrying",
    "processes",
    "history",
    "opening",
    "imports",
    "growth",
)
#: Measured in every round, whatever was asked for: the anchor of all ratios.
ANCHOR = "raw"


class Registry:
    """The contenders that can be loaded, and why others cannot.

    Some modules import parts of the project that are not public. When those move, only the rows of
    that module are missing.
    """

    def __init__(self) -> None:
        self.contenders: list[Contender] = []
        self.broken: dict[str, str] = {}
        self._modules: dict[str, str] = {}
        for module in _MODULES:
            try:
                found = load(module)
            except ImportError as error:
                self.broken[module] = str(error)
                continue
            self.contenders += found
            self._modules |= {each.name: module for each in found}

    @property
    def groups(self) -> list[str]:
        """The groups that can be asked for."""
        return list(dict.fromkeys(each.group for each in self.contenders))

    def module_of(self, name: str) -> str:
        """Return the module that a contender is in."""
        return self._modules[name]


def load(module: str) -> tuple[Contender, ...]:
    """Return the contenders of one module."""
    loaded = importlib.import_module(f"benchmarks.contenders.{module}")
    found: tuple[Contender, ...] = loaded.CONTENDERS
    return found
