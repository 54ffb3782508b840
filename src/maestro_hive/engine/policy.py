"""Policy: an enforcer decides, before a task is called, whether a persona may; with an audit log."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from maestro_hive.engine.context import current_step
from maestro_hive.engine.errors import GovernanceViolation
from maestro_hive.kernel.errors import StorageError
from maestro_hive.kernel.files import reason_of

if TYPE_CHECKING:
    from maestro_hive.engine.step import StepExecution

#: Words in a tool's name that imply an action; the first match counts. Short ones are matched as
#: whole words: "forget" does not contain "get".
_ACTIONS = {
    "write": r"write|edit|create|update|\bset\b",
    "delete": r"delete|remove|unlink|\brm(dir|tree)?\b",
    "read": r"\bread|fetch|\b(get|cat|head|tail)\b",
}
#: What separates the words of a name: non-alphabetic characters, or the start of a capitalised word.
_BETWEEN_WORDS = r"[^A-Za-z]+|(?<=[a-z])(?=[A-Z])"
#: Arguments of a task that name its target.
_TARGETS = ("path", "file_path", "target")


@dataclass(frozen=True, slots=True)
class AgentContext:
    """The agent that makes a call: who it is, the tokens it spent, and how many it has left.

    ``recursion_depth`` is how many steps the call is inside of. ``reputation`` is for enforcers
    that keep one: nothing here changes it.
    """

    agent_id: str
    role: str = "developer_agent"
    reputation: int = 50
    current_tokens: int = 0
    recursion_depth: int = 0
    budget_remaining: float = 100.0


class Verdict(Protocol):
    """An enforcer's decision; only ``True`` allows the call.

    It may have a ``violation_type`` (an enum or a text), a ``message`` or ``reason``, and the
    ``latency_ms`` that it took.
    """

    @property
    def allowed(self) -> bool:
        """Whether the call is allowed."""
        ...


class Enforcer(Protocol):
    """Decides which calls agents may make."""

    def check(
        self,
        agent: AgentContext,
        tool_name: str,
        target_path: str | None = None,
        action: str = "execute",
    ) -> Verdict:
        """Return whether an agent may use a tool on a target; it is called with keywords."""
        ...


class PolicyCheck:
    """Checks a step with an enforcer before it is executed; a ``StepCheck`` of the engine."""

    def __init__(
        self, enforcer: Enforcer, role: str = "developer_agent", audit_log: str | None = None
    ) -> None:
        self._enforcer = enforcer
        self._role = role
        self._audit_log = audit_log

    async def check(self, step: StepExecution) -> None:
        """Raise ``GovernanceViolation`` if the step is forbidden; write the decision to the log."""
        tool = getattr(step.task, "__name__", step.name)
        arguments, agent = step.arguments(), self._agent(step)
        named = next((arguments[name] for name in _TARGETS if arguments.get(name)), None)
        target = None if named is None else str(named)
        verdict = self._enforcer.check(
            agent=agent, tool_name=tool, target_path=target, action=infer_action(tool)
        )
        violation = getattr(verdict, "violation_type", None)
        kind = str(getattr(violation, "value", violation)) if violation else None
        message = str(getattr(verdict, "message", None) or getattr(verdict, "reason", None) or "")
        allowed = verdict.allowed is True
        if self._audit_log is not None:
            entry = {
                "timestamp": step.spec.clock.now().isoformat(),
                "persona_id": agent.agent_id,
                "role": agent.role,
                "tool": tool,
                "path": target,
                "allowed": allowed,
                "violation_type": kind,
                "message": message,
                "latency_ms": getattr(verdict, "latency_ms", 0),
            }
            _write(Path(self._audit_log), entry)
        if not allowed:
            raise GovernanceViolation(
                message or f"{agent.agent_id} ({agent.role}) may not use {tool}",
                kind or "policy_violation",
                path=target,
                tool_name=tool,
                agent_id=agent.agent_id,
            )

    def _agent(self, step: StepExecution) -> AgentContext:
        outer, budget = current_step.get(), step.spec.budget
        return AgentContext(
            agent_id=step.spec.persona,
            role=self._role,
            current_tokens=budget.used,
            recursion_depth=0 if outer is None else outer.depth + 1,
            budget_remaining=float(budget.remaining),
        )


def infer_action(tool_name: str) -> str:
    """Return what a tool does, by its name: write, delete, read, or else execute."""
    words = re.sub(_BETWEEN_WORDS, " ", tool_name).lower()
    for action, pattern in _ACTIONS.items():
        if re.search(pattern, words):
            return action
    return "execute"


def _write(path: Path, entry: dict[str, object]) -> None:
    """Append a line to the audit log; raise if that fails, so that no call goes unrecorded."""
    line = json.dumps(entry, ensure_ascii=False, default=str).encode() + b"\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            written = os.write(fd, line)
        finally:
            os.close(fd)
    except OSError as error:
        raise StorageError(f"the audit log {path} cannot be written: {reason_of(error)}") from error
    if written != len(line):
        raise StorageError(f"the audit log {path} was written only in part; free space on its disk")
