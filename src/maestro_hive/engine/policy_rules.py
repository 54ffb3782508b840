"""A policy file: read, checked against its schema, and what it decides about a call."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from maestro_hive.engine.policy_paths import PathPattern, Place, matches_any, place_of
from maestro_hive.kernel.errors import ConfigurationError
from maestro_hive.kernel.files import reason_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from maestro_hive.engine.policy import AgentContext

Effect: TypeAlias = Literal["allow", "deny", "ask"]

#: The role of an agent that was given none.
DEFAULT_ROLE = "developer_agent"
#: The role that stands for all that are not named.
_ANY_ROLE = "*"
#: A file that is larger is no policy.
_MOST_BYTES = 1 << 20


class PolicyError(ConfigurationError):
    """A policy file cannot be used; ``problems`` has all that is wrong with it, with its place."""

    def __init__(self, path: Path, problems: list[str]) -> None:
        listed = "".join(f"\n  {each}" for each in problems)
        super().__init__(f"the policy {path} cannot be used:{listed}")
        self.path = path
        self.problems = problems


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a policy decides about one call, and by which rule; a verdict of an enforcer."""

    effect: Effect
    #: The place of the rule in the file, such as ``rules[2]`` or ``default``.
    rule: str
    message: str
    violation_type: str | None = None
    latency_ms: float = 0.0

    @property
    def allowed(self) -> bool:
        """Whether the call may be made without asking anybody."""
        return self.effect == "allow"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    place: str
    name: str
    effect: Effect
    roles: tuple[str, ...] | None
    tools: tuple[str, ...] | None
    actions: tuple[str, ...] | None
    paths: tuple[PathPattern, ...] | None

    def matches(self, call: _Call) -> bool:
        """Return whether it decides; what allows must match exactly, what does not, in any case."""
        loosely = self.effect != "allow"
        for name, patterns in ((call.role, self.roles), (call.tool, self.tools)):
            if patterns is not None and not matches_any(name, patterns, ignore_case=loosely):
                return False
        if self.actions is not None and call.action not in self.actions:
            return False
        return self.paths is None or self._reaches(call, self.paths)

    def _reaches(self, call: _Call, paths: tuple[PathPattern, ...]) -> bool:
        place = call.place
        if place is None:
            return False
        if self.effect == "allow":
            return any(path.allows(place) for path in paths)
        return any(path.forbids(place, call.action) for path in paths)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Role:
    place: str
    allow_tools: tuple[str, ...] | None = None
    deny_tools: tuple[str, ...] = ()
    concurrent: int | None = None
    min_budget: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    agent: str
    role: str
    tool: str
    action: str
    target: str | None
    place: Place | None
    budget: float

    def __str__(self) -> str:
        on = "" if self.target is None else f" on {self.target}"
        return f"{self.agent} ({self.role}) may not {self.action} with {self.tool}{on}"


class Policy:
    """The rules of a policy file. What forbids comes first, then what asks, then what allows."""

    def __init__(self, given: Mapping[str, Any], path: Path, workspace: Path) -> None:
        """Take what a file says; ``PolicyError`` lists everything that is wrong with it."""
        problems = [*_problems(given)]
        if problems:
            raise PolicyError(path, problems)
        self.path = path
        self.workspace = workspace
        self._broken: list[str] = []
        self.default: Effect = given["default"]
        protected = given.get("protected", {})
        self._protected = self._patterns("protected.paths", protected.get("paths", ()))
        self._protected_actions = protected.get("actions")
        limits = given.get("limits", {})
        self.concurrent_personas: int | None = limits.get("concurrent_personas")
        self._min_budget: float | None = limits.get("min_budget_remaining")
        self._personas: dict[str, str] = dict(given.get("personas", {}))
        self._roles = {name: _role(name, each) for name, each in given.get("roles", {}).items()}
        self._rules = [self._rule(at, each) for at, each in enumerate(given.get("rules", ()))]
        if self._broken:
            raise PolicyError(path, self._broken)

    @classmethod
    def from_file(cls, path: str | Path, workspace: str | Path | None = None) -> Self:
        """Read a policy from a TOML or JSON file; its paths are relative to the workspace."""
        place = Path(path).expanduser().absolute()
        folder = Path.cwd() if workspace is None else Path(workspace).expanduser().absolute()
        return cls(_read(place), place, folder)

    def role_of(self, persona: str) -> str:
        """Return the role of a persona that was given none by its step."""
        return self._personas.get(persona, DEFAULT_ROLE)

    def concurrent_in(self, role: str) -> int | None:
        """Return how many personas of a role may work at once."""
        found = self._known_role(role)
        return None if found is None else found.concurrent

    def _known_role(self, role: str) -> _Role | None:
        return self._roles.get(role) or self._roles.get(_ANY_ROLE)

    def summary(self) -> str:
        """Return in one line what it has."""
        counts = {
            "protected path": len(self._protected),
            "role": len(self._roles),
            "persona": len(self._personas),
            "rule": len(self._rules),
        }
        listed = [f"{count} {name}{'' if count == 1 else 's'}" for name, count in counts.items()]
        return f"{', '.join(listed)}; default: {self.default}"

    # --- deciding ---

    def decide(
        self, agent: AgentContext, tool: str, target: str | None = None, action: str = "execute"
    ) -> Decision:
        """Return what is decided about a call."""
        place = None if target is None else place_of(target, self.workspace)
        call = _Call(
            agent=agent.agent_id,
            role=agent.role,
            tool=tool,
            action=action,
            target=target,
            place=place,
            budget=agent.budget_remaining,
        )
        stages = (self._denied(call), self._by_rule(call, "ask"), self._allowed(call))
        found = next(chain.from_iterable(stages), None)
        if found is not None:
            return found
        if self.default == "allow":
            return Decision(effect="allow", rule="default", message="nothing forbids it")
        return _denial(call, "default", "default_deny", "nothing allows it")

    def _denied(self, call: _Call) -> Iterator[Decision]:
        actions = self._protected_actions
        if call.place is not None and (actions is None or call.action in actions):
            for at, pattern in enumerate(self._protected):
                if pattern.forbids(call.place, call.action):
                    where = f"protected.paths[{at}]"
                    yield _denial(call, where, "protected_path", f"{pattern} is protected")
        role = self._known_role(call.role)
        if role is not None:
            denied = matches_any(call.tool, role.deny_tools, ignore_case=True)
            if denied is not None:
                where = f"{role.place}.deny_tools"
                yield _denial(call, where, "forbidden_tool", f"{denied!r} is denied to the role")
        yield from self._by_rule(call, "deny")
        if role is not None and role.allow_tools is not None:
            allowed = matches_any(call.tool, role.allow_tools, ignore_case=False)
            if allowed is None:
                where, tools = f"{role.place}.allow_tools", ", ".join(role.allow_tools)
                yield _denial(call, where, "forbidden_tool", f"the role may use {tools}")
        yield from self._too_poor(call, role)

    def _too_poor(self, call: _Call, role: _Role | None) -> Iterator[Decision]:
        least = {"limits": self._min_budget}
        if role is not None:
            least[role.place] = role.min_budget
        for place, tokens in least.items():
            if tokens is not None and call.budget < tokens:
                text = f"{call.budget:,.0f} tokens are left, and {tokens:,.0f} must be"
                yield _denial(call, f"{place}.min_budget_remaining", "budget", text)

    def _by_rule(self, call: _Call, effect: Effect) -> Iterator[Decision]:
        for rule in self._rules:
            if rule.effect != effect or not rule.matches(call):
                continue
            if effect == "deny":
                yield _denial(call, rule.place, "forbidden", rule.name)
            elif effect == "ask":
                text = f"{call}: it needs approval ({rule.name})"
                yield Decision(
                    effect="ask", rule=rule.place, message=text, violation_type="approval_required"
                )
            else:
                yield Decision(effect="allow", rule=rule.place, message=rule.name)

    def _allowed(self, call: _Call) -> Iterator[Decision]:
        yield from self._by_rule(call, "allow")
        role = self._known_role(call.role)
        # A tool that is allowed is allowed everywhere, unless rules say where.
        if role is not None and role.allow_tools and not self._has_path_rules(call):
            where = f"{role.place}.allow_tools"
            yield Decision(effect="allow", rule=where, message="the role may use the tool")

    def _has_path_rules(self, call: _Call) -> bool:
        """Return whether rules with paths allow something to the role: then only that."""
        return call.place is not None and any(
            rule.effect == "allow"
            and rule.paths is not None
            and (rule.roles is None or matches_any(call.role, rule.roles, ignore_case=False))
            for rule in self._rules
        )

    # --- reading ---

    def _rule(self, at: int, given: Mapping[str, Any]) -> _Rule:
        place, paths = f"rules[{at}]", given.get("paths")
        return _Rule(
            place=place,
            name=given.get("name") or f"rule {at + 1}",
            effect=given["effect"],
            roles=_texts(given.get("roles")),
            tools=_texts(given.get("tools")),
            actions=_texts(given.get("actions")),
            paths=None if paths is None else self._patterns(f"{place}.paths", paths),
        )

    def _patterns(self, place: str, given: Any) -> tuple[PathPattern, ...]:
        made: list[PathPattern] = []
        for at, text in enumerate(given):
            try:
                made.append(PathPattern(text, self.workspace))
            except re.error as error:
                self._broken.append(f"{place}[{at}]: {text!r} is no pattern: {error}")
        return tuple(made)


def _denial(call: _Call, rule: str, kind: str, why: str) -> Decision:
    return Decision(effect="deny", rule=rule, message=f"{call}: {why}", violation_type=kind)


def _role(name: str, given: Mapping[str, Any]) -> _Role:
    return _Role(
        place=f"roles.{name}",
        allow_tools=_texts(given.get("allow_tools")),
        deny_tools=_texts(given.get("deny_tools")) or (),
        concurrent=given.get("concurrent"),
        min_budget=given.get("min_budget_remaining"),
    )


def _texts(given: Any) -> tuple[str, ...] | None:
    return None if given is None else tuple(given)


def _read(path: Path) -> Mapping[str, Any]:
    import tomllib

    if path.suffix not in {".toml", ".json"}:
        raise PolicyError(path, ["its name must end with .toml or .json"])
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise PolicyError(path, [f"it has more than {_MOST_BYTES:,} bytes"])
        text = data.decode()
        given = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise PolicyError(path, [f"it cannot be read: {reason_of(error)}"]) from error
    except ValueError as error:  # of TOML, of JSON, and of UTF-8
        raise PolicyError(path, [f"it cannot be parsed: {error}"]) from error
    if not isinstance(given, dict):
        raise PolicyError(path, ["it must be an object, with a member 'default'"])
    return given


@cache
def policy_schema() -> dict[str, Any]:
    """Return the JSON Schema of policy files."""
    from importlib.resources import files as resources

    path = resources("maestro_hive.engine").joinpath("schemas/policy.schema.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _problems(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield everything that is wrong with a policy, each with its place."""
    from jsonschema import Draft202012Validator

    errors = Draft202012Validator(policy_schema()).iter_errors(given)
    for error in sorted(errors, key=lambda each: [str(part) for part in each.absolute_path]):
        place = "".join(_step(part) for part in error.absolute_path).lstrip(".")
        yield f"{place or 'the file'}: {error.message[:200]}"


def _step(part: str | int) -> str:
    return f"[{part}]" if isinstance(part, int) else f".{part}"


class PolicyEnforcer:
    """An enforcer that decides by a policy file; it is read once, when this is made."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @classmethod
    def from_file(cls, path: str | Path, workspace: str | Path | None = None) -> Self:
        """Read a policy from a TOML or JSON file; its paths are relative to the workspace.

        That is the current folder, unless it is given. ``PolicyError`` lists all that is wrong.
        """
        return cls(Policy.from_file(path, workspace))

    def check(
        self,
        agent: AgentContext,
        tool_name: str,
        target_path: str | None = None,
        action: str = "execute",
    ) -> Decision:
        """Return whether an agent may use a tool on a target, and by which rule."""
        started = time.perf_counter()
        made = self.policy.decide(agent, tool_name, target_path, action)
        took = round((time.perf_counter() - started) * 1000, 3)
        return Decision(
            effect=made.effect,
            rule=made.rule,
            message=made.message,
            violation_type=made.violation_type,
            latency_ms=took,
        )
