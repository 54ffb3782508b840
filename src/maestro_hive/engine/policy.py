"""Policy: an enforcer decides, before a task is called, whether a persona may; with an audit log."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from maestro_hive.engine.errors import GovernanceViolation
from maestro_hive.kernel.errors import StorageError
from maestro_hive.kernel.files import reason_of

if TYPE_CHECKING:
    from maestro_hive.engine.step import StepExecution
    from maestro_hive.kernel.clock import Clock

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


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentContext:
    """The agent that makes a call."""

    agent_id: str
    role: str


class Verdict(Protocol):
    """An enforcer's decision."""

    @property
    def allowed(self) -> bool:
        """Whether the call is allowed."""
        ...


class Enforcer(Protocol):
    """Decides which calls agents may make."""

    def check(
        self, *, agent: AgentContext, tool_name: str, target_path: str | None, action: str
    ) -> Verdict:
        """Return whether an agent may use a tool on a target."""
        ...


class PolicyCheck:
    """Checks a step with an enforcer before it is executed; a ``StepCheck`` of the engine."""

    def __init__(
        self, enforcer: Enforcer, persona: str, role: str, audit_log: str | None, clock: Clock
    ) -> None:
        self._enforcer = enforcer
        self._agent = AgentContext(agent_id=persona, role=role)
        self._audit_log = audit_log
        self._clock = clock

    async def check(self, step: StepExecution) -> None:
        """Raise ``GovernanceViolation`` if the step is forbidden; write the decision to the log."""
        tool = getattr(step.task, "__name__", step.name)
        arguments, agent = step.arguments(), self._agent
        named = next((arguments[name] for name in _TARGETS if arguments.get(name)), None)
        target = None if named is None else str(named)
        verdict = self._enforcer.check(
            agent=agent, tool_name=tool, target_path=target, action=infer_action(tool)
        )
        violation = getattr(verdict, "violation_type", None)
        kind = str(getattr(violation, "value", violation)) if violation else None
        message = str(getattr(verdict, "message", ""))
        if self._audit_log is not None:
            entry = {
                "timestamp": self._clock.now().isoformat(),
                "persona_id": agent.agent_id,
                "role": agent.role,
                "tool": tool,
                "path": target,
                "allowed": verdict.allowed,
                "violation_type": kind,
                "message": message,
                "latency_ms": getattr(verdict, "latency_ms", 0),
            }
            _write(Path(self._audit_log), entry)
        if not verdict.allowed:
            raise GovernanceViolation(
                message or f"{agent.agent_id} ({agent.role}) may not use {tool}",
                kind or "policy_violation",
                path=target,
                tool_name=tool,
                agent_id=agent.agent_id,
            )


def infer_action(tool_name: str) -> str:
    """Return what a tool does, by its name: write, delete, read, or else execute."""
    words = re.sub(_BETWEEN_WORDS, " ", tool_name).lower()
    for action, pattern in _ACTIONS.items():
        if re.search(pattern, words):
            return action
    return "execute"


def _write(path: Path, entry: dict[str, Any]) -> None:
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
