"""One package under two names: imported by either, it is the same, and so are its classes."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType


def share_package(alias: str, package: str) -> None:
    """Make a package that is being imported under another name the package itself.

    Otherwise its modules would be loaded twice, and an error raised by the one class would not be
    caught by the other. It holds for all modules in it, imported now or later.
    """
    sys.modules[alias] = import_module(package)
    if not any(isinstance(each, _Alias) and each.alias == alias for each in sys.meta_path):
        sys.meta_path.insert(0, _Alias(alias, package))


class _Alias:
    """Finds the modules of a package under its other name."""

    def __init__(self, alias: str, package: str) -> None:
        self.alias = alias
        self._package = package

    def find_spec(
        self, name: str, _path: object = None, _target: object = None
    ) -> ModuleSpec | None:
        """Return a spec of the module itself; None for other packages."""
        if not name.startswith(f"{self.alias}."):
            return None
        module = import_module(self._package + name.removeprefix(self.alias))
        return ModuleSpec(name, _Loaded(module))


class _Loaded(Loader):
    """Gives the import system a module that is loaded already, and leaves it as it is."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, _: ModuleSpec) -> ModuleType:
        """Return the module."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the spec, which the import system has replaced; execute nothing again."""
        module.__spec__ = self._spec
