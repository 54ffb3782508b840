"""A graph as a picture (SVG): levels from left to right, the critical path and conflicts marked."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from maestro_hive.team.graph.planning import Plan
    from maestro_hive.team.graph.records import Level, Task

#: A picture with more tasks than these is of no use.
MAX_DRAWN = 1000

_WIDE, _HIGH = 190, 46
_GAP_X, _GAP_Y = 64, 18
_LEFT, _TOP = 28, 124
_TITLE_LENGTH = 25
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_STYLE = """\
text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2937 }
.heading { font-size: 18px; font-weight: 600 }
.note { font-size: 12px; fill: #6b7280 }
.level { font-weight: 600 }
.id { font-weight: 600; font-size: 12px }
.title { font-size: 12px; fill: #374151 }
.band { fill: #f3f4f6 }
.task { fill: #ffffff; stroke: #9ca3af }
.task.critical { stroke: #c2410c; stroke-width: 2 }
.edge { fill: none; stroke: #9ca3af; stroke-width: 1.4 }
.edge.critical { stroke: #c2410c; stroke-width: 2.2 }
.conflict { fill: none; stroke: #7c3aed; stroke-width: 1.4; stroke-dasharray: 5 4 }
.gate { stroke: #15803d; stroke-width: 3 }
.gate-name { font-size: 12px; fill: #15803d }"""


class _Box(NamedTuple):
    """Where a task is drawn."""

    x: int
    y: int


def draw(plan: Plan) -> str:
    """Return the picture of a graph with at most ``MAX_DRAWN`` tasks."""
    columns = _columns(plan)
    boxes = _boxes(columns)
    tallest = max((len(tasks) for _, tasks in columns), default=1)
    width = _LEFT * 2 + len(columns) * (_WIDE + _GAP_X) - _GAP_X
    height = _TOP + tallest * (_HIGH + _GAP_Y) + 40
    size = f'width="{max(width, 560)}" height="{height}" viewBox="0 0 {max(width, 560)} {height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{_text(plan.graph.feature, 200)}</title>",
            f"<style>\n{_STYLE}\n</style>",
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            f'<text class="heading" x="{_LEFT}" y="34">{_text(plan.graph.feature, 80)}</text>',
            f'<text class="note" x="{_LEFT}" y="56">{_summary(plan)}</text>',
            *_levels(plan, columns, height),
            *_edges(plan, boxes),
            *_tasks(plan, boxes),
            *_legend(plan, height),
            "</svg>\n",
        ]
    )


def _summary(plan: Plan) -> str:
    tasks, levels = len(plan.graph.tasks), len(plan.graph.levels)
    return (
        f"{tasks} {'task' if tasks == 1 else 'tasks'} in {levels}"
        f" {'level' if levels == 1 else 'levels'}, critical path {plan.critical_minutes:g} min"
    )


def _columns(plan: Plan) -> list[tuple[Level, list[int]]]:
    """Return the tasks of each column; a level has a column for each step of its own chains."""
    tasks = plan.graph.tasks
    depth = [0] * len(tasks)
    for at in plan.order:
        depth[at] = max(
            (depth[each] + 1 for each in plan.before[at] if tasks[each].level == tasks[at].level),
            default=0,
        )
    found: dict[tuple[int, int], list[int]] = {}
    for at, task in enumerate(tasks):
        found.setdefault((task.level, depth[at]), []).append(at)
    levels = {level.number: level for level in plan.graph.levels}
    row: dict[int, float] = {}
    columns = []
    for key in sorted(found):
        # Next to what they wait for: fewer edges cross.
        ordered = sorted(found[key], key=lambda at: (_middle(plan, at, row), at))
        row |= {at: number for number, at in enumerate(ordered)}
        columns.append((levels[key[0]], ordered))
    return columns


def _middle(plan: Plan, at: int, row: dict[int, float]) -> float:
    rows = [row[each] for each in plan.before[at] if each in row]
    return sum(rows) / len(rows) if rows else 0.0


def _boxes(columns: list[tuple[Level, list[int]]]) -> dict[int, _Box]:
    return {
        at: _Box(_LEFT + column * (_WIDE + _GAP_X), _TOP + row * (_HIGH + _GAP_Y))
        for column, (_, tasks) in enumerate(columns)
        for row, at in enumerate(tasks)
    }


def _levels(plan: Plan, columns: list[tuple[Level, list[int]]], height: int) -> Iterator[str]:
    """Yield the bands of the levels, with their names and gates."""
    numbers = [level.number for level, _ in columns]
    for level in plan.graph.levels:
        if level.number not in numbers:
            continue
        first, count = numbers.index(level.number), numbers.count(level.number)
        x = _LEFT + first * (_WIDE + _GAP_X) - 14
        wide = count * (_WIDE + _GAP_X) - _GAP_X + 28
        yield f'<rect class="band" x="{x}" y="70" width="{wide}" height="{height - 108}" rx="8"/>'
        name = (
            f"{level.number}"
            if level.name == f"level {level.number}"
            else (f"{level.number}: {level.name}")
        )
        yield f'<text class="level" x="{x + 14}" y="92">Level {_text(name, 22 * count)}</text>'
        if level.gates:
            gates = ", ".join(gate.name for gate in level.gates)
            line = x + wide
            yield f'<line class="gate" x1="{line}" y1="74" x2="{line}" y2="{height - 42}"/>'
            yield (
                f'<text class="gate-name" x="{line - 8}" y="112" text-anchor="end">'
                f"gate: {_text(gates, 22 * count)}</text>"
            )


def _edges(plan: Plan, boxes: dict[int, _Box]) -> Iterator[str]:
    """Yield the lines between tasks; those of the critical path last, above the others."""
    critical = set(zip(plan.critical_path, plan.critical_path[1:], strict=False))
    above: list[str] = []
    for at, waits_for in enumerate(plan.before):
        dependencies = set(plan.dependencies[at])
        for each in waits_for:
            style = "edge" if each in dependencies else "conflict"
            if (plan.ids[each], plan.ids[at]) in critical:
                above.append(_edge(boxes[each], boxes[at], f"{style} critical"))
            else:
                yield _edge(boxes[each], boxes[at], style)
    yield from above


def _edge(start: _Box, end: _Box, style: str) -> str:
    x1, y1 = start.x + _WIDE, start.y + _HIGH // 2
    x2, y2 = end.x, end.y + _HIGH // 2
    bend = max(28, abs(x2 - x1) // 2) if x2 > x1 else 90
    return f'<path class="{style}" d="M{x1} {y1} C{x1 + bend} {y1} {x2 - bend} {y2} {x2} {y2}"/>'


def _tasks(plan: Plan, boxes: dict[int, _Box]) -> Iterator[str]:
    critical = set(plan.critical_path)
    for at, task in enumerate(plan.graph.tasks):
        x, y = boxes[at]
        style = "task critical" if task.id in critical else "task"
        yield f"<g><title>{_text(_details(task), 600)}</title>"
        yield f'<rect class="{style}" x="{x}" y="{y}" width="{_WIDE}" height="{_HIGH}" rx="6"/>'
        yield f'<text class="id" x="{x + 10}" y="{y + 19}">{_text(task.id, 20)}</text>'
        yield (
            f'<text class="note" x="{x + _WIDE - 10}" y="{y + 19}" text-anchor="end">'
            f"{plan.minutes[at]:g} min</text>"
        )
        yield f'<text class="title" x="{x + 10}" y="{y + 36}">{_text(task.title, _TITLE_LENGTH)}</text>'
        yield "</g>"


def _details(task: Task) -> str:
    return "\n".join([f"{task.id}: {task.title}", *task.files.owned[:20]])


def _legend(plan: Plan, height: int) -> Iterator[str]:
    entries = [("edge critical", "critical path"), ("edge", "dependency")]
    if plan.conflicts:
        entries.append(("conflict", "conflict: one after the other"))
    x, y = _LEFT, height - 18
    for style, name in entries:
        yield f'<path class="{style}" d="M{x} {y - 4} H{x + 34}"/>'
        yield f'<text class="note" x="{x + 42}" y="{y}">{name}</text>'
        x += 60 + 7 * len(name)


def _text(text: str, most: int) -> str:
    """Return a text for XML: whatever stands in it, it is only a text."""
    short = text if len(text) <= most else f"{text[: most - 1]}…"
    return escape(_NOT_IN_XML.sub("\ufffd", short))
