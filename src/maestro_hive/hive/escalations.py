"""Escalations from outside: which there are, answering one, and taking answers from tickets.

An answer is feedback for another set of attempts, the result itself, or that nobody can help.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from maestro_hive.engine import outbox
from maestro_hive.engine.outbox import ESCALATIONS, StoredEscalation, found_escalation
from maestro_hive.engine.tickets import TicketMissingError
from maestro_hive.hive.errors import AlreadyAnsweredError, UnknownRunError
from maestro_hive.hive.escalating import FEEDBACK, GIVE_UP, RESULT, Reply
from maestro_hive.hive.inbox import Answer, Inbox, Messages, check_text
from maestro_hive.hive.resolving import result_tree, result_tree_in_words
from maestro_hive.hive.runs import LatestRun
from maestro_hive.kernel.errors import ConfigurationError, RunLeasedError
from maestro_hive.kernel.logs import get_log
from maestro_hive.maestro.state.projections import facts_of, fold, readable
from maestro_hive.maestro.state.views import OVER, run_status

if TYPE_CHECKING:
    from datetime import datetime

    from maestro_hive.engine.delivery import Delivery
    from maestro_hive.engine.tickets import Comment
    from maestro_hive.maestro.state.projections import RunState
    from maestro_hive.maestro.state.store import Reader, Store
    from maestro_hive.maestro.state.strict_json import Json

logger = get_log(__name__)

#: The status of an escalation whose ticket is yet to be told how it ended.
OVER_STATUS = "over"


@dataclass(frozen=True, slots=True, kw_only=True)
class EscalationView:
    """An escalation, as it is listed.

    ``status`` is waiting (for a person), answered (the run takes the answer when it is resumed),
    failed (no run waits: its call raises the failure until it is retried) or over (its ticket is yet
    to be told).
    """

    id: str
    status: str
    run_id: str | None
    workflow: str | None
    step: str
    persona: str
    summary: str
    description: str
    asked_at: datetime
    #: The shape of the step's result, where it declares one.
    shape: Json
    fingerprint: str
    #: Where a person was told of it: a ticket system, None if it waits locally.
    system: str | None
    delivered: bool
    ticket: str | None
    address: str | None
    #: Why it is not delivered, or why an answer on the ticket was not taken.
    problem: str | None


def list_escalations(reader: Reader, run_id: str | None = None) -> list[EscalationView]:
    """Return the escalations that wait for a person, or whose tickets are yet to be told; oldest first."""
    found = sorted(ESCALATIONS.all(reader).values(), key=lambda each: (each.at, each.id))
    shown = [_view(reader, each) for each in found if run_id in (None, each.run_id)]
    return [each for each in shown if each.status != OVER_STATUS or each.ticket is not None]


def _view(reader: Reader, record: StoredEscalation) -> EscalationView:
    case, status = record.told_case, _status(reader, record)
    return EscalationView(
        id=record.id,
        status=status,
        run_id=record.run_id,
        workflow=record.workflow or None,
        step=record.step,
        persona=record.persona,
        summary=case.summary,
        description=case.description,
        asked_at=record.asked_at,
        shape=record.shape,
        fingerprint=case.fingerprint,
        system=record.system,
        delivered=record.delivered,
        ticket=record.ticket,
        address=record.address,
        problem=None if status == "answered" else record.problem,
    )


def _status(reader: Reader, record: StoredEscalation) -> str:
    if record.outcome is not None or _ended(reader, record) is not None:
        return OVER_STATUS
    if record.question is None:
        return "failed"
    document = reader.document("$inbox", str(record.run_id))
    messages = Messages.decode(None if document is None else document.value)
    return "answered" if messages.to(bytes.fromhex(record.question)) is not None else "waiting"


def _ended(reader: Reader, record: StoredEscalation) -> str | None:
    """Return how an escalation ended by what its run recorded; None if it is open."""
    if record.run_id is None:
        return None
    run = reader.run(record.run_id)
    if run is None:
        return f"Run {record.run_id} was deleted."
    state = fold(reader.entries(run.id), reader.load)
    if record.question is None:
        is_open = bytes.fromhex(record.identity) in state.escalated
        return None if is_open else f"{record.step} is executed again."
    identity = bytes.fromhex(record.question)
    answer = state.answers.get(identity)
    if answer is not None and facts_of(answer).get("how") == "answered":
        return Reply.read(reader.load(answer), facts_of(answer).get("by")).outcome
    if run.status in OVER:
        return f"Run {record.run_id} ended: {run.status}."
    return None if identity in state.questions else f"{record.step} is not waited for any more."


def end_if_over(store: Store, record: StoredEscalation) -> bool:
    """Note that an escalation is over whose run went on without noting it; False if it is open."""
    ended = _ended(store, record)
    if ended is not None:
        outbox.apply(store, outbox.ended(record.id, ended))
    return ended is not None


# --- answering ------------------------------------------------------------------------------------


def give_feedback(store: Store, name: str, text: str, *, by: str | None = None) -> StoredEscalation:
    """Have the step attempted again, with this text as feedback."""
    check_text("the feedback", text)
    if not text.strip():
        raise ConfigurationError(
            "the feedback is empty; say what to do differently, give the result (--result), or give"
            " up (--give-up)"
        )
    return _post(store, _open(store, name), FEEDBACK, text, by)


def give_result(store: Store, name: str, value: Any, *, by: str | None = None) -> StoredEscalation:
    """Give the result of the step, of its declared type: its run goes on with that."""
    record = _open(store, name)
    tree = result_tree(record.shape or {}, value, f"the result of {record.step}")
    return _post(store, record, RESULT, tree, by)


def give_result_in_words(
    store: Store, name: str, text: str, *, by: str | None = None
) -> StoredEscalation:
    """Give the result of the step; its declared type decides what the typed text means."""
    record = _open(store, name)
    way_out = f"hive.answer_escalation({name!r}, result=value)"
    tree = result_tree_in_words(record.shape or {}, text, f"the result of {record.step}", way_out)
    return _post(store, record, RESULT, tree, by)


def give_up(
    store: Store, name: str, reason: str = "", *, by: str | None = None
) -> StoredEscalation:
    """Have the workflow get the error of the step."""
    check_text("the reason", reason)
    return _post(store, _open(store, name), GIVE_UP, reason, by)


def _open(store: Store, name: str) -> StoredEscalation:
    record = found_escalation(store, name)
    if record is None:
        raise ConfigurationError(
            f"there is no open escalation {name!r}; `maestro escalations` lists them"
        )
    if record.question is None:
        raise ConfigurationError(
            f"escalation {name} is of {record.step}, which no run waits for"
            f"{_retried_by(record)}; it takes no answer"
        )
    return record


def _retried_by(record: StoredEscalation) -> str:
    if record.run_id is None:
        return ": it was executed without a workflow id"
    return f": retry it by `maestro retry {shlex.quote(record.run_id)}`"


def _post(
    store: Store, record: StoredEscalation, kind: str, value: Json, by: str | None
) -> StoredEscalation:
    """Post the answer to the run; in the transaction it is checked that it has none."""
    if by is not None:
        check_text("by", by)
    assert record.question is not None
    run_id, identity = str(record.run_id), bytes.fromhex(record.question)
    try:
        run = LatestRun(store, run_id)
    except UnknownRunError as error:
        raise ConfigurationError(f"escalation {record.id} has no run any more: {error}") from error
    name = _name_of(run.state, identity, record)
    given = Answer(name=name, value={kind: value}, by=by, question=record.question)

    def add(messages: Messages) -> None:
        with readable(run_id):
            _check_open(store, run.refresh(), messages, record)
        messages.answers.append(given)

    Inbox(store).post(run_id, add)
    return record


def _name_of(state: RunState, identity: bytes, record: StoredEscalation) -> str:
    asked = state.waits.get(identity)
    return record.step if asked is None else str(facts_of(asked).get("name"))


def _check_open(
    store: Store, state: RunState, messages: Messages, record: StoredEscalation
) -> None:
    """Raise if an escalation takes no answer: it has one, or its run does not wait for it."""
    assert record.question is not None
    run_id, identity = str(record.run_id), bytes.fromhex(record.question)
    waiting, ended = messages.to(identity), state.answers.get(identity)
    if waiting is not None:
        raise _answered(record, Reply.of(waiting.value, waiting.by))
    if ended is not None and facts_of(ended).get("how") == "answered":
        by = facts_of(ended).get("by")
        raise _answered(record, Reply.read(store.load(ended), by))
    if state.ended is not None:
        raise ConfigurationError(
            f"run {run_id!r} has ended ({run_status(state)}), and takes no answer"
        )
    if identity not in state.questions:
        raise ConfigurationError(
            f"run {run_id!r} does not wait for escalation {record.id} any more: it was retried, or its"
            " workflow cancelled the step"
        )


def _answered(record: StoredEscalation, reply: Reply) -> AlreadyAnsweredError:
    given = {reply.kind: reply.value}
    run_id, said = str(record.run_id), reply.in_words
    return AlreadyAnsweredError(run_id, record.step, record.id, given, reply.by, said)


# --- answers on tickets ---------------------------------------------------------------------------


async def sync_one(delivery: Delivery, record: StoredEscalation) -> bool:
    """Take the answer from a ticket that was resolved; return whether there was one."""
    if not record.delivered or record.ticket is None or not delivery.system.finds:
        return False
    try:
        async with delivery.leased(record.label):
            return await _sync(delivery, record)
    except RunLeasedError:
        return False  # another process does
    except TicketMissingError as error:
        gone = f"ticket {record.ticket} is gone: {error}; answer it by maestro answer {record.id}"
        await _note_problem(delivery, record, gone)
        return False
    except Exception as error:  # noqa: BLE001 - the user's own client
        logger.warning("ticket %s of escalation %s: %s", record.ticket, record.id, error)
        return False


async def _sync(delivery: Delivery, record: StoredEscalation) -> bool:
    assert record.ticket is not None
    if not (await delivery.system.ticket(record.ticket)).resolved:
        return False
    if record.question is None:  # no run waits for what the person says
        await delivery.in_store(lambda: outbox.update(delivery.store, record.id, lambda _: None))
        return True
    given = _answers(delivery, record, await delivery.system.comments(record.ticket))
    store, key = delivery.store, record.ticket
    if not given:
        problem = (
            f"{key} is resolved without a comment by an account that may answer"
            f" (ticket_answerers, or MAESTRO_TICKET_ANSWERERS); comment on it, or maestro answer {record.id}"
        )
    else:
        comment = given[-1]
        by = f"{comment.author} ({key})"
        try:
            await delivery.in_store(lambda: answer_by_text(store, record.id, comment.text, by=by))
        except AlreadyAnsweredError:
            return False
        except ConfigurationError as error:
            now = await delivery.in_store(lambda: found_escalation(store, record.id))
            if now is None or now.outcome is not None:
                return False  # it has just ended, by the same answer or another one
            problem = f"the comment on {key} is not taken: {error}"
        else:
            return True
    await _note_problem(delivery, record, problem)
    return False


async def _note_problem(delivery: Delivery, record: StoredEscalation, problem: str) -> None:
    """Record why an escalation still waits; it is logged once."""
    if problem != record.problem:
        logger.warning("escalation %s still waits: %s", record.id, problem)
        await delivery.in_store(
            lambda: outbox.update(
                delivery.store, record.id, lambda each: replace(each, problem=problem)
            )
        )


def _answers(
    delivery: Delivery, record: StoredEscalation, comments: list[Comment]
) -> list[Comment]:
    """Return the comments that may be the answer: made after ours, by others who may answer."""
    if record.comment is not None:
        ids = [each.id for each in comments]
        first = ids.index(record.comment) + 1 if record.comment in ids else len(ids)
        comments = comments[first:]
    system = delivery.system
    return [each for each in comments if not system.is_own(each) and system.may_answer(each)]


def answer_by_text(
    store: Store, name: str, text: str, *, by: str | None = None
) -> StoredEscalation:
    """Answer as a comment does: feedback, unless it starts with ``/result`` or ``/give-up``."""
    text = text.strip()
    command, _, rest = text.partition(" ") if " " in text.split("\n")[0] else text.partition("\n")
    match command.strip():
        case "/result":
            return give_result_in_words(store, name, rest.strip(), by=by)
        case "/give-up":
            return give_up(store, name, rest.strip(), by=by)
        case _:
            return give_feedback(store, name, text, by=by)
