"""All contenders, in the order in which they take their turns."""

from benchmarks.contender import Contender
from benchmarks.contenders import (
    executing,
    growth,
    history,
    imports,
    opening,
    peer_dbos,
    peer_langgraph,
    processes,
    raw,
    recording,
    resuming,
    retrying,
)

CONTENDERS: tuple[Contender, ...] = (
    *raw.CONTENDERS,
    *recording.CONTENDERS,
    *executing.CONTENDERS,
    *peer_dbos.CONTENDERS,
    *peer_langgraph.CONTENDERS,
    *resuming.CONTENDERS,
    *retrying.CONTENDERS,
    *processes.CONTENDERS,
    *history.CONTENDERS,
    *opening.CONTENDERS,
    *imports.CONTENDERS,
    *growth.CONTENDERS,
)

#: Measured in every round, whatever was asked for: the anchor of all ratios.
ANCHOR = "raw"
GROUPS = tuple(dict.fromkeys(each.group for each in CONTENDERS))


def find(name: str) -> Contender:
    """Return the contender of that name."""
    return next(each for each in CONTENDERS if each.name == name)
