"""Whether a text that a step returned is Python source that parses."""

from __future__ import annotations

import ast
import textwrap
import warnings

from maestro_hive.engine.config import ErrorCategory
from maestro_hive.engine.errors import RecoverableError


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
