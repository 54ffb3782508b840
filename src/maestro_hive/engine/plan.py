"""Which step a call is: planned once, its input encoded once and hashed once.

A step is its persona, its name and its input, or its key; of equal calls in a workflow each is a
step of its own, by its position. Where it stands among other steps does not count.
"""

from __future__ import annotations

import hashlib
import inspect
import warnings
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from maestro_hive.kernel.errors import ConfigurationError, EncodeError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.projections import facts_of
from maestro_hive.maestro.state.records import EntryKind, NewEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from maestro_hive.engine.parameters import Hidden, Parameters
    from maestro_hive.maestro.state.codec import Encoded, EncodedCall
    from maestro_hive.maestro.state.projections import RunState

#: Encodes the arguments of a call.
EncodeCall: TypeAlias = "Callable[[tuple[Any, ...], dict[str, Any]], EncodedCall]"

#: What a task is called whose caller gave no name; a durable step must have one.
UNNAMED = "unnamed_task"


class UnencodableInputWarning(UserWarning):
    """What identifies a call cannot be encoded, so that the order of such calls counts."""


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
    #: The digest of persona, name and input, or key; the identity, unless its position counts.
    content: bytes = b""
    #: Who planned it, and of what; None where no other record can be meant.
    source: tuple[Planner, tuple[Any, ...], dict[str, Any]] | None = None

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """The contents by which earlier code recorded the same call; computed when asked for."""
        if self.source is None:
            return ()
        planner, args, kwargs = self.source
        return planner.alternatives(args, kwargs)

    def at(self, identity: bytes) -> Plan:
        """Return the plan of a call that is recorded by another identity."""
        return self._replace(identity=identity)

    def occurrence(self, number: int) -> Plan:
        """Return the plan of the n-th of several equal calls."""
        facts = codec.dump_canonical({**codec.parse(self.facts), "occurrence": number})
        return self._replace(identity=numbered(self.identity, number), facts=facts)


class Alternative(NamedTuple):
    """Another content of the same call, and the defaults that hold if it is the same."""

    content: bytes
    #: Digits of the digests of the defaults of the arguments that it lacks, by name.
    added: Mapping[str, str]


def numbered(identity: bytes, number: int) -> bytes:
    """Return the identity of the n-th of several equal calls, from the second on."""
    return hashlib.sha256(identity + b"#%d" % number).digest()


def effect_key(run_id: str, identity: bytes) -> str:
    """Return the name of a step's effect for the outside world, the same in all attempts."""
    return hashlib.sha256(run_id.encode() + b"\0" + identity).hexdigest()[:32]


class EarlierCalls:
    """Finds the step that earlier code recorded for the same call, with fewer arguments.

    A record that lacks an argument is of the same call while the argument's default is what it was
    when the run first had it: in the first record of a step that has it, or of such a match.
    """

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._first: dict[str, dict[str, str]] | None = None

    def contents(self, plan: Plan) -> tuple[bytes, ...]:
        """Return the contents by which that step may be recorded."""
        found = plan.alternatives
        return tuple(each.content for each in found if self._were_added(plan, each.added))

    def match(self, plan: Plan, content: bytes) -> NewEntry | None:
        """Note that a step was found by a content; return the entry to record, if there is news."""
        first = self._first_defaults().setdefault(plan.family, {})
        added = {
            name: digest
            for each in plan.alternatives
            if each.content.startswith(content)
            for name, digest in each.added.items()
            if name not in first
        }
        if not added:
            return None
        first.update(added)
        facts = {"name": plan.name, "persona": plan.persona, "defaults": added}
        return NewEntry(EntryKind.ARGUMENTS_ADDED, facts=codec.dump_canonical(facts))

    def _were_added(self, plan: Plan, added: Mapping[str, str]) -> bool:
        first = self._first_defaults().get(plan.family, {})
        return all(first.get(name, digest) == digest for name, digest in added.items())

    def _first_defaults(self) -> dict[str, dict[str, str]]:
        if self._first is None:
            self._first = {}
            steps = [step.started for step in self._state.by_identity.values()]
            for entry in sorted([*steps, *self._state.arguments_added], key=attrgetter("seq")):
                facts = facts_of(entry)
                if facts.get("defaults"):
                    family = _family(facts["persona"], facts["name"])
                    known = self._first.get(family, {})
                    self._first[family] = {**facts["defaults"], **known}
        return self._first


def _family(persona: str, name: str) -> str:
    return f"{persona}/{name}"


class Planner:
    """Plans the steps of one persona and one name; ``options`` are recorded with each attempt.

    So is ``returns``, the shape of the result, where there is one.

    With ``parameters`` an input that cannot be encoded is an error; without, it is warned of.
    """

    __slots__ = (
        "_defaults",
        "_facts",
        "_family",
        "_name",
        "_parameters",
        "_persona",
        "_start",
        "_warned",
    )

    def __init__(
        self,
        persona: str,
        name: object,
        options: Mapping[str, Any] = MappingProxyType({}),
        parameters: Parameters | None = None,
        returns: Any = None,
    ) -> None:
        if not isinstance(name, str) or name in ("", UNNAMED):
            raise ConfigurationError(
                f"a durable step needs a name to be found by, and {name!r} is none;"
                " give execute() a task_name"
            )
        self._persona = persona
        self._name = name
        facts: dict[str, Any] = {"name": name, "persona": persona}
        self._facts = (codec.encode_flat(facts) or codec.encode(facts, "step")).data
        self._start = hashlib.sha256(self._facts)
        #: Digits of the digests of its defaults, by the names of the arguments.
        self._defaults = parameters.default_digests() if parameters is not None else {}
        more = {"options": dict(options), "defaults": self._defaults, "returns": returns}
        more = {name: each for name, each in more.items() if each}
        if more:  # of no importance to which step it is
            self._facts = codec.dump_canonical({**facts, **more})
        self._parameters = parameters
        self._family = _family(persona, name)
        self._warned = False

    def plan(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        key: str | None = None,
        store_input: bool = True,
        hidden: Hidden | None = None,
        encode: EncodeCall = codec.encode_call,
        place: Callable[[bytes], bytes] | None = None,
    ) -> Plan:
        """Return the plan of a call; ``encode`` may be the one for large values, in a thread.

        An empty ``key`` stands for the input. ``place`` makes an identity of its content, where the
        position of a call counts. ``hidden`` says which arguments are not stored; they count for
        the identity all the same.
        """
        digest = self._start.copy()
        encoded: Encoded | None = None
        try:
            call = encode(args, kwargs)
        except EncodeError as error:
            if not key and self._parameters is not None:
                raise self._parameters.unencodable(error) from error.__cause__
            if not key:
                self._warn(str(error))
                digest.update(_digest_of_rest(args, kwargs))
        else:
            encoded = call.value
            if not key:
                digest.update(call.digest)
        if key:
            digest.update(b"key" + key.encode())
        content = digest.digest()
        stored = encoded if store_input else None
        if stored is not None and hidden is not None:
            stored = self._without(hidden, args, kwargs, encode)
        return Plan(
            content if place is None else place(content),
            self._name,
            self._persona,
            self._facts,
            self._family,
            stored,
            encoded,
            content,
            None if key is not None or self._parameters is None else (self, args, kwargs),
        )

    def _without(
        self, hidden: Hidden, args: tuple[Any, ...], kwargs: dict[str, Any], encode: EncodeCall
    ) -> Encoded | None:
        """Return the input as it is recorded, without what is hidden."""
        return None if hidden.names is None else encode(*hidden.without(args, kwargs)).value

    def alternatives(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Alternative, ...]:
        """Return by which identities earlier code may have recorded the same call."""
        assert self._parameters is not None
        found: dict[bytes, Alternative] = {}
        for lacks, places, named in self._parameters.alternatives(args, kwargs):
            digest = self._start.copy()
            digest.update(codec.encode_call(places, named).digest)
            added = {name: self._defaults[name] for name in lacks if name in self._defaults}
            found.setdefault(digest.digest(), Alternative(digest.digest(), added))
        return tuple(found.values())

    def warn_of_tasks(self) -> None:
        """Warn that one name is used for tasks that carry other values."""
        self._warn("what its tasks carry is not part of it, and differs")

    def _warn(self, doubt: str) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"{self._name!r} of {self._persona!r} is identified by its name, by what of its input can"
            f" be encoded, and by the order of its calls: {doubt}. Give plain data, a key, or each its"
            " own name",
            UnencodableInputWarning,
            stacklevel=distance_to_user(),
        )


def _digest_of_rest(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Return the digest of those arguments that can be encoded."""

    def digest(value: object) -> str | None:
        try:
            return codec.canonical_digest(value).hex()
        except EncodeError:
            return None

    rest = [[digest(each) for each in args], {name: digest(each) for name, each in kwargs.items()}]
    return codec.canonical_digest(rest)


def distance_to_user() -> int:
    """Return how many calls up from the caller the first line outside of this package is."""
    frame, distance = inspect.currentframe(), 0
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("maestro_hive."):
        frame, distance = frame.f_back, distance + 1
    return distance
