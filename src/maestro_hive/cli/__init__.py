"""The ``maestro`` command: parse, call one function of ``admin`` or ``hive.control``, print.

``app`` lists the verbs and ``command`` has what they share; the verbs are loaded when they are
used, so that ``maestro --version`` loads no database.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from maestro_hive.kernel import load_lazily

if TYPE_CHECKING:
    from maestro_hive.cli.app import cli as cli

__all__ = ["main"]

load_lazily(globals(), {"maestro_hive.cli.app": "cli"})


def main() -> None:
    """Run the command and exit with its code."""
    try:
        from maestro_hive.cli.app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        sys.stderr.write("maestro: interrupted\n")
        code = 130
    sys.exit(code)
