"""``maestro policy`` and ``audit``: what a policy decides, and what was decided."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from maestro_hive.cli import output
from maestro_hive.cli.command import FAILED, PERSON_NEEDED, SUCCESS, Call, verb, verb_group

if TYPE_CHECKING:
    from maestro_hive.engine.audit import AuditReport
    from maestro_hive.engine.policy_rules import Decision

_FILE_ARGUMENT = click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
_LOG_ARGUMENT = click.argument(
    "file", type=click.Path(path_type=Path), metavar="[FILE]", required=False
)
#: What is printed, and the exit code, by what is decided.
_DECISIONS = {
    "allow": ("allowed", SUCCESS),
    "deny": ("denied", FAILED),
    "ask": ("needs approval", PERSON_NEEDED),
}


@verb_group("policy")
def policy_command(call: Call) -> None:
    """Check a policy file, and what it decides.

    Examples:
        maestro policy check policy.toml                         whether it is valid
        maestro policy check policy.toml --tool write_file --path .env --role developer
    """


@verb("check", group=policy_command, reads=True)
@_FILE_ARGUMENT
@click.option("--tool", metavar="NAME", help="The function that would be called.")
@click.option("--path", metavar="PATH", help="The path that it would be given.")
@click.option("--role", metavar="ROLE", help="The role of who calls it.  [default: the persona's]")
@click.option("--persona", default="default", metavar="NAME", help="Who calls it.")
@click.option(
    "--action",
    type=click.Choice(["read", "write", "delete", "execute"]),
    help="What it does.  [default: what its name says]",
)
@click.option("--budget", type=float, default=float("inf"), help="How many tokens are left.")
@click.option(
    "--workspace",
    type=click.Path(path_type=Path),
    help="What paths are relative to.  [default: the current folder]",
)
def check_policy(
    call: Call, file: Path, tool: str | None, workspace: Path | None, **given: Any
) -> int:
    """Say whether a policy file is valid, and what it decides about a call.

    All errors of the file are listed, each with its place. With --tool, the decision is printed with the
    rule that made it: the exit code is 0 if the call is allowed, 1 if it is denied, and 75 if a person
    has to approve it. Nothing is called, and nothing is written.

    Examples:
        maestro policy check policy.toml
        maestro policy check policy.toml --tool write_file --path src/a.py --role developer
        maestro policy check policy.json --tool deploy --persona releaser --json
    """
    from maestro_hive.admin import audit
    from maestro_hive.engine.policy_rules import Policy

    others = [name for name in ("path", "role", "action") if given[name] is not None]
    if tool is None and others:
        raise click.UsageError(f"--{others[0]} is about a call: name the function with --tool.")
    policy = Policy.from_file(file, workspace)
    if tool is None:
        if call.wants_json:
            click.echo(output.to_json({"file": str(file), "valid": True}, indent=2))
        else:
            output.line(f"{file} is valid: {policy.summary()}")
        return SUCCESS
    decision = audit.decide(policy, tool=tool, **given)
    _print_decision(call, decision)
    return _DECISIONS[decision.effect][1]


def _print_decision(call: Call, decision: Decision) -> None:
    if call.wants_json:
        facts = {
            "decision": decision.effect,
            "rule": decision.rule,
            "violation_type": decision.violation_type,
            "message": decision.message,
        }
        click.echo(output.to_json(facts, indent=2))
        return
    text, _ = _DECISIONS[decision.effect]
    output.line(f"{text} by {decision.rule}: {decision.message}")


# --- the audit log --------------------------------------------------------------------------------


@verb_group("audit")
def audit_command(call: Call) -> None:
    """Show what policies decided; verify that it was not changed.

    Examples:
        maestro audit show --denied
        maestro audit verify
    """


@verb("verify", group=audit_command, reads=True)
@_LOG_ARGUMENT
def verify_audit(call: Call, file: Path | None) -> int:
    """Say whether an audit log is as it was written, and complete.

    Without FILE, all logs that the journal of the state folder anchors. A line that was changed, removed,
    inserted or moved is found by the chain of hashes; lines cut off at the end, a rewritten log and a
    deleted one by the number and hash of the last line in the journal. The exit code is 1 if something
    is wrong, and the first wrong line is named.

    Examples:
        maestro audit verify
        maestro audit verify state/audit.jsonl --json
    """
    from maestro_hive.admin import audit

    reports = audit.verify_audit(call.folder, file)
    if call.wants_json:
        call.print_json(logs=[_as_dict(each) for each in reports])
    else:
        for report in reports:
            _print_report(report)
    return SUCCESS if all(each.is_intact for each in reports) else FAILED


def _as_dict(report: AuditReport) -> dict[str, object]:
    return {
        "path": str(report.path),
        "intact": report.is_intact,
        "lines": report.lines,
        "anchored": report.anchored,
        "bad_line": report.bad_line,
        "problem": report.problem,
        "notes": [*report.notes],
    }


def _print_report(report: AuditReport) -> None:
    if report.problem is not None:
        output.complain(f"{report.path}: line {report.bad_line}: {report.problem}")
        return
    anchored = "" if report.anchored is None else ", and complete"
    output.line(f"{report.path}: {output.many(report.lines, 'line')}, as written{anchored}")
    for each in report.notes:
        output.note(f"note: {each}")


@verb("show", group=audit_command, reads=True)
@_LOG_ARGUMENT
@click.option("--run", metavar="RUN", help="Only decisions about steps of this run.")
@click.option("--persona", metavar="NAME", help="Only decisions about this persona.")
@click.option("--denied", is_flag=True, help="Only what was not allowed.")
@click.option("--limit", type=click.IntRange(min=1), default=50, help="How many of the last.")
def show_audit(call: Call, file: Path | None, limit: int, **given: Any) -> None:
    """Show the last decisions, oldest first.

    Without FILE, those of all logs that the journal of the state folder anchors. They are shown as they
    stand in the file: 'maestro audit verify' says whether they can be trusted.

    Examples:
        maestro audit show
        maestro audit show --denied --run checkout-42
        maestro audit show --persona architect --limit 10 --json
    """
    from maestro_hive.admin import audit

    found = audit.audit_entries(call.folder, file, limit=limit, **given)
    if call.wants_json:
        call.print_json(decisions=found)
        return
    output.table(
        ["line", "when", "persona", "tool", "path", "decision", "rule", "run"],
        [_row(each) for each in found],
        empty="nothing was decided so far",
    )


def _row(entry: dict[str, Any]) -> list[output.Cell]:
    allowed = entry.get("allowed") is True
    decision = "allowed" if allowed else str(entry.get("violation_type") or "denied")
    by = entry.get("approved_by") or entry.get("refused_by")
    return [
        entry.get("number"),
        _when(entry.get("timestamp")),
        entry.get("persona_id"),
        entry.get("tool"),
        entry.get("path"),
        output.Styled(f"{decision}, by {by}" if by else decision, "green" if allowed else "red"),
        entry.get("rule"),
        entry.get("run_id"),
    ]


def _when(timestamp: object) -> datetime | str:
    """Return the time of a decision; a line that was changed may have anything."""
    try:
        return datetime.fromisoformat(str(timestamp))
    except ValueError:
        return str(timestamp)
