"""The entries of a run other than those of its steps, and runs as listings show them."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from maestro_hive.engine.errors import BudgetExceeded
from maestro_hive.hive.errors import RunCancelledError, RunFailedError, UnknownRunError
from maestro_hive.kernel.errors import ConfigurationError, CorruptionError
from maestro_hive.maestro.state import codec, records
from maestro_hive.maestro.state.budgets import refused_by
from maestro_hive.maestro.state.projections import facts_of, fold
from maestro_hive.maestro.state.records import EntryKind, NewEntry
from maestro_hive.maestro.state.views import OVER, STATUSES, STOPPED, shown_status

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from maestro_hive.maestro.state.codec import Encoded, EncodedCall
    from maestro_hive.maestro.state.projections import RunState
    from maestro_hive.maestro.state.records import Entry, RunRecord
    from maestro_hive.maestro.state.store import Store
    from maestro_hive.maestro.state.strict_json import Json

_MAX_ID = 128
SUCCESS, FAILED, CANCELLED = "success", "failed", "cancelled"
PENDING, RUNNING, WAITING = "pending", "running", "waiting"
BANKRUPT = records.BANKRUPT
#: The kinds of waits.
SLEEP, ANSWER, TIMEOUT, ESCALATION = "sleep", "answer", "timeout", "escalation"


class Input(NamedTuple):
    """The input of a workflow: its arguments, encoded, and the identity of the call."""

    workflow: str
    args: tuple[object, ...]
    kwargs: dict[str, object]
    encoded: Encoded
    identity: bytes
    #: The workflow's parameters, in order, with stars as in its signature.
    parameters: tuple[str, ...] = ()
    #: The shapes of those parameters that declare a type, by name.
    types: Mapping[str, Json] = MappingProxyType({})


def make_input(
    workflow: str,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    parameters: tuple[str, ...] = (),
    types: Mapping[str, Json] = MappingProxyType({}),
) -> Input:
    """Return a workflow's input; raise if it cannot be encoded: a resumed run is called with it."""
    call = codec.encode_call(args, kwargs, f"the input of {workflow}")
    return input_of(workflow, call, parameters, types)._replace(args=args, kwargs=kwargs)


def input_of(
    workflow: str, call: EncodedCall, parameters: tuple[str, ...], types: Mapping[str, Json]
) -> Input:
    """Return an input as it is recorded, without the values themselves."""
    identity = identity_of("run", workflow, call.digest)
    return Input(workflow, (), {}, call.value, identity, parameters, types)


def identity_of(*parts: str | bytes) -> bytes:
    """Return the identity of a part of a run: the digest of these parts."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(b"%d:" % len(data) + data)
    return digest.digest()


def _entry(
    kind: EntryKind,
    facts: dict[str, Json],
    value: Encoded | None = None,
    *,
    identity: bytes | None = None,
    family: str = "",
) -> NewEntry:
    """Return an entry with those facts that are not None."""
    known = {name: fact for name, fact in facts.items() if fact is not None}
    text = codec.dump_canonical(known)
    return NewEntry(kind, facts=text, value=value, identity=identity, family=family)


def started(given: Input, **facts: Json) -> NewEntry:
    """Return the first entry of a run, with its input."""
    known = {"workflow": given.workflow, "parameters": list(given.parameters), **facts}
    if given.types:
        known["types"] = dict(given.types)
    return _entry(EntryKind.RUN_STARTED, known, given.encoded, identity=given.identity)


def read_input(entry: Entry, load: Callable[[Entry], bytes | None]) -> Input:
    """Return the input that a run was started with."""
    given = recorded_input(entry, load)
    match codec.decode(given.encoded.data, "input"):
        case {"args": list(args), "kwargs": dict(kwargs)}:
            return given._replace(args=tuple(args), kwargs=kwargs)
        case _:
            raise CorruptionError(f"what a run of {given.workflow} has as its input is not a call")


def recorded_input(entry: Entry, load: Callable[[Entry], bytes | None]) -> Input:
    """Return the input that a run was started with, without the values: their classes may be unknown."""
    data, workflow = load(entry), str(facts_of(entry).get("workflow", ""))
    if data is None or entry.sha256 is None or entry.identity is None:
        raise CorruptionError(f"a run of {workflow} has no recorded input")
    encoded = codec.Encoded(data, entry.sha256)
    return Input(workflow, (), {}, encoded, entry.identity, parameters_of(entry), types_of(entry))


def is_same_call(one: Input, other: Input) -> bool:
    """Return whether two inputs are the same call, one perhaps by place and the other by name.

    Where the code of a workflow is not known, its arguments are recorded as they are given.
    """
    if one.workflow != other.workflow:
        return False
    if one.identity == other.identity:
        return True
    names = one.parameters or other.parameters
    return bool(names) and _by_name(one, names) == _by_name(other, names)


def _by_name(given: Input, names: tuple[str, ...]) -> bytes:
    """Return the identity of a call with its arguments by name, as far as they have one."""
    tree = codec.parse(given.encoded.data, "input", depth=codec.DOCUMENT_DEPTH)
    places = list(takewhile(lambda name: not name.startswith("*"), names))
    named = dict(zip(places, tree["args"], strict=False))
    call = {"args": tree["args"][len(named) :], "kwargs": {**tree["kwargs"], **named}}
    return codec.call_of_tree(call).digest


def parameters_of(entry: Entry) -> tuple[str, ...]:
    """Return the names of the parameters of the workflow that a run was started with."""
    return tuple(facts_of(entry).get("parameters", ()))


def types_of(entry: Entry) -> Mapping[str, Json]:
    """Return the shapes of those parameters, as far as they declare a type."""
    types: Mapping[str, Json] = facts_of(entry).get("types", {})
    return types


def ended(
    status: str,
    *,
    value: Encoded | None = None,
    error: Json = None,
    reason: str | None = None,
    failed: list[str] | None = None,
) -> NewEntry:
    """Return the last entry of a run, with its outcome; ``failed`` are the calls it failed by."""
    facts = {"status": status, "error": error, "reason": reason, "failed": failed or None}
    return _entry(EntryKind.RUN_ENDED, facts, value, family="result")


def wait_started(
    identity: bytes, name: str, what: str, about: Encoded | None = None, **facts: Json
) -> NewEntry:
    """Return the entry of the start of a wait."""
    known = {"name": name, "what": what, **facts}
    return _entry(EntryKind.WAIT_STARTED, known, about, identity=identity)


def asks_a_person(entry: NewEntry) -> bool:
    """Return whether this entry starts a wait for an answer, or for what to do about a failure."""
    return codec.parse(entry.facts or b"{}").get("what") in (ANSWER, ESCALATION)


def wait_ended(
    identity: bytes, name: str, how: str, value: Encoded | None = None, **facts: Json
) -> NewEntry:
    """Return the entry of the end of a wait."""
    known = {"name": name, "how": how, **facts}
    return _entry(EntryKind.WAIT_ENDED, known, value, identity=identity)


def new_id(workflow: str) -> str:
    """Return the id of a run that is given none."""
    return f"{workflow[:100]}-{secrets.token_hex(6)}"


def child_id(parent: str, workflow: str, identity: bytes) -> str:
    """Return a child's run id; it differs from those of all other parents' children."""
    own = hashlib.sha256(parent.encode() + b"/" + identity).hexdigest()
    name = f"{parent}.{workflow}-{own[:16]}"
    return name if len(name) <= _MAX_ID else f"{parent[:80]}.{own[:32]}"


def child_started(identity: bytes, run_id: str, workflow: str) -> NewEntry:
    """Return the entry of the start of a child."""
    facts = {"run_id": run_id, "workflow": workflow}
    return _entry(EntryKind.CHILD_STARTED, facts, identity=identity)


def child_ended(
    identity: bytes, run_id: str, workflow: str, status: str, *, cancelled: bool = False
) -> NewEntry:
    """Return the entry of the end of a child; ``cancelled`` by its parent's workflow, or not."""
    facts = {"run_id": run_id, "workflow": workflow, "status": status}
    known = {**facts, "cancelled": cancelled or None}
    return _entry(EntryKind.CHILD_ENDED, known, identity=identity)


def child_copied(identity: bytes, run_id: str, workflow: str, result: Encoded) -> NewEntry:
    """Return the entry of the end of another run's child, with its result: for a fork."""
    facts = {"run_id": run_id, "workflow": workflow, "status": SUCCESS, "copied": True}
    return _entry(EntryKind.CHILD_ENDED, facts, result, identity=identity)


def step_failed(identity: bytes, name: str, **facts: Json) -> NewEntry:
    """Return the entry of a step that failed for good."""
    return _entry(EntryKind.STEP_FAILED, {"name": name, **facts}, identity=identity)


def step_cancelled(identity: bytes, name: str) -> NewEntry:
    """Return the entry of a step that its workflow cancelled."""
    return _entry(EntryKind.STEP_CANCELLED, {"name": name}, identity=identity)


def value_recorded(identity: bytes, name: str, value: Encoded) -> NewEntry:
    """Return the entry of a time or a random value that a workflow got."""
    return _entry(EntryKind.VALUE_RECORDED, {"name": name}, value, identity=identity)


def cancel_requested(reason: str, wait: Json) -> NewEntry:
    """Return the entry of a cancellation, which reaches the workflow where it is recorded."""
    return _entry(EntryKind.CANCEL_REQUESTED, {"reason": reason, "wait": wait})


def suspended(error: Exception) -> NewEntry:
    """Return the entry of a suspension: why no process executes the run."""
    facts: dict[str, Json] = {"error": {"type": type(error).__name__, "message": str(error)}}
    if isinstance(error, BudgetExceeded):
        facts["account"] = error.account
    return _entry(EntryKind.RUN_SUSPENDED, facts)


def resumed(state: RunState) -> NewEntry | None:
    """Return the entry of a resumption, with what completed steps spent before; None if nothing."""
    done = [step for step in state.steps.values() if step.tokens and step.completed is not None]
    tokens = sum(sum((step.tokens or {}).values()) for step in done)
    usd = sum(step.usd for step in done)
    if not tokens and not usd:
        return None
    facts = {"saved_tokens": tokens, "saved_usd": round(usd, 6)}
    return _entry(EntryKind.RUN_RESUMED, facts)


def is_same_suspension(last: Entry, new: NewEntry) -> bool:
    """Return whether a run was suspended by the same before: numbers, such as times, may differ."""
    if last.kind != EntryKind.RUN_SUSPENDED:
        return False
    before, now = (re.sub(rb"[0-9.]+", b"#", facts or b"") for facts in (last.facts, new.facts))
    return before == now and refused_by(last.facts) == refused_by(new.facts)


# --- reading ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """One run, as listings show it."""

    run_id: str
    workflow: str
    #: pending, running, waiting, success, failed, cancelled, stopped: no process executes it; or
    #: bankrupt: a budget has stopped it.
    status: str
    created_at: datetime
    updated_at: datetime
    #: The run that started it as its child; None for one that was started by itself.
    parent: str | None = None
    #: Whether a living process executes it now.
    executed: bool = False


def find_run(store: Store, run_id: str) -> RunRecord:
    """Return a run's record; raise if there is none."""
    found = store.run(run_id)
    if found is None:
        raise UnknownRunError(run_id, store.location)
    return found


def read_run(store: Store, run_id: str) -> RunState:
    """Return a run's state, folded from its entries; raise if there is no such run."""
    return fold(store.entries(find_run(store, run_id).id), store.load)


class LatestRun:
    """A run as it is recorded; ``refresh`` adds what came since, at the cost of that alone."""

    def __init__(self, store: Store, run_id: str) -> None:
        self.run_id = run_id
        self._store = store
        self._number = find_run(store, run_id).id
        self.state = fold(store.entries(self._number), store.load)

    def refresh(self) -> RunState:
        """Return its state of now: in a transaction, nothing changes it before the end of that."""
        store = self._store
        if find_run(store, self.run_id).id != self._number:  # purged, and started again
            raise UnknownRunError(self.run_id, store.location)
        self.state.add_all(store.entries(self._number, self.state.seq), store.load)
        return self.state


def list_runs(
    store: Store,
    status: str | None = None,
    workflow: str | None = None,
    limit: int | None = None,
    *,
    roots: bool = False,
) -> list[RunInfo]:
    """Return runs, newest first; with ``roots`` only those that are no children of others."""
    if status is not None and status not in STATUSES:
        raise ConfigurationError(
            f"{status!r} is not a status of a run; the statuses are {', '.join(STATUSES)}"
        )
    if limit is not None and limit < 0:
        raise ConfigurationError(f"the limit is {limit}, and must be 0 or more")
    held = store.run_leases()
    # A run that a process executes is shown as running, whatever was recorded last; without one, a
    # run recorded as running is shown as stopped.
    recorded = {RUNNING: None, STOPPED: RUNNING}.get(status, status) if status else None
    records = store.runs(
        status=recorded,
        workflow=workflow,
        limit=limit if status is None else None,
        roots=roots,
    )
    shown = (
        RunInfo(
            run_id=record.name,
            workflow=record.workflow,
            status=shown_status(record, held),
            created_at=record.created_at,
            updated_at=record.updated_at,
            parent=record.parent,
            executed=record.name in held,
        )
        for record in records
    )
    return [info for info in shown if status in (None, info.status)][:limit]


def ended_state(store: Store, run_id: str) -> RunState | None:
    """Return a run's state if it has ended; None if it has not, or if there is no such run."""
    record = store.run(run_id)
    if record is None or record.status not in OVER:
        return None
    state = fold(store.entries(record.id), store.load)
    return state if state.ended is not None else None


def outcome(run_id: str, ended: Entry, load: Callable[[Entry], bytes | None]) -> Any:
    """Return the recorded result; raise if the run failed, or was cancelled."""
    return outcome_of(run_id, ended, load)()


def outcome_of(
    run_id: str, ended: Entry, load: Callable[[Entry], bytes | None]
) -> Callable[[], Any]:
    """Return what returns the recorded result, or raises how the run ended; read here, if it can be."""
    facts = facts_of(ended)
    match facts.get("status"):
        case "success":
            data = load(ended)
            result = None if data is None else codec.decode(data, f"the result of run {run_id}")
            return lambda: result
        case "cancelled":
            return partial(_raise, RunCancelledError(run_id, str(facts.get("reason", ""))))
        case _:
            return partial(_raise, failure(run_id, facts.get("error", {})))


def _raise(error: Exception) -> NoReturn:
    raise error


def failure(run_id: str, error: Json) -> RunFailedError:
    """Return a failure as it was recorded: its cause is what the workflow raised."""
    from maestro_hive.engine.recorded_errors import error_from

    failed = RunFailedError(run_id, error)
    failed.__cause__ = error_from(error)
    return failed
