"""Task graphs for tests: short to write down, and generated ones."""

from __future__ import annotations

import json
import random
from typing import Any

from hypothesis import strategies as st

from maestro_hive.team.graph import Checked, check_graph

Json = Any


def task(task_id: str, *dependencies: str, **members: Json) -> dict[str, Json]:
    """Return a task as a document has it."""
    return {
        "id": task_id,
        "title": f"do {task_id}",
        "dependencies": list(dependencies),
        **members,
    }


def document(*tasks: Json, **members: Json) -> dict[str, Json]:
    """Return a document with these tasks."""
    return {"feature": "shop", "tasks": list(tasks), **members}


def checked(tree: Json, *, strict: bool = False) -> Checked:
    """Check a document that is given as values."""
    return check_graph(json.dumps(tree).encode(), "json", strict=strict)


def good(tree: Json) -> Checked:
    """Check a document that has no errors."""
    found = checked(tree)
    assert found.errors == ()
    assert found.graph is not None
    assert found.plan is not None
    return found


def codes(tree: Json, *, strict: bool = False) -> list[str]:
    """Return the codes of the errors of a document."""
    return [each.code for each in checked(tree, strict=strict).errors]


def warnings(tree: Json) -> list[str]:
    """Return the codes of the warnings of a document without errors."""
    return [each.code for each in good(tree).warnings]


# --- generated ------------------------------------------------------------------------------------

_PATHS = ("a.py", "./a.py", "b.py", "src/c.py", "src/", "d/*.py")
_OTHER_KEYS = ("$schema", "notes", "x-owner", "zone")
_OTHER_VALUES: tuple[Json, ...] = (
    None,
    True,
    -3,
    1.5,
    "text",
    [],
    [1, ["x"]],
    {"b": 1, "a": {"z": None}},
)


class Maker:
    """Makes documents without errors, in all variants; the same ones from the same seed.

    What Hypothesis would draw piece by piece takes twenty times as long.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def chance(self, one_in: int = 2) -> bool:
        return self.random.randrange(one_in) == 0

    def paths(self) -> list[str]:
        return self.random.choices(_PATHS, k=self.random.randrange(3))

    def undeclared(self) -> dict[str, Json]:
        keys = self.random.sample(_OTHER_KEYS, self.random.randrange(3))
        return {key: self.random.choice(_OTHER_VALUES) for key in keys}

    def shuffled(self, members: dict[str, Json]) -> dict[str, Json]:
        items = list(members.items())
        self.random.shuffle(items)
        return dict(items)

    def files(self) -> dict[str, Json]:
        match self.random.randrange(4):
            case 0:
                return {}
            case 1:
                return {"files": self.paths()}
            case 2:
                return {"files_owned": self.paths(), "files_read": self.paths()}
            case _:
                files: dict[str, Json] = {"create": self.paths(), "read": self.paths()}
                if self.chance():
                    files["move"] = [{"from": "old.py", "to": "new.py"}]
                return {"files": files | self.undeclared()}

    def document(self, most: int = 9) -> dict[str, Json]:
        """Return a document."""
        ids = [f"T-{number}" for number in range(self.random.randint(1, most))]
        place = {each: at for at, each in enumerate(self.random.sample(ids, len(ids)))}
        with_levels = self.chance()
        tasks = [self.task(each, place, with_levels=with_levels) for each in ids]
        whole = document(*tasks) | self.undeclared()
        if self.chance():
            whole["tasks"] = {each["id"]: each for each in tasks}
        if with_levels:
            whole["levels"] = self.levels(tasks)
        if self.chance() and len(ids) > 1:
            pair = self.random.sample(ids, min(len(ids), self.random.randint(2, 3)))
            whole["conflict_matrix"] = {"conflicts": [{"tasks": pair, "reason": "they quarrel"}]}
        return self.shuffled(whole)

    def task(self, task_id: str, place: dict[str, int], *, with_levels: bool) -> dict[str, Json]:
        earlier = [other for other in place if place[other] < place[task_id]]
        own = self.random.sample(earlier, min(len(earlier), self.random.randrange(4)))
        members: dict[str, Json] = {"estimate_minutes": self.random.randrange(10)}
        if with_levels:
            members["level"] = place[task_id] // 2
        if self.chance():
            members["verification"] = self.random.choice(
                ["true", {"command": "a && b", "expected": "x"}]
            )
        return self.shuffled(task(task_id, *own, **members) | self.files() | self.undeclared())

    def levels(self, tasks: list[dict[str, Json]]) -> Json:
        levels: dict[int, dict[str, Json]] = {}
        for number in sorted({each["level"] for each in tasks}):
            members = [each["id"] for each in tasks if each["level"] == number]
            levels[number] = {"name": f"part {number}", "tasks": members}
            if self.chance():
                gate = {"name": "g", "command": "make", "required": self.chance()}
                levels[number]["gates"] = [gate]
            if self.chance(4):
                levels[number]["parallel"] = False
        if self.chance():
            return [{"level": number, **level} for number, level in levels.items()]
        return {str(number): level for number, level in levels.items()}


SEEDS = st.integers(0, 2**32)
