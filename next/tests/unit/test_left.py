"""LEFT.md lists everything of the old house that does not stand here yet, and nothing else."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

NEW = Path(__file__).resolve().parents[2]
OLD = NEW.parent

LINE = re.compile(r"- `(?P<name>[^`]+)`: (?:comes over|will not: \S.*)")


def things_of(root: Path) -> set[str]:
    """Return the names of a project's suites, pages, fault rows and benchmarks."""
    suites = [*root.glob("tests/**/test_*.py"), *root.glob(".mahabharatha/tests/test_*.py")]
    # The README is not among them: this project has its own.
    pages = [*root.glob("docs/**/*.md"), *(root / f"{name}.md" for name in PAGES)]
    files = {str(path.relative_to(root)) for path in [*suites, *pages] if path.exists()}
    return files | fault_rows(root) | benchmarks(root)


PAGES = ("CHANGELOG", "CONTRIBUTING", "SECURITY")


def fault_rows(root: Path) -> set[str]:
    """Return the rows of ``faults/registry.py``, by the keys of its ``MODULES``."""
    registry = root / "faults" / "registry.py"
    if not registry.exists():
        return set()
    for node in ast.parse(registry.read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="MODULES")], value=ast.Dict(keys=keys)):
                return {f"fault row {ast.literal_eval(key)}" for key in keys if key}
            case _:
                pass
    raise AssertionError("faults/registry.py has no table MODULES")


def benchmarks(root: Path) -> set[str]:
    """Return the groups that the benchmarks of a project are in."""
    texts = [path.read_text(encoding="utf-8") for path in root.glob("benchmarks/**/*.py")]
    return {f"benchmark {group}" for text in texts for group in re.findall(r'group="(.+?)"', text)}


def listed() -> list[str]:
    """Return the names in LEFT.md, in their order; a heading names the folder of its lines."""
    names, folder = [], ""
    for line in (NEW / "LEFT.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            named = re.search(r"`(.+)`", line)
            folder = f"{named[1]}/" if named else ""
        elif line.startswith("- "):
            match = LINE.fullmatch(line)
            assert match, f"{line!r} says neither `comes over` nor `will not: ` and why"
            names.append(folder + match["name"])
    return names


def test_the_old_house_has_suites_pages_fault_rows_and_benchmarks() -> None:
    kinds = Counter(re.sub(r"[ /].*", "", name) for name in things_of(OLD))
    assert min(kinds[kind] for kind in ("tests", "docs", "fault", "benchmark")) > 10


def test_everything_that_does_not_stand_here_is_listed_and_once() -> None:
    names = listed()
    assert len(names) == len(set(names))
    assert things_of(OLD) - things_of(NEW) - set(names) == set()


def test_nothing_that_stands_here_is_listed() -> None:
    assert set(listed()) & things_of(NEW) == set()


def test_nothing_is_listed_that_the_old_house_does_not_have() -> None:
    assert set(listed()) - things_of(OLD) == set()
