"""Policy: an enforcer decides, before a task is called, whether a persona may; with an audit log."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

from maestro_hive.engine.context import current_step
from maestro_hive.engine.errors import GovernanceViolation
from maestro_hive.engine.failures import plain_text
from maestro_hive.engine.limits import Limit
from maestro_hive.engine.policy_paths import arguments_of, places_asked, targets_of
from maestro_hive.engine.policy_rules import DEFAULT_ROLE, Decision, PolicyEnforcer
from maestro_hive.engine.values import in_thread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from maestro_hive.engine.attempt import Admission
    from maestro_hive.engine.audit import AuditLog
    from maestro_hive.engine.step import StepExecution
    from maestro_hive.maestro.state.codec import Json
    from maestro_hive.maestro.state.store import Store

#: Words in a tool's name that imply an action; the first match counts. Short ones are matched as
#: whole words: "forget" does not contain "get".
_ACTIONS = {
    "write": r"write|edit|create|update|\bset\b",
    "delete": r"delete|remove|unlink|\brm(dir|tree)?\b",
    "read": r"\bread|fetch|\b(get|cat|head|tail)\b",
}
#: The kinds of violations that it is if a person did not approve a call, and if the enforcer failed.
_REFUSED, _FAILED = "approval_refused", "enforcer_failed"
#: What separates the words of a name: non-alphabetic characters, or the start of a capitalised word.
_BETWEEN_WORDS = r"[^A-Za-z]+|(?<=[a-z])(?=[A-Z])"


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


class Approval(NamedTuple):
    """What a person said about a call that needs approval, and who it was."""

    given: bool
    by: str | None = None


class Approver(Protocol):
    """Asks a person whether a call may be made, durably."""

    async def ask(self, step: StepExecution, about: dict[str, Json]) -> Approval:
        """Return the answer; the same again for the same step and question, also after a kill."""
        ...


class _Asked(NamedTuple):
    """A target of a call, and what the enforcer decided about it, or how it failed to."""

    target: str | None
    allowed: bool = False
    kind: str | None = None
    message: str = ""
    latency_ms: Any = 0
    #: The rule of a policy file, and whether a person has to approve.
    rule: str | None = None
    needs_approval: bool = False
    failure: Exception | None = None


class PolicyCheck:
    """Checks a step with an enforcer before it is executed; a ``StepCheck`` of the engine.

    Without a ``role``, it is that of the persona in the policy. Without an ``approver``, what needs
    approval is refused.
    """

    def __init__(
        self,
        enforcer: Enforcer,
        role: str | None = None,
        audit_log: AuditLog | None = None,
        approver: Approver | None = None,
    ) -> None:
        self._enforcer = enforcer
        self._role = role
        self._audit_log = audit_log
        self._approver = approver

    async def check(self, step: StepExecution) -> None:
        """Raise ``GovernanceViolation`` if the step is forbidden; write each decision to the log.

        The enforcer is asked about each target, also about where it leads; the first refusal decides.
        """
        call = await self._call(step)
        waiting: list[_Asked] = []
        for target in call.targets:
            asked = self._decided(call, target)
            if asked.needs_approval:
                waiting.append(asked)
                continue
            await self._write(step, call, asked, allowed=asked.allowed)
            if not asked.allowed:
                raise _violation(call, asked) from asked.failure
        if waiting:
            await self._ask(step, call, waiting)

    def _decided(self, call: _Call, target: str | None) -> _Asked:
        """Ask the enforcer about a target; one that fails, or whose verdict cannot be read, forbids."""
        try:
            verdict = self._enforcer.check(
                agent=call.agent, tool_name=call.tool, target_path=target, action=call.action
            )
            return _read_verdict(call, target, verdict)
        except Exception as error:  # noqa: BLE001 - the user's own enforcer
            name = type(self._enforcer).__name__
            text = f"{call}: the enforcer {name} failed: {plain_text(error)}"
            return _Asked(target, kind=_FAILED, message=text, failure=error)

    async def _ask(self, step: StepExecution, call: _Call, waiting: Sequence[_Asked]) -> None:
        """Ask a person about all of it at once; raise if the answer is no."""
        if self._approver is None:
            await self._write(step, call, waiting[0], allowed=False)
            text = "; only a step of a Hive can ask for it"
            raise _violation(call, waiting[0], text)
        about: dict[str, Json] = {
            "tool": call.tool,
            "action": call.action,
            "persona": call.agent.agent_id,
            "role": call.agent.role,
            "paths": [each.target for each in waiting if each.target is not None],
            "rule": waiting[0].rule,
        }
        approval = await self._approver.ask(step, about)
        for each in waiting:
            await self._write(step, call, each, allowed=approval.given, approval=approval)
        if not approval.given:
            who = f" by {approval.by}" if approval.by else ""
            raise _violation(call, waiting[0], f"; it was refused{who}", kind=_REFUSED)

    async def _write(
        self,
        step: StepExecution,
        call: _Call,
        asked: _Asked,
        *,
        allowed: bool,
        approval: Approval | None = None,
    ) -> None:
        """Write a decision to the audit log; raise if that fails, so that no call goes unrecorded."""
        log = self._audit_log
        if log is None:
            return
        facts: dict[str, Any] = {
            "timestamp": step.spec.clock.now().isoformat(),
            "persona_id": call.agent.agent_id,
            "role": call.agent.role,
            "tool": call.tool,
            "path": asked.target,
            "allowed": allowed,
            "violation_type": None if allowed else asked.kind,
            "message": asked.message,
            "latency_ms": asked.latency_ms,
            "action": call.action,
            "step": step.name,
            "run_id": step.record.run_id,
        }
        if asked.rule is not None:
            facts["rule"] = asked.rule
        if approval is not None:
            facts["violation_type"] = None if allowed else _REFUSED
            facts["approved_by" if allowed else "refused_by"] = approval.by
        await in_thread(lambda: log.write(facts))  # it waits for the disk, and for other processes

    async def _call(self, step: StepExecution) -> _Call:
        tool = getattr(step.task, "__name__", step.name)
        given = await step.arguments_to_check()
        workspace = step.spec.workspace or _workspace_of(self._enforcer)
        named = targets_of(arguments_of(step.task, *given))
        asked = [place for target in named for place in places_asked(target, workspace)]
        targets: list[str | None] = [*dict.fromkeys(asked)]
        return _Call(tool, infer_action(tool), self._agent(step), targets or [None])

    def _agent(self, step: StepExecution) -> AgentContext:
        outer, budget = current_step.get(), step.spec.budget
        return AgentContext(
            agent_id=step.spec.persona,
            role=role_of(self._enforcer, step.spec.persona, self._role),
            current_tokens=budget.used,
            recursion_depth=0 if outer is None else outer.depth + 1,
            budget_remaining=min(float(budget.remaining), step.record.tokens_left()),
        )


class _Call(NamedTuple):
    tool: str
    action: str
    agent: AgentContext
    targets: Sequence[str | None]

    def __str__(self) -> str:
        return f"{self.agent.agent_id} ({self.agent.role}) may not use {self.tool}"


def _read_verdict(call: _Call, target: str | None, verdict: Verdict) -> _Asked:
    decision = verdict if isinstance(verdict, Decision) else None
    message = message_of(verdict)
    if not hasattr(verdict, "allowed"):
        message = (
            f"{message or call}: the enforcer answered {verdict!r:.60}, which has no `allowed`"
        )
    return _Asked(
        target,
        allowed=getattr(verdict, "allowed", None) is True,
        kind=kind_of(verdict),
        message=message,
        latency_ms=getattr(verdict, "latency_ms", 0),
        rule=None if decision is None else decision.rule,
        needs_approval=decision is not None and decision.effect == "ask",
    )


def _violation(
    call: _Call, asked: _Asked, more: str = "", kind: str | None = None
) -> GovernanceViolation:
    return GovernanceViolation(
        f"{asked.message or call}{more}",
        kind or asked.kind or "policy_violation",
        path=asked.target,
        tool_name=call.tool,
        agent_id=call.agent.agent_id,
    )


def kind_of(verdict: Verdict) -> str | None:
    """Return the kind of violation that a verdict names, an enum or a text."""
    violation = getattr(verdict, "violation_type", None)
    return str(getattr(violation, "value", violation)) if violation else None


def message_of(verdict: Verdict) -> str:
    """Return what a verdict says."""
    return str(getattr(verdict, "message", None) or getattr(verdict, "reason", None) or "")


def role_of(enforcer: Enforcer, persona: str, given: str | None) -> str:
    """Return the role of a persona: the one it was given, or that of the policy."""
    if given is not None:
        return given
    return (
        enforcer.policy.role_of(persona) if isinstance(enforcer, PolicyEnforcer) else DEFAULT_ROLE
    )


def _workspace_of(enforcer: Enforcer) -> Path:
    """Return the folder that paths are relative to, where the step does not say."""
    return enforcer.policy.workspace if isinstance(enforcer, PolicyEnforcer) else Path.cwd()


# --- how many at once -----------------------------------------------------------------------------

_in_memory: WeakKeyDictionary[PolicyEnforcer, Store] = WeakKeyDictionary()


class ConcurrentPersonas:
    """A stage that lets so many personas work at once, in all processes on a store together.

    A step inside of a step works in the place of the outer one.
    """

    def __init__(self, limit: Limit) -> None:
        self._limit = limit

    async def enter(self, step: StepExecution) -> Admission | None:
        """Return when one more may work."""
        return None if step.is_nested() else await self._limit.enter(step)


def policy_stages(
    enforcer: Enforcer | None, store: Store | None, persona: str, role: str | None
) -> tuple[ConcurrentPersonas, ...]:
    """Return the stages by which a policy limits the attempts of a persona's steps.

    Without a store, what this enforcer limits in this process is counted in memory.
    """
    if not isinstance(enforcer, PolicyEnforcer):
        return ()
    if store is None:
        from maestro_hive.maestro.state.memory import MemoryStore

        store = _in_memory.setdefault(enforcer, MemoryStore())
    policy, own = enforcer.policy, role_of(enforcer, persona, role)
    limits = {f"policy/role/{own}": policy.concurrent_in(own), "policy": policy.concurrent_personas}
    return tuple(
        ConcurrentPersonas(Limit(store, name, rate=None, max_concurrency=most))
        for name, most in limits.items()
        if most is not None
    )


def infer_action(tool_name: str) -> str:
    """Return what a tool does, by its name: write, delete, read, or else execute."""
    words = re.sub(_BETWEEN_WORDS, " ", tool_name).lower()
    for action, pattern in _ACTIONS.items():
        if re.search(pattern, words):
            return action
    return "execute"
