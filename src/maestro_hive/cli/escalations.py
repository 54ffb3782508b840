"""``maestro escalations``: the failures that wait for a person, and what their tickets say."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from maestro_hive.cli import output
from maestro_hive.cli.command import verb, verb_group
from maestro_hive.engine.callers_tickets import chosen_system
from maestro_hive.engine.config import get_execution_config
from maestro_hive.hive import escalations
from maestro_hive.hive.keeping_escalations import sync_all
from maestro_hive.maestro.state.plain import to_dict

if TYPE_CHECKING:
    from maestro_hive.cli.command import Call
    from maestro_hive.hive.escalations import EscalationView


@verb_group("escalations", alone=True)
def escalations_command(call: Call) -> None:
    """List the failures that wait for a person.

    A step with escalate=True that failed for good waits until a person says what to do: feedback
    for further attempts, its result, or that nobody can help. With a ticket system configured, such
    as by JIRA_BASE_URL, each failure has one ticket, and a comment on it, by an account that may
    answer, is the answer once the ticket is resolved. A failure of an executor is listed until it is
    retried.

    Examples:
        maestro escalations                              what waits, and since when
        maestro escalations --json                       with descriptions, for another program
        maestro answer esc-1f0c2a99d3 "use the mirror"   answer one
        maestro escalations sync                         make tickets, and take answers from them
    """
    with call.reading() as reader:
        found = escalations.list_escalations(reader)
    if call.wants_json:
        call.print_json(escalations=[to_dict(each) for each in found])
        return
    output.table(
        ["id", "status", "run", "step", "since", "ticket", "failure"],
        [_row(each) for each in found],
        empty="nothing waits for a person: no step has been escalated",
    )
    for each in found:
        if each.problem is not None:
            output.note(f"{each.id}: {each.problem}")


def _row(each: EscalationView) -> list[output.Cell]:
    ticket = each.address or each.ticket
    if ticket is None:
        ticket = "none" if each.system is None else "sent" if each.delivered else "—"
    return [each.id, each.status, each.run_id, each.step, each.asked_at, ticket, each.summary]


@verb("sync", group=escalations_command, reads=True)
def sync_escalations(call: Call) -> None:
    """Make the tickets that are yet to be made, and take the answers of those that are resolved.

    Workers do so all the time. Where there is none, this does it once: what could not be delivered
    is tried now, though its wait is not over. An answer wakes a run that belongs to workers; another
    one takes it when its program is started. The ticket system is that of the configuration.

    Examples:
        maestro escalations sync
    """
    system = chosen_system(get_execution_config())
    if system is None:
        raise click.UsageError(
            "No ticket system is configured (as by JIRA_BASE_URL); escalations wait locally, and"
            " 'maestro answer' answers them.",
            click.get_current_context(silent=True),
        )
    with call.writing() as store:
        answered = asyncio.run(sync_all(store, system))
        left = escalations.list_escalations(store)
    if call.wants_json:
        call.print_json(answered=answered, escalations=[to_dict(each) for each in left])
        return
    for name in answered:
        output.line(f"escalation {name} has its answer")
    waiting = sum(each.status in ("waiting", "failed") for each in left)
    output.line(f"{output.many(waiting, 'escalation')} waiting for a person")
    for each in left:
        if each.problem is not None:
            output.note(f"{each.id}: {each.problem}")
