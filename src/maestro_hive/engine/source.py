"""Whether a text that a task returned is Python source, and whether that source parses.

Prose may start like source ("import duties rose by 4 %"), and refusing it would cost every attempt of a
step. So a text counts as source only if its first line is plausible Python; one that prose could have
too, such as ``import duties``, must be followed by a line of code, or by nothing.
"""

from __future__ import annotations

import ast
import re
import textwrap
import warnings

from maestro_hive.engine.config import ErrorCategory
from maestro_hive.engine.errors import RecoverableError

#: What Python source starts with.
_SOURCE = ("def ", "class ", "import ", "from ")

_DOTTED = r"\w+(?:\.\w+)*"
_END = r"\s*(?:[;#\\].*)?$"
_IMPORTED = rf"{_DOTTED}(?:\s+as\s+\w+)?"
_NAMES = r"\w+(?:\s+as\s+\w+)?(?:\s*,\s*\w+(?:\s+as\s+\w+)?)*\s*,?"
_IMPORT = rf"import\s+{_IMPORTED}(?:\s*,\s*{_IMPORTED})*{_END}"
_FROM = rf"from\s+(?:\.+\s*(?:{_DOTTED})?|{_DOTTED})\s+import\s*(?:\*|\(\s*(?:{_NAMES})?\s*\)?|{_NAMES})?{_END}"

#: First lines that prose does not have.
_SURE = re.compile(
    r"def\s+\w+\("
    r"|def\s+\w+\s+\(.*:\s*(?:#.*)?$"
    r"|class\s+\w+\s*\([^)]*\)?\s*:?\s*(?:#.*)?$"
)
#: First lines that prose can have too.
_PLAUSIBLE = re.compile(rf"{_IMPORT}|{_FROM}|class\s+\w+\s*(?::\s*(?:#.*)?)?$")
#: A class whose body is in its first line.
_ONE_LINE_CLASS = re.compile(r"class\s+\w+\s*:\s*(?P<body>.*)$")
#: A line that is code, whether it parses or not; prose has none like it.
_CODE = re.compile(
    rf"(?:async\s+)?def\s+\w+\s*\(|class\s+\w+\s*[(:]|{_IMPORT}|{_FROM}"
    r"|@\w+"  # a decorator
    r"|\w[\w.]*(?:\[.*\])?\s*(?::\s*[\w.\[\], |]+)?\s*(?:[-+*/%&|^@]|//|\*\*|<<|>>)?=(?!=)"
    r"|[A-Za-z_][\w.]*\((?!e?s\))"  # a call, and not "tariff(s)"
    r"|print\s+[\"']"
    r"|(?:pass|break|continue|return|else\s*:|try\s*:|finally\s*:|\.\.\.)\s*(?:#.*)?$"
    r"|(?:for\s+[\w, ]+\s+in\s.*|elif\s.*|except\b.*|if\s+__name__.*)(?::\s*(?:#.*)?)$"
)


def check_source(output: str, must: str = "must be Python source, and does not parse") -> None:
    """Raise if a result is not Python source that parses."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are about the result's source, not the user's
            ast.parse(textwrap.dedent(output))
    except SystemError:
        return  # of Python 3.11's own, and says nothing about the source
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        where = f" in line {line}" if line else ""
        raise RecoverableError(
            f"the result {must}{where}: {error}",
            error_category=ErrorCategory.SYNTAX.value,
            line_number=line,
        ) from error


def check_if_source(output: str) -> None:
    """Raise if a result starts like Python source, is no prose, and does not parse."""
    if output.lstrip().startswith(_SOURCE) and is_source(output):
        check_source(output, "is Python source that does not parse")


def is_source(text: str) -> bool:
    """Return whether a text is meant to be Python source, parsing or not."""
    first, *rest = (line.strip() for line in text.strip().splitlines() if line.strip())
    if _SURE.match(first):
        return True
    body = _ONE_LINE_CLASS.match(first)
    if body is not None and body["body"] and not body["body"].startswith("#"):
        return _CODE.match(body["body"]) is not None
    if _PLAUSIBLE.match(first) is None:
        return False
    if not rest:
        return re.match(r"class\s+\w+$", first) is None
    return any(_CODE.match(line) for line in rest)
