"""What level 2 was asked to call: under which name, for which persona, and which call it is."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import warnings
import weakref
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType, ModuleType
from typing import (
    TYPE_CHECKING,
    Any,
    NamedTuple,
    Protocol,
    Self,
    TypeGuard,
    TypeVar,
    cast,
    runtime_checkable,
)

from maestro_hive.kernel.errors import ConfigurationError, EncodeError
from maestro_hive.kernel.threads import threads
from maestro_hive.maestro.state import codec
from maestro_hive.unified_execution.steps import UNNAMED, UnencodableInputWarning, distance_of_user

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.engine.results import ExecutionResult


@runtime_checkable
class _HasPersona(Protocol):
    persona_id: str


@runtime_checkable
class _KeepsResults(Protocol):
    def completed_result(self, task: Any, task_name: str, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a step that is finished, or None, without calling anything."""
        ...


@runtime_checkable
class _KnowsSteps(Protocol):
    def step_identity(self, task: Any, task_name: str, *args: Any, **kwargs: Any) -> bytes | None:
        """Return what tells the step from others of its run; None if it is in no run."""
        ...


@runtime_checkable
class _MayStartOver(Protocol):
    @property
    def starts_over(self) -> bool:
        """Whether what failed for good shall be tried again (``options(retry=True)``)."""
        ...

    def options(self, *, retry: bool) -> Any:
        """Return the executor with that option."""
        ...


_Offer = TypeVar("_Offer")
#: What an executor offers, by its class: looking takes longer than all else that level 2 does.
_offers: weakref.WeakKeyDictionary[type, dict[object, bool]] = weakref.WeakKeyDictionary()


def _offers_it(executor: object, what: Callable[..., _Offer]) -> TypeGuard[_Offer]:
    known = _offers.setdefault(type(executor), {})
    if what not in known:
        known[what] = isinstance(executor, cast("type", what))
    return known[what]


class Identity(NamedTuple):
    """What tells a call from others of its run, also after a restart; and what it leaves out."""

    digest: bytes
    doubt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WrappedCall:
    """A function and what to call it with; ``name`` is the task's own where that is known."""

    function: Callable[..., Any]
    name: str
    persona: str | None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    retry: bool = False

    async def make(self) -> Any:
        """Call it once, and wait for what it returns; one that blocks does so in a thread."""
        if _is_async(self.function):
            outcome = self.function(*self.args, **self.kwargs)
        else:
            call = partial(copy_context().run, self.function, *self.args, **self.kwargs)
            outcome = await asyncio.wrap_future(threads.run(call))
        return await outcome if inspect.isawaitable(outcome) else outcome

    def completed(self) -> ExecutionResult | None:
        """Return the result if it is kept already: then nothing needs to be called."""
        executor = self._executor
        if not _offers_it(executor, _KeepsResults):
            return None
        found: ExecutionResult | None = executor.completed_result(*self.args, **self.kwargs)
        return found

    @property
    def starts_over(self) -> bool:
        """Return whether the rounds made before shall not count."""
        executor = self._executor
        return self.retry or (_offers_it(executor, _MayStartOver) and executor.starts_over)

    def starting_over(self) -> Self:
        """Return the call with all of its rounds again, and a step's attempts."""
        executor = self._executor
        if not _offers_it(executor, _MayStartOver):
            return replace(self, retry=True)
        return replace(self, retry=True, function=executor.options(retry=True).execute)

    @property
    def _executor(self) -> object:
        return None if self.persona is None else getattr(self.function, "__self__", None)

    # --- which call it is ---

    def identity(self) -> Identity:
        """Return the step that level 1 knows it as; else its name and input."""
        executor = self._executor
        if _offers_it(executor, _KnowsSteps):
            step = executor.step_identity(*self.args, **self.kwargs)
            if step is not None:
                return Identity(hashlib.sha256(b"level2" + step).digest())
        return self._by_name()

    def _by_name(self) -> Identity:
        name: object = self.name
        if not isinstance(name, str) or name in ("", UNNAMED):
            raise ConfigurationError(
                f"a call whose rounds are kept needs a name to be found by, and {name!r} is none;"
                " give execute_safe() a task_name"
            )
        known = _Known()
        carried = [] if self._executor is not None else known.carried_by(self.function)
        args, kwargs = self._input()
        given = [known.data(value, f"args[{number}]") for number, value in enumerate(args)]
        named = {name: known.data(value, name) for name, value in kwargs.items()}
        parts = ["level2", name, self.persona, carried, given, named]
        return Identity(codec.canonical_digest(parts, "call"), known.doubt)

    def _input(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what the task is given; an executor is given the task and its name before."""
        if self._executor is None:
            return self.args, self.kwargs
        own = {"task", "task_name"}
        return self.args[2:], {key: each for key, each in self.kwargs.items() if key not in own}


def understand(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], task_name: str
) -> WrappedCall:
    """Return the call that was meant: an executor is told the task's name, and tells its persona.

    ``execute`` takes the name after the task. With ``task_name=`` it is put there, and everything
    that follows the task is the task's own.
    """
    if not callable(function):
        raise ConfigurationError(f"execute_safe() was given {function!r}, which cannot be called")
    owner = getattr(function, "__self__", None)
    if not _offers_it(owner, _HasPersona) or getattr(function, "__name__", "") != "execute":
        return WrappedCall(
            function=function, name=task_name, persona=None, args=args, kwargs=kwargs
        )
    name = task_name
    if name == UNNAMED:
        name = args[1] if len(args) > 1 else UNNAMED
    elif args:
        args = (args[0], name, *args[1:])
    else:
        kwargs = {**kwargs, "task_name": name}
    if not args and "task" not in kwargs:
        raise ConfigurationError(f"the executor of {owner.persona_id!r} was given no task")
    return WrappedCall(
        function=function, name=name, persona=owner.persona_id, args=args, kwargs=kwargs
    )


def _is_async(function: Callable[..., Any]) -> bool:
    if isinstance(function, type):
        return False  # its __call__ is for what it makes
    called = getattr(function, "__call__", None)  # noqa: B004 - the method itself is looked at
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


# --- what a call is known by ---------------------------------------------------------------------


class _Known:
    """Finds what stands for values, and remembers the first that nothing stands for."""

    def __init__(self) -> None:
        self.doubt: str | None = None

    def data(self, value: object, path: str) -> str | None:
        """Return the digest of a value's data; None if it has no form in JSON."""
        try:
            return codec.canonical_digest(value, path).hex()
        except EncodeError as error:
            self.doubt = self.doubt or str(error)
            return None

    def carried_by(self, function: object) -> list[Any]:
        """Return what stands for the data that a function brings along.

        Its own name does not count: it may change, and the call is still the same.
        """
        if isinstance(function, partial):
            given = [self.data(value, f"partial[{n}]") for n, value in enumerate(function.args)]
            named = {name: self.data(value, name) for name, value in function.keywords.items()}
            return [_qualified(function.func), given, named, self.carried_by(function.func)]
        if isinstance(function, FunctionType):
            self._doubt_local(function)
            return []
        owner = getattr(function, "__self__", function)
        if owner is None or isinstance(owner, type | ModuleType):
            return []
        return [self.data(owner, "self")]

    def _doubt_local(self, function: FunctionType) -> None:
        is_lambda = function.__name__ == "<lambda>"
        remembers = function.__closure__ or function.__defaults__ or function.__kwdefaults__
        if is_lambda or ("<locals>" in function.__qualname__ and remembers):
            what = "a lambda" if is_lambda else f"{function.__name__}, a local function,"
            self.doubt = self.doubt or f"what {what} brings along is not looked at"


def _qualified(value: object) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    name = f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', '')}"
    return name.encode("utf-8", "backslashreplace").decode()


def warn_of(name: str, doubt: str) -> None:
    """Say, where the user called us, that a call may be taken for another."""
    warnings.warn(
        f"{name!r} is told from other calls by its name and its plain arguments alone: {doubt}."
        " Give plain data as arguments, or each call its own task_name",
        UnencodableInputWarning,
        stacklevel=distance_of_user(),
    )


def effect_key(run_id: str | None, identity: bytes) -> str:
    """Name the failure of a call to the outside world; the same whenever it is told again."""
    return hashlib.sha256((run_id or "").encode() + b"\0" + identity).hexdigest()[:32]
