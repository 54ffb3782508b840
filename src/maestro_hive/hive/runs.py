"""The entries of a run other than those of its steps, and runs as listings show them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from maestro_hive.hive.errors import RunCancelledError, RunFailedError, UnknownRunError
from maestro_hive.kernel.errors import ConfigurationError, CorruptionError
from maestro_hive.maestro.state import codec
from maestro_hive.maestro.state.projections import facts_of, fold
from maestro_hive.maestro.state.records import EntryKind, NewEntry
from maestro_hive.maestro.state.views import OVER, STOPPED, effective_status

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from maestro_hive.maestro.state.codec import Encoded, EncodedCall
    from maestro_hive.maestro.state.projections import RunState
    from maestro_hive.maestro.state.records import Entry, RunRecord
    from maestro_hive.maestro.state.store import Store

_MAX_ID = 128
SUCCESS, FAILED, CANCELLED = "success", "failed", "cancelled"
RUNNING, WAITING = "running", "waiting"
#: The kinds of waits.
SLEEP, ANSWER = "sleep", "answer"


class Input(NamedTuple):
    """The input of a workflow: its arguments, encoded, and the identity of the call."""

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
    """Return a workflow's input; raise if it cannot be encoded: a resumed run is called with it."""
    call = codec.encode_call(args, kwargs, f"the input of {workflow}")
    return input_of(workflow, call, parameters)._replace(args=args, kwargs=kwargs)


def input_of(workflow: str, call: EncodedCall, parameters: tuple[str, ...]) -> Input:
    """Return an input as it is recorded, without the values themselves."""
    identity = identity_of("run", workflow, call.digest)
    return Input(workflow, (), {}, call.value, identity, parameters)


def identity_of(*parts: str | bytes) -> bytes:
    """Return the identity of a part of a run: the digest of these parts."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(b"%d:" % len(data) + data)
    return digest.digest()


def started(given: Input, **facts: Any) -> NewEntry:
    """Return the first entry of a run, with its input."""
    known = {"workflow": given.workflow, "parameters": list(given.parameters)}
    made = codec.dump_canonical({**known, **_without_none(facts)})
    return NewEntry(EntryKind.RUN_STARTED, facts=made, value=given.encoded, identity=given.identity)


def read_input(entry: Entry, load: Callable[[Entry], bytes | None]) -> Input:
    """Return the input that a run was started with."""
    data, workflow = load(entry), str(facts_of(entry).get("workflow", ""))
    if data is None or entry.sha256 is None or entry.identity is None:
        raise CorruptionError(f"a run of {workflow} has no recorded input")
    given = codec.decode(data, "input")
    encoded = codec.Encoded(data, entry.sha256)
    args, kwargs, names = tuple(given["args"]), given["kwargs"], parameters_of(entry)
    return Input(workflow, args, kwargs, encoded, entry.identity, names)


def parameters_of(entry: Entry) -> tuple[str, ...]:
    """Return the names of the parameters of the workflow that a run was started with."""
    return tuple(facts_of(entry).get("parameters", ()))


def ended(
    status: str,
    *,
    value: Encoded | None = None,
    error: dict[str, Any] | None = None,
    reason: str | None = None,
) -> NewEntry:
    """Return the last entry of a run, with its outcome."""
    facts = _without_none({"status": status, "error": error, "reason": reason})
    return NewEntry(
        EntryKind.RUN_ENDED, facts=codec.dump_canonical(facts), value=value, family="result"
    )


def wait_started(identity: bytes, name: str, what: str, **facts: Any) -> NewEntry:
    """Return the entry of the start of a wait."""
    made = _without_none({"name": name, "what": what, **facts})
    return NewEntry(EntryKind.WAIT_STARTED, facts=codec.dump_canonical(made), identity=identity)


def asks_a_person(entry: NewEntry) -> bool:
    """Return whether this entry starts a wait for an answer."""
    return bool(entry.facts) and codec.parse(entry.facts or b"{}").get("what") == ANSWER


def wait_ended(
    identity: bytes, name: str, how: str, value: Encoded | None = None, **facts: Any
) -> NewEntry:
    """Return the entry of the end of a wait."""
    made = _without_none({"name": name, "how": how, **facts})
    return NewEntry(
        EntryKind.WAIT_ENDED, facts=codec.dump_canonical(made), value=value, identity=identity
    )


def child_id(parent: str, workflow: str, identity: bytes) -> str:
    """Return a child's run id; it differs from those of all other parents' children."""
    own = hashlib.sha256(parent.encode() + b"/" + identity).hexdigest()
    name = f"{parent}.{workflow}-{own[:16]}"
    return name if len(name) <= _MAX_ID else f"{parent[:80]}.{own[:32]}"


def child_started(identity: bytes, run_id: str, workflow: str) -> NewEntry:
    """Return the entry of the start of a child."""
    facts = codec.dump_canonical({"run_id": run_id, "workflow": workflow})
    return NewEntry(EntryKind.CHILD_STARTED, facts=facts, identity=identity)


def _without_none(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if value is not None}


# --- reading ------------------------------------------------------------------------------------


STATUSES = ("pending", RUNNING, WAITING, *OVER, STOPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """One run, as listings show it."""

    run_id: str
    workflow: str
    #: pending, running, waiting, success, failed, cancelled, or stopped: no process executes it.
    status: str
    created_at: datetime
    updated_at: datetime


def find_run(store: Store, run_id: str) -> RunRecord:
    """Return a run's record; raise if there is none."""
    found = store.run(run_id)
    if found is None:
        raise UnknownRunError(run_id, store.location)
    return found


def read_run(store: Store, run_id: str) -> RunState:
    """Return a run's state, folded from its entries; raise if there is no such run."""
    return fold(store.entries(find_run(store, run_id).id), store.load)


def list_runs(
    store: Store, status: str | None = None, workflow: str | None = None, limit: int | None = None
) -> list[RunInfo]:
    """Return runs, newest first."""
    if status is not None and status not in STATUSES:
        raise ConfigurationError(
            f"{status!r} is not a status of a run; the statuses are {', '.join(STATUSES)}"
        )
    if limit is not None and limit < 0:
        raise ConfigurationError(f"the limit is {limit}, and must be 0 or more")
    leased = store.run_leases()
    # A run that a process executes is shown as running, whatever was recorded last; without one, a
    # run recorded as running is shown as stopped.
    recorded = {RUNNING: None, STOPPED: RUNNING}.get(status, status) if status else None
    records = store.runs(
        status=recorded, workflow=workflow, limit=limit if status is None else None
    )
    shown = (_info(record, record.name in leased) for record in records)
    found = [info for info in shown if status in (None, info.status)]
    return found if limit is None else found[:limit]


def run_info(store: Store, run_id: str) -> RunInfo:
    """Return one run as listings show it."""
    return _info(find_run(store, run_id), run_id in store.run_leases())


def _info(record: RunRecord, is_leased: bool) -> RunInfo:
    return RunInfo(
        run_id=record.name,
        workflow=record.workflow,
        status=effective_status(record.workflow, record.status, held=is_leased),
        created_at=record.created_at,
        updated_at=record.updated_at,
    )


def ended_state(store: Store, run_id: str) -> RunState | None:
    """Return a run's state if it has ended; None if it has not, or if there is no such run."""
    record = store.run(run_id)
    if record is None or record.status not in OVER:
        return None
    state = fold(store.entries(record.id), store.load)
    return state if state.ended is not None else None


def outcome(run_id: str, ended: Entry, load: Callable[[Entry], bytes | None]) -> Any:
    """Return the recorded result; raise if the run failed, or was cancelled."""
    facts = facts_of(ended)
    match facts.get("status"):
        case "success":
            data = load(ended)
            return None if data is None else codec.decode(data, f"the result of run {run_id}")
        case "cancelled":
            raise RunCancelledError(run_id, str(facts.get("reason", "")))
        case _:
            raise failure(run_id, facts.get("error", {}))


def failure(run_id: str, error: dict[str, Any]) -> RunFailedError:
    """Return a failure as it was recorded, with its traceback as a note."""
    failed = RunFailedError(run_id, error)
    if failed.error_traceback:
        failed.add_note(f"It failed at:\n{failed.error_traceback}")
    return failed
