"""What level 2 was asked to call, when it is no step of ours: a function, with its arguments."""

from __future__ import annotations

import asyncio
import inspect
import warnings
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from maestro_hive.engine.attempt import is_async
from maestro_hive.engine.plan import UNNAMED, UnencodableInputWarning, distance_to_user
from maestro_hive.engine.results import ExecutionResult
from maestro_hive.engine.step import SkippedError
from maestro_hive.kernel.errors import ConfigurationError, EncodeError
from maestro_hive.kernel.threads import threads
from maestro_hive.maestro.state import codec

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.engine.breaker import Permit


class Identity(NamedTuple):
    """What identifies a call in its run, also after a restart; and what it leaves out."""

    digest: bytes
    doubt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignCall:
    """A function and its arguments; a round calls it once, in a thread if it blocks."""

    function: Callable[..., Any]
    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    persona: str | None = None
    uses_guard: bool = False
    #: How many of the arguments before do not identify the call.
    identified_from: int = 0

    async def make(self, number: int, permit: Permit) -> Any:
        """Call it once, and wait for what it returns."""
        del number, permit
        if is_async(self.function):
            outcome = self.function(*self.args, **self.kwargs)
        else:
            call = partial(copy_context().run, self.function, *self.args, **self.kwargs)
            outcome = await asyncio.wrap_future(threads.run(call))
        if inspect.isawaitable(outcome):
            outcome = await outcome
        if isinstance(outcome, ExecutionResult) and not outcome.success:
            raise SkippedError(outcome)
        return outcome

    def identity(self) -> Identity:
        """Return what identifies it: its name, its arguments, and what its function carries."""
        name: object = self.name
        if not isinstance(name, str) or name in ("", UNNAMED):
            raise ConfigurationError(
                f"a call whose rounds are recorded needs a name to be found by, and {name!r} is"
                " none; give execute_safe() a task_name"
            )
        digests = _Digests()
        carried = [] if self.identified_from else digests.carried_by(self.function)
        own = self.args[self.identified_from :]
        given = [digests.of(value, f"args[{number}]") for number, value in enumerate(own)]
        named = {name: digests.of(value, name) for name, value in self.kwargs.items()}
        parts = ["level2", name, self.persona, carried, given, named]
        return Identity(codec.canonical_digest(parts), digests.doubt)


class _Digests:
    """Digests of values; ``doubt`` names the first that has none."""

    def __init__(self) -> None:
        self.doubt: str | None = None

    def of(self, value: object, path: str) -> str | None:
        """Return the digest of a value's data; None if it has no form in JSON."""
        try:
            return codec.canonical_digest(value, path).hex()
        except EncodeError as error:
            self.doubt = self.doubt or str(error)
            return None

    def carried_by(self, function: object) -> list[Any]:
        """Return digests of the data that a function carries.

        Its own name does not count: it may change, and the call is still the same.
        """
        if isinstance(function, partial):
            given = [self.of(value, f"partial[{n}]") for n, value in enumerate(function.args)]
            named = {name: self.of(value, name) for name, value in function.keywords.items()}
            return [_qualified(function.func), given, named, self.carried_by(function.func)]
        if isinstance(function, FunctionType):
            self._doubt_local(function)
            return []
        owner = getattr(function, "__self__", function)
        if owner is None or isinstance(owner, type | ModuleType):
            return []
        return [self.of(owner, "self")]

    def _doubt_local(self, function: FunctionType) -> None:
        is_lambda = function.__name__ == "<lambda>"
        carries = function.__closure__ or function.__defaults__ or function.__kwdefaults__
        if is_lambda or ("<locals>" in function.__qualname__ and carries):
            what = "a lambda" if is_lambda else f"{function.__name__}, a local function,"
            self.doubt = self.doubt or f"what {what} carries is not part of it"


def _qualified(value: object) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    name = f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', '')}"
    return name.encode("utf-8", "backslashreplace").decode()


def warn_of(name: str, doubt: str) -> None:
    """Warn, at the user's own line, that a call may be taken for another."""
    warnings.warn(
        f"{name!r} is identified by its name and its plain arguments alone: {doubt}."
        " Give plain data as arguments, or each call its own task_name",
        UnencodableInputWarning,
        stacklevel=distance_to_user(),
    )
