"""What the bodies of the service noted, and what may not be among it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from faults.service import PARTS

if TYPE_CHECKING:
    from pathlib import Path


class Notes:
    """Lines of four words: what happened, the order, its part, and the process."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "notes"
        self._effects = folder / "effects"

    def lines(self) -> list[tuple[str, str, str, int]]:
        """Return what was noted, in its order."""
        text = self._path.read_text(encoding="utf-8") if self._path.exists() else ""
        words = [line.split() for line in text.splitlines()]
        return [(what, order, part, int(pid)) for what, order, part, pid in words]

    def has(self, what: str, order: str, pid: int | None = None) -> bool:
        """Return whether this was noted, by a process if one is given."""
        return any(
            (what, order) == (known, whose) and pid in (None, by)
            for known, whose, _, by in self.lines()
        )

    def is_recorded(self, order: str, part: str) -> bool:
        """Return whether a part of an order is known to be recorded."""
        return any(each[:3] == ("recorded", order, part) for each in self.lines())

    def unrecorded_of(self, pid: int) -> set[tuple[str, str]]:
        """Return the parts that a process started, and did not see recorded."""
        own = [each for each in self.lines() if each[3] == pid]
        started = {(order, part) for what, order, part, _ in own if what == "starts"}
        return started - {(order, part) for what, order, part, _ in own if what == "recorded"}

    def repeated(self) -> list[str]:
        """Return the bodies that were called though their result was recorded."""
        recorded: set[tuple[str, str]] = set()
        wrong: list[str] = []
        for what, order, part, _ in self.lines():
            if what == "recorded":
                recorded.add((order, part))
            elif what == "starts" and (order, part) in recorded:
                wrong.append(f"{part} of {order} was recorded and ran again")
        return wrong

    def interrupted(self) -> int:
        """Return how many bodies were called once more, after a kill."""
        starts = Counter((order, part) for what, order, part, _ in self.lines() if what == "starts")
        return sum(count - 1 for count in starts.values())

    def wrong_effects(self, accepted: set[str]) -> list[str]:
        """Return the effects of orders that did not happen, or not once."""
        found = [each for each in self._effects.glob("*") if not each.name.startswith(".")]
        effects = Counter(each.read_text(encoding="utf-8") for each in found)
        wanted = {f"{order} {part}" for order in accepted for part in PARTS}
        wrong = [f"{each} had {count} effects" for each, count in effects.items() if count > 1]
        return [*wrong, *(f"{each} had no effect" for each in wanted - effects.keys())]
