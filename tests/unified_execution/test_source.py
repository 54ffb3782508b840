"""Which results are taken for Python source, and which of those are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maestro_hive import ExecutionConfig, Hive, RunFailedError, current
from maestro_hive.engine.source import check_if_source, check_source
from maestro_hive.unified_execution import (
    Level1Config,
    Level2Config,
    PersonaExecutor,
    RecoverableError,
)
from tests.tables import for_each
from tests.timing import cpu_seconds
from tests.unified_execution.restarts import Body, execute

if TYPE_CHECKING:
    from pathlib import Path

PROSE = [
    "import duties rose by 4 %",
    "import duties rose by 4 %.\nExports fell.",
    "import duties",
    "import duties, quotas",
    "import duties, quotas\nand tariffs rose by 4 %",
    "import duties, tariffs and quotas rose.",
    "import 5 tonnes of steel",
    "import the module, then call it:\n\n    import os\n    os.getcwd()\n",
    "import prices\nfor example:\n- steel\n- wheat",
    "import tax\nis due in March",
    "import volumes: 4 m tonnes",
    "import of steel\ntariff(s) rose\nby 4 %",
    "import/export is balanced",
    "import duties\n\n# Summary\nThey rose.",
    "import quotas\nNote: they were raised",
    "import duties\nraise prices",
    "from our point of view, nothing changes",
    "from China import duties rose",
    "from China import\nduties rose by 4 %",
    "from Japan import cars\nwere up 4 %",
    "from China import (mostly cars) rose by 4 %",
    "from 2019 to 2024 the share doubled",
    "from a to z",
    "from: alice@example.com\nto: bob@example.com",
    "from x, y and z",
    "from here on\n\n    x = 1\n\nis wrong",
    "class action suits are common",
    "class A",
    "class dismissed",
    "class struggle\nis a theory",
    "class A: expensive items\nclass B: cheap items",
    "class D: the switching amplifier",
    "class of 2024",
    "class-action lawsuits",
    "class size (average) was 23",
    "class\nstruggle",
    "def. 3 states that",
    "def leppard sold 100 m records",
    "def leppard (the band) sold 100 m records",
    "def not a function",
    "def jam",
    "def 3: a ring is",
    "defer it",
    "classify",
    "prose: def f(:",
    "",
    "   \n",
    "print('x'",
]
BROKEN = [
    "def f(:\n  pass",
    "def f(:\n",
    "def f(",
    "def f():",
    "def f(x)\n    return x",
    "def f (x):\n return (",
    "\n\ndef f(): return (",
    "    def f(:\n        pass",
    "def f():\n    return 1\n\nThis function returns one.",
    "def f():\nreturn 1",
    "class A\n    pass",
    "class A\n    x = 1",
    "class A:",
    "class A:\npass",
    "class A(:\n    pass",
    "class A(B)\n    pass",
    "class A(B):\n    def f(:\n        pass",
    "class A: x = = 1",
    "class A:\n    def f(self:\n        return 1",
    "class A:\n    x: int = = 3",
    "from x import",
    "from x import (",
    "from x import (a, b\nprint(a)",
    "from . import a\nx = = 1",
    "from ..a.b import c as d\ndef f(:",
    "from x import *\n@cached\ndef f(:",
    "import os\n\nx = = 3",
    "import os\nprint('hi'",
    "import os\nprint 'hi'",
    "import os, sys\nif __name__ == '__main__':\nmain()",
    "import os.path as p  # for paths\nfor each in p:\nprint(each)",
    "import os; print(os\nx = 1",
    "import numpy as np\n\nnp.zeros((3, 3)\n",
    "import os\ntry:\n    os.x()\nexcept:\nelse",
    "import json\ndata = json.loads('{}'\n",
    "import asyncio\n\nasync def main(:\n    pass",
    "import os\nrows[0] += 1 +",
]
SOUND = [
    "def f():\n    return 1\n",
    "    def f():\n        return 1\n",
    "class A: pass",
    "class A(B): ...",
    "class A:\n    x: int\n",
    "import os",
    "import os, sys as s\nprint(os)",
    "from x import (a,\n    b)\n",
    "from __future__ import annotations\n\nx = 1\n",
    "def f():\n    return '\\d'\n",
]


@for_each("text", PROSE)
def test_prose_is_no_source(text: str) -> None:
    check_if_source(text)


@for_each("text", BROKEN)
def test_source_that_does_not_parse_is_refused(text: str) -> None:
    with pytest.raises(RecoverableError, match="source that does not parse") as caught:
        check_if_source(text)
    assert caught.value.error_category == "SYNTAX"


@for_each("text", SOUND)
def test_source_that_parses_is_accepted(text: str) -> None:
    check_if_source(text)
    check_source(text)


@given(st.text(), st.sampled_from(["def ", "class ", "import ", "from ", ""]))
def test_any_text_is_accepted_or_refused_by_our_error(text: str, start: str) -> None:
    for check in (check_if_source, check_source):
        try:
            check(start + text)
        except RecoverableError as error:
            assert error.error_category == "SYNTAX"  # noqa: PT017 - it may also return


@pytest.mark.parametrize(
    "text",
    ["import " + "a," * 50_000, "from x import (" + "a " * 50_000, "import x\n" + "a.b" * 50_000],
)
def test_a_long_text_takes_no_time(text: str) -> None:
    assert cpu_seconds(lambda: check_if_source(text), 1) < 1


# --- who is checked ------------------------------------------------------------------------------

ANSWER = "import duties rose by 4 %"


def test_an_executor_returns_prose_that_starts_like_source() -> None:
    body = Body(ANSWER)
    assert execute(PersonaExecutor(), body).final_output == ANSWER
    assert body.count == 1


def quick(folder: Path, **level1: Any) -> Hive:
    config = ExecutionConfig(
        level1=Level1Config(base_delay_seconds=0, **level1),
        level2=Level2Config(base_delay_seconds=0),
    )
    return Hive(folder, config)


def ask(hive: Hive, *answers: str, **options: Any) -> tuple[str, list[list[str]]]:
    """Return what a step returned, and the feedback of each of its calls."""
    feedback: list[list[str]] = []

    @hive.step(**options)
    async def write() -> str:
        feedback.append(current().feedback)
        return answers[min(len(feedback), len(answers)) - 1]

    @hive.workflow
    async def work() -> str:
        return await write()

    return hive.run_sync(work), feedback


@pytest.mark.parametrize("answer", [ANSWER, "def f(:\n    pass", "class A\n", "import 5"])
def test_a_step_of_a_hive_is_not_checked_unless_it_asks(tmp_path: Path, answer: str) -> None:
    with quick(tmp_path) as hive:
        assert ask(hive, answer) == (answer, [[]])


def test_a_step_that_asks_must_return_source(tmp_path: Path) -> None:
    with quick(tmp_path, enable_syntax_validation=False) as hive:
        answer, feedback = ask(hive, "def f(:", ANSWER, "x = 1\n", check_source=True)
    assert answer == "x = 1\n"
    assert len(feedback) == 3
    assert all("SYNTAX: the result must be Python source" in each for each in feedback[2])


def test_a_step_that_never_returns_source_fails(tmp_path: Path) -> None:
    with quick(tmp_path) as hive, pytest.raises(RunFailedError) as caught:
        ask(hive, "def f(:", check_source=True, max_attempts=2)
    assert isinstance(caught.value.__cause__, RecoverableError)


@pytest.mark.parametrize("wanted", [True, False])
def test_an_executors_call_may_decide(wanted: bool) -> None:
    config = ExecutionConfig(
        level1=Level1Config(base_delay_seconds=0, enable_syntax_validation=not wanted)
    )
    body = Body("def f(:", "def f(): pass")
    execute(PersonaExecutor(config).options(check_source=wanted), body)
    assert body.count == (2 if wanted else 1)
