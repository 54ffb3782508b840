"""Makes a program that shows a difference smaller, for some seconds."""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING

from faults.twin.comparison import compare
from faults.twin.programs import can_end, inner_blocks, size

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from faults.twin.comparison import Report
    from faults.twin.processes import Processes
    from faults.twin.programs import Block, Node

#: Each candidate is run so often: a kill does not land at the same moment twice.
_RUNS = 2


def reduced(report: Report, folder: Path, processes: Processes, seconds: float) -> Report:
    """Return the report of the smallest program found that shows one of the same differences."""
    deadline = time.monotonic() + seconds
    best = report
    while time.monotonic() < deadline:
        smaller = _smaller(best, folder, processes, deadline)
        if smaller is None:
            break
        best = smaller
    return best


def _smaller(best: Report, folder: Path, processes: Processes, deadline: float) -> Report | None:
    """Return the report of the first smaller program that differs as well."""
    for spec in filter(can_end, candidates(best.spec)):
        for _ in range(_RUNS):
            if time.monotonic() > deadline:
                return None
            found = compare(spec, folder, processes, best.kind)
            if found.categories & best.categories:
                return found
    return None


def candidates(spec: Node) -> Iterator[Node]:
    """Yield programs that are smaller, those that are much smaller first."""
    for number in range(len(_blocks(spec))):
        for at in range(len(_blocks(spec)[number])):
            yield from _without(spec, number, at)
    for number in range(len(spec["stops"]) if len(spec["stops"]) > 1 else 0):
        made = copy.deepcopy(spec)
        del made["stops"][number]
        yield made
    if spec["input"] != "number":
        yield {**copy.deepcopy(spec), "input": "number"}


def _without(spec: Node, number: int, at: int) -> Iterator[Node]:
    """Yield a program without a node, with one of its blocks instead, or with fewer branches."""
    made = copy.deepcopy(spec)
    nodes = _blocks(made)[number]
    each = nodes.pop(at)
    if made["main"]:
        yield made
    for block in inner_blocks(each):
        made = copy.deepcopy(spec)
        _blocks(made)[number][at : at + 1] = copy.deepcopy(block)
        if size(made) < size(spec):
            yield made
    for branch in range(len(each.get("branches", ())) if len(each.get("branches", ())) > 2 else 0):
        made = copy.deepcopy(spec)
        del _blocks(made)[number][at]["branches"][branch]
        yield made


def _blocks(spec: Node) -> list[Block]:
    """Return all blocks of a program, the outer ones first."""
    found: list[Block] = [spec["main"], *spec["children"]]
    for block in found:
        for each in block:
            found.extend(inner_blocks(each))
    return found
