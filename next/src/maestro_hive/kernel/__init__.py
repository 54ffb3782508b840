"""Errors, clocks, files, locks, threads, signals, logs and redaction, for every other package."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def load_lazily(namespace: dict[str, Any], homes: Mapping[str, str]) -> None:
    """Give a package the names that live in these modules, its ``__all__`` and its ``__dir__``.

    ``homes`` has the names in each module, separated by spaces. Type checkers do not read it: the
    package imports the same names under ``TYPE_CHECKING``, and a test compares the two.
    """
    package = namespace["__name__"]
    home_of = {name: module for module, names in homes.items() for name in names.split()}
    names = {*home_of, *namespace.get("__all__", ())}
    exported = sorted(names, key=lambda name: (not name.isupper(), name))  # constants first

    def load(name: str) -> object:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found: object = getattr(import_module(home_of[name]), name)
        namespace[name] = found
        return found

    namespace.update(__all__=exported, __getattr__=load, __dir__=lambda: exported)
