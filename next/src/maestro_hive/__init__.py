"""Durable execution for teams of AI agents: a completed step never runs again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from maestro_hive.kernel import load_lazily

if TYPE_CHECKING:
    from maestro_hive.kernel.errors import MaestroError as MaestroError
    from maestro_hive.kernel.redaction import mark_secret as mark_secret

__version__ = "0.1.0"

__all__ = ["__version__"]

if __name__ != "maestro_hive":  # from the folder of the project, as ``src.maestro_hive``
    from maestro_hive.kernel.package_alias import share_package

    share_package(__name__, "maestro_hive")

# Loaded at first use, so that importing the package alone takes almost no time.
load_lazily(
    globals(),
    {
        "maestro_hive.kernel.errors": "MaestroError",
        "maestro_hive.kernel.redaction": "mark_secret",
    },
)
