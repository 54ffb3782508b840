"""Healers that are functions: what ``@hive.healer(ValueError)`` makes of one."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from maestro_hive.engine.attempt import is_async
from maestro_hive.engine.errors import text_of
from maestro_hive.engine.healing.failure import Failure, FailureType, Fix, class_name
from maestro_hive.engine.settings import refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.engine.healing.workspace import Workspace

#: What a function may take: the failure, the step's arguments by name, and what was tried.
_MOST_PARAMETERS = 3
#: How much of a healer's name is recorded.
_MAX_NAME = 2_000


class TriedRepair(NamedTuple):
    """What was tried about an earlier failure of the step; ``verdict`` is failed, undecided or None."""

    healer: str
    fix: str | None
    feedback: str | None
    #: Whether that failure has the fingerprint of this one.
    is_same_failure: bool
    verdict: str | None


class FunctionHealer:
    """A function of the failure, the step's arguments and what was tried, as a healer.

    It answers with feedback (a text), with changed arguments (by name, in a dict), with a ``Fix``,
    which may also change files, or with None.
    """

    handles = frozenset(FailureType)
    #: Its files are changed without a review: it is the user's own.
    applies_files = True

    def __init__(
        self, function: Callable[..., Any], errors: tuple[type[BaseException], ...], name: str
    ) -> None:
        self.name = name
        self.function = function
        self.errors = errors
        self._names = frozenset(class_name(each) for each in errors)
        self._count = _parameters_of(function, name)
        self.is_async = is_async(function)

    def suits(self, failure: Failure) -> bool:
        """Return whether the error is of one of its types; after a kill, by the recorded names."""
        if isinstance(failure.error, self.errors):
            return True
        return not self._names.isdisjoint(failure.context.get("error_types") or ())

    def propose(self, failure: Failure, workspace: Workspace) -> Any:
        """Call the function."""
        del workspace
        given = failure, failure.context.get("arguments", {}), failure.context.get("repairs", [])
        return self.function(*given[: self._count])


def fix_of(answer: object) -> Fix | None:
    """Return what a healer answered as a fix; raise if it is no answer."""
    match answer:
        case None | Fix():
            return answer
        case str():
            return Fix("feedback", feedback=answer) if answer else None
        case Mapping():
            if not all(isinstance(name, str) for name in answer):
                raise TypeError("changed arguments are given by name, in a dict with texts as keys")
            shown = ", ".join(sorted(answer))
            return Fix(f"change {shown}", arguments=dict(answer)) if answer else None
        case _:
            raise TypeError(
                f"a healer returned a {type(answer).__name__}, and must return feedback (a text),"
                " changed arguments (a dict), a Fix, or None"
            )


def checked_fix(answer: object, name: str) -> Fix | None:
    """Return what the healer of that name answered, as a fix of its own; raise if it is none.

    The answer stays as it is: a healer may give the same object again, as may another healer.
    """
    fix = fix_of(answer)
    if fix is None:
        return None
    confidence: object = fix.confidence
    if not isinstance(confidence, int | float) or confidence != confidence:  # noqa: PLR0124 - NaN
        raise TypeError(f"the confidence of a fix is a number from 0 to 1, and not {confidence!r}")
    for part in ("description", "feedback", "healer"):
        text: object = getattr(fix, part)
        if text is not None and not isinstance(text, str):
            raise TypeError(f"the {part} of a fix is a text, and not a {type(text).__name__}")
    check: object = fix.check
    if check is not None and (not callable(check) or is_async(check)):
        raise TypeError(f"the check of a fix is a function that is not async, and not {check!r}")
    return replace(
        fix,
        description=fix.description or "",
        healer=text_of(fix.healer or name)[:_MAX_NAME],
        arguments=_checked_arguments(fix.arguments),
        files=_checked_files(fix.files),
    )


def _checked_arguments(arguments: object) -> dict[str, Any]:
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping) or not all(isinstance(each, str) for each in arguments):
        raise TypeError("changed arguments are given by name, in a dict with texts as keys")
    return dict(arguments)


def _checked_files(files: object) -> dict[str, str]:
    """Return the new texts of files by their paths, as they are recorded."""
    if files is None:
        return {}
    if not isinstance(files, Mapping):
        raise TypeError(
            f"changed files are a dict of texts by path, and not a {type(files).__name__}"
        )
    checked: dict[str, str] = {}
    for path, text in files.items():
        if not isinstance(path, str | os.PathLike) or not isinstance(text, str):
            raise TypeError(
                f"changed files are texts by path, and not {type(text).__name__}"
                f" by {type(path).__name__}"
            )
        name = os.fsdecode(path)
        name.encode()  # or it cannot be recorded
        if name in checked:
            raise ValueError(f"a fix changes {name} twice")
        checked[name] = text
    return checked


def checked_errors(errors: tuple[object, ...]) -> tuple[type[BaseException], ...]:
    """Return the types of errors that a healer is for; raise if one is none."""
    good = [each for each in errors if isinstance(each, type) and issubclass(each, BaseException)]
    if not errors or len(good) != len(errors):
        wrong = next((each for each in errors if each not in good), errors)
        raise refused("@hive.healer", wrong, "types of errors, as in @hive.healer(ValueError)")
    return tuple(good)


def _parameters_of(function: Callable[..., Any], name: str) -> int:
    """Return how many of the arguments a function takes by their position."""
    wanted = "a function of (failure, arguments, tried), or of the first of these"
    if not callable(function):
        raise refused(f"the healer {name}", function, wanted)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # it does not declare them
        return _MOST_PARAMETERS
    kinds = inspect.Parameter
    if any(each.kind is kinds.VAR_POSITIONAL for each in parameters):
        return _MOST_PARAMETERS
    by_place = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    taken = [each for each in parameters if each.kind in by_place]
    needed = [
        each
        for each in parameters
        if each.default is kinds.empty and each.kind is not kinds.VAR_KEYWORD
    ]
    if len(needed) > _MOST_PARAMETERS or any(each not in taken for each in needed):
        raise refused(f"the healer {name}", function, wanted)
    return min(len(taken), _MOST_PARAMETERS)
