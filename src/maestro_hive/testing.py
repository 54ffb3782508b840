"""For your own tests: time that you move by hand, and a journal that leaves nothing behind.

``MemoryStore`` keeps the same contract as the store in a folder. Two that share their data behave
like two processes on one folder, and ``abandon`` does to one what ``kill -9`` does to a process.
"""

from maestro_hive.kernel.clock import ManualClock
from maestro_hive.maestro.state.memory import MemoryStore

__all__ = ["ManualClock", "MemoryStore"]
