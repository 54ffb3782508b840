"""Audit logs and policies, as people examine them."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from maestro_hive.admin.folder import reading
from maestro_hive.engine import audit
from maestro_hive.engine.policy import AgentContext, infer_action
from maestro_hive.kernel.errors import ConfigurationError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from maestro_hive.engine.audit import AuditReport
    from maestro_hive.engine.policy_rules import Decision, Policy
    from maestro_hive.maestro.state.store import Reader


def verify_audit(folder: Path, file: Path | None = None) -> list[AuditReport]:
    """Return whether a log is as it was written; without one, all that the journal anchors.

    A log without a journal is verified as far as that can be.
    """
    with _reading(folder, needed=file is None) as reader:
        if file is not None:
            return [audit.verify(file, reader)]
        assert reader is not None
        return [audit.verify(each, reader) for each in _logs(reader, folder)]


def _reading(folder: Path, *, needed: bool) -> AbstractContextManager[Reader | None]:
    if not needed and not (folder / "journal.db").exists():
        return nullcontext()
    return reading(folder)


def _logs(reader: Reader, folder: Path) -> list[Path]:
    found = audit.anchored_logs(reader, folder)
    if not found:
        raise ConfigurationError(
            f"the journal in {reader.location} anchors no audit log; a Hive with a policy or an enforcer"
            " writes one, or name a file"
        )
    return found


def audit_entries(
    folder: Path,
    file: Path | None = None,
    *,
    run: str | None = None,
    persona: str | None = None,
    denied: bool = False,
    limit: int | None = None,
) -> list[dict[str, Any]]:
    """Return the last decisions of a log, or of all that the journal anchors, oldest first."""
    if file is None:
        with reading(folder) as reader:
            logs = _logs(reader, folder)
    else:
        logs = [file]
    found: deque[dict[str, Any]] = deque(maxlen=limit)
    for log in logs:
        for entry in audit.entries(log):
            if run is not None and entry.get("run_id") != run:
                continue
            if persona is not None and entry.get("persona_id") != persona:
                continue
            if denied and entry.get("allowed") is True:
                continue
            found.append(entry)
    return [*found]


def decide(
    policy: Policy,
    *,
    tool: str,
    path: str | None = None,
    role: str | None = None,
    persona: str = "default",
    action: str | None = None,
    budget: float = float("inf"),
) -> Decision:
    """Return what a policy decides about a call."""
    agent = AgentContext(
        agent_id=persona, role=role or policy.role_of(persona), budget_remaining=budget
    )
    return policy.decide(agent, tool, path, action or infer_action(tool))
