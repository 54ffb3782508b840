"""A decorated function keeps its signature, its result's type and its docstring."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.typing import right_use

ROOT = Path(__file__).resolve().parents[2]

#: Typed code that is wrong; mypy must report each line that says so, with that code, and no other.
WRONG_USE = """\
import asyncio
from maestro_hive.engine.attempt import current
from maestro_hive.hive.functions import StepFunction
from maestro_hive.hive.hive import Hive

hive = Hive("state")


@hive.step(persona="architect")
async def design(feature: str, *, parts: int = 2) -> list[str]:
    return [feature] * parts


@hive.step
def measure(text: str) -> int:
    return len(text)


@hive.step(max_attempts="many")  # E: call-overload, untyped-decorator
async def impatient() -> None: ...


@hive.step(retries=3)  # E: call-overload, untyped-decorator
async def unknown_option() -> None: ...


@hive.step(on_ambiguous="guess")  # E: call-overload, untyped-decorator
async def guessing() -> None: ...


@hive.workflow  # E: arg-type
def not_async(feature: str) -> str:
    return feature


@hive.workflow
async def build(feature: str) -> list[str]:
    await design()  # E: call-arg
    await design(3)  # E: arg-type
    await design("x", part=2)  # E: call-arg
    await design("x", parts="two")  # E: arg-type
    await measure("x", "y")  # E: call-arg
    number: int = await design("x")  # E: assignment
    text: str = await measure("x")  # E: assignment
    many: list[int] = await asyncio.gather(design("x"), design("y"))  # E: assignment
    design("not awaited")  # E: unused-coroutine
    (await measure("x")).upper()  # E: attr-defined
    design.persona_name  # E: attr-defined
    await hive.sleep("long")  # E: arg-type
    current().memry  # E: attr-defined
    return 3  # E: return-value


@hive.workflow
async def parent() -> None:
    await build(3)  # E: arg-type
    wrong: int = await build("x")  # E: assignment


async def main() -> None:
    wrong: int = await hive.run(build, "x")  # E: arg-type
    handle = await hive.start(build, "x")
    also: str = await handle.result()  # E: assignment
    hive.run(build, "x", run_id=7)  # E: arg-type, unused-coroutine
    handle.results  # E: attr-defined


wrong: dict[str, str] = hive.run_sync(build, "x")  # E: arg-type
kept: StepFunction[[int], str] = design  # E: assignment
hive.run_sync(len, "x")  # E: arg-type
"""


def checked_by_mypy(*programs: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", "--hide-error-context", *programs],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode in {0, 1}, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(300)  # without a cache, on a busy machine
def test_wrong_use_is_reported_where_it_stands(
    tmp_path: Path,
) -> None:
    """All in one start of mypy: each takes seconds, whatever it has to check."""
    program = tmp_path / "wrong_use.py"
    program.write_text(WRONG_USE)
    report = checked_by_mypy(program, Path(right_use.__file__))
    reported: dict[int, set[str]] = {}
    for line in report.splitlines():
        found = re.search(r"wrong_use\.py:(\d+): (?:error: .*\[([\w-]+)\]$|note: )", line)
        assert found is not None, line
        if found[2]:
            reported.setdefault(int(found[1]), set()).add(found[2])
    expected = {
        number: set(line.partition("# E: ")[2].split(", "))
        for number, line in enumerate(WRONG_USE.splitlines(), 1)
        if "# E: " in line
    }
    assert reported == expected, report


STEP = ("StepFunction", ["feature", "parts"], "Design a feature.")
PLAIN = ("StepFunction", ["text"], "Count.")
FLOW = ("WorkflowFunction", ["feature", "loud"], "Build a feature.")


@pytest.mark.parametrize("name, expected", [("bare", STEP), ("plain", PLAIN), ("build", FLOW)])
def test_what_is_made_of_a_function_looks_like_it(
    name: str, expected: tuple[str, list[str], str]
) -> None:
    made = getattr(right_use, name)
    kind, parameters, doc = expected
    assert type(made).__name__ == kind
    assert (made.__name__, made.__doc__, made.__module__) == (name, doc, right_use.__name__)
    assert inspect.signature(made) == inspect.signature(made.function)
    assert list(inspect.signature(made).parameters) == parameters
    assert inspect.getdoc(made) == doc


def test_right_use_runs_as_its_types_say() -> None:
    built = right_use.hive.run_sync(right_use.build, "page", loud=True)
    assert built == ["PAGE-0", "PAGE-1", "PAGE-2", "6!"]
    assert right_use.hive.run_sync(right_use.shop, ["a", "b"]) == {"a": 4, "b": 4}
