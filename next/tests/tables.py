"""Tables of many small cases, in one test each."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Test = Callable[..., None]


_LONGEST = 200


def for_each(
    names: str, cases: Iterable[Any], *, ids: Callable[[Any], object] | Iterable[str] = ascii
) -> Callable[[Test], Test]:
    """Call a test with every case, as ``parametrize`` does, and report every case that fails.

    A test costs some milliseconds, in each process that collects it: too much for a case that takes
    microseconds. The cases share the fixtures, so it is for tests that change nothing.
    """
    words = [each.strip() for each in names.split(",")]
    given = list(cases)
    assert given, "a table without cases tests nothing"
    known = None if callable(ids) else list(ids)

    def name_of(number: int, values: Iterable[Any]) -> str:
        if known is not None:
            return known[number]
        return ", ".join(str(ids(each))[:_LONGEST] for each in values)  # type: ignore[operator]

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def call_each(*args: Any, **fixtures: Any) -> None:
            failed: list[BaseException] = []
            for number, case in enumerate(given):
                values = [case] if len(words) == 1 else case
                try:
                    test(*args, **fixtures, **dict(zip(words, values, strict=True)))
                except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - of the test
                    error.add_note(f"in the case {name_of(number, values)}")
                    failed.append(error)
            if failed:
                raise BaseExceptionGroup(f"{len(failed)} of {len(given)} cases failed", failed)

        signature = inspect.signature(test)
        left = [each for each in signature.parameters.values() if each.name not in words]
        vars(call_each)["__signature__"] = signature.replace(parameters=left)
        return call_each

    return decorate
