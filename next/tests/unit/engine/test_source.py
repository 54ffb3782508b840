"""Which results are taken for Python source, and which of those are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maestro_hive.engine.errors import RecoverableError
from maestro_hive.engine.source import check_source
from tests.tables import for_each

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


@for_each("text", BROKEN)
def test_source_that_does_not_parse_is_refused(text: str) -> None:
    with pytest.raises(RecoverableError, match="does not parse") as caught:
        check_source(text)
    assert caught.value.error_category == "SYNTAX"


@for_each("text", SOUND)
def test_source_that_parses_is_accepted(text: str) -> None:
    check_source(text)


@given(st.text(), st.sampled_from(["def ", "class ", "import ", "from ", ""]))
def test_any_text_is_accepted_or_refused_by_our_error(text: str, start: str) -> None:
    try:
        check_source(start + text)
    except RecoverableError as error:
        assert error.error_category == "SYNTAX"  # noqa: PT017 - it may also return
