"""What is recorded of a workflow's run beside its steps. Pure: makes entries and reads them."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

from maestro_hive.kernel.errors import CorruptionError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.records import Entry, EntryKind, NewEntry
from maestro_hive.maestro.state.run_state import facts_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from maestro_hive.maestro.state.codec import Encoded

_LONGEST_NAME = 128
SUCCESS, FAILED, CANCELLED = "success", "failed", "cancelled"
RUNNING, WAITING = "running", "waiting"
#: What a wait is for.
SLEEP, ANSWER = "sleep", "answer"


class Input(NamedTuple):
    """What a workflow is called with, and what tells that call from others."""

    workflow: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    encoded: Encoded
    identity: bytes
    #: The workflow's parameters, in order, with stars as in its signature.
    parameters: tuple[str, ...] = ()


def make_input(
    workflow: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    parameters: tuple[str, ...] = (),
) -> Input:
    """Return a workflow's input; it must have a form in JSON, since a resumed run is given it."""
    encoded = codec.encode_call(args, kwargs, f"the input of {workflow}")
    return input_of(workflow, encoded, parameters)._replace(args=args, kwargs=kwargs)


def input_of(workflow: str, encoded: Encoded, parameters: tuple[str, ...]) -> Input:
    """Return an input as it is kept, without the values themselves."""
    identity = identity_of("run", workflow, encoded.sha256)
    return Input(workflow, (), {}, encoded, identity, parameters)


def identity_of(*parts: str | bytes) -> bytes:
    """Return what tells one thing in a run from others."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(b"%d:" % len(data) + data)
    return digest.digest()


def begun(given: Input, **facts: Any) -> NewEntry:
    """Return the first entry of a run: what it is called with."""
    known = {"workflow": given.workflow, "parameters": list(given.parameters)}
    told = codec.dump_canonical({**known, **_without_none(facts)})
    return NewEntry(EntryKind.RUN_BEGUN, facts=told, value=given.encoded, identity=given.identity)


def read_input(entry: Entry, load: Callable[[Entry], bytes | None]) -> Input:
    """Return the input that a run was begun with."""
    data, workflow = load(entry), str(facts_of(entry).get("workflow", ""))
    if data is None or entry.sha256 is None or entry.identity is None:
        raise CorruptionError(f"a run of {workflow} does not say what it was called with")
    given = codec.decode(data, "input")
    encoded = codec.Encoded(data, entry.sha256)
    args, kwargs, names = tuple(given["args"]), given["kwargs"], parameters_of(entry)
    return Input(workflow, args, kwargs, encoded, entry.identity, names)


def parameters_of(entry: Entry) -> tuple[str, ...]:
    """Return the names of the parameters of the workflow that began a run."""
    return tuple(facts_of(entry).get("parameters", ()))


def ended(
    status: str,
    *,
    value: Encoded | None = None,
    error: dict[str, Any] | None = None,
    reason: str | None = None,
) -> NewEntry:
    """Return the last entry of a run: how it ended."""
    facts = _without_none({"status": status, "error": error, "reason": reason})
    return NewEntry(
        EntryKind.RUN_ENDED, facts=codec.dump_canonical(facts), value=value, family="result"
    )


def wait_begun(identity: bytes, name: str, what: str, **facts: Any) -> NewEntry:
    """Return what is recorded when a workflow begins to wait."""
    told = _without_none({"name": name, "what": what, **facts})
    return NewEntry(EntryKind.WAIT_BEGUN, facts=codec.dump_canonical(told), identity=identity)


def asks_a_person(entry: NewEntry) -> bool:
    """Tell whether this wait is over only when somebody answers."""
    return bool(entry.facts) and codec.parse(entry.facts or b"{}").get("what") == ANSWER


def wait_ended(
    identity: bytes, name: str, how: str, value: Encoded | None = None, **facts: Any
) -> NewEntry:
    """Return what is recorded when a wait is over."""
    told = _without_none({"name": name, "how": how, **facts})
    return NewEntry(
        EntryKind.WAIT_ENDED, facts=codec.dump_canonical(told), value=value, identity=identity
    )


def child_id(parent: str, workflow: str, identity: bytes) -> str:
    """Return a child's name, which no child of another parent has."""
    own = hashlib.sha256(parent.encode() + b"/" + identity).hexdigest()
    name = f"{parent}.{workflow}-{own[:16]}"
    return name if len(name) <= _LONGEST_NAME else f"{parent[:80]}.{own[:32]}"


def child_begun(identity: bytes, run_id: str, workflow: str) -> NewEntry:
    """Return what is recorded when a workflow starts another as its child."""
    facts = codec.dump_canonical({"run_id": run_id, "workflow": workflow})
    return NewEntry(EntryKind.CHILD_BEGUN, facts=facts, identity=identity)


def _without_none(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value is not None}
