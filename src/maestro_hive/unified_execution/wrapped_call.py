"""What level 2 was asked to call: under which name, for which persona, and which call it is."""

from __future__ import annotations

import hashlib
import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from maestro_hive.kernel.errors import EncodeError
from maestro_hive.maestro.state import codec
from maestro_hive.unified_execution.steps import UNNAMED

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.unified_execution.results import ExecutionResult


@runtime_checkable
class _HasPersona(Protocol):
    persona_id: str


@runtime_checkable
class _KeepsResults(Protocol):
    def kept_result(self, task: Any, task_name: str, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a step that is finished, or None, without calling anything."""
        ...


@runtime_checkable
class _MayStartOver(Protocol):
    @property
    def starts_over(self) -> bool:
        """Whether what failed for good shall be tried again (``options(retry=True)``)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WrappedCall:
    """A function and what to call it with; ``name`` is the task's own where that is known."""

    function: Callable[..., Any]
    name: str
    persona: str | None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    async def make(self) -> Any:
        """WrappedCall it once, and wait for what it returns."""
        outcome = self.function(*self.args, **self.kwargs)
        return await outcome if inspect.isawaitable(outcome) else outcome

    def kept(self) -> ExecutionResult | None:
        """Return the result if it is kept already: then nothing needs to be called."""
        executor = self._executor
        if not isinstance(executor, _KeepsResults):
            return None
        found: ExecutionResult | None = executor.kept_result(*self.args, **self.kwargs)
        return found

    @property
    def starts_over(self) -> bool:
        """Tell whether the rounds made before shall not count."""
        executor = self._executor
        return isinstance(executor, _MayStartOver) and executor.starts_over

    @property
    def _executor(self) -> object:
        return None if self.persona is None else getattr(self.function, "__self__", None)

    def identity(self) -> bytes:
        """Return what tells this call from others of its run, also after a restart."""
        who = self.persona if self.persona is not None else _qualified(self.function)
        given = [_known_by(value) for value in self.args]
        named = {name: _known_by(value) for name, value in self.kwargs.items()}
        return codec.encode(["level2", self.name, who, given, named], "call").sha256


def understand(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], task_name: str
) -> WrappedCall:
    """Return the call that was meant: an executor is told the task's name, and tells its persona.

    ``execute`` takes the name after the task; whoever gives it by ``task_name=`` alone means that.
    """
    owner = getattr(function, "__self__", None)
    if not isinstance(owner, _HasPersona) or getattr(function, "__name__", "") != "execute":
        return WrappedCall(
            function=function, name=task_name, persona=None, args=args, kwargs=kwargs
        )
    if task_name == UNNAMED:
        name = args[1] if len(args) > 1 and isinstance(args[1], str) else UNNAMED
    else:
        name = task_name
        if args and args[1:2] != (name,):
            args = (args[0], name, *args[1:])
        elif not args:
            kwargs = {**kwargs, "task_name": name}
    return WrappedCall(
        function=function, name=name, persona=owner.persona_id, args=args, kwargs=kwargs
    )


def _known_by(value: object) -> str:
    """Return what stands for a value: the digest of its data, or its name."""
    try:
        return codec.encode(value).hexdigest
    except EncodeError:
        return _qualified(value)


def _qualified(value: object) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    name = f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', '')}"
    return name.encode("utf-8", "backslashreplace").decode()


def effect_key(run_id: str | None, identity: bytes) -> str:
    """Name the failure of a call to the outside world; the same whenever it is told again."""
    return hashlib.sha256((run_id or "").encode() + b"\0" + identity).hexdigest()[:32]
