"""What a step is: told from others by name and input, or by a key; and how an attempt ended."""

from __future__ import annotations

import hashlib
import inspect
import traceback
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from maestro_hive.engine import retry_policy
from maestro_hive.engine.errors import (
    FailureReport,
    UnrecoverableError,
    parts_of,
    text_of,
)
from maestro_hive.kernel.errors import ConfigurationError, EncodeError
from maestro_hive.maestro.state import codec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from maestro_hive.engine.results import ExecutionStatus

UNNAMED = "unnamed_task"


class UnencodableInputWarning(UserWarning):
    """A step's input has no form in JSON, so its name alone says which step it is."""


class Plan(NamedTuple):
    """Which step is to be executed, and what is recorded of it."""

    identity: bytes
    facts: bytes
    family: str
    given: codec.Encoded | None


class Planner:
    """Tells the steps of one persona apart: by name and input, or by a key."""

    def __init__(self, persona: str) -> None:
        self._persona = persona
        self._kinds: dict[str, tuple[Any, bytes, str]] = {}
        self._warned: set[str] = set()

    def plan(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        key: str | None,
        store_input: bool,
        occurrence: int = 1,
        quiet: bool = False,
    ) -> Plan:
        """Work out a step's identity; of equal calls, each ``occurrence`` has its own."""
        start, facts, family = self._kind(name)
        given = self._encode(name, args, kwargs, quiet=quiet or key is not None)
        digest = start.copy()
        if key is not None:
            digest.update(b"key" + key.encode())
        elif given is not None:
            digest.update(given.digest)
        if occurrence > 1:
            digest.update(b"#%d" % occurrence)
            told = {"name": name, "occurrence": occurrence, "persona": self._persona}
            facts = codec.dump_canonical(told)
        stored = given.value if given is not None and store_input else None
        return Plan(digest.digest(), facts, family, stored)

    def _kind(self, name: str) -> tuple[Any, bytes, str]:
        given: object = name
        if isinstance(given, str) and given in self._kinds:
            return self._kinds[given]
        if not isinstance(given, str) or given in ("", UNNAMED):
            raise ConfigurationError(
                f"a step that is kept needs a name to be found by, and {name!r} is none;"
                " give execute() a task_name"
            )
        facts = codec.encode({"name": name, "persona": self._persona}, "step").data
        self._kinds[name] = hashlib.sha256(facts), facts, f"{self._persona}/{name}"
        return self._kinds[name]

    def _encode(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, quiet: bool
    ) -> codec.EncodedCall | None:
        try:
            return codec.encode_call(args, kwargs)
        except EncodeError as error:
            if not quiet and name not in self._warned:
                self._warned.add(name)
                warnings.warn(
                    f"{name!r} of {self._persona!r} is told from other steps by its name alone:"
                    f" {error}. Give plain data, or a key",
                    UnencodableInputWarning,
                    stacklevel=distance_of_user(),
                )
            return None


def distance_of_user() -> int:
    """Return how many calls up from whoever asks the first line outside of this package is."""
    frame, distance = inspect.currentframe(), 0
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("maestro_hive."):
        frame, distance = frame.f_back, distance + 1
    return distance


class Failure(NamedTuple):
    """What is recorded of an attempt that ended without a result."""

    status: ExecutionStatus
    counts: bool
    error: dict[str, Any]
    reason: str
    wait: float | None
    final: bool
    healed: bool = False
    healing_error: str | None = None


# --- what is kept of an error ----------------------------------------------------------------

#: How much of its text.
_MESSAGE_LENGTH = 2_000
_TRACEBACK_LENGTH = 4_000
#: An error that is raised again and again has them all, and each costs time.
_FRAMES = 40
#: Packages whose lines a user need not see: between the call and the task there is nothing else.
_OURS = ("maestro_hive.unified_execution", "maestro_hive.hive", "maestro_hive.kernel", "asyncio")


def error_facts(error: BaseException) -> dict[str, Any]:
    """Return an error as plain JSON, also one that cannot show itself."""
    cause = error.original_error if isinstance(error, UnrecoverableError) else None
    kind = type(error).__name__
    message = text_of(error) or kind
    looked_at = cause if isinstance(cause, BaseException) else error
    category = retry_policy.classify(looked_at) if isinstance(error, Exception) else "UNKNOWN"
    try:
        frames = _own_frames(error)
        trace = "".join(traceback.format_exception(type(error), error, frames, limit=-_FRAMES))
    except Exception:  # noqa: BLE001 - an error of the user's making
        trace = message
    facts = {
        "type": kind,
        "message": message[:_MESSAGE_LENGTH],
        "category": str(category),
        "traceback": _writable(trace)[-_TRACEBACK_LENGTH:],
    }
    return {**facts, "recoverable": False} if is_unrecoverable(error) else facts


def is_unrecoverable(error: BaseException) -> bool:
    """Return whether a task says that another attempt is pointless; one of a group says it too."""
    return any(_is_final(part) for part in parts_of(error) if isinstance(part, UnrecoverableError))


def _is_final(error: UnrecoverableError) -> bool:
    # An executor inside the task that has used up its attempts gets new ones in the next round.
    report: object = error.failure_report
    return not isinstance(report, FailureReport) or not report.recoverable


def _own_frames(error: BaseException) -> TracebackType | None:
    """Return an error's traceback from the user's first line on; the way to it is ours."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__package__") in _OURS:
        trace = trace.tb_next
    return trace or error.__traceback__


def _writable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def metrics_of(error: Mapping[str, Any], healing_error: str | None) -> dict[str, Any]:
    """Return what an attempt's ``metrics`` say about its failure."""
    metrics: dict[str, Any] = {"error_category": error.get("category", "UNKNOWN")}
    if not error.get("recoverable", True):
        metrics["recoverable"] = False
    if healing_error is not None:
        metrics["healing_error"] = healing_error
    return metrics
