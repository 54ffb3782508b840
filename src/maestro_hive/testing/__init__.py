"""For your own tests: workflows in memory, time that skips, stand-ins for steps, crashes.

``use`` gives a ``Kit``, and so do the fixtures of the pytest plugin. ``MemoryStore`` keeps the same
contract as the store in a folder. Two that share their data behave like two processes on one folder,
and ``abandon`` does to one what ``kill -9`` does to a process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from maestro_hive.kernel import load_lazily

if TYPE_CHECKING:
    from maestro_hive.kernel.clock import ManualClock as ManualClock
    from maestro_hive.maestro.state.memory import MemoryStore as MemoryStore
    from maestro_hive.testing.bodies import Call as Call
    from maestro_hive.testing.bodies import StandIn as StandIn
    from maestro_hive.testing.crashes import CrashDifferenceError as CrashDifferenceError
    from maestro_hive.testing.crashes import CrashReport as CrashReport
    from maestro_hive.testing.kit import Kit as Kit
    from maestro_hive.testing.kit import crash_everywhere as crash_everywhere
    from maestro_hive.testing.kit import use as use
    from maestro_hive.testing.lives import UnansweredError as UnansweredError

# Loaded at first use: pytest imports this package, with the plugin, also where nothing uses it.
load_lazily(
    globals(),
    {
        "maestro_hive.kernel.clock": "ManualClock",
        "maestro_hive.maestro.state.memory": "MemoryStore",
        "maestro_hive.testing.bodies": "Call StandIn",
        "maestro_hive.testing.crashes": "CrashDifferenceError CrashReport",
        "maestro_hive.testing.kit": "Kit crash_everywhere use",
        "maestro_hive.testing.lives": "UnansweredError",
    },
)
