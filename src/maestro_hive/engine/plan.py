"""Which step a call is: planned once, its input encoded once and hashed once.

A step is its persona, its name and its input, or its key; of equal calls in a workflow each
occurrence is a step of its own. Where it stands among other steps does not count.
"""

from __future__ import annotations

import hashlib
import inspect
import warnings
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from maestro_hive.kernel.errors import ConfigurationError, EncodeError
from maestro_hive.maestro.state import codec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from maestro_hive.maestro.state.codec import Encoded, EncodedCall

#: What a task is called whose caller gave no name; a durable step must have one.
UNNAMED = "unnamed_task"


class UnencodableInputWarning(UserWarning):
    """A step's input has no form in JSON, so its name alone says which step it is."""


class Plan(NamedTuple):
    """Which step is to be executed, and what is recorded of it."""

    identity: bytes
    name: str
    persona: str
    #: As JSON: what "attempt started" says of the step.
    facts: bytes
    #: Which earlier values the step's values may have grown from.
    family: str
    #: The encoded input as it is stored; None where it is not to be.
    input: Encoded | None
    #: The encoded input; None where it has no form in JSON.
    encoded: Encoded | None = None
    #: The options that are recorded; part of the facts, and not of the identity.
    options: Mapping[str, Any] = MappingProxyType({})

    def occurrence(self, number: int) -> Plan:
        """Return the plan of the n-th of several equal calls."""
        identity = hashlib.sha256(self.identity + b"#%d" % number).digest()
        facts = {"name": self.name, "occurrence": number, "persona": self.persona}
        if self.options:
            facts["options"] = dict(self.options)
        return self._replace(identity=identity, facts=codec.dump_canonical(facts))


def effect_key(run_id: str, identity: bytes) -> str:
    """Return the name of a step's effect for the outside world, the same in all attempts."""
    return hashlib.sha256(run_id.encode() + b"\0" + identity).hexdigest()[:32]


class Planner:
    """Plans the steps of one persona and one name; ``options`` are recorded with each attempt."""

    __slots__ = ("_facts", "_family", "_name", "_options", "_persona", "_start", "_warned")

    def __init__(
        self, persona: str, name: object, options: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        if not isinstance(name, str) or name in ("", UNNAMED):
            raise ConfigurationError(
                f"a durable step needs a name to be found by, and {name!r} is none;"
                " give execute() a task_name"
            )
        self._persona = persona
        self._name = name
        self._options = options
        facts: dict[str, Any] = {"name": name, "persona": persona}
        self._facts = codec.encode(facts, "step").data
        self._start = hashlib.sha256(self._facts)
        if options:  # of no importance to which step it is
            self._facts = codec.dump_canonical({**facts, "options": dict(options)})
        self._family = f"{persona}/{name}"
        self._warned = False

    def plan(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        key: str | None = None,
        store_input: bool = True,
        encode: Callable[[tuple[Any, ...], dict[str, Any]], EncodedCall] = codec.encode_call,
    ) -> Plan:
        """Return the plan of a call; ``encode`` may be the one for large values, in a thread."""
        digest = self._start.copy()
        encoded: Encoded | None = None
        try:
            call = encode(args, kwargs)
        except EncodeError as error:
            if key is None:
                self._warn(error)
        else:
            encoded = call.value
            if key is None:
                digest.update(call.digest)
        if key is not None:
            digest.update(b"key" + key.encode())
        return Plan(
            digest.digest(),
            self._name,
            self._persona,
            self._facts,
            self._family,
            encoded if store_input else None,
            encoded,
            self._options,
        )

    def _warn(self, error: EncodeError) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"{self._name!r} of {self._persona!r} is identified by its name alone: {error}."
            " Give plain data, or a key",
            UnencodableInputWarning,
            stacklevel=distance_to_user(),
        )


def distance_to_user() -> int:
    """Return how many calls up from the caller the first line outside of this package is."""
    frame, distance = inspect.currentframe(), 0
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("maestro_hive."):
        frame, distance = frame.f_back, distance + 1
    return distance
